"""What a site says about its batch norms: the moments of their inputs over its training images.

What for: ``docs/norm_statistics.md``. The server's half, which asks: :mod:`fairflare.federation.server.recalibration`.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fairflare.core.features.batch_norms import Forward, Unmeasurable, measure, next_group
from fairflare.exchange.messages import SiteTask
from fairflare.methods.base.image_batches import ImageBatches
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.training import SiteError, SiteRun, SiteStore

KEPT = "norm_model"  # in the site's store: the model of a round, for the exchanges after the first
#: Directives of the task ``norms``.
DONE, EXCHANGE, ONE_PASS = "done", "exchange", "one_pass"

# Within float32 when squared, and far from what a network computes.
MOST_MEAN, MOST_VARIANCE = 1e15, 1e30
MOST_VALUES = 2**53  # whole numbers that a float holds

AVERAGES = (
    "averages over the site's images: contrast and brightness of the scanner, with few images nearly the images. A "
    "server that means harm chooses the network and so what is averaged"
)
#: What a site says in the report of ``norms``.
FIELDS = (
    Field("norms", "names", doc="names of the batch norms that this answer is about", of=TRAINING),
    Field(
        "values", "vector", low=1, high=MOST_VALUES, same_length_as="norms",
        doc="how many values of a channel went into each: training images times places of an image",
        reveals="the number of training images", of=TRAINING,
    ),
    Field(
        "means", "vector", low=-MOST_MEAN, high=MOST_MEAN,
        doc="mean of each channel of these norms' inputs, one norm after the other",
        reveals=AVERAGES, of=TRAINING,
    ),
    Field(
        "variances", "vector", low=0, high=MOST_VARIANCE,
        doc="biased variance of the same", reveals=AVERAGES, of=TRAINING,
    ),
    Field("more", "flag", doc="whether the network has further norms, which come with a later question", of=TRAINING),
)  # fmt: skip


def with_kept(request: SiteTask, store: SiteStore, site: str) -> dict[str, torch.Tensor]:
    """Return the model that a question is about: it came with the first of a round, with later ones only what changed.

    Raises:
        SiteError: this site has not kept it (names the round).
    """
    if request.directives.get(ONE_PASS):
        return request.state
    if not request.directives.get(EXCHANGE):
        store.save(KEPT, request.current_round, request.state, kept=1)
        return request.state
    kept = store.load_at(KEPT, request.current_round)
    if kept is None:
        raise SiteError(
            f"site {site!r} has not kept the model of round {request.current_round}, whose norms it is asked about",
            skipped=True,
        )
    return {**kept, **request.state}


def report(run: SiteRun, model: torch.nn.Module, batch_size: int) -> dict[str, Any]:
    """Return the moments of the norms whose turn it is, over the training images.

    In the list's order, as for evaluation.

    Args:
        run: of the task.
        model: with the statistics so far; is not changed.
        batch_size: images in a batch.

    Raises:
        SiteError: no finite moments (names the norm).
    """
    images = ImageBatches(run, "training", batch_size)
    one_pass = bool(run.directives.get(ONE_PASS))
    first = next(iter(images), None)
    if first is None:
        raise SiteError(f"site {run.site!r} has no training images to measure its norms on", skipped=True)
    try:
        done, forward = run.directives.get(DONE) or (), whole_pass(model)
        group = next_group(model, first, done, all_at_once=one_pass, forward=forward)
        found = measure(model, images, group, by_batch=one_pass, forward=forward)
    except Unmeasurable as error:
        raise SiteError(f"site {run.site!r}: {error}") from error
    return {
        "norms": list(found),
        "values": [float(moments.count) for moments in found.values()],
        "means": [value for moments in found.values() for value in moments.mean.tolist()],
        "variances": [value for moments in found.values() for value in (moments.squares / moments.count).tolist()],
        "more": group.more,
    }


def whole_pass(model: Any) -> Forward:
    """Return the forward pass through all that is used in evaluation.

    Of a classifier with a projection head (Fed-MAS: ``embed``, ``head`` and ``projector``) also through that one, which
    the classes do without and the method measures with.
    """
    projector = getattr(model, "projector", None)
    if projector is None or not all(hasattr(model, name) for name in ("embed", "head")):
        return cast(Forward, model)

    def both(images: torch.Tensor) -> None:
        features = model.embed(images)
        model.head(features)
        getattr(model, "project", projector)(features)

    return both
