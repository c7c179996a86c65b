"""A comparison as one Markdown page: the command, both tables, what it took."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def comparison_page(
    command: Sequence[str],
    runs: Sequence[Mapping[str, Any]],
    table: str,
    differences: str,
    *last: str,
    sessions: Sequence[Mapping[str, Any]] = (),
) -> str:
    """What is needed to believe a table and to make it again.

    Args:
        command: arguments of the command line.
        runs: documents of :func:`fairflare.reporting.results.read_results`.
        table, differences: Markdown; an empty one is left out.
        last: both again, of the last models on average.
        sessions: of ``provenance.json``: commit, processor and checksums of the data, as they were when runs began.
    """
    complete = [run for run in runs if run["status"] == "completed"]
    versions = {told for run in complete if (told := _versions(run))}
    lines = [
        "# Comparison", "", "```bash", shlex.join(command), "```", "", what_ran(complete),
        *(f"Made with {one}." for one in sorted(versions)), *provenance_lines(sessions), "",
        "## What each row reached", "", table,
    ]  # fmt: skip
    if differences:
        lines += ["", "## Differences", "", differences]
    if last:
        lines += ["", "## The last models", *(line for part in last if part for line in ("", part))]
    return "\n".join(lines)


def what_ran(runs: Sequence[Mapping[str, Any]]) -> str:
    """Rows, seeds, rounds, sites and time of completed runs, in a sentence."""
    took = [seconds for run in runs if (seconds := _seconds(run)) is not None]
    labels = dict.fromkeys(run["info"]["label"] for run in runs)
    rounds = sorted({int(run["info"]["num_rounds"]) for run in runs})
    seeds = sorted({int(run["info"]["seed"]) for run in runs})
    return (
        f"{len(labels)} rows, seeds {_listed(seeds)}, {_listed(rounds)} rounds, {len(runs[0]['info']['sites'])} sites: "
        f"{len(runs)} runs, {_hours(sum(took))} of run time in all."
    )


def provenance_lines(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each code and machine that runs were made with, and one for each site's data."""
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


def _seconds(run: Mapping[str, Any]) -> float | None:
    if not run.get("started") or not run.get("finished"):
        return None
    return (datetime.fromisoformat(run["finished"]) - datetime.fromisoformat(run["started"])).total_seconds()


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, round(seconds / 60))} min"


def _versions(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (run["info"].get("versions") or {}).items())


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
