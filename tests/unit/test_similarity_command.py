"""CKA between the local models of pairs of sites: the command against a loop of its own, and what it refuses."""

from __future__ import annotations

import csv
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fairflare.cli import app
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.tasks.segmentation import SegmentationTask

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]
SMALL = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "local_epochs": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, keep in (("kept", True), ("plain", False)):
        plan = make_plan("fed_avg", sites=3, num_rounds=1, settings=SMALL, keep_local_models=keep)
        run_local(plan, root / name)
    return root


def naive(a: torch.nn.Module, b: torch.nn.Module, images: torch.Tensor, layer: str) -> float:
    """Eq. 2 with the centring matrix written out."""
    grams = []
    for model in (a.double().eval(), b.double().eval()):
        seen: list[torch.Tensor] = []
        hook = model.get_submodule(layer).register_forward_hook(lambda m, i, o, s=seen: s.append(o.detach()))
        with torch.no_grad():
            model(images.double())
        hook.remove()
        features = seen[0].flatten(1).numpy()
        grams.append(features @ features.T)
    n = len(images)
    h = np.eye(n) - np.ones((n, n)) / n
    k, m = (h @ gram @ h for gram in grams)
    return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


def test_pairs_against_a_loop(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = CliRunner().invoke(app, ["similarity", str(runs / "kept"), "--out", str(out), "--device", "cpu"])
    assert found.exit_code == 0, found.output
    assert sorted(p.name for p in out.iterdir()) == ["similarity.csv", "similarity.png", "similarity.svg"]
    assert "SYNTHETIC" in (out / "similarity.svg").read_text()
    with (out / "similarity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    sites = ["site-1", "site-2", "site-3"]
    assert list(dict.fromkeys((r["site"], r["other"]) for r in rows)) == list(combinations(sites, 2))
    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 8, 8, 8, 4), phantom_cases=0.3)
    kept = runs / "kept/server/simulate_job/fairflare/local_models/round_0000"
    states = sorted(kept.glob("*.safetensors"))
    models = {}
    for site, path in zip(sites, states, strict=True):
        models[site] = task.build_model()
        models[site].load_state_dict(load_file(path))
    batches = [b for site in sites for b in task.open_site(site, {}).batches("validation", batch_size=99)]
    images = torch.cat([inputs for inputs, _ in batches])
    layers = list(dict.fromkeys(r["layer"] for r in rows))
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for a, b in combinations(sites, 2):
            (row,) = [r for r in rows if (r["site"], r["other"], r["layer"]) == (a, b, layer)]
            assert float(row["cka"]) == pytest.approx(naive(models[a], models[b], images, layer), abs=1e-4)
    assert min(float(r["cka"]) for r in rows) < 0.999


@pytest.mark.parametrize(
    ("run", "more", "text"),
    [
        ("plain", [], "plain has no local models of its sites; run it with --keep-local-models"),
        ("kept", ["--round", "7"], "has kept no local models of round 7; there are 0"),
    ],
)
def test_what_is_missing_is_said(runs: Path, tmp_path: Path, run: str, more: list[str], text: str) -> None:
    found = CliRunner().invoke(app, ["similarity", str(runs / run), "--out", str(tmp_path / "o"), *more])
    assert found.exit_code == 2
    assert text in " ".join(found.stderr.split())
