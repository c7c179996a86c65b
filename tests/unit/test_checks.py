"""Test the checks that the formulas share: accepted values, refused values, and messages."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fairflare.base import checks

PACKAGE = Path(checks.__file__).parents[1]


# numbers


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (0, {"low": 0}),
        (1, {"high": 1}),
        (-3.5, {}),
        (0.999, {"low": 0, "below": 1}),
        (1e-300, {"above": 0}),
        (4, {"low": 0, "below": 5, "whole": True}),
    ],
)
def test_numbers_in_range(value, limits):
    assert checks.number("x", value, **limits) == value


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (-1, {"low": 0}, "x must be finite and >= 0, got -1"),
        (0.0, {"above": 0}, "x must be finite and > 0, got 0.0"),
        (1.5, {"high": 1}, "x must be finite and <= 1, got 1.5"),
        (1, {"below": 1}, "x must be finite and < 1, got 1"),
        (0, {"above": 0, "high": 1}, r"x must be in \(0, 1\], got 0"),
        (1, {"low": 0, "below": 1}, r"x must be in \[0, 1\), got 1"),
        (math.nan, {}, "x must be a finite number, got nan"),
        (math.nan, {"low": 0, "high": 1}, r"x must be in \[0, 1\], got nan"),
        (-math.inf, {"high": 1}, "x must be finite and <= 1, got -inf"),
        (math.inf, {"low": 0}, "x must be finite and >= 0, got inf"),
        (10**400, {}, "x must be a finite number, got 1000"),
        (True, {}, "x must be a finite number, got True"),
        (None, {"low": 0}, "x must be finite and >= 0, got None"),
        ("0.5", {}, "x must be a finite number, got '0.5'"),
        (1j, {}, "x must be a finite number, got 1j"),
        (3.0, {"whole": True}, "x must be an integer, got 3.0"),
        (5, {"low": 0, "below": 5, "whole": True}, r"x must be an integer in \[0, 5\), got 5"),
        (torch.tensor(math.nan), {}, "x must be a finite number, got nan"),
        (torch.tensor([0.5]), {}, r"x must be a finite number, got tensor\(\[0.5"),
        (np.bool_(True), {}, "x must be a finite number, got True"),
    ],
)
def test_numbers_out_of_range(value, limits, message):
    with pytest.raises(ValueError, match=message):
        checks.number("x", value, **limits)


def test_a_long_value_is_cut():
    with pytest.raises(ValueError, match=r"^x must be a finite number, got .{80}$"):
        checks.number("x", "a" * 500)


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)]
)
def test_scalars_of_arrays_are_numbers(value):
    found = checks.number("x", value, low=0, high=1)
    assert (found, type(found)) == (0.5, float)


def test_whole():
    assert checks.whole("n", 1) == 1
    found = checks.whole("n", np.int64(3))
    assert (found, type(found)) == (3, int)
    for bad in (0, 2.0, True, "2"):
        with pytest.raises(ValueError, match=rf"n must be an integer >= 1, got {bad!r}"):
            checks.whole("n", bad)
    with pytest.raises(ValueError, match="n must be an integer >= 2, got 1"):
        checks.whole("n", 1, low=2)


def test_numbers_by_site():
    given_values = {"B": 2, "A": np.float32(0.5)}
    found = checks.numbers("loss", given_values, low=0)
    assert list(found.items()) == [("B", 2.0), ("A", 0.5)]
    assert all(type(value) is float for value in found.values())
    assert checks.numbers("loss", {}) == {}
    with pytest.raises(ValueError, match=r"loss of site 'A' must be finite and >= 0, got -0.5"):
        checks.numbers("loss", {"B": 1, "A": -0.5}, low=0)
    with pytest.raises(ValueError, match=r"counts of class 1 must be in \[0, 1\], got nan"):
        checks.numbers("counts", {0: 1, 1: math.nan}, of="class", low=0, high=1)


def test_shares():
    assert checks.shares({"B": 0.25, "A": 0.75}) == {"B": 0.25, "A": 0.75}
    assert checks.shares({"A": 1 + 9e-7}) == {"A": 1 + 9e-7}
    for bad in (1 + 2e-6, 1 - 2e-6):
        with pytest.raises(ValueError, match=r"^weights must sum to 1, got [01]\.\d+$"):
            checks.shares({"A": bad})
    with pytest.raises(ValueError, match=r"^weights of layer 'conv' must sum to 1, got 0.5$"):
        checks.shares({"A": 0.5}, of="layer 'conv'")
    with pytest.raises(ValueError, match=r"^weight of site 'B' must be finite and >= 0, got -0.5$"):
        checks.shares({"A": 1.5, "B": -0.5})
    with pytest.raises(ValueError, match=r"^weight of layer 'conv' of site 'A' must be finite and >= 0, got nan$"):
        checks.shares({"A": math.nan}, of="layer 'conv'")
    with pytest.raises(ValueError, match=r"^no site in weights$"):
        checks.shares({})


# names


def test_choice():
    assert checks.choice("mode", "mean", ("sum", "mean")) == "mean"
    with pytest.raises(ValueError, match=r"^mode must be one of 'sum', 'mean', got 'meen'; did you mean 'mean'\?$"):
        checks.choice("mode", "meen", ("sum", "mean"))
    with pytest.raises(ValueError, match=r"^mode must be one of 'sum', 'mean', got 3$"):
        checks.choice("mode", 3, ("sum", "mean"))


@pytest.mark.parametrize("values", [[0], {"": 0}, {0}, np.zeros(2), torch.zeros(1)])
def test_not_empty(values):
    assert checks.not_empty("x", values) is values
    empty = values[:0] if hasattr(values, "shape") else type(values)()
    with pytest.raises(ValueError, match=r"^no batch in x$"):
        checks.not_empty("x", empty, of="batch")


def test_same_names():
    checks.same_names("a", ["x", "y"], "b", {"y": 1, "x": 2})
    with pytest.raises(ValueError, match=r"^a and b must have the same sites; only in a: 'x'$"):
        checks.same_names("a", "xy", "b", "y")
    with pytest.raises(ValueError, match=r"^a and b must have the same layers; only in a: 'x'; only in b: 'p', 'q'$"):
        checks.same_names("a", "x", "b", "qp", of="layer")
    with pytest.raises(ValueError, match=r"only in b: 'A', 'B', 'C' and 2 more$"):
        checks.same_names("a", "", "b", "EDCBA")


# arrays


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_shapes(make):
    checks.shape("x", make(()))
    checks.shape("x", make((2, 0)), "n", "d")
    checks.shape("x", make((0,)), 0)
    checks.shape("x", make((4, 3)), 4, "d")
    for found, dims, message in (
        ((2,), (), r"x must be a scalar, got shape \(2,\)"),
        ((), ("n",), r"x must have shape \(n,\) with n >= 1, got \(\)"),
        ((3,), ("n", "d"), r"x must have shape \(n, d\) with n >= 1, got \(3,\)"),
        ((0, 3), ("n", "d"), r"x must have shape \(n, d\) with n >= 1, got \(0, 3\)"),
        ((2,), (3,), r"x must have shape \(3,\), got \(2,\)"),
        ((4, 2), (4, 3), r"x must have shape \(4, 3\), got \(4, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            checks.shape("x", make(found), *dims)


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_same_shape(make):
    checks.same_shape("x", make((2, 3)), "y", make((2, 3)))
    with pytest.raises(ValueError, match=r"^x has shape \(2, 3\), y has \(3, 2\)$"):
        checks.same_shape("x", make((2, 3)), "y", make((3, 2)))


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_indices(make):
    checks.indices("classes", make([0, 2, 1]), 3)
    checks.indices("classes", make([]), 3)
    for bad, got in (([0, 3], 3), ([[-100], [1]], -100), ([-1, 7], -1)):
        with pytest.raises(ValueError, match=rf"^classes must be in \[0, 3\), got {got}$"):
            checks.indices("classes", make(bad), 3)


# the rest of core


@pytest.mark.parametrize(
    ("room", "rooms"), [("base", ("fairflare.base.",)), ("core", ("fairflare.base.", "fairflare.core."))]
)
def test_base_and_core_import_none_of_the_rooms_above(room, rooms):
    outside = ("fairflare", "nvflare", "monai", "pydantic", "safetensors", "torchvision")
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            odd = [n for n in names if n.split(".")[0] in outside and not f"{n}.".startswith(rooms)]
            if path.name == "settings.py":  # declares, computes nothing
                odd = [n for n in odd if n.split(".")[0] != "pydantic"]
            assert not odd, f"{path.name} imports {odd}"
