"""Attack FLARE's federated statistics with hostile answers: the controller's callbacks, and our page's document."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import StatisticsConstants as StC

from ..flare.test_statistics import DATASET, PHASES, SITES, honest, job, sent
from .bench import LONGEST, Verdict
from .mutations import CODES, HEAVY, VALUES

STATS = "stats"
BAD = "site-2"


def attack_statistics(folder: Path, method: str, phase: str, seed: int, cases: Any = (), *, replies: int = 0) -> Any:
    """Attack as :func:`tests.fuzz.bench.attack` does; the method does not matter."""
    verdicts, sent_so_far = [], 0
    for index in cases or iter(range(10**9)):
        verdicts.append(_judged(folder / str(index), index, random.Random(f"{STATS}/{seed}/{index}")))
        sent_so_far += verdicts[-1].sent
        if replies and sent_so_far == replies:
            break
    return verdicts


def _judged(folder: Path, index: int, rng: random.Random) -> Verdict:
    phase = rng.choice(PHASES)
    told = honest(phase)
    verdict = Verdict(index, _change(told, rng))
    try:
        answer = _answer(phase, told, rng)
    except Exception as error:  # FOBS cannot write it
        verdict.sent, verdict.reason = False, f"{type(error).__name__}: {error}"
        return verdict

    def of(site: str, now: str) -> Any:
        return answer if (site, now) == (BAD, phase) else sent(now, honest(now))

    folder.mkdir(parents=True)
    try:
        controller, panics = job(of, folder)
        document = json.loads((folder / "fairflare" / "stats.json").read_text())
    except Exception as error:
        verdict.fault("killed", f"{type(error).__name__}: {error}")
        return verdict
    verdict.accepted, verdict.reason = not controller.left_out, controller.left_out.get(BAD, "")
    if panics:
        verdict.fault("killed", panics[0])
    if {*controller.left_out} - {BAD}:
        verdict.fault("other", f"another site is out too: {controller.left_out}")
    reason = verdict.reason
    if not verdict.accepted and (
        not reason.startswith(f"site {BAD!r}") or len(reason) > LONGEST or not reason.isprintable()
    ):
        verdict.fault("unnamed", f"{len(reason)} characters: {reason!r}")
    if sorted(document["sites"]) != [site for site in SITES if verdict.accepted or site != BAD]:
        verdict.fault("changed", f"the document is of {sorted(document['sites'])}")
    for site in SITES:
        if site != BAD and document["sites"][site]["counts"]["cases"] != 20:
            verdict.fault("changed", f"{site} has other figures")
    return verdict


def _change(told: dict[str, Any], rng: random.Random) -> str:
    """Change an answer at one place, and return the change in words."""
    path = rng.choice([*_places(told)])
    node: Any = told
    for key in path[:-1]:
        node = node[key]
    how = rng.choice(("missing", "renamed", "of another name", *[*VALUES] * 2, *HEAVY))
    value = node[path[-1]]
    if how == "missing":
        del node[path[-1]]
    elif how == "renamed":
        node[rng.choice(("x", "", "k" * 5000, "a\x1b[2J\n"))] = node.pop(path[-1])
    elif how == "of another name":
        node[rng.choice(("x", DATASET, "weight", "width"))] = value
    elif hasattr(value, "bins") and value.bins and rng.random() < 0.8:  # within a histogram
        at = rng.randrange(len(value.bins))
        field = rng.choice(("low_value", "high_value", "sample_count"))
        value.bins[at] = value.bins[at]._replace(**{field: (VALUES | HEAVY)[how]()})
    else:
        node[path[-1]] = (VALUES | HEAVY)[how]()
    return f"{'.'.join(path)} {how}"


def _places(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _places(value, (*path, key))


def _answer(phase: str, told: Any, rng: random.Random) -> Any:
    """Return the sent answer: mostly the changed one, sometimes something else altogether."""
    kind = rng.randrange(12)
    if kind == 0:
        return make_reply(rng.choice(CODES))
    if kind == 1:
        return rng.choice((Shareable(), DXO(DataKind.STATISTICS, {phase: b"\xff"}).to_shareable()))
    if kind == 2:
        value = VALUES[rng.choice([*VALUES])]()
        return DXO(DataKind.STATISTICS, {StC.STATISTICS_TASK_KEY: phase, phase: value}).to_shareable()
    return sent(phase, told)
