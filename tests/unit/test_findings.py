"""Test what is said first of runs and comparisons: on the console, on the page and with ``--json``.

The expected sentences were written by hand from the made-up results, whose figures stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fairflare.cli.show import _plain_results
from fairflare.reporting.documents import CASES, WITHIN
from fairflare.reporting.findings import ORDER
from fairflare.reporting.table import class_table, fairness_table, table_of
from fairflare.reporting.values import guess_of, missing_reason
from fairflare_lab.compare.comparison import comparison_of, row_table
from fairflare_lab.compare.comparison_json import comparison_json
from fairflare_lab.page.material import describe_comparison, describe_run
from fairflare_lab.page.write import build
from tests.unit.report_runs import document, read

PLAIN = {"site-1": 0.8, "site-2": 0.6, "site-3": 0.7}
LUCK = "Next: this is one run, which cannot say how much of it is luck of the seed (fairflare compare --seeds 3)."


def run(values: Mapping[str, float] = PLAIN, label: str = "a", seed: int = 0, **more: Any) -> dict[str, Any]:
    """Return a run; ``more``: parts of the document, of which ``info`` and ``test`` are merged into its own."""
    made = document(label, seed, values)
    made["info"]["synthetic"] = False
    made["info"] |= more.pop("info", {})
    for site, of in more.pop("test", {}).items():
        made["test"].setdefault(site, {}).update(of)
    return made | more


def standing_of(
    values: Mapping[str, tuple[float, float, float]], *, metric: str = "dice", p: float = 0.4, **more: Any
) -> dict[str, Any]:
    """Return ``inequality`` from ``{site: (value, expected, p)}``; the last site is that furthest below."""
    sites = {
        site: {"value": value, "low": value - 0.2, "high": value + 0.2, "test_cases": 20, "expected": expected,
               "p_value": p_site}
        for site, (value, expected, p_site) in values.items()
    }  # fmt: skip
    last = max(values, key=lambda site: values[site][1] - values[site][0])
    return {
        "metric": metric, "level": 0.95, "test": CASES, "p_value": p, "std": 0.08, "chance_std": 0.05,
        "gap": values[last][1] - values[last][0], "gap_site": last, "chance_gap": 0.12, "behind": [], "ahead": [],
        "sites": sites, **more,
    }  # fmt: skip


EVEN = {"site-1": (0.8, 0.7, 0.3), "site-2": (0.6, 0.7, 0.3), "site-3": (0.7, 0.7, 1.0)}
MIXED = {"site-1": (0.8, 0.95, 0.2), "site-2": (0.6, 0.58, 0.9), "site-3": (0.7, 0.6, 0.5)}
CLASSES = {
    "primary_metric": "balanced_accuracy",
    "higher_is_better": {"balanced_accuracy": True, "recall_<class>": True},
    "shown_metrics": ["balanced_accuracy"],
}
RECALLS = {  # of b, c: 0 everywhere; c is at site-2 alone
    "site-1": {"balanced_accuracy": 0.5, "recall_a": 1.0, "recall_b": 0.0, "recall_d": 0.5},
    "site-2": {"balanced_accuracy": 0.4, "recall_a": 0.8, "recall_b": 0.0, "recall_c": 0.0, "recall_d": 0.8},
}
SUPPORT = {"site-1": {"a": 9, "b": 4, "c": 0, "d": 2}, "site-2": {"a": 8, "b": 3, "c": 5, "d": 5}}
OF_CLASSES: dict[str, Any] = {
    "values": dict.fromkeys(RECALLS, 0.0), "info": CLASSES, "test": RECALLS,
    "inequality": {"metric": "balanced_accuracy", "level": 0.95, "sites": {
        site: {"value": RECALLS[site]["balanced_accuracy"], "class_support": of} for site, of in SUPPORT.items()}},
}  # fmt: skip
#: Structure s2 is annotated at b and c, and found at neither; b does well in s1, the only structure of all sites.
PARTIAL: dict[str, Any] = {
    "values": {"a": 0.7, "b": 0.9, "c": 0.8},
    "test": {"a": {"own/dice": 0.7, "dice_s1": 0.7}, "b": {"own/dice": 0.45, "dice_s1": 0.9, "dice_s2": 0.0},
             "c": {"own/dice": 0.4, "dice_s1": 0.8, "dice_s2": 0.0}},
    "info": {"higher_is_better": {"dice": True, "dice_<class>": True}, "shown_metrics": ["dice"]},
    "footing": {"how": "shared", "shared": ["s1"], "structures": {"a": ["s1"], "b": ["s1", "s2"], "c": ["s1", "s2"]},
                "parts": [["a", "b", "c"]]},
    "inequality": {"metric": "dice", "level": 0.95, "sites": {
        site: {"value": 0.8, "structure_support": {"s1": 10, **({"s2": 6} if site != "a" else {})}} for site in "abc"}},
}  # fmt: skip


def people(**intervals: tuple[float, float]) -> dict[str, Any]:
    """Return ``groups`` of tone: dark 0.388 against light 0.542 in accuracy, .56 against .62 in AUC."""
    groups = {"light": {"accuracy": 0.542, "auc": 0.62, "images": 30, "cases": 30},
              "dark": {"accuracy": 0.388, "auc": 0.56, "images": 12, "cases": 12}}  # fmt: skip
    pooled = {
        "groups": groups, "all": {"accuracy": 0.5, "auc": 0.6}, "worst": {"accuracy": "dark", "auc": "dark"},
        "gaps": {"accuracy_gap": 0.154, "auc_gap": 0.06}, "gap_intervals": intervals,
    }  # fmt: skip
    return {"attributes": {"tone": ["light", "dark"]}, "pooled": {"tone": pooled}, "sites": {}, "kept": {}}


def own_model(advice: str, low: float) -> dict[str, Any]:
    return {"steps": 3, "common": 0.6, "own": 0.7, "gain": 0.1, "low": low, "high": 0.2, "advice": advice,
            "enough": None, "others": {}}  # fmt: skip


PRIVATE = {
    "target": 8.0,
    "epsilon": 7.5,
    "delta": 1e-5,
    "unit": "patient",
    "mechanism": "gaussian",
    "covers": "updates",
}
UNTESTED = "whether chance explains that is not known: the task does not say how its metric is made of images"
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a run that failed": (
        {"values": {}, "status": "failed", "reason": "no disk", "rounds": []},
        ["The run FAILED after 0 rounds: no disk. There are no test results, so nothing is said of fairness.",
         "Next: mend what the reason names, and run it again."],
    ),
    "a run that goes on": (
        {"values": {}, "status": "running", "rounds": []},
        ["The run goes on, or was cut off, after 0 rounds: nothing here is final. There are no test results, so "
         "nothing is "
         "said of fairness."],
    ),
    "a run without a test": (
        {"values": {}, "rounds": []}, ["There are no test results, so nothing is said of fairness.", LUCK],
    ),
    "Dice is 0 everywhere": (
        {"values": dict.fromkeys(PLAIN, 0.0)},
        ["Nothing was learnt: Dice is 0 at every site.",
         "Next: train longer or with another learning rate, and look for wrong labels (fairflare check-data), before "
         "anything is compared.", LUCK],
    ),
    "every image is called a": (
        {**OF_CLASSES, "test": {"site-1": {"balanced_accuracy": 0.5, "recall_a": 1.0, "recall_b": 0.0},
                                "site-2": {"balanced_accuracy": 0.5, "recall_a": 1.0, "recall_b": 0.0}}},
        ["Nothing was learnt: every test image at every site is called a."],
    ),
    "only images of a and b are called a, the rest b": (  # b is 0 everywhere, but an image of a in ten is called b
        {**OF_CLASSES, "test": {"site-1": {"balanced_accuracy": 0.5, "recall_a": 0.9, "recall_b": 0.0},
                                "site-2": {"balanced_accuracy": 0.5, "recall_a": 1.0, "recall_b": 0.0}}},
        ["Found nowhere, 0 at every site that has it: recall b (7 test images of it)."],
    ),
    "a class has the end of another one's name, and a site withholds it": (  # big_b: 3 at site-1, not the 4 of b
        {**OF_CLASSES,
         "test": {"site-1": {"balanced_accuracy": 0.5, "recall_a": 1.0, "recall_b": 0.6, "recall_big_b": 0.0},
                  "site-2": {"balanced_accuracy": 0.5, "recall_a": 1.0, "recall_b": 0.5}},
         "inequality": {"metric": "balanced_accuracy", "level": 0.95, "sites": {
             site: {"value": 0.5, "class_support": {"a": 9, "b": 4, "big_b": count}}
             for site, count in {"site-1": 3, "site-2": 2}.items()}}},
        ["Found nowhere, 0 at every site that has it: recall big b (3 test images of it, measured at site-1)."],
    ),
    "a structure is found nowhere, and a site that did well is the worst": (
        PARTIAL,
        ["Found nowhere, 0 at every site that has it: Dice s2 (12 test images of it, measured at b, c).",
         "The sites annotate, or mark, different structures, classes or findings (a: s1; b: s1, s2; c: s1, s2). "
         "Figures "
         "of sites rest on those that all have: s1.",
         "In Dice (over: s1), a has the worst value, 0.700; whether chance explains that is not known: fewer than two "
         "sites have what a test needs: 5 test cases, and figures that scatter.",
         "Next: see whether all sites label alike what was found nowhere (fairflare check-data), and train longer; "
         "averages do not show that it is missing."],
    ),
    "two classes are found nowhere": (
        OF_CLASSES,
        ["Found nowhere, 0 at every site that has it: recall b (7 test images of it), recall c (5 test images of it, "
         "measured at site-2)."],
    ),
    "a finding is found nowhere": (
        {"info": {"primary_metric": "auc", "shown_metrics": ["auc"], "higher_is_better": {"auc": True}},
         "test": {site: {"auc": value} for site, value in PLAIN.items()},
         "clinical": {"site-1": {"nodule": {"tp": 0, "fn": 3}, "mass": {"tp": 1, "fn": 2}},
                      "site-2": {"nodule": {"tp": 0, "fn": 2}}}},
        ["Found nowhere, 0 at every site that has it: nodule (5 test images of it)."],
    ),
    "a site never came": (
        {"info": {"sites": [*PLAIN, "site-4"], "connected": [*PLAIN]}},
        ["Expected, and not connected: site-4 (1 of 4).",
         "Took part in rounds: site-1 2/2, site-2 2/2, site-3 2/2, site-4 0/2.",
         "Average and spread of Dice are over 3 of 4 sites, without site-4 (it never connected)."],
    ),
    "fewer rounds than asked": ({"info": {"num_rounds": 5}}, ["The run has 2 of 5 rounds."]),
    "a site has too few cases": (
        {"test": {"site-3": {"dice": None}}, "suppressed": {"site-3": ["dice"]},
         "info": {"said": {"site-3": {"min_cases": 7}}}},
        ["Average and spread of Dice are over 2 of 3 sites, without site-3 (suppressed: fewer than 7 cases)."],
    ),
    "a site is private": (
        {"test": {"site-3": {"dice": None}}, "suppressed": {"site-3": ["dice"]},
         "info": {"privacy": {"site-3": PRIVATE}}},
        ["Average and spread of Dice are over 2 of 3 sites, without site-3 (suppressed: differential privacy).",
         "Differential privacy at site-3 (epsilon 7.500 of at most 8, delta 1e-05, unit patient; gaussian; covers "
         "updates). Updates, metrics and reports of site-1, site-2 are in the clear."],
    ),
    "a site failed the test": (
        {"values": {"site-1": 0.8, "site-2": 0.6}, "info": {"sites": [*PLAIN], "connected": [*PLAIN]},
         "left_out": [{"site": "site-3", "phase": "validate", "reason": "no image"}]},
        ["Took part in rounds: site-1 2/2, site-2 2/2, site-3 0/2.",
         "Average and spread of Dice are over 2 of 3 sites, without site-3 (left out: no image)."],
    ),
    "a site is behind and another one ahead": (
        {"inequality": standing_of({**EVEN, "site-2": (0.6, 0.7, 0.01)}, behind=["site-2"], ahead=["site-1"])},
        ["In Dice, site-2 (0.600; 0.100 below the 0.700 expected if all sites were equally good; p = 0.010) is "
         "behind by "
         "more than chance explains.",
         "In Dice, site-1 (0.800; 0.100 above the 0.700 expected if all sites were equally good; p = 0.300) is ahead "
         "by "
         "more than chance explains.",
         "Next: see over several seeds whether another method serves site-2 better (docs/which_method.md, fairflare "
         "compare)."],
    ),
    "a site is ahead alone": (
        {"inequality": standing_of(EVEN, ahead=["site-1"])},
        ["In Dice, site-1 (0.800; 0.100 above the 0.700 expected if all sites were equally good; p = 0.300) is ahead "
         "by "
         "more than chance explains."],
    ),
    "no single site, but all together": (
        {"inequality": standing_of(EVEN, p=0.015)},
        ["Together the sites differ in Dice by more than chance explains (p = 0.015).",
         "No site is shown to be behind in Dice. Furthest below is site-2 (0.600; 0.100 below the 0.700 expected if "
         "all sites were equally good; p = 0.300)."],
    ),
    "a gap between groups that is not of the AUC": (
        {"groups": people(accuracy_gap=(0.05, 0.25), auc_gap=(0.0, 0.31))},
        ['The groups of tone differ, with 95 % intervals that exclude 0: gap in accuracy 0.154 [0.05, 0.25] (lowest: '
         '"dark").',
         "Next: see over several seeds whether another method has smaller gaps between these groups (fairflare "
         "compare, "
         "with the same groups)."],
    ),
    "gaps between groups that may be chance": (
        {"groups": people(accuracy_gap=(0.0, 0.25), auc_gap=(0.0, 0.31)), "inequality": standing_of(EVEN)},
        ["No site is shown to be behind in Dice. Furthest below is site-2 (0.600; 0.100 below the 0.700 expected if "
         "all sites were equally good; p = 0.300). That may be chance: of equally good sites the last is about 0.120 "
         "below it.",
         "No interval of a gap between groups of tone excludes 0, so that all may be chance: gap in accuracy 0.154 "
         '[0.00, 0.25] (lowest: "dark"); gap in AUC 0.060 [0.00, 0.31] (lowest: "dark").'],
    ),
    "an own model is to be used": (
        {"personal": {"sites": {"site-1": own_model("should use it", 0.05), "site-2": own_model("cannot tell", 0.01)}}},
        ["Own models: better than the common one at the own site, and to be used there: site-1 (+0.100, 95 % [0.050, "
         "0.200]).",
         f"In Dice, site-2 has the worst value, 0.600; {UNTESTED} (Metric.mean_of_images).",
         "Own models: the test cannot tell whether to use them: site-2 (+0.100, 95 % [0.010, 0.200], which excludes "
         "0, but "
         "not after the correction for 2 sites).",
         "Next: use the own model at site-1, and the common one elsewhere."],
    ),
    "the worst site has the hard cases": (  # its value is the lowest, but more is not expected of it; .12 is below .15
        {"inequality": standing_of(MIXED)},
        ["No site is shown to be behind in Dice. Furthest below is site-1 (0.800; 0.150 below the 0.950 expected if "
         "all sites were equally good; p = 0.200). That may be chance. The worst value is that of "
         "site-2 (0.600; 0.020 above the 0.580 expected if all sites were equally good; p = 0.900)."],
    ),
    "nobody knows": ({}, [f"In Dice, site-2 has the worst value, 0.600; {UNTESTED} (Metric.mean_of_images).", LUCK]),
}  # fmt: skip


def seeds(label: str, values: Mapping[str, float], count: int = 3, step: float = 0.0, **more: Any) -> list[Any]:
    """Return runs of ``count`` seeds with 200 draws of the test patients; ``step``: what site-2 gains by each seed."""
    made = []
    for seed in range(count):
        of = {site: value + step * seed * (site == "site-2") for site, value in values.items()}
        draws = {site: [value + 0.001 * (-1) ** k for k in range(200)] for site, value in of.items()}
        units = {site: {"unit": "patients", "count": 20} for site in of}
        made.append(run(of, label, seed, resampled=draws, resampled_units=units, **more))
    return made


ZERO = dict.fromkeys(PLAIN, 0.0)
UNKNOWN = "Whether a method is fairer than a cannot be said of these runs."
OTHER_SITES = "NOT COMPARABLE as they stand: the runs differ in their sites."
UNSHOWN = "No method was shown to be fairer than a on these data."
AHEAD = {"inequality": standing_of({**EVEN, "site-1": (0.8, 0.7, 0.01)}, ahead=["site-1"])}
FAIRER = {"site-1": 0.7, "site-2": 0.69, "site-3": 0.7}
COMPARISONS: dict[str, tuple[list[Any], list[str]]] = {
    "a row learnt nothing in some runs": (
        [*seeds("a", PLAIN, 1), run(ZERO, "a", 1), run(ZERO, "a", 2), *seeds("b", ZERO)],
        ["Nothing was learnt: Dice is 0 at every site (in 2 of 3 runs of a, 3 of 3 runs of b)."],
    ),
    "a class is found nowhere": (
        [run(**OF_CLASSES, seed=0), run(**OF_CLASSES, seed=1)],
        ["Found nowhere, 0 at every site that has it: recall b (7 test images of it), recall c (5 test images of it, "
         "measured "
         "at site-2) (in 2 of 2 runs of a)."],
    ),
    "a run did not complete": (
        [*seeds("a", PLAIN, 2), run(label="a", seed=2, status="failed", reason="no disk")],
        ["1 of 3 runs did not complete and are left out: 'a', begun 2026-01-03T00:00:00, seed 2: no disk."],
    ),
    "a site is missing, and private": (
        [run(label="a"), run(label="b", test={"site-3": {"dice": None}}, suppressed={"site-3": ["dice"]},
                             info={"privacy": {"site-3": PRIVATE}})],
        ["In 1 of 1 run of b: Average and spread of Dice are over 2 of 3 sites, without site-3 (suppressed: "
         "differential privacy)."],
    ),
    "one seed": (
        [run(label="a"), run(label="b")],
        ["Whether a method is fairer than a cannot be said of these runs: there is one seed only, so that nothing "
         "can be "
         "said of noise."],
    ),
    "a method is fairer, and better at the worst site": (
        # std .08165 against .00471, .00424, .00377: mean -.07741, sd .00047, half 4.30265 * .00047 / sqrt(3) = .00117;
        # worst .60 against .690, .691, .692; average .7 against .69667, .69700, .69733
        [*seeds("a", PLAIN), *seeds("b", FAIRER, step=0.001)],
        ["With a smaller spread than a, but a worse average or worst site: b (std -0.077 [-0.079, -0.076]).",
         "Better than a, beyond noise: b (worst +0.091 [+0.089, +0.093]), b (site-2 +0.091 [+0.089, +0.093]).",
         "Worse than a, beyond noise: b (average -0.003 [-0.004, -0.002])."],
    ),
    "a site is ahead in every run": (
        seeds("a", PLAIN, **AHEAD),
        ["Beyond what chance explains in Dice: site-1 is ahead (in 3 of 3 runs of a)."],
    ),
    "the groups differ": (
        seeds("a", PLAIN, groups=people(accuracy_gap=(0.1, 0.25), auc_gap=(0.0, 0.31))),
        ["The groups of tone differ, with 95 % intervals over cases and seeds that exclude 0: gap in accuracy 0.154 "
         "[0.100, 0.250] with a."],
    ),
    "one row has other sites, another one not": (
        [*seeds("a", PLAIN), *seeds("b", {**PLAIN, "site-4": 0.7}), *seeds("c", PLAIN, step=0.001)],
        [OTHER_SITES,
         "In 3 of 3 runs of a, 3 of 3 runs of c: Average and spread of Dice are over 3 of 4 sites, without site-4 (no "
         "site of this run).", UNSHOWN],
    ),
    "other seeds, and other sites": (
        [*seeds("a", PLAIN, 1), run(label="b", seed=7), *seeds("c", {"site-8": 0.7, "site-9": 0.8}, 1)],
        [OTHER_SITES, "No seed in common with a, so not compared: b.", "No site in common with a, so not compared: c."],
    ),
    "six seeds already": (
        [*seeds("a", PLAIN, 6), *seeds("b", PLAIN, 6, step=0.001)],
        ["The interval of a difference to a excludes 0, but that is not shown (the table says why): b (average +0.001 "
         "[+0.000, +0.001]), b (std -0.001 [-0.002, -0.000]), b (worst +0.003 [+0.001, +0.004]).",
         UNSHOWN, "In 6 of 6 runs of a, here the first: In Dice, site-2 has the worst value, 0.600; "
         f"{UNTESTED} (Metric.mean_of_images).",
         "Next: more seeds (fairflare compare --seeds 12) or more test cases show smaller differences."],
    ),
    "all sites have what is expected": (
        seeds("a", dict.fromkeys(PLAIN, 0.7), inequality=standing_of(dict.fromkeys(PLAIN, (0.7, 0.7, 1.0)))),
        ["In 3 of 3 runs of a, here the first: No site can be told from the others in Dice: each has what is "
         "expected if all were equally good."],
    ),
    "two methods are equal": ([*seeds("a", PLAIN), *seeds("b", PLAIN)], [UNKNOWN]),  # 0 with every seed says nothing
    "a difference within noise": (  # of the std 0, -.00012, -.00047: Student's t of three seeds reaches beyond 0
        [*seeds("a", PLAIN), *seeds("b", PLAIN, step=0.001)], [UNSHOWN],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_of_a_run_console_page_and_json_say_the_same_first(name: str) -> None:
    parts, expected = RUNS[name]
    results = read(**run(**parts))
    said = [one["text"] for one in _plain_results(results, None)["findings"]]
    assert said[0] == expected[0]
    assert [text for text in said if text in expected] == expected  # all of them, in this order
    lines = fairness_table(results).split("\n\n")[0].splitlines()
    assert lines[1 : 1 + len(said)] == said
    page = build(describe_run(results))
    assert page.first == said
    assert_ordered([one["kind"] for one in _plain_results(results, None)["findings"]], said)


@pytest.mark.parametrize("name", COMPARISONS)
def test_of_a_comparison_console_page_and_json_say_the_same_first(name: str) -> None:
    made, expected = COMPARISONS[name]
    runs = [read(**one) for one in made]
    found = comparison_of(runs)
    said = [one["text"] for one in comparison_json(found)["findings"]]
    assert said[: len(expected)] == expected
    assert row_table(found).splitlines()[: len(said)] == said
    page = build(describe_comparison(runs, None, None, {}, []))
    assert page.first == said
    assert_ordered([one["kind"] for one in comparison_json(found)["findings"]], said)


def assert_ordered(kinds: list[str], said: list[str]) -> None:
    assert kinds == sorted(kinds, key=ORDER.index)
    assert all(text[0] == text[0].upper() or not text[0].isalpha() or ": " in text[:40] for text in said)
    assert all(text.endswith(".") for text in said)


def test_the_only_structure_has_its_figure_and_no_reason() -> None:
    """Check data sets of one structure on disk, whose sites count it and send no Dice by structure."""
    sites = {site: {"value": value, "structure_support": {"class_1": 10}} for site, value in PLAIN.items()}
    results = read(**run(inequality={"metric": "dice", "level": 0.95, "sites": sites}))
    table = class_table(results)
    assert table is not None
    assert [[getattr(cell, "text", cell) for cell in row] for row in table.rows] == [
        ["site-1", "0.80 of 10"], ["site-2", "0.60 of 10"], ["site-3", "0.70 of 10"],
    ]  # fmt: skip
    assert table.caption.endswith("number of test images that have it.")
    assert table.totals[0] == ["average", pytest.approx(0.7)]
    partial = class_table(read(**run(**PARTIAL)))
    assert partial is not None
    assert partial.caption.endswith("; -: not annotated there, or in no image.")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"suppressed": {"site-3": ["dice"]}}, "suppressed: fewer cases than its min_cases"),
        (
            {"suppressed": {"site-3": ["dice"]}, "info": {"said": {"site-3": {"min_cases": 4}}}},
            "suppressed: fewer than 4 cases",
        ),
        (
            {"suppressed": {"site-3": ["dice"]}, "info": {"privacy": {"site-3": PRIVATE}}},
            "suppressed: differential privacy",
        ),
        ({"test": {"site-3": {"dice": None}}}, "undefined there"),
        ({"info": {"connected": ["site-1", "site-2"]}}, "it never connected"),
    ],
)
def test_one_place_says_why_a_figure_is_missing(parts: dict[str, Any], reason: str) -> None:
    results = read(**run(**{"test": {"site-3": {"dice": None}}, **parts}))
    assert missing_reason(results, "dice", "site-3") == reason
    told = f"Average and spread of Dice are over 2 of 3 sites, without site-3 ({reason})."
    assert told in build(describe_run(results)).first
    assert told in fairness_table(results)
    assert f"({reason})" in row_table(comparison_of([results]))


def test_what_guessing_gives_stands_beside_a_classifiers_figure() -> None:
    """Check four classes: 1 / 4; and accuracy: 9 of 15 and 8 of 21 images are of the commonest class."""
    made = run(**OF_CLASSES)
    for of in made["test"].values():
        of["accuracy"] = 0.6
    results = read(**made)
    assert guess_of(results, "balanced_accuracy") == 0.25
    assert guess_of(results, "accuracy") == pytest.approx((9 / 15 + 8 / 21) / 2)
    assert guess_of(results, "auc_ovo") == 0.5
    rows = {row[0]: row for row in table_of(results).totals}
    assert rows["guessing"][1] == 0.25
    notes = comparison_of([read(**run(**OF_CLASSES, seed=seed)) for seed in (0, 1)]).notes
    assert notes[0].endswith("standard deviation over runs; guessing gives 0.250.")


def test_metrics_that_nobody_asked_for_are_folded() -> None:
    made = run(test={site: {"clean/dice": 0.5} for site in PLAIN}, groups=people(accuracy_gap=(0.05, 0.25)))
    results = read(**made)
    text = fairness_table(results)
    assert "Not shown: clean/dice, gaps_tone (the page has them, and fairflare show --markdown)." in text
    assert "accuracy_gap" not in text
    whole = fairness_table(results, style="markdown")
    assert "| clean/dice |" in whole
    assert "accuracy_gap" in whole
    folded = {
        part.name: part.folded  # type: ignore[union-attr]
        for section in build(describe_run(results)).sections for part in section.parts if hasattr(part, "folded")
    }  # fmt: skip
    assert folded["gaps_tone"]
    assert not folded["sites"]


def test_the_mix_of_classes_is_not_called_sampling() -> None:
    """Check a spread of .082 of sites of which .95, .58 and .60 are expected, and of equal expectations."""
    mixed = standing_of(
        {"site-1": (0.8, 0.95, 0.2), "site-2": (0.6, 0.58, 0.9), "site-3": (0.7, 0.6, 0.5)}, test=WITHIN
    )
    text = fairness_table(read(**run(inequality=mixed)))
    assert (  # distances -0.15, 0.02, 0.10: their deviation is .104
        "Standard deviation between these sites 0.080, between equally good ones 0.050 by their mix of classes and by "
        "sampling (permutation test within classes: p = 0.400); their distances from what is expected of each have "
        "0.104."
    ) in text
    assert "0.050 by sampling alone (permutation test: p = 0.400)." in fairness_table(
        read(**run(inequality=standing_of(EVEN)))
    )
