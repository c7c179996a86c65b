"""Any images with classes: folders of classes, folders of sites and classes, or a CSV file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Unpack

from fairflare.data.datalist import DataError
from fairflare.data.preparers.common import Dealing, Preparer, Writing, listing, write_pool
from fairflare.data.preparers.listed import (
    Groups,
    add_listing_options,
    check_listing,
    groups_by_site,
    listed_item,
    listed_rows,
    parse_pairs,
    patient_of,
)
from fairflare.data.preparers.tables import Images


def prepare_images(
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    group: Groups = None,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Images with a class each, of one or several sites.

    Without a CSV file the images lie in ``<class>/`` or in ``<site>/<class>/`` below the source folder, all at one
    depth. With one, each row has ``image`` (its path below the source folder, or its name, with or without ending) and
    ``label`` (a number or a name), and may have ``site``, ``patient`` and ``split`` (training, validation or test).

    Args:
        source_dir: folder with the images.
        out_dir: folder to write to.
        csv: the file, below the source folder or an absolute path.
        columns: what the columns are called, where not so: ``{"image": "id_code", "label": "diagnosis"}``.
        classes: their names in the order of their numbers; images of others are refused. Default: all that occur,
            numbers by size, names by the alphabet.
        group: regular expression whose first group is the patient, searched in the path of an image below the source.
        dealing: how the images become those of sites; default: by the data's sites.
        writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    check_listing(csv, columns)
    rows = _from_folders(source) if csv is None else listed_rows(source, source / csv, columns or {}, "label")
    names = class_names([row["label"] for row in rows], classes)
    by_site = groups_by_site(group, {row.get("site", "") for row in rows})
    items = []
    for row in rows:
        path = Path(row["path"])
        label = names.index(row["label"]) if row["label"] in names else -1
        if label < 0:
            raise DataError(f"'{path}' has the label '{row['label']}'; the classes are {', '.join(names)}")
        relative = path.relative_to(source).as_posix()
        patient = row.get("patient") or patient_of(relative, by_site[row.get("site", "")], f"'{relative}'")
        site, split = row.get("site", ""), row.get("split", "")
        items.append(listed_item(source, path, label, site=site, patient=patient, split=split))
    return write_pool(items, out_dir, dealing or Dealing(), class_names=names, **writing)


def class_names(labels: Sequence[str], given: Sequence[str] | None = None) -> list[str]:
    """The names of the classes, in the order of their numbers."""
    if given is not None:
        if len(set(given)) != len(given):
            raise ValueError(f"classes must be different names, got {list(given)}")
        return list(given)
    found = sorted(set(labels))
    if len(found) < 2:
        raise DataError(f"expected at least two classes, found {listing(found)}")
    if all(label.isdigit() for label in found):
        return [str(number) for number in range(max(map(int, found)) + 1)]
    return found


def _from_folders(source: Path) -> list[dict[str, str]]:
    images = Images(source)
    parts = [path.relative_to(source).parts[:-1] for path in images.paths]
    depths = {len(found) for found in parts}
    if depths not in ({1}, {2}):
        shown = listing({"/".join(found) or "the folder itself" for found in parts})
        raise DataError(
            f"'{source}': expected images in <class>/ or in <site>/<class>/, all of one kind, found "
            f"{len(images.paths)} images in {shown}; move them, or name them in a CSV file (--csv)"
        )
    return [
        {"path": str(path), "label": found[-1], "site": found[0] if len(found) == 2 else ""}
        for path, found in zip(images.paths, parts, strict=True)
    ]


def _from_command(
    source_dir: str, out_dir: str, *, columns: Sequence[str] | None, csv: str | None, classes: Sequence[str] | None,
    group: Groups, dealing: Dealing, **writing: Unpack[Writing],
) -> dict[str, Path]:  # fmt: skip
    given = parse_pairs(columns)
    return prepare_images(
        source_dir, out_dir, csv=csv, columns=given, classes=classes, group=group, dealing=dealing, **writing
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_listing_options(parser, of="label", example="image=id_code label=diagnosis", place="path")
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="in the order of their numbers")


PREPARERS = (
    Preparer(
        "images", "any images with classes: folders, or a CSV file", _from_command, _add_options, dealing=Dealing()
    ),
)
