"""Test ``fairflare predict`` on padded, cropped, turned and DICOM images: masks in the image's size and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from fairflare.cli import commands as cli
from fairflare.data.datalist import write_datalist
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.prediction.predictor import load_predictor
from fairflare.prediction.recall import recall
from fairflare.prediction.saved_model import find_model, read_model
from tests.tiny import run_document

from .dicom_files import AXIAL, dicom, series

pytestmark = pytest.mark.usefixtures("one_thread")
SITES = ["north", "south"]


def fairflare(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, ["predict", *map(str, arguments)])


def picture(seed: int, size: tuple[int, int] = (60, 90)) -> tuple[np.ndarray, np.ndarray]:
    """Return a bright disc on the upper left, on noise, uint8, and its mask."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    middle = random.uniform(0.3, 0.45, 2) * size
    inside = (y - middle[0]) ** 2 + (x - middle[1]) ** 2 < (0.2 * min(size)) ** 2
    return (random.uniform(0, 90, size) + 150 * inside).astype(np.uint8), inside.astype(np.uint8)


def run(root: Path, **settings: Any) -> Path:
    for number, site in enumerate(SITES):
        folder = root / "data" / site
        (folder / "test").mkdir(parents=True)
        splits: dict[str, list[dict[str, str]]] = {"training": [], "validation": [], "test": []}
        for case in range(14):
            split = "training" if case < 6 else "validation" if case < 8 else "test"
            image, mask = picture(100 * number + case, (60, 90) if case % 2 else (80, 50))
            name = f"{'test/' if split == 'test' else ''}{case}"
            Image.fromarray(image).save(folder / f"{name}.png")
            Image.fromarray(mask * 255).save(folder / f"m{case}.png")
            splits[split].append({"image": f"{name}.png", "label": f"m{case}.png"})
        write_datalist(folder / "datalist.json", splits)
    fixed = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "local_epochs": 3, "learning_rate": 0.02}
    plan = make_plan("fed_avg", task="segmentation", sites=SITES, num_rounds=3, settings={**fixed, **settings})
    run_local(plan, root / "run", {"sites": {site: {"data_root": str(root / "data" / site)} for site in SITES}})
    return root


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("padded"), resize="pad", intensity="percentile", evaluate_at="image")


@pytest.fixture(scope="module")
def cropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("cropped"), resize="crop", mask_resize="area", evaluate_at="image")


@pytest.mark.parametrize("which", ["padded", "cropped"])
def test_masks_give_the_dice_of_the_runs_own_test_at_the_images_size(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = request.getfixturevalue(which)
    results = run_document(root / "run/server/simulate_job/fairflare/results.json")
    for site in SITES:
        folder = root / "data" / site
        result = fairflare(root / "run", folder / "test", "--out", tmp_path / site, "--last")
        assert result.exit_code == 0, result.output
        scores = []
        for case in range(8, 14):
            truth = np.asarray(Image.open(folder / f"m{case}.png")) > 0
            mask = np.asarray(Image.open(tmp_path / site / f"{case}_mask.png")) > 0
            assert mask.shape == truth.shape
            both = np.float32(mask.sum() + truth.sum())
            scores.append(float(np.float32(2 * (mask & truth).sum()) / both) if both else 1.0)
        assert np.mean(scores) == pytest.approx(results["test"][site]["dice"], rel=1e-7)
        assert np.mean(scores) > 0.5


def test_the_record_says_how_images_are_read(padded: Path) -> None:
    record = read_model(find_model(padded / "run")).record
    said = {"resize": "pad", "intensity": "percentile", "orientation": "canonical", "window": None, "ignore": None}
    assert {key: record["settings"][key] for key in said} == said
    assert record["intensities"].startswith("clipped to [minimum, 99th percentile]")
    assert load_predictor(padded / "run").task.resize == "pad"
    assert recall({**record, "settings": {}}, padded).task.orientation == "canonical"  # type: ignore[attr-defined]


def body() -> np.ndarray:
    """Return (rows, columns, slices) of int16, as seen."""
    return np.stack([picture(7 + k)[0] for k in range(5)], axis=2).astype(np.int16) * 9


def stored(path: Path, codes: str) -> Path:
    lps = nibabel.Nifti1Image(body().swapaxes(0, 1), np.diag([-0.7, -0.5, 3.0, 1.0]))
    way = nibabel.orientations.ornt_transform(
        nibabel.orientations.axcodes2ornt("LPS"), nibabel.orientations.axcodes2ornt(codes)
    )
    nibabel.save(lps.as_reoriented(way), path)
    return path


def seen(mask: Path) -> np.ndarray:
    """Return a NIfTI mask as seen: (rows to the back, columns to the left, slices from the feet)."""
    image: Any = nibabel.load(mask)
    ras = np.asarray(nibabel.as_closest_canonical(image).dataobj)
    return ras[::-1, ::-1].swapaxes(0, 1)


def test_one_body_stored_in_many_ways_has_one_mask(padded: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for codes in ("LPS", "RAS", "ALS", "PRI"):
        stored(images / f"{codes}.nii.gz", codes)
    series(images / "ct", body(), PixelSpacing=[0.5, 0.7])
    result = fairflare(padded / "run", images, "--out", tmp_path / "out", "--overlay")
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "out").glob("*_mask*"))
    assert names == ["ALS_mask.nii.gz", "LPS_mask.nii.gz", "PRI_mask.nii.gz", "RAS_mask.nii.gz", "ct_mask.nii.gz"]
    wanted = seen(tmp_path / "out" / "LPS_mask.nii.gz")
    assert wanted.shape == body().shape
    assert 0 < wanted.mean() < 0.5
    for name in names:
        np.testing.assert_array_equal(seen(tmp_path / "out" / name), wanted, err_msg=name)
        source = images / name.replace("_mask", "")
        if source.exists():
            image, mask = nibabel.load(source), nibabel.load(tmp_path / "out" / name)
            assert mask.shape == image.shape
            assert np.array_equal(mask.affine, image.affine)
    ct: Any = nibabel.load(tmp_path / "out" / "ct_mask.nii.gz")
    np.testing.assert_allclose(ct.affine, [[-0.7, 0, 0, 20], [0, -0.5, 0, 30], [0, 0, 3, 5], [0, 0, 0, 1]], atol=1e-6)
    overlays = {np.asarray(Image.open(path)).tobytes() for path in (tmp_path / "out").glob("*_overlay.png")}
    assert len(overlays) == 1


def test_the_mask_of_a_sagittal_series_lies_on_it(padded: Path, tmp_path: Path) -> None:
    """Check either storage order, as DICOM and as ITK's NIfTI: one mask, where ITK has the image."""
    images, masks = tmp_path / "images", {}
    for name, order in (("up", None), ("down", [4, 3, 2, 1, 0])):
        folder = series(images / name, body(), order)
        for file in folder.iterdir():
            one = pydicom.dcmread(file)
            one.ImageOrientationPatient = [0, 1, 0, 0, 0, -1]
            one.ImagePositionPatient = [float(one.ImagePositionPatient[2]), -20, 30]
            one.save_as(file)
    itk = sitk.ReadImage(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(images / "up")))
    sitk.WriteImage(itk, str(images / "itk.nii.gz"))
    result = fairflare(padded / "run", images, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for name in ("up", "down", "itk"):
        mask = sitk.ReadImage(str(tmp_path / "out" / f"{name}_mask.nii.gz"))
        placed = sitk.Resample(mask, itk, sitk.Transform(), sitk.sitkNearestNeighbor, 9)
        masks[name] = sitk.GetArrayFromImage(placed)
        assert set(np.unique(masks[name])) == {0, 1}
    np.testing.assert_array_equal(masks["up"], masks["down"])
    np.testing.assert_array_equal(masks["up"], masks["itk"])
    bright = sitk.GetArrayFromImage(itk) > 9 * 120  # the disc, as ITK has it
    assert 2 * (bright & (masks["up"] > 0)).sum() > 0.5 * (bright.sum() + masks["up"].sum())


def test_masks_of_dicom_files(padded: Path, tmp_path: Path) -> None:
    """Check pictures in the file's own rows, turned back where the network saw them otherwise; frames as a volume."""
    image = picture(3)[0]
    folder = tmp_path / "images"
    folder.mkdir()
    usual = {"ImagePositionPatient": [0, 0, 0], "SeriesInstanceUID": "7"}
    Image.fromarray(image).save(folder / "plain.png")
    dicom(folder / "1.2.840.9", image, SeriesInstanceUID="8")
    dicom(folder / "lying.dcm", image[::-1, ::-1].copy(), ImageOrientationPatient=[-1, 0, 0, 0, -1, 0], **usual)
    dicom(folder / "frames.dcm", np.stack([image, image[:, ::-1]]), SeriesInstanceUID="9")
    result = fairflare(padded / "run", folder, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    plain = np.asarray(Image.open(tmp_path / "out" / "plain_mask.png"))
    assert plain.any()
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / "1.2.840.9_mask.png")), plain)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / "lying_mask.png")), plain[::-1, ::-1])
    frames: Any = nibabel.load(tmp_path / "out" / "frames_mask.nii.gz")
    assert frames.shape == (90, 60, 2)
    assert (int(frames.header["sform_code"]), int(frames.header["qform_code"])) == (0, 0)
    np.testing.assert_array_equal(np.asarray(frames.dataobj)[:, :, 0].T * 255, plain)


def test_a_series_can_be_given_by_its_folder_and_others_are_single_images(padded: Path, tmp_path: Path) -> None:
    ct = series(tmp_path / "ct", body())
    assert fairflare(padded / "run", ct, "--out", tmp_path / "a").exit_code == 0
    assert (tmp_path / "a" / "ct_mask.nii.gz").is_file()
    assert torch.is_tensor(load_predictor(padded / "run").task.read_input(ct, 2))
    loose = tmp_path / "loose"
    loose.mkdir()
    for number in range(3):  # of three patients
        dicom(
            loose / f"{number}.dcm", picture(number)[0], SeriesInstanceUID=f"1.{number}", ImageOrientationPatient=AXIAL
        )
    told = fairflare(padded / "run", loose, "--out", tmp_path / "b")
    assert told.exit_code == 0
    assert "loose: no volume, each file is an image by itself: the folder holds 3 DICOM series." in " ".join(
        told.stderr.split()
    )
    names = sorted(path.name for path in (tmp_path / "b").glob("*_mask.*"))
    assert names == ["0_mask.png", "1_mask.png", "2_mask.png"]
