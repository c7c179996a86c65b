"""Find the model file of a run, and read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fairflare.base.checks import refuse
from fairflare.base.task import Task
from fairflare.exchange.sent_tensors import rebuilt
from fairflare.federation.plan.run_settings import RESULTS_FOLDER
from fairflare.federation.plan.site_training import PERSONAL
from fairflare.federation.record.models import BEST_MODEL_FILE, MODEL_FILE
from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import RESULTS_FILE, read_results
from fairflare.tasks.networks import load_fitting, read_checkpoint

#: Where a run's model file may be, from the given folder: in it, or where the simulator or FLARE writes it.
PLACES = (".", "server/simulate_job", "workspace", "..")
MOST_NAMED = 5  # largest number of folders that a message names
PERSONAL_NOTE = (
    "the run's figures are not of this common model: each site was measured with one of its own, which stays there"
)


@dataclass(frozen=True)
class SavedModel:
    """Store the contents of a model file.

    Attributes:
        path: path of the file.
        state: the model's tensors, on the CPU.
        made: number of the round that made the model, from 0; -1: the model is untrained; ``None`` if it is unknown.
        method: class of the aggregation rule; empty if unknown.
        record: record of the task, by :class:`fairflare.federation.record.task_record.TaskRecorder`; empty: no record.
        personal: whether the run's metrics are those of the sites' personal models and not of this model.
        at_sites: number of the model's tensors that no site sent; they still have their initial values.
        exchange: record of which tensors of the model the file contains and how the rest is built; empty: all tensors.
        validated: whether a site reported a validation metric; otherwise the best model is the last one.
        adapted: number of pictures on which norm statistics were measured after the run; 0: they come from the run.
    """

    path: Path
    state: dict[str, torch.Tensor]
    made: int | None
    method: str
    record: Mapping[str, Any]
    personal: bool = False
    at_sites: int = 0
    adapted: int = 0
    exchange: Mapping[str, Any] = field(default_factory=dict)
    validated: bool = True

    def network(self, task: Task, remedy: str = "") -> torch.nn.Module:
        """Build the task's network and load the model's tensors into it.

        Raises:
            ValueError: model and network do not fit, or the task builds another frozen part than that of the run.
        """
        return network_with(task, self, self.state, f"{self.path} does not fit the network of its task", remedy)

    def describe(self) -> str:
        """Describe in one line which model of the run this is."""
        which = (
            {BEST_MODEL_FILE: "the best by validation", MODEL_FILE: "the last"}.get(self.path.name, "")
            if self.validated
            else "the last, as no site told a validation figure"
        )
        rounds = "" if self.made is None else "untrained" if self.made < 0 else f"of round {self.made}"
        metric = self.record.get("metric")
        by = f" ({metric})" if metric and self.path.name == BEST_MODEL_FILE and self.validated else ""
        adapted = f"norm statistics of {self.adapted} other pictures" if self.adapted else ""
        return ", ".join(text for text in (f"{which}{by}" if which else "", rounds, self.method, adapted) if text)


def network_with(
    task: Task, model: SavedModel, state: Mapping[str, torch.Tensor], refusal: str, remedy: str = ""
) -> torch.nn.Module:
    """Build the task's network and load ``state``, the tensors of a model of the same run as ``model``."""
    try:
        network, whole = rebuilt(task, state, model.exchange)
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error
    load_fitting(network, whole, refusal, remedy)
    return network


def find_model(place: Path, which: Literal["best", "last"] | None = None) -> Path:
    """Find and return the path of a run's model file.

    Args:
        place: a model file; or the folder of a run, its workspace, a FLARE download, or anything that holds one run.
        which: the best or the last model; default: the best by validation if there is one, else the last.

    Raises:
        ValueError: there is no model, not the requested one, or several runs are found.
    """
    refuse({
        f"--{which} chooses among the models of a run's folder, and {place} is a file":
            which is not None and place.is_file(),
        f"{place} does not exist; give the folder of a run or a model file": not place.exists(),
    })  # fmt: skip
    if place.is_file():
        return place
    names = {"best": (BEST_MODEL_FILE,), "last": (MODEL_FILE,), None: (BEST_MODEL_FILE, MODEL_FILE)}[which]
    folder = _folder_of(place)
    if model := next((file for file in _models(folder) if file.name in names), None):
        return model
    raise ValueError(f"{folder} has no {names[0]}; it has {', '.join(p.name for p in _models(folder))}")


def _folder_of(place: Path) -> Path:
    for part in PLACES if place.name == RESULTS_FOLDER else PLACES[:-1]:
        if _models(place / part):
            return place / part
    deeper = sorted({path.parent for name in (MODEL_FILE, BEST_MODEL_FILE) for path in place.rglob(name)})
    named = ", ".join(map(str, deeper[:MOST_NAMED])) + (" ..." if len(deeper) > MOST_NAMED else "")
    refuse({
        f"no {MODEL_FILE} in {place}: give the folder of a run that made at least one round, or a file": not deeper,
        f"{place} holds {len(deeper)} runs; give the folder of one: {named}": len(deeper) > 1,
    })  # fmt: skip
    return deeper[0]


def _models(folder: Path) -> list[Path]:
    return [folder / name for name in (BEST_MODEL_FILE, MODEL_FILE) if (folder / name).is_file()]


def read_model(path: Path) -> SavedModel:
    """Read a model file.

    Raises:
        ValueError: the file cannot be read as plain tensors (no pickled code is run), or holds no model.
    """
    state = read_checkpoint(path)
    content = {} if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    conf = _read_typed(content.get("train_conf") if isinstance(content, Mapping) else None, Mapping, {})
    return SavedModel(
        path,
        state,
        _read_typed(conf.get("round"), int, None),
        str(conf.get("method", "")),
        _read_typed(conf.get("task"), Mapping, {}),
        # If the server does not know the sites' training, only the results file tells whether models are personal.
        personal=PERSONAL in (conf.get("measured"), results_beside(path).info.measured),
        at_sites=_read_typed(conf.get("stays_at_sites"), int, 0),
        adapted=_read_typed(_read_typed(conf.get("adapted"), Mapping, {}).get("pictures"), int, 0),
        exchange=dict(conf.get("exchange") or {}),
        validated=conf.get("validated") is not False,
    )


def _read_typed(value: Any, kind: type[Any], usual: Any) -> Any:
    """Return a value of a file if it is of its kind, else the usual one."""
    return value if isinstance(value, kind) else usual


def read_whole(place: Path, which: Literal["best", "last"] | None = None) -> SavedModel:
    """Read a run's model, and refuse a model some of whose tensors stayed at the sites.

    Args:
        place, which: as in :func:`find_model`.

    Raises:
        ValueError: there is no model, or it lacks tensors that stayed at the sites.
    """
    model = read_model(find_model(place, which))
    if model.at_sites:
        raise ValueError(not_whole(model))
    return model


def not_whole(model: SavedModel) -> str:
    """Explain why a model that lacks tensors which stayed at the sites cannot be used, and what to do."""
    return (
        f"{model.path} is no model to use by itself: {model.at_sites} of its {len(model.state)} tensors are as "
        "they were in the beginning, since the trained ones stay at the sites (FedBN, FedRDN, Solo, "
        "norm_statistics=site); give a run that has one common model, such as fed_avg's or one with "
        "norm_statistics=recalibrated; with norm_statistics=site or FedRDN, fairflare adapt measures the statistics on "
        "images of your own"
    )


def results_beside(path: Path) -> RunResults:
    """Return the results of the run whose folder holds the model file; empty results if there are none."""
    try:
        return read_results(path.parent / RESULTS_FOLDER / RESULTS_FILE)
    except (ValueError, OSError):
        return RunResults()
