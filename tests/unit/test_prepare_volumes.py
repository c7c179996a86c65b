"""Test ``fairflare prepare volumes``: NIfTI and DICOM, whole and slice by slice, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fairflare.base.disk.files import sha256_of
from fairflare.cli.commands import app
from fairflare.data.datalist import SPLITS, DataError, load_datalist
from fairflare.data.preparers import Dealing, prepare_folders, prepare_images, prepare_masks, prepare_volumes
from fairflare.data.preparers.__main__ import main
from fairflare.data.reading import Reading, read_mask
from tests.unit.dicom_files import series

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (10, 12, 8)  # columns, rows, slices as NIfTI has them
AFFINE = np.array([[1.0, 0, 0, -4], [0, 1.5, 0, 7], [0, 0, 3.0, 2], [0, 0, 0, 1]])
FIRST, LAST = 2, 6  # slices of every axis with a label


def labels_of(number: int, values: Sequence[int] = (1,), shape: Sequence[int] = SHAPE) -> np.ndarray:
    found = np.zeros(shape, np.uint8)
    block = found[FIRST:LAST, FIRST:LAST, FIRST:LAST]
    block[...] = np.random.default_rng(number).choice(values, block.shape)
    block[number % len(block) :, number // len(block) % len(block), :1] = 0  # no two masks are the same
    return found


def nifti(path: Path, array: Any, affine: Any = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, affine), path)
    return path


def image_of(number: int, shape: Sequence[int] = SHAPE) -> np.ndarray:
    return np.random.default_rng(1000 + number).integers(0, 900, shape).astype(np.int16)


def plain(root: Path, count: int = 6, values: Sequence[int] = (1,), name: str = "p{0:02d}_0") -> Path:
    for number in range(count):
        own = image_of(100 * ord(root.name[-1]) + number)  # no two sites have one image
        nifti(root / "images" / f"{name.format(number)}.nii.gz", own)
        nifti(root / "labels" / f"{name.format(number)}_seg.nii.gz", labels_of(number, values))
    return root


def entries(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / "datalist.json").read_text())
    return [entry for split in SPLITS for entry in content[split]]


def manifest(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepare_volumes(*arguments, **options)
    return str(caught.value)


# --- layouts ------------------------------------------------------------------------------------------------


def test_folders_of_sites(tmp_path: Path) -> None:
    for site in "AB":
        plain(tmp_path / "s" / site)
    written = prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s", group=r"^(p\d+)_")
    assert list(written) == ["A", "B"]
    found = load_datalist(written["A"], site="A")
    assert [len(found.splits[split]) for split in SPLITS] == [4, 1, 1]
    sample = found.splits["training"][0]
    assert (sample.slice, sample.spacing) == (None, (1.5, 1.0, 3.0))  # rows, columns, slices
    assert sample.patient in {f"p{number:02d}" for number in range(6)}
    source = tmp_path / "s/A/images" / sample.image.name
    assert sample.image.read_bytes() == source.read_bytes()
    told = manifest(tmp_path / "out")
    assert told["volumes"]["B"] == {
        "volumes": 6, "spacing": {"1.5 x 1 x 3": 6}, "orientation": {"RAS": 6}, "label": {"0": 6, "1": 6}
    }  # fmt: skip
    assert told["sites"]["A"]["patients"] == 6
    assert told["task"] == {}


def test_the_tree_of_the_decathlon(tmp_path: Path) -> None:
    for number in range(5):
        nifti(tmp_path / "s/imagesTr" / f"a_{number}.nii.gz", image_of(number))
        nifti(tmp_path / "s/labelsTr" / f"a_{number}.nii.gz", labels_of(number, (1, 3)))
    nifti(tmp_path / "s/imagesTs/a_9.nii.gz", image_of(9))
    (tmp_path / "s/labelsTr/._a_1.nii.gz").write_bytes(b"of a Mac")
    names = {"0": "background", "1": "liver", "2": "vessel", "3": "tumour"}
    (tmp_path / "s/dataset.json").write_text(json.dumps({"labels": names}))
    prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    told = manifest(tmp_path / "out")
    assert told["task"] == {"num_classes": 3, "class_names": ["liver", "vessel", "tumour"]}
    assert ["have no labels and are not used" in note for note in told["notes"]] == [True]
    assert "mask_values" not in (tmp_path / "out/fairflare.json").read_text()


def test_nnunet_names(tmp_path: Path) -> None:
    for number in range(4):
        nifti(tmp_path / "s/imagesTr" / f"a_{number}_0000.nii.gz", image_of(number))
        nifti(tmp_path / "s/labelsTr" / f"a_{number}.nii.gz", labels_of(number))
    (tmp_path / "s/dataset.json").write_text(json.dumps({"labels": {"background": 0, "gland": 1}}))
    written = prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    assert {entry["image"] for entry in entries(written["site-1"])} == {f"images/a_{n}.nii.gz" for n in range(4)}


def bids(root: Path, kinds: Sequence[str] = ("T1w",)) -> Path:
    for number in range(4):
        for session in "ab":
            name = f"sub-{number:02d}_ses-{session}"
            for kind in kinds:
                nifti(root / f"sub-{number:02d}/ses-{session}/anat/{name}_{kind}.nii.gz", image_of(number))
            nifti(root / f"derivatives/seg/sub-{number:02d}/anat/{name}_space-T1w_dseg.nii.gz", labels_of(number))
    return root


def test_bids_keeps_the_sessions_of_a_person_together(tmp_path: Path) -> None:
    written = prepare_volumes(tmp_path / "out", source_dir=bids(tmp_path / "s"))
    found = load_datalist(written["site-1"], site="site-1")
    where: dict[str | None, set[str]] = {}
    for split, samples in found.splits.items():
        for sample in samples:
            where.setdefault(sample.patient, set()).add(split)
            assert sample.patient is not None
            assert sample.image.name.startswith(f"{sample.patient}_ses-")
    assert sorted(map(str, where)) == ["sub-00", "sub-01", "sub-02", "sub-03"]
    assert all(len(splits) == 1 for splits in where.values())


def test_bids_with_two_kinds_of_images(tmp_path: Path) -> None:
    source = bids(tmp_path / "s", ("T1w", "FLAIR"))
    told = refused(tmp_path / "out", source_dir=source)
    for words in (
        "_FLAIR.nii.gz' and '",
        "_T1w.nii.gz' are of one examination; say which images are meant (--suffix T1w)",
    ):
        assert f"sub-00_ses-a{words}" in told
    prepare_volumes(tmp_path / "out", source_dir=source, suffix="FLAIR")
    assert manifest(tmp_path / "out")["sites"]["site-1"]["images"] == {"training": 4, "validation": 2, "test": 2}


DICOM_AFFINE = np.array([[-0.7, 0, 0, 20], [0, -0.5, 0, 30], [0, 0, 3.0, 5], [0, 0, 0, 1]])  # of tests.unit.dicom_files


def scanned(root: Path, people: int, each: int) -> Path:
    """Write series of 8 slices, and NIfTI masks in their position."""
    for person in range(people):
        for number in range(each):
            seen = image_of(10 * person + number).astype(np.uint16)
            folder = root / "images" / f"p{person}" / f"1.2.{number}"
            series(
                folder, seen.transpose(1, 0, 2), PatientID=f"SECRET-{person}", SeriesInstanceUID=f"1.{person}.{number}"
            )
            name = f"p{person}" if each == 1 else f"p{person}/1.2.{number}"
            nifti(root / "masks" / f"{name}.nii.gz", labels_of(person), DICOM_AFFINE)
    return root


@pytest.mark.parametrize("each", [1, 2])
def test_folders_of_dicom_series(tmp_path: Path, each: int) -> None:
    written = prepare_volumes(tmp_path / "out", source_dir=scanned(tmp_path / "s", 4, each))
    found = load_datalist(written["site-1"], site="site-1")
    assert sum(map(len, found.splits.values())) == 4 * each
    people = {sample.patient for samples in found.splits.values() for sample in samples}
    assert len(people) == 4
    assert all(len(str(person)) == 16 for person in people)  # a hash
    sample = found.splits["test"][0]
    assert sample.spacing == (0.5, 0.7, 3.0)
    assert sorted(path.name for path in sample.image.iterdir()) == [f"IM{k:04d}" for k in range(8)]
    assert "SECRET" not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.json"))
    assert manifest(tmp_path / "out")["volumes"]["site-1"]["orientation"] == {"LPS": 4 * each}
    checksums = (written["site-1"] / "checksums.sha256").read_text()
    assert checksums.count("/IM0003\n") == 4 * each


@pytest.mark.parametrize(
    "dealing", [Dealing(global_test=True), Dealing(partition="iid", sites=2, global_test=True, min_size=1)]
)
def test_series_of_two_sites_that_use_the_same_patient_numbers(tmp_path: Path, dealing: Dealing) -> None:
    sources = {name: scanned(tmp_path / name, 8, 1) for name in "AB"}
    folders = {name: (source / "images", source / "masks") for name, source in sources.items()}
    written = prepare_volumes(tmp_path / "out", folders=folders, dealing=dealing)
    lists = {name: load_datalist(folder, site=name).splits for name, folder in written.items()}
    everywhere = [{sample.patient for sample in splits["test_global"]} for splits in lists.values()]
    assert everywhere[0] == everywhere[1]
    assert len(everywhere[0]) == sum(len(splits["test"]) for splits in lists.values()) > 1
    own = [sample.patient for splits in lists.values() for split in ("training", "test") for sample in splits[split]]
    assert len(own) == len(set(own)) or dealing.partition == "site"
    for folder in written.values():
        checksums = (folder / "checksums.sha256").read_text().splitlines()
        assert all(sha256_of(folder / line.split("  ")[1]) == line.split("  ")[0] for line in checksums)
        assert sum("/IM0003" in line for line in checksums) == len(list((folder / "images").iterdir()))


def classes(root: Path, count: int = 12) -> Path:
    rows = ["file,diagnosis,person"]
    for number in range(count):
        nifti(root / f"scans/v{number}.nii", image_of(number))
        rows.append(f"v{number},{'ill' if number % 3 == 0 else 'well'},q{number // 2}")
    (root / "list.csv").write_text("\n".join(rows))
    return root


@pytest.mark.parametrize("by_site", [False, True])
def test_classes_from_a_table(tmp_path: Path, by_site: bool) -> None:
    source = classes(tmp_path / "s")
    columns = {"image": "file", "label": "diagnosis", "patient": "person"}
    if by_site:
        given: dict[str, Any] = {"folders": {"A": (source / "scans", source / "list.csv")}}
    else:
        given = {"source_dir": source / "scans", "csv": source / "list.csv"}
    written = prepare_volumes(tmp_path / "out", **given, columns=columns)
    (folder,) = written.values()
    found = load_datalist(folder, site="A", class_labels=True)
    assert found.class_names == ("ill", "well")
    for split in SPLITS:
        for sample in found.splits[split]:
            number = int(sample.image.name[1:].partition(".")[0])
            assert sample.label == int(number % 3 != 0)
            assert sample.patient == f"q{number // 2}"
    assert manifest(tmp_path / "out")["task"] == {"num_classes": 2}


def test_a_tree_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "s/notes").mkdir(parents=True)
    told = refused(tmp_path / "out", source_dir=tmp_path / "s")
    assert "expected imagesTr/ and labelsTr/ (Decathlon), sub-*/ (BIDS)" in told
    assert "found notes" in told


# --- what goes together -------------------------------------------------------------------------------------


def test_a_volume_of_one_slice_is_refused_as_training_would(tmp_path: Path) -> None:
    flat = (*SHAPE[:2], 1)
    nifti(tmp_path / "s/images/p.nii.gz", image_of(0, flat))
    nifti(tmp_path / "s/labels/p.nii.gz", labels_of(0, shape=flat))
    assert "it has one slice, and tasks on whole volumes need more" in refused(
        tmp_path / "out", source_dir=tmp_path / "s"
    )
    refused_as_slices = refused(tmp_path / "out", source_dir=tmp_path / "s", slices="axial")
    assert "one slice" not in refused_as_slices  # too few images, and no other reason


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    plain(tmp_path / "s", 11)
    images, masks = tmp_path / "s/images", tmp_path / "s/labels"
    nifti(masks / "p00_0_seg.nii.gz", labels_of(0, shape=(10, 12, 9)))
    moved = AFFINE.copy()
    moved[0, 3] += 0.6  # of a voxel of 1 mm
    nifti(masks / "p01_0_seg.nii.gz", labels_of(1), moved)
    nifti(masks / "p02_0_seg.nii.gz", labels_of(2) * np.float32(0.5))
    nifti(images / "p03_0.nii.gz", image_of(3, (*SHAPE, 2)))
    (images / "p04_0.nii.gz").write_bytes(b"damaged")
    holed = image_of(9).astype(np.float32)
    holed[3, 4, 5] = np.nan
    nifti(images / "p09_0.nii.gz", holed)
    (masks / "p05_0_seg.nii.gz").unlink()
    nifti(images / "p10_0.nii.gz", image_of(10).astype(np.complex64))
    told = refused(tmp_path / "out", source_dir=tmp_path / "s")
    for words in (
        "8 of 11 volume(s) cannot be used",
        "1 x it holds complex64 values, not numbers: 's/images/p10",
        "1 x it has values that are NaN or infinite; repair the file: 's/images/p09",
        "it covers a part (from row 0, column 0, slice 0; 12 x 10 x 9 of 12 x 10 x 8)",
        "it is shifted by (0.6, 0, 0) mm",
        "are not whole numbers", "it holds 2 volumes", "images/p04_0.nii.gz'",
        "without a mask of its name: 's/images/p05_0.nii.gz'",
    ):  # fmt: skip
        assert words in told
    assert not (tmp_path / "out").exists()
    written = prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s", leave_out=True)
    assert sorted(entry["image"][7:10] for entry in entries(written["site-1"])) == ["p06", "p07", "p08"]
    assert manifest(tmp_path / "out")["notes"][0].startswith("8 of 11 volume(s) are left out")


def test_labels_get_numbers_without_gaps(tmp_path: Path) -> None:
    plain(tmp_path / "s/A", 4, (2, 5))
    plain(tmp_path / "s/B", 4, (5, 9))
    prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    told = manifest(tmp_path / "out")
    assert told["notes"] == ["the labels 0, 2, 5, 9 are read as 0, 1, 2, 3 (mask_values in fairflare.json)"]
    blocks = json.loads((tmp_path / "out/fairflare.json").read_text())["sites"]
    assert blocks["A"]["mask_values"] == blocks["B"]["mask_values"] == {"0": 0, "2": 1, "5": 2, "9": 3}
    assert told["task"] == {"num_classes": 3}


# --- slices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", ["axial", "coronal", "sagittal"])
@pytest.mark.parametrize("codes", ["RAS", "LPS", "PIR"])
def test_a_slice_is_what_training_reads(tmp_path: Path, plane: str, codes: str) -> None:
    """Compare with the volume in RAS, cut by hand: numbers count from the feet, the front or the right."""
    from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

    ras = [labels_of(number, (1, 2)) for number in range(4)]
    turn = ornt_transform(io_orientation(AFFINE), axcodes2ornt(codes))
    for number, labels in enumerate(ras):
        ras[number] = labels * (np.arange(SHAPE[0])[:, None, None] != 3)  # no side is like the other
        stored = nibabel.orientations.apply_orientation(ras[number], turn)
        affine = AFFINE @ inv_ornt_aff(turn, SHAPE)
        nifti(tmp_path / f"s/images/v{number}.nii.gz", stored.astype(np.int16) * 9, affine)
        nifti(tmp_path / f"s/masks/v{number}.nii.gz", stored, affine)
    written = prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s", slices=plane)
    task = manifest(tmp_path / "out")["task"]
    how = Reading(orientation=task.get("orientation", "canonical"))
    samples = [s for found in load_datalist(written["site-1"], site="a").splits.values() for s in found]
    axis, flip = {"axial": (2, False), "coronal": (1, True), "sagittal": (0, True)}[plane]
    expected = 0
    for number, labels in enumerate(ras):
        along = np.moveaxis(labels, axis, 0)[:: -1 if flip else 1]
        kept = [index for index in range(len(along)) if along[index].any()]
        expected += len(kept)
        own = [s for s in samples if s.volume == f"v{number}"]
        assert [s.slice for s in own] == kept
        for sample in own:
            seen = read_mask(sample, site="a", split="test", how=how)
            assert np.bincount(seen.ravel()).tolist() == np.bincount(along[sample.slice].ravel()).tolist()
    assert len(samples) == expected
    spacing = {"axial": (1.5, 1.0, 3.0), "coronal": (3.0, 1.0, 1.5), "sagittal": (3.0, 1.5, 1.0)}[plane]
    assert samples[0].spacing == spacing


def test_the_file_s_own_plane_needs_no_setting(tmp_path: Path) -> None:
    plain(tmp_path / "s", 4)
    written = prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s", slices="axial", group=r"^(p\d+)_")
    told = manifest(tmp_path / "out")
    assert told["task"] == {}
    assert told["notes"] == ["16 of 32 slices have no label and are left out (--keep-empty keeps them)"]
    found = entries(written["site-1"])
    assert len(found) == 16
    assert found[0]["volume"].startswith(found[0]["patient"])
    assert len(list((written["site-1"] / "images").iterdir())) == 4  # a volume is one file
    everything = prepare_volumes(tmp_path / "all", source_dir=tmp_path / "s", slices="axial", keep_empty=True)
    assert len(entries(everything["site-1"])) == 32


def test_slices_of_classes_and_dealt_to_sites(tmp_path: Path) -> None:
    source = classes(tmp_path / "s", 24)
    columns = {"image": "file", "label": "diagnosis", "patient": "person"}
    dealing = Dealing(partition="iid", sites=2, global_test=True)
    written = prepare_volumes(
        tmp_path / "out", source_dir=source, csv="list.csv", columns=columns, slices="axial", dealing=dealing
    )
    assert list(written) == ["site-1", "site-2"]
    own = [entry for folder in written.values() for entry in entries(folder)]
    assert {entry["slice"] for entry in own} == set(range(8))
    people = [
        {e["patient"] for e in json.loads((f / "datalist.json").read_text())["training"]} for f in written.values()
    ]
    assert not people[0] & people[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either --source or --site"),
        ({"source_dir": "s", "folders": {"A": ("a", "b")}}, "either --source or --site"),
        ({"source_dir": "s", "keep_empty": True}, "--keep-empty is of --slices"),
        ({"source_dir": "s", "slices": "oblique"}, "slices must be one of 'axial'"),
        ({"source_dir": "s", "dealing": Dealing(size=32)}, "--size and --corrupt are of pictures"),
        ({"folders": {"A": ("a", "b")}, "csv": "x.csv"}, "--csv goes with --source"),
    ],
)
def test_arguments_that_do_not_go_together(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_volumes(tmp_path / "out", **given)


# --- the command --------------------------------------------------------------------------------------------


def fairflare(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_command_and_check_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for site in "AB":
        plain(tmp_path / site, 5, (1, 2))
    sites = [w for site in "AB" for w in ("--site", site, f"{tmp_path / site}/images", f"{tmp_path / site}/labels")]
    assert main(["volumes", *sites, "--out", str(tmp_path / "out"), "--slices", "coronal"]) == 0
    told = capsys.readouterr().out
    assert "NOTE: no patients are known at A, B: split by image" in told
    assert "A: 5 volumes; spacing 1.5 x 1 x 3; orientation RAS; label 0, 1, 2" in told
    assert "A run on it needs: --task segmentation --set num_classes=2 --set 'orientation=\"coronal\"'" in told
    checked = fairflare("check-data", tmp_path / "out")
    assert "40 usable images at 2 site(s); 0 problem(s)" in checked
    assert main(["volumes", "--site", "A", "x", "--out", str(tmp_path / "x")]) == 1
    assert "--site takes NAME and two paths, got A x" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["nifti", "dicom"])
def test_the_preparers_of_pictures_refuse_volumes_and_say_which_command_takes_them(tmp_path: Path, kind: str) -> None:
    if kind == "nifti":
        plain(tmp_path / "s", 4)
    else:
        scanned(tmp_path / "s", 4, 1)
    masks = next(tmp_path / "s" / name for name in ("labels", "masks") if (tmp_path / "s" / name).is_dir())
    for call in (
        lambda: prepare_folders({"A": (tmp_path / "s/images", masks)}, tmp_path / "out"),
        lambda: prepare_masks(tmp_path / "s", tmp_path / "out"),
    ):
        with pytest.raises(DataError, match="prepare volumes` takes volumes"):
            call()
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_opened_are_named_before_anything_is_written(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/2.png", "a/3.png", "b/1.png", "b/2.png", "b/3.png"):
        (tmp_path / "s" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image_of(len(name))[:, :, 0].astype(np.uint8)).save(tmp_path / "s" / name)
    (tmp_path / "s/a/2.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"1 of 6 image.*:\n.*damaged.*s/a/2.png"):
        prepare_images(tmp_path / "s", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_table_is_looked_for_below_the_source_and_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = classes(tmp_path / "s")
    columns = {"image": "file", "label": "diagnosis"}
    (source / "list.csv").rename(tmp_path / "here.csv")
    monkeypatch.chdir(tmp_path)
    assert prepare_volumes(tmp_path / "out", source_dir=source, csv="here.csv", columns=columns)
    told = refused(tmp_path / "x", source_dir=source, csv="list.csv", columns=columns)
    assert f"neither below '{source}' nor below the working folder '{tmp_path}'" in told


def test_a_name_that_does_not_fit_names_its_site(tmp_path: Path) -> None:
    for site in "AB":
        plain(tmp_path / "s" / site, name="p{0:02d}_0" if site == "A" else "{0}")
    told = refused(tmp_path / "out", source_dir=tmp_path / "s", group=r"^(p\d+)_")
    assert "site 'B': " in told
    assert "--group 'B=EXPR'" in told
    assert prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s", group=[r"^(p\d+)_", r"B=^(\d+)"])
