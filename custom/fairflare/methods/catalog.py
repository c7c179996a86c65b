"""The methods by name: which rule and which training make one, and with which settings."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import fairflare.methods
from fairflare.core.checks import nearest
from fairflare.methods.reports import Field
from fairflare.methods.rule import Rule
from fairflare.methods.training import LocalTraining


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
        task: the kind of task its job learns unless told otherwise; see :mod:`fairflare.federation.plan`.
        learns: settings of the task that differ from its defaults.
        small: settings of a job that is quick to try; the defaults above are the paper's.
        num_sites, num_rounds: of that job.
        run: settings of the run that differ from their defaults.
        keeps: settings of training and task that are part of the method, so that they stay when it is trained like
            another one.
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
    small: Mapping[str, Any] = field(default_factory=lambda: {"local_epochs": 5})
    num_sites: int = 6
    num_rounds: int = 3
    run: Mapping[str, Any] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    page: str | None = ""
    preinstalled: Mapping[str, Any] = field(default_factory=dict)


def all_methods() -> dict[str, Method]:
    """Every :class:`Method` that a module of :mod:`fairflare.methods` lists in ``METHODS``, by name, sorted."""
    return {name: method for name, (method, _) in _listed().items()}


def fields_of(training: type) -> dict[str, Field]:
    """What the rules of all methods with this site half, or one that it is made from, ask it to report, by name."""
    return {
        declared.name: declared
        for method in all_methods().values()
        if issubclass(training, method.training)
        for declared in (*method.rule.report_fields, *method.rule.anchor_fields)
    }


def page_of(name: str) -> str | None:
    """The page of a method in ``docs``, without ``.md``; ``None``: it has none."""
    method, module = _listed()[name]
    return module if method.page == "" else method.page


def _listed() -> dict[str, tuple[Method, str]]:
    """Methods with the modules that list them."""
    found: dict[str, tuple[Method, str]] = {}
    for info in pkgutil.iter_modules(fairflare.methods.__path__):
        for method in getattr(importlib.import_module(f"fairflare.methods.{info.name}"), "METHODS", ()):
            if method.name in found:
                raise ValueError(f"two methods are called {method.name!r}")
            found[method.name] = method, info.name
    return dict(sorted(found.items()))


def get_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: unknown (suggests the nearest).
    """
    methods = all_methods()
    if name not in methods:
        raise ValueError(f"unknown method {name!r}{nearest(name, methods)} Available: {', '.join(methods)}")
    return methods[name]
