"""Test what a label of masks means: handed on by prepare, compared between sites, no edge and no object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fairflare.base.cases.census import contradictions, question_of_values
from fairflare.checking.images import check_sites
from fairflare.data.datalist import DataError, load_datalist, write_datalist
from fairflare.data.listing.samples import Datalist
from fairflare.data.preparers.pictures import prepare_folders, prepare_masks
from fairflare.data.preparers.volumes import prepare_volumes
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import run_document

Mask = npt.NDArray[np.uint8]
SMALL: dict[str, Any] = {"image_size": (32, 32), "features": (4, 4, 8, 8, 8, 4)}


def pictures(folder: Path, masks: list[Any]) -> tuple[Path, Path]:
    """Write masks (arrays, or pictures of Pillow), each with an image; return the folders of images and masks."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number, mask in enumerate(masks):
        shown = mask if isinstance(mask, Image.Image) else Image.fromarray(np.asarray(mask, np.uint8))
        shown.save(folder / f"masks/{folder.name}{number}.png")
        noise = np.random.default_rng([number, *folder.name.encode()]).integers(0, 50, (shown.height, shown.width))
        pixels = noise + 50 * (np.asarray(shown) > 0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{folder.name}{number}.png")
    return folder / "images", folder / "masks"


def parts(codes: tuple[int, ...], number: int) -> Mask:
    """Make a mask with a box for each code, which is a little larger in some masks."""
    mask = np.zeros((32, 32), np.uint8)
    for place, code in enumerate(codes):
        mask[4 : 20 + number % 4, 2 + 10 * place : 9 + 10 * place] = code
    return mask


def rewrite(block: dict[str, Any], names: dict[str, str]) -> None:
    """Write names of values into a site's datalist."""
    file = Path(block["data_root"]) / "datalist.json"
    content = json.loads(file.read_text())
    content["mask_labels"] |= names
    file.write_text(json.dumps(content))


def prepared_apart(folder: Path, codes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Prepare each site by itself, and return the blocks of all."""
    blocks = {}
    for site, own in codes.items():
        given = {site: pictures(folder / site, [parts(own, number) for number in range(10)])}
        prepare_folders(given, folder / f"of_{site}")
        blocks |= json.loads((folder / f"of_{site}/fairflare.json").read_text())["sites"]
    return blocks


def asked(classes: int, blocks: dict[str, Any]) -> list[str]:
    task = SegmentationTask(num_classes=classes, **SMALL)
    return [one.text for one in check_sites(task, blocks).problems if one.grave]


def of_run(folder: Path, blocks: dict[str, Any], classes: int, **more: Any) -> str:
    """Return the reason why a run does not begin, or its status."""
    settings = {"num_classes": classes, **{name: list(value) for name, value in SMALL.items()}, "local_epochs": 1}
    plan = make_plan(
        "fed_avg", task="segmentation", sites=list(blocks), settings=settings, num_rounds=1, bootstrap=0, **more
    )
    try:
        run_local(plan, folder, {"sites": blocks})
    except RoundFailed as error:
        return str(error)
    (found,) = folder.rglob("results.json")
    return str(json.loads(found.read_text())["status"])


TOLD: dict[str, tuple[dict[str, list[str]], dict[str, dict[str, list[str]]]]] = {
    "values": ({"A": ["1=1=", "2=2="], "B": ["1=1=", "2=4="]}, {"2": {"value 2": ["A"], "value 4": ["B"]}}),
    "the same": ({"A": ["1=1=", "2=4="], "B": ["1=1=", "2=4="]}, {}),
    "one site has fewer": ({"A": ["1=1=", "2=2="], "B": ["1=1="], "C": []}, {}),
    "names": ({"A": ["1=1=liver"], "B": ["1=1=Spleen"]}, {"1": {"liver": ["A"], "spleen": ["B"]}}),
    "names of different values": ({"A": ["1=1=tumour"], "B": ["1=4=Tumour "]}, {}),
    "one name": ({"A": ["1=1=tumour"], "B": ["1=4="]}, {"1": {"value 1": ["A"], "value 4": ["B"]}}),
    "one name, one value": ({"A": ["1=1=tumour"], "B": ["1=1="]}, {}),
    "a colour and a name": ({"A": ["1=1=#ff0000", "2=2="], "B": ["1=1=liver", "2=2="]}, {}),
    "a colour is no name": ({"A": ["1=1=#ff0000"], "B": ["1=4=liver"]}, {"1": {"value 1": ["A"], "value 4": ["B"]}}),
    "two colours": ({"A": ["1=1=#ff0000"], "B": ["1=1=#00ff00"]}, {"1": {"#00ff00": ["B"], "#ff0000": ["A"]}}),
    "by hand": ({"A": ["1=1="], "B": ["1=="], "C": ["1==liver"]}, {}),
    "texts of a strange site": ({"A": ["", "1", "=", "1=1=a=b"], "B": ["1=1=a=b", "x"]}, {}),
}


@pytest.mark.parametrize("case", TOLD)
def test_labels_that_contradict_each_other(case: str) -> None:
    told, expected = TOLD[case]
    assert contradictions(told) == expected


@pytest.mark.parametrize(
    ("values", "coding", "expected"),
    [
        ({1: "", 2: ""}, None, ("1=1=", "2=2=")),
        ({1: "", 4: "tumour"}, {0: 0, 1: 1, 4: 2}, ("1=1=", "2=4=tumour")),  # as `prepare` numbers them
        ({1: "", 4: "tumour"}, {0: 0, 1: 1, 4: 3}, ("1==", "3==tumour")),  # somebody decided
        ({1: "a", 2: "b"}, {0: 0, 1: 2, 2: 1}, ("2==a", "1==b")),
        ({1: "a", 2: "b", 3: ""}, {0: 0, 1: 1, 2: 1, 3: 0}, ()),  # put together, and left out
        ({255: ""}, None, ("1=1=",)),
        ({1: ""}, None, ("1=1=",)),
        ({}, {0: 0, 7: 1}, ()),
    ],
)
def test_what_a_label_is_in_the_files(values: Any, coding: Any, expected: Any) -> None:
    assert Datalist("A", Path("d"), {}, mask_labels=values).meanings(coding) == expected


APART: dict[str, tuple[dict[str, tuple[int, ...]], int, bool]] = {
    "0 1 2 and 0 1 4": ({"A": (1, 2), "B": (1, 4)}, 2, True),
    "shifted": ({"A": (1, 2), "B": (2, 3)}, 2, True),
    "one structure of another number": ({"A": (1,), "B": (2,)}, 1, True),
    "the same": ({"A": (1, 4), "B": (1, 4)}, 2, False),
    "black and white": ({"A": (1,), "B": (255,)}, 1, False),
}


@pytest.mark.parametrize("case", APART)
def test_sites_that_were_prepared_apart(tmp_path: Path, case: str) -> None:
    codes, classes, clash = APART[case]
    blocks = prepared_apart(tmp_path, codes)
    found = asked(classes, blocks)
    assert [text.startswith("the masks' labels may mean different things: label ") for text in found] == [True] * clash
    assert not clash or found[0] in of_run(tmp_path / "run", blocks, classes)


def test_both_answers_to_the_question(tmp_path: Path) -> None:
    """Check what is told: one structure, by its name; two structures, by labels of their own."""
    blocks = prepared_apart(tmp_path, {"A": (1, 2), "B": (1, 4)})
    (text,) = asked(2, blocks)
    assert "label 2 is value 2 at 'A', value 4 at 'B'" in text
    assert '"mask_values": {"0": 0, "1": 1, "4": 3}, with "structures": [1, 3] for' in text
    own = {**blocks["B"], "mask_values": {"0": 0, "1": 1, "4": 3}, "structures": [1, 3]}
    two = {"A": {**blocks["A"], "structures": [1, 2]}, "B": own}
    assert asked(3, two) == []
    for site, value in (("A", "2"), ("B", "4")):
        rewrite(blocks[site], {value: "tumour"})
    assert (asked(2, blocks), of_run(tmp_path / "one", blocks, 2)) == ([], "completed")


def test_earlier_data_and_labels_by_hand_are_not_asked(tmp_path: Path) -> None:
    blocks = prepared_apart(tmp_path, {"A": (1, 2), "B": (1, 4)})
    file = Path(blocks["B"]["data_root"]) / "datalist.json"
    content = json.loads(file.read_text())
    del content["mask_labels"]
    file.write_text(json.dumps(content))
    assert asked(2, blocks) == []
    images, _ = pictures(tmp_path / "C", [parts((128, 255), number) for number in range(10)])
    prepare_masks(images.parent, tmp_path / "hand", mask_values={"0": 0, "128": 1, "255": 2})
    assert "mask_labels" not in json.loads((tmp_path / "hand/site-1/datalist.json").read_text())


def test_the_site_that_differs_from_most_is_left_out(tmp_path: Path) -> None:
    blocks = prepared_apart(tmp_path, {"A": (1, 2), "B": (2, 4), "C": (1, 2)})
    assert of_run(tmp_path / "run", blocks, 2, require_all_sites=False) == "completed"
    (found,) = (tmp_path / "run").rglob("results.json")
    results = run_document(found)
    assert sorted(results["test"]) == ["A", "C"]
    assert "label 1 is value 1 at 'A', 'C', value 2 at 'B'" in results["left_out"][0]["reason"]
    assert results["info"]["said"]["A"]["mask_labels"] == ["1=1=", "2=2="]


@pytest.mark.parametrize("told", [[1], {"x": "a"}, {"1": 3}, {"1": "a" * 61}])
def test_meanings_of_another_form_are_refused(tmp_path: Path, told: Any) -> None:
    pictures(tmp_path / "A", [parts((1,), number) for number in range(3)])
    entries = [{"image": f"images/A{n}.png", "label": f"masks/A{n}.png"} for n in range(3)]
    splits = {split: [entry] for split, entry in zip(("training", "validation", "test"), entries, strict=True)}
    write_datalist(tmp_path / "A/datalist.json", splits, mask_labels=told)
    with pytest.raises(DataError, match="'mask_labels' must give the name"):
        load_datalist(tmp_path / "A", site="A")


def test_names_of_a_dataset_file_travel_and_may_not_differ(tmp_path: Path) -> None:
    """Check volumes of two sites whose dataset.json name value 1 in two ways, in one call and apart."""
    for site, name in (("A", "liver"), ("B", "spleen")):
        for number in range(4):
            for kind, values in (("imagesTr", np.arange(512)), ("labelsTr", np.arange(512) % 3 % 2)):
                (tmp_path / "s" / site / kind).mkdir(parents=True, exist_ok=True)
                file = nibabel.Nifti1Image(np.roll(values, number).reshape(8, 8, 8).astype(np.int16), np.eye(4))
                nibabel.save(file, tmp_path / "s" / site / kind / f"{site}{number}.nii.gz")
        text = json.dumps({"labels": {"0": "background", "1": name}})
        (tmp_path / "s" / site / "dataset.json").write_text(text)
    with pytest.raises(DataError, match="1 is liver in 'A', spleen in 'B'"):
        prepare_volumes(tmp_path / "both", source_dir=tmp_path / "s")
    listed = {}
    for site in "AB":
        folder = next(iter(prepare_volumes(tmp_path / site, source_dir=tmp_path / "s" / site).values()))
        listed[site] = load_datalist(folder, site=site).meanings(None)
    assert listed == {"A": ("1=1=liver",), "B": ("1=1=spleen",)}
    assert "label 1 is liver at 'A', spleen at 'B'" in question_of_values(contradictions(listed))


# ------------------------------------------------------------------------------------------------ within a site


def coloured(order: tuple[int, ...], number: int) -> Image.Image:
    """Make a mask of a red and a green part, whose palette has black, red and green in this order."""
    colours = np.array([(0, 0, 0), (255, 0, 0), (0, 255, 0)], np.uint8)
    picture = Image.fromarray(np.argsort(order).astype(np.uint8)[parts((1, 2), number)], "P")
    picture.putpalette(colours[list(order)].ravel().tolist())
    return picture


def blob(number: int) -> Mask:
    mask = np.zeros((32, 32), np.uint8)
    mask[6 + number % 5 : 18 + number % 3, 8 : 20 + number % 6] = 255
    return mask


def smoothed(number: int) -> Mask:
    large = Image.fromarray(blob(number)).resize((64, 64), Image.Resampling.BILINEAR)
    return np.asarray(large.resize((32, 32), Image.Resampling.BILINEAR))


def objects(number: int) -> Mask:
    """Number 4 to 9 boxes of a picture."""
    mask = np.zeros((32, 32), np.uint8)
    for k in range(4 + number % 6):
        mask[8 * (k // 4) + 1 : 8 * (k // 4) + 6, 8 * (k % 4) + 1 : 8 * (k % 4) + 6] = k + 1
    return mask


def ring(number: int) -> Mask:
    """Draw a border of one pixel, whose value lies between those of inside and outside."""
    mask = blob(number)
    inner = mask.copy()
    for axis in (0, 1):
        inner &= np.roll(mask, 1, axis) & np.roll(mask, -1, axis)
    return np.where((mask > 0) & (inner == 0), np.uint8(128), mask)


def nested(number: int) -> Mask:
    """Draw 1 in all masks, 2 within it in most, 3 within that in some."""
    mask = parts((1,), number)
    for k in range(2, 2 + number % 3):
        mask[2 * k + 2 : 18 - k, k + 1 : 10 - k] = k
    return mask


ODD: dict[str, tuple[Any, str]] = {
    "smoothed": (smoothed, "A: the values .* occur only at the borders between others"),
    "objects": (objects, "A: the masks have the numbers 1 to n, and n is from 4 to 9: numbers of objects"),
    "two palettes": (
        lambda number: coloured((0, 1, 2) if number % 2 else (0, 2, 1), number),
        "masks contradict each other: 1 is #00ff00 in 'A/masks/A0.png' of .* #ff0000 in 'A/masks/A1.png' of .*; 2 is #",
    ),
    "one palette": (lambda number: coloured((0, 2, 1), number), ""),
    "a border of one pixel": (ring, ""),
    "parts of parts": (nested, ""),
    "the last organs are missing in few": (lambda number: objects(5 - max(0, number - 9)), ""),
    "thin layers": (lambda number: np.arange(32, dtype=np.uint8)[:, None] % 8 + np.zeros((32, 32), np.uint8), ""),
}


@pytest.mark.parametrize("case", ODD)
def test_values_that_are_no_labels(tmp_path: Path, case: str) -> None:
    make, expected = ODD[case]
    site = {"A": pictures(tmp_path / "A", [make(number) for number in range(12)])}
    if expected:
        with pytest.raises(DataError, match=expected):
            prepare_folders(site, tmp_path / "out")
    else:
        prepare_folders(site, tmp_path / "out")


def test_the_remedies_make_masks_of_them(tmp_path: Path) -> None:
    """Check what is told: 255 * np.uint8(mask > 127), np.uint8(mask > 0), and Pillow's quantize with one palette."""
    first = coloured((0, 1, 2), 0)
    remedies: dict[str, tuple[Any, Any]] = {
        "smoothed": (lambda mask: 255 * np.uint8(np.asarray(mask) > 127), blob),
        "objects": (lambda mask: np.uint8(np.asarray(mask) > 0), lambda number: objects(number) > 0),
        "two palettes": (
            lambda mask: mask.convert("RGB").quantize(palette=first, dither=Image.Dither.NONE),
            lambda number: parts((1, 2), number),
        ),
    }
    for case, (remedy, truth) in remedies.items():
        masks = [remedy(ODD[case][0](number)) for number in range(12)]
        assert [bool((np.asarray(mask) == truth(n)).all()) for n, mask in enumerate(masks)] == [True] * 12, case
        prepare_folders({"A": pictures(tmp_path / case / "A", masks)}, tmp_path / case / "out")
    images, _ = pictures(tmp_path / "structures", [objects(number) for number in range(12)])
    prepare_masks(images.parent, tmp_path / "told", mask_values={str(value): value for value in range(10)})


def test_check_data_refuses_palettes_that_contradict(tmp_path: Path) -> None:
    pictures(tmp_path / "A", [coloured((0, 1, 2) if number % 2 else (0, 2, 1), number) for number in range(9)])
    entries = [{"image": f"images/A{number}.png", "label": f"masks/A{number}.png"} for number in range(9)]
    splits = {"training": entries[:3], "validation": entries[3:6], "test": entries[6:]}
    write_datalist(tmp_path / "A/datalist.json", splits)
    (text,) = asked(2, {"A": {"data_root": str(tmp_path / "A")}})
    assert text.startswith("masks contradict each other: 1 is #00ff00 in ")


@pytest.mark.parametrize(("codes", "said"), [("12", True), ("01", False), ("0", False)])
def test_numbers_that_code_people_differently(tmp_path: Path, codes: str, said: bool) -> None:
    blocks = {}
    for site, own in (("A", "01"), ("B", codes)):
        pictures(tmp_path / site, [parts((1,), number) for number in range(6)])
        entries = [
            {
                "image": f"images/{site}{n}.png",
                "label": f"masks/{site}{n}.png",
                "attributes": {"sex": own[n % len(own)]},
            }
            for n in range(6)
        ]
        splits = {"training": entries[:2], "validation": entries[2:4], "test": entries[4:]}
        declared = {"sex": {"kind": "category", "values": ["0", "1", "2"]}}
        write_datalist(tmp_path / site / "datalist.json", splits, attributes=declared)
        blocks[site] = {"data_root": str(tmp_path / site)}
    told = [one for one in check_sites(SegmentationTask(**SMALL), blocks).problems if "attribute 'sex'" in one.text]
    assert [(one.grave, "(0, 1 at A; 1, 2 at B)" in one.text) for one in told] == [(False, True)] * said
