"""Run the sites' tasks in the server's own process, by function calls, one site after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import safe_name
from fairflare.base.task import Task
from fairflare.exchange.messages import Message, address, decode_task, encode_reply
from fairflare.federation.collecting.transport import Question
from fairflare.federation.site.site_file import DECODED_PLACE, own_settings
from fairflare.federation.site.worker import SiteWorker, refusal
from fairflare.methods.base.training import LocalTraining
from fairflare.privacy.sums.keys import SiteKeys

log = logging.getLogger(__name__)


class LocalTransport:
    """Run the sites' tasks in this process, by function calls, one site after the other.

    Args:
        sites: names of the sites.
        task: the learning task: data, network, loss and metrics.
        training: the method's site half.
        local: content of ``local/fairflare.json``.
        state: folder for the sites' state, unless ``state_root`` in ``local`` names another.
        should_stop: is called between the sites and while they train; True or a text, the reason, stops the run.
    """

    def __init__(
        self,
        sites: Sequence[str],
        task: Task,
        training: LocalTraining,
        local: Mapping[str, Any],
        state: Path,
        should_stop: Callable[[], bool | str] = lambda: False,
    ) -> None:
        self.names = list(sites)
        self.task, self.training = task, training
        self.local, self.state = dict(local), state
        self.stopped = should_stop
        self._workers: dict[str, SiteWorker] = {}
        self._folders: dict[str, Path] = {}

    def __enter__(self) -> LocalTransport:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the sites' keys for secure sums at the end of a run."""
        for site, folder in self._folders.items():
            SiteKeys(site, folder).forget()

    def sites(self) -> list[str]:
        return self.names

    expected = sites

    def ask(self, question: Question) -> None:
        for site in question.sites:
            if question.enough() or self.stopped():
                return
            question.hand_over(site, self._answer(site, question.name, address(question.task, site)))

    def say(self, text: str, *, warning: bool = False) -> None:
        log.log(logging.WARNING if warning else logging.INFO, "%s", text)

    def watch(self, seen: Callable[[str], None]) -> None:
        """Do nothing: a site in this process shows no sign of life outside of its answers."""

    def _answer(self, site: str, name: str, task: Message) -> Message:
        try:
            request = decode_task(name, task, site)
            reply = self._worker(site, request.experiment).perform(request, lambda: bool(self.stopped()))
        except Exception as error:  # a wrong setting of one site costs only that site its round
            reply = refusal(site, name, error, tells_all=True)
        return encode_reply(reply, task.current_round)

    def _worker(self, site: str, experiment: str) -> SiteWorker:
        if site not in self._workers:
            self._workers[site] = SiteWorker(
                task=self.task, training=self.training, **self._arguments(site, experiment)
            )
        return self._workers[site]

    def _arguments(self, site: str, experiment: str) -> dict[str, Any]:
        """Return the arguments of the site's :class:`SiteWorker`, without task and site half."""
        settings = own_settings(self.local, site)
        checkpoints = Path(settings.get("state_root") or self.state)
        root = checkpoints if experiment else self.state
        self._folders[site] = root / safe_name(experiment or "run") / safe_name(site)
        return {
            "site": site,
            "settings": settings,
            "state_folder": self._folders[site],
            "num_threads": 1,
            "tells_all": True,
            "decoded": checkpoints / DECODED_PLACE / safe_name(site),
        }
