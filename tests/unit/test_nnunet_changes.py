"""Test the random changes of nnU-Net's task, one after the other: how often, and how far they go."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_nnunet_task import plan, task

DRAWS = 60


def steps(flat: bool = False) -> list[Any]:
    """Return the changes in order; ``flat``: of a plan with thick slices."""
    made = plan(size=(8, 40, 40)) if flat else plan()
    return list(task(plan=made).changes().transforms)


def drawn(number: int, image: np.ndarray, flat: bool = False) -> list[np.ndarray]:
    """Return an image (x, y, z) after as many draws of one change, which is made each time."""
    step = steps(flat)[number].set_random_state(seed=3)
    step.prob = 1.0
    given = torch.from_numpy(image.astype(np.float32))[None]
    return [np.asarray(step({"image": given.clone(), "label": given.clone()})["image"])[0] for _ in range(DRAWS)]


def test_each_change_is_as_frequent_as_nnunets() -> None:
    assert [step.prob for step in steps()] == [0.2, 0.2, 0.1, 0.2, 0.15, 0.15, 0.25, 0.1, 0.3, 0.5, 0.5, 0.5]


def test_noise_has_a_variance_of_up_to_a_tenth() -> None:
    spread = [found.std() for found in drawn(2, np.zeros((16, 16, 16)))]
    assert max(spread) == pytest.approx(math.sqrt(0.1), rel=0.1)
    assert min(spread) < 0.1 * math.sqrt(0.1)


def test_a_blur_has_a_sigma_from_a_half_to_a_voxel_along_each_axis() -> None:
    point = np.zeros((15, 15, 15))
    point[7, 7, 7] = 1
    places = np.arange(15) - 7
    found = drawn(3, point)
    for axis in range(3):
        lines = [one.sum(tuple({0, 1, 2} - {axis})) for one in found]
        sigmas = np.sqrt([(line * places**2).sum() / line.sum() - 1 / 12 for line in lines])  # a voxel's width besides
        assert 0.4 < sigmas.min() < 0.58
        assert 0.92 < sigmas.max() < 1.02


@pytest.mark.parametrize("number", [4, 5])
def test_brightness_and_contrast_change_by_up_to_a_quarter(number: int) -> None:
    image = np.random.default_rng(0).random((12, 12, 12)) + 1
    found = drawn(number, image)
    of_mean, of_spread = (np.array([measure(one) / measure(image) for one in found]) for measure in (np.mean, np.std))
    assert 0.75 <= of_spread.min() < 0.8
    assert 1.15 < of_spread.max() <= 1.25 + 1e-6
    assert np.allclose(of_mean, of_spread if number == 4 else 1, atol=0.02)
    if number == 5:
        assert all(one.min() >= image.min() - 1e-5 and one.max() <= image.max() + 1e-5 for one in found)


@pytest.mark.parametrize("number", [7, 8])
def test_gamma_goes_from_seven_tenths_to_one_and_a_half(number: int) -> None:
    image = np.random.default_rng(0).random((10, 10, 10))
    scaled, gammas = (image - image.min()) / np.ptp(image), np.linspace(0.5, 1.7, 121)
    rows = np.array([-((1 - scaled) ** gamma) if number == 7 else scaled**gamma for gamma in gammas])
    best = []
    for one in drawn(number, image):
        fits = [np.corrcoef(row.ravel(), one.ravel())[0, 1] for row in rows]
        assert max(fits) > 0.9999
        best.append(gammas[int(np.argmax(fits))])
        assert (one.mean(), one.std()) == pytest.approx((image.mean(), image.std()), rel=1e-3)
    assert 0.69 <= min(best) < 0.76
    assert 1.4 < max(best) <= 1.51


def test_a_lower_resolution_is_half_at_least() -> None:
    """Keep a wave of three voxels a period where voxels are as large, and lose it where they are twice as large."""
    wave = np.cos(2 * np.pi * np.arange(24) / 3)[:, None, None] * np.ones((24, 24, 24))
    kept = [abs((one * wave).sum()) / (wave**2).sum() for one in drawn(6, wave)]
    assert max(kept) > 0.9
    assert min(kept) < 0.6
    assert steps()[6].zoom_range == (0.5, 1.0)


def test_patches_are_mirrored_along_each_axis_and_turned_in_the_plane_where_slices_are_thick() -> None:
    image = np.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    for axis in range(3):
        assert all(np.array_equal(one, np.flip(image, axis)) for one in drawn(9 + axis, image))
    grids = [[step.rand_affine.rand_affine_grid for step in steps(flat)[:2]] for flat in (False, True)]
    (turned, scaled), (in_plane, scaled_in_plane) = grids
    assert [float(value) for value in turned.rotate_range] == pytest.approx([math.pi / 6] * 3)
    assert [float(value) for value in in_plane.rotate_range] == pytest.approx([math.pi, 0, 0])
    assert [tuple(value) for value in scaled.scale_range] == [(-0.3, 0.4)] * 3
    assert [tuple(value) for value in scaled_in_plane.scale_range] == [(0, 0), (-0.3, 0.4), (-0.3, 0.4)]


def test_a_change_moves_image_and_labels_alike() -> None:
    both = torch.zeros(1, 12, 12, 12)
    both[:, 2:7, 3:8, 4:9] = 1
    for number in (0, 1):
        step = steps()[number].set_random_state(seed=1)
        step.prob = 1.0
        found = step({"image": both.clone(), "label": both.clone()})
        assert not torch.equal(torch.as_tensor(found["label"]), both)
        assert ((found["image"] > 0.5) == (found["label"] > 0.5)).float().mean() > 0.97
        assert set(found["label"].unique().tolist()) == {0.0, 1.0}
