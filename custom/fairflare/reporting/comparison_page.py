"""A comparison as one Markdown page: the command, both tables, what it took."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def comparison_page(
    command: Sequence[str], runs: Sequence[Mapping[str, Any]], table: str, differences: str, *last: str
) -> str:
    """What is needed to believe a table and to make it again.

    Args:
        command: arguments of the command line.
        runs: documents of :func:`fairflare.reporting.results.read_results`.
        table, differences: Markdown; an empty one is left out.
        last: both again, of the last models on average.
    """
    complete = [run for run in runs if run["status"] == "completed"]
    took = [seconds for run in complete if (seconds := _seconds(run)) is not None]
    versions = {told for run in complete if (told := _versions(run))}
    labels = dict.fromkeys(run["info"]["label"] for run in complete)
    rounds = sorted({int(run["info"]["num_rounds"]) for run in complete})
    seeds = sorted({int(run["info"]["seed"]) for run in complete})
    lines = [
        "# Comparison", "", "```bash", shlex.join(command), "```", "",
        f"{len(labels)} rows, seeds {_listed(seeds)}, {_listed(rounds)} rounds, "
        f"{len(complete[0]['info']['sites'])} sites: {len(complete)} runs, {_hours(sum(took))} of run time in all.",
        *(f"Made with {one}." for one in sorted(versions)), "", "## What each row reached", "", table,
    ]  # fmt: skip
    if differences:
        lines += ["", "## Differences", "", differences]
    if last:
        lines += ["", "## The last models", *(line for part in last if part for line in ("", part))]
    return "\n".join(lines)


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
