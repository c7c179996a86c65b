"""Test that generated files are up to date, and the front page with its links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fairflare.federation.plan.describe import overview
from fairflare.federation.plan.papers import experiments
from fairflare.federation.plan.task_files import TASKS_BY_KIND
from fairflare.methods.base.catalog import GROUPS, all_methods

from ..loaded import loaded

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool() -> Any:
    return loaded("tools/refresh.py")


@pytest.fixture(scope="module")
def pages() -> Any:
    return loaded("tools/made_pages.py")


@pytest.fixture(scope="module")
def fresh(tool: Any) -> dict[Path, bytes]:
    made: dict[Path, bytes] = tool.contents()
    return made


def test_refresh_changes_nothing(tool: Any, fresh: dict[Path, bytes]) -> None:
    """Check the job folders. If this fails: ``make refresh``."""
    assert sorted(tool.generated()) == sorted(fresh)
    assert [str(path) for path, content in fresh.items() if (ROOT / path).read_bytes() != content] == []


def test_refresh_writes_what_differs_and_removes_what_is_left_over(
    tool: Any, fresh: dict[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for path, content in fresh.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "contents", lambda: fresh)
    assert tool.main() == 0
    assert capsys.readouterr().out == ""
    meta = Path("jobs/afl/meta.json")
    (tmp_path / meta).write_text("{}")
    (tmp_path / "jobs/fed_avg/meta.json").unlink()
    (tmp_path / "jobs" / "gone" / "app").mkdir(parents=True)
    (tmp_path / "jobs" / "gone" / "meta.json").touch()
    (tmp_path / "jobs" / "afl" / "left.json").touch()
    assert tool.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "removed jobs/afl/left.json", "removed jobs/gone/meta.json", f"wrote {meta}",
        "wrote jobs/fed_avg/meta.json",
    ]  # fmt: skip
    assert {path: (tmp_path / path).read_bytes() for path in tool.generated()} == fresh
    assert not (tmp_path / "jobs" / "gone").exists()


def test_what_other_packages_bring_is_not_written(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "plugin_of", lambda method: "theirs" if method.name == "afl" else None)
    with pytest.raises(ValueError, match=r"methods are of other packages, .*: afl"):
        tool.contents()


def test_the_table_has_every_method_with_what_it_is(pages: Any) -> None:
    table = pages.methods_page()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("| `")
    ]
    assert sorted(row[0].strip("` ") for row in rows) == list(all_methods())
    assert {len(row) for row in rows} == {12}
    by_job = {row[0].strip("` "): row for row in rows}
    sent = {job: cells[4] for job, cells in by_job.items() if cells[4] != "1 / 1"}
    parts = dict.fromkeys(("cffl", "cgsv"), "1 / up to 1")
    twice = dict.fromkeys(("fed_lwr", "fed_lwr_cosine", "fed_lwr_last_layer", "scaffold"), "1 / 2")
    assert sent == {"solo": "0 / 1"} | parts | twice  # as the phases of runs count; norms are a hundredth of a network
    own = [name for name, row in by_job.items() if row[3] == "own"]
    assert own == ["fed_rdn", "cffl", "cgsv", "ditto", "fed_bn", "solo"]
    assert by_job["fed_ism"][5:8] == ["2", "yes", "yes"]
    assert by_job["fed_mas"][8] == "classification"
    assert by_job["fed_mrl"][8] == "classification, segmentation"
    assert by_job["bsm_fl"][1] == "[BSM-FL](fed_mas.md)"
    assert by_job["fed_rdn"][9] == "[all_methods](results/all_methods.md) +0.08"
    assert by_job["fed_avg"][9] == ""
    assert by_job["fed_dyn"][10] == "[48a19fa](https://github.com/alpemreacar/FedDyn/tree/48a19fa) 4e-16"


def test_what_goes_with_differential_privacy_is_what_a_site_would_train() -> None:
    private = {method.name for method in overview() if method.private}
    assert {"fed_avg", "fed_prox", "fed_heal", "fed_opt"} <= private
    assert {"fed_ism", "fed_lwr", "q_fed_avg"} <= private  # reports have noise, or stay at the site
    refused = {"bsm_fl", "crt", "ditto", "fed_bn", "scaffold"}
    assert not refused & private  # balanced softmax counts classes, cRT trains further rounds


def test_groups_are_those_of_the_catalog_and_each_has_methods() -> None:
    assert list(dict.fromkeys((m.group, m.fair_to) for m in overview())) == list(GROUPS.values())


def test_every_method_says_what_it_does_and_where_it_is_from() -> None:
    for method in overview():
        assert method.summary, method.name
        assert method.source, method.name
        assert set(method.learns) <= set(TASKS_BY_KIND)
        assert method.learns[0] == all_methods()[method.name].task
        if method.page is not None:
            assert (ROOT / "docs" / f"{method.page}.md").is_file(), f"{method.name}: write docs/{method.page}.md"


def test_the_pages_that_are_in_no_file(pages: Any) -> None:
    made = pages.pages()
    assert sorted(made) == ["index.md", "methods.md", "papers.md", "what_leaves.md"]
    front = pages.front_page("[a](docs/a.md#b) [c](poc/README.md) ![d](docs/d.png) [e](https://e) [f](#f)")
    assert front == "[a](a.md#b) [c](../poc/README.md) ![d](d.png) [e](https://e) [f](#f)"
    for paper in experiments():
        assert f"## `--paper {paper}`" in made["papers.md"]


def test_the_page_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_pictures_are_small() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).read_bytes()[:4] == b"\x89PNG"
        assert (ROOT / picture).stat().st_size < 200_000
