"""Test that checkpoints are complete at every instant, however the process dies."""

from __future__ import annotations

import bz2
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fairflare.base.disk.files import sha256_of
from fairflare.base.disk.record_log import RecordLog
from fairflare.federation.record import checkpoint as module
from fairflare.federation.record.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    check_same_config,
    check_same_rounds,
)


def made(next_round: int, **extra: Any) -> Checkpoint:
    return Checkpoint(
        next_round=next_round,
        model={"w": torch.full((3,), float(next_round)), "n": torch.tensor(next_round)},
        rule={"scores": {"a": float(next_round)}, "tensor": torch.tensor([next_round])},
        results={"last_round": next_round - 1},
        config={"seed": 0},
        extra={"best": 0.5, "best_round": None, **extra},
    )


class Kept(CheckpointFolder):
    """Hold a checkpoint folder with the results' log beside it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.rounds = RecordLog(folder.parent / f"{folder.name}.rounds")
        self.rounds.clear()
        self.lines = 0

    def keep(self, next_round: int, **extra: Any) -> None:
        while self.lines < next_round:
            self.rounds.append(f"round {self.lines}\n")
            self.lines += 1
        self.save(made(next_round, **extra), self.rounds)

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


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


def files(number: int) -> set[str]:
    return {f"model-{number:06d}.safetensors", f"rule-{number:06d}.pt", f"state-{number:06d}.json"}


def test_round_trip_and_the_last_two_are_kept(tmp_path: Path) -> None:
    folder = Kept(tmp_path / "deep" / "e")
    assert folder.load() is None
    for number in (1, 2, 3):
        folder.keep(number)
        again = CheckpointFolder(folder.folder)
        found = again.load()
        assert same(found, number)
        assert list(again.log.read()) == [f"round {k}\n" for k in range(number)]
    assert found is not None
    assert found.model["n"].shape == ()
    assert found.passed_over == []
    assert folder.names() == {"rounds.jsonl.bz2", *files(2), *files(3)}


class Crash(BaseException):
    """Signal that the process dies here."""


class Doomed:
    """Die at the n-th file operation; a write leaves half of the file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
        self.dies_at, self.count = dies_at, 0
        for owner, name, writes in (
            (Path, "replace", None), (Path, "unlink", None), (Path, "write_text", 0), (os, "fsync", None),
            (safetensors.torch, "save_file", 1), (module, "save_torch", 1),
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
    for dies_at in range(1, 60):
        folder = Kept(tmp_path / str(dies_at))
        folder.keep(1)
        folder.keep(2)
        folder.rounds.append("round 2\n")
        folder.lines = 3
        with pytest.MonkeyPatch.context() as monkeypatch:
            Doomed(monkeypatch, dies_at)
            try:
                folder.keep(3)
                break
            except Crash:
                pass
        again = CheckpointFolder(folder.folder)
        found = again.load()
        assert found is not None
        assert same(found, found.next_round)
        assert found.passed_over == []
        assert list(again.log.read()) == [f"round {k}\n" for k in range(found.next_round)]
        seen.append(found.next_round)
        folder.rounds.append("round 3\n")
        again.save(made(4), folder.rounds)  # and the next one goes well
        last = CheckpointFolder(folder.folder)
        assert same(last.load(), 4)
        assert list(last.log.read()) == [f"round {k}\n" for k in range(4)]
    else:
        raise AssertionError("no save came through")
    assert seen == sorted(seen)
    assert len(seen) >= 15  # a record, three files written and put in place, three removed
    assert set(seen) == {2, 3}


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("spoil", [flip, cut, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", [*sorted(files(2)), "rounds.jsonl.bz2"])
def test_a_damaged_file_is_named_and_the_round_before_is_taken(
    tmp_path: Path, name: str, spoil: Callable[[Path], Any]
) -> None:
    folder = Kept(tmp_path / "e")
    folder.keep(1)
    folder.keep(2)
    if name == "rounds.jsonl.bz2":  # both checkpoints need its beginning
        before = RecordLog(tmp_path / "before")
        before.append("round 0\n")
        tail = folder.folder / "tail"
        tail.write_bytes((folder.folder / name).read_bytes()[before.size :])
        spoil(tail)
        rest = tail.read_bytes() if tail.exists() else b""
        (folder.folder / name).write_bytes(before.path.read_bytes() + rest)
    else:
        spoil(folder.folder / name)
    again = CheckpointFolder(folder.folder)
    found = again.load()
    if spoil is Path.unlink and name.startswith("state"):
        assert found is not None  # as if it had not been written yet
        assert found.passed_over == []
        return
    assert same(found, 1)
    assert found is not None
    (reason,) = found.passed_over
    assert name in reason
    assert list(again.log.read()) == ["round 0\n"]
    again.save(made(2), folder.rounds)
    assert same(CheckpointFolder(folder.folder).load(), 2)


def spoil_record(path: Path, number: int) -> None:
    """Flip one bit in the middle of a record."""
    data = bytearray(path.read_bytes())
    starts = [i for i in range(len(data)) if data[i : i + 4] == b"BZh9"]
    ends = [*starts[1:], len(data)]
    data[(starts[number] + ends[number]) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda path: spoil_record(path, 0), [1, 2]),
        (lambda path: spoil_record(path, 1), [0, 2]),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), [0]),
        (Path.unlink, []),
        (lambda path: path.write_bytes(os.urandom(300)), []),
    ],
)
def test_a_damaged_log_costs_its_rounds_and_not_the_experiment(
    tmp_path: Path, spoil: Callable[[Path], Any], left: list[int]
) -> None:
    """Check a log that both checkpoints need; models, rules and states are whole."""
    folder = Kept(tmp_path / "e")
    for number in (1, 2, 3):
        folder.keep(number)
    spoil(folder.folder / "rounds.jsonl.bz2")
    again = CheckpointFolder(folder.folder)
    found = again.load()
    assert same(found, 3)
    assert found is not None
    said = f"the results of {len(left)} of 3 rounds can be read, the others are lost; the model is whole"
    assert found.passed_over[-1] == said
    assert all("rounds.jsonl.bz2" in reason or "No such file" in reason for reason in found.passed_over[:-1])
    assert list(again.log.read()) == [f"round {k}\n" for k in left]
    rounds = RecordLog(tmp_path / "results")  # as the results of the run that goes on
    rounds.take_over(again.log)
    rounds.append("round 3\n")
    again.save(made(4), rounds)
    last = CheckpointFolder(folder.folder)
    whole = last.load()
    assert same(whole, 4)
    assert whole is not None
    assert whole.passed_over == []
    assert list(last.log.read()) == [f"round {k}\n" for k in (*left, 3)]


def test_records_behind_those_of_a_checkpoint_are_not_taken_for_its_own(tmp_path: Path) -> None:
    folder = Kept(tmp_path / "e")
    for number in (1, 2):
        folder.keep(number)
    path = folder.folder / "rounds.jsonl.bz2"
    path.write_bytes(path.read_bytes() + bz2.compress(b"round 9\n"))  # of a save that was cut off
    spoil_record(path, 0)
    again = CheckpointFolder(folder.folder)
    assert same(again.load(), 2)
    assert list(again.log.read()) == ["round 1\n"]


@pytest.mark.parametrize("name", ["state", "model", "rule"])
def test_two_damaged_checkpoints_are_an_error(tmp_path: Path, name: str) -> None:
    folder = Kept(tmp_path / "e")
    folder.keep(1)
    folder.keep(2)
    spoiled = sorted(path for path in folder.folder.iterdir() if path.name.startswith(name))
    for path in spoiled:
        flip(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read .*remove") as caught:
        CheckpointFolder(folder.folder).load()
    assert all(path.name in str(caught.value) for path in spoiled)


def rewrite(folder: Path, number: int, **changes: Any) -> None:
    """Change values in a state, with the checksum that belongs to them."""
    path = folder / f"state-{number:06d}.json"
    content = {**json.loads(path.read_text())["content"], **changes}
    path.write_text(json.dumps({"sha256": module._sum_of(content), "content": content}))


def test_numbers_that_do_not_fit_each_other(tmp_path: Path) -> None:
    folder = Kept(tmp_path / "e")
    folder.keep(1)
    folder.keep(2)
    rewrite(folder.folder, 2, next_round=99)
    with pytest.raises(CheckpointError, match=r"000002\.json: next_round is 99, must be 2"):
        CheckpointFolder(folder.folder).load()
    rewrite(folder.folder, 2, next_round=2, results={"last_round": 2})
    with pytest.raises(CheckpointError, match=r"next_round is 2, .* results is 2; remove"):
        CheckpointFolder(folder.folder).load()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 3}, "state-000002.json.format must be 2"),
        ({"files": ["x"]}, "state-000002.json.files is no object"),
        ({"rounds": {"bytes": -1, "sha256": ""}}, "state-000002.json.rounds.bytes must be"),
    ],
)
def test_a_head_of_another_kind_is_passed_over(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    folder = Kept(tmp_path / "e")
    folder.keep(1)
    folder.keep(2)
    rewrite(folder.folder, 2, **changes)
    found = CheckpointFolder(folder.folder).load()
    assert same(found, 1)
    assert found is not None
    assert told in found.passed_over[0]


def test_what_the_rule_keeps_on_disk_is_checked_too(tmp_path: Path) -> None:
    folder = Kept(tmp_path / "e")
    neuron = folder.folder / "memory" / "som" / "000002" / "0.safetensors"
    folder.keep(1)
    neuron.parent.mkdir(parents=True)
    neuron.write_bytes(b"0123456789")
    folder.keep(2)
    assert same(CheckpointFolder(folder.folder).load(), 2)
    flip(neuron)
    found = CheckpointFolder(folder.folder).load()
    assert same(found, 1)
    assert found is not None
    assert "0.safetensors is not what was written" in found.passed_over[0]


def test_the_best_model_stays_as_long_as_it_is_the_best(tmp_path: Path) -> None:
    folder = Kept(tmp_path / "e")
    folder.keep(0)
    folder.keep(1, best_round=0)
    for number in (2, 3, 4):
        folder.keep(number, best_round=1)
    again = CheckpointFolder(folder.folder)
    found = again.load()
    assert found is not None
    best = again.best_model(found)
    assert best is not None
    assert best["w"].tolist() == [1.0] * 3
    assert {n for n in folder.names() if n.startswith("model")} == {f"model-{k:06d}.safetensors" for k in (1, 3, 4)}
    folder.keep(5, best_round=4)
    folder.keep(6, best_round=4)
    assert {n for n in folder.names() if n.startswith("model")} == {f"model-{k:06d}.safetensors" for k in (4, 5, 6)}
    flip(folder.folder / "model-000004.safetensors")
    again = CheckpointFolder(folder.folder)
    found = again.load()
    assert found is not None
    assert found.next_round == 6  # it is not needed to go on
    assert again.best_model(found) is None


def test_going_back_makes_the_round_before_the_newest(tmp_path: Path) -> None:
    folder = Kept(tmp_path / "e")
    for number in (0, 1, 2):
        folder.keep(number)
    assert same(folder.back_from(2), 1)
    assert list(folder.log.read()) == ["round 0\n"]
    assert same(CheckpointFolder(folder.folder).load(), 1)
    assert folder.back_from(1) is None  # only two are kept
    assert same(CheckpointFolder(folder.folder).load(), 1)


def test_going_back_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the later checkpoint is removed from the disk before the run continues from the one before."""
    folder = Kept(tmp_path / "e")
    for number in (0, 1, 2):
        folder.keep(number)
    synced: list[tuple[Path, set[str]]] = []
    monkeypatch.setattr(module, "flush_to_disk", lambda path: synced.append((path, folder.names())))
    assert same(folder.back_from(2), 1)
    assert [path for path, _ in synced] == [folder.folder]
    assert "state-000002.json" not in synced[0][1]
    assert "state-000001.json" in synced[0][1]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    folder = Kept(tmp_path / "e")
    folder.keep(1)
    path = folder.folder / "rule-000001.pt"
    torch.save({"x": Evil()}, path)
    content = json.loads((folder.folder / "state-000001.json").read_text())["content"]
    rewrite(folder.folder, 1, files={**content["files"], path.name: sha256_of(path)})
    with pytest.raises(CheckpointError, match=r"rule-000001\.pt .*UnpicklingError"):
        CheckpointFolder(folder.folder).load()
    assert not (tmp_path / "owned").exists()


def test_same_config() -> None:
    old = {"num_rounds": 3, "seed": 0, "rule": {"q": 1}}
    check_same_config(old, {**old, "num_rounds": 9}, "e")
    check_same_config(json.loads(json.dumps(old)), old, "e")
    with pytest.raises(ValueError, match=r"\(rule\.q: was 1, is 2; seed: was 0, is 1\)"):
        check_same_config(old, {**old, "seed": 1, "rule": {"q": 2}}, "e")
    with pytest.raises(ValueError, match=r"\(training: was None, is 5\)"):
        check_same_config(old, {**old, "training": 5}, "e")
    parts = {"path": "a.Rule", "args": {"weighting": {"path": "a.Som", "args": {"eta": 0.5, "grid": [5, 5]}}}}
    other = {"path": "a.Rule", "args": {"weighting": {"path": "a.Som", "args": {"eta": 0.6, "grid": [5, 5]}}}}
    with pytest.raises(ValueError, match=r"\(rule\.weighting\.eta: was 0\.5, is 0\.6\)"):
        check_same_config({"rule": parts}, {"rule": other}, "e")


def test_same_rounds() -> None:
    check_same_rounds(3, 3, 2, ["training.schedule"], "e")
    check_same_rounds(3, 9, 2, [], "e")
    check_same_rounds(9, 2, 2, [], "e")
    with pytest.raises(ValueError, match=r"has done 2 rounds .*num_rounds is 1; set"):
        check_same_rounds(3, 1, 2, [], "e")
    with pytest.raises(ValueError, match="is of round 99, but its run had 3 rounds"):
        check_same_rounds(3, 3, 99, [], "e")
    with pytest.raises(ValueError, match=r"num_rounds=3, is 9, .*tau, training\.tau"):
        check_same_rounds(3, 9, 2, ["rule.tau", "training.tau"], "e")
