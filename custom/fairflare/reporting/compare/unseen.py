"""Models at sites that were no part of their training: the document of a run, and the table of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fairflare.base.disk.files import write_whole
from fairflare.core.fairness import summarize
from fairflare.reporting.layout import Cell, Table, printed, spread
from fairflare.reporting.values import by_site_of, direction_of, label_of, metrics_of

UNSEEN_FILE = "unseen.json"


class Unseen(BaseModel, extra="forbid"):
    """What a run's common model is worth at a site that was not there.

    Attributes:
        site: name.
        metrics: of its test split; ``None``: undefined there.
        adapted: the same of the model with norm statistics of the site's own training images; empty: it has no such.
        best: of the model that validated best at the sites of the run; empty: there is none, or it is not common.
        best_is_last: that model is the last one.
        images: in its test split.
        resampled: the primary metric on draws of its test patients; empty: none were made.
        unit, units: what was drawn (``patients``, ``volumes`` or ``images``), and how many of them it has.
        reason: why there is no figure; empty: there is one.
    """

    site: str
    metrics: dict[str, float | None] = {}
    adapted: dict[str, float | None] = {}
    best: dict[str, float | None] = {}
    best_is_last: bool = False
    images: int | None = None
    resampled: list[float | None] = []
    unit: str = ""
    units: int | None = None
    reason: str = ""


def write_unseen(folder: Path, found: Unseen) -> None:
    """Writes the document beside a run's ``results.json``."""
    text = found.model_dump_json(indent=2) + "\n"
    write_whole(folder / UNSEEN_FILE, lambda path: path.write_text(text, "utf-8"), shared=True)


def has_unseen(folder: Path) -> bool:
    """Whether the document is there."""
    return (folder / UNSEEN_FILE).is_file()


def read_unseen(folder: Path) -> Unseen:
    """Reads the document.

    Raises:
        ValueError: it is not there or damaged (names the file).
    """
    file = folder / UNSEEN_FILE
    try:
        return Unseen.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: no readable result of a left-out site ({error}); delete it and run again") from error


def unseen_table(
    found: Sequence[tuple[Mapping[str, Any], Unseen]],
    metric: str | None = None,
    *,
    style: str = "text",
    width: int | None = None,
) -> str:
    """Rows side by side at sites they saw and sites they did not: mean ± population standard deviation over the seeds.

    Of each seed, "seen" is the mean over its runs of the mean over the sites that trained; "unseen" and "unseen worst"
    are mean and worst over the left-out sites, and stand only where every left-out site has a figure; "gap" is seen
    less unseen. "adapted" is "unseen" of the same models with norm statistics of the left-out site's own training
    images, which takes no labels. Seeds without all of the left-out sites are left out of them and named.

    Args:
        found: documents of completed runs, each with its :class:`Unseen`.
        metric: default: the primary metric of the first run.
        style: ``"text"``, ``"markdown"`` or ``"csv"``.
        width: of the text.

    Raises:
        ValueError: no run, or no run has the metric.
    """
    if not found:
        raise ValueError("no run with a left-out site completed")
    chosen = metric or metrics_of(found[0][0])[0]
    higher = direction_of(found[0][0], chosen)
    sites = sorted({unseen.site for _, unseen in found})
    rows: list[list[Cell]] = []
    notes = [
        f"{chosen} ({'higher' if higher else 'lower'} is better) of the last models; a site's column is of models that "
        "were trained without it, on its test split. Mean ± population standard deviation over the seeds."
    ]
    for label in dict.fromkeys(label_of(run) for run, _ in found):
        own = [(run, unseen) for run, unseen in found if label_of(run) == label]
        by_seed: dict[int, dict[str, tuple[float, float, float]]] = {}
        for run, unseen in own:
            seen = summarize(by_site_of(run, chosen), higher_is_better=higher).mean
            figures = [math.nan if v is None else v for v in (unseen.metrics.get(chosen), unseen.adapted.get(chosen))]
            by_seed.setdefault(int(run["info"]["seed"]), {})[unseen.site] = (seen, figures[0], figures[1])
        whole = [[*by.values()] for by in by_seed.values() if len(by) == len(sites)]
        if lacking := sorted(seed for seed, by in by_seed.items() if len(by) < len(sites)):
            notes.append(f"{label}: seeds {', '.join(map(str, lacking))} lack runs: in the sites' columns only.")
        means = [[sum(column) / len(sites) for column in zip(*of_seed, strict=True)] for of_seed in whole]
        worst = [_worst([value for _, value, _ in of_seed], higher) for of_seed in whole]
        each = [[by[site][1] for by in by_seed.values() if site in by] for site in sites]
        seen_means, unseen_means, adapted = ([of_seed[k] for of_seed in means] for k in range(3))
        gaps = [seen - value for seen, value, _ in means]
        rows.append([label, len(by_seed), *map(spread, (seen_means, unseen_means, worst, gaps, adapted, *each))])
        notes += [f"{label}: no figure: {reason}." for reason in sorted({u.reason for _, u in own if u.reason})]
        if any(run["info"].get("measured") == "personal" and not u.reason for run, u in own):
            notes.append(f"{label}: seen sites are measured with a model of their own, the unseen one with the common.")
    columns = ["method", "seeds", "seen", "unseen", "unseen worst", "gap", "adapted", *sites]
    return printed([Table("unseen", "", columns, rows)], notes, style, width)


def _worst(values: Sequence[float], higher: bool) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return min(values) if higher else max(values)
