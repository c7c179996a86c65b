"""DICOM SEG as masks: segments are labels, frames lie where they say, and what no mask can say is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pydicom
import pytest
from pydicom.uid import generate_uid

from fairflare.data import dicom_seg
from fairflare.data.datalist import DataError, Sample
from fairflare.data.preparers.looking import look_at_volume
from fairflare.data.preparers.trees import pairs
from fairflare.data.reading import read_image, read_mask
from fairflare.data.whole_volumes import read_pair, read_whole
from tests.unit.dicom_files import AXIAL, dicom, series
from tests.unit.test_one_folder import OBJECTS, without_pixels
from tests.unit.test_prepare_volumes import fairflare

hd: Any = pytest.importorskip("highdicom", reason="highdicom is not installed: make test-seg")
ROWS, COLUMNS, SLICES = 8, 6, 5
#: What highdicom wants to know of the images that segments were drawn on.
HEAD: dict[str, Any] = {
    "StudyInstanceUID": "1.2.4", "FrameOfReferenceUID": "1.2.5", "Modality": "CT", "SliceThickness": 3,
    "SeriesNumber": 1,
    **dict.fromkeys(("PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate", "StudyTime"), ""),
    "ReferringPhysicianName": "",
}  # fmt: skip
VOLUME = (np.random.default_rng(0).random((ROWS, COLUMNS, SLICES)) * 1000).astype(np.int16)


def labels() -> npt.NDArray[np.uint8]:
    """Two structures, in three of five slices; the first and the last slice, and that in the middle, are empty."""
    found = np.zeros((ROWS, COLUMNS, SLICES), np.uint8)
    found[2:4, 1:3, 1] = 1
    found[1:7, 2, 1] = 2
    found[5:7, 2:6, 3] = 2
    return found


def scan(folder: Path, more: int = 0, **tags: Any) -> Path:
    return series(folder, np.roll(VOLUME, more, 0), **{**HEAD, **tags})


def segmented(
    path: Path, image: Path, mask: npt.NDArray[Any], kind: str = "BINARY", *, segments: int = 2, **more: Any
) -> Path:
    """Write a SEG of a series; ``mask``: (rows, columns, slices), perhaps with an axis of segments behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(image.iterdir()) if image.is_dir() else [image]
    sources = [pydicom.dcmread(file) for file in files]
    if image.is_dir():
        sources.sort(key=lambda head: float(head.ImagePositionPatient[2]))
    codes = pydicom.sr.codedict.codes.SCT
    described = [
        hd.seg.SegmentDescription(
            segment_number=number + 1, segment_label=f"s{number}", segmented_property_category=codes.Organ,
            segmented_property_type=codes.Liver, algorithm_type=hd.seg.SegmentAlgorithmTypeValues.MANUAL,
        )
        for number in range(segments)
    ]  # fmt: skip
    made = hd.seg.Segmentation(
        source_images=sources, pixel_array=np.ascontiguousarray(np.moveaxis(mask, 2, 0)), segmentation_type=kind,
        segment_descriptions=described, series_instance_uid=generate_uid(), series_number=2,
        sop_instance_uid=generate_uid(), instance_number=1, manufacturer="m", manufacturer_model_name="n",
        software_versions="1", device_serial_number="2", **more,
    )  # fmt: skip
    made.save_as(path)
    return path


def refusal(image: Path, mask: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_whole(Sample(image, mask), masked=True, site="a", split="test")
    assert caught.value.misfit is not None
    return str(caught.value)


@pytest.mark.parametrize("kind", ["BINARY", "FRACTIONAL", "LABELMAP"])
def test_segments_lie_on_their_series_in_3d_and_slice_by_slice(tmp_path: Path, kind: str) -> None:
    image, truth = scan(tmp_path / "s"), labels()
    mask = segmented(tmp_path / "m.dcm", image, truth, kind)
    whole = read_whole(Sample(image, mask), masked=True, site="a", split="test")
    np.testing.assert_array_equal(whole.mask, truth)
    for number in range(SLICES):
        sample = Sample(image, mask, number)
        picture, found = read_pair(sample, site="a", split="test")
        assert picture.shape[:2] == found.shape
        np.testing.assert_array_equal(found, read_mask(sample, site="a", split="test"))
        np.testing.assert_array_equal(found > 0, (truth > 0)[:, :, number])  # an axial slice is shown as it is stored


def test_frames_are_placed_by_position_in_whatever_order_the_file_has_them(tmp_path: Path) -> None:
    image, truth = scan(tmp_path / "s"), labels()
    mask = segmented(tmp_path / "m.dcm", image, truth)
    head = pydicom.dcmread(mask)
    frames, own = head.pixel_array[::-1], head.PerFrameFunctionalGroupsSequence[::-1]
    head.PerFrameFunctionalGroupsSequence = own
    head.PixelData = pydicom.pixels.pack_bits(frames.astype(np.uint8))
    head.save_as(tmp_path / "r.dcm")
    whole = read_whole(Sample(image, tmp_path / "r.dcm"), masked=True, site="a", split="test")
    np.testing.assert_array_equal(whole.mask, truth)


@pytest.mark.parametrize("filled", [[2], [0], [4], [0, 4], [1, 3], [0, 1, 2, 3, 4]])
def test_slices_without_a_frame_are_empty(tmp_path: Path, filled: list[int]) -> None:
    image, truth = scan(tmp_path / "s"), np.zeros((ROWS, COLUMNS, SLICES), np.uint8)
    for number in filled:
        truth[number : number + 3, 1:4, number] = 1
    mask = segmented(tmp_path / "m.dcm", image, truth, segments=1)
    assert pydicom.dcmread(mask).NumberOfFrames == len(filled)
    whole = read_whole(Sample(image, mask), masked=True, site="a", split="test")
    np.testing.assert_array_equal(whole.mask, truth)


def test_a_mask_of_a_converted_image(tmp_path: Path) -> None:
    """The image as NIfTI, stored the other way round: only places count."""
    image, truth = scan(tmp_path / "s"), labels()
    mask = segmented(tmp_path / "m.dcm", image, truth)
    affine = np.array([[-0.7, 0, 0, 20.0], [0, -0.5, 0, 30.0], [0, 0, -3, 17.0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(VOLUME.swapaxes(0, 1)[:, :, ::-1], affine), tmp_path / "i.nii.gz")
    whole = read_whole(Sample(tmp_path / "i.nii.gz", mask), masked=True, site="a", split="test")
    np.testing.assert_array_equal(whole.mask, truth[:, :, ::-1])


def test_a_single_slice_and_a_picture_without_a_position(tmp_path: Path) -> None:
    image, truth = scan(tmp_path / "s"), labels()
    slices = sorted(image.iterdir(), key=lambda file: float(pydicom.dcmread(file).ImagePositionPatient[2]))
    mask = segmented(tmp_path / "m.dcm", slices[3], truth[:, :, 3:4])
    picture, found = read_pair(Sample(slices[3], mask), site="a", split="test")
    np.testing.assert_array_equal(found, truth[:, :, 3])
    assert picture.shape == (ROWS, COLUMNS, 1)
    plain = {**HEAD, "FrameOfReferenceUID": None, "Modality": "CR", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.1"}
    xray = dicom(tmp_path / "x.dcm", VOLUME[:, :, 0].copy(), **plain)
    mask = segmented(tmp_path / "xm.dcm", xray, truth[:, :, 3:4])
    _, found = read_pair(Sample(xray, mask), site="a", split="test")
    np.testing.assert_array_equal(found, truth[:, :, 3])


# ------------------------------------------------------------------------------------------------ refused


def test_segments_that_overlap_are_refused(tmp_path: Path) -> None:
    image = scan(tmp_path / "s")
    both = np.stack([labels() == 1, labels() > 0], 3).astype(np.uint8)
    told = refusal(image, segmented(tmp_path / "m.dcm", image, both))
    assert "segments overlap" in told
    assert "segimage2itkimage" in told


def test_shares_of_a_voxel_are_refused(tmp_path: Path) -> None:
    image = scan(tmp_path / "s")
    shares = np.where(labels()[..., None] > 0, 0.5, 0.0)
    told = refusal(image, segmented(tmp_path / "m.dcm", image, shares, "FRACTIONAL", segments=1))
    assert "FRACTIONAL segmentation is only possible if" in told


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        ({"FrameOfReferenceUID": "1.2.6"}, "its FrameOfReferenceUID is 1.2.6"),
        ({"PixelSpacing": [0.5, 0.8]}, "its voxels are 0.5 x 0.8 x 3 mm"),
        ({"ImageOrientationPatient": [0.96, 0.28, 0, -0.28, 0.96, 0]}, "it is turned by 16.3 degrees"),
    ],
)
def test_a_mask_of_another_scan_is_refused(tmp_path: Path, tags: dict[str, Any], told: str) -> None:
    image, other = scan(tmp_path / "s"), scan(tmp_path / "o", **tags)
    mask = segmented(tmp_path / "m.dcm", other, labels())
    assert told in refusal(image, mask)


@pytest.mark.parametrize(("by", "told"), [(1.6, "(0, 0, 1.6)"), (30.0, "(0, 0, 30)"), (-6.0, "(0, 0, -6)")])
def test_frames_between_slices_or_beyond_the_series_are_refused(tmp_path: Path, by: float, told: str) -> None:
    image, other = scan(tmp_path / "s"), scan(tmp_path / "o")
    for file in other.iterdir():
        head = pydicom.dcmread(file)
        head.ImagePositionPatient[2] += by
        head.save_as(file)
    full = labels()
    full[0, 0] = 1  # in each slice
    assert told in refusal(image, segmented(tmp_path / "m.dcm", other, full))


def test_a_damaged_file_and_an_image_that_is_a_seg_are_refused(tmp_path: Path) -> None:
    image = scan(tmp_path / "s")
    mask = segmented(tmp_path / "m.dcm", image, labels())
    head = pydicom.dcmread(mask)
    del head.SegmentSequence
    head.save_as(tmp_path / "d.dcm")
    assert "highdicom cannot make a mask of 'd.dcm'" in refusal(image, tmp_path / "d.dcm")
    with pytest.raises(DataError, match="it is a DICOM SEG, which is not read"):
        read_image(Sample(mask, 0), site="a", split="test")


def test_without_highdicom_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = scan(tmp_path / "s")
    mask = segmented(tmp_path / "m.dcm", image, labels())
    monkeypatch.setattr(dicom_seg, "find_spec", lambda name: None)
    told = refusal(image, mask)
    assert "is a DICOM SEG, which needs the package highdicom" in told
    assert "pip install 'fairflare[seg]'" in told


# ------------------------------------------------------------------------------------------------ prepare


def test_prepare_pairs_series_with_segs_and_looks_at_them(tmp_path: Path) -> None:
    truth = labels()
    for name in ("p1", "p2"):
        image = scan(tmp_path / "images" / name)
        segmented(tmp_path / "masks" / f"{name}.dcm", image, truth)
    found = pairs(tmp_path / "images", tmp_path / "masks")
    assert [(case.image.name, Path(str(case.mask)).name) for case in found.cases] == [
        ("p1", "p1.dcm"),
        ("p2", "p2.dcm"),
    ]
    look = look_at_volume(found.cases[0].image, Path(str(found.cases[0].mask)), plane="axial")
    assert (look.values, look.slices, look.empty) == ((0, 1, 2), (1, 3), 3)
    (tmp_path / "masks" / "p1.dcm").rename(tmp_path / "masks" / "p1_")
    (tmp_path / "masks" / "p1").mkdir()
    (tmp_path / "masks" / "p1_").rename(tmp_path / "masks" / "p1" / "0001.dcm")  # as an archive exports it
    found = pairs(tmp_path / "images", tmp_path / "masks")
    assert [case.image.name for case in found.cases] == ["p1", "p2"]
    assert look_at_volume(found.cases[0].image, Path(str(found.cases[0].mask))).values == (0, 1, 2)
    dicom(tmp_path / "masks" / "p3.dcm", VOLUME[:, :, 0].copy(), ImageOrientationPatient=AXIAL)
    with pytest.raises(DataError, match="holds DICOM files itself"):
        pairs(tmp_path / "images", tmp_path / "masks")


def test_prepare_and_check_data_take_them(tmp_path: Path) -> None:
    for number in range(6):
        image = scan(tmp_path / f"in/images/p{number}", number, PatientID=f"{number}")
        segmented(tmp_path / f"in/masks/p{number}.dcm", image, labels())
    for more in ([], ["--slices", "axial"]):
        out = tmp_path / f"out{len(more)}"
        fairflare("prepare", "volumes", "--source", tmp_path / "in", "--out", out, *more)
        (listed,) = out.rglob("datalist.json")
        entries = json.loads(listed.read_text())
        assert entries["mask_labels"] == {"1": "s0", "2": "s1"}
        assert all(Path(entry["label"]).suffix == ".dcm" for entry in entries["training"])
        assert "0 problem(s)" in fairflare("check-data", out)


def test_a_report_beside_a_segmentation_is_no_mask_and_no_slice(tmp_path: Path) -> None:
    """Put an SR, as an archive exports it, beside the SEG of a mask's folder, and both into the image's folder."""
    for number in range(6):
        image = scan(tmp_path / f"in/images/p{number}", number, PatientID=f"{number}")
        segmented(tmp_path / f"in/masks/p{number}/seg.dcm", image, labels())
        without_pixels(tmp_path / f"in/masks/p{number}/sr.dcm", OBJECTS["Enhanced SR Storage"][0])
    for number in range(6):
        for name in ("seg", "sr"):
            place = tmp_path / f"in/images/p{number}/{name}.dcm"
            place.write_bytes((tmp_path / f"in/masks/p{number}/{name}.dcm").read_bytes())
    fairflare("prepare", "volumes", "--source", tmp_path / "in", "--out", tmp_path / "out")
    told = " ".join(json.loads((tmp_path / "out/manifest.json").read_text())["notes"])
    assert "6 DICOM (Enhanced SR Storage) files ('p0/sr.dcm'" in told
    assert "6 DICOM (Segmentation Storage) files ('p0/seg.dcm'" in told
    (listed,) = (tmp_path / "out").rglob("datalist.json")
    (first, *_) = json.loads(listed.read_text())["training"]
    sample = Sample(listed.parent / first["image"], listed.parent / first["label"])
    read = read_whole(sample, masked=True, site="", split="t")
    assert read.image.shape[-3:] == VOLUME.shape
    assert read.mask is not None
    assert np.bincount(read.mask.ravel()).tolist() == np.bincount(labels().ravel()).tolist()
