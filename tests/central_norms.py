"""Compute the reference for recalibrated statistics: all images in one place, in float64, one norm after the other."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch


def central_statistics(model: torch.nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return ``running_mean`` and ``running_var`` by name, for the norms that the images reach.

    Definition: in evaluation mode, each batch norm's statistics are mean and unbiased variance of its own input over
    all images, given those of the norms before it. So: in the order of execution, the whole network for each.
    """
    model = copy.deepcopy(model).double().eval()
    norms = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)}
    order: list[str] = []
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda module, args, name=name: order.append(name))
    inputs: list[torch.Tensor] = []
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model(images[:2].double())
        for name in list(order):
            inputs.clear()
            handle = norms[name].register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
            for image in images:
                model(image[None].double())
            handle.remove()
            by_channel = torch.cat(inputs).transpose(0, 1).flatten(1)
            norms[name].running_mean.copy_(by_channel.mean(1))
            norms[name].running_var.copy_(by_channel.var(1, correction=1))
            found[f"{name}.running_mean"] = norms[name].running_mean.clone()
            found[f"{name}.running_var"] = norms[name].running_var.clone()
    return found


def differing(state: torch.nn.Module | Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference: of means in standard deviations, of variances as a share."""
    own = state.state_dict() if isinstance(state, torch.nn.Module) else state
    worst = 0.0
    for name, tensor in wanted.items():
        variance = wanted[name.replace("running_mean", "running_var")] + 1e-5  # as the norm adds it
        scale = variance.sqrt() if name.endswith("running_mean") else variance
        worst = max(worst, float(((own[name].double() - tensor) / scale).abs().max()))
    return worst
