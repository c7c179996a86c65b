"""Show what was run: seeds, times, settings, versions, and the sites' reports on their data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

from fairflare.base.settings import flatten
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import Cell, Table, join_parts, printable
from fairflare.reporting.values import spell_metric, title_of
from fairflare_lab.compare.rows import Row
from fairflare_lab.page.content import Section
from fairflare_lab.page.material import Material, name_of

MAX_VALUE = 400  # largest number of characters of a setting's value
MORE = ("min_sites", "best_by", "model_parameters")  # facts of a run that stand among its settings
MOST = 6  # largest number of methods or sites that a page's head names


def facts(documents: Sequence[RunResults], metric: str) -> list[tuple[str, str]]:
    """Return facts about the runs for a page's head, in order, each as a word and a text."""
    infos = [document.info for document in documents]
    kinds = {str(_text(info.kind) or "not recorded") for info in infos}
    made_up = {"SYNTHETIC (generated)" if info.synthetic else "the sites' own images" for info in infos}
    sites = sorted({site for info in infos for site in info.sites})
    days = sorted(day[:10] for document in documents for day in (document.started, document.finished) if day)
    seeds = sorted({int(info.seed) for info in infos if info.seed is not None})
    told = {
        "Method" + "s" * (len(documents) > 1): join_parts(
            dict.fromkeys(title_of(document).partition(', run "')[0] for document in documents), most=MOST
        ),
        "Runs": str(len(documents)) * (len(documents) > 1),
        "Task": f"{' or '.join(sorted(kinds))}, by {spell_metric(metric)}",
        "Data": " or ".join(sorted(made_up)),
        "Sites": f"{len(sites)}: {join_parts(sites, most=MOST)}",
        "Rounds": " or ".join(
            f"{done} of {of}" if done < of else f"{done}"
            for done, of in sorted({(len(document.rounds), document.info.num_rounds or 0) for document in documents})
        ),
        "Seed" + "s" * (len(seeds) > 1): ", ".join(map(str, seeds)),
        "Date": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
    }
    return [(word, text) for word, text in told.items() if text]


def settings(material: Material) -> Section:
    """Return the section on runs, versions, settings and the sites' data."""
    runs = material.runs + material.others
    heads = ["run", "seed", "status", "rounds", "begun", "ended", "taken up again", "id or folder"]
    cells: list[list[Cell]] = [
        [name_of(run).partition(", seed ")[0], run.info.seed, run.status, len(run.rounds),
         *((when or "")[:19].replace("T", " ") or None for when in (run.started, run.finished)),
         len(run.resumed), getattr(run, "place", "") or _text(run.info.job_id)]
        for run in runs
    ]  # fmt: skip
    several = len({json.dumps(run.info.versions, sort_keys=True) for run in runs}) > 1
    notes = [f"{row.label}: {row.settings}." for row in material.rows if row.settings]
    notes += ["Not all runs have the same versions of software; each one's results.json has its own."] * several
    return Section("settings", "Versions, settings, seeds", notes, [
        Table("runs", "Every run of this page.", heads, cells), _settings(material.rows),
    ])  # fmt: skip


def _settings(rows: Sequence[Row]) -> Table:
    """Return a table of the settings but the seed, versions and sites' facts of each row's first run, side by side."""
    by_row = [
        flatten({
            **{key: value for key, value in info.config.items() if key != "seed"},
            "bounds": info.bounds, "versions": info.versions, "task_file": info.task_file, "said": info.said,
            "experiment": info.experiment,
            **{key: found for key, found in (info.model_extra or {}).items() if key in MORE},
        })
        for info in (row.runs[0].info for row in rows)
    ]  # fmt: skip
    return Table(
        "settings",
        "Every setting, by its name for --set, bounds, versions of software, and what each site said of its data.",
        ["setting", *(row.label for row in rows)],
        [[name, *(_text(found.get(name)) for found in by_row)] for name in sorted({*chain(*by_row)})],
        folded=True,
    )


def _text(value: Any) -> Cell:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**15):
        return value
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), MAX_VALUE)
