"""Provide the command line ``fairflare``, whose commands are in :mod:`fairflare.cli.commands`."""

import os
import sys
from io import TextIOWrapper
from pathlib import Path

if sys.platform == "win32":
    raise SystemExit("FairFlare runs on Linux: Windows has no file locks of the kind that it needs (docs/install.md)")

from fairflare.base.machine.environment import shield_imports
from fairflare.base.machine.later import import_later

shield_imports()  # before any import of MONAI


def main() -> None:
    """Run the command line; large packages are imported only when a command first uses them."""
    try:
        Path.cwd()
    except OSError as error:  # libraries end with their own messages, some without a word
        raise SystemExit(
            f"error: the working folder '{os.environ.get('PWD', '.')}' cannot be used ({error.strerror}); "
            "change to another"
        ) from error
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may hold bytes that are no text
    import_later("torch", "monai", "scipy")  # which take longest, and most command lines need no tensors
    from fairflare.cli import commands

    commands.main()
