"""Norm statistics of a hospital that took no part in the training, from its own images without labels.

With ``norm_statistics=site`` each site keeps statistics of its own, so a site that comes later has none; and a common
model has the statistics of others' scanners. ``docs/norm_statistics.md`` says what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fairflare.base.disk.files import save_torch, sha256_of, write_whole
from fairflare.base.machine.memory_reuse import reused_memory
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
from fairflare.prediction.predictor import BATCH, Predictor
from fairflare.prediction.saved_model import SavedModel, read_model

LEAST = 2  # pictures: statistics of one are that picture
HELD = 2**29  # bytes of read pictures that stay in memory between the passes


@dataclass
class Adapted:
    """What was measured.

    Attributes:
        predictor: its network has the new statistics.
        norms: names of the batch norms that were measured.
        left: names of the modules whose running statistics are as they were.
        files, pictures: that were read; a volume has several pictures.
        unusable: why a file was not, by file.
    """

    predictor: Predictor
    norms: list[str]
    left: list[str]
    files: int
    pictures: int
    unusable: dict[Path, str] = field(default_factory=dict)


def adapt(predictor: Predictor, files: Sequence[Path]) -> Adapted:
    r"""Give the network's batch norms the statistics of these images: of all of them together, norm after norm.

    Per channel of a norm's input, over all pictures and places: the mean, and the variance

    .. math:: v = \frac{1}{N - 1} \sum_i (x_i - m)^2

    in float64. A norm is measured when those in front of it have their new statistics, as the server does it
    with ``norm_statistics=recalibrated``. No label is read, and no weight changes.

    Args:
        predictor: of :func:`fairflare.prediction.predictor.load_predictor`, ``to_adapt``; its network is changed.
        files: images and volumes.

    Raises:
        ValueError: fewer than two pictures can be read, or a norm's input is not finite (named).
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
            unusable[file] = error.reason or str(error)
            continue
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

    measured: list[str] = []
    try:
        with torch.no_grad(), reused_memory(predictor.device.type):
            recalibrate(predictor.network, batches, measured=measured)
    except Unmeasurable as error:
        raise ValueError(f"{predictor.model.path}: {error} on these images") from error
    left = [*(n for n in registered_names(predictor.network) if n not in measured), *other_running(predictor.network)]
    return Adapted(predictor, measured, left, len(files) - len(unusable), len(pictures), unusable)


def save(found: Adapted, out: Path) -> SavedModel:
    """Write the model with its new statistics, in the form of a run's model file, with what was measured in it.

    Args:
        found: of :func:`adapt`.
        out: the file; is replaced in one step.

    Raises:
        OSError: it cannot be written.
    """
    source = found.predictor.model
    state = {name: tensor.detach().cpu() for name, tensor in found.predictor.network.state_dict().items()}
    note: dict[str, Any] = {
        "pictures": found.pictures,
        "files": found.files,
        "norms": found.norms,
        "left": found.left,
        "source": source.path.name,
        "source_sha256": sha256_of(source.path),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    conf: dict[str, Any] = {"method": source.method, "task": dict(source.record), "adapted": note}
    if source.made is not None:
        conf["round"] = source.made
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, lambda path: save_torch({"model": state, "train_conf": conf}, path))
    return read_model(out)


def recalibrate(
    model: torch.nn.Module,
    batches: Callable[[], Iterable[torch.Tensor]],
    *,
    one_pass: bool = False,
    measured: list[str] | None = None,
) -> int:
    """Set the running statistics of all norms that images reach, from data that are in one place.

    Args:
        model: its buffers are changed.
        batches: gives the batches anew each time.
        one_pass: as :func:`.batch_norms.measure`'s ``by_batch``, all norms in one pass.
        measured: gets the names of the norms.

    Returns:
        Number of passes.
    """
    done = [] if measured is None else measured
    passes, more = 0, True
    norms: dict[str, Any] = dict(running_norms(model))
    while more and norms:
        group = next_group(model, next(iter(batches())), done, all_at_once=one_pass)
        for name, found in measure(model, batches(), group, by_batch=one_pass).items():
            norms[name].running_mean.copy_(found.mean)
            norms[name].running_var.copy_(found.squares / max(found.count - 1, 1))
        done += group.names
        passes, more = passes + 1, group.more
    return passes
