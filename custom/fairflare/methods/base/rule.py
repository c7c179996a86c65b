"""Define the server half of a method: the declared reports, the weights made from them, and directives to the sites.

A rule does not collect, store or sum models: :class:`fairflare.federation.collecting.collector.Collector` does that
for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch

from fairflare.base.checks import refuse
from fairflare.base.settings import settings
from fairflare.core.aggregation.updates import gram
from fairflare.core.states import Made
from fairflare.core.states import State as State
from fairflare.core.weighting import normalise
from fairflare.exchange.messages import BySite
from fairflare.methods.base.home import COUNTED
from fairflare.methods.base.reports import Field
from fairflare.methods.base.saved import KeepsState, Saved

if TYPE_CHECKING:
    from fairflare.base.task import Task

SiteWeights = dict[str, float]
LayerWeights = dict[str, dict[str, float]]  # weights by layer, then by site


@dataclass
class RoundInputs:
    """Store the inputs with which a rule computes a round's weights: models, reports and counts by site, sites sorted.

    ``states`` are read lazily: a tensor is read from disk at access. They are full local models in FairFlare's own
    rounds; under FLARE's stock controllers they are what the sites sent, updates or models.
    """

    current_round: int
    num_rounds: int
    sites: list[str]
    num_samples: Mapping[str, float]  # number of training samples by site; under stock controllers, number of steps
    reports: dict[str, dict[str, Any]]
    anchor_reports: dict[str, dict[str, Any]]
    states: Mapping[str, State]
    owner: dict[str, str]  # name of the layer by name of the tensor
    asked: list[str] = field(default_factory=list)  # all sites that were sent the task, whether they answered or not
    received: State | None = None  # model that the sites started from; None if it is unknown (stock controllers)
    #: Function that limits weights which a rule saves for later rounds: no site's share exceeds the run's
    #: ``max_weight``.
    remembered: Callable[[SiteWeights], SiteWeights] = dict
    #: Function that bounds reported numbers which influence the model more than a weight does: to at most
    #: ``max_update_norm`` times their median, and at least the median divided by it. Arguments: the numbers by site;
    #: their name for the warning ("": no warning); and ``among``, further numbers for the median if fewer than three
    #: sites report one.
    moderated: Callable[..., dict[str, float]] = lambda values, name, among=(): dict(values)
    #: Share of its update that counts, by site whose update was clipped to ``max_update_norm``.
    shares: Mapping[str, float] = field(default_factory=dict)
    #: Function that limits weights with which a rule itself averages tensors to the run's bounds on models' weights.
    bounded: Callable[[SiteWeights], SiteWeights] = dict
    #: Names of the tensors that are trained; all other floating-point tensors are buffers.
    parameters: Collection[str] = frozenset()
    frozen: Collection[str] = frozenset()  # names of tensors that no training changes
    updates: bool = False  # whether ``states`` are updates and not models
    suppressed: Mapping[str, Collection[str]] = field(default_factory=dict)  # fields that a site withholds, by site
    seed: int = 0  # seed of the run; 0 under stock controllers, which have none

    def changing(self, state: State) -> State:
        """Return the tensors of a state that training can change, as a mapping that reads each tensor at access."""
        return Made([name for name in state if name not in self.frozen], state.__getitem__) if self.frozen else state

    def start(self, rule: Rule) -> State | None:
        """Return the model that the sites started from, or ``None`` if the states are already changes from that model.

        Raises:
            RuntimeError: the states are models, and the model that they started from is unknown (names the rule).
        """
        refuse({
            f"{type(rule).__name__} needs to know how far each site went: have the sites send updates (params of type "
            "DIFF), or run it with fairflare.flare.controller.RoundsController instead of a stock controller": (
                self.received is None and not self.updates
            ),
        }, RuntimeError)  # fmt: skip
        return self.received

    def gram(self, rule: Rule, *, model: bool = False) -> dict[str, torch.Tensor]:
        """Return the inner products of the sites' changes, by layer (:func:`fairflare.core.aggregation.updates.gram`).

        Args:
            rule: the rule that asks.
            model: whether the received model, if it is known, is a last row and column.

        Raises:
            RuntimeError: as :meth:`start` does.
        """
        start = self.start(rule)
        return gram(self.states, start, self.parameters, self.owner, start if model else None)

    def whole_gram(self, rule: Rule, *, model: bool = False) -> torch.Tensor:
        """Return the inner products of the sites' changes of the whole model, (sites, sites); see :meth:`gram`."""
        return reduce(torch.add, self.gram(rule, model=model).values())  # in order: a layer that is not sent adds 0


@dataclass
class Weighing:
    r"""Store a rule's decision for a round: a weight for each site, or for each layer and site, and values to record.

    .. math:: w \leftarrow w^r + \mathrm{move}\Big(\sum_k a_k (w_k - w^r)\Big)

    Args:
        sites: weight a_k by site; ``None`` if ``layers`` is given.
        layers: weight by layer and site, in place of ``sites``.
        buffers: weight by site for the floating-point tensors that are not trained (batch norm's statistics), used
            together with ``sites``; default: the weights in ``sites``. Integer tensors are always the maximum over
            sites.
        record: values to record, by layer and site.
        reports: values to record by site; default: the numbers of the sites' reports.
        values: values to record of the round as a whole.
        details: further values for the results file, JSON-like (for instance data of a figure).
        by_class: with secure sums: weight, by class and site, of the values by class that sites keep until they are
            summed; 0 for a site without the class.
        means: averages of these values, by ``CLASS.sum``: from :meth:`Rule.weigh`, tensors that only give the shapes;
            after the sums are opened, the averages.
    """

    sites: SiteWeights | None = None
    layers: LayerWeights | None = None
    buffers: SiteWeights | None = None
    record: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    reports: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    by_class: LayerWeights | None = None
    means: State = field(default_factory=dict)


@settings
class Rule(KeepsState, ABC):
    """Define the server half of a method; base class of all rules.

    A subclass declares the fields that a site must report and implements :meth:`weigh`; it may override eleven further
    members. Abilities that only some methods need are separate classes below, from which a rule also inherits. Settings
    are typed fields; see :func:`fairflare.base.settings.settings`.
    """

    report_fields: ClassVar[tuple[Field, ...]] = ()
    #: Description of each of the :meth:`directives`, and what it reveals about other sites; for ``fairflare privacy``.
    directive_docs: ClassVar[dict[str, str]] = {}
    #: Reason why the weighted mean of the models cannot be replaced (by ``aggregate=median``); empty if it can be.
    only_mean: ClassVar[str] = ""
    #: Reason why the server needs each site's model, so that ``secure=sums`` is refused; empty if it does not need it.
    reads_models: ClassVar[str] = ""
    secure = False  # whether the run has secure sums, set by the run

    def __post_init__(self) -> None:
        """Check the settings when the object is made; a subclass calls this method of its base class first."""

    @abstractmethod
    def weigh(self, inputs: RoundInputs) -> Weighing:
        """Return the sites' weights in this round, ``>= 0``, which sum to 1 over ``inputs.sites`` (in each layer)."""

    def move(self, change: State) -> State:
        """Return the change to apply to the model's trained tensors, given the sites' mean change: a server optimizer.

        This is called once a round, after :meth:`weigh`. Values kept between rounds belong into :meth:`state_dict`.

        Args:
            change: mean of the sites' changes with the round's weights (with ``aggregate`` their median), in float64,
                by name. Each access computes a tensor anew from files on disk, so access each tensor only once.

        Returns:
            A change with the same names and shapes; ``change`` itself applies the plain mean.
        """
        return change

    @property
    def weighs(self) -> bool:
        """Return whether reports should make the sites' weights differ; a run warns if the weights never differ."""
        return bool(self.report_fields)

    def check_run(self, num_rounds: int, task: Task | None) -> None:
        """Refuse a run in which the rule would have no effect, or a task with which the rule cannot compute weights.

        Args:
            num_rounds: number of rounds of the run.
            task: the task, without data; ``None`` if the caller does not know the task.

        Raises:
            ValueError: the rule does not suit the run or the task (names the setting).
        """

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        """Return the values sent to sites besides the model; of a ``BySite`` dict a site is sent its own entry only."""
        return {}

    def counted(self, report: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the counts that a site's checked report implies: images by split, and number of ``groups`` of people.

        A report that implies more images, or another number of groups, than the site declared before the first round
        is refused. A count of 0 groups is not compared.
        """
        return {}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        """Return the report after checks that involve more than one field.

        Args:
            report: the report, with every declared field.
            site: name of the site.
            num_steps: number of optimizer steps that the site says it made; ``None`` if the site gives no number.

        Raises:
            ReportError: a check fails (names site, field and value).
        """
        return report


# ------------------------------------------------------------------------------------------------ capabilities


class TwoPhase(Rule):
    """Add a second phase to a rule's rounds, in which sites measure the average of their models (the anchor)."""

    anchor_fields: ClassVar[tuple[Field, ...]] = ()
    weighs: ClassVar[bool] = True

    def asks_about_anchor(self, current_round: int) -> bool:
        """Return whether sites are asked about the anchor (the average of their models) in this round."""
        return True

    @abstractmethod
    def check_anchor_report(self, report: dict[str, Any], site: str, layers: Sequence[str]) -> dict[str, Any]:
        """Return a site's report about the anchor (average model), checked; ``layers``: names of the model's layers."""


class Steps(Rule):
    """Let a rule also determine the length of the step along the sites' mean change.

    Attributes:
        step: factor on the round's mean change, ``>= 0``, set by :meth:`weigh`; ``None`` if the factor is 1.
    """

    only_mean: ClassVar[str] = "it makes a step along the mean"
    step: float | None = None

    def move(self, change: State) -> State:
        step = self.step
        return change if step is None else Made(change, lambda name: change[name].mul_(step))


class SeesModel(Rule):
    """Let a rule inspect the whole model before each round."""

    @abstractmethod
    def begin_round(self, received: State) -> None:
        """Inspect the whole model that the sites will receive in this round.

        Raises:
            ValueError: the rule cannot work with this model.
        """


class MakesTensors(SeesModel):
    """Let a rule compute some of the model's tensors at the server; sites receive these tensors and send none back."""

    only_mean: ClassVar[str] = "the server makes a part of the model itself"
    #: Prefixes of the names of the tensors that the server makes.
    makes: ClassVar[tuple[str, ...]]

    def learn(self, weighing: Weighing) -> None:
        """Compute the server's tensors from ``weighing.means``, the opened sums by class."""

    @abstractmethod
    def made(self) -> dict[str, torch.Tensor]:
        """Return the next model's tensors that the server computed in :meth:`weigh`; empty if they do not change."""


class SendsParts(SeesModel):
    """Let a rule send each site tensors made for this site, not the common model; every site has its own model."""

    only_mean: ClassVar[str] = "every site gets a model of its own"
    reads_models: ClassVar[str] = "every site gets a model of its own, made of the others' updates"
    weighs: ClassVar[bool] = False  # sites differ in the tensors that they are sent, not in their weights

    @abstractmethod
    def each(self, state: State) -> Callable[[str], State]:
        """Return a function from a site's name to the tensors that the site is sent in place of the model ``state``.

        The function returns the same tensors at every call, from any thread. It is called when the message to the site
        is made, so that the server has few results in memory at a time; see :mod:`fairflare.methods.parts.downloads`.
        """


class SumOfKept(Rule):
    """Let a rule keep the sum of one value per site, which the site stores and renews in each training.

    If a site's answer is lost after its training, the site has renewed its value, but the sum lacks the change. The
    server therefore tells each site its last round that counted, and the site goes on from its value of that round; see
    :func:`fairflare.methods.base.home.fitting`.
    """

    directive_docs: ClassVar[dict[str, str]] = {
        COUNTED: "the site's last round that counted, and which share of its update"
    }

    _counted = Saved(dict[str, list[float]])  # round and share, by site seen so far; -1: no round counted

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        return {COUNTED: BySite({site: self._counted.get(site, [-1, 1.0]) for site in sites})}

    def count(self, inputs: RoundInputs, shares: Mapping[str, float]) -> tuple[float, float]:
        """Count a round; return, as shares of all sites seen so far, the sites known before it and the sites in it.

        In the mean over all sites, the value of a new site is 0.

        Args:
            inputs: the round's inputs.
            shares: by site, the share in [0, 1] of its value's change that counts; 1 for a site without an entry.
        """
        known, asked = len(self._counted), {site: [-1, 1.0] for site in (*inputs.asked, *inputs.sites)}
        counted = {site: [inputs.current_round, shares.get(site, 1.0)] for site in inputs.sites}
        self._counted = {**asked, **self._counted, **counted}
        return known / len(self._counted), len(inputs.sites) / len(self._counted)


class SendsBeside(Rule):
    """Let a rule send all sites tensors of its own beside the model that they train."""

    #: Description of these tensors, and what they reveal about other sites; for ``fairflare privacy``.
    beside_doc: ClassVar[str]
    weighs: ClassVar[bool] = False  # the reports serve these tensors, not the weights

    @abstractmethod
    def beside(self) -> State:
        """Return the tensors, by name, that each site is sent with this round's model; empty for none."""


@runtime_checkable
class FollowsNumRounds(Protocol):
    """Describe rules, trainings and parts whose behaviour in a round depends on the run's number of rounds."""

    def follows_num_rounds(self) -> list[str]:
        """Return the settings whose effect depends on the number of rounds; a run cannot resume with another number."""


def anchor_fields(rule: type[Rule]) -> tuple[Field, ...]:
    """Return the fields that sites report about the anchor, the average of their models; empty for most rules."""
    return rule.anchor_fields if issubclass(rule, TwoPhase) else ()


def read_reports(inputs: RoundInputs, name: str) -> dict[str, Any]:
    """Return the value of the reports' field ``name`` by site of the round."""
    return {site: inputs.reports[site][name] for site in inputs.sites}


def sample_weights(inputs: RoundInputs) -> SiteWeights:
    """Return each site's share n_k / sum n of the training samples of the round's sites."""
    return normalise({site: float(inputs.num_samples[site]) for site in inputs.sites})
