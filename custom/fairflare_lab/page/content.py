"""What a page is made of, before it becomes HTML, PNG, SVG or CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairflare.reporting.layout import MAX_COLUMNS, MAX_ROWS, Cell, Spread, Table, listed, number, printable, shown

__all__ = [
    "MAX_COLUMNS", "MAX_ROWS", "NOTHING", "Cell", "Page", "Picture", "Section", "Spread", "Table", "extremes", "listed",
    "printable", "shown",
]  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def extremes(values: Mapping[str, float | None]) -> str:
    """Say ``from 0.4 (site-2) to 0.7 (site-1)``; empty: no site has a value."""
    known = {site: value for site, value in values.items() if value is not None and math.isfinite(value)}
    low, high = (of(known, key=known.__getitem__, default="") for of in (min, max))
    return f"from {number(known[low])} ({low}) to {number(known[high])} ({high})" if known else ""


@dataclass(frozen=True)
class Picture:
    """Represent a figure that is drawn when it is needed.

    Attributes:
        name: of its files.
        draw: makes the figure.
        caption: how to read it, and what it shows.
        alt: the message in numbers, for who does not see it.
    """

    name: str
    draw: Callable[[], Figure]
    caption: str
    alt: str


@dataclass(frozen=True)
class Section:
    """Represent a part of the page with a heading; its pictures and tables come in this order."""

    name: str
    title: str
    words: Sequence[str] = ()
    notes: Sequence[str] = ()
    parts: Sequence[Picture | Table] = field(default_factory=tuple)


NOTHING = Section("", "")  # which the page leaves out

#: Meanings of the words of a run's page.
OF_RUNS = (
    ("Spread", "The standard deviation of the metric between sites: 0 when all sites get the same."),
    ("Worst site", "The site with the worst value; a fair method has none far behind."),
    ("Interval", "Values the data do not rule out, at 95 %. After ± stands half its width."),
    (
        "Equal sites' gap",
        "How far the last site would lie behind by the luck of its test cases alone, were all sites equally well off.",
    ),
)


@dataclass(frozen=True)
class Lead:
    """A sentence with which a comparison's page begins, and the picture that shows it.

    Attributes:
        text: what was found and how sure it is.
        picture: of it; no other part of the page has it.
        section: name of the section with more.
    """

    text: str
    picture: Picture | None = None
    section: str = ""


@dataclass(frozen=True)
class Page:
    """Represent a whole page.

    Attributes:
        title: heading of the page.
        facts: below it, what was run: a word and what it is, each.
        synthetic: which of the data are generated, a sentence; empty: none is known to be.
        summary: sentences.
        problems: what was wrong with the files.
        leads: before all else, three at most: between sites, between groups of people, at unseen sites.
        terms: words and what they mean.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    synthetic: str
    summary: Sequence[str]
    sections: Sequence[Section]
    problems: Sequence[str] = ()
    leads: Sequence[Lead] = ()
    terms: Sequence[tuple[str, str]] = OF_RUNS
