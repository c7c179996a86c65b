r"""Define FairLoRA: low-rank adapters with common singular vectors, and singular values for each group of people.

Li et al., "FairFedMed: Benchmarking Group Fairness in Federated Medical Imaging with FairLoRA", IEEE TMI 2025. The
adapter is :mod:`fairflare.core.features.group_adapter`. This module assigns the images of a batch to their groups, and
averages the singular values of each group over the sites.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.checks import group_by_key, refuse
from fairflare.base.settings import BelowOne, Flag, settings
from fairflare.core.states import Made, State
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.local_loop import Trained
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, sample_weights
from fairflare.methods.base.training import LocalTraining, SiteRun, refuse_at
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.group_sums import (
    ByPeople,
    check_attribute,
    count_groups,
    numbers_of,
    require_numbers,
    withhold_groups,
)

if TYPE_CHECKING:
    from fairflare.base.task import Task

#: Pattern of the names of tensors with the singular values of one group: the layer, and the group's number.
VALUES = re.compile(r"(?P<layer>.*)\.fair_S\.(?P<group>\d+)\.weight")


@settings
class GroupAdapters(ByPeople, LocalTraining):
    """Train, validate and test each image with the singular values of its group of people (FairLoRA).

    Args:
        fairlora_attribute: attribute of people that defines the groups; the datalist declares it.
    """

    fairlora_attribute: str = ""

    @property
    def attribute(self) -> str:
        return self.fairlora_attribute

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        kind = getattr(getattr(task, "adapters", None), "kind", None)
        refuse({
            f"fair_lora trains adapters by group of people; the task has adapters={kind or 'none'}: set "
            "adapters=fair_lora, and adapters.groups to the number of groups": kind != "fair_lora",
            "fair_lora needs fairlora_attribute, an attribute that the datalists declare": not self.fairlora_attribute,
        })  # fmt: skip

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        from fairflare.core.features.group_adapter import adapters_of

        facts = check_attribute(run, self.fairlora_attribute)
        num_groups, num_adapters = count_groups(run, self.fairlora_attribute), len(adapters_of(model)[0].fair_S)
        refuse_at(run.site, {
            f"attribute {self.fairlora_attribute!r} has {num_groups} groups in its datalist, the job has "
            f"adapters.groups={num_adapters}; set adapters.groups to the number that all datalists declare": (
                num_groups != num_adapters
            ),
        })  # fmt: skip
        require_numbers(run.data.order("training", 0), run.site, "fair_lora")
        return {**super().check(run, model), **facts}

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        from fairflare.core.features.group_adapter import adapters_of

        few = withhold_groups(run, self.fairlora_attribute, "training")  # whose singular values are sent unchanged
        stored = [values for adapter in adapters_of(model) for g, values in enumerate(adapter.values) if g in few]
        before = [values.detach().clone() for values in stored]
        trained = super().train(run, model)
        with torch.no_grad():
            for values, start in zip(stored, before, strict=True):
                values.copy_(start)
        return trained

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        numbers = numbers_of(run, self.fairlora_attribute, "training")
        stays = withhold_groups(run, self.fairlora_attribute, "training")
        groups = range(count_groups(run, self.fairlora_attribute))
        return {"group_images": [math.nan if g in stays else float((numbers == g).sum()) for g in groups]}


@settings
class FairLoRA(Rule):
    r"""Average each group's singular values by the group's images, and all other tensors by samples (FairLoRA).

    .. math:: \bar S_g = \sum_k \frac{n_{kg}}{\sum_j n_{jg}} S_{kg}, \quad
              w \leftarrow (1 - \beta_t)\, \bar w + \beta_t w, \quad \beta_t = \beta \, t / T

    n_kg is the number of training images of group g at site k. The singular values of a group whose images no site
    reports are averaged by samples, too.

    Args:
        fairlora_ema: beta of the moving average; t is the round from 0, T the number of rounds. It holds for all that
            is trained.
        fairlora_shared: set the first half of the singular values to their mean over the groups.

    Source:
        Li et al., IEEE TMI 2025; weights by group, beta and the shared half as in the authors' code and scripts.
    """

    report_fields = (
        Field(
            "group_images", "vector", low=0, high=1e9, nan_ok=True, of=TRAINING, home_ok=True,
            doc="training images of each group of `fairlora_attribute`; NaN: it stays, and the singular values of that "
            "group are sent as they came",
            reveals="how many people of a group the site has; what its singular values tell of them",
            keep="groups with few cases, with others: `min_cases`",
        ),
    )  # fmt: skip

    fairlora_ema: BelowOne = 0.999
    fairlora_shared: Flag = True

    _kept = 0.0  # beta_t of the round

    def follows_num_rounds(self) -> list[str]:
        return ["fairlora_ema"] if self.fairlora_ema else []

    def counted(self, report: Mapping[str, Any]) -> Mapping[str, float]:
        images = report["group_images"] or []
        return {"training": math.fsum(n for n in images if math.isfinite(n)), "groups": len(images)}

    def weigh(self, inputs: RoundInputs) -> Weighing:
        self._kept = self.fairlora_ema * inputs.current_round / max(inputs.num_rounds, 1)
        shares = sample_weights(inputs)
        by_group: dict[str, dict[str, float]] = {}
        for name, layer in inputs.owner.items():
            if match := VALUES.fullmatch(name):
                images = {site: _images(inputs.reports[site], int(match["group"])) for site in inputs.sites}
                by_group[layer] = normalise(images) if sum(images.values()) > 0 else shares
        if not by_group:
            return Weighing(sites=shares, values={"kept": self._kept})
        record = {layer: {site: {"weight": w} for site, w in by_site.items()} for layer, by_site in by_group.items()}
        layers = {**dict.fromkeys(inputs.owner.values(), shares), **by_group}
        return Weighing(layers=layers, record=record, values={"kept": self._kept})

    def move(self, change: State) -> State:
        matches = filter(None, map(VALUES.fullmatch, change if self.fairlora_shared else ()))
        groups = group_by_key((match["layer"], match.string) for match in matches)
        if not groups and not self._kept:
            return change
        step = 1 - self._kept

        def move_values(name: str) -> torch.Tensor:
            values = change[name]
            match = VALUES.fullmatch(name)
            if match and match["layer"] in groups:
                middle = len(values) // 2
                of_all = torch.stack([change[other][:middle] for other in groups[match["layer"]]])
                values = torch.cat([of_all.mean(0), values[middle:]])
            return values * step

        return Made(change, move_values)


def _images(report: Mapping[str, Any], group: int) -> float:
    images = report["group_images"] or ()
    return images[group] if group < len(images) and math.isfinite(images[group]) else 0.0


METHODS = [
    Method(
        name="fair_lora",
        kinds=("classification",),
        title="FairLoRA",
        summary="low-rank adapters whose singular values are those of a group of people",
        rule=FairLoRA,
        training=GroupAdapters,
        site={"fairlora_attribute": "tone"},
        learns={"adapters": "fair_lora", "adapters.train_norms": True, "attributes": True},
        group="people",
        source="Li et al., IEEE TMI 2025",
        keeps=("adapters",),
        **JOB,
    )
]
