"""A bundle's optimizer as settings of the methods' site halves, which every method knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairflare.tasks.bundles.bundle_config import Bundle

#: Optimizers that the site halves have too: ``{argument: torch's default}``.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "Adam": {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False},
    "AdamW": {"lr": 1e-3, "weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False},
    "SGD": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False},
}
#: Optimizer arguments that correspond to a setting of the method: ``{argument: setting}``.
SETTING = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas", "momentum": "momentum"}
SPEED = ("_target_", "_desc_", "params", "foreach", "fused", "capturable", "differentiable")  # not what is computed
#: How a bundle says that all of the network is trained.
PARAMETERS = re.compile(r"\$\s*(filter\(lambda (\w+): \2\.requires_grad,\s*)?@\w+\.parameters\(\)(?(1)\))\s*")


def found_as_settings(bundle: Bundle, key: str) -> dict[str, Any] | None:
    """Return ``optimizer``, ``learning_rate`` and the others that say the same; ``None``: settings cannot say it.

    Args:
        bundle: has the key.
        key: of the optimizer.
    """
    told = bundle.get(key)
    name = str(told.get("_target_")) if isinstance(told, Mapping) else ""
    kind = name.rpartition(".")[2]
    if kind not in OPTIMIZERS or (name != kind and not name.startswith("torch.optim.")):
        return None
    if not PARAMETERS.fullmatch(str(told.get("params", ""))):
        return None
    usual = OPTIMIZERS[kind]
    values = {**usual, **{argument: bundle.make(f"{key}#{argument}") for argument in told if argument not in SPEED}}
    if any(values[argument] != usual.get(argument) for argument in values if argument not in (*SETTING, "nesterov")):
        return None
    if kind == "SGD" and bool(values["nesterov"]) != (values["momentum"] > 0):  # momentum is Nesterov's in the halves
        return None
    return {"optimizer": kind.lower(), **{SETTING[a]: value for a, value in values.items() if a in SETTING}}
