"""Test the commands of docs/volumes.md on a small scale, from NIfTI folders of three sites to a comparison's page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import run_document

from .test_real_sets import fairflare

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hippocampus_folders.py"


def test_hippocampus_volumes_to_a_page(real_data: Path, tmp_path: Path) -> None:
    mine, data, out = tmp_path / "mine", tmp_path / "data", tmp_path / "compared"
    subprocess.run([sys.executable, SCRIPT, real_data, mine, "--limit", "10"], check=True)
    told = fairflare("prepare", "volumes", "--source", mine, "--out", data)
    assert "A run on it needs: --task volume_segmentation --set num_classes=2" in told
    assert "30 usable images at 3 site(s); 0 problem(s)" in fairflare("check-data", data)
    fairflare("stats", "--data", data, "--out", tmp_path / "stats")
    assert (tmp_path / "stats" / "stats.html").is_file()
    fairflare(
        "compare", "fed_avg", "fed_bn", "--data", data, "--seeds", "1",
        "--rounds", "2", "--out", out, "--set", "patches=1", "--set", 'metrics=["hd95"]',
    )  # fmt: skip
    fairflare("report", out)
    results = [run_document(file) for file in out.rglob("results.json")]
    assert len(results) == 2
    for run in results:
        assert run["info"]["units"]["hd95"] == "mm"
        assert run["info"]["higher_is_better"]["hd95"] is False
        assert all({"dice", "hd95", "hd95_class_2"} <= set(metrics) for metrics in run["test"].values())
