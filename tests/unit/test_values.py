"""Test the meaning of a file's values, by hand: bits, padding, tables, windows, alpha, labels."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image, ImageCms
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import ExplicitVRBigEndian, ImplicitVRLittleEndian, JPEGBaseline8Bit, RLELossless

from fairflare.checking.images import check_sites
from fairflare.data.datalist import SPLITS, DataError, Sample, write_datalist
from fairflare.data.decoded import DecodedVolumes
from fairflare.data.image_file import image_file
from fairflare.data.reading import Reading, read_image, read_mask
from fairflare.data.whole_volumes import read_whole
from fairflare.tasks.segmentation import SegmentationTask

from .dicom_files import AXIAL, dicom, group, series
from .image_files import png


def decoded(path: Path, is_mask: bool = False) -> np.ndarray:
    return image_file(path).decode(is_mask=is_mask, limit=10**7)


def image(path: Path, number: int | None = None, **how: Any) -> np.ndarray:
    return read_image(Sample(path, 0, number), site="a", split="test", how=Reading(**how))[:, :, 0]


def mask(path: Path) -> np.ndarray:
    return read_mask(Sample(path, path), site="a", split="test")


def refusal(path: Path, is_mask: bool = False, **how: Any) -> str:
    with pytest.raises(DataError) as caught:
        mask(path) if is_mask else image(path, **how)
    assert str(path) not in caught.value.public
    said = str(caught.value.reason)
    for word in ("Error", "Exception", "force=", "literal", "object at", "<_io"):
        assert word not in said
    return said


# --- stored bits ------------------------------------------------------------------------------------------

WORDS = np.array([[0x0FFF, 0x1FFF], [0x0800, 0xF7FF]], np.uint16)


@pytest.mark.parametrize(
    ("tags", "values"),
    [
        ({"BitsStored": 12, "PixelRepresentation": 1}, [[-1, -1], [-2048, 2047]]),
        ({"BitsStored": 12}, [[0xFFF, 0xFFF], [0x800, 0x7FF]]),
        ({"BitsStored": 12, "HighBit": 15}, [[0x0FF, 0x1FF], [0x080, 0xF7F]]),
        ({"BitsStored": 12, "HighBit": 15, "PixelRepresentation": 1}, [[0x0FF, 0x1FF], [0x080, -0x081]]),
        ({"BitsStored": 8, "HighBit": 11}, [[0xFF, 0xFF], [0x80, 0x7F]]),
    ],
)
def test_the_stored_bits_are_the_value(tmp_path: Path, tags: dict[str, int], values: list[list[int]]) -> None:
    """Check PS3.5, 8.1.1: the other bits (an overlay) are no part of the value."""
    np.testing.assert_array_equal(decoded(dicom(tmp_path / "a.dcm", WORDS, **tags)), values)
    packed = pydicom.dcmread(tmp_path / "a.dcm")
    if tags["BitsStored"] == 8:
        return  # pydicom packs it in one byte
    packed.compress(RLELossless)
    packed.save_as(tmp_path / "rle.dcm")
    np.testing.assert_array_equal(decoded(tmp_path / "rle.dcm"), values)


def test_a_high_bit_that_cannot_be_is_refused(tmp_path: Path) -> None:
    assert "HighBit is 9, with 12 bits stored" in refusal(dicom(tmp_path / "a.dcm", WORDS, BitsStored=12, HighBit=9))


# --- padding ----------------------------------------------------------------------------------------------


def padded_values() -> np.ndarray:
    """Return 500 of -2000 and 500 from -1000 to 1000: minimum and 99 % are -2000, 960; without the first -1000, 980."""
    values = np.concatenate([np.full(500, -2000), np.round(np.linspace(-1000, 1000, 500))])
    return values.astype(np.int16).reshape(25, 40)


@pytest.mark.parametrize("inverted", [False, True])
def test_padding_counts_nowhere_and_is_black(tmp_path: Path, inverted: bool) -> None:
    stored = padded_values()
    kind = "MONOCHROME1" if inverted else "MONOCHROME2"
    path = dicom(tmp_path / "a.dcm", stored, PixelPaddingValue=-2000, PhotometricInterpretation=kind)
    outside, inside = stored == -2000, stored[stored != -2000].astype(np.float64)
    spread, mean = inside.std(), inside.mean()
    bounds = {
        "auto": (-980, 1000) if inverted else (-1000, 980), "range": (-1000, 1000),
        "percentile": (-980, 1000) if inverted else (-1000, 980), "zscore": (mean - 3 * spread, mean + 3 * spread),
    }  # fmt: skip
    for intensity, (low, high) in bounds.items():
        shown = np.clip((stored - low) / (high - low), 0, 1)
        wanted = np.where(outside, 0, 1 - shown if inverted else shown)
        np.testing.assert_allclose(image(path, intensity=intensity), wanted, atol=3e-4, err_msg=intensity)
    shown = np.clip((stored - 39.5) / 399 + 0.5, 0, 1)
    with_window = dicom(tmp_path / "w.dcm", stored, PixelPaddingValue=-2000, PhotometricInterpretation=kind,
                        WindowCenter=40, WindowWidth=400)  # fmt: skip
    found = image(with_window, intensity="window")
    np.testing.assert_allclose(found, np.where(outside, 0, 1 - shown if inverted else shown), atol=1e-6)


def test_where_padding_is_and_where_not(tmp_path: Path) -> None:
    stored = np.array([[-2000, -1999, -1900, 5], [-3000, 7, 8, -2001]], np.int16)

    def nowhere(name: str, pixels: np.ndarray = stored, **tags: Any) -> list[list[bool]]:
        return np.isnan(decoded(dicom(tmp_path / name, pixels, **tags))).tolist()

    one = [[True, False, False, False], [False, False, False, False]]
    assert nowhere("one.dcm", PixelPaddingValue=-2000) == one
    both = [[True, True, True, False], [False, False, False, False]]
    assert nowhere("both.dcm", PixelPaddingValue=-2000, PixelPaddingRangeLimit=-1900) == both
    assert nowhere("turned.dcm", PixelPaddingValue=-1900, PixelPaddingRangeLimit=-2000) == both
    # In stored values, whatever they mean afterwards.
    assert nowhere("scaled.dcm", PixelPaddingValue=-2000, RescaleSlope=2, RescaleIntercept=-1024) == one
    small = stored.astype(np.uint8)  # 48 49 148 5; 72 7 8 47
    assert nowhere("eight.dcm", small, PixelPaddingValue=48) == one
    np.testing.assert_allclose(image(tmp_path / "eight.dcm")[1], small[1] / 255, atol=1e-6)  # still 8 bits
    assert np.isnan(decoded(dicom(tmp_path / "all.dcm", np.full((3, 3), 9, np.uint8), PixelPaddingValue=9))).all()
    assert not image(tmp_path / "all.dcm", intensity="percentile").any()


def test_a_padding_value_of_the_wrong_sign(tmp_path: Path) -> None:
    """Check that 63536 (modulo 2^16) means -2000; an impossible value is ignored with a message."""
    stored = np.array([[-2000, 5], [6, 7]], np.int16)
    path = dicom(tmp_path / "a.dcm", stored)
    head = pydicom.dcmread(path)
    head.add_new(0x00280120, "US", 63536)
    head.save_as(path)
    assert np.isnan(decoded(path)).tolist() == [[True, False], [False, False]]
    head = pydicom.dcmread(dicom(tmp_path / "b.dcm", stored, PixelPaddingValue=-2000))
    head.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    head.save_as(tmp_path / "b.dcm")
    assert np.isnan(decoded(tmp_path / "b.dcm")).sum() == 1
    narrow = dicom(tmp_path / "c.dcm", stored.astype(np.uint16) & 0xFFF, BitsStored=12, PixelPaddingValue=63536)
    assert decoded(narrow).dtype == np.uint16
    assert image_file(narrow).notes(False) == ("a PixelPaddingValue outside the range of the stored bits is ignored",)


def test_padding_of_a_series_of_a_volume_and_of_a_mask(tmp_path: Path) -> None:
    volume = np.random.default_rng(0).integers(0, 900, (20, 22, 3)).astype(np.int16)
    volume[:4] = -2000
    folder = series(tmp_path / "s", volume, PixelPaddingValue=-2000)
    kept = DecodedVolumes(tmp_path / "kept")
    for how in (Reading(kept=kept), Reading(kept=kept)):  # the second time from the disk
        found = read_image(Sample(folder, 0, 1), site="a", split="test", how=how)[:, :, 0]
        low, high = volume[4:].min(), np.percentile(volume[4:], 99)
        wanted = np.clip((volume[:, :, 1] - low) / (high - low), 0, 1) * (volume[:, :, 1] != -2000)
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        whole = read_whole(Sample(folder, 0), masked=False, site="a", split="test", how=how).image[0]
        np.testing.assert_allclose(whole[:, :, 1], wanted, atol=1e-6)
    labels = np.array([[255, 1], [2, 0]], np.uint8)
    np.testing.assert_array_equal(mask(dicom(tmp_path / "m.dcm", labels, PixelPaddingValue=255)), [[0, 1], [2, 0]])


# --- the modality's table ---------------------------------------------------------------------------------


def lut(entries: list[int], first: int, bits: int, signed: bool = False) -> Items:
    item = Dataset()
    item.add_new(0x00283002, "SS" if signed else "US", [len(entries), first, bits])
    item.add_new(0x00283006, "US", entries)
    item.ModalityLUTType = "HU"
    return Items([item])


def test_a_modality_table_gives_the_values(tmp_path: Path) -> None:
    stored = np.arange(10, dtype=np.uint8).reshape(2, 5)
    path = dicom(tmp_path / "a.dcm", stored, ModalityLUTSequence=lut([10, 20, 40, 80], 0, 16))
    np.testing.assert_array_equal(decoded(path), [[10, 20, 40, 80, 80], [80] * 5])
    from_three = dicom(tmp_path / "b.dcm", stored, ModalityLUTSequence=lut([10, 20, 40, 80], 3, 16))
    np.testing.assert_array_equal(decoded(from_three), [[10, 10, 10, 10, 20], [40, 80, 80, 80, 80]])
    negative = dicom(tmp_path / "c.dcm", stored.astype(np.int16) - 5,
                     ModalityLUTSequence=lut([10, 20, 40, 80], -2, 16, signed=True))  # fmt: skip
    np.testing.assert_array_equal(decoded(negative), [[10, 10, 10, 10, 20], [40, 80, 80, 80, 80]])
    assert "a lookup table (Modality LUT) gives the measured values" in image_file(path).notes(False)
    np.testing.assert_allclose(image(path, intensity="range"), [[0, 1 / 7, 3 / 7, 1, 1], [1] * 5], atol=1e-6)
    frames = dicom(tmp_path / "f.dcm", np.stack([stored, stored + 1]),
                   ModalityLUTSequence=lut([10, 20, 40, 80], 0, 16))  # fmt: skip
    np.testing.assert_array_equal(decoded(frames)[0, :3, 1], [20, 40, 80])
    both = dicom(tmp_path / "d.dcm", stored, ModalityLUTSequence=lut([10, 20], 0, 16), RescaleSlope=2)
    assert "has a Modality LUT and a slope and intercept" in refusal(both)
    short = dicom(tmp_path / "e.dcm", stored, ModalityLUTSequence=lut([10, 20, 30], 0, 16))
    head = pydicom.dcmread(short)
    head.ModalityLUTSequence[0].LUTDescriptor[0] = 99
    head.save_as(short)
    assert "its Modality LUT is damaged: it has 3 of 99 entries" in refusal(short)


@pytest.mark.parametrize("tags", [{"RescaleSlope": 0}, {"RescaleSlope": "nan"}])
def test_a_slope_that_is_none_is_refused(tmp_path: Path, tags: dict[str, Any]) -> None:
    path = tmp_path / "a.dcm"
    head = pydicom.dcmread(dicom(path, np.arange(4, dtype=np.int16).reshape(2, 2), RescaleIntercept=-5))
    head.add_new(0x00281053, "DS" if tags["RescaleSlope"] == 0 else "LO", str(tags["RescaleSlope"]))
    head.save_as(path)
    assert f"RescaleSlope is {tags['RescaleSlope']}" in refusal(path)


# --- windows and inversion --------------------------------------------------------------------------------


def test_each_slice_and_frame_by_its_own_window(tmp_path: Path) -> None:
    volume = np.full((4, 5, 3), 50, np.int16)
    folder = series(tmp_path / "s", volume)
    for number, file in enumerate(sorted(folder.iterdir())):
        head = pydicom.dcmread(file)
        head.WindowCenter, head.WindowWidth, head.VOILUTFunction = 50 * (number + 1), 400, "LINEAR_EXACT"
        head.save_as(file)
    # 7k modulo 3 names them in their order: centres 50, 100, 150 from the feet.
    wanted = [0.5, 0.375, 0.25]
    for number, value in enumerate(wanted):
        np.testing.assert_allclose(image(folder, number, intensity="window"), np.full((4, 5), value), atol=1e-6)
    whole = read_whole(Sample(folder, 0), masked=False, site="a", split="test", how=Reading(intensity="window")).image[
        0
    ]
    np.testing.assert_allclose(whole, np.broadcast_to(np.array(wanted, np.float32), (4, 5, 3)), atol=1e-6)
    cut = image(folder, 2, intensity="window", orientation="coronal")  # the head on top
    np.testing.assert_allclose(cut, np.broadcast_to(np.array(wanted[::-1])[:, None], (3, 5)), atol=1e-6)


def test_frames_in_any_order_keep_their_windows_and_their_padding(tmp_path: Path) -> None:
    """Check frames at z 4, 2, 0 mm with windows about 150, 100, 50; a corner of the lowest is padded."""
    stored = np.full((3, 4, 5), 50, np.int16)
    stored[2, 0, 0] = -2000
    each = [
        group(PlanePositionSequence={"ImagePositionPatient": [0, 0, z]},
              FrameVOILUTSequence={"WindowCenter": c, "WindowWidth": 400, "VOILUTFunction": "LINEAR_EXACT"})
        for z, c in ((4, 150), (2, 100), (0, 50))
    ]  # fmt: skip
    shared = group(PlaneOrientationSequence={"ImageOrientationPatient": AXIAL},
                   PixelMeasuresSequence={"PixelSpacing": [1, 1]})  # fmt: skip
    path = dicom(tmp_path / "a.dcm", stored, PixelPaddingValue=-2000, PerFrameFunctionalGroupsSequence=Items(each),
                 SharedFunctionalGroupsSequence=Items([shared]))  # fmt: skip
    assert np.argwhere(np.isnan(decoded(path))).tolist() == [[0, 0, 0]]
    for number, value in enumerate((0.5, 0.375, 0.25)):
        assert image(path, number, intensity="window")[1, 1] == pytest.approx(value)


def test_a_table_for_the_display_is_named(tmp_path: Path) -> None:
    stored = np.arange(6, dtype=np.uint16).reshape(2, 3)
    path = dicom(tmp_path / "a.dcm", stored, VOILUTSequence=lut([0, 9, 200, 255], 0, 8))
    assert "a lookup table (VOI LUT), which is not applied, and no window" in refusal(path, intensity="window")
    np.testing.assert_allclose(image(path, intensity="range"), stored / 5, atol=1e-6)
    assert "a lookup table for the display (VOI LUT) is not applied" in image_file(path).notes(False)


def test_inverted_once(tmp_path: Path) -> None:
    stored = np.array([[0, 51, 255]], np.uint8)
    for name, tags in {
        "one": {"PhotometricInterpretation": "MONOCHROME1"},
        "shape": {"PresentationLUTShape": "INVERSE"},
        "both": {"PhotometricInterpretation": "MONOCHROME1", "PresentationLUTShape": "INVERSE"},
    }.items():
        path = dicom(tmp_path / f"{name}.dcm", stored, **tags)
        np.testing.assert_allclose(image(path), [[1, 0.8, 0]], atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(mask(path), stored)


def test_what_is_not_applied_is_said(tmp_path: Path) -> None:
    item = Dataset()
    item.RealWorldValueSlope = 3.0
    path = dicom(tmp_path / "a.dcm", np.arange(4, dtype=np.int16).reshape(2, 2), Units="BQML",
                 RealWorldValueMappingSequence=Items([item]), ICCProfile=b"none", ShutterShape="CIRCULAR")  # fmt: skip
    head = pydicom.dcmread(path)
    head.add_new(0x20050010, "LO", "Philips MR Imaging DD 001")
    head.add_new(0x2005100E, "FL", 0.01)
    head.add_new(0x00281101, "US", [256, 0, 8])  # supplemental palette
    head.save_as(path)
    said = " ".join(image_file(path).notes(False))
    for word in ("RealWorldValueMapping", "Philips", "ICC", "SUV", "supplemental palette", "ShutterShape"):
        assert word in said
    assert image_file(dicom(tmp_path / "b.dcm", np.zeros((2, 2), np.int16))).notes(False) == ()


# --- palettes ---------------------------------------------------------------------------------------------


def palette(path: Path, stored: np.ndarray, tables: list[list[int]], bits: int, first: int = 0, **tags: Any) -> Path:
    """Write a file with three tables."""
    word = np.uint8 if bits == 8 else "<u2"
    given: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for name, entries in zip(("Red", "Green", "Blue"), tables, strict=True):
        given[f"{name}PaletteColorLookupTableDescriptor"] = [len(entries), first, bits]
        given[f"{name}PaletteColorLookupTableData"] = np.array(entries, word).tobytes()
    return dicom(path, stored, **{**given, **tags})


def test_a_palette_is_clamped_at_both_ends(tmp_path: Path) -> None:
    stored = np.array([[0, 4, 5], [6, 7, 200]], np.uint8)
    tables = [[10, 20, 30, 0], [11, 21, 31, 0], [12, 22, 32, 1]]
    found = decoded(palette(tmp_path / "a.dcm", stored, tables, 8, first=4))
    np.testing.assert_array_equal(found[:, :, 0], [[10, 10, 20], [30, 0, 0]])
    np.testing.assert_array_equal(found[:, :, 2], [[12, 12, 22], [32, 1, 1]])
    np.testing.assert_array_equal(mask(tmp_path / "a.dcm"), stored)
    signed = palette(tmp_path / "s.dcm", stored.astype(np.int16) - 6, tables, 8, first=-2)
    np.testing.assert_array_equal(decoded(signed)[:, :, 0], [[10, 10, 20], [30, 0, 0]])


def test_palettes_of_sixteen_bits(tmp_path: Path) -> None:
    stored = np.array([[0, 1, 2, 3]], np.uint8)
    deep, low = [0, 0x4000, 0x80FF, 0xFFFF], [0, 64, 128, 255]
    np.testing.assert_array_equal(decoded(palette(tmp_path / "a.dcm", stored, [deep] * 3, 16))[0, :, 1], low)
    np.testing.assert_array_equal(decoded(palette(tmp_path / "b.dcm", stored, [low] * 3, 16))[0, :, 1], low)
    many = [k // 16 for k in range(4096)]  # of 8 bits, more entries than 8 bits count
    wide = palette(tmp_path / "c.dcm", stored.astype(np.uint16) * 1300, [many] * 3, 8)
    np.testing.assert_array_equal(decoded(wide)[0, :, 2], [0, 81, 162, 243])
    head = pydicom.dcmread(tmp_path / "a.dcm")
    for name in ("Red", "Green", "Blue"):
        element = head[f"{name}PaletteColorLookupTableData"]
        element.value = np.frombuffer(element.value, "<u2").astype(">u2").tobytes()
    head.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    head["PixelData"].VR = "OB"
    head.PixelData = np.array([0, 1, 2, 3], np.uint8).tobytes()
    pydicom.dcmwrite(tmp_path / "big.dcm", head, little_endian=False, implicit_vr=False)
    np.testing.assert_array_equal(decoded(tmp_path / "big.dcm")[0, :, 1], low)


def test_segmented_palettes(tmp_path: Path) -> None:
    """Check PS3.3, C.7.9.2: one discrete entry of 0, then three on the line to 0xFF00."""
    stored = np.array([[0, 1, 2, 3, 9]], np.uint8)
    path = palette(tmp_path / "a.dcm", stored, [[0] * 4] * 3, 16)
    head = pydicom.dcmread(path)
    for number, name in enumerate(("Red", "Green", "Blue")):
        del head[f"{name}PaletteColorLookupTableData"]
        head.add_new(0x00281221 + number, "OW", np.array([0, 1, 0, 1, 3, 0xFF00], "<u2").tobytes())
    head.save_as(path)
    np.testing.assert_array_equal(decoded(path)[0, :, 1], [0, 0x55, 0xAA, 0xFF, 0xFF])
    for number in range(3):
        del head[0x00281221 + number]
    head.save_as(path)
    assert "a palette, which its header does not have" in refusal(path)


def test_a_palette_with_alpha_or_a_slope_is_refused(tmp_path: Path) -> None:
    stored, tables = np.array([[0, 1]], np.uint8), [[10, 20]] * 3
    alpha = palette(tmp_path / "a.dcm", stored, tables, 8, AlphaPaletteColorLookupTableDescriptor=[2, 0, 8])
    assert "has an alpha channel" in refusal(alpha)
    assert "a palette and a slope" in refusal(palette(tmp_path / "b.dcm", stored, tables, 8, RescaleSlope=2))


# --- words ------------------------------------------------------------------------------------------------


def test_a_damaged_header_is_told_by_its_field(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", np.zeros((2, 2), np.int16))
    head = pydicom.dcmread(path)
    head.add_new(0x00280008, "LO", "1A")
    head.save_as(path)
    assert "NumberOfFrames is '1A', no whole number" in refusal(path)


def test_masks_compressed_with_loss_are_refused(tmp_path: Path) -> None:
    labels = np.kron(np.array([[0, 200], [100, 0]], np.uint8), np.ones((20, 20), np.uint8))
    stream = io.BytesIO()
    Image.fromarray(labels).save(stream, format="JPEG", quality=60)
    packed = pydicom.dcmread(dicom(tmp_path / "m.dcm", labels))
    packed.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    packed.PixelData = pydicom.encaps.encapsulate([stream.getvalue()])
    packed["PixelData"].VR = "OB"
    packed.save_as(tmp_path / "m.dcm")
    assert image(tmp_path / "m.dcm").shape == (40, 40)
    assert "compressed with loss, which changes labels: it holds" in refusal(tmp_path / "m.dcm", is_mask=True)
    (tmp_path / "m.jpg").write_bytes(stream.getvalue())
    said = refusal(tmp_path / "m.jpg", is_mask=True)
    assert f"it holds {len(np.unique(np.asarray(Image.open(stream))))} different values" in said


# --- pictures ---------------------------------------------------------------------------------------------

GREY = np.clip(40 + 3 * np.arange(24)[:, None] + np.arange(32), 0, 255).astype(np.uint8)
RGB = np.dstack([GREY, 255 - GREY, GREY // 2])


@pytest.mark.parametrize("form", ["RGBA", "LA", "P", "L"])
def test_transparency_is_refused_unless_it_is_none(tmp_path: Path, form: str) -> None:
    clear = np.full(GREY.shape, 255, np.uint8)
    colour, grey = Image.fromarray(RGB), Image.fromarray(GREY)

    def saved(name: str, alpha: np.ndarray, unused: int) -> Path:
        path = tmp_path / name
        if form in ("RGBA", "LA"):
            picture = (colour if form == "RGBA" else grey).copy()
            picture.putalpha(Image.fromarray(alpha))
            picture.save(path)
        else:
            (grey.convert("P") if form == "P" else grey).save(path, transparency=unused)
        return path

    opaque = saved("opaque.png", clear, 0)
    wanted = RGB if form == "RGBA" else np.dstack([GREY] * 3) if form == "P" else GREY
    np.testing.assert_array_equal(decoded(opaque), wanted)
    clear[:6] = 7  # a quarter
    partly = saved("partly.png", clear, int(GREY[3, 3]))
    share = 100 * float((GREY[3, 3] == GREY).mean()) if form in ("P", "L") else 25.0
    assert f"{share:.3g} % of its pixels are transparent" in refusal(partly)
    if form == "P":  # the index says all that the transparency does
        np.testing.assert_array_equal(mask(partly), GREY)
    else:
        assert "are transparent" in refusal(partly, is_mask=True)


def test_labels_in_alpha_are_found(tmp_path: Path) -> None:
    picture = Image.new("RGBA", (32, 24), (255, 0, 0, 255))
    picture.putalpha(Image.fromarray(np.where(GREY > 90, 255, 0).astype(np.uint8)))
    picture.save(tmp_path / "a.png")
    assert "its labels are in its transparency" in refusal(tmp_path / "a.png", is_mask=True)


def srgb_of_lab(stored: np.ndarray) -> np.ndarray:
    """Return a TIFF's CIELAB of D50 (L of 255, a and b signed) in sRGB, by the formulas of CIE 15 and IEC 61966."""
    lightness = stored[..., 0].astype(np.float64)
    a, b = (np.ascontiguousarray(stored[..., k]).view(np.int8).astype(np.float64) for k in (1, 2))
    y = (lightness * 100 / 255 + 16) / 116
    cubes = np.stack([y + a / 500, y, y - b / 200], -1)
    xyz = np.where(cubes > 6 / 29, cubes**3, 3 * (6 / 29) ** 2 * (cubes - 4 / 29)) * [0.9642, 1.0, 0.8251]
    to_srgb = [[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.0334540],
               [0.0719453, -0.2289914, 1.4052427]]  # fmt: skip
    linear = np.clip(xyz @ np.transpose(to_srgb), 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def test_colour_spaces_are_brought_to_rgb_and_said(tmp_path: Path) -> None:
    picture = Image.fromarray(RGB)
    picture.convert("CMYK").save(tmp_path / "cmyk.tif")
    picture.convert("YCbCr").save(tmp_path / "ycbcr.tif")
    lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    ImageCms.applyTransform(picture, lab).save(tmp_path / "lab.tif")  # type: ignore[union-attr]
    stored = np.asarray(Image.open(tmp_path / "lab.tif"))
    for name, mode, wanted, apart in (
        ("cmyk", "CMYK", RGB, 0), ("ycbcr", "YCbCr", RGB, 3), ("lab", "LAB", srgb_of_lab(stored), 2)
    ):  # fmt: skip
        path = tmp_path / f"{name}.tif"
        assert np.abs(decoded(path).astype(int) - wanted).max() <= apart, name
        assert np.abs(decoded(path).astype(int) - RGB).mean() < 2, name
        assert image_file(path).notes(False) == (f"its colours are converted from {mode} to RGB",)
        assert f"it is stored as {mode}" in refusal(path, is_mask=True)
    for kind in (9, 10):  # ICCLab, ITULab: other offsets of a and b
        content = bytearray((tmp_path / "lab.tif").read_bytes())
        place = content.index(struct.pack("<HHI", 262, 3, 1)) + 8
        content[place] = kind
        (tmp_path / f"lab{kind}.tif").write_bytes(bytes(content))
        assert "LAB (PhotometricInterpretation); save it as grey or RGB" in refusal(tmp_path / f"lab{kind}.tif")


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.uint16, np.uint32, np.int16])
def test_the_lowest_may_be_white(tmp_path: Path, dtype: Any) -> None:
    array = GREY > 90 if dtype is bool else GREY.astype(dtype) * (1 if dtype is np.uint8 else 100)
    tifffile.imwrite(tmp_path / "white.tif", array, photometric="miniswhite")
    tifffile.imwrite(tmp_path / "black.tif", array, photometric="minisblack")
    white, black = (image(tmp_path / f"{name}.tif", intensity="range") for name in ("white", "black"))
    np.testing.assert_allclose(white, 1 - black, atol=1e-6)
    assert "MinIsWhite" in refusal(tmp_path / "white.tif", is_mask=True).replace("MINISWHITE", "MinIsWhite")


def test_floats_without_an_end_cannot_be_inverted(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", GREY.astype(np.float32), photometric="miniswhite")
    assert "its lowest value is white (MinIsWhite)" in refusal(tmp_path / "a.tif")


def png16(path: Path, array: np.ndarray) -> Path:
    """Write colours of 16 bits, which Pillow does not write."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return png(path, array.shape[1::-1], 16, rows)


def test_sixteen_bits(tmp_path: Path) -> None:
    deep = GREY.astype(np.uint16) * 257 + 3
    Image.fromarray(deep).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(decoded(tmp_path / "grey.png"), deep)
    np.testing.assert_array_equal(mask(tmp_path / "grey.png"), deep)
    colour = np.dstack([deep, deep, deep])
    tifffile.imwrite(tmp_path / "colour.tif", colour, photometric="rgb")
    for path in (png16(tmp_path / "colour.png", colour), tmp_path / "colour.tif"):
        assert np.abs(decoded(path).astype(int) - RGB[:, :, :1]).max() <= 1
        assert "its 16 bits are read with 8" in image_file(path).notes(False)
        assert "stored as colours of 16 bits" in refusal(path, is_mask=True)


def test_more_than_one_picture_is_refused(tmp_path: Path) -> None:
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY), Image.fromarray(GREY // 2)]
    frames[0].save(tmp_path / "moving.png", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "gif.png", format="GIF", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "pages.tif", save_all=True, append_images=frames[1:])
    with tifffile.TiffWriter(tmp_path / "pyramid.tif") as file:
        file.write(GREY, subifds=2)
        file.write(GREY[::2, ::2], subfiletype=1)
        file.write(GREY[::4, ::4], subfiletype=1)
    for name in ("moving.png", "gif.png", "pages.tif", "pyramid.tif"):
        for is_mask in (False, True):
            told = "it is a GIF picture" if name == "gif.png" else "it holds 3 pictures"
            assert told in refusal(tmp_path / name, is_mask=is_mask)


def test_profile_and_gamma_are_said(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(GREY).save(tmp_path / "icc.png", icc_profile=profile)
    assert image_file(tmp_path / "icc.png").notes(False) == ("its ICC profile is not applied",)
    content = (tmp_path / "icc.png").read_bytes()
    gamma = b"gAMA" + struct.pack(">I", 100000)
    chunk = struct.pack(">I", 4) + gamma + struct.pack(">I", zlib.crc32(gamma))
    (tmp_path / "gamma.png").write_bytes(content[:33] + chunk + content[33:])
    assert "its gamma is not applied" in image_file(tmp_path / "gamma.png").notes(False)


def test_a_tiffs_value_of_no_data_is_said(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", GREY, extratags=[(42113, "s", 0, "255", True)])
    assert image_file(tmp_path / "a.tif").notes(False) == ("its value of no data (GDAL_NODATA) is not applied",)


# --- labels -----------------------------------------------------------------------------------------------


def test_labels_are_rounded_within_a_thousandth(tmp_path: Path) -> None:
    labels = np.zeros((4, 5, 3), np.uint8)
    labels[1:3, 2:4] = 1
    for name, array in {"float": labels * np.float32(0.9999999), "off": labels * 1.0009 - 0.0005}.items():
        nibabel.save(nibabel.Nifti1Image(array, np.diag([1, 1, 2, 1.0])), tmp_path / f"{name}.nii")
    scaled = nibabel.Nifti1Image(labels.astype(np.float64) * 3, np.diag([1, 1, 2, 1.0]))
    scaled.header.set_data_dtype(np.int16)  # nibabel chooses the slope itself
    nibabel.save(scaled, tmp_path / "scaled.nii")
    for name, times in (("float", 1), ("off", 1), ("scaled", 3)):
        path = tmp_path / f"{name}.nii"
        found = read_mask(Sample(path, path, 1), site="a", split="test", how=Reading(orientation="stored"))
        np.testing.assert_array_equal(found, labels[:, :, 1].T * times, err_msg=name)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[0, 0.5], [1, 0.25]], "2 of 4 .*0.5, 0.25 .*row 0, column 1"),
        ([[0, 1], [1, 1.002]], "1 of 4 .*1.002, .*row 1, column 1"),
        ([[0, np.nan], [np.inf, -1]], "3 of 4 .*nan, inf, -1 .*row 0, column 1"),
        ([[0, 1], [2.0**33, 1]], r"1 of 4 .*8.589935e\+09, .*row 1, column 0"),
        ([[0.1, 0.2], [0.3, 0.4], [0.6, 0.7]], "6 of 6 .*0.1, 0.2.* 0.6 .*at row 0"),
    ],
)
def test_other_labels_are_refused_by_value_and_place(tmp_path: Path, values: Any, said: str) -> None:
    np.save(tmp_path / "a.npy", np.array(values))
    with pytest.raises(DataError, match=said):
        mask(tmp_path / "a.npy")


def test_negative_labels_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, -1]], np.int16))
    assert "1 of 2 are -1, the first at row 0, column 1" in refusal(tmp_path / "a.npy", is_mask=True)


def test_a_coloured_mask_shows_its_colours(tmp_path: Path) -> None:
    colours = np.zeros((6, 6, 3), np.uint8)
    colours[0, :3], colours[1, 0] = (255, 0, 0), (0, 9, 0)
    Image.fromarray(colours).save(tmp_path / "a.png")
    said = refusal(tmp_path / "a.png", is_mask=True)
    assert "a colour image of 3 colours ((0, 0, 0), (255, 0, 0), (0, 9, 0))" in said


@pytest.mark.parametrize("format", ["JPEG", "MPO"])
def test_a_picture_that_ends_in_zeros_is_refused(tmp_path: Path, format: str) -> None:
    """Check what a broken copy leaves: Pillow itself reads it, and makes up the lower half."""
    drawn = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8))
    more = {"save_all": True, "append_images": [drawn]} if format == "MPO" else {}
    drawn.save(tmp_path / "a.jpg", format=format, **more)
    whole = (tmp_path / "a.jpg").read_bytes()
    image(tmp_path / "a.jpg")
    half = len(whole) // (4 if more else 2)
    (tmp_path / "a.jpg").write_bytes(whole[:half] + bytes(len(whole) - half))
    assert "its end is missing, zeros are in its place" in refusal(tmp_path / "a.jpg")


# --- said once --------------------------------------------------------------------------------------------


def test_check_data_says_it_once_with_the_number_of_files(tmp_path: Path) -> None:
    """Check also that a mask that is all structure is noted like an empty one."""
    names = [f"{split}{k}" for split in SPLITS for k in range(4)]
    filled = np.zeros((40, 30), np.uint8)  # no square: beside it nothing counts
    filled[5:20, 5:20] = 1
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 900, (40, 30)).astype(np.int16)
        pixels[:3] = -2000
        more = {"ICCProfile": b"x"} if number < 2 else {}
        dicom(tmp_path / f"{name}.dcm", pixels, PixelPaddingValue=-2000, **more)
        drawn = Image.fromarray({0: np.ones_like(filled), 1: np.zeros_like(filled)}.get(number, filled))
        if number == 3:
            drawn = drawn.convert("P")
            drawn.putpalette([0, 0, 0, 255, 0, 0])
        drawn.save(tmp_path / f"{name}_m.png")
    lists = {
        split: [{"image": f"{n}.dcm", "label": f"{n}_m.png"} for n in names if n.startswith(split)] for split in SPLITS
    }
    write_datalist(tmp_path / "datalist.json", lists)
    report = check_sites(SegmentationTask(image_size=(32, 32), resize="pad"), {"a": {"data_root": str(tmp_path)}})
    assert report.grave == 0
    said = [problem.text for problem in report.problems]
    assert (
        "12 image(s): pixels of the PixelPaddingValue are 0 and count in no minimum, percentile or mean (test0.dcm, "
        "test1.dcm, test2.dcm and 9 more)" in said
    )
    assert "2 image(s): an ICC profile is not applied (training0.dcm, training1.dcm)" in said
    assert (
        "1 mask(s): its palette's indices are the labels (0, 1, ... are #000000 #ff0000 ...) (training3_m.png)" in said
    )
    assert "1 image(s) of 'training' have a mask with nothing in it" in said
    assert "1 image(s) of 'training' have a mask that leaves no background" in said
