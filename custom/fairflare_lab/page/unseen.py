"""Show the performance of models at sites that were no part of their training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fairflare.reporting.groups import group_tables
from fairflare.reporting.layout import counted
from fairflare.reporting.notes import SYNTHETIC_NOTE
from fairflare.reporting.values import in_words
from fairflare_lab.compare.group_gaps import (
    OF_LEFT_OUT,
    first_left_out,
    gap_table,
    notes_of_gaps,
)
from fairflare_lab.compare.unseen import (
    NOT_SURE,
    UnseenRow,
    UnseenSites,
    intervals_in_words,
    nothing_anywhere,
    unseen_cells,
)
from fairflare_lab.page.content import NOTHING, Lead, Page, Picture, Section, Table, listed
from fairflare_lab.page.groups import gap_lead, picture_of, worded
from fairflare_lab.page.provenance import facts
from fairflare_lab.page.style import INK, chart, look, rows_at
from fairflare_lab.page.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def unseen(found: UnseenSites | None) -> Section:
    """Return the section with the table of unseen sites, without its picture; empty if no site was left out."""
    if found is None:
        return NOTHING
    # The sentence about the first row is in the page's lead.
    words = [_in_words(row, found) for row in found.rows if row is not _first(found)]
    notes = [*intervals_in_words(found), *(note for note in found.notes if note not in words)]
    return Section("unseen", "Unseen hospitals", words=words, notes=notes, parts=[unseen_cells(found)])


def of_groups(found: UnseenSites | None) -> Section:
    """Return the section on groups of people at left-out sites; empty without groups or without a common model."""
    if found is None or not (first := first_left_out(found.groups)):
        return NOTHING
    run = found.groups[first][0]
    whose = f"Of {first}, seed {run['info']['seed']}, at left-out sites, each by the model trained without it. "
    tables = [worded(gap_table(found.groups, first)), *(worded(table, whose) for table in group_tables(run))]
    words, notes = [gap_lead(found.groups, first)], [OF_LEFT_OUT, *notes_of_gaps(found.groups, first)]
    parts: list[Picture | Table] = [
        *(picture_of(run["groups"], name, found.synthetic, whose, "unseen_") for name in run["groups"]["attributes"]),
        *(replace(table, name=f"unseen_{table.name}") for table in tables),
    ]
    return Section("unseen_groups", "Groups of people at unseen hospitals", words=words, notes=notes, parts=parts)


def _first(found: UnseenSites) -> UnseenRow | None:
    """Return the first method's row that has a figure at unseen sites, or ``None`` if no row has one."""
    return next((row for row in found.rows if math.isfinite(row.figures["unseen"].mean)), None)


def lead(found: UnseenSites) -> Lead:
    """Return the lead on unseen sites: a sentence on the first method with a figure, and a picture of all methods."""
    first, adapted = _first(found), any(math.isfinite(row.figures["adapted"].mean) for row in found.rows)
    none = "no method has a model to hand over to a hospital that was not there."
    picture = Picture(
        "unseen",
        partial(
            chart,
            partial(_draw, found, adapted),
            1.25 + 0.42 * len(found.rows),
            f"{in_words(found.metric)} at seen and unseen sites",
            found.synthetic,
            xlabel=in_words(found.metric),
        ),
        "Filled: at sites that trained; open: at sites that were left out"
        + ("; cross: there, with norm statistics of the site's own images" if adapted else "")
        + f". Thin lines are 95 % intervals; {'to the right' if found.higher else 'to the left'} is better.",
        f"{in_words(found.metric)} at seen and unseen sites. {listed(say('seen_and_unseen', found.rows), '; ')}.",
    )
    return Lead(f"Unseen hospitals: {_in_words(first, found) if first else none}", picture, "unseen")


def unseen_page(found: UnseenSites, problems: Sequence[str]) -> Page:
    """Return the page of a comparison in which every run leaves a site out."""
    sections, leads, people = [unseen(found)], [lead(found)], of_groups(found)
    if people.parts:
        if isinstance(picture := people.parts[0], Picture):
            leads.insert(0, Lead(f"{people.title}: {' '.join(people.words)}", picture, people.name))
            people = replace(people, words=[], parts=people.parts[1:])
        sections.append(people)
    summary = [
        f"{counted(len(found.rows), 'method')}; left out in turn: {', '.join(found.sites)}. {in_words(found.metric)} "
        f"on the test splits, of the last models; {'higher' if found.higher else 'lower'} is better.",
        "Seen is the mean over the sites that trained, unseen the mean over the left-out sites, each tested by models "
        "that were trained without it.",
    ]
    title = f"{counted(len(found.sites), 'site')} left out{' in turn' * (len(found.sites) > 1)}"
    synthetic = SYNTHETIC_NOTE if found.synthetic else ""
    return Page(title, facts(found.runs, found.metric), synthetic, summary, sections, problems, leads)


def _in_words(row: UnseenRow, found: UnseenSites) -> str:
    """Return a sentence: ``fed_avg has 0.66 ± 0.03 where it was not trained and 0.71 ...``, or why it has no figure."""
    return " ".join(say("at_unseen", row, [*nothing_anywhere(row, found.metric, found.higher)], NOT_SURE))


def _draw(found: UnseenSites, adapted: bool, axes: Axes) -> None:
    for place, row in enumerate(found.rows):
        colour, ends = look(place).colour, [row.figures["seen"].mean, row.figures["unseen"].mean]
        if all(map(math.isfinite, ends)):
            axes.plot(ends, [place, place], color=colour, linewidth=1, linestyle=":")
        for name, at, face in (("seen", place - 0.12, colour), ("unseen", place + 0.12, "none")):
            mean, sure = row.figures[name].mean, row.sure.get(name)
            if sure is not None and math.isfinite(sure.half):
                axes.plot([mean - sure.half, mean + sure.half], [at, at], color=colour, linewidth=1.4)
            axes.plot([mean], [at], "o", markersize=6.5, color=colour, markerfacecolor=face)
        if math.isfinite(row.figures["adapted"].mean):
            axes.plot([row.figures["adapted"].mean], [place + 0.32], "x", color=colour, markersize=6)
        if not math.isfinite(row.figures["unseen"].mean):
            axes.annotate(
                "no common model", (row.figures["seen"].mean, place), (8, -3), textcoords="offset points", fontsize=7.5
            )
    marks = [("seen", "o", INK), ("unseen", "o", "none"), ("adapted", "x", INK)]
    for name, marker, face in marks[: 3 if adapted else 2]:
        axes.plot([], [], marker, color=INK, markerfacecolor=face, label=name)
    rows_at(axes, [row.label for row in found.rows], 0.6, 0.6)
    axes.figure.legend(loc="outside lower center", ncols=3)
