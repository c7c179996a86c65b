"""Test that the packages keep to the sizes of tools/budget.toml, and that the tool can refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..loaded import loaded

tomllib = pytest.importorskip("tomllib")  # of Python 3.11


@pytest.fixture(scope="module")
def budget() -> Any:
    return loaded("tools/budget.py")


def test_the_packages_are_within_their_budget(budget: Any) -> None:
    assert budget.broken(budget.measured(), tomllib.loads(budget.BUDGET.read_text(encoding="utf-8"))) == []


METHOD = '''"""Of one room."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairflare.base import hinted


class Small:
    """Five statements: the condition above, the class, the function, the assignment and the call below."""

    def late(self):
        from fairflare.base.used import x
        y = x


print(os)
'''
FILES = {
    "fairflare/methods/one.py": METHOD,
    "fairflare/base/used.py": "x = 1\nz = 2",
    "fairflare/base/hinted.py": "x = 1",
    "fairflare/examples/own.py": "x = 1",
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


FITS: dict[str, Any] = {
    "whole": 8, "closure": 7, "limits": {"file": 18, "folder": 2}, "larger": {},
    "rooms": {"fairflare/methods": 5, "fairflare/base": 3},
}  # fmt: skip


def test_counted_by_hand(budget: Any, packages: Path) -> None:
    assert budget.measured(packages) == {
        "whole": 8, "closure": 7, "rooms": FITS["rooms"],
        "folder": {"fairflare/methods": 1, "fairflare/base": 2, "fairflare/examples": 1},
        "file": dict(zip(sorted(FILES), (1, 2, 1, 18), strict=True)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"whole": 7}, "whole: 8 statements, at most 7"),
        ({"closure": 6}, "closure: 7 statements, at most 6"),
        ({"rooms": {"fairflare/methods": 4, "fairflare/base": 3}}, "room fairflare/methods: 5 statements, at most 4"),
        ({"rooms": {"fairflare/methods": 5}}, "room fairflare/base: 3 statements, at most 0"),
        ({"limits": {"file": 17, "folder": 2}}, "file fairflare/methods/one.py: 18 lines, at most 17"),
        ({"limits": {"file": 18, "folder": 1}}, "folder fairflare/base: 2 files, at most 1"),
        ({"limits": {"file": 18, "folder": 1}, "larger": {"fairflare/base": 2}}, None),
    ],
)
def test_what_is_above_is_named(budget: Any, packages: Path, changed: dict[str, Any], problem: str | None) -> None:
    assert budget.broken(budget.measured(packages), {**FITS, **changed}) == ([] if problem is None else [problem])


def test_writing_only_lowers(budget: Any, packages: Path) -> None:
    rooms = {"fairflare/methods": 4, "fairflare/base": 9}
    old = {**FITS, "whole": 7, "closure": 100, "larger": {"fairflare/base": 5, "gone": 3}, "rooms": rooms}
    again = tomllib.loads(budget.written(budget.measured(packages), old))
    assert (again["whole"], again["closure"], again["larger"]) == (7, 7, {"fairflare/base": 2})
    assert again["rooms"] == {"fairflare/methods": 4, "fairflare/base": 3}
