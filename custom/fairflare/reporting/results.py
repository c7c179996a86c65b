"""What a run leaves behind for reports: ``results.json``, CSV files and a live event log.

The format is described in ``docs/results.md``; a change of meaning raises ``SCHEMA_VERSION``.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fairflare.core import checks
from fairflare.core.files import write_whole
from fairflare.reporting.records import (
    CSV_COLUMNS,
    LeftOut,
    PhaseRecord,
    RoundRecord,
    as_json,
    csv_text,
    encode,
    final_rows,
    table_rows,
)

__all__ = ["CSV_COLUMNS", "SCHEMA_VERSION", "LeftOut", "PhaseRecord", "ResultsStore", "RoundRecord", "read_results"]

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"
PROGRESS_FILE = "progress.jsonl"
_NO_TEST: dict[str, Any] = {"test": None, "fairness": None, "left_out": [], "phases": []}
_ENDS = ("completed", "failed")


class ResultsStore:
    """Writes the results of one run into a folder.

    ``results.json`` is replaced as a whole after every change and says ``"running"`` until :meth:`finish`, so
    that an interrupted run is never taken for a complete one. CSV rows are appended round by round and
    written anew on a resume. Methods may be called from several threads.

    Args:
        folder: made when it does not exist. What an earlier run left there is replaced by :meth:`start`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._lock = threading.RLock()
        self._info: dict[str, Any] | None = None
        self._status = "running"
        self._reason = ""
        self._started = ""
        self._finished: str | None = None
        self._resumed: list[dict[str, Any]] = []
        self._rounds: list[str] = []  # each encoded once: a long run rewrites the file often
        self._last_round = -1
        self._final: dict[str, Any] = dict(_NO_TEST)

    def start(self, info: Mapping[str, Any]) -> None:
        """Begins a new run and forgets whatever was recorded before.

        Args:
            info: experiment, method, job id, versions, seed, sites, config, ``synthetic`` flag and so on;
                JSON-like values, see ``docs/results.md`` for the keys that the tables read.

        Raises:
            TypeError: a value that JSON cannot hold (names the key).
        """
        plain = as_json(info, "info")
        with self._lock:
            self._info = plain
            self._status, self._reason, self._finished = "running", "", None
            self._started = _now()
            self._resumed, self._rounds, self._last_round = [], [], -1
            self._final = dict(_NO_TEST)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / PROGRESS_FILE).write_text("", encoding="utf-8")
            self._rewrite_tables()
            self._write()

    def update_info(self, **values: Any) -> None:
        """Adds to ``info`` what is known only after the start (``synthetic``).

        Raises:
            ValueError: :meth:`start` was not called, or the run is finished.
        """
        with self._lock:
            self._check_running()
            self._info = {**(self._info or {}), **as_json(values, "info")}
            self._write()

    def add_round(self, record: RoundRecord) -> None:
        """Adds a finished round.

        Raises:
            ValueError: :meth:`start` was not called, the run is finished, or the round is not after the last
                one.
            TypeError: a value that JSON cannot hold (names the key).
        """
        plain = as_json(record, "round")
        with self._lock:
            self._check_running()
            self._last_round = checks.whole("the next current_round", record.current_round, low=self._last_round + 1)
            self._rounds.append(encode(plain))
            for name, rows in table_rows(plain).items():
                self._append(name, rows)
            self._write()

    def finish(
        self,
        status: str,
        test: Mapping[str, Mapping[str, float]] | None = None,
        fairness: Mapping[str, Any] | None = None,
        reason: str = "",
        *,
        left_out: Iterable[LeftOut] = (),
        phases: Iterable[PhaseRecord] = (),
    ) -> None:
        """Ends the run.

        Args:
            status: ``"completed"`` or ``"failed"``; a run that completed can still be marked failed, never
                the reverse, and keeps its figures.
            test: ``{site: {metric: value}}`` of the final global model on the sites' test splits.
            fairness: ``{metric: summary}``, summaries as dicts or ``FairnessSummary``.
            reason: why it failed.
            left_out: sites that the final test went on without.
            phases: exchanges after the last round, such as the test itself.

        Raises:
            ValueError: another status, or the run is finished already or (``"completed"``) was never started.
            TypeError: a value that JSON cannot hold (names the key).
        """
        checks.choice("status", status, _ENDS)
        final = {
            "test": as_json(test, "test"),
            "fairness": as_json(fairness, "fairness"),
            "left_out": as_json(list(left_out), "left_out"),
            "phases": as_json(list(phases), "phases"),
        }
        with self._lock:
            if status == "completed":
                self._check_running()
            if self._info is None:  # failed before it started
                self.start({})
            if self._finished is None:
                self._final = final
                for name, rows in final_rows(self._last_round + 1, final).items():
                    self._append(name, rows)
            self._status, self._reason, self._finished = status, reason, _now()
            self._write()

    def event(self, kind: str, **details: Any) -> None:
        """Appends a line to ``progress.jsonl`` for whoever watches the run, and flushes it.

        Raises:
            TypeError: a value that JSON cannot hold (names the key).
        """
        line = encode({"time": _now(), "kind": kind} | as_json(details, "event"))
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / PROGRESS_FILE).open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with this run in another folder; JSON-able."""
        with self._lock:
            return {
                "schema_version": SCHEMA_VERSION,
                "started": self._started,
                "last_round": self._last_round,
                "rounds": list(self._rounds),
                "resumed": list(self._resumed),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a run from its :meth:`state_dict`; call :meth:`start` first.

        Raises:
            ValueError: :meth:`start` was not called, or the state is of another schema version.
        """
        _check_schema("saved results have", state)
        with self._lock:
            self._check_running()
            self._started = str(state["started"])
            self._last_round = int(state["last_round"])
            self._rounds = [str(line) for line in state["rounds"]]
            self._resumed = [*state["resumed"], {"time": _now(), "next_round": self._last_round + 1}]
            self._rewrite_tables()
            self._write()

    def _check_running(self) -> None:
        if self._info is None:
            raise ValueError("the results store was not started")
        if self._status != "running":
            raise ValueError(f"the run is already {self._status}")

    def _write(self) -> None:
        head = {
            "schema_version": SCHEMA_VERSION,
            "status": self._status,
            "reason": self._reason,
            "started": self._started,
            "updated": _now(),
            "finished": self._finished,
            "resumed": self._resumed,
            "info": self._info,
        } | self._final
        lines = [f"{json.dumps(key)}: {encode(value)}" for key, value in head.items()]
        rounds = ",\n".join(self._rounds)
        lines.append(f'"rounds": [\n{rounds}\n]' if rounds else '"rounds": []')
        _replace(self.folder / RESULTS_FILE, "{\n" + ",\n".join(lines) + "\n}\n")

    def _rewrite_tables(self) -> None:
        tables: dict[str, list[list[Any]]] = {name: [list(columns)] for name, columns in CSV_COLUMNS.items()}
        for line in self._rounds:
            for name, rows in table_rows(json.loads(line)).items():
                tables[name].extend(rows)
        for name, rows in tables.items():
            _replace(self.folder / name, csv_text(rows))

    def _append(self, name: str, rows: list[list[Any]]) -> None:
        if rows:
            with (self.folder / name).open("a", encoding="utf-8", newline="") as file:
                file.write(csv_text(rows))


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a ``results.json``, given itself or its folder.

    Returns:
        The document as ``docs/results.md`` describes it; undefined numbers are None.

    Raises:
        ValueError: no such file, not JSON, or another schema version (names the file).
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULTS_FILE
    if not file.is_file():
        raise ValueError(f"{file}: no results there")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not a results file: {error}") from error
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ValueError(f"{file}: not a results file: it has no schema_version")
    _check_schema(f"{file}:", document)
    checks.choice(f"{file}: status", document.get("status"), ("running", *_ENDS))
    return document


# ------------------------------------------------------------------------------------------------------------


def _check_schema(what: str, content: Mapping[str, Any]) -> None:
    found = content.get("schema_version")
    if found != SCHEMA_VERSION:
        raise ValueError(f"{what} schema version {found!r}, this FairFlare reads {SCHEMA_VERSION}")


def _replace(path: Path, text: str) -> None:
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8", newline=""))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
