"""Find what other packages add to FairFlare by entry points; :mod:`fairflare_lab` uses the same ones.

The groups: ``fairflare.commands`` (typer functions, by the name of the command), ``fairflare.listeners`` (functions
that are called with the document of what has ended, ``results.json`` or ``stats.json``, and return lines for the log),
``fairflare.python`` (functions behind :mod:`fairflare.api`) and ``fairflare.sources`` (synthetic images).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fairflare.base.machine.one_run import belonging_to

COMMANDS, LISTENERS, PYTHON = "fairflare.commands", "fairflare.listeners", "fairflare.python"


def load_object(point: EntryPoint) -> Any:
    """Return the object of an entry point; the package's code must not start a run when it is imported.

    Raises:
        Exception: the package cannot be imported, or starts a run.
    """
    with belonging_to(f"plugin {point.name} = {point.value}"):
        return point.load()


def load_plugins(group: str) -> dict[str, Any]:
    """Return the objects that installed packages add to a group of entry points, by name.

    Raises:
        ImportError: a package that adds an entry point cannot be imported.
    """
    return {point.name: load_object(point) for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def tell_listeners(document: Path) -> list[str]:
    """Call the listeners with the document that a completed run, or a completed statistics job, has written.

    Returns:
        Lines for the log. Never raises: a failed page or picture must not end a run.
    """
    lines: list[str] = []
    for point in sorted(entry_points(group=LISTENERS), key=lambda point: point.name):
        try:
            lines += load_object(point)(document)
        except Exception as error:
            lines.append(f"listener {point.name} = {point.value} failed: {type(error).__name__}: {error}")
    return lines
