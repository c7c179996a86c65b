"""The one executor: ``train``, ``anchor`` and ``validate`` at a site."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairflare import __version__
from fairflare.exchange.wire import (
    STATUS_FAILED,
    STATUS_OK,
    TASK_ANCHOR,
    TASK_TRAIN,
    TASK_VALIDATE,
    clean_state,
    meta_of,
    reply_model,
)
from fairflare.flare.isolation import perform_isolated
from fairflare.flare.site import SiteReply, SiteTask, SiteWorker, safe_name
from fairflare.methods.base import LocalTraining, SiteError

if TYPE_CHECKING:
    from fairflare.tasks.base import Task

SITE_FILE = "fairflare.json"
TASKS = (TASK_TRAIN, TASK_ANCHOR, TASK_VALIDATE)


def read_site_file(workspace: Any, identity: str) -> dict[str, Any]:
    """The private settings of a site or of the server: ``local/fairflare.json`` of its FLARE workspace.

    A block ``"sites": {name: {...}}`` overrides for one name, so that one file serves all sites of a simulator.

    Raises:
        SiteError: not a JSON object (names the file's place, not its content).
    """
    path = Path(workspace.get_file_path_in_site_config(SITE_FILE))
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise SiteError(
            f"site {identity!r}: {path} is not readable JSON: {e}",
            public=f"site {identity!r}: local/{SITE_FILE} is not readable JSON",
        ) from e
    blocks = settings.get("sites", {}) if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(blocks, Mapping):
        raise SiteError(f"site {identity!r}: local/{SITE_FILE} must hold a JSON object (and 'sites' in it another)")
    own = blocks.get(identity, {})
    if not isinstance(own, Mapping):
        raise SiteError(f"site {identity!r}: 'sites.{identity}' in local/{SITE_FILE} must be a JSON object")
    return {**{k: v for k, v in settings.items() if k != "sites"}, **own}


def decode_task(task_name: str, model: FLModel, site: str) -> tuple[SiteTask, str]:
    """The server's request and the experiment's id.

    Raises:
        SiteError: the server runs another version.
    """
    meta = meta_of(model)
    server_version = str(meta.get("version"))
    if server_version.split(".")[:2] != __version__.split(".")[:2]:
        raise SiteError(
            f"site {site!r} has fairflare {__version__}, the server {server_version}; install the same version"
        )
    request = SiteTask(
        name=task_name,
        state=clean_state(model.params or {}),
        current_round=int(meta["current_round"]),
        num_rounds=int(meta["num_rounds"]),
        seed=int(meta["seed"]),
        directives=dict(meta.get("directives") or {}),
    )
    return request, str(meta.get("experiment") or "")


def encode_reply(reply: SiteReply, current_round: int | None) -> FLModel:
    """A site's answer as a message."""
    return reply_model(
        update=reply.update,
        metrics=reply.metrics,
        meta={
            "version": __version__,
            "status": reply.status,
            "reason": reply.reason,
            "report": reply.report,
            "stats": reply.stats,
            "num_samples": reply.num_samples,
        },
        current_round=current_round,
        num_steps=reply.num_steps,
    )


class SiteExecutor(Executor):
    """Answers the server's tasks with the method's site half on the task's data.

    Args:
        task: what is learned; see :class:`fairflare.tasks.base.Task`.
        training: the method's site half.
        isolate: do each task in a child process. The site's own ``isolate`` setting wins.

    The site's file ``local/fairflare.json`` says where the data are, and may set ``device``, ``num_threads``,
    ``isolate`` and ``state_root``; the job cannot override it.
    """

    def __init__(self, task: Task, training: LocalTraining, isolate: bool = False) -> None:
        super().__init__()
        self.task = task
        self.training = training
        self.isolate = isolate
        self._settings: dict[str, Any] | None = None
        self._workers: dict[str, SiteWorker] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN and not isinstance(self.training, LocalTraining):
            kind = type(self.training).__name__
            self.system_panic(f"SiteExecutor: training must be a LocalTraining, got {kind}", fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if task_name not in TASKS:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        site = fl_ctx.get_identity_name()
        current_round = None
        try:
            model = FLModelUtils.from_shareable(shareable)
            current_round = model.current_round
            reply = self._answer(task_name, model, site, fl_ctx, abort_signal)
        except SiteError as e:
            self.log_warning(fl_ctx, str(e))
            reply = SiteReply(STATUS_FAILED, reason=e.public)
        except Exception as e:
            # An exception would reach the server as a bare code, and its text FLARE's uploaded error log.
            self.log_warning(fl_ctx, f"task {task_name} failed: {type(e).__name__}: {e}")
            reply = SiteReply(STATUS_FAILED, reason=f"site {site!r}: {task_name} failed with {type(e).__name__}")
        if abort_signal.triggered:
            return make_reply(ReturnCode.TASK_ABORTED)
        if reply.status == STATUS_OK:
            self.log_info(fl_ctx, f"{task_name}, round {current_round}: {_brief(reply)}")
        else:
            self.log_warning(fl_ctx, f"{task_name}, round {current_round}: {reply.status}: {reply.reason}")
        answer = encode_reply(reply, current_round)
        return FLModelUtils.to_shareable(answer)

    def _answer(self, task_name: str, model: FLModel, site: str, fl_ctx: FLContext, abort_signal: Signal) -> SiteReply:
        request, experiment = decode_task(task_name, model, site)
        if self._settings is None:
            self._settings = read_site_file(fl_ctx.get_engine().get_workspace(), site)
        arguments = self._worker_arguments(site, experiment, self._settings, fl_ctx)
        if bool(self._settings.get("isolate", self.isolate)):
            return perform_isolated(arguments, request, lambda: bool(abort_signal.triggered))
        key = str(arguments["state_folder"])
        if key not in self._workers:
            self._workers[key] = SiteWorker(**arguments)
        return self._workers[key].perform(request, lambda: bool(abort_signal.triggered))

    def _worker_arguments(
        self, site: str, experiment: str, settings: dict[str, Any], fl_ctx: FLContext
    ) -> dict[str, Any]:
        workspace = fl_ctx.get_engine().get_workspace()
        if experiment:
            # Outlives the job, so that a resubmitted one goes on.
            root = Path(settings.get("state_root") or Path(workspace.get_root_dir()) / "fairflare_state")
            folder = root / safe_name(experiment) / safe_name(site)
        else:
            folder = Path(workspace.get_run_dir(fl_ctx.get_job_id())) / "fairflare_state"
        # Simulated sites share a machine, and the number of threads changes the last bits of a sum.
        simulated = bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False))
        return {
            "site": site,
            "task": self.task,
            "training": self.training,
            "settings": settings,
            "state_folder": folder,
            "num_threads": 1 if simulated else None,
        }


def _brief(reply: SiteReply) -> str:
    parts = [f"{k} {v:.4f}" for k, v in sorted(reply.metrics.items())]
    if "train_loss" in reply.stats:
        parts.append(f"train_loss {reply.stats['train_loss']:.4f}")
    parts.append(f"{reply.stats.get('seconds', 0):.1f} s")
    return ", ".join(parts)
