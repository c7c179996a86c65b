"""Read plans in the form of nnU-Net's ``nnUNetPlans.json``, of FairFlare's or of nnU-Net's making."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from fairflare.base.checks import refuse
from fairflare.core.plans.document import AXES, CT, FULL

Side = Annotated[int, Field(ge=1, le=2**12)]
Millimetres = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


@checked(config=ConfigDict(extra="ignore"), frozen=True)
class _Network:
    features_per_stage: list[Annotated[int, Field(ge=1, le=4096)]]
    kernel_sizes: list[tuple[Side, Side, Side]]
    strides: list[tuple[Side, Side, Side]]
    n_conv_per_stage: list[Annotated[int, Field(ge=1, le=20)]]
    n_conv_per_stage_decoder: list[Annotated[int, Field(ge=1, le=20)]]
    conv_bias: Literal[True]
    dropout_op: None
    nonlin: Literal["torch.nn.LeakyReLU"]
    norm_op: Literal["torch.nn.modules.instancenorm.InstanceNorm3d"]


@checked(config=ConfigDict(extra="ignore"), frozen=True)
class _Architecture:
    network_class_name: Literal["dynamic_network_architectures.architectures.unet.PlainConvUNet"]
    arch_kwargs: _Network


@checked(config=ConfigDict(extra="ignore"), frozen=True)
class Planned:
    """Hold what is trained of a plan: the configuration at full resolution, in nnU-Net's names."""

    batch_size: Annotated[int, Field(ge=1, le=4096)]
    patch_size: tuple[Side, Side, Side]
    spacing: tuple[Millimetres, Millimetres, Millimetres]
    normalization_schemes: list[Literal["CTNormalization", "ZScoreNormalization"]]
    use_mask_for_norm: list[bool]
    batch_dice: bool
    architecture: _Architecture

    @property
    def network(self) -> dict[str, Any]:
        """Return the network's settings, as :class:`fairflare.tasks.volumes.plain_unet.PlainUNet` takes them."""
        arguments = self.architecture.arch_kwargs
        return {
            "features": arguments.features_per_stage, "strides": arguments.strides, "kernels": arguments.kernel_sizes,
            "convolutions": (arguments.n_conv_per_stage, arguments.n_conv_per_stage_decoder),
        }  # fmt: skip


@checked(config=ConfigDict(extra="ignore"), frozen=True)
class Foreground:
    """Hold the figures of a CT's foreground by which it is normalised, in HU."""

    mean: float
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    percentile_00_5: float
    percentile_99_5: float


@dataclass(frozen=True)
class NnUNetPlan:
    """Represent a plan that is trained.

    Attributes:
        full: the configuration at full resolution.
        axes: order of the volumes' axes in the network: ``"SAR"`` are axes to the head, to the front, to the right.
        foreground: figures by number of a CT's channel.
    """

    full: Planned
    axes: str
    foreground: Mapping[int, Foreground]


def read_plan(document: Any) -> NnUNetPlan:
    """Read a plan, of FairFlare's or of nnU-Net's making.

    Raises:
        ValueError: an entry is missing or has another form, or the plan needs what is not built; names the entry.
    """
    where = ("configurations", FULL)
    part = document
    for key in where:
        if not isinstance(part, Mapping) or key not in part:
            raise ValueError(f"the plan has no {key!r}; give a plan of `fairflare plan`, or nnU-Net's nnUNetPlans.json")
        part = part[key]
    full = _read(Planned, part, ".".join(where))
    network, channels = full.architecture.arch_kwargs, len(full.normalization_schemes)
    stages = {
        *(len(entries) for entries in (network.features_per_stage, network.kernel_sizes, network.strides)),
        len(network.n_conv_per_stage), len(network.n_conv_per_stage_decoder) + 1,
    }  # fmt: skip
    divisors = [math.prod(along) for along in zip(*network.strides, strict=True)]
    raw, forward = part["architecture"]["arch_kwargs"], document.get("transpose_forward")
    refuse({
        **{
            f"the plan's {name} must be {' or '.join(map(str, values))}, as nnU-Net's planner has it, got "
            f"{raw.get(name)!r:.80}": raw.get(name) not in values
            for name, values in dict[str, list[Any]](
                norm_op_kwargs=[{"eps": 1e-5, "affine": True}],
                nonlin_kwargs=[{"inplace": True}, {"inplace": True, "negative_slope": 0.01}],
                n_stages=[len(network.features_per_stage)],
            ).items()
        },
        "the plan's kernel_sizes must be odd": any(side % 2 == 0 for kernel in network.kernel_sizes for side in kernel),
        "the plan's architecture must have as many features, kernels and strides as stages, at least 2":
            len(stages) > 1 or min(stages) < 2,
        f"the plan's patch_size {list(full.patch_size)} must be divisible by {divisors}":
            any(side % by for side, by in zip(full.patch_size, divisors, strict=False)),
        f"the plan's transpose_forward must be an order of 0, 1, 2, got {forward!r:.80}":
            not isinstance(forward, list) or sorted(map(str, forward)) != ["0", "1", "2"],
        "the plan's use_mask_for_norm must have an entry for each channel": len(full.use_mask_for_norm) != channels,
    })  # fmt: skip
    name = "foreground_intensity_properties_per_channel"
    figures = document.get(name) or {}
    return NnUNetPlan(
        full, "".join(AXES[axis] for axis in forward),
        {
            number: _read(Foreground, figures.get(str(number)), f"{name}.{number}")
            for number, scheme in enumerate(full.normalization_schemes) if scheme == CT
        },
    )  # fmt: skip


def _read(cls: Any, value: Any, where: str) -> Any:
    try:
        return TypeAdapter(cls).validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, (where, *problem["loc"])))
        raise ValueError(f"the plan's {place}: {problem['msg']}, got {problem['input']!r:.80}") from None
