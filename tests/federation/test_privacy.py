"""Test ``fairflare privacy``: it prints what the declared fields say, and nothing else leaves a site."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fairflare.base.aspect import GROUPS
from fairflare.base.cases.floor import Floor
from fairflare.base.checks import MAX_REASON
from fairflare.base.task import Metric, Task
from fairflare.cli.commands import app
from fairflare.core.cells import make_cells
from fairflare.core.features.adapting import network_of
from fairflare.exchange.messages import CELL, Message, SiteReply, SiteTask, encode_reply, encode_task
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.privacy import ENVELOPE, TOLD, field_row, page
from fairflare.federation.server.check import FIELDS
from fairflare.federation.site import norm_moments
from fairflare.federation.site.gate import METRICS_BY_CLASS, MIN_CASES, TRAINS_BELOW, Gate
from fairflare.federation.site.replies import COUNTS, STATS
from fairflare.federation.transports.local import LocalTransport, run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.reports import Field
from fairflare.methods.base.rule import MakesTensors, TwoPhase, anchor_fields
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.crt import ClassifierAverage
from fairflare.tasks.base import evaluating
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import run_document

ROOT = Path(__file__).parents[2]
SITES = ["site-1", "site-2"]
HOLDERS = ("metrics", "report", "stats")  # keys of an answer whose content is declared field by field
TINY: dict[str, dict[str, Any]] = {
    "classification": {
        "image_size": [33, 33], "features": [4, 4, 8, 8], "phantom": "fundus", "phantom_sites": 2,
        "phantom_samples": 60, "phantom_test": 40, "partition": "iid", "corrupted_sites": 1, "batch_size": 16,
        "class_groups": {"head": [0, 1], "tail": [2, 3, 4]},
    },
    "segmentation": {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "batch_size": 4},
}  # fmt: skip
#: A phantom with groups of people.
OF_PEOPLE: dict[str, Any] = {
    "phantom": "dermoscopy", "phantom_samples": 100, "phantom_test": 64, "phantom_own_test": 64,
    "class_groups": {"head": [0, 1, 2], "tail": [3, 4, 5, 6, 7]},
}  # fmt: skip


def plan_of(name: str, num_rounds: int = 1, **more: Any) -> Plan:
    settings = {**TINY[all_methods()[name].task], "local_epochs": 1, **more}
    settings |= OF_PEOPLE if name == "fair_lora" else {}
    if name == "fed_mrl":
        settings["mu_policy"] = "qmix"  # the quick job's is fixed, and nobody is told
    return make_plan(name, sites=SITES, num_rounds=num_rounds, settings=settings)


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Message, Message]]:
    """Return task name, server's message and site's answer, for every exchange of an in-process run."""
    found: list[tuple[str, Message, Message]] = []
    answer = LocalTransport._answer

    def watched(self: LocalTransport, site: str, name: str, task: Message) -> Message:
        sent = replace(task, meta=json.loads(json.dumps(task.meta)))
        found.append((name, sent, replace(reply := answer(self, site, name, task))))
        return reply

    monkeypatch.setattr(LocalTransport, "_answer", watched)
    return found


@pytest.mark.many
def test_statistics_of_too_few_images_reach_no_other_site(tmp_path: Path, carried: list[Any]) -> None:
    """Check FedRDN with a site below its floor: it trains and tests, and nobody draws the values of its images."""
    run_local(plan_of("fed_rdn", 2), tmp_path, {"sites": {"site-2": {"min_cases": 10**6}}})
    trained = [(sent.meta, reply.meta) for name, sent, reply in carried if name == "train"]
    assert [len(sent["directives"]["input_statistics"]) for sent, _ in trained] == [0, 0, 1, 1]
    told = [sorted((reply.get("report") or {}).keys() & {"input_mean", "input_std"}) for _, reply in trained]
    assert sorted(told) == [[], [], ["input_mean", "input_std"], ["input_mean", "input_std"]]
    record = run_document(next(tmp_path.rglob("results.json")))["rounds"][-1]
    assert record["accepted"] == SITES


# ------------------------------------------------------------------------------------------------ the page


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(app, ["privacy"])
    assert result.exit_code == 0
    assert result.output == page()


def test_every_declared_value_is_on_the_page() -> None:
    text = page()
    for method in all_methods().values():
        assert f"(`{method.name}`)" in text
        for field in (
            *method.rule.report_fields,
            *anchor_fields(method.rule),
            *COUNTS,
            *STATS,
            *FIELDS,
            *norm_moments.FIELDS,
        ):
            assert field.doc, field.name
            assert f"| `{field.name}` | " in text
        for name, doc in method.rule.directive_docs.items():
            assert f"| `{name}` | {doc} |" in text
    for task in (ClassificationTask(), SegmentationTask(num_classes=2)):
        for metric in task.declared_metrics():
            name = f"`{metric.family or metric.name}`"
            rows = [line.split(" | ") for line in text.splitlines() if f" | {metric.doc} | " in line]
            assert any(name in row[0] for row in rows), name


def test_the_page_by_hand_has_the_code_s_names_and_numbers() -> None:
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    keys = set(re.findall(r'"(\w+)": (?:true|false)', text))
    assert keys == {METRICS_BY_CLASS, TRAINS_BELOW, "submit_model", "allow_log_streaming"}
    assert f"`{MIN_CASES}`" in text
    assert f"at most {MAX_REASON} characters" in " ".join(text.split())


def test_a_field_that_does_not_say_what_it_is_has_no_row() -> None:
    with pytest.raises(ValueError, match=r"field 'gradient' has no doc=\.\.\."):
        field_row(Field("gradient"), "train")


# ------------------------------------------------------------------------------------------------ what travels


def test_nothing_else_is_in_a_message() -> None:
    told = encode_task(SiteTask("train", {}, 0, 1, 0))
    assert set(told.meta) == TOLD.keys() - GROUPS.fields.keys()
    assert set(encode_task(SiteTask("train", {}, 0, 1, 0, groups=("sex",))).meta) == set(TOLD)
    answer = encode_reply(SiteReply("ok"), 0)
    assert set(vars(answer)) - {"meta", "is_update", "by_site", "each"} <= {*ENVELOPE, *HOLDERS}
    assert set(answer.meta) == {*ENVELOPE, *HOLDERS, *(f.name for f in COUNTS)} - {"params", "current_round", "metrics"}


def test_nothing_is_added_on_the_way_through_flare() -> None:
    from fairflare.flare.messages.wire import META_KEY, NUM_STEPS, encode_model

    reply = encode_reply(SiteReply("ok", metrics=make_cells({"dice": 0.5}, "test"), num_steps=3), 0)
    assert encode_model(reply).meta == {META_KEY: reply.meta, NUM_STEPS: 3}
    assert f"`{NUM_STEPS}`" in page()


def check_declared(plan: Plan, name: str, sent: Message, reply: Message) -> None:
    """Check that every key that travelled is declared, for the answer that it is in."""
    rule = plan.rule
    assert set(sent.meta) == TOLD.keys() - GROUPS.fields.keys()
    known = {"done", "exchange"} if name == "norms" else documented(plan)
    assert set(sent.meta["directives"]) <= known
    assert reply.meta["status"] == "ok", reply.meta["reason"]
    assert reply.meta["reason"] == ""
    fields = {
        "check": FIELDS, "train": rule.report_fields, "anchor": anchor_fields(type(rule)), "norms": norm_moments.FIELDS,
        "validate": (),
    }[name]  # fmt: skip
    assert set(reply.meta["report"]) <= {field.name for field in fields}
    stats = {field.name for field in STATS}
    assert set(reply.meta["stats"]) <= stats - (
        set() if name == "train" else {"train_loss", "epoch_losses", "synthetic"}
    )
    assert (reply.params is None) == (name != "train")
    assert (sent.params is None) == (name == "check")
    sends_part = bool(isinstance(plan.rule, MakesTensors) or plan.run.crt_rounds)
    stays = plan.training.home.stays(network_of(plan.task)) if name == "train" else []
    received = set(sent.params or ()) - set(stays)
    assert set(reply.params or ()) <= received
    assert sends_part or reply.params is None or set(reply.params) == received
    declared = {metric.name for metric in plan.task.declared_metrics()}
    assert {row["metric"] for row in reply.metrics} <= declared
    assert {name for row in reply.metrics for name in row} <= {*CELL}
    assert bool(reply.metrics) == (name not in ("anchor", "check", "norms"))
    assert (reply.meta["num_steps"] is None) == (name != "train")
    assert (reply.meta["num_samples"] is None) == (name in ("anchor", "check"))


def that_say_something() -> list[str]:
    """Return one method for each pair of halves that reports or is told something, and federated averaging."""
    found = {
        (m.rule, m.training): m.name
        for m in all_methods().values()
        if m.rule.report_fields or m.rule.directive_docs or issubclass(m.rule, TwoPhase)
    }
    return sorted({*found.values(), "fed_avg"})


@pytest.mark.many
@pytest.mark.parametrize("name", that_say_something())
def test_what_leaves_a_site_is_declared(name: str, tmp_path: Path, carried: list[Any]) -> None:
    plan = plan_of(name, num_rounds=2 if name == "fed_mrl" else 1)  # whose sites are told more from the second on
    run_local(plan, tmp_path)
    tasks = ["check", "train", *(["anchor"] if isinstance(plan.rule, TwoPhase) else []), "validate"]
    assert {task for task, _, _ in carried} == set(tasks)
    for task, sent, reply in carried:
        check_declared(plan, task, sent, reply)
    told = set().union(*(sent.meta["directives"] for _, sent, _ in carried))
    silent = ("bsm_kd", "fed_lesam", "group_dro", "q_fed_avg")  # do not ask: without teacher, saga, attribute, sums
    assert told == documented(plan) or name in silent


def documented(plan: Any) -> set[str]:
    """Return the directives that have a row on the page."""
    return {*plan.rule.directive_docs, *(ClassifierAverage.directive_docs if plan.run.crt_rounds else ())}


@pytest.mark.many
def test_what_leaves_a_site_for_recalibrated_statistics_is_declared(tmp_path: Path, carried: list[Any]) -> None:
    plan = plan_of("fed_avg", norm_statistics="recalibrated")
    run_local(plan, tmp_path)
    assert {task for task, _, _ in carried} == {"check", "train", "norms", "validate"}
    for task, sent, reply in carried:
        check_declared(plan, task, sent, reply)


class Curious(LocalTraining):
    """Define a site half that reports more than its rule declares."""

    def report(self, run: Any, model: Any) -> dict[str, Any]:
        return {"class_counts": [1, 2]}


def test_an_undeclared_value_is_found(tmp_path: Path, carried: list[Any]) -> None:
    plan = plan_of("fed_avg")
    plan = replace(plan, training=Curious(batch_size=4))
    run_local(plan, tmp_path)
    with pytest.raises(AssertionError, match="class_counts"):
        check_declared(plan, *next(found for found in carried if found[0] == "train"))


# ------------------------------------------------------------------------------------------------ metrics by class


def by_class(metrics: Mapping[str, float]) -> set[str]:
    return {name for name in metrics if name.rpartition("/")[2].startswith("recall_")}


def test_metrics_by_class_stay_at_home_where_the_site_says_so(
    tmp_path: Path, carried: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Check training and final test by two runs that differ in this setting alone; table and results name the site."""
    results = {}
    for folder, local in (("all", {}), ("kept", {"sites": {"site-2": {"metrics_by_class": False}}})):
        run_local(plan_of("bsm_fl", 2), tmp_path / folder, local)
        results[folder] = run_document(tmp_path / folder / "server/simulate_job/fairflare/results.json")
    everything, kept = results["all"], results["kept"]
    assert "classes_at_home" not in everything["info"]
    assert kept["info"]["classes_at_home"] == ["site-2"]
    measured = [*(r["validation"] for r in everything["rounds"]), everything["test"]]
    left = [*(r["validation"] for r in kept["rounds"]), kept["test"]]
    for all_of, some in zip(measured, left, strict=True):
        assert all_of["site-1"] == some["site-1"]
        assert by_class(all_of["site-2"])
        assert some["site-2"] == {k: v for k, v in all_of["site-2"].items() if k not in by_class(all_of["site-2"])}
        assert {"balanced_accuracy", "loss"} <= set(some["site-2"])
    assert {"corrupted/balanced_accuracy", "head", "clean/tail"} <= set(kept["test"]["site-2"])
    assert any("clean/recall_" in name for name in everything["test"]["site-2"])
    note = "Metrics by class stay at home at: site-2."
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "kept")], env={"COLUMNS": "300"}).output
    assert note in " ".join(shown.split())
    assert "stay at home" not in CliRunner().invoke(app, ["show", str(tmp_path / "all")]).output


class Named(Task):
    """Define a task whose metrics a test gives; it also declares ``sharp``, and that ``of_a`` is by class."""

    primary_metric = "dice"
    build_model = loss = evaluate = open_site = None

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (*super().declared_metrics(), Metric(name="sharp", doc="x"), Metric(name="of_a", doc="x", by_class=True))


Named.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (("dice", "loss", "sharp", "of_a"), ("dice", "loss", "sharp")),
        (("dice", "undeclared"), ("dice",)),
        (("dice", "of_light/sharp", "of_b/dice", "test/dice", "light/dice", "light/light/dice"), ("dice",)),
    ],
)
@pytest.mark.parametrize("split", ["test", "test_light"])
def test_what_is_not_declared_stays_too(names: tuple[str, ...], left: tuple[str, ...], split: str) -> None:
    """Check classes with any name, also one that ends like a metric that is sent."""
    reply = SiteReply("ok", metrics=make_cells(dict.fromkeys(names, 0.5), split))
    data: Any = SimpleNamespace(test_splits=("test", "test_light"))
    gate = Gate("a", Named(), LocalTraining(), classes=False, floor=Floor(data, 1))
    gate.keep_home(SiteTask("validate", {}, 0, 1, 0), reply)
    assert [(cell.split, cell.metric) for cell in reply.metrics] == [(split, name) for name in left]
    assert reply.stats == {"classes_at_home": True}


@pytest.mark.parametrize(
    ("settings", "groups_leave"),
    [
        ({"phantom": "endoscopy"}, True),
        ({"num_classes": 4, "class_groups": {"head": [0, 1], "tail": [2, 3]}}, True),
        ({"num_classes": 4, "class_groups": {"head": [0], "tail": [1, 2, 3]}}, False),
        ({"num_classes": 4, "class_groups": {"head": [0, 0], "tail": [1, 2, 3]}}, False),
        (
            {"num_classes": 4, "class_groups": {"most": [1, 2, 3]}},
            False,
        ),  # the one left is 4 balanced_accuracy - 3 most
        ({"num_classes": 4, "class_groups": {"some": [1, 2]}}, True),
    ],
)
def test_groups_leave_unless_a_class_can_be_solved_for(settings: dict[str, Any], groups_leave: bool) -> None:
    task = ClassificationTask(**settings)
    declared = {metric.name: metric.by_class for metric in task.declared_metrics()}
    assert all(declared[f"recall_{name}"] for name in task.names())
    assert all(declared[name] is not groups_leave for name in (*task.groups(), "all"))
    assert not any(declared[name] for name in ("balanced_accuracy", "accuracy", "auc_ovo", "loss"))


@pytest.mark.parametrize(
    "task",
    [
        ClassificationTask(**{k: v for k, v in TINY["classification"].items() if k != "batch_size"}),
        SegmentationTask(image_size=(32, 32), features=(4, 4, 8, 8, 8, 4), num_classes=2, class_names=["x", "y"]),
    ],
)
def test_a_task_declares_what_it_measures(task: Any) -> None:
    import torch

    torch.manual_seed(0)
    model = task.build_model()
    inputs = torch.rand(8, task.in_channels, 33, 33) if task.class_labels else torch.rand(8, 1, 32, 32)
    targets = torch.arange(8) % 5 if task.class_labels else torch.rand(8, 2, 32, 32).round()
    with evaluating(model):
        metrics = task.evaluate(model, [(inputs, targets)], "cpu")
    declared = {metric.name: metric for metric in task.declared_metrics()}
    assert set(metrics) <= set(declared)
    assert sum(declared[name].by_class for name in metrics) == (5 if task.class_labels else 4)
    for name, value in metrics.items():
        assert declared[name].low <= value <= declared[name].high
