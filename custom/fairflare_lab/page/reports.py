"""What the sites reported of the method's own: rescue factor, sharpness, mu and the like; FedMRL's map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fairflare.reporting.layout import number, spread
from fairflare.reporting.pictures import draw_map
from fairflare_lab.page.content import Cell, Picture, Section, Table, listed
from fairflare_lab.page.lines import lines_picture, site_lines, values_of
from fairflare_lab.page.material import Material, PageRow, PageRun
from fairflare_lab.page.style import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How the page calls a reported field, and what it means; any other field has its own name.
CALLED = {
    "rescue_factor": (
        "Rescue factor",
        "over a site's classes the sum of its divergence before training times that while training",
    ),
    "sharpness": ("Sharpness", "by how much a site's training loss rises at the search distance"),
    "mu": ("mu", "the proximal coefficient of each site: a large one holds its model near the common one"),
}
MAX_FIELDS = 6
MAX_MAPS = 6


def reports(material: Material) -> list[Section]:
    """A section for each of the fields with a name in :data:`CALLED`, one for all others, and one for maps."""
    fields = list(dict.fromkeys(name for row in material.rows for name in _fields(row)))
    known = [field for field in CALLED if field in fields]
    others = [field for field in fields if field not in CALLED and _changes(material, field)]
    constant = [field for field in fields if field not in CALLED and field not in others]
    sections = []
    for field in known:
        title, meaning = CALLED[field]
        sections.append(Section(field, title, words=[f"{title}: {meaning}."], parts=_parts(material, field, title)))
    if others or constant:
        parts = [part for field in others[:MAX_FIELDS] for part in _parts(material, field, field)]
        parts += [_constant(material, constant)] if constant else []
        notes = [f"Not shown: {', '.join(others[MAX_FIELDS:])}."] if len(others) > MAX_FIELDS else []
        sections.append(Section("reports", "What the sites reported", notes=notes, parts=parts))
    if (maps := som(material)) is not None:
        sections.append(maps)
    return sections


def _fields(row: PageRow) -> list[str]:
    """Reported fields that are single numbers, in some round at some site."""
    return list(
        dict.fromkeys(
            name
            for run in row.runs
            for record in run.rounds
            for report in record["reports"].values()
            for name, value in report.items()
            if finite(value) is not None
        )
    )


def _values(runs: Iterable[PageRun], field: str) -> dict[tuple[int, str], list[float]]:
    """By round and site, a value for each run."""
    return values_of(runs, lambda record: {site: finite(of.get(field)) for site, of in record["reports"].items()})


def _changes(material: Material, field: str) -> bool:
    """Whether it is not the same in every round, at some site of some run."""
    for run in material.runs:
        seen: dict[str, list[float]] = {}
        if any(seen.setdefault(site, value) != value for (_, site), value in _values([run], field).items()):
            return True
    return False


def _constant(material: Material, fields: Sequence[str]) -> Table:
    cells: list[list[Cell]] = []
    for row in material.rows:
        for field in fields:
            by_site = {site: values for (_, site), values in _values(row.runs, field).items()}
            cells += [[row.label, field, site, spread(by_site[site])] for site in material.sites if site in by_site]
    return Table(
        "reports_constant",
        "Reported, and the same in every round of a run.",
        ["method", "field", "site", "value"],
        cells,
        folded=len(cells) > 24,
    )


def _parts(material: Material, field: str, title: str) -> list[Picture | Table]:
    panels, cells = site_lines(material, {row.label: _values(row.runs, field) for row in material.rows})
    told = [f"{name}: " + listed(f"{s.name} {number(s.last)}" for s in series) for name, series in panels.items()]
    slug = "".join(c if c.isascii() and c.isalnum() else "_" for c in field)[:40]
    picture = lines_picture(
        material,
        f"report_{slug}",
        f"{title} of each site",
        panels,
        f"{title}: a line for each site{material.over_seeds}.",
        f"{title} in the end: {listed(told, '; ')}.",
        unit=title,
    )
    table = Table(
        f"report_{slug}", f"{title} by round and site.", ["method", "round", "site", title], cells, folded=True
    )
    return [picture, table]


# ------------------------------------------------------------------------------------------------ map


def som(material: Material) -> Section | None:
    """The map of the last round that placed sites on one, of the first runs that have it."""
    parts: list[Picture | Table] = []
    cells: list[list[Cell]] = []
    for run in material.runs:
        found = next(
            ((r["current_round"], m) for r in reversed(run.rounds) if (m := _usable(r["details"].get("som")))), None
        )
        if found is None:
            continue
        at_round, drawn = found
        cells += [[run.name, at_round, site, *place] for site, place in drawn["bmu"].items()]
        if len(parts) < MAX_MAPS:
            parts.append(_map(run.name, at_round, drawn, run.info["synthetic"], len(parts) + 1))
    if not parts:
        return None
    table = Table("map", "Where each site lies on the map.", ["run", "round", "site", "row", "column"], cells)
    words = ["Sites whose models are alike lie near each other; a dark cell is a border between unlike ones."]
    runs = len({str(row[0]) for row in cells})
    notes = [f"Pictures of the first {MAX_MAPS} of {runs} runs; the table has all."] if runs > MAX_MAPS else []
    return Section("map", "Map of the sites' models", words=words, notes=notes, parts=[*parts, table])


def _map(name: str, at_round: int, drawn: Mapping[str, Any], synthetic: bool, index: int) -> Picture:
    def draw() -> Figure:
        safe = {**drawn, "bmu": {label(site): place for site, place in drawn["bmu"].items()}}
        return draw_map(safe, title=label(f"{name}{' (SYNTHETIC data)' if synthetic else ''}, round {at_round}", 100))

    where = listed(f"{site} in row {r}, column {c}" for site, (r, c) in drawn["bmu"].items())
    return Picture(
        f"map_{index}", draw, f"{name}, round {at_round}: the sites at their best matching neurons.", f"{where}."
    )


def _usable(value: Any) -> dict[str, Any] | None:
    """A map with a rectangle of numbers and sites within it, else None."""
    if not isinstance(value, dict) or not isinstance(value.get("bmu"), dict):
        return None
    lines = value.get("u_matrix")
    if not isinstance(lines, list) or not lines or not all(isinstance(line, list) and line for line in lines):
        return None
    if len({len(line) for line in lines}) > 1 or any(finite(v) is None for line in lines for v in line):
        return None
    inside = {
        site: place
        for site, place in value["bmu"].items()
        if isinstance(place, list)
        and len(place) == 2
        and all(isinstance(p, int) for p in place)
        and 0 <= place[0] < len(lines)
        and 0 <= place[1] < len(lines[0])
    }
    return {"u_matrix": lines, "bmu": inside} if inside else None


def finite(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
