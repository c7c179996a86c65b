"""Measure one liar of six sites, and two: their weight, and how far one moves the model, with and without bounds.

Real rounds (:class:`fairflare.federation.server.rounds.Rounds`) whose sites are a few lines: nobody trains, every reply
is made by hand. In round 0 one site lies, from round 1 on it is honest; a pair lies in every round. Prints the tables
for all methods.

    python benchmarks/liar.py
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fairflare import __version__
from fairflare.base.settings import build
from fairflare.core.features.layers import layers_of
from fairflare.exchange.messages import (
    TASK_ANCHOR,
    TASK_CHECK,
    TASK_TRAIN,
    TASK_VALIDATE,
    Message,
    address,
    says_nothing,
)
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.collecting.transport import Listener, Question
from fairflare.federation.plan.bounds import FOR_HOSPITALS, Bounds, describe_bounds
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds, Stopped
from fairflare.methods.base.catalog import Method, all_methods
from fairflare.methods.base.reports import Field
from fairflare.methods.base.rule import MakesTensors, TwoPhase
from fairflare.methods.creff import CReFF
from fairflare.reporting.documents import RoundRecord
from fairflare.tasks.base import Metric, SiteData, Task
from fairflare.tasks.networks import GivenHead

SITES = [f"site-{number}" for number in range(1, 7)]
LIAR = SITES[-1]
PAIR = SITES[-2:]
#: Bounds that exported jobs had before ``max_weight`` followed the number of sites.
BEFORE = {"max_weight": 0.4, "max_samples": 100_000, "max_update_norm": 3.0}
State = dict[str, torch.Tensor]


class Nothing(Task):
    """Define a small network with batch norm, and the block that Fed-LWR-v2 looks at.

    Args:
        given: with the second classifier that CReFF's server makes.
    """

    primary_metric = "dice"

    def __init__(self, given: bool = False) -> None:
        self.given = given

    def build_model(self) -> torch.nn.Module:
        names: dict[str, Any] = {
            "down_3": torch.nn.Linear(6, 8),
            "norm": torch.nn.BatchNorm1d(8),
            "head": torch.nn.Linear(8, 3),
        }
        model = torch.nn.Sequential()
        for name, layer in names.items():
            model.add_module(name, layer)
        if self.given:
            model.add_module("retrained", GivenHead(names["head"]))
        return model

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody trains here")

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="dice", doc="made up", higher_is_better=True),)

    def evaluate(self, model: Any, batches: Any, device: Any) -> dict[str, float]:
        raise AssertionError("nobody trains here")

    def open_site(self, site: str, settings: Any) -> SiteData:
        raise AssertionError("nobody trains here")


# ------------------------------------------------------------------------------------------------ the sites' answers


def ordinary(declared: Field, index: int) -> float | list[float]:
    """Return a number about a third into a field's range, or within 1 of its lower end; alike at all sites."""
    low = declared.low if math.isfinite(declared.low) else 0.0
    number = low + min(declared.high - low, 1.0) * (0.3 + 0.01 * index)
    return [number] if declared.kind == "vector" else number


def honest(
    site: str, received: State, current_round: int, fields: Sequence[Field] = ()
) -> tuple[State, dict[str, Any], dict[str, Any]]:
    """Return a site's update and reports after training and about the anchor; alike at all sites, but not equal.

    Numbers among ``fields`` that are not listed here are :func:`ordinary`.
    """
    index = SITES.index(site)
    g = torch.Generator().manual_seed(100 * current_round + index)
    common = torch.Generator().manual_seed(current_round)
    update = {}
    for name, tensor in received.items():
        if name.startswith(CReFF.makes):
            continue
        if tensor.is_floating_point():
            size = tensor.shape
            update[name] = 0.05 * torch.randn(size, generator=common) + 0.02 * torch.randn(size, generator=g)
        else:
            update[name] = torch.tensor(12 + index)
    report = {f.name: ordinary(f, index) for f in fields if f.kind in ("number", "vector")} | {
        "sharpness": 0.0125 + 0.0002 * index,
        "probe_loss": 0.7 + 0.02 * index,
        "step_norm": 10.0 + index,
        "rate_sum": 1.0 + 0.1 * index,
        "cost": 0.6 - 0.05 * current_round + 0.01 * index,
        "gap": 0.02 + 0.002 * index if current_round else math.nan,
        "minus_score": 0.4 + 0.01 * index,
        "perturbed_loss": 0.7 + 0.02 * index,
        "rescue_factor": 10.5 + 0.1 * index,
        "prior": "the same",
        "train_loss": 1.4 + 0.02 * index,
        "own_metric": 0.6 + 0.01 * index,
        "accuracy": 0.6,
        "global_accuracy": 0.6,
        "num_validation": 30,
        "entropy": -1.5,
        "num_classes": 7,
        "mu": 0.1,
        "rows": 1.0,
        "group_losses": [0.7 + 0.02 * index],
        "group_images": [30.0],
        "input_mean": [0.4],
        "input_std": [0.2 + 0.01 * index],
    }
    layers = list(dict.fromkeys(layers_of(received).values()))
    distances = [0.005 + 0.0025 * ((index + place) % 6) for place, _ in enumerate(layers)]
    anchor = {"layers": layers, "cka": [1 - d for d in distances], "dissimilarity": distances}
    return update, report, anchor


@dataclass(frozen=True)
class Lie:
    """Describe what the liar changes in its honest answer.

    Args:
        words: for the table.
        report: fields after training; ``num_samples`` too.
        anchor: value of every layer's dissimilarity.
        model: makes the update from the received model and the honest update.
    """

    words: str
    report: Mapping[str, Any] = field(default_factory=dict)
    anchor: float | None = None
    model: Callable[[State, State], State] | None = None


def scaled(by: float) -> Callable[[State, State], State]:
    def model(received: State, update: State) -> State:
        return {k: by * (received[k] + u) - received[k] if u.is_floating_point() else u for k, u in update.items()}

    return model


def negative_variance(received: State, update: State) -> State:
    return {**update, "norm.running_var": torch.full_like(update["norm.running_var"], -1e6)}


SAMPLES = Lie("`num_samples` 1e9", {"num_samples": 10**9})
WORDS = {
    "dissimilarity": [Lie("`dissimilarity` 1.0", anchor=1.0)],
    "sharpness": [
        Lie(f"`sharpness` {text}", {"sharpness": v}) for text, v in (("x 8", 0.1), ("1", 1.0), ("1e30", 1e30))
    ],
    "perturbed_loss": [
        Lie(f"`perturbed_loss` {text}", {"perturbed_loss": v}) for text, v in (("10", 10.0), ("1e30", 1e30))
    ],
    "rescue_factor": [Lie("`rescue_factor` 16e6", {"rescue_factor": 16e6})],
    "train_loss": [Lie("`train_loss` 10", {"train_loss": 10.0})],
    "probe_loss": [Lie("`probe_loss` 1e-9", {"probe_loss": 1e-9}), Lie("`probe_loss` 100", {"probe_loss": 100.0})],
    "step_norm": [Lie("`step_norm` 1", {"step_norm": 1.0}), Lie("`step_norm` 1e6", {"step_norm": 1e6})],
    "accuracy": [Lie("`accuracy` 0", {"accuracy": 0.0}), Lie("`accuracy` 1", {"accuracy": 1.0})],
    "group_losses": [Lie(f"`group_losses` {text}", {"group_losses": [float(text)]}) for text in ("1e-9", "100")],
    "cost": [Lie("`cost` 1e6", {"cost": 1e6})],
    "gap": [Lie("`gap` 1e5", {"gap": 1e5})],
    "minus_score": [Lie("`minus_score` 1", {"minus_score": 1.0})],
}
MODELS = [Lie(f"model x {text}", model=scaled(float(text))) for text in ("1e4", "1e6", "1e38")]
VARIANCE = Lie("`running_var` - 1e6", model=negative_variance)


def words_for(method: Method) -> list[Lie]:
    """Return lies about the fields that decide a method's weights."""
    rule = build(method.rule, method.server)
    if isinstance(rule, TwoPhase):
        return WORDS["dissimilarity"]
    own = {"fed_ism": "sharpness", "fed_ism_plus_s": "sharpness", "fed_ism_plus_l": "perturbed_loss"}
    own |= {"fed_mas": "rescue_factor", "fed_mrl": "train_loss", "fed_nova": "step_norm", "fair_fed": "accuracy"}
    own |= {"q_fed_avg": "probe_loss", "afl": "probe_loss", "fed_ga": "gap", "fed_ce": "minus_score"}
    own |= {"group_dro": "group_losses", "loss_weights": "probe_loss", "fed_pid": "cost"}
    return WORDS[own[method.name]] if method.name in own else []


def models_for(method: Method) -> list[Lie]:
    """Return lies about the model, one of them with the strongest claim that is not refused."""
    claims = [lie for lie in words_for(method) or [SAMPLES] if "1e30" not in lie.words]
    both = Lie("model x 1e6 and the claim", claims[-1].report, claims[-1].anchor, scaled(1e6))
    return [*MODELS, both, VARIANCE]


# ------------------------------------------------------------------------------------------------ a run


class Hospitals(Listener):
    """Run six sites that answer at once, and record what the server makes of it."""

    def __init__(
        self, lie: Lie | None, liars: Sequence[str] = (LIAR,), always: bool = False, fields: Sequence[Field] = ()
    ) -> None:
        self.lie, self.liars, self.always, self.fields = lie, liars, always, fields
        self.over = False
        self.records: list[RoundRecord] = []
        self.models: list[State] = []

    def sites(self) -> list[str]:
        return SITES

    def expected(self) -> list[str]:
        return SITES

    def ask(self, question: Question) -> None:
        if question.name == TASK_CHECK:
            for site in question.sites:
                question.hand_over(site, says_nothing())
            return
        self.over = question.name == TASK_VALIDATE  # stop before the pictures
        if not self.models:
            first = address(question.task, question.sites[0]).params
            self.models.append({k: v.clone() for k, v in first.items()})
        for site in [] if self.over else question.sites:
            question.hand_over(site, self._answer(site, question.name, address(question.task, site)))

    def _answer(self, site: str, name: str, task: Message) -> Message:
        start = self.models[0]
        received = task.params if task.params is not None and task.params.keys() == start.keys() else start
        update, report, anchor = honest(site, received, int(task.current_round), self.fields)
        lie = self.lie if site in self.liars and (self.always or task.current_round == 0) else None
        meta: dict[str, Any] = {"version": __version__, "status": "ok", "stats": {}}
        if name == TASK_ANCHOR:
            if lie is not None and lie.anchor is not None:
                anchor |= {key: [lie.anchor] * len(anchor["layers"]) for key in ("cka", "dissimilarity")}
            return Message(meta={**meta, "report": anchor}, current_round=task.current_round)
        assert name == TASK_TRAIN
        changed = dict(lie.report) if lie else {}
        meta["num_samples"] = changed.pop("num_samples", 120 + 20 * SITES.index(site))
        if lie is not None and lie.model is not None:
            update = lie.model(received, update)
        meta["report"] = {**report, **changed}
        return Message(
            update, True, [{"metric": "dice", "split": "validation", "value": 0.5}], meta, task.current_round
        )

    def stopped(self) -> bool:
        return self.over

    def say(self, text: str, *, warning: bool = False) -> None:
        pass

    def watch(self, seen: Callable[[str], None]) -> None:
        pass

    def aggregated(self, state: Mapping[str, torch.Tensor]) -> None:
        self.models.append(dict(state))

    def round_done(self, record: RoundRecord, metric: str) -> None:
        self.records.append(record)


@dataclass
class Outcome:
    """Store the outcome of one run.

    Attributes:
        weights: of the liar by round (by layer: the median and the largest); ``None``: refused.
        moved: distance of the model from the honest run's after round 0, in lengths of that run's own step.
        variance: lowest running variance after round 0.
        mean_loss: FedMRL's, after round 0.
        records: everything.
    """

    weights: list[tuple[float, float] | None]
    moved: float
    variance: float
    mean_loss: float | None
    records: list[RoundRecord]


def run(
    method: Method,
    lie: Lie | None,
    bounds: Mapping[str, Any] | None = None,
    rounds: int = 2,
    liars: Sequence[str] = (LIAR,),
    always: bool = False,
) -> Hospitals:
    """Run rounds of a method in which the liars lie in the first round, or always."""
    hospitals = Hospitals(lie, liars, always, method.rule.report_fields)
    with tempfile.TemporaryDirectory(prefix="fairflare-liar-") as name:
        place = Place(Path(name), Path(name) / "kept", "liar")
        settings = RunSettings(num_rounds=rounds, **(bounds or {}))
        rule = build(method.rule, method.server)
        with contextlib.suppress(Stopped):
            Rounds(Nothing(isinstance(rule, MakesTensors)), rule, settings, hospitals, place, [hospitals]).run()
    assert len(hospitals.records) == rounds
    return hospitals


def averaging() -> list[Method]:
    """Return the methods in which a part of a site reaches other sites."""
    return [method for name, method in all_methods().items() if name != "solo"]


@cache
def without_lie(name: str) -> Hospitals:
    """Run the same rounds when every site is honest."""
    return run(all_methods()[name], None)


def outcome(method: Method, lie: Lie, bounds: Mapping[str, Any] | None = None, rounds: int = 2) -> Outcome:
    """Return the effect of a lie."""
    honest_run, lying = without_lie(method.name), run(method, lie, bounds, rounds)
    start, fair, found = honest_run.models[0], honest_run.models[1], lying.models[1]
    first = lying.records[0]
    return Outcome(
        weights=[weight(record) for record in lying.records],
        moved=_distance(found, fair) / _distance(fair, start),
        variance=float(found["norm.running_var"].min()),
        mean_loss=first.values.get("mean_loss"),
        records=lying.records,
    )


def weight(record: RoundRecord, site: str = LIAR) -> tuple[float, float] | None:
    """Return median and largest weight of a site over the layers; ``None``: it is not in the round."""
    if site not in record.accepted:
        return None
    if record.site_weights is not None:
        return record.site_weights[site], record.site_weights[site]
    by_layer = [by[site]["weight"] for by in (record.layers or {}).values()]
    return statistics.median(by_layer), max(by_layer)


def held(records: Sequence[RoundRecord], sites: Sequence[str]) -> float:
    """Return the largest share of any layer, in any round, that sites hold together."""
    found = [0.0]
    for record in records:
        by_layer = [{k: v["weight"] for k, v in by.items()} for by in (record.layers or {}).values()]
        for weights in [record.site_weights] if record.site_weights is not None else by_layer:
            found.append(math.fsum(weights.get(site, 0.0) for site in sites))
    return max(found)


def largest_share(method: Method, sites: Sequence[str], bounds: Mapping[str, Any] | None = None) -> float:
    """Return the largest share that liars reach by any of the lies, told in each of four rounds."""
    told = [SAMPLES, *words_for(method)]
    return max(held(run(method, lie, bounds, 4, sites, True).records, sites) for lie in told)


def share_of_class(sites: Sequence[str], bounds: Mapping[str, Any] | None = None) -> float:
    """Return the liars' share in what CReFF's server makes of a class that only they have."""
    influence = Influence(Bounds(**(bounds or {})), len(SITES))
    weights = influence.bound_made({site: 1 / len(sites) if site in sites else 0.0 for site in SITES})
    return math.fsum(weights[site] for site in sites)


def _distance(a: State, b: State) -> float:
    return math.sqrt(sum(float((a[k].double() - b[k].double()).square().sum()) for k in a if a[k].is_floating_point()))


# ------------------------------------------------------------------------------------------------ tables


def _weight(found: tuple[float, float] | None) -> str:
    if found is None:
        return "refused"
    text = f"{found[0]:.7f}" if 0.99995 < found[0] < 1 else f"{found[0]:.3f}"
    return text if math.isclose(*found, rel_tol=1e-3) else f"{text} (up to {found[1]:.3f})"


def words_table() -> list[str]:
    """Return the table of weights after a claim."""
    rows = [
        "| method | honest | claim | weight without bounds | one honest round later | with bounds | later |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    losses = []
    for method in averaging():
        fair = weight(without_lie(method.name).records[0])
        for lie in [SAMPLES, *words_for(method)]:
            free, held = outcome(method, lie), outcome(method, lie, FOR_HOSPITALS)
            if lie is SAMPLES and free.weights[0] == fair:
                continue  # the method does not use this field
            cells = [_weight(w) for w in (*free.weights, *held.weights)]
            rows.append(f"| {method.title} | {_weight(fair)} | {lie.words} | {' | '.join(cells)} |")
            if free.mean_loss is not None:
                usual = without_lie(method.name).records[0].values["mean_loss"]
                losses.append(
                    f"{method.title}, {lie.words}: the mean loss F that the sites are told is {free.mean_loss:.3g} "
                    f"(honest: {usual:.3g}); the weights do not depend on it."
                )
    return [*rows, "", *losses]


def models_table() -> list[str]:
    """Return the table of how far a model moves."""
    head = [lie.words for lie in models_for(next(iter(all_methods().values())))]
    rows = ["| method | " + " | ".join(f"{text}: without | with" for text in head) + " |"]
    rows.append("| --- |" + " ---: | ---: |" * len(head))
    for method in averaging():
        cells = []
        for lie in models_for(method):
            for bounds in (None, FOR_HOSPITALS):
                found = outcome(method, lie, bounds)
                value = found.variance if lie is VARIANCE else found.moved
                cells.append(f"{value:.2g}" if value >= 1e3 or value == 0 else f"{value:.2f}")
        rows.append(f"| {method.title} | {' | '.join(cells)} |")
    return rows


def pairs_table() -> list[str]:
    """Return the table of shares of one and of two liars."""
    columns = [(liars, bounds) for liars in ([LIAR], PAIR) for bounds in (None, BEFORE, FOR_HOSPITALS)]
    rows = [
        "| method | one: no bounds | `max_weight` 0.4 | exported | two: no bounds | `max_weight` 0.4 | exported |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for method in averaging():
        shares = [largest_share(method, liars, bounds) for liars, bounds in columns]
        rows.append(f"| {method.title} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    shares = [share_of_class(liars, bounds) for liars, bounds in columns]
    return [*rows, f"| CReFF, classifier made at the server | {' | '.join(f'{share:.3f}' for share in shares)} |"]


def memory_table() -> list[str]:
    """Return the table of FedISM's moving average after a lie."""
    rows = ["| claim in round 0 | bounds | round 0 | 1 | 2 | 3 |", "| --- | --- | --- | --- | --- | --- |"]
    method = all_methods()["fed_ism"]
    for lie in WORDS["sharpness"][:2]:
        for words, bounds in (("none", None), ("all", FOR_HOSPITALS)):
            weights = [_weight(w) for w in outcome(method, lie, bounds, rounds=4).weights]
            rows.append(f"| {lie.words} | {words} | {' | '.join(weights)} |")
    return rows


def tables() -> str:
    """Return all tables in Markdown."""
    torch.set_num_threads(1)
    given = describe_bounds(Bounds(**FOR_HOSPITALS), len(SITES))
    parts = [
        [f"Six sites, bounds: {given}. Weights of the liar; by layer: the median (up to: the largest).", ""],
        words_table(),
        ["", "How far the next global model is from the one without a lie, in lengths of an honest round's own step;",
         "last two columns: the lowest running variance of batch norm in it (honest: about 0.9).", ""],
        models_table(),
        ["", "FedISM remembers its weights (beta 0.5); the site is honest again from round 1 on:", ""],
        memory_table(),
        ["", "Largest share of any layer, in any of four rounds, that one liar of six holds, or two together, with any",
         "of the claims above told in each round; before, a job for hospitals had `max_weight` 0.4 whatever the",
         "number of sites. Last line: of a class that nobody else has.", ""],
        pairs_table(),
    ]  # fmt: skip
    return "\n".join(line for part in parts for line in part)


def main() -> None:
    logging.disable(logging.WARNING)  # 200 runs would log too much
    print(tables())


if __name__ == "__main__":
    main()
