"""Test running statistics that are measured again against a reference in float64 that sees all images at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from monai.networks.nets.basic_unet import BasicUNet
from torch import nn

from fairflare.core.features.batch_norms import (
    Moments,
    Unmeasurable,
    measure,
    next_group,
    other_running,
    pool_statistics,
    registered_names,
    running_norms,
)
from fairflare.prediction.adapt import recalibrate
from fairflare.tasks.networks import build_classifier

from ..central_norms import central_statistics, differing

pytestmark = pytest.mark.usefixtures("one_thread")


def unet() -> nn.Module:
    torch.manual_seed(0)
    return BasicUNet(2, 1, 1, (4, 4, 8, 8, 8, 4), act=("relu", {"inplace": True}), norm=("batch", {}), bias=False)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return build_classifier(
        "resnet18", in_channels=1, classes=3, features=[4, 4, 8, 8], norm_momentum=0.1, projector_dim=4
    )


def images(count: int = 13, side: int = 32, seed: int = 1) -> list[torch.Tensor]:
    """Return images in batches of four; each image has its own brightness and contrast."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randn(count, 1, side, side, generator=g) * torch.rand(count, 1, 1, 1, generator=g)
    return list((found + torch.randn(count, 1, 1, 1, generator=g)).split(4))


@pytest.mark.parametrize(("make", "passes"), [(unet, 18), (resnet, 17)])
def test_group_by_group_is_what_all_images_in_one_place_give(make: Any, passes: int) -> None:
    model, batches = make(), images()
    wanted = central_statistics(model, torch.cat(batches))
    assert differing(model, wanted) > 0.1
    assert recalibrate(model, lambda: batches) == passes  # norms side by side (a shortcut's) share one
    assert differing(model, wanted) < 1e-5


def test_variance_is_unbiased_as_torch_has_it() -> None:
    values = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    model, norm = nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3, momentum=1.0)
    norm(values)
    recalibrate(model, lambda: values.split(3))
    torch.testing.assert_close(model[0].running_var, norm.running_var)
    torch.testing.assert_close(model[0].running_mean, norm.running_mean)


def test_measuring_changes_nothing() -> None:
    model, batches = unet(), images(5)
    model.train()
    model.conv_0.eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    measure(model, batches, next_group(model, batches[0]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(norm.track_running_stats for norm in running_norms(model).values())


def test_recalibrating_leaves_counters_and_parameters_alone() -> None:
    model = unet()
    before = copy.deepcopy(model.state_dict())
    recalibrate(model, lambda: images(5))
    changed = {name.rpartition(".")[2] for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"running_mean", "running_var"}


def test_moments_of_values_far_from_0() -> None:
    """Check a variance of which sums of squares in float32 would leave no digit."""
    values = 1e4 + 1e-2 * torch.randn(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: Moments | None = None
    for part in values.split([1, 999, 3000]):
        found = Moments.compute(part) if found is None else found.join(Moments.compute(part))
    assert found is not None
    assert found.count == 4000
    torch.testing.assert_close(found.squares / 4000, values.var(0, correction=0), rtol=1e-6, atol=0)


def test_pooled_by_hand() -> None:
    # site a: 1, 3 (mean 2, variance 1); site b: 8 (mean 8, variance 0); together mean 4, unbiased variance 26 / 2
    one = lambda x: torch.tensor([x])  # noqa: E731
    mean, variance = pool_statistics(
        {"a": one(2.0), "b": one(8.0)}, {"a": one(1.0), "b": one(0.0)}, {"a": 2 / 3, "b": 1 / 3}, 3
    )
    assert mean.item() == pytest.approx(4)
    assert variance.item() == pytest.approx(13)


# ------------------------------------------------------------------------------------------------ odd networks


class Odd(nn.Module):
    """Define a norm that runs twice in a row, one that no image reaches, one under two names, and other norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(2)
        self.again = self.first
        self.twice = nn.BatchNorm1d(2)
        self.unused = nn.BatchNorm1d(2)
        self.layer = nn.LayerNorm(2)
        self.without = nn.BatchNorm1d(2, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.without(self.layer(self.first(x)))
        return self.twice(self.twice(x).relu())


def test_which_norms() -> None:
    model = Odd()
    assert list(running_norms(model)) == ["first", "twice", "unused"]
    assert registered_names(model)["first"] == ["first", "again"]
    assert other_running(model) == ["instance"]


def test_a_norm_that_runs_twice_has_its_turn_last_and_one_without_images_never() -> None:
    model = Odd()
    values = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    group = next_group(model, values)
    assert (group.names, group.more) == (["first"], True)
    group = next_group(model, values, ["first"])
    assert (group.names, group.calls, group.more) == (["twice"], {"twice": 2}, False)
    assert measure(model, [values], group)["twice"].count == 16
    assert recalibrate(model, lambda: [values]) == 2
    assert torch.equal(model.unused.running_mean, torch.zeros(2))


def test_a_pass_ends_behind_the_last_norm_of_the_group() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Identity(), nn.BatchNorm1d(2), nn.Identity())
    reached: list[int] = []
    for place in (1, 3):
        model[place].register_forward_hook(lambda *_, place=place: reached.append(place))
    values = torch.randn(4, 2)
    group = next_group(model, values)
    reached.clear()
    measure(model, [values, values], group)
    assert reached == []


def test_what_is_not_finite_is_named() -> None:
    model = unet()
    broken = [torch.full((1, 1, 32, 32), torch.inf)]
    with pytest.raises(Unmeasurable, match=r"batch norm 'conv_0\.conv_0\.adn\.N' is not"):
        measure(model, broken, next_group(model, broken[0]))
