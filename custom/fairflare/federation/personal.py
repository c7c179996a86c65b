"""What stays at the sites: how a site keeps it and works with it, and what the server knows of it.

Which tensors these are, and whether there is a model besides, a site half says: :mod:`fairflare.methods.personal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fairflare.core.states import add_update, difference
from fairflare.exchange.messages import SiteTask, clean_state
from fairflare.federation.halves import training_of
from fairflare.federation.incoming import in_words
from fairflare.methods.training import NotFinite, SiteError

if TYPE_CHECKING:
    from fairflare.federation.site_store import SiteStore
    from fairflare.methods.rule import State
    from fairflare.methods.training import LocalTraining, SiteRun

PARTS, OWN_MODEL = "parts", "own_model"  # in the site's store
DOWNLOAD = "download"  # the directive of methods that send every site another part
COMMON, PERSONAL = "common", "personal"  # which model the figures of a run are of


# ------------------------------------------------------------------------------------------------ at a site


class Personal:
    """What one site has of its own, in one task.

    Values are kept with the round that made them, and a task of round r takes the last ones of a round before it: a
    round that is asked for again starts from what it started from the first time, and a site that was away goes on with
    what it had. A site without any takes what it received.

    Args:
        training: the method's site half.
        network: of the task.
        store: of the run at this site, locked.
        request: the task.
    """

    def __init__(self, training: LocalTraining, network: torch.nn.Module, store: SiteStore, request: SiteTask) -> None:
        self.training, self.store, self.current_round = training, store, request.current_round
        self.names = frozenset(training.stays(network))

    def with_parts(self, received: State) -> dict[str, torch.Tensor]:
        """The received model with the site's own parts in it."""
        like = {name: received[name] for name in received if name in self.names}
        kept = self._kept(PARTS, like) if like else None
        return {**received, **(kept or {})}

    def start(self, run: SiteRun, request: SiteTask, like: State) -> dict[str, torch.Tensor]:
        """The model that a site begins a task with which has one of its own (``downloads``).

        It is that of the round before with what came of that round's change, where the site was in it; else the
        last one there is, as it is; else the one that came, which is the first of all.

        Raises:
            SiteError: there is none, and none came.
        """
        told = (request.directives.get(DOWNLOAD) or {}).get(run.site)
        if told is None:
            return self._kept(OWN_MODEL, like) or dict(request.state)
        own = self.store.load_at(OWN_MODEL, self.current_round - 1)
        if own is None:
            own = self._kept(OWN_MODEL, like)
            if own is None:
                raise SiteError(
                    f"site {run.site!r} has lost its own model; after a round without it, it is sent the first one"
                )
            return own
        return {**own, **self.training.take(run, self.shared(own), request.state, told)}

    def hand_in(self, run: SiteRun, start: State, local: State) -> dict[str, torch.Tensor]:
        """Keeps what is the site's own after a training; the update to send."""
        if not self.training.downloads:
            self.keep(start, local)
            return self.shared(difference(local, clean_state(start)))
        update, own = self.training.hand_in(run, self.shared(clean_state(start)), self.shared(local))
        self.store.save(OWN_MODEL, self.current_round, {**local, **own})
        return dict(update)

    def measured(self, state: State) -> dict[str, torch.Tensor]:
        """The model that the site's figures are of; ``state``: what :meth:`with_parts` gave."""
        kept = self._kept(OWN_MODEL, state) if self.training.own_model else None
        return dict(state) if kept is None else kept

    def shared(self, update: State) -> dict[str, torch.Tensor]:
        """What of an update is sent."""
        return {name: tensor for name, tensor in update.items() if name not in self.names}

    def keep(self, start: State, local: State) -> None:
        """Keeps the site's parts of its trained model.

        Args:
            start, local: the model before and after the training.
        """
        if self.names:
            own = {name: tensor for name, tensor in local.items() if name in self.names}
            self.store.save(PARTS, self.current_round, _as_returned(own, {name: start[name] for name in own}))

    def train_own(self, run: SiteRun, model: torch.nn.Module, start: State) -> None:
        """One round of the site's own model, where the half has one; ``model`` is overwritten.

        One that is not finite is replaced by the received model, and the site says so.
        """
        if not self.training.own_model:
            return
        before = self.measured(start)
        model.load_state_dict(before)
        try:
            self.training.train_own(run, model, start)
            after = _as_returned(clean_state(model.state_dict()), before)
        except NotFinite as error:
            self.store.lose(f"its own model begins anew with the received one, as it broke: {error}")
            self.training.forget_own(run, model)
            after = dict(start)
        self.store.save(OWN_MODEL, self.current_round, after)

    def _kept(self, name: str, like: State) -> dict[str, torch.Tensor] | None:
        found = self.store.load_before(name, self.current_round)
        if found is None:
            return None
        if found.keys() != like.keys() or any(found[key].shape != like[key].shape for key in like):
            self.store.lose(f"its {name} of an earlier round do not fit the network: starts with the received")
            return None
        return {key: found[key] for key in like}


def _as_returned(after: State, before: State) -> dict[str, torch.Tensor]:
    """The trained tensors as they would come back from a server that has this site alone: start plus update.

    So that one site with FedAvg, or with a method that keeps everything at home, has the same bits.
    """
    plain = clean_state(before)
    return add_update(plain, difference(after, plain))


# ------------------------------------------------------------------------------------------------ at the server


@dataclass(frozen=True)
class AtHome:
    """What the server knows of it.

    Attributes:
        tensors: that no site sends; the common model has them as they were in the beginning.
        measured: ``"personal"`` or ``"common"``; ``None``: the site half is not known here, and the sites say.
        own_everywhere: no model is the same at all sites; not so where a site has one of its own besides.
    """

    tensors: frozenset[str] = frozenset()
    measured: str | None = None
    own_everywhere: bool = False

    @property
    def noted(self) -> dict[str, Any]:
        """What the files of the common model say of it: that the sites have more, without which it was not measured."""
        return {"measured": PERSONAL, "stays_at_sites": len(self.tensors)} if self.measured == PERSONAL else {}


def at_home(site_half: Any, network: torch.nn.Module, say: Callable[..., None]) -> AtHome:
    """Asks the job's site half what stays at the sites, and tells the log.

    Args:
        site_half: as in :class:`fairflare.federation.run_settings.Place`.
        network: the task's.
        say: a line for the server's log.
    """
    training = training_of(site_half)
    if training is None:
        return AtHome()
    names = training.stays(network)
    if training.norm_statistics == "site" and not names:
        say("norm_statistics='site' changes nothing: the network has no norm with running statistics")
    if training.downloads:
        say("every site has a model of its own, and is measured with it")
    if names:
        say(f"at the sites stay {in_words(names)} of {len(network.state_dict())}; every site is measured with its own")
    if training.own_model:
        say("every site has a model of its own besides the common one, and is measured with that")
    own = training.own_model or training.downloads
    return AtHome(frozenset(names), PERSONAL if names or own else COMMON, bool(names) or training.downloads)
