"""Hold a run's figures as one table of cells: what was measured, of which model, where, and why it does not count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairflare.base.settings import Number, Whole

LAST, BEST = "last", "best"  # models: that of the last round, and the best by the validation splits
TEST, VALIDATION, GLOBAL, CLINICAL = "test", "validation", "global", "clinical"
OF_ALL = "global/"  # prefix of a metric of the global test where it stands among the metrics of the sites
SUPPRESSED = "suppressed"  # reason: the site withholds the value, which rests on too few cases
UNDEFINED = "undefined there"  # reason: the value was measured and is not finite
NOT_COUNTED = "not annotated there, or in no image"


@dataclass(frozen=True)
class Cell:
    """Store one figure.

    Attributes:
        metric: name of what was measured, unique within a model and a split (``dice``, ``dice_prostate``); empty: a
            group or class that the site withholds as a whole.
        site: name of the site; empty: over all sites together, or on images that belong to no single site.
        model: ``last``, ``best``, or ``last 5`` for a mean over the models of the last five rounds.
        split: images: ``test``, ``validation``, a further test list ``test_<name>``, ``global`` (of no single site), or
            ``clinical``: the test split, with thresholds from the validation split.
        part: class, structure or finding that is measured; empty: no single one. Of a gap the group that is behind.
        group: group of people as ``<attribute>=<group>``, ``<attribute>=`` for all groups together, ``<attribute>`` for
            a gap between groups; empty: all images.
        value: the figure; ``None`` if it is not known or not finite.
        low, high: ends of its 95 % interval; ``None``: it has none.
        cases: number of independent cases that it rests on; ``None``: not known.
        reason: why the value is missing or does not count; empty: it counts.
    """

    metric: str = ""
    site: str = ""
    model: str = LAST
    split: str = TEST
    part: str = ""
    group: str = ""
    value: Number | None = None
    low: Number | None = None
    high: Number | None = None
    cases: Number | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """Return the metric's name where metrics of several test lists stand together: ``<list>/<metric>``."""
        alone = self.split in (TEST, VALIDATION, CLINICAL)
        return self.metric if alone else f"{self.split.removeprefix('test_')}/{self.metric}"

    @property
    def counted(self) -> float:
        """Return the value; NaN if it is missing or does not count."""
        return math.nan if self.value is None or self.reason else self.value


@dataclass(frozen=True)
class Vector:
    """Store several values of one figure, such as those on bootstrap draws of a site's test cases.

    Attributes:
        metric, site, group: see :class:`Cell`.
        unit: what each value is of or without: kind of the cases that were drawn, or ``parts`` or ``bins``.
        count: number of such units at the site.
        values: the values; ``None`` where undefined.
    """

    metric: str = ""
    site: str = ""
    group: str = ""
    unit: str = ""
    count: Whole | None = None
    values: tuple[Number | None, ...] = ()


def make_cells(metrics: Mapping[str, float], split: str) -> list[Cell]:
    """Return the cells of the metrics that were measured on a split; a value that is not finite becomes a reason."""
    return [
        Cell(name, split=split, value=float(value))
        if math.isfinite(value)
        else Cell(name, split=split, reason=UNDEFINED)
        for name, value in metrics.items()
    ]


def values_of(cells: Iterable[Cell]) -> dict[str, float]:
    """Return the values of cells that are not withheld by their names; NaN if undefined."""
    return {cell.name: math.nan if cell.value is None else cell.value for cell in cells if cell.reason != SUPPRESSED}


def pivot(cells: Iterable[Cell], *keys: str) -> dict[str, Any]:
    """Return cells as dicts within each other, by the columns ``keys`` in this order; of equal keys the last counts."""
    table: dict[str, Any] = {}
    for cell in cells:
        place = table
        for key in keys[:-1]:
            place = place.setdefault(getattr(cell, key), {})
        place[getattr(cell, keys[-1])] = cell
    return table


def value_of(cells: Mapping[str, Cell], name: str) -> float | None:
    """Return the value of a figure (:class:`Cell`) by its key in ``cells``; ``None`` if the key is missing."""
    return cells[name].value if name in cells else None
