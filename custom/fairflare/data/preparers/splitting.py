"""Assign the images of a site to splits: as the source says, or drawn by patient, with classes in equal shares."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import multimode

import numpy as np

from fairflare.base.checks import group_by_key, numbers, refuse
from fairflare.data.corruptions import image_seed
from fairflare.data.datalist import SPLITS, DataError
from fairflare.data.partitions import stratified_folds, stratified_split
from fairflare.data.preparers.items import Item

FRACTIONS = (0.6, 0.2, 0.2)  # default shares of training, validation and test
GROUPS = ("head", "medium", "tail")


def check_fractions(fractions: Sequence[float]) -> None:
    """Check the shares of training, validation and test: training and validation above 0, sum 1.

    Raises:
        ValueError: a share is out of range, or the sum is not 1.
    """
    given = tuple(numbers("fraction", dict(zip(SPLITS, fractions, strict=False)), of="split", low=0).values())
    refuse({
        f"fractions must be three shares of sum 1, the first two above 0, got {list(fractions)}":
            len(fractions) != 3 or abs(sum(given) - 1) > 1e-6 or not given[0] or not given[1],
    })  # fmt: skip


def split_groups(
    groups: Iterable[str], *, site: str, seed: int = 0, fractions: Sequence[float] = FRACTIONS
) -> dict[str, str]:
    """Return ``{group: split}``: a seeded shuffle, cut at the fractions (6:2:2), at least one group in every split.

    The result depends only on the set of names, the site's name, the seed and the fractions.

    Raises:
        DataError: there are fewer groups than splits.
    """
    names = sorted(set(groups))
    parts = 3 if fractions[2] else 2
    if len(names) < parts:
        raise DataError(
            f"site '{site}': {len(names)} patient(s) or source image(s), but "
            f"{', '.join(SPLITS[: parts - 1])} and {SPLITS[parts - 1]} need one each; add cases, or write the datalist "
            "by hand",
            f"site '{site}': too few cases for the splits",
        )
    rng = np.random.default_rng([seed, *np.frombuffer(hashlib.sha256(site.encode()).digest()[:16], "<u4").tolist()])
    shuffled = [names[index] for index in rng.permutation(len(names))]
    share = [len(names) * fraction / sum(fractions) for fraction in fractions]
    validation, test = max(1, round(share[1])), max(parts - 2, round(share[2]))
    if validation + test >= len(names):
        validation, test = 1, parts - 2
    counts = dict(zip(SPLITS, (len(names) - validation - test, validation, test), strict=True))
    return dict(zip(shuffled, [split for split, count in counts.items() for _ in range(count)], strict=True))


def assign(
    items: Sequence[Item], *, site: str, seed: int, fractions: Sequence[float], stratified: bool, folds: int
) -> list[list[tuple[str, ...]]]:
    """Return the splits of each item: those that its source gives, else one that is drawn for its whole group.

    Args:
        items: items of the site.
        site: name of the site.
        seed: random seed of the draw.
        fractions: shares of the groups for the splits; the last one is not used if the source defines ``test``.
        stratified: draw each class in the same shares (a group has the class that most of its images have).
        folds: number of folds of a stratified cross-validation, in which each group is tested once and the groups that
            a fold does not test are divided into training and validation in the proportion of the fractions; 0: none.

    Returns:
        List of splits for each fold; a single list without folds.

    Raises:
        DataError: there are too few groups, or folds are requested although the source defines ``test``.
    """
    free = [item for item in items if not item.splits]
    given = {split for item in items for split in item.splits}
    if folds:
        refuse({
            f"site '{site}': its data say which images are for the test, so there are no folds to draw; leave --folds "
            "out": given,
        }, DataError)  # fmt: skip
        tested = {item.group: item.fold for item in items}
        if None in tested.values():
            tested = dict(draw_folds(items, folds, f"site '{site}'", image_seed(f"folds/{site}", seed)))
        drawn = [
            _stratify(
                [item for item in items if tested[item.group] != fold],
                site, image_seed(f"fold {fold}", seed), (*fractions[:2], 0.0),
            )
            for fold in range(folds)
        ]  # fmt: skip
        return [[(chosen.get(item.group, "test"),) for item in items] for chosen in drawn]
    shares = (*fractions[:2], 0.0 if "test" in given else fractions[2])
    if "validation" in given:
        chosen = dict.fromkeys((item.group for item in free), "training")
    elif stratified and free:
        chosen = _stratify(free, site, seed, shares)
    elif free:
        chosen = split_groups((item.group for item in free), site=site, seed=seed, fractions=shares)
    return [[item.splits or (chosen[item.group],) for item in items]]


def draw_folds(items: Sequence[Item], folds: int, whose: str, seed: int) -> dict[str, int]:
    """Return the fold in which each group is tested, each class in all folds alike.

    Args:
        items, folds: as in :func:`assign`.
        whose: name of the owner of the items, for messages.
        seed: random seed of the draw.

    Raises:
        DataError: there are fewer groups than folds.
    """
    names, labels = group_labels(items)
    refuse({
        f"{whose}: {len(names)} patient(s) or image(s) are too few for {folds} folds; use fewer":
            len(names) < max(folds, 3),
    }, DataError)  # fmt: skip
    if max(Counter(labels).values()) < folds:  # no class has a group for each fold, so classes are ignored
        labels = [0] * len(labels)
    with warnings.catch_warnings():  # scikit-learn warns of classes with fewer samples than folds
        warnings.simplefilter("ignore", UserWarning)
        tested = stratified_folds(labels, folds, seed=seed)
    return {names[index]: number for number, part in enumerate(tested) for index in part.tolist()}


def group_labels(items: Sequence[Item]) -> tuple[list[str], list[int]]:
    """Return the groups in the order of their first item, and for each group the class that most of its images have."""
    by_group = group_by_key((item.group, item.mask if isinstance(item.mask, int) else 0) for item in items)
    return list(by_group), [min(multimode(classes)) for classes in by_group.values()]


def _stratify(items: Sequence[Item], site: str, seed: int, fractions: Sequence[float]) -> dict[str, str]:
    names, labels = group_labels(items)
    parts = stratified_split(labels, [f / sum(fractions) for f in fractions], seed=image_seed(f"split/{site}", seed))
    if any(fraction and not len(part) for fraction, part in zip(fractions, parts, strict=True)):
        return split_groups(names, site=site, seed=seed, fractions=fractions)  # every class has too few groups
    return {names[i]: split for split, part in zip(SPLITS, parts, strict=True) for i in part.tolist()}


def frequency_groups(counts: Sequence[int]) -> Mapping[str, list[int]]:
    """Group classes into head, medium and tail by the number of training images of each class.

    Head is the third of the classes with the most images, tail the third with the fewest (rounded down: 7, 9 and 7 of
    HyperKvasir's 23 classes, as in the Fed-MAS paper), medium the rest.

    >>> frequency_groups([5, 100, 7, 50])
    {'head': [1], 'medium': [2, 3], 'tail': [0]}
    """
    third = len(counts) // 3
    cuts = np.split(np.argsort(-np.asarray(counts), kind="stable"), [third, len(counts) - third])
    return {name: sorted(members.tolist()) for name, members in zip(GROUPS, cuts, strict=True)} if third else {}
