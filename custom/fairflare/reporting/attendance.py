"""Who took part in how many rounds, and who was expected and never came: lines below the table of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def attendance(results: Mapping[str, Any]) -> list[str]:
    """Empty when every expected site was connected and in every round.

    Args:
        results: a document as :func:`fairflare.reporting.results.read_results` returns it.
    """
    info = results["info"] or {}
    expected = list(info.get("sites") or ())
    connected = info.get("connected")  # older results have none
    lines = []
    missing = [] if connected is None else [site for site in expected if site not in connected]
    if missing:
        lines.append(f"Expected, and not connected: {', '.join(missing)} ({len(missing)} of {len(expected)}).")
    rounds = results["rounds"]
    counts = {site: sum(site in record["accepted"] for record in rounds) for site in expected}
    if rounds and any(count < len(rounds) for count in counts.values()):
        lines.append(
            "Took part in rounds: " + ", ".join(f"{site} {n}/{len(rounds)}" for site, n in counts.items()) + "."
        )
    return lines
