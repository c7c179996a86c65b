"""Test a site's batches against an independent reading, for any threads, cache or cuts."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
import torch
from nvflare.fuel.utils.class_utils import get_component_init_parameters, instantiate_class
from PIL import Image

from fairflare.data.datalist import SPLITS, DataError, write_datalist
from fairflare.data.intensity import counts_of
from fairflare.tasks.base import SiteData, Task
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import FolderData, SegmentationTask
from fairflare.tasks.templates import classification_task, segmentation_task

pytestmark = pytest.mark.usefixtures("one_thread")
Array = npt.NDArray[Any]


def pattern(height: int = 70, width: int = 90, seed: int = 0) -> Array:
    """Return waves and noise, float64 in about [0, 255]."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(seed).normal(0, 20, (height, width))
    return np.clip(127 + 50 * np.sin(x / 6) + 40 * np.cos(y / 5) + noise, 0, 255)


# --- an independent reading -------------------------------------------------------------------------------


def stretched(values: Array, of: Array | None = None) -> Array:
    """Return values scaled from [minimum, 99th percentile] of ``of`` to [0, 1]; the percentile by sorting."""
    ordered = np.sort((values if of is None else of).astype(np.float64).ravel())
    place = 0.99 * (len(ordered) - 1)
    below = int(place)
    high = ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])
    return np.clip((values.astype(np.float64) - ordered[0]) / (high - ordered[0]), 0, 1)


def filtered(image: Array, size: tuple[int, int]) -> Array:
    """Resize (height, width, channels) by a triangle as wide as the coarser grid's pixels, in float64."""
    for axis, new in enumerate(size):
        old = image.shape[axis]
        scale = max(old / new, 1.0)
        centres = (np.arange(new) + 0.5) * old / new
        weights = np.maximum(0, 1 - np.abs(np.arange(old)[None] + 0.5 - centres[:, None]) / scale)
        weights /= weights.sum(1, keepdims=True)
        image = np.moveaxis(np.tensordot(weights, image, (1, axis)), 0, axis)
    return image


def nearest(mask: Array, size: tuple[int, int]) -> Array:
    """Return the pixel under the centre of each new pixel."""
    rows, columns = ((np.arange(new) + 0.5) * old / new for new, old in zip(size, mask.shape, strict=True))
    return mask[rows.astype(int)][:, columns.astype(int)]


def grey8(path: Path) -> tuple[str, Array]:
    values = pattern().astype(np.uint8)
    Image.fromarray(values).save(path / "a.png")
    return "a.png", values[:, :, None] / 255


def colour8(path: Path) -> tuple[str, Array]:
    values = np.stack([pattern(seed=k) for k in range(3)], -1).astype(np.uint8)
    Image.fromarray(values).save(path / "a.png")
    return "a.png", values / 255


def alpha8(path: Path) -> tuple[str, Array]:
    values = np.stack([pattern(seed=k) for k in range(4)], -1).astype(np.uint8)
    values[:, :, 3] = 255  # opaque
    Image.fromarray(values, "RGBA").save(path / "a.png")
    return "a.png", values[:, :, :3] / 255


def grey16(path: Path) -> tuple[str, Array]:
    values = (pattern() * 200).astype(np.uint16)
    Image.fromarray(values).save(path / "a.png")
    return "a.png", stretched(values)[:, :, None]


def bits(path: Path) -> tuple[str, Array]:
    values = pattern() > 128
    Image.fromarray(values).save(path / "a.png")
    return "a.png", values[:, :, None].astype(float)


def npy8(path: Path) -> tuple[str, Array]:
    values = np.stack([pattern(seed=k) for k in range(3)]).astype(np.uint8)
    np.save(path / "a.npy", values)  # channels first
    return "a.npy", values.transpose(1, 2, 0) / 255


def npy_floats(path: Path) -> tuple[str, Array]:
    values = pattern() * 3 - 100
    np.save(path / "a.npy", values)
    return "a.npy", stretched(values)[:, :, None]


def nifti(path: Path) -> tuple[str, Array]:
    volume = np.stack([pattern(seed=k).T * (k + 1) for k in range(3)], -1).astype(np.int16)  # x, y, slice
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1.0, -1.0, 3.0, 1.0])), path / "a.nii.gz")
    return "a.nii.gz", stretched(volume[:, :, 1], volume).T[:, :, None]


FILES = [grey8, colour8, alpha8, grey16, bits, npy8, npy_floats, nifti]


@pytest.mark.parametrize("size", [(70, 90), (32, 48), (96, 112)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("write", FILES, ids=lambda write: write.__name__)
def test_images_equal_an_independent_reading(
    write: Callable[[Path], tuple[str, Array]], channels: int, size: tuple[int, int], tmp_path: Path
) -> None:
    name, expected = write(tmp_path)
    for split in SPLITS[1:]:
        np.save(tmp_path / f"{split}.npy", np.zeros((40, 40), np.uint8))
    entry: dict[str, Any] = {"image": name, "label": 1, **({"slice": 1} if write is nifti else {})}
    others = {split: [{"image": f"{split}.npy", "label": 0}] for split in SPLITS[1:]}
    write_datalist(tmp_path / "datalist.json", {"training": [entry], **others})
    task = ClassificationTask(num_classes=2, image_size=size, in_channels=channels)
    ((inputs, targets),) = task.open_site("a", {"data_root": str(tmp_path)}).batches("training", batch_size=2)
    if channels == 1 and expected.shape[2] == 3:
        expected = (expected @ [0.299, 0.587, 0.114])[:, :, None]
    wanted = np.broadcast_to(filtered(expected, size), (*size, channels))
    np.testing.assert_allclose(
        inputs[0].permute(1, 2, 0).numpy(), wanted, atol=1e-5
    )  # float32 places between black and white
    assert targets.tolist() == [1]
    assert type(inputs) is torch.Tensor


def test_a_constant_image_stays_constant_and_fine_stripes_become_grey(tmp_path: Path) -> None:
    """Check stripes of 2 pixels, which alias to 0 and 1 at a quarter size without a filter."""
    stripes = np.tile(np.array([0, 255], np.uint8), (256, 128))
    for name, picture in (("a", np.full((256, 256), 128, np.uint8)), ("b", stripes)):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    entry = [{"image": "a.png", "label": 0}, {"image": "b.png", "label": 1}]
    for split in SPLITS[1:]:
        np.save(tmp_path / f"{split}.npy", np.zeros((40, 40), np.uint8))
    others = {split: [{"image": f"{split}.npy", "label": 0}] for split in SPLITS[1:]}
    write_datalist(tmp_path / "datalist.json", {"training": entry, **others})
    task = ClassificationTask(num_classes=2, image_size=(60, 60), in_channels=1)
    ((inputs, _),) = task.open_site("a", {"data_root": str(tmp_path)}).batches("training", batch_size=2)
    torch.testing.assert_close(inputs[0], torch.full((1, 60, 60), 128 / 255))
    assert 0.4 < float(inputs[1].min()) <= float(inputs[1].max()) < 0.6


# --- a folder of masks ------------------------------------------------------------------------------------


def folder(root: Path, counts: tuple[int, ...] = (7, 2, 2), **size: int) -> Path:
    """Make images and masks of two structures."""
    root.mkdir(parents=True)
    number, splits = 0, {}
    for split, count in zip(SPLITS, counts, strict=True):
        splits[split] = []
        for _ in range(count):
            picture = pattern(**size, seed=number)
            Image.fromarray(picture.astype(np.uint8)).save(root / f"{number}.png")
            Image.fromarray((picture > 110).astype(np.uint8) + (picture > 160)).save(root / f"m{number}.png")
            splits[split].append({"image": f"{number}.png", "label": f"m{number}.png"})
            number += 1
    write_datalist(root / "datalist.json", splits)
    return root


CELLS: dict[str, Any] = {"image_size": (32, 48), "num_classes": 2, "labels": [[1, 2], [2]]}


def opened(root: Path, arguments: dict[str, Any] | None = None, **own: Any) -> FolderData:
    data = SegmentationTask(**{**CELLS, **(arguments or {})}).open_site("a", {"data_root": str(root), **own})
    assert isinstance(data, FolderData)
    return data


def all_of(data: SiteData, split: str = "training", batch_size: int = 3, **options: Any) -> list[torch.Tensor]:
    batches = list(data.batches(split, batch_size=batch_size, **options))
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("size", [(64, 96), (32, 48), (80, 96)])
def test_masks_equal_an_independent_reading(tmp_path: Path, size: tuple[int, int]) -> None:
    root = folder(tmp_path / "a", height=64, width=96)
    _, targets = all_of(opened(root, {"image_size": size}))
    for number, found in enumerate(targets):
        mask = nearest(np.asarray(Image.open(root / f"m{number}.png")), size)
        np.testing.assert_array_equal(found.numpy(), np.stack([mask > 0, mask == 2]).astype(np.float32))
    assert targets.dtype == torch.float32
    assert targets[:, 1].any()


@pytest.mark.parametrize("values", [[0], [255], [-7, 3], [1, 2, 2**16 - 2], [5, 2**16 + 5], [-(2**40), 2**40]])
def test_values_of_a_mask(values: list[int]) -> None:
    mask = np.random.default_rng(0).choice(values, (20, 30))
    assert sorted(counts_of(mask)) == values
    assert sum(counts_of(mask).values()) == mask.size


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("cache_bytes", [0, 20_000, 2**30])
def test_threads_cache_and_cuts_do_not_matter(tmp_path: Path, augment: bool, cache_bytes: int) -> None:
    root = folder(tmp_path / "a")
    wanted = all_of(opened(root), shuffle_seed=5, augment=augment)
    for num_workers in (0, 2):
        data = opened(root, num_workers=num_workers, cache_bytes=cache_bytes)
        for batch_size in (1, 3, 7, 100):
            assert same(all_of(data, batch_size=batch_size, shuffle_seed=5, augment=augment), wanted)
    assert same(all_of(opened(root), shuffle_seed=5, augment=False), wanted) is not augment


def test_every_epoch_changes_the_images_in_its_own_way(tmp_path: Path) -> None:
    """Check which images are flipped, apart from the order."""
    data = opened(folder(tmp_path / "a", (24, 1, 1)), {"augmentation": ["flip"]})
    plain, _ = all_of(data)
    flipped = []
    for seed in (1, 2, 1):
        changed, _ = all_of(data, shuffle_seed=seed, augment=True)
        order = data.order("training", seed)
        turned = {n: not torch.equal(image, plain[n]) for n, image in zip(order, changed, strict=True)}
        flipped.append([turned[n] for n in range(24)])
        positions = [turned[n] for n in order]
        assert 5 < sum(positions) < 19
        flipped.append(positions)
    assert flipped[:2] == flipped[4:]
    assert flipped[0] != flipped[2]
    assert flipped[1] != flipped[3]  # by position too: the numbers themselves are other ones


def test_going_through_batches_leaves_the_random_numbers_of_the_training(tmp_path: Path) -> None:
    data = opened(folder(tmp_path / "a"), num_workers=2)
    phantom = SegmentationTask(phantom_cases=0.05).open_site("site-1", {})
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    for source in (data, phantom):
        all_of(source, shuffle_seed=3, augment=True)
        all_of(source)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # noqa: NPY002


def test_the_cache_of_all_splits_is_bounded(tmp_path: Path) -> None:
    each = 32 * 48 * (4 + 2)  # image float32, two masks uint8
    data = opened(folder(tmp_path / "a"), cache_bytes=8 * each + 10)
    for _ in range(2):
        for split in SPLITS:
            all_of(data, split)
    sizes = [sum(item[key].untyped_storage().nbytes() for key in ("image", "label")) for item in data._held.values()]
    assert sizes == [each] * 8
    assert Counter(split for split, _ in data._held) == {"training": 7, "validation": 1}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_keeps_its_words(tmp_path: Path, num_workers: int) -> None:
    root = folder(tmp_path / "a")
    (root / "4.png").write_bytes(b"broken")
    data = opened(root, num_workers=num_workers)
    for _ in range(2):  # what failed is not kept
        with pytest.raises(DataError, match=r"4\.png' .*'training' cannot .*no picture") as error:
            all_of(data, batch_size=7)
        assert type(error.value) is DataError
        assert error.value.public == "site 'a': an image of split 'training' cannot be read"


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"])
def test_the_number_of_threads_is_checked(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match=rf"num_workers must .*got {value!r}; correct") as error:
        opened(folder(tmp_path / "a"), num_workers=value)
    assert error.value.public == "site 'a': key 'num_workers' in the site file is not usable"


def test_null_in_the_site_file_means_not_set(tmp_path: Path) -> None:
    nothing = {"datalist": None, "mask_values": None, "phantom_seed": None, "phantom_cases": None}
    assert len(all_of(opened(folder(tmp_path / "a"), **nothing))[0]) == 7
    assert SegmentationTask(phantom_cases=0.05).open_site("site-1", {"data_root": None, **nothing}).synthetic


@pytest.mark.parametrize("task_class", [segmentation_task.Task, classification_task.Task])
def test_a_task_file_is_exported_built_and_pickled(task_class: type[Task]) -> None:
    task: Any = task_class(augmentation=["flip"], phantom_seed=3)  # type: ignore[call-arg]
    names = list(get_component_init_parameters(task))
    assert {"self", "augmentation", "norm_momentum"} <= set(names)
    values = {name: getattr(task, name) for name in names if name != "self" and getattr(task, name) is not None}
    built = instantiate_class(f"{task_class.__module__}.Task", values)
    copied = pickle.loads(pickle.dumps(task))
    for other in (built, copied):
        assert type(other) is task_class
        assert vars(other) == vars(task)
    assert copied.phantom_seed == 3
    with pytest.raises(ValueError, match=r"^Task has no setting 'phantom_sed'"):
        task_class(phantom_sed=1)  # type: ignore[call-arg]
