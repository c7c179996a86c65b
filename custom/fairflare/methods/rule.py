"""The server half of a method: what sites report, how reports become weights, what the sites are told.

A rule collects nothing, stores nothing and sums nothing: :class:`fairflare.federation.collector.Collector` does that
once for all methods.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.core import checks
from fairflare.core.settings import settings
from fairflare.core.weighting import normalise
from fairflare.methods.reports import Field

if TYPE_CHECKING:
    from fairflare.core.task import Task

log = logging.getLogger(__name__)
State = Mapping[str, torch.Tensor]
SiteWeights = dict[str, float]
LayerWeights = dict[str, dict[str, float]]  # layer -> site -> weight
OLD_JOB = "this job folder was exported by an older fairflare; export it again"


@dataclass
class RoundInputs:
    """What a rule sees when it weighs: everything by site name, sites sorted.

    ``states`` are lazy: a tensor is read from disk when it is asked for. They are full local models in FairFlare's own
    rounds, and whatever the sites sent (updates or models) under FLARE's stock controllers.
    """

    current_round: int
    num_rounds: int
    sites: list[str]
    num_samples: dict[str, int]
    reports: dict[str, dict[str, Any]]
    anchor_reports: dict[str, dict[str, Any]]
    states: Mapping[str, State]
    owner: dict[str, str]  # tensor name -> layer name
    asked: list[str] = field(default_factory=list)  # also those that did not answer
    received: State | None = None  # what the sites started from; unknown under stock controllers
    #: For weights that a rule keeps for later rounds: no site's share in them is larger than the run's ``max_weight``.
    remembered: Callable[[SiteWeights], SiteWeights] = dict
    #: For reported numbers (by site; and what they are called) that decide more than a weight: with the run's
    #: ``max_update_norm`` none is farther from their median than so many times. Without a name nothing is said of it.
    moderated: Callable[[Mapping[str, float], str], dict[str, float]] = lambda values, name: dict(values)
    #: For weights with which a rule makes tensors itself: within the run's bounds, as those of the models are.
    bounded: Callable[[SiteWeights], SiteWeights] = dict
    #: Names of the tensors that are trained; what else is floating is a buffer.
    parameters: Collection[str] = frozenset()
    num_steps: Mapping[str, int | None] = field(default_factory=dict)  # as the sites say; nobody checks it
    updates: bool = False  # ``states`` are updates, not models
    suppressed: Mapping[str, Collection[str]] = field(default_factory=dict)  # fields that stay at a site: too few cases
    seed: int = 0  # the run's; under stock controllers, which have none, 0

    def start(self, rule: Rule) -> State | None:
        """What a site's change is the difference to; ``None``: the states are changes themselves.

        Raises:
            RuntimeError: they are models and nobody knows what they started from (names the rule).
        """
        if self.received is None and not self.updates:
            raise RuntimeError(
                f"{type(rule).__name__} needs to know how far each site went: have the sites send updates (params of "
                "type DIFF), or run it with fairflare.flare.controller.RoundsController instead of a stock controller"
            )
        return self.received


@dataclass
class Weighing:
    r"""A rule's decision: a weight for each site, or for each layer and site; and what to record of it.

    .. math:: w \leftarrow w^r + s \sum_k a_k (w_k - w^r)

    Args:
        sites: weight a_k by site, or
        layers: weight by layer and site.
        step: s, of the trained parameters, ``>= 0``; anything else takes a whole step. Only with ``sites``.
        buffers: weight by site of the floating tensors that are not trained (batch norm's statistics); default: as
            ``sites``. Integers are the maximum in any case.
        record: values by layer and site.
        reports: values by site; default: the numbers of the sites' reports.
        values: of the round as a whole.
        details: more of it for the results file, JSON-like (for instance what a picture needs).
        tensors: of the next global model that the rule has made itself, see :attr:`Rule.makes`.
    """

    sites: SiteWeights | None = None
    layers: LayerWeights | None = None
    step: float = 1.0
    buffers: SiteWeights | None = None
    record: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    reports: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@settings
class Rule(ABC):
    """Server half of a method.

    A subclass declares what a site must report (``report_fields``, and ``anchor_fields`` for a two-phase method) and
    implements :meth:`weigh`. Its settings are typed fields; see :func:`fairflare.core.settings.settings`.
    """

    report_fields: ClassVar[tuple[Field, ...]] = ()
    anchor_fields: ClassVar[tuple[Field, ...]] = ()
    #: What each of the :meth:`directives` is, and what it says about other sites; for ``docs/privacy.md``.
    directive_docs: ClassVar[dict[str, str]] = {}
    #: The sites are asked twice a round: to train, and about the plain average of their models (the anchor).
    two_phase: ClassVar[bool] = False
    #: Directives that are a dict by site: a site is sent its own entry and hears nothing of the others.
    directives_by_site: ClassVar[tuple[str, ...]] = ()
    #: Beginnings of the names of tensors that the rule makes itself: they go to the sites, and none come back.
    makes: ClassVar[tuple[str, ...]] = ()
    #: Settings that are gone, and what to do instead; the first that is given is named.
    retired: ClassVar[dict[str, str]] = {"min_sites": OLD_JOB}

    def __post_init__(self) -> None:
        #: For what is too large for :meth:`state_dict`; given by the run; ``None``: outside one.
        self.memory_folder: Path | None = None

    @abstractmethod
    def weigh(self, inputs: RoundInputs) -> Weighing:
        """Weights of this round; each set must be ``>= 0`` and sum to 1 over ``inputs.sites``."""

    @property
    def needs_classes(self) -> bool:
        """Whether the sites must report what only data with classes have."""
        return False

    @property
    def not_a_mean(self) -> str:
        """Why nothing can take the place of the weighted mean of the models (``aggregate=median``); empty: it can."""
        if type(self).each is not Rule.each:
            return "every site gets a model of its own"
        return "the server makes a part of the model itself" if self.makes else ""

    @property
    def weighs(self) -> bool:
        """Whether what the sites report is to make their weights differ; a run in which it never does so says it."""
        return bool(self.report_fields or self.anchor_fields)

    @property
    def reports_another(self) -> bool:
        """Whether :meth:`reported` gives another model than that of the last round."""
        return False

    def begin_round(self, received: State) -> None:  # noqa: B027
        """Called with the whole model that the sites will receive.

        Raises:
            ValueError: the rule cannot do with it.
        """

    def asks_about_anchor(self, current_round: int) -> bool:
        """Whether the second phase of a two-phase rule takes place in this round."""
        return self.two_phase

    def check_run(self, num_rounds: int) -> None:  # noqa: B027 - a hook
        """Refuses a run in which the rule could do nothing of its own.

        Raises:
            ValueError: says which setting does not go with the number of rounds.
        """

    def check_task(self, task: Task) -> None:  # noqa: B027 - a hook
        """Refuses a task that the rule cannot weigh, as far as that is known without data.

        Raises:
            ValueError: says which setting does not go with it.
        """

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        """What ``sites`` are told besides the model."""
        return {}

    def each(self, state: State) -> Callable[[str], State] | None:
        """What every site is sent in place of the common model ``state``; ``None``: all are sent that.

        A function of the site's name that gives the same whenever it is asked, from any thread. It is asked when the
        site's message is made, so that the server has few of them at a time; see :mod:`fairflare.methods.downloads`.
        """
        return None

    def check_report(self, report: dict[str, Any], site: str) -> dict[str, Any]:
        """Checks that no single field can do.

        Raises:
            ReportError: names site, field and value.
        """
        return report

    def check_steps(self, report: dict[str, Any], num_steps: int | None, site: str) -> dict[str, Any]:
        """The same against the number of steps that the site says it made; ``None``: it says none."""
        return report

    def check_anchor_report(self, report: dict[str, Any], site: str, layers: Sequence[str]) -> dict[str, Any]:
        """The same for the report about the anchor; ``layers`` are the model's."""
        return report

    def misfits(self, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Sites whose checked reports do not go together with those of the others, and why; they are left out."""
        return {}

    def reported(self, state: State) -> State:
        """The model that a run ends with, tested and kept, from the one of the last round; default: itself."""
        return state

    def follows_num_rounds(self) -> list[str]:
        """Settings whose effect in a round depends on the number of rounds: an experiment cannot go on with another."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What outlives a round: plain values and tensors, saved with the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        checks.same_names(f"what {type(self).__name__} keeps", (), "the checkpoint", state, of="value")


def sample_weights(inputs: RoundInputs) -> SiteWeights:
    """n_k / sum n over the round's sites."""
    return normalise({site: float(inputs.num_samples[site]) for site in inputs.sites})
