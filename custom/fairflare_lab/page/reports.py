"""Show the methods' own fields in the sites' reports, such as rescue factor or mu."""

from __future__ import annotations

import re
from functools import partial

from fairflare.base.checks import is_number
from fairflare.reporting.documents import RoundRecord
from fairflare_lab.page.content import Section
from fairflare_lab.page.lines import collect_values, site_parts
from fairflare_lab.page.material import Material

#: Meaning of reported fields, in words of the page; any other field has its name alone.
MEANINGS = {
    "rescue_factor": "over a site's classes the sum of its divergence before training times that while training",
    "sharpness": "by how much a site's training loss rises at the search distance",
    "mu": "the proximal coefficient of each site: a large one holds its model near the common one",
}
MAX_FIELDS = 8


def reports(material: Material) -> Section:
    """Return the section on the numbers that sites reported for the method, round by round; empty for no numbers."""
    every = (site for run in material.runs for record in run.rounds for site in record.reports.values())
    fields = list(dict.fromkeys(name for site in every for name, value in site.items() if is_number(value)))
    parts = [
        part
        for field in fields[:MAX_FIELDS]
        for part in site_parts(
            material, collect_values(material, partial(_read_field, field)),
            "report_" + re.sub("[^a-zA-Z0-9]", "_", field)[:40], f"{field} of each site",
            f"{MEANINGS.get(field, field)}: a line for each site{material.over_seeds}.", field,
        )
    ]  # fmt: skip
    notes = [f"Not shown: {', '.join(fields[MAX_FIELDS:])}."] * (len(fields) > MAX_FIELDS)
    return Section("reports", "What the sites reported", notes, parts)


def _read_field(field: str, record: RoundRecord) -> dict[str, float]:
    return {site: float(of[field]) for site, of in record.reports.items() if is_number(of.get(field))}
