"""The parts of a MONAI bundle that a task needs, each made once where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fairflare.base.disk.bundle_files import BundleError
from fairflare.tasks.bundles.bundle_config import Bundle
from fairflare.tasks.bundles.bundle_metric import KeyMetric
from fairflare.tasks.bundles.bundle_optimizer import PARAMETERS, found_as_settings

if TYPE_CHECKING:
    import torch
    from monai.transforms import Compose

SAVING = ("SaveImage", "SaveImaged")  # steps of a postprocessing that write files
OPTIONS = ("map_items", "unpack_items", "lazy", "overrides")  # of a Compose


class BundleParts:
    """Objects made of a bundle's configuration.

    Args:
        bundle: the configuration.
        class_names: of the network's output channels; ``None``: as the metadata say.
    """

    def __init__(self, bundle: Bundle, class_names: Sequence[str] | None = None) -> None:
        self.bundle, self.class_names = bundle, class_names

    def check(self) -> None:
        """Make every part once.

        Raises:
            BundleError: a part is missing or cannot be made (names file and key).
        """
        for error in self.problems():
            raise error

    def problems(self) -> Iterator[BundleError]:
        """Make every part once, and yield why one is missing or cannot be made (names file and key)."""
        import torch

        parts: list[Callable[[], Any]] = [
            self.network, lambda: self.transforms("train_preprocessing"),
            lambda: self.transforms("validate_preprocessing"), lambda: self.loss, lambda: self.postprocessing,
            lambda: self.inferer, lambda: self.key_metric, self._plain_training,
        ]  # fmt: skip
        for part in parts:
            try:
                with torch.random.fork_rng(devices=[]):
                    part()
            except BundleError as error:
                yield error

    def _plain_training(self) -> None:
        """Refuse an inferer of training that is none, since training goes through the network as it is."""
        key = self.bundle.place("train_inferer")
        found = None if key is None else self.bundle.get(key)
        target = found.get("_target_") if isinstance(found, Mapping) else found
        if found is not None and str(target).rpartition(".")[2] != "SimpleInferer":
            raise self.bundle.problem(
                f"key {key!r} is {target!r:.80}; training goes through the network as it is, so only a SimpleInferer "
                "can be there"
            )

    @cached_property
    def key_metric(self) -> KeyMetric:
        """Return what the fairness table is about."""
        return KeyMetric(self.bundle, self.class_names)

    def network(self) -> torch.nn.Module:
        """Return a new one each time, initialised from torch's current random state."""
        import torch

        key = self.bundle.needed("network")
        made = self.bundle.make(key)
        if not isinstance(made, torch.nn.Module):
            raise self.bundle.problem(f"key {key!r} must give a network, got a {type(made).__name__}")
        return made

    @cached_property
    def loss(self) -> Any:
        """Return the function or module of outputs and targets."""
        return self.bundle.make(self.bundle.needed("loss"))

    @cached_property
    def inferer(self) -> Any:
        """Of evaluation; ``SimpleInferer`` where the bundle has none, as in MONAI's evaluator."""
        from monai.inferers import SimpleInferer

        key = self.bundle.place("validate_inferer")
        return SimpleInferer() if key is None else self.bundle.make(key)

    @cached_property
    def postprocessing(self) -> Compose:
        """Between network and metric, without steps that write files."""
        return self._compose(self.bundle.place("validate_postprocessing"))

    def transforms(self, part: str) -> Compose:
        """Return new ones each time."""
        return self._compose(self.bundle.needed(part))

    def whole_number(self, part: str) -> Any:
        """Return what the bundle says, to be checked by whoever uses it; ``None``: nothing."""
        key = self.bundle.place(part)
        made = None if key is None else self.bundle.make(key)
        if isinstance(made, list | tuple | dict):
            raise self.bundle.problem(f"key {key!r} must be a whole number, got a {type(made).__name__}")
        return made

    # -- the optimizer

    def optimizer_settings(self, given: Collection[str]) -> dict[str, Any]:
        """Return the bundle's optimizer as settings of a site half.

        An optimizer that settings cannot say is ``"task"``: made of the bundle's class and arguments.

        Args:
            given: names of settings that the user gives.

        Raises:
            BundleError: it cannot be made, or one of ``given`` would have no effect on it.
        """
        import torch

        key = self.bundle.place("optimizer")
        if key is None or "optimizer" in given:
            return {}
        found = found_as_settings(self.bundle, key)
        if found is not None:
            return found
        for name in ("weight_decay", "betas", "momentum"):
            if name in given:
                raise self.bundle.problem(
                    f"key {key!r} is an optimizer of the bundle's own, so that {name} would have no effect; set "
                    f"optimizer too, or bundle_overrides={{'{key}#...': ...}} in place of {name}"
                )
        made = self.optimizer([torch.nn.Parameter(torch.zeros(1))])
        return {"optimizer": "task", "learning_rate": float(made.param_groups[0]["lr"])}

    def optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the bundle's class with its arguments.

        Raises:
            BundleError: it is for some of the parameters, or cannot be made.
        """
        import torch

        key = self.bundle.needed("optimizer")
        told = self.bundle.get(key)
        remedy = "set optimizer and learning_rate to train with another one"
        if not isinstance(told, Mapping) or not PARAMETERS.fullmatch(str(told.get("params", ""))):
            raise self.bundle.problem(f"key {key!r} must be of all the network's parameters, in one group; {remedy}")
        made = self.bundle.make(key, params=parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise self.bundle.problem(f"key {key!r} must give an optimizer, got a {type(made).__name__}; {remedy}")
        return made

    # -- pieces

    def _compose(self, key: str | None) -> Compose:
        from monai.transforms import Compose

        made = [] if key is None else self.bundle.make(key)
        whole = made if isinstance(made, Compose) else Compose(made)
        steps = whole.flatten().transforms
        for step in steps:
            if not callable(step):
                raise self.bundle.problem(f"key {key!r} must give transforms, got a {type(step).__name__}")
        kept = [step for step in steps if type(step).__name__ not in SAVING]
        return Compose(kept, **{name: getattr(whole, name) for name in OPTIONS})
