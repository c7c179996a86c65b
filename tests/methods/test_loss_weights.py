"""Test AFL, FairFed and FedGA: rules against the spec and plain loops over rounds, and the sites' measurements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fairflare.base.task import evaluating
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.plan.bounds import Bounds
from fairflare.methods.afl import AFL
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fair_fed import FairFed, ReportAccuracy
from fairflare.methods.fed_ga import LOCAL_LOSS, FedGA, ReportGap
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import metric_values

from .support import CLASSES as TASK
from .support import SEGMENTATION, at_site, initial, inputs, request, same

NAN = math.nan
SMALL = {**SEGMENTATION, "local_epochs": 1, "criterion": "task"}


def weigh(
    rule: Any, field: str, current_round: int = 0, samples: Any = None, num_rounds: int = 300, **said: float
) -> Any:
    """Do a round in which sites report; return their weights in order of names, rounded."""
    given = inputs({s: {field: v} for s, v in said.items()}, current_round=current_round, num_rounds=num_rounds)
    given.received = {}
    given.num_samples = samples or dict.fromkeys(said, 1)
    found = rule.weigh(given)
    assert found.buffers is None
    assert found.buffers is None
    return [found.sites[site] for site in sorted(said)]


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-6)


# ------------------------------------------------------------------------------------------------ AFL


def test_afl_of_the_spec():
    rule = AFL()
    assert weigh(rule, "probe_loss", a=1.0, b=2.0, c=4.0) == near(1 / 3, 1 / 3, 1 / 3)
    assert weigh(rule, "probe_loss", 1, a=1.0, b=1.0, c=1.0) == near(0.2, 0.3, 0.5)
    assert weigh(rule, "probe_loss", 2, a=1.0, b=1.0, c=1.0) == near(0.2, 0.3, 0.5)  # alike: nothing moves
    rule = AFL(afl_rate=1.0)
    weigh(rule, "probe_loss", a=0.5, b=1.0, c=3.0)
    assert weigh(rule, "probe_loss", 1, a=1.0, b=1.0, c=1.0) == near(0, 0, 1)


def test_afl_absent_new_and_without_a_number():
    rule = AFL()
    rule.load_state_dict({"lambda": {"a": 0.2, "b": 0.3, "c": 0.5}, "losses": {"a": 5.0}})
    assert weigh(rule, "probe_loss", 1, a=NAN, b=1.0) == near(0.4, 0.6)
    found = rule.state_dict()["lambda"]
    assert found == pytest.approx({"a": 0.4, "b": 0.1, "c": 0.5})  # a: its last, 5; they share 0.5
    assert weigh(rule, "probe_loss", 2, a=1.0, b=1.0, c=1.0, d=1.0) == near(
        0.4 - 1 / 12,
        0.1 - 1 / 12,
        0.5 - 1 / 12,
        1 / 3 - 1 / 12,  # d: the mean, then 4/3 are projected
    )
    rule.load_state_dict({"lambda": {"a": 0.0, "b": 1.0}, "losses": {}})
    assert weigh(rule, "probe_loss", 3, a=2.0) == near(1)
    assert rule.state_dict()["lambda"] == {"a": 0.0, "b": 1.0}


def test_afl_with_the_worst_site_alone():
    rule = AFL(afl_mode="argmax")
    assert weigh(rule, "probe_loss", a=1.0, b=3.0, c=2.0) == [0, 1, 0]
    assert weigh(rule, "probe_loss", a=3.0, b=3.0, c=NAN) == [1, 0, 0]
    assert weigh(rule, "probe_loss", a=3.0, d=3.5, c=NAN) == [0, 0, 1]  # c: its last, 2 (a c d)


def test_what_afl_remembers_is_bounded():
    rule, influence = AFL(afl_rate=1.0), Influence(Bounds(max_weight=0.4, max_update_norm=3.0))
    given = inputs({site: {"probe_loss": 1e6 if site == "d" else 1.0} for site in "abcd"})
    given.remembered, given.moderated = influence.remembered, influence.moderated
    rule.weigh(given)
    assert rule.state_dict()["lambda"]["d"] == pytest.approx(0.4)
    kinds = {warned.kind for warned in influence.warnings}
    assert kinds == {"max_update_norm, probe_loss", "max_weight, remembered"}


# ------------------------------------------------------------------------------------------------ FairFed

SAMPLES = {"a": 100, "b": 300, "c": 600}
ACCURACIES = {"a": 0.6, "b": 0.8, "c": 0.9}


def test_fair_fed_over_rounds_absent_and_new():
    rule = FairFed(fairfed_beta=0.5)
    first = weigh(rule, "accuracy", samples=SAMPLES, **ACCURACIES)
    assert weigh(rule, "accuracy", 1, samples=SAMPLES, a=0.5, b=NAN) == near(
        first[0] / (first[0] + first[1]), first[1] / (first[0] + first[1])
    )
    assert rule.state_dict()["omega"]["c"] == pytest.approx(first[2])
    weigh(rule, "accuracy", 2, samples={**SAMPLES, "d": 1000}, **ACCURACIES, d=0.8)
    omega = rule.state_dict()["omega"]
    assert sum(omega.values()) == pytest.approx(1)
    # The mean accuracy is 0.82 and the mean gap 0.085; d enters with 1000 of 2000 samples.
    raw = {"a": first[0], "b": first[1], "c": first[2], "d": 0.5}
    for site, gap in {"a": 0.22, "b": 0.02, "c": 0.08, "d": 0.02}.items():
        raw[site] = max(raw[site] - 0.5 * (gap - 0.085), 0.0)
    assert raw["a"] == 0
    assert omega == pytest.approx({site: value / sum(raw.values()) for site, value in raw.items()}, abs=1e-9)


# ------------------------------------------------------------------------------------------------ FedGA


def test_fed_ga_of_the_spec():
    rule = FedGA()
    assert weigh(rule, "gap", a=NAN, b=NAN, c=NAN) == near(1 / 3, 1 / 3, 1 / 3)
    assert weigh(rule, "gap", 1, a=0.1, b=0.3, c=0.5) == near(0.316722, 0.333333, 0.349944)
    assert FedGA().step_of(1, 300, 3) == pytest.approx(0.016611, abs=1e-6)
    assert FedGA(fedga_mode="original").step_of(2, 300, 3) == pytest.approx(0.2 / 3)
    found = weigh(FedGA(ga_step=0.3, shrinking=False), "gap", 7, a=0.1, b=0.3, c=0.8)
    assert found == near(0.258333, 0.308333, 0.433333)
    found = weigh(FedGA(fedga_mode="original", centred=False), "gap", 2, a=0.1, b=0.3, c=0.8)
    assert found == near(0.310606, 0.325758, 0.363636)


def test_fed_ga_absent_and_last_rounds():
    rule = FedGA()
    rule.load_state_dict({"weights": {"a": 0.2, "b": 0.3, "c": 0.5}})
    assert weigh(rule, "gap", 299, a=NAN, b=1.0) == near(0.4, 0.6)  # one number alone is its own mean
    assert rule.state_dict()["weights"]["c"] == 0.5
    assert rule.step_of(300, 300, 3) == 0.0
    assert rule.step_of(9, 1, 3) == 0.0


# ------------------------------------------------------------------------------------------------ sites


def accuracies(model: torch.nn.Module, task: ClassificationTask, split: str) -> tuple[float, float]:
    data = task.open_site("site-1", {})
    ((images, labels),) = data.batches(split, batch_size=10**6)
    with evaluating(model):
        told = model(images).argmax(1)
    recalls = [float((told[labels == c] == c).float().mean()) for c in labels.unique()]
    return float((told == labels).float().mean()), sum(recalls) / len(recalls)


@pytest.mark.parametrize("mode", ["original", "fedism"])
def test_fair_feds_accuracy_is_of_the_right_split(tmp_path, mode):
    task = ClassificationTask(**TASK)
    state = initial(task)
    settings = {"batch_size": 16, "augment": True}
    reply = at_site(tmp_path / "a", ReportAccuracy(fairfed_mode=mode, **settings), task=task).perform(
        request("train", state)
    )
    assert reply.status == "ok", reply.reason
    model = task.build_model()
    model.load_state_dict(state)
    plain, _ = accuracies(model, task, "validation")
    _, balanced = accuracies(model, task, "training")
    assert reply.report == {"accuracy": pytest.approx(plain if mode == "original" else balanced, abs=1e-6)}
    other = at_site(tmp_path / "b", LocalTraining(**settings), task=task).perform(request("train", state))
    assert same(reply.update, other.update)


def test_fair_fed_of_segmentation_reports_dice(tmp_path):
    worker = at_site(tmp_path, ReportAccuracy(batch_size=4))
    reply = worker.perform(request("train", initial()))
    assert reply.report == {"accuracy": metric_values(reply.metrics)["dice"]}


def loss_of(task: ClassificationTask, state: Any) -> float:
    model = task.build_model().double()
    model.load_state_dict(state)
    ((images, labels),) = task.open_site("site-1", {}).batches("training", batch_size=10**6)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model.eval()(images.double()), labels))


def test_fed_gas_gap_over_rounds(tmp_path):
    """Check no gap in the first round and after a round without the site; a repeated round gives the same."""
    task = ClassificationTask(**TASK)
    states = [initial(task, seed) for seed in range(4)]

    def ask(current_round: int) -> Any:
        worker = at_site(tmp_path, ReportGap(batch_size=16), task=task)  # a new process each time
        reply = worker.perform(request("train", states[current_round], current_round, num_rounds=9))
        assert reply.status == "ok", reply.reason
        own = {k: states[current_round][k] + u for k, u in reply.update.items()}
        return reply.report["gap"], own

    first, own = ask(0)
    assert math.isnan(first)
    second, _ = ask(1)
    assert second == pytest.approx(loss_of(task, states[1]) - loss_of(task, own), rel=1e-4)
    assert math.isnan(ask(3)[0])
    assert ask(1)[0] == second  # the server went back
    assert sorted(p.name for p in tmp_path.rglob(f"{LOCAL_LOSS}*")) == [f"{LOCAL_LOSS}.{r:06d}.pt" for r in (0, 1)]
