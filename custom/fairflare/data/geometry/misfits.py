"""Describe contradictions in the geometry of a stack, or of an image and its mask, for messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SHOWN = 3  # number of values that a message names
ASK = "Convert the original DICOM again, or ask who made the file"
SKEW = 1e-4  # tolerance of 1 - cos of the angle between a stack and its normal
ACROSS = 0.02  # sideways shift, in mm, below which a shift counts as rounding
STEP = 0.01  # tolerance of a step between slices, or of a voxel's side, as a share of its length


class Misfit(ValueError):
    """Report why slices form no stack, or why a mask does not fit its image.

    Args:
        cause: the kind of the problem in a few words, the same for all files with this problem.
        value: the finding in this file, as a clause that follows the name of the file.
        remedy: a sentence that tells how to correct the problem, without its full stop.
    """

    def __init__(self, cause: str, value: str, remedy: str) -> None:
        super().__init__(cause, value, remedy)
        self.cause, self.value, self.remedy = cause, value, remedy

    def __str__(self) -> str:
        return f"{self.value}. {self.remedy}"


def refuse_misfit(problem: object, cause: str, value: str, remedy: str) -> None:
    """Raise :class:`Misfit`, whose arguments follow, if there is a problem."""
    if problem:
        raise Misfit(cause, value, remedy)


def notes_of(texts: Iterable[str]) -> list[str]:
    """Return each different note once, with the number of its occurrences; empty notes are left out."""
    return [f"{text} ({count} times)" if count > 1 else text for text, count in Counter(filter(None, texts)).items()]


def format_values(values: Iterable[float]) -> str:
    return "(" + ", ".join(f"{value:.9g}" for value in values) + ")"


def sides_of(values: Iterable[float]) -> str:
    return " x ".join(f"{value:.5g}" for value in values)
