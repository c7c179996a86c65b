"""Test that site (by modules) and server (by names) give a tensor the same layer."""

from __future__ import annotations

import pytest
import torch
from monai.networks.nets import BasicUNet
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fairflare.core import similarity
from fairflare.core.features.layers import layer_of, layers_of, parameter_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.BatchNorm1d(3)
        self.pool = nn.Identity()
        self.early = parametrizations.weight_norm(nn.Linear(3, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.shared = self.late

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.pool(self.early(x)) * self.scale)


MODELS = {
    "plain": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), nn.BatchNorm2d(2)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 2)),
    "top-level parameter": Block,
    "parametrized itself": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "deeper": lambda: nn.Sequential(nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3)))),
}
LAYERS = {
    "plain": ["0", "1"],
    "weight norm": ["0", "1"],
    "spectral norm": ["0", "1"],
    "top-level parameter": ["", "late", "early", "shared"],
    "parametrized itself": [""],
    "deeper": ["0.0"],
}


@pytest.mark.parametrize("case", MODELS)
def test_site_and_server_agree(case: str) -> None:
    model = MODELS[case]()
    names = list(model.state_dict())
    owners = layers_of(names)
    assert list(owners) == names
    assert list(parameter_layers(model)) == list(dict.fromkeys(owners.values())) == LAYERS[case]
    assert owners == {name: layer_of(name) for name in names}
    for name, module in parameter_layers(model).items():
        assert module is model.get_submodule(name)
        assert not isinstance(module, nn.utils.parametrize.ParametrizationList)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("scale", ""),
        ("late.num_batches_tracked", "late"),
        ("a.b.weight", "a.b"),
        ("0.parametrizations.weight.original0", "0"),
        ("a.0.parametrizations.weight.0._u", "a.0"),
        ("parametrizations.weight.original1", ""),
        ("weight_g", ""),
        ("my_parametrizations.weight", "my_parametrizations"),
    ],
)
def test_layer_of_a_name(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_module_under_two_names_is_there_twice() -> None:
    layers = parameter_layers(Block())
    assert layers["shared"] is layers["late"]


def test_unet_has_a_layer_for_each_convolution_and_norm() -> None:
    model = BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, features=(8, 8, 16, 16, 16, 8), norm="batch")
    kinds = [type(m) for m in parameter_layers(model).values()]
    assert len(kinds) == 18 + 18 + 4 + 1
    assert kinds.count(nn.BatchNorm2d) == 18
    assert kinds.count(nn.ConvTranspose2d) == 4


def test_one_name_for_all() -> None:
    assert similarity.parameter_layers is parameter_layers
