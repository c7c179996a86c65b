"""How much each site counted: weights by layer and by site, how alike the sites were, and who had most to say."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fairflare.reporting.layout import number, spread
from fairflare.reporting.notes import worst_warnings
from fairflare_lab.page.content import Cell, Picture, Section, Table, listed
from fairflare_lab.page.layers import Largest
from fairflare_lab.page.lines import Series, lines_picture, site_lines, values_of
from fairflare_lab.page.material import Material, PageRow, PageRun
from fairflare_lab.page.style import heat, panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_MAPS = 12  # rows with a picture of their own
HALF = 0.5
EQUAL = 1e-9  # weights that differ by less are equal


def layers(material: Material) -> Section | None:
    """Weights by layer and site, of the methods that have them."""
    rows = [row for row in material.rows if any(run.layers.layers for run in row.runs)]
    if not rows:
        return None
    parts: list[Picture | Table] = []
    for index, row in enumerate(rows):
        names, sites, values = layer_weights(row, material.sites)
        over = " and seeds" if len(row.runs) > 1 else ""
        table = Table(
            f"layer_weights_{index + 1}",
            f"{row.label}: weight of each site in each layer, mean over rounds{over}.",
            ["layer", *sites],
            [[name, *map(float, values[k])] for k, name in enumerate(names)],
            folded=True,
        )
        if index < MAX_MAPS:
            parts.append(_map(material, row, index, names, sites, values))
        parts.append(table)
    parts += _similarity(material, rows)
    notes = (
        [f"Pictures of the first {MAX_MAPS} of {len(rows)} methods; the tables have all."]
        if len(rows) > MAX_MAPS
        else []
    )
    return Section("layers", "Weights by layer and site", notes=notes, parts=parts)


def layer_weights(row: PageRow, sites: Sequence[str]) -> tuple[list[str], list[str], np.ndarray]:
    """Layers, the ``sites`` that have a weight, and the mean weight over rounds and runs, NaN where there is none."""
    names = list(dict.fromkeys(layer for run in row.runs for layer in run.layers.layers))
    arrays = np.array([run.layers.weights(names, sites) for run in row.runs])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a place without any value, which stays NaN
        mean = np.nanmean(arrays, axis=0)
    kept = [k for k in range(len(sites)) if np.isfinite(mean[:, k]).any()]
    return names, [sites[k] for k in kept], mean[:, kept]


def _map(
    material: Material, row: PageRow, index: int, names: Sequence[str], sites: Sequence[str], values: np.ndarray
) -> Picture:
    k, j = map(int, np.unravel_index(int(np.nanargmax(values)), values.shape))
    by_site = np.nanmean(values, axis=0)

    def draw() -> Figure:
        height = min(1.6 + 0.145 * len(names), 9.5)
        made, axes = panel(height, f"{row.label}: weight by layer and site", row.runs[0].info["synthetic"])
        heat(made, axes, values, names, sites, "weight, mean over the rounds", low=0.0)
        return made

    told = listed(f"{site} {number(float(v))}" for site, v in zip(sites, by_site, strict=True))
    return Picture(
        f"layer_weights_{index + 1}",
        draw,
        f"{row.label}: first layers at the top; light is much. Equal weights are {number(1 / max(len(sites), 1))}.",
        f"Mean weights over {len(names)} layers: {told}. The largest is {number(float(values[k, j]))}, of {sites[j]} "
        f"in {names[k]}.",
    )


def _similarity(material: Material, rows: Sequence[PageRow]) -> list[Picture | Table]:
    found: dict[str, dict[tuple[int, str], list[float]]] = {row.label: {} for row in rows}
    for row in rows:
        for mean in (run.layers.unlike for run in row.runs):
            for key in mean.sums:
                found[row.label].setdefault(key, []).append(mean.of(key))
    panels, cells = site_lines(material, found)
    if not panels:
        return []
    far = {label: max(series, key=lambda s: s.last) for label, series in panels.items()}
    told = [f"{label}: in the end {s.name} is farthest, {s.last:.3g}" for label, s in far.items()]
    return [
        lines_picture(
            material,
            "similarity",
            "How unlike each site's features are to the anchor's (1 - similarity)",
            panels,
            "Mean over the layers; 0 is alike. Logarithmic.",
            f"1 - similarity over the rounds. {listed(told, '; ')}.",
            unit="1 - similarity",
            worst_first=False,
            log=True,
        ),
        Table(
            "similarity",
            "1 - similarity of each site's features to the anchor's, mean over the layers.",
            ["method", "round", "site", "1 - similarity"],
            cells,
            folded=True,
        ),
    ]


# ------------------------------------------------------------------------------------------------ one weight a site


def site_weights(material: Material) -> Section | None:
    """One weight for a whole model, over the rounds."""
    rows = {row.label: values_of(row.runs, lambda record: record["site_weights"] or {}) for row in material.rows}
    panels, cells = site_lines(material, rows)
    told = []
    for label, series in panels.items():
        means = {s.name: spread([p.mean for p in s.points.values()]).mean for s in series}
        high, low = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        if means[high] - means[low] < EQUAL:
            told.append(f"{label}: all sites {number(means[high])}")
        else:
            told.append(f"{label}: {high} most with {number(means[high])}, {low} least with {number(means[low])}")
    if not cells:
        return None
    picture = lines_picture(
        material,
        "site_weights",
        "Weight of each site in the average",
        panels,
        f"A line for each site{material.over_seeds}.",
        f"Mean weights over the rounds. {listed(told, '; ')}.",
        unit="weight",
    )
    table = Table(
        "site_weights", "Weight of each site by round.", ["method", "round", "site", "weight"], cells, folded=True
    )
    return Section("site_weights", "Weights by site", parts=[picture, table])


# ------------------------------------------------------------------------------------------------ influence


def influence(material: Material) -> Section | None:
    """The largest weight that one site had, round by round, and where bounds were at work."""
    runs = material.runs + material.others
    found = {id(run): largest(run) for run in runs}
    if not any(found.values()):
        return None
    series, told = [], []
    for rank, row in enumerate(material.rows):
        by_round: dict[int, list[float]] = {}
        for run in row.runs:
            for n, top in found[id(run)].items():
                by_round.setdefault(n, []).append(top.value)
        if by_round:
            series.append(Series(row.label, rank, {n: spread(by_round[n]) for n in sorted(by_round)}))
            told.append(f"{row.label} up to {number(max(v for values in by_round.values() for v in values))}")
    cells: list[list[Cell]] = []
    for run in runs:
        if tops := found[id(run)]:
            n = max(tops, key=lambda n: tops[n].value)
            over = sum(top.value > HALF for top in tops.values())
            cells.append([run.name, tops[n].value, tops[n].site, n, tops[n].layer or "whole model", over, len(tops)])
    majority = sum(bool(cell[5]) for cell in cells)
    where = f"In {majority} of {len(cells)} runs one" if len(cells) > 1 else "One"
    outweighs = (
        f"{where} site had more than half of the weight, of the whole model or of a layer, in some round: there it "
        "outweighed all others together."
    )
    words = [outweighs if majority else "No site had more than half of the weight in any round."]
    parts: list[Picture | Table] = []
    if series:
        parts.append(
            lines_picture(
                material,
                "influence",
                "The largest weight of one site in each round",
                {"": series},
                f"Of the whole model, or of the layer where it was largest{material.over_seeds}. Above the dotted "
                "line, one half, one site outweighs all others together.",
                f"Largest weight of one site: {listed(told, '; ')}.",
                unit="largest weight",
                line_at=HALF,
            )
        )
    parts.append(
        Table(
            "influence",
            "The largest weight of one site in a run, and in how many rounds one site had more than half.",
            ["run", "largest weight", "site", "round", "layer", "rounds over one half", "rounds"],
            cells,
        )
    )
    if material.reference:  # of one run they stand among its notes
        parts.append(
            Table(
                "warnings",
                "Where a bound on one site's influence was at work, and who held more than half: the worst round of "
                "each kind.",
                ["run", "site", "kind", "rounds", "what"],
                [
                    [run.name, site or "every site", kind, len(numbers), text]
                    for run in runs
                    for site, kind, numbers, text in worst_warnings(run.rounds)
                ],
            )
        )
    return Section("influence", "Influence of a single site", words=words, parts=parts)


def largest(run: PageRun) -> dict[int, Largest]:
    """By round: of the whole model, or of a layer, whichever is larger."""
    found = dict(run.layers.largest)
    for record in run.rounds:
        for site, weight in (record["site_weights"] or {}).items():
            before = found.get(record["current_round"])
            if weight is not None and (before is None or weight > before.value):
                found[record["current_round"]] = Largest(weight, site)
    return found
