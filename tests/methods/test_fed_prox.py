"""Test FedProx: its objective against finite differences, at a site, and as FedAvg where mu is 0."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.methods.base.catalog import get_method
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_prox import ProximalTraining

from .mrl import PLAIN, Regression, differences, federation, model_of, norm, same, start, train


@pytest.mark.parametrize("mu", [0.0, 0.2, 3.0])
def test_gradient_of_the_objective_against_finite_differences(mu):
    problem = Regression()
    received, here = problem.point(), problem.point()

    def objective(w):
        return problem.loss(w) + mu / 2 * float(np.sum((w - received) ** 2))

    value, found = problem.gradient(ProximalTraining(mu=mu), {}, received, here)
    assert value == pytest.approx(objective(here), rel=1e-12)
    np.testing.assert_allclose(found, differences(objective, here), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("told", "used"), [(0.4, 0.4), (0.0, 0.0), (math.nan, 1e-5), (math.inf, 1e-5), (-0.1, 1e-5)])
def test_mu_that_a_site_is_told(told, used):
    training = ProximalTraining(mu=0.7)
    for site, expected in (("a", used), ("b", 0.7)):
        run: Any = SimpleNamespace(directives={"mu": {"a": told}}, site=site)
        training.begin_round(run, torch.nn.Linear(1, 1))
        assert run.own.mu == expected
    assert training.mu == 0.7


def test_the_term_pulls_and_without_mu_it_is_plain_training(tmp_path):
    settings, state = {**PLAIN, "batch_size": 8, "local_epochs": 2}, start()
    plain = train(LocalTraining(**settings), tmp_path / "plain", state)[1]
    sizes = []
    for mu in (0.0, 5.0, 50.0):
        reply = train(ProximalTraining(mu=mu, **settings), tmp_path / str(mu), state)[1]
        sizes.append(norm(reply.update))
        if mu == 0:
            assert same(plain.update, reply.update)
            assert reply.stats["epoch_losses"] == plain.stats["epoch_losses"]
    assert sizes[0] > 1.1 * sizes[1] > 1.1 * 1.1 * sizes[2], sizes


def test_the_method():
    made = make_plan("fed_prox", settings={"mu": 0.4, "learning_rate": 0.01})
    assert type(made.rule) is FedAvg
    assert made.rule.weighting == "samples"
    assert type(made.training) is ProximalTraining
    assert (made.training.mu, made.training.learning_rate, made.training.optimizer) == (0.4, 0.01, "adam")
    assert make_plan("fed_prox").training.mu == 0.1  # type: ignore[attr-defined]


@pytest.mark.long
def test_without_mu_a_run_is_fed_avg_bit_for_bit(tmp_path):
    local = {**get_method("fed_prox").site, "batch_size": 16}
    states, results = {}, {}
    for name, method, settings in (
        ("fed_avg", "fed_avg", {}), ("off", "fed_prox", {"mu": 0.0}), ("on", "fed_prox", {"mu": 0.1}),
    ):  # fmt: skip
        results[name], found = federation(tmp_path / name, method=method, settings={**local, **settings})
        states[name] = model_of(found)
    assert same(states["off"], states["fed_avg"])
    assert results["off"]["test"] == results["fed_avg"]["test"]
    assert [r["site_weights"] for r in results["off"]["rounds"]] == [
        r["site_weights"] for r in results["fed_avg"]["rounds"]
    ]
    assert not same(states["on"], states["fed_avg"])
