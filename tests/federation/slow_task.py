"""Define a task for tests of the stop: a site whose batches take long, or that ignores signals for a while.

The site's own setting ``slow`` is ``{"folder": ..., "seconds": ..., "deaf": ...}``: at its first training batch the
site writes its process id to ``reached`` there; then every batch takes so many seconds. With ``deaf`` the first one
lasts for ever, and signals that ask politely are ignored.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fairflare.tasks.base import SiteData

from .network import Line


class Slow(SiteData):
    def __init__(self, folder: str, seconds: float, deaf: bool) -> None:
        self.folder, self.seconds, self.deaf = Path(folder), seconds, deaf

    def num_samples(self, split: str) -> int:
        return 400

    def batches(self, split: str, *, batch_size: int, **_: Any) -> Any:
        return self if split == "training" else [(torch.ones(2, 2), torch.ones(2, 1))]

    def __len__(self) -> int:
        return 200

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            if number == 0:
                if self.deaf:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                (self.folder / "partial").write_text(str(os.getpid()))
                (self.folder / "partial").replace(self.folder / "reached")
                if self.deaf:
                    time.sleep(600)
            time.sleep(self.seconds)
            yield torch.ones(2, 2), torch.ones(2, 1)


class SlowTask(Line):
    def open_site(self, site: str, settings: Any) -> SiteData:
        return Slow(**settings["slow"])
