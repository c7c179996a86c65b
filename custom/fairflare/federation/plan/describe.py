"""Describe every setting of a method in words, for ``fairflare describe`` and the docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from fairflare.base.acting import needs_of
from fairflare.base.aspect import PRIVATE, refusals
from fairflare.base.checks import choice, refuse, unknown
from fairflare.base.described import Setting, describe_settings, format_setting, markdown
from fairflare.base.settings import Part, build, field_names, values_of
from fairflare.core.states import Aggregate
from fairflare.federation.plan.bounds import Bounds
from fairflare.federation.plan.papers import find_published_setting, papers_of
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import LIKE_SETTINGS, RunSettings
from fairflare.federation.plan.site_training import training_by_task
from fairflare.federation.plan.task_files import TASKS_BY_KIND, deal_to, load_task_class
from fairflare.methods.base.catalog import GROUPS, Method, all_methods, get_method, page_of, sums_of
from fairflare.methods.base.home import every_tensor
from fairflare.methods.base.local_loop import LOWEST_SHARE
from fairflare.methods.base.rule import SendsBeside, SendsParts, TwoPhase
from fairflare.methods.fed_ga import STEPS
from fairflare.privacy.policy import can_account

#: Heading of the section on the bounds of one site's influence in a method's description. A preinstalled job has other
#: default bounds, see :data:`fairflare.federation.plan.bounds.FOR_HOSPITALS`.
BOUNDS_TITLE = "Every method, at the server: bounds on one site's influence"
RUN_TITLE = "Every run: the best model, and which models are tested"

#: What the package can do, by how stable it is: ``fairflare list`` says it, and docs/api.md, which explains the words.
STATUS = {
    "stable": "Fed-LWR, FedMRL, Fed-MAS, FedISM / FedISM+ and the baselines; simulation; comparison; checks of data; "
    "jobs for provisioned sites",
    "provisional": "deployment by `--bundle`; volumes in 3D; evaluation of given models; partial labels; groups of "
    "people; statistics",
    "experimental": "differential privacy, secure sums, unlabelled images, sealed MONAI bundles, adapters, own scripts",
}

#: Functions from a component to the value that it derives for a setting that is not given, by the setting's name.
#: Any other setting without a value is switched off.
FOUND_OUT: dict[str, Callable[[Any], Any]] = {
    "num_classes": lambda task: task.classes,
    "class_names": lambda task: task.names(),
    "class_groups": lambda task: task.groups(),
    "labels": lambda task: [sorted(labels) for labels in task.structures],
    "lowest_rate": lambda training: LOWEST_SHARE * training.learning_rate,
    "ga_step": lambda rule: STEPS[rule.fedga_mode],
    "combine": lambda rule: "multiply" if rule.preset == "fedism" else "sum",
    "floor": lambda rule: 0.0 if rule.preset == "fedism" else 1e-6,
    "trim": lambda run: Aggregate().trim,
}


@dataclass(frozen=True)
class Listed:
    """Describe a method as ``fairflare list`` and the README show it.

    Attributes:
        name, title, summary, source: see :class:`fairflare.methods.base.catalog.Method`.
        phases: how often a round asks each site.
        learns: kinds of task that the method can learn, the kind of its paper first.
        page: name of the method's page in ``docs``, without ``.md``; ``None`` if the method has no page.
        group: heading of its group, see :data:`fairflare.methods.base.catalog.GROUPS`.
        fair_to: ``"sites"``, ``"groups of people"``, ``"rare classes"`` or ``"nobody"`` (a control).
        model: ``"one"`` for all sites, or ``"own"``: sites have tensors or a model of their own.
        traffic: bytes up and down in a round, in whole models; FedAvg's are ``"1 / 1"``.
        passes: forward and backward passes of a training step, FedAvg's is ``"1"``.
        secure_sums: whether it is enough for the server to see sums of the sites' models.
        private: whether it can be trained with differential privacy.
    """

    name: str
    title: str
    summary: str
    source: str
    phases: int
    learns: tuple[str, ...]
    page: str | None
    group: str
    fair_to: str
    model: str
    traffic: str
    passes: str
    secure_sums: bool
    private: bool


def overview() -> list[Listed]:
    """Return the descriptions of all methods by group, sorted by name within a group."""
    return [_list_method(m) for m in sorted(all_methods().values(), key=lambda m: [*GROUPS].index(m.group))]


def _list_method(m: Method) -> Listed:
    training = build(m.training, m.site)
    home, more = training.home, issubclass(m.rule, (TwoPhase, SendsBeside))
    private = can_account(m.training) and not any(refusals({**vars(training), **m.run, "privacy": True}, [PRIVATE]))
    own_model = bool(home.model) or home.named is not None
    less = "1 / up to 1" if issubclass(m.rule, SendsParts) else "0 / 1" if home.named is every_tensor else "1 / 1"
    return Listed(
        m.name, m.title, m.summary, m.source, 1 + issubclass(m.rule, TwoPhase),
        tuple(sorted(m.kinds, key=m.task.__ne__)), page_of(m.name), *GROUPS[m.group], "own" if own_model else "one",
        "1 / 2" if more else less, m.passes, not sums_of(m).startswith("no"), private,
    )  # fmt: skip


def method_table(more: Mapping[str, Mapping[str, str]] = {}) -> str:
    """Return the tables of all methods in Markdown, one for each group.

    Args:
        more: further columns by name, each with its cells by the method's name.
    """
    columns = (
        "job", "method", "what it does", "model", "bytes", "passes", "secure sums", "DP", "learns", *more, "source",
    )  # fmt: skip
    lines: list[str] = []
    for (group, fair_to), methods in groupby(overview(), key=lambda m: (m.group, m.fair_to)):
        rows = [
            (
                f"`{m.name}`", f"[{m.title}]({m.page}.md)" if m.page else m.title, m.summary, m.model, m.traffic,
                m.passes, "yes" if m.secure_sums else "no", "yes" if m.private else "no", ", ".join(m.learns),
                *(cells.get(m.name, "") for cells in more.values()), m.source,
            )
            for m in methods
        ]  # fmt: skip
        lines += [
            "", f"### {group}: fair to {fair_to}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|",
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
        ]  # fmt: skip
    return "\n".join(lines[1:])


def sections(name: str, kind: str | None = None) -> dict[str, list[Setting]]:
    """Return the settings of a method's rule, training and task, of the bounds and of the run, by heading.

    Defaults are those of the method's paper; without a published setting for the kind of task, training has the quick
    job's defaults.

    Args:
        name: name of the method.
        kind: kind of task to learn; default: what the method's job learns.

    Raises:
        ValueError: the method or the kind of task is unknown.
    """
    method = get_method(name)
    kind = choice("task", kind or method.task, TASKS_BY_KIND)
    task = load_task_class(TASKS_BY_KIND[kind])
    paper = find_published_setting(method)
    published = paper.settings if paper and kind == (paper.task or method.task) else training_by_task(kind, method)
    dealt = deal_to((paper or method).num_sites, task)
    return {
        f"{method.title}, {where}": [
            replace(s, default=chosen[s.name], required=False) if s.name in chosen else s
            for s in describe_settings(cls)
        ]
        for where, cls, chosen in (
            (f"at the server: {method.rule.__name__}", method.rule, {**method.server, **published}),
            (f"at the sites: {method.training.__name__}", method.training, {**method.site, **published}),
            (f"task: {kind}", task, {**dealt, **method.learns, **published}),
        )
    } | {
        BOUNDS_TITLE: describe_settings(Bounds),
        RUN_TITLE: [
            s for s in describe_settings(RunSettings) if s.name in set(LIKE_SETTINGS) - set(field_names(Bounds))
        ],
    }


def page(name: str, kind: str | None = None) -> str:
    """Return the settings of a method, as :func:`sections` gives them, as a Markdown page.

    Raises:
        ValueError: the method or the kind of task is unknown.
    """
    return "\n\n".join(f"## {title}\n\n{markdown(group)}" for title, group in sections(name, kind).items())


@dataclass(frozen=True)
class InUse:
    """Describe a setting with the value that a run uses when the user gives none.

    Attributes:
        setting: the setting, whose default is the value in the quick job, also where a preset gives this value.
        paper: the value in a run with ``--paper``, as text; empty for the same value as in the quick job.
        needs: what the setting needs in order to act; empty if the setting always acts.
    """

    setting: Setting
    paper: str = ""
    needs: str = ""


def settings_in_use(
    name: str, only: Sequence[str] = (), given: Mapping[str, Any] | None = None, kind: str | None = None
) -> dict[str, list[InUse]]:
    """Return the settings of :func:`sections` with the values that a run uses.

    Args:
        name: name of the method.
        only: names of the settings to return; empty for all settings.
        given: values that the run is given.
        kind: kind of task that the run learns; default: what the method's job learns.

    Raises:
        ValueError: the method or a setting is unknown; the message suggests the nearest name.
    """
    groups = sections(name, kind)
    known = [setting.name for group in groups.values() for setting in group]
    where = f"`fairflare describe {name}` has all {len(known)}"
    refuse({
        f"method {name!r} has no setting {wanted!r}{unknown(wanted, known, where)}": wanted not in known
        for wanted in only
    })  # fmt: skip
    make = partial(make_plan, name, task=kind, shown=True, settings=given)
    quick = make()
    paper = make(small=False) if papers_of(get_method(name)) else quick
    by_title: dict[str, list[InUse]] = {}
    for place, (title, settings) in enumerate(groups.items()):
        part, other = ((p.rule, p.training, p.task, p.run, p.run)[place] for p in (quick, paper))
        if shown := [_compare_values(setting, part, other) for setting in settings if not only or setting.name in only]:
            by_title[title] = shown
    return by_title


def _compare_values(setting: Setting, part: Any, of_paper: Any) -> InUse:
    """Return a setting with the value of a component of the quick job, and of the paper's where that differs."""
    here, there = (_value(component, setting) for component in (part, of_paper))
    needs, different = needs_of(type(part)).get(setting.name), format_setting(here) != format_setting(there)
    return InUse(replace(setting, default=here, required=False), format_setting(there) * different, str(needs or ""))


def _value(component: Any, setting: Setting) -> Any:
    """Return the value that a component, or its preset, has for a setting; the default where the component lacks it."""
    for step in setting.name.split("."):
        value = getattr(component, step, setting.default)
        if value is None and hasattr(component, "setting"):
            value = component.setting(step)
        if value is None and step in FOUND_OUT:
            with suppress(AttributeError):  # this component lacks what the value is derived from
                value = FOUND_OUT[step](component)
        component = value
    return component.kind if isinstance(component, Part) else component


def describe_setting(used: InUse) -> str:
    """Return a setting as lines of text: type, range and value; the meaning; what the setting needs."""
    setting = used.setting
    default = "" if setting.default == "" else f"default {format_setting(setting.default)}"
    default += f" (--paper: {used.paper})" if used.paper else ""
    lines = [f"{setting.wanted}; {default}".rstrip("; "), setting.meaning.replace("`", "")]
    lines += [f"only with {setting.only}"] if setting.only else []
    return "\n".join([*lines, f"acts only with {used.needs}"] if used.needs else lines)


def quick_job(name: str, kind: str | None = None) -> str:
    """Return a text about the settings in which a quick job on a kind of task differs from the paper's settings."""
    quick, paper = (make_plan(name, task=kind, small=small, shown=True) for small in (True, False))
    given = [
        f"{setting}={_print_value(getattr(one, setting))}"
        for one, other in ((quick.rule, paper.rule), (quick.training, paper.training), (quick.task, paper.task))
        for setting, value in values_of(one)["args"].items()
        if value != values_of(other)["args"][setting]
    ]
    method, also = get_method(name), f" and {', '.join(given)}" if given else ""
    unpublished = "" if papers_of(method) else "No published setting: the defaults are those of its classes. "
    return (
        f"{unpublished}Without --paper a job has {quick.run.num_rounds} rounds, {len(quick.sites or [])} sites{also}. "
        f"Secure sums (secure=sums): {sums_of(method)}."
    )


def _print_value(value: Any) -> str:
    return str(value.kind) if isinstance(value, Part) else format_setting(value)
