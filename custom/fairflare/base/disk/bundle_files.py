"""List, checksum and copy the files of a MONAI bundle that go with a job; their content is not interpreted here."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from fairflare.base.checks import refuse
from fairflare.base.disk.files import sha256_of

#: Folder that holds the MONAI bundle: beside the ``task.py`` of a run, and beside the folder ``custom`` of a job's app.
BUNDLE_FOLDER = "monai_bundle"
#: Files of a bundle that a job does not carry: weights (``initial_ckpt`` names such a file), caches, hidden files.
LEFT_OUT = re.compile(r"/(models|__pycache__|\.[^/]*|[^/]*\.pyc)/")


class BundleError(ValueError):
    """Report that a MONAI bundle cannot be used; the text names the bundle, the file and the key."""


def bundle_files(folder: Path) -> list[str]:
    """Return the sorted paths, relative to ``folder`` and with ``/``, of the bundle's files that a job carries.

    Files that match :data:`LEFT_OUT` are left out.

    Raises: BundleError: the folder does not exist, or contains a link to a folder, which a copy of the files would
        lack.
    """
    refuse({
        f"MONAI bundle {folder} is no folder; give the one that holds the bundle's configs/": not folder.is_dir()
    }, BundleError)  # fmt: skip
    names = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    carried = {path: name for path, name in names.items() if not LEFT_OUT.search(f"/{name}/")}
    if links := [name for path, name in carried.items() if path.is_symlink() and path.is_dir()]:
        raise BundleError(f"MONAI bundle {folder}: {links[0]} is a link to a folder; put the folder itself there")
    return sorted(name for path, name in carried.items() if not path.is_dir())


def bundle_checksum(folder: Path) -> str:
    """Return the SHA-256 checksum over names and contents of the files that :func:`bundle_files` lists."""
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in bundle_files(folder)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def group_digits(checksum: str) -> str:
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
