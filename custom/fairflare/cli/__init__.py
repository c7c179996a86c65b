"""The command line; see :mod:`fairflare.cli.commands`."""

import sys

if sys.platform == "win32":
    raise SystemExit("FairFlare runs on Linux: Windows has no file locks of the kind that it needs (docs/install.md)")

from fairflare.cli.commands import app, main

__all__ = ["app", "main"]
