"""Count files entered and calls for a setting, an image, a reply, a weight and a figure, with the share of checks.

    python benchmarks/bench_trips.py [--set KEY=VALUE ...] [--bounded] [--list]

One Fed-LWR run in this process: two sites, one round, eight pictures (PNG) a batch. Counted are calls of the package's
own Python functions (a generator's steps too), by ``sys.setprofile``; not those of torch, pydantic and the standard
library. A call is a check's where its function lies in the module of checks or has ``check`` in its name, and so are
the calls that such a one makes.

With ``--figure`` a Dice is followed from the site's evaluation to terminal and page: counted are the files and the
functions of both packages that hold it, as an argument or a result, alone or anywhere within.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import fairflare

ROOT = str(Path(fairflare.__file__).parent)
PACKAGES = str(Path(fairflare.__file__).parents[1] / "fairflare")  # also the beginning of fairflare_lab
NEEDLE = 0.6180339887498949  # a figure that occurs once
CHECKS = ("base/checks.py", "base/checks.py")
SITES, IMAGES, CLASSES = ("site-1", "site-2"), 16, 2
SMALL: dict[str, Any] = {
    "image_size": [33, 33], "features": [4, 4, 8, 8], "num_classes": CLASSES, "local_epochs": 1, "batch_size": 8,
}  # fmt: skip


class Trip:
    """Count calls of the package's functions while the trip is on."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.in_checks = 0
        self.trips = 0
        self._stack = threading.local()

    @contextmanager
    def on(self) -> Iterator[None]:
        before, self.trips = sys.getprofile(), self.trips + 1
        self._stack.frames = []
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        frames: list[bool] = self._stack.__dict__.setdefault("frames", [])
        if event == "return":
            if frames:
                frames.pop()
            return
        code = frame.f_code
        inside = bool(frames) and frames[-1]
        if code.co_filename.startswith(ROOT):
            file = code.co_filename[len(ROOT) + 1 :]
            inside = inside or file in CHECKS or "check" in code.co_name.lower()
            self.calls[file, code.co_qualname if hasattr(code, "co_qualname") else code.co_name] += 1
            self.in_checks += inside
        frames.append(inside)

    @property
    def files(self) -> int:
        """Return the number of files entered."""
        return len({file for file, _ in self.calls})

    @property
    def share(self) -> float:
        """Return the share of checks in the calls."""
        return self.in_checks / max(self.calls.total(), 1)


class Holding(Trip):
    """Record the functions that hold :data:`NEEDLE`, by file, while the trip is on."""

    def _seen(self, frame: FrameType, event: str, result: object) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(PACKAGES) and "<" not in code.co_name:
            key = code.co_filename[len(PACKAGES) :], getattr(code, "co_qualname", code.co_name)
            values = list(frame.f_locals.values()) if event == "call" else [result]
            if key not in self.calls and any(map(holds, values)):
                self.calls[key] += 1


def holds(value: object, depth: int = 8) -> bool:
    """Return whether a value is :data:`NEEDLE`, or has it within: in a container, an object of ours, or a text."""
    if isinstance(value, float):
        return value == NEEDLE
    if isinstance(value, str):
        return str(NEEDLE) in value
    if not depth or isinstance(value, (int, bytes, type, type(None))):
        return False
    if isinstance(value, dict):
        return any(holds(part, depth - 1) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds(part, depth - 1) for part in value)
    ours = type(value).__module__.startswith("fairflare")
    return (
        ours and any(holds(part, depth - 1) for part in vars(value).values()) if hasattr(value, "__dict__") else False
    )


def figure() -> Holding:
    """Return the functions that hold the Dice of one site, from its evaluation to terminal and page."""
    from fairflare.cli.show import show
    from fairflare.federation.plan.plan import make_plan
    from fairflare.federation.site.worker import SiteWorker
    from fairflare.federation.transports.local import run_local
    from fairflare_lab.page.write import write_report

    small = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.1, "local_epochs": 1}
    plan, trip = make_plan("fed_avg", task="segmentation", sites=2, num_rounds=1, settings=small), Holding()
    evaluate = SiteWorker.evaluate

    def found(worker: SiteWorker, model: Any, run: Any, split: str) -> dict[str, float]:
        metrics = evaluate(worker, model, run, split)
        return metrics | {"dice": NEEDLE} if (worker.site, split) == ("site-2", "test") else metrics

    patch = mock.patch.object(SiteWorker, "evaluate", found)
    with tempfile.TemporaryDirectory(prefix="fairflare_trips_") as folder, patch, trip.on():
        run_local(plan, Path(folder) / "run")
        show([Path(folder) / "run"])
        write_report(Path(folder) / "run", Path(folder) / "page")
    return trip


def whole(trip: Trip, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that ``trip`` starts with its first call."""

    @functools.wraps(function)
    def traced(*args: Any, **more: Any) -> Any:
        if trip.trips:
            return function(*args, **more)
        with trip.on():
            return function(*args, **more)

    return traced


def written(folder: Path) -> dict[str, Any]:
    """Write pictures of noise for two sites, as PNG; return their settings."""
    import numpy as np
    from PIL import Image

    for number, site in enumerate(SITES):
        (folder / site).mkdir(parents=True)
        rng, listed = np.random.default_rng(number), {}
        for split in ("training", "validation", "test"):
            listed[split] = [{"image": f"{split}_{i}.png", "label": i % CLASSES} for i in range(IMAGES)]
            for entry in listed[split]:
                pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / site / str(entry["image"]))
        (folder / site / "datalist.json").write_text(json.dumps(listed))
    return {site: {"data_root": str(folder / site)} for site in SITES}


def measured(settings: list[str], bounded: bool = False) -> dict[str, Trip]:
    """Return the trips, by name; ``bounded``: with the bounds of an exported job."""
    from fairflare.cli.options import parse_settings
    from fairflare.federation.collecting.collector import Collector
    from fairflare.federation.plan.plan import make_plan
    from fairflare.federation.transports.local import run_local
    from fairflare.tasks.images import ImageData

    trips = {name: Trip() for name in ("--set", "image to batch", "reply read", "reply kept", "reports to sum")}

    def plan(items: list[str]) -> Any:
        given = SMALL | parse_settings(items)
        bounds = {"max_weight": "auto", "max_excess": 0.33, "max_update_norm": 5.0} if bounded else {}
        return make_plan("fed_lwr", task="classification", sites=2, num_rounds=1, settings=given, **bounds)

    plan([])  # reads what a process reads only once, before the count
    with trips["--set"].on():
        made = plan(settings)

    def first_batch(data: ImageData, split: str, **options: Any) -> Any:
        if split == "training" and "shuffle_seed" in options and not trips["image to batch"].trips:
            with trips["image to batch"].on():
                next(iter(batches(data, split, **options)))
        return batches(data, split, **options)

    batches = ImageData.batches
    with tempfile.TemporaryDirectory(prefix="fairflare_trips_") as folder, ExitStack() as patches:
        local = written(Path(folder) / "data")
        patches.enter_context(mock.patch.object(ImageData, "batches", first_batch))
        for name, method in (("reply read", "read_training"), ("reply kept", "keep"), ("reports to sum", "aggregate")):
            patches.enter_context(mock.patch.object(Collector, method, whole(trips[name], getattr(Collector, method))))
        run_local(made, Path(folder) / "run", {"sites": local})
    return trips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", default=["mix=0.5"], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--list", action="store_true", help="the ten functions of each trip that are called most")
    parser.add_argument("--bounded", action="store_true", help="with the bounds that an exported job has")
    parser.add_argument("--figure", action="store_true", help="follow a Dice to terminal and page instead")
    given = parser.parse_args()
    if given.figure:
        trip = figure()
        print(f"Dice to terminal and page: {trip.files} files, {len(trip.calls)} functions hold it")
        print(*(f"  {file}: {function}" for file, function in trip.calls if given.list), sep="\n")
        return
    trips = measured(given.settings, given.bounded)
    print("| trip | files entered | calls | of them checks |")
    print("| --- | ---: | ---: | ---: |")
    for name, trip in trips.items():
        print(f"| {name} | {trip.files} | {trip.calls.total()} | {trip.share:.0%} |")
    for name, trip in trips.items() if given.list else ():
        print(
            f"\n{name}:", *(f"{n:6} {file}:{function}" for (file, function), n in trip.calls.most_common(10)), sep="\n"
        )


if __name__ == "__main__":
    main()
