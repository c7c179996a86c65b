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
from fairflare.base.checks import refuse
from fairflare.base.disk.files import write_whole
from fairflare.base.own_errors import lacking_package
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import MAX_COLUMNS, Table, format_count, print_cell, printable
from fairflare.reporting.notes import SYNTHETIC_NOTE
from fairflare.reporting.results import PAGE_FILE
from fairflare.reporting.sites.own_models import personal_tables
from fairflare.reporting.values import label_of, title_of
from fairflare_lab.compare.unseen import intervals_in_words, unseen_cells
from fairflare_lab.page import groups, outcome, provenance
from fairflare_lab.page.content import Page, Picture, Section
from fairflare_lab.page.material import Material, describe_run, read_material
from fairflare_lab.page.style import Drawn, draw_forms

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
    filled = out.is_dir() and any(out.iterdir())
    refuse({
        f"{out} is a file; give another --out": out.exists() and not out.is_dir(),
        f"{out} is no report and not empty; give another --out": filled and not _is_report(out),
        f"{out} holds a report already; give --overwrite to replace it, or another --out": filled and not overwrite,
    })  # fmt: skip
    page = build(read_material(folder, metric=metric, reference=reference))
    pictures = {p.name: draw_forms(p.name, p.draw) for p in parts_of(page, Picture)}
    files = {f"{FIGURES}/{name}.svg": picture.svg.encode() for name, picture in pictures.items()}
    files |= {f"{TABLES}/{table.name}.csv": table.csv().encode() for table in parts_of(page, Table)}
    files[INDEX_FILE] = render(page, pictures, files=True).encode()
    _clear(out)
    for kind in (FIGURES, TABLES):
        (out / kind).mkdir(parents=True, exist_ok=True)
    _put(out, files, shared=True)
    return out / INDEX_FILE


def write_run_page(results: RunResults, folder: str | os.PathLike[str]) -> list[str]:
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
        _put(Path(folder), {PAGE_FILE: draw_and_render(build(describe_run(results))).encode()}, shared=False)
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
    from fairflare_lab.page import over_time, reports, weights  # which import pandas

    several, unseen = bool(material.reference), material.unseen
    runs = material.runs or (unseen.runs if unseen else [])
    first, sections = [finding.text for finding in material.findings], list[Section]()
    if material.rows:
        sections = [
            outcome.results(material),
            Section("own_models", "The sites' own models", parts=[] if several else personal_tables(runs[0])),
            groups.groups(material),
            outcome.differences(material),
        ]
    if unseen:
        about = [*intervals_in_words(unseen), *unseen.notes]
        first, notes = (first, about) if first else (about, [])
        sections.append(Section("unseen", "Unseen hospitals", notes, [unseen_cells(unseen)]))
    if material.rows:
        sections += [
            over_time.rounds(material),
            over_time.rounds(material, "test"),
            weights.layers(material),
            weights.site_weights(material),
            reports.reports(material),
            provenance.settings(material),
        ]
    filled = (replace(s, parts=[part for part in s.parts if isinstance(part, Picture) or part.rows]) for s in sections)
    title = f"Comparison of {len(material.rows)} methods" if len(material.rows) > 1 else label_of(runs[0])
    if not material.rows and unseen:
        title = f"{format_count(len(unseen.sites), 'site')} left out{' in turn' * (len(unseen.sites) > 1)}"
    made_up = sum(run.info.synthetic for run in [*runs, *material.others])
    some = f"The data of {made_up} of {len(runs) + len(material.others)} runs are SYNTHETIC (generated images)."
    return Page(
        title if several or not material.rows else title_of(runs[0]),
        provenance.facts(runs, material.metric),
        "" if not made_up else SYNTHETIC_NOTE if made_up == len(runs) + len(material.others) else some,
        first,
        [section for section in filled if section.parts or section.notes],
        material.problems,
    )


# ------------------------------------------------------------------------------------------------ HTML


def render(page: Page, pictures: Mapping[str, Drawn], *, files: bool) -> str:
    """Return a page as one HTML text.

    Args:
        page: content of the page.
        pictures: drawn pictures by name.
        files: whether pictures and tables are files beside the page, to which it links.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fairflare_lab.page", "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(shown=print_cell, printable=partial(printable, most=None))
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
    return render(page, {part.name: draw_forms(part.name, part.draw) for part in parts_of(page, Picture)}, files=False)


def parts_of(page: Page, kind: type[P]) -> list[P]:
    """Return all pictures of a page, or all its tables."""
    return [part for section in page.sections for part in section.parts if isinstance(part, kind)]


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
