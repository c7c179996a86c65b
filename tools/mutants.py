"""Break the packages at the places of ``tests/mutants.toml``, one at a time, and see which changes tests notice.

python tools/mutants.py [--only NAME] [--room ROOM] [--workers N]
python tools/mutants.py --random N --seed S [--rooms ROOM ...]: changes drawn at random, see random_mutants.py

Each entry replaces one text in a copy of ``custom`` and runs its tests against that copy; the checkout stays as it is.
``killed``: a test failed. ``alive``: none did. ``slow``: the tests did not end in time. ``lost``: the text does not
occur exactly once, or the tests are gone: whoever moved them mends the entry. A text that left its module is looked
for in all others. The exit code is 1 where fewer die than the list says, 2 where tests fail without any change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tomllib  # needs Python 3.11, which CI has

ROOT = Path(__file__).parents[1]
PACKAGES, LIST = ROOT / "custom", ROOT / "tests" / "mutants.toml"
LIMIT = 300  # seconds for the tests of one entry
FAILED = (1, 2)  # pytest's exit codes where a test failed, or a test file could not be imported


@dataclass(frozen=True)
class Mutant:
    """Describe a change that tests must notice, as ``tests/mutants.toml`` has it."""

    name: str
    room: str
    module: str
    before: str
    after: str
    tests: list[str]
    dies: bool


def place_of(mutant: Mutant, packages: Path) -> Path | None:
    """Return the file of a change; ``None``: its text does not occur exactly once."""
    named = packages / Path(*mutant.module.split(".")).with_suffix(".py")
    for paths in ([named] if named.is_file() else [], sorted(packages.rglob("*.py"))):
        counts = {path: path.read_text(encoding="utf-8").count(mutant.before) for path in paths}
        if sum(counts.values()) == 1:
            return max(counts, key=lambda path: counts[path])
    return None


def run(tests: Sequence[str], packages: Path, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run tests against the packages in a folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    # A file changed within a second to one of the same length would be taken from the cache.
    env = {**os.environ, "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)


def verdict(mutant: Mutant) -> str:
    """Return what becomes of a change."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        packages = Path(shutil.copytree(PACKAGES, Path(folder) / "custom"))
        path = place_of(mutant, packages)
        if path is None or not all((ROOT / test.partition("::")[0]).is_file() for test in mutant.tests):
            return "lost"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
        try:
            code = run(mutant.tests, packages, LIMIT).returncode
        except subprocess.TimeoutExpired:
            return "slow"
    return "killed" if code in FAILED else "alive" if code == 0 else "lost"


def refuse_red(mutants: Sequence[Mutant]) -> None:
    """Exit where tests fail without a change, as their verdict on a change would mean nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests if (ROOT / test.partition("::")[0]).is_file()})
    if (found := run(tests, PACKAGES)).returncode:
        print(found.stdout[-2000:], "these tests fail without any change", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen changes and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="the entry of this name")
    parser.add_argument("--room", help="the entries of this room")
    parser.add_argument("--workers", "--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--random", type=int, metavar="N", help="draw N changes instead of those of the list")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn changes")
    parser.add_argument("--rooms", nargs="*", default=(), metavar="ROOM", help="folders or files of a package")
    parser.add_argument("--seconds", type=float, default=60, help="processor time of the tests of a drawn change")
    chosen = parser.parse_args(arguments)
    if chosen.random:
        import random_mutants

        return random_mutants.run(chosen.random, chosen.seed, chosen.rooms, chosen.workers, chosen.seconds)
    content = tomllib.loads(LIST.read_text(encoding="utf-8"))
    every = [Mutant(**entry) for entry in content["mutant"]]
    mutants = [m for m in every if chosen.only in (None, m.name) and chosen.room in (None, m.room)]
    if not mutants:
        parser.error("no entry has this name and room")
    refuse_red(mutants)
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(chosen.workers) as pool:
        for mutant, found in zip(mutants, pool.map(verdict, mutants), strict=True):
            counts[found] += 1
            before = "killed" if mutant.dies else "alive"
            told = "" if found == before else f" ({before} before)"
            print(f"{found:6} {mutant.room}: {mutant.name}{told}", flush=True)
    wanted = content["dead"] if mutants == every else sum(mutant.dies for mutant in mutants)
    print(f"{counts['killed']} of {len(mutants)} killed, {wanted} before; {dict(counts)}")
    return int(counts["killed"] < wanted)


if __name__ == "__main__":
    raise SystemExit(main())
