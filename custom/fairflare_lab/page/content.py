"""Define the parts of a page, before they become HTML, SVG or CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairflare.reporting.layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """Represent a figure that is drawn when it is needed.

    Attributes:
        name: name of the picture's files.
        draw: function that draws the figure.
        caption: text on what the figure shows and how to read it.
    """

    name: str
    draw: Callable[[], Figure]
    caption: str


@dataclass(frozen=True)
class Section:
    """Represent a part of the page with a heading; its pictures and tables come in this order, then its notes."""

    name: str
    title: str
    notes: Sequence[str] = ()
    parts: Sequence[Picture | Table] = ()


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
class Page:
    """Represent a whole page.

    Attributes:
        title: heading of the page.
        facts: facts about the runs, below the title, each as a word and a text.
        synthetic: sentence on which data are synthetic; empty if none is known to be.
        first: sentences that are said first, the same as on the console.
        sections: sections of the page, in order; empty ones are left out.
        problems: lines about problems with the files.
        terms: terms with their meanings.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    synthetic: str
    first: Sequence[str]
    sections: Sequence[Section]
    problems: Sequence[str] = ()
    terms: Sequence[tuple[str, str]] = OF_RUNS
