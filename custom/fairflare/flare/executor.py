"""Perform the server's tasks at a site as FLARE's executor, and answer tasks of FLARE's own workflows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairflare.base.disk.files import safe_name
from fairflare.base.settings import Flag, settings
from fairflare.base.task import Task
from fairflare.core.cells import values_of
from fairflare.exchange.messages import (
    STATUS_OK,
    TASK_PLAN,
    TASK_TRAIN,
    TASKS,
    SiteReply,
    SiteTask,
    clean_state,
    decode_task,
    encode_reply,
)
from fairflare.federation.site.site_file import DECODED_PLACE, SITE_FILE, read_site_file, setting
from fairflare.federation.site.site_state import SENT, note_sent
from fairflare.federation.site.worker import SiteWorker, refusal
from fairflare.federation.transports.isolation import perform_isolated
from fairflare.flare.messages.wire import decode_model, encode_model
from fairflare.flare.stock_tasks import SUBMIT_MODEL, NotServed, check_submission, is_stock, metrics_of, validation
from fairflare.methods.base.training import LocalTraining
from fairflare.privacy.sums.keys import SiteKeys


@settings
class SiteExecutor(Executor):
    """Perform the server's tasks at a site: train and measure on the site's data as the method's training says.

    Args:
        task: what is learned; see :class:`fairflare.tasks.base.Task`.
        training: the method's site half.
        isolate: do each task in a child process. The site's own ``isolate`` setting wins.

    The site's file ``local/fairflare.json`` names the data folder, and may set ``device``, ``num_threads``,
    ``isolate``, ``state_root`` and ``submit_model``; a job cannot override this file.
    """

    task: Task
    training: LocalTraining
    isolate: Flag = False

    def __post_init__(self) -> None:
        Executor.__init__(self)
        self._settings: dict[str, Any] | None = None
        self._workers: dict[Path, SiteWorker] = {}
        self._asked: SiteTask | None = None  # the last request of FairFlare's controller, without its model
        self._trained: int | None = None  # round of the last successful training
        self._received: Shareable | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Restore the task's model for result filters; ``ConvertWeights`` needs it, and FLARE has removed it.

        At the end of a run remove the site's key for secure sums.
        """
        if event_type == EventType.BEFORE_TASK_RESULT_FILTER and self._received is not None:
            fl_ctx.set_prop(FLContextKey.TASK_DATA, self._received, private=True, sticky=False)
        elif event_type == EventType.AFTER_TASK_RESULT_FILTER:
            self._received = None
            fl_ctx.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)
        elif event_type == EventType.END_RUN and self._asked is not None:
            arguments = self._worker_arguments(fl_ctx.get_identity_name(), self._asked.experiment, fl_ctx)
            SiteKeys(arguments["site"], arguments["state_folder"]).forget()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        self._received = shareable
        if is_stock(task_name, shareable):
            return self._answer_flare(task_name, shareable, fl_ctx, abort_signal)
        if task_name not in (*TASKS, TASK_PLAN):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        site = fl_ctx.get_identity_name()
        current_round = None
        try:
            message = decode_model(FLModelUtils.from_shareable(shareable))
            current_round = message.current_round
            request = decode_task(task_name, message, site)
            self._asked = replace(request, state={})
            reply = self._perform(request, site, fl_ctx, abort_signal)
            if task_name == TASK_TRAIN:
                self._trained = request.current_round if reply.status == STATUS_OK else None
        except Exception as e:
            # If the exception left this method, the server would get a code without a reason, and the exception's text
            # would reach the error log that FLARE uploads.
            reply = refusal(site, task_name, e)
        if abort_signal.triggered:
            return make_reply(ReturnCode.TASK_ABORTED)
        ok = reply.status == STATUS_OK
        text = _brief(reply) if ok else f"{reply.status}: {reply.reason}"
        (self.log_info if ok else self.log_warning)(fl_ctx, f"{task_name}, round {current_round}: {text}")
        return FLModelUtils.to_shareable(encode_model(encode_reply(reply, current_round)))

    def _answer_flare(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answer a task of FLARE's own workflows; a failure becomes a return code, and the site's log has a reason."""
        site = fl_ctx.get_identity_name()
        try:
            if task_name == SUBMIT_MODEL:
                answer = self._local_model(shareable, site, fl_ctx)
            else:
                reply = self._perform(validation(shareable, self._asked), site, fl_ctx, abort_signal)
                answer = metrics_of(reply, self.task.primary_metric)
        except NotServed as error:
            self.log_warning(fl_ctx, f"{task_name}: {error}")
            return make_reply(error.code)
        except Exception as error:
            self.log_warning(fl_ctx, f"{task_name}: {refusal(site, task_name, error).reason}")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        self.log_info(fl_ctx, f"{task_name}, asked by a workflow of FLARE: done")
        return cast(Shareable, answer.to_shareable())

    def _local_model(self, shareable: Shareable, site: str, fl_ctx: FLContext) -> DXO:
        """Return the site's last trained model; no better one is known, as a site validates only received models."""
        arguments = self._worker_arguments(site, self._asked.experiment if self._asked else "", fl_ctx)
        worker = self._worker(arguments)
        check_submission(shareable, worker, self._asked)
        local = None if self._trained is None or self._asked is None else worker.local_model(self._asked, self._trained)
        if local is None or self._asked is None:
            raise NotServed(ReturnCode.EMPTY_RESULT, "this process has trained no model that could be sent")
        note_sent(arguments["sent"], replace(self._asked, name=SUBMIT_MODEL), SiteReply(STATUS_OK, update=local))
        return DXO(DataKind.WEIGHTS, data=clean_state(local))

    def _perform(self, request: SiteTask, site: str, fl_ctx: FLContext, abort_signal: Signal) -> SiteReply:
        arguments = self._worker_arguments(site, request.experiment, fl_ctx)
        if setting(site, arguments["settings"], "isolate", self.isolate):
            return perform_isolated(arguments, request, lambda: bool(abort_signal.triggered))
        return self._worker(arguments).perform(request, lambda: bool(abort_signal.triggered))

    def _worker(self, arguments: dict[str, Any]) -> SiteWorker:
        folder: Path = arguments["state_folder"]
        if folder not in self._workers:
            self._workers[folder] = SiteWorker(**arguments)
        return self._workers[folder]

    def _worker_arguments(self, site: str, experiment: str, fl_ctx: FLContext) -> dict[str, Any]:
        workspace = fl_ctx.get_engine().get_workspace()
        if self._settings is None:
            self._settings = read_site_file(Path(workspace.get_file_path_in_site_config(SITE_FILE)), site)
        settings = self._settings
        root = Path(settings.get("state_root") or Path(workspace.get_root_dir()) / "fairflare_state")
        of_job = Path(workspace.get_run_dir(fl_ctx.get_job_id())) / "fairflare_state"
        return {
            "site": site,
            "task": self.task,
            "training": self.training,
            "settings": settings,
            # The folder of an experiment outlives the job, so that a resubmitted job resumes the experiment.
            "state_folder": root / safe_name(experiment) / safe_name(site) if experiment else of_job,
            # Simulated sites share a machine. One thread each makes sums equal to the last bit everywhere.
            "num_threads": 1 if fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False) else None,
            "decoded": root / DECODED_PLACE / safe_name(site),
            "startup": Path(workspace.get_root_dir()) / "startup",
            "sent": root / SENT / f"{safe_name(site)}.jsonl",
        }


def _brief(reply: SiteReply) -> str:
    shown = [
        *sorted(values_of(reply.metrics).items()),
        *(item for item in reply.stats.items() if item[0] == "train_loss"),
    ]
    return ", ".join([*(f"{k} {v:.4f}" for k, v in shown), f"{reply.stats.get('seconds', 0):.1f} s"])
