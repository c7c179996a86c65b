"""The command: ``python -m fairflare.data.preparers NAME ...``, which is ``fairflare prepare``."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairflare.data.datalist import SPLITS
from fairflare.data.patients import suggested
from fairflare.data.preparers import PREPARERS, dealing
from fairflare.data.preparers import counts as counting
from fairflare.data.preparers.common import Preparer
from fairflare.data.preparers.draft import FOLDER
from fairflare.data.preparers.writing import MANIFEST

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, prog: str = "python -m fairflare.data.preparers") -> int:
    """Prepare one data set and say what was written; returns the exit status.

    Args:
        arguments: of the command line; ``None``: this process's own.
        prog: what the command is called.
    """
    parser = make_parser(prog)
    options = vars(parser.parse_args(arguments))
    preparer = PREPARERS[options.pop("command")]
    out = Path(options["out_dir"])
    try:
        record: dict[str, Any] = {"preparer": preparer.name}
        if preparer.dealing is None:
            record["options"] = _plain(options)
        else:
            dealt = dealing.from_options(options, preparer.dealing)
            record["options"] = {**_plain(options), **dealing.options_of(dealt)}
            options["dealing"] = dealt
        picture = find_spec("matplotlib") is not None
        with counting_files() as progress:
            written = preparer.prepare(**options, record=record, picture=picture, progress=progress)
    except (OSError, ValueError, re.error) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        kept = (out / FOLDER).is_dir()
        how = f"; what is done waits in {out / FOLDER}, and the same command goes on with it" if kept else ""
        print(f"interrupted{how}", file=sys.stderr)
        return INTERRUPTED
    say(written, out, picture, by_name="group" in options)
    return 0


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Every preparer as a command of its own."""
    parser = argparse.ArgumentParser(prog=prog, description="Per-site folders with datalists from data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for preparer in PREPARERS.values():
        _add(commands.add_parser(preparer.name, help=preparer.text, description=preparer.text), preparer)
    return parser


def _add(sub: argparse.ArgumentParser, preparer: Preparer) -> None:
    if preparer.has_source:
        sub.add_argument(
            "--source", dest="source_dir", metavar="SOURCE", required=True, help="folder with the source files"
        )
    sub.add_argument("--out", dest="out_dir", metavar="OUT", required=True, help="folder to write to")
    sub.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    sub.add_argument("--number", action="store_true", help="call the sites site-1, site-2, ...")
    sub.add_argument("--overwrite", action="store_true", help="replace what an earlier call wrote")
    preparer.add_options(sub)
    if preparer.dealing is not None:
        dealing.add_options(sub, preparer.dealing)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the manifest has them; not where it went."""
    return {name: value for name, value in options.items() if name not in ("out_dir", "overwrite", "seed")}


@contextmanager
def counting_files() -> Iterator[Callable[[int], None]]:
    """Says in a terminal how many files are written."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed} files"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("", total=None)
        yield lambda done: bar.update(line, completed=done)


def say(written: Mapping[str, Path], out: Path, picture: bool, by_name: bool = False) -> None:
    """What every site has now; ``by_name``: the command can tell patients by the names of images (``--group``)."""
    found: dict[str, dict[str, Counter[int | None]]] = {}
    names = None
    unknown: dict[str, list[str]] = {}
    for site, folder in written.items():
        content = json.loads((folder / "datalist.json").read_text(encoding="utf-8"))
        names = content.get("class_names", names)
        lists = {key: value for key, value in content.items() if key in SPLITS or key.startswith("test_")}
        print(f"{site} ({content['name']}): {', '.join(f'{len(entries)} {key}' for key, entries in lists.items())}")
        if not content.get("synthetic") and not any("patient" in e for own in lists.values() for e in own):
            unknown[site] = [e["image"] for own in lists.values() for e in own]
        found[site] = {
            key: Counter(e["label"] if isinstance(e["label"], int) else None for e in entries)
            for key, entries in lists.items()
        }
    if counting.classes_of(found, names) != [None]:
        print(f"\nimages of training, validation and test\n{counting.as_text(found, names)}", end="")
    for line in _patients(unknown, by_name):
        print(line)
    drawn = "counts.csv, counts.png" if picture else "counts.csv (no picture: pip install 'fairflare[plots]')"
    print(f"In {out}: {drawn}, manifest.json with checksums, versions and the seed.")
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    if task := manifest["task"]:
        given = (shlex.quote(f"{name}={json.dumps(value, separators=(',', ':'))}") for name, value in task.items())
        print(f"A run on it needs: {' '.join(f'--set {setting}' for setting in given)}")
    print(f"What to give as --data to run, compare and doctor: {out / 'fairflare.json'}")


def _patients(unknown: Mapping[str, Sequence[str]], by_name: bool) -> Iterator[str]:
    """That nobody said whose images they are, and what their names suggest."""
    if not unknown:
        return
    yield (
        f"NOTE: no patients are known at {', '.join(unknown)}: every image counts as a patient of its own, so images "
        "of one person may be in training and in test."
    )
    for site, images in unknown.items():
        if by_name and (found := suggested(images)) is not None:
            expression, groups = found
            example, number = next(iter(groups.items())), len(set(groups.values()))
            yield (
                f"      {site}: {number} groups by name ({Path(example[0]).name} is of '{example[1]}'); if these are "
                f"patients: --overwrite --group '{site + '=' if len(unknown) > 1 else ''}{expression}'"
            )


if __name__ == "__main__":
    raise SystemExit(main())
