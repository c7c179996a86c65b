"""The methods by name: which rule and which training make one, and with which settings."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import fairflare.methods
from fairflare.base.checks import listed, unknown
from fairflare.base.settings import build, field_names
from fairflare.methods.base.reports import Field
from fairflare.methods.base.rule import Rule, anchor_fields
from fairflare.methods.base.training import LocalTraining

log = logging.getLogger(__name__)
#: The group of entry points by which an installed package brings methods along.
PLUGINS = "fairflare.methods"


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
class Method:
    """One entry of ``fairflare list``.

    Args:
        name: of the job folder and the command line.
        title: as in the paper.
        summary: one line.
        rule, training: server half and site half.
        server, site: settings of the halves that differ from their defaults.
        source: paper.
        task: the kind of task its job learns unless told otherwise; see :mod:`fairflare.federation.plan.plan`.
        learns: settings of the task that differ from its defaults.
        small: settings of a job that is quick to try: a smaller task, fewer repeats. Its local training follows the
            task (:data:`fairflare.federation.plan.site_training.TRAINING_BY_TASK`).
        num_sites, num_rounds: of that job.
        run: settings of the run that differ from their defaults.
        keeps: settings of training and task that are part of the method, so that they stay when it is trained like
            another one.
        paper: the published setting of the experiments, for a method of another package; those of ours are in
            ``fairflare/papers``.
        kinds: of task on pictures that it can learn.
        preinstalled: settings of the job for hospitals that differ from those; what is given goes before.
        page: its page in ``docs``, without ``.md``; default: the name of its module; ``None``: it has none.
    """

    name: str
    title: str
    summary: str
    rule: type[Rule]
    training: type[LocalTraining]
    server: Mapping[str, Any] = field(default_factory=dict)
    site: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    task: str = "segmentation"
    learns: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    num_sites: int = 6
    num_rounds: int = 3
    run: Mapping[str, Any] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    paper: Paper | None = None
    page: str | None = ""
    preinstalled: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("segmentation", "classification")

    def __post_init__(self) -> None:
        for half in (self.rule, self.training):
            hints = {k: v for k, v in inspect.get_annotations(half).items() if "ClassVar" not in str(v) and k[0] != "_"}
            if vain := sorted(hints.keys() - {*field_names(half)}):
                raise TypeError(
                    f"{half.__name__}: @settings is missing above the class, so {listed(vain)} would be ignored"
                )


def all_methods() -> dict[str, Method]:
    """Return every :class:`Method`, by name, sorted.

    The methods are those that a module of :mod:`fairflare.methods` lists in ``METHODS``, and those of installed
    packages with an entry point of the group ``fairflare.methods``.
    """
    return {name: method for name, (method, _) in _listed().items()}


def fields_of(training: type) -> dict[str, Field]:
    """Return what the rules of all methods with this site half.

    Or one that it is made from, ask it to report, by name.
    """
    return {
        declared.name: declared
        for method in all_methods().values()
        if issubclass(training, method.training)
        for declared in (*method.rule.report_fields, *anchor_fields(method.rule))
    }


def page_of(name: str) -> str | None:
    """Return the page of a method in ``docs``, without ``.md``; ``None``: it has none."""
    method, module = _listed()[name]
    return module if method.page == "" else method.page


def plugin_of(method: Method) -> str | None:
    """Return the package that brings a method along; ``None``: it is FairFlare's own, or of no installed package."""
    return next((package for found, package in _plugins() if found is method), None)


def _listed() -> dict[str, tuple[Method, str | None]]:
    """Return methods with the modules of ours that list them."""
    found: dict[str, tuple[Method, str | None]] = {}
    for info in pkgutil.iter_modules(fairflare.methods.__path__):
        for method in getattr(importlib.import_module(f"fairflare.methods.{info.name}"), "METHODS", ()):
            if method.name in found:
                raise ValueError(f"two methods are called {method.name!r}")
            found[method.name] = method, info.name
    for method, package in _plugins():
        if method.name not in found:
            found[method.name] = method, None
        elif found[method.name][0] is not method:
            _tell(f"method {method.name!r} of the package {package!r} is left out: another one is called so")
    return dict(sorted(found.items()))


@cache
def _plugins() -> list[tuple[Method, str]]:
    """Return methods of installed packages, with the package; what cannot be used is left out and said."""
    found: list[tuple[Method, str]] = []
    for point in sorted(entry_points(group=PLUGINS), key=lambda point: (point.name, point.value)):
        try:
            brought = point.load()
            several = brought.METHODS if isinstance(brought, ModuleType) else brought
            for method in [several] if isinstance(several, Method) else several:
                if not isinstance(method, Method):
                    raise TypeError(f"{method!r:.80} is no fairflare.methods.base.catalog.Method")
                if not (issubclass(method.rule, Rule) and issubclass(method.training, LocalTraining)):
                    raise TypeError(f"{method.name}: rule and training must be subclasses of Rule and LocalTraining")
                build(method.rule, method.server), build(method.training, method.site)
                found.append((method, point.module.partition(".")[0]))
        except (Exception, SystemExit) as error:  # whatever another package does when it is imported
            _tell(f"plugin {point.name} = {point.value} is left out: {type(error).__name__}: {error}")
    return found


@cache
def _tell(text: str) -> None:
    """Warn in the log, once a process for each text."""
    log.warning(text)


def get_method(name: str) -> Method:
    """Return the method of that name.

    Raises:
        ValueError: unknown (suggests the nearest).
    """
    methods = all_methods()
    if name not in methods:
        raise ValueError(f"unknown method {name!r}{unknown(name, methods, f'`fairflare list` has all {len(methods)}')}")
    return methods[name]


def method_of(rule: Rule | None, training: LocalTraining | None) -> Method:
    """Return the method whose halves are of these classes; of several, the one most of whose own settings they have.

    Where the catalog has none: one of the rule's name with these halves.

    Raises:
        ValueError: no rule, and no method has this site half (says what to give).
    """
    known = [
        method
        for method in all_methods().values()
        if (rule is None or type(rule) is method.rule) and (training is None or type(training) is method.training)
    ]
    if known and (rule or training):
        called = type(rule).__name__.lower()
        return max(
            known, key=lambda m: (_held(rule, m.server), _held(training, m.site), m.name.replace("_", "") == called)
        )
    if rule is None:
        raise ValueError("give a method's name, or the rule and the training of one")
    title = type(rule).__name__
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title).lower()
    return Method(name, title, "", type(rule), type(training) if training else LocalTraining)


def _held(half: Rule | LocalTraining | None, own: Mapping[str, Any]) -> int:
    """Return how many of a method's own settings a half has, less those that it has not."""
    return sum(1 if getattr(half, name) == value else -1 for name, value in own.items()) if half else 0
