"""Define the jobs of ``bench_server_memory.py``: sites that answer at once, and a look at the server's memory.

It travels in the job's ``app/custom``; nothing is trained, so that the sites' processes need little.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairflare import __version__
from fairflare.base.task import Metric, SiteData
from fairflare.base.task import Task as BaseTask
from fairflare.exchange.messages import TASK_TRAIN, TASK_VALIDATE, Message
from fairflare.flare.messages.wire import decode_model, encode_model

MEGABYTES_A_LAYER = 4


class Net(torch.nn.Module):
    """Define a network of ``megabytes`` of float32 in layers of 4 MB, as in ordinary convolutions."""

    def __init__(self, megabytes: int = 60) -> None:
        super().__init__()
        size = MEGABYTES_A_LAYER * 2**20 // 4
        count = megabytes // MEGABYTES_A_LAYER
        self.layers = torch.nn.ParameterList(torch.zeros(size // 1024, 1024) for _ in range(count))


class Task(BaseTask):
    """Define a task with a model and without training."""

    primary_metric = "dice"

    def __init__(self, megabytes: int = 60) -> None:
        self.megabytes = megabytes

    def build_model(self) -> torch.nn.Module:
        return Net(self.megabytes)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="dice", doc="made up", higher_is_better=True),)

    def evaluate(self, model: Any, batches: Any, device: Any) -> dict[str, float]:
        raise NotImplementedError

    def open_site(self, site: str, settings: Any) -> SiteData:
        raise NotImplementedError


class Instant(Executor):
    """Answer when every site is ready to, with an update as large as the model.

    Args:
        meeting: a folder that all sites share.
        sites: how many there are.
    """

    def __init__(self, meeting: str, sites: int) -> None:
        super().__init__()
        self.meeting, self.sites = meeting, sites

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        task = decode_model(FLModelUtils.from_shareable(shareable))
        site = fl_ctx.get_identity_name()
        meta = {"version": __version__, "status": "ok", "num_samples": 1, "num_steps": 1}
        reply = Message(
            meta=meta,
            metrics=[{"metric": "dice", "split": "validation", "value": 0.5}],
            current_round=task.current_round,
        )
        if task_name == TASK_TRAIN:
            reply.params = {name: torch.full_like(torch.as_tensor(value), 0.01) for name, value in task.params.items()}
            reply.is_update = True
        if task_name != TASK_VALIDATE:
            self._meet(f"{task_name}-{task.current_round}", site)
        return FLModelUtils.to_shareable(encode_model(reply))

    def _meet(self, name: str, site: str) -> None:
        folder = Path(self.meeting) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / site).touch()
        end = time.monotonic() + 300
        while len(list(folder.iterdir())) < self.sites and time.monotonic() < end:
            time.sleep(0.01)


class Peak(FLComponent):
    """Write resident sizes of the process in MB: at the start of the run, at its peak, at its end.

    And at the peak while replies come in: from when all sites have the model until the server aggregates.

    Args:
        file: where to.
        meeting, sites: of :class:`Instant`.
    """

    def __init__(self, file: str, meeting: str, sites: int) -> None:
        super().__init__()
        self.file, self.meeting, self.sites = file, meeting, sites
        self.peak = self.replies = 0.0
        self.windows: set[str] = set()
        self.lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            self.start = resident()["VmRSS"]
            self._look()
            threading.Thread(target=self._watch, daemon=True).start()
        elif event_type == AppEventType.BEFORE_AGGREGATION:
            self.replies = max(self.replies, self._look())
        elif event_type == EventType.END_RUN:
            self._look()
            found = {"start": self.start, "peak": self.peak, "replies": self.replies, "end": resident()["VmRSS"]}
            Path(self.file).write_text(json.dumps(found))

    def _look(self) -> float:
        """Return the peak since the last look."""
        with self.lock:
            found = resident()["VmHWM"]
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self.peak = max(self.peak, found)
            return found

    def _watch(self) -> None:
        while True:
            time.sleep(0.02)
            folders = Path(self.meeting).iterdir() if Path(self.meeting).is_dir() else ()
            for folder in folders:
                if folder.name not in self.windows and len(list(folder.iterdir())) == self.sites:
                    self.windows.add(folder.name)
                    self._look()


def resident() -> dict[str, float]:
    """Return the sizes of this process in MB, as Linux counts them."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) / 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}
