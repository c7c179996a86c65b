"""Read, check and write a site's datalist of images and masks; :mod:`fairflare.data.reading` reads the images.

A site keeps its data in one folder with a ``datalist.json`` in the form of the Medical Segmentation
Decathlon, as MONAI uses it::

    {"training":   [{"image": "images/p01_07.png", "label": "masks/p01_07.png"}, ...],
     "validation": [...],
     "test":       [...]}

For classification ``label`` is the number of the class, from 0, or a list with 1 (present), 0 (absent) or null (not
known) for each finding in ``"class_names"``; a list ``"class_names"`` beside the splits names all
classes, ``"class_groups"`` has groups of classes by number (``{"head": [0, 2], "tail": [1]}``). Further lists named
``test_<name>`` (a corrupted copy of the test images, those of one skin tone, ...) are optional; their images may be in
``test`` too. The results show ``<name>``, so it is made of letters, digits, ``-`` and ``_``. ``test_global`` is the
test list of all sites together: the same list at each site, or each site's share; the common model is measured on
``test_global`` once, for all sites. Entries of a list ``unlabelled`` have no ``label``; a site with only such images
leaves ``training`` empty, and perhaps ``validation`` and ``test``.

Paths are relative to the folder, and links may not leave it unless the site allows that. An image is a PNG, JPEG, BMP
or TIFF file, a ``.npy`` array, a NIfTI or DICOM file, or a folder with the DICOM files of one series; one slice of a
volume is picked with a third key, ``"slice": 12``. More keys are optional: ``"patient"`` (the site's own key of a
person, who may then be in one split only; it never leaves the site), ``"volume"`` (identifier of a volume whose slices
are separate files), ``"spacing"`` (size of a pixel in mm: rows, columns, and slices if it is known), ``"attributes"``
of the person (:mod:`fairflare.data.listing.attributes`). ``"channels": ["T2w", "ADC"]`` beside the splits: each
``image`` is then a list of as many files, or one file whose fourth axis they are. ``"synthetic": true`` marks the
images as synthetic; the results then state this, too.

Every problem is a :class:`DataError` that names the site, the file and the key and tells how to correct it. The error's
``public`` text has no file name in it: only this text may leave the site.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.base import checks
from fairflare.base.disk.files import keys_once, lies_in, real_folders, unreadable, write_whole
from fairflare.base.site_data import UNLABELLED
from fairflare.data.image_file import PICTURES as PICTURES
from fairflare.data.image_file import suffix_of as suffix_of
from fairflare.data.listing.attributes import doubts_of
from fairflare.data.listing.checking import EXTRA_NAME, LINKS, CheckedList
from fairflare.data.listing.checking import SPLITS as SPLITS
from fairflare.data.listing.samples import DataError as DataError
from fairflare.data.listing.samples import Datalist as Datalist
from fairflare.data.listing.samples import Sample as Sample
from fairflare.data.listing.samples import shareable as shareable


def load_datalist(
    data_root: str | os.PathLike[str],
    datalist: str = "datalist.json",
    *,
    site: str,
    class_labels: bool = False,
    several: bool = False,
    linked_roots: Sequence[str] = (),
    problems: list[DataError] | None = None,
) -> Datalist:
    """Read and check a datalist; the images themselves are not opened.

    Args:
        data_root: folder of the site's data.
        datalist: name of the datalist inside ``data_root``, or an absolute path.
        site: name of the site for the messages.
        class_labels: whether ``label`` is the number of a class; otherwise it is the path of a mask.
        several: whether ``image`` may be a list of files even if the datalist does not declare ``channels``.
        linked_roots: further folders that links in ``data_root`` may lead to.
        problems: list to which all errors within the datalist are added, instead of the first one being raised;
            entries with an error are left out of the result.

    Raises:
        DataError: the folder or the list is missing or malformed, a split is missing or empty, an entry lacks
            a key, a file does not exist or lies outside ``data_root``, a link (to a file or the datalist) leads out of
            both ``data_root`` and ``linked_roots``, or an image or a patient is in two splits.
    """
    root = Path(os.path.normpath(Path(data_root).expanduser().absolute()))
    checks.refuse({
        f"site '{site}': data_root '{root}' is not a folder; set 'data_root' in the site's fairflare.json to the "
        "folder that holds the datalist": not root.is_dir(),
    }, partial(DataError, public=f"site '{site}': the data folder does not exist"))  # fmt: skip
    file = root / datalist
    folders = real_folders((root, *linked_roots))
    # An absolute path was set by the site itself, like data_root, so it may lie anywhere.
    if file.is_file() and not Path(datalist).is_absolute() and not lies_in(file, folders):
        raise DataError(
            f"site '{site}': datalist '{file}' leads to '{file.resolve()}', outside data_root '{root}'; {LINKS}, or "
            "give 'datalist' as an absolute path",
            f"site '{site}': the datalist leads out of the data folder",
        )
    content = _read_json(file, site)
    checked = CheckedList(site, root, file, class_labels, several, folders, problems=problems)
    splits = checked.splits(content)
    names, groups, labels = None, None, dict[int, str]()
    with checked.note_problems():
        if class_labels:
            names = checked.class_names(content)
            groups = checked.class_groups(content, names)
        else:
            labels = checked.mask_labels(content)
    return Datalist(
        site, file, splits, names, groups, content.get("synthetic") is True, checked.attributes,
        (*doubts_of(checked.attributes, checked.numbers, names or ()), *checked.unread_of(content)), labels,
        tuple(checked.channels),
    )  # fmt: skip


def write_datalist(
    path: str | os.PathLike[str], splits: Mapping[str, Sequence[Mapping[str, Any]]], **extra: Any
) -> None:
    """Write a datalist file atomically; ``extra`` keys (such as ``name``) are written before the splits."""
    more = sorted(split for split in splits if split == UNLABELLED or EXTRA_NAME.fullmatch(split))
    for split in splits:
        checks.choice("split", split, (*SPLITS, *more))
    content = extra | {split: [dict(entry) for entry in splits.get(split, ())] for split in (*SPLITS, *more)}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_whole(Path(path), lambda draft: draft.write_text(text, encoding="utf-8"), durable=False, shared=True)


def labels_in(settings: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return all labels of a site's datalist and its ``class_names``, unchecked; ``[], None`` if it cannot be read.

    Args:
        settings: settings of the site, as in its ``fairflare.json``.
    """
    try:
        content = json.loads((Path(settings["data_root"]) / settings.get("datalist", "datalist.json")).read_bytes())
        entries = [entry for split in content.values() if isinstance(split, list) for entry in split]
        return [entry.get("label") for entry in entries if isinstance(entry, Mapping)], content.get("class_names")
    except (KeyError, TypeError, AttributeError, OSError, ValueError):
        return [], None


def _read_json(file: Path, site: str) -> Any:
    checks.refuse({
        f"site '{site}': datalist '{file}' does not exist; write one (see docs/data.md) or name it with 'datalist' in "
        "the site's fairflare.json": not file.is_file(),
    }, partial(DataError, public=f"site '{site}': the datalist does not exist"))  # fmt: skip
    try:
        # JSON may be in UTF-8 or UTF-16, with or without a byte order mark.
        return json.loads(file.read_bytes(), object_pairs_hook=keys_once)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"site '{site}': datalist '{file}' {unreadable(error)}; correct the file",
            f"site '{site}': the datalist is not readable JSON",
        ) from error
