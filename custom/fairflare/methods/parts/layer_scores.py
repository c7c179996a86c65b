"""Fill gaps in Fed-LWR's scores by site and layer, and give all layers the scores of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

Scores = dict[str, dict[str, float]]  # values by site, then by layer


def fill_scores(known: Mapping[str, Mapping[str, float]], sites: Iterable[str], layers: Sequence[str]) -> Scores:
    """Return the scores by layer of every site; a site without scores gets the mean of the other sites' scores.

    A layer that is missing in a site's own scores is NaN. If no site has scores, all are NaN: equal weights.
    """
    by_site = {site: {layer: scores.get(layer, math.nan) for layer in layers} for site, scores in sorted(known.items())}
    mean = {layer: finite_mean(scores[layer] for scores in by_site.values()) for layer in layers}
    return {site: dict(by_site.get(site, mean)) for site in sites}


def spread_layer(scores: Scores, layers: Sequence[str], name: str) -> Scores:
    """Return scores in which all layers have the score of layer ``name``, or of the last layer in block ``name``.

    Raises:
        ValueError: the model has no such layer or block.
    """
    inside = [layer for layer in layers if layer == name or layer.startswith(name + ".")]
    if not inside:
        blocks = sorted({layer.partition(".")[0] for layer in layers})
        raise ValueError(
            f"only_layer={name!r} names no layer or block of the model that is sent; its blocks are {blocks}"
        )
    return {site: dict.fromkeys(layers, by[inside[-1]]) for site, by in scores.items()}


def finite_mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN when no value is finite."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
