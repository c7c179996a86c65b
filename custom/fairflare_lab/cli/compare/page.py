"""Write a comparison as one Markdown page: its command, the code and data of its runs, and its tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.reporting.documents import Results


def comparison_page(
    command: Sequence[str],
    runs: Sequence[Results],
    table: str,
    differences: str,
    groups: str = "",
    sessions: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a page in Markdown with a comparison's tables and what is needed to reproduce them.

    Args:
        command: arguments of the command line.
        runs: documents of :func:`fairflare.reporting.results.read_results`.
        table, differences: tables of rows and of differences in Markdown; an empty text is left out.
        groups: table of gaps between groups of people in Markdown; empty: no run asked for groups.
        sessions: entries of ``provenance.json``: commit, processor and checksums of the data when runs began.
    """
    complete = [run for run in runs if run["status"] == "completed"]
    known = [run["info"].get("versions") or {} for run in complete]
    versions = {", ".join(f"{name} {version}" for name, version in of.items()) for of in known if of}
    lines = [
        "# Comparison", "", "```bash", shlex.join(command), "```", "",
        *(f"Made with {one}." for one in sorted(versions)), *provenance_lines(sessions), "",
        "## What each row reached", "", table,
    ]  # fmt: skip
    further = {"Differences": differences, "Groups of people": groups}
    for title, part in further.items():
        lines += ["", f"## {title}", "", part] if part else []
    return "\n".join(lines)


def provenance_lines(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each code and machine that runs were made with, and one for each site's data."""
    machines = dict.fromkeys(
        f"Code: commit {told.get('commit') or 'not recorded'}; processor: {told.get('processor') or 'not recorded'}"
        + (f"; GPU: {told['accelerator']}." if told.get("accelerator") else ".")
        for told in sessions
    )
    data = dict.fromkeys(
        (site, f"{of['files']} files, sha256 {of['sha256']}" if "sha256" in of else f"none, {of['not recorded']}")
        for told in sessions
        for site, of in told.get("data", {}).items()
    )
    lines = [*machines, *(f"Data of {site}: {text}." for site, text in data)]
    if len({site for site, _ in data}) < len(data):
        lines.append("The data CHANGED between the sessions of this comparison: its rows cannot be compared.")
    return lines
