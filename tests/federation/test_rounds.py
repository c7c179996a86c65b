"""Test a run on a pretended network: sites that are asked or left out, waits, failures, and saved state."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import re
import threading
import time
import weakref
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.base.settings import settings
from fairflare.core.fairness import summarize
from fairflare.exchange.messages import Message, says_nothing
from fairflare.exchange.staging import Staging
from fairflare.federation.collecting import phase
from fairflare.federation.collecting.phase import Exchange, Phase, ServerFault
from fairflare.federation.collecting.roster import Roster
from fairflare.federation.collecting.transport import Listener, Question
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.server.rounds import RoundFailed, Stopped
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_lwr import FedLWR
from fairflare.reporting.results import ResultsStore
from tests.tiny import rows

from .network import SILENT, SITES, Heard, Line, Network, Run, good, misbehave, number


def start_model(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Line().build_model().state_dict()


# ------------------------------------------------------------------------------------------------ a whole run


def test_one_phase_run(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2)()
    assert run.net.asked == [("train", SITES), ("train", SITES), ("validate", SITES)]
    results = run.results
    assert results["status"] == "completed"
    assert results["test"] == {s: {"dice": pytest.approx(0.2 * number(s))} for s in SITES}
    assert results["fairness"]["dice"]["worst_site"] == "site-1"
    assert results["fairness"]["dice"]["mean"] == pytest.approx(
        summarize({s: 0.2 * number(s) for s in SITES}).mean, abs=1e-12
    )
    start = start_model()
    final = run.model()
    assert (final["train_conf"]["round"], final["train_conf"]["method"]) == (1, "FedAvg")
    assert final["train_conf"]["task"]["metric"] == "dice"
    for name, tensor in final["model"].items():  # mean of 0.1, 0.2, 0.3, twice
        torch.testing.assert_close(tensor, start[name] + 0.4, atol=1e-6, rtol=0)


def test_what_a_round_records(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=1, rule=FedAvg(weighting="samples"))()
    (record,) = run.results["rounds"]
    assert record["sites"] == record["accepted"] == SITES
    assert record["left_out"] == []
    assert record["validation"] == {s: {"dice": pytest.approx(0.1 * number(s))} for s in SITES}
    assert record["train"]["site-2"] == {"loss": 0.5, "num_samples": 20, "num_steps": 3, "seconds": 0.5}
    assert record["site_weights"] == pytest.approx({"site-1": 1 / 6, "site-2": 2 / 6, "site-3": 3 / 6})
    model_bytes = 3 * 4
    train, aggregate = record["phases"]
    assert (train["name"], train["asked"], train["answered"]) == ("train", 3, 3)
    assert (train["bytes_out"], train["bytes_in"]) == (3 * model_bytes, 3 * model_bytes)
    assert aggregate["name"] == "aggregate"
    assert [(e["kind"], e.get("phase"), e.get("site")) for e in run.events if e["kind"] != "site"] == [
        ("phase", "check", None),
        ("phase", "train", None),
        ("round_done", None, None),
        ("phase", "validate", None),
    ]
    told = {(e["phase"], e["site"]): e for e in run.events if e["kind"] == "site"}
    assert len(told) == 9
    assert told["train", "site-3"]["metrics"] == {"dice": pytest.approx(0.3)}
    assert told["train", "site-3"]["ok"] is True
    info = run.results["info"]
    assert (info["method"], info["label"], info["job_id"], info["sites"]) == ("FedAvg", "FedAvg", "run", SITES)
    assert (info["model_parameters"], info["model_bytes"]) == (3, 12)
    assert info["config"]["rule"]["args"] == {"weighting": "samples"}


def test_what_the_sites_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2, seed=7, experiment="e1", rule=Told())()
    for task, (name, current_round) in zip(run.net.tasks, [("train", 0), ("train", 1), ("validate", 2)], strict=True):
        assert task.current_round == current_round, name
        assert task.is_update is False
        meta = {k: task.meta[k] for k in ("current_round", "num_rounds", "seed", "experiment", "directives")}
        directives = {"round": current_round, "of": 2, "for": SITES}
        assert meta == {
            "current_round": current_round, "num_rounds": 2, "seed": 7, "experiment": "e1", "directives": directives,
        }  # fmt: skip
    for name, tensor in start_model(7).items():
        assert torch.equal(run.net.tasks[0].params[name], tensor)


@settings
class Told(FedAvg):
    """Define a FedAvg that records its arguments.

    Args:
        x: nothing.
    """

    x: int = 0

    def directives(self, current_round: int, num_rounds: int, sites: Any) -> dict[str, Any]:
        return {"round": current_round, "of": num_rounds, "for": list(sites)}


def test_the_largest_loss_is_the_worst(tmp_path: Path) -> None:
    def with_loss(s: str, n: str, task: Message) -> Message:
        reply = good(s, n, task)
        reply.metrics = rows({"dice": 0.5, "loss": float(number(s))}) if n == "validate" else reply.metrics
        return reply

    loss = Run(tmp_path, with_loss, num_rounds=1)().results["fairness"]["loss"]
    assert (loss["worst_site"], loss["best_site"]) == ("site-3", "site-1")
    assert (loss["worst"], loss["bottom_decile"]) == (3.0, 3.0)


def test_two_phases_ask_exactly_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2, rule=FedLWR())()
    assert [name for name, _ in run.net.asked] == ["train", "anchor", "train", "anchor", "validate"]
    layer = run.results["rounds"][0]["layers"]["0"]
    assert {s: v["weight"] for s, v in layer.items()} == pytest.approx(
        {"site-1": 1 / 6, "site-2": 2 / 6, "site-3": 3 / 6}
    )
    start = start_model()
    for name, tensor in run.net.tasks[1].params.items():  # the anchor is the plain mean
        torch.testing.assert_close(tensor, start[name] + 0.2, atol=1e-6, rtol=0)
    for name, tensor in run.net.tasks[2].params.items():  # sum of k/6 * 0.1 k
        torch.testing.assert_close(tensor, start[name] + 1.4 / 6, atol=1e-6, rtol=0)


def test_one_site_alone_passes_its_model_through(tmp_path: Path) -> None:
    run = Run(tmp_path, sites=SITES[:1], num_rounds=1, rule=FedLWR())()
    assert [name for name, _ in run.net.asked] == ["train", "validate"]
    assert run.results["rounds"][0]["site_weights"] == {"site-1": 1.0}
    for name, tensor in start_model().items():
        torch.testing.assert_close(run.model()["model"][name], tensor + 0.1, atol=1e-7, rtol=0)


def test_listeners_hear_everything_in_order(tmp_path: Path) -> None:
    Run(tmp_path, num_rounds=1, listeners=[heard := Heard()])()
    parts = groupby(heard.told, key=lambda entry: entry[0] == "site")  # these answer in any order
    assert [entry for sites, part in parts for entry in (sorted(part) if sites else part)] == [
        ("phase", "check", 0, None),
        *(("site", "check", 0, site) for site in SITES),
        ("round_started", 0),
        ("phase", "train", 0, None),
        *(("site", "train", 0, site) for site in SITES),
        "before_aggregation",
        ("aggregated", ["0.bias", "0.weight"]),
        ("record", 0, "dice"),
        ("round_done", None, 0, None),
        ("phase", "validate", 1, None),
        *(("site", "validate", 1, site) for site in SITES),
        ("tested", SITES, "dice", 1),
    ]


def test_synthetic_data_are_named_once(tmp_path: Path) -> None:
    def phantom(s: str, n: str, task: Message) -> Message:
        reply = good(s, n, task)
        reply.meta["stats"]["synthetic"] = True
        return reply

    run = Run(tmp_path, misbehave("site-2", "train", phantom), num_rounds=2)()
    assert run.results["info"]["synthetic"] is True
    assert sum("the data are SYNTHETIC" in line for line in run.net.said) == 1
    assert "The data are SYNTHETIC" in run.net.said[-1]  # the table says so too
    assert Run(tmp_path / "b", num_rounds=1)().results["info"]["synthetic"] is False


def test_the_servers_file_goes_to_the_task(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Line does not load initial_weights"):
        Run(tmp_path, server={"initial_weights": "x.pt"})()
    assert "initial_weights" in Run(tmp_path).results["reason"]


# ------------------------------------------------------------------------------------------------ bad answers


def bad_version(s: str, n: str, task: Message) -> Message:
    reply = good(s, n, task)
    reply.meta["version"] = "9.0.0"
    return reply


def failed(s: str, n: str, task: Message) -> Message:
    reply = good(s, n, task)
    reply.meta.update(status="failed", reason=f"site {s!r}: out of memory in {n}")
    return reply


def bad_metric(s: str, n: str, task: Message) -> Message:
    reply = good(s, n, task)
    reply.metrics[0]["value"] = 1.5
    return reply


def nan_update(s: str, n: str, task: Message) -> Message:
    reply = good(s, n, task)
    reply.params["0.weight"][0] = math.nan
    return reply


def nested(s: str, n: str, task: Message) -> Message:
    reply = good(s, n, task)
    reply.params = {"0": {"weight": [1.0]}}
    return reply


def sparse(s: str, n: str, task: Message) -> Message:
    reply = good(s, n, task)
    reply.params["0.weight"] = reply.params["0.weight"].to_sparse()
    return reply


def nothing(s: str, n: str, task: Message) -> Message:
    return Message()


BAD_ANSWERS = [
    ("site 'site-2' answered EXECUTION_EXCEPTION", "site 'site-2' answered EXECUTION_EXCEPTION"),
    (failed, "^site 'site-2': out of memory in train$"),
    (bad_version, "^site 'site-2' answers with fairflare '9.0.0', the server has "),
    (bad_metric, r"^site 'site-2': metric 'dice' must lie in \[0, 1\], got 1.5$"),
    (nan_update, "^site 'site-2'.*'0.weight'.*finite"),
    (nested, "^site 'site-2': tensor '0' is unexpected, the global model has none$"),
    (sparse, "^site 'site-2': tensor '0.weight' must be dense, got one that is torch.sparse_coo$"),
    (nothing, "^site 'site-2' answers with fairflare None, the server has "),
]


@pytest.mark.parametrize(("what", "message"), BAD_ANSWERS)
def test_bad_answer_costs_one_site_one_round(tmp_path: Path, what: Any, message: str) -> None:
    calls = []

    def behaviour(s: str, n: str, task: Message) -> Any:
        if s == "site-2" and n == "train" and task.current_round == 0:
            calls.append(s)
            return what(s, n, task) if callable(what) else what
        return good(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=2, rule=FedLWR(), min_sites=2, max_missed=1)()
    assert calls == ["site-2"]
    first, second = run.results["rounds"]
    assert first["accepted"] == ["site-1", "site-3"]
    assert list(first["validation"]) == list(first["train"]) == ["site-1", "site-3"]
    phase, reason = run.left_out()["site-2"]
    assert phase == "train"
    assert re.search(message, reason), reason
    assert run.net.asked[1] == ("anchor", ["site-1", "site-3"])
    assert second["accepted"] == SITES  # it did answer: not silent, asked again at once
    assert any("'site-2' left out" in line for line in run.net.warned)
    (told,) = [e for e in run.events if e["kind"] == "site" and not e["ok"]]
    assert (told["site"], told["reason"], told["metrics"]) == ("site-2", reason, {})
    start = start_model()
    for name, tensor in run.net.tasks[2].params.items():  # 0.1/0.4 * 0.1 + 0.3/0.4 * 0.3
        torch.testing.assert_close(tensor, start[name] + 0.25, atol=1e-6, rtol=0)


def test_the_same_site_cannot_answer_twice_nor_another_one_uninvited(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=1)
    ask = run.net.ask
    given: list[bool] = []

    def meddle(question: Question) -> None:
        for asked, answering in (("site-9", "site-9"), ("site-1", "site-1"), ("site-1", "site-3")):
            check = question.name == "check"
            answer = says_nothing() if check else good(answering, question.name, question.task)
            given.append(question.hand_over(asked, answer))
        ask(replace(question, sites=question.sites[1:]))

    run.net.ask = meddle  # type: ignore[method-assign]
    run()
    assert given == [False, True, False] * 3
    assert run.results["rounds"][0]["accepted"] == SITES
    assert run.results["rounds"][0]["train"]["site-1"]["num_samples"] == 10


def test_failed_anchor_keeps_the_model_and_names_the_site(tmp_path: Path) -> None:
    run = Run(tmp_path, misbehave("site-3", "anchor", "site 'site-3' answered ERROR"), num_rounds=1, rule=FedLWR())()
    (record,) = run.results["rounds"]
    assert record["accepted"] == SITES
    assert run.left_out() == {"site-3": ("anchor", "site 'site-3' answered ERROR")}
    weights = {s: v["weight"] for s, v in record["layers"]["0"].items()}
    assert weights == pytest.approx({"site-1": 0.1 / 0.45, "site-2": 0.2 / 0.45, "site-3": 0.15 / 0.45})


def test_nobody_reports_about_the_anchor_and_the_round_goes_on_with_equal_weights(tmp_path: Path) -> None:
    """Check that the round continues, for instance when a site's filter removes messages without a model."""

    def behaviour(s: str, n: str, task: Message) -> Any:
        return f"site {s!r} answered ERROR" if n == "anchor" else good(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=1, rule=FedLWR(), min_sites=3)()
    (record,) = run.results["rounds"]
    assert {s: v["weight"] for s, v in record["layers"]["0"].items()} == pytest.approx(dict.fromkeys(SITES, 1 / 3))
    assert sorted(run.left_out()) == SITES


def test_too_few_good_sites_fail_with_every_reason(tmp_path: Path) -> None:
    def behaviour(s: str, n: str, task: Message) -> Any:
        if n == "train" and s != "site-1":
            return failed(s, n, task) if s == "site-2" else "site 'site-3' answered ERROR"
        return good(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=2, min_sites=2)
    with pytest.raises(RoundFailed, match=r"round 0, train: 1 .*out of memory.*site-3"):
        run()
    assert run.results["status"] == "failed"
    assert "out of memory" in run.results["reason"]
    assert run.results["test"] is None
    assert not (run.folder / "FL_global_model.pt").exists()
    assert run.staged == []


def test_too_few_good_final_tests_fail(tmp_path: Path) -> None:
    def behaviour(s: str, n: str, task: Message) -> Any:
        reply = good(s, n, task)
        if n == "validate" and s != "site-1":
            reply.metrics = []  # an answer without a metric is none
        return reply

    run = Run(tmp_path, behaviour, num_rounds=1, min_sites=2)
    with pytest.raises(RoundFailed, match=r"round 1, validate: 1 .* of 3 .*site-2"):
        run()
    assert run.results["status"] == "failed"
    assert "carries no metric" in run.results["reason"]


def test_left_out_of_the_final_test_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path, misbehave("site-1", "validate", bad_metric), num_rounds=1, min_sites=2)()
    assert sorted(run.results["test"]) == SITES[1:]
    ((gone),) = run.results["left_out"]
    assert (gone["site"], gone["phase"]) == ("site-1", "validate")
    assert "metric 'dice' must lie in [0, 1], got 1.5" in gone["reason"]
    assert any("validate: site 'site-1' left out" in line for line in run.net.warned)


def test_fewer_sites_than_min_sites_fail_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path, sites=SITES[:1], min_sites=2)
    with pytest.raises(RoundFailed, match=r"1 site.*\(site-1\), min_sites=2; start"):
        run()
    assert run.net.asked == []
    none = Run(tmp_path / "b", sites=[])
    with pytest.raises(RoundFailed, match="no site is connected"):
        none()
    assert none.results["status"] == "failed"


# ------------------------------------------------------------------------------------------------ waiting


def test_silent_site_costs_the_timeout_and_is_dropped_after_two(tmp_path: Path) -> None:
    run = Run(
        tmp_path, misbehave("site-1", "train", SILENT), num_rounds=4, min_sites=2, train_timeout=0.3, max_missed=2
    )
    started = time.monotonic()
    run()
    assert time.monotonic() - started < 2.5
    assert [sites for name, sites in run.net.asked if name == "train"] == [SITES, SITES, SITES[1:], SITES[1:]]
    assert run.left_out()["site-1"][1].startswith("no answer within 0.")
    assert sum("no answer in time in 2 phases running (this one: train) and is" in line for line in run.net.warned) == 1
    assert run.results["rounds"][3]["sites"] == SITES[1:]
    for current in (2, 3):  # named in every round in which it is not asked
        reason = "not asked: no answer in time in 2 phases running"
        assert run.left_out(current) == {"site-1": ("train", reason)}
        assert f"round {current}, train: site 'site-1' left out: {reason}" in run.net.warned
    assert run.net.asked[-1] == ("validate", SITES)  # the final test asks everyone
    assert sorted(run.results["test"]) == SITES


@pytest.mark.parametrize("in_between", [good, lambda *task: "site 'site-1' answered ERROR"], ids=["good", "error"])
def test_an_answer_in_between_begins_the_count_anew(tmp_path: Path, in_between: Any) -> None:
    """Check silence, an answer or an error, silence: never two misses in succession."""

    def behaviour(s: str, n: str, task: Message) -> Any:
        if s == "site-1" and n == "train":
            return in_between(s, n, task) if task.current_round == 1 else SILENT
        return good(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=3, min_sites=2, train_timeout=0.1, max_missed=2)()
    assert [sites for name, sites in run.net.asked] == [SITES] * 4


def test_a_sign_of_life_brings_a_dropped_site_back(tmp_path: Path) -> None:
    def behaviour(s: str, n: str, task: Message) -> Any:
        return SILENT if s == "site-1" else good(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=2, train_timeout=0.1, max_missed=2)()
    roster = run.rounds.roster
    assert roster.live(99) == SITES[1:]
    run.net.seen("site-1")
    assert roster.live(99) == SITES
    roster.record_answer("site-1", "train")
    assert roster.live(0) == SITES


def late(site: str, name: str, run: list[Run]) -> Any:
    """Make a site whose answers to one task always arrive during the next exchange."""

    def behaviour(s: str, n: str, task: Message) -> Any:
        if (s, n) == (site, name):
            return SILENT
        run[0].net.seen(site)
        return good(s, n, task)

    return behaviour


def test_a_site_that_is_always_late_costs_ever_fewer_timeouts(tmp_path: Path) -> None:
    """Check that late answers count as signs of life, while only an answer in time resets the count."""
    runs: list[Run] = []
    runs.append(Run(tmp_path, late("site-1", "train", runs), num_rounds=20, train_timeout=0.05, max_missed=2))
    results = runs[0]().results
    asked = [r["current_round"] for r in results["rounds"] if "site-1" in r["sites"]]
    assert asked == [0, 1, 3, 7, 15]
    for record in results["rounds"]:
        (left,) = record["left_out"]
        assert left["site"] == "site-1"
        assert left["reason"].startswith("no answer within" if record["current_round"] in asked else "not asked: ")
    assert sorted(results["test"]) == SITES


def test_a_site_that_is_always_late_for_the_anchor_alone(tmp_path: Path) -> None:
    runs: list[Run] = []
    runs.append(
        Run(tmp_path, late("site-1", "anchor", runs), num_rounds=10, rule=FedLWR(), anchor_timeout=0.05, max_missed=2)
    )
    results = runs[0]().results
    assert all(record["accepted"] == SITES for record in results["rounds"])  # its models arrive in time
    asked = [k // 2 for k, (name, sites) in enumerate(runs[0].net.asked) if name == "anchor" and sites == SITES]
    assert asked == [0, 1, 3, 7]
    reason = "not asked: no answer in time in 2 anchor phases running"
    assert runs[0].left_out(2) == {"site-1": ("anchor", reason)}


def test_an_answer_in_time_makes_all_good(tmp_path: Path) -> None:
    roster = Run(tmp_path, max_missed=1).rounds.roster
    for _ in range(2):
        roster.record_miss("site-1", "train", 0)
        roster.seen("site-1")
        assert roster.live(1) == SITES[1:]
        assert roster.live(2) == SITES
        roster.record_answer("site-1", "train")
        assert roster.live(1) == SITES
    roster.record_miss("site-1", "train", 5)
    roster.record_miss("site-1", "train", 7)
    roster.seen("site-1")
    assert roster.live(10) == SITES[1:]
    assert roster.live(11) == SITES


def test_the_final_test_does_not_wait_long_for_a_dead_site(tmp_path: Path) -> None:
    def behaviour(s: str, n: str, task: Message) -> Any:
        return SILENT if s == "site-1" else good(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=2, min_sites=2, train_timeout=0.1, validate_timeout=120, max_missed=1)
    started = time.monotonic()
    run()
    assert time.monotonic() - started < 30
    (left,) = run.results["left_out"]
    assert left["reason"].startswith("no answer within")
    # One that has shown up is waited for.
    slow = Run(
        tmp_path / "b", behaviour, num_rounds=2, min_sites=2, train_timeout=0.1, validate_timeout=1, max_missed=1
    )
    slow.rounds.roster.record_miss("site-1", "train", 0)
    slow.net.behaviour = late("site-1", "validate", [slow])
    slow.rounds.run()
    assert next(p for p in slow.results["phases"] if p["name"] == "validate")["seconds"] >= 1


class Returning(dict[tuple[str, str], Any]):
    """Record a site's silence, where the site shows up right after the record was made."""

    def __init__(self, roster: Roster) -> None:
        super().__init__()
        self.roster = roster
        self.thread: threading.Thread | None = None

    def setdefault(self, key: tuple[str, str], default: Any = None) -> Any:
        found = super().setdefault(key, default)
        self.thread = threading.Thread(target=self.roster.seen, args=(key[0],))
        self.thread.start()
        self.thread.join(0.2)
        return found


def test_a_site_that_comes_back_while_it_is_counted_as_missing(tmp_path: Path) -> None:
    """Check signs of life that come in threads of the transport."""
    roster = Run(tmp_path, max_missed=1).rounds.roster
    counts = roster._patience = Returning(roster)
    roster.record_miss("site-1", "train", 0)
    assert counts.thread is not None
    counts.thread.join(5)
    assert roster.live(2) == SITES


def test_models_that_are_not_needed_any_more_are_let_go(tmp_path: Path) -> None:
    """Check that the anchor is freed before aggregation, and all models but the final one before the test."""
    held: dict[str, int] = {}
    seen: list[weakref.ref[torch.Tensor]] = []

    class Watch(Listener):
        def before_aggregation(self) -> None:
            note("anchor")

        def event(self, kind: str, details: Any) -> None:
            if kind == "phase" and details["phase"] == "validate":
                note("received")

    def note(which: str) -> None:
        gc.collect()
        held[which] = sum(tensor() is not None for tensor in seen)

    class Light(Network):
        """Define a transport that saves no message, like the other transports."""

        def ask(self, question: Question) -> None:
            super().ask(question)
            for thread in self.threads:
                thread.join()
            self.tasks.clear()
            self.threads.clear()
            if question.name == "anchor":
                seen.extend(weakref.ref(tensor) for tensor in question.task.params.values())

    run = Run(tmp_path, num_rounds=1, rule=FedLWR(), listeners=[Watch()])
    run.net.__class__ = Light
    start: list[weakref.ref[torch.Tensor]] = []
    original, know = run.rounds.opening, run.rounds.make_collector

    def begin() -> Any:
        first, state, context = original()
        start.extend(weakref.ref(tensor) for tensor in state.values())
        return first, state, context

    def known(context: Any) -> None:
        know(context)
        finish = run.rounds.tests.finish

        def finished(state: Any) -> None:
            seen[:] = start
            finish(state)

        run.rounds.tests.finish = finished  # type: ignore[method-assign]

    run.rounds.opening, run.rounds.make_collector = begin, known  # type: ignore[assignment, method-assign]
    run()
    assert held == {"anchor": 0, "received": 0}
    assert len(start) == 2


def test_all_are_asked_when_too_few_would_be_left(tmp_path: Path) -> None:
    def behaviour(s: str, n: str, task: Message) -> Any:
        return SILENT if s == "site-1" and task.current_round == 0 else good(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=2, min_sites=2, train_timeout=0.1, max_missed=1)
    run.net.names = SITES[:2]
    with pytest.raises(RoundFailed, match="1 usable"):
        run()
    assert run.rounds.roster.live(1) == SITES[:2]


def test_grace_ends_the_wait_for_stragglers(tmp_path: Path) -> None:
    run = Run(
        tmp_path, misbehave("site-2", "train", SILENT), num_rounds=1, min_sites=2, train_timeout=60, straggler_grace=0.2
    )
    started = time.monotonic()
    run()
    assert 0.15 < time.monotonic() - started < 10
    assert list(run.left_out()) == ["site-2"]


def test_no_grace_for_refused_answers(tmp_path: Path) -> None:
    """Check that the grace starts with ``min_sites`` usable answers, not with so many answers."""

    def behaviour(s: str, n: str, task: Message) -> Any:
        if n != "train":
            return good(s, n, task)
        return {"site-1": good, "site-2": failed, "site-3": late}[s](s, n, task)

    def late(s: str, n: str, task: Message) -> Any:
        return lambda: (time.sleep(0.6), good(s, n, task))[1]

    run = Run(tmp_path, behaviour, num_rounds=1, min_sites=2, train_timeout=30, straggler_grace=0.1)()
    assert run.results["rounds"][0]["accepted"] == ["site-1", "site-3"]


def test_grace_begins_with_enough_answers_not_with_the_phase(tmp_path: Path) -> None:
    """Check that a round that takes all sites longer than the grace leaves out no site that is a little later."""
    seconds = {"site-1": 0.6, "site-2": 0.6, "site-3": 0.9}

    def behaviour(s: str, n: str, task: Message) -> Any:
        if n != "train":
            return good(s, n, task)
        return lambda: (time.sleep(seconds[s]), good(s, n, task))[1]

    run = Run(tmp_path, behaviour, num_rounds=1, min_sites=2, train_timeout=30, straggler_grace=0.55)()
    assert run.results["rounds"][0]["accepted"] == SITES


def test_answer_after_the_deadline_is_not_used(tmp_path: Path) -> None:
    def slow(s: str, n: str, task: Message) -> Any:
        return lambda: (time.sleep(0.5), good(s, n, task))[1]

    run = Run(tmp_path, misbehave("site-2", "train", slow), num_rounds=1, min_sites=2, train_timeout=0.2)()
    for thread in run.net.threads:
        thread.join()
    assert ("train", "site-2", False) in run.net.used
    assert run.results["rounds"][0]["accepted"] == ["site-1", "site-3"]
    assert run.staged == []


# -------------------------------------------------------------------------------------------- abort, server's faults


def test_abort_leaves_no_result_that_looks_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2)
    waiting: list[str] = []

    def behaviour(s: str, n: str, task: Message) -> Any:
        if s != "site-1":
            return good(s, n, task)
        time.sleep(0.1)  # the others are staged by then
        waiting.extend(sorted(path.name for path in run.staged))
        run.net.abort = True
        return lambda: (time.sleep(0.2), good(s, n, task))[1]

    run.net.behaviour = behaviour
    with pytest.raises(Stopped):
        run()
    assert run.results["status"] == "failed"
    assert "aborted" in run.results["reason"]
    assert run.results["rounds"] == []
    for thread in run.net.threads:
        thread.join()
    assert run.net.used[-1] == ("train", "site-1", False)
    assert waiting == ["site-2.safetensors", "site-3.safetensors"]
    assert run.staged == []  # no hospital's model stays, not even one that came too late
    assert not any("silent" in line for line in run.net.warned)


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_taken_once_the_exchange_is_over(broken: bool) -> None:
    """Check transports that were stopped, or that broke, and hand over answers later."""
    asked: list[Question] = []
    taken: list[str] = []

    class Ended(Network):
        def ask(self, question: Question) -> None:
            asked.append(question)
            if broken:
                raise ConnectionError("gone")

    net = Ended(good)
    net.abort = True
    exchange = Exchange(RunSettings(), net, Roster(net, 2, 1), 0.0, lambda kind, **details: None)
    phase = Phase("train", 0, ["site-1"])
    task = Message(params={"w": torch.zeros(1)})
    with pytest.raises(ConnectionError) if broken else contextlib.nullcontext():
        exchange.fill(phase, task, 1.0, lambda _, site, message: taken.append(site) or {})
    assert asked[0].hand_over("site-1", Message()) is False
    assert taken == []
    assert phase.good == {}


def full_disk(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    put = Staging.put

    def limited(self: Staging, name: str, state: Any) -> int:
        if name == site:
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, name, state)

    monkeypatch.setattr(Staging, "put", limited)


def test_a_full_disk_is_the_servers_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the run fails, as leaving that site out would bias the model and blame a hospital."""
    full_disk(monkeypatch, "site-2")
    run = Run(tmp_path, num_rounds=2, min_sites=1)
    started = time.monotonic()
    with pytest.raises(ServerFault, match=r"round 0, train: .*OSError.*No space"):
        run()
    assert time.monotonic() - started < 10
    assert run.results["status"] == "failed"
    assert "No space left on device" in run.results["reason"]
    assert run.results["rounds"] == []
    assert [e["site"] for e in run.events if e["kind"] == "site" and not e["ok"]] == []
    assert not any("site-2" in line for line in run.net.warned)
    assert run.staged == []
    assert len(run.net.asked) == 1


def test_a_log_that_cannot_be_written_ends_the_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = ResultsStore.event

    def limited(self: ResultsStore, kind: str, **details: Any) -> None:
        if kind == "site" and details["site"] == "site-2":
            raise OSError(errno.ENOSPC, "No space left on device")
        event(self, kind, **details)

    monkeypatch.setattr(ResultsStore, "event", limited)
    run = Run(tmp_path, num_rounds=1)
    with pytest.raises(ServerFault, match="No space left"):
        run()
    assert run.results["status"] == "failed"


def test_results_that_cannot_be_written_do_not_hide_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(self: ResultsStore, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ResultsStore, "finish", limited)
    run = Run(tmp_path, failed, num_rounds=1)
    with pytest.raises(RoundFailed, match="out of memory"):
        run()
    assert any("the results cannot be written" in line for line in run.net.warned)


@settings
class Broken(Rule):
    """Define a rule with a bug.

    Args:
        x: nothing.
    """

    x: int = 0

    def weigh(self, inputs: RoundInputs) -> Weighing:
        raise KeyError("a bug")


def test_a_bug_in_a_rule_fails_the_run_and_leaves_no_model_behind(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=1, rule=Broken())
    with pytest.raises(KeyError, match="a bug"):
        run()
    assert run.results["status"] == "failed"
    assert "a bug" in run.results["reason"]
    assert run.staged == []


def test_local_models_stay_only_where_asked_for(tmp_path: Path) -> None:
    assert Run(tmp_path / "a", num_rounds=1)().staged == []
    run = Run(tmp_path / "b", num_rounds=2, keep_local_models=True)()
    assert run.staged == []
    for current_round in (0, 1):
        kept = Staging(run.folder / "fairflare" / "local_models" / f"round_{current_round:04d}")
        assert kept.sites() == SITES
    start = start_model()
    for name, tensor in Staging(run.folder / "fairflare" / "local_models" / "round_0000").open("site-3").items():
        torch.testing.assert_close(tensor, start[name] + 0.3, atol=1e-7, rtol=0)


# ------------------------------------------------------------------------------------------------ best model


def scored(by_round: list[float]) -> Any:
    """Let every site measure this value on the model that a round receives."""

    def behaviour(s: str, n: str, task: Message) -> Message:
        reply = good(s, n, task)
        if (n == "train" or "validation" in task.meta["measure"]) and task.current_round < len(by_round):
            measured = {"dice": by_round[task.current_round] + 0.01 * number(s), "loss": 3.0}
            others = [row for row in reply.metrics if row["split"] != "validation"]
            reply.metrics = [*others, *rows(measured, "validation")]
        return reply

    return behaviour


@pytest.mark.parametrize(
    ("by_round", "made"),
    [
        ([0.2, 0.6, 0.4, 0.3], 0),
        ([0.2, 0.4, 0.6, 0.5], 1),
        ([0.2, 0.3, 0.4, 0.5], 2),  # the last one too
        ([0.6, 0.2, 0.4, 0.3], 1),  # never the one that nobody trained
        ([0.4, 0.6, 0.6, 0.3], 1),
        ([0.4, 0.6, 0.6, 0.6], 2),  # of equals the later
    ],
)
def test_the_best_model_is_the_one_that_the_sites_scored_best(tmp_path: Path, by_round: list[float], made: int) -> None:
    run = Run(tmp_path, scored(by_round), num_rounds=3)()
    best = run.model("best_FL_global_model.pt")
    assert best["train_conf"]["round"] == made
    received = run.net.tasks[made + 1].params
    assert best["model"].keys() == received.keys()
    for name, tensor in best["model"].items():
        assert torch.equal(tensor, received[name])


def test_the_best_model_is_remembered_by_a_resumed_run(tmp_path: Path) -> None:
    Run(tmp_path, scored([0.5, 0.7, 0.0, 0.0]), num_rounds=2, experiment="e")()
    first = torch.load(tmp_path / "run" / "best_FL_global_model.pt", weights_only=True)
    assert first["train_conf"]["round"] == 0
    rest = Run(tmp_path, scored([0, 0, 0.6, 0.65]), num_rounds=4, experiment="e")()
    assert rest.rounds.files.best.value == pytest.approx(0.72)
    assert rest.model("best_FL_global_model.pt")["train_conf"]["round"] == 0
    Run(tmp_path, scored([0, 0, 0, 0, 0.8]), num_rounds=5, experiment="e")()
    assert rest.model("best_FL_global_model.pt")["train_conf"]["round"] == 3


# ------------------------------------------------------------------------------------------------ checkpoints


def test_two_phase_resume_is_bit_equal(tmp_path: Path) -> None:
    """Check that the checkpoint has the scores of a site that was silent about the anchor."""

    def behaviour(s: str, n: str, task: Message) -> Any:
        silent = s == "site-3" and n == "anchor" and task.current_round == 2
        return "site 'site-3' answered ERROR" if silent else good(s, n, task)

    whole = Run(tmp_path / "a", behaviour, num_rounds=3, rule=FedLWR())()
    Run(tmp_path / "b", behaviour, num_rounds=2, rule=FedLWR(), experiment="e")()
    rest = Run(tmp_path / "b", behaviour, num_rounds=3, rule=FedLWR(), experiment="e")()
    assert rest.results["rounds"][2]["layers"] == whole.results["rounds"][2]["layers"]
    for name, tensor in whole.model()["model"].items():
        assert torch.equal(tensor, rest.model()["model"][name])


class Wide(Line):
    """Define a user's own task with an argument."""

    def __init__(self, width: int = 1) -> None:
        self.width = width


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"site_half": {"path": "x", "args": {"learning_rate": 1.0}}},
         {"site_half": {"path": "x", "args": {"learning_rate": 2.0}}},
         r"learning_rate: was 1\.0, is 2\.0\)"),
        ({"rule": FedAvg(weighting="uniform")}, {"rule": FedAvg()},
         r"weighting: was 'uniform', is 'samples'\)"),
        ({"task": Wide(1)}, {"task": Wide(2)}, r"\(task\.width: was 1, is 2\)"),
        ({}, {"rule": FedLWR()}, r"rule\.path: was .*FedAvg.*is .*FedLWR"),
        ({}, {"seed": 1}, "seed: was 0, is 1"),
    ],
)  # fmt: skip
def test_resume_refuses(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], message: str) -> None:
    Run(tmp_path, num_rounds=1, experiment="e", **before)()
    other = Run(tmp_path, num_rounds=2, experiment="e", **after)
    with pytest.raises(ValueError, match="'e' has a checkpoint of other settings.*" + message):
        other()
    assert other.net.asked == []
    assert other.results["status"] == "failed"
    rest = Run(tmp_path, num_rounds=2, experiment="e", **before)().results
    assert (rest["info"]["resumed_at_round"], [r["current_round"] for r in rest["rounds"]]) == (1, [0, 1])


def test_without_an_experiment_nothing_outlives_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2, rule=Remembers())()
    assert not (tmp_path / "kept").exists()
    # On the run's own disk, not in the machine's temporary folder, and gone at the end, also of a run that fails.
    assert run.rounds.rule.memory_folder == run.folder / "fairflare" / "memory"
    assert run.rounds.rule.wrote == 2
    assert not run.rounds.rule.memory_folder.exists()
    failed = Run(tmp_path, misbehave("site-1", "validate", SILENT), job="failed", num_rounds=1, rule=Remembers(),
                 min_sites=3, validate_timeout=0.1)  # fmt: skip
    with pytest.raises(RoundFailed):
        failed()
    assert failed.rounds.rule.wrote == 1
    assert not failed.rounds.rule.memory_folder.exists()
    assert sorted(p.name for p in run.folder.iterdir()) == [
        "FL_global_model.pt", "best_FL_global_model.pt", "fairflare",
    ]  # fmt: skip
    kept = Run(tmp_path, num_rounds=1, experiment="e", rule=Remembers())()
    assert kept.rounds.rule.memory_folder == tmp_path / "kept" / "e" / "memory"
    assert (kept.rounds.rule.memory_folder / "0").exists()


@settings
class Remembers(FedAvg):
    """Define a FedAvg that writes a large file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wrote = 0

    def weigh(self, inputs: RoundInputs) -> Weighing:
        assert self.memory_folder is not None
        self.memory_folder.mkdir(parents=True, exist_ok=True)
        (self.memory_folder / str(inputs.current_round)).write_bytes(b"1")
        self.wrote += 1
        return super().weigh(inputs)


# ------------------------------------------------------------------------------------------------ settings


def test_an_experiment_is_no_path() -> None:
    with pytest.raises(ValueError, match=r"^name '\.\./x' must be"):
        RunSettings(experiment="../x")


def test_the_log_says_for_whom_a_phase_waits(tmp_path, monkeypatch):
    """Check that lines come after twice as long each time, so that an hour of training has six lines."""
    monkeypatch.setattr(phase, "SAYS_AFTER", 0.1)
    settings = {"num_rounds": 1, "min_sites": 2, "train_timeout": 1.0}
    run = Run(tmp_path, misbehave("site-2", "train", SILENT), **settings)()
    said = [x for x in run.net.said if "waiting for" in x]
    assert 2 <= len(said) <= 4  # after 0.1, 0.2, 0.4 and 0.8 s
    for text in said:
        assert text.startswith("round 0, train: 2 of 3 site(s) have answered after ")
        assert text.endswith("s; waiting for 'site-2', at most 1 s in all")


def test_nothing_is_said_of_waiting_where_all_answer_soon(tmp_path):
    run = Run(tmp_path, num_rounds=1)()
    assert not [x for x in run.net.said if "waiting for" in x]
