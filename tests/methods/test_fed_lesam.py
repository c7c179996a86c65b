"""Test FedLESAM: worked numbers, weights that are restored, one pass a step, absent sites, FedISM's weights on top."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairflare.methods.base.local_loop import make_optimizer
from fairflare.methods.base.site_run import SiteStore
from fairflare.methods.fed_ism import FedISM, SharpnessAwareTraining
from fairflare.methods.fed_lesam import LAST, GlobalPerturbation

from .own import Plane, Points, killed, run

HALF: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.05, "keep_optimizer_state": False}


class Pair(torch.nn.Module):
    """Hold the two tensors of the worked example, at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in "ab")


def begun(half: GlobalPerturbation, folder: Path, model: torch.nn.Module, current_round: int = 1) -> Any:
    folder.mkdir(exist_ok=True)
    told = {"current_round": current_round, "num_rounds": 3, "directives": {}}
    at = SimpleNamespace(site="site-1", store=SiteStore(folder), own=None, **told)
    half.begin_round(at, model)  # type: ignore[arg-type]
    return at


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("paper", (0.023077, 0.030769, 0, 0.092308)), ("authors", (0.017647, 0.023529, 0, 0.070588))],
)
def test_worked_numbers(preset: Any, expected: Any, tmp_path: Path) -> None:
    """Check the way back to a model at (3, 4 | 0, 12), the one of two rounds before where a round was missed."""
    old = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64), "b": torch.tensor([0.0, 12.0], dtype=torch.float64)}
    SiteStore(tmp_path).save(LAST, 0, old)
    found = begun(GlobalPerturbation(preset=preset), tmp_path, Pair(), 2).own.push
    assert torch.cat([found["a"], found["b"]]).tolist() == pytest.approx(expected, abs=1e-6)


def test_without_a_change_there_is_no_perturbation(tmp_path: Path) -> None:
    model = Pair()
    model.b.requires_grad_(False)
    assert begun(GlobalPerturbation(), tmp_path, model, 0).own.push == {}
    assert begun(GlobalPerturbation(), tmp_path, model, 1).own.push == {}
    model.a.data += 1
    assert [*begun(GlobalPerturbation(), tmp_path, model, 2).own.push] == ["a"]  # none of what is frozen
    assert not begun(GlobalPerturbation(rho=0.0), tmp_path, model, 3).own.push


def test_a_step_has_one_pass_and_restores_the_weights(tmp_path: Path) -> None:
    """Check gradient and running statistics at the perturbed model, its bits afterwards, also where a pass fails."""
    model, data = Plane().build_model(), Points("site-1")
    half = GlobalPerturbation(**HALF, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    push = {n: torch.full_like(p, 1e-3) for n, p in model.named_parameters()}
    at: Any = SimpleNamespace(own=SimpleNamespace(push=push))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    passes = []

    def closure() -> torch.Tensor:
        passes.append({n: p.detach().clone() for n, p in model.named_parameters()})
        model.zero_grad()
        loss = Plane().loss(model(data.inputs), data.targets)
        loss.backward()
        if len(passes) == 1:
            raise RuntimeError("out of memory")
        return loss

    optimizer = make_optimizer(half, model.parameters())
    with pytest.raises(RuntimeError, match="out of memory"):
        half.step(at, model, optimizer, closure)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    half.step(at, model, optimizer, closure)
    assert len(passes) == 2
    assert int(model.state_dict()["1.num_batches_tracked"]) == 2  # once a pass
    for name, parameter in model.named_parameters():
        assert torch.equal(passes[1][name], before[name] + push[name])
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), before[name] - 0.05 * parameter.grad)


def test_with_fed_isms_weights_sites_report_the_exact_sharpness(tmp_path: Path) -> None:
    """Check that in the first round both site halves report the same, and that the weights follow."""
    task = Plane("layer")
    rule = {"rho": 0.1, "saga": True}
    ours, _ = run(tmp_path / "a", GlobalPerturbation(**HALF), task=task, rule=FedISM(**rule), num_rounds=2)
    exact, _ = run(
        tmp_path / "b", SharpnessAwareTraining(**HALF, rho=0.1), task=task, rule=FedISM(**rule), num_rounds=1
    )
    assert ours.results["rounds"][0]["reports"] == exact.results["rounds"][0]["reports"]
    assert ours.results["rounds"][1]["site_weights"] != pytest.approx({"site-1": 0.5, "site-2": 0.5}, abs=1e-3)


def test_what_stays_at_a_site_is_not_perturbed(tmp_path: Path) -> None:
    half = GlobalPerturbation(**HALF, personalise="keep:^3")
    _, sites = run(tmp_path, half, task=Plane(), rule=FedISM(saga=False, rho=0.1), num_rounds=2)
    assert {name.split(".")[0] for name in sites.kept("site-1", LAST, 1)} == {"0", "1"}


def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    half, task = GlobalPerturbation(**HALF), Plane()
    whole, _ = run(tmp_path / "whole", half, task=task, rule=FedISM(saga=False, rho=0.1), num_rounds=3)
    plain, _ = run(tmp_path / "plain", GlobalPerturbation(**HALF, rho=0.0), task=task, rule=FedISM(saga=False, rho=0.0))

    rest = killed(tmp_path / "cut", half, task, FedISM(saga=False, rho=0.1), 3)
    found, rest = whole.model()["model"], rest.model()["model"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.items())
    assert not torch.equal(found["0.weight"], plain.model()["model"]["0.weight"])
