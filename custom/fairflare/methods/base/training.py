"""Define the site half of a method: its settings, its hooks, and the criterion that it trains with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.aspect import FINETUNING, NORMS, refusals
from fairflare.base.checks import refuse, true_texts
from fairflare.base.machine.computing import Precision
from fairflare.base.settings import BelowOne, Flag, NonNegative, Positive, PositiveInt, field_names, settings
from fairflare.core import losses
from fairflare.core.features.parts import names_in
from fairflare.exchange.sent_tensors import check_exchange
from fairflare.methods.base.home import KEEP, Home, choose_tuned_part
from fairflare.methods.base.local_loop import LocalLoop, Trained
from fairflare.methods.base.site_run import NotFinite as NotFinite
from fairflare.methods.base.site_run import SiteError as SiteError
from fairflare.methods.base.site_run import SiteRun as SiteRun
from fairflare.methods.base.site_run import SiteStore as SiteStore
from fairflare.methods.base.site_run import refuse_at as refuse_at

if TYPE_CHECKING:
    from fairflare.base.task import Task


@settings
class LocalTraining:
    """Train E epochs over the site's training images: FedAvg's site half, and base class of all other site halves.

    A subclass overrides some of twelve hooks: :attr:`acts`, :attr:`home` and the methods. The loop that calls them is
    :class:`fairflare.methods.base.local_loop.LocalLoop`.

    Args:
        optimizer: ``"adam"`` (L2 weight decay, as the papers), ``"adamw"`` or ``"sgd"``; ``"task"``: a MONAI bundle's
            own, of which only the learning rate is set here.
        learning_rate: step size of the optimizer.
        weight_decay: weight decay of the optimizer.
        betas: decay rates of Adam's moments.
        momentum: momentum of SGD, with Nesterov's form when > 0.
        batch_size: images in a batch.
        local_epochs: passes over the training images in a round.
        local_steps: number of optimizer steps in a round, the same at every site, in place of ``local_epochs`` (which
            then stays 1): passes in new orders, the last one cut short; ``None`` for whole passes.
        keep_optimizer_state: keep the optimizer's moments between rounds (Fed-LWR's code), or use a new optimizer.
        max_grad_norm: gradients are clipped to this global norm; ``None`` for no clipping.
        augment: use the task's training augmentation.
        criterion: ``"task"`` (the task's own loss), or for classification with the site's class counts
            ``"logit_adjusted"``, ``"balanced_softmax"`` or ``"fedlc"``.
        prior_strength: tau of logit adjustment and FedLC; ``None`` for the papers' 1 and 0.5.
        schedule: learning rate over the rounds: ``"constant"``; ``"cosine"``, down to ``lowest_rate`` in the last one;
            or ``"poly"``, nnU-Net's, which falls with every step; see
            :func:`fairflare.methods.base.local_loop.rate`.
        lowest_rate: last rate of the cosine, ``> 0`` and at most ``learning_rate``; ``None`` for a thousandth of it.
        norm_statistics: running means, variances and counters of batch norms: ``"average"`` over the sites (the
            papers); ``"recalibrated"``: measured again after each aggregation, with the new model over all sites'
            training images; or ``"site"``: each site has its own, which never leave it. Scale and shift of the
            norms are shared in any case. See ``docs/norm_statistics.md``.
        personalise: models of the sites' own: ``"finetune"``, also ``finetune:head`` (the same), ``finetune:norms`` or
            ``finetune:all``: after the method's rounds each site trains this part of the common
            model further; ``"keep:REGEX"``: tensors whose names the expression finds stay at the site in all rounds
            (FedPer). Empty: none. See ``docs/personal_models.md``.
        unlabelled: ``"consistency"``: learn from the site's list ``unlabelled`` too: segmentation by a mean teacher,
            classification by FixMatch; also at sites without any label. Empty: do not. See ``docs/unlabelled.md``.
        precision: precision of training and evaluation: ``"fp32"``, or mixed (``torch.autocast``): ``"bf16"`` or
            ``"fp16"`` (with a scaled loss). Weights, updates, losses stay float32. A site's file overrides the job.
        channels_last: store images and kernels with the channels last in memory, faster for most convolutions.
        compile: use ``torch.compile`` for the network, which takes minutes at first.
        deterministic: on a GPU use only operations that give the same bits every time, which are slower; a network with
            an operation that has no such form is refused by name. On a CPU results have the same bits in any case.

    Source:
        Defaults: Yan et al., MICCAI 2024, section 3.1 and the authors' code (betas, moments kept).
    """

    #: Settings that only have an effect with some values of another setting; see :mod:`fairflare.base.acting`.
    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "weight_decay": only_with("optimizer", "adam", "adamw", "sgd"),
        "betas": only_with("optimizer", "adam", "adamw"),
        "momentum": only_with("optimizer", "sgd"),
        "prior_strength": only_with("criterion", "logit_adjusted", "fedlc"),
        "lowest_rate": only_with("schedule", "cosine"),
        "norm_statistics": only_with("a batch norm with running statistics", fact=True),
        "unlabelled": only_with("a site with images that lack labels, or the labels of some structures", fact=True),
        "channels_last": only_with("a convolution in the network", fact=True),
    }

    optimizer: Literal["adam", "adamw", "sgd", "task"] = "adam"
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 1e-4
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    momentum: BelowOne = 0.9
    batch_size: PositiveInt = 8
    local_epochs: PositiveInt = 1
    local_steps: PositiveInt | None = None
    keep_optimizer_state: Flag = True
    max_grad_norm: Positive | None = None
    augment: Flag = False
    criterion: Literal["task", "logit_adjusted", "balanced_softmax", "fedlc"] = "task"
    prior_strength: NonNegative | None = None
    schedule: Literal["constant", "cosine", "poly"] = "constant"
    lowest_rate: Positive | None = None
    norm_statistics: Literal["average", "recalibrated", "site"] = "average"
    personalise: Annotated[str, Field(pattern=r"^(finetune(:(head|norms|all))?|keep:.*)?$")] = ""
    unlabelled: Literal["", "consistency"] = ""
    precision: Precision = "fp32"
    channels_last: Flag = False
    compile: Flag = False
    deterministic: Flag = False

    def __post_init__(self) -> None:
        if self.personalise.startswith(KEEP):
            check_exchange(self.personalise.removeprefix(KEEP), "personalise=keep: needs")
        low, home = self.lowest_rate, self.home
        own_parts = bool(home.model or home.named) or self.norm_statistics == "site"
        facts = {**vars(self), "training": type(self).__name__, "own_tensors": home.named, "own_parts": own_parts}
        refuse({
            f"lowest_rate must be at most learning_rate={self.learning_rate!r}, got {low!r}": (
                self.schedule == "cosine" and low is not None and low > self.learning_rate
            ),
            f"local_steps={self.local_steps!r} and local_epochs={self.local_epochs!r} exclude each other: take one "
            "of them out": self.local_steps is not None and self.local_epochs != 1,
            **dict.fromkeys(refusals(facts, [NORMS, FINETUNING]), True),
        })  # fmt: skip

    @property
    def home(self) -> Home:
        """Return the :class:`Home` object, which defines and stores the part of the model that stays at the site."""
        return Home(self)

    # -- before the first round

    def check_task(self, task: Task) -> None:
        """Refuse a task that the method's training cannot learn, as far as that is known without data.

        Raises:
            ValueError: a setting does not suit the task (names the setting).
        """
        refuse({
            f"criterion={self.criterion!r} needs classes; set criterion to 'task'": (
                self.criterion != "task" and task.has_classes is False
            ),
            "optimizer='task' needs a MONAI bundle's; set optimizer to 'adam', 'adamw' or 'sgd'": (
                self.optimizer == "task" and not task.has_optimizer
            ),
        })  # fmt: skip

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        """Check, without training, that the site's data and the network have what :meth:`train` needs.

        Returns:
            Further facts for the server: fields of :data:`fairflare.federation.server.check.FIELDS`.

        Raises:
            SiteError: the data or the network lack something that the training needs.
        """
        if self.criterion != "task":
            class_counts(self, run)
        part = choose_tuned_part(self.personalise)
        refuse_at(run.site, {
            f"the network has nothing to train in its {part}, as personalise={self.personalise!r} asks; choose another "
            "part, such as finetune:all": part and not names_in(model, part),
        })  # fmt: skip
        return {}

    def follows_num_rounds(self) -> list[str]:
        """Return the settings whose effect depends on the number of rounds; a run cannot resume with another number."""
        return true_texts({"schedule": self.schedule != "constant", "unlabelled": self.unlabelled})

    # -- in a round

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        """Inspect the received model before training; data for later hooks are stored in ``run.own``."""

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of one batch that is minimised: the criterion, unless a method adds terms."""
        return criterion_loss(self, run, model(inputs), targets)

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Make one optimizer step; ``closure`` zeroes gradients, backpropagates, clips gradients, returns the loss."""
        loss = closure()
        optimizer.step()
        return loss

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        """Train ``model`` in place; see :meth:`fairflare.methods.base.local_loop.LocalLoop.train`."""
        return LocalLoop(self, run, model).train()

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        """Return the site's report after training: the fields that the method's rule declares."""
        return {}

    def made_of(self, name: str) -> tuple[str, ...] | None:
        """Return the splits from which the report's value ``name`` is computed; ``None``: those named by its field."""
        return None

    def sends(self, names: Iterable[str]) -> list[str]:
        """Return the names of the model's tensors whose updates are sent to the server."""
        return list(names)


# ------------------------------------------------------------------------------------------------ the criterion


def criterion_loss(training: LocalTraining, run: SiteRun, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over a batch of the task's loss, or of the chosen loss for imbalanced classes."""
    if training.criterion == "task":
        return run.task.loss(outputs, targets)
    return criterion_losses(training, run, outputs, targets).mean()


def criterion_losses(
    training: LocalTraining, run: SiteRun, outputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the criterion's loss of each sample in a batch, (n,).

    Raises:
        SiteError: the site's data have no classes to count.
    """
    if training.criterion == "task":
        return run.task_on("training").sample_losses(outputs, targets)
    counts, outputs = class_counts(training, run), run.task.chosen(outputs)
    if training.criterion == "balanced_softmax":
        return losses.balanced_softmax(outputs, targets, counts, reduction="none")
    strength = {} if training.prior_strength is None else {"tau": training.prior_strength}
    by_name = losses.logit_adjusted_cross_entropy if training.criterion == "logit_adjusted" else losses.fedlc_loss
    return by_name(outputs, targets, counts, reduction="none", **strength)


def class_counts(training: LocalTraining, run: SiteRun, needs: str = "") -> torch.Tensor:
    """Return the number of training samples of each class; ``needs`` begins the error message ("LDAM's margins need").

    Raises:
        SiteError: the site's data have no classes to count.
    """
    counts = run.data.class_counts("training")
    if counts is None:
        needed = f"{needs or f'criterion {training.criterion!r} needs'} classes, which the task's data do not have"
        remedy = "" if needs else "set criterion to 'task' or "
        raise SiteError(f"site {run.site!r}: {needed}; {remedy}choose a classification task")
    return counts


def pick_settings(training: LocalTraining) -> dict[str, Any]:
    """Return those settings of a site half that every site half has, by name."""
    return {name: getattr(training, name) for name in field_names(LocalTraining)}


def check_parts(run: SiteRun, model: torch.nn.Module, parts: Sequence[str], problem: str) -> None:
    """Refuse a network that lacks one of the modules or methods that a method calls.

    Raises:
        SiteError: a part is missing (the text is ``problem``).
    """
    refuse_at(run.site, {problem: any(getattr(model, part, None) is None for part in parts)})
