"""Test pictures beside a run's page: they exist where there is content, and never make the run fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fairflare.reporting.results import PAGE_FILE
from fairflare_lab.page import write
from fairflare_lab.page.reports import draw_map
from fairflare_lab.page.write import write_run_page
from tests.unit.report_runs import document, read

PNG = b"\x89PNG\r\n\x1a\n"


def results(sites: list[str], rounds: int = 3, **details: Any) -> dict[str, Any]:
    bmu = {site: [k % 2, 1] for k, site in enumerate(sites)}
    som = {"u_matrix": [[0.0, 1.0], [2.0, 3.0]], "bmu": bmu, "sigma": 2.0}
    run = document("fed_mrl", 0, dict.fromkeys(sites, 0.5), rounds)
    for n, record in enumerate(run["rounds"]):
        record["reports"] = {site: {"mu": 0.1 * k} for k, site in enumerate(sites) if (k + n) % 5}
        record["details"] = {"som": som} if n < rounds - 1 else details
    return run


@pytest.fixture(autouse=True)
def pages_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(write.OFF)


@pytest.mark.parametrize(
    ("sites", "rounds"), [(["a"], 1), (["site-1", "site-2"], 2), ([f"s-{k}" for k in range(30)], 20)]
)
def test_files_are_there(tmp_path: Path, sites: list[str], rounds: int) -> None:
    _, *lines = write_run_page(read(**results(sites, rounds + 1)), tmp_path)
    assert sorted(lines) == [f"picture: {tmp_path / name}" for name in ("mu.png", "som_map.png")]
    assert all((tmp_path / name).read_bytes()[:8] == PNG for name in ("som_map.png", "mu.png"))


def test_sites_are_named_where_they_sit() -> None:
    bmu = {f"site-{k}": [0, 1] for k in range(2, 12)} | {"x": [1, 0]}
    som = {"u_matrix": [[1.0, 1.0]] * 2, "bmu": bmu, "sigma": 1.0}
    (axes, _) = draw_map(som, "t", False)().axes
    assert [text.get_text() for text in axes.texts] == ["site-2\nsite-3\nsite-4\nand 7 more", "x"]
    assert [text.get_position() for text in axes.texts] == [(1, 0), (0, 1)]
    (axes, _) = draw_map({**som, "bmu": {"university-hospital-12": [0, 0]}}, "t", False)().axes
    assert [text.get_text() for text in axes.texts] == ["univers…ital-12"]


def test_nothing_to_draw(tmp_path: Path) -> None:
    (line,) = write_run_page(read(**document("a", 0, {"a": 0.5})), tmp_path)
    assert line.startswith("page: ")
    assert [path.name for path in tmp_path.iterdir()] == [PAGE_FILE]


def test_without_matplotlib_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (line,) = write_run_page(read(**results(["a", "b"])), tmp_path)
    assert line.startswith("no page: ")
    assert "fairflare[page]" in line
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_never_costs_the_run(tmp_path: Path) -> None:
    (line,) = write_run_page(read(**results(["a", "b"])), tmp_path / "missing")
    assert "could not be made" in line
