"""What travels between server and sites, and the one sanitizer for both directions.

FLARE's serializer ends the server job on a tensor it cannot decode and ends a site's loop on a value it cannot
encode, so nothing is sent that did not pass :func:`clean_state` or :func:`clean_meta`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

fobs.register(TensorDecomposer)  # needed in both processes before the first tensor travels

META_KEY = "fairflare"  # FLModel.meta[META_KEY]: directives to a site, report from a site
NUM_STEPS = "NUM_STEPS_CURRENT_ROUND"  # FLARE's key; its stock FedAvg weighs with it

TASK_TRAIN = AppConstants.TASK_TRAIN
TASK_ANCHOR = "anchor"
TASK_VALIDATE = AppConstants.TASK_VALIDATION

STATUS_OK = "ok"
STATUS_SKIPPED = "skipped"  # an expected refusal: too little data, no local model
STATUS_FAILED = "failed"


def clean_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Plain, contiguous CPU tensors, detached from any graph; the values are not changed.

    Args:
        state: tensors or NumPy arrays by name, on any device.

    Raises:
        TypeError: a value is neither (names the key).
    """
    clean: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"tensor {name!r} must be a tensor or an array, got {type(value).__name__}")
        tensor = value.detach().to("cpu").contiguous()
        clean[str(name)] = tensor.as_subclass(torch.Tensor) if type(tensor) is not torch.Tensor else tensor
    return clean


def clean_meta(value: Any, where: str = "meta") -> Any:
    """Only dict, list, str, int, float, bool and None, whatever NumPy or torch scalars came in.

    Raises:
        TypeError: a value of another type, an integer over 64 bits (names its place).
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, np.generic):
        return clean_meta(value.item(), where)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise TypeError(f"{where}: integer {value} needs more than 64 bits")
        return value
    if isinstance(value, float):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return clean_meta(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(key): clean_meta(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_meta(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TypeError(f"{where}: a {type(value).__name__} cannot travel; send numbers, strings, lists or dicts")


def task_model(state: Mapping[str, Any], meta: Mapping[str, Any], *, current_round: int, num_rounds: int) -> FLModel:
    """The server's message: a full model and the directives."""
    return FLModel(
        params=clean_state(state),
        params_type=ParamsType.FULL,
        current_round=current_round,
        total_rounds=num_rounds,
        meta={META_KEY: clean_meta(meta)},
    )


def reply_model(
    *,
    update: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    meta: Mapping[str, Any],
    current_round: int | None = None,
    num_steps: int | None = None,
) -> FLModel:
    """A site's message: optionally its update (local minus received), metrics, and what it reports."""
    head: dict[str, Any] = {META_KEY: clean_meta(meta)}
    if num_steps is not None:
        head[NUM_STEPS] = int(num_steps)
    usable = {k: float(v) for k, v in (metrics or {}).items() if math.isfinite(float(v))}
    if update is None and not usable:
        usable = {"answered": 1.0}  # an FLModel must carry params or metrics
    return FLModel(
        params=None if update is None else clean_state(update),
        params_type=None if update is None else ParamsType.DIFF,
        metrics=usable or None,
        current_round=current_round,
        meta=head,
    )


def meta_of(model: FLModel) -> dict[str, Any]:
    """FairFlare's part of a message, ``{}`` when there is none."""
    value = (model.meta or {}).get(META_KEY)
    return dict(value) if isinstance(value, Mapping) else {}


def num_bytes(state: Mapping[str, Any] | None) -> int:
    """Bytes of the tensors, without the envelope."""
    total = 0
    for value in (state or {}).values():
        total += int(value.nbytes)
    return total
