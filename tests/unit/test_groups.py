"""Test metrics by group from sums: against scikit-learn and float64 loops; attributes; hiding of few cases."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from scipy.stats import t
from sklearn.metrics import accuracy_score, brier_score_loss, confusion_matrix, recall_score, roc_auc_score

from fairflare.core.statistics.group_metrics import areas, gaps_of, metrics_of, worst_of
from fairflare.core.statistics.group_sums import (
    add_sums,
    find_hidden_groups,
    find_hidden_parts,
    impossible,
    shapes,
    sums_of,
)
from fairflare.data.listing.attributes import Attribute, UndeclaredValue, groups_of, read_declared
from fairflare.reporting.documents import RunResults
from fairflare.reporting.groups import OVER, attributes_of, gap_sentences, group_notes, summarise_groups
from fairflare.reporting.layout import interval, number
from tests.sections import groups_before
from tests.unit.report_runs import read

BINS, SURE = 40, 7


def made(classes: int, count: int, seed: int = 0, groups: int = 3) -> tuple[Any, Any, Any]:
    """Return labels, probabilities and groups of synthetic images; the model is worse in group 1."""
    rng = np.random.default_rng(seed)
    labels, numbers = rng.integers(0, classes, count), rng.integers(0, groups, count)
    logits = rng.normal(size=(count, classes)) + np.eye(classes)[labels] * np.where(numbers == 1, 0.5, 2.0)[:, None]
    return labels, np.exp(logits) / np.exp(logits).sum(1, keepdims=True), numbers


def sums(labels: Any, scores: Any, chosen: Any) -> dict[str, Any]:
    return sums_of(labels, scores, chosen, BINS, SURE)


def ece(labels: Any, scores: Any, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        sure, right = [], []
        for label, own in zip(labels, scores, strict=True):
            top = max(own)
            if min(int(top * bins), bins - 1) == b:
                sure.append(top)
                right.append(float(int(np.argmax(own)) == label))
        if sure:
            total += len(sure) / len(labels) * abs(math.fsum(sure) / len(sure) - sum(right) / len(right))
    return total


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_pooled_over_sites_as_scikit_learn_has_it(classes: int) -> None:
    labels, scores, groups = made(classes, 400)
    site = np.random.default_rng(9).integers(0, 3, 400)
    for group in range(3):
        pooled = add_sums([sums(labels, scores, (groups == group) & (site == s)) for s in range(3)])
        found = metrics_of(pooled)
        truth, told, own = labels[groups == group], scores[groups == group].argmax(1), scores[groups == group]
        assert found["accuracy"] == pytest.approx(accuracy_score(truth, told), abs=1e-12)
        brier = brier_score_loss(truth, own, labels=list(range(classes)), scale_by_half=False)
        assert found["brier"] == pytest.approx(brier, abs=1e-12)
        assert found["ece"] == pytest.approx(ece(truth, own, SURE), abs=1e-12)
        wanted = [1] if classes == 2 else list(range(classes))
        recalls = recall_score(truth, told, labels=wanted, average=None)
        assert found["sensitivity"] == pytest.approx(recalls.mean(), abs=1e-12)
        spared = [recall_score(truth != c, told != c) for c in wanted]
        assert found["specificity"] == pytest.approx(np.mean(spared), abs=1e-12)
        for c, area, error in zip(wanted, *areas(pooled), strict=True):
            assert abs(area - roc_auc_score(truth == c, own[:, c])) <= error + 1e-12
            assert 0 < error < 0.1
        exact = np.mean([roc_auc_score(truth == c, own[:, c]) for c in wanted])
        assert abs(found["auc"] - exact) <= found["auc_error"] + 1e-12
        matrix = confusion_matrix(truth, told)
        assert pooled["confusion"][:, 0].tolist() == np.diag(matrix).tolist()
        assert pooled["confusion"].sum(1).tolist() == [len(truth)] * classes


def test_binned_scores_have_an_exact_area() -> None:
    """Check scores at the middle of their bins: ties count as in scikit-learn."""
    labels, scores, _ = made(2, 300)
    positive = (np.minimum((scores[:, 1] * BINS).astype(int), BINS - 1) + 0.5) / BINS
    found = metrics_of(sums(labels, np.stack([1 - positive, positive], 1), np.ones(300, bool)))
    assert found["auc"] == pytest.approx(roc_auc_score(labels, positive), abs=1e-12)


@pytest.mark.parametrize("classes", [2, 4])
def test_gaps_by_hand(classes: int) -> None:
    labels, scores, groups = made(classes, 500, 3)
    told = scores.argmax(1)
    of = {f"g{g}": sums(labels, scores, groups == g) for g in range(3)}
    whole = add_sums(list(of.values()))
    found = gaps_of(of, whole)
    sensitivity, false, share = [], [], []
    for c in [1] if classes == 2 else range(classes):
        tpr, fpr, parity = [], [], []
        for g in range(3):
            mine = groups == g
            tpr.append((mine & (labels == c) & (told == c)).sum() / (mine & (labels == c)).sum())
            fpr.append((mine & (labels != c) & (told == c)).sum() / (mine & (labels != c)).sum())
            parity.append((mine & (told == c)).sum() / mine.sum())
        sensitivity.append(max(tpr) - min(tpr))
        false.append(max(fpr) - min(fpr))
        share.append(max(parity) - min(parity))
    assert found["equal_opportunity"] == pytest.approx(max(sensitivity), abs=1e-12)
    assert found["equalised_odds"] == pytest.approx(max(*sensitivity, *false), abs=1e-12)
    assert found["demographic_parity"] == pytest.approx(max(share), abs=1e-12)
    accuracy = [accuracy_score(labels[groups == g], told[groups == g]) for g in range(3)]
    of_all = accuracy_score(labels, told)
    assert found["accuracy_gap"] == pytest.approx(max(accuracy) - min(accuracy), abs=1e-12)
    scaled = of_all / (1 + sum(abs(of_all - own) for own in accuracy))
    assert found["es_accuracy"] == pytest.approx(scaled, abs=1e-12)
    area = [metrics_of(one)["auc"] for one in of.values()]
    middle = metrics_of(whole)["auc"]
    assert found["es_auc"] == pytest.approx(middle / (1 + sum(abs(middle - one) for one in area)), abs=1e-12)
    assert worst_of(of)["accuracy"] == f"g{int(np.argmin(accuracy))}" == "g1"


def test_dice_by_group_and_equity_scaled() -> None:
    rng = np.random.default_rng(1)
    dice, groups = rng.uniform(size=(60, 2)), rng.integers(0, 2, 60)
    of = {str(g): sums_of(None, dice, groups == g, BINS, SURE) for g in range(2)}
    for g in range(2):
        found = metrics_of(of[str(g)])
        assert found["dice"] == pytest.approx(dice[groups == g].mean(), abs=1e-12)
        assert found["dice_std"] == pytest.approx(dice[groups == g].std(0).mean(), abs=1e-12)
    whole = add_sums(list(of.values()))
    apart = sum(abs(dice.mean() - dice[groups == g].mean()) for g in range(2))
    assert gaps_of(of, whole)["es_dice"] == pytest.approx(dice.mean() / (1 + apart), abs=1e-12)


def test_what_is_not_defined_is_nan_and_in_no_gap() -> None:
    labels, scores, groups = made(3, 90)
    nobody = sums(labels, scores, np.zeros(90, bool))
    assert all(math.isnan(value) for value in metrics_of(nobody).values())
    of = {"a": sums(labels, scores, groups == 0), "none": nobody}
    assert all(math.isnan(value) for value in gaps_of(of, add_sums(list(of.values()))).values())
    assert worst_of(of) == {}


def test_a_kept_sum_is_left_out_of_its_entry() -> None:
    labels, scores, groups = made(3, 90)
    told, kept = sums(labels, scores, groups == 0), sums(labels, scores, groups == 1)
    kept["confusion"][1] = np.nan
    both = add_sums([told, kept])
    assert both["confusion"][1].tolist() == told["confusion"][1].tolist()
    assert both["confusion"][0].tolist() == (told["confusion"][0] + kept["confusion"][0]).tolist()
    assert np.isnan(add_sums([kept])["confusion"][1]).all()


@pytest.mark.parametrize("seed", range(40))
def test_no_cell_of_few_cases_can_be_solved_for(seed: int) -> None:
    """Of every row (group, or all hidden ones together) the hidden classes have none or at least ``least`` together,
    and every class that leaves has at least ``least`` in it."""
    rng = np.random.default_rng(seed)
    count, classes, least = int(rng.integers(30, 120)), int(rng.integers(2, 5)), int(rng.integers(2, 8))
    labels = rng.choice(classes, count, p=rng.dirichlet(np.ones(classes)))
    numbers = rng.choice(4, count, p=rng.dirichlet(np.ones(4)))
    cases = rng.integers(0, count, count).tolist()
    hidden = find_hidden_groups(cases, numbers, 4, least)
    parts = find_hidden_parts(cases, labels, numbers, hidden, least, classes)

    def distinct(chosen: Any) -> int:
        return len({case for case, own in zip(cases, chosen, strict=True) if own})

    sizes = {g: distinct(numbers == g) for g in range(4)}
    assert all(sizes[g] >= least for g in range(4) if g not in hidden)
    few = [g for g in hidden if 0 < sizes[g] < least]
    assert not few or sum(sizes[g] for g in hidden) >= least or len(hidden) == 4
    rows = [numbers == g for g in range(4) if g not in hidden] + [np.isin(numbers, list(hidden))]
    for row in rows:
        if not row.any():
            continue
        for c in set(range(classes)) - parts:
            assert distinct(row & (labels == c)) >= least
            assert distinct(row & (labels != c)) >= least
    assert len(parts) != 1 or classes == 1


def test_with_one_case_everything_leaves() -> None:
    assert find_hidden_groups([1, 2], np.array([0, 0]), 3, 1) == frozenset()
    assert find_hidden_parts([1, 2], np.array([0, 1]), np.array([0, 0]), frozenset(), 1, 3) == frozenset()


def test_results_and_rows() -> None:
    labels, scores, groups = made(3, 120)
    of = {
        site: {f"sex={name}": sums(labels, scores, (groups == g) & (np.arange(120) % 2 == k))
               for g, name in enumerate(("F", "M", "unknown"))}
        for k, site in enumerate(("site-1", "site-2"))
    }  # fmt: skip
    found = groups_before(read(groups=summarise_groups(of, {"site-2": ["sex=M"]})))
    assert found["attributes"] == {"sex": ["F", "M", "unknown"]}
    told = scores.argmax(1)
    whole, known = found["pooled"]["sex"], [groups == 0, groups == 1]
    assert whole["all"]["accuracy"] == pytest.approx(accuracy_score(labels, told), abs=1e-12)
    apart = [accuracy_score(labels[own], told[own]) for own in known]
    assert whole["gaps"]["accuracy_gap"] == pytest.approx(abs(apart[0] - apart[1]), abs=1e-12)  # unknown is in none


def test_what_stays_is_said() -> None:
    """Check a group that a site withholds, and one that alone has images."""
    labels, scores, _ = made(2, 60)
    of = {"site-1": {f"age={name}": sums(labels, scores, np.full(60, name == "<40")) for name in ("<40", ">=60")}}
    results = read(groups=summarise_groups(of, {"site-2": ["age=40-60"]}))
    told = "Groups of people that stay at a site, some only to hide another one: site-2: age=40-60 (suppressed: {})."
    assert group_notes(results) == [OVER, told.format("fewer cases than its min_cases")]
    results.info.privacy = {"site-2": {}}
    assert group_notes(results)[1] == told.format("differential privacy")
    assert captions(results) == ["Across all sites, fewer than two groups of age have a value."]
    assert group_notes(read(groups=None)) == captions(read(groups=None)) == []


def test_a_sentence_says_how_sure_a_gap_is() -> None:
    labels, scores, groups = made(2, 400)
    same = {"s": {f"x={g}": sums(labels, scores, np.ones(400, bool)) for g in "ab"}}
    cells, vectors = summarise_groups(same, {})
    again = [replace(cell, value=1e-17) if (cell.metric, cell.site) == ("auc_gap", "") else cell for cell in cells]
    for of in (cells, again):  # also of sums in another order
        (told,) = captions(read(groups=(of, vectors)))
        assert told.startswith(
            "No interval of a gap between groups of x excludes 0, so that all may be chance: gap in "
        )
        assert "gap in AUC 0.000 [0.000, " in told
    worse = {"s": {f"x={g}": sums(labels, scores, groups == g) for g in (0, 1)}}
    results = read(groups=summarise_groups(worse, {}))
    beyond, told = gap_sentences(results, "x")
    found = groups_before(results)
    low, high = found["pooled"]["x"]["gap_intervals"]["auc_gap"]
    assert low > 0
    assert beyond
    assert told.startswith("The groups of x differ, with 95 % intervals that exclude 0: ")
    assert f'gap in AUC {number(found["pooled"]["x"]["gaps"]["auc_gap"])} {interval(low, high)} (lowest: "1"); ' in told


def captions(results: RunResults) -> list[str]:
    return [gap_sentences(results, attribute)[1] for attribute in attributes_of(results)]


def dice_at(values: dict[str, dict[str, tuple[float, int]]], images: int = 1) -> RunResults:
    """Return results of groups of ``zone`` from ``{site: {group: (Dice of all, cases)}}``, with images a case."""
    of: dict[str, Any] = {}
    for site, groups in values.items():
        for group, (dice, cases) in groups.items():
            count = cases * images
            whose = np.arange(count) // images
            own = sums_of(None, np.full((count, 1), dice), np.ones(count, bool), BINS, SURE, whose)
            of.setdefault(site, {})[f"zone={group}"] = own
    return read(groups=summarise_groups(of, {}))


def test_one_patient_is_told_as_one_and_no_gap_is_sure_of_it() -> None:
    """Check twelve images a patient; the only patient with an enlarged zone is at the second of three sites."""
    at = {
        "site-1": {"small": (0.5, 4)},
        "site-2": {"small": (0.7, 2), "enlarged": (0.75, 1)},
        "site-3": {"small": (0.3, 4)},
    }
    results = dice_at(at, images=12)
    pooled = groups_before(results)["pooled"]["zone"]
    assert {g: (of["images"], of["cases"]) for g, of in pooled["groups"].items()} == {
        "small": (120, 10), "enlarged": (12, 1),
    }  # fmt: skip
    assert pooled["gaps"]["dice_gap"] == pytest.approx(0.75 - (0.5 * 4 + 0.7 * 2 + 0.3 * 4) / 10)  # .29
    assert pooled["gaps"]["dice_gap_within"] == pytest.approx(0.05)
    assert pooled["gap_intervals"]["dice_gap"] == (None, None)
    assert captions(results) == [
        "Between groups of zone, of which one has fewer than 5 cases, how sure is not known: gap in Dice 0.290 "
        '(lowest: "small").'
    ]


def test_gaps_within_sites_by_hand() -> None:
    """Check weights n m / (n + m): 6 * 3 / 9 = 2 and 8 * 8 / 16 = 4; .1 and .4 of them: .3; one site has one group."""
    at = {
        "a": {"F": (0.8, 6), "M": (0.7, 3)}, "b": {"F": (0.9, 8), "M": (0.5, 8)}, "c": {"M": (0.2, 9)},
    }  # fmt: skip
    results = dice_at(at)
    pooled = groups_before(results)["pooled"]["zone"]
    assert pooled["gaps"]["dice_gap_within"] == pytest.approx(0.3, abs=1e-12)
    assert dict(pooled["within"]["dice_gap_within"]) == {"lowest": "M", "sites": ["a", "b"]}
    assert "dice_gap_within" not in groups_before(results)["sites"]["a"]["zone"]["gaps"]


def test_equalised_odds_of_one_rate_are_said() -> None:
    """Check group M without an image of class 1: its sensitivity is undefined, only false positives are compared."""
    labels = np.array([0, 1] * 20 + [0] * 20)
    groups = np.array([0] * 40 + [1] * 20)
    scores = np.stack([1 - (p := np.random.default_rng(1).uniform(size=60)), p], 1)
    of = {"s": {f"sex={name}": sums(labels, scores, groups == g) for g, name in enumerate("FM")}}
    results = read(groups=summarise_groups(of, {}))
    assert groups_before(results)["pooled"]["sex"]["undefined_rates"] == {"sensitivity 1": ["M"]}


def test_without_each_part_a_gap_is_that_of_the_other_cases() -> None:
    """Compare with a loop over the images; parts of the cases are sums of their own."""
    labels, scores, groups = made(2, 400, 2)
    part, sites = np.random.default_rng(0).permutation(400) % 20, np.arange(400) % 2
    of: dict[str, Any] = {}
    for s, g in product(range(2), range(3)):
        each = [sums(labels, scores, (groups == g) & (part == k) & (sites == s)) for k in range(20)]
        of.setdefault(f"s{s}", {})[f"x={g}"] = {name: np.stack([one[name] for one in each]) for name in each[0]}
    pooled = groups_before(read(groups=summarise_groups(of, {})))["pooled"]["x"]
    right = scores.argmax(1) == labels
    for k in range(20):
        kept = part != k
        of_groups = [right[kept & (groups == g)].mean() for g in range(3)]
        assert pooled["without"]["accuracy_gap"][k] == pytest.approx(max(of_groups) - min(of_groups), abs=1e-12)
    whole = {f"x={g}": sums(labels, scores, groups == g) for g in range(3)}
    together = groups_before(read(groups=summarise_groups({"s": whole}, {})))["pooled"]["x"]
    for name in ("accuracy_gap", "auc_gap", "equalised_odds", "es_accuracy"):
        assert pooled["gaps"][name] == pytest.approx(together["gaps"][name], abs=1e-12)
    low, high = pooled["gap_intervals"]["accuracy_gap_within"]
    assert low < pooled["gaps"]["accuracy_gap_within"] < high


def gap_by_loops(dice: Any, groups: Any, sites: Any) -> float:
    """Compute the largest gap within sites from images, each a case, with the weights n m / (n + m)."""
    gaps = []
    for a, b in combinations(sorted({*groups.tolist()}), 2):
        above, below = 0.0, 0.0
        for s in {*sites.tolist()}:
            one, other = dice[(groups == a) & (sites == s)], dice[(groups == b) & (sites == s)]
            if len(one) and len(other):
                weight = len(one) * len(other) / (len(one) + len(other))
                above, below = above + weight * (one.mean() - other.mean()), below + weight
        gaps.append(abs(above / below))
    return max(gaps)


@pytest.mark.parametrize(
    ("groups", "images", "means", "spread", "cut"),
    [
        (2, 80, (0.7, 0.5), 0.1, ()),
        (3, 120, (0.8, 0.6, 0.7), 0.1, ()),  # the largest of three gaps: each at a third of the error
        (2, 60, (0.6, 0.6), 0.3, ("low",)),
        (2, 12, (1.0, 0.05), 0.45, ("high",)),
        (2, 14, (0.7, 0.5), 0.1, ()),  # seven cases of a group: six degrees of freedom, not ten
        (2, 8, (0.7, 0.5), 0.1, None),  # four cases of a group
    ],
)
def test_a_gap_within_sites_has_the_interval_of_a_jackknife(
    groups: int, images: int, means: tuple[float, ...], spread: float, cut: tuple[str, ...] | None
) -> None:
    """Compare with the delete-a-group jackknife over twenty parts, by hand: Kott 2001."""
    rng = np.random.default_rng(4)
    numbers, sites = np.arange(images) % groups, np.arange(images) // groups % 2
    part = rng.permutation(images) % 20
    dice = np.clip(np.array(means)[numbers] + spread * rng.uniform(-1, 1, images) - 0.05 * sites, 0, 1)
    of: dict[str, Any] = {}
    for s, g in product(range(2), range(groups)):
        mine = (numbers == g) & (sites == s)
        each = [sums_of(None, dice[:, None], mine & (part == k), BINS, SURE) for k in range(20)]
        of.setdefault(f"s{s}", {})[f"x={g}"] = {name: np.stack([one[name] for one in each]) for name in each[0]}
    pooled = groups_before(read(groups=summarise_groups(of, {})))["pooled"]["x"]
    low, high = pooled["gap_intervals"]["dice_gap_within"]
    if cut is None:
        assert (low, high) == (None, None)
        return
    gap = gap_by_loops(dice, numbers, sites)
    without = [gap_by_loops(dice[part != k], numbers[part != k], sites[part != k]) for k in range(20)]
    variance = 19 / 20 * sum((one - sum(without) / 20) ** 2 for one in without)
    error = 0.05 / {2: 1, 3: 3}[groups]
    half = t.ppf(1 - error / 2, min(10, images // groups - 1)) * math.sqrt(variance)
    assert pooled["gaps"]["dice_gap_within"] == pytest.approx(gap, abs=1e-12)
    assert (gap - half < 0, gap + half > 1) == ("low" in cut, "high" in cut)
    assert (low, high) == pytest.approx((max(0, gap - half), min(1, gap + half)), abs=1e-12)


def test_shapes_are_those_of_the_sums() -> None:
    labels, scores, groups = made(4, 50)
    form = shapes(4, BINS, SURE)
    found = {**sums(labels, scores, groups == 0), **sums_of(None, scores, groups == 0, BINS, SURE)}
    assert {name: value.shape for name, value in found.items()} == form


# ------------------------------------------------------------------------------------------------ attributes


def test_groups_of_values() -> None:
    declared = read_declared(
        {"sex": {"kind": "category", "values": ["F", "M"]}, "age": {"kind": "number", "bins": [40, 60.5]}}
    )
    assert declared["age"].groups == ("<40", "40-60.5", ">=60.5", "unknown")
    assert groups_of({"sex": "M", "age": 40}, declared) == {"sex": 1, "age": 1}
    assert groups_of({"age": 60.5}, declared) == {"sex": 2, "age": 2}
    assert groups_of({"age": math.nan, "sex": ""}, declared) == groups_of(None, declared) == {"sex": 2, "age": 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sex": "X"}, "^attribute 'sex'.* got 'X'$"),
        ({"sex": 1}, "got 1"),
        ({"age": "old"}, "^attribute 'age'.* got 'old'$"),
        ({"age": True}, "got True"),
        ({"sexx": "F"}, "not declared .* 'sexx'"),
        (["F"], "must be an object"),
    ],
)
def test_a_value_that_is_not_declared(given: Any, words: str) -> None:
    declared = {"sex": Attribute("sex", values=("F",)), "age": Attribute("age", bins=(50.0,))}
    with pytest.raises(UndeclaredValue, match=words) as caught:
        groups_of(given, declared)
    assert not any(str(value) in caught.value.public for value in ("'X'", "old", "sexx"))


@pytest.mark.parametrize(
    "declared",
    [
        ["sex"],
        {"sex": "F"},
        {"sex": {"kind": "category"}},
        {"sex": {"kind": "category", "values": ["F", "F"]}},
        {"sex": {"kind": "category", "values": ["unknown"]}},
        {"age": {"kind": "number", "bins": [3, 2]}},
        {"age": {"kind": "number", "bins": [math.nan]}},
        {"age": {"kind": "number", "bins": []}},
        {"a=b": {"kind": "number", "bins": [1]}},
        {"age": {"kind": "number", "bins": [1], "more": 1}},
    ],
)
def test_a_declaration_that_is_none(declared: Any) -> None:
    with pytest.raises(ValueError, match="attribute"):
        read_declared(declared)


def test_a_gap_of_dice_is_over_the_structures_that_both_groups_have() -> None:
    """Check women at a site with both structures and men at one with the easy one: they are equal on common ones."""
    dice = np.array([[0.9, 0.3]] * 4 + [[0.9, np.nan]] * 4)
    women, men = (sums_of(None, dice, np.arange(8) // 4 == k, 4, 4) for k in (0, 1))
    assert metrics_of(women)["dice"] == pytest.approx(0.6)
    assert metrics_of(men)["dice"] == pytest.approx(0.9)
    gaps = gaps_of({"women": women, "men": men}, add_sums([women, men]))
    assert gaps["dice_gap"] == pytest.approx(0.0)
    assert gaps["es_dice"] == pytest.approx(0.9)
    assert not impossible(men)


@pytest.mark.parametrize("least", [1, 2, 5])
def test_no_bin_has_fewer_cases_and_no_value_goes_down(least: int) -> None:
    """Compare with a walk over sorted scores; both sides of a class have the same bins."""
    rng = np.random.default_rng(least)
    labels, cases = rng.integers(0, 2, 60), np.arange(60) // 2
    scores = rng.random((60, 2)) / 2
    scores[:, 1] = 1 - scores[:, 0]
    bins = 20
    found = sums_of(labels, scores, np.ones(60, bool), bins, bins, cases, least)["histogram"]
    for c in range(2):
        slow, waiting = [], []
        for place in range(bins):
            waiting += [k for k in range(60) if min(int(scores[k, c] * bins), bins - 1) == place]
            sides = [[k for k in waiting if (labels[k] == c) == side] for side in (True, False)]
            if least == 1 or all(len({cases[k] for k in side}) >= least for side in sides):
                slow.append((place, sides))
                waiting = []
        if waiting:
            place, sides = slow.pop()
            slow.append(
                (
                    place,
                    [
                        own + [k for k in waiting if (labels[k] == c) == side]
                        for own, side in zip(sides, (True, False), strict=True)
                    ],
                )
            )
        told = np.zeros((2, bins))
        for place, sides in slow:
            told[:, place] = [len(side) for side in sides]
        assert (found[c] == told).all()
