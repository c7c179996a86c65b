"""Test the page beside a run's results: it is one file, and never makes the run fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fairflare.reporting.results import PAGE_FILE
from fairflare_lab.page import write
from fairflare_lab.page.write import write_run_page
from tests.unit.report_runs import document, read


def results(sites: list[str], rounds: int = 3) -> dict[str, Any]:
    run = document("fed_mrl", 0, dict.fromkeys(sites, 0.5), rounds)
    for n, record in enumerate(run["rounds"]):
        record["reports"] = {site: {"mu": 0.1 * k} for k, site in enumerate(sites) if (k + n) % 5}
    return run


@pytest.fixture(autouse=True)
def pages_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(write.OFF)


@pytest.mark.parametrize("sites", [["a"], [f"s-{k}" for k in range(30)]])
def test_the_page_is_the_only_file(tmp_path: Path, sites: list[str]) -> None:
    (line,) = write_run_page(read(**results(sites)), tmp_path)
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
