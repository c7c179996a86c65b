"""Paired differences: hand numbers, coverage, and what the tables say."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from fairflare.core.resampling import draws
from fairflare.reporting.difference_table import difference_table
from fairflare.reporting.differences import MEASURES, Difference, differences, paired


def run(label: str, seed: int, by_site: dict[str, float | None], **head: Any) -> dict[str, Any]:
    info = {"label": label, "config": {"seed": seed}, "sites": sorted(by_site), "primary_metric": "dice"}
    test = {site: {"dice": value} for site, value in by_site.items()}
    return {"status": "completed", "info": info, "test": test, "rounds": [], **head}


REFERENCE = [run("fed_avg", seed, {"a": 0.8, "b": 0.6}) for seed in (0, 1, 2)]


def of(found: list[Difference], measure: str, label: str = "fair") -> Difference:
    return next(d for d in found if (d.label, d.measure) == (label, measure))


def test_hand_numbers() -> None:
    # Averages .72 .74 .73 against .70; t(2, .975) = 4.302653, sd .01: half of the interval is .024841.
    rows = [run("fair", s, {"a": 0.8 + d, "b": 0.64 + d}) for s, d in enumerate((0.0, 0.02, 0.01))]
    found = differences([*REFERENCE, *rows], "fed_avg")
    average = of(found, "average")
    assert average.mean == pytest.approx(0.03)
    assert average.sd == pytest.approx(0.01)
    assert (average.low, average.high) == (
        pytest.approx(0.03 - 0.0248414, abs=1e-6),
        pytest.approx(0.0548414, abs=1e-6),
    )
    assert average.verdict == "better"
    # The spread fell from .1 to .08 with every seed: lower is better.
    assert of(found, "std").mean == pytest.approx(-0.02)
    assert of(found, "std").verdict == "better"
    assert of(found, "worst").mean == pytest.approx(0.05)
    assert of(found, "a").values == pytest.approx({0: 0.0, 1: 0.02, 2: 0.01})
    assert of(found, "a").verdict == "within noise"


def test_a_loss_is_better_when_lower() -> None:
    values = {0: -0.10, 1: -0.11, 2: -0.09}
    assert paired("x", "average", values, higher_is_better=False).verdict == "better"
    assert paired("x", "average", values, higher_is_better=True).verdict == "worse"


def test_one_seed_says_nothing_of_noise() -> None:
    found = differences([REFERENCE[0], run("fair", 0, {"a": 0.9, "b": 0.9})], "fed_avg")
    assert of(found, "average").verdict == "one seed"
    assert math.isnan(of(found, "average").low)
    assert "give more (--seeds)" in difference_table(found, "fed_avg")


def test_only_common_seeds_and_measured_sites_are_paired() -> None:
    rows = [run("fair", 1, {"a": 0.9, "b": None}), run("fair", 7, {"a": 0.0, "b": 0.0})]
    found = differences([*REFERENCE, *rows], "fed_avg")
    assert of(found, "a").values == pytest.approx({1: 0.1})
    assert not [d for d in found if d.measure == "b"]


def test_runs_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="two runs of 'fed_avg' have seed 0"):
        differences([*REFERENCE, REFERENCE[0]], "fed_avg")
    with pytest.raises(ValueError, match="no complete run of 'other'; there are fed_avg"):
        differences(REFERENCE, "other")
    with pytest.raises(ValueError, match="none"):
        differences([{**REFERENCE[0], "status": "failed"}], "fed_avg")


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_covers_the_truth(seeds: int) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        values = dict(enumerate(rng.normal(0.02, 0.01, seeds)))
        found = paired("x", "average", values, higher_is_better=True)
        hits += found.low <= 0.02 <= found.high
    assert 0.93 <= hits / 2000 <= 0.97


def scored(label: str, seed: int, images: dict[str, np.ndarray], count: int = 100) -> dict[str, Any]:
    """A run whose metric is the mean of each site's images, with draws as the sites make them."""
    drawn = {s: scores[draws(s, len(scores), count)].mean(1).tolist() for s, scores in images.items()}
    return run(label, seed, {site: float(scores.mean()) for site, scores in images.items()}, resampled=drawn)


def test_hand_numbers_with_test_images() -> None:
    # One site, two images. The row is better by .2 on the one and by 0 on the other image, whatever the seed: a draw
    # holds the first one 0, 1 or 2 times, so its difference is 0, .1 or .2.
    rows = [scored("fair", seed, {"a": np.array([0.7, 0.5])}) for seed in (0, 1)]
    other = [scored("fed_avg", seed, {"a": np.array([0.5, 0.5])}) for seed in (0, 1)]
    found = of(differences([*other, *rows], "fed_avg"), "average")
    times = (draws("a", 2, 100) == 0).sum(1)
    assert set(times) == {0, 1, 2}
    expected = float(np.std(0.1 * times, ddof=1))
    assert found.images_sd == pytest.approx(expected)
    assert found.sd == pytest.approx(0.0)
    # The seeds do not differ, so all of it is of the images, known from 100 draws: t(99, .975).
    assert (found.low, found.high) == pytest.approx((0.1 - 1.984217 * expected, 0.1 + 1.984217 * expected))
    assert found.verdict == "within noise"
    text = difference_table([found], "fed_avg")
    assert "over the seeds and the test images (bootstrap)" in text


def test_the_same_images_take_their_luck_out() -> None:
    """Paired: images that are hard for both do not widen the interval."""
    hard = np.linspace(0, 1, 30)
    rows = [scored("fair", seed, {"a": 0.9 * hard + 0.1}) for seed in (0, 1)]
    even = [scored("fed_avg", seed, {"a": 0.9 * hard}) for seed in (0, 1)]
    found = of(differences([*even, *rows], "fed_avg"), "average")
    assert found.images_sd == pytest.approx(0.0, abs=1e-12)
    assert found.verdict == "better"


def test_draws_that_do_not_fit_are_not_used() -> None:
    images = {"a": np.array([0.7, 0.5]), "b": np.array([0.1, 0.9])}
    row = [scored("fair", seed, images) for seed in (0, 1)]
    for other in (
        [scored("fed_avg", seed, images, count=50) for seed in (0, 1)],
        [{**scored("fed_avg", seed, images), "resampled": None} for seed in (0, 1)],
        [{**r, "resampled": {"a": r["resampled"]["a"]}} for r in (scored("fed_avg", seed, images) for seed in (0, 1))],
    ):
        found = differences([*other, *row], "fed_avg")
        assert all(math.isnan(of(found, measure).images_sd) for measure in MEASURES)
        assert "by Student's t over the seeds alone]" in " ".join(difference_table(found, "fed_avg").split())
    none = [{**r, "resampled": {**r["resampled"], "a": [None] * 95 + [0.5] * 5}} for r in row]
    found = differences([*none, *(scored("fed_avg", seed, images) for seed in (0, 1))], "fed_avg")
    assert math.isnan(of(found, "a").images_sd)  # five draws are too few
    assert math.isfinite(of(found, "b").images_sd)


def test_the_interval_over_seeds_and_images_covers_the_truth() -> None:
    """Other seeds and other images, drawn from a population whose mean difference is known."""
    rng = np.random.default_rng(1)
    sites, hits, over_seeds = {"a": 30, "b": 60, "c": 45}, 0, 0
    for _ in range(400):
        hard = {site: rng.normal(0.6, 0.15, n) for site, n in sites.items()}
        taste = {site: rng.normal(0.02, 0.08, n) for site, n in sites.items()}
        runs = []
        for seed in range(3):
            for label in ("fed_avg", "fair"):
                shift = rng.normal(0, 0.005)
                images = {s: hard[s] + (taste[s] if label == "fair" else 0) + shift for s in sites}
                runs.append(scored(label, seed, {s: x + rng.normal(0, 0.02, len(x)) for s, x in images.items()}, 60))
        found = of(differences(runs, "fed_avg"), "average")
        hits += found.low <= 0.02 <= found.high
        alone = paired("fair", "average", found.values, higher_is_better=True)
        over_seeds += alone.low <= 0.02 <= alone.high
    assert 0.90 <= hits / 400 <= 0.98
    assert over_seeds < hits


def test_forms() -> None:
    rows = [run("fair | er", s, {"a": 0.8 + d, "b": 0.64 + d}) for s, d in enumerate((0.0, 0.02, 0.01))]
    found = differences([*REFERENCE, *rows], "fed_avg")
    text = difference_table(found, "fed_avg", width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert ["fair | er", "average", "+0.0300", "[+0.005, +0.055]", "* better"] in [
        re.split(r"\s{2,}", line.strip())[:5] for line in text.splitlines()
    ]
    markdown = difference_table(found, "fed_avg", style="markdown")
    # t = .03 / (.01 / sqrt 3) = 5.196 with 2 degrees of freedom; a power of 0.8 asks for (4.3027 + 1.0607) * .0057735.
    assert "| fair \\| er | average | +0.0300 | [+0.005, +0.055] | * better | 0.035 | 0.035 | 0.031 |" in markdown
    csv = difference_table(found, "fed_avg", style="csv").splitlines()
    assert csv[0] == "method,reference,measure,seeds,sites,mean,sd,low,high,p,p_holm,smallest,verdict,images_sd"
    assert len(csv) == 1 + 5
