"""Convert a comparison to the plain values that ``--json`` prints, unrounded (docs/command_line.md)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fairflare.reporting.layout import spread
from fairflare_lab.compare.comparison import Comparison
from fairflare_lab.compare.difference_table import notes_of_differences
from fairflare_lab.compare.rows import Row

OF_A_DIFFERENCE = (
    "label", "measure", "values", "mean", "sd", "low", "high", "verdict", "p", "p_holm", "smallest", "images_sd",
    "higher_is_better", "sites", "lacking",
)  # fmt: skip


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values: rows, differences to the reference, and the notes below both tables."""
    notes = notes_of_differences(found.differences, found.reference) if found.differences else []
    return {
        "metric": found.metric, "higher_is_better": found.higher, "reference": found.reference,
        "rows": [_row(row, found.sites) for row in found.rows],
        "differences": [{key: getattr(one, key) for key in OF_A_DIFFERENCE} for one in found.differences],
        "problem": found.problem, "findings": [asdict(one) for one in found.findings],
        "notes": [*found.notes, *notes],
    }  # fmt: skip


def _row(row: Row, sites: list[str]) -> dict[str, Any]:
    return {
        "label": row.label, "settings": row.settings, "runs": len(row.runs),
        "seeds": [run.info.seed for run in row.runs], "values": row.values,
        "sites": {site: row.summarise_site(site) for site in sites}, "suppressed": row.suppressed,
        "average": row.summarise("mean"), "std": row.summarise("std"), "worst": row.summarise("worst"),
        "global_test": {name: spread(values) for name, values in row.of_all.items()},
    }  # fmt: skip
