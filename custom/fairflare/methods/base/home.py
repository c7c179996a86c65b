"""What of the model stays at a site: the part of a site half that says what, keeps it and works with it.

:class:`Home` keeps *tensors* of the common model (FedBN's norms) or none; a site puts them over what it receives, and
does not send them. Other homes keep a second model beside the common one (:mod:`fairflare.methods.ditto`), or a model
in place of it (:class:`OwnModel`). A site is measured with what stays there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.core.features.norms import running_statistics
from fairflare.core.states import add_update, difference
from fairflare.exchange.messages import clean_state
from fairflare.methods.base.site_run import SiteError, SiteRun

if TYPE_CHECKING:
    from typing import TypeAlias

    State: TypeAlias = Mapping[str, torch.Tensor]

# Keys in a site's store: the model it trained (for the anchor phase and MOON), and the model it received (needed where
# the anchor travels as a difference to it).
LOCAL_MODEL, RECEIVED_MODEL = "local_model", "received_model"
PARTS, OWN_MODEL = "parts", "own_model"
DOWNLOAD = "download"  # the directive of methods that send every site another part
BUFFERS_STAY = "a model of its own; buffers of the network are not sent, of the parameters an update is"


@dataclass
class Home:
    """What stays at a site, and how it is kept; by itself what ``norm_statistics`` says.

    Values are kept with the round that made them, and a task of round r takes the last ones of a round before it: a
    round that is asked for again starts from what it started from the first time, and a site that was away goes on with
    what it had. A site without any takes what it received.

    Args:
        half: the site half.
        named: names the tensors that stay, of any network; ``None``: the half names none.
        doc: what stays, one phrase; for ``docs/privacy.md``.
        local_models: so many last local models are in the store.
    """

    #: For the log: what kind of model each site has for itself; empty: it has none.
    model: ClassVar[str] = ""

    half: Any
    named: Callable[[torch.nn.Module], Iterable[str]] | None = None
    doc: str = ""
    local_models: int = 1

    def stays(self, model: torch.nn.Module) -> list[str]:
        """Name the tensors of ``model`` that stay at the site: by the type of their module, never by their name.

        Server and sites ask this of the same network.
        """
        names = set(() if self.named is None else self.named(model))
        if self.half.norm_statistics == "site":
            names.update(running_statistics(model))
        return [name for name in model.state_dict() if name in names] if names else []

    def begin(self, run: SiteRun, model: torch.nn.Module, received: State) -> dict[str, torch.Tensor]:
        """Return the model that the site begins a task with: the received one with the tensors that stay."""
        like = {name: received[name] for name in self.stays(model) if name in received}
        return {**received, **((like and last_kept(run, PARTS, like)) or {})}

    def measured(self, run: SiteRun, state: State) -> State:
        """Return the model that the site's figures are of; ``state``: what :meth:`begin` returned."""
        return state

    def finish(self, run: SiteRun, model: torch.nn.Module, start: State, local: State) -> dict[str, torch.Tensor]:
        """Keep what stays after a training; the update to send.

        Args:
            run: of the task.
            model: the network; may be overwritten.
            start, local: the model before and after the training.
        """
        names = self.stays(model)
        if names:
            run.store.save(PARTS, run.current_round, as_returned({n: local[n] for n in names}, start))
        sent = _without(names, local)
        return difference(sent, {name: tensor for name, tensor in clean_state(start).items() if name in sent})


@dataclass
class OwnModel(Home, ABC):
    """Every site trains a model of its own, which nobody sends it: it gets a part of the last round's change.

    Another part at every site; see :mod:`fairflare.methods.parts.downloads`.
    """

    model = "of its own, and is measured with it"

    @abstractmethod
    def hand_in(self, run: SiteRun, start: State, local: State) -> tuple[State, State]:
        """Return the update to send, and the site's model from now on.

        Args:
            run: of the task.
            start, local: what is sent of the model before and after the training; what stays is kept as trained.
        """

    @abstractmethod
    def take(self, run: SiteRun, last: State, download: State, entry: Mapping[str, Any]) -> State:
        """Return the site's own model, changed by those entries of the last round's change that the server sent.

        Args:
            run: of the present task; its round comes right after the one that ``last`` was trained in.
            last: the site's model as :meth:`hand_in` returned it in that round, without the tensors that stay.
            download: the entries sent, as :func:`fairflare.core.aggregation.entries.packed` makes them.
            entry: what the directive ``download`` has for this site.
        """

    def begin(self, run: SiteRun, model: torch.nn.Module, received: State) -> dict[str, torch.Tensor]:
        """Return the model of the round before with what came of that round's change, where the site was in it.

        Else the last one there is, as it is; else the one that came, which is the first of all.

        Raises:
            SiteError: there is none, and none came.
        """
        entry = (run.directives.get(DOWNLOAD) or {}).get(run.site)
        last = None if entry is None else run.store.load_at(OWN_MODEL, run.current_round - 1)
        if entry is not None and last is not None:
            return {**last, **self.take(run, _without(self.stays(model), last), received, entry)}
        earlier = last_kept(run, OWN_MODEL, model.state_dict())
        if earlier is None and entry is not None:
            raise SiteError(
                f"site {run.site!r} has lost its own model; after a round without it, it is sent the first one"
            )
        return earlier or dict(received)

    def finish(self, run: SiteRun, model: torch.nn.Module, start: State, local: State) -> dict[str, torch.Tensor]:
        """Keep the site's model; the update to send."""
        names = self.stays(model)
        update, after = self.hand_in(run, _without(names, clean_state(start)), _without(names, local))
        run.store.save(OWN_MODEL, run.current_round, {**local, **after})
        return dict(update)


def last_kept(run: SiteRun, name: str, like: State) -> dict[str, torch.Tensor] | None:
    """Return the last state of that name of an earlier round.

    ``None``: there is none that fits ``like``, which is noted.
    """
    state = run.store.load_before(name, run.current_round)
    if state is None:
        return None
    if state.keys() != like.keys() or any(state[key].shape != like[key].shape for key in like):
        run.store.lose(f"its {name} of an earlier round do not fit the network: starts with the received")
        return None
    return {key: state[key] for key in like}


def as_returned(after: State, before: State) -> dict[str, torch.Tensor]:
    """Return the trained tensors as they would come back from a server that has this site alone: start plus update.

    So that one site with FedAvg, or with a method that keeps everything at home, has the same bits.
    """
    plain = clean_state({name: before[name] for name in after})
    return add_update(plain, difference(after, plain))


def buffers(model: torch.nn.Module) -> list[str]:
    """Return tensors of a network that no optimizer sees."""
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name not in trained]


def _without(names: Iterable[str], state: State) -> dict[str, torch.Tensor]:
    left_out = set(names)
    return {name: tensor for name, tensor in state.items() if name not in left_out}
