"""Read and write published data sets by entries that name the places of files and the meaning of columns.

A layout (:func:`list_table_images`, :func:`class_folders`, :func:`pair_images`, ...) is called with the source folder,
the seed and whether folds are drawn, and returns items: a list, or by site. An entry fills in its other arguments by
``functools.partial``, and may name any other function of this form.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import choice, group_by_key, refuse, whole
from fairflare.data.datalist import DataError
from fairflare.data.preparers.contents import strip_ending
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item, Pixels, relabel_mask
from fairflare.data.preparers.listed import attributes_of, split_name
from fairflare.data.preparers.looking import refuse_bad
from fairflare.data.preparers.names import existing_folder, file_name, listing
from fairflare.data.preparers.options import OPTIONS, Preparer
from fairflare.data.preparers.tables import Images, Row, read_table
from fairflare.data.preparers.trees import pairs
from fairflare.data.preparers.writing import Form, Writing, write_pool, write_sites

log = logging.getLogger(__name__)

ONE = re.compile(r"1(\.0*)?(e[+-]?0+)?", re.IGNORECASE)  # matches the ways in which tables write 1

Found: TypeAlias = "Sequence[Item] | Mapping[str, Iterable[Item]]"


def add_people(
    items: Sequence[Item], source: Path, *, table: str, image: str, columns: Mapping[str, str]
) -> tuple[dict[str, Any], list[Item]]:  # fmt: skip
    """Return the declaration of people's attributes for a datalist, and the items with their people's attributes.

    Args:
        items: all images.
        source: folder of the set; the table may lie anywhere below, or be missing.
        table: name of the table.
        image: column with the names of images.
        columns: attributes and their columns, as in :func:`fairflare.data.preparers.listed.columns_of`.
    """
    rows = rows_below(source, table, [image])
    there = {name: column for name, column in columns.items() if rows and column.partition(":")[0] in rows[0]}
    declared, people = attributes_of(there, rows)
    declared = {name: declaration for name, declaration in declared.items() if declaration.get("values") != []}
    known = {row[image]: person for row, person in zip(rows, people, strict=True)}
    values_of_items = ({k: v for k, v in known.get(item.name, {}).items() if k in declared} for item in items)
    return declared, [replace(item, attributes=person) for item, person in zip(items, values_of_items, strict=True)]


def compare_counts(items: Iterable[Item], *, title: str, counts: Mapping[Any, int], of: Callable[[Item], Any]) -> None:
    """Log a warning if the numbers of images differ from the published ones.

    Args:
        items: all images.
        title: name of the data set.
        counts: published number of images for each value of ``of``.
        of: function that returns the value by which an image is counted, such as its class number, site or part.
    """
    numbers = Counter(map(of, items))
    counted, expected = [numbers[key] for key in counts], list(counts.values())
    if counted != expected:
        log.warning(
            "%s: expected %s (sum %d), found %s (sum %d); it goes on with these",
            title, expected, sum(expected), counted, numbers.total(),
        )  # fmt: skip


def check_classes(title: str, counts: Mapping[str, int]) -> Callable[[Iterable[Item]], None]:
    """Return a function that compares the number of images of each class with a data set's published numbers."""
    return partial(compare_counts, title=title, counts=dict(enumerate(counts.values())), of=lambda item: item.mask)


def public_set(
    name: str, text: str, read: Callable[..., Found], usual: Dealing | None = None, form: Form | None = None,
    options: Sequence[Parameter] = (), people: Callable[..., tuple[dict[str, Any], list[Item]]] | None = None,
    published: Callable[[Iterable[Item]], None] | None = None,
    targets: Mapping[str, Mapping[str, int] | None] | None = None,
) -> Preparer:  # fmt: skip
    """Return the preparer of one published data set.

    Args:
        name: name of the command.
        text: help text of the command.
        read: a layout, or a function ``(source, seed, folds, **options)``.
        usual: default rule by which images are dealt to sites; None if the images are not dealt, but have sites.
        form: further content of the datalists: class names, settings of the task, source of patients' identifiers.
        options: options that only this set has.
        people: function that adds attributes of the people, such as a partial :func:`add_people`.
        published: function that compares the numbers of images with the published ones, as :func:`compare_counts`.
        targets: ``mask_values`` of ``fairflare.json`` for each value of the option ``target``; None to keep the masks.
    """

    def prepare(
        source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing | None = None, **more: Any
    ) -> dict[str, Path]:
        """Bring the set into the form that sites read.

        Args:
            source_dir: folder with the files of the set.
            out_dir: folder to write to.
            dealing: rule by which images are dealt to sites; default: the set's own rule.
            more: the set's own options, and those of :func:`fairflare.data.preparers.writing.write_sites`.

        Returns:
            Folder of each site.

        Raises:
            DataError: the source is not as expected; the message tells what was expected and what was found.
        """
        writing: Writing = {k: more.pop(k) for k in Writing.__annotations__ if k in more}  # type: ignore[assignment]
        given = {p.name: p.default for p in options if p.default is not Parameter.empty} | more
        source, dealing, notes, settings = Path(source_dir), dealing or usual, form or Form(), {}
        if targets:
            values = targets[choice("target", given.pop("target"), targets)]
            settings = {} if values is None else {"mask_values": dict(values)}
            notes = notes if values is None else replace(notes, task={})  # the form's task is for masks as they are
        all_items = read(source, writing.get("seed", 0), bool(dealing and dealing.folds), **given)
        if dealing is None and published is None and isinstance(all_items, Mapping):
            return write_sites(
                all_items, out_dir, settings, notes, **writing
            )  # images are read and written one at a time
        by_site = all_items.items() if isinstance(all_items, Mapping) else [("", all_items)]
        items = [replace(item, site=item.site or site) for site, items_of_site in by_site for item in items_of_site]
        if published is not None:
            published(items)
        if people is not None:
            declared, items = people(items, source)
            notes = replace(notes, attributes=declared)
        return write_pool(items, out_dir, dealing or notes.dealing, settings, notes, **writing)

    return Preparer(name, text, prepare, (OPTIONS["source_dir"], *options), usual)


# ------------------------------------------------------------------------------------------------------ layouts


def person_of_images(
    source: Path, *, table: str, images: Sequence[str] = ("image",), person: str = ""
) -> dict[str, str]:  # fmt: skip
    """Return the person of each image by a table, keyed by the image's name in small letters and without its ending.

    Args:
        source: folder of the set; the table may lie anywhere below, or be missing.
        table: name of the table.
        images: columns with the names of images.
        person: column with the identifiers of people (lesions); empty if the images of one row are of one person.

    Raises:
        DataError: two rows give different people for one image.
    """
    rows = rows_below(source, table, [*images, *filter(None, [person])])
    keys = [row[person] if person else f"exam-{number}" for number, row in enumerate(rows)]
    key_of_image: dict[str, str] = {}
    for row, key, name in ((row, key, row[name]) for row, key in zip(rows, keys, strict=True) for name in images):
        if key and key_of_image.setdefault(_stem(name), key) != key:
            raise DataError(
                f"{row.where}: '{name}' is of '{key}', and of '{key_of_image[_stem(name)]}' before; take one out"
            )
    return key_of_image


def _stem(name: str) -> str:
    return strip_ending(Path(name).name).lower()


def list_table_images(
    source: Path, seed: int = 0, folds: bool = False, *, tables: Sequence[str], classes: Sequence[str],
    folders: Sequence[str] = (), columns: Sequence[Mapping[str, str]] = ({"image": "image"},),
    sites: Sequence[str] = (), keys: Callable[[Path], Mapping[str, str]] | None = None,
) -> list[Item]:  # fmt: skip
    """Return the images that a table names, with a class each.

    Args:
        source: folder of the set.
        seed: not used.
        folds: whether folds are drawn, so that the table's own split does not count.
        tables: possible names of the table below the source; the first that exists is read.
        classes: names of the classes; without a ``label`` in ``columns``, also names of the columns of 0 and 1.
        folders: possible folders of the images, of which the first that exists is used; empty for anywhere below the
            source.
        columns: names in the table of the columns ``image``, ``label``, ``site``, ``fold`` (train, validation or test;
            a missing value is drawn) and ``usable`` (1), as far as they exist; of several mappings, the first one whose
            columns the table has. Labels and sites are numbers from 0, or names.
        sites: names of the sites.
        keys: function that identifies the person of each image, such as a partial :func:`person_of_images`.
    """
    file = find(source, tables)
    head = read_table(file)[0] if len(columns) > 1 else {}
    called = next(
        (names_of_columns for names_of_columns in columns if set(names_of_columns.values()) <= set(head)), columns[0]
    )
    others = "".join(f"; or {', '.join(names_of_columns.values())}" for names_of_columns in columns[1:])
    rows = read_table(file, [*called.values(), *(() if "label" in called else classes)], others)
    if "usable" in called:
        rows = [row for row in rows if row[called["usable"]] in ("1", "1.0")]
    folder = find(source, folders, "the folder ") if folders else source
    paths = Images(folder).all([row[called["image"]] for row in rows], file)
    labels = _numbers(rows, called["label"], classes) if "label" in called else one_hot(rows, classes)
    places = _numbers(rows, called["site"], sites) if sites else [0] * len(rows)
    people = {} if keys is None else keys(source)
    items = []
    for row, path, label, place in sorted(zip(rows, paths, labels, places, strict=True), key=lambda entry: entry[3]):
        name, site = strip_ending(path.name), sites[place] if sites else ""
        split = split_name(row[called["fold"]], row) if "fold" in called and not folds else ""
        splits = () if split in ("", "training") else (split,)
        person = people.get(_stem(path.name))
        items.append(Item(file_name(name), person or name, path, label, person, site, splits))
    return _group_by_split(items)


def _numbers(rows: Sequence[Row], column: str, names: Sequence[str]) -> list[int]:
    """Return, for each row, the index in ``names`` that the text of a column stands for, as a name or as a number.

    Raises:
        DataError: a text is neither one of the names nor the number of a name.
    """
    known = {f"{number}{point}": number for number in range(len(names)) for point in ("", ".0")}
    if any(row[column] in names for row in rows):
        known = {name: number for number, name in enumerate(names)}
    if strange := [row for row in rows if row[column] not in known]:
        raise DataError(
            f"{strange[0].where}: expected {column} 0 to {len(names) - 1} (or in all rows a name: {listing(names)}), "
            f"got '{strange[0][column]}'"
        )
    return [known[row[column]] for row in rows]


def _group_by_split(items: Sequence[Item]) -> list[Item]:
    """Make each image a group of its own if its person (lesion) has images in two parts of the published split."""
    sides = group_by_key(((item.site, item.group), item.splits) for item in items)
    torn = {key for key, splits in sides.items() if len({*splits}) > 1}
    if torn:
        log.warning("the published split has images of %d lesions in training and in test", len(torn))
    return [replace(item, group=item.name, patient=None) if (item.site, item.group) in torn else item for item in items]


def class_folders(
    source: Path, seed: int = 0, folds: bool = False, *, inside: str, parts: Sequence[str], classes: Sequence[str]
) -> list[Item]:
    """Return the images of a set with a folder for each class, at any depth.

    Args:
        source: folder of the set.
        seed, folds: not used.
        inside: folder below the source that holds the parts; the source may be this folder itself.
        parts: folders that must exist.
        classes: names of the classes, in the order of their numbers.
    """
    root = source if (source / parts[0]).is_dir() else find(source, [inside], "the folder ")
    paths = [path for part in parts for path in Images(root / part).paths]
    names = {path.parent.name for path in paths}
    refuse({
        f"'{root}': expected images in a folder for each of the {len(classes)} classes; missing: "
        f"{listing(set(classes) - names)}; not known: {listing(names - set(classes))}": names != set(classes),
    }, DataError)  # fmt: skip
    paths.sort(key=lambda path: (path.parent.name, path.name))
    return [Item(file_name(path.stem), path.stem, path, classes.index(path.parent.name)) for path in paths]


def site_folders(source: Path, sites: Mapping[str, Sequence[str]], remedy: str = "") -> dict[str, Path]:
    """Return the folder of each site by the first of its possible names that exists, in small or capital letters.

    Raises:
        DataError: a folder is missing; the message gives all names, the existing folders, and the ``remedy``.
    """
    there = {path.name.lower(): path for path in sorted(existing_folder(source).iterdir()) if path.is_dir()}
    folders = {s: next((there[a.lower()] for a in aliases if a.lower() in there), None) for s, aliases in sites.items()}
    if missing := [site for site, folder in folders.items() if folder is None]:
        raise DataError(
            f"'{source}': expected a folder for each site: {', '.join(map(' or '.join, sites.values()))}; "
            f"found {listing(path.name for path in there.values())}; missing: {', '.join(missing)}{remedy}"
        )
    return {site: folder for site, folder in folders.items() if folder is not None}


def all_pairs(site: str, images: Path, masks: Path) -> list[Item]:
    """Return the images of one folder with the masks of the same names in another folder, which may be the same.

    Raises:
        DataError: there are no images, or a file has no partner.
    """
    tree = pairs(images, masks, pictures=True)
    refuse_bad(tree.alone, len(tree.cases) + len(tree.alone), f"image(s) of site '{site}'", None, tree.notes)
    return tree.cases


def pair_images(
    source: Path, seed: int = 0, folds: bool = False, *, sites: Mapping[str, Sequence[str]],
    parts: Mapping[str, tuple[str, ...]], images: str, masks: str, tops: tuple[int, ...] = (),
    labels: tuple[int, ...] = (),
) -> dict[str, list[Item]]:  # fmt: skip
    """Return the images with masks of the same names in two folders of each part of each site.

    Args:
        source: folder of the set.
        seed, folds: not used.
        sites: possible names of the folder of each site.
        parts: folders below a site's folder, each with the splits of its images; without splits, these are drawn.
        images, masks: names of the two folders in a part.
        tops, labels: ranges of grey values in masks and their labels, as in
            :func:`fairflare.data.preparers.items.relabel_mask`; empty if masks stay unchanged.
    """
    return group_by_key(
        (site, replace(
            case, name=f"{file_name(part)}_{file_name(case.name)}".lstrip("_"), splits=splits,
            mask=partial(relabel_mask, case.mask, tops, labels) if labels else case.mask,
        ))
        for (site, folder), (part, splits) in product(site_folders(source, sites).items(), parts.items())
        for case in all_pairs(site, folder / part / images, folder / part / masks)
    )  # fmt: skip


def arrays(
    source: Path, seed: int = 0, folds: bool = False, *, prefix: str, sites: Sequence[str], keys: Sequence[str],
    items: Callable[..., Iterator[Item]], **options: Any,
) -> dict[str, Iterator[Item]]:  # fmt: skip
    """Return the images of a set with a file ``<prefix><site>.npz`` for each site; a file is read when it is needed.

    Args:
        source: folder of the set.
        seed, folds: not used.
        prefix: prefix of the files' names.
        sites: names of the sites; in the files' names they are in small letters.
        keys: names of the arrays beside ``images`` (uint8).
        items: function that makes items from a site's name, its arrays and the set's options.
        options: the set's options.
    """
    files = {name: existing_folder(source) / f"{prefix}{name.lower()}.npz" for name in sites}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise DataError(
            f"'{source}': expected {', '.join(file.name for file in files.values())}; missing: "
            f"{', '.join(missing)}; found {listing(path.name for path in source.glob('*.npz'))}"
        )
    return {
        site: _read_arrays(f"site '{site}': '{file}'", file, keys, partial(items, **options))
        for site, file in files.items()
    }


def _read_arrays(where: str, file: Path, keys: Sequence[str], items: Callable[..., Iterator[Item]]) -> Iterator[Item]:
    try:
        with np.load(file, allow_pickle=False) as content:
            arrays = {key: content[key] for key in ("images", *keys)}
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{where} cannot be read: {error}; fetch the file again") from error
    lengths = {key: len(array) for key, array in arrays.items()}
    refuse({
        f"{where}: expected uint8 images and as many of each array, got {lengths}":
            len(set(lengths.values())) != 1 or arrays["images"].dtype != np.uint8,
    }, DataError)  # fmt: skip
    yield from items(where, arrays)


def tiles(
    where: str, arrays: Mapping[str, npt.NDArray[Any]], *, values: Sequence[int], crop: int | None = None
) -> Iterator[Item]:
    """Yield images (n, height, width, 3) with masks (n, height, width) of the given values and ids ``<source>_t<k>``.

    Args:
        where: site and file, for messages.
        arrays: the arrays ``images``, ``masks`` and ``ids``.
        values: values that masks may have.
        crop: height and width in pixels to crop from the middle of each image; ``None`` for the whole image.

    Raises:
        DataError: shapes or values are not as expected, or an image is smaller than ``crop``.
    """
    images, masks = arrays["images"], arrays["masks"]
    strange = sorted(set(np.unique(masks).tolist()) - set(values))
    height, width = (*masks.shape, 0, 0, 0)[1:3]
    side = (height, width) if crop is None else (whole("crop", crop, low=1),) * 2
    refuse({
        f"expected images (n, height, width, 3) uint8 and masks (n, height, width), got images {images.shape} and "
        f"masks {masks.shape}": images.ndim != 4 or images.shape[:3] != masks.shape,
        f"masks have the values {strange}; expected {list(values)}": bool(strange),
        f"images have {height}x{width} pixels; crop must be no larger, got {crop}": min(height, width) < min(side),
    }, lambda problem: DataError(f"{where}: {problem}"))  # fmt: skip
    top, left = (height - side[0]) // 2, (width - side[1]) // 2
    middle = np.s_[top : top + side[0], left : left + side[1]]
    for image, mask, name in zip(images, masks, map(str, arrays["ids"]), strict=True):
        grey: Pixels = image[:, :, 0] if (image == image[:, :, :1]).all() else image
        yield Item(file_name(name), name.split("_t")[0], grey[middle], mask[middle].astype(np.uint8))


# ------------------------------------------------------------------------------------------------- tables and folders


def find(source: Path, names: Sequence[str], what: str = "") -> Path:
    """Return the first existing file or folder of these names in the source folder; ``/`` separates folders.

    If a folder holds another folder of the same name, the inner one is returned.

    Raises:
        DataError: none of them exists; the message gives ``what``, the expected names, and the existing files.
    """
    path = next((source / name for name in names if (source / name).exists()), None)
    if path is None:
        raise DataError(
            f"'{source}': expected {what}{' or '.join(names)}; found "
            f"{listing(path.name + '/' * path.is_dir() for path in existing_folder(source).iterdir())}"
        )
    return inner if (inner := path / path.name).is_dir() else path


def rows_below(source: Path, name: str, columns: Sequence[str]) -> list[Row]:
    """Read the table of this name, in any case, at the smallest depth below a folder; without one, return no rows.

    Such tables are downloaded separately from the images, so their place is not fixed.

    Raises:
        DataError: the table cannot be read, or lacks one of the columns.
    """
    paths = [path for path in existing_folder(source).rglob("*.*") if path.name.lower() == name.lower()]
    file = min(paths, key=lambda path: (len(path.parts), path), default=None)
    return [] if file is None else read_table(file, columns)


def one_hot(rows: Sequence[Row], names: Sequence[str]) -> list[int]:
    """Return the class of each row from columns of 0 and 1, one for each class.

    Raises:
        DataError: a row has no 1 in these columns, or several.
    """
    marked = [[index for index, name in enumerate(names) if ONE.fullmatch(row[name])] for row in rows]
    if bad := next((row for row, marks in zip(rows, marked, strict=True) if len(marks) != 1), None):
        raise DataError(f"{bad.where}: expected a 1 in one of the columns {', '.join(names)}, got {dict(bad)}")
    return [number for (number,) in marked]
