"""Write the page about a folder, with pictures and tables beside it, or about a single run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fairflare import __version__
from fairflare.base.disk.files import write_whole
from fairflare.base.own_errors import lacking_package
from fairflare.reporting.documents import Results
from fairflare.reporting.results import PAGE_FILE
from fairflare.reporting.sites.own_models import personal_tables
from fairflare.reporting.values import title_of
from fairflare_lab.page import groups, leads, outcome, provenance, unseen, words
from fairflare_lab.page.content import MAX_COLUMNS, Page, Picture, Section, Table, printable, shown
from fairflare_lab.page.material import Material, of_one, page_run, read_material
from fairflare_lab.page.style import Drawn, drawn

P = TypeVar("P", Picture, Table)
INDEX_FILE = "index.html"
FIGURES, TABLES = "figures", "tables"
LONG = 34  # cells with more letters are broken into lines
GENERATOR = "FairFlare report"  # mark in the page by which a folder is recognised as a report
OFF = "FAIRFLARE_REPORT"  # name of an environment variable; its value 0 turns a run's page off


def write_report(
    folder: Path,
    out: Path,
    *,
    metric: str | None = None,
    reference: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``index.html``, ``figures/*.svg`` and ``tables/*.csv`` about a run or a comparison.

    Args:
        folder: folder of a run, a FLARE download or a comparison; or a ``results.json``.
        out: folder of the report, created if needed; if it is not empty, it must hold an earlier report.
        metric: name of the metric; default: the comparison's or the run's own.
        reference: label of the comparison's row that others are compared with; default: the comparison's own.
        overwrite: whether to replace an earlier report in ``out``.

    Returns:
        The path of the page.

    Raises:
        ValueError: the folder has nothing to report, or ``out`` may not be written.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give another --out")
    if out.is_dir() and any(out.iterdir()):
        if not _is_report(out):
            raise ValueError(f"{out} is no report and not empty; give another --out")
        if not overwrite:
            raise ValueError(f"{out} holds a report already; give --overwrite to replace it, or another --out")
    page = build(read_material(folder, metric=metric, reference=reference))
    pictures = {p.name: drawn(p.name, p.draw) for p in parts_of(page, Picture)}
    files = {f"{FIGURES}/{name}.svg": picture.svg.encode() for name, picture in pictures.items()}
    files |= {f"{TABLES}/{table.name}.csv": table.csv().encode() for table in parts_of(page, Table)}
    files[INDEX_FILE] = render(page, pictures, files=True).encode()
    _clear(out)
    for kind in (FIGURES, TABLES):
        (out / kind).mkdir(parents=True, exist_ok=True)
    _put(out, files, shared=True)
    return out / INDEX_FILE


def write_run_page(results: Results, folder: str | os.PathLike[str]) -> list[str]:
    """Write ``report.html`` of a run into its folder.

    Errors are never raised, as a run must not fail because of its page.

    Args:
        results: document from :func:`fairflare.reporting.results.read_results`.
        folder: folder of ``results.json``.

    Returns:
        A line for the log: the file and the seconds, or why no page was written; none where :data:`OFF` is 0.
    """
    if os.environ.get(OFF) == "0":
        return []
    begun = time.monotonic()
    try:
        html = draw_and_render(build(of_one(page_run(results))))
        _put(Path(folder), {PAGE_FILE: html.encode()}, shared=False)
    except Exception as error:
        if lacking := lacking_package(error):
            return [f"no page: {lacking}"]
        return [
            f"the page could not be made: {type(error).__name__}: {printable(error)} (fairflare report tries again)"
        ]
    return [f"page: {Path(folder) / PAGE_FILE} ({time.monotonic() - begun:.1f} s)"]


def _put(folder: Path, files: Mapping[str, bytes], *, shared: bool) -> None:
    for name, content in files.items():
        try:
            write_whole(folder / name, partial(Path.write_bytes, data=content), durable=False, shared=shared)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder / name)) from error


# ------------------------------------------------------------------------------------------------ content


def build(material: Material) -> Page:
    """Return the content of the page about some material; empty sections are left out."""
    if material.unseen and not material.rows:
        return unseen.unseen_page(material.unseen, material.problems)
    from fairflare_lab.page import over_time, reports, weights  # which import pandas

    sections = [
        outcome.results(material),
        Section(
            "own_models",
            "The sites' own models",
            parts=[t for run in material.runs[: not material.reference] for t in personal_tables(run)],
        ),
        groups.groups(material),
        outcome.differences(material),
        unseen.unseen(material.unseen),
        over_time.rounds(material),
        over_time.rounds(material, "test"),
        weights.layers(material),
        weights.site_weights(material),
        reports.reports(material),
        weights.influence(material),
        over_time.took_part(material),
        provenance.settings(material),
    ]
    filled = (
        replace(section, parts=[part for part in section.parts if isinstance(part, Picture) or part.rows])
        for section in sections
    )
    full = [section for section in filled if section.parts or section.words or section.notes]
    heads, rest = leads.leads(material, full)
    first, summary = words.of_comparison(material) if material.reference else words.of_run(material)
    title = f"Comparison of {len(material.rows)} methods" if len(material.rows) > 1 else material.rows[0].label
    return Page(
        title if material.reference else title_of(material.runs[0]),
        provenance.facts(material.runs, material.metric),
        words.synthetic(material),
        first,
        summary,
        rest,
        material.problems,
        heads,
    )


# ------------------------------------------------------------------------------------------------ HTML


def render(page: Page, pictures: Mapping[str, Drawn], *, files: bool) -> str:
    """Return a page as one HTML text.

    Args:
        page: content of the page.
        pictures: drawn pictures by name.
        files: whether pictures and tables are files beside the page, to which it links.
    """
    environment = words.templates(autoescape=True)
    environment.filters.update(shown=shown, printable=partial(printable, most=None))
    environment.tests.update(
        table=lambda part: isinstance(part, Table),
        long=lambda cell: isinstance(cell, str) and len(cell) > LONG,
        number=lambda cell: not isinstance(cell, (str, type(None))),
    )
    return environment.get_template("page.html").render(
        page=page,
        pictures=pictures,
        files=files,
        figures=FIGURES,
        tables=TABLES,
        most=MAX_COLUMNS,
        generator=GENERATOR,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def draw_and_render(page: Page) -> str:
    """Return a page as HTML that needs no files beside it, after drawing its pictures."""
    pictures = {part.name: drawn(part.name, part.draw) for part in parts_of(page, Picture)}
    return render(page, pictures, files=False)


def parts_of(page: Page, kind: type[P]) -> list[P]:
    """Return all pictures of a page, or all its tables."""
    parts = [*(one.picture for one in page.leads), *(part for section in page.sections for part in section.parts)]
    return [part for part in parts if isinstance(part, kind)]


def _is_report(folder: Path) -> bool:
    try:
        with (folder / INDEX_FILE).open(encoding="utf-8") as file:
            return f'content="{GENERATOR}' in file.read(4096)
    except (OSError, ValueError):
        return False


def _clear(out: Path) -> None:
    """Remove the pictures and tables of an earlier report, and nothing else."""
    for pattern in (f"{FIGURES}/*.png", f"{FIGURES}/*.svg", f"{TABLES}/*.csv"):
        for path in filter(Path.is_file, out.glob(pattern)):
            path.unlink()
