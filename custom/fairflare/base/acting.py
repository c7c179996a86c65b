"""Settings that act only beside another one's value: declared at the class, so that nobody sets one in vain.

A class says ``acts = {"momentum": only_with("optimizer", "sgd")}``; those of its bases count too. ``None``: with this
class it acts always, whatever another one says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairflare.base.settings import Part, field_names

__all__ = ["OnlyWith", "idle", "needs_of", "only_with"]


@dataclass(frozen=True)
class OnlyWith:
    """Describe what a setting needs in order to act.

    Args:
        other: name of another setting, of the same class or of any other part of the run.
        values: one of these; none: any that is not 0, false or nothing.
        when: only these values of the setting need it; none: all.
    """

    other: str
    values: tuple[Any, ...] = ()
    when: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.other}={' or '.join(map(str, self.values))}" if self.values else f"{self.other} above 0 or true"

    def fits(self, value: Any) -> bool:
        """Return whether the other setting's value lets this one act."""
        chosen = value if isinstance(value, tuple) else (value,)  # of a list one is enough
        return any(one in self.values for one in chosen) if self.values else bool(value)


def only_with(other: str, *values: Any, when: Sequence[Any] = ()) -> OnlyWith:
    """See :class:`OnlyWith`."""
    return OnlyWith(other, values, tuple(when))


def needs_of(cls: type) -> dict[str, OnlyWith | None]:
    """Give what the settings of a class need, those of its bases too; the class's own go first."""
    found: dict[str, OnlyWith | None] = {}
    for base in cls.__mro__:
        for name, need in vars(base).get("acts", {}).items():
            found.setdefault(name, need)
    return found


def idle(components: Sequence[Any], given: Mapping[str, Any] | Collection[str]) -> Iterator[str]:
    """Yield the name settings that somebody gave and that do nothing in this combination, a sentence each.

    Args:
        components: of the run, built.
        given: names, those of parts with the part's in front (``weighting.grid``); what is nothing was not given.
    """
    values = dict(_values(components))
    always = {name for part in components for name, need in needs_of(type(part)).items() if need is None}
    for name in given:
        if name in always or (isinstance(given, Mapping) and given[name] is None):
            continue
        for component in components:
            need = needs_of(type(component)).get(name)
            if need is None or need.other not in values or name not in field_names(type(component)):
                continue
            value, other = getattr(component, name), values[need.other]
            if (not need.when or value in need.when) and not need.fits(other):
                yield (
                    f"{name}={_shown(value)} would do nothing: it acts only with {need}, and {need.other} is "
                    f"{_shown(other)}; leave it out, or set {need.other}"
                )
                break


def _values(components: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting as it counts: one that a preset fills has the preset's value."""
    for component in reversed(components):  # the first component's goes first
        for name in field_names(type(component)):
            value = getattr(component, name, None)
            if value is None and hasattr(component, "setting"):
                value = component.setting(name)
            yield name, value


def _shown(value: Any) -> str:
    return repr(value.kind) if isinstance(value, Part) else repr(value)
