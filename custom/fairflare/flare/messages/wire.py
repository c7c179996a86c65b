"""Convert FairFlare's messages to FLARE's ``FLModel``, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from nvflare.apis.dxo import MetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from safetensors import safe_open

from fairflare.exchange.messages import Message
from fairflare.exchange.tensor_file import DTYPES

fobs.register(TensorDecomposer)  # needed in both processes before the first tensor travels

META_KEY = "fairflare"  # FLModel.meta[META_KEY]: directives to a site, report from a site
TRAINING_KEY = "training"  # key in the content of META_KEY: the site half, for sites with a script
NUM_STEPS = MetaKey.NUM_STEPS_CURRENT_ROUND  # FLARE's own FedAvg weighs sites by it
REPORT, CELLS = "report", "cells"


@dataclass(eq=False)
class OnDisk:
    """Represent a tensor that FLARE's disk offload saved to a file; its size is known without reading the file."""

    reference: Any  # FLARE's reference to the file

    def materialize(self) -> torch.Tensor:
        """Read the tensor that FLARE saved from its file."""
        return cast(torch.Tensor, self.reference.materialize())

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the tensor, from the file's header."""
        with safe_open(self.reference.file_path, framework="pt") as file:
            part = file.get_slice(self.reference.key)
            return math.prod(part.get_shape()) * getattr(torch, DTYPES[part.get_dtype()]).itemsize


def encode_model(message: Message, num_rounds: int | None = None) -> FLModel:
    """Convert a message to the ``FLModel`` that FLARE sends."""
    meta = dict(message.meta)
    head: dict[str, Any] = {META_KEY: meta}
    if (steps := meta.get("num_steps")) is not None:
        head[NUM_STEPS] = int(steps)
    metrics = {CELLS: message.metrics} if message.metrics else None
    if message.params is None:
        # A reply without a model has its report in ``metrics``, where FLARE's filters can block it. FLModel needs
        # params or metrics, so metrics are an empty dict if there are none.
        metrics = {**(metrics or {}), **({REPORT: meta.pop(REPORT)} if meta.get(REPORT) else {})}
    kind = ParamsType.DIFF if message.is_update else ParamsType.FULL
    return FLModel(
        params=message.params,
        params_type=None if message.params is None else kind,
        metrics=metrics,
        current_round=message.current_round,
        total_rounds=num_rounds,
        meta=head,
    )


def decode_model(model: FLModel) -> Message:
    """Convert an ``FLModel`` that FLARE received to a message; its values are not checked."""
    head = model.meta if isinstance(model.meta, Mapping) else {}
    metrics = model.metrics if isinstance(model.metrics, Mapping) else {}
    meta, params = head.get(META_KEY), model.params
    if isinstance(meta, Mapping):
        meta = dict(meta)
        if MetaKey.FILTER_HISTORY in head:
            meta["filters"] = head[MetaKey.FILTER_HISTORY]
        if meta.get("num_steps") is None and NUM_STEPS in head:
            meta["num_steps"] = head[NUM_STEPS]
        if params is None and REPORT in metrics:
            meta[REPORT] = metrics[REPORT]
    if isinstance(params, Mapping):
        params = {name: OnDisk(value) if hasattr(value, "materialize") else value for name, value in params.items()}
    return Message(
        params=params,
        is_update=model.params_type == ParamsType.DIFF,
        metrics=metrics.get(CELLS),
        meta=meta,
        current_round=model.current_round,
    )
