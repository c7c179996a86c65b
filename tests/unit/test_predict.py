"""Test ``fairflare predict``: the figures of the run's own test, files like the images', and refusals."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from fairflare import __version__
from fairflare.base.task import metric_name
from fairflare.cli import commands as cli
from fairflare.data.datalist import write_datalist
from fairflare.federation.collecting.phase import Stopped
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.record.task_record import TaskRecorder
from fairflare.federation.transports.local import run_local
from fairflare.prediction.masks import code_labels, label_map, labels_of, resize_labels
from fairflare.prediction.predictor import load_predictor
from fairflare.prediction.recall import recall
from fairflare.prediction.saved_model import find_model, read_model
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.scores.metrics import classification_metrics
from fairflare.tasks.scripts import ScriptTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import run_document

SITES = ["north", "south"]
SEGMENTATION = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "local_epochs": 2, "learning_rate": 0.02}
CLASSES = ["naevus", "melanoma, in situ", "Zyste"]
CLASSIFICATION = {"image_size": [32, 32], "features": [4, 4, 8, 8], "num_classes": 3, "local_epochs": 1}
OWN_TASK = """
from monai.networks.nets import UNet
from fairflare.tasks.segmentation import SegmentationTask


class Task(SegmentationTask):
    def build_model(self):
        return UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), norm="batch")
"""


def fairflare(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, ["predict", *map(str, arguments)])


def refused(*arguments: Any) -> str:
    """Return the one line of a refusal, with exit code 2."""
    result = fairflare(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    return result.stderr.splitlines()[-1].removeprefix("error: ")


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------ runs on own images


def blob(random: np.random.Generator, size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return a bright disc on noise, (size, size) uint8, and its mask."""
    y, x = np.mgrid[:size, :size]
    middle, radius = random.uniform(size / 3, 2 * size / 3, 2), random.uniform(size / 8, size / 4)
    inside = (y - middle[0]) ** 2 + (x - middle[1]) ** 2 < radius**2
    return (random.uniform(0, 110, (size, size)) + 130 * inside).astype(np.uint8), inside.astype(np.uint8)


def listed(root: Path, entries: list[dict[str, Any]], **more: Any) -> None:
    write_datalist(
        root / "datalist.json", {"training": entries[:6], "validation": entries[6:8], "test": entries[8:]}, **more
    )


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do a run on PNG images of twice the network's size; ``data/<site>`` is beside it."""
    root = tmp_path_factory.mktemp("segmented")
    for number, site in enumerate(SITES):
        random = np.random.default_rng(number)
        folder = root / "data" / site
        (folder / "test").mkdir(parents=True)
        entries = []
        for case in range(14):
            image, mask = blob(random)
            where = "test/" if case >= 8 else ""
            Image.fromarray(image).save(folder / f"{where}case{case}.png")
            Image.fromarray(mask * 255).save(folder / f"mask{case}.png")
            entries.append({"image": f"{where}case{case}.png", "label": f"mask{case}.png"})
        listed(folder, entries)
    local = {"sites": {site: {"data_root": str(root / "data" / site)} for site in SITES}}
    run_local(
        make_plan("fed_avg", task="segmentation", sites=SITES, num_rounds=3, settings=SEGMENTATION), root / "run", local
    )
    return root


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do a run on colour images of three classes, which the datalists name."""
    root = tmp_path_factory.mktemp("classified")
    for number, site in enumerate(SITES):
        random = np.random.default_rng(number)
        folder = root / "data" / site
        folder.mkdir(parents=True)
        entries = []
        for case in range(29):
            label = case % 3
            colour = random.uniform(0, 255, (40, 48, 3))
            colour[:, :, label] *= 0.6
            Image.fromarray(colour.astype(np.uint8)).save(folder / f"{case}.png")
            entries.append({"image": f"{case}.png", "label": label})
        listed(folder, entries, class_names=CLASSES)
    local = {"sites": {site: {"data_root": str(root / "data" / site)} for site in SITES}}
    run_local(
        make_plan("fed_avg", task="classification", sites=SITES, num_rounds=2, settings=CLASSIFICATION),
        root / "run",
        local,
    )
    return root


def figures(root: Path, which: str) -> dict[str, dict[str, float]]:
    results = run_document(root / "run/server/simulate_job/fairflare/results.json")
    assert results["status"] == "completed"
    found: dict[str, dict[str, float]] = results["test" if which == "last" else "test_best"]
    return found


@pytest.mark.parametrize("which", ["best", "last"])
def test_masks_give_the_dice_of_the_runs_own_test(segmented: Path, tmp_path: Path, which: str) -> None:
    for site in SITES:
        out = tmp_path / site
        result = fairflare(segmented / "run", segmented / "data" / site / "test", "--out", out, f"--{which}")
        assert result.exit_code == 0, result.output
        scores = []
        for case in range(8, 14):
            mask = np.asarray(Image.open(out / f"case{case}_mask.png"))
            assert mask.shape == (64, 64)
            assert set(np.unique(mask)) <= {0, 255}
            truth = np.asarray(Image.open(segmented / "data" / site / f"mask{case}.png"))
            # The evaluation's nearest pixel of a picture of half the size.
            a, b = mask[1::2, 1::2] > 0, truth[1::2, 1::2] > 0
            assert np.array_equal(np.kron(a, np.ones((2, 2))), mask > 0)
            total = np.float32(a.sum() + b.sum())
            scores.append(float(np.float32(2 * (a & b).sum()) / total) if total else 1.0)
        assert np.mean(scores) == figures(segmented, which)[site]["dice"]
        assert len(set(scores)) > 3


@pytest.mark.parametrize("which", ["best", "last"])
def test_probabilities_give_the_metrics_of_the_runs_own_test(classified: Path, tmp_path: Path, which: str) -> None:
    for site in SITES:
        folder = classified / "data" / site
        files = [folder / f"{case}.png" for case in range(8, 29)]
        result = fairflare(classified / "run", *files, "--out", tmp_path / site, f"--{which}")
        assert result.exit_code == 0, result.output
        rows = rows_of(tmp_path / site)
        assert list(rows[0]) == ["image", "slice", "class", *(f"p_{name}" for name in CLASSES)]
        found = np.array([[float(row[f"p_{name}"]) for name in CLASSES] for row in rows])
        labels = np.array([case % 3 for case in range(8, 29)])
        metrics = classification_metrics(labels, found, class_names=CLASSES, groups={})
        metrics = {metric_name(name): value for name, value in metrics.items()}
        recorded = figures(classified, which)[site]
        assert metrics == {name: recorded[name] for name in metrics}
        assert set(recorded) == {*metrics, "loss"}
        chosen = -np.log(found[np.arange(len(labels)), labels]).mean()
        assert chosen == pytest.approx(recorded["loss"], rel=1e-6)
        assert [row["class"] for row in rows] == [CLASSES[k] for k in found.argmax(1)]


def test_what_a_models_file_says(segmented: Path, classified: Path) -> None:
    model = read_model(find_model(segmented / "run"))
    assert model.path.name == "best_FL_global_model.pt"
    record = model.record
    assert record["class"] == "fairflare.tasks.segmentation.SegmentationTask"
    assert record["own_code"] == []
    assert record["settings"]["features"] == [4, 4, 8, 8, 8, 4]
    assert record["settings"]["norm_momentum"] == 0.3  # defaults too
    assert (record["in_channels"], record["image_size"]) == (1, [32, 32])
    assert "99th percentile" in record["intensities"]
    assert record["class_names"] == ["class_1"]
    assert record["fairflare"] == __version__
    assert record["synthetic"] is False
    names = read_model(find_model(classified / "run", "last")).record["class_names"]
    assert names == CLASSES
    assert load_predictor(classified / "run").names == CLASSES


# ------------------------------------------------------------------------------------------------ kinds of files


def oblique() -> np.ndarray:
    found = np.array([[0.0, -0.7, 0.1, 5], [0.6, 0.0, 0.2, -8], [0.1, 0.1, 3.0, 40], [0, 0, 0, 1]])
    axes, upper = np.linalg.qr(found[:3, :3])
    found[:3, :3] = axes * np.sign(np.diag(upper)) * [0.6, 0.7, 3.0]  # at right angles
    return found


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one image of each kind of file, 48 high and 64 wide."""
    root = tmp_path_factory.mktemp("kinds")
    random = np.random.default_rng(5)
    planes = np.stack([blob(random)[0][:48] for _ in range(11)], 2)  # height, width, slices
    Image.fromarray(planes[:, :, 0]).save(root / "grey.png")
    Image.fromarray(planes[:, :, :3]).save(root / "colour.jpg")
    Image.fromarray(planes[:, :, 0].astype(np.uint16) * 200).save(root / "deep.tif")
    np.save(root / "array.npy", planes[:, :, 1].astype(np.float32) - 40)
    for name, values in {"flat.nii": planes[:, :, 2], "volume.nii.gz": planes * np.int16(7)}.items():
        image = nibabel.Nifti1Image(values.swapaxes(0, 1), oblique())
        image.header.set_qform(oblique(), 1)
        image.header.set_xyzt_units("mm")
        nibabel.save(image, root / name)
    return root


def test_the_input_is_that_of_the_evaluation(kinds: Path, tmp_path: Path) -> None:
    """Check that a datalist of the same files gives the same tensors, bit for bit, also of slices."""
    names: list[tuple[str, int | None]] = [("grey.png", None), ("colour.jpg", None), ("deep.tif", None)]
    names += [("array.npy", None), ("flat.nii", None), ("volume.nii.gz", 0), ("volume.nii.gz", 7)]
    for size, channels in (((32, 32), 1), ((32, 48), 3)):
        task = ClassificationTask(image_size=size, in_channels=channels, num_classes=2)
        entries = [{"image": name, "label": 0} | ({} if k is None else {"slice": k}) for name, k in names]
        root = tmp_path / f"{channels}"
        shutil.copytree(kinds, root)
        shutil.copy(kinds / "grey.png", root / "other.png")
        shutil.copy(kinds / "grey.png", root / "third.png")
        other = [[{"image": f"{name}.png", "label": 1}] for name in ("other", "third")]
        write_datalist(root / "datalist.json", {"training": other[0], "validation": other[1], "test": entries})
        ((inputs, _),) = task.open_site("a", {"data_root": str(root)}).batches("test", batch_size=99)
        for (name, number), wanted in zip(names, inputs, strict=True):
            assert torch.equal(task.read_input(kinds / name, number), wanted), name


def test_a_mask_is_a_file_like_its_image(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    result = fairflare(segmented / "run", kinds, "--out", tmp_path, "--overlay")
    assert result.exit_code == 0, result.output
    masks = sorted(path.name for path in tmp_path.iterdir() if "_mask" in path.name)
    assert masks == ["array_mask.npy", "colour_mask.png", "deep_mask.png", "flat_mask.nii", "grey_mask.png",
                     "volume_mask.nii.gz"]  # fmt: skip
    for name in ("grey", "colour", "deep"):
        assert Image.open(tmp_path / f"{name}_mask.png").size == (64, 48)
    assert np.load(tmp_path / "array_mask.npy").shape == (48, 64)
    for name in ("flat{}.nii", "volume{}.nii.gz"):
        image, mask = nibabel.load(kinds / name.format("")), nibabel.load(tmp_path / name.format("_mask"))
        assert mask.shape == image.shape
        assert np.array_equal(mask.affine, image.affine)
        for code in ("qform_code", "sform_code", "xyzt_units", "pixdim"):
            assert np.array_equal(mask.header[code], image.header[code])
        assert mask.get_data_dtype() == np.uint8
        assert set(np.unique(np.asarray(mask.dataobj))) == {0, 1}
    for picture in tmp_path.glob("*_overlay.png"):
        upright = picture.name in ("flat_overlay.png", "volume_overlay.png")  # rows to the back: NIfTI's first axis
        assert Image.open(picture).size == ((48, 64) if upright else (64, 48))
        assert Image.open(picture).mode == "RGB"
    overlay, mask = (
        np.asarray(Image.open(tmp_path / "grey_overlay.png")),
        np.asarray(Image.open(tmp_path / "grey_mask.png")),
    )
    grey = np.asarray(Image.open(kinds / "grey.png"))
    coloured = (overlay != grey[:, :, None]).any(2)
    assert np.array_equal(coloured, mask > 0)


def test_slices_lie_where_the_volume_has_them(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    """Compare each slice of the mask with the network's own answer for that slice."""
    assert fairflare(segmented / "run", kinds / "volume.nii.gz", "--out", tmp_path).exit_code == 0
    mask = np.asarray(nibabel.load(tmp_path / "volume_mask.nii.gz").dataobj)  # width, height, slices
    predictor = load_predictor(segmented / "run")
    answers = list(predictor(kinds / "volume.nii.gz"))
    assert [found.slice for found in answers] == list(range(11))  # more than a batch
    for found in answers:
        # Seen with the front on top: the first axis of the file leads to the front, the second to the left.
        inside = torch.nn.functional.interpolate(found.probabilities[None], (64, 48), mode="nearest-exact")[0, 0] > 0.5
        assert np.array_equal(mask[::-1, :, found.slice] > 0, inside.numpy())
    rows = rows_of(tmp_path)
    assert [int(row["slice"]) for row in rows] == list(range(11))
    assert [int(row["pixels_class_1"]) for row in rows] == mask.sum((0, 1)).tolist()


def test_the_screen_shows_the_first_ones_and_how_many_more(
    classified: Path, kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairflare.cli.model.predict.MOST_SHOWN", 4)
    result = fairflare(classified / "run", kinds / "volume.nii.gz", "--out", tmp_path)
    assert "and 7 more\n" in result.stdout
    assert "slice 3" in result.stdout.replace("\n", " ")
    assert "slice 4" not in result.stdout.replace("\n", " ")
    assert len(rows_of(tmp_path)) == 11


# ------------------------------------------------------------------------------------------------ several structures

NESTED = SegmentationTask(num_classes=2, labels=[[1, 2], [2]], mask_values={0: 0, 128: 1, 255: 2, 254: 2})
APART = SegmentationTask(num_classes=2)


def test_one_structure_is_found_exactly_above_the_threshold() -> None:
    for threshold in (0.5, 0.1, 0.7):
        at = torch.tensor(threshold, dtype=torch.float32)
        values = torch.stack([torch.nextafter(at, torch.zeros(())), at, torch.nextafter(at, torch.ones(()))])
        found = label_map(values[None, None], labels_of(SegmentationTask()), threshold)
        assert found.tolist() == [(values > threshold).long().tolist()] == [[0, 0, 1]]


def test_a_label_map_says_which_structures_were_found() -> None:
    random = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2, 20, 20, generator=random)
    found = label_map(probabilities, labels_of(NESTED), 0.5)
    possible = ~((probabilities[0] <= 0.5) & (probabilities[1] > 0.5))  # no label is in the inner structure alone
    for structure, labels in enumerate(NESTED.structures):
        told = torch.isin(found, torch.tensor(labels))
        assert torch.equal(told[possible], (probabilities[structure] > 0.5)[possible])


def test_values_in_the_file_are_those_of_the_training_masks() -> None:
    labels = np.array([[0, 1, 2]])
    assert code_labels(labels, NESTED, Path("a.png")).tolist() == [[0, 128, 254]]
    assert code_labels(labels, APART, Path("a.png")).tolist() == [[0, 1, 2]]
    only = SegmentationTask()
    assert code_labels(labels[:, :2], only, Path("a.png")).tolist() == [[0, 255]]
    assert code_labels(labels[:, :2], only, Path("a.nii.gz")).tolist() == [[0, 1]]
    assert code_labels(labels[:, :2], SegmentationTask(labels=[[300]]), Path("a.png")).dtype == np.uint16
    assert resize_labels(torch.tensor([[1, 2]]), 2, 4).tolist() == [[1, 1, 2, 2]] * 2


# ------------------------------------------------------------------------------------------------ what is refused


def test_probabilities_lie_beside_the_masks(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    for image, ending in (("grey.png", ".npy"), ("volume.nii.gz", ".nii.gz")):
        out = tmp_path / ending
        done = fairflare(segmented / "run", kinds / image, "--out", out, "--probabilities", "--threshold", "0.4")
        assert done.exit_code == 0, done.output
        stem = image.partition(".")[0]
        (mask,) = out.glob(f"{stem}_mask.*")
        file = out / f"{stem}_probability_1{ending}"
        if ending == ".npy":
            found, labels = np.load(file), np.asarray(Image.open(mask)) > 0
        else:
            of_mask, of_file = nibabel.load(mask), nibabel.load(file)
            np.testing.assert_array_equal(of_file.affine, of_mask.affine)
            found, labels = of_file.get_fdata(), of_mask.get_fdata() > 0
        assert found.shape == labels.shape
        assert 0 <= found.min() < found.max() <= 1
        np.testing.assert_array_equal(found.astype(np.float32) > np.float32(0.4), labels)
        assert fairflare(segmented / "run", kinds / image, "--out", out, "--probabilities").exit_code == 2  # is there


def test_a_damaged_image_costs_that_image(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    shutil.copy(kinds / "grey.png", folder / "good.png")
    (folder / "cut.png").write_bytes((kinds / "grey.png").read_bytes()[:300])
    np.save(folder / "nan.npy", np.full((8, 8), np.nan, np.float32))
    (folder / "notes.txt").write_text("x")
    (folder / "map.mha").write_text("x")
    (folder / "__MACOSX").mkdir()
    shutil.copy(kinds / "grey.png", folder / "__MACOSX/._good.png")
    result = fairflare(segmented / "run", folder, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "images/cut.png: it is damaged, or no picture" in result.stderr
    assert "images/nan.npy: it has values that are NaN or infinite\n" in result.stderr
    assert "2 of 3 image(s) could not be used" in result.stderr
    assert "images: not read: 1 .mha file ('map.mha'): python -c" in " ".join(result.stderr.split())
    assert [Path(row["image"]).name for row in rows_of(tmp_path / "out")] == ["good.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["good_mask.png", "predictions.csv"]
    result = fairflare(segmented / "run", folder / "notes.txt", "--out", tmp_path / "none")
    assert result.exit_code == 1
    assert "notes.txt: its ending is not known" in result.stderr
    assert not (tmp_path / "none").exists()
    (tmp_path / "text.png").write_text("not a picture")
    result = fairflare(segmented / "run", tmp_path / "text.png", "--out", tmp_path / "none")
    assert "text.png: it is damaged, or no picture\n" in result.stderr


def test_an_image_of_one_value_gets_a_note(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    """Check pictures, and that of a volume only all slices together count."""
    Image.fromarray(np.zeros((40, 44), np.uint8)).save(tmp_path / "black.png")
    for name, last in (("empty", 0), ("half", 7)):
        volume = np.zeros((40, 44, 9), np.float32)
        volume[3:9, :, 2] = last
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / f"{name}.nii.gz")
    shutil.copy(kinds / "grey.png", tmp_path / "good.png")
    result = fairflare(segmented / "run", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    said = "all its pixels have one value; what the model finds there says nothing"
    told = [line for line in result.stderr.splitlines() if said in line]
    assert ["/black.png" in told[0], "/empty.nii.gz" in told[1], len(told)] == [True, True, 2]


def test_nothing_is_replaced_unasked(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    (tmp_path / "grey_mask.png").write_text("mine")
    text = refused(segmented / "run", kinds / "grey.png", kinds / "flat.nii", "--out", tmp_path)
    assert text == f"already there: {tmp_path / 'grey_mask.png'}; give --overwrite to replace them, or another --out"
    assert [path.name for path in tmp_path.iterdir()] == ["grey_mask.png"]
    assert (tmp_path / "grey_mask.png").read_text() == "mine"
    result = fairflare(segmented / "run", kinds / "grey.png", kinds / "flat.nii", "--out", tmp_path, "--overwrite")
    assert result.exit_code == 0
    assert Image.open(tmp_path / "grey_mask.png").size == (64, 48)


@pytest.mark.long
def test_names_in_another_encoding_are_kept(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    """Check a name in Latin-1, which is no UTF-8: its bytes stand in the table of results."""
    (tmp_path / "x").mkdir()
    shutil.copy(kinds / "grey.png", os.fsencode(tmp_path / "x") + b"/k\xf6rper.png")
    code = "import fairflare.cli; fairflare.cli.main()"
    command = [sys.executable, "-c", code, "predict", segmented / "run", tmp_path / "x", "--out", tmp_path / "out"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "\\udcf6rper_mask.png" in ended.stdout
    assert b"k\xf6rper.png" in (tmp_path / "out/predictions.csv").read_bytes()
    assert b"k\xf6rper_mask.png" in {os.fsencode(path.name) for path in (tmp_path / "out").iterdir()}


def test_folders_keep_their_shape_and_the_output_is_no_input(segmented: Path, kinds: Path, tmp_path: Path) -> None:
    for name in ("a/one.png", "a/deep/one.png", "b/one.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kinds / "grey.png", tmp_path / name)
    out = tmp_path / "out"
    result = fairflare(segmented / "run", tmp_path, "--out", out)
    assert result.exit_code == 0, result.output
    again = fairflare(segmented / "run", tmp_path, "--out", out, "--overwrite")
    assert again.exit_code == 0
    written = sorted(path.relative_to(out).as_posix() for path in out.rglob("*_mask.png"))
    assert written == ["a/deep/one_mask.png", "a/one_mask.png", "b/one_mask.png"]
    assert "would be written under one name" in refused(
        segmented / "run", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "o2"
    )
    shutil.copy(kinds / "grey.png", tmp_path / "b/one.jpg")  # the same name apart from the ending
    assert "rename one of them" in refused(segmented / "run", tmp_path / "b", "--out", tmp_path / "o4")
    (tmp_path / "b/one.jpg").rename(tmp_path / "b/other.jpg")
    assert fairflare(segmented / "run", tmp_path / "b", "--out", tmp_path / "o4").exit_code == 0
    assert "is the folder of the images" in refused(segmented / "run", tmp_path / "b", "--out", tmp_path / "b")
    pattern = fairflare(
        segmented / "run", tmp_path / "a" / "*.png", tmp_path / "a" / "one.png", "--out", tmp_path / "o3"
    )
    assert pattern.exit_code == 0
    assert len(rows_of(tmp_path / "o3")) == 1


def test_what_is_given_wrongly_is_one_line(segmented: Path, classified: Path, kinds: Path, tmp_path: Path) -> None:
    run, image, out = segmented / "run", kinds / "grey.png", tmp_path / "out"
    assert "there is no such file" in refused(run, tmp_path / "nothing*.png", "--out", out)
    assert "--threshold must lie between 0 and 1, got 1" in refused(run, image, "--out", out, "--threshold", "1")
    for option in (["--threshold", "0.3"], ["--overlay"], ["--probabilities"]):
        assert f"{option[0]} is for segmentation" in refused(classified / "run", image, "--out", out, *option)
    assert "--device nonsense: not usable here" in refused(run, image, "--out", out, "--device", "nonsense")
    assert "does not exist; give the folder" in refused(tmp_path / "no", image, "--out", out)
    (tmp_path / "empty").mkdir()
    assert "no FL_global_model.pt in" in refused(tmp_path / "empty", image, "--out", out)
    assert "holds no image; known are .png" in refused(run, tmp_path / "empty", "--out", out)
    (tmp_path / "empty/a.nrrd").write_text("x")
    assert "holds no image; not read: 1 .nrrd file ('a.nrrd'): python -c" in refused(
        run, tmp_path / "empty", "--out", out
    )
    assert "chooses among the models" in refused(find_model(run), image, "--out", out, "--last")
    (tmp_path / "broken.pt").write_bytes(b"x")
    assert "cannot be read as plain tensors" in refused(tmp_path / "broken.pt", image, "--out", out)
    assert not out.exists()


def test_the_help_says_what_it_is_not_for() -> None:
    assert "Research use only: this is not a medical device." in " ".join(
        fairflare("--help").stdout.replace("│", " ").split()
    )


# ------------------------------------------------------------------------------------------------ where models are


def test_a_models_folder_is_found(segmented: Path, tmp_path: Path) -> None:
    """Check a run, the simulator's workspace, a FLARE download, and a folder that holds one run."""
    run = segmented / "run"
    made = run / "server" / "simulate_job"
    assert find_model(run) == made / "best_FL_global_model.pt"
    assert find_model(run, "last") == made / "FL_global_model.pt"
    assert find_model(made / "fairflare").resolve() == made / "best_FL_global_model.pt"
    download = tmp_path / "job-id" / "workspace"
    shutil.copytree(made, download)
    assert find_model(tmp_path / "job-id") == download / "best_FL_global_model.pt"
    assert find_model(tmp_path) == download / "best_FL_global_model.pt"
    (download / "best_FL_global_model.pt").unlink()
    assert find_model(download) == download / "FL_global_model.pt"
    with pytest.raises(ValueError, match=r"no best_FL_global_model\.pt; .* FL_global"):
        find_model(download, "best")
    shutil.copytree(download, tmp_path / "other")
    with pytest.raises(ValueError, match="holds 2 runs; give the folder of one: "):
        find_model(tmp_path)


# ------------------------------------------------------------------------------------------ code of a task's own


def test_a_task_with_code_of_its_own_is_run_only_when_given(kinds: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(OWN_TASK)
    settings = {"image_size": [32, 32], "phantom_cases": 0.1, "local_epochs": 1}
    run = tmp_path / "run"
    run_local(make_plan("fed_avg", task="segmentation", sites=2, num_rounds=1, settings=settings, task_file=file), run)
    kept = run / "server" / "simulate_job" / "fairflare" / "task.py"
    assert kept.read_text() == OWN_TASK
    text = refused(run, kinds / "grey.png", "--out", tmp_path / "out")
    assert text.startswith(
        "the run's task has code of its own (build_model), which is not run unasked: read it, then give"
    )
    assert text.endswith(f"--task-file {kept}")
    result = fairflare(run, kinds / "grey.png", "--out", tmp_path / "out", "--task-file", kept)
    assert result.exit_code == 0, result.output
    assert "note" not in result.stderr
    assert "trained on SYNTHETIC images" in result.stdout
    file.write_text(OWN_TASK + "\n")
    result = fairflare(run, kinds / "grey.png", "--out", tmp_path / "again", "--task-file", file)
    assert "is not the file that the model was trained with" in result.stderr.replace("\n", " ")
    file.write_text(OWN_TASK.replace("channels=(4, 8)", "channels=(4, 6)"))
    text = refused(run, kinds / "grey.png", "--out", tmp_path / "more", "--task-file", file)
    assert "does not fit the network of its task: " in text
    assert ".weight" in text


def test_own_reading_of_images_must_be_told(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    reading = "\n    def open_folder(self, site, own, datalist):\n        raise ValueError\n"
    file.write_text(OWN_TASK + reading)
    state = make_plan("fed_avg", task="segmentation", sites=2, task_file=file).task.build_model().state_dict()
    torch.save({"model": state, "train_conf": {}}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"has no read_input\(file, number\)"):
        load_predictor(tmp_path / "model.pt", task_file=file)
    file.write_text(OWN_TASK + reading + "\n    read_input = SegmentationTask.read_input\n")
    predictor = load_predictor(tmp_path / "model.pt", task_file=file)
    assert predictor.notes == ["the model's file has no settings of its task; those that the task file sets hold"]


def test_models_that_do_not_say_what_they_are_for(segmented: Path, tmp_path: Path) -> None:
    model = read_model(find_model(segmented / "run"))
    torch.save({"model": model.state}, tmp_path / "FL_global_model.pt")
    with pytest.raises(ValueError, match=r"does not say .* give --task-file with"):
        load_predictor(tmp_path)


def test_records_that_do_not_fit(segmented: Path, tmp_path: Path) -> None:
    record = dict(read_model(find_model(segmented / "run")).record)
    with pytest.raises(ValueError, match=r"SegmentationTask: .*'colour'.* 9.0"):
        recall({**record, "settings": {"colour": 1}, "fairflare": "9.0"}, tmp_path)
    with pytest.raises(ValueError, match=r"'fairflare\.tasks\.no\.Task' is not in"):
        recall({**record, "class": "fairflare.tasks.no.Task"}, tmp_path)
    with pytest.raises(ValueError, match="is not in fairflare"):  # nothing else is imported
        recall({**record, "class": "tests.federation.network.Line", "settings": {}}, tmp_path)
    assert recall({**record, "fairflare": "0.1.0"}, tmp_path).notes == [
        f"the model was made with fairflare 0.1.0, this is {__version__}"
    ]
    script = TaskRecorder(ScriptTask(model="torch.nn.Identity"), dict, tmp_path)()
    torch.save({"model": {"a": torch.ones(1)}, "train_conf": {"task": script}}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"trained for a ScriptTask, .*one image"):
        load_predictor(tmp_path / "model.pt")


def test_a_run_that_is_taken_up_again_keeps_the_names(classified: Path, tmp_path: Path) -> None:
    local = json.loads((classified / "run/local/fairflare.json").read_text()) | {
        "checkpoint_root": str(tmp_path / "kept"), "state_root": str(tmp_path / "state"),
    }  # fmt: skip
    plan = make_plan(
        "fed_avg", task="classification", sites=SITES, num_rounds=1, settings=CLASSIFICATION, experiment="one"
    )
    run_local(plan, tmp_path / "first", local)
    with pytest.raises(Stopped):
        run_local(plan, tmp_path / "second", local, should_stop=lambda: True)
    before, after = (read_model(find_model(tmp_path / name, "last")).record for name in ("first", "second"))
    assert after == before
    assert after["class_names"] == CLASSES


@pytest.mark.parametrize(
    ("said", "synthetic", "names"),
    [
        ({"a": CLASSES, "b": CLASSES}, False, CLASSES),
        ({"a": CLASSES, "b": None}, False, CLASSES),
        ({"a": None}, False, ["class_0", "class_1", "class_2"]),
        ({"a": CLASSES, "b": CLASSES[::-1]}, False, ["class_0", "class_1", "class_2"]),
    ],
)
def test_names_of_classes_come_from_the_datalists(said: Any, synthetic: bool, names: list[str], tmp_path: Path) -> None:
    info = {"said": {site: {"class_names": given} for site, given in said.items()}, "synthetic": synthetic}
    task = ClassificationTask(num_classes=3)
    record = TaskRecorder(task, lambda: info, tmp_path)()
    assert record["class_names"] == names
    assert recall(record, tmp_path).task.names() == names
    named = ClassificationTask(num_classes=3, class_names=["x", "y", "z"])
    assert TaskRecorder(named, lambda: info, tmp_path)()["class_names"] == ["x", "y", "z"]
    made_up = TaskRecorder(ClassificationTask(), lambda: {"synthetic": True}, tmp_path)()
    assert made_up["class_names"] == ClassificationTask().names()


def test_a_model_is_written_in_place_of_masks(segmented: Path, tmp_path: Path) -> None:
    result = fairflare(segmented / "run", "--as", "torchscript", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.ts", "input.json"}
    assert "exists, and an export replaces nothing" in refused(segmented / "run", "--as", "bundle", tmp_path / "out")
    images = segmented / "data"
    for vain in (
        [images],
        ["--out", tmp_path],
        ["--threshold", 0.4],
        ["--device", "cpu"],
        ["--overwrite"],
        ["--overlay"],
    ):
        assert "goes with --best, --last" in refused(segmented / "run", *vain, "--as", "bundle", tmp_path / "new")
    assert refused(segmented / "run", images).startswith("give images and --out, or --as")
