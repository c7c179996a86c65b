"""Build classification networks (MONAI's encoder, classifier head, projection head), and load checkpoints."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, normalize

from fairflare.base import checks
from fairflare.core.aggregation.low_rank import FACTOR

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# {name of a vision transformer: (width, number of blocks, number of attention heads)}
VITS = {"vit_mini": (64, 2, 4), "vit_s": (384, 12, 6), "vit_b": (768, 12, 12), "vit_l": (1024, 24, 16)}
# Prefixes that training scripts put before the names of an encoder's tensors.
PREFIXES = re.compile(r"^((module|model|encoder|backbone|net)\.)+")
HEADS = ("fc.", "head.", "classifier.", "class_layers.", "projector.", "neck.", "retrained.")


class CosineHead(nn.Module):
    r"""Compute logits as scaled cosines of features and class vectors, :math:`s \cos(h, w_c)` (LDAM's classifier).

    Args:
        width: number of features.
        classes: number of class vectors.
        scale: s, ``> 0``; without a scale the logits, in [-1, 1], would give nearly equal probabilities.
    """

    def __init__(self, width: int, classes: int, scale: float = 30.0) -> None:
        super().__init__()
        self.scale = checks.number("scale", scale, above=0)
        self.weight = nn.Parameter(torch.empty(classes, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new class vectors in random directions, from torch's current random state."""
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.weight.copy_(normalize(self.weight, dim=1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.scale * linear(normalize(features, dim=1), normalize(self.weight, dim=1))


class GivenHead(nn.Module):
    """Classify features with a linear layer that the sites do not train (CReFF: the server trains it).

    Its weight and bias are buffers, not parameters, so a site's optimizer does not change them.

    Args:
        like: the layer whose weight and bias are copied at the beginning.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", like.weight.detach().clone())
        self.register_buffer("bias", like.bias.detach().clone())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return linear(features, self.weight, self.bias)


class Classifier(nn.Module):
    """Classify images by an encoder and a head, after normalising inputs in [0, 1] with ImageNet's mean and deviation.

    Args:
        encoder: network from (n, channels, height, width), or for volumes (n, channels, height, width, depth), to
            (n, width).
        width: number of features of the encoder.
        classes: number of classes, which is the number of logits.
        in_channels: 3, or another number (normalised with the mean over ImageNet's three channels).
        projector_dim: output width of a projection head beside the classifier, a two-layer perceptron (Fed-MAS);
            ``None`` for no such head.
        neck_dim: output width of a projection head between encoder and classifier, a two-layer perceptron (MOON);
            ``None`` for no such head.
        cosine_scale: scale of a :class:`CosineHead` as the classifier; ``None`` if the classifier is linear.
        retrained_head: True: a second, linear classifier, ``retrained``, is used in evaluation mode (CReFF).
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        classes: int,
        *,
        in_channels: int = 3,
        projector_dim: int | None = None,
        neck_dim: int | None = None,
        cosine_scale: float | None = None,
        retrained_head: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.neck: nn.Module | None = None
        if neck_dim is not None:
            self.neck = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, neck_dim))
            width = neck_dim
        self.head = nn.Linear(width, classes) if cosine_scale is None else CosineHead(width, classes, cosine_scale)
        self.retrained = GivenHead(self.head) if retrained_head and isinstance(self.head, nn.Linear) else None
        self.projector = None if projector_dim is None else nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, projector_dim)
        )  # fmt: skip
        self.statistics: list[Any] = [
            values if in_channels == 3 else sum(values) / 3 for values in (IMAGENET_MEAN, IMAGENET_STD)
        ]

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the features, (n, width), that the encoder computes from the inputs and the classifier head gets."""
        mean, std = (inputs.new_tensor(values).view(-1, *[1] * (inputs.ndim - 2)) for values in self.statistics)
        features = self.encoder((inputs - mean) / std)
        return features if self.neck is None else self.neck(features)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Return the projection head's output, (n, projector_dim), for the features that :meth:`embed` returns.

        Raises:
            RuntimeError: the network was built without a projection head.
        """
        if self.projector is None:
            raise RuntimeError("this network has no projection head; set projector_dim of the task")
        return self.projector(features)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.head if self.retrained is None or self.training else self.retrained)(self.embed(inputs))


def build_classifier(
    network: str,
    *,
    in_channels: int,
    classes: int,
    features: Sequence[int],
    norm_momentum: float,
    image_size: Sequence[int] = (224, 224),
    patch_size: int = 16,
    max_pool: bool = True,
    **heads: Any,
) -> Classifier:
    """Build a classification network, initialised from torch's current random state.

    Args:
        network: ``"resnet18"``, ``"densenet121"``, or a vision transformer of ``VITS``.
        in_channels: number of channels of the images, 1 or 3.
        classes: number of classes, ``>= 2``.
        features: widths of the ResNet's four stages.
        norm_momentum: momentum of all batch norms.
        image_size: size of the inputs; two sides make a network for images, three a network for volumes. The sides
            themselves matter to a vision transformer only.
        patch_size: side of a vision transformer's patch, in every direction.
        max_pool: whether the ResNet pools after its first convolution; small images need no pooling.
        heads: ``projector_dim``, ``neck_dim``, ``cosine_scale`` and ``retrained_head`` of :class:`Classifier`.
    """
    if checks.choice("network", network, ("resnet18", "densenet121", *VITS)) in VITS:
        from fairflare.tasks.encoders import VisionTransformer

        encoder: Any = VisionTransformer(network, VITS[network], in_channels, image_size, patch_size)
        width = encoder.width
    else:
        encoder = make_network(encoder_definition(network, len(image_size), in_channels, features, max_pool, classes))
        width = features[-1]
        if network != "resnet18":
            width = encoder.class_layers.out.in_features
            encoder.class_layers.out = nn.Identity()
    model = Classifier(encoder, width, classes, in_channels=in_channels, **heads)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = norm_momentum
    return model


def encoder_definition(
    network: str, dimensions: int, in_channels: int, features: Sequence[int], max_pool: bool, classes: int,
    head: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the definition of MONAI's ``"resnet18"`` or ``"densenet121"``; ``head``: with the ResNet's classifier."""
    if network == "densenet121":
        return {
            "_target_": "monai.networks.nets.densenet.DenseNet121", "spatial_dims": dimensions,
            "in_channels": in_channels, "out_channels": classes,
        }  # fmt: skip
    return {
        "_target_": "monai.networks.nets.resnet.ResNet", "block": "basic", "layers": [2, 2, 2, 2],
        "block_inplanes": list(features), "spatial_dims": dimensions, "n_input_channels": in_channels,
        "conv1_t_size": 7, "conv1_t_stride": 2, "no_max_pool": not max_pool, "bias_downsample": False,
        "feed_forward": head, **({"num_classes": classes} if head else {}),
    }  # fmt: skip


def make_network(definition: Mapping[str, Any]) -> nn.Module:
    """Make a network of MONAI from its class and arguments, initialised from torch's current random state."""
    module, _, name = definition["_target_"].rpartition(".")
    arguments = {key: value for key, value in definition.items() if key[0] != "_"}
    return getattr(importlib.import_module(module), name)(**arguments)


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint file; no code in the file is executed.

    Args:
        path: ``.safetensors``, or a file of ``torch.save`` with a state dict, alone or under ``state_dict``/``model``.

    Raises:
        ValueError: the file is missing or truncated, holds no plain state dict, or has values that are not finite; the
            message says which.
    """
    if not path.is_file():
        raise ValueError(
            f"checkpoint {path} does not exist; nothing is downloaded: put the file there, or correct the path"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and safetensors raise many kinds of errors for a damaged file
        raise ValueError(
            f"checkpoint {path} cannot be read as plain tensors ({type(error).__name__}): it is damaged, or holds "
            "pickled objects, which are refused; save its state dict alone, with torch.save or as .safetensors"
        ) from error
    entries = content if isinstance(content, Mapping) else {}
    entries = next((entries[key] for key in ("state_dict", "model") if isinstance(entries.get(key), Mapping)), entries)
    tensors = {str(name): value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    strange = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    checks.refuse({
        "no state dict": not entries,
        f"no tensors, only {', '.join(map(str, list(entries)[:5]))}": not tensors,
        f"values that are NaN or infinite in tensor '{''.join(strange[:1])}'": strange,
    }, lambda problem: ValueError(f"checkpoint {path} holds {problem}"))  # fmt: skip
    return tensors


def match_name(name: str) -> str:
    """Rename a tensor: drop the prefixes of training scripts, and turn torchvision's DenseNet names into MONAI's."""
    return re.sub(r"(denselayer\d+)\.(norm|conv)\.?([12])\.", r"\1.layers.\2\3.", PREFIXES.sub("", name))


def load_network(model: nn.Module, path: Path) -> str:
    """Load a checkpoint of a whole network, such as an ``FL_global_model.pt``, and return one line for the log.

    Raises:
        ValueError: the file cannot be read, or a tensor is missing, unexpected or of another shape (names it).
    """
    load_fitting(model, read_checkpoint(path), f"checkpoint {path} does not fit the network")
    return f"initial weights of the whole network from {path.name}"


def load_encoder(model: Classifier, path: Path) -> str:
    """Load a checkpoint into the encoder, and into head and projector if they fit; return one line for the log.

    Raises:
        ValueError: the file cannot be read, or does not fit the encoder (names what differs).
    """
    stored = {match_name(name): tensor for name, tensor in read_checkpoint(path).items()}
    load_fitting(
        model.encoder, {name: tensor for name, tensor in stored.items() if not name.startswith(HEADS)},
        f"checkpoint {path} does not fit the network",
    )  # fmt: skip
    for head in ("head", "fc", "classifier", "class_layers.out") if isinstance(model.head, nn.Linear) else ():
        given = {kind: stored[f"{head}.{kind}"] for kind in ("weight", "bias") if f"{head}.{kind}" in stored}
        if not mismatch(model.head.state_dict(), given):
            for classifier in filter(None, (model.head, model.retrained)):
                classifier.load_state_dict(given)
            projector = " (and projector)" * _load_projector(model, stored)
            return f"initial weights of encoder and head{projector} from {path.name}"
    return f"initial weights of the encoder from {path.name}; the head is random"


def _load_projector(model: Classifier, found: Mapping[str, torch.Tensor]) -> bool:
    """Load the projection head of a checkpoint if it fits the model's, and return whether it was loaded."""
    own = {name.partition(".")[2]: tensor for name, tensor in found.items() if name.startswith("projector.")}
    if model.projector is None or mismatch(model.projector.state_dict(), own):
        return False
    load_fitting(model.projector, own, "")
    return True


def load_fitting(network: nn.Module, found: Mapping[str, torch.Tensor], refusal: str, remedy: str = "") -> None:
    """Load tensors into a network that has the same names and shapes; a batch norm's counter may be missing.

    Args:
        network: the network, which is changed in place.
        found: the tensors by name.
        refusal: beginning of the error's message.
        remedy: end of the error's message.

    Raises:
        ValueError: names or shapes differ; the message lists the differences.
    """
    own = network.state_dict()
    found = rename_for_adapters(own, found)
    if problems := mismatch(own, found):
        raise ValueError(f"{refusal}: {problems}{remedy}")
    network.load_state_dict({name: found.get(name, tensor).to(tensor.dtype) for name, tensor in own.items()})


def rename_for_adapters(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename tensors of a network without adapters to the names that they have in a network with adapters.

    The adapters' own tensors are taken unchanged from ``own``, the state of the network with adapters. Tensors of a
    network with adapters are returned as they are.
    """
    if any(FACTOR.fullmatch(name) for name in found):
        return dict(found)
    inner = {name.replace(".base_layer.", "."): name for name in own if ".base_layer." in name}
    return {
        **{name: tensor for name, tensor in own.items() if FACTOR.fullmatch(name)},
        **{inner.get(name, name): tensor for name, tensor in found.items()},
    }


def mismatch(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str:
    """Describe which tensors of a checkpoint are missing, unexpected or of another shape; empty if all fit."""
    missing = [n for n in own if n not in found and not n.endswith("num_batches_tracked")]
    shapes = [n for n, t in own.items() if n in found and found[n].shape != t.shape]
    extra = [n for n in found if n not in own]
    return "; ".join(
        [
            *(
                f"{what} {checks.few(names, 3)}"
                for what, names in (("missing", missing), ("unexpected", extra))
                if names
            ),
            *(f"{n} has the shape {tuple(found[n].shape)}, needed is {tuple(own[n].shape)}" for n in shapes[:3]),
            *[f"{len(shapes) - 3} more shapes differ"] * (len(shapes) > 3),
        ]
    )
