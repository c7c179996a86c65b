"""Test a training that is stopped and resumed by another worker: the same bits, and no step twice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.exchange.messages import SiteReply, SiteTask
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import run_local
from fairflare.methods.base import half_done
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.local_loop import LocalLoop
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.recipes import FairRecipe
from fairflare.tasks.segmentation import SegmentationTask
from tests.shapes import of_its_steps, one_each
from tests.tiny import model_in, run_document

from ..methods.support import SEGMENTATION, at_site, initial, request

CLASSES: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8], "max_pool": False,
    "phantom_samples": 200, "phantom_test": 92, "phantom_own_test": 92,
}  # fmt: skip
IMAGES = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.1}
FIVE = {"phantom": "fundus", "phantom_test": 40, "phantom_own_test": 40}  # classes, for methods that learn 23
TONES: dict[str, Any] = {"phantom": "dermoscopy", "attributes": True, "groups": ["tone"]}
ALSO: dict[str, dict[str, Any]] = {
    "crt": {"crt_rounds": 1},
    "creff": {"feature_steps": 3, "classifier_epochs": 2, "gradient_repeats": 1},
    "fed_mrl": {"optimizer": "adam"},
    "fair_lora": {"phantom_samples": 150, "phantom_test": 64, "phantom_own_test": 64},
}
EVERY_STEP = {"save_seconds": 1e-9}


class Steps:
    """Count the steps of all trainings; after ``most`` steps of one attempt its site is asked to stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.attempts = self.of_attempt = 0
        self.most: float = float("inf")
        step, perform = LocalLoop._step, SiteWorker.perform

        def counted(loop: LocalLoop, *batch: torch.Tensor) -> torch.Tensor:
            self.made += 1
            self.of_attempt += 1
            return step(loop, *batch)

        def insistent(worker: SiteWorker, asked: SiteTask, should_stop: Any = lambda: False) -> SiteReply:
            while True:
                self.attempts += 1
                self.of_attempt = 0
                told = (lambda: self.of_attempt >= self.most) if asked.name == "train" else should_stop
                reply = perform(worker, asked, told)
                if "the job was stopped" not in reply.reason:
                    return reply
                kept = worker.state.folder
                worker = SiteWorker(worker.site, worker.task, worker.training, worker.settings, kept, num_threads=1)

        monkeypatch.setattr(LocalLoop, "_step", counted)
        monkeypatch.setattr(SiteWorker, "perform", insistent)
        monkeypatch.setattr(half_done, "SPARE", 0)


def plan_of(name: str, num_rounds: int = 2, **more: Any) -> Any:
    method = all_methods()[name]
    few = FIVE if method.learns.get("phantom") == "endoscopy" else {}
    tiny = {**(IMAGES if method.task == "segmentation" else CLASSES), **few, **ALSO.get(name, {}), **more}
    return FairRecipe(
        name,
        sites=2,
        num_rounds=num_rounds,
        settings=tiny if "local_steps" in tiny else {"local_epochs": 2, **tiny},
        bootstrap=0,
    ).plan


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], Any, list[Any]]:
    """Return model, test and the sites' reports, without times."""
    written = run_document(folder)
    model = model_in(folder)
    said = [
        {site: {k: v for k, v in of_site.items() if k != "seconds"} for site, of_site in record["train"].items()}
        for record in written["rounds"]
    ]
    return model, written["test"], said


def check_same(plan: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    steps = Steps(monkeypatch)
    expected = outcome(run_local(plan, folder / "whole"))
    whole, steps.made, steps.attempts, steps.most = steps.made, 0, 0, most
    model, test, said = outcome(run_local(plan, folder / "broken", EVERY_STEP))
    assert steps.attempts > whole / most, "nobody was stopped"
    assert steps.made == whole, "a step was made twice, or not at all"
    assert all(torch.equal(tensor, model[name]) for name, tensor in expected[0].items())
    assert (test, said) == expected[1:]


@pytest.mark.many
@pytest.mark.parametrize("name", one_each(of_its_steps))
def test_every_method_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one method of each way to train: the server has no part in it."""
    check_same(plan_of(name), tmp_path, monkeypatch, most=7)


@pytest.mark.parametrize(
    "settings",
    [{"local_steps": 9, "optimizer": "sgd"}, {"augment": True, "precision": "fp16"}],
    ids=["steps, sgd", "augmented, fp16"],
)
def test_however_a_round_is_measured(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(plan_of("fed_avg", num_rounds=1, **settings), tmp_path, monkeypatch, most=2)


class Noisy(SegmentationTask):
    """Define a task whose network draws random numbers in each step."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(super().build_model(), torch.nn.Dropout(0.2))


def broken_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after: int = 2, kind: type = SegmentationTask, **training: Any
) -> tuple[Any, Any, Any]:
    """Return a site whose first training was stopped, with its task and the model."""
    monkeypatch.setattr(half_done, "SPARE", 0)
    task = kind(**SEGMENTATION)
    state = initial(task)
    here = at_site(folder, LocalTraining(batch_size=2, **training), task=task, settings=EVERY_STEP)
    made: list[int] = []
    step = LocalLoop._step

    def counted(loop: LocalLoop, *batch: torch.Tensor) -> torch.Tensor:
        made.append(1)
        return step(loop, *batch)

    monkeypatch.setattr(LocalLoop, "_step", counted)
    reply = here.perform(request("train", state), lambda: len(made) >= after)
    assert reply.status == "skipped"
    return here, state, made


def test_a_finished_training_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a reply that was lost: the server asks again, and no step is repeated."""
    here, state, made = broken_off(tmp_path, monkeypatch)
    first = here.perform(request("train", state))
    made.clear()
    again = here.perform(request("train", state))
    assert made == []
    assert again.metrics == first.metrics
    assert again.stats["train_loss"] == first.stats["train_loss"]
    assert all(torch.equal(tensor, again.update[name]) for name, tensor in first.update.items())


def test_random_numbers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, state, _ = broken_off(tmp_path, monkeypatch, kind=Noisy)
    torch.manual_seed(5)
    found = here.perform(request("train", state)).update
    fresh = at_site(tmp_path / "fresh", here.training, task=here.task).perform(request("train", state)).update
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in found.items())


@pytest.mark.parametrize("other", ["model", "round", "setting"])
def test_another_start_is_no_continuation(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, state, made = broken_off(tmp_path, monkeypatch)
    folder = here.state.folder
    kept = list(folder.rglob("half_done.000000.pt"))
    assert len(kept) == 1
    number = 0
    if other == "model":
        state = {name: tensor + (tensor.is_floating_point() and 1e-3) for name, tensor in state.items()}
    elif other == "round":
        number = 1
    else:
        here = SiteWorker("site-1", here.task, LocalTraining(batch_size=2, learning_rate=2e-3), EVERY_STEP, folder)
    made.clear()
    assert here.perform(request("train", state, current_round=number)).status == "ok"
    broken = len(made)
    fresh = at_site(tmp_path / "fresh", here.training, task=here.task)
    made.clear()
    assert fresh.perform(request("train", state, current_round=number)).status == "ok"
    assert broken == len(made)
    left = sorted(path.name for path in folder.rglob("half_done*"))
    assert left == [f"half_done.{number:06d}.pt"]


def test_a_damaged_one_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, state, _ = broken_off(tmp_path, monkeypatch)
    (path,) = here.state.folder.rglob("half_done*.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    reply = here.perform(request("train", state))
    assert reply.status == "ok"
    assert "half_done of round 0 is damaged" in reply.stats["state_lost"]
    fresh = at_site(tmp_path / "fresh", here.training, task=here.task).perform(request("train", state))
    assert all(torch.equal(tensor, fresh.update[name]) for name, tensor in reply.update.items())


def test_a_full_disk_costs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(half_done, "SPARE", 0)
    task = SegmentationTask(**SEGMENTATION)
    here = at_site(tmp_path, LocalTraining(batch_size=2), task=task, settings=EVERY_STEP)
    real = type(here.state.store()).save

    def full(store: Any, name: str, *rest: Any, **more: Any) -> None:
        if name == "half_done":
            raise OSError(28, "No space left on device")
        real(store, name, *rest, **more)

    monkeypatch.setattr(type(here.state.store()), "save", full)
    with caplog.at_level(logging.WARNING):
        assert here.perform(request("train", initial(task))).status == "ok"
    assert sum("half-done round cannot be kept" in line for line in caplog.messages) == 1


def test_an_error_of_the_training_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a failed training is not resumed, as that would only repeat the error."""
    here, state, made = broken_off(tmp_path, monkeypatch)
    made.clear()
    broken = LocalLoop._step

    def fails(loop: LocalLoop, *batch: torch.Tensor) -> torch.Tensor:
        if len(made) > 1:
            raise ValueError("of the network")
        return broken(loop, *batch)

    monkeypatch.setattr(LocalLoop, "_step", fails)
    assert here.perform(request("train", state)).status == "failed"
    assert not list(here.state.folder.rglob("*.pt"))


def test_nothing_is_kept_where_the_site_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = SegmentationTask(**SEGMENTATION)
    for number, settings in enumerate(({"save_seconds": 0}, {})):  # and not in a short round
        here = at_site(tmp_path / str(number), LocalTraining(batch_size=2), task=task, settings=settings)
        assert here.perform(request("train", initial(task))).status == "ok"
        assert not list(here.state.folder.rglob("half_done*"))


@pytest.mark.parametrize("wrong", [-1, "often", True, float("inf")])
def test_a_wrong_number_of_seconds_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"'save_seconds' must be .* >= 0"):
        at_site(tmp_path, LocalTraining(), task=SegmentationTask(**SEGMENTATION), settings={"save_seconds": wrong})
