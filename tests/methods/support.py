"""Provide a site with little data, and a round at the server without a site, for tests of methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairflare.exchange.messages import STATUS_OK, SiteReply, SiteTask, clean_state, encode_reply
from fairflare.federation.collecting.collector import Collector, LikeReceived
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import RoundInputs, Rule
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.base import Task
from fairflare.tasks.segmentation import SegmentationTask

SEGMENTATION: dict[str, Any] = {"image_size": (32, 32), "features": (4, 4, 8, 8, 8, 4), "phantom_cases": 0.3}
CLASSES: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8], "max_pool": False, "phantom_sites": 3, "phantom_samples": 150,
    "phantom_test": 64,
}  # fmt: skip
LONG_TAILED: dict[str, Any] = {
    "phantom": "fundus", "image_size": [32, 32], "features": [4, 8, 8, 16], "phantom_sites": 2, "phantom_samples": 90,
    "phantom_test": 40, "partition": "dirichlet", "alpha": 0.5, "corrupted_sites": 0,
}  # fmt: skip
QUICK: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 16, "keep_optimizer_state": False}
State = dict[str, torch.Tensor]


def at_site(
    folder: Path,
    training: LocalTraining | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    task: Task | None = None,
    name: str = "site-1",
) -> SiteWorker:
    """Return a new process of one site, whose state is in ``folder``."""
    return SiteWorker(
        name,
        task or SegmentationTask(**SEGMENTATION),
        training or LocalTraining(batch_size=4),
        settings or {},
        folder,
        num_threads=1,
    )


def initial(task: Task | None = None, seed: int = 0) -> State:
    """Return the model that a federation starts from."""
    torch.manual_seed(seed)
    return clean_state((task or SegmentationTask(**SEGMENTATION)).build_model().state_dict())


def request(name: str, state: Mapping[str, torch.Tensor], current_round: int = 0, **more: Any) -> SiteTask:
    return SiteTask(**{"num_rounds": 3, "seed": 0, **more}, name=name, state=dict(state), current_round=current_round)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def net_state(seed: int) -> State:
    """Return a small model with everything that a state can hold."""
    g = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(3, 2, generator=g),
        "bn.weight": torch.randn(3, generator=g),
        "bn.running_var": torch.rand(3, generator=g),
        "bn.num_batches_tracked": torch.tensor(seed % 7),
        "head.weight": torch.randn(2, 3, generator=g),
    }


def collected(
    rule: Rule,
    folder: Path,
    reports: Mapping[str, Any],
    *,
    samples: Mapping[str, int] | None = None,
    updates: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    received: State | None = None,
    current_round: int = 0,
) -> Collector:
    """Return a round whose sites answered ``train`` with these reports, as it arrives at the server."""
    received = received or net_state(99)
    collector = Collector(rule, folder / "staging")
    collector.begin(current_round, 5, shape=LikeReceived(received), received=received, sites=sorted(reports))
    for number, (name, report) in enumerate(reports.items()):
        local = net_state(number)
        update = updates[name] if updates else {k: local[k] - received[k] for k in received}
        steps = None if any(bool(tensor.any()) for tensor in update.values()) else 1  # else it counts as not trained
        count = (samples or {}).get(name, 1)
        reply = SiteReply(STATUS_OK, update=dict(update), report=report, num_samples=count, num_steps=steps)
        message = encode_reply(reply, current_round)
        try:
            collector.keep(collector.read_training(name, message))
        except ReportError as error:
            collector.reject(name, str(error))
    return collector


def inputs(
    reports: Mapping[str, dict[str, Any]],
    *,
    anchor: Mapping[str, dict[str, Any]] | None = None,
    layers: list[str] | None = None,
    current_round: int = 0,
    num_rounds: int = 10,
) -> RoundInputs:
    """Return a rule's inputs; ``layers`` have one tensor each."""
    return RoundInputs(
        current_round=current_round,
        num_rounds=num_rounds,
        sites=sorted(reports),
        num_samples=dict.fromkeys(reports, 5),
        reports=dict(reports),
        anchor_reports=dict(anchor or {}),
        states={},
        owner={f"{layer}.weight": layer for layer in layers or []},
    )
