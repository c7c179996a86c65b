"""Test the example scripts that draw figures of the papers, on a run with synthetic images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.reporting.results import find_results

from ..loaded import loaded
from ..tiny import run_document

SETTINGS = {
    "phantom": "fundus", "image_size": [32, 32], "features": [4, 4, 8, 8], "phantom_samples": 60, "phantom_test": 40,
    "partition": "iid", "local_epochs": 1, "learning_rate": 0.05,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "run"
    plan = make_plan("fed_avg", task="classification", sites=2, num_rounds=1, settings=SETTINGS, keep_local_models=True)
    run_local(plan, folder, {})
    return folder


def test_the_landscape_has_the_models_own_loss_in_its_middle(run: Path, tmp_path: Path) -> None:
    script = loaded("docs/examples/loss_landscape.py")
    script.POINTS = 3
    losses = script.main(str(run), str(tmp_path / "a.png"), "site-2", "test")
    results = run_document(find_results(run))
    # A run averages its loss over the batches of its own size; both are means over the same images.
    assert losses[1, 1] == pytest.approx(results["test"]["site-2"]["loss"], rel=1e-5)
    assert np.isfinite(losses).all()
    assert len(np.unique(losses)) == 9
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_every_filter_of_a_direction_is_as_long_as_the_models() -> None:
    script = loaded("docs/examples/loss_landscape.py")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(3, 2)
    )
    first, second = script.directions(model, 0)
    assert set(first) == set(second) == {"0.weight", "3.weight"}  # no bias, no norm
    for name in first:
        assert not torch.equal(first[name], second[name])
        for along in (first, second):
            for own, drawn in zip(model.state_dict()[name], along[name], strict=True):
                assert float(drawn.flatten().norm()) == pytest.approx(float(own.flatten().norm()), rel=1e-5)


def test_models_of_two_sites_are_compared_layer_by_layer(run: Path, tmp_path: Path) -> None:
    script = loaded("docs/examples/model_similarity.py")
    found = script.main(str(run), str(tmp_path / "b.png"), "site-1", "test")
    assert list(found) == [("site-1", "site-2")]
    (layers,) = found.values()
    assert all(0 < cka <= 1 for cka in layers.values() if not np.isnan(cka))
    assert min(layers.values()) < 0.9999  # they were trained apart
    assert (tmp_path / "b.png").stat().st_size > 5000
