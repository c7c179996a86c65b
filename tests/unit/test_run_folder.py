"""Test that an experiment's results survive a wrong resume."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fairflare.cli import commands as cli

SMALL = ["image_size=[32,32]", "features=[4,4,8,8,8,4]", "phantom_cases=0.3"]


def run(*more: str) -> Result:
    fixed = ["run", "fed_avg", "--task", "segmentation", "--sites", "2", "--in-process", "--experiment", "e"]
    return CliRunner().invoke(cli.app, [*fixed, *(part for text in SMALL for part in ("--set", text)), *more])


@pytest.mark.long
def test_a_refused_continuation_leaves_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "runs/fed_avg-seed0/server/simulate_job/fairflare/results.json"
    assert run("--rounds", "1").exit_code == 0
    before = results.read_text()
    refused = run("--rounds", "2", "--set", "learning_rate=0.5")
    assert refused.exit_code == 1
    assert "other settings (training.learning_rate: was 0.001, is 0.5)" in refused.stderr
    assert results.read_text() == before
    assert run("--rounds", "2").exit_code == 0  # and the right command goes on
    assert [record["current_round"] for record in json.loads(results.read_text())["rounds"]] == [0, 1]
    assert not (tmp_path / "runs/fed_avg-seed0.before").exists()


def test_a_warning_is_shown_once_a_run_and_another_one_too(recwarn: pytest.WarningsRecorder) -> None:
    from fairflare.cli.run.here import warn_once

    def old(text: str) -> None:
        with warnings.catch_warnings():  # which makes Python forget what it has shown
            warnings.simplefilter("ignore")
        warnings.warn(text, FutureWarning, stacklevel=1)

    recwarn.clear()
    show = warnings.showwarning
    shown: list[str] = []
    warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
    try:
        warnings.simplefilter("always")
        with warn_once():
            for text in ("one", "one", "other", "one"):
                old(text)
    finally:
        warnings.showwarning = show
    assert shown == ["one", "other"]
