"""Test CReFF: gradients by class at a site, features and classifier at the server, and whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.core.features.federated_features import (
    classifier_gradient,
    match_features,
    matching_loss,
    retrain_classifier,
)
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.plan.bounds import FOR_HOSPITALS, Bounds
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import round_seed
from fairflare.federation.transports.local import run_local
from fairflare.flare.aggregator import FairAggregator
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import MakesTensors
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.creff import REPORTED, ClassGradientTraining, CReFF
from fairflare.methods.fed_avg import FedAvg
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import run_document

from . import support
from .support import QUICK, at_site, inputs, request, same
from .test_crt import TASK, TINY, Models

SMALL: dict[str, Any] = {"gradient_repeats": 2, "num_features": 5, "feature_steps": 10, "classifier_epochs": 5}
MADE = {"retrained.weight", "retrained.bias"}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ formulas


def test_the_gradient_is_that_of_autograd():
    features, weight, bias = rand(7, 4), rand(3, 4, seed=1).requires_grad_(True), rand(3, seed=2).requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(features @ weight.T + bias, torch.full((7,), 2))
    wanted = torch.autograd.grad(loss, (weight, bias))
    found = classifier_gradient(features, 2, weight, bias).detach()
    torch.testing.assert_close(found[:, :-1], wanted[0])
    torch.testing.assert_close(found[:, -1], wanted[1])


def test_matching_loss_of_the_spec():
    """Check 0 for equal gradients, C + 1 for orthogonal rows and bias; a row of zeros counts 1."""
    gradient = rand(5, 9) + 3
    assert float(matching_loss(gradient, gradient)) == pytest.approx(0, abs=1e-5)
    assert float(matching_loss(gradient, -gradient)) == pytest.approx(12, abs=1e-5)
    assert float(matching_loss(gradient, 7 * gradient)) == pytest.approx(0, abs=1e-5)
    one, other = torch.zeros(4, 5), torch.zeros(4, 5)
    one[:, 0] = other[:, 1] = 1
    one[0, -1] = other[1, -1] = 1
    assert float(matching_loss(one, other)) == pytest.approx(5)
    assert float(matching_loss(one, torch.zeros(4, 5))) == pytest.approx(5)
    with pytest.raises(ValueError, match="found"):
        matching_loss(one, torch.zeros(4, 4))


def published_loop(features, wanted, weight, bias, steps, rate):
    """Run the published loop in float64: second derivatives by autograd, cosines row by row."""
    features = features.clone().requires_grad_(True)
    optimizer = torch.optim.SGD([features], lr=rate)
    for _ in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for c, target in wanted.items():
            w, b = weight.clone().requires_grad_(True), bias.clone().requires_grad_(True)
            loss = torch.nn.functional.cross_entropy(features[c] @ w.T + b, torch.full((features.shape[1],), c))
            gw, gb = torch.autograd.grad(loss, (w, b), create_graph=True)
            for j in range(len(b)):
                total = total + 1 - torch.dot(gw[j], target[j, :-1]) / (gw[j].norm() * target[j, :-1].norm() + 1e-6)
            total = total + 1 - torch.dot(gb, target[:, -1]) / (gb.norm() * target[:, -1].norm() + 1e-6)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return features.detach()


def test_features_against_the_published_loop():
    features, weight, bias = rand(4, 6, 5), rand(4, 5, seed=1), rand(4, seed=2)
    wanted = {c: classifier_gradient(rand(8, 5, seed=10 + c) + c, c, weight, bias) for c in (0, 2, 3)}
    found, before, after = match_features(features, wanted, weight, bias, steps=12, learning_rate=0.5)
    torch.testing.assert_close(found, published_loop(features, wanted, weight, bias, 12, 0.5), atol=1e-9, rtol=0)
    assert torch.equal(found[1], features[1])  # a class that is nowhere
    own = sum(float(matching_loss(classifier_gradient(found[c], c, weight, bias), g)) for c, g in wanted.items())
    assert after == pytest.approx(own)
    assert after < 0.9 * before


def test_the_classifier_against_torch():
    features = rand(3, 10, 4)
    weight, bias = retrain_classifier(features, epochs=3, learning_rate=0.1, batch_size=8, seed=5)
    torch.manual_seed(5)
    layer = torch.nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(5)
    y = torch.tensor([0] * 10 + [1] * 10 + [2] * 10)
    for _ in range(3):
        for chosen in torch.randperm(30, generator=order).split(8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(layer(features.reshape(30, 4)[chosen]), y[chosen]).backward()
            optimizer.step()
    torch.testing.assert_close(weight, layer.weight.detach())
    torch.testing.assert_close(bias, layer.bias.detach())
    before = torch.get_rng_state()
    retrain_classifier(features, epochs=1, learning_rate=0.1, batch_size=8, seed=5)
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------------------------------ a site


def task_of(**more: Any) -> ClassificationTask:
    return ClassificationTask(**{**TASK, "retrained_head": True, **more})


def start(task: ClassificationTask) -> dict[str, torch.Tensor]:
    """Return a start whose second classifier differs from the first one."""
    state = support.initial(task)
    return {**state, "retrained.weight": rand(5, 16).float(), "retrained.bias": rand(5).float()}


def test_gradients_of_a_site_against_autograd(tmp_path):
    """Check all images of each class, as they are fewer than asked for; in evaluation mode, before training."""
    task = task_of()
    state = start(task)
    here = at_site(tmp_path, ClassGradientTraining(**QUICK, gradient_images=64, gradient_repeats=3), task=task)
    reply = here.perform(request("train", state, 1))
    assert reply.status == "ok", reply.reason
    model = task.build_model().eval()
    model.load_state_dict(state)
    counts = here._data.class_counts("training")
    assert int(counts.max()) <= 64
    sums = dict.fromkeys(counts.nonzero().flatten().tolist(), 0.0)
    for repeat in range(3):
        seed = round_seed(0, "site-1", 1) + 1 + repeat
        drawn = list(here._data.batches("training", batch_size=64, shuffle_seed=seed, augment=True))
        images, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        for c in sums:
            w, b = (state[name].clone().requires_grad_(True) for name in ("retrained.weight", "retrained.bias"))
            logits = model.embed(images[labels == c]).detach() @ w.T + b
            loss = torch.nn.functional.cross_entropy(logits, labels[labels == c])
            gw, gb = torch.autograd.grad(loss, (w, b))
            sums[c] = sums[c] + torch.cat([gw, gb[:, None]], 1) / 3
    found = np.frombuffer(reply.report[REPORTED], "<f4").reshape(-1, 1 + 5 * 17)
    assert found[:, 0].tolist() == sorted(sums)
    for row, c in zip(found, sorted(sums), strict=True):
        np.testing.assert_allclose(row[1:], sums[c].flatten().numpy(), atol=2e-6)


def test_at_most_so_many_images_of_a_class_and_another_choice_each_time(tmp_path):
    seen = []

    class Watched(ClassGradientTraining):
        def _features(self, run, model, repeat):
            found = super()._features(run, model, repeat)
            seen.append(found)
            return found

    task = task_of(partition="iid")
    here = at_site(tmp_path, Watched(**QUICK, gradient_images=3, gradient_repeats=2), task=task)
    here.perform(request("train", start(task)))
    counts = here._data.class_counts("training")
    for found in seen:
        assert {c: len(own) for c, own in found.items()} == {
            c: min(3, int(n)) for c, n in enumerate(counts) if n
        }  # fmt: skip
    assert any(not torch.equal(seen[0][c], seen[1][c]) for c in seen[0])


def test_training_is_that_of_fed_avg_with_the_sites_own_classifier(tmp_path):
    """Check that the pass before training leaves no trace, and that the reply lacks the server's classifier."""
    task, plain = task_of(), ClassificationTask(**TASK)
    state = start(task)
    here = at_site(tmp_path / "a", ClassGradientTraining(**QUICK, gradient_repeats=1), task=task)
    asked = request("train", state)
    reply = here.perform(asked)
    without = {name: tensor for name, tensor in state.items() if name not in MADE}
    expected = at_site(tmp_path / "b", LocalTraining(**QUICK), task=plain).perform(request("train", without))
    assert same(reply.update, expected.update)
    assert reply.metrics != expected.metrics  # measured with the server's classifier
    local = here.local_model(asked, 0)
    assert all(torch.equal(local[name], state[name]) for name in MADE)
    model = task.build_model()
    model.load_state_dict(state)
    images = torch.rand(4, 3, 32, 32)
    features = model.eval().embed(images)
    torch.testing.assert_close(model(images), features @ state["retrained.weight"].T + state["retrained.bias"])
    assert not any(name in MADE for name, _ in model.named_parameters())


def test_bytes_of_the_spec():
    """Check C = 23, d = 512: all gradients are 1,085,508 bytes, with four bytes for the number of each class."""
    classes, width = 23, 512
    training = ClassGradientTraining()
    run: Any = type("Run", (), {"own": {c: torch.zeros(classes, width + 1) for c in range(classes)}})
    network: Any = type("Network", (), {"retrained": torch.nn.Linear(width, classes)})
    assert len(training.report(run, network)[REPORTED].sent(range(classes))) == 1_085_508 + 4 * classes
    assert training.report(run, network)[REPORTED].shape == (classes, classes * (width + 1))
    run.own = {7: torch.zeros(classes, width + 1)}
    assert len(training.report(run, network)[REPORTED].sent(range(classes))) == 1_085_508 // classes + 4
    model = ClassificationTask(
        phantom="endoscopy", retrained_head=True, features=[64, 128, 256, 512]
    ).build_model()  # fmt: skip
    assert sum(model.state_dict()[name].nbytes for name in MADE) == 47_196


def test_refusals():
    with pytest.raises(ValueError, match="cannot learn segmentation"):
        make_plan("creff", task="segmentation")
    with pytest.raises(ValueError, match="second classifier; set retrained_head"):
        make_plan("creff", settings={"retrained_head": False})
    with pytest.raises(ValueError, match="retrained_head needs classifier='linear'"):
        task_of(classifier="cosine")
    with pytest.raises(ValueError, match="CReFF makes a part of the model itself"):
        FairAggregator(rule=CReFF())
    run: Any = type("Run", (), {"site": "a"})
    with pytest.raises(SiteError, match="site 'a': CReFF needs a second"):
        ClassGradientTraining().check(run, torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"CReFF needs .* in the network"):
        CReFF().begin_round({"head.weight": torch.zeros(2, 2)})


# ------------------------------------------------------------------------------------------------ the server

RECEIVED = {"retrained.weight": rand(3, 4, seed=8).float(), "retrained.bias": rand(3, seed=9).float()}


def rule_of(**settings: Any) -> CReFF:
    rule = CReFF(**{"num_features": 4, "feature_steps": 7, "classifier_epochs": 3, **settings})
    rule.begin_round(RECEIVED)
    return rule


def reported(rule: CReFF, *classes: int, scale: float = 1.0, site: str = "a") -> dict[str, Any]:
    rows = [[c, *(scale * rand(15, seed=c)).tolist()] for c in classes]
    return rule.check_report({REPORTED: np.array(rows, "f4").reshape(-1)}, site, None)


def test_the_mean_is_over_the_sites_that_have_the_class():
    rule = rule_of()
    both = {"a": reported(rule, 0, 2), "b": reported(rule, 2, scale=3.0), "c": reported(rule)}
    found = rule._mean_gradients(inputs(both), RECEIVED["retrained.weight"])
    assert sorted(found) == [0, 2]
    torch.testing.assert_close(found[0].double(), rand(15, seed=0).reshape(3, 5), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[2].double(), 2 * rand(15, seed=2).reshape(3, 5), atol=1e-6, rtol=0)
    weighing = rule.weigh(inputs(both))
    assert weighing.sites == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    begun = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rule.federated[1], begun[1])
    expected = match_features(begun, found, *RECEIVED.values(), steps=7, learning_rate=0.1)
    assert torch.equal(rule.federated, expected[0])
    weight, bias = retrain_classifier(expected[0], epochs=3, learning_rate=0.01, batch_size=32, seed=1)
    assert same(rule.made(), {"retrained.weight": weight, "retrained.bias": bias})
    assert weighing.values["matching_after"] < weighing.values["matching_before"]
    assert weighing.values["classes"] == 2


def test_bounds_hold_for_the_gradients_of_a_class():
    """Check that two of six sites do not own a class that they alone have, and that a large gradient is cut."""
    rule, bounds = rule_of(), Influence(Bounds(**FOR_HOSPITALS), 6)
    reports = {site: reported(rule, 1, scale=1000.0 if site == "e" else 1.0) for site in "abcde"}
    reports |= {"e": reported(rule, 1, scale=1000.0), "f": reported(rule, 1, 2), "d": reported(rule, 1, 2)}
    asked = inputs(reports)
    rule.weigh(asked)  # without bounds: the features begin
    free = rule._mean_gradients(asked, RECEIVED["retrained.weight"])
    one, two = (rand(15, seed=c).reshape(3, 5) for c in (1, 2))
    torch.testing.assert_close(free[1].double(), (5 + 1000) / 6 * one, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(free[2].double(), two, rtol=1e-5, atol=1e-5)
    asked.bounded, asked.moderated = bounds.bound_made, bounds.moderated
    held = rule._mean_gradients(asked, RECEIVED["retrained.weight"])
    torch.testing.assert_close(held[1].double(), (5 + 3) / 6 * one, rtol=1e-5, atol=1e-5)
    now = classifier_gradient(rule.federated[2].double(), 2, *(t.double() for t in RECEIVED.values()))
    share = 1 / 3 + 0.16
    expected = share * two + (1 - share) * two.norm() * now / now.norm()
    torch.testing.assert_close(held[2].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_zero_gradient_and_no_gradient_change_no_feature():
    rule = rule_of()
    begun = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    weighing = rule.weigh(inputs({"a": reported(rule, 1, scale=0.0), "b": {REPORTED: None}}))
    assert torch.equal(rule.federated, begun)
    assert weighing.values == {"matching_before": 0.0, "matching_after": 0.0, "classes": 0.0}


def test_features_outlive_the_round_and_a_restart():
    def made(rule: CReFF, reporter: CReFF) -> dict[str, torch.Tensor]:
        rule.weigh(inputs({"a": reported(reporter, 1)}, current_round=1))
        return rule.made()

    first, second = rule_of(), rule_of()
    first.weigh(inputs({"a": reported(first, 0)}))
    second.load_state_dict(first.state_dict())
    again = [made(rule, rule) for rule in (first, second)]
    assert same(again[0], again[1])
    fresh = made(rule_of(), first)
    assert not same(again[0], fresh)
    first.load_state_dict({})
    assert first.federated is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.0] * 17, "has 17 numbers, must be 1 to 3 times 16"),
        ([0.0] * 64, "has 64 numbers"),
        ([3.0, *[0.0] * 15], "of classes 0 to 2 in order"),
        ([0.5, *[0.0] * 15], "of classes 0 to 2 in order"),
        ([1.0, *[0.0] * 15, 0.0, *[0.0] * 15], "in order"),
        ([1.0, *[0.0] * 15, 1.0, *[0.0] * 15], "in order"),
    ],
)
def test_gradients_that_are_none(values, text):
    with pytest.raises(ReportError, match=f"site 'b': field 'class_gradients' .*{text}"):
        rule_of().check_report({REPORTED: np.array(values, np.float32)}, "b", None)


@pytest.mark.parametrize("value", [b"123", "1234", [1.0], np.float32(math.nan).tobytes(), np.float32(2e6).tobytes()])
def test_an_array_that_is_none(value):
    with pytest.raises(ReportError, match="site 'b': field 'class_gradients"):
        CReFF.report_fields[0].read({REPORTED: value}, "b")


# ------------------------------------------------------------------------------------------------ whole runs


def run(folder: Path, settings: Any = None, **options: Any) -> Any:
    given = {**TINY, **QUICK, **SMALL, "local_epochs": 1, **(settings or {})}
    plan = make_plan("creff", sites=3, settings=given, **{"num_rounds": 3, **options})
    models = Models()
    stop = options.pop("stop", None)
    found = run_local(plan, folder, listeners=[models], **({"should_stop": stop} if stop else {}))
    return run_document(found), models.states


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tmp_path_factory.mktemp("creff"))


@pytest.mark.long
def test_the_server_makes_the_classifier_and_the_rest_is_fed_avg(finished, tmp_path):
    results, states = finished
    assert results["status"] == "completed"
    plan = make_plan("creff", settings={**TINY, **QUICK, "local_epochs": 1})
    settings = {name: getattr(plan.training, name) for name in ("optimizer", "learning_rate", "batch_size")}
    same_as = ("momentum", "max_grad_norm", "weight_decay", "augment", "keep_optimizer_state")
    given = {**TINY, **settings, **{name: getattr(plan.training, name) for name in same_as}, "local_epochs": 1,
             "phantom_min_share": plan.task.phantom_min_share}  # fmt: skip
    models = Models()
    run_local(make_plan("fed_avg", task="classification", sites=3, settings=given, num_rounds=3), tmp_path,
              listeners=[models])  # fmt: skip
    for found, expected in zip(states, models.states, strict=True):
        assert same({name: tensor for name, tensor in found.items() if name not in MADE}, expected)
    assert not torch.equal(states[0]["retrained.weight"], states[1]["retrained.weight"])
    assert not torch.equal(states[0]["retrained.weight"], states[0]["head.weight"])
    for record in results["rounds"]:
        assert record["values"]["matching_after"] < record["values"]["matching_before"]
        sent, got = (record["phases"][0][name] for name in ("bytes_out", "bytes_in"))
        assert sent - got == 3 * sum(states[0][name].nbytes for name in MADE)


def test_not_with_crt(tmp_path):
    with pytest.raises(ValueError, match=r"CReFF retrains .*set crt_rounds=0"):
        run(tmp_path, {"crt_rounds": 1})
    assert not issubclass(FedAvg, MakesTensors)


def test_initial_weights_begin_both_classifiers(tmp_path):
    task = task_of()
    saved = support.initial(task, seed=5)
    torch.save({name: saved[name] for name in saved if name not in MADE}, tmp_path / "weights.pt")
    model = task.build_model()
    task.initialise(model, str(tmp_path / "weights.pt"))
    assert torch.equal(model.retrained.weight, saved["head.weight"])
    assert torch.equal(model.head.weight, saved["head.weight"])
