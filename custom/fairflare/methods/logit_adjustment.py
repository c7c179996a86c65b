"""Define logit adjustment and FedLC: cross-entropy with logits shifted by a site's class counts, and FedAvg.

Menon et al., ICLR 2021 (LA, FedISM's criterion); Zhang et al., "Federated Learning with Label Distribution Skew via
Logits Calibration", ICML 2022 (FedLC).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith
from fairflare.base.settings import Flag, NonNegative, settings
from fairflare.core.losses import fedlc_loss
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.training import LocalTraining, SiteRun, class_counts
from fairflare.methods.bsm import JOB, LEARNS
from fairflare.methods.fed_avg import FedAvg


@settings
class CalibratedTraining(LocalTraining):
    r"""Train with FedLC's loss, cross-entropy of :math:`z_c - \tau n_c^{-1/4}`, n_c the site's class counts.

    Args:
        criterion: ``"fedlc"``.
        prior_strength: tau; ``None`` for Fed-MAS's 0.5.
        fedlc_exclude_target: the sum in the denominator goes over the classes other than the sample's own (the pairwise
            form; the loss may be negative). False: over all, as published re-implementations and Fed-MAS have it.

    Source:
        Zhang et al., ICML 2022. Not LC-Fed (ECCV 2022), whose repository is also called FedLC.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"prior_strength": None}

    criterion: Literal["fedlc"] = "fedlc"
    prior_strength: NonNegative | None = None
    fedlc_exclude_target: Flag = False

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.fedlc_exclude_target:
            return super().loss(run, model, inputs, targets)
        tau: dict[str, Any] = {} if self.prior_strength is None else {"tau": self.prior_strength}
        return fedlc_loss(run.task.chosen(model(inputs)), targets, class_counts(self, run), exclude_target=True, **tau)


KEEPS = ("criterion", "prior_strength")
METHODS = [
    Method(
        name="logit_adjustment",
        kinds=("classification",),
        title="LA",
        summary="logits are moved by tau times the log share of each class at the site, FedAvg at the server",
        rule=FedAvg,
        training=LocalTraining,
        learns=LEARNS,
        **{
            **JOB,
            "site": {"criterion": "logit_adjusted"},
            "source": "Menon et al., ICLR 2021",
            "keeps": KEEPS,
        },
    ),
    Method(
        name="fed_lc",
        kinds=("classification",),
        title="FedLC",
        summary="logits are calibrated by the site's class counts, n^(-1/4), FedAvg at the server",
        rule=FedAvg,
        training=CalibratedTraining,
        learns=LEARNS,
        **{
            **JOB,
            "site": {"criterion": "fedlc"},
            "source": "Zhang et al., ICML 2022; Elbatel et al., DeCaF @ MICCAI 2023",
            "keeps": KEEPS,
        },
    ),
]
