"""Show the results of each row: at each site, on average, at the worst site, and differences beyond noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.base.checks import true_texts
from fairflare.core.cells import LAST
from fairflare.core.cells import Cell as Measured
from fairflare.reporting.layout import Cell, Table, number, spread
from fairflare.reporting.sites.clinical import HOW, clinical_table
from fairflare.reporting.table import class_table, table_of
from fairflare.reporting.values import metrics_of, rests_on, sentence, site_columns, spell_metric, summary_of
from fairflare_lab.compare.comparison import rows_table
from fairflare_lab.compare.difference_table import notes_of_differences, table_of_differences
from fairflare_lab.compare.differences import BETTER, MEASURES, WORSE, Difference
from fairflare_lab.page.content import NOTHING, Picture, Section
from fairflare_lab.page.material import Material, name_metric
from fairflare_lab.page.style import INK, chart, label, look, rows_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 60


def results(material: Material) -> Section:
    """Return the section with tables and bars of the final test; without a test it has notes only."""
    title, name = "What every site gets", name_metric(material)
    if not any(math.isfinite(summary.mean) for row in material.rows for summary in row.summaries):
        return Section("results", title, material.notes)
    rows, run, notes = material.rows, material.runs[0], list(material.notes)
    sites = [site for site in material.sites if any(site in values for row in rows for values in row.values)]
    if len(material.runs) == 1:
        whole = replace(
            table_of(run, None if material.metric in metrics_of(run) else material.metric, tests=True), name="sites",
            caption=f"The test splits of every site, in {name} and what else the task measures.",
        )  # fmt: skip
        clinical = clinical_table(run)
        classes = class_table(run) if material.metric == run.inequality.metric else None
        tables = [whole, clinical, *filter(None, [classes])]
        notes += [HOW] * bool(clinical.rows)
    else:
        over = "; ± is the population standard deviation over seeds" if material.over_seeds else ""
        caption = f"{sentence(name)} on the test splits over the sites, each counting once{over}."
        tables = [
            replace(rows_table(rows, material.metric, []), name="results", caption=caption),
            Table("sites", f"{sentence(name)} on the test split of every site{over}.",
                  ["site", *(row.label for row in rows)],
                  [[site, *(row.cell(site) for row in rows)] for site in sites]),
            _further(material),
        ]  # fmt: skip
    return Section("results", title, notes, [_sites_picture(material, sites), *tables])


def _further(material: Material) -> Table:
    """Return a table of the task's other metrics on average over sites, for several runs."""
    every = (name for run in material.runs if site_columns(run) for name in metrics_of(run))
    names = [name for name in dict.fromkeys(every) if name != material.metric]
    cells: list[list[Cell]] = [
        [row.label, *(spread([summary_of(run, name).mean for run in row.runs]) for name in names)]
        for row in material.rows
    ]
    return Table(
        "metrics", "The other metrics, on average over the sites.",
        ["method", *(spell_metric(name) + rests_on(material.runs[0], name) for name in names)], cells if names else [],
        folded=True, csv_columns=[["method"], *([f"{name} mean", f"{name} sd"] for name in names)],
    )  # fmt: skip


def plot(folder: Path) -> Figure:
    """Draw the picture of all sites and methods for the runs in a folder, outside of a page.

    Raises:
        ValueError: the folder holds no run with test results.
    """
    from fairflare_lab.page.material import read_material

    for part in results(read_material(folder)).parts:
        if isinstance(part, Picture):
            return part.draw()
    raise ValueError(f"{folder} holds no run with test results of sites")


def _sites_picture(material: Material, sites: Sequence[str]) -> Picture:
    """Return a picture with a bar for each site and method; of many sites, those furthest behind in the first row."""
    rows, metric, most = material.rows, name_metric(material), max(3, MAX_BARS // len(material.rows))
    column = material.runs[0].columns.get(LAST, {}).get(material.metric, {}) if len(material.runs) == 1 else {}
    how = " ".join(true_texts({
        f"A bar for each site{' and method.' if len(rows) > 1 else '; the dashed line is the average.'}": True,
        "A thin line is the standard deviation over seeds.": material.over_seeds,
        "A thin line is the site's 95 % interval, from its own test cases.": any(
            cell.low is not None for cell in column.values()
        ),
        f"Drawn: the {most} of {len(sites)} sites with the worst values in the first run; the table has all.": (
            len(sites) > most
        ),
        f"{'Longer' if material.higher else 'Shorter'} is better: a fair method has no site far behind.": True,
    }))  # fmt: skip
    if len(sites) > most:
        known = rows[0].values[0]
        ranked = sorted(known, key=lambda site: known[site] if material.higher else -known[site])[:most]
        sites = [site for site in sites if site in ranked]
    height = 1.2 + max(0.5, len(rows) * len(sites) * 0.13 + len(sites) * 0.12)
    draw = partial(
        chart, partial(_fill, material, sites, column), height, f"{sentence(metric)} on the test splits",
        material.synthetic, count=len(rows), xlabel=metric,
    )  # fmt: skip
    return Picture("sites", draw, how)


def _fill(material: Material, sites: Sequence[str], column: Mapping[str, Measured], axes: Axes) -> None:
    rows, thick = material.rows, 0.84 / len(material.rows)
    for index, row in enumerate(rows):
        style, of = look(index), [row.summarise_site(site) for site in sites]
        ends: list[Any] = [[one.sd if one.sd > 0 else 0 for one in of]] * 2
        if column:
            cells = [column.get(site, Measured()) for site in sites]
            ends = [
                [0 if end is None else max(0.0, abs(end - one.mean)) for end, one in zip(side, of, strict=True)]
                for side in ([cell.low for cell in cells], [cell.high for cell in cells])
            ]
        axes.barh(
            [k - 0.42 + thick * (index + 0.5) for k in range(len(sites))],
            [one.mean for one in of], thick * 0.92, label=label(row.label), color=style.colour,
            edgecolor=INK, linewidth=0.5, hatch=style.hatch, error_kw={"elinewidth": 0.9, "ecolor": INK}, xerr=ends,
        )  # fmt: skip
    if len(rows) == 1:
        mean = rows[0].summarise("mean").mean
        axes.axvline(mean, color=INK, linestyle="--", linewidth=1)
        axes.annotate(f"average {number(mean)}", (mean, 1), (3, -1), xycoords=("data", "axes fraction"),
                      textcoords="offset points", va="bottom", fontsize=8)  # fmt: skip
    rows_at(axes, sites)
    if not any(row.summarise_site(site).mean for row in rows for site in sites):
        axes.set_xlim(0, 1)  # all values are 0, which gives no scale


# ------------------------------------------------------------------------------------------------ differences


def differences(material: Material) -> Section:
    """Return the section with differences of every row to the reference; empty for no differences."""
    found, reference = material.differences, material.reference
    if not found:
        return NOTHING
    totals = [d for d in found if d.measure in MEASURES]
    how, *notes = notes_of_differences(found, reference)
    notes.append("They hold for other patients of these hospitals, if at all; of other hospitals they say nothing.")
    height = 0.8 + (0.7 + 0.28 * len({d.label for d in totals})) * len(MEASURES)
    draw = partial(
        chart, partial(_forest, material, totals), height,
        f"{sentence(name_metric(material))}: differences to {reference}",
        material.synthetic, panels=len(MEASURES),
    )  # fmt: skip
    caption = (
        "A filled mark is beyond noise, after Holm's correction. An empty mark means that no difference was shown, "
        f"even if its interval excludes 0. {'To the right' if material.higher else 'To the left'} is better for "
        "average and worst site, to the left for the spread."
    )
    of_sites = table_of_differences([d for d in found if d.measure not in MEASURES], reference)
    return Section("differences", f"Differences to {reference}", notes, [
        Picture("differences", draw, caption), replace(table_of_differences(totals, reference), caption=how),
        replace(of_sites, name="differences_sites", caption="The same for every site.", folded=True),
    ])  # fmt: skip


def _forest(material: Material, found: Sequence[Difference], *panels: Axes) -> None:
    labels = list(dict.fromkeys(d.label for d in found))
    ranks = [row.label for row in material.rows]
    for axes, measure, title in zip(panels, MEASURES, ("average", "spread (std)", "worst site"), strict=True):
        axes.axvline(0, color=INK, linewidth=0.9)
        for d in (d for d in found if d.measure == measure):
            style, place, beyond = look(ranks.index(d.label)), labels.index(d.label), d.verdict in (BETTER, WORSE)
            axes.plot([d.low, d.high], [place, place], color=style.colour, linewidth=1.6)
            axes.plot([d.mean], [place], style.marker, color=style.colour, markersize=7,
                      markerfacecolor=style.colour if beyond else "none")  # fmt: skip
            if beyond:
                axes.annotate(
                    d.verdict, (d.mean, place), (0, 5), textcoords="offset points", ha="center", fontsize=7.5,
                    fontweight="bold" if d.verdict == BETTER else "normal",
                )  # fmt: skip
        axes.set_title(title)
        axes.locator_params(axis="x", nbins=5)
        rows_at(axes, labels, above=0.7)
