"""Labels that do not mean the same at all sites: check-data names every kind, and the site that has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from scipy.ndimage import maximum_filter, minimum_filter

from fairflare.checking.images import Problem, _Looker, check_sites
from fairflare.core.statistics.label_maps import find_exchanged, regions_of
from fairflare.data.datalist import write_datalist
from fairflare.data.kinds import apart, describe_mask, odd_masks
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

Mask = npt.NDArray[np.uint8]
Among = Callable[..., dict[str, Any]]
SITES, ODD, SIDE = ("A", "B", "C", "D"), "B", 40
BETTER = "masks fit the images clearly better if "
MAYBE = "its labels look "  # a probe of the other sites says so: a note, unless hardly any label agrees
CELLS = SegmentationTask(num_classes=2, class_names=["cytoplasm", "nucleus"], image_size=(32, 32))
TYPES = ClassificationTask(num_classes=3, class_names=["x", "y", "z"], class_groups={}, image_size=(33, 33))
BANDS = ClassificationTask(findings=["edema", "mass", "node"], image_size=(33, 33), in_channels=1)


def cell(rng: np.random.Generator) -> Mask:
    """A cell, 1, with its nucleus, 2, somewhere in the picture."""
    y, x = np.indices((SIDE, SIDE))
    centre, size = rng.uniform(16, 24, 2), rng.uniform(9, 12)
    far = np.hypot(y - centre[0], x - centre[1])
    return np.asarray((far < size).astype(np.uint8) + (far < size / 2), np.uint8)


def cells(
    folder: Path, change: Callable[[Mask, int], Mask] | None = None, images: int = 24, **block: Any
) -> dict[str, Any]:
    rng = np.random.default_rng([*folder.name.encode()])
    folder.mkdir()
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in ("training", "validation", "test")}
    for number, split in enumerate(([*splits] * 8)[:images]):
        mask = cell(rng)
        picture = (90 * mask + rng.integers(0, 60, mask.shape)).astype(np.uint8)
        Image.fromarray(picture).save(folder / f"{number}.png")
        Image.fromarray(mask if change is None else change(mask, number)).save(folder / f"{number}_mask.png")
        splits[split].append({"image": f"{number}.png", "label": f"{number}_mask.png", "patient": f"{folder}{number}"})
    write_datalist(folder / "datalist.json", splits)
    return {"data_root": str(folder), **block}


def types(
    folder: Path, change: Callable[[int], int] = int, names: tuple[str, ...] = ("x", "y", "z"), **block: Any
) -> dict[str, Any]:
    """Pictures whose brightness in one corner is their class."""
    rng = np.random.default_rng([*folder.name.encode()])
    folder.mkdir()
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in ("training", "validation", "test")}
    for number, split in enumerate([*splits] * 15):
        label = number // 3 % 3
        picture = rng.integers(0, 40, (SIDE, SIDE)).astype(np.uint8)
        picture[:20, :20] += np.uint8(90 * label)
        Image.fromarray(picture).save(folder / f"{number}.png")
        splits[split].append({"image": f"{number}.png", "label": change(label), "patient": f"{folder}{number}"})
    write_datalist(folder / "datalist.json", splits, class_names=list(names))
    return {"data_root": str(folder), **block}


def recoded(*codes: int) -> Callable[[Mask, int], Mask]:
    """Each value of a mask as the code in its place."""
    return lambda mask, number: np.array(codes, np.uint8)[mask]


def outline(mask: Mask) -> Mask:
    """Return the pixels of a mask that have a neighbour with another value."""
    return np.asarray(mask * (minimum_filter(mask, 3) != maximum_filter(mask, 3)), np.uint8)


def boxes(mask: Mask) -> Mask:
    """Fill the bounding boxes of cell and nucleus."""
    found = np.zeros_like(mask)
    for structure in (1, 2):
        rows, columns = np.nonzero(mask >= structure)
        found[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = structure
    return found


def mask_before() -> Callable[[Mask, int], Mask]:
    """Give each image the mask of the one before it, and the first a cell that none has."""
    last = [cell(np.random.default_rng(99))]

    def change(mask: Mask, number: int) -> Mask:
        last.append(mask)
        return last[-2]

    return change


def findings(folder: Path, change: Callable[[list[Any], int], list[Any]] | None = None) -> dict[str, Any]:
    """Pictures whose bright bands are their findings."""
    rng = np.random.default_rng([*folder.name.encode()])
    folder.mkdir()
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in ("training", "validation", "test")}
    for number in range(72):
        row = [number // 3 >> band & 1 for band in range(3)]
        picture = rng.normal(100, 12, (32, 32)) + 80 * np.repeat(np.array([*row, 0]), 8)[:, None]
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        label = row if change is None else change(row, number)
        entry = {"image": f"{number}.png", "label": label, "patient": f"{folder.name}{number}"}
        splits[[*splits][number % 3]].append(entry)
    write_datalist(folder / "datalist.json", splits, class_names=list(BANDS.findings))
    return {"data_root": str(folder)}


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Among]:
    """Yield a function that puts an odd site among the others, whose pictures are made, and looked at, once."""
    seen, look = dict[tuple[int, str, Path], Any](), _Looker.one

    def look_once(looker: Any, listed: Any) -> Any:
        key = (id(looker.task), *listed[:1], listed[1].image)
        if not any(Path(listed[1].image).is_relative_to(folder) for folder in folders):
            return look(looker, listed)
        if key in seen:
            looker._values.add(listed[1])
        else:
            seen[key] = look(looker, listed)
        return seen[key]

    folders: list[Path] = []

    @cache
    def others(kind: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        folders.append(tmp_path_factory.mktemp(kind.__name__))
        return {site: kind(folders[-1] / site) for site in SITES if site != ODD}

    def among(
        kind: Callable[[Path], dict[str, Any]], odd: dict[str, Any] | None = None, sites: tuple[str, ...] = SITES
    ) -> dict[str, Any]:
        placed = others(kind) if odd is None else {**others(kind), ODD: odd}
        return {site: placed[site] for site in sites if site in placed}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Looker, "one", look_once)
        yield among


def problems_of(task: Any, sites: dict[str, Any]) -> list[Problem]:
    return [one for one in check_sites(task, sites).problems if not one.text.startswith("no 'patient'")]


MASKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a structure was not drawn": (recoded(0, 1, 0), {}, "no mask of B marks nucleus"),
    "nobody drew anything": (recoded(0, 0, 0), {}, "no mask of B marks cytoplasm, nucleus"),
    "every second mask is empty": (
        lambda mask, number: mask * np.uint8(number % 2), {}, "image(s) of 'training' have a mask with nothing in it",
    ),
    "two structures are one": (recoded(0, 1, 1), {}, "no mask of B marks nucleus"),
    "two structures are the other": (recoded(0, 2, 2), {}, "no mask of B marks cytoplasm"),
    "swapped codes": (recoded(0, 2, 1), {}, MAYBE + "swapped: 'cytoplasm' and 'nucleus'"),
    "codes shifted, background too": (recoded(1, 2, 3), {}, "has the values 3; expected are 0, 1, 2"),
    "codes shifted within the range": (recoded(1, 2, 2), {}, MAYBE + "mixed up: 'cytoplasm' looks like 'background'"),
    "inverted": (recoded(1, 0, 0), {}, "'cytoplasm' looks like 'background'"),
    "0 and 255": (recoded(0, 255, 255), {}, "has the values 255; expected are 0, 1, 2"),
    "steps of grey": (recoded(0, 127, 255), {}, "has the values 127, 255; expected are 0, 1, 2"),
    "mask_values swap names": (None, {"mask_values": {0: 0, 1: 2, 2: 1}}, MAYBE + "swapped"),
    "mask_values drop one": (
        None, {"mask_values": {0: 0, 1: 1, 2: 0}}, "mask_values gives no value to the structure [2]",
    ),
    "a structure was drawn in every second mask": (
        lambda mask, number: np.minimum(mask, 1 + number % 2), {}, "12 of 24 masks mark nucleus, and nearly all of",
    ),
    "a structure was drawn for training alone": (
        lambda mask, number: np.minimum(mask, 1 + (number % 3 == 0)), {},
        "nucleus is in 0 of 8 labels of 'test', and in 8 of 8 of 'training': was it looked for in both?",
    ),
    "outlines": (lambda mask, number: outline(mask), {}, "8 image(s) of 'training' have a mask of lines"),
    "half of the masks are swapped": (
        lambda mask, number: recoded(0, 2 - number % 2, 1 + number % 2)(mask, number), {},
        "its labels are unlike those of other sites. A simple probe of the other sites' images agrees with 67%",
    ),
    "every second mask is swapped": (
        lambda mask, number: recoded(0, 1 + number % 2, 2 - number % 2)(mask, number), {},
        "12 of 24 masks look as if cytoplasm and nucleus were exchanged in them: ",
    ),
    "two are one, and the file says that all were looked for": (
        recoded(0, 1, 1), {"structures": "all"}, MAYBE + "mixed up: 'cytoplasm' looks like 'nucleus'",
    ),
    "no background": (recoded(1, 1, 2), {}, "8 image(s) of 'test' have a mask that leaves no background"),
    "boxes": (lambda mask, number: boxes(mask), {}, "24 of 24 masks are boxes"),
    "masks of other images": (mask_before(), {}, BETTER + "they are given to other images of the site"),
    "mirrored": (lambda mask, number: mask[:, ::-1], {}, BETTER + "they are mirrored along axis 2"),
    "turned": (lambda mask, number: mask[::-1, ::-1], {}, BETTER + "they are mirrored along axis 1 and they"),
    "transposed": (lambda mask, number: mask.T, {}, BETTER + "their axes are read as 2, 1"),
    "moved": (lambda mask, number: np.roll(mask, (4, -5), (0, 1)), {}, BETTER + "they are moved along the axes by -1"),
    "the file says less than the masks": (None, {"structures": [1]}, "marks 2, which 'structures' in the site's"),
    "the file says what the task lacks": (None, {"structures": [3]}, "structures: [3] make no whole one of"),
}  # fmt: skip


NOTED = {
    "every second mask is empty", "a structure was drawn in every second mask", "outlines", "no background",
    "a structure was drawn for training alone", "half of the masks are swapped", "boxes", "transposed",
    "every second mask is swapped",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "task"), [(cells, CELLS), (types, TYPES), (findings, BANDS)])
def test_sites_that_agree_have_no_problem(kind: Any, task: Any, agreeing: Among) -> None:
    assert problems_of(task, agreeing(kind)) == []


@pytest.mark.parametrize("clash", MASKS)
def test_masks(tmp_path: Path, agreeing: Among, clash: str) -> None:
    change, block, text = MASKS[clash]
    sites = agreeing(cells, cells(tmp_path / ODD, change, **block), SITES[:3])  # two others are enough
    found = [one for one in problems_of(CELLS, sites) if text in one.text]
    assert [one.site for one in found][:1] == [ODD]
    assert any(one.grave for one in found) or MAYBE in text or clash in NOTED or BETTER in text


def test_the_report_says_where_the_masks_are_too_few_to_tell(tmp_path: Path, agreeing: Among) -> None:
    """Check 8 images a site with swapped codes, and that 24 of which no label agrees are a problem."""
    swapped = recoded(0, 2, 1)
    few = {site: cells(tmp_path / f"few{site}", *((swapped,) if site == ODD else ()), images=8) for site in SITES}
    report = check_sites(CELLS, few)
    assert not any(MAYBE in one.text for one in report.problems)
    assert report.labels.endswith("too few images at A, B, C, D to tell swapped or shifted labels")
    report = check_sites(CELLS, agreeing(cells, cells(tmp_path / ODD, swapped)))
    assert [(one.site, one.grave) for one in report.problems if MAYBE in one.text] == [(ODD, True)]
    assert report.labels.endswith("see above")


def test_the_question_names_merged_structures_and_what_to_do(tmp_path: Path, agreeing: Among) -> None:
    """Check that a site with one number for two structures reads of it, before its answer makes it silent."""
    sites = agreeing(cells, cells(tmp_path / ODD, recoded(0, 1, 1)))
    (asked,) = [one.text for one in problems_of(CELLS, sites) if "no mask of B marks nucleus" in one.text]
    assert "looked for and not there, or part of another (one number for two)?" in asked
    assert (
        "leave the site out of the run, or its images out of its datalist; so too where one number stands for two"
        in asked
    )


PERMUTED = [codes for codes in itertools.permutations(range(3)) if codes != (0, 1, 2)]


@pytest.mark.parametrize("codes", PERMUTED)
def test_permuted_codes_accuse_no_neighbour(tmp_path: Path, agreeing: Among, codes: tuple[int, ...]) -> None:
    found = problems_of(CELLS, agreeing(cells, cells(tmp_path / ODD, recoded(*codes)), SITES[:3]))
    assert {one.site for one in found if one.text.startswith("its labels ")} == {ODD}


PARTLY: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, list[int]], list[tuple[str, str]]]] = {
    "each drew one": ({"A": (0, 0, 2), "B": (0, 1, 0)}, {"A": [2], "B": [1]}, []),
    "nobody drew all": ({"A": (0, 0, 2), "B": (0, 1, 0), "C": (0, 0, 2)}, {"A": [2], "B": [1], "C": [2]}, []),
    "a nucleus as the cytoplasm": (
        {"A": (0, 0, 1), "B": (0, 1, 0)}, {"A": [1], "B": [1]}, [("A", "'cytoplasm' looks like 'nucleus'")],
    ),
    "a cytoplasm as the nucleus": ({"A": (0, 2, 0)}, {"A": [2]}, [("A", "'nucleus' looks like 'cytoplasm'")]),
}  # fmt: skip


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("case", PARTLY)
def test_what_a_site_did_not_draw_is_no_clash(tmp_path: Path, case: str, declared: bool) -> None:
    """Check sites that drew one structure, before and after their files say so, and a wrong number in the file."""
    changes, said, expected = PARTLY[case]
    sites = {
        site: cells(
            tmp_path / site, recoded(*changes[site]) if site in changes else None,
            **({"structures": said[site]} if declared and site in said else {}),
        )
        for site in "ABC"
    }  # fmt: skip
    report = check_sites(CELLS, sites)
    told = [(one.site, one.text) for one in report.problems if one.text.startswith("its labels ")]
    assert [(site, words in text) for (site, text), (_, words) in zip(told, expected, strict=True)] == [
        (site, True) for site, _ in expected
    ]


DRAWS = itertools.cycle(np.random.default_rng(0).integers(0, 3, 45).tolist())
CLASSES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a code is never used": (lambda label: min(label, 1), {}, "no label of B is z"),
    "one code for two": (lambda label: label // 2, {}, "no label of B is z"),
    "shifted around": (lambda label: (label + 1) % 3, {}, MAYBE + "shifted by 1"),
    "counted from 1": (lambda label: label + 1, {}, "has the label 3; the task has the classes 0 to 2"),
    "swapped codes": (lambda label: (1, 0, 2)[label], {}, MAYBE + "swapped: 'x' and 'y'"),
    "class_numbers swap codes": (int, {"class_numbers": {0: 2, 1: 1, 2: 0}}, MAYBE + "swapped: 'x' and 'z'"),
    "labels by chance": (lambda label: next(DRAWS), {}, "its labels are unlike those of other sites"),
    "the file says what the task lacks": (int, {"classes": [1, 7]}, "classes: [7] make no whole one of"),
}  # fmt: skip


@pytest.mark.parametrize("clash", CLASSES)
def test_classes(tmp_path: Path, agreeing: Among, clash: str) -> None:
    change, block, text = CLASSES[clash]
    sites = agreeing(types, types(tmp_path / ODD, change, **block))
    found = [one for one in problems_of(TYPES, sites) if text in one.text]
    assert [one.site for one in found][:1] == [ODD]
    assert any(one.grave for one in found) or MAYBE in text or clash == "labels by chance"


FINDINGS: dict[str, tuple[Callable[[list[Any], int], list[Any]], str]] = {
    "swapped columns": (lambda row, number: [row[1], row[0], row[2]], "its labels are unlike those of other sites"),
    "a column is inverted": (lambda row, number: [1 - row[0], *row[1:]], "'no finding' looks like 'edema'"),
    "known for training alone": (
        lambda row, number: row if number % 3 == 0 else [None, *row[1:]],
        "edema is in 0 of 0 known labels of 'test', and in 12 of 24 of 'training': was it looked for in both?",
    ),
    "no image has it": (lambda row, number: [0, *row[1:]], "no label of B is edema"),
}  # fmt: skip


@pytest.mark.parametrize("clash", FINDINGS)
def test_findings(tmp_path: Path, agreeing: Among, clash: str) -> None:
    change, text = FINDINGS[clash]
    found = problems_of(BANDS, agreeing(findings, findings(tmp_path / ODD, change)))
    assert [one.site for one in found if text in one.text][:1] == [ODD]


def test_a_file_that_says_all_contradicts_a_finding_of_which_nothing_is_known(tmp_path: Path) -> None:
    known = findings(tmp_path / "A")
    silent = findings(tmp_path / ODD, lambda row, number: [None, *row[1:]])
    for said, sites in (("all", [ODD]), ([0, 1, 2], [ODD]), ([1, 2], [])):
        found = problems_of(BANDS, {"A": {**known, "classes": said}, ODD: {**silent, "classes": said}})
        told = [
            one for one in found if "says that these were looked for: edema; but all their labels are null" in one.text
        ]
        assert [(one.site, one.grave) for one in told] == [(site, False) for site in sites]


def test_findings_are_counted_by_name_whatever_their_order(tmp_path: Path) -> None:
    sites = {"A": findings(tmp_path / "A", lambda row, number: [0, row[1], 1])}
    other = ClassificationTask(findings=["node", "mass", "edema"], image_size=(33, 33), in_channels=1)
    for task in (BANDS, other):
        assert check_sites(task, sites).sites[0].labelled == {"edema": 0, "mass": 36, "node": 72}


WAYS: dict[str, tuple[Callable[[Mask], Mask], str]] = {
    "right": (lambda masks: masks, ""),
    "exchanged": (lambda masks: np.roll(masks, 1, 0), "given to other images"),
    "mirrored": (lambda masks: masks[..., ::-1], "mirrored along axis 3"),
    "transposed": (lambda masks: masks.transpose(0, 2, 3, 1), "axes are read as 3, 1, 2"),
    "moved": (lambda masks: np.roll(masks, 3, 2), "moved along the axes by 0%, -1"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_volumes_whose_masks_lie_elsewhere(way: str) -> None:
    """Look for balls of their own place in each volume, at one site, with contrast of either sign and with none."""
    rng = np.random.default_rng(5)
    places = np.indices((20, 20, 20))[:, None]
    masks = np.linalg.norm(places - rng.uniform(5, 15, (3, 20, 1, 1, 1)), axis=0) < rng.uniform(3, 5, (20, 1, 1, 1))
    change, said = WAYS[way]
    for contrast in (-2.0, 2.0, 0.0):
        images = rng.normal(contrast * masks, 1)
        drawn = [describe_mask(str(n), *pair) for n, pair in enumerate(zip(images, change(masks), strict=True))]
        found = [*odd_masks(drawn)]
        assert [said in line for line in found] == [True] * bool(said and contrast)
    assert way == "right" or [*odd_masks(drawn[:15])] == []


@pytest.mark.parametrize("way", ["right", "mirrored", "moved", "images too"])
def test_organs_that_lie_elsewhere_than_at_other_sites(way: str) -> None:
    """Look for organs in one place of a body that shows where they are, without a contrast of their own."""
    rng = np.random.default_rng(6)
    places = np.moveaxis(np.indices((24, 22, 20)), 0, -1)
    body = 3.0 * (np.linalg.norm(places - (8, 9, 12), axis=-1) < 6)
    sites = {}
    for site in SITES:
        organs = np.array([np.linalg.norm(places - (8, 9, 6 + rng.random()), axis=-1) < 5 for _ in range(16)])
        bodies = rng.normal(body, 1, organs.shape)
        if site == ODD and way != "right":
            organs = np.roll(organs, 4, 1) if way == "moved" else organs[..., ::-1]
            bodies = bodies[..., ::-1] if way == "images too" else bodies
        sites[site] = [describe_mask(str(n), *pair) for n, pair in enumerate(zip(bodies, organs, strict=True))]
    found = [*apart(sites)]
    said = {"mirrored": "if they are mirrored along axis 3, and its images do as they are", "moved": "by -17%, 0%, 0%"}
    assert [(site, said.get(way, "?") in text) for site, text in found] == [(ODD, True)] * (way in said)


def pair_of(kind: str, number: int, rng: np.random.Generator) -> Mask:
    """Two parts, (2, 32, 32): one behind the other, a core in a ring, a lesion in or at the edge of an organ."""
    away = np.indices((32, 32)) - rng.uniform(14, 18, (2, 1, 1))
    odd, size = number % 2, rng.uniform(4, 5)
    if kind == "organ":
        lesion = np.hypot(away[0], away[1] - (7.5 if odd else 3.8)) < 2
        return np.stack([(np.hypot(*away) < 8) & ~lesion, lesion])
    if kind == "core":
        return np.stack([np.hypot(*away) < size, (np.hypot(*away) >= size) & (np.hypot(*away) < 2 * size)])
    across = 3 - 6 * odd if kind == "either side" else 0
    return np.stack([np.hypot(away[0] - across, away[1] - 6) < size, np.hypot(away[0], away[1] + 6) < size])


@pytest.mark.parametrize("kind", ["behind", "either side", "core", "organ"])
def test_parts_that_are_exchanged_in_some_masks_of_one_site(kind: str) -> None:
    """Look for two lists of codes at a site; nothing is said of patients who differ by themselves, or of 7 masks."""
    rng, odd = np.random.default_rng(7), [*range(1, 32, 4), 31]
    parts = [pair_of(kind, number, rng) for number in range(32)]
    mixed = [mask[::-1] if number in odd else mask for number, mask in enumerate(parts)]
    for masks, expected in ((parts, []), (mixed[:-4], []), (mixed, [(1, 2, odd)])):
        assert [*find_exchanged([regions_of(mask, volume=kind != "core") for mask in masks])] == expected
    if kind == "behind":  # in a picture no axis is that of front and back
        assert [*find_exchanged([regions_of(mask) for mask in mixed])] == []


@pytest.mark.parametrize(("other", "said"), [(0.5, 1), (0.9, 0), (0.1, 0)])
def test_exchanged_parts_have_ratios_that_are_each_other_s_inverse(other: float, said: int) -> None:
    """Check a part that lies twice as far out as another, and in eight masks this much as far."""
    masks = [{1: np.ones(6), 2: np.array([1, 1, far, 1, 1, 1])} for far in [2.0] * 24 + [other] * 8]
    assert len([*find_exchanged(masks)]) == said


@pytest.mark.parametrize(("step", "said"), [(1, 0), (2, 1)])
def test_volumes_of_which_every_second_slice_was_drawn(tmp_path: Path, step: int, said: int) -> None:
    task = VolumeSegmentationTask(num_classes=1)
    distance = np.linalg.norm(np.indices((32, 32, 32)) - 16.0, axis=0)
    listed = []
    for number in range(3):
        mask = (distance < 8 + number) & (np.arange(32) % step == 0)
        for name, values in (("", 50 * mask), ("_mask", mask)):
            nibabel.save(nibabel.Nifti1Image(values.astype(np.uint8), np.eye(4)), tmp_path / f"{number}{name}.nii.gz")
        listed.append({"image": f"{number}.nii.gz", "label": f"{number}_mask.nii.gz"})
    write_datalist(tmp_path / "datalist.json", {"training": listed})
    found = problems_of(task, {"A": {"data_root": str(tmp_path)}})
    assert sum("3 image(s) of 'training' have a mask of lines or single slices" in one.text for one in found) == said


def test_names_in_another_order(tmp_path: Path, agreeing: Among) -> None:
    sites = agreeing(types, types(tmp_path / ODD, names=("y", "x", "z")))
    (found,) = [one for one in problems_of(TYPES, sites) if "different names" in one.text]
    assert found.grave
    assert "(the same ones in another order)" in found.text


def test_a_label_below_what_the_file_says(tmp_path: Path, agreeing: Among) -> None:
    """Classes that the file leaves out occur: the file or the labels are wrong."""
    found = problems_of(TYPES, agreeing(types, types(tmp_path / ODD, classes=[0, 1])))
    assert any(
        "has the label 2, which 'classes' in the site's fairflare.json does not have" in one.text for one in found
    )
