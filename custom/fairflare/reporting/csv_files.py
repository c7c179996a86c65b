"""Write the figures of a run to CSV files, one row for each figure."""

from __future__ import annotations

import bz2
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import csv_text, write_whole
from fairflare.reporting.documents import SUPPRESSED
from fairflare.reporting.groups import group_rows

#: Names of the columns of each CSV file, by the file's name.
CSV_COLUMNS: dict[str, tuple[str, ...]] = {
    "sites.csv": ("round", "phase", "site", "metric", "value"),
    "layers.csv.bz2": ("round", "layer", "site", "cka", "dissimilarity", "weight"),
    "phases.csv": ("round", "phase", "seconds", "bytes_out", "bytes_in", "asked", "answered"),
    "left_out.csv": ("round", "phase", "site", "reason"),
}
CSV_DIGITS = 7  # significant digits of the values by layer and site


class CsvFiles:
    """Append rows to the CSV files of a results folder; ``layers.csv.bz2``, by far the largest, is compressed.

    Args:
        folder: the results folder, which the caller creates.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rewrite(self, rounds: Iterable[Mapping[str, Any]]) -> None:
        """Write all CSV files anew, with the rows of the given encoded rounds."""
        for name, columns in CSV_COLUMNS.items():
            write_whole(
                self.folder / name, partial(Path.write_bytes, data=_packed(name, [list(columns)])), durable=False
            )
        for record in rounds:
            self.add(table_rows(record))

    def add(self, rows: Mapping[str, list[list[Any]]]) -> None:
        """Append rows to the CSV files; ``rows`` are by file name, from :func:`table_rows` or :func:`final_rows`."""
        for name, found in rows.items():
            if found:
                with (self.folder / name).open("ab") as file:
                    file.write(_packed(name, found))


def _packed(name: str, rows: list[list[Any]]) -> bytes:
    """Return rows as the bytes of a CSV file; a compressed file is one of many streams, which are read as one."""
    data = csv_text(rows).encode()
    return bz2.compress(data) if Path(name).suffix == ".bz2" else data


def table_rows(record: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Return the rows that a round adds to the CSV files of a run, by file name."""
    number = record["current_round"]
    told: list[tuple[int, str, Mapping[str, Mapping[str, Any]]]] = [
        (number, "validation", record["validation"]),
        (number, "train", record["train"]),
        (number, "report", record["reports"]),
        (number + 1, "test", record["test"]),
        (number + 1, "global_test", {"": record.get("global_test") or {}}),
    ]
    sites = [row for at, phase, by_site in told for row in _metric_rows(at, phase, by_site)]
    sites += _suppressed_rows(number, record.get("suppressed") or {})
    sites += [[number, "aggregate", site, "weight", w] for site, w in (record["site_weights"] or {}).items()]
    return {
        "sites.csv": sites,
        "layers.csv.bz2": [
            [number, layer, site, *(_short(values.get(column)) for column in CSV_COLUMNS["layers.csv.bz2"][3:])]
            for layer, by_site in (record["layers"] or {}).items()
            for site, values in by_site.items()
        ],
    } | _exchange_rows(number, record)


def final_rows(number: int, final: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Return the CSV rows of the final test, by file name; their ``round`` is ``number``."""
    groups, best = final.get("groups"), final.get("best")
    best_at = best["round"] + 1 if best else number
    kept = (final.get("suppressed") or {}).items()
    clinical = {
        site: {f"{label}/{name}": value for label, own in of.items() for name, value in own.items()}
        for site, of in (final.get("clinical") or {}).items()
    }
    sites = [
        *_metric_rows(number, "validation", final.get("validation") or {}),
        *_metric_rows(number, "test", final["test"] or {}),
        *_metric_rows(number, "global_test", {"": (final.get("global_test") or {}).get("metrics") or {}}),
        *([number, "test", site, metric, SUPPRESSED] for site, names in kept for metric in names),
        *(group_rows(number, groups) if groups else []),
        *_metric_rows(number, "clinical", clinical),
        *(_metric_rows(best_at, "test_best", final["test_best"] or {}) if best_at != number else []),
    ]
    return {"sites.csv": sites} | _exchange_rows(number, final)


def _exchange_rows(number: int, record: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    return {
        "phases.csv": [
            [number, phase["name"], *(phase[column] for column in CSV_COLUMNS["phases.csv"][2:])]
            for phase in record["phases"]
        ],
        "left_out.csv": [[number, left["phase"], left["site"], left["reason"]] for left in record["left_out"]],
    }


def _metric_rows(number: int, phase: str, by_site: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """Return a row for each metric that is a plain number; arrays and texts are in ``results.json`` alone."""
    return [
        [number, phase, site, metric, value]
        for site, metrics in by_site.items()
        for metric, value in metrics.items()
        if value is None or isinstance(value, (int, float))
    ]


def _suppressed_rows(number: int, by_site: Mapping[str, Iterable[str]]) -> list[list[Any]]:
    """Return rows for withheld values, under the same phases and metrics as rows of reported values."""
    phases = {"metrics": "validation", "report": "report", "stats": "train"}
    parts = ((site, *name.partition("/")[::2]) for site, names in by_site.items() for name in names)
    return [
        [number, phases[of], site, "loss" if of == "stats" else name, SUPPRESSED]
        for site, of, name in parts
        if of in phases and (of != "stats" or name == "train_loss")
    ]


def _short(value: Any) -> Any:
    return float(f"{value:.{CSV_DIGITS}g}") if isinstance(value, float) else value
