"""Run every quick test once: python -m tests.quick [pytest's arguments]

First the tests of fairflare where fairflare_lab cannot be imported (tests/core_only.py), then, with the lab, all that
did not run there. A test that is in neither half is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import pytest

from tests import core_only

ROOT = Path(__file__).parents[1]


def main(arguments: list[str]) -> int:
    """Return the exit status of the first half that failed."""
    covers = any(word.startswith("--cov") for word in arguments)
    with TemporaryDirectory(prefix="fairflare-quick-") as folder:
        without, beside, found = (Path(folder) / name for name in ("without", "with", "found"))
        hooks = ["-p", "tests.quick", *arguments]
        first = core_only.main([*hooks, f"--ran-to={without}", *(["--cov-report="] if covers else [])])
        given = [f"--ran-to={beside}", f"--but={without}", f"--found-to={found}", *(["--cov-append"] if covers else [])]
        second = subprocess.run([sys.executable, "-m", "pytest", *hooks, *given], cwd=ROOT).returncode
        if first or second:
            return first or second
        halves = [json.loads(path.read_text(encoding="utf-8")) for path in (without, beside)]
        tests = json.loads(found.read_text(encoding="utf-8"))
        print(f"{len(tests)} quick tests: {sum(halves[0].values())} without fairflare_lab, {len(halves[1])} with it")
        if lost := [test for test in tests if not any(test in half for half in halves)]:
            print("in neither half:", *lost, sep="\n  ")
        return int(bool(lost))


# ------------------------------------------------------------------------------------------------ hooks of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the files by which one half tells the other."""
    parser.addoption("--ran-to", type=Path, help="write the tests, and whether each ran or was skipped")
    parser.addoption("--but", type=Path, help="leave out the tests that ran by this file of --ran-to")
    parser.addoption("--found-to", type=Path, help="write which tests there are with those of --but")


def pytest_configure(config: pytest.Config) -> None:
    """Record results where all of them arrive, which with -n is not in a worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config.getoption("ran_to")))


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Import FLARE once with a lean stack: each of its modules would look up the source of every frame of pytest."""

    def lean() -> list[SimpleNamespace]:
        return [SimpleNamespace(frame=frame) for frame in (None, sys._getframe(2))]

    if isinstance(collector, pytest.Session):
        with mock.patch("inspect.stack", lean):
            import fairflare.recipes  # noqa: F401


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ran before."""
    if not config.getoption("but"):
        return
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        config.getoption("found_to").write_text(json.dumps([item.nodeid for item in items]), encoding="utf-8")
    before = json.loads(config.getoption("but").read_text(encoding="utf-8"))
    items[:] = [item for item in items if not before.get(item.nodeid)]


class Record:
    """Record which tests ran."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ran: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test; what was skipped in the first half is left to the second."""
        ran = report.failed or (report.when == "call" and report.passed)
        self.ran[report.nodeid] = self.ran.get(report.nodeid, False) or ran

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self.path.write_text(json.dumps(self.ran), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
