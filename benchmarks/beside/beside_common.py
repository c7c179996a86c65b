"""Provide network, images and local training that all cases of ``bench_beside.py`` share, in PyTorch and MONAI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from monai.losses import DiceLoss
from monai.networks.nets import BasicUNet
from torch import Tensor, nn

SITES, ROUNDS, BATCH, SIZE = 6, 3, 8, 64
IMAGES = {"training": 48, "validation": 12, "test": 12}
FEATURES = (8, 8, 16, 32, 64, 8)
NORM = ("batch", {"momentum": 0.3})  # a high momentum, as there are few steps
LOSS = DiceLoss(sigmoid=True)


class Net(BasicUNet):
    """Define the network without arguments, as FLARE's recipe makes it from its name."""

    def __init__(self) -> None:
        torch.manual_seed(0)  # the same first model everywhere
        super().__init__(spatial_dims=2, in_channels=1, out_channels=1, features=FEATURES, norm=NORM, bias=False)


def build() -> nn.Module:
    return Net()


def images(site: int, split: str) -> tuple[Tensor, Tensor]:
    """Draw discs on noise, lighter or darker from site to site; (n, 1, 64, 64) and masks of the same shape."""
    generator = torch.Generator().manual_seed(1000 * site + list(IMAGES).index(split))
    n = IMAGES[split]
    place = torch.arange(SIZE).float()
    middle = SIZE * (0.3 + 0.4 * torch.rand(n, 2, 1, 1, generator=generator))
    radius = SIZE * (0.1 + 0.15 * torch.rand(n, 1, 1, generator=generator))
    distance = ((place[:, None] - middle[:, 0]) ** 2 + (place - middle[:, 1]) ** 2).sqrt()
    masks = (distance < radius).float()[:, None]
    noise = torch.randn(n, 1, SIZE, SIZE, generator=generator)
    return (0.5 + 0.25 * site) * masks + 0.3 * noise, masks


def batches(x: Tensor, y: Tensor, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.arange(len(x)) if order is None else order
    for chosen in order.split(BATCH):
        yield x[chosen], y[chosen]


def train(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
    """Train one epoch with Adam as in Fed-LWR."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4, betas=(0.9, 0.99))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    model.train()
    for inputs, targets in batches(x, y, order):
        optimizer.zero_grad()
        LOSS(model(inputs), targets).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the mean Dice of the images."""
    model.eval()
    found = []
    for inputs, targets in batches(x, y):
        predicted = (model(inputs) > 0).float()
        both = (predicted * targets).sum((1, 2, 3))
        found.append(2 * both / (predicted.sum((1, 2, 3)) + targets.sum((1, 2, 3))).clamp_min(1))
    return float(torch.cat(found).mean())


def average(states: list[Mapping[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    return {name: mean([state[name] for state in states], weights) for name in states[0]}


def mean(values: list[Tensor], weights: list[float]) -> Tensor:
    if not values[0].is_floating_point():
        return values[0]
    return torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0)
