"""For sites that keep their own training script (FLARE's Client API): what a script adds to work with our rules.

    report = client.sharpness_report(model, loss_fn, batches, rho)      # before training: measures the received model
    flare.send(client.with_report(flare.FLModel(params=...), report, num_samples=n))

The server runs FLARE's own FedAvg with
``aggregator=FairAggregator(rule=FedISM())``; see ``docs/own_script.md``. Two-phase methods (Fed-LWR)
need our controller and executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from nvflare.app_common.abstract.fl_model import FLModel

from fairflare import __version__
from fairflare.core.checks import whole
from fairflare.core.sharpness import search_distance, sharpness
from fairflare.exchange.messages import STATUS_OK, clean_meta
from fairflare.flare.wire import META_KEY

__all__ = ["search_distance", "sharpness_report", "with_report"]


def with_report(model: FLModel, report: Mapping[str, Any], *, num_samples: int | None = None) -> FLModel:
    """The model to send, with the report that a rule reads.

    Args:
        model: what the script is about to send; changed in place.
        report: the fields that the rule declares (its ``report_fields``); numbers, texts or lists of them.
        num_samples: number of training samples, for rules that weigh by it; ``>= 1``.

    Raises:
        TypeError: a value that cannot travel (names the field), or ``model`` is no FLModel.
        ValueError: num_samples < 1.
    """
    if not isinstance(model, FLModel):
        raise TypeError(f"model must be an FLModel, got {type(model).__name__}")
    if num_samples is not None:
        whole("num_samples", num_samples)
    content = {
        "version": __version__,
        "status": STATUS_OK,
        "report": dict(report),
        "num_samples": num_samples,
    }
    model.meta = {**(model.meta or {}), META_KEY: clean_meta(content)}
    return model


def sharpness_report(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    batches: Iterable[tuple[Any, Any]],
    rho: float,
) -> dict[str, float]:
    """What :class:`fairflare.methods.fed_ism.FedISM` asks of a site, measured on the received model.

    Args:
        model, loss_fn, batches, rho: as in :func:`fairflare.core.sharpness.sharpness`; ``batches`` is the whole
            training set, without augmentation. For FedISM+ ``rho=search_distance(round, rounds, 0.1, 0.5)``.

    Returns:
        ``sharpness`` and ``perturbed_loss``.
    """
    found = sharpness(model, loss_fn, batches, rho)
    return {"sharpness": found.sharpness, "perturbed_loss": found.perturbed_loss}
