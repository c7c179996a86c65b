"""Test settings that are declared once: accepted values, descriptions, and the way to a job folder and back."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.fuel.utils.class_utils import ModuleScanner, get_component_init_parameters
from nvflare.fuel.utils.component_builder import ComponentBuilder
from nvflare.job_config.api import FedJob
from pydantic import Field

from fairflare.base.checks import CLOSE, SHORTEST
from fairflare.base.described import describe_settings, markdown
from fairflare.base.settings import (
    BelowOne,
    Flag,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    Part,
    Positive,
    PositiveInt,
    Share,
    Whole,
    build,
    choices,
    describe_type,
    field_names,
    parts_of,
    settings,
    values_of,
)
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.methods.base.catalog import all_methods


@settings
class Spice(Part):
    """Base of spices."""


@settings
class Salt(Spice):
    """Plain.

    Args:
        grams: how much.
    """

    kind = "salt"
    grams: Positive = 1.5


@settings
class Herbs(Spice):
    """Green.

    Args:
        names: which.
        share: of the pot.
    """

    kind = "herbs"
    names: list[str] = dataclasses.field(default_factory=lambda: ["basil"])
    share: Share = 0.25


@settings
class Dish:
    """Anything cooked.

    Args:
        minutes: on the stove,
            at most an hour.
        warm, cold: how it is served | eaten.
    """

    minutes: PositiveInt = 10
    warm: Flag = True
    cold: Flag = False


@settings
class Soup(Dish):
    """With water.

    Args:
        litres: of water.
        spice: what goes in last.

    Source:
        Grandmother.
    """

    number: Number = 0.0
    litres: NonNegative = 1.0
    left: Fraction = 0.5
    rest: BelowOne = 0.5
    part: Share = 1.0
    guests: Whole = -1
    spoons: NonNegativeInt = 0
    size: Literal["small", "large"] = "small"
    pair: tuple[BelowOne, BelowOne] = (0.5, 0.75)
    layers: list[PositiveInt] = dataclasses.field(default_factory=lambda: [1, 2])
    prices: dict[str, PositiveInt] = dataclasses.field(default_factory=dict)
    offers: dict[str, PositiveInt] | None = None
    limit: PositiveInt | None = None
    note: str = ""
    spice: Spice = dataclasses.field(default_factory=Salt)

    def __post_init__(self) -> None:
        self.memory: list[int] = []
        if self.minutes > 60:
            raise ValueError("minutes: nobody waits that long")


class Stew(Soup):
    """Not decorated, as the class Task in a job folder."""


class Broth(Soup):
    """With an ``__init__`` of its own."""

    def __init__(self, bones: int = 3, **more: Any) -> None:
        super().__init__(**more)
        self.bones = bones


class Consomme(Broth):
    def __init__(self, eggs: int = 2, **more: Any) -> None:
        super().__init__(**more)
        self.eggs = eggs


@settings
class Needy:
    """Args: none."""

    must: PositiveInt
    also: int = Field(ge=2)
    may: int = 1
    might: float = Field(default=0.5, ge=0)


class Kettle:
    """No settings class at all."""

    def __init__(self, size: int = 2, sizes: tuple[int, ...] = (1, 2), hidden: int = 0) -> None:
        self.size, self.sizes = size, sizes


# ------------------------------------------------------------------------------------------------ values and ranges


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # not so of NaN


def _whole(value: Any) -> bool:
    return type(value) is int


#: Of each setting of :class:`Soup`: what it wants, and which values that are.
WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number", _number),
    "litres": ("a number >= 0", lambda v: _number(v) and v >= 0),
    "left": ("a number in [0, 1]", lambda v: _number(v) and 0 <= v <= 1),
    "rest": ("a number in [0, 1)", lambda v: _number(v) and 0 <= v < 1),
    "part": ("a number in (0, 1]", lambda v: _number(v) and 0 < v <= 1),
    "guests": ("an integer", _whole),
    "spoons": ("an integer >= 0", lambda v: _whole(v) and v >= 0),
    "minutes": ("an integer >= 1", lambda v: _whole(v) and v >= 1),
    "warm": ("true or false", lambda v: isinstance(v, bool)),
    "size": ("one of 'small', 'large'", lambda v: v in ("small", "large")),
    "limit": ("an integer >= 1 or nothing", lambda v: v is None or (_whole(v) and v >= 1)),
    "note": ("a text", lambda v: isinstance(v, str)),
    "layers": ("a list, each entry an integer >= 1", lambda v: v == []),
    "prices": ("a dict of a text to an integer >= 1", lambda v: v == {}),
    "offers": ("a dict of a text to an integer >= 1 or nothing", lambda v: v is None or v == {}),
    "pair": ("2 entries, each a number in [0, 1)", lambda v: False),
    "spice": ("a Spice (Salt, Herbs)", lambda v: False),
}
LIMITS = [0, 1, 0.0, 1.0, -1e-9, 1e-9, 1 - 1e-9, 1 + 1e-9, -1e300, math.nan, math.inf, -math.inf]
ODD = [None, True, False, "small", "large", "1", "true", [], {}]
ANYTHING = st.one_of(st.sampled_from([*LIMITS, *ODD]), st.integers(-3, 60), st.floats(), st.text(max_size=3))


@pytest.mark.parametrize("name", WANTED)
@given(value=ANYTHING)
def test_a_value_in_range_is_kept_and_any_other_refused_in_one_line(name: str, value: Any) -> None:
    words, fits = WANTED[name]
    if fits(value):
        for cls in (Soup, Stew, Broth):
            kept = getattr(cls(**{name: value}), name)
            assert kept == value
            assert type(kept) is (float if words.startswith("a number") else type(value))
        return
    names = ("small", "large") if name == "size" else ()  # most of the letters of one, or its first
    text = str(value).casefold()
    near = get_close_matches(text, names, cutoff=CLOSE) or [
        one for one in names if one[0] == text or (len(text) >= SHORTEST and one.startswith(text))
    ]
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    for cls in (Soup, Stew, Broth):
        with pytest.raises(ValueError) as caught:
            cls(**{name: value})
        assert str(caught.value) == f"{name} must be {words}, got {value!r:.80}{hint}"


def _beyond(words: str) -> list[Any]:
    """Return values just outside of a range in words."""
    ends = re.search(r"in ([\[(])(\S+), (\S+)([\])])", words) or re.search(r"(>=?|<=?) (\S+)", words)
    assert ends is not None, words
    if len(ends.groups()) == 4:
        low, high = float(ends[2]), float(ends[3])
        return [low - 1, high + 1, *([low] if ends[1] == "(" else []), *([high] if ends[4] == ")" else [])]
    end, up = float(ends[2]), ends[1].startswith(">")
    return [end - 1 if up else end + 1] + ([] if "=" in ends[1] else [end])


def refused_beyond(cls: type) -> int:
    """Return how many values just outside the declared ranges of a class were tried; each is refused in words."""
    tried = 0
    for setting in describe_settings(cls):
        if "." in setting.name or not re.fullmatch(r"an? (number|integer) (in|[<>]).*", setting.wanted):
            continue
        for value in _beyond(setting.wanted):
            asked: Any = int(value) if "integer" in setting.wanted else value
            said = rf"^{setting.name} (must be {re.escape(setting.wanted)}|is a fraction in \[0, 1\]), got "
            with pytest.raises(ValueError, match=said):
                cls(**{setting.name: asked})
            tried += 1
    return tried


def test_every_declared_range_is_the_one_that_holds() -> None:
    """Check each number of every method's halves and their parts, of a run and of the tasks."""
    tasks = map(load_task_class, TASKS_BY_KIND.values())
    halves = [half for method in all_methods().values() for half in (method.rule, method.training)]
    parts = [kind for half in halves for name in field_names(half) for kind in parts_of(half, name).values()]
    assert sum(map(refused_beyond, dict.fromkeys([*halves, *parts, *tasks, RunSettings]))) > 390


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pair": (0.5, 2)}, "pair must be 2 entries, each a number in [0, 1); entry 1 is 2"),
        ({"layers": [1, 0]}, "layers must be a list, each entry an integer >= 1; entry 1 is 0"),
        ({"prices": {"egg": 0}}, "prices must be a dict of a text to an integer >= 1; entry 'egg' is 0"),
        ({"offers": {"egg": 0}}, "offers must be a dict of a text to an integer >= 1 or nothing; entry 'egg' is 0"),
        ({"pair": (0.1, 0.2, 0.3)}, "pair must be 2 entries, each a number in [0, 1), got (0.1, 0.2, 0.3)"),
        ({"size": "smal"}, "size must be one of 'small', 'large', got 'smal'; did you mean 'small'?"),
        (
            {"minute": 1},
            "Soup has no setting 'minute'; did you mean 'minutes'? `fairflare describe METHOD` has all",
        ),
        ({"xyzzy": 1}, "Soup has no setting 'xyzzy'; `fairflare describe METHOD` has all"),
        ({"minutes": 61}, "minutes: nobody waits that long"),
    ],
)
def test_mistakes_name_setting_and_entry(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Soup(**given)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"^Needy needs the setting 'must'$"):
        Needy(also=2)
    found = Needy(must=2, also=3)
    assert (found.may, found.also, found.might) == (1, 3, 0.5)


def test_a_field_of_pydantics_has_a_default_or_none() -> None:
    @settings
    class Pot:
        lid: PositiveInt = Field()
        handles: list[PositiveInt] | Literal["none"] = Field(default_factory=lambda: [2])

    assert [(s.name, s.default, s.required) for s in describe_settings(Pot)] == [
        ("lid", None, True),
        ("handles", [2], False),
    ]
    with pytest.raises(ValueError, match=r"^handles must be a list, each entry .* or 'none', got 0$"):
        Pot(lid=1, handles=[0])


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError, match=r"Soup\.__init__\(\) takes 1 positional argument"):
        Soup(3)  # type: ignore[misc]


def test_a_bug_in_post_init_is_no_wrong_setting() -> None:
    @settings
    class Broken:
        x: int = 1

        def __post_init__(self) -> None:
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        Broken()


def test_defaults_are_not_shared() -> None:
    first, second = Soup(), Soup()
    first.layers.append(9)
    first.memory.append(1)
    assert second.layers == [1, 2]
    assert second.memory == []
    assert first.spice is not second.spice


def test_it_travels_through_pickle() -> None:
    soup = pickle.loads(pickle.dumps(Broth(bones=7, litres=2, spice=Herbs(share=0.5))))
    assert (soup.bones, soup.litres, soup.spice.share, soup.minutes) == (7, 2.0, 0.5, 10)
    assert type(soup) is Broth


# ------------------------------------------------------------------------------------------------ in words


def test_described_has_type_default_and_meaning_also_the_inherited() -> None:
    found = {s.name: s for s in describe_settings(Soup)}
    assert describe_settings(Stew) == describe_settings(Soup)
    assert list(found)[:4] == ["minutes", "warm", "cold", "number"]
    assert (found["minutes"].wanted, found["minutes"].default, found["minutes"].required) == (
        "an integer >= 1", 10, False,
    )  # fmt: skip
    assert found["minutes"].meaning == "on the stove, at most an hour."
    assert found["warm"].meaning == found["cold"].meaning == "how it is served | eaten."
    assert found["litres"].meaning == "of water."
    assert found["spice"].meaning == "what goes in last."
    assert found["number"].meaning == ""
    assert found["spice"].wanted == "one of 'salt', 'herbs'"
    assert found["spice"].default == "salt"
    assert found["spice.grams"].only == "spice=salt"
    assert found["spice"].only == found["minutes"].only == ""
    assert found["spice.share"].wanted == "a number in (0, 1]"
    assert found["spice.names"].default == ["basil"]
    assert found["limit"].default is None
    assert not found["limit"].required
    assert [(s.name, s.required, s.default) for s in describe_settings(Needy)] == [
        ("must", True, None), ("also", True, None), ("may", False, 1), ("might", False, 0.5),
    ]  # fmt: skip


def test_markdown_is_one_table_row_a_setting() -> None:
    lines = markdown(describe_settings(Soup)).splitlines()
    assert lines[:2] == ["| setting | wanted | default | meaning |", "| --- | --- | --- | --- |"]
    assert len(lines) == 2 + len(describe_settings(Soup))
    assert "| `warm` | true or false | `true` | how it is served \\| eaten. |" in lines
    assert "| `spice.grams` | a number > 0 | `1.5` | how much. (`spice=salt`) |" in lines
    assert "| `limit` | an integer >= 1 or nothing |  |  |" in lines
    assert "| `must` | an integer >= 1 | required |  |" in markdown(describe_settings(Needy))
    for line in lines:
        assert line.replace("\\|", "").count("|") == 5


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Any, "anything"),
        (Kettle, "Kettle"),
        (Soup | None, "Soup or nothing"),
        (Soup, "Soup"),
        (dict, "a dict"),
        (list, "a list"),
        (dict[int, float], "a dict of an integer to a number"),
        (dict[Annotated[str, Field(min_length=1)], str | None], "a dict of a text, not empty to a text or nothing"),
        (Annotated[list[int], Field(min_length=2)], "a list, each entry an integer, at least 2"),
        (Annotated[list[int], Field(min_length=3, max_length=3)], "a list, each entry an integer of 3"),
        (Annotated[int, Field(multiple_of=8, ge=16)], "a multiple of 8 >= 16"),
        (Annotated[float, Field(gt=1)], "a number > 1"),
        (Annotated[float, Field(lt=1)], "a number < 1"),
        (Annotated[float, Field(le=1)], "a number <= 1"),
        (Literal["one"], "'one'"),
        (int | Literal["auto"] | None, "an integer or 'auto' or nothing"),
        (set[str], "a list, each entry a text"),
    ],
)
def test_types_in_words(hint: Any, words: str) -> None:
    assert describe_type(hint) == words


# ------------------------------------------------------------------------------------------------ parts


def test_kinds_of_a_part() -> None:
    assert choices(Spice) == {"salt": Salt, "herbs": Herbs}
    assert parts_of(Soup, "spice") == {"salt": Salt, "herbs": Herbs}
    assert parts_of(Soup, "minutes") == {}
    assert parts_of(Soup, "nothing") == {}


def test_parts_are_equal_by_kind_and_values() -> None:
    assert Salt(grams=2) == Salt(grams=2)
    assert Salt(grams=2) != Salt(grams=1)
    assert Salt() != Herbs()


def test_build_chooses_and_sets_parts() -> None:
    assert type(build(Soup, {}).spice) is Salt
    assert type(build(Soup, {"spice": "herbs"}).spice) is Herbs
    changed = build(Soup, {"spice.grams": 3, "minutes": 5})
    assert (type(changed.spice), changed.spice.grams, changed.minutes) == (Salt, 3.0, 5)
    herbs = build(Soup, {"spice": "herbs", "spice.share": 1, "spice.names": ["mint"]}).spice
    assert (herbs.share, herbs.names) == (1.0, ["mint"])
    own = Herbs()
    assert build(Soup, {"spice": own}).spice is own


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spice": "herb"}, "spice must be one of 'salt', 'herbs', got 'herb'; did you mean 'herbs'?"),
        ({"spice": "salt", "spice.share": 1}, "spice=salt: Salt has no setting 'share'; Available: grams"),
        ({"spice.grams": 0}, "spice=salt: grams must be a number > 0, got 0"),
        ({"spicy.grams": 1}, "Soup has no part 'spicy'; did you mean 'spice'?"),
        ({"minutes.x": 1}, "Soup has no part 'minutes'"),
        ({"minutes": 0}, "minutes must be an integer >= 1, got 0"),
    ],
)
def test_wrong_parts_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        build(Soup, given)


# ------------------------------------------------------------------------------------------------ FLARE and back

FIELDS = [
    "minutes", "warm", "cold", "number", "litres", "left", "rest", "part", "guests", "spoons", "size", "pair",
    "layers", "prices", "offers", "limit", "note", "spice",
]  # fmt: skip


def test_flare_sees_every_setting() -> None:
    for component in (Soup(), Stew()):
        parameters = get_component_init_parameters(component)
        assert list(parameters) == ["self", *FIELDS]
        assert parameters["litres"].default == 1.0
    assert field_names(Stew) == FIELDS
    assert sorted(field_names(Consomme)) == sorted(["eggs", "bones", *FIELDS])
    assert set(get_component_init_parameters(Consomme())) == {"self", "eggs", "bones", *FIELDS}
    assert field_names(Kettle) == ["size", "sizes", "hidden"]


def test_values_of_is_what_json_gives_back() -> None:
    values = values_of(Soup(pair=(0, 0.5), prices={"egg": 1}, spice=Herbs()))
    assert json.loads(json.dumps(values)) == values
    assert values["path"] == f"{__name__}.Soup"
    assert values["args"]["spice"] == {"path": f"{__name__}.Herbs", "args": {"names": ["basil"], "share": 0.25}}
    assert values["args"]["pair"] == [0.0, 0.5]
    assert "memory" not in values["args"]
    assert values_of(Broth(bones=5, minutes=6))["args"].items() >= {"bones": 5, "minutes": 6}.items()


def test_values_of_a_plain_class_are_what_it_keeps() -> None:
    """Check a user's own task, whose changed arguments a resume must notice."""
    assert values_of(Kettle(size=3)) == {"path": f"{__name__}.Kettle", "args": {"size": 3, "sizes": [1, 2]}}


class Builder(ComponentBuilder):
    """Run FLARE's own builder, as its job configurators do."""

    def get_module_scanner(self) -> ModuleScanner:
        return ModuleScanner([], [], True)


def exported(component: Any, folder: Path) -> dict[str, Any]:
    job = FedJob(name="cooking", min_clients=1)
    job.to_server(component, id="it")
    job.export_job(str(folder))
    text = (folder / "cooking" / "app_server" / "config" / "config_fed_server.json").read_text()
    (config,) = [c for c in json.loads(text)["components"] if c["id"] == "it"]
    return config


@pytest.mark.parametrize(
    "component",
    [
        Soup(minutes=3, pair=(0, 0.25), layers=[4], prices={"egg": 2}, limit=8, spice=Herbs(names=["mint"], share=1)),
        Soup(),
        Stew(size="large", spice=Salt(grams=2)),
        Broth(bones=9, minutes=4, spice=Herbs()),
        Consomme(eggs=1, bones=2, warm=False),
    ],
    ids=lambda c: type(c).__name__,
)
def test_round_trip_through_a_job_folder(component: Any, tmp_path: Path) -> None:
    config = exported(component, tmp_path)
    again = Builder().build_component(json.loads(json.dumps(config)))
    assert type(again) is type(component)
    assert values_of(again) == values_of(component)
    assert type(again.spice) is type(component.spice)


def test_a_job_folder_shows_defaults_but_not_what_is_unset(tmp_path: Path) -> None:
    config = exported(Soup(), tmp_path)
    assert list(config["args"]) == [name for name in FIELDS if name not in ("limit", "offers")]
    assert config["args"]["minutes"] == 10
    assert config["args"]["spice"] == {"path": f"{__name__}.Salt", "args": {"grams": 1.5}}
