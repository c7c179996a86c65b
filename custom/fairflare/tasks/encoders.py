"""Build MONAI's large networks for images and volumes: ViT, SwinUNETR, SegResNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from monai.networks.nets.vit import ViT
from torch import nn

from fairflare.base import checks

#: By network: MONAI's class, its argument for the width of the first stage, the default width and what a width is a
#: multiple of; what an image's sides are multiples of, since the network halves the image several times, and at least
#: (a SwinUNETR's last stage would otherwise be one pixel, which instance norms refuse).
SEGMENTERS = {
    "swin_unetr": ("monai.networks.nets.swin_unetr.SwinUNETR", "feature_size", 24, 12, 32, 64),
    "segresnet": ("monai.networks.nets.segresnet.SegResNet", "init_filters", 16, 8, 8, 8),
}


class VisionTransformer(ViT):
    """Encode images or volumes by MONAI's vision transformer: the features of the class token, (n, width).

    Names of tensors are those of MONAI's ``ViT``.

    Args:
        name: name of the network, for the error if a package is absent.
        shape: width, number of blocks and number of attention heads.
        in_channels: number of channels of the inputs.
        image_size: size of the inputs, two or three sides, each a multiple of ``patch_size``.
        patch_size: side of a patch, in every direction.

    Raises:
        ValueError: a side is no multiple of ``patch_size``, or the package einops is absent.

    Source:
        Dosovitskiy et al., ICLR 2021; widths of S and B as in DeiT (Touvron et al., ICML 2021).
    """

    def __init__(
        self, name: str, shape: tuple[int, int, int], in_channels: int, image_size: Sequence[int], patch_size: int
    ) -> None:
        needs_einops(name)
        if any(side % patch_size for side in image_size):
            raise ValueError(f"image_size must be multiples of patch_size={patch_size}, got {tuple(image_size)}")
        self.width, blocks, heads = shape
        super().__init__(
            in_channels,
            tuple(image_size),
            patch_size,
            hidden_size=self.width,
            mlp_dim=4 * self.width,
            num_layers=blocks,
            num_heads=heads,
            spatial_dims=len(image_size),
            qkv_bias=True,
            classification=True,
        )
        del self.classification_head
        for block in self.blocks:
            block.norm_cross_attn = nn.Identity()  # MONAI creates a norm here that it never calls
        #: Number of the image's patches along each axis.
        self.grid = tuple(side // patch_size for side in image_size)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-6  # the value with which all published weights were trained

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)[0][:, 0]


def segmenter(
    network: str, *, in_channels: int, classes: int, image_size: Sequence[int], width: int | None = None
) -> dict[str, Any]:
    """Return the definition of a segmentation network with one output channel for each class.

    :func:`fairflare.tasks.networks.make_network` makes the network.

    Args:
        network: ``"swin_unetr"`` or ``"segresnet"``.
        in_channels, classes: numbers of input and output channels.
        image_size: size of the inputs, two or three sides.
        width: width of the first stage; a multiple of 12, or of 8 for ``"segresnet"``; ``None`` for the default width.

    Raises:
        ValueError: the network cannot have this image size or width, or the package einops is absent.
    """
    check_segmenter(network, image_size, width)
    if network == "swin_unetr":
        needs_einops(network)
    target, width_argument, usual_width, *_ = SEGMENTERS[network]
    return {
        "_target_": target, width_argument: usual_width if width is None else width, "spatial_dims": len(image_size),
        "in_channels": in_channels, "out_channels": classes,
    }  # fmt: skip


def check_segmenter(network: str, image_size: Sequence[int], width: int | None) -> None:
    """Raise ``ValueError`` for an image size or a width that a segmentation network cannot have."""
    *_, step, stride, least = SEGMENTERS[checks.choice("network", network, SEGMENTERS)]
    odd = next((side for side in image_size if side % stride or side < least), None)
    checks.refuse(
        {
            f"image_size for {network} must be multiples of {stride}, at least {least}, got {odd}": odd is not None,
            f"width for {network} must be a multiple of {step}, got {width}": width is not None and width % step,
        }
    )


def needs_einops(network: str) -> None:
    """Raise ``ValueError`` if the package einops, which MONAI's transformers need, is not installed."""
    try:
        import einops  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"network={network!r} needs the package einops; install it with: pip install 'fairflare[adapters]'"
        ) from error
