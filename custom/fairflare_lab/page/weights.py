"""Show how much each site counted: weights by layer and site, similarity of sites, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from fairflare.reporting.layout import number
from fairflare.reporting.notes import worst_warnings
from fairflare_lab.page.content import Cell, Picture, Section, Table, listed
from fairflare_lab.page.lines import MAX_PANELS, by_site, figures, frame, in_the_end, site_parts
from fairflare_lab.page.material import Material, PageRow, PageRun
from fairflare_lab.page.style import chart, heat

EQUAL = 1e-9  # weights that differ by less are equal


def layers(material: Material) -> Section:
    """Return the section with weights by layer and site, for methods that weigh by layer."""
    rows = [row for row in material.rows if any(run.layers.weight.notna().any() for run in row.runs)]
    parts: list[Picture | Table] = []
    for index, row in enumerate(rows, 1):
        weights = layer_weights(row, material.sites)
        over = " and seeds" if len(row.runs) > 1 else ""
        text = f"{row.label}: weight of each site in each layer, mean over rounds{over}."
        cells = [[layer, *of] for layer, *of in weights.itertuples()]
        parts += [_map(row, f"layer_weights_{index}", weights)] if index <= MAX_PANELS else []
        parts.append(Table(f"layer_weights_{index}", text, ["layer", *weights], cells, folded=True))
    unlike = (
        (row.label, site, n, value)
        for row in rows
        for run in row.runs
        for (n, site), value in _means(run, "dissimilarity", "round").items()
    )
    parts += site_parts(
        material, frame(unlike), _farthest, "similarity",
        "How unlike each site's features are to the anchor's (1 - similarity)",
        "Mean over the layers; 0 is alike. Logarithmic.", "1 - similarity over the rounds.", "1 - similarity",
        "1 - similarity of each site's features to the anchor's, mean over the layers.", worst_first=False, log=True,
    )  # fmt: skip
    few = [f"Pictures of the first {MAX_PANELS} of {len(rows)} methods; the tables have all."]
    return Section("layers", "Weights by layer and site", notes=few * (len(rows) > MAX_PANELS), parts=parts)


def layer_weights(row: PageRow, sites: Sequence[str]) -> pd.DataFrame:
    """Return a table (layers, ``sites`` with a weight) of mean weights over rounds and runs; NaN for no weight."""
    of_runs = pd.concat([_means(run, "weight", "layer") for run in row.runs])
    weights = of_runs.groupby(level=["layer", "site"], sort=False).agg(_mean).unstack()
    return weights.reindex(of_runs.index.unique("layer"), columns=[site for site in sites if site in weights])


def _means(run: PageRun, name: str, by: str) -> pd.Series:
    """Return the means of a run's values by layer and site: by ``by`` (``round`` or ``layer``) and site."""
    return run.layers.dropna(subset=name).groupby([by, "site"], sort=False)[name].agg(_mean)


def _mean(values: pd.Series) -> float:
    return float(sum(values) / len(values))


def _map(row: PageRow, name: str, weights: pd.DataFrame) -> Picture:
    draw = partial(
        chart, partial(heat, values=weights, called="weight, mean over the rounds", low=0.0),
        min(1.6 + 0.145 * len(weights), 9.5), f"{row.label}: weight by layer and site", row.runs[0].info["synthetic"],
    )  # fmt: skip
    told = listed(f"{site} {number(value)}" for site, value in weights.mean().items())
    layer, site = weights.stack().idxmax()
    return Picture(
        name, draw,
        f"{row.label}: first layers at the top; light is much. Equal weights are {number(1 / weights.shape[1])}.",
        f"Mean weights over {len(weights)} layers: {told}. The largest is {number(weights.at[layer, site])}, of {site} "
        f"in {layer}.",
    )  # fmt: skip


def _farthest(row: str, of: pd.DataFrame) -> str:
    site, value = max(in_the_end(of).items(), key=lambda end: end[1])
    return f"{row}: in the end {site} is farthest, {value:.3g}"


def site_weights(material: Material) -> Section:
    """Return the section with each site's weight over the rounds, for methods with one weight for a whole model."""
    parts = site_parts(
        material, by_site(material, lambda record: record["site_weights"] or {}), _most_and_least, "site_weights",
        "Weight of each site in the average", f"A line for each site{material.over_seeds}.",
        "Mean weights over the rounds.", "weight", "Weight of each site by round.",
    )  # fmt: skip
    return Section("site_weights", "Weights by site", parts=parts)


def _most_and_least(row: str, of: pd.DataFrame) -> str:
    means = figures(of).mean()
    if means.max() - means.min() < EQUAL:
        return f"{row}: all sites {number(means.max())}"
    return f"{row}: {means.idxmax()} most with {number(means.max())}, {means.idxmin()} least with {number(means.min())}"


# ------------------------------------------------------------------------------------------------ influence


def influence(material: Material) -> Section:
    """Return the section with warnings about bounds and majorities; a single run has these among its notes."""
    cells: list[list[Cell]] = [
        [run.name, site or "every site", kind, len(numbers), told]
        for run in material.runs + material.others
        for site, kind, numbers, told in worst_warnings(run.rounds)
    ]
    text = "Where a bound on one site's influence was at work, and who had more than half: the worst round of each."
    table = Table("warnings", text, ["run", "site", "kind", "rounds", "what"], cells if material.reference else [])
    return Section("influence", "Influence of a single site", parts=[table])
