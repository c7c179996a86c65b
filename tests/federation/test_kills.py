"""Test kill -9 at random file operations of server and sites: the run is resumed and ends with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

METHODS = ["fed_lwr", "fed_mrl", "fed_ism_plus_s", "fed_mas", "fed_bn", "ditto", "fed_avg"]
ROOT = Path(__file__).parents[2]


def kill(method: str, folder: Path, seed: int, kills: int, rounds: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.federation.killed", method, str(folder), str(seed), str(kills), str(rounds)],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
def test_killed_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    found = kill("fed_mrl", tmp_path, seed=1, kills=2, rounds=2)
    assert len(found) == 2
    assert [entry for entry in found if entry["differing"]] == []


@pytest.mark.walk
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", METHODS)
def test_ten_kills_of_a_method(method: str, tmp_path: Path) -> None:
    found = kill(method, tmp_path, seed=2, kills=10, rounds=3)
    assert len(found) == 10
    assert [entry for entry in found if entry["differing"]] == []
