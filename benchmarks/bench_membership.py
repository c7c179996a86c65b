"""Ask whether an image was among a site's training images: an overfitted model, without and with privacy.

Three sites with 30 synthetic images each, two in five with a wrong label, train FedAvg on them, long enough to learn
them by heart. Two attacks of a server rank a site's training images and as many others of the same making: by the
final model's loss (Yeom et al., CSF 2018), and by the cosine of an image's gradient at the received model with the
site's update, mean over the rounds (as Nasr et al., IEEE S&P 2019). Printed is the area under the ROC curve, mean over
the sites, then mean and standard deviation over seeds: 0.5 is a guess.

    python benchmarks/bench_membership.py [--epsilon 8 2] [--seeds 0 1 2]      # needs fairflare[dp]

The noise is the least, to a tenth, with which all rounds together stay below epsilon at delta .1 / n, by the site's own
accountant. "Allowed" is the largest area that the guarantee leaves to any attack: 1 - (1 - delta)^2 / (1 + e^epsilon),
from the region of Kairouz et al., ICML 2015.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from fairflare.exchange.messages import TASK_TRAIN, SiteTask
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.training import LocalTraining
from fairflare.privacy import ledger
from fairflare.tasks.classification import ClassificationTask

State = dict[str, torch.Tensor]
SITES, IMAGES, ROUNDS = ("site-1", "site-2", "site-3"), 30, 8
COUNTED = ledger.epsilon
OTHER = {"site-1": "site-4", "site-2": "site-5", "site-3": "site-6"}  # whose images are not trained on
TRAINING: dict[str, Any] = {"local_epochs": 8, "batch_size": 10, "learning_rate": 2e-3, "optimizer": "adam"}


def pictures(seed: int) -> ClassificationTask:
    """Return a task of twice as many sites as train: the images of the others are those that nobody trained on."""
    twice = 2 * len(SITES)
    return ClassificationTask(
        image_size=(32, 32), network="vit_mini", phantom="fundus", phantom_sites=twice, partition="iid",
        phantom_samples=twice * IMAGES, phantom_test=80, corrupted_sites=0, camera_shift=0.0, label_noise_sites=twice,
        phantom_seed=seed,
    )  # fmt: skip


def least_noise(target: float, rate: float, steps: int, delta: float) -> float:
    """Return the least noise multiplier, to a tenth, with which so many steps cost at most the target."""
    return next(z for z in np.arange(0.5, 20, 0.1).round(1).tolist() if COUNTED([(z, rate, steps)], delta)[0] <= target)


def trained(task: ClassificationTask, privacy: dict[str, Any], seed: int, place: Path) -> list[tuple[State, Any]]:
    """Train all rounds; return the model that each began with and the sites' updates, and the last model."""
    own = {"privacy": privacy, "state_root": str(place)} if privacy else {}
    workers = {s: SiteWorker(s, task, LocalTraining(**TRAINING), own, place / s, num_threads=1) for s in SITES}
    torch.manual_seed(seed)
    seen: list[tuple[State, Any]] = [(dict(task.build_model().state_dict()), {})]
    for current in range(ROUNDS):
        state = seen[-1][0]
        replies = {s: one.perform(SiteTask(TASK_TRAIN, state, current, ROUNDS, seed)) for s, one in workers.items()}
        updates: dict[str, Any] = {site: reply.update for site, reply in replies.items()}
        assert all(updates.values()), replies
        seen[-1] = state, updates
        seen.append(({n: t + sum(one[n] for one in updates.values()) / len(SITES) for n, t in state.items()}, {}))
    return seen


def attacks(task: ClassificationTask, seen: list[tuple[State, Any]]) -> list[float]:
    """Return the area under the curve of both attacks, mean over the sites."""
    model, found = task.build_model().eval(), []
    for site, other in OTHER.items():
        images = [
            (i, t) for name in (site, other) for i, t in task.open_site(name, {}).batches("training", batch_size=1)
        ]
        scores = np.zeros((2, len(images)))
        for state, updates in seen:
            model.load_state_dict(state)
            for number, (inputs, targets) in enumerate(images):
                loss = task.sample_losses(model(inputs), targets).sum()
                if not updates:
                    scores[0, number] = -float(loss.detach())
                    continue
                pairs = list(
                    zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True)
                )
                gradient = torch.cat([own.flatten() for _, own in pairs])
                update = torch.cat([updates[site][name].flatten() for (name, _), _ in pairs])
                scores[1, number] -= float(torch.cosine_similarity(gradient, update, dim=0))
        truth = np.arange(len(images)) < len(images) // 2
        found.append([roc_auc_score(truth, of) for of in scores])
    return np.mean(found, axis=0).tolist()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, nargs="*", default=[8, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    delta, each = 0.1 / IMAGES, math.ceil(IMAGES / TRAINING["batch_size"])
    print("| epsilon | noise | allowed | by loss | by gradient |\n| --- | --- | --- | --- | --- |")
    for target in (math.inf, *given.epsilon):
        private: dict[str, Any] = {}
        if target < math.inf:
            noise = least_noise(target, 1 / each, ROUNDS * TRAINING["local_epochs"] * each, delta)
            private = {"epsilon": target, "noise": noise, "delta": delta}
        ledger.epsilon = lambda *_: (0.0, "counted before, as a whole")
        found = []
        for seed in given.seeds:
            with tempfile.TemporaryDirectory() as place:
                task = pictures(seed)
                found.append(attacks(task, trained(task, private, seed, Path(place))))
        told = [f"{m:.2f} ({s:.2f})" for m, s in zip(np.mean(found, 0), np.std(found, 0, ddof=1), strict=True)]
        allowed = 1 - (1 - delta) ** 2 / (1 + math.exp(min(target, 700)))
        print(f"| {target:g} | {private.get('noise', 0):g} | {allowed:.3f} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
