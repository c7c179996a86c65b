"""Test that every method with a common model learns the task of nnU-Net's plan, of which no method knows."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from tests.tiny import model_in, run_document

from ..unit.test_nnunet_task import plan

TINY: dict[str, Any] = {
    "plan": plan(), "num_classes": 2, "phantom_cases": 0.2, "local_steps": 1, "batch_size": 1, "overlap": 0.0,
}  # fmt: skip
#: Settings of methods that name layers of the usual network.
OWN: dict[str, dict[str, Any]] = {"fed_lwr_last_layer": {"only_layer": "encoder.stages.1"}}


@pytest.mark.many("fed_lwr", "fed_ism")
@pytest.mark.parametrize("method", all_methods())
def test_a_method_learns_by_a_plan_or_segments_no_volumes(method: str, tmp_path: Path) -> None:
    for module in {inspect.getmodule(all_methods()[method].rule), inspect.getmodule(all_methods()[method].training)}:
        assert "nnunet" not in inspect.getsource(sys.modules[module.__name__]).lower()
    asked: dict[str, Any] = {"sites": 2, "num_rounds": 1, "bootstrap": 0}
    settings = {**TINY, **OWN.get(method, {})}
    given = {"settings": settings, **asked}
    if "segmentation" not in all_methods()[method].kinds:
        with pytest.raises(ValueError, match="cannot learn"):
            make_plan(method, task="nnunet", **given)
        return
    learned = make_plan(method, task="nnunet", **given)
    folder = run_local(learned, tmp_path)
    results = run_document(folder)
    assert results["status"] == "completed"
    assert all(record["left_out"] == [] for record in results["rounds"])
    assert {"dice", "dice_class_2"} <= set(results["test"]["site-1"])
    first, model = learned.task.build_model().state_dict(), model_in(folder)
    assert {*first} <= {*model}
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
