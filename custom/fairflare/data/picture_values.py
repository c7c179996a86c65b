"""Interpret a picture's values (transparency, colour space, 16 bits, which end is white) and check those of masks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.base.checks import first_of, refuse
from fairflare.base.own_errors import reading_as

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

# Numbers of TIFF tags; the sub-pages are the steps of a pyramid, or a preview.
WIDTH, LENGTH, PHOTOMETRIC, DESCRIPTION, SAMPLES, SUB_PAGES, SAMPLE_FORMAT, DEPTH = (
    256, 257, 262, 270, 277, 330, 339, 32997,
)  # fmt: skip


def pictures_in(pages: int, tag: Any) -> int:
    """Return the number of pictures in a TIFF, including sub-pages and slices that are no separate pages.

    Args:
        pages: number of pages that the file lists; of a long stack ImageJ lists only the first page, as does tifffile
            with ``truncate``.
        tag: function that returns the value of a tag of the first page by its number; ``None``: there is none.
    """
    smaller, stack = tag(SUB_PAGES), re.match(r"(?s)ImageJ=.*\nimages=(\d+)", str(tag(DESCRIPTION)))
    cut = re.match(r'\{"shape": \[([\d, ]+)\],.* "truncated": true', str(tag(DESCRIPTION)))
    values = math.prod(map(int, cut[1].split(","))) // (tag(WIDTH) * tag(LENGTH) * int(tag(SAMPLES) or 1)) if cut else 1
    listed = max(pages, int(tag(DEPTH) or 1), int(stack[1]) if stack else 1, values)
    return listed + (len(smaller) if isinstance(smaller, tuple) else int(smaller is not None))


def check_parts(path: Path) -> None:
    """Raise ``ValueError`` if a TIFF lacks the data of a strip or tile, which libraries would silently invent."""
    import tifffile

    with reading_as("TIFF"), tifffile.TiffFile(path) as file:
        page = file.pages.first
        parts, ends = math.prod(page.chunked), file.filehandle.size
        whole_parts = sum(
            0 < n <= ends - begin < ends for begin, n in zip(page.dataoffsets, page.databytecounts, strict=False)
        )
    refuse({
        f"it is damaged: {parts - whole_parts} of its {parts} strips or tiles are not in the file":
            whole_parts < parts,
    })  # fmt: skip


def is_misread(picture: Any) -> bool:
    """Return whether Pillow misreads the values of a TIFF: those of 8 bits with a sign, or of 32 bits without one."""
    form = picture.tag_v2.get(SAMPLE_FORMAT, (1,))[0] if picture.format == "TIFF" else 0
    return (picture.mode, form) in (("L", 2), ("I", 1))


def check_end(picture: Any) -> None:
    """Raise ``ValueError`` if an opened JPEG ends in zeros, as broken copies do: Pillow would invent missing rows."""
    refuse({
        "it is damaged: its end is missing, zeros are in its place; copy it again":
            picture.format in ("JPEG", "MPO") and b"\xff\xd9" not in (rest := picture.fp.read())
            and rest.endswith(bytes(16)),
    })  # fmt: skip


def min_is_white(picture: Image.Image) -> bool:
    return picture.format == "TIFF" and picture.tag_v2.get(PHOTOMETRIC) == 0  # type: ignore[attr-defined]


def white_high(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Invert the values of a picture whose lowest value is white, so that the highest is white."""
    import numpy as np

    refuse({
        "its lowest value is white (MinIsWhite), in floats without an end; save it with the lowest black":
            array.dtype.kind not in "iu",
    })  # fmt: skip
    # Inverted, unsigned values become (highest - value), signed ones (-1 - value). Float32 is more exact near 0 than
    # near 2^32.
    return np.asarray(array.max() - array) if array.dtype.kind == "u" and array.dtype.itemsize > 2 else np.invert(array)


def is_reduced(picture: Image.Image) -> bool:
    """Return whether Pillow reduces a picture of 16 bits a channel (colour, or grey with alpha) to 8 bits."""
    return picture.mode in ("RGB", "RGBA", "LA") and any(";16" in str(tile[3]) for tile in getattr(picture, "tile", ()))


def check_opaque(clear: npt.NDArray[Any], array: npt.NDArray[Any], is_mask: bool) -> None:
    """Raise ``ValueError`` if a picture has transparent pixels; ``clear`` is 0 where a pixel is opaque."""
    share = float((clear != 0).mean())
    refuse({
        "its labels are in its transparency, all colours are alike; save that channel as a grey picture":
            share and is_mask and (array == array[:1, :1]).all(),
        f"{100 * share:.3g} % of its pixels are transparent; save it without transparency": share,
    })  # fmt: skip


def check_mask(picture: Image.Image, array: npt.NDArray[Any], reduced: bool) -> None:
    """Raise ``ValueError`` for a mask whose file format may have changed the drawn label values.

    Args:
        picture: the decoded picture of the mask.
        array: values of the picture.
        reduced: whether Pillow reduced 16 bits to 8.
    """
    import numpy as np

    if picture.format in ("JPEG", "MPO") or picture.info.get("compression") in ("jpeg", "tiff_jpeg"):
        raise ValueError(
            f"it is a JPEG, which changes labels: it holds {len(np.unique(array))} different values; store the mask "
            "again from its source, as PNG"
        )
    kind = first_of({
        "colours of 16 bits": reduced,
        "MinIsWhite (its lowest value is white)": min_is_white(picture),
    }) or picture.mode  # fmt: skip
    refuse({
        f"it is stored as {kind}; a mask has one channel of label values: save it as a grey picture":
            kind not in ("1", "L", "P", "PA", "LA", "RGB", "RGBA", "F") and not kind.startswith("I"),
    })  # fmt: skip


def convert_to_rgb(picture: Image.Image) -> Image.Image:
    """Convert a picture from CIELAB (D50) to sRGB."""
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    # Without this flag, dark colours are wrong by up to 12 of 255.
    transform = ImageCms.buildTransform(lab, rgb, "LAB", "RGB", flags=ImageCms.Flags.NOOPTIMIZE)
    converted = ImageCms.applyTransform(picture, transform)
    assert converted is not None  # applyTransform returns None only when it changes a picture in place
    return converted


def plain_mode(mode: str, is_mask: bool) -> str:
    """Return Pillow's mode in which a picture is decoded: colours instead of palette indices, and no alpha.

    Grey pictures keep their mode. Palette indices of a mask are its labels, and are kept too.
    """
    in_colours = ("P", "PA", "RGBA", "CMYK", "YCbCr")
    return "RGB" if mode in in_colours and not is_mask else {"LA": "L", "RGBA": "RGB", "PA": "P"}.get(mode, mode)


def npy_header(file: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and type of the array in a ``.npy`` file, read from the beginning of the file."""
    import numpy as np

    with reading_as(".npy file"):
        version = np.lib.format.read_magic(file)
    readers: dict[Any, Callable[[Any], Any]] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    refuse({f"it is a .npy file of version {version}, which holds records, not numbers": version not in readers})
    with reading_as(".npy file"):
        shape, _, dtype = readers[version](file)
    refuse({"it holds Python objects, not numbers": dtype.hasobject})
    return tuple(shape), dtype
