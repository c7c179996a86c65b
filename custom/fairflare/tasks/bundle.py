"""Use a MONAI bundle as the task: network, loss, optimizer, transforms, inference and metric are the bundle's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
import yaml
from pydantic import Field

from fairflare.base import checks
from fairflare.base.disk.bundle_files import BUNDLE_FOLDER, BundleError, bundle_checksum, copy_bundle, group_digits
from fairflare.base.disk.temporary import OwnedFolder
from fairflare.base.settings import Text, settings
from fairflare.base.stopping import check_stop
from fairflare.data.datalist import DataError, load_datalist, shareable
from fairflare.tasks.base import Metric, SiteData, Task, evaluating
from fairflare.tasks.bundles.bundle_config import Bundle, read_files, telling
from fairflare.tasks.bundles.bundle_parts import BundleParts
from fairflare.tasks.bundles.sealed import allowed_classes, shipped_classes
from fairflare.tasks.shared.site_settings import FolderSettings, read_settings, setting_error, setting_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from fairflare.base.task import Batch, Device
    from fairflare.tasks.bundles.bundle_metric import KeyMetric

LOOKED_AT = 20  # training images whose labels are compared with the network's channels before a run


@settings
class BundleSite(FolderSettings):
    """Define the settings that a bundle reads from a site's private file.

    Args:
        structures, classes: what the site annotated. ``"all"``; a part of it is refused, since the bundle's loss would
            take what is missing for background. Default: the site says nothing.
        bundle_classes: full names of the classes that a bundle without code rights may name; ``"default"`` stands for
            the list that the package has, ``"-NAME"`` takes one out. Default: that list.
    """

    structures: Literal["all"] | None = None
    classes: Literal["all"] | None = None
    bundle_classes: list[Text] | None = None


@settings
class MonaiBundleTask(Task):
    """Train what a MONAI bundle's configuration describes, on the sites' own datalists.

    A bundle is code: strings in its configuration are evaluated. So this class by itself has no bundle, and no argument
    names one on a disk; a ``task.py``, which sites take as custom code, says in which folder beside it the bundle is.
    A job without custom code has the configuration as ``bundle_text``, which is read sealed: nothing of it runs.

    Args:
        bundle_sha256: checksum of the bundle's files, spaces ignored, which all sites must have; ``None`` for any.
        bundle_configs: names of the files in ``configs`` that are read, without ending; a later file overrides earlier
            ones.
        bundle_overrides: values, by key of the configuration, that replace those in the bundle's files, or say where a
            part is (``{"loss": "@my_loss"}``); see ``docs/bundles.md`` for the parts.
        image_key, label_key: keys of image and label in the dicts that the bundle's transforms work on.
        class_names: names of the network's output channels, background too; default: the names in the metadata.
        bundle_text: the bundle's configuration itself, to be read sealed; ``None`` for the folder's, with its code.
    """

    #: Path of the bundle's folder; the subclass in a job's task file sets it, and this class itself has no bundle.
    folder: ClassVar[Path] = Path(BUNDLE_FOLDER)
    primary_metric: ClassVar[str] = "dice"
    has_classes: ClassVar[bool | None] = False
    site_settings: ClassVar[type] = BundleSite

    bundle_sha256: Text | None = None
    bundle_configs: Annotated[list[Text], Field(min_length=1)] = field(default_factory=lambda: ["train"])
    bundle_overrides: dict[str, Any] = field(default_factory=dict)
    image_key: Text = "image"
    label_key: Text = "label"
    class_names: list[Text] | None = None
    bundle_text: Text | None = None

    def __post_init__(self) -> None:
        self._classes = None if self.bundle_text is None else shipped_classes()
        if self.folder is MonaiBundleTask.folder and self.bundle_text is None:
            raise BundleError(
                "a MONAI bundle is custom code, so that a class of the package has none: give it with --monai-bundle, "
                f"or in a task.py as `folder = Path(__file__).with_name({BUNDLE_FOLDER!r})`"
            )
        self.monai_bundle_sha256 = (
            bundle_checksum(self.folder)
            if self.bundle_text is None
            else hashlib.sha256(self.bundle_text.encode()).hexdigest()
        )
        if self.bundle_sha256 is not None and self.monai_bundle_sha256 != "".join(self.bundle_sha256.split()):
            raise BundleError(
                f"MONAI bundle {self.folder.name!r} is not the one of this job: its files have the checksum "
                f"{self.monai_bundle_sha256}, the job requires {self.bundle_sha256} (bundle_sha256); use the job's "
                "bundle, or make the job again with this one"
            )
        vars(self)["primary_metric"] = self.parts.kept("key_metric").name
        self.has_optimizer = self.parts.bundle.place("optimizer") is not None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "parts"}  # parts made from expressions cannot be pickled

    @cached_property
    def parts(self) -> BundleParts:
        """Return the objects that the bundle's configuration describes."""
        return self._parts_in(self.folder)

    def _parts_in(self, folder: Path) -> BundleParts:
        return BundleParts(
            Bundle(
                folder, self.bundle_configs, self.bundle_overrides, sealed=self._classes, text=self.bundle_text
            ),
            self.class_names,
        )  # fmt: skip

    def heed(self, settings: Mapping[str, Any]) -> None:
        """Take the classes that a sealed bundle may use from this machine's private settings (``bundle_classes``)."""
        if self.bundle_text is not None and settings.get("bundle_classes") is not None:
            self._classes = allowed_classes(settings["bundle_classes"])
            vars(self).pop("parts", None)

    # -- before a run

    def check(self) -> None:
        """Make every part of the bundle once before a job is sent to sites, so that a broken bundle is found early.

        Raises:
            BundleError: a part is missing or cannot be made (names file and key).
        """
        with OwnedFolder("without-models") as place:  # holds those of the bundle's files that a job carries
            if self.bundle_text is None:
                copy_bundle(self.folder, place.path / self.folder.name)
            self._parts_in(place.path / self.folder.name).check()

    def training_settings(self, given: Collection[str] = ()) -> dict[str, Any]:
        """Return the bundle's optimizer, batch size and loss as settings of a method's site half.

        The bundle's random transforms are used.

        Raises:
            BundleError: the optimizer cannot be made, or a given setting would have no effect on it.
        """
        size = self.parts.kept("train_batch_size")
        return {
            "augment": True, "criterion": "task", **self.parts.optimizer_settings(given),
            **({} if size is None else {"batch_size": size}),
        }  # fmt: skip

    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return self.parts.optimizer(parameters)

    # -- the seam

    def build_model(self) -> torch.nn.Module:
        return self.parts.make("network")

    def initialise(self, model: torch.nn.Module, checkpoint: str | None = None) -> str:
        from fairflare.tasks.networks import load_network

        return super().initialise(model) if checkpoint is None else load_network(model, Path(checkpoint))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the bundle's loss; the mean if the loss function returns several numbers."""
        import torch

        criterion = self.parts.kept("loss")
        if isinstance(criterion, torch.nn.Module):
            criterion = criterion.to(targets.device)
        return cast("torch.Tensor", criterion(outputs, targets).mean())

    def check_site(self, model: torch.nn.Module, data: SiteData, device: Device) -> None:
        """Check that the site's image sizes and labels fit the bundle.

        One training image goes through network and loss, in evaluation mode. The labels of up to :data:`LOOKED_AT`
        training images are compared with the network's channels.
        """
        images = data.batches("training", batch_size=1)
        inputs, targets = (tensor.to(device) for tensor in next(iter(images)))
        with telling(
            "the MONAI bundle's network cannot do with the first training image, or its loss with the outputs "
            f"(an input of {tuple(inputs.shape)}, a label of {tuple(targets.shape)})",
            shareable,
        ), evaluating(model):  # fmt: skip
            outputs = model(inputs)
            classes = outputs.shape[1]
            most = max(float(label.max()) for _, label in islice(images, LOOKED_AT))
            if (targets.ndim == 1 or targets.shape[1] == 1) and 1 < classes <= most:
                raise ValueError(
                    f"labels have values up to {most:g}, and the network has {classes} channels: 0 to {classes - 1}"
                )
            self.loss(outputs, targets)

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        """Evaluate the model by the bundle's key metric and loss, with the bundle's inferer and postprocessing.

        Returns:
            ``dice`` (or ``iou``) and ``loss``; with several structures also the metric of each structure in the images.
        """
        scores, losses = self._scores(model, batches, device)
        metric = self.parts.kept("key_metric")
        if math.isnan(value := metric.value(scores)):
            raise DataError(
                f"{metric.name} is not defined on any of {len(scores)} image(s): no mask has a structure that counts",
                f"{metric.name} is not defined on the images of a list: no mask has a structure that counts",
            )
        return {
            metric.name: value, "loss": float(np.mean(losses)),
            **{
                f"{metric.name}_{name}": float(of_name.mean())
                for name, of_name in zip(metric.names(scores.shape[1]), scores.T, strict=False) if of_name.count()
            },
        }  # fmt: skip

    def image_scores(self, model: torch.nn.Module, data: SiteData, device: Device) -> list[float] | None:
        """Return the bundle's key metric of each image, NaN if no structure counts; ``None`` if images have none."""
        if self.parts.kept("key_metric").summed:
            return None
        scores, _ = self._scores(model, data.batches("test", batch_size=1), device)
        return [*scores.mean(axis=1).filled(np.nan)]

    def _scores(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> tuple[Any, list[float]]:
        """Return the key metric, (images, structures), masked where an image lacks a structure, and the losses."""
        from monai.inferers import SimpleInferer

        scores: list[npt.NDArray[np.float64]] = []
        losses: list[float] = []
        infer = self.parts.kept("validate_inferer") or SimpleInferer()
        # Check before each window whether the run is to stop, since a volume has many windows.
        with evaluating(model), model.register_forward_pre_hook(lambda *_: check_stop()):
            for batch in batches:
                inputs, targets = (tensor.to(device) for tensor in batch)
                for item, output, target in zip(cast("Any", batch).items, infer(inputs, model), targets, strict=True):
                    losses.append(float(self.loss(output[None], target[None])))
                    scores.append(self._score(item, output, target))
        checks.whole("the number of batches to evaluate on", len(scores))
        return np.ma.masked_invalid(np.stack(scores)), losses

    def _score(self, item: Mapping[str, Any], output: torch.Tensor, target: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return the key metric of one image after the bundle's postprocessing."""
        with telling(f"{self.parts.bundle.name}: key {self.parts.bundle.place('validate_postprocessing')!r} fails"):
            # under the keys of MONAI's engines
            scored = self.parts.kept("validate_postprocessing")({**item, "pred": output, self.label_key: target})
        return self.parts.kept("key_metric").measure_image(scored, self.label_key)

    def declared_metrics(self) -> tuple[Metric, ...]:
        return cast("KeyMetric", self.parts.kept("key_metric")).declare()

    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        """Return the images of the site's datalist, prepared by the bundle's transforms."""
        from fairflare.tasks.bundles.bundle_data import BundleData, takes_class_numbers

        site_settings = read_settings(BundleSite, site, settings)
        self.heed(settings)
        if self.bundle_text is not None:
            with setting_of(site, "bundle_classes"):
                self.parts.check()
        if site_settings.data_root is None:
            raise setting_error(
                site, "data_root", "no data: 'data_root' is not set, and a MONAI bundle has no made-up data; set "
                "'data_root' (`fairflare phantom volumes3d` writes synthetic volumes)",
            )  # fmt: skip
        train = self.parts.make("train_preprocessing")
        listed = load_datalist(
            site_settings.data_root,
            site_settings.datalist or "datalist.json",
            site=site,
            several=True,
            linked_roots=site_settings.linked_roots,
            class_labels=takes_class_numbers(train, self.label_key),
        )
        return BundleData(
            listed,
            train,
            self.parts.make("validate_preprocessing"),
            keys=(self.image_key, self.label_key),
            validate_batch=self.parts.kept("validate_batch_size") or 1,
            cache_bytes=site_settings.cache_bytes,
            num_workers=site_settings.num_workers,
        )


def seal_settings(folder: Path, configs: Sequence[str]) -> dict[str, str]:
    """Return the task's settings with a bundle's configuration as text, to be read without its folder and code."""
    # YAML, not JSON: FLARE would take the braces around JSON for a variable.
    text = yaml.safe_dump(read_files(folder, configs)[0], sort_keys=False, allow_unicode=True)
    return {"bundle_text": text, "bundle_sha256": group_digits(hashlib.sha256(text.encode()).hexdigest())}
