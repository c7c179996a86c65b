"""Test Ditto: the own model's steps, and that the common model is not affected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from nvflare.app_opt.pt.ditto import PTDittoHelper
from torch import nn

from fairflare.base.settings import values_of
from fairflare.federation.plan.plan import Script, make_plan
from fairflare.federation.site.worker import round_seed
from fairflare.flare.export.script_plan import make_script_plan
from fairflare.methods.base.local_loop import make_optimizer
from fairflare.methods.base.training import LocalTraining, NotFinite
from fairflare.methods.ditto import DittoTraining, SecondModel
from fairflare.methods.solo import SoloTraining

from .own import SITES, Plane, Sites, run
from .support import same

SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "keep_optimizer_state": False}
ADAM: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.05}


class Double(Plane):
    """Define a network in float64, without a norm."""

    def __init__(self) -> None:
        super().__init__("none")

    def build_model(self) -> nn.Module:
        return super().build_model().double()

    def open_site(self, site: str, settings: Any) -> Any:
        data = super().open_site(site, settings)
        data.inputs = data.inputs.double()
        return data


def reference_v(
    v: dict[str, torch.Tensor], w: Mapping[str, torch.Tensor], data: Any, seed: int, epochs: int, lr: float, lam: float
) -> None:
    """Compute one round of Algorithm 1's inner loop, tensor by tensor: v <- v - lr (grad F(v) + lam (v - w))."""
    for epoch in range(epochs):
        order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(seed + epoch))
        for start in range(0, len(order), 8):
            x, y = data.inputs[order[start : start + 8]], data.targets[order[start : start + 8]]
            hidden = torch.tanh(x @ v["0.weight"].T + v["0.bias"])
            p = torch.softmax(hidden @ v["3.weight"].T + v["3.bias"], 1)
            p[torch.arange(len(y)), y] -= 1
            back = (p @ v["3.weight"]) * (1 - hidden**2) / len(y)
            slope = {
                "3.weight": p.T @ hidden / len(y),
                "3.bias": p.sum(0) / len(y),
                "0.weight": back.T @ x,
                "0.bias": back.sum(0),
            }
            for name in v:
                v[name] = v[name] - lr * (slope[name] + lam * (v[name] - w[name]))


@pytest.mark.parametrize(("lam", "epochs"), [(0.1, 1), (1.0, 2), (2.0, 1)])
def test_parity_with_a_reference_in_float64(tmp_path, lam, epochs) -> None:
    half = DittoTraining(**SGD, learning_rate=0.05, batch_size=8, ditto_lambda=lam, personal_epochs=epochs)
    made, sites = run(tmp_path, half, task=Double())
    for site in SITES:
        data = sites.task.open_site(site, {})
        v = {name: tensor.clone() for name, tensor in made.net.tasks[0].params.items()}
        for current_round in range(3):
            w = made.net.tasks[current_round].params
            reference_v(v, w, data, round_seed(0, site, current_round), epochs, 0.05, lam)
            kept = sites.kept(site, "own_model", current_round)
            for name in v:
                torch.testing.assert_close(kept[name], v[name], atol=1e-12, rtol=0)
        assert any(not torch.equal(v[name], made.model()["model"][name]) for name in v)


def test_the_loss_is_that_of_flare_s_helper(tmp_path) -> None:
    """Compare with FLARE's criterion, whose terms a task's own loop has to add."""

    class Helper(PTDittoHelper):
        def local_train(self, train_loader: Any, model_global: Any, abort_signal: Any = None, writer: Any = None):
            for x, y in train_loader:
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(x), y) + self.prox_criterion(self.model, model_global)
                loss.backward()
                self.optimizer.step()

    half = DittoTraining(**ADAM, ditto_lambda=0.7)
    made, sites = run(tmp_path, half, num_rounds=2)
    task = sites.task
    for site in SITES:
        v, received = task.build_model(), task.build_model()
        v.load_state_dict(made.net.tasks[0].params)
        helper = Helper(
            nn.CrossEntropyLoss(), v, make_optimizer(half, v.parameters()), torch.device("cpu"), str(tmp_path), 0.7
        )
        for current_round in range(2):
            received.load_state_dict(made.net.tasks[current_round].params)
            seed = round_seed(0, site, current_round)
            helper.local_train(task.open_site(site, {}).batches("training", batch_size=8, shuffle_seed=seed), received)
        kept = sites.kept(site, "own_model", 1)
        for name, tensor in v.state_dict().items():
            torch.testing.assert_close(kept[name], tensor, atol=1e-6, rtol=0)


def test_the_common_model_is_fed_avg_s_bit_for_bit(tmp_path) -> None:
    more = {"local_epochs": 2, "norm_statistics": "average"}
    plain, _ = run(tmp_path / "plain", LocalTraining(**ADAM, **more))
    for name, settings in (("one", {}), ("two", {"personal_epochs": 3, "ditto_lambda": 0.1})):
        own, _ = run(tmp_path / name, DittoTraining(**ADAM, **more, **settings))
        for mine, theirs in zip(own.net.tasks, plain.net.tasks, strict=False):
            assert same(mine.params, theirs.params)
        assert same(own.model()["model"], plain.model()["model"])
        assert own.results["test"] != plain.results["test"]


@pytest.mark.parametrize(
    ("keep", "passes"), [(True, {"local_epochs": 2}), (False, {"local_epochs": 1, "personal_epochs": 2})]
)
def test_without_a_pull_the_own_model_is_solo_s_bit_for_bit(tmp_path, keep, passes) -> None:
    ditto, they = run(tmp_path / "ditto", DittoTraining(**ADAM, **passes, ditto_lambda=0.0, keep_optimizer_state=keep))
    solo, alone = run(tmp_path / "solo", SoloTraining(**ADAM, local_epochs=2, keep_optimizer_state=keep))
    for site in SITES:
        for current_round in range(3):
            own = they.kept(site, "own_model", current_round)
            assert same(own, {n: alone.kept(site, "parts", current_round)[n] for n in own})
    assert ditto.results["test"] == solo.results["test"]


def test_an_own_model_that_broke_begins_anew_and_says_so(tmp_path, monkeypatch) -> None:
    """Check that the own model restarts with new moments; the round counts, and no other site is affected."""
    whole, _ = run(tmp_path / "whole", DittoTraining(**ADAM), num_rounds=4)
    real = SecondModel.train

    def broken(self: Any, run: Any, own: Any, received: Any) -> None:
        real(self, run, own, received)
        if (run.site, run.current_round) == ("site-2", 1):
            raise NotFinite("site 'site-2': the training loss became nan")

    monkeypatch.setattr(SecondModel, "train", broken)
    made, sites = run(tmp_path / "broken", DittoTraining(**ADAM), num_rounds=4)
    assert same(sites.kept("site-2", "own_model", 1), made.net.tasks[1].params)
    assert sites.kept("site-2", "own_optimizer", 1)["state"] == {}
    assert sites.kept("site-1", "own_optimizer", 1)["state"] != {}
    said = made.results["rounds"][1]["train"]
    assert said["site-2"]["state_lost"].startswith("its own model begins anew with the received one")
    assert "state_lost" not in said["site-1"]
    assert made.results["rounds"][1]["accepted"] == SITES
    assert same(made.model()["model"], whole.model()["model"])
    monkeypatch.undo()
    fresh = Sites(tmp_path / "fresh", DittoTraining(**ADAM))
    fresh("site-2", "train", made.net.tasks[2])  # what a site with none would train in that round starts elsewhere
    assert not same(fresh.kept("site-2", "own_model", 2), sites.kept("site-2", "own_model", 2))


def test_a_loss_that_explodes_for_the_own_model_alone(tmp_path) -> None:
    """Check a real divergence: so strong a pull with so large a step."""
    half = DittoTraining(**{**SGD, "batch_size": 2, "learning_rate": 0.05}, ditto_lambda=1e9)
    made, sites = run(tmp_path, half)
    assert made.results["status"] == "completed"
    for record in made.results["rounds"]:
        for site in SITES:
            assert "begins anew" in record["train"][site]["state_lost"]
    for tensor in sites.kept("site-1", "own_model", 2).values():
        assert bool(torch.isfinite(tensor.float()).all())


def test_scripts_refuse_it_by_name(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ValueError, match="'ditto' has a model of its own"):
        make_script_plan("ditto", Script(script), model="Net")
    for name in ("solo", "fed_bn"):
        assert make_script_plan(name, Script(script), model="Net").method.name == name
    assert make_script_plan(
        "fed_avg", Script(script), model="Net", settings={"norm_statistics": "site"}
    ).training.norm_statistics == "site"  # fmt: skip


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
def test_settings_are_checked(bad) -> None:
    with pytest.raises(ValueError, match="ditto_lambda"):
        DittoTraining(ditto_lambda=bad)
    with pytest.raises(ValueError, match="personal_epochs"):
        DittoTraining(personal_epochs=0)
    with pytest.raises(ValueError, match=r"local_steps=2 .*leave personal_epochs=3"):
        DittoTraining(local_steps=2, personal_epochs=3)
    with pytest.raises(ValueError, match="norm_statistics"):
        LocalTraining(norm_statistics="mine")
    plan = make_plan("ditto", settings={"ditto_lambda": 0.1, "personal_epochs": 2})
    assert values_of(plan.training)["args"]["ditto_lambda"] == 0.1
