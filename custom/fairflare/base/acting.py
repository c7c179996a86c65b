"""Declare which settings of a class have an effect only with some values of another setting, or where a fact holds.

A class declares ``acts = {"momentum": only_with("optimizer", "sgd")}``; declarations of its base classes count too.
``None`` in place of ``only_with(...)``: in this class the setting always acts, whatever another class declares. A fact
(``only_with("a batch norm", fact=True)``) is something in the network or at the sites for the setting to act on; the
server knows it once the sites have answered ``check``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fairflare.base.settings import Part, default_of, field_names, hints_of


@dataclass(frozen=True)
class OnlyWith:
    """Describe the value of another setting, or the fact, without which a setting has no effect.

    Args:
        other: name of another setting, of the same class or of any other part of the run; a fact: what there must be.
        values: the values of the other setting with which this one has an effect; empty for any value but 0, false or
            none.
        when: values of the setting that need the other one; empty if every value does.
        fact: whether ``other`` is a fact.
    """

    other: str
    values: tuple[Any, ...] = ()
    when: tuple[Any, ...] = ()
    fact: bool = False

    def __str__(self) -> str:
        return self.other + (
            f"={' or '.join(map(str, self.values))}"
            if self.values
            else " other than 0, empty or false" * (not self.fact)
        )

    def fits(self, value: Any) -> bool:
        """Return whether a setting has an effect if the other setting has this value."""
        chosen = value if isinstance(value, tuple) else (value,)  # one fitting value of a list is enough
        return any(one in self.values for one in chosen) if self.values else bool(value)


def only_with(other: str, *values: Any, when: Sequence[Any] = (), fact: bool = False) -> OnlyWith:
    """Declare what a setting has no effect without; the arguments are those of :class:`OnlyWith`."""
    return OnlyWith(other, values, tuple(when), fact)


def needs_of(cls: type) -> dict[str, OnlyWith | None]:
    """Return, by setting, what a class's settings need (:class:`OnlyWith`); the class overrides its base classes."""
    return {name: need for base in reversed(cls.__mro__) for name, need in vars(base).get("acts", {}).items()}


def never_acting(cls: type) -> set[str]:
    """Return the names of a class's settings that cannot act, since the other setting never has a value for it."""
    return {
        name for name, need in needs_of(cls).items()
        if need and not need.when and get_origin(other := hints_of(cls).get(need.other)) is Literal
        and not any(map(need.fits, get_args(other)))
    }  # fmt: skip


def idle(
    components: Sequence[Any], given: Mapping[str, Any] | Collection[str], facts: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield a sentence for each setting that a user gave and that has no effect in this combination of components.

    Args:
        components: the run's built components.
        given: names of the given settings, a part's as ``weighting.grid``; one with the value ``None`` was not given.
        facts: whether each fact holds, to look at these alone; a setting with its default value was not given.
    """
    values = dict(_values(components)) if facts is None else facts
    always = {name for part in components for name, need in needs_of(type(part)).items() if need is None}
    absent = {name for name in given if given[name] is None} if isinstance(given, Mapping) else set()
    for name in (name for name in given if name not in always | absent):
        for component in components:
            need = needs_of(type(component)).get(name)
            if need is None or need.other not in values or name not in field_names(type(component)):
                continue
            value, other = getattr(component, name), values[need.other]
            asked = value in need.when if need.when else not need.fact or value != default_of(type(component), name)
            if asked and not need.fits(other):
                yield f"{name}={_print_value(value)} would do nothing: it acts only with {need}, and " + (
                    "there is none; leave it out"
                    if need.fact
                    else f"{need.other} is {_print_value(other)}; leave it out, or set {need.other}"
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


def _print_value(value: Any) -> str:
    return repr(value.kind) if isinstance(value, Part) else repr(value)
