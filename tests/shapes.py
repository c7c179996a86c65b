"""Choose one method of each shape, for tests in which methods of one shape take the same path."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from fairflare.methods.base.catalog import Method, all_methods
from fairflare.methods.base.rule import MakesTensors, Rule, SendsBeside, SendsParts, Steps, TwoPhase
from fairflare.methods.base.training import LocalTraining

CAPABILITIES = (TwoPhase, Steps, MakesTensors, SendsParts, SendsBeside)
HOOKS = ("begin_round", "loss", "step", "train", "report", "home", "check")


def of_what_travels(method: Method) -> Hashable:
    """Return what a method does with the tensors that pass between server and sites."""
    rule, training = method.rule, method.training(**method.site)
    return (
        *(issubclass(rule, one) for one in CAPABILITIES),
        rule.move is not Rule.move,
        bool(rule.reads_models),
        type(training).sends is not LocalTraining.sends,
        type(training.home),
        "adapters" in method.learns,
        method.name == "crt",  # rounds of their own
    )


def of_a_training(method: Method) -> Hashable:
    """Return the code of a method's training: its hooks, whatever class has them, and what stays at a site."""
    training = method.training(**method.site)
    return (*(getattr(type(training), hook) for hook in HOOKS), type(training.home))


def of_its_steps(method: Method) -> Hashable:
    """Return the code that runs from the first to the last step of a method's training, and what stays at a site."""
    training = method.training(**method.site)
    begins = type(training).begin_round is not LocalTraining.begin_round
    return (begins, *(getattr(type(training), hook) for hook in ("loss", "step", "train")), type(training.home))


def one_each(shape: Callable[[Method], Hashable], kind: str = "classification") -> list[str]:
    """Return the first method of each shape that learns a kind of task; federated averaging is the first of all."""
    methods = sorted(all_methods().values(), key=lambda method: method.name != "fed_avg")
    found: dict[Hashable, str] = {}
    for method in methods:
        if kind not in method.kinds or (kind == "segmentation" and "adapters" in method.learns):
            continue
        found.setdefault(shape(method), method.name)
    return list(found.values())
