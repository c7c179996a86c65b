"""Draw example predictions of a site: its best, median and worst test image, as one picture and a table.

The picture shows images of patients, so a caller must write it only to a folder of the site itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fairflare.base.disk.files import write_whole
from fairflare.base.task import evaluating
from fairflare.tasks.scores.dice_scores import HALF, DiceScores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fairflare.base.task import Device, SiteData
    from fairflare.tasks.scores.class_scores import MeasuresClasses
    from fairflare.tasks.shared.structures import StructureTask

PICTURE, TABLE = "examples.png", "examples.csv"
SPLIT = "test"
THRESHOLD = 0.5  # probability above which a pixel belongs to a structure, as in the evaluation
COLOURS = ("#ffdc00", "#00c8ff", "#ff5ac8", "#7dff5a", "#ff8c1e", "#c8a0ff")


@dataclass(frozen=True)
class Example:
    """Store one test image with the model's prediction.

    Attributes:
        which: ``"best"``, ``"median"`` or ``"worst"``; joined by "and" if one image is several of them.
        number: index of the image in the test split, from 0.
        score: score of the image in [0, 1]: for segmentation the Dice as in the evaluation, the mean over structures;
            for classification the probability of the true class.
        image: (channels, height, width) in [0, 1], as the network gets the image.
        truth, found: true and predicted masks, (structures, height, width) bool; or true and predicted class number.
        probability: probability of the predicted class; ``None`` if the task is segmentation.
    """

    which: str
    number: int
    score: float
    image: npt.NDArray[np.float32]
    truth: Any
    found: Any
    probability: float | None = None


def choose(scores: Sequence[float]) -> dict[int, str]:
    """Choose the best, the median and the worst image by their scores.

    Args:
        scores: score of each image, at least one; larger is better.

    Returns:
        ``{index of the image: "best"}`` and so on, the best image first. An image that is several of them has one
        entry, such as ``"best and median"``. Of equal scores the first image counts; of an even number of images the
        median is the lower one.

    Raises:
        ValueError: ``scores`` is empty.
    """
    if not len(scores):
        raise ValueError("there is no test image to show")
    order = np.argsort(np.asarray(scores, np.float64), kind="stable")
    best = int(np.flatnonzero(np.asarray(scores) == scores[order[-1]])[0])
    found: dict[int, list[str]] = {}
    for which, number in (("best", best), ("median", int(order[(len(order) - 1) // 2])), ("worst", int(order[0]))):
        found.setdefault(number, []).append(which)
    return {number: " and ".join(names) for number, names in found.items()}


def place_of(inside: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return the index that selects what to draw: the slice of a volume with most voxels above 0, or all of an image.

    Args:
        inside: image (channels, height, width), or volume (channels, x, y, z), whose third spatial axis is indexed.
    """
    return (..., int((inside > 0).any(0).sum((0, 1)).argmax())) if inside.ndim == 4 else (...,)


def flat_pair(image: npt.NDArray[Any], target: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return an image and its target (a mask of the same shape, or a class) in 2D; for a volume one slice of both."""
    place = place_of(target if target.ndim > 1 else image)
    return image[place], target[place] if target.ndim > 1 else target


def of_segmentation(
    task: StructureTask, model: torch.nn.Module, data: SiteData, batch_size: int, device: Device
) -> list[Example]:
    """Return the best, the median and the worst test image of a site by the Dice of each image."""
    scores = DiceScores(choose=task.chosen)
    for _, targets, outputs, origins in _outputs(task, model, data, batch_size, device):
        scores.add(task.probabilities(outputs) > THRESHOLD, targets.to(outputs.device), origins)
    values = scores.images.mean(1).tolist()
    found = []
    for which, number, image, target, output in _shown(choose(values), task, model, data, batch_size, device):
        counts = (target >= 0).numpy()  # False: pixels that do not count
        mask = (task.probabilities(output[None])[0] > THRESHOLD).cpu().numpy() & counts
        truth = (target > HALF).numpy()
        place = place_of(truth | mask)
        found.append(Example(which, number, values[number], image[place], truth[place], mask[place]))
    return found


def of_classification(
    task: MeasuresClasses, model: torch.nn.Module, data: SiteData, batch_size: int, device: Device
) -> list[Example]:
    """Return the best, the median and the worst test image of a site by the probability of the true class."""
    values: list[float] = []
    for _, targets, outputs, _ in _outputs(task, model, data, batch_size, device):
        values += task.probabilities(outputs)[torch.arange(len(targets)), targets].tolist()
    found = []
    for which, number, image, target, output in _shown(choose(values), task, model, data, batch_size, device):
        probabilities = task.probabilities(output[None])[0]
        told = int(probabilities.argmax())
        image = image[place_of(image)]
        found.append(Example(which, number, values[number], image, int(target), told, float(probabilities[told])))
    return found


def _outputs(
    task: Any, model: torch.nn.Module, data: SiteData, batch_size: int, device: Device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]]:
    """Yield inputs, targets, outputs and origins of each batch of the test split, in the order of the site's list."""
    with evaluating(model):
        for batch in data.batches(SPLIT, batch_size=batch_size):
            inputs, targets = batch
            yield inputs, targets, task.outputs(model, inputs.to(device)), getattr(batch, "origins", None)


def _shown(
    chosen: Mapping[int, str], task: Any, model: torch.nn.Module, data: SiteData, batch_size: int, device: Device
) -> list[tuple[str, int, npt.NDArray[np.float32], torch.Tensor, torch.Tensor]]:
    """Return the chosen images with targets and outputs, computed in the same batches as the scores."""
    found = {}
    before = 0
    for inputs, targets, outputs, _ in _outputs(task, model, data, batch_size, device):
        for number in chosen:
            place = number - before
            if 0 <= place < len(inputs):
                found[number] = (inputs[place].numpy().copy(), targets[place].clone(), outputs[place].clone())
        before += len(inputs)
        if len(found) == len(chosen):
            break
    return [(which, number, *found[number]) for number, which in chosen.items()]


# ------------------------------------------------------------------------------------------------ what is written


def write(examples: Sequence[Example], folder: Path, names: Sequence[str], title: str) -> None:
    """Write the picture and the table of example predictions.

    Args:
        examples: results of :func:`of_segmentation` or :func:`of_classification`.
        folder: an existing folder; earlier files of the same names are replaced.
        names: names of the structures or classes.
        title: text over the picture.

    Raises:
        OSError: the folder cannot be written.
    """
    from matplotlib import rc_context

    from fairflare.base.disk.files import csv_text
    from fairflare.reporting.pictures import save_picture

    with rc_context({"text.parse_math": False}):  # a class name with two dollar signs is not to be drawn as a formula
        write_whole(folder / PICTURE, partial(save_picture, draw(examples, names, title)), durable=False)
    text = csv_text(_rows(examples, names))
    write_whole(folder / TABLE, lambda path: path.write_text(text, encoding="utf-8"), durable=False)


def _rows(examples: Sequence[Example], names: Sequence[str]) -> list[list[Any]]:
    if examples[0].probability is None:
        return [["which", "test_image", "dice"], *([one.which, one.number, repr(one.score)] for one in examples)]
    return [
        ["which", "test_image", "p_true_class", "true_class", "told_class", "p_told_class"],
        *(
            [one.which, one.number, repr(one.score), names[one.truth], names[one.found], repr(one.probability)]
            for one in examples
        ),
    ]


def draw(examples: Sequence[Example], names: Sequence[str], title: str) -> Figure:
    """Draw a panel for each example; true structures have a solid outline, predicted structures a dashed one."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(3.2 * len(examples) + 0.4, 4.4), layout="constrained")
    panels: Any = figure.subplots(1, len(examples), squeeze=False)[0]
    for axes, example in zip(panels, examples, strict=True):
        picture = example.image.transpose(1, 2, 0).clip(0, 1)
        axes.imshow(picture[..., 0] if picture.shape[2] == 1 else picture, cmap="gray", vmin=0, vmax=1)
        axes.set_axis_off()
        if example.probability is None:
            _outline(axes, example)
            told = f"Dice {example.score:.3f}"
        else:
            told = (
                f"true: {names[example.truth]} ({example.score:.3f})\n"
                f"told: {names[example.found]} ({example.probability:.3f})"
            )
        axes.set_title(f"{example.which}: test image {example.number}\n{told}", fontsize=9)
    if examples[0].probability is None:
        lines = [Line2D([], [], color=c, label=n) for n, c in zip(names, COLOURS * len(names), strict=False)]
        lines += [
            Line2D([], [], color="#606060", label="truth"),
            Line2D([], [], color="#606060", ls="--", label="found"),
        ]
        figure.legend(handles=lines if len(names) > 1 else lines[1:], loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _outline(axes: Axes, example: Example) -> None:
    for number, (truth, found) in enumerate(zip(example.truth, example.found, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        for mask, style, width in ((truth, "solid", 1.6), (found, "dashed", 1.2)):
            if mask.any():  # with a frame of zeros, the outline of a structure at the edge is closed
                framed = np.pad(mask.astype(np.float32), 1)
                place = np.arange(-1, mask.shape[1] + 1), np.arange(-1, mask.shape[0] + 1)
                axes.contour(*place, framed, levels=[HALF], colors=colour, linestyles=style, linewidths=width)
