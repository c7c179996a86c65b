"""Provide helpers that the tests of the tasks on images share."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.data import reading
from fairflare.data.datalist import SPLITS, DataError
from fairflare.tasks import transforms
from fairflare.tasks.base import SiteData

HEAVY = ("monai", "torch", "sklearn", "nibabel", "matplotlib", "PIL", "nvflare")


def heavy_imports(code: str) -> str:
    """Return which of the slow packages a new process has imported after some code."""
    code = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def png(path: Path, size: tuple[int, ...], bits: int, rows: bytes) -> Path:
    """Write a colour picture of (width, height) as PNG, with the bytes that are compressed in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", *size, bits, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def draw(path: Path, seed: int, size: tuple[int, int] = (10, 12)) -> Path:
    """Write a colour picture by chance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)).save(path)
    return path


def lists(folder: Path, file: str = "datalist.json") -> dict[str, list[dict[str, Any]]]:
    """Return the splits of a written datalist."""
    content = json.loads((folder / file).read_text())
    return {key: value for key, value in content.items() if key.startswith("test") or key in SPLITS}


def all_of(data: SiteData, split: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a split, from batches of three."""
    batches = list(data.batches(split, batch_size=3, **options))
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Count the samples that a function of :mod:`fairflare.data.reading` reads from now on."""
    calls: list[Any] = []
    real = getattr(reading, name)

    def read(sample: Any, **where: str) -> Any:
        calls.append(sample)
        return real(sample, **where)

    monkeypatch.setattr(transforms, name, read)
    return calls


def refusal(
    action: Callable[[], object], settings: Mapping[str, Any], site: str, secrets: Sequence[str]
) -> DataError:  # fmt: skip
    """Return the error of an action at a site; its public text names the site, but no data folder and no secret."""
    with pytest.raises(DataError) as caught:
        action()
    error = caught.value
    assert f"site '{site}'" in str(error)
    assert f"site '{site}'" in error.public
    for secret in (str(settings.get("data_root", "no root")), *secrets):
        assert secret not in error.public
    return error


def whole_split(data: SiteData) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training images and targets in order, after checks of the number and shuffling of batches."""
    count = data.num_samples("training")
    plain = data.batches("training", batch_size=3)
    assert len(plain) == len(list(plain)) == -(-count // 3)
    assert [len(inputs) for inputs, _ in plain][-1] == (count % 3 or 3)
    inputs, targets = all_of(data, "training")
    assert len(inputs) == count
    assert torch.equal(inputs, all_of(data, "training")[0])
    shuffled, moved = all_of(data, "training", shuffle_seed=5)
    same, _ = all_of(data, "training", shuffle_seed=5)
    other, _ = all_of(data, "training", shuffle_seed=6)
    assert torch.equal(shuffled, same)
    assert not torch.equal(shuffled, other)
    order = [next(i for i in range(count) if torch.equal(inputs[i], image)) for image in shuffled]
    assert sorted(order) == list(range(count))
    assert order != sorted(order)
    assert torch.equal(targets[order], moved)
    return inputs, targets
