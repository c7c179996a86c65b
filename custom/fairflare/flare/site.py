"""What a task does at a site: plain functions of (task, model, directives, state folder), without FLARE.

The executor calls :meth:`SiteWorker.perform` in its own process or, with ``isolate``, in a child process whose death
costs one task instead of the whole job.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from fairflare.core.states import difference
from fairflare.exchange.wire import (
    STATUS_FAILED,
    STATUS_OK,
    STATUS_SKIPPED,
    TASK_ANCHOR,
    TASK_TRAIN,
    TASK_VALIDATE,
    clean_state,
)
from fairflare.methods.base import LocalTraining, SiteError, SiteRun

if TYPE_CHECKING:
    from fairflare.tasks.base import SiteData, Task

log = logging.getLogger(__name__)

# Settings of local/fairflare.json that the shell reads; all others belong to the task.
SHELL_SETTINGS = ("sites", "state_root", "checkpoint_root", "num_threads", "device", "isolate")


@dataclass
class SiteTask:
    """One request of the server, decoded."""

    name: str  # train, anchor, validate
    state: dict[str, torch.Tensor]
    current_round: int
    num_rounds: int
    seed: int
    directives: dict[str, Any] = field(default_factory=dict)


@dataclass
class SiteReply:
    """What goes back; ``status`` other than ``"ok"`` carries a reason that names no file."""

    status: str
    reason: str = ""
    update: dict[str, torch.Tensor] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    num_samples: int | None = None
    num_steps: int | None = None


class SiteStore:
    """What a site keeps between tasks, each value with the round that wrote it.

    The value of the round before is kept too: a server that continues from its last checkpoint asks for a round again,
    and that round must start from what it started from the first time.

    Args:
        folder: owned by the site, one per experiment and site.
    """

    KEPT = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, current_round: int, value: Mapping[str, Any]) -> None:
        """Writes atomically; forgets what is older than the last two rounds written, or of a later round."""
        path = self._path(name, current_round)
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        torch.save(dict(value), temporary)
        temporary.replace(path)
        rounds = self._rounds(name)
        stale = [r for r in rounds if r > current_round]
        old = [r for r in rounds if r <= current_round][: -self.KEPT]
        for number in stale + old:
            self._path(name, number).unlink(missing_ok=True)

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None:
        """The newest value written in an earlier round; ``None`` when there is none."""
        earlier = [r for r in self._rounds(name) if r < current_round]
        return self._load(name, earlier[-1]) if earlier else None

    def load_at(self, name: str, current_round: int) -> dict[str, Any] | None:
        """The value written in exactly this round."""
        return self._load(name, current_round) if current_round in self._rounds(name) else None

    def save_model(self, current_round: int, state: Mapping[str, torch.Tensor]) -> None:
        """The local model of a round, for the anchor phase; only the last one is kept."""
        path = self.folder / "local.safetensors"
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        plain = {name: tensor.clone() for name, tensor in clean_state(state).items()}
        save_file(plain, temporary, metadata={"round": str(current_round)})
        temporary.replace(path)
        (self.folder / "local.round").write_text(str(current_round))

    def load_model(self, current_round: int) -> dict[str, torch.Tensor] | None:
        """The local model, ``None`` unless it is of this very round."""
        mark = self.folder / "local.round"
        if not mark.exists() or mark.read_text().strip() != str(current_round):
            return None
        return load_file(self.folder / "local.safetensors")

    def _path(self, name: str, current_round: int) -> Path:
        return self.folder / f"{name}.{current_round:06d}.pt"

    def _rounds(self, name: str) -> list[int]:
        found = (re.fullmatch(re.escape(name) + r"\.(\d+)\.pt", p.name) for p in self.folder.iterdir())
        return sorted(int(m.group(1)) for m in found if m)

    def _load(self, name: str, current_round: int) -> dict[str, Any]:
        return dict(torch.load(self._path(name, current_round), map_location="cpu", weights_only=True))


def round_seed(seed: int, site: str, current_round: int) -> int:
    """A seed for one experiment, site and round; independent of order and process."""
    digest = hashlib.sha256(f"{seed}/{site}/{current_round}".encode()).digest()
    return int.from_bytes(digest[:7], "big") % 2**31


def safe_name(name: str) -> str:
    """A folder name for an experiment or site; refuses what could leave the folder.

    Raises:
        ValueError: empty, or not made of letters, digits, ``.``, ``_``, ``-``, ``@``.
    """
    if not re.fullmatch(r"[A-Za-z0-9_@-][A-Za-z0-9._@-]{0,127}", name):
        raise ValueError(
            f"name {name!r} must be 1 to 128 letters, digits, '.', '_', '-' or '@', and not start with '.'"
        )
    return name


class SiteWorker:
    """Performs tasks at one site; keeps data and network between tasks of one process.

    Args:
        site: name.
        task: what is learned.
        training: the method's site half.
        settings: the site's private settings (``local/fairflare.json``).
        state_folder: of this experiment and site.
    """

    def __init__(
        self,
        site: str,
        task: Task,
        training: LocalTraining,
        settings: Mapping[str, Any],
        state_folder: Path,
        *,
        num_threads: int | None = None,
    ) -> None:
        self.site = site
        self.task = task
        self.training = training
        self.settings = dict(settings)
        self.store = SiteStore(state_folder)
        self.device = pick_device(site, self.settings.get("device"))
        threads = self.settings.get("num_threads", num_threads)
        if threads is not None:
            if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
                raise SiteError(f"site {site!r}: setting 'num_threads' must be an integer >= 1, got {threads!r}")
            torch.set_num_threads(threads)
        self._data: SiteData | None = None
        self._model: torch.nn.Module | None = None

    def perform(self, request: SiteTask, should_stop: Callable[[], bool] = lambda: False) -> SiteReply:
        """Does one task; whatever goes wrong becomes a reply with a reason, and details go to this site's log."""
        jobs = {TASK_TRAIN: self._train, TASK_ANCHOR: self._anchor, TASK_VALIDATE: self._validate}
        started = time.monotonic()
        try:
            if request.name not in jobs:
                raise SiteError(f"site {self.site!r}: unknown task {request.name!r}, known: {sorted(jobs)}")
            reply = jobs[request.name](request, should_stop)
        except SiteError as e:
            log.warning("%s", e)
            return SiteReply(STATUS_SKIPPED if e.skipped else STATUS_FAILED, reason=e.public)
        except (torch.cuda.OutOfMemoryError, MemoryError) as e:
            self._model = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            log.warning("site %s, task %s: out of memory: %s", self.site, request.name, e)
            return SiteReply(
                STATUS_FAILED,
                reason=f"site {self.site!r}: out of memory in {request.name}; lower batch_size or image_size",
            )
        except Exception as e:
            # DataError carries a text for the server; of anything else only the kind may leave the site.
            public = getattr(e, "public", None)
            if public:
                log.warning("%s", e)
            else:
                log.warning("site %s, task %s failed", self.site, request.name, exc_info=e)
            kind = f"site {self.site!r}: {request.name} failed with {type(e).__name__} (details in the site's log)"
            return SiteReply(STATUS_FAILED, reason=public or kind)
        reply.stats["seconds"] = round(time.monotonic() - started, 3)
        return reply

    # -- the three tasks

    def _train(self, request: SiteTask, should_stop: Callable[[], bool]) -> SiteReply:
        run, model = self._open(request, should_stop)
        received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        metrics = self._evaluate(model, run, "validation")
        run.metrics = metrics
        trained = self.training.train(run, model)
        local = clean_state(model.state_dict())
        for name, tensor in local.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise SiteError(
                    f"site {self.site!r}: tensor {name!r} is not finite after training in round "
                    f"{request.current_round}; lower learning_rate or set max_grad_norm"
                )
        report = self.training.report(run, model)
        self.store.save_model(request.current_round, local)
        return SiteReply(
            STATUS_OK,
            update=difference(local, clean_state(received)),
            metrics=metrics,
            report=report,
            stats={
                "train_loss": trained.train_loss,
                "epoch_losses": trained.epoch_losses,
                "synthetic": bool(run.data.synthetic),
            },
            num_samples=trained.num_samples,
            num_steps=trained.num_steps,
        )

    def _anchor(self, request: SiteTask, should_stop: Callable[[], bool]) -> SiteReply:
        kept = self.store.load_model(request.current_round)
        if kept is None:
            raise SiteError(
                f"site {self.site!r} has no local model of round {request.current_round} to compare the anchor with",
                skipped=True,
            )
        run, anchor = self._open(request, should_stop)
        local = self.task.build_model().to(self.device)
        local.load_state_dict(kept)
        return SiteReply(STATUS_OK, report=self.training.report_anchor(run, local, anchor))

    def _validate(self, request: SiteTask, should_stop: Callable[[], bool]) -> SiteReply:
        run, model = self._open(request, should_stop)
        metrics = self._evaluate(model, run, "test")
        for split in run.data.test_splits:
            if split != "test":
                further = self._evaluate(model, run, split)
                metrics.update({f"{split.removeprefix('test_')}/{name}": value for name, value in further.items()})
        return SiteReply(STATUS_OK, metrics=metrics, num_samples=run.data.num_samples("test"))

    # -- pieces

    def _evaluate(self, model: torch.nn.Module, run: SiteRun, split: str) -> dict[str, float]:
        batches = run.data.batches(split, batch_size=self.training.batch_size)
        return self.task.evaluate(model, batches, self.device)

    def _open(self, request: SiteTask, should_stop: Callable[[], bool]) -> tuple[SiteRun, torch.nn.Module]:
        if self._data is None:
            own = {k: v for k, v in self.settings.items() if k not in SHELL_SETTINGS}
            self._data = self.task.open_site(self.site, own)
            log.info("site %s: %s", self.site, self._data.description)
        if self._model is None:
            self._model = self.task.build_model().to(self.device)
        try:
            self._model.load_state_dict(request.state)
        except RuntimeError as e:
            raise SiteError(
                f"site {self.site!r}: the server's model does not fit the task's network here: {e}",
                public=f"site {self.site!r}: the server's model does not fit the task's network at this site; "
                "server and site must run the same job",
            ) from e
        scratch = self.store.folder / "scratch"
        if scratch.exists():  # left by a process that was killed
            shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        run = SiteRun(
            site=self.site,
            task=self.task,
            data=self._data,
            device=self.device,
            current_round=request.current_round,
            num_rounds=request.num_rounds,
            seed=round_seed(request.seed, self.site, request.current_round),
            directives=request.directives,
            store=self.store,
            scratch=scratch,
            should_stop=should_stop,
            settings=self.settings,
        )
        return run, self._model


def pick_device(site: str, wanted: str | None) -> torch.device:
    """The site's ``device`` setting, else the first GPU, else the CPU.

    Raises:
        SiteError: the wanted device does not exist here.
    """
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise SiteError(f"site {site!r}: setting 'device' is {wanted!r}, which is not usable here: {e}") from e
    return device
