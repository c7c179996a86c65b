"""Apply the setting ``privacy`` of a site's own file, which asks for differential privacy: train, refuse, withhold."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fairflare.base.settings import BelowOne, Positive, PositiveInt, settings
from fairflare.core.features.norms import running_statistics
from fairflare.exchange.messages import (
    STATUS_FAILED,
    STATUS_OK,
    TASK_ANCHOR,
    TASK_CHECK,
    TASK_NORMS,
    TASK_TRAIN,
    SiteReply,
    SiteTask,
)
from fairflare.methods.base.local_loop import Trained
from fairflare.methods.base.reports import SUPPRESSED
from fairflare.methods.base.site_run import SiteError, SiteRun
from fairflare.methods.base.training import LocalTraining
from fairflare.privacy.ledger import Ledger, Refused, Spending
from fairflare.privacy.training import PrivateLoop, Units

log = logging.getLogger(__name__)

PRIVACY = "privacy"  # name of the site's setting, and of the fact that a site reports
EPSILON = "epsilon"  # name of the value in the stats of a round
SAYS = "under_dp"  # attribute by which a class says whether its training may be differentially private
#: Facts about a site's lists that are sent: none depends on what is in an image or a label.
PUBLIC = (
    "splits", "images", "suppressed", "min_cases", "synthetic", "device", "class_names", "class_groups", "personal",
    "computing", "group_names",
)  # fmt: skip
#: Attributes that Python gives every class; a class that has others changes something.
PLAIN = {
    "__module__", "__doc__", "__qualname__", "__annotations__", "__firstlineno__", "__static_attributes__",
    "__abstractmethods__", "__annotate_func__", "__annotations_cache__", "__orig_bases__", "__parameters__",
    "_abc_impl",
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
    """

    epsilon: Positive
    delta: BelowOne | None = None
    noise: Positive = 1.0
    clip: Positive = 1.0
    images: PositiveInt = 1


def declares(kind: type) -> bool:
    """Return whether a class declares that it may be trained with differential privacy.

    It may where every term of the loss is of one patient's images or of what is public, as in plain training. What
    a class says holds for itself, and for classes below that change nothing of it.
    """
    for cls in kind.__mro__:
        if SAYS in vars(cls) or cls is LocalTraining:
            return vars(cls).get(SAYS, True) is True
        if not vars(cls).keys() <= PLAIN:
            return False
    return False


#: Values that settings of a training must have, and why.
WANTED: dict[str, tuple[Any, str]] = {
    "criterion": ("task", "class counts have no noise"), "norm_statistics": ("average", "norms would be told"),
    "personalise": ("", "its choice of steps is not counted"), "unlabelled": ("", "it is not counted"),
    "max_grad_norm": (None, "'clip' of the site takes its place"),
}  # fmt: skip


def counted(kind: type) -> bool:
    """Return whether differential privacy can account for a site half: it declares this, and adds no step or report."""
    plain = ("train", "step", "report")
    return declares(kind) and all(getattr(kind, n, None) is getattr(LocalTraining, n) for n in plain)


def misfits(half: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield name, wanted value and reason of each setting that does not work with differential privacy."""
    yield from ((name, *wanted) for name, wanted in WANTED.items() if getattr(half, name, wanted[0]) != wanted[0])


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
        self._public: set[str] = set()  # reasons that may leave

    @classmethod
    def of(cls, site: str, given: Mapping[str, Any]) -> Private | None:
        """Return the differential privacy that a site's file asks for, or ``None`` if it asks for none.

        Raises:
            SiteError: the setting is wrong, or the file does not say where the ledger is.
        """
        if PRIVACY not in given:
            return None
        asked, root = given[PRIVACY], given.get("state_root")
        if not isinstance(asked, Mapping):
            raise SiteError(f"site {site!r}: setting {PRIVACY!r} must be an object with 'epsilon', got {asked!r:.80}")
        try:
            own = PrivacySettings(**asked)
        except ValueError as error:
            raise SiteError(f"site {site!r}: setting {PRIVACY!r}: {error}") from None
        if not isinstance(root, str) or not Path(root).is_absolute():
            problem = f"site {site!r}: {PRIVACY!r} needs 'state_root', a folder that outlives all jobs, for its ledger"
            raise SiteError(problem)
        return cls(site, own, Path(root))

    # -- what is trained

    def check(self, half: Any, run: SiteRun, model: torch.nn.Module) -> None:
        """Refuse a run whose cost in privacy cannot be counted; the message names the setting and the remedy.

        Raises:
            Refused: the training, the task, a setting or the network.
        """
        for problem in self._problems(half, run, model):
            raise self._refused(problem)

    def train(self, half: LocalTraining, request: SiteTask, run: SiteRun, model: torch.nn.Module) -> Trained:
        """Reserve a round in the ledger, then train it.

        Raises:
            Refused: what cannot be counted, a spent budget, or a ledger that cannot be trusted.
        """
        self.check(half, run, model)
        units, own = Units.of(run.data), self.own
        rate, steps = units.plan(half)
        spending = Spending(
            TASK_TRAIN, units.kind, len(units.members), own.noise, rate, steps, own.clip, own.epsilon,
            self._delta(units),
        )  # fmt: skip
        names = {"job": request.run, "experiment": request.experiment, "round": request.current_round}
        try:
            after = self.ledger.reserve(run.data.identities("training"), spending, names)
        except Refused as error:
            self._public.add(error.public)
            raise
        self._after[request.current_round] = after
        log.info("site %s: round %d: epsilon %.4f of %g", self.site, request.current_round, after, own.epsilon)
        return PrivateLoop(half, run, model, own.noise, own.clip, own.images).train(units)

    def _delta(self, units: Units) -> float:
        many = len(units.members)
        if self.own.delta is None:
            return min(1e-5, 0.1 / many)
        if not 0 < self.own.delta < 1 / many:
            raise self._refused(f"delta must lie between 0 and 1 / {many} {units.kind}s; correct it in its own file")
        return self.own.delta

    def _problems(self, half: Any, run: SiteRun, model: torch.nn.Module) -> Iterator[str]:
        kind, task = type(half), run.task
        if not counted(kind):
            yield f"{kind.__name__} does not say that its training can be counted; choose fed_avg or fed_prox"
        if not declares(type(task)):
            yield (
                f"the task {type(task).__name__} does not say that its images do not see each other in the loss; "
                "choose FairFlare's own 2D tasks, without code of the job"
            )
        for name, value, why in misfits(half):
            yield f"{name}={getattr(half, name)!r} cannot go with it ({why}); set it to {value!r}"
        if run.computing.precision == "fp16":
            yield "precision='fp16' scales the loss by what the gradients are; set it to 'bf16' or 'fp32'"
        if odd := running_statistics(model):
            yield (
                f"the network has norms over a batch ({odd[0]!r}); choose one with layer, group or instance "
                "norms: network=vit_s for classes, segresnet or swin_unetr for structures"
            )
        if not run.data.num_samples("training"):
            yield "there is no training image"

    def _refused(self, why: str) -> Refused:
        error = Refused(self.site, why)
        self._public.add(error.public)
        return error

    # -- what may leave

    def refuse_task(self, name: str) -> None:
        """Refuse a task of the server whose answer the privacy ledger does not count.

        Raises:
            Refused: the task is one about images, and no training.
        """
        if name in (TASK_ANCHOR, TASK_NORMS):
            raise self._refused(
                f"answers to {name!r} are not counted in its privacy ledger; choose a method and settings that do not "
                "ask for them"
            )

    def told(self, request: SiteTask, reply: SiteReply, metrics: list[str], unit: str) -> SiteReply:
        """Return a site's reply without the values that are neither counted in the ledger nor public.

        Args:
            request: the server's request.
            reply: the site's answer.
            metrics: names of the task's declared metrics, all of which stay at home.
            unit: whom the guarantee is about.
        """
        if reply.status != STATUS_OK:
            if reply.reason in self._public:
                return SiteReply(reply.status, reason=reply.reason)
            return SiteReply(STATUS_FAILED, reason=f"site {self.site!r}: {request.name} failed; its own log says why")
        stats: dict[str, Any] = {"synthetic": reply.stats["synthetic"]} if "synthetic" in reply.stats else {}
        report: dict[str, Any] = {}
        if request.name == TASK_CHECK:
            report = {name: fact for name, fact in reply.report.items() if name in PUBLIC} | {PRIVACY: self.words(unit)}
        else:
            stats[SUPPRESSED] = sorted(f"metrics/{name}" for name in metrics)
        if request.name == TASK_TRAIN:
            stats[EPSILON] = self._after[request.current_round]
        return replace(reply, metrics={}, report=report, stats=stats)

    def words(self, unit: str) -> str:
        """Return the guarantee of differential privacy in words, for the results."""
        own = self.own
        delta = "at most 1e-05" if own.delta is None else f"{own.delta:g}"
        how = f"DP-SGD, noise {own.noise:g}, clip {own.clip:g}"
        return f"epsilon at most {own.epsilon:g}, delta {delta}, unit {unit}; {how}"
