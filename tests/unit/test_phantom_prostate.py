"""Test the synthetic prostate sites."""

from __future__ import annotations

import numpy as np
import pytest

from fairflare_lab.phantoms import prostate_site
from fairflare_lab.phantoms.prostate import SCANNERS, SLICES, SPLITS, scanner

SITES = [f"site-{number}" for number in range(1, 7)]


def test_shapes_types_and_counts() -> None:
    assert list(SCANNERS) == SITES
    training = 0
    for site in SITES:
        data = prostate_site(site, cases=1.0, image_size=(32, 48))
        assert tuple(data) == SPLITS
        for split, patients in zip(SPLITS, scanner(site).patients, strict=True):
            images, masks = data[split]
            assert images.shape == masks.shape == (patients * SLICES, 1, 32, 48)
            assert images.dtype == masks.dtype == np.uint8
            assert set(np.unique(masks)) == {0, 1}
            assert (masks.sum(axis=(1, 2, 3)) >= 4).all()  # some gland on every slice
        training += len(data["training"][0])
    assert 240 <= training <= 320


def test_more_cases_keep_the_first_ones() -> None:
    few, many = prostate_site("site-1", cases=0.1), prostate_site("site-1", cases=2.0)
    np.testing.assert_array_equal(few["training"][0], many["training"][0][: len(few["training"][0])])
    assert len(many["test"][0]) == 2 * scanner("site-1").patients[2] * SLICES


def test_no_patient_is_in_two_splits_or_two_sites() -> None:
    seen: dict[bytes, tuple[str, str]] = {}
    for site in SITES:
        for split, (images, _) in prostate_site(site, cases=0.5, image_size=(32, 32)).items():
            for image in images:
                assert seen.setdefault(image.tobytes(), (site, split)) == (site, split)
    # patients differ from each other more than the slices of one: the masks of neighbours overlap
    _, masks = prostate_site("site-1")["training"]
    pairs = masks[1::SLICES] & masks[2::SLICES]
    assert (pairs.sum(axis=(1, 2, 3)) > 0.5 * masks[1::SLICES].sum(axis=(1, 2, 3))).all()


@pytest.mark.parametrize(
    ("site", "grey", "glands"),
    [
        ("site-1", 140.14, [96, 125, 126, 77]),
        ("site-2", 54.59, [115, 141, 139, 90]),
        ("site-3", 104.88, [26, 33, 31, 15]),
        ("site-4", 83.85, [77, 123, 108, 60]),
        ("site-5", 108.49, [94, 180, 191, 100]),
        ("site-6", 130.95, [65, 96, 85, 57]),
        ("hospital-a", 140.47, [54, 86, 84, 45]),
    ],
)
def test_images_are_those_of_earlier_versions(site: str, grey: float, glands: list[int]) -> None:
    images, masks = prostate_site(site, image_size=(40, 48), seed=5, cases=0.01)["training"]
    assert images.mean() == pytest.approx(grey, abs=0.05)
    np.testing.assert_allclose(masks.sum((1, 2, 3)), glands, atol=2)


def test_an_image_of_two_sizes_has_its_own_height_and_width() -> None:
    """Check that the field of view is across the shorter edge; the longer edge shows more."""
    square, wide = (prostate_site("site-1", image_size=size, cases=0.01)["test"] for size in ((48, 48), (48, 80)))
    middle = wide[1][..., 16:64]
    assert (middle != square[1]).mean() < 0.01
    assert wide[1].sum() == middle.sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": (16, 64)}, "image_size must be an integer >= 32, got 16"),
        ({"image_size": (64, 31)}, "image_size must be an integer >= 32, got 31"),
        ({"image_size": (64, 48.5)}, "image_size must be an integer >= 32, got 48.5"),
        ({"seed": -1}, "phantom_seed must be an integer >= 0, got -1"),
        ({"seed": True}, "phantom_seed must be an integer >= 0, got True"),
        ({"cases": 0}, r"phantom_cases must be in \(0, 1000\], got 0"),
        ({"cases": 1001}, r"phantom_cases must be in \(0, 1000\], got 1001"),
        ({"cases": float("nan")}, "phantom_cases must be in"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prostate_site("site-1", **arguments)  # type: ignore[arg-type]
