"""Complete names of methods, settings and runs in the shell after TAB."""

from __future__ import annotations

from pathlib import Path

import typer


def methods(incomplete: str) -> list[str]:
    """Return the names of methods that begin with ``incomplete``."""
    from fairflare.methods.base.catalog import all_methods

    return [name for name in all_methods() if name.startswith(incomplete)]


def kinds_of_task(incomplete: str) -> list[str]:
    """Return the kinds of task that begin with ``incomplete``."""
    from fairflare.federation.plan.task_files import TASKS_BY_KIND

    return [name for name in TASKS_BY_KIND if name.startswith(incomplete)]


def papers(incomplete: str) -> list[str]:
    """Return the names of papers' experiments that begin with ``incomplete``."""
    from fairflare.federation.plan.papers import experiments

    return [name for name in experiments() if name.startswith(incomplete)]


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the settings of the command line's method that begin with ``incomplete``, as ``name=``."""
    from fairflare.federation.plan.describe import sections
    from fairflare.methods.base.catalog import all_methods

    # Click stops parsing at the option whose value is being typed; the method's name is then in the unparsed ``args``.
    given = (word for word in (ctx.params.get("method"), *ctx.args) if word in all_methods())
    groups = sections(method, ctx.params.get("task")).values() if (method := next(given, None)) else ()
    return sorted({f"{s.name}=" for group in groups for s in group if s.name.startswith(incomplete)})


def runs(incomplete: str) -> list[str]:
    """Return the folders that may hold a run and begin with ``incomplete``; without it the folders in ``runs``."""
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent) if incomplete else Path("runs")
    folders = (path for path in sorted(folder.iterdir()) if path.is_dir()) if folder.is_dir() else ()
    return [str(path) for path in folders if str(path).startswith(incomplete)]
