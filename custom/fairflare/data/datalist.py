"""A site's datalist: which images and masks it has, and how they are read.

A site keeps its data in one folder with a ``datalist.json`` in the form of the Medical Segmentation
Decathlon, as MONAI uses it::

    {"training":   [{"image": "images/p01_07.png", "label": "masks/p01_07.png"}, ...],
     "validation": [...],
     "test":       [...]}

For classification ``label`` is the number of the class, from 0. Further lists named ``test_<name>`` (a
corrupted copy of the test images, one skin tone of them, ...) are optional; their images may be in ``test`` too.
The results show ``<name>``, so it is made of letters, digits, ``-`` and ``_``.

Paths are relative to the folder. An image is a PNG, JPEG, BMP or TIFF file, a ``.npy`` array or a 2D NIfTI
file; one slice of a NIfTI volume is picked with a third key, ``"slice": 12``.

Every problem is a :class:`DataError` that names the site, the file and the key and says what to do. Its
``public`` text has no file name in it: only that may leave the site.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SPLITS = ("training", "validation", "test")
EXTRA_TEST = "test_"  # how the names of further test lists begin
EXTRA_NAME = re.compile(EXTRA_TEST + "[A-Za-z0-9_-]+")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
ARRAYS = (".npy",)
VOLUMES = (".nii", ".nii.gz")
SUFFIXES = (*PICTURES, *ARRAYS, *VOLUMES)
TOP_PERCENTILE = 99.0  # of an image without a fixed scale: brighter than this is white


class DataError(ValueError):
    """Data or settings of a site that cannot be used.

    Args:
        message: for the site's own log: names site, file and key, and says what to do.
        public: the same without file names, paths or values from files; may be sent to the server.
    """

    def __init__(self, message: str, public: str | None = None) -> None:
        super().__init__(message)
        self.public = public or "the data of the site cannot be used; the log of the site says why"

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str]]:
        return type(self), (str(self), self.public)


@dataclass(frozen=True)
class Sample:
    """An image with its mask (a file) or its class; ``slice`` picks one slice when they are volumes."""

    image: Path
    label: Path | int
    slice: int | None = None


@dataclass(frozen=True)
class Datalist:
    """The checked datalist of one site: samples by split, with absolute paths."""

    site: str
    file: Path
    splits: Mapping[str, tuple[Sample, ...]]


def load_datalist(
    data_root: str | os.PathLike[str], datalist: str = "datalist.json", *, site: str, class_labels: bool = False
) -> Datalist:
    """Read and check a datalist; the images themselves are not opened.

    Args:
        data_root: folder of the site's data.
        datalist: name of the list inside ``data_root``, or an absolute path.
        site: name for the messages.
        class_labels: ``label`` is the number of a class; otherwise the path of a mask.

    Raises:
        DataError: the folder or the list is missing or malformed, a split is missing or empty, an entry lacks
            a key, a file does not exist or lies outside ``data_root``, or an image is in two splits.
    """
    root = Path(os.path.normpath(Path(data_root).expanduser().absolute()))
    if not root.is_dir():
        raise DataError(
            f"site '{site}': data_root '{root}' is not a folder; set 'data_root' in the site's "
            "fairflare.json to the folder that holds the datalist",
            f"site '{site}': the data folder does not exist",
        )
    file = root / datalist
    content = _read_json(file, site)
    return Datalist(site, file, _check(content, root, file, site, class_labels))


def write_datalist(
    path: str | os.PathLike[str], splits: Mapping[str, Sequence[Mapping[str, Any]]], **extra: Any
) -> None:
    """Write a datalist, whole or not at all; ``extra`` keys (such as ``name``) go in front of the splits."""
    more = sorted(split for split in splits if EXTRA_NAME.fullmatch(split))
    unknown = sorted(set(splits) - set(SPLITS) - set(more))
    if unknown:
        raise ValueError(f"unknown split {unknown[0]!r}; the splits are {', '.join(map(repr, SPLITS))}")
    content = {**extra, **{split: [dict(entry) for entry in splits.get(split, ())] for split in (*SPLITS, *more)}}
    path = Path(path)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)


def read_image(sample: Sample, *, site: str, split: str) -> npt.NDArray[np.float32]:
    """The image of ``sample`` as (height, width, channels) float32 in [0, 1].

    8-bit pictures and arrays are divided by 255. All others, and NIfTI, are clipped to [minimum, 99th
    percentile] of their file (of the whole volume when a slice is picked) and scaled; a constant image is 0.
    """
    array = _read(sample.image, "image", site, split)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    low, high = 0.0, 255.0
    if array.dtype != np.uint8 or _suffix(sample.image) in VOLUMES:
        if array.dtype.kind not in "iuf":
            raise _unreadable(sample.image, "image", site, split, f"it holds {array.dtype} values, not numbers")
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(
                f"site '{site}': image '{sample.image}' of split '{split}' has values that are NaN or "
                "infinite; repair the file or take it out of the datalist",
                f"site '{site}': an image of split '{split}' has values that are not finite",
            )
        low, high = float(array.min()), float(np.percentile(array, TOP_PERCENTILE))
        if high <= low:
            high = float(array.max())
    array = _plane(array, sample.image, "image", sample.slice, site, split)
    if array.ndim == 2:
        array = array[:, :, None]
    if high <= low:
        return np.zeros(array.shape, np.float32)
    scaled = (array.astype(np.float32) - np.float32(low)) / np.float32(high - low)
    return np.ascontiguousarray(np.clip(scaled, 0.0, 1.0, out=scaled))


def read_mask(sample: Sample, *, site: str, split: str) -> npt.NDArray[np.int64]:
    """The mask of ``sample`` as a (height, width) array of the values in the file."""
    file = sample.label
    if isinstance(file, int):
        raise ValueError(f"site '{site}': '{sample.image}' is labelled with a class, it has no mask")
    array = _read(file, "mask", site, split)
    array = _plane(array, file, "mask", sample.slice, site, split)
    if array.ndim == 3:
        if array.shape[2] != 1 and (array[:, :, :3] != array[:, :, :1]).any():
            reason = "it is a colour image; a mask has one channel of label values"
            raise _unreadable(file, "mask", site, split, reason)
        array = array[:, :, 0]
    values = np.asarray(array, np.float64) if array.dtype.kind in "biuf" else None
    if values is None or not (np.isfinite(values) & (values == np.round(values))).all():
        raise _unreadable(file, "mask", site, split, "its values are not whole numbers")
    return values.astype(np.int64)


def read_pair(sample: Sample, *, site: str, split: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Image and mask of ``sample``, checked to be of one size."""
    image = read_image(sample, site=site, split=split)
    mask = read_mask(sample, site=site, split=split)
    if image.shape[:2] != mask.shape:
        raise DataError(
            f"site '{site}': image '{sample.image}' is {_size(image.shape)} but its mask '{sample.label}' is "
            f"{_size(mask.shape)} (split '{split}'); they must have the same size",
            f"site '{site}': an image of split '{split}' and its mask differ in size",
        )
    return image, mask


def suggest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: a close match, if any, and all names."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"{hint} Available: {', '.join(repr(item) for item in known)}"


# --- the list -------------------------------------------------------------------------------------------


def _read_json(file: Path, site: str) -> Any:
    if not file.is_file():
        raise DataError(
            f"site '{site}': datalist '{file}' does not exist; write one (see docs/data.md) or name it with "
            "'datalist' in the site's fairflare.json",
            f"site '{site}': the datalist does not exist",
        )
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"site '{site}': datalist '{file}' is not readable JSON ({error}); correct the file",
            f"site '{site}': the datalist is not readable JSON",
        ) from error


def _check(content: Any, root: Path, file: Path, site: str, class_labels: bool) -> dict[str, tuple[Sample, ...]]:
    def bad(problem: str, public: str) -> DataError:
        return DataError(
            f"site '{site}': datalist '{file}': {problem}",
            f"site '{site}': the datalist is not usable: {public}",
        )

    if not isinstance(content, dict):
        raise bad(
            f"the top level must be an object with the keys {_names(SPLITS)}, got {_kind(content)}",
            "it is not an object with the splits",
        )
    splits: dict[str, tuple[Sample, ...]] = {}
    seen: dict[Path, str] = {}
    needed = ("image",) if class_labels else ("image", "label")
    for split in (*SPLITS, *sorted(key for key in content if key.startswith(EXTRA_TEST))):
        if split not in SPLITS and not EXTRA_NAME.fullmatch(split):
            raise bad(
                f"'{split}' must be 'test_' and a name of letters, digits, '-' and '_'",
                "the name of a further test list is not usable",
            )
        if split not in content:
            found = _names(sorted(content)) or "none"
            raise bad(
                f"key '{split}' is missing; needed are {_names(SPLITS)}, found {found}",
                f"key '{split}' is missing",
            )
        entries = content[split]
        if not isinstance(entries, list):
            raise bad(f"'{split}' must be a list, got {_kind(entries)}", f"'{split}' is not a list")
        if not entries:
            raise bad(
                f"split '{split}' is empty; every split needs at least one image with its label",
                f"split '{split}' is empty",
            )
        samples = []
        for index, entry in enumerate(entries):
            where = f"entry {index} of '{split}'"
            if not isinstance(entry, dict):
                raise bad(
                    f"{where} must be an object with the keys 'image' and 'label', got {_kind(entry)}",
                    f"{where} is not an object",
                )
            paths = {}
            for key in ("image", "label"):
                if key not in entry:
                    raise bad(
                        f"{where} has no key '{key}'; every entry needs 'image' and 'label'",
                        f"{where} has no key '{key}'",
                    )
                value = entry[key]
                if key not in needed:
                    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                        raise bad(
                            f"'label' of {where} must be the number of a class (a whole number >= 0), got {value!r}",
                            f"'label' of {where} is not the number of a class",
                        )
                    continue
                if not isinstance(value, str) or not value:
                    raise bad(
                        f"'{key}' of {where} must be the path of one file, got {_kind(value)}",
                        f"'{key}' of {where} is not a path",
                    )
                path = Path(os.path.normpath(root / value))
                if not path.is_relative_to(root):
                    raise bad(
                        f"'{key}' of {where}, '{value}', lies outside data_root '{root}'; "
                        "move the file into the folder, or data_root up",
                        f"'{key}' of {where} lies outside the data folder",
                    )
                if not path.is_file():
                    raise bad(
                        f"'{key}' of {where}, '{path}', does not exist; correct the path or take the entry out",
                        f"'{key}' of {where} does not exist",
                    )
                if _suffix(path) not in SUFFIXES:
                    raise bad(
                        f"'{key}' of {where}, '{path}', has an ending that is not known; "
                        f"convert it to one of {_names(SUFFIXES)}",
                        f"'{key}' of {where} is of an unknown file type",
                    )
                paths[key] = path
            number = entry.get("slice")
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
                raise bad(
                    f"'slice' of {where} must be a whole number >= 0, got {number!r}",
                    f"'slice' of {where} is not a whole number >= 0",
                )
            identity = paths["image"].resolve()
            first = seen.setdefault(identity, split)
            if first != split and not (first.startswith("test") and split.startswith("test")):
                raise bad(
                    f"image '{paths['image']}' is in both '{first}' and '{split}'; "
                    "keep each image, and each patient, in one split",
                    f"an image is in both '{first}' and '{split}'",
                )
            samples.append(Sample(paths["image"], entry["label"] if class_labels else paths["label"], number))
        splits[split] = tuple(samples)
    return splits


# --- the files ------------------------------------------------------------------------------------------


def _read(path: Path, what: str, site: str, split: str) -> npt.NDArray[Any]:
    """The array in a file: (height, width), (height, width, channels) or, of NIfTI, (..., slices)."""
    try:
        status = path.stat()
        return _decode(path, what == "mask", status.st_mtime_ns, status.st_size)
    except Exception as error:  # the libraries below raise what they like for a damaged file
        raise _unreadable(path, what, site, split, f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=4)
def _decode(path: Path, is_mask: bool, stamp: int, size: int) -> npt.NDArray[Any]:
    """Kept for a moment, since slices of one volume come one after the other; a replaced file is noticed."""
    suffix = _suffix(path)
    if suffix in ARRAYS:
        return np.load(path, allow_pickle=False)
    if suffix in VOLUMES:
        from monai.data.image_reader import NibabelReader

        reader = NibabelReader()
        array = np.asarray(reader.get_data(reader.read(path))[0])
        return array.swapaxes(0, 1) if array.ndim > 1 else array  # rows first, as in pictures
    from monai.data.image_reader import PILReader

    picture_reader = PILReader(converter=_label_mode if is_mask else _plain_mode, reverse_indexing=False)
    return np.asarray(picture_reader.get_data(picture_reader.read(path))[0])


def _label_mode(picture: Any) -> Any:
    """As it is: the indices of a palette are the labels."""
    return picture.convert("L") if picture.mode == "LA" else picture


def _plain_mode(picture: Any) -> Any:
    """Colours instead of palette indices, no alpha; grey pictures as they are."""
    if picture.mode in ("P", "PA", "RGBA", "CMYK", "YCbCr"):
        return picture.convert("RGB")
    return picture.convert("L") if picture.mode == "LA" else picture


def _plane(
    array: npt.NDArray[Any], path: Path, what: str, number: int | None, site: str, split: str
) -> npt.NDArray[Any]:
    """One picture, (height, width) or (height, width, channels), out of what a file holds."""
    if _suffix(path) in VOLUMES and array.ndim == 3:
        slices = array.shape[2]
        if number is None and slices != 1:
            reason = (
                f"it is a volume of {slices} slices; pick one with the key 'slice' in the datalist, "
                "or make slices of it with fairflare.data.preparers"
            )
            raise _unreadable(path, what, site, split, reason)
        if (number or 0) >= slices:
            raise _unreadable(path, what, site, split, f"'slice' is {number}, but it has {slices} slices")
        return array[:, :, number or 0]
    if number is not None and number != 0:
        raise _unreadable(path, what, site, split, "'slice' was given, but it is not a volume")
    if array.ndim == 3 and array.shape[2] > 4 and array.shape[0] <= 4:
        array = np.moveaxis(array, 0, 2)  # channels first
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[2] > 4):
        raise _unreadable(path, what, site, split, f"it has the shape {array.shape}, which is not one picture")
    return array


def _unreadable(path: Path, what: str, site: str, split: str, reason: str) -> DataError:
    article = "an" if what == "image" else "a"
    return DataError(
        f"site '{site}': {what} '{path}' of split '{split}' cannot be used: {reason}. "
        "Repair the file or take it out of the datalist",
        f"site '{site}': {article} {what} of split '{split}' cannot be read",
    )


def _suffix(path: Path) -> str:
    name = path.name.lower()
    return ".nii.gz" if name.endswith(".nii.gz") else Path(name).suffix


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]} (width x height)"


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
