r"""Define Group DRO, which trains the model that is best for the worst mixture of groups of people, or of sites.

Sagawa et al., "Distributionally Robust Neural Networks for Group Shifts", ICLR 2020, Algorithm 1 over a federation: one
step of the groups' weights in each round, from the losses of the received model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from fairflare.base.checks import refuse_if
from fairflare.base.settings import NonNegative, Positive, settings
from fairflare.core.statistics.group_metrics import exponentiate
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun, criterion_losses
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.group_sums import (
    GROUP_IMAGES,
    GROUP_LOSSES,
    LEAST,
    MOST,
    MOST_GROUPS,
    bound_counts,
    check_attribute,
    check_told,
    count_groups,
    losses_by_group,
    numbers_of,
    require_numbers,
)

WEIGHTS = "group_weights"


@settings
class GroupWeighted(LocalTraining):
    """Train with each image's loss multiplied by its group's weight, and report the losses by group (Group DRO).

    Args:
        dro_attribute: attribute of people that defines the groups; empty if the site is one group, without weighted
            loss.
    """

    dro_attribute: str = ""

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return {**check_attribute(run, self.dro_attribute), **super().check(run, model)}

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        tables = losses_by_group(self, run, model, self.dro_attribute, 1)
        rows = slice(1 if self.dro_attribute else 0, None)  # with groups, the first row (all images) is not reported
        run.own = {name: table[rows, 0].tolist() for name, table in tables.items()}

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights = run.directives.get(WEIGHTS)
        if not weights or not self.dro_attribute:
            return super().loss(run, model, inputs, targets)
        check_told(run, weights, count_groups(run, self.dro_attribute), "weights of groups")
        by_group = torch.tensor([*weights, 1.0], dtype=torch.float32).clamp(0, MOST)  # weight 1 for unknown groups
        images = require_numbers(run.batch, run.site, "group_dro")
        weight_of_image = by_group[numbers_of(run, self.dro_attribute, "training")[images]].to(run.device)
        return (weight_of_image * criterion_losses(self, run, model(inputs), targets)).mean()

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own)


@settings
class GroupDRO(Rule):
    r"""Raise the weights q of groups with a higher loss in each round (Group DRO).

    .. math:: q_g \leftarrow q_g \exp(\eta (L_g + C / \sqrt{n_g})) / Z, \quad
              L_g = \textstyle\sum_k n_{kg} L_{kg} / n_g, \quad n_g = \sum_k n_{kg}

    L_kg is the mean loss of the received model over the training images of group g at site k. In the next round a site
    multiplies the loss of an image of group g by q_g divided by the share of g among the images of all sites, so that
    the sum is that of the groups' losses with weights q. This factor is limited to between 0.1 and 10, which is
    FairFlare's change: without limits a single group reported as bad could stop all learning. Models are averaged by
    samples. All q start equal. A value that a site withholds has no effect.

    Args:
        dro_attribute: attribute of people that defines the groups; empty if each site is one group, and q weights
            models.
        dro_rate: eta, step size of the group weights.
        dro_adjustment: C, in units of the loss: a small group, which generalises worse, is taken to have a higher one.

    Source:
        Sagawa et al., Algorithm 1; the adjustment, section 3.3. The commands of their code have eta 0.01 a batch, C 0.
    """

    report_fields = (GROUP_LOSSES, GROUP_IMAGES)
    directive_docs: ClassVar[dict[str, str]] = {WEIGHTS: "weight of an image's loss by group, over all sites"}

    dro_attribute: str = ""
    dro_rate: Positive = 0.1
    dro_adjustment: NonNegative = 0.0

    _q = Saved(dict[str, float])  # by number of the group, or by site if each site is one group
    _told = Saved(dict[str, float])  # by the same

    @property
    def weighs(self) -> bool:
        return not self.dro_attribute

    def counted(self, report: Mapping[str, Any]) -> Mapping[str, float]:
        groups = len(report["group_losses"] or ()) if self.dro_attribute else 0
        return {"training": float(np.nansum(report["group_images"] or [])), "groups": groups}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        count, most = len(report["group_losses"] or ()), MOST_GROUPS if self.dro_attribute else 1
        refuse_if(site, {f"field 'group_losses' has {count} entries, there are at most {most} groups": count > most})
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses, images = self._pool_groups(inputs)
        moved = exponentiate(
            self._q, {key: loss + self.dro_adjustment / math.sqrt(images[key]) for key, loss in losses.items()},
            self.dro_rate,
        )  # fmt: skip
        total = math.fsum(images.values())
        # Lower bound of each group's weight: a group with almost no weight is hardly learned and never recovers.
        moved = {key: max(q, LEAST * images.get(key, 0.0) / total) if total else q for key, q in moved.items()}
        whole = math.fsum(moved.values())
        q = {key: q / whole for key, q in moved.items()}
        self._q = q if self.dro_attribute or not q else inputs.remembered(q)
        self._told = {
            key: min(max(self._q[key] * total / count, LEAST), MOST) for key, count in images.items()
        }  # fmt: skip
        details = {"q": dict(self._q)}
        if self.dro_attribute:
            return Weighing(sites=sample_weights(inputs), details=details)
        weights = normalise({site: self._q.get(site, 1 / len(inputs.sites)) for site in inputs.sites})
        return Weighing(sites=weights, details=details)

    def _pool_groups(self, inputs: RoundInputs) -> tuple[dict[str, float], dict[str, float]]:
        """Return mean loss and number of images, over all sites, of each group that at least one site reports.

        A site whose number of groups differs from that of most sites is ignored.
        """
        losses_by_site = {site: inputs.reports[site]["group_losses"] or () for site in inputs.sites}
        most = Counter(len(losses) for losses in losses_by_site.values() if losses).most_common(1)
        groups = most[0][0] if most else 0
        counts = {
            site: {
                group: n for group, n in enumerate(inputs.reports[site]["group_images"])
                if math.isfinite(n) and n > 0 and math.isfinite(losses[group])
            }
            for site, losses in losses_by_site.items() if len(losses) == groups > 0
        }  # fmt: skip
        factors = bound_counts(inputs, {site: math.fsum(by_group.values()) for site, by_group in counts.items()})
        sums: dict[str, float] = {}
        images: dict[str, float] = {}
        for group in range(groups):
            known = {site: losses_by_site[site][group] for site, by_group in counts.items() if group in by_group}
            others = [
                losses_by_site[site][other] for site, by_group in counts.items() for other in by_group if other != group
            ]
            for site, loss in inputs.moderated(known, "group_losses", others).items() if known else ():
                key, count = str(group) if self.dro_attribute else site, counts[site][group] * factors[site]
                sums[key] = sums.get(key, 0.0) + count * loss
                images[key] = images.get(key, 0.0) + count
        return {key: total / images[key] for key, total in sums.items()}, images

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        if not self.dro_attribute or not self._told:
            return {}
        return {WEIGHTS: [self._told.get(str(group), 1.0) for group in range(1 + max(map(int, self._told)))]}


METHODS = [
    Method(
        name="group_dro",
        title="Group DRO",
        summary="groups of people (dro_attribute), or sites, with a higher loss weigh more, round by round",
        rule=GroupDRO,
        training=GroupWeighted,
        group="people",
        source="Sagawa et al., ICLR 2020",
        **JOB,
    )
]
