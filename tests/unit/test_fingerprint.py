"""Test what a site measures of a volume for a plan: box, spacing, share, and the foreground of its CT channels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairflare.core.plans.counts import Case
from fairflare.data.whole_volumes import Whole
from fairflare.tasks.volumes.fingerprint import crop_zeros, fingerprint, fingerprints


def volume(seed: int = 0) -> Whole:
    """Return two channels and a mask of labels 0, 1, 2, stored with axes to the left, to the feet and to the front."""
    rng = np.random.default_rng(seed)
    image = rng.integers(-500, 500, (2, 10, 12, 14)).astype(np.float32)
    image[image == 0] = 1
    image[:, :3] = image[:, :, 9:] = image[:, :, :, :1] = 0
    image[1, :, :, 12:] = 0  # the other channel has values there
    mask = rng.integers(0, 3, (10, 12, 14)).astype(np.uint8)
    affine = np.zeros((4, 4))
    affine[1, 0], affine[0, 1], affine[2, 2], affine[3, 3] = -2.0, -0.5, -4.0, 1.0
    return Whole(image, mask, affine)


def histogram(values: np.ndarray) -> dict[int, float]:
    numbers, counts = np.unique(np.round(values).astype(int), return_counts=True)
    return dict(zip(numbers.tolist(), (counts / counts.sum()).tolist(), strict=True))


@pytest.mark.parametrize(("labels", "of_ct"), [({1}, (0,)), ({0}, (1,)), ({1, 2}, (0, 1)), ({2}, ())])
def test_a_volume_is_measured_in_the_body_and_its_ct_where_the_structures_are(labels: set[int], of_ct: Any) -> None:
    whole = volume()
    case, found = fingerprint(whole, labels, of_ct)
    # Rows (to the front, 10), columns (to the left, 12), slices (down, 14), cropped to 7, 9 and 13.
    assert case == Case((4.0, 2.0, 0.5), (13, 7, 9), 7 * 9 * 13 / (10 * 12 * 14))
    assert {*found} == {*of_ct}
    assert whole.mask is not None
    for number, shares in found.items():
        wanted = histogram(whole.image[number][np.isin(whole.mask, [*labels])])
        there = {int(place) - 1024: float(shares[place]) for place in np.flatnonzero(shares)}
        assert there == pytest.approx(wanted)


def test_the_box_is_of_all_channels_and_lies_where_it_lay() -> None:
    whole = volume()
    box = crop_zeros(whole)
    assert box.image.shape == (2, 7, 9, 13)
    assert np.array_equal(box.image, whole.image[:, 3:, :9, 1:])
    assert box.mask is not None and whole.mask is not None  # noqa: PT018
    assert np.array_equal(box.mask, whole.mask[3:, :9, 1:])
    assert whole.affine is not None and box.affine is not None  # noqa: PT018
    assert np.allclose(box.affine @ [0, 0, 0, 1], whole.affine @ [3, 0, 1, 1])
    nothing = Whole(np.zeros((1, 2, 3, 4), np.float32), None, None)
    assert crop_zeros(nothing).image.shape == (1, 2, 3, 4)


def test_a_sites_own_values_are_read_as_its_labels() -> None:
    """Write 7 for label 1 and 2 for background at a site: 7 and 1 are foreground there, and 2 is not."""
    whole = volume()
    assert whole.mask is not None
    mask = np.where(whole.mask == 1, 7, whole.mask)
    given = Whole(whole.image, mask, whole.affine)
    data: Any = SimpleNamespace(
        task=SimpleNamespace(structures=[[1], [2]]), coding={7: 1, 2: 0, 0: 0}, num_volumes=lambda split: 3,
        original=lambda split, number: (f"patient {number // 2}", given), takes=lambda: 0,
    )  # fmt: skip
    found = fingerprints(data, "training", (1,))
    assert [patient for patient, *_ in found] == ["patient 0", "patient 0", "patient 1"]
    wanted = histogram(whole.image[1][mask == 7])
    for _, case, shares in found:
        assert case == fingerprint(given, {1}, ())[0]
        assert {int(place) - 1024: float(shares[1][place]) for place in np.flatnonzero(shares[1])} == pytest.approx(
            wanted
        )
