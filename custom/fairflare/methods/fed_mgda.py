r"""Define FedMGDA+, which moves along the shortest weighted mean of the sites' changes, all scaled to one length.

Hu et al., "Federated Learning Meets Multi-Objective Optimization", IEEE TNSE 2022, and the authors' code. The shortest
mean makes an angle of at most 90 degrees with every change, so that with ``reach=1`` no site's loss grows in a short
step.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from fairflare.base.settings import Fraction, Positive, settings
from fairflare.core.aggregation.min_norm import min_norm
from fairflare.core.weighting import normalise, uniform_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Steps, Weighing
from fairflare.methods.base.training import LocalTraining


@settings
class FedMGDA(Steps):
    r"""Move along the shortest weighted mean of the sites' normalised changes (FedMGDA+).

    .. math:: \lambda = \arg\min_\lambda \Big\lVert \sum_k \lambda_k u_k \Big\rVert^2, \quad
              u_k = \Delta_k / \lVert \Delta_k \rVert, \quad |\lambda_k - 1/K| \le \epsilon, \qquad
              w \leftarrow w + \eta \sum_k \lambda_k u_k

    over the trained parameters; batch norm's statistics are a mean with the weights lambda. A site whose change is 0 is
    left out, for it has no direction.

    Args:
        reach: epsilon; 0: the mean of the normalised changes; 1: the shortest mean of all (MGDA).
        server_rate: eta, the length of the step if all changes agree; nothing: the mean length of the changes (ours).

    Source:
        Hu et al., Algorithm 2. Authors' code: epsilon 0.2, eta 1.
    """

    reads_models: ClassVar[str] = "it compares each site's update with those of the others"

    reach: Fraction = 0.2
    server_rate: Positive | None = None

    def weigh(self, inputs: RoundInputs) -> Weighing:
        products = inputs.whole_gram(self)
        lengths = products.diagonal().sqrt()
        moved = [k for k, length in enumerate(lengths.tolist()) if 0 < length < math.inf]
        if not moved:
            self.step = 1.0
            return Weighing(sites=uniform_weights(inputs.sites))
        sizes = lengths[moved]
        even = torch.full_like(sizes, 1 / len(moved))
        shares = min_norm(products[moved][:, moved] / torch.outer(sizes, sizes), even, self.reach)
        scaled = shares * ((self.server_rate or sizes.mean()) / sizes)
        self.step = float(scaled.sum())

        def spread_over_sites(values: torch.Tensor) -> dict[str, float]:
            of_moved = {inputs.sites[k]: value for k, value in zip(moved, values.tolist(), strict=True)}
            return normalise(dict.fromkeys(inputs.sites, 0.0) | of_moved)

        return Weighing(
            sites=spread_over_sites(scaled), buffers=spread_over_sites(shares), values={"step": self.step},
            details={"lambda": spread_over_sites(shares)},
        )  # fmt: skip


METHODS = [
    Method(
        name="fed_mgda",
        title="FedMGDA+",
        summary="moves along the shortest mean of the sites' normalised changes",
        rule=FedMGDA,
        training=LocalTraining,
        source="Hu et al., IEEE TNSE 2022",
    )
]
