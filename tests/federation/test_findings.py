"""Test findings, of which an image may have several: labels, loss, metrics, preparing, every method."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score
from typer.testing import CliRunner

from fairflare.base.cases.floor import Floor
from fairflare.checking.images import check_sites
from fairflare.cli.commands import app
from fairflare.data.datalist import DataError, load_datalist, write_datalist
from fairflare.data.preparers.__main__ import main
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.listed import labels_of_cells
from fairflare.data.preparers.pictures import prepare_images
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.clinical import COLUMNS, OF_CLASSES, ClinicalTable
from fairflare.federation.site.facts import find_measurable, labels_of
from fairflare.federation.transports.local import run_local
from fairflare.flare.statistics import ImageStatistics, statistics_here
from fairflare.methods.base.catalog import all_methods
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.scores.finding_scores import finding_losses, finding_metrics
from fairflare.tasks.volumes.classification import VolumeClassificationTask
from tests.shapes import of_a_training, one_each
from tests.tiny import run_document

NAMES = ["effusion", "edema", "mass"]
SMALL: dict[str, Any] = {
    "findings": NAMES, "image_size": [48, 48], "in_channels": 1, "features": [4, 4, 8, 8], "local_epochs": 1,
}  # fmt: skip
P = torch.tensor([[0.9, 0.2, 0.6], [0.3, 0.8, 0.5]], dtype=torch.float64)
Y = torch.tensor([[1, -1, 0], [0, 1, 1]])


def picture(folder: Path, name: str, of: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = rng.normal(100, 12, (32, 32))
    for place, there in enumerate(of):
        image[2 + 10 * place : 9 + 10 * place, 4:28] += 80 * (there == 1)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / name)


def site(
    folder: Path, seed: int = 0, silent: int | None = None, zero: int | None = None, doubt: bool = False
) -> dict[str, Any]:
    """Write a site with 24 images; of one finding nothing is known, or one is in no image; ``doubt``: some lack one."""
    splits: dict[str, list[dict[str, Any]]] = {}
    rng = np.random.default_rng(seed)
    for split in ("training", "validation", "test"):
        splits[split] = []
        for k in range(8):
            of: list[Any] = [(k >> bit) & 1 for bit in range(3)]
            if zero is not None:
                of[zero] = 0
            picture(folder, f"{split}{k}.png", of, int(rng.integers(2**31)))
            if silent is not None:
                of[silent] = None
            if doubt and k < 3:
                of[k] = None
            splits[split].append({"image": f"{split}{k}.png", "label": of})
    write_datalist(folder / "datalist.json", splits, class_names=NAMES)
    return {"data_root": str(folder)}


def run(folder: Path, sites: dict[str, Any], method: str = "fed_avg", **more: Any) -> Any:
    settings = {**SMALL, **more.pop("settings", {})}
    plan = make_plan(
        method, task="classification", sites=list(sites), settings=settings, num_rounds=1, bootstrap=0, **more
    )
    try:
        run_local(plan, folder, {"sites": sites})
    except RoundFailed as error:
        return str(error)
    (found,) = folder.rglob("results.json")
    return run_document(found)


def test_the_loss_of_the_worked_example() -> None:
    logits = torch.logit(P)
    cells, known = finding_losses(logits, Y)
    expected = [[0.105361, 0, 0.916291], [0.356675, 0.223144, 0.693147]]
    torch.testing.assert_close(cells, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    assert known.tolist() == [[True, False, True], [True, True, True]]
    task = ClassificationTask(**{k: v for k, v in SMALL.items() if k != "local_epochs"})
    assert float(task.loss(logits, Y)) == pytest.approx(0.467574, abs=1e-6)
    torch.testing.assert_close(task.sample_losses(logits, Y).mean(), task.loss(logits, Y))
    by_finding = cells.sum(0) / known.sum(0)
    assert float(by_finding.mean()) == pytest.approx(0.419627, abs=1e-6)


@pytest.mark.parametrize(("answer", "value", "mean"), [("zero", 0, 0.419627), ("one", 1, 0.650676)])
def test_an_uncertain_label_becomes_what_was_answered(answer: Any, value: int, mean: float) -> None:
    relabelled = torch.where(Y < 0, torch.tensor(value), Y)
    assert float(finding_losses(torch.logit(P), relabelled)[0].mean()) == pytest.approx(mean, abs=1e-6)
    item = Item("x", "x", None, {"a": "-1", "b": "", "c": "1.0"})
    assert labels_of_cells(item, answer, "missing") == (-2 - value, -1, 1)
    assert labels_of_cells(item, "ignore", "zero") == (-1, 0, 1)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("2", "has '2'; a finding is"), ("yes", "has 'yes'"), ("-1", "--uncertain"), ("", "--blank zero"),
        ("nan", "--blank"),
    ],
)  # fmt: skip
def test_other_cells_are_refused_or_asked_about(cell: str, said: str) -> None:
    with pytest.raises(DataError, match=f"column 'edema' .*{said}"):
        labels_of_cells(Item("x", "x", None, {"effusion": "1", "edema": cell}))


def test_metrics_are_those_of_scikit_learn_over_the_known_labels() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 2, (60, 4))
    labels[:, 3] = 0  # no image has the last one
    scores = rng.random((60, 4)).round(1)  # with ties
    found = finding_metrics(labels, scores, "abcd", range(4))
    areas, precisions = [], []
    for number, name in enumerate("abc"):
        known = labels[:, number] >= 0
        areas.append(roc_auc_score(labels[known, number], scores[known, number]))
        precisions.append(average_precision_score(labels[known, number], scores[known, number]))
        assert found[f"auc_{name}"] == pytest.approx(areas[-1])
        assert found[f"pr_auc_{name}"] == pytest.approx(precisions[-1])
    assert "auc_d" not in found
    assert found["auc"] == pytest.approx(np.mean(areas))
    assert found["pr_auc"] == pytest.approx(np.mean(precisions))
    assert set(finding_metrics(labels, scores, "abcd", [1])) == {"auc", "auc_b", "pr_auc", "pr_auc_b"}


def test_an_average_precision_of_one_does_not_round_up() -> None:
    """Check that a perfect model's figure stays in the metric's range, for each number of positives."""
    for positives in range(2, 30):
        labels = np.arange(positives + 6)[:, None] < positives
        scores = np.linspace(1, 0, positives + 6)[:, None]
        assert finding_metrics(labels.astype(np.int64), scores, "a", [0])["pr_auc_a"] == pytest.approx(1)
        assert finding_metrics(labels.astype(np.int64), scores, "a", [0])["pr_auc_a"] <= 1


def test_clinical_figures_are_over_the_known_labels() -> None:
    rng = np.random.default_rng(1)
    labels, scores = rng.integers(-1, 2, (80, 3)), rng.random((80, 3))
    splits: Any = {split: (labels, scores, np.arange(80)) for split in ("test", "validation")}
    told, kept = ClinicalTable(splits).sent(1, True)
    rows = np.reshape(told[OF_CLASSES], (3, len(COLUMNS)))
    for number, row in enumerate(rows):
        own = dict(zip(COLUMNS, row, strict=True))
        known = labels[:, number] >= 0
        assert own["auc"] == pytest.approx(roc_auc_score(labels[known, number], scores[known, number]))
        assert own["cases_with"] == (labels[:, number] == 1).sum()
        assert own["tp"] + own["fp"] == (scores[known, number] > 0.5).sum()
    assert kept == []
    _, kept = ClinicalTable(splits).sent(60, True)
    assert kept == [f"clinical test/finding {number}" for number in range(3)]


def test_which_findings_a_site_measures_and_tells(tmp_path: Path) -> None:
    task = ClassificationTask(**{k: v for k, v in SMALL.items() if k != "local_epochs"})
    data = task.open_site("a", site(tmp_path / "a", silent=1))
    assert data.known == (0, 2)
    assert data.class_cases("test").tolist() == [4, 0, 4]  # type: ignore[union-attr]
    assert find_measurable(data, Floor(data, 4)) == (0, 2)
    assert find_measurable(data, Floor(data, 5)) == ()
    facts = labels_of(task, data, True, Floor(data, 1))
    assert (facts["annotated"], facts["measured"]) == (["effusion", "mass"], ["effusion", "mass"])
    other = task.open_site("b", site(tmp_path / "b", zero=1))
    facts = labels_of(task, other, True, Floor(other, 1))
    assert "annotated" not in facts  # no image has edema: the site is asked, if others' images do
    assert facts["measured"] == ["effusion", "mass"]


def test_a_run_of_sites_with_different_findings(tmp_path: Path) -> None:
    sites = {"A": site(tmp_path / "a", 1), "B": site(tmp_path / "b", 2, silent=2), "C": site(tmp_path / "c", 3)}
    results = run(tmp_path / "r", sites)
    assert results["status"] == "completed"
    assert results["footing"]["shared"] == ["edema", "effusion"]
    assert "auc_mass" not in results["test"]["B"]
    assert {"auc_mass", "pr_auc_mass", "loss_mass"} <= set(results["test"]["A"])
    own = results["test"]["A"]
    assert own["auc"] == pytest.approx((own["auc_edema"] + own["auc_effusion"]) / 2)
    assert set(results["clinical"]["A"]) == {"all classes", *NAMES}
    (tmp_path / "fairflare.json").write_text(json.dumps({"sites": sites}))
    given = ["-d", str(tmp_path / "fairflare.json"), "-o", str(tmp_path / "e"), "--last"]
    ran = CliRunner().invoke(app, ["evaluate", str(tmp_path / "r"), *given])
    assert ran.exit_code == 0, ran.output
    again = run_document(next((tmp_path / "e").rglob("results.json")))
    assert [again[key] for key in ("test", "clinical", "footing")] == [
        results[key] for key in ("test", "clinical", "footing")
    ]


def test_a_finding_that_no_image_of_one_site_has_is_asked_about(tmp_path: Path) -> None:
    sites = {"A": site(tmp_path / "a", 1), "B": site(tmp_path / "b", 2, zero=2)}
    assert "no label of B is mass (or too few for its min_cases)" in run(tmp_path / "r", sites)
    sites["B"]["classes"] = "all"
    assert run(tmp_path / "r2", sites)["status"] == "completed"


def test_columns_go_by_name_and_wrong_labels_are_named(tmp_path: Path) -> None:
    task = ClassificationTask(**{k: v for k, v in SMALL.items() if k != "local_epochs"})
    own = site(tmp_path / "a")
    file = tmp_path / "a" / "datalist.json"
    content = json.loads(file.read_text())
    content["class_names"] = NAMES[::-1]
    content["test"][0]["label"] = [1, 0, None]
    file.write_text(json.dumps(content))
    assert next(iter(task.open_site("a", own).batches("test", batch_size=1)))[1].tolist() == [[-1, 0, 1]]
    for label, said in (
        ([1, 0, 2], "got 2"), ([1, 0, -1], "got -1"), ([None] * 3, "at least of one"), ([1], "of the 3 findings"),
        (1, "each of the 3"), ([1, "x", 0], "got 'x'"),
    ):  # fmt: skip
        file.write_text(json.dumps({**content, "test": [{**content["test"][0], "label": label}]}))
        with pytest.raises(DataError, match=said):
            task.open_site("a", own)
    file.write_text(json.dumps(content))
    found = check_sites(task, {"a": own, "b": site(tmp_path / "b", 1)})
    assert any("the same ones in another order" in problem.text for problem in found.problems)
    assert found.grave == 0
    file.write_text(json.dumps({**content, "class_names": ["effusion", "oedema", "mass"]}))
    with pytest.raises(DataError, match="not among them: oedema"):
        task.open_site("a", own)
    file.write_text(json.dumps({**content, "class_names": None}))
    with pytest.raises(DataError, match="'class_names' beside the splits"):
        task.open_site("a", own)
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="take 'class_numbers' out of the site's"):
        task.open_site("a", {**own, "class_numbers": {"1": 0}})
    with pytest.raises(DataError, match="set findings of the task"):
        ClassificationTask(num_classes=3).open_site("a", own)
    with pytest.raises(DataError, match=r"'classes' in the site's .* leaves out"):
        task.open_site("a", {**own, "classes": [0]})


def test_from_a_table_to_a_checked_datalist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for number in range(24):
        of = [(number >> bit) & 1 for bit in range(3)]
        picture(tmp_path / "img", f"p{number:02d}.png", of, number)
        cells = [str(value) for value in of]
        cells[1] = "-1" if number < 4 else cells[1]
        rows.append(
            [
                f"p{number:02d}.png",
                "ab"[number > 11],
                *cells[:2],
                "" if number > 11 else cells[2],
                ("training", "validation", "test")[number % 3],
            ]
        )
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "site", *NAMES, "split"], *rows])
    more: Any = {"csv": tmp_path / "t.csv", "classes": NAMES}
    with pytest.raises(DataError, match="--uncertain"):
        prepare_images(tmp_path / "img", tmp_path / "none", **more)
    with pytest.raises(DataError, match="no column for the finding nodule"):
        prepare_images(tmp_path / "img", tmp_path / "none", csv=tmp_path / "t.csv", classes=[*NAMES, "nodule"])
    folders = prepare_images(tmp_path / "img", tmp_path / "out", uncertain="one", blank="missing", **more)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["task"] == {"findings": NAMES}
    listed = {name: load_datalist(folder, site=name, class_labels=True) for name, folder in folders.items()}
    assert all(sample.label[2] == -1 for own in listed["b"].splits.values() for sample in own)  # type: ignore[index]
    labels = {sample.image.name: (split, sample.label[1]) for own in listed.values()  # type: ignore[index]
              for split, samples in own.splits.items() for sample in samples}  # fmt: skip
    assert [labels[f"p{n:02d}.png"] for n in range(4)] == [
        ("training", 1), ("validation", 1), ("test", -1), ("training", 1),
    ]  # fmt: skip
    task = ClassificationTask(**{k: v for k, v in SMALL.items() if k != "local_epochs"})
    report = check_sites(task, {name: {"data_root": str(folder)} for name, folder in folders.items()})
    assert report.grave == 0, [problem.text for problem in report.problems if problem.grave]
    assert report.sites[1].annotated == (0, 1)
    given = ["images", "--source", str(tmp_path / "img"), "--csv", str(tmp_path / "t.csv"), "--classes", *NAMES]
    for blank in ("missing", "zero"):
        assert main([*given, "--uncertain", "one", "--blank", blank, "--out", str(tmp_path / blank)]) == 0
        told = capsys.readouterr().out
        assert f"b: labels with {NAMES[0]}: 6, {NAMES[1]}: 6, {NAMES[2]}: 0\n" in told
        asked = f"NOTE: no label of b is {NAMES[2]} (or too few"
        assert (asked in told) == (blank == "zero")
    assert 'such as "sites": {"b": {"classes": [0, 1]}}, or "all"' in told


def test_statistics_count_the_images_with_each_finding(tmp_path: Path) -> None:
    """Check counts by hand: 4 of 8 images of a split have each finding; none is told that few cases have or lack."""
    sites = {"a": site(tmp_path / "a"), "b": site(tmp_path / "b", silent=2), "c": site(tmp_path / "c", zero=1)}
    listed = json.loads((tmp_path / "c" / "datalist.json").read_text())
    for number, entry in enumerate(entry for split in ("training", "validation", "test") for entry in listed[split]):
        entry["label"] = [int(number >= 4), int(number < 4), None]  # of 24 images 4 lack the first, have the second
    (tmp_path / "c" / "datalist.json").write_text(json.dumps(listed))
    document = statistics_here(sites, ImageStatistics(), NAMES)
    assert {name: of.mix() for name, of in document.sites.items()} == {
        "a": {0: 12, 1: 12, 2: 12},
        "b": {0: 12, 1: 12},
        "c": {},
    }
    assert document.sites["a"].histograms["class"].records == 36
    assert "class" not in document.sites["c"].histograms
    assert [of.counts["images"] for of in document.sites.values()] == [24, 24, 24]
    assert (
        "Findings that not all sites report are not compared: mass." in document.sentences
    )  # not known at b: not none
    assert any("Furthest from the others in its mix of findings is" in line for line in document.sentences)
    assert [of.classes_jensen_shannon for of in document.distances.values()] == [0.0, 0.0, None]
    assert not any("annotate" in line for line in document.sentences)  # the labels say what is not known


def test_statistics_do_not_compare_findings_with_classes(tmp_path: Path) -> None:
    sites = {"a": site(tmp_path / "a"), "b": site(tmp_path / "b")}
    listed = json.loads((tmp_path / "b" / "datalist.json").read_text())
    for split in ("training", "validation", "test"):
        listed[split] = [{**entry, "label": entry["label"][0]} for entry in listed[split]]
    (tmp_path / "b" / "datalist.json").write_text(json.dumps(listed))
    document = statistics_here(sites, ImageStatistics())
    assert "The labels are not compared: those of a are findings, the others' are none." in document.sentences
    assert not any("mix" in line for line in document.sentences)
    assert [of.classes_jensen_shannon for of in document.distances.values()] == [None, None]


def test_settings_that_contradict_findings_are_refused() -> None:
    with pytest.raises(ValueError, match="findings name themselves"):
        ClassificationTask(findings=["a"], num_classes=2)
    with pytest.raises(ValueError, match="different"):
        ClassificationTask(findings=["a", "a"])


def test_volumes_have_findings_too() -> None:
    task = VolumeClassificationTask(findings=["lesion", "cyst"])
    assert task.build_model()(torch.zeros(1, 1, 32, 32, 32)).shape == (1, 2)
    assert (task.has_classes, task.primary_metric) == (False, "auc")


def learns_findings(name: str) -> str:
    """Return why a plan of a method on findings is refused; an empty text if it is not."""
    try:
        make_plan(name, task="classification", sites=["A", "B"], settings=SMALL)
    except ValueError as error:  # by what the task declares (`has_classes`)
        return str(error)
    return ""


def test_a_method_that_needs_classes_says_so() -> None:
    refusals = {name: why for name in all_methods() if (why := learns_findings(name))}
    assert {"fed_mas", "ldam"} < {*refusals}
    for name, why in refusals.items():
        assert all_methods()[name].title in why or name in why
        assert "class" in why


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a site some of whose labels are not known, and one that knows nothing of a finding."""
    folder = tmp_path_factory.mktemp("unlike")
    return {"A": site(folder / "a", 1, doubt=True), "B": site(folder / "b", 2, silent=2)}


@pytest.mark.parametrize("method", one_each(of_a_training))
def test_every_kind_of_training_learns_findings_or_is_refused(
    method: str, unlike: dict[str, Any], tmp_path: Path
) -> None:
    if learns_findings(method):
        return
    results = run(tmp_path, unlike, method)
    if isinstance(results, str):  # refused before any training: the pictures have no groups of people
        assert "its data do not declare" in results
        return
    assert results["status"] == "completed"
    assert all(np.isfinite(results["test"][name]["auc"]) for name in unlike)
