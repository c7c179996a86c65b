"""Hostile replies over the real controller: some of each kind of phase. CI sends hundreds for each method and phase, by
``make fuzz``."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from .__main__ import memory_folder, told
from .bench import Bench, attack, phases_of
from .bundles import BUNDLES, attack_bundles, healthy, use, watching, write
from .expected import expectations
from .statistics import STATS, attack_statistics
from .sums import SUMS, attack_sums

REPLIES = 40
SEED = 9
#: `make fuzz` has every method, with more replies.
PAIRS = [("fed_avg", "check"), *(("fed_lwr", phase) for phase in phases_of("fed_lwr"))]


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


def test_hostile_parts_of_secure_sums_cost_one_site_the_exchange() -> None:
    with memory_folder() as folder:
        verdicts = attack_sums(Path(folder), SUMS, SUMS, SEED, replies=24)
    bad = [told(SUMS, SUMS, SEED, v) for v in verdicts if v.faults]
    assert not bad, "\n".join(bad[:10])
    refused = sum(v.sent and not v.accepted for v in verdicts)
    assert 6 < refused < 24


def test_a_case_is_told_by_its_number(tmp_path: Path) -> None:
    first, second = Bench(tmp_path / "a", "fed_mas", "train", 3), Bench(tmp_path / "b", "fed_mas", "train", 3)
    for index in (0, 2, 5, 4000):
        assert first.run(index) == second.run(index)
    assert Bench(tmp_path / "c", "fed_mas", "train", 4).cases[0].name != first.cases[0].name


@pytest.mark.filterwarnings("ignore")
def test_hostile_bundles_are_refused_by_key_and_nothing_of_them_runs() -> None:
    with memory_folder() as folder:
        verdicts = attack_bundles(Path(folder), BUNDLES, BUNDLES, SEED, replies=4 * REPLIES)
    bad = [told(BUNDLES, BUNDLES, SEED, v) for v in verdicts if v.faults]
    assert not bad, "\n".join(bad[:10])
    assert sum(not v.accepted for v in verdicts) > 0.8 * len(verdicts)


@pytest.mark.filterwarnings("ignore")
def test_what_a_payload_does_is_seen_where_it_runs() -> None:
    """With MONAI's parser, which evaluates what it reads, the same audit finds the canary and the calls."""
    call = "$open('CANARY', 'w')"
    with memory_folder() as name:
        folder = Path(name)
        (healthy_one,) = attack_bundles(folder, BUNDLES, BUNDLES, SEED, [0])  # the hook is there
        assert "executed" not in healthy_one.faults
        config = healthy()
        config["loss"]["lambda_dice"] = call.replace("CANARY", str(folder / "written"))
        write(folder / "x", config)
        for sealed in (True, False):
            with watching(folder / "x") as seen, contextlib.suppress(ValueError):
                use(folder / "x", sealed)
            assert (folder / "written").exists() is not sealed
            assert any("open" in event and "written" in event for event in seen) is not sealed
