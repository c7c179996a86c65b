"""FedMRL and FedProx: both halves against the spec's numbers, alone and in a federation in one process."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fairflare.core import losses
from fairflare.core.qmix import MU_GRID, reward
from fairflare.flare.checkpoint import CheckpointFolder
from fairflare.flare.in_process import InProcessController, run_in_process
from fairflare.flare.site import SiteTask, SiteWorker
from fairflare.methods import get_method
from fairflare.methods.base import LocalTraining
from fairflare.methods.fed_mrl import FairProximalTraining, FedMRL, ProximalTraining
from fairflare.recipes import FairRecipe
from fairflare.tasks.classification import ClassificationTask

from .test_aggregators import net_state, train_reply

pytestmark = pytest.mark.usefixtures("one_thread")
TINY: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8], "max_pool": False, "phantom_sites": 3, "phantom_samples": 120,
    "phantom_test": 64, "phantom": "dermoscopy7", "partition": "iid",
}  # fmt: skip
PLAIN: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.0, "weight_decay": 0.0,
                         "keep_optimizer_state": False}  # fmt: skip
SITES = ("a", "b", "c")


def report(**own: Any) -> dict[str, Any]:
    return {
        "train_loss": 1.0, "accuracy": 0.5, "global_accuracy": 0.5, "num_validation": 10, "entropy": -0.5,
        "num_classes": 7, "mu": 1e-5, **own,
    }  # fmt: skip


def one_round(
    aggregator, reports, current_round=0, *, num_rounds=4, asked=SITES, samples=None, states=None, received=None
):
    """A round with reports in hand; the directives in front of it, and the new model."""
    received = net_state(99) if received is None else received
    aggregator.begin_round(current_round, num_rounds, global_state=received, folder=None, sites=asked)
    told = aggregator.directives(current_round, num_rounds)
    for site, found in reports.items():
        state = (states or {}).get(site, net_state(ord(site[0]) + current_round))
        aggregator.accept_model(
            train_reply(site, state, received, report=found, samples=(samples or {}).get(site, 10),
                        current_round=current_round)
        )  # fmt: skip
    return told, aggregator.aggregate_model().params


# ------------------------------------------------------------------------------------------------ part A


class Regression:
    """A tiny network in float64 and the same in NumPy: linear, tanh, linear, softmax; one layer's bias is frozen."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.x, self.y = self.rng.normal(size=(6, 3)), self.rng.integers(0, 3, 6)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
        self.parts = [p for name, p in self.model.named_parameters() if name != "0.bias"]
        self.model[0].bias.requires_grad_(False)

    def put(self, flat) -> None:
        with torch.no_grad():
            for part in self.parts:
                part.copy_(torch.from_numpy(flat[: part.numel()]).reshape(part.shape))
                flat = flat[part.numel() :]

    def loss(self, flat) -> float:
        w1, w2, b2 = flat[:12].reshape(4, 3), flat[12:24].reshape(3, 4), flat[24:]
        logits = np.tanh(self.x @ w1.T + self.model[0].bias.numpy()) @ w2.T + b2
        logits = logits - logits.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(6), self.y]))

    def gradient(self, training, directives, received, here):
        """Of the method's objective at ``here`` after the model ``received`` came in."""
        run = SimpleNamespace(
            site="h", directives=directives, device="cpu", task=SimpleNamespace(loss=torch.nn.functional.cross_entropy)
        )
        self.put(received)
        training.begin_round(run, self.model)
        self.put(here)
        self.model.zero_grad()
        value = training.loss(run, self.model, torch.from_numpy(self.x), torch.from_numpy(self.y))
        value.backward()
        return float(value.detach()), torch.cat([part.grad.reshape(-1) for part in self.parts]).numpy()


def differences(function, flat, h=1e-6):
    steps = np.eye(len(flat)) * h
    return np.array([(function(flat + step) - function(flat - step)) / (2 * h) for step in steps])


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize("above", [-2.0, -0.3, 0.0, 0.4, 20.0])
@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_gradient_of_the_objective_against_finite_differences(mu, above, weight):
    """``above``: how far the batch's loss lies above the mean of the sites."""
    problem = Regression()
    received, here = problem.rng.normal(size=27), problem.rng.normal(size=27)
    own = problem.loss(here)
    told = {"mean_loss": own - above, "mu": {"h": mu, "other": 0.9}}

    def proximal(w):
        return mu / 2 * float(np.sum((w - received) ** 2))

    def literal(w):
        return problem.loss(w) + proximal(w) + weight * (problem.loss(w) - (own - above)) ** 2

    value, found = problem.gradient(FairProximalTraining(fair_weight=weight, fair_clamp=None), told, received, here)
    assert value == pytest.approx(literal(here), rel=1e-12)
    np.testing.assert_allclose(found, differences(literal, here), rtol=1e-5, atol=1e-7)

    factor = min(max(1 + 2 * weight * above, 0.0), 10.0)  # at ``here``, constant
    _, found = problem.gradient(FairProximalTraining(fair_weight=weight), told, received, here)
    np.testing.assert_allclose(
        found, differences(lambda w: factor * problem.loss(w) + proximal(w), here), rtol=1e-5, atol=1e-7
    )


def test_first_round_and_switched_off_have_no_fairness_term():
    problem = Regression()
    received, here = problem.rng.normal(size=27), problem.rng.normal(size=27)
    _, plain = problem.gradient(ProximalTraining(mu=0.2), {}, received, here)
    np.testing.assert_allclose(
        plain, differences(lambda w: problem.loss(w) + 0.1 * np.sum((w - received) ** 2), here), rtol=1e-5, atol=1e-7
    )
    for settings, told in (
        ({}, {}),
        ({"use_fair": False}, {"mean_loss": 9.0}),
        ({"fair_weight": 0.0}, {"mean_loss": 9.0}),
    ):
        _, found = problem.gradient(FairProximalTraining(mu=0.2, **settings), told, received, here)
        assert np.array_equal(found, plain)


@pytest.mark.parametrize(
    ("weight", "clamp", "loss", "factor"),
    [
        (1.0, 0.0, 0.4, 0.2), (1.0, 0.0, 0.8, 1.0), (1.0, 0.0, 1.2, 1.8),
        (0.5, 0.0, 0.4, 0.6), (0.5, 0.0, 0.8, 1.0), (0.5, 0.0, 1.2, 1.4),
        (1.0, None, 0.2, -0.2), (1.0, 0.0, 0.2, 0.0), (1.0, 0.1, 0.2, 0.1), (1.0, 0.0, 99.0, 10.0),
    ],
)  # fmt: skip
def test_gradient_factors_of_the_spec(weight, clamp, loss, factor):
    training = FairProximalTraining(fair_weight=weight, fair_clamp=clamp)
    training._mean_loss = 0.8
    own = torch.tensor(loss, dtype=torch.float64, requires_grad=True)
    training.fair(own).backward()
    assert float(own.grad) == pytest.approx(factor, abs=1e-12)


def test_mean_loss_of_the_spec():
    """Spec 10.1; the sum over sites of the squared distances is 0.32."""
    found = {}
    for mode in ("mean", "weighted", "sum"):
        aggregator = FedMRL(mean_loss=mode)
        reports = {site: report(train_loss=loss) for site, loss in zip(SITES, (0.4, 0.8, 1.2), strict=True)}
        told, _ = one_round(aggregator, reports, samples={"a": 100, "b": 300, "c": 600})
        assert "mean_loss" not in told
        found[mode] = aggregator.directives(1, 4)["mean_loss"]
        assert aggregator.last_weighing.values["mean_loss"] == found[mode]
    assert found == pytest.approx({"mean": 0.8, "weighted": 1.0, "sum": 2.4})
    terms = [float(losses.fairness_term(torch.tensor(x, dtype=torch.float64), 0.8)) for x in (0.4, 0.8, 1.2)]
    assert sum(terms) == pytest.approx(0.32)


def test_proximal_term_of_the_spec():
    """Spec 10.2."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))})
    training = ProximalTraining(mu=0.1)
    training.begin_round(SimpleNamespace(directives={}, site="a"), model)
    with torch.no_grad():
        model["w"][0] = 2.0
    term = losses.proximal_term(model, training._received, training._mu)
    term.backward()
    assert float(term.detach()) == pytest.approx(0.05)
    assert model["w"].grad.tolist() == pytest.approx([0.1, 0.0])


@pytest.mark.parametrize(("told", "used"), [(0.4, 0.4), (0.0, 0.0), (math.nan, 1e-5), (math.inf, 1e-5), (-0.1, 1e-5)])
def test_mu_that_a_site_is_told(told, used):
    training = ProximalTraining(mu=0.7)
    training.begin_round(SimpleNamespace(directives={"mu": {"a": told}}, site="a"), torch.nn.Linear(1, 1))
    assert training._mu == used
    training.begin_round(SimpleNamespace(directives={"mu": {"b": told}}, site="a"), torch.nn.Linear(1, 1))
    assert training._mu == 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mu": -0.1}, "mu must be finite and >= 0"),
        ({"mu": math.nan}, "mu must be finite"),
        ({"fair_weight": -1.0}, "fair_weight must be"),
        ({"fair_weight": math.inf}, "fair_weight must be"),
        ({"fair_clamp": -0.1}, "fair_clamp must lie in"),
        ({"fair_clamp": 11.0}, "fair_clamp must lie in"),
        ({"fair_max": math.nan}, "fair_max must be finite"),
        ({"fair_max": 0.0}, "fair_max must be finite and > 0"),
        ({"fair_mode": "round"}, "fair_mode must be one of"),
    ],
)
def test_site_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        FairProximalTraining(**settings)


# ------------------------------------------------------------------------------------------------ a site


@pytest.fixture(scope="module")
def start():
    torch.manual_seed(0)
    return ClassificationTask(**TINY).build_model().state_dict()


def train(training: LocalTraining, folder, state, directives=None):
    worker = SiteWorker("site-1", ClassificationTask(**TINY), training, {}, folder)
    return worker, worker.perform(SiteTask("train", dict(state), 1, 4, 0, directives or {}))


def norm(update) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for n, t in update.items() if n.startswith("head")))


def test_proximal_term_pulls_and_none_is_plain_training(tmp_path, start):
    settings = {**PLAIN, "batch_size": 8, "local_epochs": 2}
    plain = train(LocalTraining(**settings), tmp_path / "plain", start)[1].update
    sizes = []
    for mu in (0.0, 5.0, 50.0):
        update = train(ProximalTraining(mu=mu, **settings), tmp_path / str(mu), start)[1].update
        sizes.append(norm(update))
        if mu == 0:
            assert all(torch.equal(plain[k], update[k]) for k in plain)
    assert sizes[0] > 1.1 * sizes[1] > 1.1 * 1.1 * sizes[2], sizes


def test_report(tmp_path, start):
    """What each number is measured on; the training loss without the two further terms, of the last epoch."""
    still = {**PLAIN, "learning_rate": 1e-12, "batch_size": 8, "local_epochs": 2}
    _, plain = train(LocalTraining(**still), tmp_path / "plain", start)
    _, reply = train(
        FairProximalTraining(**still), tmp_path / "still", start, {"mean_loss": 0.1, "mu": {"site-1": 9.0}}
    )
    assert reply.report["train_loss"] == pytest.approx(plain.stats["train_loss"], rel=1e-6)
    assert reply.stats["train_loss"] > 2 * plain.stats["train_loss"]  # the objective

    worker, reply = train(FairProximalTraining(batch_size=8, local_epochs=2), tmp_path / "a", start, {"mean_loss": 1.5})
    data = worker._data
    model = worker.task.build_model()
    found = []
    for state in (start, {name: tensor + reply.update[name] for name, tensor in start.items()}):
        model.load_state_dict(state)
        found.append(worker.task.evaluate(model, data.batches("validation", batch_size=8), "cpu")["accuracy"])
    assert (reply.report["global_accuracy"], reply.report["accuracy"]) == tuple(found)
    assert reply.report["num_validation"] == data.num_samples("validation")
    counts = data.class_counts("training").double()
    shares = counts[counts > 0] / counts.sum()
    assert reply.report["entropy"] == pytest.approx(float((shares * shares.log()).sum()))
    assert reply.report["num_classes"] == 7
    assert reply.report["mu"] == 0.1
    assert set(reply.report) == {f.name for f in FedMRL.report_fields}


def test_a_site_may_withhold_its_entropy(tmp_path, start):
    _, reply = train(FairProximalTraining(share_entropy=False), tmp_path, start)
    assert reply.report["entropy"] is None
    aggregator = FedMRL()
    one_round(aggregator, {"a": report(entropy=-0.3), "b": report(entropy=None)}, asked=("a", "b"))
    assert aggregator.rejected == {}
    seen = aggregator._agents.state_dict()["last_observation"]
    assert seen[:, 0].tolist() == pytest.approx([-0.3 / math.log(7), -0.5])


def test_factor_of_the_whole_round(tmp_path, start, monkeypatch):
    """fair_mode epoch: from the mean loss of the received model over the training set, which leaves no trace."""
    factors = []
    fair = FairProximalTraining.fair
    monkeypatch.setattr(FairProximalTraining, "fair", lambda self, own: factors.append(self._factor) or fair(self, own))
    settings = {"batch_size": 8, "keep_optimizer_state": False, "fair_mode": "epoch"}
    told = {"mean_loss": 1.2}
    worker, reply = train(FairProximalTraining(**settings), tmp_path / "a", start, told)
    model = worker.task.build_model().double()
    model.load_state_dict(start)
    model.eval()
    ((images, labels),) = worker._data.batches("training", batch_size=10**6)
    whole = float(torch.nn.functional.cross_entropy(model(images.double()), labels).detach())
    assert len(set(factors)) == 1
    assert len(factors) == reply.num_steps > 1
    assert factors[0] == pytest.approx(1 + 2 * (whole - 1.2), rel=1e-5)

    one = train(FairProximalTraining(**settings, fair_clamp=1.0, fair_max=1.0), tmp_path / "b", start, told)[1].update
    none = train(ProximalTraining(batch_size=8, keep_optimizer_state=False), tmp_path / "c", start)[1].update
    assert all(torch.equal(one[k], none[k]) for k in none)


@pytest.mark.parametrize(("clamp", "factor"), [(0.0, 10.0), (None, 41.0)])
def test_literal_means_without_limits_in_both_modes(clamp, factor):
    assert FairProximalTraining(fair_clamp=clamp)._clamped(20.0) == factor
    assert FairProximalTraining(fair_clamp=clamp)._clamped(-20.0) == (0.0 if clamp == 0 else -39.0)


def test_a_loss_that_blows_up_costs_the_site_its_round(tmp_path, start):
    broken = {name: tensor * 1e30 if tensor.is_floating_point() else tensor for name, tensor in start.items()}
    _, reply = train(FairProximalTraining(**{**PLAIN, "learning_rate": 1e30}), tmp_path, start, {"mean_loss": 1.0})
    assert reply.status == "failed"
    assert "not finite" in reply.reason or "loss became" in reply.reason
    _, reply = train(FairProximalTraining(), tmp_path / "b", broken, {"mean_loss": 1.0})
    assert reply.status == "failed"


def test_segmentation_has_no_classes(tmp_path):
    from fairflare.tasks.segmentation import SegmentationTask

    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 4, 8, 8, 4), phantom_cases=0.1)
    torch.manual_seed(0)
    state = task.build_model().state_dict()
    aggregator = FedMRL()
    aggregator.begin_round(0, 3, global_state=state, folder=None, sites=("site-1", "site-2"))
    for site in ("site-1", "site-2"):
        training = FairProximalTraining(fair_mode="epoch")
        reply = SiteWorker(site, task, training, {}, tmp_path / site).perform(
            SiteTask("train", dict(state), 0, 3, 0, {"mean_loss": 0.5, "mu": {site: 0.1}})
        )
        assert reply.status == "ok", reply.reason
        assert reply.report["entropy"] is reply.report["num_classes"] is None
        assert reply.report["global_accuracy"] == reply.metrics["dice"]
        model = train_reply(site, {}, report=reply.report)
        model.params, model.params_type = reply.update, "DIFF"
        aggregator.accept_model(model)
    assert aggregator.rejected == {}
    aggregator.aggregate_model()
    assert aggregator._agents.state_dict()["last_observation"][:, 0].tolist() == [-0.5, -0.5]


# ------------------------------------------------------------------------------------------------ server half


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zeta": -0.01}, r"zeta is a fraction in \[0, 1\], got -0.01"),
        ({"zeta": 95.0}, "percentage"),
        ({"zeta": math.nan}, "zeta is a fraction"),
        ({"zeta": True}, "zeta is a fraction"),
        ({"actions": []}, "actions must be ascending numbers"),
        ({"actions": [0.1, 0.1]}, "actions must be ascending"),
        ({"actions": [0.5, 0.1]}, "actions must be ascending"),
        ({"actions": [0.0, 1.5]}, "actions must be ascending"),
        ({"actions": [math.nan]}, "actions must be ascending"),
        ({"grid": ()}, "grid must be two whole numbers"),
        ({"grid": (0, 5)}, "grid must be two whole numbers"),
        ({"mu_policy": "dqn"}, "mu_policy must be one of"),
        ({"mean_loss": "median"}, "mean_loss must be one of"),
        ({"explore": 1.5}, "explore must lie in"),
        ({"action_mode": "continuous"}, "unknown action_mode"),
        ({"gamma": 1.5}, "gamma must be in"),
        ({"agent_rate": 0.0}, "lr must be finite and > 0"),
        ({"updates": 0}, "updates must be a whole number"),
        ({"som_init": "zeros"}, "unknown init"),
        ({"sigma_w": 0.0}, "sigma_w must be finite and > 0"),
        ({"agent_seed": -1}, "seed must be a whole number"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        FedMRL(**settings)


def test_identical_models_keep_their_scale():
    """Spec 10.9: the literal Eq. 10 would give 0.5."""
    ones = {"w": torch.ones(4), "b": torch.ones(1)}
    aggregator = FedMRL()
    for current_round in range(2):
        _, model = one_round(
            aggregator, {"a": report(), "b": report()}, current_round, asked=("a", "b"), received=ones,
            states={"a": ones, "b": ones},
        )  # fmt: skip
        assert aggregator.last_weighing.sites == pytest.approx({"a": 0.5, "b": 0.5})
        assert all(torch.equal(model[name], ones[name]) for name in ones)


def test_zero_model_and_equal_similarities():
    zeros = {"w": torch.zeros(4), "b": torch.zeros(2)}
    states = {"a": zeros, "b": {"w": torch.zeros(4), "b": torch.tensor([1.0, 0.0])}, "c": zeros}
    for som_input in ("weights", "updates"):
        aggregator = FedMRL(som_input=som_input)
        for current_round in range(3):
            _, model = one_round(aggregator, {s: report() for s in SITES}, current_round, received=zeros, states=states)
            weights = aggregator.last_weighing.sites
            assert sum(weights.values()) == pytest.approx(1)
            assert all(math.isfinite(w) and w > 0 for w in weights.values())
            assert float(model["b"][0]) == pytest.approx(weights["b"])
    aggregator = FedMRL()
    one_round(aggregator, {s: report() for s in SITES}, received=zeros, states=dict.fromkeys(SITES, zeros))
    assert aggregator.last_weighing.sites == pytest.approx(dict.fromkeys(SITES, 1 / 3))


def test_one_site():
    aggregator = FedMRL()
    for current_round in range(4):
        _, model = one_round(aggregator, {"a": report(train_loss=0.7)}, current_round, asked=("a",))
        assert aggregator.last_weighing.sites == {"a": 1.0}
        torch.testing.assert_close(model["head.weight"], net_state(ord("a") + current_round)["head.weight"])
    assert aggregator.directives(4, 4)["mean_loss"] == 0.7


def test_site_that_does_not_fit_on_the_map_has_no_weight():
    received = {"w": torch.ones(4, dtype=torch.float64)}
    states = {"a": {"w": received["w"] * 1.1}, "b": {"w": received["w"] * 1e200}, "c": {"w": received["w"] * 0.9}}
    aggregator = FedMRL()
    _, model = one_round(aggregator, {s: report() for s in SITES}, received=received, states=states)
    weights = aggregator.last_weighing.sites
    assert weights["b"] == 0
    assert weights["a"] + weights["c"] == pytest.approx(1)
    assert bool((model["w"] < 1.2).all())
    assert set(aggregator.last_weighing.details["som"]["bmu"]) == {"a", "c"}


ACCURACIES = (0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize("policy", ["qmix", "vdn"])
def test_a_choice_is_used_in_the_next_round_and_rewarded_two_rounds_later(policy):
    """Spec 10.11 through the method: gacc of round r belongs to the choice at the end of round r - 2."""
    aggregator = FedMRL(mu_policy=policy)
    told = []
    for r, accuracy in enumerate(ACCURACIES):
        reports = {
            site: report(global_accuracy=accuracy, num_validation=n) for site, n in zip(SITES, (5, 9, 1), strict=True)
        }
        told.append(one_round(aggregator, reports, r)[0]["mu"])
        assert aggregator.last_weighing.values["reward"] == pytest.approx(reward(accuracy))
    told.append(aggregator.directives(4, 4)["mu"])
    assert told[0] == dict.fromkeys(SITES, 1e-5)
    replay = aggregator._agents.state_dict()["replay"]
    assert replay["reward"].tolist() == pytest.approx([reward(0.3), reward(0.4)])
    assert replay["done"].tolist() == [0.0, 1.0]
    for r in range(2):
        chosen = {site: MU_GRID[int(a)] for site, a in zip(SITES, replay["action"][r], strict=True)}
        assert chosen == told[r + 1]


def test_reward_counts_validation_images():
    aggregator = FedMRL(zeta=0.5)
    one_round(
        aggregator,
        {
            "a": report(global_accuracy=0.2, num_validation=30),
            "b": report(global_accuracy=0.8, num_validation=10),
            "c": report(global_accuracy=1.0, num_validation=0),
        },
    )
    assert aggregator.last_weighing.values["reward"] == pytest.approx(math.exp(0.35 - 0.5) - 1)
    one_round(aggregator, {s: report(num_validation=0) for s in SITES}, 1)
    assert "reward" not in aggregator.last_weighing.values


def test_exploration_falls_from_one():
    """The recorded epsilon is the one of this round's choice: 1 at first, 0.05 after 30 % of the rounds."""
    aggregator = FedMRL()
    found = []
    for r in range(5):
        one_round(aggregator, {s: report() for s in SITES}, r, num_rounds=10)
        found.append(aggregator.last_weighing.values["epsilon"])
    assert found == pytest.approx([1.0, 1 - 0.95 / 3, 1 - 1.9 / 3, 0.05, 0.05])


def test_policies():
    sequences = {}
    for policy in ("qmix", "vdn", "random", "fixed"):
        for copy in range(2):
            aggregator = FedMRL(mu_policy=policy, agent_seed=3)
            told = [one_round(aggregator, {s: report() for s in SITES}, r)[0].get("mu") for r in range(4)]
            assert sequences.setdefault(policy, told) == told, copy
    assert sequences["fixed"] == [None] * 4
    for policy in ("qmix", "vdn", "random"):
        assert sequences[policy][0] == dict.fromkeys(SITES, 1e-5)
        assert all(mu in MU_GRID for told in sequences[policy] for mu in told.values())
    assert len({mu for told in sequences["random"][1:] for mu in told.values()}) > 2
    other = FedMRL(mu_policy="random", agent_seed=4)
    one_round(other, {s: report() for s in SITES})
    assert other.directives(1, 4)["mu"] != sequences["random"][1]


def test_own_actions():
    for policy in ("qmix", "random"):
        aggregator = FedMRL(mu_policy=policy, actions=[0.0, 0.25])
        for r in range(4):
            one_round(aggregator, {s: report() for s in SITES}, r)
            assert set(aggregator.directives(r + 1, 4)["mu"].values()) <= {0.0, 0.25}


def test_vdn_is_a_plain_sum():
    aggregator = FedMRL(mu_policy="vdn", explore=0.0)
    one_round(aggregator, {s: report() for s in SITES})
    agents = aggregator._agents
    step = agents._pending[-1]
    values = agents.values(step)
    total = sum(values[site][int(a)] for site, a in zip(SITES, step.action, strict=True))
    assert aggregator.last_weighing.values["q_tot"] == pytest.approx(total, abs=1e-6)


def test_loss_that_is_no_number():
    """F is the mean of the others; the agent sees the largest loss and accuracy 0."""
    aggregator = FedMRL()
    reports = {"a": report(train_loss=0.4), "b": report(train_loss=math.nan), "c": report(train_loss=math.inf)}
    one_round(aggregator, reports)
    assert aggregator.rejected == {}
    assert aggregator.directives(1, 4)["mean_loss"] == 0.4
    seen = aggregator._agents.state_dict()["last_observation"]
    assert seen[:, 3].tolist() == pytest.approx([0.04, 1.0, 1.0])
    assert seen[:, 2].tolist() == [0.5, 0.0, 0.0]
    one_round(aggregator, {s: report(train_loss=math.nan) for s in SITES}, 1)
    assert "mean_loss" not in aggregator.directives(2, 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"train_loss": -1.0}, "'train_loss' must lie in"),
        ({"train_loss": None}, "lacks the field 'train_loss'"),
        ({"accuracy": 95.0}, r"'accuracy' must lie in \[0, 1\]"),
        ({"global_accuracy": math.nan}, "'global_accuracy' must be finite"),
        ({"num_validation": -1}, "'num_validation' must lie in"),
        ({"entropy": 0.7}, "'entropy' must lie in"),
        ({"mu": "much"}, "'mu' must be a number"),
    ],
)
def test_a_bad_report_leaves_the_site_out(bad, message):
    aggregator = FedMRL()
    aggregator.begin_round(0, 4, global_state=net_state(99), folder=None, sites=SITES)
    for site in SITES:
        found = report(**bad) if site == "b" else report()
        aggregator.accept_model(train_reply(site, net_state(1), net_state(99), report=found))
    assert aggregator.accepted == ["a", "c"]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(aggregator.rejected["b"])
    aggregator.aggregate_model()
    assert set(aggregator.directives(1, 4)["mu"]) == set(SITES)  # an agent for it all the same


def test_site_leaves_and_comes_back():
    aggregator = FedMRL(agent_seed=1)
    one_round(aggregator, {s: report(accuracy=0.3) for s in SITES}, 0, num_rounds=6)
    before = aggregator.directives(1, 6)["mu"]
    seen = aggregator._agents.state_dict()["last_observation"]
    for r in (1, 2):
        one_round(aggregator, {s: report(accuracy=0.9) for s in ("a", "b")}, r, num_rounds=6)
        weights = aggregator.last_weighing.sites
        assert set(weights) == {"a", "b"}
        assert sum(weights.values()) == pytest.approx(1)
        assert aggregator.directives(r + 1, 6)["mu"]["c"] == before["c"]
        now = aggregator._agents.state_dict()["last_observation"]
        assert torch.equal(now[2], seen[2])
        assert not torch.equal(now[:2], seen[:2])
    one_round(aggregator, {s: report(accuracy=0.9) for s in SITES}, 3, num_rounds=6)
    assert set(aggregator.last_weighing.sites) == set(SITES)
    assert not torch.equal(aggregator._agents.state_dict()["last_observation"][2], seen[2])


def test_site_that_failed_in_the_first_round_has_an_agent():
    for policy in ("qmix", "random"):
        aggregator = FedMRL(mu_policy=policy)
        one_round(aggregator, {s: report() for s in ("a", "b")})
        assert aggregator.directives(1, 4)["mu"]["c"] == 1e-5
        aggregator.begin_round(1, 4, global_state=net_state(99), folder=None, sites=SITES)
        assert aggregator.directives(1, 4)["mu"]["c"] == 1e-5  # not a site's own setting
        one_round(aggregator, {s: report() for s in SITES}, 1)
        assert aggregator.rejected == {}


@pytest.mark.parametrize("policy", ["qmix", "vdn", "random", "fixed"])
def test_site_that_joins_later(policy):
    """Refused by name where agents are fixed; without agents it is welcome."""
    aggregator = FedMRL(mu_policy=policy)
    one_round(aggregator, {s: report() for s in ("a", "b")}, asked=("a", "b"))
    told, _ = one_round(aggregator, {s: report() for s in SITES}, 1)
    if policy in ("qmix", "vdn"):
        assert list(aggregator.rejected) == ["c"]
        assert "site 'c' joined after the first round" in aggregator.rejected["c"]
        assert "(a, b): start a new run" in aggregator.rejected["c"]
    else:
        assert aggregator.rejected == {}
        assert set(aggregator.last_weighing.sites) == set(SITES)
        assert told.get("mu", {}).get("c") == (1e-5 if policy == "random" else None)


def test_without_the_map_samples_count():
    aggregator = FedMRL(use_som=False)
    one_round(aggregator, {s: report() for s in SITES}, samples={"a": 1, "b": 2, "c": 5})
    assert aggregator.last_weighing.sites == {"a": 0.125, "b": 0.25, "c": 0.625}
    assert aggregator.last_weighing.details == {}


def test_stock_controllers_cannot_tell_the_sites():
    for settings in ({}, {"use_som": False}, {"mu_policy": "fixed"}, {"use_som": False, "mu_policy": "fixed"}):
        aggregator = FedMRL(**settings)
        for site in SITES:
            aggregator.accept_model(train_reply(site, net_state(1), report=report()))
        assert aggregator.rejected == {}
        if len(settings) == 2:
            torch.testing.assert_close(aggregator.aggregate_model().params["bn.weight"], net_state(1)["bn.weight"])
        else:
            with pytest.raises(RuntimeError, match=r"run it with fairflare\.flare\.controller\.RoundsController"):
                aggregator.aggregate_model()


@pytest.mark.parametrize("policy", ["qmix", "vdn", "random"])
@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("settings", [{}, {"action_mode": "critic", "share_agents": True}, {"som_restart": True}])
def test_state_goes_on_in_another_process(tmp_path, policy, on_disk, settings):
    """Every round from a fresh object, against one that lives on: the same mu, weights and model."""
    settings = {"mu_policy": policy, "warmup": 2, "updates": 2, "explore": 0.5, **settings}

    def make(name):
        aggregator = FedMRL(**settings)
        aggregator.memory_folder = tmp_path / name if on_disk else None
        return aggregator

    whole, parts = make("whole"), make("parts")
    rng = np.random.default_rng(0)
    for r in range(6):
        torch.save(parts.state_dict(), tmp_path / "state.pt")
        parts = make("parts")
        parts.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        present = SITES if r != 3 else SITES[:2]
        reports = {
            s: report(accuracy=rng.random(), global_accuracy=rng.random(), entropy=None if r > 2 else -rng.random())
            for s in present
        }
        (told, model), (again, other) = (one_round(x, reports, r, num_rounds=6) for x in (whole, parts))
        assert told == again
        assert whole.last_weighing.sites == parts.last_weighing.sites
        assert whole.last_weighing.values == parts.last_weighing.values
        assert all(torch.equal(model[name], other[name]) for name in model)
    if policy != "random":
        assert "td_loss" in whole.last_weighing.values


def test_neurons_on_disk_are_bounded_and_missed(tmp_path):
    aggregator = FedMRL()
    aggregator.memory_folder = tmp_path
    for r in range(5):
        one_round(aggregator, {s: report() for s in SITES}, r)
        assert len(list((tmp_path / "som").iterdir())) <= 2
    assert sorted(p.name for p in (tmp_path / "som").iterdir()) == ["000004", "000005"]
    other = FedMRL()
    other.memory_folder = tmp_path / "elsewhere"
    other.load_state_dict(aggregator.state_dict())
    with pytest.raises(RuntimeError, match=r"the map's neurons after 5 round\(s\) are not in .*elsewhere"):
        one_round(other, {s: report() for s in SITES}, 5)


# ------------------------------------------------------------------------------------------------ together

ROUNDS = 6
LEARN: dict[str, Any] = {"warmup": 2, "updates": 2, "explore": 0.5}


def federation(folder, method="fed_mrl", local=None, *, num_rounds=ROUNDS, experiment="", settings=None):
    recipe = FairRecipe(
        method, sites=3, settings={**TINY, **(settings or {})}, num_rounds=num_rounds, experiment=experiment,
        keep_local_models=True,
    )  # fmt: skip
    found = run_in_process(recipe, folder, local)
    return json.loads((found / "results.json").read_text()), found


def model_of(folder):
    return torch.load(folder.parent / "FL_global_model.pt", weights_only=True)["model"]


def roots(folder):
    return {"state_root": str(folder / "s"), "checkpoint_root": str(folder / "c")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    results, found = federation(folder, local=roots(folder), experiment="e", settings=LEARN)
    return results, found, folder


def test_everything_is_recorded(whole):
    results, found, _ = whole
    assert results["status"] == "completed"
    for record in results["rounds"]:
        assert sum(record["site_weights"].values()) == pytest.approx(1)
        assert {"mean_loss", "reward", "epsilon", "q_tot"} <= set(record["values"])
        assert set(record["details"]["som"]["bmu"]) == set(record["accepted"]) == set(results["info"]["sites"])
    assert [("td_loss" in record["values"]) for record in results["rounds"]] == [False] * 3 + [True] * 3
    for name in ("som_map.png", "mu.png"):
        assert (found / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_mu_of_a_round_is_the_choice_of_the_round_before(whole):
    """The replay in the checkpoint against the sites' own reports."""
    results, _, folder = whole
    (path,) = (folder / "c" / "e").glob("aggregator-*.pt")
    agents = torch.load(path, weights_only=True)["agents"]
    replay, rounds = agents["replay"], results["rounds"]
    sites = sorted(results["info"]["sites"])
    assert {rounds[0]["reports"][site]["mu"] for site in sites} == {1e-5}
    assert replay["done"].tolist() == [0.0, 0.0, 0.0, 1.0]
    for r in range(ROUNDS - 2):
        used = [rounds[r + 1]["reports"][site]["mu"] for site in sites]
        assert [MU_GRID[int(a)] for a in replay["action"][r]] == used
        after = rounds[r + 2]["reports"].values()
        accuracy = sum(x["global_accuracy"] * x["num_validation"] for x in after) / sum(
            x["num_validation"] for x in after
        )
        assert float(replay["reward"][r]) == pytest.approx(math.exp(accuracy - 0.95) - 1, rel=1e-5)
        assert rounds[r]["values"]["mean_loss"] == pytest.approx(
            np.mean([x["train_loss"] for x in rounds[r]["reports"].values()])
        )


def plain_map(vectors, received, neurons, sigma):
    """(MRL-3) to (MRL-9) in loops over explicit vectors; ``neurons`` are trained in place."""
    cosine = [v @ received / (np.linalg.norm(v) * np.linalg.norm(received)) for v in vectors]
    s = np.array([(1 + c) / 2 for c in cosine])
    shares = s / s.sum()
    cells = [(i, j) for i in range(5) for j in range(5)]

    def nearest(v):
        return int(np.argmin([np.sum((v - m) ** 2) for m in neurons]))

    for h, v in enumerate(vectors):
        best = cells[nearest(v)]
        for n, (i, j) in enumerate(cells):
            g = math.exp(-((i - best[0]) ** 2 + (j - best[1]) ** 2) / (2 * sigma**2))
            neurons[n] += min(1.0, 0.5 * len(vectors) * shares[h] * g) * (v - neurons[n])
    d2 = np.array([[np.sum((v - m) ** 2) for m in neurons] for v in vectors])
    u = np.exp(-d2 / (2 * d2.mean())).mean(axis=1)
    return shares * u / (shares * u).sum(), [list(cells[nearest(v)]) for v in vectors]


def test_recorded_weights_recomputed_with_explicit_vectors(whole):
    results, found, _ = whole
    torch.manual_seed(results["info"]["seed"])
    recipe = FairRecipe("fed_mrl", sites=3, settings={**TINY, **LEARN})
    torch.manual_seed(recipe.rounds["seed"])
    state = recipe.task.build_model().state_dict()
    names = [
        n for n, t in state.items() if t.is_floating_point() and n.split(".")[-1] not in ("running_mean", "running_var")
    ]
    neurons = None

    def flat(model):
        return np.concatenate([model[name].double().numpy().ravel() for name in names])

    for record in results["rounds"]:
        r, sites = record["current_round"], sorted(record["accepted"])
        models = {s: load_file(found / "local_models" / f"round_{r:04d}" / f"{s}.safetensors") for s in sites}
        vectors = np.stack([flat(models[site]) for site in sites])
        if neurons is None:  # the starts are the package's own random numbers: tensor t is stream t of a counter
            drawn = []
            for t, name in enumerate(names):
                bits = np.random.Philox(
                    counter=np.array([0, 0, 0, t], dtype=np.uint64), key=np.array([0, 0], dtype=np.uint64)
                )
                drawn.append(np.random.Generator(bits).standard_normal((25, state[name].numel()), dtype=np.float32))
            neurons = vectors.mean(axis=0) + 0.01 * vectors.std() * np.concatenate(drawn, axis=1).astype(np.float64)
        sigma = max(0.5, 2.0 * math.exp(-0.1 * r))
        weights, places = plain_map(vectors, flat(state), neurons, sigma)
        assert record["site_weights"] == pytest.approx(dict(zip(sites, weights, strict=True)), abs=1e-7)
        assert record["details"]["som"]["bmu"] == dict(zip(sites, places, strict=True))
        assert record["details"]["som"]["sigma"] == pytest.approx(sigma)
        neurons = neurons.astype(np.float32).astype(np.float64)  # as they are kept
        state = {
            name: sum(w * models[site][name].double() for site, w in zip(sites, weights, strict=True)).float()
            if tensor.is_floating_point()
            else tensor
            for name, tensor in state.items()
        }
    final = model_of(found)
    for name in names:
        torch.testing.assert_close(final[name], state[name], atol=1e-6, rtol=1e-5)


class Killed(BaseException):
    """Stands for a server that dies."""


@pytest.mark.parametrize("when", ["training", "before_checkpoint"])
def test_killed_and_resumed_is_as_if_never_interrupted(tmp_path, whole, when, monkeypatch):
    """In round 3: while the sites train, and when the map's neurons are on disk but the checkpoint is not."""
    settings = {**TINY, **LEARN}
    recipe = FairRecipe("fed_mrl", sites=3, settings=settings, num_rounds=ROUNDS, experiment="e")

    class Dying(InProcessController):
        def send_model(self, task_name="train", data=None, **kwargs):
            if when == "training" and data.current_round == 3:
                raise Killed
            super().send_model(task_name, data, **kwargs)

    def save(self, checkpoint):
        if checkpoint.next_round == 4:
            raise Killed
        original(self, checkpoint)

    original = CheckpointFolder.save
    if when == "before_checkpoint":
        monkeypatch.setattr(CheckpointFolder, "save", save)
    controller = Dying(
        sites=recipe.site_names, training=recipe.training, folder=tmp_path / "dead", local=roots(tmp_path),
        task=recipe.task, aggregator=recipe.aggregator, **recipe.rounds,
    )  # fmt: skip
    with pytest.raises(Killed):
        controller.run()
    monkeypatch.setattr(CheckpointFolder, "save", original)
    results, found = federation(tmp_path / "alive", local=roots(tmp_path), experiment="e", settings=LEARN)
    assert results["info"]["resumed_at_round"] == 3
    expected, folder, root = whole
    for now, before in zip(results["rounds"], expected["rounds"], strict=True):
        for key in ("site_weights", "reports", "values", "details"):
            assert now[key] == before[key], (now["current_round"], key)
    mine, theirs = model_of(found), model_of(folder)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    som = [sorted((base / "c" / "e" / "memory" / "som").rglob("*.safetensors")) for base in (tmp_path, root)]
    assert {p.parent.name for p in som[0]} == {f"{ROUNDS - 1:06d}", f"{ROUNDS:06d}"}
    for ours, other in zip(*som, strict=True):
        assert ours.name == other.name
        assert ours.read_bytes() == other.read_bytes()
    size = sum(p.stat().st_size for p in som[0])
    assert size < 2 * 25 * 4 * sum(t.numel() for t in theirs.values()) + 200 * len(som[0])


def test_all_parts_off_and_fed_prox_without_mu_are_fed_avg(tmp_path):
    training = {**get_method("fed_prox").site, "batch_size": 16}
    states = {}
    for name, method, settings in (
        ("fed_avg", "fed_avg", {}),
        ("fed_prox", "fed_prox", {"mu": 0.0}),
        ("off", "fed_mrl", {"mu": 0.0, "use_fair": False, "use_som": False, "mu_policy": "fixed"}),
        ("fair", "fed_mrl", {"mu": 0.0, "use_fair": True, "use_som": False, "mu_policy": "fixed"}),
        ("som", "fed_mrl", {"mu": 0.0, "use_fair": False, "use_som": True, "mu_policy": "fixed"}),
        ("mu", "fed_mrl", {"mu": 0.0, "use_fair": False, "use_som": False, "mu_policy": "random"}),
    ):
        recipe = FairRecipe(
            method, task="classification", sites=3, num_rounds=2, settings={**TINY, **training, **settings}, small=False
        )
        recipe.task = ClassificationTask(**TINY)
        found = run_in_process(recipe, tmp_path / name)
        states[name] = model_of(found)
        assert not (found / "checkpoint" / "memory").exists()  # no experiment: nobody can go on with it
        assert (found / "som_map.png").exists() == (name == "som")
    base = states["fed_avg"]
    for name, state in states.items():
        equal = all(torch.equal(state[key], base[key]) for key in base)
        assert equal == (name in ("fed_avg", "fed_prox", "off")), name
    assert all(
        not all(torch.equal(states[a][k], states[b][k]) for k in base) for a, b in pairwise(("fair", "som", "mu"))
    )
