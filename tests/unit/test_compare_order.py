"""Test the runs of a comparison in progress: how many at once, failures, and the estimate of the time left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairflare_lab.cli.compare import runs
from fairflare_lab.cli.compare.runs import Progress, Runner
from fairflare_lab.cli.compare.series import Series, read_entry


def runner_of(folder: Path, *methods: str, at_once: int = 2) -> Runner:
    entries = [read_entry(name) for name in methods]
    return Runner(Series(entries, seeds=[0, 1, 2], task="segmentation", sites=2, rounds=3), folder, {}, at_once=at_once)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return names of runs in the order of their begin; runs of fed_lwr fail, the other ones complete."""
    names: list[str] = []

    def start(self: Runner, progress: Progress) -> tuple[Progress, Any, Any]:
        names.append(progress.run.name)
        progress.state = "running"
        return progress, SimpleNamespace(exitcode=0, join=lambda *_: None, kill=lambda: None), SimpleNamespace()

    def end(self: Runner, progress: Progress, code: int) -> None:
        progress.state = "failed" if progress.run.entry.label == "fed_lwr" else "completed"

    monkeypatch.setattr(Runner, "_start", start)
    monkeypatch.setattr(Runner, "_end", end)
    monkeypatch.setattr(runs, "POLL", 0.0)
    return names


def test_runs_begin_in_the_order_of_the_series_and_one_that_fails_ends_no_other(
    begun: list[str], tmp_path: Path
) -> None:
    runner, at_work = runner_of(tmp_path, "fed_avg", "fed_lwr"), []

    def tell(progress: Progress) -> None:
        at_work.append(sum(p.state == "running" for p in runner.all))

    runner.all[0].state = "completed"
    runner.go(tell)
    assert begun == [p.run.name for p in runner.all[1:]]
    assert [p.state for p in runner.all] == ["completed", "failed"] * 3
    assert max(at_work) == 2


def test_an_interrupted_comparison_tells_its_runs_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ended = runner_of(tmp_path, "fed_avg"), []
    told: list[Progress] = []

    def start(self: Runner, progress: Progress) -> tuple[Progress, Any, Any]:
        progress.state = "running"
        process = SimpleNamespace(exitcode=None, join=lambda *_: None, kill=lambda: ended.append("killed"))
        return progress, process, SimpleNamespace(close=lambda: ended.append("told"))

    monkeypatch.setattr(Runner, "_start", start)
    monkeypatch.setattr(runs, "POLL", 0.0)
    with pytest.raises(KeyboardInterrupt):
        runner.go(told.append, lambda: True)
    assert [p.state for p in runner.all] == ["stopped", "stopped", "waiting"]
    assert ended == ["told", "told", "killed", "killed"]
