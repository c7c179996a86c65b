"""What a run makes last must be in the model that it ends with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.server.retraining import Retraining
from fairflare.methods.afl import AFL
from fairflare.tasks.classification import ClassificationTask

STATE = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}


@pytest.mark.parametrize("lost", [{"crt_rounds": 2}, {"norm_statistics": "recalibrated"}])
def test_a_mean_over_the_rounds_would_lose_it(lost: dict[str, Any]) -> None:
    task = ClassificationTask()
    Retraining(AFL(), RunSettings(**lost)).check(task, STATE)
    Retraining(AFL(report_average=True), RunSettings()).check(task, STATE)
    with pytest.raises(ValueError, match="ends with a mean over its rounds"):
        Retraining(AFL(report_average=True), RunSettings(**lost)).check(task, STATE)
