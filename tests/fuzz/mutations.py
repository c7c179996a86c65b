"""Make the changes of a good reply that an attack draws by a seed, each with a name.

A case is told by ``(method, phase, seed, index)`` alone. Two of three cases are one change, in an order that the seed
shuffles, so that a long walk makes them all; every third is two or three changes at once.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from nvflare.apis.shareable import Shareable

Change = Callable[[Any, random.Random], Any]  # of the reply, in place; what it returns is sent in its place
FORGED = "a\nRound 1: site-1 left out\x1b[2J\x00\u202e"
ESCAPED = "x\x1b[31m\r\n"


@dataclass
class Case:
    """Describe one hostile answer.

    Attributes:
        names: of the changes.
        changes: to make, in this order.
        delivery: how it is handed in: ``""`` (as it should be), ``"twice"``, ``"good first"``, ``"late"``,
            ``"before"``, ``"for another"``, ``"as another task"``.
    """

    names: list[str]
    changes: list[Change]
    rng: random.Random
    delivery: str = ""

    @property
    def name(self) -> str:
        return " + ".join([*self.names, *([self.delivery] if self.delivery else [])])

    def apply(self, reply: Any) -> Any:
        for number, change in enumerate(self.changes):
            try:
                reply = change(reply, self.rng)
            except Exception:
                if not number:
                    raise
                self.names[number] += " (impossible after that)"  # NumPy knows no sparse tensors, for example
        return reply


@dataclass
class Cases:
    """Hold all cases of one method and phase.

    Args:
        template: a good reply; its places are what is changed.
        key: what the draw depends on besides the number of the case.
    """

    template: Shareable
    key: str
    singles: list[tuple[str, Change]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.singles = list(all_changes(self.template))
        random.Random(self.key).shuffle(self.singles)
        # What the method itself reads comes soon also in a short walk.
        own = [single for single in self.singles if single[0].startswith("fairflare.report.")]
        rest = [single for single in self.singles if not single[0].startswith("fairflare.report.")]
        pairs = itertools.zip_longest(own, rest)
        self.singles = [single for pair in pairs for single in pair if single is not None]

    def __getitem__(self, index: int) -> Case:
        rng = random.Random(f"{self.key}/{index}")
        if index % 3 == 2:
            drawn = rng.sample(self.singles, rng.choice((2, 2, 3)))
            delivery = rng.choice(DELIVERIES) if rng.random() < 0.2 else ""
        else:
            place = index - index // 3
            drawn, delivery = [self.singles[place % len(self.singles)]], ""
            if place >= len(self.singles):  # all done once: again, handed in otherwise
                delivery = rng.choice(DELIVERIES)
        if drawn[0][0].startswith("delivery "):
            drawn, delivery = drawn[1:], drawn[0][0].removeprefix("delivery ")
        drawn = [(name, change) for name, change in drawn if not name.startswith("delivery ")]
        return Case([name for name, _ in drawn], [change for _, change in drawn], rng, delivery)


DELIVERIES = ("twice", "good first", "late", "before", "for another", "as another task")

# ------------------------------------------------------------------------------------------------ values


def _deep(levels: int) -> Any:
    value: Any = 1
    for i in range(levels):
        value = {"a": value} if i % 2 else [value]
    return value


PLAIN = "None True False 0 1 -1 7.0 -0.5 -0.0 1e-308 1e30 1e308 -1e308"
#: name -> value; made anew each time.
VALUES: dict[str, Callable[[], Any]] = {
    **{text: partial(ast.literal_eval, text) for text in PLAIN.split()},
    **{text: partial(float, text) for text in ("nan", "inf", "-inf")},
    "2**63": lambda: 2**63,
    "-2**63": lambda: -(2**63),
    "10**18": lambda: 10**18,
    "10**400": lambda: 10**400,
    "empty text": lambda: "",
    "blank": lambda: " \t",
    "x": lambda: "x",
    "nan as text": lambda: "nan",
    "1 as text": lambda: "1",
    "forged": lambda: FORGED,
    "long text": lambda: "y\n" * 5000,
    "no bytes": lambda: b"",
    "bytes": lambda: b"\x00\xff" * 150,
    "[]": lambda: [],
    "[1]": lambda: [1],
    "[[]]": lambda: [[]],
    "[nan]": lambda: [math.nan],
    "[text]": lambda: [ESCAPED],
    "(1, 2)": lambda: (1, 2),
    "set": lambda: {1, 2},
    "{}": dict,
    "{a: 1}": lambda: {"a": 1},
    "{1: 2}": lambda: {1: 2},
    "{forged: nan}": lambda: {FORGED: math.nan},
    "ordered dict": lambda: OrderedDict(a=OrderedDict(b=1)),
    "deep": lambda: _deep(150),
    "tensor": lambda: torch.tensor(0.5),
    "tensor nan": lambda: torch.tensor(math.nan),
    "tensor true": lambda: torch.tensor(True),
    "tensor of 3": lambda: torch.ones(3),
    "tensor of 0": lambda: torch.zeros(0),
    "np.float32": lambda: np.float32(0.5),
    "np.float64": lambda: np.float64(0.5),
    "np.float64 nan": lambda: np.float64(math.nan),
    "np.int64": lambda: np.int64(3),
    "np.bool_": lambda: np.bool_(True),
    "np array": lambda: np.ones(3),
    "np 0-d": lambda: np.array(1.0),
    "np text": lambda: np.array(["a"]),
    "np object": lambda: np.array([None]),
    "complex": lambda: 1j,
}
#: Slow to carry: only where a site could hope for something.
HEAVY: dict[str, Callable[[], Any]] = {
    "text of 2 MB": lambda: "r" * 2_000_000,
    "100001 numbers": lambda: [0.5] * 100_001,
    "20000 entries": lambda: {f"m{i}": 0.5 for i in range(20_000)},
    "very deep": lambda: _deep(450),
}
WEIGHTY = (
    "reason", "metrics", "cells", "value", "split", "metric", "initial_metrics", "report", "stats", "status", "data",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ places


def places(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of nested dicts except the model's tensors, which have changes of their own."""
    for key, value in node.items():
        here = (*path, key)
        yield here
        if isinstance(value, dict) and not any(isinstance(entry, torch.Tensor) for entry in value.values()):
            yield from places(value, here)
        for number, row in enumerate(value if isinstance(value, list) else ()):
            if isinstance(row, dict):
                yield from places(row, (*here, str(number)))


def _at(reply: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if isinstance(reply, list) and key.isdigit():
            reply = dict(zip(map(str, range(len(reply))), reply, strict=True))
        if not isinstance(reply, dict) or key not in reply:
            return None
        reply = reply[key]
    return reply if isinstance(reply, dict) else None


def _short(path: tuple[str, ...]) -> str:
    return ".".join(part.strip("_") for part in path if part not in ("DXO", "meta")) or "reply"


def _put(path: tuple[str, ...], make: Callable[[], Any]) -> Change:
    def change(reply: Any, rng: random.Random) -> Any:
        if (node := _at(reply, path[:-1])) is not None:
            node[path[-1]] = make()
        return reply

    return change


def _of(path: tuple[str, ...], what: Callable[[dict[str, Any], str, random.Random], None]) -> Change:
    """Return a change of an existing entry."""

    def change(reply: Any, rng: random.Random) -> Any:
        node = _at(reply, path[:-1])
        if node is not None and path[-1] in node:
            what(node, path[-1], rng)
        return reply

    return change


def _rename(node: dict[str, Any], key: str, rng: random.Random) -> None:
    node[rng.choice((key.upper() + "_", FORGED, "", key + " ", "k" * 5000))] = node.pop(key)


def _wrap(node: dict[str, Any], key: str, rng: random.Random) -> None:
    node[key] = rng.choice(([node[key]], {key: node[key]}, (node[key], node[key])))


def _one_entry(node: dict[str, Any], key: str, rng: random.Random) -> None:
    """Return changes of a list: an entry hostile, too many, too few, twice, reversed; of a number: another scale."""
    value = node[key]
    if isinstance(value, list) and value:
        kind = rng.randrange(7)
        place = rng.randrange(len(value))
        if kind < 3:
            value[place] = VALUES[rng.choice(list(VALUES))]()
        elif kind == 3:
            value.append(value[-1])
        elif kind == 4:
            value.pop()
        elif kind == 5:
            value.reverse()
        else:
            value[place] = value[0]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        node[key] = value * rng.choice((-1, 0, 1e3, 1e6, 1e12, 1e300))
    elif isinstance(value, str):
        node[key] = value + rng.choice(("\n", "\x1b[0m", " ", "z" * 1000))


# ------------------------------------------------------------------------------------------------ tensors


def _with_one(value: float) -> Callable[[torch.Tensor], Any]:
    def change(tensor: torch.Tensor) -> Any:
        changed = tensor.clone() if tensor.is_floating_point() else tensor.float()
        changed.reshape(-1)[0] = value
        return changed

    return change


def _instead(make: Callable[[], Any], tensor: torch.Tensor) -> Any:
    return make()


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: partial(_instead, make) for name, make in VALUES.items()},
    "as list": lambda t: t.tolist(),
    "as text": str,
    "as numpy": lambda t: t.numpy(),
    "as numpy f16": lambda t: t.numpy().astype(np.float16),
    "as numpy f64": lambda t: t.numpy().astype(np.float64),
    "as numpy big endian": lambda t: t.numpy().astype(">f4"),
    "as numpy fortran": lambda t: np.array(t.numpy(), order="F"),
    "as numpy object": lambda t: t.numpy().astype(object),
    "as numpy text": lambda t: t.numpy().astype(str),
    "as numpy date": lambda t: np.zeros(t.shape, "datetime64[s]"),
    "as numpy longdouble": lambda t: t.numpy().astype(np.longdouble),
    "as numpy uint16": lambda t: np.zeros(t.shape, np.uint16),
    "float16": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "float64": lambda t: t.double(),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "complex64": lambda t: t.to(torch.complex64),
    "int64": lambda t: t.long(),
    "int8": lambda t: t.to(torch.int8),
    "uint8": lambda t: t.to(torch.uint8),
    "bool": lambda t: t.bool(),
    "one more dimension": lambda t: t[None].clone(),
    "flat": lambda t: t.reshape(-1).clone(),
    "doubled": lambda t: torch.stack([t, t]),
    "transposed": lambda t: t.reshape(-1, 1).T.contiguous() if t.ndim < 2 else t.T.contiguous(),
    "not contiguous": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t.new_zeros(()).expand(t.shape),
    "zero-size": lambda t: t.new_zeros((0, *t.shape)),
    "sparse": lambda t: t.float().to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "without data": lambda t: t.to("meta"),
    "parameter": lambda t: torch.nn.Parameter(t.float()),
    "wants a gradient": lambda t: t.float().requires_grad_(),
    "one nan": _with_one(math.nan),
    "one inf": _with_one(math.inf),
    "one -inf": _with_one(-math.inf),
    "one 3e38": _with_one(3e38),
    "one -3e38": _with_one(-3e38),
    "one 1e20": _with_one(1e20),
    "one 1e-45": _with_one(1e-45),
    "all 1e38": lambda t: torch.full(t.shape, 1e38),
    "all -1e6": lambda t: torch.full(t.shape, -1e6),
    "overflows as float32": lambda t: torch.full(t.shape, 1e300, dtype=torch.float64),
    "largest int": lambda t: torch.full(t.shape, 2**63 - 1, dtype=torch.int64),
    "least int": lambda t: torch.full(t.shape, -(2**63), dtype=torch.int64),
}


def _also(make: Callable[[], dict[Any, Any]], model: dict[str, Any], rng: random.Random) -> Any:
    return {**model, **make()}


def _models() -> dict[str, Callable[[dict[str, Any], random.Random], Any]]:
    """Return changes of the whole model: ``change(tensors, rng)`` returns the tensors that are sent instead."""

    def each(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any], random.Random], Any]:
        return lambda model, rng: {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in model.items()}

    def without_one(model: dict[str, Any], rng: random.Random) -> Any:
        model.pop(rng.choice(list(model)))
        return model

    def called(name: str) -> Callable[[dict[str, Any], random.Random], Any]:
        def change(model: dict[str, Any], rng: random.Random) -> Any:
            old = rng.choice(list(model))
            return {name if key == old else key: value for key, value in model.items()}

        return change

    more: dict[str, Callable[[], dict[Any, Any]]] = {
        "one more tensor": lambda: {"extra": torch.ones(2)},
        "one more, forged": lambda: {FORGED: torch.ones(2)},
        "one more, long name": lambda: {"n" * 100_000: torch.ones(1)},
        "one more, number as name": lambda: {7: torch.ones(1)},
        "one more, None as name": lambda: {None: torch.ones(1)},
        "1000 more": lambda: {f"t{i}": torch.ones(1) for i in range(1000)},
    }
    return {
        "no tensor": lambda model, rng: {},
        "one tensor missing": without_one,
        "renamed": called("other"),
        "renamed, forged": called(FORGED),
        "renamed, empty": called(""),
        "renamed, bytes": called(b"name"),  # type: ignore[arg-type]
        "turned round": lambda model, rng: dict(reversed(model.items())),
        "as list": lambda model, rng: list(model.values()),
        "nested": lambda model, rng: {"model": model},
        "one storage": lambda model, rng: dict.fromkeys(model, next(iter(model.values()))),
        **{f"all {name}": each(change) for name, change in TENSORS.items() if name not in VALUES},
        **{name: partial(_also, make) for name, make in more.items()},
    }


def _model_changes(template: Shareable) -> Iterator[tuple[str, Change]]:
    path = ("DXO", "data")
    model = template["DXO"]["data"]
    for name in model:
        for what, make in TENSORS.items():

            def one(reply: Any, rng: random.Random, name: str = name, make: Any = make) -> Any:
                tensors = _at(reply, path)
                if tensors is not None and isinstance(tensors.get(name), torch.Tensor):
                    tensors[name] = make(tensors[name])
                return reply

            yield f"tensor {name}: {what}", one
    for what, of_model in _models().items():

        def whole(reply: Any, rng: random.Random, of_model: Any = of_model) -> Any:
            tensors = _at(reply, path)
            if tensors:
                reply["DXO"]["data"] = of_model(tensors, rng)
            return reply

        yield f"model: {what}", whole
    for at_once in range(3):  # several tensors, each with a change of its own

        def several(reply: Any, rng: random.Random) -> Any:
            tensors = _at(reply, path)
            for name in rng.sample(list(tensors or ()), min(2, len(tensors or ()))):
                if isinstance(tensors[name], torch.Tensor):
                    tensors[name] = TENSORS[rng.choice(list(TENSORS))](tensors[name])
            return reply

        yield f"two tensors ({at_once})", several


# ------------------------------------------------------------------------------------------------ all of them

KINDS = ("WEIGHTS", "WEIGHT_DIFF", "METRICS", "FL_MODEL", "ANALYTIC", "COLLECTION", "STATISTICS", "PSI", "APP_DEFINED")
CODES = (
    "EXECUTION_EXCEPTION", "EXECUTION_RESULT_ERROR", "TASK_ABORTED", "TASK_RESULT_FILTER_ERROR", "BAD_TASK_DATA",
    "EMPTY_RESULT", "MISSING_PEER_CONTEXT", "OK", "ok", "", "c" * 100_000,
)  # fmt: skip
HEAD = ("__headers__",)
OWN = ("DXO", "meta", "fairflare")


def all_changes(template: Shareable) -> Iterator[tuple[str, Change]]:
    """Return every single change of such a reply, by name."""
    for path in places(template):
        where = _short(path)
        yield f"{where} missing", _of(path, lambda node, key, rng: node.pop(key))
        yield f"{where} renamed", _of(path, _rename)
        yield f"{where} wrapped", _of(path, _wrap)
        for again in range(4 if len(path) > 2 else 1):
            yield f"{where} altered ({again})", _of(path, _one_entry)
        for name, make in VALUES.items():
            yield f"{where} = {name}", _put(path, make)
        if path[-1] in WEIGHTY:
            for name, make in HEAVY.items():
                yield f"{where} = {name}", _put(path, make)
    for path in ((*OWN, "reason"), (*OWN, "stats", "unknown"), (*OWN, "report", "unknown"), (*OWN, FORGED)):
        for name, make in {**VALUES, **HEAVY}.items():
            yield f"also {_short(path)!r} = {name}", _put(path, make)
    yield from _reasons()
    yield from _metrics(template)
    for kind in KINDS:
        yield f"kind {kind}", _put(("DXO", "kind"), (lambda k: lambda: k)(kind))
    for code in CODES:
        yield f"return code {code[:30]!r}", _put((*HEAD, "__rc__"), (lambda c: lambda: c)(code))
    yield "return code forged", _put((*HEAD, "__rc__"), lambda: FORGED)
    for header in ("submit_model_name", "validate_type", "__job_id__", "site_name", "__cookie_jar__", "start_round"):
        for name in ("x", "forged", "True", "[1]", "{}", "nan", "10**18"):
            yield f"header {header} = {name}", _put((*HEAD, header), VALUES[name])
    for name in ("client_name", "props", "NUM_STEPS_CURRENT_ROUND", "initial_metrics"):
        for value in ("None", "-1", "x", "forged", "bytes", "{}", "tensor", "nan", "1e308"):
            yield f"meta {name} = {value}", _put(("DXO", "meta", name), VALUES[value])
    yield "steps in FLARE's key only", _steps
    yield "an empty reply", lambda reply, rng: Shareable()
    yield "another object", lambda reply, rng: {"a": 1}
    yield "more content", lambda reply, rng: _more(reply)
    for delivery in DELIVERIES:
        yield f"delivery {delivery}", lambda reply, rng: reply
    if isinstance(template["DXO"]["data"], dict) and template["DXO"]["kind"] == "WEIGHT_DIFF":
        yield from _model_changes(template)
    else:
        yield "a model where none is due", _put(("DXO", "data"), lambda: {"w": torch.ones(2)})
        yield "a model of kind", lambda reply, rng: _kind(reply)


def _reasons() -> Iterator[tuple[str, Change]]:
    for status in ("failed", "skipped", "", "OK", "ok ", "no\nidea", None, True, 0, ["ok"], {"ok": 1}):
        for reason in ("few cases", FORGED, "", " ", "r" * 1_000_000, "\n" * 5000, None, 7, ["x"], b"x"):

            def change(reply: Any, rng: random.Random, status: Any = status, reason: Any = reason) -> Any:
                if (node := _at(reply, OWN)) is not None:
                    node["status"], node["reason"] = status, reason
                return reply

            yield f"status {status!r:.20} with reason {reason!r:.20}", change


def _metrics(template: Shareable) -> Iterator[tuple[str, Change]]:
    path = ("DXO", "meta", "initial_metrics") if "initial_metrics" in template["DXO"]["meta"] else ("DXO", "data")
    names = ("accuracy", "loss", "a/loss", FORGED, "", "m" * 300, "dice", 7, None, b"dice", "../dice", "=1+1", "a,b")
    for name in names:
        for value in ("nan", "inf", "7.0", "-0.5", "True", "None", "x", "1e308", "tensor", "np.float64", "[1]", "1"):
            yield f"metric {name!r:.20} = {value}", _put((*path, name), VALUES[value])  # type: ignore[arg-type]
    for count in (1001, 20_000):
        many = (lambda n: lambda: {f"m{i}": 0.5 for i in range(n)})(count)
        yield f"{count} metrics", _put(path, many)
    yield "1000 metrics with long names", _put(path, lambda: {f"{i}".rjust(200, "m"): 0.5 for i in range(1000)})


def _steps(reply: Any, rng: random.Random) -> Any:
    if (node := _at(reply, OWN)) is not None:
        node.pop("num_steps", None)
        reply["DXO"]["meta"]["NUM_STEPS_CURRENT_ROUND"] = VALUES[rng.choice(list(VALUES))]()
    return reply


def _more(reply: Any) -> Any:
    reply["other"] = FORGED
    return reply


def _kind(reply: Any) -> Any:
    if isinstance(reply.get("DXO"), dict):
        reply["DXO"].update(kind="WEIGHT_DIFF", data={"w": torch.full((2,), math.nan)})
    return reply
