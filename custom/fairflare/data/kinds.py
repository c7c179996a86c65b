"""Report problems of files once for each kind, and find swapped, inverted and copied masks."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fairflare.base.checks import few, group_by_key
from fairflare.data.listing.samples import DataError, Sample

if TYPE_CHECKING:
    import numpy.typing as npt

    from fairflare.core.statistics.channels import Channels
    from fairflare.data.geometry import Misfit

P = TypeVar("P")

FEW = 8  # largest number of different values of a drawn mask; a photograph has more
# Limits of :func:`odd_masks`: points in each direction, least cosine and contrast, least number of masks, least share
# of odd masks, least share of its bounding box that a part fills to count as a box, least number of copies.
POINTS, CLEAR, LEAST, SHARE, BOX, COPIES = 8, 0.2, 4, 0.05, 0.9, 3
# Limits of :func:`find_misplaced` and :func:`apart`: least and largest number of masks, least fit, least gain in fit,
# least share of images with a gain, least gain in standard errors, least correlation between sites.
ENOUGH, MOST, FIT, GAIN, MOSTLY, ERRORS, ALIKE = 16, 1000, 0.15, 0.03, 0.65, 4.5, 0.9
# Limits of :func:`find_two_hands`: least number of masks; number of their values that are looked at; share of a site's
# other masks that fit an image better than its own mask, below which the mask is not looked at, below which it fits,
# above which it does not, and above which half of the masks of other images would be; least share of masks that fit;
# share of masks without a fit that every site may have, and chance of a false line if it has no more of these.
HANDS, CODES, WORSE, FITTING, UNFIT, FAR, SURE, USUAL, CHANCE = 32, 4, 0.05, 0.1, 0.3, 0.65, 0.4, 0.01, 0.001
LABELLED = 2**24  # voxels of a mask whose parts are found voxel by voxel; of a larger one, every second one is used
Way = tuple[tuple[int, ...], tuple[bool, ...], tuple[int, ...]]  # order of axes, which are mirrored, shift along each
# Parts in which messages of one kind differ: names in quotes, and numbers.
PARTS = re.compile(r"'[^']*'|[-+]?\d[\d.,x ]*")


def group_by_kind(problems: Iterable[tuple[str, P]]) -> list[list[tuple[str, P]]]:
    """Group pairs of file name and problem by the kind of the problem, in the order of each kind's first pair.

    Args:
        problems: name of each file, and its problem: a message or a :class:`fairflare.data.geometry.Misfit`.
    """
    from fairflare.data.geometry import Misfit  # here, as numpy's import is slow for shell completion

    return [*group_by_key(
        ((problem.cause, problem.remedy) if isinstance(problem, Misfit)
         else PARTS.sub("#", str(problem).replace(name.strip("'"), "")),  # equal for messages of one kind
         (name, problem))
        for name, problem in problems
    ).values()]  # fmt: skip


def group_faults(problems: Iterable[tuple[str, str | Misfit]]) -> Iterator[str]:
    """Yield a line for each kind of problem: number of files, the problem, three of the files, and a known remedy.

    Args:
        problems: name of each file, in quotes, and its problem.
    """
    from fairflare.data.geometry import Misfit

    for alike in group_by_kind(problems):
        what, between, remedy = str(alike[0][1]), ", ", ""
        files = [name for name, _ in alike]
        if isinstance(first := alike[0][1], Misfit):
            what, between, remedy = first.cause, "; ", f". {first.remedy}"
            files = [f"{name}: {misfit.value}" for name, misfit in alike if isinstance(misfit, Misfit)]
        different = list(dict.fromkeys(files))
        yield f"{len(different)} x {what}: {few(different, between=between)}{remedy}"


def two_names(named_values: Iterable[tuple[str, Mapping[int, str]]]) -> Iterator[str]:
    """Yield a line if files give a value of the masks several names, or several colours.

    Args:
        named_values: name of each file, and the names of its values.
    """
    pairs_of = group_by_key((value, (name, file)) for file, names in named_values for value, name in names.items())
    if odd := {
        value: by_name
        for value, pairs in sorted(pairs_of.items())
        if len(by_name := group_by_key((" ".join(name.split()).casefold(), file) for name, file in pairs)) > 1
    }:
        values = "; ".join(
            f"{value} is {', '.join(f'{name} in {name_first(files)}' for name, files in by_name.items())}"
            for value, by_name in odd.items()
        )
        yield (
            f"masks contradict each other: {values}. Give each number one meaning in all masks; of palettes write all "
            "masks with that of a first one, in Python: Image.open(mask).convert('RGB').quantize(palette=Image.open("
            "first), dither=0)"
        )


def name_first(names: Sequence[str]) -> str:
    """Return the first three names, in quotes, and the number of the remaining names, as text for a message."""
    return few([f"'{name}'" for name in names])


def shorten(path: Path) -> str:
    """Return a file's name for a message, with its two innermost folders, which often name site and class."""
    return "/".join(path.parts[-3:])


def name_site(name: str, site: str) -> str:
    """Return a file's name that, once in quotes, is followed by the name of its site, if that is known."""
    return f"{name}' of site '{site}" if site else name


def odd_pair(image: Path, mask: Path) -> str:
    """Return a message if an image and its mask seem swapped, judged by their numbers of values; else an empty text.

    Args:
        image, mask: paths of files with one picture each.
    """
    levels, other = _values(mask), _values(image)
    if other is not None and 1 < other <= FEW and (levels is None or levels > FEW):
        return (
            "image and mask look swapped: the mask has "
            f"{'colours, or is a JPEG' if levels is None else f'{levels} values'}, the image {other} values; "
            "exchange the two folders"
        )
    return ""


def _values(path: Path) -> int | None:
    """Return the number of different values of a file read as a mask, or None if the file cannot be read as a mask."""
    from fairflare.data.intensity import counts_of  # here, as the import of numpy is slow
    from fairflare.data.reading import read_mask

    try:
        return len(counts_of(read_mask(Sample(path, path), site="", split="none")))
    except (DataError, OSError):
        return None


class Drawn(NamedTuple):
    """Describe a mask for a comparison with the other masks of its site.

    Attributes:
        file: name of the image, for messages.
        image, mask: checksums of the values of image and mask.
        seen, marked: values of the image (minus its mean, in its standard deviations) and of the labels at 48 x 48
            points of a picture, or at 24 x 24 x 24 points of a volume.
        contrast: mean of the image inside minus outside of the mask, in standard deviations of the image; 0 without
            an inside or an outside.
        boxed: area of the connected parts of the mask that nearly fill their bounding box, as a share of the mask;
            only boxes count that are longer than 3 pixels in every direction and smaller than the image.
    """

    file: str
    image: str
    mask: str
    seen: npt.NDArray[Any]
    marked: npt.NDArray[Any]
    contrast: float
    boxed: float


def describe_mask(file: str, image: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Drawn:
    """Return the description of a mask; ``image`` and ``labels`` (above 0 inside) have one shape, in 2D or 3D."""
    import numpy as np
    from scipy.ndimage import find_objects, label

    from fairflare.data.intensity import slabs

    inside, pivot = labels > 0, np.nan_to_num(np.float64(image.flat[0]))
    sums = np.zeros((2, 3))  # of all values and of those inside, minus the first one: number, sum, sum of squares
    for values, marks in zip(slabs(image), slabs(inside), strict=True):
        every = values.astype(np.float64) - pivot
        for row, part in zip(sums, (every.ravel(), every[marks]), strict=True):
            row += (part := part[~np.isnan(part)]).size, part.sum(), part @ part
    (number, total, squares), (within, marked, _) = sums
    step = marked / within - (total - marked) / (number - within) if 0 < within < number else 0.0
    spread = np.sqrt(max(0.0, squares / max(1, number) - (total / max(1, number)) ** 2)) or 1.0
    places = np.ix_(
        *(np.linspace(0, length - 1, 96 // 2 ** (inside.ndim - 1)).round().astype(int) for length in inside.shape)
    )
    seen = np.nan_to_num((image[places] - (pivot + total / max(1, number))) / spread).astype(np.float16)
    whole, area = 0, 1
    for box in find_objects(inside.view(np.int8)):  # the one box around all that is marked
        thin = max(1, math.ceil((inside[box].size / LABELLED) ** (1 / inside.ndim)))
        parts = label(inside[box][(slice(None, None, thin),) * inside.ndim])[0]
        area = max(1, int(np.count_nonzero(parts)))
        whole = sum(
            parts[part].size
            for number, part in enumerate(find_objects(parts), 1)
            if min(parts[part].shape) > 3
            and parts[part].size * thin**inside.ndim < inside.size
            and (parts[part] == number).mean() > BOX
        )
    return Drawn(
        file, hash_values(image), hash_values(labels), seen, labels[places].astype(np.int32), float(step / spread),
        whole / area,
    )  # fmt: skip


def hash_values(values: npt.NDArray[Any], change: Callable[[Any], npt.NDArray[Any]] = lambda slab: slab) -> str:
    """Return a checksum of an array's values after ``change``, independent of their order in memory."""
    from fairflare.data.intensity import slabs

    digest = hashlib.sha256(str(values.shape).encode())
    for slab in slabs(values):
        digest.update(change(slab.T).tobytes())
    return digest.hexdigest()


def _place(values: npt.NDArray[Any], way: Way) -> npt.NDArray[Any]:
    """Return (n, ...) masks or images with their axes in another order, some of them mirrored, and moved along them."""
    import numpy as np

    order, flips, far = way
    mirrored = tuple(axis for axis, flip in enumerate(flips, 1) if flip)
    return np.roll(np.flip(values.transpose(0, *order), mirrored), far, sorted(order))


def _ways(seen: npt.NDArray[Any], marked: npt.NDArray[Any]) -> Iterator[Way]:
    """Yield all exchanges and mirrorings of axes, and the one shift of all (n, ...) masks that fits the images best."""
    import numpy as np

    axes = tuple(range(1, marked.ndim))
    yield from product(permutations(axes), product((False, True), repeat=len(axes)), [(0,) * len(axes)])
    fit = abs(
        np.fft.irfftn(
            (np.fft.rfftn(seen, axes=axes) * np.fft.rfftn(marked, axes=axes).conj()).mean(0), s=seen.shape[1:]
        )
    )
    yield axes, (False,) * len(axes), tuple(map(int, np.unravel_index(fit.argmax(), fit.shape)))


def _say_way(way: Way, shape: Sequence[int]) -> str:
    order, flips, far = way
    shares = [f"{(k - n * (2 * k > n)) / n:.0%}" for k, n in zip(far, shape, strict=True)]
    return " and ".join([
        *[f"their axes are read as {', '.join(map(str, order))}"] * (order != tuple(sorted(order))),
        *[f"they are mirrored along axis {axis}" for axis, flip in enumerate(flips, 1) if flip],
        *[f"they are moved along the axes by {', '.join(shares)}"] * any(far),
    ])  # fmt: skip


def _units(values: npt.NDArray[Any], axes: tuple[int, ...], middle: Any = 0) -> npt.NDArray[Any]:
    """Subtract ``middle`` from arrays, divide each by its Euclidean norm over the axes, and return the result."""
    import numpy as np

    away = values - middle
    return away / np.maximum(np.sqrt((away**2).sum(axes, keepdims=True)), 1e-6)


def find_misplaced(masks: Sequence[Drawn]) -> Iterator[str]:
    """Yield a line if a site's masks fit its images clearly better when they are mirrored, turned, moved or exchanged.

    The fit is the correlation of image and mask at the points of :class:`Drawn`, each minus its mean over the site, so
    that a position which all images have in common has no influence. It is compared with the fit of four kinds of
    changed masks: mirrored along axes; with exchanged axes; all moved by the same shift; assigned anew to the images,
    one to one, with the largest sum of fits. New assignments of random masks improve the fit too. So the assigned masks
    must fit better than mirrored masks that are assigned in the same way, and twice as well as the given masks.

    A line needs 16 images, a mean fit beyond 0.15, and a gain over the given fit in about two thirds of the images,
    with a mean above 0.03 and above 4.5 standard errors. Images without contrast at the structures give no line.
    """
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    seen = np.array([mask.seen for mask in masks], np.float32)
    marked = np.array([mask.marked > 0 for mask in masks], np.float32)
    axes = tuple(range(1, marked.ndim))
    seen, marked = (_units(values, axes, values.mean(0)) for values in (seen, marked))
    given = (seen * marked).sum(axes)
    fits = {
        _say_way(way, marked.shape[1:]): ((seen * _place(marked, way)).sum(axes), abs(given))
        for way in _ways(seen, marked)
    }
    assigned, mirrored = (
        max([sign * table[linear_sum_assignment(table, sign > 0)] for sign in (1, -1)], key=np.mean)
        for table in (np.tensordot(seen, part, (axes, axes)) for part in (marked, np.flip(marked, axes)))
    )
    floor = np.maximum(np.maximum(abs(given), mirrored), 2 * abs(given.mean()))
    gains = {
        how: np.sign(fit.mean()) * fit - base
        for how, (fit, base) in (fits | {"they are given to other images of the site": (assigned, floor)}).items()
        if abs(fit.mean()) > FIT
    }
    how, gain = max(gains.items(), key=lambda one: float(one[1].mean()), default=("", given))
    if how and (gain > 0).mean() > MOSTLY and gain.mean() > max(GAIN, ERRORS * gain.std(ddof=1) / len(gain) ** 0.5):
        files = name_first([masks[index].file for index in np.flatnonzero(gain > 0).tolist()])
        yield f"{(gain > 0).sum()} of {len(masks)} masks fit the images clearly better if {how}: {files}; look at some"


def _terms(seen: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return (terms, points) of an image, from which :func:`_likely` predicts masks.

    Terms are the image at four scales, its edges, the position, and products of two of these.
    """
    import numpy as np
    from scipy.ndimage import gaussian_filter, gaussian_gradient_magnitude

    seen = seen.astype(np.float32)
    looks = [*(gaussian_filter(seen, scale) for scale in (0, 1, 2, 4)), gaussian_gradient_magnitude(seen, 1)]
    places = np.meshgrid(*(np.linspace(-1, 1, length, dtype=np.float32) for length in seen.shape), indexing="ij")
    twice = [a * b for coordinates in (looks, places) for k, a in enumerate(coordinates) for b in coordinates[k:]]
    return np.stack([np.ones_like(seen), *looks, *places, *twice]).reshape(-1, seen.size)


def _likely(masks: Sequence[Drawn]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return (n, values, ...) maps of where each image's look and position suggest a mask's values, and the masks.

    The maps are the least squares fit of all masks of the site: what most of them have in common decides.
    """
    import numpy as np

    marked = np.array([mask.marked for mask in masks])
    values, counts = np.unique(marked[marked > 0], return_counts=True)
    drawn = np.stack([marked == value for value in values[np.argsort(-counts)[:CODES]]], 1).astype(np.float32)
    squares, products = 0.0, 0.0
    for mask, picture in zip(masks, drawn, strict=True):
        terms = _terms(mask.seen)
        squares, products = squares + terms @ terms.T, products + terms @ picture.reshape(len(picture), -1).T
    weights = np.linalg.lstsq(squares, products, rcond=1e-6)[0].T.astype(np.float32)
    return np.array([(weights @ _terms(mask.seen)).reshape(drawn.shape[1:]) for mask in masks]), drawn


def find_two_hands(masks: Sequence[Drawn]) -> Iterator[str]:
    """Yield a line if some of a site's masks do not lie on their images as its others do.

    A map of each image says where a mask is likely (:func:`_likely`). The fit of a mask to an image is the correlation
    of mask and map, each minus its mean over the site. Most masks fit their own image better than the site's other
    masks do; of a mask of another image any share of the others may fit better. So the masks without a fit are those to
    whose image more than 0.3 of the others fit better. A line needs more of them than chance gives in 1 of 1000 sites
    of which 1 % are such masks. Where the look of an image says little of its mask, masks have all degrees of fit, and
    nothing is said: 0.4 of the masks must fit (0.1 or less), there must be half as many without a fit as in between,
    and for a quarter of these more than 0.65 of the others must fit better. Fewer than 32 masks are not judged.

    If as many masks fit clearly best after one change of the axes, or after one shift, that is named in place of it:
    changed, such a mask fits better than all but 0.05 of the others as they are, and of the others changed likewise.
    """
    import numpy as np
    from scipy.stats import binom

    likely, drawn = _likely(masks)
    axes, middle, shape = tuple(range(1, drawn.ndim)), drawn.mean(0), drawn.shape[2:]
    likely = _units(likely, axes, likely.mean(0))

    def fits(changed: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.tensordot(likely, _units(changed, axes, middle), (axes, axes))

    def place_drawn(way: Way) -> npt.NDArray[Any]:
        return _place(drawn.reshape(-1, *shape), way).reshape(drawn.shape)

    given = fits(drawn)
    better = (given > given.diagonal()[:, None]).mean(1)
    least = int(binom.isf(CHANCE, len(masks), USUAL)) + 1
    if (doubtful := better > WORSE).sum() < least or (better <= FITTING).mean() < SURE:
        return
    _, *ways = _ways(*(stack[doubtful].reshape(-1, *shape) for stack in (likely, drawn)))
    if all(min(k, length - k) < 2 for k, length in zip(ways[-1][2], shape, strict=True)):
        del ways[-1]  # by one point masks can be moved and still lie well
    changed = np.array([(likely * _units(place_drawn(way), axes, middle)).sum(axes) for way in ways])
    solved = doubtful & (changed == changed.max(0)) & [(given > one[:, None]).mean(1) <= WORSE for one in changed]
    best, second = np.argsort(-solved.sum(1))[:2]
    alike = fits(place_drawn(ways[best]))
    odd = solved[best] & ((alike > alike.diagonal()[:, None]).mean(1) <= WORSE)
    if odd.sum() >= max(least, 2 * solved[second].sum()):
        how = f"fit their images clearly better than now if {_say_way(ways[best], shape)}"
    else:
        odd, between = better > UNFIT, (better > FITTING) & (better <= UNFIT)
        if odd.sum() < max(least, between.sum() / 2) or (better > FAR).sum() < odd.sum() / 4:
            return
        how = "lie on their images no better than masks of other images do: given to another one, turned or moved"
    files = [
        f"'{masks[number].file}'" for number in sorted(np.flatnonzero(odd).tolist(), key=lambda number: -better[number])
    ]
    yield f"{len(files)} of {len(masks)} masks {how}: {few(files, 10)}; look at these"


def apart(sites: Mapping[str, Sequence[Drawn]]) -> Iterator[tuple[str, str]]:
    """Yield name and line for each site whose masks lie as other sites' do only after mirroring, turning or moving.

    Compared are the site's mean mask and mean image with those of the other sites. A site is named if the changed mean
    mask and the unchanged mean image both have a correlation above 0.9, while the correlations of the unchanged mean
    mask and of the changed mean image are lower than these by more than 0.2. Only structures that lie at the same
    position in all images, such as organs, can show this.
    """
    import numpy as np

    means = {
        site: np.array(
            [np.mean(columns, 0, np.float32) for columns in zip(*((m.marked > 0, m.seen) for m in masks), strict=True)]
        )
        for site, masks in sites.items()
        if len(masks) >= ENOUGH
    }
    axes = tuple(range(1, max((mean.ndim for mean in means.values()), default=1)))
    means = {site: _units(mean, axes, mean.mean(axes, keepdims=True)) for site, mean in means.items()}
    for site, mean in means.items() if len({mean.shape for mean in means.values()}) == 1 < len(means) else ():
        others = _units(np.sum([mean for name, mean in means.items() if name != site], 0), axes)
        for way in _ways(others[:1], mean[:1]):
            (marked, seen), (overlap, alike) = ((others * mean).sum(axes) for mean in (_place(mean, way), mean))
            if min(marked, alike) > ALIKE and min(marked - overlap, alike - seen) > CLEAR:
                yield (
                    site,
                    (
                        f"its masks lie as those of other sites do if {_say_way(way, mean.shape[1:])}, and its images "
                        "do as they are; look at some images with their masks"
                    ),
                )
                break


def odd_images(sites: Mapping[str, Sequence[tuple[str, Channels]]]) -> Iterator[tuple[str, str]]:
    """Yield site and line for each kind of oddity of cases with several images; arguments as in ``odd_channels``."""
    from fairflare.core.statistics.channels import odd_channels

    for site, problems in group_by_key((site, (f"'{file}'", text)) for site, file, text in odd_channels(sites)).items():
        yield from ((site, line) for line in group_faults(problems))


def odd_masks(masks: Sequence[Drawn]) -> Iterator[str]:
    """Yield a line on copied masks of a site, on boxes, on inverted masks, and on masks that lie elsewhere.

    The last are looked for by :func:`find_misplaced` and, if all together show nothing, by :func:`find_two_hands`.

    A mask counts as copied if three or more different images have it. It counts as a box if more than half of its area
    lies in connected parts that fill 0.9 of their bounding box. Boxes are reported if at least 16 masks, and at least
    half of all masks, are boxes.

    A mask counts as inverted if two conditions hold.
    1. It marks mostly what the other masks leave unmarked. Each mask is a vector of 8 points in each direction, 1 where
       nothing is marked, else -1. The vectors' common axis is their first right singular vector, with the sign that
       gives two thirds of the masks, or else those that mark less, a positive cosine. The mask's cosine is below -0.2.
    2. Its ``contrast`` and the median contrast of the masks with a positive cosine have different signs, and both are
       beyond 0.2. So an image with many structures does not count as inverted.

    Fewer than 4 masks are not checked. Inverted masks are not reported if they are less than 5 % of all masks.
    """
    import numpy as np

    same = group_by_key((one.mask, (one.image, one.file)) for one in masks if one.contrast)
    if copied := sorted(
        name for names in map(dict, same.values()) if len({*names.values()}) >= COPIES for name in names.values()
    ):
        yield (
            f"{len(copied)} different images share a mask with two others or more: {name_first(copied)}; was it copied?"
        )
    if len(masks) < LEAST:
        return
    boxes = sorted(one.file for one in masks if one.contrast and one.boxed > 0.5)
    if len(boxes) >= max(ENOUGH, len(masks) / 2):
        yield f"{len(boxes)} of {len(masks)} masks are boxes: {name_first(boxes)}; were outlines to be drawn?"
    marked = (one.marked[(slice(None, None, len(one.marked) // POINTS),) * one.marked.ndim] for one in masks)
    clear, contrast = (
        np.array([np.where(mask, -1, 1).ravel() for mask in marked]),
        np.array([mask.contrast for mask in masks]),
    )
    along = clear @ np.linalg.svd(clear, full_matrices=False)[2][0] / clear.shape[1] ** 0.5
    most = round(1.5 * np.sign(along).mean())  # 0 unless two thirds have one sign; if 0, those that mark more are odd
    along *= np.sign(most + np.sign(along @ clear.mean(1)) / 2)
    usual = np.median(contrast[along > 0])
    odd = (along < -CLEAR) & (contrast * np.sign(usual) < -CLEAR) & (abs(usual) > CLEAR)
    if odd.sum() >= max(1, SHARE * len(masks)):
        yield (
            f"{odd.sum()} of {len(masks)} masks mark mostly what the others leave: "
            f"{name_first(sorted({masks[number].file for number in np.flatnonzero(odd).tolist()}))}; are inside and "
            "outside exchanged in them?"
        )
    elif len(boxes) < len(masks) / 2 and len(judged := [mask for mask in masks if mask.contrast][:MOST]) >= ENOUGH:
        yield from [*find_misplaced(judged)] or (find_two_hands(judged) if len(judged) >= HANDS else ())
