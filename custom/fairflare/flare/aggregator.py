"""Run a method's rule under FLARE's own controllers: ``FedAvgRecipe(aggregator=FairAggregator(rule=FedISM()))``.

In a round FLARE calls ``accept_model`` for each result, then ``aggregate_model`` once. If ``accept_model`` raised an
exception, FLARE would log it and leave the site out silently, so a refusal is recorded instead. ``aggregate_model``
raises an error if there are fewer than ``min_sites`` usable results; it names every site's reason and ends the job.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants

from fairflare import __version__
from fairflare.base import checks
from fairflare.base.checks import MAX_SAMPLES, printable
from fairflare.base.machine.one_run import refuse_main
from fairflare.base.settings import PositiveInt, settings
from fairflare.core.states import add_update, check_state, difference
from fairflare.exchange.messages import STATUS_OK, Message, clean_tensor
from fairflare.exchange.tensor_file import Layout, layout_of, list_names
from fairflare.federation.collecting.collector import UNTOLD, Collector, Counts
from fairflare.federation.collecting.received_state import Incoming, conform_state, is_trained
from fairflare.federation.plan.bounds import Bounds
from fairflare.flare.messages.wire import META_KEY, NUM_STEPS, decode_model
from fairflare.methods.base.reports import SENT_BACK, ReportError
from fairflare.methods.base.rule import (
    MakesTensors,
    Rule,
    SendsBeside,
    SendsParts,
    State,
    Steps,
    SumOfKept,
    TwoPhase,
    Weighing,
)

log = logging.getLogger(__name__)
Signature = tuple[Any, ...]


class AsSent:
    """Collect models under a stock controller in the form in which sites send them, and compare their forms later.

    Args:
        received: the model that the controller sent out, with values of FLARE's types; ``None`` if it is not known.
        as_updates: the setting or rule that needs updates: whole models are then collected as updates from
            ``received``; empty if models are collected as they are.
    """

    stays: frozenset[str] = frozenset()

    def __init__(self, received: Mapping[str, Any] | None = None, as_updates: str = "") -> None:
        self.updates = False
        self.received, self.as_updates = received or {}, as_updates
        self.only_updates = True  # False once a site has sent a whole model
        self.forms: dict[str, tuple[Signature, Layout]] = {}  # by site
        self.common: Layout = {}

    def read(self, message: Message, site: str, fits: Callable[[Layout], bool] | None = None) -> Incoming:
        params, received = message.params, self.received
        if not params:
            raise ValueError(f"site {site!r} sent no model")
        names, whole = {str(name): name for name in params}, not message.is_update
        known = whole and all(name in received for name in names)
        if whole and self.as_updates and not known:
            raise ValueError(
                f"site {site!r} sent a whole model, and the controller does not say which one it sent out; "
                f'{self.as_updates} needs updates here: params_transfer_type="DIFF" in the recipe, or run it with '
                "fairflare.flare.controller.RoundsController"
            )

        def make(name: str) -> torch.Tensor:
            tensor = _make_tensor(name, params[names[name]])
            if not (known and self.as_updates):
                return tensor
            start = _make_tensor(name, received[name])
            checks.same_shape(f"tensor {name!r}", tensor, "the model that was sent out", start)
            return difference({name: tensor}, {name: start}, site)[name]

        layout: Layout = {}
        moved: list[bool] = []
        for name in names:
            tensor = make(name)
            check_state({name: tensor}, {name: tensor}, site)  # checks that values are finite and real
            layout[name] = tensor.dtype, tuple(tensor.shape)
            if (known or message.is_update) and not any(moved) and is_trained(name, tensor):
                start = (
                    _make_tensor(name, received[name]) if known and not self.as_updates else torch.zeros_like(tensor)
                )
                moved.append(not torch.equal(tensor, start))
        if moved and not any(moved):
            raise ValueError(f"site {site!r}: it {SENT_BACK}, and does not count as trained")
        self.only_updates = self.only_updates and message.is_update
        shapes = tuple(sorted((name, shape, dtype.is_floating_point) for name, (dtype, shape) in layout.items()))
        self.forms[site] = (message.is_update or bool(self.as_updates), message.current_round, shapes), layout
        return Incoming(layout, make)

    def agree(self, signature: Signature) -> None:
        """Take the form of models (names, shapes, dtypes) of the sites with this signature as the form of all sites."""
        alike = [self.forms[site][1] for site in sorted(self.forms) if self.forms[site][0] == signature]
        self.updates = signature[0]
        self.common = {
            name: (Counter(layout[name][0] for layout in alike).most_common(1)[0][0], shape)
            for name, (_, shape) in alike[0].items()
        }

    def check(self, state: State) -> None:
        """Raise ``ValueError`` if a value of a site's model does not fit the dtype of its tensor at most sites."""
        layout = layout_of(state)
        for name, (dtype, _) in self.common.items():
            if name in layout and layout[name][0] != dtype:
                _ = conform_state(state, self.common)[name]

    def shape_state(self, state: State) -> State:
        return conform_state(state, self.common) if layout_of(state) != self.common else state


@settings
class FairAggregator(Bounds, ModelAggregator):
    """Run a rule that asks sites once a round as FLARE's ``ModelAggregator``.

    The form of most results is the required one: sites whose names or shapes of tensors, kind of parameters or round
    differ from the majority's are left out, and named in the log.

    Args:
        rule: a method's server half.
        min_sites: usable results a round needs.

    A rule weighs a site by ``NUM_STEPS_CURRENT_ROUND`` as FLARE does (by 1 if this is absent or no positive number),
    or by the ``num_samples`` of :func:`fairflare.client.with_report` if at least as many sites report these. Warnings
    name sites that report neither.

    If the length of updates matters (``max_update_norm``, FedNova, q-FedAvg), whole models are converted to updates
    of the controller's global model. A site that sent back the received model is left out, and named in the log.

    Metrics of the result are the means over the sites, whatever their range, for the controller's ``stop_cond``.

    Raises:
        ValueError: the rule needs more than a stock controller does: it asks sites twice a round, makes a part of the
            model itself, or sends each site a model of its own.
    """

    rule: Rule
    min_sites: PositiveInt = 1

    def __post_init__(self) -> None:
        ModelAggregator.__init__(self)
        refuse_main(self)
        kinds = {
            TwoPhase: "asks the sites twice a round",
            MakesTensors: "makes a part of the model itself",
            SendsParts: "sends every site something of its own",
            SendsBeside: "sends the sites more than the model",
            SumOfKept: "tells each site which of its rounds counted",
        }
        checks.refuse({
            f"{type(self.rule).__name__} {does}; run it with fairflare.flare.controller.RoundsController instead of a "
            "stock controller": isinstance(self.rule, kind)
            for kind, does in kinds.items()
        })  # fmt: skip
        self._collector = Collector(self.rule, bounds=self)
        moves = isinstance(self.rule, Steps) or type(self.rule).move is not Rule.move
        self._needs_updates = "max_update_norm" if self.max_update_norm else type(self.rule).__name__ if moves else ""
        self._steps_before: dict[str, tuple[float, float]] = {}  # by site: steps of its first and of its last round
        self.last_weighing: Weighing | None = None
        self.reset_stats()

    @property
    def accepted(self) -> list[str]:
        """Return the names of the sites whose result is in the current round so far."""
        return self._collector.accepted

    @property
    def rejected(self) -> dict[str, str]:
        """Return why a site's result is not in the current round, by site."""
        return self._collector.rejected

    def reset_stats(self) -> None:
        """Start a round: forget the sites' results, but not the rule's own state."""
        self._shape = AsSent(as_updates=self._needs_updates)
        # By site: num_samples and steps as reported, types of the tensors, and metrics.
        self._results: dict[str, tuple[int | None, Any, set[type], dict[str, float]]] = {}
        self._fault: OSError | None = None
        self._collector.begin(0, 1, shape=self._shape, received=None)

    def accept_model(self, model: FLModel) -> None:
        """Add one site's result to the round, or record in ``rejected`` why it cannot be used."""
        site = str((model.meta or {}).get("client_name") or "")
        if not site:
            self._refuse("?", "a result without a site name (meta 'client_name')")
            return
        if not self._shape.received:  # FLARE holds the model that was sent out until the round is over
            sent = None if self.fl_ctx is None else self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)
            self._shape.received = sent.get(ModelLearnableKey.WEIGHTS) or {} if isinstance(sent, Mapping) else {}
        try:
            training = self._collector.read_training(site, self._add_head(model))
            numbers = {
                str(name): float(value) if isinstance(value, (np.integer, np.floating)) else value
                for name, value in (model.metrics or {}).items()
            }
            self._results[site] = (
                training.num_samples,
                (model.meta or {}).get(NUM_STEPS),
                {_kind(value) for value in model.params.values()},
                {name: float(value) for name, value in numbers.items() if checks.is_number(value)},
            )
            self._collector.keep(training)
        except OSError as error:  # the server's own fault; if raised here, FLARE would only drop the site
            self._fault = error
        except Exception as error:
            reason = f"site {site!r}: {printable(f'{type(error).__name__}: {error}')}"
            silent = " report" in str(error) and META_KEY not in (model.meta or {})
            needs = ", ".join(field.name for field in self.rule.report_fields)
            hint = f"; {type(self.rule).__name__} reads {needs}: client.with_report(model, {{...}})" if silent else ""
            self._refuse(site, f"{error}{hint}" if isinstance(error, ReportError) else reason)

    def aggregate_model(self) -> FLModel:
        """Return the aggregated model, or the aggregated update if the sites sent updates.

        Raises:
            QuorumError: there are fewer than ``min_sites`` usable results; the message gives each site's reason.
            OSError: the server could not write a site's model.
        """
        if self._fault is not None:
            raise self._fault
        self._keep_majority()
        for reason in self._collector.screen().values():
            log.warning("left out: %s", reason)
        self._collector.require(self.min_sites)
        (is_update, current_round, _), _ = self._shape.forms[self.accepted[0]]
        if current_round is not None:
            self._collector.set_round(int(current_round))
        self._collector.count_by(self._count_samples())
        state, self.last_weighing = self._collector.aggregate()
        warnings = [f"site {w.site!r}: {w.text}" if w.site else w.text for w in self._collector.warnings]
        for warning in warnings:
            log.warning("round %s: %s", current_round, warning)
        if self._needs_updates and not self._shape.only_updates:
            sent_out = {name: _make_tensor(name, self._shape.received[name]) for name in state}
            state, is_update = add_update(sent_out, state), False
        results = [self._results[site] for site in self.accepted]
        kinds = set[type]().union(*(kinds_of_site for _, _, kinds_of_site, _ in results))
        # For a stock controller's ``stop_cond``: the mean of each metric that all sites measured.
        shared = set.intersection(*({*metrics} for *_, metrics in results))
        back = (
            torch.Tensor.item if kinds == {float} else torch.as_tensor if torch.Tensor in kinds else torch.Tensor.numpy
        )
        return FLModel(
            params={name: back(tensor) for name, tensor in state.items()},
            params_type=ParamsType.DIFF if is_update else ParamsType.FULL,
            metrics={n: sum(metrics[n] for *_, metrics in results) / len(results) for n in sorted(shared)} or None,
            current_round=current_round,
            meta={META_KEY: {"sites": self.accepted, "rejected": dict(self.rejected), "warnings": warnings}},
        )

    def _count_samples(self) -> Counts:
        """Return the number that each accepted site is weighed by, as in FLARE's own FedAvg, with warnings."""
        given = {site: self._results[site][:2] for site in self.accepted}
        samples = {site: float(number) for site, (number, _) in given.items() if number is not None}
        steps = {site: number for site, (_, value) in given.items() if (number := _positive(value)) is not None}
        if samples and len(samples) >= len(steps):
            odd = dict.fromkeys(given.keys() - samples.keys(), UNTOLD)
            return Counts({site: samples.get(site, 1.0) for site in given}, odd)
        unusable = {
            site: f"no {NUM_STEPS}" if value is None else f"{NUM_STEPS}={value!r:.40}"
            for site, (_, value) in given.items()
            if site not in steps
        }
        odd = {
            site: f"it says {what}, and weighs as one step (as with FLARE's own FedAvg)"
            for site, what in unusable.items()
        }
        for site, number in steps.items():
            first, last = self._steps_before.get(site, (0.0, 0.0))
            if last and number == first + last:
                odd[site] = f"it says {number:g} steps after {last:g}; is {NUM_STEPS} of all rounds so far, not of one?"
            self._steps_before[site] = first or number, number
        return Counts({site: steps.get(site, 1.0) for site in given}, odd)

    def _keep_majority(self) -> None:
        signatures = {site: self._shape.forms[site][0] for site in self.accepted}
        if not signatures:
            return
        common, _ = Counter(signatures.values()).most_common(1)[0]
        for site, signature in signatures.items():
            if _fits(signature, common):
                if absent := sorted({name for name, *_ in common[2]} - {name for name, *_ in signature[2]}):
                    log.info("site %r: %s did not come and count as unchanged", site, list_names(absent))
            else:
                self._collector.drop(site, f"site {site!r} sent {_difference(signature, common)}")
                log.warning("left out: %s", self.rejected[site])
        self._shape.agree(common)
        for site in self.accepted:
            try:
                self._shape.check(self._collector.staging.open(site))
            except ValueError as error:
                self._collector.drop(site, f"site {site!r}: {printable(str(error))}")
                log.warning("left out: %s", self.rejected[site])

    def _refuse(self, site: str, reason: str) -> None:
        self._collector.reject(site, reason)
        log.warning("left out: %s", reason)

    def _add_head(self, model: FLModel) -> Message:
        """Convert a result to a message with version and status, which a script without a report does not send."""
        message = decode_model(model)
        message.meta = {
            "version": __version__,
            "status": STATUS_OK,
            **(message.meta if isinstance(message.meta, dict) else {}),
        }
        if _positive(message.meta.get("num_steps")) is None:  # FLARE counts such steps as 1
            message.meta.pop("num_steps", None)
        if message.current_round is not None:
            self._collector.set_round(int(message.current_round))
        return message


def _positive(value: Any) -> float | None:
    """Return a reported number of steps as FLARE's own FedAvg reads it, or ``None`` if FedAvg uses 1 in its place."""
    try:
        number = 0.0 if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 < number <= MAX_SAMPLES else None


def _make_tensor(name: str, value: Any) -> torch.Tensor:
    """Convert a parameter of FLARE's message to a tensor; a plain number becomes float64, as in FLARE's own sums."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return clean_tensor(name, np.float64(value) if plain else value)


def _kind(value: Any) -> type:
    plain, array = isinstance(value, (int, float)), isinstance(value, (np.ndarray, np.generic))
    return np.ndarray if array else float if plain else torch.Tensor


def _fits(signature: Signature, common: Signature) -> bool:
    """Return whether a model's signature equals the common one, apart from changes that a FLARE filter makes.

    A filter may exclude tensors of an update, and turn integers into floating-point numbers.
    """
    kinds = {(name, shape): floating for name, shape, floating in common[2]}
    return (
        signature[:2] == common[:2]
        and (signature[0] or len(signature[2]) == len(common[2]))
        and all(
            (name, shape) in kinds and (floating or not kinds[name, shape]) for name, shape, floating in signature[2]
        )
    )


def _difference(signature: Signature, common: Signature) -> str:
    if signature[0] != common[0]:
        kinds = {True: ParamsType.DIFF.value, False: ParamsType.FULL.value}
        return f"params of type {kinds[signature[0]]}, most sites {kinds[common[0]]}"
    if signature[1] != common[1]:
        return f"a result of round {signature[1]}, most sites of round {common[1]}"
    return f"another model than most sites: tensor {min({*signature[2]} ^ {*common[2]})[0]!r} differs"
