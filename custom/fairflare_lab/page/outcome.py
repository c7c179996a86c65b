"""What every row reached: at each site, on average, at the worst site; and what of it is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fairflare.core.fairness import summarize
from fairflare.core.statistics.intervals import LEVEL
from fairflare.reporting.documents import SUPPRESSED, Results
from fairflare.reporting.layout import Shown, counted, interval, number, spread
from fairflare.reporting.standing import tested
from fairflare.reporting.table import class_table
from fairflare.reporting.values import (
    by_site_of,
    global_metrics,
    global_values,
    in_words,
    metrics_of,
    suppressed_of,
    title_of,
)
from fairflare_lab.compare.difference_table import figures_of, interval_of, notes_of_differences
from fairflare_lab.compare.differences import BETTER, MEASURES, WORSE, Difference
from fairflare_lab.page.content import Cell, Picture, Section, Spread, Table, listed
from fairflare_lab.page.material import Material, PageRow
from fairflare_lab.page.style import INK, figure, label, legend, look, panel, rows_of_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BAR_SITES = 10  # more become dots
MAX_BARS = 60
OF_SITE = {"low": "low", "high": "high", "test_cases": "test cases", "expected": "expected", "p_value": "p"}
CHANCE = "chance_std"
SUMMARIES = (
    ("average", "mean"), ("std", "std"), ("std if equal", CHANCE), ("worst", "worst"),
    ("worst decile", "bottom_decile"),
)  # fmt: skip


def results(material: Material) -> Section | None:
    """Tables and bars of the final test; without one, what there is to say of it."""
    title = "What every site gets"
    if not material.tested:
        return Section("results", title, notes=material.notes) if material.notes else None
    rows, metric = material.rows, in_words(material.metric)
    entered = {site for row in rows for values in row.values for site in values}  # with a value or none
    sites = [site for site in material.sites if site in entered]
    several = any(len(row.runs) > 1 for row in rows)
    over = "; ± is the population standard deviation over seeds" if several else ""
    known = any(math.isfinite(of_row(row, CHANCE, material.metric).mean) for row in rows)
    shown = {name: attribute for name, attribute in SUMMARIES if known or attribute != CHANCE}
    names = [row.label if material.reference else title_of(row.runs[0].document) for row in rows]
    totals = Table(
        "results",
        f"{metric} on the test splits over the sites, each counting once{over}. Worst decile: mean of the "
        "worst tenth of the sites, at least one."
        + (" Std if equal: what equal sites would show by sampling alone." if known else ""),
        ["method", "runs", *shown, "sites"],
        [
            [called, len(row.runs), *(of_row(row, attribute, material.metric) for attribute in shown.values()),
             max(summary.num_sites for summary in row.summaries)]
            for called, row in zip(names, rows, strict=True)
        ],
    )  # fmt: skip
    own, counts = intervals(material), test_images(material)
    more = "; 95 % interval by its own test cases; what is expected of equal sites; p: how often one is so far off"
    by_site = Table(
        "sites",
        f"{metric} on the test split of every site{over or (more if own else '')}.",
        [
            "site",
            *(["test images"] if counts else []),
            *([metric] if len(material.runs) == 1 and not material.reference else [row.label for row in rows]),
            *(OF_SITE.values() if own else ()),
        ],
        [_of_site(site, rows, counts, own) for site in sites],
    )
    parts: list[Picture | Table] = [
        totals,
        *_global(rows, material.metric, over),
        _sites_picture(material, sites),
        by_site,
    ]
    parts += _further(material, sites)
    if own and (found := class_table(material.runs[0].document)):
        parts.append(found)
    return Section("results", title, notes=material.notes, parts=parts)


def _further(material: Material, sites: Sequence[str]) -> list[Table]:
    """Return the task's other metrics (Dice by structure): of one run by site, else on average over sites."""
    one, rows = len(material.runs) == 1, material.rows
    runs = [run.document for run in material.runs if run.document["test"]]
    names = [name for name in dict.fromkeys(n for run in runs for n in metrics_of(run)) if name != material.metric]
    if one:
        by_name = {name: by_site_of(runs[0], name) for name in names}
        home = {name: suppressed_of(runs[0], name) for name in names}
        cells: list[list[Cell]] = [
            [site, *(SUPPRESSED if site in home[n] else of.get(site) for n, of in by_name.items())] for site in sites
        ]
    else:
        cells = [[row.label, *(spread([_mean(run.document, n) for run in row.runs]) for n in names)] for row in rows]
    heads = ["site" if one else "method", *map(in_words, names)]
    text = "The other metrics" + (" on the test split of every site." if one else ", on average over the sites.")
    raw = [[name] if one else [f"{name} mean", f"{name} sd"] for name in names]
    return [Table("metrics", text, heads, cells, csv_columns=[heads[:1], *raw])] if names else []


def _mean(run: Results, metric: str) -> float:
    return summarize(by_site_of(run, metric), higher_is_better=None).mean


def _global(rows: Sequence[PageRow], metric: str, over: str) -> list[Picture | Table]:
    """What the common model is worth on the images of all sites together, where there are such."""
    names = dict.fromkeys(name for row in rows for run in row.runs for name in global_metrics(run.document, metric))
    text = f"The common model on the global test, images that belong to no site alone{over}."
    cells: list[list[Cell]] = [
        [row.label, *(spread([global_values(run.document, name)[0] for run in row.runs]) for name in names)]
        for row in rows
    ]
    return [Table("global_test", text, ["method", *names], cells)] if names else []


def _of_site(
    site: str, rows: Sequence[PageRow], counts: Mapping[str, int], own: Mapping[str, Mapping[str, Any]]
) -> list[Cell]:
    """A site's images where any site tells them, its values, and the cells of :data:`OF_SITE` where any has them."""
    values, of = [row.cell(site) for row in rows], own.get(site) or {}
    kept: Cell = SUPPRESSED if all(value == SUPPRESSED for value in values) else None  # as all its figures are
    further = [kept if of.get(k) is None else int(of[k]) if k == "test_cases" else of[k] for k in OF_SITE]
    return [site, *([counts.get(site, kept)] if counts else []), *values, *(further if own else ())]


def of_row(row: PageRow, attribute: str, metric: str) -> Spread:
    """A figure of :data:`SUMMARIES` over a row's runs; NaN where they do not say what equal sites would show."""
    if attribute != CHANCE:
        return row.over(attribute)
    return spread([one[CHANCE] for run in row.runs if (one := tested(run.document, metric))])


def intervals(material: Material) -> dict[str, dict[str, Any]]:
    """What is known of each site of one run beside its value; of several runs, or of another metric, nothing."""
    found = material.runs[0].document["inequality"] if len(material.runs) == 1 else None
    return found["sites"] if found and found["metric"] == material.metric else {}


def test_images(material: Material) -> dict[str, int]:
    """Of each site's test split, where the runs' sites say it; what differs between runs is left out."""
    found: dict[str, set[int]] = {}
    for run in material.runs:
        for site, told in run.info["said"].items():
            images = told.get("images")
            count = images.get("test") if isinstance(images, dict) else None
            if isinstance(count, int):
                found.setdefault(site, set()).add(count)
    return {site: counts.pop() for site, counts in found.items() if len(counts) == 1}


def _sites_picture(material: Material, sites: Sequence[str]) -> Picture:
    rows = material.rows
    bars = len(sites) <= MAX_BAR_SITES and len(sites) * len(rows) <= MAX_BARS
    worst = [f"{row.label}: {_extremes(row)}" if material.reference else _extremes(row) for row in rows]
    if bars:
        how = "A bar for each site" + (" and method." if len(rows) > 1 else "; the dashed line is the average.")
        better = "Longer" if material.higher else "Shorter"
        how += " A thin line is the standard deviation over seeds." if material.over_seeds else ""
        how += " A thin line is the site's 95 % interval, from its own test cases." if intervals(material) else ""
    else:
        better = "To the right" if material.higher else "To the left"
        how = "A dot for each site, a row for each method; the vertical stroke is the average."
    return Picture(
        "sites",
        lambda: _bars(material, sites) if bars else _dots(material, sites),
        f"{how} {better} is better: a fair method has no site far behind.",
        f"{in_words(material.metric)} by site{' and method. ' if material.reference else ': '}{listed(worst, '; ')}.",
    )


def _extremes(row: PageRow) -> str:
    of = {site: row.at(site).mean for values in row.values for site in values}
    finite = {site: value for site, value in of.items() if math.isfinite(value)}
    if not finite:
        return "no value"
    low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
    return f"from {number(finite[low])} ({low}) to {number(finite[high])} ({high})"


def _bars(material: Material, sites: Sequence[str]) -> Figure:
    rows = material.rows
    height = 1.2 + max(0.5, len(sites) * len(rows) * 0.13 + len(sites) * 0.12) + rows_of_legend(len(rows))
    made, axes = panel(height, f"{in_words(material.metric)} on the test splits", material.synthetic)
    thick = 0.84 / len(rows)
    for index, row in enumerate(rows):
        found = [row.at(site) for site in sites]
        style = look(index)
        axes.barh(
            [k - 0.42 + thick * (index + 0.5) for k in range(len(sites))],
            [s.mean for s in found], thick * 0.92, label=label(row.label), color=style.colour, edgecolor=INK,
            linewidth=0.5, hatch=style.hatch, error_kw={"elinewidth": 0.9, "ecolor": INK},
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
    axes.set_xlabel(in_words(material.metric))
    if not any(row.at(site).mean for row in rows for site in sites):
        axes.set_xlim(0, 1)  # bars of nothing have no scale of their own
    axes.grid(axis="x")
    legend(made, axes, len(rows))
    return made


def _errors(material: Material, sites: Sequence[str], row: PageRow) -> Any:
    """Lengths of the thin lines to both sides: over seeds, or of one run each site's interval."""
    found = [row.at(site) for site in sites]
    if len(row.runs) > 1:
        return [[s.sd if math.isfinite(s.sd) else 0 for s in found]] * 2
    own = intervals(material)
    if not own:
        return None
    lengths = []
    for end in ("low", "high"):
        ends = [(own.get(site) or {}).get(end) for site in sites]
        lengths.append([0 if x is None else max(0.0, abs(x - s.mean)) for x, s in zip(ends, found, strict=True)])
    return lengths


def _dots(material: Material, sites: Sequence[str]) -> Figure:
    rows = material.rows
    title = f"{in_words(material.metric)} on the test splits of {len(sites)} sites"
    made, axes = panel(1.1 + 0.34 * len(rows), title, material.synthetic)
    for index, row in enumerate(rows):
        means = [row.at(site).mean for site in sites]
        finite = [value for value in means if math.isfinite(value)]
        places = [index + 0.24 * math.sin(2.399 * k) for k in range(len(finite))]  # so that dots lie side by side
        axes.scatter(finite, places, s=14, color=look(index).colour, alpha=0.75, linewidths=0)
        if finite:
            mean = statistics.fmean(finite)
            axes.plot([mean, mean], [index - 0.38, index + 0.38], color=INK, linewidth=1.6)
    axes.set_yticks(range(len(rows)), [label(row.label) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(in_words(material.metric))
    axes.grid(axis="x")
    return made


# ------------------------------------------------------------------------------------------------ differences


def differences(material: Material) -> Section | None:
    """Intervals of every row against the reference."""
    if not (found := material.differences):
        return None
    reference = material.reference
    of = [d for d in found if d.measure in MEASURES]
    before, after = ["method", "measure", "seeds"], ["p", "p_holm", "smallest", "sd", "verdict"]
    heads = [*before, "difference", "p", "p (Holm)", "visible from", "sd", "verdict"]
    in_files = [*([name] for name in before), ["difference", "low", "high"], *([name] for name in after)]

    def rows(found: Sequence[Difference]) -> list[list[Cell]]:
        """Mean and interval as one cell, whose decimals they decide together."""
        shown = [Shown(interval(d.low, d.high, d.mean), [d.mean, d.low, d.high]) for d in found]
        about = (figures_of(found, names, reference) for names in (before, after))
        return [[*first, one, *last] for first, one, last in zip(next(about), shown, next(about), strict=True)]

    table = Table(
        "differences",
        f"Row minus {reference}, paired by seed and site: mean, {LEVEL:.0%} interval{interval_of(found)}, the p-value "
        "that belongs to it, the same after Holm's correction for all rows and measures, the smallest difference that "
        "would have been seen, standard deviation of the differences over the seeds.",
        heads,
        rows(of),
        csv_columns=in_files,
    )
    by_site = Table(
        "differences_sites",
        f"The same for every site (row minus {reference}); corrected for all rows and sites.",
        heads,
        rows([d for d in found if d.measure not in MEASURES]),
        folded=True,
        csv_columns=in_files,
    )
    told = listed((_in_short([d for d in of if d.label == name]) for name in dict.fromkeys(d.label for d in of)), "; ")
    picture = Picture(
        "differences",
        lambda: _forest(material, of),
        "A filled mark is beyond noise, after Holm's correction. An empty mark means that no difference was shown, "
        f"even if its interval excludes 0. {'To the right' if material.higher else 'To the left'} is better for "
        "average and worst site, to the left for the spread.",
        f"Differences to {reference}. {told}.",
    )
    alone = not any(math.isfinite(d.images_sd) for d in of)
    notes = notes_of_differences(found, reference)[1:]  # what they are over stands with the table
    notes.append(
        "The intervals are over the seeds alone: of other patients than those of the test splits they say nothing."
        if alone
        else "They hold for other patients of these hospitals; of other hospitals they say nothing."
    )
    return Section("differences", f"Differences to {reference}", notes=notes, parts=[picture, table, by_site])


def _in_short(found: Sequence[Difference]) -> str:
    """One row's differences; a verdict that is the same for all is said once."""
    verdicts = {d.verdict for d in found}
    parts = [
        f"{d.measure} {number(d.mean, sign='+')}" + (f" ({d.verdict})" if len(verdicts) > 1 else "") for d in found
    ]
    return f"{found[0].label}: {', '.join(parts)}" + (f", all {verdicts.pop()}" if len(verdicts) == 1 else "")


def _forest(material: Material, found: Sequence[Difference]) -> Figure:
    labels = list(dict.fromkeys(d.label for d in found))
    height = 0.8 + (0.7 + 0.28 * len(labels)) * len(MEASURES)
    made = figure(height, f"{in_words(material.metric)}: differences to {material.reference}", material.synthetic)
    panels = made.subplots(len(MEASURES), 1)
    ranks = {row.label: index for index, row in enumerate(material.rows)}
    for axes, measure in zip(panels, MEASURES, strict=True):
        axes.axvline(0, color=INK, linewidth=0.9)
        for place, name in enumerate(labels):
            for d in found:
                if d.label == name and d.measure == measure:
                    _mark(axes, d, place, ranks.get(name, 0))
        axes.set_title({"average": "average", "std": "spread (std)", "worst": "worst site"}[measure])
        axes.grid(axis="x")
        axes.locator_params(axis="x", nbins=5)
        axes.set_yticks(range(len(labels)), [label(name) for name in labels])
        axes.set_ylim(len(labels) - 0.5, -0.7)
    return made


def _mark(axes: Axes, d: Difference, place: int, rank: int) -> None:
    style = look(rank)
    beyond = d.verdict in (BETTER, WORSE)
    if math.isfinite(d.low):
        axes.plot([d.low, d.high], [place, place], color=style.colour, linewidth=1.6)
    axes.plot(
        [d.mean],
        [place],
        style.marker,
        color=style.colour,
        markersize=7,
        markerfacecolor=style.colour if beyond else "none",
    )
    if beyond:
        axes.annotate(
            d.verdict, (d.mean, place), (0, 5), textcoords="offset points", ha="center", fontsize=7.5,
            fontweight="bold" if d.verdict == BETTER else "normal",
        )  # fmt: skip
