"""The server half of a method: what sites report, how reports become weights, what the sites are told.

A rule collects nothing, stores nothing and sums nothing: :class:`fairflare.federation.collecting.collector.Collector`
does that once for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch

from fairflare.base import checks
from fairflare.base.settings import settings
from fairflare.core.states import Made
from fairflare.core.states import State as State
from fairflare.core.weighting import normalise
from fairflare.methods.base.reports import Field

if TYPE_CHECKING:
    from fairflare.base.task import Task

SiteWeights = dict[str, float]
LayerWeights = dict[str, dict[str, float]]  # layer -> site -> weight


@dataclass
class RoundInputs:
    """What a rule sees when it weighs: everything by site name, sites sorted.

    ``states`` are lazy: a tensor is read from disk when it is asked for. They are full local models in FairFlare's own
    rounds, and whatever the sites sent (updates or models) under FLARE's stock controllers.
    """

    current_round: int
    num_rounds: int
    sites: list[str]
    num_samples: Mapping[str, float]  # or, under stock controllers, steps
    reports: dict[str, dict[str, Any]]
    anchor_reports: dict[str, dict[str, Any]]
    states: Mapping[str, State]
    owner: dict[str, str]  # tensor name -> layer name
    asked: list[str] = field(default_factory=list)  # also those that did not answer
    received: State | None = None  # what the sites started from; unknown under stock controllers
    #: For weights that a rule keeps for later rounds: no site's share in them is larger than the run's ``max_weight``.
    remembered: Callable[[SiteWeights], SiteWeights] = dict
    #: Limits reported numbers (by site; with their name for the warning, "": no warning) that decide more than a
    #: weight: at most ``max_update_norm`` times the median, at least the median divided by it. ``among``: further
    #: numbers for the median where fewer than three sites report one.
    moderated: Callable[..., dict[str, float]] = lambda values, name, among=(): dict(values)
    #: For weights with which a rule makes tensors itself: within the run's bounds, as those of the models are.
    bounded: Callable[[SiteWeights], SiteWeights] = dict
    #: Names of the tensors that are trained; what else is floating is a buffer.
    parameters: Collection[str] = frozenset()
    frozen: Collection[str] = frozenset()  # tensors that no training changes
    updates: bool = False  # ``states`` are updates, not models
    suppressed: Mapping[str, Collection[str]] = field(default_factory=dict)  # fields that stay at a site: too few cases
    seed: int = 0  # the run's; under stock controllers, which have none, 0

    def changing(self, state: State) -> State:
        """Return what of a state a training can change; read when it is asked for."""
        return Made([name for name in state if name not in self.frozen], state.__getitem__) if self.frozen else state

    def start(self, rule: Rule) -> State | None:
        """Return what a site's change is the difference to; ``None``: the states are changes themselves.

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

    .. math:: w \leftarrow w^r + \mathrm{move}\Big(\sum_k a_k (w_k - w^r)\Big)

    Args:
        sites: weight a_k by site, or
        layers: weight by layer and site.
        buffers: weight by site of the floating tensors that are not trained (batch norm's statistics), beside
            ``sites``; default: as these. Integers are the maximum in any case.
        record: values by layer and site.
        reports: values by site; default: the numbers of the sites' reports.
        values: of the round as a whole.
        details: more of it for the results file, JSON-like (for instance what a picture needs).
    """

    sites: SiteWeights | None = None
    layers: LayerWeights | None = None
    buffers: SiteWeights | None = None
    record: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    reports: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@settings
class Rule(ABC):
    """Server half of a method.

    A subclass declares what a site must report and implements :meth:`weigh`; ten further members may be its own. What
    only some methods do is a capability, a class below to inherit from beside this one. Settings are typed fields; see
    :func:`fairflare.base.settings.settings`.
    """

    report_fields: ClassVar[tuple[Field, ...]] = ()
    #: What each of the :meth:`directives` is, and what it says about other sites; for ``docs/privacy.md``.
    directive_docs: ClassVar[dict[str, str]] = {}
    #: Why nothing can take the place of the weighted mean of the models (``aggregate=median``); empty: something can.
    only_mean: ClassVar[str] = ""
    #: Attributes that outlive a round, without their underscore: plain values, tensors, and dicts and lists of these.
    _outlive: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        #: Folder for data too large for :meth:`state_dict`; the run sets it; ``None``: not in a run.
        self.memory_folder: Path | None = None

    @abstractmethod
    def weigh(self, inputs: RoundInputs) -> Weighing:
        """Return the weights of this round; each set must be ``>= 0`` and sum to 1 over ``inputs.sites``."""

    def move(self, change: State) -> State:
        """Return the change to apply to the model's trained tensors, from their mean change: a server's optimizer.

        Called once a round, after :meth:`weigh`. What is kept between rounds belongs into :meth:`state_dict`.

        Args:
            change: mean of the sites' changes with the round's weights (with ``aggregate`` their median), in float64,
                by name. A tensor is made from what waits on disk when it is asked for, each time anew: take it once.

        Returns:
            The same names and shapes; ``change`` itself: the plain mean.
        """
        return change

    @property
    def weighs(self) -> bool:
        """Whether what the sites report is to make their weights differ; a run in which it never does so says it."""
        return bool(self.report_fields)

    def check_run(self, num_rounds: int, task: Task | None) -> None:  # noqa: B027 - a hook
        """Refuse a run in which the rule could do nothing of its own, or a task that it cannot weigh.

        Args:
            num_rounds: of the run.
            task: without data; ``None``: nobody knows it here.

        Raises:
            ValueError: says which setting does not go with it.
        """

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        """Return what ``sites`` are told besides the model; of a ``BySite`` dict each is sent its own entry only."""
        return {}

    def counted(self, report: Mapping[str, Any]) -> Mapping[str, float]:
        """Return how much of what a site has a checked report speaks of: images by split, and ``groups`` of people.

        A report that speaks of more images, or of another number of groups, than the site said before the first round
        is refused. A count of 0 groups says nothing.
        """
        return {}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        """Return the report, after checks that no single field can do.

        Args:
            report: with every declared field.
            site: whose.
            num_steps: that it says it made; ``None``: it says none.

        Raises:
            ReportError: names site, field and value.
        """
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return what outlives a round: plain values and tensors, saved with the checkpoint."""
        return {name: _copied(getattr(self, f"_{name}")) for name in self._outlive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        checks.same_names(f"what {type(self).__name__} keeps", self._outlive, "the checkpoint", state, of="value")
        for name, value in state.items():
            setattr(self, f"_{name}", _copied(value))


def _copied(value: Any) -> Any:
    """Return dicts and lists anew, with the same tensors, which nobody changes in place."""
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return list(map(_copied, value)) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------ capabilities


class TwoPhase(Rule):
    """Capability: the sites are asked twice a round, to train and about the average of their models (the anchor)."""

    anchor_fields: ClassVar[tuple[Field, ...]] = ()

    @property
    def weighs(self) -> bool:
        return True

    def asks_about_anchor(self, current_round: int) -> bool:
        """Return whether the second phase takes place in this round."""
        return True

    @abstractmethod
    def check_anchor_report(self, report: dict[str, Any], site: str, layers: Sequence[str]) -> dict[str, Any]:
        """Check the report about the anchor as :meth:`check_report` does; ``layers`` are the model's."""


class Steps(Rule):
    """Capability: the weights and the length of the step along the mean change are one formula.

    Attributes:
        step: of the round, ``>= 0``, set by :meth:`weigh`; ``None``: the plain mean.
    """

    only_mean: ClassVar[str] = "it makes a step along the mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.step: float | None = None

    def move(self, change: State) -> State:
        step = self.step
        return change if step is None else Made(change, lambda name: change[name].mul_(step))


class SeesModel(Rule):
    """Capability: is shown the whole model in front of a round."""

    @abstractmethod
    def begin_round(self, received: State) -> None:
        """Take the whole model that the sites will receive.

        Raises:
            ValueError: the rule cannot do with it.
        """


class MakesTensors(SeesModel):
    """Capability: some of the model's tensors are made at the server; they go to the sites, and none come back."""

    only_mean: ClassVar[str] = "the server makes a part of the model itself"
    #: Prefixes of the names of the tensors that the server makes.
    makes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def made(self) -> dict[str, torch.Tensor]:
        """Return those of the next model, after :meth:`weigh`; none: they stay as they are."""


class SendsParts(SeesModel):
    """Capability: every site has a model of its own, and is sent something made for it in place of the common model."""

    only_mean: ClassVar[str] = "every site gets a model of its own"

    @property
    def weighs(self) -> bool:
        return False  # what differs is what the sites are sent

    @abstractmethod
    def each(self, state: State) -> Callable[[str], State]:
        """Return what a site is sent in place of the common model ``state``, by its name.

        It gives the same whenever it is asked, from any thread. It is asked when the site's message is made, so that
        the server has few of them at a time; see :mod:`fairflare.methods.parts.downloads`.
        """


@runtime_checkable
class FollowsNumRounds(Protocol):
    """Capability, of rules, trainings and parts: what they do in a round depends on how many there will be."""

    def follows_num_rounds(self) -> list[str]:
        """Return the settings of which this is so: an experiment cannot go on with another number of rounds."""


def anchor_fields(rule: type[Rule]) -> tuple[Field, ...]:
    """Return what the sites are asked about the anchor; nothing where they are asked once a round."""
    return rule.anchor_fields if issubclass(rule, TwoPhase) else ()


def sample_weights(inputs: RoundInputs) -> SiteWeights:
    """Return n_k / sum n, each site's share of the samples, over the round's sites."""
    return normalise({site: float(inputs.num_samples[site]) for site in inputs.sites})
