"""Report problems of files once for each kind, and find swapped, inverted and copied masks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fairflare.base.checks import few
from fairflare.data.listing.samples import DataError, Sample

if TYPE_CHECKING:
    import numpy.typing as npt

    from fairflare.data.geometry import Misfit

P = TypeVar("P")

NAMED = 3  # number of files of one kind of problem that a message names
FEW = 8  # largest number of different values of a drawn mask; a photograph has more
POINTS, CLEAR, LEAST, SHARE = 8, 0.2, 4, 0.05  # of :func:`drawn_of` and :func:`odd_masks`
# Parts in which messages of one kind differ: names in quotes, and numbers.
PARTS = re.compile(r"'[^']*'|[-+]?\d[\d.,x ]*")


def grouped(problems: Iterable[tuple[str, P]]) -> list[list[tuple[str, P]]]:
    """Group pairs of file name and problem by the kind of the problem, in the order of each kind's first pair.

    Args:
        problems: name of each file, and its problem: a message or a :class:`fairflare.data.geometry.Misfit`.
    """
    from fairflare.data.geometry import Misfit  # here, as numpy's import is slow for shell completion

    found: dict[object, list[tuple[str, P]]] = {}
    for name, problem in problems:
        text = PARTS.sub("#", str(problem).replace(name.strip("'"), ""))  # equal for messages of one kind
        kind = (problem.cause, problem.remedy) if isinstance(problem, Misfit) else text
        found.setdefault(kind, []).append((name, problem))
    return list(found.values())


def by_kind(problems: Iterable[tuple[str, str | Misfit]]) -> list[str]:
    """Return a line for each kind of problem: number of files, the problem, three of the files, and a known remedy.

    Args:
        problems: name of each file, in quotes, and its problem.
    """
    from fairflare.data.geometry import Misfit

    lines = []
    for own in grouped(problems):
        what, between, remedy = str(own[0][1]), ", ", ""
        files = [name for name, _ in own]
        if isinstance(first := own[0][1], Misfit):
            what, between, remedy = first.cause, "; ", f". {first.remedy}"
            files = [f"{name}: {misfit.value}" for name, misfit in own if isinstance(misfit, Misfit)]
        different = list(dict.fromkeys(files))
        more = f" and {len(different) - NAMED} more" if len(different) > NAMED else ""
        lines.append(f"{len(different)} x {what}: {between.join(different[:NAMED])}{more}{remedy}")
    return lines


def named(names: Sequence[str]) -> str:
    """Return the first three names, in quotes, and the number of the remaining names, as text for a message."""
    return few([f"'{name}'" for name in names], NAMED)


def shown(path: Path) -> str:
    """Return a file's name for a message, with its two innermost folders, which often name site and class."""
    return "/".join(path.parts[-3:])


def odd_pair(image: Path, mask: Path) -> str:
    """Return a message if an image and its mask look swapped by their number of values; an empty text otherwise.

    Args:
        image, mask: paths of files with one picture each.
    """
    own, other = _values(mask), _values(image)
    if other is not None and 1 < other <= FEW and (own is None or own > FEW):
        has = "colours, or is a JPEG" if own is None else f"{own} values"
        return f"image and mask look swapped: the mask has {has}, the image {other} values; exchange the two folders"
    return ""


def _values(path: Path) -> int | None:
    """Return the number of different values of a file read as a mask, or None if the file cannot be read as a mask."""
    from fairflare.data.reading import read_mask  # here, as the import of numpy is slow

    try:
        return len(set(read_mask(Sample(path, path), site="", split="none").ravel().tolist()))
    except (DataError, OSError):
        return None


class Drawn(NamedTuple):
    """Describe a mask for a comparison with the other masks of its site.

    Attributes:
        file: name of the image, for messages.
        image, mask: checksums of the values of image and mask.
        clear: 1 where nothing is marked and -1 where something is, at 8 points in each direction.
        contrast: mean of the image inside minus outside of the mask, in standard deviations of the image; 0 without
            an inside or an outside.
    """

    file: str
    image: str
    mask: str
    clear: npt.NDArray[Any]
    contrast: float


def drawn_of(file: str, image: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Drawn:
    """Return the description of a mask; ``image`` and ``labels`` (above 0 inside) have one shape, in 2D or 3D."""
    import numpy as np

    inside = labels > 0
    points = inside[np.ix_(*(np.linspace(0, length - 1, POINTS).round().astype(int) for length in inside.shape))]
    step = np.nanmean(image[inside]) - np.nanmean(image[~inside]) if 0 < inside.mean() < 1 else 0
    pixels, marks = (hashlib.sha256(values.tobytes()).hexdigest() for values in (image, labels))
    return Drawn(file, pixels, marks, np.where(points.ravel(), -1, 1), float(step / (np.nanstd(image) or 1)))


def odd_masks(masks: Sequence[Drawn]) -> Iterator[str]:
    """Yield a line on a mask that was copied to several images of a site, and one on masks that look inverted.

    A mask counts as copied if images of three files or more, with different values, have it.

    A mask looks inverted if it marks mostly what the others leave, and the other side of the image's contrast. The
    first: the cosine of ``clear`` with the axis that all masks have in common (the first right singular vector, turned
    to two thirds of the masks, or else to those that mark less) is below -0.2. The second: ``contrast`` is beyond 0.2
    on the other side of 0 than the median of the masks with a positive cosine, which is beyond 0.2 too. So a crowded
    image is no inverted one. Fewer than 4 masks are not judged, and fewer odd ones than 5 % of them are not named.
    """
    import numpy as np

    same: dict[str, dict[str, str]] = {}
    for one in filter(lambda mask: mask.contrast, masks):
        same.setdefault(one.mask, {})[one.image] = one.file
    if copied := sorted(name for own in same.values() if len({*own.values()}) >= NAMED for name in own.values()):
        yield f"{len(copied)} different images share a mask with two others or more: {named(copied)}; was it copied?"
    if len(masks) < LEAST:
        return
    clear, contrast = np.array([one.clear for one in masks]), np.array([one.contrast for one in masks])
    along = clear @ np.linalg.svd(clear, full_matrices=False)[2][0] / clear.shape[1] ** 0.5
    most = round(1.5 * np.sign(along).mean())  # 0 unless two thirds agree: then those that mark more are the odd ones
    along *= np.sign(most + np.sign(along @ clear.mean(1)) / 2)
    usual = np.median(contrast[along > 0])
    odd = (along < -CLEAR) & (contrast * np.sign(usual) < -CLEAR) & (abs(usual) > CLEAR)
    if odd.sum() >= max(1, SHARE * len(masks)):
        files = named(sorted({masks[at].file for at in np.flatnonzero(odd).tolist()}))
        yield (
            f"{odd.sum()} of {len(masks)} masks mark mostly what the others leave: {files}; are inside and "
            "outside exchanged in them?"
        )
