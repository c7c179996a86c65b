"""Test cRT: after a method's rounds the classifier alone is retrained; at a site, at the server, in whole runs."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.server.rounds import RoundFailed, Stopped
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.rule import Weighing
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.crt import ClassifierAverage
from fairflare.methods.logit_adjustment import CalibratedTraining
from fairflare.methods.parts.classifier_retraining import DIRECTIVE, ClassifierRetraining, draw_balanced
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import run_document

from . import support
from .support import at_site, inputs, request, same

TINY: dict[str, Any] = {
    "phantom": "fundus", "image_size": [32, 32], "features": [4, 8, 8, 16], "phantom_samples": 90, "phantom_test": 40,
    "partition": "dirichlet", "alpha": 0.5, "corrupted_sites": 0, "max_pool": False,
}  # fmt: skip
TASK = {**TINY, "phantom_sites": 2}
QUICK: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 16}
TOLD = {DIRECTIVE: {"local_epochs": 1, "mask_absent": True, "first": True, "seed": 7}}
CLASSIFIER = {"head.weight", "head.bias"}


def hash_of(state: Any) -> str:
    digest = hashlib.sha256()
    for name in sorted(set(state) - CLASSIFIER):
        digest.update(name.encode() + state[name].numpy().tobytes())
    return digest.hexdigest()


def told(**more: Any) -> dict[str, Any]:
    return {DIRECTIVE: {**TOLD[DIRECTIVE], **more}}


# ------------------------------------------------------------------------------------------------ a site


def test_every_class_that_is_there_is_drawn_as_often():
    counts = [400, 90, 0, 9, 1]
    targets = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    runs = 40
    drawn = torch.cat([draw_balanced(targets, torch.Generator().manual_seed(seed)) for seed in range(runs)])
    total = len(targets) * runs
    assert len(drawn) == total
    found = torch.bincount(targets[drawn], minlength=5).tolist()
    sigma = math.sqrt(total * 0.25 * 0.75)
    assert found[2] == 0
    for c in (0, 1, 3, 4):
        assert abs(found[c] - total / 4) < 3 * sigma, (c, found)
    of_rare = torch.bincount(drawn, minlength=len(targets))[490:499]  # within a class each image is equally likely
    assert (of_rare - found[3] / 9).abs().max() < 4 * math.sqrt(found[3] / 9)


@pytest.mark.parametrize("augment", [False, True])
def test_only_the_classifier_leaves_and_the_rest_is_untouched(tmp_path, augment):
    task = ClassificationTask(**TASK, projector_dim=8)
    state = support.initial(task)
    here = at_site(tmp_path, LocalTraining(**QUICK, augment=augment), task=task)
    asked = request("train", state, 3, directives=TOLD)
    reply = here.perform(asked)
    assert reply.status == "ok", reply.reason
    assert set(reply.update) == CLASSIFIER
    assert reply.num_samples == here._data.num_samples("training")
    assert reply.num_steps == math.ceil(reply.num_samples / 16)
    local = here.local_model(asked, 3)
    assert hash_of(local) == hash_of(state)
    assert not torch.equal(local["head.weight"], state["head.weight"])
    # and the same process trains everything again when it is told so
    again = here.perform(request("train", state, 4))
    fresh = at_site(tmp_path / "fresh", LocalTraining(**QUICK, augment=augment), task=task)
    assert same(again.update, fresh.perform(request("train", state, 4)).update)
    assert set(again.update) == set(state)


def test_it_begins_from_the_seed_and_rows_of_absent_classes_stay(tmp_path):
    task = ClassificationTask(**{**TASK, "alpha": 0.1})
    state = support.initial(task)
    torch.manual_seed(7)
    fresh = torch.nn.Linear(16, 5)

    def classifier(name, reply):
        return state[name] + reply.update[name]

    masked, free = (
        at_site(tmp_path / str(mask), LocalTraining(**QUICK, weight_decay=0.1), task=task).perform(
            request("train", state, 3, directives=told(mask_absent=mask, local_epochs=3))
        )
        for mask in (True, False)
    )
    counts = at_site(tmp_path, task=task)
    counts.perform(request("train", state, 3, directives=TOLD))
    absent = counts._data.class_counts("training") == 0
    assert 0 < absent.sum() < 5
    for name, start in (("head.weight", fresh.weight), ("head.bias", fresh.bias)):
        torch.testing.assert_close(classifier(name, masked)[absent], start.detach()[absent], atol=1e-7, rtol=0)
        assert not torch.allclose(classifier(name, free)[absent], start.detach()[absent], atol=1e-4)
        assert not torch.allclose(classifier(name, masked)[~absent], start.detach()[~absent], atol=1e-4)


def test_later_rounds_go_on_with_the_received_classifier_and_absent_rows_do_not_change_at_all(tmp_path):
    task = ClassificationTask(**{**TASK, "alpha": 0.1})
    state = support.initial(task)
    here = at_site(tmp_path, LocalTraining(**QUICK), task=task)
    reply = here.perform(request("train", state, 4, directives=told(first=False)))
    absent = here._data.class_counts("training") == 0
    for name in CLASSIFIER:
        assert not reply.update[name][absent].any()
        assert reply.update[name][~absent].any()


def test_against_a_loop(tmp_path):
    """Check features in order, draws and plain SGD, with the task's cross-entropy for any method's loss."""
    task = ClassificationTask(**TASK)
    state = support.initial(task)
    settings = {**QUICK, "momentum": 0.0, "weight_decay": 0.0}
    here = at_site(tmp_path, CalibratedTraining(**settings, schedule="cosine"), task=task)
    reply = here.perform(request("train", state, 3, directives=told(mask_absent=False)))
    from fairflare.federation.site.worker import round_seed

    seed = round_seed(0, "site-1", 3)
    model = task.build_model().eval()
    model.load_state_dict(state)
    features, targets = [], []
    for images, classes in here._data.batches("training", batch_size=16, shuffle_seed=seed):
        features.append(model.embed(images).detach())
        targets.append(classes)
    x, y = torch.cat(features).double(), torch.cat(targets)
    torch.manual_seed(7)
    head = torch.nn.Linear(16, 5)
    w, b = head.weight.detach().double(), head.bias.detach().double()
    for chosen in draw_balanced(y, torch.Generator().manual_seed(seed)).split(16):
        p = torch.softmax(x[chosen] @ w.T + b, 1)
        p[torch.arange(len(chosen)), y[chosen]] -= 1
        w, b = w - 0.05 * p.T @ x[chosen] / len(chosen), b - 0.05 * p.mean(0)
    torch.testing.assert_close((state["head.weight"] + reply.update["head.weight"]).double(), w, atol=1e-5, rtol=0)
    torch.testing.assert_close((state["head.bias"] + reply.update["head.bias"]).double(), b, atol=1e-5, rtol=0)


def test_networks_and_tasks_without_a_classifier_are_refused():
    with pytest.raises(ValueError, match=r"'fed_avg': crt_rounds .*set crt_rounds=0"):
        make_plan("fed_avg", settings={"crt_rounds": 2})
    run: Any = SimpleNamespace(site="a", directives=TOLD)
    half = ClassifierRetraining.choose(LocalTraining(), TOLD)
    with pytest.raises(SiteError, match=r"site 'a': crt_rounds needs .*embed"):
        half.train(run, torch.nn.Linear(2, 2))
    assert ClassifierRetraining.choose(half, {}) is half


def test_a_script_of_the_sites_own_is_refused(tmp_path):
    from fairflare.federation.plan.plan import Script
    from fairflare.flare.export.script_plan import make_script_plan

    with pytest.raises(ValueError, match="crt_rounds: a script's own loop"):
        make_script_plan("crt", Script(tmp_path / "train.py"), model="Net")


# ------------------------------------------------------------------------------------------------ the server


def test_weights():
    rule = ClassifierAverage(first_round=5)
    assert rule.weigh(inputs({"a": {}, "b": {}}, current_round=6)).sites == {"a": 0.5, "b": 0.5}
    rule = ClassifierAverage(weights="method", first_round=5)
    rule.remember(Weighing(sites={"a": 0.7, "b": 0.2, "c": 0.1}))
    assert rule.weigh(inputs({"a": {}, "b": {}})).sites == pytest.approx({"a": 7 / 9, "b": 2 / 9})
    found = rule.weigh(inputs({"a": {}, "d": {}})).sites  # d: as much as the mean of those that are known
    assert found == pytest.approx({"a": 0.5, "d": 0.5})
    found = rule.weigh(inputs({"a": {}, "b": {}, "d": {}})).sites  # 0.7, 0.2 and 0.45
    assert found == pytest.approx({"a": 14 / 27, "b": 4 / 27, "d": 1 / 3})
    rule.remember(Weighing(layers={"conv": {"a": 1.0, "b": 0.0}, "head": {"a": 0.25, "b": 0.75}}))
    assert rule.weigh(inputs({"a": {}, "b": {}})).sites == pytest.approx({"a": 0.25, "b": 0.75})
    other = ClassifierAverage(weights="method")
    other.load_state_dict(rule.state_dict())
    assert other.state_dict() == rule.state_dict()
    assert rule.directives(5, 5, [])[DIRECTIVE]["first"] is True
    assert rule.directives(6, 5, [])[DIRECTIVE]["first"] is False


# ------------------------------------------------------------------------------------------------ whole runs


class Models(Listener):
    """Record the global model after each round."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def aggregated(self, state: Any) -> None:
        self.states.append({name: tensor.clone() for name, tensor in state.items()})


def run(folder: Path, method: str = "crt", settings: Any = None, listener: Any = None, **options: Any) -> Any:
    given = {**TINY, **QUICK, "local_epochs": 1, "crt_rounds": 2, **(settings or {})}
    plan = make_plan(method, task="classification", sites=3, settings=given, **{"num_rounds": 2, **options})
    listener = listener or Models()
    found = run_local(plan, folder, listeners=[listener])
    return run_document(found), getattr(listener, "states", None)


@pytest.fixture(scope="module")
def retrained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("crt"))


@pytest.mark.long
def test_the_encoder_is_that_of_the_methods_last_round(retrained):
    results, states = retrained
    assert results["status"] == "completed"
    assert len(results["rounds"]) == len(states) == 4
    assert results["info"]["crt_rounds"] == 2
    assert hash_of(states[0]) != hash_of(states[1]) == hash_of(states[2]) == hash_of(states[3])
    for before, after in pairwise(states[1:]):
        assert not torch.equal(before["head.weight"], after["head.weight"])
    assert [r["details"].get("crt_round") for r in results["rounds"]] == [None, None, 0, 1]
    classifier = sum(states[0][name].nbytes for name in CLASSIFIER)
    sent = [r["phases"][0]["bytes_in"] for r in results["rounds"]]
    assert sent[2] == sent[3] == 3 * classifier < sent[0]


@pytest.mark.many
@pytest.mark.parametrize("method", ["fed_mas", "fed_lwr", "fed_mrl"])
def test_with_other_methods(method, tmp_path):
    """Check rules with reports, two phases, layer weights or memory: the later rounds use none of these."""
    settings = {"crt_weights": "method", "crt_rounds": 1}
    settings |= {"projector_dim": 96} if method == "fed_mas" else {}
    results, states = run(tmp_path, method, settings, num_rounds=1)
    assert hash_of(states[0]) == hash_of(states[1])
    first, second = results["rounds"]
    assert [phase["name"] for phase in second["phases"]] == ["train", "aggregate"]
    weights = first["site_weights"] or {s: v["weight"] for s, v in first["layers"]["head"].items()}
    assert second["site_weights"] == pytest.approx(weights)
    assert not second["reports"]


class Stop(Listener):
    """Stop the run in a round."""

    def __init__(self, at: int) -> None:
        self.at, self.now = at, -1

    def round_started(self, current_round: int) -> None:
        self.now = current_round

    def __call__(self) -> bool:
        return self.now >= self.at


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), "fed_mas", {"crt_weights": "method", "projector_dim": 96})


@pytest.mark.long
@pytest.mark.parametrize("at", [2, 3])
def test_stopped_and_gone_on_with_is_the_same_to_the_bit(uninterrupted, tmp_path, at):
    """Check that gradients of the encoder from the round before do not count when gradients are clipped."""
    whole, states = uninterrupted
    given = {**TINY, **QUICK, "local_epochs": 1, "crt_rounds": 2, "crt_weights": "method", "projector_dim": 96}

    def plan(num_rounds: int = 2, **more: Any) -> Any:
        settings = {**given, **more}
        return make_plan(
            "fed_mas", task="classification", sites=3, settings=settings, num_rounds=num_rounds, experiment="e"
        )

    stop, models = Stop(at), Models()
    with pytest.raises(Stopped):
        run_local(plan(), tmp_path, listeners=[stop], should_stop=stop)
    with pytest.raises(ValueError, match="crt_epochs: was 1, is 2"):
        run_local(plan(crt_epochs=2), tmp_path)
    found = run_local(plan(), tmp_path, listeners=[models])
    assert len(models.states) == 4 - at
    assert same(models.states[-1], states[-1])
    assert run_document(found)["test"] == whole["test"]
    with pytest.raises(ValueError, match=r"num_rounds=2, is 3, and .*crt_rounds"):
        run_local(plan(3), tmp_path)


def test_a_site_that_sends_more_than_the_classifier_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(ClassifierRetraining, "sends", lambda self, names: list(names))
    with pytest.raises(RoundFailed, match=r"'encoder\.\S+' is unexpected"):
        run(tmp_path, num_rounds=1)


def test_settings():
    assert RunSettings().rounds_in_all == RunSettings().num_rounds
    plan = make_plan("crt", num_rounds=4)
    assert (plan.run.crt_rounds, plan.run.rounds_in_all) == (10, 14)
    assert make_plan("crt", settings={"crt_rounds": 3}).run.crt_rounds == 3
    assert make_plan("fed_mas", settings={"crt_rounds": 3, "crt_weights": "method"}).run.crt_weights == "method"
    assert make_plan("fed_mas").run.crt_rounds == 0
    with pytest.raises(ValueError, match="crt_weights must be one of 'samples'"):
        make_plan("crt", settings={"crt_weights": "rf"})
