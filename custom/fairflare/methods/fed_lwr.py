"""Fed-LWR: layer-wise re-weighting by feature shift.

Yan et al., "A New Perspective to Boost Performance Fairness For Medical Federated Learning", MICCAI 2024.

A round, in the paper's order: the sites train (Alg. 1, line 5); the plain average of their models is the anchor
(Eq. 1); each site measures, layer by layer, how alike its own model's and the anchor's features of its own training
images are (CKA, Eqs. 2-4); sites that differ more weigh more in that layer (Eq. 5); the local models are averaged again
with these weights (Eq. 6).

Where paper and authors' code differ, ``preset`` decides: ``"paper"`` takes exact CKA (Eq. 2) over all training images
without a clip; ``"authors"`` the unbiased minibatch estimator over the validation images, in five passes, with the
scores clipped to [1e-4, 0.99]. Any single setting can be given on top. Layers are matched by name in both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Bounds

from fairflare.core.settings import Fraction, PositiveInt, settings
from fairflare.core.similarity import LayerSimilarity, layerwise_cka, layerwise_cosine
from fairflare.core.weighting import dissimilarity_weights
from fairflare.methods.catalog import Method
from fairflare.methods.image_batches import ImageBatches
from fairflare.methods.layer_scores import by_granularity, filled, from_layer
from fairflare.methods.reports import Field, ReportError
from fairflare.methods.rule import RoundInputs, Rule, Weighing
from fairflare.methods.training import LocalTraining, SiteRun

log = logging.getLogger(__name__)
Preset = Literal["paper", "authors"]
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "clip": (0.0, 1.0),
        "cka_estimator": "full_biased",
        "cka_split": "train",
        "cka_passes": 1,
    },
    "authors": {
        "clip": (1e-4, 0.99),
        "cka_estimator": "minibatch_unbiased",
        "cka_split": "val",
        "cka_passes": 5,
    },
}
# Spec name -> name in core.similarity.
ESTIMATORS = {
    "full_biased": "biased",
    "full_unbiased": "unbiased",
    "minibatch_biased": "minibatch_biased",
    "minibatch_unbiased": "minibatch_unbiased",
}
SPLITS = {"train": "training", "val": "validation"}


@settings
class LayerSimilarityReport(LocalTraining):
    """Fed-LWR, site half: plain local training, then layer-wise similarity of the local model to the anchor.

    Args:
        preset: ``"paper"`` or ``"authors"``; fills those of the ``cka_*`` settings that are ``None``.
        similarity: ``"cka"`` (Eq. 3) or ``"cosine"`` (ablation v1).
        cka_estimator: ``"full_biased"`` (Eq. 2, all images at once), ``"full_unbiased"`` (HSIC_1 from the same Gram
            matrices: does not favour sites with many images), ``"minibatch_biased"``, ``"minibatch_unbiased"``.
        cka_split: images: ``"train"`` (paper, D_k) or ``"val"`` (authors).
        cka_batch_size: images a forward pass; changes the result of the minibatch estimators only.
        cka_passes: passes over the images, re-shuffled each time; matters for the minibatch estimators only.
        cka_max_samples: at most so many images, a fixed seeded choice; ``None``: all.
        cosine_mode: ``"sample"`` (mean over images) or ``"matrix"`` (one cosine of all features).
        cka_memory: bytes that features may take in memory; what is beyond waits in a scratch file.
    """

    retired: ClassVar[dict[str, str]] = {"cka_storage": "features are kept as exactly as the result needs"}
    preset: Preset = "paper"
    similarity: Literal["cka", "cosine"] = "cka"
    cka_estimator: Literal["full_biased", "full_unbiased", "minibatch_biased", "minibatch_unbiased"] | None = None
    cka_split: Literal["train", "val"] | None = None
    cka_batch_size: PositiveInt = 8
    cka_passes: PositiveInt | None = None
    cka_max_samples: Annotated[int, Bounds(strict=True, ge=2)] | None = None
    cosine_mode: Literal["sample", "matrix"] = "sample"
    cka_memory: Annotated[int, Bounds(strict=True, ge=0)] = 2**30

    def setting(self, name: str) -> Any:
        """The setting in force: the argument, else the preset's."""
        value = getattr(self, name)
        return PRESETS[self.preset][name] if value is None else value

    def report_anchor(self, run: SiteRun, local: torch.nn.Module, anchor: torch.nn.Module) -> dict[str, Any]:
        """delta_k (Eq. 3) of every layer: ``layers``, ``cka`` and ``dissimilarity`` (1 - delta, precise when small)."""
        # All-images estimators see the same value in every pass: one is enough.
        minibatch = self.similarity == "cka" and str(self.setting("cka_estimator")).startswith("minibatch")
        images = ImageBatches(
            run,
            SPLITS[self.setting("cka_split")],
            self.cka_batch_size,
            passes=int(self.setting("cka_passes")) if minibatch else 1,
            max_samples=self.cka_max_samples,
        )
        scores: Mapping[str, LayerSimilarity]
        if self.similarity == "cosine":
            scores = layerwise_cosine(local, anchor, images, mode=self.cosine_mode)
        else:
            scores = layerwise_cka(
                local,
                anchor,
                images,
                estimator=ESTIMATORS[self.setting("cka_estimator")],
                memory=self.cka_memory,
                scratch=run.scratch,
            )
        return {
            "layers": list(scores),
            "cka": [float(s.delta) for s in scores.values()],
            "dissimilarity": [float(s.dissimilarity) for s in scores.values()],
        }


@settings
class FedLWR(Rule):
    r"""Fed-LWR, server half: weights by layer from the sites' similarity scores.

    .. math:: \rho_k^m = \frac{1 - \delta_k^m}{\sum_i (1 - \delta_i^m)}, \qquad \hat w_m = \sum_k \rho_k^m w_{k,m}

    A site that trained but did not report about the anchor is weighed with its last known scores, else with the mean of
    the other sites'; without any at all: equal weights. A score that is not a number is replaced by the mean of the
    site's others, then by the mean over sites in that layer. Equal scores give equal weights.

    Args:
        preset: ``"paper"`` (no clip) or ``"authors"`` (clip to [1e-4, 0.99]).
        clip_min, clip_max: bounds of delta before Eq. 5; ``None``: the preset's.
        layer_granularity: ``"leaf"`` (every module with parameters is a layer), ``"block"`` (the layers under one
            top-level child share their mean score), ``"model"`` (one weight a site, from the mean score).
        only_layer: ablation v2: one weight a site, from this layer's score. A name like ``"down_3"`` means the last
            layer inside that block.

    Source:
        Yan et al., MICCAI 2024, Eqs. 1, 5, 6. The authors also add 1e-9 to the sum in Eq. 5, which with their clip
        changes a weight by less than 1e-6; we do not.
    """

    two_phase = True
    anchor_fields = (
        Field("layers", "names", doc="names of the model's layers, the same at every site"),
        Field(
            "cka", "vector", low=-1.01, high=1.5, nan_ok=True, same_length_as="layers",
            doc="how alike the features of the local model and of the anchor are, by layer: CKA, or cosine",
            reveals="how far the site's images are from the others', not what is on them; the Gram matrices of the "
            "features stay at the site",
        ),
        Field(
            "dissimilarity", "vector", low=-0.5, high=2.01, nan_ok=True, same_length_as="layers",
            doc="1 - `cka`, precise when small",
        ),
    )  # fmt: skip

    preset: Preset = "paper"
    clip_min: Fraction | None = None
    clip_max: Fraction | None = None
    layer_granularity: Literal["leaf", "block", "model"] = "leaf"
    only_layer: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.clip
        if not low < high:
            raise ValueError(f"clip_min must be < clip_max, got {low!r} and {high!r}")
        self._last_scores: dict[str, dict[str, float]] = {}  # site -> layer -> 1 - delta

    @property
    def clip(self) -> tuple[float, float]:
        """Bounds of delta in force."""
        low, high = PRESETS[self.preset]["clip"]
        return (
            low if self.clip_min is None else float(self.clip_min),
            high if self.clip_max is None else float(self.clip_max),
        )

    def check_anchor_report(self, report: dict[str, Any], site: str, layers: Sequence[str]) -> dict[str, Any]:
        names = report["layers"]
        if len(set(names)) != len(names) or set(names) != set(layers):
            odd = [name[:80] for name in sorted(set(names) ^ set(layers))[:3]]
            raise ReportError(f"site {site!r}: field 'layers' does not name the model's layers (differs in {odd})")
        return {
            "cka": dict(zip(names, report["cka"], strict=True)),
            "dissimilarity": dict(zip(names, report["dissimilarity"], strict=True)),
        }

    def weigh(self, inputs: RoundInputs) -> Weighing:
        layers = list(dict.fromkeys(inputs.owner.values()))
        scores = self._scores(inputs, layers)
        shared = self._share(scores, layers)
        weights = dissimilarity_weights(shared, clip_min=self.clip[0], clip_max=self.clip[1])
        record: dict[str, dict[str, dict[str, float]]] = {}
        for layer in layers:
            record[layer] = {}
            for site in inputs.sites:
                reported = inputs.anchor_reports.get(site, {})
                record[layer][site] = {
                    "cka": reported.get("cka", {}).get(layer, math.nan),
                    "dissimilarity": scores[site][layer],
                    "weight": weights[layer][site],
                }
        for site, report in inputs.anchor_reports.items():
            self._last_scores[site] = dict(report["dissimilarity"])
        return Weighing(layers=weights, record=record)

    def _scores(self, inputs: RoundInputs, layers: list[str]) -> dict[str, dict[str, float]]:
        """1 - delta by site and layer; a site without a report gets its last scores, else the others' mean."""
        reported = {site: report["dissimilarity"] for site, report in inputs.anchor_reports.items()}
        known = {site: scores for site, scores in {**self._last_scores, **reported}.items() if site in inputs.sites}
        if not known:
            log.warning("Fed-LWR, round %d: no site reported about the anchor; equal weights", inputs.current_round)
        return filled(known, inputs.sites, layers)

    def _share(self, scores: dict[str, dict[str, float]], layers: list[str]) -> dict[str, dict[str, float]]:
        """Scores after the chosen granularity."""
        if self.only_layer is not None:
            return from_layer(scores, layers, self.only_layer)
        return by_granularity(scores, layers, self.layer_granularity)

    def state_dict(self) -> dict[str, Any]:
        return {"last_scores": {site: dict(by) for site, by in self._last_scores.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_scores = {site: dict(by) for site, by in state["last_scores"].items()}


JOB: dict[str, Any] = {"rule": FedLWR, "training": LayerSimilarityReport, "source": "Yan et al., MICCAI 2024"}
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
        title="Fed-LWR-v2",
        summary="ablation: CKA of the last encoder layer only, one weight per site",
        server={"only_layer": "down_3"},
        **JOB,
    ),
]
