"""Define the parts of a page, before they become HTML, SVG or CSV."""

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
    """Return the least and the largest value as text, ``from 0.4 (site-2) to 0.7 (site-1)``; empty without values."""
    known = {site: value for site, value in values.items() if value is not None and math.isfinite(value)}
    low, high = (of(known, key=known.__getitem__, default="") for of in (min, max))
    return f"from {number(known[low])} ({low}) to {number(known[high])} ({high})" if known else ""


@dataclass(frozen=True)
class Picture:
    """Represent a figure that is drawn when it is needed.

    Attributes:
        name: name of the picture's files.
        draw: function that draws the figure.
        caption: text on what the figure shows and how to read it.
        alt: message of the figure in numbers, for readers who do not see it.
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


NOTHING = Section("", "")  # an empty section, which the page leaves out

#: Terms on the page of a run, with their meanings.
OF_RUNS = (
    ("Spread", "The standard deviation of the metric between sites: 0 when all sites get the same."),
    (
        "Expected if all sites were equally good",
        "What a site would get of its cases, were the model as good there as "
        "anywhere: of an average over classes it depends on the classes that the site has.",
    ),
    ("Worst site", "The site with the worst value; a fair method has none far behind."),
    ("Interval", "Values the data do not rule out, at 95 %. After ± stands half its width."),
    ("p", "How often chance alone would put equally good sites this far from what is expected."),
)


@dataclass(frozen=True)
class Lead:
    """Store a picture at the top of a comparison's page, with the text above it.

    Attributes:
        text: title of the picture, or sentence with a finding and its certainty.
        picture: picture of the finding, which appears nowhere else on the page.
        section: name of the section with more about the finding.
    """

    text: str
    picture: Picture | None = None
    section: str = ""


@dataclass(frozen=True)
class Page:
    """Represent a whole page.

    Attributes:
        title: heading of the page.
        facts: facts about the runs, below the title, each as a word and a text.
        synthetic: sentence on which data are synthetic; empty if none is known to be.
        first: sentences that are said first.
        summary: further sentences of the summary, on figures and on what to do next; below the leads.
        sections: sections of the page, in order.
        problems: lines about problems with the files.
        leads: pictures at the top, at most three: between sites, between groups of people, at unseen sites.
        terms: terms with their meanings.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    synthetic: str
    first: Sequence[str]
    summary: Sequence[str]
    sections: Sequence[Section]
    problems: Sequence[str] = ()
    leads: Sequence[Lead] = ()
    terms: Sequence[tuple[str, str]] = OF_RUNS
