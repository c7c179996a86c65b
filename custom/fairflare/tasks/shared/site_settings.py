"""What tasks on images read of a site's private file, and how what is wrong in it is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fairflare.base import checks
from fairflare.base.settings import Flag, NonNegativeInt, PositiveInt, field_names, settings
from fairflare.data.datalist import DataError
from fairflare.data.decoded import DECODED_BYTES, DecodedVolumes
from fairflare.data.image_file import MAX_IMAGE_BYTES

CACHE_BYTES = 2**30  # decoded images of a site that are kept in memory, all splits together
OTHER_KEYS = (  # of the site file, not the task's business
    "state_root", "checkpoint_root", "models_in_memory", "num_threads", "device", "isolate", "sites",
    "preprocess_cache", "prior", "initial_weights", "metrics_by_class", "submit_model", "examples_folder",
    "precision", "channels_last", "compile", "deterministic", "networks",
)  # fmt: skip

Filename = Annotated[str, Field(min_length=1)]


@settings
class FolderSettings:
    """What every task reads of a site's private file: where its images are, and how many are kept and read at once.

    Args:
        data_root: folder with the data; none: made-up data, where they are wanted.
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
    """What tasks on images read of a site's private file.

    Args:
        max_image_bytes: memory that one decoded image, mask or volume may take; a larger file is refused by its header.
        decoded_folder: folder for decoded volumes, so that a slice is read without the others; default: in the site's
            ``state_root``.
        decoded_bytes: disk space for them; 0: none is kept.
        phantom_seed: seed of the synthetic data; default: the task's.
        adapter_rank: the site trains no more than this rank of a job's adapters; default: all of it.
    """

    max_image_bytes: PositiveInt = MAX_IMAGE_BYTES
    decoded_folder: Filename | None = None
    decoded_bytes: NonNegativeInt = DECODED_BYTES
    phantom_seed: NonNegativeInt | None = None
    adapter_rank: PositiveInt | None = None

    def __post_init__(self) -> None:
        for folder in self.linked_roots:
            if not Path(folder).expanduser().is_absolute():
                raise ValueError(f"linked_roots must be absolute paths of folders, got {folder!r}")
        if self.decoded_folder is not None and not Path(self.decoded_folder).expanduser().is_absolute():
            raise ValueError(f"decoded_folder must be the absolute path of a folder, got {self.decoded_folder!r}")

    def memory(self) -> dict[str, Any]:
        """Return arguments of :class:`FolderImages`."""
        kept = None
        if self.decoded_folder is not None and self.decoded_bytes:
            kept = DecodedVolumes(Path(self.decoded_folder).expanduser(), self.decoded_bytes)
        same = ("cache_bytes", "num_workers", "max_image_bytes")
        return {"kept": kept, **{name: getattr(self, name) for name in same}}


def read_settings(kind: type[FolderSettings], site: str, given: Mapping[str, Any]) -> Any:
    """Return the settings of a site's private file as ``kind``.

    Raises:
        DataError: a key that nobody reads, a value that cannot be used, data for other sites but not for this one.
    """
    own = field_names(kind)
    check_keys(kind, site, given)
    with setting_of(site):
        found = kind(**{key: value for key, value in given.items() if key in own})
    if found.data_root is None:
        _refuse_half_settings(site, given, found)
    elif found.phantom:
        raise setting_error(site, "phantom", "'phantom' is true and 'data_root' is set; take one of the two out")
    return found


def check_keys(kind: type[FolderSettings], site: str, given: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Refuse keys of a site's private file that nobody reads.

    Args:
        kind: settings that the task reads.
        site: for the message.
        given: the file's content for this site.
        others: keys that others read.

    Raises:
        DataError: there is one; names it and the nearest known one.
    """
    known = tuple(dict.fromkeys((*field_names(kind), *OTHER_KEYS, *others)))
    for key in given:
        if key not in known:
            hint, near = checks.unknown(key, known, "docs/data.md has all"), checks.nearest(key, known)
            raise DataError(
                f"site '{site}': unknown key '{key}' in the site's fairflare.json{hint}",
                # Close to a key that exists it is a typing mistake; anything else is the site's own word.
                f"site '{site}': unknown key {f'{key:.60}'!r} in the site file{near}"
                if near
                else f"site '{site}': unknown key in the site file",
            )


@contextmanager
def setting_of(site: str, key: str | None = None) -> Iterator[None]:
    """Turn a ``ValueError`` about a key of the site file into a ``DataError``; default: its first word is the key."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise setting_error(site, key or text.split()[0].rstrip(":"), text) from error


def setting_error(site: str, key: str, problem: str) -> DataError:
    """Return a key of the site file whose value cannot be used."""
    return DataError(
        f"site '{site}': {problem}; correct it in the site's fairflare.json",
        f"site '{site}': key '{key}' in the site file is not usable",
    )


def _refuse_half_settings(site: str, given: Mapping[str, Any], own: FolderSettings) -> None:
    """Refuse, before a phantom stands in, a site file that names data, but not for this site: that is a mistake."""
    if own.datalist is not None:
        raise setting_error(
            site, "data_root", "'datalist' is set but 'data_root' is not; set 'data_root' to the folder of the list"
        )
    if own.phantom is False:
        raise setting_error(site, "phantom", "'phantom' is false and 'data_root' is not set; set 'data_root'")
    blocks = given.get("sites")
    if own.phantom or not isinstance(blocks, Mapping):
        return
    with_data = [name for name, block in blocks.items() if isinstance(block, Mapping) and "data_root" in block]
    if with_data:
        near = checks.nearest(site, with_data, most=1)
        lacks = f"no 'data_root' in the block of '{site}'" if site in blocks else f"no block for '{site}'"
        others = ", ".join(repr(name) for name in sorted(with_data))
        raise DataError(
            f"site '{site}': the site's fairflare.json gives data to the sites {others}, but has {lacks}{near or '.'} "
            "Write it under 'sites', or run the job with these site names",
            f"site '{site}': the site file names data for other sites, but not for this one{near}",
        )
