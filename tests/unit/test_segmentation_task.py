"""Test the segmentation task: model, loss, metric, and the data of a site."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.data.datalist import SPLITS, DataError, write_datalist
from fairflare.tasks.base import evaluating
from fairflare.tasks.segmentation import SegmentationTask

from .image_files import all_of, refusal, whole_split

SMALL: dict[str, Any] = {"image_size": (32, 32), "features": (4, 4, 4, 8, 8, 4)}


pytestmark = pytest.mark.usefixtures("one_thread")


def folder(root: Path, counts: Sequence[int] = (3, 2, 2), size: tuple[int, int] = (40, 48), **masks: Any) -> Path:
    """Make a site with random images; every mask is a square of the value ``value`` (default 1)."""
    rng = np.random.default_rng(0)
    (root / "i").mkdir(parents=True)
    (root / "m").mkdir()
    splits: dict[str, list[dict[str, str]]] = {}
    number = 0
    for split, count in zip(SPLITS, counts, strict=True):
        splits[split] = []
        for _ in range(count):
            image = rng.integers(0, 256, (*size, 3)).astype(np.uint8)
            mask = np.zeros(size, np.uint8)
            mask[10:30, 12:36] = masks.get("value", 1)
            Image.fromarray(image).save(root / f"i/{number}.png")
            Image.fromarray(mask).save(root / f"m/{number}.png")
            splits[split].append({"image": f"i/{number}.png", "label": f"m/{number}.png"})
            number += 1
    write_datalist(root / "datalist.json", splits)
    return root


def repaint(file: Path, value: int) -> None:
    """Give one pixel of a picture another value."""
    pixels = np.asarray(Image.open(file)).copy()
    pixels[0, 0] = value
    Image.fromarray(pixels).save(file)


def refused(task: SegmentationTask, settings: dict[str, Any], site: str = "hospital-a") -> DataError:
    def read_all() -> None:
        data = task.open_site(site, settings)
        for split in SPLITS:
            list(data.batches(split, batch_size=2))

    return refusal(read_all, settings, site, (".png", "/"))


class Fixed(torch.nn.Module):
    """Return logits that do not depend on the input: +-10 for 1 and 0 of the given masks, image by image."""

    def __init__(self, masks: torch.Tensor) -> None:
        super().__init__()
        self.masks = masks
        self.start = 0
        self.norm = torch.nn.BatchNorm2d(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.norm(inputs[:, :1])
        part = self.masks[self.start : self.start + len(inputs)]
        self.start += len(inputs)
        return (part * 2 - 1) * 10.0


# --- model and loss ---------------------------------------------------------------------------------------


def test_model_of_the_paper() -> None:
    task = SegmentationTask(image_size=(384, 384), in_channels=3, features=(32, 64, 128, 256, 512, 32))
    model = task.build_model()
    owners = [
        m for m in model.modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]
    ]  # layers as Fed-LWR counts them
    kinds = [type(m).__name__ for m in owners]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "Conv2d": 19, "BatchNorm2d": 18, "ConvTranspose2d": 4
    }  # fmt: skip
    convolutions = [m for m in owners if isinstance(m, torch.nn.Conv2d)]
    assert sum(m.bias is None for m in convolutions) == 18
    assert 7.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 7.8e6
    loss = task.loss(model(torch.rand(1, 3, 192, 192)), torch.ones(1, 1, 192, 192))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_build_model_follows_torchs_seed() -> None:
    task = SegmentationTask(**SMALL)
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(task.build_model().state_dict()["final_conv.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_loss_is_the_mean_over_images() -> None:
    task = SegmentationTask(**SMALL)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 1, 8, 8, generator=generator)
    targets = (torch.rand(4, 1, 8, 8, generator=generator) > 0.7).float()
    each = [float(task.loss(outputs[i : i + 1], targets[i : i + 1])) for i in range(4)]
    assert float(task.loss(outputs, targets)) == pytest.approx(np.mean(each), rel=1e-6)
    p = torch.sigmoid(outputs[0])  # by hand: 1 - 2 |p t| / (|p| + |t|)
    by_hand = 1 - 2 * float((p * targets[0]).sum()) / float(p.sum() + targets[0].sum())
    assert each[0] == pytest.approx(by_hand, abs=1e-5)


# --- metric -----------------------------------------------------------------------------------------------


def strip(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.float32).reshape(1, 1, 1, -1)


def test_dice_by_hand() -> None:
    """Check A = {1,1,1,0,0}, B = {1,0,1,1,0}: 2 * 2 / (3 + 3) = 0.666667."""
    task = SegmentationTask(**SMALL)
    found, truth = strip(1, 1, 1, 0, 0), strip(1, 0, 1, 1, 0)
    result = task.evaluate(Fixed(found), [(truth, truth)], "cpu")
    assert set(result) == {"dice", "loss"}
    assert result["dice"] == pytest.approx(2 / 3, abs=1e-7)


@pytest.mark.parametrize(
    ("found", "truth", "dice"),
    [
        ((0, 0, 0), (0, 0, 0), 1.0),
        ((1, 0, 0), (0, 0, 0), 0.0),
        ((0, 0, 0), (0, 1, 0), 0.0),
        ((0, 1, 1), (0, 1, 1), 1.0),
    ],
)
def test_dice_of_empty_and_full(found: tuple[int, ...], truth: tuple[int, ...], dice: float) -> None:
    result = SegmentationTask(**SMALL).evaluate(Fixed(strip(*found)), [(strip(*truth), strip(*truth))], "cpu")
    assert result["dice"] == dice


def test_evaluation_does_not_depend_on_the_batches() -> None:
    task = SegmentationTask(**SMALL)
    data = task.open_site("site-3", {})
    torch.manual_seed(0)
    model = task.build_model()
    results = [task.evaluate(model, data.batches("validation", batch_size=size), "cpu") for size in (1, 5, 12)]
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-6)
    inputs, targets = all_of(data, "validation")
    with evaluating(model):
        found = torch.sigmoid(model(inputs)) > 0.5
    each = [2 * float((a & b).sum()) / float(a.sum() + b.sum()) for a, b in zip(found, targets > 0, strict=True)]
    assert results[0]["dice"] == pytest.approx(np.mean(each), rel=1e-6)


def test_dice_of_several_structures() -> None:
    task = SegmentationTask(**SMALL, num_classes=2, labels=[[1, 2], [2]], class_names=["cell", "nucleus"])
    truth = torch.tensor([[[[1, 1, 1, 0]], [[0, 1, 0, 0]]], [[[1, 1, 0, 0]], [[0, 0, 0, 0]]]]).float()
    found = torch.tensor([[[[1, 1, 1, 1]], [[0, 1, 0, 0]]], [[[1, 0, 0, 0]], [[0, 0, 0, 0]]]]).float()
    result = task.evaluate(Fixed(found), [(truth, truth)], "cpu")
    assert result["dice_cell"] == pytest.approx((6 / 7 + 2 / 3) / 2)
    assert result["dice_nucleus"] == 1.0
    assert result["dice"] == pytest.approx((result["dice_cell"] + result["dice_nucleus"]) / 2)
    unnamed = SegmentationTask(**SMALL, num_classes=2).evaluate(Fixed(found), [(truth, truth)], "cpu")
    assert {"dice_class_1", "dice_class_2"} <= set(unnamed)


def test_evaluation_leaves_everything_as_it_was() -> None:
    task = SegmentationTask(**SMALL)
    model = Fixed(torch.ones(4, 1, 1, 5))
    model.train()
    model.norm.eval()  # a frozen layer stays frozen, the others go on training
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batches = [(torch.rand(2, 1, 1, 5), torch.ones(2, 1, 1, 5))] * 2
    random_state = torch.get_rng_state()
    task.evaluate(model, batches, "cpu")
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    with pytest.raises(RuntimeError), evaluating(model):
        raise RuntimeError
    assert model.training
    assert not model.norm.training
    with pytest.raises(ValueError, match=r"number of batches to evaluate on.* got 0$"):
        task.evaluate(model, [], "cpu")


# --- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["phantom", "folder"])
def test_batches(kind: str, tmp_path: Path) -> None:
    task = SegmentationTask(**SMALL)
    settings = {} if kind == "phantom" else {"data_root": str(folder(tmp_path / "a", (7, 2, 2)))}
    data = task.open_site("site-1", settings)
    assert data.synthetic is (kind == "phantom")
    assert ("SYNTHETIC" in data.description) is (kind == "phantom")
    assert str(tmp_path) not in data.description
    inputs, targets = whole_split(data)
    assert inputs.shape == (len(inputs), 1, 32, 32)
    assert targets.shape == (len(inputs), 1, 32, 32)
    assert inputs.dtype == targets.dtype == torch.float32
    assert inputs.min() >= 0
    assert inputs.max() <= 1
    assert set(targets.unique().tolist()) == {0.0, 1.0}


def test_augmentation_is_seeded_and_moves_the_mask_with_the_image() -> None:
    data = SegmentationTask(**SMALL, augmentation=["flip"]).open_site("site-5", {})
    first = all_of(data, "training", shuffle_seed=2**40, augment=True)
    again = all_of(data, "training", shuffle_seed=2**40, augment=True)
    plain = all_of(data, "training", shuffle_seed=2**40)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    flipped = 0
    for changed, mask, image, truth in zip(*first, *plain, strict=True):
        if torch.equal(changed, image):
            assert torch.equal(mask, truth)
        else:
            flipped += 1
            assert torch.equal(changed, image.flip(-1))
            assert torch.equal(mask, truth.flip(-1))
    assert 0.25 < flipped / len(plain[0]) < 0.75
    full = SegmentationTask(**SMALL).open_site("site-5", {})
    inputs, targets = all_of(full, "validation", shuffle_seed=1, augment=True)
    assert type(inputs) is torch.Tensor
    assert set(targets.unique().tolist()) == {0.0, 1.0}
    assert inputs.min() >= 0
    assert inputs.max() <= 1


def test_a_site_with_one_case_trains(tmp_path: Path) -> None:
    task = SegmentationTask(**SMALL)
    for settings in ({"data_root": str(folder(tmp_path / "a", (1, 1, 1)))}, {"phantom_cases": 0.01}):
        data = task.open_site("site-1", settings)
        model = task.build_model()
        for inputs, targets in data.batches("training", batch_size=1, shuffle_seed=0):
            task.loss(model(inputs), targets).backward()
        assert 0 <= task.evaluate(model, data.batches("test", batch_size=8), "cpu")["dice"] <= 1


# --- a site's folder --------------------------------------------------------------------------------------


def test_mask_values(tmp_path: Path) -> None:
    binary, cells = SegmentationTask(**SMALL), SegmentationTask(**SMALL, num_classes=2, labels=[[1, 2], [2]])
    for value in (1, 255):
        _, targets = all_of(
            binary.open_site("a", {"data_root": str(folder(tmp_path / str(value), value=value))}), "test"
        )
        assert 0.2 < float(targets.mean()) < 0.3
    root = str(folder(tmp_path / "c", value=128))
    settings = {"data_root": root, "mask_values": {"0": 0, "128": 2, "255": 1}}
    _, targets = all_of(cells.open_site("a", settings), "test")
    assert torch.equal(targets[:, 0], targets[:, 1])
    assert targets.any()
    _, targets = all_of(cells.open_site("a", {**settings, "mask_values": {"0": 0, "128": 1, "255": 2}}), "test")
    assert targets[:, 0].any()
    assert not targets[:, 1].any()
    in_task = SegmentationTask(**SMALL, mask_values={"0": 0, "128": 1})
    assert all_of(in_task.open_site("a", {"data_root": root}), "test")[1].any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            2,
            "has the values 2; expected are 0, 1 (or 0 and 255). Correct the mask, or learn these structures too "
            "(--set num_classes=2), or say with 'mask_values' in the site's fairflare.json what they mean",
        ),
        (128, 'such as {"0": 0, "1": 1, "128": 1}'),
    ],
)
def test_a_mask_with_other_values(tmp_path: Path, value: int, message: str) -> None:
    root = folder(tmp_path / "a", value=value)
    error = refused(SegmentationTask(**SMALL), {"data_root": str(root)})
    assert message in str(error)
    assert "m/0.png" in str(error)
    assert "'mask_values'" in str(error)
    assert error.public == "site 'hospital-a': a mask of split 'training' has values that are not expected"
    coding = json.loads(re.search(r"\{.*\}", str(error))[0])  # type: ignore[index]
    SegmentationTask(**SMALL).open_site("a", {"data_root": str(root), "mask_values": coding})
    if value == 2:
        SegmentationTask(**SMALL, num_classes=2).open_site("a", {"data_root": str(root)})
    else:
        assert "--set num_classes" not in str(error)


def test_one_stray_pixel_is_seen_before_resizing(tmp_path: Path) -> None:
    root = folder(tmp_path / "a", size=(320, 320))
    repaint(root / "m/4.png", 3)
    error = refused(SegmentationTask(**SMALL), {"data_root": str(root)})
    assert "m/4.png' of split 'validation' has the values 3" in str(error)


def test_values_1_and_255_together_are_not_guessed(tmp_path: Path) -> None:
    root = folder(tmp_path / "a", value=255)
    repaint(root / "m/0.png", 1)
    assert "has the values 255; expected are 0, 1" in str(refused(SegmentationTask(**SMALL), {"data_root": str(root)}))


def test_unreadable_image_and_two_sizes(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    (root / "i/1.png").write_bytes(b"\x89PNG broken")
    error = refused(SegmentationTask(**SMALL), {"data_root": str(root)})
    assert "i/1.png" in str(error)
    assert "split 'training'" in str(error)
    assert error.public == "site 'hospital-a': an image of split 'training' cannot be read"
    root = folder(tmp_path / "b")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(root / "m/6.png")
    error = refused(SegmentationTask(**SMALL), {"data_root": str(root)})
    assert "9x9" in str(error)
    assert "m/6.png" in str(error)
    np.save(root / "i/0.npy", np.zeros((40, 48, 2), np.uint8))
    write_datalist(root / "datalist.json", {split: [{"image": "i/0.npy", "label": "m/0.png"}] for split in SPLITS})
    list_error = refused(SegmentationTask(**SMALL), {"data_root": str(root)})
    assert "in both" in str(list_error)


# --- a site's settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_rot": "x"}, "unknown key 'data_rot' in the site's fairflare.json; did you mean 'data_root' or "),
        ({"data_root": 3}, "data_root must be a text, not empty or nothing, got 3"),
        ({"datalist": "x.json"}, "'datalist' is set but 'data_root' is not"),
        ({"phantom_seed": -1}, "phantom_seed must be an integer >= 0 or nothing, got -1"),
        ({"phantom_cases": "many"}, "phantom_cases must be a number in (0, 1000] or nothing, got 'many'"),
        ({"data_root": "/nowhere-at-all"}, "'/nowhere-at-all' is not a folder"),
        (
            {"sites": {"fluo": {"data_root": "x"}, "hist": {"data_root": "x"}}},
            "gives data to the sites 'fluo', 'hist', but has no block for 'hospital-a'",
        ),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    assert message in str(refused(SegmentationTask(**SMALL), settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_bytes": -1}, "cache_bytes must be an integer >= 0, got -1"),
        ({"mask_values": [0, 1]}, "mask_values must be a dict of an integer to an integer >= 0 or nothing, got [0, 1]"),
        ({"mask_values": {"0": 0, "255": 2}}, "mask_values gives no value to the structure [1]"),
        ({"mask_values": {"0": 0, "1": 1, "4": 2}}, "mask_values reads 4 as 2, which is no structure of the task"),
        ({"datalist": "fold3.json"}, "fold3.json' does not exist"),
    ],
)
def test_bad_settings_of_a_folder(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    settings = {"data_root": str(folder(tmp_path / "a")), **settings}
    assert message in str(refused(SegmentationTask(**SMALL), settings))


def test_the_site_decides_about_its_phantom() -> None:
    task = SegmentationTask(**SMALL, phantom_seed=1, phantom_cases=0.1)
    own = task.open_site("site-1", {"phantom_seed": 2, "phantom_cases": 0.2})
    same = SegmentationTask(**SMALL, phantom_seed=2, phantom_cases=0.2).open_site("site-1", {})
    assert torch.equal(all_of(own, "test")[0], all_of(same, "test")[0])
    assert own.num_samples("training") > task.open_site("site-1", {}).num_samples("training")


def test_the_phantom_has_one_structure() -> None:
    error = refused(SegmentationTask(**SMALL, num_classes=2), {})
    assert "num_classes=2" in str(error)
    assert "'data_root'" in str(error)


def test_grey_phantom_for_a_colour_task() -> None:
    data = SegmentationTask(**SMALL, in_channels=3).open_site("site-1", {"phantom_cases": 0.01})
    inputs, _ = next(iter(data.batches("training", batch_size=2)))
    assert inputs.shape == (2, 3, 32, 32)
    assert torch.equal(inputs[:, 0], inputs[:, 2])


def test_augmented_batches_need_a_seed() -> None:
    data = SegmentationTask(**SMALL).open_site("site-1", {"phantom_cases": 0.01})
    with pytest.raises(ValueError, match=r"shuffle_seed .*must .*got None"):
        data.batches("test", batch_size=2, augment=True)


# --- the constructor --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": (60, 64)}, "image_size must be 2 entries, each a multiple of 16 >= 32; entry 0 is 60"),
        ({"image_size": 64}, "image_size must be 2 entries, each a multiple of 16 >= 32, got 64"),
        ({"image_size": (16, 64)}, "each a multiple of 16 >= 32; entry 0 is 16"),
        ({"labels": [[1], [2]]}, "labels must have 1 entries, one for each class, got [[1], [2]]"),
        (
            {"num_classes": 2, "class_names": ["a", "a"]},
            "class_names must have 2 different entries, one for each class, got ['a', 'a']",
        ),
        (
            {"mask_values": {"a": 1}},
            "mask_values must be a dict of an integer to an integer >= 0 or nothing; entry 'a' is 'a'",
        ),
        ({"mask_values": {"0": 0, "255": 2}}, "mask_values gives no value to the structure [1]"),
        (
            {"mask_values": {"0": 0, "1": 1, "4": 2}},
            "mask_values reads 4 as 2, which is no structure of the task ([[1]]); learn it too (--set num_classes=2), "
            "or read it as background, 0",
        ),
        (
            {"labels": [[1, 3]], "ignore": 9, "mask_values": {"0": 0, "1": 1, "3": 3, "5": 9, "6": 7}},
            "mask_values reads 6 as 7, which is no structure of the task ([[1, 3]]); add it to labels",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SegmentationTask(**arguments)
    assert message in str(caught.value)
