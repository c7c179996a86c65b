"""What every method is made of: a server half (an aggregator) and a site half (a local-training rule).

The halves are chosen separately in the job's configuration, so a paper's ablation is a configuration. A method's file
subclasses :class:`FairAggregator`, :class:`LocalTraining`, or both, and lists what it offers in ``METHODS``.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fairflare.core import losses
from fairflare.core.layers import layers_of
from fairflare.core.states import add_update, check_state, layerwise_average, weighted_average
from fairflare.core.weighting import normalise
from fairflare.exchange.staging import Staging
from fairflare.exchange.wire import META_KEY, STATUS_OK, clean_state, meta_of

if TYPE_CHECKING:
    from fairflare.tasks.base import SiteData, Task

log = logging.getLogger(__name__)
State = Mapping[str, torch.Tensor]
SiteWeights = dict[str, float]
LayerWeights = dict[str, dict[str, float]]  # layer -> site -> weight
MAX_SAMPLES = 10**9  # a site that claims more is not believed
MAX_TEXT = 200


class ReportError(ValueError):
    """A site's message cannot be used; the text names the site, the field and the value."""


class SiteError(RuntimeError):
    """A task cannot be done at a site.

    Args:
        message: for this site's own log; may name files.
        public: what the server may know: no file name, path or identifier.
        skipped: an expected refusal (too little data), not a failure.
    """

    def __init__(self, message: str, *, public: str | None = None, skipped: bool = False) -> None:
        super().__init__(message)
        self.public = public or message
        self.skipped = skipped


# ------------------------------------------------------------------------------------------------ reports


@dataclass(frozen=True)
class Field:
    """One declared value of a report.

    Args:
        name: key in the report.
        kind: ``"number"``, ``"text"`` (at most 200 characters), ``"vector"`` (list of numbers) or ``"names"`` (list of
            strings).
        low, high: closed range of each number.
        nan_ok: NaN is a legal value with a meaning that the method defines ("undefined here").
        infinite_ok: so are the infinities; they are read as NaN.
        same_length_as: a vector or list of names with as many entries as this other field.
        required: a report without it is refused.
    """

    name: str
    kind: Literal["number", "text", "vector", "names"] = "number"
    low: float = -math.inf
    high: float = math.inf
    nan_ok: bool = False
    infinite_ok: bool = False
    same_length_as: str | None = None
    required: bool = True

    def read(self, report: Mapping[str, Any], site: str) -> Any:
        """The checked value, ``None`` when it is optional and absent.

        Raises:
            ReportError: missing, of another type, out of range (names site, field and value).
        """
        if self.name not in report or report[self.name] is None:
            if self.required:
                raise ReportError(f"site {site!r}: the report lacks the field {self.name!r}")
            return None
        value = report[self.name]
        if self.kind == "number":
            return self._number(value, site, self.name)
        if self.kind == "text":
            if not isinstance(value, str) or len(value) > MAX_TEXT:
                raise ReportError(f"site {site!r}: field {self.name!r} must be a text, got {value!r:.80}")
            return value
        if not isinstance(value, (list, tuple)):
            raise ReportError(f"site {site!r}: field {self.name!r} must be a list, got {type(value).__name__}")
        if self.kind == "names":
            for entry in value:
                if not isinstance(entry, str):
                    raise ReportError(f"site {site!r}: field {self.name!r} must list names, got {entry!r}")
            checked: list[Any] = list(value)
        else:
            checked = [self._number(v, site, f"{self.name}[{i}]") for i, v in enumerate(value)]
        if self.same_length_as is not None:
            wanted = len(report.get(self.same_length_as) or ())
            if len(checked) != wanted:
                raise ReportError(
                    f"site {site!r}: field {self.name!r} has {len(checked)} entries, "
                    f"field {self.same_length_as!r} has {wanted}"
                )
        return checked

    def _number(self, value: Any, site: str, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ReportError(f"site {site!r}: field {where!r} must be a number, got {value!r}")
        number = float(value)
        if math.isnan(number) and self.nan_ok:
            return number
        if math.isinf(number) and self.infinite_ok:
            return math.nan
        if not math.isfinite(number):
            raise ReportError(f"site {site!r}: field {where!r} must be finite, got {number}")
        if not self.low <= number <= self.high:
            raise ReportError(
                f"site {site!r}: field {where!r} must lie in [{self.low:g}, {self.high:g}], got {number!r}"
            )
        return number


def read_report(report: Any, fields: Iterable[Field], site: str) -> dict[str, Any]:
    """The declared fields of a report, checked. Undeclared ones are ignored.

    Raises:
        ReportError: as :meth:`Field.read`, or the report is no dict.
    """
    fields = tuple(fields)
    if not isinstance(report, Mapping):
        if not any(f.required for f in fields):
            return {}
        raise ReportError(f"site {site!r}: the message carries no report")
    return {f.name: f.read(report, site) for f in fields}


# ------------------------------------------------------------------------------------------------ server half


@dataclass
class RoundInputs:
    """What a method sees when it weighs: everything by site name, sites sorted.

    ``states`` are lazy: a tensor is read from disk when it is asked for. They are full local models under
    FairFlare's controller, and whatever the sites sent (updates or models) under FLARE's stock controllers.
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


@dataclass
class Weighing:
    """A method's decision: a weight for each site, or for each layer and site; and what to record of it.

    Args:
        sites: weight by site, or
        layers: weight by layer and site.
        record: values by layer and site.
        reports: values by site; default: the numbers of the sites' reports.
        values: of the round as a whole.
        details: more of it for the results file, JSON-like (for instance what a picture needs).
    """

    sites: SiteWeights | None = None
    layers: LayerWeights | None = None
    record: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    reports: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class FairAggregator(ModelAggregator):
    """Server half of a method: collects and checks what sites send, weighs it, and sums once.

    Subclasses say what a site must report (``report_fields``, and ``anchor_fields`` for a two-phase method), and
    implement :meth:`weigh`. Constructor arguments are kept under attributes of the same name: FLARE's job export reads
    them back. A result that cannot be used is recorded in ``rejected``, never raised: FLARE would drop the site
    silently. :meth:`aggregate_model` raises below ``min_sites``.

    Single-phase methods also work under FLARE's stock ``FedAvg`` controller.
    """

    report_fields: ClassVar[tuple[Field, ...]] = ()
    anchor_fields: ClassVar[tuple[Field, ...]] = ()
    two_phase: ClassVar[bool] = False

    def __init__(self, min_sites: int = 1) -> None:
        super().__init__()
        if not isinstance(min_sites, int) or isinstance(min_sites, bool) or min_sites < 1:
            raise ValueError(f"min_sites must be an integer >= 1, got {min_sites!r}")
        self.min_sites = min_sites
        self.memory_folder: Path | None = None  # for what is too large for state_dict; the controller's to set
        self._round = 0
        self._num_rounds = 1
        self._asked: list[str] = []
        self._like: State | None = None
        self._staging: Staging | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._as_numpy = False
        self._params_type: str | None = None
        self._clear()

    # -- what a method implements

    def weigh(self, inputs: RoundInputs) -> Weighing:
        """Weights of this round; each set must be >= 0 and sum to 1 over ``inputs.sites``."""
        raise TypeError(f"{type(self).__name__} does not implement weigh()")

    def directives(self, current_round: int, num_rounds: int) -> dict[str, Any]:
        """What the sites are told besides the model."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What outlives a round: plain values and tensors, saved with the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, the checkpoint has {sorted(state)}")

    # -- what the controller calls

    def begin_round(
        self,
        current_round: int,
        num_rounds: int,
        *,
        global_state: State | None,
        folder: Path | None,
        sites: Sequence[str] = (),
    ) -> None:
        """Starts a round.

        Args:
            current_round, num_rounds: from 0; total.
            global_state: the model the sites received; updates are added to it. ``None``: unknown (stock controllers).
            folder: where local models wait; ``None``: a temporary folder.
            sites: that are asked.
        """
        self.reset_stats()
        self._asked = sorted(sites)
        self._round, self._num_rounds = current_round, num_rounds
        self._like = global_state
        if folder is not None:
            self._staging = Staging(folder)
            self._staging.clear()

    def reset_stats(self) -> None:
        """Forgets the round's contributions (not the method's own state)."""
        if self._staging is not None:
            self._staging.clear()
        self._clear()

    def _clear(self) -> None:
        self.accepted: list[str] = []
        self.rejected: dict[str, str] = {}
        self.last_weighing: Weighing | None = None
        self._samples: dict[str, int] = {}
        self._reports: dict[str, dict[str, Any]] = {}
        self._anchor_reports: dict[str, dict[str, Any]] = {}

    def accept_model(self, model: FLModel) -> None:
        """Takes one site's result of ``train``, or records in ``rejected`` why not."""
        site = str((model.meta or {}).get("client_name") or meta_of(model).get("site") or "")
        try:
            if not site:
                raise ReportError("a result without a site name (meta 'client_name')")
            self._take(site, model)
        except Exception as e:
            # Anything wrong with one site's message must cost that site its round, not the job.
            self.rejected[site or "?"] = str(e)
            if self._like is None:  # our controller says so itself, with the phase
                log.warning("left out: %s", e)
            return
        self.rejected.pop(site, None)

    def _take(self, site: str, model: FLModel) -> None:
        meta = meta_of(model)
        if meta.get("status", STATUS_OK) != STATUS_OK:
            raise ReportError(str(meta.get("reason") or meta["status"]))
        if site in self.accepted:
            raise ReportError(f"site {site!r} answered twice in round {self._round}")
        if not model.params:
            raise ReportError(f"site {site!r} sent no model")
        if model.current_round is not None and self._like is not None and model.current_round != self._round:
            raise ReportError(f"site {site!r} answered for round {model.current_round}, asked for round {self._round}")
        report = self.check_report(read_report(meta.get("report"), self.report_fields, site), site)
        samples = Field("num_samples", low=1, high=MAX_SAMPLES, required=False).read(meta, site)
        self._as_numpy = not any(isinstance(v, torch.Tensor) for v in model.params.values())
        state = clean_state(model.params)
        if self._like is not None:
            if model.params_type == ParamsType.DIFF:
                state = add_update(self._like, state, site)
            check_state(state, self._like, site)
        else:
            kind = str(getattr(model.params_type, "value", model.params_type))
            if self._params_type not in (None, kind) and self.accepted:
                raise ReportError(f"site {site!r} sent params of type {kind}, others {self._params_type}")
            self._params_type = kind
            if model.current_round is not None:
                self._round = int(model.current_round)
            if self.accepted:
                check_state(state, self._stage().open(self.accepted[0]), site)
            else:
                check_state(state, state, site)
        self._stage().put(site, state)
        self.accepted = sorted([*self.accepted, site])
        self._reports[site] = report
        # Without a declared count every site counts the same.
        self._samples[site] = int(samples) if samples is not None else 1

    def accept_anchor(self, model: FLModel) -> None:
        """Takes one site's report about the anchor, or records why not; the site's model stays in the round."""
        site = str((model.meta or {}).get("client_name") or "")
        try:
            if site not in self.accepted:
                raise ReportError(f"site {site!r} reports about the anchor without a model in this round")
            meta = meta_of(model)
            if meta.get("status", STATUS_OK) != STATUS_OK:
                raise ReportError(str(meta.get("reason") or meta["status"]))
            self._anchor_reports[site] = self.check_anchor_report(
                read_report(meta.get("report"), self.anchor_fields, site), site
            )
        except Exception as e:
            self.rejected[site or "?"] = str(e)
            return
        self.rejected.pop(site, None)

    def check_report(self, report: dict[str, Any], site: str) -> dict[str, Any]:
        """Checks that no single field can do."""
        return report

    def check_anchor_report(self, report: dict[str, Any], site: str) -> dict[str, Any]:
        """Checks that no single field can do (for instance: the layers are the model's)."""
        return report

    def anchor_model(self) -> dict[str, torch.Tensor]:
        """The plain mean of the round's local models (Fed-LWR, Eq. 1): uniform, not by sample counts."""
        self.require_quorum()
        share = 1.0 / len(self.accepted)
        return weighted_average(self._staged(), dict.fromkeys(self.accepted, share))

    def require_quorum(self) -> None:
        """Raises ``RuntimeError`` with every site's reason when fewer than ``min_sites`` results are usable."""
        if len(self.accepted) < self.min_sites:
            reasons = "; ".join(f"{site}: {why}" for site, why in sorted(self.rejected.items())) or "no answer"
            raise RuntimeError(
                f"{type(self).__name__}, round {self._round}: {len(self.accepted)} usable result(s) of "
                f"min_sites={self.min_sites} ({reasons})"
            )

    def aggregate_model(self) -> FLModel:
        """The next global model (or the aggregated update, under a stock controller with updates).

        Raises:
            RuntimeError: fewer than ``min_sites`` usable results (gives the reasons).
        """
        self.require_quorum()
        if self.two_phase and self._like is None:
            raise RuntimeError(
                f"{type(self).__name__} asks the sites twice a round; run it with "
                "fairflare.flare.controller.RoundsController instead of a stock controller"
            )
        states = self._staged()
        names = list(states[self.accepted[0]])
        inputs = RoundInputs(
            current_round=self._round,
            num_rounds=self._num_rounds,
            sites=list(self.accepted),
            num_samples=dict(self._samples),
            reports=self._reports,
            anchor_reports=self._anchor_reports,
            states=states,
            owner=tensor_owners(names),
            asked=self._asked or list(self.accepted),
            received=self._like,
        )
        weighing = self.weigh(inputs)
        if not weighing.reports:
            numbers = {site: _numbers(report) for site, report in inputs.reports.items()}
            weighing.reports = {site: found for site, found in numbers.items() if found}
        self.last_weighing = weighing
        if weighing.sites is not None:
            shown = ", ".join(f"{site} {weight:.4f}" for site, weight in sorted(weighing.sites.items()))
            log.info("round %d, weights: %s", self._round, shown)
        is_update = self._like is None and self._params_type == ParamsType.DIFF.value
        if weighing.layers is not None:
            state = layerwise_average(states, weighing.layers, inputs.owner, updates=is_update)
        elif weighing.sites is not None:
            state = weighted_average(states, weighing.sites, updates=is_update)
        else:
            raise RuntimeError(f"{type(self).__name__}.weigh() gave neither site nor layer weights")
        params: dict[str, Any] = {k: v.numpy() for k, v in state.items()} if self._as_numpy else state
        return FLModel(
            params=params,
            params_type=ParamsType.DIFF if is_update else ParamsType.FULL,
            current_round=self._round,
            meta={META_KEY: {"sites": list(self.accepted), "rejected": dict(self.rejected)}},
        )

    def _staged(self) -> dict[str, State]:
        return {site: self._stage().open(site) for site in self.accepted}

    def _stage(self) -> Staging:
        if self._staging is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fairflare-staging-")
            self._staging = Staging(Path(self._temporary.name))
        return self._staging


def tensor_owners(names: Iterable[str]) -> dict[str, str]:
    """``{tensor name: layer name}``; see :func:`fairflare.core.layers.layer_of`."""
    return layers_of(names)


def _numbers(report: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in report.items() if isinstance(value, float)}


def sample_weights(inputs: RoundInputs) -> SiteWeights:
    """n_k / sum n over the round's sites."""
    return normalise({site: float(inputs.num_samples[site]) for site in inputs.sites})


# ------------------------------------------------------------------------------------------------ site half


class StateStore(Protocol):
    """What a site keeps between tasks; see :class:`fairflare.flare.site.SiteStore`."""

    def save(self, name: str, current_round: int, value: Mapping[str, Any]) -> None: ...

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None: ...


@dataclass
class SiteRun:
    """One task at one site, as a site half sees it."""

    site: str
    task: Task
    data: SiteData
    device: torch.device
    current_round: int
    num_rounds: int
    seed: int  # of this experiment, site and round
    directives: Mapping[str, Any]
    store: StateStore
    scratch: Path
    should_stop: Callable[[], bool] = lambda: False
    settings: Mapping[str, Any] = field(default_factory=dict)  # the site's private file
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the received model, on the validation split
    # While training: epoch from 0, and which training samples the batch holds (None: the data do not say).
    epoch: int = 0
    batch: list[int] | None = None


@dataclass
class Trained:
    """What :meth:`LocalTraining.train` leaves besides the trained model."""

    train_loss: float  # mean over the samples of the last epoch, measured while training
    epoch_losses: list[float]
    num_steps: int
    num_samples: int


_OPTIMIZERS = ("adam", "adamw", "sgd")
CRITERIA = ("task", "logit_adjusted", "balanced_softmax", "fedlc")
SCHEDULES = ("constant", "cosine")


class LocalTraining:
    """Site half of FedAvg, and the frame of every other: E epochs over the site's training images.

    Args:
        optimizer: ``"adam"`` (L2 weight decay, as the papers), ``"adamw"`` or ``"sgd"``.
        learning_rate: > 0.
        weight_decay: >= 0.
        betas: of Adam.
        momentum: of SGD, with Nesterov's form when > 0.
        batch_size, local_epochs: >= 1.
        keep_optimizer_state: moments stay at the site between rounds (Fed-LWR's code); else a new optimizer a round.
        max_grad_norm: gradients are clipped to this global norm; ``None``: not.
        augment: use the task's training augmentation.
        criterion: ``"task"`` (the task's own loss), or for classification with the site's class counts
            ``"logit_adjusted"``, ``"balanced_softmax"`` or ``"fedlc"``.
        prior_strength: tau of logit adjustment and FedLC; ``None``: the papers' 1 and 0.5.
        schedule: of the learning rate over the rounds: ``"constant"``, or ``"cosine"`` down to 0 after the last one.

    Source:
        Defaults: Yan et al., MICCAI 2024, section 3.1 and the authors' code (betas, moments kept).
    """

    def __init__(
        self,
        optimizer: str = "adam",
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        momentum: float = 0.9,
        batch_size: int = 8,
        local_epochs: int = 1,
        keep_optimizer_state: bool = True,
        max_grad_norm: float | None = None,
        augment: bool = False,
        criterion: str = "task",
        prior_strength: float | None = None,
        schedule: str = "constant",
    ) -> None:
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {_OPTIMIZERS}, got {optimizer!r}")
        if not learning_rate > 0:
            raise ValueError(f"learning_rate must be > 0, got {learning_rate!r}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {weight_decay!r}")
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum!r}")
        for name, value in (("batch_size", batch_size), ("local_epochs", local_epochs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be > 0, got {max_grad_norm!r}")
        if criterion not in CRITERIA:
            raise ValueError(f"criterion must be one of {CRITERIA}, got {criterion!r}")
        if prior_strength is not None and not (math.isfinite(prior_strength) and prior_strength >= 0):
            raise ValueError(f"prior_strength must be finite and >= 0, got {prior_strength!r}")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.momentum = momentum
        self.batch_size = batch_size
        self.local_epochs = local_epochs
        self.keep_optimizer_state = keep_optimizer_state
        self.max_grad_norm = max_grad_norm
        self.augment = augment
        self.criterion = criterion
        self.prior_strength = prior_strength
        self.schedule = schedule

    # -- hooks

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        """Called with the received model before training."""

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Objective of one batch: the criterion, unless a method adds terms."""
        return self.criterion_loss(run, model(inputs), targets)

    def criterion_loss(self, run: SiteRun, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The task's loss, or the chosen loss for imbalanced classes; the mean over the batch."""
        if self.criterion == "task":
            return run.task.loss(outputs, targets)
        return self.criterion_losses(run, outputs, targets).mean()

    def criterion_losses(self, run: SiteRun, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The same for each sample, (n,).

        Raises:
            SiteError: the site's data have no classes to count.
        """
        if self.criterion == "task":
            return run.task.sample_losses(outputs, targets)
        counts = run.data.class_counts("training")
        if counts is None:
            raise SiteError(
                f"site {run.site!r}: criterion {self.criterion!r} needs classes, which the task's data do not have; "
                "set criterion to 'task' or choose a classification task"
            )
        if self.criterion == "balanced_softmax":
            return losses.balanced_softmax(outputs, targets, counts, reduction="none")
        strength = {} if self.prior_strength is None else {"tau": self.prior_strength}
        rule = losses.logit_adjusted_cross_entropy if self.criterion == "logit_adjusted" else losses.fedlc_loss
        return rule(outputs, targets, counts, reduction="none", **strength)

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """One optimizer step. ``closure`` zeroes the gradients, backpropagates the loss, clips, returns the loss."""
        loss = closure()
        optimizer.step()
        return loss

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        """What the server half needs, after training: the fields it declares."""
        return {}

    def report_anchor(self, run: SiteRun, local: torch.nn.Module, anchor: torch.nn.Module) -> dict[str, Any]:
        """What a two-phase server half needs to know about the anchor."""
        raise SiteError(
            f"site {run.site!r}: the server asks about an anchor, but {type(self).__name__} has no anchor report; "
            "choose the site half that belongs to the server half"
        )

    # -- the frame

    def rate(self, current_round: int, num_rounds: int) -> float:
        """Learning rate of a round."""
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * current_round / max(num_rounds, 1)))

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer with this rule's settings."""
        params = list(parameters)
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                params,
                lr=self.learning_rate,
                momentum=self.momentum,
                nesterov=self.momentum > 0,
                weight_decay=self.weight_decay,
            )
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        betas = (float(self.betas[0]), float(self.betas[1]))
        return kind(params, lr=self.learning_rate, betas=betas, weight_decay=self.weight_decay)

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        """Trains ``model`` in place, deterministically for a given ``run.seed``.

        Raises:
            SiteError: a loss that is not finite (names site, round, epoch and batch).
        """
        torch.manual_seed(run.seed)
        model.train()
        self.begin_round(run, model)
        optimizer = self.make_optimizer(p for p in model.parameters() if p.requires_grad)
        if self.keep_optimizer_state:
            kept = run.store.load_before("optimizer", run.current_round)
            if kept is not None:
                optimizer.load_state_dict(kept)
        rate = self.rate(run.current_round, run.num_rounds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        num_steps, epoch_losses = 0, []
        num_samples = run.data.num_samples("training")
        for epoch in range(self.local_epochs):
            total, seen = 0.0, 0
            batches = run.data.batches(
                "training",
                batch_size=self.batch_size,
                shuffle_seed=run.seed + epoch,
                augment=self.augment,
            )
            order = run.data.order("training", run.seed + epoch)
            run.epoch = epoch
            for inputs, targets in batches:
                if run.should_stop():
                    raise SiteError(f"site {run.site!r}: the job was stopped", skipped=True)
                run.batch = None if order is None else order[seen : seen + len(inputs)]
                loss = self._one_step(run, model, optimizer, inputs, targets)
                if not math.isfinite(loss):
                    raise SiteError(
                        f"site {run.site!r}: the training loss became {loss} in round {run.current_round}, epoch "
                        f"{epoch}, step {num_steps}; lower learning_rate (now {self.learning_rate:g}), set "
                        "max_grad_norm, or look for extreme values in the images"
                    )
                total += loss * len(inputs)
                seen += len(inputs)
                num_steps += 1
            epoch_losses.append(total / max(seen, 1))
        if self.keep_optimizer_state:
            run.store.save("optimizer", run.current_round, optimizer.state_dict())
        return Trained(epoch_losses[-1], epoch_losses, num_steps, num_samples)

    def _one_step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> float:
        inputs, targets = inputs.to(run.device), targets.to(run.device)

        def closure() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss(run, model, inputs, targets)
            # Backpropagating a NaN would only spread it; the caller stops with a message.
            if torch.isfinite(loss):
                loss.backward()
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            return loss.detach()

        return float(self.step(run, model, optimizer, closure))


# ------------------------------------------------------------------------------------------------ what a file offers


@dataclass(frozen=True)
class Method:
    """One entry of ``fairflare list``: which halves make a method, and with which settings.

    Args:
        name: of the job folder and the command line.
        title: as in the paper.
        summary: one line.
        aggregator, training: the halves.
        server, site: settings of the halves that differ from their defaults.
        source: paper.
        task: the kind of task its job learns unless told otherwise; see ``fairflare.recipes.TASKS``.
        learns: settings of the task that differ from its defaults.
        small: settings of a job that is quick to try; the defaults above are the paper's.
        num_sites, num_rounds: of that job.
    """

    name: str
    title: str
    summary: str
    aggregator: type[FairAggregator]
    training: type[LocalTraining]
    server: Mapping[str, Any] = field(default_factory=dict)
    site: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    task: str = "segmentation"
    learns: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=lambda: {"local_epochs": 5})
    num_sites: int = 6
    num_rounds: int = 3
