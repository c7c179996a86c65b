"""Ask what privacy costs: accuracy, worst site and spread of four methods without noise, and at epsilon 8 and 2.

Two real sets: white blood cells by type (three laboratories), and chest X-rays with and without pneumonia of one
hospital, dealt to four sites of very different size. Every site has noise of its own: the least with which all its
rounds stay below epsilon at delta .1 / n, by RDP; twice as many gradients a step (FedISM+) need 1.41 times as much. The
final model is measured here, on the validation and the test images together, from which no model was chosen.

    python benchmarks/bench_privacy.py --data shared/data [--out docs/results/data] [--sets cells xray] [--seeds 0 1 2]
    python benchmarks/bench_privacy.py --weights     # how noise moves weights: no training, no data

Without ``reports`` in the sites' files Fed-LWR and q-FedAvg are FedAvg under privacy, and FedISM+ (L) is SALT alone:
the run says so. Their rows at epsilon 8 and 2 are therefore FedAvg's own runs. The steps are the shipped ones, but for
their speed: the gradients of the images of a batch are taken together, which is compared with the shipped loop first,
and the noise is torch's.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.optimize import brentq
from scipy.stats import t as student
from torch.func import functional_call, grad, vmap

from fairflare.data.datalist import write_datalist
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.rule import RoundInputs, Rule
from fairflare.methods.fed_ism import FedISM
from fairflare.methods.q_fed_avg import QFedAvg
from fairflare.privacy import ledger
from fairflare.privacy.reports import LOSS_BOUND, noisy_mean, one_release
from fairflare.privacy.secret import SecretDraws
from fairflare.privacy.training import PrivateLoop
from fairflare.reporting.notes import without_notes
from fairflare.reporting.results import read_results

ROUNDS, EPOCHS, BATCH = 6, 2, 32
METHODS = {"FedAvg": "fed_avg", "FedISM+ (L)": "fed_ism_plus_l", "Fed-LWR": "fed_lwr", "q-FedAvg": "q_fed_avg"}
SHIPPED = PrivateLoop._set_gradients
SIZES = {"site-1": 480, "site-2": 240, "site-3": 120, "site-4": 60}  # X-rays for training


# ------------------------------------------------------------------------------------------------ the data


def cells(source: Path, place: Path) -> tuple[dict[str, str], int]:
    """Write the white cells of three laboratories, and return the folder of each and the number of channels."""
    for name in ("jtsc", "cellavision", "bccd"):
        with np.load(source / f"wbc_{name}.npz") as of:
            known = of["labels"] >= 0
            order = np.random.default_rng(0).permutation(int(known.sum()))
            listed(place / name, of["images"][known][order], of["labels"][known][order], 0.6)
    return {name: str(place / name) for name in ("jtsc", "cellavision", "bccd")}, 3


def xray(source: Path, place: Path) -> tuple[dict[str, str], int]:
    """Write the X-rays of four sites: different numbers for training, as many for the test."""
    with np.load(source / "pneumoniamnist_subset.npz") as of:
        images, labels = of["train_images"], of["train_labels"]
    order, at = np.random.default_rng(0).permutation(len(images)), 0
    for name, count in SIZES.items():
        own = order[at : at + count + 160]
        listed(place / name, images[own], labels[own], count / (count + 160))
        at += count + 160
    return {name: str(place / name) for name in SIZES}, 1


def listed(folder: Path, images: Any, labels: Any, share: float) -> None:
    """Write a site's images of 32x32, the first ``share`` of them for training, the others in halves."""
    folder.mkdir(parents=True)
    cuts = [0, round(share * len(images)), round((1 + share) / 2 * len(images)), len(images)]
    splits: dict[str, Any] = {}
    for split, low, high in zip(("training", "validation", "test"), cuts, cuts[1:], strict=False):
        splits[split] = [{"image": f"{k}.png", "label": int(labels[k])} for k in range(low, high)]
    for k, image in enumerate(images):
        Image.fromarray(image).resize((32, 32)).save(folder / f"{k}.png")
    write_datalist(folder / "datalist.json", splits, class_names=[f"class {k}" for k in range(int(labels.max()) + 1)])


# ------------------------------------------------------------------------------------------------ quick steps


def together(
    self: Any, trained: Any, units: Any, chance: float, drawn: Sequence[int], draws: Any, most: Iterator[int]
) -> torch.Tensor:
    """Set the gradients as the shipped loop does, of all drawn images at once."""
    next(most)
    if getattr(self, "all", None) is None:
        self.all = next(iter(self.run.data.batches("training", batch_size=10_000)))
    inputs, targets = self.all
    params = {name: p.detach() for name, p in self.model.named_parameters()}

    def loss(of: Any, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.run.task.loss(functional_call(self.model, of, (image[None],)), target[None])

    numbers = [units.members[k][0] for k in drawn]
    total = [torch.zeros_like(p) for p in trained]
    if numbers:
        found = vmap(grad(loss), (None, 0, 0), randomness="different")(params, inputs[numbers], targets[numbers])
        each = list(found.values())
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each]).norm(dim=0)
        factors = (self.clip / (norms + 1e-6)).clamp(max=1)
        total = [torch.einsum("n,n...->...", factors, g) for g in each]
    for parameter, summed in zip(trained, total, strict=True):
        noised = summed + self.noise * self.clip * torch.randn_like(summed)
        parameter.grad = noised / (len(units.members) * chance)
    return torch.zeros(())


def compared(self: Any, trained: Any, *given: Any) -> torch.Tensor:
    """Compare one step without noise with the shipped one, then take the quick one."""
    units, chance, drawn, *_ = given
    noise, self.noise = self.noise, 0.0
    SHIPPED(self, trained, units, chance, drawn[:8], SecretDraws(), iter([0]))
    shipped = [p.grad.clone() for p in trained]
    together(self, trained, units, chance, drawn[:8], None, iter([0]))
    for parameter, other in zip(trained, shipped, strict=True):
        torch.testing.assert_close(parameter.grad, other, atol=1e-6, rtol=1e-3)
    self.noise = noise
    PrivateLoop._set_gradients = together  # type: ignore[method-assign]
    return together(self, trained, *given)


def least_noise(target: float, count: int, gradients: int) -> float:
    """Return the noise multiplier with which all rounds of a site cost the target, by RDP."""
    from opacus.accountants import RDPAccountant

    each = math.ceil(count / BATCH)

    def over(z: float) -> float:
        accountant = RDPAccountant()
        accountant.history = [(z / math.sqrt(gradients), 1 / each, ROUNDS * EPOCHS * each)]
        return float(accountant.get_epsilon(0.1 / count)) - target

    return math.ceil(100 * brentq(over, 0.3, 100, xtol=1e-3)) / 100


# ------------------------------------------------------------------------------------------------ the runs


def accuracy(folders: dict[str, str], channels: int, classes: int, method: str, target: float, seed: int) -> Any:
    """Train one run and return the final model's accuracy by site, and what the run says of its method."""
    settings = {
        "image_size": [32, 32], "in_channels": channels, "network": "vit_mini", "num_classes": classes,
        "batch_size": BATCH, "local_epochs": EPOCHS, "keep_optimizer_state": False, "optimizer": "adam",
        "learning_rate": 1e-3,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        own: dict[str, Any] = {}
        plan = make_plan(
            method, task="classification", sites=list(folders), num_rounds=ROUNDS, settings=settings, seed=seed
        )
        for name, folder in folders.items():
            own[name] = {"data_root": folder}
            if target < math.inf:
                count = plan.task.open_site(name, {"data_root": folder}).num_samples("training")
                noise = least_noise(target, count, 1 + (method == "fed_ism_plus_l"))
                own[name] |= {"privacy": {"epsilon": target, "noise": noise, "delta": 0.1 / count}}
                own[name] |= {"state_root": f"{place}/root"}
        folder = run_local(plan, Path(place) / "run", {"sites": own})
        said = " ".join(without_notes(read_results(folder)))
        model = plan.task.build_model()
        weights = torch.load(next(Path(place).rglob("FL_global_model.pt")), weights_only=True)["model"]
        model.load_state_dict(weights)
        model.eval()
        found = {}
        for name in folders:
            data, right = plan.task.open_site(name, {"data_root": folders[name]}), []
            for split in ("validation", "test"):
                for inputs, targets in data.batches(split, batch_size=256):
                    with torch.no_grad():
                        right += (model(inputs).argmax(1) == targets).tolist()
            found[name] = float(np.mean(right))
    return found, said


def figures(rows: dict[str, list[dict[str, float]]], table: str, seeds: str) -> Iterator[list[Any]]:
    """Yield the stored figures of all rows: each site, average, spread and worst, and differences to the first row."""
    many = {}
    for row, runs in rows.items():
        by = {name: np.array([run[name] for run in runs]) for name in runs[0]}
        sites = np.array([list(run.values()) for run in runs])
        by |= {"average": sites.mean(1), "std": sites.std(1), "worst": sites.min(1)}
        many[row] = by
        for name, values in by.items():
            yield [table, row, "", name, seeds, round(values.mean(), 4), round(values.std(), 4), *[""] * 6]
    first = next(iter(rows))
    for row, by in many.items():
        for name in ("average", "std", "worst") if row != first and len(seeds.split()) > 1 else ():
            gap = by[name] - many[first][name]
            half = student.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / math.sqrt(len(gap))
            low, high = gap.mean() - half, gap.mean() + half
            better = (low > 0) if name != "std" else (high < 0)
            worse = (high < 0) if name != "std" else (low > 0)
            verdict = "better" if better else "worse" if worse else "within"
            yield [table, row, first, name, seeds, *(round(v, 4) for v in (gap.mean(), gap.std(ddof=1), low, high)),
                   verdict, "", "", ""]  # fmt: skip


# ------------------------------------------------------------------------------------------------ weights


def weights_table(draws: int = 1000) -> None:
    """Print how noise moves the weights of six sites, by the shipped noise and the shipped rules."""
    true = dict(zip("abcdef", (0.9, 0.6, 0.5, 0.4, 0.35, 0.3), strict=True))
    columns = [(20, 0.1), (20, 1.0), (100, 0.1), (100, 1.0), (1000, 0.1), (1000, 1.0)]
    print("| n, epsilon a round |", " | ".join(f"{n}, {e:g}" for n, e in columns), "|")
    print("| --- |", " --- |" * len(columns))

    def of(rule: Rule, field: str, losses: list[dict[str, float]]) -> dict[str, float]:
        for number, told in enumerate(losses):
            reports = {site: {field: loss} for site, loss in told.items()}
            sites = dict.fromkeys(told, 1.0)
            found = rule.weigh(RoundInputs(number, len(losses), [*told], sites, reports, {}, {}, {}))
        assert found.sites is not None
        return found.sites

    for title, make, field, rounds in (
        ("q-FedAvg (weighted), q 1", lambda: QFedAvg(q_form="weighted"), "probe_loss", 1),
        ("FedISM+ (L), q 2, beta .5, 20 rounds", lambda: FedISM(variant="L"), "perturbed_loss", 20),
    ):
        exact = of(make(), field, [true] * rounds)["a"]
        cells_ = []
        for n, target in columns:
            z = brentq(lambda z, target=target: one_release(z, 1e-5) - target, 0.1, 200)
            found = []
            for _ in range(draws):
                told = [
                    {s: noisy_mean([loss] * n, 0.0, LOSS_BOUND, z) for s, loss in true.items()} for _ in range(rounds)
                ]
                found.append(of(make(), field, told))
            worst = np.array([w["a"] for w in found])
            first = np.mean([max(w, key=w.__getitem__) == "a" for w in found])
            cells_.append(f"{worst.std():.3f}; {first:.2f}")
        print(f"| {title} (true {exact:.3f}) |", " | ".join(cells_), "|", flush=True)


def main() -> None:
    """Run what is asked for; each figure is printed at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", action="store_true", help="print the table of weights and end")
    parser.add_argument("--data", type=Path, help="folder of the .npz files")
    parser.add_argument("--out", type=Path, help="folder for privacy_cost.csv")
    parser.add_argument("--sets", nargs="+", default=["cells", "xray"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    if given.weights:
        weights_table()
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ledger.epsilon = lambda *_: (0.0, "counted before, as a whole")
    PrivateLoop._set_gradients = compared  # type: ignore[method-assign]
    rows: list[list[Any]] = []
    for name in given.sets:
        with tempfile.TemporaryDirectory() as place:
            folders, channels = {"cells": cells, "xray": xray}[name](given.data, Path(place))
            found: dict[str, list[dict[str, float]]] = {
                f"{title}, {eps}": [] for eps in ("no noise", "epsilon 8", "epsilon 2") for title in METHODS
            }
            for seed in given.seeds:
                for eps, target in (("no noise", math.inf), ("epsilon 8", 8.0), ("epsilon 2", 2.0)):
                    for title, method in METHODS.items():
                        same = target < math.inf and title in ("Fed-LWR", "q-FedAvg")
                        if same:
                            run, said = found[f"FedAvg, {eps}"][-1], "the same run as FedAvg"
                        else:
                            run, said = accuracy(folders, channels, 5 if name == "cells" else 2, method, target, seed)
                        found[f"{title}, {eps}"].append(run)
                        print(name, seed, f"{title}, {eps}", {s: round(v, 3) for s, v in run.items()}, said, flush=True)
            rows += figures(found, name, " ".join(map(str, given.seeds)))
        if given.out:
            head = ["table", "row", "reference", "measure", "seeds", "mean", "sd", "low", "high", "verdict"]
            head += ["p", "p_holm", "smallest"]
            with (given.out / "privacy_cost.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([head, *rows])
    packages = ("fairflare", "torch", "monai", "numpy", "opacus")
    print(json.dumps({package: version(package) for package in packages}))


if __name__ == "__main__":
    main()
