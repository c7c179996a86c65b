"""Compute classification metrics by name, as the papers use them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from fairflare.base import checks
from fairflare.core.statistics.areas import delong

STEERED = "a server that sends a model which always answers one class reads off that class's share"
#: By its name, what each metric means, and what a server can derive from it about a site's data beyond the model's
#: quality, from a metric of one model.
MEANINGS = {
    "accuracy": ("share of images whose class was told", STEERED),
    "balanced_accuracy": (
        "mean recall of the classes that occur",
        "of such a model it is 1 / (number of classes that occur), or 0 where that one does not",
    ),
    "precision": ("precision, weighted by class size", STEERED),
    "recall": ("recall, weighted by class size", STEERED),
    "f1": ("F1, weighted by class size", STEERED),
    "precision_macro": ("mean precision over the classes that occur", ""),
    "f1_macro": ("mean F1 over the classes that occur", ""),
    "f1_harmonic": ("2PR / (P + R) of the weighted two", ""),
    "auc_ovo": (
        "area under the ROC curve, one versus one; absent where one class only occurs",
        "there or not: whether the site has more than one class",
    ),
    "auc_ovr": ("the same, one versus rest, weighted by class size", "the same"),
}


def classification_metrics(
    targets: npt.NDArray[np.integer],
    probabilities: npt.NDArray[np.floating],
    *,
    class_names: Sequence[str],
    groups: Mapping[str, Sequence[int]] | None = None,
    areas: bool = True,
) -> dict[str, float]:
    """Compute the classification metrics of a test set, each under a name that states its variant.

    Args:
        targets: true class numbers, (n,).
        probabilities: predicted probabilities, (n, classes); rows sum to 1.
        class_names: names of the classes, for ``recall_<name>``.
        groups: ``{"head": [classes], ...}``: ``<group>`` is the mean recall of its classes that occur, ``all`` the
            mean of the groups (Fed-MAS, Tables 1 and 2).
        areas: False: leave out the areas under the ROC curve, which take most of the time.

    Returns:
        ``accuracy``; ``balanced_accuracy`` (mean recall of the classes that occur); ``precision``, ``recall``,
        ``f1`` (weighted by class size, 0 where undefined); ``precision_macro``, ``f1_macro`` (as scikit-learn: over
        the classes that occur or are predicted, 0 where undefined); ``f1_harmonic`` = 2PR/(P+R) of weighted precision
        and recall (FedMRL's table); ``auc_ovo`` (one-versus-one, macro: FedISM's AUC); ``auc_ovr`` (one-versus-rest,
        weighted: FedMRL's AUC); ``recall_<class>``. A class that does not occur has no recall and no AUC;
        probabilities are renormalised over the other classes, and AUC is absent if only one class occurs.

    Raises:
        ValueError: shapes do not fit, there is no sample, or a class number is out of range.
    """
    from sklearn.metrics import precision_recall_fscore_support

    if targets.ndim != 1 or probabilities.shape != (len(targets), len(class_names)):
        raise ValueError(
            f"targets (n,) and probabilities (n, {len(class_names)}) are needed, got {targets.shape} and "
            f"{probabilities.shape}"
        )
    checks.whole("the number of samples", len(targets))
    for number in (targets.min(), targets.max()):
        checks.number("class numbers", int(number), low=0, high=len(class_names) - 1, whole=True)
    predicted = probabilities.argmax(1)
    named = np.union1d(targets, predicted)
    # One call in place of the three that the averages would need, since a bootstrap makes thousands of calls.
    *of_classes, support = precision_recall_fscore_support(targets, predicted, labels=named, zero_division=0)
    scores = dict(zip(("precision", "recall", "f1"), of_classes, strict=True))
    present, recalls = (
        part[support > 0] for part in (named, scores["recall"])
    )  # a class that is only predicted has none
    metrics = {
        "accuracy": float(np.mean(predicted == targets)),
        "balanced_accuracy": float(np.mean(recalls)),
        **{name: float(np.average(of_class, weights=support)) for name, of_class in scores.items()},
        "precision_macro": float(np.mean(scores["precision"])),
        "f1_macro": float(np.mean(scores["f1"])),
    }
    precision, recall = metrics["precision"], metrics["recall"]
    metrics["f1_harmonic"] = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
    if areas and len(present) > 1:
        metrics.update(_areas(targets, probabilities, present))
    by_class = dict(zip(present.tolist(), recalls.tolist(), strict=True))
    of_groups = {group: [by_class[c] for c in members if c in by_class] for group, members in (groups or {}).items()}
    means = {group: math.fsum(values) / len(values) for group, values in of_groups.items() if values}
    if means:
        means["all"] = math.fsum(means.values()) / len(means)
    return metrics | {f"recall_{class_names[c]}": recall for c, recall in by_class.items()} | means


def _areas(
    targets: npt.NDArray[np.integer], probabilities: npt.NDArray[np.floating], present: npt.NDArray[np.integer]
) -> dict[str, float]:
    shares = probabilities[:, present].astype(np.float64)
    total = shares.sum(1, keepdims=True)
    shares = np.where(total > 0, shares / np.where(total > 0, total, 1), 1 / len(present))
    truth = targets[:, None] == present
    rest = [delong(marks, score[None])[0].item() for marks, score in zip(truth.T, shares.T, strict=True)]
    if len(present) == 2:
        return {"auc_ovo": rest[1], "auc_ovr": rest[1]}
    pairs = [
        delong(truth[either, one], shares[either][:, [one, other]].T)[0]
        for one, other in combinations(range(len(present)), 2)
        for either in [truth[:, one] | truth[:, other]]
    ]
    return {
        "auc_ovo": math.fsum(area - turned + 1 for area, turned in pairs) / (2 * len(pairs)),
        "auc_ovr": float(np.average(rest, weights=truth.sum(0))),
    }
