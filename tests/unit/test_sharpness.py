"""Test SAM, GSAM and the sharpness probe: numbers of spec fed_ism.md, a plain reference, general properties."""

from __future__ import annotations

import copy
import doctest
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fairflare.core import sharpness as module
from fairflare.core.losses import logit_adjusted_cross_entropy
from fairflare.core.objectives import sam
from fairflare.core.sharpness import GSAM, SAM, Sharpness, search_distance, sharpness

pytestmark = pytest.mark.usefixtures("one_thread")

COUNTS = [12, 6, 2]  # of the classes, for the logit-adjusted loss
CE = nn.CrossEntropyLoss(reduction="none")
BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3, weight_decay=5e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, amsgrad=True, foreach=True),
}


def make_model(norm: str = "batch", dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    norms = {
        "batch": lambda: nn.BatchNorm2d(4),
        "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
        "untracked": lambda: nn.BatchNorm2d(4, track_running_stats=False),
        "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "none": nn.Identity,
    }
    # a bias before a batch norm has rounding for its gradient, which Adam would make a full step of
    convolution = nn.Conv2d(2, 4, 3, padding=1, bias=norm == "none")
    return nn.Sequential(
        convolution, norms[norm](), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).to(dtype)


def make_batches(sizes: list[int], dtype: torch.dtype = torch.float64, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 2, 6, 6, generator=generator, dtype=dtype) + 0.5, torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


def train_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return logit_adjusted_cross_entropy(model(x), y, COUNTS)


def closure_of(model: nn.Module, optimizer: SAM | torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = train_loss(model, x, y)
        loss.backward()
        return loss

    return closure


def frozen_copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Quadratic(nn.Module):
    """Define f = (w1^2 + 4 w2^2) / 2, for any input."""

    def __init__(self, w: tuple[float, float] = (1.0, 1.0)) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * (self.w[0] ** 2 + 4 * self.w[1] ** 2)).expand(len(x))


def quadratic_closure(model: Quadratic, optimizer: SAM | torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.zeros(1)).mean()
        loss.backward()
        return loss

    return closure


def direction(make: Callable[[torch.optim.Optimizer], SAM], model: Quadratic) -> list[float]:
    """Compute d by one step of gradient descent with learning rate 1."""
    before = model.w.detach().clone()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.step(quadratic_closure(model, optimizer))
    return (before - model.w.detach()).tolist()


def test_doctests():
    for tested, fewest in ((sam, 4), (module, 1)):
        result = doctest.testmod(tested)
        assert (result.failed, result.attempted >= fewest) == (0, True)


# --- worked numbers, spec section 9 -------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "rho"), [(1, 0.005774), (75, 0.05), (150, 0.070711), (300, 0.1)])
def test_search_distance_by_hand(t, rho):
    assert search_distance(t - 1, 300, 0.1, 0.5) == pytest.approx(rho, abs=5e-7)


def test_sharpness_by_hand():  # g = (1, 4), |g| = 4.123106, eps = (0.024254, 0.097014)
    result = sharpness(Quadratic(), lambda outputs, targets: outputs, [(torch.zeros(3), torch.zeros(3))], 0.1)
    assert result == pytest.approx(Sharpness(2.5, 2.931428, 0.431428), abs=5e-7)
    assert all(type(value) is float for value in result)


def test_sam_by_hand():  # g_p = (1 + 0.024254, 4 (1 + 0.097014))
    assert direction(lambda base: SAM(base, rho=0.1), Quadratic()) == pytest.approx([1.024254, 4.388057], abs=6e-7)


def test_gsam_by_hand():
    assert direction(lambda base: GSAM(base, rho=0.1), Quadratic()) == pytest.approx([1.017964, 4.389525], abs=6e-7)
    g_p = direction(lambda base: GSAM(base, rho=0.1, alpha=0.0), Quadratic())
    d = direction(lambda base: GSAM(base, rho=0.1, alpha=1.0), Quadratic())
    g_perp = [a - b for a, b in zip(g_p, d, strict=True)]
    assert g_perp == pytest.approx([0.062899, -0.014682], abs=6e-7)
    assert sum(a * b for a, b in zip(g_perp, g_p, strict=True)) == pytest.approx(0, abs=1e-14)


# --- parity with a plain implementation ---------------------------------------------------------------------


def reference_step(model: nn.Module, base: torch.optim.Optimizer, x: Tensor, y: Tensor, rho: float, alpha: float):
    """Compute steps 1 to 6 of spec section 2.2 with copies of everything and one vector for all parameters."""
    params = list(model.parameters())

    def gradient() -> Tensor:
        for p in params:
            p.grad = None
        train_loss(model, x, y).backward()
        return torch.cat([p.grad.reshape(-1) for p in params])

    g = gradient()
    weights = [p.data.clone() for p in params]
    statistics = [b.clone() for b in model.buffers()]
    eps = rho * g / (torch.sqrt((g * g).sum()) + 1e-12)
    at = 0
    for p in params:
        p.data = p.data + eps[at : at + p.numel()].reshape(p.shape)
        at += p.numel()
    g_p = gradient()
    g_perp = g - (g * g_p).sum() / (g_p * g_p).sum() * g_p
    d = g_p - alpha * g_perp
    at = 0
    for p, weight in zip(params, weights, strict=True):
        p.data = weight
        p.grad = d[at : at + p.numel()].reshape(p.shape).clone()
        at += p.numel()
    for buffer, value in zip(model.buffers(), statistics, strict=True):
        buffer.copy_(value)
    base.step()


@pytest.mark.parametrize("alpha", [None, 0.0, 0.1, 0.7])
@pytest.mark.parametrize("norm", ["batch", "none"])
@pytest.mark.parametrize("base", BASES)
def test_steps_equal_a_plain_implementation(base, norm, alpha):
    ours, plain = make_model(norm), make_model(norm)
    optimizer, other = BASES[base](ours.parameters()), BASES[base](plain.parameters())
    wrapped = (
        SAM(optimizer, rho=0.3, model=ours) if alpha is None else GSAM(optimizer, rho=0.3, alpha=alpha, model=ours)
    )
    for step, (x, y) in enumerate(make_batches([7, 5, 7, 3, 7])):
        wrapped.rho = 0.3 + 0.1 * step
        wrapped.step(closure_of(ours, wrapped, x, y))
        reference_step(plain, other, x, y, 0.3 + 0.1 * step, alpha or 0.0)
    for (name, value), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-10, msg=name)
    assert not torch.equal(ours[0].weight, make_model(norm)[0].weight)
    assert wrapped.skipped_steps == 0


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("make", [SAM, GSAM])
def test_distance_zero_is_the_base_optimizer(make, base):
    ours, plain = make_model(dtype=torch.float32), make_model(dtype=torch.float32)
    wrapped, other = make(BASES[base](ours.parameters()), rho=0.0, model=ours), BASES[base](plain.parameters())
    runs = 0
    for x, y in make_batches([6, 4, 6], torch.float32):

        def counted(x: Tensor = x, y: Tensor = y) -> Tensor:
            nonlocal runs
            runs += 1
            return closure_of(ours, wrapped, x, y)()

        wrapped.step(counted)
        closure_of(plain, other, x, y)()
        other.step()
    assert runs == 3
    assert same_bits(ours.state_dict(), plain.state_dict())


def test_the_restored_weights_are_the_same_bits():
    """Check learning rate 0; subtracting the perturbation again would change bits."""
    model = make_model(dtype=torch.float32)
    before = frozen_copy(model)
    optimizer = GSAM(torch.optim.SGD(model.parameters(), lr=0.0), rho=0.77, model=model)
    seen = []

    def closure() -> Tensor:
        seen.append(frozen_copy(model)["0.weight"])
        return closure_of(model, optimizer, *make_batches([8], torch.float32)[0])()

    optimizer.step(closure)
    names = [name for name, _ in model.named_parameters()]
    assert same_bits({n: before[n] for n in names}, {n: model.state_dict()[n] for n in names})
    assert torch.equal(seen[0], before["0.weight"])
    assert not torch.equal(seen[1], seen[0])


# --- batch norm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "cumulative", "untracked", "instance"])
@pytest.mark.parametrize("make", [SAM, GSAM])
def test_running_statistics_are_those_of_the_first_run(make, norm):
    model = make_model(norm, torch.float32)
    warm, (x, y) = make_batches([5, 8], torch.float32)
    model(warm[0])  # so that the statistics are not at their start
    once = copy.deepcopy(model)
    once(x)
    optimizer = make(BASES["adam"](model.parameters()), rho=2.0, model=model)
    optimizer.step(closure_of(model, optimizer, x, y))
    assert same_bits(dict(model.named_buffers()), dict(once.named_buffers()))
    assert len(dict(model.named_buffers())) == (0 if norm == "untracked" else 3)
    if norm != "untracked":
        assert int(model[1].num_batches_tracked) == (0 if norm == "instance" else 2)
        assert not torch.equal(model[1].running_mean, torch.zeros(4))


def test_without_model_the_statistics_see_both_runs():
    model = make_model()
    optimizer = SAM(BASES["adam"](model.parameters()), rho=0.1)
    optimizer.step(closure_of(model, optimizer, *make_batches([8])[0]))
    assert int(model[1].num_batches_tracked) == 2


def test_batch_norms_in_evaluation_mode_keep_mode_and_statistics():
    model = make_model()
    model[1].eval()
    before = frozen_copy(model[1])
    optimizer = GSAM(BASES["sgd"](model.parameters()), rho=0.1, model=model)
    optimizer.step(closure_of(model, optimizer, *make_batches([8])[0]))
    assert not model[1].training
    assert model[0].training
    assert all(torch.equal(value, before[name]) for name, value in model[1].named_buffers())


# --- degenerate steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SAM, GSAM])
def test_gradient_zero_moves_nothing(make):
    model = Quadratic((0.0, 0.0))
    assert direction(lambda base: make(base, rho=0.1), model) == [0.0, 0.0]


def test_gradient_zero_uphill_is_the_direction():
    """Check f = relu(1 - w)-like: slope at w, flat at w + eps; d = g_p = 0 for any alpha."""
    w = torch.tensor([0.95], dtype=torch.float64, requires_grad=True)
    optimizer = GSAM(torch.optim.SGD([w], lr=1.0), rho=0.1, alpha=0.5)
    values = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.where(w < 1.0, w, torch.ones_like(w)).sum()
        loss.backward()
        values.append(w.grad.item())
        return loss

    assert optimizer.step(closure).item() == 0.95
    assert values == [1.0, 0.0]
    assert w.item() == 0.95


@pytest.mark.parametrize("rho", [0.0, 0.1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_no_weight(bad, rho):
    model = make_model()
    optimizer = GSAM(BASES["adam"](model.parameters()), rho=rho, model=model)
    x, y = make_batches([8])[0]
    optimizer.step(closure_of(model, optimizer, x, y))
    weights = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.base_optimizer.state_dict())
    loss = optimizer.step(closure_of(model, optimizer, x * bad, y))
    assert not math.isfinite(loss.item())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    torch.testing.assert_close(optimizer.base_optimizer.state_dict(), state, rtol=0, atol=0)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("run", [1, 2])
def test_not_finite_in_one_of_the_runs(run, what):
    model = make_model()
    optimizer = SAM(BASES["adam"](model.parameters()), rho=0.1, model=model)
    before = [p.detach().clone() for p in model.parameters()]
    runs = 0

    def closure() -> Tensor:
        nonlocal runs
        runs += 1
        loss = closure_of(model, optimizer, *make_batches([8])[0])()
        if runs == run and what == "gradient":
            model[5].bias.grad[0] = math.inf
        return loss * math.inf if runs == run and what == "loss" else loss

    loss = optimizer.step(closure)
    assert runs == run
    assert math.isfinite(loss.item()) == (what == "gradient" or run == 2)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
    assert not optimizer.base_optimizer.state
    assert optimizer.skipped_steps == 1


def test_a_closure_that_raises_leaves_weights_and_statistics():
    model = make_model()
    x, y = make_batches([8])[0]
    once = copy.deepcopy(model)
    once(x)
    optimizer = SAM(BASES["adam"](model.parameters()), rho=0.1, model=model)
    runs = 0

    def closure() -> Tensor:
        nonlocal runs
        runs += 1
        loss = closure_of(model, optimizer, x, y)()
        if runs == 2:
            raise RuntimeError("out of memory")
        return loss

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert same_bits(model.state_dict(), once.state_dict())


def test_parameters_without_gradient_are_left_out():
    model = make_model()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    before = model[0].weight.clone()
    optimizer = GSAM(BASES["adam"]([*model.parameters(), unused]), rho=0.2, model=model)
    optimizer.step(closure_of(model, optimizer, *make_batches([8])[0]))
    assert torch.equal(model[0].weight, before)
    assert torch.equal(unused, torch.ones(3, dtype=torch.float64))
    assert unused not in optimizer.base_optimizer.state


def test_gradient_in_only_one_of_the_runs():
    """Check a in both runs, b in the first only, c in the second only; a missing gradient counts as 0."""
    a, b, c = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (2.0, 1.0, 3.0))
    optimizer = GSAM(torch.optim.SGD([a, b, c], lr=1.0), rho=5.0, alpha=0.1)
    runs = 0

    def closure() -> Tensor:
        nonlocal runs
        runs += 1
        optimizer.zero_grad()
        loss = (3 * a + 4 * b if runs == 1 else a**2 / 2 + 2 * c).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    # g = (3, 4, 0), eps = (3, 4, 0), g_p = (5, -, 2); c = 15 / 29; d = g_p - 0.1 (g - c g_p)
    assert a.item() == pytest.approx(2 - (5 - 0.1 * (3 - 15 / 29 * 5)), abs=1e-12)
    assert b.item() == 1.0
    assert c.item() == pytest.approx(3 - (2 - 0.1 * (0 - 15 / 29 * 2)), abs=1e-12)


def test_one_norm_over_parameters_of_different_types():
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    params = [torch.full((4,), v, dtype=t, requires_grad=True) for v, t in zip((1, 2, 3, 4), dtypes, strict=True)]
    optimizer = GSAM(torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.0}], lr=1.0), rho=2.0)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((0.5 * p.double() ** 2).sum() for p in params)
        loss.backward()
        seen.append([p.detach().double().mean().item() for p in params])
        return loss

    optimizer.step(closure)
    scale = 1 + 2.0 / math.sqrt(4 * (1 + 4 + 9 + 16))  # g = w, so that w is scaled
    assert seen[1] == pytest.approx([scale * v for v in (1, 2, 3, 4)], rel=4e-3)  # bfloat16
    assert seen[1][0] == pytest.approx(scale, rel=1e-7)
    assert params[1].tolist() == pytest.approx([2 - 2 * scale] * 4, rel=2e-3)
    assert params[2].tolist() == [3.0] * 4  # learning rate 0: restored
    assert params[3].tolist() == [4.0] * 4


def test_gradients_that_are_views_of_a_shared_buffer():
    """Check data-parallel training, where the buffer's owner overwrites the first gradient with the second."""
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    buffer = torch.zeros(5, dtype=torch.float64)
    optimizer = GSAM(torch.optim.SGD([w], lr=1.0), rho=0.1)

    def closure() -> float:
        buffer[1:3] = w.detach() * torch.tensor([1.0, 4.0], dtype=torch.float64)
        w.grad = buffer[1:3]
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert (1 - w.detach()).tolist() == pytest.approx([1.017964, 4.389525], abs=6e-7)


# --- wrong uses ----------------------------------------------------------------------------------------------


def test_step_returns_the_first_loss_and_runs_with_gradients():
    model = Quadratic()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1)
    with torch.no_grad():
        assert optimizer.step(quadratic_closure(model, optimizer)).item() == 2.5


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_settings_out_of_range(value):
    model = Quadratic()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"rho must be finite and >= 0, got {value}"):
        SAM(base, rho=value)
    with pytest.raises(ValueError, match=f"alpha must be finite and >= 0, got {value}"):
        GSAM(base, rho=0.1, alpha=value)
    with pytest.raises(ValueError, match="rho must be"):
        sharpness(model, lambda outputs, targets: outputs, [(torch.zeros(3), torch.zeros(3))], value)


def test_wrong_uses_of_the_optimizer():
    model = Quadratic()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="the loss, one number, got NoneType"):
        SAM(base, rho=0.1).step(lambda: None)
    with pytest.raises(TypeError, match=r"got shape \(2,\)"):
        SAM(base, rho=0.1).step(lambda: torch.zeros(2))


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = SAM(torch.optim.SparseAdam(table.parameters()), rho=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = table(torch.tensor([1, 2])).square().sum()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"dense and real, got torch\.sparse_coo"):
        optimizer.step(closure)


# --- the probe ----------------------------------------------------------------------------------------------


def naive_sharpness(model: nn.Module, batches: list[tuple[Tensor, Tensor]], rho: float) -> tuple[float, float, float]:
    """Compute with all samples in one batch, in float64, on a copy."""
    model = copy.deepcopy(model).double().eval()
    x, y = torch.cat([x for x, _ in batches]).double(), torch.cat([y for _, y in batches])
    loss = functional.cross_entropy(model(x), y)
    params = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, params)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    for p, g in zip(params, gradients, strict=True):
        p.data = p.data + rho * g / (norm + 1e-12)
    perturbed = functional.cross_entropy(model(x), y)
    return loss.item(), perturbed.item(), perturbed.item() - loss.item()


@pytest.mark.parametrize("sizes", [[23], [1] * 23, [8, 8, 7], [20, 3], [5, 0, 18]])
@pytest.mark.parametrize("rho", [0.0058, 0.05, 1.0])
def test_probe_equals_the_naive_full_batch(sizes, rho):
    model = make_model()
    whole = make_batches([23])
    model(whole[0][0])  # running statistics that are not 0 and 1
    x, y = whole[0]
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    result = sharpness(model, CE, parts, rho)
    assert result == pytest.approx(naive_sharpness(model, whole, rho), abs=1e-8, rel=0)
    assert result.sharpness > 0


def test_probe_with_frozen_and_unused_parameters():
    model = make_model()
    model[0].weight.requires_grad_(False)
    expected = naive_sharpness(model, make_batches([9]), 0.3)
    model.unused = nn.Linear(2, 2).double()
    model.forward = lambda x: nn.Sequential(*list(model)[:6])(x)
    assert sharpness(model, CE, make_batches([9]), 0.3) == pytest.approx(expected, abs=1e-10)


def test_probe_holds_no_graph_where_pytorchs_zeros_require_gradients(monkeypatch):
    """Give zeros as PyTorch 2.4 does in place of the gradients of unused parameters."""
    model, added = make_model(), []
    model.unused = nn.Linear(2, 2).double()
    model.forward = lambda x: nn.Sequential(*list(model)[:6])(x)
    expected = sharpness(model, CE, make_batches([5, 4]), 0.3)
    grad, add = torch.autograd.grad, module.tensors.add

    def grad_of_2_4(outputs, inputs, **more):
        found = grad(outputs, inputs, allow_unused=True)
        return tuple(
            torch.zeros_like(p, requires_grad=True) if g is None else g for p, g in zip(inputs, found, strict=True)
        )

    monkeypatch.setattr(torch.autograd, "grad", grad_of_2_4)
    monkeypatch.setattr(module.tensors, "add", lambda to, by, factor: (add(to, by, factor), added.extend(by)))
    assert sharpness(model, CE, make_batches([5, 4]), 0.3) == expected
    assert added
    assert not any(tensor.requires_grad for tensor in added)


def test_small_sharpness_of_a_float32_model_keeps_its_digits():
    """Check two means that, rounded to float32 as in a training loop, would leave no digit."""
    model = make_model(dtype=torch.float32)
    batches = make_batches([64] * 20, torch.float32)
    result = sharpness(model, CE, batches, 2e-6)
    exact = naive_sharpness(model, batches, 2e-6)[2]
    assert exact < 3e-6
    assert result.sharpness == pytest.approx(exact, rel=0.02)


def test_a_mean_loss_is_weighted_by_the_batch_size():
    model = make_model()
    batches = make_batches([8, 3, 1])
    result = sharpness(model, nn.CrossEntropyLoss(), batches, 0.4)
    assert result == pytest.approx(sharpness(model, CE, batches, 0.4), abs=1e-12)
    assert result.loss != pytest.approx(sum(CE(model.eval()(x), y).mean().item() for x, y in batches) / 3, abs=1e-5)


def watched(model: nn.Module) -> Callable[[], None]:
    """Return a function that checks that model and torch's random state have not changed since."""
    state, modes = frozen_copy(model), [m.training for m in model.modules()]
    tensors = [id(t) for t in [*model.parameters(), *model.buffers()]]
    gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    requires = [p.requires_grad for p in model.parameters()]
    random = torch.get_rng_state()

    def check() -> None:
        assert same_bits(model.state_dict(), state)
        assert [m.training for m in model.modules()] == modes
        assert [id(t) for t in [*model.parameters(), *model.buffers()]] == tensors
        assert [p.requires_grad for p in model.parameters()] == requires
        for p, (gradient, value) in zip(model.parameters(), gradients, strict=True):
            assert p.grad is gradient
            assert gradient is None or torch.equal(gradient, value)
        assert torch.equal(torch.get_rng_state(), random)

    return check


class Counting(nn.Module):
    """Change buffers also in evaluation mode, one in place and one by assignment, and draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.assigned = self.assigned + 1
        return x + 0 * torch.rand(())


@pytest.mark.parametrize("rho", [0.0, 0.1])
@pytest.mark.parametrize("fails", [None, 1, 4])
def test_probe_changes_nothing(rho, fails):
    model = make_model(dtype=torch.float32)
    model.insert(0, Counting())
    model[6].weight.requires_grad_(False)
    model(make_batches([8], torch.float32)[0][0])[0, 0].backward()
    model[2].eval()  # batch norm frozen by the user, the rest in training mode
    check = watched(model)
    calls = 0

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise RuntimeError("stop")
        assert not any(m.training for m in model.modules())
        return CE(outputs, targets)

    batches = make_batches([4, 3, 2], torch.float32)
    if fails is None or (rho == 0 and fails > 3):
        sharpness(model, loss_fn, batches, rho)
        assert calls == (3 if rho == 0 else 6)
    else:
        with pytest.raises(RuntimeError, match="stop"):
            sharpness(model, loss_fn, batches, rho)
    check()


def test_probe_under_no_grad():
    model = make_model()
    expected = sharpness(model, CE, make_batches([9]), 0.3)
    with torch.no_grad():
        assert sharpness(model, CE, make_batches([9]), 0.3) == expected
    assert expected.sharpness > 0


def test_distance_zero_needs_one_pass_and_no_gradient():
    model = make_model()
    result = sharpness(model, lambda z, y: CE(z, y).detach(), make_batches([5, 4]), 0.0)
    assert result.sharpness == 0.0
    assert result.loss == result.perturbed_loss
    assert result.loss == pytest.approx(naive_sharpness(model, make_batches([5, 4]), 0.1)[0], abs=1e-12)


def test_no_gradient_no_sharpness():
    model = make_model().requires_grad_(False)
    result = sharpness(model, CE, make_batches([5]), 0.3)
    assert result == (result.loss, result.loss, 0.0)
    assert sharpness(Quadratic((0.0, 0.0)), lambda z, y: z, [(torch.zeros(3), torch.zeros(3))], 0.3) == (0, 0, 0)


@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_a_loss_that_is_not_finite_is_told(rho):
    model = make_model()
    check = watched(model)
    (x, y), other = make_batches([5, 4])
    result = sharpness(model, CE, [(x, y), (other[0] * math.nan, other[1])], rho)
    assert all(map(math.isnan, result))
    check()


def test_shuffled_loaders_come_in_the_same_order_twice():
    model = make_model()
    x, y = make_batches([23])[0]
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    orders: list[list[float]] = [[]]

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(orders[-1]) == 6:
            orders.append([])
        orders[-1].append(float(targets.double() @ torch.arange(1.0, len(targets) + 1, dtype=torch.float64)))
        return CE(outputs, targets)

    check = watched(model)
    result = sharpness(model, loss_fn, loader, 0.2)
    check()
    assert orders[0] == orders[1]
    assert result == pytest.approx(naive_sharpness(model, [(x, y)], 0.2), abs=1e-8)


def test_inputs_in_containers():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, inputs: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
            return self.net(inputs["images"][0] + inputs["images"][1])

    model = Two()
    batches = make_batches([5, 4])
    nested = [({"site": "a", "images": (x, torch.zeros_like(x))}, [y]) for x, y in batches]
    result = sharpness(model, lambda z, targets: CE(z, targets[0]), nested, 0.2)
    assert result == pytest.approx(sharpness(model.net, CE, batches, 0.2), abs=1e-12)


class Shrinking:
    """Return fewer samples in every pass."""

    def __init__(self) -> None:
        self.batches = make_batches([4, 4, 4, 4])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches.pop()
        return iter(self.batches)


def test_wrong_uses_of_the_probe():
    model = make_model()
    check = watched(model)
    with pytest.raises(ValueError, match="iterable twice"):
        sharpness(model, CE, iter(make_batches([4])), 0.1)
    with pytest.raises(ValueError, match="no sample"):
        sharpness(model, CE, [], 0.1)
    with pytest.raises(ValueError, match=r"12 samples .* and 8 in the second"):
        sharpness(model, CE, Shrinking(), 0.1)
    with pytest.raises(ValueError, match=r"must return 4 losses, .*got \(4, 3\)"):
        sharpness(model, lambda z, y: z, make_batches([4]), 0.1)
    with pytest.raises(ValueError, match="must hold a tensor"):
        sharpness(nn.Identity(), lambda z, y: y, [("image.png", torch.zeros(1))], 0.1)
    check()


# --- the schedule -------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.floats(0, 2), st.floats(0.05, 3))
def test_the_search_distance_grows_to_its_maximum(num_rounds, rho_max, tau):
    distances = [search_distance(r, num_rounds, rho_max, tau) for r in range(num_rounds)]
    assert distances == sorted(distances)
    assert distances[0] >= 0
    assert distances[-1] == rho_max


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1, 300, 0.1, 0.5), "^current_round.* got -1$"),
        ((300, 300, 0.1, 0.5), "^current_round.* got 300$"),
        ((0, 0, 0.1, 0.5), "^num_rounds.* got 0$"),
        ((0, 300, -0.1, 0.5), "^rho_max.* got -0.1$"),
        ((0, 300, math.nan, 0.5), "rho_max must be finite and >= 0, got nan"),
        ((0, 300, 0.1, 0.0), "tau must be finite and > 0, got 0.0"),
        ((0, 300, 0.1, math.inf), "tau must be finite and > 0, got inf"),
    ],
)
def test_search_distance_out_of_range(args, message):
    with pytest.raises(ValueError, match=message):
        search_distance(*args)
