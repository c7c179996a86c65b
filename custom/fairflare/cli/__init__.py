"""The command line; see :mod:`fairflare.cli.commands`."""

import sys

if sys.platform == "win32":
    raise SystemExit("FairFlare runs on Linux: Windows has no file locks of the kind that it needs (docs/install.md)")

from fairflare.base.machine.environment import ignore_matplotlib_settings
from fairflare.cli.later import import_later

ignore_matplotlib_settings()  # nothing above imports MONAI; processes that are spawned come by here too


def main() -> None:
    """Run the command line; a large package is imported when a command first uses it."""
    import_later()
    from fairflare.cli import commands

    commands.main()
