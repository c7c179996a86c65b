"""Declare what a rule, or a part of a rule, saves after each round: each attribute once, with its first value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fairflare.base import checks

T = TypeVar("T")


class Own(cached_property[T]):
    """Declare an attribute that is no setting, has a first value and is not saved: ``_names = Own(list[str])``.

    What has tensors is declared as ``Own["dict[str, torch.Tensor]"](dict)``, which does not load torch.

    Args:
        first: function that makes the attribute's first value, for each object anew.
    """

    def __init__(self, first: Callable[[], T]) -> None:
        super().__init__(lambda keeper: first())


class Saved(Own[T]):
    """Declare such an attribute of a :class:`KeepsState` that is saved after each round."""

    def __set_name__(self, owner: type[KeepsState], name: str) -> None:
        super().__set_name__(owner, name)
        owner._outlive = (*owner._outlive, name.removeprefix("_"))


class KeepsState:
    """Save and restore an object's state with the checkpoint: the attributes that it declares as :class:`Saved`."""

    #: Names, without underscore, of attributes that are saved after each round: plain values, tensors, dicts and lists.
    _outlive: ClassVar[tuple[str, ...]] = ()
    #: Folder for data too large for :meth:`state_dict`, set before the first round and before :meth:`load_state_dict`;
    #: ``None`` if the object is not in a run, or the data are part of :meth:`state_dict`.
    memory_folder: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with the checkpoint after a round: plain values and tensors."""
        return {name: _copy_nested(getattr(self, f"_{name}")) for name in self._outlive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        checks.same_names(f"what {type(self).__name__} keeps", self._outlive, "the checkpoint", state, of="value")
        for name, value in state.items():
            setattr(self, f"_{name}", _copy_nested(value))


def _copy_nested(value: Any) -> Any:
    """Return a copy of nested dicts and lists that shares their tensors, which are never changed in place."""
    if isinstance(value, dict):
        return {key: _copy_nested(entry) for key, entry in value.items()}
    return list(map(_copy_nested, value)) if isinstance(value, list) else value
