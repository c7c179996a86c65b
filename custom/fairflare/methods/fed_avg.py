"""Define FedAvg, the reference with which every other method is compared.

McMahan et al., AISTATS 2017. The original weights sites by their number of images n_k; Fed-LWR's paper (Eq. 1) and its
authors' code weight all sites equally. This module has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from fairflare.base.settings import settings
from fairflare.core.weighting import uniform_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import STAY
from fairflare.methods.base.rule import RoundInputs, Rule, SiteWeights, Weighing, sample_weights
from fairflare.methods.base.training import LocalTraining


@settings
class FedAvg(Rule):
    r"""Average the sites' models (FedAvg): :math:`w \leftarrow \sum_k p_k w_k`.

    Args:
        weighting: ``"samples"``: p_k = n_k / sum n (McMahan et al.); ``"uniform"``: p_k = 1/K (Fed-LWR, Eq. 1).
    """

    weighting: Literal["samples", "uniform"] = "samples"

    def weigh(self, inputs: RoundInputs) -> Weighing:
        return Weighing(sites=self.shares(inputs))

    def shares(self, inputs: RoundInputs) -> SiteWeights:
        """Return p_k by site."""
        return uniform_weights(inputs.sites) if self.weighting == "uniform" else sample_weights(inputs)


class WithoutReports(FedAvg):
    """Average by samples in place of a method whose reports sites under differential privacy do not send.

    Attributes:
        why: the reason in words, for the record of each round that is averaged in this way.
    """

    directive_docs: ClassVar[dict[str, str]] = {STAY: "sites under differential privacy make no report in this run"}
    why = ""

    def weigh(self, inputs: RoundInputs) -> Weighing:
        return replace(super().weigh(inputs), details={"without": self.why})

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        return {STAY: True}


METHODS = [
    Method(
        name="fed_avg",
        title="FedAvg",
        summary="sample-weighted (or uniform) mean of the local models",
        rule=FedAvg,
        training=LocalTraining,
        group="control",
        source="McMahan et al., AISTATS 2017",
        page=None,
    )
]
