"""Which run of a comparison begins next, and how long it still takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fairflare.federation.plan.series import Series, read_entry
from fairflare_lab.cli.compare import runs
from fairflare_lab.cli.compare.runs import Progress, Runner
from fairflare_lab.cli.compare.view import _left


def runner_of(folder: Path, *methods: str, at_once: int = 2) -> Runner:
    entries = [read_entry(name) for name in methods]
    return Runner(Series(entries, seeds=[0, 1, 2], task="segmentation", sites=2, rounds=3), folder, {}, at_once=at_once)


def put(progress: Progress, state: str, rounds: int, seconds: float) -> None:
    progress.state, progress.rounds, progress.seconds = state, rounds, seconds


@pytest.mark.parametrize(("at_once", "expected"), [(1, "fed_avg-seed1"), (2, "fed_lwr-seed1")])
def test_the_longest_begins_first_once_each_row_has_begun(at_once: int, expected: str, tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "fed_avg", "fed_lwr", "fed_prox", at_once=at_once)
    put(runner.all[0], "completed", 3, 10)
    put(runner.all[1], "running", 1, 20)
    waiting = runner.all[2:]
    assert waiting[runner._next(waiting)].run.name == "fed_prox-seed0"
    put(runner.all[2], "running", 0, 1)  # no round of it has ended: it may be the longest of all
    waiting = runner.all[3:]
    assert at_once == 1 or waiting[runner._next(waiting)].run.name == "fed_prox-seed1"
    put(runner.all[2], "running", 1, 2)
    assert waiting[runner._next(waiting)].run.name == expected


def test_of_rows_that_were_there_before_nothing_is_known(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "fed_avg", "fed_lwr")
    for progress in runner.all[:2]:  # the first seed, in an earlier session
        put(progress, "completed", 3, 0)
        progress.began_at = 3
    put(runner.all[2], "completed", 3, 10)  # fed_avg
    waiting = runner.all[3:]
    assert waiting[runner._next(waiting)].run.name == "fed_lwr-seed1"


def test_a_comparison_goes_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, begun = runner_of(tmp_path, "fed_avg", "fed_lwr"), []

    def start(progress: Progress) -> SimpleNamespace:
        begun.append(progress.run.name)
        put(progress, "running", 0, 0)
        return SimpleNamespace(progress=progress)

    def follow(one: SimpleNamespace) -> bool:
        put(one.progress, "completed", 3, 40 if one.progress.run.entry.label == "fed_lwr" else 10)
        return True

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_follow", follow)
    monkeypatch.setattr(runs, "POLL", 0.0)
    runner.go(lambda progress: None)
    assert [name.replace("fed_", "") for name in begun] == [
        "avg-seed0", "lwr-seed0", "lwr-seed1", "lwr-seed2", "avg-seed1", "avg-seed2",
    ]  # fmt: skip


def test_what_is_left_of_a_run_that_goes_on(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "fed_avg")
    put(runner.all[0], "running", 2, 20)
    runner.all[0].began_at = 1  # 20 s a round: 60 s here, 80 s for a whole one
    assert runner.left() == pytest.approx((40 + 2 * 80) / 2)


def test_rows_not_yet_seen_are_said(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "fed_avg", "fed_lwr", "fed_prox")
    assert _left(runner) == ""
    put(runner.all[0], "running", 1, 10)
    put(runner.all[1], "running", 0, 10)
    assert _left(runner) == ", about 2 min left (2 methods not timed yet)"
    put(runner.all[1], "running", 1, 10)
    assert _left(runner).endswith(" left (1 method not timed yet)")
    put(runner.all[2], "failed", 0, 1)
    for progress in runner.all[3:]:
        put(progress, "completed", 3, 40)
    assert _left(runner) == ", about 30 s left", "nothing of the third row is to come"


def test_what_is_left(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "fed_avg", "fed_lwr")
    assert runner.left() is None
    put(runner.all[0], "running", 1, 10)  # three rounds and the final test: 40 s
    assert runner.left() == pytest.approx((30 + 5 * 40) / 2)
    put(runner.all[0], "completed", 3, 36)
    put(runner.all[1], "running", 2, 50)  # 100 s
    assert runner.left() == pytest.approx((50 + 2 * 36 + 2 * 100) / 2)
    for progress in runner.all[2:]:
        put(progress, "completed", 3, 36)
    assert runner.left() == 0, "one that takes longer than others of its row"
