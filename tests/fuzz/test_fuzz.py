"""Hostile replies over the real controller: some of each kind of phase. CI sends hundreds for each method and phase, by
``make fuzz``."""

from __future__ import annotations

from pathlib import Path

import pytest

from .__main__ import memory_folder, told
from .bench import Bench, attack, phases_of
from .expected import expectations
from .statistics import STATS, attack_statistics

REPLIES = 40
SEED = 9
PAIRS = [(method, phase) for method in ("fed_avg", "fed_lwr", "creff", "group_dro") for phase in phases_of(method)]


@pytest.mark.many
@pytest.mark.parametrize(("method", "phase"), PAIRS, ids=lambda x: x)
def test_hostile_replies_cost_one_site_one_round(method: str, phase: str) -> None:
    with memory_folder() as folder:
        verdicts = attack(Path(folder) / "x", method, phase, SEED, replies=REPLIES)
    assert sum(v.sent for v in verdicts) == REPLIES
    bad = [told(method, phase, SEED, v) for v in verdicts if v.faults]
    assert not bad, "\n".join(["python -m tests.fuzz --method ... --phase ... shows one again:", *bad[:10]])
    refused = sum(v.sent and not v.accepted for v in verdicts)
    assert REPLIES / 5 < refused < REPLIES  # hostile, and not simply all thrown away


@pytest.mark.many
@pytest.mark.parametrize(
    ("method", "phase"), [("fed_avg", "train"), ("fed_lwr", "anchor"), ("fed_avg", "norms"), ("fed_avg", "validate")]
)
def test_what_is_known_to_be_wrong_is_refused_and_the_rest_taken(method: str, phase: str) -> None:
    with memory_folder() as folder:
        bench = Bench(Path(folder) / "x", method, phase, SEED)
        known = expectations(phase)
        # Each single change stands once in the walk, at every place but each third.
        at = [k + k // 2 for k, (name, _) in enumerate(bench.cases.singles) if name in known]
        verdicts = [bench.run(index) for index in at]
    assert {v.name for v in verdicts} <= set(known)
    assert len(verdicts) > 20
    assert all(v.sent for v in verdicts)
    bad = [told(method, phase, SEED, v) for v in verdicts if v.faults]
    assert not bad, "\n".join(bad)


def test_hostile_statistics_cost_one_site_its_figures() -> None:
    with memory_folder() as folder:
        verdicts = attack_statistics(Path(folder), STATS, STATS, SEED, replies=3 * REPLIES)
    bad = [told(STATS, STATS, SEED, v) for v in verdicts if v.faults]
    assert not bad, "\n".join(bad[:10])
    refused = sum(v.sent and not v.accepted for v in verdicts)
    assert REPLIES < refused < 3 * REPLIES


def test_a_case_is_told_by_its_number(tmp_path: Path) -> None:
    first, second = Bench(tmp_path / "a", "fed_mas", "train", 3), Bench(tmp_path / "b", "fed_mas", "train", 3)
    for index in (0, 2, 5, 4000):
        assert first.run(index) == second.run(index)
    assert Bench(tmp_path / "c", "fed_mas", "train", 4).cases[0].name != first.cases[0].name
