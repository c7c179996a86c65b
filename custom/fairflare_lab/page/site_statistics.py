"""Write the page of ``fairflare stats``: a picture of the intensities, and tables of all figures by site."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fairflare.base.disk.files import write_whole
from fairflare.core.statistics.site_figures import AXES, CLASS, INTENSITY
from fairflare.reporting.layout import Cell, Shown, Table, join_parts
from fairflare.reporting.sites.statistics import PAGE, Figures, StatsDocument, others_of
from fairflare_lab.page.content import NOTHING, Page, Picture, Section
from fairflare_lab.page.style import COLOURS, GRID, figure, label
from fairflare_lab.page.write import draw_and_render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 24  # largest number of sites that have a panel of their own
ROW = 0.75  # height of a panel in inches
TERMS = (
    ("Intensity", "The value of a pixel as the network gets it, between 0 and 1."),
    ("Median", "Half of a site's pixels are darker."),
    (
        "Wasserstein distance",
        "How far the average pixel of a site would have to be moved along the intensities to have the others' "
        "histogram: 0.1 is a tenth of the range.",
    ),
    ("Jensen-Shannon distance", "0 where a site has the others' shares of classes, 1 where they share no class."),
    ("Suppressed", "Fewer cases than the site's min_cases have it, or a difference would tell such a number."),
)


def write_page(document: StatsDocument, folder: Path) -> Path:
    """Write ``stats.html`` into a folder and return its path.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(
        folder / PAGE,
        partial(Path.write_text, data=draw_and_render(page_of(document)), encoding="utf-8"),
        shared=True,
    )
    return folder / PAGE


def page_of(document: StatsDocument) -> Page:
    """Return the content of the page about a statistics document; sections without figures are left out."""
    shown = {site: of for site, of in document.sites.items() if "cases" in of.counts}
    counts = [_histogram(document, shown, axis) for axis in AXES if axis != INTENSITY]
    synthetic = f"Made-up images, no patient data: {join_parts(document.synthetic)}." if document.synthetic else ""
    return Page(
        "How different the sites' images are", [("Sites", f"{len(document.sites)}: {join_parts(document.sites)}")],
        synthetic, document.sentences, [
            Section("numbers", "What the sites have", parts=[_numbers(document)]),
            _intensity(document, shown),
            Section("counts", "Classes, sizes and spacings", parts=[table for table in counts if table.rows]),
        ], terms=TERMS,
    )  # fmt: skip


def _numbers(document: StatsDocument) -> Table:
    names = ("cases", "images", "unusable", "missing_labels", "empty_masks")
    rows: list[list[Cell]] = [
        [site, *(of.counts.get(name, "suppressed") for name in names), of.quantiles.get("50"),
         *((apart.intensity_wasserstein, apart.classes_jensen_shannon) if apart else (None, None))]
        for site, of in [*document.sites.items(), ("pooled", document.pooled)]
        for apart in [document.distances.get(site)]
    ]  # fmt: skip
    return Table(
        "numbers", "Distances are of a site from all others together, of intensities in shares of the range.",
        ["site", *(name.replace("_", " ") for name in names), "median", "Wasserstein", "Jensen-Shannon"], rows,
    )  # fmt: skip


def _intensity(document: StatsDocument, sites: Mapping[str, Figures]) -> Section:
    having = {site: of for site, of in sites.items() if INTENSITY in of.histograms}
    if not having:
        return NOTHING
    picture = Picture(
        "intensities",
        partial(_small_multiples, document, dict(list(having.items())[:MOST])),
        "Share of each site's pixels by intensity (all channels together, 64 bins; those at 0 and 1 may be cut); line: "
        f"all others.{f' The first {MOST} of {len(having)} sites.' * (len(having) > MOST)} Intensities: "
        f"{document.intensities or 'as the task reads the files'}.",
    )
    return Section("intensity", "Intensities", parts=[picture, Table(
        "quantiles", "Quantiles of the intensities, from the histogram: less than a bin's width (1/64 = 0.016) off.",
        ["site", *(f"{p} %" for p in document.pooled.quantiles)],
        [[site, *of.quantiles.values()] for site, of in [*having.items(), ("pooled", document.pooled)]],
    )])  # fmt: skip


def _small_multiples(document: StatsDocument, sites: Mapping[str, Figures]) -> Figure:
    made = figure(ROW * len(sites) + 0.8, "share of pixels by intensity", bool(document.synthetic))
    panels = made.subplots(len(sites), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    edges = [k * AXES[INTENSITY].width for k in range(AXES[INTENSITY].bins + 1)]
    top = 1e-3  # highest share in the inner bins; bins of black and white would flatten all others
    for axes, (site, of) in zip(panels, sites.items(), strict=True):
        own, others = of.dense(), others_of(document.sites, site).dense()
        top = max(top, *(n / sum(own) for n in own[1:-1]))
        axes.stairs([n / sum(own) for n in own], edges, fill=True, color=COLOURS[0], alpha=0.75)
        if any(others):
            axes.stairs([n / sum(others) for n in others], edges, color=COLOURS[1], linewidth=1)
        axes.set_title(label(site), loc="left", fontsize=8, pad=1)
        axes.set_yticks([])
        axes.grid(True, axis="x", color=GRID)
    panels[-1].set(ylim=(0, 1.15 * top), xlabel="intensity (filled: the site; line: all others)")
    return made


def _histogram(document: StatsDocument, sites: Mapping[str, Figures], name: str) -> Table:
    """Return one quantity's counts by site and bin, with shares; a bin that a site does not tell is empty."""
    every = {**sites, "pooled": document.pooled}
    having = {site: of.histograms[name] for site, of in every.items() if name in of.histograms}
    counts = {site: {(one.low, one.high): one.count for one in of.bins} for site, of in having.items()}
    bins = sorted({key for of in counts.values() for key in of})
    rows: list[list[Cell]] = [
        [site, *(Shown(f"{of[key]} ({of[key] / sum(of.values()):.0%})", [of[key]]) if key in of else None
                 for key in bins), having[site].suppressed]
        for site, of in counts.items()
    ]  # fmt: skip
    heads = [
        document.class_name(int(low)) if name == CLASS else f"{low:g}-{high - AXES[name].whole:g}" for low, high in bins
    ]
    return Table(
        name if name != CLASS else "classes",
        f"Numbers and shares of {AXES[name].doc}{f', in {AXES[name].unit}' * bool(AXES[name].unit)}.",
        ["site", *heads, "suppressed"], rows, len(bins) > 8,
    )  # fmt: skip
