"""Collect the facts that a site reports about its data before the first round."""

from __future__ import annotations

from typing import Any

import torch

from fairflare.base.cases.census import Census, infer_annotated
from fairflare.base.cases.floor import Floor
from fairflare.base.site_data import UNLABELLED
from fairflare.base.task import SPLIT_GLOBAL, SiteData, Task
from fairflare.federation.site.sampling import STRUCTURE_SUPPORT, STRUCTURES

GLOBAL_LIST, MASK_LABELS = "global_list", "mask_labels"
CHANNELS = "channels"
OTHER_IMAGES = "other_images"
ANNOTATED, MEASURED, MARKED, MARKED_CASES = "annotated", "measured", "marked", "marked_cases"


def facts_of(data: SiteData, device: torch.device, sends_classes: bool, floor: Floor) -> dict[str, Any]:
    """Return the facts that a site reports about its opened data, by name.

    Unless the data are synthetic, one image of each list is read, to find out whether it can be read.

    Args:
        data: data of the site.
        device: device that the site trains on.
        sends_classes: whether the site may reveal which classes it has.
        floor: decides which lists have enough cases; of all other lists only the names are reported, not the sizes.

    Raises:
        DataError: the image of a list cannot be read.
    """
    splits = ["training", "validation", *data.test_splits]
    for split in () if data.synthetic else splits:  # an empty list of a site without labels has no batch
        next(iter(data.batches(split, batch_size=1)), None)
    splits += [UNLABELLED] if UNLABELLED in data.lists else []
    reported = [split for split in splits if floor.holds(split)]
    # Without class names, num_classes reveals that the site has the last class: send it only if that is allowed.
    cases, count = data.class_cases("training") if floor.least > 1 else None, data.num_classes
    many = floor.least <= 1 if cases is None or count is None else count == len(cases) and int(cases[-1]) >= floor.least
    last = sends_classes and len(reported) == len(splits) and many
    facts = {
        "splits": reported,
        "images": [data.num_samples(split) for split in reported],
        "suppressed": [split for split in splits if split not in reported] or None,
        "min_cases": floor.least if floor.least > 1 else None,
        "synthetic": bool(data.synthetic),
        "device": device.type,
        GLOBAL_LIST: data.fingerprint(SPLIT_GLOBAL) if SPLIT_GLOBAL in reported else None,
        "class_names": None if data.class_names is None else list(data.class_names),
        "class_groups": None
        if data.class_groups is None
        else [f"{name} {number}" for name, members in data.class_groups.items() for number in members],
        MASK_LABELS: list(data.mask_labels) or None,
        "num_classes": count if last or data.class_names is not None else None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def labels_of(task: Task, data: SiteData, sends_classes: bool, floor: Floor) -> dict[str, Any]:
    """Return what a site's file says of labels and channels, and the number of cases with each label.

    Args:
        task: the task as the site learns it, with the names of structures or classes.
        data, sends_classes, floor: as for :func:`facts_of`; a site that may not reveal its classes reports none.
    """
    names = task.outcome_names()
    measured = find_measurable(data, floor) if sends_classes else None
    numbers = {
        ANNOTATED: (names, data.annotated),
        CHANNELS: (task.channels or (), data.channels if task.channels else None),
        MEASURED: (names, measured),
    }
    facts: dict[str, Any] = {
        fact: [words[number] for number in known] for fact, (words, known) in numbers.items() if known is not None
    }
    marks = [data.marks(split) for split in ("training", "validation", *data.test_splits) if split != SPLIT_GLOBAL]
    if None in marks or not any(marks):  # without any label there is nothing to count
        return facts
    counts = (
        Census(mark for marks_of_split in marks for mark in marks_of_split or ()).count_reportable(names, floor.least)
        if sends_classes
        else {}
    )
    shown = infer_annotated(data.known, [k for k, name in enumerate(names) if name in counts], len(names))
    if shown is not None:
        facts.setdefault(ANNOTATED, [names[k] for k in shown])
    return {**facts, MARKED: list(counts), MARKED_CASES: list(counts.values())}


def find_measurable(data: SiteData, floor: Floor) -> tuple[int, ...] | None:
    """Return the findings that can be measured: in validation and in test enough cases have, and enough lack, them.

    For structures, return those that enough cases mark in both splits. Return ``None`` if all are measured, or the data
    have neither findings nor structures.
    """
    if data.known is None:
        shown = [
            {*structures} for split in ("validation", "test") if (structures := data.structures(split)) is not None
        ]
        return tuple(sorted(set.intersection(*shown))) if shown else None
    cases = [floor.data.class_cases(split) for split in ("validation", "test")]
    if None in cases:
        return None
    return tuple(k for k in data.known if min(int(n[k]) for n in cases if n is not None) >= max(floor.least, 1))


def support_of(task: Task, data: SiteData, floor: Floor) -> dict[str, Any]:
    """Return how many test images mark each annotated structure, without those that too few cases mark, or lack.

    A structure that no test image marks is in the result only where the site has no ``min_cases``. The result is empty
    for a task with classes, whose numbers :meth:`Task.sampling` returns.
    """
    marks = data.marks("test")
    if marks is None or task.has_classes:
        return {}
    census, names = Census(marks), task.outcome_names()
    reported = set(names if floor.least <= 1 else census.count_reportable(names, floor.least))
    numbers = [k for k in range(len(names)) if names[k] in reported and k in (data.annotated or (k,))]
    return {STRUCTURES: [names[k] for k in numbers], STRUCTURE_SUPPORT: [census.images[k] for k in numbers]}
