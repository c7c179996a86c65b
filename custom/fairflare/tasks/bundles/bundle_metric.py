"""A bundle's key metric, image by image: the metric inside the event handler that a bundle names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairflare.base.disk.bundle_files import BundleError
from fairflare.base.task import Metric
from fairflare.tasks.bundles.bundle_config import Bundle, telling

if TYPE_CHECKING:
    import numpy.typing as npt

#: Last part of ``_target_`` -> name in the results. Handlers need ignite; the metrics inside them do not.
KINDS = {
    "MeanDice": "dice", "DiceMetric": "dice", "MeanIoUHandler": "iou", "MeanIoU": "iou",
    "ConfusionMatrix": "confusion", "ConfusionMatrixMetric": "confusion", "Accuracy": "accuracy",
    "MeanAbsoluteError": "mean_absolute_error", "MeanSquaredError": "mean_squared_error",
}  # fmt: skip
WORDS = {"dice": "Dice", "iou": "intersection over union"}
ERRORS = (
    "mean_absolute_error",
    "mean_squared_error",
    "fall out",
    "false positive rate",
    "miss rate",
)  # lower is better
TAKEN = ("include_background", "num_classes", "ignore_empty")
WITHOUT_EFFECT = (  # on the value of one image
    "_target_", "_desc_", "output_transform", "save_details", "return_with_label", "get_not_nans", "reduction",
    "metric_name", "compute_sample", "device",
)  # fmt: skip


class KeyMetric:
    """The metric by which a bundle chooses its best model.

    Args:
        bundle: with the part ``key_metric``: a handler or metric of :data:`KINDS`, or a dict with one.
        class_names: of the network's output channels; ``None``: as the metadata say, where they do.

    Raises:
        BundleError: the bundle has no key metric, one that is not in :data:`KINDS`, or one with an argument that is
            not known or with a ``reduction`` other than the mean.
    """

    def __init__(self, bundle: Bundle, class_names: Sequence[str] | None = None) -> None:
        key = str(bundle.place("key_metric"))
        found = bundle.get(key)
        if isinstance(found, Mapping) and "_target_" not in found and found:
            # The first one is the key metric, as in MONAI's engines.
            key = bundle.followed(f"{key}#{next(iter(found))}")
            found = bundle.get(key)
        self.bundle, self.key = bundle, key
        target = str(found.get("_target_") if isinstance(found, Mapping) else found).rpartition(".")[2]
        if target not in KINDS:
            raise BundleError(
                f"{bundle.name}: key {key!r} is {target!r:.80}, which is not one of {', '.join(KINDS)}"
                + ("; detection is not there, nor what a detector is measured by" if "Coco" in target else "")
                + "; name another one with bundle_ids={'key_metric': 'KEY'}, or set it with bundle_overrides"
            )
        strange = [name for name in found if name not in (*TAKEN, *WITHOUT_EFFECT)]
        if strange:
            raise BundleError(f"{bundle.name}: key {key!r} has {strange[0]!r}, which is not known of a {target}")
        if found.get("reduction", "mean") != "mean":
            raise BundleError(f"{bundle.name}: key {key!r}: reduction must be 'mean', got {found['reduction']!r}")
        self.kind = KINDS[target]
        named = found.get("metric_name", "hit_rate")
        self.confusion = str(named[0] if isinstance(named, list) else named)
        self.name = re.sub(r"\W", "_", self.confusion) if self.kind == "confusion" else self.kind
        self.arguments = {name: bundle.make(f"{key}#{name}") for name in TAKEN if name in found}
        if strange := [name for name, value in self.arguments.items() if not isinstance(value, bool | int | None)]:
            raise BundleError(f"{bundle.name}: key {key!r}: {strange[0]} must be true, false or a whole number")
        self._picks = bundle.make(f"{key}#output_transform") if "output_transform" in found else None
        self.structures = self._structures(class_names)

    def of_image(self, item: Mapping[str, Any], label_key: str) -> npt.NDArray[np.float64]:
        """Return (structures,) of one image behind the postprocessing; NaN where the mask has none of a structure.

        Args:
            item: has ``"pred"`` and the label, (channels, ...) each.
            label_key: of the label, where the metric does not say what it compares.
        """
        with telling(f"{self.bundle.name}: key {self.key!r} cannot be made"):
            found, truth = item["pred"], item[label_key]
            if self._picks is not None:
                (found,), (truth,) = self._picks([dict(item)])
            values = self._measured(torch.as_tensor(found), torch.as_tensor(truth))
        scores: npt.NDArray[np.float64] = torch.as_tensor(values).detach().cpu().double().numpy()
        return scores

    def _measured(self, found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Return the metric of each structure; of metrics that are quotients, numerators and denominators."""
        from monai.metrics import DiceMetric, MeanIoU, get_confusion_matrix

        if self.kind in WORDS:
            metric = DiceMetric if self.kind == "dice" else MeanIoU
            return metric(reduction="mean", **self.arguments)(found[None], truth[None]).reshape(-1)
        if self.kind == "confusion":
            return get_confusion_matrix(found[None], truth[None], self.arguments.get("include_background", True)).sum(
                (0, 1)
            )
        if found.shape != truth.shape:
            raise ValueError(f"prediction {tuple(found.shape)} and label {tuple(truth.shape)} are not of one size")
        if self.kind == "accuracy":
            return torch.tensor([(found == truth).sum(), truth.numel()])
        apart = (found - truth).abs() ** (1 if self.kind == "mean_absolute_error" else 2)
        return torch.tensor([apart.sum(), len(truth) if truth.ndim else 1])

    def value(self, scores: npt.NDArray[np.float64]) -> float:
        """Return the metric of some images: a mean over those that have a structure, or a quotient of sums."""
        from monai.metrics import compute_confusion_matrix_metric

        if self.kind in WORDS:
            known = scores[~np.isnan(scores).all(axis=1)]
            return float(np.nanmean(known, axis=1).mean()) if len(known) else float("nan")
        total = np.sum(scores, axis=0)
        if self.kind == "confusion":
            return float(compute_confusion_matrix_metric(self.confusion, torch.as_tensor(total)))
        return float(total[0] / total[1])

    def _structures(self, class_names: Sequence[str] | None) -> list[str] | None:
        """Return the names of the structures that are measured; ``None``: not known."""
        channels = self.bundle.get("_meta_#network_data_format#outputs#pred#channel_def")
        names = list(class_names or (channels.values() if isinstance(channels, Mapping) else ()))
        if not names or not all(str(name).isprintable() and len(str(name)) <= 60 for name in names):
            return None
        return [str(name) for name in (names if self.arguments.get("include_background", True) else names[1:])]

    def names(self, count: int) -> list[str]:
        """Return the names of ``count`` structures."""
        known = self.structures
        return known if known is not None and len(known) == count else [f"class_{i + 1}" for i in range(count)]

    def declared(self) -> tuple[Metric, ...]:
        """Return the mean, and each structure where there are several."""
        word = WORDS.get(self.kind, self.name)
        better = self.confusion not in ERRORS and self.kind not in ERRORS
        bound = float("inf") if self.kind in ERRORS else 1.0
        of_all = Metric(
            name=self.name, doc=f"{word}, as the bundle measures it over structures and images", high=bound,
            higher_is_better=better,
        )  # fmt: skip
        names = [*(self.structures or ()), "<class>"]  # the last for those of other channels than the metadata name
        return (
            of_all,
            *(
                Metric(
                    name=f"{self.name}_{name}", doc=f"{word} of one structure", by_class=True,
                    higher_is_better=True, family=f"{self.name}_<class>",
                )
                for name in (names if self.kind in WORDS else ())
            ),
        )  # fmt: skip
