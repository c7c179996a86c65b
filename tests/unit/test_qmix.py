"""Test QMIX: the spec's numbers, games with a known solution, a federation with a known best mu, and restarts."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.core import qmix
from fairflare.core.agents import q_learning
from fairflare.core.agents.mu_rewards import MU_GRID, global_accuracy, label_entropy, observation, reward
from fairflare.core.agents.q_learning import available, mix, td_target
from fairflare.core.qmix import QMix, Step, epsilon_at

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = math.nan
SMALL: dict[str, Any] = {"hidden": 8, "warmup": 3, "updates": 2}
SITES = ("A", "B", "C")
NINE = tuple("ABCDEFGHI")


def seen(round_: int, sites: tuple[str, ...] = SITES) -> dict[str, tuple[float, ...]]:
    """Return observations that differ in every round and at every site."""
    return {
        site: observation(
            -0.3 * (k % 6), 1 / 3, (0.1 + 0.02 * round_ + 0.1 * k) % 1, 2.0 / (1 + round_ + k), num_classes=7
        )
        for k, site in enumerate(sites)
    }


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# the specification's numbers


@pytest.mark.parametrize(
    ("counts", "entropy"),
    [((50, 50), -0.693147), ((90, 10), -0.325083), ((60, 30, 10), -0.897946), ((100, 0), 0.0), ((7,) * 4, -1.386294)],
)
def test_label_entropy(counts, entropy):
    assert label_entropy(counts) == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize(("accuracy", "value"), [(0.8, -0.139292), (0.95, 0.0), (0.5, -0.362372), (1.0, 0.051271)])
def test_reward(accuracy, value):
    assert reward(accuracy, 0.95) == pytest.approx(value, abs=1e-6)
    assert reward(accuracy) == reward(accuracy, 0.95)


@pytest.mark.parametrize(("q", "q_tot"), [((0.3, -0.1), 0.5), ((0.4, -0.1), 0.55), ((-1.0, -0.5), -0.188435)])
def test_mixer(q, q_tot):
    value = mix(tensor(*q), tensor(-1.0, 2.0)[:, None], tensor(0.5), tensor(-0.5), torch.tensor(0.2))
    assert float(value) == pytest.approx(q_tot, abs=1e-6)


def test_td_target():
    y = td_target(tensor(-0.139292, -0.139292), tensor(0.5, 0.5), tensor(0.0, 1.0), 0.99)
    assert y.tolist() == pytest.approx([0.355708, -0.139292], abs=1e-6)
    assert (0.5 - float(y[0])) ** 2 == pytest.approx(0.020820, abs=1e-6)


@pytest.mark.parametrize(("step", "epsilon"), [(0, 1.0), (15, 0.7625), (30, 0.525), (60, 0.05), (90, 0.05)])
def test_epsilon(step, epsilon):
    assert epsilon_at(step, start=1.0, end=0.05, steps=60) == pytest.approx(epsilon, rel=1e-12)
    agents = QMix("A", **SMALL)
    for _ in range(2):  # of the warm-up of three transitions; it counts for nothing
        agents.observe(agents.act({"A": (0.0,) * 4}), 0.0, None, done=True)
        assert agents.epsilon == 1.0
    agents.observe(agents.act({"A": (0.0,) * 4}), 0.0, None, done=True)
    for _ in range(step):
        agents.act({"A": (0.0,) * 4})
    assert agents.epsilon == pytest.approx(epsilon, rel=1e-12)


def test_grids():
    assert MU_GRID == (1e-5, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def test_observation():
    e = label_entropy([60, 30, 10])
    o = observation(e, 0.25, 0.8, 2.5, num_classes=3)
    assert o == pytest.approx((e / math.log(3), 0.25, 0.8, 0.25))
    assert observation(-math.log(4), 0.0, 1.0, 99.0, num_classes=4) == (-1.0, 0.0, 1.0, 1.0)
    assert observation(None, 0.5, 0.9, NAN, num_classes=4) == (-0.5, 0.5, 0.0, 1.0)  # withheld entropy; broken loss
    assert observation(0.0, 0.5, 0.9, 1.0, num_classes=1)[0] == 0.0


def test_global_accuracy():
    assert global_accuracy({"A": 0.5, "B": 1.0}, {"A": 100, "B": 300}) == 0.875
    assert global_accuracy({"A": 0.5, "B": 1.0}) == 0.75
    assert global_accuracy({"A": 0.5, "B": None, "C": NAN}, {"A": 10}) == 0.5
    assert global_accuracy({"A": None}) is None
    assert global_accuracy({}) is None


def test_constants_of_the_specification():
    assert (q_learning.OBSERVATION_SIZE, q_learning.EMBED, q_learning.CLIP) == (4, 32, 10.0)
    assert (q_learning.CAPACITY, q_learning.BATCH, q_learning.TARGET_EVERY) == (1000, 32, 10)
    assert (qmix.EPS_START, qmix.EPS_END, qmix.REWARD_DELAY) == (1.0, 0.05, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: label_entropy([0, 0]), "at least one image"),
        (lambda: label_entropy([1, -1]), "^count of class 1.* got -1$"),
        (lambda: reward(80.0, 0.95), r"accuracy must be in \[0, 1\], got 80.0"),
        (lambda: reward(0.8, 95.0), r"zeta must be in \[0, 1\], got 95.0"),
        (lambda: reward(NAN), "accuracy must be"),
        (lambda: global_accuracy({"A": 80.0}), "^accuracy of site 'A'.* got 80.0$"),
        (lambda: global_accuracy({"A": 0.5}, {}), "site 'A' has an accuracy and no number"),
        (lambda: global_accuracy({"A": 0.5}, {"A": -1}), "number of validation images of site 'A'"),
        (lambda: observation(0.3, 0.5, 0.5, 1.0, num_classes=2), "^entropy.* got 0.3$"),
        (lambda: observation(-0.9, 0.5, 0.5, 1.0, num_classes=2), "entropy must be"),
        (lambda: observation(0.0, 50, 0.5, 1.0, num_classes=2), "share must be"),
        (lambda: observation(0.0, 0.5, 50, 1.0, num_classes=2), "accuracy must be"),
        (lambda: observation(0.0, 0.5, 0.5, -1.0, num_classes=2), "loss must be finite and >= 0, got -1.0"),
        (lambda: observation(0.0, 0.5, 0.5, 1.0, num_classes=0), "^num_classes.* got 0$"),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# the mixer is monotonic


@pytest.mark.parametrize("seed", range(10))
def test_the_best_joint_action_is_that_of_each_agent(seed):
    agents = QMix("AB", actions=(0.0, 0.1, 1.0), seed=seed, **SMALL)
    step = agents.act({"A": (0.1, 0.2, 0.3, 0.4), "B": (0.5, 0.1, 0.9, 0.2)}, greedy=True)
    joint = {
        pair: agents.joint_value(step._replace(action=torch.tensor(pair)))
        for pair in itertools.product(range(3), repeat=2)
    }
    assert max(joint.values()) == pytest.approx(joint[tuple(step.action.tolist())], abs=1e-6)


# what one update computes


def reference_losses(networks, replay, gamma: float, actions=MU_GRID):
    """Compute (MRL-11) to (MRL-14) in slow loops over the transitions and agents, in float64.

    Returns the squared TD error of each transition, and the trained networks' parameters that they depend on.
    """
    online = {name: t.double().requires_grad_() for name, t in networks["online"].items()}
    target = {name: t.double() for name, t in networks["target"].items()}
    replay = {name: t.double() if t.is_floating_point() else t for name, t in replay.items()}
    num_agents, num_actions = replay["next_present"].shape[1], len(actions)

    def utility(nets, h, x):
        for layer in ("0", "2", "4"):
            x = x @ nets[f"agents.{layer}.weight"][h] + nets[f"agents.{layer}.bias"][h, 0]
            x = torch.clamp(x, min=0) if layer != "4" else x
        return x

    def joint(nets, q, s):
        if "mixer.b1.weight" not in nets:
            return sum(q)
        s = s.reshape(-1)
        w2, b1, v = (s @ nets[f"mixer.{name}.weight"] + nets[f"mixer.{name}.bias"] for name in ("w2", "b1", "v.0"))
        total = torch.clamp(v, min=0) @ nets["mixer.v.2.weight"][:, 0] + nets["mixer.v.2.bias"][0]
        weight, bias, size = nets["mixer.w1.weight"], nets["mixer.w1.bias"], len(b1)
        w1 = [(s @ weight + bias)[h * size : (h + 1) * size] for h in range(num_agents)]
        for e in range(size):
            x = b1[e] + sum(q[h] * abs(w1[h][e]) for h in range(num_agents))
            total = total + (x if x > 0 else torch.exp(x) - 1) * abs(w2[e])
        return total

    losses = []
    for t in range(len(replay["reward"])):
        row = {name: values[t] for name, values in replay.items()}
        hs = range(num_agents)
        q = [utility(online, h, row["observation"][h])[int(row["action"][h])] for h in hs]
        best = []
        for h in hs:
            after = utility(target, h, row["next_observation"][h])
            allowed = range(num_actions) if row["next_present"][h] else [int(row["action"][h])]
            best.append(after[max(allowed, key=lambda a: float(after[a].detach()))].detach())
        y = row["reward"] + gamma * (1 - row["done"]) * joint(target, best, row["next_observation"])
        losses.append((joint(online, q, row["observation"]) - y.detach()) ** 2)
    return losses, online


def played(agents: QMix, size: float, num: int = 7):
    """Return transitions with absent sites; the state before the last one, its loss, and the state after it."""
    names = agents.agents
    step = agents.act(seen(0, names))
    for r in range(1, num + 1):
        following = agents.act(seen(r, names[: len(names) - 2 + r % 3]))
        before = agents.state_dict()
        loss = agents.observe(step, size * r, following, done=r == 4)
        step = following
    return before, loss, agents.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"actions": (1e-5, 0.3, 1.0)},
        {"mixer": "vdn", "gamma": 0.5},
        {"agents": NINE, "actions": (0.0, 0.5)},
        {"agents": NINE, "mixer": "vdn"},
    ],
)
@pytest.mark.parametrize(("size", "clipped"), [(0.1, False), (300.0, True)])
def test_an_update_is_the_loop(options, size, clipped):
    """Check loss, gradient and clipping against a loop in float64; targets differ from the trained networks."""
    agents = QMix(**{"agents": SITES, "lr": 0.01} | SMALL | {"updates": 1} | options)
    before, loss, after = played(agents, size)
    gamma = options.get("gamma", 0.99)
    losses, online = reference_losses(before, after["replay"], gamma, agents.actions)
    mean = sum(losses) / len(losses)
    assert loss == pytest.approx(mean.item(), rel=1e-4)
    mean.backward()
    norm = math.sqrt(sum(float((part.grad**2).sum()) for part in online.values()))
    assert (norm > 20) == clipped
    assert (norm < 10) != clipped
    for name, part in online.items():  # Adam's mean of the gradients: 0.9 of the old one, 0.1 of this one
        moment, old = (state["optimizer"][name]["exp_avg"].double() for state in (after, before))
        expected = part.grad * min(1.0, 10.0 / norm)
        torch.testing.assert_close((moment - 0.9 * old) / 0.1, expected, rtol=1e-3, atol=2e-4 if clipped else 2e-5)


def test_an_update_is_of_transitions_drawn_without_replacement(monkeypatch):
    """Check that the loss is the mean over three different, varying transitions."""
    monkeypatch.setattr(q_learning, "BATCH", 3)
    places = set()
    for seed in range(6):
        agents = QMix(SITES, seed=seed, **SMALL | {"updates": 1})
        before, loss, after = played(agents, 0.1, 6)
        losses = [float(value) for value in reference_losses(before, after["replay"], 0.99)[0]]
        means = {trio: sum(losses[t] for t in trio) / 3 for trio in itertools.combinations(range(6), 3)}
        found = min(means, key=lambda trio: abs(means[trio] - loss))
        assert means[found] == pytest.approx(loss, rel=1e-4)
        places.add(found)
    assert len(places) > 2


def test_the_target_networks_are_copied_every_so_often(monkeypatch):
    monkeypatch.setattr(q_learning, "TARGET_EVERY", 4)
    monkeypatch.setattr(q_learning, "CAPACITY", 6)  # transitions count, not those still remembered
    agents = QMix(SITES, **SMALL)

    def copied() -> bool:
        state = agents.state_dict()
        return all(torch.equal(state["online"][name], state["target"][name]) for name in state["online"])

    step, equal = agents.act(seen(0)), []
    for r in range(1, 9):
        following = agents.act(seen(r))
        agents.observe(step, 0.1, following)
        step = following
        equal.append(copied())
    assert equal == [True, True, False, True, False, False, False, True]  # the first two are the warm-up


def test_the_memory_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(q_learning, "CAPACITY", 4)
    agents = QMix("A", **SMALL | {"warmup": 4})
    step = agents.act({"A": (0.0,) * 4})
    learnt = [agents.observe(step, float(r), step) for r in range(6)]
    assert agents.state_dict()["replay"]["reward"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert [loss is None for loss in learnt] == [True] * 3 + [False] * 3
    with pytest.raises(ValueError, match=r"^warmup.* got 5$"):
        QMix("A", warmup=5)  # could never learn


# games


STATES = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))


def two_step(state: int, actions: list[int]) -> tuple[float, int | None]:
    """Play the QMIX paper's game, section 5: the first agent leads to 7 for sure, or to 8 if both then agree."""
    if state == 0:
        return 0.0, 1 + actions[0]
    if state == 1:
        return 7.0, None
    return [[0.0, 1.0], [1.0, 8.0]][actions[0]][actions[1]], None


def play_qmix(seed: int, mixer: str) -> float:
    """Return of the greedy joint policy after 200 episodes of full exploration, as in the paper."""
    agents = QMix("AB", actions=(0.0, 1.0), mixer=mixer, hidden=32, lr=5e-3, warmup=32, updates=1, eps_steps=10**9,
                  seed=seed)  # fmt: skip

    def act(state: int, greedy: bool = False) -> Step:
        return agents.act(dict.fromkeys("AB", STATES[state]), greedy=greedy)

    for _ in range(200):
        state = 0
        step = act(state)
        while True:
            gain, state = two_step(state, step.action.tolist())
            if state is None:
                agents.observe(step, gain, None, done=True)
                break
            following = act(state)
            agents.observe(step, gain, following)
            step = following
    gain, state = two_step(0, act(0, greedy=True).action.tolist())
    return gain + two_step(state, act(state, greedy=True).action.tolist())[0]


@pytest.mark.long
def test_qmix_solves_the_two_step_game():
    assert [play_qmix(seed, "qmix") for seed in range(10)] == [8.0] * 10


@pytest.mark.long
def test_a_plain_sum_does_not_solve_it():
    """Check the QMIX paper's control: with a sum, 8 looks worth less than the safe 7."""
    assert [play_qmix(seed, "vdn") for seed in range(3)] == [7.0] * 3


# timing: one transition a round


def scripted(agents: QMix, accuracies: list[float]) -> list[float | None]:
    return [agents.end_round(seen(r), reward(acc))[1] for r, acc in enumerate(accuracies)]


def test_a_choice_gets_the_reward_of_two_rounds_later():
    agents = QMix(SITES, **SMALL)
    scripted(agents, [0.1, 0.2, 0.3, 0.4])
    replay = agents.state_dict()["replay"]
    assert replay["reward"].tolist() == pytest.approx([reward(0.3), reward(0.4)], rel=1e-6)
    for transition in range(2):  # (s^0, A^0, R^0, s^1) and (s^1, A^1, R^1, s^2)
        here = torch.tensor([seen(transition)[site] for site in SITES])
        there = torch.tensor([seen(transition + 1)[site] for site in SITES])
        torch.testing.assert_close(replay["observation"][transition], here)
        torch.testing.assert_close(replay["next_observation"][transition], there)
    assert replay["done"].tolist() == [0.0, 0.0]


def test_a_round_without_a_measured_accuracy_teaches_nothing():
    agents = QMix(SITES, **SMALL)
    rewards = [0.1, 0.2, 0.3, None, 0.5, 0.6]
    for r, value in enumerate(rewards):
        agents.end_round(seen(r), value, done=r == 5)
    replay = agents.state_dict()["replay"]
    assert replay["reward"].tolist() == pytest.approx([0.3, 0.5, 0.6])
    torch.testing.assert_close(replay["observation"][1], torch.tensor([seen(2)[site] for site in SITES]))
    assert replay["done"].tolist() == [0.0, 0.0, 1.0]


def test_before_a_choice_mu_is_the_initial_one():
    agents = QMix(SITES, **SMALL)
    step = agents.act({})
    assert agents.chosen(step) == dict.fromkeys(SITES, 1e-5)
    agents = QMix(SITES, actions=(0.0, 1e-5, 0.05, 1.0), **SMALL)
    assert agents.chosen(agents.act({})) == dict.fromkeys(SITES, 1e-5)  # and not 0


# acting


def test_a_greedy_choice_leaves_no_trace_in_the_randomness():
    agents, other = QMix(SITES, **SMALL), QMix(SITES, **SMALL)
    greedy = [agents.act(seen(3), greedy=True).action.tolist() for _ in range(3)]
    assert greedy[0] == greedy[1] == greedy[2]
    best = [max(range(10), key=row.__getitem__) for row in agents.values(agents.act(seen(3), greedy=True)).values()]
    assert greedy[0] == best
    assert agents.decisions == 0
    assert torch.equal(agents.state_dict()["generator"], other.state_dict()["generator"])


def test_the_order_of_sites_does_not_matter():
    one, other = QMix(SITES, seed=1, **SMALL), QMix(tuple(reversed(SITES)), seed=1, **SMALL)
    for r in range(8):
        backwards = dict(reversed(seen(r).items()))
        assert one.chosen(one.end_round(seen(r), 0.1)[0]) == other.chosen(other.end_round(backwards, 0.1)[0])


def test_an_absent_site_keeps_its_observation_and_action():
    agents = QMix(SITES, seed=4, **SMALL)
    first, _ = agents.end_round(seen(0), None)
    second, _ = agents.end_round({site: seen(1)[site] for site in "AC"}, None)
    assert second.action[1] == first.action[1]
    torch.testing.assert_close(second.observation[1], torch.tensor(seen(0)["B"]))
    torch.testing.assert_close(second.observation[2], torch.tensor(seen(1)["C"]))
    assert second.present.tolist() == [True, False, True]
    open_to = available(second.present, second.previous, 10)
    assert open_to[1].tolist() == [a == int(first.action[1]) for a in range(10)]
    assert bool(open_to[[0, 2]].all())
    agents.end_round(seen(2), 0.1)  # (s^0, A^0, s^1): in s^1 only one action was open to B
    assert agents.state_dict()["replay"]["next_present"][0].tolist() == [True, False, True]


def test_who_is_absent_does_not_change_the_randomness_of_the_others():
    one, other = QMix(SITES, seed=5, **SMALL), QMix(SITES, seed=5, **SMALL)
    for r in range(3):
        whole = one.act(seen(r))
        part = other.act({site: seen(r)[site] for site in "AC"})
        assert whole.action[[0, 2]].tolist() == part.action[[0, 2]].tolist()


@pytest.mark.parametrize("greedy", [False, True])
def test_an_absent_site_has_one_action_only(greedy):
    """Check any output of its network and any random numbers; also in its first round."""
    agents = QMix(SITES, **SMALL)
    for r in range(12):
        step = agents.act({site: seen(r)[site] for site in "AC"}, greedy=greedy)
        assert agents.chosen(step)["B"] == 1e-5
        assert available(step.present, step.previous, 10)[1].tolist() == [True] + [False] * 9


def test_exploration_is_uniform_and_of_the_stated_share(monkeypatch):
    monkeypatch.setattr(qmix, "EPS_END", 0.5)
    agents = QMix("AB", eps_steps=0, **SMALL)
    best = agents.act(seen(0, ("A", "B")), greedy=True).action
    counts = np.zeros((2, 10))
    for _ in range(2000):
        for h, action in enumerate(agents.act(seen(0, ("A", "B"))).action.tolist()):
            counts[h, action] += 1
    for h in range(2):
        others = np.delete(counts[h], int(best[h]))
        assert counts[h, int(best[h])] / 2000 == pytest.approx(0.55, abs=0.04)
        assert others == pytest.approx(np.full(9, 100), abs=40)


# restart


OPTIONS = [{}, {"actions": (0.0, 0.3, 1.0)}, {"mixer": "vdn"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_resume_is_bit_identical(options, monkeypatch):
    monkeypatch.setattr(q_learning, "BATCH", 4)
    monkeypatch.setattr(q_learning, "CAPACITY", 7)

    def make(seed: int) -> QMix:
        return QMix(SITES, seed=seed, eps_steps=6, **SMALL | options)

    def play(agents: QMix, rounds: range) -> list[Any]:
        out = []
        for r in rounds:
            here = {site: o for site, o in seen(r).items() if not (site == "B" and r % 4 == 2)}
            step, learnt = agents.end_round(here, None if r == 9 else reward(0.04 * r))
            out.append((step.action.tolist(), learnt, agents.joint_value(step)))
        return out

    expected = play(make(1), range(18))
    for stop in (1, 4, 13):
        first, second = make(1), make(99)
        head = play(first, range(stop))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert head + play(second, range(stop, 18)) == expected


def test_a_resumed_one_keeps_its_own_learning_rate():
    before = QMix(SITES, **SMALL)
    scripted(before, [0.1] * 8)
    slow, fast = QMix(SITES, **SMALL), QMix(SITES, lr=0.1, **SMALL)
    moved = []
    for agents in (slow, fast):
        agents.load_state_dict(before.state_dict())
        agents.end_round(seen(8), 0.1)
        old, new = (state["online"]["agents.4.bias"] for state in (before.state_dict(), agents.state_dict()))
        moved.append(float((new - old).abs().max()))
    assert moved[1] > 20 * moved[0] > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"agents": "AB"}, "agents"),
        ({"agents": SITES, "actions": (0.0, 1.0)}, "actions"),
        ({"agents": SITES, "hidden": 9}, "hidden"),
        ({"agents": SITES, "mixer": "vdn"}, "mixer"),
    ],
)
def test_a_state_of_others_is_refused(options, name):
    with pytest.raises(ValueError, match=f"state is of agents with {name}"):
        QMix(**SMALL | options).load_state_dict(QMix(SITES, **SMALL).state_dict())


def test_who_loads_a_state_does_not_change_it():
    agents, other = QMix(SITES, **SMALL), QMix(SITES, **SMALL)
    scripted(agents, [0.1] * 6)
    state = agents.state_dict()
    before = copy.deepcopy(state)
    other.load_state_dict(state)
    scripted(other, [0.2] * 6)

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return all(same(a[key], b[key]) for key in a)
        if isinstance(a, list):
            return all(itertools.starmap(same, zip(a, b, strict=True)))
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    assert same(state, before)


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agents": ()}, "agents must be one or more different"),
        ({"agents": ["A", "A"]}, "agents must be"),
        ({"actions": ()}, "^number of actions.* got 0$"),
        ({"actions": (0.1, NAN)}, r"^actions\[1\].* got nan$"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"lr": "fast"}, "lr must be finite and > 0, got 'fast'"),
        ({"hidden": 0}, "hidden must be an integer >= 1, got 0"),
        ({"warmup": 1001}, "^warmup.* got 1001$"),
        ({"updates": 0}, "updates must be an integer >= 1"),
        ({"eps_steps": 2.5}, "^eps_steps.* got 2.5$"),
        ({"mixer": "mean"}, "^mixer.* got 'mean'$"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        QMix(**{"agents": SITES} | options)


def test_bad_rounds():
    agents = QMix(SITES, **SMALL)
    before = agents.state_dict()
    for arguments, message in [
        (({"D": (0.0,) * 4},), "unknown agent 'D'"),
        (({"A": (0.0,) * 3},), "observation of agent 'A' must be 4"),
        (({"A": (0.0, 0.0, 0.0, NAN)},), "^observation of agent 'A'.* got nan$"),
    ]:
        with pytest.raises(ValueError, match=message):
            agents.act(*arguments)
    with pytest.raises(ValueError, match="reward must be a finite number, got nan"):
        agents.end_round(seen(0), NAN)
    assert torch.equal(before["last_observation"], agents.state_dict()["last_observation"])
    assert torch.equal(before["generator"], agents.state_dict()["generator"])
    step = agents.act(seen(0))
    with pytest.raises(ValueError, match="reward must be a finite number, got inf"):
        agents.observe(step, math.inf, step)
    with pytest.raises(ValueError, match="may be None only at the end"):
        agents.observe(step, 0.0, None)
