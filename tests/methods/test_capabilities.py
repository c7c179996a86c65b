"""Test the members of a rule: twelve, and optional behaviour is a class to inherit from."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from fairflare.methods.base import rule as room
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import Rule

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
CAPABILITIES = {
    cls
    for _, cls in inspect.getmembers(room, inspect.isclass)
    if issubclass(cls, Rule) and cls is not Rule and cls.__module__ == room.__name__
}
OF_SETTINGS = {"acts"}  # of any class with settings


def members(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")} - OF_SETTINGS


def test_a_rule_has_twelve_members_and_the_page_names_them() -> None:
    (table,) = re.findall(r"\| member \|.*?\n\n", PAGE, re.DOTALL)
    assert len(members(Rule)) == 12
    named = {name for row in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == members(Rule)


def test_every_capability_is_used_and_on_the_page() -> None:
    used = {base for method in all_methods().values() for base in method.rule.__mro__}
    (table,) = re.findall(r"\| capability \|.*?\n\n", PAGE, re.DOTALL)
    assert {cls.__name__ for cls in CAPABILITIES} <= {cls.__name__ for cls in used}
    for cls in CAPABILITIES:
        (row,) = (row for row in table.splitlines() if row.startswith(f"| `{cls.__name__}` |"))
        for name in members(cls) - {name for base in cls.__mro__[1:] for name in vars(base)}:
            assert f"`{name}`" in row, (cls.__name__, name)


@pytest.mark.parametrize("name", sorted(members(Rule)))
def test_every_member_has_two_users(name: str) -> None:
    """Check two users for each member; ``move`` is overridden by a capability that three methods share."""
    users = {
        cls for method in all_methods().values() for cls in method.rule.__mro__ if cls is not Rule and name in vars(cls)
    }
    assert len(users) >= (1 if name == "move" else 2), users
