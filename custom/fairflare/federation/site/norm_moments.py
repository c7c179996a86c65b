"""Report the moments of a network's batch norm inputs over a site's training images.

``docs/norm_statistics.md`` explains the purpose. The server's half is :mod:`fairflare.federation.server.recalibration`.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fairflare.core.features.batch_norms import Forward, Unmeasurable, measure, next_group
from fairflare.exchange.messages import SiteTask
from fairflare.methods.base.image_batches import ImageBatches
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.training import SiteError, SiteRun, SiteStore

KEPT = "norm_model"  # name in the site's store: the model of a round, for that round's ``norms`` tasks after the first
#: Keys of the values that the server sends a site with the task ``norms``.
DONE, EXCHANGE = "done", "exchange"
MEASURED = ("means", "variances")  # keys of the report that with secure sums do not leave the site

# Limits of the reported means and variances: a mean's square fits into float32, and no network computes such values.
MOST_MEAN, MOST_VARIANCE = 1e15, 1e30
MOST_VALUES = 2**53  # a float holds every whole number up to this one

AVERAGES = (
    "averages over the site's images: contrast and brightness of the scanner, with few images nearly the images. A "
    "server that means harm chooses the network and so what is averaged"
)
#: Fields that a site reports in its answer to the ``norms`` task.
FIELDS = (
    Field("norms", "names", doc="names of the batch norms in this answer", of=TRAINING),
    Field(
        "values", "vector", low=1, high=MOST_VALUES, same_length_as="norms",
        doc="how many values of a channel went into each: training images times places of an image",
        reveals="the number of training images", of=TRAINING,
    ),
    Field(
        "means", "vector", low=-MOST_MEAN, high=MOST_MEAN,
        doc="mean of each channel of these batch norms' inputs, one batch norm after the other",
        reveals=AVERAGES, keep="`secure=sums`", of=TRAINING,
    ),
    Field(
        "variances", "vector", low=0, high=MOST_VARIANCE,
        doc="biased variance of the same", reveals=AVERAGES, keep="`secure=sums`", of=TRAINING,
    ),
    Field("more", "flag", doc="whether the network has further batch norms, which a later answer has", of=TRAINING),
)  # fmt: skip


def restore_model(request: SiteTask, store: SiteStore, site: str) -> dict[str, torch.Tensor]:
    """Return the whole model whose batch norms a ``norms`` task measures.

    The first ``norms`` task of a round carries the model, which the site saves. Later ones of that round carry only the
    tensors that changed.

    Raises:
        SiteError: this site has no saved model of the round (names the round).
    """
    if not request.directives.get(EXCHANGE):
        store.save(KEPT, request.current_round, request.state, kept=1)
        return request.state
    if (stored := store.load_at(KEPT, request.current_round)) is None:
        raise SiteError(
            f"site {site!r} has not kept the model of round {request.current_round}, whose batch norms it must measure",
            skipped=True,
        )
    return {**stored, **request.state}


def report(run: SiteRun, model: torch.nn.Module, batch_size: int) -> dict[str, Any]:
    """Return the report of the next group of batch norms: the moments of their inputs over the training images.

    The images come in the order of their list and without augmentation, as for evaluation.

    Args:
        run: the site's run of the ``norms`` task; its directives name the batch norms measured so far.
        model: the network with the statistics found so far; is not changed.
        batch_size: number of images in a batch.

    Raises:
        SiteError: a batch norm's moments are not finite (names it), or the site has no training images.
    """
    images = ImageBatches(run, "training", batch_size)
    if (first := next(iter(images), None)) is None:
        raise SiteError(f"site {run.site!r} has no training images to measure batch norms on", skipped=True)
    try:
        done, forward = run.directives.get(DONE) or (), whole_pass(model)
        group = next_group(model, first, done, forward=forward)
        moments = measure(model, images, group, forward=forward)
    except Unmeasurable as error:
        raise SiteError(f"site {run.site!r}: {error}") from error
    return {
        "norms": list(moments),
        "values": [float(moments.count) for moments in moments.values()],
        "means": [value for moments in moments.values() for value in moments.mean.tolist()],
        "variances": [value for moments in moments.values() for value in (moments.squares / moments.count).tolist()],
        "more": group.more,
    }


def whole_pass(model: Any) -> Forward:
    """Return a forward pass through every part of a model that evaluation or the method uses.

    For a classifier with a projection head (Fed-MAS: ``embed``, ``head`` and ``projector``) the pass includes that
    head: predicted classes do not depend on it, but the method's measurements do.
    """
    projector = getattr(model, "projector", None)
    if projector is None or not all(hasattr(model, name) for name in ("embed", "head")):
        return cast(Forward, model)

    def both(images: torch.Tensor) -> None:
        features = model.embed(images)
        model.head(features)
        getattr(model, "project", projector)(features)

    return both
