"""Derive the label settings of a task, and those of ``fairflare.json``, from the values of masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base.checks import group_by_key, refuse
from fairflare.data.datalist import DataError
from fairflare.data.preparers.looking import MOSTLY, Look
from fairflare.data.preparers.names import listing

# Largest number of different values that are labels; more are grey values, smoothed edges or numbered objects.
MOST_LABELS: Mapping[str, int] = {"volume": 256, "image": 40}
VOID = 255  # value of unlabelled pixels in many data sets
BLACK_AND_WHITE = [0, 255]  # values that every task on masks reads as 0 and 1


def labels_of(
    looks: Mapping[str, Sequence[Look]], called: Mapping[int, str], notes: list[str],
    given: Mapping[str, int | str] | None = None, what: str = "volume",
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str | None]]:  # fmt: skip
    """Return settings of the task and of every site's ``fairflare.json`` for the labels of masks, and what they mean.

    What they mean is the name of each value, ``None`` where it is not known; nothing if the user gives the labels.

    Args:
        looks: what was found in the masks of each site.
        called: names of labels by value; other names are those in the files.
        notes: list to which notes on the labels are added.
        given: label of each value, if the user gives them.
        what: kind of the images, ``"image"`` or ``"volume"``.

    Raises:
        DataError: there are too many values, or they look like no labels; there is no label but 0; files give a value
            different names; or a value is missing in ``given``.
    """
    masks = [look for site_looks in looks.values() for look in site_looks if look.values]
    values = {value for look in masks for value in look.values}
    if given:
        mapped = {int(value): int(label) for value, label in given.items()}
        if strange := sorted(set(values) - set(mapped)):
            raise DataError(
                f"the masks have the values {listing(map(str, strange))}, of which --mask-values says nothing; add them"
            )
        return {}, {"mask_values": {str(value): label for value, label in mapped.items()}}, {}
    known = [0, *sorted({*values, *called} - {0})]
    refuse({
        "all masks are empty (0 at every pixel); give those in which the structures are drawn": not set(values) - {0},
        f"the masks have {len(known)} values, such as {known[:5]}; expected 0 and a few labels, no picture, smoothed "
        "edges or numbered objects: give such masks, or say what each value means (--mask-values)":
            len(known) > MOST_LABELS[what],
        **{
            f"{site}: {text}".removeprefix(": "): so and not called
            for site, site_looks in looks.items()
            for text, so in _odd(site_looks).items()
        },
    }, DataError)  # fmt: skip
    number = len(known) - 1
    in_files = {value: name for look in masks for value, name in look.names.items() if number > 1 or name[0] != "#"}
    meanings = {str(value): called.get(value) or in_files.get(value) for value in known[1:]}
    task: dict[str, Any] = {} if number == 1 else {"num_classes": number}
    if number > 1 and all(value in called for value in known[1:]):
        task["class_names"] = [called[value] for value in known[1:]]
    if known in (list(range(len(known))), BLACK_AND_WHITE):
        return task, {}, meanings
    void = (
        f"; where {VOID} means 'not annotated', write \"{VOID}\": {VOID} there, and give the run "
        f"--set ignore={VOID} --set num_classes={number - 1}; where {VOID} is the 1 of other sites' masks, prepare "
        f"again with --overwrite --mask-values {' '.join(f'{value}={value}' for value in known[:-1])} {VOID}=1"
    )
    notes.append(
        f"the labels {', '.join(map(str, known))} are read as {', '.join(map(str, range(len(known))))} (mask_values in "
        f"fairflare.json){void * (known == [*range(number), VOID] and not called)}"
    )
    return task, {"mask_values": {str(value): label for label, value in enumerate(known)}}, meanings


def _odd(looks: Sequence[Look]) -> dict[str, bool]:
    """Return problems that a site's masks may have, and whether they have them: smoothed edges, numbers of objects."""
    between = group_by_key((value, value in look.edges) for look in looks for value in look.values)
    smooth = sorted(value for value, shares in between.items() if sum(shares) >= MOSTLY * len(shares))
    # How many masks have the numbers from 1 to n, by n; by 0 those that lack a number below their highest.
    numbers = Counter(
        max(look.values) * ({0, *look.values} == {*range(max(look.values) + 1)}) for look in looks if any(look.values)
    )
    return {
        f"the values {', '.join(map(str, smooth[:8]))} occur only at the borders between others, as smoothing and "
        "resizing make them; export the masks without that (nearest neighbour), or, of one structure in 0 and 255, "
        "write them again (in Python 255 * np.uint8(mask > 127))": len(smooth) > 1,
        f"the masks have the numbers 1 to n, and n is from {min(numbers, default=0)} to {max(numbers, default=0)}: "
        "numbers of objects, not structures? Where all are one structure, write the masks again (in Python "
        "np.uint8(mask > 0)); where each is one of its own, say so (--mask-values 0=0 1=1 ..., or "
        "names in dataset.json)":
            len(numbers) > 2 and not numbers[0] and 2 * max(numbers.values()) < numbers.total() and max(numbers) > 4,
    }  # fmt: skip
