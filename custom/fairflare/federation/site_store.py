"""What a site keeps between tasks, on its own disk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fairflare.core.files import write_whole
from fairflare.exchange.messages import clean_state


class SiteStore:
    """What a site keeps between tasks, each value with the round that wrote it.

    The value of the round before is kept too: a server that continues from its last checkpoint asks for a round again,
    and that round must start from what it started from the first time.

    Args:
        folder: owned by the site, one per experiment and site.
    """

    KEPT = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, current_round: int, value: Mapping[str, Any]) -> None:
        """Writes atomically; forgets what is older than the last two rounds written, or of a later round."""
        write_whole(self._path(name, current_round), lambda path: torch.save(dict(value), path))
        rounds = self._rounds(name)
        stale = [r for r in rounds if r > current_round]
        old = [r for r in rounds if r <= current_round][: -self.KEPT]
        for number in stale + old:
            self._path(name, number).unlink(missing_ok=True)

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None:
        """The newest value written in an earlier round; ``None`` when there is none."""
        earlier = [r for r in self._rounds(name) if r < current_round]
        return self._load(name, earlier[-1]) if earlier else None

    def load_at(self, name: str, current_round: int) -> dict[str, Any] | None:
        """The value written in exactly this round."""
        return self._load(name, current_round) if current_round in self._rounds(name) else None

    def save_model(self, current_round: int, state: Mapping[str, torch.Tensor]) -> None:
        """The local model of a round, for the anchor phase; only the last one is kept."""
        plain = {name: tensor.clone() for name, tensor in clean_state(state).items()}
        mark = {"round": str(current_round)}
        write_whole(self.folder / "local.safetensors", lambda path: save_file(plain, path, metadata=mark))
        (self.folder / "local.round").write_text(str(current_round))

    def load_model(self, current_round: int) -> dict[str, torch.Tensor] | None:
        """The local model, ``None`` unless it is of this very round."""
        mark = self.folder / "local.round"
        if not mark.exists() or mark.read_text().strip() != str(current_round):
            return None
        return load_file(self.folder / "local.safetensors")

    def _path(self, name: str, current_round: int) -> Path:
        return self.folder / f"{name}.{current_round:06d}.pt"

    def _rounds(self, name: str) -> list[int]:
        found = (re.fullmatch(re.escape(name) + r"\.(\d+)\.pt", p.name) for p in self.folder.iterdir())
        return sorted(int(m.group(1)) for m in found if m)

    def _load(self, name: str, current_round: int) -> dict[str, Any]:
        return dict(torch.load(self._path(name, current_round), map_location="cpu", weights_only=True))


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
