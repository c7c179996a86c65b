"""Run federations of secure sums in one process, with every message on record, for tests of several folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fairflare.base.settings import build, field_names, values_of
from fairflare.exchange.messages import Message
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.transports.calls import LocalTransport
from fairflare.methods.base.catalog import get_method
from fairflare.tasks.base import SiteData
from fairflare.tasks.networks import GivenHead
from tests.tiny import run_document

from .network import Line, number

FAST = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 8, "keep_optimizer_state": False}
WIDTH = 40  # of the network: wide enough that a correlation of 4 / sqrt(N) is small


class Drawn(SiteData):
    """Hold numbers drawn for one site."""

    def __init__(self, site: str) -> None:
        generator = torch.Generator().manual_seed(number(site))
        count = 8 + 4 * number(site)
        self.inputs = torch.randn(count, 6, generator=generator) + 0.3 * number(site)
        self.targets = torch.randn(count, 1, generator=generator)

    def num_samples(self, split: str) -> int:
        return len(self.inputs)

    def batches(self, split: str, *, batch_size: int, **_: Any) -> Any:
        return list(zip(self.inputs.split(batch_size), self.targets.split(batch_size), strict=True))


class Numbers(Line):
    """Define a regression by a network with trained tensors, running statistics and a counter."""

    def build_model(self) -> torch.nn.Module:
        last = torch.nn.Linear(WIDTH, 1)
        return torch.nn.Sequential(torch.nn.Linear(6, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.ReLU(), last)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean()

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean(1)

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Drawn(site)


class TwoNorms(Numbers):
    """Define :class:`Numbers` with a second batch norm, whose input depends on the first one."""

    def build_model(self) -> torch.nn.Module:
        norms = torch.nn.BatchNorm1d(WIDTH), torch.nn.BatchNorm1d(WIDTH)
        return torch.nn.Sequential(
            torch.nn.Linear(6, WIDTH), norms[0], torch.nn.ReLU(), norms[1], torch.nn.Linear(WIDTH, 1)
        )


class OfClasses(Drawn):
    """Hold numbers of some of four classes, of one of which a site may have but one sample."""

    def __init__(self, site: str, classes: tuple[int, ...], single: int | None) -> None:
        super().__init__(site)
        self.targets = torch.tensor([classes[place % len(classes)] for place in range(len(self.inputs))])
        if single is not None:
            self.targets[0] = single

    def batches(self, split: str, *, batch_size: int, **_: Any) -> Any:
        return [(inputs, targets.clone()) for inputs, targets in super().batches(split, batch_size=batch_size)]

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self.targets, minlength=4)


class TwoHeads(torch.nn.Module):
    """Classify with one classifier in training, and with the server's in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(6, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.ReLU())
        self.head = torch.nn.Linear(WIDTH, 4)
        self.retrained = GivenHead(self.head)

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.head if self.training else self.retrained)(self.embed(inputs))


class Classes(Numbers):
    """Define four classes, of which the sites have those given, and a network with two classifiers."""

    has_classes = True

    def __init__(self, of_site: Mapping[str, tuple[int, ...]], single: Mapping[str, int] | None = None) -> None:
        self.of_site, self.single = of_site, single or {}

    def build_model(self) -> torch.nn.Module:
        return TwoHeads()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets)

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def open_site(self, site: str, settings: Any) -> SiteData:
        return OfClasses(site, self.of_site[site], self.single.get(site))


Twist = Callable[[str, str, int], Any]  # site, task, how often the site was asked this task -> what comes in its place


def lost(site: str, name: str, times: int, first: int = 0) -> Twist:
    """Let a site die in some of the times that it is asked a task."""
    return lambda s, n, count: "its process died" if (s, n) == (site, name) and first <= count < first + times else None


class Wire(LocalTransport):
    """Carry the messages of sites whose process is a new one for each task, and keep what was sent."""

    twist: Twist = staticmethod(lambda site, name, count: None)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[tuple[str, str, Message]] = []
        self.asked: list[tuple[str, str, Message]] = []
        self.updates: dict[tuple[str, int], Mapping[str, Any]] = {}

    def _answer(self, site: str, name: str, task: Message) -> Any:
        count = sum((site, name) == (a, b) for a, b, _ in self.asked)
        self.asked.append((site, name, task))
        self._workers.pop(site, None)
        before = self.twist(site, name, count)
        if before is not None:
            return before
        answer = super()._answer(site, name, task)
        self.sent.append((site, name, Message(answer.params, answer.is_update, answer.metrics, answer.meta)))
        if name == "train":
            kept = self._workers[site].state.store(task.meta["run"]).load_at("sum_update", task.current_round)
            self.updates[site, task.current_round] = kept or {}
        return answer


class Run:
    """Do a run of secure sums, or a plain one, in a folder."""

    def __init__(
        self, folder: Path, method: str = "fed_avg", sites: int = 3, twist: Twist | None = None,
        local: Mapping[str, Any] | None = None, half: Mapping[str, Any] | None = None,
        rule: Mapping[str, Any] | None = None, task: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        known = get_method(method)
        rate = {"learning_rate": 0.05} if "learning_rate" in field_names(known.rule) else {}  # as the sites' half
        of_rule = build(known.rule, {**known.server, **rate, **(rule or {})})
        training = build(
            known.training,
            {**FAST, **known.site, **(half or {})},
        )
        task = task or Numbers()
        run = RunSettings(**{"num_rounds": 2, "secure": "sums", "anchor_timeout": 60.0, **settings})
        names = [f"site-{k + 1}" for k in range(sites)]
        self.wire = Wire(names, task, training, local or {}, folder / "state")
        if twist is not None:
            self.wire.twist = twist  # type: ignore[method-assign]
        self.folder = folder / "server"
        place = Place(self.folder, folder / "kept", "job", {}, values_of(training))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rounds = Rounds(task, of_rule, run, self.wire, place)

    def __call__(self) -> Run:
        self.rounds.run()
        return self

    @property
    def model(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "FL_global_model.pt", weights_only=True)["model"]

    @property
    def results(self) -> dict[str, Any]:
        return run_document(self.folder / "fairflare")
