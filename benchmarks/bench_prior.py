"""Measure what Fed-MAS's second network costs a site, in time and memory.

One site's ``train`` task of the endoscopy phantom, in a process of its own: the real site half, model and data, with

- *BSM*: balanced softmax alone, the epoch without a prior;
- *features kept* (the default): the prior's features of the images as they are are computed in the first round and
  kept; they serve the measurement of the received model, and training where it changes no image (``--plain``);
- *nothing kept*: ``cache_features=False``.

``round 1`` has the prior's pass over the images in it, later rounds not; both have the pass that measures the received
model by class. Ratios are to BSM's later rounds. Time is of the processor, which a busy machine stretches less than the
clock; memory is the peak growth of the resident size, and what the kept features take.

    python benchmarks/bench_prior.py [--plain] [--images 400] [--epochs 1] [--rounds 4] [--networks embedded resnet50]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_aggregation import PeakMemory

CASES = {"bsm": "BSM", "kept": "features kept", "every": "nothing kept"}
WIDTHS = {"embedded": 96, "resnet18": 512, "resnet50": 2048, "densenet121": 1024}


def run_case(args: argparse.Namespace) -> dict[str, float]:
    import torch

    from fairflare.exchange.messages import SiteTask
    from fairflare.federation.site.worker import SiteWorker
    from fairflare.methods.base.training import LocalTraining
    from fairflare.methods.fed_mas import RescueTraining
    from fairflare.tasks.classification import ClassificationTask
    from fairflare.tasks.priors import build_encoder

    torch.set_num_threads(1)
    network = args.networks[0]
    task = ClassificationTask(
        phantom="endoscopy",
        phantom_sites=1,
        phantom_samples=args.images,
        partition="iid",
        corrupted_sites=0,
        image_size=(args.size, args.size),
        features=args.features,
        max_pool=args.features[0] >= 64,
        projector_dim=None if args.case == "bsm" else WIDTHS[network],
    )
    common = {"batch_size": 32, "local_epochs": args.epochs, "criterion": "balanced_softmax"}
    common["augment"] = not args.plain
    with tempfile.TemporaryDirectory() as folder:
        file = None
        if network != "embedded":  # speed does not depend on the weights
            file = str(Path(folder) / "prior.pt")
            torch.manual_seed(0)
            torch.save(build_encoder(network)[0].state_dict(), file)
        training: LocalTraining
        if args.case == "bsm":
            training, told = LocalTraining(**common), {}
        else:
            training = RescueTraining(**common, prior_network=network, prior=file, cache_features=args.case == "kept")
            told = {"rescue_factor": True}
        site = SiteWorker("site-1", task, training, {}, Path(folder) / "state", num_threads=1)
        torch.manual_seed(1)
        state = task.build_model().state_dict()
        # Plain training in a state folder of its own draws the images, imports modules and warms up.
        warm = SiteWorker("site-1", task, LocalTraining(**common), {}, Path(folder) / "warm", num_threads=1)
        for _ in range(2):
            warm.perform(SiteTask("train", dict(state), 0, 9, 0))
        site._data = warm._data
        seconds = []
        with PeakMemory() as memory:
            for number in range(args.rounds):
                started = time.process_time()
                reply = site.perform(SiteTask("train", dict(state), number, args.rounds, 0, told))
                seconds.append((time.process_time() - started) / args.epochs)
                if reply.status != "ok":
                    raise RuntimeError(reply.reason)
                state = {name: tensor + reply.update[name] for name, tensor in state.items()}  # type: ignore[index]
        kept = 0.0
        if args.case == "kept":
            kept = training._priors._caches["site-1"].features.nbytes / 2**20  # type: ignore[attr-defined]
    return {"first": seconds[0], "later": min(seconds[1:]), "megabytes": memory.megabytes, "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of Fed-MAS's prior network at a site")
    parser.add_argument("--images", type=int, default=400, help="training and validation images")
    parser.add_argument("--size", type=int, default=48, help="pixels")
    parser.add_argument("--features", type=int, nargs=4, default=[16, 32, 64, 128], help="of the ResNet-18 in training")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2, help="runs of each case; the best counts")
    parser.add_argument("--networks", nargs="+", choices=sorted(WIDTHS), default=["embedded", "resnet50"])
    parser.add_argument("--plain", action="store_true", help="train on the images as they are, without augmentation")
    parser.add_argument("--case", choices=sorted(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    if args.case:
        print(json.dumps(run_case(args)))
        return

    def measure(case: str, network: str) -> dict[str, float]:
        own = ["--case", case, "--networks", network, "--features", *map(str, args.features)]
        for name in ("images", "size", "epochs", "rounds"):
            own += [f"--{name}", str(getattr(args, name))]
        own += ["--plain"] if args.plain else []
        done = subprocess.run([sys.executable, __file__, *own], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"case {case} with {network} failed:\n{done.stderr}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    rows = [("bsm", "embedded"), *((case, n) for n in args.networks for case in ("kept", "every"))]
    best: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(args.repeat):  # cases take turns, so that a busy moment does not affect one case only
        for row in rows:
            found = measure(*row)
            best[row] = {key: min(value, best.get(row, found)[key]) for key, value in found.items()}
    print(
        f"{args.images} images of {args.size}x{args.size}, ResNet-18 of widths {args.features}, {args.epochs} epoch(s)"
    )
    print(f"a round, {args.rounds} rounds, one thread; processor seconds an epoch\n")
    head = f"{'prior':<11}  {'case':<20}  {'round 1':>7}  {'ratio':>5}  {'later':>6}  {'ratio':>5}"
    print(f"{head}  {'peak MB':>7}  kept MB")
    base = best["bsm", "embedded"]["later"]
    for (case, network), row in best.items():
        print(
            f"{'-' if case == 'bsm' else network:<11}  {CASES[case]:<20}"
            f"  {row['first']:>7.3f}  {row['first'] / base:>5.2f}  {row['later']:>6.3f}  {row['later'] / base:>5.2f}"
            f"  {row['megabytes']:>7.0f}  {row['kept']:>7.2f}"
        )


if __name__ == "__main__":
    main()
