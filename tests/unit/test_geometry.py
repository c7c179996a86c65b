"""Test the checks of stacks and of pairs: examples by hand, ITK, highdicom and dicom2nifti."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import nibabel
import numpy as np
import pytest

from fairflare.data.geometry import (
    SEGMENTS,
    Fit,
    Grid,
    Misfit,
    Plane,
    Stack,
    fit,
    nifti_grid,
    notes_of,
    tag_turn,
)
from fairflare.data.geometry import stack as in_order
from fairflare.data.kinds import group_faults
from fairflare.data.orientation import turn_view

AXIAL, CORONAL, SAGITTAL = (1, 0, 0, 0, 1, 0), (1, 0, 0, 0, 0, -1), (0, 1, 0, 0, 0, -1)
OBLIQUE = (0.939692621, 0.342020143, 0, -0.296198133, 0.813797681, 0.5)
TILTED = (1, 0, 0, 0, 0.970295726, -0.241921896)
FIRST = np.array([-10.0, -20.0, 30.0])
SPACING = (0.5, 0.75)


def stack(*given: Any, **how: Any) -> Stack | Misfit:
    """Return the stack, or why it is none."""
    try:
        return in_order(*given, **how)
    except Misfit as misfit:
        return misfit


def planes(across: Any, places: Any, **more: Any) -> list[Plane]:
    return [
        Plane(f"'{chr(97 + k)}.dcm'", tuple(map(float, place)), tuple(across), SPACING, number=100 - k, **more)
        for k, place in enumerate(places)
    ]


def axial(heights: Any, **more: Any) -> list[Plane]:
    return planes(AXIAL, [(0, 0, z) for z in heights], **more)


def rows(*three: Any) -> np.ndarray:
    return np.array([*three, [0, 0, 0, 1.0]])


def good(found: Stack | Misfit, order: Any, affine: np.ndarray) -> None:
    assert isinstance(found, Stack), str(found)
    assert found.order == tuple(order)
    np.testing.assert_allclose(found.affine, affine, atol=2e-6)  # type: ignore[arg-type]


def refused(found: Any, *words: str) -> Misfit:
    assert isinstance(found, Misfit), found
    for each in words:
        assert each in str(found), f"{each!r} is not in {found}"
    return found


# --- stacks: numbers 1 to 3, 6 to 15 and 24 of the examples -----------------------------------------------

FIRST_AFFINE = rows([0, -0.75, 0, 10], [-0.5, 0, 0, 20], [0, 0, 2.5, 30])
THIRD = rows([0, 0, -3, 6], [0, -0.75, 0, 20], [-0.5, 0, 0, 30])


def test_01_axial() -> None:
    good(stack(planes(AXIAL, [np.add(FIRST, [0, 0, 2.5 * k]) for k in range(4)])), range(4), FIRST_AFFINE)


def test_02_coronal() -> None:
    found = stack(planes(CORONAL, [np.add(FIRST, [0, 2.5 * k, 0]) for k in (2, 0, 3, 1)]))
    good(found, (1, 3, 0, 2), rows([0, -0.75, 0, 10], [0, 0, -2.5, 20], [-0.5, 0, 0, 30]))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (3, 0, 4, 1, 2)])
def test_03_sagittal(order: Any) -> None:
    found = stack(planes(SAGITTAL, [(-6 + 3 * k, -20, 30) for k in order]))
    good(found, np.argsort(order), THIRD)


def test_06_oblique() -> None:
    normal = np.cross(OBLIQUE[:3], OBLIQUE[3:])
    wanted = rows(
        [0.148099, -0.704769, -0.34202, 10], [-0.406899, -0.256515, 0.939693, 20], [0.25, 0, 1.73205, 30]
    )  # fmt: skip
    good(stack(planes(OBLIQUE, [FIRST + 2 * k * normal for k in range(4)])), range(4), wanted)


def test_07_a_tilted_gantry() -> None:
    found = stack(planes(TILTED, [np.add(FIRST, [0, 0, 5 * k]) for k in range(5)], modality="CT"))
    refused(found, "14.0 degrees", "4.851 mm", "5 from place to place", "dcm2niix", "_Tilt")


def test_08_the_tag_of_a_tilt_alone_does_nothing() -> None:
    heights = [np.add(FIRST, [0, 0, 2.5 * k]) for k in range(4)]
    good(stack(planes(AXIAL, heights, tilt=14.0)), range(4), FIRST_AFFINE)
    nowhere = [Plane("'a'", tilt=14.0, number=1), Plane("'b'", tilt=14.0, number=2)]
    refused(stack(nowhere), "do not say where they lie", "tilted gantry (14 degrees)")


def test_09_a_gap() -> None:
    refused(
        stack(axial([0, 2, 4, 12, 14])),
        "8 mm lie between slices 2 and 3 ('c.dcm', 'd.dcm')", "2 mm between the others", "3 slices are missing",
    )  # fmt: skip
    refused(stack(axial([0, 10, 15, 20])), "10 mm lie between slices 0 and 1", "1 slice is missing")
    found = refused(stack(axial([0, 2, 4, 7.3, 9.3])), "3.3 mm lie between")
    assert "missing" not in str(found)  # no whole number of steps


def test_10_uneven_steps() -> None:
    assert isinstance(stack(axial([0, 2, 4.01, 6, 8], decimals=2)), Stack)
    refused(stack(axial([0, 2, 4.03, 6, 8], decimals=2)), "uneven", "from 1.97 to 2.03 mm, mostly 2", "slices 1 and 2")
    rounded = [round(k * 0.333, 2) for k in range(12)]
    assert isinstance(stack(axial(rounded, decimals=2)), Stack)
    refused(stack(axial(rounded)), "uneven")  # the text does not say that it is rounded
    eighths = [round(k * 0.625, 2) for k in range(30)]
    assert isinstance(stack(axial(eighths, decimals=2)), Stack)


def test_drift_that_no_step_shows() -> None:
    """Check 50 steps of 1.000 and 50 of 1.009: each within 1 %, 0.224 mm off in the middle."""
    heights = np.concatenate([[0], np.cumsum([1.0] * 50 + [1.009] * 50)])
    refused(stack(axial(heights)), "drift", "0.22", "mm off even steps")


def test_11_two_slices_at_one_place() -> None:
    refused(stack(axial([0, 2, 4, 4, 6])), "5 files lie at 4 places", "'c.dcm' and 'd.dcm', at 4 mm")
    echoes = [
        Plane(f"'{k}'", (0.0, 0.0, 2.0 * (k // 2)), AXIAL, SPACING, apart={"EchoTime": str(10 + 5 * (k % 2))})
        for k in range(8)
    ]
    refused(stack(echoes), "8 files lie at 4 places; they differ in EchoTime (10, 15)")
    asked: list[tuple[int, int]] = []
    shuffled = [axial([0, 2, 4, 4, 6])[k] for k in (4, 3, 0, 1, 2)]
    found = stack(shuffled, same=lambda a, b: not asked.append((a, b)))  # type: ignore[func-returns-value]
    refused(found, "a file was copied: 'd.dcm' and 'c.dcm'", "Fetch the series again")
    assert asked == [(1, 4)]


def test_12_frames_are_ordered_by_their_places() -> None:
    found = stack(axial([0, 8, 2, 10, 4, 12, 6, 14]), "frames")
    affine = rows([0, -0.75, 0, 0], [-0.5, 0, 0, 0], [0, 0, 2, 0])
    good(found, (0, 2, 4, 6, 1, 3, 5, 7), affine)
    itk = Grid((4, 5, 8), (("sform", rows([0, -1, 0, 0], [-1, 0, 0, 0], [0, 0, 1, 0])),))
    said = refused(fit(Grid((4, 5, 8), (("header", affine),), of="frames"), itk))
    assert said.value == "its voxels are 1 x 1 x 1 mm, the image's 0.5 x 0.75 x 2"  # 2, 1.3333 and .5 times
    assert "dcm2niix" in said.remedy  # to resample by a wrong grid would not help


def frames(places: Any, **told: Any) -> list[Plane]:
    return [
        Plane(f"frame {k}", tuple(map(float, place)), AXIAL, SPACING, alike={n: v[k] for n, v in told.items()},
              apart={n: v[k] for n, v in told.items()})
        for k, place in enumerate(places)
    ]  # fmt: skip


def test_13_times_in_one_file() -> None:
    places = [(0, 0, z) for z in (0, 2, 4, 6)] * 2
    found = stack(frames(places, TemporalPositionIndex="11112222"), "frames")
    refused(found, "8 frames lie at 4 places; they differ in TemporalPositionIndex (1, 2)", "four_to_three")


def test_14_stacks_in_one_file() -> None:
    places = [(x, 0, z) for x in (0, 100) for z in (0, 2, 4)]
    refused(
        stack(frames(places, StackID="111222"), "frames"),
        "its frames are 2 stacks",
        "StackID (1, 2)",
        "a file of its own",
    )
    refused(stack(frames(places), "frames"), "6 frames lie at 3 places", "frame 0 and frame 3, at 0 mm")


def test_24_directions_that_differ_in_the_seventh_digit() -> None:
    one = [0.99998174, 0.00604261, 0.0, -0.00604261, 0.99998174, 0.0]
    two = [0.99998174, 0.00604273, 0.0, -0.00604273, 0.99998174, 0.0]
    both = [Plane(str(k), (0.0, 0.0, 2.0 * k), tuple((one, two)[k % 2]), SPACING) for k in range(4)]
    assert isinstance(stack(both), Stack)


def test_what_else_is_no_stack() -> None:
    series = axial([0, 2, 4])
    partly = [*series[:2], Plane("'z'", None, AXIAL, SPACING)]
    refused(stack(partly), "2 of 3 files have a usable ImagePositionPatient")
    unscaled = [replace(plane, intercept=None if k else -1024.0) for k, plane in enumerate(series)]
    refused(stack(unscaled), "1 of 3 files have a usable RescaleIntercept")
    scout = [*series[:2], Plane("'z'", (0, 0, 9.0), SAGITTAL, SPACING)]
    refused(stack(scout), "'a.dcm' and 'z' differ in ImageOrientationPatient", "90.0 degrees apart: a localiser")
    wider = [*series[:2], Plane("'z'", (0, 0, 4.0), AXIAL, (0.5, 0.7501))]
    refused(stack(wider), "differ in PixelSpacing: (0.5, 0.75) and (0.5, 0.7501)")
    assert isinstance(stack([*series[:2], Plane("'z'", (0, 0, 4.0), AXIAL, (0.5, 0.75004))]), Stack)
    refused(stack(planes((1, 0, 0, 0.01, 1, 0), [(0, 0, 1)])), "do not lie at a right angle")
    refused(stack(planes((2, 0, 0, 0, 1, 0), [(0, 0, 1)])), "do not lie at a right angle")
    refused(stack([Plane(str(k), (0, 0, float(k)), AXIAL) for k in range(3)]), "no usable PixelSpacing")
    beside = [Plane(str(k), (0.3 * (k == 2), 0, 2.0 * k), AXIAL, SPACING) for k in range(5)]
    refused(stack(beside), "slice 2 (2) is shifted by 0.3 mm beside the others")
    two = [Plane(str(k), (0, 0, 0.0005 * k), AXIAL, SPACING) for k in range(2)]
    refused(stack(two), "2 files lie at 1 places")
    leaning = [Plane(str(k), (0.5 * k, 0, 2.0 * k), AXIAL, SPACING) for k in range(2)]
    refused(stack(leaning), "14.0 degrees off their normal")
    unlike = [Plane(str(k), (0, 0, 2.0 * k), AXIAL, SPACING, alike={"FrameOfReferenceUID": "12"[k]}) for k in range(2)]
    refused(stack(unlike), "0 and 1 differ in FrameOfReferenceUID: 1 and 2")
    refused(stack([Plane("a", number=1), Plane("b", number=1)]), "the series has no order")
    numbered = stack([Plane("a", number=7), Plane("b", number=3)])
    assert isinstance(numbered, Stack)
    assert (numbered.order, numbered.affine) == ((1, 0), None)
    assert "InstanceNumber" in numbered.note


# --- pairs: numbers 4, 5, 16 to 23 ------------------------------------------------------------------------


def grid(shape: Any, affine: np.ndarray, name: str = "sform") -> Grid:
    return Grid(shape, ((name, affine),))


def fits(image: Grid, mask: Grid, axes: Any, flips: str) -> Fit:
    found = fit(image, mask)
    assert isinstance(found, Fit), str(found)
    assert tuple(found.turn[:, 0].astype(int).tolist()) == tuple(axes)
    assert "".join("-" if flipped else "+" for flipped in found.turn[:, 1] < 0) == flips
    return found


SIX = grid((4, 5, 6), FIRST_AFFINE)


def moved(shift: Any) -> Grid:
    affine = FIRST_AFFINE.copy()
    affine[:3, 3] += shift
    return grid((4, 5, 6), affine)


def test_19_what_lies_elsewhere() -> None:
    refused(fit(SIX, moved([0, 0, 2.5])), "it is shifted by (0, 0, 2.5) mm", "written anew")
    corner = refused(fit(SIX, moved([-0.375, -0.25, 1.25])), "corner taken for its centre")
    assert "(-0.375, -0.25, 1.25) mm" in corner.value
    near = fit(SIX, moved([0.1, 0, 0]))
    assert isinstance(near, Fit)
    assert "0.1 mm apart (0.2 voxel)" in near.note
    assert isinstance(fit(SIX, moved([0.25, 0, 0])), Misfit)  # half a voxel is too far
    assert isinstance(fit(SIX, moved([0.249, 0, 0])), Fit)
    c, s = np.cos(np.radians(3)), np.sin(np.radians(3))
    turn = np.array([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    refused(fit(SIX, grid((4, 5, 6), turn @ FIRST_AFFINE)), "it is turned by 3.0 degrees")
    coarse = FIRST_AFFINE @ np.diag([2, 2, 1, 1.0])
    refused(
        fit(SIX, grid((2, 2, 6), coarse)), "its voxels are 1 x 1.5 x 2.5 mm, the image's 0.5 x 0.75 x 2.5", "Resample"
    )
    other = np.diag([-1, -1, 1, 1.0]) @ FIRST_AFFINE
    refused(fit(SIX, grid((4, 5, 6), other)), "LPS taken for RAS")
    far = refused(fit(SIX, moved([0, 0, 50])), "(0, 0, 50) mm")  # on the same axes
    assert "header" not in far.remedy


def test_20_a_crop() -> None:
    begin = FIRST_AFFINE.copy()
    begin[:, 3] = FIRST_AFFINE @ [1, 2, 1, 1]
    said = "it covers a part (from row 1, column 2, slice 1; 2 x 3 x 4 of 4 x 5 x 6)"
    refused(fit(SIX, grid((2, 3, 4), begin)), said, "fills the rest with 0")
    flipped = FIRST_AFFINE @ np.diag([1, 1, -1, 1.0])
    flipped[:, 3] = FIRST_AFFINE @ [1, 2, 4, 1]
    refused(fit(SIX, grid((2, 3, 3), flipped)), "from row 1, column 2, slice 2")
    larger = FIRST_AFFINE.copy()
    larger[:, 3] = FIRST_AFFINE @ [-1, 0, 0, 1]
    refused(fit(SIX, grid((6, 5, 6), larger)), "from row -1, column 0, slice 0; 6 x 5 x 6 of 4 x 5 x 6")


def header(shape: Any, sform: Any = None, qform: Any = None, codes: Any = (1, 1)) -> Any:
    image = nibabel.Nifti1Image(np.zeros(shape, np.uint8), None)
    if sform is not None:
        image.set_sform(np.asarray(sform, float), codes[1])
    if qform is not None:
        image.set_qform(np.asarray(qform, float), codes[0])
    return image.header


def test_21_two_forms_that_differ() -> None:
    q = np.array([[-1, 0, 0, 10], [0, -1, 0, 20], [0, 0, 2, 30], [0, 0, 0, 1.0]])
    s = np.array([[1, 0, 0, -5], [0, 1, 0, -6], [0, 0, 2, -7], [0, 0, 0, 1.0]])
    image = nifti_grid(header((5, 4, 3), s, q, (1, 2)))
    assert [name for name, _ in image.statements] == ["sform", "qform"]
    with pytest.raises(Misfit, match="qform says LPS and sform RAS"):
        _ = image.affine
    for form in (q, s):
        found = fits(image, nifti_grid(header((5, 4, 3), form)), (0, 1, 2), "+++")
        np.testing.assert_allclose(found.affine, form[:, [1, 0, 2, 3]])  # type: ignore[arg-type]
        fits(image, nifti_grid(header((5, 4, 3), None, form)), (0, 1, 2), "+++")
    both = q @ np.diag([-1.0, 1, 1, 1])
    both[:, 3] = q @ [4, 0, 0, 1]
    refused(
        fit(image, Grid((4, 5, 3), (("sform", s[:, [1, 0, 2, 3]]), ("qform", both[:, [1, 0, 2, 3]])))), "in two ways"
    )
    same = nifti_grid(header((5, 4, 3), s, s))
    assert [name for name, _ in same.statements] == ["sform"]
    near = s.copy()
    near[0, 3] += 0.3  # more than a tenth of a voxel, along the same axes
    two_places = nifti_grid(header((5, 4, 3), s, near))
    np.testing.assert_allclose(two_places.affine, s[:, [1, 0, 2, 3]])  # type: ignore[arg-type]
    assert "the sform is read" in two_places.note
    assert not same.note


def test_22_axes_of_one_behind_the_third() -> None:
    affine = np.diag([1, 1, 2, 1.0])
    assert nifti_grid(header((3, 4, 5, 1), affine)).shape == (4, 3, 5)
    assert nifti_grid(header((3, 4, 5, 1, 1), affine)).shape == (4, 3, 5)
    assert nifti_grid(header((3, 4), affine)).shape == (4, 3, 1)
    assert nifti_grid(header((3, 4, 5, 6), affine)).shape == (4, 3, 5)  # who opens the file asks how many volumes
    with pytest.raises(Misfit, match=r"6 volumes .*\(3, 4, 5, 3, 2\)\).*four_to_"):
        nifti_grid(header((3, 4, 5, 3, 2), affine))


def test_23_units() -> None:
    micron = header((3, 4, 5), np.diag([500, 500, 2000, 1.0]))
    micron.set_xyzt_units("micron")
    found = nifti_grid(micron)
    np.testing.assert_allclose(np.linalg.norm(found.affine[:3, :3], axis=0), [0.5, 0.5, 2])  # type: ignore[index]
    assert "microns" in found.note
    metre = header((3, 4, 5), np.diag([0.0005, 0.0005, 0.002, 1.0]))
    metre.set_xyzt_units("meter")
    np.testing.assert_allclose(np.linalg.norm(nifti_grid(metre).affine[:3, :3], axis=0), [0.5, 0.5, 2], rtol=1e-6)  # type: ignore[index]


def test_headers_that_say_what_cannot_be() -> None:
    for axis, size in ((3, 0.0), (2, -1.0)):
        broken = header((3, 4, 5), None, np.diag([1, 1, 2, 1.0]))
        broken["pixdim"][axis] = size
        with pytest.raises(Misfit, match=rf"pixdim\[{axis}\] is {size:g}"):
            nifti_grid(broken)
    by_sform = header((3, 4, 5), np.diag([1, 1, 2, 1.0]))
    by_sform["pixdim"][3] = 0  # not used
    assert nifti_grid(by_sform).affine is not None
    for wrong in (np.diag([1, 1, 0, 1.0]), np.diag([1, np.nan, 2, 1.0])):
        with pytest.raises(Misfit, match="without a length"):
            nifti_grid(header((3, 4, 5), wrong))
    sheared = np.diag([1, 1, 5, 1.0])
    sheared[1, 2] = 5 * np.tan(np.radians(14))
    with pytest.raises(Misfit, match=r"sheared: .* 14.0 degrees"):
        nifti_grid(header((3, 4, 5), sheared))
    for lean, refused in ((0.0155, False), (0.0175, True)):  # two steps of .6 mm: .0186 and .021 mm sideways
        leaning = np.diag([0.1, 0.1, 1, 1.0])
        leaning[:3, 2] = 0.6 * np.sin(lean), 0, 0.6 * np.cos(lean)
        if refused:
            with pytest.raises(Misfit, match=r"sheared: .* 1.0 degrees"):
                nifti_grid(header((3, 3, 3), leaning))
        else:
            assert nifti_grid(header((3, 3, 3), leaning)).affine is not None
    assert nifti_grid(header((3, 4, 5))).statements == ()
    flat = header((3, 4), np.diag([1, 1, 0, 1.0]))  # one slice needs no thickness
    assert nifti_grid(flat).affine is not None


# --- all turns, any grid ----------------------------------------------------------------------------------


def ways() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        (order, signs) for order in itertools.permutations(range(3)) for signs in itertools.product((1, -1), repeat=3)
    ]


def stored_as(
    array: np.ndarray, affine: np.ndarray, order: tuple[int, ...], signs: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return an array with other axes, and its affine, by plain indexing."""
    other = array.transpose(order)
    mapping = np.zeros((4, 4))
    mapping[3, 3] = 1
    for j, (axis, sign) in enumerate(zip(order, signs, strict=True)):
        mapping[axis, j] = sign
        if sign < 0:
            mapping[axis, 3] = array.shape[axis] - 1
    index = tuple(slice(None, None, sign) for sign in signs)
    return other[index], affine @ mapping


def oblique(random: np.random.Generator, shape: Any) -> np.ndarray:
    axes, _ = np.linalg.qr(random.normal(size=(3, 3)))
    affine = np.eye(4)
    affine[:3, :3] = axes * random.uniform(0.3, 6, 3)
    affine[:3, 3] = random.uniform(-300, 300, 3)
    return affine


@pytest.mark.parametrize(("order", "signs"), ways())
def test_a_mask_stored_in_any_way_comes_back(order: Any, signs: Any) -> None:
    random = np.random.default_rng(7)
    array = random.integers(0, 9, (4, 5, 6))
    for affine in (FIRST_AFFINE, oblique(random, array.shape)):
        mask, its = stored_as(array, affine, order, signs)
        found = fit(grid(array.shape, affine), grid(mask.shape, its))
        assert isinstance(found, Fit), str(found)
        np.testing.assert_array_equal(found.bring(mask), array)


def test_random_oblique_grids_with_float32_headers() -> None:
    random = np.random.default_rng(11)
    for _ in range(300):
        shape = tuple(random.integers(1, 40, 3).tolist())
        if sorted(shape)[1] == 1:
            continue
        array = random.integers(0, 1000, shape)
        affine = oblique(random, shape)
        order, signs = ways()[random.integers(48)]
        mask, its = stored_as(array, affine, order, signs)
        found = fit(grid(shape, affine), grid(mask.shape, its.astype(np.float32).astype(float)))
        assert isinstance(found, Fit), str(found)
        brought = found.bring(mask)
        single = [axis for axis in range(3) if shape[axis] == 1]
        assert brought.shape == array.shape, single
        np.testing.assert_array_equal(brought, array)
        assert not found.note


# --- one says nothing -------------------------------------------------------------------------------------


def test_the_turns_that_a_picture_states() -> None:
    stored = np.array([[0, 1, 2], [3, 4, 5]])
    wanted = {
        1: [[0, 1, 2], [3, 4, 5]], 2: [[2, 1, 0], [5, 4, 3]], 3: [[5, 4, 3], [2, 1, 0]], 4: [[3, 4, 5], [0, 1, 2]],
        5: [[0, 3], [1, 4], [2, 5]], 6: [[3, 0], [4, 1], [5, 2]], 7: [[5, 2], [4, 1], [3, 0]],
        8: [[2, 5], [1, 4], [0, 3]], 9: [[0, 1, 2], [3, 4, 5]], None: [[0, 1, 2], [3, 4, 5]],
    }  # fmt: skip
    for tag, seen in wanted.items():
        assert turn_view(stored, tag_turn(tag)).tolist() == seen, tag


def shown(stored: np.ndarray, tag: int | None) -> tuple[np.ndarray, Grid]:
    seen = turn_view(stored, tag_turn(tag))
    return seen, Grid((*seen.shape, 1), tag=tag)


@pytest.mark.parametrize("tag", range(1, 9))
def test_only_one_of_two_pictures_says_that_it_is_turned(tag: int) -> None:
    drawn = np.arange(6).reshape(2, 3)
    seen, turning = shown(drawn, tag)
    _, silent = shown(drawn, None)
    for image, mask in ((turning, silent), (silent, turning)):
        found = fit(image, mask)
        if tag == 1:
            assert isinstance(found, Fit)
            continue
        words = f"the {'picture' if image is turning else 'mask'} says that it is turned (EXIF {tag})"
        refused(found, words, "mask_drawn_on", "fairflare.json")
    by_stored = fit(turning, silent, "stored")
    assert isinstance(by_stored, Fit)
    np.testing.assert_array_equal(by_stored.bring(drawn), seen)  # the image's turn, applied to both
    backwards = fit(silent, turning, "stored")
    assert isinstance(backwards, Fit)
    np.testing.assert_array_equal(backwards.bring(seen), drawn)
    on_shown = fit(turning, Grid(turning.shape), "upright")
    assert isinstance(on_shown, Fit)
    np.testing.assert_array_equal(on_shown.bring(seen), seen)
    both = fit(turning, turning, "stored")
    assert isinstance(both, Fit)  # it never overrides two statements
    np.testing.assert_array_equal(both.bring(seen), seen)


def test_one_file_without_a_place() -> None:
    nothing = Grid((4, 5, 6))
    lps = rows([0, -1, 0, 0], [-1, 0, 0, 0], [0, 0, 1, 0])
    flat, mirrored = grid((4, 5, 1), lps), grid((4, 5, 1), lps @ np.diag([1, -1, 1, 1.0]))
    assert isinstance(fit(flat, Grid((4, 5, 1))), Fit)  # one slice that nothing turns
    assert isinstance(fit(mirrored, Grid((4, 5, 1)), orientation="stored"), Fit)
    for image, mask in ((mirrored, Grid((4, 5, 1))), (Grid((4, 5, 1)), mirrored), (SIX, nothing), (nothing, SIX)):
        refused(fit(image, mask), "says how it lies, the", "says nothing", "mask_drawn_on", "CopyInformation")
        assert isinstance(fit(image, mask, "stored"), Fit)
    array = np.arange(20).reshape(4, 5)
    upright = fit(mirrored, Grid((4, 5, 1)), "upright")
    assert isinstance(upright, Fit)
    np.testing.assert_array_equal(
        upright.bring(array), array[:, ::-1]
    )  # drawn on what is shown, brought to the file's rows
    pixel = fit(mirrored, Grid((4, 5, 1)), "stored")
    assert isinstance(pixel, Fit)
    np.testing.assert_array_equal(pixel.bring(array), array)
    for of in ("series", "frames"):
        volume = Grid((4, 5, 6), (("header", FIRST_AFFINE),), of=of)
        for drawn_on in (None, "stored", "upright"):
            refused(
                fit(volume, nothing, drawn_on),
                "may be numbered from either end",
                "nibabel.Nifti1Image(array, image.affine)",
            )
    assert isinstance(fit(nothing, nothing), Fit)
    refused(fit(nothing, Grid((4, 5, 7))), "it is 4 x 5 x 7 voxels (rows, columns, slices), its image 4 x 5 x 6")
    refused(fit(Grid((4, 5, 1)), Grid((5, 4, 1))), "it is 4x5 (width x height), its image 5x4")
    for image in (SIX, Grid((4, 5, 6), SIX.statements, of="series"), Grid((4, 5, 1), tag=3)):
        refused(fit(image, Grid((9, 9, 1))), "image 5x4" if image.tag else "4 x 5 x 6")  # no setting would help


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("places", [(1, 3), (0,), (4,), (0, 1, 2, 3, 4), (2, 3, 4)])
def test_slices_that_a_segmentation_leaves_out_are_empty(places: tuple[int, ...], down: bool) -> None:
    """Each frame comes to the slice at its place, whichever way the file counts, and with a step of two slices."""
    affine = rows((0, -0.75, 0, 20), (-0.5, 0, 0, 30), (0, 0, 3, 5))
    image = Grid((4, 3, 5), (("header", affine),), of="series")
    whole = np.zeros((4, 3, 5), np.uint8)
    whole[:, :, list(places)] = 1 + np.arange(len(places))
    order = [*places[::-1]] if down else [*places]
    step = (order[1] - order[0]) * 3 if len(order) > 1 else 3
    own = rows((0, -0.75, 0, 20), (-0.5, 0, 0, 30), (0, 0, step, 5 + 3 * order[0]))
    mask = Grid((4, 3, len(order)), (("SEG", own),), of=SEGMENTS)
    found = fit(image, mask)
    assert isinstance(found, Fit), found
    np.testing.assert_array_equal(found.bring(whole[:, :, order]), whole)
    plain = fit(image, replace(mask, of="frames"))  # of any other mask a part stays a part
    assert isinstance(plain, Fit) == (len(order) == 5)
    for off in (1.6, -3.0 * (min(places) + 1), 3.0 * (5 - max(places))):  # between two slices, before and behind
        moved = own.copy()
        moved[2, 3] += off
        assert isinstance(fit(image, replace(mask, statements=(("SEG", moved),))), Misfit)


def test_two_frames_of_a_segmentation_at_one_slice_are_refused() -> None:
    affine = rows((0, -0.75, 0, 20), (-0.5, 0, 0, 30), (0, 0, 3, 5))
    thin = rows((0, -0.75, 0, 20), (-0.5, 0, 0, 30), (0, 0, 1, 5))
    image, mask = Grid((4, 3, 5), (("header", affine),)), Grid((4, 3, 5), (("SEG", thin),), of=SEGMENTS)
    found = fit(image, mask)
    assert isinstance(found, Misfit)
    assert found.cause == "a mask of another resolution"


def test_frames_of_reference_and_postures() -> None:
    one, other = (Grid((4, 5, 6), (("header", FIRST_AFFINE),), frame=frame) for frame in "12")
    refused(fit(one, other), "its FrameOfReferenceUID is 2, the image's 1")
    assert isinstance(fit(one, SIX), Fit)  # missing in one: places are compared
    left, right = (Grid((4, 5, 1), posture=posture) for posture in ("L\\F", "R\\F"))
    refused(fit(left, right), "its PatientOrientation is R\\F, the image's L\\F")
    assert isinstance(fit(left, Grid((4, 5, 1))), Fit)
    one, other = (Grid((4, 5, 6), SIX.statements, posture=posture) for posture in ("L\\F", "R\\F"))
    assert isinstance(fit(one, other), Fit)  # places say more


# --- words ------------------------------------------------------------------------------------------------


def test_a_kind_is_one_line() -> None:
    gaps = [(f"'s{k}'", stack(axial([0, 2, 4, 12 + k, 14 + k]))) for k in range(5)]
    lines = list(group_faults([*gaps, ("'m.nii' of 'a'", fit(SIX, moved([0, 0, 50])))]))  # type: ignore[list-item]
    assert len(lines) == 2
    assert lines[0].startswith("5 x slices are missing: 's0': 8 mm lie between slices 2 and 3")
    assert lines[0].count("mm lie between") == 3
    assert lines[0].endswith(" and 2 more. Fetch the whole series, or leave it out")
    assert lines[1].startswith(
        "1 x a mask that is shifted: 'm.nii' of 'a': it is shifted by (0, 0, 50) mm. Have the mask written anew"
    )
    assert notes_of(["a", "", "b", "a"]) == ["a (2 times)", "b"]


def test_no_remedy_edits_a_header() -> None:
    import fairflare.data.geometry.misfits as misfits
    import fairflare.data.geometry.nifti as nifti
    import fairflare.data.geometry.pairs as pairs
    import fairflare.data.geometry.stacks as stacks

    modules = (misfits, nifti, pairs, stacks)
    texts = [text for module in modules for name, text in vars(module).items() if name.isupper()]
    said = " ".join(text for text in texts if isinstance(text, str))
    assert "dcm2niix" in said
    for word in ("correct", "header", "orientation=", "rename", "delete", "duplicate"):
        assert word not in said.lower()


def test_a_misfit_goes_through_a_process() -> None:
    found = pickle.loads(pickle.dumps(fit(SIX, moved([0, 0, 50]))))
    assert (found.cause, str(found)) == ("a mask that is shifted", str(fit(SIX, moved([0, 0, 50]))))
