"""What ``--json`` prints: a model for each command, made of the objects that its text is made of.

Keys are only added; where the meaning of one changes, ``version`` does. A number that is undefined is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from fairflare.cli.data.doctor import Finding
from fairflare.reporting.layout import spread
from fairflare.reporting.table import by_site_of, known_metric, label_of, metrics_of, run_notes, summary_of
from fairflare_lab.compare.comparison import Comparison
from fairflare_lab.compare.difference_table import notes_of_differences
from fairflare_lab.compare.rows import Row

if TYPE_CHECKING:
    from fairflare.checking.images import DataReport
    from fairflare.federation.plan.describe import InUse
    from fairflare_lab.cli.compare.runs import Progress


class _Part(BaseModel, extra="forbid", from_attributes=True, ser_json_inf_nan="null"):
    """Base of what follows."""


class _Document(_Part):
    version: Literal[1] = 1


class ListedMethod(_Part):
    """A method, as :class:`fairflare.federation.plan.describe.Listed` has it."""

    name: str
    title: str
    summary: str
    source: str
    phases: int
    learns: list[str]
    page: str | None


class ListDocument(_Document):
    """``fairflare list --json``."""

    methods: list[ListedMethod]


class UsedSetting(_Part):
    """A setting with the value that a run has; ``paper``: the value with ``--paper`` where that is another, as text."""

    name: str
    wanted: str
    value: Any
    paper: str
    meaning: str
    only: str
    needs: str


class SettingsGroup(_Part):
    """The settings of a method's half, of its task, or of every run."""

    title: str
    settings: list[UsedSetting]


class DescribeDocument(_Document):
    """``fairflare describe METHOD --json``."""

    method: str
    groups: list[SettingsGroup]
    quick_job: str


class Spread(_Part):
    """Mean and population standard deviation; of one value no deviation, of none no mean."""

    mean: float | None
    sd: float | None


class MetricShown(_Part):
    """A metric of a run at its sites, and over them (each counts once)."""

    sites: dict[str, float | None]
    suppressed: list[str]
    higher_is_better: bool | None
    average: float | None
    std: float | None
    worst: float | None
    worst_site: str | None
    range: float | None


class RunShown(_Part):
    """One run; ``notes`` are the sentences under its table."""

    label: str
    seed: int | None
    status: str
    reason: str | None
    rounds: int
    metrics: dict[str, MetricShown]
    notes: list[str]


class ComparedRow(_Part):
    """Runs that differ in nothing but the seed; ``values`` are by site, one for each model that was tested."""

    label: str
    settings: str
    runs: int
    seeds: list[int | None]
    values: list[dict[str, float | None]]
    sites: dict[str, Spread]
    suppressed: list[str]
    average: Spread
    std: Spread
    worst: Spread
    global_test: dict[str, Spread]


class ComparedDifference(_Part):
    """A row's difference to the reference, as :class:`fairflare_lab.compare.differences.Difference` has it."""

    label: str
    measure: str
    values: dict[int, float]
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    verdict: str
    p: float | None
    p_holm: float | None
    smallest: float | None
    images_sd: float | None
    higher_is_better: bool
    sites: list[str]
    lacking: dict[str, str]


class ComparisonShown(_Part):
    """Rows, their differences to the reference, and the sentences under both tables."""

    metric: str
    higher_is_better: bool
    reference: str
    last: bool
    rows: list[ComparedRow]
    differences: list[ComparedDifference]
    problem: str
    notes: list[str]


class ShowDocument(_Document):
    """``fairflare show RUN ... --json``: of one run ``run``, of several ``comparison``; the other is null."""

    run: RunShown | None = None
    comparison: ComparisonShown | None = None


class EndedRun(_Part):
    """A run of a comparison: its state, and why it did not complete."""

    name: str
    state: str
    reason: str


class CompareDocument(_Document):
    """``fairflare compare --json``; ``comparison``: null if no run completed; ``last``: of the last models."""

    folder: str
    runs: list[EndedRun]
    comparison: ComparisonShown | None
    last: ComparisonShown | None


class FoundProblem(_Part):
    """What is wrong with images; ``grave``: training must not begin like this. An empty site: at several."""

    site: str
    text: str
    grave: bool


class ImageSize(_Part):
    """Images of a size in pixels."""

    width: int
    height: int
    images: int


class CheckedSite(_Part):
    """A site's usable images: by split and class (``images`` where there are no classes), by size, and by
    attribute, split and group of people where the datalist declares attributes."""

    site: str
    counts: dict[str, dict[str, int]]
    sizes: list[ImageSize]
    groups: dict[str, dict[str, dict[str, int]]] = {}


class CheckDataDocument(_Document):
    """``fairflare check-data FILE --json``: every problem, also without ``--all``."""

    usable: int
    grave: int
    problems: list[FoundProblem]
    sites: list[CheckedSite]
    labels: str
    notes: list[str]


class DoctorDocument(_Document):
    """``fairflare doctor --json``."""

    findings: list[Finding]


# ------------------------------------------------------------------------------------------------ made


def of_settings(method: str, found: Mapping[str, Sequence[InUse]], quick_job: str) -> DescribeDocument:
    """``describe`` as a document."""
    groups = [
        SettingsGroup(
            title=title,
            settings=[
                UsedSetting(
                    name=used.setting.name, wanted=used.setting.wanted, value=used.setting.default, paper=used.paper,
                    meaning=used.setting.meaning.replace("`", ""), only=used.setting.only, needs=used.needs,
                )
                for used in group
            ],
        )
        for title, group in found.items()
    ]  # fmt: skip
    return DescribeDocument(method=method, groups=groups, quick_job=quick_job)


def of_run(results: Mapping[str, Any], metric: str | None) -> ShowDocument:
    """``show`` of one run as a document.

    Raises:
        ValueError: a metric that the run does not have.
    """
    names = (
        [] if not results.get("test") else metrics_of(results) if metric is None else [known_metric(results, metric)]
    )
    metrics = {}
    for name in names:
        over = summary_of(results, name)
        metrics[name] = MetricShown(
            sites=dict(by_site_of(results, name)), suppressed=list(over.suppressed),
            higher_is_better=over.higher_is_better, average=over.mean, std=over.std, worst=over.worst,
            worst_site=over.worst_site, range=over.range,
        )  # fmt: skip
    run = RunShown(
        label=label_of(results), seed=(results["info"] or {}).get("seed"), status=results["status"],
        reason=results.get("reason"), rounds=len(results["rounds"]), metrics=metrics, notes=run_notes(results, metric),
    )  # fmt: skip
    return ShowDocument(run=run)


def of_comparison(found: Comparison) -> ComparisonShown:
    """A comparison as part of a document."""
    notes = notes_of_differences(found.differences, found.reference) if found.differences else []
    return ComparisonShown(
        metric=found.metric, higher_is_better=found.higher, reference=found.reference, last=found.last,
        rows=[_row(row, found.sites) for row in found.rows],
        differences=[ComparedDifference.model_validate(one) for one in found.differences],
        problem=found.problem, notes=[*found.notes, *notes],
    )  # fmt: skip


def _row(row: Row[Any], sites: Sequence[str]) -> ComparedRow:
    return ComparedRow(
        label=row.label, settings=row.settings, runs=len(row.runs), suppressed=row.suppressed,
        seeds=[(run["info"] or {}).get("seed") for run in row.runs], values=[dict(one) for one in row.values],
        sites={site: Spread.model_validate(row.at(site)) for site in sites},
        average=Spread.model_validate(row.over("mean")), std=Spread.model_validate(row.over("std")),
        worst=Spread.model_validate(row.over("worst")),
        global_test={name: Spread.model_validate(spread(values)) for name, values in row.of_all.items()},
    )  # fmt: skip


def of_compare(folder: Path, runs: Iterable[Progress], found: Sequence[Comparison]) -> CompareDocument:
    """``compare`` as a document; ``found``: of the final models, and of the last ones where there are such."""
    made = [*map(of_comparison, found), None, None]
    return CompareDocument(
        folder=str(folder),
        runs=[EndedRun(name=one.run.name, state=one.state, reason=one.reason) for one in runs],
        comparison=made[0],
        last=made[1],
    )


def of_data(report: DataReport, called: Any, notes: Sequence[str]) -> CheckDataDocument:
    """``check-data`` as a document; ``called`` gives the name of a class by its number."""
    sites = [
        CheckedSite(
            site=site.site,
            counts={split: {called(k): n for k, n in found.items()} for split, found in site.counts.items()},
            sizes=[ImageSize(width=size[1], height=size[0], images=n) for size, n in site.sizes.most_common()],
            groups=site.groups,
        )
        for site in report.sites
    ]
    return CheckDataDocument(
        usable=report.usable, grave=report.grave, sites=sites, labels=report.labels, notes=list(notes),
        problems=[FoundProblem.model_validate(one) for one in report.problems],
    )  # fmt: skip
