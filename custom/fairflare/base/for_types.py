"""Provide names for type checkers alone, so that the ``typing_extensions`` package need not be installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
    from typing_extensions import dataclass_transform as dataclass_transform
else:
    Unpack = Any

    def dataclass_transform(**options: Any) -> Callable[[Any], Any]:
        """Return a function that changes nothing at run time; only type checkers read ``dataclass_transform``."""
        return lambda decorator: decorator
