"""Provide fixtures and hooks of pytest that all tests share."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The page at the end of a run takes two seconds, and hundreds of tests end a run; those of the page turn it on.
os.environ.setdefault("FAIRFLARE_REPORT", "0")
settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which saves a third of a second in each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, as small networks are slower with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------ without the lab

NEEDS_LAB = re.compile(
    r"(in|by) the package fairflare_lab|No such command '(compare|report|phantom)'|No module named 'fairflare_lab"
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Skip what turns out to need the lab where it is not installed (tests/core_only.py)."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed and find_spec("fairflare_lab") is None and NEEDS_LAB.search(str(report.longrepr)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "Skipped: needs fairflare_lab")


# ------------------------------------------------------------------------------------------------ real images

REAL_DATA = "FAIRFLARE_REAL_DATA"
NO_REAL_DATA = f"no real images: {REAL_DATA} names no folder"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of real images unless their folder is named; a folder that does not exist is an error.

    Of a test with the mark ``many`` the first case is of the first tier, or those of ``many(KEY, ...)``: the numbers of
    cases, or words of which one stands in a case's name. The others are ``long``.
    """
    given = os.environ.get(REAL_DATA)
    if given and not Path(given).is_dir():
        raise pytest.UsageError(f"{REAL_DATA}={given}: there is no such folder")
    seen: Counter[str] = Counter()
    for item in items:
        if many := item.get_closest_marker("many"):
            test, _, case = item.nodeid.partition("[")
            words = {word for word in many.args if isinstance(word, str)}
            if seen[test] not in (many.args or (0,)) and words.isdisjoint(re.split(r"[\[\]-]", case)):
                item.add_marker("long")
            seen[test] += 1
        if "real_data" in getattr(item, "fixturenames", ()):
            item.add_marker("real_data")
            if not given:
                item.add_marker(pytest.mark.skip(reason=NO_REAL_DATA))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report in one line how many tests of real images did not run."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if NO_REAL_DATA in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of real images skipped: {NO_REAL_DATA}", yellow=True)


@pytest.fixture
def real_data() -> Path:
    """Return the folder of the real images."""
    return Path(os.environ[REAL_DATA])
