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
        data: the site's data.
        least: smallest number of cases that may be reported on, ``>= 1``; with 1 no case is too few.
    """

    def __init__(self, data: SiteData, least: int) -> None:
        self.data, self.least = data, least

    def holds(self, split: str) -> bool:
        """Return whether a split of the site has enough cases to be reported."""
        return self.least <= 1 or self.data.num_cases(split) >= self.least

    def classes(self, split: str) -> torch.Tensor | None:
        """Return whether each class of a split has enough cases, (classes,) bool; ``None``: samples have no class."""
        cases = self.data.class_cases(split)
        return None if cases is None else cases >= self.least

    def counts(self, split: str) -> torch.Tensor | None:
        """Return the number of samples of each class that has enough cases, and 0 for every other class.

        ``None``: the site's data have no counts of classes.
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

    The mean over all classes leaves the site: if one class alone were hidden, its value would follow from the mean and
    the other classes' values. So further classes, those with the fewest cases first, are hidden too, until at least
    two are hidden that have ``least`` cases together. Classes without any case do not count here.

    Args:
        cases: number of cases of each class, ``>= 0``.
        least: smallest number of cases that may be reported on, ``>= 1``.

    Returns:
        The hidden classes; and whether one of them has a few cases (1 or more, below ``least``). If so, means over
        several classes are withheld too.

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
        cases: the case (patient, volume or image) of each sample.
        labels: the class of each sample, in ``[0, classes)``.
        classes: number of classes.
    """
    found: list[set[Hashable]] = [set() for _ in range(classes)]
    for case, label in zip(cases, labels, strict=True):
        found[label].add(case)
    return [len(of) for of in found]


def may_leave(of_classes: Collection[int] | None, hidden: tuple[frozenset[int], bool] | None) -> bool:
    """Return whether a metric by class may leave the site.

    Args:
        of_classes: numbers of the metric's classes; ``None``: not declared; empty: every image counts in the metric.
        hidden: result of :meth:`Floor.hidden`; ``None``: the numbers of cases of the classes are not known.
    """
    if of_classes is not None and not of_classes:
        return True
    if hidden is None:
        return False
    classes, few = hidden
    if of_classes is None:
        return not classes
    return not classes & set(of_classes) if len(of_classes) == 1 else not few
