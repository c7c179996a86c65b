"""Our messages as FLARE's, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from fairflare.exchange.messages import Message

fobs.register(TensorDecomposer)  # needed in both processes before the first tensor travels

META_KEY = "fairflare"  # FLModel.meta[META_KEY]: directives to a site, report from a site
NUM_STEPS = "NUM_STEPS_CURRENT_ROUND"  # FLARE's key; its stock FedAvg weighs with it


def to_model(message: Message, num_rounds: int | None = None) -> FLModel:
    """What FLARE sends."""
    head: dict[str, Any] = {META_KEY: dict(message.meta)}
    if (steps := message.meta.get("num_steps")) is not None:
        head[NUM_STEPS] = int(steps)
    # An FLModel must carry params or metrics; none at all are an empty dict.
    metrics = dict(message.metrics) if message.metrics else None if message.params is not None else {}
    kind = ParamsType.DIFF if message.is_update else ParamsType.FULL
    return FLModel(
        params=message.params,
        params_type=None if message.params is None else kind,
        metrics=metrics,
        current_round=message.current_round,
        total_rounds=num_rounds,
        meta=head,
    )


def from_model(model: FLModel) -> Message:
    """What FLARE received, unchecked."""
    head = model.meta if isinstance(model.meta, Mapping) else {}
    meta = head.get(META_KEY)
    if isinstance(meta, Mapping) and meta.get("num_steps") is None and NUM_STEPS in head:
        meta = {**meta, "num_steps": head[NUM_STEPS]}
    return Message(
        params=model.params,
        is_update=model.params_type == ParamsType.DIFF,
        metrics=model.metrics,
        meta=meta,
        current_round=model.current_round,
    )
