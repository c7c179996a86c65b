"""Apply a trained model to images, with the preprocessing and the network of its training.

.. code-block:: python

    predictor = load_predictor(Path("runs/fed_lwr-seed0"))
    for found in predictor(Path("image.png")):
        found.probabilities  # of each structure (structures, height, width), or of each class (classes,)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fairflare.base.machine.memory_reuse import reuse_memory
from fairflare.base.task import evaluating
from fairflare.core.features.batch_norms import MEAN, VARIANCE, registered_names
from fairflare.core.features.input_norm import NAME
from fairflare.data.datalist import DataError
from fairflare.data.reading import slices_in
from fairflare.prediction.recall import Recalled, recall
from fairflare.prediction.saved_model import PERSONAL_NOTE, SavedModel, find_model, not_whole, read_model, read_whole
from fairflare.tasks.placing import plain
from fairflare.tasks.shared.classes import ClassTask
from fairflare.tasks.shared.structures import StructureTask
from fairflare.tasks.volumes.base import VolumeSettings
from fairflare.tasks.volumes.nnunet import NnUNetTask

BATCH = 8  # number of slices in one forward pass of the network
LEAST = 1e-3  # smallest share of a voxel that the network saw
TRACKED = "num_batches_tracked"  # last part of the name of a batch norm's counter in the state dict


@dataclass(frozen=True)
class Found:
    """Store the model's prediction for one picture.

    Attributes:
        slice: number of the slice in a volume; ``None`` if the file is one picture.
        probabilities: for segmentation (structures, height, width) of the network's size, for classification
            (classes,) float64; on the CPU, in the form that the evaluation uses.
    """

    slice: int | None
    probabilities: torch.Tensor


class Predictor:
    """Predict on image files with a trained network and its task.

    Args:
        recalled: the segmentation or classification task of the training, rebuilt from its record.
        model: the trained model, whose file is named in messages.
        device: device to compute on.

    Attributes:
        notes: remarks on what may differ from the training.
        blank: whether all pixels that the network got of the last file had one value.

    Raises:
        ValueError: the task is of another kind, or the model does not fit the task's network (names the tensors).
    """

    def __init__(self, recalled: Recalled, model: SavedModel, device: torch.device) -> None:
        task = recalled.task
        if not isinstance(task, (StructureTask, ClassTask)):
            raise ValueError(
                f"{model.path} was trained for a {type(task).__name__}, which does not say how it reads one image; "
                "predict knows tasks that build on SegmentationTask or ClassificationTask: write one with the same "
                "build_model and give it with --task-file"
            )
        if {"open_site", "open_folder", "open_phantom"} & set(recalled.own) and "read_input" not in recalled.own:
            raise ValueError(
                "the task reads its images by code of its own (open_site or open_folder) but has no read_input(file, "
                "number) that reads one image in the same way; add it to the class (`read_input = "
                f"{type(task).__mro__[1].__name__}.read_input` when files are read as FairFlare does)"
            )
        self.task, self.model, self.device, self.blank = task, model, device, False
        self.notes = [*recalled.notes, *[PERSONAL_NOTE] * model.personal]
        self.network = model.network(task, "; the settings of the task are not those of its training").to(device)

    @property
    def kind(self) -> Literal["segmentation", "classification"]:
        """Return whether the model predicts masks (segmentation) or classes (classification)."""
        return "segmentation" if isinstance(self.task, StructureTask) else "classification"

    @property
    def names(self) -> list[str]:
        """Return the names of the structures or classes that the model predicts."""
        return self.task.names()

    def __call__(self, file: Path, more: tuple[Path, ...] = ()) -> Iterator[Found]:
        """Yield the predictions for a case: one for a picture, or one for each slice of a volume, in order.

        Args:
            file: file of the image, or of the task's first channel.
            more: files of its further channels, in their order; none where one file has all.

        Raises:
            DataError: the file cannot be read, or the network gives numbers that are not finite; ``reason`` says why.
        """
        self.blank = True
        if isinstance(self.task, VolumeSettings):
            yield Found(None, self._predict_volume(file, more))
            return
        count = slices_in(file, how=self.task.reading())
        further = (more,) if more else ()  # a user's own read_input may take one file
        numbers: Sequence[int | None] = [None] if count is None else list(range(count))
        with reuse_memory(self.device.type):
            for start in range(0, len(numbers), BATCH):
                chosen = numbers[start : start + BATCH]
                read: Any = self.task
                outputs = self._infer(file, torch.stack([read.read_input(file, number, *further) for number in chosen]))
                for number, probabilities in zip(chosen, outputs, strict=True):
                    yield Found(number, probabilities)

    def _infer(self, file: Path, inputs: torch.Tensor, raw: bool = False) -> torch.Tensor:
        self.blank &= bool((inputs == inputs.flatten()[0]).all())
        with evaluating(self.network):
            outputs = self.task.outputs(self.network, inputs.to(self.device))
            outputs = (outputs if raw else self.task.probabilities(outputs)).cpu()
        if not bool(torch.isfinite(outputs).all()):
            raise DataError(
                f"{file}: the network's outputs are not finite", reason="the network's outputs are not finite"
            )
        return outputs

    def _predict_volume(self, file: Path, more: tuple[Path, ...]) -> torch.Tensor:
        """Return a volume's probabilities, one for each class, or a map for each structure.

        The maps are on the volume's own grid: (structures, rows, columns, slices).
        """
        from monai.data import MetaTensor
        from monai.transforms import SpatialResample

        task: Any = self.task
        image, whole = task.read_volume(file, more)
        raw = isinstance(task, NnUNetTask)  # nnU-Net resamples outputs, and others probabilities
        outputs = self._infer(file, image.as_tensor()[None], raw)[0]
        if self.kind == "classification":
            return outputs
        affine = torch.eye(4, dtype=torch.float64) if whole.affine is None else torch.from_numpy(whole.affine)
        back = SpatialResample(mode="bilinear", padding_mode="zeros")
        extent = plain(task.extent(whole)) if raw else torch.ones_like(outputs[:1])
        with_extent = MetaTensor(torch.cat([outputs * extent, extent]), affine=image.affine)
        values = plain(back(with_extent, affine, whole.image.shape[1:]))
        seen = values[-1:]  # share of each voxel that the network saw
        return task.probabilities(values[:-1] / seen.clamp(min=LEAST)) * (seen > LEAST) if raw else values[:-1]


def load_predictor(
    place: Path,
    which: Literal["best", "last"] | None = None,
    *,
    task_file: Path | None = None,
    device: torch.device | str = "cpu",
    to_adapt: bool = False,
) -> Predictor:
    """Load the model of a run, ready to predict on images.

    Args:
        place: a run's folder or a model file; see :func:`fairflare.prediction.saved_model.find_model`.
        which: ``"best"`` or ``"last"`` model of the run; default: the best by validation.
        task_file: file with the task's own code, if the task has such code.
        device: device to compute on.
        to_adapt: load for :func:`fairflare.prediction.adapt.adapt`; then a model may lack the norm statistics that
            stayed at the sites, but nothing else.

    Raises:
        ValueError: there is no model, the model lacks tensors that stayed at the sites, its task is not recorded, or
            model and task do not fit; with ``to_adapt``, the network has no batch norm with running statistics.
    """
    model = read_model(find_model(place, which)) if to_adapt else read_whole(place, which)
    predictor = Predictor(recall(model.record, model.path.parent, task_file), model, torch.device(device))
    if to_adapt:
        norms_to_measure(predictor)
    return predictor


def norms_to_measure(predictor: Predictor) -> list[str]:
    """Return the names of the batch norms to adapt to new images: all, or in a FedRDN model only that of the input.

    Raises:
        ValueError: the network has no norm statistics to adapt, other tensors stayed at the sites too, or
            preprocessing pads a FedRDN model's images, so that the padding would be measured too.
    """
    names, model = registered_names(predictor.network), predictor.model
    if not names:
        raise ValueError(
            f"{model.path}: the network has no batch norm with running statistics, so there is nothing to adapt; use "
            "fairflare predict instead, which takes the model unchanged"
        )
    for norms in ([[NAME]] if NAME in names else []) + [[*names]]:
        # A norm module used at several places has several names in the state dict; all of them are listed.
        statistics = [f"{by}.{kind}" for name in norms for by in names[name] for kind in (MEAN, VARIANCE, TRACKED)]
        counted = [name for name in statistics if name in model.state]
        if model.at_sites in (0, len(counted), sum(not name.endswith(TRACKED) for name in counted)):
            break
    else:
        raise ValueError(not_whole(model))
    if NAME in norms and getattr(predictor.task, "resize", "") == "pad":
        raise ValueError(
            f"{model.path} normalises images by their own statistics (FedRDN), and resize=pad puts an edge around "
            "them, which cannot be told from the images here; train with resize=stretch or crop"
        )
    return norms
