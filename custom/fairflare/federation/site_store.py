"""What a site keeps between tasks, on its own disk."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairflare.core.files import write_whole

log = logging.getLogger(__name__)


class SiteStore:
    """Values of one run at one site, each with the round that wrote it.

    Values of earlier rounds are kept too: a server that continues from its last checkpoint asks for a round again, one
    that goes back a round asks for the round before it again, and either must start from what it started from the
    first time.

    Args:
        folder: of the run; made by whoever locks it.

    Attributes:
        lost: what could not be had and is made anew, in sentences without a path.
    """

    KEPT = 3

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lost: list[str] = []

    @property
    def scratch(self) -> Path:
        """For files of one task."""
        return self.folder / "scratch"

    def save(self, name: str, current_round: int, value: Mapping[str, Any], kept: int = KEPT) -> None:
        """Writes a value whole or not at all; forgets those of later rounds, and all but the last ``kept``.

        Raises:
            OSError: the disk is full or cannot be written. The values of before are then still there.
        """
        write_whole(self._path(name, current_round), lambda path: _write(dict(value), path))
        rounds = self._rounds(name)
        stale = [r for r in rounds if r > current_round]
        old = [r for r in rounds if r <= current_round][:-kept]
        for number in stale + old:
            self._path(name, number).unlink(missing_ok=True)

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None:
        """The newest undamaged value of an earlier round; ``None`` when there is none."""
        earlier = [r for r in self._rounds(name) if r < current_round]
        for number in reversed(earlier):
            found = self.load_at(name, number)
            if found is not None:
                if number != earlier[-1]:
                    self.lose(f"that of round {number} is taken")
                return found
        if current_round > 0:
            self.lose(f"no usable {name} of an earlier round is here: starts with a new one")
        return None

    def load_at(self, name: str, current_round: int) -> dict[str, Any] | None:
        """The value of exactly this round; ``None`` when there is none, or it is damaged."""
        path = self._path(name, current_round)
        if not path.exists():
            return None
        try:
            # torch does not look at the checksums that it writes.
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is None:
                return dict(torch.load(path, map_location="cpu", weights_only=True))
            error: object = f"checksum of {damaged}"
        except MemoryError:
            raise
        except Exception as found:  # zip and pickle raise what they like for a damaged file
            error = f"{type(found).__name__}: {found}"
        log.warning("%s is damaged (%s) and not used", path, error)
        self.lose(f"its {name} of round {current_round} is damaged")
        return None

    def forget(self, current_round: int) -> None:
        """Removes what was saved in a round that came to nothing."""
        for path in self.folder.glob(f"*.{current_round:06d}.pt"):
            path.unlink(missing_ok=True)

    def lose(self, what: str) -> None:
        """Notes something that could not be had, once; the server is told (no path in it)."""
        if what not in self.lost:
            self.lost.append(what)

    def _path(self, name: str, current_round: int) -> Path:
        return self.folder / f"{name}.{current_round:06d}.pt"

    def _rounds(self, name: str) -> list[int]:
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        found = (re.fullmatch(re.escape(name) + r"\.(\d+)\.pt", p.name) for p in files)
        return sorted(int(m.group(1)) for m in found if m)


def _write(value: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:  # torch's words on top of a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def safe_name(name: str) -> str:
    """A folder name for an experiment or site; refuses what could leave the folder.

    Raises:
        ValueError: empty, or not made of letters, digits, ``.``, ``_``, ``-``, ``@``.
    """
    if not re.fullmatch(r"[A-Za-z0-9_@-][A-Za-z0-9._@-]{0,127}", name):
        raise ValueError(
            f"name {name!r} must be 1 to 128 letters, digits, '.', '_', '-' or '@', and not start with '.'"
        )
    return name
