"""Deal the images of one data set to several sites: by partitions, with corruptions, a common test set and folds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fairflare.base.checks import choice, group_by_key, number, refuse
from fairflare.base.settings import Flag, Fraction, NonNegativeInt, PositiveInt, field_names, settings
from fairflare.base.task import SPLIT_GLOBAL
from fairflare.data import partitions
from fairflare.data.corruptions import CORRUPTIONS, REFERENCE_SIZE, SEVERITIES, image_seed
from fairflare.data.datalist import DataError
from fairflare.data.partitions import apportion
from fairflare.data.preparers.items import Item, corrupt_image, resize_image
from fairflare.data.preparers.names import file_name
from fairflare.data.preparers.options import option
from fairflare.data.preparers.splitting import FRACTIONS, check_fractions, draw_folds, group_labels

Partition = Literal["site", "iid", "dirichlet", "two-pool", "shards", "quantity"]
ShardMode = Literal["literal", "complement"]
BY_CLASS = ("dirichlet", "two-pool", "shards")
PANEL = "How the images become those of several sites"  # heading of these options in the command's help
NO_CORRUPTION = "none"  # value on the command line for no corruption


@settings
class Dealing:
    """Store the rule by which images are dealt to sites, and the corruption of some sites' images.

    Args:
        partition: ``"site"``: as the data say (all of one site where they say nothing). The others deal all images to
            ``sites`` sites, a patient's together: ``"iid"``; ``"dirichlet"`` with ``alpha``; ``"two-pool"`` (FedISM:
            one pool for the clean sites, one for the corrupted) with ``alpha`` and ``corrupt_sites``; ``"shards"``
            (FedMRL) with ``eta`` and ``shard_mode``; ``"quantity"``: alike in classes, their sizes from Dir(alpha).
        sites: how many.
        alpha: concentration.
        eta, shard_mode: see :func:`fairflare.data.partitions.shard_partition`.
        min_size: images (patients) that every site must get.
        folds: number of folds of a stratified cross-validation, within each site or (``global_test``) over all; 0: one
            split. An image is at one site in all folds.
        fractions: shares of training, validation and test.
        common_test: draw the test images from all before the rest is dealt; every site gets them, a corrupted site in
            its own quality, and where nothing is corrupted also as ``test_global``.
        global_test: draw the test images from all before the rest is dealt (with ``folds``: the folds from all); every
            site gets all of them as ``test_global``, and its own share, each class in proportion to what else it has of
            it, as ``test``. With partition ``"site"``: the test images of all sites together.
        corrupt: ``"gaussian_noise:3"`` or ``"motion_blur:1"`` ...: kind and severity, for the images of the last
            ``corrupt_sites`` sites. With ``common_test`` every site also gets the test images in both qualities
            (``test_clean``, ``test_corrupted``).
        corrupt_sites: how many.
        size: height and width in pixels that images are brought to; 0: files are copied as they are (224 where a
            site is corrupted).
    """

    partition: Partition = "site"
    sites: PositiveInt | None = None
    alpha: Annotated[float, Field(strict=True, ge=1e-6, le=1e9)] = 1.0
    eta: Fraction = 1.0
    shard_mode: ShardMode = "literal"
    min_size: NonNegativeInt = 10
    folds: NonNegativeInt = 0
    fractions: tuple[float, ...] = FRACTIONS
    common_test: Flag = False
    global_test: Flag = False
    corrupt: str | None = None
    corrupt_sites: NonNegativeInt = 0
    size: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check_fractions(self.fractions)
        no_test = next((n for n in ("common_test", "global_test") if getattr(self, n) and not self.fractions[2]), None)
        refuse({
            f"folds must be an integer >= 2, got {self.folds}": self.folds == 1,
            "folds and common_test exclude each other: a fold is the test of its site; see global_test":
                self.folds > 0 and self.common_test,
            "common_test and global_test exclude each other: a site's own test is one or the other":
                self.common_test and self.global_test,
            f"{no_test} needs a share of test images, got fractions {list(self.fractions)}": no_test is not None,
            f"partition {self.partition!r} needs the number of sites": self.partition != "site" and self.sites is None,
            "the number of sites is of a partition other than 'site'; choose one, or leave it out":
                self.partition == "site" and self.sites is not None,
            "partition 'two-pool' needs corrupt_sites: how many sites the second pool is for":
                self.partition == "two-pool" and not self.corrupt_sites,
            "corrupt and corrupt_sites belong together":
                (self.corrupt is None) != (self.corrupt_sites == 0) and self.partition != "two-pool",
        })  # fmt: skip
        _ = self.corruption  # checks its kind and severity

    @property
    def corruption(self) -> tuple[str, int] | None:
        """Return the kind and severity of the corruption, or None if images are not corrupted."""
        if self.corrupt is None:
            return None
        kind, _, severity = self.corrupt.partition(":")
        choice("corrupt", kind, CORRUPTIONS)
        refuse(
            {f"corrupt must be KIND:SEVERITY such as gaussian_noise:3, got {self.corrupt!r}": not severity.isdigit()}
        )
        return kind, int(number("severity", int(severity), low=1, high=len(SEVERITIES), whole=True))

    @property
    def edge(self) -> int:
        """Return the height and width in pixels to which images are resized; 0: images keep their size."""
        return self.size or (REFERENCE_SIZE if self.corrupt is not None else 0)


def deal(items: Sequence[Item], dealing: Dealing, seed: int) -> dict[str, list[Item]]:
    """Deal images to sites, and return the images of each site.

    Args:
        items: all images; the ``mask`` of each is a mask or the number of a class.
        dealing: rule by which the images are dealt.
        seed: random seed of all draws.

    Raises:
        DataError: there are no images, or no classes although the partition needs them.
        ValueError: these images cannot be partitioned in this way.
    """
    refuse({"no images were found; give the folder that holds them": not items}, DataError)
    dealt = dealing.partition != "site"
    if dealt or dealing.common_test or (dealing.global_test and len({i.name.lower() for i in items}) < len(items)):
        items = [_apart(item) for item in items]
    if dealt and dealing.global_test and dealing.folds:
        folds = draw_folds(items, dealing.folds, "all images", image_seed("folds", seed))
        items = [replace(item, fold=folds[item.group]) for item in items]
    held_out = dealing.common_test or (dealt and dealing.global_test and not dealing.folds)
    held, rest = _hold_out(items, dealing, seed) if held_out else ([], list(items))
    sites = _deal(rest, dealing, seed) if dealt else group_by_key((item.site or "site-1", item) for item in rest)
    refuse({
        f"corrupt_sites={dealing.corrupt_sites}, but there are {len(sites)} sites": dealing.corrupt_sites > len(sites)
    })  # fmt: skip
    if dealing.global_test:
        sites = {name: [*sites[name], *share] for name, share in _shares(held, sites, seed).items()}
    bad = corrupted_sites(list(sites), dealing)
    tests = {quality: _tests(held, dealing, seed, quality) for quality in (False, True) if dealing.common_test}
    return {
        name: [*(_quality(item, dealing, seed, name in bad) for item in items), *tests.get(name in bad, ())]
        for name, items in sites.items()
    }


def _apart(item: Item) -> Item:
    """Return an item whose name, group and patient are made unique by the name of its site.

    Two sites may use one identifier for different patients.
    """
    if not item.site:
        return item
    return replace(
        item,
        name=item.name if item.name.startswith(item.site) else f"{file_name(item.site)}_{item.name}",
        group=f"{item.site}/{item.group}",
        patient=item.patient and f"{item.site}/{item.patient}",
    )


def corrupted_sites(names: Sequence[str], dealing: Dealing) -> list[str]:
    """Return the names of the sites with corrupted images, which are the last ones."""
    return list(names[len(names) - dealing.corrupt_sites :]) if dealing.corrupt is not None else []


def _hold_out(items: Sequence[Item], dealing: Dealing, seed: int) -> tuple[list[Item], list[Item]]:
    """Draw the common test images by group, each class in the same share; return them and the remaining images."""
    groups, labels = group_labels(items)
    share = dealing.fractions[2]
    _, part = partitions.stratified_split(labels, (1 - share, share), seed=image_seed("common test", seed))
    test = {groups[index] for index in part.tolist()}
    refuse({f"{len(groups)} patient(s) or image(s) are too few for a common test set": not test}, DataError)
    return [item for item in items if item.group in test], [item for item in items if item.group not in test]


def _shares(held: Sequence[Item], sites: Mapping[str, Sequence[Item]], seed: int) -> dict[str, list[Item]]:
    """Divide held-out images into the sites' own test sets, each class in proportion to its number at each site."""
    groups, labels = group_labels(held)
    counts = {name: Counter(group_labels(items)[1]) for name, items in sites.items()}
    owner: dict[str, str] = {}
    for label in sorted(set(labels)):
        members = [group for group, group_label in zip(groups, labels, strict=True) if group_label == label]
        rng = np.random.default_rng(image_seed(f"own test {label}", seed))
        numbers = apportion([counts[name][label] or 1e-6 for name in sites], len(members))
        owners = [name for name, n in zip(sites, numbers, strict=True) for _ in range(n)]
        owner |= {members[i]: name for i, name in zip(rng.permutation(len(members)).tolist(), owners, strict=True)}
    return {
        name: [replace(item, site="", splits=("test",)) for item in held if owner[item.group] == name] for name in sites
    }


def _deal(items: Sequence[Item], dealing: Dealing, seed: int) -> dict[str, list[Item]]:
    refuse({
        f"partition {dealing.partition!r} needs classes, and these images have masks; use iid, quantity":
            dealing.partition in BY_CLASS and not all(isinstance(item.mask, int) for item in items),
    }, DataError)  # fmt: skip
    groups, labels = group_labels(items)
    sized: dict[str, Any] = {"alpha": dealing.alpha, "min_size": dealing.min_size}
    way: Any = {
        "iid": partitions.iid_partition,
        "dirichlet": partial(partitions.dirichlet_partition, **sized),
        "two-pool": partial(partitions.two_pool_partition, num_corrupted=dealing.corrupt_sites, **sized),
        "shards": partial(partitions.shard_partition, eta=dealing.eta, mode=dealing.shard_mode),
        "quantity": partial(partitions.quantity_partition, **sized),
    }[dealing.partition]
    parts = way(labels, dealing.sites, seed=seed)
    by_group = group_by_key((item.group, item) for item in items)
    sites = {
        f"site-{number + 1}": [replace(item, site="") for index in part.tolist() for item in by_group[groups[index]]]
        for number, part in enumerate(parts)
    }
    if small := [name for name, items in sites.items() if len({item.group for item in items}) < 3]:
        raise ValueError(f"{', '.join(small)} would get fewer than 3 images; use fewer sites, another seed or alpha")
    return sites


def _tests(common: Sequence[Item], dealing: Dealing, seed: int, own_bad: bool) -> list[Item]:
    """Return the common test images for a site; ``own_bad``: the site's own images are corrupted."""
    tests = []
    for item in common:
        clean: tuple[str, ...] = ("test", SPLIT_GLOBAL)
        if dealing.corrupt is not None:
            bad = replace(_quality(item, dealing, seed, True), name=f"{item.name}_corrupted", shared=True)
            tests.append(replace(bad, splits=("test", "test_corrupted") if own_bad else ("test_corrupted",)))
            clean = ("test_clean",) if own_bad else ("test", "test_clean")
        more = (f"test_{item.attribute}",) if item.attribute else ()
        tests.append(replace(_quality(item, dealing, seed, False), splits=(*clean, *more), shared=True))
    return tests


def _quality(item: Item, dealing: Dealing, seed: int, bad: bool) -> Item:
    corruption, edge = dealing.corruption, dealing.edge
    if not edge:  # without a size, images are not corrupted either
        return item
    image = (
        partial(resize_image, item.image, edge)
        if corruption is None or not bad
        else partial(corrupt_image, item.image, *corruption, image_seed(f"{corruption[0]}/{item.name}", seed), edge)
    )
    return replace(
        item, image=image,
        mask=item.mask if isinstance(item.mask, int) else partial(resize_image, item.mask, edge, is_mask=True),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ command line


def options(usual: Dealing) -> list[Parameter]:
    """Return the command-line options of :class:`Dealing`, with the data set's usual rule as defaults."""
    declared: tuple[tuple[str, Any, str, Any], ...] = (
        ("partition", Partition, "Who gets what; site: as the data say.", usual.partition),
        ("sites", int | None, f"How many (default: {usual.sites or 'as they are'}).", None),
        ("alpha", float, "Of dirichlet, two-pool and quantity.", usual.alpha),
        ("eta", float, "Of shards.", usual.eta),
        ("shard_mode", ShardMode, "Of shards.", usual.shard_mode),
        ("min_size", int, "Of a site, in patients, or in images where none are known.", usual.min_size),
        ("folds", int, "Of a cross-validation; 0: none.", usual.folds),
        ("fractions", tuple[float, float, float], "Of training, validation and test.", usual.fractions),
        ("common_test", bool | None, "One test for all sites.", None),
        ("global_test", bool | None, "A test drawn from all first: test_global, and a share of it at each site.", None),
        ("corrupt", str | None, "KIND:SEVERITY; gaussian_noise or motion_blur, 1 to 5; or none.", usual.corrupt),
        ("corrupt_sites", int | None, f"So many last ones (default: {usual.corrupt_sites}).", None),
        ("size", int, "Bring images to SIZE x SIZE; 0: copied as they are.", usual.size),
    )
    return [option(name, kind, text, default, rich_help_panel=PANEL) for name, kind, text, default in declared]


def take_options(options: dict[str, Any], usual: Dealing) -> Dealing:
    """Take the options of :class:`Dealing` out of all options, and make the rule from them.

    Options that are not given have the data set's usual value, except where the given options exclude it: with the
    partition ``"site"`` there is no number of sites, and without a corruption there are no corrupted sites.
    """
    given = {name: options.pop(name) for name in field_names(Dealing)}
    corrupt = None if given["corrupt"] == NO_CORRUPTION else given["corrupt"]
    usually: dict[str, Any] = {
        "sites": None if given["partition"] == "site" else usual.sites,
        "common_test": usual.common_test and not given["global_test"],
        "global_test": usual.global_test and not given["common_test"],
        "corrupt_sites": usual.corrupt_sites if corrupt is not None or given["partition"] == "two-pool" else 0,
    }
    rule = {name: usually[name] if value is None and name in usually else value for name, value in given.items()}
    return Dealing(**{**rule, "corrupt": corrupt, "fractions": tuple(given["fractions"])})
