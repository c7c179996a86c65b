"""Measure memory and processor time of volumes of a hospital's size: prepare, check-data, first sample, patches.

Made-up CTs (512 x 512 x 300, 16 bits, with masks of an organ and a lesion) are written into a temporary folder, 236 MB
a pair, and as much again by ``prepare``. Each step runs in a process of its own; its memory is the process's peak
resident size, its time that of the processor. A patch
(median of 200, prepared volumes on disk) is compared with a plain loop over patches that are ready in memory.

With ``--hospitals`` such CTs at several hospitals are prepared, and FedAvg trains on them as ``prepare`` prints it, for
five rounds of 25 steps; printed are the processor seconds of all, and the Dice of organ and lesion in the test.

    python benchmarks/bench_volumes.py                                # ten pairs
    python benchmarks/bench_volumes.py --pairs 30 --only "first sample" patches
    python benchmarks/bench_volumes.py --pairs 4 --shape 256 256 100
    python benchmarks/bench_volumes.py --hospitals 3 --pairs 5
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import nibabel
import numpy as np

WRITE = "write"
TASK: dict[str, Any] = {
    "num_classes": 2, "spacing": (1.5, 1.5, 2.0), "intensity": "window", "window": (40, 400),
    "patch_size": (96, 96, 96),
}  # fmt: skip


def main() -> None:
    arguments = parsed()
    if arguments.step in STEPS:
        print(json.dumps(STEPS[arguments.step](arguments.folder)))
        return
    if arguments.step == WRITE:  # in a process of its own too: a child's peak begins with what its parent has
        for hospital in range(arguments.hospitals):
            place = Path(f"hospital-{hospital + 1}" if arguments.hospitals > 1 else "")
            for number in range(arguments.pairs):
                write_pair(
                    arguments.folder / "in" / place, hospital * arguments.pairs + number, tuple(arguments.shape)
                )  # fmt: skip
        return
    with tempfile.TemporaryDirectory(prefix="bench_volumes_") as name:
        folder = Path(name)
        size = ["--pairs", str(arguments.pairs), "--shape", *map(str, arguments.shape)]
        size += ["--hospitals", str(arguments.hospitals)]
        subprocess.run([sys.executable, __file__, "--step", WRITE, "--folder", name, *size], check=True)
        print(f"{arguments.hospitals} x {arguments.pairs} pairs of {' x '.join(map(str, arguments.shape))}")
        if arguments.hospitals > 1:
            learn(folder)
            return
        print(f"{'step':<14} {'peak GB':>8} {'processor s':>12}")
        for step in ("prepare", *[step for step in STEPS if step in arguments.only and step != "prepare"]):
            command = [sys.executable, __file__, "--step", step, "--folder", str(folder)]
            told = subprocess.run(command, capture_output=True, text=True, check=False)
            if told.returncode:
                raise SystemExit(told.stderr)
            found = json.loads(told.stdout.splitlines()[-1])
            print(f"{step:<14} {found.pop('gigabytes'):8.2f} {found.pop('seconds'):12.1f}", *found.items(), flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--shape", type=int, nargs=3, default=(512, 512, 300))
    parser.add_argument("--hospitals", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="steps after prepare")
    parser.add_argument("--step", choices=[WRITE, *STEPS], help="one step, in a process of its own")
    parser.add_argument("--folder", type=Path, default=Path())
    return parser.parse_args()


def write_pair(folder: Path, number: int, shape: tuple[int, ...]) -> None:
    """Write a body of noise around 40 HU in air, an organ of 120 HU, and a lesion of 60 HU in it; and its mask."""
    rng = np.random.default_rng(number)
    image = rng.integers(-930, -870, shape, dtype=np.int16)
    mask = np.zeros(shape, np.uint8)
    for centre, radii, added, label in (
        ((0.5, 0.5, 0.5), (0.42, 0.3, 1.0), 940, 0),
        ((0.35 + 0.01 * number, 0.5, 0.5), (0.12, 0.12, 0.2), 80, 1),
        ((0.35 + 0.01 * number, 0.5, 0.5 + 0.005 * number), (0.03, 0.03, 0.05), -60, 2),
    ):
        axes = np.ogrid[tuple(slice(length) for length in shape)]
        parts = zip(axes, centre, radii, shape, strict=True)
        inside = sum(((axis - c * n) / (r * n)) ** 2 for axis, c, r, n in parts) < 1
        image[inside] += added
        mask[inside] = label
    affine = np.diag([0.8 + 0.02 * (number % 3), 0.8 + 0.02 * (number % 3), 1.0, 1.0])
    for kind, array in (("images", image), ("labels", mask)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(array, affine), folder / kind / f"ct{number:02}.nii")


def learn(folder: Path) -> None:
    """Prepare and train by the commands that a user types; print processor seconds and Dice."""
    out, run = folder / "out", folder / "run"
    prepared = ["prepare", "volumes", "--source", str(folder / "in"), "--out", str(out)]
    told = ["--rounds", "5", "--set", "local_steps=25", "--in-process", "--workspace", str(run)]
    trained = ["run", "fed_avg", "--data", str(out / "fairflare.json"), *told]
    for words in (prepared, trained):
        subprocess.run([sys.executable, "-m", "fairflare.cli", *words], check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{words[0]}: {used.ru_utime + used.ru_stime:.0f} processor seconds so far", flush=True)
    (results,) = run.rglob("results.json")
    from fairflare.reporting.results import read_results

    columns = read_results(results).columns
    for name, cells in columns["best" if "best" in columns else "last"].items():
        if name.startswith("dice"):
            print(name, {site: round(cell.counted, 3) for site, cell in cells.items()})


def spent(**more: Any) -> dict[str, Any]:
    """Return peak memory in GB and processor seconds of this process, threads included, with further figures."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"gigabytes": used.ru_maxrss / 1e6, "seconds": used.ru_utime + used.ru_stime, **more}


def prepare(folder: Path) -> dict[str, Any]:
    from fairflare.data.preparers.__main__ import main as command

    if code := command(["volumes", "--source", str(folder / "in"), "--out", str(folder / "out")]):
        raise SystemExit(code)
    return spent(needs=json.loads((folder / "out/manifest.json").read_text())["task"])


def check(folder: Path) -> dict[str, Any]:
    from fairflare.checking.images import check_sites
    from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

    (site,) = (file.parent for file in (folder / "out").glob("*/datalist.json"))
    found = check_sites(VolumeSegmentationTask(**TASK), {"site": {"data_root": str(site)}})
    return spent(usable=found.usable, grave=found.grave)


def opened(folder: Path) -> Any:
    import monai.inferers
    import monai.transforms  # noqa: F401  (the time of imports is no time of the data)

    from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

    (site,) = (file.parent for file in (folder / "out").glob("*/datalist.json"))
    own = {"data_root": str(site), "decoded_folder": str(folder / "kept")}
    return VolumeSegmentationTask(**TASK).open_site("site", own)


def first(folder: Path) -> dict[str, Any]:
    data = opened(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    started = time.process_time()
    data.volume("training", 0)
    return spent(sample_seconds=round(time.process_time() - started, 1), imports_gigabytes=round(before, 2))


def patches(folder: Path) -> dict[str, Any]:
    data = opened(folder)
    number = data.num_samples("training")
    for index in range(number // data.task.patches):  # the first epoch prepares them
        data.volume("training", index)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, ready, seed = [], [], 0
    while len(times) < 200:
        batches = iter(data.batches("training", batch_size=1, shuffle_seed=seed))
        for _ in range(number):
            started = time.process_time()
            batch = next(batches)
            times.append(time.process_time() - started)
            ready = [*ready[-15:], batch]
        seed += 1
    loop = []
    for k in range(200):
        started = time.process_time()
        inputs, targets = ready[k % len(ready)]
        inputs.clone(), targets.clone()
        loop.append(time.process_time() - started)
    batches, started = iter(data.batches("training", batch_size=2, shuffle_seed=seed)), time.process_time()
    round_seconds = [sum(1 for _ in batches), time.process_time() - started][1]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    return spent(
        patch=round(median(times), 4), plain_loop=round(median(loop), 4), grown_gigabytes=round(grown, 3),
        volumes=number // data.task.patches, round_of_reading=round(round_seconds, 1),
        step=round(step_seconds(data, ready), 2),
    )  # fmt: skip


def step_seconds(data: Any, ready: list[Any]) -> float:
    """Return the processor seconds of one training step on two patches that are ready, by the default network."""
    import torch

    model, (first, second) = data.task.build_model(), ready[-2:]
    inputs, targets = (torch.cat(part) for part in zip(first, second, strict=True))
    started = time.process_time()
    data.task.loss(model(inputs), targets).backward()
    return time.process_time() - started


STEPS = {"prepare": prepare, "check": check, "first sample": first, "patches": patches}

if __name__ == "__main__":
    main()
