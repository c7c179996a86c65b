"""What one method does better or worse than another: differences of runs paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

from fairflare.core import checks
from fairflare.core.fairness import summarize
from fairflare.reporting.layout import MISSING, blocks, csv_lines, markdown_lines, wrapped
from fairflare.reporting.table import by_site_of, direction_of, label_of, metrics_of

LEVEL = 0.95
#: Of a run's sites; each is better when higher but the standard deviation (and all are turned for a loss).
MEASURES = ("average", "std", "worst")
BETTER, WORSE, NOISE, ONE_SEED = "better", "worse", "within noise", "one seed"


@dataclass(frozen=True)
class Difference:
    """Of one measure, a row against the reference, over the seeds that both have.

    Attributes:
        label, measure: of what; a measure is one of :data:`MEASURES` or a site's name.
        values: by seed, row minus reference.
        mean: of them.
        sd: sample standard deviation; NaN with one seed.
        low, high: Student's interval for the mean difference at :data:`LEVEL`; NaN with one seed.
        verdict: ``better`` or ``worse`` where the interval leaves out 0, else ``within noise``; ``one seed``.
    """

    label: str
    measure: str
    values: Mapping[int, float]
    mean: float
    sd: float
    low: float
    high: float
    verdict: str


def paired(label: str, measure: str, values: Mapping[int, float], *, higher_is_better: bool) -> Difference:
    r"""The mean of paired differences and its interval :math:`\bar d \pm t_{n-1} s / \sqrt n`.

    Args:
        label, measure: what it is of.
        values: difference by seed; at least one, all finite.
        higher_is_better: of the measure.
    """
    checks.numbers(f"difference of {measure}", values, of="seed")
    checks.not_empty("the differences", values, of="seed")
    found = [values[seed] for seed in sorted(values)]
    mean = statistics.fmean(found)
    if len(found) == 1:
        return Difference(label, measure, dict(values), mean, math.nan, math.nan, math.nan, ONE_SEED)
    sd = statistics.stdev(found)
    half = float(stdtrit(len(found) - 1, 0.5 + LEVEL / 2)) * sd / math.sqrt(len(found))
    low, high = mean - half, mean + half
    verdict = NOISE
    if low > 0 or high < 0:
        verdict = BETTER if (mean > 0) == higher_is_better else WORSE
    return Difference(label, measure, dict(values), mean, sd, low, high, verdict)


def differences(runs: Sequence[Mapping[str, Any]], reference: str, metric: str | None = None) -> list[Difference]:
    """Every other label against ``reference``: average, standard deviation and worst of the sites, and each site.

    Args:
        runs: documents of :func:`fairflare.reporting.results.read_results`; those that did not complete are left out.
        reference: a label.
        metric: of the test splits; the primary one of the first complete run when ``None``.

    Returns:
        In the order of the runs; nothing for labels that share no seed with the reference.

    Raises:
        ValueError: no complete run of the reference, or two of one label and seed.
    """
    complete = [run for run in runs if run["status"] == "completed"]
    by_label: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in complete:
        of_label = by_label.setdefault(label_of(run), {})
        seed = int(run["info"]["config"]["seed"])
        if seed in of_label:
            raise ValueError(f"two runs of {label_of(run)!r} have seed {seed}; compare them one at a time")
        of_label[seed] = run
    if reference not in by_label:
        raise ValueError(f"no complete run of {reference!r}; there are {', '.join(by_label) or 'none'}")
    chosen = metric or metrics_of(complete[0])[0]
    higher = direction_of(complete[0], chosen)
    found = []
    for label, own in by_label.items():
        common = sorted(set(own) & set(by_label[reference]))
        if label != reference and common:
            found += _against(label, own, by_label[reference], common, chosen, higher)
    return found


def _against(
    label: str,
    own: Mapping[int, Mapping[str, Any]],
    other: Mapping[int, Mapping[str, Any]],
    seeds: Sequence[int],
    metric: str,
    higher: bool,
) -> list[Difference]:
    measured = {seed: (_measures(own[seed], metric, higher), _measures(other[seed], metric, higher)) for seed in seeds}
    names = [*MEASURES, *sorted({name for pair in measured.values() for of in pair for name in of} - {*MEASURES})]
    found = []
    for name in names:
        values = {seed: a[name] - b[name] for seed, (a, b) in measured.items() if name in a and name in b}
        values = {seed: value for seed, value in values.items() if math.isfinite(value)}
        if values:
            found.append(paired(label, name, values, higher_is_better=False if name == "std" else higher))
    return found


def _measures(run: Mapping[str, Any], metric: str, higher: bool) -> dict[str, float]:
    by_site = by_site_of(run, metric)
    summary = summarize(by_site, higher_is_better=higher)
    return {**by_site, "average": summary.mean, "std": summary.std, "worst": summary.worst}


# ------------------------------------------------------------------------------------------------ forms


def difference_table(
    found: Sequence[Difference], reference: str, *, style: str = "text", width: int | None = None
) -> str:
    """The measures of every row against the reference; sites only in CSV.

    Args:
        found: of :func:`differences`.
        reference: label.
        style: ``text``, ``markdown`` or ``csv``.
        width: of the text.
    """
    if style == "csv":
        head = ["method", "reference", "measure", "seeds", "mean", "sd", "low", "high", "verdict"]
        rows = [[d.label, reference, d.measure, len(d.values), *_numbers(d), d.verdict] for d in found]
        return csv_lines([head, *rows])
    table = [["method", *(f"{measure}" for measure in MEASURES)]]
    for label in dict.fromkeys(d.label for d in found):
        of = {d.measure: d for d in found if d.label == label}
        table.append([label, *(_cell(of[m]) if m in of else MISSING for m in MEASURES)])
    notes = [
        f"Differences to {reference}, paired by seed: mean [95 % interval by Student's t over the seeds]. "
        "* better, ! worse, else within noise.",
    ]
    if any(d.verdict == ONE_SEED for d in found):
        notes.append("With one seed nothing can be said of noise: give more (--seeds).")
    if style == "markdown":
        return "\n".join([*markdown_lines(table), "", *notes])
    return "\n".join([blocks(table, width), *wrapped(notes, width)])


def _numbers(d: Difference) -> list[Any]:
    return [value if math.isfinite(value) else "" for value in (d.mean, d.sd, d.low, d.high)]


def _cell(d: Difference) -> str:
    mark = {BETTER: " *", WORSE: " !"}.get(d.verdict, "")
    interval = f" [{d.low:+.3f}, {d.high:+.3f}]" if math.isfinite(d.low) else ""
    return f"{d.mean:+.4f}{interval}{mark}"
