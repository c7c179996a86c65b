"""Test that ``fairflare check-data`` finds all problems of images at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.data.datalist import SPLITS, write_datalist
from fairflare.data.preparers.__main__ import main as prepare
from fairflare.federation.site.site_file import SHELL_SETTINGS
from fairflare.privacy import ledger
from fairflare.tasks.classification import ClassificationTask

Mask = npt.NDArray[np.bool_]
pytestmark = pytest.mark.usefixtures("one_thread")


def site(folder: Path, classes: bool, seed: int, **more: Any) -> dict[str, list[dict[str, Any]]]:
    """Make a good site: three images in each split, of three patients; return its datalist's splits."""
    rng = np.random.default_rng(seed)
    splits: dict[str, list[dict[str, Any]]] = {}
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    for split in SPLITS:
        splits[split] = []
        for index in range(3):
            name = f"{split}_{index}.png"
            Image.fromarray(rng.integers(0, 256, (40, 40)).astype(np.uint8)).save(folder / "images" / name)
            Image.fromarray((np.indices((40, 40))[0] > 20).astype(np.uint8)).save(folder / "masks" / name)
            label: Any = index if classes else f"masks/{name}"
            splits[split].append(
                {"image": f"images/{name}", "label": label, "patient": f"{folder.name}-{split}{index}"}
            )
    write_datalist(folder / "datalist.json", splits, **more)
    return splits


def check(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check-data", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def problems(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("problem: ")]


def copy(folder: Path, source: str, target: str) -> None:
    """Write the same pixels in another file type, so that the files differ."""
    with Image.open(folder / source) as image:
        image.save(folder / target)


def test_a_site_that_stands_in_the_file_twice_is_refused(tmp_path: Path) -> None:
    site(tmp_path / "a", True, 0)
    own = '"a": {"data_root": "a"}'
    (tmp_path / "two.json").write_text(f'{{"sites": {{{own}, {own}}}}}')
    code, text = check(tmp_path / "two.json")
    assert code == 2
    assert "two.json is not readable JSON ('a' stands twice in an object; keep one)" in " ".join(text.split())


def test_keys_that_other_parts_read_are_no_mistake(tmp_path: Path) -> None:
    """Check that all keys of a site's file are known where the task alone is asked, and that capitals are answered."""
    site(tmp_path / "a", False, 0)
    own: dict[str, Any] = dict.fromkeys({*SHELL_SETTINGS} - {"privacy"}, 1)  # that one is tried, see below
    (tmp_path / "fairflare.json").write_text(json.dumps({"sites": {"a": {**own, "data_root": str(tmp_path / "a")}}}))
    code, text = check(tmp_path)
    assert (code, problems(text)) == (0, []), text
    (tmp_path / "fairflare.json").write_text(json.dumps({"Sites": {"a": {"data_root": str(tmp_path / "a")}}}))
    code, text = check(tmp_path)
    assert code == 1
    assert "unknown key 'Sites' in the site's fairflare.json; did you mean 'sites'?" in text


def test_good_data(tmp_path: Path) -> None:
    for name in "ab":
        site(tmp_path / name, True, ord(name), class_names=["x", "y", "z"])
    code, text = check(tmp_path)
    assert code == 0, text
    assert "18 usable images at 2 site(s); 0 problem(s), 2 note(s)" in text
    assert "note: a: 3 test case(s): no verdict on a site, which takes 5" in text
    assert "  training: 3 (x 1, y 1, z 1)" in text
    assert "a: width x height 40x40: 9" in text


def test_a_site_is_told_how_often_it_was_asked(tmp_path: Path) -> None:
    """Check a site's log of three answers about two models, in one run."""
    site(tmp_path / "a", True, 0, class_names=["x", "y", "z"])
    (tmp_path / "root" / ".sent").mkdir(parents=True)
    lines = [{"time": f"2026-01-0{k}T00:00:00", "run": "r", "model": m} for k, m in ((1, None), (2, "m"), (3, "n"))]
    (tmp_path / "root" / ".sent" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = {"data_root": str(tmp_path / "a"), "state_root": str(tmp_path / "root")}
    (tmp_path / "fairflare.json").write_text(json.dumps(own))
    text = " ".join(check(tmp_path / "fairflare.json")[1].split())
    assert "a: 3 answers since 2026-01-01, in 1 run(s), about 2 model(s)" in text


def plant_in_masks(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    splits = site(a, False, 1)
    other = site(b, False, 2)
    (a / "images/training_0.png").write_bytes(b"no picture")  # 1 unreadable
    Image.fromarray(np.zeros((40, 41), np.uint8)).save(a / "masks/training_1.png")  # 2 size
    Image.fromarray(np.full((40, 40), 7, np.uint8)).save(a / "masks/training_2.png")  # 3 value of a mask
    copy(a, "images/validation_0.png", "images/test_0.bmp")  # 4 across splits, in another file
    splits["test"][0]["image"] = "images/test_0.bmp"
    copy(a, "images/validation_1.png", "../b/images/training_1.png")  # 5 across sites
    splits["training"].append({"image": "images/extra.bmp", "label": "masks/empty.png"})
    splits["training"].append({"image": "images/extra.png", "label": "masks/validation_0.png"})
    noise = np.random.default_rng(9).integers(0, 256, (40, 40)).astype(np.uint8)
    for name in ("extra.bmp", "extra.png"):
        Image.fromarray(noise).save(a / "images" / name)  # 6 contradictory masks
    Image.fromarray(np.zeros((40, 40), np.uint8)).save(a / "masks/empty.png")
    splits["validation"][2]["patient"] = splits["test"][2]["patient"]  # 7 a patient across splits
    broken = np.random.default_rng(3).normal(size=(40, 40))
    broken[3, 3] = np.nan
    np.save(a / "images/nan.npy", broken)  # 8 NaN
    splits["test"][1]["image"] = "images/nan.npy"
    other["validation"] = []  # 9 empty split
    other["training"][0]["image"] = "images/nowhere.png"  # 10 missing file
    write_datalist(a / "datalist.json", splits)
    write_datalist(b / "datalist.json", other)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"epsilon": 1.0}, ""),
        (True, "setting 'privacy' must be an object with 'epsilon', got True"),
        ({"epsilon": 1.0, "nose": 2}, "setting 'privacy': "),
        ({"epsilon": -1.0}, "setting 'privacy': epsilon must be"),
        ({"epsilon": 1.0, "delta": 0.5}, "delta must lie between 0 and 1/3 (one over its 3 patients), got 0.5"),
        ({"epsilon": 0.5}, "privacy budget too small for one round"),
        ("spent", "privacy budget spent: with this round epsilon is"),
        ("cut", "line 1 of its ledger is damaged, moved or changed"),
        ("opacus", "it needs the package opacus: pip install 'fairflare[dp]'"),
        ("nowhere", "'privacy' needs 'state_root', the absolute path of a folder that outlives all jobs"),
    ],
)
def test_what_a_run_would_refuse_of_privacy(
    own: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own == "opacus":
        monkeypatch.setitem(sys.modules, "opacus", None)
    else:
        monkeypatch.setattr(ledger, "epsilon", lambda history, *_: (float(sum(c[2] for c in history)), "sum"))
    site(tmp_path / "a", True, 0, class_names=["x", "y", "z"])
    root, given = tmp_path / "root", own if isinstance(own, dict | bool) else {"epsilon": 2.0}
    file = {"data_root": str(tmp_path / "a"), "state_root": str(root), "privacy": given}
    if own in ("spent", "cut"):
        data = ClassificationTask(num_classes=3, image_size=(32, 32)).open_site("a", {"data_root": str(tmp_path / "a")})
        of = ledger.Spending("train", "patient", 3, 1.0, 0.5, 2, 1.0, 4.0, 1e-5)
        ledger.Ledger("a", root).reserve(data.identities("training"), of, {})
    if own == "cut":
        (path,) = root.rglob(ledger.LEDGER)
        path.write_bytes(path.read_bytes().replace(b'"steps": 2', b'"steps": 1'))
    if own == "nowhere":
        file["state_root"] = "kept"
    (tmp_path / "fairflare.json").write_text(json.dumps({"sites": {"a": file}}))
    code, text = check("--task", "classification", tmp_path / "fairflare.json")
    found = [line for line in problems(text) if line.startswith("problem: a: ")]
    assert (code, len(found)) == ((1, 1) if why else (0, 0)), text
    assert why in "".join(found)
    assert "0 usable images" not in text, "a wrong setting hides no image's problem"
    assert root.exists() == (own in ("spent", "cut"))


def test_an_epsilon_without_meaning_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "epsilon", lambda history, *_: (1.0, "one"))
    site(tmp_path / "a", True, 0, class_names=["x", "y", "z"])
    file = {"data_root": str(tmp_path / "a"), "state_root": str(tmp_path / "root"), "privacy": {"epsilon": 1e9}}
    (tmp_path / "fairflare.json").write_text(json.dumps({"sites": {"a": file}}))
    code, text = check(tmp_path / "fairflare.json")
    assert code == 0
    assert "note: a: privacy: epsilon 1e+09 protects little or nothing (at most 10 counts as reasonable)" in text


def test_ten_planted_faults_in_one_run(tmp_path: Path) -> None:
    plant_in_masks(tmp_path)
    code, text = check(tmp_path)
    assert code == 1
    found = problems(text)
    expected = [
        r"a: image '.*training_0.png' of split 'training' cannot be used",
        r"a: 1 x image and mask differ in size: .*training_1.*41x40.*its image 40x40",
        r"a: mask '.*training_2.png' of split 'training' has the values 7",
        r"a: one image in several splits or at several sites: .*validation_0.png.*test_0.bmp",
        r"all sites: one image in several splits or at several sites: .*validation_1.png.*\(b, training\)",
        r"a: one image with different labels: .*extra",
        r"a: .*patient 'a-test2' is in both 'validation' and 'test'",
        r"a: image '.*nan.npy' of split 'test' has values that are NaN",
        r"b: .*split 'validation' is empty",
        r"b: .*nowhere.png', does not exist",
    ]
    import re

    for pattern in expected:
        assert sum(bool(re.search(f"problem: {pattern}", line)) for line in found) == 1, (pattern, found)
    assert len(found) == len(expected), found
    assert "note: a: one image 2 times in one split" in text
    assert "note: a: 1 image(s) of 'training' have a mask with nothing in it" in text


def test_faults_of_classes(tmp_path: Path) -> None:
    names = ["x", "y", "z"]
    splits = site(tmp_path / "a", True, 1, class_names=names)
    splits["training"][0]["label"] = 3  # beyond the classes
    splits["training"][1]["label"] = "x"  # a name
    splits["training"][2]["label"] = 0
    rgba = np.random.default_rng(0).integers(0, 256, (5, 40, 40)).astype(np.uint8)
    np.save(tmp_path / "a/images/five.npy", rgba.transpose(1, 2, 0))
    splits["validation"][0]["image"] = "images/five.npy"
    copy(tmp_path / "a", "images/validation_1.png", "images/test_0.bmp")
    splits["test"][0]["image"] = "images/test_0.bmp"
    Image.fromarray(np.full((40, 40), 9, np.uint8)).save(tmp_path / "a/images/validation_2.png")
    write_datalist(tmp_path / "a/datalist.json", splits, class_names=names, class_groups={"head": [5]})
    code, text = check(tmp_path / "a/datalist.json")
    assert code == 1
    found = "\n".join(problems(text))
    assert "has the label 3; the task has the classes 0 to 2" in found
    assert "must be the number of a class (a whole number >= 0), got 'x'" in found
    assert "five.npy' of split 'validation' cannot be used" in found
    assert "one image with different labels" in found
    assert "'class_groups' must name lists of numbers of classes" in found
    assert "note: a: y is in 1 of 2 labels of 'validation', and in 0 of 1 of 'training': was it looked for" in text
    assert "all its pixels have one value" in text
    assert len(problems(text)) == 6


def test_what_is_meant_is_no_problem(tmp_path: Path) -> None:
    """Check a test list that all sites have, an image in two test lists, and one patient's number at two sites."""
    for name in "ab":
        folder = tmp_path / name
        splits = site(folder, True, ord(name))
        for index in range(3):
            copy(tmp_path / "a", f"images/test_{index}.png", f"../{name}/images/common_{index}.bmp")
            splits.setdefault("test_common", []).append({"image": f"images/common_{index}.bmp", "label": index})
        splits["training"][0]["patient"] = 17
        write_datalist(folder / "datalist.json", splits)
    blocks = {name: {"data_root": str(tmp_path / name)} for name in "ab"}
    (tmp_path / "fairflare.json").write_text(json.dumps({"sites": {**blocks, "c": {"phantom": True}}}))
    code, text = check(tmp_path)
    assert code == 0, text
    assert "note: all sites: 3 test image(s) are the same at a, b" in text
    assert "note: all sites: patient '17' is at a, b" in text
    assert "note: c: no 'data_root'" in text


def test_a_patient_of_two_spellings_is_named(tmp_path: Path) -> None:
    """Hold one person in training and test, and that numbers which differ are left alone."""
    splits = site(tmp_path / "a", True, 1)
    given = {"training": ["M-1", "10", "1"], "validation": ["17", "Ann ", "101"], "test": ["017", "ann", "m-2"]}
    for split, names in given.items():
        for entry, name in zip(splits[split], names, strict=True):
            entry["patient"] = name
    write_datalist(tmp_path / "a/datalist.json", splits)
    code, text = check(tmp_path, "--all")
    notes = [line for line in text.splitlines() if "write them alike" in line]
    assert (code, notes) == (0, [
        "note: a: patients '17', '017' may be one; write them alike",
        "note: a: patients 'Ann ', 'ann' may be one; write them alike",
    ])  # fmt: skip


def test_sites_that_name_the_classes_differently(tmp_path: Path) -> None:
    site(tmp_path / "a", True, 1, class_names=["x", "y", "z"], class_groups={"head": [0]})
    site(tmp_path / "b", True, 2, class_names=["y", "x", "z"], class_groups={"head": [1]})
    code, text = check(tmp_path)
    assert code == 1
    assert [line.split(":")[2] for line in problems(text)] == [
        " the datalists have different names of classes (the same ones in another order) ('class_names')",
        " the datalists have different groups of classes ('class_groups')",
    ]


def test_problems_of_a_kind_are_one_line_unless_all_are_wanted(tmp_path: Path) -> None:
    splits = site(tmp_path / "a", True, 1)
    splits["training"] += [{"image": f"images/none_{n}.png", "label": 0} for n in range(30)]
    write_datalist(tmp_path / "a/datalist.json", splits)
    code, text = check(tmp_path)
    assert code == 1
    (line,) = problems(text)
    assert "none_0.png', does not exist" in line
    assert "29 more such: 'a/images/none_1.png', 'a/images/none_2.png', 'a/images/none_3.png' and 26 more" in line
    assert len(problems(check(tmp_path, "--all")[1])) == 30


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_nothing_to_look_at(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "fairflare.json").write_text(content)
    code, text = check(tmp_path)
    assert code == 2
    assert "error" in text


def test_swapped_folders_are_one_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    lists: dict[str, list[dict[str, str]]] = {}
    for number, split in enumerate(["training"] * 4 + ["validation", "test"]):
        name = f"p{number}.png"
        for kind, pixels in (("images", np.eye(16) * 255), ("masks", rng.integers(0, 256, (16, 16)))):
            (tmp_path / "a" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "a" / kind / name)
        lists.setdefault(split, []).append({"image": f"images/{name}", "label": f"masks/{name}"})
    write_datalist(tmp_path / "a/datalist.json", lists)
    code, text = check(tmp_path)
    (line,) = problems(text)
    assert code == 1
    assert "image and mask look swapped: the mask has" in line
    assert "5 more such: 'a/images/p1.png', 'a/images/p2.png', 'a/images/p3.png' and 2 more" in line


def cells(folder: Path, spoil: Callable[[int, Mask], Mask]) -> None:
    """Make a site of bright cells on a dark ground, a crowded picture among them, as ``prepare masks`` takes it."""
    rng = np.random.default_rng(5)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(8):
        row, column = rng.integers(6, 26, 2)
        inside = np.hypot(*(np.indices((32, 32)) - [[[row]], [[column]]])) < (22 if number == 7 else 4 + number / 2)
        image = rng.normal(60 + 90 * inside, 20).clip(0, 255).astype(np.uint8)
        Image.fromarray(image).save(folder / f"images/p{number}.png")
        Image.fromarray(spoil(number, inside).astype(np.uint8)).save(folder / f"masks/p{number}.png")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda number, inside: inside, None),
        (
            lambda number, inside: inside ^ (number < 4),
            "4 of 8 masks mark mostly what the others leave: '{0}p0.png', '{0}p1.png', '{0}p2.png' and 1 more; "
            "are inside and outside exchanged in them?",
        ),
        (
            lambda number, inside: np.indices((32, 32))[0] < 9 if number > 4 else inside,
            "3 different images share a mask with two others or more: '{0}p5.png', '{0}p6.png', '{0}p7.png'; "
            "was it copied?",
        ),
    ],
    ids=["right", "inverted", "copied"],
)
def test_masks_that_are_inverted_or_copied_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[int, Mask], Mask], said: str | None
) -> None:
    cells(tmp_path / "in", spoil)
    assert prepare(["masks", "--source", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    checked = " ".join(check(tmp_path / "out", "--all")[1].split())
    for text, where in ((caplog.text, "in/images/"), (checked, "site-1/images/")):
        assert ("mark mostly" in text or "share a mask" in text) == (said is not None)
        assert said is None or said.format(where) in text


@pytest.mark.parametrize("kind", ["volumes", "padded"])
def test_padding_of_the_task_hides_no_inverted_mask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Hold dark organs, which padding with dark pixels would turn to bright ones, and low or narrow images."""
    rng, size = np.random.default_rng(3), (20, 18, 12) if kind == "volumes" else (12, 40)
    folders = [tmp_path / "in" / name for name in ("images", "masks")]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(8):
        middle = rng.integers(4, np.array(size) - 4).reshape(-1, *[1] * len(size))
        inside = np.linalg.norm(np.indices(size) - middle, axis=0) < 4
        image = rng.normal(150 - 90 * inside, 10).clip(0, 255).astype(np.uint8)
        for folder, values in zip(folders, (image, inside ^ (number < 3)), strict=True):
            if kind == "volumes":
                nib.save(nib.Nifti1Image(values.astype(np.uint8), np.eye(4)), folder / f"p{number}.nii.gz")
            else:
                Image.fromarray(values.astype(np.uint8)).save(folder / f"p{number}.png")
    said = "3 of 8 masks mark mostly what the others leave: '{}/images/p0."
    site, out = ["--site", "a", *map(str, folders)], tmp_path / "out"
    assert prepare(["volumes" if kind == "volumes" else "folders", *site, "--out", str(out)]) == 0
    assert said.format("in") in caplog.text
    task = [] if kind == "volumes" else ["--set", "resize=pad"]
    assert said.format("a") in " ".join(check(out, "--all", *task)[1].split())
