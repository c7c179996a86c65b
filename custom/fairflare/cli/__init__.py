"""The command line; see :mod:`fairflare.cli.commands`."""

import fairflare.cli.compare
import fairflare.cli.landscape
import fairflare.cli.report
import fairflare.cli.similarity  # noqa: F401
from fairflare.cli.commands import app, main

__all__ = ["app", "main"]
