"""Put the parts of a run together from a method's name and settings; every way to run needs this plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.base.acting import idle
from fairflare.base.checks import choice, site_names, unknown, whole
from fairflare.base.disk.bundle_files import bundle_checksum, grouped
from fairflare.base.machine.child import in_child
from fairflare.base.settings import build, field_names
from fairflare.base.task import Task
from fairflare.exchange.sent_tensors import ALL
from fairflare.federation.plan.papers import papers_of, published_setting
from fairflare.federation.plan.refusals import facts_of, refuse
from fairflare.federation.plan.run_settings import BY_OPTION, LIKE_SETTINGS, RunSettings
from fairflare.federation.plan.site_training import check_shared, shared_values, training_by_task
from fairflare.federation.plan.task_files import (
    BUNDLE_TASK,
    TASKS_BY_KIND,
    brings,
    dealt_to,
    like,
    load_task_class,
    of_bundle,
    of_object,
)
from fairflare.methods.base.catalog import Method, Paper, get_method, method_of
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.training import LocalTraining

#: Command-line option of each setting of the run that ``--set`` does not take, by the setting's name; empty if only a
#: recipe has the setting. The error about such a setting after ``--set`` names the option.
OPTIONS = {"sites": "--sites", "phase_timeout": "--timeout"} | {
    name: "".join(of.flags[:1]).strip(" /") + f" of `fairflare {of.only}`" * bool(of.only)
    for name, of in BY_OPTION.items()
}
OPTIONS |= {words.strip("-"): words for words in OPTIONS.values() if words}
#: Names of settings that each site sets itself, in its local/fairflare.json, and that ``--set`` therefore refuses.
OF_SITES = ("device", "data_root", "datalist", "num_threads", "num_workers", "min_cases", "cache_bytes", "phantom")


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
class Plan:
    """Store all parts of a run that is ready to start.

    Attributes:
        method: the method in the catalog.
        task, rule, training: the run's task, and the method's server half and site half.
        run: settings of the run: rounds, least number of sites, seed, timeouts.
        sites: names of the sites; ``None`` for every connected site.
        task_file: file that defines the class of ``task``.
        lacks: values that the paper's setting lacks and that the user has to give.
        paper: the paper whose published setting the run has; ``None`` for a quick job, or where none is published.
        script: the sites' own training script; ``None`` if they have none.
        monai_bundle: folder of the MONAI bundle that is learned; ``None`` if the task is of another kind.
        brought: settings of local training that the task prescribes, one line of text for each.
        instead: settings of another method's set-up (``train_like``) that replace the method's own, one line each.
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
    script: Script | None = None,
    apart: bool = False,
    shown: bool = False,
    **options: Any,
) -> Plan:
    """Return the plan of a run, put together from a method, a task and settings.

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

    Raises:
        ValueError: a method, kind of task or setting is unknown (the message suggests the nearest), a value is out of
            range or given twice, or a bundle cannot be used.
    """
    if (statistics := options.pop("norm_statistics", None)) is not None:  # a setting of the training, copied by the run
        settings = {**(settings or {}), "norm_statistics": statistics}
    chosen = method_of(rule, training) if method is None else get_method(method)
    own_task = task if isinstance(task, Task) else None
    if small and paper is not None:
        raise ValueError(f"paper={paper!r} needs small=False; set it, or leave paper out")
    _refuse_twice(chosen, settings or {}, rule=rule, training=training, task=own_task)
    _refuse_twice(chosen, {name: value for name, value in options.items() if name != "label"}, run=run)
    model = chosen if train_like is None else get_method(train_like)
    published = None if small else published_setting(model, paper)
    learned = (published and published.task) or model.task
    task_class: type[Task]
    if monai_bundle is not None:
        kind, file = "a MONAI bundle", BUNDLE_TASK
        task_class = of_bundle(Path(monai_bundle), task=task, task_file=task_file)
    elif script is not None:
        kind, file, task_class = "a script's task", script.path, type(own_task)  # type: ignore[assignment]
    elif own_task is not None:
        kind, file, task_class = of_object(own_task, task_file)
    else:
        kind = choice("task", learned if task is None else task, TASKS_BY_KIND)
        file = Path(task_file) if task_file else TASKS_BY_KIND[kind]
        task_class = load_task_class(file)
    # A task of another kind than the paper's takes no settings of the paper, only its numbers of rounds and sites.
    if published is not None and kind == learned:
        usual = dict(published.settings)
    else:
        usual = {**training_by_task(kind, model), **(model.small if small and kind == learned else {})}
    if model is not chosen:
        usual = _shared_setup(model, chosen, usual, task_class, own_task=kind == model.task)
        usual = {**_of_own_paper(chosen, model, published, task_class), **usual}
    if task_file is not None:  # a task of the user's own need not have what the packaged one of its kind has
        has = {*LIKE_SETTINGS, *(n for part in (chosen.rule, chosen.training, task_class) for n in field_names(part))}
        usual = {name: value for name, value in usual.items() if name.partition(".")[0] in has}
    # A user who sets one value of a component gets the method's own component, not the small job's or the paper's.
    steps = _by_steps(settings or {})
    taken = {*steps, *(name.partition(".")[0] for name in settings or {})}
    usual = {name: value for name, value in usual.items() if name.partition(".")[0] not in taken}
    usual_run = {name: usual.pop(name) for name in LIKE_SETTINGS if name in usual}
    given = {**usual, **(settings or {})}
    of_run = {name: given.pop(name) for name in LIKE_SETTINGS if name in given}
    server, site, learns = route_settings(given, chosen, task_class)
    keeps = chosen.learns if model is chosen and kind == chosen.task else chosen.keeps
    can = kind == chosen.task or kind.removeprefix("volume_") in chosen.kinds  # else the task says what it cannot learn
    # The method's values for a component do not apply when the user replaced it by a component of another kind.
    own = {
        name: value for name, value in chosen.learns.items()
        if can and (part := name.partition(".")[0]) in keeps and part in field_names(task_class)
        and learns.get(part, chosen.learns.get(part)) == chosen.learns.get(part)
    }  # fmt: skip
    learns = {**own, **learns}
    length = model if published is None else published
    names = site_list(length.num_sites if sites == 0 else sites)
    learns = {**dealt_to(length.num_sites if names is None else len(names), task_class), **learns}
    wanted = {key: value for key, value in {**options, **of_run}.items() if value is not None}
    usually = {"num_rounds": length.num_rounds, "label": chosen.name, **({} if published is None else {"test_last": 5})}
    usually |= {**chosen.run, **usual_run}
    if run is not None:  # the given run's settings, except its label and those that the method needs (cRT)
        told, plain = ({key: getattr(of, key) for key in field_names(RunSettings)} for of in (run, RunSettings()))
        needed = {"label": chosen.name, **chosen.run}
        usually = {**told, **{key: value for key, value in needed.items() if told[key] == plain[key]}}
    of_plan = RunSettings(**{**usually, **wanted})
    if names is not None and of_plan.min_sites > len(names):
        raise ValueError(
            f"min_sites={of_plan.min_sites}{' (with secure sums at least 3)' * bool(of_plan.secure)}, but the job has "
            f"{len(names)} site(s)"
        )
    if monai_bundle is not None:
        learns.setdefault("bundle_sha256", grouped(bundle_checksum(Path(monai_bundle).expanduser())))
    made: Task = build(task_class, learns) if own_task is None else like(own_task, task_class, learns)
    made.by_name()  # raises where a metric has no declared direction
    own = {k: v for k, v in chosen.site.items() if k not in steps}
    said = settings or {}  # the user's own settings, without those of train_like
    brought = {k: v for k, v in made.training_settings(said).items() if k not in (*said, *chosen.keeps)}
    shared = {k: v for k, v in brought.items() if k in field_names(chosen.rule)}  # such as q-FedAvg's learning_rate
    of_rule, of_training = shared_values(chosen.training, rule), shared_values(chosen.rule, training)
    rule = rule or build(chosen.rule, {**chosen.server, **server, **shared, **of_training})
    training = training or build(chosen.training, {**own, **site, **brought, **of_rule})
    check_shared(rule, training)
    rule.check_run(of_plan.num_rounds, None)
    if training.norm_statistics == "recalibrated":
        of_plan = replace(of_plan, norm_statistics="recalibrated")
    by_hand = {**{k: options[k] for k in LIKE_SETTINGS if k in options}, **said}
    if vain := list(idle((rule, training, made, of_plan), by_hand)):
        raise ValueError(f"method {chosen.name!r}: {'; '.join(vain)}")
    # With ``train_like`` a method could lose its own loss and still keep its name. So a task that the method's own site
    # half (``alone``) refuses is refused with the other method's settings, too.
    alone = training
    if model is not chosen and type(training) is chosen.training:
        by_user = {name: value for name, value in said.items() if name not in LIKE_SETTINGS}
        by_user = route_settings(by_user, chosen, task_class)[1]
        alone = build(chosen.training, {**own, **by_user, **brought, **of_rule})
    of_what = f"{kind}{' of several findings an image' if made.findings else ''}"
    lacks = "" if can and not made.findings else f" cannot learn {of_what}"
    facts = facts_of(
        of_plan, rule, training, None if shown else made, script=script is not None,
        whose=f"method {chosen.name!r}{lacks}: ", other="; or choose another task or method" * bool(lacks),
    )  # fmt: skip
    check = partial(_check_together, facts, made, rule, (training, alone), shown=shown)
    if apart and of_plan.exchange != ALL:
        in_child(check, before=brings(made))
    else:
        check()
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
        script=script,
        monai_bundle=None if monai_bundle is None else Path(monai_bundle).expanduser(),
        brought=tuple(_in_words(brought, build(chosen.training, own))),
        instead=tuple(
            f"{name}={getattr(training, name)!r} (its own: {value!r})"
            for name, value in own.items()
            if model is not chosen and name not in said and getattr(training, name, value) != value
        ),
    )


def _check_together(
    facts: dict[str, Any], task: Task, rule: Rule, trainings: tuple[LocalTraining, ...], *, shown: bool
) -> None:
    """Check that the parts of a plan fit each other and the task's network, which may be built for the check.

    Args:
        facts: facts about the run, for the table of its aspects.
        task, rule: the plan's task and the method's rule.
        trainings: the method's training, and the training with the method's own settings, without those of
            ``train_like``; with the sites' own scripts neither is checked, nor the rule.
        shown: whether to leave out checks that need the network.

    Raises:
        ValueError: parts do not fit; the message says why.
    """
    if not shown:
        task.check()
    try:
        for training in () if facts["script"] else trainings:
            training.check_task(task)
        if not facts["script"]:
            rule.check_run(facts["num_rounds"], None if shown else task)
    except ValueError as error:
        raise ValueError(f"{facts['whose']}{error}{facts['other']}") from error
    refuse(facts)


def _refuse_twice(method: Method, by_name: Mapping[str, Any], **objects: Any) -> None:
    """Refuse an object of another method, and a value that is given by name though an object has it."""
    for what, usual in (("rule", method.rule), ("training", method.training)):
        if (half := objects.get(what)) is not None and not isinstance(half, usual):
            got = type(half).__name__
            raise ValueError(f"{what} of method {method.name!r} must be a {usual.__name__}, got a {got}")
    for what, given in objects.items():
        for name, value in by_name.items():
            if None not in (value, given) and name.partition(".")[0] in field_names(type(given)):
                raise ValueError(f"{what} is given as an object: set {name!r} there, in {type(given).__name__}(...)")


def _in_words(brought: Mapping[str, Any], usual: LocalTraining) -> Iterator[str]:
    """Yield each setting of local training that a task prescribes, with the method's own value where it differs."""
    plain = LocalTraining()
    for name, value in brought.items():
        own = getattr(usual, name)
        differs = own not in (value, getattr(plain, name))
        yield f"{name}={value!r}" + (f" (the method's own: {own!r})" if differs else "")


def _by_steps(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of usual settings that a given ``local_steps`` replaces: ``local_epochs``, or none.

    Raises:
        ValueError: ``local_steps`` and ``local_epochs`` are both given.
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
    """Return the names of the values that a paper's published setting lacks and that the user has to give."""
    if paper is None:
        return (f"a published setting: {model.title} has none, so a quick job's training and its own defaults hold",)
    if sites is None:
        return (*paper.lacks, f"the paper's {paper.num_sites} sites: the job goes to every connected one")
    if len(sites) != paper.num_sites:
        return (*paper.lacks, f"the paper's {paper.num_sites} sites: the run has {len(sites)}")
    return paper.lacks


def _shared_setup(
    model: Method, chosen: Method, usual: Mapping[str, Any], task_class: type, *, own_task: bool
) -> dict[str, Any]:
    """Return the training and task settings of the method ``model``, without those that are part of either method."""
    of_parts = {name: value for name, value in usual.items() if name not in LIKE_SETTINGS}
    _, site, learns = route_settings(of_parts, model, task_class)
    training = build(model.training, {**model.site, **site})
    found = {name: getattr(training, name) for name in field_names(LocalTraining)}
    found |= {**(model.learns if own_task else {}), **learns}
    kept = (*chosen.keeps, *model.keeps)  # settings of these parts are left out too
    return {name: value for name, value in found.items() if name.partition(".")[0] not in kept}


def _of_own_paper(chosen: Method, model: Method, other: Paper | None, task_class: type) -> dict[str, Any]:
    """Return the published settings of the method's own parts, for a method that is trained like another one.

    The settings are those of the other method's paper (``other``) where that paper lists the method too, else those of
    the method's usual published setting.
    """
    papers = papers_of(chosen)
    if other is None or not papers:
        return {}
    told = papers.get(other.name) or published_setting(chosen)
    shared, parts = {*field_names(LocalTraining)}, (chosen.rule, chosen.training)
    kept = {*chosen.keeps, *model.keeps}
    own = {name for part in parts for name in field_names(part) if name not in shared or name in kept}
    own |= {name for name in field_names(task_class) if name in chosen.keeps}
    return {k: v for k, v in (told.settings.items() if told else ()) if k.partition(".")[0] in own}


def site_list(sites: int | Sequence[str] | None) -> list[str] | None:
    """Return site names: ``3`` -> ``["site-1", "site-2", "site-3"]``; given names are checked."""
    if sites is None:
        return None
    if isinstance(sites, str) or not isinstance(sites, Sequence):
        return [f"site-{i}" for i in range(1, whole("sites", sites) + 1)]
    return list(site_names(sites))


def route_settings(
    settings: Mapping[str, Any], method: Method, task: type
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return given settings in three dicts: those of the rule, of the training and of the task.

    A setting that several of these parts have (``preset``) is in each of their dicts.

    Raises:
        ValueError: no part has such a setting; the message suggests the nearest name.
    """
    parts: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    owners = [set(field_names(part)) for part in (method.rule, method.training, task)]
    for key, value in settings.items():
        owner, dot, rest = key.partition(".")
        takers = [part for part, names in zip(parts, owners, strict=True) if owner in names]
        for part in takers:
            part[key] = value
        if not takers:
            if key in OPTIONS:
                where = f"{OPTIONS[key]} on the command line" if OPTIONS[key] else "an argument of the recipe"
                raise ValueError(f"{key!r} is no setting of method {method.name!r} but an option of the run: {where}")
            known = sorted(set().union(*owners, LIKE_SETTINGS))
            if owner in OF_SITES:
                raise ValueError(f"{key!r} is set by each site itself, in its local/fairflare.json (--data)")
            where = f"`fairflare describe {method.name}` has all {len(known)}"
            hint = unknown(key, [name + dot + rest for name in known], where)
            raise ValueError(f"method {method.name!r} has no setting {key!r}{hint}")
    return parts
