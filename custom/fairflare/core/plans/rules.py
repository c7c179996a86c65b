"""Derive network, patch and batch from spacing and shape, by nnU-Net's rules.

Source:
    Isensee et al., nnU-Net, Nature Methods 18 (2021), supplementary note 2, and the planner of nnU-Net 2.8
    (``ExperimentPlanner``), whose plans these functions reproduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_EDGE = 4  # smallest side of a feature map at the bottom of the network, in voxels
BASE_FEATURES = 32  # number of features of the first stage; each stage has twice as many
# By number of axes: most features of a stage; voxels of the first patch; memory count that 8 GB hold, and its batch.
MOST_FEATURES = {3: 320, 2: 512}
FIRST_VOXELS = {3: 256**3, 2: 2048**2}
REFERENCE, REFERENCE_BATCH = {3: 560e6, 2: 85e6}, {3: 2, 2: 12}
SMALLEST_BATCH, LARGEST_SHARE = 2, 0.05  # a batch covers at most this share of the voxels of all cases
ANISOTROPY = 3  # ratio of spacings, and of sizes, above which an axis counts as much coarser than the others
LOW_RESOLUTION = 0.25  # share of a case that a patch covers, below which nnU-Net also plans a lower resolution
Axes = tuple[int, ...]


@dataclass(frozen=True)
class Configuration:
    """Represent what nnU-Net plans for one resolution.

    Attributes:
        patch: voxels of a patch along each axis.
        batch: number of patches in a batch.
        strides, kernels: for each stage of the encoder its stride and the size of its kernels along each axis.
        features: number of features of each stage.
    """

    patch: Axes
    batch: int
    strides: tuple[Axes, ...]
    kernels: tuple[Axes, ...]
    features: tuple[int, ...]


def target_spacing(median: Sequence[float], median_size: Sequence[float], tenth: Sequence[float]) -> tuple[float, ...]:
    """Return the spacing to which all cases are resampled, in mm along each axis.

    It is the median, but the 10 % quantile along an axis that is much coarser and has far fewer voxels than the others.

    Args:
        median, tenth: 50 % and 10 % quantile of the cases' spacing along each axis, in mm.
        median_size: median of the cases' number of voxels along each axis.
    """
    spacing = list(map(float, median))
    coarsest = spacing.index(max(spacing))
    others = [value for axis, value in enumerate(spacing) if axis != coarsest]
    sizes = [value for axis, value in enumerate(median_size) if axis != coarsest]
    if spacing[coarsest] > ANISOTROPY * max(others) and median_size[coarsest] * ANISOTROPY < min(sizes):
        spacing[coarsest] = tenth[coarsest] if tenth[coarsest] >= max(others) else max(others) + 1e-5
    return tuple(spacing)


def resampled_size(size: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> Axes:
    """Return the number of voxels along each axis of a case that is resampled to the target spacing."""
    return tuple(round(old / new * n) for n, old, new in zip(size, spacing, target, strict=True))


def coarsest_first(spacing: Sequence[float]) -> Axes:
    """Return the order of axes with the largest spacing first and the others as they were."""
    first = max(range(len(spacing)), key=lambda axis: spacing[axis])
    return (first, *(axis for axis in range(len(spacing)) if axis != first))


def topology(spacing: Sequence[float], patch: Sequence[float]) -> tuple[Axes, tuple[Axes, ...], tuple[Axes, ...]]:
    """Return the patch raised to what the network can halve, and strides and kernels of the encoder's stages.

    An axis is halved while it has at least 8 voxels and its spacing is below twice the smallest of such axes. A kernel
    is 1 along an axis until the spacing there is below twice the smallest of all.
    """
    size, mm, axes = list(patch), list(spacing), range(len(patch))
    strides, kernels, kernel = [tuple(1 for _ in axes)], list[Axes](), [1 for _ in axes]
    while halved := [axis for axis in axes if size[axis] >= 2 * MIN_EDGE]:
        finest = min(mm[axis] for axis in halved)
        halved = [axis for axis in halved if mm[axis] / finest < 2]
        if len(halved) == 1 and size[halved[0]] < 3 * MIN_EDGE:
            break
        kernel = [3 if mm[axis] / min(mm) < 2 else kernel[axis] for axis in axes]
        for axis in halved:
            size[axis], mm[axis] = math.ceil(size[axis] / 2), mm[axis] * 2
        strides.append(tuple(2 if axis in halved else 1 for axis in axes))
        kernels.append(tuple(kernel))
    raised = tuple(math.ceil(n / by) * by for n, by in zip(patch, _divisors(strides), strict=True))
    return raised, tuple(strides), (*kernels, tuple(3 for _ in axes))


def _divisors(strides: Sequence[Axes]) -> list[int]:
    return [math.prod(along) for along in zip(*strides, strict=True)]


def features_of(stages: int, axes: int) -> tuple[int, ...]:
    """Return the number of features of each stage of a network on this number of axes."""
    return tuple(min(MOST_FEATURES[axes], BASE_FEATURES * 2**stage) for stage in range(stages))


def memory_count(patch: Axes, strides: Sequence[Axes], outputs: int) -> int:
    """Return the number of values that the network's layers compute for one patch.

    Counted are, as nnU-Net does it, two convolutions for each stage of the encoder; two and an upsampling for each of
    the decoder; and the outputs at full resolution, not those of deep supervision.

    Args:
        patch: voxels along each axis.
        strides: of the encoder's stages.
        outputs: number of classes with the background.
    """
    features, size, count = features_of(len(strides), len(patch)), patch, outputs * math.prod(patch)
    for stage, (stride, width) in enumerate(zip(strides, features, strict=True)):
        size = tuple(n // by for n, by in zip(size, stride, strict=True))
        count += (2 if stage == len(strides) - 1 else 5) * width * math.prod(size)
    return count


def configuration(
    spacing: Sequence[float], median_size: Sequence[float], *, voxels: float, outputs: int, memory: float
) -> Configuration:
    """Return patch, batch and network for one resolution, on two or three axes.

    Args:
        spacing, median_size: target spacing in mm, and median of the resampled cases' voxels along each axis, with
            the coarsest axis first.
        voxels: number of voxels of all resampled cases together.
        outputs: number of classes with the background.
        memory: memory of a GPU in GB.
    """
    axes = len(spacing)
    finest = [1 / mm for mm in spacing]
    scale = (FIRST_VOXELS[axes] / math.prod(finest)) ** (1 / axes)
    first = [min(round(a * scale), n) for a, n in zip(finest, median_size, strict=True)]
    patch, strides, kernels = topology(spacing, first)
    most = REFERENCE[axes] * memory / 8
    while (count := memory_count(patch, strides, outputs)) / REFERENCE_BATCH[axes] * 2 > most:
        largest = max(range(axes), key=lambda axis: (patch[axis] / median_size[axis], axis))
        once = [n - by * (axis == largest) for axis, (n, by) in enumerate(zip(patch, _divisors(strides), strict=True))]
        step = _divisors(topology(spacing, once)[1])[largest]
        patch, strides, kernels = topology(spacing, [n - step * (axis == largest) for axis, n in enumerate(patch)])
    batch = min(round(most / count * REFERENCE_BATCH[axes]), round(voxels * LARGEST_SHARE / math.prod(patch)))
    return Configuration(patch, max(batch, SMALLEST_BATCH), strides, kernels, features_of(len(strides), axes))


def plans_low_resolution(
    spacing: Sequence[float], median_size: Sequence[float], patch: Axes, *, cases: int, outputs: int, memory: float
) -> bool:
    """Return whether nnU-Net also plans a lower resolution, in which case its loss has the Dice of a whole batch.

    Args:
        spacing, median_size, patch: of the full resolution.
        cases, outputs, memory: number of training cases; see :func:`configuration`.
    """
    mm, full = list(spacing), math.prod(median_size)
    low = full
    while math.prod(patch) / low < LOW_RESOLUTION:
        fine = [max(mm) / value > 2 for value in mm]
        mm = [value * 1.03 if one or not any(fine) else value for value, one in zip(mm, fine, strict=True)]
        size = [n * old / new for n, old, new in zip(median_size, spacing, mm, strict=True)]
        low = math.prod(size)
        patch = configuration(mm, list(map(round, size)), voxels=low * cases, outputs=outputs, memory=memory).patch
    return full / low >= 2
