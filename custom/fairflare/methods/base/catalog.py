"""List the methods by name, each with its rule (server half), its training (site half) and their settings."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import fairflare.methods
from fairflare.base.checks import list_names, unknown
from fairflare.base.machine.one_run import belonging_to
from fairflare.base.plugins import load_object
from fairflare.base.settings import build, field_names, hints_of
from fairflare.methods.base.reports import Field
from fairflare.methods.base.rule import Rule, TwoPhase, anchor_fields
from fairflare.methods.base.training import LocalTraining

log = logging.getLogger(__name__)
#: Group of entry points with which an installed package adds methods to the catalog.
PLUGINS = "fairflare.methods"
#: Groups of the methods, in the list's order: heading, and to whom a group's methods are fair.
GROUPS = {
    "weights": ("Weights between sites", "sites"),
    "local": ("Local training", "sites"),
    "own": ("Models of the sites' own", "sites"),
    "people": ("Groups of people", "groups of people"),
    "tail": ("Long tails", "rare classes"),
    "control": ("Controls", "nobody"),
}


@dataclass(frozen=True)
class Paper:
    """Describe the published setting of a method's experiments, which ``--paper`` selects.

    Args:
        source: name of the paper's experiment.
        num_rounds: number of rounds T.
        num_sites: number of sites K.
        settings: settings of task, rule, training and run that differ from the method's defaults, by name.
        lacks: things that the user has to provide so that a run equals the paper's experiment.
        task: the kind of task that is learned; ``""``: the kind that the method names.
        name: name of this setting on the command line, ``--paper NAME``.
        sources: ``{setting: place in the paper or its code that states the value}``; also for ``rounds`` and ``sites``.
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
    """Describe one method of the catalog, which ``fairflare list`` prints.

    Args:
        name: name of the method on the command line and of its job folder.
        title: name of the method in its paper.
        summary: description of the method in one line.
        rule, training: classes of the server half and the site half.
        server, site: settings of the server half and the site half that differ from their defaults.
        source: reference to the paper.
        group: key of :data:`GROUPS`.
        passes: forward and backward passes of a training step, FedAvg's is 1.
        task: the kind of task that the method's job learns by default; see :mod:`fairflare.federation.plan.plan`.
        learns: settings of the task that differ from the task's defaults.
        small: settings of a job that is quick to try: a smaller task, fewer repeats. The job's local training follows
            the task (:data:`fairflare.federation.plan.site_training.TRAINING_BY_TASK`).
        num_sites, num_rounds: number of sites and of rounds of the quick job.
        run: settings of the run that differ from their defaults.
        keeps: names of settings of training and task that are part of the method. They keep their values when the
            method is trained with the settings of another method.
        paper: the published setting of the experiments, for a method of another package. The published settings of
            FairFlare's own methods are in ``fairflare/papers``.
        kinds: kinds of task on pictures that the method can learn.
        preinstalled: settings of the job for hospitals that differ from those of the quick job; settings that a user
            gives override them.
        page: the method's page in ``docs``, without ``.md``; default: the name of its module; ``None`` if it has none.
    """

    name: str
    title: str
    summary: str
    rule: type[Rule]
    training: type[LocalTraining]
    server: Mapping[str, Any] = field(default_factory=dict)
    site: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    group: Literal["weights", "local", "own", "people", "tail", "control"] = "weights"
    passes: str = "1"
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
        for cls in (self.rule, self.training):
            hints = {k: v for k, v in inspect.get_annotations(cls).items() if "ClassVar" not in str(v) and k[0] != "_"}
            if vain := sorted(hints.keys() - {*field_names(cls)}):
                raise TypeError(
                    f"{cls.__name__}: @settings is missing above the class, so {list_names(vain)} would be ignored"
                )


#: Methods that :func:`add_file` added, by their file.
_FILES: dict[Path, list[Method]] = {}


def sums_of(method: Method) -> str:
    """Return how many secure sums a method's round takes by default: ``"one sum"``, ``"two sums"``, ``"no: REASON"``.

    With two sums, the first is the plain mean of the models, about which the sites are then asked.
    """
    if why := build(method.rule, method.server).reads_models:
        return f"no: {why}"
    return "two sums" if issubclass(method.rule, TwoPhase) else "one sum"


def all_methods() -> dict[str, Method]:
    """Return every :class:`Method`, by name, sorted.

    The methods are those that a module of :mod:`fairflare.methods` lists in ``METHODS``, and those of installed
    packages with an entry point of the group ``fairflare.methods``.
    """
    return {name: method for name, (method, _) in _list_methods().items()}


def fields_of(training: type) -> dict[str, Field]:
    """Return the report fields that any method declares for a site half, by name.

    They are the fields of the rules of all methods whose site half is ``training`` or one of its base classes.
    """
    return {
        declared.name: declared
        for method in all_methods().values()
        if issubclass(training, method.training)
        for declared in (*method.rule.report_fields, *anchor_fields(method.rule))
    }


def page_of(name: str) -> str | None:
    """Return the name of a method's page in ``docs``, without ``.md``, or ``None`` if the method has no page."""
    method, module = _list_methods()[name]
    return module if method.page == "" else method.page


def plugin_of(method: Method) -> str | None:
    """Return the installed package that provides a method; ``None`` for a method of FairFlare, or of no package."""
    return next((package for known, package in _plugins() if known is method), None)


def _list_methods() -> dict[str, tuple[Method, str | None]]:
    """Return all methods by name, each with the FairFlare module that lists it; ``None`` for a plugin's method."""
    listed: dict[str, tuple[Method, str | None]] = {}
    for info in pkgutil.iter_modules(fairflare.methods.__path__):
        for method in getattr(importlib.import_module(f"fairflare.methods.{info.name}"), "METHODS", ()):
            if method.name in listed:
                raise ValueError(f"two methods are called {method.name!r}")
            listed[method.name] = method, info.name
    for method, package in (
        *_plugins(),
        *((method, str(file)) for file, methods in _FILES.items() for method in methods),
    ):
        if listed.setdefault(method.name, (method, None))[0] is not method:
            _tell(f"method {method.name!r} of the package {package!r} is left out: another one is called so")
    return dict(sorted(listed.items()))


@cache
def _plugins() -> list[tuple[Method, str]]:
    """Return the methods of installed packages, each with its package's name; log a warning for unusable methods."""
    offered: list[tuple[Method, str]] = []
    for point in sorted(entry_points(group=PLUGINS), key=lambda point: (point.name, point.value)):
        try:
            offered += [(method, point.module.partition(".")[0]) for method in _check_methods(load_object(point))]
        except (Exception, SystemExit) as error:  # importing another package may raise any exception
            _tell(f"plugin {point.name} = {point.value} is left out: {type(error).__name__}: {error}")
    return offered


def _check_methods(brought: Any) -> list[Method]:
    """Return the methods of a module with ``METHODS``, of a list of methods, or of a single one.

    Raises:
        AttributeError, TypeError, ValueError: there is none, or one cannot be used.
    """
    several = brought.METHODS if isinstance(brought, ModuleType) else brought
    methods = [several] if isinstance(several, Method) else list(several)
    for method in methods:
        if not isinstance(method, Method):
            raise TypeError(f"{method!r:.80} is no fairflare.Method")
        if not (issubclass(method.rule, Rule) and issubclass(method.training, LocalTraining)):
            raise TypeError(f"{method.name}: rule and training must be subclasses of Rule and LocalTraining")
        build(method.rule, method.server), build(method.training, method.site)
    return methods


def add_file(path: str | os.PathLike[str]) -> list[str]:
    """Add the methods of a Python file to the catalog of this process, and return their names.

    The file has ``METHODS``, a list of methods, as a module of :mod:`fairflare.methods` has; a job carries it.

    Raises:
        ValueError: the file does not exist, cannot be run, has the name of another module, or has no usable method, or
            one with the name of another method.
    """
    file = Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"method file {path} does not exist, or is no Python file (.py)")
    spec = importlib.util.find_spec(file.stem) if file not in _FILES else None
    if spec is not None and spec.origin != str(file):
        raise ValueError(f"method file {path}: a module is called {file.stem!r} already; give the file another name")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # also of processes that are given objects of the file's classes
    importlib.invalidate_caches()
    with belonging_to(f"method file {file}"):
        try:
            methods = _check_methods(importlib.import_module(file.stem))
        except Exception as error:
            sys.modules.pop(file.stem, None)
            raise ValueError(f"method file {path} cannot be used: {type(error).__name__}: {error}") from error
    if taken := sorted({method.name for method in methods if file not in _FILES} & {*all_methods()}):
        raise ValueError(f"method file {path}: another method is called {taken[0]!r}; give yours another name")
    _FILES[file] = methods
    return [method.name for method in methods]


def list_added_files() -> list[Path]:
    """Return the files whose methods were added to the catalog of this process."""
    return [*_FILES]


def file_of(method: Method) -> Path | None:
    """Return the file from which :func:`add_file` added a method; ``None`` for any other method."""
    return next((file for file, methods in _FILES.items() if any(method is one for one in methods)), None)


@cache
def _tell(text: str) -> None:
    """Log a warning; the same text is logged once per process."""
    log.warning(text)


def get_method(name: str) -> Method:
    """Return the method called ``name``.

    Raises:
        ValueError: no method has that name. The message spells what is meant: the method of which it is a ``form``,
            the methods that have this title in their papers (``FedISM+``), or the nearest names.
    """
    methods = all_methods()
    if name not in methods:
        if owner := owner_of(name):
            method, form = owner
            raise ValueError(
                f"{name!r} is a form of the method {method!r}: take {method} --set form={form}, or, as a row of "
                f"compare, {method}:form={form}"
            )
        titled = find_titled(name) or [m for m in methods.values() if _plain(m.title).startswith(_plain(name) or "-")]
        all_of_them = f"`fairflare list` has all {len(methods)}" + "; a folder of data goes behind --data" * (
            "/" in name
        )
        differ = [f"{m.name!r}{f' ({m.summary})' * (len(titled) > 1)}" for m in titled]
        meant = f"; did you mean {' or '.join(differ)}? {all_of_them}"
        raise ValueError(f"unknown method {name!r}{meant if titled else unknown(name, methods, all_of_them)}")
    return methods[name]


def find_titled(name: str) -> list[Method]:
    """Return the methods that have this name or title; capitals and signs make no difference (``FedAvg``)."""
    return [method for method in all_methods().values() if _plain(name) in (_plain(method.name), _plain(method.title))]


def owner_of(form: str) -> tuple[str, str] | None:
    """Return the method whose setting ``form`` has this value, and the value.

    ``None`` is returned where no method has it, or a method has this name. Capitals and signs
    make no difference: ``TERM`` and ``FedEBA+`` are found.
    """
    having = (
        (m.name, value)
        for m in all_methods().values()
        for value in get_args(hints_of(m.rule).get("form"))
        if _plain(form) == _plain(value)
    )
    return None if form in all_methods() else next(having, None)


def _plain(name: str) -> str:
    """Return a name without capitals and signs, ``+`` spelled out: ``Fed-LWR`` and ``fed_lwr`` are alike."""
    return re.sub("[^a-z0-9]", "", name.lower().replace("+", "plus"))


def method_of(rule: Rule | None, training: LocalTraining | None) -> Method:
    """Return the method whose server half and site half are of the classes of ``rule`` and ``training``.

    If several methods have these classes, the one whose own settings agree best with those of the halves is returned.
    If the catalog has none, a new method with these halves is returned, named after the rule's class.

    Raises:
        ValueError: no rule is given, and no method has this site half.
    """
    known = [
        method
        for method in all_methods().values()
        if (rule is None or type(rule) is method.rule) and (training is None or type(training) is method.training)
    ]
    if known and (rule or training):
        called = type(rule).__name__.lower()
        return max(
            known,
            key=lambda m: (
                _count_matches(rule, m.server),
                _count_matches(training, m.site),
                m.name.replace("_", "") == called,
            ),
        )
    if rule is None:
        raise ValueError("give a method's name, or a method's rule and training")
    title = type(rule).__name__
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title).lower()
    return Method(name, title, "", type(rule), type(training) if training else LocalTraining)


def _count_matches(component: Rule | LocalTraining | None, given: Mapping[str, Any]) -> int:
    """Return how many of a method's own settings have the same value in ``component``, minus how many differ."""
    return sum(1 if getattr(component, name) == value else -1 for name, value in given.items()) if component else 0
