"""Write the page of ``fairflare stats``: histograms by site, class mixes, sizes, and tables of the figures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fairflare.base.disk.files import write_whole
from fairflare.core.statistics.site_figures import AXES, INTENSITY
from fairflare.reporting.layout import Cell, Shown, Table, listed, number
from fairflare.reporting.sites.statistics import PAGE, Figures, StatsDocument, others_of
from fairflare_lab.page.content import NOTHING, Page, Picture, Section
from fairflare_lab.page.style import COLOURS, GRID, figure, label
from fairflare_lab.page.write import draw_and_render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = ("width", "height", "slices", "spacing", "slice_spacing")
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
    html = draw_and_render(page_of(document))
    write_whole(folder / PAGE, partial(Path.write_text, data=html, encoding="utf-8"), shared=True)
    return folder / PAGE


def page_of(document: StatsDocument) -> Page:
    """Return the content of the page about a statistics document; sections without figures are left out."""
    shown = {site: of for site, of in document.sites.items() if "cases" in of.counts}
    sections = [_numbers(document), _intensity(document, shown), _classes(document, shown), _sizes(shown)]
    return Page(
        "How different the sites' images are",
        [("Sites", f"{len(document.sites)}: {listed(document.sites)}")],
        f"Made-up images, no patient data: {listed(document.synthetic)}." if document.synthetic else "",
        document.sentences,
        [],
        [section for section in sections if section.parts],
        terms=TERMS,
    )


def _numbers(document: StatsDocument) -> Section:
    names = ("cases", "images", "unusable", "missing_labels", "empty_masks")
    rows: list[list[Cell]] = [
        [site, *(of.counts.get(name, "suppressed") for name in names), of.quantiles.get("50"),
         document.distances[site].intensity_wasserstein, document.distances[site].classes_jensen_shannon]
        for site, of in document.sites.items()
    ]  # fmt: skip
    pooled = [document.pooled.counts[name] for name in names]
    rows.append(["pooled", *pooled, document.pooled.quantiles.get("50"), None, None])
    table = Table(
        "numbers",
        "Distances are of a site from all others together: Wasserstein of intensities in shares of the intensity "
        "range, Jensen-Shannon (base 2) of class mixes; 0: alike, 1: nothing in common.",
        ["site", *(name.replace("_", " ") for name in names), "median", "Wasserstein", "Jensen-Shannon"],
        rows,
    )
    return Section("numbers", "What the sites have", parts=[table])


def _intensity(document: StatsDocument, sites: Mapping[str, Figures]) -> Section:
    having = {site: of for site, of in sites.items() if INTENSITY in of.histograms}
    if not having:
        return NOTHING
    medians = (f"{site} {number(of.quantiles['50'])}" for site, of in having.items())
    more = f" The first {MOST} of {len(having)} sites." if len(having) > MOST else ""
    picture = Picture(
        "intensities",
        partial(_small_multiples, document, dict(list(having.items())[:MOST])),
        "Share of each site's pixels by intensity (all channels together, 64 bins; those at 0 and 1 may be cut); line: "
        f"all others.{more} Intensities: {document.intensities or 'as the task reads the files'}.",
        f"Medians: {listed(medians)}.",
    )
    table = Table(
        "quantiles",
        "Quantiles of the intensities, from the histogram: less than a bin's width (1/64 = 0.016) off.",
        ["site", *(f"{p} %" for p in document.pooled.quantiles)],
        [[site, *of.quantiles.values()] for site, of in [*having.items(), ("pooled", document.pooled)]],
    )
    return Section("intensity", "Intensities", parts=[picture, table])


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


def _classes(document: StatsDocument, sites: Mapping[str, Figures]) -> Section:
    having = {site: of.mix() for site, of in sites.items() if of.mix()}
    if not having:
        return NOTHING
    having["pooled"] = document.pooled.mix()
    labels = sorted({k for mix in having.values() for k in mix})
    rows: list[list[Cell]] = [
        [site, *(Shown(f"{mix[k]} ({mix[k] / sum(mix.values()):.0%})", [mix[k]]) if k in mix else None for k in labels)]
        for site, mix in having.items()
    ]
    heads = ["site", *map(document.class_name, labels)]
    what = "images by class; of masks, pixels by label (0 is the background)"
    table = Table("classes", f"Numbers and shares of {what}.", heads, rows, folded=len(labels) > 8)
    return Section("classes", "Classes", parts=[table])


def _sizes(sites: Mapping[str, Figures]) -> Section:
    shown = [axis for axis in SIZES if any(axis in of.histograms for of in sites.values())]
    if not shown:
        return NOTHING
    tables = []
    for axis in shown:
        having = {site: of.histograms[axis] for site, of in sites.items() if axis in of.histograms}
        bins = sorted({(one.low, one.high) for of in having.values() for one in of.bins})
        counts = {site: {one.low: one.count for one in of.bins} for site, of in having.items()}
        heads = [f"{low:g}-{high - 1:g}" if AXES[axis].whole else f"{low:g}-{high:g}" for low, high in bins]
        tables.append(
            Table(
                axis,
                f"Numbers of {AXES[axis].doc}, in {AXES[axis].unit}.",
                ["site", *heads, "suppressed"],
                [[site, *(counts[site].get(low, 0) for low, _ in bins), of.suppressed] for site, of in having.items()],
            )
        )
    return Section("sizes", "Sizes and spacings", parts=tables)
