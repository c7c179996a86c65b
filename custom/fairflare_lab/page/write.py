"""Writes the page: of a folder with pictures and tables beside it, or of one run alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fairflare import __version__
from fairflare.base.disk.files import write_whole
from fairflare.base.own_errors import lacking_package
from fairflare.reporting.results import PAGE_FILE
from fairflare.reporting.values import title_of
from fairflare_lab.page import (
    against,
    groups,
    leads,
    outcome,
    over_time,
    provenance,
    reports,
    unseen,
    weights,
    words,
)
from fairflare_lab.page.content import MAX_COLUMNS, Page, Picture, Table, printable, shown
from fairflare_lab.page.material import Material, of_one, only_left_out, page_run, read_material
from fairflare_lab.page.style import Drawn, drawn

P = TypeVar("P", Picture, Table)
INDEX_FILE = "index.html"
FIGURES, TABLES = "figures", "tables"
LONG = 34  # letters of a cell that is broken into lines
GENERATOR = "FairFlare report"  # by which a folder is known to be one of ours
OFF = "FAIRFLARE_REPORT"  # an environment variable: 0 leaves the page of a run out


def write_report(
    folder: Path,
    out: Path,
    *,
    metric: str | None = None,
    reference: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes ``index.html``, ``figures/*.png``, ``figures/*.svg`` and ``tables/*.csv`` about a run or a comparison.

    Args:
        folder: of a run, a FLARE download or a comparison; or a ``results.json``.
        out: made; when something is in it, it must be an earlier report, and ``overwrite`` given.
        metric: default: the comparison's or the run's own.
        reference: of a comparison, the label that others are compared with.
        overwrite: replace an earlier report.

    Returns:
        The page.

    Raises:
        ValueError: nothing that can be reported, or ``out`` may not be written.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give another --out")
    if out.is_dir() and any(out.iterdir()):
        if not _is_report(out):
            raise ValueError(f"{out} is no report and not empty; give another --out")
        if not overwrite:
            raise ValueError(f"{out} holds a report already; give --overwrite to replace it, or another --out")
    without = only_left_out(folder, metric)
    if without is not None and reference is not None:
        raise ValueError(f"--reference is for differences, and {folder} holds runs that each leave a site out")
    if without is not None:
        page = unseen.unseen_page(*without)
    else:
        page = build(read_material(folder, metric=metric, reference=reference))
    pictures = {p.name: drawn(p.name, p.draw) for p in _of_kind(page, Picture)}
    html = render(page, pictures, files=True)
    _clear(out)
    for kind in (FIGURES, TABLES):
        (out / kind).mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        _write(out / FIGURES / f"{name}.svg", picture.svg.encode())
        _write(out / FIGURES / f"{name}.png", picture.png)
    for table in _of_kind(page, Table):
        _write(out / TABLES / f"{table.name}.csv", table.csv().encode())
    _write(out / INDEX_FILE, html.encode())
    return out / INDEX_FILE


def _write(file: Path, content: bytes) -> None:
    """Write a file of the report; an error names it."""
    try:
        write_whole(file, lambda path: path.write_bytes(content), durable=False, shared=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def write_run_page(results: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[str]:
    """Writes ``report.html`` of one run into its folder, without files beside it.

    Args:
        results: of :func:`fairflare.reporting.results.read_results`.
        folder: where ``results.json`` is.

    Returns:
        Lines for the log: the file and the seconds, or why there is none. Never raises: a page must not cost a run.
    """
    if os.environ.get(OFF) == "0":
        return []
    begun = time.monotonic()
    path = Path(folder) / PAGE_FILE
    try:
        page = build(of_one(page_run(results)))
        pictures = {p.name: drawn(p.name, p.draw, files=False) for p in _of_kind(page, Picture)}
        html = render(page, pictures, files=False)
        write_whole(path, lambda partial_file: partial_file.write_text(html, encoding="utf-8"), durable=False)
    except Exception as error:
        if lacking := lacking_package(error):
            return [f"no page: {lacking}"]
        return [
            f"the page could not be made: {type(error).__name__}: {printable(error)} (fairflare report tries again)"
        ]
    return [f"page: {path} ({time.monotonic() - begun:.1f} s)"]


# ------------------------------------------------------------------------------------------------ content


def build(material: Material) -> Page:
    """The page's content; sections without anything in them are left out."""
    problems = list(material.problems)
    if material.reference:
        summary = words.of_comparison(material)
        title = f"Comparison of {len(material.rows)} methods" if len(material.rows) > 1 else material.rows[0].label
    else:
        (run,) = material.runs
        summary = words.of_run(material)
        title = title_of(run.document)
        problems += run.problems
    if not material.reference:
        summary = [words.answer(material), *summary]
    sections = [
        outcome.results(material),
        groups.groups(material),
        outcome.differences(material),
        unseen.unseen(material.unseen),
        unseen.of_groups(material.unseen),
        against.sweep(material),
        against.pareto(material),
        over_time.rounds(material),
        over_time.rounds(material, "test"),
        weights.layers(material),
        weights.site_weights(material),
        *reports.reports(material),
        weights.influence(material),
        over_time.took_part(material),
        over_time.cost(material),
        provenance.settings(material),
    ]
    full = [
        replace(section, parts=[part for part in section.parts if isinstance(part, Picture) or part.rows])
        for section in sections
        if section is not None
    ]
    heads, rest = leads.leads(material, full)
    if material.reference and not heads:
        summary = [words.answer(material), *summary]
    facts = provenance.facts([run.document for run in material.runs], material.metric)
    return Page(title, facts, words.synthetic(material), summary, rest, problems, heads)


# ------------------------------------------------------------------------------------------------ form


def render(page: Page, pictures: Mapping[str, Drawn], *, files: bool) -> str:
    """HTML in one piece.

    Args:
        page: content.
        pictures: by name.
        files: whether pictures and tables lie beside it, so that links to them make sense.
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


def _of_kind(page: Page, kind: type[P]) -> list[P]:
    """Its pictures, or its tables."""
    parts = [*(one.picture for one in page.leads), *(part for section in page.sections for part in section.parts)]
    return [part for part in parts if isinstance(part, kind)]


def _is_report(folder: Path) -> bool:
    try:
        with (folder / INDEX_FILE).open(encoding="utf-8") as file:
            return f'content="{GENERATOR}' in file.read(4096)
    except (OSError, ValueError):
        return False


def _clear(out: Path) -> None:
    """Removes an earlier report's files, and nothing else."""
    for kind, suffixes in ((FIGURES, (".png", ".svg")), (TABLES, (".csv",))):
        for path in (out / kind).iterdir() if (out / kind).is_dir() else ():
            if path.suffix in suffixes and path.is_file():
                path.unlink()
