"""Show clinical figures of a classifier by site and class, with intervals over the cases, from the sites' reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairflare.core.statistics.areas import ALL, OPERATING, ROUNDING, area_interval
from fairflare.core.statistics.group_intervals import over_cases
from fairflare.core.statistics.inequality import errors_test
from fairflare.core.statistics.intervals import LEVEL
from fairflare.reporting.documents import Results
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, interval, number, p_value

COUNTS = ("tp", "fp", "fn", "tn")
SIDES = ("sensitivity", "specificity")
MOST_ROWS = 12  # largest number of rows of the table that a terminal shows
CAPTION = (
    "Clinical figures of each class against the rest, or of each finding, on the test images, with 95 % intervals over "
    "the cases."
)
HOW = (
    "Of two classes the second is looked for, of findings each. Intervals of AUC are DeLong's. Behind PR-AUC stands "
    "the share of the class, which is what guessing gets. Thresholds of the operating points are each site's own, from "
    "its validation split; behind the semicolon stands what the test split attains of what was asked for. Brier and "
    "ECE, in a site's first row, are over all of its classes or findings. A dash: withheld, or too few test cases with "
    "or without the class."
)
ENDS = ("", "_low", "_high")


def clinical_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``clinical`` of ``results.json``, ``{site: {class: {name: figure}}}``, from figures that the sites sent.

    ``auc_p_value`` of a class is the p-value of the hypothesis that its AUC is equal at all sites, by Cochran's Q on
    the areas' logits with DeLong's variances; NaN if fewer than two sites have an AUC.

    Args:
        told: figures of each site, from :func:`fairflare.federation.site.clinical.read_clinical`.
    """
    found = {site: {name: _figures(of) for name, of in classes.items()} for site, classes in told.items()}
    for name in dict.fromkeys(name for classes in told.values() for name in classes if name != ALL):
        own = [classes[name] for classes in found.values() if name in classes]
        known = [of for of in own if of["auc_variance"] > ROUNDING and min(of["cases_with"], of["cases_without"]) >= 2]
        p = math.nan
        if len(known) > 1:
            errors = np.sqrt([of["auc_variance"] for of in known]).tolist()
            cases = [int(min(of["cases_with"], of["cases_without"])) for of in known]
            p = errors_test([of["auc"] for of in known], errors, cases, low=0, high=1).p_value
        for of in own:
            of["auc_p_value"] = p
    return found


def _figures(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a class with shares and intervals; figures of all classes together are not changed."""
    if "auc" not in of:
        return dict(of)
    total, squares = (np.array([of[f"{name}_{side}"] for side in ("with", "without")]) for name in ("cases", "squares"))
    images = np.array([of["tp"] + of["fn"], of["fp"] + of["tn"]])
    low, high = area_interval(of["auc"], of["auc_variance"], *total)
    found = {**of, "prevalence": images[0] / images.sum(), "auc_low": low, "auc_high": high}
    for side, share in OPERATING:
        at = f"_at_{side}_{share:.2f}"
        rates = over_cases(np.array([of["tp" + at], of["tn" + at]]), images, squares, 1 - LEVEL).clip(0, 1)
        for name, row in zip(SIDES, rates, strict=True):
            found |= {name + at + end: value for end, value in zip(ENDS, row, strict=True)}
    return found


def clinical_table(results: Results) -> Table:
    """Return a table with a row for each site and class; a site's first row has the figures of all classes together."""
    asked = [(told, side, f"_at_{side}_{share:.2f}") for told, (side, share) in zip(SIDES, OPERATING, strict=True)]
    rows: list[Sequence[Cell]] = []
    every: Mapping[str, Mapping[str, Mapping[str, Any]]] = results.clinical
    for site, found in every.items():
        of_classes = [(name, of) for name, of in found.items() if name != ALL]
        for rank, (name, of) in enumerate(of_classes or [(MISSING, {})]):
            over_all = found.get(ALL, {}) if rank == 0 else {}
            precision, counts = ([of.get(name) for name in names] for names in (("pr_auc", "prevalence"), COUNTS))
            rows.append([
                site, name, _sure(of, "auc"),
                Shown(MISSING if None in precision else "{} ({})".format(*map(number, precision)), precision),
                *(_sure(of, told + at, side + at) for told, side, at in asked),
                Shown(MISSING if None in counts else "/".join(f"{count:.0f}" for count in counts), counts),
                over_all.get("brier"), over_all.get("ece"),
            ])  # fmt: skip
    heads = [(told + at).replace("_", " ") for told, _, at in asked]
    return Table(
        "clinical", CAPTION,
        ["site", "class", "AUC", "PR-AUC (share)", *heads, "/".join(COUNTS).upper(), "Brier", "ECE"], rows,
        folded=True, lead=2,
        csv_columns=[
            ["site"], ["class"], [f"auc{end}" for end in ENDS], ["pr_auc", "prevalence"],
            *([told + at + end for end in ENDS] + [side + at] for told, side, at in asked), COUNTS, ["brier"], ["ece"],
        ],
    )  # fmt: skip


def _sure(of: Mapping[str, Any], name: str, attained: str = "") -> Shown:
    """Return a cell of a figure with its interval and, with ``attained``, another figure after it."""
    value, *ends = (of.get(name + end) for end in ENDS)
    told, more = interval(*ends), of.get(attained)
    text = number(value) + ("" if told == MISSING else f" {told}") + ("" if more is None else f"; {number(more)}")
    return Shown(text, [value, *ends, *([more] if attained else [])])


def clinical_words(results: Results) -> tuple[str, float]:
    """Return a sentence on the class whose AUC differs most between sites, and the p-value that belongs to it.

    The sentence is empty and the p-value NaN if no class has an AUC at two sites.
    """
    every: list[tuple[str, str, Mapping[str, Any]]] = [
        (name, site, of) for site, found in results.clinical.items() for name, of in found.items()
    ]
    own = [one for one in every if None not in (one[2].get("auc_p_value"), one[2].get("auc"))]
    if not own:
        return "", math.nan
    name, site, of = min(own, key=lambda one: (one[2]["auc_p_value"], one[0], one[2]["auc"]))
    classes = len({name for name, _, _ in own})
    p = min(1.0, of["auc_p_value"] * classes)
    sure = "differ by more than chance explains" if p <= 1 - LEVEL else "may differ by chance"
    many = f", corrected for {classes} classes" if classes > 1 else ""
    return (
        f"The sites' AUCs of {name} {sure} (p {p_value(p)}, Cochran's Q on DeLong's variances{many}); the lowest is "
        f"that of {site}: {_sure(of, 'auc').text}.",
        p,
    )
