"""How alike the local models of a run's sites are, layer by layer and pair by pair, on images that the caller has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.core.features.adapting import network_of
from fairflare.core.similarity import layerwise_cka
from fairflare.exchange.staging import Staging
from fairflare.federation.plan.run_settings import RESULTS_FOLDER
from fairflare.federation.site.site_file import SHELL_SETTINGS
from fairflare.prediction.landscape import BATCH, Trained
from fairflare.tasks.networks import load_fitting

if TYPE_CHECKING:
    import torch

Pairs = dict[tuple[str, str], dict[str, float]]  # CKA by pair of sites and layer


def kept_rounds(trained: Trained) -> dict[int, Path]:
    """Folders of the local models that a run has kept, by round.

    Raises:
        ValueError: it has none (says how they are kept).
    """
    folder = trained.saved.path.parent / RESULTS_FOLDER / "local_models"
    found = {int(place.name.removeprefix("round_")): place for place in sorted(folder.glob("round_*"))}
    if not found:
        raise ValueError(f"{trained.name} has no local models of its sites; run it with --keep-local-models")
    return found


def pairwise_cka(
    trained: Trained, kept: Path, settings: Mapping[str, Mapping[str, Any]], split: str, device: torch.device | str
) -> tuple[Pairs, bool]:
    """Linear CKA (Fed-LWR's Eq. 2) of each two sites' local models at every layer, on the images of all sites given.

    Args:
        trained: whose task it is; kept: a folder of :func:`kept_rounds`.
        settings: by site whose images are looked at, as in its ``local/fairflare.json``.
        split: of these sites.
        device: to compute on.

    Returns:
        CKA by pair of sites (in order of their names) and layer, and whether any of the images are made up.

    Raises:
        ValueError: fewer than two local models, one that does not fit the task's network, or no images.
    """
    models = {}
    for site, state in Staging(kept).open_all().items():
        models[site] = network_of(trained.task)
        load_fitting(models[site], dict(state), f"the local model of site {site!r} does not fit its task", "")
        models[site].to(device)
    if len(models) < 2:
        raise ValueError(f"{kept} has the local models of {len(models)} site(s); a pair needs two")
    sites: Sequence[Any] = [
        trained.task.open_site(site, {k: v for k, v in own.items() if k not in SHELL_SETTINGS})
        for site, own in settings.items()
    ]
    found: Pairs = {}
    for a, b in combinations(models, 2):
        batches = chain.from_iterable(data.batches(split, batch_size=BATCH) for data in sites)
        alike = layerwise_cka(models[a], models[b], (inputs.to(device) for inputs, _ in batches))
        found[a, b] = {layer: of.delta for layer, of in alike.items()}
    return found, any(data.synthetic for data in sites)
