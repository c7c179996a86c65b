"""The example of ``docs/architecture.md`` is a working method."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from fairflare.exchange.wire import reply_model
from fairflare.flare.site import SiteTask, SiteWorker
from fairflare.tasks.segmentation import SegmentationTask

ROOT = Path(__file__).parents[2]


def test_a_new_method_in_one_file(tmp_path):
    text = (ROOT / "docs" / "architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module: dict = {"__name__": "loss_power"}
    exec(compile(code, "loss_power.py", "exec"), module)
    (method,) = module["METHODS"]
    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 8, 8, 8, 4), phantom_cases=0.3)
    torch.manual_seed(0)
    state = task.build_model().state_dict()
    aggregator = method.aggregator(q=2.0)
    aggregator.begin_round(0, 1, global_state=state, folder=tmp_path / "staging")
    losses = {}
    for site in ("site-1", "site-2"):
        worker = SiteWorker(site, task, method.training(), {}, tmp_path / site, num_threads=1)
        reply = worker.perform(SiteTask("train", dict(state), 0, 1, 0))
        losses[site] = reply.metrics["loss"]
        model = reply_model(
            update=reply.update, meta={"status": "ok", "report": reply.report, "num_samples": 1}, current_round=0
        )
        model.meta["client_name"] = site
        aggregator.accept_model(model)
    assert aggregator.rejected == {}
    aggregator.aggregate_model()
    total = sum(v**2 for v in losses.values())
    expected = {site: v**2 / total for site, v in losses.items()}
    for site, weight in aggregator.last_weighing.sites.items():
        assert abs(weight - expected[site]) < 1e-6
