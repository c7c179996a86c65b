"""BSM-FL: balanced softmax at the sites, FedAvg at the server; the first baseline of Fed-MAS, and its local training.

Ren et al., NeurIPS 2020 (balanced softmax); Elbatel et al., DeCaF @ MICCAI 2023, Table 2.
"""

from __future__ import annotations

from typing import Any

from fairflare.methods.base.catalog import Method
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg

# Of the paper (HyperKvasir) and, where it is silent, its code.
SETTINGS: dict[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "schedule": "cosine",
    "lowest_rate": 1e-4,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "batch_size": 64,
    "local_epochs": 10,
    "max_grad_norm": 5.0,
    "keep_optimizer_state": False,
    "criterion": "balanced_softmax",
    "augment": True,
}
LEARNS: dict[str, Any] = {
    "phantom": "endoscopy",
    "phantom_samples": 4800,
    "phantom_min_share": 0.023,
    "partition": "dirichlet",
    "alpha": 0.5,
    "corrupted_sites": 0,
}
JOB: dict[str, Any] = {
    "site": SETTINGS,
    "source": "Elbatel et al., DeCaF @ MICCAI 2023",
    "task": "classification",
    # A narrow network, few images and rounds: Adam gets further in them.
    "small": {
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "schedule": "constant",
        "weight_decay": 0.0,
        "batch_size": 32,
        "local_epochs": 2,
    },
    "num_sites": 4,
    "num_rounds": 5,
    "keeps": ("criterion", "projector_dim"),
}
METHODS = [
    Method(
        name="bsm_fl",
        title="BSM-FL",
        summary="balanced softmax at the sites, FedAvg at the server",
        rule=FedAvg,
        training=LocalTraining,
        learns=LEARNS,
        page="fed_mas",
        **JOB,
    )
]
