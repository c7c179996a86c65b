"""Test weightings as parts of a rule: their weights, and the resume of a map."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairflare.base.described import describe_settings
from fairflare.base.settings import build, choices, field_names, settings, values_of
from fairflare.core.som import SelfOrganizingMap
from fairflare.methods.parts.weightings import BySamples, BySom, Uniform, Weighting

pytestmark = pytest.mark.usefixtures("one_thread")

SITES = ("a", "b", "c")


def inputs(current_round: int = 0, sites: tuple[str, ...] = SITES, *, received: bool = True, **changed: Any) -> Any:
    generator = torch.Generator().manual_seed(100 * current_round)
    base = {
        "conv.weight": torch.randn(4, 3, generator=generator),
        "norm.running_var": torch.ones(3),
        "fc.bias": torch.randn(5, generator=generator),
    }
    states = {
        site: {name: t + 0.3 * (k + 1) * torch.randn(t.shape, generator=generator) for name, t in base.items()}
        for k, site in enumerate(sites)
    }
    found = {
        "current_round": current_round,
        "num_rounds": 6,
        "sites": sorted(sites),
        "num_samples": {site: 10 * (k + 1) for k, site in enumerate(sites)},
        "states": states,
        "received": base if received else None,
        "seed": 0,
        "changing": lambda state: state,
    }
    return SimpleNamespace(**{**found, **changed})


def saved(weighting: Weighting) -> dict[str, Any]:
    """Return the state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(weighting.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


# each kind


def test_by_samples():
    weights, details = BySamples().weigh(inputs(received=False))
    assert weights == pytest.approx({"a": 1 / 6, "b": 2 / 6, "c": 3 / 6}, rel=1e-15)
    assert details == {}
    assert BySamples().weigh(inputs(num_samples={"a": 0, "b": 0, "c": 0}))[0] == pytest.approx(
        dict.fromkeys(SITES, 1 / 3)
    )
    assert BySamples().weigh(inputs(num_samples={"a": 2, "b": 2, "c": 4, "absent": 99}))[0]["c"] == 0.5


def test_uniform():
    weights, details = Uniform().weigh(inputs(received=False, num_samples={"a": 2, "b": 2, "c": 4, "absent": 99}))
    assert weights == dict.fromkeys(SITES, 1 / 3)
    assert details == {}


@pytest.mark.parametrize("settings_", [
    {},
    {"grid": [3, 2], "init": "uniform", "sigma_0": 1.1, "kappa": 0.4, "sigma_min": 0.9, "eta": 0.3,
     "epochs": 2, "sigma_w": 0.5},
])  # fmt: skip
def test_by_som_is_the_map(settings_):
    """Check that every setting reaches the map, and that neurons go from round to round."""
    weighting, map_ = BySom(**settings_), SelfOrganizingMap(**settings_)
    kept: Any = None
    for r in range(3):
        given = inputs(r)
        weights, details = weighting.weigh(given)
        written: dict[str, torch.Tensor] = {}
        expected = map_.step(given.states, given.received, kept=kept, keep=written.__setitem__)
        kept = written
        assert weights == expected.weights
        assert details["som"]["bmu"] == {site: list(cell) for site, cell in expected.bmu.items()}
        assert details["som"]["sigma"] == expected.sigma
        json.dumps(details, allow_nan=False)


def test_kinds_and_settings():
    assert choices(Weighting) == {"samples": BySamples, "som": BySom, "uniform": Uniform}
    assert [cls.needs_received for cls in (BySamples, Uniform, BySom)] == [False, False, True]
    assert field_names(BySamples) == field_names(Uniform) == []
    assert "memory_folder" not in field_names(BySom)
    assert all(setting.meaning for setting in describe_settings(BySom))
    again = BySom(**values_of(BySom(grid=[3, 4], eta=0.25))["args"])
    assert (again.grid, again.eta) == ((3, 4), 0.25)

    @settings
    class Rule:
        weighting: Weighting = BySamples()

    rule = build(Rule, {"weighting": "som", "weighting.grid": [2, 2]})
    assert isinstance(rule.weighting, BySom)
    assert rule.weighting.grid == (2, 2)
    with pytest.raises(ValueError, match="did you mean 'som'"):
        build(Rule, {"weighting": "soms"})


def test_a_map_needs_the_received_model():
    with pytest.raises(RuntimeError, match="the map needs the model"):
        BySom().weigh(inputs(received=False))


# sites


@pytest.mark.parametrize("kind", [BySamples, Uniform, BySom])
def test_one_site(kind):
    weighting = kind()
    for r in range(3):
        assert weighting.weigh(inputs(r, ("only",)))[0] == {"only": 1.0}


def test_an_excluded_site_has_no_weight_and_no_place():
    one, other = BySom(), BySom()
    for r in range(3):
        given = inputs(r)
        without = inputs(r, sites=["a", "c"], states={site: given.states[site] for site in "ac"})
        without.received = given.received
        given.states["b"]["fc.bias"][2] = math.nan
        weights, details = one.weigh(given)
        expected, expected_details = other.weigh(without)
        assert weights == {"a": expected["a"], "b": 0.0, "c": expected["c"]}
        assert details == expected_details
        assert set(details["som"]["bmu"]) == {"a", "c"}


def test_only_the_sites_of_the_round_count():
    given = inputs()
    more = inputs(states={**given.states, "late": given.states["a"]})
    assert BySom().weigh(more) == BySom().weigh(given)


# from round to round


@pytest.mark.parametrize("on_disk", [False, True])
def test_resumed_in_the_middle(tmp_path, on_disk):
    """Check equal bits; with a folder the neurons stay there, without one they are in the state."""

    def new(folder: Path) -> BySom:
        weighting = BySom()
        weighting.memory_folder = folder if on_disk else None
        return weighting

    whole, first = new(tmp_path / "whole"), new(tmp_path / "resumed")
    expected = [whole.weigh(inputs(r)) for r in range(5)]
    assert [first.weigh(inputs(r)) for r in range(2)] == expected[:2]
    state = saved(first)
    assert (state["neurons"] is None) == on_disk
    first.weigh(inputs(2))  # and died before this round was over: its neurons lie in the folder too
    if not on_disk:
        del first  # takes its temporary folder along
    second = new(tmp_path / "resumed")
    second.load_state_dict(state)
    assert [second.weigh(inputs(r)) for r in (2, 3, 4)] == expected[2:]
    assert saved(second)["map"] == {"settings": {"grid": [5, 5], "seed": 0}, "rounds": 5}
    assert (tmp_path / "resumed").exists() == on_disk


def test_a_state_is_a_copy():
    """Check that the state in a checkpoint does not change with the next round."""
    weighting = BySom()
    weighting.weigh(inputs(0))
    state = weighting.state_dict()
    before = copy.deepcopy(state)
    weighting.weigh(inputs(1))
    assert state["map"] == before["map"]
    assert {name: t.tolist() for name, t in state["neurons"].items()} == {
        name: t.tolist() for name, t in before["neurons"].items()
    }
    assert {name: tuple(t.shape) for name, t in before["neurons"].items()} == {
        "conv.weight": (25, 4, 3), "fc.bias": (25, 5)
    }  # fmt: skip


def test_a_state_before_the_first_round():
    weighting = BySom()
    weighting.load_state_dict(saved(BySom()))
    assert weighting.weigh(inputs()) == BySom().weigh(inputs())
    with pytest.raises(ValueError, match="state is of a map with grid"):
        BySom(grid=(2, 2)).load_state_dict(saved(BySom()))
    for kind in (BySamples, Uniform):
        kind().load_state_dict(saved(kind()))


def test_neurons_that_are_gone_are_missed(tmp_path):
    weighting = BySom()
    weighting.memory_folder = tmp_path
    for r in range(4):
        weighting.weigh(inputs(r))
        assert len(list((tmp_path / "som").iterdir())) <= 2
    assert sorted(p.name for p in (tmp_path / "som").iterdir()) == ["000003", "000004"]
    elsewhere = BySom()
    elsewhere.memory_folder = tmp_path / "elsewhere"
    elsewhere.load_state_dict(weighting.state_dict())
    with pytest.raises(RuntimeError, match=r"neurons after 4 round.*elsewhere"):
        elsewhere.weigh(inputs(4))


def test_a_failed_round_can_be_repeated(tmp_path):
    one, other = BySom(), BySom()
    one.memory_folder, other.memory_folder = tmp_path / "one", tmp_path / "other"
    for r in range(3):
        expected = other.weigh(inputs(r))
        broken = inputs(r)
        for site in SITES:
            broken.states[site]["fc.bias"] = torch.full((5,), math.inf)
        with pytest.raises(ValueError, match="no site has a finite model"):
            one.weigh(broken)
        assert one.weigh(inputs(r)) == expected
