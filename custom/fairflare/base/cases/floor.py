"""Withhold values of too few cases: a privacy floor for every split, and for every class in a split."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fairflare.base.task import SiteData


class Floor:
    """Decide which splits and classes of a site have enough cases (patients where known) to be reported.

    Args:
        data: of the site.
        least: cases that there must be, ``>= 1``; with 1 everything that is there may be told.
    """

    def __init__(self, data: SiteData, least: int) -> None:
        self.data, self.least = data, least

    def holds(self, split: str) -> bool:
        """Return whether a split of the site has enough cases to be reported."""
        return self.least <= 1 or self.data.num_cases(split) >= self.least

    def classes(self, split: str) -> torch.Tensor | None:
        """Return which classes of a split have enough cases, (classes,) bool; ``None``: samples have no class."""
        cases = self.data.class_cases(split)
        return None if cases is None else cases >= self.least

    def counts(self, split: str) -> torch.Tensor | None:
        """Return the number of samples of each class that has enough cases, and 0 for every other class.

        ``None``: there are no such numbers.
        """
        counts = self.data.class_counts(split)
        if counts is None or self.least <= 1:
            return counts
        enough = self.classes(split)
        return None if enough is None else counts * enough

    def hidden(self, split: str) -> tuple[frozenset[int], bool] | None:
        """Return the classes whose values are withheld, and whether one of these classes has a few cases (not 0).

        See :func:`hidden_classes`; ``None``: samples have no class.
        """
        cases = self.data.class_cases(split)
        return None if cases is None else hidden_classes(dict(enumerate(cases.tolist())), self.least)


def hidden_classes(cases: Mapping[int, int], least: int) -> tuple[frozenset[int], bool]:
    """Return the classes with fewer than ``least`` cases, even 0, and those that must be withheld with them.

    The mean over all classes leaves the site: of one hidden class it would tell the value, the others taken away. So
    the classes with the fewest cases join it until two with ``least`` cases together are hidden.

    Args:
        cases: by class, ``>= 0``.
        least: ``>= 1``.

    Returns:
        The classes; and whether one of them has a few cases, so that means over several classes stay at home too.

    Source:
        Secondary suppression as in statistical disclosure control: Hundepool et al., Statistical Disclosure Control,
        2012, section 4.2.
    """
    hidden = {label for label, count in cases.items() if count < least}
    few = {label for label in hidden if cases[label] > 0}
    if few:
        held = sorted(few)
        for label in sorted(set(cases) - hidden, key=lambda label: (cases[label], label)):
            if len(held) > 1 and sum(cases[other] for other in held) >= least:
                break
            held.append(label)
        hidden |= set(held)
    return frozenset(hidden), bool(few)


def cases_of_classes(cases: Sequence[Hashable], labels: Sequence[int], classes: int) -> list[int]:
    """Count the different cases of each class.

    Args:
        cases: whose each sample is.
        labels: its class, in ``[0, classes)``; as many.
        classes: number of classes.
    """
    found: list[set[Hashable]] = [set() for _ in range(classes)]
    for case, label in zip(cases, labels, strict=True):
        found[label].add(case)
    return [len(of) for of in found]


def may_leave(of_classes: Collection[int] | None, hidden: tuple[frozenset[int], bool] | None) -> bool:
    """Return whether a metric by class may leave the site.

    Args:
        of_classes: numbers of its classes; ``None``: it does not say; none: every image counts in it.
        hidden: of :meth:`Floor.hidden`; ``None``: nobody knows how many cases a class has.
    """
    if of_classes is not None and not of_classes:
        return True
    if hidden is None:
        return False
    classes, few = hidden
    if of_classes is None:
        return not classes
    return not classes & set(of_classes) if len(of_classes) == 1 else not few
