"""What models are worth at sites that were no part of their training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fairflare.core.statistics.group_sums import EVERYBODY
from fairflare.reporting.groups import captions, group_tables
from fairflare.reporting.layout import counted, number
from fairflare.reporting.notes import SYNTHETIC_NOTE
from fairflare.reporting.values import in_words
from fairflare_lab.compare.group_gaps import (
    OF_LEFT_OUT,
    first_left_out,
    gap_lead,
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
from fairflare_lab.page.content import Lead, Page, Picture, Section, Table, listed
from fairflare_lab.page.groups import picture_of, worded
from fairflare_lab.page.provenance import facts
from fairflare_lab.page.style import INK, label, look, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUPS, CALIBRATION = "Groups of people at unseen hospitals", "Calibration at unseen hospitals"


def unseen(found: UnseenSites | None) -> Section | None:
    """Table and notes; its picture stands at the head of the page. ``None``: no site was left out."""
    if found is None:
        return None
    words = [_in_words(row, found) for row in found.rows if row is not _first(found)]  # that one leads the page
    notes = [*intervals_in_words(found), *(note for note in found.notes if note not in words)]
    return Section("unseen", "Unseen hospitals", words=words, notes=notes, parts=[unseen_cells(found)])


def of_groups(found: UnseenSites | None) -> Section | None:
    """Groups of people at sites that were left out; ``None``: nobody asked, or no method hands a model over."""
    if found is None or not (first := first_left_out(found.groups)):
        return None
    run = found.groups[first][0]
    whose = f"Of {first}, seed {run['info']['seed']}, at left-out sites, each by the model trained without it. "
    people = [name for name in run["groups"]["attributes"] if name != EVERYBODY]
    parts: list[Picture | Table] = [
        picture_of(run["groups"], name, found.synthetic, whose, "unseen_") for name in people
    ]
    parts += [worded(gap_table(found.groups, first))] if people else []
    parts += [worded(table, whose) for table in group_tables(run)]
    parts = [replace(one, name=f"unseen_{one.name}") if isinstance(one, Table) else one for one in parts]
    words = [gap_lead(found.groups, first)] if people else captions(run)
    notes = [OF_LEFT_OUT, *notes_of_gaps(found.groups, first)] if people else []
    return Section("unseen_groups", GROUPS if people else CALIBRATION, words=words, notes=notes, parts=parts)


def _first(found: UnseenSites) -> UnseenRow | None:
    """The first method with a figure."""
    return next((row for row in found.rows if math.isfinite(row.unseen.mean)), None)


def lead(found: UnseenSites | None) -> Lead | None:
    """The sentence about unseen sites, of the first method with a figure, with the picture of all."""
    if found is None:
        return None
    first = _first(found)
    text = "Unseen hospitals: " + (
        _in_words(first, found) if first else "no method has a model to hand over to a hospital that was not there."
    )
    adapted = any(math.isfinite(row.adapted.mean) for row in found.rows)
    better = "to the right" if found.higher else "to the left"
    picture = Picture(
        "unseen",
        lambda: _draw(found),
        "Filled: at sites that trained; open: at sites that were left out"
        + ("; cross: there, with norm statistics of the site's own images" if adapted else "")
        + f". Thin lines are 95 % intervals; {better} is better.",
        f"{in_words(found.metric)} at seen and unseen sites. {listed((_short(row) for row in found.rows), '; ')}.",
    )
    return Lead(text, picture, "unseen")


def unseen_page(found: UnseenSites, problems: list[str]) -> Page:
    """The page of a comparison in which every run leaves a site out."""
    section, first, people = unseen(found), lead(found), of_groups(found)
    assert section is not None
    assert first is not None
    sections, leads = [section], [first]
    if people is not None and isinstance(picture := people.parts[0], Picture):
        leads.insert(0, Lead(f"{people.title}: {' '.join(people.words)}", picture, people.name))
        people = replace(people, words=[], parts=people.parts[1:])
    sections += [people] if people is not None else []
    summary = [
        f"{counted(len(found.rows), 'method')}; left out in turn: {', '.join(found.sites)}. {in_words(found.metric)} "
        f"on the test splits, of the last models; {'higher' if found.higher else 'lower'} is better.",
        "Seen is the mean over the sites that trained, unseen the mean over the left-out sites, each tested by models "
        "that were trained without it.",
    ]
    title = f"{counted(len(found.sites), 'site')} left out{' in turn' * (len(found.sites) > 1)}"
    return Page(
        title,
        facts(found.runs, found.metric),
        SYNTHETIC_NOTE if found.synthetic else "",
        summary,
        sections,
        problems,
        leads,
    )


def _figure(row: UnseenRow, name: str) -> str:
    sure = row.sure.get(name)
    return number(getattr(row, name).mean, sure.half if sure else math.nan)


def _in_words(row: UnseenRow, found: UnseenSites) -> str:
    """``fed_avg has 0.66 ± 0.03 where it was not trained and 0.71 ± 0.02 where it was, ...``; or why it has none."""
    more = "more" if row.gain.mean >= 0 else "less"
    gain = f" ({_figure(row, 'gain').removeprefix('-')} {more}{_noise(row, 'gain')})" * math.isfinite(row.gain.mean)
    adapted = f" With norm statistics of its own images a site has {number(row.adapted.mean)}{gain}."
    adapted = adapted if math.isfinite(row.adapted.mean) else ""
    for nothing in nothing_anywhere(row, found.metric, found.higher):  # more than that is said of no such model
        bare = f" With norm statistics of its own images a site has {number(row.adapted.mean)}." if adapted else ""
        return f"{row.label} {nothing}.{bare}"
    if not math.isfinite(row.unseen.mean):
        reason = row.reason or "a left-out site has no figure"
        return f"{row.label} has no figure at unseen sites: {reason}.{adapted}"
    over = f"± is half a 95 % interval over {row.over}" if row.over else NOT_SURE
    return (
        f"{row.label} has {_figure(row, 'unseen')} at sites that it was not trained at and {_figure(row, 'seen')} at "
        f"those that it was (gap {_figure(row, 'gap')}{_noise(row, 'gap')}; {over}).{adapted}"
    )


def _noise(row: UnseenRow, name: str) -> str:
    sure = row.sure.get(name)
    return "" if sure is None or math.isnan(sure.half) else ", beyond noise" if sure.p < 0.05 else ", within noise"


def _short(row: UnseenRow) -> str:
    there = _figure(row, "unseen") if math.isfinite(row.unseen.mean) else "nothing"
    return f"{row.label}: seen {_figure(row, 'seen')}, unseen {there}"


def _draw(found: UnseenSites) -> Figure:
    metric = in_words(found.metric)
    made, axes = panel(
        1.25 + 0.42 * len(found.rows), f"{in_words(found.metric)} at seen and unseen sites", found.synthetic
    )
    for place, row in enumerate(found.rows):
        colour = look(place).colour
        ends = [value for value in (row.seen.mean, row.unseen.mean) if math.isfinite(value)]
        if len(ends) == 2:
            axes.plot(ends, [place, place], color=colour, linewidth=1, linestyle=":")
        _mark(axes, row, "seen", place - 0.12, {"marker": "o", "color": colour})
        _mark(axes, row, "unseen", place + 0.12, {"marker": "o", "color": colour, "markerfacecolor": "none"})
        if math.isfinite(row.adapted.mean):
            axes.plot([row.adapted.mean], [place + 0.32], "x", color=colour, markersize=6)
        if not math.isfinite(row.unseen.mean):
            axes.annotate("no common model", (row.seen.mean, place), (8, -3), textcoords="offset points", fontsize=7.5)
    for name, marker, face in (("seen", "o", INK), ("unseen", "o", "none"), ("adapted", "x", INK)):
        if name != "adapted" or any(math.isfinite(row.adapted.mean) for row in found.rows):
            axes.plot([], [], marker, color=INK, markerfacecolor=face, label=name)
    axes.set_yticks(range(len(found.rows)), [label(row.label) for row in found.rows])
    axes.set_ylim(len(found.rows) - 0.4, -0.6)
    axes.set_xlabel(metric)
    axes.grid(axis="x")
    made.legend(loc="outside lower center", ncols=3)
    return made


def _mark(axes: Axes, row: UnseenRow, name: str, place: float, style: dict[str, Any]) -> None:
    mean, sure = getattr(row, name).mean, row.sure.get(name)
    if sure is not None and math.isfinite(sure.half):
        axes.plot([mean - sure.half, mean + sure.half], [place, place], color=style["color"], linewidth=1.4)
    axes.plot([mean], [place], markersize=6.5, **style)
