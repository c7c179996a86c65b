"""Define FedBN: the tensors of norm layers stay at the sites, all other tensors are averaged.

Li et al., ICLR 2021. The authors' code finds norm layers by ``bn`` in a tensor's name, which misses norms with other
names (``downsample.1`` of a ResNet, ``norm1`` of a DenseNet). This module finds them by the type of the module.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from fairflare.base.settings import settings
from fairflare.core.features.norms import norm_tensors
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import Home
from fairflare.methods.base.training import LocalTraining, SiteRun, refuse_at
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_prox import JOB


@settings
class FedBNTraining(LocalTraining):
    """Train with norm layers whose scale, shift and running statistics are the site's own (FedBN).

    Args:
        norms: ``"batch"``: batch norms (the paper); ``"all"``: instance, group, layer and RMS norms too; ``"auto"``:
            batch norms, and all kinds in a network that has none.

    Source:
        Li et al., ICLR 2021, Algorithm 1.
    """

    norms: Literal["auto", "batch", "all"] = "auto"

    @property
    def home(self) -> Home:
        return Home(self, self._list_norms, "scale, shift and running statistics of the norms (`norms`: which kinds)")

    def _list_norms(self, model: torch.nn.Module) -> list[str]:
        if self.norms == "auto":
            return norm_tensors(model, "batch") or norm_tensors(model, "all")
        return norm_tensors(model, self.norms)

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        more = "; norms='all' would keep others" if norm_tensors(model, "all") else ""
        refuse_at(run.site, {
            f"the network has no norm of the kind norms={self.norms!r}, so FedBN would be FedAvg{more}": (
                not self.home.stays(model)
            ),
        })  # fmt: skip
        return super().check(run, model)


METHODS = [
    Method(
        name="fed_bn",
        title="FedBN",
        summary="every site has its own norm layers, all other tensors are averaged",
        rule=FedAvg,
        training=FedBNTraining,
        group="own",
        source="Li et al., ICLR 2021",
        **JOB,
    )
]
