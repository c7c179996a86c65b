"""The checkpoint folder: a crash at any point leaves a checkpoint that can be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.checkpoint import STATE_FILE, Checkpoint, CheckpointFolder


def checkpoint(next_round: int, **changes: Any) -> Checkpoint:
    complete: dict[str, Any] = {
        "next_round": next_round,
        "model": {"w": torch.full((3,), float(next_round)), "n": torch.tensor(next_round)},
        "rule": {"memory": {"A": 0.25 * next_round}, "moments": torch.arange(4.0)},
        "results": {"rounds": [f"round {next_round}"]},
        "config": {"seed": 3},
        "extra": {"missed": {"B": 1}},
    }
    return Checkpoint(**complete | changes)


def same(found: Checkpoint | None, expected: Checkpoint) -> bool:
    assert found is not None
    tensors = [(found.model, expected.model), ({"m": found.rule["moments"]}, {"m": torch.arange(4.0)})]
    equal = all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in tensors)
    plain = ("next_round", "results", "config", "extra")
    return equal and all(getattr(found, name) == getattr(expected, name) for name in plain)


def test_what_is_saved_is_loaded(tmp_path):
    folder = CheckpointFolder(tmp_path / "experiment")
    assert folder.load() is None
    for number in (1, 2, 2, 10):
        folder.save(checkpoint(number))
        assert same(folder.load(), checkpoint(number))
    assert len(list(folder.folder.iterdir())) == 3  # the last one only, and nothing half-written


def test_the_state_file_is_replaced_as_a_whole(tmp_path):
    """A link to the old one keeps it: it is never written to."""
    folder = CheckpointFolder(tmp_path / "experiment")
    folder.save(checkpoint(1))
    before = (folder.folder / STATE_FILE).read_bytes()
    os.link(folder.folder / STATE_FILE, tmp_path / "link")
    folder.save(checkpoint(2))
    assert (tmp_path / "link").read_bytes() == before != (folder.folder / STATE_FILE).read_bytes()


@pytest.mark.parametrize("part", ["model", "rule", "results"])
def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path, part):
    folder = CheckpointFolder(tmp_path / "experiment")
    folder.save(checkpoint(1))
    unwritable = {"model": {"w": object()}, "rule": {"f": lambda: 0}, "results": {"x": object()}}[part]
    with pytest.raises(Exception, match=r"object|lambda|local"):
        folder.save(checkpoint(2, **{part: unwritable}))
    assert same(folder.load(), checkpoint(1))
    folder.save(checkpoint(3))
    assert same(folder.load(), checkpoint(3))


def test_a_crash_before_the_state_file_is_in_place_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path / "experiment")
    folder.save(checkpoint(1))
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if Path(target).name == STATE_FILE:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.save(checkpoint(2))
    monkeypatch.undo()
    assert same(folder.load(), checkpoint(1))
