"""Test what is said of a folder's content: objects without pixels, misnamed files, lost geometry, names of sites.

Each remedy of a message is carried out here, and its result is measured.
"""

from __future__ import annotations

import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from PIL import Image
from typer.testing import CliRunner

from fairflare.base.checks import site_names
from fairflare.cli.commands import app
from fairflare.data.datalist import DataError, Sample, load_datalist
from fairflare.data.preparers import prepare_images, prepare_volumes
from fairflare.data.reading import read_mask
from fairflare.data.whole_volumes import read_whole
from fairflare.federation.site.site_file import own_settings
from fairflare.flare.export.stats_recipe import StatsRecipe
from fairflare.methods.base.training import SiteError
from tests.unit.dicom_files import dicom, series

PEOPLE, SHAPE = 4, (12, 14, 6)  # rows, columns, slices


def mask_of(number: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    found = np.zeros(shape, np.uint8)
    found[2 + number % 3 : shape[0] - 3, 3 : 8 + number % 4, 1 : shape[2] - 2] = 1
    return found


def pixels_of(number: int, mask: np.ndarray) -> np.ndarray:
    return (np.random.default_rng(number).integers(0, 80, mask.shape) + mask * 120).astype(np.int16)


def scanned(root: Path) -> tuple[Path, Path]:
    """Write DICOM series with NIfTI masks of them, and return the two folders."""
    (root / "labels").mkdir(parents=True)
    for number in range(PEOPLE):
        mask = mask_of(number)
        series(root / "images" / f"p{number}", pixels_of(number, mask), PatientID=f"p{number}")
        # Rows are 0.5 mm apart and go from 30 backwards, columns 0.7 mm from 20 to the left, slices 3 mm from 5 up.
        affine = np.array([[-0.7, 0, 0, 20], [0, -0.5, 0, 30], [0, 0, 3, 5], [0, 0, 0, 1.0]])
        nibabel.save(nibabel.Nifti1Image(mask.swapaxes(0, 1), affine), root / "labels" / f"p{number}.nii.gz")
    return root / "images", root / "labels"


def volumes(root: Path, affine: np.ndarray) -> tuple[Path, Path]:
    """Write NIfTI volumes with masks, and return the two folders."""
    for number in range(PEOPLE):
        mask = mask_of(number).swapaxes(0, 1)
        for folder, array in (("images", pixels_of(number, mask)), ("labels", mask)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, affine), root / folder / f"p{number}.nii.gz")
    return root / "images", root / "labels"


def refused(**options: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepare_volumes(options.pop("out"), **options)
    return str(caught.value)


def notes(out: Path) -> str:
    return " ".join(json.loads((out / "manifest.json").read_text())["notes"])


# --- objects without pixels -----------------------------------------------------------------------------------

RAW = "1.3.12.2.1107.5.9.1"  # a private class of Siemens, which no standard names
OBJECTS = {  # name of the class in the note: UID, and whether the header gives a size
    "Enhanced SR Storage": ("1.2.840.10008.5.1.4.1.1.88.22", False),
    "X-Ray Radiation Dose SR Storage": ("1.2.840.10008.5.1.4.1.1.88.67", False),
    "Media Storage Directory Storage": ("1.2.840.10008.1.3.10", False),
    "Grayscale Softcopy Presentation State Storage": ("1.2.840.10008.5.1.4.1.1.11.1", False),
    "Key Object Selection Document Storage": ("1.2.840.10008.5.1.4.1.1.88.59", False),
    "RT Plan Storage": ("1.2.840.10008.5.1.4.1.1.481.5", False),
    "RT Structure Set Storage": ("1.2.840.10008.5.1.4.1.1.481.3", False),
    "Encapsulated PDF Storage": ("1.2.840.10008.5.1.4.1.1.104.1", False),
    "Raw Data Storage": ("1.2.840.10008.5.1.4.1.1.66", False),
    "MR Spectroscopy Storage": ("1.2.840.10008.5.1.4.1.1.4.2", True),
    "Segmentation Storage": ("1.2.840.10008.5.1.4.1.1.66.4", True),
    RAW: (RAW, False),
}


def without_pixels(path: Path, uid: str, sized: bool = False) -> Path:
    size = {} if sized else {"Rows": None, "Columns": None}
    dicom(path, np.zeros(SHAPE[:2], np.int16), SOPClassUID=uid, SeriesInstanceUID="9.9", **size)
    found = pydicom.dcmread(path)
    del found.PixelData
    found.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_without_pixels_are_no_slices(name: str, tmp_path: Path) -> None:
    places = scanned(tmp_path / "a")
    for number in range(PEOPLE):
        without_pixels(places[0] / f"p{number}" / "OTHER", *OBJECTS[name])
    prepare_volumes(tmp_path / "out", folders={"a": places})
    assert f"{PEOPLE} DICOM ({name}) files ('p0/OTHER', 'p1/OTHER', 'p2/OTHER' and 1 more)" in notes(tmp_path / "out")
    samples = [s for own in load_datalist(tmp_path / "out/a", site="a").splits.values() for s in own]
    assert len(samples) == PEOPLE
    for sample in samples:
        read = read_whole(sample, masked=True, site="a", split="t")
        truth = mask_of(int(sample.image.name[1:]))
        assert read.mask is not None
        np.testing.assert_array_equal(np.sort(read.mask.ravel()), np.sort(truth.ravel()))
        assert read.image.shape == (1, *SHAPE)
        assert read.image[0][read.mask == 1].min() > read.image[0][read.mask == 0].min()
        assert not (sample.image / "OTHER").exists()


def test_folders_of_objects_without_pixels_are_no_series(tmp_path: Path) -> None:
    images, labels = scanned(tmp_path / "a")
    for number in range(PEOPLE):
        (images / f"q{number}" / "SR").mkdir(parents=True)
        without_pixels(images / f"q{number}" / "SR" / "x.dcm", OBJECTS["Enhanced SR Storage"][0])
    prepare_volumes(tmp_path / "out", folders={"a": (images, labels)})
    assert f"{PEOPLE} DICOM (Enhanced SR Storage) files ('q0/SR/x.dcm'" in notes(tmp_path / "out")
    for path in labels.iterdir():
        path.unlink()
    for number in range(PEOPLE):
        without_pixels(labels / f"p{number}.dcm", OBJECTS["RT Structure Set Storage"][0])
    told = refused(out=tmp_path / "o2", folders={"a": (images, labels)})
    assert f"{PEOPLE} x without a mask of its name" in told
    assert "DICOM (RT Structure Set Storage) files ('p0.dcm'" in told
    assert "make a NIfTI mask of it: plastimatch" in told


def test_a_slice_without_its_size_is_no_object_without_pixels(tmp_path: Path) -> None:
    """Check that a damaged slice is refused by its name, and not passed over."""
    places = scanned(tmp_path / "a")
    one = sorted((places[0] / "p1").iterdir())[2]
    head = pydicom.dcmread(one)
    del head.Rows, head.PixelData
    head.save_as(one, enforce_file_format=True)
    told = refused(out=tmp_path / "out", folders={"a": places})
    assert "1 x its file 'IM0002' cannot be read: it is a DICOM file without an image (CT Image Storage)" in told
    (places[0] / "p1" / "IM0002").rename(places[0] / "p1" / "IM0002.dcm")
    (places[0] / "p1" / "IM0002.dcm").write_bytes(b"")
    told = refused(out=tmp_path / "out", folders={"a": places})
    assert "1 x its file 'IM0002.dcm' cannot be read: it is empty (0 bytes)" in told


# --- files that are not what their names say --------------------------------------------------------------------


def packed(path: Path) -> bytes:
    return gzip.compress(path.read_bytes())


CONTENT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty (0 bytes)"),
    "page": (b"<!DOCTYPE html><html>log in</html>", "it is a web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a pointer of Git LFS"),
    "annex": (b"/annex/objects/MD5E-s1--0.nii.gz\n", "it is a pointer of git-annex"),
    "zip": (b"PK\x03\x04" + bytes(30), "it is a ZIP archive"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(30), "by its first bytes it is a .png file"),
    "nrrd": (b"NRRD0004\n", "it is NRRD"),
    "hdf5": (b"\x89HDF\r\n\x1a\n", "it is HDF5"),
    "dicom": (bytes(128) + b"DICM" + bytes(30), "by its first bytes it is a .dcm file"),
    "packed dicom": (
        gzip.compress(bytes(128) + b"DICM" + bytes(30)),
        "it is packed by gzip, and inside is a .dcm file",
    ),
    "packed page": (gzip.compress(b"<html></html>"), "it is packed by gzip, and inside is a web page"),
    "packed twice": (gzip.compress(gzip.compress(bytes(400))), "it is packed by gzip, and inside is a .nii.gz file"),
    "packed text": (gzip.compress(b"hello" * 99), "it is no NIfTI file"),
}


@pytest.mark.parametrize("kind", sorted({*CONTENT} - {"dicom"}))  # in a tree of volumes that is no volume
def test_files_are_called_what_they_are(kind: str, tmp_path: Path) -> None:
    content, words = CONTENT[kind]
    images, labels = volumes(tmp_path / "a", np.diag([2, 2, 3, 1.0]))
    (labels / "p2.nii.gz").write_bytes(content)
    told = refused(out=tmp_path / "out", folders={"a": (images, labels)})
    assert "1 of 4 volume(s) cannot be used" in told
    assert words in told
    with pytest.raises(DataError, match=words.partition(" (")[0]):  # a run and check-data say the same
        read_mask(Sample(images / "p2.nii.gz", labels / "p2.nii.gz", 0), site="a", split="training")
    prepare_volumes(tmp_path / "out", folders={"a": (images, labels)}, leave_out=True)  # taken out knowingly
    assert words in notes(tmp_path / "out")


@pytest.mark.parametrize("kind", ["empty", "page", "zip", "dicom", "packed dicom"])
def test_pictures_are_called_what_they_are(kind: str, tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / "s" / "xy"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels_of(number, mask_of(0))[:, :, 0].astype(np.uint8)).save(path)
    path.write_bytes(CONTENT[kind][0])
    with pytest.raises(DataError) as caught:
        prepare_images(tmp_path / "s", tmp_path / "out")
    assert CONTENT[kind][1] in str(caught.value)


@pytest.mark.parametrize("ending", [".jfif", ".jpe", ".dib"])
def test_converters_of_pictures_work(ending: str, tmp_path: Path) -> None:
    """Carry out the command of the note, and compare the pixels."""
    pixels = pixels_of(1, mask_of(1))[:, :, 2].astype(np.uint8)
    for number in range(6):
        (tmp_path / f"s/{'xy'[number % 2]}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels + number).save(tmp_path / f"s/{'xy'[number % 2]}/{number}.png")
    Image.fromarray(pixels).save(tmp_path / f"s/x/a{ending}")
    prepare_images(tmp_path / "s", tmp_path / "out")
    told = notes(tmp_path / "out")
    command = shlex.split(told[told.index("python -c") :])[:3]
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path / "s/x", check=True)
    with Image.open(tmp_path / f"s/x/a{ending}") as one, Image.open(tmp_path / "s/x/a.png") as other:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def two_sites(root: Path) -> list[str]:
    """Write pictures and masks of sites A and B; return the words of a command that prepares them."""
    words = ["prepare", "folders", "--out", str(root / "out")]
    for site in "AB":
        for number in range(6):
            for kind in ("images", "masks"):
                path = root / site / kind / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                mask = mask_of(number)[:, :, 2]
                Image.fromarray(mask if kind == "masks" else mask * 90 + np.uint8(number)).save(path)
        words += ["--site", site, str(root / site / "images"), str(root / site / "masks")]
    return words


def prepared(words: list[str]) -> str:
    """Return the error with which a command ends."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    return done.stderr


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_palette(path: Path) -> None:
    for number in range(6):
        with Image.open(path.with_name(f"{number}.png")) as file:
            mask = file.copy()
        mask = Image.fromarray(np.asarray(mask), "P")
        mask.putpalette([0, 0, 0, 255, 0, 0] if number != 3 else [0, 0, 0, 0, 255, 0])
        mask.save(path.with_name(f"{number}.png"))


WRONG = {
    "empty": ("images", empty, "it is empty (0 bytes): 'B/images/3.png' of site 'B'"),
    "alone": ("masks", Path.unlink, "without a mask of its name: 'B/images/3.png' of site 'B'"),
    "palette": ("masks", other_palette, "#00ff00 in 'B/masks/3.png' of site 'B'"),
    "folder": ("images", lambda path: path.parent.rename(path.parents[1] / "x"), "site 'B': '"),
    "series": (
        "images",
        lambda path: path.with_name("x.dcm").write_bytes(bytes(128) + b"DICM"),
        "'B/images/x.dcm' of site 'B'",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_refusals_of_prepare_name_the_site(kind: str, tmp_path: Path) -> None:
    words = two_sites(tmp_path)
    folder, change, said = WRONG[kind]
    change(tmp_path / "B" / folder / "3.png")
    told = prepared(words)
    assert said in told
    assert "site 'A'" not in told
    assert not (tmp_path / "out").exists()


def test_too_little_memory_names_the_file_and_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(image: Path, mask: Path | None, **more: Any) -> Any:
        raise MemoryError("Unable to allocate 7.45 GiB for an array")

    monkeypatch.setattr("fairflare.data.preparers.pictures.look_at_picture", small)
    monkeypatch.setattr("fairflare.data.preparers.looking.free_memory", lambda: 3 * 2**29)
    told = prepared(two_sites(tmp_path))
    assert f"'{tmp_path}/A/images/0.png' of site 'A' takes about 0.0 GiB of memory to check, and 1.5 GiB are" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("command", ["folders", "volumes"])
def test_values_of_masks_are_given_where_folders_are(command: str, tmp_path: Path) -> None:
    """Give 0 and 7 as 0 and 1, as the message on many values says."""
    words = two_sites(tmp_path)
    if command == "volumes":
        words = ["prepare", "volumes", "--out", str(tmp_path / "out")]
        for site in "AB":
            words += ["--site", site, *map(str, volumes(tmp_path / f"v{site}", np.diag([2, 2, 3, 1.0])))]
    done = CliRunner().invoke(app, [*words, "--mask-values", "0=0", "1=7"])
    assert done.exit_code == 0, done.output
    assert own_settings(json.loads((tmp_path / "out/fairflare.json").read_text()), "A")["mask_values"] == {
        "0": 0,
        "1": 7,
    }


# --- masks that lost their geometry -----------------------------------------------------------------------------


def turned(degrees: float) -> np.ndarray:
    """Return the affine of a volume that is turned about the z axis, in RAS."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    rotation = np.array([[c, -s, 0, 12], [s, c, 0, -7], [0, 0, 1, 4], [0, 0, 0, 1]])
    return rotation @ np.diag([-0.8, -0.8, 2.5, 1])


def by_nibabel(array: np.ndarray, image: Path, path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)


def by_itk(array: np.ndarray, image: Path, path: Path) -> None:
    sitk.WriteImage(sitk.GetImageFromArray(np.ascontiguousarray(array.transpose())), str(path))


def with_spacing(array: np.ndarray, image: Path, path: Path) -> None:
    mask = sitk.GetImageFromArray(np.ascontiguousarray(array.transpose()))
    mask.SetSpacing(sitk.ReadImage(str(image)).GetSpacing())
    sitk.WriteImage(mask, str(path))


def without_direction(array: np.ndarray, image: Path, path: Path) -> None:
    mask = sitk.GetImageFromArray(np.ascontiguousarray(array.transpose()))
    of = sitk.ReadImage(str(image))
    mask.SetSpacing(of.GetSpacing())
    mask.SetOrigin(of.GetOrigin())
    sitk.WriteImage(mask, str(path))


LOST = {"eye": by_nibabel, "itk": by_itk, "spacing": with_spacing, "direction": without_direction}


AFFINES = {"straight": turned(0), "turned": turned(20), "from 0": np.diag([0.8, 0.8, 2.5, 1.0])}
CASES = [
    (affine, program)
    for affine in AFFINES
    for program in LOST
    if affine == "turned" or program in ("eye", "itk") or (affine, program) == ("straight", "spacing")
]  # the others fit, or have LPS for RAS, which is said


@pytest.mark.parametrize("remedy", ["mask.CopyInformation(image)", "nibabel.Nifti1Image(array, image.affine)"])
@pytest.mark.parametrize(("affine", "program"), CASES)
def test_a_lost_geometry_is_told_and_its_remedy_is_right(
    affine: str, program: str, remedy: str, tmp_path: Path
) -> None:
    images, labels = volumes(tmp_path / "a", AFFINES[affine])
    for number in range(PEOPLE):
        LOST[program](mask_of(number).swapaxes(0, 1), images / f"p{number}.nii.gz", labels / f"p{number}.nii.gz")
    told = refused(out=tmp_path / "out", folders={"a": (images, labels)})
    assert f"{PEOPLE} x a mask without its geometry" in told
    assert remedy in told
    assert "Resample" not in told
    for path in labels.iterdir():
        if "CopyInformation" in remedy:
            mask, image = sitk.ReadImage(str(path)), sitk.ReadImage(str(images / path.name))
            mask.CopyInformation(image)
            sitk.WriteImage(mask, str(path))
        else:
            array, own = np.asarray(nibabel.load(path).dataobj), nibabel.load(images / path.name)
            nibabel.save(nibabel.Nifti1Image(array, own.affine), path)
    prepare_volumes(tmp_path / "out", folders={"a": (images, labels)})
    for path in labels.iterdir():
        np.testing.assert_array_equal(np.asarray(nibabel.load(path).dataobj), mask_of(int(path.name[1])).swapaxes(0, 1))
        read = read_whole(Sample(images / path.name, path), masked=True, site="a", split="t")
        bright = read.image[0] > (80 / 200 + 0.02)  # noise is below 80 of 200, structures above 120
        np.testing.assert_array_equal(read.mask, bright)


def test_an_image_that_lost_its_geometry(tmp_path: Path) -> None:
    images, labels = volumes(tmp_path / "a", turned(20))
    for path in images.iterdir():
        nibabel.save(nibabel.Nifti1Image(np.asarray(nibabel.load(path).dataobj), np.eye(4)), path)
    told = refused(out=tmp_path / "out", folders={"a": (images, labels)})
    assert "an image without its geometry" in told or "a mask without its geometry" in told
    assert "Resample" not in told


def test_resampling_is_advised_where_it_is_right(tmp_path: Path) -> None:
    """Check masks of another field of view (of the same matrix), of another part, and turned: Dice above 0.9."""
    size, spacing = (60, 60, 20), (0.8, 0.8, 2.0)
    image = sitk.Image(*size, sitk.sitkInt16)
    image.SetSpacing(spacing)
    image.SetOrigin((-20, 10, 30))
    z, y, x = np.mgrid[: size[2], : size[1], : size[0]]
    ball = ((x - 30) ** 2 + (y - 28) ** 2 + (2.5 * (z - 10)) ** 2 < 14**2).astype(np.uint8)
    truth = sitk.GetImageFromArray(ball)
    truth.CopyInformation(image)
    sitk.WriteImage(image, str(tmp_path / "image.nii.gz"))
    about = truth.TransformContinuousIndexToPhysicalPoint([(n - 1) / 2 for n in size])
    angle = np.radians(12)
    way = (np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0, 0, 0, 1)

    def grid(number: tuple[int, ...], side: tuple[float, ...], direction: tuple[float, ...]) -> Any:
        half = np.array(direction).reshape(3, 3) @ [(n - 1) / 2 * s for n, s in zip(number, side, strict=True)]
        origin = (np.array(about) - half).tolist()
        return sitk.Resample(truth, number, sitk.Transform(), sitk.sitkNearestNeighbor, origin, side, direction)

    plain = (1, 0, 0, 0, 1, 0, 0, 0, 1)
    for words, mask in (
        ("its voxels are", grid(size, (0.9, 0.9, 2.2), plain)),
        ("it is turned by 12.0 degrees", grid((80, 80, 20), spacing, way)),
        ("it covers another part", grid((50, 51, 18), spacing, plain)),
    ):
        sitk.WriteImage(mask, str(tmp_path / "mask.nii.gz"))
        with pytest.raises(DataError) as caught:
            read_whole(Sample(tmp_path / "image.nii.gz", tmp_path / "mask.nii.gz"), masked=True, site="a", split="t")
        told = str(caught.value)
        assert words in told
        call = told[told.index("`") + 1 : told.rindex("`")]
        sitk.WriteImage(eval(call, {"sitk": sitk, "mask": mask, "image": image}), str(tmp_path / "there.nii.gz"))
        read = read_whole(
            Sample(tmp_path / "image.nii.gz", tmp_path / "there.nii.gz"), masked=True, site="a", split="t"
        )
        assert read.mask is not None
        own = read.mask.sum(), ball.sum()
        placed = sitk.GetArrayFromImage(sitk.ReadImage(str(tmp_path / "there.nii.gz")))
        assert 2 * (placed * ball).sum() / sum(own) > 0.9, words


# --- names, channels and masks ----------------------------------------------------------------------------------


def test_no_site_is_called_as_the_server(tmp_path: Path) -> None:
    images, labels = volumes(tmp_path / "a", np.diag([2, 2, 3, 1.0]))
    told = refused(out=tmp_path / "out", folders={"server": (images, labels)})
    assert "no site can be called 'server'" in told
    assert "--number" in told
    prepare_volumes(tmp_path / "numbered", folders={"server": (images, labels)}, number=True)  # the remedy
    assert (tmp_path / "numbered/site-1/datalist.json").is_file()
    prepare_volumes(tmp_path / "out", folders={"a": (images, labels)})
    block = {"data_root": str(tmp_path / "out/a")}
    file, good = tmp_path / "both.json", tmp_path / "good.json"
    file.write_text(json.dumps({"sites": {"a": block, "server": block}}))
    good.write_text(json.dumps({"sites": {"a": block, "server": {"checkpoint_root": str(tmp_path)}}}))
    for command in (
        ["check-data", file], ["stats", "--data", file, "--out", tmp_path / "s"],
        ["run", "fed_avg", "--data", file, "--in-process"], ["run", "fed_avg", "--sites", "a,server", "--in-process"],
        ["export", "fed_avg", "--sites", "a,server", "--out", tmp_path / "job"],
        ["stats", "--sites", "a,server", "--job", tmp_path / "job"],
    ):  # fmt: skip
        result = CliRunner().invoke(app, [*map(str, command)])
        assert result.exit_code == 2, command
        assert "no site can be called 'server', as FLARE calls the server so" in result.stderr, command
    assert not (tmp_path / "job").exists()
    checked = CliRunner().invoke(app, ["check-data", str(good), "--task", "volume_segmentation", "--json"])
    assert [site["site"] for site in json.loads(checked.stdout)["sites"]] == ["a"]  # the server's settings stay
    with pytest.raises(SiteError, match=r"the block 'server' in .* names images"):
        own_settings({"sites": {"server": block}}, "server")
    assert own_settings({"sites": {"server": {"device": "cpu"}}}, "server")["device"] == "cpu"
    with pytest.raises(ValueError, match="no site can be called 'server'"):
        StatsRecipe(sites=["a", "server"])
    assert site_names(["Server", "all", "local"]) == ("Server", "all", "local")  # FLARE's simulator runs with these


def test_channels_are_never_dropped_in_silence(tmp_path: Path) -> None:
    images, labels = volumes(tmp_path / "t", np.diag([2, 2, 3, 1.0]))
    for path in list(images.iterdir()):
        stem = path.name.removesuffix(".nii.gz")
        path.with_name(f"{stem}_0001.nii.gz").write_bytes(path.read_bytes())
        path.rename(path.with_name(f"{stem}_0000.nii.gz"))
    for leave_out in (False, True):
        told = refused(out=tmp_path / "out", folders={"a": (images, labels)}, leave_out=leave_out)
        assert "the cases have 2 images, named _0000 to _0001, and 0 names of channels ()" in told
    prepare_volumes(tmp_path / "out", folders={"a": (images, labels)}, channels=["T1", "T2"])  # the remedy
    assert json.loads((tmp_path / "out/a/datalist.json").read_text())["channels"] == ["T1", "T2"]
    assert "its T1 and T2 have equal pixels: a copy" in (tmp_path / "out/manifest.json").read_text()


def test_two_masks_of_one_image_in_bids(tmp_path: Path) -> None:
    images, labels = volumes(tmp_path / "t", np.diag([2, 2, 3, 1.0]))
    lines = ["image,mask,patient"]
    for number in range(PEOPLE):
        name = f"sub-{number}"
        own, drawn = tmp_path / f"b/{name}/anat", tmp_path / f"b/derivatives/{name}/anat"
        own.mkdir(parents=True)
        drawn.mkdir(parents=True)
        (images / f"p{number}.nii.gz").rename(own / f"{name}_T1w.nii.gz")
        for what in ("desc-brain_mask", "desc-lesion_mask"):
            (drawn / f"{name}_{what}.nii.gz").write_bytes((labels / f"p{number}.nii.gz").read_bytes())
        lines.append(f"{name}/anat/{name}_T1w.nii.gz,derivatives/{name}/anat/{name}_desc-lesion_mask.nii.gz,{name}")
    told = refused(out=tmp_path / "out", source_dir=tmp_path / "b", suffix="T1w")
    assert "are masks of one examination; name images and masks in a table (--csv)" in told
    (tmp_path / "b/cases.csv").write_text("\n".join(lines))  # the remedy
    prepare_volumes(tmp_path / "out", source_dir=tmp_path / "b", csv="cases.csv")
    assert len(list((tmp_path / "out").rglob("*_T1w.nii.gz"))) >= PEOPLE


def test_a_task_file_that_imports_its_neighbour(tmp_path: Path) -> None:
    from fairflare.federation.plan.task_files import TaskFileError, load_task_class

    (tmp_path / "nets_of_mine.py").write_text("FEATURES = 4")
    (tmp_path / "task.py").write_text(
        "import nets_of_mine\nfrom fairflare.tasks.segmentation import SegmentationTask\n"
        "class Task(SegmentationTask):\n    pass\n"
    )
    with pytest.raises(TaskFileError, match=r"nets_of_mine lies beside it, .*task\.py"):
        load_task_class(tmp_path / "task.py")
    text = (tmp_path / "task.py").read_text().replace("import nets_of_mine", (tmp_path / "nets_of_mine.py").read_text())
    (tmp_path / "task.py").write_text(text)  # the remedy
    assert load_task_class(tmp_path / "task.py").__name__ == "Task"


def test_a_locale_without_letters_is_named(tmp_path: Path) -> None:
    (tmp_path / "k.png").write_bytes(b"x")
    code = (
        "from fairflare.cli.screen import user_errors\n"
        "with user_errors():\n    'K\\xf6rper \\u6d4b.png'.encode('ascii')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert r"error: 'K\xf6rper \u6d4b.png' cannot be written in ascii; set LC_ALL=C.UTF-8" in ended.stderr
