"""Measure what the synthetic classification data allow: one model trained on the images of all sites together.

An upper mark for the federations of the same phantom, and the check that their long tail has images enough to be
learned. Images, network and augmentation are those of a method's job; training is balanced softmax, Adam with a cosine.
Tested are the sites' own test sets, each by itself, and a common one that is larger than the job's, so that 40 images
of every class count.

    python benchmarks/centralised.py
    python benchmarks/centralised.py --method fed_ism --set corrupted_sites=0 --epochs 10
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import torch

from fairflare.cli.options import parse_settings
from fairflare.federation.plan.plan import make_plan
from fairflare.methods.base.site_run import SiteStore
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.tasks.classification import ClassificationTask, PhantomClasses
from fairflare.tasks.images import PhantomImages

if TYPE_CHECKING:
    from fairflare.base.site_data import Batch

EACH = 40  # images of every class in the common test set


class Together(PhantomImages):
    """Hold the images of several sites as if they were one site's."""

    task: ClassificationTask

    def __init__(self, task: ClassificationTask, sites: Sequence[PhantomClasses]) -> None:
        super().__init__(task, "all")
        self.sites = sites
        self._arrays: dict[str, Batch] = {}

    def arrays(self, split: str) -> Batch:
        if split not in self._arrays:
            images, labels = zip(*(site.arrays(split) for site in self.sites), strict=True)
            self._arrays[split] = torch.cat(images), torch.cat(labels)
        return self._arrays[split]

    def num_samples(self, split: str) -> int:
        return len(self.arrays(split)[1])

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self.arrays(split)[1], minlength=self.task.classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="bsm_fl", help="whose job's data and network")
    parser.add_argument("--sites", type=int, default=0, help="default: the job's")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the phantom and of the training")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of the task")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [run(options, seed) for seed in options.seeds]
    print(f"\n{'':>18}  {'mean':>5}  over {len(found)} seed(s)")
    for name in found[0]:
        values = [result[name] for result in found]
        print(f"{name:>18}  {fmean(values):.3f}" + (f" ± {pstdev(values):.3f}" if len(values) > 1 else ""))


def run(options: argparse.Namespace, seed: int) -> dict[str, float]:
    started = time.process_time()
    settings = {**parse_settings(options.set), "phantom_seed": seed}
    job = make_plan(options.method, task="classification", sites=options.sites, settings=settings, min_sites=1)
    task = job.task
    if not isinstance(task, ClassificationTask):
        raise TypeError(f"{options.method} has no classification task")
    names = [f"site-{number}" for number in range(1, task.phantom_sites + 1)]
    sites = [task.open_site(name, {}) for name in names]
    data = Together(task, [site for site in sites if isinstance(site, PhantomClasses)])
    counts = data.class_counts("training").tolist()
    print(f"seed {seed}: {sum(counts)} training images of {len(sites)} sites, by class {counts}", flush=True)
    training = LocalTraining(
        optimizer="adam", learning_rate=1e-3, weight_decay=0.0, batch_size=32, augment=True, schedule="cosine",
        criterion="balanced_softmax", keep_optimizer_state=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = task.build_model()
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(options.epochs):
            trained = training.train(
                SiteRun(
                    site="all", task=task, data=data, device=torch.device("cpu"), current_round=epoch,
                    num_rounds=options.epochs, seed=1000 * seed + epoch, directives={},
                    store=SiteStore(Path(folder)), scratch=Path(folder),
                ),
                model,
            )  # fmt: skip
            print(f"  epoch {epoch + 1}: training loss {trained.train_loss:.3f}", flush=True)
    even = replace(task.plan(seed), num_test=EACH * task.classes, min_class_test=EACH)
    common = task.evaluate(model, PhantomClasses(task, "site-1", even, 0).batches("test_common", batch_size=100), "cpu")
    wanted = [*task.groups(), "balanced_accuracy"]
    result = {f"common {name}": common[name] for name in wanted}
    for name, site in zip(names, sites, strict=True):
        own = task.evaluate(model, site.batches("test", batch_size=100), "cpu")
        result[f"{name} own test"] = own["balanced_accuracy"]
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))
    recalls = [f"{name} {common[f'recall_{name}']:.2f}" for name in task.names()]
    print(f"  recall on the common test set: {', '.join(recalls)}")
    print(f"  {time.process_time() - started:.0f} processor seconds", flush=True)
    return result


if __name__ == "__main__":
    main()
