"""Interpret a picture's values (transparency, colour space, 16 bits, which end is white) and check those of masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

PHOTOMETRIC = 262  # number of the TIFF tag PhotometricInterpretation


def smaller_pages(tag: Any) -> int:
    """Return the number of sub-pages that a TIFF's tag SubIFDs names, such as the steps of a pyramid or a preview."""
    return len(tag) if isinstance(tag, tuple) else int(tag is not None)


def min_is_white(picture: Image.Image) -> bool:
    return picture.format == "TIFF" and picture.tag_v2.get(PHOTOMETRIC) == 0  # type: ignore[attr-defined]


def white_high(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Invert the values of a picture whose lowest value is white, so that the highest is white."""
    import numpy as np

    if array.dtype.kind not in "iu":
        raise ValueError(
            "its lowest value is white (MinIsWhite), in floats without an end; save it with the lowest black"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 2:
        return np.asarray(array.max() - array)  # float32 is more exact near 0 than near 2^32
    return np.invert(array)  # unsigned values become (highest - value), signed values become (-1 - value)


def is_reduced(picture: Image.Image) -> bool:
    """Return whether Pillow reduces a picture of 16 bits a channel (colour, or grey with alpha) to 8 bits."""
    return picture.mode in ("RGB", "RGBA", "LA") and any(";16" in str(tile[3]) for tile in getattr(picture, "tile", ()))


def check_opaque(clear: npt.NDArray[Any], array: npt.NDArray[Any], is_mask: bool) -> None:
    """Raise ``ValueError`` if a picture has transparent pixels; ``clear`` is 0 where a pixel is opaque."""
    share = float((clear != 0).mean())
    if not share:
        return
    if is_mask and (array == array[:1, :1]).all():
        raise ValueError(
            "its labels are in its transparency, all colours are alike; save that channel as a grey picture"
        )
    raise ValueError(f"{100 * share:.3g} % of its pixels are transparent; save it without transparency")


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
    kind = "MinIsWhite (its lowest value is white)" if min_is_white(picture) else picture.mode
    if reduced:
        kind = "colours of 16 bits"
    elif kind in ("1", "L", "P", "PA", "LA", "RGB", "RGBA", "F") or kind.startswith("I"):
        return
    raise ValueError(f"it is stored as {kind}; a mask has one channel of label values: save it as a grey picture")


def in_rgb(picture: Image.Image) -> Image.Image:
    """Convert a picture from CIELAB (D50) to sRGB."""
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    exact = ImageCms.Flags.NOOPTIMIZE  # without this flag, dark colours are wrong by up to 12 of 255
    found = ImageCms.applyTransform(picture, ImageCms.buildTransform(lab, rgb, "LAB", "RGB", flags=exact))
    assert found is not None  # applyTransform returns None only when it changes a picture in place
    return found


def plain_mode(mode: str, is_mask: bool) -> str:
    """Return Pillow's mode in which a picture is decoded: colours instead of palette indices, and no alpha.

    Grey pictures keep their mode. Palette indices of a mask are its labels, and are kept too.
    """
    if mode in ("P", "PA", "RGBA", "CMYK", "YCbCr") and not is_mask:
        return "RGB"
    return {"LA": "L", "RGBA": "RGB", "PA": "P"}.get(mode, mode)
