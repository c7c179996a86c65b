"""Show the methods' own fields in the sites' reports, such as rescue factor or mu, and FedMRL's map."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fairflare.reporting.layout import in_order, number
from fairflare_lab.page.content import Cell, Picture, Section, Table, listed
from fairflare_lab.page.lines import by_site, in_the_end, panels_of, site_parts
from fairflare_lab.page.material import Material, PageRun
from fairflare_lab.page.style import chart, heat, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Title and meaning of reported fields on the page; any other field is shown under its own name.
CALLED = {
    "rescue_factor": (
        "Rescue factor",
        "over a site's classes the sum of its divergence before training times that while training",
    ),
    "sharpness": ("Sharpness", "by how much a site's training loss rises at the search distance"),
    "mu": ("mu", "the proximal coefficient of each site: a large one holds its model near the common one"),
}
MAX_FIELDS = 6
MAX_MAPS = 6
MAX_CELL_NAME = 15  # largest number of letters of a site's name in a cell of the map
MAX_CELL_LINES = 4  # largest number of lines of names in a cell of the map


def reports(material: Material) -> list[Section]:
    """Return page sections on what sites reported: one for each field in :data:`CALLED`, for others and for maps."""
    every = (site for run in material.runs for record in run.rounds for site in record["reports"].values())
    fields = dict.fromkeys(name for site in every for name, value in site.items() if finite(value) is not None)
    found = {field: by_site(material, partial(_reported, field)) for field in fields}
    own = [field for field in found if field not in CALLED]
    others = [field for field in own if (found[field].groupby(["run", "name"]).value.nunique() > 1).any()]
    constant = {
        field: panels_of(found[field].drop_duplicates(["run", "name"]).assign(round=0), material.sites)
        for field in own
        if field not in others
    }
    sections = [
        Section(field, title, words=[f"{title}: {meaning}."], parts=_parts(material, found[field], field, title))
        for field, (title, meaning) in CALLED.items()
        if field in found
    ]
    if own:
        shown = [part for field in others[:MAX_FIELDS] for part in _parts(material, found[field], field, field)]
        cells: list[list[Cell]] = [
            [row.label, field, site, cell]
            for row in material.rows for field, panels in constant.items() if row.label in panels
            for site, cell in panels[row.label].loc[0].items()
        ]  # fmt: skip
        shown.append(
            Table(
                "reports_constant",
                "Reported, and the same in every round of a run.",
                ["method", "field", "site", "value"],
                cells,
                folded=len(cells) > 24,
            )
        )
        notes = [f"Not shown: {', '.join(others[MAX_FIELDS:])}."] if len(others) > MAX_FIELDS else []
        sections.append(Section("reports", "What the sites reported", notes=notes, parts=shown))
    return [*sections, *maps(material)]


def _reported(field: str, record: Mapping[str, Any]) -> dict[str, float | None]:
    return {site: finite(of.get(field)) for site, of in record["reports"].items()}


def _parts(material: Material, found: pd.DataFrame, field: str, title: str) -> list[Picture | Table]:
    def told(row: str, of: pd.DataFrame) -> str:
        return f"{row}: {listed(f'{site} {number(value)}' for site, value in in_the_end(of).items())}"

    return site_parts(
        material, found, told, "report_" + re.sub("[^a-zA-Z0-9]", "_", field)[:40], f"{title} of each site",
        f"{title}: a line for each site{material.over_seeds}.", f"{title} in the end:", title,
        f"{title} by round and site.",
    )  # fmt: skip


def finite(value: Any) -> float | None:
    """Return a value as a float if it is a finite number, else ``None``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


# ------------------------------------------------------------------------------------------------ map


def maps(material: Material) -> list[Section]:
    """Return the section with each run's last map of sites; pictures are of the first runs that have a map."""
    found = [(run, *of_run[-1]) for run in material.runs if (of_run := _maps_of(run))]
    if not found:
        return []
    parts: list[Picture | Table] = [
        Picture(
            f"map_{index}",
            draw_map(som, f"{run.name}, round {n}", run.info.synthetic),
            f"{run.name}, round {n}: the sites at their best matching neurons.",
            f"{listed(f'{site} in row {r}, column {c}' for site, (r, c) in som['bmu'].items())}.",
        )
        for index, (run, n, som) in enumerate(found[:MAX_MAPS], 1)
    ]
    cells: list[list[Cell]] = [[run.name, n, site, *at] for run, n, som in found for site, at in som["bmu"].items()]
    table = Table("map", "Where each site lies on the map.", ["run", "round", "site", "row", "column"], cells)
    words = ["Sites whose models are alike lie near each other; a dark cell is a border between unlike ones."]
    few = f"Pictures of the first {MAX_MAPS} of {len(found)} runs; the table has all."
    notes = [few] if len(found) > MAX_MAPS else []
    return [Section("map", "Map of the sites' models", words=words, notes=notes, parts=[*parts, table])]


def _maps_of(run: PageRun) -> list[tuple[int, dict[str, Any]]]:
    return [(record.current_round, som) for record in run.rounds if (som := _usable(record.details.get("som")))]


def _usable(value: Any) -> dict[str, Any] | None:
    """Return a reported map if its matrix is finite and has sites within it, else ``None``."""
    try:
        matrix = np.array([[finite(of) for of in line] for line in value["u_matrix"]]).astype(float)
        rows, columns = matrix.shape
        inside = {
            site: place for site, place in value["bmu"].items()
            if isinstance(place, list) and [*map(type, place)] == [int, int]
            and 0 <= place[0] < rows and 0 <= place[1] < columns
        }  # fmt: skip
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return {"u_matrix": matrix.tolist(), "bmu": inside} if inside and np.isfinite(matrix).all() else None


def draw_map(som: Mapping[str, Any], title: str, synthetic: bool) -> Callable[[], Figure]:
    """Return a function that draws the U-matrix, with the sites' names at their best matching units.

    Args:
        som: ``u_matrix`` (rows of numbers), ``bmu`` (``{site: [row, column]}``).
        title: title of the picture.
        synthetic: whether the data are synthetic.
    """
    matrix = pd.DataFrame(som["u_matrix"])
    height, width = max(3.5, 1.05 * len(matrix) + 1.0), max(4.5, 1.25 * len(matrix.columns) + 1.6)
    return partial(
        chart, partial(_fill_map, matrix, som["bmu"]), height, f"{title}: sites on the map of models", synthetic,
        width=width, xlabel="column of the map", ylabel="row of the map",
    )  # fmt: skip


def _fill_map(matrix: pd.DataFrame, places: Mapping[str, Sequence[int]], axes: Axes) -> None:
    heat(axes, matrix, "mean distance (dark: a border)", low=matrix.min(axis=None), colours="Greys")
    cells: dict[tuple[int, ...], list[str]] = {}
    for site in in_order(places):
        cells.setdefault(tuple(places[site]), []).append(label(site, MAX_CELL_NAME))
    for (row, column), sites in cells.items():
        more = [f"and {len(sites) - MAX_CELL_LINES + 1} more"] if len(sites) > MAX_CELL_LINES else []
        axes.text(
            column, row, "\n".join(sites[: MAX_CELL_LINES - len(more)] + more), ha="center", va="center", fontsize=8,
            color="black", bbox={
                "boxstyle": "round,pad=0.3", "facecolor": "#ffd27f", "edgecolor": "#7a4b00", "linewidth": 0.8
            },
        )  # fmt: skip
