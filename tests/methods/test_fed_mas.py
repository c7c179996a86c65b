"""Test Fed-MAS: the site half on tiny phantoms, the server half with given reports, and both in one process."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch

from fairflare.core.priors import prior_distance
from fairflare.core.sharpness import GSAM
from fairflare.federation.collecting.collector import QuorumError
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import round_seed
from fairflare.federation.transports.local import run_local
from fairflare.methods.fed_mas import FedMAS, RescueTraining
from fairflare.methods.parts.prior_features import FeatureCache, SitePrior
from fairflare.tasks.base import SiteData, evaluating
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.networks import Classifier
from fairflare.tasks.priors import fingerprint, load_prior
from tests.tiny import run_document

from . import support
from .support import LONG_TAILED as TINY
from .support import at_site, collected, request

TASK = {**TINY, "projector_dim": 96}
QUICK = {"optimizer": "adam", "learning_rate": 1e-3, "batch_size": 16, "criterion": "balanced_softmax"}
TOLD = {"rescue_factor": True}


@pytest.fixture
def worker(tmp_path):
    def make(training=None, settings=None, *, site="site-1", folder="state", **task):
        return at_site(
            tmp_path / folder / site,
            training or RescueTraining(**QUICK),
            settings,
            task=ClassificationTask(**{**TASK, **task}),
            name=site,
        )

    return make


def initial(**task) -> dict[str, torch.Tensor]:
    return support.initial(ClassificationTask(**{**TASK, **task}), seed=3)


def train(worker, state=None, current_round=0, directives=TOLD):
    asked = request("train", state or initial(), current_round, num_rounds=4, directives=dict(directives))
    return worker.perform(asked)


def cache_of(worker) -> FeatureCache:
    return worker.training._priors._caches[worker.site]


def divergence(worker, current_round=0):
    return worker.state.store().load_at("divergence", current_round)


# ------------------------------------------------------------------------------------------------ site half


def naive_divergence(site_worker, model, batch_size=7):
    """Compute Eqs. 1-2 in loops, with the model as it is."""
    network = load_prior()
    data = site_worker._data
    distances: dict[int, list[float]] = {}
    with evaluating(model):
        for inputs, targets in data.batches("training", batch_size=batch_size):
            y, y_prior = model.project(model.embed(inputs)), network(inputs)
            for row in range(len(inputs)):
                cosine = torch.dot(y[row], y_prior[row]) / (y[row].norm() * y_prior[row].norm())
                distances.setdefault(int(targets[row]), []).append(2 - 2 * float(cosine))
    return {c: sum(found) / len(found) for c, found in distances.items()}


@pytest.mark.parametrize("augment", [True, False])
def test_divergence_of_the_received_model(worker, augment):
    """Check original images, whatever the training's augmentation does."""
    site = worker(RescueTraining(**QUICK, augment=augment))
    state = initial()
    reply = train(site, state)
    assert reply.status == "ok", reply.reason
    model = ClassificationTask(**TASK).build_model()
    model.load_state_dict(state)
    expected = naive_divergence(site, model)
    kept = divergence(site)
    assert set(expected) == set(kept["counts"].nonzero().flatten().tolist())
    for c, value in expected.items():
        assert kept["before"][c].item() == pytest.approx(value, abs=1e-6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])  # the pass of the reference left no trace either


@pytest.mark.parametrize(("epochs", "augment", "kept"), [(1, True, True), (3, True, False), (2, False, True)])
def test_rescue_factor_is_what_was_gathered(worker, epochs, augment, kept, monkeypatch):
    """Compute w^ by hand: the mean by class and epoch of distances before each step, summed over the epochs."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    gathered: list[torch.Tensor] = []
    batches: list[list[int]] = []
    original = SitePrior.distances

    def spy(self, run, model, features, inputs, **more):
        batches.append(run.batch)
        return original(self, run, model, features, inputs, **more)

    def distance(projected, target):
        found = prior_distance(projected, target)
        if projected.requires_grad:  # training, not the pass in front of it
            gathered.append(found.detach())
            seen.append((torch.tensor(batches[-1]), target.clone()))
        return found

    monkeypatch.setattr(SitePrior, "distances", spy)
    monkeypatch.setattr("fairflare.methods.parts.prior_features.prior_distance", distance)
    site = worker(RescueTraining(**QUICK, local_epochs=epochs, augment=augment, cache_features=kept))
    reply = train(site)
    kept = divergence(site)
    labels = torch.cat([t for _, t in site._data.batches("training", batch_size=64)])
    everything = torch.cat([n for n, _ in seen])
    assert len(everything) == epochs * len(labels)
    means = torch.zeros(epochs, 5, dtype=torch.float64)
    values = torch.cat(gathered)
    for epoch in range(epochs):
        part = slice(epoch * len(labels), (epoch + 1) * len(labels))
        assert sorted(everything[part].tolist()) == list(range(len(labels)))
        for c in range(5):
            mine = labels[everything[part]] == c
            means[epoch, c] = values[part][mine].double().mean()
    present = kept["counts"] > 0
    assert torch.allclose(kept["during"][present], means.sum(0)[present], atol=1e-6)
    expected = float((kept["before"] * means.sum(0))[present].sum())
    assert reply.report["rescue_factor"] == pytest.approx(expected, abs=1e-6)
    # The prior sees what the model sees: the batch's own images, shuffled, and changed anew in every epoch.
    network, plain = load_prior(), next(iter(site._data.batches("training", batch_size=1000)))[0]
    batches_of = [
        batch
        for epoch in range(epochs)
        for batch, _ in site._data.batches(
            "training", batch_size=16, shuffle_seed=round_seed(0, "site-1", 0) + epoch, augment=augment
        )
    ]
    changed = 0
    for (numbers, found), shown in zip(seen, batches_of, strict=True):
        found, wanted, still = (
            torch.nn.functional.normalize(y, dim=1) for y in (found, network(shown), network(plain[numbers]))
        )
        assert torch.allclose(found, wanted, atol=1e-6)
        changed += not torch.allclose(found, still, atol=1e-3)
    assert changed == (len(seen) if augment else 0)


def test_with_local_steps_it_is_the_mean_of_the_passes(worker):
    """Check as many steps as two epochs have: the same training, and half of the sum."""
    epochs = worker(RescueTraining(**QUICK, local_epochs=2), folder="epochs")
    reply = train(epochs)
    steps = worker(RescueTraining(**QUICK, local_steps=reply.num_steps), folder="steps")
    again = train(steps)
    present = divergence(epochs)["counts"] > 0
    summed, mean = (divergence(site)["during"][present] for site in (epochs, steps))
    assert float(summed.min()) > 0
    assert torch.allclose(mean, summed / 2, atol=1e-6)
    assert again.report["rescue_factor"] == pytest.approx(reply.report["rescue_factor"] / 2, abs=1e-6)


def test_prior_is_computed_once(worker):
    site = worker()
    train(site)
    cache = cache_of(site)
    assert cache.computed == site._data.num_samples("training")
    train(site, current_round=1)
    assert cache_of(site) is cache
    assert cache.computed == site._data.num_samples("training")
    # Another process: from the state folder.
    other = worker()
    train(other, current_round=2)
    assert cache_of(other).computed == 0
    assert torch.equal(cache_of(other).features, cache.features)
    # Other images, and another number of them: all computed again.
    changed = worker(phantom_seed=1, folder="state")
    reply = train(changed, current_round=3)
    assert reply.status == "ok", reply.reason
    assert cache_of(changed).computed == changed._data.num_samples("training")


class Exchanged(SiteData):
    """Hold the same data except one training image, of which another version is in the folder."""

    def __init__(self, data: SiteData, number: int) -> None:
        self.data, self.number = data, number

    def num_samples(self, split):
        return self.data.num_samples(split)

    def class_counts(self, split):
        return self.data.class_counts(split)

    def order(self, split, shuffle_seed=None):
        return self.data.order(split, shuffle_seed)

    def batches(self, split, *, batch_size, shuffle_seed=None, augment=False) -> Iterator:
        order = iter(self.order(split, shuffle_seed))
        asked = {"batch_size": batch_size, "shuffle_seed": shuffle_seed, "augment": augment}
        for inputs, targets in self.data.batches(split, **asked):
            inputs = inputs.clone()
            for image in inputs:
                if next(order) == self.number and split == "training":
                    image.copy_(1 - image)
            yield inputs, targets


@pytest.mark.parametrize("same_process", [True, False])
def test_the_features_of_an_exchanged_image_are_computed_again(worker, same_process):
    """Check as many images as before, so that only the checksums differ."""
    here = worker()
    train(here)
    before = cache_of(here).features.clone()
    there = here if same_process else worker()
    data = ClassificationTask(**TASK).open_site("site-1", {})
    there._data = Exchanged(data, 7)
    known = cache_of(there).computed if same_process else 0
    reply = train(there, current_round=1)
    assert reply.status == "ok", reply.reason
    assert cache_of(there).computed == known + 1
    (images,) = [x for x, _ in Exchanged(data, 7).batches("training", batch_size=1000)]
    wanted = torch.nn.functional.normalize(load_prior()(images), dim=1)
    assert torch.allclose(cache_of(there).features, wanted, atol=1e-6)
    changed = (cache_of(there).features != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [7]
    kept = there.state.store().load_at("prior_features", 1)
    assert torch.equal(kept["features"], cache_of(there).features)


class Sharp(RescueTraining):
    """Define Fed-MAS's training with sharpness-aware steps, which look at every batch twice."""

    def step(self, run, model, optimizer, closure):
        return GSAM(optimizer, rho=2.0, model=model).step(closure)


def test_a_step_that_looks_twice_counts_once(worker):
    """Check that w^ is of the forward pass before the step; at this distance the second pass is far from it."""
    still = {**QUICK, "optimizer": "sgd", "momentum": 0.0, "learning_rate": 1e-12, "local_epochs": 2}
    found = {}
    for name, training in (("once", RescueTraining(**still)), ("twice", Sharp(**still))):
        here = worker(training, folder=name)
        reply = train(here)
        assert reply.status == "ok", reply.reason
        found[name] = (divergence(here)["during"], reply.report["rescue_factor"])
    present = ~found["once"][0].isnan()
    assert torch.allclose(found["twice"][0][present], found["once"][0][present], rtol=1e-5)
    assert found["twice"][1] == pytest.approx(found["once"][1], rel=1e-5)


def test_with_and_without_cache_agree_without_augmentation(worker):
    kept = train(worker(folder="a"))
    fresh = train(worker(RescueTraining(**QUICK, cache_features=False), folder="b"))
    assert kept.report["rescue_factor"] == pytest.approx(fresh.report["rescue_factor"], abs=1e-4)
    for name, tensor in kept.update.items():
        assert torch.allclose(tensor, fresh.update[name], atol=1e-4), name


def test_prior_is_neither_trained_nor_sent(worker):
    site = worker()
    reply = train(site)
    (network,) = site.training._priors._networks.values()
    assert all(p.grad is None for p in network.parameters())
    assert network.fingerprint == load_prior().fingerprint
    assert fingerprint(network.encoder.state_dict(), "embedded/None") == network.fingerprint
    assert set(reply.update) == set(initial())
    assert set(reply.report) == {"rescue_factor", "prior"}  # nothing by class


@pytest.mark.parametrize("source", ["prior", "supervised"])
def test_without_the_loss_but_with_mas(worker, source):
    site = worker(RescueTraining(**QUICK, lambda_f=0.0, rf_source=source))
    reply = train(site)
    assert reply.status == "ok", reply.reason
    assert reply.report["rescue_factor"] > 0
    assert ("prior" in reply.report) == (source == "prior")
    weights = {n: t for n, t in reply.update.items() if n.startswith("projector") and "running" not in n}
    moved = {n for n, t in weights.items() if bool((t != 0).any())}
    assert moved <= {"projector.1.num_batches_tracked"}


def test_class_absent_and_class_of_one(worker):
    """Check sites of a long-tailed Dirichlet federation, which have both."""
    kinds = set()
    learns = {"phantom": "endoscopy", "phantom_sites": 4, "phantom_samples": 160, "phantom_test": 184}
    for number in (1, 2, 3, 4):
        site = worker(site=f"site-{number}", **learns)
        reply = train(site, initial(**learns))
        assert reply.status == "ok", reply.reason
        kept = divergence(site)
        kinds |= set(kept["counts"].clamp(0, 2).tolist())
        assert torch.equal(kept["before"].isnan(), kept["counts"] == 0)
        assert math.isfinite(reply.report["rescue_factor"])
    assert kinds == {0, 1, 2}


@pytest.mark.parametrize(
    ("training", "settings", "task", "message"),
    [
        (
            {"prior_network": "resnet50"},
            {},
            {},
            "prior_network 'resnet50' needs a checkpoint: name the file with 'prior'",
        ),
        (
            {"prior": "/secret/name.pt"},
            {"linked_roots": ["/secret"]},
            {},
            "its checkpoint of the prior network 'embedded' cannot be used",
        ),
        (
            {"prior": "/secret/name.pt"},
            {"linked_roots": "/secret"},
            {},
            "key 'linked_roots' in the site file is not usable",
        ),
        ({}, {"prior": 3}, {}, "key 'prior' in the site file is not usable"),
        ({}, {}, {"projector_dim": 64}, r"'embedded' has 96 features, the projection head 64; set projector_dim=96"),
        ({}, {}, {"projector_dim": None}, r"needs a projection head.*set projector_dim=96"),
    ],
)
def test_bad_settings_are_replies(worker, training, settings, task, message, caplog):
    reply = train(worker(RescueTraining(**QUICK, **training), settings, **task), initial(**task))
    assert reply.status == "failed"
    assert "site 'site-1'" in reply.reason
    assert re.search(message, reply.reason)
    assert "/secret" not in reply.reason  # but in the site's own log
    if settings.get("linked_roots") == ["/secret"]:
        assert "/secret/name.pt does not exist" in caplog.text


# ------------------------------------------------------------------------------------------------ server half

STATE = {"w": torch.zeros(2)}


def feed(rule, folder, reports, samples=None):
    updates = {site: {"w": torch.full((2,), float(number))} for number, site in enumerate(reports)}
    return collected(rule, folder, reports, samples=samples, updates=updates, received=STATE, current_round=3)


def rf(value, prior="abc"):
    return {"rescue_factor": value, "prior": prior}


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((2.8, 1.2), (0.7, 0.3)),
        ((0.0, 0.0), (0.5, 0.5)),
        ((math.nan, 2.0, 4.0), (1 / 3, 2 / 9, 4 / 9)),
        ((math.inf, 2.0, 4.0), (1 / 3, 2 / 9, 4 / 9)),
        ((math.nan, math.nan), (0.5, 0.5)),
        ((0.25,), (1.0,)),
    ],
)
def test_weights(tmp_path, factors, expected):
    sites = "abc"[: len(factors)]
    reports = {site: rf(value) for site, value in zip(sites, factors, strict=True)}
    collector = feed(FedMAS(), tmp_path, reports)
    assert collector.rejected == {}
    state, weighing = collector.aggregate()
    assert weighing.sites == pytest.approx(dict(zip(sites, expected, strict=True)))
    assert state["w"][0].item() == pytest.approx(sum(i * a for i, a in enumerate(expected)))
    assert set(weighing.reports) == set(sites)  # recorded


def test_without_mas_samples_count(tmp_path):
    rule = FedMAS(mas=False)
    assert rule.directives(0, 1, ["a"]) == {}
    assert FedMAS().directives(0, 1, ["a"]) == {"rescue_factor": True}
    collector = feed(rule, tmp_path, {"a": {"prior": "abc"}, "b": {"prior": "abc"}}, {"a": 3, "b": 1})
    assert collector.aggregate()[1].sites == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize("mas", [True, False])
@pytest.mark.parametrize(("odd", "named"), [("xyz", "xyz"), (None, "none")])
def test_another_prior_than_most_sites_hold_costs_the_site_its_round(tmp_path, mas, odd, named):
    collector = feed(FedMAS(mas=mas), tmp_path, {"a": rf(1.0), "b": rf(7.0, odd), "c": rf(2.0)})
    assert collector.screen() == collector.rejected
    assert re.search(f"site 'b': field 'prior' is '{named}', at most sites 'abc'", collector.rejected["b"])
    assert collector.accepted == ["a", "c"]
    weights = collector.aggregate()[1].sites
    assert weights == pytest.approx({"a": 1 / 3, "c": 2 / 3} if mas else {"a": 0.5, "c": 0.5})


def test_priors_that_nobody_shares_leave_nobody(tmp_path):
    collector = feed(FedMAS(), tmp_path, {"a": rf(1.0, "x"), "b": rf(1.0, "y"), "c": rf(2.0, "x"), "d": rf(2.0, "y")})
    assert sorted(collector.screen()) == ["a", "b", "c", "d"]
    assert collector.accepted == []
    with pytest.raises(QuorumError, match="'d': field 'prior' is 'y', and no value"):
        collector.require(1)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"prior": "abc"}, "lacks the field 'rescue_factor'"),
        (rf(-0.5), r"'rescue_factor' must lie in \[0"),
        (rf(1e12), r"'rescue_factor' must lie in \[0"),
        (rf("2"), "'rescue_factor' must be a number"),
        (rf(1.0, 17), "'prior' must be a text"),
        (rf(1.0, "x" * 1000), "'prior' must be a text"),
    ],
)
def test_bad_reports_are_left_out(tmp_path, report, message):
    collector = feed(FedMAS(), tmp_path, {"a": rf(1.0), "b": report})
    assert collector.accepted == ["a"]
    assert re.search(message, collector.rejected["b"])


# ------------------------------------------------------------------------------------------------ both halves


def run(tmp_path, method, local=None, sites=2, *, strict=True, **settings):
    settings = {**TINY, "local_epochs": 1, **settings}
    plan = make_plan(method, num_rounds=2, sites=sites, min_sites=2, require_all_sites=strict, settings=settings)
    folder = run_local(plan, tmp_path, local)
    return run_document(folder)


def test_federation(tmp_path):
    results = run(tmp_path, "fed_mas")
    assert results["status"] == "completed"
    for record in results["rounds"]:
        factors = {site: report["rescue_factor"] for site, report in record["reports"].items()}
        total = sum(factors.values())
        assert record["site_weights"] == pytest.approx({s: f / total for s, f in factors.items()})
    again = run(tmp_path / "again", "fed_mas")
    assert [r["reports"] for r in again["rounds"]] == [r["reports"] for r in results["rounds"]]


def test_paper_settings_and_the_projector_of_the_paper():
    plan = make_plan("fed_mas", small=False, settings={"projector_dim": 2048, "prior_network": "resnet50"})
    training = plan.training
    assert (training.lambda_f, training.local_epochs, training.learning_rate) == (3.0, 10, 0.1)
    assert (training.optimizer, training.schedule, training.criterion) == ("sgd", "cosine", "balanced_softmax")
    assert plan.task.projector_dim == 2048
    assert plan.task.phantom == "endoscopy"
    model = Classifier(torch.nn.Identity(), 512, 23, projector_dim=2048)
    assert sum(p.numel() for p in model.projector.parameters()) == 1_314_304
