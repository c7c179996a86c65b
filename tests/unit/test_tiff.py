"""Test TIFFs as microscopes, MATLAB and ImageJ write them, against the arrays that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from fairflare.data.datalist import DataError, Sample
from fairflare.data.image_file import TooLarge, image_file
from fairflare.data.reading import read_image, read_mask

COLOURS = np.random.default_rng(3).integers(0, 255, (20, 24, 3)).astype(np.uint8)
GREY = COLOURS[:, :, 0]
PLANES = np.ascontiguousarray(COLOURS.transpose(2, 0, 1))
MATLAB = {"photometric": "minisblack", "planarconfig": "contig"}


def decoded(path: Path) -> np.ndarray:
    return image_file(path).decode(is_mask=False, limit=10**6)


@pytest.mark.parametrize(
    ("array", "options"),
    [
        (COLOURS, MATLAB),
        (COLOURS, {**MATLAB, "compression": "zlib", "predictor": True}),
        (COLOURS, {**MATLAB, "tile": (16, 16)}),
        (COLOURS.astype(np.float32) / 7, {"photometric": "rgb"}),
        (COLOURS.astype(np.uint16) * 200, MATLAB),
        (GREY.astype(np.float64) / 3, {}),
        (GREY.astype(np.uint16) * 200, {"imagej": True}),
        (GREY.astype(np.uint16) * 200, {"tile": (16, 16), "compression": "zlib"}),
        (GREY.astype(">i2"), {"byteorder": ">"}),
        (GREY.astype(np.int8), {}),  # Pillow takes it for unsigned
        (GREY.astype(np.uint32) << 24, {}),  # Pillow takes it for signed
    ],
)
def test_the_values_are_those_that_were_written(tmp_path: Path, array: Any, options: dict[str, Any]) -> None:
    tifffile.imwrite(tmp_path / "a.tif", array, **options)
    np.testing.assert_array_equal(decoded(tmp_path / "a.tif"), array)


def test_planes_one_behind_the_other_are_channels(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", PLANES.astype(np.float32), photometric="rgb", planarconfig="separate")
    np.testing.assert_array_equal(decoded(tmp_path / "a.tif"), COLOURS)


@pytest.mark.parametrize("compression", ["tiff_lzw", "packbits"])
def test_pillow_reads_packed_colours(tmp_path: Path, compression: str) -> None:
    Image.fromarray(COLOURS).save(tmp_path / "a.tif", compression=compression)
    np.testing.assert_array_equal(decoded(tmp_path / "a.tif"), COLOURS)


def test_opaque_alpha_is_dropped_and_other_refused(tmp_path: Path) -> None:
    deep = np.dstack([COLOURS, np.ones_like(GREY)]).astype(np.float32)
    tifffile.imwrite(tmp_path / "a.tif", deep, photometric="rgb", extrasamples=["unassalpha"])
    np.testing.assert_array_equal(decoded(tmp_path / "a.tif"), COLOURS)
    deep[:3, :, 3] = 0.5
    tifffile.imwrite(tmp_path / "clear.tif", deep, photometric="rgb", extrasamples=["unassalpha"])
    with pytest.raises(ValueError, match="15 % of its pixels are transparent"):
        decoded(tmp_path / "clear.tif")


@pytest.mark.parametrize("tag", range(1, 9))
def test_it_is_turned_as_its_tag_says(tmp_path: Path, tag: int) -> None:
    """Compare with Pillow's turn of the same values where Pillow knows the file."""
    told = [(274, "H", 1, tag, False)]
    tifffile.imwrite(tmp_path / "known.tif", COLOURS, photometric="rgb", extratags=told)
    tifffile.imwrite(tmp_path / "other.tif", COLOURS, **MATLAB, extratags=told)
    np.testing.assert_array_equal(decoded(tmp_path / "other.tif"), decoded(tmp_path / "known.tif"))


def test_as_training_reads_it(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "image.tif", COLOURS, **MATLAB)
    found = read_image(Sample(tmp_path / "image.tif", 0), site="a", split="test")
    np.testing.assert_allclose(found, COLOURS / 255, atol=1e-6)
    tifffile.imwrite(tmp_path / "mask.tif", (GREY > 99).astype(np.float64))
    mask = read_mask(Sample(tmp_path / "image.tif", tmp_path / "mask.tif"), site="a", split="test")
    np.testing.assert_array_equal(mask, GREY > 99)


def test_what_cannot_be_used_says_why(tmp_path: Path) -> None:
    stack, other = tmp_path / "stack.tif", tmp_path / "other.tif"
    tifffile.imwrite(stack, np.zeros((5, 20, 24), np.uint16), imagej=True)
    with pytest.raises(DataError, match=r"5 pictures \(pages\); save each"):
        read_image(Sample(stack, 0), site="a", split="test")
    tifffile.imwrite(stack, np.zeros((5, 20, 24), np.uint16), imagej=True, truncate=True)  # lists the first page alone
    assert len(tifffile.TiffFile(stack).pages) == 1
    with pytest.raises(DataError, match=r"it holds 5 pictures"):
        read_image(Sample(stack, 0), site="a", split="test")
    tifffile.imwrite(
        stack, np.zeros((5, 20, 24), np.uint16), volumetric=True, tile=(16, 16, 16)
    )  # one page of 5 slices
    with pytest.raises(DataError, match=r"it holds 5 pictures"):
        read_image(Sample(stack, 0), site="a", split="test")
    tifffile.imwrite(other, COLOURS, **MATLAB)
    size = COLOURS.nbytes
    assert len(image_file(other).decode(is_mask=False, limit=size)) == 20
    with pytest.raises(TooLarge, match=f"{size} bytes"):
        image_file(other).decode(is_mask=False, limit=size - 1)
    other.write_bytes(other.read_bytes()[:-700])
    with pytest.raises(DataError, match="cannot be used"):
        read_image(Sample(other, 0), site="a", split="test")
    (tmp_path / "none.tif").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be used"):
        read_image(Sample(tmp_path / "none.tif", 0), site="a", split="test")


@pytest.mark.parametrize("kind", [np.uint8, np.uint32])  # which Pillow and tifffile read
def test_what_was_cut_off_is_refused(tmp_path: Path, kind: type) -> None:
    """Take the end of a packed file, one entry of the table of strips, and all but the first of five pictures."""
    path = tmp_path / "a.tif"
    array: Any = GREY.astype(kind)
    tifffile.imwrite(path, array, rowsperstrip=5, compression="zlib")
    whole = path.read_bytes()
    with tifffile.TiffFile(path) as file:
        tags = file.pages.first.tags
        at = tags["StripOffsets"].valueoffset
        assert tags["StripOffsets"].dtype.name == "LONG"  # four bytes each
    path.write_bytes(whole[:-200])
    with pytest.raises(ValueError, match=r"\d of its 4 strips or tiles are not"):
        decoded(path)
    path.write_bytes(whole[: at + 8] + bytes(4) + whole[at + 12 :])
    with pytest.raises(ValueError, match="1 of its 4 strips or tiles are not"):
        decoded(path)
    path.write_bytes(whole[:-100] + bytes(100))  # its length is right
    with pytest.raises(ValueError, match="it is damaged"):
        decoded(path)
    tifffile.imwrite(path, np.stack([array] * 5), truncate=True, photometric="minisblack")
    with pytest.raises(ValueError, match=r"it holds 5 pictures \(pages\)"):
        decoded(path)
    tifffile.imwrite(path, array, truncate=True)
    assert (decoded(path) == array).all()
