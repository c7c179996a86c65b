"""Test a metric's direction and range: the task declares them, they are never guessed from a name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairflare.base.settings import field_names
from fairflare.base.task import Metric
from fairflare.core.fairness import BEFORE_RECORDED, declared_as, higher_is_better
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.site.replies import OF_TEST, read_metrics, read_stats
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.reports import ReportError
from fairflare.reporting.results import find_results, read_results
from fairflare.reporting.table import direction_of, fairness_table
from fairflare.tasks.scripts import LoopTask, ScriptTask
from tests.tiny import metric_values, rows
from tests.unit.report_runs import read

from ..tiny import run_document

NAMES = ["normal", "bone loss", "refractive error"]
BY_INTENSITY = """
import torch
from fairflare.tasks.classification import ClassificationTask


class ByIntensity(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sharpness = torch.nn.Parameter(torch.tensor(50.0))
        self.register_buffer("centres", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, images):
        return -self.sharpness * (images.mean((1, 2, 3))[:, None] - self.centres) ** 2


class Task(ClassificationTask):
    def build_model(self):
        return ByIntensity()
"""


def site_folder(folder: Path, wrong: int) -> str:
    """Make a site whose classes differ in brightness, except ``wrong`` of four images of each diseased class."""
    (folder / "images").mkdir(parents=True)
    entries = []
    for label, level in enumerate((25, 128, 230)):
        for number in range(4):
            shown = 25 if label and number < wrong else level
            name = f"images/{label}_{number}.npy"
            np.save(folder / name, np.full((33, 33), shown, np.uint8))
            entries.append({"image": name, "label": label})
    content = {"training": entries, "validation": [], "test": []}
    for split in ("validation", "test"):
        for entry in entries:
            copy = entry["image"].replace("images/", f"images/{split}_")
            np.save(folder / copy, np.load(folder / entry["image"]))
            content[split].append({**entry, "image": copy})
    groups = {"diseased": [1, 2], "others": [0]}
    (folder / "datalist.json").write_text(json.dumps({**content, "class_names": NAMES, "class_groups": groups}))
    return str(folder)


def plan_of(file: Path, **settings: Any) -> Plan:
    given = {"num_classes": 3, "image_size": [33, 33], "in_channels": 1, "learning_rate": 1e-9, "local_epochs": 1}
    return make_plan(
        "fed_avg", task="classification", task_file=file, sites=["A", "B", "C"], num_rounds=1,
        settings={**given, "batch_size": 8, **settings},
    )  # fmt: skip


@pytest.mark.parametrize("by_job", [False, True])
def test_classes_called_like_losses_and_errors_through_a_whole_run(by_job: bool, tmp_path: Path) -> None:
    """Check names of the job's own classes, and names that only the sites' datalists have."""
    file = tmp_path / "task.py"
    file.write_text(BY_INTENSITY)
    local = {
        "sites": {s: {"data_root": site_folder(tmp_path / s, wrong)} for s, wrong in zip("ABC", (0, 1, 3), strict=True)}
    }
    named = {"class_names": NAMES, "class_groups": {"diseased": [1, 2], "others": [0]}} if by_job else {}
    place = find_results(run_local(plan_of(file, **named), tmp_path / "run", local).parents[2])
    results, sections = read_results(place), run_document(place)
    for name in ("recall_bone_loss", "recall_refractive_error", "diseased"):
        measured = {site: values[name] for site, values in sections["test"].items()}
        assert measured == {"A": 1.0, "B": 0.75, "C": 0.25}
        found = sections["fairness"][name]
        assert (found["worst_site"], found["best_site"], found["worst"]) == ("C", "A", 0.25), name
        assert results.info.higher_is_better[name] is True
    assert "Higher is better." in fairness_table(results, metric="recall_bone_loss")
    assert results.info.higher_is_better["loss"] is False


HAUSDORFF = """
from tests.methods.own import Plane
from fairflare.base.task import LOSS, Metric


class Task(Plane):
    primary_metric = "hd95"

    def declared_metrics(self):
        return ({declared})

    def evaluate(self, model, batches, device):
        found = super().evaluate(model, batches, device)
        return {{"hd95": 40.0 - 30.0 * found["accuracy"]{more}, "loss": found["loss"]}}
"""
IN_MM = 'Metric(name="hd95", doc="distance", low=0, high=100, higher_is_better=False, unit="mm", mean_of_images=True),'


def hausdorff(folder: Path, declared: str, more: str = "", **options: Any) -> Plan:
    file = folder / "hd.py"
    file.write_text(HAUSDORFF.format(declared=declared, more=more))
    return make_plan("fed_avg", task_file=file, sites=2, num_rounds=1, **options)


def test_distances_in_mm(tmp_path: Path) -> None:
    plan = hausdorff(tmp_path, IN_MM, bootstrap=5)
    place = find_results(run_local(plan, tmp_path / "run").parents[2])
    results, sections = read_results(place), run_document(place)
    values = {site: found["hd95"] for site, found in sections["test"].items()}
    assert min(values.values()) > 1
    assert sections["fairness"]["hd95"]["worst_site"] == max(sorted(values), key=values.__getitem__)
    assert all(len(draws) == 5 and max(draws) > 1 for draws in sections["resampled"].values())
    assert results.info.units == {"hd95": "mm"}
    table = fairness_table(results)
    assert "hd95 (mm)" in table
    assert "Lower is better: hd95" in table or "Lower is better: hd95, loss" in table


@pytest.mark.parametrize(
    ("declared", "more", "words"),
    [
        (IN_MM.replace("high=100", "high=1"), "", "metric 'hd95'.* got .*declared_metrics"),
        (IN_MM, ', "f1": 0.5', r"more of 'f1' is better.*Metric\(name='f1'"),
    ],
)
def test_what_does_not_fit_is_said_before_any_training(declared: str, more: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match=words):
        run_local(hausdorff(tmp_path, declared, more), tmp_path / "run")
    results = read_results(find_results(tmp_path / "run"))
    assert results.rounds == []


def test_a_metric_without_a_direction_is_asked_for_where_the_plan_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"more of 'hd95' .*Metric\(name='hd95', doc="):
        hausdorff(tmp_path, 'Metric(name="hd95", doc="distance"),')
    with pytest.raises(ValueError, match="declare whether more of 'hd95' is better"):
        hausdorff(tmp_path, "LOSS,")  # the primary one is not declared at all


@pytest.mark.parametrize("method", ["fair_fed", "fed_mrl", "cffl", "fed_ce"])
def test_methods_that_go_by_a_score_refuse_a_distance(method: str, tmp_path: Path) -> None:
    file = tmp_path / "hd.py"
    file.write_text(HAUSDORFF.format(declared=IN_MM, more=""))
    with pytest.raises(ValueError, match=r"'hd95' lies in \[0, 100\] mm, .* lower"):
        make_plan(method, task_file=file, sites=2, num_rounds=20)


def test_every_packaged_metric_is_declared() -> None:
    settings = {"segmentation": {"num_classes": 2}, "classification": {"phantom": "endoscopy"}}
    later = {"segmentation": {"loss_class_1", "loss_class_2"}, "classification": {"outside"}}  # than old results
    for kind, given in settings.items():
        task = load_task_class(TASKS_BY_KIND[kind])(**given)
        found = task.by_name()
        assert set(field_names(type(task)))  # it is the real class
        assert {name for name, metric in found.items() if not metric.higher_is_better} == {"loss"} | later[kind]
        assert all(metric.higher_is_better is not None for metric in task.declared_metrics())
        for name in {*found} - later[kind]:
            assert declared_as(name, BEFORE_RECORDED) is (name != "loss"), name


def test_nothing_is_guessed_from_a_name() -> None:
    assert higher_is_better("recall_bone loss") is None
    assert higher_is_better("hd95") is None
    assert higher_is_better("corrupted/loss") is False
    assert higher_is_better("dark/dice_liver/left", {"dice_<class>": True}) is True
    assert higher_is_better("all/dice", {"dice": True, "all": False}) is True


def test_old_results_say_it_or_are_asked() -> None:
    old = read(info={"label": "x"})
    assert direction_of(old, "balanced_accuracy") is True
    with pytest.raises(ValueError, match=r"more of 'hd95' is better.*'info' of"):
        direction_of(old, "hd95")
    assert direction_of(read(info={"label": "x", "higher_is_better": {"hd95": False}}), "hd95") is False


RANGES = {
    "dice": Metric(name="dice", doc="x", higher_is_better=True),
    "hd95": Metric(name="hd95", doc="x", low=0, high=100, higher_is_better=False, unit="mm"),
}


def test_the_server_goes_by_the_jobs_ranges() -> None:
    read = read_metrics("A", rows({"hd95": 99.5}) + rows({"dice": 0.5}, "test_dark"), RANGES, OF_TEST)
    assert metric_values(read) == {"hd95": 99.5, "dark/dice": 0.5}
    for metrics, words in (
        ({"dice": 1.5}, r"'dice' must lie in \[0, 1\], got 1.5"),
        ({"hd95": 100.5}, "'hd95'.* got 100.5$"),
        ({"other": 0.5}, "'other' is not declared"),
    ):
        with pytest.raises(ReportError, match=words):
            read_metrics("A", rows(metrics), RANGES, OF_TEST)
    draws = {"stats": {"resampled": [12.5, math.nan]}}
    assert read_stats("A", draws, RANGES["hd95"])["resampled"][0] == 12.5
    with pytest.raises(ReportError, match="resampled"):
        read_stats("A", draws, RANGES["dice"])


def test_a_script_says_it_in_its_job() -> None:
    with pytest.raises(ValueError, match=r"more of 'auc' .*ScriptRecipe.*metrics="):
        ScriptTask(model="a.B", metric="auc")
    with pytest.raises(ValueError, match="'auc' has no 'higher'; did you mean"):
        ScriptTask(model="a.B", metric="auc", metrics={"auc": {"higher": True}})
    task = ScriptTask(model="a.B", metric="auc", metrics={"auc": {"higher_is_better": True}, "gap": {
        "higher_is_better": False, "low": None, "high": None, "unit": "mm"}})  # fmt: skip
    assert task.directions() == {"loss": False, "accuracy": True, "auc": True, "gap": False}
    assert task.by_name()["gap"].holds(-1e9)
    site: Any = LoopTask.__new__(LoopTask)
    site.told = {name: metric.describe() for name, metric in task.by_name().items()}
    vars(site)["primary_metric"] = "auc"
    assert site.by_name().keys() == task.by_name().keys()
    assert site.by_name()["gap"].range == "(-inf, inf) mm"
