"""Make the plan of a run that trains nothing, and tests a given model at every site as the final test of a run does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fairflare.base.checks import choice
from fairflare.base.disk.files import safe_name
from fairflare.exchange.messages import clean_state
from fairflare.federation.plan.plan import Plan, site_list
from fairflare.federation.plan.run_settings import WithoutTraining, usual_waits
from fairflare.federation.plan.task_files import BUNDLE_TASK, TASKS_BY_KIND, describe_object, rebuild_task
from fairflare.federation.site.site_file import COMPUTING_KEYS
from fairflare.methods.base.catalog import get_method
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.prediction.recall import recall
from fairflare.prediction.saved_model import PERSONAL_NOTE, read_whole, results_beside

#: Settings of a run that a test depends on.
OF_RUN = ("bootstrap", "groups", "group_bins", "calibration_bins", "min_cases", "require_all_sites")
#: Settings of a method's local training that a test depends on; a run's model is tested with its run's values.
OF_TEST = ("batch_size", *COMPUTING_KEYS)
BUNDLE_CONFIGS, BUNDLE_MODEL = "configs", Path("models") / "model.pt"  # names in a MONAI bundle's folder
REMEDY = "; give the settings of its task with --set, or its own code with --task-file"


@dataclass(frozen=True)
class GivenModel:
    """Store a model to be tested.

    Attributes:
        plan: plan of a run without rounds; its label is the model's name.
        state: all tensors of the model.
        where: words that name the model's file, and say which model of its run it is.
        notes: remarks on what may differ from the model's run.
    """

    plan: Plan
    state: dict[str, torch.Tensor]
    where: str
    notes: list[str]


def read_given_model(
    place: Path,
    which: Literal["best", "last"] | None = None,
    *,
    sites: int | Sequence[str] | None,
    settings: Mapping[str, Any] | None = None,
    task: str | None = None,
    task_file: Path | None = None,
    bundle: Path | None = None,
) -> GivenModel:
    """Read a model and make the plan of its test.

    Args:
        place: a run's folder or a model file, see :func:`fairflare.prediction.saved_model.find_model`; or the folder of
            a MONAI bundle with its model.
        which: the best or the last model of a run; default: the best by validation.
        sites: names of the sites, or their number.
        settings: settings of the run (:data:`OF_RUN`), of the local training (:data:`OF_TEST`), or else of the model's
            task.
        task: kind of the task, if the model's file does not name the task.
        task_file: file with the task's own code, if the task has such code.
        bundle: folder of the MONAI bundle that the model belongs to.

    Raises:
        ValueError: there is no model, its file holds more than tensors, it does not fit its task, or its task is not
            known.
    """
    names, label = site_list(sites or None), safe_name(place.resolve().name if place.is_dir() else place.stem)
    if not names:
        raise ValueError("the sites are not known: give --data that names them, or --sites")
    is_bundle = (place / BUNDLE_CONFIGS).is_dir()
    bundle = place if is_bundle else bundle
    if task is not None:
        task_file = TASKS_BY_KIND[choice("--task", task, TASKS_BY_KIND)]
    model = read_whole(place / BUNDLE_MODEL if is_bundle else place, which)
    given = dict(settings or {})
    of_run = {name: given.pop(name) for name in OF_RUN if name in given}
    of_task = {name: value for name, value in given.items() if name not in OF_TEST}
    record = {**model.record, "settings": {**(model.record.get("settings") or {}), **of_task}}
    recalled = recall(
        record, model.path.parent, task_file, bundle,
        or_give="--task with the settings that it was trained with (--set), or ",
    )  # fmt: skip
    learned, carried = recalled.task, task_file or BUNDLE_TASK
    if task_file is None and bundle is None:
        _, carried, cls = describe_object(learned, None)
        learned = rebuild_task(learned, cls, {})
    stored = results_beside(model.path).info.config.get("training") or {}
    trained = {**learned.training_settings(()), **stored.get("args", {}), **given}
    training = LocalTraining(**{name: trained[name] for name in OF_TEST if name in trained})
    run = WithoutTraining(**{**usual_waits(1), **of_run, "label": label})
    plan = Plan(get_method("fed_avg"), learned, FedAvg(), training, run, names, carried, monai_bundle=bundle)
    where = f"model {label}: {model.path}, {model.describe()}".rstrip(", ")
    notes = [f"{label}: {text}" for text in (*recalled.notes, *[PERSONAL_NOTE] * model.personal)]
    return GivenModel(plan, clean_state(model.network(learned, REMEDY).state_dict()), where, notes)
