"""Write the global model's files in the run directory, in FLARE's own layout so that FLARE's tools can read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from fairflare.base.disk.files import save_torch, write_whole
from fairflare.base.task import Task
from fairflare.federation.plan.run_settings import RESULTS_FOLDER, RunSettings
from fairflare.federation.record.best_model import BestModel
from fairflare.federation.record.task_record import TaskRecorder
from fairflare.methods.base.rule import Rule

MODEL_FILE = "FL_global_model.pt"
BEST_MODEL_FILE = "best_FL_global_model.pt"


class ModelFiles:
    """Write the files of the current and of the best global model.

    Args:
        folder: the run directory.
        method: name of the method, which is noted in the files.
        best: decides which model is the best.
        learned: function that returns the description of the task, which is noted in the files.

    Attributes:
        noted: further facts that are noted in the files.
    """

    def __init__(
        self, folder: Path, method: str, best: BestModel, learned: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self.folder, self.method, self.best, self.learned = folder, method, best, learned
        self.noted: dict[str, Any] = {}

    def save(self, state: Mapping[str, torch.Tensor], current_round: int, name: str = MODEL_FILE) -> None:
        """Replace a global model's file, by default the current model's, atomically."""
        unscored = name == BEST_MODEL_FILE and self.best.value is None
        content = {"model": dict(state), "train_conf": {
            "round": current_round, "method": self.method, "task": dict(self.learned()), **self.noted,
            **({"validated": False} if unscored else {}),
            **({"what": "the initial model: no round made it"} if current_round < 0 else {}),
        }}  # fmt: skip
        write_whole(self.folder / name, lambda path: save_torch(content, path))

    def keep_best(
        self,
        state: Mapping[str, torch.Tensor],
        validation: Mapping[str, Mapping[str, float]],
        metric: str,
        number: int,
        *,
        last: bool = False,
    ) -> bool:
        """Save the model if it is the best so far, and return whether it is.

        Args:
            state: the model that the sites validated.
            validation: the model's validation metrics, ``{site: {metric: value}}``.
            metric: name of the metric that decides.
            number: round that made the model; -1: it is the initial model.
            last: see :meth:`fairflare.federation.record.best_model.BestModel.offer`.
        """
        scores = {site: by[metric] for site, by in validation.items() if metric in by}
        if is_best := self.best.offer(scores, number, last=last):
            self.save(state, number, BEST_MODEL_FILE)
        return is_best

    def load_best(self) -> dict[str, torch.Tensor]:
        """Load the best global model from its file, and return it."""
        return cast(dict[str, torch.Tensor], torch.load(
            self.folder / BEST_MODEL_FILE, map_location="cpu", weights_only=True
        )["model"])  # fmt: skip

    def take_back(
        self,
        state: Mapping[str, torch.Tensor],
        number: int,
        best: Mapping[str, torch.Tensor] | None,
        memory: Mapping[str, Any],
    ) -> None:
        """Write both model files again as they were after an earlier round.

        Args:
            state: the global model.
            number: round that made the global model; -1: it is the initial model.
            best: tensors of the best model; ``None`` if there is no best model.
            memory: saved state of :attr:`best`, the :class:`BestModel`.
        """
        for name in (MODEL_FILE, BEST_MODEL_FILE):
            (self.folder / name).unlink(missing_ok=True)
        if number >= 0:
            self.save(state, number)
        self.best.forget()
        if best is not None:
            self.best.load_state_dict(memory)
            self.save(best, int(memory["made"]), BEST_MODEL_FILE)


def model_files(
    task: Task, rule: Rule, run: RunSettings, folder: Path, info: Callable[[], Mapping[str, Any]]
) -> ModelFiles:
    """Return the files of a run's models in its folder; ``info`` returns the current ``info`` of its results."""
    best = BestModel(run, bool(task.by_name()[task.primary_metric].higher_is_better))
    return ModelFiles(folder, type(rule).__name__, best, TaskRecorder(task, info, folder / RESULTS_FOLDER))
