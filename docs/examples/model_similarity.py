"""Draw how alike the local models of a run's sites are, layer by layer (linear CKA, Fig. 1b of Fed-LWR).

python model_similarity.py RUN OUT.png [SITE [SPLIT [DATA]]]      DATA: the sites' fairflare.json; default: synthetic

The run must have kept them: fairflare run METHOD --keep-local-models. The images of one site are looked at.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fairflare.cli.data.sites import sites_of
from fairflare.core.similarity import layerwise_cka
from fairflare.exchange.staging import Staging
from fairflare.prediction.recall import recall
from fairflare.prediction.saved_model import network_with, read_whole


def main(
    run: str, out: str, site: str = "site-1", split: str = "validation", data: str = ""
) -> dict[tuple[str, str], dict[str, float]]:
    """Write the picture and return the CKA by pair of sites and layer, of the last round."""
    saved = read_whole(Path(run), "last")
    task = recall(saved.record, saved.path.parent, None).task
    images = task.open_site(site, dict(sites_of(Path(data))[site]) if data else {})
    kept = max((saved.path.parent / "fairflare" / "local_models").glob("round_*"))
    models = {
        name: network_with(task, saved, dict(state), f"the local model of {name} does not fit the task")
        for name, state in Staging(kept).open_all().items()
    }
    found = {}
    for a, b in combinations(models, 2):
        batches = (inputs for inputs, _ in images.batches(split, batch_size=32))
        found[a, b] = {name: layer.delta for name, layer in layerwise_cka(models[a], models[b], batches).items()}
    layers = list(next(iter(found.values())))
    axes = (figure := Figure(figsize=(2 + len(found), 1 + len(layers) / 4))).subplots()
    shown = axes.imshow(np.array([[cka[layer] for cka in found.values()] for layer in layers]), vmin=0, vmax=1)
    axes.set_xticks(range(len(found)), [" and ".join(pair) for pair in found], rotation=90)
    axes.set_yticks(range(len(layers)), layers)
    figure.colorbar(shown, label="CKA")
    figure.savefig(out, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
