"""Implement ``fairflare examples``, which writes working examples as files to change."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from fairflare.base.checks import choice
from fairflare.cli.screen import console, say, user_errors

#: Folders of the package's ``examples/``; each has a README.md and a run.sh.
EXAMPLES = {
    "compare": "methods compared on your data: check, how different the sites are, table and report",
    "method": "a new method as a plugin package",
    "bundle3d": "NIfTI volumes in 3D by a MONAI bundle",
    "script": "your own training script in any method, by FLARE's Client API",
    "poc": "a network of three hospitals in FLARE's POC mode",
}


def examples(
    name: Annotated[str | None, typer.Argument(help="Which one; without it: the list.")] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="New or empty; default: the name.")] = None,
) -> None:
    """Write a working example into a folder, or list them. `bash DIR/run.sh` runs it."""
    if name is None:
        for known, what in EXAMPLES.items():
            say(f"{known:10}{what}", console)
        return
    with user_errors():
        choice("example", name, tuple(EXAMPLES))
        target = folder or Path(name)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} is there already and not empty; give another folder")
        with as_file(files("fairflare") / "examples" / name) as source:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"), dirs_exist_ok=True)
    say(f"{target}: {EXAMPLES[name]}. Read {target / 'README.md'}; bash {target / 'run.sh'} runs it", console)
