"""Run what docs/results/protocol.md says, stage by stage, and store the raw results: one command for every sitting.

    FAIRFLARE_REAL_DATA=FOLDER python benchmarks/evidence.py --work RUNS [--hours 2] [--stage screen] [--family cells]
    python benchmarks/evidence.py --work RUNS --pack            # store what is done, also while the first command runs
    python benchmarks/evidence.py --table [--stage final]       # from what is stored

The plan is ``plans/evidence.yaml``. A comparison is one family in one stage; its finished runs are stored in
``docs/results/data/evidence/STAGE-FAMILY.tar.xz`` (plans and results, draws rounded to six digits, no models), and are
unpacked where RUNS lacks them, so that none is run again. It can be killed at any moment.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from PIL import Image

from fairflare.base.disk.files import write_whole
from fairflare.core.statistics.intervals import holm
from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import read_results, results_in
from fairflare_lab.compare.comparison import comparison_of
from hippocampus_folders import write_folders

ROOT = Path(__file__).parents[1]
PLAN: dict[str, Any] = yaml.safe_load((ROOT / "benchmarks/plans/evidence.yaml").read_text(encoding="utf-8"))
STORE = ROOT / "docs/results/data/evidence"
HERE = "<RUNS>"  # stands for the working folder in stored files
STATS = "stats.json"
VOLUMES = 20  # of each site, at most
SIDE = 96  # pixels
REFERENCE = next(iter(PLAN["rows"]))

# ------------------------------------------------------------------------------------------------ the data


def data_of(family: str, work: Path, source: Path) -> Path:
    """Return the sites' file of a family, whose data and statistics are made by the product's commands."""
    told, folder = PLAN["families"][family], work / "data" / family
    file = folder / "evidence.json"  # is written last: one that was killed here begins again
    if not file.exists():
        command, name, *options = told["make"]
        if "files" in told:
            source = written(family, source, work / "source" / family)
        shares = told.get("split", PLAN["split"])
        options += ["--source", source, "--fractions", *shares] if command == "prepare" else []
        call(command, name, *options, "--out", folder, "--overwrite")
        sites = json.loads((folder / "fairflare.json").read_text(encoding="utf-8"))
        for block in sites["sites"].values():
            block.update(told.get("site", {}))
        write_whole(file, lambda path: path.write_text(json.dumps(sites, indent=1) + "\n", encoding="utf-8"))
    if not (work / "stats" / family / STATS).exists():
        call("stats", "--data", file, "--out", work / "stats" / family)
    return file


def written(family: str, source: Path, folder: Path) -> Path:
    """Write a family's arrays as files as hospitals have them, and return their folder."""
    if family == "hippocampus":
        write_folders(source, folder, VOLUMES)
        return folder
    every: dict[bytes, str] = {}
    for file in sorted(source.glob(PLAN["families"][family]["files"])):
        with np.load(file) as arrays:
            if family == "xray":  # every third one, but for copies
                images, labels = (
                    np.concatenate([arrays[f"{split}_{kind}"] for split in ("train", "val", "test")])
                    for kind in ("images", "labels")
                )
                for number in range(0, len(images), 3):
                    if images[number].tobytes() not in every:
                        every[images[number].tobytes()] = f"{number}.png,{('normal', 'pneumonia')[labels[number]]}"
                        save(images[number], folder / f"{number}.png")
                continue
            for kind in ("images", "masks"):
                edge = max(0, (arrays[kind].shape[1] - SIDE) // 2)  # the middle, without scaling
                for image, name in zip(arrays[kind], arrays["ids"], strict=True):
                    inside = image[edge : edge + SIDE, edge : edge + SIDE]
                    save(inside, folder / str(arrays["site"]) / kind / f"{name}.png")
    if every:
        (folder / "images.csv").write_text("\n".join(["image,label", *every.values()]) + "\n", encoding="utf-8")
    return folder


def save(image: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


# ------------------------------------------------------------------------------------------------ the runs


def entries(stage: str, family: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a comparison in groups; a group's runs are done with all seeds before the next one's."""
    told, task = PLAN["stages"][stage], PLAN["families"][family]["task"]
    rows = {}
    for label, (method, *more) in (PLAN["rows"] | told.get("more", {})).items():
        settings, kind = [*more, *({}, None)[len(more) :]]
        if kind in (None, task):
            epochs = {} if "local_steps" in settings else {"local_epochs": 1}
            rows[label] = {"method": method, "label": label, "set": {**epochs, **settings}}
    named = told.get("rows", list(rows))
    chosen = [rows[label] for label in [*named, *best_of("screen", told.get("best", 0))] if label in rows]
    if stage == "tune":
        trials = [trial(row, {"learning_rate": rate}) for row in chosen for rate in PLAN["rates"]]
        yield trials
        yield [
            trial(row, {"learning_rate": rate, name: value})
            for row in chosen
            for rate in [tuned(family, row, first=True)["learning_rate"]]
            for name, values in own_setting(row).items()
            for value in values[1:]
        ]
        return
    if told.get("tuned"):
        chosen = [{**row, "set": {**row["set"], **tuned(family, row)}} for row in chosen]
    first = told.get("first", len(chosen))
    yield chosen[:first]
    if chosen[first:]:
        yield chosen


def own_setting(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    return dict(PLAN["own"].get(row["method"], PLAN["own"]["any"]))


def trial(row: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    words = ", ".join(f"{name} {value}" for name, value in settings.items())
    return {**row, "label": f"{row['label']}; {words}", "set": {**row["set"], **settings}}


def go(stage: str, family: str, work: Path, source: Path, end: float) -> bool:
    """Do a comparison's missing runs, store its results, and return whether there was time for all."""
    told, of = PLAN["stages"][stage], PLAN["families"][family]
    name, folder = f"{stage}-{family}", work / stage / family
    unpack(name, work)
    site_file = data_of(family, work, source)
    for group in entries(stage, family):
        plan = {
            "methods": group,
            "train_like": "fed_avg",
            "reference": group[0]["label"],
            "task": of["task"],
            "seeds": told["seeds"],
            "rounds": max(1, of["rounds"] // told.get("rounds_by", 1)),
            "set": {**PLAN["training"], **of["set"]},
        }
        if told.get("norm") == "group" and of["task"] == "volume_segmentation":
            plan["set"]["norm"] = "layer"  # a group norm of one group
        elif told.get("norm") == "group":
            plan["task_file"] = f"benchmarks/group_norm/{of['task']}.py"
        file = work / f"{name}.yaml"
        file.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
        words = ["compare", "--plan", file, "--data", site_file, "--jobs", "1", "--out", folder]
        words += ["--hold-out", "each"] if told.get("hold_out") else []
        words += ["--method-file", ROOT / told["method_file"]] if "method_file" in told else []
        in_time = call(*words, end=end)
        pack(name, work)
        if not in_time:
            return False
    return True


def call(*words: object, end: float = float("inf")) -> bool:
    """Run a fairflare command, and return whether it ended by itself before ``end`` (seconds of ``time.time``)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "fairflare.cli", *map(str, words)], cwd=ROOT, env=environment) as done:
        try:
            code = done.wait(None if end == float("inf") else max(1.0, end - time.time()))
        except subprocess.TimeoutExpired:
            done.terminate()
            return False
        except BaseException:
            done.terminate()
            raise
    if code and (code, words[0]) != (1, "compare"):  # 1: some runs failed, and their rows have fewer seeds
        raise SystemExit(code)
    return True


# ------------------------------------------------------------------------------------------------ what is stored


def pack(name: str, work: Path) -> None:
    """Store the finished runs of a comparison in one file, whose bytes depend on nothing but them."""
    folder = work / Path(*name.split("-", 1))
    unpack(name, work)
    files = [folder / "provenance.json", work / "stats" / folder.name / STATS]
    for place in sorted(folder.glob("runs/*")):
        results = results_in(place)
        if results and json.loads(results.read_text(encoding="utf-8"))["status"] == "completed":
            files += [place / "run.json", results, results.with_name("unseen.json")]
    STORE.mkdir(parents=True, exist_ok=True)
    part = STORE / f"{name}.part"
    with tarfile.open(part, "w:xz", preset=9) as stored:
        for file in files:
            if file.exists():
                text = file.read_text(encoding="utf-8").replace(str(work), HERE)
                content = (shortened(text) if file.name in ("results.json", "unseen.json") else text).encode()
                head = tarfile.TarInfo(str(file.relative_to(work)))
                head.size = len(content)
                stored.addfile(head, io.BytesIO(content))
    part.replace(STORE / f"{name}.tar.xz")


def shortened(text: str) -> str:
    """Return a document with its draws rounded to six digits, in one line."""
    document = json.loads(text)
    for vector in document.get("vectors", []):
        vector["values"] = [value if value is None else round(value, 6) for value in vector["values"]]
    for key in ("resampled", "adapted_resampled"):
        if key in document:
            document[key] = [value if value is None else round(value, 6) for value in document[key]]
    return json.dumps(document, separators=(",", ":"))


def unpack(name: str, work: Path) -> None:
    """Write the stored runs of a comparison that a working folder lacks."""
    if not (STORE / f"{name}.tar.xz").exists():
        return
    with tarfile.open(STORE / f"{name}.tar.xz") as stored:
        for head in stored:
            file, content = work / head.name, stored.extractfile(head)
            if content and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content.read().decode().replace(HERE, str(work)), encoding="utf-8")


def runs_of(name: str) -> list[RunResults]:
    """Return the stored runs of a comparison, without those of left-out sites."""
    with tempfile.TemporaryDirectory() as place:
        unpack(name, Path(place))
        files = sorted(Path(place).rglob("results.json"))
        return [read_results(file) for file in files if not file.with_name("unseen.json").exists()]


def validated(run: RunResults) -> tuple[float, float]:
    """Return the worst site's and the average primary metric of a run's last model on the validation splits."""
    metric = str(run.info.primary_metric)
    cells = [c for c in run.cells if (c.metric, c.model, c.split, c.group) == (metric, "last", "validation", "")]
    values = [c.counted for c in cells if c.site]
    return (min(values), fmean(values)) if values else (0.0, 0.0)


def best_of(stage: str, count: int) -> list[str]:
    """Return further rows for stage 2: those of a stage whose validation's worst site gains most over the reference."""
    if not count:
        return []
    gains: dict[str, list[float]] = defaultdict(list)
    for family in PLAN["stages"][stage]["families"]:
        worst = {(str(r.info.label), r.info.seed): validated(r)[0] for r in runs_of(f"{stage}-{family}")}
        for (label, seed), value in worst.items():
            if (REFERENCE, seed) in worst:
                gains[label].append(value - worst[REFERENCE, seed])
    always = set(PLAN["stages"]["final"]["rows"])
    ranked = sorted((label for label in gains if label not in always), key=lambda label: -fmean(gains[label]))
    return ranked[:count]


def tuned(family: str, row: Mapping[str, Any], *, first: bool = False) -> dict[str, Any]:
    """Return the settings with which a row's validation splits were best; a row without trials gets the reference's."""
    if row["label"] not in PLAN["stages"]["tune"]["rows"] + best_of("screen", PLAN["stages"]["tune"]["best"]):
        row = {**row, "label": REFERENCE, "method": PLAN["rows"][REFERENCE][0], "set": {"local_epochs": 1}}
    trials = [trial(row, {"learning_rate": rate}) for rate in PLAN["rates"]]
    scores = {str(run.info.label): validated(run) for run in runs_of(f"tune-{family}")}
    for rate in () if first else PLAN["rates"]:
        for name, values in own_setting(row).items():
            trials += [trial(row, {"learning_rate": rate, name: value}) for value in values[1:]]
    done = [one for one in trials if one["label"] in scores]
    if not done:
        raise SystemExit(f"{family}: no trial of {row['label']} is stored; run the stage tune first")
    best = max(done, key=lambda one: scores[one["label"]])
    return {name: value for name, value in best["set"].items() if row["set"].get(name) != value}


# ------------------------------------------------------------------------------------------------ the tables


def table(stage: str) -> None:
    """Print a table of each family, marked after the correction for all rows, measures and families."""
    compared = {}
    for family in PLAN["stages"][stage]["families"]:
        runs = runs_of(f"{stage}-{family}")
        if {str(run.info.label) for run in runs} > {REFERENCE}:
            compared[family] = comparison_of(runs, None, REFERENCE)
    looks = [d for c in compared.values() for d in c.differences if d.measure in ("worst", "average")]
    tested = [d for d in looks if d.p == d.p]
    corrected = dict(zip(map(id, tested), holm([d.p for d in tested]), strict=True)) if tested else {}
    for family, comparison in compared.items():
        print(f"\n{PLAN['families'][family]['title']}; {comparison.metric}, {len(tested)} looks\n")
        print(
            "| method | seeds | worst site less FedAvg's [95 %] | average less FedAvg's [95 %] |\n" + "| --- " * 4 + "|"
        )
        by_row = defaultdict(dict)
        for d in comparison.differences:
            by_row[d.label][d.measure] = d
        for label, of in sorted(by_row.items(), key=lambda item: -item[1]["worst"].mean):
            cells = [
                f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" + "*" * bool(corrected.get(id(d), 1.0) < 0.05)
                for d in (of["worst"], of["average"])
            ]
            print(f"| {label} | {len(of['worst'].values)} | {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--source", type=Path, default=Path(os.environ.get("FAIRFLARE_REAL_DATA", ".")))
    parser.add_argument("--stage", nargs="+", default=list(PLAN["stages"]), choices=list(PLAN["stages"]))
    parser.add_argument("--family", nargs="+", help="default: all of the stage")
    parser.add_argument("--hours", type=float, default=float("inf"))
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work, end = given.work.absolute(), time.time() + 3600 * given.hours
    for stage in given.stage:
        if given.table:
            table(stage)
            continue
        for family in given.family or PLAN["stages"][stage]["families"]:
            if given.pack:
                if (work / stage / family / "runs").exists():
                    pack(f"{stage}-{family}", work)
            elif not go(stage, family, work, given.source.absolute(), end):
                return


if __name__ == "__main__":
    main()
