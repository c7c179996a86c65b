"""Compute how methods differ from a reference: differences of runs paired by seed, site and test patient."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fairflare.base import checks
from fairflare.base.checks import first_of
from fairflare.core.statistics.intervals import FEW, LEVEL, holm
from fairflare.reporting.documents import RunResults
from fairflare.reporting.values import are_linked, collect_by_site
from fairflare_lab.compare.runs import VALUE, Array, Contrast, Runs, Units, draws_of
from fairflare_lab.statistics.seed_intervals import Estimate, aggregate_sites

#: Measures over a run's sites; higher is better for each except the standard deviation (reversed for a loss).
MEASURES = ("average", "std", "worst")
BETTER, WORSE, NOISE, ONE_SEED = "better", "worse", "within noise", "one seed"
NOT_KNOWN = "not known"  # verdict: nothing varies, or the effect of the choice of test patients is not known
UNSEEN = "cannot tell"  # verdict: even a difference as large as the metric would not have been seen
OTHER_SITES = "other sites"  # verdict: one of the two rows has a site that the other lacks


@dataclass(frozen=True)
class Difference:
    """Store the difference between a row and the reference in one measure, over seeds and sites that both have.

    Attributes:
        label, measure: label of the row; one of :data:`MEASURES` or a site's name.
        values: differences by seed, row minus reference.
        mean: mean of the differences.
        sd: sample standard deviation of the differences; NaN with one seed.
        low, high: interval for the mean difference at :data:`LEVEL`
            (:mod:`fairflare_lab.statistics.seed_intervals`); NaN with one seed, and if nothing varies.
        verdict: ``better`` or ``worse`` where ``p_holm`` is below 0.05, else ``within noise`` or ``cannot tell``;
            ``one seed``, ``not known`` (nothing varies, or only over the seeds, or a site has few cases) or ``other
            sites`` if no verdict can be given.
        images_sd: standard deviation of the mean difference due to the choice of test patients or images; NaN if not
            known.
        p: p-value that belongs to the interval; below 0.05 if the interval excludes 0; NaN if a site has few cases.
        p_holm: p-value corrected for all rows and measures (of a site: for all rows and sites); NaN if not tested, or
            nothing varies, as where two methods do the same.
        smallest: true difference that would have been seen with :data:`POWER`, corrected as ``p_holm``.
        higher_is_better: whether more of the measure is better.
        limit: size of a difference as large as the metric itself.
        sites: sites that the measure is over.
        lacking: ``{site: label of the row that has no value of the site}``.
        units: ``{site: (unit that was drawn, number of such units)}``.
        of: estimate from which interval and p-values are computed; ``None`` with one seed.
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
    sites: tuple[str, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, Units] = field(default_factory=dict)
    of: Estimate | None = field(default=None, repr=False)

    @property
    def sparse_sites(self) -> list[str]:
        """Return the sites with too few test cases (below :data:`FEW`) to tell how their choice moves a difference."""
        return [site for site, (_, count) in self.units.items() if count is not None and count < FEW]

    @property
    def tests_given_models(self) -> bool:
        """Return whether models were given, not trained, so that values vary only with the choice of test patients."""
        return self.of is not None and len(self.values) == 1


def compare_pairs(
    label: str, measure: str, found: Contrast, *, higher_is_better: bool, given: bool = False, **about: Any
) -> Difference:
    """Return the mean of paired differences, its interval and its p-value, not corrected for other tests.

    Args:
        label, measure: see :class:`Difference`.
        found: differences by seed; at least one, all finite.
        higher_is_better: whether more of the measure is better.
        given: whether the models were given, not trained; there is then one seed, and only the choice of test patients
            varies.
        about: ``limit``, ``sites``, ``lacking`` and ``units`` of :class:`Difference`.
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
    (low, high), p = map(float, of.ends), float(of.p)
    difference = Difference(
        label, measure, dict(values), mean, statistics.stdev(by_seed) if len(by_seed) > 1 else nan,
        low, high, NOISE,
        math.sqrt(found.shared), p, p, float(of.smallest()), of=of, **about,
    )  # fmt: skip
    if difference.sparse_sites:
        difference = replace(difference, p=nan, p_holm=nan, smallest=nan)
    return replace(difference, verdict=_verdict(difference))


def _verdict(d: Difference) -> str:
    return first_of({
        ONE_SEED: d.of is None,
        OTHER_SITES: bool(d.lacking),
        NOT_KNOWN: math.isnan(d.smallest) or math.isnan(d.images_sd),
        BETTER if (d.mean > 0) == d.higher_is_better else WORSE: d.p_holm < 1 - LEVEL,
        UNSEEN: d.smallest > d.limit,
        NOISE: True,
    })  # fmt: skip


def correct_p_values(found: Sequence[Difference]) -> list[Difference]:
    """Return differences with p-values corrected for all rows and measures together, and for all rows and sites."""
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
            p_holm = math.nan if math.isnan(smallest) else float(p)
            result[index] = replace(found[index], p_holm=p_holm, smallest=smallest)
    return [replace(d, verdict=_verdict(d)) for d in result]


def differences_of(
    rows: Mapping[str, Sequence[RunResults]], reference: str, metric: str, higher: bool
) -> list[Difference]:
    """Compare every other row with ``reference``: average, standard deviation and worst of the sites, and each site.

    Args:
        rows: complete runs by the label of the row.
        reference: label of the reference row.
        metric: name of a metric on the test splits.
        higher: whether more of the metric is better.

    Returns:
        The differences in the order of the rows, without rows that share no seed with the reference.

    Raises:
        ValueError: two runs of a row have the same seed, or a run has no seed.
    """
    by_seed = {label: _split_seeds(label, runs) for label, runs in rows.items()}
    found = []
    for label, own in by_seed.items():
        pairs = {seed: (own[seed], by_seed[reference][seed]) for seed in sorted({*own} & {*by_seed[reference]})}
        if label != reference and pairs:
            found += _compare_row(label, reference, pairs, metric, higher)
    return correct_p_values(found)


def _split_seeds(label: str, runs: Sequence[RunResults]) -> dict[int, RunResults]:
    found: dict[int, RunResults] = {}
    for run in runs:
        seed: Any = run.info.config.get("seed")
        checks.refuse({
            f"no seed is recorded of a run of {label!r}": seed is None,
            f"two runs of {label!r} have seed {seed}; leave one of them out": seed in found,
        })  # fmt: skip
        found[int(seed)] = run
    return found


def _compare_row(
    label: str, reference: str, pairs: Mapping[int, tuple[RunResults, RunResults]], metric: str, higher: bool
) -> list[Difference]:
    """Return the differences of one row to the reference, over the sites that have a value in both runs of a seed."""
    rows: list[dict[int, Any]] = [{}, {}]  # of the row, then of the reference
    lacking: dict[str, str] = {}
    for seed, pair in pairs.items():
        both = [collect_by_site(run, metric) for run in pair]
        have = [{site for site, value in of.items() if math.isfinite(value)} for of in both]
        lacking |= dict.fromkeys(sorted(have[0] - have[1]), reference)
        lacking |= dict.fromkeys(sorted(have[1] - have[0]), label)
        for row, run, values in zip(rows, pair, both, strict=True):
            row[seed] = {site: (values[site], draws_of(run, site, metric)) for site in have[0] & have[1]}
    runs = Runs.stack(rows)
    if not runs.sites:
        return []
    largest = float(np.nanmax(np.abs(runs.values[..., VALUE])))
    given = all(run.info.num_rounds == 0 for pair in pairs.values() for run in pair)
    found = []
    measures = MEASURES if are_linked(next(iter(pairs.values()))[0], metric) else MEASURES[:1]
    for name in (*measures, *runs.sites):
        total, half = name in MEASURES, 2 if name == "std" else 1
        over = runs if total else runs.select_site(name)

        def figure(values: Array, measure: str = name if total else MEASURES[0]) -> Array:
            own, other = aggregate_sites(values, higher, 2, np.isfinite(values[..., :1]))[measure]
            return np.asarray(own - other)

        found.append(compare_pairs(
            label, name, over.contrast(figure), higher_is_better=higher and name != "std", given=given,
            limit=largest / half, sites=tuple(over.sites), units=over.units, lacking=lacking if total else {},
        ))  # fmt: skip
    return found
