"""Check each of a user's files before anything is written, so that one run names all files that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.ndimage

from fairflare.base.checks import refuse
from fairflare.base.machine.memory import free_memory, print_progress, workers
from fairflare.base.own_errors import may_be_of_file
from fairflare.core.statistics.channels import Channels, describe_channels
from fairflare.data.datalist import DataError, Sample
from fairflare.data.geometry import DrawnOn, Misfit, codes_of
from fairflare.data.image_file import MAX_IMAGE_BYTES, image_file
from fairflare.data.intensity import bounds_of, counts_of
from fairflare.data.kinds import Drawn, describe_mask, group_faults, name_site, odd_pair, shorten
from fairflare.data.orientation import PLAIN, turn_of, turn_view
from fairflare.data.preparers.contents import VOLUMES_TAKEN
from fairflare.data.preparers.items import Item
from fairflare.data.reading import Reading, _open, notes_on, open_pair, reading_takes, whole_numbers
from fairflare.data.whole_volumes import open_volume, read_pair

MADE = 5  # bytes a voxel for a check: what a mask marks, and numbers of its connected parts
AIR = -500  # values below it are those of CT: MR and PET have none
MOSTLY = 0.9  # share of a value's pixels, and of the masks with a value


@dataclass(frozen=True)
class Look:
    """Store the results of checking an image and its mask.

    Attributes:
        values: label values of the mask.
        notes: notes on image and mask for the user; empty texts do not count.
        spacing: for a volume, mm between rows, columns and slices as listed; None if the file states no spacing.
        stored: spacing of the volume along the axes of the file, as text.
        way: directions of the axes of the file, such as RAS; ``?``: the file states none.
        slices: numbers of the slices to list; None if the file is listed whole.
        empty: number of slices that are left out because their mask is empty.
        own_plane: whether the listed slices have the plane and the order of the file.
        drawn: description of the mask for comparison with other masks; None if there is no mask.
        axes: for a volume, mm a voxel and number of voxels from left to right, back to front and feet to head; empty if
            the file does not say how it lies.
        air: for each image of the case, whether it has values far below 0, as air has in Hounsfield units.
        channels: description of the images of the case, if there are several.
        names: names of the values of the mask in its file.
        edges: those values that occur only between lower and higher ones, see :func:`edges_of`.
    """

    values: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    spacing: tuple[float, ...] | None = None
    stored: str = "?"
    way: str = "?"
    slices: tuple[int, ...] | None = None
    empty: int = 0
    own_plane: bool = True
    drawn: Drawn | None = field(default=None, compare=False)
    axes: tuple[tuple[float, int], ...] = ()
    air: tuple[bool, ...] = ()
    channels: Channels | None = field(default=None, compare=False)
    names: Mapping[int, str] = field(default_factory=dict)
    edges: tuple[int, ...] = ()


Looker = Callable[..., Look]  # of image, mask or None, and where there are several images these and their names


def looks_of(cases: Sequence[Item], look: Looker) -> list[Look | Misfit | str]:
    """Check each image and its mask; return the result of each check, or the reason why the files cannot be used.

    An error that no file explains (:func:`fairflare.base.own_errors.may_be_of_file`) ends the check.
    """

    def try_case(case: Item) -> Look | Misfit | str:
        sample = _sample(case)
        try:
            return look(sample.image, sample.mask, *((case.more, case.channels) if len(case.channels) > 1 else ()))
        except Misfit as error:
            return error
        except MemoryError as error:
            gib = [number / 2**30 for number in (reading_takes([sample], MADE), free_memory())]
            raise MemoryError(
                f"'{name_site(str(case.image), case.site)}' takes about {gib[0]:.1f} GiB of memory to check, and "
                f"{gib[1]:.1f} GiB are free; end other programs, or take a machine with more memory"
            ) from error
        except Exception as error:  # libraries raise errors of any type for a damaged file
            if not may_be_of_file(error):
                raise
            if isinstance(error, DataError) and error.misfit is not None:
                return error.misfit
            return _plain(error) if isinstance(error, ValueError) else f"it cannot be opened ({_plain(error)})"

    with ThreadPoolExecutor(workers(reading_takes(map(_sample, cases), MADE))) as threads:
        return list(print_progress(threads.map(try_case, cases), len(cases), "images looked at"))


def _sample(case: Item) -> Sample:
    return Sample(case.image, case.mask if isinstance(case.mask, Path) else None, more=case.more)


def _plain(error: Exception) -> str:
    """Return the reason why a file cannot be used, as text without site, split and names of Python objects."""
    of_mask = "its mask: " * str(error).startswith("site '': mask ")
    text = of_mask + error.reason if isinstance(error, DataError) else str(error) or type(error).__name__
    return text.removeprefix("site '': ").replace(" (split 'none')", "").replace(" of split 'none'", "")


def look_at_picture(image: Path, mask: Path | None, drawn_on: DrawnOn | None = None) -> Look:
    """Check a picture: by its header if it has a class, or by reading picture and mask as training does.

    Args:
        image: file of the picture.
        mask: file of the mask; None if the picture has a class.
        drawn_on: rule for pairs of which only one file states a geometry, see :func:`fairflare.data.geometry.fit`.

    Raises:
        ValueError: the file is a volume, or the mask does not fit the picture.
        Exception: any error that a library raises for a damaged file.
    """
    sample, how = Sample(image, mask), Reading(drawn_on=drawn_on)
    for path, what in ((image, "image"), (mask, "mask")) if mask else ((image, "image"),):
        slices = _open(path, what, "", "none", MAX_IMAGE_BYTES, how, alone=False, decoded=False).facts.slices or 1
        refuse({f"it is a volume of {slices} slices, not a picture ({VOLUMES_TAKEN})": slices > 1})
    if mask is None:
        return Look(notes=tuple(notes_on(sample, how)))
    try:
        picture, labels = read_pair(sample, site="", split="none", how=how)
    except DataError as error:
        if odd := odd_pair(image, mask):
            raise ValueError(odd) from error
        raise
    values, file = tuple(counts_of(labels)), image_file(mask)
    if len(values) > 2 and (odd := odd_pair(image, mask)):
        raise ValueError(odd)
    notes = (*notes_on(sample, how), *(f"mask: {note}" for note in file.notes(True)))
    return Look(
        values, notes, drawn=describe_mask(shorten(image), picture.mean(-1), labels), names=file.names(),
        edges=edges_of(labels),
    )  # fmt: skip


def look_at_volume(
    image: Path, mask: Path | None, more: tuple[Path, ...] = (), channels: Sequence[str] = ("",), *,
    plane: str | None = None, keep_empty: bool = False, drawn_on: DrawnOn | None = None,
) -> Look:  # fmt: skip
    """Check the header and the values of a volume, and its mask.

    Args:
        image: file or folder of the volume.
        mask: file of the mask; None if the volume has a class.
        more, channels: further images of the case, and the names of all.
        plane: plane of the slices to list; None if the volume is listed whole.
        keep_empty: list slices without a label, too.
        drawn_on: rule for pairs of which only one file states a geometry, see :func:`fairflare.data.geometry.fit`.

    Raises:
        ValueError: the file is no volume, has values that are no numbers, or the mask does not fit the volume.
        Exception: any error that a library raises for a damaged file.
    """
    sample, labels, count, images = Sample(image, mask, more=more), None, len(channels), list[Any]()
    how = Reading(drawn_on=drawn_on, once=True, channels=tuple(range(count)), width=count)
    if count > 1:
        case = open_volume(sample, "", "none", MAX_IMAGE_BYTES, how, masked=mask is not None)
        opened, labels = next(one for one in case.images if one.facts.grid is case.grid), case.mask
        images = [case.bring_to_grid(number, one.array) for number, one in enumerate(case.images)]
    elif mask is None:
        opened = _open(image, "image", "", "none", MAX_IMAGE_BYTES, how)
    else:
        opened, drawn = open_pair(sample, "", "none", MAX_IMAGE_BYTES, how)
        labels = whole_numbers(drawn, drawn.array).reshape(opened.facts.grid.shape)
    volume, facts = opened.array, opened.facts
    images = images or [volume]
    refuse({
        f"it has the shape {volume.shape}, expected rows, columns and slices; save channels as files":
            facts.slices is None or volume.ndim != 3,
        "it has one slice, and tasks on whole volumes need more; --slices axial takes it as a picture":
            plane is None and mask is not None and facts.slices == 1,
        f"it holds {volume.dtype} values, not numbers": volume.dtype.kind not in "biuf",
        "it has values that are NaN or infinite; repair the file":
            any(one.dtype.kind == "f" and bounds_of(one, "range", facts.padded) is None for one in images),
    })  # fmt: skip
    affine = facts.grid.affine if opened.fit is None else opened.fit.affine
    turn, upright = (turn_of(affine, way, facts.grid.shape[2]) for way in (plane or "stored", "canonical"))
    spacing = None if affine is None else np.linalg.norm(affine[:3, :3], axis=0).round(4)
    stored = "?" if spacing is None else " x ".join(f"{length:g}" for length in spacing)
    slices, empty = None, 0
    if plane is not None:
        seen = turn_view(np.broadcast_to(np.True_, facts.grid.shape) if labels is None else labels != 0, turn)
        filled = seen.any(axis=(0, 1)) | (labels is None or keep_empty)
        slices, empty = tuple(np.flatnonzero(filled).tolist()), int((~filled).sum())
        if spacing is not None and turn is not None:
            spacing = spacing[np.argsort(turn[:, 0])]
    return Look(
        () if labels is None else tuple(counts_of(labels)),
        tuple(notes_on(replace(sample, image=opened.file.path, more=()), how)),
        None if spacing is None else tuple(spacing.tolist()),
        stored,
        "?" if affine is None else codes_of(affine),
        slices,
        empty,
        plane is None or bool(np.array_equal(PLAIN if turn is None else turn, PLAIN if upright is None else upright)),
        None if labels is None else describe_mask(shorten(image), volume, labels),
        () if affine is None else _axes(affine, facts.grid.shape),
        tuple(bool(np.nanmin(one) < AIR) for one in images),
        describe_channels(channels, images),
        {} if mask is None else image_file(mask).names(),
        () if labels is None else edges_of(labels),
    )


def _axes(affine: npt.NDArray[np.floating[Any]], shape: Sequence[int]) -> tuple[tuple[float, int], ...]:
    """Return mm a voxel and number of voxels along the body's axes, see :class:`Look`."""
    from nibabel.orientations import io_orientation

    spacing = np.linalg.norm(affine[:3, :3], axis=0).tolist()
    return tuple((spacing[k], shape[k]) for k in np.argsort(io_orientation(affine)[:, 0]).tolist())


def edges_of(labels: npt.NDArray[np.integer]) -> tuple[int, ...]:
    """Return the values of a mask of which nine tenths of the pixels have a lower and a higher one beside them.

    Smoothing and resizing make such values. Of the values 0, 1, 2, ... none is returned: they are labels, or numbers.
    """
    values = [*counts_of(labels)]
    if len(values) < 3 or values == [*range(len(values))]:
        return ()
    low, high = (filtered(labels, 3) for filtered in (scipy.ndimage.minimum_filter, scipy.ndimage.maximum_filter))
    return tuple(k for k in values if ((low < k) & (k < high))[labels == k].mean() >= MOSTLY)


def refuse_bad(
    bad: Sequence[tuple[str, str | Misfit]], number: int, what: str, leave_out: bool | None, notes: Iterable[str] = ()
) -> str:
    """Report files that cannot be used, a line for each kind of problem, as a note or as an error.

    Return the note if the files may be left out; return an empty text if there are none.

    Args:
        bad: name of each unusable file, and its problem.
        number: number of all files.
        what: word for the files, such as ``"image(s)"``.
        leave_out: whether the files may be left out; None if the command has no such option.
        notes: lines on ignored files, which may be the reason, for the error.

    Raises:
        DataError: there are unusable files, and they may not be left out or are all files.
    """
    if not bad:
        return ""
    lines = "".join(f"\n  {line}" for line in group_faults((f"'{name}'", problem) for name, problem in bad))
    if leave_out and len(bad) < number:
        return f"{len(bad)} of {number} {what} are left out:{lines}"
    how = "" if leave_out is None else ", or go on without them (--leave-out)"
    raise DataError(
        f"{len(bad)} of {number} {what} cannot be used; repair them or take them out{how}:{lines}"
        + "".join(f"\n  {note}" for note in notes)
    )
