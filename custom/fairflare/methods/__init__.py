"""One file per method, both halves; :func:`all_methods` finds them."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairflare.methods.base import Method


def all_methods() -> dict[str, Method]:
    """Every ``Method`` that a module of this package lists in ``METHODS``, by name, sorted."""
    found: dict[str, Method] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name == "base":
            continue
        for method in getattr(importlib.import_module(f"{__name__}.{info.name}"), "METHODS", ()):
            if method.name in found:
                raise ValueError(f"two methods are called {method.name!r}")
            found[method.name] = method
    return dict(sorted(found.items()))


def get_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: unknown (suggests the nearest).
    """
    methods = all_methods()
    if name not in methods:
        near = difflib.get_close_matches(name, methods, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown method {name!r}{hint} Available: {', '.join(methods)}")
    return methods[name]
