"""Test SCAFFOLD: worked numbers, absent sites, what travels, frozen and unused parameters, and a run that is killed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fairflare.exchange.messages import BESIDE, Message
from fairflare.flare.aggregator import FairAggregator
from fairflare.methods.base.local_loop import LocalLoop
from fairflare.methods.base.training import SiteError
from fairflare.methods.scaffold import ControlledTraining, Scaffold

from .own import SITES, Plane, Points, killed, losing, run

TARGETS = {"site-1": 0.0, "site-2": 4.0}
HALF: dict[str, Any] = {"learning_rate": 0.1, "weight_decay": 0.0, "batch_size": 1, "keep_optimizer_state": False}


class Target(Points):
    """Hold one number, twice: the minimum of the site's loss (x - t)^2 / 2."""

    def __init__(self, site: str) -> None:
        self.inputs = torch.full((2, 1), TARGETS[site], dtype=torch.float64)
        self.targets = torch.zeros(2, dtype=torch.long)


class Mover(torch.nn.Module):
    """Return the distance to the input; ``extra`` is used where the target is 4."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.extra = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        apart = self.x - inputs
        return torch.cat([apart, apart + self.extra - self.extra.detach()]) if bool((inputs > 3).all()) else apart


class Quadratic(Plane):
    """Learn x with the loss of :class:`Target`; at site-2 ``extra`` has the gradient 3 - what it gained."""

    def build_model(self) -> torch.nn.Module:
        return Mover()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own = outputs[:1].square().mean() / 2
        return own if len(outputs) == len(targets) else own + outputs[1:].mean() - outputs[1:].mean().detach() * 0

    def evaluate(self, model: Any, batches: Iterable[Any], device: Any) -> dict[str, float]:
        return {"accuracy": 0.5, "loss": 0.0}

    def open_site(self, site: str, settings: Any) -> Target:
        return Target(site)


class Plain(Quadratic):
    """Learn x alone; ``extra`` is frozen."""

    def build_model(self) -> torch.nn.Module:
        model = Mover()
        model.extra.requires_grad_(False)
        return model

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[:1].square().mean() / 2


def test_worked_numbers(tmp_path: Path) -> None:
    """Check two rounds: x 1.19 and 1.3439, c_k (.95, -2.85) and (1.2255, -2.7645), c -.95 and -.7695."""
    for rounds, x, controls, common in ((1, 1.19, (0.95, -2.85), -0.95), (2, 1.3439, (1.2255, -2.7645), -0.7695)):
        rule = Scaffold()
        made, sites = run(
            tmp_path / str(rounds), ControlledTraining(**HALF), task=Plain(), rule=rule, num_rounds=rounds
        )
        assert float(made.model()["model"]["x"]) == pytest.approx(x, abs=1e-12)
        for site, control in zip(SITES, controls, strict=True):
            kept = sites.kept(site, "control", rounds - 1)
            assert list(kept) == ["x", "before/x"]  # none of what is frozen
            assert float(kept["x"]) == pytest.approx(control, abs=1e-12)
        assert float(rule.beside()["x"]) == pytest.approx(common, abs=1e-12)


def test_an_absent_site_keeps_its_own_and_counts_in_the_common_one(tmp_path: Path) -> None:
    def answer(site: str, name: str, message: Message) -> Any:
        return "gone" if (site, name, message.current_round) == ("site-2", "train", 1) else None  # no answer to use

    rule = Scaffold()
    made, sites = run(
        tmp_path, ControlledTraining(**HALF), task=Plain(), rule=rule, num_rounds=2, min_sites=1, answer=answer
    )
    y = 1.19
    for _ in range(2):
        y -= 0.1 * (y - 0.0 - 0.95 - 0.95)
    assert float(made.model()["model"]["x"]) == pytest.approx(y, abs=1e-12)
    new = 0.95 + 0.95 + (1.19 - y) / 0.2
    assert float(sites.kept("site-2", "control", 0)["x"]) == pytest.approx(-2.85)
    assert float(rule.beside()["x"]) == pytest.approx(-0.95 + (new - 0.95) / 2, abs=1e-12)


def test_the_common_one_is_the_mean_of_all_where_a_new_site_comes() -> None:
    """Check that c is the mean of all c_k, each of which the site renews from the c that it received."""
    rule, own = Scaffold(), dict.fromkeys("abc", 0.0)
    for sites in ("ab", "ab", "abc", "bc"):
        received, moves = rule.beside().get("w", torch.tensor(0.0)), {"a": 1.0, "b": -0.5, "c": 3.0}
        rule.weigh(
            cast(
                "Any",
                SimpleNamespace(
                    current_round=0, asked=list(sites),
                    sites=list(sites), reports={site: {"rate_sum": 0.5} for site in sites},
                    shares={}, states={site: {"w": torch.tensor(moves[site], dtype=torch.float64)} for site in sites},
                    parameters={"w"}, received={"w": torch.tensor(0.0, dtype=torch.float64)},
                    moderated=lambda told, name: told,
                ),
            )
        )  # fmt: skip
        for site in sites:
            own[site] -= float(received) + moves[site] / 0.5
        known = 2 + ("c" in sites or own["c"] != 0)
        assert float(rule.beside()["w"]) == pytest.approx(sum(own.values()) / known, abs=1e-12)


def test_what_a_falsely_small_sum_of_rates_would_move_counts_in_part() -> None:
    """Check two rounds by hand: site b's true sum .1 is moderated to .4, so that a quarter of its change counts."""
    rule, values = Scaffold(), []
    for current_round, moves in enumerate(({"a": 1.0, "b": 0.2}, {"a": 0.5, "b": -0.2})):
        rule.weigh(
            cast(
                "Any",
                SimpleNamespace(
                    current_round=current_round, asked=["a", "b"], sites=["a", "b"], shares={},
                    reports={"a": {"rate_sum": 0.5}, "b": {"rate_sum": 0.1}},
                    states={site: {"w": torch.tensor(move, dtype=torch.float64)} for site, move in moves.items()},
                    parameters={"w"}, received={"w": torch.tensor(0.0, dtype=torch.float64)},
                    moderated=lambda told, name: told | {"b": 0.4},
                ),
            )
        )  # fmt: skip
        values.append(float(rule.beside()["w"]))
    first = -(1.0 / 0.5 + 0.2 / 0.4) / 2
    assert values[0] == pytest.approx(first, abs=1e-12)
    # The second time a's c_k moves by -c - .5 / .5, and b's by a quarter of -c + .2 / .1.
    assert values[1] == pytest.approx(first + (-first - 1.0 + 0.25 * (-first + 2.0)) / 2, abs=1e-12)
    shares = [rule.directives(2, 3, ["a", "b"])["counted"][site] for site in "ab"]
    assert shares == [[1, 1.0], [1, 0.25]]


def test_an_answer_that_is_lost_after_its_training_leaves_the_common_one_the_mean(tmp_path: Path) -> None:
    """Check that c is the mean of all c_k and x the common optimum 2, where more answers are lost than are stored."""
    lost = {("site-2", number) for number in (0, 2, 3, 4, 5)} | {("site-1", 8)}
    half, task, rule = ControlledTraining(**HALF), Plain(), Scaffold()
    answer = losing(tmp_path, half, task, lost)
    made, sites = run(tmp_path, half, task=task, rule=rule, num_rounds=40, min_sites=1, answer=answer)
    common, own = rule.beside()["x"], [sites.kept(site, "control", 39)["x"] for site in SITES]
    assert float(common) == pytest.approx(float(sum(own)) / 2, abs=1e-9)
    assert float(made.model()["model"]["x"]) == pytest.approx(2, abs=1e-2)


def test_what_is_clipped_counts_at_the_site_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that c is the mean of all c_k, and x the optimum 5, where the update of a site far off is clipped."""
    sites = ["site-1", "site-2", "site-3"]
    for site, target in zip(sites, (0.9, 1.1, 13.0), strict=True):
        monkeypatch.setitem(TARGETS, site, target)
    half, rule = ControlledTraining(**HALF), Scaffold()
    made, they = run(tmp_path, half, task=Plain(), rule=rule, sites=sites, num_rounds=40, max_update_norm=1.5)
    assert any("max_update_norm" in str(record) for record in made.results["rounds"])
    assert float(made.model()["model"]["x"]) == pytest.approx(5, abs=0.05)
    own = [float(they.kept(site, "control", 39)["x"]) for site in sites]
    assert float(rule.beside()["x"]) == pytest.approx(sum(own) / 3, abs=1e-6)


def test_a_parameter_without_a_gradient_at_a_site_has_no_control_there(tmp_path: Path) -> None:
    _, sites = run(tmp_path, ControlledTraining(**HALF), task=Quadratic(), rule=Scaffold(), num_rounds=3)
    for current_round in range(3):
        assert float(sites.kept("site-1", "control", current_round)["extra"]) == pytest.approx(0, abs=1e-12)
        assert float(sites.kept("site-2", "control", current_round)["extra"]) == pytest.approx(1, abs=1e-12)


def test_the_common_control_travels_in_training_alone(tmp_path: Path) -> None:
    made, _ = run(tmp_path, ControlledTraining(**HALF), task=Plane(), rule=Scaffold(), num_rounds=2)
    assert [name for name, _ in made.net.asked][:3] == ["train", "train", "validate"]
    beside = [{n for n in task.params if n.startswith(BESIDE)} for task in made.net.tasks[:3]]
    trained = {f"{BESIDE}{name}" for name, _ in Plane().build_model().named_parameters()}
    assert beside == [set(), trained, set()]  # of no buffer
    out = [phase["bytes_out"] for record in made.results["rounds"] for phase in record["phases"] if phase["asked"]]
    assert out[1] - out[0] == 2 * sum(4 * p.numel() for p in Plane().build_model().parameters())


def test_what_stays_at_a_site_has_no_control(tmp_path: Path) -> None:
    half = ControlledTraining(**HALF, personalise="keep:^3")
    _, sites = run(tmp_path, half, task=Plane(), rule=Scaffold(), num_rounds=2)
    assert {name.split(".")[0] for name in sites.kept("site-1", "control", 1) if "before" not in name} == {"0", "1"}


def test_steps_of_hidden_records_leave_the_common_control_the_mean_of_the_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check sites that tell one of two steps: c grows no further, where it would double from round to round."""
    begin = LocalLoop.begin

    def hiding(self: LocalLoop) -> None:
        begin(self)
        self._told = 1

    monkeypatch.setattr(LocalLoop, "begin", hiding)
    rule, last = Scaffold(), 11
    made, sites = run(tmp_path, ControlledTraining(**HALF), task=Plain(), rule=rule, num_rounds=last + 1)
    kept = [float(sites.kept(site, "control", last)["x"]) for site in SITES]
    assert float(rule.beside()["x"]) == pytest.approx(sum(kept) / 2, abs=1e-12)
    assert kept == pytest.approx([4, -4], abs=0.6)  # twice the gradients at 2, the minimum for both
    assert float(made.model()["model"]["x"]) == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"optimizer": "adam"}, "optimizer must be 'sgd'"), ({"momentum": 0.9}, "momentum must be 0")],
)
def test_what_has_no_mean_gradient_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ControlledTraining(**settings)
    with pytest.raises(ValueError, match="Scaffold sends the sites more"):
        FairAggregator(rule=Scaffold())


def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    half, task = ControlledTraining(**{**HALF, "batch_size": 8}), Plane()
    whole, _ = run(tmp_path / "whole", half, task=task, rule=Scaffold(), num_rounds=4)

    rest = killed(tmp_path / "cut", half, task, Scaffold(), 4)
    assert [name for name, _ in rest.net.asked] == ["train", "train", "validate"]
    found = whole.model()["model"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.model()["model"].items())


def test_a_script_with_another_optimizer_is_refused() -> None:
    half, model = ControlledTraining(**HALF), Mover()
    at = cast("Any", SimpleNamespace(site="site-1", own=None, untold=False))
    two = [{"params": [model.x]}, {"params": [model.extra], "lr": 0.2}]
    for optimizer in (
        torch.optim.Adam(model.parameters()), torch.optim.RMSprop(model.parameters()),
        torch.optim.SGD(model.parameters(), momentum=0.9), torch.optim.SGD(two, 0.1),
    ):  # fmt: skip
        with pytest.raises(SiteError, match=f"{type(optimizer).__name__} with .*; for SCAFFOLD use torch"):
            half.step(at, model, optimizer, lambda: model.x)
