"""Withhold values of too few cases: a privacy floor for every split, and for every class in a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fairflare.base.site_data import UNLABELLED, Proxy

if TYPE_CHECKING:
    from fairflare.base.site_data import SiteData

_all: ContextVar[bool] = ContextVar("fairflare_all_records", default=False)


@contextmanager
def all_records() -> Iterator[None]:
    """Let :class:`ShownRecords` give all training images inside the context, for what ends in a model update."""
    token = _all.set(True)
    try:
        yield
    finally:
        _all.reset(token)


class Floor:
    """Decide which splits and classes of a site have enough cases (patients where known) to be reported.

    Args:
        data: the site's data.
        least: smallest number of cases that may be reported on, ``>= 1``; with 1 no case is too few.
    """

    def __init__(self, data: SiteData, least: int) -> None:
        self.data, self.least = data, least

    def holds(self, split: str) -> bool:
        """Return whether a split, and at least one class in it, has enough cases to be reported."""
        cases = None if self.least <= 1 or split == UNLABELLED else self.data.class_cases(split)
        some = cases is None or not len(cases) or int(cases.max()) >= self.least
        return self.least <= 1 or (some and self.data.num_cases(split) >= self.least)

    def hidden(self, split: str) -> frozenset[int] | None:
        """Return the classes, findings or structures with too few cases in a split; ``None`` if cases are unknown."""
        cases = self.data.class_cases(split)
        return None if cases is None else frozenset(k for k, n in enumerate(cases.tolist()) if n < self.least)

    def shown(self, split: str, classes: Iterable[int]) -> list[int]:
        """Return those of the classes that have enough cases in a split; none if the cases are unknown or too few."""
        hidden = self.hidden(split) if self.least > 1 else ()
        return [] if hidden is None or not self.holds(split) else [k for k in classes if k not in hidden]


class ShownRecords(Proxy):
    """Give a site's data without the records of classes that have too few cases (see :meth:`SiteData.enough`).

    Every measurement is then computed from the remaining records alone, for any model and any method. Only inside of
    :func:`all_records` does the training split have all of its images.

    Args:
        inner: data of the site.
        least: smallest number of cases that may be reported on.
    """

    def __init__(self, inner: SiteData, least: int) -> None:
        super().__init__(inner.enough(least))
        self._whole = inner

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not callable(value) or name == "enough":
            return value
        whole = getattr(self._whole, name)
        return lambda split, *more, **how: (whole if _all.get() and split == "training" else value)(split, *more, **how)


def find_hidden_rows(cases: Mapping[int, int], least: int) -> frozenset[int]:
    """Return the rows of a table with fewer than ``least`` cases, even 0, and those that must be withheld with them.

    The sum over all rows leaves the site: if one row alone were hidden, it would follow from the sum and the other
    rows. So further rows, those with the fewest cases first, are hidden too, until at least two are hidden that have
    ``least`` cases together. Rows without any case do not count here.

    Args:
        cases: number of cases of each row (group of people, bin), ``>= 0``.
        least: smallest number of cases that may be reported on, ``>= 1``.

    Source:
        Secondary suppression as in statistical disclosure control: Hundepool et al., Statistical Disclosure Control,
        2012, section 4.2.
    """
    hidden = {label for label, count in cases.items() if count < least}
    held = [label for label in hidden if cases[label] > 0]
    for label in sorted(set(cases) - hidden, key=lambda label: (cases[label], label)) if held else ():
        if len(held) > 1 and sum(cases[other] for other in held) >= least:
            break
        held.append(label)
    return frozenset({*hidden, *held})


def cases_of_classes(cases: Sequence[Hashable], labels: Sequence[int], classes: int) -> list[int]:
    """Count the different cases of each class.

    Args:
        cases: the case (patient, volume or image) of each sample.
        labels: the class of each sample, in ``[0, classes)``.
        classes: number of classes.
    """
    counts = Counter(label for _, label in {*zip(cases, labels, strict=True)})
    return [counts[label] for label in range(classes)]


def may_leave(of_classes: Collection[int] | None, hidden: Collection[int] | None) -> bool:
    """Return whether a metric that was measured on the data of :class:`ShownRecords` may leave the site.

    Args:
        of_classes: numbers of the metric's classes; ``None`` if not declared, empty if every image counts in it.
        hidden: result of :meth:`Floor.hidden`; ``None`` if the numbers of cases of the classes are not known.
    """
    if of_classes is not None and not of_classes:
        return True
    return hidden is not None and not (hidden if of_classes is None else {*of_classes} <= {*hidden})
