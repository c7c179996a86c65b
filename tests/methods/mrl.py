"""Provide an objective with a known gradient, and a small federation, for tests of FedMRL and FedProx."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fairflare.exchange.messages import SiteReply, SiteTask
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import model_in, run_document

Vector = npt.NDArray[np.float64]
State = dict[str, torch.Tensor]

TINY: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8], "max_pool": False, "phantom_sites": 3, "phantom_samples": 120,
    "phantom_test": 64, "phantom": "dermoscopy7", "partition": "iid", "corrupted_sites": 0,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.0, "weight_decay": 0.0, "keep_optimizer_state": False,
}  # fmt: skip


class Regression:
    """Define a tiny network in float64, and the same in NumPy: linear, tanh, linear, softmax; one bias is frozen."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.x, self.y = self.rng.normal(size=(6, 3)), self.rng.integers(0, 3, 6)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
        self.parts = [p for name, p in self.model.named_parameters() if name != "0.bias"]
        self.frozen = self.model.get_parameter("0.bias").requires_grad_(False)

    def point(self) -> Vector:
        """Return random parameters."""
        return self.rng.normal(size=27)

    def put(self, flat: Vector) -> None:
        with torch.no_grad():
            for part in self.parts:
                part.copy_(torch.from_numpy(flat[: part.numel()]).reshape(part.shape))
                flat = flat[part.numel() :]

    def loss(self, flat: Vector) -> float:
        w1, w2, b2 = flat[:12].reshape(4, 3), flat[12:24].reshape(3, 4), flat[24:]
        logits = np.tanh(self.x @ w1.T + self.frozen.numpy()) @ w2.T + b2
        logits = logits - logits.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(6), self.y]))

    def run(self, directives: Mapping[str, Any]) -> Any:
        task = SimpleNamespace(loss=torch.nn.functional.cross_entropy)
        return SimpleNamespace(site="h", directives=directives, device="cpu", task=task, own=None, epoch=0)

    def gradient(
        self, training: LocalTraining, directives: Mapping[str, Any], received: Vector, here: Vector
    ) -> tuple[float, Vector]:
        """Return value and gradient of the method's objective at ``here``, after the model ``received`` came in."""
        run = self.run(directives)
        self.put(received)
        training.begin_round(run, self.model)
        self.put(here)
        return self.objective(training, run)

    def objective(self, training: LocalTraining, run: Any) -> tuple[float, Vector]:
        self.model.zero_grad()
        value = training.loss(run, self.model, torch.from_numpy(self.x), torch.from_numpy(self.y))
        value.backward()
        gradient = torch.cat([part.grad.reshape(-1) for part in self.parts if part.grad is not None])
        assert self.frozen.grad is None
        return float(value.detach()), gradient.numpy()


def differences(function: Callable[[Vector], float], flat: Vector, h: float = 1e-6) -> Vector:
    """Return the gradient of ``function`` from central differences."""
    steps = np.eye(len(flat)) * h
    return np.array([(function(flat + step) - function(flat - step)) / (2 * h) for step in steps])


# ------------------------------------------------------------------------------------------------ one site


def start() -> State:
    """Return the model that a federation starts from."""
    torch.manual_seed(0)
    return ClassificationTask(**TINY).build_model().state_dict()


def train(
    training: LocalTraining, folder: Path, state: State, directives: Mapping[str, Any] | None = None
) -> tuple[SiteWorker, SiteReply]:
    """Train round 1 of 4 at one site."""
    worker = SiteWorker("site-1", ClassificationTask(**TINY), training, {}, folder)
    return worker, worker.perform(SiteTask("train", dict(state), 1, 4, 0, dict(directives or {})))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Check that two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def norm(update: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the trained head."""
    return math.sqrt(sum(float((t.double() ** 2).sum()) for name, t in update.items() if name.startswith("head")))


# ------------------------------------------------------------------------------------------------ a federation


def plan(
    method: str = "fed_mrl", num_rounds: int = 2, *, settings: Mapping[str, Any] | None = None, **run: Any
) -> Plan:
    """Return the plan of a run of three small sites, unless ``sites`` says otherwise."""
    return make_plan(
        method, task="classification", num_rounds=num_rounds, settings={**TINY, **(settings or {})},
        **{"sites": 3, "keep_local_models": True, **run},
    )  # fmt: skip


def federation(folder: Path, local: Mapping[str, Any] | None = None, **options: Any) -> tuple[dict[str, Any], Path]:
    """Run :func:`plan` in this process; return the results, and their folder."""
    found = run_local(plan(**options), folder, local)
    return run_document(found), found


def model_of(found: Path) -> State:
    """Return the final model of a run."""
    state: State = model_in(found)
    return state
