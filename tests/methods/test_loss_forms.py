"""Test TERM, PropFair and FedEBA+: worked numbers, losses at the edges, and names that are found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from fairflare.core.weighting import proportional_weights, tilted_weights
from fairflare.methods.base.catalog import get_method
from fairflare.methods.base.rule import RoundInputs, Rule
from fairflare.methods.loss_weights import LossWeights

SAMPLES = {"a": 50, "b": 30, "c": 20}
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}


def weights(rule: Rule, losses: Sequence[float], field: str = "probe_loss") -> list[float]:
    """Return a rule's weights of the sites a, b and c (fewer losses: fewer sites) in the order of their names."""
    reports: dict[str, dict[str, Any]] = {site: {field: loss} for site, loss in zip("abc", losses, strict=False)}
    found = rule.weigh(RoundInputs(0, 3, list(reports), SAMPLES, reports, {}, {}, {})).sites
    assert found is not None
    assert math.fsum(found.values()) == pytest.approx(1)
    return [found[site] for site in reports]


@pytest.mark.parametrize(
    ("settings", "losses", "wanted"),
    [
        ({}, (0.5, 1, 1.5), (0.482432, 0.304300, 0.213268)),
        ({"tilt": 1.0}, (0.5, 1, 1.5), (0.325040, 0.321540, 0.353420)),
        ({"tilt": 1.0, "weighting": "uniform"}, (0.5, 1, 1.5), (0.186324, 0.307196, 0.506480)),
        ({"tilt": -1.0}, (0.5, 1, 1.5), (0.661783, 0.240835, 0.097382)),
        ({"form": "prop_fair"}, (0.5, 1, 1.5), (0.322581, 0.290323, 0.387097)),
        ({"form": "prop_fair"}, (0.5, 1, 1.9), (0.204082, 0.183673, 0.612245)),  # with the slope 1 / M: 0.136364
        ({"form": "fed_eba_plus"}, (0.5, 1, 1.5), (0.179, 0.291944, 0.529056)),
        ({"form": "fed_eba_plus", "eba_tau": 5.0}, (0.5, 1, 1.5), (0.464757, 0.308181, 0.227062)),
        ({"tilt": 0.0}, (0.5, 1, 1.5), (0.5, 0.3, 0.2)),
        ({"tilt": 1.0}, (0.5, 1.5), (0.5 / (0.5 + 0.3 * math.e), 0.3 * math.e / (0.5 + 0.3 * math.e))),  # c is absent
    ],
)  # fmt: skip
def test_worked_numbers(settings: Any, losses: Any, wanted: Any) -> None:
    assert weights(LossWeights(**settings), losses) == pytest.approx(wanted, abs=6e-7)


@pytest.mark.parametrize("form", ["term", "prop_fair", "fed_eba_plus"])
def test_losses_at_the_edges(form: Any) -> None:
    """Check equal losses, none that is a number, one that is none, and losses as large as a report may have them."""
    rule = LossWeights(form=form, tilt=10.0)
    assert weights(rule, (0.7, 0.7, 0.7)) == pytest.approx(list(SHARES.values()))
    assert weights(rule, (math.nan,) * 3) == pytest.approx(list(SHARES.values()))
    assert weights(rule, (0.5, math.nan, 0.7)) == pytest.approx(weights(rule, (0.5, 0.6, 0.7)))
    assert weights(rule, (1e6, 1e6, 1e6)) == pytest.approx(list(SHARES.values()))
    assert weights(rule, (0.1, 0.1, 1e6))[2] > SHARES["c"]
    assert weights(rule, (0.3,)) == [1.0]


def test_a_higher_loss_never_weighs_less() -> None:
    """Check PropFair beyond its bound, where the authors' default weighs a site less the worse it is."""
    found = [proportional_weights(SHARES, {"a": 0.5, "b": 1.0, "c": 0.1 * n}, 2.0, 0.2)["c"] for n in range(40)]
    assert found == sorted(found)
    found = [tilted_weights(SHARES, {"a": 0.5, "b": 1.0, "c": 0.1 * n}, 2.0)["c"] for n in range(40)]
    assert found == sorted(found)


@pytest.mark.parametrize(("name", "method"), [("prop_fair", "loss_weights"), ("yogi", "fed_opt")])
def test_a_form_is_found_by_its_name(name: str, method: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{name}' is a form of .* '{method}': take {method} --set form={name}"):
        get_method(name)
