"""Get a run's figures by metric and site from its results document, for tables, comparisons and pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fairflare.base import checks
from fairflare.base.cases.sampling import MEAN_RECALL, SHARES
from fairflare.core.fairness import BEFORE_RECORDED, FairnessSummary, higher_is_better, summarize
from fairflare.core.statistics.footing import OWN, in_brackets, ranks, structure_of, where_counted
from fairflare.reporting.documents import SUPPRESSED, Metrics, Results, RoundRecord

GLOBAL = "global/"  # prefix of the global test's metrics in lists that have metrics of the sites too
MAX_COLUMNS = 20  # largest number of columns of metrics, whose names the sites choose

SPELT = {"dice": "Dice", "auc": "AUC", "iou": "IoU", "ece": "ECE", "hd95": "HD95", "nsd": "NSD", "pr": "PR"}


def label_of(results: Results) -> str:
    """Return the label of a run, which names its method and settings; the method's name if the run has no label."""
    return results.info.label or results.info.method or "unknown method"


def title_of(results: Results) -> str:
    """Return a run's title, which has its method's name and its label; the label alone in results without a title."""
    return results.info.title or label_of(results)


def in_words(metric: str) -> str:
    """Spell a metric's name in a sentence: ``es_dice`` is ``equity-scaled Dice``, ``auc_gap`` is ``gap in AUC``."""
    if metric.startswith("es_"):
        return f"equity-scaled {in_words(metric.removeprefix('es_'))}"
    if metric.endswith("_gap"):
        return f"gap in {in_words(metric.removesuffix('_gap'))}"
    return " ".join(SPELT.get(word, word) for word in metric.split("_"))


def sentence(text: str) -> str:
    """Return a text with a capital at its beginning, where a metric's name may stand."""
    return text[:1].upper() + text[1:]


def metrics_of(results: Results) -> list[str]:
    """Return the test metrics that the task shows in tables (default: all, at most 20), the primary metric first.

    The mean of a metric over each site's own structures is shown if the metric is.

    Raises:
        ValueError: the run has no test results.
    """
    if not (known := _known_metrics(results)):
        raise ValueError(f"{label_of(results)!r} has no test results")
    shown = [metric for metric in known if metric.removeprefix(OWN) in results.info.shown_metrics] or known
    return sorted(shown, key=lambda metric: metric != results.info.primary_metric)[:MAX_COLUMNS]


def extra_list_metrics(results: Results) -> list[str]:
    """Return the shown metrics of further test lists (``clean/``, ``common/``), which a run has without being asked."""
    return [name for name in metrics_of(results)[1:] if "/" in name and not name.startswith(OWN)]


def _known_metrics(results: Results) -> list[str]:
    """Return the names of all metrics that any site tested, with those whose values are withheld."""
    names = (*results.test.values(), *results.suppressed.values())
    return list(dict.fromkeys(name for of_site in names for name in of_site))


def known_metric(results: Results, metric: str) -> str:
    """Return a metric's name after a check that the run has the metric.

    Raises:
        ValueError: the run does not have the metric; the message suggests the nearest name.
    """
    known = [*sorted(_known_metrics(results)), *(GLOBAL + name for name in results.global_test.metrics)]
    for part in parts_of(metric, results.test):
        if part not in known:
            raise ValueError(
                f"{label_of(results)!r} has no metric {part!r}{checks.unknown(part, known, 'results.json has all')}"
            )
    return metric


def parts_of(metric: str, test: Metrics) -> list[str]:
    """Return the metrics whose mean a name denotes: [a, b] for ``a+b``; the name of a measured metric is not split."""
    return [metric] if any(metric in by_metric for by_metric in test.values()) else metric.split("+")


def direction_of(results: Results, metric: str) -> bool:
    """Return whether more of a metric is better, as the run's task declared it.

    Raises:
        ValueError: the results do not declare it, or the metric is the mean of metrics of both directions.
    """
    higher = declared_direction(results, metric)
    if higher is None:
        raise ValueError(
            f"the results of {label_of(results)!r} do not say whether more of {metric!r} is better; declare it in the "
            f"task's declared_metrics(), or for these results as 'higher_is_better': {{{metric!r}: true or false}} "
            "under 'info' of results.json"
        )
    return higher


def declared_direction(results: Results, metric: str) -> bool | None:
    """Return whether more of a metric is better, see :func:`direction_of`, or ``None`` if the results do not say."""
    known = results.info.higher_is_better or BEFORE_RECORDED
    declared = {part: higher_is_better(part, known) for part in parts_of(metric, results.test)}
    if {True, False} <= {*declared.values()}:
        higher = ", ".join(part for part in declared if declared[part])
        raise ValueError(f"{metric!r} cannot be a mean: of {higher} more is better, of the others less")
    return None if None in declared.values() else all(declared.values())


def by_site_of(
    results: Results, metric: str, test: Metrics | None = None, of_all: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return a metric as ``{site: value}``, NaN where missing: of the last model, or from ``test`` and ``of_all``.

    A metric ``a+b`` is the mean of both at each site, as the papers' "Average" of clean and corrupted images.
    ``global/a`` is the metric ``a`` of the global test, one value for all sites. A structure that none of a site's test
    images shows has no value there.
    """
    test = where_counted(results.test if test is None else test, results.footing.structures, results.footing.empty)
    every = {GLOBAL + name: v for name, v in (results.global_test.metrics if of_all is None else of_all).items()}
    parts = parts_of(metric, test)
    return {site: _mean({**every, **test.get(site, {})}, parts) for site in sorted({*results.info.sites, *test})}


def measured(results: Results, metric: str, *, last: bool = False) -> list[dict[str, float]]:
    """Return a metric as ``{site: value}``, for the run's final model or for each of its last models.

    Args:
        results: results of a run.
        metric: name of the metric; ``a+b`` is the mean of several.
        last: whether to return values of each model that ``last_rounds`` averages, the final model last.

    Raises:
        ValueError: the last models were not tested.
    """
    return [by_site_of(results, metric, *tested) for tested in _tests(results, last)]


def global_values(results: Results, metric: str, *, last: bool = False) -> list[float]:
    """Return a metric of the global test for each model for which :func:`measured` has values; NaN where missing."""
    return [_mean(of_all, parts_of(metric, {"": of_all})) for _, of_all in _tests(results, last)]


def global_metrics(results: Results, metric: str) -> list[str]:
    """Return the global test's metrics for tables: the given metric, then the metrics that the task shows."""
    known = results.global_test.metrics
    first = [metric] if all(part in known for part in parts_of(metric, {"": known})) else []
    return [*first, *(name for name in results.info.shown_metrics if name in known and name != metric)]


def suppressed_of(results: Results, metric: str) -> set[str]:
    """Return the sites that withhold their value of a test metric, because it rests on too few cases."""
    parts = {*parts_of(metric, results.test)}
    return {site for site, names in results.suppressed.items() if parts & {*names}}


def withheld_reason(site: str, privacy: Collection[str], said: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the reason why a site withholds a value: differential privacy, or too few cases.

    Args:
        site: name of the site.
        privacy, said: the run's ``info.privacy`` and ``info.said``, by site.
    """
    least = said.get(site, {}).get("min_cases")
    few = f"fewer than {least} cases" if least else "fewer cases than its min_cases"
    return f"{SUPPRESSED}: {'differential privacy' if site in privacy else few}"


def missing_reason(results: Results, metric: str, site: str, test: Metrics | None = None) -> str:
    """Return the reason why a site has no value of a metric in the run's test, or in that of another model, ``test``.

    All tables, notes and pages take their reason from here.
    """
    info, structures = results.info, results.footing.structures
    given = (results.test if test is None else test).get(site, {})
    names = {name for by_site in (structures, results.footing.empty) for own in by_site.values() for name in own}
    structure = structure_of(metric, names)
    why = next((left.reason for left in results.left_out if left.site == site), "")
    return checks.first_of({
        withheld_reason(site, info.privacy, info.said): site in suppressed_of(results, metric),
        "it never connected": info.connected is not None and site not in info.connected,
        f"left out: {why}": why and metric not in given,
        "its figures by structure are not known": OWN + metric in given and structures.get(site),
        "no image shows what it annotates": OWN + metric in given,
        "not annotated there, or in no image": structure and structure not in structures.get(site, names),
        "undefined there": metric in given,
        "no site of this run": site not in (*info.sites, *results.test),
        "no value": True,
    })  # fmt: skip


def guess_of(results: Results, metric: str) -> float:
    """Return what a classifier that knows nothing gets in a metric, on average over the sites; NaN if not known.

    Of the mean recall it is 1 / classes; of an area under the ROC curve 0.5; of the accuracy the share of each site's
    commonest class, which a model that always names it gets.
    """
    supports = [of.class_support for of in results.inequality.sites.values() if of.class_support]
    classes = {name for own in supports for name in own}
    shares = [max(own.values()) / sum(own.values()) for own in supports] or [math.nan]
    known = {MEAN_RECALL: 1 / len(classes) if classes else math.nan, **dict.fromkeys(SHARES, statistics.fmean(shares))}
    return 0.5 if metric.startswith("auc") else known.get(metric, math.nan)


def summary_of(results: Results, metric: str) -> FairnessSummary:
    """Summarize the last model's test metric over the sites of the run."""
    by_site, higher, home = by_site_of(results, metric), direction_of(results, metric), suppressed_of(results, metric)
    return summarize(by_site, higher_is_better=higher, suppressed=home, linked=linked(results, metric))


def linked(results: Results, metric: str) -> bool:
    """Return whether the sites' values of a metric can be compared with each other, see :func:`ranks`."""
    return all(ranks(results.test, part, results.footing.parts) for part in parts_of(metric, results.test))


def rests_on(results: Results, metric: str) -> str:
    """Return text for table heads on which structures the sites' figures are computed from; empty for plain figures."""
    return in_brackets(results.footing.how, results.footing.shared) if compared(results, metric) else ""


def compared(results: Results, metric: str) -> bool:
    """Return whether a metric's values were made comparable between sites that annotate different structures."""
    return any(OWN + part in of for of in results.test.values() for part in parts_of(metric, results.test))


def _tests(results: Results, last: bool) -> list[tuple[Metrics, Mapping[str, float]]]:
    """Return the metrics by site and on the global test, for the final model or for each of the last models."""
    final = (results.test, results.global_test.metrics)
    if not last:
        return [final]
    if results.last_rounds is None:
        raise ValueError(f"{label_of(results)!r} has no test of its last models; run it with test_last=5")
    by_round = {record.current_round: record for record in results.rounds}
    before = [by_round.get(number, RoundRecord(number)) for number in results.last_rounds.rounds[:-1]]
    return [*((record.test, record.global_test or {}) for record in before), final]


def _mean(values: Mapping[str, float | None], parts: Sequence[str]) -> float:
    """Return the mean of some metrics; NaN if one of them has no value."""
    found = [math.nan if (value := values.get(part)) is None else float(value) for part in parts]
    return sum(found) / len(found)
