"""Define BSM-FL, Fed-MAS's first baseline and local training: balanced softmax at the sites, FedAvg at the server.

Ren et al., NeurIPS 2020 (balanced softmax); Elbatel et al., DeCaF @ MICCAI 2023, Table 2.
"""

from __future__ import annotations

from typing import Any

from fairflare.methods.base.catalog import Method
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg

# Settings of the task, similar to the data set HyperKvasir of the paper.
LEARNS: dict[str, Any] = {
    "phantom": "endoscopy",
    "phantom_samples": 4800,
    "phantom_min_share": 0.023,
    "partition": "dirichlet",
    "alpha": 0.5,
    "corrupted_sites": 0,
}
BALANCED = {"criterion": "balanced_softmax"}
JOB: dict[str, Any] = {
    "group": "tail",
    "source": "Elbatel et al., DeCaF @ MICCAI 2023",
    "task": "classification",
    "small": {"phantom_samples": 2400},  # few samples, so that a round takes seconds
    "num_sites": 4,
    "num_rounds": 5,
    "keeps": ("criterion", "projector_dim"),
}
METHODS = [
    Method(
        name="bsm_fl",
        kinds=("classification",),
        title="BSM-FL",
        summary="balanced softmax at the sites, FedAvg at the server",
        rule=FedAvg,
        training=LocalTraining,
        site=BALANCED,
        learns=LEARNS,
        page="fed_mas",
        **JOB,
    )
]
