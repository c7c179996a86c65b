"""Show the performance of models at sites that were no part of their training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fairflare.reporting.layout import counted
from fairflare.reporting.notes import SYNTHETIC_NOTE
from fairflare.reporting.values import in_words
from fairflare_lab.compare.unseen import NOT_SURE, UnseenSites, intervals_in_words, nothing_anywhere, unseen_cells
from fairflare_lab.page.content import NOTHING, Lead, Page, Section
from fairflare_lab.page.provenance import facts
from fairflare_lab.page.words import say


def unseen(found: UnseenSites | None) -> Section:
    """Return the section with the table of unseen sites and its notes; empty if no site was left out."""
    if found is None:
        return NOTHING
    notes = [*intervals_in_words(found), *found.notes]
    return Section("unseen", "Unseen hospitals", notes=notes, parts=[unseen_cells(found)])


def lead(found: UnseenSites) -> Lead:
    """Return the lead on unseen sites: a sentence on the first method that learnt nothing, else that has a figure."""
    known = [row for row in found.rows if math.isfinite(row.figures["unseen"].mean)]
    learnt = [bool(nothing_anywhere(row, found.metric, found.higher)) for row in known]
    first = next((row for row, nothing in zip(known, learnt, strict=True) if nothing or not any(learnt)), None)
    told = "no method has a model to hand over to a hospital that was not there."
    if first is not None:
        told = " ".join(say("at_unseen", first, nothing_anywhere(first, found.metric, found.higher), NOT_SURE))
    return Lead(f"Unseen hospitals: {told}", section="unseen")


def unseen_page(found: UnseenSites, problems: Sequence[str]) -> Page:
    """Return the page of a comparison in which every run leaves a site out."""
    summary = [
        f"{counted(len(found.rows), 'method')}; left out in turn: {', '.join(found.sites)}. {in_words(found.metric)} "
        f"on the test splits, of the last models; {'higher' if found.higher else 'lower'} is better.",
        "Seen is the mean over the sites that trained, unseen the mean over the left-out sites, each tested by models "
        "that were trained without it.",
    ]
    title = f"{counted(len(found.sites), 'site')} left out{' in turn' * (len(found.sites) > 1)}"
    synthetic = SYNTHETIC_NOTE if found.synthetic else ""
    return Page(
        title, facts(found.runs, found.metric), synthetic, [], summary, [unseen(found)], problems, [lead(found)]
    )
