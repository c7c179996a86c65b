"""The papers' experiments as ``fairflare/papers/*.yaml`` has them: settings with their sources, tables, columns.

From these files come ``--paper``, ``fairflare compare --preset`` and the table of a method's page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fairflare.base.checks import choice

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


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper: ``fairflare compare --preset``.

    Args:
        name: of the preset.
        title: which table.
        paper: the experiment whose settings it has (``--paper NAME``).
        train_like: the method whose training all rows get in a quick comparison.
        settings: of all rows.
        rows: ``{label: (method, what makes the row, what more --paper has)}``; one with a sweep becomes several.
        sweeps: ``{label: {setting: values}}``.
        columns: what the paper prints; see :mod:`fairflare_lab.compare.paper_table`.
    """

    name: str
    title: str
    paper: str
    train_like: str
    settings: Mapping[str, Any]
    rows: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]]
    sweeps: Mapping[str, Mapping[str, Any]]
    columns: tuple[Mapping[str, Any], ...]

    def as_plan(self, *, small: bool = True) -> dict[str, Any]:
        """Return the table as a plan of ``fairflare compare`` says it.

        ``small``: rows are trained like the paper's own method.
        """
        methods = [
            {
                "method": method,
                "label": label,
                "set": {**own, **({} if small else more)},
                "sweep": self.sweeps.get(label),
            }
            for label, (method, own, more) in self.rows.items()
        ]
        trained = {"train_like": self.train_like} if small else {"paper": self.paper}
        return {"methods": methods, "settings": dict(self.settings), **trained}


def papers_of(method: str) -> dict[str, Paper]:
    """Return the experiments with a row of the method, by name; settings are those of its first row there."""
    return {
        name: _paper(content, name, rows[0])
        for content in _contents().values()
        if (rows := [label for label, row in content["rows"].items() if row["method"] == method])
        for name in content["experiments"]
    }


@cache
def tables() -> dict[str, PaperTable]:
    """Return every table, by the name of its preset."""
    return {
        name: PaperTable(
            name=name,
            title=f"{content['source']}: {table['title']}",
            paper=table["paper"],
            train_like=content["like"],
            settings=_values(table.get("set", {})),
            rows={label: _row(content["rows"][label]) for label in table["rows"]},
            sweeps={label: table["sweep"][label] for label in table.get("sweep", {})},
            columns=tuple(table["columns"]),
        )
        for content in _contents().values()
        for name, table in content["tables"].items()
    }


def table_of(preset: str) -> PaperTable:
    """Return the table of that name.

    Raises:
        ValueError: unknown (suggests the nearest).
    """
    return tables()[choice("--preset", preset, list(tables()))]


@cache
def experiments() -> tuple[str, ...]:
    """Return what ``--paper`` may name."""
    return tuple(name for content in _contents().values() for name in content["experiments"])


@cache
def _contents() -> dict[str, dict[str, Any]]:
    import yaml

    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times quicker where it is there
    return {name: yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), safe) for name in PAPERS}


def _paper(content: Mapping[str, Any], name: str, label: str) -> Paper:
    own, row = content["experiments"][name], content["rows"][label]
    told = {**content["settings"], **own.get("settings", {}), **row.get("set", {}), **row.get("paper", {})}
    values = _values(told)
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


def _row(row: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return row["method"], _values(row.get("set", {})), _values(row.get("paper", {}))


def _values(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: entry["is"] for name, entry in told.items()}
