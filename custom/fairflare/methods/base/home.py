"""Define homes: objects of a site half that define which part of the model stays at a site, and store that part.

:class:`Home` stores some *tensors* of the common model (FedBN's norms) or none. A site replaces these tensors of the
received model by its stored ones, and does not send them. Other homes store a second model beside the common one
(:mod:`fairflare.methods.ditto`), or a model in place of the common one (:class:`OwnModel`). A site's metrics are
measured with the stored part.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.core.features.norms import running_statistics
from fairflare.core.features.parts import HEAD
from fairflare.core.states import add_update, difference
from fairflare.exchange.messages import clean_state
from fairflare.methods.base.site_run import SiteError, SiteRun

if TYPE_CHECKING:
    from typing import TypeAlias

    State: TypeAlias = Mapping[str, torch.Tensor]

# Names of values in a site's store: the model that the site trained (for the anchor phase and MOON), and the model that
# it received (needed if the anchor is sent as a difference to the received model).
LOCAL_MODEL = "local_model"
PARTS, OWN_MODEL = "parts", "own_model"
#: Name of the directive that tells a site its last round that counted (-1: none), and the share of its update that did.
COUNTED = "counted"
BEFORE = "before/"  # prefix of the names of values from before a round, stored beside the new ones
DOWNLOAD = "download"  # name of the directive to the sites in methods that send each site other parts of the model
KEEP, FINETUNE = "keep:", "finetune"  # beginnings of the setting ``personalise``
BUFFERS_STAY = "a model of its own; buffers of the network are not sent, of the parameters an update is"


def every_tensor(model: torch.nn.Module) -> Iterable[str]:
    """Return the names of all tensors of a network, for :attr:`Home.named` of a method that sends no model."""
    return model.state_dict()


@dataclass
class Home:
    """Define which tensors of the model stay at a site, and store them there.

    Without ``named`` only those tensors stay that the setting ``norm_statistics`` withholds. Tensors are stored with
    the number of the round that made them, and a task of round r takes the newest tensors of an earlier round. Thus a
    repeated round starts from the same values as the first time, and a site that was absent continues with its last
    values. A site without stored tensors takes the received tensors.

    Args:
        half: the method's site half, the part that runs at a site.
        named: function that returns the names of those tensors of a network that stay; ``None`` if the site half names
            none.
        doc: description, in one phrase, of what stays at the site; for ``fairflare privacy``.
        local_models: number of the last local models that the store holds.
    """

    #: Description, for the log, of the model that each site has for itself; empty if sites have no model of their own.
    model: ClassVar[str] = ""

    half: Any
    named: Callable[[torch.nn.Module], Iterable[str]] | None = None
    doc: str = ""
    local_models: int = 1

    def stays(self, model: torch.nn.Module) -> list[str]:
        """Return the names of tensors that stay at the site, chosen by the type of their module, never by their name.

        Server and sites call this with the same network, so they get the same names.
        """
        names = set(() if self.named is None else self.named(model))
        if self.half.norm_statistics == "site":
            names.update(running_statistics(model))
        if self.half.personalise.startswith(KEEP):
            pattern, every = self.half.personalise.removeprefix(KEEP), list(model.state_dict())
            names.update(matching := [name for name in every if re.search(pattern, name)])
            if not matching:
                raise ValueError(
                    f"personalise={self.half.personalise!r} matches no tensor of the task's network; its tensors are "
                    f"called {', '.join(every[:3])}, ..."
                )
        return [name for name in model.state_dict() if name in names] if names else []

    def copy_sent(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of those parameters of a network, by name, that are trained and do not stay at the site."""
        stays = {*self.stays(model)}
        return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad and n not in stays}

    def begin(self, run: SiteRun, model: torch.nn.Module, received: State) -> dict[str, torch.Tensor]:
        """Return the model with which the site begins a task: the received model with the site's stored tensors."""
        like = {name: received[name] for name in self.stays(model) if name in received}
        return {**received, **((like and last_kept(run, PARTS, like)) or {})}

    def choose_measured_model(self, run: SiteRun, state: State) -> State:
        """Return the model whose metrics the site reports, given ``state``, the model that :meth:`begin` returned."""
        return state

    def finish(self, run: SiteRun, model: torch.nn.Module, start: State, local: State) -> dict[str, torch.Tensor]:
        """Store the tensors that stay at the site after a training, and return the update to send.

        Args:
            run: the server's task that this site performs, with the site's data.
            model: network of the task; its values may be overwritten.
            start, local: the model before and after the training.
        """
        names = self.stays(model)
        if names:
            run.store.save(PARTS, run.current_round, return_trained({n: local[n] for n in names}, start))
        sent = _drop(names, local)
        return difference(sent, {name: tensor for name, tensor in clean_state(start).items() if name in sent})


@dataclass
class OwnModel(Home, ABC):
    """Store a whole model of the site's own, which the site trains in place of the common model.

    The server sends no model, but a part of the common model's change in the last round, a different part to every
    site; see :mod:`fairflare.methods.parts.downloads`.
    """

    model = "of its own, and is measured with it"

    @abstractmethod
    def hand_in(self, run: SiteRun, start: State, local: State) -> tuple[State, State]:
        """Return the update to send, and the model that is the site's own from now on.

        Args:
            run: the server's task that this site performs, with the site's data.
            start, local: model before and after the training, without the tensors that stay at the site; those are
                stored as trained.
        """

    @abstractmethod
    def take(self, run: SiteRun, last: State, download: State, entry: Mapping[str, Any]) -> State:
        """Return the site's own model, changed by those entries of the last round's change that the server sent.

        Args:
            run: the present task; its round directly follows the round in which ``last`` was trained.
            last: the site's model as :meth:`hand_in` returned it in that round, without the tensors that stay.
            download: entries that were sent, as :func:`fairflare.core.aggregation.entries.pack_entries` forms them.
            entry: the entry of the directive ``download`` for this site.
        """

    def begin(self, run: SiteRun, model: torch.nn.Module, received: State) -> dict[str, torch.Tensor]:
        """Return the site's own model with which it begins a task.

        A site that took part in the round before gets its model of that round, with the received part of that round's
        change applied. Any other site gets its last own model, unchanged. A site without an own model gets the received
        one, which is the run's initial model.

        Raises:
            SiteError: the site has no own model, and the server sent a change and no model.
        """
        entry = (run.directives.get(DOWNLOAD) or {}).get(run.site)
        last = None if entry is None else run.store.load_at(OWN_MODEL, run.current_round - 1)
        if entry is not None and last is not None:
            return {**last, **self.take(run, _drop(self.stays(model), last), received, entry)}
        earlier = last_kept(run, OWN_MODEL, model.state_dict())
        if earlier is None and entry is not None:
            raise SiteError(
                f"site {run.site!r} has lost its own model; it misses this round and then gets the initial model"
            )
        return earlier or dict(received)

    def finish(self, run: SiteRun, model: torch.nn.Module, start: State, local: State) -> dict[str, torch.Tensor]:
        """Store the site's own model after a training, and return the update to send."""
        names = self.stays(model)
        update, after = self.hand_in(run, _drop(names, clean_state(start)), _drop(names, local))
        run.store.save(OWN_MODEL, run.current_round, {**local, **after})
        return dict(update)


def choose_tuned_part(personalise: str) -> str:
    """Return which part of the common model each site fine-tunes after the rounds; empty if none."""
    return (personalise.partition(":")[2] or HEAD) if personalise.startswith(FINETUNE) else ""


def last_kept(run: SiteRun, name: str, like: State) -> dict[str, torch.Tensor] | None:
    """Return the newest state that the site stored under ``name`` in an earlier round.

    ``None`` if no state is stored, or its names or shapes differ from those of ``like``, which the store notes as lost.
    """
    state = run.store.load_before(name, run.current_round)
    if state is None:
        return None
    if state.keys() != like.keys() or any(state[key].shape != like[key].shape for key in like):
        run.store.lose(f"its {name} of an earlier round do not fit the network: starts with the received")
        return None
    return {key: state[key] for key in like}


def fitting(run: SiteRun, name: str, like: State) -> dict[str, torch.Tensor]:
    """Return the tensors that the site stored under ``name`` in its newest earlier round, as far as they fit ``like``.

    A tensor fits if ``like`` has a tensor of the same name and shape; it is returned on the device and with the type of
    that tensor. If the server names the site's last round that counted
    (:class:`~fairflare.methods.base.rule.SumOfKept`), the values of later rounds, whose answers were lost, are deleted.
    If only a share of that round's update counted, since it was clipped, only this share of the round's change of each
    value is applied.
    """
    last, share = (run.directives.get(COUNTED) or {}).get(run.site, (run.current_round, 1.0))
    run.store.clear(name, but=run.current_round, after=int(last))
    stored = {} if last == -1 else run.store.load_before(name, run.current_round) or {}
    fits = {n: stored[n].to(x) for n, x in like.items() if n in stored and stored[n].shape == x.shape}
    known = share != 1 and run.store.load_at(name, int(last)) is not None  # else an older round's values are taken
    return {n: stored[BEFORE + n].to(x).lerp(x, float(share)) for n, x in fits.items()} if known else fits


def keep(run: SiteRun, name: str, before: State, after: State) -> None:
    """Store tensors ``after`` a round for :func:`fitting`, with those ``before`` it; a missing earlier one is 0."""
    earlier = {BEFORE + n: before[n].cpu() if n in before else torch.zeros_like(x) for n, x in after.items()}
    run.store.save(name, run.current_round, {**after, **earlier})


def return_trained(after: State, before: State) -> dict[str, torch.Tensor]:
    """Return the trained tensors as a server with this site alone would send them back: start plus update.

    Thus a run with one site has the same bits with FedAvg as with a method that leaves all tensors at the site.
    """
    plain = clean_state({name: before[name] for name in after})
    return add_update(plain, difference(after, plain))


def buffers(model: torch.nn.Module) -> list[str]:
    """Return the names of a network's buffers: tensors of its state that are not parameters."""
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name not in trained]


def _drop(names: Iterable[str], state: State) -> dict[str, torch.Tensor]:
    left_out = set(names)
    return {name: tensor for name, tensor in state.items() if name not in left_out}
