"""Put the parts of a run together from a method's name and settings; every way to run needs this plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.base.acting import idle
from fairflare.base.checks import choice, refuse, site_names, unknown, whole
from fairflare.base.disk.bundle_files import bundle_checksum, group_digits
from fairflare.base.machine.child import run_in_child
from fairflare.base.settings import build, field_names
from fairflare.base.task import Task
from fairflare.exchange.sent_tensors import ALL
from fairflare.federation.plan.papers import find_published_setting, papers_of
from fairflare.federation.plan.refusals import facts_of, refuse_run
from fairflare.federation.plan.request import RunRequest
from fairflare.federation.plan.request import Script as Script
from fairflare.federation.plan.run_settings import BY_OPTION, LIKE_SETTINGS, RunSettings
from fairflare.federation.plan.site_training import check_shared, take_shared_values, training_by_task
from fairflare.federation.plan.task_files import (
    BUNDLE_TASK,
    TASKS_BY_KIND,
    brings,
    bundle_class,
    deal_to,
    describe_object,
    load_task_class,
    rebuild_task,
)
from fairflare.methods.base.catalog import Method, Paper, get_method, method_of
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.training import LocalTraining

#: Command-line option of each setting of the run that ``--set`` does not take, by the setting's name; empty if only a
#: recipe has the setting. The error about such a setting after ``--set`` names the option.
OPTIONS = {"sites": "--sites", "phase_timeout": "--timeout"} | {
    name: "".join(option.flags[:1]).strip(" /") + f" of `fairflare {option.only}`" * bool(option.only)
    for name, option in BY_OPTION.items()
}
OPTIONS |= {words.strip("-"): words for words in OPTIONS.values() if words}
#: Names of settings that each site sets itself, in its local/fairflare.json, and that ``--set`` therefore refuses.
OF_SITES = ("device", "data_root", "datalist", "num_threads", "num_workers", "min_cases", "cache_bytes", "phantom")


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
        prescribed: settings of local training that the task prescribes, one line of text for each.
        replaced: settings of another method's set-up (``train_like``) that replace the method's own, one line each.
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
    prescribed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


def make_plan(method: str | None = None, **wanted: Any) -> Plan:
    """Return the plan of a run; the arguments are those of :class:`.request.RunRequest`, and settings of the run."""
    return plan_run(RunRequest.make(method=method, **wanted))


def plan_run(request: RunRequest) -> Plan:
    """Return the plan of a run, put together from what a user asks for.

    Raises:
        ValueError: a method, kind of task or setting is unknown (the message suggests the nearest), a value is out of
            range or given twice, or a bundle cannot be used.
    """
    chosen = choose_method_and_task(request)
    usual = usual_settings(request, chosen)
    settings = route_to_parts(request, chosen, usual)
    run, sites = choose_run_and_sites(request, chosen, usual)
    plan, training_alone = build_parts(request, chosen, run, sites, settings)
    check_parts(request, chosen, plan, training_alone)
    return plan


# ------------------------------------------------------------------------------------------------ method and task


@dataclass(frozen=True)
class Chosen:
    """Store the method and the class of the task that a run has, before anything is built.

    Attributes:
        method: the method.
        model: the method whose set-up is used: ``method`` itself, or that of ``train_like``.
        published: the paper whose published setting is used; ``None`` for a quick job.
        usual_kind: kind of task that the paper, or the method's quick job, learns.
        kind, file, task_class: kind of the run's task in words, its file and its class.
    """

    method: Method
    model: Method
    published: Paper | None
    usual_kind: str
    kind: str
    file: Path
    task_class: type[Task]

    @property
    def defaults(self) -> Method | Paper:
        """Return the method or paper that gives the numbers of rounds and sites where the run names none."""
        return self.model if self.published is None else self.published

    @property
    def can_learn(self) -> bool:
        """Return whether the method is declared for tasks of this kind; else an error names the kind."""
        plain = "segmentation" if self.kind == "nnunet" else self.kind.removeprefix("volume_")
        return self.kind == self.method.task or plain in self.method.kinds


def choose_method_and_task(request: RunRequest) -> Chosen:
    """Return the run's method and the class of its task.

    Raises:
        ValueError: a name is unknown, or a value is given twice.
    """
    method = method_of(request.rule, request.training) if request.method is None else get_method(request.method)
    refuse({
        f"paper={request.paper!r} needs small=False; set it, or leave paper out":
            request.small and request.paper is not None,
    })  # fmt: skip
    _refuse_twice(method, request)
    model = method if request.train_like is None else get_method(request.train_like)
    published = None if request.small else find_published_setting(model, request.paper)
    usual_kind = (published and published.task) or model.task
    return Chosen(method, model, published, usual_kind, *_task_class(request, usual_kind))


def _task_class(request: RunRequest, usual_kind: str) -> tuple[str, Path, type[Task]]:
    """Return the kind of task in words, its file and its class."""
    task_object = request.task_object
    if request.monai_bundle is not None:
        bundle = bundle_class(Path(request.monai_bundle), task=request.task, task_file=request.task_file)
        return "a MONAI bundle", BUNDLE_TASK, bundle
    if request.script is not None:
        assert task_object is not None
        return "a script's task", request.script.path, type(task_object)
    if task_object is not None:
        return describe_object(task_object, request.task_file)
    kind = choice("task", usual_kind if request.task is None else request.task, TASKS_BY_KIND)
    file = Path(request.task_file) if request.task_file else TASKS_BY_KIND[kind]
    return kind, file, load_task_class(file)


# ------------------------------------------------------------------------------------------------ settings


def usual_settings(request: RunRequest, chosen: Chosen) -> dict[str, Any]:
    """Return the settings that hold where the user gives none: the paper's, or those of a quick job."""
    method, model, same_kind = chosen.method, chosen.model, chosen.kind == chosen.usual_kind
    # A task of another kind than the paper's takes no settings of the paper, only its numbers of rounds and sites.
    if chosen.published is not None and same_kind:
        usual = dict(chosen.published.settings)
    else:
        usual = {**training_by_task(chosen.kind, model), **(model.small if request.small and same_kind else {})}
    if model is not method:
        usual = _take_shared_setup(model, method, usual, chosen.task_class, own_task=chosen.kind == model.task)
        usual = {**_take_published_settings(method, model, chosen.published, chosen.task_class), **usual}
    if request.task_file is not None:  # a task of the user's own need not have what the packaged one of its kind has
        classes = (method.rule, method.training, chosen.task_class)
        known = {*LIKE_SETTINGS, *(name for part in classes for name in field_names(part))}
        usual = {name: value for name, value in usual.items() if name.partition(".")[0] in known}
    # A user who sets one value of a component gets the method's own component, not the small job's or the paper's.
    taken = {*request.instead_of_epochs, *(name.partition(".")[0] for name in request.settings)}
    return {name: value for name, value in usual.items() if name.partition(".")[0] not in taken}


Settings = dict[str, Any]


def route_to_parts(
    request: RunRequest, chosen: Chosen, usual: Mapping[str, Any]
) -> tuple[Settings, Settings, Settings]:
    """Return the settings of rule, training and task: the user's over the usual ones.

    Raises:
        ValueError: no part has such a setting.
    """
    method = chosen.method
    rule, training, task = route_settings({**usual, **request.settings}, method, chosen.task_class)
    keeps = method.learns if chosen.model is method and chosen.kind == method.task else method.keeps
    # The method's values for a component do not apply when the user replaced it by a component of another kind.
    of_method = {
        name: value for name, value in method.learns.items()
        if chosen.can_learn and (part := name.partition(".")[0]) in keeps and part in field_names(chosen.task_class)
        and task.get(part, method.learns.get(part)) == method.learns.get(part)
    }  # fmt: skip
    return rule, training, {**of_method, **task}


def choose_run_and_sites(
    request: RunRequest, chosen: Chosen, usual: Mapping[str, Any]
) -> tuple[RunSettings, list[str] | None]:
    """Return the settings of the run, and the names of its sites; ``None`` for every connected site.

    The user's settings hold, else those of a given run, else the usual ones.

    Raises:
        ValueError: a value is out of range, or the run has fewer sites than a round needs.
    """
    method, names = chosen.method, {"label": chosen.method.name, "method": chosen.method.name}
    by_name = {name: value for name, value in request.settings.items() if name in LIKE_SETTINGS}
    wanted = {name: value for name, value in {**request.options, **by_name}.items() if value is not None}
    usual_of_run = {name: value for name, value in usual.items() if name in LIKE_SETTINGS}
    last = {} if chosen.published is None else {"test_last": 5}  # papers' settings report the last five models
    base = {"num_rounds": chosen.defaults.num_rounds, **names, **last, **method.run, **usual_of_run}
    if request.run is not None:  # the given run's settings, except its names and those that the method needs (cRT)
        given, plain = ({k: getattr(run, k) for k in field_names(RunSettings)} for run in (request.run, RunSettings()))
        base = given | {key: value for key, value in {**names, **method.run}.items() if given[key] == plain[key]}
    run = RunSettings(**{**base, **wanted})
    sites = site_list(chosen.defaults.num_sites if request.sites == 0 else request.sites)
    with_sums = " (with secure sums at least 3)" * bool(run.secure)
    refuse({
        f"min_sites={run.min_sites}{with_sums}, but the job has {len(sites or ())} site(s)":
            sites is not None and run.min_sites > len(sites),
    })  # fmt: skip
    return run, sites


# ------------------------------------------------------------------------------------------------ parts


def build_parts(
    request: RunRequest, chosen: Chosen, run: RunSettings, sites: list[str] | None,
    settings: tuple[Settings, Settings, Settings],
) -> tuple[Plan, LocalTraining]:  # fmt: skip
    """Return the plan, whose parts are built from their settings where they are not given as objects.

    With ``train_like`` a method could lose its own loss and still keep its name. So a task that the method's own site
    half refuses is refused with the other method's settings, too: the second object is the training without those.

    Raises:
        ValueError: a value is out of range, or rule and training have different values of a setting.
    """
    method, (of_rule, of_training, of_task) = chosen.method, settings
    dealt = deal_to(chosen.defaults.num_sites if sites is None else len(sites), chosen.task_class)
    task = _task(request, chosen, {**dealt, **of_task})
    of_method = {name: value for name, value in method.site.items() if name not in request.instead_of_epochs}
    known = (*request.settings, *method.keeps)
    prescribed = {k: v for k, v in task.training_settings(request.settings).items() if k not in known}
    shared = {k: v for k, v in prescribed.items() if k in field_names(method.rule)}  # such as q-FedAvg's learning_rate
    with_rule = take_shared_values(method.training, request.rule)
    rule = request.rule or build(
        method.rule, {**method.server, **of_rule, **shared, **take_shared_values(method.rule, request.training)}
    )
    training = request.training or build(method.training, {**of_method, **of_training, **prescribed, **with_rule})
    check_shared(rule, training)
    rule.check_run(run.num_rounds, None)
    training_alone = training
    if chosen.model is not method and type(training) is method.training:
        by_user = route_settings(request.settings, method, chosen.task_class)[1]
        training_alone = build(method.training, {**of_method, **by_user, **prescribed, **with_rule})
    if training.norm_statistics == "recalibrated":
        run = replace(run, norm_statistics="recalibrated")
    return Plan(
        method, task, rule, training, run, sites, chosen.file,
        lacks=() if request.small else _lacks(chosen.model, chosen.published, sites),
        paper=chosen.published,
        script=request.script,
        monai_bundle=None if request.monai_bundle is None else Path(request.monai_bundle).expanduser(),
        prescribed=tuple(_describe_prescribed(prescribed, build(method.training, of_method))),
        replaced=tuple(
            f"{name}={getattr(training, name)!r} (its own: {value!r})"
            for name, value in (of_method if chosen.model is not method else {}).items()
            if name not in request.settings and getattr(training, name, value) != value
        ),
    ), training_alone  # fmt: skip


def _task(request: RunRequest, chosen: Chosen, settings: Mapping[str, Any]) -> Task:
    """Return the run's task; raise where a metric of it has no declared direction."""
    if request.monai_bundle is not None:
        settings = {"bundle_sha256": group_digits(bundle_checksum(Path(request.monai_bundle).expanduser())), **settings}
    given = request.task_object
    task: Task = (
        build(chosen.task_class, settings) if given is None else rebuild_task(given, chosen.task_class, settings)
    )
    task.by_name()
    return task


# ------------------------------------------------------------------------------------------------ checks


def check_parts(request: RunRequest, chosen: Chosen, plan: Plan, training_alone: LocalTraining) -> None:
    """Check that the user's settings have an effect, and that the parts of a run fit each other.

    Raises:
        ValueError: a setting would do nothing, or parts do not fit; the message says why.
    """
    whose, components = f"method {chosen.method.name!r}", (plan.rule, plan.training, plan.task, plan.run)
    by_user = {**{k: v for k, v in request.options.items() if k in LIKE_SETTINGS}, **request.settings}
    if ineffective := list(idle(components, by_user)):
        raise ValueError(f"{whose}: {'; '.join(ineffective)}")
    several = " of several findings an image" * bool(plan.task.findings)
    lacks = "" if chosen.can_learn and not several else f" cannot learn {chosen.kind}{several}"
    facts = facts_of(
        plan.run, plan.rule, plan.training, None if request.shown else plan.task,
        script=request.script is not None, whose=f"{whose}{lacks}: ",
        other="; or choose another task or method" * bool(lacks),
    )  # fmt: skip
    check = partial(_check_together, facts, plan, training_alone, shown=request.shown)
    if request.apart and plan.run.exchange != ALL:
        run_in_child(check, before=brings(plan.task))
    else:
        check()


def _check_together(facts: dict[str, Any], plan: Plan, training_alone: LocalTraining, *, shown: bool) -> None:
    """Check that parts fit each other and the task's network, which may be built for the check.

    Args:
        facts: facts about the run, for the table of its aspects; with the sites' own scripts neither rule nor training
            is checked.
        plan: the plan.
        training_alone: the training without settings of ``train_like``.
        shown: whether to leave out checks that need the network.

    Raises:
        ValueError: parts do not fit; the message says why.
    """
    if not shown:
        plan.task.check()
    try:
        if not facts["script"]:
            plan.training.check_task(plan.task)
            training_alone.check_task(plan.task)
            plan.rule.check_run(plan.run.num_rounds, None if shown else plan.task)
    except ValueError as error:
        raise ValueError(f"{facts['whose']}{error}{facts['other']}") from error
    refuse_run(facts)


def _refuse_twice(method: Method, request: RunRequest) -> None:
    """Refuse an object of another method, and a value that is given by name though an object has it."""
    halves = (("rule", request.rule, method.rule), ("training", request.training, method.training))
    refuse({
        f"{what} of method {method.name!r} must be a {usual.__name__}, got a {type(given).__name__}":
            given is not None and not isinstance(given, usual)
        for what, given, usual in halves
    })  # fmt: skip
    options = {name: value for name, value in request.options.items() if name != "label"}
    of_parts = {"rule": request.rule, "training": request.training, "task": request.task_object}
    objects = (*((what, given, request.settings) for what, given in of_parts.items()), ("run", request.run, options))
    refuse({
        f"{what} is given as an object: set {name!r} there, in {type(given).__name__}(...)":
            None not in (value, given) and name.partition(".")[0] in field_names(type(given))
        for what, given, by_name in objects for name, value in by_name.items()
    })  # fmt: skip


def _describe_prescribed(prescribed: Mapping[str, Any], usual: LocalTraining) -> Iterator[str]:
    """Yield each setting of local training that a task prescribes, with the method's own value where it differs."""
    plain = LocalTraining()
    for name, value in prescribed.items():
        usual_value = getattr(usual, name)
        differs = usual_value not in (value, getattr(plain, name))
        yield f"{name}={value!r}" + (f" (the method's own: {usual_value!r})" if differs else "")


def _lacks(model: Method, paper: Paper | None, sites: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the values that a paper's published setting lacks and that the user has to give."""
    if paper is None:
        return (f"a published setting: {model.title} has none, so a quick job's training and its own defaults hold",)
    has = "the job goes to every connected one" if sites is None else f"the run has {len(sites)}"
    differs = sites is None or len(sites) != paper.num_sites
    return (*paper.lacks, *[f"the paper's {paper.num_sites} sites: {has}"] * differs)


def _take_shared_setup(
    model: Method, method: Method, usual: Mapping[str, Any], task_class: type, *, own_task: bool
) -> dict[str, Any]:
    """Return the training and task settings of the method ``model``, without those that are part of either method."""
    _, site, learns = route_settings(usual, model, task_class)
    training = build(model.training, {**model.site, **site})
    settings = {name: getattr(training, name) for name in field_names(LocalTraining)}
    settings |= {**(model.learns if own_task else {}), **learns}
    left_out = (*method.keeps, *model.keeps)  # settings of these parts are left out too
    return {name: value for name, value in settings.items() if name.partition(".")[0] not in left_out}


def _take_published_settings(
    method: Method, model: Method, paper_of_model: Paper | None, task_class: type
) -> dict[str, Any]:
    """Return the published settings of the method's own parts, for a method that is trained like another one.

    The settings are those of the other method's paper (``paper_of_model``) where that paper lists the method too, else
    those of the method's usual published setting.
    """
    papers = papers_of(method)
    if paper_of_model is None or not papers:
        return {}
    paper = papers.get(paper_of_model.name) or find_published_setting(method)
    of_parts = {*field_names(method.rule), *field_names(method.training)}
    shared = {*field_names(LocalTraining)} - {*method.keeps, *model.keeps}
    names = of_parts - shared | {*field_names(task_class)} & {*method.keeps}
    return {k: v for k, v in (paper.settings.items() if paper else ()) if k.partition(".")[0] in names}


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
    """Return given settings in three dicts: those of the rule, of the training and of the task; none of the run.

    A setting that several of these parts have (``preset``) is in each of their dicts.

    Raises:
        ValueError: no part has such a setting; the message suggests the nearest name.
    """
    of_parts = {key: value for key, value in settings.items() if key not in LIKE_SETTINGS}
    owners = [set(field_names(part)) for part in (method.rule, method.training, task)]
    known = set().union(*owners)
    for key in (key for key in of_parts if key.partition(".")[0] not in known):
        owner, dot, rest = key.partition(".")
        by_option = f"{OPTIONS[key]} on the command line" if OPTIONS.get(key) else "an argument of the recipe"
        named = [name + dot + rest for name in sorted({*known, *LIKE_SETTINGS})]
        refuse({
            f"{key!r} is no setting of method {method.name!r} but an option of the run: {by_option}": key in OPTIONS,
            f"{key!r} is set by each site itself, in its local/fairflare.json (--data)": owner in OF_SITES,
            f"method {method.name!r} has no setting {key!r}"
            + unknown(key, named, f"`fairflare describe {method.name}` has all"): True,
        })  # fmt: skip
    rule, training, of_task = (
        {key: value for key, value in of_parts.items() if key.partition(".")[0] in names} for names in owners
    )
    return rule, training, of_task
