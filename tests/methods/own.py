"""Run real sites over a pretended network, with data so small that a round takes milliseconds."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import nn

from fairflare.base.settings import values_of
from fairflare.base.task import evaluating
from fairflare.exchange.messages import Message, decode_task, encode_reply
from fairflare.federation.server.rounds import Stopped
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.base import Metric, SiteData, Task
from tests.federation.network import Run

if TYPE_CHECKING:
    from fairflare.base.task import Batch

SITES = ["site-1", "site-2"]
Answer = Callable[[str, str, Message], Any]


class Points(SiteData):
    """Hold points of two classes in the plane, elsewhere at every site."""

    def __init__(self, site: str, count: int = 20) -> None:
        number = int(site.split("-")[1])
        g = torch.Generator().manual_seed(number)
        self.targets = torch.arange(count) % 2
        self.inputs = torch.randn(count, 4, generator=g) + number * (self.targets[:, None] - 0.3) + number

    def num_samples(self, split: str) -> int:
        return len(self.inputs)

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self.targets)

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> list[Batch]:
        order = torch.arange(len(self.inputs))
        if shuffle_seed is not None:
            order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(shuffle_seed))
        return [(self.inputs[part], self.targets[part]) for part in order.split(batch_size)]


class Plane(Task):
    """Define a task that classifies points; its network has a batch norm whose name does not say so."""

    primary_metric: ClassVar[str] = "accuracy"
    has_classes: ClassVar[bool] = True

    def __init__(self, norm: str = "batch") -> None:
        self.norm = norm

    def build_model(self) -> nn.Module:
        norm = {"batch": nn.BatchNorm1d(6), "layer": nn.LayerNorm(6), "none": nn.Identity()}[self.norm]
        return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 2))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="accuracy", doc="made up", higher_is_better=True),)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], device: Any) -> dict[str, float]:
        with evaluating(model):
            outputs, targets = (torch.cat(parts) for parts in zip(*((model(x), y) for x, y in batches), strict=True))
        right = (outputs.argmax(1) == targets).float().mean()
        return {"accuracy": float(right), "loss": float(self.loss(outputs, targets))}

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Points(site)


NORM = [f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
STATISTICS = NORM[2:]


class Sites:
    """Run the sites of one experiment: a new process for each task, with a folder that stays.

    Args:
        folder: of what they keep.
        training: the method's site half.
        task: what they learn.
        answer: called with site, task's name and message; whatever it returns but ``None`` is said instead.
    """

    def __init__(
        self, folder: Path, training: LocalTraining, task: Task | None = None, answer: Answer | None = None
    ) -> None:
        self.folder, self.training, self.task = folder, training, task or Plane()
        self.answer = answer
        self.sent: dict[tuple[str, str, Any], Message] = {}
        self._alone = threading.Lock()  # torch has one random state

    def worker(self, site: str) -> SiteWorker:
        return SiteWorker(site, self.task, self.training, {}, self.folder / site, num_threads=1)

    def __call__(self, site: str, name: str, message: Message) -> Any:
        with self._alone:
            said = self.answer(site, name, message) if self.answer else None
            if said is None:
                said = self.perform(site, name, message)
            self.sent[site, name, message.current_round] = copy.copy(said)  # the server empties what it took
        return said

    def perform(self, site: str, name: str, message: Message) -> Message:
        reply = self.worker(site).perform(decode_task(name, message, site))
        return encode_reply(reply, message.current_round)

    def kept(self, site: str, name: str, current_round: int) -> dict[str, torch.Tensor]:
        runs = [path for path in (self.folder / site).iterdir() if path.is_dir()]
        found = torch.load(runs[-1] / f"{name}.{current_round:06d}.pt", weights_only=True)
        return dict(found)


def run(
    folder: Path,
    training: LocalTraining,
    *,
    task: Task | None = None,
    answer: Answer | None = None,
    sites: Sequence[str] = SITES,
    state: str = "state",
    **settings: Any,
) -> tuple[Run, Sites]:
    """Return a completed run, and its sites."""
    they = Sites(folder / state, training, task, answer)
    made = Run(
        folder, they, sites=sites, task=they.task, site_half=values_of(training), **{"num_rounds": 3, **settings}
    )
    made.net.ready = lambda site, message: they.perform(site, "check", message)
    return made(), they


def losing(folder: Path, training: LocalTraining, task: Task, lost: set[tuple[str, int]]) -> Answer:
    """Return what performs the trainings ``lost``, site and round, and sends nothing of them that can be used."""
    they = Sites(folder / "state", training, task)

    def answer(site: str, name: str, message: Message) -> Any:
        if name != "train" or (site, message.current_round) not in lost:
            return None
        they.perform(site, name, message)
        return "gone"

    return answer


def killed(folder: Path, training: LocalTraining, task: Task, rule: Any, num_rounds: int, at: int = 2) -> Run:
    """Return a run that was stopped in a round, and was completed by another job; sites are the same."""

    def part(answer: Answer | None = None) -> Run:
        sites = Sites(folder / "state", training, task, answer)
        made = Run(
            folder, sites, sites=SITES, task=task, site_half=values_of(training), num_rounds=num_rounds,
            experiment="e", rule=copy.deepcopy(rule),  # the second job's has only what the checkpoint holds
        )  # fmt: skip
        made.net.ready = lambda site, message: sites.perform(site, "check", message)
        return made

    def stop(site: str, name: str, message: Message) -> None:
        cut.net.abort = message.current_round == at

    cut = part(stop)
    with pytest.raises(Stopped):
        cut()
    return part()()
