"""Test adapters alone through FLARE's simulator: the bits equal those of one process that sends the whole network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.core.aggregation.low_rank import pairs_of
from fairflare.exchange.staging import Staging
from fairflare.federation.transports.local import run_local
from fairflare.methods.fair_lora import VALUES
from fairflare.recipes import FairRecipe
from tests.tiny import run_document

from .conftest import SimulatorRun
from .test_every_job import CLASSES, TONES, model_of

pytestmark = [pytest.mark.e2e, pytest.mark.walk]
VIT: dict[str, Any] = {
    "network": "vit_mini", "image_size": [32, 32], "patch_size": 8, "phantom_samples": 100, "phantom_test": 64,
    "phantom_own_test": 40, "local_epochs": 1,
}  # fmt: skip

FEW = {**CLASSES, **TONES, "phantom_samples": 100, "phantom_test": 64, "phantom_own_test": 64, "local_epochs": 1}


def in_both(
    simulate: Callable[..., SimulatorRun], folder: Path, method: str, local: dict[str, Any] | None = None, **more: Any
) -> tuple[SimulatorRun, Path]:
    """Return a run in the simulator that sends trained tensors alone, and one in this process that sends all."""

    def recipe(exchange: str) -> FairRecipe:
        return FairRecipe(method, sites=2, num_rounds=2, task="classification", exchange=exchange, **more)

    recipe("trainable").export(str(folder / "jobs"))
    run = simulate(folder / "jobs" / method, threads=2, local=local)
    assert run.code == 0, run.log[-3000:]
    assert [record["left_out"] for record in run.results["rounds"]] == [[], []]
    here = run_local(recipe("all").plan, folder / "here", local)
    assert run.results["test"] == run_document(here)["test"]
    return run, here


def test_the_average_of_products(simulate, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs it: make test-adapters")
    settings = {**VIT, "adapters": "lora", "adapters.rank": 6}
    run, here = in_both(simulate, tmp_path, "fed_avg", settings=settings, keep_local_models=True)
    sent, whole = model_of(run.folder.parent), model_of(here.parent)
    layers = pairs_of(whole)
    assert sent.keys() == {*(name for pair in layers.values() for name in pair), "head.weight", "head.bias"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in sent.items())
    for number, (found, expected) in enumerate(zip(run.results["rounds"], run_document(here)["rounds"], strict=True)):
        assert found["details"]["adapter_truncation"] == expected["details"]["adapter_truncation"]
        assert 0 < found["values"]["adapter_truncation"] < 1
        models = Staging(run.folder / "local_models" / f"round_{number:04d}").open_all()
        for layer, (name_a, name_b) in layers.items():
            products = {site: m[name_b].double().numpy() @ m[name_a].double().numpy() for site, m in models.items()}
            assert all(np.linalg.matrix_rank(product, tol=1e-9) == 6 for product in products.values())
            mean = sum(found["site_weights"][site] * product for site, product in products.items())
            values = np.linalg.svd(mean, compute_uv=False)
            lost = np.sqrt((values[6:] ** 2).sum() / (values**2).sum())
            assert found["details"]["adapter_truncation"][layer] == pytest.approx(lost, rel=1e-3)


def test_singular_values_by_group(simulate, tmp_path: Path) -> None:
    run, here = in_both(simulate, tmp_path, "fair_lora", settings=FEW)
    sent, whole = model_of(run.folder.parent), model_of(here.parent)
    assert not any(".base_layer.weight" in name for name in sent)
    assert sum(1 for name in sent if VALUES.fullmatch(name)) > 8
    assert all(torch.equal(tensor, whole[name]) for name, tensor in sent.items())
    assert run.results["groups"] == run_document(here)["groups"]
    assert run.results["groups"] is not None
