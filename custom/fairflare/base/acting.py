"""Declare which settings of a class have an effect only with some values of another setting.

A class declares ``acts = {"momentum": only_with("optimizer", "sgd")}``; declarations of its base classes count too.
``None`` in place of ``only_with(...)``: in this class the setting always acts, whatever another class declares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fairflare.base.settings import Part, field_names, hints_of

__all__ = ["OnlyWith", "idle", "needs_of", "never_acting", "only_with"]


@dataclass(frozen=True)
class OnlyWith:
    """Describe the value of another setting without which a setting has no effect.

    Args:
        other: name of another setting, of the same class or of any other part of the run.
        values: the values of the other setting with which this one has an effect; empty for any value but 0, false or
            none.
        when: values of the setting that need the other one; empty if every value does.
    """

    other: str
    values: tuple[Any, ...] = ()
    when: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.other}={' or '.join(map(str, self.values))}" if self.values else f"{self.other} above 0 or true"

    def fits(self, value: Any) -> bool:
        """Return whether a setting has an effect if the other setting has this value."""
        chosen = value if isinstance(value, tuple) else (value,)  # one fitting value of a list is enough
        return any(one in self.values for one in chosen) if self.values else bool(value)


def only_with(other: str, *values: Any, when: Sequence[Any] = ()) -> OnlyWith:
    """Declare the other setting without which a setting has no effect; the arguments are those of :class:`OnlyWith`."""
    return OnlyWith(other, values, tuple(when))


def needs_of(cls: type) -> dict[str, OnlyWith | None]:
    """Return, by setting, what a class's settings need (:class:`OnlyWith`); the class overrides its base classes."""
    found: dict[str, OnlyWith | None] = {}
    for base in cls.__mro__:
        for name, need in vars(base).get("acts", {}).items():
            found.setdefault(name, need)
    return found


def never_acting(cls: type) -> set[str]:
    """Return the names of a class's settings that cannot act, since the other setting never has a value for it."""
    return {
        name for name, need in needs_of(cls).items()
        if need and not need.when and get_origin(other := hints_of(cls).get(need.other)) is Literal
        and not any(map(need.fits, get_args(other)))
    }  # fmt: skip


def idle(components: Sequence[Any], given: Mapping[str, Any] | Collection[str]) -> Iterator[str]:
    """Yield a sentence for each setting that a user gave and that has no effect in this combination of components.

    Args:
        components: the run's built components.
        given: names of the given settings, a part's as ``weighting.grid``; one with the value ``None`` was not given.
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
    """Yield the name and effective value of every setting; if a preset fills the setting, the preset's value."""
    for component in reversed(components):  # in a dict of these pairs the first component's value wins
        for name in field_names(type(component)):
            value = getattr(component, name, None)
            if value is None and hasattr(component, "setting"):
                value = component.setting(name)
            yield name, value


def _shown(value: Any) -> str:
    return repr(value.kind) if isinstance(value, Part) else repr(value)
