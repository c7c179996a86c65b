"""Where the command line writes, and how it says that something was given wrongly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from pydantic import BaseModel

console = Console()
errors = Console(stderr=True)

AsJson = Annotated[
    bool,
    typer.Option("--json", help="One JSON document on standard output, nothing else there (docs/command_line.md)."),
]


@contextmanager
def user_errors() -> Iterator[None]:
    """A mistake of the user is one red line; anything else is a bug and keeps its traceback."""
    try:
        yield
    except ValueError as e:
        errors.print("[red]error[/red]: ", end="")
        errors.print(str(e), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from e


@contextmanager
def one_document(wanted: bool) -> Iterator[Callable[[BaseModel], None]]:
    """What prints a document to standard output; where it is ``wanted``, all other output goes to standard error."""
    out = sys.stdout

    def put(document: BaseModel) -> None:
        out.write(document.model_dump_json(indent=2) + "\n")
        out.flush()

    if not wanted:
        yield put
        return
    with redirect_stdout(sys.stderr):
        yield put
