"""What is recorded of a run, and its form in files: plain JSON values and CSV rows.

The format is described in ``docs/results.md``.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, datetime
from typing import Any

from fairflare.core.files import csv_row

#: Columns of the CSV files.
CSV_COLUMNS: dict[str, tuple[str, ...]] = {
    "sites.csv": ("round", "phase", "site", "metric", "value"),
    "layers.csv.bz2": ("round", "layer", "site", "cka", "dissimilarity", "weight"),
    "phases.csv": ("round", "phase", "seconds", "bytes_out", "bytes_in", "asked", "answered"),
    "left_out.csv": ("round", "phase", "site", "reason"),
}

SUPPRESSED = "suppressed"  # in place of a value that its site keeps for too few cases

#: Of the values by layer and site, which a long run has millions of: significant digits, decimals, digits as CSV.
LAYER_DIGITS = 8
CKA_DECIMALS = 6
CSV_DIGITS = 7


@dataclass(frozen=True)
class LeftOut:
    """A site that a round went on without."""

    site: str
    phase: str
    reason: str


@dataclass(frozen=True)
class PhaseRecord:
    """One exchange with the sites: wall time, bytes on the wire, how many sites were asked and answered."""

    name: str
    seconds: float
    bytes_out: int
    bytes_in: int
    asked: int
    answered: int


@dataclass(frozen=True)
class Warned:
    """Something that one site could do to a round, or would have done without a bound.

    Attributes:
        site: whose; empty: nobody's.
        kind: ``majority``, or the bound that was at work and on what.
        value, used: as claimed or sent; as it counts.
        text: in words, without site and round.
        layers: in how many layers, where weights are by layer.
    """

    site: str
    kind: str
    value: float
    used: float
    text: str
    layers: int | None = None


@dataclass
class RoundRecord:
    """What is kept of one round.

    Attributes:
        current_round: from 0.
        sites: sites asked.
        accepted: sites whose model is in the new global model.
        left_out: sites not asked, or asked and not accepted, with the phase and the reason.
        phases: in the order in which they ran.
        validation: ``{site: {metric: value}}`` of the *received* model, on the site's validation split.
        train: ``{site: {"loss": ..., "num_samples": ..., ...}}`` of the local training; ``"state_lost"`` where the site
            could not use what it had kept of earlier rounds.
        site_weights: ``{site: weight}`` where the method has one weight for a whole model.
        layers: ``{layer: {site: {"cka": ..., "dissimilarity": ..., "weight": ...}}}`` where it has one per
            layer.
        reports: ``{site: {field: value}}``, the method's own reports.
        values: what the method says of the round as a whole.
        details: more of it, JSON-like.
        warnings: where a bound on one site's influence was at work, and who held more than half of the weight.
        suppressed: ``{site: names}`` of what stays there for too few cases: ``metrics/...`` (of the validation split),
            ``report/...``, ``stats/...``.
        notes: sentences about single sites: what a filter at the site left of its model.
        test: ``{site: {metric: value}}`` of the round's *new* model on the test splits, where that was asked for.
        global_test: ``{metric: value}`` of it on the images of all sites together, where there are such.
    """

    current_round: int
    sites: list[str]
    accepted: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    phases: list[PhaseRecord] = field(default_factory=list)
    validation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    train: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    site_weights: Mapping[str, float] | None = None
    layers: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[Warned] = field(default_factory=list)
    suppressed: Mapping[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    test: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    global_test: Mapping[str, float] | None = None


# ------------------------------------------------------------------------------------------------ JSON


def encode(value: Any) -> str:
    """One line of strict JSON, of what :func:`as_json` gave."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def round_as_json(record: RoundRecord) -> dict[str, Any]:
    """A round as JSON types; of the values by layer and site, by far the most of it, the first digits.

    ``cka`` has :data:`CKA_DECIMALS` (``dissimilarity`` is the accurate one), any other :data:`LAYER_DIGITS`.

    Raises:
        TypeError: a value that JSON cannot hold (names its place).
    """
    plain: dict[str, Any] = as_json(record, "round")
    for by_site in (plain["layers"] or {}).values():
        for values in by_site.values():
            for name, value in values.items():
                if isinstance(value, float):
                    digits = f".{CKA_DECIMALS}f" if name == "cka" else f".{LAYER_DIGITS}g"
                    values[name] = float(format(value, digits))
    return plain


def as_json(value: Any, where: str) -> Any:
    """The value as JSON types; NaN and infinity, which JSON does not have, become None.

    Args:
        value: records, mappings, sequences, sets, paths, dates, NumPy and torch scalars and arrays, within each other.
        where: name of the value, for the message.

    Raises:
        TypeError: something else (names its place).
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [as_json(item, where) for item in sorted(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    if hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays
        return as_json(value.tolist(), where)
    raise TypeError(f"{where} is of type {type(value).__name__}, which results.json cannot hold")


# ------------------------------------------------------------------------------------------------ CSV


def table_rows(record: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """The CSV rows of an encoded round."""
    number = record["current_round"]
    sites = _metric_rows(number, "validation", record["validation"])
    sites += _metric_rows(number, "train", record["train"])
    sites += _metric_rows(number, "report", record["reports"])
    sites += _metric_rows(number + 1, "test", record["test"])
    sites += _metric_rows(number + 1, "global_test", {"": record.get("global_test") or {}})
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
    """The CSV rows of what follows the last round."""
    sites = _metric_rows(number, "test", final["test"] or {})
    sites += _metric_rows(number, "global_test", {"": (final.get("global_test") or {}).get("metrics") or {}})
    kept = (final.get("suppressed") or {}).items()
    sites += [[number, "test", site, metric, SUPPRESSED] for site, names in kept for metric in names]
    if (best := final.get("best")) and best["round"] + 1 != number:
        sites += _metric_rows(best["round"] + 1, "test_best", final["test_best"] or {})
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
    """Rows for the plain numbers; arrays and text stay in ``results.json``."""
    return [
        [number, phase, site, metric, value]
        for site, metrics in by_site.items()
        for metric, value in metrics.items()
        if value is None or isinstance(value, (int, float))
    ]


def _suppressed_rows(number: int, by_site: Mapping[str, Iterable[str]]) -> list[list[Any]]:
    """In the words of the rows that have values."""
    phases = {"metrics": "validation", "report": "report", "stats": "train"}
    found = []
    for site, names in by_site.items():
        for of, _, name in (name.partition("/") for name in names):
            if of in phases and (of != "stats" or name == "train_loss"):
                found.append([number, phases[of], site, "loss" if of == "stats" else name, SUPPRESSED])
    return found


def _short(value: Any) -> Any:
    return float(f"{value:.{CSV_DIGITS}g}") if isinstance(value, float) else value


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as lines of a CSV file."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(csv_row, rows))  # None becomes an empty cell
    return buffer.getvalue()
