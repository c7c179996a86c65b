r"""Define FairFed, which lowers the weight of sites whose fairness gap or accuracy is far from that of all sites.

Ezzeldin et al., "FairFed: Enabling Group Fairness in Federated Learning", AAAI 2023; the metric is the gap between
groups of people, or plain accuracy. The module also has the method that FedISM's code calls FairFed, which does the
opposite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import refuse, refuse_if
from fairflare.base.settings import NonNegative, settings
from fairflare.core.aggregation.fair_rules import fair_fed_gaps, fair_fed_weights
from fairflare.core.statistics.group_metrics import gaps_of
from fairflare.core.statistics.group_sums import CONFUSION, Sums, add_sums
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import TRAINING, VALIDATION, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.group_sums import ALIKE, bound_counts, check_attribute, confusions, count_groups
from fairflare.methods.parts.probes import ReportsScore, score, score_in

if TYPE_CHECKING:
    from fairflare.base.task import Task


@settings
class ReportAccuracy(ReportsScore, LocalTraining):
    """Train as FedAvg does, and report the received model's accuracy at the site (FairFed).

    Args:
        fairfed_mode: ``"original"``: accuracy on the validation images; ``"fedism"``: balanced accuracy on the training
            images. A task without accuracy: its primary metric.
        fairfed_attribute: attribute of people whose groups are measured on the validation images too; empty for none.
    """

    fairfed_mode: Literal["original", "fedism"] = "original"
    fairfed_attribute: str = ""

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return {**check_attribute(run, self.fairfed_attribute), **super().check(run, model)}

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        refuse({
            "fairfed_attribute needs a task with classes; leave it empty": (
                self.fairfed_attribute and not task.has_classes
            ),
        })  # fmt: skip

    def made_of(self, name: str) -> tuple[str, ...]:
        return TRAINING if name == "accuracy" and self.fairfed_mode == "fedism" else VALIDATION

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        accuracy = (
            score_in(run, run.metrics)  # the site has just evaluated the received model on the validation images
            if self.fairfed_mode == "original"
            else score(self, run, model, "training", balanced=True)
        )
        run.own = {"accuracy": accuracy}
        if self.fairfed_attribute:
            counts = confusions(run, model, self.fairfed_attribute, "validation").reshape(-1).tolist()
            run.own |= {"groups": float(count_groups(run, self.fairfed_attribute)), "group_counts": counts}

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own)


@settings
class FairFed(Rule):
    r"""Move the sites' weights by the distance of each site's accuracy or group gap from that of all sites (FairFed).

    .. math:: \omega_k \leftarrow \omega_k - \beta (\Delta_k - \bar\Delta), \quad
              \Delta_k = \lvert A - A_k \rvert, \quad A = \textstyle\sum_j p_j A_j

    clipped at 0 and normalised; omega starts with p_k = n_k / sum n. An absent site keeps its omega: the sites of
    a round share the sum of their omega. If all are 0, weights are equal. A site whose accuracy is not a number
    gets the mean Delta, so its omega is not moved.

    Args:
        fairfed_mode: ``"original"``: as above, a site far from the mean loses weight, also the worst one; ``"fedism"``:
            the sum over j is missing as in FedISM's code, so that good sites lose weight; the first round is by
            samples.
        fairfed_beta: beta, how fast the weights move, ``>= 0``.
        fairfed_attribute: attribute of people: the gap between its groups replaces A (``fairfed_mode="original"``);
            :math:`\Delta_k = \lvert F - F_k \rvert` with F made of the counts of all sites, as in the paper. A site
            whose gap is not defined (a group without images, counts that stay there) goes by its accuracy.
        fairfed_gap: ``"equal_opportunity"`` (the paper's first metric, EOD): the largest difference in sensitivity;
            ``"demographic_parity"`` (its second, SPD): in how often a class is told; ``"equalised_odds"``: in
            sensitivity or in false positives. Sizes of gaps, for any number of groups and classes; the paper's are
            signed differences of two groups.

    Source:
        Ezzeldin et al., AAAI 2023, Algorithm 1; FedISM's code.
    """

    report_fields = (
        Field(
            "accuracy", low=0, high=1, nan_ok=True,
            doc="of the received model, on validation or (`fairfed_mode=fedism`) training images; the primary metric "
            "where a task has no accuracy",
            of=VALIDATION,
            measures="score",
        ),
        Field(
            "groups", low=1, high=1000, required=False, doc="with `fairfed_attribute`: number of its groups",
            of=VALIDATION,
        ),
        Field(
            "group_counts", "vector", low=0, nan_ok=True, required=False,
            doc="with `fairfed_attribute`: of each of its groups and each class TP, FP, FN, TN of the received model "
            "on the validation images; NaN: it stays",
            reveals="how often each class occurs in a group; over the rounds, what changing models tell of few images",
            keep="`metrics_by_class`; groups and classes with few cases, with others: `min_cases`", of=VALIDATION,
        ),
    )  # fmt: skip

    acts: ClassVar[dict[str, OnlyWith | None]] = {"fairfed_gap": only_with("fairfed_attribute")}

    fairfed_mode: Literal["original", "fedism"] = "original"
    fairfed_beta: NonNegative = 0.1
    fairfed_attribute: str = ""
    fairfed_gap: Literal["equal_opportunity", "demographic_parity", "equalised_odds"] = "equal_opportunity"

    _omega = Saved(dict[str, float])

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse({
            f"fairfed_attribute needs fairfed_mode='original', got {self.fairfed_mode!r}": (
                self.fairfed_attribute and self.fairfed_mode != "original"
            ),
        })  # fmt: skip

    def weigh(self, inputs: RoundInputs) -> Weighing:
        shares = sample_weights(inputs)
        before = {**{site: shares[site] for site in inputs.sites if site not in self._omega}, **self._omega}
        plain = self.fairfed_mode == "original"
        gaps = fair_fed_gaps(read_reports(inputs, "accuracy"), shares, summed=plain)
        details: dict[str, Any] = {"accuracy_gap": gaps}
        if self.fairfed_attribute:
            counts = _alike({site: _counts(inputs.reports[site], site) for site in inputs.sites})
            factors = bound_counts(inputs, {site: _images(by_group) for site, by_group in counts.items()})
            whole = self._gap({
                name: add_sums([
                    {CONFUSION: factors[site] * by_group[name][CONFUSION]}
                    for site, by_group in counts.items() if name in by_group
                ])
                for name in sorted(set().union(*counts.values()))
            })  # fmt: skip
            gap_by_site = {site: self._gap(by_group) for site, by_group in counts.items()}
            apart = {site: abs(whole - gap) for site, gap in gap_by_site.items() if math.isfinite(whole - gap)}
            gaps = {**gaps, **apart}
            details |= {"group_gap": gap_by_site, "group_gap_of_all": whole}
        if plain or inputs.current_round > 0:
            before = fair_fed_weights(before, gaps, self.fairfed_beta)
        self._omega = inputs.remembered(normalise(before))
        weights = normalise({site: self._omega[site] for site in inputs.sites})
        return Weighing(sites=weights, details={**details, "omega": dict(self._omega)})

    def counted(self, report: Mapping[str, Any]) -> Mapping[str, float]:
        counts = _counts(report, "") if self.fairfed_attribute else {}
        return {"validation": _images(counts), "groups": len(counts)}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        if self.fairfed_attribute:
            _counts(report, site)
        return report

    def _gap(self, groups: Mapping[str, Sums]) -> float:
        return gaps_of(groups, add_sums(list(groups.values()))).get(self.fairfed_gap, math.nan)


def _counts(report: Mapping[str, Any], site: str) -> dict[str, Sums]:
    """Return the counts TP, FP, FN, TN of a report by group; empty if the site withholds them.

    Raises:
        ReportError: the number of counts does not fit the number of groups.
    """
    numbers, groups = report["group_counts"], report["groups"]
    if not numbers or groups is None or not math.isfinite(groups):
        return {}
    refuse_if(site, {
        f"field 'group_counts' has {len(numbers)} entries, of {groups:g} groups; {ALIKE}": bool(
            groups % 1 or len(numbers) % (4 * int(groups))
        ),
    })  # fmt: skip
    rows = np.asarray(numbers).reshape(int(groups), -1, 4)
    return {str(group): {CONFUSION: counts} for group, counts in enumerate(rows)}


def _images(counts: Mapping[str, Sums]) -> float:
    """Return the number of images from which counts by group were made; each reported class counts every image once."""
    return float(np.nansum([group[CONFUSION].sum(1) for group in counts.values()], 0).max()) if counts else 0.0


def _alike(counts: Mapping[str, dict[str, Sums]]) -> dict[str, dict[str, Sums]]:
    """Return counts by site, emptied for sites whose numbers of groups or classes differ from those of most sites.

    Sites with empty counts are weighted by their accuracy.
    """
    shapes = {
        site: (len(by_group), next(iter(by_group.values()))[CONFUSION].shape)
        for site, by_group in counts.items()
        if by_group
    }
    most = Counter(shapes.values()).most_common(1)
    return {site: by_group if most and shapes.get(site) == most[0][0] else {} for site, by_group in counts.items()}


METHODS = [
    Method(
        name="fair_fed",
        title="FairFed",
        summary="sites far from the mean accuracy lose weight (fairfed_mode=fedism: as in FedISM's code)",
        rule=FairFed,
        training=ReportAccuracy,
        source="Ezzeldin et al., AAAI 2023",
        **JOB,
    )
]
