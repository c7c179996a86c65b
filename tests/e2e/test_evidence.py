"""Test that the command of docs/results/protocol.md goes on from stored runs, after a kill and in another folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(900)]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLAN: dict[str, Any] = {
    "split": [0.2, 0.1, 0.7], "training": {"batch_size": 4},
    "stages": {"screen": {"families": ["tiny"], "seeds": [0, 1]}},
    "rows": {"FedAvg": ["fed_avg"], "FedBN": ["fed_bn"]},
    "families": {
        "tiny": {
            "title": "phantom", "rounds": 1, "task": "segmentation",
            "make": ["phantom", "prostate", "--sites", "2", "--size", "32", "--cases", "0.2"],
            "set": {"image_size": [32, 32], "features": [4, 4, 4, 8, 8, 4]},
        }
    },
}  # fmt: skip


def begin(work: Path, store: Path) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own, with the tiny plan."""
    code = (
        "import json, sys; from pathlib import Path; import evidence; evidence.PLAN = json.loads(sys.argv[1]); "
        "evidence.STORE = Path(sys.argv[3]); evidence.main(['--work', sys.argv[2]])"
    )
    words = [sys.executable, "-c", code, json.dumps(PLAN), str(work), str(store)]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)}, start_new_session=True)


def figures(store: Path) -> dict[str, Any]:
    """Return the tests' figures and draws of every stored run."""
    found = {}
    with tarfile.open(store / "screen-tiny.tar.xz") as stored:
        for head in stored:
            if head.name.endswith("results.json"):
                document = json.loads(stored.extractfile(head).read())  # type: ignore[union-attr]
                found[head.name] = document["cells"], document["vectors"]
    return found


def test_a_killed_comparison_goes_on_elsewhere_from_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import evidence

    killed = begin(tmp_path / "killed", tmp_path / "store")
    while not any('"completed"' in file.read_text() for file in tmp_path.glob("killed/**/results.json")):
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    monkeypatch.setattr(evidence, "STORE", tmp_path / "store")
    evidence.pack("screen-tiny", tmp_path / "killed")
    before = figures(tmp_path / "store")
    assert 1 <= len(before) < 4

    assert begin(tmp_path / "on", tmp_path / "store").wait() == 0
    again = {file.parent.name for file in tmp_path.glob("on/screen/tiny/runs/*/run.log")}
    assert len(again) == 4 - len(before)
    assert not any(name in run for run in before for name in again)

    assert begin(tmp_path / "whole", tmp_path / "other").wait() == 0
    assert figures(tmp_path / "store") == figures(tmp_path / "other")
    assert {name: figures(tmp_path / "store")[name] for name in before} == before
