"""A task at a site as its training sees it: the run, what the site keeps, and how a task is refused."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.cases.floor import Floor
from fairflare.base.disk.files import save_torch, write_whole
from fairflare.base.machine.computing import Computing, LossScale

if TYPE_CHECKING:
    from fairflare.base.task import SiteData, Task
    from fairflare.exchange.sent_tensors import SentTensors

log = logging.getLogger(__name__)

HALF_DONE = "half_done"  # in the site's store: a training that may be taken up again


class SiteError(RuntimeError):
    """A task cannot be done at a site.

    Args:
        message: for this site's own log; may name files.
        public: what the server may know: no file name, path or identifier.
        skipped: an expected refusal (too little data), not a failure.
    """

    def __init__(self, message: str, *, public: str | None = None, skipped: bool = False) -> None:
        super().__init__(message)
        self.public = public or message
        self.skipped = skipped


class NotFinite(SiteError):
    """A training came to a loss or a tensor that is no finite number."""


@dataclass
class SiteStore:
    """Keep the values that one site saves during one run, each with the number of the round that wrote it.

    Values of earlier rounds are kept too. A server that continues from its last checkpoint repeats a round, and a
    server that goes back one round repeats the round before. A repeated round must begin with the same values as when
    it was done the first time.

    Args:
        folder: the folder of the run. The code that takes the run's lock creates it.
        prefix: put in front of the name of every value. A second training at the same site has a prefix of its own,
            so that its values are kept apart.

    Attributes:
        lost: sentences, without a path, about saved values that could not be read and begin anew.
    """

    KEPT = 3

    folder: Path
    prefix: str = ""
    lost: list[str] = field(default_factory=list)

    @property
    def scratch(self) -> Path:
        """For files of one task."""
        return self.folder / "scratch"

    def save(self, name: str, current_round: int, value: Mapping[str, Any], kept: int = KEPT) -> None:
        """Write a value whole or not at all; forget those of later rounds, and all but the last ``kept``.

        Raises:
            OSError: the disk is full or cannot be written. The values of before are then still there.
        """
        write_whole(self._path(name, current_round), lambda path: save_torch(dict(value), path))
        rounds = self._rounds(name)
        stale = [r for r in rounds if r > current_round]
        old = [r for r in rounds if r <= current_round][:-kept]
        for number in stale + old:
            self._path(name, number).unlink(missing_ok=True)

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None:
        """Return the newest undamaged value of an earlier round; ``None`` when there is none."""
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
        """Return the value of exactly this round; ``None`` when there is none, or it is damaged."""
        path = self._path(name, current_round)
        if not path.exists():
            return None
        try:
            # torch does not look at the checksums that it writes.
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is None:
                return dict(torch.load(path, map_location="cpu", weights_only=True))
            error: object = f"checksum of {damaged}"
        except MemoryError:
            raise
        except Exception as raised:  # zip and pickle raise what they like for a damaged file
            error = f"{type(raised).__name__}: {raised}"
        log.warning("%s is damaged (%s) and not used", path, error)
        self.lose(f"its {self.prefix}{name} of round {current_round} is damaged")
        return None

    def forget(self, current_round: int, *, half_done: bool = True) -> None:
        """Remove what was saved in a round that came to nothing; ``half_done``: also what it can be taken up from."""
        for path in self.folder.glob(f"*.{current_round:06d}.pt"):
            if half_done or HALF_DONE not in path.name:
                path.unlink(missing_ok=True)

    def clear(self, name: str, *, but: int) -> None:
        """Remove the values of a name, but for one round."""
        for number in self._rounds(name):
            if number != but:
                self._path(name, number).unlink(missing_ok=True)

    def progress(self, current_round: int) -> list[tuple[str, int]]:
        """List the trainings of a round that are half done, and when each was kept, in ns.

        The list differs when a training has gone on.
        """
        found = self.folder.glob(f"*{HALF_DONE}.{current_round:06d}.pt")
        return sorted((path.name, path.stat().st_mtime_ns) for path in found)

    def lose(self, what: str) -> None:
        """Note something that could not be had, once; the server is told (no path in it)."""
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
    """One task at one site, as a site half sees it. It lives as long as the task."""

    site: str
    task: Task
    data: SiteData  # going through their batches ends with TaskStopped when the job is stopped
    device: torch.device
    current_round: int
    num_rounds: int
    seed: int  # of this experiment, site and round
    directives: Mapping[str, Any]
    store: SiteStore
    scratch: Path
    settings: Mapping[str, Any] = field(default_factory=dict)  # the site's private file
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the received model, on the validation split
    # While training: epoch from 0 (with ``local_steps`` the pass), and which training samples the batch holds (None:
    # the data do not say).
    epoch: int = 0
    batch: list[int] | None = None
    first_pass: bool = True  # of the batch's step, which may look at the loss twice
    computing: Computing = field(default_factory=Computing)
    scale: LossScale | None = None  # of the loss, in float16
    skipped_steps: int = 0  # whose gradients overflowed
    #: What the site half keeps from one hook to the next. Here and not on the half, so that nothing outlives the task:
    #: after an out-of-memory an optimizer kept elsewhere would hold a second model. Attributes that change from step to
    #: step are named in its ``moving``: numbers, lists, tensors, or objects of these.
    own: Any = None
    sent: SentTensors | None = None  # which tensors travel; ``None``: all
    min_cases: int = 1  # fewer: nothing of a split, or of a class in it, leaves the site
    save_seconds: float = 0  # so often the half-done round is kept; 0: never

    @property
    def floor(self) -> Floor:
        """What of the data may be told."""
        return Floor(self.data, self.min_cases)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the site's device; to a GPU it travels while that works on."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)
