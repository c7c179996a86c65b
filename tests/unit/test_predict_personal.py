"""Test ``fairflare predict`` on runs whose sites keep tensors of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fairflare.cli import commands as cli
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.prediction.predictor import PERSONAL_NOTE, load_predictor
from fairflare.prediction.saved_model import read_model

SMALL = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3}


def run(folder: Path, method: str, **settings: object) -> Path:
    plan = make_plan(method, task="segmentation", sites=2, num_rounds=1, settings={**SMALL, **settings})
    run_local(plan, folder)
    return folder / "server" / "simulate_job"


@pytest.mark.parametrize(
    ("method", "settings"), [("fed_bn", {}), ("solo", {}), ("fed_avg", {"norm_statistics": "site"})]
)
def test_a_model_without_what_stays_at_the_sites_is_refused(
    method: str, settings: dict[str, object], tmp_path: Path
) -> None:
    made = run(tmp_path / "run", method, **settings)
    Image.new("L", (32, 32)).save(tmp_path / "image.png")
    asked = ["predict", str(tmp_path / "run"), str(tmp_path / "image.png"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 2
    model = read_model(made / "best_FL_global_model.pt")
    stays = torch.load(made / "FL_global_model.pt", weights_only=True)["train_conf"]["stays_at_sites"]
    assert 0 < model.at_sites == stays <= len(model.state)
    (line,) = result.stderr.splitlines()
    assert f"no model to use by itself: {stays} of its {len(model.state)} tensors are as they were" in line
    assert "norm_statistics=recalibrated" in line  # the remedy
    assert not (tmp_path / "out").exists()


def test_that_the_figures_are_of_other_models_is_said(tmp_path: Path) -> None:
    made = run(tmp_path / "run", "ditto")
    assert PERSONAL_NOTE in load_predictor(made).notes
    # A site half that the server does not know: the results alone say it.
    file = made / "FL_global_model.pt"
    content = torch.load(file, weights_only=True)
    for key in ("measured", "stays_at_sites"):
        del content["train_conf"][key]
    torch.save(content, file)
    assert PERSONAL_NOTE in load_predictor(made, "last").notes
    results = made / "fairflare" / "results.json"
    document = json.loads(results.read_text())
    document["info"]["measured"] = "common"
    results.write_text(json.dumps(document))
    assert load_predictor(made, "last").notes == []
