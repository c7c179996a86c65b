"""Provide fixtures and hooks of pytest that all tests share."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import typer.testing
from hypothesis import settings

gc.disable()  # until all files of tests are imported, which leaves next to no garbage
# Networks of tests are small, and threads of torch that wait for each other take the processor all the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The page at the end of a run takes two seconds, and hundreds of tests end a run; those of the page turn it on.
os.environ.setdefault("FAIRFLARE_REPORT", "0")
# A busy machine is no failure, and a failure belongs to a change. To search by chance: --hypothesis-profile chance
settings.register_profile("chance", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
# Typer makes all commands anew in each call of a test, which takes longer than most answers.
typer.testing._get_command = cache(typer.testing._get_command)


def _by_path(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of importlib.metadata that looks once where packages are; a test may add a place."""
    found = cache(lambda path, *args, **kwargs: function(*args, **kwargs))
    return wraps(function)(lambda *args, **kwargs: found(tuple(sys.path), *args, **kwargs))


# Every run asks for the versions and entry points of what is installed, which takes a fifth of the time of a small one.
importlib.metadata.version = _by_path(importlib.metadata.version)
importlib.metadata.entry_points = _by_path(importlib.metadata.entry_points)
# A run writes dozens of files, and waits for the disk each time; what a killed process leaves is tested in others.
os.fsync = os.fstat  # type: ignore[assignment]


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is asked once for each argument, where arguments can be compared."""
    found = cache(function)
    return wraps(function)(lambda *of: found(*of) if all(isinstance(one, Hashable) for one in of) else function(*of))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which saves a third of a second in each collection.

    Keep too what each site and each bundle of a run makes anew, though it is the same in all tests: pydantic's check of
    a type, and MONAI's table of its classes.
    """
    if site_file := sys.modules.get("fairflare.federation.site.site_file"):
        site_file.TypeAdapter = _once(site_file.TypeAdapter)  # type: ignore[attr-defined]
    if config_item := sys.modules.get("monai.bundle.config_item"):
        locator = config_item.ComponentLocator
        table = cache(locator._find_classes_or_functions)
        locator._find_classes_or_functions = lambda self, names: table(None, tuple(names))
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # also in the process that hands tests to others, where xdist's ends the call
def pytest_runtestloop() -> None:
    """Collect garbage from here on."""
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as small networks are slower with two threads, also after a test that left another number."""
    torch = sys.modules.get("torch")  # only where a file of tests imported it: not in the process that hands them out
    if torch is None:
        yield
        return
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


# ------------------------------------------------------------------------------------------------ what others publish

#: Fixture -> the variable that names its folder, and what is in there.
OUTSIDE = {
    "real_data": ("FAIRFLARE_REAL_DATA", "real images"),
    "model_zoo": ("FAIRFLARE_MODEL_ZOO", "model zoo"),
}
MISSING = {name: f"no {what}: {variable} names no folder" for name, (variable, what) in OUTSIDE.items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="of the long tests only part K of N, drawn by name")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of others' images or bundles whose folder nobody names; a folder that does not exist is an error.

    Of a test with the mark ``many`` the first case is of the first tier, or those of ``many(KEY, ...)``: the numbers of
    cases, or words of which one stands in a case's name. The others are ``long``.
    """
    given = {name: os.environ.get(variable) for name, (variable, _) in OUTSIDE.items()}
    for name, folder in given.items():
        if folder and not Path(folder).is_dir():
            raise pytest.UsageError(f"{OUTSIDE[name][0]}={folder}: there is no such folder")
    seen: Counter[str] = Counter()
    for item in items:
        if many := item.get_closest_marker("many"):
            test, _, case = item.nodeid.partition("[")
            words = {word for word in many.args if isinstance(word, str)}
            if seen[test] not in (many.args or (0,)) and words.isdisjoint(re.split(r"[\[\]-]", case)):
                item.add_marker("long")
            seen[test] += 1
        for name in OUTSIDE.keys() & {*getattr(item, "fixturenames", ())}:
            item.add_marker(name)
            if not given[name]:
                item.add_marker(pytest.mark.skip(reason=MISSING[name]))
    part, parts = map(int, config.getoption("--part").split("/"))
    others = {i for i in items if i.get_closest_marker("long") and crc32(i.nodeid.encode()) % parts != part - 1}
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests of what others publish did not run, a line each."""
    for name, reason in MISSING.items():
        skipped = [r for r in terminalreporter.stats.get("skipped", []) if reason in str(r.longrepr)]
        if skipped:
            text = f"{len(skipped)} tests of {OUTSIDE[name][1]} skipped: {reason}"
            terminalreporter.write_line(text, yellow=True)


@pytest.fixture
def real_data() -> Path:
    """Return the folder of the real images."""
    return Path(os.environ[OUTSIDE["real_data"][0]])


@pytest.fixture
def model_zoo() -> Path:
    """Return the checkout of MONAI's model zoo."""
    return Path(os.environ[OUTSIDE["model_zoo"][0]])
