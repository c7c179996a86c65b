"""Test that sentences of tables and pages claim no more than happened, with hand-made results and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairflare.base.checks import choice, nearest, unknown
from fairflare.cli.run.folder import last_errors
from fairflare.cli.run.words import say_plan
from fairflare.federation.plan.plan import OF_SITES, make_plan
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.record.best_model import BestModel
from fairflare.federation.record.curves import EventFiles
from fairflare.federation.record.models import BEST_MODEL_FILE, ModelFiles
from fairflare.federation.record.run_info import _what_is_run
from fairflare.federation.site.site_file import SHELL_SETTINGS
from fairflare.prediction.saved_model import read_model
from fairflare.reporting.documents import RoundRecord
from fairflare.reporting.no_effect import find_undetected_parts, nothing_learnt
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import find_results
from fairflare.reporting.table import fairness_table
from fairflare.reporting.values import spell_metric
from fairflare.tasks.shared.site_settings import SiteSettings
from fairflare_lab.compare.comparison import comparison_of
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.unseen import unseen_of
from fairflare_lab.page.lines import frame, lines, panels_of
from fairflare_lab.page.material import describe_comparison, describe_run
from fairflare_lab.page.write import build
from tests.unit.report_runs import document, read, write_run

VALUES = {"site-1": 0.8, "site-2": 0.6}


def told(**info: Any) -> dict[str, Any]:
    made = document("fed_avg", 0, VALUES)
    made["info"] |= info
    return made


# ------------------------------------------------------------------------------------------------ the best model


@pytest.mark.parametrize(
    ("best", "sentence"),
    [
        ({"value": None, "sites": [], "is_last": True}, "No model was compared, as no site told a validation figure;"),
        (
            {"value": 0.5, "sites": ["site-1"], "is_last": True},
            "The best model by the validation splits is the last one.",
        ),
    ],
)
def test_a_model_is_the_best_only_where_something_was_validated(best: dict[str, Any], sentence: str) -> None:
    made = told() | {"best": {"round": 1, "by": "mean", **best}, "test_best": None}
    page = build(describe_run(read(**made)))
    for notes in (run_notes(read(**made)), next(s for s in page.sections if s.name == "results").notes):
        assert [note for note in notes if "model was compared" in note or "best model" in note] == [
            note for note in notes if note.startswith(sentence)
        ]
        assert any(note.startswith(sentence) for note in notes)


@pytest.mark.parametrize(
    ("scores", "words"),
    [({}, "the last, as no site told a validation figure"), ({"a": {"dice": 0.5}}, "the best by validation (dice)")],
)
def test_predict_calls_a_model_the_best_only_where_something_was_validated(
    scores: dict[str, Any], words: str, tmp_path: Path
) -> None:
    files = ModelFiles(tmp_path, "FedAvg", BestModel(RunSettings(), True), lambda: {"metric": "dice"})
    assert files.keep_best({"w": torch.zeros(1)}, scores, "dice", 0, last=True)
    assert read_model(tmp_path / BEST_MODEL_FILE).describe() == f"{words}, of round 0, FedAvg"


# ------------------------------------------------------------------------------------------------ method and task


def test_a_method_without_its_loss_says_so_in_table_comparison_and_page() -> None:
    plan = make_plan("bsm_fl", task="segmentation", train_like="fed_lwr", settings={"criterion": "task"})
    found = _what_is_run(plan.run, plan.rule, plan.training, plan.task)
    sentence = "bsm_fl without its own loss: criterion='task' (its own: 'balanced_softmax')"
    assert found == {"title": "BSM-FL (bsm_fl)", "kind": "segmentation", "without": sentence}
    labelled = _what_is_run(replace(plan.run, label="trial"), plan.rule, plan.training, plan.task)
    assert labelled == {**found, "title": 'BSM-FL, run "trial"'}, "a label is a text for people"
    made = told(**found)
    assert f"{sentence}." in " ".join(fairness_table(read(**made)).split())
    assert f"{sentence}." in comparison_of([read(**made)]).notes
    assert f"{sentence}." in next(s for s in build(describe_run(read(**made))).sections if s.name == "results").notes
    own = make_plan("bsm_fl")
    assert _what_is_run(own.run, own.rule, own.training, own.task)["without"] == ""


@pytest.mark.parametrize(
    ("method", "label", "title"),
    [
        ("fed_avg", "", "FedAvg (fed_avg)"), ("ditto", "ditto", "Ditto (ditto)"),
        ("solo", "trial", 'Solo, run "trial"'), ("crt", "trial", 'FedAvg + cRT, run "trial"'),
        ("logit_adjustment", "x", 'LA, run "x"'),
        ("fed_lwr", "fed_lwr (mix=0.5)", 'Fed-LWR, run "fed_lwr (mix=0.5)"'),
        ("ditto", "fed_avg", 'Ditto, run "fed_avg"'),
    ],
)  # fmt: skip
def test_a_run_is_called_after_its_method_and_its_label_beside(method: str, label: str, title: str) -> None:
    plan = make_plan(method)
    assert _what_is_run(replace(plan.run, label=label), plan.rule, plan.training, plan.task)["title"] == title


# ------------------------------------------------------------------------------------------------ the page's head


def test_a_page_says_first_what_was_run() -> None:
    made = told(label="first", title='FedAvg, run "first"', kind="segmentation")
    made["rounds"] = made["rounds"][:1]
    page = build(describe_run(read(**made)))
    assert page.title == 'FedAvg, run "first"'
    assert dict(page.facts) == {
        "Method": "FedAvg", "Task": "segmentation, by Dice", "Data": "SYNTHETIC (generated)",
        "Sites": "2: site-1, site-2", "Rounds": "1 of 2", "Seed": "0",
        "Date": "2026-01-01 to 2026-01-09",
    }  # fmt: skip
    assert page.first[0] == "The run has 1 of 2 rounds."
    results = next(section for section in page.sections if section.name == "results")
    (sites,) = (part for part in results.parts if part.name == "sites" and hasattr(part, "columns"))
    assert "dice" in sites.columns
    assert "first" not in sites.columns


def test_a_page_has_dice_by_structure_and_names_in_words() -> None:
    made = told()
    for site, values in made["test"].items():
        values |= {"dice_left_lung": VALUES[site] + 0.1, "dice_class_2": None}
    *_, table = (
        part for s in build(describe_run(read(**made))).sections for part in s.parts
        if part.name == "sites" and hasattr(part, "columns")
    )  # fmt: skip
    place = table.columns.index("dice_left_lung")
    assert [row[place] for row in table.rows[:2]] == [pytest.approx(0.9), pytest.approx(0.7)]
    other = told(label="b", seed=0)
    other["test"] = {site: {**values, "dice_left_lung": 0.5} for site, values in made["test"].items()}
    page = build(describe_comparison([read(**made), read(**other)], None, None, {}, []))
    (table,) = (part for s in page.sections for part in s.parts if part.name == "metrics")
    assert [row[table.columns.index("Dice left lung")].mean for row in table.rows] == [  # type: ignore[union-attr]
        pytest.approx(0.8), pytest.approx(0.5),
    ]  # fmt: skip
    words = {"es_dice": "equity-scaled Dice", "dice_gap": "gap in Dice", "balanced_accuracy": "balanced accuracy"}
    assert {name: spell_metric(name) for name in words} == words


# ------------------------------------------------------------------------------------------------ nothing was learnt


def test_a_classifier_that_calls_every_image_the_same_learnt_nothing() -> None:
    test = {site: {"recall": 0.5, "recall_a": 1.0, "recall_b": 0.0} for site in VALUES}
    made = told(primary_metric="recall", higher_is_better={"recall": True, "recall_b": True}) | {"test": test}
    assert nothing_learnt(read(**made)) == ["Nothing was learnt: every test image at every site is called a."]
    test["site-1"]["recall_c"] = 0.2
    assert nothing_learnt(read(**made)) == []
    assert find_undetected_parts(read(**made)) == {"recall_b": "recall b"}
    test["site-2"]["recall_b"] = 0.1
    assert nothing_learnt(read(**made)) == []
    assert find_undetected_parts(read(**made)) == {}


def test_models_that_find_nothing_anywhere_are_not_praised_for_a_gain() -> None:
    runs = []
    for site in VALUES:
        seen = {other: 0.0 for other in ("site-1", "site-2", "site-3") if other != site}
        runs.append(
            (read(**document("fed_avg", 0, seen)), Unseen(site=site, metrics={"dice": 0.0}, adapted={"dice": 0.2}))
        )
    found = unseen_of(runs)
    assert found.notes[0] == "fed_avg learnt nothing: Dice is 0 at every site, trained at or not."


# ------------------------------------------------------------------------------------------------ curves, names, runs


def test_a_run_in_this_process_has_curves_for_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = RoundRecord(
        current_round=0, sites=["a", "b"], validation={"a": {"dice": 0.5}, "b": {"dice": 0.75}},
        train={"a": {"loss": 1.0}, "b": {"loss": float("nan")}}, site_weights={"a": 0.25, "b": 0.75},
    )  # fmt: skip
    (tmp_path / "tb_events" / "server").mkdir(parents=True)
    (tmp_path / "tb_events" / "server" / "events.out.tfevents.old").touch()
    with EventFiles(tmp_path, {"dice": True}) as curves:
        curves.round_done(record, "dice")
        curves.round_done(replace(record, current_round=1), "dice")
        curves.tested({"a": {"dice": 0.625}}, "dice", 2)
    (file,) = (tmp_path / "tb_events" / "server").iterdir()
    read = accumulator.EventAccumulator(str(file)).Reload()
    points = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert points["validation_dice/worst"] == [(0, 0.5), (1, 0.5)]
    assert points["weight/b"] == [(0, 0.75), (1, 0.75)]
    assert points["test_dice/a"] == [(2, 0.625)]
    assert "train_loss/b" not in points


def test_the_nearest_names_take_the_place_of_all() -> None:
    known = ["learning_rate", "lowest_rate", "local_epochs", "batch_size", "momentum"]
    assert nearest("learning_rat", known) == "; did you mean 'learning_rate'?"
    assert nearest("lr", known, most=1) == "; did you mean 'learning_rate'?"
    assert nearest("lr", known) == "; did you mean 'learning_rate' or 'lowest_rate'?"
    assert nearest("rate", known) == nearest("zzz", known, far=True) == ""
    assert nearest("rate", known, far=True) == "; did you mean 'lowest_rate' or 'learning_rate'?"
    assert nearest("Learning_Rate", known) == nearest("learn", known) == "; did you mean 'learning_rate'?"
    assert nearest("lo", known) == ""  # begins a known name, but with too few letters
    assert nearest("structures", ["sites", "secure", "state_root"], far=True) == ""
    assert nearest("age", ["image"]) == "; did you mean 'image'?"
    assert nearest("age", ["image"], close=0.77) == ""
    assert unknown("zzz", known) == "; Available: batch_size, learning_rate, local_epochs, lowest_rate, momentum"
    many = [f"setting_{number}" for number in range(90)]
    assert unknown("settin_1", many, "the docs have all") == (
        "; did you mean 'setting_1' or 'setting_81' or 'setting_71'? the docs have all"
    )
    assert unknown("zzz", many, "the docs have all") == "; the docs have all"
    assert unknown("zzz", many) == ""
    with pytest.raises(
        ValueError, match=r"^task must be one of 90 names, got 'setting_1x'; did you mean 'setting_1' or"
    ):
        choice("task", "setting_1x", many)
    with pytest.raises(ValueError, match=r"no setting 'zzz'; `fairflare describe fed_avg` has all$"):
        make_plan("fed_avg", settings={"zzz": 1})


def test_a_setting_of_the_site_is_told_where_it_stands() -> None:
    with pytest.raises(ValueError, match=r"^'device' is set by each site itself, in its local/fairflare.json"):
        make_plan("fed_avg", settings={"device": "cuda"})
    assert {*OF_SITES} <= {*SHELL_SETTINGS, *SiteSettings.__dataclass_fields__}


def test_a_folder_of_runs_is_answered_with_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, told())
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"no results.json in .*; it holds 2 runs: .*/a, .*/b$"):
        find_results(tmp_path)


@pytest.mark.parametrize(("value", "most"), [(0.33, 0.66), (0.0, 1.0)])
def test_one_point_has_a_scale_that_begins_at_0(value: float, most: float) -> None:
    material: Any = SimpleNamespace(over_seeds="", synthetic=False)
    panels = panels_of(frame([("", "a", 0, value)]), ["a"])
    axes = lines(material, "n", "title", panels, "", "Dice").draw().axes[0]
    assert (axes.get_xlim(), axes.get_ylim()) == ((-1, 1), (0, most))


def test_what_went_wrong_is_said_without_the_kind_of_our_own_errors(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    lines = [
        "12:00 - root - ERROR - the run failed",
        "    raise RuntimeError(...)",
        "RuntimeError: runs/a is in use by b",
    ]
    log.write_text("\n".join(lines))
    assert last_errors(log) == ["runs/a is in use by b"]
    log.write_text("\n".join([*lines, "torch.OutOfMemoryError: no memory"]))
    assert last_errors(log)[-1] == "torch.OutOfMemoryError: no memory"


def test_local_training_is_called_a_bundles_only_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan("fed_avg", task="volume_segmentation")
    assert plan.prescribed
    say_plan(plan)
    told = " ".join(capsys.readouterr().err.split())
    assert "local training, as the task has it: " in told
    assert "bundle" not in told
