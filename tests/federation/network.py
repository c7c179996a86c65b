"""Provide a pretended network for the tests of a run: sites are threads that answer as a test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from fairflare import __version__
from fairflare.exchange.messages import TASK_CHECK, Message, address, says_nothing
from fairflare.federation.collecting.transport import Listener, Question
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds
from fairflare.methods.base.rule import Rule
from fairflare.methods.fed_avg import FedAvg
from fairflare.tasks.base import Metric, SiteData, Task
from tests.tiny import VALIDATED, rows, run_document

SITES = ["site-1", "site-2", "site-3"]
SILENT = "-silent-"  # a site that never answers

Behaviour = Callable[[str, str, Message], Any]


class Line(Task):
    """Define a network of one linear layer, which nobody trains."""

    primary_metric: ClassVar[str] = "dice"

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 1))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="dice", doc="made up", higher_is_better=True),)

    def evaluate(self, model: Any, batches: Any, device: Any) -> dict[str, float]:
        return {"dice": 0.5}

    def open_site(self, site: str, settings: Any) -> SiteData:
        raise AssertionError("not here")


def number(site: str) -> int:
    return int(site.split("-")[1])


def good(site: str, name: str, task: Message) -> Message:
    """Return a healthy site's answer; its update depends on the site's number."""
    k = number(site)
    meta: dict[str, Any] = {"version": __version__, "status": "ok", "stats": {"train_loss": 1.0 / k, "seconds": 0.5}}
    reply = Message(meta=meta, current_round=task.current_round)
    if name == "train":
        reply.params = {key: torch.full_like(value, 0.1 * k) for key, value in task.params.items()}
        reply.is_update = True
        reply.metrics = rows({"dice": 0.1 * k}, "validation")
        meta.update(num_samples=10 * k, num_steps=3)
    elif name == "anchor":
        meta["report"] = {"layers": ["0"], "cka": [1 - 0.1 * k], "dissimilarity": [0.1 * k]}
    else:
        of_validation = {VALIDATED + "dice": 0.1 * k} if "validation" in task.meta["measure"] else {}
        reply.metrics = rows({"dice": 0.2 * k, **of_validation})
    return reply


def misbehave(site: str, name: str, what: Any) -> Behaviour:
    """Make all sites healthy except one site in one task; ``what``: its answer, or a function that makes the answer."""

    def behaviour(s: str, n: str, task: Message) -> Any:
        if (s, n) != (site, name):
            return good(s, n, task)
        return what(s, n, task) if callable(what) else what

    return behaviour


class Network:
    """Stand in for the transport: every site of a task is a thread, which calls back or does not."""

    def __init__(self, behaviour: Behaviour, sites: Sequence[str] = SITES) -> None:
        self.behaviour, self.names = behaviour, list(sites)
        #: Answers to ``check``, which is not among what was ``asked``.
        self.ready: Callable[[str, Message], Any] = lambda site, task: says_nothing()
        self.checks: list[Message] = []
        self.asked: list[tuple[str, list[str]]] = []
        self.tasks: list[Message] = []
        self.used: list[tuple[str, str, bool]] = []
        self.said: list[str] = []
        self.warned: list[str] = []
        self.abort = False
        self.seen: Callable[[str], None] = lambda site: None
        self.threads: list[threading.Thread] = []

    def sites(self) -> list[str]:
        return self.names[::-1]  # in no order that anything may depend on

    def expected(self) -> list[str]:
        return self.names

    def ask(self, question: Question) -> None:
        name, task, sites = question.name, question.task, question.sites
        if name == TASK_CHECK:
            self.checks.append(task)
        else:
            self.asked.append((name, list(sites)))
            self.tasks.append(task)
        waiting = set(sites)

        def work(site: str) -> None:
            told = address(task, site)
            answer = self.ready(site, told) if name == TASK_CHECK else self.behaviour(site, name, told)
            if callable(answer):
                answer = answer()
            if answer is SILENT:
                return
            used = question.hand_over(site, answer)
            if name != TASK_CHECK:
                self.used.append((name, site, used))
            waiting.discard(site)

        threads = [threading.Thread(target=work, args=(site,), daemon=True) for site in reversed(sites)]
        self.threads += threads
        for thread in threads:
            thread.start()
        end = time.monotonic() + question.timeout
        while waiting and not question.enough() and not self.stopped() and time.monotonic() < end:
            time.sleep(0.005)

    def stopped(self) -> bool:
        return self.abort

    def say(self, text: str, *, warning: bool = False) -> None:
        (self.warned if warning else self.said).append(text)

    def watch(self, seen: Callable[[str], None]) -> None:
        self.seen = seen


class Run:
    """Do one run over a pretended network, in a folder."""

    def __init__(
        self,
        folder: Path,
        behaviour: Behaviour = good,
        *,
        rule: Rule | None = None,
        sites: Sequence[str] = SITES,
        job: str = "run",
        task: Task | None = None,
        server: dict[str, Any] | None = None,
        site_half: Any = None,
        listeners: Sequence[Listener] = (),
        **settings: Any,
    ) -> None:
        self.net = Network(behaviour, sites)
        self.folder = folder / job
        self.folder.mkdir(parents=True, exist_ok=True)
        # On disk, so that what is left there is seen; in memory nothing could be.
        own = {"models_in_memory": 0, **(server or {})}
        place = Place(self.folder, folder / "kept", job, own, site_half)
        run = RunSettings(**settings)
        self.rounds = Rounds(task or Line(), rule or FedAvg(weighting="uniform"), run, self.net, place, listeners)

    def __call__(self) -> Run:
        self.rounds.run()
        return self

    @property
    def results(self) -> dict[str, Any]:
        return run_document(self.folder / "fairflare")

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.folder / "fairflare" / "progress.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def staged(self) -> list[Path]:
        return list((self.folder / "fairflare" / "staging").rglob("*"))  # gone when the run is over

    def model(self, name: str = "FL_global_model.pt") -> dict[str, Any]:
        return torch.load(self.folder / name, weights_only=True)

    def left_out(self, current_round: int = 0) -> dict[str, tuple[str, str]]:
        """Return ``{site: (phase, reason)}`` of a round."""
        return {x["site"]: (x["phase"], x["reason"]) for x in self.results["rounds"][current_round]["left_out"]}


class Heard(Listener):
    """Record all calls of a listener."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def event(self, kind, details):
        phase = details.get("phase")
        self.told.append((kind, phase, details["current_round"], details.get("site")))

    def round_started(self, current_round):
        self.told.append(("round_started", current_round))

    def before_aggregation(self):
        self.told.append("before_aggregation")

    def aggregated(self, state):
        self.told.append(("aggregated", sorted(state)))

    def round_done(self, record, metric):
        self.told.append(("record", record.current_round, metric))

    def tested(self, test, metric, step):
        self.told.append(("tested", sorted(test), metric, step))
