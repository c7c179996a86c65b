"""Provide the command line ``fairflare``, whose commands are in :mod:`fairflare.cli.commands`."""

import sys

if sys.platform == "win32":
    raise SystemExit("FairFlare runs on Linux: Windows has no file locks of the kind that it needs (docs/install.md)")

from fairflare.base.machine.environment import ignore_matplotlib_settings
from fairflare.cli.later import import_later

ignore_matplotlib_settings()  # before any import of MONAI; spawned processes import this module too


def main() -> None:
    """Run the command line; large packages are imported only when a command first uses them."""
    import_later()
    from fairflare.cli import commands

    commands.main()
