"""Test cases of several images: their names, one grid, intensity of each, and what the network gets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
import torch
from typer.testing import CliRunner

from fairflare.base.settings import values_of
from fairflare.base.task import SiteData
from fairflare.checking.images import check_sites
from fairflare.cli.commands import app
from fairflare.data.datalist import DataError
from fairflare.data.preparers import prepare_volumes
from fairflare.data.reading import Reading
from fairflare.flare.statistics import ImageStatistics, statistics_here
from fairflare.tasks.scores.site_statistics import measure
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

SHAPE = (32, 32, 32)
NAMES = ["T2w", "ADC"]
LIES = np.array([[1.0, 0, 0, -12], [0, 1, 0, -20], [0, 0, 2, -30], [0, 0, 0, 1]])
BOX = (slice(8, 20), slice(10, 18), slice(6, 16))


def body(seed: int, shape: Sequence[int] = SHAPE) -> npt.NDArray[np.float32]:
    """Draw the same smooth body for a seed: bright in the box of the mask, and different in its halves."""
    rng = np.random.default_rng(seed)
    axes = np.meshgrid(*(np.linspace(-1, 1, length) for length in shape), indexing="ij")
    values = np.zeros(shape)
    for _ in range(12):
        at, width = rng.uniform(-0.8, 0.8, 3), rng.uniform(0.1, 0.4)
        values += rng.uniform(0.3, 1) * np.exp(-sum((a - c) ** 2 for a, c in zip(axes, at, strict=True)) / width**2)
    return values.astype(np.float32)


def pictures(seed: int, count: int = 2) -> list[npt.NDArray[np.float32]]:
    """Draw channels of one body: each shows its parts in another contrast, with noise of its own."""
    one = body(seed)
    curves = (lambda x: x, lambda x: np.exp(-2 * x), lambda x: np.sin(6 * x), lambda x: np.cos(9 * x))
    rng = np.random.default_rng(seed + 1000)
    return [
        (100 * curve(one) + rng.normal(0, 0.5, SHAPE)).astype(np.float32) for curve in curves[:count]
    ]  # fmt: skip


def saved(path: Path, values: npt.NDArray[Any], affine: Any = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values, LIES if affine is None else None if affine is PLACELESS else affine)
    nibabel.save(image, path)
    return path


def mask_of(shape: Sequence[int] = SHAPE) -> npt.NDArray[np.uint8]:
    mask = np.zeros(shape, np.uint8)
    mask[BOX] = 1
    return mask


def listed(folder: Path, images: Mapping[str, Any], channels: Any = NAMES, **more: Any) -> dict[str, Any]:
    """Write a datalist with an entry for each split, and return the site's settings."""
    entries = {split: [{"image": image, "label": f"{split}_mask.nii.gz"}] for split, image in images.items()}
    for split in images:
        saved(folder / f"{split}_mask.nii.gz", mask_of())
    (folder / "datalist.json").write_text(json.dumps({"channels": channels, **entries}))
    return {"data_root": str(folder), **more}


def site(folder: Path, channels: Any = NAMES, four: bool = False, **more: Any) -> dict[str, Any]:
    """Write a site of one case for each split, as files or as one file with four axes."""
    images: dict[str, Any] = {}
    for seed, split in enumerate(("training", "validation", "test")):
        drawn = pictures(seed, len(channels))
        if four:
            images[split] = saved(folder / f"{split}.nii.gz", np.stack(drawn, -1)).name
        else:
            images[split] = [
                saved(folder / f"{split}_{name}.nii.gz", one).name for name, one in zip(channels, drawn, strict=True)
            ]
    return listed(folder, images, channels, **more)


def opened(settings: Mapping[str, Any], **task: Any) -> SiteData:
    found: SiteData = VolumeSegmentationTask(**{"channels": NAMES, "intensity": "range", **task}).open_site(
        "A", settings
    )
    return found


def inputs(settings: Mapping[str, Any], split: str = "test", **task: Any) -> torch.Tensor:
    ((found, _),) = opened(settings, **task).batches(split, batch_size=1)
    return found[0]


def scaled(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (values - values.min()) / (values.max() - values.min())


@pytest.mark.parametrize("four", [False, True])
def test_channels_are_read_by_name_in_the_order_of_the_run(tmp_path: Path, four: bool) -> None:
    settings = site(tmp_path, four=four)
    t2, adc = pictures(2)
    for names, wanted in ((["T2w", "ADC"], (t2, adc)), (["ADC", "T2w"], (adc, t2))):
        found = inputs(settings, channels=names)
        assert found.shape == (2, *SHAPE)
        for one, stored in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one.numpy(), scaled(stored), atol=1e-5)


def test_a_lacking_channel_is_0_and_said_in_the_sites_own_file(tmp_path: Path) -> None:
    settings = site(tmp_path)
    with pytest.raises(DataError, match=r'\["DWI", "T2w", "ADC"\].*\["T2w", "ADC"\]'):
        opened(settings, channels=["DWI", "T2w", "ADC"])
    said = {**settings, "channels": NAMES}
    data, found = (of(said, channels=["DWI", "T2w", "ADC"]) for of in (opened, inputs))
    assert data.channels == (1, 2)
    assert [bool(channel.any()) for channel in found] == [False, True, True]
    with pytest.raises(DataError, match="the run has"):
        opened({**settings, "channels": ["PET"]})


def test_a_run_without_names_refuses_cases_of_several_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'give the run channels=\["T2w", "ADC"\]'):
        opened(site(tmp_path), channels=[])


def test_patches_of_one_place_have_all_channels(tmp_path: Path) -> None:
    data = opened(site(tmp_path, ["a", "b", "c", "d"]), channels=["a", "b", "c", "d"])
    batch, _ = next(iter(data.batches("training", batch_size=3, shuffle_seed=1)))
    assert batch.shape == (3, 4, 32, 32, 32)
    assert data.task.build_model()(batch).shape == (3, 1, 32, 32, 32)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("image", "channels", "problem"),
    [
        (["a.nii.gz"], NAMES, r"'test' .* list of 2 .*\['a.nii.gz'\]"),
        (["a.nii.gz"] * 2, NAMES, "2 different files"),
        (["a.nii.gz", "gone.nii.gz"], NAMES, "gone.nii.gz', does not exist"),
        (["a.nii.gz", "b.nii.gz"], [], '"channels".*beside the splits'),
        ("a.nii.gz", NAMES, r"1 volume .*\(32, 32, 32\)\), .* names 2"),
        ("four.nii.gz", ["T2w", "ADC", "DWI"], "holds 2 volumes .*'channels' names 3"),
        ("four.nii.gz", [], "holds 2 volumes .*`nibabel.four_to_three`"),
        (["four.nii.gz", "b.nii.gz"], NAMES, "it holds 2 volumes"),
        ("a.nii.gz", ["T2w", "T2w"], "'channels' must be a list of different"),
        ("a.nii.gz", "T2w", "'channels' must be .*got 'T2w'"),
    ],
)  # fmt: skip
def test_nothing_else_is_accepted(tmp_path: Path, image: Any, channels: Any, problem: str) -> None:
    one = pictures(0)
    for name, values in (("a", one[0]), ("b", one[1]), ("four", np.stack(one, -1))):
        for split in ("", "training_", "validation_"):
            saved(tmp_path / f"{split}{name}.nii.gz", values)
    own: dict[str, Any] = {
        split: [f"{split}_{name}" for name in image] if isinstance(image, list) else f"{split}_{image}"
        for split in ("training", "validation")
    }
    (tmp_path / "validation_gone.nii.gz").touch()
    (tmp_path / "training_gone.nii.gz").touch()
    settings = listed(tmp_path, {**own, "test": image}, channels)
    names = channels if isinstance(channels, list) and len({*channels}) == len(channels) else NAMES
    for split in ("training", "validation"):  # the table is about the test
        content = json.loads((tmp_path / "datalist.json").read_text())
        content[split][0]["image"] = [f"{split}_a.nii.gz", f"{split}_b.nii.gz"][: max(len(names), 1)]
        if len(names) != 2:
            content[split][0]["image"] = f"{split}_{'four' if names else 'a'}.nii.gz"
        (tmp_path / "datalist.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=problem) as raised:
        inputs(settings, channels=names)
    assert "site 'A'" in str(raised.value)


# --- prepare ----------------------------------------------------------------------------------------------


CASES = 4
KINDS = ("nnunet", "decathlon", "bids", "csv", "names")
WORDS = ("T2w", "ADC", "DWI", "DCE")


def tree(
    folder: Path, kind: str, count: int = 2, change: Any = lambda case, drawn: drawn, cases: int = CASES, start: int = 0
) -> dict[str, Any]:
    """Write a source of cases with several images; return the arguments of ``prepare_volumes`` for it.

    Args:
        folder, kind: where and in which layout.
        count: number of images of a case.
        change: what becomes of the images of a case by its number; an image that is ``None`` is left out, and instead
            of its values there may be values and an affine.
        cases, start: number of cases, and the first one's.
    """
    names = WORDS[:count]
    rows = ["case,mask," + ",".join(names)]
    for case in range(start, start + cases):
        at = {
            "nnunet": (f"imagesTr/c{case}_{{number:04}}", f"labelsTr/c{case}"),
            "decathlon": (f"imagesTr/c{case}", f"labelsTr/c{case}"),
            "bids": (f"sub-{case}/anat/sub-{case}_{{name}}", f"derivatives/sub-{case}/anat/sub-{case}_dseg"),
            "csv": (f"{{name}}_{case}", f"masks/m{case}"), "names": (f"images/c{case}_{{name}}", f"masks/c{case}"),
        }[kind]  # fmt: skip
        drawn = [one if isinstance(one, tuple) else (one, None) for one in change(case, pictures(case, count))]
        if kind == "decathlon":
            saved(folder / f"{at[0]}.nii.gz", np.stack([one for one, _ in drawn], -1))
        for number, (values, affine) in enumerate(drawn if kind != "decathlon" else ()):
            if values is not None:
                saved(folder / (at[0].format(number=number, name=names[number]) + ".nii.gz"), values, affine)
        saved(folder / f"{at[1]}.nii.gz", np.roll(mask_of(), case, 0))
        rows.append(f"c{case},m{case}," + ",".join(f"{name}_{case}" for name in names))
    declared = dict(enumerate(names))
    if kind in ("nnunet", "decathlon"):
        key = "channel_names" if kind == "nnunet" else "modality"
        (folder / "dataset.json").write_text(json.dumps({key: declared, "labels": {"background": 0, "gland": 1}}))
    (folder / "cases.csv").write_text("\n".join(rows)) if kind == "csv" else None
    more = {"bids": {"suffix": names}, "csv": {"csv": "cases.csv", "channels": names}, "names": {"channels": names}}
    return {"source_dir": folder, **more.get(kind, {})}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_each_kind(tmp_path: Path, kind: str, count: int) -> None:
    given = tree(tmp_path / "s", kind, count)
    folder = prepare_volumes(tmp_path / "out", **given)["site-1"]
    names = list(WORDS[:count])
    content = json.loads((folder / "datalist.json").read_text())
    told = json.loads((tmp_path / "out/manifest.json").read_text())
    assert content["channels"] == told["task"]["channels"] == names
    assert not [note for note in told["notes"] if "image" in note]
    cases = [entry for split in ("training", "validation", "test") for entry in content[split]]
    assert len(cases) == CASES
    assert {len(case["image"]) if kind != "decathlon" else 1 for case in cases} == {count if kind != "decathlon" else 1}
    data = VolumeSegmentationTask(channels=names, intensity="range").open_site("A", {"data_root": str(folder)})
    found = torch.cat([batch for batch, _ in data.batches("test", batch_size=1)])
    drawn = [np.stack([scaled(one) for one in pictures(case, count)]) for case in range(CASES)]
    assert [min(float(abs(one.numpy() - own).max()) for own in drawn) < 1e-5 for one in found] == [True] * len(found)


def test_channels_are_named_once_and_none_is_left_out(tmp_path: Path) -> None:
    given = tree(tmp_path / "s", "nnunet", 3)
    with pytest.raises(DataError, match=r"declares 3 images .*--channels names 1"):
        prepare_volumes(tmp_path / "out", **given, channels=["T2w"])
    (tmp_path / "s/dataset.json").write_text(json.dumps({"channel_names": {"0": "T2w", "1": "ADC"}}))
    for leave_out in (False, True):
        with pytest.raises(DataError, match=r"3 images, .*_0002, and 2 names .*T2w, ADC"):
            prepare_volumes(tmp_path / "out", **given, leave_out=leave_out)
    (tmp_path / "s/dataset.json").unlink()
    with pytest.raises(DataError, match=r"0 names of channels .*--channels T2w ADC"):
        prepare_volumes(tmp_path / "out", **given)
    folder = prepare_volumes(tmp_path / "out", **given, channels=["T2w", "ADC", "b1400"])["site-1"]
    assert json.loads((folder / "datalist.json").read_text())["channels"] == ["T2w", "ADC", "b1400"]


@pytest.mark.parametrize("kind", ["nnunet", "bids", "names"])
def test_leave_out_drops_the_case_and_never_a_channel(tmp_path: Path, kind: str) -> None:
    given = tree(tmp_path / "s", kind, 2, lambda case, drawn: [drawn[0], None] if case == 1 else drawn)
    with pytest.raises(DataError, match=r"(?s)1 of 4 volume.*its ADC, .*'channels'"):
        prepare_volumes(tmp_path / "out", **given)
    folder = prepare_volumes(tmp_path / "out", **given, leave_out=True)["site-1"]
    content = json.loads((folder / "datalist.json").read_text())
    assert content["channels"] == ["T2w", "ADC"]
    assert sum(len(content[split]) for split in ("training", "validation", "test")) == 3
    assert "without its ADC" in str(json.loads((tmp_path / "out/manifest.json").read_text())["notes"])


# --- faults: none passes unnamed ----------------------------------------------------------------------------


def of_case(change: Any) -> Any:
    """Return a change of the second image of case 1 alone."""
    return lambda case, drawn: [drawn[0], change(drawn[1])] if case == 1 else drawn


PLACELESS = "none"  # a file whose header does not say how it lies
SHIFTED = LIES + 40 * np.eye(4, k=3)
TILTED = LIES + 0.4 * np.eye(4, k=1) * [[0], [1], [0], [0]]
MIRRORED_HEADER = np.diag([-1.0, -1, 1, 1]) @ LIES
FAULTS: dict[str, tuple[Any, str]] = {
    "a missing file": (of_case(lambda one: None), "without its ADC"),
    "another grid, elsewhere": (
        of_case(lambda one: (one, SHIFTED)),
        r"it lies at 28..60 x -20..12 x -31..33 mm and covers 0% of the label's box, -4..8 x -10..-2 x -19..1 mm",
    ),
    "no place in the body": (of_case(lambda one: (one, PLACELESS)), "says nothing"),
    "another size, without a place": (of_case(lambda one: (one[:20], PLACELESS)), "channel differ in size"),
    "a tilted gantry": (of_case(lambda one: (one, TILTED)), "sheared"),
    "left and right exchanged in the header": (of_case(lambda one: (one, MIRRORED_HEADER)), "LPS taken for RAS"),
    "half of the label covered": (of_case(lambda one: (one[:, :14], None)), r"covers 50% of the label's box"),
    "mirrored pixels": (of_case(lambda one: one[::-1].copy()), "is it mirrored"),
    "a copy": (lambda case, drawn: [drawn[0], drawn[0]] if case == 1 else drawn, "ADC have equal pixels: a copy"),
    "a copy at another scale": (
        lambda case, drawn: [drawn[0], drawn[0] * 3 + 7] if case == 1 else drawn, "have equal pixels: a copy",
    ),
    "time for channel": (
        lambda case, drawn: [drawn[0], drawn[0] + np.random.default_rng(case).normal(0, 3, SHAPE).astype(np.float32)],
        "almost equal, as frames of one series over time",
    ),
    "another patient": (of_case(lambda one: pictures(77)[1]), "fits T2w worse than in other cases"),
    "exchanged names": (lambda case, drawn: drawn[::-1] if case == 1 else drawn, "T2w and ADC look exchanged"),
    "values that are no numbers": (of_case(lambda one: np.where(one > 50, np.nan, one)), "NaN or infinite"),
    "a cine of frames": (of_case(lambda one: np.stack([one, one], -1)), "it holds 2 volumes"),
    "CT beside MR": (lambda case, drawn: [drawn[0], drawn[1] - 1000], "takes CT, perhaps with PET, or MR"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_passes_unnamed(tmp_path: Path, fault: str) -> None:
    change, named = FAULTS[fault]
    given = tree(tmp_path / "s", "nnunet", 2, change, cases=6)
    try:
        prepare_volumes(tmp_path / "out", **given)
        told = "\n".join(json.loads((tmp_path / "out/manifest.json").read_text())["notes"])
    except DataError as error:
        told = str(error)
    assert re.search(named, told), told
    assert "c1" in told or "c0" in told


def test_names_exchanged_at_a_site_are_named(tmp_path: Path) -> None:
    for number, site_name in enumerate("AB"):
        change = (lambda case, drawn: drawn[::-1]) if site_name == "B" else (lambda case, drawn: drawn)
        tree(tmp_path / "s" / site_name, "nnunet", 2, change, start=10 * number)
    prepare_volumes(tmp_path / "out", source_dir=tmp_path / "s")
    told = json.loads((tmp_path / "out/manifest.json").read_text())["notes"]
    assert any(re.match(r"B: .*its T2w and ADC look exchanged beside other cases", note) for note in told), told


def test_times_are_no_channels_unless_named(tmp_path: Path) -> None:
    given = tree(tmp_path / "s", "decathlon", 3)
    (tmp_path / "s/dataset.json").write_text(json.dumps({"modality": {"0": "MRI"}}))
    with pytest.raises(DataError, match=r"3 volumes \(its shape is \(32, 32, 32, 3\)\)"):
        prepare_volumes(tmp_path / "out", **given)


# --- one grid -----------------------------------------------------------------------------------------------


def test_a_channel_on_another_grid_is_interpolated_linearly(tmp_path: Path) -> None:
    """Compare a turned, coarser channel with a slow loop by hand over some voxels."""
    rng = np.random.default_rng(0)
    affine = np.array([[0, -2.0, 0, 28], [1.5, 0, 0, -24], [0, 0, 3, -33], [0, 0, 0, 1]])  # axes turned, 1.5 x 2 x 3 mm
    other = rng.normal(size=(28, 24, 26)).astype(np.float32)
    grid = LIES
    images = {split: [f"{split}_a.nii.gz", f"{split}_b.nii.gz"] for split in ("training", "validation", "test")}
    for number, names in enumerate(images.values()):
        saved(tmp_path / names[0], pictures(number)[0], grid)
        saved(tmp_path / names[1], other + number * 0, affine)
    found = inputs(listed(tmp_path, images))[1].numpy()
    values, checked = scaled(other), 0
    for place in np.ndindex(4, 4, 4):
        voxel = np.array(place) * 6 + 5
        at = np.linalg.solve(affine, grid @ [*voxel, 1])[:3]
        low = np.floor(at).astype(int)
        if (low < 0).any() or (low + 1 >= other.shape).any():
            continue
        share = at - low
        wanted = sum(
            values[tuple(low + corner)] * np.prod([s if c else 1 - s for c, s in zip(corner, share, strict=True)])
            for corner in np.ndindex(2, 2, 2)
        )
        assert found[tuple(voxel)] == pytest.approx(wanted, abs=1e-5)
        checked += 1
    assert checked > 20


def test_the_grid_is_that_of_the_image_on_which_the_mask_lies(tmp_path: Path) -> None:
    fine = LIES @ np.diag([0.5, 0.5, 0.5, 1]) + 0.25 * np.eye(4, k=3)
    images = {split: [f"{split}_a.nii.gz", f"{split}_b.nii.gz"] for split in ("training", "validation", "test")}
    for number, names in enumerate(images.values()):
        first, second = pictures(number)
        saved(tmp_path / names[0], first, fine)  # 16 x 16 x 32 mm, of which the mask's box is a part
        saved(tmp_path / names[1], second)
    small = np.zeros(SHAPE, np.uint8)
    small[2:12, 3:12, 4:10] = 1
    settings = listed(tmp_path, images)
    for split in images:
        saved(tmp_path / f"{split}_mask.nii.gz", small)  # drawn on the second image, of 1 x 1 x 2 mm
    found = inputs(settings)
    np.testing.assert_allclose(found[1].numpy(), scaled(pictures(2)[1]), atol=1e-5)
    first = scaled(pictures(2)[0])  # its voxels lie half a voxel beside those of the second one along the first axis
    middles = (first[1:29:2] + first[2:30:2])[:, :30:2, :30:2] / 2
    np.testing.assert_allclose(found[0, 1:15, :15, :15].numpy(), middles, atol=1e-5)


def test_each_channel_has_its_own_window(tmp_path: Path) -> None:
    settings = site(tmp_path)
    found = inputs(settings, intensity="window", window=[[50, 100], [10, 20]])
    for one, stored, (middle, width) in zip(found, pictures(2), ((50, 100), (10, 20)), strict=True):
        np.testing.assert_allclose(one.numpy(), np.clip((stored - middle) / width + 0.5, 0, 1), atol=1e-5)
    task = VolumeSegmentationTask(channels=NAMES, intensity="window", window=[[50, 100], [10, 20]])
    assert "of centre 50 and width 100, of centre 10 and width 20" in task.intensities
    with pytest.raises(ValueError, match="window must be one, or one for each"):
        VolumeSegmentationTask(channels=NAMES, intensity="window", window=[[50, 100]])


# --- what the commands do with channels ---------------------------------------------------------------------


def test_slices_have_the_channels_of_their_volume(tmp_path: Path) -> None:
    settings = site(tmp_path)
    content = json.loads((tmp_path / "datalist.json").read_text())
    for split in ("training", "validation", "test"):
        content[split] = [{**content[split][0], "slice": number} for number in (8, 9)]
    (tmp_path / "datalist.json").write_text(json.dumps(content))
    task = SegmentationTask(channels=["ADC", "T2w"], intensity="range", orientation="stored", image_size=(32, 32))
    assert task.in_channels == 2
    data = task.open_site("A", settings)
    (found, masks), *_ = data.batches("test", batch_size=2)
    t2, adc = (scaled(one) for one in pictures(2))
    wanted = np.stack([np.stack([adc[:, :, n].T, t2[:, :, n].T]) for n in (8, 9)])
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)
    assert int(masks.sum()) == 2 * 12 * 8
    upright = SegmentationTask(channels=["ADC", "T2w"], intensity="range", image_size=(32, 32))
    (turned, turned_masks), *_ = upright.open_site("A", settings).batches("test", batch_size=2)
    torch.testing.assert_close(turned, found.flip(2, 3))
    assert torch.equal(turned_masks, masks.flip(2, 3))
    assert torch.equal(
        upright.read_input(tmp_path / "test_T2w.nii.gz", 8, (tmp_path / "test_ADC.nii.gz",)).flip(0), turned[0]
    )
    assert task.build_model()(found).shape == (2, 1, 32, 32)
    whole = listed(tmp_path, {split: content[split][0]["image"] for split in ("training", "validation", "test")})
    with pytest.raises(DataError, match=r"volume of 32 slices; .*'slice'"):
        list(task.open_site("A", whole).batches("test", batch_size=1))
    again = SegmentationTask(**values_of(task)["args"])  # as an exported job holds them
    assert again.in_channels == 2
    with pytest.raises(ValueError, match="in_channels must be one of 1, 3, got 2"):
        SegmentationTask(in_channels=2)


def test_check_data_names_copies_and_counts_channels(tmp_path: Path) -> None:
    settings = site(tmp_path)
    task = VolumeSegmentationTask(channels=NAMES)
    assert not [problem for problem in check_sites(task, {"A": settings}).problems if problem.grave]
    copied = json.loads((tmp_path / "datalist.json").read_text())["test"][0]["image"]
    (tmp_path / copied[1]).write_bytes((tmp_path / copied[0]).read_bytes())
    texts = [problem.text for problem in check_sites(task, {"A": settings}).problems]
    assert any("its T2w and ADC have equal pixels: a copy" in text for text in texts)
    assert any("one image 2 times in one split" in text for text in texts)
    slices = SegmentationTask(channels=NAMES, orientation="stored")
    content = json.loads((tmp_path / "datalist.json").read_text())
    for split in ("training", "validation", "test"):
        content[split] = [{**content[split][0], "slice": 8}]
    (tmp_path / "datalist.json").write_text(json.dumps(content))
    texts = [problem.text for problem in check_sites(slices, {"A": settings}).problems if not problem.grave]
    assert any("its T2w and ADC have equal pixels: a copy" in text for text in texts)


def test_statistics_count_the_pixels_of_every_channel(tmp_path: Path) -> None:
    sums = measure("A", site(tmp_path, four=True), "segmentation", Reading(), 1)
    assert int(sums.intensity.sum()) == 3 * 2 * np.prod(SHAPE)
    assert sums.images.total() == 3
    sites = {"A": site(tmp_path / "A"), "B": site(tmp_path / "B"), "C": site(tmp_path / "C", NAMES[:1])}
    document = statistics_here(sites, ImageStatistics(min_cases=1))
    assert {name: of.counts["channels"] for name, of in document.sites.items()} == {"A": 2, "B": 2, "C": 1}
    said = "The sites' cases have different numbers of images (channels): 2 at A, B; 1 at C."
    assert said in document.sentences
    assert "channels" not in document.pooled.counts  # a sum of them would mean nothing
    del sites["C"]
    assert not [s for s in statistics_here(sites, ImageStatistics(min_cases=1)).sentences if "channels" in s]


def entries(config: Any, key: str) -> Iterator[Any]:
    """Yield the values that a key has anywhere in a document."""
    for name, value in config.items() if isinstance(config, dict) else enumerate(config):
        if name == key:
            yield value
        elif isinstance(value, (dict, list)):
            yield from entries(value, key)


def test_a_run_an_export_and_predict_take_channels(tmp_path: Path) -> None:
    for number, name in enumerate("AB"):
        tree(tmp_path / "s" / name, "nnunet", 2, start=10 * number)
    prepare_volumes(tmp_path / "data", source_dir=tmp_path / "s")
    small = "features=[4,4,4,4,4,4]"
    run = ["run", "fed_avg", "--data", f"{tmp_path}/data", "--rounds", "1", "--in-process", "--set", small]
    result = CliRunner().invoke(app, [*run, "--workspace", f"{tmp_path}/run"])
    assert result.exit_code == 0, result.output
    model = next((tmp_path / "run").rglob("results.json")).parent
    export = ["export", "fed_avg", "--data", f"{tmp_path}/data/fairflare.json", "--preinstalled"]
    result = CliRunner().invoke(app, [*export, "--out", f"{tmp_path}/jobs"])
    assert result.exit_code == 0, result.output
    for end in ("server", "client"):  # of the job that a site gets: it carries no code of its own
        config = json.loads((tmp_path / f"jobs/fed_avg/app/config/config_fed_{end}.json").read_text())
        assert NAMES in [*entries(config, "channels")]
    for number, one in enumerate(pictures(9)):
        saved(tmp_path / f"new/p_{NAMES[number]}.nii.gz", one)
        saved(tmp_path / f"new/q_{number:04}.nii.gz", one)
        saved(tmp_path / f"other/{'ba'[number]}.nii.gz", one)
    saved(tmp_path / "new/r.nii.gz", np.stack(pictures(9), -1))
    ordered = [f"{tmp_path}/other/b.nii.gz", f"{tmp_path}/other/a.nii.gz"]
    for name, files in (("named", [f"{tmp_path}/new"]), ("ordered", ordered)):
        told = CliRunner().invoke(app, ["predict", str(model), *files, "--out", f"{tmp_path}/{name}"])
        assert told.exit_code == 0, told.output
    assert "T2w = b.nii.gz, ADC = a.nii.gz" in told.output
    masks = [
        np.asarray(nibabel.load(tmp_path / name).dataobj)  # type: ignore[attr-defined]
        for name in ("named/p_mask.nii.gz", "named/q_mask.nii.gz", "named/r_mask.nii.gz", "ordered/b_mask.nii.gz")
    ]
    assert all(mask.shape == SHAPE and (mask == masks[0]).all() for mask in masks)
    for files in (
        [ordered[0]],
        [*ordered, f"{tmp_path}/new/r.nii.gz"],
        [f"{tmp_path}/new/p_T2w.nii.gz"],
        [f"{tmp_path}/other"],
    ):
        told = CliRunner().invoke(app, ["predict", str(model), *files, "--out", f"{tmp_path}/no"])
        assert told.exit_code != 0
        assert "the model takes 2 images a case (T2w, ADC)" in " ".join(told.output.split())


def test_prepared_volumes_on_disk_are_of_their_channels(tmp_path: Path) -> None:
    settings = {**site(tmp_path / "s"), "decoded_folder": str(tmp_path / "kept")}
    one, other = (inputs(settings, channels=names) for names in (["T2w", "ADC"], ["ADC", "T2w"]))
    assert torch.equal(one, other.flip(0))
    assert not torch.equal(one, other)
    saved(tmp_path / "s/test_ADC.nii.gz", pictures(9)[1])  # a further file of the case has changed
    assert not torch.equal(inputs(settings)[1], one[1])


def test_images_that_the_run_does_not_use_are_told(tmp_path: Path) -> None:
    data = opened(site(tmp_path, ["T2w", "ADC", "DWI"]), channels=["DWI", "T2w"])
    assert data.description.endswith("; channels T2w, ADC, DWI, of which ADC is not used")
