"""Show how much each site counted: weights by layer and site, and similarity of sites."""

from __future__ import annotations

import statistics

from fairflare.base.checks import group_by_key
from fairflare.reporting.layout import Table
from fairflare_lab.page.content import Picture, Section
from fairflare_lab.page.lines import LineOptions, collect_values, frame, site_parts
from fairflare_lab.page.material import Material


def layers(material: Material) -> Section:
    """Return the section with weights by layer and site, for methods that weigh by layer."""
    values = [
        (row.label, record.current_round, layer, site, of)
        for row in material.rows for run in row.runs for record in run.rounds
        for layer, by_site in (record.layers or {}).items() for site, of in by_site.items()
    ]  # fmt: skip
    names = list(dict.fromkeys(layer for _, _, layer, _, of in values if of.get("weight") is not None))
    places = {layer: place for place, layer in enumerate(names)}
    weights = ((r, s, places[layer], w) for r, _, layer, s, of in values if (w := of.get("weight")) is not None)
    unlike = collect_values(material, lambda record: {
        site: statistics.fmean(values) for site, values in group_by_key(
            (site, apart) for by_site in (record.layers or {}).values() for site, of in by_site.items()
            for apart in [of.get("dissimilarity")] if apart is not None
        ).items()
    })  # fmt: skip
    parts: list[Picture | Table] = [
        *site_parts(
            material, frame(weights), "layer_weights", "Weight of each site in each layer",
            f"From the first layer to the last: means over the rounds{' and the seeds' * bool(material.over_seeds)}.",
            "weight", names, LineOptions(along="layer"),
        ),
        *site_parts(
            material, unlike, "similarity",
            "How unlike each site's features are to the anchor's (1 - similarity)",
            "Mean over the layers; 0 is alike. Logarithmic.", "1 - similarity",
            options=LineOptions(worst_first=False, log=True),
        ),
    ]  # fmt: skip
    return Section("layers", "Weights by layer and site", parts=parts)


def site_weights(material: Material) -> Section:
    """Return the section with each site's weight over the rounds, for methods with one weight for a whole model."""
    return Section("site_weights", "Weights by site", parts=site_parts(
        material, collect_values(material, lambda record: record.site_weights or {}), "site_weights",
        "Weight of each site in the average", f"A line for each site{material.over_seeds}.", "weight",
    ))  # fmt: skip
