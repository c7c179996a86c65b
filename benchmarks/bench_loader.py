"""Measure a site loader's images a second at 224x224 with augmentation, beside MONAI's plain way, in one run.

    python benchmarks/bench_loader.py                # 400 made-up images, 0 and 2 workers
    python benchmarks/bench_loader.py --images 800 --size 512

Both sides read the same JPEG files, have the same random changes and give batches of 32. MONAI's plain way is
``CacheDataset(LoadImaged, EnsureChannelFirstd, ScaleIntensityRanged, Resized, random changes)`` in a ``DataLoader``,
everything cached. Rounds alternate between the two, so that other work on the machine meets both; the ratio counts.
The last lines say how often volumes are decoded when their slices come in shuffled order.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import CacheDataset, DataLoader
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, Resized, ScaleIntensityRanged
from PIL import Image

from fairflare.data import reading
from fairflare.data.datalist import SPLITS, write_datalist
from fairflare.data.image_file import Volume
from fairflare.tasks.batches import changes
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask

SIDE, BATCH, AUGMENTATION = 224, 32, ("flip", "affine")
VOLUMES, SLICES = 16, 24


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench_loader_") as name:
        folder = Path(name)
        entries = pictures(folder, arguments.images, arguments.size)
        print(f"{arguments.images} JPEG images of {arguments.size}x{arguments.size}, {SIDE}x{SIDE}, batches of {BATCH}")
        print("images a second (median of the rounds; first: files are decoded, then: decoded ones are in memory)")
        print(f"{'workers':>7} {'':>12} {'FairFlare':>10} {'MONAI':>10} {'ratio':>6}")
        for workers in (0, 2):
            compare(folder, entries, workers, arguments.rounds)
        shuffled_volumes(folder / "volumes")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--size", type=int, default=320, help="side of the files")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def pictures(folder: Path, count: int, size: int) -> list[dict[str, Any]]:
    """Write smooth colours with some noise, as JPEG files."""
    random = np.random.default_rng(0)
    entries = []
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 255, (12, 12, 3), np.uint8)).resize((size, size), Image.BICUBIC)
        noisy = np.clip(np.asarray(coarse) + random.normal(0, 6, (size, size, 1)), 0, 255)
        Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{number}.jpg", quality=92)
        entries.append({"image": f"{number}.jpg", "label": number % 2})
    write_datalist(folder / "datalist.json", {"training": entries[2:], "validation": entries[:1], "test": entries[1:2]})
    return entries[2:]


def compare(folder: Path, entries: list[dict[str, Any]], workers: int, rounds: int) -> None:
    speeds: dict[str, list[tuple[float, float]]] = {"ours": [], "monai": []}
    for number in range(rounds):
        for name, make in (("ours", ours), ("monai", monai_plain)):
            first, one_pass = make(folder, entries, workers, number)
            speeds[name].append((first, timed(one_pass, len(entries))))
    for column, what in enumerate(("first", "then")):
        a, b = (median(each[column] for each in speeds[name]) for name in ("ours", "monai"))
        print(f"{workers:>7} {what:>12} {a:>10.0f} {b:>10.0f} {a / b:>6.2f}", flush=True)


def timed(one_pass: Callable[[], int], count: int) -> float:
    started = time.perf_counter()
    seen = one_pass()
    if seen != count:
        raise RuntimeError(f"{seen} images instead of {count}")
    return count / (time.perf_counter() - started)


def ours(folder: Path, entries: list[dict[str, Any]], workers: int, number: int) -> tuple[float, Callable[[], int]]:
    task = ClassificationTask(num_classes=2, image_size=(SIDE, SIDE), augmentation=AUGMENTATION)
    data = task.open_site("a", {"data_root": str(folder), "num_workers": workers})

    def one_pass() -> int:
        batches = data.batches("training", batch_size=BATCH, shuffle_seed=number, augment=True)
        return sum(len(inputs) for inputs, _ in batches)

    return timed(one_pass, len(entries)), one_pass


def monai_plain(
    folder: Path, entries: list[dict[str, Any]], workers: int, number: int
) -> tuple[float, Callable[[], int]]:
    files = [{"image": str(folder / entry["image"]), "label": entry["label"]} for entry in entries]
    steps = Compose([
        LoadImaged("image", image_only=True), EnsureChannelFirstd("image"),
        ScaleIntensityRanged("image", 0, 255, 0, 1), Resized("image", (SIDE, SIDE), mode="bilinear"),
        *changes(AUGMENTATION, with_targets=False).transforms,
    ])  # fmt: skip
    loaders: list[Any] = []

    def one_pass() -> int:
        if not loaders:
            dataset = CacheDataset(files, steps, num_workers=max(1, workers), progress=False)
            loaders.append(DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers))
        return sum(len(batch["image"]) for batch in loaders[0])

    return timed(one_pass, len(entries)), one_pass


def shuffled_volumes(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for number in range(VOLUMES + 2):
        values = random.integers(0, 900, (96, 96, SLICES)).astype(np.int16)
        for name, array in ((f"{number}.nii.gz", values), (f"{number}_m.nii.gz", (values > 450).astype(np.uint8))):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([-1.0, -1.0, 1.0, 1.0])), folder / name)
        split = SPLITS[max(0, number - VOLUMES + 1)]
        splits[split] += [
            {"image": f"{number}.nii.gz", "label": f"{number}_m.nii.gz", "slice": k} for k in range(SLICES)
        ]
    write_datalist(folder / "datalist.json", splits)
    decoded = [0]
    real = Volume.decode

    def counted(*args: Any, **how: Any) -> Any:
        decoded[0] += 1
        return real(*args, **how)

    Volume.decode = counted  # type: ignore[method-assign]
    print(f"\n{VOLUMES} volumes of {SLICES} slices with masks, one shuffled pass: files decoded, images a second")
    kept = str(folder / "kept")
    for what, own in (
        ("not kept", {}),
        ("kept, first", {"decoded_folder": kept}),
        ("kept, then", {"decoded_folder": kept}),
    ):
        reading._decode.cache_clear()
        reading._measure_bounds.cache_clear()
        decoded[0] = 0
        task = SegmentationTask(image_size=(64, 64))
        data = task.open_site("a", {"data_root": str(folder), "cache_bytes": 0, **own})
        speed = timed(
            lambda data=data: sum(len(x) for x, _ in data.batches("training", batch_size=8, shuffle_seed=1)),
            VOLUMES * SLICES,
        )
        print(f"{what:>12} {decoded[0]:>5} {speed:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
