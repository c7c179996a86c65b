"""Load task files: a job carries one for its task, a Python file with a class ``Task``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.base.checks import refuse
from fairflare.base.machine.environment import shield_imports
from fairflare.base.machine.one_run import belonging_to
from fairflare.base.settings import field_names
from fairflare.base.task import Task

DEALT_TO = "phantom_sites"  # name of a task's setting: number of sites that its synthetic data are dealt to
TASK_MODULE = "fairflare_task_file"  # name under which a task file is imported as a module
#: Task file that a job carries for a MONAI bundle; in the job the bundle lies beside the folder of this file.
BUNDLE_TASK = Path(__file__).parents[2] / "tasks" / "templates" / "bundle_task.py"

# Packaged task files by kind of task; a job carries a copy, with a class Task that the user may edit.
TASKS_BY_KIND = {
    kind: Path(__file__).parents[2] / "tasks" / "templates" / f"{kind}_task.py"
    for kind in ("segmentation", "classification", "volume_segmentation", "volume_classification", "nnunet")
}


class TaskFileError(ValueError):
    """Report that a task file cannot be used; the text names the file."""


def describe_object(task: Task, task_file: Any) -> tuple[str, Path, type[Task]]:
    """Return kind, file and class of a task that is given as an object.

    The file is the one that a job carries for the task, and the class is the class ``Task`` in this file. A class that
    no job can carry has no file (``Path()``): it can be learned in this process alone.
    """
    refuse({"a task as an object and task_file exclude each other: give one of them": task_file is not None})
    cls = type(task)
    for kind, file in TASKS_BY_KIND.items():
        template = load_task_class(file)
        again = cls.__mro__[1:] == template.__mro__[1:] and vars(cls).keys() == vars(template).keys()
        if cls is template.__mro__[1] or (again and cls.__module__ == TASK_MODULE):
            return kind, file, template
    if cls.__name__ != "Task" or cls.__module__ in ("__main__", TASK_MODULE):
        return "this task", Path(), cls
    return "this task", Path(inspect.getfile(cls)), cls


def check_carried(task: Task, file: Path) -> None:
    """Refuse a task object whose class is in no file that could be copied into a job.

    Raises:
        ValueError: the task's class is not called ``Task``, or it is not defined in a Python file of its own.
    """
    cls = type(task)
    refuse({
        "a job carries the file of your own task as task.py, and looks for a class named Task in it. Yours is "
        f"{cls.__name__} of the module {cls.__module__}: name it Task, in a module of its own, or give task_file":
            not file.is_file(),
    })  # fmt: skip


def rebuild_task(task: Task, cls: type[Task], dealt: Mapping[str, Any]) -> Task:
    """Return the task as an object of the class in the job's file, with synthetic data dealt to the run's sites."""
    if type(task) is cls and cls.__module__ != TASK_MODULE:
        return task
    values = {name: getattr(task, name) for name in field_names(cls)}
    usual = {f.name: f.default for f in fields(cls) if f.name in deal_to(1, cls)}  # type: ignore[arg-type]
    return cls(**{**values, **{name: dealt[name] for name, value in usual.items() if values[name] == value}})


def bundle_class(folder: Path, **others: Any) -> type[Task]:
    """Return the class of a MONAI bundle's task, before the bundle is copied beside the task file."""
    refuse({
        f"{name} and monai_bundle exclude each other: give one of them": value is not None
        for name, value in others.items()
    })  # fmt: skip
    task_class = load_task_class(BUNDLE_TASK)
    task_class.folder = folder.expanduser().absolute()  # type: ignore[attr-defined]
    return task_class


def deal_to(sites: int, task: type) -> dict[str, Any]:
    """Return the setting by which a task deals synthetic data to so many sites, where the task has one."""
    return {DEALT_TO: sites} if DEALT_TO in field_names(task) else {}


def load_task_class(path: Path) -> type[Task]:
    """Return the class ``Task`` of a task file.

    Raises:
        TaskFileError: the file does not exist, cannot be run, or has no such class.
    """
    refuse({f"task file {path} does not exist": not path.is_file()}, TaskFileError)
    spec = importlib.util.spec_from_file_location(TASK_MODULE, path)
    if spec is None or spec.loader is None:
        raise TaskFileError(f"task file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # type hints of the file's classes are resolved by this entry
    with belonging_to(f"task file {path.resolve()}"):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
            beside = (
                f"; {name} lies beside it, and a job takes one file: put what it needs into {path.name}, or install it"
            ) * (bool(name) and any(path.parent.glob(f"{name}*")))
            raise TaskFileError(f"task file {path} cannot be run: {type(error).__name__}: {error}{beside}") from error
    task_class = getattr(module, "Task", None)
    if not isinstance(task_class, type) or not issubclass(task_class, Task):
        raise TaskFileError(f"task file {path} must define a class Task (a subclass of fairflare.tasks.base.Task)")
    return task_class


def brings(task: Task) -> Callable[[], None]:
    """Return the function that a new process must call before it unpickles a task."""
    cls = type(task)
    if cls.__module__ != TASK_MODULE:
        return shield_imports
    return partial(_load, Path(inspect.getfile(cls)), getattr(cls, "folder", None))


def _load(file: Path, bundle: Path | None) -> None:
    shield_imports()
    task_class: Any = load_task_class(file)
    if bundle is not None:
        task_class.folder = bundle
