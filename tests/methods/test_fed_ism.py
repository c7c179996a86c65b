"""Test FedISM and FedISM+: both halves against the spec's numbers, alone and in a federation in one process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import round_seed
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_ism import FedISM, SharpnessAwareTraining, distance
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import run_document

from .support import CLASSES as TASK
from .support import at_site, collected, initial, inputs, request

TINY = {**TASK, "local_epochs": 1}


def weights(rule: FedISM, values: list[float], field: str = "sharpness", current_round: int = 0) -> list[float]:
    reports = {f"s{i}": {"sharpness": 0.0, "perturbed_loss": 0.0, field: v} for i, v in enumerate(values)}
    found = rule.weigh(inputs(reports, current_round=current_round)).sites
    return [found[site] for site in sorted(found)]


# ------------------------------------------------------------------------------------------------ server half


def test_worked_examples_of_the_spec():
    rule = FedISM()
    assert weights(rule, [0.02, 0.04, 0.08]) == pytest.approx([0.047619, 0.190476, 0.761905], abs=1e-6)
    assert weights(rule, [0.04, 0.04, 0.04]) == pytest.approx([0.190476, 0.261905, 0.547619], abs=1e-6)
    assert weights(FedISM(q=0.0), [0.02, 0.04, 0.08]) == pytest.approx([1 / 3] * 3, abs=1e-12)
    assert weights(FedISM(q=1.0), [0.02, 0.04, 0.08]) == pytest.approx([0.142857, 0.285714, 0.571429], abs=1e-6)
    assert weights(FedISM(variant="L"), [0.5, 0.6, 1.0], "perturbed_loss") == pytest.approx(
        [0.155280, 0.223602, 0.621118], abs=1e-6
    )
    assert weights(FedISM(), [-0.01, 0.02, 0.02]) == pytest.approx([0, 0.5, 0.5], abs=1e-6)
    assert weights(FedISM(), [0.0, -1.0, 0.0]) == pytest.approx([1 / 3] * 3)


def test_an_absent_site_keeps_its_average():
    rule = FedISM()
    rule.load_state_dict({"average": {"a": 0.2, "b": 0.3, "c": 0.5}})
    ratio = math.sqrt(1.5)  # q = 2: weights 0.4 and 0.6
    found = rule.weigh(
        inputs({"a": {"sharpness": 1.0, "perturbed_loss": 1.0}, "b": {"sharpness": ratio, "perturbed_loss": 1.0}})
    )
    assert found.sites == pytest.approx({"a": 0.4, "b": 0.6})
    assert rule.state_dict()["average"] == pytest.approx({"a": 0.3, "b": 0.45, "c": 0.5})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sharpness_that_is_no_number_counts_as_the_median(tmp_path, bad):
    values = {"a": 0.02, "b": 0.04, "c": bad}
    reports = {site: {"sharpness": value, "perturbed_loss": 1.0} for site, value in values.items()}
    collector = collected(FedISM(), tmp_path, reports)
    assert collector.rejected == {}
    squares = np.array([0.02, 0.04, 0.03]) ** 2
    assert list(collector.aggregate()[1].sites.values()) == pytest.approx(list(squares / squares.sum()))


@pytest.mark.parametrize(
    ("variant", "report", "message"),
    [
        ("S", {"sharpness": "much", "perturbed_loss": 1.0}, "site 'c': field 'sharpness' must be a number, got 'much'"),
        ("S", {"perturbed_loss": 1.0}, "site 'c': the report lacks the field 'sharpness'"),
        ("L", {"sharpness": 1.0}, "site 'c': the report lacks the field 'perturbed_loss'"),
        ("L", {"sharpness": 1.0, "perturbed_loss": -1.0}, "site 'c': field 'perturbed_loss' must lie in [0, 1e+06]"),
    ],
)
def test_a_bad_report_leaves_the_site_out(tmp_path, variant, report, message):
    good = {"sharpness": 0.1, "perturbed_loss": 1.0}
    collector = collected(FedISM(variant=variant), tmp_path, {"a": good, "b": good, "c": report})
    assert collector.accepted == ["a", "b"]
    assert message in collector.rejected["c"]


def test_distance_that_the_sites_are_told():
    assert FedISM(rho=0.05).directives(7, 10, ["a"]) == {"search_distance": 0.05, "variant": "S"}
    assert FedISM(variant="L").directives(7, 10, ["a"])["variant"] == "L"
    growing = FedISM(rho=0.1, tau=0.5)
    assert growing.directives(74, 300, ["a"])["search_distance"] == pytest.approx(0.05)
    assert growing.directives(299, 300, ["a"])["search_distance"] == pytest.approx(0.1)
    assert FedISM(saga=False).directives(0, 10, ["a"]) == {}


def test_both_halves_mean_the_same_distance(tmp_path, start):
    """Check a site's own rho and tau where it is told none: the spec's value of the round, sqrt((r + 1) / R) rho."""
    assert [distance(r, 4, 0.2, 0.5) for r in range(4)] == pytest.approx([0.1, 0.2 * 0.5**0.5, 0.2 * 0.75**0.5, 0.2])
    assert distance(9, 4, 0.2, 0.5) == 0.2  # the last test is after the last round
    assert [distance(r, 4, 0.2, None) for r in range(4)] == [0.2] * 4
    settings = {"keep_optimizer_state": False}
    grown = train(SharpnessAwareTraining(**settings, rho=0.2, tau=0.5), tmp_path / "a", state=start)[2].update
    fixed = train(SharpnessAwareTraining(**settings, rho=0.1), tmp_path / "b", state=start)[2].update
    assert all(torch.equal(grown[k], fixed[k]) for k in grown)


def test_without_saga_weights_by_samples_and_no_report(tmp_path):
    collector = collected(FedISM(saga=False), tmp_path, {"a": {}, "b": {}}, samples={"a": 1, "b": 3})
    assert collector.aggregate()[1].sites == {"a": 0.25, "b": 0.75}


# ------------------------------------------------------------------------------------------------ site half


def train(training: LocalTraining, folder, directives=None, state=None):
    """Train one round at site-3, which is corrupted."""
    task = ClassificationTask(**TASK)
    worker = at_site(folder, training, task=task, name="site-3")
    asked = request("train", state or initial(task), num_rounds=4, directives=directives or {})
    return task, worker, worker.perform(asked), asked.state


@pytest.fixture(scope="module")
def start():
    return initial(ClassificationTask(**TASK))


@pytest.mark.parametrize(("variant", "field"), [("S", "sharpness"), ("L", "perturbed_loss")])
def test_report_is_the_sharpness_of_the_received_model(tmp_path, start, variant, field):
    """Check that the report has the variant's own figure only, as another would reveal the training loss.

    Against a computation of its own: one float64 batch of the whole training set as it is, in evaluation mode.
    """
    training = SharpnessAwareTraining(batch_size=7, criterion="logit_adjusted", augment=True, learning_rate=0.01)
    task, _, reply, _ = train(training, tmp_path, {"search_distance": 0.07, "variant": variant}, start)
    assert reply.status == "ok", reply.reason
    model = task.build_model().double()
    model.load_state_dict(start)
    model.eval()
    data = task.open_site("site-3", {})
    ((images, labels),) = data.batches("training", batch_size=10**6)
    loss = torch.nn.functional.cross_entropy(model(images.double()), labels)
    loss.backward()
    moved = [p for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in moved))
    with torch.no_grad():
        for p in moved:
            p += 0.07 * p.grad / norm
        perturbed = torch.nn.functional.cross_entropy(model(images.double()), labels)
    # A difference of two float32 losses, as exact as they are.
    expected = float((perturbed - loss).detach() if variant == "S" else perturbed)
    assert reply.report == {field: pytest.approx(expected, abs=1e-5 * float(perturbed))}


def test_probe_with_the_adjusted_loss_differs(tmp_path, start):
    reports = []
    for probe in ("ce", "la"):
        training = SharpnessAwareTraining(criterion="logit_adjusted", probe_loss=probe)
        reports.append(train(training, tmp_path / probe, {"search_distance": 0.05}, start)[2].report)
    assert reports[0]["sharpness"] != pytest.approx(reports[1]["sharpness"], rel=1e-3)


def test_no_distance_is_plain_training(tmp_path, start):
    """Check rho = 0, or no SALT: the update of the plain rule, bit by bit."""
    settings = {"criterion": "logit_adjusted", "keep_optimizer_state": False}
    plain = train(LocalTraining(**settings), tmp_path / "plain", state=start)[2].update
    for name, own in (("zero", {"rho": 0.0}), ("off", {"salt": False})):
        reply = train(SharpnessAwareTraining(**settings, **own), tmp_path / name, state=start)[2]
        assert all(torch.equal(plain[k], reply.update[k]) for k in plain), name
        assert reply.report == {}  # told no distance
    flat = train(SharpnessAwareTraining(**settings, rho=0.05), tmp_path / "flat", state=start)[2].update
    assert any(not torch.equal(plain[k], flat[k]) for k in plain)


def test_the_servers_distance_goes_first(tmp_path, start):
    settings = {"keep_optimizer_state": False}
    own = train(SharpnessAwareTraining(**settings, rho=0.2), tmp_path / "a", state=start)[2].update
    half = SharpnessAwareTraining(**settings, rho=0.9)
    told = train(half, tmp_path / "b", {"search_distance": 0.2}, state=start)[2].update
    assert all(torch.equal(own[k], told[k]) for k in own)


def test_clipping_bounds_both_gradients(tmp_path, start):
    settings = {"keep_optimizer_state": False, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    free = train(SharpnessAwareTraining(**settings), tmp_path / "a", state=start)[2].update
    clipped = train(SharpnessAwareTraining(**settings, max_grad_norm=1e-6), tmp_path / "b", state=start)[2].update
    size = {name: float(update["head.weight"].norm()) for name, update in (("free", free), ("clipped", clipped))}
    assert size["clipped"] < 1e-3 * size["free"]


def test_a_distance_that_blows_up_is_named(tmp_path, start):
    reply = train(SharpnessAwareTraining(rho=1e30), tmp_path, state=start)[2]
    assert reply.status == "failed"
    assert "not finite at the search distance 1e+30" in reply.reason
    assert "lower rho" in reply.reason


def test_the_probe_leaves_no_trace(tmp_path, start):
    """Check that random numbers, weights, statistics, modes and gradients do not change."""
    seen = {}

    class Watched(SharpnessAwareTraining):
        def begin_round(self, run, model):
            norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
            norms[0].eval()  # somebody froze a layer
            modes = [m.training for m in model.modules()]
            before = torch.get_rng_state()
            super().begin_round(run, model)
            assert run.own.report["sharpness"] > 0
            seen["random"] = torch.equal(torch.get_rng_state(), before)
            seen["modes"] = modes == [m.training for m in model.modules()]
            seen["gradients"] = all(p.grad is None or not p.grad.any() for p in model.parameters())
            seen["state"] = all(torch.equal(t, start[n]) for n, t in model.state_dict().items())

    reply = train(Watched(augment=True), tmp_path, {"search_distance": 0.05}, start)[2]
    assert reply.status == "ok", reply.reason
    assert seen == dict.fromkeys(("random", "modes", "gradients", "state"), True)


@pytest.mark.parametrize("directives", [{}, {"search_distance": 0.3}], ids=["own", "told"])
def test_batch_norm_sees_only_the_first_pass_of_a_step(tmp_path, start, directives):
    """Check one step over all images: running statistics are those of one pass of the received model."""
    training = SharpnessAwareTraining(batch_size=1000, rho=0.3, keep_optimizer_state=False)
    task, worker, reply, _ = train(training, tmp_path, directives, start)
    assert reply.num_steps == 1
    model = task.build_model()
    model.load_state_dict(start)
    seed = round_seed(0, "site-3", 0)
    ((images, _),) = task.open_site("site-3", {}).batches("training", batch_size=1000, shuffle_seed=seed)
    with torch.no_grad():
        model.train()(images)
    local = worker.state.store().load_at("local_model", 0)
    compared = 0
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert int(local[name]) == 1, name
        elif "running" in name:
            torch.testing.assert_close(local[name], tensor, rtol=1e-6, atol=1e-7, msg=name)
            assert not torch.allclose(tensor, start[name])
            compared += 1
    assert compared > 10


def test_counters_count_steps(tmp_path, start):
    """Check several steps too: the plain rule has the same counters."""
    for name, salt in (("salt", True), ("plain", False)):
        reply = train(SharpnessAwareTraining(batch_size=8, local_epochs=2, salt=salt), tmp_path / name, state=start)[2]
        counters = [int(t) for n, t in reply.update.items() if n.endswith("num_batches_tracked")]
        assert counters == [reply.num_steps] * len(counters)
        assert reply.num_steps > 4


def test_criterion_needs_classes(tmp_path):
    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 4, 8, 8, 4), phantom_cases=0.1)
    state = initial(task)
    replies = {}
    for criterion in ("task", "logit_adjusted"):
        worker = at_site(tmp_path / criterion, SharpnessAwareTraining(criterion=criterion), task=task)
        replies[criterion] = worker.perform(request("train", state, directives={"search_distance": 0.01}))
    assert "criterion 'logit_adjusted' needs classes" in replies["logit_adjusted"].reason
    assert replies["task"].status == "ok"  # FedISM on segmentation
    assert replies["task"].report["sharpness"] > 0


# ------------------------------------------------------------------------------------------------ together


def federation(tmp_path, name: str, method: str = "fed_ism_plus_s", local=None, **arguments):
    settings = {**TINY, **arguments.pop("settings", {})}
    plan = make_plan(method, sites=3, settings=settings, **arguments)
    folder = run_local(plan, tmp_path / name, local)
    return run_document(folder), folder


def test_recorded_weights_recomputed(tmp_path):
    results, _ = federation(tmp_path, "run", num_rounds=3, settings={"phantom_samples": 60})
    assert results["status"] == "completed"
    average: dict[str, float] = {}
    for record in results["rounds"]:
        x = {site: max(report["sharpness"], 1e-10) ** 2 for site, report in record["reports"].items()}
        assert len(x) == 3
        for site, value in x.items():
            fresh = value / sum(x.values())
            average[site] = 0.5 * fresh + 0.5 * average[site] if site in average else fresh
        total = sum(average.values())
        assert record["site_weights"] == pytest.approx({s: w / total for s, w in average.items()}, abs=1e-6)
        expected = 0.1 * math.sqrt((record["current_round"] + 1) / 3)
        assert record["values"]["search_distance"] == pytest.approx(expected)


@pytest.mark.many
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fed_ism", {"saga": False}),
        ("fed_ism_plus_l", {"salt": False}),
    ],
)
def test_rows_of_the_papers_table_without_a_part(tmp_path, method, settings):
    results, _ = federation(
        tmp_path, "run", method, num_rounds=1, settings={**settings, "phantom_samples": 90}, task="classification"
    )
    assert results["status"] == "completed"
    figure = "perturbed_loss" if method == "fed_ism_plus_l" else "sharpness"
    reported = all(site[figure] != 0 for site in results["rounds"][0]["reports"].values())
    assert bool(results["rounds"][0]["reports"]) == settings.get("saga", True)
    assert reported
