"""Test Gaussian noise and motion blur."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fairflare.data.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    blur_kernel,
    corrupt,
    gaussian_noise,
    image_seed,
    motion_blur,
)

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (40, 56, 3), np.uint8)


@pytest.mark.parametrize(
    ("severity", "width", "first"),
    [(1, 21, 0.234745), (2, 31, 0.147785), (3, 31, 0.095011), (4, 31, 0.065044), (5, 41, 0.052166)],
)
def test_kernel_worked_in_the_spec(severity: int, width: int, first: float) -> None:
    kernel = blur_kernel(severity)
    assert len(kernel) == width
    assert kernel[0] == pytest.approx(first, abs=5e-7)
    assert kernel.sum() == pytest.approx(1, abs=1e-12)
    assert (np.diff(kernel) < 0).all()


def test_kernel_scales_with_the_image() -> None:
    assert len(blur_kernel(3, size=448)) == 61
    assert len(blur_kernel(3, size=48)) == 7  # radius 15 * 48 / 224 = 3.2
    assert len(blur_kernel(1, size=32)) == 3  # 10 * 32 / 224 = 1.4
    # the blur covers the same share of the image: mean shift in units of the image size
    for severity in SEVERITIES:
        share = [np.arange(len(k)) @ k / n for n in (224, 896) for k in [blur_kernel(severity, size=n)]]
        assert share[0] == pytest.approx(share[1], rel=0.12)  # a start at whole pixels is what differs


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_by_the_definition(severity: int) -> None:
    """Check intensities in [0, 1], as Hendrycks & Dietterich write it; the same random numbers, in float64."""
    drawn = np.random.default_rng(8).standard_normal(PICTURE.shape, np.float32).astype(float)
    expected = np.clip(PICTURE / 255 + (0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1] * drawn, 0, 1) * 255
    noisy = gaussian_noise(PICTURE, severity, np.random.default_rng(8))
    off = noisy != np.floor(expected)
    assert off.mean() < 1e-3  # float32 falls on the other side of a whole number now and then
    assert np.abs(noisy - expected).max() <= 1 + 1e-3


def test_noise_is_truncated() -> None:
    class One:
        def standard_normal(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
            return np.ones(shape, dtype)

    image = np.array([[0, 100, 250]], np.uint8)
    noisy = gaussian_noise(image, 1, One())  # type: ignore[arg-type]
    assert noisy.tolist() == [[20, 120, 255]]  # + 255 * 0.08 = 20.4


def test_motion_blur_by_the_definition() -> None:
    image = PICTURE[:, :, 0]
    for severity in (1, 3):
        kernel = blur_kernel(severity, size=40)
        theta = math.radians(np.random.default_rng(5).uniform(-45, 45))
        expected = np.zeros(image.shape)
        for y in range(40):
            for x in range(56):
                for i, k in enumerate(kernel):
                    dx = math.ceil(i * math.cos(theta) - 0.5)
                    dy = math.ceil(i * math.sin(theta) - 0.5)
                    expected[y, x] += k * image[min(max(y + dy, 0), 39), min(max(x + dx, 0), 55)]
        blurred = motion_blur(image, severity, np.random.default_rng(5))
        assert np.abs(blurred - expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("severity", SEVERITIES)
def test_a_constant_image_is_not_changed_by_blur(severity: int) -> None:
    for value in (0, 1, 127, 200, 255):
        image = np.full((48, 64, 3), value, np.uint8)
        np.testing.assert_array_equal(motion_blur(image, severity, np.random.default_rng(severity)), image)


def test_colour_channels_are_blurred_alike_and_shapes_kept() -> None:
    grey = PICTURE[:, :, 0]
    colour = np.repeat(grey[:, :, None], 3, axis=2)
    for shape in (grey, colour, grey[:, :, None]):
        for kind in CORRUPTIONS:
            result = corrupt(shape, kind, 3, 9)
            assert (result.shape, result.dtype) == (shape.shape, np.uint8)
    np.testing.assert_array_equal(corrupt(colour, "motion_blur", 3, 9)[:, :, 2], corrupt(grey, "motion_blur", 3, 9))


@pytest.mark.parametrize("kind", list(CORRUPTIONS))
def test_the_seed_decides_and_severity_grows(kind: str) -> None:
    before = PICTURE.copy()
    first = corrupt(PICTURE, kind, 3, 7)
    np.testing.assert_array_equal(first, corrupt(PICTURE, kind, 3, 7))
    assert (first != corrupt(PICTURE, kind, 3, 8)).any()
    np.testing.assert_array_equal(PICTURE, before)
    smooth = np.add.outer(np.sin(np.arange(224) / 9), np.cos(np.arange(224) / 7))
    image = (127 + 60 * smooth).astype(np.uint8)
    errors = [np.abs(corrupt(image, kind, s, 7).astype(float) - image).mean() for s in SEVERITIES]
    assert errors == sorted(errors)


def test_image_seeds() -> None:
    assert image_seed("ISIC_0000000") == image_seed("ISIC_0000000")
    seeds = {image_seed(f"ISIC_{n:07d}", seed) for n in range(200) for seed in range(3)}
    assert len(seeds) == 600
    assert image_seed("a", 0) == 9900254242217337299  # the same on every machine and in every version


def test_errors_say_what_is_wrong() -> None:
    for call, message in (
        (lambda: corrupt(PICTURE, "fog", 3, 0), "^corruption.* got 'fog'$"),
        (lambda: corrupt(PICTURE, "motion_blur", 6, 0), "^severity.* got 6$"),
        (lambda: corrupt(PICTURE, "gaussian_noise", 0, 0), "severity must be .*, got 0"),
        (lambda: corrupt(PICTURE, "gaussian_noise", True, 0), "severity must be .*, got True"),
        (lambda: corrupt(PICTURE, "gaussian_noise", 3.0, 0), "severity must be .*, got 3.0"),  # type: ignore[arg-type]
        (lambda: corrupt(PICTURE / 255, "gaussian_noise", 1, 0), "uint8 array .*, got float64"),
        (lambda: corrupt(PICTURE[0, 0], "motion_blur", 1, 0), r"shape \(h, w\) or .*, got uint8 \(3,\)"),
        (lambda: corrupt(PICTURE[:0], "motion_blur", 1, 0), r"got uint8 \(0, 56, 3\)"),
        (lambda: corrupt([[1, 2]], "motion_blur", 1, 0), "uint8 array .*, got list"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            call()
