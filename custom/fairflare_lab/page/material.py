"""Collect the material of a page: find and read the runs in a folder, and put them in rows."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from fairflare.reporting.documents import Info, Results
from fairflare.reporting.findings import Finding
from fairflare.reporting.layout import in_order
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import RESULTS_FILE, read_results, results_in
from fairflare.reporting.values import (
    by_site_of,
    direction_of,
    in_words,
    known_metric,
    label_of,
    metrics_of,
    rests_on,
    site_columns,
    summary_of,
)
from fairflare_lab.compare.comparison import comparison_of
from fairflare_lab.compare.differences import Difference
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.rows import Row, complete_runs
from fairflare_lab.compare.unseen import UnseenSites, unseen_of

if TYPE_CHECKING:
    import pandas as pd

LAYERS = ["round", "layer", "site", "weight", "dissimilarity"]
#: Path names that may lie between a run's folder and its results: a simulator's workspace, or a FLARE download.
BELOW_A_RUN = {"simulator", "server", "simulate_job", "workspace", "fairflare", RESULTS_FILE}


class PageRun(Results):
    """Represent a run of a page; ``place``: where its document was found."""

    place: str = ""

    @property
    def name(self) -> str:
        """Return the run's label and seed, as a name for readers."""
        return label_of(self) + ("" if self.info.seed is None else f", seed {self.info.seed}")

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Return the run's values by layer (weights, CKA) as a frame with the columns of :data:`LAYERS`."""
        import pandas as pd

        values = [
            (record.current_round, layer, site, of.get("weight"), of.get("dissimilarity"))
            for record in self.rounds
            for layer, by_site in (record.layers or {}).items()
            for site, of in by_site.items()
        ]
        return pd.DataFrame(values, columns=LAYERS, dtype=object).astype(dict.fromkeys(LAYERS[3:], float))


PageRow: TypeAlias = Row[PageRun]  # row of runs; its summaries are empty without a test


@dataclass(frozen=True)
class Material:
    """Store all that a page shows.

    Attributes:
        rows: rows of runs; at least one, unless every run leaves a site out.
        metric: name of the metric of the figures.
        higher: whether more of the metric is better.
        reference: label of the row that others are compared with; empty if a single run is shown.
        notes: sentences that a reader of the figures must know.
        findings: what is said first of a comparison.
        others: runs of a comparison that did not complete.
        problems: lines about problems with the files.
        differences: differences of rows to the reference.
        unseen: tests at left-out sites; ``None`` if no run leaves a site out.
    """

    rows: list[PageRow]
    metric: str
    higher: bool
    reference: str
    notes: list[str]
    findings: list[Finding] = field(default_factory=list)
    others: list[PageRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unseen: UnseenSites | None = None

    @property
    def runs(self) -> list[PageRun]:
        return [run for row in self.rows for run in row.runs]

    @property
    def by_label(self) -> dict[str, list[PageRun]]:
        """Return the runs of each row, by the row's label."""
        return {row.label: row.runs for row in self.rows}

    @cached_property
    def sites(self) -> list[str]:
        """Return the sites of all runs, in the order of :func:`in_order`."""
        found = {site for run in self.runs for site in by_site_of(run, self.metric)}
        for run in self.runs:
            found.update(run.layers.site[run.layers.weight.notna()])
            for r in run.rounds:
                found.update(r["sites"], r["accepted"], r["validation"], r["reports"], r["site_weights"] or ())
        return in_order(found)

    @property
    def synthetic(self) -> bool:
        """Return whether any of the shown data are synthetic."""
        return any(run.info["synthetic"] for run in self.runs)

    @property
    def over_seeds(self) -> str:
        """Return text to append to captions if figures are means over several runs; else an empty text."""
        return ", means over seeds" if any(len(row.runs) > 1 for row in self.rows) else ""

    @property
    def tested(self) -> bool:
        return any(math.isfinite(s.mean) for row in self.rows for s in row.summaries)


def spelt(material: Material) -> str:
    """Return the name of a page's metric for readers, with the structures that comparable figures are computed from."""
    return in_words(material.metric) + rests_on(material.rows[0].runs[0], material.metric)


def page_run(results: Results, place: str = "") -> PageRun:
    """Return results from :func:`fairflare.reporting.results.read_results` as a run of a page."""
    return PageRun.model_construct(**dict(results), place=place)


def images_of(info: Info) -> list[tuple[str, str, int]]:
    """Return site, split and number of images of each list that the sites of a run reported."""
    told = ((site, said.get("images")) for site, said in info["said"].items())
    return [
        (site, split, count)
        for site, by_split in told if isinstance(by_split, dict)
        for split, count in by_split.items() if isinstance(count, int)
    ]  # fmt: skip


def find_runs(folder: Path) -> list[Path]:
    """Return the paths of ``results.json`` of a run, or of all runs in a comparison (``runs/*``) or a folder of runs.

    Raises:
        ValueError: the folder has no ``results.json``.
    """
    for places in ([folder], (folder / "runs").glob("*"), folder.glob("*")):
        if found := [results for place in sorted(places) if (results := results_in(place)) is not None]:
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
    if results_in(folder):
        if reference is not None:
            raise ValueError("--reference is for comparisons; this is one run")
        return of_one(page_run(read_results(paths[0])), metric)
    runs: list[PageRun] = []
    left_out: list[tuple[Results, Unseen]] = []
    problems: list[str] = []
    for path in paths:
        try:
            if not _leaves_out(path):
                runs.append(page_run(read_results(path), _run_folder(path.relative_to(folder))))
            elif Unseen.is_in(path.parent):  # not a row, where it would look like a further seed of all sites
                left_out.append((page_run(read_results(path)), Unseen.read(path.parent)))
            else:
                problems.append(f"left out: {path.parent} was not tested at its left-out site; run compare again")
        except (OSError, ValueError) as error:
            problems.append(f"left out, since it cannot be read: {error}")
    told = _told(folder, problems)
    order = told.get("method", [])
    left_out.sort(key=lambda one: [*order, label_of(one[0])].index(label_of(one[0])))
    if runs:
        found = of_several(runs, metric or next(iter(told.get("metric", ())), None), reference, told, problems)
        return replace(found, unseen=unseen_of(left_out, found.metric) if left_out else None)
    if not left_out:
        raise ValueError("; ".join(problems))
    if reference is not None:
        raise ValueError(f"--reference is for differences, and {folder} holds runs that each leave a site out")
    unseen = unseen_of(left_out, metric)
    return Material([], unseen.metric, unseen.higher, "", [], problems=problems, unseen=unseen)


def _leaves_out(results: Path) -> bool:
    """Return whether a run leaves a site out, by its test at this site or by the plan that ``compare`` wrote."""
    plans = (parent / "run.json" for parent in results.parents[:6])
    plan = next((path for path in plans if path.is_file()), None)
    try:
        told = {} if plan is None else json.loads(plan.read_text(encoding="utf-8"))
        return Unseen.is_in(results.parent) or bool(told.get("held_out"))
    except (OSError, ValueError, AttributeError):
        return Unseen.is_in(results.parent)


def _run_folder(results: Path) -> str:
    """Return the run's part of a path, such as ``runs/x`` of ``runs/x/server/simulate_job/fairflare/results.json``."""
    while results.parent != Path() and results.name in BELOW_A_RUN:
        results = results.parent
    return str(results)


def of_one(run: PageRun, metric: str | None = None) -> Material:
    """Return the material of a page about one run, which need not have completed.

    Raises:
        ValueError: the run does not have the metric.
    """
    row = PageRow(label_of(run), [run])
    chosen = metric or run.info.primary_metric or "loss"
    if site_columns(run):
        chosen = known_metric(run, metric or metrics_of(run)[0])
        row.values, row.summaries = [by_site_of(run, chosen)], [summary_of(run, chosen)]
    return Material([row], chosen, direction_of(run, chosen), "", run_notes(run, chosen if site_columns(run) else None))


def _told(folder: Path, problems: list[str]) -> dict[str, list[str]]:
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


def of_several(
    runs: Sequence[PageRun],
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
    order = sorted(runs, key=lambda run: (ranks.get(label_of(run), len(ranks)), run["started"], run.place))
    complete = {label_of(run) for run in complete_runs(order)}
    reference = reference or next((label for label in told.get("reference", ())[:1] if label in complete), None)
    found = comparison_of(order, metric, reference)
    rows = cast("list[PageRow]", found.rows)  # their runs are the given PageRuns
    for row in rows:
        for run in row.runs:
            run.info.label = row.label  # as in the comparison's tables
    return Material(
        rows,
        found.metric,
        found.higher,
        found.reference,
        notes=found.notes[1:],  # without the first note, which the tables' captions have
        findings=found.findings,
        others=[run for run in order if run["status"] != "completed"],
        problems=[*problems, *filter(None, [found.problem])],
        differences=found.differences,
    )
