"""Turn ``fairflare compare --hold-out each`` into rows of seen, unseen and adapted figures.

    python benchmarks/unseen.py few DATA                 # at most 60 training and 12 validation images a site
    python benchmarks/unseen.py rows COMPARISON --out TABLES
    python tools/write_results.py --take TABLES --page unseen --table white_cells --title "..."

Each row of the comparison becomes up to three: ``ROW, seen`` (a site's mean over the runs that it was part of),
``ROW`` (each site by the model that was trained without it) and ``ROW, adapted`` (that model with norm statistics of
the site's own training images). All three have a value and draws of the test images for each site and seed, so that
the differences and intervals are those of ``fairflare compare``. Rows that lack a run are named and left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fairflare.base.cases.resampling import UNITS
from fairflare.core.cells import Cell
from fairflare.federation.transports.local import RUN_DIR
from fairflare.reporting.documents import RunResults, encode_value
from fairflare.reporting.results import read_document, read_results
from fairflare.reporting.values import collect_by_site
from fairflare_lab.compare.comparison import compare, comparison_of
from fairflare_lab.compare.difference_table import difference_table
from fairflare_lab.compare.left_out import Unseen

FEW = {"training": 60, "validation": 12}
Value = tuple[float, list[float | None]]  # value on the test split, and on the draws of its images


def few(folder: Path) -> None:
    """Shorten the datalists of a prepared folder, evenly over their lists; the test splits stay whole."""
    for file in sorted(folder.glob("*/datalist.json")):
        told = json.loads(file.read_text(encoding="utf-8"))
        for split, most in FEW.items():
            of = told[split]
            told[split] = of if len(of) <= most else [of[i * len(of) // most] for i in range(most)]
        file.write_text(json.dumps(told, indent=1), encoding="utf-8")


def rows(folder: Path, out: Path) -> None:
    """Write the files that ``tools/write_results.py --take`` reads."""
    values: dict[tuple[str, int], dict[str, list[Value]]] = defaultdict(lambda: defaultdict(list))
    bases: dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]] = {}
    units: dict[str, Any] = {}
    places = [file.parent for file in sorted(folder.glob("runs/*/run.json"))]
    sites = sorted({json.loads((place / "run.json").read_text())["held_out"] for place in places})
    for place in places:
        told = json.loads((place / "run.json").read_text(encoding="utf-8"))
        if not (place / RUN_DIR / "fairflare" / "unseen.json").exists():
            continue
        run, found = (read(place / RUN_DIR / "fairflare") for read in (read_document, Unseen.read))
        results = read_results(place / RUN_DIR / "fairflare")
        drawn = {of.site: of for of in results.vectors if of.unit in UNITS}
        metric, label, seed = run["info"]["primary_metric"], run["info"]["label"], run["info"]["seed"]
        units |= drawn
        kinds = {f"{label}, seen": [(s, v, drawn[s].values) for s, v in collect_by_site(results, metric).items()]}
        if found.metrics:
            kinds[label] = [(found.site, found.metrics[metric], found.resampled)]
        if found.adapted:
            kinds[f"{label}, adapted"] = [(found.site, found.adapted[metric], found.adapted_resampled)]
        for row, of in kinds.items():
            bases[row, seed] = (run, told["plan"])
            for site, value, draws in of:
                values[row, seed][site].append((value, draws))
    runs = []
    shutil.rmtree(out, ignore_errors=True)
    wanted = {seed for _, seed in bases}
    for (row, seed), of in values.items():
        runs_of_site = len(sites) - 1 if row.endswith(", seen") else 1
        if sorted(of) != sites or any(len(each) != runs_of_site for each in of.values()):
            print(f"{row}, seed {seed}: runs are missing, left out")
            continue
        base, plan = bases[row, seed]
        mean = {site: fmean(value for value, _ in each) for site, each in of.items()}
        draws = {site: [fmean(at) for at in zip(*(d for _, d in each), strict=True)] for site, each in of.items()}
        info = {**base["info"], "label": row, "sites": sites}
        if not row.endswith(", seen"):
            info["measured"] = "common"
        name = base["info"]["primary_metric"]
        cells = [Cell(name, site, value=value) for site, value in mean.items()]
        vectors = [replace(units[site], values=tuple(draws[site])) for site in sites]
        tables = encode_value({"cells": cells, "vectors": vectors}, "cells")
        content = {**base, "info": info, **tables, "left_out": [], "inequality": None}
        runs.append(content)
        own = out / "runs" / f"{row}-seed{seed}".replace(" ", "_")
        (own / "fairflare").mkdir(parents=True)
        (own / "run.json").write_text(json.dumps({"plan": {**plan, "label": row}}))
        (own / "fairflare" / "results.json").write_text(json.dumps(content))
    labels = list(dict.fromkeys(run["info"]["label"] for run in runs))
    for label in list(labels):
        if sum(run["info"]["label"] == label for run in runs) < len(wanted):
            print(f"{label}: fewer than {len(wanted)} seeds, left out")
            labels.remove(label)
    for place in out.glob("runs/*"):
        if json.loads((place / "run.json").read_text())["plan"]["label"] not in labels:
            shutil.rmtree(place)
    runs = [run for run in runs if run["info"]["label"] in labels]
    order = sorted(
        map(RunResults.model_validate, runs),
        key=lambda run: (not run.info.label.startswith("FedAvg"), labels.index(run.info.label)),
    )
    (out / "table.csv").write_text(compare(order, style="csv") + "\n")
    references = [label for label in labels if f"{label}, adapted" in labels]
    references.sort(key=lambda label: label != "FedAvg")
    parts = []
    for reference in references:
        pairs = (
            order
            if reference == "FedAvg"
            else [run for run in order if run.info.label in (reference, f"{reference}, adapted", f"{reference}, seen")]
        )
        parts.append(
            difference_table(comparison_of(pairs, None, reference).differences, reference, style="csv").splitlines()
        )
    (out / "differences.csv").write_text("\n".join([*parts[0], *(line for p in parts[1:] for line in p[1:])]) + "\n")
    sessions = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["sessions"]
    used = {place.name for place in places if _label(place) in {label.removesuffix(", seen") for label in labels}}
    sessions = [told for told in sessions if used & set(told["runs"])]  # not those of left-out rows
    (out / "provenance.json").write_text(json.dumps({"sessions": sessions}))


def _label(place: Path) -> str:
    return str(json.loads((place / "run.json").read_text(encoding="utf-8"))["plan"]["label"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["few", "rows"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "few":
        few(given.folder)
    elif given.out is None:
        parser.error("rows needs --out")
    else:
        rows(given.folder, given.out)


if __name__ == "__main__":
    main()
