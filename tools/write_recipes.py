"""Writes ``fairflare.recipes``: a class for each method, its settings as arguments, from the declarations that
``fairflare describe`` shows.

``python tools/write_recipes.py`` after a setting or a method was changed; a test holds that the files are up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fairflare.core.settings import Part, Setting, _meanings, choices, described, field_names, typed
from fairflare.federation.plan import Plan
from fairflare.federation.run_settings import RunSettings
from fairflare.flare.recipes import OPTIONS, FairRecipe
from fairflare.methods.catalog import Method, all_methods

FOLDER = Path(__file__).parents[1] / "custom" / "fairflare" / "recipes"
WIDTH = 120
PARTS = {"avg": "Avg", "fed": "Fed", "plus": "Plus"}  # of a method's name; other short ones are abbreviations
MADE = "Made by tools/write_recipes.py; change the declarations and run it again."
REFUSED = "a value of another type or out of range: one line with the setting's name."
#: Dealt to as many sites as the run has, unless it is given.
BY_SITES = "phantom_sites"


@dataclasses.dataclass
class Argument:
    """One argument of a recipe."""

    name: str
    type: str
    default: str
    meaning: str


# ------------------------------------------------------------------------------------------------ the files


def write(folder: Path = FOLDER) -> None:
    """All files of the package, and nothing else in it."""
    files = contents()
    for path in folder.glob("*.py"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        folder.joinpath(name).write_text(text, encoding="utf-8")


def contents() -> dict[str, str]:
    """``{file name: text}``."""
    methods = all_methods()
    found = {f"{method.name}.py": module(method) for method in methods.values()}
    names = ["FairRecipe", "PocEnv", "ScriptRecipe", *(class_name(name) for name in methods)]
    imports = [
        "from fairflare.flare.environments import PocEnv",
        "from fairflare.flare.recipes import FairRecipe",
        "from fairflare.flare.script_recipe import ScriptRecipe",
    ]
    imports += [f"from fairflare.recipes.{name} import {class_name(name)}" for name in methods]
    listed = "\n".join(f"    {json.dumps(name)}," for name in sorted(names))
    head = f'"""A FLARE Recipe for each method; ``docs/recipes.md`` shows them at work.\n\n{MADE}\n"""'
    found["__init__.py"] = f"{head}\n\n" + "\n".join(sorted(imports)) + f"\n\n__all__ = [\n{listed}\n]\n"
    return found


def class_name(method: str) -> str:
    """``"fed_ism_plus_l"`` -> ``"FedISMPlusLRecipe"``."""
    words = method.split("_")
    return "".join(PARTS.get(w, w.upper() if len(w) <= 3 else w.capitalize()) for w in words) + "Recipe"


def module(method: Method) -> str:
    """One recipe's file."""
    quick, paper = FairRecipe(method.name).plan, FairRecipe(method.name, small=False).plan
    groups = {
        "The run": options(method, quick, paper),
        "At the server": settings(quick.rule, paper.rule),
        "At the sites": settings(quick.training, paper.training),
        f"The task ({method.task})": settings(quick.task, paper.task),
    }
    seen: set[str] = set()
    dotted: dict[str, str] = {}
    for title, group in groups.items():
        groups[title] = [a for a in group if a.name not in seen and not seen.add(a.name)]  # type: ignore[func-returns-value]
    for argument in [a for group in groups.values() for a in group if "." in a.name]:
        flat = argument.name.replace(".", "_")
        if flat in seen:
            raise ValueError(f"{method.name}: {argument.name} and {flat} would be one argument")
        dotted[flat], argument.name = argument.name, flat
    arguments = [a for group in groups.values() for a in group]
    lines = [f'"""{method.title}.\n\n{MADE}\n"""', "", *imports(arguments, bool(dotted)), "", ""]
    lines += [f"class {class_name(method.name)}(MethodRecipe):", *docstring(method, groups), ""]
    lines.append(f"    method = {json.dumps(method.name)}")
    if dotted:
        inner = "".join(f"\n        {json.dumps(k)}: {json.dumps(v)}," for k, v in sorted(dotted.items()))
        lines.append(f"    dotted: ClassVar[dict[str, str]] = {{{inner}\n    }}")
    lines += ["", "    @only_what_is_given", "    def __init__(", "        self,", "        *,"]
    lines += [f"        {a.name}: {a.type} = {a.default}," for a in arguments]
    return "\n".join([*lines, "    ) -> None: ...", ""])


def imports(arguments: Sequence[Argument], dotted: bool) -> list[str]:
    used = " ".join(a.type for a in arguments)
    abstract = [name for name in ("Mapping", "Sequence") if name in used]
    typing = [name for name in ("Any", "Literal") if name in used]
    typing += ["ClassVar"] if dotted else []
    return [
        "from __future__ import annotations",
        "",
        f"from collections.abc import {', '.join(abstract)}",
        "from pathlib import Path",
        f"from typing import {', '.join(sorted(typing))}",
        "",
        "from fairflare.flare.recipes import MethodRecipe, only_what_is_given",
    ]


def docstring(method: Method, groups: Mapping[str, Sequence[Argument]]) -> list[str]:
    """Of the class; the arguments by where they belong."""
    head = f'"""{method.summary[0].upper()}{method.summary[1:].rstrip(".")}.'
    lines = textwrap.wrap(head, WIDTH - 4, break_on_hyphens=False)
    if method.source:
        lines += ["", *textwrap.wrap(f"Source: {method.source}.", WIDTH - 4, break_on_hyphens=False)]
    lines += ["", *textwrap.wrap(
        "The defaults are those of a job that is quick to try; with ``small=False`` whatever is not given is as in the "
        'paper, which is said where it differs ("paper: ...").', WIDTH - 4,
    ), "", "Args:"]  # fmt: skip
    for group in groups.values():
        for a in group:
            text = f"{a.name}: {a.meaning}"
            lines += textwrap.wrap(
                text, WIDTH - 4, initial_indent="    ", subsequent_indent="        ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
    lines += ["", "Raises:", f"    ValueError: {REFUSED}"]
    if any("\\" in line for line in lines):
        lines[0] = "r" + lines[0]
    return [f"    {line}" if line else "" for line in [*lines, '"""']]


# ------------------------------------------------------------------------------------------------ the arguments


def options(method: Method, quick: Plan, paper: Plan) -> list[Argument]:
    """Of :class:`FairRecipe` and of the run."""
    found = []
    meanings, declared = _meanings(FairRecipe), inspect.signature(FairRecipe.__init__).parameters
    for name in OPTIONS:
        own = declared[name]
        found.append(Argument(name, own.annotation, shown(own.default), meanings[name].replace("`", "``")))
    for setting in described(RunSettings):
        if setting.name in ("label", "norm_statistics"):  # the latter is of the sites, and the run follows it
            continue
        value, usual = getattr(quick.run, setting.name), getattr(paper.run, setting.name)
        found.append(argument(setting, hint_of(RunSettings, setting.name), value, usual))
    more = "further settings by name, such as those of another ``task`` or of your own in ``task_file``."
    return [*found, Argument("settings", "Mapping[str, Any] | None", "None", more)]


def settings(quick: Any, paper: Any) -> list[Argument]:
    """Of one part of a plan; what belongs to a part of it is called ``part.setting``."""
    found = []
    seen: set[str] = set()
    for setting in described(type(quick)):
        if not setting.only:
            usual = getattr(paper, setting.name)
            found.append(argument(setting, hint_of(type(quick), setting.name), getattr(quick, setting.name), usual))
            continue
        part, _, name = setting.name.partition(".")
        kinds = choices(hint_of(type(quick), part))
        having = [kind for kind in kinds.values() if name in field_names(kind)]
        hints = {python_type(hint_of(kind, name)) for kind in having}
        if setting.name in seen:  # another kind has it too, with another default or range
            continue
        seen.add(setting.name)
        types_ = sorted({*" | ".join(sorted(hints)).split(" | "), "None"} - {"None"})
        meaning = f"{sentence(setting.meaning)}; with {setting.only}, default ``{typed(setting.default)}``."
        found.append(Argument(setting.name, fitting(setting.name, " | ".join([*types_, "None"])), "None", meaning))
    return found


def argument(setting: Setting, hint: Any, value: Any, usual: Any) -> Argument:
    """One setting; ``value`` in a quick job, ``usual`` in the paper's."""
    kind, default = python_type(hint), plain(value)
    if setting.name == BY_SITES:
        kind, default, usual = f"{kind} | None", None, None
    paper = f" (paper: ``{shown(plain(usual))}``)" if plain(usual) != default else ""
    of_sites = "; default: as many as the run has" if setting.name == BY_SITES else ""
    meaning = f"{sentence(setting.meaning)}; {setting.wanted}{of_sites}{paper}."
    return Argument(setting.name, fitting(setting.name, kind), shown(default), meaning)


def sentence(text: str) -> str:
    return text.rstrip(".").replace("`", "``")


def fitting(name: str, kind: str) -> str:
    """The type, or without its choices where they need a line of their own; the docstring has them."""
    if len(kind) + len(name) < WIDTH - 40:
        return kind
    return "str | None" if kind.endswith("| None") else "str"


def plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.kind
    if isinstance(value, (tuple, list)):
        return tuple(plain(entry) for entry in value)
    return value


def shown(value: Any) -> str:
    """As Python code, with double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(shown, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


def hint_of(cls: type, name: str) -> Any:
    return get_type_hints(cls, include_extras=True)[name]


def python_type(hint: Any) -> str:
    """What a person writes for a declared type: bounds are left out, any sequence will do."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return python_type(inner[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(shown, inner))}]"
    if isinstance(hint, type) and issubclass(hint, Part):
        return f"Literal[{', '.join(map(shown, choices(hint)))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(python_type(option) for option in inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"Mapping[{', '.join(map(python_type, inner)) or 'str, Any'}]"
    if isinstance(origin, type) and issubclass(origin, (Sequence, Set)):
        entries = dict.fromkeys(python_type(entry) for entry in inner if entry is not Ellipsis)
        return f"Sequence[{' | '.join(entries)}]"
    if hint is dict:
        return "Mapping[str, Any]"
    return "None" if hint is type(None) else str(getattr(hint, "__name__", "Any"))


if __name__ == "__main__":
    sys.exit(write())
