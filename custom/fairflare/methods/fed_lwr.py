"""Define Fed-LWR, which weights sites layer by layer according to the shift of their features.

Yan et al., "A New Perspective to Boost Performance Fairness For Medical Federated Learning", MICCAI 2024.

A round, in the paper's order: the sites train (Alg. 1, line 5). The plain average of their models is the anchor
(Eq. 1). Each site measures in each layer the similarity between its own model's and the anchor's features of its own
training images (CKA, Eqs. 2-4). Sites whose features differ more get a larger weight in that layer (Eq. 5). The local
models are averaged again with these weights (Eq. 6).

Where paper and authors' code differ, ``preset`` decides: ``"paper"`` uses exact CKA (Eq. 2) over all training images
without a clip; ``"authors"`` uses the unbiased minibatch estimator over the validation images, in five passes, with the
scores clipped to [1e-4, 0.99]. ``"stable"`` is FairFlare's own: rounds of plain averaging first, then the paper's
weights mixed with three quarters of uniform weights. A given setting overrides the preset. All presets match layers by
name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fairflare.base.checks import refuse, refuse_if
from fairflare.base.settings import Fraction, NonNegativeInt, settings
from fairflare.core.features.adapting import outline_of
from fairflare.core.features.layers import layers_of
from fairflare.core.weighting import dissimilarity_weights, mixed, uniform_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import LayerWeights, RoundInputs, SeesModel, State, TwoPhase, Weighing
from fairflare.methods.base.saved import Saved
from fairflare.methods.parts.anchor_report import ANCHOR_FIELDS, FromPreset, LayerSimilarityReport, Preset
from fairflare.methods.parts.layer_scores import Scores, fill_scores, spread_layer

if TYPE_CHECKING:
    from fairflare.base.task import Task

__all__ = ["METHODS", "FedLWR", "LayerSimilarityReport"]

log = logging.getLogger(__name__)


@settings
class FedLWR(FromPreset, TwoPhase, SeesModel):
    r"""Weight sites layer by layer according to their similarity scores (Fed-LWR).

    .. math:: \rho_k^m = \frac{1 - \delta_k^m}{\sum_i (1 - \delta_i^m)}, \qquad \hat w_m = \sum_k \rho_k^m w_{k,m}

    A site that trained but did not report about the anchor is weighted by its last known scores, or else by the mean
    scores of the other sites. Without any scores weights are equal. A score that is not a number is replaced by the
    mean of the site's other scores, or else by the mean over sites in that layer. Equal scores give equal weights.

    The settings that stabilise the weights (``warmup_rounds``, ``mix``) are FairFlare's own. They are off in the
    presets ``"paper"`` and ``"authors"``.

    Args:
        preset: ``"paper"``, ``"authors"`` (clip to [1e-4, 0.99]) or ``"stable"`` (ours); fills the settings below that
            are ``None``, and those of the site half.
        clip_min, clip_max: bounds of delta before Eq. 5.
        warmup_rounds: number of first rounds with plain averages (Eq. 1), without a second phase; 0, ``"stable"`` 10.
        mix: share of uniform weights, 0 (none) to 1 (plain averaging, measured all the same); 0, ``"stable"`` 0.75.
        only_layer: ablation v2: one weight a site, from this layer's score. A name like ``"down_3"`` means the last
            layer inside that block.

    Source:
        Yan et al., MICCAI 2024, Eqs. 1, 5, 6. The authors also add 1e-9 to the sum in Eq. 5, which with their clip
        changes a weight by less than 1e-6; we do not.
    """

    anchor_fields = ANCHOR_FIELDS

    preset: Preset = "paper"
    clip_min: Fraction | None = None
    clip_max: Fraction | None = None
    warmup_rounds: NonNegativeInt | None = None
    mix: Fraction | None = None
    only_layer: str | None = None

    _last_scores = Saved(dict[str, dict[str, float]])  # last reported 1 - delta by layer of each site, also absent ones

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.setting("clip_min"), self.setting("clip_max")
        refuse({f"clip_min must be < clip_max, got {low!r} and {high!r}": not low < high})

    def asks_about_anchor(self, current_round: int) -> bool:
        return bool(current_round >= self.setting("warmup_rounds"))

    def check_run(self, num_rounds: int, task: Task | None) -> None:
        warmup = self.setting("warmup_rounds")
        refuse({
            f"warmup_rounds={warmup} (preset {self.preset!r}) leaves none of the {num_rounds} round(s) to Fed-LWR: "
            f"give more than {warmup} rounds, or a smaller warmup_rounds": warmup >= num_rounds,
        })  # fmt: skip
        if task is not None and self.only_layer is not None:  # the network is built only if needed
            self.begin_round(outline_of(task).state_dict())

    def begin_round(self, received: State) -> None:
        """Raise ``ValueError`` when no tensor of the layer or block ``only_layer`` is sent."""
        if self.only_layer is not None:
            spread_layer({}, list(dict.fromkeys(layers_of(received).values())), self.only_layer)

    def check_anchor_report(self, report: dict[str, Any], site: str, layers: Sequence[str]) -> dict[str, Any]:
        names = report["layers"]
        odd = [name[:80] for name in sorted(set(names) ^ set(layers))[:3]]
        refuse_if(site, {
            f"field 'layers' does not name the model's layers (differs in {odd})": (
                bool(odd) or len(set(names)) != len(names)
            ),
        })  # fmt: skip
        return {name: dict(zip(names, report[name], strict=True)) for name in ("cka", "dissimilarity")}

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if not self.asks_about_anchor(inputs.current_round):
            return Weighing(sites=uniform_weights(inputs.sites), values={"warmup": 1.0})
        layers = list(dict.fromkeys(inputs.owner.values()))
        self._last_scores |= {site: dict(report["dissimilarity"]) for site, report in inputs.anchor_reports.items()}
        known = {site: scores for site, scores in self._last_scores.items() if site in inputs.sites}
        if not known:
            log.warning("Fed-LWR, round %d: no site reported about the anchor; equal weights", inputs.current_round)
        scores = fill_scores(known, inputs.sites, layers)  # 1 - delta
        shared = scores if self.only_layer is None else spread_layer(scores, layers, self.only_layer)
        bounds = {name: self.setting(name) for name in ("clip_min", "clip_max")}
        by_layer, mix = dissimilarity_weights(shared, **bounds), self.setting("mix")  # Eq. 5
        weights = {layer: mixed(by, mix) for layer, by in by_layer.items()} if mix else by_layer
        return Weighing(layers=weights, record=self._record(inputs, scores, weights))

    def _record(self, inputs: RoundInputs, scores: Scores, weights: LayerWeights) -> dict[str, Any]:
        """Return the values to record by layer and site: the reported or filled-in scores, and the weights."""
        reports = {site: inputs.anchor_reports.get(site, {"cka": {}, "dissimilarity": {}}) for site in inputs.sites}
        return {
            layer: {
                site: {
                    "cka": report["cka"].get(layer, math.nan),
                    "dissimilarity": report["dissimilarity"].get(layer, scores[site][layer]),
                    "weight": by[site],
                }
                for site, report in reports.items()
            }
            for layer, by in weights.items()
        }


JOB: dict[str, Any] = {
    "rule": FedLWR, "training": LayerSimilarityReport, "source": "Yan et al., MICCAI 2024",
}  # fmt: skip
METHODS = [
    Method(
        name="fed_lwr",
        title="Fed-LWR",
        summary="layer-wise weights: sites whose features differ more from the average model's weigh more",
        **JOB,
    ),
    Method(
        name="fed_lwr_cosine",
        title="Fed-LWR-v1",
        summary="ablation: cosine similarity of features instead of CKA",
        site={"similarity": "cosine"},
        **JOB,
    ),
    Method(
        name="fed_lwr_last_layer",
        kinds=("segmentation",),
        title="Fed-LWR-v2",
        summary="ablation: CKA of the last encoder layer only, one weight per site",
        server={"only_layer": "down_3"},
        **JOB,
    ),
]
