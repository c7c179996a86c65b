"""Define Fed-LWR's site half: local training, then the similarity of the local model's and the anchor's features."""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Bounds

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import PositiveInt, settings
from fairflare.core.features.layers import layers_of
from fairflare.core.similarity import LEAST_SAMPLES, layerwise_cka, layerwise_cosine
from fairflare.core.weighting import CKA_RANGE
from fairflare.methods.base.image_batches import ImageBatches
from fairflare.methods.base.reports import NO_IMAGES, TRAINING, Field
from fairflare.methods.base.training import LocalTraining, SiteRun

log = logging.getLogger(__name__)

Preset = Literal["paper", "authors", "stable"]
PAPER: dict[str, Any] = {
    "clip_min": 0.0,
    "clip_max": 1.0,
    "cka_estimator": "full_biased",
    "cka_split": "train",
    "cka_passes": 1,
    "warmup_rounds": 0,
    "mix": 0.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": PAPER,
    "authors": {
        **PAPER,
        "clip_min": 1e-4,
        "clip_max": 0.99,
        "cka_estimator": "minibatch_unbiased",
        "cka_split": "val",
        "cka_passes": 5,
    },
    # FairFlare's own preset, chosen on development data as docs/fed_lwr.md describes.
    "stable": {**PAPER, "warmup_rounds": 10, "mix": 0.75},
}
# Value of the setting cka_estimator -> name of the estimator in core.similarity.
ESTIMATORS = {
    "full_biased": "biased",
    "full_unbiased": "unbiased",
    "minibatch_biased": "minibatch_biased",
    "minibatch_unbiased": "minibatch_unbiased",
}
#: Fields of a site's report about the anchor, the average of the sites' models.
ANCHOR_FIELDS = (
    Field("layers", "names", doc="names of the model's layers, the same at every site", of=NO_IMAGES),
    Field(
        "cka", "vector", low=CKA_RANGE[0], high=CKA_RANGE[1], nan_ok=True, same_length_as="layers",
        doc="how alike the features of the local model and of the anchor are, by layer: CKA, or cosine",
        reveals="how far the site's images are from the others', not what is on them; the Gram matrices of the "
        "features stay at the site",
        of=TRAINING,
    ),
    Field(
        "dissimilarity", "vector", low=-0.5, high=2.01, nan_ok=True, same_length_as="layers",
        doc="1 - `cka`, precise when small", of=TRAINING,
    ),
)  # fmt: skip
SPLITS = {"train": "training", "val": "validation"}


class FromPreset:
    """Fill settings that are ``None`` from a preset, for both halves of Fed-LWR."""

    preset: str

    def setting(self, name: str) -> Any:
        """Return a setting's effective value: the given one, or the preset's value if none is given."""
        value = getattr(self, name)
        return PRESETS[self.preset].get(name) if value is None else value


@settings
class LayerSimilarityReport(FromPreset, LocalTraining):
    """Train as FedAvg does, then report the layer-wise similarity of the local model to the anchor (Fed-LWR).

    Args:
        preset: ``"paper"``, ``"authors"`` or ``"stable"``; fills those of the ``cka_*`` settings that are ``None``.
        similarity: ``"cka"`` (Eq. 3) or ``"cosine"`` (ablation v1), mean over the images.
        cka_estimator: ``"full_biased"`` (Eq. 2, all images at once), ``"full_unbiased"`` (HSIC_1 from the same Gram
            matrices: does not favour sites with many images), ``"minibatch_biased"``, ``"minibatch_unbiased"``.
        cka_split: images: ``"train"`` (paper, D_k) or ``"val"`` (authors).
        cka_batch_size: images a forward pass, and of a batch of the minibatch estimators: there at least 2 (biased) or
            4 (unbiased); what is left of a pass if fewer than these joins its last batch.
        cka_passes: passes over the images, re-shuffled each time; matters for the minibatch estimators only. One is
            made of a choice of images (``cka_max_samples``) from data that do not tell their order.
        cka_max_samples: at most so many images, a fixed seeded choice; ``None`` for all.
        cka_memory: bytes that features may take in memory; what is beyond waits in a scratch file.
    """

    under_dp: ClassVar[bool] = True  # its steps are FedAvg's; under differential privacy no anchor phase runs
    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "cka_estimator": only_with("similarity", "cka"),
        "cka_passes": only_with("cka_estimator", "minibatch_biased", "minibatch_unbiased"),
    }

    preset: Preset = "paper"
    similarity: Literal["cka", "cosine"] = "cka"
    cka_estimator: Literal["full_biased", "full_unbiased", "minibatch_biased", "minibatch_unbiased"] | None = None
    cka_split: Literal["train", "val"] | None = None
    cka_batch_size: PositiveInt = 8
    cka_passes: PositiveInt | None = None
    cka_max_samples: Annotated[int, Bounds(strict=True, ge=2)] | None = None
    cka_memory: Annotated[int, Bounds(strict=True, ge=0)] = 2**30

    def made_of(self, name: str) -> tuple[str, ...] | None:
        return (SPLITS[self.setting("cka_split")],) if name in ("cka", "dissimilarity") else None

    def report_anchor(self, run: SiteRun, local: torch.nn.Module, anchor: torch.nn.Module) -> dict[str, Any]:
        """Return the report about the anchor: the similarity delta_k (Eq. 3) of the two models' features in each layer.

        The report has ``layers``, ``cka`` (delta) and ``dissimilarity`` (1 - delta, precise when small).
        """
        # Estimators over all images give the same value in every pass, so one pass is enough.
        minibatch = self.similarity == "cka" and str(self.setting("cka_estimator")).startswith("minibatch")
        least = LEAST_SAMPLES[ESTIMATORS[self.setting("cka_estimator")].removeprefix("minibatch_")] if minibatch else 0
        images = ImageBatches(
            run,
            SPLITS[self.setting("cka_split")],
            self.cka_batch_size,
            passes=int(self.setting("cka_passes")) if minibatch else 1,
            max_samples=self.cka_max_samples,
            least=least,
        )
        if images.count < least or not images.shuffled:  # each pass would have the same batches: one is enough
            if images.passes > 1 and images.count >= least:
                log.warning(
                    "site %s: one pass in place of cka_passes=%d: with cka_max_samples passes differ only where the "
                    "data know the order of their images",
                    run.site, images.passes,
                )  # fmt: skip
            images.passes = 1
        # Skip layers of which no tensor is sent: their features are the same in both models.
        layers = None if run.sent is None else run.sent.layers(layers_of(run.sent.names))
        if self.similarity == "cosine":
            scores = layerwise_cosine(local, anchor, images, layers=layers)
        else:
            scores = layerwise_cka(
                local,
                anchor,
                images,
                layers=layers,
                estimator=ESTIMATORS[self.setting("cka_estimator")],
                memory=self.cka_memory,
                scratch=run.scratch,
                expected=images.count,
            )
        return {
            "layers": list(scores),
            "cka": [float(s.delta) for s in scores.values()],
            "dissimilarity": [float(s.dissimilarity) for s in scores.values()],
        }
