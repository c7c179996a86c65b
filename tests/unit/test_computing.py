"""Test mixed precision, channels last and compiled networks: what changes, and what must not."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.networks.nets import BasicUNet

from fairflare.base.machine.computing import Computing, LossScale, NoSuchForm, Overflow, plainly

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def unet(dims: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return BasicUNet(dims, in_channels=1, out_channels=2, features=(8, 8, 8, 8, 8, 8), norm="batch").eval()


def images(dims: int = 2) -> torch.Tensor:
    return torch.randn(2, 1, *[16] * dims, generator=torch.Generator().manual_seed(1))


def test_nothing_chosen_changes_nothing() -> None:
    model = unet()
    before = dict(model.__dict__)
    assert Computing().apply(model, CPU) is model
    assert model.__dict__ == before
    assert not str(Computing())
    assert str(Computing("bf16", True, True, True)) == "bf16, channels last, compiled, deterministic"


@pytest.mark.parametrize(("precision", "error"), [("bf16", 2e-2), ("fp16", 3e-3)])
def test_lower_precision_inside_and_float32_outside(precision: Any, error: float) -> None:
    """Check an error of a few significant digits: more than none, less than the type's."""
    model, seen = unet(), []
    plain = model(images()).detach()
    Computing(precision).apply(model, CPU)
    model.get_submodule("conv_0.conv_0.conv").register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    out = model(images()).detach()
    assert seen == [torch.bfloat16 if precision == "bf16" else torch.float16]
    assert out.dtype == torch.float32
    assert 0 < float((out - plain).abs().max() / plain.abs().max()) < error
    with plainly(model):
        assert torch.equal(model(images()), plain)
    assert torch.equal(model(images()), out)


def test_a_copy_computes_with_its_own_weights() -> None:
    model = Computing("bf16").apply(unet(), CPU)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(images()).any()
    assert model(images()).any()
    with plainly(other):
        assert model(images()).any()


def test_autocast_ends_with_the_pass_whatever_happens() -> None:
    model = Computing("bf16").apply(unet(), CPU)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 3, 16, 16))
        assert not torch.is_autocast_enabled("cpu")
    assert model(images()).dtype == torch.float32


class Several(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return {"logits": y, "parts": (y, [y, torch.ones(1, dtype=torch.int64)])}


def test_outputs_of_any_form() -> None:
    out = Computing("bf16").apply(Several(), CPU)(torch.randn(3, 2))
    assert out["logits"].dtype == out["parts"][0].dtype == out["parts"][1][0].dtype == torch.float32
    assert out["parts"][1][1].dtype == torch.int64


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_moves_the_kernels_and_keeps_the_values(dims: int) -> None:
    model, plain = unet(dims), unet(dims)
    Computing(channels_last=True).apply(model, CPU)
    wanted = torch.channels_last if dims == 2 else torch.channels_last_3d
    kernel = model.get_submodule("conv_0.conv_1.conv").weight
    assert kernel.is_contiguous(memory_format=wanted)
    assert not kernel.is_contiguous()
    model.load_state_dict(plain.state_dict())
    assert kernel.is_contiguous(memory_format=wanted)
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())
    torch.testing.assert_close(model(images(dims)), plain(images(dims)), atol=1e-5, rtol=1e-5)


def test_scaled_gradients_are_the_gradients() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    model(x).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    LossScale("cpu").backward(model(x).square().mean(), optimizer)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_an_overflow_is_said_and_the_scale_falls_until_it_is_exhausted() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = LossScale("cpu")
    for number in range(12):
        assert scale.exhausted == (number > 10)
        with pytest.raises(Overflow) as caught:
            scale.backward(model(torch.ones(1, 1)).sum() * 1e38 * 1e38, optimizer)
        assert math.isinf(float(caught.value.loss))
        assert all(p.grad is None for p in model.parameters())


def determinism() -> tuple[Any, ...]:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, fill


def test_only_deterministic_operations_and_afterwards_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = determinism()
    assert before[:2] == (False, True)
    with Computing().enforce():
        assert determinism() == before
    with Computing(deterministic=True).enforce():
        assert determinism() == (True, False, False)
    assert determinism() == before
    places = torch.tensor([0, 0])
    with pytest.raises(NoSuchForm, match=r"^put_$"), Computing(deterministic=True).enforce():
        torch.zeros(2).put_(places, torch.ones(2))
    assert determinism() == before
    with pytest.raises(RuntimeError, match="another"), Computing(deterministic=True).enforce():
        raise RuntimeError("another")
    assert determinism() == before
    torch.zeros(2).put_(places, torch.ones(2))


@pytest.mark.long
def test_compiled_networks_see_hooks_that_are_set_later(tmp_path: Path) -> None:
    """Check hooks inside ``plainly``; outside it a hook makes a new graph. ``eager``: without a compiler."""
    model = unet()
    Computing(compile=True).apply(model, CPU)
    model.compile(backend="eager")
    wanted = model(images())
    seen: list[int] = []
    handle = model.get_submodule("conv_0").register_forward_hook(lambda m, a, out: seen.append(1))
    with plainly(model):
        assert model._compiled_call_impl is None
        assert torch.equal(model(images()), wanted)
    assert seen == [1]
    model(images())
    assert seen == [1, 1]
    handle.remove()
    model(images())
    assert seen == [1, 1]
    assert copy.deepcopy(model)._compiled_call_impl is None


@pytest.mark.parametrize(
    ("precision", "device", "has", "told"),
    [
        ("bf16", "cpu", False, "bf16 (emulated by this processor: about 17 times slower than fp32)"),
        ("bf16", "cpu", True, "bf16"), ("bf16", "cuda", False, "bf16"), ("fp32", "cpu", False, ""),
    ],
)  # fmt: skip
def test_it_says_where_bf16_is_slow(
    monkeypatch: pytest.MonkeyPatch, precision: Any, device: str, has: bool, told: str
) -> None:
    monkeypatch.setattr("fairflare.base.machine.computing._cpu_has_bf16", lambda: has)
    assert Computing(precision=precision).describe(torch.device(device)) == told
