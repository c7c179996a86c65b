"""The controller on a pretended network: who is asked, who is left out, when it waits, when it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel

from fairflare import __version__
from fairflare.exchange.wire import reply_model
from fairflare.flare.controller import RoundFailed, RoundsController
from fairflare.flare.tracking import Tracker
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_lwr import FedLWR
from fairflare.reporting.results import RoundRecord
from fairflare.tasks.base import Task

SITES = ["site-1", "site-2", "site-3"]
SILENT = "silent"  # a site that never answers


class Line(Task):
    """One linear layer; nothing is trained here."""

    primary_metric: ClassVar[str] = "dice"

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 1))

    def loss(self, outputs, targets):
        return outputs.mean()

    def evaluate(self, model, batches, device):
        return {"dice": 0.5}

    def open_site(self, site, settings):
        raise AssertionError("not here")


def good(site: str, task: str, model: FLModel) -> FLModel:
    """What a healthy site says; its update depends on its number."""
    number = int(site.split("-")[1])
    meta: dict[str, Any] = {"version": __version__, "status": "ok", "stats": {"train_loss": 1.0 / number}}
    if task == "train":
        update = {k: torch.full_like(v, 0.1 * number) for k, v in model.params.items()}
        meta["num_samples"] = 10 * number
        return reply_model(update=update, metrics={"dice": 0.1 * number}, meta=meta, current_round=model.current_round)
    if task == "anchor":
        meta["report"] = {"layers": ["0"], "cka": [1 - 0.1 * number], "dissimilarity": [0.1 * number]}
        return reply_model(meta=meta, current_round=model.current_round)
    return reply_model(metrics={"dice": 0.2 * number}, meta=meta, current_round=model.current_round)


Behaviour = Callable[[str, str, FLModel], Any]


class Network(RoundsController):
    """The controller with FLARE's transport replaced by threads that call back."""

    def __init__(self, folder: Path, behaviour: Behaviour, *, sites=SITES, aggregator=None, settings=None, **kwargs):
        super().__init__(task=Line(), aggregator=aggregator or FedAvg("uniform"), **kwargs)
        self.behaviour, self.sites, self.folder = behaviour, sites, folder
        self.asked: list[tuple[str, list[str]]] = []
        self.logged: list[str] = []
        self.standing = 0
        local = folder / "local"
        local.mkdir(exist_ok=True)
        (local / "fairflare.json").write_text(json.dumps(settings or {}))
        workspace = SimpleNamespace(
            get_file_path_in_site_config=lambda name: str(local / name),
            get_root_dir=lambda: str(folder),
        )
        self.engine = SimpleNamespace(
            get_clients=lambda: [SimpleNamespace(name=s) for s in self.sites], get_workspace=lambda: workspace
        )
        self.fl_ctx = FLContext()
        self.fl_ctx.set_prop(FLContextKey.CURRENT_RUN, "job", private=True, sticky=False)
        self.abort_signal = Signal()

    def get_run_dir(self):
        path = self.folder / "run"
        path.mkdir(exist_ok=True)
        return str(path)

    def get_app_dir(self):
        return str(self.folder / "app")

    def event(self, event_type):
        pass

    def fire_event_with_data(self, *args, **kwargs):
        pass

    def fire_event(self, *args, **kwargs):
        pass

    def info(self, message):
        self.logged.append(message)

    warning = error = info

    def get_num_standing_tasks(self):
        return self.standing

    def cancel_all_tasks(self, *args, **kwargs):
        self.standing = 0

    def send_model(self, task_name, data, targets, timeout, callback):
        self.asked.append((task_name, list(targets)))
        self.standing = 1
        waiting = set(targets)

        def site_thread(site):
            answer = self.behaviour(site, task_name, data)
            if callable(answer):
                answer = answer()
            if answer is SILENT:
                return
            if isinstance(answer, str):
                self._accept_train_result(site, make_reply(answer), self.fl_ctx)
            else:
                answer.meta["client_name"] = site
                callback(answer)
            waiting.discard(site)
            if not waiting:
                self.standing = 0

        for site in targets:
            threading.Thread(target=site_thread, args=(site,), daemon=True).start()

    @property
    def results(self):
        return json.loads((self.folder / "run" / "fairflare" / "results.json").read_text())


def misbehave(site: str, task: str, what: Any) -> Behaviour:
    """Everyone is healthy but one site in one task."""

    def behaviour(s, t, model):
        if (s, t) != (site, task):
            return good(s, t, model)
        return what(s, t, model) if callable(what) else what

    return behaviour


def test_one_phase_run(tmp_path):
    net = Network(tmp_path, good, num_rounds=2)
    net.run()
    assert net.asked == [("train", SITES), ("train", SITES), ("validate", SITES)]
    assert net.results["status"] == "completed"
    assert net.results["test"] == {s: {"dice": pytest.approx(0.2 * i)} for i, s in enumerate(SITES, 1)}
    torch.manual_seed(0)
    start = Line().build_model().state_dict()
    final = torch.load(tmp_path / "run" / "FL_global_model.pt", weights_only=True)["model"]
    for name, tensor in final.items():  # mean of 0.1, 0.2, 0.3, twice
        torch.testing.assert_close(tensor, start[name] + 0.4, atol=1e-6, rtol=0)


def test_two_phases_ask_exactly_twice(tmp_path):
    net = Network(tmp_path, good, num_rounds=2, aggregator=FedLWR())
    net.run()
    assert [task for task, _ in net.asked] == ["train", "anchor", "train", "anchor", "validate"]
    layer = net.results["rounds"][0]["layers"]["0"]
    assert {s: v["weight"] for s, v in layer.items()} == pytest.approx(
        {"site-1": 1 / 6, "site-2": 2 / 6, "site-3": 3 / 6}
    )


def bad_version(s, t, m):
    reply = good(s, t, m)
    reply.meta["fairflare"]["version"] = "9.0.0"
    return reply


def failed(s, t, m):
    reply = good(s, t, m)
    reply.meta["fairflare"].update(status="failed", reason="site 'site-2': out of memory in train")
    return reply


def bad_metric(s, t, m):
    reply = good(s, t, m)
    reply.metrics["dice"] = 1.5
    return reply


def no_metrics_nan_update(s, t, m):
    reply = good(s, t, m)
    reply.params["0.weight"][0] = float("nan")
    return reply


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (ReturnCode.EXECUTION_EXCEPTION, "site 'site-2' answered EXECUTION_EXCEPTION"),
        (failed, "out of memory in train"),
        (bad_version, "answers with fairflare 9.0.0"),
        (bad_metric, r"metric 'dice' must lie in \[0, 1\], got 1.5"),
        (no_metrics_nan_update, "site 'site-2'.*'0.weight'.*finite"),
    ],
)
def test_bad_answer_costs_one_site_one_round(tmp_path, what, message):
    calls = []

    def behaviour(s, t, model):
        if s == "site-2" and t == "train" and model.current_round == 0:
            calls.append(s)
            return what(s, t, model) if callable(what) else what
        return good(s, t, model)

    net = Network(tmp_path, behaviour, num_rounds=2, aggregator=FedLWR(), min_sites=2)
    net.run()
    assert calls == ["site-2"]
    first, second = net.results["rounds"]
    assert first["accepted"] == ["site-1", "site-3"]
    (left,) = first["left_out"]
    assert (left["site"], left["phase"]) == ("site-2", "train")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(left["reason"])
    assert net.asked[1] == ("anchor", ["site-1", "site-3"])
    assert second["accepted"] == SITES
    assert any("'site-2' left out" in line for line in net.logged)


def test_failed_anchor_keeps_the_model_and_names_the_site(tmp_path):
    net = Network(
        tmp_path, misbehave("site-3", "anchor", ReturnCode.EXECUTION_EXCEPTION), num_rounds=1, aggregator=FedLWR()
    )
    net.run()
    (record,) = net.results["rounds"]
    assert record["accepted"] == SITES
    assert [(x["site"], x["phase"]) for x in record["left_out"]] == [("site-3", "anchor")]
    weights = {s: v["weight"] for s, v in record["layers"]["0"].items()}
    assert weights == pytest.approx({"site-1": 0.1 / 0.45, "site-2": 0.2 / 0.45, "site-3": 0.15 / 0.45})


def test_silent_site_costs_the_timeout_and_is_dropped_after_two(tmp_path):
    net = Network(
        tmp_path, misbehave("site-1", "train", SILENT), num_rounds=4, min_sites=2, train_timeout=0.3, max_missed=2
    )
    started = time.monotonic()
    net.run()
    assert time.monotonic() - started < 2.5
    assert [sites for task, sites in net.asked if task == "train"] == [SITES, SITES, SITES[1:], SITES[1:]]
    reason = net.results["rounds"][0]["left_out"][0]["reason"]
    assert reason.startswith("no answer within 0.")
    assert any("not asked again" in line for line in net.logged)


def test_late_answer_brings_a_dropped_site_back(tmp_path):
    net = Network(
        tmp_path, misbehave("site-1", "train", SILENT), num_rounds=2, min_sites=1, train_timeout=0.1, max_missed=1
    )
    net.run()
    assert net._live_sites() == SITES[1:]
    net.process_result_of_unknown_task(
        SimpleNamespace(name="site-1"), "train", "x", make_reply(ReturnCode.OK), net.fl_ctx
    )
    assert net._live_sites() == SITES


def test_grace_ends_the_wait_for_stragglers(tmp_path):
    net = Network(
        tmp_path, misbehave("site-2", "train", SILENT), num_rounds=1, min_sites=2, train_timeout=60, straggler_grace=0.2
    )
    started = time.monotonic()
    net.run()
    assert 0.15 < time.monotonic() - started < 10
    assert net.results["rounds"][0]["left_out"][0]["site"] == "site-2"


def test_answer_after_the_deadline_is_not_used(tmp_path):
    def slow(s, t, m):
        if s == "site-2" and t == "train":
            return lambda: (time.sleep(0.5), good(s, t, m))[1]
        return good(s, t, m)

    net = Network(tmp_path, slow, num_rounds=1, min_sites=2, train_timeout=0.2)
    net.run()
    time.sleep(0.6)
    assert net.results["rounds"][0]["accepted"] == ["site-1", "site-3"]


def test_too_few_good_sites_fail_with_every_reason(tmp_path):
    def behaviour(s, t, m):
        if t == "train" and s != "site-1":
            return failed(s, t, m) if s == "site-2" else ReturnCode.EXECUTION_EXCEPTION
        return good(s, t, m)

    net = Network(tmp_path, behaviour, num_rounds=2, min_sites=2)
    with pytest.raises(RoundFailed, match=r"round 0, train: 1 usable result.*min_sites=2.*out of memory.*site-3"):
        net.run()
    assert net.results["status"] == "failed"
    assert "out of memory" in net.results["reason"]
    assert net.results["test"] is None
    assert not (tmp_path / "run" / "FL_global_model.pt").exists()


def test_fewer_sites_than_min_sites_fail_before_training(tmp_path):
    net = Network(tmp_path, good, sites=SITES[:1], min_sites=2)
    with pytest.raises(RoundFailed, match=r"1 site\(s\) in the job \(site-1\), min_sites=2"):
        net.run()
    assert net.asked == []


def test_one_site_alone_passes_its_model_through(tmp_path):
    net = Network(tmp_path, good, sites=SITES[:1], num_rounds=1, aggregator=FedLWR())
    net.run()
    assert [task for task, _ in net.asked] == ["train", "validate"]
    assert net.results["rounds"][0]["site_weights"] == {"site-1": 1.0}


def test_abort_leaves_no_result_that_looks_complete(tmp_path):
    net = Network(tmp_path, good, num_rounds=2)

    def behaviour(s, t, m):
        net.abort_signal.trigger("stop")
        return SILENT

    net.behaviour = behaviour
    net.run()
    assert net.results["status"] == "failed"
    assert "aborted" in net.results["reason"]


def test_checkpoint_goes_on_and_refuses_other_settings(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    settings = {"checkpoint_root": str(tmp_path / "kept")}
    whole = Network(tmp_path / "a", good, num_rounds=3)
    whole.run()
    part = Network(tmp_path / "b", good, num_rounds=1, experiment="e1", settings=settings)
    part.run()
    rest = Network(tmp_path / "b", good, num_rounds=3, experiment="e1", settings=settings)
    rest.run()
    assert [m for t, m in rest.asked if t == "train"] == [SITES, SITES]
    models = [torch.load(tmp_path / x / "run" / "FL_global_model.pt", weights_only=True)["model"] for x in "ab"]
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name])
    other = Network(tmp_path / "b", good, num_rounds=3, experiment="e1", seed=1, settings=settings)
    with pytest.raises(ValueError, match=r"'e1' has a checkpoint of other settings.*seed: was 0, is 1"):
        other.run()


def test_damaged_checkpoint_is_named(tmp_path):
    folder = tmp_path / "kept" / "e1"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{")
    net = Network(tmp_path, good, experiment="e1", settings={"checkpoint_root": str(tmp_path / "kept")})
    with pytest.raises(ValueError, match=r"state\.json cannot be read.*another experiment id"):
        net.run()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_rounds": 0}, "num_rounds must be an integer >= 1, got 0"),
        ({"train_timeout": 0}, "train_timeout must be > 0 seconds"),
        ({"straggler_grace": -1}, "straggler_grace must be >= 0"),
        ({"experiment": "../x"}, "name '../x' must be"),
    ],
)
def test_bad_settings_fail_at_once(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RoundsController(task=Line(), aggregator=FedAvg(), **kwargs)


def test_a_report_called_like_a_curve_of_ours_has_a_curve_of_its_own():
    """FedMRL reports ``train_loss``: two values of one tag and step would hide each other."""
    record = RoundRecord(
        current_round=0, sites=["a"], accepted=["a"], validation={"a": {"dice": 0.5}}, train={"a": {"loss": 1.0}},
        site_weights={"a": 1.0}, reports={"a": {"train_loss": 2.0, "weight": 3.0}},
    )  # fmt: skip
    drawn: list[tuple[str, float]] = []
    tracker = Tracker(None)
    tracker.scalar = lambda tag, value, step: drawn.append((tag, value))
    tracker.round(record, "dice")
    tags = [tag for tag, _ in drawn]
    assert len(set(tags)) == len(tags)
    assert dict(drawn)["train_loss/a"] == 1.0
    assert dict(drawn)["report_train_loss/a"] == 2.0
