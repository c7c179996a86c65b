"""Test recalibrated statistics in a run: questions to sites, refusals, pooling, and the resulting model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.core.features.batch_norms import Group, measure, next_group, running_norms
from fairflare.exchange.messages import TASK_NORMS, Message, decode_task
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.site_training import HalvesDiffer, check_halves
from fairflare.federation.server.rounds import Stopped
from fairflare.federation.site.norm_moments import whole_pass
from fairflare.federation.site.script import ScriptSite
from fairflare.federation.transports.isolation import perform_isolated
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_lwr import FedLWR
from fairflare.tasks.networks import build_classifier
from fairflare.tasks.scripts import LoopTask, ScriptData
from tests.tiny import FUNDUS, VOLUMES

from ..central_norms import central_statistics, differing
from ..methods.support import at_site, initial, request, same
from .network import SILENT, Line, Run, good, number

RECALIBRATED: dict[str, Any] = {"norm_statistics": "recalibrated"}
NORMS = [["1", "3"], ["4"]]  # by exchange
Says = Callable[[str, int, dict[str, Any]], Any]


class Normed(Line):
    """Define a network of two norms side by side, one norm after them, and one that no image reaches."""

    def build_model(self) -> torch.nn.Module:
        norms = [torch.nn.BatchNorm1d(width) for width in (2, 1, 1, 3)]
        return torch.nn.Sequential(torch.nn.Linear(2, 2), norms[0], torch.nn.ReLU(), *norms[1:])


def measured(site: str, task: Message) -> Message:
    """Return a report on 10 k images of two values each: mean k, variance 0.1 k; in the second exchange minus that."""
    k, exchange = number(site), task.meta["directives"]["exchange"]
    widths = [[2, 1], [1]][exchange]
    sign = -1 if exchange else 1
    reply = good(site, "anchor", task)
    reply.meta["num_samples"] = 10 * k
    reply.meta["report"] = {
        "norms": list(NORMS[exchange]),
        "values": [20.0 * k] * len(widths),
        "means": [float(sign * k)] * sum(widths),
        "variances": [0.1 * k] * sum(widths),
        "more": exchange == 0,
    }
    return reply


def network(says: Says | None = None) -> Callable[[str, str, Message], Any]:
    """Make a pretended network; ``says(site, exchange, report)`` changes a report, or gives another answer."""

    def behaviour(site: str, name: str, task: Message) -> Any:
        if name != TASK_NORMS:
            return good(site, name, task)
        reply = measured(site, task)
        other = says(site, task.meta["directives"]["exchange"], reply.meta["report"]) if says else None
        return reply if other is None else other

    return behaviour


def run(folder: Path, says: Says | None = None, **settings: Any) -> Run:
    return Run(folder, network(says), task=Normed(), **{"num_rounds": 1, **RECALIBRATED, **settings})


def asked(ran: Run) -> list[tuple[str, list[str]]]:
    return [(name, sites) for name, sites in ran.net.asked if name == TASK_NORMS]


# ------------------------------------------------------------------------------------------------ a round


def test_statistics_are_those_of_all_values_together(tmp_path: Path) -> None:
    ran = run(tmp_path)()
    state = ran.model()["model"]
    # n_k = 20, 40, 60; means 1, 2, 3: mean 14/6; variance (120/119) (sum p v + sum p (m_k - m)^2)
    mean = 14 / 6
    variance = 120 / 119 * sum(k / 6 * (0.1 * k + (k - mean) ** 2) for k in (1, 2, 3))
    assert state["1.running_mean"].tolist() == pytest.approx([mean, mean], rel=1e-6)
    assert state["3.running_var"].tolist() == pytest.approx([variance], rel=1e-6)
    assert state["4.running_mean"].tolist() == pytest.approx([-mean], rel=1e-6)
    # What nobody measured is the average of the sites' (0 and 1, plus 0.1, 0.2 and 0.3), as is the counter.
    assert state["5.running_var"].tolist() == pytest.approx([1.2] * 3)
    plain = Run(tmp_path, network(), task=Normed(), num_rounds=1, job="plain")().model()["model"]
    untouched = [name for name in state if not name.startswith(("1.run", "3.run", "4.run"))]
    assert same({name: state[name] for name in untouched}, {name: plain[name] for name in untouched})


class Tied(Normed):
    """Define :class:`Normed` with the norm "1" once more at the end, so that its statistics have two names."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        assert isinstance(model, torch.nn.Sequential)
        return model.append(model[1])


def test_a_norm_with_two_names_is_set_under_both(tmp_path: Path) -> None:
    """Check both names, as ``load_state_dict`` loads them in turn and the last one would restore old statistics."""
    state = Run(tmp_path, network(), task=Tied(), num_rounds=1, **RECALIBRATED)().model()["model"]
    assert {"1.running_mean", "6.running_mean"} <= set(state)
    model = Tied().build_model()
    model.load_state_dict(state)
    for name in ("1", "6"):
        assert model.get_submodule(name).running_mean.tolist() == pytest.approx([14 / 6] * 2, rel=1e-6)


def test_what_travels(tmp_path: Path) -> None:
    ran = run(tmp_path)()
    tasks = [task for (name, _), task in zip(ran.net.asked, ran.net.tasks, strict=True) if name == TASK_NORMS]
    assert [task.meta["directives"] for task in tasks] == [
        {"done": [], "exchange": 0},
        {"done": ["1", "3"], "exchange": 1},
    ]
    assert set(tasks[1].params) == {f"{name}.{kind}" for name in ("1", "3") for kind in ("running_mean", "running_var")}
    (round_0,) = ran.results["rounds"]
    (phase,) = [phase for phase in round_0["phases"] if phase["name"] == TASK_NORMS]
    assert (phase["asked"], phase["answered"]) == (3, 3)
    assert phase["bytes_out"] == 3 * (sum(t.nbytes for t in tasks[0].params.values()) + 6 * 4)
    assert phase["bytes_in"] == 3 * 8 * (2 + 2 * 3 + 1 + 2 * 1)
    assert round_0["details"][TASK_NORMS] == {
        "measured": 3, "exchanges": 2, "images": {"site-1": 10, "site-2": 20, "site-3": 30},
    }  # fmt: skip
    assert any("not in the way of an image, their statistics are averaged: 5" in text for text in ran.net.said)


def test_the_recalibrated_model_is_the_one_that_is_trained_from_tested_and_kept(tmp_path: Path) -> None:
    ran = run(tmp_path, num_rounds=2)()
    trained, tested = ([t for (n, _), t in zip(ran.net.asked, ran.net.tasks, strict=True) if n == name]
                       for name in ("train", "validate"))  # fmt: skip
    for task in (trained[1], tested[0]):
        assert task.params["1.running_mean"].tolist() == pytest.approx([14 / 6] * 2, rel=1e-6)
    assert same(tested[0].params, ran.model()["model"])
    best = ran.model("best_FL_global_model.pt")["model"]
    assert best["4.running_mean"].tolist() == pytest.approx([-14 / 6], rel=1e-6)


def test_order_of_a_two_phase_method(tmp_path: Path) -> None:
    def behaviour(site: str, name: str, task: Message) -> Any:
        reply = network()(site, name, task)
        if name == "anchor":
            reply.meta["report"] = {"layers": ["0", "1", "3", "4", "5"], "cka": [0.5] * 5, "dissimilarity": [0.5] * 5}
        return reply

    ran = Run(tmp_path, behaviour, task=Normed(), rule=FedLWR(), num_rounds=1, **RECALIBRATED)()
    assert [name for name, _ in ran.net.asked] == ["train", "anchor", "norms", "norms", "validate"]
    names = [phase["name"] for phase in ran.results["rounds"][0]["phases"]]
    assert names == ["train", "anchor", "aggregate", "norms"]


def test_off_by_default_and_nothing_to_do_without_norms(tmp_path: Path) -> None:
    ran = Run(tmp_path, network(), task=Normed(), num_rounds=1)()
    assert not asked(ran)
    ran = Run(tmp_path, network(), num_rounds=2, job="line", **RECALIBRATED)()
    assert not asked(ran)
    (line,) = ran.results["info"]["in_vain"]
    assert line.startswith(
        "norm_statistics='recalibrated' would do nothing: it acts only with a batch norm with running"
    )


# ------------------------------------------------------------------------------------------------ a site that fails


def fails(site: str, at: int, change: dict[str, Any] | object) -> Says:
    def says(who: str, exchange: int, report: dict[str, Any]) -> Any:
        if (who, exchange) != (site, at):
            return None
        if isinstance(change, dict):
            return report.update(change)
        return change

    return says


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"variances": [0.1, -1e-9, 0.1]}, r"field 'variances\[1\]' must lie in \[0, 1e\+30\], got -1e-09"),
        ({"variances": [0.1, float("nan"), 0.1]}, r"field 'variances\[1\]' must be finite"),
        ({"means": [1.0, 1.0]}, "field 'means' has 2 entries, these norms have 3 channels"),
        ({"means": [1.0, 1.0, 1e16]}, r"field 'means\[2\]' must lie in"),
        ({"variances": [0.1] * 4}, "field 'variances' has 4 entries, these norms have 3 channels"),
        ({"values": [20.0]}, "field 'values' has 1 entries, field 'norms' has 2"),
        ({"values": [20.0, 0.0]}, r"field 'values\[1\]' must lie in \[1"),
        ({"values": [20.0, 20.5]}, "field 'values' must hold whole numbers, got 20.5"),
        ({"values": [20.0, 1e17]}, r"field 'values\[1\]' must lie in"),
        ({"norms": ["1", "9"]}, "field 'norms' names '9', which is not asked for"),
        ({"norms": ["1", "1"], "means": [1.0] * 4, "variances": [1.0] * 4}, "field 'norms' names a norm twice"),
        ({"norms": [], "values": [], "means": [], "variances": []}, "field 'more' is true, and field 'norms' is empty"),
        ({"more": 1}, "field 'more' must be true or false, got 1"),
        ({"more": False}, "field 'more' is False, at most sites True"),
        (
            {"norms": ["4", "3"], "means": [1.0] * 2, "variances": [1.0] * 2},
            "field 'norms' differs from that of most sites in 2 norm",
        ),
    ],
)
def test_a_lie_costs_that_site_its_part_and_is_named(tmp_path: Path, change: Any, reason: str) -> None:
    ran = run(tmp_path, fails("site-2", 0, change))()
    phase, why = ran.left_out()["site-2"]
    assert phase == TASK_NORMS
    assert re.search("^site 'site-2': .*" + reason, why)
    assert [sites for _, sites in asked(ran)] == [["site-1", "site-2", "site-3"], ["site-1", "site-3"]]
    assert ran.results["rounds"][0]["accepted"] == ["site-1", "site-2", "site-3"]  # its model stays
    # As if it had been silent: sites 1 and 3 alone.
    assert ran.model()["model"]["1.running_mean"].tolist() == pytest.approx([(20 + 180) / 80] * 2, rel=1e-6)


def test_a_site_that_is_gone_after_the_first_exchange(tmp_path: Path) -> None:
    ran = run(tmp_path, fails("site-3", 1, SILENT), norms_timeout=0.3)()
    phase, why = ran.left_out()["site-3"]
    assert phase == TASK_NORMS
    assert "no answer within" in why
    state = ran.model()["model"]
    assert state["1.running_mean"].tolist() == pytest.approx([14 / 6] * 2, rel=1e-6)  # was still there
    assert state["4.running_mean"].tolist() == pytest.approx([-(20 + 80) / 60], rel=1e-6)


def test_only_sites_whose_model_is_in_the_average_are_asked(tmp_path: Path) -> None:
    def behaviour(site: str, name: str, task: Message) -> Any:
        return "no data today" if (site, name) == ("site-1", "train") else network()(site, name, task)

    ran = Run(tmp_path, behaviour, task=Normed(), num_rounds=1, **RECALIBRATED)()
    assert asked(ran)[0][1] == ["site-2", "site-3"]


def test_too_few_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match=r"round 0, norms: 2 .* .*'variances\[0\]'"):
        run(tmp_path, fails("site-2", 0, {"variances": [-1.0] * 3}), min_sites=3)()


def test_a_run_that_was_stopped_meanwhile(tmp_path: Path) -> None:
    def says(site: str, exchange: int, report: dict[str, Any]) -> Any:
        ran.net.abort = True
        return SILENT

    ran = run(tmp_path, says)
    with pytest.raises(Stopped):
        ran()


# ------------------------------------------------------------------------------------------------ bounds


def weight_of_one(ran: Run) -> float:
    """Return the share of site 1, whose mean is 1e6 where the other sites have 0."""
    return float(ran.model()["model"]["1.running_mean"][0]) / 1e6


def claims(images: int, values: float, mean: float = 1e6) -> Says:
    def says(site: str, exchange: int, report: dict[str, Any]) -> Any:
        if site != "site-1":
            report["means"] = [0.0] * len(report["means"])
            return None
        report["means"] = [mean] * len(report["means"])
        report["values"] = [values] * len(report["values"])
        return None

    def behaviour(site: str, exchange: int, report: dict[str, Any]) -> Any:
        says(site, exchange, report)
        reply = Message(meta=good(site, "anchor", Message()).meta, current_round=0)
        reply.meta["report"] = report
        reply.meta["num_samples"] = images if site == "site-1" else 10 * number(site)
        return reply

    return behaviour


@pytest.mark.parametrize(("images", "values"), [(10**9, 2e9), (10, 1e15), (10**9, 1e15)])
def test_max_samples_holds_for_counts(tmp_path: Path, images: int, values: float) -> None:
    assert weight_of_one(run(tmp_path, claims(images, values), job="free")()) > 0.99
    ran = run(tmp_path, claims(images, values), max_samples=50)()
    assert weight_of_one(ran) == pytest.approx(100 / (100 + 40 + 60), rel=1e-6)  # 50 images of two values
    (warned,) = [w for w in ran.results["rounds"][0]["warnings"] if w["site"] == "site-1"]
    assert warned["kind"] == "norms, max_samples"
    assert (warned["value"], warned["used"]) == (values, 100)
    honest = run(tmp_path, max_samples=50, job="honest")()
    assert not honest.results["rounds"][0]["warnings"]


def test_max_weight_holds(tmp_path: Path) -> None:
    ran = run(tmp_path, claims(10**9, 2e9), max_weight=0.4)()
    assert weight_of_one(ran) == pytest.approx(0.4, rel=1e-6)
    assert "norms, max_weight" in {w["kind"] for w in ran.results["rounds"][0]["warnings"]}


def test_max_update_norm_holds(tmp_path: Path) -> None:
    free = run(tmp_path, claims(10, 20.0), job="free")()
    assert weight_of_one(free) == pytest.approx(1 / 6, rel=1e-6)
    ran = run(tmp_path, claims(10, 20.0), max_update_norm=3.0)()
    assert abs(weight_of_one(ran)) < 1e-5
    assert "norms, max_update_norm, running statistics" in {w["kind"] for w in ran.results["rounds"][0]["warnings"]}


# ------------------------------------------------------------------------------------------------ with data

TINY_CLASSES = {name: value for name, value in FUNDUS.items() if name != "partition"} | {"batch_size": 7}
TINY_SEGMENTS = {**VOLUMES, "batch_size": 3}
KINDS = [("segmentation", TINY_SEGMENTS), ("classification", TINY_CLASSES)]


def plan_of(kind: str, tiny: dict[str, Any], method: str = "fed_avg", **more: Any) -> Plan:
    options = {"num_rounds": 1, **more}
    return make_plan(method, task=kind, sites=2, settings={**tiny, **options.pop("settings", {})}, **options)


def final(folder: Path, name: str = "FL_global_model.pt") -> dict[str, torch.Tensor]:
    return torch.load(folder / "server" / "simulate_job" / name, weights_only=True)["model"]


def all_images(plan: Plan) -> torch.Tensor:
    assert plan.sites
    opened = [plan.task.open_site(site, {}) for site in plan.sites]
    return torch.cat([inputs for data in opened for inputs, _ in data.batches("training", batch_size=4)])


@pytest.mark.many
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_equal_to_all_images_in_one_place(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    plan = plan_of(kind, settings, settings=RECALIBRATED)
    run_local(plan, tmp_path)
    state = final(tmp_path)
    model = plan.task.build_model()
    model.load_state_dict(state)
    wanted = central_statistics(model, all_images(plan))
    assert len(wanted) == 2 * len(running_norms(model))
    assert differing(state, wanted) < 1e-5


@pytest.mark.long
def test_parameters_are_those_of_averaged_statistics(tmp_path: Path) -> None:
    """Check that parameters do not differ by a bit, as FedAvg trains with the batch's statistics."""
    kept: list[dict[str, torch.Tensor]] = []
    for name, settings in (("a", {}), ("b", RECALIBRATED)):
        run_local(plan_of("classification", TINY_CLASSES, settings=settings, num_rounds=2), tmp_path / name)
        kept.append(final(tmp_path / name))
    statistics = [name for name in kept[0] if name.endswith(("running_mean", "running_var"))]
    assert not any(torch.equal(kept[0][name], kept[1][name]) for name in statistics)
    plain = [{name: t for name, t in state.items() if name not in statistics} for state in kept]
    assert same(plain[0], plain[1])


@pytest.mark.long
def test_a_run_that_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    more = {"settings": RECALIBRATED, "experiment": "e", "num_rounds": 2}
    run_local(plan_of("segmentation", TINY_SEGMENTS, **more), tmp_path / "whole")
    log = tmp_path / "cut" / "server" / "simulate_job" / "fairflare" / "progress.jsonl"

    def in_the_middle() -> bool:
        """Return the exchanges of round 1."""
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        begun = [x for x in lines if (x["kind"], x.get("phase"), x.get("current_round")) == ("phase", TASK_NORMS, 1)]
        return len(begun) > 2

    with pytest.raises(Stopped):
        run_local(plan_of("segmentation", TINY_SEGMENTS, **more), tmp_path / "cut", should_stop=in_the_middle)
    run_local(plan_of("segmentation", TINY_SEGMENTS, **more), tmp_path / "cut")
    assert same(final(tmp_path / "whole"), final(tmp_path / "cut"))
    assert json.loads(log.with_name("results.json").read_text())["resumed"]
    other = plan_of("segmentation", TINY_SEGMENTS, **{**more, "settings": {}})
    with pytest.raises(ValueError, match="was 'recalibrated', is 'average'"):
        run_local(other, tmp_path / "cut")


# ------------------------------------------------------------------------------------------------ at a site


def question(state: Any, exchange: int, done: list[str], **more: Any) -> Any:
    directives = {"done": done, "exchange": exchange, **more}
    return request(TASK_NORMS, state, 1, directives=directives)


def test_a_later_question_finds_the_model_in_another_process(tmp_path: Path) -> None:
    state = initial()
    first = at_site(tmp_path).perform(question(state, 0, []))
    assert (first.status, first.report["norms"], first.report["more"]) == ("ok", ["conv_0.conv_0.adn.N"], True)
    new = {"conv_0.conv_0.adn.N.running_mean": torch.full((4,), 0.2)}
    second = at_site(tmp_path).perform(question(new, 1, first.report["norms"]))
    assert second.report["norms"] == ["conv_0.conv_1.adn.N"]
    whole = at_site(tmp_path / "other").perform(question({**state, **new}, 0, first.report["norms"]))
    assert whole.report == second.report
    lost = at_site(tmp_path / "third").perform(question(new, 1, first.report["norms"]))
    assert (lost.status, lost.reason) == (
        "skipped", "site 'site-1' has not kept the model of round 1, whose batch norms it must measure",
    )  # fmt: skip


def test_augmentation_and_shuffling_have_no_part_in_it(tmp_path: Path) -> None:
    plain = at_site(tmp_path / "a").perform(question(initial(), 0, []))
    augmented = at_site(tmp_path / "b", LocalTraining(batch_size=4, augment=True)).perform(question(initial(), 0, []))
    assert plain.report == augmented.report


@pytest.mark.long
def test_isolated(tmp_path: Path) -> None:
    worker = at_site(tmp_path / "plain")
    arguments = {
        "site": "site-1", "task": worker.task, "training": worker.training, "settings": {},
        "state_folder": tmp_path / "isolated", "num_threads": 1,
    }  # fmt: skip
    asks = question(initial(), 0, [])
    assert perform_isolated(arguments, asks, lambda: False).report == worker.perform(asks).report


def test_a_model_that_is_not_finite_is_refused_by_the_norm_s_name(tmp_path: Path) -> None:
    state = initial()
    state["conv_0.conv_0.conv.weight"].fill_(torch.inf)
    reply = at_site(tmp_path).perform(question(state, 0, []))
    assert (reply.status, reply.reason) == (
        "failed", "site 'site-1': the input of batch norm 'conv_0.conv_0.adn.N' is not finite",
    )  # fmt: skip


def test_what_a_site_reports_is_what_the_server_reads(tmp_path: Path) -> None:
    from fairflare.exchange.messages import SiteTask, encode_reply, encode_task
    from fairflare.federation.server.recalibration import read_norms

    task = SiteTask(TASK_NORMS, initial(), 1, 3, 0, directives={"done": [], "exchange": 0})
    reply = at_site(tmp_path).perform(decode_task(TASK_NORMS, encode_task(task), "site-1"))
    model = at_site(tmp_path).task.build_model()
    widths = {name: len(norm.running_mean) for name, norm in running_norms(model).items()}
    found = read_norms("site-1", encode_reply(reply, 1), 1, widths)
    assert list(found.values) == [next(iter(widths))]
    assert found.values["conv_0.conv_0.adn.N"] == found.images * 32 * 32
    assert found.more


def test_a_projection_head_is_measured_too() -> None:
    """Check the head that Fed-MAS uses in evaluation mode, and that a network's plain pass does not reach."""
    torch.manual_seed(0)
    model = build_classifier(
        "resnet18", in_channels=1, classes=3, features=[4, 4, 8, 8], norm_momentum=0.1, projector_dim=4
    )
    images = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    norms = list(running_norms(model))
    plain = [name for name in norms if not name.startswith("projector")]
    assert next_group(model, images, plain) == Group([], {}, False)
    last = next_group(model, images, plain, forward=whole_pass(model))
    assert last.names == [name for name in norms if name not in plain] == ["projector.1"]
    found = measure(model, [images], last, forward=whole_pass(model))
    with torch.no_grad():
        inputs = model.projector[0](model.eval().embed(images))
    torch.testing.assert_close(found["projector.1"].mean, inputs.double().mean(0), rtol=1e-5, atol=1e-6)


def test_a_script_s_own_network(tmp_path: Path) -> None:
    """Check that the worker of a script answers like our executor's, over the script's training images in order."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    inputs = 3 + torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    batches = list(zip(inputs.split(4), (torch.arange(10) % 2).split(4), strict=True))
    data = ScriptData(dict.fromkeys(("training", "validation", "test"), batches), 2)
    task = LoopTask(model, torch.nn.CrossEntropyLoss(), data, lambda net, loader: 0.5)
    site = ScriptSite("site-1", task, model, LocalTraining(), {}, tmp_path)
    reply = site.begin(question(model.state_dict(), 0, []))
    assert reply is not None
    assert (reply.report["norms"], reply.report["values"], reply.report["more"]) == (["0"], [10.0], True)
    assert reply.report["means"] == pytest.approx(inputs.double().mean(0).tolist(), rel=1e-6)


def test_settings() -> None:
    with pytest.raises(ValueError, match="norm_statistics must be"):
        plan_of("segmentation", TINY_SEGMENTS, settings={"norm_statistics": "mean"})
    assert plan_of("segmentation", TINY_SEGMENTS, settings=RECALIBRATED).run.norm_statistics == "recalibrated"


def test_server_and_sites_agree_on_the_statistics() -> None:
    half = {"path": "fairflare.methods.base.training.LocalTraining", "args": {"norm_statistics": "recalibrated"}}
    check_halves(FedLWR(), half, "recalibrated")
    with pytest.raises(HalvesDiffer, match=r"is 'average' at .*and 'recalibrated' at"):
        check_halves(FedLWR(), half, "average")
    with pytest.raises(HalvesDiffer, match=r"is 'recalibrated' at .* and 'site' at"):
        check_halves(FedLWR(), {**half, "args": {"norm_statistics": "site"}}, "recalibrated")
