"""Measure what wrong labels, turned updates and claims at one or two of six sites cost the honest ones, by method.

Real rounds with real training on a task of points: four Gaussian classes in 20 dimensions, shifted a little from site
to site, with unequal classes and sizes. Prints the table of accuracies of
``docs/robustness.md``, in about ten minutes on one core.

    python benchmarks/poison.py [--seeds 3] [--methods fed_avg ...] [--cache FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import fairflare.federation.record.journal as journal
import liar
from fairflare.base.settings import build, field_names, values_of
from fairflare.base.task import LOSS, Metric, evaluating
from fairflare.exchange.messages import TASK_ANCHOR, TASK_TRAIN, Message
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.transports.local import LocalTransport
from fairflare.methods.base.catalog import Method
from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import read_results
from fairflare.reporting.values import collect_by_site
from fairflare.tasks.base import SiteData, Task
from fairflare.tasks.networks import Classifier
from liar import LIAR, PAIR, SITES, Lie, averaging, words_for

CLASSES, WIDTH, ROUNDS = 4, 20, 6
LEAD = ("fed_avg", "fed_ism_plus_l", "fed_lwr", "afl")


class Points(SiteData):
    """Hold the points of one site; ``turned``: every label is one too high."""

    synthetic = True
    num_classes = CLASSES

    def __init__(self, site: str, seed: int, shift: float, skew: float, turned: bool) -> None:
        common = np.random.default_rng(seed)
        centres = common.normal(size=(CLASSES, WIDTH)) * 1.1
        index = SITES.index(site)
        own = np.random.default_rng([seed, index])
        moved = own.normal(size=WIDTH) * shift
        mix = own.dirichlet([skew] * CLASSES)
        self._splits = {}
        for split, count in (("training", int(own.integers(60, 180))), ("validation", 60), ("test", 100)):
            even = own.integers(0, CLASSES, count)
            labels = own.choice(CLASSES, count, p=0.9 * mix + 0.1 / CLASSES) if split != "test" else even
            inputs = centres[labels] + moved + own.normal(size=(count, WIDTH)) * 1.6
            told = (labels + 1) % CLASSES if turned else labels
            self._splits[split] = torch.tensor(inputs, dtype=torch.float32)[:, None, :, None], torch.tensor(told)

    def num_samples(self, split: str) -> int:
        return len(self._splits[split][1])

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self._splits[split][1], minlength=CLASSES)

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int]:
        count = self.num_samples(split)
        if shuffle_seed is None:
            return list(range(count))
        return torch.randperm(count, generator=torch.Generator().manual_seed(shuffle_seed)).tolist()

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False) -> Any:
        inputs, labels = self._splits[split]
        order = torch.tensor(self.order(split, shuffle_seed))
        return [(inputs[part], labels[part]) for part in order.split(batch_size)]


class Prior:
    """Return fixed random features (Fed-MAS)."""

    name, width, fingerprint = "random", 8, "random"

    def __init__(self) -> None:
        self.weight = torch.randn(WIDTH, self.width, generator=torch.Generator().manual_seed(1))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.flatten(1) @ self.weight

    def to(self, device: Any) -> Prior:
        return self


class PointsTask(Task):
    """Define a task that finds the class of a point.

    Args:
        seed: of the data.
        shift, skew: of the sites: deviation of their centres; concentration of their classes (small: unequal).
        wrong: sites whose labels are off by one.
        projector_dim, retrained_head, neck_dim, cosine_scale: as of the packaged classification.
    """

    primary_metric = "accuracy"
    has_classes = True

    def __init__(
        self,
        seed: int = 0,
        shift: float = 0.3,
        skew: float = 2.0,
        wrong: Sequence[str] = (),
        projector_dim: int | None = None,
        neck_dim: int | None = None,
        retrained_head: bool = False,
        cosine_scale: float | None = None,
    ) -> None:
        self.seed, self.shift, self.skew, self.wrong = seed, shift, skew, list(wrong)
        self.projector_dim, self.neck_dim, self.retrained_head = projector_dim, neck_dim, retrained_head
        self.cosine_scale = cosine_scale

    def declared_metrics(self) -> tuple[Metric, ...]:
        return Metric(name="accuracy", doc="share of the points", higher_is_better=True), LOSS

    @property
    def classes(self) -> int:
        return CLASSES

    def build_model(self) -> torch.nn.Module:
        encoder = torch.nn.Sequential()
        for name, layer in (
            ("flat", torch.nn.Flatten()), ("down_3", torch.nn.Linear(WIDTH, 16)),
            ("norm", torch.nn.BatchNorm1d(16)), ("bend", torch.nn.ReLU()),
        ):  # fmt: skip
            encoder.add_module(name, layer)
        heads: dict[str, Any] = {
            "projector_dim": self.projector_dim, "neck_dim": self.neck_dim, "cosine_scale": self.cosine_scale
        }  # fmt: skip
        return Classifier(encoder, 16, CLASSES, in_channels=1, retrained_head=self.retrained_head, **heads)

    def load_prior(self, network: str, checkpoint: str | None, image_size: int | None) -> Any:
        return Prior()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets)

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def evaluate(self, model: Any, batches: Iterable[Any], device: Any) -> dict[str, float]:
        right = seen = total = 0.0
        with evaluating(model):
            for inputs, targets in batches:
                outputs = model(inputs)
                right += float((outputs.argmax(1) == targets).sum())
                total += float(self.sample_losses(outputs, targets).sum())
                seen += len(targets)
        return {"accuracy": right / seen, "loss": total / seen}

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Points(site, self.seed, self.shift, self.skew, site in self.wrong)


# ------------------------------------------------------------------------------------------------ a run


@dataclass(frozen=True)
class Case:
    """Describe what is wrong in a run.

    Args:
        words: for the table.
        sites: that are.
        turned: their labels are off by one.
        by: factor of their updates.
        claims: they say whatever makes them the heaviest.
    """

    words: str
    sites: tuple[str, ...] = ()
    turned: bool = False
    by: float = 1.0
    claims: bool = False


NOBODY = Case("nobody")
TURNED, TWO_TURNED = Case("labels, 1", (LIAR,), True), Case("labels, 2", tuple(PAIR), True)
CASES = (
    NOBODY, TURNED, TWO_TURNED,
    Case("x -1", (LIAR,), by=-1.0), Case("x -5", (LIAR,), by=-5.0), Case("x -5 + claim", (LIAR,), by=-5.0, claims=True),
)  # fmt: skip


class Hospitals(LocalTransport):
    """Run sites in this process, some of which change what they send."""

    case: Case
    claim: Lie

    def _answer(self, site: str, name: str, task: Message) -> Message:
        reply = super()._answer(site, name, task)
        if site not in self.case.sites:
            return reply
        if name == TASK_TRAIN and self.case.by != 1 and reply.params is not None:
            reply.params = {k: self.case.by * v if v.is_floating_point() else v for k, v in reply.params.items()}
        if self.case.claims and name in (TASK_TRAIN, TASK_ANCHOR):
            report = reply.meta.get("report") or {}
            if name == TASK_TRAIN:
                told = dict(self.claim.report)
                reply.meta["num_samples"] = told.pop("num_samples", reply.meta.get("num_samples"))
                report |= {key: value for key, value in told.items() if key in report}
            elif self.claim.anchor is not None:
                report |= {key: [self.claim.anchor] * len(report["layers"]) for key in ("cka", "dissimilarity")}
        return reply


TRAINING = {
    "learning_rate": 0.3,
    "optimizer": "sgd",
    "batch_size": 200,
    "local_epochs": 3,
    "momentum": 0.0,
    "keep_optimizer_state": False,
}


def run(
    method: Method, case: Case, seed: int = 0, bounds: Mapping[str, Any] | None = None, rounds: int = ROUNDS,
    shift: float = 0.3, skew: float = 2.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the results of one run."""
    learns = {k: v for k, v in method.learns.items() if k in ("retrained_head",)}
    heads = {"fed_mas": {"projector_dim": 8}, "bsm_kd": {"projector_dim": 8}, "moon": {"neck_dim": 16}}
    learns |= {**heads, "ldam": {"cosine_scale": 30.0}}.get(method.name, {})
    task = PointsTask(seed, shift, skew, case.sites if case.turned else (), **learns)
    given = {k: v for k, v in method.small.items() if k in field_names(method.training)}
    own = {**method.site, **given, **{k: v for k, v in TRAINING.items() if k not in method.keeps}}
    if "gradient_repeats" in own:
        own["gradient_repeats"] = 1
    training = build(method.training, own)
    small = {
        "creff": {"classifier_epochs": 20, "feature_steps": 20},
        "fed_lwr_last_layer": {"only_layer": "encoder"},
    }
    fast: dict[str, Any] = small.get(method.name, {})
    shared = {"learning_rate": TRAINING["learning_rate"]} if "learning_rate" in field_names(method.rule) else {}
    rule = build(method.rule, {**method.server, **fast, **shared})
    with tempfile.TemporaryDirectory(prefix="fairflare-poison-") as name:
        folder = Path(name)
        transport = Hospitals(SITES, task, training, {}, folder / "sites")
        transport.case = case
        transport.claim = ([lie for lie in words_for(method) if "1e30" not in lie.words] or [liar.SAMPLES])[-1]
        again = {"crt_rounds": 2} if "crt_rounds" in method.run else {}
        settings = RunSettings(num_rounds=rounds, seed=seed, label=method.name, **again, **(bounds or {}))
        place = Place(folder / "run", folder / "kept", "poison", site_half=values_of(training))
        # A run with a wrong site may fail; a run of honest sites must not.
        with contextlib.suppress(*([RoundFailed] if case.sites else [])):
            Rounds(task, rule, settings, transport, place).run()
        return read_results(folder / "run" / "fairflare")


def quick() -> None:
    """Turn off pictures, page, log and disk flushes, and use one thread."""
    os.fsync = lambda _: None
    torch.cuda.manual_seed_all = lambda seed: None  # without a GPU this call takes as long as a training here
    if Path("/dev/shm").is_dir():
        tempfile.tempdir = "/dev/shm"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    journal.tell_listeners = lambda _: []


def accuracy(results: RunResults, case: Case) -> float:
    """Return the last model's mean accuracy over the honest sites; 0 where the run failed."""
    test = collect_by_site(results, "accuracy")
    found = [test[site] for site in SITES if site in test and site not in case.sites and np.isfinite(test[site])]
    return float(np.mean(found)) if found else 0.0


# ------------------------------------------------------------------------------------------------ tables

#: Columns of the table of accuracies: settings besides the method's, and the methods that have the column.
COLUMNS: dict[str, tuple[dict[str, Any] | None, tuple[str, ...] | None]] = {
    "default": (None, None),
    "exported": (FOR_HOSPITALS, None),
    "exported, aggregate=median": ({**FOR_HOSPITALS, "aggregate": "median"}, LEAD),
}


class Cache:
    """Store measured values, a line a run, so that a stopped command is resumed; ``full``: nothing is added."""

    def __init__(self, path: Path | None, full: bool = False) -> None:
        self.path, self.full = path, full
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self.found = {tuple(key): value for key, value in map(json.loads, lines)}

    def __call__(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.found and not self.full:
            self.found[key] = make()
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self.found[key]]) + "\n")
        return self.found.get(key)


def accuracies(cache: Cache, methods: Sequence[Method], seeds: int) -> list[str]:
    """Return mean accuracies of the honest sites, by method and column; in brackets the number of seeds, if less."""
    rows = ["| method | set | " + " | ".join(case.words for case in CASES) + " |"]
    rows.append("| --- | --- |" + " ---: |" * len(CASES))
    for seed in range(seeds):  # seed by seed, so that a stopped command has whole seeds
        for method in sorted(methods, key=lambda method: method.name not in LEAD):
            for column, (bounds, only) in COLUMNS.items():
                for case in CASES if only is None or method.name in only else ():

                    def measure(
                        method: Method = method, case: Case = case, bounds: Any = bounds, seed: int = seed
                    ) -> float:
                        return accuracy(run(method, case, seed, bounds), case)

                    cache(("accuracy", method.name, column, case.words, seed), measure)
    for method in methods:
        for column, (_, only) in COLUMNS.items():
            if only is not None and method.name not in only:
                continue
            cells = []
            for case in CASES:
                key = "accuracy", method.name, column, case.words
                found = [cache.found[(*key, s)] for s in range(seeds) if (*key, s) in cache.found]
                few = f" ({len(found)})" if len(found) < seeds else ""
                cells.append(f"{statistics.fmean(found):.2f}{few}" if found else "-")
            if set(cells) != {"-"}:
                rows.append(f"| {method.title} | {column} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="accuracy at the honest sites under wrong labels and turned updates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", help="default: all")
    parser.add_argument("--cache", type=Path, help="a file of what was measured, which a second command goes on with")
    parser.add_argument("--cached", action="store_true", help="measure nothing, write what the cache has")
    args = parser.parse_args()
    quick()
    cache, methods = (
        Cache(args.cache, args.cached),
        # Methods that act on groups of people are left out, as points belong to no person.
        [m for m in averaging() if m.name in (args.methods or [m.name]) and not m.learns.get("attributes")],
    )
    parts = [
        [f"Accuracy at the honest sites, mean of {args.seeds} seeds (chance: {1 / CLASSES:g}).", ""],
        accuracies(cache, methods, args.seeds),
    ]
    text = "\n".join(line for part in parts for line in part)
    print(text)


if __name__ == "__main__":
    main()
