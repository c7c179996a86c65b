"""Test resizing and the way back, masks by area, ignored pixels, and Dice at own size and of volumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fairflare.base.stopping import StoppableData
from fairflare.cli import commands
from fairflare.cli.data.own_images import kind_by_manifest
from fairflare.data.datalist import SPLITS, write_datalist
from fairflare.tasks.placing import back_in_place, centre, inner_size, masks_placed, overlaps, smooth
from fairflare.tasks.segmentation import SegmentationTask

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [(64, 48), (48, 64), (33, 95), (200, 70), (32, 32)]  # of images


class Bright(torch.nn.Module):
    """Predict pixels brighter than a half, as every structure of the task."""

    def __init__(self, structures: int = 1) -> None:
        super().__init__()
        self.structures = structures
        self.seen = torch.nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (50 * (inputs - 0.5) + self.seen).expand(-1, self.structures, -1, -1)


def folder(root: Path, pictures: list[tuple[np.ndarray, np.ndarray]], **more: Any) -> Path:
    """Write a datalist whose every split has these images and masks; ``more``: keys of the entries, a list each."""
    root.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split in SPLITS:
        splits[split] = []
        for number, (image, mask) in enumerate(pictures):
            for kind, values in (("i", image), ("m", mask)):
                Image.fromarray(values.astype(np.uint8)).save(root / f"{kind}{split}{number}.png")
            entry = {"image": f"i{split}{number}.png", "label": f"m{split}{number}.png"}
            splits[split].append(entry | {key: values[number] for key, values in more.items()})
    write_datalist(root / "datalist.json", splits)
    return root


def batches(task: SegmentationTask, root: Path, split: str = "test", batch_size: int = 2, **options: Any) -> Any:
    data = StoppableData(task.open_site("a", {"data_root": str(root)}))  # as a site's shell goes through them
    return data.batches(split, batch_size=batch_size, **options)


def scores(root: Path, model: torch.nn.Module | None = None, batch_size: int = 2, **settings: Any) -> dict[str, float]:
    task = SegmentationTask(image_size=(32, 32), **settings)
    return task.evaluate(model or Bright(task.num_classes), batches(task, root, batch_size=batch_size), "cpu")


def dice(found: np.ndarray, truth: np.ndarray) -> float:
    both = int(found.sum()) + int(truth.sum())
    return 2 * int((found & truth).sum()) / both if both else 1.0


# --- resizing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", SIZES)
def test_proportions_are_kept_and_the_way_back_finds_the_place(own: tuple[int, int]) -> None:
    height, width = own
    size = (32, 64)
    for how in ("pad", "crop"):
        inner = inner_size(own, size, how)
        factors = inner[0] / height, inner[1] / width
        assert abs(factors[0] - factors[1]) * max(own) <= 1.0  # half a pixel on each side
        assert (inner[0] <= 32 and inner[1] <= 64 and (inner[0] == 32 or inner[1] == 64)) == (
            how == "pad"
        ) or own == size
        assert how == "pad" or (inner[0] >= 32 and inner[1] >= 64)
    assert inner_size(own, size, "stretch") == size
    y, x = np.mgrid[:height, :width]
    for row, column in ((height // 2, width // 2), (int(0.4 * height), int(0.6 * width))):
        spot = torch.from_numpy(((y - row) ** 2 + (x - column) ** 2 < (max(own) / 8) ** 2).astype(np.float32))[None]
        for how in ("stretch", "pad", "crop"):
            seen = smooth(spot[None], size, how)[0]
            assert seen.shape == (1, *size)
            again = back_in_place((seen > 0.5).to(torch.uint8), own, how)[0].numpy() > 0
            assert again.shape == own
            shown = back_in_place(torch.ones(1, *size), own, how)[0].numpy() > 0  # not cut off
            assert shown.all() or how == "crop"
            assert dice(again, shown & (spot[0].numpy() > 0)) > (0.7 if how == "pad" else 0.85), (how, row, column)


def test_what_is_padded_is_an_edge_and_what_is_cropped_is_gone() -> None:
    image = torch.ones(1, 1, 20, 40)
    padded = smooth(image, (32, 32), "pad")[0, 0]
    torch.testing.assert_close(padded, torch.nn.functional.pad(torch.ones(16, 32), (0, 0, 8, 8)))
    halves = torch.cat([torch.zeros(1, 1, 20, 20), image[..., :20]], 3)
    halves[..., :10], halves[..., -10:] = 0.7, 0.7
    cropped = smooth(halves, (20, 20), "crop")[0, 0]
    assert torch.equal(cropped, halves[0, 0, :, 10:30])
    labels = masks_placed(torch.ones(1, 20, 40, dtype=torch.int8), (32, 32), "pad", "nearest")[0]
    assert torch.equal(labels, torch.nn.functional.pad(torch.ones(16, 32, dtype=torch.int8), (0, 0, 8, 8), value=-1))
    assert back_in_place(torch.ones(1, 20, 20), (20, 40), "crop")[0].sum(0).tolist() == [0] * 10 + [20] * 20 + [0] * 10


@pytest.mark.parametrize(("small", "large"), [(20, 25), (21, 32), (7, 8), (9, 9)])
def test_what_is_padded_and_cut_again_is_where_it_was(small: int, large: int) -> None:
    picture = torch.arange(small * 5.0).reshape(1, small, 5)
    wide = centre(picture, (large, 9))
    assert torch.equal(centre(wide, (small, 5)), picture)
    assert float(wide.sum()) == float(picture.sum())


@pytest.mark.parametrize("sizes", [(40, 32), (37, 32), (32, 50), (100, 48), (32, 32)])
def test_overlaps_add_up(sizes: tuple[int, int]) -> None:
    old, new = sizes
    weights = overlaps(old, new).double()
    torch.testing.assert_close(weights.sum(1), torch.ones(new, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.sum(0), torch.full((old,), new / old, dtype=torch.float64), atol=1e-6, rtol=0)


def test_masks_by_area_lose_nothing(tmp_path: Path) -> None:
    """Check thin lines and single pixels: the nearest pixel finds only some, while their area stays."""
    mask = np.zeros((1, 96, 132), np.uint8)
    mask[0, 5::12], mask[0, 50, 60] = 1, 1
    tensor = torch.from_numpy(mask)
    shares = masks_placed(tensor, (32, 48), "stretch", "area")
    assert shares.dtype == torch.float32
    assert float(shares.sum()) * (96 * 132) / (32 * 48) == pytest.approx(mask.sum(), rel=1e-5)
    by_hand = torch.nn.functional.avg_pool2d(tensor[:, :, :132].float(), (3, 3))  # 32 x 44: whole pixels
    torch.testing.assert_close(masks_placed(tensor, (32, 44), "stretch", "area"), by_hand)
    ignored = tensor.to(torch.int8)
    ignored[0, :3, :3] = torch.tensor([[-1, -1, -1], [-1, -1, 1], [1, 1, 0]])
    ignored[0, :3, 3:6] = torch.tensor([[-1, -1, -1], [-1, 1, 1], [1, 1, 0]])
    found = masks_placed(ignored, (32, 44), "stretch", "area")[0, 0]
    assert found[:2].tolist() == [-1.0, pytest.approx(4 / 5)]  # 4 of 9 count; 5 of 9 do
    root = folder(tmp_path, [(mask[0] * 255, mask[0])])
    task = SegmentationTask(image_size=(32, 48), mask_resize="area")
    ((_, targets),) = batches(task, root)
    torch.testing.assert_close(targets[0], shares)
    outputs = torch.full((1, 1, 32, 48), 3.0)
    p = torch.sigmoid(outputs)
    wanted = 1 - (2 * (p * targets).sum() + 1e-5) / (p.sum() + targets.sum() + 1e-5)
    torch.testing.assert_close(task.loss(outputs, targets), wanted)


# --- pixels that do not count -----------------------------------------------------------------------------


def test_ignored_pixels_have_no_part_in_loss_gradient_and_dice(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    image = random.integers(0, 255, (32, 32))
    mask = (random.uniform(size=(32, 32)) > 0.5).astype(np.uint8)
    outside = random.uniform(size=(32, 32)) > 0.7
    mask[outside] = 255
    root = folder(tmp_path, [(image, mask)])
    task = SegmentationTask(image_size=(32, 32), ignore=255)
    ((inputs, targets),) = batches(task, root)
    assert np.array_equal(targets[0, 0].numpy(), np.where(outside, -1.0, mask))
    counts = torch.from_numpy(~outside)
    outputs = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for loss in (task.loss(outputs, targets), task.sample_losses(outputs, targets)[0]):
        p, t = torch.sigmoid(outputs[0, 0])[counts], targets[0, 0][counts]
        wanted = 1 - (2 * (p * t).sum() + 1e-5) / (p.sum() + t.sum() + 1e-5)
        torch.testing.assert_close(loss, wanted)
        (gradient,) = torch.autograd.grad(loss, outputs)
        assert bool(torch.isfinite(gradient).all())
        assert not gradient[0, 0][~counts].any()
        assert gradient[0, 0][counts].all()
    found = inputs[0, 0].numpy() > 0.5
    for settings in ({}, {"evaluate_at": "image"}, {"mask_values": {0: 0, 1: 1, 255: 255}}):
        result = scores(root, ignore=255, **settings)
        assert result["dice"] == pytest.approx(dice(found & ~outside, (mask == 1) & ~outside), rel=1e-6)
    with pytest.raises(ValueError, match="has the values 255; expected are 0, 1, 7"):
        scores(folder(tmp_path / "b", [(image, mask)]), ignore=7)
    with pytest.raises(ValueError, match=r"^ignore.* got 1"):
        SegmentationTask(ignore=1)
    with pytest.raises(ValueError, match=r"no value to ignore=9, got \{0: 0, 1: 1\}"):
        SegmentationTask(ignore=9, mask_values={0: 0, 1: 1})


def test_the_edge_of_a_padded_image_does_not_count(tmp_path: Path) -> None:
    image, mask = np.full((16, 32), 255), np.zeros((16, 32))
    mask[:8] = 1
    root = folder(tmp_path, [(image, mask)])

    class Everywhere(Bright):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.full_like(inputs, 40.0) + self.seen

    half = dice(np.ones((16, 32), bool), mask > 0)
    for evaluate_at in ("network", "image"):
        result = scores(root, Everywhere(), resize="pad", evaluate_at=evaluate_at)
        assert result["dice"] == pytest.approx(half)
        assert result["loss"] == pytest.approx(1 - half, abs=1e-4)


# --- at the image's own size ------------------------------------------------------------------------------


def small_structures() -> tuple[np.ndarray, np.ndarray]:
    """Make three spots of 3x3 in 96x96: on the network's 32x32 two of them are missed by the pixel's middle."""
    mask = np.zeros((96, 96), np.uint8)
    mask[30:33, 30:33] = 1  # pixel 10, 10
    mask[47:49, 62:64] = 1
    mask[77:79, 20:22] = 1
    image = mask * 255
    image[30:33, 60:63] = 255  # not a structure
    return image, mask


def test_small_structures_at_their_own_size_equal_a_hand_calculation(tmp_path: Path) -> None:
    root = folder(tmp_path, [small_structures()])

    class Nothing(Bright):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.full_like(inputs, -9.0) + self.seen

    class OnePixel(Bright):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found = torch.full_like(inputs, -9.0)
            found[:, :, 10, 10] = 9.0
            found[:, :, 10, 11] = 9.0
            return found + self.seen

    # Found are the pixels 30 to 32, 30 to 35: 18, of which 9 are right; the structures have 9 + 4 + 4.
    assert scores(root, OnePixel(), evaluate_at="image")["dice"] == pytest.approx(2 * 9 / (18 + 17))
    assert scores(root, Nothing(), evaluate_at="image")["dice"] == 0.0
    at_network = scores(root, OnePixel())["dice"]
    assert at_network == pytest.approx(2 * 1 / (2 + 1))  # the two small ones are not there
    assert scores(root, OnePixel(), evaluate_at="image")["loss"] == scores(root, OnePixel())["loss"]


@pytest.mark.parametrize("resize", ["stretch", "pad", "crop"])
def test_dice_at_the_own_size_is_that_of_what_is_brought_back(tmp_path: Path, resize: str) -> None:
    """Check any batches of the images; pixels that were cut off are not found."""
    random = np.random.default_rng(0)
    pictures = []
    for size in SIZES:
        image = random.integers(0, 255, size)
        pictures.append((image, (image > 140) | (random.uniform(size=size) > 0.9)))
    root = folder(tmp_path, pictures)
    task = SegmentationTask(image_size=(32, 32), resize=resize)  # type: ignore[arg-type]
    wanted = []
    for number, (image, mask) in enumerate(pictures):
        seen = task.read_input(root / f"itest{number}.png")
        found = back_in_place((seen > 0.5).to(torch.uint8), image.shape, resize)[0].numpy() > 0
        wanted.append(dice(found, mask))
    for batch_size in (1, 2, 5):
        settings = {"resize": resize, "evaluate_at": "image"}
        assert scores(root, batch_size=batch_size, **settings)["dice"] == pytest.approx(np.mean(wanted), rel=1e-6)
    assert len(set(np.round(wanted, 3))) == len(SIZES)


def test_several_structures_at_their_own_size(tmp_path: Path) -> None:
    image, mask = small_structures()
    mask[30:33, 30:33] = 2
    root = folder(tmp_path, [(image, mask)])
    settings = {"num_classes": 2, "class_names": ["all", "bright"], "labels": [[1, 2], [2]], "evaluate_at": "image"}
    result = scores(root, **settings)
    found = np.zeros((96, 96), bool)
    for row, column in ((30, 30), (30, 60)):  # what is left of the smaller ones is darker than a half
        found[row : row + 3, column : column + 3] = True
    assert result["dice_all"] == pytest.approx(dice(found, mask > 0))
    assert result["dice_bright"] == pytest.approx(dice(found, mask == 2))
    assert result["dice"] == pytest.approx((result["dice_all"] + result["dice_bright"]) / 2)


# --- volumes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluate_at", ["network", "image"])
def test_dice_of_a_volume_is_that_of_its_slices_together(tmp_path: Path, evaluate_at: str) -> None:
    random = np.random.default_rng(0)
    pictures, volumes = [], ["p2", "p1", "p2", "p1", "p3", "p4"]
    for number in range(6):
        image = random.integers(0, 255, (32, 32))
        mask = random.uniform(size=(32, 32)) > (0.5 if number < 4 else 2.0)
        pictures.append((image if number < 5 else image * 0, mask))
    plain = folder(tmp_path / "plain", pictures)
    root = folder(tmp_path / "volumes", pictures, volume=volumes)
    found = [picture.astype(np.uint8) / np.float32(255) > 0.5 for picture, _ in pictures]
    truth = [mask for _, mask in pictures]
    whole = {
        name: dice(*(np.stack([a for a, v in zip(x, volumes, strict=True) if v == name]) for x in (found, truth)))
        for name in set(volumes)
    }
    assert (whole["p3"], whole["p4"]) == (0.0, 1.0)  # found where nothing is; nothing found, nothing there
    for batch_size in (1, 4, 6):
        result = scores(root, evaluate_at=evaluate_at, batch_size=batch_size)
        assert result["volume_dice"] == pytest.approx(np.mean(list(whole.values())), rel=1e-6)
        assert result["dice"] == pytest.approx(scores(plain, evaluate_at=evaluate_at)["dice"], rel=1e-12)
    assert "volume_dice" not in scores(plain)
    two = scores(root, num_classes=2, labels=[[1], [1]])
    assert two["volume_dice_class_1"] == two["volume_dice_class_2"] == two["volume_dice"]
    task = SegmentationTask(num_classes=2)
    assert {"volume_dice", "volume_dice_class_1", "dice_class_2"} <= {metric.name for metric in task.declared_metrics()}


def test_a_picture_by_itself_is_a_volume_of_its_own(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    pictures = [(random.integers(0, 255, (32, 32)), random.uniform(size=(32, 32)) > 0.5) for _ in range(6)]
    root = folder(tmp_path, pictures, volume=["p", None, None, "p", None, None])
    found = [image.astype(np.uint8) / np.float32(255) > 0.5 for image, _ in pictures]
    alone = [dice(found[k], pictures[k][1]) for k in (1, 2, 4, 5)]
    together = dice(np.stack([found[0], found[3]]), np.stack([pictures[0][1], pictures[3][1]]))
    for batch_size in (1, 2, 6):
        assert scores(root, batch_size=batch_size)["volume_dice"] == pytest.approx(
            np.mean([together, *alone]), rel=1e-6
        )


def test_slices_of_a_file_are_of_one_volume(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    affine = np.diag([-1.0, -1.0, 1.0, 1.0])
    splits: dict[str, list[dict[str, Any]]] = {}
    for split in SPLITS:
        volume = random.integers(0, 255, (32, 32, 4)).astype(np.int16)
        mask = (random.uniform(size=(32, 32, 4)) > np.array([0.1, 0.9, 0.5, 2.0])).astype(np.uint8)
        nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / f"{split}.nii")
        nibabel.save(nibabel.Nifti1Image(mask, affine), tmp_path / f"{split}_m.nii")
        splits[split] = [{"image": f"{split}.nii", "label": f"{split}_m.nii", "slice": k} for k in range(4)]
    write_datalist(tmp_path / "datalist.json", splits)
    result = scores(tmp_path)
    high = np.percentile(volume, 99)
    found = np.clip((volume - volume.min()) / (high - volume.min()), 0, 1) > 0.5
    assert result["volume_dice"] == pytest.approx(dice(found, mask > 0), rel=1e-6)
    assert result["dice"] == pytest.approx(np.mean([dice(found[..., k], mask[..., k] > 0) for k in range(4)]), rel=1e-6)


def test_the_kind_of_task_is_the_manifests_where_nobody_says_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text('{"kind": "volume_segmentation"}')
    file = tmp_path / "fairflare.json"
    assert kind_by_manifest(file, {"task": None}) == {"task": "volume_segmentation"}
    assert "--task volume_segmentation" in "".join(capsys.readouterr())
    assert kind_by_manifest(file, {"task": "segmentation"}) == {}
    assert kind_by_manifest(file, {"task": None, "monai_bundle": "b"}) == {}
    assert kind_by_manifest(None, {"task": None}) == {}


def test_an_export_follows_prepared_data_as_a_run_does(tmp_path: Path) -> None:
    """Check task, classes and image size of a job, from images and manifest, and from the manifest alone."""
    pictures = [(np.full((80, 112), 9 * n), np.full((80, 112), n % 3)) for n in range(3)]
    sites = {site: {"data_root": str(folder(tmp_path / site, pictures))} for site in ("north", "south")}
    (tmp_path / "fairflare.json").write_text(json.dumps({"sites": sites}))
    (tmp_path / "manifest.json").write_text('{"kind": "segmentation", "task": {"num_classes": 2}}')

    def task_of(data: str, *more: str) -> dict[str, Any]:
        words = ["export", "fed_avg", "--out", str(tmp_path / "jobs"), "--overwrite", "--data", str(tmp_path / data)]
        done = CliRunner().invoke(commands.app, [*words, "--preinstalled", *more])
        assert done.exit_code == 0, done.output
        client = json.loads((tmp_path / "jobs/fed_avg/app/config/config_fed_client.json").read_text())
        return dict(client["executors"][0]["executor"]["args"]["task"]["args"])

    followed = task_of("fairflare.json")
    assert (followed["num_classes"], followed["image_size"], followed["in_channels"]) == (2, [80, 80], 1)
    assert str(tmp_path) not in json.dumps(followed)
    assert task_of("fairflare.json", "--set", "image_size=[32,32]")["image_size"] == [32, 32]
    alone = task_of("manifest.json")
    assert (alone["num_classes"], alone["image_size"]) == (2, [64, 64])
    (tmp_path / "manifest.json").unlink()
    refused = CliRunner().invoke(
        commands.app, ["export", "fed_avg", "--out", "x", "--data", str(tmp_path / "manifest.json")]
    )
    assert refused.exit_code == 2
    assert "there is no manifest" in refused.output
