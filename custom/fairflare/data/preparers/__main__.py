"""The command: ``python -m fairflare.data.preparers NAME ...``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from fairflare.data.datalist import SPLITS
from fairflare.data.preparers import PREPARERS


def main(arguments: Sequence[str] | None = None, prog: str = "python -m fairflare.data.preparers") -> int:
    """Prepare one data set and say what was written; returns the exit status.

    Args:
        arguments: of the command line; ``None``: this process's own.
        prog: what the command is called.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Per-site folders with datalists from public data sets.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for preparer in PREPARERS.values():
        sub = commands.add_parser(preparer.name, help=preparer.text, description=preparer.text)
        if preparer.has_source:
            sub.add_argument(
                "--source", dest="source_dir", metavar="SOURCE", required=True, help="folder with the source files"
            )
        sub.add_argument("--out", dest="out_dir", metavar="OUT", required=True, help="folder to write to")
        sub.add_argument("--seed", type=int, default=0, help="of the split (default 0)")
        sub.add_argument("--number", action="store_true", help="call the sites site-1, site-2, ...")
        sub.add_argument("--overwrite", action="store_true", help="replace what an earlier call wrote")
        preparer.add_options(sub)
    options = vars(parser.parse_args(arguments))
    preparer = PREPARERS[options.pop("command")]
    try:
        written = preparer.prepare(**options)
    except (OSError, ValueError, re.error) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for site, folder in written.items():
        content = json.loads((folder / "datalist.json").read_text(encoding="utf-8"))
        sizes = ", ".join(f"{len(content[split])} {split}" for split in SPLITS)
        print(f"{site} ({content['name']}): {sizes}")
    print(f"Copy {Path(options['out_dir']) / 'fairflare.json'} into the 'local' folder of the simulator workspace.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
