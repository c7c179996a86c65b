"""The command line; see :mod:`fairflare.cli.commands`."""

from fairflare.cli.commands import app, main

__all__ = ["app", "main"]
