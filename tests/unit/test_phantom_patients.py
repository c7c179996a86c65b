"""Test the synthetic patients: prostates as slices, abdomens as volumes, and channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from fairflare.data.datalist import SPLITS
from fairflare_lab.phantoms import ABDOMEN, PELVIS
from fairflare_lab.phantoms.anatomy import Anatomy, Patient
from fairflare_lab.phantoms.prostate import SLICES

SITES = [f"site-{number}" for number in range(1, 7)]
SMALL = (32, 32, SLICES)


def every(found: dict[str, list[Patient]]) -> list[Patient]:
    return [patient for split in SPLITS for patient in found[split]]


def test_shapes_types_and_counts() -> None:
    assert list(PELVIS.scanners) == SITES
    training = 0
    for site in SITES:
        data = PELVIS.patients(site, size=(48, 32, SLICES))
        assert tuple(data) == SPLITS
        assert tuple(map(len, data.values())) == PELVIS.scanner(site).patients
        for patient in every(data):
            assert patient.image.shape == (1, *patient.label.shape) == (1, 48, 32, SLICES)
            assert patient.image.dtype == patient.label.dtype == np.uint8
            assert set(np.unique(patient.label)) == {0, 1}
            assert (patient.label.sum(axis=(0, 1)) >= 4).all()  # some gland on every slice
        training += len(data["training"])
    assert 60 <= training <= 80


def test_more_cases_keep_the_first_ones() -> None:
    few, many = PELVIS.patients("site-1", size=SMALL, cases=0.1), PELVIS.patients("site-1", size=SMALL, cases=2.0)
    for first, same in zip(few["training"], many["training"], strict=False):
        np.testing.assert_array_equal(first.image, same.image)
    assert len(many["test"]) == 2 * PELVIS.scanner("site-1").patients[2]


def test_no_patient_is_in_two_splits_or_two_sites() -> None:
    seen: dict[bytes, tuple[str, str]] = {}
    for site in [*SITES, "site-7", "hospital-a"]:
        for split, patients in PELVIS.patients(site, size=SMALL, cases=0.5).items():
            for patient in patients:
                assert seen.setdefault(patient.image.tobytes(), (site, split)) == (site, split)


def test_a_site_of_another_name_is_a_variation_of_one_of_the_six() -> None:
    base, other, again = (PELVIS.scanner(site) for site in ("site-2", "site-8", "site-8"))
    assert other == again
    assert (other.patients, other.view, other.tissues) == (base.patients, base.view, base.tissues)
    for name in ("gamma", "bias", "noise", "blur", "size"):
        assert getattr(other, name) != getattr(base, name)
        assert getattr(other, name) == pytest.approx(getattr(base, name), rel=0.15)


@pytest.mark.parametrize(
    ("anatomy", "site", "mean", "voxels"),
    [
        (PELVIS, "site-1", 108.77, [1316, 0]),
        (PELVIS, "site-2", 98.36, [2018, 0]),
        (PELVIS, "hospital-a", 155.28, [958, 0]),
        (ABDOMEN, "site-1", 130.63, [336, 19]),
        (ABDOMEN, "site-3", 211.21, [307, 24]),
    ],
)
def test_images_are_those_of_this_version(anatomy: Anatomy, site: str, mean: float, voxels: list[int]) -> None:
    """Check that nobody changes images unawares; who does names the version that drew stored results."""
    patient = anatomy.patients(site, size=(40, 48, 12), seed=5, cases=0.01)["training"][0]
    assert patient.image.mean() == pytest.approx(mean, rel=1e-3)
    np.testing.assert_allclose([(patient.label == k).sum() for k in (1, 2)], voxels, atol=2)


def test_a_patient_is_the_same_at_every_size() -> None:
    """Check that the view is across the shorter edge; the longer edge shows more."""
    square, wide, fine = (
        PELVIS.patients("site-1", size=size, cases=0.01)["test"][0] for size in ((48, 48, 4), (80, 48, 4), (96, 96, 4))
    )
    np.testing.assert_array_equal(wide.label[16:64], square.label)
    assert wide.label.sum() == square.label.sum()
    assert int(fine.label.sum()) == pytest.approx(4 * int(square.label.sum()), rel=0.03)
    assert fine.voxel[0] == square.voxel[0] / 2


def test_sites_differ_in_contrast_and_size() -> None:
    """Check what makes the six sites hard: the gland's brightness beside its surroundings, and its size in pixels."""
    contrast, size = [], []
    for site in SITES:
        patients = PELVIS.patients(site, size=(64, 64, SLICES))["training"]
        inside = [p.image[0][p.label > 0].mean() / p.image[0][p.label == 0].mean() for p in patients]
        contrast.append(np.mean(inside))
        size.append(np.mean([p.label.mean() for p in patients]))
    assert max(contrast) > 2 * min(contrast)
    assert max(size) > 2 * min(size)


def test_the_second_group_has_a_larger_zone_and_may_be_outlined_by_half() -> None:
    whole, halved = (every(PELVIS.patients("site-5", size=SMALL, cases=3, halved=share)) for share in (0.0, 0.5))
    sizes = [np.mean([p.label.sum() for p in whole if p.group == group]) for group in (0, 1)]
    assert sizes[1] > 1.1 * sizes[0]
    changed = [not np.array_equal(p.label, q.label) for p, q in zip(whole, halved, strict=True)]
    assert not any(change for change, patient in zip(changed, whole, strict=True) if not patient.group)
    assert sum(changed) == pytest.approx(0.5 * sum(p.group for p in whole), abs=2)
    for before, after, change in zip(whole, halved, changed, strict=True):
        np.testing.assert_array_equal(before.image, after.image)
        share = after.label.sum() / before.label.sum()
        assert share == (pytest.approx(0.5, abs=0.1) if change else 1.0)
        assert not (after.label & ~before.label).any()


def test_a_structure_shows_in_its_channels_only(tmp_path: Path) -> None:
    shows = {2: [2]}
    patient = ABDOMEN.patients("site-1", size=(32, 32, 24), channels=4, shows=shows)["test"][0]
    alone = ABDOMEN.patients("site-1", size=(32, 32, 24))["test"][0]
    np.testing.assert_array_equal(patient.label, alone.label)  # the anatomy is the same
    assert patient.image.shape == (4, 32, 32, 24)
    around = patient.image[:, patient.label == 1]
    distance = abs(patient.image[:, patient.label == 2].mean(1) - around.mean(1)) / around.std(1)
    assert distance[2] > 2
    assert max(distance[[0, 1, 3]]) < 0.8  # of the organ around it, the edge is darker
    assert len({*patient.image.mean((1, 2, 3)).round()}) == 4  # no channel is a copy
    patient.write(tmp_path / "image.nii", tmp_path / "label.nii")
    stored: Any = nibabel.load(tmp_path / "image.nii")
    np.testing.assert_array_equal(np.moveaxis(np.asarray(stored.dataobj), -1, 0), patient.image)
    np.testing.assert_allclose(stored.header.get_zooms()[:3], patient.voxel)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": (8, 64, 4)}, "^each of size.* got 8$"),
        ({"size": (64, 48.5, 4)}, "^each of size.* got 48.5$"),
        ({"seed": -1}, "^phantom_seed.* got -1$"),
        ({"seed": True}, "^phantom_seed.* got True$"),
        ({"cases": 0}, "^phantom_cases.* got 0$"),
        ({"cases": 1001}, "^phantom_cases.* got 1001$"),
        ({"cases": float("nan")}, "phantom_cases must be in"),
        ({"channels": 0}, "channels must be an integer >= 1, got 0"),
        ({"channels": 2, "shows": {1: [2]}}, "^channel of shows.* got 2$"),
        ({"shows": {2: [0]}}, "^structure of shows.* got 2$"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PELVIS.patients("site-1", **{"size": SMALL, **arguments})  # type: ignore[arg-type]
