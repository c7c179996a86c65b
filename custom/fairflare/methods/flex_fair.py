r"""Define FlexFair, which adds a penalty on the variance of losses over the sites or over groups of people.

Xing et al., "Achieving flexible fairness metrics in federated medical imaging", Nature Communications 2025. The
objective is the sum of the sites' losses plus a weight times the variance of the parties' mean losses; a party is a
site or a group of people. The published code has all sites in one process and differentiates the losses of all sites
together. This module computes the same gradient from sums that the sites report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import refuse, refuse_if
from fairflare.base.settings import NonNegative, settings
from fairflare.core.aggregation.fair_rules import variance_slopes
from fairflare.core.statistics.group_metrics import positives
from fairflare.exchange.messages import BySite
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun, criterion_losses
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.group_sums import (
    ALIKE,
    GROUP_IMAGES,
    GROUP_LOSSES,
    MOST,
    MOST_GROUPS,
    bound_counts,
    check_attribute,
    check_told,
    count_groups,
    losses_by_group,
    numbers_of,
    require_numbers,
)

if TYPE_CHECKING:
    from fairflare.base.task import Task

SLOPES = "loss_slopes"
Over = Literal["sites", "groups", "both"]
Measure = Literal["equal_accuracy", "demographic_parity", "equal_opportunity"]


@settings
class VariancePenalty(LocalTraining):
    """Report mean losses by group and class, and weight each image's loss as the server asks (FlexFair).

    Args:
        flexfair_over: whose losses are to be alike: ``"sites"``, ``"groups"`` of people at all sites, or ``"both"``.
        flexfair_attribute: attribute of people that defines the groups.
        flexfair_measure: images whose losses count: ``"equal_accuracy"``: all; ``"demographic_parity"``: each class by
            itself; ``"equal_opportunity"``: of the classes that are looked for (of two the second).
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"flexfair_attribute": only_with("flexfair_over", "groups", "both")}

    flexfair_over: Over = "sites"
    flexfair_attribute: str = ""
    flexfair_measure: Measure = "equal_accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse({
            f"flexfair_over={self.flexfair_over!r} needs flexfair_attribute, an attribute that the datalists declare": (
                self.flexfair_over != "sites" and not self.flexfair_attribute
            ),
        })  # fmt: skip

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return {**check_attribute(run, self.flexfair_attribute), **super().check(run, model)}

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        refuse({
            f"flexfair_measure={self.flexfair_measure!r} needs a task with classes": (
                self.flexfair_measure != "equal_accuracy" and not task.has_classes
            ),
        })  # fmt: skip

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        tables = losses_by_group(self, run, model, self.flexfair_attribute, self._classes(run))
        run.own = {name: table.reshape(-1).tolist() for name, table in tables.items()}
        run.own["rows"] = float(len(tables[GROUP_LOSSES.name]))

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        directive = run.directives.get(SLOPES)
        if isinstance(directive, Mapping):
            directive = directive.get(run.site)
        if not directive:
            return super().loss(run, model, inputs, targets)
        classes = self._classes(run)
        rows = 1 + (count_groups(run, self.flexfair_attribute) if self.flexfair_attribute else 0)
        check_told(run, directive, rows * classes, "slopes of groups and classes")
        slopes = torch.tensor([*directive, *[0.0] * classes], dtype=torch.float32).reshape(
            -1, classes
        )  # last: no group
        column = targets.cpu().long() if classes > 1 else torch.zeros(len(inputs), dtype=torch.long)
        factors = 1 + slopes[0, column]
        if self.flexfair_attribute:
            images = require_numbers(run.batch, run.site, "flex_fair")
            groups = torch.from_numpy(numbers_of(run, self.flexfair_attribute, "training")[images])
            factors = factors + slopes[1 + groups, column]
        losses = criterion_losses(self, run, model(inputs), targets)
        # Factors are at least 0: a negative factor would make the model unlearn the image.
        return (factors.clamp(0, MOST).to(losses.device) * losses).mean()

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own)

    def _classes(self, run: SiteRun) -> int:
        return 1 if self.flexfair_measure == "equal_accuracy" else len(run.task.outcome_names())


@settings
class FlexFair(Rule):
    r"""Average by samples, and compute the factors on images' losses in the next round (FlexFair).

    .. math:: P = \sum_c \frac{1}{A_c} \sum_a (L_{ac} - M_c)^2, \quad
              L_{ac} = \textstyle\sum_k n_{kac} L_{kac} / \sum_k n_{kac}

    The parties a are sites or groups of people (with ``both``, the two penalties are added). c are classes, or all
    images together; M_c is the mean loss over the images. The loss of an image of party a and class c is multiplied by
    :math:`1 + \lambda s_{ac} / K`, with slopes s from
    :func:`fairflare.core.aggregation.fair_rules.variance_slopes` and K the number of sites of the round. K divides,
    because the paper's objective is the *sum* of the sites' losses plus :math:`\lambda P`, and the mean of the sites'
    models follows a K-th of its gradient. The slopes are one round late: sites report the losses of the model that they
    receive, and get the slopes with the next model. At the model for which the slopes hold, if no factor is clipped to
    [0, 10], the federation's gradient is that of the mean loss plus :math:`\lambda P / K`. A value that a site
    withholds has no effect.

    Args:
        flexfair_over, flexfair_measure: as at the sites.
        flexfair_weight: lambda of the paper; the authors' code has 2 for skin lesions, and tries 2 to 10 on polyps and
            cervix.
    """

    report_fields = (
        Field("rows", low=1, high=1000, doc="1 for all images, and 1 for each declared group", of=()),
        GROUP_LOSSES,
        GROUP_IMAGES,
    )
    directive_docs: ClassVar[dict[str, str]] = {
        SLOPES: "what an image of the site counts beyond once, by class: of any image, then of each group"
    }

    flexfair_over: Over = "sites"
    flexfair_measure: Measure = "equal_accuracy"
    flexfair_weight: NonNegative = 2.0

    weighs: ClassVar[bool] = False
    _sites = Saved(dict[str, list[float]])  # slopes by site and class
    _groups = Saved(list[list[float]])  # slopes by group and class

    def counted(self, report: Mapping[str, Any]) -> Mapping[str, float]:
        images = _rows(report[GROUP_IMAGES.name], report["rows"])
        whole, groups = float(np.nansum(images[:1])), float(np.nansum(images[1:]))
        return {"training": max(whole, groups), "groups": float(len(images[1:]))}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        count, rows = len(report[GROUP_LOSSES.name] or ()), report["rows"]
        most = 1 if self.flexfair_measure == "equal_accuracy" else MOST_GROUPS  # largest number of columns (classes)
        fits = not (rows % 1 or count % rows) and count <= most * rows and (rows == 1 or self.flexfair_over != "sites")
        refuse_if(site, {
            f"field 'group_losses' has {count} entries; expected is a multiple of 'rows' = {rows:g} (one for all "
            f"images, one for each group of people); {ALIKE}": count > 0 and not fits,
        })  # fmt: skip
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses, images = self._tables(inputs)
        classes = next(iter(losses.values())).shape[1] if losses else 0
        total = float(sum(inputs.num_samples[site] for site in inputs.sites))
        self._sites, self._groups = {}, []
        weight = self.flexfair_weight / max(len(inputs.sites), 1)
        wanted = positives(classes) if self.flexfair_measure == "equal_opportunity" else range(classes)
        for c in wanted if self.flexfair_over != "groups" else ():
            by_site = {site: (float(losses[site][0, c]), float(images[site][0, c])) for site in losses}
            for site, slope in _slopes(by_site, total, weight).items():
                self._sites.setdefault(site, [0.0] * classes)[c] = slope
        if self.flexfair_over != "sites" and losses:
            count = np.nansum([*images.values()], 0)[1:]
            summed = np.nansum([images[site] * losses[site] for site in losses], 0)[1:]
            self._groups = [[0.0] * classes for _ in count]
            for c in wanted:
                known = {g: (summed[g, c] / n[c], float(n[c])) for g, n in enumerate(count) if n[c] > 0}
                for group, slope in _slopes(known, total, weight).items():
                    self._groups[group][c] = slope
        return Weighing(
            sites=sample_weights(inputs), details={"slopes": {"sites": self._sites, "groups": self._groups}}
        )

    def _tables(self, inputs: RoundInputs) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
        """Return losses and numbers of images by row and class of each site whose report has most sites' shape."""
        reports = read_reports(inputs, GROUP_LOSSES.name)
        form = {s: (inputs.reports[s]["rows"], len(reported or ())) for s, reported in reports.items()}
        most = Counter(
            shape for shape in form.values() if shape[1] and not (shape[0] % 1 or shape[1] % shape[0])
        ).most_common(1)
        if not most:
            return {}, {}
        rows, cells = most[0][0]
        every = {site: np.asarray(reports[site], float) for site in inputs.sites if form[site] == (rows, cells)}
        losses = {site: table.copy().reshape(int(rows), -1) for site, table in every.items()}
        images = {s: np.asarray(inputs.reports[s][GROUP_IMAGES.name], float).reshape(int(rows), -1) for s in every}
        for cell in range(cells):
            known = {site: float(table[cell]) for site, table in every.items() if math.isfinite(table[cell])}
            others = [
                loss for table in every.values() for loss in np.delete(table, cell).tolist() if math.isfinite(loss)
            ]
            for site, loss in inputs.moderated(known, GROUP_LOSSES.name, others).items() if known else ():
                losses[site].flat[cell] = loss
        factors = bound_counts(inputs, {site: float(np.nansum(table[0])) for site, table in images.items()})
        return losses, {site: table * factors[site] for site, table in images.items()}

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        classes = len(next(iter([*self._sites.values(), *self._groups]), ()))
        if not classes:
            return {}
        groups = [slope for group in self._groups for slope in group]
        return {SLOPES: BySite({site: [*self._sites.get(site, [0.0] * classes), *groups] for site in sites})}


def _slopes(pairs: Mapping[Any, tuple[float, float]], total: float, weight: float) -> dict[Any, float]:
    """Return slopes times ``weight`` by party, from each party's mean loss and number of images in ``pairs``."""
    known = {key: both for key, both in pairs.items() if math.isfinite(sum(both)) and both[1] > 0}
    slopes = variance_slopes({k: v for k, (v, _) in known.items()}, {k: n for k, (_, n) in known.items()}, total)
    return {key: weight * slope for key, slope in slopes.items()}


def _rows(values: Sequence[float] | None, rows: float) -> np.ndarray[Any, Any]:
    """Return a report field's numbers as an array of ``rows`` rows; shape (1, 0) if the site does not report them."""
    return np.asarray(values, float).reshape(int(rows), -1) if values else np.zeros((1, 0))


METHODS = [
    Method(
        name="flex_fair",
        title="FlexFair",
        summary="a penalty on the variance of the losses over the sites, groups of people, or both",
        rule=FlexFair,
        training=VariancePenalty,
        group="people",
        source="Xing et al., Nature Communications 2025",
        **JOB,
    )
]
