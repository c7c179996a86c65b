"""A bundle's key metric, image by image: the metric inside the event handler that a bundle names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairflare.base.task import Metric

if TYPE_CHECKING:
    import numpy.typing as npt

    from fairflare.tasks.bundles.bundle_config import Bundle

#: Last part of ``_target_`` -> name in the results. Handlers need ignite; the metrics inside them do not.
KINDS = {"MeanDice": "dice", "DiceMetric": "dice", "MeanIoUHandler": "iou", "MeanIoU": "iou"}
WORDS = {"dice": "Dice", "iou": "intersection over union"}
TAKEN = ("include_background", "num_classes", "ignore_empty")
WITHOUT_EFFECT = (  # on the value of one image
    "_target_", "_desc_", "output_transform", "save_details", "return_with_label", "get_not_nans", "reduction",
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
        key = bundle.needed("key_metric")
        found = bundle.parser[key]
        if isinstance(found, Mapping) and "_target_" not in found and found:
            # The first one is the key metric, as in MONAI's engines.
            key = bundle.followed(f"{key}#{next(iter(found))}")
            found = bundle.parser[key]
        self.bundle, self.key = bundle, key
        target = str(found.get("_target_") if isinstance(found, Mapping) else found).rpartition(".")[2]
        if target not in KINDS:
            raise bundle.problem(
                f"key {key!r} is {target}, which is not one of {', '.join(KINDS)}; name another one with "
                "bundle_ids={'key_metric': 'KEY'}, or set it with bundle_overrides"
            )
        strange = [name for name in found if name not in (*TAKEN, *WITHOUT_EFFECT)]
        if strange:
            raise bundle.problem(f"key {key!r} has {strange[0]!r}, which is not known of a {target}")
        if found.get("reduction", "mean") != "mean":
            raise bundle.problem(f"key {key!r}: reduction must be 'mean', got {found['reduction']!r}")
        self.name = KINDS[target]
        self.arguments = {name: bundle.make(f"{key}#{name}") for name in TAKEN if name in found}
        self._picks = bundle.make(f"{key}#output_transform") if "output_transform" in found else None
        self.structures = self._structures(class_names)

    def of_image(self, item: Mapping[str, Any], label_key: str) -> npt.NDArray[np.float64]:
        """Return (structures,) of one image behind the postprocessing; NaN where the mask has none of a structure.

        Args:
            item: has ``"pred"`` and the label, (channels, ...) each.
            label_key: of the label, where the metric does not say what it compares.
        """
        with self.bundle.telling(f"key {self.key!r}"):
            found, truth = item["pred"], item[label_key]
            if self._picks is not None:
                (found,), (truth,) = self._picks([dict(item)])
            values = self._metric()(torch.as_tensor(found)[None], torch.as_tensor(truth)[None])
        scores: npt.NDArray[np.float64] = torch.as_tensor(values).detach().cpu().double().reshape(-1).numpy()
        return scores

    def _metric(self) -> Any:
        from monai.metrics import DiceMetric, MeanIoU

        return (DiceMetric if self.name == "dice" else MeanIoU)(reduction="mean", **self.arguments)

    def _structures(self, class_names: Sequence[str] | None) -> list[str] | None:
        """Return the names of the structures that are measured; ``None``: not known."""
        channels = self.bundle.parser.get("_meta_#network_data_format#outputs#pred#channel_def")
        names = list(class_names or (channels.values() if isinstance(channels, Mapping) else ()))
        if not names:
            return None
        return [str(name) for name in (names if self.arguments.get("include_background", True) else names[1:])]

    def names(self, count: int) -> list[str]:
        """Return the names of ``count`` structures."""
        known = self.structures
        return known if known is not None and len(known) == count else [f"class_{i + 1}" for i in range(count)]

    def declared(self) -> tuple[Metric, ...]:
        """Return the mean, and each structure where there are several."""
        word = WORDS[self.name]
        names = [*(self.structures or ()), "<class>"]  # the last for those of other channels than the metadata name
        return (
            Metric(
                name=self.name, doc=f"{word}, mean over structures and images, as the bundle measures it",
                higher_is_better=True,
            ),
            *(
                Metric(
                    name=f"{self.name}_{name}", doc=f"{word} of one structure", by_class=True,
                    higher_is_better=True, family=f"{self.name}_<class>",
                )
                for name in names
            ),
        )  # fmt: skip


def means(scores: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the mean of each image over its structures, NaN where an image has none.

    This mean is the first half of MONAI's ``reduction="mean"``.
    """
    return np.array([np.nan if np.isnan(own).all() else np.nanmean(own) for own in scores])
