"""Make the parts of a MONAI bundle that a task needs, each by its key and of its kind, and the optimizer's settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from fairflare.base.disk.bundle_files import BundleError
from fairflare.tasks.bundles.bundle_config import PLACES, Bundle
from fairflare.tasks.bundles.bundle_metric import KeyMetric

#: Expressions by which a bundle's configuration says that the optimizer trains the whole network.
PARAMETERS = re.compile(r"\$\s*(filter\(lambda (\w+): \2\.requires_grad,\s*)?@\w+\.parameters\(\)(?(1)\))\s*")


class BundleParts:
    """Make objects from a bundle's configuration.

    Args:
        bundle: the configuration.
        class_names: names of the network's output channels; ``None`` for those of the metadata.

    Attributes:
        kept: function like :meth:`make` that returns the same object each time.
    """

    def __init__(self, bundle: Bundle, class_names: Sequence[str] | None = None) -> None:
        self.bundle, self.class_names, self.kept = bundle, class_names, cache(self.make)

    def check(self) -> None:
        """Make every part but the optimizer once.

        Raises:
            BundleError: a part is missing or cannot be made (names file and key).
        """
        for error in self.problems():
            raise error

    def problems(self, *, optimizer: bool = False) -> Iterator[BundleError]:
        """Make every part once, the optimizer only if requested, and yield the error of each part that fails."""
        for part in [part for part in PLACES if part != "optimizer" or optimizer]:
            try:
                with torch.random.fork_rng(devices=[]):
                    self.optimizer_settings(()) if part == "optimizer" else self.kept(part)
            except BundleError as error:
                yield error

    def make(self, part: str, **arguments: Any) -> Any:
        """Return a new object of a part, ``None`` if the bundle has no such part; ``arguments`` replace the bundle's.

        Raises:
            BundleError: a needed part is missing, or it cannot be made, or is of another kind (names file and key).
        """
        from monai.inferers import SimpleInferer
        from monai.transforms import Compose, SaveImage, SaveImaged

        if part == "key_metric":
            return KeyMetric(self.bundle, self.class_names)
        key = self.bundle.place(part)
        component: Any = None if key is None else self.bundle.make(key, **arguments)
        if part.endswith("processing"):
            component = component if isinstance(component, Compose) else Compose(component)
        steps = component.flatten().transforms if part.endswith("processing") else [component]
        kinds: dict[str, tuple[Any, str]] = {
            "network": (torch.nn.Module, "a network"), "optimizer": (torch.optim.Optimizer, "an optimizer"),
            "train_inferer": (SimpleInferer, "a SimpleInferer, as training goes through the network as it is"),
            "train_batch_size": (int, "a whole number"), "validate_batch_size": (int, "a whole number"),
        }  # fmt: skip
        kind, word = kinds.get(part, (Callable, "something callable that saves no images"))
        odd = [step for step in steps if not isinstance(step, kind) or isinstance(step, SaveImage | SaveImaged)]
        if odd and key is not None:
            raise BundleError(f"{self.bundle.name}: key {key!r} must give {word}, got a {type(odd[0]).__name__}")
        return component

    def optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the class of the bundle's optimizer with its arguments.

        Raises: BundleError: the optimizer is for some of the parameters only, or cannot be made.
        """
        key = self.bundle.place("optimizer")
        params = self.bundle.get(f"{key}#params")
        if not (isinstance(params, str) and PARAMETERS.fullmatch(params)):
            raise BundleError(
                f"{self.bundle.name}: key {key!r} must be of all the network's parameters, in one group; set optimizer "
                "and learning_rate to train with another one"
            )
        return self.make("optimizer", params=tuple(parameters))

    def optimizer_settings(self, given: Collection[str]) -> dict[str, Any]:
        """Return settings by which a method's training at the sites takes the bundle's optimizer and learning rate.

        Args:
            given: names of settings that the user gives.

        Raises: BundleError: the optimizer cannot be made, or one of ``given`` would have no effect on it.
        """
        key = self.bundle.place("optimizer")
        if key is None or "optimizer" in given:
            return {}
        if lost := [name for name in ("weight_decay", "betas", "momentum") if name in given]:
            raise BundleError(
                f"{self.bundle.name}: key {key!r} is an optimizer of the bundle's own, so that {lost[0]} would have no "
                f"effect; set optimizer too, or bundle_overrides={{'{key}#...': ...}} in place of {lost[0]}"
            )
        optimizer = self.optimizer([torch.nn.Parameter(torch.zeros(1))])
        return {"optimizer": "task", "learning_rate": float(optimizer.defaults["lr"])}
