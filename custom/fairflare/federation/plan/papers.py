"""Read the papers' experiments from ``fairflare/papers/*.yaml``: settings with their sources.

These files define what ``--paper`` and, in the lab, ``fairflare compare --preset`` set.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fairflare.base.checks import choice
from fairflare.methods.base.catalog import Method, Paper

FOLDER = Path(__file__).parents[2] / "papers"
#: Names of the papers' files, in the order of a method's papers; ``--paper`` without a name takes the first.
PAPERS = ("fed_lwr", "fed_mrl", "fed_mas", "fed_ism")
LENGTH = ("rounds", "sites")  # names of settings of the run itself, not of its rule, training or task


def papers_of(method: Method) -> dict[str, Paper]:
    """Return a method's published settings, by their names for ``--paper``, the usual setting first.

    The result is empty for a method without a published setting. Where an experiment's table has several rows of the
    method, the first row's settings are taken.
    """
    if method.paper is not None:
        return {method.paper.name: method.paper}
    return {
        name: _paper(content, name, rows[0])
        for content in contents().values()
        if (rows := [label for label, row in content["rows"].items() if row["method"] == method.name])
        for name in content["experiments"]
    }


def find_published_setting(method: Method, name: str | None = None) -> Paper | None:
    """Return a method's published setting by name; without a name its usual one, ``None`` if the method has none.

    Raises:
        ValueError: no experiment has this name (the message suggests the nearest), or it has no settings of the method.
    """
    papers = papers_of(method)
    if name is None:
        return next(iter(papers.values()), None)
    if name not in papers:
        choice("--paper", name, experiments())
        instead = f"take one of {', '.join(papers)}" if papers else "no --paper has settings for it; leave --paper out"
        raise ValueError(f"--paper {name} has no settings for method {method.name!r}; {instead}")
    return papers[name]


@cache
def experiments() -> tuple[str, ...]:
    """Return the names of experiments that ``--paper`` accepts."""
    return tuple(name for content in contents().values() for name in content["experiments"])


@cache
def contents() -> dict[str, dict[str, Any]]:
    """Return the contents of the papers' YAML files, by the files' names."""
    import yaml

    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader, where it is installed, is ten times quicker
    return {name: yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), safe) for name in PAPERS}


def _paper(content: Mapping[str, Any], name: str, label: str) -> Paper:
    experiment, row = content["experiments"][name], content["rows"][label]
    entries = {**content["settings"], **experiment.get("settings", {}), **row.get("set", {}), **row.get("paper", {})}
    values = values_in(entries)
    return Paper(
        source=f"{content['source']}, {experiment['title']}",
        num_rounds=values["rounds"],
        num_sites=values["sites"],
        settings={key: value for key, value in values.items() if key not in LENGTH},
        lacks=(*experiment.get("lacks", ()), *content["lacks"], *row.get("lacks", ())),
        task=content["task"],
        name=name,
        sources={key: entry["from"] for key, entry in entries.items()},
    )


def values_in(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a paper's settings without the sources that the file gives for each."""
    return {name: entry["is"] for name, entry in entries.items()}
