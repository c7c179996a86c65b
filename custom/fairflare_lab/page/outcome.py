"""Show the results of each row: at each site, on average, at the worst site, and differences beyond noise."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.core.cells import CLINICAL
from fairflare.core.statistics.intervals import LEVEL
from fairflare.reporting.layout import Shown, counted, interval, number, spread
from fairflare.reporting.sites.clinical import HOW, clinical_table
from fairflare.reporting.table import class_table, table_of
from fairflare.reporting.values import (
    extra_list_metrics,
    in_words,
    metrics_of,
    rests_on,
    sentence,
    site_columns,
    summary_of,
)
from fairflare_lab.compare.comparison import rows_table
from fairflare_lab.compare.difference_table import figures_of, interval_of, notes_of_differences
from fairflare_lab.compare.differences import BETTER, MEASURES, WORSE, Difference
from fairflare_lab.page.content import NOTHING, Cell, Picture, Section, Table, extremes, listed
from fairflare_lab.page.material import Material, PageRow, images_of, spelt
from fairflare_lab.page.style import INK, chart, label, look, rows_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BAR_SITES = 10  # with more sites the picture has dots in place of bars
MAX_BARS = 60


def results(material: Material) -> Section:
    """Return the section with tables and bars of the final test; without a test it has notes only."""
    title = "What every site gets"
    if not material.tested:
        return Section("results", title, notes=material.notes)
    rows, run, one = material.rows, material.runs[0], len(material.runs) == 1
    # Sites of the runs, also those without a value.
    sites = [site for site in material.sites if any(site in values for row in rows for values in row.values)]
    parts: list[Picture | Table] = [_sites_picture(material, sites)]
    if one:
        known = None if material.metric in metrics_of(run) else material.metric
        caption = f"The test splits of every site, in {spelt(material)} and what else the task measures."
        for name, short in (("sites", True), ("metrics_of_lists", False)):
            found = table_of(run, known, short=short, tests=True)
            table = replace(found, name=name, caption=caption, rows=[*found.rows, *found.totals], totals=())
            parts += [replace(table, folded=not short)] * bool(short or extra_list_metrics(run))
        parts += [clinical_table(run), *filter(None, [class_table(run) if intervals(material) else None])]
    else:
        over = "; ± is the population standard deviation over seeds" if material.over_seeds else ""
        whole = replace(rows_table(rows, material.metric, []), name="results")
        caption = f"{sentence(spelt(material))} on the test splits over the sites, each counting once{over}."
        values = [[site, *(row.cell(site) for row in rows)] for site in sites]
        of_sites = f"{sentence(spelt(material))} on the test split of every site{over}."
        parts = [
            replace(whole, caption=caption), *parts,
            Table("sites", of_sites, ["site", *(row.label for row in rows)], values), _further(material),
        ]  # fmt: skip
    how = [HOW] if one and any(cell.split == CLINICAL for cell in run.cells) else []
    return Section("results", title, notes=[*material.notes, *how], parts=parts)


def _further(material: Material) -> Table:
    """Return a table of the task's other metrics on average over sites, for several runs."""
    every = dict.fromkeys(name for run in material.runs if site_columns(run) for name in metrics_of(run))
    names = [name for name in every if name != material.metric]
    cells: list[list[Cell]] = [
        [row.label, *(spread([summary_of(run, name).mean for run in row.runs]) for name in names)]
        for row in material.rows
    ]
    heads = [in_words(name) + rests_on(material.runs[0], name) for name in names]
    raw = [["method"], *([f"{name} mean", f"{name} sd"] for name in names)]
    return Table(
        "metrics", "The other metrics, on average over the sites.", ["method", *heads], cells if names else [],
        folded=True, csv_columns=raw,
    )  # fmt: skip


def intervals(material: Material) -> dict[str, dict[str, Any]]:
    """Return a single run's intervals and tests by site; empty for several runs, or a metric that is not tested."""
    found = material.runs[0]["inequality"] if len(material.runs) == 1 else None
    return found["sites"] if found and found["metric"] == material.metric else {}


def has_ends(own: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether any site's metric has a confidence interval."""
    return any(of["low"] is not None for of in own.values())


def test_images(material: Material) -> dict[str, int]:
    """Return the number of test images by site, without sites that do not report it or differ between runs."""
    told = {(site, n): None for run in material.runs for site, split, n in images_of(run.info) if split == "test"}
    times = Counter(site for site, _ in told)
    return {site: count for site, count in told if times[site] == 1}


def plot(folder: Path) -> Figure:
    """Draw the picture of all sites and methods for the runs in a folder, outside of a page.

    Raises:
        ValueError: the folder holds no run with test results.
    """
    from fairflare_lab.page.material import read_material

    material = read_material(folder)
    pictures = [part for part in results(material).parts if isinstance(part, Picture)]
    if not pictures:
        raise ValueError(f"{folder} holds no run with test results of sites")
    return pictures[0].draw()


def _sites_picture(material: Material, sites: Sequence[str]) -> Picture:
    rows, metric, count = material.rows, spelt(material), len(material.rows) * len(sites)
    bars = len(sites) <= MAX_BAR_SITES and count <= MAX_BARS
    worst = [f"{row.label}: {_extremes(row)}" if material.reference else _extremes(row) for row in rows]
    if bars:
        fill, better, title = _fill_bars, ("Longer", "Shorter"), f"{sentence(metric)} on the test splits"
        how = "A bar for each site" + (" and method." if len(rows) > 1 else "; the dashed line is the average.")
        how += " A thin line is the standard deviation over seeds." if material.over_seeds else ""
        how += (
            " A thin line is the site's 95 % interval, from its own test cases."
            if has_ends(intervals(material))
            else ""
        )
        height = 1.2 + max(0.5, count * 0.13 + len(sites) * 0.12)
    else:
        fill, better = _fill_dots, ("To the right", "To the left")
        title, height = f"{sentence(metric)} on the test splits of {len(sites)} sites", 1.1 + 0.34 * len(rows)
        how = "A dot for each site, a row for each method; the vertical stroke is the average."
    return Picture(
        "sites",
        partial(chart, partial(fill, material, sites), height, title, material.synthetic,
                count=len(rows) if bars else 0, xlabel=metric),
        f"{how} {better[not material.higher]} is better: a fair method has no site far behind.",
        f"{sentence(metric)} by site{' and method. ' if material.reference else ': '}{listed(worst, '; ')}.",
    )  # fmt: skip


def _extremes(row: PageRow) -> str:
    return extremes({site: row.at(site).mean for values in row.values for site in values}) or "no value"


def _fill_bars(material: Material, sites: Sequence[str], axes: Axes) -> None:
    rows, thick = material.rows, 0.84 / len(material.rows)
    for index, row in enumerate(rows):
        style = look(index)
        axes.barh(
            [k - 0.42 + thick * (index + 0.5) for k in range(len(sites))],
            [row.at(site).mean for site in sites], thick * 0.92, label=label(row.label), color=style.colour,
            edgecolor=INK, linewidth=0.5, hatch=style.hatch, error_kw={"elinewidth": 0.9, "ecolor": INK},
            xerr=_errors(material, sites, row),
        )  # fmt: skip
    if len(rows) == 1:
        mean = rows[0].over("mean").mean
        axes.axvline(mean, color=INK, linestyle="--", linewidth=1)
        axes.annotate(f"average {number(mean)}", (mean, 1), (3, -1), xycoords=("data", "axes fraction"),
                      textcoords="offset points", va="bottom", fontsize=8)  # fmt: skip
    counts = test_images(material)
    names = [label(site) + (f"\n{counted(counts[site], 'image')}" if site in counts else "") for site in sites]
    axes.set_yticks(range(len(sites)), names)
    axes.invert_yaxis()
    if not any(row.at(site).mean for row in rows for site in sites):
        axes.set_xlim(0, 1)  # all values are 0, which gives no scale


def _errors(material: Material, sites: Sequence[str], row: PageRow) -> Any:
    """Return lengths of error bars to both sides: deviations over seeds, or a single run's intervals by site."""
    if len(row.runs) > 1:
        return [[of.sd if math.isfinite(of.sd) else 0 for of in map(row.at, sites)]] * 2
    own = intervals(material)
    ends = [[(own.get(site) or {}).get(end) for site in sites] for end in ("low", "high")]
    means = [row.at(site).mean for site in sites]
    return [
        [0 if x is None else max(0.0, abs(x - mean)) for x, mean in zip(of, means, strict=True)] for of in ends
    ] if own else None  # fmt: skip


def _fill_dots(material: Material, sites: Sequence[str], axes: Axes) -> None:
    for index, row in enumerate(material.rows):
        finite = [mean for site in sites if math.isfinite(mean := row.at(site).mean)]
        places = [index + 0.24 * math.sin(2.399 * k) for k in range(len(finite))]  # spread, so that dots do not overlap
        axes.scatter(finite, places, s=14, color=look(index).colour, alpha=0.75, linewidths=0)
        mean = statistics.fmean(finite or [math.nan])  # NaN is not drawn
        axes.plot([mean, mean], [index - 0.38, index + 0.38], color=INK, linewidth=1.6)
    rows_at(axes, [row.label for row in material.rows])


# ------------------------------------------------------------------------------------------------ differences


def differences(material: Material) -> Section:
    """Return the section with differences of every row to the reference; empty for no differences."""
    found, reference = material.differences, material.reference
    if not found:
        return NOTHING
    of = [d for d in found if d.measure in MEASURES]
    told = listed((_in_short([d for d in of if d.label == name]) for name in dict.fromkeys(d.label for d in of)), "; ")
    notes = notes_of_differences(found, reference)[1:]  # without the first note, which the table's caption has
    notes.append(
        "They hold for other patients of these hospitals; of other hospitals they say nothing."
        if any(math.isfinite(d.images_sd) for d in of)
        else "The intervals are over the seeds alone: of other patients than those of the test splits they say nothing."
    )
    picture = Picture(
        "differences",
        partial(
            chart,
            partial(_forest, material, of),
            0.8 + (0.7 + 0.28 * len({d.label for d in of})) * len(MEASURES),
            f"{sentence(spelt(material))}: differences to {reference}",
            material.synthetic,
            panels=len(MEASURES),
        ),
        "A filled mark is beyond noise, after Holm's correction. An empty mark means that no difference was shown, "
        f"even if its interval excludes 0. {'To the right' if material.higher else 'To the left'} is better for "
        "average and worst site, to the left for the spread.",
        f"Differences to {reference}. {told}.",
    )
    table = _table(
        "differences", of, reference,
        f"Row minus {reference}, paired by {'site' if all(d.of_given for d in of) else 'seed and site'}: mean, "
        f"{LEVEL:.0%} interval{interval_of(found)}, the p-value "
        "that belongs to it, the same after Holm's correction for all rows and measures, the smallest difference that "
        "would have been seen, standard deviation of the differences over the seeds.",
    )  # fmt: skip
    by_site = _table(
        "differences_sites", [d for d in found if d.measure not in MEASURES], reference,
        f"The same for every site (row minus {reference}); corrected for all rows and sites.", folded=True,
    )  # fmt: skip
    return Section("differences", f"Differences to {reference}", notes=notes, parts=[picture, table, by_site])


def _table(name: str, found: Sequence[Difference], reference: str, caption: str, *, folded: bool = False) -> Table:
    """Return a table of differences; a difference and its interval share a cell, with common decimals."""
    before, after = ["method", "measure", "seeds"], ["p", "p_holm", "smallest", "sd", "verdict"]
    middle = [Shown(interval(d.low, d.high, d.mean), [d.mean, d.low, d.high]) for d in found]
    sides = (figures_of(found, names, reference) for names in (before, after))
    rows: list[list[Cell]] = [[*left, one, *right] for left, right, one in zip(*sides, middle, strict=True)]
    heads = [*before, "difference", "p", "p (Holm)", "visible from", "sd", "verdict"]
    in_files = [*([of] for of in before), ["difference", "low", "high"], *([of] for of in after)]
    return Table(name, caption, heads, rows, folded, csv_columns=in_files)


def _in_short(found: Sequence[Difference]) -> str:
    """Return one row's differences in words; a verdict that all of them share is given once."""
    alike = len({d.verdict for d in found}) == 1
    parts = [f"{d.measure} {number(d.mean, sign='+')}{'' if alike else f' ({d.verdict})'}" for d in found]
    return f"{found[0].label}: {', '.join(parts)}{f', all {found[0].verdict}' if alike else ''}"


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
