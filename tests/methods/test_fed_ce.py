"""Test FedCE: rule against FLARE's aggregator, model without one site against FLARE's helper, state that stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_opt.pt.fedce import FedCEConstants, FedCEModelAggregator, PTFedCEHelper

from fairflare import __version__
from fairflare.base.settings import build
from fairflare.exchange.messages import Message
from fairflare.federation.collecting.collector import Collector, LikeReceived
from fairflare.federation.plan.bounds import Bounds
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_ce import FedCE, MinusModel
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.federation.network import Run, good
from tests.tiny import rows, run_document

from .support import CLASSES, SEGMENTATION, at_site, initial, net_state, request, same

RECEIVED = net_state(99)
TRAINED = ["conv.weight", "bn.weight", "head.weight"]


def changes(current_round: int, site: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * current_round + ord(site))
    return {
        name: torch.randn(t.shape, generator=g) if t.is_floating_point() else torch.tensor(3)
        for name, t in RECEIVED.items()
    }


def score(current_round: int, site: str) -> float:
    return 1.0 if current_round == 0 else (1 + (ord(site) * 37 + current_round * 11) % 9) / 10


def rounds(rule: FedCE, folder: Any, attendance: list[str], bounds: Bounds | None = None) -> list[Any]:
    """Return weights, new model and earlier reports, round by round."""
    collector, found = Collector(rule, folder, bounds), []
    for current_round, sites in enumerate(attendance):
        told = rule.directives(current_round, 9, sites)
        collector.begin(current_round, 9, shape=LikeReceived(RECEIVED), received=RECEIVED, sites=sites)
        for site in sites:
            meta = {"version": __version__, "status": "ok", "num_samples": 5}
            meta["report"] = {"minus_score": score(current_round, site)}
            message = Message(
                changes(current_round, site), True, rows({"dice": 0.5}, "validation"), meta, current_round
            )
            collector.keep(collector.read_training(site, message))
        state, weighing = collector.aggregate()
        found.append((weighing, state, told))
    return found


@pytest.mark.parametrize(("combine", "theirs"), [("sum", "plus"), ("multiply", "times")])
def test_rounds_against_flares_aggregator(tmp_path, combine, theirs):
    """Check all sites, then one absent, one new, and all again; FLARE's cosines are in float32."""
    attendance = ["abc", "abc", "ac", "bcd", "abcd"]
    ours = rounds(FedCE(combine=combine), tmp_path, attendance)
    flare = FedCEModelAggregator(mode=theirs, trainable_param_names=TRAINED)
    for current_round, sites in enumerate(attendance):
        flare.reset_stats()
        for site in sites:
            flare.accept_model(
                FLModel(
                    params={k: v for k, v in changes(current_round, site).items() if v.is_floating_point()},
                    params_type=ParamsType.DIFF,
                    current_round=current_round,
                    meta={"client_name": site, FedCEConstants.MINUS_MODEL_SCORE: score(current_round, site)},
                )
            )
        merged = flare.aggregate_model()
        weighing, state, told = ours[current_round]
        weights = merged.meta[FedCEConstants.CONTRIBUTION_WEIGHTS]
        assert weighing.sites == pytest.approx({site: weights[site] for site in sites}, abs=1e-5)
        assert weighing.buffers is None
        for name in TRAINED:
            torch.testing.assert_close(state[name], RECEIVED[name] + merged.params[name], atol=1e-4, rtol=0)
        if current_round:
            before = ours[current_round - 1][0].sites
            assert told == {"coefficient": {site: before[site] for site in sites if site in before}}
        else:
            assert told == {}


def test_all_scores_0_and_the_floor(tmp_path):
    def silent(rule: FedCE) -> list[float]:
        collector = Collector(rule, tmp_path)
        collector.begin(0, 9, shape=LikeReceived(RECEIVED), received=RECEIVED, sites="abc")
        for site in "abc":
            meta = {"version": __version__, "status": "ok", "report": {"minus_score": 0.0}, "num_steps": 1}
            moved = {name: torch.zeros_like(t) for name, t in RECEIVED.items()}
            collector.keep(
                collector.read_training(site, Message(moved, True, rows({"dice": 0.5}, "validation"), meta, 0))
            )
        return list(collector.aggregate()[1].sites.values())

    for rule in (FedCE(), FedCE(combine="multiply"), FedCE(preset="fedism")):
        assert silent(rule) == pytest.approx([1 / 3] * 3)


def test_preset_fedism_takes_the_mean_of_the_coefficients(tmp_path):
    plain = [w.sites for w, *_ in rounds(FedCE(combine="multiply", floor=0.0), tmp_path / "a", ["abc"])]
    found = [w.sites for w, *_ in rounds(FedCE(preset="fedism"), tmp_path / "b", ["abc", "abc", "abc"])]
    assert found[0] == pytest.approx(plain[0])
    rule = FedCE(preset="fedism")
    rounds(rule, tmp_path / "c", ["abc", "abc", "abc"])
    sums = rule.state_dict()["sums"]
    assert {site: total / count for site, (total, count) in sums.items()} == pytest.approx(found[2])
    assert all(count == 3 for _, count in sums.values())
    other = [w.sites for w, *_ in rounds(FedCE(preset="fedism", combine="sum"), tmp_path / "d", ["abc"])]
    assert other[0] != pytest.approx(found[0])


def test_coefficients_are_within_the_bound(tmp_path):
    rule = FedCE(combine="multiply")
    found = rounds(rule, tmp_path, ["abcd"] * 4, Bounds(max_weight=0.3))
    assert max(max(w.sites.values()) for w, *_ in found) == pytest.approx(0.3)
    assert rule.state_dict()["coefficients"] == found[-1][0].sites  # what is told is what was summed


def test_only_who_was_there_is_told(tmp_path):
    for stale_ok, expected in ((False, {"a", "c"}), (True, {"a", "b", "c"})):
        rule = FedCE(stale_ok=stale_ok)
        rounds(rule, tmp_path / str(stale_ok), ["abc", "ac"])
        assert set(rule.directives(2, 9, ["a", "b", "c", "d"])["coefficient"]) == expected


def test_a_site_hears_its_own_coefficient_only(tmp_path):
    heard: dict[str, list[Any]] = {}

    def said(site: str, name: str, task: Any) -> Any:
        reply = good(site, name, task)
        if name == "train":
            heard.setdefault(site, []).append(task.meta["directives"].get("coefficient"))
            reply.meta["report"] = {"minus_score": 0.1 * int(site[-1])}
        return reply

    run = Run(tmp_path, said, rule=FedCE(), num_rounds=2)()
    weights = run.results["rounds"][0]["site_weights"]
    assert heard == {site: [None, {site: pytest.approx(weights[site])}] for site in weights}


# ------------------------------------------------------------------------------------------------ sites


class AtSite:
    """Run one site over rounds; each round is another process."""

    def __init__(self, folder: Any, task: Any, **settings: Any) -> None:
        self.folder, self.task = folder, task
        self.training = MinusModel(batch_size=8, **settings)
        self.own: dict[int, dict[str, torch.Tensor]] = {}

    def __call__(self, current_round: int, state: Any, coefficient: float | None = None) -> float:
        told = {} if coefficient is None else {"coefficient": {"site-1": coefficient}}
        worker = at_site(self.folder, self.training, task=self.task)
        reply = worker.perform(request("train", state, current_round, directives=told, num_rounds=9))
        assert reply.status == "ok", reply.reason
        self.own[current_round] = {k: state[k] + u for k, u in reply.update.items()}
        self.update = reply.update
        return reply.report["minus_score"]

    def expected(self, state: Any, own: Any, coefficient: float, split: str, metric: str) -> float:
        """Return FLARE's helper's result, whose variance may fall below 0."""
        model = self.task.build_model()
        model.load_state_dict(state)
        minus = PTFedCEHelper.make_minus_model(model, own, coefficient)
        for name, tensor in minus.state_dict().items():
            if name.endswith("running_var"):
                tensor.clamp_(min=1e-5)
        data = self.task.open_site("site-1", {})
        return self.task.evaluate(minus, data.batches(split, batch_size=8), "cpu")[metric]


def classification() -> ClassificationTask:
    return ClassificationTask(**CLASSES)


CASES = [
    ("segmentation", {}, "validation", "dice"),
    ("classification", {}, "validation", "accuracy"),
    ("classification", {"preset": "fedism"}, "training", "balanced_accuracy"),
]


@pytest.mark.parametrize(("kind", "given", "split", "metric"), CASES)
def test_score_without_us_against_flares_helper(tmp_path, kind, given, split, metric):
    task = SegmentationTask(**SEGMENTATION) if kind == "segmentation" else classification()
    site, states = AtSite(tmp_path, task, **given), [initial(task, seed) for seed in range(3)]
    assert site(0, states[0], 0.3) == 1.0
    first = site.expected(states[1], site.own[0], 0.3, split, metric)
    assert site(1, states[1], 0.3) == pytest.approx(1 - first / 2, abs=1e-5)
    second = site.expected(states[2], site.own[1], 0.6, split, metric)
    found = site(2, states[2], 0.6)
    assert found == pytest.approx(1 - (first + second) / 3, abs=1e-5)
    assert site(2, states[2], 0.6) == found  # asked for again
    assert site(1, states[1], 0.3) == pytest.approx(1 - first / 2, abs=1e-5)  # the server went back


def test_the_minus_model_leaves_no_trace(tmp_path):
    task = classification()
    state = initial(task)
    site = AtSite(tmp_path / "a", task, augment=True)
    site(0, state)
    site(1, state, 0.4)
    plain = at_site(tmp_path / "b", LocalTraining(batch_size=8, augment=True), task=task)
    for current_round in (0, 1):
        reply = plain.perform(request("train", state, current_round, num_rounds=9))
    assert same(reply.update, site.update)


def test_rounds_in_which_nothing_can_be_measured(tmp_path):
    task = classification()
    states = [initial(task, seed) for seed in range(6)]
    site = AtSite(tmp_path / "a", task, preset="fedism")
    assert site(0, states[0]) == 1.0
    measured = site(1, states[1], 0.3)
    assert measured < 1
    assert site(2, states[2]) == measured  # told nothing
    assert site(3, states[3], 1.0) == measured  # nothing would be left
    assert site(5, states[5], 0.3) == measured  # was not there in round 4
    stale = AtSite(tmp_path / "b", task, stale_ok=True, include_round0=False)
    assert stale(0, states[0]) == 1.0
    expected = stale.expected(states[2], stale.own[0], 0.3, "validation", "accuracy")
    assert stale(2, states[2], 0.3) == pytest.approx(1 - expected, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, -0.1, 1.5])
def test_a_coefficient_that_is_none_is_not_used(tmp_path, bad):
    task = classification()
    site = AtSite(tmp_path, task)
    site(0, initial(task))
    assert site(1, initial(task), bad) == 1.0


def test_halves_agree_and_a_federation_runs(tmp_path):
    settings = {"preset": "fedism", "stale_ok": True}
    plan = make_plan("fed_ce", sites=3, settings={**settings, **SEGMENTATION, "local_epochs": 1}, num_rounds=3)
    assert isinstance(plan.rule, FedCE)
    assert isinstance(plan.training, MinusModel)
    assert (plan.rule.preset, plan.training.preset) == ("fedism", "fedism")
    assert plan.rule.stale_ok
    assert plan.training.stale_ok
    results = run_document(run_local(plan, tmp_path))
    assert results["status"] == "completed"
    scores = [{s: r["minus_score"] for s, r in record["reports"].items()} for record in results["rounds"]]
    assert set(scores[0].values()) == {1.0}
    assert all(0 <= v < 1 for v in scores[2].values())
    assert build(FedCE, {}).combine is None
