"""A task at a site as a site half sees it, and how it says that the task cannot be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fairflare.core.computing import Computing, LossScale
from fairflare.core.floor import Floor

if TYPE_CHECKING:
    from fairflare.core.task import SiteData, Task


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


class StateStore(Protocol):
    """What a site keeps between tasks; see :class:`fairflare.federation.site_state.SiteStore`."""

    def save(self, name: str, current_round: int, value: Mapping[str, Any]) -> None: ...

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None: ...

    def load_at(self, name: str, current_round: int) -> dict[str, Any] | None: ...

    def lose(self, what: str) -> None: ...


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
    store: StateStore
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
    #: after an out-of-memory an optimizer kept elsewhere would hold a second model.
    own: Any = None
    min_cases: int = 1  # fewer: nothing of a split, or of a class in it, leaves the site

    @property
    def floor(self) -> Floor:
        """What of the data may be told."""
        return Floor(self.data, self.min_cases)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the site's device; to a GPU it travels while that works on."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)
