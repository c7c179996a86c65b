"""Test the end of a run on a pretended network: final test, best model, last models, and both halves' settings."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fairflare.base.task import LOSS, Metric
from fairflare.exchange.messages import Message
from fairflare.federation.collecting import final_test
from fairflare.federation.collecting.final_test import mean_of
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.record.best_model import BestModel
from fairflare.federation.server.rounds import RoundFailed
from fairflare.methods.fed_ism import FedISM
from fairflare.methods.fed_lwr import FedLWR
from fairflare.reporting.table import fairness_table
from tests.tiny import VALIDATED, rows
from tests.unit.report_runs import read

from .network import SILENT, SITES, Behaviour, Line, Run, good, misbehave, number

HALVES = "fairflare.methods.fed_ism.SharpnessAwareTraining"


def table(run: Run) -> str:
    return fairness_table(read(**run.results), width=80)


# ------------------------------------------------------------------------------------------------ who is in it


def undefined(*names: str) -> Behaviour:
    """Return the answer of a site whose metrics are not finite."""

    def answer(s: str, n: str, task: Message) -> Message:
        reply, split = good(s, n, task), "validation" if n == "train" else "test"
        undefined = rows({"loss": 1.0, **dict.fromkeys(names, math.nan)}, split)
        places = [(row["metric"], row["split"]) for row in undefined]
        reply.metrics = [row for row in reply.metrics if (row["metric"], row["split"]) not in places] + undefined
        return reply

    return answer


def test_a_metric_that_is_not_finite_keeps_its_site_in_the_table(tmp_path: Path) -> None:
    run = Run(tmp_path, misbehave("site-1", "validate", undefined("dice")), num_rounds=1, min_sites=2)()
    results = run.results
    assert results["test"]["site-1"] == {"dice": None, "loss": 1.0}
    dice = results["fairness"]["dice"]
    assert (dice["num_sites"], dice["excluded"], dice["worst_site"]) == (2, ["site-1"], "site-2")
    assert dice["mean"] == pytest.approx(0.5)
    assert results["fairness"]["loss"]["excluded"] == SITES[1:]
    assert (dice["higher_is_better"], results["fairness"]["loss"]["higher_is_better"]) == (True, False)
    shown = table(run)
    assert "Average and spread of Dice are over 2 of 3 sites, without site-1 (undefined there)." in " ".join(
        shown.split()
    )
    assert "site-1" in [line.split()[0] for line in shown.splitlines() if line]
    assert any("site 'site-1': its 'dice' is not finite" in line for line in run.net.warned)
    assert [name for name, _ in run.net.asked] == ["train", "validate"]  # asking again would not help


def test_a_site_without_a_finite_metric_is_no_usable_result(tmp_path: Path) -> None:
    run = Run(tmp_path, misbehave("site-1", "validate", undefined("dice")), num_rounds=1, min_sites=3)
    with pytest.raises(RoundFailed, match=r"2 usable .* of 3 .*'dice' is not finite"):
        run()
    nothing = Run(
        tmp_path / "b", misbehave("site-1", "validate", undefined("dice", "loss", VALIDATED + "dice")), num_rounds=1
    )()
    ((left),) = nothing.results["left_out"]
    assert "no metric that is finite (not finite: dice, loss" in left["reason"]
    assert nothing.results["fairness"]["dice"]["excluded"] == ["site-1"]


def once(answer: Any) -> Any:
    """Answer the first time with this, then as a healthy site."""
    given: list[str] = []

    def behaviour(s: str, n: str, task: Message) -> Any:
        given.append(s)
        return good(s, n, task) if len(given) > 1 else answer

    return behaviour


@pytest.mark.parametrize("answer", ["site 'site-1' answered EXECUTION_EXCEPTION", SILENT])
def test_who_failed_or_was_silent_is_asked_once_more(tmp_path: Path, answer: Any) -> None:
    run = Run(tmp_path, misbehave("site-1", "validate", once(answer)), num_rounds=1, min_sites=2, validate_timeout=0.3)
    results = run().results
    assert run.net.asked[1:] == [("validate", SITES), ("validate", ["site-1"])]
    assert sorted(results["test"]) == SITES
    assert results["left_out"] == []
    assert results["fairness"]["dice"]["excluded"] == []
    assert [(p["asked"], p["answered"]) for p in results["phases"]] == [(3, 2), (1, 1)]
    assert "without" not in table(run)


def test_who_fails_twice_is_shown_as_missing(tmp_path: Path) -> None:
    run = Run(tmp_path, misbehave("site-1", "validate", "site 'site-1' answered ERROR"), num_rounds=1, min_sites=2)()
    assert run.net.asked[1:] == [("validate", SITES), ("validate", ["site-1"])]
    ((left),) = run.results["left_out"]
    assert left["reason"] == "site 'site-1' answered ERROR (asked twice)"
    assert run.results["fairness"]["dice"]["excluded"] == ["site-1"]
    shown = table(run)
    assert ["site-1", "-"] in [line.split() for line in shown.splitlines()]
    describe_error = " ".join(shown.split())
    why = "left out: site 'site-1' answered ERROR (asked twice)"
    assert f"Average and spread of Dice are over 2 of 3 sites, without site-1 ({why})." in describe_error
    assert "site-1 after the last round, validate: site 'site-1' answered ERROR (asked twice)" in describe_error


def test_asking_again_takes_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_test, "AGAIN", 0.2)
    run = Run(tmp_path, misbehave("site-1", "validate", once("ERROR")), num_rounds=1, min_sites=2)
    run.net.behaviour = misbehave("site-1", "validate", lambda s, n, t: "ERROR" if len(run.net.asked) == 2 else SILENT)
    started = time.monotonic()
    run()  # validate_timeout is an hour
    assert time.monotonic() - started < 60
    assert run.results["left_out"][0]["reason"].startswith("no answer within 0.")


# ------------------------------------------------------------------------------------------------ the best model


def best_of(*offers: tuple[int, dict[str, float]], higher: bool = True, **settings: Any) -> BestModel:
    best = BestModel(RunSettings(**settings), higher)
    for made, scores in offers:
        best.offer(scores, made)
    return best


def test_a_model_that_the_worst_site_did_not_score_is_passed_over() -> None:
    first, without = {"a": 0.2, "b": 0.8, "c": 0.8}, {"b": 0.9, "c": 0.9}
    better = {"a": 0.3, "b": 0.85, "c": 0.85}
    assert best_of((0, first), (1, without)).made == 0
    assert best_of((0, first), (1, without), (2, better)).made == 2
    assert best_of((0, first), (1, {**without, "a": math.nan})).made == 0
    # Over the same sites: one that is new, or back, does not make every later model worse.
    assert best_of((0, {"b": 0.8}), (1, {"a": 0.1, "b": 0.9})).made == 1
    assert best_of((0, {"a": 0.1, "b": 0.8}), (1, {"b": 0.7}), (2, {"b": 0.7}), max_missed=1).made == 0
    assert best_of((0, {"a": 0.1, "b": 0.8}), (1, {"b": 0.9}), (2, {"b": 0.9}), max_missed=1).made == 2


def test_the_median_of_the_sites_is_not_decided_by_one() -> None:
    honest = [(0, {"a": 0.4, "b": 0.5, "c": 0.6}), (1, {"a": 0.5, "b": 0.6, "c": 0.7})]
    for lie in (0.0, 1.0):
        offers = [(made, {**scores, "d": lie if made == 0 else 1 - lie}) for made, scores in honest]
        assert best_of(*offers, best_by="median").made == 1
        turned = [(made, {site: 1 - value for site, value in scores.items()}) for made, scores in offers]
        assert best_of(*turned, best_by="median", higher=False).made == 1


#: Of the models of rounds -1 to 7; one of four sites says 0 of all but that of round 1.
RISING = [0.2, 0.36, 0.45, 0.55, 0.62, 0.68, 0.72, 0.76, 0.78]


@pytest.mark.parametrize(("by", "made"), [("worst", 1), ("mean_minus_std", 1), ("mean", 1), ("median", 7)])
def test_a_site_chooses_the_best_model_unless_the_median_does(by: str, made: int) -> None:
    lies = [1.0 if number == 2 else 0.0 for number in range(9)]
    scores = {r - 1: {s: v + 0.01 * k for k, s in enumerate("abc")} | {"d": lies[r]} for r, v in enumerate(RISING)}
    assert best_of(*scores.items(), best_by=by, best_lambda=2.0).made == made


@pytest.mark.parametrize(("by", "made"), [("mean", 1), ("worst", 0), ("mean_minus_std", 2)])
def test_criteria(by: Any, made: int) -> None:
    offers = [(0, {"a": 0.5, "b": 0.5}), (1, {"a": 0.2, "b": 1.0}), (2, {"a": 0.49, "b": 0.55})]
    assert best_of(*offers, best_by=by, best_lambda=0.5).made == made
    turned = [(number, {site: 1 - value for site, value in scores.items()}) for number, scores in offers]
    assert best_of(*turned, best_by=by, best_lambda=0.5, higher=False).made == made
    assert best_of(*offers, best_by="mean_minus_std", best_lambda=0.0).made == 1


def test_the_untrained_model_is_the_best_only_as_long_as_there_is_no_other() -> None:
    assert best_of((-1, {"a": 0.9, "b": 0.9})).made == -1
    assert best_of((-1, {"a": 0.9, "b": 0.9}), (0, {"a": 0.1})).made == 0  # though not scored by all
    assert best_of((-1, {"a": 0.9, "b": 0.9}), (0, {"a": 0.1}), (1, {"a": 0.05, "b": 0.1})).made == 1


def test_a_state_in_between_changes_nothing() -> None:
    offers = [(-1, {"a": 0.9}), (0, {"a": 0.2, "b": 0.3}), (1, {"b": 0.9}), (2, {"b": 0.4}), (3, {"b": 0.1})]
    whole = best_of(*offers, max_missed=1)
    for cut in range(len(offers)):
        first = best_of(*offers[:cut], max_missed=1)
        rest = BestModel(RunSettings(max_missed=1), True)
        rest.load_state_dict(first.state_dict())
        for made, scores in offers[cut:]:
            rest.offer(scores, made)
        assert rest.state_dict() == whole.state_dict()


def start_bias() -> float:
    torch.manual_seed(0)
    return float(Line().build_model().state_dict()["0.bias"][0])


START = start_bias()


def made_by(task: Message) -> int:
    """Return the round that made the model of a message, as each round adds 0.2 to the bias; -1: none."""
    return round((float(task.params["0.bias"][0]) - START) / 0.2) - 1


def of_model(validation: list[float], test: list[float]) -> Behaviour:
    """Measure each model by the round that made it, from -1."""

    def behaviour(s: str, n: str, task: Message) -> Message:
        reply, made = good(s, n, task), made_by(task) + 1
        of_validation = rows({"dice": validation[made] + 0.01 * number(s)}, "validation")
        asked = n == "train" or "validation" in task.meta["measure"]
        of_test = rows({"dice": test[made] + 0.01 * number(s)}) if n == "validate" else []
        reply.metrics = of_test + of_validation * asked
        return reply

    return behaviour


def test_last_and_best_model_are_tested(tmp_path: Path) -> None:
    heard: list[tuple[int, float]] = []

    class Ear(Listener):
        def best_model(self, state: Any, made: int) -> None:
            heard.append((made, round(float(state["0.bias"][0]), 6)))

    behaviour = of_model([0.9, 0.3, 0.6, 0.5], [0.0, 0.1, 0.2, 0.3])
    run = Run(tmp_path, behaviour, num_rounds=3, listeners=[Ear()])()
    results = run.results
    assert results["test"]["site-1"] == {"dice": pytest.approx(0.31)}
    assert results["test_best"]["site-1"] == {"dice": pytest.approx(0.21)}
    assert results["fairness_best"]["dice"]["mean"] == pytest.approx(0.22)
    assert results["last_rounds"] is None
    best = results["best"]
    assert best["value"] == pytest.approx(0.62)
    assert {k: best[k] for k in ("round", "by", "sites", "is_last", "left_out")} == {
        "round": 1, "by": "mean", "sites": SITES, "is_last": False, "left_out": [],
    }  # fmt: skip
    assert [name for name, _ in run.net.asked] == ["train"] * 3 + ["validate"] * 2
    assert [made for made, _ in heard] == [0, 1]  # not the one that nobody trained
    assert heard[1][1] == pytest.approx(float(run.model("best_FL_global_model.pt")["model"]["0.bias"][0]), abs=1e-6)
    shown = table(run)
    assert "dice, best" in shown
    assert "best: model of round 1, by the validation splits (mean 0.620, 3 sites)." in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_when_the_best_model_is_the_last_it_is_tested_once(tmp_path: Path) -> None:
    run = Run(tmp_path, of_model([0.9, 0.3, 0.6], [0.0, 0.1, 0.2]), num_rounds=2)()
    assert run.results["best"]["is_last"] is True
    assert run.results["test_best"] == run.results["test"]
    assert run.results["fairness_best"] == run.results["fairness"]
    assert [name for name, _ in run.net.asked].count("validate") == 1
    assert "The best model by the validation splits is the last one." in table(run)


def test_sites_that_measure_no_validation_split(tmp_path: Path) -> None:
    """Check that the last model is used, as with scripts of a site's own that validate nothing."""

    def bare(s: str, n: str, task: Message) -> Message:
        reply = good(s, n, task)
        reply.metrics = rows({"loss": 1.0}, "validation") if n == "train" else rows({"dice": 0.2 * number(s)})
        return reply

    run = Run(tmp_path, bare, num_rounds=2)()
    assert (run.results["best"]["round"], run.results["best"]["value"]) == (1, None)
    assert run.model("best_FL_global_model.pt")["train_conf"]["round"] == 1


def test_the_initial_model_says_what_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2, min_sites=3)

    def stops(s: str, n: str, task: Message) -> Any:
        return "ERROR" if task.current_round == 1 else good(s, n, task)

    run.net.behaviour = stops
    with pytest.raises(RoundFailed):
        run()
    conf = run.model("best_FL_global_model.pt")["train_conf"]
    assert (conf["round"], conf["what"]) == (-1, "the initial model: no round made it")


class Error(Line):
    """Define a task whose metric is better when small, though its name does not say so."""

    primary_metric: ClassVar[str] = "calibration"

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="calibration", doc="gap", higher_is_better=False), LOSS)


def test_the_declared_direction_decides(tmp_path: Path) -> None:
    def behaviour(s: str, n: str, task: Message) -> Message:
        reply = of_model([0.1, 0.3, 0.6, 0.5], [0.0, 0.1, 0.2, 0.3])(s, n, task)
        reply.metrics = [{**row, "metric": row["metric"].replace("dice", "calibration")} for row in reply.metrics]
        return reply

    run = Run(tmp_path, behaviour, num_rounds=3, task=Error())()
    assert run.results["best"]["round"] == 0
    summary = run.results["fairness"]["calibration"]
    assert (summary["worst_site"], summary["higher_is_better"]) == ("site-3", False)
    assert run.results["info"]["higher_is_better"] == {"calibration": False, "loss": False}
    shown = table(run)
    assert [line.split()[2:] for line in shown.splitlines() if line.startswith("worst site")] == [["site-3?"] * 2]
    assert "Lower is better: calibration." in shown


# ------------------------------------------------------------------------------------------------ the last models


def test_the_mean_of_the_last_models(tmp_path: Path) -> None:
    behaviour = of_model([0.5] * 6, [0.0, 0.1, 0.2, 0.3, 0.5, 0.6])
    run = Run(tmp_path, behaviour, num_rounds=5, test_last=3)()
    last = run.results["last_rounds"]
    assert last["rounds"] == [2, 3, 4]
    assert last["test"]["site-2"] == {"dice": pytest.approx((0.3 + 0.5 + 0.6) / 3 + 0.02)}
    assert last["fairness"]["dice"]["mean"] == pytest.approx((0.3 + 0.5 + 0.6) / 3 + 0.02)
    assert [name for name, _ in run.net.asked] == [*["train"] * 3, "validate", "train", "validate", "train", "validate"]
    assert "last 3: mean over the models of rounds 2-4." in table(run)
    same = Run(tmp_path / "b", behaviour, num_rounds=5)()  # measuring on the way changes nothing
    assert same.results["test"] == run.results["test"]
    assert torch.equal(same.model()["model"]["0.weight"], run.model()["model"]["0.weight"])


def test_every_second_model_is_tested_and_nothing_else_changes(tmp_path: Path) -> None:
    """Test metrics over the rounds, without a mean of the last ones; with one, only the last count in it."""
    behaviour = of_model([0.5] * 6, [0.0, 0.1, 0.2, 0.3, 0.5, 0.6])
    run = Run(tmp_path, behaviour, num_rounds=5, test_every=2)()
    found = {r["current_round"]: r["test"].get("site-2", {}).get("dice") for r in run.results["rounds"]}
    assert found == {0: None, 1: pytest.approx(0.22), 2: None, 3: pytest.approx(0.52), 4: None}
    assert run.results["last_rounds"] is None
    plain = Run(tmp_path / "b", behaviour, num_rounds=5)()
    assert run.results["test"] == plain.results["test"]
    assert torch.equal(run.model()["model"]["0.weight"], plain.model()["model"]["0.weight"])
    both = Run(tmp_path / "c", behaviour, num_rounds=5, test_every=1, test_last=2)()
    assert [bool(r["test"]) for r in both.results["rounds"]] == [True, True, True, True, False]
    assert both.results["last_rounds"]["rounds"] == [3, 4]
    assert make_plan("fed_avg", settings={"test_every": 3}).run.test_every == 3


def test_a_site_that_one_of_the_last_models_failed_has_no_mean(tmp_path: Path) -> None:
    measured = of_model([0.5] * 4, [0.0, 0.1, 0.2, 0.3])

    def behaviour(s: str, n: str, task: Message) -> Any:
        failing = (s, n, task.current_round) == ("site-1", "validate", 2)
        return "site 'site-1' answered ERROR" if failing else measured(s, n, task)

    run = Run(tmp_path, behaviour, num_rounds=3, test_last=2, min_sites=2)()
    last = run.results["last_rounds"]
    assert last["test"]["site-1"] == {"dice": None}
    assert last["fairness"]["dice"]["excluded"] == ["site-1"]
    assert last["fairness"]["dice"]["mean"] == pytest.approx(0.25 + 0.025)
    assert run.results["rounds"][1]["left_out"][0]["site"] == "site-1"
    missing = "Average and spread of Dice, last 2 are over 2 of 3 sites, without site-1 (undefined there)."
    assert missing in " ".join(table(run).split())


def test_the_mean_after_a_resume(tmp_path: Path) -> None:
    behaviour = of_model([0.5] * 6, [0.0, 0.1, 0.2, 0.3, 0.5, 0.6])
    whole = Run(tmp_path / "a", behaviour, num_rounds=5, test_last=4)()
    run = Run(tmp_path, behaviour, num_rounds=5, test_last=4, experiment="e", train_timeout=0.1)
    run.net.behaviour = lambda s, n, t: SILENT if (n, t.current_round) == ("train", 3) else behaviour(s, n, t)
    with pytest.raises(RoundFailed):
        run()
    rest = Run(tmp_path, behaviour, num_rounds=5, test_last=4, experiment="e", job="second")()
    assert rest.results["last_rounds"] == whole.results["last_rounds"]


def test_mean_of() -> None:
    found = mean_of([{"a": {"x": 0.2, "y": 1.0}, "b": {"x": 0.5}}, {"a": {"x": 0.4}, "b": {"x": None}}])
    assert found["a"]["x"] == pytest.approx(0.3)
    assert math.isnan(found["a"]["y"])
    assert math.isnan(found["b"]["x"])


# ------------------------------------------------------------------------------------------------ both halves


@pytest.mark.parametrize(
    ("rule", "half", "message"),
    [
        (FedISM(rho=0.05), {"path": HALVES, "args": {"rho": 0.1}}, "rho is 0.05 at the server and 0.1 at"),
        (FedISM(rho=0.1), {"path": HALVES, "args": {}}, "rho is 0.1 at the server and 0.05 at"),
        (FedISM(), {"path": "their.Own", "args": {"tau": 0.5}}, "tau is None at the server and 0.5 at"),
        (FedLWR(preset="authors"),
         {"path": "fairflare.methods.fed_lwr.LayerSimilarityReport", "args": {"preset": "paper"}},
         "preset is 'authors' at the server and"),
    ],
)  # fmt: skip
def test_halves_that_differ_end_the_run_before_training(tmp_path: Path, rule: Any, half: Any, message: str) -> None:
    run = Run(tmp_path, rule=rule, site_half=half)
    with pytest.raises(ValueError, match=rf"configuration differ: {message}"):
        run()
    assert run.net.asked == []
    assert message in run.results["reason"]


@pytest.mark.parametrize("half", [None, {"path": HALVES, "args": {"rho": 0.2, "batch_size": 4}}, {"path": "x.Y"}])
def test_halves_that_agree(tmp_path: Path, half: Any) -> None:
    run = Run(tmp_path, rule=FedISM(rho=0.2), site_half=half, num_rounds=1)
    run.rounds.opening()
    assert run.results["info"]["config"]["training"] == half
