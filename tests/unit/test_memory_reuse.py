"""Test that freed memory is reused while a site computes and for its next task, and is else given back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from fairflare.base.machine import memory_reuse
from fairflare.base.machine.memory_reuse import reuse_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives these limits")

PROGRAM = """
import resource
import numpy as np
from fairflare.base.machine.memory_reuse import reuse_memory

def faults(times=8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [np.ones(5_000_000) for _ in range(4)]  # 40 MB each: above what glibc itself would learn to keep
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

outside, start = faults(), resident()
with reuse_memory("cpu"):
    faults(1)
    inside, held = faults(), resident()
print(outside, inside, held - start, resident() - start)
"""


def answer(**environment: str) -> list[int]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=given | environment, capture_output=True, text=True, check=True
    )
    return [int(value) for value in done.stdout.split()]


@glibc
def test_large_blocks_are_not_mapped_anew_inside_and_are_given_back_behind_it() -> None:
    outside, inside, held, after = answer()
    assert inside < outside / 20
    assert held > 30e6
    assert after < 10e6


@glibc
def test_what_the_environment_says_of_the_allocator_goes_before() -> None:
    outside, inside, *_ = answer(MALLOC_ARENA_MAX="2")
    assert inside > outside / 2


def test_nothing_is_set_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reuse, "_set_limits", lambda: pytest.fail("the C library was asked"))
    with reuse_memory("cuda"):
        pass
