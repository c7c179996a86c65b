"""Test every method's job through FLARE's simulator: three rounds, all sites, the bits of a run in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.recipes import FairRecipe

from .conftest import TINY, run_simulator

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(400)]

CLASSES: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8], "max_pool": False,
    "phantom_samples": 400, "phantom_test": 184, "phantom_own_test": 184,
}  # fmt: skip
#: Groups of people: the phantom's skin tones.
TONES: dict[str, Any] = {"phantom": "dermoscopy", "attributes": True, "groups": ["tone"]}
#: Where three rounds of a tiny job need more than that.
ALSO: dict[str, dict[str, Any]] = {
    "crt": {"crt_rounds": 1},
    "fed_mrl": {"mu_policy": "qmix"},
    "creff": {"feature_steps": 3, "classifier_epochs": 2, "gradient_repeats": 1},
}


def recipe_of(name: str) -> FairRecipe:
    method = all_methods()[name]
    tiny = {**(TINY if method.task == "segmentation" else CLASSES), "local_epochs": 1, **ALSO.get(name, {})}
    return FairRecipe(name, sites=2, num_rounds=3, settings=tiny)


def model_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / "FL_global_model.pt", weights_only=True)["model"]


@pytest.mark.parametrize("name", list(all_methods()))
def test_three_rounds(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name)
    here = run_local(recipe.plan, tmp_path / "here")
    recipe.export(str(tmp_path / "jobs"))
    run = run_simulator(tmp_path, tmp_path / "jobs" / recipe.name, threads=2)
    assert run.code == 0, run.log[-3000:]
    results = run.results
    assert results["status"] == "completed"
    rounds = 3 + ALSO.get(name, {}).get("crt_rounds", 0)
    assert [record["current_round"] for record in results["rounds"]] == list(range(rounds))
    assert all(record["left_out"] == [] for record in results["rounds"])
    assert sorted(results["test"]) == ["site-1", "site-2"]
    expected, found = model_of(here.parent), model_of(run.folder.parent)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
