"""Build and load the frozen prior networks of Fed-MAS, which are never trained or sent, and compute their hashes."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fairflare.base import checks
from fairflare.core.priors import TIMM
from fairflare.tasks.networks import (
    HEADS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    build_classifier,
    load_fitting,
    match_name,
    read_checkpoint,
)

# Weights of the embedded prior network, trained by benchmarks/train_prior.py on synthetic images. They are part of the
# package, so nothing is downloaded.
EMBEDDED_FILE = Path(__file__).parents[1] / "data" / "weights" / "prior_small.safetensors"
EMBEDDED_WIDTHS = (16, 32, 48, 96)
PRIOR_NETWORKS = ("embedded", "resnet18", "resnet50", "densenet121", "timm:<name>")
MOCO_PREFIX = "encoder_q."


class FrozenPrior(nn.Module):
    """Encode images by a frozen encoder, which always stays in evaluation mode and has no gradients.

    Args:
        encoder: network from images (n, 3, height, width), normalised as ImageNet, to features (n, width).
        name: name of the architecture.
        width: number of features of the encoder, Fed-MAS's prior dimension.
        image_size: height and width to which images are resized first; ``None`` if images are not resized.
    """

    def __init__(self, encoder: nn.Module, name: str, width: int, image_size: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.name = name
        self.width = width
        self.image_size = image_size
        self.requires_grad_(False)
        self.eval()
        self.fingerprint = fingerprint(encoder.state_dict(), f"{name}/{image_size}")

    def train(self, mode: bool = True) -> FrozenPrior:
        """Ignore the wanted mode: the prior network stays in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the features, (n, width), of images (n, 1 or 3, height, width) in [0, 1]."""
        if inputs.shape[1] == 1:
            inputs = inputs.expand(-1, 3, -1, -1)
        if self.image_size is not None and tuple(inputs.shape[2:]) != (self.image_size,) * 2:
            inputs = nn.functional.interpolate(
                inputs, (self.image_size,) * 2, mode="bilinear", antialias=True, align_corners=False
            )
        mean, std = (inputs.new_tensor(values).view(-1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        return self.encoder((inputs - mean) / std)


def fingerprint(state: Mapping[str, torch.Tensor], extra: str = "") -> str:
    """Return a short hash of the names, shapes and values (as float32) of a network's tensors.

    The hash of a file's network is the same on every machine.
    """
    digest = hashlib.sha256(extra.encode())
    for name in sorted(state):
        tensor = state[name].detach().to("cpu", torch.float32).contiguous()
        if not name.endswith("num_batches_tracked"):
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]  # 64 bits


def load_prior(
    network: str = "embedded", checkpoint: str | Path | None = None, image_size: int | None = None
) -> FrozenPrior:
    """Return a prior network with the weights of a checkpoint; nothing is downloaded, and no code in it is executed.

    Args:
        network: ``"embedded"`` (a small ResNet with 96 features), ``"resnet50"`` (2048 features; the MoCo v2
            checkpoint fits), ``"resnet18"`` (512), ``"densenet121"`` (1024), or ``"timm:<name>"``, any image encoder
            of the package timm, which must then be installed at every site.
        checkpoint: path of a plain state dict, alone or under ``state_dict``, with torchvision's, MONAI's or timm's
            names. MoCo's layout ``module.encoder_q.*`` is understood; MoCo's key encoder, queue and head are left out.
            ``None`` stands for the packaged weights, for ``"embedded"`` only.
        image_size: see :class:`FrozenPrior`; a ResNet-50 trained on 224x224 images finds little in 48x48.

    Raises:
        ValueError: the network needs a checkpoint and none is given; or the checkpoint is missing, damaged, pickled or
            of another architecture (the message names the keys that differ), or has values that are not finite.
    """
    if not re.fullmatch(TIMM, str(network)):
        checks.choice("prior_network", network, PRIOR_NETWORKS)
    if image_size is not None:
        checks.whole("prior_image_size", image_size, low=32)
    path = EMBEDDED_FILE if checkpoint is None and network == "embedded" else checkpoint
    if path is None:
        raise ValueError(
            f"prior_network {network!r} needs a checkpoint: name the file with 'prior' in the site's fairflare.json, "
            "or with the setting prior. For 'resnet50' the published MoCo v2 file with keys 'module.encoder_q.*' fits; "
            "prior_network 'embedded' needs none"
        )
    path = Path(path).expanduser()
    tensors = read_checkpoint(path)
    with torch.random.fork_rng(devices=[]):  # keep torch's random state, as building a network draws initial weights
        encoder, width = build_encoder(network)
    queries = {name.partition(MOCO_PREFIX)[2]: tensor for name, tensor in tensors.items() if MOCO_PREFIX in name}
    named = {match_name(name): tensor for name, tensor in (queries or tensors).items()}
    needed = encoder.state_dict()
    load_fitting(
        encoder,
        {name: tensor for name, tensor in named.items() if name in needed or not name.startswith(HEADS)},
        f"checkpoint {path} does not fit the prior network {network!r}",
        f". Choose the prior_network that the file is of; for MoCo's layout the keys start with 'module.{MOCO_PREFIX}'",
    )
    return FrozenPrior(encoder, network, width, image_size)


def build_encoder(network: str) -> tuple[nn.Module, int]:
    """Build an encoder (n, 3, height, width) -> (n, width) with random weights; return the encoder and the width."""
    if network.startswith("timm:"):
        return _timm_encoder(network.removeprefix("timm:"))
    if network in ("resnet18", "densenet121"):
        model = build_classifier(
            network, in_channels=3, classes=2, features=(64, 128, 256, 512), norm_momentum=0.1, max_pool=True
        )
        return model.encoder, model.head.weight.shape[1]
    from monai.networks.nets.resnet import ResNet

    small = network == "embedded"
    encoder = ResNet(
        "basic" if small else "bottleneck",
        [1, 1, 1, 1] if small else [3, 4, 6, 3],
        list(EMBEDDED_WIDTHS) if small else [64, 128, 256, 512],
        spatial_dims=2,
        n_input_channels=3,
        conv1_t_size=5 if small else 7,
        conv1_t_stride=2,
        no_max_pool=small,
        bias_downsample=False,
        feed_forward=False,
    )
    if not small:
        return encoder, 2048
    # ReLU features are positive, and those of a small network are all alike. Without their mean, cosines between
    # features differ from image to image.
    norm = nn.BatchNorm1d(EMBEDDED_WIDTHS[-1], affine=False)
    return nn.Sequential(OrderedDict(body=encoder, norm=norm)), EMBEDDED_WIDTHS[-1]


def _timm_encoder(name: str) -> tuple[nn.Module, int]:
    try:
        encoder = importlib.import_module("timm").create_model(name, pretrained=False, num_classes=0)
    except Exception as error:  # besides ImportError, timm raises its own RuntimeError for an unknown name
        problem = (
            "needs the package timm at every site: pip install timm"
            if isinstance(error, ImportError)
            else f"cannot be built: {error}"
        )
        raise ValueError(f"prior_network 'timm:{name}' {problem}") from error
    return encoder, int(encoder.num_features)
