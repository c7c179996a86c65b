"""Define the task of classifying 2D images: MONAI's networks, cross-entropy; a site's own images or a phantom."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fairflare.base import checks
from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import Fraction, PositiveInt, field_names, settings
from fairflare.data.datalist import DataError, Datalist, Sample
from fairflare.data.listing.attributes import UNKNOWN
from fairflare.data.sources import source
from fairflare.data.whole_volumes import read_image
from fairflare.tasks.base import SiteData
from fairflare.tasks.images import Augmentations, Grey, PhantomImages, Preprocessing, Size, describe_drawn
from fairflare.tasks.scores.class_scores import OUTSIDE
from fairflare.tasks.scores.finding_scores import cases_of_findings, find_known
from fairflare.tasks.shared.classes import ClassSite, ClassTask, LabelledImages
from fairflare.tasks.shared.dealt import Dealt
from fairflare.tasks.shared.site_settings import SiteSettings, setting_error

if TYPE_CHECKING:
    import torch

    from fairflare.base.task import Batch

PLAN_NAMES = {  # {argument of ``PhantomPlan``: name of the task's setting}
    "seed": "phantom_seed", "num_sites": "phantom_sites", "num_samples": "phantom_samples", "num_test": "phantom_test",
    "num_own_test": "phantom_own_test", **{name: name for name in ("phantom", *field_names(Dealt))},
}  # fmt: skip
MIN_CLASS = 4  # least number of images of a synthetic class, for training and validation together


@settings
class ClassificationSite(ClassSite):
    """Define the settings that the classification task reads from a site's private file.

    Args:
        phantom_site: which of the synthetic sites this one is, from 1; default: the number at the end of its name.
    """

    phantom_site: Any = None


@settings
class ClassificationTask(Dealt, Preprocessing, ClassTask):
    """Classify 2D images.

    The defaults are a narrow ResNet-18 on 48x48 images, quick enough for a laptop. The setting of the FedISM paper is
    ``image_size=(224, 224), features=(64, 128, 256, 512), max_pool=True, initial_weights=<ImageNet checkpoint>``,
    that of FedMRL ``network="densenet121"`` with 224x224.

    Args:
        network: MONAI's ``"resnet18"`` or ``"densenet121"``; or a vision transformer, ``"vit_s"``, ``"vit_b"``,
            ``"vit_l"`` or for a trial ``"vit_mini"``, whose ``initial_weights`` may have timm's names and fit in part.
        patch_size: side of the patches of a vision transformer; divides ``image_size``.
        image_size: height and width that images are resized to, at least 32; 33 with ``max_pool``, 64 for
            ``"densenet121"``, which would otherwise end in one pixel.
        in_channels: 1 (colour images become luminance) or 3 (grey images are repeated).
        augmentation: random changes of ``augment=True``: ``"flip"``, ``"affine"``, ``"intensity"`` (ours); the papers'
            ``"flip_vertical"``, ``"blur"``, ``"rotate"`` (10 degrees), ``"shift"`` (2 %), ``"one_move"``, ``"jitter"``.
        phantom: synthetic data, used where a site has none of its own: ``"dermoscopy"``, ``"dermoscopy7"``,
            ``"fundus"`` or ``"endoscopy"``.
        phantom_sites: number of sites that the synthetic data are dealt to; a run whose sites are named or counted
            sets it to their number unless told otherwise.
        phantom_samples: synthetic training and validation images of all sites together.
        phantom_test: synthetic images of the common test set.
        phantom_own_test: synthetic images of each site's own test set.
        phantom_min_share: share of ``phantom_samples`` that every class has at least; rarer classes are raised to it,
            and always to four images.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = (
        "balanced_accuracy", "accuracy", "auc_ovo", "auc", "pr_auc", "f1_macro", "head", "medium", "tail", "all",
        OUTSIDE, "common/balanced_accuracy", "clean/balanced_accuracy", "corrupted/balanced_accuracy",
        "light/balanced_accuracy", "dark/balanced_accuracy",
    )  # fmt: skip

    under_dp: ClassVar[bool] = True  # the loss of an image does not depend on other images
    site_settings: ClassVar[type[SiteSettings]] = ClassificationSite

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "alpha": only_with("partition", "dirichlet", "two_pool"),
        "eta": only_with("partition", "shards"),
        "shard_mode": only_with("partition", "shards"),
        "corruption": only_with("corrupted_sites"),
        "severity": only_with("corrupted_sites"),
        "label_noise": only_with("label_noise_sites"),
        "label_noise_kind": only_with("label_noise_sites"),
        "attribute_prevalence": only_with("attributes"),
        "attribute_noise": only_with("attributes"),
    }

    image_size: Size = (48, 48)
    in_channels: Grey = 3
    augmentation: Augmentations = ("flip", "affine")
    phantom: Literal["dermoscopy", "dermoscopy7", "fundus", "endoscopy"] = "dermoscopy"
    phantom_sites: PositiveInt = 5
    phantom_samples: PositiveInt = 2000
    phantom_test: PositiveInt = 400
    phantom_own_test: PositiveInt = 150
    phantom_min_share: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sides("image_size", self.image_size)
        if self.allow_phantom:  # else nothing is checked, as a hospital's installation need not have phantoms
            checks.number("phantom_min_share", self.phantom_min_share, low=0, high=1 / len(self.drawn_classes))
            self.plan(self.phantom_seed)  # raises an error if the phantom's settings contradict each other

    @property
    def drawn_classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(phantom_of(self.phantom).class_names)

    @property
    def drawn_groups(self) -> Mapping[str, Sequence[int]]:  # type: ignore[override]
        return phantom_of(self.phantom).groups

    def plan(self, seed: int) -> Any:
        """Return the plan of the synthetic federation that the phantom's settings describe."""
        named = {name: getattr(self, setting) for name, setting in PLAN_NAMES.items()} | {"seed": seed}
        try:
            return source("classes").PhantomPlan(
                **named, image_size=max(self.image_size),
                min_class=max(MIN_CLASS, round(self.phantom_min_share * self.phantom_samples)),
            )  # fmt: skip
        except ValueError as error:  # the message names the plan's arguments: replace them by the task's settings
            text = re.sub(rf"\b({'|'.join(PLAN_NAMES)})\b", lambda m: PLAN_NAMES[m[0]], str(error))
            raise ValueError(text) from error

    def open_folder(self, site: str, settings: ClassificationSite, datalist: Datalist) -> SiteData:
        self.check_classes(site, settings, datalist)
        return FolderClasses(self, datalist, settings.class_numbers, **settings.memory())

    def open_phantom(self, site: str, settings: ClassificationSite) -> SiteData:
        classes = len(self.drawn_classes)
        self.check_phantom_fits(site, self.phantom, f"{classes} classes", self.classes == classes and not self.channels)
        index = phantom_index(site, settings.phantom_site, self.phantom_sites)
        try:
            return PhantomClasses(self, site, self.plan(settings.seed_or(self.phantom_seed)), index)
        except ValueError as error:  # a partition that leaves a site too few images
            raise DataError(f"site '{site}': {error}", f"site '{site}': the phantom cannot be made: {error}") from error


class FolderClasses(LabelledImages):
    """Read the 2D images of a site's folder, each with the number of its class."""

    task: ClassificationTask

    def prepare(self, split: str, sample: Sample) -> Mapping[str, Any]:
        import torch

        from fairflare.tasks.transforms import prepare_image

        image = read_image(sample, **self.read_arguments(split))
        return {
            "image": prepare_image(image, self.task.in_channels, self.task.image_size, self.task.resize),
            # nobody reads the target of an image without a label
            "label": torch.tensor(0 if sample.label is None else self.class_of(sample, split)),
        }


class PhantomClasses(PhantomImages):
    """Hold the synthetic 2D images of one site with their classes; a split is resized at its first use."""

    task: ClassificationTask

    def __init__(self, task: ClassificationTask, site: str, plan: Any, index: int) -> None:
        super().__init__(task, site)
        self._drawn = source("classes").class_site(plan, index)
        self._arrays: dict[str, Batch] = {}
        self.test_splits = tuple(sorted(split for split in self._drawn.labels if split.startswith("test")))
        self.attributes = {plan.kind.called: (*plan.kind.attributes, UNKNOWN)} if plan.attributes else {}
        wrong = f"; {plan.label_noise:.0%} of the training labels are wrong" if plan.has_label_noise(index) else ""
        listed = self._drawn.labels if task.findings is not None else ()
        self._findings = {split: self._draw_findings(split) for split in listed}
        if task.findings is not None:
            self.known, self.class_names = find_known(self._findings.values()), tuple(task.findings)
        self.description = describe_drawn(
            f"{phantom_of(plan.phantom).title} (site {index + 1} of {plan.num_sites}{wrong})",
            {split: len(labels) for split, labels in self._drawn.labels.items()},
        )

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return self._drawn.attributes[self.check_split(split)].tolist()

    def num_samples(self, split: str) -> int:
        return len(self._drawn.labels[self.check_split(split)])

    def _draw_findings(self, split: str) -> npt.NDArray[np.int64]:
        """Return the classes of both halves of each picture as findings; every fifth label of them is not known."""
        one_hot = np.eye(self.task.classes, dtype=np.int64)[np.array(self._drawn.labels[split])]
        findings = one_hot | np.roll(one_hot, 1, axis=0)
        findings.reshape(-1)[2::5] = -1
        return findings

    def marks(self, split: str) -> list[tuple[Hashable, Collection[int]]] | None:
        rows = self._findings.get(self.check_split(split))
        return None if rows is None else [(k, np.flatnonzero(row > 0).tolist()) for k, row in enumerate(rows)]

    def class_cases(self, split: str) -> torch.Tensor | None:
        import torch

        rows = self._findings.get(self.check_split(split))
        return super().class_cases(split) if rows is None else torch.tensor(cases_of_findings(range(len(rows)), rows))

    def class_counts(self, split: str) -> torch.Tensor | None:
        import torch

        labels = self._drawn.labels[self.check_split(split)]
        return None if self._findings else torch.from_numpy(np.bincount(labels, minlength=self.task.classes))

    def arrays(self, split: str) -> Batch:
        import torch

        from fairflare.tasks.placing import smooth
        from fairflare.tasks.transforms import luminance

        if split not in self._arrays:
            labels = torch.from_numpy(np.array(self._drawn.labels[split], np.int64))
            pictures = torch.tensor(self._drawn.images[split]).permute(0, 3, 1, 2)
            if self.task.in_channels == 1:
                pictures = luminance(pictures).round().to(torch.uint8)
            pictures = smooth(pictures.float(), self.task.image_size).round().clamp(0, 255).to(torch.uint8)
            if split in self._findings:
                middle = pictures.shape[3] // 2
                pictures = torch.cat([pictures[..., :middle], pictures.roll(1, 0)[..., middle:]], 3)
                labels = torch.from_numpy(self._findings[split])
            self._arrays[split] = pictures, labels
        return self._arrays[split]


def phantom_of(name: str) -> Any:
    """Return the classification phantom with the given name."""
    return source("classes").PHANTOMS[name]


def phantom_index(site: str, chosen: Any, num_sites: int) -> int:
    """Return the index, from 0, of the synthetic site whose images a site gets.

    The index is the site's setting ``phantom_site`` minus 1, or the number at the end of the site's name minus 1.

    Raises:
        DataError: there is no such number, or it is not in [1, ``num_sites``].
    """
    digits = site[len(site.rstrip("0123456789")) :]
    number = int(digits) if chosen is None and digits else chosen
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= num_sites:
        raise setting_error(
            site,
            "phantom_site",
            f"phantom_site must be one of the phantom's {num_sites} sites (phantom_sites), from 1; got {number!r}. "
            f"Set it, name the site site-1 to site-{num_sites}, raise phantom_sites, or set 'data_root' to own images",
        )
    return number - 1
