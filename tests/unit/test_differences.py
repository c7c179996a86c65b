"""Test paired differences: numbers by hand, coverage, and the words of the tables."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from scipy.optimize import brentq

from fairflare.base.cases.resampling import draws, units_of
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import read_results
from fairflare.reporting.values import parts_of
from fairflare_lab.compare.comparison import compare, comparison_of
from fairflare_lab.compare.difference_table import difference_table, interval_of
from fairflare_lab.compare.differences import MEASURES, Difference, compare_pairs
from fairflare_lab.compare.rows import row_of
from fairflare_lab.compare.runs import Contrast
from tests.unit.report_runs import read


def run(label: str, seed: int, by_site: dict[str, float | None], metric: str = "dice", **head: Any) -> RunResults:
    """Return a run whose draws of test patients do not scatter, so that all scatter is over the seeds."""
    info = {"label": label, "config": {"seed": seed}, "sites": sorted(by_site), "primary_metric": metric}
    test = {site: {metric: value} for site, value in by_site.items()}
    drawn = {site: [value] * 30 for site, value in by_site.items() if value is not None}
    return read(**{"status": "completed", "info": info, "test": test, "resampled": drawn, **head})


REFERENCE = [run("fed_avg", seed, {"a": 0.8, "b": 0.6}) for seed in (0, 1, 2)]


def differences(runs: list[dict[str, Any]], reference: str) -> list[Difference]:
    return comparison_of(runs, reference=reference).differences


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
    # The spread fell from .1 to .08 with every seed, and no draws say how far it scatters: that is no certainty.
    assert of(found, "std").mean == pytest.approx(-0.02)
    assert of(found, "std").verdict == "not known"
    assert np.isnan([of(found, "std").low, of(found, "std").p_holm]).all()
    assert average.p_holm == pytest.approx(average.p), "the larger one of two tests, not of three"
    assert of(found, "worst").mean == pytest.approx(0.05)
    assert of(found, "a").values == pytest.approx({0: 0.0, 1: 0.02, 2: 0.01})
    assert of(found, "a").verdict == "within noise"


#: How far sites a and b, .8 and .6 with the reference, move so that a measure becomes better: of Dice, and of a loss.
TO_THE_BETTER = {
    "average": ((0.05, 0.05), (-0.05, -0.05)),
    "std": ((-0.05, 0.05), (-0.05, 0.05)),  # the sites come closer
    "worst": ((0.0, 0.05), (-0.05, 0.0)),
    "a": ((0.05, 0.0), (-0.05, 0.0)),
}


@pytest.mark.parametrize("metric", ["dice", "loss"])
@pytest.mark.parametrize("measure", list(TO_THE_BETTER))
def test_which_way_is_better(measure: str, metric: str) -> None:
    a, b = TO_THE_BETTER[measure][metric == "loss"]
    for turn, verdict in ((1, "better"), (-1, "worse")):
        runs = [run("fed_avg", s, {"a": 0.8, "b": 0.6}, metric) for s in range(3)]
        for seed, size in enumerate((1.0, 1.02, 0.98)):
            runs.append(run("fair", seed, {"a": 0.8 + turn * size * a, "b": 0.6 + turn * size * b}, metric))
        found = of(differences(runs, "fed_avg"), measure)
        assert found.verdict == verdict
        assert abs(found.mean) == pytest.approx(0.05)


def test_a_spread_is_at_most_half_of_the_metric() -> None:
    """Check std .00, .08, .16 against 0: (7.6488 + 1.0607) * .08 / sqrt(3) = .402, between .66 / 2 and .66."""
    runs = [run("fed_avg", s, {"a": 0.5, "b": 0.5}) for s in range(3)]
    runs += [run("fair", s, {"a": 0.5 + d, "b": 0.5 - d}) for s, d in enumerate((0.0, 0.08, 0.16))]
    found = of(differences(runs, "fed_avg"), "std")
    assert found.smallest == pytest.approx(0.4023, abs=1e-3)
    assert (found.limit, found.verdict) == (pytest.approx(0.33), "cannot tell")


def test_from_seeds_alone_nothing_is_said() -> None:
    """Check that no verdict is given without draws, as all seeds are tested on the same patients."""
    runs = [run(label, s, {"a": v + 0.001 * s * (v > 0.5), "b": v}, resampled={}) for label, v in
            (("fed_avg", 0.5), ("fair", 0.8)) for s in range(3)]  # fmt: skip
    found = differences(runs, "fed_avg")
    assert {d.verdict for d in found} == {"not known"}
    assert of(found, "a").low > 0.29  # the interval stands, and says what it is over
    text = " ".join(difference_table(found, "fed_avg").split())
    assert "nothing says how far the test patients move it" in text


def test_one_seed_says_nothing_of_noise() -> None:
    found = differences([REFERENCE[0], run("fair", 0, {"a": 0.9, "b": 0.9})], "fed_avg")
    assert of(found, "average").verdict == "one seed"
    assert math.isnan(of(found, "average").low)


def test_only_common_seeds_and_measured_sites_are_paired() -> None:
    rows = [run("fair", 1, {"a": 0.9, "b": None}), run("fair", 7, {"a": 0.0, "b": 0.0})]
    found = differences([*REFERENCE, *rows], "fed_avg")
    assert of(found, "a").values == pytest.approx({1: 0.1})
    assert not [d for d in found if d.measure == "b"]


def test_runs_that_cannot_be_paired_are_refused() -> None:
    again = REFERENCE[0].model_copy(update={"started": "later"})
    found = comparison_of([*REFERENCE, again, run("fair", 0, {"a": 0.8})])
    assert found.problem == "no differences: two runs of 'fed_avg' have seed 0; leave one of them out"
    assert found.differences == []
    with pytest.raises(ValueError, match=r"--reference.*'other'"):
        differences(REFERENCE, "other")
    with pytest.raises(ValueError, match="none of the 1 runs is complete"):
        differences([REFERENCE[0].model_copy(update={"status": "failed"})], "fed_avg")


def ends_by_hand(mean: float, error: float, df: float, drawn: np.ndarray) -> list[float]:
    """Return the ends where t or, of skewed draws, Hall's ratio has the probability .025, whichever is farther out."""
    limit, skew = stats.t.ppf(0.975, df), stats.skew(drawn)

    def halls(t: float) -> float:
        return float(t + skew / 6 + skew * t * t / 3 + skew * skew * t**3 / 27)

    below = max(limit, brentq(lambda t: halls(t) - limit, -99, 99))
    above = max(limit, -brentq(lambda t: halls(t) + limit, -99, 99))
    return [mean - below * error, mean + above * error]


def scored(label: str, seed: int, images: dict[str, np.ndarray], count: int = 100) -> RunResults:
    """Return a run whose metric is the mean of each site's images, with draws as the sites make them."""
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
    assert (found.low, found.high) == pytest.approx(ends_by_hand(0.1, expected, 99, 0.1 * times))
    assert found.verdict == "within noise"
    text = difference_table([found], "fed_avg")
    assert "over the seeds and the test images (bootstrap)" in text


def test_the_same_images_take_their_luck_out() -> None:
    """Check paired draws: images that are hard for both methods do not widen the interval."""
    hard = np.linspace(0, 1, 30)
    rows = [scored("fair", seed, {"a": 0.9 * hard + 0.1 - 0.001 * seed}) for seed in (0, 1)]
    even = [scored("fed_avg", seed, {"a": 0.9 * hard}) for seed in (0, 1)]
    found = of(differences([*even, *rows], "fed_avg"), "average")
    assert found.images_sd == pytest.approx(0.0, abs=1e-12)
    assert found.verdict == "better"


def test_draws_that_do_not_fit_are_not_used() -> None:
    images = {"a": np.array([0.7, 0.5]), "b": np.array([0.1, 0.9])}
    row = [scored("fair", seed, images) for seed in (0, 1)]
    for other in (
        [scored("fed_avg", seed, images, count=50) for seed in (0, 1)],
        [scored("fed_avg", seed, images).model_copy(update={"vectors": []}) for seed in (0, 1)],
        [
            one.model_copy(update={"vectors": [drawn for drawn in one.vectors if drawn.site == "a"]})
            for one in (scored("fed_avg", seed, images) for seed in (0, 1))
        ],
    ):
        found = differences([*other, *row], "fed_avg")
        assert all(math.isnan(of(found, measure).images_sd) for measure in MEASURES)
        assert "by Student's t over the seeds alone]" in " ".join(difference_table(found, "fed_avg").split())
    few = (None,) * 95 + (0.5,) * 5
    none = [
        r.model_copy(update={"vectors": [replace(of, values=few) if of.site == "a" else of for of in r.vectors]})
        for r in row
    ]
    found = differences([*none, *(scored("fed_avg", seed, images) for seed in (0, 1))], "fed_avg")
    assert math.isnan(of(found, "a").images_sd)  # five draws are too few
    assert math.isfinite(of(found, "b").images_sd)


@pytest.mark.long
def test_the_interval_over_seeds_and_images_covers_the_truth() -> None:
    """Check with further seeds and images from a population whose mean difference is known."""
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
        alone = compare_pairs("fair", "average", Contrast(found.values), higher_is_better=True)
        over_seeds += alone.low <= 0.02 <= alone.high
    assert 0.90 <= hits / 400 <= 0.98
    assert over_seeds < hits


# ------------------------------------------------------------------------------------------------ sites


LOSES_C: list[dict[str, float | None]] = [{"A": 0.9, "B": 0.85}, {"A": 0.9, "B": 0.85, "C": None}]


@pytest.mark.parametrize("has", LOSES_C)
def test_a_method_that_loses_its_worst_site_is_not_better(has: dict[str, float | None]) -> None:
    """Check a method that has the reference's values at two sites: on common sites there is no difference."""
    noise = (0.0, 0.001, -0.001)
    even = [run("fed_avg", s, {"A": 0.9 + x, "B": 0.85, "C": 0.4}) for s, x in enumerate(noise)]
    rows = [run("other", s, {k: v if v is None else v + 0.0005 * s for k, v in has.items()}) for s in range(3)]
    found = differences([*even, *rows], "fed_avg")
    assert of(found, "average", "other").values == pytest.approx({s: (0.001 * s - x) / 2 for s, x in enumerate(noise)})
    assert of(found, "worst", "other").values == pytest.approx({s: 0.0005 * s for s in range(3)})
    for measure in MEASURES:
        assert of(found, measure, "other").verdict == "other sites"
        assert of(found, measure, "other").lacking == {"C": "other"}
        assert math.isnan(of(found, measure, "other").p_holm)
    assert of(found, "average", "other").sites == ("A", "B")
    assert not [d for d in found if d.measure == "C"]
    table = compare([*even, *rows], per_site=False)
    why = "no site of this run" if "C" not in has else "undefined there"
    assert f"In 3 of 3 runs of other: Average and spread of Dice are over 2 of 3 sites, without C ({why})." in table
    assert (
        "Whether a method is fairer than fed_avg cannot be said of these runs: the rows have different sites." in table
    )


def test_the_reference_may_lack_a_site_too_and_at_one_seed_only() -> None:
    runs = [run("fed_avg", s, {"A": 0.5, "B": 0.9 if s else None}) for s in range(3)]
    runs += [run("fair", s, {"A": 0.6, "B": 0.9}) for s in range(3)]
    runs += [run("even", s, {"A": 0.6, "B": 0.9 if s else None}) for s in range(3)]
    found = differences(runs, "fed_avg")
    assert of(found, "average").values == pytest.approx({0: 0.1, 1: 0.05, 2: 0.05})
    assert of(found, "average").lacking == {"B": "fed_avg"}
    assert of(found, "average").verdict == "other sites"
    assert of(found, "B").values == {1: 0.0, 2: 0.0}  # a site by itself is compared where both have it
    assert of(found, "B").verdict == "not known"  # and nothing varies
    assert of(found, "average", "even").lacking == {}  # both lack it at the same seed
    assert of(found, "average", "even").verdict != "other sites"
    lacking = (
        "In 1 of 3 runs of fed_avg, 1 of 3 runs of even: Average and spread of Dice are over 1 of 2 sites, without B"
    )
    assert f"{lacking} (undefined there)." in compare(runs)


def test_no_site_in_common_is_no_pair() -> None:
    runs = [run("fed_avg", s, {"A": 0.5, "B": None}) for s in range(2)]
    runs += [run("fair", s, {"A": None, "B": 0.5}) for s in range(2)]
    assert differences(runs, "fed_avg") == []


# ------------------------------------------------------------------------------------------------ draws


def drawn_run(label: str, seed: int, images: dict[str, np.ndarray], patients: dict[str, list[int]], **head: Any) -> Any:
    """Return a run with draws of patients, like :func:`scored`."""
    resampled, told = {}, {}
    for site, scores in images.items():
        units = units_of([("patient", str(whose)) for whose in patients[site]], len(scores))
        resampled[site] = [float(scores[one].mean()) for one in units.draw(site, 100)]
        told[site] = {"unit": units.kind, "count": len(units.members)}
    by_site = {site: float(scores.mean()) for site, scores in images.items()}
    return run(label, seed, by_site, resampled=resampled, resampled_units=told, **head)


def test_draws_of_patients_by_hand() -> None:
    """Check two sites of three patients with two images each; seeds agree, so all variance is by patients."""
    gains = {"a": np.array([0.2, 0.2, 0.0, 0.0, 0.1, 0.1]), "b": np.array([0.0, 0.0, 0.05, 0.05, 0.1, 0.1])}
    patients = {site: [0, 0, 1, 1, 2, 2] for site in gains}
    plain = {site: np.full(6, 0.5) for site in gains}
    rows = [drawn_run("fair", s, {site: plain[site] + gains[site] for site in gains}, patients) for s in (0, 1)]
    even = [drawn_run("fed_avg", s, plain, patients) for s in (0, 1)]
    found = differences([*even, *rows], "fed_avg")
    by_site = {site: gains[site].reshape(3, 2).mean(1)[draws(site, 3, 100)].mean(1) for site in gains}
    variance = {site: 3 / 2 * np.var(values, ddof=1) for site, values in by_site.items()}
    for site in gains:
        assert of(found, site).images_sd == pytest.approx(math.sqrt(variance[site]))
        df = 1 / (2 / 2 + 1 / 99)  # three patients, a hundred draws
        ends = ends_by_hand(gains[site].mean(), math.sqrt(variance[site]), df, by_site[site])
        assert (of(found, site).low, of(found, site).high) == pytest.approx(ends)
    both = (by_site["a"] + by_site["b"]) / 2
    expected = math.sqrt(3 / 2 * np.var(both, ddof=1))
    average = of(found, "average")
    assert average.images_sd == pytest.approx(expected)
    share = np.array([np.var(by_site["a"]), np.var(by_site["b"])])
    df = 1 / (2 * (share**2 / 2).sum() / share.sum() ** 2 + 1 / 99)
    assert (average.low, average.high) == pytest.approx(ends_by_hand(average.mean, expected, df, both))
    assert "over the seeds and the test patients (bootstrap, 3 a site)]" in difference_table(found, "fed_avg")


@pytest.mark.parametrize("higher", [True, False])
def test_the_worst_site_of_each_draw(higher: bool) -> None:
    """Check that a draw's worst site is the lowest, and the highest (site b) where lower is better."""
    rng = np.random.default_rng(3)
    sites = {"a": rng.uniform(0.3, 0.5, 9), "b": rng.uniform(0.35, 0.55, 7), "c": rng.uniform(0.3, 0.6, 8)}
    runs, worst = [], {}
    for label, shift in (("fed_avg", 0.0), ("fair", 0.03)):
        images = {site: scores + shift * np.linspace(0, 1, len(scores)) for site, scores in sites.items()}
        runs += [scored(label, seed, images) for seed in (0, 1)]
        on_draws = np.stack([scores[draws(s, len(scores), 100)].mean(1) for s, scores in images.items()])
        worst[label] = on_draws.min(0) if higher else on_draws.max(0)
    for one in runs:
        one.info.higher_is_better = {"dice": higher}
    found = of(differences(runs, "fed_avg"), "worst")
    assert found.images_sd == pytest.approx(np.std(worst["fair"] - worst["fed_avg"], ddof=1))
    assert found.higher_is_better is higher


@pytest.mark.parametrize(("count", "verdict"), [(4, "not known"), (5, "worse")])
def test_a_verdict_needs_five_cases_at_a_site(count: int, verdict: str) -> None:
    """Check two given models of which the second is clearly worse on the draws, few cases or not."""
    patients, sites = {site: list(range(count)) for site in "ab"}, dict.fromkeys("ab", np.linspace(0.5, 0.6, count))
    lost = {site: scores * np.linspace(0.4, 0.5, count) for site, scores in sites.items()}
    runs = [drawn_run(name, 0, of, patients) for name, of in (("fed_avg", sites), ("fair", lost))]
    for one in runs:
        one.info.num_rounds = 0
    found = differences(runs, "fed_avg")
    assert {of(found, measure).verdict for measure in ("average", "a", "b")} == {verdict}
    for name in ("p", "p_holm", "smallest"):
        assert math.isnan(getattr(of(found, "average"), name)) == (count < 5)
    told = difference_table(found, "fed_avg")
    assert ("! worse  " in told) == (count == 5)
    assert "paired by site: mean" in told  # given models have no seeds


def test_draws_of_patients_and_of_images_are_not_the_same() -> None:
    gains = {"a": np.array([0.2, 0.2, 0.0, 0.0, 0.1, 0.1])}
    rows = [drawn_run("fair", s, gains, {"a": [0, 0, 1, 1, 2, 2]}) for s in (0, 1)]
    even = [drawn_run("fed_avg", s, gains, {"a": [None] * 6}) for s in (0, 1)]
    assert math.isnan(of(differences([*even, *rows], "fed_avg"), "average").images_sd)
    one = [drawn_run(label, s, gains, {"a": [0] * 6}) for s in (0, 1) for label in ("fed_avg", "fair")]
    with np.errstate(all="raise"):  # of one patient nothing can be said, and nothing is computed
        assert math.isnan(of(differences(one, "fed_avg"), "average").images_sd)


def listed(folder: Path, *, copies: int, patients: bool) -> None:
    """Write a site's pictures, of which the test split has so many copies, each of them of a patient or of none."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([*folder.name.encode()])
    splits: dict[str, list[dict[str, Any]]] = {"training": [], "validation": [], "test": []}
    for split, entries in splits.items():
        for number in range(12):
            pixels = rng.integers(0, 200, (33, 33)) + 9 * (number % 2)
            for copy in range(copies if split == "test" else 1):
                name = f"{split}{number}-{copy}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
                whose = {"patient": f"{split}{number}"} if patients else {}
                entries.append({"image": name, "label": number % 2, **whose})
    (folder / "datalist.json").write_text(json.dumps({"class_names": ["a", "b"], **splits}))


@pytest.mark.many
def test_trained_runs_are_compared_over_patients_where_the_lists_name_them(tmp_path: Path) -> None:
    """Check four copies of each test image: as sure as one image, if they are one patient's, and surer if of nobody."""
    sites = ["site-1", "site-2"]
    small = {"image_size": [33, 33], "features": [4, 4, 8, 8], "batch_size": 4, "num_classes": 2, "local_epochs": 1}

    def trained(name: str, method: str, rate: float, seed: int) -> RunResults:
        more: dict[str, Any] = {"settings": {**small, "learning_rate": rate}, "seed": seed, "bootstrap": 60}
        made = make_plan(method, task="classification", sites=sites, num_rounds=1, **more)
        folders = {site: {"data_root": str(tmp_path / name / site)} for site in sites}
        return read_results(run_local(made, tmp_path / name / f"{method}{seed}", {"sites": folders}))

    found, scatter = {}, {}
    for name, copies, patients in (("one", 1, False), ("patients", 4, True), ("images", 4, False)):
        for site in sites:
            listed(tmp_path / name / site, copies=copies, patients=patients)
        runs = [trained(name, "fed_avg", 0.01, seed) for seed in (0, 1)]
        scatter[name] = np.std(
            [drawn.values for run in runs for drawn in run.vectors if drawn.site in sites and len(drawn.values) == 60],
            axis=1,
        ).max()
        if name != "images":
            runs += [trained(name, "ditto", 0.003, seed) for seed in (0, 1)]
            found[name] = comparison_of(runs, reference=runs[0].info.label).differences
    assert 0 < scatter["images"] < 0.7 * scatter["one"]
    assert scatter["patients"] == pytest.approx(scatter["one"])
    for one, patient in zip(found["one"], found["patients"], strict=True):
        for figure in ("mean", "low", "high", "images_sd", "p_holm"):
            assert getattr(one, figure) == pytest.approx(getattr(patient, figure), abs=1e-9, nan_ok=True), figure
    assert "over the seeds and the test patients (bootstrap, 12 a site)" in interval_of(found["patients"])


def test_only_the_sites_of_a_pair_are_drawn() -> None:
    """Check that the reference's third site, whose draws would move the average, is not included."""
    rng = np.random.default_rng(4)
    common = {"a": rng.uniform(0, 1, 9), "b": rng.uniform(0, 1, 7)}
    gain = {site: scores + rng.uniform(0, 0.3, len(scores)) for site, scores in common.items()}
    rows = [scored("fair", seed, gain) for seed in (0, 1)]
    even = [scored("fed_avg", seed, common) for seed in (0, 1)]
    more = [scored("fed_avg", seed, {**common, "c": rng.uniform(0, 1, 8)}) for seed in (0, 1)]
    plain, found = (of(differences([*runs, *rows], "fed_avg"), "average") for runs in (even, more))
    assert plain.images_sd > 0
    assert (found.low, found.high, found.images_sd) == (plain.low, plain.high, plain.images_sd)
    assert (plain.lacking, found.lacking) == ({}, {"c": "fair"})


# ------------------------------------------------------------------------------------------------ words


def test_holm_is_over_rows_and_measures_and_over_sites_of_their_own() -> None:
    rng = np.random.default_rng(7)
    runs = [run("fed_avg", s, {x: rng.uniform(0.4, 0.6) for x in "abc"}) for s in range(4)]
    for row in range(5):
        runs += [run(f"row {row}", s, {x: rng.uniform(0.4, 0.6) + 0.03 * row for x in "abc"}) for s in range(4)]
    found = differences(runs, "fed_avg")
    totals = [d for d in found if d.measure in MEASURES]
    sites = [d for d in found if d.measure not in MEASURES]
    assert (len(totals), len(sites)) == (15, 15)
    for family in (totals, sites):
        ranked = sorted(family, key=lambda d: d.p)
        assert ranked[0].p_holm == pytest.approx(min(1, 15 * ranked[0].p))
        assert ranked[1].p_holm == pytest.approx(max(ranked[0].p_holm, min(1, 14 * ranked[1].p)))
        for d in family:
            beyond = d.verdict in ("better", "worse")
            assert beyond == (d.p_holm < 0.05)
            assert (d.p < 0.05) == (d.low > 0 or d.high < 0)
    assert any(d.p < 0.05 and d.verdict == "within noise" for d in found), "one that luck explains"
    assert any(d.verdict == "better" for d in found)


@pytest.mark.parametrize("drawn", [True, False])
def test_no_difference_at_any_seed_is_not_known(drawn: bool) -> None:
    """Check a row that does the same as the reference beside one that does not: no bound says what could be seen."""
    images = {site: np.linspace(0.3, 0.8, 9) for site in "ab"}
    rows = {"fed_avg": 0.0, "same": 0.0, "fair": 0.1}
    runs = [
        scored(label, seed, {site: of + more * (1 + 0.1 * seed) for site, of in images.items()})
        if drawn
        else run(label, seed, dict.fromkeys(images, 0.5 + more * (1 + 0.1 * seed)))
        for label, more in rows.items()
        for seed in range(3)
    ]
    found = differences(runs, "fed_avg")
    for measure in (*MEASURES, "a", "b"):
        same = of(found, measure, "same")
        assert same.verdict == "not known"
        assert np.isnan([same.low, same.high, same.p_holm, same.smallest]).all()


def test_cannot_tell_is_not_within_noise() -> None:
    """Check the same mean difference, known well and not at all."""
    for spread, verdict in ((0.01, "within noise"), (0.3, "cannot tell")):
        runs = [run("fed_avg", s, {"a": 0.5, "b": 0.5}) for s in range(3)]
        runs += [run("fair", s, {"a": 0.5 + spread * x, "b": 0.5 + spread * x}) for s, x in enumerate((-1, 0, 1.1))]
        found = of(differences(runs, "fed_avg"), "average")
        assert found.verdict == verdict
        # Three tests: the first needs t(2, 1 - .05 / 6); and 0.8 of power.
        error = spread * np.std([-1, 0, 1.1], ddof=1) / math.sqrt(3)
        assert found.smallest == pytest.approx((stats.t.ppf(1 - 0.05 / 6, 2) + stats.t.ppf(0.8, 2)) * error)
        largest = 0.5 + spread * 1.1
        assert (found.smallest > largest) == (verdict == "cannot tell")


# ------------------------------------------------------------------------------------------------ last models


def last_run(label: str, seed: int, values: list[float]) -> RunResults:
    """Return a run; ``values``: of site a after each last round; site b has half, clean images have more."""
    tests = [
        {s: {"dice": v * f, "clean/dice": v * f + 0.1, "bad/dice": v * f - 0.2} for s, f in (("a", 1.0), ("b", 0.5))}
        for v in values
    ]
    rounds = [{"current_round": k, "test": test} for k, test in enumerate(tests[:-1])]
    last = {"rounds": list(range(len(values))), "test": {}}
    return run(label, seed, {"a": None, "b": None}, test=tests[-1], rounds=rounds, last_rounds=last)


def test_the_last_models_are_pooled() -> None:
    """Check mean and population deviation of all rounds of all seeds."""
    one = {0: [0.5, 0.6, 0.7], 1: [0.4, 0.5, 0.6]}
    row = row_of("fed_avg", [last_run("fed_avg", s, v) for s, v in one.items()], "dice", last=True)
    pooled = np.array([*one[0], *one[1]])
    assert (row.summarise_site("a").mean, row.summarise_site("a").sd) == pytest.approx((pooled.mean(), pooled.std()))
    assert row.summarise("mean").mean == pytest.approx(0.75 * pooled.mean())
    assert row.summarise("worst").sd == pytest.approx(0.5 * pooled.std())
    with pytest.raises(ValueError, match=r"'fed_avg' has no test .*test_last=5"):
        row_of("fed_avg", [*REFERENCE], "dice", last=True)


def test_the_papers_average_of_clean_and_corrupted() -> None:
    runs = [last_run(name, s, [v, v]) for name, v in (("fed_avg", 0.5), ("fair", 0.7)) for s in (0, 1)]
    found = comparison_of(runs, "clean/dice+bad/dice")
    assert found.rows[0].values[0] == pytest.approx({"a": 0.45, "b": 0.2})
    assert of(found.differences, "average").mean == pytest.approx(0.75 * 0.2)
    assert found.higher is True
    for one in runs:
        one.info.higher_is_better = {"dice": True, "bad/dice": False}
    with pytest.raises(ValueError, match=r"of clean/dice more is better, .*less"):
        comparison_of(runs, "clean/dice+bad/dice")
    assert math.isnan(found.rows[0].summaries[0].mean) is False
    with pytest.raises(ValueError, match=r"no test results .*'clean/dice\+no/dice'"):
        comparison_of(runs, "clean/dice+no/dice")


def test_a_metric_whose_name_has_a_plus_is_no_mean() -> None:
    assert parts_of(read(test={"north": {}, "south": {"recall_a+b": 0.5}}), "recall_a+b") == ["recall_a+b"]
    assert parts_of(read(test={"north": {"recall_a": 0.5, "b": 0.5}}), "recall_a+b") == ["recall_a", "b"]


def test_forms() -> None:
    apart = zip((0.0, 0.02, 0.01), (0.0, 0.001, -0.001), strict=True)
    rows = [run("fair | er", s, {"a": 0.8 + d + e, "b": 0.64 + d - e}) for s, (d, e) in enumerate(apart)]
    found = differences([*REFERENCE, *rows], "fed_avg")
    text = difference_table(found, "fed_avg", width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert ["fair | er", "worst", "0.048"] in [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["fair | er", "average", "+0.030 [+0.005, +0.055]", "* better"] in [
        re.split(r"\s{2,}", line.strip())[:4] for line in text.splitlines()
    ]
    markdown = difference_table(found, "fed_avg", style="markdown")
    # t = .03 / (.01 / sqrt 3) = 5.196 with 2 degrees of freedom, the largest of three p-values. A power of 0.8 for the
    # first of three asks for (7.6488 + 1.0607) * .0057735.
    assert "| fair \\| er | average | +0.030 [+0.005, +0.055] | * better | 0.035 | 0.035 | 0.050 |" in markdown
    csv = difference_table(found, "fed_avg", style="csv").splitlines()
    assert csv[0] == "method,reference,measure,seeds,sites,mean,sd,low,high,verdict,images_sd,p,p_holm,smallest"
    assert len(csv) == 1 + 5
