"""Groups of people: what each of them gets at every site, in one picture for each attribute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fairflare.core.statistics.group_metrics import SCALED
from fairflare.core.statistics.group_sums import EVERYBODY
from fairflare.reporting.compare.group_gaps import gap_table, notes_of_gaps
from fairflare.reporting.groups import OF_IMAGES, POOLED, UNKNOWN, caption, group_notes, group_tables, of_everybody
from fairflare.reporting.page.content import Picture, Section, Table
from fairflare.reporting.page.material import Material
from fairflare.reporting.page.style import GRID, figure, label, legend, look, rows_of_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = "A mark for each group at every site, and over all sites; lines are 95 % intervals over the images."
CURVES = {
    "roc": "A line for each site, and for all images together: the mean over the classes that are looked for. The "
    "diagonal is guessing.",
    "calibration": "Of images that were told with about this probability, the share that was told right. Below the "
    "diagonal the model is surer of itself than it is right.",
}
MEASURES = {"roc": "auc", "calibration": "ece"}
AXES = {"roc": ("share of false positives", "sensitivity"), "calibration": ("told probability", "share told right")}
OF_GROUPS = "groups_of_"  # with the attribute: a picture's name


def groups(material: Material) -> Section | None:
    """The groups by site of the run, or of the reference's first run in a comparison, that asked for them."""
    reference = next((row for row in material.rows if row.label == material.reference), material.rows[0])
    run = reference.runs[0]
    found = run.document.get("groups")
    if not found:
        return None
    parts: list[Picture | Table] = []
    for attribute in found["attributes"]:
        told = caption(found, attribute)
        if attribute == EVERYBODY:
            parts += [
                Picture(name, _curves(material, found, name), captions, of_everybody(found, MEASURES[name]))
                for name, captions in CURVES.items()
                if name in found["pooled"][EVERYBODY].get("curves", {})
            ]
            continue
        parts.append(Picture(f"{OF_GROUPS}{attribute}", _drawing(material, found, attribute), MARKS, told))
    parts += group_tables(run.document)
    notes = group_notes(run.document)
    people = [attribute for attribute in found["attributes"] if attribute != EVERYBODY]
    if material.reference and people:
        rows = {row.label: [one.document for one in row.runs] for row in material.rows}
        parts.append(gap_table(rows, material.reference))
        notes += notes_of_gaps(rows, material.reference)
        notes.append(
            f"Pictures, and tables by site, are of {reference.label}, its first run; each other run's page has its own."
        )
    return Section("groups", "Groups of people" if people else "ROC curve and calibration", notes=notes, parts=parts)


def _drawing(material: Material, found: dict[str, Any], attribute: str) -> Any:
    def draw() -> Figure:
        return _dots(material, found, attribute)

    return draw


def _curves(material: Material, found: dict[str, Any], name: str) -> Any:
    def draw() -> Figure:
        places = {**{site: of[EVERYBODY] for site, of in found["sites"].items()}, POOLED: found["pooled"][EVERYBODY]}
        lines = {place: of["curves"][name] for place, of in places.items() if name in of.get("curves", {})}
        across, up = AXES[name]
        made = figure(3.2 + rows_of_legend(len(lines)), f"{up} by {across}", material.synthetic)
        axes = made.subplots()
        axes.plot([0, 1], [0, 1], color=GRID, linewidth=1)
        for rank, (place, (x, y, *_)) in enumerate(lines.items()):
            style = look(rank)
            marker = style.marker if name == "calibration" else ""
            axes.plot(x, y, color=style.colour, marker=marker, linestyle=style.dashes, label=label(place))
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel=across, ylabel=up)
        axes.grid(True, color=GRID)
        legend(made, axes, len(lines))
        return made

    return draw


def _dots(material: Material, found: dict[str, Any], attribute: str) -> Figure:
    """A row of dots for each group: its value at every site, and pooled."""
    places = {**{site: of[attribute] for site, of in found["sites"].items()}, POOLED: found["pooled"][attribute]}
    metric = next((name for name in reversed(SCALED) if name in places[POOLED]["all"]), OF_IMAGES)
    shown = [group for group in found["attributes"][attribute] if group != UNKNOWN]
    made = figure(2.6 + rows_of_legend(len(shown)), f"{metric} of each group of {attribute}", material.synthetic)
    axes = made.subplots()
    for rank, group in enumerate(shown):
        style = look(rank)
        across = [place + 0.5 * ((rank + 0.5) / len(shown) - 0.5) for place in range(len(places))]
        values = [of["groups"].get(group, {}).get(metric) for of in places.values()]
        heights = [math.nan if value is None else value for value in values]
        axes.plot(across, heights, color=style.colour, marker=style.marker, linestyle="none", label=label(group))
        for x, of in zip(across, places.values(), strict=True):
            low, high = of.get("intervals", {}).get(group, {}).get(metric) or (None, None)
            if low is not None and high is not None:
                axes.plot([x, x], [low, high], color=style.colour, linewidth=1.2)
    axes.set_xticks(range(len(places)), [label(place) for place in places])
    axes.set_ylabel(metric)
    axes.grid(True, axis="y", color=GRID)
    axes.margins(0.1)
    legend(made, axes, len(shown))
    return made
