"""Write and read the results of a run: ``results.json``, and an event log that grows during the run.

``docs/results_reference.md`` describes the format; a change of a key's meaning must raise ``SCHEMA_VERSION``.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fairflare.base import checks
from fairflare.base.disk.files import append, private_folder, remove_partials, write_whole
from fairflare.base.disk.record_log import DamagedLog, RecordLog, records
from fairflare.core.cells import Cell, Vector
from fairflare.reporting.documents import (
    HEAD,
    SCHEMA_VERSION,
    LeftOut,
    PhaseRecord,
    RoundRecord,
    RunResults,
    encode,
    encode_value,
    round_as_json,
)
from fairflare.reporting.layout import format_count, join_parts
from fairflare.reporting.reading import read_part

__all__ = ["SCHEMA_VERSION", "LeftOut", "PhaseRecord", "ResultsStore", "RoundRecord", "read_results"]

RESULTS_FILE = "results.json"
ROUNDS_FILE = "rounds.jsonl.bz2"  # holds the rounds during a run; after the run results.json holds them
PROGRESS_FILE = "progress.jsonl"
PAGE_FILE = "report.html"  # page that is written at the end of a completed run
RESERVE_FILE = ".reserve"
RESERVED = 256 * 1024  # bytes of the reserve file: several times results.json without rounds
#: The document of a run that has not begun, without its rounds.
_EMPTY: dict[str, Any] = {
    **dict.fromkeys(name for name in RunResults.model_fields if name != "rounds"),
    "schema_version": SCHEMA_VERSION, "status": "running", "reason": "", "started": "", "updated": "", "resumed": [],
    "went_back": [], "info": {}, "cells": [], "vectors": [], "left_out": [], "phases": [],
}  # fmt: skip
_ENDS = ("completed", "failed")
_KEPT = ("started", "resumed", "went_back")  # keys of the document that a checkpoint saves


class ResultsStore:
    """Write the results of one run into a folder.

    During the run ``results.json`` holds everything but the rounds, with the status ``"running"``, and each round is
    appended to a log. :meth:`finish` writes the rounds into ``results.json``. :func:`read_results` returns the same
    view at any time. The amount written for a round does not grow with the number of rounds. A reserve file keeps space
    free, so that a run whose disk is full can still record its end. Methods may be called from several threads.

    Args:
        folder: the results folder, created if it does not exist. :meth:`start` replaces an earlier run's files in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.log = RecordLog(self.folder / ROUNDS_FILE)
        self._lock = threading.RLock()
        self._head = dict(_EMPTY)
        self._last_round = -1

    def start(self, info: Mapping[str, Any]) -> None:
        """Begin the record of a new run, and remove records of an earlier run.

        Args:
            info: description of the run: experiment, method, job id, versions, seed, sites, config, ``synthetic`` flag
                and so on; JSON-like values, see ``docs/results_reference.md`` for the keys that the tables read.

        Raises:
            TypeError: a value that JSON cannot hold (names the key).
            OSError: the disk is full or cannot be written.
        """
        with self._lock:
            self._head = {**_EMPTY, "info": encode_value(info, "info"), "started": _now()}
            self._last_round = -1
            private_folder(self.folder)
            remove_partials(self.folder)
            self._write()  # first, so that the new log is never read as an earlier run's rounds
            self.log.clear()
            (self.folder / PAGE_FILE).unlink(missing_ok=True)
            write_whole(self.folder / PROGRESS_FILE, lambda path: path.write_text(""), durable=False)
            # Random bytes, for which every file system must allocate space.
            write_whole(self.folder / RESERVE_FILE, lambda path: path.write_bytes(os.urandom(RESERVED)))

    @property
    def info(self) -> dict[str, Any]:
        """Return the description ``info`` of the run, as JSON types."""
        return dict(self._head["info"])

    def update_info(self, **values: Any) -> None:
        """Add facts to ``info`` that are known only after the start, such as ``synthetic``.

        Raises:
            ValueError: :meth:`start` was not called, or the run is finished.
        """
        with self._lock:
            self._check_running()
            self._head["info"] = {**self._head["info"], **encode_value(values, "info")}
            self._write()

    def add_round(self, record: RoundRecord) -> None:
        """Record a finished round in the log and in ``results.json``.

        Raises:
            ValueError: :meth:`start` was not called, the run is finished, or the round is not after the last
                one.
            TypeError: a value that JSON cannot hold (names the key).
        """
        with self._lock:
            self._check_running()
            number = checks.whole("the next current_round", record.current_round, low=self._last_round + 1)
            self.log.append(encode(round_as_json(record)) + "\n")
            self._last_round = number
            self._write()

    def finish(
        self,
        status: str,
        reason: str = "",
        *,
        cells: Iterable[Cell] = (),
        vectors: Iterable[Vector] = (),
        **parts: Any,
    ) -> None:
        """Record the end of the run: its status, the final test, and all rounds in ``results.json``.

        Args:
            status: ``"completed"`` or ``"failed"``; a run that completed can still be marked failed, never
                the reverse, and keeps its figures.
            reason: why the run failed.
            cells, vectors: the figures; columns that are empty are left out of the file.
            parts: further parts of the document, as :class:`fairflare.reporting.documents.RunResults` declares them.

        Raises:
            ValueError: the status is unknown, or it is ``"completed"`` and the run was never started or is over.
            TypeError: a value that JSON cannot hold (names the key).
            OSError: the disk is full. For a failed run ``results.json`` is written without its rounds if possible.
        """
        checks.choice("status", status, _ENDS)
        final = encode_value(parts, "the results") | {
            name: [{key: part for key, part in row.items() if part not in (None, "")} for row in rows]
            for name, rows in encode_value({"cells": list(cells), "vectors": list(vectors)}, "cells").items()
        }
        with self._lock:
            if status == "completed":
                self._check_running()
            (self.folder / RESERVE_FILE).unlink(missing_ok=True)
            if not self._head["started"]:
                self._begin_failed()
            if self._head["finished"] is None:
                self._head |= final
            self._head |= {"status": status, "reason": reason, "finished": _now()}
            try:  # a run without a log had completed
                self._write(
                    self.log.read() if self.log.path.exists() else map(encode, read_document(self.folder)["rounds"])
                )
            except (OSError, DamagedLog):
                if status != "failed":
                    raise
                self._write()  # the rounds stay in the log, where read_results finds them
            else:
                self.log.path.unlink(missing_ok=True)

    def event(self, kind: str, **details: Any) -> None:
        """Append an event to ``progress.jsonl``, at once, for programs that watch the run.

        Raises:
            TypeError: a value that JSON cannot hold (names the key).
        """
        line = encode({"time": _now(), "kind": kind} | encode_value(details, "event"))
        with self._lock:
            append(self.folder / PROGRESS_FILE, line.encode() + b"\n", durable=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves besides the records of :attr:`log`, as values that JSON can hold."""
        with self._lock:
            return {
                "schema_version": SCHEMA_VERSION,
                "last_round": self._last_round,
                **{key: self._head[key] for key in _KEPT},
            }

    def load_state_dict(self, state: Mapping[str, Any], rounds: RecordLog) -> None:
        """Resume a run's results from their :meth:`state_dict` and a copy of the log; call :meth:`start` first.

        Raises:
            ValueError: :meth:`start` was not called, the state is of another schema version, or the log is damaged.
        """
        with self._lock:
            self._take(state, rounds)
            self._head |= {key: state[key] for key in _KEPT}
            self._head["resumed"] = [*state["resumed"], {"time": _now(), "next_round": self._last_round + 1}]
            self._write()

    def go_back(self, state: Mapping[str, Any], rounds: RecordLog, reason: str) -> None:
        """Remove the rounds after an earlier state of this run, and record this under ``went_back``.

        Raises:
            ValueError: as in :meth:`load_state_dict`.
        """
        with self._lock:
            before = self._last_round
            self._take(state, rounds)
            self._head["went_back"] = [
                *self._head["went_back"],
                {"time": _now(), "from_round": before + 1, "to_round": self._last_round + 1, "reason": reason},
            ]
            self._write()

    def _take(self, state: Mapping[str, Any], rounds: RecordLog) -> None:
        _check_schema("saved results have", state)
        self._check_running()
        self.log.clear()
        self.log.take_over(rounds)
        self._last_round = int(state["last_round"])

    def _check_running(self) -> None:
        checks.refuse({
            "the results store was not started; call start() first": not self._head["started"],
            f"the run is already {self._head['status']}": self._head["status"] != "running",
        })  # fmt: skip

    def _begin_failed(self) -> None:
        """Begin the record of a run that failed before :meth:`start`, with few writes, as the disk may be full."""
        self._head = {**_EMPTY, "info": {}, "started": _now()}
        private_folder(self.folder)
        self.log.open_at(0)
        for name in (PROGRESS_FILE, PAGE_FILE):
            (self.folder / name).unlink(missing_ok=True)
        self.log.clear()

    def _write(self, rounds: Iterable[str] = ()) -> None:
        self._head["updated"] = _now()
        write_whole(self.folder / RESULTS_FILE, lambda path: _write_document(path, self._head, rounds))


def mark_ended(folder: Path, reason: str) -> bool:
    """Record that a run failed because its process was ended from outside; return whether the folder has such a run.

    The results of a run that recorded its own end are not changed.
    """
    try:
        document = read_document(folder)
    except ValueError:
        return False
    if document["status"] != "running":
        return False
    rounds = map(encode, document.pop("rounds"))
    head = document | {"status": "failed", "reason": reason, "updated": _now(), "finished": _now()}
    write_whole(folder / RESULTS_FILE, lambda path: _write_document(path, head, rounds))
    (folder / RESERVE_FILE).unlink(missing_ok=True)
    return True


def results_in(path: Path) -> Path | None:
    """Return the path of ``results.json`` in a run folder, a workspace, a comparison's run or a FLARE download.

    The path of a file is returned as it is; ``None`` if no results were found.
    """
    if path.is_file():
        return path
    workspace = "server/simulate_job/fairflare"
    places = (".", "fairflare", workspace, f"simulator/{workspace}", "workspace/fairflare")
    return next((file for place in places if (file := path / place / RESULTS_FILE).is_file()), None)


def find_results(path: Path) -> Path:
    """Return the path of ``results.json`` as :func:`results_in` does, and refuse a path without results.

    Raises:
        ValueError: the path has no results; the message lists runs below the path.
    """
    if (file := results_in(path)) is None:
        runs = [
            str(place)
            for parent in (path / "runs", path) if parent.is_dir()
            for place in sorted(parent.iterdir()) if place.is_dir() and results_in(place)
        ]  # fmt: skip
        held = (
            f"it holds {format_count(len(runs), 'run')}: {join_parts(runs)}"
            if runs
            else "give a run's folder, as runs/METHOD-seed0"
        )
        raise ValueError(f"no results.json in {path}; {held}")
    return file


def read_results(path: str | os.PathLike[str]) -> RunResults:
    """Read a ``results.json``, given by its path or its folder, with the rounds of an unfinished run too.

    Returns:
        The document as ``docs/results_reference.md`` describes it, its keys as attributes; undefined numbers are None.

    Raises:
        ValueError: the file is missing, no JSON, or of another schema version, or a part is of the wrong kind; the
            message names the file.
    """
    document = read_document(path)
    try:
        return read_part(HEAD, document)
    except ValueError as error:
        raise ValueError(f"{Path(path) / RESULTS_FILE if Path(path).is_dir() else path}: {error}") from error


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON of the file that :func:`read_results` reads, without a check of its parts.

    Raises:
        ValueError: the file is missing, no JSON, or of another schema version; the message names the file.
    """
    file = Path(path) / RESULTS_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no results there; give the folder of a run")
    try:
        document = _decode(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a results file: {error}") from error
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ValueError(f"{file}: not a results file: it has no schema_version")
    _check_schema(f"{file}:", document)
    checks.choice(f"{file}: status", document.get("status"), ("running", *_ENDS))
    if not document.get("rounds"):
        document["rounds"] = [_decode(line) for line in records(file.parent / ROUNDS_FILE)]
    return document


# ------------------------------------------------------------------------------------------------------------


def _decode(text: str) -> Any:
    """Return the content of a JSON text; NaN and infinite numbers are ``None``.

    Raises:
        ValueError: no JSON, or a whole number of more than 64 bits, which no run writes and no page can draw.
    """

    def whole(digits: str) -> int:
        if abs(value := int(digits)) >= 2**64:
            raise ValueError(f"it has a whole number of {len(digits)} digits, {digits[:20]}..., and no run writes one")
        return value

    return json.loads(text, parse_constant=lambda constant: None, parse_int=whole)


def _check_schema(what: str, content: Mapping[str, Any]) -> None:
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{what} schema version {version!r}, this FairFlare reads {SCHEMA_VERSION}; use the version that wrote it"
        )


def _write_document(path: Path, head: Mapping[str, Any], rounds: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("{\n")
        file.writelines(f"{json.dumps(key)}:{encode(value)},\n" for key, value in head.items())
        file.write('"rounds":[')
        file.writelines((",\n" if number else "\n") + line.rstrip("\n") for number, line in enumerate(rounds))
        file.write("]\n}\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
