"""Print the command line's output: sentences, notes, errors of the user, and JSON documents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape

from fairflare.base.disk.files import system_error

console = Console()
errors = Console(stderr=True)

AsJson = Annotated[
    bool,
    typer.Option("--json", help="One JSON document on standard output, nothing else there (docs/command_line.md)."),
]


def say(text: str, where: Console | None = None, *, mark: str = "") -> None:
    """Print a sentence unchanged after a coloured ``mark``, on a line of its own; default: on standard error."""
    (where or errors).print(f"{mark}{escape(text)}", highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a note about something that may differ from what the user expects."""
    say(text, mark="[yellow]note[/yellow]: ")


@contextmanager
def user_errors(out: Path | None = None) -> Iterator[None]:
    """Report a user's mistake or an unusable path in one red line; other errors keep their traceback.

    Args:
        out: path that the command writes to, for an error of the disk that names no path.
    """
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        text = system_error(error, out) if isinstance(error, OSError) else str(error) or "too little memory"
        if isinstance(error, UnicodeEncodeError):
            text = (
                f"{error.object!a:.200} cannot be written in {error.encoding}; set LC_ALL=C.UTF-8, or rename the file"
            )
        say(text, mark="[red]error[/red]: ")
        raise typer.Exit(2) from error


@contextmanager
def one_document(wanted: bool) -> Iterator[Callable[..., None]]:
    """Yield a function that prints a JSON document; if ``wanted``, all other output goes to standard error.

    Yields:
        A function that prints its arguments as JSON to standard output: objects by their fields, an undefined number as
        null. New versions of FairFlare only add keys; if a key's meaning changes, so does ``version``
        (docs/command_line.md).
    """
    out = sys.stdout

    def put(**parts: Any) -> None:
        out.write(to_json({"version": 1, **parts}, indent=2, inf_nan_mode="null").decode() + "\n")
        out.flush()

    with redirect_stdout(sys.stderr) if wanted else nullcontext():
        yield put


def one_form(as_json: bool, **others: bool) -> None:
    """Raise ValueError where the user asks for the output in two forms, such as --json and --csv."""
    if len(asked := [f"--{name}" for name, given in {"json": as_json, **others}.items() if given]) > 1:
        raise ValueError(f"{asked[0]} and {asked[1]} exclude each other")
