"""Declare what a user asks of a run: method, task, settings; the command line, recipes and comparisons make it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.base.aspect import COPIED
from fairflare.base.checks import refuse

if TYPE_CHECKING:  # the command line must be quick, and these load PyTorch
    from fairflare.base.task import Task
    from fairflare.federation.plan.run_settings import RunSettings
    from fairflare.methods.base.rule import Rule
    from fairflare.methods.base.training import LocalTraining


@dataclass(frozen=True)
class Script:
    """Describe the sites' own training script, which FLARE's Client API executor runs.

    Args:
        path: path of the script, which the job carries, or which exists at this path at every site.
        arguments: arguments of the script's command line.
        command: interpreter that runs the script in a process of its own; ``None`` if the site's job process runs it.
    """

    path: Path
    arguments: str = ""
    command: str | None = None


@dataclass(frozen=True)
class RunRequest:
    """Store what a user asks of a run, before anything is chosen or built.

    Args:
        method: a name of ``fairflare list``; default: see :func:`fairflare.methods.base.catalog.method_of`.
        rule, training, run: parts of the run as objects, whose settings are used unchanged; settings that rule and
            training share must be equal in both. An object that is not given is made from the method.
        task: a kind of ``TASKS_BY_KIND``, or an object; default: what the method's paper learns.
            Synthetic data of an object whose ``phantom_sites`` is its default are dealt to the run's sites.
        sites: number of sites (named ``site-1`` ...), their names, or ``None`` for every connected site; 0: as many as
            the method's small job has.
        settings: settings of rule, training and task, by name; they override the settings that ``small`` chooses. A
            part of rule or training is chosen with ``{"weighting": "som"}`` and set with
            ``{"weighting.grid": [4, 4]}``. Settings of the run that
            :data:`fairflare.federation.plan.run_settings.LIKE_SETTINGS` names are accepted too. Unless
            ``phantom_sites`` is given, synthetic data are dealt to as many sites as the run has, or, where the run
            takes every connected site, as the small job has.
        small: True: settings that are not given are those of a quick job. False: they are the paper's; for a method
            without a published setting, a quick job's training and the defaults of the method's classes.
        paper: name of the published setting, for ``small=False``: one of :func:`.papers.experiments`; default: the
            method's usual one.
        train_like: name of another method whose set-up is used, so that the two methods can be compared: task, network,
            data, local training (except what is part of the method itself), rounds and number of sites.
        task_file: a Python file with a class ``Task``; default: the packaged one of the kind of task.
        monai_bundle: a MONAI bundle's folder, which is learned in place of a kind of task; see ``docs/bundles.md``.
        script: the sites' own training script; ``task`` must then be an object that describes what is learned.
        apart: whether this process is a server that should need little memory. If so, and where not the whole network
            travels, checks that build the network run in a short-lived process.
        shown: whether the plan is only shown. If so, the settings are not checked against the task's network, as this
            needs PyTorch and seconds.
        options: settings of :class:`fairflare.federation.plan.run_settings.RunSettings`, by name; not those of a given
            ``run``.
    """

    method: str | None = None
    rule: Rule | None = None
    training: LocalTraining | None = None
    task: str | Task | None = None
    run: RunSettings | None = None
    sites: int | Sequence[str] | None = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    small: bool = True
    paper: str | None = None
    train_like: str | None = None
    task_file: str | Path | None = None
    monai_bundle: str | Path | None = None
    script: Script | None = None
    apart: bool = False
    shown: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, **wanted: Any) -> RunRequest:
        """Return the request with these values by name; names that are no field of it are settings of the run."""
        known = {one.name for one in fields(cls)}
        options = {name: value for name, value in wanted.items() if name not in known}
        copied = {name: value for name in COPIED if (value := options.pop(name, None)) is not None}
        settings = {**(wanted.get("settings") or {}), **copied}
        return cls(**{**{k: v for k, v in wanted.items() if k in known}, "settings": settings, "options": options})

    @property
    def task_object(self) -> Task | None:
        """Return the task, if it is given as an object."""
        return None if isinstance(self.task, str) else self.task

    @property
    def instead_of_epochs(self) -> tuple[str, ...]:
        """Return the names of usual settings that a given ``local_steps`` replaces: ``local_epochs``, or none.

        Raises:
            ValueError: ``local_steps`` and ``local_epochs`` are both given.
        """
        steps, epochs = (self.settings.get(name) for name in ("local_steps", "local_epochs"))
        refuse({
            f"local_steps={steps!r} and local_epochs={epochs!r} exclude each other: give one of them":
                steps is not None and epochs is not None,
        })  # fmt: skip
        return () if steps is None else ("local_epochs",)
