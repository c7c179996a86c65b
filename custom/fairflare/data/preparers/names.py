"""Names of files and folders, as messages show them and as file systems take them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from fairflare.data.datalist import DataError


def existing_folder(folder: Path) -> Path:
    """The folder, when it is there."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; give the folder that holds the source files")
    return folder


def listing(names: Iterable[str]) -> str:
    """Names as a message shows them: twelve at most."""
    shown = sorted(names)
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") or "nothing"


def file_name(name: str) -> str:
    """A name without the characters that some file systems refuse."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
