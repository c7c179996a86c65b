"""Runs of a comparison that are refused before their first round: corrected, not repeated, told once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairflare.federation.plan.series import Series, read_entry
from fairflare_lab.cli.compare import runs
from fairflare_lab.cli.compare.runs import PLAN_FILE, Progress, Runner
from fairflare_lab.cli.compare.tables import report
from tests.unit.report_runs import document


def test_only_a_run_without_rounds_is_replaced(tmp_path: Path) -> None:
    series = Series([read_entry("fed_avg")], seeds=[0], task="segmentation", sites=2, rounds=1)
    place = tmp_path / "runs" / "fed_avg-seed0"
    place.mkdir(parents=True)
    (place / PLAN_FILE).write_text(json.dumps({"plan": {"num_rounds": 7}, "local": {}, "simulator": False}))

    def there(**more: Any) -> None:
        (place / "results.json").write_text(json.dumps(document("fed_avg", 0, {"a": 0.5, "b": 0.4}) | more))

    there(status="failed", reason="check: no data", test=None)
    with pytest.raises(ValueError, match="holds a run of other settings"):
        Runner(series, tmp_path, {})
    assert place.exists()
    there(status="failed", reason="check: no data", test=None, rounds=[])
    assert Runner(series, tmp_path, {}).all[0].state == "waiting"
    assert not place.exists()


@pytest.mark.parametrize(
    ("ended", "begun"),
    [
        (["no class", "no class", "no class", "no class"], 2),  # so would the others
        (["no class", "no prior", "no class", "no class"], 4),  # for reasons of their own
        (["", "no class", "no class", "no class"], 4),  # one can
    ],
)
def test_what_all_are_refused_for_is_not_tried_by_every_run(
    ended: list[str], begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's 14 rows and 3 seeds on images without classes: 42 runs that say one sentence."""
    entries = [read_entry(name) for name in ("fed_avg", "fed_prox")]
    runner = Runner(Series(entries, seeds=[0, 1], task="segmentation", sites=2, rounds=1), tmp_path, {})
    tried = []

    def start(progress: Progress) -> Any:
        tried.append(progress)
        progress.state = "running"
        return SimpleNamespace(progress=progress)

    def follow(one: Any) -> bool:
        one.progress.reason = ended[len(tried) - 1]
        one.progress.state = "failed" if one.progress.reason else "completed"
        return True

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_follow", follow)
    monkeypatch.setattr(runs, "POLL", 0.0)
    runner.go(lambda progress: None)
    assert len(tried) == begun
    assert [p.state for p in runner.all][begun:] == ["stopped"] * (4 - begun)
    assert all("not begun" in p.reason for p in runner.all[begun:])


def test_a_row_that_was_not_tried_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedISM and FedISM+ learn no masks, FedAvg does."""
    entries = [read_entry(name) for name in ("fed_prox", "fed_bn", "fed_avg")]
    runner = Runner(Series(entries, seeds=[0, 1], task="segmentation", sites=2, rounds=1), tmp_path, {})

    def follow(one: Any) -> bool:
        refused = one.progress.run.entry.label != "fed_avg"
        one.progress.state, one.progress.reason = ("failed", "no class") if refused else ("completed", "")
        return True

    monkeypatch.setattr(runner, "_start", lambda progress: SimpleNamespace(progress=progress))
    monkeypatch.setattr(runner, "_follow", follow)
    monkeypatch.setattr(runs, "POLL", 0.0)
    runner.go(lambda progress: None)
    assert [p.state for p in runner.all] == ["failed", "failed", "completed"] * 2


def test_a_reason_of_many_runs_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = Series([read_entry("fed_avg")], seeds=[0, 1, 2, 3], task="segmentation", sites=2, rounds=1)
    runner = Runner(series, tmp_path, {})
    for progress, reason in zip(runner.all, ["no data", "no data", "no data", "cut off"], strict=True):
        progress.state, progress.reason = "failed", reason
    assert report(runner, "fed_avg", None) == (1, [])
    told = capsys.readouterr().err
    assert "fed_avg-seed0 and 2 more: failed: no data\n" in told
    assert "fed_avg-seed3: failed: cut off\n" in told
