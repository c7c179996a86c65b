"""Provide small states, and legal answers made from a rule's declared fields, for tests of server halves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fairflare import __version__
from fairflare.core.features.layers import layers_of
from fairflare.exchange.messages import Message
from fairflare.federation.collecting.collector import Collector, LikeReceived
from fairflare.federation.plan.bounds import Bounds
from fairflare.methods.base.reports import Field
from fairflare.methods.base.rule import Rule, TwoPhase, Weighing, anchor_fields
from tests.methods.support import net_state as small_state
from tests.tiny import rows

SITES = ("a", "b", "c")


def net_state(seed: int) -> dict[str, torch.Tensor]:
    """Return a network's state with the layer that Fed-LWR-v2 looks at."""
    extra = torch.randn(2, 2, generator=torch.Generator().manual_seed(seed + 1000))
    return {**small_state(seed), "down_3.conv.weight": extra}


RECEIVED = net_state(99)
LAYERS = list(dict.fromkeys(layers_of(RECEIVED).values()))


def example_report(fields: Iterable[Field], index: int, layers: Sequence[str] = LAYERS) -> dict[str, Any]:
    """Return a legal value for every declared field; numbers differ from site to site."""
    report: dict[str, Any] = {}
    for field in fields:
        length = 1 if field.name.startswith("group_") else len(layers)  # a site is one group, unless told otherwise
        length = len(report[field.same_length_as]) if field.same_length_as else length
        plain = {"flag": True, "text": "same", "names": list(layers), "array": b""}
        if field.kind == "vector":
            report[field.name] = [_number(field, index + 0.1 * place) for place in range(length)]
        else:
            report[field.name] = plain[field.kind] if field.kind in plain else _number(field, index)
    return {**report, **({"rows": 1.0} if "rows" in report else {})}


def _number(field: Field, index: float) -> float:
    low = field.low if math.isfinite(field.low) else 0.0
    span = min(field.high - low, 1.0)
    value = 0.1 + 0.2 * index
    if field.kind == "whole":
        return int(min(max(low, 1) + index, field.high))
    return value if field.low <= value <= field.high else low + span * value


def train_message(
    site: str,
    state: dict[str, torch.Tensor] | None = None,
    *,
    rule: Rule | None = None,
    samples: Any = 10,
    current_round: Any = 0,
    **meta: Any,
) -> Message:
    """Return a site's update from :data:`RECEIVED` to ``state``."""
    index = SITES.index(site)
    state = net_state(index) if state is None else state
    report = example_report(rule.report_fields, index) if rule is not None else {}
    head = {"version": __version__, "status": "ok", "num_samples": samples, "report": report, "stats": {}, **meta}
    return Message(
        params={name: state[name] - RECEIVED[name] for name in state},
        is_update=True,
        metrics=rows({"dice": 0.5}, "validation"),
        meta=head,
        current_round=current_round,
    )


def anchor_message(site: str, rule: Rule, *, current_round: int = 0, **meta: Any) -> Message:
    report = example_report(anchor_fields(type(rule)), SITES.index(site))
    head = {"version": __version__, "status": "ok", "report": report, **meta}
    return Message(meta=head, current_round=current_round)


def begun(
    rule: Rule,
    folder: Path | None = None,
    current_round: int = 0,
    sites: Sequence[str] = SITES,
    bounds: Bounds | None = None,
    memory: float | None = None,
) -> Collector:
    """Return a collector at the start of a round of :data:`RECEIVED`."""
    rule.directives(current_round, 4, sites)
    collector = Collector(rule, folder, bounds, memory=memory)
    start(collector, current_round, sites)
    return collector


def start(collector: Collector, current_round: int, sites: Sequence[str] = SITES) -> None:
    collector.begin(current_round, 4, shape=LikeReceived(RECEIVED), received=RECEIVED, sites=sites)


def take(collector: Collector, site: str, message: Message) -> None:
    collector.keep(collector.read_training(site, message))


def finish(collector: Collector, order: Sequence[str] | None = None) -> tuple[dict[str, torch.Tensor], Weighing]:
    """Finish a round: drop misfits, add reports about the anchor if the rule wants them, and aggregate."""
    rule = collector.rule
    collector.screen()
    if isinstance(rule, TwoPhase) and len(collector.accepted) > 1:
        number = collector._round.number
        for site in order or collector.accepted:
            message = anchor_message(site, rule, current_round=number)
            collector.keep_anchor(site, collector.read_anchor(site, message))
    return collector.aggregate()


def whole_round(
    rule: Rule,
    folder: Path,
    current_round: int = 0,
    order: Sequence[str] = SITES,
    bounds: Bounds | None = None,
    memory: float | None = None,
) -> tuple[dict[str, torch.Tensor], Weighing]:
    """Do one round in which the sites of ``order`` answer, in that order."""
    collector = begun(rule, folder, current_round, bounds=bounds, memory=memory)
    for site in order:
        take(collector, site, train_message(site, rule=rule, current_round=current_round))
    return finish(collector, order)


def naive_average(
    states: dict[str, dict[str, torch.Tensor]], weights: dict[str, dict[str, float]], step: float = 1.0
) -> dict[str, torch.Tensor]:
    """Average by float64 loops; ``weights``: by tensor name and site; ``step``: from :data:`RECEIVED`."""
    result = {}
    for name, first in next(iter(states.values())).items():
        if first.is_floating_point():
            total = torch.zeros_like(first, dtype=torch.float64)
            for site, state in states.items():
                total += weights[name][site] * state[name].double()
            start, length = RECEIVED[name].double(), 1.0 if name.endswith("running_var") else step
            result[name] = start + length * (total - start)
        else:
            result[name] = torch.stack([state[name] for state in states.values()]).max()
    return result
