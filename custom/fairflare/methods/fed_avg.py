"""FedAvg: the reference every other method is compared with.

McMahan et al., AISTATS 2017. Fed-LWR's paper (Eq. 1) and its authors' code weigh all sites alike, whatever their
number of images; the original weighs by n_k. Both are here.
"""

from __future__ import annotations

from typing import Literal

from fairflare.base.settings import settings
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, sample_weights
from fairflare.methods.base.training import LocalTraining


@settings
class FedAvg(Rule):
    r"""FedAvg, server half: :math:`w \leftarrow \sum_k p_k w_k`.

    Args:
        weighting: ``"samples"``: p_k = n_k / sum n (McMahan et al.); ``"uniform"``: p_k = 1/K (Fed-LWR, Eq. 1).
    """

    weighting: Literal["samples", "uniform"] = "samples"

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if self.weighting == "uniform":
            return Weighing(sites=dict.fromkeys(inputs.sites, 1.0 / len(inputs.sites)))
        return Weighing(sites=sample_weights(inputs))


METHODS = [
    Method(
        name="fed_avg",
        title="FedAvg",
        summary="sample-weighted (or uniform) mean of the local models",
        rule=FedAvg,
        training=LocalTraining,
        source="McMahan et al., AISTATS 2017",
        page=None,
    )
]
