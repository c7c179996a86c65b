"""Provide the base classes of classification, of images and of volumes: network, names of classes, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from fairflare.base import checks
from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.cases.floor import cases_of_classes
from fairflare.base.cases.sampling import SHARES
from fairflare.base.settings import Flag, NonNegativeInt, Positive, PositiveInt, settings
from fairflare.base.site_data import UNLABELLED
from fairflare.data.datalist import DataError, Datalist, Sample
from fairflare.tasks.base import LOSS, Metric, SiteData
from fairflare.tasks.images import Coding, FolderImages, Momentum, one_for_each_class, replace_attributes
from fairflare.tasks.scores.class_scores import OUTSIDE, MeasuresClasses
from fairflare.tasks.scores.finding_scores import cases_of_findings, declare_findings, find_known
from fairflare.tasks.scores.metrics import MEANINGS
from fairflare.tasks.shared.site_settings import SiteSettings, setting_of

if TYPE_CHECKING:
    import torch

    from fairflare.base.task import PriorNetwork
    from fairflare.tasks.networks import Classifier


@settings
class ClassSite(SiteSettings):
    """Define the settings that a classification task reads from a site's private file.

    Args:
        class_numbers: ``{own number: class}``; default: the task's numbers.
        classes: numbers of the task's classes that the site's data can have, such as ``[0, 1]``, or of the findings
            that were looked for; ``"all"``: a class without a label did not occur. Default: not known, and the site is
            asked where only others have a class.
    """

    class_numbers: Coding | None = None
    classes: Literal["all"] | Annotated[list[NonNegativeInt], Field(min_length=1)] | None = None


@settings
class ClassTask(MeasuresClasses):
    """Define the base class of classification tasks: an image belongs to one of several classes, or has findings.

    Args:
        network: name of a network; each task documents them.
        patch_size: side of the patches of a vision transformer; each side of the network's input is a multiple of it.
        features: widths of the four stages of the ResNet; 64, 128, 256, 512 is the published one.
        max_pool: the ResNet's pooling behind its first convolution (published: yes; images of 48x48 do without).
        findings: names of findings, of which an image may have several or none, each with a probability of its own;
            labels may leave some out. Default: an image belongs to exactly one class.
        num_classes: number of classes. Default: the phantom's.
        class_names: names of the classes for the metrics ``recall_<name>``. Default: the phantom's; of own images
            those of the datalist, or ``class_0``, ...
        class_groups: ``{"head": [0, 1], ...}``: their mean recalls are reported too. Default: the phantom's; of own
            images those of the datalist.
        norm_momentum: share of a new batch in the running statistics of the batch norms (PyTorch: 0.1).
        initial_weights: checkpoint of the encoder (a plain state dict, torchvision's or MONAI's names, ``.pt``,
            ``.pth`` or ``.safetensors``) that the server starts from, unless its own private file names another; a
            classifier head of another shape is left out.
        projector_dim: output width of a projection head next to the classifier (Fed-MAS); ``None`` for none.
        neck_dim: output width of a projection head between encoder and classifier (MOON; its authors: 256); ``None``:
            none.
        classifier: ``"linear"``, or ``"cosine"``: ``cosine_scale`` times the cosine of features and class vector
            (LDAM).
        cosine_scale: scale of the cosine classifier.
        retrained_head: a second classifier beside it, trained by the server and used in evaluation (CReFF).
        allow_phantom: a site whose file names no data, for itself or for others, trains on synthetic data; False: it is
            refused unless its own file says ``"phantom": true``.
        phantom_seed: seed of the synthetic data.
    """

    primary_metric: ClassVar[str] = "balanced_accuracy"
    site_settings: ClassVar[type[SiteSettings]] = ClassSite
    class_labels: ClassVar[bool] = True
    has_classes: ClassVar[bool | None] = True
    consistency: ClassVar[str] = "fixmatch"
    drawn_classes: ClassVar[tuple[str, ...]] = ()  # names of the classes of the synthetic data
    drawn_groups: ClassVar[Mapping[str, Sequence[int]]] = {}  # class numbers of each group, synthetic data
    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "patch_size": only_with("network", "vit_mini", "vit_s", "vit_b", "vit_l"),
        "features": only_with("network", "resnet18"),
        "max_pool": only_with("network", "resnet18"),
        "cosine_scale": only_with("classifier", "cosine"),
        "augmentation": only_with("augment"),
    }

    network: Literal["resnet18", "densenet121", "vit_mini", "vit_s", "vit_b", "vit_l"] = "resnet18"
    patch_size: PositiveInt = 16
    features: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (16, 32, 64, 128)
    max_pool: Flag = False
    findings: Annotated[list[str], Field(min_length=1)] | None = None
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
    allow_phantom: Flag = True
    phantom_seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.refuse({
            "findings name themselves and have no groups; take num_classes, class_names and class_groups out":
                self.findings is not None
                and (self.num_classes, self.class_names, self.class_groups) != (None, None, None),
            "retrained_head needs classifier='linear'": self.retrained_head and self.classifier != "linear",
        })  # fmt: skip
        for name, given in (("findings", self.findings), ("class_names", self.class_names)):
            one_for_each_class(name, given, self.classes, different=True)
        if self.findings is not None:
            vars(self).update(has_classes=False, primary_metric="auc")
        self.check_groups(self.class_groups or {})

    def check_sides(self, name: str, sides: Sequence[int]) -> None:
        """Raise ``ValueError`` for a side of the inputs (``name``: their setting) that the network cannot take."""
        pools = self.max_pool and self.network == "resnet18"
        least = 64 if self.network == "densenet121" else 33 if pools else 32
        for side in sides:
            checks.whole(f"{name} for {self.network}{' with max_pool' * pools}", side, low=least)
            if self.network.startswith("vit") and side % self.patch_size:
                raise ValueError(f"{name} must be multiples of patch_size={self.patch_size}, got {tuple(sides)}")

    def check_groups(self, groups: Mapping[str, Sequence[int]]) -> None:
        """Raise ``ValueError`` for a group of classes with a metric's name, or with a class that the task lacks."""
        for group, members in groups.items():
            if group in (*MEANINGS, "all", "loss") or group.startswith("recall_"):
                raise ValueError(f"class_groups: '{group}' is the name of a metric; choose another")
            for member in members:
                checks.number(f"class_groups: class of {group!r}", member, low=0, high=self.classes - 1, whole=True)

    @property
    def classes(self) -> int:
        """Return the number of classes, or of findings."""
        if self.findings is not None:
            return len(self.findings)
        return self.num_classes if self.num_classes is not None else len(self.drawn_classes)

    def names(self) -> list[str]:
        """Return the names of the classes, or of the findings."""
        if given := self.findings or self.class_names:
            return given
        drawn = self.drawn_classes
        return list(drawn) if self.classes == len(drawn) else [f"class_{c}" for c in range(self.classes)]

    def groups(self) -> dict[str, list[int]]:
        """Return the groups of classes, such as head, medium, tail."""
        if self.class_groups is not None:
            return self.class_groups
        as_drawn = self.findings is None and self.classes == len(self.drawn_classes)
        return {name: list(members) for name, members in self.drawn_groups.items()} if as_drawn else {}

    def build_model(self) -> Classifier:
        from fairflare.tasks.networks import build_classifier

        return build_classifier(
            self.network, in_channels=self.in_channels, classes=self.classes, features=self.features,
            norm_momentum=self.norm_momentum, image_size=self.image_size, patch_size=self.patch_size,
            max_pool=self.max_pool, projector_dim=self.projector_dim, neck_dim=self.neck_dim,
            cosine_scale=self.cosine_scale if self.classifier == "cosine" else None, retrained_head=self.retrained_head,
        )  # fmt: skip

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
        """Load a frozen prior network by :func:`fairflare.tasks.priors.load_prior`."""
        from fairflare.tasks.priors import load_prior

        return load_prior(network, checkpoint, image_size)

    def declared_metrics(self) -> tuple[Metric, ...]:
        """Declare the metrics over all classes, of each class and of each group of classes, and the loss.

        Means of groups are declared as by class if a group has one class, or if exactly one class has no group: the
        recall of this single class could then be computed from the means.
        """
        if self.findings is not None:
            return declare_findings(self.findings)
        groups = {group: set(members) for group, members in self.groups().items()}
        every = tuple(range(self.classes))  # the mean over all classes also reveals classes outside a group
        alone = self.classes - len(set().union(*groups.values())) == 1 or any(len(m) == 1 for m in groups.values())
        return (
            *(
                Metric(name=name, doc=doc, reveals=reveals, mean_of_images=name in SHARES, higher_is_better=True)
                for name, (doc, reveals) in MEANINGS.items()
            ),
            LOSS,
            Metric(
                name=OUTSIDE,
                doc="where `classes` leaves some out: share of images that the model says are of those",
                higher_is_better=False,
                mean_of_images=True,
            ),
            *(
                Metric(
                    name=f"recall_{name}", doc="share of the images of this class that were told", by_class=True,
                    reveals="there or not: whether the site has images of the class", of_classes=(number,),
                    higher_is_better=True, family="recall_<class>",
                ) for number, name in enumerate(self.names())
            ),
            *(
                Metric(
                    name=name, doc="mean recall of a group's classes that occur (head, medium, tail)", by_class=alone,
                    reveals="whether the site has any class of the group, and the recall of a class that is there "
                    "alone", of_classes=every, higher_is_better=True, family="<group>",
                ) for name in groups
            ),
            *(
                [Metric(name="all", doc="mean of the groups", by_class=alone, of_classes=every, higher_is_better=True)]
                if groups
                else []
            ),
        )  # fmt: skip

    def suited_to(self, data: SiteData) -> ClassTask:
        """Return the task with the class names and class groups of a site's images, if the job does not set them.

        The task's defaults are names and groups of the phantom's classes. For other images they come from the datalist.
        If the datalist has no names, the classes are called ``class_0``, ``class_1`` and so on; if it has no groups,
        the task has none.
        """
        drawn = data.synthetic and data.class_names is None and data.class_groups is None
        if drawn or self.findings is not None or (self.class_names is not None and self.class_groups is not None):
            return self.annotating(data.annotated)
        names = list(data.class_names or (f"class_{number}" for number in range(self.classes)))
        groups = {name: list(members) for name, members in (data.class_groups or {}).items()}
        return replace_attributes(
            self.annotating(data.annotated),
            class_names=names if self.class_names is None else self.class_names,
            class_groups=groups if self.class_groups is None else self.class_groups,
        )

    def check_classes(self, site: str, settings: ClassSite, datalist: Datalist) -> None:
        """Raise an error if the classes of a site do not fit the task.

        Raises:
            DataError: the datalist's class names or groups, or the site's ``class_numbers``, do not fit.
        """
        named = datalist.class_names
        if self.findings is not None:
            strange, file = sorted({*(named or ())}.difference(self.findings)), f"'{datalist.file}'"
            findings = f"site '{site}': the task has the findings {', '.join(self.findings)}"
            checks.refuse({
                f"{file} has no 'class_names'; it must name the finding of each place in its labels": named is None,
                f"not among them: {', '.join(strange)} of {file}. Name all in findings of the task, or correct the "
                "datalist": strange != [],
                "findings have names and no numbers; take 'class_numbers' out of the site's fairflare.json":
                    settings.class_numbers is not None,
            }, lambda problem: DataError(
                f"{findings}; {problem}", f"{findings}, and its datalist or its file has others"
            ))  # fmt: skip
            return
        with setting_of(site, "classes"):
            checks.whole(
                "the number of classes", 2 if settings.classes in (None, "all") else len(settings.classes), low=2
            )
        if named is not None and settings.class_numbers is None and len(named) != self.classes:
            problem = (
                f"site '{site}': the datalist names {len(named)} classes, the job has num_classes={self.classes}; set "
                f"num_classes={len(named)} of the task, or correct 'class_names' in"
            )
            raise DataError(f"{problem} '{datalist.file}'", f"{problem} the datalist")
        try:
            # Groups in a site's own numbers are not used (LabelledImages), so they need not fit the task's groups.
            self.check_groups((settings.class_numbers is None and datalist.class_groups) or {})
        except ValueError as error:
            raise DataError(
                f"site '{site}': {error}; correct '{datalist.file}'", f"site '{site}': 'class_groups' is not usable"
            ) from error
        with setting_of(site, "class_numbers"):
            for number in (settings.class_numbers or {}).values():
                checks.number("class_numbers: class", number, low=0, high=self.classes - 1, whole=True)


class LabelledImages(FolderImages):
    """Read the images of a site's folder, each with the number of its class."""

    task: ClassTask

    def __init__(
        self, task: ClassTask, datalist: Datalist, coding: Mapping[int, int] | None = None, **memory: Any
    ) -> None:
        super().__init__(task, datalist, coding, **memory)
        self._count()

    def _count(self) -> None:
        """Count the cases of each class or finding in each list."""
        task, datalist, coding = self.task, self.datalist, self.coding
        # All labels are read here, so that a wrong label is found before the first round, not during it.
        labels: Any = {
            split: [self.class_of(sample, split) for sample in samples]
            for split, samples in datalist.splits.items()
            if split != UNLABELLED
        }
        if task.findings is not None:
            tables = {split: np.reshape(rows, (len(rows), task.classes)) for split, rows in labels.items()}
            self._cases = {split: cases_of_findings(self.cases(split), rows) for split, rows in tables.items()}
            self.known = find_known(tables.values())
            self.class_names, self.num_classes = tuple(task.findings), task.classes
            return
        self._counts = {split: np.bincount(numbers, minlength=task.classes) for split, numbers in labels.items()}
        self._cases = {
            split: cases_of_classes(self.cases(split), labels_of_split, task.classes)
            for split, labels_of_split in labels.items()
        }
        self.class_names = datalist.class_names if coding is None else None
        self.class_groups = datalist.class_groups if coding is None else None
        known = [*coding.values()] if coding else [number for numbers in labels.values() for number in numbers]
        self.num_classes = len(self.class_names) if self.class_names else max(known, default=task.classes - 1) + 1

    def class_of(self, sample: Sample, split: str) -> int | tuple[int, ...]:
        """Return the class of a sample, in the task's numbers, or 1, 0 or -1 (not known) for each of its findings."""
        classes = self.task.classes
        if isinstance(sample.label, tuple) or self.task.findings is not None:
            return self._findings_of(sample, split)
        label = checks.whole(f"site '{self.site}': class of '{sample.image}'", sample.label, low=0)
        number = label if self.coding is None else self.coding.get(label, -1)
        if number not in (self.task.annotated or (number,)):
            raise DataError(
                f"site '{self.site}': image '{sample.image}' of split '{split}' has the label {label}, which 'classes' "
                "in the site's fairflare.json does not have; add the class there, or correct the label",
                f"site '{self.site}': a label of split '{split}' is one that 'classes' in the site file lacks",
            )
        if not 0 <= number < classes:
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
        return number

    def _findings_of(self, sample: Sample, split: str) -> tuple[int, ...]:
        label, names, wanted = sample.label, self.datalist.class_names or (), self.task.findings or ()
        named = dict(zip(names, label, strict=False)) if isinstance(label, tuple) else {}
        values = [named.get(name, -1) for name in wanted]
        silent = {*range(len(wanted))}.difference(self.task.annotated or range(len(wanted)))
        odd = [wanted[k] for k in silent if values[k] == 1]
        findings = [-1 if k in silent else value for k, value in enumerate(values)]
        checks.refuse({
            "has a label for each of several findings, and the task has none; set findings of the task": not wanted,
            f"must have a label with 1, 0 or null for each of the {len(names)} findings, got {label!r:.80}": not named,
            f"has {', '.join(odd)}, which 'classes' in the site's fairflare.json leaves out; add it there": odd != [],
            "has no known finding; take it out of the datalist": max(findings, default=-1) < 0,
        }, lambda problem: DataError(
            f"site '{self.site}': image '{sample.image}' of split '{split}' {problem}",
            f"site '{self.site}': an image of split '{split}' has no label that fits the task's findings",
        ))  # fmt: skip
        return tuple(findings)

    def enough(self, least: int) -> SiteData:
        few = {split: {k for k, n in enumerate(cases) if n < least} for split, cases in self._cases.items()}
        shown: Any = super().enough(least)
        if least > 1 and any(few.values()):
            shown._marks, shown._identities = {}, {}
            splits = dict(self.datalist.splits)
            for split, out in few.items():
                left = filter(None, (self._drop_labels(sample, split, out) for sample in splits[split]))
                splits[split] = tuple(left) or splits[split]
            shown.datalist = replace(self.datalist, splits=splits)
            shown._count()
        return cast("SiteData", shown)

    def _drop_labels(self, sample: Sample, split: str, out: set[int]) -> Sample | None:
        """Return a sample without labels of some classes or findings, or ``None`` if it has no other label."""
        label, names = sample.label, self.datalist.class_names or ()
        if not isinstance(label, tuple):
            return None if self.class_of(sample, split) in out else sample
        gone = {name for k, name in enumerate(self.task.findings or ()) if k in out}
        label = tuple(-1 if name in gone else value for name, value in zip(names, label, strict=True))
        return replace(sample, label=label) if max(label) >= 0 else None

    def list_labels(self, sample: Sample, split: str) -> list[int]:
        label = self.class_of(sample, split)
        return [k for k, value in enumerate(label) if value == 1] if isinstance(label, tuple) else [label]

    def class_counts(self, split: str) -> torch.Tensor | None:
        import torch

        return None if self.task.findings else torch.from_numpy(self._counts[self.check_split(split)])

    def class_cases(self, split: str) -> torch.Tensor:
        import torch

        return torch.tensor(self._cases[self.check_split(split)])
