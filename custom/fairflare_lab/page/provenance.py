"""What was run: seeds, times, settings, versions, and what the sites said of their data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fairflare.base.settings import by_name
from fairflare.reporting.documents import Results
from fairflare.reporting.values import in_words, title_of
from fairflare_lab.page.content import Cell, Picture, Section, Table, listed, printable
from fairflare_lab.page.material import Material, PageRow, PageRun

MAX_VALUE = 400  # letters of a setting's value
MOST = 6  # methods or sites by name in a page's head


def facts(documents: Sequence[Results], metric: str) -> list[tuple[str, str]]:
    """Return what was run, in the words and the order of a page's head."""
    infos = [document["info"] for document in documents]
    several = len(documents) > 1
    methods = dict.fromkeys(title_of(document).partition(', run "')[0] for document in documents)
    rounds = {
        (len(document["rounds"]), of if isinstance(of := info.get("num_rounds"), int) else 0)
        for document, info in zip(documents, infos, strict=True)
    }
    images = {
        sum(
            n
            for told in info["said"].values()
            if isinstance(of := told.get("images"), dict) and isinstance(n := of.get("training"), int)
        )
        for info in infos
    }
    days = sorted(day[:10] for document in documents for day in (document["started"], document["finished"]) if day)
    seeds = sorted({int(info["seed"]) for info in infos if info["seed"] is not None})
    made_up = {"SYNTHETIC (generated)" if info["synthetic"] else "the sites' own images" for info in infos}
    sites = sorted({site for info in infos for site in info["sites"]})
    told = {
        "Method" + "s" * several: listed(methods, most=MOST),
        "Task": " or ".join(sorted({str(_text(info.get("kind")) or "not recorded") for info in infos}))
        + f", by {in_words(metric)}",
        "Data": " or ".join(sorted(made_up)),
        "Sites": f"{len(sites)}: {listed(sites, most=MOST)}",
        "Rounds": " or ".join(f"{done} of {of}" if done < of else f"{done}" for done, of in sorted(rounds)),
        "Training images": " or ".join(map(str, sorted(images))) if 0 not in images else "",
        "Seed" + "s" * (len(seeds) > 1): ", ".join(map(str, seeds)),
        "Date": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
    }
    return [(word, text) for word, text in told.items() if text]


def settings(material: Material) -> Section:
    """Runs, settings and versions."""
    runs = material.runs + material.others
    parts: list[Picture | Table] = [
        Table(
            "runs",
            "Every run of this page.",
            ["run", "seed", "status", "rounds", "begun", "ended", "taken up again", "id or folder"],
            [
                [run.name.partition(", seed ")[0], run.seed, run.document["status"], len(run.rounds),
                 _time(run, "started"), _time(run, "finished"), len(run.document["resumed"]),
                 run.place or _text(run.info.get("job_id"))]
                for run in runs
            ],
        ),
        _versions(runs),
        _settings(material.rows),
        *_said(runs),
    ]  # fmt: skip
    words = [f"{row.label}: {row.settings}." for row in material.rows if row.settings]
    return Section("settings", "Versions, settings, seeds", words=words, parts=parts)


def _time(run: PageRun, key: str) -> str | None:
    return (run.document[key] or "")[:19].replace("T", " ") or None


def _versions(runs: list[PageRun]) -> Table:
    """A row for each software, a column for each set of versions that occurs."""
    kinds = list(dict.fromkeys(json.dumps(run.info["versions"], sort_keys=True) for run in runs))
    found = [json.loads(kind) for kind in kinds]
    names = list(dict.fromkeys(name for versions in found for name in versions))
    several = len(found) > 1
    return Table(
        "versions",
        "Versions." + (" They are not the same in all runs." if several else ""),
        ["software", *([f"runs of kind {k + 1}" for k in range(len(found))] if several else ["version"])],
        [[name, *(_text(versions.get(name)) for versions in found)] for name in names],
    )


def _settings(rows: list[PageRow]) -> Table:
    """Every setting by the name that a person sets, a column for each row of the comparison; the seed apart."""
    by_row = []
    for row in rows:
        info = row.runs[0].info
        found = by_name({key: value for key, value in info["config"].items() if key != "seed"})
        bounds = {f"bounds.{name}": value for name, value in info["bounds"].items()}
        also = ("min_sites", "best_by", "experiment", "model_parameters")
        more: dict[str, Any] = {name: info[name] for name in also if name in info}
        file = info["task_file"]
        more |= {f"task_file.{key}": file[key] for key in ("name", "sha256", "monai_bundle_sha256") if key in file}
        by_row.append({**found, **bounds, **more})
    names = sorted({name for found in by_row for name in found})
    return Table(
        "settings",
        "Every setting; the names are those of --set.",
        ["setting", *(row.label for row in rows)],
        [[name, *(_text(found[name]) if name in found else None for found in by_row)] for name in names],
        folded=True,
    )


def _said(runs: list[PageRun]) -> list[Table]:
    """What each site said of its data; of the first run, and of others where they differ."""
    cells: list[list[Cell]] = []
    seen = set()
    for run in runs:
        said = run.info["said"]
        key = json.dumps(said, sort_keys=True)
        if not said or key in seen:
            continue
        seen.add(key)
        for site, told in sorted(said.items()):
            images = told.get("images")
            lists = ", ".join(f"{n} {split}" for split, n in images.items()) if isinstance(images, dict) else None
            synthetic = (
                {True: "SYNTHETIC", False: "no"}.get(told.get("synthetic"))
                if isinstance(told.get("synthetic"), bool)
                else None
            )
            cells.append([run.name, site, lists, synthetic, _text(told.get("num_classes")), _text(told.get("device"))])
    if not cells:
        return []
    return [
        Table(
            "said",
            "What each site said of its data before the first round; runs that said the same are not repeated.",
            ["run", "site", "images", "synthetic", "classes", "device"],
            cells,
        )
    ]


def _text(value: Any) -> Cell:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 10**15 else str(value)[:20]
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), MAX_VALUE)
