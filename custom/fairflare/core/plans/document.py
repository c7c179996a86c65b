"""Make a plan from the sites' counts, in the form of nnU-Net's ``nnUNetPlans.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.core.plans.counts import STEPS_PER_MM, Counts, intensities, quantile
from fairflare.core.plans.rules import (
    Configuration,
    coarsest_first,
    configuration,
    plans_low_resolution,
    target_spacing,
)

#: Axes of the volumes in a plan: to the head, to the front, to the right, as nnU-Net's reader that turns files has.
AXES = "SAR"
FULL = "3d_fullres"  # name of the only configuration that is trained
READER = "NibabelIOWithReorient"  # nnU-Net's reader that turns files to these axes
CT, EACH_IMAGE = "CTNormalization", "ZScoreNormalization"
NETWORK = "dynamic_network_architectures.architectures.unet.PlainConvUNet"
MOST_CHANGED = 0.5  # share of cases that lose a quarter by cropping, above which zeros do not count in the norm


@dataclass(frozen=True)
class Answers:
    """Store what all sites together answered.

    Attributes:
        spacing, size, resampled: for each axis the number of cases by value; see :mod:`fairflare.core.plans.counts`.
        cropped: number of cases that lost a quarter of their voxels by cropping.
        histograms: by number of a CT channel the sum of the cases' histograms of the foreground.
    """

    spacing: Sequence[Counts]
    size: Sequence[Counts]
    resampled: Sequence[Counts] = ()
    cropped: int = 0
    histograms: Mapping[int, npt.NDArray[np.float64]] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        """Return the number of cases."""
        return self.spacing[0].total()

    @property
    def target(self) -> tuple[float, ...]:
        """Return the spacing to which cases are resampled, in mm along each axis in the order of the volumes."""
        median, tenth = ([quantile(counts, share, STEPS_PER_MM) for counts in self.spacing] for share in (0.5, 0.1))
        return target_spacing(median, [quantile(counts, 0.5) for counts in self.size], tenth)


def plan_of(answers: Answers, *, channels: Sequence[str], outputs: int, memory: float) -> dict[str, Any]:
    """Return the plan of all cases, as nnU-Net writes it.

    Args:
        answers: sums of the sites' counts.
        channels: names of the images' channels; ``"CT"`` is normalised by the foreground of all cases.
        outputs: number of classes with the background.
        memory: memory of a GPU in GB.
    """
    target = answers.target
    order = coarsest_first(target)
    spacing = [target[axis] for axis in order]
    median = [quantile(answers.resampled[axis], 0.5) for axis in order]
    size: dict[str, Any] = {"outputs": outputs, "memory": memory}
    configurations = {
        name: configuration(spacing[first:], median[first:], voxels=math.prod(median) * answers.cases, **size)
        for name, first in {"2d": 1, FULL: 0}.items()
    }
    low = plans_low_resolution(spacing, median, configurations[FULL].patch, cases=answers.cases, **size)
    schemes = [CT if name == "CT" else EACH_IMAGE for name in channels]
    without_zeros = answers.cropped > MOST_CHANGED * answers.cases
    return {
        "dataset_name": "federation", "plans_name": "nnUNetPlans", "image_reader_writer": READER,
        "original_median_spacing_after_transp": [quantile(answers.spacing[a], 0.5, STEPS_PER_MM) for a in order],
        "original_median_shape_after_transp": [round(quantile(answers.size[axis], 0.5)) for axis in order],
        "transpose_forward": list(order), "transpose_backward": [order.index(axis) for axis in range(len(order))],
        "experiment_planner_used": "ExperimentPlanner", "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            str(number): intensities(answers.histograms[number]) if number in answers.histograms else {}
            for number in range(len(channels))
        },
        "configurations": {
            name: {
                "data_identifier": f"nnUNetPlans_{name}", "preprocessor_name": "DefaultPreprocessor",
                "batch_size": one.batch, "patch_size": list(one.patch),
                "median_image_size_in_voxels": median[-len(one.patch):], "spacing": spacing[-len(one.patch):],
                "normalization_schemes": schemes,
                "use_mask_for_norm": [without_zeros and scheme == EACH_IMAGE for scheme in schemes],
                **resampling(), "architecture": _architecture(one), "batch_dice": low or name == "2d",
            }
            for name, one in configurations.items()
        },
    }  # fmt: skip


def resampling(separate: bool | None = None) -> dict[str, Any]:
    """Return how nnU-Net resamples; ``separate``: thick slices by the nearest, ``None``: where they are thick."""
    return {
        key: value
        for kind, labels in {"data": False, "seg": True, "probabilities": False}.items()
        for key, value in {
            f"resampling_fn_{kind}": "resample_data_or_seg_to_shape",
            f"resampling_fn_{kind}_kwargs": {
                "is_seg": labels, "order": 1, "order_z": 0, "force_separate_z": separate,
            },
        }.items()
    }  # fmt: skip


def _architecture(one: Configuration) -> dict[str, Any]:
    stages, axes = len(one.strides), len(one.patch)
    return {
        "network_class_name": NETWORK,
        "arch_kwargs": {
            "n_stages": stages, "features_per_stage": list(one.features),
            "conv_op": f"torch.nn.modules.conv.Conv{axes}d",
            "kernel_sizes": [list(kernel) for kernel in one.kernels],
            "strides": [list(stride) for stride in one.strides],
            "n_conv_per_stage": [2] * stages, "n_conv_per_stage_decoder": [2] * (stages - 1), "conv_bias": True,
            "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{axes}d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True}, "dropout_op": None, "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }  # fmt: skip
