"""Provide helpers that the tests of the tasks on images share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from fairflare.data import reading
from fairflare.data.datalist import DataError
from fairflare.tasks import transforms
from fairflare.tasks.base import SiteData

HEAVY = ("monai", "torch", "sklearn", "nibabel", "matplotlib", "PIL", "nvflare")


def heavy_imports(code: str) -> str:
    """Return which of the slow packages a new process has imported after some code."""
    code = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


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
