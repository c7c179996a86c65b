"""Writes all that is generated from the declarations: the table of methods, ``docs/privacy.md`` and ``jobs/``.

``make refresh`` after a method or a setting was added or changed; a test holds that it changes nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from fairflare.federation import describe, privacy
from fairflare.flare.recipes import FairRecipe
from fairflare.methods.catalog import all_methods, plugin_of

ROOT = Path(__file__).parents[1]
TABLE, PRIVACY, JOBS = Path("docs/methods.md"), Path("docs/privacy.md"), Path("jobs")
BEGIN, END = "<!-- methods: made by make refresh -->", "<!-- end of methods -->"
MARKS = re.compile(f"(<!-- methods: [^>]*-->|{END})")


def contents() -> dict[Path, bytes]:
    """Every generated file, by its path below the repository's root.

    Raises:
        ValueError: docs/methods.md has no place for its table, or methods of other packages are installed (names them).
    """
    if others := [name for name, method in all_methods().items() if plugin_of(method)]:
        raise ValueError(f"these methods are of other packages, and would be written too: {', '.join(others)}")
    found = {
        TABLE: with_table((ROOT / TABLE).read_text(encoding="utf-8")).encode(),
        PRIVACY: privacy.page().encode(),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in all_methods():
            FairRecipe(name).export(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[JOBS / path.relative_to(folder)] = path.read_bytes()
    return found


def generated() -> set[Path]:
    """The generated files that are there."""
    jobs = (ROOT / JOBS).rglob("*") if (ROOT / JOBS).is_dir() else ()
    found = {path.relative_to(ROOT) for path in jobs if path.is_file() and "__pycache__" not in path.parts}
    return found | {path for path in (TABLE, PRIVACY) if (ROOT / path).is_file()}


def with_table(text: str) -> str:
    """The page with today's table.

    Raises:
        ValueError: the marks are not there once each, in their order.
    """
    parts = MARKS.split(text)
    if len(parts) != 5 or parts[1] == END or parts[3] != END:
        raise ValueError(f"docs/methods.md must have {BEGIN} and {END}, once each")
    return "".join([parts[0], BEGIN, "\n", describe.method_table(), "\n", END, parts[4]])


def main() -> int:
    """Writes what differs, and says what; 0."""
    wanted = contents()
    for path in sorted(generated() - set(wanted)):
        (ROOT / path).unlink()
        print(f"removed {path}")
    for folder in (ROOT / JOBS).iterdir() if (ROOT / JOBS).is_dir() else ():
        if folder.is_dir() and folder.name not in all_methods():
            shutil.rmtree(folder)
    for path, content in sorted(wanted.items()):
        if not (ROOT / path).is_file() or (ROOT / path).read_bytes() != content:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_bytes(content)
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
