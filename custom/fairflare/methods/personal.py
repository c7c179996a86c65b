"""What of the model stays at a site: the part of a site half that says so, for whoever keeps it and for the server.

A half may keep *tensors* of the common model (FedBN's norms): a site works with its own over what it receives, and does
not send them. It may also train a *model of its own* beside the common one (Ditto). Either way it is measured with what
is its own. Where it is kept: :mod:`fairflare.federation.personal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.core.norms import running_statistics

if TYPE_CHECKING:
    from fairflare.methods.rule import State
    from fairflare.methods.site_run import SiteRun


class KeepsAtHome:
    """Base of every site half; by itself it keeps nothing but what ``norm_statistics`` says.

    Attributes:
        own_model: the site trains a second model (:meth:`train_own`), and that one is measured.
        downloads: every site trains a model of its own, which nobody sends it: it gets a part of the last round's
            change, another one at every site (:meth:`hand_in`, :meth:`take`).
        own_norms: statistics of the norms stay at the site whatever ``norm_statistics`` says.
        home_doc: what stays at the site, one phrase; for ``docs/privacy.md``.
    """

    own_model: ClassVar[bool] = False
    own_norms: ClassVar[bool] = False
    downloads: ClassVar[bool] = False
    home_doc: ClassVar[str] = ""
    norm_statistics: str

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuses a half that says what it does not do."""
        super().__init_subclass__(**given)
        for says, methods in (("own_model", ("train_own",)), ("downloads", ("hand_in", "take"))):
            for name in methods:
                if getattr(cls, says) and getattr(cls, name) is getattr(KeepsAtHome, name):
                    raise TypeError(f"{cls.__name__} says {says}, but has no {name}()")

    def stays(self, model: torch.nn.Module) -> list[str]:
        """Names of the tensors of ``model`` that stay at the site: by the type of their module, never by their name.

        Server and sites ask this of the same network. What is named is loaded over the received model before anything
        is measured or trained, is not sent, and is kept with the round. A site that has none yet takes the received.
        """
        return running_statistics(model) if self.norm_statistics == "site" else []

    def train_own(self, run: SiteRun, own: torch.nn.Module, received: Mapping[str, torch.Tensor]) -> None:
        """Trains the site's own model in place, after the common one; called where :attr:`own_model` is True.

        Args:
            run: of the task. The same seed as for the common model, which this must not change.
            own: holds the site's own model; ``received`` where it has none yet.
            received: state that the common training started from, w^r.

        Raises:
            NotFinite: it is of no use any more, and is replaced by ``received``.
        """

    def hand_in(self, run: SiteRun, start: State, local: State) -> tuple[State, State]:
        """The update to send, and the site's model from now on; called where :attr:`downloads` is True.

        Args:
            run: of the task.
            start, local: what is sent of the model before and after the training; what stays is kept as trained.
        """
        return local, local

    def take(self, run: SiteRun, own: State, download: State, told: Mapping[str, Any]) -> State:
        """The site's model with what the server sent of the last round's change.

        Args:
            run: of the task, of the round after.
            own: what :meth:`hand_in` gave.
            download: see :func:`fairflare.core.entries.packed`.
            told: the site's entry in the directive ``download``.
        """
        return own

    def forget_own(self, run: SiteRun, own: torch.nn.Module) -> None:
        """Called when the own model begins anew: what else was kept for it (moments) must do so too."""
