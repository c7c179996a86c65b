"""Round checkpoints that outlive the job, since FLARE does not resume one.

A folder per experiment holds, for each of the last two rounds, ``state-NNNNNN.json`` and the files that it names, with
their checksums; and the log of all rounds' results, of which a state names the first bytes. A state is written last and
at once, so what it names is complete whenever it can be read; one that is damaged is passed over for the one before.
Where only the log is, the run goes on with the rounds in it that can be read, and says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from pydantic import BaseModel, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file

from fairflare.base.disk.files import private_folder, save_torch, sha256_of, to_disk, write_whole
from fairflare.base.disk.record_log import DamagedLog, RecordLog
from fairflare.base.settings import NonNegativeInt, by_name
from fairflare.exchange.messages import clean_state
from fairflare.exchange.tensor_folder import save_tensors
from fairflare.reporting.reading import read_part

ROUNDS_FILE = "rounds.jsonl.bz2"
MEMORY_FOLDER = "memory"  # what the rule keeps on disk
KEPT = 2
_STATE = re.compile(r"state-(\d{6,})\.json")
_OLD_STATE = "state.json"  # before format 2
_REMEDY = "remove the checkpoint folder to start anew, or use another experiment id"


class CheckpointError(ValueError):
    """A checkpoint cannot be gone on from; the text says which, why, and what to do."""


class _Damaged(Exception):
    """One checkpoint is not what was written; the text names the file."""


@dataclass
class Checkpoint:
    """What is known after a round.

    Attributes:
        next_round: the first round that is not done.
        model: global model.
        rule: the rule's own state.
        results: the results store's state.
        config: what the run was configured with; compared on resume.
        extra: the run's small state; ``extra["best_round"]``: the round that received the best model, which is the
            model of the checkpoint with that ``next_round``.
        passed_over: why newer checkpoints are not the one that was loaded.
    """

    next_round: int
    model: dict[str, torch.Tensor]
    rule: dict[str, Any]
    results: dict[str, Any]
    config: dict[str, Any]
    extra: dict[str, Any]
    passed_over: list[str] = field(default_factory=list)


class LogHead(BaseModel):
    """The first bytes of the log of rounds, which a checkpoint has all of."""

    bytes: NonNegativeInt
    sha256: str


class Head(BaseModel):
    """``state-NNNNNN.json``, as it is written and read: what a checkpoint is, and the checksums of its files.

    Attributes:
        format: of an older one nothing is read.
        next_round: as its name says.
        files: model and rule's state.
        memory: what the rule keeps on disk.
        best: the best model, where there is one.
        rounds, results: of the results' log, and their state.
        config, extra: see :class:`Checkpoint`.
    """

    format: Literal[2] = 2
    next_round: NonNegativeInt
    files: dict[str, str]
    memory: dict[str, str]
    best: dict[str, str]
    rounds: LogHead
    results: dict[str, Any]
    config: dict[str, Any]
    extra: dict[str, Any]


HEAD = TypeAdapter(Head)


class CheckpointFolder:
    """Reads and writes :class:`Checkpoint` in one folder; the last two are kept.

    Nobody else may write there meanwhile (:class:`fairflare.base.disk.locks.FolderLock`).

    Args:
        folder: of the experiment.

    Attributes:
        log: records of the rounds before the checkpoint that was loaded or saved last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = RecordLog(folder / ROUNDS_FILE)
        self._sums: dict[str, str] = {}  # of model files, by name
        self._memory: dict[Path, tuple[tuple[int, ...], str]] = {}

    def save(self, checkpoint: Checkpoint, rounds: RecordLog) -> None:
        """Writes a checkpoint; a crash at any point leaves the old one or the new one.

        Args:
            checkpoint: what to keep.
            rounds: the results' log; what it has more than :attr:`log` is appended here.

        Raises:
            OSError: the disk is full or cannot be written. The checkpoints before are then still there.
        """
        private_folder(self.folder)
        number = checkpoint.next_round
        self.log.take_over(rounds)
        plain = {name: tensor.clone() for name, tensor in clean_state(checkpoint.model).items()}
        model, rule = _model_file(number), f"rule-{number:06d}.pt"
        self._sums[model] = self._put(model, lambda path: save_tensors(path, plain, None, "the global model"))
        head = Head(
            next_round=number,
            files={model: self._sums[model], rule: self._put(rule, lambda path: save_torch(checkpoint.rule, path))},
            memory=self._memory_sums(),
            best=self._best(checkpoint),
            rounds=LogHead(bytes=self.log.size, sha256=self.log.sha256),
            results=checkpoint.results,
            config=checkpoint.config,
            extra=checkpoint.extra,
        )
        content = head.model_dump()
        text = json.dumps({"sha256": _sum_of(content), "content": content})
        write_whole(self._state(number), lambda path: path.write_text(text, encoding="utf-8"))
        self._remove_all_but(number)

    def load(self, check: Callable[[Mapping[str, Any]], None] = lambda extra: None) -> Checkpoint | None:
        """The last checkpoint that is what was written; ``None`` when there is none at all.

        Args:
            check: is given ``extra`` before anything else is read, and may refuse.

        Raises:
            CheckpointError: there are only damaged ones (names the files), or one does not fit itself.
        """
        reasons: list[str] = []
        for salvage in (False, True):  # rather a round less than results that are not whole
            for number in self._numbers()[::-1]:
                try:
                    found = self._read(number, check, salvage=salvage)
                except _Damaged as error:
                    reasons += [] if salvage else [str(error)]
                    continue
                found.passed_over = [*reasons, *found.passed_over]
                return found
        if reasons:
            raise CheckpointError(f"{self.folder}: no checkpoint can be read ({'; '.join(reasons)}); {_REMEDY}")
        if (self.folder / _OLD_STATE).exists():
            raise CheckpointError(f"{self.folder / _OLD_STATE} is a checkpoint of an older fairflare; {_REMEDY}")
        return None

    def back_from(self, current_round: int) -> Checkpoint | None:
        """The checkpoint of the round before, which is the newest one from now on; ``None`` when there is none.

        Raises:
            CheckpointError: it does not fit itself.
        """
        try:
            found = self._read(current_round - 1, lambda extra: None)
        except _Damaged:
            return None
        for number in self._numbers():
            if number >= current_round:
                self._state(number).unlink()
        to_disk(self.folder)
        return found

    def best_model(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor] | None:
        """The best model so far; ``None`` when there is none, or its file is damaged or gone."""
        name = checkpoint.extra.get("best_round")
        path = self.folder / _model_file(name) if name is not None else None
        if path is None or path.name not in self._sums:
            return None
        try:
            return _checked(path, self._sums[path.name], load_file)
        except _Damaged:
            del self._sums[path.name]
            return None

    # -- writing

    def _put(self, name: str, write: Callable[[Path], object]) -> str:
        """Writes a file; its checksum."""
        found: list[str] = []

        def and_sum(partial: Path) -> None:
            write(partial)
            found.append(sha256_of(partial))

        write_whole(self.folder / name, and_sum)
        return found[0]

    def _best(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Name and checksum of the best model's file, which stays as long as it is the best."""
        number = checkpoint.extra.get("best_round")
        name = None if number is None else _model_file(number)
        return {name: self._sums[name]} if name in self._sums else {}

    def _memory_sums(self) -> dict[str, str]:
        """Checksums of what the rule keeps on disk; a file that is as it was is not read again."""
        known, self._memory = self._memory, {}
        for path in self._memory_files():
            status = path.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            before = known.get(path)
            self._memory[path] = before if before and before[0] == stamp else (stamp, sha256_of(path))
        return {str(path.relative_to(self.folder)): found for path, (_, found) in self._memory.items()}

    def _memory_files(self) -> list[Path]:
        return sorted(p for p in (self.folder / MEMORY_FOLDER).rglob("[!.]*") if p.is_file())

    def _remove_all_but(self, newest: int) -> None:
        """Removes what the two newest checkpoints do not name."""
        needed: set[str] = set()
        for number in self._numbers():
            if not newest - KEPT < number <= newest:
                self._state(number).unlink()
                continue
            try:
                head = self._head(number)
                needed.update(head.files, head.best)
            except _Damaged:
                continue
        for path in self.folder.iterdir():
            if path.name.startswith(("model-", "rule-")) and path.name not in needed:
                path.unlink(missing_ok=True)
                self._sums.pop(path.name, None)

    # -- reading

    def _numbers(self) -> list[int]:
        found = (_STATE.fullmatch(path.name) for path in _inside(self.folder))
        return sorted(int(match.group(1)) for match in found if match)

    def _state(self, number: int) -> Path:
        return self.folder / f"state-{number:06d}.json"

    def _head(self, number: int) -> Head:
        path = self._state(number)
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            content: dict[str, Any] = state["content"]
            whole = state["sha256"] == _sum_of(content)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise _Damaged(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error
        if not whole:
            raise _Damaged(f"{path.name} is not what was written: its checksum differs")
        problems: list[str] = []
        head = read_part(HEAD, content, path.name, problems)
        if head is None or problems:
            raise _Damaged(problems[0])
        return head

    def _read(self, number: int, check: Callable[[Mapping[str, Any]], None], *, salvage: bool = False) -> Checkpoint:
        head = self._head(number)
        check(head.extra)
        self._check_numbers(number, head)
        files = head.files
        model, rule = _model_file(number), f"rule-{number:06d}.pt"
        found = Checkpoint(
            next_round=number,
            model=_checked(self.folder / model, files[model], load_file),
            rule=_checked(self.folder / rule, files[rule], _load_torch),
            results=head.results,
            config=head.config,
            extra=head.extra,
        )
        for name, wanted in head.memory.items():
            if (self.folder / name).exists():  # of the rounds in it the rule needs only the last, and says so
                _checked(self.folder / name, wanted)
        try:
            self._open_log(head.rounds)
        except _Damaged:
            if not salvage:
                raise
            left = self.log.salvage(head.rounds.bytes)
            found.passed_over = [
                f"the results of {left} of {number} rounds can be read, the others are lost; the model is whole"
            ]
        self._sums = {**head.best, model: files[model]}
        return found

    def _open_log(self, wanted: LogHead) -> None:
        try:
            self.log.open_at(wanted.bytes)
        except (DamagedLog, OSError) as error:
            raise _Damaged(str(error)) from error
        if self.log.sha256 != wanted.sha256:
            raise _Damaged(f"{ROUNDS_FILE} is not what was written: its checksum differs")

    def _check_numbers(self, number: int, head: Head) -> None:
        path = self._state(number)
        if head.next_round != number:
            raise CheckpointError(f"{path}: next_round is {head.next_round}, must be {number}; {_REMEDY}")
        last = head.results.get("last_round", number - 1)
        if last != number - 1:
            raise CheckpointError(
                f"{path}: next_round is {number}, but the last round in its results is {last}; {_REMEDY}"
            )


def _model_file(number: int) -> str:
    return f"model-{number:06d}.safetensors"


def _inside(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _load_torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _checked(path: Path, wanted: str, read: Callable[[Path], Any] = lambda path: None) -> Any:
    """What a file holds, once its checksum is right."""
    try:
        if sha256_of(path) != wanted:
            raise _Damaged(f"{path.name} is not what was written: its checksum differs")
        return read(path)
    except (OSError, SafetensorError, RuntimeError, ValueError, UnpicklingError) as error:
        raise _Damaged(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error


def check_same_config(old: Mapping[str, Any], new: Mapping[str, Any], experiment: str) -> None:
    """Refuses to go on with an experiment under other settings; the number of rounds is another matter.

    Raises:
        CheckpointError: names each differing setting with both values.
    """
    was, now = by_name(old), by_name(new)
    differing = [
        f"{name}: was {was.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(set(was) | set(now))
        if name != "num_rounds" and was.get(name) != now.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"experiment {experiment!r} has a checkpoint of other settings ({'; '.join(differing)}); give the run "
            "another experiment id, or remove the checkpoint folder"
        )


def check_same_rounds(was: int, now: int, next_round: int, following: Sequence[str], experiment: str) -> None:
    """Refuses another number of rounds where it would change rounds that are done.

    Args:
        was, now: ``num_rounds`` before and now.
        next_round: the first round that is not done.
        following: settings whose effect in a round depends on ``num_rounds``.
        experiment: id.

    Raises:
        CheckpointError: names the settings, or the least number.
    """
    if next_round > was:
        raise CheckpointError(
            f"the checkpoint of experiment {experiment!r} is of round {next_round}, but its run had {was} rounds; "
            f"{_REMEDY}"
        )
    if now < next_round:
        raise CheckpointError(
            f"experiment {experiment!r} has done {next_round} rounds already, num_rounds is {now}; set it to at least "
            f"{next_round}, or use another experiment id"
        )
    if now != was and following:
        raise CheckpointError(
            f"experiment {experiment!r} was begun with num_rounds={was}, is {now}, and {', '.join(following)} "
            f"depends on it: the rounds that are done would have gone another way. Set num_rounds={was}, or use "
            "another experiment id"
        )
