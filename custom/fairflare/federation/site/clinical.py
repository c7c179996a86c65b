"""Declare, fill and read the fields for the clinical figures of a classifier on a site's test images.

The site computes them in the final test from its own scores: sums over its images, areas under curves, and counts at
operating points whose thresholds come from its validation split. No score of an image is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fairflare.base.cases.sampling import number_cases
from fairflare.base.checks import refuse_if
from fairflare.core.statistics.areas import ALL, OPERATING, delong, threshold
from fairflare.core.statistics.group_metrics import metrics_of, positives
from fairflare.core.statistics.group_sums import (
    BRIER,
    CALIBRATION,
    CELLS,
    CONFUSION,
    IMAGES,
    Array,
    Sums,
    find_hidden_parts,
    impossible,
    sums_of,
)
from fairflare.federation.site.sampling import BY_CLASS, CLASSES
from fairflare.methods.base.reports import Field

if TYPE_CHECKING:
    import torch

    from fairflare.base.task import SiteData, Task

TABLE = "clinical_table"  # key in a reply's stats at the site; the gate replaces the table by its figures
OVER_ALL, OF_CLASSES = "clinical_calibration", "clinical_classes"  # names of the fields
BINS = 15  # number of bins of the predicted class's probability
DIGITS = 3  # decimals of a threshold, which is the score of a validation image
COUNTS = ("tp", "fp", "fn", "tn")
#: Names of the figures of each positive class (:func:`positives`), in the order in which they are sent; ``squares``:
#: sum over cases of the square of their number of images.
COLUMNS = (
    "cases_with", "squares_with", "cases_without", "squares_without", *COUNTS, "auc", "auc_variance", "pr_auc",
    *(f"{name}_at_{side}_{share:.2f}" for side, share in OPERATING for name in ("threshold", *COUNTS)),
)  # fmt: skip
FIELDS = (
    Field(
        OVER_ALL, "vector", low=0, required=False,
        doc=f"by {BINS} bins of the told class's probability: test images, sum of these probabilities, images told "
        "right; then the sum of Brier's squares",
        reveals="how sure the model is of single images, to a bin, not of which", of=("test",),
    ),
    Field(
        OF_CLASSES, "vector", low=0, nan_ok=True, required=False,
        doc="by class (of two the second): test patients with and without it, sums of their squared numbers of images; "
        "TP, FP, FN, TN; AUC, its variance, average precision; threshold of the validation split for "
        f"{' and '.join(f'{side} {share:.2f}' for side, share in OPERATING)}, to {DIGITS} digits, with TP, FP, FN, TN",
        reveals="how often each class occurs; a validation score to a thousandth, not whose",
        keep=f"{BY_CLASS}, `min_cases`", of=("test",),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ClinicalTable:
    """Hold the true classes and probabilities of a site's images; only figures computed from them are sent.

    Attributes:
        splits: for ``test`` and ``validation`` the classes (n,) and probabilities (n, classes) of the images, and the
            number of each image's case (n,); for findings labels are 1, 0 or -1 (not known), (n, findings).
        annotated: numbers of the classes that the site's images can have; figures of others are NaN; ``None`` for all.
    """

    splits: Mapping[str, tuple[np.ndarray[Any, np.dtype[np.int64]], Array, np.ndarray[Any, np.dtype[np.int64]]]]
    annotated: Sequence[int] | None = None

    def sent(self, least: int, by_class: bool) -> tuple[dict[str, Any], list[str]]:
        """Return the clinical figures as declared fields of the reply, and the names of the classes that are withheld.

        Args:
            least: least number of cases with and without a class, in a split, below which its figures are withheld.
            by_class: whether figures by class may be sent.
        """
        labels, scores, cases = self.splits["test"]
        if labels.ndim == 2:
            return self._send_findings(least, by_class)
        sums = sums_of(labels, scores, np.ones(len(labels), bool), 1, BINS, cases, least)
        fields = {OVER_ALL: [*sums[CALIBRATION].reshape(-1).tolist(), float(sums[BRIER])]}
        if not by_class:
            return fields, []
        hidden = {
            split: find_hidden_parts(whose.tolist(), truth, 0 * truth, frozenset(), least, scores.shape[1])
            for split, (truth, _, whose) in self.splits.items()
        }
        every = range(scores.shape[1])
        none = hidden["test"] | {*every}.difference(every if self.annotated is None else self.annotated)
        rows = [
            [np.nan] * len(COLUMNS) if label in none else self._measure_class(label, sums, hidden["validation"])
            for label in positives(scores.shape[1])
        ]
        withheld = [f"clinical {split}/class {label}" for split, labels in hidden.items() for label in sorted(labels)]
        return fields | {OF_CLASSES: [float(value) for row in rows for value in row]}, withheld

    def _send_findings(self, least: int, by_class: bool) -> tuple[dict[str, Any], list[str]]:
        """Return the result of :meth:`sent` for findings: each is measured on its known labels, like two classes."""
        rows: list[float] = []
        withheld: list[str] = []
        bins = np.zeros(3 * BINS + 1)
        for number in range(self.splits["test"][0].shape[1]):
            by_split = {}
            for split, (labels, scores, cases) in self.splits.items():
                known = labels[:, number] >= 0
                sides = np.stack([1 - scores[known, number], scores[known, number]], 1)
                by_split[split] = (labels[known, number], sides, cases[known])
            fields: dict[str, Any] = {OVER_ALL: 0.0, OF_CLASSES: [np.nan] * len(COLUMNS)}
            if all(len(labels) for labels, _, _ in by_split.values()):
                fields, held = ClinicalTable(by_split).sent(least, by_class)
                withheld += [f"{name.partition('/')[0]}/finding {number}" for name in held[:1]]
            bins += np.asarray(fields[OVER_ALL])
            rows += fields.get(OF_CLASSES, [])
        return {OVER_ALL: bins.tolist()} | ({OF_CLASSES: rows} if by_class else {}), withheld

    def _measure_class(self, label: int, sums: Sums, without: frozenset[int]) -> list[float]:
        """Return a class's figures in the order of :data:`COLUMNS`; ``without``: classes that have no threshold."""
        from sklearn.metrics import average_precision_score

        (labels, scores, cases), (known, marks, _) = self.splits["test"], self.splits["validation"]
        truth, class_scores = labels == label, scores[:, label]
        area, variance = delong(truth, class_scores[None], cases)
        precision = average_precision_score(truth, class_scores) if truth.any() else np.nan
        row = [*sums[CELLS][label].reshape(-1), *sums[CONFUSION][label], *area, *variance[0], precision]
        for side, share in OPERATING:
            mark = np.nan if label in without else threshold(known == label, marks[:, label], share, side)
            cells = np.bincount(2 * ~(class_scores >= mark) + ~truth, minlength=4)  # TP, FP, FN, TN
            shown = round(mark, DIGITS) if np.isfinite(mark) else np.nan
            row += [np.nan] * 5 if np.isnan(mark) else [shown, *cells]
        return row


def table_of(task: Task, model: torch.nn.Module, data: SiteData, device: torch.device) -> ClinicalTable:
    """Return classes and probabilities of a site's test and validation images, for a task with one class an image."""
    outcomes: dict[str, Any] = {split: task.outcomes(model, data, split, device) for split in ("test", "validation")}
    splits = {
        split: (*arrays, number_cases(len(arrays[0]), data.cases(split))[1]) for split, arrays in outcomes.items()
    }
    return ClinicalTable(splits, data.annotated)


def read_clinical(
    site: str, stats: Mapping[str, Any], classes: int, images: float | None, findings: Sequence[str] | None = None
) -> dict[str, Any] | None:
    """Return the checked figures of a reply by class and name, or ``None`` if the reply has none.

    Args:
        site: name of the site that sent the reply.
        stats: the reply's ``stats``, checked field by field.
        classes: number of classes of the task.
        images: number of images in the site's test split; ``None`` if it is not known.
        findings: names of the findings, each known of some of the images; ``None`` if the task has classes.

    Returns:
        ``calibration``, ``brier`` and ``ece`` of all classes together under :data:`ALL`, and :data:`COLUMNS` of each
        positive class (:func:`positives`), if the site sent them.

    Raises:
        ReportError: a vector has another length, or the figures contradict each other (names site and field).
    """
    if stats[OVER_ALL] is None:
        return None
    rows, labels = stats[OF_CLASSES], positives(classes) if findings is None else range(classes)
    names: Sequence[str] = findings or stats[CLASSES] or [f"class {number}" for number in range(classes)]
    lengths = {
        OVER_ALL: (stats[OVER_ALL], 3 * BINS + 1), CLASSES: (names, classes),
        OF_CLASSES: (rows or [], 0 if rows is None else len(labels) * len(COLUMNS)),
    }  # fmt: skip
    refuse_if(site, {
        f"field {name!r} has {len(values)} entries, expected {size}": len(values) != size
        for name, (values, size) in lengths.items()
    })  # fmt: skip
    sums = {CALIBRATION: np.reshape(stats[OVER_ALL][:-1], (BINS, 3)), BRIER: np.asarray(stats[OVER_ALL][-1])}
    counted = sums[CALIBRATION][:, 0].sum()
    count = np.asarray(counted if images is None or findings is not None else images)
    most = count if images is None else images
    table = np.reshape(rows or [], (-1, len(COLUMNS)))
    cases, cells, areas, points = np.split(table, [4, 8, 11], axis=1)
    cells = np.stack([cells, *points.reshape(-1, len(OPERATING), 5)[..., 1:].swapaxes(0, 1)])
    sides = cells[..., :2] + cells[..., 2:]  # images with the class, and without it
    odd = [
        np.abs(sides - sides[0]), sides[0].sum(-1) - most, areas - 1, cases[:, ::2] - sides[0],
        cases[:, 1::2] - sides[0] ** 2, *([] if findings else [most - sides[0].sum(-1)]),
    ]  # fmt: skip
    refuse_if(site, {
        f"field {OVER_ALL!r} is of {counted:.0f} labels, more than {images} images have": counted > most * classes,
        f"field {OVER_ALL!r} cannot be of {count:.0f} images": bool(impossible({IMAGES: count, **sums})),
        f"field {OF_CLASSES!r} cannot be of {count:.0f} images": any((values > 1e-6).any() for values in odd),
    })  # fmt: skip
    metrics = metrics_of(sums)
    return {
        ALL: {CALIBRATION: sums[CALIBRATION], "brier": metrics["brier"], "ece": metrics["ece"]},
        **{names[label]: dict(zip(COLUMNS, row, strict=True)) for label, row in zip(labels, table, strict=False)},
    }
