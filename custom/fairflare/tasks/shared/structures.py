"""Provide the base class of segmentation, of images and of volumes: labels, network, Dice loss and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from fairflare.base import checks
from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import Flag, NonNegativeInt, Positive, PositiveInt, settings
from fairflare.data.geometry import DrawnOn
from fairflare.tasks.base import LOSS, Metric, SiteData, evaluating
from fairflare.tasks.images import Coding, Factor, ImageTask, Momentum, one_for_each_class
from fairflare.tasks.scores.mask_metrics import Wanted, declare_metrics
from fairflare.tasks.shared.site_settings import SiteSettings, setting_of

if TYPE_CHECKING:
    import torch

    from fairflare.base.task import Batch, Device, Outcomes
    from fairflare.tasks.scores.dice_scores import DiceScores
    from fairflare.tasks.transforms import Structured

THRESHOLD = 0.5
BATCH = 16  # number of images in a batch where no result depends on this number
EMPTY = "of a model that finds nothing it is the share of images without the structure"
DICE = Metric(
    name="dice", doc="Dice, mean over structures and images", reveals=EMPTY, higher_is_better=True, mean_of_images=True
)
VOLUME_DICE = Metric(
    name="volume_dice", doc="Dice of the listed slices of a volume together, mean over structures and volumes",
    reveals="of a model that finds nothing it is the share of volumes without the structure",
    higher_is_better=True,
)  # fmt: skip
#: By the beginning of its name, what is declared of each metric of one structure.
OF_STRUCTURE: dict[str, dict[str, Any]] = {
    "dice": {"doc": "Dice of one structure", "reveals": EMPTY, "higher_is_better": True},
    "loss": {
        "doc": "mean loss of one structure", "low": -math.inf, "high": math.inf, "higher_is_better": False,
    },
    "volume_dice": {
        "doc": "Dice of one structure in a volume", "reveals": VOLUME_DICE.reveals, "higher_is_better": True,
    },
}  # fmt: skip
Structure = Annotated[list[PositiveInt], Field(min_length=1)]


@settings
class SegmentationSite(SiteSettings):
    """Define the settings that a segmentation task reads from a site's private file.

    Args:
        mask_values: the site's ``{value in the file: label}``; default: the task's.
        structures: labels that the site annotated, such as ``[1]``, or ``"all"``: a structure that no mask marks is
            absent. Default: not known, and the site is asked where only others' masks mark a structure.
        mask_drawn_on: how masks lie on images where only one of both says how it lies: ``"stored"``: pixel on pixel as
            both files have them; ``"upright"``: both as they are shown. Default: such a pair is refused.
        phantom_cases: factor on the number of synthetic cases; default: the task's.
    """

    mask_values: Coding | None = None
    structures: Literal["all"] | Structure | None = None
    mask_drawn_on: DrawnOn | None = None
    phantom_cases: Factor | None = None

    def memory(self) -> dict[str, Any]:
        return {**super().memory(), "mask_drawn_on": self.mask_drawn_on}


@settings
class StructureTask(ImageTask):
    """Define the base class of segmentation tasks: every output channel is one structure with its own sigmoid.

    Args:
        num_classes: number of structures, that is of output channels.
        labels: for each structure the labels that belong to it, for example ``[[1, 2], [2]]`` for whole cell
            and nucleus of masks with 1 cytoplasm and 2 nucleus. Default: ``[[1], [2], ...]``.
        class_names: names of the structures for the metrics ``dice_<name>``; only with several structures.
            Default: ``class_1``, ``class_2``, ...
        mask_values: ``{value in the file: label}``, every value that a mask may hold. Default: the labels
            themselves and 0 for background; masks of 0 and 255 are also understood where 1 is the only label.
            A site whose masks are coded otherwise sets the same key in its own file.
        ignore: label of pixels that do not count, in loss and metrics (outside a field of view, not annotated).
            Default: all count.
        metrics: beside Dice, which is always there: ``"iou"``, ``"hd95"``, ``"assd"``, ``"surface_dice"``,
            ``"volume_error"`` (:mod:`fairflare.tasks.scores.mask_metrics`). ``hd95`` is the larger of the
            two directed 95th percentiles, as MONAI's, not medpy's of both surfaces together. Lengths are in mm where
            all images of a site say their spacing, else in pixels, under names with ``pixel_`` in front.
        tolerance: largest distance that counts as a match in surface Dice, in mm or pixels.
        norm_momentum: share of a new batch in the running statistics of the batch norms. With PyTorch's 0.1
            they still hold a quarter of their initial values after 12 steps, which is all that a small site
            does in a round, and 18 layers of it make the first models blind in evaluation.
        initial_weights: checkpoint of exactly this network (``.pt``, ``.pth`` or ``.safetensors``; also an
            ``FL_global_model.pt``) that the server starts from, unless the run or its own private file names another.
        allow_phantom: a site whose file names no data, for itself or for others, trains on synthetic data; False: it is
            refused unless its own file says ``"phantom": true``.
        phantom_seed: seed of the synthetic data, used where a site has none of its own.
        phantom_cases: factor on the number of synthetic cases.
    """

    primary_metric: ClassVar[str] = "dice"
    site_settings: ClassVar[type[SiteSettings]] = SegmentationSite
    has_classes: ClassVar[bool | None] = False  # an image may show several structures at once
    consistency: ClassVar[str] = "teacher"
    uncounted: ClassVar[bool] = False  # whether targets may have pixels outside the image, which do not count
    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "augmentation": only_with("augment"),
        "tolerance": only_with("metrics", "surface_dice"),
    }

    num_classes: PositiveInt = 1
    labels: list[Structure] | None = None
    class_names: list[str] | None = None
    mask_values: Coding | None = None
    ignore: NonNegativeInt | None = None
    metrics: tuple[Wanted, ...] = ("dice",)
    tolerance: Positive = 1.0
    norm_momentum: Momentum = 0.3
    initial_weights: str | None = None
    allow_phantom: Flag = True
    phantom_seed: NonNegativeInt = 0
    phantom_cases: Factor = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_for_each_class("labels", self.labels, self.num_classes)
        one_for_each_class("class_names", self.class_names, self.num_classes, different=True)
        self.check_coding(self.structures, self.mask_values)
        coding = dict(self.mask_values or {})
        checks.refuse({
            f"ignore must be a label of no structure, got {self.ignore}: labels are {self.structures}":
                self.ignore in set().union(*self.structures),
            f"mask_values gives no value to ignore={self.ignore}, got {coding}":
                self.ignore is not None and self.mask_values is not None and self.ignore not in coding.values(),
        })  # fmt: skip
        if self.network != "unet":
            from fairflare.tasks.encoders import check_segmenter

            check_segmenter(self.network, self.image_size, self.width)

    def definition(self) -> dict[str, Any]:
        """Return MONAI's class of the network with its arguments, as the configuration of a MONAI bundle has them."""
        if self.network != "unet":
            from fairflare.tasks.encoders import segmenter

            return segmenter(
                self.network, in_channels=self.in_channels, classes=self.num_classes, image_size=self.image_size,
                width=self.width,
            )  # fmt: skip
        return {
            "_target_": "monai.networks.nets.basic_unet.BasicUNet", "spatial_dims": self.spatial_dims,
            "in_channels": self.in_channels, "out_channels": self.num_classes,
            "features": list(cast("Any", self).features), "act": ["relu", {"inplace": True}],
            # Without biases the norm over all channels, too, would divide the level of the values away.
            "bias": getattr(self, "norm", "") == "layer",
            "norm": {"instance": ["instance", {"affine": True}], "layer": ["group", {"num_groups": 1}]}.get(
                getattr(self, "norm", ""), ["batch", {"momentum": self.norm_momentum}]
            ),
        }  # fmt: skip

    def build_unet(self) -> torch.nn.Module:
        """Build the U-Net that the task's settings describe."""
        from fairflare.tasks.networks import make_network

        return make_network(self.definition())

    def build_model(self) -> torch.nn.Module:
        from fairflare.tasks.networks import make_network

        return self.build_unet() if self.network == "unet" else make_network(self.definition())

    def structure_masks(self, coding: Mapping[int, int] | None, site: str, split: str) -> Structured:
        """Return the transform that turns a mask file's values into one mask for each structure."""
        from fairflare.tasks.transforms import Structured

        silent = set().union(*self.structures).difference(*self.known(self.structures))
        return Structured(self.structures, coding, site, split, self.ignore, silent)

    @property
    def structures(self) -> list[list[int]]:
        return self.labels or [[index + 1] for index in range(self.num_classes)]

    def initialise(self, model: torch.nn.Module, checkpoint: str | None = None) -> str:
        from fairflare.tasks.networks import load_network

        path = self.initial_weights if checkpoint is None else checkpoint
        if path is None:
            return super().initialise(model)
        return load_network(model, Path(path)) if self.initial_keys is None else self.load_what_fits(model, path)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the Dice loss, computed for each image and structure and then averaged."""
        from monai.losses.dice import DiceLoss

        return DiceLoss(sigmoid=True)(*self.select_counted(outputs, targets))

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the Dice loss of each image, (n,), the mean over its structures."""
        from monai.losses.dice import DiceLoss

        return DiceLoss(sigmoid=True, reduction="none")(*self.select_counted(outputs, targets)).flatten(1).mean(1)

    def chosen(self, values: torch.Tensor) -> torch.Tensor:
        """Return, of an array (n, structures, ...), the channels of the structures that the site annotates."""
        return values if self.annotated is None else values[:, list(self.annotated)]

    def structure_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each annotated structure, (structures,), the mean over the images of a batch.

        Of one image their mean is :meth:`loss`.
        """
        from monai.losses.dice import DiceLoss

        return DiceLoss(sigmoid=True, reduction="none")(*self.select_counted(outputs, targets)).flatten(1).mean(0)

    def select_counted(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets of the annotated structures, without influence of pixels that do not count.

        At these pixels the output is minus infinity (nothing is found) and the target is 0. The channel of a structure
        that is not annotated is dropped instead: otherwise its Dice loss would be 0, and the mean too low.
        """
        outputs, targets = self.chosen(outputs), self.chosen(targets)
        if self.ignore is None and not self.uncounted:
            return outputs, targets
        return outputs.masked_fill(targets < 0, -math.inf), targets.clamp(min=0)

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the probability of each structure, (..., structures, places) in [0, 1]."""
        axis = -1 - self.spatial_dims
        return outputs.softmax(axis).narrow(axis, 1, self.num_classes) if self.exclusive else outputs.sigmoid()

    def decide(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return values, (..., structures, places), that are above the threshold where a structure is marked.

        They are the probabilities. Where structures exclude each other, they are 1 for the most probable of structures
        and background, and 0 for the others.
        """
        import torch

        if not self.exclusive:
            return probabilities
        most, every = (
            reduce(probabilities, -1 - self.spatial_dims, keepdim=True) for reduce in (torch.amax, torch.sum)
        )
        return ((probabilities == most) & (probabilities > 1 - every)).to(probabilities.dtype)

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        """Evaluate the model by the Dice at threshold 0.5, the mean over structures and then over images.

        The Dice is 1 if both masks are empty. Images without known origin (those of a user's script) are compared at
        the network's size.

        Returns:
            ``dice``, ``loss`` and the metrics of the setting ``metrics``; ``volume_dice`` if images are slices of
            volumes; with several structures also the metrics of each annotated structure, such as
            ``dice_<class name>``.
        """
        scores, by_batch = self._scores(model, batches, device, self.metrics)
        counts, losses, by_structure = zip(*by_batch, strict=True)
        names = self.known(self.names())
        result = {"dice": 0.0, "loss": float(np.average(losses, weights=counts))}
        if self.num_classes > 1:
            own = np.average(by_structure, axis=0, weights=counts)
            result |= {f"loss_{name}": float(value) for name, value in zip(names, own, strict=True)}
        tables: dict[str, Any] = {"dice": scores.images}
        if scores.volumes is not None:
            # Fixed patches of a whole volume count together: alone, each without a structure would count 1.
            tables["volume_dice" if self.spatial_dims == 2 else "dice"] = scores.volumes
        tables |= {name: means[None] for name, means in (scores.more.means() if scores.more else {}).items()}
        for name, values in tables.items():
            result[name] = float(values.mean())
            if self.num_classes > 1:
                result |= {
                    f"{name}_{structure}": float(value) for structure, value in zip(names, values.mean(0), strict=True)
                }
        return result

    def outcomes(self, model: torch.nn.Module, data: SiteData, split: str, device: Device) -> Outcomes:
        """Return the Dice of each image and structure, as :meth:`fairflare.base.task.Task.outcomes` defines it."""
        scores, _ = self._scores(model, data.batches(split, batch_size=BATCH), device)
        found = np.full((len(scores.images), self.num_classes), np.nan)
        found[:, self.known(range(self.num_classes))] = scores.images.numpy()
        return None, found

    def _scores(
        self, model: torch.nn.Module, batches: Iterable[Batch], device: Device, metrics: Sequence[str] = ()
    ) -> tuple[DiceScores, list[tuple[int, float, list[float]]]]:
        """Return Dice and further metrics of each image, and of each batch its size, its loss and that by structure.

        Only annotated structures count.
        """
        from fairflare.tasks.scores.dice_scores import DiceScores
        from fairflare.tasks.scores.mask_metrics import MaskMetrics

        wanted = set(metrics) - {"dice"}
        scores = DiceScores(MaskMetrics(wanted, self.spatial_dims, self.tolerance) if wanted else None, self.chosen)
        by_batch: list[tuple[int, float, list[float]]] = []
        with evaluating(model):
            for batch in batches:
                inputs, targets = batch
                outputs = self.outputs(model, inputs.to(device))
                targets = targets.to(outputs.device)  # of a large volume the outputs may lie on the CPU
                by_structure = self.structure_losses(outputs, targets) if self.num_classes > 1 else targets[:0]
                by_batch.append((len(targets), float(self.loss(outputs, targets)), by_structure.tolist()))
                scores.add(
                    self.decide(self.probabilities(outputs)) > THRESHOLD, targets, getattr(batch, "origins", None)
                )
        checks.whole("the number of batches to evaluate on", len(by_batch))
        return scores, by_batch

    def names(self) -> list[str]:
        """Return the names of the structures that the network segments."""
        return self.class_names or [f"class_{index + 1}" for index in range(self.num_classes)]

    def declared_metrics(self) -> tuple[Metric, ...]:
        names = self.names() if self.num_classes > 1 else []
        slices = self.spatial_dims == 2
        return (
            DICE,
            LOSS,
            *([VOLUME_DICE] if slices else []),
            *(
                Metric(name=f"{front}_{name}", by_class=True, of_classes=(number,), family=f"{front}_<class>", **of)
                for front, of in OF_STRUCTURE.items()
                if slices or front != "volume_dice"
                for number, name in enumerate(names)
            ),
            *declare_metrics(self.metrics, self.spatial_dims, self.tolerance, names),
        )

    def coding_of(self, site: str, own: SegmentationSite) -> Mapping[int, int] | None:
        """Return ``{value: label}`` of a site's masks, or ``None`` if the values are the labels.

        A structure that the site did not annotate needs no value.
        """
        if own.mask_values is None:
            return self.mask_values
        with setting_of(site):
            self.check_coding(
                self.known(self.structures),
                own.mask_values,
                "; a site that did not annotate it says so with 'structures'",
            )
        return own.mask_values

    def check_coding(
        self, structures: Sequence[Sequence[int]], mask_values: Mapping[int, int] | None, remedy: str = ""
    ) -> None:
        """Raise ``ValueError`` for a structure that no mask value stands for, or a value that stands for no structure.

        The first would be empty in every mask; the second would be learnt as background.
        """
        if mask_values is None:
            return
        known, labels = {0, self.ignore}.union(*self.structures), set(mask_values.values())
        absent = [structure for structure in structures if labels.isdisjoint(structure)]
        lost = {value: label for value, label in mask_values.items() if label not in known}
        more = (
            f"learn it too (--set num_classes={max(lost.values(), default=0)})"
            if self.labels is None
            else "add it to labels"
        )
        checks.refuse({
            f"mask_values gives no value to the structure {next(iter(absent), None)}, got {dict(mask_values)}{remedy}":
                absent,
            f"mask_values reads {', '.join(f'{value} as {label}' for value, label in lost.items())}, which is no "
            f"structure of the task ({self.structures}); {more}, or read it as background, 0": lost,
        })  # fmt: skip

    def seed_cases(self, own: SegmentationSite) -> tuple[int, float]:
        """Return the seed of a site's synthetic cases, and the factor on their number."""
        return own.seed_or(self.phantom_seed), self.phantom_cases if own.phantom_cases is None else own.phantom_cases
