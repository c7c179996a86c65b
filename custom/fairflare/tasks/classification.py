"""Classification of 2D images: MONAI's ResNet-18 or DenseNet121, cross-entropy; own images or a phantom."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fairflare.data.datalist import DataError, Datalist, Sample, suggest
from fairflare.data.phantoms import PHANTOMS, PhantomPlan
from fairflare.tasks.base import SiteData, Task, evaluating
from fairflare.tasks.images import (
    CACHE_BYTES,
    LUMINANCE,
    FolderImages,
    ImageData,
    cache_bytes,
    check_augmentation,
    check_settings,
    refuse_half_settings,
    sample_image,
    setting_error,
    site_datalist,
    whole_numbers,
)
from fairflare.tasks.metrics import NAMES

if TYPE_CHECKING:
    import torch

    from fairflare.tasks.networks import Classifier

NETWORKS = ("resnet18", "densenet121")
PLAN_NAMES = {  # arguments of the plan as the task calls them
    "seed": "phantom_seed", "num_sites": "phantom_sites", "num_samples": "phantom_samples", "num_test": "phantom_test"
}  # fmt: skip
SITE_KEYS = ("phantom_seed", "phantom_site", "class_numbers")


class ClassificationTask(Task):
    """Tell the class of 2D images.

    The defaults are a narrow ResNet-18 on 48x48 images, quick enough for a laptop. The setting of the FedISM paper is
    ``image_size=(224, 224), features=(64, 128, 256, 512), max_pool=True, initial_weights=<ImageNet checkpoint>``,
    that of FedMRL ``network="densenet121"`` with 224x224.

    Args:
        network: ``"resnet18"`` or ``"densenet121"`` (MONAI's).
        features: widths of the four stages of the ResNet; 64, 128, 256, 512 is the published one. For
            ``"densenet121"``: ignored.
        max_pool: the ResNet's pooling behind its first convolution (published: yes; images of 48x48 do without).
        image_size: height and width that images are resized to, at least 32; 33 with ``max_pool``, 64 for
            ``"densenet121"``, which would otherwise end in one pixel, and a last batch of one image could not train.
        in_channels: 1 (colour images become luminance) or 3 (grey images are repeated).
        num_classes: default: the phantom's.
        class_names: for ``recall_<name>``. Default: the phantom's, or ``class_0``, ...
        class_groups: ``{"head": [0, 1], ...}``: their mean recalls are reported too. Default: the phantom's.
        norm_momentum: share of a new batch in the running statistics of the batch norms (PyTorch: 0.1).
        initial_weights: checkpoint of the encoder (a plain state dict, torchvision's or MONAI's names, ``.pt``,
            ``.pth`` or ``.safetensors``) that the server starts from, unless its own private file names another; a
            classifier head of another shape is left out.
        projector_dim: output width of a projection head next to the classifier (Fed-MAS); ``None``: none.
        augmentation: ``"flip"``, ``"affine"``, ``"intensity"``: which random changes ``augment=True`` makes.
        phantom: synthetic data, used where a site has none of its own: ``"dermoscopy"``, ``"dermoscopy7"``,
            ``"fundus"`` or ``"endoscopy"``.
        phantom_seed, phantom_sites, phantom_samples, phantom_test: seed, number of sites, training and validation
            images of all sites together, images of the common test set.
        partition: ``"iid"``, ``"dirichlet"``, ``"two_pool"`` or ``"shards"``; see :mod:`fairflare.data.partitions`.
        alpha, eta, shard_mode: of the Dirichlet and shard partitions.
        corrupted_sites: so many last sites have images of lower quality.
        corruption: ``"gaussian_noise"`` or ``"motion_blur"``.
        severity: 1 to 5.
        attributes: split the phantom's test set by its attribute (skin tone) as well.
    """

    primary_metric: ClassVar[str] = "balanced_accuracy"
    shown_metrics: ClassVar[tuple[str, ...]] = (
        "balanced_accuracy", "accuracy", "auc_ovo", "f1_macro", "head", "medium", "tail", "all",
        "clean/balanced_accuracy", "corrupted/balanced_accuracy", "light/balanced_accuracy", "dark/balanced_accuracy",
    )  # fmt: skip

    def __init__(
        self,
        network: str = "resnet18",
        features: Sequence[int] = (16, 32, 64, 128),
        max_pool: bool = False,
        image_size: Sequence[int] = (48, 48),
        in_channels: int = 3,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        class_groups: Mapping[str, Sequence[int]] | None = None,
        norm_momentum: float = 0.1,
        initial_weights: str | None = None,
        projector_dim: int | None = None,
        augmentation: Sequence[str] = ("flip", "affine"),
        phantom: str = "dermoscopy",
        phantom_seed: int = 0,
        phantom_sites: int = 5,
        phantom_samples: int = 2000,
        phantom_test: int = 400,
        partition: str = "two_pool",
        alpha: float = 1.0,
        eta: float = 1.0,
        shard_mode: str = "literal",
        corrupted_sites: int = 1,
        corruption: str = "gaussian_noise",
        severity: int = 3,
        attributes: bool = False,
    ) -> None:
        if network not in NETWORKS:
            raise ValueError(f"network must be one of {NETWORKS}, got {network!r}")
        self.network = network
        self.features = whole_numbers("features", features, 4)
        self.max_pool = bool(max_pool)
        self.image_size = whole_numbers("image_size", image_size, 2)
        least = 64 if network == "densenet121" else 33 if self.max_pool else 32
        if min(self.image_size) < least:
            more = " with max_pool" if least == 33 else ""
            raise ValueError(f"image_size must be at least {least} x {least} for {network}{more}, got {image_size!r}")
        if in_channels not in (1, 3):
            raise ValueError(f"in_channels must be 1 or 3, got {in_channels!r}")
        self.in_channels = in_channels
        if phantom not in PHANTOMS:
            raise ValueError(f"phantom: unknown '{phantom}'{suggest(phantom, tuple(PHANTOMS))}")
        self.phantom = phantom
        if num_classes is not None and (
            isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2
        ):
            raise ValueError(f"num_classes must be a whole number >= 2, got {num_classes!r}")
        self.num_classes = num_classes
        self.class_names = None if class_names is None else [str(name) for name in class_names]
        if self.class_names is not None and not len(set(self.class_names)) == len(self.class_names) == self.classes:
            raise ValueError(f"class_names must be {self.classes} different names, got {class_names!r}")
        self.class_groups = None if class_groups is None else {k: list(v) for k, v in class_groups.items()}
        for group, members in (self.class_groups or {}).items():
            if group in (*NAMES, "all", "loss") or group.startswith("recall_"):
                raise ValueError(f"class_groups: '{group}' is the name of a metric; choose another")
            wrong = [c for c in members if isinstance(c, bool) or not isinstance(c, int) or not 0 <= c < self.classes]
            if wrong or not members:
                raise ValueError(f"class_groups: '{group}' must list classes in [0, {self.classes - 1}], got {members}")
        if isinstance(norm_momentum, bool) or not 0 < norm_momentum <= 1:
            raise ValueError(f"norm_momentum must be in (0, 1], got {norm_momentum!r}")
        self.norm_momentum = norm_momentum
        self.initial_weights = initial_weights
        if projector_dim is not None and (
            isinstance(projector_dim, bool) or not isinstance(projector_dim, int) or projector_dim < 1
        ):
            raise ValueError(f"projector_dim must be a whole number >= 1, got {projector_dim!r}")
        self.projector_dim = projector_dim
        self.augmentation = check_augmentation(augmentation)
        self.phantom_seed = phantom_seed
        self.phantom_sites = phantom_sites
        self.phantom_samples = phantom_samples
        self.phantom_test = phantom_test
        self.partition = partition
        self.alpha = alpha
        self.eta = eta
        self.shard_mode = shard_mode
        self.corrupted_sites = corrupted_sites
        self.corruption = corruption
        self.severity = severity
        self.attributes = attributes
        self.plan(phantom_seed)  # refuses what does not fit together

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.num_classes if self.num_classes is not None else len(PHANTOMS[self.phantom].class_names)

    def names(self) -> list[str]:
        """Names of the classes."""
        if self.class_names is not None:
            return self.class_names
        own = PHANTOMS[self.phantom].class_names
        return list(own) if self.classes == len(own) else [f"class_{c}" for c in range(self.classes)]

    def groups(self) -> dict[str, list[int]]:
        """Groups of classes, such as head, medium, tail."""
        if self.class_groups is not None:
            return self.class_groups
        own = PHANTOMS[self.phantom]
        return {k: list(v) for k, v in own.groups.items()} if self.classes == len(own.class_names) else {}

    def plan(self, seed: int) -> PhantomPlan:
        """The synthetic federation that these settings describe."""
        try:
            return self._plan(seed)
        except ValueError as error:  # in the words of the task's arguments
            text = re.sub(r"\b(seed|num_sites|num_samples|num_test)\b", lambda m: PLAN_NAMES[m[0]], str(error))
            raise ValueError(text) from error

    def _plan(self, seed: int) -> PhantomPlan:
        return PhantomPlan(
            phantom=self.phantom,
            seed=seed,
            image_size=max(self.image_size),
            num_sites=self.phantom_sites,
            num_samples=self.phantom_samples,
            num_test=self.phantom_test,
            partition=self.partition,
            alpha=self.alpha,
            eta=self.eta,
            shard_mode=self.shard_mode,
            corrupted_sites=self.corrupted_sites,
            corruption=self.corruption,
            severity=self.severity,
            attributes=self.attributes,
        )

    def build_model(self) -> Classifier:
        from fairflare.tasks.networks import build_classifier

        return build_classifier(
            self.network,
            in_channels=self.in_channels,
            classes=self.classes,
            features=self.features,
            norm_momentum=self.norm_momentum,
            max_pool=self.max_pool,
            projector_dim=self.projector_dim,
        )

    def initialise(self, model: torch.nn.Module, checkpoint: str | None = None) -> str:
        from fairflare.tasks.networks import Classifier, load_encoder

        path = checkpoint if checkpoint is not None else self.initial_weights
        if path is None:
            return super().initialise(model)
        if not isinstance(model, Classifier):
            raise ValueError(f"initial_weights needs a Classifier, build_model gave {type(model).__name__}")
        return load_encoder(model, Path(path))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets)

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets, reduction="none")

    def evaluate(
        self,
        model: torch.nn.Module,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device | str,
    ) -> dict[str, float]:
        """Metrics of :func:`fairflare.tasks.metrics.classification_metrics`, and ``loss`` (cross-entropy)."""
        import torch

        from fairflare.tasks.metrics import classification_metrics

        outputs, targets = [], []
        with evaluating(model):
            for inputs, labels in batches:
                outputs.append(model(inputs.to(device)).to("cpu", torch.float64))
                targets.append(labels)
        if not outputs:
            raise ValueError("evaluate needs at least one batch")
        logits, labels = torch.cat(outputs), torch.cat(targets)
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model's outputs are not finite; lower learning_rate or set max_grad_norm")
        metrics = classification_metrics(
            labels.numpy(), torch.softmax(logits, 1).numpy(), class_names=self.names(), groups=self.groups()
        )
        return {**metrics, "loss": float(self.loss(logits, labels))}

    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        """The site's own images, or the phantom when its settings have no ``data_root``.

        Args:
            site: name of the site.
            settings: the site's private file: ``data_root``, ``datalist`` (default ``datalist.json``),
                ``class_numbers`` (``{"own number": class}``), ``cache_bytes``; ``phantom_seed``, ``phantom_site``
                (which of the synthetic sites this one is, from 1; default: the number at the end of its name).
        """
        check_settings(site, settings, SITE_KEYS)
        if settings.get("data_root") is not None:
            datalist = site_datalist(site, settings, class_labels=True)
            numbers = _class_numbers(site, settings.get("class_numbers"), self.classes)
            return FolderClasses(self, datalist, numbers, cache_bytes(site, settings))
        refuse_half_settings(site, settings)
        own = PHANTOMS[self.phantom]
        if self.classes != len(own.class_names):
            raise DataError(
                f"site '{site}': no 'data_root' in the site's fairflare.json, and the synthetic {self.phantom} has "
                f"{len(own.class_names)} classes where the task has num_classes={self.classes}; set 'data_root'",
                f"site '{site}': no data folder is set, and the synthetic data do not fit the task",
            )
        index = phantom_index(site, settings.get("phantom_site"), self.phantom_sites)
        try:
            plan = self.plan(settings.get("phantom_seed", self.phantom_seed))
        except ValueError as error:
            raise setting_error(site, "phantom_seed", str(error)) from error
        try:
            return PhantomClasses(self, site, plan, index)
        except ValueError as error:  # a partition that leaves a site too few images
            raise DataError(f"site '{site}': {error}", f"site '{site}': the phantom cannot be made: {error}") from error


class FolderClasses(FolderImages):
    """Images of a site's folder with the number of their class."""

    def __init__(
        self,
        task: ClassificationTask,
        datalist: Datalist,
        class_numbers: Mapping[int, int] | None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(task, datalist, cache_bytes)
        self.classes = task.classes
        self.class_numbers = class_numbers
        # All labels are looked at before the first round, not in the middle of it.
        found = {split: [self._class(s, split) for s in samples] for split, samples in datalist.splits.items()}
        self._counts = {split: np.bincount(numbers, minlength=self.classes) for split, numbers in found.items()}

    def _class(self, sample: Sample, split: str) -> int:
        label = sample.label
        if not isinstance(label, int):
            raise ValueError(f"site '{self.site}': '{sample.image}' has a mask, a class is needed")
        found = label if self.class_numbers is None else self.class_numbers.get(label, -1)
        if not 0 <= found < self.classes:
            hint = (
                f"the task has the classes 0 to {self.classes - 1}"
                if self.class_numbers is None
                else f"'class_numbers' in the site's fairflare.json knows {sorted(self.class_numbers)}"
            )
            raise DataError(
                f"site '{self.site}': image '{sample.image}' of split '{split}' has the label {label}; {hint}. Correct "
                "the datalist, num_classes of the task, or 'class_numbers' of the site",
                f"site '{self.site}': a label of split '{split}' is no class of the task",
            )
        return found

    def prepare(self, sample: Sample, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        picture = sample_image(sample, self.task, self.site, split)
        return picture, torch.tensor(self._class(sample, split))

    def class_counts(self, split: str) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._counts[self.check_split(split)])


class PhantomClasses(ImageData):
    """The synthetic images of one site; a split is drawn when it is first asked for."""

    synthetic = True

    def __init__(self, task: ClassificationTask, site: str, plan: PhantomPlan, index: int) -> None:
        from fairflare.data.phantoms import class_site as phantom_site

        super().__init__(task, site)
        self.classes = task.classes
        self._drawn = phantom_site(plan, index)
        self._pictures: dict[str, torch.Tensor] = {}
        self.test_splits = tuple(sorted(split for split in self._drawn.labels if split.startswith("test")))
        sizes = ", ".join(f"{len(labels)} {split}" for split, labels in self._drawn.labels.items())
        title = PHANTOMS[plan.phantom].title
        self.description = f"SYNTHETIC {title}, not patient data: {sizes}"

    def num_samples(self, split: str) -> int:
        return len(self._drawn.labels[self.check_split(split)])

    def class_counts(self, split: str) -> torch.Tensor:
        import torch

        labels = self._drawn.labels[self.check_split(split)]
        return torch.from_numpy(np.bincount(labels, minlength=self.classes))

    def read(self, split: str, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        pictures = self._pictures.get(split)
        if pictures is None:
            pictures = self._pictures[split] = self._picture(split)
        chosen = list(indices)
        labels = torch.from_numpy(np.asarray(self._drawn.labels[split], np.int64)[chosen])
        return pictures[chosen].float().div_(255), labels

    def _picture(self, split: str) -> torch.Tensor:
        """(n, channels, height, width) uint8."""
        import torch
        from torch.nn.functional import interpolate

        pictures = torch.tensor(self._drawn.images[split]).permute(0, 3, 1, 2)
        if self.task.in_channels == 1:
            grey = torch.einsum("nchw,c->nhw", pictures.float(), torch.tensor(LUMINANCE))
            pictures = grey[:, None].round().to(torch.uint8)
        if len(pictures) and tuple(pictures.shape[2:]) != tuple(self.task.image_size):
            shrunk = interpolate(pictures.float(), self.task.image_size, mode="bilinear", antialias=True)
            pictures = shrunk.round().clamp(0, 255).to(torch.uint8)
        return pictures.contiguous()


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


def _class_numbers(site: str, value: Any, classes: int) -> dict[int, int] | None:
    if value is None:
        return None
    try:
        numbers = {int(own): number for own, number in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise setting_error(
            site, "class_numbers", f'class_numbers must be like {{"1": 0, "2": 1}}, got {value!r}'
        ) from error
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < classes for n in numbers.values()):
        raise setting_error(site, "class_numbers", f"class_numbers must name classes 0 to {classes - 1}, got {value!r}")
    return numbers
