"""Every setting of a method in words, for ``fairflare describe`` and the docs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fairflare.core.settings import Setting, described, markdown, typed
from fairflare.federation.plan import TASKS_BY_KIND, dealt_to, load_task_class
from fairflare.methods.catalog import all_methods, get_method


def overview() -> list[tuple[str, str, str, str]]:
    """Name, title, summary and source of every method."""
    return [(m.name, m.title, m.summary, m.source) for m in all_methods().values()]


def sections(name: str) -> dict[str, list[Setting]]:
    """Settings of a method's rule, its training and its task, by heading; defaults are those of the method's paper.

    Raises:
        ValueError: unknown method.
    """
    method = get_method(name)
    task = load_task_class(TASKS_BY_KIND[method.task])
    learns = {**dealt_to(method.num_sites, task), **method.learns}
    return {
        f"{method.title}, at the server: {method.rule.__name__}": _with(described(method.rule), method.server),
        f"{method.title}, at the sites: {method.training.__name__}": _with(described(method.training), method.site),
        f"{method.title}, task: {method.task}": _with(described(task), learns),
    }


def page(name: str) -> str:
    """The same as Markdown.

    Raises:
        ValueError: unknown method.
    """
    return "\n\n".join(f"## {title}\n\n{markdown(found)}" for title, found in sections(name).items())


def in_lines(setting: Setting) -> str:
    """Type, range and default; the meaning; what it belongs to."""
    default = "required" if setting.required else "" if setting.default == "" else f"default {typed(setting.default)}"
    lines = [f"{setting.wanted}; {default}".rstrip("; "), setting.meaning.replace("`", "")]
    return "\n".join([*lines, f"only with {setting.only}"] if setting.only else lines)


def quick_job(name: str) -> str:
    """What a job that is quick to try has instead of the paper's settings."""
    method = get_method(name)
    given = [f"{key}={typed(value)}" for key, value in method.small.items()]
    return f"Without --paper a job has {method.num_rounds} rounds" + (f" and {', '.join(given)}." if given else ".")


def _with(found: list[Setting], chosen: Any) -> list[Setting]:
    return [replace(s, default=chosen[s.name], required=False) if s.name in chosen else s for s in found]
