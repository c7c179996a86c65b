"""Test that one picture in every kind of file gives one tensor: DICOM, orientation, bits, EXIF, intensities."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any, get_args

import nibabel
import numpy as np
import pytest
from PIL import Image
from pydicom.sequence import Sequence as Items
from pydicom.uid import JPEGLSLossless

from fairflare.data.datalist import DataError, Sample, load_datalist, write_datalist
from fairflare.data.image_file import ImageFile, TooLarge, image_file, kind_of
from fairflare.data.intensity import Intensity
from fairflare.data.orientation import ORIENTATIONS, back, turn_of, turn_view
from fairflare.data.reading import Reading, read_image, read_mask, slices_in
from fairflare.data.whole_volumes import read_pair
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask

from .dicom_files import AXIAL, dicom, group, series

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, COLUMNS, SLICES = 20, 26, 5


def body(dtype: Any = np.uint8) -> np.ndarray:
    """Return (rows, columns, slices) with the front on top and the patient's right on the left; nothing is alike."""
    found = np.random.default_rng(3).integers(1, 250, (ROWS, COLUMNS, SLICES))
    found[0, 0], found[-1, -1] = 0, 255
    return found.astype(dtype)


def read(path: Path, number: int | None = None, **how: Any) -> np.ndarray:
    return read_image(Sample(path, path, number), site="a", split="test", how=Reading(**how))


def reason(path: Path, number: int | None = None, **how: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, number, **how)
    assert str(path) not in caught.value.public
    return str(caught.value.reason)


def nifti(path: Path, seen: np.ndarray, codes: str = "LPS", **codes_of: int) -> Path:
    """Return a volume that is seen like this, stored with the axes ``codes``."""
    lps = nibabel.Nifti1Image(seen.swapaxes(0, 1), np.diag([-0.7, -0.5, 3.0, 1.0]))
    stored = lps.as_reoriented(
        nibabel.orientations.ornt_transform(
            nibabel.orientations.axcodes2ornt("LPS"), nibabel.orientations.axcodes2ornt(codes)
        )
    )
    if codes_of:
        stored.set_sform(stored.affine, codes_of["code"])
        stored.set_qform(stored.affine, codes_of["code"])
    nibabel.save(stored, path)
    return path


# --- one picture, many files ------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, tuple[Path, int | None]]:
    """Write slice 2 of the body in every kind of file; 16 bits are 257 times the 8."""
    volume = body()
    plane = np.ascontiguousarray(volume[:, :, 2])
    deep = plane.astype(np.uint16) * 257
    Image.fromarray(plane).save(folder / "eight.png")
    Image.fromarray(deep).save(folder / "sixteen.png")
    Image.fromarray(deep).save(folder / "sixteen.tif")
    Image.fromarray(plane.astype(np.float32) / 255).save(folder / "float.tif")
    np.save(folder / "array.npy", plane.astype(np.int32) - 1000)
    turned_away = Image.fromarray(np.rot90(plane).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by a quarter, clockwise
    turned_away.save(folder / "exif.png", exif=exif)
    turned_away.save(folder / "exif.tif", exif=exif)
    usual = {"ImageOrientationPatient": AXIAL, "ImagePositionPatient": [0, 0, 0]}
    found = {
        "dicom 8": dicom(folder / "eight.dcm", plane),
        "dicom 16": dicom(folder / "sixteen.dcm", deep, **usual),
        "dicom 12 bits signed": dicom(folder / "twelve.ima", plane.astype(np.int16) * 7 - 900, BitsStored=12),
        "dicom rescaled": dicom(folder / "hu.dicom", deep, RescaleSlope="0.5", RescaleIntercept="-1024", **usual),
        "dicom inverted": dicom(folder / "inverted", 255 - plane, PhotometricInterpretation="MONOCHROME1"),
        "dicom mirrored": dicom(folder / "mirrored.dcm", plane[:, ::-1].copy(),
                                ImageOrientationPatient=[-1, 0, 0, 0, 1, 0], ImagePositionPatient=[9, 0, 0]),
    }  # fmt: skip
    frames = dicom(folder / "frames.dcm", np.ascontiguousarray(np.repeat(plane[None], 3, axis=0)))
    flat = volume[:, :, 2:3]
    return {
        **{name: (folder / name, None) for name in ("eight.png", "sixteen.png", "sixteen.tif", "float.tif",
                                                    "array.npy", "exif.png", "exif.tif")},
        **{name: (path, None) for name, path in found.items()},
        "frame": (frames, 1),
        "series": (series(folder / "series", np.repeat(flat, 3, axis=2)), 1),
        **{f"nifti {codes}": (nifti(folder / f"{codes}.nii.gz", flat, codes), None)
           for codes in ("LPS", "RAS", "LAS", "RPI", "PLS", "ARS")},
        "nifti 16": (nifti(folder / "deep.nii", flat.astype(np.int16) * 100 - 7, "RAS"), None),
    }  # fmt: skip


@pytest.mark.parametrize("intensity", ["range", "percentile", "zscore"])
@pytest.mark.parametrize("resize", ["stretch", "pad", "crop"])
def test_one_picture_in_every_kind_of_file_is_one_tensor(tmp_path: Path, intensity: str, resize: str) -> None:
    files = files_of(tmp_path)
    task = ClassificationTask(num_classes=2, image_size=(48, 40), in_channels=1, intensity=intensity, resize=resize)  # type: ignore[arg-type]
    wanted = task.read_input(*files["eight.png"])
    assert wanted.shape == (1, 48, 40)
    assert float(wanted.std()) > 0.1
    for name, (path, number) in files.items():
        np.testing.assert_allclose(task.read_input(path, number), wanted, atol=2e-5, err_msg=name)


def test_by_default_what_has_more_than_eight_bits_is_one_tensor_too(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    eight = {"eight.png", "exif.png", "exif.tif", "dicom 8", "dicom inverted", "dicom mirrored", "frame", "series"}
    for name, (path, number) in files.items():
        same = files["eight.png" if name in eight else "sixteen.png"]
        np.testing.assert_allclose(read(path, number), read(*same), atol=2e-5, err_msg=name)


# --- orientation ------------------------------------------------------------------------------------------


ALL_CODES = [
    "".join(codes) for order in itertools.permutations(["LR", "PA", "SI"]) for codes in itertools.product(*order)
]


def test_a_body_stored_in_any_way_is_seen_the_same(tmp_path: Path) -> None:
    volume = body(np.int16)
    seen = {name: [] for name in ("axial", "sagittal", "coronal")}
    for codes in ALL_CODES:
        path = nifti(tmp_path / f"{codes}.nii", volume, codes)
        for plane, pictures in seen.items():
            pictures.append(np.stack([read(path, k, orientation=plane)[:, :, 0] for k in (0, 1)]))
        turn = turn_of(image_file(path).facts().grid.affine, "axial", SLICES)
        stored = image_file(path).decode(is_mask=False, limit=10**6)
        np.testing.assert_array_equal(turn_view(stored, turn), volume)
        for orientation in ORIENTATIONS:
            turn = turn_of(image_file(path).facts().grid.affine, orientation, 9)
            np.testing.assert_array_equal(turn_view(turn_view(stored, turn), back(turn)), stored)
    low, high = volume.min(), np.percentile(volume, 99)
    shown = np.clip((volume - low) / (high - low), 0, 1)
    first_two = {
        "axial": [shown[:, :, k] for k in (0, 1)],  # from the feet
        "sagittal": [shown[:, k, ::-1].T for k in (0, 1)],  # from the right; the head on top, the front on the left
        "coronal": [shown[k, :, ::-1].T for k in (0, 1)],  # from the front
    }
    for plane, pictures in seen.items():
        assert len(pictures) == 48
        for picture in pictures:
            np.testing.assert_allclose(picture, np.stack(first_two[plane]), atol=1e-6)


def test_by_default_the_number_of_a_slice_is_that_of_the_file(tmp_path: Path) -> None:
    """Check that turning does not renumber slices, whose labels are written with these numbers."""
    volume = body(np.int16)
    for codes in ("LPS", "RAI", "PLI", "SLP", "IPR"):
        path = nifti(tmp_path / f"{codes}.nii", volume, codes)
        stored = nibabel.load(path).get_fdata()
        for number in (0, 3):
            default, plain = read(path, number), read(path, number, orientation="stored")
            assert np.array_equal(np.sort(default.ravel()), np.sort(plain.ravel())), codes
            ranks = np.argsort(np.argsort(stored[:, :, number].T.ravel(), kind="stable"), kind="stable")
            assert np.corrcoef(ranks, plain.ravel())[0, 1] > 0.9
        assert slices_in(path) == stored.shape[2]
    sagittal = nifti(tmp_path / "s.nii", volume, "PSL")  # the plane stays too, the right way up
    np.testing.assert_array_equal(read(sagittal, 4), read(sagittal, 4, orientation="sagittal"))
    assert read(sagittal, 4).shape == (SLICES, ROWS, 1)


def test_a_file_that_does_not_say_how_it_lies_stays_as_it_is(tmp_path: Path) -> None:
    path = nifti(tmp_path / "a.nii", body(np.int16), "RAS", code=0)
    np.testing.assert_array_equal(read(path, 1), read(path, 1, orientation="stored"))
    assert "does not say how it lies in the body, which orientation='coronal'" in reason(path, 1, orientation="coronal")
    said = nifti(tmp_path / "b.nii", body(np.int16), "RAS", code=1)
    assert not np.array_equal(read(said, 1), read(path, 1))


def test_a_mask_lies_on_its_image_however_both_are_stored(tmp_path: Path) -> None:
    volume, mask = body(np.int16), (body() > 120).astype(np.uint8)
    image = nifti(tmp_path / "image.nii", volume, "RAS")

    def pair(label: Path, **how: Any) -> tuple[np.ndarray, np.ndarray]:
        return read_pair(Sample(image, label, 1), site="a", split="test", how=Reading(**how))

    for codes in ("LPS", "RAS", "RAI", "PIR"):
        label = nifti(tmp_path / f"{codes}.nii", mask, codes)
        np.testing.assert_array_equal(pair(label)[1], mask[:, :, 1])
        np.testing.assert_array_equal(pair(label, orientation="stored")[1], mask[::-1, ::-1, 1])
    stored = nibabel.load(tmp_path / "RAS.nii")
    wrong = nibabel.Nifti1Image(np.asarray(stored.dataobj), np.diag([-1.0, -1.0, 1.0, 1.0]))
    nibabel.save(wrong, tmp_path / "wrong.nii")  # the header of another
    silent = nifti(tmp_path / "silent.nii", mask, "RAS", code=0)
    for label, said in ((tmp_path / "wrong.nii", "its voxels are 1 x 1 x 1 mm"), (silent, "the mask says nothing")):
        for orientation in ("canonical", "stored"):  # "stored" switches no check off
            with pytest.raises(DataError, match=said) as caught:
                pair(label, orientation=orientation)
            public = "site 'a': an image of split 'test' and its mask do not go together: "
            assert caught.value.public.startswith(public)
    np.testing.assert_array_equal(pair(silent, drawn_on="stored")[1], mask[:, :, 1])


# --- intensities ------------------------------------------------------------------------------------------


def test_each_intensity_by_its_formula(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(40, 200, (30, 40)).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    low, high, mean, spread = values.min(), values.max(), values.mean(), values.std()
    wanted = {
        "auto": (low, np.percentile(values, 99)), "percentile": (low, np.percentile(values, 99)), "range": (low, high),
        "zscore": (mean - 3 * spread, mean + 3 * spread), "window": (-160, 240),
    }  # fmt: skip
    assert set(wanted) == set(get_args(Intensity))
    for intensity, (black, white) in wanted.items():
        found = read(tmp_path / "a.npy", intensity=intensity, window=(40, 400) if intensity == "window" else None)
        np.testing.assert_allclose(found[:, :, 0], np.clip((values - black) / (white - black), 0, 1), atol=1e-5)
    for intensity in get_args(Intensity)[:3]:
        np.save(tmp_path / "flat.npy", np.full((5, 5), 7, np.int16))
        assert not read(tmp_path / "flat.npy", intensity=intensity).any()
        np.save(tmp_path / "nan.npy", np.array([[0.0, np.nan]]))
        assert "NaN or infinite" in reason(tmp_path / "nan.npy", intensity=intensity)
    assert "NaN or infinite" in reason(tmp_path / "nan.npy", intensity="window", window=(0, 1))
    assert "without a window" in reason(tmp_path / "a.npy", intensity="window")


def test_the_window_of_a_header(tmp_path: Path) -> None:
    """Check the formulas of PS3.3, C.11.2.1.2, in measured values."""
    stored = np.arange(600, dtype=np.int16).reshape(20, 30)
    measured = stored.astype(np.float64) * 2 - 500
    both: dict[str, Any] = {"RescaleSlope": 2, "RescaleIntercept": -500, "WindowCenter": 40, "WindowWidth": 400}
    wanted = {
        "LINEAR": np.clip((measured - 39.5) / 399 + 0.5, 0, 1),
        "LINEAR_EXACT": np.clip((measured - 40) / 400 + 0.5, 0, 1),
        "SIGMOID": 1 / (1 + np.exp(-4 * (measured - 40) / 400)),
    }  # fmt: skip
    for function, shown in wanted.items():
        for inverted, kind in ((False, "MONOCHROME2"), (True, "MONOCHROME1")):
            path = dicom(tmp_path / f"{function}{kind}.dcm", stored, VOILUTFunction=function,
                         PhotometricInterpretation=kind, **both)  # fmt: skip
            found = read(path, intensity="window")[:, :, 0]
            np.testing.assert_allclose(found, 1 - shown if inverted else shown, atol=1e-6)
    several = dicom(tmp_path / "several.dcm", stored, **{**both, "WindowCenter": [40, 9], "WindowWidth": [400, 9]})
    np.testing.assert_allclose(read(several, intensity="window")[:, :, 0], wanted["LINEAR"], atol=1e-6)
    chosen = read(several, intensity="window", window=(0, 100))[:, :, 0]
    np.testing.assert_allclose(chosen, np.clip((measured + 50) / 100, 0, 1), atol=1e-6)
    unusable = dicom(tmp_path / "unusable.dcm", stored, **{**both, "WindowWidth": 0})
    assert "its header has none that can be used" in reason(unusable, intensity="window").replace("the file's", "its")
    assert read(unusable).any()


def test_a_setting_of_a_window_is_checked() -> None:
    with pytest.raises(ValueError, match=r"needs intensity='window', got .*'auto'"):
        SegmentationTask(window=(40, 400))
    with pytest.raises(ValueError, match="window must be"):
        SegmentationTask(intensity="window", window=(40, 0))
    task = SegmentationTask(intensity="window", window=[40, 400])  # type: ignore[arg-type]
    assert task.intensities == "clipped to the window of centre 40 and width 400, scaled to [0, 1]"
    assert "99th percentile" in SegmentationTask().intensities
    with pytest.raises(ValueError, match=r"^orientation.* got 'RAS'$"):
        ClassificationTask(orientation="RAS")  # type: ignore[arg-type]


# --- DICOM ------------------------------------------------------------------------------------------------


def test_colours_palettes_and_frames(tmp_path: Path) -> None:
    colour = np.random.default_rng(0).integers(0, 256, (3, ROWS, COLUMNS, 3), np.uint8)
    for name, pixels, number in (("one.dcm", colour[1], None), ("frames.dcm", colour, 1)):
        np.testing.assert_allclose(read(dicom(tmp_path / name, pixels), number), colour[1] / 255, atol=1e-6)
    assert slices_in(tmp_path / "frames.dcm") == 3
    assert slices_in(tmp_path / "one.dcm") is None
    grey = dicom(tmp_path / "three.dcm", colour[..., 0].copy())  # three grey frames are no colours
    np.testing.assert_allclose(read(grey, 2)[:, :, 0], colour[2, :, :, 0] / 255, atol=1e-6)
    assert "pick one with the key 'slice'" in reason(grey)
    table = {f"{name}PaletteColorLookupTable{part}": value for k, name in enumerate(("Red", "Green", "Blue"))
             for part, value in (("Descriptor", [256, 0, 8]),
                                 ("Data", bytes((np.arange(256) * (k + 1) % 256).astype(np.uint8))))}  # fmt: skip
    path = dicom(
        tmp_path / "palette.dcm", colour[0, :, :, 0].copy(), PhotometricInterpretation="PALETTE COLOR", **table
    )
    np.testing.assert_allclose(read(path)[:, :, 2] * 255, colour[0, :, :, 0].astype(int) * 3 % 256, atol=1e-3)
    mask = read_mask(Sample(path, path), site="a", split="test")
    np.testing.assert_array_equal(mask, colour[0, :, :, 0])


def test_an_enhanced_file_says_it_frame_by_frame(tmp_path: Path) -> None:
    stored = np.stack([body(np.int16)[:, :, k] for k in range(4)])

    shared = group(PlaneOrientationSequence={"ImageOrientationPatient": AXIAL},
                   PixelMeasuresSequence={"PixelSpacing": [2, 1]})  # fmt: skip
    each = [
        group(PixelValueTransformationSequence={"RescaleSlope": 1 + k, "RescaleIntercept": -5},
              PlanePositionSequence={"ImagePositionPatient": [0, 0, 4.0 * k]})
        for k in range(4)
    ]  # fmt: skip
    path = dicom(tmp_path / "enhanced.dcm", stored, SharedFunctionalGroupsSequence=Items([shared]),
                 PerFrameFunctionalGroupsSequence=Items(each))  # fmt: skip
    array = image_file(path).decode(is_mask=False, limit=10**6)
    np.testing.assert_array_equal(array, np.stack([stored[k] * (1 + k) - 5.0 for k in range(4)], axis=2))
    affine = image_file(path).facts().grid.affine
    assert affine is not None
    np.testing.assert_allclose(affine, [[0, -1, 0, 0], [-2, 0, 0, 0], [0, 0, 4, 0], [0, 0, 0, 1]])


def test_a_series_is_a_volume_in_the_order_of_its_places(tmp_path: Path) -> None:
    volume = body(np.int16)
    folder = series(tmp_path / "s", volume)
    (folder / "notes.txt").write_text("not DICOM")
    np.testing.assert_array_equal(image_file(folder).decode(is_mask=False, limit=10**6), volume)
    same = nifti(tmp_path / "same.nii.gz", volume, "RAS")
    np.testing.assert_allclose(image_file(folder).facts().grid.affine[:3, 2], [0, 0, 3])  # type: ignore[index]
    for plane in ("canonical", "axial", "sagittal"):
        np.testing.assert_allclose(
            read(folder, 2, orientation=plane), read(same, 2, orientation=plane), atol=1e-6, err_msg=plane
        )
    head_first = series(tmp_path / "h", volume[:, ::-1], ImageOrientationPatient=[-1, 0, 0, 0, 1, 0])
    np.testing.assert_allclose(read(head_first, 1), read(folder, 1), atol=1e-6)  # the feet are still first
    nowhere = series(tmp_path / "n", volume, ImageOrientationPatient=None, ImagePositionPatient=None)
    by_number = image_file(nowhere).decode(is_mask=False, limit=10**6)
    np.testing.assert_array_equal(by_number, volume[:, :, ::-1])
    scaled = series(tmp_path / "r", volume)
    dicom(scaled / "IM0000", volume[:, :, 0], RescaleSlope=3, ImageOrientationPatient=AXIAL, InstanceNumber=100,
          ImagePositionPatient=[-20, -30, 5], PixelSpacing=[0.5, 0.7])  # fmt: skip
    array = image_file(scaled).decode(is_mask=False, limit=10**6)
    np.testing.assert_array_equal(array[:, :, 0], volume[:, :, 0] * 3.0)
    np.testing.assert_array_equal(array[:, :, 1:], volume[:, :, 1:])


def test_what_is_no_series(tmp_path: Path) -> None:
    volume = body(np.int16)
    usual = {"ImageOrientationPatient": AXIAL, "ImagePositionPatient": [0, 0, 5], "InstanceNumber": 1}
    two = series(tmp_path / "two", volume)
    dicom(two / "other", volume[:, :, 0], SeriesInstanceUID="9", **usual)
    assert "the folder holds 2 DICOM series" in reason(two, 0)
    spacing = {"PixelSpacing": [0.5, 0.7]}
    echoes = series(tmp_path / "echoes", volume)
    dicom(echoes / "again", volume[:, :, 1].copy(), **{**usual, **spacing, "ImagePositionPatient": [-20, -30, 5]})
    assert "6 files lie at 5 places; the first are 'IM0000' and 'again', at 5 mm" in reason(echoes, 0)
    copied = series(tmp_path / "copied", volume)
    dicom(copied / "again", volume[:, :, 0].copy(), **{**usual, **spacing, "ImagePositionPatient": [-20, -30, 5]})
    assert "a file was copied: 'IM0000' and 'again', at 5 mm" in reason(copied, 0)
    mixed = series(tmp_path / "mixed", volume)
    dicom(mixed / "small", volume[:9, :, 0].copy(), **usual)
    assert "'IM0000' and 'small' differ in size: 20 x 26 and 9 x 26" in reason(mixed, 0)
    unordered = series(tmp_path / "u", volume, ImagePositionPatient=None, InstanceNumber=None)
    assert "its files say neither where a slice lies nor a number of its own" in reason(unordered, 0)


def test_dicom_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    plane = body()[:, :, 0].copy()
    good = dicom(tmp_path / "good.dcm", plane)
    (tmp_path / "cut.dcm").write_bytes(good.read_bytes()[:-100])
    (tmp_path / "no.dcm").write_bytes(b"no DICOM" * 50)
    assert reason(tmp_path / "cut.dcm")
    assert "the mark DICM at byte 128 is missing" in reason(tmp_path / "no.dcm")
    lab = dicom(tmp_path / "lab.dcm", plane, PhotometricInterpretation="CIELAB")
    assert "photometric interpretation is 'CIELAB'; known are MONOCHROME2" in reason(lab)
    imageless = dicom(tmp_path / "report.dcm", plane, Rows=None, Columns=None)
    assert "a DICOM file without an image" in reason(imageless)
    import pydicom

    packed = pydicom.dcmread(good)
    packed.file_meta.TransferSyntaxUID = JPEGLSLossless
    packed.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8" + bytes(20)])
    packed["PixelData"].VR = "OB"
    packed.save_as(tmp_path / "packed.dcm", enforce_file_format=True)
    said = reason(tmp_path / "packed.dcm")
    assert "its pixels are compressed as 'JPEG-LS Lossless Image Compression', and no package that reads this" in said
    assert "pip install pylibjpeg pylibjpeg-libjpeg" in said
    packed.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    packed.save_as(tmp_path / "deflated.dcm", enforce_file_format=True)
    assert "packed as a whole (deflated)" in reason(tmp_path / "deflated.dcm")


def test_compressed_pixels_are_read_where_a_decoder_is_there(tmp_path: Path) -> None:
    import pydicom

    plane = body(np.uint16)[:, :, 0].copy()
    packed = pydicom.dcmread(dicom(tmp_path / "plain.dcm", plane))
    packed.compress(pydicom.uid.RLELossless)
    packed.save_as(tmp_path / "packed.dcm", enforce_file_format=True)
    assert (tmp_path / "packed.dcm").read_bytes() != (tmp_path / "plain.dcm").read_bytes()
    np.testing.assert_array_equal(image_file(tmp_path / "packed.dcm").decode(is_mask=False, limit=10**6), plane)
    photo = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 3, (40, 1)))
    stream = io.BytesIO()
    photo.save(stream, format="JPEG", quality=95)
    packed = pydicom.dcmread(dicom(tmp_path / "photo.dcm", np.asarray(photo)))
    packed.file_meta.TransferSyntaxUID = pydicom.uid.JPEGBaseline8Bit
    packed.PixelData = pydicom.encaps.encapsulate([stream.getvalue()])
    packed["PixelData"].VR = "OB"
    packed.save_as(tmp_path / "photo.dcm", enforce_file_format=True)
    np.testing.assert_allclose(read(tmp_path / "photo.dcm")[:, :, 0] * 255, np.asarray(photo), atol=3)


def test_the_size_of_a_dicom_file_is_read_from_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = body(np.uint16)[:, :, 0].copy()
    size = ROWS * COLUMNS
    cases = {
        dicom(tmp_path / "a.dcm", plane): 2 * size,
        dicom(tmp_path / "b.dcm", plane, RescaleSlope=0.5): 4 * size,
        dicom(tmp_path / "c.dcm", np.zeros((7, ROWS, COLUMNS, 3), np.uint8)): 21 * size,
        series(tmp_path / "s", body(np.int16)): 2 * SLICES * size,
    }
    for path, needed in cases.items():
        assert image_file(path).decode(is_mask=False, limit=needed).nbytes == needed
    monkeypatch.setattr("fairflare.data.dicom.decode", lambda *_: pytest.fail("decoded"))
    for path, needed in cases.items():
        with pytest.raises(TooLarge) as caught:
            image_file(path).decode(is_mask=False, limit=needed - 1)
        assert caught.value.size == needed
    bomb = dicom(tmp_path / "bomb.dcm", plane, NumberOfFrames=10**7)
    with pytest.raises(TooLarge):
        image_file(bomb).decode(is_mask=False, limit=2**30)


def test_the_kind_of_a_file_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a file of another kind in its place is noticed, even without a telling ending."""
    path, asked = tmp_path / "scan", []
    plane = body()[:, :, 0].copy()
    dicom(path, plane)

    def counted(path: Path, *more: bool) -> type[ImageFile]:
        asked.append(path)
        return kind_of(path, *more)

    monkeypatch.setattr("fairflare.data.image_file.kind_of", counted)
    for _ in range(3):
        np.testing.assert_array_equal(read_mask(Sample(path, path), site="a", split="test"), plane)
        read(path)
    assert asked == [path]
    Image.fromarray(plane + 1).save(tmp_path / "other.png")
    path.unlink()
    (tmp_path / "other.png").rename(path)
    np.testing.assert_array_equal(read_mask(Sample(path, path), site="a", split="test"), plane + 1)
    assert asked == [path, path]


def test_nothing_about_the_patient_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pydicom

    seen: list[Any] = []
    real = pydicom.dcmread
    monkeypatch.setattr(pydicom, "dcmread", lambda *args, **more: seen.append(real(*args, **more)) or seen[-1])
    read(dicom(tmp_path / "a.dcm", body()[:, :, 0].copy()))
    assert len(seen) == 2
    for found in seen:
        assert "Rows" in found
        assert not {"PatientName", "PatientID"} & {element.keyword for element in found}
    assert "PixelData" not in seen[0]


# --- in a datalist ----------------------------------------------------------------------------------------


def test_dicom_in_a_datalist(tmp_path: Path) -> None:
    volume = body(np.int16)
    series(tmp_path / "p1", volume)
    dicom(tmp_path / "IM0001", volume[:, :, 0].copy())
    dicom(tmp_path / "b.ima", volume[:, :, 0].copy())
    Image.new("L", (9, 9)).save(tmp_path / "m.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("x" * 200)

    def loaded(image: str, **more: Any) -> Sample:
        lists = {
            "training": [{"image": image, "label": "m.png", **more}],
            "validation": [{"image": "IM0001", "label": "m.png"}],
            "test": [{"image": "b.ima", "label": "m.png"}],
        }
        write_datalist(tmp_path / "datalist.json", lists)  # fmt: skip
        return load_datalist(tmp_path, site="a").splits["training"][0]

    assert loaded("p1", slice=2).part_of == str(tmp_path / "p1")
    assert loaded("p1/IM0000", volume="p1").part_of == "p1"
    assert loaded("m.png").part_of is None
    for image, message in (("empty", "is a folder without a DICOM file"), ("text", "has an ending that is not known"),
                           ("gone", "does not exist")):  # fmt: skip
        with pytest.raises(DataError, match=message):
            loaded(image)
    with pytest.raises(DataError, match="'volume' of entry 0 of 'training' must"):
        loaded("m.png", volume=3.5)
    outside = tmp_path.parent / f"{tmp_path.name}_outside"
    series(outside / "x", volume)
    (tmp_path / "p1" / "link").symlink_to(outside / "x" / "IM0000")
    with pytest.raises(DataError, match="is a link to"):
        loaded("p1", slice=0)
