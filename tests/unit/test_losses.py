"""Test losses: worked numbers of spec baselines.md, naive NumPy formulas, gradients, and general properties."""

from __future__ import annotations

import copy
import doctest
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fairflare.core import losses
from fairflare.core.losses import (
    balanced_softmax,
    class_log_prior,
    drw_weights,
    fairness_term,
    fedlc_loss,
    ldam_loss,
    ldam_margins,
    logit_adjusted_cross_entropy,
    model_contrastive_loss,
    proximal_term,
)

SPREAD = [0.0, 0.1, -0.2]  # logits
EVERY_CLASS = torch.arange(3)
count_lists = st.lists(st.integers(0, 1000), min_size=2, max_size=6).filter(any)

#: Every loss of (logits, targets, counts), with default settings.
CLASS_LOSSES: dict[str, Callable[..., Tensor]] = {
    "la": logit_adjusted_cross_entropy,
    "bsm": balanced_softmax,
    "ldam": ldam_loss,
    "fedlc": fedlc_loss,
}


def same_logits(*row: float) -> Tensor:
    """Return the same logits for one sample of each class."""
    return torch.tensor(row, dtype=torch.float64).repeat(len(row), 1)


def each(loss: Callable[..., Tensor], row: tuple[float, ...], counts: list[int], **settings: object) -> list[float]:
    return loss(same_logits(*row), torch.arange(len(row)), counts, reduction="none", **settings).tolist()


def naive(name: str, z: np.ndarray, y: int, n: np.ndarray) -> float:
    """Compute the loss of one sample by the formula, with exp and log."""
    prior = np.maximum(n / n.sum(), 1e-12)
    if name in ("la", "bsm"):
        return -math.log(math.exp(z[y]) * prior[y] / sum(math.exp(v) * p for v, p in zip(z, prior, strict=True)))
    if name == "ldam":
        present = n[n > 0]
        margin = 0.5 * n[y] ** -0.25 / max(present**-0.25) if n[y] > 0 else 0.0
        scaled = [30 * (v - margin) if c == y else 30 * v for c, v in enumerate(z)]
        return -math.log(math.exp(scaled[y]) / sum(map(math.exp, scaled)))
    calibrated = [v - 0.5 * max(m, 1e-8) ** -0.25 for v, m in zip(z, n, strict=True)]
    return -math.log(math.exp(calibrated[y]) / sum(map(math.exp, calibrated)))


def test_doctests():
    assert doctest.testmod(losses).failed == 0
    assert doctest.testmod(losses).attempted >= 2


# --- worked numbers, baselines.md ---------------------------------------------------------------------------


def test_fedlc_by_hand():
    assert each(fedlc_loss, (0, 0, 0), [81, 16, 1]) == pytest.approx([0.969481, 1.052814, 1.302814], abs=6e-7)
    assert each(fedlc_loss, (0, 0, 0), [81, 16, 1], exclude_target=True) == pytest.approx(
        [0.492606, 0.623639, 0.985682], abs=6e-7
    )


def test_ldam_by_hand():
    counts = [100, 10, 1]
    assert ldam_margins(counts).tolist() == pytest.approx([0.158114, 0.281171, 0.5], abs=5e-7)
    assert drw_weights(counts, 80, 100).tolist() == pytest.approx([0.027159, 0.270369, 2.702472], abs=5e-7)
    assert each(ldam_loss, (0.5, 0.3, 0.1), counts)[2] == pytest.approx(27.002476, abs=5e-7)
    assert each(ldam_loss, (0.5, 0.3, 0.1), counts, scale=1.0)[2] == pytest.approx(1.699892, abs=5e-7)


def with_cosines(near: float, far: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return z of length 3 with these cosines to vectors of length 2 and 0.5."""
    z = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    others = [r * torch.tensor([[c, math.sqrt(1 - c * c)]], dtype=torch.float64) for r, c in ((2, near), (0.5, far))]
    return z, others[0], others[1]


# --- losses for imbalanced classes --------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(count_lists, st.integers(0, 10_000))
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_equals_the_naive_formula(name, counts, seed):
    n = np.array(counts, dtype=float)
    rng = np.random.default_rng(seed)
    z, y = rng.uniform(-1, 1, (5, len(n))), rng.integers(0, len(n), 5)
    expected = [naive(name, row, target, n) for row, target in zip(z, y, strict=True)]
    of = CLASS_LOSSES[name]
    logits, targets = torch.from_numpy(z), torch.from_numpy(y)
    assert of(logits, targets, counts, reduction="none").tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert of(logits, targets, counts).item() == pytest.approx(np.mean(expected), rel=1e-9, abs=1e-9)
    assert of(logits, targets, counts, reduction="sum").item() == pytest.approx(np.sum(expected), rel=1e-9, abs=1e-9)


def test_tau_scales_the_prior():
    rows = each(logit_adjusted_cross_entropy, (0.3, -0.2, 0.1), [6, 3, 1], tau=2.0)
    weights = [math.exp(z) * p**2 for z, p in zip((0.3, -0.2, 0.1), (0.6, 0.3, 0.1), strict=True)]
    assert rows == pytest.approx([-math.log(w / sum(weights)) for w in weights], abs=1e-12)
    rows = each(fedlc_loss, (0.3, -0.2, 0.1), [81, 16, 1], tau=1.0)
    weights = [math.exp(z - m) for z, m in zip((0.3, -0.2, 0.1), (1 / 3, 0.5, 1), strict=True)]
    assert rows == pytest.approx([-math.log(w / sum(weights)) for w in weights], abs=1e-12)


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_an_absent_class_gives_no_nan(name):
    z = torch.tensor([SPREAD] * 3, requires_grad=True)
    loss = CLASS_LOSSES[name](z, EVERY_CLASS, [5, 0, 1])
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(z.grad.isfinite().all())
    assert float(z.grad[1, 1]) < 0  # its own sample still pulls its logit up


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_large_logits_stay_finite(name):
    z = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = CLASS_LOSSES[name](z, torch.tensor([1]), [5, 2, 1])
    loss.backward()
    assert loss.item() == pytest.approx(2e4 * (30 if name == "ldam" else 1), rel=1e-3)
    assert bool(z.grad.isfinite().all())


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in CLASS_LOSSES), ("fedlc", {"exclude_target": True})]
)
def test_gradients(name, settings):
    torch.manual_seed(0)
    z = 0.1 * torch.randn(4, 3, dtype=torch.float64)
    y = torch.tensor([0, 2, 1, 2])
    assert torch.autograd.gradcheck(lambda z: CLASS_LOSSES[name](z, y, [5, 2, 1], **settings), z.requires_grad_())


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_pixels_are_samples(name):
    """Check that (n, C, H, W) of a segmentation gives the same as its pixels one by one."""
    torch.manual_seed(0)
    z, y = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    whole = CLASS_LOSSES[name](z, y, [50, 5, 1], reduction="none")
    flat = CLASS_LOSSES[name](z.movedim(1, -1).reshape(-1, 3), y.reshape(-1), [50, 5, 1], reduction="none")
    assert whole.shape == (2, 4, 5)
    torch.testing.assert_close(whole.reshape(-1), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_type_of_the_logits_is_kept_and_nothing_changed(name, dtype):
    z, y, counts = torch.tensor([SPREAD] * 3, dtype=dtype), EVERY_CLASS.clone(), torch.tensor([5, 0, 1])
    before = z.clone()
    assert CLASS_LOSSES[name](z, y, counts).dtype == dtype
    assert torch.equal(z, before)
    assert y.tolist() == [0, 1, 2]
    assert counts.tolist() == [5, 0, 1]


def test_fedlc_may_be_negative_without_the_target():
    z = torch.tensor([[5.0, 0.0, 0.0]], dtype=torch.float64)
    loss = fedlc_loss(z, torch.tensor([0]), [1, 1, 1], exclude_target=True).item()
    assert loss == pytest.approx(math.log(2) - 5, abs=1e-12)


@given(count_lists, st.integers(1, 50))
def test_class_log_prior_is_a_distribution_and_blind_to_scale(counts, factor):
    prior = class_log_prior(counts)
    assert prior.dtype == torch.float64
    assert prior.exp().sum().item() == pytest.approx(1, abs=1e-9)
    assert class_log_prior([factor * n for n in counts]).tolist() == pytest.approx(prior.tolist(), abs=1e-12)


def test_class_log_prior_with_another_floor():
    assert class_log_prior([1, 0], floor=0.01).tolist() == pytest.approx([0, math.log(0.01)], abs=1e-12)


# --- LDAM ---------------------------------------------------------------------------------------------------


def test_deferred_weights_start_late():
    counts = [100, 0, 10, 1]
    assert drw_weights(counts, 79, 100).tolist() == [1] * 4
    late = drw_weights(counts, 80, 100).tolist()
    assert late == pytest.approx([0.027159, 0, 0.270369, 2.702472], abs=5e-7)
    assert sum(late) == pytest.approx(3, abs=1e-12)
    assert drw_weights([3, 1], 0, 1).tolist() == [1, 1]  # int(0.8) is 0
    assert drw_weights([3, 1], 0, 1, start=0.0).tolist() != [1, 1]
    assert drw_weights([3, 1], 28, 100, start=0.29).tolist() == [1, 1]  # 0.29 * 100 is 28.999999999999996
    assert drw_weights([3, 1], 29, 100, start=0.29).tolist() != [1, 1]


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6), st.floats(0, 0.99999))
def test_deferred_weights_equal_the_formula(counts, beta):
    raw = np.array([(1 - beta) / (1 - beta**n) for n in counts])
    expected = raw / raw.sum() * len(counts)
    assert drw_weights(counts, 9, 10, beta=beta).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_weighted_mean_divides_by_the_weights_of_the_batch():
    torch.manual_seed(0)
    z, y, v = torch.rand(6, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 2, 0, 1]), [0.5, 2.0, 3.0]
    losses = ldam_loss(z, y, [9, 4, 1], reduction="none")
    of_batch = torch.tensor(v, dtype=torch.float64)[y]
    assert ldam_loss(z, y, [9, 4, 1], weights=v).item() == pytest.approx(
        float((of_batch * losses).sum() / of_batch.sum()), rel=1e-12
    )
    assert ldam_loss(z, y, [9, 4, 1], weights=v, reduction="none").tolist() == pytest.approx(
        (of_batch * losses).tolist(), rel=1e-12
    )
    margins = ldam_margins([9, 4, 1])[y]
    lowered = z.clone()
    lowered[torch.arange(6), y] -= margins
    assert ldam_loss(z, y, [9, 4, 1], weights=v).item() == pytest.approx(
        functional.cross_entropy(30 * lowered, y, weight=torch.tensor(v, dtype=torch.float64)).item(), rel=1e-12
    )
    assert ldam_loss(z[:2], y[:2], [9, 4, 1], weights=[0, 1, 1]).item() == 0.0


@given(count_lists, st.floats(0, 2))
def test_margins_are_largest_for_the_rarest_class(counts, max_margin):
    margins = ldam_margins(counts, max_margin).tolist()
    present = sorted((n, m) for n, m in zip(counts, margins, strict=True) if n)
    assert present[0][1] == pytest.approx(max_margin, rel=1e-12)
    assert [m for _, m in present] == sorted((m for _, m in present), reverse=True)
    assert all(m == 0 for n, m in zip(counts, margins, strict=True) if not n)


# --- terms --------------------------------------------------------------------------------------------------


def two_models() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*other.parameters(), other[1].running_mean]:
            tensor += torch.randn_like(tensor)
    return model, other


def test_proximal_term_of_models():
    model, received = two_models()
    model[0].bias.requires_grad_(False)
    term = proximal_term(model, received, 0.4)
    pairs = [(p, q) for p, q in zip(model.parameters(), received.parameters(), strict=True) if p.requires_grad]
    expected = 0.2 * sum(((p - q) ** 2).sum().item() for p, q in pairs)
    assert term.item() == pytest.approx(expected, rel=1e-12)
    term.backward()
    for p, q in pairs:
        torch.testing.assert_close(p.grad, 0.4 * (p - q).detach(), rtol=1e-12, atol=0)
        assert q.grad is None
    assert model[0].bias.grad is None
    by_name = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for params, reference in [
        (model, received.state_dict()),
        (model, [q for _, q in pairs]),
        (by_name, received),
        (by_name, dict(reversed(received.state_dict().items()))),
        ([p for p, _ in pairs], (q for _, q in pairs)),
    ]:
        assert proximal_term(params, reference, 0.4).item() == pytest.approx(expected, rel=1e-12)


def test_proximal_gradient_has_the_bits_of_the_sum_written_out():
    torch.manual_seed(0)
    sizes = ((3, 4), (5,), (), (2, 3, 1))
    params = [torch.randn(size, requires_grad=True) for size in sizes]
    params.append(torch.randn(4, dtype=torch.float64, requires_grad=True))  # a model may mix precisions
    reference = [torch.randn_like(w) for w in params]
    written_out = 0.5 * 0.3 * sum((w - r).square().sum() for w, r in zip(params, reference, strict=True))
    term = proximal_term(params, reference, 0.3)
    assert term.dtype == torch.float32  # of the first parameter
    assert term.item() == pytest.approx(written_out.item(), rel=1e-6)
    expected = torch.autograd.grad(written_out, params)
    for got, wanted in zip(torch.autograd.grad(term, params), expected, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=0 if got.dtype == torch.float32 else 1e-7, atol=0)


def test_proximal_gradient_has_a_gradient():
    reference = torch.randn(3, dtype=torch.float64)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: proximal_term([x], [reference], 0.7), w)
    assert torch.autograd.gradgradcheck(lambda x: proximal_term([x], [reference], 0.7), w)


def test_proximal_term_without_mu_or_distance():
    model, received = two_models()
    nothing = proximal_term(model, received, 0.0)
    assert nothing.item() == 0.0
    assert not nothing.requires_grad
    assert nothing.dtype == torch.float64
    assert proximal_term(model, copy.deepcopy(model), 3.0).item() == 0.0
    assert proximal_term([], [], 3.0).item() == 0.0


def test_proximal_term_refuses_what_does_not_match():
    model, received = two_models()
    incomplete = received.state_dict()
    del incomplete["2.weight"]
    with pytest.raises(ValueError, match=r"reference has no parameter '2\.weight'"):
        proximal_term(model, incomplete, 0.1)
    with pytest.raises(ValueError, match="reference has 1 tensors, params 6"):
        proximal_term(model, [torch.ones(2)], 0.1)
    with pytest.raises(ValueError, match=r"'0' has shape \(2,\), .* has \(1,\)"):
        proximal_term([torch.ones(2)], [torch.ones(1)], 0.1)
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"mu must be finite and >= 0, got {bad}"):
            proximal_term(model, received, bad)


def test_fairness_term_holds_the_mean_constant():
    loss, mean = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.5, 0.5))
    term = fairness_term(loss, mean)
    term.backward()
    assert (term.item(), loss.grad.item(), mean.grad) == (1.0, 2.0, None)
    with pytest.raises(ValueError, match=r"loss must be a scalar, got shape \(2,\)"):
        fairness_term(torch.ones(2), 0.5)
    with pytest.raises(ValueError, match=r"^global_loss.* got shape \(1,\)$"):
        fairness_term(loss, torch.ones(1))


@settings(deadline=None)
@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(0.01, 5))
def test_model_contrast_equals_the_formula(near, far, temperature):
    expected = -math.log(
        math.exp((near - 1) / temperature) / (math.exp((near - 1) / temperature) + math.exp((far - 1) / temperature))
        if (far - near) / temperature < 300
        else math.exp((near - far) / temperature)
    )
    loss = model_contrastive_loss(*with_cosines(near, far), temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_model_contrast_of_a_batch():
    torch.manual_seed(0)
    z, z_g, z_p = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = model_contrastive_loss(z, z_g, z_p, 0.3, reduction="none")
    near, far = ((z * other).sum(1) / z.norm(dim=1) / other.norm(dim=1) / 0.3 for other in (z_g.detach(), z_p.detach()))
    expected = functional.cross_entropy(
        torch.stack([near, far], 1), torch.zeros(5, dtype=torch.int64), reduction="none"
    )
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=0)
    loss = model_contrastive_loss(z, z_g, z_p, 0.3)
    assert loss.item() == pytest.approx(expected.mean().item(), rel=1e-10)
    assert model_contrastive_loss(z, z_g, z_p, 0.3, "sum").item() == pytest.approx(expected.sum().item(), rel=1e-10)
    loss.backward()
    assert z_g.grad is None
    assert z_p.grad is None
    torch.testing.assert_close(z.grad, torch.autograd.grad(expected.mean(), z)[0], rtol=1e-9, atol=1e-15)
    first_round = model_contrastive_loss(z, z_g, z_g, 0.3, reduction="none")
    assert first_round.tolist() == pytest.approx([math.log(2)] * 5, abs=1e-12)


def test_features_zero_give_log_two():
    z = torch.zeros(2, 3, requires_grad=True)
    loss = model_contrastive_loss(z, torch.ones(2, 3), torch.ones(2, 3))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert bool(z.grad.isfinite().all())


def test_model_contrast_refuses():
    z = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^z.* got \(3,\)$"):
        model_contrastive_loss(z[0], z[0], z[0])
    with pytest.raises(ValueError, match=r"got \(0, 3\)"):
        model_contrastive_loss(z[:0], z[:0], z[:0])
    with pytest.raises(ValueError, match=r"z_previous has .*\(1, 3\), z has \(2, 3\)"):
        model_contrastive_loss(z, z, z[:1])
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature must be finite and > 0, got {bad}"):
            model_contrastive_loss(z, z, z, bad)
    with pytest.raises(ValueError, match=r"^reduction.* got 'max'$"):
        model_contrastive_loss(z, z, z, reduction="max")


# --- bad inputs of all class losses -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3)}, "logits must be floating point"),
        ({"logits": torch.zeros(3, 3, dtype=torch.int64)}, r"got torch\.int64"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"targets must have shape \(3,\).*\(2,\)"),
        ({"targets": torch.zeros(3)}, r"^targets.* got torch\.float32$"),
        ({"targets": torch.tensor([0, 3, 1])}, r"targets must be in \[0, 3\), got 3"),
        ({"targets": torch.tensor([0, -100, 1])}, r"targets must be in \[0, 3\), got -100"),
        ({"logits": torch.zeros(0, 3), "targets": torch.zeros(0, dtype=torch.int64)}, "at least 1 sample"),
        ({"counts": [1, 2]}, "counts are of 2 classes, logits of 3"),
        ({"counts": [1, -2, 3]}, r"^counts of class 1.* got -2\.0$"),
        ({"counts": [1, 2, math.nan]}, "^counts of class 2.* got nan$"),
        ({"counts": [0, 0, 0]}, "counts must not all be 0"),
        ({"counts": [[1, 2, 3]]}, r"^counts.* got \(1, 3\)$"),
        ({"reduction": "max"}, "^reduction.* got 'max'$"),
    ],
)
def test_bad_inputs(name, change, message):
    good = {"logits": torch.zeros(3, 3), "targets": EVERY_CLASS, "counts": [1, 2, 3], "reduction": "mean"} | change
    with pytest.raises(ValueError, match=message):
        CLASS_LOSSES[name](good["logits"], good["targets"], good["counts"], reduction=good["reduction"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z, y: logit_adjusted_cross_entropy(z, y, [1, 2, 3], tau=-1), "tau must be finite and >= 0, got -1"),
        (lambda z, y: fedlc_loss(z, y, [1, 2, 3], tau=math.nan), "tau must be finite and >= 0, got nan"),
        (
            lambda z, y: fedlc_loss(z[:, :1], y * 0, [1], exclude_target=True),
            "with exclude_target must .*got 1",
        ),
        (lambda z, y: ldam_loss(z, y, [1, 2, 3], scale=0), "scale must be finite and > 0, got 0"),
        (lambda z, y: ldam_loss(z, y, [1, 2, 3], max_margin=-1), "^max_margin.* got -1$"),
        (lambda z, y: ldam_loss(z, y, [1, 2, 3], weights=[1, 2]), "weights are of 2 classes, logits of 3"),
        (lambda z, y: ldam_loss(z, y, [1, 2, 3], weights=[1, -2, 1]), "weights of class 1 must be finite"),
        (lambda z, y: class_log_prior([1, 2], floor=0.0), r"floor must be in \(0, 1\], got 0.0"),
        (lambda z, y: class_log_prior([]), r"with C >= 1, got \(0,\)"),
        (lambda z, y: drw_weights([1, 2], 5, 5), "^current_round.* got 5$"),
        (lambda z, y: drw_weights([1, 2], 0, 0), "^num_rounds.* got 0$"),
        (lambda z, y: drw_weights([1, 2], 0, 5, beta=1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda z, y: drw_weights([1, 2], 0, 5, start=1.5), r"start must be in \[0, 1\], got 1.5"),
    ],
)
def test_settings_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 3), EVERY_CLASS)
