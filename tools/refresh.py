"""Write all generated files: the job folders in ``jobs/``.

``make refresh`` after a method or a setting was added or changed; a test holds that it changes nothing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from fairflare.flare.export.recipes import FairRecipe
from fairflare.methods.base.catalog import all_methods, plugin_of

ROOT = Path(__file__).parents[1]
JOBS = Path("jobs")


def contents() -> dict[Path, bytes]:
    """Return every generated file, by its path below the repository's root.

    Raises:
        ValueError: methods of other packages are installed (names them).
    """
    if others := [name for name, method in all_methods().items() if plugin_of(method)]:
        raise ValueError(f"these methods are of other packages, and would be written too: {', '.join(others)}")
    found: dict[Path, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in all_methods():
            FairRecipe(name).export(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[JOBS / path.relative_to(folder)] = path.read_bytes()
    return found


def generated() -> set[Path]:
    """Return the generated files that exist."""
    jobs = (ROOT / JOBS).rglob("*") if (ROOT / JOBS).is_dir() else ()
    return {path.relative_to(ROOT) for path in jobs if path.is_file() and "__pycache__" not in path.parts}


def main() -> int:
    """Write the files that differ, and print their names; return 0."""
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
