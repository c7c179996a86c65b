"""Measure batch norm statistics for a hospital that took no part in the training, on its own unlabelled images.

With ``norm_statistics=site`` each site has its own statistics, and a site that joins later has none. With common
statistics the model has only those of other hospitals' scanners. ``docs/norm_statistics.md`` reports how much
adapting improves predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fairflare.base.disk.files import save_torch, sha256_of, write_whole
from fairflare.base.machine.memory_reuse import reuse_memory
from fairflare.core.features.batch_norms import (
    Unmeasurable,
    measure,
    next_group,
    other_running,
    registered_names,
    running_norms,
)
from fairflare.data.datalist import DataError
from fairflare.data.reading import slices_in
from fairflare.prediction.predictor import BATCH, Predictor, norms_to_measure
from fairflare.prediction.saved_model import SavedModel, read_model

LEAST = 2  # least number of pictures; statistics of a single picture would only describe that picture
HELD = 2**29  # largest size in bytes of the pictures that stay in memory between the passes


@dataclass
class Adapted:
    """Store a predictor with new batch norm statistics, and the files on which they were measured.

    Attributes:
        predictor: the predictor, whose network has the new statistics.
        norms: names of the batch norms that were measured.
        left: names of the modules whose running statistics were not changed.
        files, pictures: number of files and of pictures that were read; a volume has several pictures.
        unusable: reason for each file that could not be read, by its path.
    """

    predictor: Predictor
    norms: list[str]
    left: list[str]
    files: int
    pictures: int
    unusable: dict[Path, str] = field(default_factory=dict)


def adapt(predictor: Predictor, files: Sequence[Path]) -> Adapted:
    r"""Replace the statistics of a network's batch norms by those of the given images, one batch norm after the other.

    For each channel of a batch norm's input, computed over all pictures and positions, these are the mean m and the
    variance

    .. math:: v = \frac{1}{N - 1} \sum_i (x_i - m)^2

    Both are computed in float64. A batch norm is measured after those in front of it have their new statistics, as with
    ``norm_statistics=recalibrated`` in a federation. No label is read, and no weight changes. In a FedRDN model only
    the statistics of the input are measured, because the sites share all other statistics.

    Args:
        predictor: result of :func:`fairflare.prediction.predictor.load_predictor` with ``to_adapt``; its network is
            changed.
        files: paths of images and volumes.

    Raises:
        ValueError: fewer than two pictures can be read, or a batch norm's input is not finite (the message names it).
    """
    task: Any = predictor.task
    if getattr(task, "spatial_dims", 2) == 3:
        raise ValueError("adapt is for tasks on pictures; this model looks at whole volumes")
    held: dict[tuple[Path, int | None], torch.Tensor] = {}
    unusable: dict[Path, str] = {}
    pictures: list[tuple[Path, int | None]] = []
    room = HELD
    for file in files:
        try:
            count = slices_in(file, how=task.reading())
            inside: list[tuple[Path, int | None]] = [(file, n) for n in ([None] if count is None else range(count))]
            for one in inside:
                tensor = task.read_input(*one)
                if tensor.nbytes <= room:
                    held[one], room = tensor, room - tensor.nbytes
        except DataError as error:
            unusable[file] = error.reason
        else:
            pictures += inside
    if len(pictures) < LEAST:
        why = "".join(f"; {file}: {reason}" for file, reason in list(unusable.items())[:3])
        raise ValueError(
            f"{len(pictures)} picture(s) can be read, and statistics need at least {LEAST}, better some dozens of "
            f"several patients{why}"
        )

    def batches() -> Iterator[torch.Tensor]:
        for start in range(0, len(pictures), BATCH):
            chosen = pictures[start : start + BATCH]
            read = [held[one] if one in held else task.read_input(*one) for one in chosen]
            yield torch.stack(read).to(predictor.device)

    chosen, every = norms_to_measure(predictor), registered_names(predictor.network)
    measured = [name for name in every if name not in chosen]  # these stay as the sites trained them
    of_run = len(measured)
    try:
        with torch.no_grad(), reuse_memory(predictor.device.type):
            recalibrate(predictor.network, batches, measured=measured)
    except Unmeasurable as error:
        raise ValueError(f"{predictor.model.path}: {error} on these images") from error
    left = [*(n for n in every if n not in measured), *other_running(predictor.network)]
    return Adapted(predictor, measured[of_run:], left, len(files) - len(unusable), len(pictures), unusable)


def save(adapted: Adapted, out: Path) -> SavedModel:
    """Write the model with its new batch norm statistics to a model file, with a record of how they were measured.

    Args:
        adapted: result of :func:`adapt`.
        out: path of the model file, which is replaced in one step.

    Raises:
        OSError: the file cannot be written.
    """
    source = adapted.predictor.model
    state = {name: tensor.detach().cpu() for name, tensor in adapted.predictor.network.state_dict().items()}
    conf: dict[str, Any] = {
        "method": source.method, "task": dict(source.record), "adapted": {
            "pictures": adapted.pictures, "files": adapted.files, "norms": adapted.norms, "left": adapted.left,
            "source": source.path.name, "source_sha256": sha256_of(source.path),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        **({} if source.made is None else {"round": source.made}),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, lambda path: save_torch({"model": state, "train_conf": conf}, path))
    return read_model(out)


def recalibrate(
    model: torch.nn.Module, batches: Callable[[], Iterable[torch.Tensor]], *, measured: list[str] | None = None
) -> int:
    """Set the running statistics of all batch norms that the images reach; all images must be in this process.

    Args:
        model: the network, whose buffers are changed.
        batches: function that returns an iterable over all batches, called once for each pass.
        measured: list to which the names of the measured batch norms are added.

    Returns:
        Number of passes over the images.
    """
    done = [] if measured is None else measured
    passes, more = 0, True
    norms: dict[str, Any] = dict(running_norms(model))
    while more and norms:
        group = next_group(model, next(iter(batches())), done)
        for name, moments in measure(model, batches(), group).items():
            norms[name].running_mean.copy_(moments.mean)
            norms[name].running_var.copy_(moments.squares / max(moments.count - 1, 1))
        done += group.names
        passes, more = passes + 1, group.more
    return passes
