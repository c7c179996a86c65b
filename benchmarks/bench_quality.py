"""Check that every method learns: a short run beside a plain loop over the images of all sites in one place.

Each method has the local training of its ``--paper`` set-up, on a narrow network with small images; the plain loop has
the same network, loss, optimizer and batch size, and as many steps as the mean site makes in the run. Both are measured
on the sites' test splits, and the figure is the mean over the sites. A method that stays further behind than its margin
(see ``MARGINS``) is named, and the script ends with status 1.

    python benchmarks/bench_quality.py                       # every method, on the phantoms
    python benchmarks/bench_quality.py q_fed_avg fed_avg
    python benchmarks/bench_quality.py segmentation --data data/nuclei/fairflare.json --set in_channels=3
    python benchmarks/bench_quality.py --store quality.csv
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import fairflare
from fairflare.cli.options import parse_settings
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.record.run_info import versions
from fairflare.federation.site.site_file import own_settings
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.reporting.results import read_results
from fairflare.reporting.values import collect_by_site
from fairflare_lab.cli.compare.provenance import checksums, commit_of, processor

#: Settings of a small network and phantom in place of the papers', and of training steps for few images.
SMALLER: dict[str, dict[str, Any]] = {
    "segmentation": {
        "image_size": [32, 32], "in_channels": 1, "features": [8, 8, 16, 16, 32, 8], "norm_momentum": 0.5,
        "phantom_cases": 0.5, "local_epochs": 5, "learning_rate": 3e-3,
    },
    "classification": {
        "image_size": [32, 32], "network": "resnet18", "features": [8, 16, 32, 64], "max_pool": False,
        "norm_momentum": 0.5, "phantom_samples": 600, "phantom_test": 240, "partition": "dirichlet", "alpha": 1.0,
        "phantom": "dermoscopy", "corrupted_sites": 0, "local_epochs": 3, "batch_size": 16, "augment": False,
    },
}  # fmt: skip
ROUNDS, SITES = 8, 3
#: Settings that use the packaged prior in place of a published one, which a user would have to provide.
OWN: dict[str, dict[str, Any]] = {
    "fed_mas": {"prior_network": "embedded", "projector_dim": 96},
    "bsm_kd": {"prior_network": "embedded", "projector_dim": 96},
}
#: How far below the plain loop a method may stay, of the metric's range; at most half of the loop's gain over chance.
MARGIN = 0.15
SHORT = "weights that swing from round to round cost most in short runs from a random model"
MARGINS: dict[str, tuple[float, str]] = {
    "cgsv": (0.25, "an update has the length gamma, however much was learned"),
    "fed_lwr": (0.25, SHORT),
    "fed_lwr_cosine": (0.25, SHORT),
}


#: Settings of local training and task that the plain loop follows.
TRAINED = (
    "optimizer", "learning_rate", "weight_decay", "betas", "momentum", "batch_size", "local_epochs", "criterion",
    "schedule", "max_grad_norm",
)  # fmt: skip
LEARNED = ("image_size", "features", "neck_dim", "classifier", "partition", "phantom")


@dataclass(frozen=True)
class Reached:
    """Store the mean over the sites of the test metric, in [0, 1]."""

    name: str
    title: str
    task: str
    metric: str
    reached: float
    centralised: float
    margin: float
    seconds: float

    @property
    def behind(self) -> bool:
        return not self.reached >= self.centralised - self.margin


def planned(name: str, given: Mapping[str, Any], *, rounds: int, sites: Any, seed: int) -> Plan:
    method = all_methods()[name]
    settings = {**SMALLER[method.task], **OWN.get(name, {}), **given}
    if method.task == "classification" and "learning_rate" not in given:
        settings["learning_rate"] = 0.03 if make_plan(name, small=False).training.optimizer == "sgd" else 2e-3
    return make_plan(name, small=False, settings=settings, num_rounds=rounds, sites=sites, seed=seed)


def federated(plan: Plan, local: Mapping[str, Any]) -> float:
    """Return the figure of the run's own final test, the mean over the sites."""
    return fmean(by_site(plan, local).values())


def by_site(plan: Plan, local: Mapping[str, Any]) -> dict[str, float]:
    """Return each site's figure of the run's own final test."""
    with tempfile.TemporaryDirectory(prefix="fairflare_quality_") as folder:
        results = read_results(run_local(plan, Path(folder), local))
    return collect_by_site(results, plan.task.primary_metric)


def centralised(plan: Plan, local: Mapping[str, Any]) -> float:
    """Train a plain loop in torch alone, so that it does not share a fault of the federation's training."""
    task, half = plan.task, plan.training
    data = [task.open_site(site, own_settings(local, site)) for site in plan.sites or ()]
    every = [batch for site in data for batch in site.batches("training", batch_size=1000)]
    inputs, targets = (torch.cat(parts) for parts in zip(*every, strict=True))
    torch.manual_seed(plan.run.seed)
    model = task.build_model()
    if half.optimizer == "sgd":
        sgd = {"momentum": half.momentum, "nesterov": half.momentum > 0, "weight_decay": half.weight_decay}
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=half.learning_rate, **sgd)
    else:
        adam: Any = {"betas": half.betas, "weight_decay": half.weight_decay}
        optimizer = torch.optim.Adam(model.parameters(), lr=half.learning_rate, **adam)
    offset = None
    if half.criterion != "task":
        counts = torch.bincount(targets).double()
        offset = (counts / counts.sum()).clamp(min=1e-12).log().float()
    steps = plan.run.num_rounds * half.local_epochs * math.ceil(len(inputs) / len(data) / half.batch_size)
    generator, left = torch.Generator().manual_seed(plan.run.seed), torch.empty(0, dtype=torch.long)
    model.train()
    for step in range(steps):
        if half.schedule == "cosine":
            for group in optimizer.param_groups:
                group["lr"] = half.learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
        if len(left) < half.batch_size:
            left = torch.randperm(len(inputs), generator=generator)
        batch, left = left[: half.batch_size], left[half.batch_size :]
        outputs = model(inputs[batch])
        loss = task.loss(outputs if offset is None else outputs + offset, targets[batch])
        optimizer.zero_grad()
        loss.backward()
        if half.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), half.max_grad_norm)
        optimizer.step()
    return fmean(
        task.evaluate(model, site.batches("test", batch_size=64), torch.device("cpu"))[task.primary_metric]
        for site in data
    )


def measure(
    names: Sequence[str],
    given: Mapping[str, Any] | None = None,
    local: Mapping[str, Any] | None = None,
    *,
    rounds: int = ROUNDS,
    sites: Any = SITES,
    seed: int = 0,
) -> Iterator[Reached]:
    """Run the methods one after the other; the plain loop runs once for each different set-up."""
    torch.set_num_threads(1)
    known, local = dict[str, float](), dict(local or {})
    sites = sorted(local["sites"]) if local.get("sites") else sites
    for name in names:
        started, plan = time.process_time(), planned(name, given or {}, rounds=rounds, sites=sites, seed=seed)
        half = plan.training
        same = repr([getattr(half, n) for n in TRAINED] + [getattr(plan.task, n, None) for n in LEARNED])
        if same not in known:
            known[same] = centralised(plan, local)
        chance = 1 / plan.task.classes if plan.method.task == "classification" else 0.0
        margin = min(MARGINS.get(name, (MARGIN, ""))[0], (known[same] - chance) / 2)
        reached = federated(plan, local)
        yield Reached(
            name, plan.method.title, plan.method.task, plan.task.primary_metric, reached, known[same], margin,
            time.process_time() - started,
        )  # fmt: skip


def line(one: Reached) -> str:
    mark = "BEHIND" if one.behind else ""
    gap = one.reached - one.centralised
    return (
        f"{one.title:16} {one.metric:18} {one.reached:.3f}  one place {one.centralised:.3f}  {gap:+.3f}"
        f"  margin {one.margin:.2f}  {one.seconds:5.0f} s  {mark}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="names, or a task for all of its methods; default: all")
    parser.add_argument("--data", type=Path, help="a fairflare.json with the sites' own images")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, help="put the figures into this CSV, begun with the head of another")
    parser.add_argument("--table", default="", help="of --store: a table of this name (default: the methods' tasks)")
    options = parser.parse_args()
    local = json.loads(options.data.read_text(encoding="utf-8")) if options.data else {}
    methods = all_methods()
    names = [n for n in methods if methods[n].task in options.methods] or options.methods or list(methods)
    told = {**origin_of("bench_quality.py", options.seed, local), "rounds": options.rounds}
    found = []
    for one in measure(names, parse_settings(options.set), local, rounds=options.rounds, seed=options.seed):
        print(line(one), flush=True)
        found.append(one)
        if options.store:
            values = {"reached": one.reached, "one place": one.centralised, "difference": one.reached - one.centralised}
            row = (one.title, one.name, one.metric)
            store(*row, {**values, "margin": one.margin}, options.store, options.table or one.task, told)
    late = [one.title for one in found if one.behind]
    print(f"{len(found)} methods, {len(late)} behind their margin{': ' if late else ''}{', '.join(late)}")
    return 1 if late else 0


def origin_of(script: str, seed: int, local: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of this command, the code, the machine and the data."""
    return {
        "command": shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "seed": seed, "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": commit_of(Path(fairflare.__file__).parent), "processor": processor(), "versions": versions(),
        "data": checksums(local) or "generated (phantoms), no files",
    }  # fmt: skip


def store(
    title: str, name: str, metric: str, values: Mapping[str, float], path: Path, table: str, told: Mapping[str, Any]
) -> None:
    """Write a method's figures into the page's CSV, their origin into the JSON beside it (tools/write_results.py).

    Args:
        title: the row; one of that title is replaced. The table begins anew when its other rows are of another commit
            or data.
        name: the method.
        metric: what the figures are of.
        values: the figures by column.
        path: the CSV.
        table: name on the page.
        told: ``seed``, ``rounds``, ``command``, ``commit``, ``data``, and what else is known of code and machine.
    """
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    origin = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    about = origin["tables"].setdefault(table, {"title": table, "summary": False, "over": "seeds", "reference": ""})
    same = all(about.get(key) == told[key] for key in ("seed", "rounds", "commit", "data"))
    commands = about.get("commands", [])
    kept = [command for command in commands if same or not command.startswith("python ")]
    told = dict(told)
    about["commands"] = list(dict.fromkeys([*kept, told.pop("command")]))
    about |= {**told, "metric": metric}
    lines = [text for text in lines if not text.startswith(f"{table},{title}," if same else f"{table},")]
    lines += [f"{table},{title},,{column},{told['seed']},{value:.4f},,,,,,," for column, value in values.items()]
    lines.sort(key=lambda text: text.split(",")[:2])
    rows = {text.split(",")[1] for text in lines if text.startswith(f"{table},")}
    rounds = "each job's own rounds" if told["rounds"] is None else f"{told['rounds']} rounds"
    about["ran"] = f"{len(rows)} methods, seed {told['seed']}, {rounds}, one after the other."
    origin["methods"][title] = name
    path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(origin, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
