"""Test FLARE's transport of a run through FLARE's own code, with its network replaced by threads."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_copy, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.private.fed.simulator.simulator_const import SimulatorConstants

from fairflare import __version__
from fairflare.base.settings import values_of
from fairflare.exchange.messages import BySite, Message, address
from fairflare.federation.plan.site_training import check_halves, training_of
from fairflare.federation.server.rounds import RoundFailed
from fairflare.flare.controller import RoundsController
from fairflare.flare.messages.wire import META_KEY, NUM_STEPS, decode_model, encode_model
from fairflare.flare.tracking import FlareEvents
from fairflare.methods.base.rule import SendsParts
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_lwr import FedLWR
from fairflare.recipes import FairRecipe
from fairflare.reporting.results import RoundRecord
from tests.tiny import rows, run_document

from ..federation.network import SILENT, SITES, Line, good, misbehave


class Server(RoundsController):
    """Run the controller with FLARE's network replaced: sites are threads, results go FLARE's own way back."""

    def __init__(
        self, folder: Path, behaviour: Any = good, local: Any = None, job: str = "job", **settings: Any
    ) -> None:
        super().__init__(**{"task": Line(), "rule": FedAvg(weighting="uniform"), **settings})
        self.behaviour, self.folder = behaviour, folder
        self.sent: list[dict[str, Any]] = []
        self.checked: list[dict[str, Any]] = []  # of ``check``, which sites with a script of their own do not know
        self.ready: Any = make_reply(ReturnCode.TASK_UNKNOWN)
        self.logged: list[tuple[str, str]] = []
        self.events: list[Any] = []
        self.standing = 0
        self.cell: Any = None
        (folder / "local").mkdir(exist_ok=True)
        (folder / "local" / "fairflare.json").write_text(json.dumps(local or {}))
        workspace = SimpleNamespace(
            get_file_path_in_site_config=lambda name: str(folder / "local" / name), get_root_dir=lambda: str(folder)
        )
        self.engine = SimpleNamespace(
            get_clients=lambda: [SimpleNamespace(name=site) for site in SITES[::-1]],
            get_workspace=lambda: workspace,
            get_cell=lambda: self.cell,
        )
        self.fl_ctx = FLContext()
        self.fl_ctx.set_prop(FLContextKey.CURRENT_RUN, job, private=True, sticky=False)
        self.abort_signal = Signal()

    def get_run_dir(self) -> str:
        (self.folder / "run").mkdir(exist_ok=True)
        return str(self.folder / "run")

    def get_app_dir(self) -> str:
        return str(self.folder / "app")

    def event(self, event_type: str) -> None:
        self.events.append(event_type)

    def fire_event_with_data(self, event_type: str, fl_ctx: Any, key: str, data: Any) -> None:
        self.events.append((event_type, key, data))

    def fire_event(self, *args: Any, **kwargs: Any) -> None: ...

    def panic(self, reason: str) -> None:
        self.logged.append(("panic", reason))

    def info(self, message: str) -> None:
        self.logged.append(("info", message))

    def warning(self, message: str) -> None:
        self.logged.append(("warning", message))

    def error(self, message: str) -> None:
        self.logged.append(("error", message))

    def get_num_standing_tasks(self) -> int:
        return self.standing

    def cancel_all_tasks(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("cancelled")
        self.standing = 0

    def send_model(self, task_name: str, data: Any, targets: Any, timeout: Any, callback: Any) -> None:
        task = self._prepare_task(data=data, task_name=task_name, timeout=timeout, callback=callback)
        checks = task_name == "check"
        (self.checked if checks else self.sent).append(
            {"name": task_name, "targets": targets, "timeout": timeout, "data": task.data}
        )
        self.standing = 1
        waiting = set(targets)
        lock = threading.Lock()

        def work(site: str) -> None:
            received = decode_model(FLModelUtils.from_shareable(task.data))
            answer = self.ready if checks else self.behaviour(site, task_name, received)
            if answer is SILENT:
                return
            if isinstance(answer, Message):
                answer = FLModelUtils.to_shareable(encode_model(answer))
            client_task = SimpleNamespace(result=answer, client=SimpleNamespace(name=site), task=task)
            with lock:  # as FLARE does
                self._process_result(client_task, self.fl_ctx)
            waiting.discard(site)
            if not waiting:
                self.standing = 0

        for site in targets:
            threading.Thread(target=work, args=(site,), daemon=True).start()

    @property
    def results(self) -> dict[str, Any]:
        return run_document(self.folder / "run" / "fairflare")

    def said(self, level: str) -> str:
        return "\n".join(text for at, text in self.logged if at == level)


# ------------------------------------------------------------------------------------------------ a run


def test_a_run(tmp_path: Path) -> None:
    server = Server(tmp_path, num_rounds=2, train_timeout=7.2)
    server.run()
    assert [(s["name"], s["targets"]) for s in server.sent] == [
        ("train", SITES), ("train", SITES), ("validate", SITES),
    ]  # fmt: skip
    assert server.sent[0]["timeout"] == 8
    assert server.results["status"] == "completed"
    assert server.results["info"]["job_id"] == "job"
    assert [r["accepted"] for r in server.results["rounds"]] == [SITES, SITES]
    assert "fairness on the sites' test splits" in server.said("info")
    assert "cancelled" not in server.events
    torch.manual_seed(0)
    start = Line().build_model().state_dict()
    final = torch.load(tmp_path / "run" / "FL_global_model.pt", weights_only=True)["model"]
    for name, tensor in final.items():  # mean of 0.1, 0.2, 0.3, twice
        torch.testing.assert_close(tensor, start[name] + 0.4, atol=1e-6, rtol=0)
    assert server.fl_ctx.get_prop(AppConstants.NUM_ROUNDS) == 2


def test_the_model_is_sent_in_turns_while_the_rounds_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the job sends in turns, or memory would grow with the sites, and that a FLARE without is named."""
    asked: list[Any] = []

    @contextlib.contextmanager
    def turns(cell: Any) -> Iterator[bool]:
        asked.append(cell)
        yield False

    monkeypatch.setattr("fairflare.flare.controller.send_in_turns", turns)
    server = Server(tmp_path, num_rounds=1)
    server.run()
    assert len(asked) == 1
    assert "this FLARE sends the model to all sites at once" in server.said("warning")


def test_a_site_that_does_not_know_check_says_nothing_of_its_data(tmp_path: Path) -> None:
    server = Server(tmp_path, num_rounds=1)
    server.run()
    assert [(s["name"], s["targets"], s["timeout"]) for s in server.checked] == [("check", SITES, 600)]
    assert FLModelUtils.from_shareable(server.checked[0]["data"]).params is None
    assert server.results["info"]["said"]["site-1"]["images"] == {}
    assert server.results["status"] == "completed"
    (tmp_path / "other").mkdir()
    other = Server(tmp_path / "other", num_rounds=1, job="other")
    other.ready = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    with pytest.raises(RoundFailed, match="'site-1' answered EXECUTION_EXCEPTION"):
        other.run()


def test_the_expected_sites_are_those_of_the_deploy_map(tmp_path: Path) -> None:
    server = Server(tmp_path, num_rounds=1)
    assert server.expected() == SITES
    for places, wanted in ((["server", *SITES, "site-4"], [*SITES, "site-4"]), (["@ALL"], SITES)):
        server.fl_ctx.set_prop(FLContextKey.JOB_META, {"deploy_map": {"app": places}}, private=True, sticky=False)
        assert server.expected() == wanted


def test_what_a_site_receives(tmp_path: Path) -> None:
    server = Server(tmp_path, num_rounds=1, seed=3, experiment="e")
    server.run()
    model = FLModelUtils.from_shareable(server.sent[0]["data"])
    assert model.params_type == ParamsType.FULL
    assert (model.current_round, model.total_rounds) == (0, 1)
    assert model.meta[META_KEY] == {
        "version": __version__, "experiment": "e", "seed": 3, "current_round": 0, "num_rounds": 1, "directives": {},
        "run": server.results["info"]["run"], "measure": ["test"], "resample": 0,
        "min_cases": 1, "exchange": "all", "makes": [], "rest": "", "sums": {},
    }  # fmt: skip


class Told(FedAvg):
    """Define a rule that sends each site a secret of its own, and all sites a word."""

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        return {"word": "for all", "secret": BySite({site: f"of {site}" for site in sites})}


def test_each_site_receives_its_own_directives_and_no_other_ones(tmp_path: Path) -> None:
    """Check FLARE's copy of the task for each site, with an event; the model is not copied."""
    server = Server(tmp_path, num_rounds=1, rule=Told(weighting="uniform"))
    server.run()
    whole = server.sent[0]["data"]
    broadcast = decode_model(FLModelUtils.from_shareable(whole))
    assert broadcast.meta["directives"] == {"word": "for all", "secret": {}}
    task = Message(broadcast.params, meta={**broadcast.meta, "directives": server.rule.directives(0, 1, SITES)})
    task.by_site = ("secret",)
    server._task = task
    for site in SITES:
        fl_ctx, peer = FLContext(), FLContext()
        peer.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
        fl_ctx.set_peer_context(peer)
        copy = make_copy(whole)
        fl_ctx.set_prop(FLContextKey.TASK_DATA, copy, private=True, sticky=False)
        server.handle_event(EventType.BEFORE_TASK_DATA_FILTER, fl_ctx)
        received = decode_model(FLModelUtils.from_shareable(copy))
        assert received.meta == {**broadcast.meta, "directives": {"word": "for all", "secret": {site: f"of {site}"}}}
        assert (received.current_round, received.is_update) == (broadcast.current_round, broadcast.is_update)
        for name, tensor in received.params.items():
            assert tensor is broadcast.params[name]
    assert decode_model(FLModelUtils.from_shareable(whole)).meta == broadcast.meta  # the one for all is as it was


def test_a_site_gets_its_part_of_one_task_while_the_next_task_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, num_rounds=1, rule=Told(weighting="uniform"))
    server.run()
    copy = make_copy(server.sent[0]["data"])
    told = {"version": __version__, "directives": server.rule.directives(0, 1, SITES)}
    first, following = Message(None, meta=told), Message(None, meta={"version": __version__})
    first.by_site = ("secret",)
    tasks = iter([first])
    monkeypatch.setattr(Server, "_task", property(lambda self: next(tasks, following)), raising=False)
    fl_ctx, peer = FLContext(), FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, SITES[0], private=False, sticky=False)
    fl_ctx.set_peer_context(peer)
    fl_ctx.set_prop(FLContextKey.TASK_DATA, copy, private=True, sticky=False)
    server.handle_event(EventType.BEFORE_TASK_DATA_FILTER, fl_ctx)
    received = decode_model(FLModelUtils.from_shareable(copy))
    assert received.meta["directives"]["secret"] == {SITES[0]: f"of {SITES[0]}"}


class Parted(FedAvg, SendsParts):
    """Send every site tensors of its own; the last site gets none."""

    def begin_round(self, received: Any) -> None: ...

    def each(self, state: Any) -> Any:
        self.made: list[str] = []

        def of(site: str) -> dict[str, torch.Tensor]:
            self.made.append(site)
            return {} if site == SITES[-1] else {"0.bias": torch.full((1,), float(SITES.index(site)))}

        return of


def test_each_site_receives_its_own_tensors_made_when_they_are_sent(tmp_path: Path) -> None:
    server = Server(tmp_path, num_rounds=1, rule=Parted(weighting="uniform"))
    meta = {"version": __version__, "directives": {}}
    server._task = Message(None, meta=meta, current_round=0, each=server.rule.each({}))
    whole = FLModelUtils.to_shareable(encode_model(address(server._task, None), 1))
    assert decode_model(FLModelUtils.from_shareable(whole)).params is None  # what FLARE broadcasts has no model
    for number, site in enumerate(SITES):
        assert server.rule.made == SITES[:number]
        fl_ctx, peer = FLContext(), FLContext()
        peer.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
        fl_ctx.set_peer_context(peer)
        copy = make_copy(whole)
        fl_ctx.set_prop(FLContextKey.TASK_DATA, copy, private=True, sticky=False)
        server.handle_event(EventType.BEFORE_TASK_DATA_FILTER, fl_ctx)
        received = decode_model(FLModelUtils.from_shareable(copy))
        assert (received.meta, received.is_update, received.current_round) == (meta, False, 0)
        if site == SITES[-1]:
            assert received.params is None
        else:
            assert {n: t.tolist() for n, t in received.params.items()} == {"0.bias": [float(number)]}
    assert decode_model(FLModelUtils.from_shareable(whole)).params is None


def test_events_of_a_round(tmp_path: Path) -> None:
    """Check the events that FLARE's own components listen to."""
    server = Server(tmp_path, num_rounds=1)
    server.run()
    named = [e if isinstance(e, str) else e[0] for e in server.events]
    own = [e for e in named if "CONTRIBUTION" not in e.upper()]
    assert own == [
        AppEventType.ROUND_STARTED, AppEventType.BEFORE_AGGREGATION, AppEventType.AFTER_AGGREGATION,
        AppEventType.GLOBAL_BEST_MODEL_AVAILABLE,
    ]  # fmt: skip
    (after,) = [e for e in server.events if isinstance(e, tuple)]
    assert after[1] == AppConstants.AGGREGATION_RESULT
    assert sorted(after[2].params) == ["0.bias", "0.weight"]
    assert server.fl_ctx.get_prop(AppConstants.CURRENT_ROUND) is not None


# ------------------------------------------------------------------------------------------------ what FLARE keeps back


def no_model() -> Shareable:
    return make_reply(ReturnCode.OK)  # without a DXO: nothing to convert


def odd_metrics() -> Shareable:
    result = FLModelUtils.to_shareable(FLModel(params={"w": torch.ones(1)}))
    result["DXO"]["meta"]["initial_metrics"] = [1, 2]
    return result


@pytest.fixture(autouse=True)
def frozen() -> None:
    """Call :func:`gc.unfreeze` after a run under FLARE's controller, so that the next run need not walk all imports."""
    gc.freeze()


@pytest.mark.many(0, 2, 4)
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: make_reply(ReturnCode.EXECUTION_EXCEPTION), "site 'site-2' answered EXECUTION_EXCEPTION"),
        (lambda: make_reply("x\x1b[2J" + "y" * 10**6), "site 'site-2' answered x [2Jyyy"),
        (no_model, "site 'site-2': the message cannot be read: "),
        (odd_metrics, "site 'site-2': the message cannot be read: "),
        (
            lambda: FLModelUtils.to_shareable(FLModel(params={"w": 1})),
            "site 'site-2': the message carries no fairflare",
        ),
        (
            lambda: FLModelUtils.to_shareable(FLModel(metrics={})),
            "site 'site-2': the message carries no fairflare",
        ),
    ],
)
def test_what_holds_no_message_is_a_named_refusal(tmp_path: Path, answer: Any, message: str) -> None:
    """Check results that FLARE keeps from the callback: without a refusal the site would look silent and be dropped."""
    server = Server(
        tmp_path, misbehave("site-2", "train", lambda *_: answer()), num_rounds=2, min_sites=2, max_missed=1,
        train_timeout=30,
    )  # fmt: skip
    started = time.monotonic()
    server.run()
    assert time.monotonic() - started < 15
    for record in server.results["rounds"]:
        assert record["sites"] == SITES
        assert record["accepted"] == ["site-1", "site-3"]
        ((left),) = record["left_out"]
        assert left["site"] == "site-2"
        assert left["reason"].startswith(message)
        assert left["reason"].isprintable()
        assert len(left["reason"]) < 400


def test_silence_ends_by_cancelling(tmp_path: Path) -> None:
    server = Server(tmp_path, misbehave("site-1", "train", SILENT), num_rounds=1, min_sites=2, train_timeout=0.2)
    server.run()
    assert server.events.count("cancelled") == 1
    assert server.results["rounds"][0]["left_out"][0]["reason"].startswith("no answer within 0.")
    graced = Server(
        tmp_path, misbehave("site-1", "train", SILENT), num_rounds=1, min_sites=2, train_timeout=60, straggler_grace=0.1
    )
    started = time.monotonic()
    graced.run()
    assert time.monotonic() - started < 15


def dropped(tmp_path: Path) -> tuple[Server, list[str]]:
    """Return a server whose first site is silent, and the sites that have shown signs of life since."""
    server = Server(
        tmp_path, misbehave("site-1", "train", SILENT), num_rounds=2, min_sites=1, train_timeout=0.1, max_missed=1
    )
    seen: list[str] = []
    server.run()
    assert [s["targets"] for s in server.sent] == [SITES, SITES[1:], SITES]
    watch = server._seen
    server._seen = lambda site: (seen.append(site), watch(site))[1]
    return server, seen


def test_a_late_answer_of_an_unknown_task_is_a_sign_of_life(tmp_path: Path) -> None:
    server, seen = dropped(tmp_path)
    client = SimpleNamespace(name="site-1")
    server.process_result_of_unknown_task(client, "train", "x", make_reply(ReturnCode.OK), server.fl_ctx)
    assert seen == ["site-1"]
    assert "late answer to 'train' is not used" in server.said("info")
    assert server._accept_train_result("site-1", make_reply(ReturnCode.EMPTY_RESULT), server.fl_ctx, True) is False


def test_a_late_answer_in_the_middle_of_a_run_brings_the_site_back(tmp_path: Path) -> None:
    def behaviour(site: str, name: str, task: Message) -> Any:
        if site == "site-1" and task.current_round == 0:
            return SILENT
        if site == "site-2" and task.current_round == 1:
            late = SimpleNamespace(name="site-1")
            server.process_result_of_unknown_task(late, "train", "x", make_reply(ReturnCode.OK), server.fl_ctx)
        return good(site, name, task)

    server = Server(tmp_path, behaviour, num_rounds=3, min_sites=1, train_timeout=0.2, max_missed=1)
    server.run()
    assert [s["targets"] for s in server.sent] == [SITES, SITES[1:], SITES, SITES]


def test_a_site_that_asks_for_work_is_alive(tmp_path: Path) -> None:
    """Check a site that asks for its next task, as FLARE's clients do not send results that are too late."""
    server, seen = dropped(tmp_path)
    server.handle_event(EventType.BEFORE_PROCESS_TASK_REQUEST, server.fl_ctx)
    assert seen == []
    peer = FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False, sticky=False)
    server.fl_ctx.set_peer_context(peer)
    server.handle_event(EventType.BEFORE_PROCESS_TASK_REQUEST, server.fl_ctx)
    assert seen == ["site-1"]


@pytest.mark.parametrize("answer", [lambda: make_reply(ReturnCode.EXECUTION_EXCEPTION), lambda: make_reply("OK")])
def test_a_late_error_is_not_booked_on_the_next_phase(tmp_path: Path, answer: Any) -> None:
    """Check an error that passes FLARE's gate for the first task and is read when the second has begun."""
    tasks: list[Any] = []

    def behaviour(site: str, name: str, task: Message) -> Any:
        if site == "site-1" and task.current_round == 1:
            old = SimpleNamespace(result=answer(), client=SimpleNamespace(name="site-1"), task=tasks[0])
            server._process_result(old, server.fl_ctx)
        return good(site, name, task)

    server = Server(tmp_path, behaviour, num_rounds=2, min_sites=3)
    prepare = server._prepare_task
    server._prepare_task = lambda **given: tasks.append(prepare(**given)) or tasks[-1]  # type: ignore[method-assign]
    server.run()
    assert [r["accepted"] for r in server.results["rounds"]] == [SITES, SITES]
    assert server.results["rounds"][1]["left_out"] == []


def test_a_reconnected_site_is_alive(tmp_path: Path) -> None:
    server, seen = dropped(tmp_path)
    server.handle_event(EventType.CLIENT_RECONNECTED, server.fl_ctx)
    assert seen == []
    server.fl_ctx.set_prop(FLContextKey.RECONNECTED_CLIENT_NAME, "site-1", private=True, sticky=False)
    server.handle_event(EventType.CLIENT_RECONNECTED, server.fl_ctx)
    assert seen == ["site-1"]


# ------------------------------------------------------------------------------------------------ the end of a run


@pytest.mark.parametrize(("job", "panics"), [("f2a5c2b0", False), (SimulatorConstants.JOB_NAME, True)])
def test_abort_fails_the_results_and_the_simulator(tmp_path: Path, job: str, panics: bool) -> None:
    server = Server(tmp_path, num_rounds=2, job=job)

    def behaviour(*_: Any) -> Any:
        server.abort_signal.trigger("stop")
        return SILENT

    server.behaviour = behaviour
    server.run()
    assert server.results["status"] == "failed"
    assert "aborted" in server.results["reason"]
    assert ("aborted" in server.said("panic")) is panics
    assert not (tmp_path / "run" / "fairflare" / "staging").exists()


def test_a_failure_is_logged_and_raised(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda *_: make_reply(ReturnCode.EXECUTION_EXCEPTION), num_rounds=1)
    with pytest.raises(RoundFailed, match="0 usable result"):
        server.run()
    assert "0 usable result" in server.said("error")
    assert server.results["status"] == "failed"
    assert server.said("panic") == ""


def test_checkpoints_lie_where_the_servers_file_says(tmp_path: Path) -> None:
    Server(tmp_path, num_rounds=1, experiment="e1").run()
    assert (tmp_path / "fairflare_checkpoints" / "e1" / "state-000001.json").exists()
    Server(tmp_path, num_rounds=1, experiment="e1", local={"checkpoint_root": str(tmp_path / "kept")}).run()
    assert (tmp_path / "kept" / "e1" / "state-000001.json").exists()


def test_resume_notices_other_settings_at_the_sites(tmp_path: Path) -> None:
    """Check settings of the site half, which only the job's client configuration has."""
    config = tmp_path / "app" / "config" / "config_fed_client.json"
    config.parent.mkdir(parents=True)

    def write(rate: float) -> None:
        training = {"path": "fairflare.methods.base.training.LocalTraining", "args": {"learning_rate": rate}}
        config.write_text(json.dumps({"executors": [{"executor": {"args": {"training": training}}}]}))

    write(0.1)
    Server(tmp_path, num_rounds=1, experiment="e").run()
    write(0.2)
    with pytest.raises(ValueError, match=r"learning_rate: was 0\.1, is 0\.2\)"):
        Server(tmp_path, num_rounds=2, experiment="e").run()
    write(0.1)
    rest = Server(tmp_path, num_rounds=2, experiment="e")
    rest.run()
    assert [s["name"] for s in rest.sent] == ["train", "validate"]


def test_a_setting_edited_in_the_sites_configuration_alone_ends_the_job_before_training(tmp_path: Path) -> None:
    recipe = FairRecipe("fed_ism", num_rounds=1)
    recipe.export(str(tmp_path / "job"))
    config = tmp_path / "app" / "config" / "config_fed_client.json"
    config.parent.mkdir(parents=True)
    exported = json.loads((tmp_path / "job" / "fed_ism" / "app" / "config" / config.name).read_text())
    config.write_text(json.dumps(exported))
    server = Server(tmp_path, num_rounds=1, rule=recipe.plan.rule)
    half, told = server._place().site_half, values_of(recipe.plan.training)  # as in every other way to run
    assert (half["path"], set(half["args"]) - set(told["args"])) == (told["path"], set())
    assert values_of(training_of(half)) == told
    check_halves(server.rule, server._place().site_half, "average")
    exported["executors"][0]["executor"]["args"]["training"]["args"]["rho"] = 0.3
    config.write_text(json.dumps(exported))
    with pytest.raises(ValueError, match=r"rho is 0\.05 at .*0\.3 .*config_fed_client"):
        server.run()
    assert server.sent == []
    assert "rho is 0.05 at the server" in server.results["reason"]


def test_flares_event_of_a_new_best_model(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Listening(Server):
        def event(self, event_type: str) -> None:
            super().event(event_type)
            if event_type == AppEventType.GLOBAL_BEST_MODEL_AVAILABLE:
                seen.append(self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)["weights"])

    server = Listening(tmp_path, num_rounds=2)
    server.run()
    best = torch.load(tmp_path / "run" / "best_FL_global_model.pt", weights_only=True)["model"]
    assert len(seen) == 2  # of equals the later one; never the one that nobody trained
    assert all(torch.equal(seen[-1][name], tensor) for name, tensor in best.items())


# ------------------------------------------------------------------------------------------------ settings and jobs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task_check_period": 0}, "task_check_period.* got 0"),
        ({"experiment": "../x"}, "name '../x' must be"),
        ({"rule": Line()}, "rule must be Rule, got <"),
        ({"task": FedAvg()}, "task must be Task, got <"),
        ({"num_round": 1}, "RoundsController has no .*'num_round'"),
    ],
)
def test_bad_settings_fail_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        RoundsController(**{"task": Line(), "rule": FedAvg(), **given})


# ------------------------------------------------------------------------------------------------ wire and curves


def test_messages_survive_flares_form() -> None:
    sent = Message(
        params={"w": torch.ones(2)}, is_update=True, metrics=rows({"dice": 0.5}), current_round=3,
        meta={"version": __version__, "status": "ok", "num_steps": 4, "report": {"x": 1.0}},
    )  # fmt: skip
    shareable = FLModelUtils.to_shareable(encode_model(sent, 9))
    model = FLModelUtils.from_shareable(shareable)
    assert model.meta[NUM_STEPS] == 4  # FLARE's stock FedAvg weighs with it
    assert model.total_rounds == 9
    got = decode_model(model)
    assert got.params["w"].tolist() == [1.0, 1.0]
    assert (got.is_update, got.metrics, got.current_round) == (True, rows({"dice": 0.5}), 3)
    assert got.meta == sent.meta
    for empty in (Message(meta={}), Message(params={"w": torch.ones(1)}, meta={"a": 1})):
        back = decode_model(FLModelUtils.from_shareable(FLModelUtils.to_shareable(encode_model(empty))))
        assert not back.is_update
        assert back.meta == empty.meta
        assert not back.metrics


def test_steps_of_a_stock_script_are_read() -> None:
    model = FLModel(params={"w": torch.ones(1)}, meta={META_KEY: {"status": "ok"}, NUM_STEPS: b"x"})
    assert decode_model(model).meta == {"status": "ok", "num_steps": b"x"}
    assert decode_model(FLModel(params={"w": 1}, meta={NUM_STEPS: 3})).meta is None


class Drawn(FlareEvents):
    def __init__(self) -> None:
        super().__init__(None)
        self.points: list[tuple[str, float, int]] = []
        self.directions: dict[str, bool] = {"dice": True}
        self.controller = self
        self.fl_ctx = FLContext()

    def fire_event(self, event_type: str, fl_ctx: Any) -> None:
        raise AssertionError("scalar() is replaced")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    from fairflare.flare import tracking

    events = Drawn()

    def send(comp: Any, dxo: Any, fl_ctx: Any, event_type: str, fire_fed_event: bool) -> None:
        assert (event_type, fire_fed_event) == ("analytix_log_stats", False)
        events.points.append((dxo.data["track_key"], dxo.data["track_value"], dxo.data["global_step"]))

    monkeypatch.setattr(tracking, "send_analytic_dxo", send)
    return events


def test_curves_of_a_round(drawn: Drawn) -> None:
    """Check that a report called like a curve of ours has its own curve, as two values of one tag hide each other."""
    record = RoundRecord(
        current_round=4, sites=["a", "b"], accepted=["a", "b"],
        validation={"a": {"dice": 0.5, "loss": 1.0}, "b": {"dice": 0.7}},
        train={"a": {"loss": 1.0}, "b": {"loss": float("nan")}}, site_weights={"a": 0.25, "b": 0.75},
        reports={"a": {"train_loss": 2.0, "weight": 3.0, "label": "text"}}, values={"search_distance": 0.05},
        layers={"conv": {"a": {"cka": 0.9, "weight": 1.0}}},
    )  # fmt: skip
    drawn.round_done(record, "dice")
    assert {step for _, _, step in drawn.points} == {4}
    tags = [tag for tag, _, _ in drawn.points]
    assert len(set(tags)) == len(tags)
    values = {tag: value for tag, value, _ in drawn.points}
    assert values == pytest.approx(
        {
            "train_loss/a": 1.0, "validation_dice/a": 0.5, "validation_dice/b": 0.7, "validation_dice/average": 0.6,
            "validation_dice/std": values["validation_dice/std"], "validation_dice/worst": 0.5, "weight/a": 0.25,
            "weight/b": 0.75, "report_train_loss/a": 2.0, "report_weight/a": 3.0, "search_distance": 0.05,
            "cka/conv/a": 0.9, "weight/conv/a": 1.0,
        }
    )  # fmt: skip
    assert values["validation_dice/std"] == pytest.approx(0.1)


def test_curves_of_the_final_test(drawn: Drawn) -> None:
    drawn.tested({"a": {"dice": 0.2}, "b": {"dice": 0.6}, "c": {"loss": 3.0}}, "dice", 9)
    values = {tag: value for tag, value, step in drawn.points if step == 9}
    assert values == pytest.approx(
        {"test_dice/a": 0.2, "test_dice/b": 0.6, "test_dice/average": 0.4, "test_dice/std": 0.2, "test_dice/worst": 0.2}
    )
    drawn.points.clear()
    drawn.tested({"c": {"loss": 3.0}}, "dice", 9)
    assert drawn.points == []


def test_a_run_draws_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairflare.flare import tracking

    tags: set[str] = set()
    monkeypatch.setattr(tracking, "send_analytic_dxo", lambda _, dxo, *rest, **more: tags.add(dxo.data["track_key"]))
    Server(tmp_path, num_rounds=1, rule=FedLWR()).run()
    assert {"train_loss/site-1", "validation_dice/worst", "weight/0/site-3", "cka/0/site-2"} <= tags
    assert {"test_dice/site-1", "test_dice/average"} <= tags
