"""Save a checkpoint after each round, which outlives the job, since FLARE does not resume a job.

A folder for each experiment holds, for each of the last two rounds, ``state-NNNNNN.json`` and the files that this state
names with their checksums. The folder also holds the log of all rounds' results; a state records how many bytes of this
log belong to the state. A state is written last and atomically, so the files that it names are complete. Where one
checkpoint is damaged, the one before is loaded. Where only the log is damaged, the run is resumed with the rounds in
the log that can be read, and reports this.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from pydantic import BaseModel, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file

from fairflare.base.checks import refuse
from fairflare.base.disk.files import flush_to_disk, private_folder, save_torch, sha256_of, write_whole
from fairflare.base.disk.record_log import DamagedLog, RecordLog
from fairflare.base.settings import NonNegativeInt, flatten
from fairflare.exchange.messages import clean_state
from fairflare.exchange.tensor_folder import save_tensors
from fairflare.federation.plan.task_files import DEALT_TO
from fairflare.reporting.reading import read_part

BY_SITES = f"task.{DEALT_TO}"  # name of the setting whose default follows the number of sites
ROUNDS_FILE = "rounds.jsonl.bz2"
MEMORY_FOLDER = "memory"  # folder of the files that the rule keeps on disk
KEPT = 2  # number of checkpoints that a folder keeps
_STATE = re.compile(r"state-(\d{6,})\.json")
_CHANGED = "is not what was written: its checksum differs"
_REMEDY = "remove the checkpoint folder to start anew, or use another experiment id"


class CheckpointError(ValueError):
    """Report that a run cannot be resumed from its checkpoints; the text says why, and what to do."""


class _Damaged(Exception):
    """Report that the files of one checkpoint are not as they were written; the text names the file."""


@dataclass
class Checkpoint:
    """Store the state of a run after a round.

    Attributes:
        next_round: the first round that is not done.
        model: global model.
        rule: state of the rule (the method's server half).
        results: state of the results store.
        config: settings of the run; they are compared when the run is resumed.
        extra: further small state of the run. ``extra["best_round"]`` is the round that began with the best model: the
            model of the checkpoint with this ``next_round``.
        passed_over: why newer checkpoints were not loaded.
    """

    next_round: int
    model: dict[str, torch.Tensor]
    rule: dict[str, Any]
    results: dict[str, Any]
    config: dict[str, Any]
    extra: dict[str, Any]
    passed_over: list[str] = field(default_factory=list)


class LogHead(BaseModel):
    """Describe the first bytes of the log of rounds: the part that belongs to a checkpoint."""

    bytes: NonNegativeInt
    sha256: str


class Head(BaseModel):
    """Declare the content of ``state-NNNNNN.json``: a description of a checkpoint, with the checksums of its files.

    Attributes:
        format: version of the file's layout; files of another version are not read.
        next_round: the first round that is not done.
        files: checksums of the files of the model and of the rule's state, by name.
        memory: checksums of the files that the rule keeps on disk, by name.
        best: checksum of the best model's file, by the file's name; empty if there is none.
        rounds: the part of the log of rounds that belongs to the checkpoint.
        results, config, extra: see :class:`Checkpoint`.
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
Check = Callable[[Mapping[str, Any]], None]  # function that is given a state's ``extra``, and may raise


class CheckpointFolder:
    """Read and write each :class:`Checkpoint` in one folder; the last two are kept.

    No other process may write to the folder meanwhile (:class:`fairflare.base.disk.locks.FolderLock`).

    Args:
        folder: the experiment's folder of checkpoints.

    Attributes:
        log: records of the rounds before the checkpoint that was loaded or saved last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = RecordLog(folder / ROUNDS_FILE)
        self._sums: dict[str, str] = {}  # checksums of model files, by name
        self._memory: dict[Path, tuple[tuple[int, ...], str]] = {}

    def save(self, checkpoint: Checkpoint, rounds: RecordLog) -> None:
        """Write a checkpoint; after a crash at any point the earlier checkpoint or the new one is complete.

        Args:
            checkpoint: the checkpoint to save.
            rounds: log of the run's results; records that :attr:`log` lacks are appended to :attr:`log`.

        Raises:
            OSError: the disk is full or cannot be written. The earlier checkpoints are then kept.
        """
        private_folder(self.folder)
        number = checkpoint.next_round
        self.log.take_over(rounds)
        plain = {name: tensor.clone() for name, tensor in clean_state(checkpoint.model).items()}
        model, rule = _model_file(number), f"rule-{number:06d}.pt"
        self._sums[model] = self._put(model, lambda path: save_tensors(path, plain, None, "the global model"))
        best = _best_file(checkpoint.extra)
        content = Head(
            next_round=number,
            files={model: self._sums[model], rule: self._put(rule, lambda path: save_torch(checkpoint.rule, path))},
            memory=self._memory_sums(),
            best={best: self._sums[best]} if best in self._sums else {},  # kept while its model is the best
            rounds=LogHead(bytes=self.log.size, sha256=self.log.sha256),
            results=checkpoint.results,
            config=checkpoint.config,
            extra=checkpoint.extra,
        ).model_dump()
        text = json.dumps({"sha256": _sum_of(content), "content": content})
        write_whole(self._state(number), lambda path: path.write_text(text, encoding="utf-8"))
        self._remove_all_but(number)

    def load(self, check: Check = lambda extra: None) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; ``None`` when the folder has no checkpoint at all.

        Args:
            check: function that is given a state's ``extra`` before other files are read, and may raise.

        Raises:
            CheckpointError: all checkpoints are damaged (the message names the files), or a checkpoint contradicts
                itself.
        """
        reasons: list[str] = []
        for salvage in (False, True):  # an older checkpoint with whole results is preferred to a newer one without
            for number in self._numbers()[::-1]:
                try:
                    checkpoint = self._read(number, check, salvage=salvage)
                    return replace(checkpoint, passed_over=[*reasons, *checkpoint.passed_over])
                except _Damaged as error:
                    reasons += [] if salvage else [str(error)]
        refuse(
            {f"{self.folder}: no checkpoint can be read ({'; '.join(reasons)}); {_REMEDY}": reasons}, CheckpointError
        )
        return None

    def back_from(self, current_round: int) -> Checkpoint | None:
        """Return the checkpoint from before the last round, and remove newer ones; ``None`` when it cannot be read.

        Args:
            current_round: the round that could not be done; the checkpoint has ``next_round=current_round - 1``.

        Raises:
            CheckpointError: the checkpoint contradicts itself.
        """
        try:
            checkpoint = self._read(current_round - 1)
        except _Damaged:
            return None
        for number in self._numbers():
            if number >= current_round:
                self._state(number).unlink()
        flush_to_disk(self.folder)
        return checkpoint

    def best_model(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor] | None:
        """Return the best model so far; ``None`` when there is none, or its file is damaged or gone."""
        name = _best_file(checkpoint.extra)
        try:
            return _read_checked(self.folder / name, self._sums[name], load_file) if name in self._sums else None
        except _Damaged:
            del self._sums[name]
            return None

    # -- writing

    def _put(self, name: str, write: Callable[[Path], object]) -> str:
        """Write a file of a checkpoint, and return the file's checksum."""
        write_whole(self.folder / name, write)
        return sha256_of(self.folder / name)

    def _memory_sums(self) -> dict[str, str]:
        """Return checksums of the files that the rule keeps on disk; an unchanged file is not read again."""
        known, self._memory = self._memory, {}
        for path in sorted(p for p in (self.folder / MEMORY_FOLDER).rglob("[!.]*") if p.is_file()):
            status = path.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            before = known.get(path)
            self._memory[path] = before if before and before[0] == stamp else (stamp, sha256_of(path))
        return {str(path.relative_to(self.folder)): checksum for path, (_, checksum) in self._memory.items()}

    def _remove_all_but(self, newest: int) -> None:
        """Remove the files that the two newest checkpoints do not name."""
        needed: set[str] = set()
        for number in self._numbers():
            if not newest - KEPT < number <= newest:
                self._state(number).unlink()
            else:
                with suppress(_Damaged):
                    head = self._head(number)
                    needed.update(head.files, head.best)
        for path in self.folder.iterdir():
            if path.name.startswith(("model-", "rule-")) and path.name not in needed:
                path.unlink(missing_ok=True)
                self._sums.pop(path.name, None)

    # -- reading

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for path in self.folder.glob("*") if (match := _STATE.fullmatch(path.name)))

    def _state(self, number: int) -> Path:
        return self.folder / f"state-{number:06d}.json"

    def _head(self, number: int) -> Head:
        path = self._state(number)
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            content: dict[str, Any] = state["content"]
            if state["sha256"] != _sum_of(content):
                raise _Damaged(f"{path.name} {_CHANGED}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise _Damaged(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error
        try:
            return read_part(HEAD, content, path.name)
        except ValueError as error:
            raise _Damaged(str(error)) from error

    def _read(self, number: int, check: Check = lambda extra: None, *, salvage: bool = False) -> Checkpoint:
        head = self._head(number)
        check(head.extra)
        path, last = self._state(number), head.results.get("last_round", number - 1)
        refuse({
            f"{path}: next_round is {head.next_round}, must be {number}; {_REMEDY}": head.next_round != number,
            f"{path}: next_round is {number}, but the last round in its results is {last}; {_REMEDY}":
                last != number - 1,
        }, CheckpointError)  # fmt: skip
        model, rule = _model_file(number), f"rule-{number:06d}.pt"
        checkpoint = Checkpoint(
            next_round=number,
            model=_read_checked(self.folder / model, head.files[model], load_file),
            rule=_read_checked(
                self.folder / rule, head.files[rule], partial(torch.load, map_location="cpu", weights_only=True)
            ),
            results=head.results,
            config=head.config,
            extra=head.extra,
        )
        for name, wanted in head.memory.items():
            if (self.folder / name).exists():  # a missing file is left to the rule, which knows which files it needs
                _read_checked(self.folder / name, wanted)
        try:
            self.log.open_at(head.rounds.bytes)
            problem = "" if self.log.sha256 == head.rounds.sha256 else f"{ROUNDS_FILE} {_CHANGED}"
        except (DamagedLog, OSError) as error:
            problem = str(error)
        refuse({problem: problem and not salvage}, _Damaged)
        if problem:
            left = self.log.salvage(head.rounds.bytes)  # writes the log anew
            checkpoint.passed_over = [
                f"the results of {left} of {number} rounds can be read, the others are lost; the model is whole"
            ]
        self._sums = {**head.best, model: head.files[model]}
        return checkpoint


def _model_file(number: int) -> str:
    return f"model-{number:06d}.safetensors"


def _best_file(extra: Mapping[str, Any]) -> str:
    """Return the name of the best model's file; empty if there is none."""
    number = extra.get("best_round")
    return "" if number is None else _model_file(number)


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_checked(path: Path, wanted: str, read: Callable[[Path], Any] = lambda path: None) -> Any:
    """Return the content of a checkpoint's file, after a check of the file's checksum."""
    try:
        if sha256_of(path) != wanted:
            raise _Damaged(f"{path.name} {_CHANGED}")
        return read(path)
    except (OSError, SafetensorError, RuntimeError, ValueError, UnpicklingError) as error:
        raise _Damaged(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the settings of a run that differ from those of the experiment's earlier job, with both values.

    The number of rounds and settings that follow the number of sites are checked elsewhere: a site may join or leave.
    """
    was, now = flatten(old), flatten(new)
    return [
        f"{name}: was {was.get(name)!r}, is {now.get(name)!r}"
        for name in sorted({*was, *now} - {"num_rounds", BY_SITES})
        if was.get(name) != now.get(name)
    ]


def check_same_config(old: Mapping[str, Any], new: Mapping[str, Any], experiment: str) -> None:
    """Check that an experiment is resumed with the settings that it was begun with.

    Raises:
        CheckpointError: settings differ; the message names each of them with both values.
    """
    if differences := differing(old, new):
        raise CheckpointError(
            f"experiment {experiment!r} has a checkpoint of other settings ({'; '.join(differences)}); give the run "
            "another experiment id, or remove the checkpoint folder"
        )


def check_same_rounds(was: int, now: int, next_round: int, following: Sequence[str], experiment: str) -> None:
    """Check that a changed number of rounds does not contradict the rounds that are done.

    Args:
        was, now: ``num_rounds`` of the earlier job and of this one.
        next_round: the first round that is not done.
        following: settings whose effect in a round depends on ``num_rounds``.
        experiment: id of the experiment.

    Raises:
        CheckpointError: the number cannot be changed to ``now``; the message says why and what to set.
    """
    refuse({
        f"the checkpoint of experiment {experiment!r} is of round {next_round}, but its run had {was} rounds; "
        f"{_REMEDY}": next_round > was,
        f"experiment {experiment!r} has done {next_round} rounds already, num_rounds is {now}; set it to at least "
        f"{next_round}, or use another experiment id": now < next_round,
        f"experiment {experiment!r} was begun with num_rounds={was}, is {now}, and {', '.join(following)} depends on "
        f"it: the rounds that are done would have gone another way. Set num_rounds={was}, or use another experiment id":
            now != was and bool(following),
    }, CheckpointError)  # fmt: skip
