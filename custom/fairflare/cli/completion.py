"""What the shell offers after TAB: names of methods, settings and runs.

The names of methods and settings are kept in a file of the user's cache folder, since PyTorch must be imported to find
them. It is made again by the first TAB after the package, its methods and tasks, or a plugin have changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import typer

from fairflare.base.disk.files import write_whole

PACKAGE = Path(__file__).parents[1]  # asking Python for the modules of fairflare.methods would import them
PLUGINS = "fairflare.methods"  # the group of entry points, see fairflare.methods.base.catalog


def methods(incomplete: str) -> list[str]:
    """Methods whose name begins so."""
    return sorted(name for name in _known() if name.startswith(incomplete))


def kinds_of_task(incomplete: str) -> list[str]:
    """Kinds of task that begin so."""
    kinds = ("segmentation", "classification", "volume_segmentation", "volume_classification")
    return [name for name in kinds if name.startswith(incomplete)]


def papers(incomplete: str) -> list[str]:
    """Experiments of papers that begin so."""
    from fairflare.methods.base.papers import experiments

    return [name for name in experiments() if name.startswith(incomplete)]


def presets(incomplete: str) -> list[str]:
    """Tables of papers that begin so."""
    from fairflare.methods.base.papers import tables

    return [name for name in tables() if name.startswith(incomplete)]


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Settings of the method on the command line, as ``name=``."""
    # Click gives up at the option whose value is being typed: the method is then among what is left.
    known = _known()
    found = next((known[word] for word in (ctx.params.get("method"), *ctx.args) if word in known), [])
    return [f"{name}=" for name in found if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Folders that hold a run: below ``runs``, or below what was typed."""
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent) if incomplete else Path("runs")
    found = (path for path in sorted(folder.iterdir()) if path.is_dir()) if folder.is_dir() else ()
    return [str(path) for path in found if str(path).startswith(incomplete)]


def _known() -> dict[str, list[str]]:
    """``{method: its settings}``; empty where they cannot be found out: the commands then say why."""
    seen = _seen()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairflare" / "completion.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or none that can be read
        kept = json.loads(cache.read_text(encoding="utf-8"))
        if kept["seen"] == seen:
            return dict(kept["known"])
    code = "from fairflare.cli.completion import print_known; print_known()"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return {}
    known: dict[str, list[str]] = json.loads(asked.stdout.splitlines()[-1])
    with suppress(OSError):  # a home that cannot be written: the next TAB takes as long
        cache.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"seen": seen, "known": known})
        write_whole(cache, lambda path: path.write_text(text, encoding="utf-8"), durable=False)
    return known


def _seen() -> list[str]:
    """What the names depend on."""
    files = [file for room in ("methods", "tasks", "federation") for file in PACKAGE.joinpath(room).glob("*.py")]
    plugins = [f"{point.value} {point.dist.version if point.dist else ''}" for point in entry_points(group=PLUGINS)]
    return [*(f"{file} {file.stat().st_mtime_ns}" for file in sorted(files)), *sorted(plugins)]


def print_known() -> None:
    """For :func:`_known`, in a process of its own."""
    from fairflare.federation.plan.describe import sections
    from fairflare.methods.base.catalog import all_methods

    found = {name: sorted({s.name for group in sections(name).values() for s in group}) for name in all_methods()}
    print(json.dumps(found))
