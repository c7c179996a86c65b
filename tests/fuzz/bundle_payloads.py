"""Make a healthy configuration of a MONAI bundle hostile, by changes that a generator draws.

The words are in ``hostile_bundles.txt``. A payload does nothing but write a file, the canary, where it is run.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

Config = dict[str, Any]
FILE = Path(__file__).with_name("hostile_bundles.txt")
SECTIONS = re.split(r"^\[(\w+)\]\n", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
#: Section -> its lines.
WORDS = {name: text.strip("\n").split("\n") for name, text in pairwise(SECTIONS) if re.fullmatch(r"\w+", name)}
TRANSFORMS = "train#deterministic_transforms"
FUNCTION = f"{TRANSFORMS}#3#func"
OBJECTS = ("network_def", "loss", "optimizer", "train#preprocessing", f"{TRANSFORMS}#2", "validate#inferer")
NUMBERS = (10**7, 10**9, 10**18, 10**400, -1, -(10**9), 0, 1e308, 1e-320, *map(float, ("nan", "inf", "-inf")))
UNFIT = (
    '{"_target_": "UNet", "_target_": "os.system"}',
    "[1",
    "\0",
    "NaN",
    "9" * 9000,
    '"\\ud800"',
    f'"{"y" * 10**7}"',
)


@dataclass
class Change:
    """Hold a hostile configuration; ``text``, in place of ``config``, is the file as it is written.

    What ``may_pass`` may be harmless too, and need not be refused.
    """

    name: str
    config: Any
    text: str | None = None
    suffix: str = ".json"
    may_pass: bool = False


def drawn(rng: random.Random, section: str, canary: str) -> str:
    """Return a line of a section, with the canary in it."""
    line = rng.choice(WORDS[section]).replace("SHELL", repr(f"touch {canary}")).replace("FILE", repr(canary))
    line = line.replace("CANARY", canary).replace("BIG", str(rng.choice((10**5, 10**7, 10**9, 10**10))))
    return line.replace("\\n", "\n").replace("\\r", "\r").replace("\\x00", "\0") if section == "calls" else line


def put(config: Config, key: str, value: Any) -> None:
    """Set the value of a key."""
    *steps, last = [int(step) if step.isdecimal() else step for step in key.split("#")]
    node: Any = config
    for step in steps:
        node = node[step]
    node[last] = value


def as_json(config: Config, key: str, body: str) -> str:
    """Return the file with a raw text at a key."""
    put(config, key, "BODY")
    return json.dumps(config).replace('"BODY"', body)


def expressions(rng: random.Random, config: Config, canary: str) -> Change:
    """Place chains of attributes, and calls in all that an expression may consist of."""
    if rng.random() < 0.25:
        kinds = rng.choices(("dunders", "names"), (2, 1), k=rng.choice((1, 2, 3, 6, 30)))
        names = [rng.choice(WORDS["roots"]), *(rng.choice(WORDS[kind]) for kind in kinds)]
        text = f"{'.'.join(names)}{rng.choice(('', '()', '[0]', '(1)', '.x'))}"
    else:
        text = drawn(rng, "calls", canary)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            text = rng.choice(WORDS["wraps"]).format(text)
    value: Any = f"${text}"
    key, how = rng.choice(WORDS["places"]), rng.choice(("", "", "@hidden", "%hidden", "$[@hidden][0]", "[]", "{}"))
    if "hidden" in how:
        config["hidden"], value = value, how
    elif how:
        value = [value] if how == "[]" else {"_target_": "torch.nn.CrossEntropyLoss", "ignore_index": value}
    put(config, key, value)
    return Change(f"{key} {how} {text[:90]}", config, suffix=rng.choice((".json", ".yaml")))


def functions(rng: random.Random, config: Config, canary: str) -> Change:
    """Give functions of an array that do more than compute."""
    whole = rng.choice(("{}", "({}) * 1", "[{}][0]", "np.concatenate(tuple([{}, x]))"))
    text = f"lambda {drawn(rng, 'heads', canary)}: {whole.format(drawn(rng, 'functions', canary))}"
    put(config, FUNCTION, f"${text}")
    return Change(f"{FUNCTION} {text}", config)


def targets(rng: random.Random, config: Config, canary: str) -> Change:
    """Name classes and functions that no site names."""
    odd = rng.random() < 0.1
    name = json.loads(drawn(rng, "odd_targets", canary)) if odd else drawn(rng, "targets", canary)
    key = rng.choice((*OBJECTS, "network_def#norm"))
    put(config, key, {"_target_": name, **json.loads(drawn(rng, "more", canary))})
    return Change(f"{key} target {name!r}", config, may_pass=name == "SaveImaged")  # which is left out


def fields(rng: random.Random, config: Config, canary: str) -> Change:
    """Set words beside a target: MONAI's own, and arguments that load."""
    key, field = rng.choice(OBJECTS), json.loads(drawn(rng, "fields", canary))
    for name, value in field.items():
        put(config, f"{key}#{name}", value)
    return Change(f"{key} has {field!r}", config)


def steps(rng: random.Random, config: Config, canary: str) -> Change:
    """Insert transforms that wait, swell, or write; those that save images are left out, and the rest works."""
    step = {"keys": rng.choice(("image", ["image", "label"])), **json.loads(drawn(rng, "steps", canary))}
    train = config["train"]
    where = rng.choice(("random_transforms", "deterministic_transforms", "postprocessing"))
    node = train[where]["transforms"] if where == "postprocessing" else train[where]
    node.insert(rng.choice((0, 1, len(node))), step)
    return Change(f"{where} {step!r:.90}", config, may_pass=step["_target_"] == "SaveImaged")


def numbers(rng: random.Random, config: Config, canary: str) -> Change:
    """Set numbers and lists that are too large, which may be harmless, and expressions that make them."""
    key = rng.choice((*WORDS["places"], "network_def#in_channels", "train#random_transforms#0#num_samples"))
    value: Any = f"${drawn(rng, 'sums', canary)}" if rng.random() < 0.5 else rng.choice(NUMBERS)
    if rng.random() < 0.3:
        value = [rng.choice((1, 2, value))] * rng.choice((2, 9, 10**3, 10**5))
    put(config, key, value)
    return Change(f"{key} = {value!r:.90}", config, may_pass=True)


def nestings(rng: random.Random, config: Config, canary: str) -> Change:
    """Write expressions and files that are nested deep, or long."""
    key, deep = rng.choice((*WORDS["places"], FUNCTION)), rng.choice((60, 200, 1000, 5000, 20000))
    if rng.random() < 0.7:
        begin, inner, close = (*rng.choice(WORDS["nests"]).split(" "), "", "")[:3]
        put(config, key, f"${f'{begin} ' * deep}{inner}{close * deep}")
        return Change(f"{key} {deep} deep {begin}", config, may_pass=True)
    begin, end = rng.choice((("[", "]"), ('{"a":', "}"), ('{"_target_":"Compose","transforms":[', "]}"), ("[1,", "1]")))
    body = f"{begin * deep}1{end * deep}"
    return Change(f"{key} {deep} deep {begin}", None, as_json(config, key, body), may_pass=True)


def cycles(rng: random.Random, config: Config, canary: str) -> Change:
    """Set references and macros that lead nowhere, to themselves, or to twice as much at each step."""
    key, mark, kind = rng.choice(WORDS["places"]), rng.choice(("@", "%", "$@")), rng.randrange(6)
    length = rng.choice((1, 2, 3, 50, 1200)) if kind < 2 else 30
    value: Any = f"{mark}a0"
    if kind == 5:  # each is a little work
        value = [f"$[{n}, {rng.choice(('[i for i in range(5000)]', 'sum([1] * 9000)'))}]" for n in range(5000)]
    elif kind == 4:
        value = drawn(rng, "references", canary)
    elif kind == 3:
        value = rng.choice((f"{mark}{key}", {"_target_": "Compose", "transforms": [f"{mark}{key}"]}, [f"{mark}{key}"]))
    else:
        for n in range(length):
            one = f"a{(n + 1) % length}"
            doubled = (
                [f"{mark}{one}"] * 4,
                f"$[@{one}, @{one}]",
                f"$@{one} + @{one}",
                {"x": f"%{one}", "y": f"@{one}"},
            )
            config[f"a{n}"] = rng.choice((f"{mark}{one}", [f"{mark}{one}"]) if kind < 2 else doubled)
        if kind == 2:
            config["a29"] = [1, 2]
    put(config, key, value)
    return Change(f"{key} = {value!r:.90} {kind} {length}", config, may_pass=kind == 2)


def files(rng: random.Random, config: Config, canary: str) -> Change:
    """Write files that a reader of YAML or JSON chokes on."""
    key, deep = rng.choice(WORDS["places"]), rng.choice((6, 9, 25))
    if rng.random() < 0.3:
        body = rng.choice(UNFIT)
        return Change(f"{key} JSON {body[:30]}", None, as_json(config, key, body), may_pass=UNFIT.index(body) > 2)
    kind, head, body = (*drawn(rng, "yaml", canary).split(" "), "*x")[:3]
    long = {
        "BOMB": "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 9)}]\n" for n in range(deep)), "-": "",
        "HEX": f"0x{'f' * 9000}", "DIGITS": "9" * 9000, "DEEP": f"x: &x {'[' * 3000}{']' * 3000}",
        "ANCHORS": "".join(f"k{n}: &k{n} {n}\n" for n in range(3000)),
    }  # fmt: skip
    put(config, key, "BODY")
    head, body = (long.get(part, part).replace("·", " ").replace("*LAST", f"*a{deep - 1}") for part in (head, body))
    text = f"{head}\n{yaml.safe_dump(config, sort_keys=False, width=10**6)}".replace("BODY", body)
    return Change(f"{key} YAML {kind}", None, text, ".yaml", kind.endswith("?") or kind == "bomb")


FAMILIES: dict[str, Callable[[random.Random, Config, str], Change]] = {
    family.__name__: family
    for family in (expressions, functions, targets, fields, steps, numbers, nestings, cycles, files)
}
