"""Test FedHEAL: worked numbers, masks, an entry's own weights, bounds, absent sites, and a run that is killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.base.site_run import SiteStore
from fairflare.methods.fed_heal import ConsistentTraining, FedHEAL

from .own import Plane, killed, run

HALF: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 8, "keep_optimizer_state": False}


def inputs(changes: dict[str, list[float]], **more: Any) -> RoundInputs:
    states = {site: {"w": torch.tensor(change)} for site, change in changes.items()}
    some = next(iter(changes.values()))
    return RoundInputs(
        0, 1, sorted(changes), dict.fromkeys(changes, 1.0), {}, {}, states, {"w": ""},
        received={"w": torch.zeros(len(some))}, parameters={"w"}, **more,
    )  # fmt: skip


def test_worked_weights_and_absent_sites() -> None:
    rule, far = FedHEAL(), {"a": [1.0], "b": [2.0], "c": [5.0]}
    for expected in ((0.273810, 0.309524, 0.416667), (0.227124, 0.290850, 0.482026)):
        weights = rule.weigh(inputs(far)).sites
        assert [*(weights or {}).values()] == pytest.approx(expected, abs=1e-6)
    before = rule.state_dict()
    same = rule.weigh(inputs({"a": [0.0], "b": [0.0]})).sites
    assert rule.state_dict() == before  # updates of zeros keep p, and the absent site its own
    assert (same or {})["b"] == pytest.approx(0.290850 / (0.227124 + 0.290850), abs=1e-5)


def moved(rule: FedHEAL, changes: dict[str, list[float]], **more: Any) -> list[float]:
    """Return the step that a rule makes of the weighted mean of these changes."""
    weights = rule.weigh(inputs(changes, **more)).sites or {}
    mean = sum(weights[site] * torch.tensor(change, dtype=torch.float64) for site, change in changes.items())
    return rule.move({"w": torch.as_tensor(mean)})["w"].tolist()


def test_an_entry_is_the_mean_of_the_sites_that_sent_it() -> None:
    """Check the step .285714 of the changes .2 and .4, with p (.4, .3, .3), where the third site sends 0."""
    rule = FedHEAL(heal_beta=0.0)
    rule.load_state_dict({"weights": {"a": 0.4, "b": 0.3, "c": 0.3}, "momentum": {}})
    changes = {"a": [0.2, 0.0, 0.0], "b": [0.4, 0.0, 0.0], "c": [0.0, 0.0, 0.7]}
    assert moved(rule, changes) == pytest.approx([0.285714, 0.0, 0.7], abs=1e-6)
    capped = moved(rule, changes, bounded=lambda weights: {s: min(w, 0.5) for s, w in weights.items()})
    assert capped == pytest.approx([0.2 / 0.8, 0.0, 0.7 / 2], abs=1e-6)  # at an entry, too, no site exceeds the bound
    assert rule.move({"w": torch.ones(1)})["w"].tolist() == [1.0]  # nothing of a round is left behind


def test_a_length_that_others_do_not_have_is_moderated() -> None:
    rule = FedHEAL()
    found = rule.weigh(replace(inputs({"a": [1.0], "b": [99.0]}), moderated=lambda values, name: {"a": 1, "b": 2}))
    assert found.details["length"] == {"a": 1, "b": 2}


def test_masks_are_those_of_a_loop_and_statistics_are_never_left_out(tmp_path: Path) -> None:
    """Check seven rounds of which the site misses one, number by number; changes of 0 count as the falling ones."""
    half, model, store = ConsistentTraining(), Plane().build_model(), SiteStore(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    rng, start = torch.Generator().manual_seed(3), {n: t.clone() for n, t in model.state_dict().items()}
    fell: dict[tuple[str, int], list[bool]] = {}
    masked = 0
    for current_round in (0, 1, 2, 4, 5, 6, 7):
        move = {n: torch.randint(-1, 3, t.shape, generator=rng) / 4 for n, t in start.items()}
        local = {n: t + move[n].to(t.dtype) for n, t in start.items()}
        run: Any = SimpleNamespace(store=store, current_round=current_round)
        update = half.home.finish(run, model, start, local)
        for name, parameter in model.state_dict().items():
            whole, sent = (local[name] - start[name]).flatten().tolist(), update[name].flatten().tolist()
            for entry in range(parameter.numel()):
                past = fell.setdefault((name, entry), [])
                now = whole[entry] <= 0
                agreed = not past or sum(one == now for one in past) / len(past) > 0.3
                kept = agreed or name.split(".")[1] not in ("weight", "bias")
                assert sent[entry] == (whole[entry] if kept else 0), (current_round, name, entry)
                masked += not kept
                past.append(now)
    assert masked > 50


def test_a_direction_as_rare_as_the_bound_is_not_sent(tmp_path: Path) -> None:
    """Check the paper's "above tau": of two rounds the entry rose in one, a share of .5, with tau .5."""
    half, model, store = ConsistentTraining(heal_tau=0.5), Plane().build_model(), SiteStore(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    start = {n: t.clone() for n, t in model.state_dict().items()}
    for current_round, step in enumerate((1.0, -1.0, 1.0)):
        local = {n: t + torch.tensor(step).to(t.dtype) for n, t in start.items()}
        run: Any = SimpleNamespace(store=store, current_round=current_round)
        update = half.home.finish(run, model, start, local)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and n in update}
    assert trained
    assert all((update[name] == 0).all() for name in trained)


def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    half, task = ConsistentTraining(**HALF), Plane()
    whole, _ = run(tmp_path / "whole", half, task=task, rule=FedHEAL(), num_rounds=4)

    rest = killed(tmp_path / "cut", half, task, FedHEAL(), 4)
    found = whole.model()["model"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in rest.model()["model"].items())
