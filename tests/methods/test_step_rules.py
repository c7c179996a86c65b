"""Test FedNova and q-FedAvg: rounds against the authors' loops in float64, sites, bounds, stock controllers."""

from __future__ import annotations

import json
import logging
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fairflare.core.aggregation.fair_rules import AccumulatedSteps
from fairflare.federation.collecting.collector import Collector
from fairflare.federation.plan.bounds import Bounds
from fairflare.flare.aggregator import FairAggregator
from fairflare.flare.messages.wire import META_KEY
from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_nova import FedNova, NovaTraining
from fairflare.methods.parts.probes import LossProbe
from fairflare.methods.q_fed_avg import QFedAvg
from fairflare.tasks.classification import ClassificationTask
from tests.federation.network import Line, Run, good

from .support import CLASSES as TASK
from .support import at_site, collected, initial, request, same

SITES = ("a", "b", "c")
SAMPLES = {"a": 10, "b": 30, "c": 60}


def reports(field: str, *values: float) -> dict[str, dict[str, float]]:
    return {site: {field: value} for site, value in zip(SITES, values, strict=True)}


def aggregated(rule: Any, folder: Any, said: Any) -> Any:
    collector = collected(rule, folder, said, samples=SAMPLES)
    assert collector.rejected == {}
    return collector.aggregate()


# ------------------------------------------------------------------------------------------------ FedNova, server


def test_nova_with_steps_in_the_mean(tmp_path):
    collector = collected(FedNova(effective_steps="steps"), tmp_path, reports("step_norm", 2.0, 4.0, 4.0))
    for site, steps in zip(SITES, (3, 9, None), strict=True):
        collector._round.trained[site].report["num_steps"] = steps
    _, weighing = collector.aggregate()
    assert weighing.values["step"] == pytest.approx((3 + 9 + 4) / 3 * (0.5 + 0.25 + 0.25) / 3)


@pytest.mark.parametrize(
    ("norm", "steps", "message"),
    [
        (0.0, 5, r"field 'step_norm' must lie in \[1, 1e\+09\], got 0.0"),
        (1e10, 5, "field 'step_norm' must lie in"),
        (math.nan, 5, "field 'step_norm' must be finite"),
        (20.5, 5, "field 'step_norm' is 20.5, 5 steps come to 20 at most"),
        (1.0, 0, "field 'step_norm' is 1, 0 steps come to 0 at most"),
    ],
)
def test_a_norm_that_cannot_be_costs_its_site_the_round(tmp_path, norm, steps, message):
    def lies(site: str, name: str, task: Any) -> Any:
        reply = good(site, name, task)
        if name == "train":
            reply.meta["report"] = {"step_norm": norm if site == "site-2" else 3.0}
            reply.meta["num_steps"] = steps if site == "site-2" else 3
        return reply

    run = Run(tmp_path, lies, rule=FedNova(), num_rounds=1)()
    phase, reason = run.left_out()["site-2"]
    assert phase == "train"
    assert re.search(message, reason), reason
    assert sorted(run.results["rounds"][0]["site_weights"]) == ["site-1", "site-3"]


class Normed(Line):
    """Define a network with a batch norm, and a buffer whose name says nothing."""

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        model.register_buffer("scale_seen", torch.ones(2))
        return model


def test_rounds_know_what_is_trained_from_the_model(tmp_path):
    """Check sites that move everything by 0.1 k: parameters take a longer step, buffers the plain mean by samples."""
    norms = {1: 1.0, 2: 2.0, 3: 6.0}

    def said(site: str, name: str, task: Any) -> Any:
        reply = good(site, name, task)
        if name == "train":
            reply.meta["report"] = {"step_norm": norms[int(site[-1])]}
        return reply

    run = Run(tmp_path, said, rule=FedNova(), task=Normed(), num_rounds=1)()
    shares = {k: 10 * k / 60 for k in norms}
    plain = sum(p * 0.1 * k for k, p in shares.items())
    stepped = sum(p * n for p, n in zip(shares.values(), norms.values(), strict=True)) * sum(
        p * 0.1 * k / norms[k] for k, p in shares.items()
    )
    assert abs(plain - stepped) > 0.01
    for name, tensor in run.net.tasks[0].params.items():
        if tensor.is_floating_point():
            moved = plain if name in ("1.running_mean", "1.running_var", "scale_seen") else stepped
            torch.testing.assert_close(run.model()["model"][name], tensor + moved, atol=1e-6, rtol=0, msg=name)
    assert run.results["rounds"][0]["values"]["step"] == pytest.approx(
        sum(p * norms[k] for k, p in shares.items()) * sum(p / norms[k] for k, p in shares.items())
    )


def test_what_one_site_can_do_to_the_step_is_bounded(tmp_path):
    """Check one of six sites that reports its steps as 1, or as a million."""
    sites = [f"site-{k}" for k in range(1, 7)]

    def step(norm: float, **bounds: Any) -> Any:
        def lies(site: str, name: str, task: Any) -> Any:
            reply = good(site, name, task)
            reply.meta["report"] = {"step_norm": norm if site == "site-6" else 100.0}
            reply.meta.update(num_steps=None, num_samples=10)
            return reply

        run = Run(tmp_path / f"{norm}{len(bounds)}", lies, rule=FedNova(), sites=sites, num_rounds=1, **bounds)()
        (record,) = run.results["rounds"]
        return record["values"]["step"], [w["text"] for w in record["warnings"] if "step_norm" in w["text"]]

    assert step(1.0)[0] > 14
    assert step(1e6)[0] > 1e3
    for norm, used in ((1.0, "33.33"), (1e6, "300")):
        found, texts = step(norm, max_update_norm=3, max_weight=0.4)
        assert 1 < found < 1.2
        assert texts == [f"step_norm {norm:.4g} counted as {used}, 3 times from the median (max_update_norm)"]
    assert step(250.0, max_update_norm=3)[1] == []


def test_of_two_sites_no_number_is_moderated(tmp_path):
    collector = Collector(FedNova(), tmp_path, Bounds(max_update_norm=3))
    assert collector._influence.moderated({"a": 1.0, "b": 1e6}, "x") == {"a": 1.0, "b": 1e6}
    assert collector._influence.moderated({"a": 0.0, "b": 0.0, "c": 5.0}, "x") == {"a": 0.0, "b": 0.0, "c": 5.0}
    assert collector._influence.moderated({"a": 1.0, "b": 1e6, "c": 2.0}, "x") == {"a": 1.0, "b": 6.0, "c": 2.0}
    assert collector._influence.moderated({"a": 0.1, "b": 3.0, "c": 6.0}, "x") == {"a": 1.0, "b": 3.0, "c": 6.0}


# ------------------------------------------------------------------------------------------------ q-FedAvg, server


def test_q_0_is_the_uniform_mean(tmp_path):
    expected, _ = aggregated(FedAvg(weighting="uniform"), tmp_path / "a", {site: {} for site in SITES})
    for form in ("delta_h", "weighted"):
        state, _ = aggregated(QFedAvg(q=0.0, q_form=form), tmp_path / form, reports("probe_loss", 1.0, 9.0, 2.0))
        assert all(torch.allclose(state[name], expected[name], rtol=1e-6, atol=1e-7) for name in state), form


def test_weighted_form_and_what_is_no_loss(tmp_path):
    _, weighing = aggregated(QFedAvg(q=2.0, q_form="weighted"), tmp_path, reports("probe_loss", 1.0, math.nan, 3.0))
    assert weighing.sites == pytest.approx({"a": 1 / 14, "b": 4 / 14, "c": 9 / 14})
    assert ("step" in weighing.values, weighing.buffers) == (False, None)


def test_the_constant_of_the_step(tmp_path):
    said = reports("probe_loss", 1.0, 2.0, 3.0)
    steps = [
        aggregated(rule, tmp_path / str(number), said)[1].values["step"]
        for number, rule in enumerate(
            (QFedAvg(lipschitz="rate", learning_rate=0.1), QFedAvg(lipschitz=10.0), QFedAvg(lipschitz=1.0))
        )
    ]
    assert steps[0] == pytest.approx(steps[1])
    assert steps[2] > steps[1]


def q_weighed(rule: QFedAvg, changes: Any, losses: Any) -> Any:
    """Do a round of one parameter that starts at 1."""
    sites = list(SITES[: len(changes)])
    reports = {site: {"probe_loss": loss} for site, loss in zip(sites, losses, strict=True)}
    states = {s: {"w": torch.tensor([1.0 - by], dtype=torch.float64)} for s, by in zip(sites, changes, strict=True)}
    received = {"w": torch.ones(1, dtype=torch.float64)}
    return rule.weigh(
        RoundInputs(
            0, 9, sites, dict.fromkeys(sites, 1), reports, {}, states, {"w": "w"}, received=received, parameters={"w"}
        )
    )


def test_the_measured_constant_by_hand() -> None:
    """Check a = (1/3, 2/3); sum a d^2 / F = 0.01 / 3 + 2/3 * 0.04 / 2 = 1/60; then half as much, then four times."""
    rule = QFedAvg()
    first = q_weighed(rule, (0.1, 0.2), (1.0, 2.0))
    assert first.sites == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    assert first.values == pytest.approx({"step": 1 / 2, "lipschitz": 60.0})
    shorter = q_weighed(rule, (0.1 / 2**0.5, 0.2 / 2**0.5), (1.0, 2.0))
    assert shorter.values == pytest.approx({"step": 2 / 3, "lipschitz": 60.0})  # 1 / (1 + 60/120)
    longer = q_weighed(rule, (0.2, 0.4), (1.0, 2.0))
    assert longer.values == pytest.approx({"step": 1 / 2, "lipschitz": 15.0})
    assert q_weighed(rule, (0.1, 0.2), (1.0, 2.0)).values == pytest.approx({"step": 0.8, "lipschitz": 15.0})


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0, 5.0])
def test_the_measured_step_is_never_below_one_part_in_one_plus_q(q: float) -> None:
    """Check anything that a site sends: also a loss of 0, a huge update, and both."""
    rule, rng = QFedAvg(q=q), np.random.default_rng(int(q * 2))
    for _ in range(200):
        changes, losses = 10 ** rng.uniform(-6, 3, 3), 10 ** rng.uniform(-8, 3, 3)
        losses[0] *= rng.integers(2)
        assert 1 / (1 + q) - 1e-12 <= q_weighed(rule, changes, losses).values["step"] <= 1


def test_after_long_updates_the_default_steps_and_the_papers_constant_does_not(tmp_path) -> None:
    """Check updates that are far longer than learning rate times gradient, as Adam's are."""
    said = reports("probe_loss", 0.7, 0.6, 0.8)
    steps = {L: aggregated(QFedAvg(lipschitz=L), tmp_path / str(L), said)[1].values["step"] for L in ("auto", "rate")}
    assert steps["auto"] == pytest.approx(0.5)
    assert steps["rate"] < 1e-2


def test_the_measured_constant_outlives_a_restart_and_goes_back() -> None:
    rule, again = QFedAvg(), QFedAvg()
    assert rule.state_dict() == {}
    start = rule.state_dict()
    q_weighed(rule, (0.2, 0.4), (1.0, 2.0))
    again.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    steps = [q_weighed(one, (0.1, 0.2), (1.0, 2.0)).values["step"] for one in (again, rule)]
    assert steps[0] == steps[1] != 0.5
    rule.load_state_dict(start)
    assert q_weighed(rule, (0.1, 0.2), (1.0, 2.0)).values == pytest.approx({"step": 0.5, "lipschitz": 60.0})


def test_nothing_to_measure() -> None:
    assert q_weighed(QFedAvg(), (0.0, 0.0), (1.0, 2.0)).values["step"] == 1.0
    assert (
        q_weighed(QFedAvg(), (math.inf, 0.1), (1.0, 2.0)).values["step"] == 0.0
    )  # and the next round is as if it were the first
    with pytest.raises(ValueError, match=r"^lipschitz.* got 'adam'$"):
        QFedAvg(lipschitz="adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^lipschitz.* got 0$"):
        QFedAvg(lipschitz=0)


# ------------------------------------------------------------------------------------------------ sites


def train(training: LocalTraining, folder: Any, **more: Any) -> Any:
    task = ClassificationTask(**TASK)
    return at_site(folder, training, task=task).perform(request("train", initial(task), **more))


SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.01, "batch_size": 8, "local_epochs": 2}


@pytest.mark.parametrize(
    ("given", "how"),
    [
        ({"momentum": 0.0}, {}),
        ({"momentum": 0.9, "nesterov": False}, {"momentum": 0.9}),
        ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}),
        ({"momentum": 0.0, "mu": 0.5}, {"pull": 0.005}),
        ({"optimizer": "adam"}, {}),
    ],
)
def test_a_site_reports_what_its_steps_come_to(tmp_path, given, how, caplog):
    caplog.set_level(logging.INFO)
    reply = train(NovaTraining(**{**SGD, **given}), tmp_path)
    assert reply.status == "ok", reply.reason
    expected = AccumulatedSteps()
    for _ in range(reply.num_steps):
        expected.add(**how)
    assert reply.num_steps > 5
    assert reply.report == {"step_norm": pytest.approx(expected.total)}
    assert ("Adam has no FedNova norm; its steps count 1 each" in caplog.text) == (given.get("optimizer") == "adam")


def test_a_pull_that_overshoots_is_refused():
    with pytest.raises(ValueError, match=r"^learning_rate \* mu.* got 0.1 \* 10.0$"):
        NovaTraining(optimizer="sgd", learning_rate=0.1, mu=10.0)


@pytest.mark.parametrize("probe", ["ce", "la"])
def test_probe_is_the_mean_loss_of_the_received_model(tmp_path, probe):
    """Compare with one float64 batch of all training images, for any batch size; training does not change."""
    settings = {"batch_size": 7, "criterion": "logit_adjusted", "augment": True}
    reply = train(LossProbe(**settings, probe_loss=probe), tmp_path / "a")
    task = ClassificationTask(**TASK)
    model = task.build_model().double()
    model.load_state_dict(initial(task))
    data = task.open_site("site-1", {})
    ((images, labels),) = data.batches("training", batch_size=10**6)
    with torch.no_grad():
        outputs = model.eval()(images.double())
    if probe == "la":
        counts = data.class_counts("training").double()
        outputs = outputs + (counts / counts.sum()).clamp(min=1e-12).log()
    expected = float(torch.nn.functional.cross_entropy(outputs, labels))
    assert reply.report == {"probe_loss": pytest.approx(expected, rel=1e-5)}
    assert same(reply.update, train(LocalTraining(**settings), tmp_path / "b").update)


# ------------------------------------------------------------------------------------------------ stock controllers


def sent(site: str, value: float, report: Any, update: bool) -> FLModel:
    return FLModel(
        params={"w": torch.tensor([value, 0.0]), "bn.running_var": torch.tensor([value])},
        params_type=ParamsType.DIFF if update else ParamsType.FULL,
        current_round=0,
        meta={"client_name": site, META_KEY: {"report": report, "num_samples": 10}},
    )


RULES = [(FedNova(), "step_norm"), (QFedAvg(lipschitz="rate", learning_rate=1.0), "probe_loss")]


@pytest.mark.parametrize(("rule", "field"), RULES, ids=["nova", "q"])
def test_under_a_stock_controller_updates_are_stepped(rule, field):
    aggregator = FairAggregator(rule=rule)
    for site, value, number in (("a", 1.0, 2.0), ("b", 3.0, 6.0)):
        aggregator.accept_model(sent(site, value, {field: number}, update=True))
    merged = aggregator.aggregate_model()
    weighing = aggregator.last_weighing
    change = weighing.sites["a"] * 1.0 + weighing.sites["b"] * 3.0
    assert abs(weighing.values["step"] - 1) > 0.1
    assert merged.params["w"].tolist() == pytest.approx([weighing.values["step"] * change, 0.0])
    assert merged.params["bn.running_var"].tolist() == pytest.approx([2.0])  # both have as many samples


@pytest.mark.parametrize(("rule", "field"), RULES, ids=["nova", "q"])
def test_under_a_stock_controller_whole_models_are_refused_by_name(rule, field):
    aggregator = FairAggregator(rule=rule)
    for site, value, number in (("a", 1.0, 2.0), ("b", 3.0, 6.0)):
        aggregator.accept_model(sent(site, value, {field: number}, update=False))
    words = f'whole model, .* {type(rule).__name__} .*="DIFF"'
    with pytest.raises(RuntimeError, match=words):
        aggregator.aggregate_model()
