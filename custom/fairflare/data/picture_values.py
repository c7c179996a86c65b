"""What the values of a picture mean: transparency, colour spaces, 16 bits, which end is white; what a mask may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

PHOTOMETRIC = 262  # a tag of TIFF


def smaller_pages(tag: Any) -> int:
    """Return how many pages the tag SubIFDs names: the steps of a pyramid, a preview."""
    return len(tag) if isinstance(tag, tuple) else int(tag is not None)


def min_is_white(picture: Image.Image) -> bool:
    return picture.format == "TIFF" and picture.tag_v2.get(PHOTOMETRIC) == 0  # type: ignore[attr-defined]


def white_high(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values of which the lowest was white, with the highest white."""
    import numpy as np

    if array.dtype.kind not in "iu":
        raise ValueError(
            "its lowest value is white (MinIsWhite), in floats without an end; save it with the lowest black"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 2:
        return np.asarray(array.max() - array)  # float32 holds what is near 0 better than what is near 2^32
    return np.invert(array)  # of unsigned ones their highest less each, of signed ones -1 less each


def is_reduced(picture: Image.Image) -> bool:
    """Return whether Pillow reads colours, or grey with alpha, of 16 bits with 8."""
    return picture.mode in ("RGB", "RGBA", "LA") and any(";16" in str(tile[3]) for tile in getattr(picture, "tile", ()))


def check_opaque(clear: npt.NDArray[Any], array: npt.NDArray[Any], is_mask: bool) -> None:
    """Refuse transparency, which carries something: ``clear`` is 0 where a pixel is opaque."""
    share = float((clear != 0).mean())
    if not share:
        return
    if is_mask and (array == array[:1, :1]).all():
        raise ValueError(
            "its labels are in its transparency, all colours are alike; save that channel as a grey picture"
        )
    raise ValueError(f"{100 * share:.3g} % of its pixels are transparent; save it without transparency")


def check_mask(picture: Image.Image, array: npt.NDArray[Any], reduced: bool) -> None:
    """Refuse a mask whose values are not those that somebody drew.

    Args:
        picture: decoded.
        array: its values.
        reduced: of 16 bits 8 are left.
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
    """Return a picture in CIELAB (D50) in sRGB."""
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    exact = ImageCms.Flags.NOOPTIMIZE  # else dark colours are off by up to 12 of 255
    found = ImageCms.applyTransform(picture, ImageCms.buildTransform(lab, rgb, "LAB", "RGB", flags=exact))
    assert found is not None  # it is not changed in place
    return found


def plain_mode(mode: str, is_mask: bool) -> str:
    """Return the mode to decode a picture in: colours instead of palette indices, and no alpha.

    Grey pictures stay as they are. Palette indices of a mask are its labels, and stay too.
    """
    if mode in ("P", "PA", "RGBA", "CMYK", "YCbCr") and not is_mask:
        return "RGB"
    return {"LA": "L", "RGBA": "RGB", "PA": "P"}.get(mode, mode)
