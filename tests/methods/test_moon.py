"""Test MOON: its objective line by line, its first round, mu = 0, and state that stays at the site."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.methods.base.home import LOCAL_MODEL
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.moon import ContrastiveTraining
from fairflare.tasks.classification import ClassificationTask

from . import support
from .support import LONG_TAILED as TASK
from .support import QUICK, at_site, request, same


@pytest.fixture
def worker(tmp_path):
    def make(training=None, folder="state", **task):
        task = ClassificationTask(**{**TASK, "neck_dim": 12, **task})
        return at_site(tmp_path / folder, training or ContrastiveTraining(**QUICK), task=task)

    return make


def initial(**task) -> dict[str, torch.Tensor]:
    return support.initial(ClassificationTask(**{**TASK, "neck_dim": 12, **task}), seed=3)


def train(worker, current_round, state=None):
    reply = worker.perform(request("train", state or initial(), current_round))
    assert reply.status == "ok", reply.reason
    return reply


def run_of(kept: Any = None) -> Any:
    task = SimpleNamespace(loss=lambda outputs, targets: outputs.sum() * 0)
    store = SimpleNamespace(load_before=lambda name, r: kept)
    return SimpleNamespace(site="a", task=task, store=store, current_round=1, own=None, sent=None)


def test_both_other_models_are_in_evaluation_mode_and_constant(worker):
    seen = []

    class Watched(ContrastiveTraining):
        def loss(self, run, model, inputs, targets):
            before = [copy.deepcopy(other.state_dict()) for other in run.own]
            value = super().loss(run, model, inputs, targets)
            for other, state in zip(run.own, before, strict=True):
                assert not any(m.training for m in other.modules())
                assert not any(p.requires_grad for p in other.parameters())
                assert same(other.state_dict(), state)
            assert model.training
            # Eq. 3 in loops, in float64
            with torch.no_grad():
                trained, fixed = copy.deepcopy(model), run.own
                z = trained.embed(inputs).double()
                others = [m.embed(inputs).double() for m in fixed]
                own = run.task.loss(trained.head(z.float()), targets)
            terms = []
            for row in range(len(inputs)):
                a, b = (
                    math.exp(float(torch.dot(z[row], o[row]) / (z[row].norm() * o[row].norm())) / self.temperature)
                    for o in others
                )
                terms.append(-math.log(a / (a + b)))
            assert float(value.detach()) == pytest.approx(float(own) + self.mu * sum(terms) / len(terms), abs=1e-4)
            seen.append(terms)
            return value

    here = worker(ContrastiveTraining(**QUICK))
    first = train(here, 0)
    moved = {name: initial()[name] + first.update[name] for name in first.update}
    train(worker(Watched(**QUICK)), 1, moved)
    assert seen


def test_the_first_round_adds_log_2_and_changes_nothing(worker):
    moon = train(worker(ContrastiveTraining(mu=3.0, **QUICK)), 0)
    plain = train(worker(LocalTraining(**QUICK), "plain"), 0)
    assert same(moon.update, plain.update)
    for with_term, without in zip(moon.stats["epoch_losses"], plain.stats["epoch_losses"], strict=True):
        assert with_term == pytest.approx(without + 3 * math.log(2), abs=1e-5)


def test_without_mu_it_is_fed_avg_to_the_bit(worker):
    for current_round in (0, 1):
        moon = train(worker(ContrastiveTraining(mu=0.0, **QUICK), "moon"), current_round)
        plain = train(worker(LocalTraining(**QUICK), "plain"), current_round)
        assert same(moon.update, plain.update)
        assert moon.stats["epoch_losses"] == plain.stats["epoch_losses"]
    with_mu = worker(ContrastiveTraining(mu=1.0, **QUICK), "with")
    train(with_mu, 0)
    assert not same(train(with_mu, 1).update, plain.update)


@pytest.mark.long
def test_a_repeated_round_starts_from_the_same_previous_model(worker, tmp_path):
    """Check a new process for each task; then the server asks for rounds 2 and 1 again: a restart, and a step back."""
    state = initial()
    replies = {}
    for current_round in (0, 1, 2):
        replies[current_round] = train(worker(), current_round, state)
    for current_round in (2, 1, 2):
        assert same(train(worker(), current_round, state).update, replies[current_round].update)
    store = worker().state.store()
    assert len(list(store.folder.glob(f"{LOCAL_MODEL}.*.pt"))) == 3
    worker(LocalTraining(**QUICK), "plain").perform(request("train", state, 0))
    other = worker(LocalTraining(**QUICK), "plain")
    train(other, 1, state)
    assert len(list(other.state.store().folder.glob(f"{LOCAL_MODEL}.*.pt"))) == 1


def test_with_and_without_projection_head(worker):
    assert any(name.startswith("neck.") for name in initial())
    assert train(worker(neck_dim=None), 0, initial(neck_dim=None)).update.keys() == initial(neck_dim=None).keys()
    model = ClassificationTask(**TASK, neck_dim=12).build_model()
    assert model.embed(torch.rand(2, 3, 32, 32)).shape == (2, 12)
    assert model.head.weight.shape == (5, 12)


def test_refusals(worker):
    with pytest.raises(ValueError, match="cannot learn segmentation: MOON needs"):
        make_plan("moon", task="segmentation")
    with pytest.raises(ValueError, match="temperature must be a number > 0, got 0"):
        ContrastiveTraining(temperature=0.0)
    with pytest.raises(SiteError, match=r"site 'a': MOON needs .*head\(features\)"):
        ContrastiveTraining().check(run_of(), torch.nn.Linear(1, 1))
    with pytest.raises(SiteError, match="site 'a': MOON needs"):
        ContrastiveTraining().begin_round(run_of(), torch.nn.Linear(1, 1))
