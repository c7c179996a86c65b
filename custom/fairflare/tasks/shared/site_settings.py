"""Define the settings that tasks read from a site's private file, and the errors about this file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fairflare.base import checks
from fairflare.base.aspect import SITE_KEYS
from fairflare.base.checks import refuse
from fairflare.base.settings import Flag, NonNegativeInt, PositiveInt, Text, field_names, settings
from fairflare.data.datalist import DataError, Datalist
from fairflare.data.decoded import DECODED_BYTES, DecodedVolumes
from fairflare.data.image_file import MAX_IMAGE_BYTES

CACHE_BYTES = 2**30  # default memory for decoded images of a site, all splits together
OTHER_KEYS = (  # keys of the site file that other parts than the task read
    "state_root", "checkpoint_root", "models_in_memory", "num_threads", "device", "isolate", "sites",
    "preprocess_cache", "prior", "initial_weights", "metrics_by_class", "precision", "channels_last", "compile",
    "deterministic", "networks", "bundle_classes", "min_cases", "train_below_min_cases", "save_seconds", *SITE_KEYS,
)  # fmt: skip

Filename = Annotated[str, Field(min_length=1)]


@settings
class FolderSettings:
    """Define the settings that every task reads from a site's private file: the data folder, memory and threads.

    Args:
        data_root: folder with the data; without it the data are synthetic, where the run allows that.
        phantom: True: made-up data, on purpose; False: never. Default: made-up data where the site file names no data
            for any site and the task allows it. A MONAI bundle has none.
        datalist: name of the list inside it, or an absolute path; default ``datalist.json``.
        linked_roots: further folders that links in ``data_root`` may lead to.
        cache_bytes: memory for decoded images of this site; of a bundle, as they are before the first random transform.
        num_workers: threads that decode the images of a batch; 0: the one that trains. The batches are the same.
    """

    data_root: Filename | None = None
    phantom: Flag | None = None
    datalist: Filename | None = None
    linked_roots: list[Filename] = field(default_factory=list)
    cache_bytes: NonNegativeInt = CACHE_BYTES
    num_workers: NonNegativeInt = 0


@settings
class SiteSettings(FolderSettings):
    """Define the settings that tasks on images read from a site's private file.

    Args:
        max_image_bytes: memory that one decoded image, mask or volume may take; a larger file is refused by its header.
        decoded_folder: folder for decoded volumes, so that one slice is read without decoding all; default: in the
            site's ``state_root``.
        decoded_bytes: disk space for decoded volumes, in bytes; 0: none is kept.
        phantom_seed: seed of the synthetic data; default: the task's.
        channels: names of the run's channels that the site's cases have, where they lack one; default: all.
    """

    max_image_bytes: PositiveInt = MAX_IMAGE_BYTES
    decoded_folder: Filename | None = None
    decoded_bytes: NonNegativeInt = DECODED_BYTES
    phantom_seed: NonNegativeInt | None = None
    channels: list[Text] | None = None

    def __post_init__(self) -> None:
        given = dict.fromkeys(self.linked_roots, "linked_roots must be absolute paths of folders")
        if self.decoded_folder is not None:
            given[self.decoded_folder] = "decoded_folder must be the absolute path of a folder"
        checks.refuse({
            f"{problem}, got {folder!r}": not Path(folder).expanduser().is_absolute()
            for folder, problem in given.items()
        })  # fmt: skip

    def seed_or(self, default: int) -> int:
        """Return the seed of the site's synthetic data, or the task's if the site has none of its own."""
        return default if self.phantom_seed is None else self.phantom_seed

    def memory(self) -> dict[str, Any]:
        """Return the arguments of :class:`FolderImages` about memory, threads and the cache of decoded volumes."""
        folder, size = self.decoded_folder, self.decoded_bytes
        return {
            "kept": DecodedVolumes(Path(folder).expanduser(), size) if folder is not None and size else None,
            **{name: getattr(self, name) for name in ("cache_bytes", "num_workers", "max_image_bytes")},
        }

    def places_of(self, run: Sequence[str], site: str, datalist: Datalist) -> tuple[int, ...]:
        """Return, for each image of a case at a site, its channel of the network's input; -1: the run has no such one.

        Args:
            run: names of the run's channels; none where a case has one image.
            site, datalist: name and datalist of the site.

        Raises:
            DataError: the datalist lacks a channel of the run, and the site's own file does not name those it has.
        """
        there = list(datalist.channels or self.channels or ())
        used = list(run) if self.channels is None else self.channels
        refuse({
            f"the cases have the images {json.dumps(there)}; give the run channels={json.dumps(there)}, in the order "
            "of the network's input": not run and len(there) > 1,
            f"'channels' of the site's fairflare.json is {json.dumps(used)}, and the run has {json.dumps(run)}; name "
            "those that the cases have": bool(run) and not {*used} <= {*run},
            f"the run has the channels {json.dumps(run)}, the datalist {json.dumps(there)}; correct 'channels' of the "
            "datalist, or say in the site's fairflare.json which the cases have: "
            f'"channels": {json.dumps([name for name in there if name in run])}': bool(run) and not {*used} <= {*there},
        }, lambda problem: DataError(
            f"site '{site}': {problem}",
            f"site '{site}': its cases do not have the run's channels ({', '.join(run) or 'one image'}): correct the "
            f'datalist; or, where they lack some, write "channels": {json.dumps([c for c in run if c in there])} into '
            "its fairflare.json",
        ))  # fmt: skip
        return tuple(run.index(name) if name in used else -1 for name in there) if run else (0,)


def read_settings(kind: type[FolderSettings], site: str, given: Mapping[str, Any]) -> Any:
    """Return the content of a site's private file as an object of the settings class ``kind``.

    Raises:
        DataError: a key is unknown, a value cannot be used, or the file names data for other sites but not for
            this one.
    """
    check_keys(kind, site, given)
    with setting_of(site):
        settings = kind(**{name: given[name] for name in field_names(kind) if name in given})
    if settings.data_root is None:
        _refuse_half_settings(site, given, settings)
    elif settings.phantom:
        raise setting_error(site, "phantom", "'phantom' is true and 'data_root' is set; take one of the two out")
    return settings


def check_keys(kind: type[FolderSettings], site: str, given: Mapping[str, Any]) -> None:
    """Raise an error for a key of a site's private file that no part of the program reads.

    Args:
        kind: class of the settings that the task reads.
        site: name of the site, for the message.
        given: content of the file for this site.

    Raises:
        DataError: a key is unknown; the message names it and the nearest known key.
    """
    known = tuple(dict.fromkeys((*field_names(kind), *OTHER_KEYS)))
    for key in (key for key in given if key not in known):
        hint, near = checks.unknown(key, known, "docs/data.md has all"), checks.nearest(key, known)
        raise DataError(
            f"site '{site}': unknown key '{key}' in the site's fairflare.json{hint}",
            # A key near a known one is a typing mistake and may be named; any other key may be private to the site.
            f"site '{site}': unknown key {f'{key:.60}'!r} in the site file{near}"
            if near
            else f"site '{site}': unknown key in the site file",
        )


@contextmanager
def setting_of(site: str, key: str | None = None) -> Iterator[None]:
    """Turn a ``ValueError`` about a key of the site file into a ``DataError``.

    If no key is given, the first word of the error's message is the key.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise setting_error(site, key or text.split()[0].rstrip(":"), text) from error


def setting_error(site: str, key: str, problem: str) -> DataError:
    """Return the error about a key of the site file whose value cannot be used."""
    return DataError(
        f"site '{site}': {problem}; correct it in the site's fairflare.json",
        f"site '{site}': key '{key}' in the site file is not usable",
    )


def _refuse_half_settings(site: str, given: Mapping[str, Any], settings: FolderSettings) -> None:
    """Raise ``DataError`` if a site file names no data for this site, but other keys show that it should.

    Otherwise the site would train on synthetic data by mistake.
    """
    if settings.datalist is not None:
        raise setting_error(
            site, "data_root", "'datalist' is set but 'data_root' is not; set 'data_root' to the folder of the list"
        )
    if settings.phantom is False:
        raise setting_error(site, "phantom", "'phantom' is false and 'data_root' is not set; set 'data_root'")
    blocks: Any = given.get("sites") if isinstance(given.get("sites"), Mapping) else {}
    with_data = [name for name, block in blocks.items() if isinstance(block, Mapping) and "data_root" in block]
    if with_data and not settings.phantom:
        near = checks.nearest(site, with_data, most=1)
        lacks = f"no 'data_root' in the block of '{site}'" if site in blocks else f"no block for '{site}'"
        raise DataError(
            f"site '{site}': the site's fairflare.json gives data to the sites "
            f"{', '.join(map(repr, sorted(with_data)))}, but has {lacks}{near or '.'} Write it under 'sites', or run "
            "the job with these site names",
            f"site '{site}': the site file names data for other sites, but not for this one{near}",
        )
