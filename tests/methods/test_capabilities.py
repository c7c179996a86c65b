"""Test the members of a rule: thirteen, and optional behaviour is a class to inherit from."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fairflare.base.settings import build
from fairflare.methods.base import rule as room
from fairflare.methods.base.catalog import all_methods, get_method, sums_of
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.saved import KeepsState

from ..federation.examples import SITES, anchor_message, begun, take, train_message

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
CAPABILITIES = {
    cls
    for _, cls in inspect.getmembers(room, inspect.isclass)
    if issubclass(cls, Rule) and cls is not Rule and cls.__module__ == room.__name__
}
OF_SETTINGS = {"acts"}  # of any class with settings
OF_RUN = {"memory_folder", "secure"}  # which the run sets


def members(cls: type) -> set[str]:
    names = {*vars(cls), *(vars(KeepsState) if cls is Rule else ())}
    return {name for name in names if not name.startswith("_")} - OF_SETTINGS - OF_RUN


def test_a_rule_has_thirteen_members_and_the_page_names_them() -> None:
    (table,) = re.findall(r"\| member \|.*?\n\n", PAGE, re.DOTALL)
    assert len(members(Rule)) == 13
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
        cls
        for method in all_methods().values()
        for cls in method.rule.__mro__
        if cls not in (Rule, KeepsState) and name in vars(cls)
    }
    assert len(users) >= (1 if name == "move" else 2), users


def test_methods_whose_models_can_stay_at_the_sites() -> None:
    said = {name: sums_of(method) for name, method in all_methods().items()}
    assert [name for name, what in said.items() if what == "two sums"] == [
        "fed_lwr", "fed_lwr_cosine", "fed_lwr_last_layer",
    ]  # fmt: skip
    reads = {name: what for name, what in said.items() if what.startswith("no: ")}
    assert list(reads) == [
        "cffl", "cgsv", "fed_awa", "fed_ce", "fed_heal", "fed_lf", "fed_mgda", "fed_mrl", "scaffold",
    ]  # fmt: skip
    assert reads["fed_ce"] == "no: it compares each site's update with those of the others"
    assert said.keys() - reads.keys() >= {"fed_avg", "fed_ism_plus_l", "fed_opt", "group_dro", "fed_mas"}


@pytest.mark.parametrize("name", [name for name, method in all_methods().items() if "no" not in sums_of(method)])
def test_a_method_of_sums_weighs_without_any_model(name: str) -> None:
    method = get_method(name)
    rule = build(method.rule, method.server)
    rule.secure = True
    collector = begun(rule)
    for site in SITES:
        take(collector, site, train_message(site, rule=rule))
        if sums_of(method) == "two sums":
            collector.keep_anchor(site, collector.read_anchor(site, anchor_message(site, rule)))
    weighing = rule.weigh(replace(collector.inputs(), states={}))
    assert all(sum(by.values()) == pytest.approx(1) for by in (weighing.layers or {"": weighing.sites or {}}).values())


def test_some_settings_of_a_method_read_models() -> None:
    for name, settings, reads in (
        ("afl", {"afl_mode": "argmax"}, True), ("afl", {}, False), ("q_fed_avg", {"q_form": "weighted"}, False),
        ("fed_mrl", {"weighting": "samples"}, False), ("fed_mrl", {}, True),
    ):  # fmt: skip
        assert bool(build(get_method(name).rule, settings).reads_models) is reads, (name, settings)
