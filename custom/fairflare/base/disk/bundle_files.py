"""List, checksum and copy the files of a MONAI bundle that go with a job; their content is not interpreted here."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from fairflare.base.disk.files import sha256_of

#: Folder of a job that holds the MONAI bundle; it lies beside the job's ``task.py``.
BUNDLE_FOLDER = "monai_bundle"
#: Folders that a job does not carry: weights (``initial_ckpt`` names a weights file instead) and Python's caches.
LEFT_OUT = ("models", "__pycache__")


class BundleError(ValueError):
    """Report that a MONAI bundle cannot be used; the text names the bundle, the file and the key."""


def bundle_files(folder: Path) -> list[str]:
    """Return the sorted paths, relative to ``folder`` and with ``/``, of the bundle's files that a job carries.

    Left out are hidden files and folders, ``.pyc`` files, and the folders :data:`LEFT_OUT`.

    Raises:
        BundleError: the folder does not exist, or it contains a link to a folder, which a copy would lack.
    """
    if not folder.is_dir():
        raise BundleError(f"MONAI bundle {folder} is no folder; give the one that holds the bundle's configs/")
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("."))
        for name in folders:
            if Path(place, name).is_symlink():
                raise BundleError(
                    f"MONAI bundle {folder}: {Path(place, name).relative_to(folder)} is a link to a folder; put the "
                    "folder itself there"
                )
        wanted = [name for name in files if not name.startswith(".") and not name.endswith(".pyc")]
        found += [Path(place, name).relative_to(folder).as_posix() for name in wanted]
    return sorted(found)


def bundle_checksum(folder: Path) -> str:
    """Return the SHA-256 checksum over names and contents of the files that :func:`bundle_files` lists."""
    total = hashlib.sha256()
    for name in bundle_files(folder):
        total.update(f"{sha256_of(folder / name)}  {name}\n".encode())
    return total.hexdigest()


def grouped(checksum: str) -> str:
    """Return a checksum in groups of eight digits.

    The groups keep FLARE from taking the long hexadecimal number in a job for a secret.
    """
    return " ".join(checksum[i : i + 8] for i in range(0, len(checksum), 8))


def copy_bundle(folder: Path, target: Path) -> None:
    """Copy the files that :func:`bundle_files` lists to ``target``; what was at ``target`` is removed."""
    names = bundle_files(folder)
    if target.exists():
        shutil.rmtree(target)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)
