"""Classification of 2D images: MONAI's ResNet-18 or DenseNet121, cross-entropy; own images or a phantom."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fairflare.base import checks
from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.cases.floor import cases_of_classes
from fairflare.base.cases.sampling import SHARES
from fairflare.base.settings import Flag, Fraction, NonNegativeInt, Positive, PositiveInt, settings
from fairflare.data.attributes import UNKNOWN
from fairflare.data.datalist import DataError, Datalist, Sample
from fairflare.tasks.base import LOSS, Metric, SiteData
from fairflare.tasks.images import (
    Augmentations,
    Coding,
    FolderImages,
    Grey,
    ImageTask,
    Momentum,
    PhantomImages,
    SiteSettings,
    Size,
    one_for_each_class,
    setting_error,
    setting_of,
)
from fairflare.tasks.scores.class_scores import MeasuresClasses
from fairflare.tasks.scores.metrics import MEANINGS, NAMES, REVEALS

if TYPE_CHECKING:
    import torch
    from monai.transforms import Compose

    from fairflare.base.task import Batch, PriorNetwork
    from fairflare.data.phantoms import ClassPhantom, PhantomPlan
    from fairflare.tasks.networks import Classifier

PLAN_NAMES = {  # arguments of the plan as the task calls them
    "seed": "phantom_seed", "num_sites": "phantom_sites", "num_samples": "phantom_samples", "num_test": "phantom_test",
    "num_own_test": "phantom_own_test",
}  # fmt: skip
NETWORK_SETTINGS = (
    "in_channels", "features", "norm_momentum", "image_size", "patch_size", "max_pool", "projector_dim", "neck_dim",
    "retrained_head",
)  # fmt: skip
PLAN_SETTINGS = (  # those that the plan calls as the task does
    "phantom", "camera_shift", "partition", "alpha", "eta", "shard_mode", "corrupted_sites", "corruption", "severity",
    "label_noise_sites", "label_noise", "label_noise_kind", "attributes",
    "attribute_prevalence", "attribute_noise",
)  # fmt: skip
RECALL: dict[str, Any] = {
    "doc": "share of the images of this class that were told",
    "reveals": "there or not: whether the site has images of the class",
    "by_class": True,
    "higher_is_better": True,
    "family": "recall_<class>",
}
GROUP: dict[str, Any] = {
    "doc": "mean recall of a group's classes that occur (head, medium, tail)",
    "reveals": "whether the site has any class of the group, and the recall of a class that is there alone",
    "higher_is_better": True,
    "family": "<group>",
}

TONE = "tone"  # the phantom's attribute
MIN_CLASS = 4  # images of a synthetic class, for training and validation


@settings
class ClassificationSite(SiteSettings):
    """What classification reads of a site's private file.

    Args:
        class_numbers: ``{own number: class}``; default: the task's numbers.
        phantom_site: which of the synthetic sites this one is, from 1; default: the number at the end of its name.
    """

    class_numbers: Coding | None = None
    phantom_site: Any = None


@settings
class ClassificationTask(MeasuresClasses, ImageTask):
    """Tell the class of 2D images.

    The defaults are a narrow ResNet-18 on 48x48 images, quick enough for a laptop. The setting of the FedISM paper is
    ``image_size=(224, 224), features=(64, 128, 256, 512), max_pool=True, initial_weights=<ImageNet checkpoint>``,
    that of FedMRL ``network="densenet121"`` with 224x224.

    Args:
        network: MONAI's ``"resnet18"`` or ``"densenet121"``; or a vision transformer, ``"vit_s"``, ``"vit_b"``,
            ``"vit_l"`` or for a trial ``"vit_mini"``, whose ``initial_weights`` may have timm's names and fit in part.
        features: widths of the four stages of the ResNet; 64, 128, 256, 512 is the published one.
        patch_size: of a vision transformer; divides ``image_size``.
        max_pool: the ResNet's pooling behind its first convolution (published: yes; images of 48x48 do without).
        image_size: height and width that images are resized to, at least 32; 33 with ``max_pool``, 64 for
            ``"densenet121"``, which would otherwise end in one pixel.
        in_channels: 1 (colour images become luminance) or 3 (grey images are repeated).
        num_classes: number of classes. Default: the phantom's.
        class_names: names of the classes for the metrics ``recall_<name>``. Default: the phantom's; of own images
            those of the datalist, or ``class_0``, ...
        class_groups: ``{"head": [0, 1], ...}``: their mean recalls are reported too. Default: the phantom's; of own
            images those of the datalist.
        norm_momentum: share of a new batch in the running statistics of the batch norms (PyTorch: 0.1).
        initial_weights: checkpoint of the encoder (a plain state dict, torchvision's or MONAI's names, ``.pt``,
            ``.pth`` or ``.safetensors``) that the server starts from, unless its own private file names another; a
            classifier head of another shape is left out.
        projector_dim: output width of a projection head next to the classifier (Fed-MAS); ``None``: none.
        neck_dim: output width of a projection head between encoder and classifier (MOON; its authors: 256); ``None``:
            none.
        classifier: ``"linear"``, or ``"cosine"``: ``cosine_scale`` times the cosine of features and class vector
            (LDAM).
        cosine_scale: see there.
        retrained_head: a second classifier beside it, trained by the server and used in evaluation (CReFF).
        augmentation: random changes of ``augment=True``: ``"flip"``, ``"affine"``, ``"intensity"`` (ours); the papers'
            ``"flip_vertical"``, ``"blur"``, ``"rotate"`` (10 degrees), ``"shift"`` (2 %), ``"one_move"``, ``"jitter"``.
        phantom: synthetic data, used where a site has none of its own: ``"dermoscopy"``, ``"dermoscopy7"``,
            ``"fundus"`` or ``"endoscopy"``.
        allow_phantom: a site whose file names no data, for itself or for others, trains on synthetic data; False: it is
            refused unless its own file says ``"phantom": true``.
        phantom_seed: of the synthetic data.
        phantom_sites: number of sites that the synthetic data are dealt to; a run whose sites are named or counted
            sets it to their number unless told otherwise.
        phantom_samples: synthetic training and validation images of all sites together.
        phantom_test: synthetic images of the common test set.
        phantom_own_test: synthetic images of each site's own test set.
        phantom_min_share: share of ``phantom_samples`` that every class has at least; rarer classes are raised to it,
            and always to four images.
        camera_shift: how much the cameras of the synthetic sites differ, 0 (not at all) to 1.5.
        partition: ``"iid"``, ``"dirichlet"``, ``"two_pool"`` or ``"shards"``; see :mod:`fairflare.data.partitions`.
        alpha: concentration of the Dirichlet and two-pool partitions; the smaller, the less alike the sites.
        eta: of the shard partition; the larger, the more shards of its dominant class a site gets.
        shard_mode: which form of the shard partition; see :mod:`fairflare.data.partitions`.
        corrupted_sites: so many last sites have images of lower quality.
        corruption: ``"gaussian_noise"`` or ``"motion_blur"``.
        severity: of the corruption, from 1 (slight) to 5.
        label_noise_sites: so many last sites train on labels of which some are wrong; their labels for validation and
            test are right.
        label_noise: share of the training labels there that are wrong.
        label_noise_kind: ``"symmetric"``: each other class is as likely; ``"pair"``: always the next class.
        attributes: split the phantom's common test set by its attribute (skin tone) as well, which runs may ask for as
            groups of ``tone``.
        attribute_prevalence, attribute_noise: what more depends on the tone, see
            :class:`fairflare.data.phantoms.PhantomPlan`.
    """

    primary_metric: ClassVar[str] = "balanced_accuracy"
    shown_metrics: ClassVar[tuple[str, ...]] = (
        "balanced_accuracy", "accuracy", "auc_ovo", "f1_macro", "head", "medium", "tail", "all",
        "common/balanced_accuracy", "clean/balanced_accuracy", "corrupted/balanced_accuracy",
        "light/balanced_accuracy", "dark/balanced_accuracy",
    )  # fmt: skip

    site_settings: ClassVar[type[SiteSettings]] = ClassificationSite
    class_labels: ClassVar[bool] = True
    has_classes: ClassVar[bool | None] = True

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "features": only_with("network", "resnet18"),
        "max_pool": only_with("network", "resnet18"),
        "patch_size": only_with("network", "vit_mini", "vit_s", "vit_b", "vit_l"),
        "cosine_scale": only_with("classifier", "cosine"),
        "augmentation": only_with("augment"),
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

    network: Literal["resnet18", "densenet121", "vit_mini", "vit_s", "vit_b", "vit_l"] = "resnet18"
    features: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (16, 32, 64, 128)
    max_pool: Flag = False
    patch_size: PositiveInt = 16
    image_size: Size = (48, 48)
    in_channels: Grey = 3
    num_classes: Annotated[int, Field(strict=True, ge=2)] | None = None
    class_names: list[str] | None = None
    class_groups: dict[str, Annotated[list[NonNegativeInt], Field(min_length=1)]] | None = None
    norm_momentum: Momentum = 0.1
    initial_weights: str | None = None
    projector_dim: PositiveInt | None = None
    neck_dim: PositiveInt | None = None
    classifier: Literal["linear", "cosine"] = "linear"
    cosine_scale: Positive = 30.0
    retrained_head: Flag = False
    augmentation: Augmentations = ("flip", "affine")
    phantom: Literal["dermoscopy", "dermoscopy7", "fundus", "endoscopy"] = "dermoscopy"
    allow_phantom: Flag = True
    phantom_seed: NonNegativeInt = 0
    phantom_sites: PositiveInt = 5
    phantom_samples: PositiveInt = 2000
    phantom_test: PositiveInt = 400
    phantom_own_test: PositiveInt = 150
    phantom_min_share: Fraction = 0.0
    camera_shift: Annotated[float, Field(strict=True, ge=0, le=1.5)] = 1.0
    partition: Literal["iid", "dirichlet", "two_pool", "shards"] = "two_pool"
    alpha: Annotated[float, Field(strict=True, ge=1e-6, le=1e9)] = 1.0
    eta: Fraction = 1.0
    shard_mode: Literal["literal", "complement", "authors"] = "literal"
    corrupted_sites: NonNegativeInt = 1
    corruption: Literal["gaussian_noise", "motion_blur"] = "gaussian_noise"
    severity: Annotated[int, Field(strict=True, ge=1, le=5)] = 3
    label_noise_sites: NonNegativeInt = 0
    label_noise: Fraction = 0.4
    label_noise_kind: Literal["symmetric", "pair"] = "symmetric"
    attributes: Flag = False
    attribute_prevalence: Fraction = 0.0
    attribute_noise: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        pools = self.max_pool and self.network == "resnet18"
        where = f"{self.network} with max_pool" if pools else self.network
        least = 64 if self.network == "densenet121" else 33 if pools else 32
        for side in self.image_size:
            checks.whole(f"image_size for {where}", side, low=least)
            if self.network.startswith("vit") and side % self.patch_size:
                raise ValueError(f"image_size must be multiples of patch_size={self.patch_size}, got {self.image_size}")
        if self.class_names is not None:
            one_for_each_class("class_names", self.class_names, self.classes, different=True)
        self.check_groups(self.class_groups or {})
        if self.retrained_head and self.classifier != "linear":
            raise ValueError("retrained_head needs classifier='linear'")
        if self.allow_phantom:  # else a site that asks for it all the same is told; a hospital need not import phantoms
            most = 1 / len(phantom_of(self.phantom).class_names)
            checks.number("phantom_min_share", self.phantom_min_share, low=0, high=most)
            self.plan(self.phantom_seed)  # refuses what does not fit together

    def check_groups(self, groups: Mapping[str, Sequence[int]]) -> None:
        """Raises ``ValueError`` where a group is called like a metric or has a class that the task has not."""
        for group, members in groups.items():
            if group in (*NAMES, "all", "loss") or group.startswith("recall_"):
                raise ValueError(f"class_groups: '{group}' is the name of a metric; choose another")
            for member in members:
                checks.number(f"class_groups: class of {group!r}", member, low=0, high=self.classes - 1, whole=True)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.num_classes if self.num_classes is not None else len(phantom_of(self.phantom).class_names)

    def names(self) -> list[str]:
        """Names of the classes."""
        if self.class_names is not None:
            return self.class_names
        own = phantom_of(self.phantom).class_names
        return list(own) if self.classes == len(own) else [f"class_{c}" for c in range(self.classes)]

    def groups(self) -> dict[str, list[int]]:
        """Groups of classes, such as head, medium, tail."""
        if self.class_groups is not None:
            return self.class_groups
        own = phantom_of(self.phantom)
        return {k: list(v) for k, v in own.groups.items()} if self.classes == len(own.class_names) else {}

    def plan(self, seed: int) -> PhantomPlan:
        """The synthetic federation that these settings describe."""
        try:
            return self._plan(seed)
        except ValueError as error:  # in the words of the task's arguments
            text = re.sub(rf"\b({'|'.join(PLAN_NAMES)})\b", lambda m: PLAN_NAMES[m[0]], str(error))
            raise ValueError(text) from error

    def _plan(self, seed: int) -> PhantomPlan:
        from fairflare.data.phantoms import PhantomPlan

        same = {name: getattr(self, name) for name in PLAN_SETTINGS}
        return PhantomPlan(
            **same,
            seed=seed,
            image_size=max(self.image_size),
            num_sites=self.phantom_sites,
            num_samples=self.phantom_samples,
            num_test=self.phantom_test,
            num_own_test=self.phantom_own_test,
            min_class=max(MIN_CLASS, round(self.phantom_min_share * self.phantom_samples)),
        )

    def build_model(self) -> Classifier:
        from fairflare.tasks.networks import build_classifier

        scale = self.cosine_scale if self.classifier == "cosine" else None
        same = {name: getattr(self, name) for name in NETWORK_SETTINGS}
        return build_classifier(self.network, classes=self.classes, cosine_scale=scale, **same)

    def initialise(self, model: torch.nn.Module, checkpoint: str | None = None) -> str:
        from fairflare.tasks.networks import VITS, Classifier, load_encoder

        path = checkpoint if checkpoint is not None else self.initial_weights
        if path is None:
            return super().initialise(model)
        if not isinstance(model, Classifier):
            raise ValueError(f"initial_weights needs a Classifier, build_model gave {type(model).__name__}")
        fits = self.initial_keys is None and self.network not in VITS
        return load_encoder(model, Path(path)) if fits else self.load_what_fits(model, path)

    def load_prior(self, network: str, checkpoint: str | None, image_size: int | None) -> PriorNetwork:
        """See :func:`fairflare.tasks.priors.load_prior`."""
        from fairflare.tasks.priors import load_prior

        return load_prior(network, checkpoint, image_size)

    def declared_metrics(self) -> tuple[Metric, ...]:
        """Means of groups are by class where a group has one class, or one class no group: both can be solved for."""
        groups = {group: set(members) for group, members in self.groups().items()}
        every = tuple(range(self.classes))  # what a group leaves out is in the mean over all
        alone = self.classes - len(set().union(*groups.values())) == 1 or any(len(m) == 1 for m in groups.values())
        return (
            *(
                Metric(name=n, doc=d, reveals=REVEALS.get(n, ""), mean_of_images=n in SHARES, higher_is_better=True)
                for n, d in MEANINGS.items()
            ),
            LOSS,
            *(Metric(name=f"recall_{name}", of_classes=(c,), **RECALL) for c, name in enumerate(self.names())),
            *(Metric(name=name, by_class=alone, of_classes=every, **GROUP) for name in groups),
            *(
                [Metric(name="all", doc="mean of the groups", by_class=alone, of_classes=every, higher_is_better=True)]
                if groups
                else []
            ),
        )

    def suited_to(self, data: SiteData) -> ClassificationTask:
        """Own images have neither the phantom's names of classes nor its groups."""
        drawn = data.synthetic and data.class_names is None and data.class_groups is None
        if drawn or (self.class_names is not None and self.class_groups is not None):
            return self
        own = copy.copy(self)
        if own.class_names is None:
            own.class_names = list(data.class_names or (f"class_{number}" for number in range(self.classes)))
        if own.class_groups is None:
            own.class_groups = {name: list(members) for name, members in (data.class_groups or {}).items()}
        return own

    def open_folder(self, site: str, own: ClassificationSite, datalist: Datalist) -> SiteData:
        named = datalist.class_names
        if named is not None and own.class_numbers is None and len(named) != self.classes:
            told = f"the datalist names {len(named)} classes, the job has num_classes={self.classes}"
            told = f"site '{site}': {told}; set num_classes={len(named)} of the task, or correct 'class_names' in"
            raise DataError(f"{told} '{datalist.file}'", f"{told} the datalist")
        try:
            self.check_groups(datalist.class_groups or {})
        except ValueError as error:
            raise DataError(
                f"site '{site}': {error}; correct '{datalist.file}'", f"site '{site}': 'class_groups' is not usable"
            ) from error
        with setting_of(site, "class_numbers"):
            for number in (own.class_numbers or {}).values():
                checks.number("class_numbers: class", number, low=0, high=self.classes - 1, whole=True)
        return FolderClasses(self, datalist, own.class_numbers, **own.memory())

    def open_phantom(self, site: str, own: ClassificationSite) -> SiteData:
        classes = len(phantom_of(self.phantom).class_names)
        self.check_phantom_fits(site, self.phantom, f"{classes} classes", self.classes == classes)
        index = phantom_index(site, own.phantom_site, self.phantom_sites)
        try:
            plan = self.plan(self.phantom_seed if own.phantom_seed is None else own.phantom_seed)
            return PhantomClasses(self, site, plan, index)
        except ValueError as error:  # a partition that leaves a site too few images
            raise DataError(f"site '{site}': {error}", f"site '{site}': the phantom cannot be made: {error}") from error


class FolderClasses(FolderImages):
    """Images of a site's folder with the number of their class."""

    task: ClassificationTask

    def __init__(
        self, task: ClassificationTask, datalist: Datalist, coding: Mapping[int, int] | None = None, **memory: Any
    ) -> None:
        super().__init__(task, datalist, coding, **memory)
        # All labels are looked at before the first round, not in the middle of it.
        found = {split: [self.class_of(s, split) for s in samples] for split, samples in datalist.splits.items()}
        self._counts = {split: np.bincount(numbers, minlength=task.classes) for split, numbers in found.items()}
        self._cases = {split: cases_of_classes(self.cases(split), own, task.classes) for split, own in found.items()}
        self.class_names = datalist.class_names if coding is None else None
        self.class_groups = datalist.class_groups if coding is None else None
        known = [*coding.values()] if coding else [number for numbers in found.values() for number in numbers]
        self.num_classes = len(self.class_names) if self.class_names else max(known) + 1

    def class_of(self, sample: Sample, split: str) -> int:
        """The class of a sample by the task's numbers."""
        classes = self.task.classes
        label = checks.whole(f"site '{self.site}': class of '{sample.image}'", sample.label, low=0)
        found = label if self.coding is None else self.coding.get(label, -1)
        if not 0 <= found < classes:
            hint = (
                f"the task has the classes 0 to {classes - 1}"
                if self.coding is None
                else f"'class_numbers' in the site's fairflare.json knows {sorted(self.coding)}"
            )
            raise DataError(
                f"site '{self.site}': image '{sample.image}' of split '{split}' has the label {label}; {hint}. Correct "
                "the datalist, num_classes of the task, or 'class_numbers' of the site",
                f"site '{self.site}': a label of split '{split}' is no class of the task (num_classes={classes})",
            )
        return found

    def target_bytes(self) -> int:
        return 8

    def transform(self, split: str) -> Compose:
        from fairflare.tasks.transforms import Read, with_classes

        read = Read(self.site, split, self.max_image_bytes, self.class_of, self.reading)
        return with_classes(read, self.task.in_channels, self.task.image_size, self.task.resize)

    def class_counts(self, split: str) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._counts[self.check_split(split)])

    def class_cases(self, split: str) -> torch.Tensor:
        import torch

        return torch.tensor(self._cases[self.check_split(split)])


class PhantomClasses(PhantomImages):
    """The synthetic images of one site; a split is drawn when it is first asked for."""

    task: ClassificationTask

    def __init__(self, task: ClassificationTask, site: str, plan: PhantomPlan, index: int) -> None:
        from fairflare.data.phantoms import class_site

        super().__init__(task, site)
        self._drawn = class_site(plan, index)
        self._arrays: dict[str, Batch] = {}
        self.test_splits = tuple(sorted(split for split in self._drawn.labels if split.startswith("test")))
        self.attributes = {TONE: (*plan.kind.attributes, UNKNOWN)} if plan.attributes else {}
        sizes = {split: len(labels) for split, labels in self._drawn.labels.items()}
        wrong = f"; {plan.label_noise:.0%} of the training labels are wrong" if plan.has_label_noise(index) else ""
        self.describe(f"{phantom_of(plan.phantom).title} (site {index + 1} of {plan.num_sites}{wrong})", sizes)

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return self._drawn.attributes[self.check_split(split)].tolist()

    def num_samples(self, split: str) -> int:
        return len(self._drawn.labels[self.check_split(split)])

    def class_counts(self, split: str) -> torch.Tensor:
        import torch

        labels = self._drawn.labels[self.check_split(split)]
        return torch.from_numpy(np.bincount(labels, minlength=self.task.classes))

    def arrays(self, split: str) -> Batch:
        import torch

        if split not in self._arrays:
            labels = torch.from_numpy(np.array(self._drawn.labels[split], np.int64))
            self._arrays[split] = self._pictures(split), labels
        return self._arrays[split]

    def _pictures(self, split: str) -> torch.Tensor:
        """(n, channels, height, width) uint8."""
        import torch

        from fairflare.tasks.placing import smooth
        from fairflare.tasks.transforms import luminance

        pictures = torch.tensor(self._drawn.images[split]).permute(0, 3, 1, 2)
        if self.task.in_channels == 1:
            pictures = luminance(pictures).round().to(torch.uint8)
        return smooth(pictures.float(), self.task.image_size).round().clamp(0, 255).to(torch.uint8)


def phantom_of(name: str) -> ClassPhantom:
    """The phantom of this name."""
    from fairflare.data.phantoms import PHANTOMS

    return PHANTOMS[name]


def phantom_index(site: str, chosen: Any, num_sites: int) -> int:
    """Which of the synthetic sites a site is, from 0: its setting, or the number at the end of its name.

    Raises:
        DataError: no number, or out of range.
    """
    number = chosen
    if number is None:
        digits = site[len(site.rstrip("0123456789")) :]
        number = int(digits) if digits else None
    if number is None or isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= num_sites:
        raise setting_error(
            site,
            "phantom_site",
            f"phantom_site must be one of the phantom's {num_sites} sites (phantom_sites), from 1; got {number!r}. "
            f"Set it, name the site site-1 to site-{num_sites}, raise phantom_sites, or set 'data_root' to own images",
        )
    return number - 1
