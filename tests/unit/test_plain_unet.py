"""Compare nnU-Net's network with nnU-Net's own, whose numbers are stored.

``python -m tests.unit.test_plain_unet``, where nnU-Net 2.8.1 is installed too, writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.tasks.volumes.plain_unet import PlainUNet

STORED = Path(__file__).with_name("nnunet_networks.json")
CUBE, FLAT = [3, 3, 3], [1, 3, 3]
PLANS: dict[str, dict[str, Any]] = {
    "isotropic": {"kernels": [CUBE] * 4, "strides": [[1, 1, 1], *[[2, 2, 2]] * 3]},
    "first stage flat": {"kernels": [FLAT, *[CUBE] * 3], "strides": [[1, 1, 1], [1, 2, 2], *[[2, 2, 2]] * 2]},
    "two stages flat": {"kernels": [FLAT, FLAT, CUBE, CUBE], "strides": [[1, 1, 1], *[[1, 2, 2]] * 2, [2, 2, 2]]},
}
FEATURES, OUTPUTS = [8, 16, 32, 64], 3


def figures(network: torch.nn.Module) -> dict[str, Any]:
    """Return names, sizes and outputs of a network whose weights, and images, are waves."""
    own = dict(network.named_parameters())
    with torch.no_grad():
        for name, tensor in own.items():
            wave = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) * 0.7 + len(name)).view(tensor.shape)
            tensor.copy_(wave / max(tensor[0].numel(), 1) ** 0.5 + (1 if name.endswith("norm.weight") else 0))
        images = torch.sin(torch.arange(8 * 16 * 24) * 0.01).view(1, 1, 8, 16, 24)
        found = network.eval()(images)
    return {
        "parameters": sum(tensor.numel() for tensor in own.values()), "names": sorted(own),
        "shapes": [list(own[name].shape) for name in sorted(own)],
        "outputs": found[0, :, ::3, ::5, ::7].flatten().tolist(),
    }  # fmt: skip


def plain(plan: dict[str, Any]) -> PlainUNet:
    return PlainUNet(1, OUTPUTS, features=FEATURES, convolutions=([2] * 4, [2] * 3), **plan)


@pytest.mark.parametrize("name", PLANS)
def test_names_sizes_and_outputs_are_those_of_nnunets_own_network(name: str) -> None:
    found, stored = figures(plain(PLANS[name])), json.loads(STORED.read_text("utf-8"))[name]
    assert found["outputs"] == pytest.approx(stored.pop("outputs"), abs=1e-5)
    stored.pop("keys")
    assert {key: found[key] for key in stored} == stored


def test_the_decoder_has_the_kernels_of_its_own_resolution() -> None:
    """Count what MONAI's DynUNet, whose decoder takes the kernels one stage deeper, has otherwise: 349,169."""
    counts = [sum(tensor.numel() for tensor in plain(plan).parameters()) for plan in PLANS.values()]
    assert counts[:2] == [351_329, 346_065]


def written() -> dict[str, Any]:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet  # type: ignore[import-not-found]

    found = {}
    for name, plan in PLANS.items():
        network = PlainConvUNet(
            1, 4, FEATURES, torch.nn.Conv3d, plan["kernels"], plan["strides"], 2, OUTPUTS, 2, conv_bias=True,
            norm_op=torch.nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=torch.nn.LeakyReLU,
            nonlin_kwargs={"inplace": True},
        )  # fmt: skip
        found[name] = {**figures(network), "keys": sorted(network.state_dict())}
    return found


if __name__ == "__main__":
    STORED.write_text(json.dumps(written()), "utf-8")
