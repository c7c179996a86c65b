"""Define tasks that change their network before training: they insert adapters and freeze parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from fairflare.base.task import Task
    from fairflare.core.aggregation.low_rank import Products


class Adapting(ABC):
    """Define a task that changes its network before training. Callers get the changed network by :func:`network_of`."""

    @property
    @abstractmethod
    def averages_products(self) -> bool:
        """Return whether the network has low-rank adapters that are averaged by their products."""

    @abstractmethod
    def insert_adapters(self, model: nn.Module) -> nn.Module:
        """Insert the task's adapters into the network of ``build_model``, freeze what is not trained, and return it.

        Raises:
            ValueError: a setting names parts that the network does not have (the message names those that it has).
        """


def network_of(task: Task) -> nn.Module:
    """Return the task's network as it is trained, sent and tested: with adapters, if the task adds any."""
    model = task.build_model()
    return task.insert_adapters(model) if isinstance(task, Adapting) else model


def load_weights(task: Task, checkpoint: str | None = None) -> nn.Module:
    """Return the task's network with initial weights loaded from a file of the participant that builds the network.

    Args:
        task: task of the run; its own ``initial_weights`` are used if ``checkpoint`` is None.
        checkpoint: value of ``initial_weights`` in this participant's private file.
    """
    model = network_of(task)
    task.initialise(model, checkpoint)
    return model


def outline_of(task: Task) -> nn.Module:
    """Return the task's network for reading its names and shapes.

    The parameters are on the meta device and take no memory, unless the network cannot be built without numbers.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return network_of(task)
        except (NotImplementedError, RuntimeError):  # raised, for example, by `item` of a tensor without numbers
            return network_of(task)


def products_of(task: Task) -> Products | None:
    """Return an object that averages the task's adapters by their products; ``None`` to average each tensor alone."""
    from fairflare.core.aggregation.low_rank import Products

    return Products() if isinstance(task, Adapting) and task.averages_products else None
