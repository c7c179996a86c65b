"""Test masks that SimpleITK makes on series, enhanced files and NIfTI in any position: they agree, or are refused."""

from __future__ import annotations

import io
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from PIL import Image
from pydicom.sequence import Sequence as Items
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.data import dicom_seg
from fairflare.data.datalist import SPLITS, DataError, Sample, load_datalist, write_datalist
from fairflare.data.image_file import image_file
from fairflare.data.orientation import ORIENTATIONS
from fairflare.data.preparers import prepare_folders, prepare_masks, prepare_volumes
from fairflare.data.reading import Reading, notes_on, read_image, read_mask, slices_in, turn_and_size
from fairflare.data.whole_volumes import read_pair, read_whole
from fairflare.prediction.masks import write_mask
from tests.unit.dicom_files import dicom, group

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS: dict[str, list[float]] = {
    "axial": [1, 0, 0, 0, 1, 0],
    "coronal": [1, 0, 0, 0, 0, -1],
    "sagittal": [0, 1, 0, 0, 0, -1],
    "lying": [0, -1, 0, 1, 0, 0],  # axial, rows and columns exchanged: to be turned before anybody looks at it
    "oblique": [0.939692621, 0.342020143, 0, -0.296198133, 0.813797681, 0.5],
}
ROWS, COLUMNS, SLICES = 6, 7, 5
KINDS = ("series", "enhanced", "nifti")
ORDERS = ("up", "down", "mixed")
EXACT = Reading(orientation="canonical", intensity="range")


def truth() -> np.ndarray:
    """Return (rows, columns, slices) of 0 and 1, unlike any of its turns."""
    return np.random.default_rng(5).integers(0, 2, (ROWS, COLUMNS, SLICES)).astype(np.int16)


def scanned(
    folder: Path, way: str, kind: str = "series", order: str = "up", volume: np.ndarray | None = None, tilt: float = 0,
    steps: Any = None,
) -> Path:  # fmt: skip
    """Write a volume as DICOM, or as NIfTI by nibabel; slices follow each other along the normal."""
    volume = truth() * 1000 if volume is None else volume
    across = np.array(WAYS[way])
    normal = np.cross(across[:3], across[3:])
    step = normal * np.cos(np.radians(tilt)) + across[3:] * np.sin(np.radians(tilt))
    heights = 2.5 * np.arange(volume.shape[2]) if steps is None else np.asarray(steps, float)
    places = [np.round(np.array([-10.0, -20.0, 30.0]) + height * step, 9) for height in heights]
    numbers = list(range(len(places)))
    stored = {"up": numbers, "down": numbers[::-1], "mixed": numbers[::2] + numbers[1::2]}[order]
    folder.mkdir(parents=True)
    if kind == "series":
        for name, k in enumerate(stored):
            dicom(
                folder / f"IM{name:03d}.dcm", np.ascontiguousarray(volume[:, :, k]), InstanceNumber=name + 1,
                ImageOrientationPatient=list(across), ImagePositionPatient=list(places[k]), PixelSpacing=[0.5, 0.75],
                FrameOfReferenceUID="1.9", PatientID=folder.name,
                Modality="CT",
            )  # fmt: skip
        return folder
    if kind == "enhanced":
        return enhanced(folder / "all.dcm", volume[:, :, stored], [places[k] for k in stored], list(across))
    affine = np.eye(4)
    affine[:3] = np.stack([across[:3] * 0.75, across[3:] * 0.5, step * 2.5, places[0]], axis=1)
    affine[:2] *= -1
    array = volume.swapaxes(0, 1)
    if order != "up":
        flip = np.diag([1, 1, -1, 1.0])
        flip[2, 3] = SLICES - 1
        array, affine = array[:, :, ::-1], affine @ flip
    nibabel.save(nibabel.Nifti1Image(array.astype(np.int16), affine), folder / "all.nii.gz")
    return folder / "all.nii.gz"


def enhanced(path: Path, volume: np.ndarray, places: Any, across: Any, each: Any = None) -> Path:
    own = [
        group(PlanePositionSequence={"ImagePositionPatient": list(place)}, **((each or [{}] * len(places))[k]))
        for k, place in enumerate(places)
    ]
    shared = group(
        PlaneOrientationSequence={"ImageOrientationPatient": across},
        PixelMeasuresSequence={"PixelSpacing": [0.5, 0.75]},
        PixelValueTransformationSequence={"RescaleSlope": 1, "RescaleIntercept": 0},
    )  # fmt: skip
    frames = np.ascontiguousarray(np.moveaxis(volume, 2, 0))
    return dicom(
        path, frames, SharedFunctionalGroupsSequence=Items([shared]), PerFrameFunctionalGroupsSequence=Items(own),
        SOPClassUID="1.2.840.10008.5.1.4.1.1.4.1", PatientID=path.parent.name,
    )  # fmt: skip


def by_itk(image: Path) -> sitk.Image:
    if image.is_dir():
        names = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(image))
        return sitk.ReadImage(names)
    return sitk.ReadImage(str(image))


def mask_of(image: Path, path: Path, codes: str = "") -> Path:
    """Make a mask as 3D Slicer and ITK-SNAP do: a threshold on ITK's volume, with its geometry, perhaps turned."""
    made = sitk.Cast(by_itk(image) > 500, sitk.sitkUInt8)
    path.parent.mkdir(parents=True, exist_ok=True)
    sitk.WriteImage(sitk.DICOMOrient(made, codes) if codes else made, str(path))
    return path


def agrees(image: Path, mask: Path) -> None:
    """Check every picture of every orientation, and the whole volume, voxel by voxel."""
    for orientation in ORIENTATIONS:
        how = Reading(orientation=orientation, intensity="range")  # type: ignore[arg-type]
        count = slices_in(image, how=how) or 1
        for number in range(count):
            sample = Sample(image, mask, number)
            seen, label = read_pair(sample, site="a", split="test", how=how)
            np.testing.assert_array_equal(label, seen[:, :, 0] > 0.5)
            np.testing.assert_array_equal(read_mask(sample, site="a", split="test", how=how), label)
            assert 0 < label.mean() < 1
    whole = read_whole(Sample(image, mask), masked=True, site="a", split="test", how=EXACT)
    np.testing.assert_array_equal(whole.mask, whole.image[0] > 0.5)


def refusal(image: Path, mask: Path, number: int | None = 0) -> str:
    """Check the same reason in 2D and 3D, also for pictures as they are stored."""
    said = set()
    for how in (EXACT, Reading(orientation="stored")):
        with pytest.raises(DataError) as caught:
            read_pair(Sample(image, mask, number), site="a", split="test", how=how)
        said.add(str(caught.value.reason))
        assert str(image) not in caught.value.public
    with pytest.raises(DataError) as caught:
        read_whole(Sample(image, mask), masked=True, site="a", split="test")
    (one,) = {*said, str(caught.value.reason)}
    return one


#: Slices of NIfTI are in order, or in the other one.
STORED = [of for of in itertools.product(KINDS, ORDERS) if of != ("nifti", "mixed")]
# ITK itself reads mixed frames of one file wrongly: test_frames_that_itk_reads_wrongly.
ITK_READS = [of for of in STORED if of != ("enhanced", "mixed")]


@pytest.mark.parametrize(("kind", "order"), ITK_READS)
@pytest.mark.parametrize("way", WAYS)
def test_what_itk_makes_on_an_image_is_taken(tmp_path: Path, way: str, kind: str, order: str) -> None:
    image = scanned(tmp_path / "image", way, kind, order)
    for codes in ("", "RAS", "PIR"):
        agrees(image, mask_of(image, tmp_path / f"mask{codes}.nii.gz", codes))


def test_frames_that_itk_reads_wrongly(tmp_path: Path) -> None:
    """Check frames out of order: ITK keeps the file's order and invents a spacing; ours are in their place."""
    image = scanned(tmp_path / "e", "axial", "enhanced", "mixed")
    series = scanned(tmp_path / "s", "axial", "series")
    array = image_file(image).decode(is_mask=False, limit=10**6)
    np.testing.assert_array_equal(array, truth() * 1000)
    np.testing.assert_allclose(image_file(image).facts().grid.affine, image_file(series).facts().grid.affine)  # type: ignore[arg-type]
    wrong = mask_of(image, tmp_path / "wrong.nii.gz")
    assert "dcm2niix" in refusal(image, wrong)
    agrees(image, mask_of(series, tmp_path / "right.nii.gz"))


@pytest.mark.parametrize(("kind", "order"), STORED)
def test_a_tilted_gantry_is_refused(tmp_path: Path, kind: str, order: str) -> None:
    image = scanned(tmp_path / "image", "axial", kind, order, tilt=14)
    mask = mask_of(scanned(tmp_path / "straight", "axial"), tmp_path / "mask.nii.gz")
    assert "14.0 degrees off their normal" in refusal(image, mask)
    with pytest.raises(DataError, match=r"14\.0 degrees"):
        read_image(Sample(image, 0, 1), site="a", split="test")


def sites_of(root: Path, kind: str) -> tuple[Path, Path]:
    """Make sites with images and masks in all positions and orders."""
    for way, order in itertools.product(WAYS, ORDERS[:2]):
        place = root / "images" / f"{way}-{order}"
        volume = distinct(way, order)
        volume[4:], volume[:, 5:], volume[:, :, 3:] = 0, 0, 0  # not every slice has a label
        image = scanned(place, way, kind, order, volume=volume)
        mask_of(image, root / "masks" / f"{way}-{order}.nii.gz")
        if kind == "nifti":
            image.rename(root / "images" / f"{way}-{order}.nii.gz")
            place.rmdir()
        elif kind == "enhanced":
            image.rename(place / "IM1")
    return root / "images", root / "masks"


def distinct(way: str, order: str) -> np.ndarray:
    """Check that no two are alike."""
    seed = [*way.encode(), *order.encode()]
    return np.random.default_rng(seed).integers(0, 2, (ROWS, COLUMNS, SLICES)).astype(np.int16) * 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plane", [None, "axial", "sagittal"])
def test_prepared_volumes_agree(tmp_path: Path, kind: str, plane: Any) -> None:
    images, masks = sites_of(tmp_path, kind)
    written = prepare_volumes(tmp_path / "out", folders={"a": (images, masks)}, slices=plane)
    found = load_datalist(written["a"], site="a")
    samples = [sample for split in SPLITS for sample in found.splits[split]]
    assert len({sample.image for sample in samples}) == 2 * len(WAYS)
    numbers: dict[Path, list[int]] = {}
    for sample in samples:
        if plane is None:
            whole = read_whole(sample, masked=True, site="a", split="test", how=EXACT)
            np.testing.assert_array_equal(whole.mask, whole.image[0] > 0.5)
        else:
            how = Reading(orientation=plane, intensity="range")
            seen, label = read_pair(sample, site="a", split="test", how=how)
            np.testing.assert_array_equal(label, seen[:, :, 0] > 0.5)
            numbers.setdefault(sample.label, []).append(sample.slice or 0)  # type: ignore[arg-type]
    for mask, listed in numbers.items():  # those that have a label, from the feet or from the right
        seen = sitk.GetArrayFromImage(sitk.DICOMOrient(sitk.ReadImage(str(mask)), "LPS"))
        assert sorted(listed) == np.flatnonzero(seen.any(axis=(1, 2) if plane == "axial" else (0, 1))).tolist()


def test_a_dicom_series_is_a_mask_too(tmp_path: Path) -> None:
    image = scanned(tmp_path / "image", "sagittal")
    mask = scanned(tmp_path / "mask", "sagittal", order="mixed", volume=truth())
    agrees(image, mask)
    images, masks = tmp_path / "i", tmp_path / "m"
    for number in range(3):
        scanned(images / f"p{number}", "coronal", volume=distinct("x" * number, "y"))
        scanned(masks / f"p{number}", "coronal", order="down", volume=distinct("x" * number, "y") // 1000)
    written = prepare_volumes(tmp_path / "out", folders={"a": (images, masks)})
    sample = load_datalist(written["a"], site="a").splits["test"][0]
    agrees(sample.image, sample.label)  # type: ignore[arg-type]


def test_positions_that_were_rounded_when_they_were_written(tmp_path: Path) -> None:
    image = scanned(tmp_path / "image", "axial", steps=[round(0.333 * k, 2) for k in range(SLICES)])
    agrees(image, mask_of(image, tmp_path / "mask.nii.gz"))
    uneven = scanned(tmp_path / "uneven", "axial", steps=[0, 0.333, 0.66, 1, 1.333])  # three digits
    with pytest.raises(DataError, match="uneven"):
        read_image(Sample(uneven, 0, 0), site="a", split="test")


def test_a_mask_tells_which_of_two_forms_is_meant(tmp_path: Path) -> None:
    """Check an image by the mask of its qform, also where it is read by itself in a datalist."""
    volume = truth().swapaxes(0, 1) * 1000
    q = np.array([[-1, 0, 0, 10], [0, -1, 0, 20], [0, 0, 2, 30], [0, 0, 0, 1.0]])
    s = np.array([[1, 0, 0, -5], [0, 1, 0, -6], [0, 0, 2, -7], [0, 0, 0, 1.0]])
    for name, forms in (("both", (q, s)), ("q", (q, q)), ("s", (s, s))):
        image = nibabel.Nifti1Image(volume, None)
        image.set_qform(forms[0], 1)
        image.set_sform(forms[1], 2)
        nibabel.save(image, tmp_path / f"{name}.nii.gz")
    both = tmp_path / "both.nii.gz"
    for name in ("q", "s"):
        mask = mask_of(tmp_path / f"{name}.nii.gz", tmp_path / f"m{name}.nii.gz")
        for how in (EXACT, Reading(orientation="stored", intensity="range")):
            for number in range(slices_in(both, how=how) or 0):
                picture, label = read_pair(Sample(both, mask, number), site="a", split="test", how=how)
                np.testing.assert_array_equal(label, picture[:, :, 0] > 0.5)
                assert label.any()
        whole = read_whole(Sample(both, mask), masked=True, site="a", split="test", how=EXACT)
        np.testing.assert_array_equal(whole.mask, whole.image[0] > 0.5)
        seen = read_image(Sample(both, mask, 1), site="a", split="test")
        alone = read_image(Sample(tmp_path / f"{name}.nii.gz", 0, 1), site="a", split="test")
        np.testing.assert_array_equal(seen, alone)
        whole = read_whole(Sample(both, mask), masked=False, site="a", split="test", how=EXACT)  # as check-data does
        alone = read_whole(Sample(tmp_path / f"{name}.nii.gz", 0), masked=False, site="a", split="test", how=EXACT)
        np.testing.assert_array_equal(whole.image, alone.image)
        np.testing.assert_array_equal(whole.affine, alone.affine)
    with pytest.raises(DataError, match="qform says LPS and sform RAS"):
        read_image(Sample(both, 0, 1), site="a", split="test")
    with pytest.raises(DataError, match="qform says LPS and sform RAS"):
        read_whole(Sample(both, 0), masked=False, site="a", split="test")


# --- masks that are written -------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "kind", "order"), itertools.product(WAYS, KINDS, ORDERS[:2]))
def test_a_predicted_mask_lies_on_its_image(tmp_path: Path, way: str, kind: str, order: str) -> None:
    """Check pictures as the network sees them, stacked and written: ITK and nibabel find the mask on its image."""
    image = scanned(tmp_path / "image", way, kind, order)
    turn, _, _ = turn_and_size(image, how=EXACT)
    seen = [read_image(Sample(image, 0, k), site="a", split="test", how=EXACT)[:, :, 0] > 0.5 for k in range(SLICES)]
    path = tmp_path / "m_mask.nii.gz"
    write_mask(path, np.stack(seen, axis=2).astype(np.uint8), image, turn)
    whole = read_whole(Sample(image, 0), masked=False, site="a", split="test", how=EXACT).image[0]
    write_mask(tmp_path / "whole_mask.nii.gz", (whole > 0.5).astype(np.uint8), image)  # of a task on volumes
    itk = by_itk(image)
    for made in (path, tmp_path / "whole_mask.nii.gz"):
        mask = sitk.ReadImage(str(made))
        placed = sitk.Resample(mask, itk, sitk.Transform(), sitk.sitkNearestNeighbor, 9)
        np.testing.assert_array_equal(sitk.GetArrayFromImage(placed), sitk.GetArrayFromImage(itk) > 500)
        agrees(image, made)
    written: Any = nibabel.load(path)
    # By nibabel: each voxel of the mask, and what DICOM says there (LPS), looked up by hand.
    values = np.asarray(written.dataobj)
    for index in np.ndindex(values.shape):
        x, y, z = (written.affine @ [*index, 1])[:3]
        where = itk.TransformPhysicalPointToIndex((-float(x), -float(y), float(z)))
        assert values[index] == (itk[where] > 500)
    if kind == "nifti":
        source: Any = nibabel.load(image)
        np.testing.assert_array_equal(written.affine, source.affine)
        assert int(written.header["sform_code"]) == int(source.header["sform_code"])


@pytest.mark.parametrize("tag", range(1, 9))
def test_a_predicted_mask_of_a_turned_picture_says_the_same(tmp_path: Path, tag: int) -> None:
    picture = np.random.default_rng(tag).integers(0, 2, (5, 8)).astype(np.uint8) * 255
    exif = Image.Exif()
    exif[0x0112] = tag
    for ending in ("png", "tif"):
        image = tmp_path / f"a.{ending}"
        Image.fromarray(picture).save(image, exif=exif)
        seen = read_image(Sample(image, 0), site="a", split="test")[:, :, 0] > 0.5
        mask = tmp_path / f"a_mask_{ending}.png"
        write_mask(mask, seen.astype(np.uint8), image)
        np.testing.assert_array_equal(np.asarray(Image.open(mask)) * 255, picture)  # pixel on pixel in the files
        read, label = read_pair(Sample(image, mask), site="a", split="test")
        np.testing.assert_array_equal(label, read[:, :, 0] > 0.5)


def test_the_tag_of_a_png_may_stand_behind_its_pixels(tmp_path: Path) -> None:
    picture = np.arange(40, dtype=np.uint8).reshape(5, 8)
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG", exif=exif)
    data = stream.getvalue()
    at = data.index(b"eXIf") - 4
    length = 12 + int.from_bytes(data[at : at + 4], "big")
    end = data.index(b"IEND") - 4
    (tmp_path / "a.png").write_bytes(data[:at] + data[at + length : end] + data[at : at + length] + data[end:])
    file = image_file(tmp_path / "a.png")
    assert (file.facts().grid.tag, file.facts().grid.shape) == (6, (8, 5, 1))
    np.testing.assert_array_equal(file.decode(is_mask=True, limit=1000), np.rot90(picture, -1))


# --- frames -----------------------------------------------------------------------------------------------


def test_each_frame_has_its_own_rescale(tmp_path: Path) -> None:
    """Check that a frame's own rescale comes first; stored 0, 100, 200 with (1, 0), (2, 0), (1, -50), out of order."""
    volume = np.stack([np.full((4, 5), value, np.uint16) for value in (0, 200, 100)], axis=2)
    each = [
        {"PixelValueTransformationSequence": {"RescaleSlope": slope, "RescaleIntercept": intercept}}
        for slope, intercept in ((1, 0), (1, -50), (2, 0))
    ]
    path = enhanced(tmp_path / "e.dcm", volume, [(0, 0, z) for z in (0, 4, 2)], WAYS["axial"], each)
    array = image_file(path).decode(is_mask=False, limit=10**6)
    assert array[0, 0].tolist() == [0, 200, 150]


def test_a_dose_lies_by_its_offsets(tmp_path: Path) -> None:
    frames = np.ascontiguousarray(np.moveaxis(truth(), 2, 0))
    place = {"ImageOrientationPatient": WAYS["axial"], "ImagePositionPatient": [0, 0, 0], "PixelSpacing": [0.5, 0.75]}
    path = dicom(tmp_path / "d.dcm", frames, **place, GridFrameOffsetVector=[0, -2, -4, -6, -8])
    found = image_file(path).facts()
    np.testing.assert_allclose(found.grid.affine, [[0, -0.75, 0, 0], [-0.5, 0, 0, 0], [0, 0, 2, -8], [0, 0, 0, 1]])  # type: ignore[arg-type]
    np.testing.assert_array_equal(image_file(path).decode(is_mask=False, limit=10**6), truth()[:, :, ::-1])
    absolute = dicom(tmp_path / "x.dcm", frames, **place, GridFrameOffsetVector=[5, 7, 9, 11, 13])
    with pytest.raises(DataError, match="begins with 5, not with 0"):
        read_image(Sample(absolute, 0, 0), site="a", split="test")
    nowhere = dicom(tmp_path / "n.dcm", frames, **place)  # frames without places of their own
    assert image_file(nowhere).facts().grid.affine is None


def test_frames_that_are_no_stack(tmp_path: Path) -> None:
    volume = np.concatenate([truth(), truth()], axis=2)
    places = [(0, 0, 2.0 * k) for k in range(5)] * 2
    each = [{"FrameContentSequence": {"TemporalPositionIndex": 1 + k // 5}} for k in range(10)]
    path = enhanced(tmp_path / "t.dcm", volume, places, WAYS["axial"], each)
    with pytest.raises(DataError, match=r"5 places; .*PositionIndex \(1, 2\)"):
        read_image(Sample(path, 0, 0), site="a", split="test")
    per_frame = Items([group(PlanePositionSequence={"ImagePositionPatient": [0, 0, k]}) for k in range(3)])
    frames = np.ascontiguousarray(np.moveaxis(truth(), 2, 0))
    few = dicom(tmp_path / "few.dcm", frames, PerFrameFunctionalGroupsSequence=per_frame)
    with pytest.raises(DataError, match="3 functional groups for 5 frames"):
        read_image(Sample(few, 0, 0), site="a", split="test")


# --- remedies, each on its case ---------------------------------------------------------------------------


def test_resampling_as_the_message_says(tmp_path: Path) -> None:
    """Check the call in the message, literally, on a mask of a part and on one of another resolution."""
    image_path = scanned(tmp_path / "s", "sagittal", volume=np.kron(truth(), np.ones((2, 2, 1), np.int16)) * 1000)
    image = by_itk(image_path)
    whole = sitk.Cast(image > 500, sitk.sitkUInt8)
    inside = sitk.GetArrayFromImage(whole)
    part = whole[2:9, 1:7, 1:4]
    coarse = sitk.Resample(
        whole, [COLUMNS, ROWS, SLICES], sitk.Transform(), sitk.sitkNearestNeighbor,
        image.TransformContinuousIndexToPhysicalPoint((0.5, 0.5, 0.0)), [1.5, 1.0, 2.5], image.GetDirection(),
    )  # fmt: skip
    for name, mask, words in (
        ("part", part, "it covers a part (from row"),
        ("coarse", coarse, "its voxels are 1 x 1.5"),
    ):
        sitk.WriteImage(mask, str(tmp_path / f"{name}.nii.gz"))
        told = refusal(image_path, tmp_path / f"{name}.nii.gz")
        assert words in told
        call = told[told.index("`") + 1 : told.rindex("`")]
        resampled = eval(call, {"sitk": sitk, "mask": mask, "image": image})
        sitk.WriteImage(resampled, str(tmp_path / f"{name}_there.nii.gz"))
        read = read_whole(Sample(image_path, tmp_path / f"{name}_there.nii.gz"), masked=True, site="a", split="t")
        assert read.mask is not None
        if name == "coarse":
            np.testing.assert_array_equal(read.mask, read.image[0] > 0.5)
        else:
            assert read.mask.sum() == sitk.GetArrayFromImage(part).sum() < inside.sum()
            assert not (read.mask.astype(bool) & (read.image[0] <= 0.5)).any()


def test_geometry_from_the_program_that_made_the_array(tmp_path: Path) -> None:
    image_path = scanned(tmp_path / "s", "sagittal", order="mixed")
    image = by_itk(image_path)
    array = (sitk.GetArrayFromImage(image) > 500).astype(np.uint8)
    np.save(tmp_path / "m.npy", array)
    nibabel.save(nibabel.Nifti1Image(array.transpose(2, 1, 0), None), tmp_path / "silent.nii.gz")
    assert "mask.CopyInformation(image)" in refusal(image_path, tmp_path / "silent.nii.gz")
    mask = sitk.GetImageFromArray(array)
    mask.CopyInformation(image)
    sitk.WriteImage(mask, str(tmp_path / "m.nii.gz"))
    agrees(image_path, tmp_path / "m.nii.gz")
    nifti = scanned(tmp_path / "n", "sagittal", "nifti")
    loaded: Any = nibabel.load(nifti)
    array = (np.asarray(loaded.dataobj) > 500).astype(np.uint8)
    nibabel.save(nibabel.Nifti1Image(array, None), tmp_path / "silent2.nii.gz")
    assert "nibabel.Nifti1Image(array, image.affine)" in refusal(nifti, tmp_path / "silent2.nii.gz")
    nibabel.save(nibabel.Nifti1Image(array, loaded.affine), tmp_path / "said.nii.gz")
    agrees(nifti, tmp_path / "said.nii.gz")


def test_mask_drawn_on_is_of_a_site(tmp_path: Path) -> None:
    """Check that a pair without it is refused with either value; through the datalist, prepare and check-data."""
    picture = np.random.default_rng(0).integers(0, 2, (33, 48, 6)).astype(np.uint8) * 255
    exif = Image.Exif()
    exif[0x0112] = 6
    for drawn_on in ("stored", "upright"):
        root = tmp_path / drawn_on
        for name in ("images", "masks"):
            (root / name).mkdir(parents=True)
        for k in range(6):
            mask = picture[:, :, k] if drawn_on == "stored" else np.rot90(picture[:, :, k], -1)
            Image.fromarray(picture[:, :, k]).save(root / f"images/p{k}.png", exif=exif)
            Image.fromarray(np.ascontiguousarray(mask)).save(root / f"masks/p{k}.png")
        with pytest.raises(DataError) as caught:
            prepare_masks(root, tmp_path / f"{drawn_on}-out")
        told = str(caught.value)
        assert "6 x only one of image and mask says that it is turned: " in told
        assert "and 3 more. Set mask_drawn_on to 'stored' or 'upright' in fairflare.json (--mask-drawn-on" in told
        if drawn_on == "stored":
            written = prepare_masks(root, tmp_path / f"{drawn_on}-out", mask_drawn_on="stored")
            out = tmp_path / f"{drawn_on}-out"
        else:
            given = {"s": (root / "images", root / "masks")}
            written = prepare_folders(given, tmp_path / f"{drawn_on}-out", mask_drawn_on="upright")
            out = tmp_path / f"{drawn_on}-out"
        assert f'"mask_drawn_on": "{drawn_on}"' in (out / "fairflare.json").read_text()
        (folder,) = written.values()
        for split in SPLITS:
            for sample in load_datalist(folder, site="a").splits[split]:
                how = Reading(drawn_on=drawn_on)  # type: ignore[arg-type]
                seen, label = read_pair(sample, site="a", split=split, how=how)
                np.testing.assert_array_equal(label > 0, seen[:, :, 0] > 0.5)
        result = CliRunner().invoke(app, ["check-data", str(out), "--set", "image_size=[32,32]"])
        assert result.exit_code == 0, result.output
        text = (out / "fairflare.json").read_text().replace(f'"mask_drawn_on": "{drawn_on}"', '"min_cases": 5')
        (out / "fairflare.json").write_text(text.replace('"min_cases": 5', '"num_workers": 0'))
        result = CliRunner().invoke(app, ["check-data", str(out), "--set", "image_size=[32,32]"])
        assert result.exit_code == 1
        said = " ".join(result.output.split())
        assert "6 x only one of image and mask says that it is turned: " in said
        assert said.count("EXIF 6") == 3
        assert "and 3 more" in said


def test_leave_out_and_fetch_anew(tmp_path: Path) -> None:
    """Check a gap, uneven steps and a copied file: a line a kind; left out with --leave-out; read when whole."""
    images, masks = tmp_path / "images", tmp_path / "masks"
    broken = {"gap": [0, 2, 4, 12, 14], "uneven": [0, 2, 4.1, 6, 8]}
    for number in range(8):
        name = ("gap", "uneven", "copy")[number] if number < 3 else f"g{number}"
        scanned(images / f"{name}{number}", "coronal", steps=broken.get(name), volume=distinct(name, "up"))
        mask_of(
            scanned(tmp_path / "whole" / f"{number}", "coronal", volume=distinct(name, "up")),
            masks / f"{name}{number}.nii.gz",
        )
    shutil.copy(images / "copy2/IM001.dcm", images / "copy2/again.dcm")
    with pytest.raises(DataError) as caught:
        prepare_volumes(tmp_path / "out", folders={"a": (images, masks)})
    told = str(caught.value)
    for words in ("3 of 8 volume(s) cannot be used", "8 mm lie between slices 2 and 3 ('IM002.dcm', 'IM003.dcm')",
                  "3 slices are missing. Fetch the whole series, or leave it out", "its steps are uneven",
                  "a file was copied: 'IM001.dcm' and 'again.dcm'"):  # fmt: skip
        assert words in told, told
    written = prepare_volumes(tmp_path / "out", folders={"a": (images, masks)}, leave_out=True)
    assert sum(map(len, load_datalist(written["a"], site="a").splits.values())) == 5
    for number, name in enumerate(("gap", "uneven", "copy")):
        shutil.rmtree(images / f"{name}{number}")
        scanned(images / f"{name}{number}", "coronal", volume=distinct(name, "up"))
    written = prepare_volumes(tmp_path / "all", folders={"a": (images, masks)})
    samples = [s for own in load_datalist(written["a"], site="a").splits.values() for s in own]
    assert len(samples) == 8
    for sample in samples:
        agrees(sample.image, sample.label)  # type: ignore[arg-type]


def test_four_to_three(tmp_path: Path) -> None:
    affine = np.diag([1, 1, 2, 1.0])
    volume = np.stack([truth(), 1 - truth()], axis=3).astype(np.int16) * 1000
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "four.nii.gz")
    with pytest.raises(DataError, match=r"it holds 2 volumes .*four_to_three") as caught:
        read_image(Sample(tmp_path / "four.nii.gz", 0, 0), site="a", split="test")
    assert caught.value.misfit is not None
    for number, one in enumerate(nibabel.four_to_three(nibabel.load(tmp_path / "four.nii.gz"))):
        nibabel.save(one, tmp_path / f"{number}.nii.gz")
        mask_of(tmp_path / f"{number}.nii.gz", tmp_path / f"m{number}.nii.gz")
        agrees(tmp_path / f"{number}.nii.gz", tmp_path / f"m{number}.nii.gz")
    one = volume[..., :1]
    nibabel.save(nibabel.Nifti1Image(one, affine), tmp_path / "one.nii.gz")
    nibabel.save(nibabel.Nifti1Image((one > 500).astype(np.uint8)[..., None], affine), tmp_path / "onem.nii.gz")
    agrees(tmp_path / "one.nii.gz", tmp_path / "onem.nii.gz")


@pytest.mark.parametrize(("kind", "tool"), [("SEG", "segimage2itkimage"), ("RTSTRUCT", "plastimatch")])
def test_objects_that_are_no_images(tmp_path: Path, kind: str, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = scanned(tmp_path / "s", "axial")
    classes = {"SEG": "1.2.840.10008.5.1.4.1.1.66.4", "RTSTRUCT": "1.2.840.10008.5.1.4.1.1.481.3"}
    size: dict[str, Any] = {"Rows": None, "Columns": None} if kind == "RTSTRUCT" else {}
    path = dicom(tmp_path / "x.dcm", truth()[:, :, 0].copy(), SOPClassUID=classes[kind], **size)
    assert tool in refusal(image, path)
    monkeypatch.setattr(dicom_seg, "find_spec", lambda name: None)
    told = refusal(image, path)
    assert tool in told
    assert ("pip install 'fairflare[seg]'" in told) == (kind == "SEG")


@pytest.mark.skipif(shutil.which("dcm2niix") is None, reason="dcm2niix is not installed")
def test_what_dcm2niix_makes_of_what_is_refused(tmp_path: Path) -> None:
    def converted(image: Path, name: str) -> Path:
        out = tmp_path / name
        out.mkdir()
        source = image if image.is_dir() else image.parent
        subprocess.run(["dcm2niix", "-z", "y", "-f", "x", "-o", str(out), str(source)], check=True, capture_output=True)
        return out

    volume = np.kron(truth(), np.ones((8, 8, 1), np.int16)) * 1000
    tilted = scanned(tmp_path / "t", "axial", tilt=14, volume=volume)
    (image,) = converted(tilted, "tilted").glob("*_Tilt*.nii.gz")
    made: Any = nibabel.load(image)
    inside = (np.asarray(made.dataobj) > 500).astype(np.uint8)
    nibabel.save(nibabel.Nifti1Image(inside, made.affine), tmp_path / "tm.nii.gz")
    whole = read_whole(Sample(image, tmp_path / "tm.nii.gz"), masked=True, site="a", split="test")
    assert whole.mask is not None
    np.testing.assert_array_equal(whole.mask, inside.swapaxes(0, 1))
    mixed = scanned(tmp_path / "m", "axial", "enhanced", "mixed")
    (image,) = converted(mixed, "mixed").glob("*.nii.gz")
    agrees(image, mask_of(image, tmp_path / "mm.nii.gz"))
    places = [(0, 0, 2.0 * k) for k in range(5)] * 2
    each = [{"FrameContentSequence": {"TemporalPositionIndex": 1 + k // 5}} for k in range(10)]
    (tmp_path / "two").mkdir()
    two = enhanced(
        tmp_path / "two/t.dcm", np.concatenate([truth(), truth()], axis=2) * 1000, places, WAYS["axial"], each
    )
    for number, file in enumerate(sorted(converted(two, "times").glob("*.nii.gz"))):
        for part, one in enumerate(nibabel.four_to_three(nibabel.load(file))):
            nibabel.save(one, tmp_path / f"t{number}{part}.nii.gz")
            mask_of(tmp_path / f"t{number}{part}.nii.gz", tmp_path / f"n{number}{part}.nii.gz")
            agrees(tmp_path / f"t{number}{part}.nii.gz", tmp_path / f"n{number}{part}.nii.gz")


def test_each_stack_by_itself(tmp_path: Path) -> None:
    """Check two echoes: refused in one folder or file; read where each has a folder or file of its own."""
    both = tmp_path / "both"
    for number, echo in enumerate((10, 20)):
        one = scanned(tmp_path / f"one{number}", "coronal", volume=distinct(f"e{echo}", "up"))
        both.mkdir(exist_ok=True)
        for file in one.iterdir():
            tagged = pydicom.dcmread(file)
            tagged.EchoTime = echo
            tagged.save_as(both / f"{echo}-{file.name}")
        agrees(one, mask_of(one, tmp_path / f"m{number}.nii.gz"))
    with pytest.raises(DataError, match=r"5 places; .*EchoTime \(10.0, 20.0\). Put"):
        read_image(Sample(both, 0, 0), site="a", split="test")
    volume = np.concatenate([distinct("a", "b"), distinct("c", "d")], axis=2)
    places, each = [(0, 0, 2.0 * k) for k in range(5)], [{"MREchoSequence": {"EffectiveEchoTime": e}} for e in (1, 2)]
    path = enhanced(tmp_path / "two.dcm", volume, places * 2, WAYS["axial"], [each[k // 5] for k in range(10)])
    refusal = r"EffectiveEchoTime \(1.0, 2.0\). Export"
    with pytest.raises(DataError, match=refusal):
        read_image(Sample(path, 0, 0), site="a", split="test")
    for number, part in enumerate((slice(0, 5), slice(5, 10))):
        path = enhanced(tmp_path / f"{number}.dcm", volume[:, :, part], places, WAYS["axial"])
        agrees(path, mask_of(path, tmp_path / f"f{number}.nii.gz"))


# --- in commands ------------------------------------------------------------------------------------------


def test_check_data_says_a_kind_once(tmp_path: Path) -> None:
    entries: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for number in range(7):
        image = scanned(tmp_path / f"i{number}", "sagittal", volume=distinct("z" * number, "up"))
        mask = mask_of(image, tmp_path / f"m{number}.nii.gz")
        if number < 5:  # 50 mm away, on the same axes
            moved: Any = nibabel.load(mask)
            affine = moved.affine.copy()
            affine[2, 3] += 50
            nibabel.save(nibabel.Nifti1Image(np.asarray(moved.dataobj), affine), mask)
        entries[SPLITS[number % 3]].append({"image": f"i{number}", "label": f"m{number}.nii.gz", "slice": 1})
    write_datalist(tmp_path / "datalist.json", entries)
    result = CliRunner().invoke(app, ["check-data", str(tmp_path), "--set", "image_size=[32,32]"])
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "5 x a mask that is shifted: " in said
    assert said.count("it is shifted by (0, 0, 50) mm") == 3
    assert "and 2 more. Have the mask written anew" in said
    assert "1 problem(s)" in said
    for number in range(7):  # the remedy: the mask is written anew on this very image
        mask_of(tmp_path / f"i{number}", tmp_path / f"m{number}.nii.gz")
    result = CliRunner().invoke(app, ["check-data", str(tmp_path), "--set", "image_size=[32,32]"])
    assert result.exit_code == 0, result.output


def test_predict_leaves_a_broken_series_out_with_the_reason(tmp_path: Path) -> None:
    from fairflare.cli.model.predict import find_images

    scanned(tmp_path / "in/gap", "coronal", steps=[0, 2, 4, 12, 14])
    scanned(tmp_path / "in/whole", "coronal")
    found = find_images([str(tmp_path / "in")], tmp_path / "out")
    assert sorted(found.values()) == ["gap", "whole"]  # one image, not five pictures


def test_notes_are_counted(tmp_path: Path) -> None:
    image = scanned(tmp_path / "n", "axial", "nifti")
    loaded: Any = nibabel.load(image)
    inside = (np.asarray(loaded.dataobj) > 500).astype(np.uint8)
    near = loaded.affine.copy()
    near[0, 3] += 0.1
    nibabel.save(nibabel.Nifti1Image(inside, near), tmp_path / "m.nii.gz")
    agrees(image, tmp_path / "m.nii.gz")
    (note,) = filter(None, notes_on(Sample(image, tmp_path / "m.nii.gz", 1)))
    assert note == "mask and image lie up to 0.1 mm apart (0.2 voxel)"
