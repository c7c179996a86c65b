"""Get a run's figures by metric and site from its results document, for tables, comparisons and pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fairflare.base import checks
from fairflare.base.cases.sampling import MEAN_RECALL, SHARES
from fairflare.base.checks import first_of
from fairflare.core.cells import GLOBAL, LAST, NOT_COUNTED, OF_ALL, SUPPRESSED, UNDEFINED, Cell
from fairflare.core.fairness import BEFORE_RECORDED, FairnessSummary, higher_is_better, summarize
from fairflare.core.statistics.footing import OWN, name_structures, structure_of
from fairflare.reporting.documents import Metrics, RunResults

NO_VALUE = "no value"
MAX_COLUMNS = 20  # largest number of columns of metrics, whose names the sites choose

SPELT = {"dice": "Dice", "auc": "AUC", "iou": "IoU", "ece": "ECE", "hd95": "HD95", "nsd": "NSD", "pr": "PR"}


def label_of(results: RunResults) -> str:
    """Return the label of a run, which names its method and settings; the method's name if the run has no label."""
    return results.info.label or results.info.method or "unknown method"


def title_of(results: RunResults) -> str:
    """Return a run's title, which has its method's name and its label; the label alone in results without a title."""
    return results.info.title or label_of(results)


def spell_metric(metric: str) -> str:
    """Spell a metric's name in a sentence: ``es_dice`` is ``equity-scaled Dice``, ``auc_gap`` is ``gap in AUC``."""
    if metric.startswith("es_"):
        return f"equity-scaled {spell_metric(metric.removeprefix('es_'))}"
    if metric.endswith("_gap"):
        return f"gap in {spell_metric(metric.removesuffix('_gap'))}"
    return " ".join(SPELT.get(word, word) for word in metric.split("_"))


def sentence(text: str) -> str:
    """Return a text with a capital at its beginning, where a metric's name may stand."""
    return text[:1].upper() + text[1:]


def cells_of(
    model: str,
    test: Metrics,
    withheld: Mapping[str, Collection[str]],
    reasons: Mapping[str, str],
    structures: Mapping[str, Collection[str]],
    empty: Mapping[str, Collection[str]],
    parts: Collection[str] = (),
    about: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType({}),
) -> list[Cell]:
    """Return a model's test metrics as cells: of each site that answered, each metric that any of them has.

    Args:
        model: name of the model in the cells.
        test: metrics of each site that answered; NaN: measured and not finite.
        withheld: names of the metrics that each site withholds.
        reasons: reason why each site withholds metrics.
        structures, empty: structures that each site annotates and has images of, and those that none of its images
            shows (:class:`fairflare.core.statistics.footing.Footing`).
        parts: further names of classes and structures.
        about: interval and number of cases, by metric and site.
    """
    annotated = {name for names_of_site in (*structures.values(), *empty.values()) for name in names_of_site}
    names = dict.fromkeys(name for values in (*test.values(), *withheld.values()) for name in values)
    part_of = {name: structure_of(name, {*annotated, *parts}) for name in names}
    cells = []
    for site in dict.fromkeys((*test, *withheld)):
        site_values = test.get(site, {})
        for name in dict.fromkeys((*site_values, *names)):
            part, value, mean_of_own = part_of[name], site_values.get(name), OWN + name in site_values
            known = value is not None and math.isfinite(value)
            reason = first_of({
                reasons.get(site, SUPPRESSED): name in withheld.get(site, ()),
                NOT_COUNTED: part in annotated and part not in structures.get(site, annotated),
                "its figures by structure are not known": not known and mean_of_own and structures.get(site),
                "no image shows what it annotates": not known and mean_of_own,
                UNDEFINED: not known and name in site_values,
                NO_VALUE: not known,
            })  # fmt: skip
            cells.append(Cell(
                name, site, model, part=part, value=value if known else None, reason=reason,
                **about.get(name, {}).get(site, {}),
            ))  # fmt: skip
    return cells


def site_columns(results: RunResults, model: str = LAST) -> dict[str, dict[str, Cell]]:
    """Return the metrics of the sites' test splits, ``{metric: {site: cell}}``, those that sites withhold too."""
    return {name: column for name, column in results.columns.get(model, {}).items() if "" not in column}


def list_answering_sites(results: RunResults, model: str = LAST) -> list[str]:
    """Return the sites that answered the test of a model."""
    return list(dict.fromkeys(site for column in site_columns(results, model).values() for site in column))


def sites_of(results: RunResults) -> list[str]:
    """Return the sites of a run, and those that answered its test, sorted."""
    return sorted({*results.info.sites, *list_answering_sites(results)})


def metrics_of(results: RunResults) -> list[str]:
    """Return the test metrics that the task shows in tables (default: all, at most 20), the primary metric first.

    The mean of a metric over each site's own structures is shown if the metric is.

    Raises:
        ValueError: the run has no test results.
    """
    if not (known := list(site_columns(results))):
        raise ValueError(f"{label_of(results)!r} has no test results")
    shown = [metric for metric in known if metric.removeprefix(OWN) in results.info.shown_metrics] or known
    return sorted(shown, key=lambda metric: metric != results.info.primary_metric)[:MAX_COLUMNS]


def extra_list_metrics(results: RunResults) -> list[str]:
    """Return the shown metrics of further test lists (``clean/``, ``common/``), which a run has without being asked."""
    return [name for name in metrics_of(results)[1:] if "/" in name and not name.startswith(OWN)]


def check_metric(results: RunResults, metric: str) -> str:
    """Return a metric's name after a check that the run has the metric.

    Raises:
        ValueError: the run does not have the metric; the message suggests the nearest name.
    """
    known = sorted(results.columns.get(LAST, ()), key=lambda name: (name.startswith(OF_ALL), name))
    for part in parts_of(results, metric):
        if part not in known:
            raise ValueError(
                f"{label_of(results)!r} has no metric {part!r}{checks.unknown(part, known, 'results.json has all')}"
            )
    return metric


def parts_of(results: RunResults, metric: str) -> list[str]:
    """Return the metrics whose mean a name denotes: [a, b] for ``a+b``; the name of a measured metric is not split."""
    known = results.columns.get(LAST, {})
    return [metric] if metric in known or OF_ALL + metric in known else metric.split("+")


def direction_of(results: RunResults, metric: str) -> bool:
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


def declared_direction(results: RunResults, metric: str) -> bool | None:
    """Return whether more of a metric is better, see :func:`direction_of`, or ``None`` if the results do not say."""
    declared = {
        part: higher_is_better(part, results.info.higher_is_better or BEFORE_RECORDED)
        for part in parts_of(results, metric)
    }
    if {True, False} <= {*declared.values()}:
        higher = ", ".join(part for part in declared if declared[part])
        raise ValueError(f"{metric!r} cannot be a mean: of {higher} more is better, of the others less")
    return None if None in declared.values() else all(declared.values())


def collect_by_site(results: RunResults, metric: str, model: str = LAST) -> dict[str, float]:
    """Return a metric of a model as ``{site: value}``, NaN where it is missing or does not count.

    A metric ``a+b`` is the mean of both at each site, as the papers' "Average" of clean and corrupted images.
    ``global/a`` is the metric ``a`` of the global test, one value for all sites.
    """
    columns = [results.columns.get(model, {}).get(part, {}) for part in parts_of(results, metric)]
    return {site: _mean([column.get(site, column.get("")) for column in columns]) for site in sites_of(results)}


def _mean(cells: Sequence[Cell | None]) -> float:
    """Return the mean of some cells' values; NaN if one is missing or does not count."""
    return sum(math.nan if cell is None else cell.counted for cell in cells) / len(cells)


def models_of(results: RunResults, last: bool) -> list[str]:
    """Return the final model's name in the cells; ``last``: the names of the run's last models, the final one last.

    Raises:
        ValueError: the last models were not tested.
    """
    if last and not results.last_rounds:
        raise ValueError(f"{label_of(results)!r} has no test of its last models; run it with test_last=5")
    return [*(f"round {number}" for number in results.last_rounds[:-1] if last), LAST]


def global_values(results: RunResults, metric: str, *, last: bool = False) -> list[float]:
    """Return a metric of the global test for each model of :func:`models_of`; NaN where missing."""
    return [
        _mean([results.columns.get(model, {}).get(OF_ALL + part, {}).get("") for part in parts_of(results, metric)])
        for model in models_of(results, last)
    ]


def global_metrics(results: RunResults, metric: str) -> list[str]:
    """Return the global test's metrics for tables: the given metric, then the metrics that the task shows."""
    known = [cell.metric for cell in results.cells if cell.split == GLOBAL]
    first = [metric] if known and {*parts_of(results, metric)} <= {*known} else []
    return [*first, *(name for name in results.info.shown_metrics if name in known and name != metric)]


def find_suppressed(results: RunResults, metric: str) -> set[str]:
    """Return the sites that withhold their value of a test metric, because it rests on too few cases."""
    return {
        site
        for part in parts_of(results, metric)
        for site, cell in site_columns(results).get(part, {}).items()
        if cell.reason.startswith(SUPPRESSED)
    }


def withheld_reason(site: str, privacy: Collection[str], said: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the reason why a site withholds a value: differential privacy, or too few cases.

    Args:
        site: name of the site.
        privacy, said: the run's ``info.privacy`` and ``info.said``, by site.
    """
    least = said.get(site, {}).get("min_cases")
    few = f"fewer than {least} cases" if least else "fewer cases than its min_cases"
    return f"{SUPPRESSED}: {'differential privacy' if site in privacy else few}"


def missing_reason(results: RunResults, metric: str, site: str, model: str = LAST) -> str:
    """Return the reason why a site has no value of a metric in the test of a model.

    All tables, notes and pages take their reason from here.
    """
    cells = [site_columns(results, model).get(part, {}).get(site) for part in parts_of(results, metric)]
    info, why = results.info, next((left.reason for left in results.left_out if left.site == site), "")
    reason = next((cell.reason or UNDEFINED for cell in cells if cell and math.isnan(cell.counted)), "")
    return first_of({
        "no site of this run": site not in sites_of(results),
        "it never connected": info.connected is not None and site not in info.connected,
        reason: reason,
        f"left out: {why}": why and None in cells,
        NO_VALUE: True,
    })  # fmt: skip


def guess_of(results: RunResults, metric: str) -> float:
    """Return what a classifier that knows nothing gets in a metric, on average over the sites; NaN if not known.

    Of the mean recall it is 1 / classes; of an area under the ROC curve 0.5; of the accuracy the share of each site's
    commonest class, which a model that always names it gets.
    """
    supports = [site.class_support for site in results.inequality.sites.values() if site.class_support]
    classes = {name for counts in supports for name in counts}
    shares = [max(counts.values()) / sum(counts.values()) for counts in supports] or [math.nan]
    known = {MEAN_RECALL: 1 / len(classes) if classes else math.nan, **dict.fromkeys(SHARES, statistics.fmean(shares))}
    return 0.5 if metric.startswith("auc") else known.get(metric, math.nan)


def summary_of(results: RunResults, metric: str, model: str = LAST) -> FairnessSummary:
    """Summarize a model's test metric over the sites of the run; without a direction no site is the worst."""
    return summarize(
        collect_by_site(results, metric, model), higher_is_better=declared_direction(results, metric),
        suppressed=find_suppressed(results, metric), linked=are_linked(results, metric),
    )  # fmt: skip


def are_linked(results: RunResults, metric: str) -> bool:
    """Return whether the sites' values of a metric can be ranked: a mean over each site's own structures may not.

    A comparable figure may be ranked if structures link all sites; a metric that is no mean over structures always may.
    """
    known = site_columns(results) if len(results.footing.parts) > 1 else ()
    return not any(part.startswith(OWN) or OWN + part in known for part in parts_of(results, metric))


def rests_on(results: RunResults, metric: str) -> str:
    """Return text for table heads on which structures the sites' figures are computed from; empty for plain figures."""
    return name_structures(results.footing.how, results.footing.shared) if are_compared(results, metric) else ""


def are_compared(results: RunResults, metric: str) -> bool:
    """Return whether a metric's values were made comparable between sites that annotate different structures."""
    return any(OWN + part in site_columns(results) for part in parts_of(results, metric))
