"""Test that a site sends no value of too few cases: every byte of every reply is read."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.fuel.utils import fobs
from PIL import Image
from typer.testing import CliRunner

from fairflare.base.cases.floor import Floor, cases_of_classes, find_hidden_rows, may_leave
from fairflare.base.task import Metric, Task
from fairflare.cli.commands import app
from fairflare.core.agents.mu_rewards import label_entropy, observation, round_entropy
from fairflare.core.cells import Cell
from fairflare.core.cells import make_cells as cells_of
from fairflare.exchange.messages import SiteReply, SiteTask, encode_reply
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.site import norm_moments
from fairflare.federation.site.gate import Gate
from fairflare.federation.site.replies import OF_TEST, STATS, read_metrics
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import LocalTransport, run_local
from fairflare.flare.export.recipes import FairRecipe
from fairflare.flare.stock_tasks import NotServed, metrics_of
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.reports import ByClass, Field, ReportError, read_report
from fairflare.methods.base.rule import TwoPhase, anchor_fields
from fairflare.methods.base.training import LocalTraining
from fairflare.reporting.table import fairness_table
from fairflare_lab.compare.comparison import compare
from fairflare_lab.page.content import Table
from fairflare_lab.page.material import read_material
from fairflare_lab.page.outcome import results as results_section
from tests.tiny import metric_values, rows, run_document, withheld_names
from tests.unit.report_runs import read as read_parts

from .test_privacy import SITES, plan_of

ALL = 10**6  # cases: nobody has so many
OF_NO_IMAGE = ("mu", "step_norm", "rate_sum")  # what the server chose, and what the optimizer's steps come to
FEW = 2  # images of the last class
HOME = {"sites": {"site-2": {"min_cases": ALL}}}


def read(folder: Path) -> dict[str, Any]:
    return run_document(folder / "server/simulate_job/fairflare/results.json")


# ------------------------------------------------------------------------------------------------ every byte


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, SiteReply, bytes]]:
    """Yield site, task, measured values and sent bytes without the update, for all replies of an in-process run."""
    found: list[tuple[str, str, SiteReply, bytes]] = []
    gate, answer = SiteWorker._keep_home, LocalTransport._answer

    def measured(self: SiteWorker, request: SiteTask, reply: SiteReply) -> None:
        found.append((self.site, request.name, copy.deepcopy(reply), b""))
        gate(self, request, reply)

    def left(self: LocalTransport, site: str, name: str, task: Any) -> Any:
        message = answer(self, site, name, task)
        if message.meta["status"] == "ok":
            stats = {key: value for key, value in message.meta.get("stats", {}).items() if key != "seconds"}
            carried = [message.meta | {"stats": stats}, message.metrics]  # a time may be equal to a secret by chance
            found[-1] = (*found[-1][:3], fobs.dumps(carried) + pickle.dumps(carried))
        return message

    monkeypatch.setattr(SiteWorker, "_keep_home", measured)
    monkeypatch.setattr(LocalTransport, "_answer", left)
    return found


def numbers(value: Any) -> Iterator[float]:
    """Return every number in measured values, except numbers that anybody could name."""
    if isinstance(value, Mapping):
        for name, own in value.items():
            yield from () if name in OF_NO_IMAGE else numbers(own)
    elif isinstance(value, (list, tuple)):
        for own in value:
            yield from numbers(own)
    elif isinstance(value, ByClass):
        for row in value.rows.values():
            yield from (float(number) for number in row)
    elif isinstance(value, float) and math.isfinite(value) and abs(value * 2 - round(value * 2)) > 1e-9:
        yield value


def found_in(secrets: list[float], carried: bytes) -> list[float]:
    """Return the numbers that occur in bytes: as double or float in either byte order, or as digits."""
    forms = ("<d", ">d", "<f", ">f")
    return [
        secret
        for secret in secrets
        if any(struct.pack(form, secret) in carried for form in forms)
        or (len(repr(secret)) > 8 and repr(secret)[:9].encode() in carried)
    ]


def reporting() -> list[str]:
    """Return one method for each pair of halves that reports something, and one that reports nothing."""
    kinds = {
        (m.rule, m.training): m.name
        for m in all_methods().values()
        if m.rule.report_fields or issubclass(m.rule, TwoPhase)
    }
    return sorted({*kinds.values(), "fed_avg"})


@pytest.mark.many
@pytest.mark.parametrize("name", ["creff", "fed_avg", "fed_lwr", "fed_mas", "fed_mrl"])
def test_nothing_of_too_few_cases_is_in_any_byte(name: str, tmp_path: Path, replies: list[Any]) -> None:
    """Check a site whose every list is below the floor; test_hidden_records.py has every method that reports."""
    plan = plan_of(name)
    plan = replace(plan, run=replace(plan.run, bootstrap=5))
    run_local(plan, tmp_path, HOME)
    shown = {"site-1": 0, "site-2": 0}
    for site, task, measured, carried in replies:
        secrets = list(numbers([metric_values(measured.metrics), measured.report, measured.stats]))
        leaked = found_in(secrets, carried)
        if site == "site-2":
            assert leaked == [], task
        shown[site] += len(secrets)
        assert site == "site-2" or len(leaked) == len(secrets)  # or this test finds nothing at all
    assert min(shown.values()) > 10
    results = read(tmp_path)
    (record,) = results["rounds"]
    assert record["accepted"] == SITES
    assert record["left_out"] == results["left_out"] == []
    assert record["train"]["site-2"]["loss"] is None
    assert results["test"]["site-2"] == {}
    assert results["info"]["said"]["site-2"]["images"] == {}
    assert results["info"]["said"]["site-2"]["min_cases"] == ALL
    assert results["info"]["said"]["site-1"]["min_cases"] is None


def test_moments_of_norms_stay_too(tmp_path: Path, replies: list[Any]) -> None:
    run_local(plan_of("fed_avg", norm_statistics="recalibrated"), tmp_path, HOME)
    of_norms = [(measured, carried) for site, task, measured, carried in replies if (site, task) == ("site-2", "norms")]
    assert of_norms
    assert all(found_in(list(numbers(measured.report)), carried) == [] for measured, carried in of_norms)
    (record,) = read(tmp_path)["rounds"]
    (left,) = record["left_out"]
    assert (left["site"], left["phase"]) == ("site-2", "norms")
    assert "site 'site-2': the field 'norms' is suppressed there: fewer cases than its min_cases" in left["reason"]


def classes_of(folder: Path, counts: tuple[int, ...] = (6, 5, FEW), **keys: Any) -> dict[str, str]:
    """Make a site's folder with so many images of each class in each list."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([len(counts), *folder.name.encode()])
    splits: dict[str, Any] = {"training": [], "validation": [], "test": []}
    for split, entries in splits.items():
        for label, count in enumerate(counts):
            for number in range(count):
                image = f"{split}{label}{number}.png"
                Image.fromarray(rng.integers(0, 255, (33, 33), np.uint8)).save(folder / image)
                more = {key: f"{split}{make(label, number)}" for key, make in keys.items()}
                entries.append({"image": image, "label": label, **more})
    (folder / "datalist.json").write_text(json.dumps({"class_names": [f"c{n}" for n in range(len(counts))], **splits}))
    return {"data_root": str(folder)}


def of_classes(name: str, **settings: Any) -> Plan:
    return make_plan(
        name, task="classification", sites=SITES, num_rounds=1,
        settings={"image_size": [33, 33], "features": [4, 4, 8, 8], "batch_size": 4, "local_epochs": 1,
                  "num_classes": 3, "bootstrap": 20, **settings},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["creff", "fed_mas"])
def test_nothing_of_a_class_with_too_few_cases_is_in_any_byte(name: str, tmp_path: Path, replies: list[Any]) -> None:
    """Check class 2 with two images: no value is of them, and every other class is told."""
    local = {"sites": {site: {**classes_of(tmp_path / site), "min_cases": 3} for site in SITES}}
    run_local(of_classes(name), tmp_path / "run", local)
    for _, task, measured, carried in replies:
        of_class = measured.report.get("class_gradients")
        if of_class is not None:
            assert sorted(of_class.rows) == [0, 1]
            kept = list(numbers([of_class.rows[number].tolist() for number in (0, 1)]))
            assert len(found_in(kept, carried)) == len(kept) > 10
        if "resampled" in measured.stats:  # its draws are of the two other classes' images
            assert measured.stats["num_units"] == 11
            assert not any(b"stats/" + key in carried for key in (b"resampled", b"drawn_units", b"num_units"))
        assert not any(cell.metric == "recall_c2" for cell in measured.metrics)
        if task in ("train", "validate"):
            assert b"recall_c2" in carried
        if task == "train":
            assert measured.num_samples == 11
            secrets = [measured.stats["train_loss"], *measured.stats["epoch_losses"]]
            assert found_in(secrets, carried) == [], "it trains with all of its images"
    results = read(tmp_path / "run")
    gone = {"recall_c2"}
    for site in SITES:
        assert gone.isdisjoint(results["test"][site])
        assert {"recall_c0", "recall_c1", "balanced_accuracy", "loss"} <= set(results["test"][site])
        assert set(results["suppressed"][site]) == gone
        (record,) = results["rounds"]
        assert {f"metrics/{n}" for n in gone} <= set(record["suppressed"][site])
    assert {len(draws) for draws in results["resampled"].values()} == {20}
    assert results["fairness"]["recall_c2"]["suppressed"] == SITES
    assert results["fairness"]["recall_c2"]["num_sites"] == 0


def test_a_class_without_cases_looks_like_one_with_few(tmp_path: Path) -> None:
    """Check that neither names of withheld values nor their absence reveal whether the site has the class."""
    told = []
    for place, counts in (("few", (6, 5, 1)), ("none", (6, 5, 0))):
        local = {"sites": {s: {**classes_of(tmp_path / place / s, counts), "min_cases": 3} for s in SITES}}
        run_local(of_classes("fed_avg"), tmp_path / place / "run", local)
        results = read(tmp_path / place / "run")
        said = [site["class_support"] for site in results["inequality"]["sites"].values()]
        told.append(("recall_c2" in results["suppressed"]["site-1"], said))  # a count of 0 would tell it, too
    assert told == [(True, [None, None])] * 2


def test_the_rescue_factor_leaves_out_classes_with_few_cases(tmp_path: Path, replies: list[Any]) -> None:
    """Compare with the sum over the other classes of the site's own values; without a floor it is over all classes."""
    factors = {}
    for least in (1, 3):
        local = {"sites": {s: {**classes_of(tmp_path / f"{least}{s}"), "min_cases": least} for s in SITES}}
        local["state_root"] = str(tmp_path / f"state{least}")
        plan = of_classes("fed_mas")
        run_local(replace(plan, run=replace(plan.run, experiment="e")), tmp_path / f"run{least}", local)
        (path,) = (tmp_path / f"state{least}" / "e" / "site-1").rglob("divergence.*.pt")
        kept = torch.load(path, weights_only=True)
        before, during = kept["before"].double(), kept["during"].double()
        shown = [0, 1, 2] if least == 1 else [0, 1]
        assert kept["rescue_factor"] == pytest.approx(float((before * during)[shown].sum()), rel=1e-5)
        factors[least] = kept["rescue_factor"]
    assert factors[3] < factors[1]


def test_a_job_can_raise_the_floor_and_not_lower_it(tmp_path: Path) -> None:
    plan = plan_of("fed_avg")
    raised = replace(plan, run=replace(plan.run, min_cases=ALL))
    run_local(raised, tmp_path / "raised")
    assert read(tmp_path / "raised")["test"] == {"site-1": {}, "site-2": {}}
    lower = replace(plan, run=replace(plan.run, min_cases=1))
    run_local(lower, tmp_path / "lower", HOME)
    assert sorted(read(tmp_path / "lower")["suppressed"]) == ["site-2"]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "5", True, None])
def test_a_wrong_floor_costs_the_site_the_check(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="'min_cases' must be an integer >= 1"):
        run_local(plan_of("fed_avg"), tmp_path, {"sites": {"site-2": {"min_cases": wrong}}})


def test_a_site_may_stay_out_of_the_training_then(tmp_path: Path) -> None:
    local = {"sites": {"site-2": {"min_cases": ALL, "train_below_min_cases": False}}}
    plan = plan_of("fed_avg")
    run_local(replace(plan, run=replace(plan.run, min_sites=1)), tmp_path, local)
    (record,) = read(tmp_path)["rounds"]
    assert record["accepted"] == ["site-1"]
    (left,) = record["left_out"]
    assert left["reason"] == (
        "site 'site-2': it does not train with fewer cases than its min_cases (train_below_min_cases)"
    )


# ------------------------------------------------------------------------------------------------ what is a case


def test_cases_are_patients_where_the_list_names_them(tmp_path: Path) -> None:
    """Check that ten images of two patients, or of two volumes, are two cases; otherwise they are ten."""
    task = of_classes("fed_avg").task
    keys = {
        "patient": lambda label, number: f"p{label}{number % 2}", "volume": lambda label, number: f"v{label}",
        "other": lambda label, number: "",
    }  # fmt: skip
    for key, cases in (("patient", [2, 2, 1]), ("volume", [1, 1, 1]), ("other", [10, 4, 1])):
        block = classes_of(tmp_path / key, (10, 4, 1), **{key: keys[key]})
        data = task.open_site("a", block)
        assert data.class_cases("test").tolist() == cases  # type: ignore[union-attr]
        assert data.num_cases("test") == sum(cases)
        assert data.num_samples("test") == 15
        assert Floor(data, max(cases)).holds("test")
        assert not Floor(data, max(cases) + 1).holds("test"), "of no class there are enough"


def test_cases_of_classes_counts_a_patient_once_in_each_class() -> None:
    assert cases_of_classes(["a", "a", "b", "b", "c"], [0, 0, 0, 1, 1], 3) == [2, 2, 0]


# ------------------------------------------------------------------------------------------------ differences


@pytest.mark.parametrize("least", [1, 2, 5])
def test_no_hidden_row_can_be_solved_for(least: int) -> None:
    """Check all small tables: sum and sent values determine the sum over hidden rows, and nothing more."""
    for counts in itertools.product(range(7), repeat=4):
        cases = dict(enumerate(counts))
        hidden, few = find_hidden_rows(cases, least), any(0 < count < least for count in counts)
        assert {label for label, count in cases.items() if count < least} <= hidden
        present = [counts[label] for label in hidden if counts[label]]
        if few and len(hidden) < 4:
            assert len(present) >= 2
            assert sum(present) >= least
        if not few:
            assert present == []
    assert find_hidden_rows({0: 9, 1: 9, 2: 9}, least) == frozenset()


def test_which_metrics_by_class_may_leave() -> None:
    few, nobody = frozenset({1, 2}), frozenset[int]()
    assert [may_leave((c,), few) for c in range(3)] == [True, False, False]
    assert (may_leave((0, 1), few), may_leave((1, 2), few)) == (True, False)  # a mean over those that are shown
    assert [may_leave(None, hidden) for hidden in (few, nobody, None)] == [False, True, False]
    assert [may_leave((), hidden) for hidden in (few, None)] == [True, True]
    assert may_leave((0,), None) is False


# ------------------------------------------------------------------------------------------------ declared


def test_every_field_of_the_package_says_what_it_is_made_of() -> None:
    fields = [*STATS, *norm_moments.FIELDS]
    for method in all_methods().values():
        fields += [*method.rule.report_fields, *anchor_fields(method.rule)]
    assert [field.name for field in fields if field.of is None] == []


@pytest.mark.parametrize(("counts", "leave"), [((6, 5, FEW), False), ((6, 5, 4), True)])
def test_what_was_drawn_goes_with_the_draws(
    counts: tuple[int, ...], leave: bool, tmp_path: Path, replies: list[Any]
) -> None:
    """Check that names and numbers of classes are withheld where a class has few cases, and the draws are not."""
    local = {"sites": {site: {**classes_of(tmp_path / site, counts), "min_cases": 3} for site in SITES}}
    run_local(of_classes("fed_avg"), tmp_path / "run", local)
    names = {"class_support", "classes"}
    carried = [bytes_ for _, task, _, bytes_ in replies if task == "validate"]
    assert carried
    for found in carried:
        drawn = {"resampled", "drawn_units", "num_units", "standard_error"}
        gone = {name for name in {*names, *drawn} if f"stats/{name}".encode() in found}
        assert gone == (set() if leave else names)
    results = read(tmp_path / "run")
    assert results["resampled"] is not None
    assert {own["count"] for own in results["resampled_units"].values()} == {15 if leave else 11}


def test_the_units_of_draws_do_not_hang_on_other_splits(tmp_path: Path) -> None:
    """Check that a validation split with too few cases withholds nothing of the test split."""
    local: dict[str, Any] = {"sites": {}}
    for site in SITES:
        own = classes_of(tmp_path / site, (6, 5, 4))
        listed = tmp_path / site / "datalist.json"
        content = json.loads(listed.read_text())
        content["validation"] = content["validation"][:2]
        listed.write_text(json.dumps(content))
        local["sites"][site] = {**own, "min_cases": 3}
    run_local(of_classes("fed_avg"), tmp_path / "run", local)
    results = read(tmp_path / "run")
    assert {site: found["count"] for site, found in results["resampled_units"].items()} == dict.fromkeys(SITES, 15)


class Own(Task):
    primary_metric = "dice"
    build_model = loss = evaluate = open_site = None  # type: ignore[assignment]

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (*super().declared_metrics(), Metric(name="of_a", doc="x", by_class=True))


def data(**cases: int) -> Any:
    return SimpleNamespace(
        test_splits=("test", "test_light"), num_cases=lambda split: cases.get(split, 9), class_cases=lambda split: None
    )


def test_a_split_of_a_case_too_few_is_not_reported() -> None:
    assert Floor(data(test=4), 4).holds("test")
    assert not Floor(data(test=3), 4).holds("test")


def test_what_was_drawn_leaves_where_the_draws_do() -> None:
    """Check that draws are withheld for a task with unknown classes, and else sent whatever the other lists have."""
    drawn = {"resampled": [0.5], "drawn_units": "patients", "num_units": 9}
    for classes, kept in ((None, set()), (False, {*drawn})):
        task, own = Own(), data(validation=1)
        task.has_classes = classes  # type: ignore[misc]
        reply = SiteReply("ok", metrics=cells_of({"dice": 0.3}, "test"), num_samples=9, stats=dict(drawn))
        Gate("a", task, LocalTraining(), classes=True, floor=Floor(own, 5)).keep_home(
            SiteTask("validate", {}, 0, 1, 0), reply
        )
        assert {*reply.stats} & {*drawn} == kept


def test_what_nobody_declared_stays_where_any_list_has_too_few() -> None:
    """Check fields of a rule, numbers beside them, and metrics of an unknown method or task."""
    for cases, stays in (({}, []), ({"test_light": 1}, ["report/mine", "stats/mine"])):
        reply = SiteReply(
            "ok",
            metrics=cells_of({"dice": 0.3, "of_a": 0.4, "odd": 0.5}, "validation"),
            report={"mine": 1.25},
            stats={"mine": 2},
        )
        own = data(**cases)
        Gate("a", Own(), LocalTraining(), classes=True, floor=Floor(own, 2)).keep_home(
            SiteTask("train", {}, 0, 1, 0), reply
        )
        assert metric_values(reply.metrics) == {"dice": 0.3}
        assert withheld_names(reply.metrics) == ["odd", "of_a"]
        assert reply.stats.get("suppressed", []) == stays
        assert ("mine" in reply.report) == (not stays)


@pytest.mark.parametrize(
    ("name", "split"), [("validate", "test"), ("norms", "training"), ("train", "training"), ("validate", "validation")]
)
def test_the_number_of_images_stays_where_it_is_below_the_floor(name: str, split: str) -> None:
    """Check the split that a task counts: test images, or training images for the norms; `train` counts none."""
    own = data(**{split: 1})
    reply = SiteReply("ok", num_samples=1)
    Gate("a", Own(), LocalTraining(), classes=True, floor=Floor(own, 2)).keep_home(SiteTask(name, {}, 0, 1, 0), reply)
    held = (name, split) in (("validate", "test"), ("norms", "training"))
    assert reply.num_samples == (None if held else 1)
    assert reply.stats.get("suppressed") == (["num_samples"] if held else None)


def test_numbers_by_class_cannot_be_sent_past_the_gate() -> None:
    reply = SiteReply("ok", report={"x": ByClass("training", {0: np.ones(2)})})
    with pytest.raises(TypeError, match="a ByClass cannot travel"):
        encode_reply(reply, 0)


# ------------------------------------------------------------------------------------------------ at the server


def test_a_suppressed_field_is_nan_where_that_means_something_and_a_refusal_where_not() -> None:
    fields = (
        Field("loss", nan_ok=True),
        Field("names", "names"),
        Field("parts", "vector", nan_ok=True, same_length_as="names"),
    )
    found = read_report({"names": ["a", "b"]}, fields, "s", suppressed=["loss", "parts"])
    assert math.isnan(found["loss"])
    assert [math.isnan(value) for value in found["parts"]] == [True, True]
    with pytest.raises(ReportError, match=r"'s': the field 'x' .* than its min_cases"):
        read_report({}, [Field("x")], "s", suppressed=["x"])
    with pytest.raises(ReportError, match="lacks the field 'loss'"):
        read_report({"names": []}, fields, "s")


def test_a_metric_that_came_is_not_suppressed() -> None:
    assert withheld_names(read_metrics("s", rows({}, withheld=["dice"]), {}, OF_TEST)) == ["dice"]
    with pytest.raises(ReportError, match="metric 'dice' comes twice"):
        read_metrics("s", rows({"dice": 0.5}, withheld=["dice"]), {"dice": Metric(name="dice", doc="x")}, OF_TEST)
    with pytest.raises(ReportError, match="carries no metric"):
        read_metrics("s", [], {}, OF_TEST)


def test_stock_controllers_are_told_why() -> None:
    reply = SiteReply("ok", metrics=[Cell("dice", reason="suppressed")])
    with pytest.raises(NotServed, match=r"dice is suppressed.*min_cases"):
        metrics_of(reply, "dice")


@pytest.fixture(scope="module")
def suppressed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floor")
    run_local(plan_of("fed_avg"), folder / "one", HOME)
    return folder


def test_suppressed_is_a_state_of_its_own_wherever_results_are_shown(suppressed_run: Path, tmp_path: Path) -> None:
    folder = suppressed_run / "one"
    results = read(folder)
    metric = results["info"]["primary_metric"]
    assert metric in results["suppressed"]["site-2"]
    summary = results["fairness"][metric]
    assert (summary["suppressed"], summary["excluded"], summary["num_sites"]) == (["site-2"], [], 1)
    table = fairness_table(read_parts(**results))
    (row,) = [line for line in table.splitlines() if line.startswith("site-2")]
    assert row.split() == ["site-2", *["suppressed"] * (len(row.split()) - 1)]
    assert f"site-2 (suppressed: fewer than {ALL} cases)" in " ".join(table.split())
    assert ",suppressed" in next(
        line for line in fairness_table(read_parts(**results), style="csv").splitlines() if "site-2" in line
    )
    shown = CliRunner().invoke(app, ["show", str(folder)], env={"COLUMNS": "300"}).output
    assert "suppressed" in next(line for line in shown.splitlines() if "site-2" in line)
    side = compare([read_parts(**results)])
    assert "suppressed" in side
    assert " ".join(side.split()).count(f"without site-2 (suppressed: fewer than {ALL} cases)") == 1
    home = results["rounds"][0]["suppressed"]["site-2"]
    assert {f"metrics/{metric}", "stats/train_loss"} <= {*home}
    material = read_material(folder)
    section = results_section(material)
    assert section is not None
    (table_of_sites,) = [part for part in section.parts if isinstance(part, Table) and part.name == "sites"]
    (cells,) = [row for row in table_of_sites.rows if row[0] == "site-2"]
    texts = [getattr(cell, "text", cell) for cell in cells[1:]]
    assert texts == ["suppressed"] * (len(table_of_sites.columns) - 1), "its interval is suppressed, too"
    assert any(f"site-2 (suppressed: fewer than {ALL} cases)" in one.text for one in material.findings)


def test_a_run_in_which_nobody_says_anything_is_complete(tmp_path: Path) -> None:
    plan = plan_of("fed_avg")
    run_local(replace(plan, run=replace(plan.run, min_cases=ALL)), tmp_path)
    results = read(tmp_path)
    assert results["status"] == "completed"
    assert "suppressed" in fairness_table(read_parts(**results))
    assert "worst value" not in fairness_table(read_parts(**results))  # of nobody
    why = f"(suppressed: fewer than {ALL} cases)"
    assert f"without site-1 {why}, site-2 {why}." in " ".join(fairness_table(read_parts(**results)).split())
    with pytest.raises(ValueError, match=rf"at site-1 \({why[1:-1]}\), site-2 \({why[1:-1]}\)"):
        compare([read_parts(**results)])
    assert CliRunner().invoke(app, ["show", str(tmp_path)]).exit_code == 0


# ------------------------------------------------------------------------------------------------ FedMRL's entropy


def test_the_entropy_that_leaves_is_the_same_to_an_agent_up_to_its_digit() -> None:
    rng = np.random.default_rng(0)
    for classes in (2, 3, 8):
        for _ in range(200):
            counts = rng.multinomial(200, rng.dirichlet(np.ones(classes))).tolist()
            exact, told = label_entropy(counts), round_entropy(counts)
            assert told == pytest.approx(exact, abs=0.05 + 1e-12)
            assert round(told, 1) == told
            seen = [
                observation(max(value, -math.log(classes)), 0.5, 0.5, 1.0, num_classes=classes)[0]
                for value in (exact, told)
            ]
            assert abs(seen[0] - seen[1]) <= 0.05 / math.log(classes) + 1e-9


def test_the_entropy_that_leaves_does_not_tell_the_counts() -> None:
    """Check two classes and 60 or 500 images: many counts give the sent value, though each exact value differs."""
    for total, most in ((60, 0.05), (500, 0.0)):
        tables = [(total - k, k) for k in range(total // 2 + 1)]
        exact = [round(label_entropy(table), 12) for table in tables]
        assert len(set(exact)) == len(tables)
        told = [round_entropy(table) for table in tables]
        alone = sum(told.count(value) == 1 for value in told)
        assert alone <= most * len(tables)


def test_a_preinstalled_job_does_not_share_it_unless_asked() -> None:
    plain, hospitals = FairRecipe("fed_mrl"), FairRecipe("fed_mrl", packaging="preinstalled")
    asked = FairRecipe("fed_mrl", packaging="preinstalled", settings={"share_entropy": True})
    assert [r.plan.training.share_entropy for r in (plain, hospitals, asked)] == [True, False, True]  # type: ignore[attr-defined]
