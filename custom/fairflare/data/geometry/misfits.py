"""What does not go together, and how it is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SHOWN = 3  # values that a message names
ASK = "Convert the original DICOM again, or ask who made the file"
SKEW = 1e-4  # 1 - cos of the angle between a stack and its normal
ACROSS = 0.02  # mm: what lies across less than this is rounding
STEP = 0.01  # share of a step, or of a voxel's side, that is no difference


class Misfit(ValueError):
    """Why a stack or a pair cannot be used.

    Args:
        cause: its kind in a few words, the same for all files of this kind.
        value: what was found, as a clause that begins behind the name of the file.
        remedy: a sentence, without its full stop.
    """

    def __init__(self, cause: str, value: str, remedy: str) -> None:
        super().__init__(cause, value, remedy)
        self.cause, self.value, self.remedy = cause, value, remedy

    def __str__(self) -> str:
        return f"{self.value}. {self.remedy}"


def notes_of(found: Iterable[str]) -> list[str]:
    """Return each note once, with how often there was cause for it."""
    return [f"{text} ({count} times)" if count > 1 else text for text, count in Counter(filter(None, found)).items()]


def listed(values: Iterable[float]) -> str:
    return "(" + ", ".join(f"{value:.9g}" for value in values) + ")"


def sides_of(values: Iterable[float]) -> str:
    return " x ".join(f"{value:.5g}" for value in values)
