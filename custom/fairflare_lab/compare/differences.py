"""What one method does better or worse than another: differences of runs paired by seed, site and test patient."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fairflare.base import checks
from fairflare.core.statistics.intervals import LEVEL
from fairflare.reporting.documents import Results
from fairflare.reporting.layout import PLACES, number
from fairflare.reporting.values import measured
from fairflare_lab.compare.runs import VALUE, Array, Contrast, Runs, Units, draws_of
from fairflare_lab.statistics.seed_intervals import Estimate, holm, of_sites

#: Measures over a run's sites; higher is better for each except the standard deviation (reversed for a loss).
MEASURES = ("average", "std", "worst")
BETTER, WORSE, NOISE, ONE_SEED = "better", "worse", "within noise", "one seed"
NOT_KNOWN = "not known"  # nothing scatters, or nothing says how far the test patients move it
UNSEEN = "cannot tell"  # even a difference as large as the metric itself would not have been seen
OTHER_SITES = "other sites"  # one of both has a site that the other lacks


@dataclass(frozen=True)
class Difference:
    """Of one measure, a row against the reference, over the seeds that both have and the sites that both have.

    Attributes:
        label, measure: of what; a measure is one of :data:`MEASURES` or a site's name.
        values: by seed, row minus reference.
        mean: of them.
        sd: sample standard deviation; NaN with one seed.
        low, high: interval for the mean difference at :data:`LEVEL`, see :mod:`fairflare.core.statistics.intervals`;
            NaN with one seed, and where nothing scatters.
        verdict: ``better`` or ``worse`` where ``p_holm`` is below 0.05, else ``within noise`` or ``cannot tell``;
            ``one seed``, ``not known`` (nothing scatters, or only the seeds) and ``other sites`` where nothing is said.
        images_sd: standard deviation of the mean difference by the test patients or images; NaN: not known.
        p: that belongs to the interval: below 0.05 where it leaves out 0.
        p_holm: corrected for all rows and measures (of a site: for all rows and sites); NaN: not tested.
        smallest: true difference that would have been seen with :data:`POWER`, corrected as ``p_holm``.
        higher_is_better: of the measure.
        limit: a difference as large as the metric itself.
        bound: the largest that the metric's range allows; infinite: it has none.
        sites: that the measure is over.
        lacking: ``{site: label of who has no value of it}``.
        units: ``{site: (what was drawn, how many there are)}``.
        of: all the others are made of; ``None`` with one seed.
    """

    label: str
    measure: str
    values: Mapping[int, float]
    mean: float
    sd: float
    low: float
    high: float
    verdict: str
    images_sd: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan
    smallest: float = math.nan
    higher_is_better: bool = True
    limit: float = math.inf
    bound: float = math.inf
    sites: tuple[str, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, Units] = field(default_factory=dict)
    of: Estimate | None = field(default=None, repr=False)

    @property
    def of_given(self) -> bool:
        """Whether it is of given models, of which only the choice of the test patients scatters."""
        return self.of is not None and len(self.values) == 1


def paired(
    label: str, measure: str, found: Contrast, *, higher_is_better: bool, given: bool = False, **about: Any
) -> Difference:
    """Return the mean of paired differences, its interval and its p-value, as if no other were tested.

    Args:
        label, measure: what it is of.
        found: differences by seed; at least one, all finite.
        higher_is_better: of the measure.
        given: the models were given, not trained: they have one seed, and scatter by the test patients alone.
        about: ``limit``, ``bound``, ``sites``, ``lacking`` and ``units`` of :class:`Difference`.
    """
    values = checks.not_empty("the differences", found.values, of="seed")
    checks.numbers(f"difference of {measure}", values, of="seed")
    by_seed = [values[seed] for seed in sorted(values)]
    mean, nan = statistics.fmean(by_seed), math.nan
    about["higher_is_better"] = higher_is_better
    if len(by_seed) == 1 and not (given and math.isfinite(found.shared)):
        return Difference(label, measure, dict(values), mean, nan, nan, nan, ONE_SEED, **about)
    about["units"] = about.get("units", {}) if math.isfinite(found.shared) else {}
    of = found.estimate
    half, p = float(of.half), float(of.p)
    difference = Difference(
        label, measure, dict(values), mean, statistics.stdev(by_seed) if len(by_seed) > 1 else nan,
        mean - half, mean + half, NOISE,
        math.sqrt(found.shared), p, p, float(of.smallest()), of=of, **about,
    )  # fmt: skip
    return replace(difference, verdict=_verdict(difference))


def _verdict(d: Difference) -> str:
    told = {
        ONE_SEED: d.of is None,
        OTHER_SITES: bool(d.lacking),
        NOT_KNOWN: math.isnan(d.p) or math.isnan(d.images_sd),
        BETTER if (d.mean > 0) == d.higher_is_better else WORSE: d.p_holm < 1 - LEVEL,
        UNSEEN: d.smallest > d.limit,
    }
    return next((verdict for verdict, holds in told.items() if holds), NOISE)


def corrected(found: Sequence[Difference]) -> list[Difference]:
    """Correct p-values for the number of tests: all rows and measures together, and all rows and sites."""
    result = [replace(d, p_holm=math.nan) for d in found]
    for totals in (True, False):
        family = [
            index
            for index, d in enumerate(found)
            if (d.measure in MEASURES) == totals and not (d.lacking or math.isnan(d.p) or math.isnan(d.images_sd))
        ]
        for index, p in zip(family, holm([found[k].p for k in family]) if family else [], strict=True):
            of = found[index].of
            smallest = math.nan if of is None else float(of.smallest(len(family)))
            result[index] = replace(found[index], p_holm=float(p), smallest=smallest)
    return [replace(d, verdict=_verdict(d)) for d in result]


def differences_of(
    rows: Mapping[str, Sequence[Results]], reference: str, metric: str, higher: bool, *, last: bool = False
) -> list[Difference]:
    """Compare every other row with ``reference``: average, standard deviation and worst of the sites, and each site.

    Args:
        rows: complete runs by label.
        reference: a label.
        metric: of the test splits.
        higher: whether more of the metric is better.
        last: as :func:`fairflare.reporting.values.measured`.

    Returns:
        In the order of the rows; nothing of those that share no seed with the reference.

    Raises:
        ValueError: two runs of one row and seed, or one without a seed.
    """
    by_seed = {label: _by_seed(label, runs) for label, runs in rows.items()}
    found = []
    for label, own in by_seed.items():
        pairs = {seed: (own[seed], by_seed[reference][seed]) for seed in sorted({*own} & {*by_seed[reference]})}
        if label != reference and pairs:
            found += _against(label, reference, pairs, metric, higher, last)
    return corrected(found)


def _by_seed(label: str, runs: Sequence[Results]) -> dict[int, Results]:
    found: dict[int, Results] = {}
    for run in runs:
        seed = run["info"]["config"].get("seed")
        if seed is None:
            raise ValueError(f"no seed is recorded of a run of {label!r}")
        if seed in found:
            raise ValueError(f"two runs of {label!r} have seed {seed}; compare them one at a time")
        found[int(seed)] = run
    return found


def _against(
    label: str, reference: str, pairs: Mapping[int, tuple[Results, Results]], metric: str, higher: bool, last: bool
) -> list[Difference]:
    """Compare one row; measures are over the sites that both runs of a seed have a value of."""
    rows: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)  # each model of the row, then of the reference
    lacking: dict[str, str] = {}
    for seed, pair in pairs.items():
        both = [measured(run, metric, last=last) for run in pair]
        have = [{site for site in of[0] if all(math.isfinite(v.get(site, math.nan)) for v in of)} for of in both]
        lacking |= dict.fromkeys(sorted(have[0] - have[1]), reference)
        lacking |= dict.fromkeys(sorted(have[1] - have[0]), label)
        for side, run in enumerate(pair):
            drawn = {site: None if last else draws_of(run, site, metric) for site in have[0] & have[1]}
            for rank, values in enumerate(both[side]):
                rows[side, rank][seed] = {site: (values[site], draws) for site, draws in drawn.items()}
    runs = Runs.of([rows[key] for key in sorted(rows)])
    if not runs.sites:
        return []
    models = sum(side == 0 for side, _ in rows)
    largest = float(np.nanmax(np.abs(runs.values[..., VALUE])))
    first = next(iter(pairs.values()))[0]
    given = all(run.info.get("num_rounds") == 0 for pair in pairs.values() for run in pair)
    ends = first["info"].get("metric_range") if metric == first.info.primary_metric else None
    bound = ends[1] - ends[0] if ends and None not in ends else math.inf
    found = []
    for name in (*MEASURES, *runs.sites):
        total, half = name in MEASURES, 2 if name == "std" else 1
        over = runs if total else runs.at(name)

        def figure(values: Array, measure: str = name if total else MEASURES[0]) -> Array:
            each = of_sites(values, higher, 2, np.isfinite(values[..., :1]))[measure]
            tested = np.isfinite(each[:, :, :1])  # runs may have different numbers of last models
            own, other = each[:models].mean(0, where=tested[:models]), each[models:].mean(0, where=tested[models:])
            return np.asarray(own - other)

        contrast = over.contrast(figure)
        about = {
            "limit": largest / half, "bound": bound / half, "sites": tuple(over.sites),
            "lacking": lacking if total else {}, "units": over.units,
        }  # fmt: skip
        found.append(paired(label, name, contrast, higher_is_better=higher and name != "std", given=given, **about))
    return found


def fell(found: Sequence[Difference], higher_is_better: bool) -> list[str]:
    """Say which sites lost where a row's spread is smaller, a line for each such row.

    Args:
        found: of :func:`differences_of`, measures and sites.
        higher_is_better: of the metric.
    """
    lines = []
    turn = 1 if higher_is_better else -1
    for spread in (d for d in found if d.measure == "std" and round(d.mean, PLACES) < 0):  # as it is shown
        sites = (d for d in found if d.label == spread.label and d.measure not in MEASURES and turn * d.mean < 0)
        told = [
            f"{d.measure} {number(d.mean, sign='+')}{' beyond noise' if d.verdict == WORSE else ''}"
            for d in sorted(sites, key=lambda d: turn * d.mean)
        ]
        who = f"{len(told)} site{'' if len(told) == 1 else 's'} lost ({', '.join(told)})" if told else "no site lost"
        lines.append(f"{spread.label}: smaller spread ({number(spread.mean, sign='+')}, {spread.verdict}); {who}.")
    return lines
