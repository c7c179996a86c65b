"""Derive the label settings of a task, and those of ``fairflare.json``, from the values of masks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fairflare.base.checks import first_of
from fairflare.data.datalist import DataError
from fairflare.data.preparers.names import listing

# Largest number of different values that are labels; more are grey values, smoothed edges or numbered objects.
MOST_LABELS: Mapping[str, int] = {"volume": 256, "image": 40}
VOID = 255  # value of unlabelled pixels in many data sets
BLACK_AND_WHITE = [0, 255]  # values that every task on masks reads as 0 and 1


def labels_of(
    values: Collection[int], called: Mapping[int, str], notes: list[str], given: Mapping[str, int | str] | None = None,
    what: str = "volume",
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Return the settings of the task for the labels of masks, and the settings of every site in ``fairflare.json``.

    Args:
        values: all values that occur in the masks.
        called: names of labels by value.
        notes: list to which notes on the labels are added.
        given: label of each value, if the user gives them.
        what: kind of the images, ``"image"`` or ``"volume"``.

    Raises:
        DataError: there are too many values, there is no label but 0, or a value is missing in ``given``.
    """
    if given:
        mapped = {int(value): int(label) for value, label in given.items()}
        if strange := sorted(set(values) - set(mapped)):
            raise DataError(
                f"the masks have the values {listing(map(str, strange))}, of which --mask-values says nothing; add them"
            )
        return {}, {"mask_values": {str(value): label for value, label in mapped.items()}}
    known = [0, *sorted({*values, *called} - {0})]
    if problem := first_of({
        "all masks are empty (0 at every pixel); give those in which the structures are drawn": not set(values) - {0},
        f"the masks have {len(known)} values, such as {known[:5]}; expected 0 and a few labels, no picture, smoothed "
        "edges or numbered objects: give such masks, or say what each value means (--mask-values)":
            len(known) > MOST_LABELS[what],
    }):  # fmt: skip
        raise DataError(problem)
    number = len(known) - 1
    task: dict[str, Any] = {} if number == 1 else {"num_classes": number}
    if number > 1 and all(value in called for value in known[1:]):
        task["class_names"] = [called[value] for value in known[1:]]
    if known in (list(range(len(known))), BLACK_AND_WHITE):
        return task, {}
    note = f"the labels {', '.join(map(str, known))} are read as {', '.join(map(str, range(len(known))))}"
    note += " (mask_values in fairflare.json)"
    if known == [*range(number), VOID] and not called:
        note += (
            f"; where {VOID} means 'not annotated', write \"{VOID}\": {VOID} there, and give the run "
            f"--set ignore={VOID} --set num_classes={number - 1}; where {VOID} is the 1 of other sites' masks, prepare "
            f"again with --overwrite --mask-values {' '.join(f'{value}={value}' for value in known[:-1])} {VOID}=1"
        )
    notes.append(note)
    return task, {"mask_values": {str(value): label for label, value in enumerate(known)}}
