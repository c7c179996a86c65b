"""Ask what privacy costs: accuracy, worst site and spread of four methods without noise, and at epsilon 8 and 2.

Two real sets, each of one hospital and dealt to four sites of very different size: red blood cells, spherocyte or not,
and chest X-rays, pneumonia or not. "Each alone" is a run of each site without the others, tested on the images of all:
what noise costs a small site. Every site has noise of its own: the least with which all its rounds stay below epsilon
at delta .1 / n, by RDP; twice as many gradients a step (FedISM+) need 1.41 times as much. The final model is measured
here by balanced accuracy, on the validation and the test images together, from which no model was chosen.

    python benchmarks/bench_privacy.py --data shared/data --out runs [--sets reds xray] [--seeds 0 1 2]
    python benchmarks/bench_privacy.py --weights     # how noise moves weights: no training, no data

Runs are added to runs/privacy_cost.jsonl, and the figures of all runs there are written to runs/privacy_cost.csv.

Without ``reports`` in the sites' files Fed-LWR and q-FedAvg are FedAvg under privacy, and FedISM+ (L) is SALT alone:
the run says so. The first two have no rows at epsilon 8 and 2. The steps are the shipped ones, but for
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
from functools import cache
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
from fairflare.reporting.notes import note_missing_parts
from fairflare.reporting.results import read_results

ROUNDS, EPOCHS, BATCH = 5, 1, 32
METHODS = {"FedAvg": "fed_avg", "FedISM+ (L)": "fed_ism_plus_l", "Fed-LWR": "fed_lwr", "q-FedAvg": "q_fed_avg"}
SHIPPED = PrivateLoop._set_gradients
SIZES = {"site-1": 480, "site-2": 240, "site-3": 120, "site-4": 60}  # images for training, or a few more
LEVELS = {"no noise": math.inf, "epsilon 8": 8.0, "epsilon 2": 2.0}
NOISE = torch.Generator()


# ------------------------------------------------------------------------------------------------ the data


def reds(source: Path, place: Path) -> tuple[dict[str, str], int]:
    """Write red cells of whole smears at four sites: all spherocytes, and others of which there are as many."""
    draw = np.random.default_rng(0)
    with np.load(source / "rbc12_chula.npz") as of:
        images, labels, smears = of["images"], (of["labels"] == 3).astype(int), of["image_no"]
    chosen = [*np.flatnonzero(labels), *draw.permutation(np.flatnonzero(labels == 0))[: labels.sum()]]
    rank = draw.permutation(smears.max() + 1)[smears]
    order = np.array(sorted(chosen, key=rank.__getitem__))
    return dealt(images[order], labels[order], place, smears[order]), 3


def xray(source: Path, place: Path) -> tuple[dict[str, str], int]:
    """Write the X-rays of four sites."""
    with np.load(source / "pneumoniamnist_subset.npz") as of:
        order = np.random.default_rng(0).permutation(len(of["train_images"]))
        return dealt(of["train_images"][order], of["train_labels"][order], place, order), 1


def dealt(images: Any, labels: Any, place: Path, smears: Any) -> dict[str, str]:
    """Write four sites, with different numbers for training; what one smear shows is in one split of one site."""
    edges = [k for k in range(1, len(images)) if smears[k] != smears[k - 1]]
    tests, at = min(160, (len(images) - sum(SIZES.values())) // len(SIZES)), 0
    for name, count in SIZES.items():
        cut, end = (next(k for k in [*edges, len(images)] if k >= at + by) for by in (count, count + tests - 8))
        listed(place / name, images[at:end], labels[at:end], (cut - at) / (end - at))
        at = end
    return {name: str(place / name) for name in SIZES}


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
        noised = summed + self.noise * self.clip * torch.randn(summed.shape, generator=NOISE)
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


@cache
def least_noise(target: float, count: int, gradients: int) -> float:
    """Return the noise multiplier with which all rounds of a site cost the target, by RDP."""
    from opacus.accountants import RDPAccountant

    each = math.ceil(count / BATCH)

    orders = [1.5, 1.75, 2.25, 2.5, 3.5, *range(2, 64)]  # many take long

    def over(z: float) -> float:
        accountant = RDPAccountant()
        accountant.history = [(z / math.sqrt(gradients), 1 / each, ROUNDS * EPOCHS * each)]
        return float(accountant.get_epsilon(0.1 / count, alphas=orders)) - target

    return math.ceil(100 * brentq(over, 0.3, 100, xtol=1e-3)) / 100


# ------------------------------------------------------------------------------------------------ the runs


def accuracy(
    folders: dict[str, str], tests: dict[str, str], channels: int, method: str, target: float, seed: int
) -> Any:
    """Train one run and return the final model's balanced accuracy at each of ``tests``, and what the run says."""
    settings = {
        "image_size": [32, 32], "in_channels": channels, "network": "vit_mini", "num_classes": 2,
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
        said = " ".join(note_missing_parts(read_results(folder)))
        model = plan.task.build_model()
        weights = torch.load(next(Path(place).rglob("FL_global_model.pt")), weights_only=True)["model"]
        model.load_state_dict(weights)
        model.eval()
        found = {}
        for name, folder_ in tests.items():
            data, right = plan.task.open_site(name, {"data_root": folder_}), ([], [])
            for split in ("validation", "test"):
                for inputs, targets in data.batches(split, batch_size=256):
                    with torch.no_grad():
                        for target, own in zip(targets.tolist(), model(inputs).argmax(1).tolist(), strict=True):
                            right[target].append(own == target)
            found[name] = float(np.mean([np.mean(of) for of in right]))
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
            if table != "alone" or name in runs[0]:
                yield [table, row, "", name, seeds, round(values.mean(), 4), round(values.std(), 4), *[""] * 6]
    first = next(iter(rows), "")
    for row, by in many.items():
        for name in ("average", "std", "worst") if row != first and table != "alone" and len(seeds.split()) > 1 else ():
            gap = by[name] - many[first][name]
            half = student.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / math.sqrt(len(gap))
            low, high = gap.mean() - half, gap.mean() + half
            better = (low > 0) if name != "std" else (high < 0)
            worse = (high < 0) if name != "std" else (low > 0)
            verdict = "better" if better else "worse" if worse else "within noise"
            yield [table, row, first, name, seeds, *(round(v, 4) for v in (gap.mean(), gap.std(ddof=1), low, high)),
                   verdict, "", "", ""]  # fmt: skip


def runs_of(name: str, folders: dict[str, str], channels: int, seed: int) -> Iterator[dict[str, Any]]:
    """Train all rows of a set with a seed, and yield each row's figures by site."""
    for level, target in LEVELS.items():
        about = {"set": name, "seed": seed}
        for title, method in METHODS.items():
            if target == math.inf or title not in ("Fed-LWR", "q-FedAvg"):
                run, said = accuracy(folders, folders, channels, method, target, seed)
                yield about | {"row": f"{title}, {level}", "sites": run, "said": said}
        alone = {}
        for site, folder in folders.items():
            run, _ = accuracy({site: folder}, folders, channels, "fed_avg", target, seed)
            alone[site] = float(np.mean(list(run.values())))
        yield about | {"row": f"each alone, {level}", "sites": alone, "said": ""}


# ------------------------------------------------------------------------------------------------ weights


def weights_table(draws: int = 200) -> None:
    """Print how noise moves the weights of six sites, by the shipped noise and the shipped rules."""
    true = dict(zip("abcdef", (0.9, 0.6, 0.5, 0.4, 0.35, 0.3), strict=True))
    columns = [(20, 0.1), (20, 1.0), (100, 0.1), (100, 1.0), (1000, 0.1), (1000, 1.0)]
    print("| n, epsilon a round |", " | ".join(f"{n}, {e:g}" for n, e in columns), "| 20 to 1000, 1 |")
    print("| --- |", " --- |" * (len(columns) + 1))

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
        for n, target in [*columns, (0, 1.0)]:
            many = dict(zip(true, (20, 50, 100, 200, 500, 1000) if n == 0 else [n] * 6, strict=True))
            z = brentq(lambda z, target=target: one_release(z, 1e-5) - target, 0.1, 200)
            found = []
            for _ in range(draws):
                told = [
                    {s: noisy_mean([loss] * many[s], 0.0, LOSS_BOUND, z) for s, loss in true.items()}
                    for _ in range(rounds)
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
    parser.add_argument("--out", type=Path, help="folder for the runs and figures")
    parser.add_argument("--sets", nargs="+", default=["reds", "xray"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    if given.weights:
        weights_table()
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    NOISE.seed()
    ledger.epsilon = lambda *_: (0.0, "counted before, as a whole")
    PrivateLoop._set_gradients = compared  # type: ignore[method-assign]
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / "privacy_cost.jsonl"
    for name in given.sets:
        with tempfile.TemporaryDirectory() as place:
            folders, channels = {"reds": reds, "xray": xray}[name](given.data, Path(place))
            for seed in given.seeds:
                for run in runs_of(name, folders, channels, seed):
                    print(json.dumps(run), flush=True)
                    with kept.open("a") as file:
                        file.write(json.dumps(run) + "\n")
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    rows = [["table", "row", "reference", "measure", "seeds", "mean", "sd", "low", "high", "verdict"]]
    rows[0] += ["p", "p_holm", "smallest"]
    seeds = " ".join(str(seed) for seed in sorted({run["seed"] for run in found}))
    tables: dict[str, dict[str, list[dict[str, float]]]] = {"reds": {}, "xray": {}, "alone": {}}
    for run in sorted(found, key=lambda run: (run["set"], run["seed"])):
        alone = run["row"].startswith("each alone")
        row = f"{run['set']}, {run['row'].removeprefix('each alone, ')}" if alone else run["row"]
        tables["alone" if alone else run["set"]].setdefault(row, []).append(run["sites"])
    for name, by in tables.items():
        rows += figures(by, name, seeds)
    with (given.out / "privacy_cost.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    packages = ("fairflare", "torch", "monai", "numpy", "opacus")
    print(json.dumps({package: version(package) for package in packages}))


if __name__ == "__main__":
    main()
