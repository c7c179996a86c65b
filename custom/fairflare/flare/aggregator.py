"""A rule under FLARE's own controllers: ``FedAvgRecipe(aggregator=FairAggregator(rule=FedISM()))``.

FLARE calls ``accept_model`` for each result and ``aggregate_model`` once. An exception in the first is logged and the
site silently left out, so a refusal is recorded here instead; the second raises below ``min_sites``, with every site's
reason, and ends the job.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fairflare import __version__
from fairflare.base.settings import PositiveInt, settings
from fairflare.core.states import check_state
from fairflare.exchange.messages import STATUS_OK, Message, clean_tensor
from fairflare.exchange.received_state import Conformed, Incoming, in_words, layout_of
from fairflare.exchange.tensor_file import Layout
from fairflare.federation.collecting.collector import Collector
from fairflare.federation.plan.bounds import Bounds
from fairflare.federation.site.replies import is_finite, printable
from fairflare.flare.messages.wire import META_KEY, from_model
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import MakesTensors, Rule, State, TwoPhase, Weighing

log = logging.getLogger(__name__)
Signature = tuple[Any, ...]


class AsSent:
    """Under a stock controller nobody says what was sent out: models are collected as they come, and compared later.

    Args:
        only_updates: whole models are refused, as nobody knows how far they are from what was sent out.
    """

    stays: frozenset[str] = frozenset()

    def __init__(self, only_updates: bool = False) -> None:
        self.updates = False
        self.only_updates = only_updates
        self.signatures: dict[str, Signature] = {}
        self.layouts: dict[str, Layout] = {}
        self.common: Layout = {}

    def read(self, message: Message, site: str, fits: Callable[[Layout], bool] | None = None) -> Incoming:
        if self.only_updates and not message.is_update:
            raise ValueError(
                f"site {site!r} sent a whole model; max_update_norm needs updates here (params of type DIFF): have the "
                "sites send them, or leave max_update_norm out"
            )
        params = message.params
        if not params:
            raise ValueError(f"site {site!r} sent no model")
        names = {str(name): name for name in params}

        def make(name: str) -> torch.Tensor:
            return clean_tensor(name, params[names[name]])

        layout: Layout = {}
        for name in names:
            tensor = make(name)
            check_state({name: tensor}, {name: tensor}, site)  # finite, real
            layout[name] = tensor.dtype, tuple(tensor.shape)
        shapes = tuple(sorted((name, shape, dtype.is_floating_point) for name, (dtype, shape) in layout.items()))
        self.signatures[site] = (message.is_update, message.current_round, shapes)
        self.layouts[site] = layout
        return Incoming(layout, make)

    def agree(self, signature: Signature) -> None:
        """What the sites of this signature sent is what counts; of a tensor, the type that most of them gave it."""
        alike = [self.layouts[site] for site in sorted(self.layouts) if self.signatures[site] == signature]
        self.updates = signature[0]
        self.common = {
            name: (Counter(layout[name][0] for layout in alike).most_common(1)[0][0], shape)
            for name, (_, shape) in alike[0].items()
        }

    def check(self, state: State) -> None:
        """Raises ValueError where a number is none of the type that most sites gave its tensor."""
        own = layout_of(state)
        conformed = self.collected(state)
        for name, (dtype, _) in self.common.items():
            if name in own and own[name][0] != dtype:
                _ = conformed[name]

    def collected(self, state: State) -> State:
        return Conformed(state, self.common) if layout_of(state) != self.common else state


@settings
class FairAggregator(Bounds, ModelAggregator):
    """A single-phase rule as FLARE's ``ModelAggregator``.

    What the results must look like is what most of them do: sites whose names or shapes of tensors, kind of parameters
    or round differ from the majority's are left out by name.

    Args:
        rule: a method's server half.
        min_sites: usable results a round needs.

    With ``max_update_norm`` the sites must send updates (DIFF): a stock controller does not say which model a whole one
    started from, so one is refused by name.

    The result's metrics are the means over the sites, whatever their range, for the controller's ``stop_cond``.

    Raises:
        ValueError: the rule asks the sites twice a round, or makes tensors itself; a stock controller does neither.
    """

    rule: Rule
    min_sites: PositiveInt = 1

    def __post_init__(self) -> None:
        ModelAggregator.__init__(self)
        kinds = {TwoPhase: "asks the sites twice a round", MakesTensors: "makes a part of the model itself"}
        for does in (does for kind, does in kinds.items() if isinstance(self.rule, kind)):
            raise ValueError(
                f"{type(self.rule).__name__} {does}; run it with "
                "fairflare.flare.controller.RoundsController instead of a stock controller"
            )
        self._collector = Collector(self.rule, bounds=self)
        self.last_weighing: Weighing | None = None
        self.reset_stats()

    @property
    def accepted(self) -> list[str]:
        """Sites of the round so far."""
        return self._collector.accepted

    @property
    def rejected(self) -> dict[str, str]:
        """Why others are left out."""
        return self._collector.rejected

    def reset_stats(self) -> None:
        """Begins a round (not the rule's own state)."""
        self._shape = AsSent(only_updates=self.max_update_norm is not None)
        self._numpy: dict[str, bool] = {}
        self._metrics: dict[str, dict[str, float]] = {}
        self._fault: OSError | None = None
        self._collector.begin(0, 1, shape=self._shape, received=None)

    def accept_model(self, model: FLModel) -> None:
        """Takes one site's result, or records in ``rejected`` why not."""
        site = str((model.meta or {}).get("client_name") or "")
        if not site:
            self._refuse("?", "a result without a site name (meta 'client_name')")
            return
        try:
            training = self._collector.read_training(site, self._with_head(model), needs_metrics=False)
            numbers = {str(name): value for name, value in (model.metrics or {}).items() if _is_number(value)}
            self._metrics[site] = {name: float(value) for name, value in numbers.items()}
            self._numpy[site] = all(isinstance(value, (np.ndarray, np.generic)) for value in model.params.values())
            self._collector.keep(training)
        except OSError as error:  # the server's own fault; raised here, FLARE would drop the site and go on
            self._fault = error
        except Exception as error:
            found = f"site {site!r}: {printable(f'{type(error).__name__}: {error}')}"
            self._refuse(site, str(error) if isinstance(error, ReportError) else found)

    def aggregate_model(self) -> FLModel:
        """The aggregated model, or update where the sites sent updates.

        Raises:
            QuorumError: fewer than ``min_sites`` usable results (gives the reasons).
            OSError: the server could not write a site's model.
        """
        if self._fault is not None:
            raise self._fault
        self._keep_majority()
        for reason in self._collector.screen().values():
            log.warning("left out: %s", reason)
        self._collector.require(self.min_sites)
        is_update, current_round, _ = self._shape.signatures[self.accepted[0]]
        if current_round is not None:
            self._collector.at_round(int(current_round))
        state, self.last_weighing = self._collector.aggregate()
        warnings = [f"site {w.site!r}: {w.text}" if w.site else w.text for w in self._collector.warnings]
        for warning in warnings:
            log.warning("round %s: %s", current_round, warning)
        as_numpy = all(self._numpy[site] for site in self.accepted)
        params: dict[str, Any] = {k: v.numpy() for k, v in state.items()} if as_numpy else dict(state)
        return FLModel(
            params=params,
            params_type=ParamsType.DIFF if is_update else ParamsType.FULL,
            metrics=_mean([self._metrics[site] for site in self.accepted]) or None,
            current_round=current_round,
            meta={META_KEY: {"sites": self.accepted, "rejected": dict(self.rejected), "warnings": warnings}},
        )

    def _keep_majority(self) -> None:
        signatures = {site: self._shape.signatures[site] for site in self.accepted}
        if not signatures:
            return
        common, _ = Counter(signatures.values()).most_common(1)[0]
        for site, found in signatures.items():
            if _fits(found, common):
                absent = sorted({name for name, *_ in common[2]} - {name for name, *_ in found[2]})
                if absent:
                    log.info("site %r: %s did not come and count as unchanged", site, in_words(absent))
            else:
                self._collector.drop(site, f"site {site!r} sent {_difference(found, common)}")
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

    def _with_head(self, model: FLModel) -> Message:
        """A script that sends no report still has a version and a status, as far as its rule is concerned."""
        message = from_model(model)
        given = message.meta if isinstance(message.meta, dict) else {}
        message.meta = {"version": __version__, "status": STATUS_OK, **given}
        message.metrics = None  # of the stock controller; an accuracy in percent is none of a rule's business
        if message.current_round is not None:
            self._collector.at_round(int(message.current_round))
        return message


def _fits(found: Signature, common: Signature) -> bool:
    """Whether it is the same but for what a filter does: tensors of an update excluded, integers made floating."""
    kinds = {(name, shape): floating for name, shape, floating in common[2]}
    whole = found[0] or len(found[2]) == len(common[2])
    return (
        found[:2] == common[:2]
        and whole
        and all((name, shape) in kinds and (floating or not kinds[name, shape]) for name, shape, floating in found[2])
    )


def _difference(found: Signature, common: Signature) -> str:
    if found[0] != common[0]:
        kinds = {True: ParamsType.DIFF.value, False: ParamsType.FULL.value}
        return f"params of type {kinds[found[0]]}, most sites {kinds[common[0]]}"
    if found[1] != common[1]:
        return f"a result of round {found[1]}, most sites of round {common[1]}"
    odd = sorted(set(found[2]) ^ set(common[2]))[0]
    return f"another model than most sites: tensor {odd[0]!r} differs"


def _is_number(value: Any) -> bool:
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool) and is_finite(value)


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Mean of what all sites measured, so that a stock controller's ``stop_cond`` has something to look at."""
    shared = set.intersection(*(set(m) for m in metrics)) if metrics else set()
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in sorted(shared)}
