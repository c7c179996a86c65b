"""Write the page of a run, with its pictures, or of a statistics job, after it has ended."""

from __future__ import annotations

from pathlib import Path

from fairflare.reporting.results import RESULTS_FILE, read_results
from fairflare.reporting.sites.statistics import StatsDocument
from fairflare_lab.page.site_statistics import write_page
from fairflare_lab.page.write import write_run_page


def draw(document: Path) -> list[str]:
    """Write page and pictures beside ``results.json`` or ``stats.json``; return lines for the log."""
    if document.name == RESULTS_FILE:
        return write_run_page(read_results(document.parent), document.parent)
    return [f"page: {write_page(StatsDocument.model_validate_json(document.read_bytes()), document.parent)}"]
