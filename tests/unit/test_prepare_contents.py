"""Test the contents of a folder: images as the reader sees them, and files that are passed over with a message."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from fairflare.cli.data.own_images import kind_by_manifest
from fairflare.data.datalist import SPLITS, DataError, load_datalist
from fairflare.data.preparers import prepare_folders, prepare_images, prepare_masks, prepare_volumes
from fairflare.data.preparers.contents import contents
from fairflare.data.preparers.looking import look_at_picture
from fairflare.data.reading import read_image
from tests.unit.dicom_files import dicom, series

pytestmark = pytest.mark.usefixtures("one_thread")

COMPANION = bytes.fromhex("00051607000200004d6163204f532058") + bytes(80)  # what macOS writes
JUNK = ("._{0}", ".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX/{0}", "~$list.xlsx")


def image_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (12, 14)).astype(np.uint8)


def mask_of(seed: int, value: int = 255) -> np.ndarray:
    mask = np.zeros((12, 14), np.uint8)
    mask[3 : 6 + seed % 4, 4:9] = value
    return mask


def save(path: Path, pixels: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def pairs(root: Path, names: list[str], seed: int = 0, *, ending: str = ".png", value: int = 255) -> Path:
    for number, name in enumerate(names, seed):
        save(root / "images" / f"{name}.png", image_of(number))
        save(root / "masks" / f"{name}{ending}", mask_of(number, value))
    return root


def names_of(folder: Path) -> list[str]:
    content = json.loads((folder / "datalist.json").read_text())
    return sorted(Path(entry["image"]).name for split in SPLITS for entry in content[split])


def notes(out: Path) -> str:
    return "\n".join(json.loads((out / "manifest.json").read_text())["notes"])


def litter(folder: Path) -> None:
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        first = next((path.name for path in sorted(place.iterdir()) if path.is_file()), "x.png")
        for name in JUNK:
            path = place / name.format(first)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(COMPANION)


# --- passed over --------------------------------------------------------------------------------------------


def of_folders(root: Path, out: Path) -> dict[str, Path]:
    pairs(root / "A", list("abcd"))
    litter(root)
    return prepare_folders({"A": (root / "A/images", root / "A/masks")}, out)


def of_masks(root: Path, out: Path) -> dict[str, Path]:
    pairs(root / "A", list("abcd"))
    litter(root)
    return prepare_masks(root, out)


def of_classes(root: Path, out: Path) -> dict[str, Path]:
    for number, name in enumerate("abcdef"):
        save(root / "xy"[number % 2] / f"{name}.png", image_of(number))
    litter(root)
    return prepare_images(root, out)


def of_table(root: Path, out: Path) -> dict[str, Path]:
    for number, name in enumerate("abcd"):
        save(root / f"{name}.png", image_of(number))
    litter(root)
    (root / "t.csv").write_text("image,label\na,0\nb,1\nc,0\nd,1\n")
    return prepare_images(root, out, csv="t.csv")


def of_volumes(root: Path, out: Path) -> dict[str, Path]:
    for number, name in enumerate("abcd"):
        volume(root / f"imagesTr/{name}.nii.gz", number)
        volume(root / f"labelsTr/{name}.nii.gz", number, labels=True)
    litter(root)
    return prepare_volumes(out, source_dir=root)


def of_bids(root: Path, out: Path) -> dict[str, Path]:
    for number in range(4):
        name = f"sub-{number}"
        volume(root / name / f"anat/{name}_T1w.nii.gz", number)
        volume(root / name / f"anat/{name}_T1w_mask.nii.gz", number, labels=True)
    litter(root)
    return prepare_volumes(out, source_dir=root)


def volume(path: Path, seed: int, labels: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(seed).integers(0, 99, (8, 9, 5)).astype(np.int16)
    block = np.zeros(array.shape, np.uint8)
    block[2:5, 2:6, 1:4] = 1
    nibabel.save(nibabel.Nifti1Image(block if labels else array, np.diag([1, 1, 2, 1.0])), path)
    return path


@pytest.mark.parametrize("kind", [of_folders, of_masks, of_classes, of_table, of_volumes, of_bids])
def test_hidden_files_and_companions_are_nobodys(tmp_path: Path, kind: Callable[[Path, Path], dict[str, Path]]) -> None:
    (folder,) = kind(tmp_path / "s", tmp_path / "out").values()
    assert len(names_of(folder)) == (6 if kind is of_classes else 4)
    assert not [path for path in folder.rglob("*") if path.name.startswith("._")]
    assert "not read" not in notes(tmp_path / "out")


def test_what_is_not_read_is_counted_and_named_with_a_converter(tmp_path: Path) -> None:
    root = pairs(tmp_path / "s", list("abcd"))
    for name in ("v0.mha", "v1.mha", "v2.mha", "v3.mha", "x.gif", "p.hdr", "p.img", "readme.pdf", "z.zip", "w.svs"):
        (root / "images" / name).write_bytes(b"some")
    (root / "images/a.json").write_text("{}")
    prepare_masks(root, tmp_path / "out")
    told = notes(tmp_path / "out")
    for words in (
        "4 .mha files ('v0.mha', 'v1.mha', 'v2.mha' and 1 more): python -c \"import SimpleITK as s; "
        "s.WriteImage(s.ReadImage('v0.mha'), 'v0.nii.gz')\"",
        "1 .hdr file ('p.hdr'): python -c \"import nibabel as n; n.save(n.load('p.hdr'), 'p.nii.gz')\"",
        "1 .pdf file ('readme.pdf'): no image", "1 .zip file ('z.zip'): unpack it", "('w.svs'): a whole slide",
        "Image.open('x.gif').convert('RGB').save('x.png')",
    ):  # fmt: skip
        assert words in told
    assert ".img" not in told  # the other half of p.hdr
    assert ".json" not in told  # a sidecar


@pytest.mark.parametrize("ending", [".mha", ".nrrd", ".hdr"])
def test_a_tree_without_a_file_that_is_read(tmp_path: Path, ending: str) -> None:
    for folder in ("images", "labels"):
        (tmp_path / "s" / folder).mkdir(parents=True)
        for name in "abc":
            (tmp_path / "s" / folder / f"{name}{ending}").write_bytes(b"x")
    with pytest.raises(DataError, match=rf"no image .*3 {ending} files .*nii.gz"):
        prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    with pytest.raises(DataError, match=rf"no image .*3 {ending} files .*nii.gz"):
        prepare_masks(tmp_path / "s", tmp_path / "out")


def test_pictures_among_volumes_name_what_takes_them(tmp_path: Path) -> None:
    save(tmp_path / "s/images/a.png", image_of(1))
    save(tmp_path / "s/labels/a.png", mask_of(1))
    with pytest.raises(DataError, match=r"1 .png file .*`fairflare prepare images`"):
        prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    np.save(tmp_path / "s/labels/a.npy", np.zeros((4, 5, 6)))
    with pytest.raises(DataError, match=r"1 .npy file .*its voxels lie: python -c "):
        prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")


def test_a_pipe_is_no_file_and_a_broken_link_is_refused_later(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR)  # so that one who opens it does not wait
    (tmp_path / "gone.png").symlink_to("nowhere.png")
    found = contents(tmp_path)
    os.close(held)
    assert ([path.name for path in found.images], found.unread) == (["gone.png"], ())


def test_links_to_folders_are_followed_and_circles_end(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere/a.png", image_of(1))
    (tmp_path / "s").mkdir()
    (tmp_path / "s/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "s")
    assert [path.name for path in contents(tmp_path / "s").images] == ["a.png"]


# --- the reader's own idea ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["IM{0:04d}", "1.2.840.113.{0}", "IMG.{0}", "img{0}.dcm"])
def test_dicom_without_an_ending_is_an_image_everywhere(tmp_path: Path, name: str) -> None:
    for number in range(6):
        for place in (f"c/{'xy'[number % 2]}", "m/images"):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            dicom(tmp_path / place / name.format(number), image_of(number), PatientID=f"p{number}")
        stem = name.format(number).removesuffix(".dcm")
        save(tmp_path / f"m/masks/{stem}.png", mask_of(number))
    by_class = prepare_images(tmp_path / "c", tmp_path / "o1")["site-1"]
    by_mask = prepare_masks(tmp_path / "m", tmp_path / "o2")["site-1"]
    (tmp_path / "c/t.csv").write_text("image,label\n" + "".join(f"{name.format(n)},{n % 2}\n" for n in range(6)))
    by_table = prepare_images(tmp_path / "c", tmp_path / "o3", csv="t.csv")["site-1"]
    for folder, labels in ((by_class, True), (by_mask, False), (by_table, True)):
        found = load_datalist(folder, site="a", class_labels=labels)
        samples = [sample for split in SPLITS for sample in found.splits[split]]
        assert len({sample.patient for sample in samples}) == 6  # of the headers
        seen = {read_image(sample, site="a", split="test").tobytes() for sample in samples}
        assert seen == {(image_of(n)[:, :, None] / np.float32(255)).astype(np.float32).tobytes() for n in range(6)}


def test_one_patient_id_for_all_is_said_and_the_remedy_works(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / "s" / "xy"[number % 2]).mkdir(parents=True, exist_ok=True)
        dicom(tmp_path / "s" / "xy"[number % 2] / f"i{number}", image_of(number), PatientID="ANON")
    with pytest.raises(DataError, match=r"all 6 images .*--group '\^\(\.\*\)\$'"):
        prepare_images(tmp_path / "s", tmp_path / "out")
    assert len(names_of(prepare_images(tmp_path / "s", tmp_path / "out", group="^(.*)$")["site-1"])) == 6


def test_one_patient_id_of_series_too(tmp_path: Path) -> None:
    affine = np.array([[-0.7, 0, 0, 20], [0, -0.5, 0, 30], [0, 0, 3.0, 5], [0, 0, 0, 1]])  # of tests.unit.dicom_files
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 900, (12, 10, 8)).astype(np.uint16)
        series(tmp_path / f"s/images/v{number}", pixels, PatientID="ANON", SeriesInstanceUID=f"1.{number}")
        labels = np.zeros((10, 12, 8), np.uint8)
        labels[2:6, 2:6, 2:6] = 1
        (tmp_path / "s/masks").mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(labels, affine), tmp_path / f"s/masks/v{number}.nii.gz")
    with pytest.raises(DataError, match=r"all 4 images .*\(the one PatientID"):
        prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    folder = prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s", group="^(.*)$")["site-1"]
    assert names_of(folder) == [f"v{number}" for number in range(4)]


# --- no site vanishes -----------------------------------------------------------------------------------------


def test_a_folder_that_is_no_site_is_named(tmp_path: Path) -> None:
    root = tmp_path / "s"
    pairs(root / "A", list("abcd"))
    pairs(root / "B", list("abcd"), 10)
    (root / "C/Images").mkdir(parents=True)
    for prepare in (prepare_masks, lambda s, out: prepare_volumes(out, source_dir=s)):
        if prepare is not prepare_masks:
            for site in "AB":
                for name in "abcd":
                    volume(root / site / f"images/{name}.nii", 1)
                    volume(root / site / f"masks/{name}.nii", 1, labels=True)
        with pytest.raises(DataError, match=r"are found in C \('C' has no file\)"):
            prepare(root, tmp_path / "out")


def test_a_class_or_a_site_without_an_image_is_named(tmp_path: Path) -> None:
    for number in range(8):
        save(tmp_path / f"s/{'xy'[number % 2]}/{number}.png", image_of(number))
    (tmp_path / "s/z").mkdir()
    (tmp_path / "s/z/a.webp").write_bytes(b"x")
    with pytest.raises(DataError, match=r"in the folder z; .*not read: 1 .webp"):
        prepare_images(tmp_path / "s", tmp_path / "out")
    written = prepare_images(tmp_path / "s", tmp_path / "out", classes=["x", "y", "z"])  # it is meant
    assert json.loads((written["site-1"] / "datalist.json").read_text())["class_names"] == ["x", "y", "z"]
    for number in range(8):
        save(tmp_path / f"t/A/{'xy'[number % 2]}/{number}.png", image_of(number))
    (tmp_path / "t/B/x").mkdir(parents=True)
    with pytest.raises(DataError, match=r"in the folder B; .* if it is no site"):
        prepare_images(tmp_path / "t", tmp_path / "out2")


def test_leaving_out_does_not_lose_a_site(tmp_path: Path) -> None:
    pairs(tmp_path / "A", list("abcd"))
    for name in "abcd":
        save(tmp_path / f"B/images/{name}.png", image_of(ord(name)))
        save(tmp_path / f"B/masks/{name}.png", mask_of(1)[:6])
    sites = {name: (tmp_path / name / "images", tmp_path / name / "masks") for name in "AB"}
    with pytest.raises(DataError, match=r"4 of 8 image.*--leave-out"):
        prepare_folders(sites, tmp_path / "out")
    with pytest.raises(DataError, match="no image of site B can be used"):
        prepare_folders(sites, tmp_path / "out", leave_out=True)


# --- masks that are none, one line a kind ----------------------------------------------------------------------


def spoilt(root: Path, kind: str) -> tuple[Path, Path]:
    images, masks = root / "images", root / "masks"
    for number in range(7):
        save(images / f"p{number}.png", image_of(number))
        if kind == "red":
            save(masks / f"p{number}.png", np.stack([mask_of(number), *[np.zeros((12, 14), np.uint8)] * 2], axis=-1))
        elif kind == "red jpeg":
            red = np.stack([mask_of(number), *[np.zeros((12, 14), np.uint8)] * 2], axis=-1)
            save(masks / f"p{number}.jpg", red, quality=70)
        elif kind == "jpeg":
            save(masks / f"p{number}.jpg", mask_of(number), quality=70)
        elif kind == "jpeg called png":
            save(masks / f"p{number}.png", mask_of(number), format="JPEG", quality=70)
        else:
            save(masks / f"p{number}.png", mask_of(number)[: -1 if kind == "small" else None])
    return (masks, images) if kind == "swapped" else (images, masks)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("swapped", "swapped: the mask has .* values, the image 2"),
        ("red", "colour"), ("red jpeg", "its mask: it is a JPEG, which"),
        ("jpeg", "its mask: it is a JPEG"), ("jpeg called png", "its mask: it is a JPEG"),
        ("small", "7 x .*'A/images/p0.png' .*'A': it is .*14x"),
    ],
)  # fmt: skip
def test_masks_that_are_none_are_found_by_prepare(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        prepare_folders({"A": spoilt(tmp_path / "A", kind)}, tmp_path / "out")
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("7 of 7 image(s) cannot be used")
    (line,) = lines
    assert line.startswith("  7 x ")
    assert "'A/images/p0.png'" in line or kind == "swapped"
    assert " and 4 more" in line
    assert not (tmp_path / "out").exists()


def test_palettes_and_single_bits_of_masks_are_said(tmp_path: Path) -> None:
    """Check that two palettes, by which one index is two structures, make two notes."""
    save(tmp_path / "image.png", np.zeros((12, 14), np.uint8))
    for name, colours in {"red": [0, 0, 0, 255, 0, 0], "green": [0, 0, 0, 0, 255, 0]}.items():
        drawn = Image.fromarray(mask_of(1) != 0).convert("P")
        drawn.putpalette(colours)
        drawn.save(tmp_path / f"{name}.png")
    Image.fromarray(mask_of(1) != 0).save(tmp_path / "bit.png")
    said = {
        name: look_at_picture(tmp_path / "image.png", tmp_path / f"{name}.png").notes
        for name in ("red", "green", "bit")
    }
    for name, colour in (("red", "#ff0000"), ("green", "#00ff00")):
        assert f"mask: its palette's indices are the labels (0, 1, ... are #000000 {colour} ...)" in said[name]
    assert "mask: its one bit is read as 0 and 1, not as 0 and 255" in said["bit"]


def test_photographs_in_the_place_of_masks_look_swapped(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / f"i/p{number}.png", mask_of(number))
        save(tmp_path / f"m/p{number}.jpg", image_of(number))  # grey
    with pytest.raises(DataError, match=r"swapped: the mask has colours, .*2 values"):
        prepare_folders({"A": (tmp_path / "i", tmp_path / "m")}, tmp_path / "out")


def test_what_is_not_read_is_told_beside_images_without_a_mask(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / f"A/images/p{number}.png", image_of(number))
        save(tmp_path / f"A/masks/p{number}.{'png' if number < 2 else 'gif'}", mask_of(number))
    with pytest.raises(DataError) as caught:
        prepare_folders({"A": (tmp_path / "A/images", tmp_path / "A/masks")}, tmp_path / "out")
    head, line, more = str(caught.value).splitlines()
    assert head.startswith("2 of 4 image(s) cannot be used")
    assert line == "  2 x without a mask of its name: 'A/images/p2.png' of site 'A', 'A/images/p3.png' of site 'A'"
    assert "not read: 2 .gif files ('p2.gif', 'p3.gif'): python -c" in more
    volume = nibabel.Nifti1Image(np.zeros((4, 5, 6), np.int16), np.eye(4))
    for number in range(3):
        for folder in ("images", "labels"):
            (tmp_path / "v" / folder).mkdir(parents=True, exist_ok=True)
        nibabel.save(volume, tmp_path / f"v/images/c{number}.nii")
        (tmp_path / f"v/labels/c{number}.nrrd").write_bytes(b"NRRD0004")
    with pytest.raises(DataError, match=r"3 of 3 volume.*\n.*\n.*: 3 .nrrd files"):
        prepare_volumes(tmp_path / "out", source_dir=tmp_path / "v")


def test_masks_without_any_structure_are_refused_in_words(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / f"i/p{number}.png", image_of(number))
        save(tmp_path / f"m/p{number}.png", mask_of(number, 0))
    with pytest.raises(DataError, match=r"all masks are empty \(0 at every pixel\)"):
        prepare_folders({"A": (tmp_path / "i", tmp_path / "m")}, tmp_path / "out")


def test_a_method_for_classes_is_refused_once_on_masks(tmp_path: Path) -> None:
    """Check that the manifest names masks, so that a run does not first try them as classes."""
    for number in range(4):
        save(tmp_path / f"i/p{number}.png", image_of(number))
        save(tmp_path / f"m/p{number}.png", mask_of(number))
    prepare_folders({"A": (tmp_path / "i", tmp_path / "m")}, tmp_path / "out")
    assert kind_by_manifest(tmp_path / "out/fairflare.json", {}) == {"task": "segmentation"}
    assert kind_by_manifest(tmp_path / "out", {"task": "classification"}) == {}


def test_labels_of_pictures_are_told_to_the_task(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / f"i/p{number}.png", image_of(number))
        save(tmp_path / f"m/p{number}.png", mask_of(number, 40) + mask_of(number, 40).T[:12, :12].repeat(2, 1)[:, :14])
    prepare_folders({"A": (tmp_path / "i", tmp_path / "m")}, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    block = json.loads((tmp_path / "out/fairflare.json").read_text())["sites"]["A"]
    assert manifest["task"] == {"num_classes": 2}
    assert block["mask_values"] == {"0": 0, "40": 1, "80": 2}


def test_a_void_is_said(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / f"i/p{number}.png", image_of(number))
        save(tmp_path / f"m/p{number}.png", np.where(np.arange(12)[:, None] < 2, np.uint8(255), mask_of(number, 1)))
    prepare_folders({"A": (tmp_path / "i", tmp_path / "m")}, tmp_path / "out")
    assert "the labels 0, 1, 255 are read as 0, 1, 2 (mask_values in fairflare.json); where 255 means" in notes(
        tmp_path / "out"
    )
    assert "--set ignore=255 --set num_classes=1" in notes(tmp_path / "out")


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["脑部甲", "脑部乙", "脑部丙"], ["Jörg", "Zoë", "Ægir"], ["विकास", "मीरा", "कवि"]])
def test_names_of_any_script_are_kept_and_compared_composed(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        save(tmp_path / "i" / f"{unicodedata.normalize('NFD', name)}.png", image_of(number))
        save(tmp_path / "m" / f"{unicodedata.normalize('NFC', name)}_mask.png", mask_of(number))
    written = prepare_folders({"A": (tmp_path / "i", tmp_path / "m")}, tmp_path / "out")
    assert names_of(written["A"]) == sorted(f"{unicodedata.normalize('NFC', name)}.png" for name in names)
    assert load_datalist(written["A"], site="A")


def test_names_that_would_become_one_are_both_named(tmp_path: Path) -> None:
    pairs(tmp_path, ["a b", "a+b", "c"])
    with pytest.raises(DataError, match=r"'a_b' \('.*/a b.png' and '.*/a\+b.png'\)"):
        prepare_folders({"A": (tmp_path / "images", tmp_path / "masks")}, tmp_path / "out")


@pytest.mark.parametrize(("site", "called"), [("my site (2)", "my_site__2_"), ("St. Mary", "St__Mary"), ("Köln", None)])
def test_names_of_sites(tmp_path: Path, site: str, called: str | None) -> None:
    pairs(tmp_path, list("abcd"))
    given = {site: (tmp_path / "images", tmp_path / "masks")}
    if called is None:
        with pytest.raises(DataError, match=rf"site '{site}': FLARE takes .*--number"):
            prepare_folders(given, tmp_path / "out")
        assert list(prepare_folders(given, tmp_path / "out", number=True)) == ["site-1"]
    else:
        assert list(prepare_folders(given, tmp_path / "out")) == [called]


# --- what is known of people ---------------------------------------------------------------------------------------


def people_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "datalist.json").read_text())
    return {Path(e["image"]).name.split(".")[0]: e.get("attributes") for split in SPLITS for e in content[split]}


def test_folders_with_a_table_of_all_sites(tmp_path: Path) -> None:
    sites = {}
    for site in "AB":
        pairs(tmp_path / site, [f"p{n}" for n in range(4)], ord(site))
        sites[site] = (tmp_path / site / "images", tmp_path / site / "masks")
    rows = [f"p{n}.png,{site},{site}{n // 2},{'FM'[n % 2]},{30 + 10 * n}" for site in "AB" for n in range(4)]
    table = tmp_path / "all.csv"
    table.write_text("\n".join(["file,clinic,patient,sex,age", *rows[:-1]]))
    columns = {"image": "file", "site": "clinic"}
    asked = {"sex": "sex", "age": "age:45"}
    more: dict[str, Any] = {"csv": table, "columns": columns, "attributes": asked}
    with pytest.raises(
        DataError, match="2 patient"
    ):  # two people are too few for three splits: patients are taken over
        prepare_folders(sites, tmp_path / "x", **more)
    table.write_text(table.read_text().replace(",A1,", ",A2,").replace("p3.png,A,A2", "p3.png,A,A3"))
    table.write_text(table.read_text().replace("p0.png,B,B0", "p0.png,B,B9"))
    written = prepare_folders(sites, tmp_path / "out", **more)
    assert people_of(written["A"])["p3"] == {"sex": "M", "age": 60.0}
    assert people_of(written["B"])["p3"] is None
    assert "1 of 8 images are not in" in notes(tmp_path / "out")
    table.write_text("file,clinic,split,sex,age\np2.png,A,test,F,30\np3.png,A,test,M,50\n")
    held = json.loads((prepare_folders(sites, tmp_path / "y", **more)["A"] / "datalist.json").read_text())["test"]
    assert [Path(entry["image"]).stem for entry in held] == ["p2", "p3"]
    table.write_text("file,sex,age\np0.png,F,3\n")
    with pytest.raises(DataError, match=r"line 2: image 'p0.png' is at several"):
        prepare_folders(sites, tmp_path / "x", csv=table, columns={"image": "file"}, attributes=asked)
    table.write_text("file,clinic,sex,age\nq0.png,A,F,3\n")
    with pytest.raises(DataError, match=r"1 images .* at no site: q0.png"):
        prepare_folders(sites, tmp_path / "x", **more)
    table.write_text("file,clinic,sex,age\np0.png,A,F,3\np0,A,M,3\n")
    with pytest.raises(DataError, match="lines 2 and 3: both name"):
        prepare_folders(sites, tmp_path / "x", **more)
    table.write_text("file,clinic,sex,age\np0.png,Aa,F,3\n")
    with pytest.raises(DataError, match="line 2: there is no site 'Aa'"):
        prepare_folders(sites, tmp_path / "x", **more)


def test_folders_with_classes(tmp_path: Path) -> None:
    sites = {}
    for place, site in enumerate("AB"):
        for number in range(6):
            save(tmp_path / site / f"p{number}.png", image_of(10 * place + number))
        rows = "".join(f"p{number},{'x' if number % 2 else 'y'}\n" for number in range(6))
        (tmp_path / site / "t.csv").write_text("image,label\n" + rows)
        sites[site] = (tmp_path / site, tmp_path / site / "t.csv")
    written = prepare_folders(sites, tmp_path / "out", classes=["y", "x"])
    for folder in written.values():
        found = load_datalist(folder, site="a", class_labels=True)
        assert found.class_names == ("y", "x")
        for split in SPLITS:
            assert all(sample.label == int(sample.image.stem[1:]) % 2 for sample in found.splits[split])
    (tmp_path / "A/t.csv").write_text("image,label,site\np0,x,A\np1,y,B\n")
    for prepare in (prepare_folders, lambda given, out: prepare_volumes(out, folders=given)):
        with pytest.raises(DataError, match=r"line 3: the site is 'B', .*site 'A'"):
            prepare(sites, tmp_path / "x")
        volume(tmp_path / "A/p0.nii", 0)
        volume(tmp_path / "A/p1.nii", 1)
    pairs(tmp_path / "C", list("abcd"))
    with pytest.raises(ValueError, match="--classes are those of a table"):
        prepare_folders({"C": (tmp_path / "C/images", tmp_path / "C/masks")}, tmp_path / "x", classes=["y", "x"])


def test_people_of_bids(tmp_path: Path) -> None:
    of_bids(tmp_path / "s", tmp_path / "out")
    table = tmp_path / "s/participants.tsv"
    table.write_text("participant_id\tsex\tage\nsub-0\tF\t30\nsub-1\tM\tn/a\nsub-2\tn/a\t70\n")
    prepare_volumes(tmp_path / "plain", source_dir=tmp_path / "s")
    assert (
        "says sex, age of the people, which is not taken over; for groups of people give --attributes sex=sex"
        in notes(tmp_path / "plain")
    )
    asked = {"sex": "sex", "age": "age:40"}
    written = prepare_volumes(tmp_path / "groups", source_dir=tmp_path / "s", attributes=asked)["site-1"]
    assert people_of(written) == {
        "sub-0": {"sex": "F", "age": 30.0}, "sub-1": {"sex": "M"}, "sub-2": {"age": 70.0}, "sub-3": None
    }  # fmt: skip
    assert load_datalist(written, site="a").attributes["sex"].values == ("F", "M")
    assert "does not have 1 of the people: 'sub-3'" in notes(tmp_path / "groups")
    with pytest.raises(DataError, match="missing: handedness; found: participant"):
        prepare_volumes(tmp_path / "x", source_dir=tmp_path / "s", attributes={"hand": "handedness"})
    table.unlink()
    with pytest.raises(ValueError, match="--attributes are columns of a table"):
        prepare_volumes(tmp_path / "x", source_dir=tmp_path / "s", attributes=asked)


def test_people_of_volumes_in_a_table(tmp_path: Path) -> None:
    for number in range(6):
        volume(tmp_path / f"s/v{number}.nii", number)
    rows = "".join(f"v{number},{number % 2},{'FM'[number % 2]}\n" for number in range(6))
    (tmp_path / "s/t.csv").write_text("image,label,gender\n" + rows)
    given: dict[str, Any] = {"csv": "t.csv", "attributes": {"sex": "gender"}}
    written = prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s", **given)["site-1"]
    assert people_of(written) == {f"v{number}": {"sex": "FM"[number % 2]} for number in range(6)}
    with pytest.raises(ValueError, match="--attributes are columns of a table"):
        prepare_volumes(tmp_path / "x", source_dir=of_volumes_root(tmp_path / "t"), attributes={"sex": "gender"})


def of_volumes_root(root: Path) -> Path:
    of_volumes(root, root.with_name("unused"))
    return root


# --- text with a mark -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16"])
def test_json_of_windows_editors(tmp_path: Path, coding: str) -> None:
    from fairflare.cli.data.sites import sites_of
    from fairflare.federation.site.site_file import read_site_file

    folder = of_folders(tmp_path / "s", tmp_path / "out")["A"]
    for file in (folder / "datalist.json", tmp_path / "out/fairflare.json"):
        file.write_text(file.read_text(encoding="utf-8"), encoding=coding)
    assert sites_of(tmp_path / "out/fairflare.json")["A"]["data_root"] == str(folder)
    assert read_site_file(tmp_path / "out/fairflare.json", "A")["data_root"] == str(folder)
    assert load_datalist(folder, site="A").splits["test"]


@pytest.mark.parametrize(
    ("ending", "words"), [(".nii", "not packed: rename it to .nii"), (".nii.gz", "packed: rename")]
)
def test_volumes_with_the_other_ending(tmp_path: Path, ending: str, words: str) -> None:
    """Check the message's remedy: renamed volumes are read."""
    other = {".nii": ".nii.gz", ".nii.gz": ".nii"}[ending]
    for number, name in enumerate("abcd"):
        for kind in ("images", "labels"):
            path = volume(tmp_path / f"s/{kind}/{name}{ending}", number, labels=kind == "labels")
            path.rename(path.with_name(name + other))
    with pytest.raises(DataError, match=words):
        prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    for path in list((tmp_path / "s").rglob(f"*{other}")):
        path.rename(path.with_name(path.name.removesuffix(other) + ending))
    assert prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
