"""The published setting of each method's experiments, beyond what the method's halves have as defaults: ``--paper``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What no setting can give: said by whoever asks for a paper's setting.
_IMAGENET = "ImageNet weights: without `initial_weights` in the server's fairflare.json the network starts from a seed"


@dataclass(frozen=True)
class Paper:
    """How a paper ran its method.

    Args:
        source: which of its experiments.
        num_rounds: T.
        num_sites: K.
        learns: settings of the task: network and input.
        lacks: what a run has to bring along to be the paper's.
    """

    source: str
    num_rounds: int
    num_sites: int
    learns: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()


FED_LWR = Paper(
    source="Yan et al., MICCAI 2024, section 3.1 (six-site prostate MRI)",
    num_rounds=200,
    num_sites=6,
    learns={
        "image_size": [384, 384],
        "in_channels": 3,
        "features": [32, 64, 128, 256, 512, 32],
        "norm_momentum": 0.1,
    },
    lacks=(
        "the images: six-site prostate MRI, or four-site fundus (--sites 4), with --data",
        "the authors' own U-Net, which is not published: MONAI's BasicUNet with the same widths stands for it",
    ),
)
FED_MRL = Paper(
    source="Sahoo et al., MICCAI 2024 (rounds, sites and batch size: the authors' code)",
    num_rounds=60,
    num_sites=4,
    learns={"network": "densenet121", "image_size": [224, 224], "in_channels": 3, "partition": "shards", "eta": 1.0},
    lacks=("the images: ISIC 2018 or Messidor-2, with --data", _IMAGENET),
)
_RESNET18 = {
    "network": "resnet18",
    "features": [64, 128, 256, 512],
    "max_pool": True,
    "image_size": [224, 224],
    "in_channels": 3,
}
FED_MAS = Paper(
    source="Elbatel et al., DeCaF @ MICCAI 2023 (HyperKvasir; batch size: the authors' code)",
    num_rounds=200,
    num_sites=8,
    learns=_RESNET18,
    lacks=(
        "the images: HyperKvasir (ISIC 2019: --sites 6 --set optimizer=adam --set learning_rate=3e-4), with --data",
        _IMAGENET,
        "the frozen network: MoCo-v2's ResNet-50 (800 epochs), named by `prior` in each site's fairflare.json",
    ),
)
FED_ISM = Paper(
    source="Wu et al., IJCAI 2024 and FedISM+ (20 sites by two pools, alpha 1, four of them corrupted)",
    num_rounds=300,
    num_sites=20,
    learns={**_RESNET18, "partition": "two_pool", "alpha": 1.0, "corrupted_sites": 4, "camera_shift": 0.0},
    lacks=("the images: RSNA ICH or ISIC 2019, with --data", _IMAGENET),
)

#: By the method's name. Baselines run as those of the papers whose task their jobs learn.
PAPERS: dict[str, Paper] = {
    "fed_avg": FED_LWR,
    "solo": FED_LWR,
    "ditto": FED_LWR,
    "cffl": FED_LWR,
    "cgsv": FED_LWR,
    "fed_lwr": FED_LWR,
    "fed_lwr_cosine": FED_LWR,
    "fed_lwr_last_layer": FED_LWR,
    "q_fed_avg": FED_LWR,
    "fed_ce": FED_LWR,
    "fed_nova": FED_MRL,
    "fed_prox": FED_MRL,
    "fed_bn": FED_MRL,
    "fed_mrl": FED_MRL,
    "bsm_fl": FED_MAS,
    "bsm_kd": FED_MAS,
    "fed_mas": FED_MAS,
    "creff": FED_MAS,
    "crt": FED_MAS,
    "moon": FED_MAS,
    "ldam": FED_MAS,
    "logit_adjustment": FED_MAS,
    "fed_lc": FED_MAS,
    "afl": FED_ISM,
    "fair_fed": FED_ISM,
    "fed_ga": FED_ISM,
    "fed_ism": FED_ISM,
    "fed_ism_plus_s": FED_ISM,
    "fed_ism_plus_l": FED_ISM,
}
