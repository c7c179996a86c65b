"""Test FedMRL, the rule made of parts: both halves against the spec's numbers, alone and in one process.

What a policy or a weighting does by itself is in ``tests/unit/test_mu_policy.py`` and ``test_weightings.py``.
"""

from __future__ import annotations

import copy
import gc
import math
import re
import shlex
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st
from safetensors.torch import load_file

from fairflare.base.described import describe_settings
from fairflare.base.settings import build, choices, values_of
from fairflare.cli.options import parse_settings
from fairflare.core import losses
from fairflare.core.agents.mu_rewards import MU_GRID
from fairflare.exchange.messages import STATUS_OK, SiteReply, SiteTask, encode_reply
from fairflare.federation.collecting.collector import Collector, LikeReceived
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.catalog import get_method
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_mrl import FairProximalTraining, FedMRL, winsorise
from fairflare.methods.fed_prox import ProximalTraining
from fairflare.methods.parts.mu_policy import BanditMu, FixedMu, MuPolicy, QMixMu, RandomMu, VdnMu
from fairflare.methods.parts.weightings import BySamples, BySom, Uniform
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import metric_values

from ..unit.test_som import Reference
from .mrl import PLAIN, Regression, differences, federation, model_of, plan, same, start, train
from .support import net_state

SITES = ("a", "b", "c")
DOCS = Path(__file__).parents[2] / "docs" / "fed_mrl.md"
LEARN: dict[str, Any] = {"mu_policy": "qmix"}


def report(**own: Any) -> dict[str, Any]:
    return {
        "train_loss": 1.0, "accuracy": 0.5, "global_accuracy": 0.5, "num_validation": 10, "entropy": -0.5,
        "num_classes": 7, "mu": 1e-5, **own,
    }  # fmt: skip


def everybody(**own: Any) -> dict[str, dict[str, Any]]:
    return {site: report(**own) for site in SITES}


class Server:
    """Hold a rule with given replies, as in the rounds of a run."""

    def __init__(self, rule: FedMRL | None = None, *, num_rounds: int = 4) -> None:
        self.rule, self.num_rounds = rule or FedMRL(), num_rounds
        self.collector = Collector(self.rule)

    def told(self, current_round: int, asked=SITES) -> dict[str, Any]:
        return self.rule.directives(current_round, self.num_rounds, asked)

    def round(self, reports, current_round=0, *, asked=SITES, samples=None, states=None, received=None):
        """Return the directives before a round, its new model, and its weights."""
        received = net_state(99) if received is None else received
        told = self.told(current_round, asked)
        shape = LikeReceived(received)
        self.collector.begin(current_round, self.num_rounds, shape=shape, received=received, sites=asked)
        for site, found in reports.items():
            state = (states or {}).get(site, net_state(ord(site[0]) + current_round))
            update = {name: state[name] - tensor for name, tensor in received.items()}
            count = (samples or {}).get(site, 10)
            message = encode_reply(
                SiteReply(STATUS_OK, update=update, report=found, num_samples=count, num_steps=1), current_round
            )
            try:
                self.collector.keep(self.collector.read_training(site, message))
            except ReportError as error:
                self.collector.reject(site, str(error))
        model, weighing = self.collector.aggregate()
        return told, model, weighing

    @property
    def rejected(self) -> dict[str, str]:
        return self.collector.rejected


def agents(rule: FedMRL) -> dict[str, Any]:
    found: dict[str, Any] = rule.state_dict()["mu_policy"]["agents"]
    return found


# ------------------------------------------------------------------------------------------------ part A


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize("above", [-2.0, -0.3, 0.0, 0.4, 20.0])
@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_gradient_of_the_objective_against_finite_differences(mu, above, weight):
    """Check ``above``, the distance of the batch's loss above the mean of the sites."""
    problem = Regression()
    received, here = problem.point(), problem.point()
    own = problem.loss(here)
    told = {"mean_loss": own - above, "mu": {"h": mu, "other": 0.9}}

    def proximal(w):
        return mu / 2 * float(np.sum((w - received) ** 2))

    def literal(w):
        return problem.loss(w) + proximal(w) + weight * (problem.loss(w) - (own - above)) ** 2

    value, found = problem.gradient(FairProximalTraining(fair_weight=weight, fair_clamp=None), told, received, here)
    assert value == pytest.approx(literal(here), rel=1e-12)
    np.testing.assert_allclose(found, differences(literal, here), rtol=1e-5, atol=1e-7)

    for clamp in (0.0, 0.1):
        factor = min(max(1 + 2 * weight * above, clamp), 10.0)  # at ``here``, constant
        training = FairProximalTraining(fair_weight=weight, fair_clamp=clamp)
        value, found = problem.gradient(training, told, received, here)
        assert value == pytest.approx(factor * own + proximal(here), rel=1e-12)
        np.testing.assert_allclose(
            found,
            differences(lambda w, by=factor: by * problem.loss(w) + proximal(w), here),  # type: ignore[misc]
            rtol=1e-5,
            atol=1e-7,
        )


def test_first_round_and_switched_off_have_no_fairness_term():
    problem = Regression()
    received, here = problem.point(), problem.point()
    _, plain = problem.gradient(ProximalTraining(mu=0.2), {}, received, here)
    for settings, told in (
        ({}, {}),
        ({}, {"mean_loss": math.nan}),
        ({"use_fair": False}, {"mean_loss": 9.0}),
        ({"fair_weight": 0.0}, {"mean_loss": 9.0}),
    ):
        _, found = problem.gradient(FairProximalTraining(mu=0.2, **settings), told, received, here)
        assert np.array_equal(found, plain)
    _, found = problem.gradient(FairProximalTraining(mu=0.2), {"mean_loss": 9.0}, received, here)
    assert not np.allclose(found, plain)


def test_one_training_serves_several_sites():
    """Check sites that share a training in one process: state of a task is in the task's run."""
    problem, training = Regression(), FairProximalTraining()
    received, here = problem.point(), problem.point()
    alone = {}
    directives = {"a": {"mean_loss": 0.5, "mu": {"h": 0.2}}, "b": {"mean_loss": 2.0, "mu": {"h": 0.9}}}
    for name, told in directives.items():
        alone[name] = problem.gradient(FairProximalTraining(), told, received, here)
    runs = {name: problem.run(told) for name, told in directives.items()}
    problem.put(received)
    for run in runs.values():
        training.begin_round(run, problem.model)
    problem.put(here)
    for name, run in runs.items():
        value, gradient = problem.objective(training, run)
        assert value == alone[name][0]
        assert np.array_equal(gradient, alone[name][1])
        assert len(run.own.batches) == 1


def test_a_lower_limit_above_the_upper_one_is_refused():
    for own in ({"fair_clamp": 11.0}, {"fair_clamp": 1.0, "fair_max": 0.5}):
        with pytest.raises(ValueError, match=r"^fair_clamp.* got 1"):
            FairProximalTraining(**own)


# ------------------------------------------------------------------------------------------------ a site


def test_report(tmp_path):
    """Check the data that each reported number is measured on."""
    state = start()
    training = FairProximalTraining(batch_size=8, local_epochs=4, learning_rate=0.05)
    worker, reply = train(training, tmp_path, state, {"mean_loss": 1.5})
    data = worker._data
    assert data is not None
    assert reply.update is not None
    model = worker.task.build_model()
    found = []
    for tensors in (state, {name: tensor + reply.update[name] for name, tensor in state.items()}):
        model.load_state_dict(tensors)
        found.append(worker.task.evaluate(model, data.batches("validation", batch_size=8), worker.device)["accuracy"])
    assert (reply.report["global_accuracy"], reply.report["accuracy"]) == tuple(found)
    assert found[0] != found[1]
    assert reply.report["num_validation"] == data.num_samples("validation")
    counts = data.class_counts("training").double()
    shares = counts[counts > 0] / counts.sum()
    # To one decimal: as it stands it would tell the class counts.
    assert reply.report["entropy"] == round(float((shares * shares.log()).sum()), 1)
    assert reply.report["num_classes"] == 7
    assert reply.report["mu"] == 0.1
    assert set(reply.report) == {f.name for f in FedMRL.report_fields}


def test_reported_loss_is_that_of_the_last_epoch_without_the_further_terms(tmp_path):
    state = start()
    settings = {**PLAIN, "batch_size": 7, "local_epochs": 2}
    _, plain = train(LocalTraining(**settings), tmp_path / "plain", state)
    _, reply = train(FairProximalTraining(**settings, mu=0.0, use_fair=False), tmp_path / "off", state)
    assert plain.num_samples % 7 != 0  # the last batch counts for less
    assert same(plain.update, reply.update)
    assert reply.report["train_loss"] == pytest.approx(plain.stats["epoch_losses"][-1], rel=1e-12)
    assert reply.report["train_loss"] != pytest.approx(plain.stats["epoch_losses"][0], rel=1e-3)

    still = {**settings, "learning_rate": 1e-12}
    _, plain = train(LocalTraining(**still), tmp_path / "plain still", state)
    _, reply = train(
        FairProximalTraining(**still), tmp_path / "still", state, {"mean_loss": 0.1, "mu": {"site-1": 9.0}}
    )
    assert reply.report["train_loss"] == pytest.approx(plain.stats["train_loss"], rel=1e-6)
    assert reply.stats["train_loss"] > 2 * plain.stats["train_loss"]  # the objective
    assert reply.report["mu"] == 9.0


def test_a_site_may_withhold_its_entropy(tmp_path):
    _, reply = train(FairProximalTraining(share_entropy=False), tmp_path, start())
    assert reply.report["entropy"] is None


def test_segmentation_has_no_classes(tmp_path):
    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 4, 8, 8, 4), phantom_cases=0.1)
    torch.manual_seed(0)
    state = task.build_model().state_dict()
    server, reports, states = Server(num_rounds=3), {}, {}
    for site in ("site-1", "site-2"):
        worker = SiteWorker(site, task, FairProximalTraining(), {}, tmp_path / site)
        reply = worker.perform(SiteTask("train", dict(state), 0, 3, 0, {"mean_loss": 0.5, "mu": {site: 0.1}}))
        assert reply.status == STATUS_OK, reply.reason
        assert reply.report["entropy"] is reply.report["num_classes"] is None
        assert reply.report["global_accuracy"] == metric_values(reply.metrics)["dice"]
        reports[site] = reply.report
        states[site] = {name: tensor + reply.update[name] for name, tensor in state.items()}
    server.round(reports, asked=("site-1", "site-2"), received=state, states=states)
    assert server.rejected == {}
    assert agents(server.rule)["last_observation"][:, 0].tolist() == [-0.5, -0.5]


# ------------------------------------------------------------------------------------------------ the rule's parts


CONFIGURATIONS: list[tuple[dict[str, Any], type, type]] = [
    ({}, QMixMu, BySom),
    ({"mu_policy": "qmix", "weighting": "som"}, QMixMu, BySom),
    ({"mu_policy.gamma": 0.9, "weighting.grid": [4, 3]}, QMixMu, BySom),
    ({"mu_policy": "vdn", "mu_policy.gamma": 0.5}, VdnMu, BySom),
    ({"mu_policy": "random", "mu_policy.actions": [0.0, 0.5]}, RandomMu, BySom),
    ({"mu_policy": "fixed"}, FixedMu, BySom),
    ({"mu_policy": "bandit", "mu_policy.actions": [0.0, 0.5]}, BanditMu, BySom),
    ({"weighting": "samples"}, QMixMu, BySamples),
    ({"weighting": "uniform"}, QMixMu, Uniform),
    ({"weighting.init": "uniform"}, QMixMu, BySom),
    ({"mu_policy": "fixed", "weighting": "samples", "mean_loss": "weighted"}, FixedMu, BySamples),
]


@pytest.mark.parametrize(("given", "policy", "weighting"), CONFIGURATIONS)
@pytest.mark.parametrize("way", ["build", "make_plan"])
def test_an_ablation_is_another_part(given, policy, weighting, way):
    rule = build(FedMRL, given) if way == "build" else make_plan("fed_mrl", settings=given, small=False).rule
    assert type(rule) is FedMRL
    assert (type(rule.mu_policy), type(rule.weighting)) == (policy, weighting)
    for name, value in given.items():
        part, _, setting = name.partition(".")
        if setting:
            found = getattr(getattr(rule, part), setting)
            assert (list(found) if isinstance(found, tuple) else found) == value
    args = values_of(rule)["args"]
    assert args["mu_policy"]["path"] == f"fairflare.methods.parts.mu_policy.{policy.__name__}"
    assert args["weighting"]["path"] == f"fairflare.methods.parts.weightings.{weighting.__name__}"
    assert args["mean_loss"] == given.get("mean_loss", "mean")


def test_the_quick_job_does_not_ask_agents_to_learn_in_five_rounds():
    quick = make_plan("fed_mrl")
    assert (quick.run.num_rounds, type(quick.rule.mu_policy)) == (5, FixedMu)  # type: ignore[attr-defined]
    assert (quick.training.fair_weight, FairProximalTraining().fair_weight) == (0.03, 1.0)  # type: ignore[attr-defined]
    assert quick.training.mu == make_plan("fed_prox").training.mu == 0.1  # type: ignore[attr-defined]
    for settings in ({"mu_policy": "qmix"}, {"mu_policy.gamma": 0.9}):
        assert type(make_plan("fed_mrl", settings=settings).rule.mu_policy) is QMixMu  # type: ignore[attr-defined]


def test_the_default_optimizer_is_the_papers():
    training = make_plan("fed_mrl", small=False).training
    assert (training.optimizer, training.learning_rate, training.momentum) == ("sgd", 0.01, 0.0)
    assert make_plan("fed_mrl").training.optimizer == "adam"  # SGD learns nothing in the five rounds of a quick job
    assert FairProximalTraining().optimizer == "sgd"


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_fairness_term_changes_a_step(tmp_path, optimizer):
    """Check one step of the whole training set with the job's settings, which has exactly this factor."""
    state = start()
    settings = {"batch_size": 1000, "learning_rate": 0.01, "momentum": 0.0, "weight_decay": 0.0, "mu": 0.0}
    training = FairProximalTraining(**settings, optimizer=optimizer)
    worker, plain = train(training, tmp_path / "a", state)
    own = plain.report["train_loss"]
    _, reply = train(training, tmp_path / "b", state, {"mean_loss": own - 0.25})
    assert reply.num_steps == 1
    parameters = [name for name, _ in worker.task.build_model().named_parameters()]
    before, after = (torch.cat([found.update[name].flatten() for name in parameters]) for found in (plain, reply))
    assert float(before.norm()) > 0
    torch.testing.assert_close(after, 1.5 * before, rtol=1e-3, atol=1e-6)  # 1 + 2 * 0.25
    assert reply.report["clamped"] == 0.0


def test_the_rate_is_that_of_the_round_again_after_a_step(tmp_path):
    """Check Adam: the factor of one batch does not apply to the next batch's step."""
    state = start()
    settings = {"batch_size": 8, "optimizer": "adam", "keep_optimizer_state": False}
    _, one = train(
        FairProximalTraining(**settings, fair_clamp=1.0, fair_max=1.0), tmp_path / "a", state, {"mean_loss": 9.0}
    )
    _, none = train(ProximalTraining(batch_size=8, keep_optimizer_state=False), tmp_path / "b", state)
    assert same(one.update, none.update)
    _, half = train(
        FairProximalTraining(**settings, fair_clamp=0.5, fair_max=0.5), tmp_path / "c", state, {"mean_loss": 9.0}
    )
    slow = ProximalTraining(batch_size=8, keep_optimizer_state=False, learning_rate=5e-4)
    _, slow = train(slow, tmp_path / "d", state)
    assert same(half.update, slow.update)


def test_commands_and_settings_of_the_docs():
    page = DOCS.read_text(encoding="utf-8")
    commands = re.findall(r"`fairflare run (fed_\w+)((?: --set [^`]+)?)`", page)
    assert len(commands) >= 9
    for method, options in commands:
        given = [word for word in shlex.split(options) if word != "--set"]
        made = make_plan(method, settings=parse_settings(given))
        assert made.method.name == method
    known = {setting.name for setting in describe_settings(FedMRL)}
    for name in re.findall(r"`((?:mu_policy|weighting)\.\w+)(?:=[^`]*)?`", page):
        assert name in known, name
    own = {setting.name for setting in describe_settings(FairProximalTraining)}
    common = {setting.name for setting in describe_settings(LocalTraining)}
    for name in sorted(known | (own - common)):
        assert re.search(rf"`(?:\w*\.)?{name.rpartition('.')[2]}\b", page), f"{name} is not on the page"


# ------------------------------------------------------------------------------------------------ server half


@pytest.mark.parametrize(
    ("weighting", "policy"),
    [(BySom(), QMixMu()), (BySom(eta=0.25), RandomMu()), (BySamples(), FixedMu()), (Uniform(), BanditMu())],
)
def test_the_rule_is_its_parts(weighting, policy):
    """Check that weights are the weighting's and values the policy's on the same inputs, with F beside them."""
    rule = FedMRL(mu_policy=copy.deepcopy(policy), weighting=copy.deepcopy(weighting))
    seen = []
    original = rule.weigh
    rule.weigh = lambda inputs: seen.append(inputs) or original(inputs)  # type: ignore[method-assign]
    server = Server(rule, num_rounds=5)
    for r in range(5):
        reports = {s: report(accuracy=0.1 * r, train_loss=1.0 + k + r) for k, s in enumerate(SITES)}
        told, model, weighing = server.round(reports, r, samples={"a": 5, "b": 9, "c": 2})
        assert told.get("mu", {}) == policy.directives(SITES)
        assert ("mu" in told) == policy.tells
        weights, details = weighting.weigh(seen[-1])
        assert weighing.sites == weights
        said = {"warnings"} if r == 0 and isinstance(policy, QMixMu) else set()  # five rounds are too few to learn
        assert {k: v for k, v in weighing.details.items() if k != "warnings"} == details
        assert set(weighing.details) - set(details) == said
        assert weighing.values == {"mean_loss": pytest.approx(2.0 + r), **policy.choose(seen[-1])}
        for name, tensor in model.items():
            if tensor.is_floating_point():
                expected = sum(weights[s] * net_state(ord(s) + r)[name].double() for s in SITES)
                torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=1e-6)


def test_mean_loss_of_the_spec():
    """Check 10.1 of the spec; the sum over sites of the squared distances is 0.32."""
    found = {}
    for mode in ("mean", "weighted", "sum"):
        server = Server(FedMRL(mean_loss=mode))
        reports = {site: report(train_loss=loss) for site, loss in zip(SITES, (0.4, 0.8, 1.2), strict=True)}
        told, _, weighing = server.round(reports, samples={"a": 100, "b": 300, "c": 600})
        assert "mean_loss" not in told
        found[mode] = server.told(1)["mean_loss"]
        assert weighing.values["mean_loss"] == found[mode]
    assert found == pytest.approx({"mean": 0.8, "weighted": 1.0, "sum": 2.4})
    terms = [float(losses.fairness_term(torch.tensor(x, dtype=torch.float64), 0.8)) for x in (0.4, 0.8, 1.2)]
    assert sum(terms) == pytest.approx(0.32)


# ------------------------------------------------------------------------------------------------ one site's loss


@trying(deadline=None)
@given(st.integers(2, 9), st.data(), st.floats(0, 50))
def test_no_minority_stops_a_site_at_the_median(honest, data, loss):
    """Check any claims of fewer than half of the sites: the default factor of the other sites stays above 0."""
    claims = data.draw(st.lists(st.floats(0, 1e6), max_size=honest - 1))
    found = winsorise({str(k): x for k, x in enumerate([loss] * honest + claims)})
    factor = 1 + 2 * (loss - sum(found.values()) / len(found))
    assert factor > 0
    assert set(found.values()) <= {loss} | {min(max(x, loss / 4, loss - 1), 4 * loss, loss + 1) for x in claims}


def test_a_loss_far_from_the_others_is_told_by_name(caplog):
    server = Server(FedMRL(mu_policy=FixedMu()))
    reports = {site: report(train_loss=loss) for site, loss in zip(SITES, (1.5, 1.5, 10.0), strict=True)}
    _, _, weighing = server.round(reports)
    assert server.told(1)["mean_loss"] == pytest.approx((1.5 + 1.5 + 2.5) / 3)
    (line,) = weighing.details["warnings"]
    assert line == "losses far from the median count in F only in part: 'c' 10 as 2.5"
    assert f"round 0: {line}" in caplog.text
    plain = Server(FedMRL(mu_policy=FixedMu(), fair_mean="plain"))
    plain.round(reports)
    assert plain.told(1)["mean_loss"] == pytest.approx(13 / 3)


def test_a_factor_at_its_limit_is_told_by_name(caplog):
    server = Server(FedMRL(mu_policy=FixedMu()))
    shares = {"a": 0.8, "b": 0.5, "c": None}
    _, _, weighing = server.round({site: report(clamped=share) for site, share in shares.items()})
    (line,) = weighing.details["warnings"]
    assert "in most batches of 'a' 80%;" in line
    assert f"round 0: {line}" in caplog.text
    assert weighing.details["warnings"] == [line]
    names = [f"s{k:02d}" for k in range(30)]
    server = Server(FedMRL(mu_policy=FixedMu(), weighting=Uniform()))
    _, _, weighing = server.round({name: report(clamped=1.0) for name in names}, asked=names)
    assert "'s07' 100% and 22 more;" in weighing.details["warnings"][0]


@pytest.mark.parametrize(
    ("clamp", "most", "above", "share"),
    [(0.0, 10.0, -9.0, 1.0), (0.0, 10.0, 99.0, 1.0), (0.0, 10.0, 0.1, 0.0), (None, 10.0, -9.0, None)],
)
def test_a_site_says_how_often_its_factor_sat_at_a_limit(tmp_path, clamp, most, above, share):
    state = start()
    training = FairProximalTraining(**PLAIN, fair_clamp=clamp, fair_max=most, batch_size=16)
    loss = train(training, tmp_path / "first", state)[1].report
    assert loss["clamped"] is None  # without F there is no factor
    training = FairProximalTraining(
        **{**PLAIN, "learning_rate": 1e-9}, fair_clamp=clamp, fair_max=most, batch_size=1000
    )
    _, reply = train(training, tmp_path / "b", state, {"mean_loss": max(loss["train_loss"] - above, -200.0)})
    assert reply.report["clamped"] == share


@pytest.mark.many
@pytest.mark.parametrize(("fair_mean", "learns"), [("winsorised", True), ("plain", False)])
def test_a_claimed_loss_of_ten_does_not_stop_the_others(tmp_path, monkeypatch, fair_mean, learns):
    honest = FairProximalTraining.report

    def claiming(self, run, model):
        said = honest(self, run, model)
        return {**said, "train_loss": 10.0} if run.site == "site-3" else said

    monkeypatch.setattr(FairProximalTraining, "report", claiming)
    settings = {"mu_policy": "fixed", "mu": 0.0, "fair_mean": fair_mean, "weighting": "samples"}
    settings |= {"batch_size": 64, "fair_weight": 1.0}
    results, found = federation(tmp_path, num_rounds=3, settings=settings)
    for record in results["rounds"][1:]:
        folder = found / "local_models" / f"round_{record['current_round']:04d}"
        models = [load_file(folder / f"site-{k}.safetensors")["head.weight"] for k in (1, 2)]
        assert (not torch.equal(*models)) == learns  # where nobody moves, all stay at the received model
        assert all((record["reports"][f"site-{k}"]["clamped"] < 1) == learns for k in (1, 2))
        said = " ".join(record["details"]["warnings"])
        assert ("'site-1' 100%" in said) == (not learns)
        assert ("'site-3' 10 as" in said) == learns


def test_loss_that_is_no_number():
    """Check that F is the mean of the other sites; the agent sees the largest loss and accuracy 0."""
    server = Server()
    server.round({"a": report(train_loss=0.4), "b": report(train_loss=math.nan), "c": report(train_loss=math.inf)})
    assert server.rejected == {}
    assert server.told(1)["mean_loss"] == 0.4
    seen = agents(server.rule)["last_observation"]
    assert seen[:, 3].tolist() == pytest.approx([0.04, 1.0, 1.0])
    assert seen[:, 2].tolist() == [0.5, 0.0, 0.0]
    _, _, weighing = server.round(everybody(train_loss=math.nan), 1)
    assert "mean_loss" not in weighing.values
    assert "mean_loss" not in server.told(2)


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
        ({"mu": 1e7}, r"'mu' must lie in \[0, 1e\+06\], got 10000000.0"),
        ({"train_loss": 1e7}, r"'train_loss' must lie in \[0, 1e\+06\], got 10000000.0"),
        ({"clamped": 1.1}, r"'clamped' must lie in \[0, 1\], got 1.1"),
    ],
)
def test_a_bad_report_leaves_the_site_out(bad, message):
    server = Server()
    _, _, weighing = server.round({**everybody(), "b": report(**bad)})
    assert server.collector.accepted == ["a", "c"] == sorted(weighing.sites)
    assert re.search(f"site 'b'.*{message}", server.rejected["b"])
    assert set(server.told(1)["mu"]) == set(SITES)  # an agent for it all the same


@pytest.mark.parametrize("policy", choices(MuPolicy).values())
def test_site_that_joins_later(policy):
    """Check that fixed agents refuse the site by name, and that rules without agents accept it."""
    server = Server(FedMRL(mu_policy=policy()))
    server.round({s: report() for s in ("a", "b")}, asked=("a", "b"))
    told, _, weighing = server.round(everybody(), 1)
    if policy in (QMixMu, VdnMu):
        assert list(server.rejected) == ["c"]
        assert "site 'c' joined after the first round" in server.rejected["c"]
        assert "('a', 'b'): start a new run" in server.rejected["c"]
        assert set(weighing.sites) == {"a", "b"}
    else:
        assert server.rejected == {}
        assert set(weighing.sites) == set(SITES)
        assert told.get("mu", {}).get("c") == (1e-5 if policy().tells else None)


def test_stock_controllers_cannot_tell_the_sites():
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

    from fairflare.flare.aggregator import FairAggregator

    def aggregator(**parts: Any) -> FairAggregator:
        found = FairAggregator(rule=FedMRL(**parts))
        for k, site in enumerate(SITES):
            meta = {"client_name": site, "fairflare": {"status": "ok", "num_samples": k + 1, "report": report()}}
            found.accept_model(FLModel(params=net_state(k), params_type=ParamsType.FULL, current_round=0, meta=meta))
        assert found.rejected == {}
        return found

    for parts in ({}, {"weighting": BySamples()}, {"mu_policy": FixedMu()}, {"mu_policy": RandomMu()},
                  {"weighting": Uniform(), "mu_policy": RandomMu()}):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"run it with .*RoundsController"):
            aggregator(**parts).aggregate_model()
    model = aggregator(weighting=BySamples(), mu_policy=FixedMu()).aggregate_model()
    expected = sum((k + 1) / 6 * net_state(k)["head.weight"] for k in range(3))
    torch.testing.assert_close(model.params["head.weight"], expected)


# ------------------------------------------------------------------------------------------------ what outlives a round


def test_neurons_that_travelled_lie_in_the_folder_from_then_on(tmp_path):
    server, other = Server(), Server()
    server.round(everybody())
    other.rule.memory_folder = tmp_path
    other.rule.load_state_dict(server.rule.state_dict())
    assert [p.name for p in (tmp_path / "som").iterdir()] == ["000001"]
    assert other.round(everybody(), 1)[2] == server.round(everybody(), 1)[2]


# ------------------------------------------------------------------------------------------------ together

ROUNDS = 6


def roots(folder: Path) -> dict[str, str]:
    return {"state_root": str(folder / "s"), "checkpoint_root": str(folder / "c")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    results, found = federation(folder, roots(folder), num_rounds=ROUNDS, experiment="e", settings=LEARN)
    return results, found, folder


@pytest.mark.long
def test_mu_of_a_round_is_the_choice_of_the_round_before(whole):
    """Compare the checkpoint's replay with the sites' own reports."""
    results, _, folder = whole
    *_, path = sorted((folder / "c" / "e").glob("rule-*.pt"))  # of the last round
    replay = torch.load(path, weights_only=True)["mu_policy"]["agents"]["replay"]
    rounds, sites = results["rounds"], sorted(results["info"]["sites"])
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


@pytest.mark.long
def test_recorded_weights_recomputed_with_explicit_vectors(whole):
    """Compute the map's batch update in float64 loops over the local models that the run left."""
    results, found, _ = whole
    torch.manual_seed(results["info"]["seed"])
    state = plan(settings=LEARN).task.build_model().state_dict()
    reference = Reference()
    for record in results["rounds"]:
        sites = sorted(record["accepted"])
        folder = found / "local_models" / f"round_{record['current_round']:04d}"
        loaded = {site: load_file(folder / f"{site}.safetensors") for site in sites}
        models = {site: {name: model[name] for name in state} for site, model in loaded.items()}  # files sort names
        expected = reference.step(models, state)
        assert record["site_weights"] == pytest.approx(expected.weights, rel=0, abs=1e-9)
        som = record["details"]["som"]
        assert som["bmu"] == {site: list(cell) for site, cell in expected.bmu.items()}
        assert som["sigma"] == pytest.approx(expected.sigma)
        state = {
            name: sum(w * models[site][name].double() for site, w in expected.weights.items()).to(tensor.dtype)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in state.items()
        }
    final = model_of(found)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(final[name], tensor, atol=1e-6, rtol=1e-5)


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fed_avg": ("fed_avg", {}),
    "off": ("fed_mrl", {"mu": 0.0, "use_fair": False, "weighting": "samples", "mu_policy": "fixed"}),
    "fair": ("fed_mrl", {"mu": 0.0, "use_fair": True, "weighting": "samples", "mu_policy": "fixed"}),
    "som": ("fed_mrl", {"mu": 0.0, "use_fair": False, "weighting": "som", "mu_policy": "fixed"}),
    "mu": ("fed_mrl", {"mu": 0.0, "use_fair": False, "weighting": "samples", "mu_policy": "random"}),
}


@pytest.mark.long
def test_all_parts_off_is_fed_avg_and_each_part_alone_is_not(tmp_path, monkeypatch):
    local = {**get_method("fed_prox").site, "batch_size": 16, "partition": "dirichlet"}
    memory = tmp_path / "temporary"
    memory.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # else in the temporary folder
    monkeypatch.setattr(tempfile, "tempdir", str(memory))
    states, results = {}, {}
    for name, (method, settings) in PARTS.items():
        results[name], found = federation(tmp_path / name, method=method, settings={**local, **settings})
        states[name] = model_of(found)
    gc.collect()
    assert list(memory.iterdir()) == []  # nobody can go on without an experiment: the map's neurons are gone
    assert type(plan("fed_avg").rule) is FedAvg
    assert same(states["off"], states["fed_avg"])
    assert results["off"]["test"] == results["fed_avg"]["test"]
    for mine, theirs in zip(results["off"]["rounds"], results["fed_avg"]["rounds"], strict=True):
        assert mine["site_weights"] == theirs["site_weights"]
        assert mine["validation"] == theirs["validation"]
    for one, other in combinations(("fed_avg", "fair", "som", "mu"), 2):
        assert not same(states[one], states[other]), (one, other)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["random", "qmix"])
def test_the_servers_draws_follow_the_seed_of_the_run(policy, tmp_path):
    """Check that repetitions are independent, and that a run can be repeated."""

    def drawn(seed: int) -> tuple[Any, Any]:
        settings = {"mu_policy": policy, "weighting.init": "uniform"}
        results, _ = federation(tmp_path / str(len(list(tmp_path.iterdir()))), seed=seed, settings=settings)
        chosen = [r["values"].get("q_tot") or [x["mu"] for x in r["reports"].values()] for r in results["rounds"]]
        return chosen, results["rounds"][0]["site_weights"]

    chosen, weights = drawn(1)
    assert (chosen, weights) == drawn(1)
    other, far = drawn(0)
    assert chosen != other
    assert weights != far


@pytest.mark.long
def test_a_negative_seed_of_the_run_is_a_seed_of_the_draws(tmp_path):
    results, _ = federation(tmp_path, num_rounds=2, seed=-3, settings={"weighting.init": "uniform"})
    assert results["status"] == "completed"


@pytest.mark.long
def test_a_site_is_told_its_own_mu_only(tmp_path, monkeypatch):
    """Check the messages at each site of a run; F is for all sites."""
    told, perform = [], SiteWorker.perform

    def noting(self, request, *rest):
        if request.name == "check":
            assert request.directives == {}
        else:
            told.append((self.site, request.name, request.directives))
        return perform(self, request, *rest)

    monkeypatch.setattr(SiteWorker, "perform", noting)
    results, _ = federation(tmp_path, num_rounds=3, settings={"mu_policy": "random", "weighting": "samples"})
    assert {name for _, name, _ in told[:9]} == {"train"}  # three rounds of three sites
    assert len(told) >= 12
    assert {name for _, name, _ in told[9:]} == {"validate"}  # of the last model, and of the best if it is another
    for site, name, directives in told:
        assert set(directives) <= {"mu", "mean_loss"}
        assert list(directives["mu"]) == [site], name
        assert not any(other in str(directives) for other in results["info"]["sites"] if other != site)
    assert len({directives["mean_loss"] for _, name, directives in told if "mean_loss" in directives}) == 3
    rounds = results["rounds"]
    for number, (site, name, directives) in enumerate(told[:9]):
        assert rounds[number // 3]["reports"][site]["mu"] == directives["mu"][site], name
