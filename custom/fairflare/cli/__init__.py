"""The command line; see :mod:`fairflare.cli.commands`."""

import fairflare.cli.compare  # noqa: F401  adds its command
from fairflare.cli.commands import app, main

__all__ = ["app", "main"]
