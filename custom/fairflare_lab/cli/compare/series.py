"""Describe the runs of a comparison: methods and settings times seeds, on the same data with the same training."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fairflare.base import checks
from fairflare.base.disk.files import safe_name
from fairflare.cli.options import parse_pairs
from fairflare.federation.plan.plan import Plan, make_plan

OWN = "own"  # value of train_like: every method has its own training


@dataclass(frozen=True)
class Entry:
    """Describe one row of a comparison.

    Args:
        method: name of a method, from ``fairflare list``.
        settings: settings of this row only.
        label: name of the row in tables, different for each row; default: method and settings.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            in_words = ", ".join(f"{name}={_text(value)}" for name, value in self.settings.items())
            object.__setattr__(self, "label", f"{self.method} ({in_words})" if in_words else self.method)


@dataclass(frozen=True)
class Run:
    """Describe one run by the arguments of :func:`fairflare.federation.plan.plan.make_plan`, as JSON can hold them."""

    entry: Entry
    seed: int
    plan: Mapping[str, Any]
    held_out: str = ""  # site that is left out of the run and tests its model; empty for none

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        without = f"-without-{_file_name(self.held_out)}" if self.held_out else ""
        return safe_name(f"{_file_name(self.entry.label)}-seed{self.seed}{without}")

    def make(self) -> Plan:
        """Return the plan of the run.

        Raises:
            ValueError: the row has no possible plan; the message names the row.
        """
        try:
            return make_plan(**self.plan)
        except ValueError as error:
            raise ValueError(f"row {self.entry.label!r}: {error}") from error


@dataclass(frozen=True)
class Series:
    """Describe the runs that are compared, and their conditions.

    Args:
        entries: the rows; other rows are compared with the first one unless ``reference`` names another.
        seeds: seeds with which every row is run; runs of one seed start from the same model.
        train_like: method whose task, network, data, local training, rounds and number of sites all rows get;
            ``""``: the first row's method; ``"own"``: each row's own method.
        reference: label of the row to which differences are computed; ``""``: the first row.
        task: kind of task; ``None`` for what the method's paper learns.
        sites: number or names of the sites; 0: as many as the quick job has.
        rounds: number of rounds; ``None`` for as many as the quick job has.
        settings: settings of every row; a row's own settings override them.
        task_file, monai_bundle: as in :func:`fairflare.federation.plan.plan.make_plan`.
        small: whether settings that are not given are those of a quick job; False: those of the papers.
        paper: name of the paper's experiment (``--paper NAME``); every row then has its own training of this paper.
        min_sites: number of usable results that a round needs.
        test_last: number of last models over which the results give mean metrics; ``None`` for the run's default.
        bootstrap: number of draws of the test images for intervals; 0: intervals are over the seeds alone.
        hold_out: sites that are left out in turn, one in each run; ``sites`` must then be names, see
            :func:`leaving_out`.

    Raises:
        ValueError: no row is given, two rows have one label or folder, a seed is given twice, or ``reference`` is
            unknown.
    """

    entries: Sequence[Entry]
    seeds: Sequence[int] = (0, 1, 2)
    train_like: str = ""
    reference: str = ""
    task: str | None = None
    sites: int | Sequence[str] = 0
    rounds: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    task_file: str | None = None
    monai_bundle: str | None = None
    small: bool = True
    paper: str | None = None
    min_sites: int = 2
    test_last: int | None = None
    bootstrap: int = 200
    hold_out: Sequence[str] = ()

    def __post_init__(self) -> None:
        checks.not_empty("the methods to compare", {entry.label: entry for entry in self.entries}, of="method")
        labels = [entry.label for entry in self.entries]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"two rows are called {twice!r}: give one of them other settings, or a label (--plan)")
        checks.different("folder of a method", [_file_name(entry.label) for entry in self.entries])
        checks.not_empty("the seeds", self.seeds, of="seed")
        checks.different("seeds", [checks.whole("a seed", seed, low=0) for seed in self.seeds])
        if self.reference:
            checks.choice("reference", self.reference, [entry.label for entry in self.entries])

    def runs(self) -> list[Run]:
        """Return all runs, seed by seed, so that the first results are of all rows."""
        return [
            Run(entry, seed, self._plan(entry, seed, site), site)
            for seed in self.seeds
            for site in self.hold_out or ("",)
            for entry in self.entries
        ]

    def refers_to(self) -> str:
        """Return the label of the row to which differences are computed."""
        return self.reference or self.entries[0].label

    def _plan(self, entry: Entry, seed: int, held_out: str) -> dict[str, Any]:
        like = self.train_like or (OWN if self.paper else self.entries[0].method)
        return {
            "method": entry.method,
            "label": entry.label,
            "seed": seed,
            "task": self.task,
            "sites": self.sites if isinstance(self.sites, int) else [site for site in self.sites if site != held_out],
            "num_rounds": self.rounds,
            "settings": {**self.settings, **entry.settings},
            "train_like": None if like in (OWN, entry.method) else like,
            "task_file": self.task_file,
            "monai_bundle": self.monai_bundle,
            "small": self.small,
            **({} if self.paper is None else {"paper": self.paper}),
            "min_sites": self.min_sites,
            "bootstrap": self.bootstrap,
            **({} if self.test_last is None else {"test_last": self.test_last}),
            "experiment": "compare",  # an id, so that an interrupted run is resumed
        }


def leaving_out(series: Series, wanted: str) -> Series:
    """Return a series in which each run is replaced by a run for each left-out site.

    Synthetic data are still dealt to all sites, so that every site has the same images as in a run of all sites.

    Args:
        series: series of runs with all sites.
        wanted: ``each``, or names of sites with commas between them.

    Raises:
        ValueError: no name is given, a name is given twice or unknown, or fewer than ``min_sites`` sites would remain.
    """
    plan = series.runs()[0].make()
    sites = list(plan.sites or ())
    if len(sites) <= series.min_sites:
        raise ValueError(
            f"--hold-out leaves a site out of {len(sites)}, and a round needs {series.min_sites} (min_sites): "
            f"give the comparison {series.min_sites + 1} sites or more"
        )
    names = sites if wanted == "each" else [name.strip() for name in wanted.split(",") if name.strip()]
    checks.not_empty("--hold-out", names, of="site, or 'each'")
    for name in checks.different("sites of --hold-out", names):
        checks.choice("--hold-out", name, sites)
    checks.different("folder of a left-out site", [_file_name(name) for name in names])
    dealt = getattr(plan.task, "phantom_sites", None)
    settings = dict(series.settings) if dealt is None else {"phantom_sites": dealt, **series.settings}
    return replace(series, sites=sites, hold_out=names, settings=settings)


# ------------------------------------------------------------------------------------------------ reading users' input

FILE_KEYS = ("methods", "seeds", "train_like", "reference", "task", "sites", "rounds", "set", "task_file",
             "monai_bundle", "paper", "data", "min_sites", "test_last", "bootstrap")  # fmt: skip


def read_entry(text: str) -> Entry:
    """Parse the text of a row, such as ``fed_lwr:preset=authors,mix=0.5``.

    Raises:
        ValueError: the text has no method, or a setting without ``=``, or a setting twice.
    """
    method, _, rest = text.partition(":")
    checks.refuse({
        f"a row is METHOD or METHOD:NAME=VALUE,NAME=VALUE, got {text!r}": not method,
        f"rows are words, separated by spaces: {method.replace(',', ' ')}": {",", " "} & {*method} != set(),
    })  # fmt: skip
    return Entry(method, parse_pairs(_split(rest), f"{text!r}: a setting is NAME=VALUE", repr(text)))


def read_file(path: Path) -> dict[str, Any]:
    """Read a comparison from a YAML or JSON file: see ``docs/compare.md``.

    Returns:
        ``{"entries": [...], ...}``: arguments of :class:`Series`, and ``data``.

    Raises:
        ValueError: the file cannot be read, or a key is unknown; the message suggests the nearest key.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"--plan {path} does not exist") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no readable YAML or JSON: {error}") from error
    content = _mapping(str(path), content, FILE_KEYS)
    rows = content.get("methods")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: 'methods' must be a list of rows, got {rows!r:.80}")
    given = {key: value for key, value in content.items() if key not in ("methods", "set", "paper", "seeds")}
    if "set" in content:
        given["settings"] = _mapping(f"{path}: 'set'", content["set"])
    if "seeds" in content:
        given["seeds"] = seeds_of(content["seeds"])
    paper = content.get("paper", False)
    return {
        "entries": [_entry(str(path), row) for row in rows], **given,
        "small": not paper, **({"paper": paper} if isinstance(paper, str) else {}),
    }  # fmt: skip


def seeds_of(given: Any) -> list[int]:
    """Return a list of seeds: ``3`` as ``[0, 1, 2]``; a list is returned after a check.

    Raises:
        ValueError: the value is neither a number nor a list of seeds.
    """
    if isinstance(given, list):
        return [checks.whole("a seed", seed, low=0) for seed in given]
    return list(range(checks.whole("seeds", given)))


def _entry(path: str, row: Any) -> Entry:
    if isinstance(row, str):
        return read_entry(row)
    mapping = _mapping(f"{path}: a row of 'methods'", row, ("method", "label", "set"))
    if not isinstance(mapping.get("method"), str):
        raise ValueError(f"{path}: a row of 'methods' needs a 'method', got {dict(mapping)!r:.80}")
    return Entry(
        mapping["method"], _mapping(f"{path}: 'set' of a row", mapping.get("set") or {}), str(mapping.get("label", ""))
    )


def _mapping(what: str, value: Any, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return a part of a plan as a dict, after a check that it has names and values; ``keys``: the allowed names."""
    if not isinstance(value, Mapping):
        allowed = f" ({', '.join(keys)})" if keys else ""
        raise ValueError(f"{what} must hold names and values{allowed}, got {value!r:.80}")
    for key in value if keys else ():
        if key not in keys:
            raise ValueError(f"{what}: unknown key {key!r}{checks.unknown(key, keys, 'docs/compare.md has all')}")
    return {str(name): setting for name, setting in value.items()}


def _split(text: str) -> list[str]:
    """Return the parts of a text between commas; commas in brackets or quotes do not split it."""
    return [part for part in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|\"[^\"]*\"|[^,])+", text) if part.strip()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _file_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", label).strip("_.") or "row"
