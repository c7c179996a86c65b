"""Define cRT's site half, which trains only the classifier, on features drawn equally often from each class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from fairflare.base.cases.floor import all_records
from fairflare.base.settings import Flag, Whole, settings
from fairflare.base.task import Proxy, evaluating
from fairflare.core.features.parts import HEAD, only
from fairflare.methods.base.local_loop import Trained
from fairflare.methods.base.training import (
    LocalTraining,
    SiteRun,
    check_parts,
    class_counts,
    criterion_loss,
    pick_settings,
    refuse_at,
)

if TYPE_CHECKING:
    from fairflare.base.task import Batch, SiteData

CLASSIFIER = "head."  # prefix of the names of the classifier's tensors
DIRECTIVE = "classifier_retraining"
NEEDED = (
    "crt_rounds needs a network with embed(images) and a module head(features), as the classification task's; set "
    "crt_rounds=0"
)


def classifier_names(names: Iterable[str]) -> list[str]:
    """Return those names of a model's tensors that belong to the classifier, which cRT trains."""
    return [name for name in names if name.startswith(CLASSIFIER)]


def draw_balanced(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw n of n samples with replacement, such that all classes that occur are equally likely.

    Args:
        targets: (n,), the class of each sample.
        generator: source of random numbers, on the CPU.

    Returns:
        (n,), indices of the drawn samples.
    """
    share = 1.0 / torch.bincount(targets).double()[targets]
    return torch.multinomial(share, len(targets), replacement=True, generator=generator)


class _Features(Proxy):
    """Provide a site's data with encoder features in place of images, drawn equally by class anew in each epoch.

    Without augmentation the encoder is run on the images only once.
    """

    def __init__(self, data: SiteData, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(data)
        self._model, self._device = model, device
        self._looked: Batch | None = None

    def order(self, split: str, shuffle_seed: int | None = None) -> None:
        """Return ``None``, as samples drawn with replacement have no order."""

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int, augment: bool) -> Iterator[Batch]:
        """Yield batches of features and classes, drawn equally by class."""
        if self._looked is None or augment:
            encode = cast("Callable[[torch.Tensor], torch.Tensor]", self._model.embed)
            images = self._inner.batches(split, batch_size=batch_size, shuffle_seed=shuffle_seed, augment=augment)
            with evaluating(self._model):
                pairs = [(encode(inputs.to(self._device)).cpu(), targets) for inputs, targets in images]
            self._looked = torch.cat([part for part, _ in pairs]), torch.cat([part for _, part in pairs])
        features, classes = self._looked
        for chosen in draw_balanced(classes, torch.Generator().manual_seed(shuffle_seed)).split(batch_size):
            yield features[chosen], classes[chosen]


@settings
class ClassifierRetraining(LocalTraining):
    """Train only the classifier, with cross-entropy on samples drawn equally by class (cRT).

    The rest of the network runs in evaluation mode and without gradient, so its parameters and its batch norms'
    statistics do not change by a bit. An epoch is n_k draws. The encoder sees each image once per epoch (without
    ``augment`` once per round), so an image that is drawn several times has the same augmentation each time.

    Args:
        mask_absent: the classifier's rows of classes without a training image at the site stay as they are; their
            gradients could only push them away.
        first: the classifier begins anew, from ``seed``: the same at all sites.
        seed: see there.
    """

    mask_absent: Flag = True
    first: Flag = False
    seed: Whole = 0

    @classmethod
    def choose(cls, training: LocalTraining, directives: Mapping[str, Any]) -> LocalTraining:
        """Return the site half that trains in this round: ``training``, or cRT's if the server's directives ask for it.

        cRT's site half takes its settings from ``training`` (such as the optimizer, the batch size and the learning
        rate), but has no learning rate schedule, a new optimizer in each round, the task's loss, and no unlabelled
        images.
        """
        directive = directives.get(DIRECTIVE)
        if directive is None:
            return training
        plain = {"criterion": "task", "schedule": "constant", "lowest_rate": None, "keep_optimizer_state": False}
        return cls(**{**pick_settings(training), **plain, "unlabelled": "", **dict(directive)})

    def sends(self, names: Iterable[str]) -> list[str]:
        return classifier_names(names)

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        """Check that the network has the parts that are called, and the site classes to draw; nothing is reported."""
        check_parts(run, model, ("embed", "head"), NEEDED)
        self.begin_round(run, copy.deepcopy(model))
        return {}

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        check_parts(run, model, ("embed", "head"), NEEDED)  # a site that comes late has not been asked before
        with only(model, HEAD):
            features: Any = _Features(run.data, model, run.device)
            return super().train(replace(run, data=features), model)

    @all_records()
    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        head: Any = model.head
        if self.first:
            _begin_anew(run, head, self.seed)
        counts = class_counts(self, run)
        rows = [p for p in head.parameters() if self.mask_absent and p.shape[0] == len(counts)]
        absent = (counts == 0).to(run.device)
        run.own = [(p, p.detach()[absent].clone()) for p in rows], absent  # so that they can be restored

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return criterion_loss(self, run, model.head(inputs), targets)  # type: ignore[operator]

    def step(self, run: SiteRun, model: torch.nn.Module, optimizer: Any, closure: Any) -> torch.Tensor:
        loss = super().step(run, model, optimizer, closure)
        rows, absent = run.own
        with torch.no_grad():
            for parameter, before in rows:
                parameter[absent] = before
        return loss


def _begin_anew(run: SiteRun, head: torch.nn.Module, seed: int) -> None:
    """Initialise the classifier anew from a seed, on the CPU so that the parameters are the same on every device."""
    fresh = copy.deepcopy(head).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[Any] = [module for module in fresh.modules() if hasattr(module, "reset_parameters")]
        for layer in layers:
            layer.reset_parameters()
    refuse_at(run.site, {"the network's head has no layer with reset_parameters(); set crt_rounds=0": not layers})
    head.load_state_dict(fresh.state_dict())
