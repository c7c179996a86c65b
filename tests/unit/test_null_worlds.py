"""Test how often sentences with a verdict are said of equal sites, models, methods and groups, in simulated worlds."""

from __future__ import annotations

import pytest

from tests.loaded import loaded

loaded("benchmarks/bench_group_verdicts.py")  # which the other one imports; both compare with fairflare_lab
bench = loaded("benchmarks/bench_verdicts.py")
MOST = 0.07  # largest share of worlds in which a sentence may be false


@pytest.mark.long
@pytest.mark.parametrize("name", [*bench.ALL_WORLDS])
def test_no_sentence_is_false_in_more_than_seven_of_a_hundred_worlds(name: str) -> None:
    said = bench.shares(name, 300)
    assert said
    assert {sentence: share for sentence, share in said.items() if share > MOST} == {}


@pytest.mark.parametrize(
    ("name", "sentence", "least"),
    [
        ("own model, gains skewed, 12 cases", "should use it", 0.3),
        ("Dice, deviations x 1.9, 30 and 8 cases", "behind", 0.2),
        ("AUC 0.85, 30 to 100 cases", "behind", 0.5),
    ],
)
def test_a_few_worlds_of_the_worst_kinds_and_their_true_differences(name: str, sentence: str, least: float) -> None:
    """Check 20 worlds each: 5 false sentences are improbable (3e-3 if 7 of 100 were false), and true ones are said."""
    assert max(bench.shares(name, 20).values()) < 0.25
    assert bench.shares(name, 20, power=True)[sentence] >= least
