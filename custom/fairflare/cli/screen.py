"""Where the command line writes, and how it says that something was given wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)


@contextmanager
def user_errors() -> Iterator[None]:
    """A mistake of the user is one red line; anything else is a bug and keeps its traceback."""
    try:
        yield
    except ValueError as e:
        errors.print("[red]error[/red]: ", end="")
        errors.print(str(e), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from e
