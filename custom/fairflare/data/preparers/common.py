"""What the preparers share: the command's description of one, and the reading of arrays and folders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.datalist import DataError
from fairflare.data.dicom_files import is_companion
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.names import existing_folder, file_name, listing
from fairflare.data.preparers.splitting import split_groups
from fairflare.data.preparers.writing import Writing, write_pool, write_sites

__all__ = [
    "Dealing", "Item", "Preparer", "Writing", "check_pairs", "existing_folder", "file_name", "files_by_ending",
    "listing", "mask_items", "npz_files", "read_arrays", "split_groups", "write_pool", "write_sites",
]  # fmt: skip


@dataclass(frozen=True)
class Preparer:
    """One data set on the command line.

    Attributes:
        name: of the command.
        text: what it is.
        prepare: the function; gets the options by name.
        options: what only this one has.
        has_source: whether it reads one folder of source files, ``source_dir``.
        dealing: how its images are dealt to sites unless the options say otherwise; None: they are of their sites.
    """

    name: str
    text: str
    prepare: Callable[..., dict[str, Path]]
    options: Sequence[Parameter] = ()
    has_source: bool = True
    dealing: Dealing | None = None


# --- reading the sources ----------------------------------------------------------------------------------


def files_by_ending(folder: Path, endings: Collection[str]) -> list[tuple[str, Path]]:
    """Name without its ending, and path, of the files that have one of the endings; in the order of their names."""
    found = []
    for path in sorted(existing_folder(folder).iterdir()):
        if is_companion(path.name):
            continue
        ending = max((e for e in endings if path.name.lower().endswith(e)), key=len, default=None)
        if ending is not None and path.is_file():
            found.append((path.name[: -len(ending)], path))
    return found


def check_pairs(site: str, folder: Path, images: Mapping[str, Path], masks: Mapping[str, Path], expected: str) -> None:
    """Every image has a mask of its name and every mask an image, and there is at least one.

    Raises:
        DataError: says what was ``expected`` and which files have no partner, or what else is in the folder.
    """
    if images and set(images) == set(masks):
        return
    pairs = ((images, masks), (masks, images))
    alone = [files[stem].name for files, others in pairs for stem in sorted(set(files) - set(others))]
    seen = f"without partner: {listing(alone)}" if alone else f"found {listing(path.name for path in folder.iterdir())}"
    raise DataError(f"site '{site}': expected {expected}; {seen}")


def npz_files(source: Path, prefix: str, names: Sequence[str]) -> dict[str, Path]:
    """The file of each site, ``<prefix><site>.npz``; all must be there."""
    existing_folder(source)
    files = {name: source / f"{prefix}{name.lower()}.npz" for name in names}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            f"'{source}': expected {', '.join(file.name for file in files.values())}; missing: "
            f"{', '.join(missing)}; found {listing(path.name for path in source.glob('*.npz'))}"
        )
    return files


def read_arrays(site: str, file: Path, keys: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of one length, ``images`` among them as uint8."""
    try:
        with np.load(file, allow_pickle=False) as content:
            arrays = {key: content[key] for key in keys}
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"site '{site}': '{file}' cannot be read: {error}; fetch the file again") from error
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) != 1 or arrays["images"].dtype != np.uint8:
        raise DataError(f"site '{site}': '{file}': expected uint8 images and as many of each array, got {lengths}")
    return arrays


def mask_items(site: str, file: Path, values: Sequence[int]) -> Iterator[Item]:
    """Images (n, height, width, 3) with masks (n, height, width) of the given values and ids ``<source>_t<tile>``."""
    arrays = read_arrays(site, file, ("images", "masks", "ids"))
    images, masks, ids = arrays["images"], arrays["masks"], [str(name) for name in arrays["ids"]]
    if images.ndim != 4 or images.shape[:3] != masks.shape:
        raise DataError(
            f"site '{site}': '{file}': expected images (n, height, width, 3) uint8, masks (n, height, width) "
            f"and n ids, got images {images.shape} {images.dtype}, masks {masks.shape} and {len(ids)} ids"
        )
    strange = sorted(set(np.unique(masks).tolist()) - set(values))
    if strange:
        raise DataError(f"site '{site}': '{file}': masks have the values {strange}; expected {list(values)}")
    for image, mask, name in zip(images, masks, ids, strict=True):
        grey = image[:, :, 0] if (image == image[:, :, :1]).all() else image
        yield Item(file_name(name), name.split("_t")[0], grey, mask.astype(np.uint8))
