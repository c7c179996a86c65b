"""Show how much each site counted: weights by layer and site, similarity of sites, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from fairflare.reporting.documents import Results
from fairflare.reporting.layout import Cell, Table, number
from fairflare.reporting.notes import worst_warnings
from fairflare_lab.compare.rows import Row
from fairflare_lab.page.content import Picture, Section
from fairflare_lab.page.lines import MAX_PANELS, by_site, frame, site_parts
from fairflare_lab.page.material import Material, name_of
from fairflare_lab.page.style import chart, heat

LAYERS = ["round", "layer", "site", "weight", "dissimilarity"]


def layers(material: Material) -> Section:
    """Return the section with weights by layer and site, for methods that weigh by layer."""
    by_row = {row.label: [layers_of(run) for run in row.runs] for row in material.rows}
    rows = [row for row in material.rows if any(of.weight.notna().any() for of in by_row[row.label])]
    parts: list[Picture | Table] = []
    for index, row in enumerate(rows, 1):
        weights = layer_weights(by_row[row.label], material.sites)
        over = " and seeds" if len(row.runs) > 1 else ""
        text = f"{row.label}: weight of each site in each layer, mean over rounds{over}."
        cells = [[layer, *of] for layer, *of in weights.itertuples()]
        parts += [_map(row, f"layer_weights_{index}", weights)] if index <= MAX_PANELS else []
        parts.append(Table(f"layer_weights_{index}", text, ["layer", *weights], cells, folded=True))
    unlike = (
        (row.label, site, n, value)
        for row in rows
        for of in by_row[row.label]
        for (n, site), value in _means(of, "dissimilarity", "round").items()
    )
    parts += site_parts(
        material, frame(unlike), "similarity", "How unlike each site's features are to the anchor's (1 - similarity)",
        "Mean over the layers; 0 is alike. Logarithmic.", "1 - similarity", worst_first=False, log=True,
    )  # fmt: skip
    few = [f"Pictures of the first {MAX_PANELS} of {len(rows)} methods; the tables have all."]
    return Section("layers", "Weights by layer and site", few * (len(rows) > MAX_PANELS), parts)


def layers_of(run: Results) -> pd.DataFrame:
    """Return a run's values by layer (weights, CKA) as a frame with the columns of :data:`LAYERS`."""
    values = [
        (record.current_round, layer, site, of.get("weight"), of.get("dissimilarity"))
        for record in run.rounds
        for layer, by_site in (record.layers or {}).items()
        for site, of in by_site.items()
    ]
    return pd.DataFrame(values, columns=LAYERS, dtype=object).astype(dict.fromkeys(LAYERS[3:], float))


def layer_weights(runs: Sequence[pd.DataFrame], sites: Sequence[str]) -> pd.DataFrame:
    """Return a table (layers, ``sites`` with a weight) of mean weights over rounds and runs; NaN for no weight."""
    of_runs = pd.concat([_means(run, "weight", "layer") for run in runs])
    weights = of_runs.groupby(level=["layer", "site"], sort=False).agg(_mean).unstack()
    return weights.reindex(of_runs.index.unique("layer"), columns=[site for site in sites if site in weights])


def _means(run: pd.DataFrame, name: str, by: str) -> pd.Series:
    """Return the means of a run's values by layer and site: by ``by`` (``round`` or ``layer``) and site."""
    return run.dropna(subset=name).groupby([by, "site"], sort=False)[name].agg(_mean)


def _mean(values: pd.Series) -> float:
    return float(sum(values) / len(values))


def _map(row: Row, name: str, weights: pd.DataFrame) -> Picture:
    draw = partial(
        chart, partial(heat, values=weights, called="weight, mean over the rounds", low=0.0),
        min(1.6 + 0.145 * len(weights), 9.5), f"{row.label}: weight by layer and site", row.runs[0].info.synthetic,
    )  # fmt: skip
    even = number(1 / weights.shape[1])
    return Picture(name, draw, f"{row.label}: first layers at the top; light is much. Equal weights are {even}.")


def site_weights(material: Material) -> Section:
    """Return the section with each site's weight over the rounds, for methods with one weight for a whole model."""
    parts = site_parts(
        material, by_site(material, lambda record: record.site_weights or {}), "site_weights",
        "Weight of each site in the average", f"A line for each site{material.over_seeds}.", "weight",
    )  # fmt: skip
    return Section("site_weights", "Weights by site", parts=parts)


def influence(material: Material) -> Section:
    """Return the section with warnings about bounds and majorities; a single run has these among its notes."""
    cells: list[list[Cell]] = [
        [name_of(run), site or "every site", kind, len(numbers), told]
        for run in material.runs + material.others
        for site, kind, numbers, told in worst_warnings(run.rounds)
    ]
    text = "Where a bound on one site's influence was at work, and who had more than half: the worst round of each."
    table = Table("warnings", text, ["run", "site", "kind", "rounds", "what"], cells if material.reference else [])
    return Section("influence", "Influence of a single site", parts=[table])
