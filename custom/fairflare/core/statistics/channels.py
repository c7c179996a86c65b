"""Judge by pixels whether the images of a case are channels of one examination, named as at other sites.

What is found are hints for a person who looks at the files: pixels cannot prove that two images are of one patient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import group_by_key, true_texts

Array = npt.NDArray[np.floating]
SIDE, BINS = 48, 16  # largest number of voxels along each axis that are looked at, and of bins of their values
COPY, FRAMES = 0.9999, 0.97  # correlations above which two images are a copy, or look like one series over time
CLEARER = 1.5  # factor by which a mirrored image must fit better than the image itself
ENOUGH = 4  # least number of cases that are compared with each other
UNLIKE = 0.6  # share of the usual likeness below which an image may be of another patient
APART, LESS = 0.1, 0.5  # least distance of two channels' values, and share of it that an exchange must leave at most
SHARES = (10, 25, 50, 75, 90)  # percentiles of the values by which channels are told apart


@dataclass(frozen=True)
class Channels:
    """Describe the images of a case by a few of their voxels.

    Attributes:
        names: name of each channel.
        odd: what is odd about the images of this case alone, in words.
        likeness: how much each further image tells of the first one, in [0, 1].
        values: (channels, percentiles) of the values between the 1st and 99th percentile, which become 0 and 1.
    """

    names: tuple[str, ...]
    odd: tuple[str, ...]
    likeness: Array
    values: Array


def describe_channels(names: Sequence[str], images: Sequence[npt.NDArray[np.generic]]) -> Channels | None:
    """Describe the images of a case, (rows, columns, slices) on one grid, with a name for each; ``None`` of one."""
    if len(names) < 2:
        return None
    steps = tuple(slice(None, None, -(-length // SIDE)) for length in images[0].shape)
    small = [_scale(np.asarray(image[steps], np.float64)) for image in images]
    odd = []
    for (one, a), (other, b) in combinations(zip(names, small, strict=True), 2):
        seen = (a > 0) | (b > 0)
        alike = float(np.corrcoef(a[seen], b[seen])[0, 1]) if a[seen].std() * b[seen].std() > 0 else 0.0
        odd += true_texts({
            f"its {one} and {other} have equal pixels: a copy": alike > COPY,
            f"its {one} and {other} are almost equal, as frames of one series over time": COPY >= alike > FRAMES,
        })  # fmt: skip
    likeness = [_share_information(small[0], image) for image in small[1:]]
    for name, image, correlation in zip(names[1:], small[1:], likeness, strict=True):
        turned = [_share_information(small[0], np.flip(image, axis)) for axis in range(image.ndim)]
        if max(turned) > CLEARER * correlation:
            along = ("rows", "columns", "slices")[int(np.argmax(turned))]
            odd.append(f"its {name} fits {names[0]} better with its {along} in the opposite order: is it mirrored?")
    return Channels(
        tuple(names), tuple(odd), np.array(likeness), np.array([np.percentile(image, SHARES) for image in small])
    )


def odd_channels(sites: Mapping[str, Sequence[tuple[str, Channels]]]) -> Iterator[tuple[str, str, str]]:
    """Yield site, case and text for what is odd about the images of a case, alone and beside the cases of all sites.

    Args:
        sites: name and images of the cases of each site.
    """
    every = [(site, file, seen) for site, files in sites.items() for file, seen in files]
    yield from ((site, file, text) for site, file, seen in every for text in seen.odd)
    for names, alike in group_by_key((one[2].names, one) for one in every).items():
        if len(alike) < ENOUGH:
            continue
        usual = np.median([seen.likeness for *_, seen in alike], axis=0)
        for site, file, seen in alike:
            few = [name for name, share in zip(names[1:], seen.likeness < UNLIKE * usual, strict=True) if share]
            if few:
                yield (
                    site, file,
                    f"its {' and '.join(few)} fits {names[0]} worse than in other cases; is it of this patient?",
                )  # fmt: skip
            others = [one.values for owner, name, one in alike if owner != site] or [
                one.values for _, name, one in alike if name != file
            ]
            middle = np.median(others, axis=0)
            for i, j in combinations(range(len(names)), 2):
                straight, swapped = (_apart(seen.values[[i, j]], middle[order]) for order in ([i, j], [j, i]))
                if _apart(middle[[i]], middle[[j]]) > APART and swapped < LESS * straight:
                    yield site, file, f"its {names[i]} and {names[j]} look exchanged beside other cases"


def _apart(one: Array, other: Array) -> float:
    return float(np.abs(one - other).mean())


def _scale(values: Array) -> Array:
    low, high = np.nanpercentile(values, (1, 99))
    return np.asarray(np.clip(np.nan_to_num(values - low) / max(high - low, 1e-12), 0, 1))


def _share_information(one: Array, other: Array) -> float:
    """Return the mutual information of two images as a share of the mean of their entropies."""
    both = np.histogram2d(one.ravel(), other.ravel(), BINS, ((0, 1), (0, 1)))[0] / one.size
    joint, a, b = (float(-(p[p > 0] * np.log(p[p > 0])).sum()) for p in (both, both.sum(0), both.sum(1)))
    return 2 * (a + b - joint) / max(a + b, 1e-12)
