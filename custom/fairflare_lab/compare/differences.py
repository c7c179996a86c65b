"""What one method does better or worse than another: differences of runs paired by seed, site and test patient."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base import checks
from fairflare.base.cases.resampling import IMAGES
from fairflare.core.statistics.intervals import (
    LEVEL,
    Estimate,
    degrees,
    estimate,
    holm,
    of_sites,
    shared_variance,
    widened,
)
from fairflare.reporting.documents import Results
from fairflare.reporting.layout import PLACES, number
from fairflare.reporting.values import direction_of, label_of, measured, metrics_of

LEAST = 20  # draws of the test patients that say how far a difference scatters
#: Of a run's sites; each is better when higher but the standard deviation (and all are turned for a loss).
MEASURES = ("average", "std", "worst")
BETTER, WORSE, NOISE, ONE_SEED = "better", "worse", "within noise", "one seed"
NOT_KNOWN = "not known"  # nothing scatters, or nothing says how far the test patients move it
UNSEEN = "cannot tell"  # even a difference as large as the metric itself would not have been seen
OTHER_SITES = "other sites"  # one of both has a site that the other lacks

Units = tuple[str, int | None]  # what a site drew, and how many of them it has
Array = npt.NDArray[np.floating]


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


@dataclass(frozen=True)
class Scatter:
    """How far the test patients move one measure.

    Attributes:
        drawn: (seeds, draws) differences on draws of them; none where the next is known.
        df: degrees of freedom.
        shared: :func:`fairflare.core.statistics.intervals.shared_variance`, where there are no draws.
    """

    drawn: Array = field(default_factory=lambda: np.zeros((1, 0)))
    df: float = math.inf
    shared: float = math.nan


def paired(
    label: str,
    measure: str,
    values: Mapping[int, float],
    *,
    higher_is_better: bool,
    scatter: Scatter | None = None,
    **about: Any,
) -> Difference:
    """The mean of paired differences, its interval and its p-value, as if it were the only one that is tested.

    Args:
        label, measure: what it is of.
        values: difference by seed; at least one, all finite.
        higher_is_better: of the measure.
        scatter: on the draws of the test patients; ``None``: not known, and the interval is over seeds alone.
        about: ``limit``, ``bound``, ``sites``, ``lacking`` and ``units`` of :class:`Difference`.
    """
    checks.numbers(f"difference of {measure}", values, of="seed")
    checks.not_empty("the differences", values, of="seed")
    found = [values[seed] for seed in sorted(values)]
    mean, nan = statistics.fmean(found), math.nan
    about["higher_is_better"] = higher_is_better
    if len(found) == 1:
        return Difference(label, measure, dict(values), mean, nan, nan, nan, ONE_SEED, **about)
    shared, df = nan, math.inf
    if scatter is not None:
        usable = scatter.drawn[:, np.isfinite(scatter.drawn).all(0)]
        known = usable.shape[1] >= LEAST
        shared, df = float(shared_variance(usable)) if known else scatter.shared, scatter.df
    about["units"] = about.get("units", {}) if math.isfinite(shared) else {}
    of = estimate(found, shared, df)
    half, p = float(of.half), float(of.p)
    difference = Difference(
        label, measure, dict(values), mean, statistics.stdev(found), mean - half, mean + half, NOISE,
        math.sqrt(shared), p, p, float(of.smallest()), of=of, **about,
    )  # fmt: skip
    return replace(difference, verdict=_verdict(difference))


def _verdict(d: Difference) -> str:
    if len(d.values) == 1:
        return ONE_SEED
    if d.lacking:
        return OTHER_SITES
    if math.isnan(d.p) or math.isnan(d.images_sd):
        return NOT_KNOWN
    if d.p_holm < 1 - LEVEL:
        return BETTER if (d.mean > 0) == d.higher_is_better else WORSE
    return UNSEEN if d.smallest > d.limit else NOISE


def corrected(found: Sequence[Difference]) -> list[Difference]:
    """With p-values for as many tests as there are: all rows and measures together, and all rows and sites."""
    families: dict[bool, list[int]] = {}
    for index, d in enumerate(found):
        if not d.lacking and not math.isnan(d.p) and not math.isnan(d.images_sd):
            families.setdefault(d.measure in MEASURES, []).append(index)
    result = [replace(d, p_holm=math.nan) for d in found]
    for family in families.values():
        for index, p in zip(family, holm([found[k].p for k in family]), strict=True):
            of = found[index].of
            smallest = math.nan if of is None else float(of.smallest(len(family)))
            result[index] = replace(found[index], p_holm=float(p), smallest=smallest)
    return [replace(d, verdict=_verdict(d)) for d in result]


def differences(
    runs: Sequence[Results], reference: str, metric: str | None = None, *, last: bool = False
) -> list[Difference]:
    """Every other label against ``reference``: average, standard deviation and worst of the sites, and each site.

    Args:
        runs: documents of :func:`fairflare.reporting.results.read_results`; those that did not complete are left out.
        reference: a label.
        metric: of the test splits; the primary one of the first complete run when ``None``.
        last: as :func:`fairflare.reporting.table.measured`.

    Returns:
        In the order of the runs; nothing for labels that share no seed with the reference.

    Raises:
        ValueError: no complete run of the reference, or two of one label and seed.
    """
    by_label: dict[str, list[Results]] = {}
    for run in runs:
        if run["status"] == "completed":
            by_label.setdefault(label_of(run), []).append(run)
    if reference not in by_label:
        raise ValueError(f"no complete run of {reference!r}; there are {', '.join(by_label) or 'none'}")
    return differences_of(by_label, reference, metric, last=last)


def differences_of(
    rows: Mapping[str, Sequence[Results]], reference: str, metric: str | None = None, *, last: bool = False
) -> list[Difference]:
    """As :func:`differences`, of complete runs that are in rows already.

    Raises:
        ValueError: two runs of one row and seed, or one without a seed.
    """
    by_seed = {label: _by_seed(label, runs) for label, runs in rows.items()}
    first = next(iter(by_seed.values()))
    run = next(iter(first.values()))
    chosen = metric or metrics_of(run)[0]
    higher = direction_of(run, chosen)
    found = []
    for label, own in by_seed.items():
        pairs = {seed: (own[seed], by_seed[reference][seed]) for seed in sorted({*own} & {*by_seed[reference]})}
        if label != reference and pairs:
            found += _against(label, reference, pairs, chosen, higher, last)
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
    """One row; measures are over the sites that both runs of a seed have a value of."""
    values: dict[int, tuple[list[dict[str, float]], ...]] = {}
    lacking: dict[str, str] = {}
    for seed, pair in pairs.items():
        both = [measured(run, metric, last=last) for run in pair]
        have = [{site for site in of[0] if all(math.isfinite(v.get(site, math.nan)) for v in of)} for of in both]
        lacking |= dict.fromkeys(sorted(have[0] - have[1]), reference)
        lacking |= dict.fromkeys(sorted(have[1] - have[0]), label)
        common = sorted(have[0] & have[1])
        if common:
            values[seed] = tuple([{site: v[site] for site in common} for v in of] for of in both)
    if not values:
        return []
    sites = sorted({site for own, _ in values.values() for site in own[0]})
    largest = max(abs(value) for pair in values.values() for of in pair for v in of for value in v.values())
    first = next(iter(pairs.values()))[0]
    ends = first["info"].get("metric_range") if metric == first.info.primary_metric else None
    bound = ends[1] - ends[0] if ends and None not in ends else math.inf
    units: dict[str, Units] = {}
    scatters: dict[str, Scatter] = {}
    if not last:
        units, scatters = _scatters({seed: pairs[seed] for seed in values}, values, metric, higher)
    measures: dict[int, list[list[dict[str, Any]]]] = {
        seed: [[{**v, **of_sites(list(v.values()), higher)} for v in of] for of in pair]
        for seed, pair in values.items()
    }
    found = []
    for name in (*MEASURES, *sites):
        by_seed = {
            seed: statistics.fmean(v[name] for v in own) - statistics.fmean(v[name] for v in other)
            for seed, (own, other) in measures.items()
            if name in own[0]
        }
        total = name in MEASURES
        about = {
            "limit": largest / 2 if name == "std" else largest,
            "bound": bound / 2 if name == "std" else bound,
            "sites": tuple(sites) if total else (name,),
            "lacking": lacking if total else {},
            "units": units if total else {name: units[name]} if name in units else {},
        }
        better = False if name == "std" else higher
        found.append(paired(label, name, by_seed, higher_is_better=better, scatter=scatters.get(name), **about))
    return found


def _scatters(
    pairs: Mapping[int, tuple[Results, Results]], values: Mapping[int, Any], metric: str, higher: bool
) -> tuple[dict[str, Units], dict[str, Scatter]]:
    """What the sites drew, and the differences on these draws: of the sites where all runs have the same ones.

    The measures over the sites are there only where all sites are.
    """
    every = {site for own, _ in values.values() for site in own[0]}
    units: dict[str, Units] = {}
    drawn: dict[str, dict[int, Array]] = {}  # by site and seed: (row and reference, draws)
    found: dict[str, Scatter] = {}
    for site in sorted(every):
        seeds = [seed for seed in pairs if site in values[seed][0][0]]
        told = [of for seed in seeds for run in pairs[seed] if (of := draws_of(run, site, metric)) is not None]
        if len(told) < 2 * len(seeds) or len({(unit, len(of)) for unit, of in told}) != 1:
            continue  # other draws, or none: nothing is known
        unit, _ = told[0]
        if unit[1] == 1:
            continue  # of one patient nothing can be said of others
        units[site], count = unit, math.inf if unit[1] is None else unit[1]
        at = [[[of[0][site]] for of in values[seed]] for seed in seeds]
        x = np.array([of for _, of in told], float).reshape(len(seeds), 2, 1, -1)
        wide = widened(at, x, [count])[:, :, 0]
        drawn[site] = dict(zip(seeds, wide, strict=True))
        found[site] = Scatter(wide[:, 0] - wide[:, 1], float(degrees([1.0], [count], wide.shape[-1])))
    if every and {*drawn} == every and len({of.drawn.shape[1] for of in found.values()}) == 1:
        found |= _over_sites(values, drawn, [math.inf if n is None else n for _, n in units.values()], higher)
    return units, found


def draws_of(run: Results, site: str, metric: str) -> tuple[Units, tuple[float, ...]] | None:
    """A site's values on its draws, and what they are of; ``None``: there are none of this metric."""
    values = (run.get("resampled") or {}).get(site)
    if not values or metric != run["info"]["primary_metric"]:
        return None
    unit = (run.get("resampled_units") or {}).get(site) or {}
    return (unit.get("unit") or IMAGES, unit.get("count")), tuple(math.nan if v is None else v for v in values)


def _over_sites(
    values: Mapping[int, Any], drawn: Mapping[str, Mapping[int, Array]], counts: Sequence[float], higher: bool
) -> dict[str, Scatter]:
    """Average, standard deviation and worst of the sites on each draw."""
    names = {seed: list(pair[0][0]) for seed, pair in values.items()}
    on_draws = {seed: np.stack([drawn[site][seed] for site in of], 1) for seed, of in names.items()}
    measured = {
        seed: np.array([[of[0][site] for site in names[seed]] for of in pair])[..., None]
        for seed, pair in values.items()
    }

    def differ(of_seeds: Iterable[Array]) -> dict[str, Array]:
        """(seeds, draws) of each measure, of (row and reference, sites, draws) of each seed."""
        both = [(of_sites(own, higher, 0), of_sites(other, higher, 0)) for own, other in of_seeds]
        return {name: np.stack([a[name] - b[name] for a, b in both]) for name in MEASURES}

    parts: dict[str, list[float]] = {name: [] for name in MEASURES}
    for site in drawn:  # how much of the variance is of each: its draws, the others as they were measured
        held = [np.where((np.array(names[seed]) == site)[:, None], on_draws[seed], measured[seed]) for seed in names]
        for name, one in differ(held).items():
            parts[name].append(float(np.nanvar(one.mean(0))))
    found = differ(on_draws.values())
    return {name: Scatter(found[name], float(degrees(parts[name], counts, found[name].shape[1]))) for name in MEASURES}


def fell(found: Sequence[Difference], higher_is_better: bool) -> list[str]:
    """Says which sites lost where a row's spread is smaller, a line for each such row.

    Args:
        found: of :func:`differences`, measures and sites.
        higher_is_better: of the metric.
    """
    lines = []
    for label in dict.fromkeys(d.label for d in found):
        of = {d.measure: d for d in found if d.label == label}
        if "std" not in of or not round(of["std"].mean, PLACES) < 0:  # as it is shown
            continue
        turn = 1 if higher_is_better else -1
        lost = sorted(
            (d for d in of.values() if d.measure not in MEASURES and turn * d.mean < 0), key=lambda d: turn * d.mean
        )
        told = [f"{d.measure} {number(d.mean, sign='+')}{' beyond noise' if d.verdict == WORSE else ''}" for d in lost]
        who = f"{len(lost)} site{'' if len(lost) == 1 else 's'} lost ({', '.join(told)})" if lost else "no site lost"
        lines.append(f"{label}: smaller spread ({number(of['std'].mean, sign='+')}, {of['std'].verdict}); {who}.")
    return lines
