"""Test the task of nnU-Net's plan: network, intensities, loss, patches, and what methods see of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from fairflare.core.features.parts import names_in
from fairflare.core.plans.counts import Case
from fairflare.core.plans.document import plan_of
from fairflare.data.whole_volumes import Whole
from fairflare.methods.base.local_loop import rate
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.volumes.nnunet import NnUNetTask, resolutions

from .test_plan_rules import of_cases


def plan(channels: list[str] | None = None, size: tuple[int, int, int] = (20, 24, 24)) -> dict[str, Any]:
    """Return a plan of a network with 4, 8, ... features."""
    made = plan_of(of_cases([Case((4.0, 4.0, 4.0), size, 1.0)] * 20), channels=channels or ["MR"], outputs=3, memory=8)
    network = made["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [4 * 2**k for k in range(network["n_stages"])]
    if channels and "CT" in channels:
        figures = {"mean": 50.0, "std": 20.0, "percentile_00_5": -10.0, "percentile_99_5": 120.0}
        made["foreground_intensity_properties_per_channel"][str(channels.index("CT"))] = figures
    return made


def task(**settings: Any) -> NnUNetTask:
    return NnUNetTask(**{"plan": plan(), "num_classes": 2, **settings})


def test_a_plan_is_taken_from_a_file_and_decides_grid_and_patch(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan()), "utf-8")
    found = task(plan=str(file))
    assert found.plan == plan()
    assert (found.patch_size, found.spacing, found.orientation) == ((20, 24, 24), (4.0, 4.0, 4.0), "SAR")
    with pytest.raises(ValueError, match="has no setting 'spacing'"):
        task(spacing=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"cannot be read as JSON: .*No such file"):
        task(plan=str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"2 channel.*the run has channels=\[\]"):
        task(plan=plan(["T2", "ADC"]))


def test_only_training_has_the_coarser_outputs_and_each_has_its_own_layer() -> None:
    model, images = task().build_model(), torch.randn(1, 1, 20, 24, 24)
    outputs = model(images)
    assert [tuple(of.shape[2:]) for of in (outputs, *vars(outputs)["coarser"])] == [(20, 24, 24), (10, 12, 12)]
    assert "coarser" not in vars(model.eval()(images))
    rows = [name for name, tensor in model.state_dict().items() if "seg_layers" in name and len(tensor) == 2]
    assert sorted(task().output_tensors()) == sorted(rows)
    assert names_in(model, "head") == ["decoder.seg_layers.1.weight", "decoder.seg_layers.1.bias"]


def test_the_coarsest_resolution_does_not_count_and_others_weigh_half() -> None:
    outputs = torch.zeros(1, 1, 8, 8, 8)
    vars(outputs)["coarser"] = [torch.zeros(1, 1, 4, 4, 4), torch.zeros(1, 1, 2, 2, 2)]
    targets = torch.arange(512.0).view(1, 1, 8, 8, 8)
    (one, _, whole), (other, _, half) = resolutions(outputs, targets)
    assert (one, other) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert torch.equal(whole, targets)
    assert half.flatten().tolist()[:3] == [targets[0, 0, 1, 1, k].item() for k in (1, 3, 5)]  # the nearest voxel


def test_the_loss_is_dice_and_cross_entropy_by_hand() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 2, 4, 4, 4), (torch.rand(2, 2, 4, 4, 4) > 0.6).float()
    targets[0, :, 0] = -1  # voxels that do not count
    found, wanted = outputs.sigmoid(), []
    for case in range(2):
        for structure in range(2):
            counts = targets[case, structure] >= 0
            p, t = found[case, structure][counts], targets[case, structure][counts]
            dice = (2 * (p * t).sum() + 1e-5) / (p.sum() + t.sum() + 1e-5)
            entropy = -(t * p.log() + (1 - t) * (1 - p).log()).mean()
            wanted.append(1 - dice + entropy)
    losses = torch.stack(wanted).view(2, 2)
    assert torch.allclose(task().sample_losses(outputs, targets), losses.mean(1))
    assert torch.allclose(task().structure_losses(outputs, targets), losses.mean(0))
    assert torch.allclose(task().loss(outputs, targets), losses.mean())
    of_batch = copy.deepcopy(plan())
    of_batch["configurations"]["3d_fullres"]["batch_dice"] = True
    batch = task(plan=of_batch).loss(outputs, targets)
    counts = targets >= 0
    p, t = found * counts, targets.clamp(min=0)
    dice = (2 * (p * t).sum((0, 2, 3, 4)) + 1e-5) / (p.sum((0, 2, 3, 4)) + t.sum((0, 2, 3, 4)) + 1e-5)
    entropies = torch.nn.functional.binary_cross_entropy(found, t, reduction="none")
    each = (entropies * counts).flatten(1).sum(1) / counts.flatten(1).sum(1)
    assert torch.allclose(batch, 1 - dice.mean() + each.mean())


@pytest.mark.parametrize("masked", [False, True])
def test_each_channel_is_standardised_as_the_plan_says(masked: bool) -> None:
    rng, made = np.random.default_rng(0), plan(["T2", "CT"])
    made["configurations"]["3d_fullres"]["use_mask_for_norm"][0] = masked
    images = np.stack([rng.normal(300, 50, (20, 24, 24)), rng.normal(60, 80, (20, 24, 24))]).astype(np.float32)
    images[:, :, :8] = images[:, :5, 20:] = images[:, 12, 15, 10] = 0  # an edge, a corner, a hole
    inside = np.ones((20, 16, 24), bool)  # without the edge; nnU-Net fills the hole
    inside[:5, 12:] = False
    found = task(plan=made, channels=("T2", "CT")).place_volume(Whole(images, None, np.diag([4.0, 4, 4, 1])), "x")
    values = images[:, :, 8:]
    part = values[0][inside] if masked else values[0]
    first = np.where(inside | (not masked), (values[0] - part.mean()) / part.std(), 0)
    second = (np.clip(values[1], -10, 120) - 50) / 20
    there = np.linalg.inv(found.affine.numpy()) @ [0, 32, 0, 1]  # where the first voxel of the box lies
    place = tuple(slice(int(n), int(n) + side) for n, side in zip(there, (24, 16, 20), strict=False))
    for number, wanted in enumerate((first, second)):  # to the head, front and right
        assert np.allclose(found[(number, *place)], wanted.T, atol=1e-4)


def test_the_rate_falls_with_every_step_of_the_run() -> None:
    half = LocalTraining(schedule="poly", learning_rate=0.01)
    rates = [rate(half, number, 4, step / 5) for number in range(4) for step in range(5)]
    assert rates == pytest.approx([0.01 * (1 - s / 20) ** 0.9 for s in range(20)])


def test_the_last_patch_of_each_batch_lies_in_a_structure() -> None:
    data = task(phantom_cases=0.2).open_site("x", {"phantom": True})
    batches = list(data.batches("training", batch_size=2, shuffle_seed=3))
    inside = [bool((targets[1] == 1).any()) for _, targets in batches]
    assert all(inside)
    again = list(data.batches("training", batch_size=2, shuffle_seed=3))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))


def test_augmentation_changes_patches_and_keeps_labels_whole() -> None:
    data = task(phantom_cases=0.2).open_site("x", {"phantom": True})
    plain, changed = (list(data.batches("training", batch_size=2, shuffle_seed=3, augment=on)) for on in (False, True))
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(plain, changed, strict=True))
    assert float(max(images.max() for images, _ in changed)) > 1  # values are not clipped to [0, 1]
    assert {*torch.cat([targets.unique() for _, targets in changed]).tolist()} <= {-1.0, 0.0, 1.0}


def test_a_volume_is_resampled_where_nnunet_places_its_voxels() -> None:
    """Compare with interpolation of one axis after the other, at the middles of voxels that fill the same space."""
    made = plan()
    target = made["configurations"]["3d_fullres"]["spacing"]
    values = np.random.default_rng(0).random((1, 9, 12, 10)).astype(np.float32)
    image = MetaTensor(torch.from_numpy(values), affine=torch.diag(torch.tensor([3.0, 5.0, 2.5, 1.0])).double())
    wanted, nearest = values[0], values[0]
    for axis, mm in enumerate((3.0, 5.0, 2.5)):
        old = values.shape[axis + 1]
        new = round(old * mm / target[axis])
        places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        wanted = np.apply_along_axis(lambda line, at=places: np.interp(at, np.arange(len(line)), line), axis, wanted)
        nearest = nearest.take(np.floor((np.arange(new) + 0.5) * old / new).astype(int), axis)
    read = task(plan=made)
    assert np.allclose(read.zoom(image, False)[0], wanted, atol=1e-5)
    assert np.array_equal(read.zoom(image, True)[0], nearest)
    first = read.zoom(image, False).affine[:3, 3]
    assert first.tolist() == pytest.approx(
        [(t - mm) / 2 for t, mm in zip(_even(values, target), (3.0, 5.0, 2.5), strict=True)]
    )


def _even(values: np.ndarray, target: list[float]) -> list[float]:
    """Return the size of voxels that fill the same space in whole numbers."""
    return [n * mm / round(n * mm / t) for n, mm, t in zip(values.shape[1:], (3.0, 5.0, 2.5), target, strict=True)]
