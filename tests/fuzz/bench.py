"""Feed one hostile answer at a time into a real round, and check the outcome.

The yardstick is a run in which the same site was silent: a refused answer must leave the model, the rule and the
results with the bits of that one.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fairflare.base.disk.record_log import RecordLog
from fairflare.base.settings import build
from fairflare.exchange.messages import TASK_CHECK, TASK_NORMS
from fairflare.federation.collecting.context import RunContext
from fairflare.federation.server.rounds import Rounds
from fairflare.flare.tracking import FlareEvents
from fairflare.methods.base.catalog import get_method
from fairflare.methods.base.rule import TwoPhase
from tests.tiny import run_document

from ..federation.network import SITES
from .expected import expectations
from .mutations import Case, Cases
from .server import BY_GROUP, Delivery, FuzzServer, NotSent, decoded, encoded, good_reply

LONGEST = 360  # of a refusal: 300 characters of a site's words, and who said them
MOST_BYTES = 400_000  # of results.json and progress.jsonl after three rounds; 1,000 metrics with long names fit
NUM_ROUNDS = 4
HOSTILE = 1  # the round in which the site misbehaves; the next one is good again
WITH_NORMS = ("fed_avg", "fed_lwr")  # one phase or two before them
OUTCOMES = ("killed", "raised", "changed", "unnamed", "good failed", "other")  # of a reply
OF_BUNDLES = ("executed", "slow", "memory", "passed")  # of a bundle besides


@dataclass
class Verdict:
    """Store the outcome of one case; ``faults``: which of :data:`OUTCOMES` or :data:`OF_BUNDLES`, and the details."""

    index: int
    name: str
    accepted: bool = False
    sent: bool = True
    reason: str = ""
    faults: dict[str, str] = field(default_factory=dict)

    def fault(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, text[:600])


@dataclass
class Trace:
    """Store the traces of one walk through the hostile round and the good round."""

    prints: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    killed: str = ""
    done: int = 0
    size: int = 0


class Bench:
    """Run all cases of one method and phase.

    Args:
        folder: to work in; on a memory disk a case takes some milliseconds.
        method, phase: whom to attack, and when.
        seed: of the draw.
        sparing: see :meth:`run`.
    """

    def __init__(self, folder: Path, method: str, phase: str, seed: int = 0, *, sparing: bool = False) -> None:
        entry = get_method(method)
        self.sparing = sparing
        self.phase, self.where = phase, f"{method}/{phase}/{seed}"
        self.folder = folder
        (folder / "server").mkdir(parents=True)
        self.server = FuzzServer(
            folder / "server", self._play, build(entry.rule, {**entry.server, **BY_GROUP.get(method, {})}),
            num_rounds=NUM_ROUNDS, min_sites=2, max_missed=5, train_timeout=60, require_all_sites=False,
            **({"norm_statistics": "recalibrated"} if phase == TASK_NORMS else {}),
        )  # fmt: skip
        self.place = self.server._place()
        self.bad, self.answer, self.delivery = "site-2", None, ""
        self.hostile_round = -1
        self.kept: dict[tuple[str, str, int], Any] = {}  # good answers, as they travel
        self.like: dict[str, torch.Tensor] = {}
        self.rule = self.server.rule
        self.silent: dict[str, Trace] = {}
        self._first_round()
        at = NUM_ROUNDS if phase == "validate" else HOSTILE
        template = good_reply(self.rule, self.bad, phase, at, self.like)
        self.cases = Cases(template, self.where)

    # -- what the sites say

    def _play(self, server: FuzzServer, name: str, current_round: int) -> list[Delivery]:
        deliveries = []
        for site in SITES:
            if site == self.bad and (name, current_round) == (self.phase, self.hostile_round):
                deliveries += self._misbehave(site, name, current_round)
            else:
                deliveries.append(Delivery(site, self._good(site, name, current_round)))
        return deliveries

    def _good(self, site: str, name: str, current_round: int) -> Any:
        key = (site, name, current_round)
        if key not in self.kept:
            self.kept[key] = encoded(good_reply(self.rule, site, name, current_round, self.like))
        return decoded(self.kept[key])

    def _misbehave(self, site: str, name: str, current_round: int) -> list[Delivery]:
        if self.answer is None:
            return []
        bad, good = Delivery(site, self.answer), Delivery(site, self._good(site, name, current_round))
        if self.delivery == "twice":
            return [bad, Delivery(site, copy.deepcopy(self.answer)), good]
        if self.delivery == "good first":
            return [good, bad]
        if self.delivery == "before":  # of a task that was never given
            bad.task_id = "made up"
        elif self.delivery == "for another":
            bad.task_of = next(other for other in SITES if other != site)
        elif self.delivery == "as another task":
            bad.task_name = "anchor" if name != "anchor" else "train"
        elif self.delivery == "late":
            own = server_task_id(self.server, site)
            self.server.late.append((self.server.clients[site], name, own, self.answer))
            return []
        return [bad]

    # -- a walk

    def _first_round(self) -> None:
        """Do a good round, from whose state every case starts, so that the rule has a memory."""
        with self._quiet():
            rounds = Rounds(
                self.server.task, self.server.rule, self.server, self.server, self.place, [FlareEvents(self.server)]
            )
            _, state, context = rounds.opening()
            rounds.make_collector(context)
            self.facts = rounds.check.facts
            self.like = dict(state)
            self.state = dict(rounds._round(0, state))
        self.best = rounds.files.best.state_dict()
        self.info = dict(rounds.journal.info)
        self.stored = rounds.journal.store.state_dict()
        self.log = RecordLog(self.folder / "rounds.log")
        self.log.take_over(rounds.journal.store.log)
        self.kept_memory = self.folder / "memory"
        if self.rule.memory_folder is not None and self.rule.memory_folder.exists():
            shutil.copytree(self.rule.memory_folder, self.kept_memory)
        self.rule = copy.deepcopy(self.server.rule)

    def _walk(self, again: Callable[[Trace], bool] = lambda trace: True) -> Trace:
        """Do the hostile exchange and, with ``again``, a good one after it, from the state after the first round."""
        trace = Trace()
        rounds = self._fresh()
        state: Any = {name: tensor.clone() for name, tensor in self.state.items()}
        try:
            if self.phase == "validate":
                for number in (0, 1):
                    self.hostile_round = NUM_ROUNDS if number == 0 else -1
                    rounds.tests.finish(state)
                    final = run_document(rounds.journal.store.folder)
                    self._note(
                        trace, rounds, state, {key: final[key] for key in ("test", "fairness", "left_out", "resampled")}
                    )
                    if not again(trace):
                        break
                    rounds = self._fresh()
            else:
                self.hostile_round = HOSTILE
                if self.phase == TASK_CHECK:
                    state = self._checked(trace, rounds, state)
                for number in (HOSTILE,) if self.phase == TASK_CHECK else (HOSTILE, HOSTILE + 1):
                    state = rounds._round(number, state)
                    self._note(trace, rounds, dict(state), json.loads([*rounds.journal.store.log.read()][-1]))
                    if not again(trace):
                        break
        except Exception as error:
            trace.killed = f"{type(error).__name__}: {error}"
        return trace

    def _checked(self, trace: Trace, rounds: Rounds, state: dict[str, torch.Tensor]) -> Any:
        """Do the check with the hostile answer, recorded like a round; everything after it is good."""
        said: list[Any] = []
        checked = rounds.journal.record_check

        def noted(phase: Any, facts: Any, metrics: Any) -> None:
            said.append(phase)
            checked(phase, facts, metrics)

        rounds.journal.record_check = noted  # type: ignore[method-assign]
        rounds.check.run(HOSTILE)
        rounds.make_collector(RunContext(reported=rounds.check.said, facts=rounds.check.facts))
        left = [{"site": s, "phase": TASK_CHECK, "reason": why} for s, why in sorted(said[0].left_out.items())]
        honest = {site: facts for site, facts in rounds.check.facts.items() if site != self.bad}
        self._note(trace, rounds, state, {"left_out": left, "facts": honest})
        return state

    def _fresh(self) -> Rounds:
        """Return the run as it was after the first round."""
        server = self.server
        server.rule = copy.deepcopy(self.rule)
        rounds = Rounds(server.task, server.rule, server, server, self.place, [FlareEvents(server)])
        if self.kept_memory.exists() and rounds.rule.memory_folder is not None:
            shutil.rmtree(rounds.rule.memory_folder, ignore_errors=True)
            shutil.copytree(self.kept_memory, rounds.rule.memory_folder)
        rounds.files.best.load_state_dict(copy.deepcopy(self.best))
        rounds.journal.store.start(self.info)
        rounds.journal.store.load_state_dict(self.stored, self.log)
        if self.phase != TASK_CHECK:
            rounds.check.facts.update(copy.deepcopy(self.facts))
        rounds.make_collector(RunContext(reported=rounds.check.said, facts=rounds.check.facts))
        return rounds

    def _note(self, trace: Trace, rounds: Rounds, state: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
        trace.done += 1
        trace.records.append(record)
        trace.states.append(state)
        digest = hashlib.sha256()
        _feed(digest, dict(state))
        _feed(digest, rounds.rule.state_dict())
        _feed(digest, {k: v for k, v in record.items() if k not in ("left_out", "phases")})
        _feed(digest, [rounds.files.best.state_dict(), rounds.journal.synthetic])
        if rounds.rule.memory_folder is not None:
            for path in sorted(rounds.rule.memory_folder.rglob("*")):
                if path.is_file():
                    _feed(digest, [path.name, path.read_bytes()])
        trace.prints.append(digest.hexdigest())

    # -- one case

    def silent_trace(self, site: str) -> Trace:
        if site not in self.silent:
            self.bad, self.answer, self.delivery = site, None, ""
            trace = self._walk()
            assert not trace.killed, trace.killed
            self.silent[site] = trace
        return self.silent[site]

    def run(self, index: int) -> Verdict:
        """Run one case, and judge it.

        ``sparing``: after a refusal that left every bit as it was, only every third case is followed by a good round.
        """
        with self._quiet() as logged:
            case = self.cases[index]
            site = SITES[index % len(SITES)]
            verdict = Verdict(index, case.name)
            reference = self.silent_trace(site)
            self.bad, self.delivery = site, case.delivery
            at = NUM_ROUNDS if self.phase == "validate" else HOSTILE
            try:
                self.answer = decoded(encoded(case.apply(good_reply(self.rule, site, self.phase, at, self.like))))
            except NotSent as error:
                verdict.sent, verdict.reason = False, str(error)
                return verdict
            self.server.heard.raised.clear()
            self.server.heard.lines.clear()
            logged.clear()
            skips = self.sparing and index % 3 > 0
            trace = self._walk(lambda t: not (skips and t.prints[0] == reference.prints[0]))
            self._judge(verdict, case, site, trace, reference)
            self._judge_words(verdict, logged)
            return verdict

    def _judge(self, verdict: Verdict, case: Case, site: str, trace: Trace, reference: Trace) -> None:
        if self.server.heard.raised:
            verdict.fault("raised", self.server.heard.raised[0])
        if trace.done == 0:
            verdict.fault("killed", trace.killed)
            return
        record = trace.records[0]
        reasons = [x["reason"] for x in record["left_out"] if (x["site"], x["phase"]) == (site, self.phase)]
        verdict.accepted = not reasons
        spoke = case.delivery not in ("late", "before", "for another", "as another task")
        if reasons:
            verdict.reason = reasons[0]
            self._judge_refusal(verdict, site, reasons[0], spoke)
            if trace.prints[0] != reference.prints[0]:
                verdict.fault("changed", _difference(trace, reference, 0))
        elif spoke and _undefined(record, site):
            verdict.fault("other", "a number that is none was taken as a metric")
        elif not spoke:
            verdict.fault("other", "a message outside of its task was taken")
        expected = expectations(self.phase).get(case.name)
        if expected is not None and expected != verdict.accepted:
            verdict.fault("other", "must be taken" if expected else "must be refused")
        if others := [x for x in record["left_out"] if x["site"] != site]:
            verdict.fault("other", f"another site is out too: {others}")
        for state in trace.states:
            self._judge_model(verdict, state)
        if trace.killed:
            verdict.fault("good failed", trace.killed)
        if trace.done < 2:
            return
        after = trace.records[1]
        if self.phase == TASK_CHECK and after["left_out"]:  # who is another one than it said has itself to blame
            for left in after["left_out"]:
                if left["site"] != site or not left["reason"].startswith(f"site {site!r}"):
                    verdict.fault("good failed", f"left out of the good round: {left}")
            return
        if after["left_out"] or ("accepted" in after and after["accepted"] != SITES):
            verdict.fault("good failed", f"left out of the good round: {after['left_out']}")
        if reasons and trace.prints[1] != reference.prints[1]:
            verdict.fault("changed", _difference(trace, reference, 1))

    def _judge_refusal(self, verdict: Verdict, site: str, reason: str, spoke: bool) -> None:
        if spoke and not reason.startswith(f"site {site!r}"):
            verdict.fault("unnamed", repr(reason))
        if spoke and "no answer" in reason:
            verdict.fault("unnamed", "'no answer' for a site that did answer")
        if not reason.strip() or len(reason) > LONGEST or not reason.isprintable():
            verdict.fault("unnamed", f"{len(reason)} characters: {reason!r}")

    def _judge_model(self, verdict: Verdict, state: dict[str, torch.Tensor]) -> None:
        if list(state) != list(self.like):
            verdict.fault("changed", f"the model's tensors are {list(state)}")
            return
        for name, tensor in state.items():
            like = self.like[name]
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                verdict.fault("changed", f"tensor {name!r} is now {tuple(tensor.shape)} {tensor.dtype}")
            if not bool(torch.isfinite(tensor.double()).all()):
                verdict.fault("changed", f"tensor {name!r} is not finite")

    def _judge_words(self, verdict: Verdict, logged: list[str]) -> None:
        lines = [text for level, text in self.server.heard.lines if level != "info"]
        lines += [line for level, text in self.server.heard.lines if level == "info" for line in text.split("\n")]
        for line in [*lines, *logged]:
            if not line.isprintable() or len(line) > 2 * LONGEST:
                verdict.fault("other", f"log line of {len(line)} characters: {line[:300]!r}")
        folder = self.place.run_dir / "fairflare"
        for name in ("results.json", "progress.jsonl"):
            text = (folder / name).read_text()
            if len(text) > MOST_BYTES:
                verdict.fault("other", f"{name} has {len(text)} bytes")
            for document in [text] if name == "results.json" else text.splitlines():
                for word in _words(json.loads(document)):
                    if not word.isprintable() or len(word) > LONGEST:
                        verdict.fault("other", f"{name} holds {word[:200]!r}")
        for path in folder.glob("*.csv"):
            if not path.read_text().replace("\n", "").isprintable():
                verdict.fault("other", f"{path.name} holds control characters")

    @contextmanager
    def _quiet(self) -> Iterator[list[str]]:
        """Suppress output, drawing and disk flushes; messages of our own loggers are kept."""
        lines: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        own = logging.getLogger("fairflare")
        handler, propagate = Keep(), own.propagate
        own.addHandler(handler)
        own.propagate = False
        try:
            with (
                mock.patch("fairflare.federation.record.journal.tell_listeners", return_value=[]),
                mock.patch("os.fsync", return_value=None),
            ):
                yield lines
        finally:
            own.removeHandler(handler)
            own.propagate = propagate


def server_task_id(server: FuzzServer, site: str) -> str:
    """Return the id of the task that a site is working on."""
    for client_task in server.communicator._client_task_map.values():
        if client_task.client.name == site and client_task.task.completion_status is None:
            return str(client_task.id)
    return ""


def _undefined(record: dict[str, Any], site: str) -> bool:
    """Return whether the results hold a metric of this site that is no number."""
    found = (record.get("validation") or record.get("test") or {}).get(site) or {}
    return any(value is None for value in found.values())


def _difference(trace: Trace, reference: Trace, number: int) -> str:
    """Return where a round differs from the round in which the site was silent."""
    for name, tensor in trace.states[number].items():
        if not torch.equal(tensor, reference.states[number][name]):
            return f"round {number}: tensor {name!r} differs"
    for key, value in trace.records[number].items():
        if key not in ("left_out", "phases") and value != reference.records[number][key]:
            return f"round {number}: {key} is {value!r:.150}, when silent {reference.records[number][key]!r:.150}"
    return f"round {number}: what the rule keeps differs"


def _feed(digest: Any, value: Any) -> None:
    """Feed every bit of nested values into a hash."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode(errors="replace"))
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}[".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, bytes):
        digest.update(value)
    else:
        digest.update(repr(value).encode(errors="replace"))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _words(item)
    elif isinstance(value, list):
        for item in value:
            yield from _words(item)
    elif isinstance(value, str):
        yield value


def phases_of(method: str) -> list[str]:
    """Return the phases of a method; all methods ask for norms in the same way."""
    rule = get_method(method).rule
    norms = [TASK_NORMS] if method in WITH_NORMS else []
    check = [TASK_CHECK] if method in ("fed_avg", *BY_GROUP) else []
    return [*check, "train", *(["anchor"] if issubclass(rule, TwoPhase) else []), *norms, "validate"]


def attack(
    folder: Path, method: str, phase: str, seed: int, cases: Iterable[int] = (), *, replies: int = 0
) -> list[Verdict]:
    """Run these cases; if ``sparing``, as many as it takes to send so many replies."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is not walked again at each collection: a sixth of the time
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
    warnings.filterwarnings("ignore", message="overflow encountered")  # the spread of losses of 1e308
    bench = Bench(folder, method, phase, seed, sparing=bool(replies))
    verdicts, sent = [], 0
    for index in cases or itertools.count():
        verdicts.append(bench.run(index))
        sent += verdicts[-1].sent
        if replies and sent == replies:
            break
    return verdicts
