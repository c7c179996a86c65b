"""Checkpoints: complete at every instant, whatever the process dies of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation import checkpoint as module
from fairflare.federation.checkpoint import Checkpoint, CheckpointFolder, check_same_config


def made(next_round: int) -> Checkpoint:
    return Checkpoint(
        next_round=next_round,
        model={"w": torch.full((3,), float(next_round)), "n": torch.tensor(next_round)},
        rule={"scores": {"a": float(next_round)}, "tensor": torch.tensor([next_round])},
        results={"rounds": ["x"] * next_round},
        config={"seed": 0},
        extra={"best": 0.5},
    )


def same(found: Checkpoint | None, next_round: int) -> bool:
    wanted = made(next_round)
    assert found is not None
    return (
        found.next_round == next_round
        and all(torch.equal(found.model[k], v) for k, v in wanted.model.items())
        and found.rule["scores"] == wanted.rule["scores"]
        and torch.equal(found.rule["tensor"], wanted.rule["tensor"])
        and (found.results, found.config, found.extra) == (wanted.results, wanted.config, wanted.extra)
    )


def test_round_trip(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "deep" / "e")
    assert folder.load() is None
    for number in (1, 2, 3):
        folder.save(made(number))
        assert same(folder.load(), number)
    found = folder.load()
    assert found is not None
    assert found.model["n"].shape == ()
    assert len(list(folder.folder.iterdir())) == 3  # one model, one rule, state.json


class Crash(BaseException):
    """The process dies here."""


class Doomed:
    """Dies at the n-th file operation; a write leaves half of the file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
        self.dies_at, self.count = dies_at, 0
        for owner, name, writes in (
            (Path, "replace", None), (Path, "unlink", None), (Path, "write_text", 0),
            (module, "save_file", 1), (torch, "save", 1),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name), writes))

    def wrapped(self, real: Callable[..., Any], writes: int | None) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.dies_at:
                if writes is not None:
                    real(*args, **kwargs)
                    path = args[writes]
                    data = path.read_bytes()
                    path.write_bytes(data[: len(data) // 2])
                raise Crash
            return real(*args, **kwargs)

        return operation


def test_a_crash_at_any_file_operation_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = []
    for dies_at in range(1, 30):
        folder = CheckpointFolder(tmp_path / str(dies_at))
        folder.save(made(1))
        with pytest.MonkeyPatch.context() as monkeypatch:
            Doomed(monkeypatch, dies_at)
            try:
                folder.save(made(2))
                break
            except Crash:
                pass
        found = folder.load()
        assert found is not None
        assert same(found, found.next_round)
        seen.append(found.next_round)
        folder.save(made(3))  # and the next one goes well
        assert same(folder.load(), 3)
    else:
        raise AssertionError("no save came through")
    assert seen == sorted(seen)
    assert len(seen) >= 8  # three files written and put in place, two removed
    assert set(seen) == {1, 2}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_text('{"next_round": 1}'),
        lambda folder: (folder / "model-000001.safetensors").unlink(),
        lambda folder: (folder / "model-000001.safetensors").write_bytes(b"x" * 40),
        lambda folder: (folder / "rule-000001.pt").write_bytes(b""),
    ],
)
def test_damage_is_named(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(made(1))
    spoil(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint .*state\.json cannot be read .*remove its folder"):
        folder.load()


def test_one_of_an_older_version_is_named(tmp_path: Path) -> None:
    """Version 0.1 called the rule an aggregator."""
    folder = CheckpointFolder(tmp_path)
    folder.save(made(1))
    state = json.loads((tmp_path / "state.json").read_text())
    state["aggregator"] = state.pop("rule")
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        ValueError, match=r"state\.json cannot be read .*an older fairflare wrote it.*; remove its folder"
    ):
        folder.load()


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    folder = CheckpointFolder(tmp_path / "e")
    folder.save(made(1))
    torch.save({"x": Evil()}, tmp_path / "e" / "rule-000001.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        folder.load()
    assert not (tmp_path / "owned").exists()


def test_same_config() -> None:
    old = {"num_rounds": 3, "seed": 0, "rule": {"q": 1}}
    check_same_config(old, {**old, "num_rounds": 9}, "e")
    check_same_config(json.loads(json.dumps(old)), old, "e")
    with pytest.raises(ValueError, match=r"other settings \(rule\.q: was 1, is 2; seed: was 0, is 1\)"):
        check_same_config(old, {**old, "seed": 1, "rule": {"q": 2}}, "e")
    with pytest.raises(ValueError, match=r"other settings \(training: was None, is 5\)"):
        check_same_config(old, {**old, "training": 5}, "e")
    parts = {"path": "a.Rule", "args": {"weighting": {"path": "a.Som", "args": {"eta": 0.5, "grid": [5, 5]}}}}
    other = {"path": "a.Rule", "args": {"weighting": {"path": "a.Som", "args": {"eta": 0.6, "grid": [5, 5]}}}}
    with pytest.raises(ValueError, match=r"other settings \(rule\.weighting\.eta: was 0\.5, is 0\.6\)"):
        check_same_config({"rule": parts}, {"rule": other}, "e")
