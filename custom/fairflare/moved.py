"""Paths of version 0.2 that job folders, kits and plugins name: they work for one release, with a warning.

The modules themselves lie in the rooms that ``docs/architecture.md`` shows.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_NOW = {
    "fairflare.base": "core.checks core.settings core.task",
    "fairflare.flare.export": "flare.recipes",
    "fairflare.methods.base": "methods.catalog methods.reports methods.rule methods.training",
    "fairflare.methods.parts": (
        "methods.anchor_report methods.class_gradients methods.mu_policy methods.probes methods.weightings"
    ),
}
#: ``{path of version 0.2: path now}``.
MOVED = {f"fairflare.{old}": f"{room}.{old.split('.')[1]}" for room, names in _NOW.items() for old in names.split()}


class OldPaths(MetaPathFinder, Loader):
    """Gives the module that has moved for its old path; both names are one module, so classes stay the same."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is {new} now; the old path goes with the next release", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)
