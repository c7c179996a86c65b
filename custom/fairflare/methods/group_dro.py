r"""Group DRO: the model that is best for the worst mixture of groups, of people or of sites.

Sagawa et al., "Distributionally Robust Neural Networks for Group Shifts", ICLR 2020, Algorithm 1 over a federation: one
step of the weights a round, from the losses of the received model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import NonNegative, Positive, settings
from fairflare.core.statistics.group_metrics import exponentiated
from fairflare.exchange.messages import BySite
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, sample_weights
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, criterion_losses
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.group_sums import (
    GROUP_IMAGES,
    GROUP_LOSSES,
    check_attribute,
    hidden,
    known_groups,
    numbers_of,
    training_losses,
)

WEIGHTS = "group_weights"
Key = tuple[str, int]  # site (empty: all) and number of the group


@settings
class GroupWeighted(LocalTraining):
    """Group DRO, site half: the loss of an image times the weight of its group; and the losses by group.

    Args:
        dro_attribute: whose groups; empty: the site is one group, and its loss is not weighed.
    """

    dro_attribute: str = ""

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        if self.dro_attribute:
            check_attribute(run, self.dro_attribute)
        return super().check(run, model)

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        numbers = self._numbers(run)
        groups = known_groups(run, self.dro_attribute) if self.dro_attribute else 1
        kept = hidden(run, self.dro_attribute, "training") if self.dro_attribute else frozenset()
        losses, _ = training_losses(self, run, model)
        images = np.bincount(numbers, minlength=groups)[:groups]
        means = np.bincount(numbers, losses, groups)[:groups] / np.maximum(images, 1)
        out = np.array([group in kept or images[group] == 0 for group in range(groups)])
        told = {"group_losses": np.where(out, np.nan, means), "group_images": np.where(out, np.nan, images)}
        run.own = {name: values.tolist() for name, values in told.items()}

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights = run.directives.get(WEIGHTS)
        if isinstance(weights, Mapping):
            weights = weights.get(run.site)
        if not weights or not self.dro_attribute:
            return super().loss(run, model, inputs, targets)
        if run.batch is None:
            raise SiteError(f"site {run.site!r}: group_dro needs data that say which image is which in a batch")
        by_group = torch.tensor([*weights, 1.0], dtype=torch.float32)  # who is not known counts as it is
        of = by_group[self._numbers(run)[run.batch]].to(run.device)
        return (of * criterion_losses(self, run, model(inputs), targets)).mean()

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own)

    def _numbers(self, run: SiteRun) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.dro_attribute:
            return np.zeros(run.data.num_samples("training"), np.int64)
        return numbers_of(run, self.dro_attribute, "training")


@settings
class GroupDRO(Rule):
    r"""Group DRO, server half.

    .. math:: q_g \leftarrow q_g \exp(\eta (L_g + C / \sqrt{n_g})) / Z, \quad
              L_g = \textstyle\sum_k n_{kg} L_{kg} / n_g, \quad n_g = \sum_k n_{kg}

    L_kg is the mean loss of the received model over the training images of group g at site k. In the next round a site
    multiplies the loss of an image of g by q_g over the share of g among the images of all sites, so that the sum is
    that of the groups' losses with weights q; models are averaged by samples. q starts alike. What a site does not tell
    moves nothing.

    Args:
        dro_attribute: whose groups; empty: each site is one group, and q are the weights of the models.
        dro_over: ``"groups"``: of all sites together; ``"site_groups"``: each group of each site by itself.
        dro_rate: eta.
        dro_adjustment: C, in units of the loss: a small group, which generalises worse, is taken to have a higher one.

    Source:
        Sagawa et al., Algorithm 1; the adjustment, section 3.3. The commands of their code have eta 0.01 a batch, C 0.
    """

    report_fields = (GROUP_LOSSES, GROUP_IMAGES)
    directive_docs: ClassVar[dict[str, str]] = {
        WEIGHTS: "weight of an image's loss by group, over all sites, or (`dro_over=site_groups`) the site's own"
    }
    acts: ClassVar[dict[str, OnlyWith | None]] = {"dro_over": only_with("dro_attribute")}

    dro_attribute: str = ""
    dro_over: Literal["groups", "site_groups"] = "groups"
    dro_rate: Positive = 0.1
    dro_adjustment: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._q: dict[Key, float] = {}
        self._told: dict[Key, float] = {}

    @property
    def weighs(self) -> bool:
        return not self.dro_attribute

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses, images = self._pooled(inputs)
        self._q = exponentiated(
            self._q, {key: loss + self.dro_adjustment / math.sqrt(images[key]) for key, loss in losses.items()},
            self.dro_rate,
        )  # fmt: skip
        total = math.fsum(images.values())
        self._told = {key: self._q[key] * total / count for key, count in images.items()}
        details = {"q": {f"{site}/{group}" if site else str(group): q for (site, group), q in self._q.items()}}
        if self.dro_attribute:
            return Weighing(sites=sample_weights(inputs), details=details)
        held = {site: self._q.get((site, 0), 1 / len(inputs.sites)) for site in inputs.sites}
        return Weighing(sites={site: q / math.fsum(held.values()) for site, q in held.items()}, details=details)

    def _pooled(self, inputs: RoundInputs) -> tuple[dict[Key, float], dict[Key, float]]:
        """Mean loss and images of each group that somebody tells."""
        sums: dict[Key, float] = {}
        images: dict[Key, float] = {}
        own = not self.dro_attribute or self.dro_over == "site_groups"
        reports = {site: inputs.reports[site] for site in inputs.sites}
        for group in range(max((len(report["group_losses"] or ()) for report in reports.values()), default=0)):
            told = {s: r for s, r in reports.items() if group < len(r["group_losses"] or ())}
            known = {s: r["group_losses"][group] for s, r in told.items() if math.isfinite(r["group_losses"][group])}
            for site, loss in inputs.moderated(known, "group_losses").items() if known else ():
                key, count = (site if own else "", group), reports[site]["group_images"][group]
                if math.isfinite(count) and count > 0:
                    sums[key] = sums.get(key, 0.0) + count * loss
                    images[key] = images.get(key, 0.0) + count
        return {key: total / images[key] for key, total in sums.items()}, images

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        if not self.dro_attribute or not self._told:
            return {}
        groups = range(1 + max(group for _, group in self._told))
        if self.dro_over == "groups":
            return {WEIGHTS: [self._told.get(("", group), 1.0) for group in groups]}
        return {WEIGHTS: BySite({s: [self._told.get((s, group), 1.0) for group in groups] for s in sites})}

    def state_dict(self) -> dict[str, Any]:
        return {
            name: [[*key, value] for key, value in of.items()] for name, of in (("q", self._q), ("told", self._told))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._q, self._told = ({(site, int(g)): float(v) for site, g, v in state[name]} for name in ("q", "told"))


METHODS = [
    Method(
        name="group_dro",
        title="Group DRO",
        summary="groups of people (dro_attribute), or sites, with a higher loss weigh more, round by round",
        rule=GroupDRO,
        training=GroupWeighted,
        source="Sagawa et al., ICLR 2020",
        **JOB,
    )
]
