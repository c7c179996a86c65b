"""Read the papers' tables of ``fairflare/papers/*.yaml``: rows, sweeps, columns (``compare --preset``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fairflare.base.checks import choice
from fairflare.federation.plan.papers import contents, values_in


@dataclass(frozen=True)
class PaperTable:
    """Describe a table of a paper, for ``fairflare compare --preset``.

    Args:
        name: name of the preset.
        title: title of the paper's table.
        paper: the experiment whose settings it has (``--paper NAME``).
        train_like: the method whose training all rows get in a quick comparison.
        settings: settings that all rows share.
        rows: ``{label: (method, settings that define the row, further settings with --paper)}``; a row with a sweep
            becomes several.
        sweeps: ``{label: {setting: values}}``; one row is made for each value.
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

    def make_plan_file(self, *, small: bool = True) -> dict[str, Any]:
        """Return the table as the content of a plan file of ``fairflare compare``.

        If ``small`` is true, all rows are trained like :attr:`train_like` in a quick job, else as in the paper.
        """
        from fairflare_lab.cli.compare.series import Entry

        entries = []
        for label, (method, settings, more) in self.rows.items():
            steps = [{name: value} for name, values in self.sweeps.get(label, {}).items() for value in values]
            for step in steps or [{}]:
                in_words = "".join(f", {name}={value}" for name, value in step.items())
                entries.append(Entry(method, {**settings, **({} if small else more), **step}, label + in_words))
        return {
            "entries": entries, "settings": dict(self.settings),
            **({"train_like": self.train_like} if small else {"paper": self.paper}),
        }  # fmt: skip


@cache
def tables() -> dict[str, PaperTable]:
    """Return every table, by the name of its preset."""
    return {
        name: PaperTable(
            name=name,
            title=f"{content['source']}: {table['title']}",
            paper=table["paper"],
            train_like=content["like"],
            settings=values_in(table.get("set", {})),
            rows={label: _row(content["rows"][label]) for label in table["rows"]},
            sweeps={label: table["sweep"][label] for label in table.get("sweep", {})},
            columns=tuple(table["columns"]),
        )
        for content in contents().values()
        for name, table in content["tables"].items()
    }


def table_of(preset: str) -> PaperTable:
    """Return the table of a preset.

    Raises:
        ValueError: the preset is unknown; the message suggests the nearest.
    """
    return tables()[choice("--preset", preset, list(tables()))]


def beginning_so(incomplete: str) -> list[str]:
    """List the tables whose names begin with a text, to complete a command line."""
    return [name for name in tables() if name.startswith(incomplete)]


def _row(row: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return row["method"], values_in(row.get("set", {})), values_in(row.get("paper", {}))
