"""Test cases of several images: their names, one grid, intensity of each, and what the network gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
import torch

from fairflare.base.task import SiteData
from fairflare.data.datalist import DataError
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

SHAPE = (32, 32, 32)
NAMES = ["T2w", "ADC"]
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
    curves = (lambda x: x, lambda x: np.exp(-2 * x), np.sqrt, lambda x: np.sin(2 * x) + 1)
    rng = np.random.default_rng(seed + 1000)
    return [
        (100 * curve(one) + rng.normal(0, 0.5, SHAPE)).astype(np.float32) for curve in curves[:count]
    ]  # fmt: skip


def saved(path: Path, values: npt.NDArray[Any], affine: Any = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([1.0, 1, 2, 1]) if affine is None else affine), path)
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
    with pytest.raises(
        DataError, match=r'the run has the channels \["DWI", "T2w", "ADC"\].*"channels": \["T2w", "ADC"\]'
    ):
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
        (["a.nii.gz"], NAMES, r"'image' of entry 0 of 'test' must be a list of 2 different .*T2w, ADC.*\['a.nii.gz'\]"),
        (["a.nii.gz"] * 2, NAMES, "2 different files"),
        (["a.nii.gz", "gone.nii.gz"], NAMES, "gone.nii.gz', does not exist"),
        (["a.nii.gz", "b.nii.gz"], [], '"channels".*beside the splits'),
        ("a.nii.gz", NAMES, r"it holds 1 volume \(its shape is \(32, 32, 32\)\), and 'channels' names 2"),
        ("four.nii.gz", ["T2w", "ADC", "DWI"], "it holds 2 volumes .*and 'channels' names 3"),
        ("four.nii.gz", [], "it holds 2 volumes .*`nibabel.four_to_three`"),
        (["four.nii.gz", "b.nii.gz"], NAMES, "it holds 2 volumes"),
        ("a.nii.gz", ["T2w", "T2w"], "'channels' must be a list of different names"),
        ("a.nii.gz", "T2w", "'channels' must be a list of different names.*got 'T2w'"),
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
