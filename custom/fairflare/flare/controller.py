"""Run :class:`fairflare.federation.server.rounds.Rounds` at FLARE's server: a controller sends tasks to the sites."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import ALL_SITES, JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.private.fed.simulator.simulator_const import SimulatorConstants

from fairflare.base.checks import printable
from fairflare.base.disk.temporary import sweep
from fairflare.base.settings import Flag, Positive, field_names, settings, values_of
from fairflare.base.task import Task
from fairflare.exchange.messages import TASK_CHECK, Message, address, clean_meta, says_nothing
from fairflare.federation.collecting.transport import Listener, Question
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds, Stopped
from fairflare.federation.site.script import describe_training
from fairflare.federation.site.site_file import SITE_FILE, read_site_file
from fairflare.flare.messages.memory import job_cell, memory_given_back, replies_on_disk
from fairflare.flare.messages.sending import send_in_turns
from fairflare.flare.messages.wire import META_KEY, TRAINING_KEY, decode_model, encode_model
from fairflare.flare.tracking import FlareEvents
from fairflare.methods.base.reports import shorten_value
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.training import LocalTraining


@settings
class RoundsController(RunSettings, ModelController):
    """Run a method's rounds over FLARE.

    Args:
        task: what is learned; builds the initial model.
        rule: the method's server half.
        training: the site half, which is sent with each task if the sites' own script trains (FLARE's Client API);
            ``None`` if the sites' executor has it.
        task_check_period: seconds between FLARE's looks at a task.
        disk_offload: replies wait on disk (in ``TMPDIR``) until they are taken, not in memory.
    """

    task: Task
    rule: Rule
    training: LocalTraining | None = None
    task_check_period: Positive = 0.05
    disk_offload: Flag = True

    def __post_init__(self) -> None:
        RunSettings.__post_init__(self)
        ModelController.__init__(
            self, persistor_id="", ignore_result_error=True, task_check_period=self.task_check_period
        )
        self._seen: Callable[[str], None] = lambda site: None
        self._task: Message | None = None  # the task that was sent last
        self._collect: Callable[[], None] = lambda: None

    # -- the workflow

    def run(self) -> None:
        """Run all rounds of the job; FLARE calls this. See :class:`fairflare.federation.server.rounds.Rounds`."""
        self.fl_ctx.set_prop(AppConstants.NUM_ROUNDS, self.rounds_in_all, private=True, sticky=False)
        place = self._place()
        for text in sweep():
            self.warning(text)
        try:
            events = FlareEvents(self, self.task.directions())
            offload: AbstractContextManager[bool] = (
                replies_on_disk(self.engine, self.fl_ctx.get_job_id("job")) if self.disk_offload else nullcontext(True)
            )
            with (
                memory_given_back() as self._collect,
                offload as offered,
                send_in_turns(job_cell(self.engine)) as in_turns,
            ):
                if not offered:
                    self.warning("FLARE offers no disk offload here: replies wait in memory")
                if not in_turns:
                    self.warning("this FLARE sends the model to all sites at once: memory grows with their number")
                self.lead(place, [events])
        except Stopped as stopped:
            if self.fl_ctx.get_job_id() == SimulatorConstants.JOB_NAME:
                self.panic(str(stopped))  # without a panic, the simulator would end with exit code 0
            return
        except Exception as error:
            self.error(str(error))
            raise

    def lead(self, place: Place, listeners: Sequence[Listener]) -> None:
        """Lead all rounds of the run at the server, and report their progress to the listeners."""
        run = RunSettings(**{name: getattr(self, name) for name in field_names(RunSettings)})
        Rounds(self.task, self.rule, run, self, place, listeners).run()

    def _place(self) -> Place:
        workspace = self.engine.get_workspace()
        settings = read_site_file(Path(workspace.get_file_path_in_site_config(SITE_FILE)), "server")
        self.task.heed(settings)
        return Place(
            run_dir=Path(self.get_run_dir()),
            experiments=Path(settings.get("checkpoint_root") or f"{workspace.get_root_dir()}/fairflare_checkpoints"),
            job_id=self.fl_ctx.get_job_id(),
            settings=settings,
            site_half=self._site_half(),
            carried=Path(self.get_app_dir()) / "custom",
            apart=True,
        )

    def _site_half(self) -> Any:
        """Return the site half's settings from the job's client configuration, or ``None`` if the server has none."""
        if self.training is not None:
            return values_of(self.training)
        path = Path(self.get_app_dir()) / "config" / "config_fed_client.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))["executors"][0]["executor"]["args"]["training"]
        except (OSError, ValueError, LookupError, TypeError):
            return None

    # -- the transport

    def sites(self) -> list[str]:
        return sorted(client.name for client in self.engine.get_clients())

    def expected(self) -> list[str]:
        """Return the names of the sites in the job's deploy map; if it names all sites, those that are connected."""
        meta = self.fl_ctx.get_prop(FLContextKey.JOB_META)
        places = meta.get(JobMetaKey.DEPLOY_MAP) if isinstance(meta, Mapping) else None
        names = {name for app in (places or {}).values() for name in app if isinstance(name, str)}
        return sorted(names - {"server"}) if names and ALL_SITES not in names else self.sites()

    def ask(self, question: Question) -> None:
        task = question.task
        if self.training is not None:  # the sites' scripts train, and need the method's site half with each task
            task = replace(
                task, meta={**task.meta, TRAINING_KEY: clean_meta(describe_training(self.training, self.task))}
            )
        self._task = task
        self.send_model(
            task_name=question.name,
            data=encode_model(address(task, None), self.rounds_in_all),
            targets=question.sites,
            timeout=math.ceil(question.timeout),
            callback=_Received(question.hand_over),
        )
        end = time.monotonic() + question.timeout
        while self.get_num_standing_tasks() and not self.stopped():
            if question.enough() or time.monotonic() > end:
                self.cancel_all_tasks()
                break
            self._collect()
            time.sleep(min(self.task_check_period, 0.05))

    def stopped(self) -> bool:
        return bool(self.abort_signal.triggered)

    def say(self, text: str, *, warning: bool = False) -> None:
        self.warning(text) if warning else self.info(text)

    def watch(self, seen: Callable[[str], None]) -> None:
        self._seen = seen

    # -- further calls by FLARE: results and events

    def _process_result(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Hand over replies that FLARE keeps from the callback: error replies, and messages that it cannot convert.

        Such a reply goes to the callback of the task that it answers, as meanwhile another task may have begun.
        """
        received = client_task.task.get_prop(AppConstants.TASK_PROP_CALLBACK)
        if (why := _unreadable(client_task.client.name, client_task.result)) and isinstance(received, _Received):
            # A site that trains with its own script need not know the task ``check``.
            site = client_task.client.name
            is_unknown = client_task.task.name == TASK_CHECK and why == _describe_answer(site, ReturnCode.TASK_UNKNOWN)
            received.hand_over(site, says_nothing() if is_unknown else why)
        super()._process_result(client_task, fl_ctx)

    def _accept_train_result(
        self, client_name: str, result: Shareable, fl_ctx: FLContext, is_unknown_task: bool = False
    ) -> bool:
        self.fl_ctx = fl_ctx
        if why := _unreadable(client_name, result):
            self.warning(why)
            return False
        self.fl_ctx.set_prop(AppConstants.TRAINING_RESULT, result, private=True, sticky=False)
        return True

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Log an answer that arrived too late to be used, and note that its site is alive.

        FLARE's clients ask first whether a task is still open, so most late answers are not even sent.
        """
        self._seen(client.name)
        self.info(f"site {client.name!r}: late answer to {shorten_value(task_name)} is not used")

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        name = None
        # Read once, as another thread may meanwhile send the next task.
        task = self._task if event_type == EventType.BEFORE_TASK_DATA_FILTER else None
        if task is not None and (task.by_site or task.each is not None):  # the task has a separate part for each site
            _add_own(task, fl_ctx)
        if event_type == EventType.CLIENT_RECONNECTED:
            name = fl_ctx.get_prop(FLContextKey.RECONNECTED_CLIENT_NAME)
        elif event_type == EventType.BEFORE_PROCESS_TASK_REQUEST:  # the site is idle again and asks for a task
            peer = fl_ctx.get_peer_context()
            name = peer.get_identity_name() if isinstance(peer, FLContext) else None
        if name:
            self._seen(str(name))


@dataclass
class _Received:
    """Hand over the replies to one task, as the callback that FLARE calls for each."""

    hand_over: Callable[[str, Message | str], bool]

    def __call__(self, reply: FLModel) -> bool:
        used = self.hand_over(str((reply.meta or {}).get("client_name")), decode_model(reply))
        reply.params = None  # frees memory, as FLARE holds the message for a while
        return used


def _add_own(task: Message, fl_ctx: FLContext) -> None:
    """Add the part for one site alone to the copy of a task that FLARE made for this site.

    FLARE broadcasts one payload to all sites. The copy shares its tensors; only its envelope is replaced here.
    """
    data = fl_ctx.get_prop(FLContextKey.TASK_DATA)
    whole = from_shareable(data)
    addressed = address(task, fl_ctx.get_peer_context().get_identity_name())
    whole.meta = {**whole.meta, META_KEY: dict(addressed.meta)}
    if task.each is not None and addressed.params is not None:  # the payload for all sites has no tensors
        whole.data_kind, whole.data = DataKind.WEIGHTS, addressed.params
    whole.update_shareable(data)


def _describe_answer(site: str, code: Any) -> str:
    return f"site {site!r} answered {printable(code) if isinstance(code, str) else shorten_value(code)}"


def _unreadable(site: str, result: Shareable) -> str:
    """Return why a site's result holds no readable message; empty if it holds one."""
    try:
        if (code := result.get_return_code()) and code != ReturnCode.OK:
            blocked = ": a filter at the site blocks this answer" if code == ReturnCode.TASK_RESULT_FILTER_ERROR else ""
            return f"{_describe_answer(site, code)}{blocked}"
        FLModelUtils.from_shareable(result)
    except Exception as error:
        return f"site {site!r}: the message cannot be read: {printable(f'{type(error).__name__}: {error}')}"
    return ""
