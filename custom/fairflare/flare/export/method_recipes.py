"""Make a recipe class for each method at run time, whose arguments are the settings that the method declares."""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from fairflare.base.aspect import COPIED
from fairflare.base.checks import nearest
from fairflare.base.described import describe_settings, format_setting, meanings
from fairflare.base.settings import Part, choices, field_names
from fairflare.federation.plan.papers import papers_of
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.plan.task_files import DEALT_TO
from fairflare.flare.export.recipes import OPTIONS, FairRecipe
from fairflare.methods.base.catalog import Method, all_methods

WIDTH = 116
MODULE = "fairflare.recipes"  # module from which the classes are imported, also by pickle
HEAD = (
    "The defaults are those of a job that is quick to try; with ``small=False`` whatever is not given is as in the "
    'paper, which is said where it differs ("paper: ...").'
)
MORE = "further settings by name, such as those of another ``task`` or of your own in ``task_file``."
RAISES = "Raises:\n    ValueError: a value of another type or out of range: one line with the setting's name."


class MethodRecipe(FairRecipe):
    """Define the base class of recipes of a single method; defaults are those of the quick job, or of the paper.

    Attributes:
        method: name of the method, as in ``fairflare list``.
        dotted: arguments that are settings of a part: ``{"weighting_grid": "weighting.grid"}``.

    Raises:
        TypeError: the class has no such argument; the message suggests the nearest.
    """

    method: ClassVar[str]
    dotted: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **given: Any) -> None:
        known = [name for name in inspect.signature(type(self)).parameters if name != "given"]
        for name in [name for name in given if name not in known]:
            raise TypeError(f"{type(self).__name__} has no argument {name!r}{nearest(name, known)}")
        settings = dict(given.pop("settings", None) or {})
        options = {name: given.pop(name) for name in (*OPTIONS, *field_names(RunSettings)) if name in given}
        settings |= {
            self.dotted.get(name, name): value
            for name, value in given.items()
            if name not in self.dotted or value is not None
        }
        super().__init__(self.method, settings=settings, **options)


def class_names() -> dict[str, Method]:
    """Return ``{name of the recipe class: method}`` for all methods."""
    return {class_name(method): method for method in all_methods().values()}


def class_name(method: Method) -> str:
    """Return the name of a method's recipe class: ``"fed_ism_plus_l"`` -> ``"FedISMPlusLRecipe"``.

    Each word is spelled as the method's title spells it.
    """
    title = "".join(filter(str.isalnum, method.title.replace("+", "Plus")))
    words = []
    for word in method.name.split("_"):
        begin = title.lower().find(word)
        spelled = word if begin < 0 else title[begin : begin + len(word)]
        words.append(spelled[0].upper() + spelled[1:])
    return "".join(words) + "Recipe"


def make_class(name: str, method: Method) -> type[MethodRecipe]:
    """Make the recipe class of a method, with signature and docstring.

    Args:
        name: name of the class.
        method: the method.

    Raises:
        ValueError: two settings would become the same argument.
    """
    settings: dict[str, str] = {}
    parameters: dict[str, inspect.Parameter] = {}
    lines = []
    for setting, parameter, meaning in _arguments(method):
        flat = parameter.name
        if settings.setdefault(flat, setting) != setting:
            raise ValueError(f"{method.name}: {setting} and {settings[flat]} would be one argument")
        if flat not in parameters:
            parameters[flat] = parameter
            lines += textwrap.wrap(
                f"{flat}: {meaning}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False
            )

    def __init__(self: MethodRecipe, **given: Any) -> None:
        MethodRecipe.__init__(self, **given)

    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters.values()]
    )
    __init__.__annotations__ = {key: p.annotation for key, p in parameters.items()}
    __init__.__qualname__ = f"{name}.__init__"
    head = [
        f"{method.summary[:1].upper()}{method.summary[1:].rstrip('.')}.",
        *([f"Source: {method.source}."] if method.source else []),
    ]
    doc = "\n\n".join(
        [*("\n".join(textwrap.wrap(p, WIDTH)) for p in (*head, HEAD)), "\n".join(["Args:", *lines]), RAISES]
    )
    return type(
        name,
        (MethodRecipe,),
        {
            "method": method.name,
            "dotted": {flat: setting for flat, setting in settings.items() if flat != setting},
            "__init__": __init__,
            "__doc__": doc,
            "__module__": MODULE,
        },
    )


# ------------------------------------------------------------------------------------------------ the arguments


def _arguments(method: Method) -> Iterator[tuple[str, inspect.Parameter, str]]:
    """Yield (setting's name, argument, meaning) for all arguments of a method's recipe class.

    They are the recipe's own options and the settings of the run, the server half, the site half and the task.
    """
    quick = make_plan(method.name, min_sites=2)
    paper = make_plan(method.name, min_sites=2, small=False) if papers_of(method) else quick
    of_recipe, declared = meanings(FairRecipe), inspect.signature(FairRecipe, eval_str=True).parameters
    for name in OPTIONS:
        yield (
            name,
            _parameter(name, declared[name].annotation, declared[name].default),
            of_recipe[name].replace("`", "``"),
        )
    yield from (
        argument for argument in _settings(quick.run, paper.run) if argument[0] not in ("label", "method", *COPIED)
    )
    yield "settings", _parameter("settings", Mapping[str, Any] | None, None), MORE
    for part in ("rule", "training", "task"):
        yield from _settings(getattr(quick, part), getattr(paper, part))


def _settings(quick: Any, paper: Any) -> Iterator[tuple[str, inspect.Parameter, str]]:
    """Yield name, parameter and meaning of the settings of one part of a plan.

    Args:
        quick: the part as it is in a quick job.
        paper: the part as it is in the paper's job.
    """
    cls = type(quick)
    hints = get_type_hints(cls, include_extras=True)
    for setting in describe_settings(cls):
        sentence = setting.meaning.rstrip(".").replace("`", "``")
        if setting.only:
            part, _, name = setting.name.partition(".")
            kinds = [
                _plain_type(get_type_hints(kind, include_extras=True)[name])
                for kind in choices(hints[part]).values()
                if name in field_names(kind)
            ]
            meaning = f"{sentence}; with {setting.only}, default ``{format_setting(setting.default)}``."
            yield setting.name, _parameter(setting.name, reduce(or_, [*kinds, None]), None), meaning
            continue
        default, usual = _plain(getattr(quick, setting.name)), _plain(getattr(paper, setting.name))
        kind, more = _plain_type(hints[setting.name]), ""
        if setting.name == DEALT_TO:
            kind, default, usual, more = kind | None, None, None, "; default: as many as the run has"
        more += f" (paper: ``{usual!r}``)" if usual != default else ""
        meaning = "; ".join(filter(None, (sentence, f"{setting.wanted}{more}.")))
        yield setting.name, _parameter(setting.name, kind, default), meaning


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name.replace(".", "_"), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _plain(value: Any) -> Any:
    """Return a setting's value in plain form: a part becomes its kind, a list becomes a tuple."""
    if isinstance(value, Part):
        return value.kind
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def _plain_type(hint: Any) -> Any:
    """Return the type that a user gives for a declared type: without bounds, a part as its kind, lists as sequences."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _plain_type(inner[0])
    if isinstance(hint, type) and issubclass(hint, Part):
        return Literal[tuple(choices(hint))]
    if origin in (Union, types.UnionType):
        return reduce(or_, map(_plain_type, inner))
    if hint is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return Mapping[tuple(map(_plain_type, inner)) or (str, Any)]  # type: ignore[misc]
    if isinstance(origin, type) and issubclass(origin, (Sequence, Set)):
        return Sequence[reduce(or_, dict.fromkeys(_plain_type(e) for e in inner if e is not Ellipsis))]  # type: ignore[misc]
    return hint
