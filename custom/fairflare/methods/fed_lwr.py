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

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fairflare.core.layers import layers_of
from fairflare.core.similarity import LayerSimilarity, layerwise_cka, layerwise_cosine
from fairflare.core.weighting import dissimilarity_weights
from fairflare.methods.base import (
    FairAggregator,
    Field,
    LocalTraining,
    Method,
    ReportError,
    RoundInputs,
    SiteRun,
    Weighing,
)

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
GRANULARITIES = ("leaf", "block", "model")


def _check_preset(preset: str) -> None:
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {sorted(PRESETS)}, got {preset!r}")


# ------------------------------------------------------------------------------------------------ site half


class LayerSimilarityReport(LocalTraining):
    """Fed-LWR, site half: plain local training, then layer-wise similarity of the local model to the anchor.

    Args:
        preset: ``"paper"`` or ``"authors"``; fills the four ``cka_*`` settings that are ``None``.
        similarity: ``"cka"`` (Eq. 3) or ``"cosine"`` (ablation v1).
        cka_estimator: ``"full_biased"`` (Eq. 2, all images at once), ``"full_unbiased"`` (HSIC_1 from the same Gram
            matrices: does not favour sites with many images), ``"minibatch_biased"``, ``"minibatch_unbiased"``.
        cka_split: images: ``"train"`` (paper, D_k) or ``"val"`` (authors).
        cka_batch_size: images a forward pass; changes the result of the minibatch estimators only.
        cka_passes: passes over the images, re-shuffled each time; matters for the minibatch estimators only.
        cka_max_samples: at most so many images, a fixed seeded choice; ``None``: all.
        cosine_mode: ``"sample"`` (mean over images) or ``"matrix"`` (one cosine of all features).
        cka_memory: bytes that features may take in memory; what is beyond waits in a scratch file.
        args, kwargs: see :class:`LocalTraining`.
    """

    def __init__(
        self,
        *args: Any,
        preset: str = "paper",
        similarity: str = "cka",
        cka_estimator: str | None = None,
        cka_split: str | None = None,
        cka_batch_size: int = 8,
        cka_passes: int | None = None,
        cka_max_samples: int | None = None,
        cosine_mode: str = "sample",
        cka_memory: int = 2**30,
        **kwargs: Any,
    ) -> None:
        # FLARE's job export looks for the base's arguments only behind these two names.
        super().__init__(*args, **kwargs)
        _check_preset(preset)
        if similarity not in ("cka", "cosine"):
            raise ValueError(f"similarity must be 'cka' or 'cosine', got {similarity!r}")
        if cka_estimator is not None and cka_estimator not in ESTIMATORS:
            raise ValueError(f"cka_estimator must be one of {sorted(ESTIMATORS)}, got {cka_estimator!r}")
        if cka_split is not None and cka_split not in SPLITS:
            raise ValueError(f"cka_split must be one of {sorted(SPLITS)}, got {cka_split!r}")
        if cka_batch_size < 1:
            raise ValueError(f"cka_batch_size must be >= 1, got {cka_batch_size!r}")
        if cka_passes is not None and cka_passes < 1:
            raise ValueError(f"cka_passes must be >= 1, got {cka_passes!r}")
        if cka_max_samples is not None and cka_max_samples < 2:
            raise ValueError(f"cka_max_samples must be >= 2, got {cka_max_samples!r}")
        if cosine_mode not in ("sample", "matrix"):
            raise ValueError(f"cosine_mode must be 'sample' or 'matrix', got {cosine_mode!r}")
        self.preset = preset
        self.similarity = similarity
        self.cka_estimator = cka_estimator
        self.cka_split = cka_split
        self.cka_batch_size = cka_batch_size
        self.cka_passes = cka_passes
        self.cka_max_samples = cka_max_samples
        self.cosine_mode = cosine_mode
        self.cka_memory = cka_memory

    def setting(self, name: str) -> Any:
        """The setting in force: the argument, else the preset's."""
        value = getattr(self, name)
        return PRESETS[self.preset][name] if value is None else value

    def report_anchor(self, run: SiteRun, local: torch.nn.Module, anchor: torch.nn.Module) -> dict[str, Any]:
        """delta_k (Eq. 3) of every layer: ``layers``, ``cka`` and ``dissimilarity`` (1 - delta, precise when small)."""
        images = _Images(self, run)
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


class _Images:
    """The input batches of the chosen split, as often as asked for; deterministic transforms."""

    def __init__(self, rule: LayerSimilarityReport, run: SiteRun) -> None:
        self.rule, self.run = rule, run
        self.split = SPLITS[rule.setting("cka_split")]
        minibatch = rule.similarity == "cka" and str(rule.setting("cka_estimator")).startswith("minibatch")
        # All-images estimators see the same value in every pass: one is enough.
        self.passes = int(rule.setting("cka_passes")) if minibatch else 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.passes):
            seed = None if self.passes == 1 else self.run.seed + number
            if self.rule.cka_max_samples is not None:
                yield from self._subset(self.rule.cka_max_samples)
                continue
            for inputs, _ in self.run.data.batches(self.split, batch_size=self.rule.cka_batch_size, shuffle_seed=seed):
                yield inputs.to(self.run.device)

    def _subset(self, count: int) -> Iterator[torch.Tensor]:
        """The same seeded choice of images in every round and pass, in file order."""
        total = self.run.data.num_samples(self.split)
        generator = torch.Generator().manual_seed(0)
        chosen = set(torch.randperm(total, generator=generator)[:count].tolist())
        waiting: list[torch.Tensor] = []
        index = 0
        for inputs, _ in self.run.data.batches(self.split, batch_size=self.rule.cka_batch_size):
            for image in inputs:
                if index in chosen:
                    waiting.append(image)
                index += 1
                if len(waiting) == self.rule.cka_batch_size:
                    yield torch.stack(waiting).to(self.run.device)
                    waiting = []
        if waiting:
            yield torch.stack(waiting).to(self.run.device)


# ------------------------------------------------------------------------------------------------ server half


class FedLWR(FairAggregator):
    r"""Fed-LWR, server half: weights by layer from the sites' similarity scores.

    .. math:: \rho_k^m = \frac{1 - \delta_k^m}{\sum_i (1 - \delta_i^m)}, \qquad \hat w_m = \sum_k \rho_k^m w_{k,m}

    A site that trained but did not report about the anchor is weighed with its last known scores, else with the mean of
    the other sites'. A score that is not a number is replaced by the mean of the site's others, then by the mean over
    sites in that layer. Equal scores give equal weights.

    Args:
        preset: ``"paper"`` (no clip) or ``"authors"`` (clip to [1e-4, 0.99]).
        clip_min, clip_max: bounds of delta before Eq. 5; ``None``: the preset's.
        layer_granularity: ``"leaf"`` (every module with parameters is a layer), ``"block"`` (the layers under one
            top-level child share their mean score), ``"model"`` (one weight a site, from the mean score).
        only_layer: ablation v2: one weight a site, from this layer's score. A name like ``"down_3"`` means the last
            layer inside that block.
        min_sites: see :class:`FairAggregator`.

    Source:
        Yan et al., MICCAI 2024, Eqs. 1, 5, 6. The authors also add 1e-9 to the sum in Eq. 5, which with their clip
        changes a weight by less than 1e-6; we do not.
    """

    two_phase = True
    anchor_fields = (
        Field("layers", "names"),
        Field("cka", "vector", low=-1.01, high=1.5, nan_ok=True, same_length_as="layers"),
        Field("dissimilarity", "vector", low=-0.5, high=2.01, nan_ok=True, same_length_as="layers"),
    )

    def __init__(
        self,
        preset: str = "paper",
        clip_min: float | None = None,
        clip_max: float | None = None,
        layer_granularity: str = "leaf",
        only_layer: str | None = None,
        min_sites: int = 1,
    ) -> None:
        super().__init__(min_sites)
        _check_preset(preset)
        if layer_granularity not in GRANULARITIES:
            raise ValueError(f"layer_granularity must be one of {GRANULARITIES}, got {layer_granularity!r}")
        self.preset = preset
        self.clip_min = clip_min
        self.clip_max = clip_max
        self.layer_granularity = layer_granularity
        self.only_layer = only_layer
        low, high = self.clip
        if not 0 <= low < high <= 1:
            raise ValueError(f"clip_min and clip_max must satisfy 0 <= min < max <= 1, got {low!r} and {high!r}")
        self._last_scores: dict[str, dict[str, float]] = {}  # site -> layer -> 1 - delta

    @property
    def clip(self) -> tuple[float, float]:
        """Bounds of delta in force."""
        low, high = PRESETS[self.preset]["clip"]
        return (
            low if self.clip_min is None else float(self.clip_min),
            high if self.clip_max is None else float(self.clip_max),
        )

    def check_anchor_report(self, report: dict[str, Any], site: str) -> dict[str, Any]:
        names = report["layers"]
        known = set(layers_of(self._stage().open(site)).values())
        if len(set(names)) != len(names) or set(names) != known:
            odd = sorted(set(names) ^ known)[:3]
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
        known: dict[str, dict[str, float]] = {}
        for site in inputs.sites:
            if site in inputs.anchor_reports:
                known[site] = inputs.anchor_reports[site]["dissimilarity"]
            elif site in self._last_scores:
                known[site] = {layer: self._last_scores[site].get(layer, math.nan) for layer in layers}
        if not known:
            reasons = "; ".join(f"{s}: {why}" for s, why in sorted(self.rejected.items())) or "no answer"
            raise RuntimeError(f"Fed-LWR, round {inputs.current_round}: no site reported about the anchor ({reasons})")
        mean = {layer: _mean(scores[layer] for scores in known.values()) for layer in layers}
        return {site: dict(known.get(site, mean)) for site in inputs.sites}

    def _share(self, scores: dict[str, dict[str, float]], layers: list[str]) -> dict[str, dict[str, float]]:
        """Scores after the chosen granularity: layers of one group carry the same value."""
        if self.only_layer is not None:
            source = self._resolve(self.only_layer, layers)
            return {site: dict.fromkeys(layers, by[source]) for site, by in scores.items()}
        if self.layer_granularity == "leaf":
            return scores
        whole = self.layer_granularity == "model"
        group = {layer: "" if whole else layer.partition(".")[0] for layer in layers}
        shared: dict[str, dict[str, float]] = {}
        for site, by in scores.items():
            means = {name: _mean(by[x] for x in layers if group[x] == name) for name in set(group.values())}
            shared[site] = {layer: means[group[layer]] for layer in layers}
        return shared

    @staticmethod
    def _resolve(name: str, layers: list[str]) -> str:
        """The layer itself, or the last layer inside a block of that name."""
        inside = [layer for layer in layers if layer == name or layer.startswith(name + ".")]
        if not inside:
            blocks = sorted({layer.partition(".")[0] for layer in layers})
            raise RuntimeError(f"only_layer={name!r} names no layer or block of the model; its blocks are {blocks}")
        return inside[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"last_scores": {site: dict(by) for site, by in self._last_scores.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_scores = {site: dict(by) for site, by in state["last_scores"].items()}


def _mean(values: Any) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


_SOURCE = "Yan et al., MICCAI 2024"
METHODS = [
    Method(
        name="fed_lwr",
        title="Fed-LWR",
        summary="layer-wise weights: sites whose features differ more from the average model's weigh more",
        aggregator=FedLWR,
        training=LayerSimilarityReport,
        source=_SOURCE,
    ),
    Method(
        name="fed_lwr_cosine",
        title="Fed-LWR-v1",
        summary="ablation: cosine similarity of features instead of CKA",
        aggregator=FedLWR,
        training=LayerSimilarityReport,
        site={"similarity": "cosine"},
        source=_SOURCE,
    ),
    Method(
        name="fed_lwr_last_layer",
        title="Fed-LWR-v2",
        summary="ablation: CKA of the last encoder layer only, one weight per site",
        aggregator=FedLWR,
        training=LayerSimilarityReport,
        server={"only_layer": "down_3"},
        source=_SOURCE,
    ),
]
