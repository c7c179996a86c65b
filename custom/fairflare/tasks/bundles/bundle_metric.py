"""Compute a bundle's key metric image by image: the metric inside the event handler that the bundle names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from monai.metrics import DiceMetric, MeanIoU, compute_confusion_matrix_metric, get_confusion_matrix
from monai.utils import ensure_tuple

from fairflare.base.disk.bundle_files import BundleError
from fairflare.base.metric import LOSS, Metric
from fairflare.tasks.bundles.bundle_config import Bundle, telling

CONFUSION = "confusion matrix"
#: Last part of ``_target_`` -> name in the results. Handlers need ignite; the metrics inside them do not.
KINDS = {
    "MeanDice": "dice", "DiceMetric": "dice", "MeanIoUHandler": "iou", "MeanIoU": "iou", "Accuracy": "accuracy",
    "ConfusionMatrix": CONFUSION, "ConfusionMatrixMetric": CONFUSION,
    "MeanAbsoluteError": "mean_absolute_error", "MeanSquaredError": "mean_squared_error",
}  # fmt: skip
OF_STRUCTURES = {"dice": "Dice", "iou": "intersection over union"}
#: Function of each metric that returns an image's values, given its prediction and label, (1, channels, ...), and the
#: bundle's arguments of the metric. Errors are sums divided by the number of channels, as in ignite.
MEASURES: Mapping[str, Callable[..., torch.Tensor]] = {
    "dice": lambda predicted, truth, options: DiceMetric(**options)(predicted, truth),
    "iou": lambda predicted, truth, options: MeanIoU(**options)(predicted, truth),
    CONFUSION: lambda predicted, truth, options: get_confusion_matrix(predicted, truth, **options).sum((0, 1)),
    "accuracy": lambda predicted, truth, _: (predicted == truth).double().mean(),
    "mean_absolute_error": lambda predicted, truth, _: (
        (predicted.double() - truth).abs().sum() / predicted.shape[1:2].numel()
    ),
    "mean_squared_error": lambda predicted, truth, _: (
        (predicted.double() - truth).square().sum() / predicted.shape[1:2].numel()
    ),
}
#: Metrics of which lower values are better.
LOW = ("fall_out", "false_positive_rate", "miss_rate", "mean_absolute_error", "mean_squared_error")
TAKEN = ("include_background", "num_classes", "ignore_empty")
MOST_CLASSES = 512
WITHOUT_EFFECT = (  # arguments without effect on the value of one image
    "_target_", "_desc_", "output_transform", "save_details", "return_with_label", "get_not_nans", "device",
    "metric_name", "compute_sample",
)  # fmt: skip


class KeyMetric:
    """Measure the key metric of a bundle (its criterion for the best model): a mean over images, or a ratio of sums.

    Args:
        bundle: bundle whose part ``key_metric`` is a handler or metric of :data:`KINDS`, or a dict with one.
        class_names: names of the network's output channels; ``None`` for those of the metadata, if there are any.

    Raises:
        BundleError: the bundle has no key metric, one that is not in :data:`KINDS`, or one with an argument that is
            not known or with a ``reduction`` other than the mean.
    """

    def __init__(self, bundle: Bundle, class_names: Sequence[str] | None = None) -> None:
        key = str(bundle.place("key_metric"))
        configured = bundle.get(key)
        if isinstance(configured, Mapping) and "_target_" not in configured and configured:
            # The first one is the key metric, as in MONAI's engines.
            key = bundle.follow(f"{key}#{next(iter(configured))}")
            configured = bundle.get(key)
        self.named = f"{bundle.name}: key {key!r}"
        target = str(configured.get("_target_") if isinstance(configured, Mapping) else configured).rpartition(".")[2]
        if target not in KINDS:
            raise BundleError(
                f"{self.named} is {target!r:.80}, which is not one of {', '.join(KINDS)}"
                + ("; detection is not there, nor what a detector is measured by" if "Coco" in target else "")
                + "; name another one with bundle_overrides={'validate#key_metric': '@KEY'}"
            )
        self.arguments = {name: bundle.make(f"{key}#{name}") for name in TAKEN if name in configured}
        usual = {
            *WITHOUT_EFFECT, *(["reduction"] if configured.get("reduction") == "mean" else []),
            *(n for n, v in self.arguments.items() if isinstance(v, bool | int | None) and (v or 0) <= MOST_CLASSES),
        }  # fmt: skip
        if strange := [name for name in configured if name not in usual]:
            raise BundleError(
                f"{self.named} has the argument {strange[0]!r:.80}, which is not read of a {target}, or not with this "
                f"value: arguments are true, false or a whole number up to {MOST_CLASSES}, and reduction must be 'mean'"
            )
        self.kind = KINDS[target]
        #: Whether the metric is a ratio of sums over all images; a single image then has no value of its own.
        self.summed = self.kind == CONFUSION
        self.confusion = str(ensure_tuple(configured.get("metric_name", "hit_rate"))[0])
        self.name = re.sub(r"\W", "_", self.confusion if self.summed else self.kind)
        self._picks = bundle.make(f"{key}#output_transform") if "output_transform" in configured else None
        channels = bundle.get("_meta_#network_data_format#outputs#pred#channel_def")
        names = [str(name) for name in class_names or (channels.values() if isinstance(channels, Mapping) else ())]
        fit = all(name.isprintable() and len(name) <= 60 for name in names)
        #: Names of the structures that are measured; empty if not known.
        self.structures = names[not self.arguments.get("include_background", True) :] if fit else []

    def measure_image(self, item: Mapping[str, Any], label_key: str) -> npt.NDArray[np.float64]:
        """Return the metric of one postprocessed image, (structures,); NaN where the mask lacks a structure.

        For a ratio of sums, return the image's sums: true positives, false positives, true negatives, false negatives.

        Args:
            item: has ``"pred"`` and the label, (channels, ...) each.
            label_key: key of the label, used if the metric does not name the values that it compares.
        """
        with telling(f"{self.named} cannot be made"):
            predicted, truth = ([item["pred"]], [item[label_key]]) if self._picks is None else self._picks([dict(item)])
            pair = [torch.stack([torch.as_tensor(value) for value in values]) for values in (predicted, truth)]
            if self.kind not in OF_STRUCTURES and pair[0].shape != pair[1].shape:
                raise ValueError(f"prediction {tuple(pair[0].shape)} and label {tuple(pair[1].shape)} differ in size")
            scores = MEASURES[self.kind](*pair, self.arguments)
        return np.asarray(torch.as_tensor(scores).detach().reshape(-1).cpu().double().numpy(), np.float64)

    def value(self, scores: Any) -> float:
        """Return the metric of all images, from the masked array (images, structures) of :meth:`measure_image`."""
        if not self.summed:
            return float(np.ma.filled(scores.mean(axis=1).mean(), np.nan))
        return float(compute_confusion_matrix_metric(self.confusion, torch.as_tensor(np.asarray(scores.sum(axis=0)))))

    def names(self, count: int) -> list[str]:
        """Return the names of the ``count`` structures that the metric measures one by one, if there are several."""
        names = self.structures if len(self.structures) == count else [f"class_{i + 1}" for i in range(count)]
        return names if count > 1 and not self.summed else []

    def declare(self) -> tuple[Metric, ...]:
        """Declare the metric's mean, the loss and, if there are several structures, the metric of each structure."""
        word = OF_STRUCTURES.get(self.kind, self.name)
        # The last of the names is for channels that the metadata do not name.
        names = [*self.structures, "<class>"] if self.kind in OF_STRUCTURES else []
        return (
            Metric(
                name=self.name, doc=f"{word}, as the bundle measures it over structures and images",
                higher_is_better=self.name not in LOW,
                high=float("inf") if self.kind.endswith("_error") else 1.0,
            ),
            LOSS,
            *(
                Metric(
                    name=f"{self.name}_{name}", doc=f"{word} of one structure", by_class=True,
                    higher_is_better=True, family=f"{self.name}_<class>",
                )
                for name in names
            ),
        )  # fmt: skip
