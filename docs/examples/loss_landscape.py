"""Draw the loss around a run's model along two random directions in which every filter is as long as the model's own.

python loss_landscape.py RUN OUT.png [SITE [SPLIT [DATA]]]        DATA: the sites' fairflare.json; default: synthetic

Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018, section 4 (Fig. 7 of FedISM+): biases, weights
of norms and buffers stay as they are. Two directions out of thousands are a small sample: compare several seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fairflare.base.task import evaluating
from fairflare.cli.data.sites import sites_of
from fairflare.prediction.recall import recall
from fairflare.prediction.saved_model import read_whole

EXTENT, POINTS, SEED = 1.0, 7, 0  # 1: as far as each filter is long; the point in the middle is the model itself


def directions(model: torch.nn.Module, seed: int) -> list[dict[str, torch.Tensor]]:
    """Draw two directions; of a parameter with two dimensions or more each entry of the first one is a filter."""
    generator = torch.Generator().manual_seed(seed)
    found: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, parameter in model.named_parameters():
        for along in found if parameter.ndim > 1 else ():
            drawn = torch.randn(parameter.shape, generator=generator)
            sides = tuple(range(1, parameter.ndim))
            length = [x.square().sum(sides, keepdim=True).sqrt() for x in (parameter.detach(), drawn)]
            along[name] = drawn * length[0] / length[1]
    return found


def mean_loss(task: Any, model: torch.nn.Module, data: Any, split: str) -> float:
    """Return the task's loss over all images of a split, in evaluation mode."""
    total = 0.0
    with evaluating(model):
        for inputs, targets in data.batches(split, batch_size=32):
            total += float(task.loss(model(inputs), targets)) * len(targets)
    return total / int(data.num_samples(split))


def surface(task: Any, model: torch.nn.Module, data: Any, split: str, places: Any) -> Any:
    """Return the losses, (places, places), the row along the first direction; the model is what it was afterwards."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = directions(model, SEED)
    losses = np.empty((len(places), len(places)))
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            moved = {name: kept[name] + a * first[name] + b * second[name] for name in first}
            model.load_state_dict({**kept, **moved})
            losses[i, j] = mean_loss(task, model, data, split)
    model.load_state_dict(kept)
    return losses


def main(run: str, out: str, site: str = "site-1", split: str = "validation", data: str = "") -> Any:
    """Write the picture and return the losses."""
    saved = read_whole(Path(run), None)
    task = recall(saved.record, saved.path.parent, None).task
    images = task.open_site(site, dict(sites_of(Path(data))[site]) if data else {})
    places = np.linspace(-EXTENT, EXTENT, POINTS)
    losses = surface(task, saved.network(task), images, split, places)
    axes = (figure := Figure()).subplots()
    figure.colorbar(axes.contourf(places, places, losses.T, levels=17), label="loss")
    axes.plot(0, 0, marker="+", color="white")
    axes.set_title(f"{Path(run).name}, {site}, {split}")
    figure.savefig(out)
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
