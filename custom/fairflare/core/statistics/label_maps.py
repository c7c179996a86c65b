"""Check whether a class means the same at every site, by a simple classifier of the other sites' images.

The functions need the features and labels of all sites in one process, as in ``fairflare check-data``; a server of a
federation does not have them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_erosion, binary_fill_holes
from scipy.optimize import linear_sum_assignment

from fairflare.base.checks import group_by_key

Array = npt.NDArray[np.floating]
_CELLS = 8  # number of cells into which a picture is divided in each direction
_CLEAR = 0.2  # a map must explain this much more than the labels do, mean share over the classes that it changes
_EVIDENCE = 16.0  # least squared test statistic z of a certain map, before the term for the number of maps
# Of :func:`find_exchanged`: features of a region, least number of masks of either kind, mean over standard deviation.
_RATIOS, _LEAST, _APART = [0, 2, 5], 8, 2.5
_NEARER = 0.6  # of :func:`mistaken`: share of the distance from the same structure elsewhere


@dataclass(frozen=True)
class LabelMap:
    """Describe how one site's labels agree with a nearest-centroid classifier trained on the other sites' images.

    Attributes:
        agreement: share of the site's images whose label is the class with the nearest centroid, mean over the site's
            classes.
        looks_like: class that the images of each label of the site resemble most; different labels have different
            classes.
        explained: share of the images whose nearest class is that of ``looks_like``, mean over the site's classes.
        certain: whether ``looks_like`` explains so many more images than the labels do that this is not by chance.
        enough: whether the images of the two most frequent labels are so many that a swap of both would be certain.
    """

    agreement: float
    looks_like: dict[int, int]
    explained: float
    certain: bool
    enough: bool


def features_of(picture: Array) -> Array:
    """Return the mean and standard deviation of a picture in each of 8 by 8 cells.

    Args:
        picture: (channels, height, width), finite, at least 8 by 8.

    Returns:
        (channels * 128,) float32.
    """
    return np.concatenate([
        values
        for band in np.array_split(picture, min(_CELLS, picture.shape[1]), axis=1)
        for cell in np.array_split(band, min(_CELLS, picture.shape[2]), axis=2)
        for values in (cell.mean((1, 2)), cell.std((1, 2)))
    ]).astype(np.float32)  # fmt: skip


def regions_of(target: npt.NDArray[Any], volume: bool = False) -> dict[int, Array]:
    """Return size and place of the background (0) and of each structure (from 1) that a mask contains.

    They are the square root of the share of the picture, the share of the picture's edge, mean and spread of the
    distance from the centre of all structures, the share of pixels at the region's own edge, and in the slice of a
    volume the place along its second axis, 0.5 at that centre: grey values are left out, since they differ between
    stains and scanners. Size and place show whether codes are swapped, shifted or inverted.

    Args:
        target: (structures, height, width), above 0 inside.
        volume: whether the mask is a slice of a volume. The place along its first axis is not used, since this axis may
            run from left to right, where patients differ.
    """
    inside = np.concatenate([~(target > 0).any(0, keepdims=True), target > 0])
    rim = ~binary_erosion(np.ones(inside.shape[1:], bool))
    rows, columns = np.indices(rim.shape) / max(rim.shape)
    middle = [float(axis[~inside[0]].mean()) if not inside[0].all() else 0.5 for axis in (rows, columns)]
    far = np.hypot(rows - middle[0], columns - middle[1])
    return {
        number: np.array([
            math.sqrt(region.mean()), region[rim].mean(), far[region].mean(), far[region].std(),
            _edge_of(region).sum() / region.sum(), 0.5 + volume * (columns[region].mean() - middle[1]),
        ])
        for number, region in enumerate(inside) if region.any()
    }  # fmt: skip


def _edge_of(region: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the pixels of a region beside pixels outside of it; the edge of the picture is none."""
    return np.asarray(region & ~binary_erosion(region, border_value=1))


def find_exchanged(masks: Sequence[Mapping[int, Array]]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield two structures and the numbers of the masks of one site in which they look exchanged.

    If the codes are exchanged in some masks, the structures exchange size and place there. The logarithm of the ratio
    of their features, which otherwise scatters around one value, then scatters around two values, one minus the other.
    A pair is yielded if such a logarithm is above 0 in at least 8 masks and not in at least 8 others, if both means are
    beyond 2.5 standard deviations and differ in size by less than two thirds, and if every other logarithm that is as
    clear changes its sign too; where a structure is left of the other in some masks and right of it in others, that of
    the size does not.

    Args:
        masks: the features of :func:`regions_of` by structure, of each mask.
    """
    for pair in combinations(sorted({number for mask in masks for number in mask if number}), 2):
        numbers = np.array([n for n, mask in enumerate(masks) if mask.keys() >= {*pair}], int)
        both = np.array([[masks[n][number][_RATIOS] for number in pair] for n in numbers]).reshape(-1, 2, len(_RATIOS))
        ratios = np.diff(np.log(np.maximum(both, 1e-6)), axis=1)[:, 0]
        for above in ratios.T > 0:
            sides = [ratios[above], ratios[~above]]
            if min(map(len, sides)) >= _LEAST:
                mean, spread = (np.array([function(side, 0) for side in sides]) for function in (np.mean, np.std))
                clear = (abs(mean) > _APART * spread).all(0)
                opposite = (mean.prod(0) < 0) & (_APART * abs(mean.sum(0)) < abs(mean).max(0))
                if clear.any() and opposite[clear].all():
                    yield *pair, numbers[above == (2 * above.sum() < len(above))].tolist()
                    break


def shape_of(region: npt.NDArray[np.bool_]) -> Array:
    """Return seven numbers on shape and place of a region, whatever its size and whatever else is in the picture.

    They are the share of the region in the region without its holes, the share of the picture's edge, mean and spread
    of the distance from the region's centre and the length of its own edge, in square roots of its area, and the row
    and column of the centre, as shares of the sides.

    Args:
        region: (height, width), True inside, at least one pixel.
    """
    inside, rim = np.argwhere(region), np.concatenate([region[0], region[-1], region[:, 0], region[:, -1]])
    far, side = np.linalg.norm(inside - inside.mean(0), axis=1), math.sqrt(len(inside))
    return np.array(
        [len(inside) / binary_fill_holes(region).sum(), rim.mean(), far.mean() / side, far.std() / side,
         _edge_of(region).sum() / side, *(inside.mean(0) / region.shape)]
    )  # fmt: skip


def mistaken(shapes: Mapping[str, Mapping[int, Array]], among: Collection[str]) -> dict[str, dict[int, int]]:
    """Return, by site, the structures whose mean shape is much nearer to that of another structure at other sites.

    So sites can be compared that drew different structures. Shapes are divided by their standard deviation within
    structures and sites. A structure is returned if its mean is more than 1 from that of the same structure at every
    other site, and less than 0.6 of the smallest such distance from that of another structure at one of them.

    Args:
        shapes: by site and structure (0: background) the shapes of :func:`shape_of`, (n, 7).
        among: sites to judge; the others are only compared with.
    """
    enough = {
        site: {k: rows for k, rows in by_number.items() if len(rows) >= _LEAST} for site, by_number in shapes.items()
    }
    within = np.concatenate(
        [np.zeros((1, 7)), *(rows - rows.mean(0) for by_number in enough.values() for rows in by_number.values())]
    )
    scale = np.where(within.std(0) > 1e-6, within.std(0), np.inf)
    means = {site: {k: rows.mean(0) / scale for k, rows in by_number.items()} for site, by_number in enough.items()}
    suspects = dict[str, dict[int, int]]()
    for site, number in ((one, k) for one in among for k in means[one] if k):
        nearest = {
            label: min(distances)
            for label, distances in group_by_key(
                (k, float(np.linalg.norm(means[site][number] - centre)))
                for other in means.keys() - {site}
                for k, centre in means[other].items()
            ).items()
        }
        best = min(nearest, key=nearest.__getitem__, default=number)
        if nearest.get(number, 0.0) > 1 and nearest[best] < _NEARER * nearest[number]:
            suspects.setdefault(site, {})[number] = best
    return suspects


def judge_maps(features: Mapping[str, Array], labels: Mapping[str, npt.NDArray[np.integer]]) -> dict[str, LabelMap]:
    """Return :func:`label_maps` of all sites, where a site whose map is certain has no part in judging the others.

    Of several such sites the one that its own map explains best, beyond its labels, is taken out first.
    """
    maps = label_maps(features, labels)
    gains = {one.explained - one.agreement: site for site, one in maps.items() if one.certain and len(maps) > 2}
    if not gains:
        return maps
    worst = gains[max(gains)]
    return {**judge_maps({site: rows for site, rows in features.items() if site != worst}, labels), worst: maps[worst]}


def label_maps(features: Mapping[str, Array], labels: Mapping[str, npt.NDArray[np.integer]]) -> dict[str, LabelMap]:
    r"""Compare each site's labels with a nearest-centroid classifier trained on the other sites' images.

    Features are centred at each site on the mean of its class means, so that differences between scanners are not taken
    for differences between classes, and divided by the standard deviation within classes. The centroid of a class is
    the median over the other sites that have the class (the mean of two sites), so that one site with a wrong map has
    little influence. A map is certain if

    .. math:: \frac{b - c}{\sqrt{b + c}} > \sqrt{16 + 2 \ln C!}

    with b images that only the map explains, c images that only the labels explain, and C classes (a bound over all
    maps), and if the map explains 0.2 more than the labels do, as the mean share over the labels that it changes.

    Args:
        features: features of each site's images, (n, d).
        labels: class of each image, (n,), ``>= 0``, by site.

    Returns:
        The result by site, sorted. A site has no entry if it has one class only, or fewer than two classes in common
        with other sites.
    """
    usable = [site for site in sorted(features) if len(np.unique(labels[site])) > 1]
    means, centred, within = {}, {}, []
    for site in usable:
        rows = np.asarray(features[site], np.float64)
        of_class = {int(c): rows[labels[site] == c].mean(0) for c in np.unique(labels[site])}
        middle = np.mean(list(of_class.values()), axis=0)
        centred[site] = rows - middle
        means[site] = {c: mean - middle for c, mean in of_class.items()}
        within.append(centred[site] - np.stack([means[site][int(c)] for c in labels[site]]))
    scale = np.concatenate(within).std(0) if within else np.ones(1)
    scale = np.where(scale > 1e-6 * (scale.max() or 1.0), scale, np.inf)  # infinity removes a feature
    maps = {}
    for site in usable:
        by_class = group_by_key(item for other in usable if other != site for item in means[other].items())
        centroids = {c: np.median(by_class[c], axis=0) for c in sorted(by_class)}
        if len(means[site].keys() & centroids.keys()) > 1:
            maps[site] = _map_at(centred[site] / scale, labels[site], {c: v / scale for c, v in centroids.items()})
    return maps


def _map_at(features: Array, labels: npt.NDArray[np.integer], centroids: Mapping[int, Array]) -> LabelMap:
    known = list(centroids)
    nearest = np.array(known)[np.stack([((features - centroids[c]) ** 2).sum(1) for c in known]).argmin(0)]
    given = [int(c) for c in np.unique(labels) if int(c) in centroids]
    share = np.array([[np.mean(nearest[labels == c] == other) for other in known] for c in given])
    rows, columns = linear_sum_assignment(-share)
    looks_like = {given[row]: known[column] for row, column in zip(rows, columns, strict=True)}
    usable = np.isin(labels, given)
    mapped = np.array([looks_like[int(c)] for c in labels[usable]])
    # 1: only the map of labels explains the image's class; -1: only the image's own label does.
    gain = (nearest[usable] == mapped).astype(int) - (nearest[usable] == labels[usable])
    z = gain.sum() / math.sqrt(max(np.abs(gain).sum(), 1))
    agreed, explained = share[rows, [known.index(c) for c in given]], share[rows, columns]  # of each given class
    gained = (explained - agreed)[[looks_like[c] != c for c in given]]
    least = _EVIDENCE + 2 * math.lgamma(len(known) + 1)
    return LabelMap(
        float(agreed.mean()), looks_like, float(explained.mean()),
        certain=bool(z > 0 and z * z > least and gained.size and gained.mean() > _CLEAR),
        enough=bool(np.sort(np.unique(labels[usable], return_counts=True)[1])[-2:].sum() > least),
    )  # fmt: skip


def describe_mix_up(looks_like: Mapping[int, int], names: Mapping[int, str]) -> str:
    """Describe in words how a site's labels seem to be mixed up (a map of labels other than the identity).

    Args:
        looks_like: class that each label looks like.
        names: name of each class, or of each combination of findings.
    """
    classes = len(names)
    steps = {(label - other) % classes for label, other in looks_like.items()}
    moved = {label: other for label, other in looks_like.items() if label != other}
    if len(looks_like) > 2 and len(steps) == 1:
        step = steps.pop()
        far = f"{step} too high" if step <= classes // 2 else f"{classes - step} too low"
        return f"shifted by {min(step, classes - step)} ({far})"
    if len(moved) == 2 and all(moved.get(other) == label for label, other in moved.items()):
        return f"swapped: {' and '.join(repr(names[label]) for label in sorted(moved))}"
    return "mixed up: " + ", ".join(f"{names[k]!r} looks like {names[other]!r}" for k, other in sorted(moved.items()))
