"""Describe settings for people: in ``fairflare describe``, the documentation and a recipe's arguments."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from fairflare.base.acting import never_acting
from fairflare.base.checks import group_by_key
from fairflare.base.settings import REQUIRED, default_of, describe_type, hints_of, parts_of, quote_names


@dataclasses.dataclass(frozen=True)
class Setting:
    """Describe one setting of a class as people read it.

    Attributes:
        name: the setting's name, in a part with the part's name in front (``mu_policy.gamma``).
        wanted: type and range (``a number in [0, 1)``).
        default: value that is used if the user gives none; ``None`` may mean "not set".
        required: whether the setting has no default.
        meaning: the setting's text in the class's docstring; literals stand in backticks.
        only: the kinds of a part that have the setting (``mu_policy=qmix, vdn``); empty if it is no setting of a part.
    """

    name: str
    wanted: str
    default: Any
    required: bool
    meaning: str
    only: str = ""


def describe_settings(cls: type, prefix: str = "") -> list[Setting]:
    """List the settings of a class that can act, each part followed by its own; one of several kinds is listed once."""
    described_settings: list[Setting] = []
    texts, vain = meanings(cls), never_acting(cls)
    for field in (field for field in dataclasses.fields(cls) if field.name not in vain):
        name, default, kinds = prefix + field.name, default_of(cls, field.name), parts_of(cls, field.name)
        wanted = f"one of {quote_names(kinds)}" if kinds else describe_type(hints_of(cls)[field.name])
        shown = None if default is REQUIRED else type(default).kind if kinds else default
        described_settings.append(Setting(name, wanted, shown, default is REQUIRED, texts.get(field.name, "")))
        alike = group_by_key(
            (repr(inner), (inner, kind))
            for kind, part in kinds.items()
            for inner in describe_settings(part, f"{name}.")
        )
        described_settings += [
            dataclasses.replace(pairs[0][0], only=f"{name}={', '.join(kind for _, kind in pairs)}")
            for pairs in alike.values()
        ]
    return described_settings


def markdown(described_settings: Sequence[Setting]) -> str:
    """Return settings (name, type, default, meaning) as a Markdown table for the docs."""
    rows = ["| setting | wanted | default | meaning |", "| --- | --- | --- | --- |"]
    for s in described_settings:
        default = "required" if s.required else "" if s.default in (None, "") else f"`{format_setting(s.default)}`"
        cells = [f"`{s.name}`", s.wanted, default, f"{s.meaning} (`{s.only}`)" if s.only else s.meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def format_setting(value: Any) -> str:
    """Return a value as the option ``--set`` accepts it: a text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def meanings(cls: type) -> dict[str, str]:
    """Return ``{setting: text}`` from the ``Args:`` of a class and its bases; the class's own texts override theirs."""
    texts: dict[str, str] = {}
    for base in cls.__mro__:
        block = re.search(
            r"^Args:\n((?:(?: {4}.*)?\n?)*)", inspect.cleandoc(vars(base).get("__doc__") or ""), re.MULTILINE
        )
        for names, meaning in re.findall(
            r"^ {4}(\w[^:\n]*):((?:.*\n?(?: {8}.*\n?|\n)*))", block[1] if block else "", re.MULTILINE
        ):
            plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", meaning.replace("``", "`"))
            texts = {**dict.fromkeys(re.split(", *", names), " ".join(plain.split())), **texts}
    return texts
