"""A site whose labels are off is noticed, said, held or left out; honest sites are left alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.base.task import LOSS, Metric
from fairflare.exchange.messages import MEASURE_TRAINED, Message
from fairflare.federation.collecting.suspects import Suspects
from fairflare.federation.plan.plan import make_plan
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_ism import FedISM
from fairflare.reporting.documents import RoundRecord

from .network import Run, good

SIX = [f"site-{k}" for k in range(1, 7)]
ODD = "site-6"
pytestmark = pytest.mark.usefixtures("one_thread")


class Labels:
    """Six sites; ``odd`` ones learn something else from ``since`` to ``until``, and the common model is bad there."""

    def __init__(self, odd: tuple[str, ...] = (ODD,), since: int = 0, until: int = 99, own: float = 0.9) -> None:
        self.odd, self.since, self.until, self.own = odd, since, until, own
        self.asked: list[tuple[int, str]] = []

    def __call__(self, site: str, name: str, task: Message) -> Any:
        reply = good(site, name, task)
        if name != "train":
            return reply
        number = int(site[-1])
        wrong = site in self.odd and self.since <= task.current_round < self.until
        sign = -1.0 if wrong else 1.0
        reply.params = {k: torch.full_like(v, sign * (1 + 0.05 * number)) for k, v in task.params.items()}
        reply.metrics = {"dice": 0.2 if wrong else 0.8 + 0.01 * number}
        reply.meta["num_samples"] = 100 if site in self.odd else 50
        if task.meta["directives"].get(MEASURE_TRAINED):
            self.asked.append((task.current_round, site))
            reply.meta["stats"]["trained_metric"] = self.own if wrong else 0.9
        return reply


def run(folder: Path, behaviour: Any, job: str = "run", num_rounds: int = 4, **settings: Any) -> Run:
    rule = settings.pop("rule", None) or FedAvg()
    return Run(folder, behaviour, rule=rule, sites=SIX, job=job, num_rounds=num_rounds, **settings)()


def suspected(done: Run) -> list[tuple[int, str]]:
    """Round and site of each warning."""
    return [
        (r["current_round"], w["site"]) for r in done.results["rounds"] for w in r["warnings"] if w["kind"] == "suspect"
    ]


def test_a_site_with_other_labels_is_said_everywhere(tmp_path: Path) -> None:
    labels = Labels()
    done = run(tmp_path, labels)
    assert suspected(done) == [(1, ODD), (2, ODD), (3, ODD)]
    assert labels.asked == [(1, ODD), (2, ODD), (3, ODD)]  # nobody else measures anything more
    text = "its labels may be off: the common model is far worse there than at the others"
    assert any(text in line and "site 'site-6'" in line for line in done.net.warned)
    assert any(
        "dice of the common model 0.200, median of the others 0.830, its own model 0.900" in s for s in done.net.said
    )
    assert text in done.net.said[-1]  # the printed table
    record = done.results["rounds"][2]
    assert record["details"]["suspects"][ODD]["signs"] == 3
    assert record["details"]["suspects"][ODD]["trained_metric"] == 0.9
    assert record["details"]["suspects"][ODD]["cosine"] == pytest.approx(-1)
    # Five directions of one length and one against them: (4 - 1) / 3 at the others.
    assert record["details"]["suspects"]["site-1"]["cosine"] == pytest.approx(1)
    assert record["site_weights"][ODD] == pytest.approx(100 / 350)  # warn: it counts as before


def test_honest_sites_are_left_alone(tmp_path: Path) -> None:
    labels = Labels(())
    done = run(tmp_path, labels)
    assert suspected(done) == []
    assert labels.asked == []
    assert all("suspects" not in r["details"] for r in done.results["rounds"])


def test_a_site_whose_images_are_hard_is_left_alone(tmp_path: Path) -> None:
    """Its own model is no better there, and it does not weigh the most."""
    labels = Labels(own=0.3)
    done = run(tmp_path, labels, rule=FedAvg(weighting="uniform"))
    assert suspected(done) == []
    assert labels.asked  # it was asked


def test_the_heaviest_site_is_suspected_though_it_says_nothing(tmp_path: Path) -> None:
    """A site of the user's own script does not measure its trained model."""

    def silent(site: str, name: str, task: Message) -> Any:
        reply = Labels()(site, name, task)
        if isinstance(reply, Message):
            reply.meta.get("stats", {}).pop("trained_metric", None)
        return reply

    assert suspected(run(tmp_path / "a", silent)) == [(1, ODD), (2, ODD), (3, ODD)]
    assert suspected(run(tmp_path / "b", silent, rule=FedAvg(weighting="uniform"))) == []  # nobody is the heaviest


def test_it_takes_two_rounds_running(tmp_path: Path) -> None:
    assert suspected(run(tmp_path / "a", Labels(since=1, until=2))) == []
    done = run(tmp_path / "b", Labels(until=2))
    assert suspected(done) == [(1, ODD)]
    assert "round 2: site 'site-6' is not suspected any more" in done.net.said


def test_equal_holds_it_to_the_equal_share(tmp_path: Path) -> None:
    done = run(tmp_path, Labels(), suspects="equal")
    weights = [r["site_weights"][ODD] for r in done.results["rounds"]]
    assert weights[:2] == pytest.approx([100 / 350] * 2)
    assert weights[2:] == pytest.approx([1 / 6] * 2)
    kinds = [w["kind"] for w in done.results["rounds"][2]["warnings"] if w["site"] == ODD]
    assert "suspects" in kinds
    assert sum(done.results["rounds"][2]["site_weights"].values()) == pytest.approx(1)


def test_equal_holds_for_what_is_remembered(tmp_path: Path) -> None:
    labels = Labels()

    def sharp(site: str, name: str, task: Message) -> Any:
        reply = labels(site, name, task)
        if name == "train":
            reply.meta["report"] = {"sharpness": 0.1 if site == ODD else 0.05, "perturbed_loss": 1.0}
        return reply

    done = run(tmp_path, sharp, suspects="equal", rule=FedISM(), num_rounds=3)
    weights = [r["site_weights"][ODD] for r in done.results["rounds"]]
    assert weights[1] > 0.3
    assert weights[2] == pytest.approx(1 / 6)
    kinds = {w["kind"] for w in done.results["rounds"][2]["warnings"] if w["site"] == ODD}
    assert "suspects, remembered" in kinds


def test_out_leaves_it_out_by_name_and_asks_again(tmp_path: Path) -> None:
    labels = Labels(until=4)
    done = run(tmp_path, labels, suspects="out", num_rounds=6)
    rounds = done.results["rounds"]
    assert [ODD in r["accepted"] for r in rounds] == [True, True, False, False, True, True]
    assert done.left_out(2)[ODD] == ("train", "not asked before round 4: its labels may be off (suspects=out)")
    again = run(tmp_path / "again", Labels(), suspects="out", num_rounds=10)
    # Two rounds the first time; at its return one sign is enough, and it is out for four.
    out = [r["current_round"] for r in again.results["rounds"] if ODD not in r["accepted"]]
    assert out == [2, 3, 5, 6, 7, 8]


DICE = Metric(name="dice", doc="made up", higher_is_better=True)


def test_far_is_a_share_of_the_metrics_range() -> None:
    """19 mm of 100 are not far, 21 mm are; without limits nobody can say."""
    run = make_plan("fed_avg").run
    distance = Metric(name="hd95", doc="made up", higher_is_better=False, high=100.0, unit="mm")
    for behind, far in ((19.0, set()), (21.0, {"f"})):
        suspects = Suspects(run, distance, print)
        record = RoundRecord(current_round=0, sites=[*"abcdef"], accepted=[*"abcdef"])
        record.validation = {site: {"hd95": 5.0} for site in "abcde"} | {"f": {"hd95": 5.0 + behind}}
        record.site_weights = dict.fromkeys("abcdef", 1 / 6)
        suspects.judge(record, {}, {})
        assert suspects._far == far
    open_ended = Metric(name="hd95", doc="made up", higher_is_better=False, high=math.inf, unit="mm")
    suspects = Suspects(run, open_ended, print)
    suspects.judge(record, {}, {})
    assert suspects._far == set()
    with pytest.raises(ValueError, match=r"suspects=out goes by how far a site's 'hd95' is behind.* lies in .*inf"):
        Suspects(make_plan("fed_avg", settings={"suspects": "out"}).run, open_ended, print)


def test_never_too_many_are_left_out(tmp_path: Path) -> None:
    suspects = Suspects(make_plan("fed_avg", settings={"suspects": "out"}, min_sites=3).run, DICE, print)
    suspects.load_state_dict({"cases": {site: {"signs": 3, "suspected": True, "again": 9} for site in SIX[:4]}})
    assert len(suspects.left_out(SIX, 5)) == 2  # a minority of six
    assert len(suspects.left_out(SIX[:4], 5)) == 1
    assert suspects.left_out(SIX[:3], 5) == {}  # min_sites
    assert suspects.left_out(SIX, 9) == {}


def test_a_lower_metric_may_be_the_better_one(tmp_path: Path) -> None:
    from .network import Line

    class Error(Line):
        def declared_metrics(self) -> tuple[Metric, ...]:
            return (Metric(name="dice", doc="made up", higher_is_better=False), LOSS)

    def turned(site: str, name: str, task: Message) -> Any:
        reply = Labels()(site, name, task)
        reply.metrics = {key: 1 - value for key, value in (reply.metrics or {}).items()}
        if "trained_metric" in reply.meta.get("stats", {}):
            reply.meta["stats"]["trained_metric"] = 1 - reply.meta["stats"]["trained_metric"]
        return reply

    assert suspected(run(tmp_path / "a", turned, task=Error())) == [(1, ODD), (2, ODD), (3, ODD)]
    assert suspected(run(tmp_path / "b", Labels(), task=Error())) == []


def test_the_counters_outlive_the_job(tmp_path: Path) -> None:
    """A run that stops after the first sign goes on with it."""
    whole = run(tmp_path / "whole", Labels(), experiment="e", suspects="equal")

    def stops(site: str, name: str, task: Message) -> Any:
        return "the job ends" if task.current_round == 1 else Labels()(site, name, task)

    with pytest.raises(Exception, match="usable result"):
        run(tmp_path / "cut", stops, experiment="e", suspects="equal")
    resumed = run(tmp_path / "cut", Labels(), "second", experiment="e", suspects="equal")
    assert resumed.results["info"]["resumed_at_round"] == 1
    assert suspected(resumed) == suspected(whole) == [(1, ODD), (2, ODD), (3, ODD)]
    for one, other in zip(whole.results["rounds"], resumed.results["rounds"], strict=True):
        assert one["site_weights"] == other["site_weights"]


def test_a_site_that_claims_nonsense_is_refused() -> None:
    from fairflare.federation.site.replies import STATS
    from fairflare.methods.base.reports import ReportError, read_report

    with pytest.raises(ReportError, match="trained_metric"):
        read_report({"trained_metric": "good"}, STATS, "site-1", "stats")


def test_the_setting_is_checked() -> None:
    assert make_plan("fed_lwr").run.suspects == "warn"
    with pytest.raises(ValueError, match="suspects must be one of 'warn', 'equal', 'out', got 'no'"):
        make_plan("fed_lwr", settings={"suspects": "no"})
    assert json.loads(json.dumps(Suspects(make_plan("fed_avg").run, DICE, print).state_dict()))
