"""Form the rows of a comparison, each of runs that differ only in the seed, with the values that they measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fairflare.base.checks import group_by_key
from fairflare.base.settings import flatten
from fairflare.core.cells import SUPPRESSED
from fairflare.core.fairness import FairnessSummary, summarize
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import Cell, Spread, spread
from fairflare.reporting.values import (
    are_linked,
    collect_by_site,
    direction_of,
    find_suppressed,
    global_metrics,
    global_values,
    label_of,
    missing_reason,
    models_of,
    site_columns,
)


@dataclass
class Row:
    """Represent the runs of one configuration.

    Attributes:
        label: label of the row, different from all other labels.
        runs: documents of the row's runs.
        values: values of a metric by site, a dict for each tested model: one for each run, or for each of its last
            models.
        summaries: summary over the sites of each dict in ``values``.
        settings: settings, in words, that distinguish the row from others whose label was the same; else empty.
        measured: ``"personal"``: the values are of the sites' own models; ``"common"``: of the common model.
        of_all: ``{metric: values}`` on the global test, a value for each model in ``values``.
    """

    label: str
    runs: list[RunResults]
    values: list[dict[str, float]] = field(default_factory=list)
    summaries: list[FairnessSummary] = field(default_factory=list)
    settings: str = ""
    measured: str = ""
    of_all: dict[str, list[float]] = field(default_factory=dict)

    def summarise_site(self, site: str) -> Spread:
        """Return mean and standard deviation of a site's values over the row's models."""
        return spread([values.get(site, math.nan) for values in self.values])

    def summarise(self, attribute: str) -> Spread:
        """Return mean and standard deviation, over the models, of a figure over the sites such as ``std``."""
        return spread([getattr(summary, attribute) for summary in self.summaries])

    @property
    def suppressed(self) -> list[str]:
        """Return the sites that withhold their value in any of the runs, sorted."""
        return sorted({site for summary in self.summaries for site in summary.suppressed})

    def cell(self, site: str) -> Cell:
        """Return a cell with mean and deviation of a site's values, or the word for values that the site withholds."""
        found = self.summarise_site(site)
        return SUPPRESSED if math.isnan(found.mean) and site in self.suppressed else found


def complete_runs(runs: Sequence[RunResults]) -> list[RunResults]:
    """Return the runs that completed; a run that is given twice (by its folder and its file, or a copy) counts once.

    Raises:
        ValueError: no run completed.
    """
    found: dict[str, RunResults] = {}
    for run in runs:
        if run.status == "completed":
            found.setdefault(
                json.dumps([dict(run.info), run.started, list(map(asdict, run.cells))], sort_keys=True), run
            )
    if not found:
        raise ValueError(f"none of the {len(runs)} runs is complete")
    return list(found.values())


def rows_of(runs: Sequence[RunResults], metric: str) -> list[Row]:
    """Return rows of runs that differ only in the seed.

    Raises:
        ValueError: a run lacks the metric; the message names the run.
    """
    groups = group_by_key(((label_of(run), json.dumps(settings_of(run), sort_keys=True)), run) for run in runs)
    labels = [label for label, _ in groups]
    rows = []
    for index, ((label, _), group) in enumerate(groups.items()):
        for run in group:
            _check_metric(run, metric)
        row = row_of(label, group, metric)
        names = dict.fromkeys(name for run in group for name in global_metrics(run, metric))
        row.of_all = {name: [v for run in group for v in global_values(run, name)] for name in names}
        if labels.count(label) > 1:
            row.label = f"{label} ({labels[: index + 1].count(label)})"
            row.settings = setting_difference(group[0], [of[0] for (other, _), of in groups.items() if other == label])
        rows.append(row)
    return rows


def row_of(label: str, runs: Sequence[RunResults], metric: str, last: bool = False) -> Row:
    """Return a row of the given runs; ``last``: with values of each of their last models."""
    tested = [(run, collect_by_site(run, metric, model)) for run in runs for model in models_of(run, last)]
    higher = direction_of(runs[0], metric)
    summaries = [
        summarize(v, higher_is_better=higher, suppressed=find_suppressed(run, metric), linked=are_linked(run, metric))
        for run, v in tested
    ]
    return Row(label, list(runs), [by_site for _, by_site in tested], summaries, measured=runs[0].info.measured)


def _check_metric(run: RunResults, metric: str) -> None:
    if not all(math.isnan(value) for value in collect_by_site(run, metric).values()):
        return
    known, kept = sorted(site_columns(run)), sorted(find_suppressed(run, metric))
    why = f", at {', '.join(f'{site} ({missing_reason(run, metric, site)})' for site in kept)}"
    other = (
        f"; it has {', '.join(known[:8]) or 'none'}{' ...' if len(known) > 8 else ''}. "
        "Compare runs of one task, or choose a metric that all have with --metric"
    )
    raise ValueError(f"the run {name_run(run)} has no test results for metric {metric!r}{why if kept else other}")


def name_run(run: RunResults) -> str:
    """Return words that identify a run for its user: label, time of its start, and seed."""
    begun = f", begun {run.started[:19]}" if run.started else ""
    return f"{label_of(run)!r}{begun}" + ("" if run.info.seed is None else f", seed {run.info.seed}")


def settings_of(run: RunResults) -> dict[str, Any]:
    """Return all settings of a run except the seed, by names such as ``rule.q``."""
    found = flatten({name: value for name, value in run.info.config.items() if name != "seed"})
    found.pop("task.path", None)  # the same file has another module name in a job
    return found


def setting_difference(run: RunResults, alike: Sequence[RunResults], start: str = "") -> str:
    """Return in words the settings of ``run`` that differ between the runs of ``alike``; at most six.

    ``start``: beginning of the names of the settings that are meant.
    """
    own, others = settings_of(run), [settings_of(other) for other in alike]
    names = {name for other in others for name in other}
    differing = sorted(
        name for name in names if name.startswith(start) and len({json.dumps(other.get(name)) for other in others}) > 1
    )
    shown = [f"{name} {own[name]!r}" if name in own else f"no {name}" for name in differing[:6]]
    return ", ".join(shown) + (f", and {len(differing) - 6} more" if len(differing) > 6 else "")
