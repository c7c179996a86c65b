"""Test the random changes of training images: how far they go, and the papers' own."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy.ndimage import correlate1d

from fairflare.tasks.batches import Augmented, Blur, Jitter, changes

SIZE = (41, 61)


def changed(image: torch.Tensor, names: list[str], count: int = 40) -> list[np.ndarray]:
    """Return the image after as many random changes."""
    batches = [(image.expand(count, -1, -1, -1), torch.zeros(count))]
    transform = changes(names, size=image.shape[1:], with_targets=False)
    ((inputs, _),) = Augmented(batches, transform, 0, with_targets=False)
    return list(inputs[:, 0].numpy())


def line() -> torch.Tensor:
    """Return an image of a horizontal line through the middle."""
    image = torch.zeros(1, *SIZE)
    image[:, SIZE[0] // 2 - 1 : SIZE[0] // 2 + 2, 5:-5] = 1
    return image


def angle(picture: np.ndarray) -> float:
    """Return the line's angle in degrees in (-90, 90], by the second moments of the bright pixels."""
    rows, columns = np.nonzero(picture > 0.5)
    covariance = np.cov(columns, rows)
    return math.degrees(0.5 * math.atan2(2 * covariance[0, 1], covariance[0, 0] - covariance[1, 1]))


@pytest.mark.parametrize(("names", "most"), [(["affine"], 11.9), (["rotate"], 10.0)])
def test_images_are_turned_by_at_most_ten_degrees(names: list[str], most: float) -> None:
    """Check that ``affine`` turns by 9.74 degrees, and scales height by up to 1.1 and width by 0.9."""
    found = [abs(angle(picture)) for picture in changed(line(), names, 80)]
    assert most - 4.0 < max(found) < most + 1.0  # of pixels
    turned = [one for one in found if one > 0.2]
    assert len(turned) > (0.8 if names == ["rotate"] else 0.35) * len(found)
    if names == ["affine"]:
        assert len(turned) < 0.65 * len(found)


def test_every_image_is_shifted_by_at_most_two_in_a_hundred() -> None:
    image = torch.zeros(1, 200, 100)
    image[:, 90:110, 45:55] = 1
    centres = np.array([np.argwhere(p > 0.5).mean(0) for p in changed(image, ["shift"], 60)]) - (99.5, 49.5)
    assert np.abs(centres[:, 0]).max() <= 4.5
    assert np.abs(centres[:, 1]).max() <= 2.5
    assert np.abs(centres[:, 0]).max() > 3
    assert np.abs(centres[:, 1]).max() > 1
    assert len(np.unique(centres, axis=0)) > 10


def test_flips_are_left_and_right_or_up_and_down() -> None:
    image = torch.arange(12.0).reshape(1, 3, 4) / 12
    ways = {"flip": [image, image.flip(2)], "flip_vertical": [image, image.flip(1)]}
    for name, wanted in ways.items():
        found = changed(image, [name])
        counts = [sum(np.array_equal(picture, way[0].numpy()) for picture in found) for way in wanted]
        assert sum(counts) == len(found)
        assert min(counts) > 8


def test_the_blur_is_torchvisions() -> None:
    """Compare with sampled Gaussians of 5 columns and 9 rows with mirrored edges: with SciPy, in float64."""
    image = torch.rand(3, 20, 24, generator=torch.Generator().manual_seed(0))
    blur = Blur()
    for seed in range(5):
        blur.set_random_state(seed=seed)
        got = blur({"image": image})["image"].numpy()
        sigma = np.random.RandomState(seed).uniform(0.1, 5.0)
        wanted = image.numpy().astype(np.float64)
        for axis, tail in ((1, 4), (2, 2)):
            kernel = np.exp(-0.5 * (np.arange(-tail, tail + 1) / sigma) ** 2)
            wanted = correlate1d(wanted, kernel / kernel.sum(), axis=axis, mode="mirror")
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_one_move_scales_shifts_or_turns() -> None:
    """Check one of three changes each time, a third of the images each: by size, centre and angle of a bar."""
    image = torch.zeros(1, 101, 101)
    image[:, 44:57, 21:80] = 1
    seen: dict[str, list[float]] = {"scaled": [], "shifted": [], "turned": []}
    for picture in changed(image, ["one_move"], 150):
        found = np.argwhere(picture > 0.5)
        (row, column), turned = found.mean(0) - 50, angle(picture)
        if abs(turned) > 1:
            assert max(abs(row), abs(column)) < 1
            assert len(found) / (13 * 59) == pytest.approx(1, abs=0.05)
            seen["turned"].append(turned)
        elif abs(column) > 0.7:
            assert abs(row) < 0.5
            assert len(found) == 13 * 59
            seen["shifted"].append(column)
        else:
            wide, high = np.ptp(found[:, 1]) + 1, np.ptp(found[:, 0]) + 1
            assert high / 13 == pytest.approx(wide / 59, abs=0.12)  # alike in both directions
            seen["scaled"].append(wide / 59)
    assert min(len(found) for found in seen.values()) > 30
    low, high = min(seen["scaled"]), max(seen["scaled"])
    assert (low, high) == (pytest.approx(0.95, abs=0.03), pytest.approx(1.20, abs=0.04))
    assert (min(seen["shifted"]), max(seen["shifted"])) == (pytest.approx(-5.05, abs=0.7), pytest.approx(5.05, abs=0.7))
    assert (min(seen["turned"]), max(seen["turned"])) == (pytest.approx(-45, abs=4), pytest.approx(45, abs=4))


def jittered(picture: Image.Image, seed: int) -> np.ndarray:
    """Compute torchvision's jitter with Pillow, and the hue pixel by pixel with Python's ``colorsys``."""
    random = np.random.RandomState(seed)
    factors, turn = random.uniform(0.75, 1.25, 3), random.uniform(-0.01, 0.01)
    for kind in random.permutation(4):
        if kind < 3:
            enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[kind]
            picture = enhance(picture).enhance(factors[kind])
            continue
        pixels = np.asarray(picture).reshape(-1, 3) / 255
        hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in pixels.tolist()]
        turned = np.array([colorsys.hsv_to_rgb((h + turn) % 1, s, v) for h, s, v in hsv])
        picture = Image.fromarray((255 * turned).round().astype(np.uint8).reshape(*picture.size[::-1], 3))
    return np.asarray(picture).transpose(2, 0, 1) / 255


def test_the_jitter_is_torchvisions() -> None:
    """Check equality except for the rounding to 256 levels, four times."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3)).astype(np.uint8)
    pixels[0, 0], pixels[1, 1] = 90, (0, 0, 255)
    image = torch.as_tensor(pixels.transpose(2, 0, 1) / 255).float()
    jitter = Jitter()
    for seed in range(12):
        jitter.set_random_state(seed=seed)
        got = jitter({"image": image})["image"].numpy()
        np.testing.assert_allclose(got, jittered(Image.fromarray(pixels), seed), atol=5 / 255)
    grey = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))
    changed_grey = jitter({"image": grey})["image"]
    assert changed_grey.shape == grey.shape
    assert not torch.equal(changed_grey, grey)


def test_the_targets_move_along_but_for_what_is_of_the_image_alone() -> None:
    image = torch.zeros(1, 40, 40)
    image[:, 8:20, 8:30] = 1
    transform = changes(["flip", "flip_vertical", "rotate", "shift", "one_move"], size=(40, 40), with_targets=True)
    transform.set_random_state(seed=3)
    for _ in range(10):
        item = transform({"image": image, "label": image.clone()})
        assert torch.equal(torch.as_tensor(item["image"]), torch.as_tensor(item["label"]))


def test_a_seed_gives_the_same_images() -> None:
    image = torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(1))
    names = ["flip", "flip_vertical", "blur", "rotate", "shift", "one_move", "jitter"]
    one, other = changed(image, names, 5), changed(image, names, 5)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0], one[1])
