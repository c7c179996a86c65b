"""Check, stage and average the sites' replies at the server, in one way for all methods.

Reading and staging a reply are two steps on purpose. :meth:`Collector.read_training` and :meth:`Collector.read_anchor`
check what a site sent; an error that the site caused is a :class:`ReportError` and leaves the site out of the round.
:meth:`Collector.keep` stages the checked model; an error there (a full disk) is the server's fault and leaves no site
out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from fairflare.base.checks import printable, refuse, refuse_if
from fairflare.base.disk.temporary import OwnedFolder
from fairflare.base.machine.threads import one_thread
from fairflare.base.site_data import UNLABELLED
from fairflare.base.task import Metric
from fairflare.core.cells import Cell, values_of
from fairflare.core.features.layers import is_statistic, layers_of
from fairflare.core.states import Movement, WeightsOf, layerwise_average, weighted_average
from fairflare.core.weighting import counted_samples, normalise, ramp
from fairflare.exchange.messages import Message
from fairflare.exchange.staging import Staging
from fairflare.exchange.tensor_file import layout_of
from fairflare.federation.collecting.context import UNKNOWN, RunContext
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.collecting.received_state import Incoming, Shape
from fairflare.federation.collecting.received_state import LikeReceived as LikeReceived
from fairflare.federation.plan.bounds import Bounds
from fairflare.federation.plan.refusals import refuse_run
from fairflare.federation.site.replies import (
    COUNTS,
    IN_REPORT,
    OF_TRAINING,
    list_suppressed,
    name_site_in_reason,
    read_head,
    read_metrics,
    read_stats,
    reasons,
)
from fairflare.methods.base.reports import SENT_BACK, Field, ReportError, misfits, numbers, read_report
from fairflare.methods.base.rule import MakesTensors, RoundInputs, Rule, State, TwoPhase, Weighing
from fairflare.methods.parts.consistency import SHARE, WITHOUT_LABELS
from fairflare.reporting.documents import Warned
from fairflare.reporting.no_effect import short_step

log = logging.getLogger(__name__)
SUM = "the sum of all sites"
UNTOLD = "it tells no number of samples, and weighs as much as one sample"
LEFT = "left the model as it was received (a learning rate of 0, or only frozen layers?), and it counts all the same"


class QuorumError(RuntimeError):
    """Signal that a round has fewer usable results than it needs; the text gives every site's reason."""


class Counts(dict[str, float]):
    """Hold the numbers (of samples) by which the sites are weighted in a round.

    Each is the site's number of samples; under a stock controller it may be the site's number of steps.

    Args:
        numbers: each site's number, by the site's name.
        odd: a warning about a site's number, by site; the warnings are issued only where a rule reads the numbers.
    """

    def __init__(self, numbers: Mapping[str, float] | None = None, odd: Mapping[str, str] | None = None) -> None:
        super().__init__(numbers or {})
        self.odd, self.looked_at = odd or {}, False

    def __getitem__(self, site: str) -> float:
        self.looked_at = True
        return super().__getitem__(site)


@dataclass
class Training:
    """Hold a site's checked answer to ``train``; ``notes``: remarks on the answer for results and log."""

    site: str
    state: State  # the model, each tensor of which is converted when it is read; empty once the model is staged
    report: dict[str, Any]
    cells: list[Cell]  # metrics of the received model, also those that the site withholds
    stats: dict[str, Any]
    num_samples: int | None
    num_steps: int | None
    notes: tuple[str, ...] = ()
    moved: bool = True  # False: the sent model equals the received one, though the site counted steps

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the received model by name, NaN if undefined."""
        return values_of(self.cells)


@dataclass
class _Round:
    """Hold what the server has gathered in a round so far."""

    number: int = 0
    num_rounds: int = 1
    asked: list[str] = field(default_factory=list)
    received: State | None = None
    shape: Shape | None = None
    trained: dict[str, Training] = field(default_factory=dict)  # answers to ``train``, whose models are staged
    anchor_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    step: float = 1.0  # length of the global model's change, as a factor of the sites' mean change
    counts: Counts = field(default_factory=lambda: Counts())


def read_state(shape: Shape, message: Message, site: str, staging: Staging) -> Incoming:
    """Return the tensors (state) in a site's message after all checks.

    Raises:
        ReportError: it cannot be used (names site and tensor).
    """
    try:
        return shape.read(message, site, staging.fits)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # any error that reading a site's tensor causes is that site's fault
        text = str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
        raise ReportError(name_site_in_reason(site, printable(text))) from error


class Sums(Protocol):
    """Compute means of models that the server does not hold, from secure sums; ``steps``: optimizer steps by site."""

    def anchor(self, sites: Sequence[str], steps: Mapping[str, int | None]) -> State:
        """Return the plain mean of the sites' models (the anchor), from a secure sum."""

    def mean(self, weighing: Weighing, steps: Mapping[str, int | None]) -> tuple[Weighing, State]:
        """Return the weights that were used, and the mean of the sites' models with these weights."""


class Collector:
    """Collect the sites' replies of a round, and average their models as a rule weighs them.

    Args:
        rule: the method's server half.
        folder: folder for local models that do not fit into memory; ``None`` for a temporary folder.
        bounds: bounds on the influence of one site.
        seed: seed of the run, for rules that draw random numbers.
        memory: bytes of local models that are staged in memory; further ones are staged on disk. ``None`` stands for a
            quarter of the free memory.
        metrics: metrics that sites may measure, by name; ``None`` if the server does not know the task, and reads none.
        sums: opens secure sums of the sites' updates, so that no site sends its own; ``None`` if every site sends its
            update.
        context: what is known of the network and the sites.
    """

    def __init__(
        self,
        rule: Rule,
        folder: Path | None = None,
        bounds: Bounds | None = None,
        seed: int = 0,
        memory: float | None = None,
        metrics: Mapping[str, Metric] | None = None,
        sums: Sums | None = None,
        context: RunContext = UNKNOWN,
    ) -> None:
        self.rule, self.seed = rule, seed % 2**63  # a run's seed may be negative, a generator's may not
        self.bounds = bounds or Bounds()
        refuse_run({**vars(self.bounds), "rule": type(rule).__name__, "only_mean": rule.only_mean})
        self._temporary = OwnedFolder("staging") if folder is None else None
        self.staging = Staging(self._temporary.path if self._temporary else folder or Path(), memory)
        self.metrics, self.sums, self.context = metrics, sums, context
        self._round, self._influence = _Round(), Influence(self.bounds)

    def begin(
        self, current_round: int, num_rounds: int, *, shape: Shape, received: State | None, sites: Sequence[str] = (),
        rule: Rule | None = None, num_sites: int | None = None,
    ) -> None:  # fmt: skip
        """Start a round, and forget the replies of the round before.

        Args:
            current_round, num_rounds: number of the round, from 0; number of all rounds.
            shape: checks the form of the sites' models.
            received: the model that the sites received; ``None`` if it is unknown.
            sites: names of the sites that are asked.
            rule: rule of this round and the next ones; ``None``: the same as before.
            num_sites: number of sites of the job, for ``max_weight=auto``; ``None``: the number of sites in the round.
        """
        self.rule = rule or self.rule
        self.staging.clear()
        self._round = _Round(current_round, num_rounds, sorted(sites), received, shape)
        known = {site: has["training"] for site, has in self.context.reported.items() if has.get("training")}
        self._influence = Influence(self.bounds, num_sites, known)

    def set_round(self, current_round: int) -> None:
        """Set the number of the current round.

        Under a stock controller the number is known only when the first answer has arrived.
        """
        self._round.number = current_round

    def clear(self) -> None:
        """Remove the local models of the round, and drop the reference to the model that the sites received."""
        self.staging.clear()
        self._round.received = self._round.shape = None
        self._influence = Influence(self.bounds)

    def close(self) -> None:
        """Remove the local models of the round, and their folder."""
        self.clear()
        self.staging.close()

    @property
    def accepted(self) -> list[str]:
        """Return the names of the sites whose model is in the round, sorted."""
        return sorted(self._round.trained)

    @property
    def labelled(self) -> list[str]:
        """Return the sorted names of the accepted sites with labels; the aggregation rule weights only these."""
        return [site for site in self.accepted if not self._round.trained[site].stats[WITHOUT_LABELS]]

    @property
    def rejected(self) -> dict[str, str]:
        """Return the reason why a site's model is not used in the round, by site."""
        return self._round.rejected

    @property
    def warnings(self) -> list[Warned]:
        """Return the warnings of this round.

        A warning is about a value that a bound (such as ``max_weight``) limited, a site with more than half of the
        weight, a site whose model is unchanged, a site's missing number of samples (with FLARE's own controller
        also a missing or doubtful number of steps), or a global model that has hardly moved.
        """
        trained = sorted(self._round.trained.items())
        odd = self._round.counts.odd if self._round.counts.looked_at else {}
        return [
            *self._influence.warnings,
            *(
                Warned(site, "unchanged", 0.0, 0.0, f"its {training.num_steps} steps {LEFT}")
                for site, training in trained
                if not training.moved
            ),
            *(Warned(site, "count", 1.0, 1.0, odd[site]) for site, _ in trained if site in odd),
            *short_step(self._round.step),
        ]

    # -- reading what a site sent

    def read_training(self, site: str, message: Message) -> Training:
        """Return a site's answer to ``train``, with every value checked.

        Raises:
            ReportError: the answer cannot be used (names site, field and value).
        """
        refuse({
            f"site {site!r} answered twice in round {self._round.number}": site in self._round.trained,
        }, ReportError)  # fmt: skip
        meta = read_head(site, message, self._round.number)
        refuse({
            f"site {site!r} sent no model": self.sums is None and not isinstance(message.params, Mapping),
            f"site {site!r} sent its model, which stays there with secure sums: it is not used":
                self.sums is not None and message.params is not None,
        }, ReportError)  # fmt: skip
        stats = read_stats(site, meta)
        alone = stats[WITHOUT_LABELS] is True  # such a site trains without the method's terms, and reports nothing
        report = {} if alone else _report(site, meta, stats, self.rule.report_fields)
        counts = {name: n if n is None else int(n) for name, n in read_report(meta, COUNTS, site).items()}
        if not alone:
            report = self.rule.check_report(report, site, counts["num_steps"])
            self._hold(site, report, counts["num_samples"])
        assert self._round.shape is not None
        nothing = Incoming({}, dict[str, torch.Tensor]().__getitem__)
        state = nothing if self.sums is not None else read_state(self._round.shape, message, site, self.staging)
        known = self.metrics
        cells = [] if known is None else read_metrics(site, message.metrics, known, OF_TRAINING, needed=not alone)
        refuse_if(site, {
            f"it {SENT_BACK} and counts no step; it does not count as trained":
                not state.moved and not counts["num_steps"],
        })  # fmt: skip
        return Training(site, state, report, cells, stats, **counts, notes=state.notes, moved=state.moved)

    def read_anchor(self, site: str, message: Message) -> dict[str, Any]:
        """Return a site's checked report about the anchor, the average of the local models.

        Raises:
            ReportError: the answer cannot be used, or the site has no model in this round.
        """
        refuse({
            f"site {site!r} reports about the anchor (the average of the local models), but no model of its own was "
            "accepted in this round": site not in self._round.trained,
        }, ReportError)  # fmt: skip
        meta = read_head(site, message, self._round.number)
        assert isinstance(self.rule, TwoPhase), "nobody else asks"
        report = _report(site, meta, read_stats(site, meta), self.rule.anchor_fields)
        return self.rule.check_anchor_report(report, site, list(dict.fromkeys(layers_of(self._first()).values())))

    def _hold(self, site: str, report: Mapping[str, Any], num_samples: int | None) -> None:
        """Raise :class:`ReportError` for a report that counts more images or groups than its site has."""
        has = {**({} if num_samples is None else {"training": num_samples}), **self.context.reported.get(site, {})}
        for what, count in self.rule.counted(report).items():
            known, images = has.get(what), what != "groups"
            refuse_if(site, {
                f"its report is of {count:.0f} {f'{what} images' if images else what}, it has {known or 0:.0f}":
                    known is not None and (count > known + 0.5 if images else count not in (0, known)),
            })  # fmt: skip

    def keep(self, training: Training) -> None:
        """Stage a checked model until all sites have answered, and take the answer into the round.

        Raises:
            ReportError: a tensor has a dtype that cannot be staged.
            OSError: the server's disk is full or cannot be written.
        """
        try:
            if self.sums is None:
                self.staging.put(training.site, training.state)
        except (TypeError, ValueError) as error:
            raise ReportError(name_site_in_reason(training.site, printable(str(error)))) from error
        training.state = {}
        self._round.trained[training.site] = training
        self._round.rejected.pop(training.site, None)

    def keep_anchor(self, site: str, report: dict[str, Any]) -> None:
        """Keep a site's checked report about the anchor, the average of the local models, for the aggregation rule."""
        self._round.anchor_reports[site] = report

    def reject(self, site: str, reason: str) -> None:
        """Record the reason why a site's answer is not used in the round."""
        self._round.rejected[site] = reason

    def drop(self, site: str, reason: str) -> None:
        """Remove an accepted site from the round with its model, and record the reason."""
        self._round.trained.pop(site, None)
        self.staging.discard(site)
        self.reject(site, reason)

    def screen(self) -> dict[str, str]:
        """Drop sites whose report differs in a field that must be alike at all sites; return the reasons by site."""
        reports = {site: self._round.trained[site].report for site in self.labelled}
        alike = [declared for declared in self.rule.report_fields if declared.alike]
        odd = {site: why for declared in alike for site, why in misfits(reports, declared).items()}
        for site, reason in odd.items():
            self.drop(site, reason)
        return odd

    # -- averaging the models

    def require(self, min_sites: int) -> None:
        """Raise :class:`QuorumError` with every site's reason when the round has fewer than ``min_sites`` results."""
        usable = len(self._round.trained)
        refuse({
            f"{self._where}: {usable} usable result(s) of min_sites={min_sites} "
            f"({reasons(self.rejected.items()) or 'no answer'})": usable < min_sites,
        }, QuorumError)  # fmt: skip

    def anchor_model(self) -> dict[str, torch.Tensor]:
        """Return the plain mean of the round's local models (Fed-LWR, Eq. 1): uniform, not by sample counts."""
        sites = self.labelled
        if self.sums is not None:
            return self._model_of_sum(self.sums.anchor(sites, self._steps()))
        plain = Movement(lambda change: change, {}, lambda: None, products=self.context.products)
        weights = dict.fromkeys(sites, 1.0 / len(sites))
        return weighted_average(
            self._average_annotated(self._states(sites), lambda name: weights), weights, movement=plain
        )

    def aggregate(self) -> tuple[dict[str, torch.Tensor], Weighing]:
        """Return the next global model (or the aggregated update) and the weights that the rule gave.

        Tensors that stay at the sites keep their received values; if all tensors stay, the rule is not called.

        Raises:
            RuntimeError: the rule gives no weights.
        """
        assert self._round.shape is not None
        received, stays, rule = self._round.received, self._round.shape.stays, self.rule
        if received and stays.issuperset(received):
            return dict(received), Weighing()
        inputs = self.inputs()
        # The average of one model is that model, so every weight is 1 and the sites need not be asked a second time.
        alone = isinstance(rule, TwoPhase) and len(inputs.sites) == 1
        with one_thread():  # so that every server computes the same bits; the costly sums follow in the average
            decided = Weighing(sites=dict.fromkeys(inputs.sites, 1.0)) if alone else rule.weigh(inputs)
            weighing = self._influence.bound_weighing(self._add_unlabelled(decided, inputs.sites))
        if not weighing.reports:
            weighing.reports = {s: values for s, report in inputs.reports.items() if (values := numbers(report))}
        types = {
            name: dtype
            for name, (dtype, _) in layout_of(self._first()).items()
            if dtype.is_floating_point and name in inputs.parameters
        }
        of_buffers = weighing.buffers if self.sums is None else None
        movement = Movement(self._move, types, partial(inputs.start, rule), of_buffers, self.context.products)
        form: dict[str, Any] = {"updates": self._round.shape.updates, "how": self.bounds.how, "movement": movement}
        limits: dict[str, Any] = {"how": self.bounds.how, "bounded": self._influence.bound_made}
        if weighing.sites is not None:
            log.info(
                "round %d, weights: %s", self._round.number,
                ", ".join(f"{site} {weight:.4f}" for site, weight in sorted(weighing.sites.items())),
            )  # fmt: skip
        if self.sums is not None:
            weighing, mean = self.sums.mean(weighing, self._steps())
            state = self._model_of_sum(mean, **form)
            if weighing.by_class is not None and isinstance(rule, MakesTensors):
                with one_thread():
                    rule.learn(weighing)
        elif weighing.layers is not None:
            by_layer = weighing.layers
            states = self._average_annotated(
                self._states(), lambda name: by_layer.get(inputs.owner[name], {}), **limits
            )
            state = layerwise_average(states, by_layer, inputs.owner, **form)
        elif weighing.sites is not None:
            weights = weighing.sites
            state = weighted_average(
                self._average_annotated(self._states(), lambda name: weights, **limits), weights, **form
            )
        else:
            raise RuntimeError(
                f"{type(rule).__name__}.weigh() must give the weights of sites or of layers; both are None"
            )
        self._round.step = movement.length
        if self.context.products is not None:
            weighing.values["adapter_truncation"] = self.context.products.error
            weighing.details["adapter_truncation"] = self.context.products.errors()
        state = {**state, **(rule.made() if isinstance(rule, MakesTensors) else {})}
        return {**state, **{name: tensor for name, tensor in (received or {}).items() if name in stays}}, weighing

    def _model_of_sum(self, mean: State, **form: Any) -> dict[str, torch.Tensor]:
        """Return the next model from ``mean``, the opened secure sum, in the received model's types."""
        average, like = weighted_average({SUM: mean}, {SUM: 1.0}, **form), self._round.received or {}
        return {name: tensor.to(like[name].dtype) for name, tensor in average.items()}

    def _steps(self) -> dict[str, int | None]:
        return {site: training.num_steps for site, training in self._round.trained.items()}

    def _average_annotated(self, states: dict[str, State], weights_of: WeightsOf, **limits: Any) -> dict[str, State]:
        """Return the sites' models, with output rows and input columns averaged over the sites that own them."""
        unlabelled, rows = set(self.accepted).difference(self.labelled), self.context.rows
        rows = replace(rows, lacking=tuple(sites and sites.union(unlabelled) for sites in rows.lacking))
        for slices in (rows, self.context.columns):
            states = slices.average_slices(states, weights_of, self._round.received or {}, **limits)
        return states

    def bound_weights(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Return weights of some sites, which sum to 1, cut to the run's bounds."""
        return self._influence.bound_made(dict(weights))

    def _move(self, change: State) -> State:
        with one_thread():
            return self.rule.move(change)

    def inputs(self) -> RoundInputs:
        """Return the inputs of the rule for this round."""
        sites, trained, owner = self.labelled, self._round.trained, layers_of(self._first())
        refuse({f"{self._where}: no site has labels": not sites}, QuorumError)
        every, given = self.accepted, self._round.counts
        if not given:
            sample_counts = {site: trained[site].num_samples for site in sites}
            given = Counts(
                {s: n or 1 for s, n in sample_counts.items()},
                {s: UNTOLD for s, n in sample_counts.items() if n is None},
            )
        bounded = self._influence.samples({site: given[site] for site in sites})
        self._round.counts = Counts({site: self._samples(site, bounded.get(site, 0)) for site in every}, given.odd)
        kinds = {field.name: field.measures for field in self.rule.report_fields if field.measures}
        metrics = self.context.footing.make_comparable({site: trained[site].metrics for site in sites})
        return RoundInputs(
            current_round=self._round.number,
            num_rounds=self._round.num_rounds,
            sites=sites,
            num_samples=self._round.counts,
            reports=self.context.footing.reports({site: trained[site].report for site in sites}, kinds, metrics),
            anchor_reports=self._round.anchor_reports,
            states={} if self.sums is not None else self._states(sites),
            shares=self._influence.shares,  # known once the states are bounded
            owner=owner,
            asked=[site for site in self._round.asked if site in sites or site not in every] or sites,
            received=self._round.received,
            remembered=self._influence.remembered,
            moderated=self._influence.moderated,
            bounded=self._influence.bound_made,
            parameters=(
                frozenset(name for name in owner if not is_statistic(name)) if self.context.parameters is None
                else self.context.parameters
            ),
            frozen=self.context.frozen,
            updates=self._round.shape is not None and self._round.shape.updates,
            seed=self.seed,
            suppressed={site: list_suppressed(trained[site].stats, IN_REPORT) for site in sites},
        )  # fmt: skip

    def _samples(self, site: str, labelled: float) -> float:
        """Return the number by which a site is weighted: its labelled samples, and a part of its unlabelled ones."""
        unlabelled = self.context.reported.get(site, {}).get(UNLABELLED, 0)
        if self._round.trained[site].stats[SHARE] is None or not unlabelled:
            return labelled or 1
        samples = counted_samples(labelled, unlabelled, ramp(self._round.number, self._round.num_rounds))
        return min(samples, self.bounds.max_samples or samples)

    def _add_unlabelled(self, decided: Weighing, labelled: Sequence[str]) -> Weighing:
        """Weight sites without labels by their samples, as they send no report from which the rule could weigh them.

        Their weight in the average of running statistics is 0, since their models have no statistics of their images.
        """
        others = [site for site in self.accepted if site not in labelled]
        if not others:
            return decided
        shares = normalise(self._round.counts)
        rest = sum(shares[site] for site in labelled)

        def join_shares(weights: Mapping[str, float]) -> dict[str, float]:
            return {site: shares[site] if site in others else rest * weights[site] for site in self.accepted}

        buffers, none = decided.buffers or decided.sites, dict.fromkeys(others, 0.0)
        return replace(
            decided,
            sites=decided.sites and join_shares(decided.sites),
            layers=decided.layers and {layer: join_shares(by_site) for layer, by_site in decided.layers.items()},
            buffers=buffers and dict(sorted({**buffers, **none}.items())),
        )

    @property
    def _where(self) -> str:
        return f"{type(self.rule).__name__}, round {self._round.number}"

    def count_by(self, counts: Counts) -> None:
        """Set the numbers by which the sites of this round are weighed, in place of their reported samples."""
        self._round.counts = counts

    def _states(self, sites: Sequence[str] | None = None) -> dict[str, State]:
        """Return the local models, clipped to the bounds, by site; a tensor is read when it is accessed."""
        every = self._influence.states({site: self._state(site) for site in self.accepted}, self._round.received)
        return every if sites is None else {site: every[site] for site in sites}

    def _first(self) -> State:
        """Return the model of the first accepted site, as an example: all sites' models have the same tensors."""
        return self._state(self.accepted[0]) if self.sums is None else self._round.received or {}

    def _state(self, site: str) -> State:
        assert self._round.shape is not None
        return self._round.shape.shape_state(self.staging.open(site))


def _report(site: str, meta: Mapping[str, Any], stats: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, Any]:
    return read_report(meta.get("report"), fields, site, suppressed=list_suppressed(stats, IN_REPORT))
