"""Test that what a site did not annotate counts in neither loss nor metrics: the spec's numbers, 2D, 3D, classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from monai.losses.dice import DiceLoss
from torch.nn.functional import binary_cross_entropy_with_logits

from fairflare.base.task import Task
from fairflare.data.datalist import DataError
from fairflare.methods.base.training import LocalTraining, criterion_loss
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask, cross_entropies
from tests.unit.test_census import masks_site

SMALL: dict[str, Any] = {"image_size": (32, 32), "features": (4, 4, 8, 8, 8, 4)}
THREE = SegmentationTask(num_classes=3, **SMALL)
#: Four pixels of truth 1 2 3 0, and what the network says of structures 1, 2, 3 there.
TRUTH = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]).reshape(1, 3, 2, 2)
SAID = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.5, 0.1]]).reshape(1, 3, 2, 2).logit()
SEEN = TRUTH * torch.tensor([1.0, 0, 0]).reshape(1, 3, 1, 1)  # the masks of a site that annotated structure 1 only


def as_said(outputs: Any, numbers: tuple[int, ...], task: Any = THREE) -> float:
    return float(task.annotating(numbers).loss(outputs, SEEN))


def test_the_worked_example_of_masked_channels() -> None:
    """Check Dice losses .3, .368421, .444444 of the whole truth; masked .3; zeros as truth .766659; blanked .1."""
    plain = DiceLoss(sigmoid=True, smooth_nr=0, smooth_dr=0)
    assert float(plain(SAID, TRUTH)) == pytest.approx(0.370955, abs=2e-6)
    assert as_said(SAID, (0,)) == pytest.approx(0.3, abs=1e-5)
    assert float(THREE.loss(SAID, SEEN)) == pytest.approx(0.766659, abs=2e-5)
    blanked = SAID.masked_fill(torch.tensor([False, True, True]).reshape(1, 3, 1, 1), -torch.inf)
    assert float(THREE.loss(blanked, SEEN)) == pytest.approx(0.1, abs=1e-5)
    assert THREE.structure_losses(SAID, TRUTH).tolist() == pytest.approx([0.3, 0.368421, 0.444444], abs=1e-5)
    assert THREE.annotating((2, 0)).structure_losses(SAID, TRUTH).tolist() == pytest.approx([0.444444, 0.3], abs=1e-5)
    assert float(THREE.annotating((0,)).sample_losses(SAID, SEEN)) == pytest.approx(0.3, abs=1e-5)


def test_the_worked_example_of_cross_entropy_in_volumes() -> None:
    """Check BCE of the whole truth .209074, masked .168189, zeros as truth .242863; volumes add Dice to it."""
    whole, seen, said = (values.unsqueeze(-1) for values in (TRUTH, SEEN, SAID))
    assert float(cross_entropies(said, whole)) == pytest.approx(0.209074, abs=1e-6)
    assert float(cross_entropies(said, seen)) == pytest.approx(0.242863, abs=1e-6)
    task = VolumeSegmentationTask(num_classes=3)
    one = task.annotating((0,))
    assert float(one.loss(said, seen)) == pytest.approx(0.3 + 0.168189, abs=1e-5)
    assert float(one.sample_losses(said, seen)) == pytest.approx(0.3 + 0.168189, abs=1e-5)
    assert float(one.structure_losses(said, seen)) == pytest.approx(0.3 + 0.168189, abs=1e-5)
    assert float(task.structure_losses(said, whole).mean()) == pytest.approx(float(task.loss(said, whole)), rel=1e-6)


def test_what_is_not_annotated_has_no_gradient() -> None:
    outputs = SAID.clone().requires_grad_()
    THREE.annotating((0,)).loss(outputs, SEEN).backward()
    assert outputs.grad is not None
    assert bool((outputs.grad[:, 0] != 0).all())
    assert bool((outputs.grad[:, 1:] == 0).all())


@pytest.mark.parametrize("numbers", [None, (0, 1, 2)])
def test_all_annotated_is_the_task_itself(numbers: tuple[int, ...] | None) -> None:
    """Check that the task is the same object, so that nothing in it can differ."""
    assert THREE.annotating(numbers) is THREE
    data = SimpleNamespace(annotated=numbers, synthetic=False, class_names=None, class_groups=None)
    assert THREE.suited_to(data) is THREE
    assert float(THREE.loss(SAID, TRUTH)) == float(DiceLoss(sigmoid=True)(SAID, TRUTH))


class FindsBoth(torch.nn.Module):
    """Predict both structures in the left half of every picture."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.full((len(inputs), 2, *inputs.shape[2:]), -9.0)
        found[:, 0, :, :16] = 9.0
        found[:, 1, :, :16] = 9.0
        return found


def test_metrics_are_of_what_the_site_annotated(tmp_path: Path) -> None:
    task = SegmentationTask(num_classes=2, metrics=("dice", "iou"), **SMALL)
    block = masks_site(tmp_path / "a", (1,))
    silent, said = (task.open_site("a", {**block, **more}) for more in ({}, {"structures": [1]}))
    own: Any = task.suited_to(said)
    assert own.annotated == (0,)
    whole = task.evaluate(FindsBoth(), silent.batches("test", batch_size=2), "cpu")
    part = own.evaluate(FindsBoth(), said.batches("test", batch_size=2), "cpu")
    assert whole["dice_class_2"] == 0
    assert whole["dice"] == whole["dice_class_1"] / 2
    assert {*whole} - {*part} == {"dice_class_2", "iou_class_2", "loss_class_2"}
    assert part["dice"] == part["dice_class_1"] == whole["dice_class_1"]
    assert part["loss"] == pytest.approx(part["loss_class_1"], rel=1e-6)
    assert whole["loss"] == pytest.approx((whole["loss_class_1"] + whole["loss_class_2"]) / 2, rel=1e-6)
    _, scores = own.outcomes(FindsBoth(), said, "test", "cpu")
    assert np.isnan(scores[:, 1]).all()
    assert not np.isnan(scores[:, 0]).any()
    assert own.image_scores(FindsBoth(), said, "cpu") == scores[:, 0].tolist()


@pytest.mark.parametrize("evaluate_at", ["network", "image"])
def test_at_the_size_of_the_image(tmp_path: Path, evaluate_at: Any) -> None:
    task = SegmentationTask(num_classes=2, evaluate_at=evaluate_at, **SMALL)
    data = task.open_site("a", {**masks_site(tmp_path / "a", (2,)), "structures": [2]})
    found = task.suited_to(data).evaluate(FindsBoth(), data.batches("test", batch_size=2), "cpu")
    assert "dice_class_1" not in found
    assert 0 < found["dice_class_2"] == found["dice"]


def test_a_site_needs_no_mask_value_of_what_it_did_not_annotate(tmp_path: Path) -> None:
    """Check that the one structure of a site whose masks hold 0 and 2 may be any of the task's."""
    task = SegmentationTask(num_classes=2, **SMALL)
    block = {**masks_site(tmp_path / "a", (2,)), "mask_values": {"0": 0, "2": 1}}
    with pytest.raises(DataError, match=r"structure \[2\].* says so with 'structures'"):
        task.open_site("a", block)
    (_, targets), *_ = task.open_site("a", {**block, "structures": [1]}).batches("test", batch_size=2)
    assert targets[:, 0].any()
    assert not targets[:, 1].any()


def test_a_loss_of_the_users_own_is_refused_by_name(tmp_path: Path) -> None:
    class Own(SegmentationTask):
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return binary_cross_entropy_with_logits(outputs, targets)

    task = Own(num_classes=2, **SMALL)
    block = masks_site(tmp_path / "a", (1,))
    with pytest.raises(ValueError, match=r"structures does not name all, .*\(Own\)"):
        task.open_site("a", {**block, "structures": [1]})
    assert task.open_site("a", {**block, "structures": "all"}).annotated == (0, 1)


# ------------------------------------------------------------------------------------------------ classes

LOGITS, LABEL = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
CLASSES = ClassificationTask(num_classes=3, class_names=["x", "y", "z"], class_groups={}, image_size=(33, 33))


def test_the_worked_example_of_masked_logits() -> None:
    """Check full .407606; class 2 masked .313262, without a gradient that lowers it."""
    assert float(CLASSES.loss(LOGITS, LABEL)) == pytest.approx(0.407606, abs=1e-6)
    part = CLASSES.annotating((0, 1))
    outputs = LOGITS.clone().requires_grad_()
    loss = part.loss(outputs, LABEL)
    loss.backward()
    assert loss.item() == float(part.sample_losses(LOGITS, LABEL)) == pytest.approx(0.313262, abs=1e-6)
    assert outputs.grad is not None
    assert outputs.grad[0, 2] == 0
    assert outputs.grad[0, 1] > 0
    assert part.probabilities(LOGITS)[0, 2] == 0
    assert float(part.probabilities(LOGITS).sum()) == 1
    assert CLASSES.chosen(LOGITS) is LOGITS


@pytest.mark.parametrize("criterion", ["balanced_softmax", "logit_adjusted", "fedlc"])
def test_losses_by_class_counts_leave_them_out_too(criterion: Any) -> None:
    """Check a task as if it had two classes only, with the prior of the classes that the site can have."""
    half = LocalTraining(criterion=criterion)
    found = []
    for task, counts, logits in ((CLASSES.annotating((0, 1)), [6, 2, 0], LOGITS), (CLASSES, [6, 2], LOGITS[:, :2])):
        data = SimpleNamespace(class_counts=lambda split, own=counts: torch.tensor(own))
        run: Any = SimpleNamespace(site="a", data=data, task=task)
        found.append(float(criterion_loss(half, run, logits, LABEL)))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_metrics_of_classes_and_what_lies_outside() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0], [2.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.0, 2.0, 1.0]])
    batches = [(logits, torch.tensor([1, 0, 0, 1]))]
    whole = CLASSES.evaluate(torch.nn.Identity(), batches, "cpu")
    part = CLASSES.annotating((0, 1)).evaluate(torch.nn.Identity(), batches, "cpu")
    assert (whole["accuracy"], part["accuracy"], part["outside"]) == (0.5, 0.75, 0.25)
    assert part["loss"] < whole["loss"]
    assert "outside" not in whole


def test_other_tasks_choose_everything() -> None:
    assert Task.chosen(THREE, LOGITS) is LOGITS
    assert "annotated" not in {field.name for field in dataclasses.fields(THREE)}  # nothing that a job could say


@pytest.mark.parametrize("key", ["structures", "classes"])
def test_a_bundle_refuses_a_part_by_name(key: str) -> None:
    from fairflare.tasks.bundle import BundleSite
    from fairflare.tasks.shared.site_settings import read_settings

    block = {"data_root": "/data"}
    with pytest.raises(ValueError, match=rf"site 's': {key}.* got \[1\]"):
        read_settings(BundleSite, "s", {**block, key: [1]})
    assert getattr(read_settings(BundleSite, "s", {**block, key: "all"}), key) == "all"
