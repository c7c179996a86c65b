"""Show clinical figures of a classifier by site and class, with intervals over the cases, from the sites' reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairflare.base.checks import group_by_key
from fairflare.core.cells import CLINICAL, Cell, Vector, pivot, value_of
from fairflare.core.statistics.areas import ALL, OPERATING, area_interval
from fairflare.core.statistics.group_intervals import interval_over_cases
from fairflare.core.statistics.group_sums import CALIBRATION
from fairflare.core.statistics.inequality import errors_test
from fairflare.core.statistics.intervals import LEVEL, ROUNDING
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import MISSING, Shown, Table, interval, number, p_value
from fairflare.reporting.layout import Cell as Entry

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


def clinical_of(by_site: Mapping[str, Any]) -> tuple[list[Cell], list[Vector]]:
    """Return the cells of the figures that the sites sent, and the bins of each site's calibration.

    ``auc_p_value`` of a class is the p-value of the hypothesis that its AUC is equal at all sites, by Cochran's Q on
    the areas' logits with DeLong's variances; it has no value if fewer than two sites have an AUC.

    Args:
        by_site: figures of each site, from :func:`fairflare.federation.site.clinical.read_clinical`.
    """
    cells = list[Cell]()
    for site, classes in by_site.items():
        cells += [_cell(site, "", name, value) for name, value in classes[ALL].items() if name != CALIBRATION]
        cells += [cell for name, figures in classes.items() if name != ALL for cell in _figures(site, name, figures)]
    by_class = group_by_key(item for classes in by_site.values() for item in classes.items() if item[0] != ALL)
    for name, figures_of_sites in by_class.items():
        known = [
            figures
            for figures in figures_of_sites
            if figures["auc_variance"] > ROUNDING and min(figures["cases_with"], figures["cases_without"]) >= 2
        ]
        if len(known) > 1:
            cells.append(_cell("", name, "auc_p_value", errors_test(
                [figures["auc"] for figures in known],
                np.sqrt([figures["auc_variance"] for figures in known]).tolist(),
                [int(min(figures["cases_with"], figures["cases_without"])) for figures in known],
                low=0, high=1,
            ).p_value))  # fmt: skip
    return cells, [
        Vector(CALIBRATION, site, unit="bins", values=tuple(np.ravel(classes[ALL][CALIBRATION]).tolist()))
        for site, classes in by_site.items()
    ]


def _cell(site: str, part: str, name: str, value: float, low: float = math.nan, high: float = math.nan) -> Cell:
    return Cell(name, site, split=CLINICAL, part=part, value=float(value), low=float(low), high=float(high))


def _figures(site: str, part: str, numbers: Mapping[str, Any]) -> list[Cell]:
    """Return the figures of a class at a site, with shares and intervals."""
    total, squares = (
        np.array([numbers[f"{name}_{side}"] for side in ("with", "without")]) for name in ("cases", "squares")
    )
    images = np.array([numbers["tp"] + numbers["fn"], numbers["fp"] + numbers["tn"]])
    cells: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in numbers.items()}
    cells["prevalence"] = (images[0] / images.sum(),)
    cells["auc"] = (numbers["auc"], *area_interval(numbers["auc"], numbers["auc_variance"], *total))
    for side, share in OPERATING:
        suffix = f"_at_{side}_{share:.2f}"
        rates = interval_over_cases(
            np.array([numbers["tp" + suffix], numbers["tn" + suffix]]), images, squares, 1 - LEVEL
        ).clip(0, 1)
        cells |= {name + suffix: tuple(row) for name, row in zip(SIDES, rates, strict=True)}
    return [_cell(site, part, name, *values) for name, values in cells.items()]


def clinical_at(results: RunResults) -> dict[str, dict[str, dict[str, Cell]]]:
    """Return the clinical figures as ``{site: {class: {name: cell}}}``; no site, no class: of all together."""
    return pivot((cell for cell in results.cells if cell.split == CLINICAL), "site", "part", "metric")


def clinical_table(results: RunResults) -> Table:
    """Return a table with a row for each site and class; a site's first row has the figures of all classes together."""
    asked = [(name, side, f"_at_{side}_{share:.2f}") for name, (side, share) in zip(SIDES, OPERATING, strict=True)]
    rows: list[Sequence[Entry]] = []
    for site, by_class in clinical_at(results).items():
        of_classes = [(name, cells) for name, cells in by_class.items() if name]
        for rank, (name, class_cells) in enumerate((of_classes or [(MISSING, {})]) if site else ()):
            over_all = by_class.get("", {}) if rank == 0 else {}
            precision, counts = (
                [value_of(class_cells, key) for key in keys] for keys in (("pr_auc", "prevalence"), COUNTS)
            )
            rows.append([
                site, name, _sure(class_cells, "auc"),
                Shown(MISSING if None in precision else "{} ({})".format(*map(number, precision)), precision),
                *(_sure(class_cells, rate + suffix, side + suffix) for rate, side, suffix in asked),
                Shown(MISSING if None in counts else "/".join(f"{count:.0f}" for count in counts), counts),
                value_of(over_all, "brier"), value_of(over_all, "ece"),
            ])  # fmt: skip
    return Table(
        "clinical", CAPTION, [
            "site", "class", "AUC", "PR-AUC (share)",
            *((rate + suffix).replace("_", " ") for rate, _, suffix in asked),
            "/".join(COUNTS).upper(), "Brier", "ECE",
        ], rows,
        folded=True, lead=2,
        csv_columns=[
            ["site"], ["class"], [f"auc{end}" for end in ENDS], ["pr_auc", "prevalence"],
            *([rate + suffix + end for end in ENDS] + [side + suffix] for rate, side, suffix in asked), COUNTS,
            ["brier"], ["ece"],
        ],
    )  # fmt: skip


def _sure(cells: Mapping[str, Cell], name: str, attained: str = "") -> Shown:
    """Return a cell of a figure with its interval and, with ``attained``, another figure after it."""
    cell, more = cells.get(name, Cell(name)), value_of(cells, attained)
    ends = interval(cell.low, cell.high)
    text = number(cell.value) + ("" if ends == MISSING else f" {ends}") + ("" if more is None else f"; {number(more)}")
    return Shown(text, [cell.value, cell.low, cell.high, *([more] if attained else [])])


def clinical_words(results: RunResults) -> tuple[str, float]:
    """Return a sentence on the class whose AUC differs most between sites, and the p-value that belongs to it.

    The sentence is empty and the p-value NaN if no class has an AUC at two sites.
    """
    by_site = clinical_at(results)
    tests = {
        name: p for name, cells in by_site.pop("", {}).items() if (p := value_of(cells, "auc_p_value")) is not None
    }
    known = [
        (tests[name], name, cells["auc"].value, site)
        for site, classes in by_site.items() for name, cells in classes.items()
        if name in tests and value_of(cells, "auc") is not None
    ]  # fmt: skip
    if not known:
        return "", math.nan
    least, name, _, site = min(known, key=lambda one: one[:3])
    p = min(1.0, least * len(tests))
    sure = "differ by more than chance explains" if p <= 1 - LEVEL else "may differ by chance"
    many = f", corrected for {len(tests)} classes" if len(tests) > 1 else ""
    return (
        f"The sites' AUCs of {name} {sure} (p {p_value(p)}, Cochran's Q on DeLong's variances{many}); the lowest is "
        f"that of {site}: {_sure(by_site[site][name], 'auc').text}.",
        p,
    )
