"""Words to type checkers alone, so that their package need not be installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
    from typing_extensions import dataclass_transform as dataclass_transform
else:
    Unpack = Any

    def dataclass_transform(**told: Any) -> Callable[[Any], Any]:
        """Change nothing when the program runs."""
        return lambda decorator: decorator
