"""The figures of a run as CSV files, one row a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.core.files import write_whole
from fairflare.core.record_log import RecordLog
from fairflare.reporting.records import CSV_COLUMNS, csv_text, table_rows


class CsvFiles:
    """Appends to the CSV files of a folder; the one by layer and site, by far the largest, is compressed.

    Args:
        folder: made by whoever writes first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._packed = {
            name: RecordLog(folder / name, durable=False) for name in CSV_COLUMNS if Path(name).suffix == ".bz2"
        }

    def rewrite(self, rounds: Iterable[Mapping[str, Any]]) -> None:
        """All files anew, with these rounds."""
        for name, columns in CSV_COLUMNS.items():
            head = csv_text([list(columns)])
            if name in self._packed:
                self._packed[name].clear()
                self._packed[name].append(head)
            else:
                write_whole(self.folder / name, partial(_write_text, head), durable=False)
        for record in rounds:
            self.add_round(record)

    def add_round(self, record: Mapping[str, Any]) -> None:
        """The rows of an encoded round."""
        for name, rows in table_rows(record).items():
            self._append(name, rows)

    def add_final(self, rows: Mapping[str, list[list[Any]]]) -> None:
        """The rows of what follows the last round."""
        for name, found in rows.items():
            self._append(name, found)

    def _append(self, name: str, rows: list[list[Any]]) -> None:
        if not rows:
            return
        if name in self._packed:
            self._packed[name].append(csv_text(rows))
        else:
            with (self.folder / name).open("a", encoding="utf-8", newline="") as file:
                file.write(csv_text(rows))


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8", newline="")
