"""Collect the material of a page: find and read the runs in a folder, and put them in rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairflare.base.checks import refuse
from fairflare.reporting.documents import RunResults
from fairflare.reporting.findings import run_findings
from fairflare.reporting.layout import sort_sites
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import read_results, results_in
from fairflare.reporting.values import (
    check_metric,
    collect_by_site,
    direction_of,
    label_of,
    metrics_of,
    rests_on,
    site_columns,
    spell_metric,
    summary_of,
)
from fairflare_lab.compare.comparison import Comparison, comparison_of
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.rows import Row, complete_runs
from fairflare_lab.compare.unseen import UnseenSites, unseen_of


@dataclass(frozen=True)
class Material(Comparison):
    """Store all that a page shows; of a single run, a comparison without a reference.

    Attributes:
        others: runs of a comparison that did not complete.
        problems: lines about problems with the files.
        unseen: tests at left-out sites; ``None`` if no run leaves a site out. If every run does, there are no rows.
    """

    others: list[RunResults] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unseen: UnseenSites | None = None

    @property
    def runs(self) -> list[RunResults]:
        return [run for row in self.rows for run in row.runs]

    @property
    def sites(self) -> list[str]:
        """Return the sites of all runs, in the order of :func:`sort_sites`."""
        found = {site for run in self.runs for site in collect_by_site(run, self.metric)}
        for r in (r for run in self.runs for r in run.rounds):
            found.update(r.sites, r.accepted, r.validation, r.reports, r.site_weights or (), *(r.layers or {}).values())
        return sort_sites(found)

    @property
    def synthetic(self) -> bool:
        """Return whether any of the shown data are synthetic."""
        return any(run.info.synthetic for run in self.runs)

    @property
    def over_seeds(self) -> str:
        """Return text to append to captions if figures are means over several runs; else an empty text."""
        return ", means over seeds" if any(len(row.runs) > 1 for row in self.rows) else ""


def name_of(run: RunResults) -> str:
    """Return the run's label and seed, as a name for readers."""
    return label_of(run) + ("" if run.info.seed is None else f", seed {run.info.seed}")


def name_metric(material: Material) -> str:
    """Return the name of a page's metric for readers, with the structures that comparable figures are computed from."""
    return spell_metric(material.metric) + rests_on(material.rows[0].runs[0], material.metric)


def find_runs(folder: Path) -> dict[Path, Path]:
    """Return ``results.json`` of a run, or of all runs in a comparison or a folder of runs, by the run's place.

    Raises:
        ValueError: the folder has no ``results.json``.
    """
    for places in ([folder], (folder / "runs").glob("*"), folder.glob("*")):
        if found := {
            place: results
            for place in sorted(places)
            if (place == folder or place.is_dir()) and (results := results_in(place)) is not None
        }:
            return found
    raise ValueError(f"{folder}: no results.json there, of a run, of a FLARE download or of a comparison (runs/*)")


def read_material(folder: Path, *, metric: str | None = None, reference: str | None = None) -> Material:
    """Return the material of a page about a folder; it has no rows where every run leaves a site out.

    Args:
        folder: folder of a run, a download or a comparison; or a ``results.json``.
        metric: name of the metric; default: the metric of the comparison's table, else the runs' primary metric.
        reference: label of the row that others are compared with; default: the comparison's reference, else the first.

    Raises:
        ValueError: no results are found or can be read, none of several runs is complete, or the metric or reference
            is unknown.
    """
    paths = find_runs(folder)
    if folder in paths:
        if reference is not None:
            raise ValueError("--reference is for comparisons; this is one run")
        return describe_run(read_results(paths[folder]), metric)
    runs: list[RunResults] = []
    left_out: list[tuple[RunResults, Unseen]] = []
    problems: list[str] = []
    for place, path in paths.items():
        try:
            if Unseen.is_in(path.parent):  # not a row, where it would look like a further seed of all sites
                left_out.append((read_results(path), Unseen.read(path.parent)))
            elif _leaves_out(place):
                problems.append(f"left out: {place} was not tested at its left-out site; run compare again")
            else:
                runs.append(read_results(path).model_copy(update={"place": str(place.relative_to(folder))}))
        except (OSError, ValueError) as error:
            problems.append(f"left out, since it cannot be read: {error}")
    told = _read_columns(folder, problems)
    left_out.sort(key=lambda one: [*told.get("method", []), label_of(one[0])].index(label_of(one[0])))
    if runs:
        found = describe_comparison(runs, metric or next(iter(told.get("metric", ())), None), reference, told, problems)
        return replace(found, unseen=unseen_of(left_out, found.metric) if left_out else None)
    refuse({
        "; ".join(problems): not left_out,
        f"--reference is for differences, and {folder} holds runs that each leave a site out": reference is not None,
    })  # fmt: skip
    unseen = unseen_of(left_out, metric)
    return Material([], unseen.metric, unseen.higher, "", [], "", [], [], problems=problems, unseen=unseen)


def _leaves_out(place: Path) -> bool:
    """Return whether a run leaves a site out, by the plan that ``compare`` wrote."""
    try:
        return bool(json.loads((place / "run.json").read_text(encoding="utf-8")).get("held_out"))
    except (OSError, ValueError, AttributeError):
        return False


def describe_run(run: RunResults, metric: str | None = None) -> Material:
    """Return the material of a page about one run, which need not have completed.

    Raises:
        ValueError: the run does not have the metric.
    """
    row, about = Row(label_of(run), [run]), None
    if site_columns(run):
        about = check_metric(run, metric or metrics_of(run)[0])
        row.values, row.summaries = [collect_by_site(run, about)], [summary_of(run, about)]
    chosen = about or metric or run.info.primary_metric or "loss"
    return Material(
        [row], chosen, direction_of(run, chosen), "", [], "", run_findings(run, about), run_notes(run, about)
    )


def _read_columns(folder: Path, problems: list[str]) -> dict[str, list[str]]:
    """Return columns of a comparison's own tables, which give the order of rows, the metric and the reference."""
    found: dict[str, list[str]] = {}
    tables = {"unseen.csv": ("method",), "table.csv": ("method", "metric"), "differences.csv": ("reference",)}
    for name, columns in tables.items():
        try:
            lines = list(csv.DictReader(io.StringIO((folder / name).read_text(encoding="utf-8"))))
            found |= {column: [line[column] for line in lines if line.get(column)] for column in columns}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, csv.Error) as error:
            problems.append(f"{name} cannot be read: {error}")
    return found


def describe_comparison(
    runs: Sequence[RunResults],
    metric: str | None,
    reference: str | None,
    told: Mapping[str, Sequence[str]],
    problems: Sequence[str],
) -> Material:
    """Return the material of a page that compares runs.

    Raises:
        ValueError: no run is complete, a run lacks the metric, or no row has the reference's label.
    """
    ranks = {label: rank for rank, label in enumerate(told.get("method", ()))}
    order = sorted(runs, key=lambda run: (ranks.get(label_of(run), len(ranks)), run.started, getattr(run, "place", "")))
    complete = {label_of(run) for run in complete_runs(order)}
    reference = reference or next((label for label in told.get("reference", ())[:1] if label in complete), None)
    found = comparison_of(order, metric, reference)
    for row in found.rows:
        for run in row.runs:
            run.info.label = row.label  # as in the comparison's tables
    return Material(
        **vars(found),
        others=[run for run in order if run.status != "completed"],
        problems=[*problems, *filter(None, [found.problem])],
    )
