"""Define the objects of a task at a site: the task (:class:`SiteRun`), the site's stored values, and its errors."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairflare.base.cases.floor import Floor
from fairflare.base.checks import refuse
from fairflare.base.disk.files import save_torch, write_whole
from fairflare.base.machine.computing import Computing, LossScale
from fairflare.exchange.messages import CHANNEL_DROP

if TYPE_CHECKING:
    from fairflare.base.task import SiteData, Task
    from fairflare.exchange.sent_tensors import SentTensors

log = logging.getLogger(__name__)

HALF_DONE = "half_done"  # name under which a site stores a training that can be resumed


class SiteError(RuntimeError):
    """Signal that a site cannot perform its task.

    Args:
        message: text for this site's own log; may name files.
        public: text that the server may know, without file name, path or identifier; default: ``message``.
        skipped: whether the site refuses the task for an expected reason (too little data) and has not failed.
    """

    def __init__(self, message: str, *, public: str | None = None, skipped: bool = False) -> None:
        super().__init__(message)
        self.public = public or message
        self.skipped = skipped


class NotFinite(SiteError):
    """Signal that a training reached a loss or a tensor that is not finite."""


def refuse_at(site: str, problems: Mapping[str, object], kind: type[SiteError] = SiteError) -> None:
    """Raise an error of a ``kind`` with a site's name and the first problem whose condition is true."""
    refuse(problems, lambda text: kind(f"site {site!r}: {text}"))


@dataclass
class SiteStore:
    """Store the values that one site saves during one run, each with the number of the round that wrote the value.

    Values of earlier rounds are kept too. A server that continues from its last checkpoint repeats a round, and a
    server that goes back one round repeats the round before. A repeated round must begin with the same values as when
    it was done the first time.

    Args:
        folder: folder of the run, which is created by the code that takes the run's lock.
        prefix: text in front of the name of every value. A second training at the same site has another prefix, so that
            its values are stored separately.

    Attributes:
        lost: sentences, without a path, about saved values that could not be read and are therefore created anew.
    """

    KEPT = 3

    folder: Path
    prefix: str = ""
    lost: list[str] = field(default_factory=list)

    @property
    def scratch(self) -> Path:
        """Return the folder for temporary files of one task."""
        return self.folder / "scratch"

    def save(self, name: str, current_round: int, value: Mapping[str, Any], kept: int = KEPT) -> None:
        """Write a value whole or not at all; delete values of later rounds, and all but the last ``kept`` values.

        Raises:
            OSError: the disk is full or cannot be written. The earlier values are then still in the store.
        """
        write_whole(self._path(name, current_round), lambda path: save_torch(dict(value), path))
        rounds = self._rounds(name)
        for number in {*rounds} - {*[r for r in rounds if r <= current_round][-kept:]}:
            self._path(name, number).unlink(missing_ok=True)

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None:
        """Return the newest undamaged value called ``name`` of an earlier round; ``None`` when none exists."""
        earlier = [r for r in self._rounds(name) if r < current_round]
        for number in reversed(earlier):
            value = self.load_at(name, number)
            if value is not None:
                if number != earlier[-1]:
                    self.lose(f"that of round {number} is taken")
                return value
        if current_round > 0:
            self.lose(f"no usable {self.prefix}{name} of an earlier round is here: starts with a new one")
        return None

    def load_at(self, name: str, current_round: int) -> dict[str, Any] | None:
        """Return the value called ``name`` of exactly this round; ``None`` when it is missing or damaged."""
        path = self._path(name, current_round)
        if not path.exists():
            return None
        try:
            # torch.load does not verify the checksums that torch.save writes.
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is None:
                return dict(torch.load(path, map_location="cpu", weights_only=True))
            error: object = f"checksum of {damaged}"
        except MemoryError:
            raise
        except Exception as raised:  # zipfile and pickle may raise any exception for a damaged file
            error = f"{type(raised).__name__}: {raised}"
        log.warning("%s is damaged (%s) and not used", path, error)
        self.lose(f"its {self.prefix}{name} of round {current_round} is damaged")
        return None

    def forget(self, current_round: int, *, half_done: bool = True) -> None:
        """Delete the values saved in a failed round; ``half_done``: also its half-done trainings."""
        for path in self.folder.glob(f"*.{current_round:06d}.pt"):
            if half_done or HALF_DONE not in path.name:
                path.unlink(missing_ok=True)

    def clear(self, name: str, *, but: int, after: int = -1) -> None:
        """Delete the values called ``name`` of all rounds later than ``after``, except round ``but``."""
        for number in self._rounds(name):
            if number > after and number != but:
                self._path(name, number).unlink(missing_ok=True)

    def progress(self, current_round: int) -> list[tuple[str, int]]:
        """Return the files of a round's half-done trainings, each with the time when it was saved, in ns.

        The list changes whenever a training makes progress and is saved again.
        """
        files = self.folder.glob(f"*{HALF_DONE}.{current_round:06d}.pt")
        return sorted((path.name, path.stat().st_mtime_ns) for path in files)

    def lose(self, what: str) -> None:
        """Record once that a saved value could not be used; the text is sent to the server and must contain no path."""
        if what not in self.lost:
            self.lost.append(what)

    def _path(self, name: str, current_round: int) -> Path:
        return self.folder / f"{self.prefix}{name}.{current_round:06d}.pt"

    def _rounds(self, name: str) -> list[int]:
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = (re.fullmatch(re.escape(self.prefix + name) + r"\.(\d+)\.pt", p.name) for p in files)
        return sorted(int(match.group(1)) for match in matches if match)


@dataclass
class SiteRun:
    """Store the data of one task at one site for the hooks of a site half. The object lives as long as the task."""

    site: str
    task: Task
    data: SiteData  # iterating over its batches raises TaskStopped when the job is stopped
    device: torch.device
    current_round: int
    num_rounds: int
    seed: int  # seed that is computed from the experiment's seed, the site and the round
    directives: Mapping[str, Any]
    store: SiteStore
    scratch: Path
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the site's private file
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the received model on the validation split
    # During training: number of the epoch, from 0 (with ``local_steps``: of the pass over the data), and the numbers of
    # the training samples in the present batch (None if the data do not know them).
    epoch: int = 0
    batch: list[int] | None = None
    first_pass: bool = True  # False while an optimizer step computes its batch's loss for a second time
    computing: Computing = field(default_factory=Computing)
    scale: LossScale | None = None  # scale of the loss in float16 training
    untold: bool = False  # whether the step is beyond those that the shown records alone would take
    skipped_steps: int = 0  # number of optimizer steps left out because gradients overflowed
    #: Data that the site half passes from one hook to the next. They are stored here and not in the site half, so that
    #: they do not outlive the task: after an out-of-memory error an optimizer stored elsewhere would keep a second
    #: model in memory. The attribute ``moving`` of this object names its attributes that change from step to step:
    #: numbers, lists, tensors, or objects of these.
    own: Any = None
    unlabelled: Any = None  # the term of images without labels (methods/parts/consistency.py); None if there is none
    sent: SentTensors | None = None  # tensors of the model that the site sends; ``None`` if all tensors
    min_cases: int = 1  # least number of cases of a split or class whose values are reported
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)  # tensors that the server sent beside the model
    private: bool = False  # whether the site is under differential privacy: no report is measured without noise
    save_seconds: float = 0  # seconds between two saves of the half-done training; 0: it is not saved

    def task_on(self, split: str) -> Task:
        """Return the task restricted to the structures that a split measures, if its loss and metrics permit this."""
        with suppress(ValueError):
            return self.task.annotating(structures) if (structures := self.data.structures(split)) else self.task
        return self.task

    @property
    def hides(self) -> bool:
        """Return whether classes or findings of the training list have too few cases, so that values are withheld."""
        return self.min_cases > 1 and bool(self.floor.hidden("training"))

    @property
    def floor(self) -> Floor:
        """Return the rule that decides which counts of the site's data may be reported."""
        return Floor(self.data, self.min_cases)

    def drop_channels(self, inputs: torch.Tensor, *step: int) -> torch.Tensor:
        """Return a batch in which random channels of samples are 0, if the server asks for it; one always stays.

        Args:
            inputs: images, (n, channels, ...).
            step: numbers of the step; with the run's seed they decide what is drawn.

        Source:
            Xu et al., "Feasibility and benefits of joint learning from MRI databases", MIDL 2024 (modality drop).
        """
        share, channels = self.directives.get(CHANNEL_DROP, 0.0), self.data.channels
        if not share or not channels:
            return inputs
        drawn = torch.from_numpy(np.random.default_rng([self.seed, *step]).random((len(inputs), len(channels))))
        factors = inputs.new_ones(inputs.shape[:2])
        factors[:, channels] = ((drawn >= share) | (drawn == drawn.amax(1, keepdim=True))).to(factors)
        return inputs * factors.reshape(*factors.shape, *[1] * (inputs.ndim - 2))

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the site's device; the copy to a GPU runs while the GPU computes."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)
