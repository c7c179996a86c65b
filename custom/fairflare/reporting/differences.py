"""What one method does better or worse than another: differences of runs paired by seed, and by test image."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from fairflare.core import checks
from fairflare.core.fairness import summarize
from fairflare.reporting.layout import MISSING, blocks, csv_lines, markdown_lines, wrapped
from fairflare.reporting.table import by_site_of, direction_of, label_of, metrics_of

LEVEL = 0.95
LEAST = 20  # draws of the test images that say how far a difference scatters
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
        low, high: interval for the mean difference at :data:`LEVEL`, see :func:`paired`; NaN with one seed.
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
    images_sd: float = math.nan  # of the mean difference over draws of the test images; NaN: not known


def paired(
    label: str,
    measure: str,
    values: Mapping[int, float],
    *,
    higher_is_better: bool,
    drawn: npt.NDArray[np.floating] | None = None,
) -> Difference:
    r"""The mean of paired differences and an interval that holds for other seeds and other test images.

    Of the seeds :math:`t_{n-1} s / \sqrt n`, Student's half width. All seeds are tested on the same images, so how far
    the mean would move with others does not show in :math:`s`: it is the standard deviation :math:`s_B` of the mean
    difference over bootstrap draws of the images, the same draws in both runs. Both are independent, and their squares
    are added: :math:`\bar d \pm \sqrt{(t_{n-1} s / \sqrt n)^2 + (z\, s_B)^2}`.

    Args:
        label, measure: what it is of.
        values: difference by seed; at least one, all finite.
        higher_is_better: of the measure.
        drawn: (draws,) the mean difference over the seeds on each draw of the test images; ``None``: not known, and the
            interval is over seeds alone.

    Source:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 6 (standard errors).
    """
    checks.numbers(f"difference of {measure}", values, of="seed")
    checks.not_empty("the differences", values, of="seed")
    found = [values[seed] for seed in sorted(values)]
    mean = statistics.fmean(found)
    if len(found) == 1:
        return Difference(label, measure, dict(values), mean, math.nan, math.nan, math.nan, ONE_SEED)
    sd = statistics.stdev(found)
    half = float(stdtrit(len(found) - 1, 0.5 + LEVEL / 2)) * sd / math.sqrt(len(found))
    usable = np.empty(0) if drawn is None else drawn[np.isfinite(drawn)]
    images_sd = float(usable.std(ddof=1)) if len(usable) >= LEAST else math.nan
    if math.isfinite(images_sd):
        half = math.hypot(half, float(ndtri(0.5 + LEVEL / 2)) * images_sd)
    low, high = mean - half, mean + half
    verdict = NOISE
    if low > 0 or high < 0:
        verdict = BETTER if (mean > 0) == higher_is_better else WORSE
    return Difference(label, measure, dict(values), mean, sd, low, high, verdict, images_sd)


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
    drawn = _drawn(own, other, seeds, metric, higher)
    found = []
    for name in names:
        values = {seed: a[name] - b[name] for seed, (a, b) in measured.items() if name in a and name in b}
        values = {seed: value for seed, value in values.items() if math.isfinite(value)}
        if values:
            better = False if name == "std" else higher
            found.append(paired(label, name, values, higher_is_better=better, drawn=drawn.get(name)))
    return found


def _drawn(
    own: Mapping[int, Mapping[str, Any]],
    other: Mapping[int, Mapping[str, Any]],
    seeds: Sequence[int],
    metric: str,
    higher: bool,
) -> dict[str, npt.NDArray[np.floating]]:
    """``{measure: (draws,)}``: the mean difference over the seeds on each draw of the test images.

    Empty where a run has no draws of all its sites, another number of them, or the metric is not the one they are of.
    """
    of_own = [_on_draws(own[seed], metric, higher) for seed in seeds]
    of_other = [_on_draws(other[seed], metric, higher) for seed in seeds]
    every = [*of_own, *of_other]
    if len({len(values) for found in every for values in found.values()}) != 1:
        return {}
    names = set.intersection(*(set(found) for found in every))
    return {name: np.mean([a[name] - b[name] for a, b in zip(of_own, of_other, strict=True)], 0) for name in names}


def _on_draws(run: Mapping[str, Any], metric: str, higher: bool) -> dict[str, npt.NDArray[np.floating]]:
    """``{measure: (draws,)}`` of one run; empty: it has none of this metric for all of its sites."""
    resampled = run.get("resampled")
    sites = sorted(site for site, value in by_site_of(run, metric).items() if math.isfinite(value))
    if metric != run["info"]["primary_metric"] or not resampled or not set(sites) <= set(resampled):
        return {}
    if len({len(resampled[site]) for site in sites}) != 1:
        return {}
    values = np.array([[math.nan if v is None else v for v in resampled[site]] for site in sites])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a draw that a site has no value for
        worst = values.min(0) if higher else values.max(0)
        measures = {"average": values.mean(0), "std": values.std(0), "worst": worst}
    return {**dict(zip(sites, values, strict=True)), **measures}


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
        head = ["method", "reference", "measure", "seeds", "mean", "sd", "low", "high", "verdict", "images_sd"]
        rows = [
            [d.label, reference, d.measure, len(d.values), *_numbers(d), d.verdict, _number(d.images_sd)] for d in found
        ]
        return csv_lines([head, *rows])
    table = [["method", *(f"{measure}" for measure in MEASURES)]]
    for label in dict.fromkeys(d.label for d in found):
        of = {d.measure: d for d in found if d.label == label}
        table.append([label, *(_cell(of[m]) if m in of else MISSING for m in MEASURES)])
    notes = [
        f"Differences to {reference}, paired by seed: mean [95 % interval{interval_of(found)}]. "
        "* better, ! worse, else within noise.",
    ]
    if any(d.verdict == ONE_SEED for d in found):
        notes.append("With one seed nothing can be said of noise: give more (--seeds).")
    if style == "markdown":
        return "\n".join([*markdown_lines(table), "", *notes])
    return "\n".join([blocks(table, width), *wrapped(notes, width)])


def fell(found: Sequence[Difference], higher_is_better: bool) -> list[str]:
    """Says which sites lost where a row's spread is smaller, a line for each such row.

    Args:
        found: of :func:`differences`, measures and sites.
        higher_is_better: of the metric.
    """
    lines = []
    for label in dict.fromkeys(d.label for d in found):
        of = {d.measure: d for d in found if d.label == label}
        if "std" not in of or not of["std"].mean < 0:
            continue
        turn = 1 if higher_is_better else -1
        lost = sorted(
            (d for d in of.values() if d.measure not in MEASURES and turn * d.mean < 0), key=lambda d: turn * d.mean
        )
        told = [f"{d.measure} {d.mean:+.4f}{' beyond noise' if d.verdict == WORSE else ''}" for d in lost]
        who = f"{len(lost)} site{'' if len(lost) == 1 else 's'} lost ({', '.join(told)})" if lost else "no site lost"
        lines.append(f"{label}: smaller spread ({of['std'].mean:+.4f}); {who}.")
    return lines


def interval_of(found: Sequence[Difference]) -> str:
    """Which scatter the intervals hold."""
    with_images = [math.isfinite(d.images_sd) for d in found if math.isfinite(d.low)]
    if with_images and all(with_images):
        return " over the seeds (Student's t) and the test images (bootstrap)"
    some = ", of some rows also over the test images" if any(with_images) else ""
    return f" by Student's t over the seeds{some}"


def _numbers(d: Difference) -> list[Any]:
    return [_number(value) for value in (d.mean, d.sd, d.low, d.high)]


def _number(value: float) -> Any:
    return value if math.isfinite(value) else ""


def _cell(d: Difference) -> str:
    mark = {BETTER: " *", WORSE: " !"}.get(d.verdict, "")
    interval = f" [{d.low:+.3f}, {d.high:+.3f}]" if math.isfinite(d.low) else ""
    return f"{d.mean:+.4f}{interval}{mark}"
