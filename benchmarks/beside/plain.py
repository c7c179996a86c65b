"""Run plain loops in one process: FedAvg, and a round of Fed-LWR as its authors describe theirs.

    python benchmarks/beside/plain.py fed_avg
    python benchmarks/beside/plain.py fed_lwr

Fed-LWR: unbiased HSIC of each batch of the validation images, summed over five passes, delta clipped to [1e-4, 0.99],
one weight for each site and layer (Yan et al., MICCAI 2024, and what is said of their code). Nothing is checked,
saved or sent.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping

import beside_common as common
import torch
from torch import Tensor, nn

PASSES = 5
Sites = list[dict[str, tuple[Tensor, Tensor]]]


def main(method: str) -> None:
    sites: Sites = [{split: common.images(k, split) for split in common.IMAGES} for k in range(common.SITES)]
    model = common.build()
    for number in range(common.ROUNDS):
        states = []
        for k, data in enumerate(sites):
            common.evaluate(model, *data["validation"])
            local = copy.deepcopy(model)
            common.train(local, *data["training"], seed=100 * number + k)
            states.append(local.state_dict())
        uniform = common.average(states, [1 / len(sites)] * len(sites))
        model.load_state_dict(uniform if method == "fed_avg" else by_layer(model, states, uniform, sites))
    scores = [common.evaluate(model, *data["test"]) for data in sites]
    print(f"test Dice: {', '.join(f'{score:.4f}' for score in scores)}")


def by_layer(
    model: nn.Module, states: list[Mapping[str, Tensor]], anchor: Mapping[str, Tensor], sites: Sites
) -> dict[str, Tensor]:
    names = [name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None]
    dissimilar = []
    for state, data in zip(states, sites, strict=True):
        a, b = copy.deepcopy(model), copy.deepcopy(model)
        a.load_state_dict(state)
        b.load_state_dict(anchor)
        dissimilar.append(1 - cka(a.eval(), b.eval(), names, data["validation"][0]).clamp(1e-4, 0.99))
    weights = torch.stack(dissimilar)
    weights = weights / weights.sum(0)
    layer = dict(zip(names, weights.T.tolist(), strict=True))
    return {key: common.mean([state[key] for state in states], layer[key.rpartition(".")[0]]) for key in states[0]}


@torch.no_grad()
def cka(a: nn.Module, b: nn.Module, names: list[str], x: Tensor) -> Tensor:
    found: dict[str, dict[str, Tensor]] = {"a": {}, "b": {}}
    for key, model in (("a", a), ("b", b)):
        for name, module in model.named_modules():
            if name in names:
                module.register_forward_hook(
                    lambda m, i, o, to=found[key], name=name: to.__setitem__(name, o.flatten(1))
                )
    sums = torch.zeros(3, len(names))
    for number in range(PASSES):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        for chosen in order.split(common.BATCH):
            if len(chosen) < 4:
                continue
            a(x[chosen]), b(x[chosen])
            for i, name in enumerate(names):
                k, l = (f[name] @ f[name].T for f in (found["a"], found["b"]))
                sums[:, i] += torch.stack([hsic(k, l), hsic(k, k), hsic(l, l)])
    return sums[0] / (sums[1] * sums[2]).sqrt()


def hsic(k: Tensor, l: Tensor) -> Tensor:
    n = len(k)
    k, l = k.clone().fill_diagonal_(0), l.clone().fill_diagonal_(0)
    both = (k * l.T).sum() + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k.sum(0) * l.sum(0)).sum()
    return both / (n * (n - 3))


if __name__ == "__main__":
    main(sys.argv[1])
