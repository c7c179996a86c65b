"""Build a site's network when a task first needs it, and reuse it for the later tasks of the same process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fairflare.base.checks import refuse
from fairflare.base.machine.computing import Computing
from fairflare.base.own_errors import describe_error, lacking_package
from fairflare.base.task import Task
from fairflare.core.features.adapting import load_weights, network_of
from fairflare.exchange.messages import SiteTask
from fairflare.exchange.sent_tensors import ALL, SentTensors, call_seeded
from fairflare.methods.base.site_run import SiteError

Terms = tuple[str, tuple[str, ...], int, str]  # the fields exchange, makes, seed and rest of a SiteTask
WHOLE: Terms = (ALL, (), 0, "")


@dataclass
class SiteNetwork:
    """Hold the task's network at one site, and know which of its tensors are sent.

    Args:
        site: name of the site.
        device, computing: device of the network, and how the network computes on it.
        weights: ``initial_weights`` of the site's private file, from which tensors that are not sent are loaded.

    Attributes:
        model: the network; ``None`` until the next task builds it.
        sent: names of the network's tensors that are sent; ``None`` if all tensors are sent.
    """

    site: str
    device: torch.device
    computing: Computing
    weights: str | None = None
    model: torch.nn.Module | None = None
    sent: SentTensors | None = None
    _terms: Terms = WHOLE
    _own: bool = False

    def build(self, task: Task, request: SiteTask | None = None) -> torch.nn.Module:
        """Return the network in the form that the run of ``request`` needs; without a request, as in the last run.

        Raises:
            SiteError: the network cannot be built, or its tensors that are not sent differ from the server's.
        """
        terms = self._terms
        if request is not None:
            terms = WHOLE if request.exchange == ALL else (request.exchange, request.makes, request.seed, request.rest)
        refuse({
            f"site {self.site!r}: a script of its own trains the whole model; set exchange=all for this run":
                self._own and terms[0] != ALL,
        }, SiteError)  # fmt: skip
        if self.model is None or terms != self._terms:
            self.model, self._terms = None, terms
            self.model = self._build(task, *terms)
        return self.model

    def use(self, model: torch.nn.Module) -> None:
        """Use a network of the user's script in place of the one that the task builds."""
        self.model, self._own = model, True

    def whole(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return a state that was sent, completed with the network's tensors that are not sent."""
        return state if self.sent is None or self.model is None else self.sent.whole(state, self.model)

    def part(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a state that are sent or saved; the network holds all others."""
        return dict(state) if self.sent is None else self.sent.select(state)

    def forget(self) -> None:
        """Discard the network if only some of its tensors are sent, so that the next task builds it anew.

        A training that ended early may have changed the tensors that are not sent.
        """
        if self.sent is not None:
            self.model = None

    def check_unchanged(self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`SiteError` when a training changed a tensor that is not sent."""
        if self.sent is None:
            return
        try:
            self.sent.check_unchanged(before, after)
        except ValueError as error:
            raise SiteError(f"site {self.site!r}: {error}") from error

    def _build(self, task: Task, exchange: str, makes: tuple[str, ...], seed: int, rest: str) -> torch.nn.Module:
        self.sent = None
        if exchange == ALL:
            return self.computing.apply(network_of(task).to(self.device), self.device)
        try:
            model: torch.nn.Module = call_seeded(lambda: load_weights(task, self.weights), seed)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            lacking, why = lacking_package(error), getattr(error, "public", None) or type(error).__name__
            partly = (
                f"its network, of which only a part is sent, cannot be built here ({why}); give this site the "
                "encoder's file (initial_weights in its local/fairflare.json), or let all tensors travel (exchange=all)"
            )
            raise SiteError(
                f"site {self.site!r}: its network cannot be built: {lacking or describe_error(error)}",
                public=f"site {self.site!r}: {f'its network cannot be built: {lacking}' if lacking else partly}",
            ) from error
        try:
            self.sent = SentTensors(model, exchange, makes)
        except ValueError as error:
            raise SiteError(f"site {self.site!r}: {error}; run the same job at server and sites") from error
        built = self.sent.mark(model.state_dict())
        if built != rest:
            raise SiteError(
                f"site {self.site!r}: the part of the network that is not sent (exchange={exchange!r}) differs "
                f"from the server's: sha256 {built[:12]}, the server has {rest[:12]}; give this site the same encoder "
                "file (initial_weights) and the same versions as the server, or let all tensors travel (exchange=all)"
            )
        return self.computing.apply(model.to(self.device), self.device)
