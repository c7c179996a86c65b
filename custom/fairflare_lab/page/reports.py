"""Show the methods' own fields in the sites' reports, such as rescue factor or mu."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fairflare.reporting.layout import number
from fairflare_lab.page.content import Cell, Picture, Section, Table, listed
from fairflare_lab.page.lines import by_site, in_the_end, panels_of, site_parts
from fairflare_lab.page.material import Material

if TYPE_CHECKING:
    import pandas as pd

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


def reports(material: Material) -> list[Section]:
    """Return page sections on what sites reported: one for each field in :data:`CALLED`, and one for others."""
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
    return sections


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
