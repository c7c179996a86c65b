"""Provide settings of small runs, and access to what such a run left, for tests of several folders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fairflare.core.cells import SUPPRESSED, UNDEFINED, Cell, values_of
from fairflare.reporting.results import read_document
from tests.sections import as_before

VALIDATED = "validation.split/"  # before the name of a metric that :func:`rows` puts on the validation split

FUNDUS: dict[str, Any] = {
    "image_size": [33, 33], "features": [4, 4, 8, 8], "phantom": "fundus", "phantom_samples": 60, "phantom_test": 40,
    "partition": "iid", "local_epochs": 1, "batch_size": 16,
}  # fmt: skip
VOLUMES: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.1, "local_epochs": 1,
}  # fmt: skip
#: Of a task itself; all sites are alike.
CLASSES: dict[str, Any] = {
    "phantom": "fundus", "image_size": [32, 32], "features": [4, 4, 8, 8], "phantom_sites": 2, "phantom_samples": 60,
    "phantom_test": 40, "partition": "iid", "corrupted_sites": 0,
}  # fmt: skip
RESULTS = Path("server/simulate_job/fairflare")


def run_document(results: Path) -> Any:
    """Return a run's results, given by their folder or file, with the figures in sections beside the cells."""
    return as_before(read_document(results))


def model_in(results: Path, name: str = "FL_global_model.pt") -> dict[str, torch.Tensor]:
    return torch.load(results.parent / name, weights_only=True)["model"]  # type: ignore[no-any-return]


def without_times(value: Any) -> Any:
    """Return results without values of a clock."""
    clocks = ("seconds", "started", "updated", "finished", "run")  # and the id of the run
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in clocks and not k.endswith("seconds")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def rows(metrics: dict[str, Any], split: str = "test", *, withheld: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return metrics as the cells that a site sends, those of a name ``validation.split/...`` of that split."""
    cells = []
    for name, value in metrics.items():
        where, metric = split, name
        if str(name).startswith(VALIDATED):
            where, metric = "validation", name.removeprefix(VALIDATED)
        undefined = isinstance(value, float) and math.isnan(value)
        cells.append({"metric": metric, "split": where, **({"reason": UNDEFINED} if undefined else {"value": value})})
    return [*cells, *({"metric": name, "split": split, "reason": SUPPRESSED} for name in withheld)]


def metric_values(cells: Sequence[Any], split: str = "") -> dict[str, Any]:
    """Return the metrics in cells, sent or to be sent, by name; ``split``: of that split alone."""
    every = [Cell(**cell) if isinstance(cell, dict) else cell for cell in cells or ()]
    return values_of(cell for cell in every if split in ("", cell.split))


def withheld_names(cells: Sequence[Any]) -> list[str]:
    """Return the names of the metrics that a site withholds, in the order in which it says so."""
    every = [Cell(**cell) if isinstance(cell, dict) else cell for cell in cells]
    return [cell.name for cell in every if cell.reason == SUPPRESSED]
