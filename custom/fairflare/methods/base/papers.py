"""The papers' experiments as ``fairflare/papers/*.yaml`` has them: settings with their sources.

From these files come ``--paper`` and, in the lab, ``fairflare compare --preset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "papers"
#: In this order a method's papers stand; the first is what ``--paper`` alone means.
PAPERS = ("fed_lwr", "fed_mrl", "fed_mas", "fed_ism")
LENGTH = ("rounds", "sites")  # of a run, not of a part of it


@dataclass(frozen=True)
class Paper:
    """The published setting of a method's experiments: ``--paper``.

    Args:
        source: which of its experiments.
        num_rounds: T.
        num_sites: K.
        settings: of task, rule, training and run that differ from the method's defaults, by name.
        lacks: what a run has to bring along to be the paper's.
        task: the kind of task that is learned; ``""``: the method's.
        name: for ``--paper NAME``.
        sources: ``{setting: where the value stands}``, of ``rounds`` and ``sites`` too.
    """

    source: str
    num_rounds: int
    num_sites: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    task: str = ""
    name: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)


def papers_of(method: str) -> dict[str, Paper]:
    """Return the experiments with a row of the method, by name; settings are those of its first row there."""
    return {
        name: _paper(content, name, rows[0])
        for content in contents().values()
        if (rows := [label for label, row in content["rows"].items() if row["method"] == method])
        for name in content["experiments"]
    }


@cache
def experiments() -> tuple[str, ...]:
    """Return what ``--paper`` may name."""
    return tuple(name for content in contents().values() for name in content["experiments"])


@cache
def contents() -> dict[str, dict[str, Any]]:
    """Return what the files say, by their names."""
    import yaml

    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times quicker where it is there
    return {name: yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), safe) for name in PAPERS}


def _paper(content: Mapping[str, Any], name: str, label: str) -> Paper:
    own, row = content["experiments"][name], content["rows"][label]
    told = {**content["settings"], **own.get("settings", {}), **row.get("set", {}), **row.get("paper", {})}
    values = values_in(told)
    return Paper(
        source=f"{content['source']}, {own['title']}",
        num_rounds=values["rounds"],
        num_sites=values["sites"],
        settings={key: value for key, value in values.items() if key not in LENGTH},
        lacks=(*own.get("lacks", ()), *content["lacks"], *row.get("lacks", ())),
        task=content["task"],
        name=name,
        sources={key: entry["from"] for key, entry in told.items()},
    )


def values_in(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of settings without their sources."""
    return {name: entry["is"] for name, entry in told.items()}
