r"""Measure a classifier of findings, of which an image may have several: loss, AUC and PR-AUC over the known labels.

A label of a finding is 1 (present), 0 (looked for, absent) or -1 (not known), which counts nowhere. The loss of an
image is the mean of the binary cross-entropies of its known findings; that of a batch is the mean over its images:

.. math:: L = \frac{1}{n} \sum_i \frac{1}{|K_i|} \sum_{f \in K_i} \mathrm{BCE}(z_{if}, y_{if})
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fairflare.base.metric import LOSS, Metric

if TYPE_CHECKING:
    import torch

    Labels = npt.NDArray[np.int64]

PR_AUC = "pr_auc"  # metric: average precision


def declare_findings(names: Sequence[str]) -> tuple[Metric, ...]:
    """Declare the metrics over all findings and of each finding, and the loss."""
    metrics = [LOSS]
    for name, doc, reveals in (
        ("auc", "area under the ROC curve", "there or not: whether the site has images with and without the finding"),
        (PR_AUC, "average precision", "of a model that tells all alike it is the share of images with the finding"),
    ):
        metrics.append(Metric(
            name=name, doc=f"{doc}, mean over the findings that the site can measure", reveals=reveals,
            higher_is_better=True, of_classes=tuple(range(len(names))),
        ))  # fmt: skip
        metrics += [
            Metric(
                name=f"{name}_{finding}", doc=f"{doc} of one finding", reveals=reveals, higher_is_better=True,
                by_class=True, of_classes=(number,), family=f"{name}_<class>",
            ) for number, finding in enumerate(names)
        ]  # fmt: skip
    metrics += [
        Metric(
            name=f"loss_{finding}", doc="mean loss of one finding", higher_is_better=False, by_class=True,
            of_classes=(number,), low=-math.inf, high=math.inf, family="loss_<class>",
        ) for number, finding in enumerate(names)
    ]  # fmt: skip
    return tuple(metrics)


def finding_losses(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the binary cross-entropy of each image and finding, 0 where it is not known, and whether it is known.

    Args:
        outputs: logits, (n, findings).
        targets: 1, 0 or -1 (not known), (n, findings).
    """
    from torch.nn.functional import binary_cross_entropy_with_logits

    known = targets >= 0
    losses = binary_cross_entropy_with_logits(outputs, targets.clamp(min=0).to(outputs.dtype), reduction="none")
    return losses * known, known


def image_losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each image, (n,): the mean over its known findings; 0 for an image without known findings."""
    losses, known = finding_losses(outputs, targets)
    return losses.sum(1) / known.sum(1).clamp(min=1)


def finding_metrics(
    targets: Labels, probabilities: npt.NDArray[np.float64], names: Sequence[str], measured: Sequence[int]
) -> dict[str, float]:
    """Return AUC and average precision by finding, as :func:`declare_findings` names them, and their means.

    Args:
        targets: 1, 0 or -1 (not known), (n, findings).
        probabilities: probability of each finding, (n, findings).
        names: names of the findings.
        measured: numbers of the findings that are measured. A finding is left out if all images known have it or all
            lack it; the mean over no finding is NaN.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    by_metric: dict[str, dict[str, float]] = {"auc": {}, PR_AUC: {}}
    for number in measured:
        known = targets[:, number] >= 0
        truth, scores = targets[known, number] == 1, probabilities[known, number]
        if truth.any() and not truth.all():
            by_metric["auc"][names[number]] = float(roc_auc_score(truth, scores))
            # may be rounded up
            by_metric[PR_AUC][names[number]] = min(1.0, float(average_precision_score(truth, scores)))
    return {
        metric if name is None else f"{metric}_{name}": value
        for metric, by_name in by_metric.items()
        for name, value in ((None, float(np.mean([*by_name.values()])) if by_name else math.nan), *by_name.items())
    }


def cases_of_findings(cases: Sequence[Hashable], targets: Labels) -> list[int]:
    """Return, for each finding, the number of different cases with it or of those without it, whichever is smaller."""
    return [
        min(len({case for case, value in zip(cases, column, strict=True) if value == side}) for side in (0, 1))
        for column in targets.T.tolist()
    ]


def find_known(targets: Iterable[Labels]) -> tuple[int, ...]:
    """Return the numbers of the findings that have a known label (1 or 0) in any image of any split."""
    return tuple(np.flatnonzero(np.any([(rows >= 0).any(0) for rows in targets], axis=0)).tolist())
