"""Tempering, mixing and averaging of weights and scores, against worked numbers; units of layers by execution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from fairflare.core.aggregation.stabilise import mixed, smoothed, tempered
from fairflare.core.features.units import execution_order, units
from fairflare.core.weighting import normalise, uniform_weights

weights = st.dictionaries(st.sampled_from("abcdefg"), st.floats(1e-6, 1e3), min_size=1).map(normalise)


def test_tempered_by_hand() -> None:
    # 0.64, 0.32, 0.04 ** 0.5 = 0.8, 0.5657, 0.2; sum 1.5657
    found = tempered({"a": 0.64, "b": 0.32, "c": 0.04}, 0.5)
    assert found == pytest.approx({"a": 0.8 / 1.565685, "b": 0.565685 / 1.565685, "c": 0.2 / 1.565685}, rel=1e-6)
    # squared: 0.64, 0.04, sum 0.68
    assert tempered({"a": 0.8, "b": 0.2}, 2) == pytest.approx({"a": 16 / 17, "b": 1 / 17}, rel=1e-12)
    assert tempered({"a": 1.0, "b": 0.0}, 0) == {"a": 0.5, "b": 0.5}
    assert tempered({"a": 1.0, "b": 0.0}, 0.5) == {"a": 1.0, "b": 0.0}
    assert tempered({"a": 0.5, "b": 0.3, "c": 0.2}, 1e5)["a"] == 1.0  # nothing overflows


def test_mixed_by_hand() -> None:
    # 0.7 * (0.9, 0.1, 0) + 0.3 / 3
    assert mixed({"a": 0.9, "b": 0.1, "c": 0.0}, 0.3) == pytest.approx({"a": 0.73, "b": 0.17, "c": 0.1}, rel=1e-12)
    assert mixed({"a": 0.9, "b": 0.1}, 1) == {"a": 0.5, "b": 0.5}


def test_smoothed_by_hand() -> None:
    # 0.75 * 0.8 + 0.25 * 0.4 = 0.7
    assert smoothed({"x": 0.4}, {"x": 0.8}, 0.75) == pytest.approx({"x": 0.7}, rel=1e-12)
    found = smoothed({"x": math.nan, "y": 0.5, "z": math.nan}, {"x": 0.8, "y": math.nan}, 0.75)
    assert (found["x"], found["y"]) == (0.8, 0.5)
    assert math.isnan(found["z"])
    assert smoothed({"x": 0.4}, None, 0.75) == {"x": 0.4}
    assert smoothed({"x": 0.4}, {"x": 0.8}, 0) == {"x": 0.4}


@given(weights, st.floats(0, 4), st.floats(0, 1))
def test_weights_stay_weights_in_the_same_order(given: dict[str, float], power: float, share: float) -> None:
    for found in (tempered(given, power), mixed(given, share)):
        assert sum(found.values()) == pytest.approx(1, abs=1e-9)
        assert min(found.values()) >= 0
        ranked = [found[site] for site in sorted(given, key=lambda s: given[s])]
        assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(ranked))


@given(weights)
def test_what_is_off_changes_no_bit_and_the_limits_are_uniform(given: dict[str, float]) -> None:
    assert tempered(given, 1.0) == given
    assert mixed(given, 0.0) == given
    uniform = uniform_weights(given)
    assert tempered(given, 0.0) == pytest.approx(uniform, rel=1e-12)
    assert mixed(given, 1.0) == pytest.approx(uniform, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tempered({"a": 1.0}, -1), "power must be .*>= 0, got -1"),
        (lambda: tempered({"a": 0.0}, 0.5), "must not all be 0"),
        (lambda: tempered({}, 0.5), "the weights"),
        (lambda: mixed({"a": 1.0}, 1.5), "share must"),
        (lambda: mixed({"a": 0.5}, 0.5), "sum"),
        (lambda: smoothed({"x": 1.0}, {"x": 1.0}, 1.0), "keep must"),
    ],
)
def test_out_of_range(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------------------------------------------ units


class Crossed(nn.Module):
    """Registered in another order than it runs in: a name or a place says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_b = nn.BatchNorm2d(3)
        self.norm_a = nn.GroupNorm(1, 2)
        self.last = nn.Conv2d(3, 1, 1)
        self.b = nn.Conv2d(2, 3, 1)
        self.a = nn.Conv2d(1, 2, 1)
        self.act = nn.PReLU()
        self.never = nn.Linear(2, 2)
        self.before = nn.InstanceNorm2d(1, affine=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm_a(self.a(self.before(x))))
        return self.last(self.norm_b(self.b(x)))


def test_units_follow_the_order_of_execution() -> None:
    net = Crossed()
    net.norm_b.train()
    mean = net.norm_b.running_mean.clone()
    x = torch.randn(2, 1, 4, 4)
    assert execution_order(net, x, ["last", "a", "b"]) == ["a", "b", "last"]
    assert units(net, x) == {
        "norm_b": "b", "norm_a": "a", "last": "last", "b": "b", "a": "a", "act": "a", "never": "never",
        "before": "before",
    }  # fmt: skip
    assert net.training
    assert torch.equal(net.norm_b.running_mean, mean)
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_units_of_the_u_net() -> None:
    from fairflare.tasks.segmentation import SegmentationTask

    net = SegmentationTask(image_size=(32, 32), features=(4, 4, 8, 8, 8, 4)).build_model()
    found = units(net, torch.zeros(1, 1, 32, 32))
    assert len(found) == 41
    assert len(set(found.values())) == 23  # 18 convolutions with their norms, 4 up-convolutions, the last one
    for layer, unit in found.items():
        assert unit == (layer.replace(".adn.N", ".conv") if layer.endswith(".adn.N") else layer)


def test_units_of_attention_with_parametrized_weights() -> None:
    """A module with tensors of its own around other layers is its own unit; what never runs goes with what owns it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.norm = nn.LayerNorm([3, 4])
            self.out = parametrizations.weight_norm(nn.Linear(4, 4))
            self.behind = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
            return self.behind(self.out(self.norm(self.attention(x, x, x, need_weights=False)[0])))

    found = units(Block(), torch.zeros(1, 2, 4))
    assert found["attention.out_proj"] == found["attention"] == found["norm"] == "attention"
    assert found[""] == ""
    assert found["behind"] == found["out"] == "out"
