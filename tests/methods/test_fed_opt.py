"""Test FedAvgM and FedOpt: worked numbers, loops, a run that is killed, medians, stock controllers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.exchange.messages import Message
from fairflare.federation.server.rounds import Stopped
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import Rule
from fairflare.methods.fed_opt import FedAvgM, FedOpt
from tests.federation.network import SITES, Run, good, number


def made(**settings: Any) -> Rule:
    return all_methods()["fed_avg_m"].rule(**settings)


def update(site: str, current_round: int, name: str, like: torch.Tensor) -> np.ndarray:
    rng = np.random.default_rng([number(site), current_round, sum(map(ord, name))])
    return rng.normal(size=tuple(like.shape)).astype(np.float32)


def trains(site: str, name: str, task: Message) -> Message:
    reply = good(site, name, task)
    if name == "train":
        reply.params = {n: torch.from_numpy(update(site, task.current_round, n, t)) for n, t in task.params.items()}
    return reply


def looped(start: dict[str, torch.Tensor], shares: dict[str, float], beta: float) -> dict[str, np.ndarray]:
    """Compute the algorithm of Hsu et al., one number after the other."""
    found = {}
    for name, tensor in start.items():
        w = tensor.double().numpy().reshape(-1).copy()
        v = [0.0] * len(w)
        for current_round in range(3):
            sent = {site: update(site, current_round, name, tensor).reshape(-1) for site in SITES}
            for i in range(len(w)):
                delta = 0.0
                for site in SITES:
                    delta += shares[site] * float(sent[site][i])
                v[i] = beta * v[i] + delta
                w[i] = w[i] + v[i]
        found[name] = w.reshape(tuple(tensor.shape))
    return found


@pytest.mark.parametrize(
    ("settings", "bounds", "shares"),
    [
        ({}, {}, (1 / 6, 2 / 6, 3 / 6)),  # sites have 10, 20 and 30 images
        ({"weighting": "uniform"}, {}, (1 / 3, 1 / 3, 1 / 3)),
        ({}, {"max_weight": 0.4}, (0.2, 0.4, 0.4)),
    ],
)
def test_momentum_against_a_loop_and_a_run_that_was_killed(
    settings: Any, bounds: Any, shares: Any, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "a", trains, rule=made(beta=0.7, **settings), num_rounds=3, **bounds)()
    start = {name: tensor.clone() for name, tensor in whole.net.tasks[0].params.items()}
    found = whole.model()["model"]
    for name, expected in looped(start, dict(zip(SITES, shares, strict=True)), 0.7).items():
        np.testing.assert_allclose(found[name].double().numpy(), expected, rtol=0, atol=5e-6)

    def killed(site: str, name: str, task: Message) -> Message:
        cut.net.abort = task.current_round == 2
        return trains(site, name, task)

    cut = Run(tmp_path / "b", killed, rule=made(beta=0.7, **settings), num_rounds=3, experiment="e", **bounds)
    with pytest.raises(Stopped):
        cut()
    rest = Run(tmp_path / "b", trains, rule=made(beta=0.7, **settings), num_rounds=3, experiment="e", **bounds)()
    assert [name for name, _ in rest.net.asked] == ["train", "validate"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.model()["model"].items())


def test_momentum_of_a_median(tmp_path: Path) -> None:
    run = Run(tmp_path, trains, rule=made(beta=0.5, weighting="uniform"), num_rounds=2, aggregate="median")()
    for name, start in run.net.tasks[0].params.items():
        v, w = 0.0, start.double().numpy()
        for current_round in range(2):
            middle = np.median([update(site, current_round, name, start).astype(float) for site in SITES], axis=0)
            v = 0.5 * v + middle
            w = w + v
        np.testing.assert_allclose(run.model()["model"][name].double().numpy(), w, rtol=0, atol=2e-6)


# ------------------------------------------------------------------------------------------------ FedOpt

STEPS = ((0.1, -0.2), (0.1, 0.1))


def moves(rule: Rule) -> list[list[float]]:
    """Return where (1, 1) is after each of two rounds whose mean changes are :data:`STEPS`."""
    place, found = torch.ones(2, dtype=torch.float64), []
    for step in STEPS:
        place = place + rule.move({"w": torch.tensor(step, dtype=torch.float64)})["w"]
        found.append(place.tolist())
    return found


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        ("adagrad", (1.099005, 0.900499), (1.169217, 0.945021)),
        ("adam", (1.090503, 0.904874), (1.215986, 0.870529)),
        ("yogi", (1.090499, 0.904875), (1.215685, 0.870662)),
    ],
)
def test_worked_numbers(form: Any, first: Any, second: Any) -> None:
    assert np.allclose(moves(FedOpt(form=form, server_rate=0.1)), [first, second], atol=6e-7)
    assert np.allclose(moves(FedAvgM()), [(1.1, 0.8), (1.29, 0.72)], atol=1e-12)


def test_what_never_changes_stays_and_what_changed_once_goes_on() -> None:
    rule = FedOpt()
    for change in ((0.0, 0.01), (0.0, 0.0)):
        step = rule.move({"w": torch.tensor(change, dtype=torch.float64)})["w"]
        assert step[0] == 0
        assert step[1] > 0


def authors(form: str, start: torch.Tensor, name: str, rounds: int) -> np.ndarray:
    """Compute Algorithm 2 of Reddi et al., one number after the other, with server_rate .05 and tau .01."""
    w = start.double().numpy().reshape(-1).copy()
    for i in range(len(w)):
        m, v, beta1 = 0.0, 0.01**2, 0.0 if form == "adagrad" else 0.9
        for current_round in range(rounds):
            sent = [float(update(site, current_round, name, start).reshape(-1)[i]) for site in SITES]
            d = (sent[0] + 2 * sent[1] + 3 * sent[2]) / 6  # sites have 10, 20 and 30 images
            m = beta1 * m + (1 - beta1) * d
            if form == "adagrad":
                v = v + d * d
            elif form == "adam":
                v = 0.99 * v + 0.01 * d * d
            else:
                v = v - 0.01 * d * d * np.sign(v - d * d)
            w[i] += 0.05 * m / (v**0.5 + 0.01)
    return w.reshape(tuple(start.shape))


@pytest.mark.parametrize("form", ["adam", "yogi", "adagrad"])
def test_rounds_against_a_loop_and_a_run_that_was_killed(form: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"form": form, "server_rate": 0.05, "server_tau": 0.01}
    whole = Run(tmp_path / "a", trains, rule=FedOpt(**settings), num_rounds=3)()
    start, found = whole.net.tasks[0].params, whole.model()["model"]
    for name, tensor in start.items():
        np.testing.assert_allclose(found[name].numpy(), authors(form, tensor, name, 3), rtol=0, atol=1e-6)

    def killed(site: str, name: str, task: Message) -> Message:
        cut.net.abort = task.current_round == 2
        return trains(site, name, task)

    cut = Run(tmp_path / "b", killed, rule=FedOpt(**settings), num_rounds=3, experiment="e")
    with pytest.raises(Stopped):
        cut()
    rest = Run(tmp_path / "b", trains, rule=FedOpt(**settings), num_rounds=3, experiment="e")()
    assert [name for name, _ in rest.net.asked] == ["train", "validate"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.model()["model"].items())
