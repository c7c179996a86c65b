"""Declare a metric: its name as it leaves a site, its range, and whether larger values are better."""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from fairflare.base.checks import number, refuse


def metric_name(text: str) -> str:
    """Return a metric's name as it is written wherever the metric leaves a site: ASCII letters, digits and ``_ / . -``.

    Other characters become ``_`` and accents are dropped. If another letter is lost, six digits of a checksum are
    appended, so that such names stay different.

    >>> metric_name("recall_bone loss"), metric_name("recall_café (1)"), metric_name("recall_肺")
    ('recall_bone_loss', 'recall_cafe_1_', 'recall__.69810a')
    """
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    name = re.sub(r"[^A-Za-z0-9_/.-]+", "_", plain)
    return name if plain.isascii() and name else f"{name}.{hashlib.sha256(text.encode()).hexdigest()[:6]}"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Declare a metric of :meth:`Task.evaluate`.

    Args:
        name: key of the metric in the result of ``evaluate``; stored in the form that :func:`metric_name` gives.
        doc: what the metric is, for ``fairflare privacy``.
        reveals: what the metric's value reveals about a site's data.
        by_class: whether the metric measures one class, or reveals which classes a site has; a site may withhold it.
        family: name of all such metrics in the documentation (``recall_<class>``); default: ``name``.
        low, high: closed range of the values; infinite: no limit on that side. Site and server refuse values outside.
        higher_is_better: whether larger values are better; ``None`` if not declared, which ends a run before it begins.
        unit: unit of the values (``mm``); empty if the metric has no unit.
        mean_of_images: whether the metric is the mean of the values of :meth:`Task.evaluate` for each single image.
        of_classes: numbers of the classes that the metric measures; empty if every image of the split counts in it;
            ``None`` if it is not declared, so the metric is withheld wherever a class has too few cases.
    """

    name: str
    doc: str
    reveals: str = ""
    by_class: bool = False
    family: str = ""
    low: float = 0.0
    high: float = 1.0
    higher_is_better: bool | None = None
    unit: str = ""
    mean_of_images: bool = False
    of_classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        start, sign, rest = self.name.partition("<")  # a name such as dice_<class> stands for a family of metrics
        object.__setattr__(self, "name", metric_name(start) + sign + rest if start and sign else metric_name(self.name))
        for name, value in (("low", self.low), ("high", self.high)):
            if value not in (-math.inf, math.inf):
                number(f"{name} of metric {self.name!r}", value)
        refuse({
            f"metric {self.name!r}: low must be below high, got {self.low} and {self.high}": not self.low < self.high,
        })  # fmt: skip

    def holds(self, value: float) -> bool:
        """Return whether a finite value lies in the metric's range."""
        return self.low <= value <= self.high

    @property
    def range(self) -> str:
        """Return the metric's range and unit as text, such as ``[0, 1]`` or ``[0, inf) mm``."""
        ends = "(" if math.isinf(self.low) else "[", ")" if math.isinf(self.high) else "]"
        return f"{ends[0]}{self.low:g}, {self.high:g}{ends[1]}{self.unit and f' {self.unit}'}"

    def describe(self) -> dict[str, Any]:
        """Return direction, range and unit of the metric as plain values; ``None`` for no limit."""
        return {
            **{name: value if math.isfinite(value := getattr(self, name)) else None for name in ("low", "high")},
            **{name: getattr(self, name) for name in ("higher_is_better", "unit", "mean_of_images")},
        }


LOSS = Metric(
    name="loss", doc="mean loss of the evaluated images", low=-math.inf, high=math.inf, higher_is_better=False
)
