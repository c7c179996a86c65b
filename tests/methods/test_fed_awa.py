"""Test FedAWA: worked numbers, equal models, a model of zeros, absent sites, bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.fed_awa import FedAWA, misfit

START = {"w": torch.tensor([1.0, 0.0]), "bn.running_mean": torch.zeros(1)}
MODELS = {"a": (1.0, 0.2), "b": (0.9, 0.1), "c": (0.5, 1.0)}
SHARES = {"a": 7.0, "b": 2.0, "c": 1.0}


def inputs(models: dict[str, tuple[float, float]] = MODELS, **more: Any) -> RoundInputs:
    states = {s: {"w": torch.tensor(w), "bn.running_mean": torch.full((1,), 1e3)} for s, w in models.items()}
    return RoundInputs(
        0, 1, sorted(models), SHARES, {}, {}, states, {"w": "", "bn.running_mean": "bn"}, received=START,
        parameters={"w"}, **more,
    )  # fmt: skip


def gram() -> torch.Tensor:
    return inputs().whole_gram(FedAWA(), model=True)


def test_worked_numbers_and_the_loss_of_the_models_themselves() -> None:
    shares = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    scores = shares.log().requires_grad_()
    loss = misfit(scores, gram())
    assert float(loss.detach()) == pytest.approx(0.252776, abs=1e-6)
    (found,) = torch.autograd.grad(loss, scores)
    assert found.tolist() == pytest.approx([-0.144346, -0.032209, 0.176555], abs=1e-6)
    w, start = torch.tensor([*MODELS.values()], dtype=torch.float64), START["w"].double()
    apart = ((w - start) - shares @ (w - start)).norm(dim=1)
    turned = 1 - torch.nn.functional.cosine_similarity(w, start[None])
    assert float(loss.detach()) == pytest.approx(float(shares @ (apart + turned)), abs=1e-7)  # states are float32


def test_one_step_is_a_thousandth_and_many_go_to_the_agreeing_sites() -> None:
    rule = FedAWA()
    weights = rule.weigh(inputs()).sites
    assert [*(weights or {}).values()] == pytest.approx([0.700140, 0.200040, 0.099820], abs=1e-6)
    again = rule.weigh(inputs()).sites
    assert (again or {})["c"] < 0.0998  # T outlives the round
    far = FedAWA(awa_steps=100, awa_rate=0.05).weigh(inputs()).sites
    assert (far or {})["c"] < 0.05


def test_equal_models_and_a_single_site_keep_the_weights() -> None:
    """Check that rounding errors of equal models are no direction, which Adam would turn into a whole step."""
    models = dict.fromkeys("abc", (0.3, 0.7))
    weights = FedAWA(awa_steps=5).weigh(inputs(models)).sites
    assert [*(weights or {}).values()] == pytest.approx([0.7, 0.2, 0.1], abs=1e-9)
    assert FedAWA().weigh(inputs({"b": (0.9, 0.1)})).sites == {"b": 1.0}


def test_without_the_model_or_with_one_of_zeros_only_distances_count() -> None:
    scores = torch.zeros(3, dtype=torch.float64)
    apart = misfit(scores, gram()[:3, :3])
    zeros = gram()
    zeros[3], zeros[:, 3] = 0, 0
    assert float(misfit(scores, zeros)) == float(apart) < float(misfit(scores, gram()))


def test_an_absent_site_keeps_its_score_and_a_bound_is_remembered() -> None:
    rule = FedAWA()
    rule.weigh(inputs())
    kept = rule.state_dict()["scores"]["c"]
    rule.weigh(inputs({"a": (1.0, 0.2), "b": (0.9, 0.1)}))
    assert rule.state_dict()["scores"]["c"] == kept
    capped = {"a": 0.4, "b": 0.4, "c": 0.2}
    weights = rule.weigh(replace(inputs(), remembered=lambda found: capped)).sites
    assert weights == capped
    scores = torch.tensor([rule.state_dict()["scores"][s] for s in "abc"], dtype=torch.float64)
    assert torch.softmax(scores, 0).tolist() == pytest.approx([0.4, 0.4, 0.2], abs=1e-9)
