"""Describe a task in a model's file, so that the network can be built again and images be read in the same way."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fairflare import __version__
from fairflare.base.disk.files import private_folder, sha256_of, write_whole
from fairflare.base.settings import values_of
from fairflare.base.task import Task

TASK_FILE = "task.py"  # copy of a task's own code in the results folder
PACKAGE = "fairflare."


class TaskRecorder:
    """Describe the task of a run's models, for the files that hold the models.

    Args:
        task: the task that is learned.
        info: function that returns the current ``info`` of the run's results, with the sites' reports on their data.
        folder: the results folder, into which a task's own code is copied.
    """

    def __init__(self, task: Task, info: Callable[[], Mapping[str, Any]], folder: Path) -> None:
        self.task, self.info, self.folder = task, info, folder

    def __call__(self) -> dict[str, Any]:
        """Return the description of the task as plain values, see ``docs/predict.md``."""
        task, info = self.task, self.info()
        packaged, user_code = origin(type(task))
        shape = {key: getattr(task, key, None) for key in ("in_channels", "image_size", "intensities")}
        return {
            "class": packaged,
            "own_code": user_code,
            "settings": values_of(task)["args"],
            "class_names": class_names(task, info),
            "metric": task.primary_metric,
            "synthetic": bool(info.get("synthetic")),
            "fairflare": __version__,
            **{key: list(value) if isinstance(value, tuple) else value for key, value in shape.items()},
            **(self._source if user_code else {}),
        }

    @cached_property
    def _source(self) -> dict[str, str]:
        """Copy the file of the task's class to the results folder, once, and return the copy's name and checksum."""
        cls = type(self.task)
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        if cls.__name__ != "Task" or getattr(module, "Task", None) is not cls or not file or not Path(file).is_file():
            return {}
        private_folder(self.folder)
        write_whole(self.folder / TASK_FILE, lambda path: shutil.copyfile(file, path))
        return {"task_file": TASK_FILE, "task_file_sha256": sha256_of(self.folder / TASK_FILE)}


def origin(cls: type) -> tuple[str, list[str]]:
    """Return the packaged class that a task's class is or extends, and the names that the task's own code adds."""
    user_parts: dict[str, None] = {}
    for base in cls.__mro__:
        if base.__module__.startswith(PACKAGE):
            return f"{base.__module__}.{base.__name__}", list(user_parts)
        # What Python itself puts into a class (``__module__``, ``__doc__``) is not the task's own code. A class that
        # adds nothing else to a packaged class counts as that packaged class.
        user_parts |= {
            name: None for name, value in vars(base).items()
            if name != "_abc_impl" and (callable(value) or not re.fullmatch("__.*__", name))
        }  # fmt: skip
    raise TypeError(f"{cls.__name__} is no Task")


def class_names(task: Task, info: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a task's classes or structures.

    They are the task's own names, else those in all sites' datalists, else ``class_<number>``.
    """
    names = getattr(task, "names", None)
    if names is None or task.classes is None or getattr(task, "class_names", None) or info.get("synthetic"):
        return None if names is None else list(names())
    distinct = {
        tuple(given)
        for report in (info.get("said") or {}).values()
        if (given := report.get("class_names")) and len(given) == task.classes
    }
    return list(distinct.pop()) if len(distinct) == 1 else [f"class_{number}" for number in range(task.classes)]
