"""Test that the statistics job in FLARE's simulator gives the figures of the command in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.recipes import StatsRecipe

SITES = ["site-1", "site-2"]

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize("packaging", [pytest.param("bundle", marks=pytest.mark.walk), "preinstalled"])
def test_the_job_tells_what_the_command_tells(packaging, simulate, tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = CliRunner().invoke(app, ["phantom", "prostate", "--sites", "2", "-o", str(data)])
    assert made.exit_code == 0, made.output
    here = tmp_path / "here"
    ran = CliRunner().invoke(app, ["stats", "-d", str(data), "-o", str(here), "--set", "min_cases=3"])
    assert ran.exit_code == 0, ran.output

    StatsRecipe(sites=SITES, packaging=packaging, min_cases=3).export(str(tmp_path / "jobs"))
    if packaging == "preinstalled":  # the simulator has its allow list where a site has it
        local = tmp_path / "ws" / "local"
        local.mkdir(parents=True)
        allowed = {"format_version": 2, "client": {"retry_timeout": 30, "compression": "Gzip"}, "components": []}
        allowed["class_allow_list"] = ["nvflare.", "fairflare.flare.statistics."]
        (local / "resources.json").write_text(json.dumps(allowed))
    run = simulate(tmp_path / "jobs" / "stats", threads=2, local=json.loads((data / "fairflare.json").read_text()))
    assert run.code == 0, run.log[-2000:]
    for name in ("stats.json", "stats.csv"):
        assert (run.folder / name).read_text() == (here / name).read_text()
    assert "site-1" in (run.folder / "stats.html").read_text()
    assert json.loads((here / "stats.json").read_text())["pooled"]["counts"]["cases"] > 0
