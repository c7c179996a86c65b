"""Build nnU-Net's plain convolutional U-Net from a plan.

MONAI's ``DynUNet`` is another network where kernels differ: its decoder takes the kernels of the next deeper stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn

Axes = Sequence[int]
SLOPE = 0.01  # of the leaky rectifier, and of the initial weights' scale (He et al. 2015)


class PlainUNet(nn.Module):
    """Segment volumes or pictures at every resolution of the decoder; the names of tensors are nnU-Net's.

    In training the outputs at full resolution have an attribute ``coarser``: the outputs of the other resolutions, the
    finest first, for deep supervision. Methods thus handle one tensor, and only the task's loss looks at the others.

    Args:
        in_channels, outputs: number of channels of the images, and of outputs.
        features: number of features of each stage of the encoder.
        strides, kernels: of each stage along each axis.
        convolutions: number of convolutions of each stage of the encoder and then of the decoder.

    Source:
        Isensee et al., Nature Methods 18 (2021); ``PlainConvUNet`` of nnU-Net 2.8.
    """

    def __init__(
        self,
        in_channels: int,
        outputs: int,
        *,
        features: Sequence[int],
        strides: Sequence[Axes],
        kernels: Sequence[Axes],
        convolutions: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        super().__init__()
        dimensions = len(kernels[0])
        conv, upsampling = (getattr(nn, f"{kind}{dimensions}d") for kind in ("Conv", "ConvTranspose"))
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.stages = nn.ModuleList(
            nn.Sequential(_Stage(*stage))
            for stage in zip(convolutions[0], [in_channels, *features[:-1]], features, kernels, strides, strict=True)
        )
        below, beside = features[:0:-1], features[-2::-1]
        self.decoder.stages = nn.ModuleList(
            _Stage(count, 2 * width, width, kernel, [1] * dimensions)
            for count, width, kernel in zip(convolutions[1], beside, kernels[-2::-1], strict=True)
        )
        self.decoder.transpconvs = nn.ModuleList(
            upsampling(deep, width, tuple(stride), tuple(stride))
            for deep, width, stride in zip(below, beside, strides[:0:-1], strict=True)
        )
        self.decoder.seg_layers = nn.ModuleList(conv(width, outputs, 1) for width in beside)
        for module in self.modules():
            if isinstance(module, (conv, upsampling)):
                nn.init.kaiming_normal_(module.weight, a=SLOPE)
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        encoder, decoder = (cast("Any", part) for part in (self.encoder, self.decoder))
        skips = [*accumulate(encoder.stages, lambda values, stage: stage(values), initial=images)]
        values, results = skips.pop(), list[torch.Tensor]()
        for up, stage, head in zip(decoder.transpconvs, decoder.stages, decoder.seg_layers, strict=True):
            values = stage(torch.cat((up(values), skips.pop()), 1))
            if self.training or not len(skips) > 1:
                results.insert(0, head(values))
        if self.training:
            vars(results[0])["coarser"] = results[1:]
        return results[0]


class _Stage(nn.Module):
    """Compute some convolutions one after the other, each with its norm; the first is strided."""

    def __init__(self, count: int, before: int, width: int, kernel: Axes, stride: Axes) -> None:
        super().__init__()
        self.convs = nn.Sequential(*(
            _Convolution(before if first else width, width, kernel, stride if first else [1] * len(stride))
            for first in [True, *[False] * (count - 1)]
        ))  # fmt: skip

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.convs(values)


class _Convolution(nn.Module):
    def __init__(self, before: int, width: int, kernel: Axes, stride: Axes) -> None:
        super().__init__()
        conv, norm = (getattr(nn, f"{kind}{len(kernel)}d") for kind in ("Conv", "InstanceNorm"))
        self.conv = conv(before, width, tuple(kernel), tuple(stride), tuple(side // 2 for side in kernel))
        self.norm = norm(width, eps=1e-5, affine=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(self.norm(self.conv(values)), SLOPE, inplace=True)
