"""The path of a reply at the server: checked, staged, and summed once for all methods.

Two steps on purpose. :meth:`Collector.read_training` and its like look at a site's words; whatever is wrong with them
is a :class:`ReportError` and costs that site its round. :meth:`Collector.keep` stages; what goes wrong there (a full
disk) is the server's fault and is never booked on a site.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fairflare import __version__
from fairflare.core.fairness import declared_as
from fairflare.core.layers import is_statistic, layers_of
from fairflare.core.states import Step, layerwise_average, stepped_average, weighted_average
from fairflare.core.task import LOSS, Metric
from fairflare.core.temporary import OwnedFolder
from fairflare.core.threads import one_thread
from fairflare.exchange.messages import STATUS_OK, Message, same_version
from fairflare.exchange.staging import Staging
from fairflare.exchange.tensor_file import Layout
from fairflare.federation.incoming import Incoming, Shape
from fairflare.federation.incoming import LikeReceived as LikeReceived
from fairflare.federation.influence import Bounds, Influence
from fairflare.federation.leaving import (
    AT_HOME,
    DRAWN_UNITS,
    IN_METRICS,
    IN_REPORT,
    NUM_UNITS,
    RESAMPLED,
    TRAINED_METRIC,
    VALIDATED,
)
from fairflare.federation.sampling import SAMPLING
from fairflare.methods.reports import (
    MAX_TEXT,
    NO_IMAGES,
    SUPPRESSED,
    TRAINING,
    VALIDATION,
    Field,
    ReportError,
    numbers,
    read_report,
    shortened,
)
from fairflare.methods.rule import RoundInputs, Rule, State, Weighing
from fairflare.reporting.no_effect import short_step
from fairflare.reporting.records import Warned

log = logging.getLogger(__name__)

MAX_SAMPLES = 10**9  # a site that claims more is not believed
MAX_METRICS = 1000  # entries that are read
MAX_NAMES = 40_000  # characters of all their names together
METRIC_NAME = re.compile(r"[A-Za-z0-9_/.-]+")
MAX_REASON = 300
#: What a site says about its training besides the rule's report. Shown in results; nothing is computed from it.
STATS = (
    Field(
        "train_loss", nan_ok=True, infinite_ok=True, required=False,
        doc="mean training loss of the last epoch", of=TRAINING,
    ),
    Field(
        "epoch_losses", "vector", nan_ok=True, infinite_ok=True, required=False,
        doc="mean training loss of each epoch", of=TRAINING,
    ),
    Field(
        "seconds", low=0, required=False,
        doc="how long the task took",
        reveals="the site's hardware, and with it roughly the number of images", of=NO_IMAGES,
    ),
    Field("synthetic", "flag", required=False, doc="whether the data are made up", of=NO_IMAGES),
    Field(
        "not_finite", "names", required=False,
        doc="names of the metrics that were measured and are no finite numbers",
        keep="those by class: `metrics_by_class`", of=NO_IMAGES,
    ),
    Field(
        AT_HOME, "flag", required=False,
        doc="there, and true, where metrics by class stay at home", of=NO_IMAGES,
    ),
    Field(
        SUPPRESSED, "names", required=False,
        doc="names of what stays at home for too few cases (`min_cases`): of all that could be there, so that a name "
        "does not tell whether there is anything",
        reveals="that a split, or a class in it, has fewer cases than `min_cases`; of a class perhaps none",
        of=NO_IMAGES,
    ),
    Field(
        RESAMPLED, "vector", low=0, high=1, nan_ok=True, required=False,
        doc="with `bootstrap`: the primary metric on so many draws of the test patients or images with replacement",
        reveals="with as many draws as test images, the metric of each single image can be solved for",
        keep="of a metric over classes: `metrics_by_class`, and `min_cases` where a class has few", of=("test",),
    ),
    *SAMPLING,
    Field(
        TRAINED_METRIC, nan_ok=True, required=False,
        doc="the primary metric of the trained model on the validation split; only from a site that the common model "
        "serves far worse than the others (`suspects`)", of=VALIDATION,
    ),
    Field(
        DRAWN_UNITS, "text", required=False,
        doc="beside `resampled`: what was drawn, `patients`, `volumes`, `images` or, where only some images name a "
        "patient or volume, `cases`",
        keep="as `resampled`", of=("test",),
    ),
    Field(
        NUM_UNITS, "whole", low=1, high=MAX_SAMPLES, required=False,
        doc="beside `resampled`: how many of these the test split has",
        reveals="the number of test patients",
        keep="as `resampled`", of=("test",),
    ),
    Field(
        "state_lost", "text", required=False,
        doc="what the site had kept of earlier rounds and could not use", of=NO_IMAGES,
    ),
)  # fmt: skip
COUNTS = (
    Field(
        "num_samples", "whole", low=1, high=MAX_SAMPLES, required=False,
        doc="number of training images; in `validate` of test images",
    ),
    Field(
        "num_steps", "whole", low=0, high=MAX_SAMPLES, required=False,
        doc="optimizer steps of this round; for FLARE's controllers it also stands under `NUM_STEPS_CURRENT_ROUND`",
        reveals="with the job's batch size the number of images",
    ),
)  # fmt: skip


class QuorumError(RuntimeError):
    """Fewer usable results than a round needs; the text gives every site's reason."""


@dataclass
class Training:
    """A site's checked answer to ``train``; ``notes``: what results and log should say of it."""

    site: str
    state: State  # made tensor by tensor; empty once it is kept
    report: dict[str, Any]
    metrics: dict[str, float]
    stats: dict[str, Any]
    num_samples: int | None
    num_steps: int | None
    notes: tuple[str, ...] = ()


@dataclass
class _Round:
    """What a round has gathered so far."""

    number: int = 0
    num_rounds: int = 1
    asked: list[str] = field(default_factory=list)
    received: State | None = None
    trained: dict[str, Training] = field(default_factory=dict)  # without their models, which wait on disk
    anchor_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    step: float = 1.0  # of the mean change


class Collector:
    """Takes the replies of a round for a rule.

    Args:
        rule: the method's server half.
        folder: where local models wait that do not fit into memory; ``None``: a temporary folder.
        bounds: on what one site can do.
        seed: of the run, for rules that draw.
        memory: bytes of local models that wait in memory; the others do on disk. ``None``: a quarter of what is free.
        metrics: what sites may measure, by name; ``None``: nobody knows the task.
    """

    def __init__(
        self,
        rule: Rule,
        folder: Path | None = None,
        bounds: Bounds | None = None,
        seed: int = 0,
        memory: float | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.rule, self.seed = rule, seed % 2**63  # a run's may be negative, a generator's may not
        self.bounds = bounds or Bounds()
        self.bounds.check_aggregate(rule)
        #: Sites of the job, for ``max_weight=auto``; ``None``: those of the round.
        self.num_sites: int | None = None
        self._influence = Influence(self.bounds)
        self._temporary = OwnedFolder("staging") if folder is None else None
        self.staging = Staging(self._temporary.path if self._temporary else folder or Path(), memory)
        self._round = _Round()
        self._shape: Shape | None = None
        self.metrics = metrics
        #: Names of the model's parameters; ``None``: nobody knows the model, and the tensors' names tell.
        self.parameters: frozenset[str] | None = None

    def begin(
        self, current_round: int, num_rounds: int, *, shape: Shape, received: State | None, sites: Sequence[str] = ()
    ) -> None:
        """Starts a round; forgets the one before.

        Args:
            current_round, num_rounds: from 0; total.
            shape: what models must look like.
            received: the model the sites received; ``None``: unknown.
            sites: that are asked.
        """
        self.staging.clear()
        self._round = _Round(current_round, num_rounds, sorted(sites), received)
        self._shape = shape
        self._influence = Influence(self.bounds, self.num_sites)

    def at_round(self, current_round: int) -> None:
        """Under a stock controller the round is known only when the first answer is there."""
        self._round.number = current_round

    def clear(self) -> None:
        """Removes the local models of the round, and lets go of the model that the sites received."""
        self.staging.clear()
        self._round.received = self._shape = None
        self._influence = Influence(self.bounds)

    @property
    def accepted(self) -> list[str]:
        """Sites whose model is in the round, sorted."""
        return sorted(self._round.trained)

    @property
    def rejected(self) -> dict[str, str]:
        """Why others are not, by site."""
        return self._round.rejected

    @property
    def warnings(self) -> list[Warned]:
        """Where a bound was at work in this round, who held more than half of the weight, and a step that is none."""
        return [*self._influence.warnings, *short_step(self._round.step)]

    # -- reading what a site says

    def read_training(self, site: str, message: Message, *, needs_metrics: bool = True) -> Training:
        """A site's answer to ``train``, every value checked.

        Raises:
            ReportError: it cannot be used (names site, field and value).
        """
        if site in self._round.trained:
            raise ReportError(f"site {site!r} answered twice in round {self._round.number}")
        meta = read_head(site, message, self._round.number)
        if not isinstance(message.params, Mapping):
            raise ReportError(f"site {site!r} sent no model")
        stats = read_stats(site, meta)
        report = self._read_report(site, meta, stats, self.rule.report_fields)
        report = self.rule.check_report(report, site)
        counts = read_report(meta, COUNTS, site)
        num_steps = None if counts["num_steps"] is None else int(counts["num_steps"])
        report = self.rule.check_steps(report, num_steps, site)
        assert self._shape is not None
        state = _or_refused(site, self._shape, message, self.staging.fits)
        return Training(
            site=site,
            state=state,
            report=report,
            metrics=read_metrics(
                site,
                message.metrics,
                stats["not_finite"],
                self.metrics,
                suppressed=suppressed_in(stats),
                needed=needs_metrics,
            ),
            stats=stats,
            num_samples=None if counts["num_samples"] is None else int(counts["num_samples"]),
            num_steps=num_steps,
            notes=state.notes,
        )

    def read_anchor(self, site: str, message: Message) -> dict[str, Any]:
        """A site's report about the anchor.

        Raises:
            ReportError: as above, or the site has no model in this round.
        """
        if site not in self._round.trained:
            raise ReportError(f"site {site!r} reports about the anchor without a model in this round")
        meta = read_head(site, message, self._round.number)
        report = self._read_report(site, meta, read_stats(site, meta), self.rule.anchor_fields)
        return self.rule.check_anchor_report(report, site, list(dict.fromkeys(self._owner().values())))

    @staticmethod
    def _read_report(
        site: str, meta: Mapping[str, Any], stats: Mapping[str, Any], fields: Sequence[Field]
    ) -> dict[str, Any]:
        return read_report(meta.get("report"), fields, site, suppressed=suppressed_in(stats, IN_REPORT))

    # -- keeping it

    def keep(self, training: Training) -> None:
        """Puts a checked model where it waits for the others.

        Raises:
            ReportError: a kind of number that cannot be written.
            OSError: the server's disk is full or cannot be written.
        """
        try:
            self.staging.put(training.site, training.state)
        except (TypeError, ValueError) as error:
            raise ReportError(_named(training.site, printable(str(error)))) from error
        training.state = {}
        self._round.trained[training.site] = training
        self._round.rejected.pop(training.site, None)

    def keep_anchor(self, site: str, report: dict[str, Any]) -> None:
        """Takes a checked report about the anchor into the round."""
        self._round.anchor_reports[site] = report

    def reject(self, site: str, reason: str) -> None:
        """Records why a site is not in the round."""
        self._round.rejected[site] = reason

    def drop(self, site: str, reason: str) -> None:
        """Takes a site out of the round again."""
        self._round.trained.pop(site, None)
        self.staging.discard(site)
        self.reject(site, reason)

    def screen(self) -> dict[str, str]:
        """Takes out the sites that the rule says do not go together with the others; why, by site."""
        odd = self.rule.misfits({site: self._round.trained[site].report for site in self.accepted})
        for site, reason in odd.items():
            self.drop(site, reason)
        return odd

    # -- the sum

    def require(self, min_sites: int) -> None:
        """Raises :class:`QuorumError` with every site's reason when fewer results are usable."""
        if len(self._round.trained) < min_sites:
            reasons = "; ".join(f"{site}: {why}" for site, why in sorted(self.rejected.items())) or "no answer"
            raise QuorumError(
                f"{type(self.rule).__name__}, round {self._round.number}: {len(self._round.trained)} usable result(s) "
                f"of min_sites={min_sites} ({reasons})"
            )

    def anchor_model(self) -> dict[str, torch.Tensor]:
        """The plain mean of the round's local models (Fed-LWR, Eq. 1): uniform, not by sample counts."""
        share = 1.0 / len(self.accepted)
        return weighted_average(self._states(), dict.fromkeys(self.accepted, share))

    def aggregate(self) -> tuple[dict[str, torch.Tensor], Weighing]:
        """The next global model (or the aggregated update) and how the rule weighed.

        Tensors that stay at the sites are as they were; where all do, nothing is weighed.

        Raises:
            RuntimeError: the rule gives no weights.
        """
        assert self._shape is not None
        received, stays = self._round.received, self._shape.stays
        if received is None or not stays:
            return self._aggregated()
        if stays.issuperset(received):
            return dict(received), Weighing()
        state, weighing = self._aggregated()
        return {name: received[name] if name in stays else tensor for name, tensor in state.items()}, weighing

    def _aggregated(self) -> tuple[dict[str, torch.Tensor], Weighing]:
        assert self._shape is not None
        sites = self.accepted
        if self.rule.two_phase and len(sites) == 1:
            # One model is its own average: every weight is 1 and there is nothing to ask.
            return self.anchor_model(), self._influence.weighed(Weighing(sites={sites[0]: 1.0}))
        inputs = self.inputs()
        with one_thread():  # the same bits on every server; the long sums are in the average below
            weighing = self._influence.weighed(self.rule.weigh(inputs))
        self._round.step = weighing.step
        if not weighing.reports:
            found = {site: numbers(report) for site, report in inputs.reports.items()}
            weighing.reports = {site: values for site, values in found.items() if values}
        updates, how = self._shape.updates, self.bounds.how
        if weighing.layers is not None:
            return layerwise_average(inputs.states, weighing.layers, inputs.owner, updates=updates, how=how), weighing
        if weighing.sites is None:
            raise RuntimeError(f"{type(self.rule).__name__}.weigh() gave neither site nor layer weights")
        shown = ", ".join(f"{site} {weight:.4f}" for site, weight in sorted(weighing.sites.items()))
        log.info("round %d, weights: %s", self._round.number, shown)
        if weighing.step == 1.0 and weighing.buffers is None:
            return weighted_average(inputs.states, weighing.sites, updates=updates, how=how), weighing
        step = Step(weighing.step, inputs.parameters, inputs.start(self.rule), weighing.buffers or weighing.sites)
        return stepped_average(inputs.states, weighing.sites, step), weighing

    def hold(self, sites: Collection[str]) -> None:
        """These sites get no more than the equal share in this round."""
        self._influence.held = frozenset(sites)

    def inputs(self) -> RoundInputs:
        """What the rule is going to see."""
        sites, trained = self.accepted, self._round.trained
        return RoundInputs(
            current_round=self._round.number,
            num_rounds=self._round.num_rounds,
            sites=sites,
            # Without a declared count every site counts the same.
            num_samples=self._influence.samples({site: trained[site].num_samples or 1 for site in sites}),
            reports={site: trained[site].report for site in sites},
            anchor_reports=self._round.anchor_reports,
            states=self._states(),
            owner=self._owner(),
            asked=self._round.asked or sites,
            received=self._round.received,
            remembered=self._influence.remembered,
            moderated=self._influence.moderated,
            bounded=self._influence.of_made,
            parameters=self._trained_names(),
            num_steps={site: trained[site].num_steps for site in sites},
            updates=self._shape is not None and self._shape.updates,
            seed=self.seed,
            suppressed={site: suppressed_in(trained[site].stats, IN_REPORT) for site in sites},
        )

    def _states(self) -> dict[str, State]:
        """Local models as they count; a tensor is read when it is asked for."""
        assert self._shape is not None
        found = {site: self._shape.collected(self.staging.open(site)) for site in self.accepted}
        return self._influence.states(found, self._round.received)

    def _trained_names(self) -> frozenset[str]:
        if self.parameters is not None:
            return self.parameters
        return frozenset(name for name in self._owner() if not is_statistic(name))

    def _owner(self) -> dict[str, str]:
        assert self._shape is not None
        return layers_of(self._shape.collected(self.staging.open(self.accepted[0])))


# ------------------------------------------------------------------------------------------------ a site's words


def read_head(site: str, message: Message, current_round: int) -> Mapping[str, Any]:
    """Version, status and round of a reply; its meta.

    Raises:
        ReportError: another version, a status that is not exactly ``"ok"`` (with the site's own reason), or an answer
            to another round.
    """
    meta = message.meta
    if not isinstance(meta, Mapping):
        raise ReportError(f"site {site!r}: the message carries no fairflare part, got {shortened(meta)}")
    version = meta.get("version")
    if not isinstance(version, str) or not same_version(version):
        raise ReportError(f"site {site!r} answers with fairflare {shortened(version)}, the server has {__version__}")
    status = meta.get("status")
    if not isinstance(status, str) or status != STATUS_OK:
        reason = meta.get("reason")
        if isinstance(reason, str) and reason.strip():
            raise ReportError(_named(site, printable(reason)))
        raise ReportError(f"site {site!r}: field 'status' must be {STATUS_OK!r}, got {shortened(status)}")
    if message.current_round is not None and not _is_round(message.current_round, current_round):
        answered = shortened(message.current_round)
        raise ReportError(f"site {site!r} answered for round {answered}, asked for round {current_round}")
    return meta


def read_stats(site: str, meta: Mapping[str, Any], primary: Metric | None = None) -> dict[str, Any]:
    """What a reply says besides report and metrics; ``primary``: whose values on draws may be among it.

    Raises:
        ReportError: a value of another kind (names site, field and value).
    """
    fields: tuple[Field, ...] = STATS
    if primary is not None:
        fields = tuple(replace(f, low=primary.low, high=primary.high) if f.name == RESAMPLED else f for f in STATS)
    return read_report(meta.get("stats"), fields, site, "stats")


def suppressed_in(stats: Mapping[str, Any], what: str = IN_METRICS) -> list[str]:
    """Names of what stays at a site because it has too few cases, by the ``stats`` of its reply: of its metrics, or
    of its report.
    """
    return [name.removeprefix(what) for name in stats[SUPPRESSED] or () if name.startswith(what)]


def read_metrics(
    site: str,
    metrics: Any,
    not_finite: Sequence[str] | None = None,
    declared: Mapping[str, Metric] | None = None,
    *,
    suppressed: Sequence[str] = (),
    needed: bool = True,
) -> dict[str, float]:
    """Metrics of a reply: finite numbers in the range that the job declares; NaN for those of which it says so.

    Args:
        site: name.
        metrics: what it sent.
        not_finite: names of the metrics that it measured and that are not finite.
        declared: of the job's task; ``None``: not known (under a stock controller), then all lie in [0, 1] but losses.
        suppressed: names of those that stay there; they are in no result.
        needed: at least one is due.

    Raises:
        ReportError: none where they are due, too many, one not declared or out of range (names site, metric, value).
    """
    undefined = not_finite or ()
    if metrics is None or (isinstance(metrics, Mapping) and not metrics):
        if needed and not suppressed:
            why = f" that is finite (not finite: {printable(', '.join(undefined))})" if undefined else ""
            raise ReportError(f"site {site!r}: the answer carries no metric{why}")
        if not suppressed:
            return {}
        metrics = {}
    if not isinstance(metrics, Mapping) or len(metrics) + len(undefined) + len(suppressed) > MAX_METRICS:
        raise ReportError(f"site {site!r}: metrics must be a dict of at most {MAX_METRICS}, got {shortened(metrics)}")
    for name in (*metrics, *undefined, *suppressed):
        if not isinstance(name, str) or len(name) > MAX_TEXT or not METRIC_NAME.fullmatch(name):
            raise ReportError(
                f"site {site!r}: a metric is called {shortened(name)}; a name has letters, digits, '_', '/', '.' and "
                f"'-', at most {MAX_TEXT}"
            )
    if (size := sum(map(len, (*metrics, *undefined, *suppressed)))) > MAX_NAMES:
        raise ReportError(f"site {site!r}: the names of its metrics have {size} characters, more than {MAX_NAMES}")
    if both := sorted({*metrics, *undefined} & {*suppressed}):
        raise ReportError(f"site {site!r}: metric {both[0]!r} came, and is said to stay there")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
            raise ReportError(f"site {site!r}: metric {name!r} must be a finite number, got {shortened(value)}")
        metric = range_of(name, declared)
        if metric is None:
            raise ReportError(f"site {site!r}: metric {name!r} is not declared by the job's task")
        if not metric.holds(value):
            raise ReportError(f"site {site!r}: metric {name!r} must lie in {metric.range}, got {shortened(value)}")
        found[name] = float(value)
    return {**dict.fromkeys(undefined, math.nan), **found}


def range_of(name: str, declared: Mapping[str, Metric] | None) -> Metric | None:
    """What is declared for a metric; without a task a loss, or something in [0, 1]."""
    if declared is not None:
        return declared_as(name.removeprefix(VALIDATED), declared)
    return LOSS if name.rpartition("/")[2] == LOSS.name else Metric(name=name, doc="")


def printable(text: str, most: int = MAX_REASON) -> str:
    """A site's words as a log, a table and a terminal may show them."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 2 * most])
    return clean if len(clean) <= most else clean[: most - 3] + "..."


def _is_round(answered: Any, current_round: int) -> bool:
    return isinstance(answered, int) and answered == current_round


def _named(site: str, reason: str) -> str:
    """A reason that begins with the site that gave it, whomever else it names."""
    return reason if reason.startswith(f"site {site!r}") else f"site {site!r}: {reason}"


def is_finite(value: Any) -> bool:
    """Whether a number is one, also an integer that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _or_refused(site: str, shape: Shape, message: Message, fits: Callable[[Layout], bool]) -> Incoming:
    """The state to collect; whatever a tensor does that is none of ours is its site's fault."""
    try:
        return shape.read(message, site, fits)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        text = str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
        raise ReportError(_named(site, printable(text))) from error


def reasons(left_out: Iterable[tuple[str, str]]) -> str:
    """Sites and why they are out, in one line."""
    found = sorted(left_out)
    return "; ".join(why if why.startswith(f"site {site!r}") else f"{site}: {why}" for site, why in found)
