"""Test preparers of public data sets; tests on real images skip where these are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.data.datalist import SPLITS, DataError, load_datalist
from fairflare.data.kinds import Drawn, apart, describe_mask, odd_masks
from fairflare.data.preparers import prepare_folders, preparers
from fairflare.data.preparers.__main__ import main
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.splitting import group_labels, split_groups
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare_lab.sets.published import NUCLEI, PREPARERS, WHITE_CELLS
from fairflare_lab.sets.special import PROSTATE_SITES

prepare_cell_types = PREPARERS["cell-types"].prepare
prepare_nuclei = PREPARERS["nuclei"].prepare
prepare_prostate_mri = PREPARERS["prostate-mri"].prepare
prepare_red_cells = PREPARERS["red-cells"].prepare
prepare_white_cells = PREPARERS["white-cells"].prepare

pytestmark = pytest.mark.usefixtures("one_thread")


def groups_by_split(folder: Path, pattern: str) -> dict[str, set[str]]:
    loaded = load_datalist(folder, site=folder.name)
    return {
        split: {sample.image.name.split(pattern)[0] for sample in samples} for split, samples in loaded.splits.items()
    }


def assert_disjoint(groups: dict[str, set[str]]) -> None:
    assert sum(map(len, groups.values())) == len(set().union(*groups.values()))


# --- splitting --------------------------------------------------------------------------------------------


def test_a_group_has_the_class_that_most_of_its_images_have() -> None:
    """Check that of equal counts the smaller class is taken."""
    known = [("p", 1), ("q", 1), ("p", 2), ("p", 2), ("q", 0)]
    items = [Item(f"{number}", group, Path("x.png"), label) for number, (group, label) in enumerate(known)]
    assert group_labels(items) == (["p", "q"], [2, 0])


def test_split_groups() -> None:
    names = [f"p{number}" for number in range(20)]
    chosen = split_groups(names, site="a")
    assert [list(chosen.values()).count(split) for split in SPLITS] == [12, 4, 4]
    assert chosen == split_groups(reversed(names * 2), site="a")
    assert chosen != split_groups(names, site="b")
    assert chosen != split_groups(names, site="a", seed=1)
    for count in range(3, 12):
        sizes = list(split_groups(names[:count], site="a").values())
        assert all(sizes.count(split) >= 1 for split in SPLITS)
        assert sizes.count("training") >= sizes.count("validation") == sizes.count("test")


def test_a_site_with_too_few_cases() -> None:
    with pytest.raises(DataError, match=r"'tiny': 2 patient\(s\).*one each; add"):
        split_groups(["p1", "p2", "p1"], site="tiny")


def test_the_split_is_that_of_earlier_versions() -> None:
    """Check that a site that prepares its data again does not train on its earlier test images."""
    chosen = split_groups([f"p{number}" for number in range(10)], site="a", seed=3)
    assert {split: sorted(g for g, s in chosen.items() if s == split) for split in SPLITS} == {
        "training": ["p1", "p2", "p3", "p4", "p7", "p9"],
        "validation": ["p0", "p5"],
        "test": ["p6", "p8"],
    }


# --- nuclei and white cells -------------------------------------------------------------------------------


def npz(folder: Path, prefix: str, names: tuple[str, ...], top: int, **change: Any) -> Path:
    """Write stand-ins with the real files' arrays: 12 images, two tiles of each of six sources."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for name in names:
        arrays: dict[str, Any] = {
            "images": rng.integers(0, 256, (12, 8, 8, 3)).astype(np.uint8),
            "masks": rng.integers(0, top + 1, (12, 8, 8)).astype(np.uint8),
            "ids": np.array([f"source{number // 2}_t{number % 2}" for number in range(12)]),
            "site": np.array(name),
        }
        np.savez(folder / f"{prefix}{name.lower()}.npz", **{**arrays, **change})
    return folder


def test_prepared_nuclei_can_be_read(tmp_path: Path) -> None:
    source = npz(tmp_path / "source", "nuclei_", NUCLEI, 1)
    written = prepare_nuclei(source, tmp_path / "out")
    assert list(written) == list(NUCLEI)
    settings = json.loads((tmp_path / "out/fairflare.json").read_text())["sites"]
    for site, folder in written.items():
        assert settings[site] == {"data_root": str(folder)}
        assert_disjoint(groups_by_split(folder, "_t"))
        data = SegmentationTask(image_size=(32, 32)).open_site(site, {**settings[site], "sites": settings})
        assert not data.synthetic
        assert sum(data.num_samples(split) for split in SPLITS) == 12
        assert len(list(data.batches("training", batch_size=4))) == -(-data.num_samples("training") // 4)
    summaries = ["fairflare.json", "manifest.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*NUCLEI, *summaries])


def test_what_is_written_is_what_the_file_holds(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (6, 8, 9, 3)).astype(np.uint8)
    images[::2] = images[::2, :, :, :1]  # grey as colour
    masks = rng.integers(0, 2, (6, 8, 9)).astype(np.uint8)
    ids = np.array([f"a b/{number}_t0" for number in range(6)])
    source = npz(tmp_path / "source", "nuclei_", NUCLEI, 1, images=images, masks=masks, ids=ids)
    folder = prepare_nuclei(source, tmp_path / "out")["fluo360"]
    for number in range(6):
        image, mask = (np.asarray(Image.open(folder / kind / f"a_b_{number}_t0.png")) for kind in ("images", "masks"))
        np.testing.assert_array_equal(image, images[number, :, :, 0] if number % 2 == 0 else images[number])
        np.testing.assert_array_equal(mask, masks[number])
    entries = json.loads((folder / "datalist.json").read_text())
    for split in SPLITS:
        names = [Path(entry["image"]).name for entry in entries[split]]
        assert names == sorted(names)  # in the order of the file
        assert names == [Path(entry["label"]).name for entry in entries[split]]


def test_only_the_middle_of_each_image(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (6, 9, 12, 3)).astype(np.uint8)
    masks = rng.integers(0, 2, (6, 9, 12)).astype(np.uint8)
    ids = np.array([f"{number}_t0" for number in range(6)])
    source = npz(tmp_path / "source", "nuclei_", NUCLEI, 1, images=images, masks=masks, ids=ids)
    arguments = ["nuclei", "--source", str(source), "--out", str(tmp_path / "out"), "--crop", "6"]
    assert main(arguments) == 0
    for number in range(6):
        folder = tmp_path / "out" / "fluo520"
        image, mask = (np.asarray(Image.open(folder / kind / f"{number}_t0.png")) for kind in ("images", "masks"))
        np.testing.assert_array_equal(image, images[number, 1:7, 3:9])
        np.testing.assert_array_equal(mask, masks[number, 1:7, 3:9])
    assert json.loads((tmp_path / "out/manifest.json").read_text())["options"]["crop"] == 6
    with pytest.raises(DataError, match=r"'fluo256': .* have 9x12 pixels; crop must"):
        prepare_nuclei(source, tmp_path / "other", crop=10)
    with pytest.raises(ValueError, match="crop"):
        prepare_nuclei(source, tmp_path / "other", crop=0)
    assert not list((tmp_path / "other").glob("fluo*"))


@pytest.mark.parametrize("fails", [0, 5, 8, 11])
def test_what_was_there_is_put_back_when_it_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    source = npz(tmp_path / "source", "nuclei_", NUCLEI, 1)
    prepare_nuclei(source, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    real, calls = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == fails + 1:
            raise OSError("disk full")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="disk full"):
        prepare_nuclei(source, tmp_path / "out", seed=1, overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert not list((tmp_path / "out").glob(".prepare-*"))


def test_a_seed_below_zero_is_refused(tmp_path: Path) -> None:
    source = npz(tmp_path / "source", "nuclei_", NUCLEI, 1)
    with pytest.raises(ValueError, match="seed must be an integer >= 0, got -1"):
        prepare_nuclei(source, tmp_path / "out", seed=-1)
    assert not (tmp_path / "out").exists()


def test_preparing_again(tmp_path: Path) -> None:
    source = npz(tmp_path / "source", "nuclei_", NUCLEI, 1)
    first, again = (
        {
            site: (folder / "datalist.json").read_text()
            for site, folder in prepare_nuclei(source, tmp_path / out).items()
        }
        for out in "ab"
    )
    assert first == again
    with pytest.raises(DataError, match="is there already"):
        prepare_nuclei(source, tmp_path / "a")
    other = prepare_nuclei(source, tmp_path / "a", seed=1, overwrite=True)
    assert first["fluo256"] != (other["fluo256"] / "datalist.json").read_text()
    (tmp_path / "a/fluo520/datalist.json").unlink()
    with pytest.raises(DataError, match=r"not a folder with .*datalist\.json"):
        prepare_nuclei(source, tmp_path / "a", overwrite=True)


def test_numbered_sites(tmp_path: Path) -> None:
    written = prepare_white_cells(npz(tmp_path / "s", "wbc_", WHITE_CELLS, 2), tmp_path / "out", number=True)
    assert list(written) == ["site-1", "site-2", "site-3"]
    assert json.loads((written["site-2"] / "datalist.json").read_text())["name"] == "CellaVision"


@pytest.mark.parametrize(("target", "structures"), [("cell", [1, 2]), ("nucleus", [2])])
def test_white_cell_targets(tmp_path: Path, target: str, structures: list[int]) -> None:
    prepare_white_cells(npz(tmp_path / "s", "wbc_", WHITE_CELLS, 2), tmp_path / "out", target=target)
    settings = json.loads((tmp_path / "out/fairflare.json").read_text())["sites"]
    task, both = SegmentationTask(image_size=(32, 32)), SegmentationTask(image_size=(32, 32), num_classes=2)
    _, targets = next(iter(task.open_site("BCCD", settings["BCCD"]).batches("training", batch_size=50)))
    plain = {"data_root": settings["BCCD"]["data_root"]}
    _, labels = next(iter(both.open_site("BCCD", plain).batches("training", batch_size=50)))
    expected = labels[:, [label - 1 for label in structures]].amax(1, keepdim=True)
    assert torch.equal(targets, expected)
    prepare_white_cells(tmp_path / "s", tmp_path / "both", target="both")
    assert "mask_values" not in (tmp_path / "both/fairflare.json").read_text()
    tasks = [json.loads((tmp_path / folder / "manifest.json").read_text())["task"] for folder in ("out", "both")]
    assert tasks == [{}, {"num_classes": 2}]
    with pytest.raises(ValueError, match=r"^target.* got 'cells'; did you mean"):
        prepare_white_cells(tmp_path / "s", tmp_path / "x", target="cells")


def test_bad_npz(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        prepare_nuclei(tmp_path / "none", tmp_path / "out")
    source = npz(tmp_path / "a", "nuclei_", NUCLEI[:2], 1)
    (source / "nuclei_fluo360.npz").unlink()
    with pytest.raises(DataError, match=r"nuclei_fluo256.npz.*: nuclei_fluo360.npz") as caught:
        prepare_nuclei(source, tmp_path / "out")
    assert "found nuclei_fluo256.npz" in str(caught.value)
    for change, message in (
        ({"masks": np.full((12, 8, 8), 3, np.uint8)}, r"values \[3\]; expected \[0, 1\]"),
        ({"masks": np.zeros((12, 8, 9), np.uint8)}, "expected images"),
        ({"images": np.zeros((12, 8, 8), np.uint8)}, r"expected images .*got images \(12, 8, 8\)"),
        ({"images": np.zeros((12, 8, 8, 3))}, "expected uint8 images"),
        ({"ids": np.array(["a", "b"])}, "as many of each array"),
        ({"ids": np.array([["x", object()]], dtype=object)}, "cannot be read"),
        ({"ids": np.array(["same"] * 12)}, "two images are called 'same'"),
    ):
        with pytest.raises(DataError, match=message):
            prepare_nuclei(npz(tmp_path / "b", "nuclei_", NUCLEI, 1, **change), tmp_path / "out")
    (tmp_path / "b/nuclei_fluo256.npz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"site 'fluo256'.*cannot be read"):
        prepare_nuclei(tmp_path / "b", tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())  # nothing half-written


# --- prostate MRI -----------------------------------------------------------------------------------------


def volumes(root: Path, sites: dict[str, int], ending: str = "_segmentation", depth: int = 5) -> Path:
    """Write volumes of 24 columns and 20 rows; the prostate is on the three slices in the middle."""
    import nibabel

    rng = np.random.default_rng(0)
    for site, cases in sites.items():
        (root / site).mkdir(parents=True)
        for case in range(cases):
            image = rng.normal(100, 20, (24, 20, depth)).astype(np.float32)
            mask = np.zeros((24, 20, depth), np.uint8)
            mask[8:16, 5:12, 1 : depth - 1] = 1 + case % 2  # some sites have labels 1 and 2
            for name, array in ((f"Case{case:02d}", image), (f"Case{case:02d}{ending}", mask)):
                nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), root / site / f"{name}.nii.gz")
    return root


def test_prostate_volumes_become_slices(tmp_path: Path) -> None:
    source = volumes(tmp_path / "s", {"HK": 5, "ISBI_1.5": 4}, ending="_Segmentation")
    written = prepare_prostate_mri(source, tmp_path / "out", sites=["BMC", "HK"])
    assert list(written) == ["BMC", "HK"]
    groups = groups_by_split(written["HK"], "_")
    assert_disjoint(groups)
    assert {split: len(cases) for split, cases in groups.items()} == {"training": 3, "validation": 1, "test": 1}
    assert len(list((written["HK"] / "images").iterdir())) == 15
    mask = np.asarray(Image.open(written["HK"] / "masks/case01_002.png"))
    assert mask.shape == (20, 24)
    assert mask[5:12, 8:16].all()
    assert mask.sum() == 56
    assert mask.max() == 1
    image = np.asarray(Image.open(written["HK"] / "images/case01_002.png"))
    assert image.shape == (20, 24)
    assert image.dtype == np.uint8
    assert image.max() == 255


def test_prostate_options(tmp_path: Path) -> None:
    source = volumes(tmp_path / "s", {"SiteA": 4})
    written = prepare_prostate_mri(source, tmp_path / "a", sites=["RUNMC"], neighbours=True)
    image = np.asarray(Image.open(written["RUNMC"] / "images/case00_002.png"))
    before = np.asarray(Image.open(written["RUNMC"] / "images/case00_001.png"))
    assert image.shape == (20, 24, 3)
    np.testing.assert_array_equal(image[:, :, 0], before[:, :, 1])
    by_slice = prepare_prostate_mri(source, tmp_path / "b", sites=["RUNMC"], split_unit="slice")
    groups = groups_by_split(by_slice["RUNMC"], "_")
    assert sum(map(len, groups.values())) > len(set().union(*groups.values()))  # patients are shared, as said
    with pytest.raises(ValueError, match=r"^split_unit.* got 'slices'"):
        prepare_prostate_mri(source, tmp_path / "c", split_unit="slices")
    with pytest.raises(ValueError, match=r"^site.* got 'RUNMK'"):
        prepare_prostate_mri(source, tmp_path / "c", sites=["RUNMK"])


def test_prostate_window_by_the_definition(tmp_path: Path) -> None:
    """Check [minimum, 99th percentile] of the whole volume as 0 ... 255; columns and rows become x and y."""
    import nibabel

    volumes(tmp_path / "s", {"UCL": 3}, depth=4)
    folder = prepare_prostate_mri(tmp_path / "s", tmp_path / "out", sites=["UCL"], neighbours=True)["UCL"]
    for case in range(3):
        volume = np.asarray(nibabel.load(tmp_path / f"s/UCL/Case{case:02d}.nii.gz").dataobj, float)
        ordered = np.sort(volume.ravel())
        place = 0.99 * (len(ordered) - 1)
        below = int(place)
        high = ordered[below] + (place - below) * (ordered[below + 1] - ordered[below])
        grey = np.clip((volume - ordered[0]) / (high - ordered[0]), 0, 1) * 255
        for index in (1, 2):  # the prostate is on both; before the first and after the last slice: that slice again
            written = np.asarray(Image.open(folder / f"images/case{case:02d}_{index:03d}.png"), float)
            assert written.shape == (20, 24, 3)
            for channel, near in enumerate((index - 1, index, index + 1)):
                assert np.abs(written[:, :, channel] - grey[:, :, near].T).max() <= 0.51
    full = volumes(tmp_path / "t", {"HK": 3}, depth=3)
    for file in (full / "HK").glob("*_segmentation*"):
        nibabel.save(nibabel.Nifti1Image(np.ones((24, 20, 3), np.uint8), np.eye(4)), file)
    folder = prepare_prostate_mri(full, tmp_path / "u", sites=["HK"], neighbours=True)["HK"]
    first, last = (np.asarray(Image.open(folder / f"images/case00_{index:03d}.png")) for index in (0, 2))
    np.testing.assert_array_equal(first[:, :, 0], first[:, :, 1])
    np.testing.assert_array_equal(last[:, :, 2], last[:, :, 1])
    assert (first[:, :, 1] != first[:, :, 2]).any()


def test_prostate_errors_say_what_was_expected_and_found(tmp_path: Path) -> None:
    import nibabel

    source = volumes(tmp_path / "s", {"UCL": 3, "notes": 0})
    with pytest.raises(DataError, match="found UCL, notes; missing: BIDMC, BMC"):
        prepare_prostate_mri(source, tmp_path / "out")
    assert set(PROSTATE_SITES) == {"BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL"}

    def error(message: str) -> None:
        with pytest.raises(DataError, match=message):
            prepare_prostate_mri(source, tmp_path / "out", sites=["UCL"])
        assert not list((tmp_path / "out").iterdir())

    image, values = source / "UCL/Case02.nii.gz", np.zeros((24, 20, 5), np.float32)
    good = image.read_bytes()
    values[0, 0, 0] = np.nan
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), image)
    error(r"Case02.nii.gz' has values that are NaN or infinite")
    image.write_bytes(good)
    file = source / "UCL/Case01_segmentation.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((24, 20, 5), np.uint8), np.eye(4)), file)
    error(r"Case01_segmentation.nii.gz' has no prostate in it")
    nibabel.save(nibabel.Nifti1Image(np.ones((24, 20, 4), np.uint8), np.eye(4)), file)
    error(r"has the shape \(24, 20, 5\) and its segmentation \(24, 20, 4\)")
    file.write_bytes(b"broken")
    error("Case01.nii.gz' or its segmentation cannot be read")
    file.unlink()
    error(r"site 'UCL'[^\n]*\n.*without a mask of its name: .*Case01\.nii\.gz")
    for path in (source / "UCL").iterdir():
        path.unlink()
    error("UCL': no image that is read was found")


# --- any folders ------------------------------------------------------------------------------------------


def pictures(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.fromarray(np.full((4, 4), number % 2, np.uint8)).save(folder / name)
    return folder


def test_folders(tmp_path: Path) -> None:
    names = [f"p{patient}_{view}.png" for patient in range(4) for view in "ab"]
    images = pictures(tmp_path / "images", names)
    masks = pictures(tmp_path / "masks", [name.replace(".png", "_mask.png") for name in names])
    together = pictures(tmp_path / "both", [*names, *(name.replace(".png", "-seg.png") for name in names)])
    (together / "readme.txt").write_text("ignored")
    written = prepare_folders({"a": (images, masks), "b": (together, together)}, tmp_path / "out", group=r"^(p\d+)_")
    for folder in written.values():
        groups = groups_by_split(folder, "_")
        assert_disjoint(groups)
        assert [len(groups[split]) for split in SPLITS] == [2, 1, 1]
        assert sum(map(len, load_datalist(folder, site="a").splits.values())) == 8


def test_folder_errors(tmp_path: Path) -> None:
    images, masks = (
        pictures(tmp_path / "i", ["a.png", "b.png", "c.png"]),
        pictures(tmp_path / "m", ["a.png", "b.png"]),
    )
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"without a mask of its name: .*i/c\.png"):
        prepare_folders({"x": (images, masks)}, out)
    pictures(masks, ["c_mask.png"])
    with pytest.raises(DataError, match="does not match group"):
        prepare_folders({"x": (images, masks)}, out, group=r"(\d+)")
    with pytest.raises(ValueError, match="must have a part in brackets"):
        prepare_folders({"x": (images, masks)}, out, group=r"\d+")
    pictures(images, ["a.bmp"])
    with pytest.raises(DataError, match="have the same name apart from the ending"):
        prepare_folders({"x": (images, masks)}, out)
    with pytest.raises(ValueError, match="at least one site"):
        prepare_folders({}, out)
    (images / "a.bmp").unlink()
    with pytest.raises(ValueError, match="two sites would have the same folder"):
        prepare_folders({"x y": (images, masks), "x/y": (images, masks)}, out)
    with pytest.raises(ValueError, match="capitals alone: Site A, site a;"):
        prepare_folders({"Site A": (images, masks), "site a": (images, masks)}, out)


def test_tables_of_masks_and_of_classes_are_not_mixed(tmp_path: Path) -> None:
    names = ["1.png", "2.png", "3.png", "4.png"]
    places = {}
    for site, rows in (("a", [f"{n},{n[0]}" for n in names]), ("b", [f"{n},m{n}" for n in names])):
        images = pictures(tmp_path / site, names)
        pictures(images, [f"m{name}" for name in names])
        table = tmp_path / f"{site}.csv"
        table.write_text("\n".join([f"image,{'label' if site == 'a' else 'mask'}", *rows]))
        places[site] = (images, table)
    with pytest.raises(DataError, match=r"some .* have masks and some .*classes"):
        prepare_folders(places, tmp_path / "out")
    assert list(prepare_folders({"b": places["b"]}, tmp_path / "out")) == ["b"]


# --- command line and real images -------------------------------------------------------------------------


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = npz(tmp_path / "source", "nuclei_", NUCLEI, 1)
    arguments = ["nuclei", "--source", str(source), "--out", str(tmp_path / "out"), "--number"]
    assert main(arguments) == 0
    assert "site-1 (fluo256): 8 training, 2 validation, 2 test" in capsys.readouterr().out
    assert main(arguments) == 1
    assert "is there already" in capsys.readouterr().err
    folder = pictures(tmp_path / "i", ["1.png", "2.png", "3.png"])
    mask_folder = pictures(tmp_path / "m", ["1.png", "2.png", "3.png"])
    site = ["--site", "x", str(folder), str(mask_folder)]
    assert main(["folders", *site, "--out", str(tmp_path / "o")]) == 0
    assert main(["folders", *site, *site, "--out", str(tmp_path / "oo")]) == 1
    assert "--site names a site twice: x, x" in capsys.readouterr().err
    cells = npz(tmp_path / "w", "wbc_", WHITE_CELLS, 2)
    assert main(["white-cells", "--source", str(cells), "--out", str(tmp_path / "p")]) == 0
    mri = volumes(tmp_path / "mri", {"UCL": 3})
    assert main(["prostate-mri", "--source", str(mri), "--out", str(tmp_path / "q"), "--sites", "UCL"]) == 0


def test_every_preparer_is_a_command_and_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs/datasets.md").read_text()
    assert {"images", "masks", "folders", "volumes", *PREPARERS} == set(preparers())
    for name, preparer in preparers().items():
        assert preparer.name == name
        assert f"fairflare prepare {name} " in text
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert preparer.text in " ".join(shown.split())
        source = "--site" if name in ("folders", "volumes") else "--source"
        for option in ("--out", "--seed", "--number", "--overwrite", source):
            assert option in shown


@pytest.mark.long
def test_real_masks_are_neither_inverted_nor_copied(real_data: Path) -> None:
    """Ask of each real site, as it is and with every other mask inverted."""
    files = [file for kind in ("wbc", "nuclei", "hippocampus") for file in sorted(real_data.glob(f"{kind}_*.npz"))]
    assert len(files) == 11
    sites: dict[str, dict[str, list[Drawn]]] = {}
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            pictures, masks = arrays["images"][:120], arrays["masks"][:120]
        grey = pictures.mean(-1) if pictures.shape[-1] == 3 else pictures
        drawn = [describe_mask(str(n), *pair) for n, pair in enumerate(zip(grey, masks, strict=True))]
        sites.setdefault(file.name.split("_")[0], {})[file.stem] = drawn
        assert [*odd_masks(drawn)] == []
        swapped = [mask if n % 2 else mask == 0 for n, mask in enumerate(masks)]
        (line,) = odd_masks([describe_mask(str(n), *pair) for n, pair in enumerate(zip(grey, swapped, strict=True))])
        assert int(line.split()[0]) > 0.35 * len(masks)
        mirrored = [
            *odd_masks([describe_mask(str(n), *pair) for n, pair in enumerate(zip(grey, masks[:, ::-1], strict=True))])
        ]
        assert "hippocampus" in file.name or ["mirrored along axis 1" in line for line in mirrored] == [True]
    assert [found for own in sites.values() for found in apart(own)] == []


def test_real_nuclei(real_data: Path, tmp_path: Path) -> None:
    written = prepare_nuclei(real_data, tmp_path / "out")
    counts = {}
    for site, folder in written.items():
        loaded = load_datalist(folder, site=site)
        counts[site] = sum(map(len, loaded.splits.values()))
        assert_disjoint(groups_by_split(folder, "_t" if "_t" in next((folder / "images").iterdir()).name else "."))
    assert counts == {
        "fluo256": 334, "fluo360": 90, "fluo520": 175, "histology256x320": 107, "brightfield1024": 64
    }  # fmt: skip
    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 4, 8, 8, 4), in_channels=3)
    data = task.open_site("brightfield1024", {"data_root": str(written["brightfield1024"])})
    model = task.build_model()
    for inputs, targets in data.batches("training", batch_size=8, shuffle_seed=0):
        task.loss(model(inputs), targets).backward()
    assert 0 <= task.evaluate(model, data.batches("test", batch_size=8), "cpu")["dice"] <= 1


def test_real_white_cells(real_data: Path, tmp_path: Path) -> None:
    written = prepare_white_cells(real_data, tmp_path / "out", target="both")
    task = SegmentationTask(
        image_size=(96, 96), in_channels=3, num_classes=2, labels=[[1, 2], [2]], class_names=["cell", "nucleus"]
    )
    counts, share = {}, {}
    for site, folder in written.items():
        data = task.open_site(site, {"data_root": str(folder)})
        counts[site] = [data.num_samples(split) for split in SPLITS]
        targets = torch.cat([batch for _, batch in data.batches("training", batch_size=32)])
        share[site] = targets.mean((0, 2, 3)).tolist()
    assert counts == {"JTSC": [179, 60, 60], "CellaVision": [60, 20, 20], "BCCD": [221, 73, 73]}
    # foreground of all images, from the description of the data: 31.7, 22.8 and 35.5 % cell
    assert [share[site][0] for site in WHITE_CELLS] == pytest.approx([0.317, 0.228, 0.355], abs=0.02)
    assert all(cell > nucleus > 0.05 for cell, nucleus in share.values())


def test_red_cells_are_split_by_smear(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rng = np.random.default_rng(0)
    np.savez(
        source / "rbc12_chula.npz",
        images=rng.integers(0, 256, (40, 28, 28, 3)).astype(np.uint8),
        labels=np.arange(40) % 12,
        image_no=np.arange(40) // 4,
        site=np.arange(40) // 20,
    )
    written = prepare_red_cells(source, tmp_path / "out")
    assert sorted(written) == ["block-0", "block-1"]
    for site, folder in written.items():
        loaded = load_datalist(folder, site=site, class_labels=True)
        samples = {split: {s.image.name for s in found} for split, found in loaded.splits.items()}
        assert sum(map(len, samples.values())) == 20
        smears = [{name.split("_")[0] for name in names} for names in samples.values()]
        assert len(set.union(*smears)) == sum(map(len, smears))
        for found in loaded.splits.values():
            for sample in found:
                assert sample.label == int(sample.image.stem.split("_")[1]) % 12
        assert not (folder / "masks").exists()


def test_cells_of_unknown_type_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for site in WHITE_CELLS:
        labels = np.array([0, 1, -1, 4, 2, 3])
        images = np.zeros((6, 8, 8, 3), np.uint8)
        np.savez(source / f"wbc_{site.lower()}.npz", images=images, labels=labels, ids=[f"c{i}" for i in range(6)])
    for site, folder in prepare_cell_types(source, tmp_path / "out").items():
        loaded = load_datalist(folder, site=site, class_labels=True)
        assert sorted(s.label for found in loaded.splits.values() for s in found) == [0, 1, 2, 3, 4]
    (source / "wbc_jtsc.npz").unlink()
    np.savez(source / "wbc_jtsc.npz", images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.zeros(3), ids=["a", "b"])
    with pytest.raises(DataError, match=r"site 'JTSC'.*as many of each array"):
        prepare_cell_types(source, tmp_path / "again")


def test_real_cells_with_classes(real_data: Path, tmp_path: Path) -> None:
    red = prepare_red_cells(real_data, tmp_path / "red")
    counts = [0] * 12
    for site, folder in red.items():
        for found in load_datalist(folder, site=site, class_labels=True).splits.values():
            for sample in found:
                counts[int(sample.label)] += 1
    # from the description of the data
    assert counts == [1119, 147, 83, 594, 492, 360, 407, 62, 150, 174, 219, 193]
    task = ClassificationTask(num_classes=5, image_size=(32, 32), features=(4, 4, 8, 8))
    total = sum(
        task.open_site(site, {"data_root": str(folder)}).class_counts(split)
        for site, folder in prepare_cell_types(real_data, tmp_path / "white").items()
        for split in SPLITS
    )
    assert total.tolist() == [416, 122, 83, 122, 7]
