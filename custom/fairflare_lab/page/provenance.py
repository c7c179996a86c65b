"""Show what was run: seeds, times, settings, versions, and the sites' reports on their data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base.settings import by_name
from fairflare.reporting.documents import Results
from fairflare.reporting.values import in_words, title_of
from fairflare_lab.page.content import Cell, Section, Table, listed, printable
from fairflare_lab.page.material import Material, PageRow, PageRun, images_of

MAX_VALUE = 400  # largest number of characters of a setting's value
MOST = 6  # largest number of methods or sites that a page's head names


def facts(documents: Sequence[Results], metric: str) -> list[tuple[str, str]]:
    """Return facts about the runs for a page's head, in order, each as a word and a text."""
    infos = [document["info"] for document in documents]
    methods = dict.fromkeys(title_of(document).partition(', run "')[0] for document in documents)
    kinds = {str(_text(info.get("kind")) or "not recorded") for info in infos}
    made_up = {"SYNTHETIC (generated)" if info["synthetic"] else "the sites' own images" for info in infos}
    sites = sorted({site for info in infos for site in info["sites"]})
    planned = [of if isinstance(of := info.get("num_rounds"), int) else 0 for info in infos]
    rounds = {(len(document["rounds"]), of) for document, of in zip(documents, planned, strict=True)}
    images = {sum(n for _, split, n in images_of(info) if split == "training") for info in infos}
    days = sorted(day[:10] for document in documents for day in (document["started"], document["finished"]) if day)
    seeds = sorted({int(info["seed"]) for info in infos if info["seed"] is not None})
    told = {
        "Method" + "s" * (len(documents) > 1): listed(methods, most=MOST),
        "Task": f"{' or '.join(sorted(kinds))}, by {in_words(metric)}",
        "Data": " or ".join(sorted(made_up)),
        "Sites": f"{len(sites)}: {listed(sites, most=MOST)}",
        "Rounds": " or ".join(f"{done} of {of}" if done < of else f"{done}" for done, of in sorted(rounds)),
        "Training images": " or ".join(map(str, sorted(images))) if 0 not in images else "",
        "Seed" + "s" * (len(seeds) > 1): ", ".join(map(str, seeds)),
        "Date": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
    }
    return [(word, text) for word, text in told.items() if text]


def settings(material: Material) -> Section:
    """Return the section on runs, versions, settings and the sites' data."""
    runs = material.runs + material.others
    heads = ["run", "seed", "status", "rounds", "begun", "ended", "taken up again", "id or folder"]
    cells: list[list[Cell]] = [
        [run.name.partition(", seed ")[0], run.info.seed, run["status"], len(run.rounds),
         *((run[key] or "")[:19].replace("T", " ") or None for key in ("started", "finished")),
         len(run["resumed"]), run.place or _text(run.info.get("job_id"))]
        for run in runs
    ]  # fmt: skip
    tables = [Table("runs", "Every run of this page.", heads, cells), _settings(material.rows)]
    several = len({json.dumps(run.info["versions"], sort_keys=True) for run in runs}) > 1
    words = [f"{row.label}: {row.settings}." for row in material.rows if row.settings]
    words += ["Not all runs have the same versions of software; each one's results.json has its own."] * several
    return Section("settings", "Versions, settings, seeds", words=words, parts=[*tables, _said(runs)])


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> list[list[Cell]]:
    names = sorted({name for found in columns for name in found})
    return [[name, *(_text(found.get(name)) for found in columns)] for name in names]


def _settings(rows: list[PageRow]) -> Table:
    """Return a table of all settings but the seed, with a column for each row, and of its first run's versions."""
    by_row = []
    for info in (row.runs[0].info for row in rows):
        of_info = [key for key in ("min_sites", "best_by", "experiment", "model_parameters") if key in info]
        of_file = [key for key in ("name", "sha256", "monai_bundle_sha256") if key in info.task_file]
        by_row.append(
            by_name({key: value for key, value in info.config.items() if key != "seed"})
            | {f"bounds.{name}": value for name, value in info.bounds.items()}
            | {f"versions.{name}": version for name, version in info.versions.items()}
            | {key: info[key] for key in of_info}
            | {f"task_file.{key}": info.task_file[key] for key in of_file}
        )
    text, heads = (
        "Every setting, by its name for --set, bounds and versions of software.",
        ["setting", *(row.label for row in rows)],
    )
    return Table("settings", text, heads, _side_by_side(by_row), folded=True)


def _said(runs: list[PageRun]) -> Table:
    """Return a table of the sites' reports on their data, for the first run and for runs with other reports."""
    differing: dict[str, PageRun] = {}
    for run in runs:
        differing.setdefault(json.dumps(run.info["said"], sort_keys=True), run)
    cells = [
        [run.name, site, *_of_site(told)] for run in differing.values() for site, told in sorted(run.info.said.items())
    ]
    text = "What each site said of its data before the first round; runs that said the same are not repeated."
    return Table("said", text, ["run", "site", "images", "synthetic", "classes", "annotated", "device"], cells)


def _of_site(told: Mapping[str, Any]) -> list[Cell]:
    """Return a site's images by split, whether they are synthetic, its classes, what it annotates, and its device."""
    images, made_up = told.get("images"), told.get("synthetic")
    lists = ", ".join(f"{n} {split}" for split, n in images.items()) if isinstance(images, dict) else None
    synthetic = ("no", "SYNTHETIC")[made_up] if isinstance(made_up, bool) else None
    return [lists, synthetic, *(_text(told.get(key)) for key in ("num_classes", "annotated", "device"))]


def _text(value: Any) -> Cell:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 10**15 else str(value)[:20]
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), MAX_VALUE)
