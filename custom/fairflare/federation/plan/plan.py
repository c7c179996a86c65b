"""What a run consists of, put together from a method's name and settings: the input of every way to run it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fairflare.base.acting import idle
from fairflare.base.checks import choice, different, nearest, whole
from fairflare.base.disk.bundle_files import bundle_checksum, grouped
from fairflare.base.settings import build, field_names
from fairflare.base.task import Task
from fairflare.exchange.anchor_forms import MODEL
from fairflare.federation.plan.run_settings import LIKE_SETTINGS, RunSettings
from fairflare.federation.plan.site_training import check_shared, shared_values
from fairflare.methods.base.catalog import Method, get_method, method_of
from fairflare.methods.base.papers import Paper
from fairflare.methods.base.rule import OLD_JOB, Rule, TwoPhase
from fairflare.methods.base.training import LocalTraining

TASK_MODULE = "fairflare_task_file"  # the name of the module of a task file
#: The file that a job carries for a MONAI bundle, which lies beside it there.
BUNDLE_TASK = Path(__file__).parents[2] / "tasks" / "templates" / "bundle_task.py"

# Kinds of task: the file a job carries for each, with a class Task that the user may edit.
TASKS_BY_KIND = {
    kind: Path(__file__).parents[2] / "tasks" / "templates" / f"{kind}_task.py"
    for kind in ("segmentation", "classification", "volume_segmentation", "volume_classification")
}

#: What people give with --set though it is an option of the command line, where the two have other names.
OPTIONS = {
    **dict.fromkeys(("num_rounds", "rounds"), "--rounds"),
    **dict.fromkeys(("train_timeout", "anchor_timeout", "validate_timeout", "timeout"), "--timeout"),
    **dict.fromkeys(("straggler_grace", "grace"), "--grace"),
    **dict.fromkeys(("max_missed", "check_timeout"), ""),  # of a recipe only
    "sites": "--sites",
}


class TaskFileError(ValueError):
    """A task file cannot be used; the text names it."""


@dataclass(frozen=True)
class Script:
    """A training script of the sites' own, run by FLARE's Client API executor.

    Args:
        path: of the script; it goes with the job, or lies there at every site.
        arguments: of its command line.
        command: in a process of its own, with this interpreter; ``None``: in the site's job process.
    """

    path: Path
    arguments: str = ""
    command: str | None = None


@dataclass(frozen=True)
class Plan:
    """A run, ready to go.

    Attributes:
        method: of the catalog.
        task, rule, training: its parts.
        run: rounds, quorum, seed, timeouts.
        sites: names; ``None``: every connected site.
        task_file: where the class of ``task`` comes from.
        lacks: what a paper's setting still has to be given by hand.
        paper: whose setting it is; ``None``: a quick job, or there is none.
        script: of the sites, where they train with their own.
        monai_bundle: folder of the MONAI bundle that is learned, where one is.
        brought: what the task says of local training, a line each.
        instead: what the set-up of another method has in place of the method's own, a line each.
    """

    method: Method
    task: Task
    rule: Rule
    training: LocalTraining
    run: RunSettings
    sites: list[str] | None
    task_file: Path
    lacks: tuple[str, ...] = ()
    paper: Paper | None = None
    script: Script | None = None
    monai_bundle: Path | None = None
    brought: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()


def make_plan(
    method: str | None = None,
    *,
    rule: Rule | None = None,
    training: LocalTraining | None = None,
    task: str | Task | None = None,
    run: RunSettings | None = None,
    sites: int | Sequence[str] | None = 0,
    settings: Mapping[str, Any] | None = None,
    small: bool = True,
    paper: str | None = None,
    train_like: str | None = None,
    task_file: str | Path | None = None,
    monai_bundle: str | Path | None = None,
    **options: Any,
) -> Plan:
    """Puts a run together.

    Args:
        method: a name of ``fairflare list``; default: see :func:`fairflare.methods.base.catalog.method_of`.
        rule, training, run: as objects, which are what they say; what the halves share must be the same in both. One
            that is not given is the method's.
        task: a kind of ``TASKS_BY_KIND``, or an object; default: what the method's paper learns.
            Synthetic data of an object whose ``phantom_sites`` is its default are dealt to the run's sites.
        sites: number of sites (named ``site-1`` ...), their names, or ``None`` for every connected site; 0: as many as
            the method's small job has.
        settings: of the method's halves and of the task, by name, wherever they belong; on top of those of the
            method's small job unless ``small`` is False. A part of a half is chosen with ``{"weighting": "som"}`` and
            set with ``{"weighting.grid": [4, 4]}``. Also those of the run that
            :data:`fairflare.federation.plan.run_settings.LIKE_SETTINGS` names. Synthetic data are dealt to as many
            sites as the run has (every connected one: as the small job has) unless ``phantom_sites`` is among them.
        small: False: the papers' settings, also for what is not named in ``settings``; of a method without a published
            setting the defaults of its classes.
        paper: which paper's, without ``small``: a name of :func:`fairflare.methods.base.papers.experiments`; default:
            the first in which the method is.
        train_like: another method whose set-up this one gets, so that the two can be compared: task, network, data,
            local training (but what is part of this method), rounds and number of sites.
        task_file: a Python file with a class ``Task``; default: the packaged one of the kind of task.
        monai_bundle: a MONAI bundle's folder, which is learned in place of a kind of task; see ``docs/bundles.md``.
        options: of :class:`fairflare.federation.plan.run_settings.RunSettings`, by name; not with ``run``.

    Raises:
        ValueError: unknown method, kind of task or setting (suggests the nearest), a value out of range or given twice,
            or a bundle that cannot be used.
    """
    if (statistics := options.pop("norm_statistics", None)) is not None:  # a setting of the sites; the run follows it
        settings = {**(settings or {}), "norm_statistics": statistics}
    chosen = method_of(rule, training) if method is None else get_method(method)
    own_task = task if isinstance(task, Task) else None
    if small and paper is not None:
        raise ValueError(f"paper={paper!r} needs small=False")
    _refuse_twice(chosen, settings or {}, rule=rule, training=training, task=own_task)
    _refuse_twice(chosen, {name: value for name, value in options.items() if name != "label"}, run=run)
    model = chosen if train_like is None else get_method(train_like)
    published = None if small else model.published(paper)
    learned = (published and published.task) or model.task
    if own_task is not None and monai_bundle is None:
        kind, file, task_class = _of_object(own_task, task_file)
    elif monai_bundle is None:
        kind = choice("task", learned if task is None else task, TASKS_BY_KIND)
        file = Path(task_file) if task_file else TASKS_BY_KIND[kind]
        task_class = load_task_class(file)
    else:
        kind, file, task_class = "a MONAI bundle", BUNDLE_TASK, _of_bundle(monai_bundle, task=task, task_file=task_file)
    # Another kind of task than the paper's has none of its settings, but its length.
    of_paper = {} if published is None else published.settings
    usual = {} if kind != learned else model.small if small else of_paper
    if model is not chosen:
        usual = _shared_setup(model, chosen, usual, task_class, own_task=kind == model.task)
        usual = {**_of_own_paper(chosen, published, task_class), **usual}
    if task_file is not None:  # a task of the user's own need not have what the packaged one of its kind has
        has = {*LIKE_SETTINGS, *(n for part in (chosen.rule, chosen.training, task_class) for n in field_names(part))}
        usual = {name: value for name, value in usual.items() if name.partition(".")[0] in has}
    # Whoever sets something of a part means the method's own part, not the small job's or the paper's.
    steps = _by_steps(settings or {})
    taken = {*steps, *(name.partition(".")[0] for name in settings or {})}
    usual = {name: value for name, value in usual.items() if name.partition(".")[0] not in taken}
    usual_run = {name: usual.pop(name) for name in LIKE_SETTINGS if name in usual}
    given = {**usual, **(settings or {})}
    of_run = {name: given.pop(name) for name in LIKE_SETTINGS if name in given}
    server, site, learns = route_settings(given, chosen, task_class)
    if kind == chosen.task:
        keeps = chosen.learns if model is chosen else chosen.keeps
        own = {name: chosen.learns[name] for name in keeps if name in chosen.learns}
        learns = {**{name: value for name, value in own.items() if name in field_names(task_class)}, **learns}
    length = model if published is None else published
    names = site_list(length.num_sites if sites == 0 else sites)
    learns = {**dealt_to(length.num_sites if names is None else len(names), task_class), **learns}
    wanted = {key: value for key, value in {**options, **of_run}.items() if value is not None}
    usually = {"num_rounds": length.num_rounds, "label": chosen.name, **({} if published is None else {"test_last": 5})}
    usually |= {**chosen.run, **usual_run}
    if run is not None:  # but for its label, and for what the method needs of a run (cRT's further rounds)
        told, plain = ({key: getattr(of, key) for key in field_names(RunSettings)} for of in (run, RunSettings()))
        needed = {"label": chosen.name, **chosen.run}
        usually = {**told, **{key: value for key, value in needed.items() if told[key] == plain[key]}}
    of_plan = RunSettings(**{**usually, **wanted})
    if names is not None and of_plan.min_sites > len(names):
        raise ValueError(f"min_sites={of_plan.min_sites}, but the job has {len(names)} site(s)")
    if monai_bundle is not None:
        learns.setdefault("bundle_sha256", grouped(bundle_checksum(Path(monai_bundle).expanduser())))
    made: Task = build(task_class, learns) if own_task is None else _like(own_task, task_class, learns)
    made.check()
    made.by_name()  # every metric has a direction
    own = {k: v for k, v in chosen.site.items() if k not in steps}
    said = settings or {}  # not what comes with train_like
    brought = {k: v for k, v in made.training_settings(said).items() if k not in (*said, *chosen.keeps)}
    shared = {k: v for k, v in brought.items() if k in field_names(chosen.rule)}  # q-FedAvg's learning_rate
    of_rule, of_training = shared_values(chosen.training, rule), shared_values(chosen.rule, training)
    rule = rule or build(chosen.rule, {**chosen.server, **server, **shared, **of_training})
    training = training or build(chosen.training, {**own, **site, **brought, **of_rule})
    check_shared(rule, training)
    of_plan = following(of_plan, training)
    check_run(rule, of_plan)
    check_idle(
        chosen, (rule, training, made, of_plan), {**{k: options[k] for k in LIKE_SETTINGS if k in options}, **said}
    )
    try:
        training.check_task(made)
        rule.check_run(of_plan.num_rounds, made)
        of_plan.check_products(rule, made)
        if of_plan.crt_rounds and made.has_classes is False:
            raise ValueError("crt_rounds needs a classifier; set crt_rounds=0")
    except ValueError as error:
        raise ValueError(f"method {chosen.name!r} cannot learn {kind}: {error}, or choose another task") from error
    return Plan(
        method=chosen,
        task=made,
        rule=rule,
        training=training,
        run=of_plan,
        sites=names,
        task_file=file,
        lacks=() if small else _lacks(model, published, names),
        paper=published,
        monai_bundle=None if monai_bundle is None else Path(monai_bundle).expanduser(),
        brought=tuple(_in_words(brought, build(chosen.training, own))),
        instead=tuple(
            f"{name}={getattr(training, name)!r} (its own: {value!r})"
            for name, value in own.items()
            if model is not chosen and name not in said and getattr(training, name, value) != value
        ),
    )


def _refuse_twice(method: Method, by_name: Mapping[str, Any], **objects: Any) -> None:
    """Refuses an object of another method, and a value that is given by name though an object has it."""
    for what, usual in (("rule", method.rule), ("training", method.training)):
        if (half := objects.get(what)) is not None and not isinstance(half, usual):
            got = type(half).__name__
            raise ValueError(f"{what} of method {method.name!r} must be a {usual.__name__}, got a {got}")
    for what, given in objects.items():
        for name, value in by_name.items():
            if None not in (value, given) and name.partition(".")[0] in field_names(type(given)):
                raise ValueError(f"{what} is given as an object: set {name!r} there, in {type(given).__name__}(...)")


def _of_object(task: Task, task_file: Any) -> tuple[str, Path, type[Task]]:
    """Kind of a task that is given as an object, the file that a job carries for it, and the class in that file."""
    if task_file is not None:
        raise ValueError("a task as an object and task_file exclude each other: give one of them")
    cls = type(task)
    for kind, file in TASKS_BY_KIND.items():
        template = load_task_class(file)
        again = cls.__mro__[1:] == template.__mro__[1:] and vars(cls).keys() == vars(template).keys()
        if cls is template.__mro__[1] or (again and cls.__module__ == TASK_MODULE):
            return kind, file, template
    if cls.__name__ != "Task" or cls.__module__ in ("__main__", TASK_MODULE):
        wanted = f"call {cls.__name__} so, in a module of its own, or give task_file"
        raise ValueError(f"a job carries the file of your own task as task.py, and looks for Task in it: {wanted}")
    return "this task", Path(inspect.getfile(cls)), cls


def _like(task: Task, cls: type[Task], dealt: Mapping[str, Any]) -> Task:
    """The object as one of the class in the job's file, its synthetic data for the run's sites."""
    if type(task) is cls and cls.__module__ != TASK_MODULE:
        return task
    values = {name: getattr(task, name) for name in field_names(cls)}
    usual = {f.name: f.default for f in fields(cls) if f.name in dealt_to(1, cls)}  # type: ignore[arg-type]
    return cls(**{**values, **{name: dealt[name] for name, value in usual.items() if values[name] == value}})


def _of_bundle(folder: str | Path, **others: Any) -> type[Task]:
    """The class of a bundle's task, which is not beside its file yet."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} and monai_bundle exclude each other: give one of them")
    cls: Any = load_task_class(BUNDLE_TASK)
    cls.folder = Path(folder).expanduser().absolute()
    found: type[Task] = cls
    return found


def _in_words(brought: Mapping[str, Any], usual: LocalTraining) -> Iterator[str]:
    """What a task says of local training, and where the method has another value."""
    plain = LocalTraining()
    for name, value in brought.items():
        own = getattr(usual, name)
        differs = own not in (value, getattr(plain, name))
        yield f"{name}={value!r}" + (f" (the method's own: {own!r})" if differs else "")


def following(run: RunSettings, training: LocalTraining) -> RunSettings:
    """The run's settings, where it has to do something that the site half asks for."""
    recalibrated = training.norm_statistics == "recalibrated"
    return replace(run, norm_statistics="recalibrated") if recalibrated else run


def check_run(rule: Rule, run: RunSettings) -> None:
    """Refuses settings of the run in which a rule could do nothing, or which it has no use for.

    Raises:
        ValueError: says which.
    """
    rule.check_run(run.num_rounds, None)
    run.check_aggregate(rule)
    if run.anchor_as != MODEL and not isinstance(rule, TwoPhase):
        raise ValueError(
            f"anchor_as={run.anchor_as!r}: {type(rule).__name__} asks the sites nothing about an anchor; leave it out"
        )


def check_idle(method: Method, components: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Refuses what somebody set and what does nothing in this combination.

    Raises:
        ValueError: says which, and why.
    """
    vain = list(idle(components, given))
    if vain:
        raise ValueError(f"method {method.name!r}: {'; '.join(vain)}")


def _by_steps(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What a method or job usually has and ``local_steps`` takes the place of.

    Raises:
        ValueError: both are given.
    """
    if settings.get("local_steps") is None:
        return ()
    if settings.get("local_epochs") is not None:
        raise ValueError(
            f"local_steps={settings['local_steps']!r} and local_epochs={settings['local_epochs']!r} exclude each "
            "other: give one of them"
        )
    return ("local_epochs",)


def _lacks(model: Method, paper: Paper | None, sites: Sequence[str] | None) -> tuple[str, ...]:
    """What a paper's setting still has to be given by hand."""
    if paper is None:
        return (f"a published setting: {model.title} has none, so the defaults of its own settings hold",)
    if sites is None:
        return (*paper.lacks, f"the paper's {paper.num_sites} sites: the job goes to every connected one")
    if len(sites) != paper.num_sites:
        return (*paper.lacks, f"the paper's {paper.num_sites} sites: the run has {len(sites)}")
    return paper.lacks


def _shared_setup(
    model: Method, chosen: Method, usual: Mapping[str, Any], task_class: type, *, own_task: bool
) -> dict[str, Any]:
    """Local training and task as ``model`` has them, but for what is part of one of the two methods."""
    of_parts = {name: value for name, value in usual.items() if name not in LIKE_SETTINGS}
    _, site, learns = route_settings(of_parts, model, task_class)
    training = build(model.training, {**model.site, **site})
    found = {name: getattr(training, name) for name in field_names(LocalTraining)}
    found |= {**(model.learns if own_task else {}), **learns}
    return {name: value for name, value in found.items() if name not in (*chosen.keeps, *model.keeps)}


def _of_own_paper(chosen: Method, other: Paper | None, task_class: type) -> dict[str, Any]:
    """What a published setting (``other``, else its own) says of the method alone, when it is trained like another."""
    if other is None or not chosen.papers:
        return {}
    told = chosen.papers.get(other.name) or chosen.published()
    shared, parts = {*field_names(LocalTraining)}, (chosen.rule, chosen.training)
    own = {name for part in parts for name in field_names(part) if name not in shared or name in chosen.keeps}
    own |= {name for name in field_names(task_class) if name in chosen.keeps}
    return {k: v for k, v in (told.settings.items() if told else ()) if k.partition(".")[0] in own}


def dealt_to(sites: int, task: type) -> dict[str, Any]:
    """The setting by which a task deals synthetic data to so many sites, where it has one."""
    return {"phantom_sites": sites} if "phantom_sites" in field_names(task) else {}


def site_list(sites: int | Sequence[str] | None) -> list[str] | None:
    """``3`` -> ``["site-1", "site-2", "site-3"]``; names are checked for repeats."""
    if sites is None:
        return None
    if isinstance(sites, str) or not isinstance(sites, Sequence):
        return [f"site-{i}" for i in range(1, whole("sites", sites) + 1)]
    return list(different("sites", sites))


def route_settings(
    settings: Mapping[str, Any], method: Method, task: type
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Gives each setting to rule, training and task, wherever there is one of that name (``preset``: to both halves).

    Raises:
        ValueError: nothing has such a setting (suggests the nearest, or says what took the place of an older one).
    """
    parts: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    owners = [set(field_names(part)) for part in (method.rule, method.training, task)]
    retired = {**getattr(method.training, "retired", {}), **method.rule.retired}
    for key, value in settings.items():
        owner, dot, rest = key.partition(".")
        takers = [part for part, names in zip(parts, owners, strict=True) if owner in names]
        for part in takers:
            part[key] = value
        if not takers:
            now = retired.get(key, OLD_JOB)
            if now != OLD_JOB:  # that one is about job folders
                raise ValueError(f"method {method.name!r} has no setting {key!r} any more: {now}")
            if key in OPTIONS or key in field_names(RunSettings):
                option = OPTIONS.get(key, f"--{key.replace('_', '-')}")
                where = f"{option} on the command line" if option else "an argument of the recipe"
                raise ValueError(f"{key!r} is no setting of method {method.name!r} but an option of the run: {where}")
            known = sorted(set().union(*owners, LIKE_SETTINGS))
            hint = nearest(key, [name + dot + rest for name in known]) or ";"
            raise ValueError(f"method {method.name!r} has no setting {key!r}{hint} Available: {', '.join(known)}")
    return parts


def load_task_class(path: Path) -> type[Task]:
    """The class ``Task`` of a task file.

    Raises:
        TaskFileError: no such file, no such class in it, or the file cannot be run.
    """
    if not path.is_file():
        raise TaskFileError(f"task file {path} does not exist")
    spec = importlib.util.spec_from_file_location(TASK_MODULE, path)
    if spec is None or spec.loader is None:
        raise TaskFileError(f"task file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the type hints of its classes are looked up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TaskFileError(f"task file {path} cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, "Task", None)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise TaskFileError(f"task file {path} must define a class Task (a subclass of fairflare.tasks.base.Task)")
    return found
