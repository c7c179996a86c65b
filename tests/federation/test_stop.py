"""Test that a stop is noticed at the next batch in every task, and within three seconds by a child process."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.base.stopping import StoppableData, TaskStopped, check_stop, stoppable
from fairflare.core.similarity import layerwise_cka, layerwise_cosine
from fairflare.data.datalist import load_datalist
from fairflare.exchange.messages import SiteReply
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.isolation import perform_isolated
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_ism import SharpnessAwareTraining
from fairflare.methods.fed_lwr import LayerSimilarityReport
from fairflare.methods.fed_mas import RescueTraining
from fairflare.methods.fed_mrl import FairProximalTraining
from fairflare.tasks.base import SiteData
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare_lab.phantoms import PELVIS
from tests.tiny import CLASSES

from ..methods.support import SEGMENTATION, at_site, initial, request
from .slow_task import SlowTask

CLASSES = {**CLASSES, "projector_dim": 96}


class Counted(SiteData):
    """Count the batches that are read; the stop comes when one of them has been handed over."""

    def __init__(self, data: SiteData) -> None:
        self.data = data
        self.test_splits = ("test", "test_again")
        self.read = self.asked = 0
        self.stop_after = math.inf
        self.own = "of the task"

    def num_samples(self, split: str) -> int:
        return self.data.num_samples(split.removesuffix("_again"))

    def class_counts(self, split: str) -> torch.Tensor | None:
        return self.data.class_counts(split)

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int] | None:
        return self.data.order(split, shuffle_seed)

    def batches(self, split: str, **how: Any) -> Any:
        outer, batches = self, self.data.batches(split.removesuffix("_again"), **how)

        class Batches:
            def __len__(self) -> int:
                return len(batches)

            def __iter__(self) -> Iterator[Any]:
                for batch in batches:
                    outer.read += 1
                    yield batch

        return Batches()

    def should_stop(self) -> bool:
        """Return True from the second question after that batch on: one question is at its reading, one at its end."""
        self.asked += self.read >= self.stop_after
        return self.asked > 1


def counted(task: Any) -> tuple[Any, Counted]:
    data = Counted(task.open_site("site-1", {}))
    task.open_site = lambda site, settings: data
    return task, data


def ask(here: SiteWorker, data: Counted, name: str, state: Any, **more: Any) -> SiteReply:
    data.read = data.asked = 0
    return here.perform(request(name, state, **more), data.should_stop)


def heard_everywhere(folder: Path, task: Any, training: LocalTraining, name: str, **more: Any) -> int:
    """Stop a task after each of its batches, and return their number."""
    task, data = counted(task)
    state = initial(task)
    here = at_site(folder, training, task=task)
    if name == "anchor":
        assert ask(here, data, "train", state).status == "ok"
    reply = ask(here, data, name, state, **more)
    assert reply.status == "ok", reply.reason
    total = data.read
    for stop_after in range(1, total):
        data.stop_after = stop_after
        reply = ask(here, data, name, state, **more)
        assert (reply.status, reply.reason) == ("skipped", "site 'site-1': the job was stopped")
        assert data.read == stop_after, "a batch was read after the stop"
    data.stop_after = math.inf
    assert ask(here, data, name, state, **more).status == "ok"
    return total


def test_training_and_its_evaluation(tmp_path: Path) -> None:
    task = SegmentationTask(**SEGMENTATION)
    data = task.open_site("site-1", {})
    each = [math.ceil(data.num_samples(split) / 8) for split in ("validation", "training")]
    assert heard_everywhere(tmp_path, task, LocalTraining(batch_size=8), "train") == sum(each)


def test_validation_on_every_test_split(tmp_path: Path) -> None:
    task = SegmentationTask(**SEGMENTATION)
    each = math.ceil(task.open_site("site-1", {}).num_samples("test") / 2)
    assert heard_everywhere(tmp_path, task, LocalTraining(batch_size=2), "validate") == 2 * each


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"similarity": "cosine"},
        {"preset": "authors", "cka_passes": 2},
        {"cka_max_samples": 3, "cka_memory": 0},
    ],
    ids=["cka", "cosine", "minibatch", "subset"],
)
def test_similarity_to_the_anchor(tmp_path: Path, settings: dict[str, Any]) -> None:
    task = SegmentationTask(**{**SEGMENTATION, "phantom_cases": 0.1})
    training = LayerSimilarityReport(batch_size=8, cka_batch_size=1, **settings)
    assert heard_everywhere(tmp_path, task, training, "anchor") >= 3
    assert not list(tmp_path.rglob("cka-*"))


@pytest.mark.parametrize(
    ("training", "passes", "directives"),
    [
        (SharpnessAwareTraining(batch_size=16), 3, {"search_distance": 0.05}),
        (RescueTraining(batch_size=16), 2, {"rescue_factor": True}),
        (FairProximalTraining(batch_size=16), 1, {"mean_loss": 0.5, "mu": {"site-1": 0.1}}),
    ],
    ids=["probe", "prior features", "accuracy of the trained model"],
)
def test_what_methods_measure_before_training(
    tmp_path: Path, training: LocalTraining, passes: int, directives: dict[str, Any]
) -> None:
    task = ClassificationTask(**CLASSES)
    data = task.open_site("site-1", {})
    each = {split: math.ceil(data.num_samples(split) / 16) for split in ("validation", "training")}
    total = heard_everywhere(tmp_path, task, training, "train", directives=directives)
    again = each["validation"] if isinstance(training, FairProximalTraining) else 0  # of the trained model
    assert total == each["validation"] + passes * each["training"] + again


def stopped_after(calls: int) -> Callable[[], bool]:
    left = [calls]

    def should_stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    return should_stop


def test_similarity_hears_it_after_the_last_batch_and_between_the_pieces_of_one() -> None:
    """Check the products of all layers' features, which take longer than the batches."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.Conv2d(3, 2, 3)) for _ in range(2)]
    images = torch.randn(6, 1, 40, 40)
    seen: list[int] = []

    def batches(stop: bool) -> Iterator[torch.Tensor]:
        yield images[:3]
        yield images[3:]
        if stop:
            seen.append(1)

    with stoppable(lambda: bool(seen)), pytest.raises(TaskStopped):
        layerwise_cka(*models, batches(True))
    with pytest.raises(TaskStopped), stoppable(stopped_after(3)):
        layerwise_cosine(*models, [images])
    assert layerwise_cka(*models, batches(False)).keys() == {"0", "1"}
    assert not any(module.training is False or module._forward_hooks for model in models for module in model)


def test_opening_of_data(tmp_path: Path) -> None:
    entries = []
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(b"x")
        entries.append({"image": f"{number}.png", "label": 0})
    splits = {"training": entries[:2], "validation": entries[2:3], "test": entries[3:]}
    (tmp_path / "datalist.json").write_text(json.dumps(splits))
    with stoppable(stopped_after(3)), pytest.raises(TaskStopped):
        load_datalist(str(tmp_path), site="site-1", class_labels=True)
    with stoppable(stopped_after(4)):
        assert load_datalist(str(tmp_path), site="site-1", class_labels=True)
    with stoppable(stopped_after(2)), pytest.raises(TaskStopped):
        PELVIS.patients("site-1", size=(32, 32, 4))
    for corrupted in (0, 2):
        task = ClassificationTask(**{**CLASSES, "phantom_seed": 77 + corrupted, "corrupted_sites": corrupted})
        data = task.open_site("site-1", {})
        with stoppable(stopped_after(10)), pytest.raises(TaskStopped):
            list(data.batches("training", batch_size=16))


def test_outside_of_a_task_nobody_asks() -> None:
    check_stop()
    with stoppable(lambda: True):
        with stoppable(lambda: False):
            check_stop()
        with pytest.raises(TaskStopped):
            check_stop()
    check_stop()


def test_what_a_tasks_data_have_besides_is_still_there() -> None:
    data = Counted(SegmentationTask(**SEGMENTATION).open_site("site-1", {}))
    seen = StoppableData(data)
    assert (seen.own, seen.test_splits) == ("of the task", ("test", "test_again"))
    assert seen.order("training", 3) == data.order("training", 3)
    assert len(seen.batches("training", batch_size=4)) == len(data.batches("training", batch_size=4))
    with pytest.raises(AttributeError, match="nothing"):
        _ = seen.nothing
    with pytest.raises(AttributeError):
        _ = StoppableData.__new__(StoppableData).anything


# ------------------------------------------------------------------------------------------------ a child process


def isolated(folder: Path, *, seconds: float = 0.05, deaf: bool = False) -> tuple[SiteReply, float]:
    """Return the reply to a task that is stopped in its first training batch, and the seconds it took."""
    reached = folder / "reached"
    at: list[float] = []

    def should_stop() -> bool:
        if reached.exists() and not at:
            at.append(time.monotonic())
        return bool(at)

    slow = {"folder": str(folder), "seconds": seconds, "deaf": deaf}
    worker = {
        "site": "site-1", "task": SlowTask(), "training": LocalTraining(batch_size=2), "settings": {"slow": slow},
        "state_folder": folder / "state",
    }  # fmt: skip
    reply = perform_isolated(worker, request("train", initial(SlowTask())), should_stop)
    return reply, time.monotonic() - at[0]


@pytest.mark.long
@pytest.mark.parametrize("deaf", [False, True])
def test_a_child_process_ends_with_the_job(tmp_path: Path, deaf: bool) -> None:
    reply, took = isolated(tmp_path, deaf=deaf)
    assert (reply.status, reply.reason) == ("skipped", "site 'site-1': the job was stopped")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "reached").read_text()), 0)
    # Three seconds by design, and time for a busy machine; to the end it would be 10 s and more (600 s deaf).
    assert took < 8
    # It has heard it, or was killed before it could tidy up; the lock is free in any case.
    assert (tmp_path / "state" / "run" / "scratch").exists() == deaf
    here = at_site(tmp_path / "state", task=SlowTask(), settings={"slow": {"folder": str(tmp_path), "seconds": 0}})
    assert "is in use" not in here.perform(request("train", initial(SlowTask()))).reason
