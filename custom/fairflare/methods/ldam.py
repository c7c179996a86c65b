r"""Define LDAM-DRW: a loss with larger margins for rarer classes and, in late rounds, class weights; with FedAvg.

Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019. Each site uses
its own class counts ("LDAM-FL" in Fed-MAS's table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.cases.floor import all_records
from fairflare.base.checks import refuse
from fairflare.base.settings import BelowOne, Fraction, NonNegative, settings
from fairflare.core.losses import drw_weights, ldam_loss
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, class_counts
from fairflare.methods.bsm import JOB, LEARNS
from fairflare.methods.fed_avg import FedAvg

if TYPE_CHECKING:
    from fairflare.base.task import Task

NEEDED = "set classifier='cosine' of the classification task"


@settings
class MarginTraining(LocalTraining):
    r"""Train with LDAM-DRW's loss :math:`v_y\, CE(s (\cos - m_y e_y), y)` with the site's class counts.

    Margins m and weights v: :func:`fairflare.core.losses.ldam_margins`, :func:`~fairflare.core.losses.drw_weights`; a
    class without a training image at the site has 0 for both. The network's classifier is a cosine classifier
    (``classifier="cosine"`` of the task), and s its ``cosine_scale``.

    Args:
        max_margin: margin of the rarest class.
        drw_beta: beta of the class weights; 0: all classes of the site weigh alike.
        drw_start: share of the rounds without class weights; at least the first round unless it is 0. 1: never.

    Source:
        Cao et al., NeurIPS 2019, Eqs. (12)-(13), section 3.3, and code (s = 30, beta = 0.9999, the last fifth).
    """

    max_margin: NonNegative = 0.5
    drw_beta: BelowOne = 0.9999
    drw_start: Fraction = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse({
            f"criterion must be 'task', as LDAM has a loss of its own, got {self.criterion!r}": (
                self.criterion != "task"
            ),
        })  # fmt: skip

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        refuse({
            "LDAM needs a classification task, since its margins are by class": task.has_classes is False,
            f"it needs a cosine classifier; {NEEDED}": getattr(task, "classifier", "cosine") != "cosine",
        })  # fmt: skip

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        self._counts(run)
        _scale(run, model)
        return super().check(run, model)

    def follows_num_rounds(self) -> list[str]:
        return [*super().follows_num_rounds(), *(["drw_start"] if 0 < self.drw_start < 1 else [])]

    @all_records()
    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        run.own = drw_weights(
            self._counts(run), run.current_round, run.num_rounds, beta=self.drw_beta, start=self.drw_start
        )

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scale = _scale(run, model)
        return ldam_loss(
            run.task.chosen(model(inputs)) / scale,
            targets,
            self._counts(run),
            max_margin=self.max_margin,
            scale=scale,
            weights=run.own,
        )

    def _counts(self, run: SiteRun) -> torch.Tensor:
        return class_counts(self, run, "LDAM's margins need")


def _scale(run: SiteRun, model: torch.nn.Module) -> float:
    scale = getattr(getattr(model, "head", None), "scale", None)
    if not isinstance(scale, (int, float)):
        raise SiteError(
            f"site {run.site!r}: LDAM needs a cosine classifier; {NEEDED} (a network of your own: a module head with "
            "its scale s, whose output is s times the cosines)"
        )
    return float(scale)


METHODS = [
    Method(
        name="ldam",
        kinds=("classification",),
        title="LDAM-DRW",
        summary="margins and late class weights from each site's class counts, cosine classifier, FedAvg at the server",
        rule=FedAvg,
        training=MarginTraining,
        learns={**LEARNS, "classifier": "cosine"},
        **{
            **JOB,
            "source": "Cao et al., NeurIPS 2019; Elbatel et al., DeCaF @ MICCAI 2023",
            "keeps": ("criterion", "classifier", "cosine_scale"),
        },
    )
]
