"""The package keeps to the sizes of tools/budget.toml, and the tool that says so can say no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..loaded import loaded

tomllib = pytest.importorskip("tomllib")  # of Python 3.11


@pytest.fixture(scope="module")
def budget() -> Any:
    return loaded("tools/budget.py")


def test_the_package_is_within_its_budget(budget: Any) -> None:
    assert budget.broken(budget.measured(), tomllib.loads(budget.BUDGET.read_text(encoding="utf-8"))) == []


FILE = '''"""Of one room."""

import os


class Small:
    """Three statements: the class, the assignment and the call below."""

    x = 1  # a comment


print(os)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "one.py").write_text(FILE)
    return tmp_path


def test_counted_by_hand(budget: Any, package: Path) -> None:
    assert budget.measured(package) == {
        "statements": {"methods": 3}, "functions": {"methods": 0}, "folder": {"methods": 1},
        "lines": {"methods": 12}, "file": {"methods/one.py": 12},
        "class": {"methods/one.py:Small": 4}, "method": {"methods/one.py": 3},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"limits": {"file": 11, "class": 4, "method": 3, "folder": 1}}, "file methods/one.py: 12 lines, at most 11"),
        (
            {"limits": {"file": 12, "class": 3, "method": 3, "folder": 1}},
            "class methods/one.py:Small: 4 lines, at most 3",
        ),
        ({"limits": {"file": 12, "class": 4, "method": 2, "folder": 1}}, "method methods/one.py: 3 lines, at most 2"),
        ({"limits": {"file": 12, "class": 4, "method": 3, "folder": 0}}, "folder methods: 1 files, at most 0"),
        ({"larger": {"file": {"methods/one.py": 14}}}, "file methods/one.py needs no exception any more"),
        ({"larger": {"file": {"gone.py": 14}}}, "file gone.py needs no exception any more"),
        ({"rooms": {}}, "room 'methods' has no budget"),
        (
            {"rooms": {"methods": {"statements": 2, "functions": 0, "lines": 12}}},
            "room 'methods': 3 statements, at most 2",
        ),
        (
            {"rooms": {"methods": {"statements": 3, "functions": 0, "lines": 11}}},
            "room 'methods': 12 lines, at most 11",
        ),
    ],
)
def test_what_is_above_is_named(budget: Any, package: Path, changed: dict[str, Any], problem: str | None) -> None:
    fits = {"limits": {"file": 12, "class": 4, "method": 3, "folder": 1}, "larger": {}}
    rooms = {"rooms": {"methods": {"statements": 3, "functions": 0, "lines": 12}}}
    found = budget.broken(budget.measured(package), {**fits, **rooms, **changed})
    assert bool(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_an_exception_never_grows(budget: Any, package: Path) -> None:
    limits, sizes = {"file": 11, "class": 4, "method": 3, "folder": 1}, budget.measured(package)
    for old, kept in (({}, 12), ({"methods/one.py": 14}, 12), ({"methods/one.py": 11}, 11)):
        again = tomllib.loads(budget.written(sizes, {"limits": limits, "larger": {"file": old}}))
        assert again["larger"]["file"] == {"methods/one.py": kept}
        assert again["rooms"] == {"methods": {"statements": 10, "functions": 0, "lines": 50}}
