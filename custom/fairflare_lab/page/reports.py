"""Show the methods' own fields in the sites' reports, such as rescue factor or mu."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fairflare.base.checks import is_number
from fairflare.reporting.layout import number
from fairflare_lab.page.content import Picture, Section, Table, listed
from fairflare_lab.page.lines import by_site, in_the_end, site_parts
from fairflare_lab.page.material import Material

if TYPE_CHECKING:
    import pandas as pd

#: Meaning of reported fields, in words of the page; any other field has its name alone.
MEANINGS = {
    "rescue_factor": "over a site's classes the sum of its divergence before training times that while training",
    "sharpness": "by how much a site's training loss rises at the search distance",
    "mu": "the proximal coefficient of each site: a large one holds its model near the common one",
}
MAX_FIELDS = 8


def reports(material: Material) -> Section:
    """Return the section on the numbers that sites reported for the method, round by round; empty for no numbers."""
    every = (site for run in material.runs for record in run.rounds for site in record["reports"].values())
    fields = list(dict.fromkeys(name for site in every for name, value in site.items() if finite(value) is not None))
    parts = [
        part
        for field in fields[:MAX_FIELDS]
        for part in _parts(material, by_site(material, partial(_reported, field)), field)
    ]
    words = [f"{field}: {MEANINGS[field]}." for field in fields if field in MEANINGS]
    notes = [f"Not shown: {', '.join(fields[MAX_FIELDS:])}."] if len(fields) > MAX_FIELDS else []
    return Section("reports", "What the sites reported", words=words, notes=notes, parts=parts)


def _reported(field: str, record: Mapping[str, Any]) -> dict[str, float | None]:
    return {site: finite(of.get(field)) for site, of in record["reports"].items()}


def _parts(material: Material, found: pd.DataFrame, field: str) -> list[Picture | Table]:
    def told(row: str, of: pd.DataFrame) -> str:
        return f"{row}: {listed(f'{site} {number(value)}' for site, value in in_the_end(of).items())}"

    return site_parts(
        material, found, told, "report_" + re.sub("[^a-zA-Z0-9]", "_", field)[:40], f"{field} of each site",
        f"{field}: a line for each site{material.over_seeds}.", f"{field} in the end:", field,
        f"{field} by round and site.",
    )  # fmt: skip


def finite(value: Any) -> float | None:
    """Return a value as a float if it is a finite number, else ``None``."""
    return float(value) if is_number(value) else None
