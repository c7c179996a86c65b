"""Test policies that choose mu: messages to sites, agents' inputs and rewards, restarts, and every setting."""

from __future__ import annotations

import io
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.base.settings import build, choices, field_names
from fairflare.core import qmix
from fairflare.core.agents.mu_rewards import MU_GRID
from fairflare.core.agents.thompson import beliefs, standardise
from fairflare.core.qmix import QMix
from fairflare.methods.parts.mu_policy import BanditMu, FixedMu, MuPolicy, QMixMu, RandomMu, VdnMu

pytestmark = pytest.mark.usefixtures("one_thread")
SITES = ("a", "b", "c")


def report(**own: Any) -> dict[str, Any]:
    return {
        "train_loss": 1.0, "accuracy": 0.5, "global_accuracy": 0.5, "num_validation": 10, "entropy": -0.5,
        "num_classes": 7, **own,
    }  # fmt: skip


def inputs(reports, current_round=0, *, num_rounds=6, asked=SITES, samples=None, seed=0):
    return SimpleNamespace(
        current_round=current_round,
        num_rounds=num_rounds,
        sites=sorted(reports),
        num_samples={site: (samples or {}).get(site, 10) for site in reports},
        reports=dict(reports),
        asked=list(asked),
        seed=seed,
    )


def everybody(**own: Any) -> dict[str, dict[str, Any]]:
    return {site: report(**own) for site in SITES}


def exploring(share: float, kind: type[QMixMu] = QMixMu) -> QMixMu:
    """Return agents that explore in another share of the rounds."""
    policy: QMixMu = type("Exploring", (kind,), {"explore": share})()
    return policy


def state_of(policy) -> dict[str, Any]:
    return policy.state_dict()["agents"]


# ------------------------------------------------------------------------------------------------ settings


def test_kinds():
    kinds = {"fixed": FixedMu, "random": RandomMu, "bandit": BanditMu, "qmix": QMixMu, "vdn": VdnMu}
    assert choices(MuPolicy) == kinds
    assert build(VdnMu, {"gamma": 0.5, "actions": [0, 0.5]}).actions == (0.0, 0.5)


@pytest.mark.parametrize("policy", [QMixMu, VdnMu])
@pytest.mark.parametrize(
    ("settings", "message"),
    [({"zeta": 95.0}, "zeta .*got 95.0 .*percentage")],
)
def test_settings_out_of_range(policy, settings, message):
    with pytest.raises(ValueError, match=message):
        policy(**settings)


@pytest.mark.parametrize("policy", [QMixMu, VdnMu, RandomMu, BanditMu])
@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([], r"^actions.* got \[\]$"),
        ([0.1, 0.1], r"^actions.* got \[0.1, 0.1\]$"),
        ([0.5, 0.1], "actions must be ascending"),
        ([0.0, 1.5], "actions must .*; entry 1 is 1.5"),
        ([math.nan], "entry 0 is nan"),
        ("0.1", "actions must be a list"),
    ],
)
def test_bad_actions(policy, actions, message):
    with pytest.raises(ValueError, match=message):
        policy(actions=actions)


SET: dict[str, Any] = {
    "actions": [0.0, 0.05, 0.25], "zeta": 0.5, "gamma": 0.25, "learning_rate": 0.03,
}  # fmt: skip
TAKEN = {  # as QMIX calls it, and what it gets in a run of 40 rounds
    "actions": (0.0, 0.05, 0.25), "gamma": 0.25, "lr": 0.03, "warmup": 10, "updates": 8, "eps_steps": 12, "seed": 11,
}  # fmt: skip


@pytest.mark.parametrize(("policy", "mixer"), [(QMixMu, "qmix"), (VdnMu, "vdn")])
def test_every_setting_reaches_the_agents(policy, mixer, monkeypatch):
    assert set(SET) == set(field_names(policy))
    assert all(getattr(policy(), name) != value for name, value in SET.items())  # none is the default
    taken = []
    monkeypatch.setattr(qmix, "QMix", lambda names, **options: taken.append(options) or QMix(names, **options))
    found = policy(**SET)
    values = found.choose(inputs(everybody(global_accuracy=0.9), num_rounds=40, seed=11))
    assert taken == [{**TAKEN, "mixer": mixer}]
    assert values["reward"] == pytest.approx(math.exp(0.9 - 0.5) - 1)  # zeta
    again = policy(**SET)
    again.load_state_dict(found.state_dict())
    assert taken[1] == {**taken[0], "seed": 0}  # eps_steps and warmup too, without knowing the number of rounds


def test_defaults_are_those_of_qmix(monkeypatch):
    taken = []
    monkeypatch.setattr(qmix, "QMix", lambda names, **options: taken.append(options) or QMix(names, **options))
    QMixMu().choose(inputs(everybody(), num_rounds=200))
    assert taken == [
        {
            "actions": MU_GRID, "mixer": "qmix", "gamma": 0.99,
            "lr": 1e-3, "warmup": 10, "updates": 8, "eps_steps": 60, "seed": 0,
        }
    ]  # fmt: skip
    assert QMixMu().zeta == 0.95


# ------------------------------------------------------------------------------------------------ without agents


def test_fixed_says_nothing():
    policy = FixedMu()
    for r in range(2):
        assert policy.directives(SITES) == {}
        assert policy.choose(inputs(everybody(), r)) == {}
    assert policy.accepts("late") == ""
    policy.load_state_dict(policy.state_dict())


def test_fixed_says_what_it_was_given_to_those_sites():
    policy = FixedMu(by_site={"a": 0, "b": 0.5, "nowhere": 1.0})
    assert policy.tells
    assert not FixedMu().tells
    for r in range(2):
        assert policy.directives(SITES) == {"a": 0.0, "b": 0.5}
        assert policy.choose(inputs(everybody(), r)) == {}
    assert policy.warnings == ["mu_policy.by_site names sites that are not in this round: nowhere"]
    with pytest.raises(ValueError, match="by_site"):
        FixedMu(by_site={"a": -1.0})


def test_random_depends_on_seed_site_and_round_alone():
    def told(seed, sites, rounds, **settings):
        policy, found = RandomMu(**settings), []
        for r in rounds:
            assert policy.choose(inputs({site: report() for site in sites}, r, num_rounds=400, seed=seed)) == {}
            found.append(policy.directives(sites))
        return found

    assert RandomMu().directives(SITES) == dict.fromkeys(SITES, 1e-5)
    whole = told(3, SITES, range(400))
    part = told(3, ("b",), range(400))
    assert [x["b"] for x in whole] == [x["b"] for x in part]
    assert told(3, SITES, [7]) == [whole[7]]
    assert told(4, SITES, range(9)) != whole[:9]
    assert len({tuple(x[site] for x in whole) for site in SITES}) == 3
    counts = Counter(mu for x in whole for mu in x.values())
    assert set(counts) == set(MU_GRID)
    assert all(abs(count - 120) < 50 for count in counts.values())  # 1200 draws of ten; 10.4 is one deviation
    assert {mu for x in told(3, SITES, range(20), actions=[0.0, 0.25]) for mu in x.values()} == {0.0, 0.25}


def test_random_with_sites_that_come_and_go():
    policy = RandomMu()
    policy.choose(inputs(everybody()))
    before = policy.directives(SITES)
    policy.choose(inputs({"a": report()}, 1))
    now = policy.directives([*SITES, "late"])
    assert {site: now[site] for site in "bc"} == {site: before[site] for site in "bc"}
    assert now["late"] == 1e-5
    assert policy.accepts("late") == ""


# ------------------------------------------------------------------------------------------------ a bandit


@pytest.mark.parametrize("rewards", [(), (0.4,), (1.5, -0.5), (-2.0, 0.25, 1.0, 1.0)])
def test_a_belief_is_prior_times_likelihood(rewards):
    """Compare with Bayes' rule on a fine grid of the action's mean reward."""
    grid = np.linspace(-12, 12, 48_001)
    density = np.exp(-(grid**2) / 2)
    for value in rewards:
        density = density * np.exp(-((value - grid) ** 2) / 2)
    density = density / density.sum()
    mean = float((grid * density).sum())
    (found,) = beliefs([rewards])
    assert found == pytest.approx((mean, float(((grid - mean) ** 2 * density).sum()) ** 0.5), abs=1e-6)


def test_beliefs_by_hand():
    low, middle, high = standardise([1.0, 2.0, 6.0])  # mean 3, variance (4 + 1 + 9) / 3
    assert (low, middle, high) == pytest.approx((-0.92582, -0.46291, 1.38873), abs=1e-5)
    assert beliefs([[low, high], [], [middle]]) == [
        pytest.approx((0.15430, 0.57735), abs=1e-5), (0.0, 1.0), pytest.approx((-0.23146, 0.70711), abs=1e-5),
    ]  # fmt: skip
    assert standardise([]) == []
    assert standardise([0.1] * 3) == [0.0] * 3
    assert standardise([-20.0, -10.0, 30.0]) == pytest.approx((low, middle, high))  # scale and origin have no effect


def test_a_bandit_credits_mu_with_the_next_model():
    """Play six rounds of known accuracies, one that nobody measured and one with an absent site, beside a slow loop."""
    policy = BanditMu(actions=[0.0, 0.5])
    used, rewards, credit = [], [], []  # of the rounds so far; of the rounds with a reward
    accuracies = (0.9, 0.2, 0.6, None, 0.4, 0.5)
    for r, accuracy in enumerate(accuracies):
        present = ("a", "b") if r == 1 else SITES
        told = policy.directives(SITES)
        assert r or told == dict.fromkeys(SITES, 1e-5)
        if r and accuracy is not None:
            rewards.append(math.exp(accuracy - 0.95) - 1)
            credit.append(used[r - 1])
        used.append({site: told[site] for site in present})
        here = everybody(num_validation=0) if accuracy is None else everybody(global_accuracy=accuracy)
        values = policy.choose(inputs({site: here[site] for site in present}, r, seed=7))
        assert values == ({} if accuracy is None else {"reward": pytest.approx(math.exp(accuracy - 0.95) - 1)})
        scores = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) or 1.0) if rewards else []
        expected = {}
        for site in SITES:
            draws, best = random.Random(f"7/{site}/{r}"), (-math.inf, 0.0)
            for mu in (0.0, 0.5):
                mine = [score for score, who in zip(scores, credit, strict=True) if who.get(site) == mu]
                best = max(best, (draws.gauss(sum(mine) / (len(mine) + 1), 1 / math.sqrt(len(mine) + 1)), mu))
            expected[site] = best[1] if site in present else told[site]
        assert policy.directives(SITES) == expected
    # Credited are rounds 0, 1, 3 and 4: round 2 had no reward, and nobody knows what comes after round 5.
    assert [len(who) for who in credit] == [3, 2, 3, 3]
    assert [mu for _, mu in policy.state_dict()["past"]] == [used[r] for r in (0, 1, 3, 4)]


def play(seed: int, gains: dict[str, float], rounds: int = 40, lie: Any = None) -> dict[str, float]:
    """Return by site the share of the last rounds with mu 1, which adds ``gains`` to the accuracy 0.5 of a model."""
    policy, taken, accuracy = BanditMu(actions=[0.0, 0.1, 1.0]), [], 0.5
    rng = np.random.default_rng(seed)
    for r in range(rounds):
        told = policy.directives(SITES)
        reports = everybody(global_accuracy=min(max(accuracy + 0.01 * rng.normal(), 0.0), 1.0))
        if lie is not None:
            reports["c"] |= lie(r)
        policy.choose(inputs(reports, r, num_rounds=rounds, seed=seed))
        accuracy = 0.5 + sum(gains[site] * told[site] for site in SITES)
        taken.append(told)
    return {site: float(np.mean([told[site] == 1.0 for told in taken[-15:]])) for site in SITES}


def test_a_bandit_finds_what_each_site_needs():
    found = [play(seed, {"a": 0.1, "b": -0.1, "c": 0.1}) for seed in range(5)]
    share = {site: np.mean([each[site] for each in found]) for site in SITES}
    assert min(share["a"], share["c"]) > 0.6 > 0.2 > share["b"]  # by chance 0.33 each


def test_no_reward_moves_a_belief_far():
    """Let one of three sites claim anything in any round: every belief stays finite, near the prior, and honest."""
    claims = [{"global_accuracy": v, "num_validation": n} for v in (0.0, 1.0, math.nan) for n in (0, 10, 1e9, math.nan)]
    play(0, dict.fromkeys(SITES, 0.1), lie=lambda r: claims[r % len(claims)])
    policy = BanditMu()
    for r in range(60):
        policy.choose(inputs(everybody(global_accuracy=float(r == 30)), r))
    rewards = [earned for earned, _ in policy.state_dict()["past"]]
    assert all(math.exp(-0.95) - 1 <= earned <= math.exp(0.05) - 1 for earned in rewards)
    scores = standardise(rewards)
    assert max(map(abs, scores)) == pytest.approx(math.sqrt(len(rewards) - 1))  # the bound, where one differs from all
    assert abs(beliefs([scores])[0][0]) < 1e-9


# ------------------------------------------------------------------------------------------------ what agents see


def reference_observations(rounds):
    """Compute (E / log C, P, acc, min(loss, 10) / 10) of every site in loops, from all reports so far."""
    seen: dict[str, list[float]] = {}
    entropies: dict[str, float] = {}
    classes = 1
    for reports, samples in rounds:
        for found in reports.values():
            if found["num_classes"] is not None and found["num_classes"] > classes:
                classes = found["num_classes"]
        for site, found in reports.items():
            if found["entropy"] is not None:
                entropies[site] = found["entropy"]
        everyone = 0
        for site in reports:
            everyone = everyone + samples[site]
        for site, found in reports.items():
            scaled = -0.5
            if site in entropies:
                scaled = 0.0 if classes == 1 else max(-1.0, min(0.0, entropies[site] / math.log(classes)))
            broken = not math.isfinite(found["train_loss"])
            seen[site] = [
                scaled,
                samples[site] / everyone,
                0.0 if broken else found["accuracy"],
                1.0 if broken else min(found["train_loss"], 10.0) / 10.0,
            ]
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_observations_are_those_of_the_specification(seed):
    """Check sites of different size, absent sites, entropies that come late, and broken losses."""
    rng = np.random.default_rng(seed)
    policy, rounds = QMixMu(), []
    for r in range(6):
        present = SITES if r == 0 else [site for site in SITES if rng.random() < 0.7] or ["b"]
        samples = {site: int(rng.integers(1, 500)) for site in present}
        reports = {
            site: report(
                train_loss=math.nan if rng.random() < 0.2 else float(20 * rng.random()),
                accuracy=float(rng.random()),
                entropy=None if rng.random() < 0.5 else float(-2 * rng.random()),
                num_classes=None if rng.random() < 0.3 else int(rng.integers(1, 8)),
            )
            for site in present
        }
        rounds.append((reports, samples))
        policy.choose(inputs(reports, r, samples=samples))
        expected = reference_observations(rounds)
        assert state_of(policy)["last_observation"].tolist() == [
            pytest.approx(expected[site], rel=1e-6, abs=1e-9) for site in SITES
        ]


# ------------------------------------------------------------------------------------------------ what they earn


@pytest.mark.parametrize("kind", [QMixMu, VdnMu])
def test_a_choice_is_used_in_the_next_round_and_rewarded_two_rounds_later(kind):
    """Check 10.11 of the spec: gacc of round r belongs to the choice at the end of round r - 2."""
    policy, told, values = kind(zeta=0.5), [], []
    for r, accuracy in enumerate((0.1, 0.2, 0.3, 0.4)):
        told.append(policy.directives(SITES))
        reports = everybody()
        reports["a"] |= {"global_accuracy": accuracy, "num_validation": 30}
        reports["b"] |= {"global_accuracy": 1.0, "num_validation": 10}
        reports["c"] |= {"global_accuracy": 0.9, "num_validation": 0}
        values.append(policy.choose(inputs(reports, r, num_rounds=4)))
    told.append(policy.directives(SITES))
    earned = [math.exp((30 * accuracy + 10) / 40 - 0.5) - 1 for accuracy in (0.1, 0.2, 0.3, 0.4)]
    assert [found["reward"] for found in values] == pytest.approx(earned)
    assert told[0] == dict.fromkeys(SITES, 1e-5)
    replay = state_of(policy)["replay"]
    assert replay["reward"].tolist() == pytest.approx(earned[2:])
    assert replay["done"].tolist() == [0.0, 1.0]  # the last round ends the episode
    for r in range(2):
        assert told[r + 1] == {site: MU_GRID[int(a)] for site, a in zip(SITES, replay["action"][r], strict=True)}


def test_a_round_that_nobody_measured():
    policy = QMixMu()
    values = policy.choose(inputs(everybody(num_validation=0)))
    assert set(values) == {"epsilon", "q_tot"}
    for r in range(1, 4):
        policy.choose(inputs(everybody(num_validation=0 if r == 2 else 5), r))
    assert len(state_of(policy)["replay"]["reward"]) == 1


def test_exploration_falls_from_one():
    """Check the recorded epsilon of this round's choice: 1 until the agents learn, 0.05 after 30 % of the rounds.

    Two transitions are the warm-up of ten rounds; the second is complete in round 3.
    """
    policy = QMixMu()
    found = [policy.choose(inputs(everybody(), r, num_rounds=10)) for r in range(8)]
    assert [x["epsilon"] for x in found] == pytest.approx([1.0] * 4 + [1 - 0.95 / 3, 1 - 1.9 / 3, 0.05, 0.05])
    assert ["td_loss" in x for x in found] == [False] * 3 + [True] * 5


@pytest.mark.many
@pytest.mark.parametrize(("num_rounds", "warmup"), [(1, 1), (3, 1), (7, 1), (8, 2), (39, 9), (40, 10), (200, 10)])
def test_the_warm_up_leaves_three_quarters_of_the_rounds(num_rounds, warmup):
    policy = QMixMu()
    learnt = ["td_loss" in policy.choose(inputs(everybody(), r, num_rounds=num_rounds)) for r in range(num_rounds)]
    first = 2 + warmup - 1  # transition w is complete in round w + 1
    assert learnt == [r >= first for r in range(num_rounds)]
    again = QMixMu()
    again.load_state_dict(policy.state_dict())
    assert again._warmup == warmup


@pytest.mark.parametrize(("kind", "plain"), [(VdnMu, True), (QMixMu, False)])
def test_q_tot(kind, plain):
    policy = exploring(0.0, kind)
    value = policy.choose(inputs(everybody()))["q_tot"]
    agents = policy._agents
    (step,) = agents._pending
    values = agents.values(step)
    total = sum(values[site][int(a)] for site, a in zip(SITES, step.action, strict=True))
    assert (value == pytest.approx(total, abs=1e-6)) == plain
    assert value == agents.joint_value(step)


def test_only_who_is_asked_is_told():
    policy = exploring(1.0)
    policy.choose(inputs(everybody()))
    everything = policy.directives(SITES)
    assert set(everything) == set(SITES)
    assert policy.directives(["b"]) == {"b": everything["b"]}


# ------------------------------------------------------------------------------------------------ who takes part


@pytest.mark.parametrize("kind", [QMixMu, VdnMu])
def test_a_site_that_joins_later_is_refused(kind):
    policy = kind()
    assert policy.accepts("c") == ""  # nobody knows yet who takes part
    policy.choose(inputs({site: report() for site in ("a", "b")}, asked=("a", "b")))
    assert policy.accepts("a") == policy.accepts("b") == ""
    assert policy.accepts("c") == (
        "site 'c' joined after the first round; FedMRL has an agent for each site from the start ('a', 'b'): "
        "start a new run"
    )
    again = kind()
    again.load_state_dict(policy.state_dict())
    assert again.accepts("c") == policy.accepts("c")


def test_a_site_that_failed_in_the_first_round_has_an_agent():
    policy = exploring(1.0)
    policy.choose(inputs({site: report() for site in ("a", "b")}))
    assert policy.directives(SITES)["c"] == 1e-5
    assert policy.accepts("c") == ""
    assert state_of(policy)["settings"]["agents"] == list(SITES)
    told = []
    for r in range(1, 6):
        policy.choose(inputs(everybody(), r))
        told.append(policy.directives(SITES)["c"])
    assert set(told) != {1e-5}


# ------------------------------------------------------------------------------------------------ restarts


def scripted(policy, rounds) -> list[Any]:
    found = []
    for r in rounds:
        rng = np.random.default_rng(r)
        present = SITES if r != 3 else SITES[:2]
        reports = {
            site: report(
                accuracy=float(rng.random()),
                global_accuracy=float(rng.random()),
                entropy=None if r > 2 else float(-rng.random()),
                num_classes=None if r > 2 else 3 + r,
            )
            for site in present
        }
        samples = {site: int(rng.integers(1, 99)) for site in present}
        told = policy.directives(SITES)
        found.append((told, policy.choose(inputs(reports, r, num_rounds=9, samples=samples))))
    return found


def saved(policy) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (FixedMu, {}),
        (FixedMu, {"by_site": {"a": 0.5}}),
        (BanditMu, {"actions": [0.0, 0.05, 0.5]}),
        (QMixMu, {"actions": [0.0, 0.05, 0.5]}),
        *((kind, {}) for kind in choices(MuPolicy).values() if kind is not FixedMu),
    ],
)
def test_stopped_and_gone_on_is_as_if_never_stopped(kind, settings):
    """Compare a fresh object with a loaded state in every round with one that lives on; bit by bit."""
    whole = kind(**settings)
    expected = scripted(whole, range(9))
    parts = kind(**settings)
    for r in range(9):
        state = saved(parts)
        parts = kind(**settings)
        parts.load_state_dict(state)
        assert scripted(parts, [r]) == expected[r : r + 1]
    if kind in (QMixMu, VdnMu):
        assert "td_loss" in expected[-1][1]
        mine, theirs = state_of(parts), state_of(whole)
        assert all(torch.equal(mine["online"][name], theirs["online"][name]) for name in theirs["online"])


# ------------------------------------------------------------------------------------------------ too short a run


def steps_taken(policy) -> int:
    moments = state_of(policy)["optimizer"]
    return int(next(iter(moments.values()))["step"]) if moments else 0


@pytest.mark.parametrize("kind", [QMixMu, VdnMu])
@pytest.mark.parametrize(("num_rounds", "rounds", "enough"), [(5, 3, 27), (1, 0, 27), (26, 19, 27), (27, 20, None)])
def test_a_run_too_short_to_learn_says_so(kind, num_rounds, rounds, enough):
    """Check the numbers in the message, and that its remedy works."""
    policy = kind()
    learnt = 0
    for r in range(num_rounds):
        learnt += "td_loss" in policy.choose(inputs(everybody(), r, num_rounds=num_rounds))
    assert steps_taken(policy) == learnt * policy.updates
    if enough is None:
        assert learnt == rounds
        assert policy.warnings == []
        return
    (message,) = policy.warnings
    assert f"can learn in {learnt} of {num_rounds} rounds ({learnt * policy.updates} updates;" in message
    assert learnt == rounds
    assert f"take at least {enough} rounds, or a policy without agents" in message


@pytest.mark.parametrize("kind", [FixedMu, RandomMu, BanditMu])
def test_policies_without_agents_are_silent(kind):
    policy = kind()
    for r in range(2):
        policy.choose(inputs(everybody(), r, num_rounds=3))
    assert policy.warnings == []


# ------------------------------------------------------------------------------------------------ many sites


def test_a_refusal_names_a_few_of_many_sites():
    names = [f"s{k:03d}" for k in range(300)]
    policy = QMixMu()
    policy.choose(inputs({name: report() for name in names}, asked=names))
    shown = ", ".join(f"'s00{number}'" for number in range(8))
    assert f"({shown} and 292 more)" in policy.accepts("late")
