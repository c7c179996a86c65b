"""FedAvg: the reference every other method is compared with.

McMahan et al., AISTATS 2017. Fed-LWR's paper (Eq. 1) and its authors' code weigh all sites alike, whatever their
number of images; the original weighs by n_k. Both are here.
"""

from __future__ import annotations

from fairflare.methods.base import (
    FairAggregator,
    LocalTraining,
    Method,
    RoundInputs,
    Weighing,
    sample_weights,
)

WEIGHTINGS = ("samples", "uniform")


class FedAvg(FairAggregator):
    r"""FedAvg, server half: :math:`w \leftarrow \sum_k p_k w_k`.

    Args:
        weighting: ``"samples"``: p_k = n_k / sum n (McMahan et al.); ``"uniform"``: p_k = 1/K (Fed-LWR, Eq. 1).
        min_sites: see :class:`FairAggregator`.
    """

    def __init__(self, weighting: str = "samples", min_sites: int = 1) -> None:
        super().__init__(min_sites)
        if weighting not in WEIGHTINGS:
            raise ValueError(f"weighting must be one of {WEIGHTINGS}, got {weighting!r}")
        self.weighting = weighting

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if self.weighting == "uniform":
            return Weighing(sites=dict.fromkeys(inputs.sites, 1.0 / len(inputs.sites)))
        return Weighing(sites=sample_weights(inputs))


METHODS = [
    Method(
        name="fed_avg",
        title="FedAvg",
        summary="sample-weighted (or uniform) mean of the local models",
        aggregator=FedAvg,
        training=LocalTraining,
        source="McMahan et al., AISTATS 2017",
    )
]
