"""Decide which tensors of a network server and sites send each other: ``exchange = all | trainable | REGEX``.

Server and sites build the same network (from the run's seed, or a task loads its encoder from a file), so tensors that
no training changes need not be sent in either direction. A checksum of these tensors shows whether they are equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import torch

from fairflare.base.task import Task, evaluating
from fairflare.core.aggregation.spectral import LEFT, RIGHT
from fairflare.core.features.adapting import load_weights, network_of
from fairflare.core.features.norms import running_statistics

ALL, TRAINABLE = "all", "trainable"
State = Mapping[str, "torch.Tensor"]
_ONE_AT_A_TIME = Lock()  # the process has one random state, and several sites may be threads of it


class SentTensors:
    """Determine the tensors of a network that server and sites send each other.

    ``"all"``: all tensors. ``"trainable"``: the tensors that training can change. Any other text is a regular
    expression: the tensors in whose names it has a match (:func:`re.search`), and the buffers that training changes. A
    parameter that does not match is frozen (``requires_grad`` in ``model`` is set to False), so that no trained value
    is lost.

    Training can change

    - a parameter with ``requires_grad`` in the network as the task builds it;
    - running mean, running variance and counter of a batch or instance norm that is in training mode after
      ``model.train()``, whether or not its weight and bias are frozen;
    - the running vectors of a spectral norm (``torch.nn.utils.parametrizations``) in that mode;

    Tensors that the method's server computes (``makes``; CReFF's second classifier) count as changing too. Other
    buffers are not sent. If a training changes such a buffer all the same, :meth:`check_unchanged` raises an error.

    Args:
        model: network of the task; with a regular expression its unmatched parameters are frozen.
        exchange: ``"all"``, ``"trainable"`` or a regular expression.
        makes: prefixes of the names of tensors that the method's server computes.

    Attributes:
        names: names of the tensors that are sent, in the order of the state dict.
        changing: names of all tensors that training can change.
        parameters: names of those among ``changing`` that are trained parameters.

    Raises:
        ValueError: ``exchange`` is no regular expression or matches no tensor, or no parameter is trained.
    """

    def __init__(self, model: torch.nn.Module, exchange: str = ALL, makes: tuple[str, ...] = ()) -> None:
        check_exchange(exchange)
        self.exchange = exchange
        every = list(model.state_dict())
        matched = [name for name in every if exchange in (ALL, TRAINABLE) or re.search(exchange, name)]
        if not matched:
            raise ValueError(
                f"exchange={exchange!r} matches no tensor of the task's network; its tensors are called "
                f"{', '.join(every[:3])}, ..."
            )
        named = dict(model.named_parameters(remove_duplicate=False))
        shared = {id(named[name]) for name in matched if name in named}
        if exchange not in (ALL, TRAINABLE):
            for parameter in named.values():
                parameter.requires_grad_(parameter.requires_grad and id(parameter) in shared)
            # A shared parameter is sent under each of its names.
            matched += [name for name, parameter in named.items() if id(parameter) in shared]
        self.parameters = frozenset(name for name, parameter in named.items() if parameter.requires_grad)
        self.changing = self.parameters | _changing_buffers(model)
        if exchange != ALL and not self.parameters:
            which = "every parameter" if exchange == TRAINABLE else "every parameter that it matches"
            raise ValueError(
                f"exchange={exchange!r}: nothing would be trained, {which} of the task's network is frozen "
                "(requires_grad=False); unfreeze some in the task's build_model, or choose another exchange"
            )
        chosen = self.changing.union(() if exchange == TRAINABLE else matched)
        self.names = [n for n in every if exchange == ALL or n in chosen or n.startswith(makes)]
        self._sent = frozenset(self.names)

    def select(self, state: State) -> dict[str, torch.Tensor]:
        """Return those tensors of a state that server and sites send each other."""
        return {name: tensor for name, tensor in state.items() if name in self._sent}

    def rest(self, state: State) -> dict[str, torch.Tensor]:
        """Return those tensors of a state that server and sites do not send each other."""
        return {name: tensor for name, tensor in state.items() if name not in self._sent}

    def mark(self, state: State) -> str:
        """Return the fingerprint of those tensors of a state that are not sent; empty if all are sent."""
        return fingerprint(rest) if (rest := self.rest(state)) else ""

    def whole(self, sent: State, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return a state that was sent, completed with the tensors of ``model`` that are not sent."""
        return {**self.rest(model.state_dict()), **sent}

    def layers(self, owner: Mapping[str, str]) -> list[str] | None:
        """Return the layers with a tensor that is sent (``None``: all); ``owner`` gives the layer of each tensor."""
        return None if self.exchange == ALL else list(dict.fromkeys(owner[name] for name in self.names))

    def check_unchanged(self, before: State, after: State) -> None:
        """Raise an error when a training changed a tensor that is not sent.

        Raises:
            ValueError: a tensor differs between ``before`` and ``after`` (names the tensor).
        """
        changed = [n for n, tensor in self.rest(after).items() if not torch.equal(tensor, before[n].to(tensor.device))]
        if changed:
            raise ValueError(
                f"training changed {len(changed)} tensor(s) that exchange={self.exchange!r} does not send, such as "
                f"{changed[0]!r}; give a regular expression that matches them, or exchange=all"
            )


def check_exchange(exchange: str, what: str = "exchange must be 'all', 'trainable' or") -> None:
    """Raise ``ValueError`` for a setting that is no regular expression; ``what`` begins the error's text."""
    problem = "" if exchange.strip() else "it is empty"
    try:
        re.compile(exchange)
    except re.error as error:
        problem = str(error)
    if problem:
        raise ValueError(f"{what} a regular expression, got {exchange!r:.200}: {problem}")


def fingerprint(tensors: State) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of tensors, in order of their names, as hex digits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def call_seeded(build: Callable[[], Any], seed: int) -> Any:
    """Call ``build`` with torch's random state set to a seed, restore the random state, and return the result."""
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def rebuilt(
    task: Task, sent: State, note: Mapping[str, Any], checkpoint: str | None = None
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a task's network, and the whole state of a model whose file holds only the tensors that were sent.

    Args:
        task: the learning task of the run.
        sent: tensors of the file, by name.
        note: entry ``exchange`` of the file; empty if the file contains the whole model.
        checkpoint: file of initial weights, see :func:`fairflare.core.features.adapting.load_weights`.

    Returns:
        The network, and the whole state with ``sent`` in it, which is not loaded into the network yet.

    Raises:
        ValueError: the tensors that the task builds here differ from those of the run.
    """
    if not note:
        return network_of(task), dict(sent)
    model: torch.nn.Module = call_seeded(lambda: load_weights(task, checkpoint), int(note["seed"]))
    rest = {name: tensor for name, tensor in model.state_dict().items() if name not in sent}
    if (digest := fingerprint(rest)) != note["fingerprint"]:
        raise ValueError(
            f"the file holds {len(sent)} of the model's {note['tensors']} tensors, those that the run exchanged "
            f"({note['setting']}); the others are built by the task, and here they are not those of the run (sha256 "
            f"{digest[:12]}, needed is {str(note['fingerprint'])[:12]}): give the task the same encoder file, and the "
            "same versions"
        )
    return model, {**rest, **sent}


def _changing_buffers(model: torch.nn.Module) -> frozenset[str]:
    vectors = [n for n in model.state_dict() if "parametrizations." in n and n.rpartition(".")[2] in (LEFT, RIGHT)]
    with evaluating(model):  # which restores the mode of each module
        model.train()
        names = [*running_statistics(model), *vectors]
        return frozenset(name for name in names if model.get_submodule(name.rpartition(".")[0]).training)
