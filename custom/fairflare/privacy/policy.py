"""Apply the setting ``privacy`` of a site's own file, which asks for differential privacy: train, refuse, withhold."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fairflare.base.aspect import PRIVATE, refusals
from fairflare.base.checks import refuse
from fairflare.base.settings import BelowOne, Positive, PositiveInt, field_names, settings
from fairflare.base.task import LOSS, SiteData
from fairflare.core.cells import SUPPRESSED, TEST, VALIDATION, Cell
from fairflare.core.features.norms import running_statistics
from fairflare.exchange.messages import (
    FURTHER,
    STATUS_FAILED,
    STATUS_OK,
    TASK_CHECK,
    TASK_PLAN,
    TASK_TRAIN,
    TASK_VALIDATE,
    SiteReply,
    SiteTask,
)
from fairflare.methods.base.local_loop import Trained
from fairflare.methods.base.reports import LENGTH
from fairflare.methods.base.site_run import SiteError, SiteRun
from fairflare.methods.base.training import LocalTraining
from fairflare.privacy.ledger import BudgetRefused, Cost, Ledger, Spending
from fairflare.privacy.reports import LOSS_BOUND, losses_at, measure_units, noisy_mean, one_release
from fairflare.privacy.training import PrivateLoop, PrivateUnits

log = logging.getLogger(__name__)

(PRIVACY,) = PRIVATE.site_keys  # name of the site's setting, and of the fact that a site reports
#: Name of the fact with target, delta, units times epsilon of a noisy number, and rounds that the budget lasts for.
BUDGET = "budget"
LOTTERY = 100.0  # patients times epsilon below which weights by noisy losses are nearly random
#: Largest target epsilon that is called reasonable (Ponomareva et al., JAIR 2023, section 5.2; above: weak to none).
REASONABLE = 10.0
EPSILON = "epsilon"  # name of the value in the stats of a round
LAST_LINE = "ledger"  # name of the last line's hash in a reply's stats, and of the directive in which it comes back
SAYS = "under_dp"  # attribute by which a class says whether its training may be differentially private
#: Facts about a site's lists that are sent: none depends on what is in an image or a label.
PUBLIC = (
    "splits", "images", "suppressed", "min_cases", "synthetic", "device", "class_names", "class_groups", "mask_labels",
    "personal", "computing", "group_names", "channels",
)  # fmt: skip
#: Attributes that Python gives every class; a class that has others changes something.
PLAIN = {
    "__module__", "__doc__", "__qualname__", "__annotations__", "__firstlineno__", "__static_attributes__",
    "__abstractmethods__", "__annotate_func__", "__annotations_cache__", "__orig_bases__", "__parameters__",
    "_abc_impl", "__slotnames__",  # the last one by copy.copy
}  # fmt: skip


@settings
class PrivacySettings:
    """Define the budget of a site's cases, and the noise of its training.

    Args:
        epsilon: target over all rounds and jobs; a round that would exceed it is refused.
        delta: chance for which it does not hold, below 1 / n; default: the less of 1e-5 and 1 / (10 n).
        noise: noise multiplier z.
        clip: norm that the gradient of a patient (or image) is clipped to.
        images: largest number of images of a drawn patient that are used in a step.
        reports: noise multiplier of each reported loss and metric; ``None`` if they stay at home.
    """

    epsilon: Positive
    delta: BelowOne | None = None
    noise: Positive = 1.0
    clip: Positive = 1.0
    images: PositiveInt = 1
    reports: Positive | None = None


def budget_notes(target: float, lasts: float = 0, rounds: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield what users should know of a site's budget, each with whether it is a warning.

    Args:
        target: the largest epsilon.
        lasts, rounds: for how many of the job's rounds it lasts; no round: no job is known yet.
    """
    if rounds:
        yield (
            f"epsilon {target:g} lasts for {lasts:g} of {rounds} round(s)"
            + ", then it skips them; run fewer rounds, or let its own file have a larger epsilon or more noise"
            * (lasts < rounds),
            lasts < rounds,
        )
    if target > REASONABLE:
        yield (
            f"epsilon {target:g} protects little or nothing (at most {REASONABLE:g} counts as reasonable); let its own "
            "file have a smaller one, with more noise",
            True,
        )


def declares(kind: type) -> bool:
    """Return whether a class declares that it may be trained with differential privacy.

    It may if each term of the loss depends only on one patient's images or on public values, as in plain training. What
    a class declares holds for itself, and for subclasses that override none of its methods.
    """
    for cls in kind.__mro__:
        if SAYS in vars(cls) or cls is LocalTraining:
            return vars(cls).get(SAYS, True) is True
        if not vars(cls).keys() <= PLAIN:
            return False
    return False


def can_account(kind: type) -> bool:
    """Return whether differential privacy can account for a method's site half, its training at the sites.

    The half must declare this, and must not override the training loop. It may override the step if it says how many
    ``gradients`` of a batch a step takes, and the report if it declares the report's mean losses in ``released`` (name:
    distances from the received model).
    """
    known = {"train": "", "step": "gradients", "report": "released"}
    overridden = [name for name in known if getattr(kind, name, None) is not getattr(LocalTraining, name)]
    return declares(kind) and all(hasattr(kind, known[name]) for name in overridden)


class Private:
    """Train at a site with differential privacy, count the cost in the site's ledger, and withhold what is not counted.

    Args:
        site: name of the site.
        own: the site's setting.
        root: the site's state root, where its ledger lies.
    """

    def __init__(self, site: str, own: PrivacySettings, root: Path) -> None:
        self.site, self.own = site, own
        self.ledger = Ledger(site, root)
        self._after: dict[int, float] = {}
        self._lasts, self._noise = 0, 0.0
        self.public: set[str] = set()  # reasons that may leave
        self._names: dict[str, Any] = {}  # names of job, experiment and round
        self._asked: dict[str, tuple[float, ...]] = {}  # what is reported: name, and distances from the received model
        self._noisy: list[tuple[str, float]] = []  # the numbers that may leave, with noise and counted

    @classmethod
    def read(cls, site: str, given: Mapping[str, Any]) -> Private | None:
        """Return the differential privacy that a site's file asks for, or ``None`` if it asks for none.

        Raises:
            SiteError: the setting is wrong, or the file does not say where the ledger is.
        """
        if PRIVACY not in given:
            return None
        asked, root = given[PRIVACY], given.get("state_root")
        refuse({
            f"site {site!r}: setting {PRIVACY!r} must be an object with 'epsilon', got {asked!r:.80}":
                not isinstance(asked, Mapping),
        }, SiteError)  # fmt: skip
        try:
            settings = PrivacySettings(**asked)
        except ValueError as error:
            raise SiteError(f"site {site!r}: setting {PRIVACY!r}: {error}") from None
        if not isinstance(root, str) or not Path(root).is_absolute():
            raise SiteError(
                f"site {site!r}: {PRIVACY!r} needs 'state_root', the absolute path of a folder that outlives all jobs, "
                f"for its ledger, got {root!r:.80}",
                public=f"site {site!r}: {PRIVACY!r} needs 'state_root', the absolute path of a folder",
            )
        return cls(site, settings, Path(root))

    # -- what is trained

    def check(self, training: Any, run: SiteRun, model: torch.nn.Module) -> None:
        """Refuse a run whose cost in privacy cannot be counted, or whose first round the budget does not last for.

        Raises:
            BudgetRefused: training, task, a setting or the network does not allow it, the budget is spent, or the
                ledger cannot be trusted.
        """
        spending = self._plan_spending(training, run, model)
        self._lasts = self.ledger.lasts(run.data.identities("training"), spending, run.num_rounds - run.current_round)
        self._noise = (self.own.reports or 0.0) / (len(PrivateUnits.find(run.data, "test").members) or math.inf)

    def check_budget(self, data: SiteData) -> None:
        """Refuse data with which every job's training would be refused, before there is a job; write nothing.

        Raises:
            BudgetRefused: delta, a ledger not to be trusted, or a budget that lasts for no step; or opacus is missing.
        """
        units = PrivateUnits.find(data)
        step = self._spending(TASK_TRAIN, units, (self.own.noise, 1 / len(units.members), 1), self.own.clip)
        self.ledger.lasts(data.identities("training"), step, 1, begins=False)

    def train(self, training: LocalTraining, request: SiteTask, run: SiteRun, model: torch.nn.Module) -> Trained:
        """Reserve a round in the ledger, then train it.

        Raises:
            BudgetRefused: the cost cannot be counted, the budget is spent, or the ledger cannot be trusted.
        """
        spending, number = self._plan_spending(training, run, model), request.current_round
        self._after[number] = self.ledger.reserve(run.data.identities("training"), spending, self._names)
        log.info("site %s: round %d: epsilon %.4f of %g", self.site, number, self._after[number], self.own.epsilon)
        return PrivateLoop(training, run, model, self.own.noise, self.own.clip, self.own.images).train(
            PrivateUnits.find(run.data)
        )

    def _plan_spending(self, training: Any, run: SiteRun, model: torch.nn.Module) -> Spending:
        """Return what a round of training will spend; refuse what cannot be counted, naming the setting and remedy."""
        for problem in refusals(self._facts(training, run, model), [PRIVATE]):
            raise BudgetRefused(self.site, problem)
        units, settings = PrivateUnits.find(run.data), self.own
        rate, steps = units.plan(training)
        self._asked = training.released(run) if settings.reports and hasattr(training, "released") else {}
        also = ((settings.reports or 0.0, 1.0, len(self._asked)),) if self._asked else ()
        # k noisy gradients of one batch cost as much privacy as one whose noise is smaller by sqrt(k).
        cost = (settings.noise / math.sqrt(getattr(training, "gradients", 1)), rate, steps)
        return self._spending(TASK_TRAIN, units, cost, settings.clip, also)

    def report(self, run: SiteRun, model: torch.nn.Module, received: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the noisy report of a trained round: mean losses, or differences between two mean losses."""
        units, released = PrivateUnits.find(run.data), {}
        for name, distances in self._asked.items():
            values, *base = (losses_at(run, units, model, received, distance) for distance in distances)
            rise = [there - here for there, here in zip(values, *base, strict=True)] if base else values
            released[name] = self._release(name, rise, -LOSS_BOUND if base else 0.0, LOSS_BOUND)
        return released

    def measure(self, run: SiteRun, model: torch.nn.Module, split: str) -> dict[str, float]:
        """Return one metric of a model on a split with noise, the others as NaN; all are NaN if the budget is spent.

        The one metric is the primary metric if that is a mean over images, else the first declared metric that is.
        """
        metrics = dict.fromkeys((run.task.primary_metric, LOSS.name), math.nan)
        means = [metric for metric in run.task.declared_metrics() if metric.mean_of_images and not metric.by_class]
        if self.own.reports is None or not means or not run.data.num_samples(split):
            return metrics
        shown = min(means, key=lambda metric: metric.name != run.task.primary_metric)
        units = PrivateUnits.find(run.data, split)
        try:
            spending = self._spending(TASK_VALIDATE, units, (self.own.reports, 1.0, 1), 1 / len(units.members))
            self.ledger.reserve(run.data.identities(split), spending, self._names)
        except BudgetRefused as error:
            log.warning("site %s: metrics on %r stay at home: %s", self.site, split, error)
            return metrics
        evaluate = partial(run.task.evaluate, model, device=run.device)
        values = [each.get(shown.name, math.nan) for each in measure_units(run, units, split, evaluate, metrics)]
        return metrics | {shown.name: self._release(shown.name, values, shown.low, shown.high)}

    def _release(self, name: str, values: list[float], low: float, high: float) -> float:
        noisy = noisy_mean(values, low, high, self.own.reports or math.inf)
        self._noisy.append((name, noisy))
        return noisy

    def _spending(
        self, kind: str, units: PrivateUnits, cost: Cost, sensitivity: float, also: tuple[Cost, ...] = ()
    ) -> Spending:
        return Spending(
            kind, units.kind, len(units.members), *cost, sensitivity, self.own.epsilon, self._delta(units), also
        )

    def _delta(self, units: PrivateUnits) -> float:
        many = len(units.members)
        delta = min(1e-5, 0.1 / many) if self.own.delta is None else self.own.delta
        refuse({
            f"delta must lie between 0 and 1/{many} (one over its {many} {units.kind}s), got {delta:g}; correct it in "
            "its own file": not 0 < delta < 1 / many,
        }, partial(BudgetRefused, self.site))  # fmt: skip
        return delta

    def _facts(self, training: Any, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        """Return what decides whether the training can be counted, for the rows of the table of aspects."""
        kind, task = type(training), run.task
        return {name: getattr(training, name) for name in field_names(kind)} | {
            PRIVACY: True,
            "uncounted": "" if can_account(kind) else kind.__name__,
            "undeclared": "" if declares(type(task)) else type(task).__name__,
            "computes_in": run.computing.precision,
            "batch_norm": next(iter(running_statistics(model)), ""),
            "no_images": not run.data.num_samples("training"),
        }

    # -- what may leave

    def begin(self, request: SiteTask) -> None:
        """Begin a task of the server; refuse one whose answer the privacy ledger does not count.

        Raises: BudgetRefused: the task asks about the site's images, and is no training.
        """
        self._names = {"job": request.run, "experiment": request.experiment, "round": request.current_round}
        lines = request.directives.get(LAST_LINE)
        self.ledger.shown = lines.get(self.site) if isinstance(lines, Mapping) else None
        refuse({
            f"answers to the task {request.name!r} are not counted in its privacy ledger; choose a method and settings "
            "that do not ask for them": request.name in (*FURTHER, TASK_PLAN),
        }, partial(BudgetRefused, self.site))  # fmt: skip

    def release(self, request: SiteTask, reply: SiteReply, metrics: list[str], units: PrivateUnits | None) -> SiteReply:
        """Return a site's reply without the values that are neither counted in the ledger nor public.

        Args:
            request: the server's request.
            reply: the site's answer.
            metrics: names of the task's declared metrics, of which those without noise stay at home.
            units: the patients, volumes or images that the guarantee protects; ``None``: the data were not opened.
        """
        if reply.status != STATUS_OK:
            if reply.reason in self.public:
                return SiteReply(reply.status, reason=reply.reason)
            return SiteReply(STATUS_FAILED, reason=f"site {self.site!r}: {request.name} failed; its own log says why")
        stats: dict[str, Any] = {"synthetic": reply.stats["synthetic"]} if "synthetic" in reply.stats else {}
        cells = [cell for cell in reply.metrics if (cell.metric, cell.value) in self._noisy]
        # With secure sums the update's norm may leave: the update has its noise, so its norm costs no further privacy.
        free = {LENGTH} if request.sums and request.name == TASK_TRAIN else set()
        report = {name: value for name, value in reply.report.items() if name in free or (name, value) in self._noisy}
        if request.name == TASK_CHECK:
            report = {name: fact for name, fact in reply.report.items() if name in PUBLIC}
            report |= {} if units is None else self.facts(units, "test" in report["splits"])
        else:
            split = VALIDATION if request.name == TASK_TRAIN else TEST
            hidden = {*metrics} - {cell.metric for cell in cells}
            cells += [Cell(name, split=split, reason=SUPPRESSED) for name in sorted(hidden)]
            stats |= {LAST_LINE: self.ledger.last} if self.ledger.last else {}
        if request.name == TASK_TRAIN and request.current_round in self._after:
            stats[EPSILON] = self._after[request.current_round]
        return replace(reply, metrics=cells, report=report, stats=stats)

    def facts(self, units: PrivateUnits, counts: bool) -> dict[str, Any]:
        """Return the guarantee of differential privacy, for the results.

        The first fact has the unit, the mechanism and what is covered. The second has target, delta, the number of
        units times the epsilon of one noisy number (0 if no such number leaves), and the number of the job's rounds
        for which the budget lasts.

        Args:
            units: the patients, volumes or images that the guarantee protects.
            counts: whether the number of test images may leave (``min_cases``); the noise tells that of test patients.
        """
        settings, delta = self.own, self._delta(units)
        worth = 0.0 if settings.reports is None else len(units.members) * one_release(settings.reports, delta)
        covers = (
            "updates; reports and metrics stay at home" if settings.reports is None else "updates, reports and metrics"
        )
        shown = f" (the test's figure: standard deviation {self._noise:.2g})" * bool(self._noise and counts)
        reported = f"; Gaussian, noise {settings.reports:g}{shown}" if settings.reports else ""
        how = f"DP-SGD, noise {settings.noise:g}, clip {settings.clip:g}{reported}"
        return {PRIVACY: [units.kind, how, covers], BUDGET: [settings.epsilon, delta, worth, self._lasts]}
