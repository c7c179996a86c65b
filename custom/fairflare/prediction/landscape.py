"""The loss around a run's model on the data of sites; the maths is :mod:`fairflare.core.objectives.landscape`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fairflare.base.task import Task, evaluating
from fairflare.core.features.adapting import network_of
from fairflare.core.objectives.landscape import coordinates, direction, numbers, surface
from fairflare.federation.site.site_file import SHELL_SETTINGS
from fairflare.prediction.recall import recall
from fairflare.prediction.saved_model import PERSONAL_NOTE, SavedModel, read_whole
from fairflare.tasks.networks import load_fitting

if TYPE_CHECKING:
    from fairflare.base.task import Batch, Device

BATCH = 32  # images


@dataclass(frozen=True)
class Trained:
    """A run's model with its task.

    Attributes:
        name: of the run.
        task, saved: what it learned, and the model's file.
        notes: what may not be as it was in the training.
    """

    name: str
    task: Task
    saved: SavedModel
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """Which losses are computed.

    Args:
        extent: how far along each direction; 1: as far as each filter is long.
        points: along each direction, odd.
        seed: of the two directions.
        split: ``"training"``, ``"validation"`` or a test list of the site.

    Raises:
        ValueError: a value out of range.
    """

    extent: float = 1.0
    points: int = 11
    seed: int = 0
    split: str = "validation"

    def __post_init__(self) -> None:
        coordinates(self.extent, self.points)

    @property
    def places(self) -> list[float]:
        """Along each direction."""
        return coordinates(self.extent, self.points)


@dataclass(frozen=True)
class Landscape:
    """The losses of one model at one site.

    Attributes:
        run, site: names.
        images: number of them.
        synthetic: they are made up.
        losses: of :func:`fairflare.core.objectives.landscape.surface`.
        numbers: of :func:`fairflare.core.objectives.landscape.numbers`.
    """

    run: str
    site: str
    images: int
    synthetic: bool
    losses: npt.NDArray[np.float64]
    numbers: dict[str, float]


def load_trained(
    places: Sequence[Path], which: Literal["best", "last"] | None = None, task_file: Path | None = None
) -> list[Trained]:
    """The models of runs, to be compared in one picture.

    Args:
        places: folders of runs or model files.
        which: default: the best by validation where there is one, else the last.
        task_file: with the tasks' own code, where they have any.

    Raises:
        ValueError: no model, one that lacks what stays at the sites, or tasks whose losses cannot be compared.
    """
    found = []
    names = [place.resolve().name for place in places]
    for place, name in zip(places, names, strict=True):
        saved = read_whole(place, which)
        recalled = recall(saved.record, saved.path.parent, task_file)
        notes = (*recalled.notes, *([PERSONAL_NOTE] if saved.personal else ()))
        found.append(Trained(name if names.count(name) == 1 else str(place), recalled.task, saved, notes))
    first = found[0]
    for other in found[1:]:
        if other.saved.record.get("class") != first.saved.record.get("class"):
            raise ValueError(
                f"{first.name} learned a {type(first.task).__name__} and {other.name} a {type(other.task).__name__}: "
                "their losses cannot be compared; give runs of one task"
            )
    return found


def landscape_at(
    trained: Trained,
    site: str,
    settings: Mapping[str, Any],
    grid: Grid,
    device: torch.device | str = "cpu",
    done: Callable[[int], None] = lambda count: None,
) -> Landscape:
    """The losses of a model on the data of a site.

    Args:
        trained: of :func:`load_trained`.
        site: name.
        settings: as in its ``local/fairflare.json``.
        grid: which losses.
        device: to compute on.
        done: is told how many losses there are.

    Raises:
        ValueError: the data cannot be used, the site has no image of the split, the model does not fit its network, or
            its own loss is not finite.
    """
    task, saved = trained.task, trained.saved
    data = task.open_site(site, {k: v for k, v in settings.items() if k not in SHELL_SETTINGS})
    known = ("training", "validation", *data.test_splits)
    if grid.split not in known:
        raise ValueError(f"site {site!r} has no split {grid.split!r}; it has {', '.join(known)}")
    images = data.num_samples(grid.split)
    if not images:
        raise ValueError(f"site {site!r} has no image in its split {grid.split!r}; choose another with --split")
    model = network_of(task)
    load_fitting(model, saved.state, f"{saved.path} does not fit the network of its task", "")
    first, second = (direction(model, grid.seed, number) for number in (0, 1))
    model.to(device)
    batches = data.batches(grid.split, batch_size=BATCH)
    try:
        losses = surface(model, lambda: mean_loss(task, model, batches, device), first, second, grid.places, done)
    except ValueError as error:
        raise ValueError(f"{trained.name}, site {site!r}: {error}") from error
    return Landscape(trained.name, site, images, bool(data.synthetic), losses, numbers(losses, grid.places))


def mean_loss(task: Task, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> float:
    """The task's loss in evaluation mode, the mean over all samples; NaN where that of a batch is not finite."""
    total, count = [], 0
    with evaluating(model):
        for inputs, targets in batches:
            total.append(float(task.loss(model(inputs.to(device)), targets.to(device))) * len(targets))
            count += len(targets)
    return math.fsum(total) / count if all(map(math.isfinite, total)) else math.nan
