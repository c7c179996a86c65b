"""Test metrics of masks against loops over every pair of surface pixels and every pixel."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fairflare.base.acting import idle
from fairflare.federation.plan.plan import make_plan
from fairflare.tasks.base import SiteData
from fairflare.tasks.scores.dice_scores import BatchOf, DiceScores, Origin
from fairflare.tasks.scores.mask_metrics import MaskMetrics
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

EVERY = ("iou", "hd95", "assd", "surface_dice", "volume_error")


def surface(mask: np.ndarray) -> list[tuple[int, ...]]:
    """Return the pixels of a mask with a neighbour along an axis outside of the mask or the image."""
    found = []
    for place in zip(*np.nonzero(mask), strict=True):
        for axis, step in itertools.product(range(mask.ndim), (-1, 1)):
            beside = list(place)
            beside[axis] += step
            if not 0 <= beside[axis] < mask.shape[axis] or not mask[tuple(beside)]:
                found.append(tuple(map(int, place)))
                break
    return found


def reference(found: np.ndarray, truth: np.ndarray, sizes: tuple[float, ...], tolerance: float) -> dict[str, float]:
    """Compute the metrics of one image and structure, line by line."""
    volume = math.prod(sizes) / (1000 if len(sizes) == 3 else 1)
    name = "volume" if len(sizes) == 3 else "area"
    error = (int(found.sum()) - int(truth.sum())) * volume
    values = {f"{name}_error": abs(error), f"{name}_over": max(error, 0.0), f"{name}_under": max(-error, 0.0)}
    if not found.any() and not truth.any():
        return {**values, "iou": 1.0, "hd95": 0.0, "assd": 0.0, "surface_dice": 1.0}
    if not found.any() or not truth.any():
        worst = math.sqrt(sum((n * s) ** 2 for n, s in zip(found.shape, sizes, strict=True)))
        return {**values, "iou": 0.0, "hd95": worst, "assd": worst, "surface_dice": 0.0}
    one, other = surface(found), surface(truth)
    scaled = [[[p * s for p, s in zip(at, sizes, strict=True)] for at in points] for points in (one, other)]
    there = [min(math.dist(a, b) for b in scaled[1]) for a in scaled[0]]
    back = [min(math.dist(a, b) for a in scaled[0]) for b in scaled[1]]
    every = there + back
    return {
        **values,
        "iou": int((found & truth).sum()) / int((found | truth).sum()),
        "hd95": max(float(np.percentile(there, 95)), float(np.percentile(back, 95))),
        "assd": sum(every) / len(every),
        "surface_dice": sum(d <= tolerance for d in every) / len(every),
    }


def masks(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return two boxes with holes, near each other."""
    found, truth = np.zeros(shape, bool), np.zeros(shape, bool)
    for mask in (found, truth):
        low = [int(rng.integers(0, side // 2)) for side in shape]
        mask[
            tuple(slice(at, at + int(rng.integers(3, side // 2 + 1))) for at, side in zip(low, shape, strict=True))
        ] = 1
        mask &= rng.random(shape) < 0.9
    return found, truth


@pytest.mark.parametrize(
    ("shape", "spacing"), [((14, 11), (0.5, 2.0)), ((14, 11), None), ((9, 8, 7), (0.8, 1.0, 2.5)), ((9, 8, 7), None)]
)
def test_surfaces_and_volumes(shape: tuple[int, ...], spacing: tuple[float, ...] | None) -> None:
    rng = np.random.default_rng(len(shape))
    metrics = MaskMetrics(EVERY, len(shape), 1.5)
    wanted: list[dict[str, float]] = []
    empty = np.zeros(shape, bool)
    pairs = [masks(rng, shape) for _ in range(3)]
    pairs += [(empty, empty), (pairs[0][0], empty), (empty, pairs[0][1])]
    for found, truth in pairs:
        metrics.add(*(torch.from_numpy(m)[None] for m in (found, truth, ~empty)), spacing)
        scaled = reference(found, truth, spacing or (1.0,) * len(shape), 1.5)
        if spacing is None and len(shape) == 3:
            scaled |= {name: value * 1000 for name, value in scaled.items() if name.startswith("volume")}  # voxels
        wanted.append(scaled)
    front = "" if spacing else "pixel_"
    told = {name: float(values[0]) for name, values in metrics.means().items()}
    for name in wanted[0]:
        key = name if name == "iou" else front + name
        assert told.pop(key) == pytest.approx(np.mean([one[name] for one in wanted]), rel=1e-5), name
    assert not told


def test_dice_of_volumes_is_of_all_their_slices_and_1_where_both_are_empty() -> None:
    """Check volume a: 1 pixel of 2 and 1, and nothing of nothing; the picture by itself: nothing of 1 pixel."""
    found, truth = torch.zeros(3, 1, 2, 2), torch.zeros(3, 1, 2, 2)
    found[0, 0, 0, :], truth[0, 0, 0, 0], truth[2, 0, 1, 1] = 1, 1, 1
    origins = [Origin(name, None, "stretch") for name in ("a", "a", None)]
    scores = DiceScores()
    scores.add(found > 0, truth, origins)
    scores.add(found[1:2] > 0, truth[1:2], [Origin("b", None, "stretch")])
    assert scores.volumes is not None
    assert scores.volumes.flatten().tolist() == pytest.approx([2 / 3, 0, 1])
    assert scores.images.flatten().tolist() == pytest.approx([2 / 3, 1, 0, 1])


def test_pixels_that_do_not_count_are_no_part_of_the_image() -> None:
    metrics = MaskMetrics(("hd95",), 2, 1.0)
    counts = torch.zeros(1, 10, 10, dtype=torch.bool)
    counts[:, 2:5, 3:7] = True
    found = counts.clone()
    metrics.add(found, torch.zeros_like(found), counts, None)
    assert metrics.means()["pixel_hd95"][0] == pytest.approx(5)  # the diagonal of 3 x 4


def test_millimetres_and_pixels_are_not_mixed(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MaskMetrics(("hd95", "iou"), 2, 1.0)
    mask = torch.ones(1, 4, 4, dtype=torch.bool)
    for spacing in ((1.0, 1.0), None):
        metrics.add(mask, mask, mask, spacing)
    assert set(metrics.means()) == {"iou"}
    assert "hd95 left out: 1 of 2 images do not say their spacing" in caplog.text


class Perfect(torch.nn.Module):
    """Predict all bright pixels as every structure."""

    def __init__(self, structures: int) -> None:
        super().__init__()
        self.structures = structures

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([(inputs[:, :1] - 0.5) * 100] * self.structures, 1)


@pytest.mark.parametrize("kind", [SegmentationTask, VolumeSegmentationTask])
def test_a_task_gives_what_it_declares(kind: Any) -> None:
    task = kind(num_classes=2, class_names=["organ", "lesion"], metrics=EVERY, tolerance=2.0)
    shape = (32,) * task.spatial_dims
    inputs = torch.zeros(2, 1, *shape)
    inputs[:, :, 8:20, 10:22] = 0.9
    targets = (inputs > 0.5).float().repeat(1, 2, *[1] * task.spatial_dims)
    origins = [Origin(None, None, "stretch", (1.0,) * task.spatial_dims)] * 2
    found = task.evaluate(Perfect(2), [BatchOf(inputs, targets, origins)], "cpu")
    size = "volume" if task.spatial_dims == 3 else "area"
    names = {
        "iou",
        "hd95",
        "assd",
        "surface_dice",
        *(f"{size}_{w}" for w in ("error", "over", "under")),
    }
    assert {name for name in found if not name.endswith(("_organ", "_lesion"))} == {"dice", "loss", *names}
    assert found["iou"] == found["surface_dice"] == 1.0
    assert found["hd95"] == found["assd"] == found["hd95_organ"] == 0.0
    declared = task.by_name()
    assert set(found) <= set(declared)
    assert all(declared[name].holds(value) for name, value in found.items())
    assert declared["hd95"].unit == "mm"
    assert declared["pixel_hd95"].unit == "pixels"
    assert [task.directions()[name] for name in ("iou", "surface_dice", "hd95")] == [True, True, False]
    unknown = task.evaluate(Perfect(2), [(inputs, targets)], "cpu")
    assert {"pixel_hd95", "pixel_assd_lesion"} <= set(unknown)
    assert "hd95" not in unknown


def test_nothing_more_is_measured_unless_asked_for() -> None:
    names = set(SegmentationTask(num_classes=2).by_name())
    by_class = {f"{name}_class_{c}" for name in ("dice", "volume_dice", "loss") for c in (1, 2)}
    assert names == {"dice", "loss", "volume_dice"} | by_class


def test_a_tolerance_alone_would_do_nothing() -> None:
    settings = {"tolerance": 2.0}
    task = SegmentationTask(metrics=("hd95",), **settings)
    assert "tolerance=2.0 would do nothing" in next(idle([task], settings))
    assert not list(idle([SegmentationTask(metrics=("hd95", "surface_dice"), **settings)], settings))
    with pytest.raises(ValueError, match=r"tolerance=2\.0 would do nothing"):
        make_plan("fed_avg", task="segmentation", settings=settings)


def test_spacing_of_the_datalist_counts_at_the_images_own_size(tmp_path: Any) -> None:
    import json

    from PIL import Image

    truth = np.zeros((40, 36), np.uint8)
    truth[10:20, 6:30] = 255
    for split in ("training", "validation", "test"):
        Image.fromarray(truth).save(tmp_path / f"{split}.png")
    entries = {
        split: [{"image": f"{split}.png", "label": "test.png", "spacing": [0.5, 2.0]}]
        for split in ("training", "validation", "test")
    }
    (tmp_path / "datalist.json").write_text(json.dumps(entries))
    for where, names in (("image", {"hd95", "area_error"}), ("network", {"pixel_hd95", "pixel_area_error"})):
        task = SegmentationTask(metrics=("hd95", "volume_error"), evaluate_at=where, image_size=(32, 32))  # type: ignore[arg-type]
        data: SiteData = task.open_site("site-1", {"data_root": str(tmp_path)})
        found = task.evaluate(torch.nn.Conv2d(1, 1, 1, bias=False), data.batches("test", batch_size=1), "cpu")
        assert names <= set(found)
    nothing = torch.nn.Conv2d(1, 1, 1)
    torch.nn.init.constant_(nothing.weight, 0.0)
    assert nothing.bias is not None
    torch.nn.init.constant_(nothing.bias, -9.0)
    task = SegmentationTask(metrics=("hd95", "volume_error"), evaluate_at="image", image_size=(32, 32))
    data = task.open_site("site-1", {"data_root": str(tmp_path)})
    found = task.evaluate(nothing, data.batches("test", batch_size=1), "cpu")
    assert_allclose([found["hd95"], found["area_under"]], [math.hypot(20.0, 72.0), 240.0])  # 240 pixels of 1 mm2
