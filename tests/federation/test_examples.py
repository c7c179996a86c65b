"""Test pictures of a site's best, median and worst test image: made only where allowed, and never sent."""

from __future__ import annotations

import csv
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.base.stopping import TaskStopped
from fairflare.data.datalist import SPLITS, write_datalist
from fairflare.exchange.messages import SPLIT_TEST, SPLIT_VALIDATION
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.isolation import perform_isolated
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.ditto import DittoTraining
from fairflare.tasks.base import Task
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.scores import examples
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import CLASSES

from ..methods.support import SEGMENTATION, at_site, initial, request, same

FINAL = {"measure": (SPLIT_TEST, SPLIT_VALIDATION)}


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def table(folder: Path) -> list[dict[str, str]]:
    with next(folder.rglob(examples.TABLE)).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("task", [SegmentationTask(**SEGMENTATION), ClassificationTask(**CLASSES)])
def test_the_reply_is_the_same_with_and_without(tmp_path: Path, task: Task) -> None:
    """Check that all of the reply is equal except the seconds, which include the drawing."""
    asked = request("validate", initial(task), 3, **FINAL, resample=20)
    plain = at_site(tmp_path / "a", task=task).perform(asked)
    shown = at_site(tmp_path / "b", task=task, settings={"examples_folder": str(tmp_path / "ex")}).perform(asked)
    assert plain.stats.pop("seconds") > 0
    assert shown.stats.pop("seconds") > 0
    assert repr(plain) == repr(shown)
    assert plain.status == "ok"
    assert len(plain.stats["resampled"]) == 20
    assert files(tmp_path / "ex") == [f"site-1/run/rounds-3/{n}" for n in ("examples.csv", "examples.png")]
    assert not (tmp_path / "a").exists()


def test_nothing_is_written_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in ({}, {"examples_folder": None}):
        reply = at_site(tmp_path / "a", settings=settings).perform(request("validate", initial(), **FINAL))
        assert reply.status == "ok"
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "asked",
    [
        request("validate", initial(), measure=(SPLIT_TEST,)),  # on the way, and of the best model
        replace(request("validate", initial(), **FINAL), as_sent=True),  # FLARE's cross-site evaluation
        request("train", initial()),
    ],
    ids=["another test", "cross-site", "train"],
)
def test_only_the_final_test_is_shown(tmp_path: Path, asked: Any) -> None:
    site = at_site(tmp_path / "a", settings={"examples_folder": str(tmp_path / "ex")})
    assert site.perform(asked).status == "ok"
    assert files(tmp_path / "ex") == []


@pytest.mark.parametrize("value", [True, False, 1, "", "examples", "./examples", ["/a"]])
def test_the_folder_is_an_absolute_path(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SiteError, match="'examples_folder' must be the absolute path of a folder, got") as caught:
        at_site(tmp_path, settings={"examples_folder": value})
    assert caught.value.public == "site 'site-1': setting 'examples_folder' must be the absolute path of a folder"


def test_a_wrong_key_is_refused(tmp_path: Path) -> None:
    reply = at_site(tmp_path, settings={"example_folder": "/a"}).perform(request("validate", initial(), **FINAL))
    assert reply.status == "failed"
    assert "did you mean 'examples_folder'" in reply.reason


def test_a_wrong_value_ends_the_run_before_training(tmp_path: Path) -> None:
    plan = make_plan("fed_avg", sites=2, num_rounds=1, settings={**SEGMENTATION, "local_epochs": 1})
    with pytest.raises(RuntimeError, match="'examples_folder' must be the absolute path"):
        run_local(plan, tmp_path, {"sites": {"site-2": {"examples_folder": "here"}}})


# ------------------------------------------------------------------------------------------------ which images


def test_best_median_and_worst_are_those_of_the_evaluation(tmp_path: Path) -> None:
    """Check that each image, evaluated by itself, has the Dice and rank that the pictures show."""
    task = SegmentationTask(**SEGMENTATION)
    state = initial(seed=3)
    at_site(tmp_path / "s", settings={"examples_folder": str(tmp_path / "ex")}).perform(
        request("validate", state, **FINAL)
    )
    model = task.build_model()
    model.load_state_dict(state)
    data = task.open_site("site-1", {})
    each = [task.evaluate(model, [batch], "cpu")["dice"] for batch in data.batches("test", batch_size=1)]
    found = {row["which"]: row for row in table(tmp_path / "ex")}
    assert set(found) == {"best", "median", "worst"}
    for which, row in found.items():
        assert float(row["dice"]) == pytest.approx(each[int(row["test_image"])], abs=1e-6), which
    ordered = sorted(each)
    assert float(found["worst"]["dice"]) == pytest.approx(ordered[0], abs=1e-6)
    assert float(found["median"]["dice"]) == pytest.approx(ordered[(len(each) - 1) // 2], abs=1e-6)
    assert float(found["best"]["dice"]) == pytest.approx(ordered[-1], abs=1e-6)


def test_a_class_is_shown_with_its_probability(tmp_path: Path) -> None:
    task = ClassificationTask(**CLASSES)
    state = initial(task, seed=3)
    at_site(tmp_path / "s", task=task, settings={"examples_folder": str(tmp_path / "ex")}).perform(
        request("validate", state, **FINAL)
    )
    model = task.build_model().eval()
    model.load_state_dict(state)
    images, labels = next(iter(task.open_site("site-1", {}).batches("test", batch_size=1000)))
    with torch.no_grad():
        probabilities = torch.softmax(model(images).double(), 1)
    true = probabilities[torch.arange(len(labels)), labels]
    for row in table(tmp_path / "ex"):
        number = int(row["test_image"])
        assert row["true_class"] == task.names()[labels[number]]
        assert row["told_class"] == task.names()[int(probabilities[number].argmax())]
        assert float(row["p_true_class"]) == pytest.approx(float(true[number]), abs=1e-6)
        assert float(row["p_told_class"]) == pytest.approx(float(probabilities[number].max()), abs=1e-6)
    ranked = [float(row["p_true_class"]) for row in table(tmp_path / "ex")]
    expected = sorted(true.tolist())
    assert ranked == pytest.approx([expected[-1], expected[(len(expected) - 1) // 2], expected[0]], abs=1e-6)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.5], {0: "best and median and worst"}),
        ([0.7, 0.2], {0: "best", 1: "median and worst"}),
        ([1.0, 0.3, 1.0, 0.1], {0: "best", 1: "median", 3: "worst"}),
        ([0.1, 0.9, 0.5, 0.4, 0.3], {1: "best", 3: "median", 0: "worst"}),
        ([0.4, 0.4, 0.4], {0: "best and worst", 1: "median"}),
    ],
)
def test_choice(scores: list[float], expected: dict[int, str]) -> None:
    assert examples.choose(scores) == expected
    assert list(examples.choose(scores)) == list(expected)


def test_no_image_is_said() -> None:
    with pytest.raises(ValueError, match="no test image"):
        examples.choose([])


def test_names_are_no_formulas(tmp_path: Path) -> None:
    shape = (2, 8, 8)
    masks = np.zeros(shape, bool)
    masks[:, 2:5, 2:5] = True
    one = examples.Example("worst", 0, 0.5, np.zeros((3, 8, 8), np.float32), masks, ~masks)
    examples.write([one], tmp_path, [r"$\frac$", "b"], r"site-$\frac$")
    with Image.open(tmp_path / examples.PICTURE) as picture:
        assert picture.size[0] > 100


@pytest.mark.parametrize("size", ["network", "image"])
def test_own_images_with_pixels_that_do_not_count(tmp_path: Path, size: str) -> None:
    """Check two structures in a site's files of another size; ignored pixels are neither truth nor prediction."""
    rng = np.random.default_rng(0)
    root = tmp_path / "data"
    entries = {}
    for split, count in zip(SPLITS, (3, 2, 5), strict=True):
        entries[split] = []
        for n in range(count):
            image, mask = f"{split}{n}.png", f"{split}{n}m.png"
            root.mkdir(exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 48), dtype=np.uint8)).save(root / image)
            values = np.zeros((40, 48), np.uint8)
            values[5:20, 5:30], values[10:15, 10 : 12 + n], values[30:] = 1, 2, 9
            Image.fromarray(values).save(root / mask)
            entries[split].append({"image": image, "label": mask})
    write_datalist(root / "datalist.json", entries)
    given = {**SEGMENTATION, "num_classes": 2, "labels": [[1, 2], [2]], "class_names": ["cell", "nucleus"]}
    task = SegmentationTask(**given, mask_values={0: 0, 1: 1, 2: 2, 9: 3}, ignore=3, evaluate_at=size)
    own = {"data_root": str(root), "examples_folder": str(tmp_path / "ex")}
    reply = at_site(tmp_path / "s", task=task, settings=own).perform(request("validate", initial(task), **FINAL))
    assert reply.status == "ok", reply.reason
    scores = [float(row["dice"]) for row in table(tmp_path / "ex")]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] <= reply.metrics["dice"] <= scores[0]
    data = task.open_site("site-1", {"data_root": str(root)})
    model = task.build_model()
    shown = examples.of_segmentation(task, model, data, 4, "cpu")
    for example in shown:
        assert example.truth.shape == example.found.shape == (2, 32, 32)
        assert not example.found[:, -4:].any()  # where nothing counts
        assert not example.truth[:, -4:].any()
        assert example.truth[0].sum() > example.truth[1].sum()


def test_the_model_that_was_measured_is_shown(tmp_path: Path) -> None:
    """Check that with Ditto the pictures show the site's own model, not the received one."""
    training = DittoTraining(batch_size=4, local_epochs=3)
    site = at_site(tmp_path / "s", training, {"examples_folder": str(tmp_path / "ex")})
    site.perform(request("train", initial(), 0))
    reply = site.perform(request("validate", initial(seed=9), 1, **FINAL))
    scores = [float(row["dice"]) for row in table(tmp_path / "ex")]
    assert scores[-1] <= reply.metrics["dice"] <= scores[0]
    plain = at_site(tmp_path / "t", LocalTraining(batch_size=4), {"examples_folder": str(tmp_path / "other")})
    plain.perform(request("validate", initial(seed=9), 1, **FINAL))
    assert scores != [float(row["dice"]) for row in table(tmp_path / "other")]


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ex").write_text("a file")
    site = at_site(tmp_path / "s", settings={"examples_folder": str(tmp_path / "ex")})
    with caplog.at_level(logging.INFO, logger="fairflare"):
        reply = site.perform(request("validate", initial(), **FINAL))
    assert reply.status == "ok"
    assert reply.metrics["dice"] >= 0
    assert str(tmp_path) not in repr(reply)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert warned[0].startswith("site site-1: no example predictions: ")
    assert "Error" in warned[0]


@pytest.mark.parametrize("error", [MemoryError(), torch.cuda.OutOfMemoryError("full"), RuntimeError("no font")])
def test_a_picture_that_cannot_be_drawn_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(examples, "draw", fail)
    reply = at_site(tmp_path / "s", settings={"examples_folder": str(tmp_path / "ex")}).perform(
        request("validate", initial(), **FINAL)
    )
    assert reply.status == "ok"
    assert f"no example predictions: {type(error).__name__}" in caplog.text
    assert files(tmp_path / "ex") == []


def test_a_stop_is_heard_while_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise TaskStopped("the job was stopped")

    monkeypatch.setattr(examples, "of_segmentation", stopped)
    reply = at_site(tmp_path / "s", settings={"examples_folder": str(tmp_path / "ex")}).perform(
        request("validate", initial(), **FINAL)
    )
    assert reply.status == "skipped"
    assert "the job was stopped" in reply.reason


class Mute(SegmentationTask):
    """Define a task that draws nothing."""

    write_examples = Task.write_examples


def test_a_task_that_draws_none_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = at_site(tmp_path / "s", task=Mute(**SEGMENTATION), settings={"examples_folder": str(tmp_path / "ex")})
    assert site.perform(request("validate", initial(), **FINAL)).status == "ok"
    assert "the task (Mute) does not know how to draw them" in caplog.text
    assert files(tmp_path / "ex") == []


# ------------------------------------------------------------------------------------------------ in a run


def test_only_sites_that_allow_it_in_a_run(tmp_path: Path) -> None:
    """Check one of two sites; models and results equal those of a run without pictures."""
    plan = make_plan("fed_avg", sites=2, num_rounds=1, settings={**SEGMENTATION, "local_epochs": 1})
    run_local(plan, tmp_path / "plain")
    local = {"sites": {"site-2": {"examples_folder": str(tmp_path / "ex")}}}
    run_local(plan, tmp_path / "shown", local)
    models, tests = [], []
    for name in ("plain", "shown"):
        run = tmp_path / name / "server/simulate_job"
        models.append(torch.load(run / "FL_global_model.pt", weights_only=True)["model"])
        tests.append(json.loads((run / "fairflare/results.json").read_text()))
        assert not [path for path in (tmp_path / name).rglob("*") if path.name in (examples.PICTURE, examples.TABLE)]
    assert same(*models)
    assert tests[0]["test"] == tests[1]["test"]
    run_id = tests[1]["info"]["run"]
    assert files(tmp_path / "ex") == [f"site-2/{run_id}/rounds-1/{n}" for n in ("examples.csv", "examples.png")]


@pytest.mark.long
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    worker = {
        "site": "site-1",
        "task": SegmentationTask(**SEGMENTATION),
        "training": LocalTraining(batch_size=4),
        "settings": {"examples_folder": str(tmp_path / "ex")},
        "state_folder": tmp_path / "s",
        "num_threads": 1,
    }
    reply = perform_isolated(worker, request("validate", initial(), **FINAL), lambda: False)
    assert reply.status == "ok", reply.reason
    assert len(files(tmp_path / "ex")) == 2
