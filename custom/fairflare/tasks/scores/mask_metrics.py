"""Compute metrics of masks beside Dice: overlap, surface distances and volume errors, by MONAI.

Each metric is computed for each image and structure, then averaged over images. If both masks are empty, they agree
fully (IoU and surface Dice 1, distances 0). If one mask is empty, IoU and surface Dice are 0, and a distance is the
diagonal of the image, so a missing structure never improves a mean. A surface is the pixels at a mask's edge.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.base.task import Metric

if TYPE_CHECKING:
    import torch

Wanted = Literal["dice", "iou", "hd95", "assd", "surface_dice", "volume_error"]
IOU = "iou"  # the only metric that does not need the size of a pixel
PIXEL = "pixel_"  # prefix of a metric's name in pixels, for images without spacing
MM3_IN_ML = 1000.0
log = logging.getLogger(__name__)

Table: TypeAlias = "npt.NDArray[np.float64]"  # one value for each structure


def declare_metrics(wanted: Sequence[str], dims: int, tolerance: float, structures: Sequence[str]) -> Iterator[Metric]:
    """Yield the :class:`Metric` of each requested mask metric, of its variant in pixels, and of both by structure.

    A metric without a unit is a share, of which larger values are better; of others smaller ones are.

    Args:
        wanted: values of the task's setting ``metrics``; of ``dice`` nothing is yielded.
        dims: number of spatial dimensions, 2 or 3.
        tolerance: tolerance of surface Dice, in mm (or pixels, for images without spacing).
        structures: names of the structures; empty if there is only one structure.
    """
    size, size_unit = ("volume", "ml") if dims == 3 else ("area", "mm2")
    facts = [  # setting, name, meaning, unit
        (IOU, IOU, "intersection over union", ""),
        # MONAI's definition. medpy takes the percentile over both surfaces together, which is never larger.
        ("hd95", "hd95", "larger of both surfaces' 95th percentiles of distances", "mm"),
        ("assd", "assd", "average distance of both surfaces", "mm"),
        ("surface_dice", "surface_dice", f"share of both surfaces that is at most {tolerance:g} mm from the other", ""),
        ("volume_error", f"{size}_error", f"absolute error of the {size}", size_unit),
        ("volume_error", f"{size}_over", f"how much too large the {size} is, 0 where too small", size_unit),
        ("volume_error", f"{size}_under", f"how much too small the {size} is, 0 where too large", size_unit),
    ]
    for name, meaning, unit_in_mm in [
        entry[1:] for word in dict.fromkeys(wanted) for entry in facts if entry[0] == word
    ]:
        forms = [
            (name, unit_in_mm, meaning),
            (PIXEL + name, "pixels" if unit_in_mm else "", meaning.replace(" mm", " pixels")),
        ]
        for called, unit, doc in forms[:1] if name == IOU else forms:
            more: dict[str, Any] = {
                "high": math.inf if unit else 1.0, "higher_is_better": not unit, "unit": unit,
                "reveals": "of a model that finds nothing it says how much of the structure a site's images have",
            }  # fmt: skip
            yield Metric(name=called, doc=f"{doc}, mean over structures", **more)
            for number, structure in enumerate(structures):
                yield Metric(
                    name=f"{called}_{structure}", doc=f"{doc}, of one structure", by_class=True, of_classes=(number,),
                    family=f"{called}_<class>", **more,
                )  # fmt: skip


class MaskMetrics:
    """Collect the requested metrics of masks, image by image.

    Args:
        wanted, dims, tolerance: see :func:`declare_metrics`.
    """

    def __init__(self, wanted: Collection[str], dims: int, tolerance: float) -> None:
        self.wanted = set(wanted)
        self.dims, self.tolerance = dims, tolerance
        self.size = "volume" if dims == 3 else "area"
        self._values: dict[str, list[Table]] = defaultdict(list)
        self._known: list[bool] = []  # for each image, whether the size of its pixels is known

    def add(
        self, predicted: torch.Tensor, truth: torch.Tensor, counts: torch.Tensor, spacing: Sequence[float] | None
    ) -> None:
        """Measure the masks of one image.

        Args:
            predicted, truth: predicted and true masks, (structures, ...) bool.
            counts: mask of the same shape, False where a pixel does not count, and both masks are False.
            spacing: size of a pixel in mm along each axis; ``None`` if the size is not known.
        """
        inside = counts.any(0).nonzero()
        if len(inside):  # cut off the padding around the image
            low, high = inside.aminmax(dim=0)
            box: Any = (..., *(slice(int(a), int(b) + 1) for a, b in zip(low, high, strict=True)))
            predicted, truth = predicted[box], truth[box]
        self._known.append(spacing is not None)
        sizes = tuple(spacing or (1.0,) * self.dims)[: self.dims]
        for name, values in self._measure_image(
            predicted[None].cpu(), truth[None].cpu(), sizes, spacing is not None
        ).items():
            self._values[name].append(values)

    def _measure_image(
        self, predicted: torch.Tensor, truth: torch.Tensor, sizes: tuple[float, ...], known: bool
    ) -> dict[str, Table]:
        from monai.metrics.hausdorff_distance import compute_hausdorff_distance
        from monai.metrics.meaniou import compute_iou
        from monai.metrics.surface_dice import compute_surface_dice
        from monai.metrics.surface_distance import compute_average_surface_distance

        in_found, in_truth = (one.flatten(2).sum(2)[0].double().numpy() for one in (predicted, truth))
        both, neither = (in_found > 0) & (in_truth > 0), (in_found == 0) & (in_truth == 0)
        diagonal = math.dist([0.0] * self.dims, [s * n for s, n in zip(sizes, predicted.shape[2:], strict=True)])
        values: dict[str, Table] = {}
        if IOU in self.wanted:
            values[IOU] = compute_iou(predicted.float(), truth.float(), ignore_empty=False)[0].double().numpy()
        if "volume_error" in self.wanted:
            each = math.prod(sizes) / (MM3_IN_ML if known and self.dims == 3 else 1.0)
            error = (in_found - in_truth) * each
            parts = {"error": abs(error), "over": np.maximum(error, 0), "under": np.maximum(-error, 0)}
            values |= {f"{self.size}_{name}": part for name, part in parts.items()}
        common: dict[str, Any] = {"include_background": True, "spacing": list(sizes)}
        measures: dict[str, tuple[Any, float, float]] = {
            "hd95": (lambda *pair: compute_hausdorff_distance(*pair, percentile=95, **common), 0.0, diagonal),
            "assd": (lambda *pair: compute_average_surface_distance(*pair, symmetric=True, **common), 0.0, diagonal),
            "surface_dice": (lambda *pair: compute_surface_dice(*pair, [self.tolerance], **common), 1.0, 0.0),
        }
        for name, (measure, agreed, missed) in measures.items():
            if name in self.wanted:  # for empty masks, of which MONAI warns, the module's own rule holds
                values[name] = np.where(neither, agreed, missed)
                for part in np.flatnonzero(both):
                    values[name][part] = float(measure(predicted[:, [part]], truth[:, [part]])[0, 0])
        return values

    def means(self) -> dict[str, Table]:
        """Return the mean of each metric over the images, an array (structures,) by the metric's name.

        A metric that needs the size of a pixel gets the prefix ``pixel_`` if no image states a size. If only some
        images state a size, the metric is left out, with a warning.
        """
        if mixed := len(set(self._known)) > 1:
            log.warning(
                "%s left out: %d of %d images do not say their spacing, and mm are not mixed with pixels; say it for "
                "all of them in the datalist, or for none", ", ".join(name for name in self._values if name != IOU),
                self._known.count(False), len(self._known),
            )  # fmt: skip
        return {
            f"{PIXEL * (name != IOU and not self._known[0])}{name}": np.mean(values, 0)
            for name, values in self._values.items()
            if name == IOU or not mixed
        }
