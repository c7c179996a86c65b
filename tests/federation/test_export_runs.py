"""Write models of whole runs for programs without FairFlare, as a user does: personal models, adapters, own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fairflare.cli.commands import app
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.prediction.saved_model import PERSONAL_NOTE
from tests.tiny import VOLUMES
from tests.unit.test_predict import OWN_TASK

TONES: dict[str, Any] = {
    "network": "vit_mini", "image_size": [32, 32], "patch_size": 8, "phantom_samples": 100, "phantom_test": 64,
    "phantom_own_test": 40, "local_steps": 2,
}  # fmt: skip


def run(folder: Path, method: str, settings: dict[str, Any], **more: Any) -> Path:
    plan = make_plan(method, sites=2, num_rounds=1, settings=settings, bootstrap=0, **more)
    run_local(plan, folder)
    return folder


def written(run_dir: Path, kind: str, *more: Any) -> tuple[Result, Path]:
    out = run_dir.parent / kind
    return CliRunner().invoke(app, ["predict", str(run_dir), "--as", kind, str(out), *map(str, more)]), out


def refused(run_dir: Path, kind: str, text: str, *more: Any) -> None:
    """Check that one sentence refuses it, and that nothing is written."""
    before = {*run_dir.parent.rglob("*")}
    result, _ = written(run_dir, kind, *more)
    assert result.exit_code == 2, result.output
    (line,) = [one for one in result.stderr.splitlines() if one.startswith("error: ")]
    assert text in line
    assert {*run_dir.parent.rglob("*")} == before


@pytest.mark.parametrize("method", ["fed_bn", "fed_rdn", "solo"])
def test_a_model_of_which_a_part_stays_at_the_sites_is_refused(method: str, tmp_path: Path) -> None:
    made = run(tmp_path / "run", method, VOLUMES, task="segmentation")
    for kind in ("torchscript", "bundle"):
        refused(made, kind, "is no model to use by itself: ")


def test_the_common_model_beside_personal_ones_says_so(tmp_path: Path) -> None:
    result, out = written(run(tmp_path / "run", "ditto", VOLUMES), "bundle")
    assert result.exit_code == 0, result.output
    assert json.loads((out / "input.json").read_text())["notes"] == [PERSONAL_NOTE]
    assert PERSONAL_NOTE in " ".join(result.stderr.split())


def test_adapters_of_groups_become_weights(tmp_path: Path) -> None:
    made = run(tmp_path / "run", "fair_lora", TONES)
    result, out = written(made, "torchscript")
    assert result.exit_code == 0, result.output
    assert not [name for name, _ in torch.jit.load(out / "model.ts").named_parameters() if "fair_" in name]
    refused(made, "bundle", "this classifier is not one of MONAI's by itself; write it as torchscript or onnx")


def test_a_task_with_code_of_its_own_is_written_where_that_code_is_given(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_TASK, "utf-8")
    made = run(tmp_path / "run", "fed_avg", {"image_size": [32, 32], "phantom_cases": 0.1, "local_steps": 2},
               task_file=file)  # fmt: skip
    refused(made, "torchscript", "the run's task has code of its own (build_model), which is not run unasked")
    refused(made, "bundle", "builds its network, or reads its outputs, by code of its own", "--task-file", file)
    result, out = written(made, "torchscript", "--task-file", file)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "input.json").read_text())["own_code"] == ["build_model"]
