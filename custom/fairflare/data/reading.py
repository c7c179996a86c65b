"""Read images and masks of a datalist: decode the file, rotate it upright, take one picture and scale its values."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import nlargest
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import few, refuse
from fairflare.base.own_errors import may_be_of_file
from fairflare.base.stopping import TaskStopped
from fairflare.data.datalist import DataError, Sample
from fairflare.data.decoded import DecodedVolumes
from fairflare.data.geometry import TWO_FORMS, DrawnOn, Fit, Misfit, describe_several, fit
from fairflare.data.image_file import (
    MAX_IMAGE_BYTES,
    Facts,
    ImageFile,
    TooLarge,
    Volume,
    check_size,
    describe_misnamed,
    image_file,
    kind_of,
)
from fairflare.data.intensity import IN_WORDS, Bounds, Intensity, bounds_of, labels_of, rescale
from fairflare.data.orientation import Orientation, Turn, turn_of, turn_view

Labels = npt.NDArray[np.unsignedinteger[Any]]
ARTICLES = {"image": "an image", "mask": "a mask"}
COLOURS_SHOWN = 5  # number of colours that the message about a coloured mask names


@dataclass(frozen=True)
class Reading:
    """Store a task's settings for reading image files.

    Args:
        orientation: orientation to which NIfTI and DICOM images are brought; see :mod:`fairflare.data.orientation`.
    intensity: Intensity | Literal["raw"] = "auto"
    window: tuple[float, float] | tuple[tuple[float, float], ...] | None = None
        kept: cache of decoded volumes on the site's disk; ``None`` for no cache.
        drawn_on: rule for pairs of which only one file states a geometry; see :func:`fairflare.data.geometry.fit`.
        once: whether a file is read once as a whole: what is decoded then stays neither in memory nor on disk.
        channels: for each image of a case, as the datalist has them, its channel of the network's input; -1: not used.
        width: number of channels of the network's input; a channel that no image of the case has is 0.
    """

    orientation: Orientation = "canonical"
    intensity: Intensity | Literal["raw"] = "auto"
    window: tuple[float, float] | tuple[tuple[float, float], ...] | None = None
    kept: DecodedVolumes | None = field(default=None, compare=False)
    drawn_on: DrawnOn | None = None
    once: bool = False
    channels: tuple[int, ...] = (0,)
    width: int = 1

    def channel_reading(self, number: int) -> Reading:
        """Return the settings for one channel of the network's input, with its own window."""
        window: Any = self.window and (self.window[number] if isinstance(self.window[0], tuple) else self.window)
        return replace(self, window=window, channels=(0,), width=1)

    def describe(self) -> str:
        """Return text that describes how grey values are scaled."""
        if self.intensity != "window":
            return IN_WORDS[self.intensity]
        windows = (self.channel_reading(k).window for k in range(self.width))
        named = dict.fromkeys(
            (window and "of centre {:g} and width {:g}".format(*window)) or "of the DICOM header" for window in windows
        )
        return IN_WORDS["window"].replace("a window", f"the window {', '.join(named)}")


PLAIN = Reading()


class ValueNotes:
    """Collect how reading changed the values of files (padding, lookup tables, colour spaces).

    Each kind of change becomes one line about all the files that it concerns, instead of one line a file.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, Path], tuple[str, ...]] = {}

    def add(self, sample: Sample) -> None:
        """Collect the notes on the image and the mask of a sample that could be read; each file counts once."""
        for what, path in (("image", sample.image), ("mask", sample.mask)):
            if path is not None and (what, path) not in self._notes:
                self._notes[what, path] = image_file(path).notes(what == "mask")

    def lines(self) -> list[str]:
        """Return a line for each kind of change, with the number of files and the names of the first ones."""
        every = sorted((what, note, path.name) for (what, path), notes in self._notes.items() for note in notes)
        return [
            f"{len(files)} {what}(s): {note} ({few(files)})"
            for (what, note), group in groupby(every, lambda one: one[:2])
            for files in [[name for *_, name in group]]
        ]


def read_image(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> npt.NDArray[np.float32]:  # fmt: skip
    """Return the image of ``sample`` as (height, width, 1 or 3, or its channels) float32 in [0, 1].

    With ``intensity="auto"`` 8-bit pictures and arrays are divided by 255; all other files, and NIfTI, are clipped to
    [minimum, 99th percentile] of their file (of the whole volume when a slice is picked) and scaled. A constant image
    is 0.

    Args:
        sample: entry of a datalist.
        site, split: names for the messages.
        max_bytes: largest number of bytes that the decoded file may take (setting ``max_image_bytes`` of the site).
        how: settings for orientation and intensities.

    Raises:
        DataError: the file is too large, damaged, or holds no image.
    """
    opened = open_image(sample, site, split, max_bytes, how)
    return _picture(opened, sample.slice, _bounds(opened, how, max_bytes), how)


def open_image(sample: Sample, site: str, split: str, limit: int, how: Reading) -> _Opened:
    """Return the image of a sample; if sform and qform of its NIfTI header disagree, use the one that fits the mask."""
    where = (site, split, limit, how.channel_reading(0) if sample.more else how)
    try:
        return _open(sample.image, "image", *where)
    except DataError as error:
        if error.misfit is None or error.misfit.cause != TWO_FORMS or sample.mask is None:
            raise
        return open_pair(sample, *where)[0]


def _picture(opened: _Opened, number: int | None, bounds: Bounds | None, how: Reading) -> npt.NDArray[np.float32]:
    plane = np.atleast_3d(opened.plane(number))
    if (channels := plane.shape[2]) not in (1, 3):
        raise DataError(
            f"site '{opened.site}': image '{opened.file.path}' of split '{opened.split}' has {channels} channels; "
            "1 (grey) or 3 (colour) are understood: convert the file",
            f"site '{opened.site}': an image of split '{opened.split}' has {channels} channels",
            f"it has {channels} channels; 1 (grey) or 3 (colour) are understood",
        )
    return np.ascontiguousarray(_scale(opened, plane, number, bounds, how))


def _scale(
    opened: _Opened, values: npt.NDArray[Any], number: int | None, bounds: Bounds | None, how: Reading
) -> npt.NDArray[np.float32]:
    """Scale the values of a file to [0, 1], with 1 as white and padding as 0.

    Args:
        opened: the file.
        values: values of slice ``number``, or of the whole volume.
        number: index of the slice; ``None`` for a single picture or a whole volume.
        bounds: values that become 0 and 1; ``None`` if the window of ``how`` or of the header is used.
        how: settings for reading, with the window.
    """
    scaled = (
        values.astype(np.float32) if how.intensity == "raw"
        else rescale(values, bounds) if bounds is not None
        else _apply_windows(opened, values, number, how)
    )  # fmt: skip
    if opened.facts.inverted and (bounds is None or bounds[1] > bounds[0]):
        scaled = np.float32(1) - scaled
    if opened.facts.padded:
        scaled[np.isnan(values)] = 0
    return scaled


def _bounds(opened: _Opened, how: Reading, max_bytes: int) -> Bounds | None:
    """Return the values of a file that become 0 and 1, or ``None`` if a window is used instead."""
    refuse({
        f"it holds {opened.array.dtype} values, not numbers": opened.array.dtype.kind not in "biuf",
    }, opened.unreadable)  # fmt: skip
    if how.intensity in ("window", "raw"):
        return None
    if how.intensity == "auto":
        if opened.array.dtype == np.bool_:
            return 0.0, 1.0
        if opened.facts.eight_bits or (opened.array.dtype == np.uint8 and not isinstance(opened.file, Volume)):
            return 0.0, 255.0
    kind: str = "percentile" if how.intensity == "auto" else how.intensity
    kind += ", inverted" * (kind == "percentile" and opened.facts.inverted)
    if how.once:
        bounds = bounds_of(opened.array, kind, opened.facts.padded)
    else:
        with _turn_for(opened.file):
            bounds = _measure_bounds(opened.file, kind, max_bytes, how.kept)
    if bounds is None:
        raise opened.not_finite()
    return bounds


def _apply_windows(
    opened: _Opened, values: npt.NDArray[Any], number: int | None, how: Reading
) -> npt.NDArray[np.float32]:  # fmt: skip
    """Scale values to [0, 1] by a window; if the header has several windows, each slice by its own."""
    from fairflare.data.intensity import Window

    windows = opened.facts.windows if how.window is None else (Window(*how.window),)
    if None in windows:
        table = any("VOI LUT" in note for note in opened.file.notes(False))
        raise opened.unreadable(
            "the task has intensity='window' without a window, and the file's header has "
            f"{'a lookup table (VOI LUT), which is not applied, and no window' if table else 'none that can be used'}; "
            "set window=[centre, width] of the task"
        )
    if not (np.isfinite(values) | (np.isnan(values) & opened.facts.padded)).all():
        raise opened.not_finite()
    if len(set(windows)) == 1:
        return windows[0](values)  # type: ignore[misc]
    slices = np.broadcast_to(np.arange(len(windows)), opened.array.shape)  # stored slice index of each voxel
    plane_of_pixel = (
        slices if values.ndim == 3 and values.shape == slices.shape else replace(opened, array=slices).plane(number)
    )
    scaled = np.empty(values.shape, np.float32)
    for place in np.unique(plane_of_pixel):
        here = (plane_of_pixel == place).reshape(values.shape)
        scaled[here] = windows[place](values[here])
    return scaled


def slices_in(path: Path, *, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN) -> int | None:
    """Return the number of slices of a volume, or ``None`` if the file is one picture.

    Raises:
        DataError: the file cannot be read.
    """
    if not kind_of(path).may_be_volume:
        return None
    # The orientations "canonical" and "stored" keep the number of slices.
    return _open(
        path, "image", "none", "none", max_bytes, how, alone=how.orientation not in ("canonical", "stored")
    ).slices


def read_mask(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> Labels:  # fmt: skip
    """Return the mask of ``sample`` as a (height, width) array of the values in the file, with its image's axes.

    Arguments and errors are those of :func:`read_image`.
    """
    return _mask(open_pair(sample, site, split, max_bytes, how, masks_only=True)[1], sample.slice)


def _mask(opened: _Opened, number: int | None) -> Labels:
    array = opened.plane(None if opened.slices is None else number)  # the mask of a single slice may be a picture
    if array.ndim == 3:
        if array.shape[2] != 1 and (array != array[:, :, :1]).any():
            colours, counts = np.unique(array.reshape(-1, array.shape[2]), axis=0, return_counts=True)
            colours_in_words = [str(tuple(colours[place].tolist())) for place in np.argsort(-counts)[:COLOURS_SHOWN]]
            raise opened.unreadable(
                f"it is a colour image of {len(colours)} colours ({', '.join(colours_in_words)}"
                f"{' ...' if len(colours) > COLOURS_SHOWN else ''}); a mask has one channel of label values"
            )
        array = array[:, :, 0]
    return whole_numbers(opened, array)


def whole_numbers(opened: _Opened, array: npt.NDArray[Any]) -> Labels:
    """Return the values of a mask as unsigned numbers; raise ``DataError`` if some are not whole numbers."""
    try:
        return labels_of(array)
    except ValueError as error:
        raise opened.unreadable(str(error)) from None


def open_pair(
    sample: Sample, site: str, split: str, limit: int, how: Reading, *, masks_only: bool = False
) -> tuple[_Opened, _Opened]:
    """Return the image and mask of a sample, both with the axes of the image.

    Of several files it is the first one on which the mask lies.

    Args:
        sample, site, split, how: as in :func:`read_pair`.
        limit: largest number of bytes that a decoded file may take.
        masks_only: whether decoding the image is skipped.

    Raises:
        DataError: image or mask cannot be read, or the mask does not fit the image.
    """
    if not sample.more:
        return _pair(sample, site, split, limit, how, masks_only)
    problems = []
    for file in sample.files:
        try:
            return _pair(replace(sample, image=file, more=()), site, split, limit, how.channel_reading(0), masks_only)
        except DataError as error:
            problems.append(error)
            if error.misfit is None:
                raise
    raise problems[0]


def _pair(sample: Sample, site: str, split: str, limit: int, how: Reading, masks_only: bool) -> tuple[_Opened, _Opened]:
    if (file := sample.mask) is None:
        raise DataError(
            f"site '{site}': image '{sample.image}' of split '{split}' is labelled with a class, it has no mask",
            f"site '{site}': an image of split '{split}' has no mask",
        )
    image = _open(sample.image, "image", site, split, limit, how, alone=False, decoded=not masks_only)
    mask = _open(file, "mask", site, split, limit, how, alone=False)
    fitting = fit(image.facts.grid, mask.facts.grid, how.drawn_on, how.orientation)
    if isinstance(fitting, Misfit):
        raise DataError(
            f"site '{site}': mask '{file}' of '{sample.image}' (split '{split}'): {fitting}",
            f"site '{site}': an image of split '{split}' and its mask do not go together: {fitting.cause}",
            f"its mask '{file.name}': {fitting}",
            fitting,
        )
    with _name_file(sample.image, "image", site, split):
        turn = turn_of(fitting.affine, how.orientation, image.facts.slices or 1)
    mask = replace(
        mask,
        array=fitting.bring(mask.array) if mask.array.ndim > 1 else mask.array,
        facts=replace(mask.facts, slices=None if mask.facts.slices is None else image.facts.grid.shape[2]),
        turn=turn,
    )
    return replace(image, turn=turn, fit=fitting), mask


def notes_on(sample: Sample, how: Reading = PLAIN) -> list[str]:
    """Return notes on the geometry of a readable sample: of its image, of its mask, and of both as a pair.

    Empty texts stand for no note.
    """
    image = _facts(image_file(sample.image)).grid
    if sample.mask is None:
        return [image.note]
    mask = _facts(image_file(sample.mask), True).grid
    fitting = fit(image, mask, how.drawn_on, how.orientation)
    return [image.note, mask.note, fitting.note if isinstance(fitting, Fit) else ""]


def every_channel(sample: Sample, site: str, split: str) -> tuple[int, ...]:
    """Return the numbers of all images of a case, by its files or the header of its only file."""
    with _name_file(sample.image, "image", site, split):
        return tuple(range(len(sample.files) if sample.more else _facts(image_file(sample.image)).volumes))


def turn_and_size(
    path: Path, *, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> tuple[Turn | None, int, int]:
    """Return the rotation of an image when it is read, and the height and width of its pictures after that.

    Raises:
        DataError: the file cannot be read.
    """
    opened = _open(path, "image", "none", "none", max_bytes, how)
    plane = opened.plane(0 if opened.slices is not None else None)
    return opened.turn, plane.shape[0], plane.shape[1]


# --- the files ------------------------------------------------------------------------------------------


#: Locks by volume: threads that need slices of one volume wait here while the first of them decodes it.
_TURNS = tuple(threading.Lock() for _ in range(64))


@dataclass(frozen=True)
class _Opened:
    """Represent a decoded file that is not reoriented yet."""

    file: ImageFile
    what: str  # kind of file, "image" or "mask"
    site: str
    split: str
    array: npt.NDArray[Any]
    facts: Facts
    turn: Turn | None
    fit: Fit | None = None  # geometry of mask and image, for a file of a pair

    def unreadable(self, reason: str) -> DataError:
        """Return an error that says that this image or mask file cannot be used, with the reason."""
        return _unreadable(self.file.path, self.what, self.site, self.split, reason)

    def not_finite(self) -> DataError:
        """Return an error that says that this image has NaN or infinite values."""
        return DataError(
            f"site '{self.site}': image '{self.file.path}' of split '{self.split}' has values that are NaN or "
            "infinite; repair the file or take it out of the datalist",
            f"site '{self.site}': an image of split '{self.split}' has values that are not finite",
            "it has values that are NaN or infinite",
        )

    @property
    def slices(self) -> int | None:
        """Return the number of slices of the reoriented array, or ``None`` if the file is one picture."""
        stored = self.facts.slices
        return stored if stored is None or self.array.ndim < 3 else turn_view(self.array, self.turn).shape[2]

    def plane(self, number: int | None) -> npt.NDArray[Any]:
        """Return the picture, or slice ``number``, reoriented: (height, width) or (height, width, channels)."""
        array, slices = turn_view(self.array, self.turn) if self.array.ndim > 1 else self.array, self.slices
        if slices is None and array.ndim == 3 and array.shape[2] > 4 and array.shape[0] <= 4:
            array = np.moveaxis(array, 0, 2)  # the array has its channels first
        picture = array.ndim in (2, 3) and 0 not in array.shape and (array.ndim == 2 or array.shape[2] <= 4)
        refuse({
            f"it is a volume of {slices} slices; pick one with the key 'slice', make slices of them with "
            "`fairflare prepare volumes --slices axial`, or learn whole volumes with --task volume_segmentation (or "
            "volume_classification)": number is None and slices not in (None, 1),
            f"'slice' is {number}, but it has {slices} slices": slices is not None and (number or 0) >= slices,
            "'slice' was given, but it is not a volume": slices is None and number not in (None, 0),
            f"it has the shape {array.shape}, which is not one picture": slices is None and not picture,
        }, self.unreadable)  # fmt: skip
        return array if slices is None else np.asarray(array[:, :, number or 0])


def _open(
    path: Path, what: str, site: str, split: str, limit: int, how: Reading, *, alone: bool = True, decoded: bool = True
) -> _Opened:
    """Open an image file: return its array as :meth:`ImageFile.decode` gives it, and the facts of its header.

    For a file of a pair (not ``alone``) the rotation is left out, because it depends on both files.
    """
    with _name_file(path, what, site, split, limit):
        file, is_mask = image_file(path), what == "mask"
        with _turn_for(file):
            array = (
                np.empty(0) if not decoded
                else file.decode(is_mask=is_mask, limit=limit) if how.once
                else _decode(file, is_mask, limit, how.kept)
            )  # fmt: skip
            facts = _facts(file, is_mask)
        wanted = 1 if is_mask else len(how.channels)
        if facts.volumes != wanted:
            rows, columns, slices = facts.grid.shape
            raise describe_several((columns, rows, slices, *[facts.volumes] * (facts.volumes > 1)), wanted)
        turn = turn_of(facts.grid.affine, how.orientation, facts.slices or 1) if alone else None
    return _Opened(file, what, site, split, array, facts, turn)


@contextmanager
def _name_file(path: Path, what: str, site: str, split: str, limit: int = 0) -> Iterator[None]:
    """Convert errors about a file's content in the ``with`` block into a ``DataError``; others pass unchanged."""
    try:
        yield
    except TooLarge as error:
        raise DataError(
            f"site '{site}': {what} '{path}' of split '{split}' would take {error.size} bytes decoded, more than "
            f"max_image_bytes={limit}; take it out of the datalist, or raise 'max_image_bytes' in the site's "
            "fairflare.json",
            f"site '{site}': {ARTICLES[what]} of split '{split}' is larger than the site's max_image_bytes",
            f"it would take {error.size} bytes decoded, more than {limit}",
        ) from error
    except Misfit as error:
        raise DataError(
            f"site '{site}': {what} '{path}' of split '{split}': {error}",
            f"site '{site}': {ARTICLES[what]} of split '{split}' cannot be read: {error.cause}",
            str(error),
            error,
        ) from error
    except Exception as error:
        if isinstance(error, TaskStopped) or not may_be_of_file(error):
            raise
        reason = (
            (getattr(error, "strerror", None) or str(error))
            if isinstance(error, (ValueError, OSError))
            else "it is damaged, or holds what is not read"
        )
        raise _unreadable(path, what, site, split, describe_misnamed(path) or reason) from error


def _turn_for(file: ImageFile) -> threading.Lock:
    return _TURNS[hash(file.path) % len(_TURNS)]


@lru_cache(maxsize=4)
def _decode(file: ImageFile, is_mask: bool, limit: int, decoded: DecodedVolumes | None) -> npt.NDArray[Any]:
    """Decode a file; the last four arrays are cached in memory.

    The cache is for slices of one volume, which are read one after the other. A replaced file is decoded again.
    """
    if decoded is None or not file.may_be_volume or (_facts(file, is_mask).slices or 1) == 1:
        return file.decode(is_mask=is_mask, limit=limit)

    array = decoded.arrays(
        "mask" if is_mask else "image", [file],
        # Slices first, so that the values of a slice lie together on disk.
        lambda: {"array": np.moveaxis(file.decode(is_mask=is_mask, limit=limit), 2, 0)},
    )["array"]  # fmt: skip
    check_size(array.nbytes, limit)  # the array may have been cached on disk under a higher limit
    return np.moveaxis(array, 0, 2)


@lru_cache(maxsize=4096)
def _facts(file: ImageFile, is_mask: bool = False) -> Facts:
    return file.facts(is_mask)


@lru_cache(maxsize=4096)
def _measure_bounds(file: ImageFile, kind: str, limit: int, decoded: DecodedVolumes | None) -> Bounds | None:
    """Return the intensity bounds of a file that :func:`_open` could read, once for all slices of a volume.

    Return ``None`` if the file has NaN or infinite values.
    """

    def measure() -> Bounds | None:
        return bounds_of(_decode(file, False, limit, decoded), kind, _facts(file).padded)

    return measure() if decoded is None else decoded.bounds(file, kind, measure)


def _unreadable(path: Path, what: str, site: str, split: str, reason: str) -> DataError:
    return DataError(
        f"site '{site}': {what} '{path}' of split '{split}' cannot be used: {reason}. "
        "Repair the file or take it out of the datalist",
        f"site '{site}': {ARTICLES[what]} of split '{split}' cannot be read",
        reason,
    )


def reading_takes(samples: Iterable[Sample], voxel: int) -> int:
    """Return the memory that reading one case with its mask takes, at most, by the headers of all given files.

    Of pictures only the 16 largest files are opened, since they need little. A file that cannot be opened counts as
    empty: whoever reads it reports it.

    Args:
        samples: the cases, with all their images and masks.
        voxel: bytes that the caller makes of each voxel of each channel, beside what the files hold.

    Returns:
        Bytes for what the files hold and for ``voxel``, and 32 a voxel of what is converted at a time.
    """
    from fairflare.data.intensity import SLAB

    masks = {sample.files: sample.mask for sample in samples}
    pictures = [files for files in masks if files[0].is_file() and not kind_of(files[0], False).may_be_volume]
    largest = nlargest(16, pictures, key=lambda files: files[0].stat().st_size)
    most = 0
    for files in (*masks.keys() - pictures, *largest):
        try:
            images, mask = [*map(image_file, files)], masks[files]
            size = sum(one.count_decoded_bytes(False) for one in images) + (
                image_file(mask).count_decoded_bytes(True) if mask else 0
            )
            facts = images[0].facts()
            voxels = math.prod(facts.grid.shape) * max(len(images), facts.volumes)
            most = max(most, size + voxel * voxels + 32 * min(voxels, SLAB))
        except Exception as error:  # libraries raise errors of any type for a damaged file
            if isinstance(error, TaskStopped) or not may_be_of_file(error):
                raise
    return most
