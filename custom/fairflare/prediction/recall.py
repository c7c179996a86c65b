"""Rebuild a task from the record in its model's file; see :mod:`fairflare.federation.record.task_record`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairflare import __version__
from fairflare.base.checks import refuse, true_texts
from fairflare.base.disk.files import sha256_of
from fairflare.base.task import Task
from fairflare.federation.plan.run_settings import RESULTS_FOLDER
from fairflare.federation.plan.task_files import bundle_class, load_task_class
from fairflare.federation.record.task_record import PACKAGE, TASK_FILE, origin

OF_BUNDLE = "fairflare.tasks.bundle.MonaiBundleTask"


@dataclass
class Recalled:
    """Store a task that was rebuilt from its record.

    Attributes:
        task: the task, with the class names of the run.
        own: names of the parts of the task that are not FairFlare's own code.
        notes: remarks on what may differ from the task of the run.
    """

    task: Task
    own: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def recall(
    record: Mapping[str, Any],
    folder: Path,
    task_file: Path | None = None,
    bundle: Path | None = None,
    *,
    or_give: str = "",
) -> Recalled:
    """Rebuild the learning task of a model from the record in the model's file.

    Args:
        record: the record, from :class:`fairflare.federation.record.task_record.TaskRecorder`; ``{}``: the file has no
            record.
        folder: folder of the model's file.
        task_file: file with the task's own code, which is run. Without it only packaged code is run.
        bundle: folder of the model's MONAI bundle, whose configuration is run.
        or_give: what the caller accepts besides a task file, for the message that the task is not known.

    Raises:
        ValueError: the task has code of its own and no file was given, or it does not fit the record.
    """
    user_code = list(record.get("own_code") or [])
    if bundle is None and record.get("class") == OF_BUNDLE:
        raise ValueError(
            "predict reads no images for a model that was trained with a MONAI bundle; use the model in the bundle "
            "itself: docs/bundles.md says how"
        )
    if bundle is not None:
        cls = bundle_class(bundle, task_file=task_file)
    elif task_file is None:
        cls = _find_packaged_task(record, user_code, folder, or_give)
        user_code = []
    else:
        cls = load_task_class(task_file)
        user_code = origin(cls)[1]
    try:
        task: Any = cls(**dict(record.get("settings") or {}))
    except (ValueError, TypeError) as error:
        problems = [f"the recorded settings do not fit {cls.__name__}: {error}", *_doubts(record, task_file)]
        raise ValueError("; ".join(problems)) from error
    names = record.get("class_names")
    if (
        names
        and getattr(task, "findings", None) is None  # findings are already the names
        and getattr(task, "class_names", names) is None
        and len(names) == len(task.names())
    ):
        task.class_names = list(names)
    return Recalled(task, user_code, _doubts(record, task_file))


def _find_packaged_task(record: Mapping[str, Any], user_code: list[str], folder: Path, or_give: str) -> type[Task]:
    path = str(record.get("class", ""))
    task_file = next(
        (p for p in (folder / RESULTS_FOLDER / TASK_FILE, folder / "app_server/custom/task.py") if p.is_file()), None
    )
    where = f"--task-file {task_file}" if task_file else "--task-file with the task.py of the job (app/custom/task.py)"
    refuse({
        "the model's file does not say what it was trained for (another tool or an older fairflare made it); give "
        f"{or_give}{where}": not path,
        f"the run's task has code of its own ({', '.join(user_code)}), which is not run unasked: read it, then give "
        f"{where}": user_code,
    })  # fmt: skip
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name) if path.startswith(PACKAGE) else None
    except (ImportError, AttributeError):
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ValueError(
            f"the model's task {path!r} is not in fairflare {__version__}; it was made with {record.get('fairflare')}: "
            f"install that version, or give {where}"
        )
    return cls


def _doubts(record: Mapping[str, Any], task_file: Path | None) -> list[str]:
    version, learned = record.get("fairflare"), record.get("task_file_sha256")
    return true_texts({
        "the model's file has no settings of its task; those that the task file sets hold": not record,
        f"the model was made with fairflare {version}, this is {__version__}": version and version != __version__,
        f"{task_file} is not the file that the model was trained with (its contents differ)": (
            task_file is not None and learned and sha256_of(task_file) != learned
        ),
    })  # fmt: skip
