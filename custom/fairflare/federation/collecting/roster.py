"""Choose the sites that are asked: all sites of the job except those that were silent or late too often."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from fairflare.exchange.messages import FURTHER
from fairflare.federation.collecting.transport import Transport

ALL = ""  # stands for all phases, in place of a phase's name


@dataclass
class _Patience:
    """Count the missed answers of one site, in all phases or in phases of one name.

    Attributes:
        missed: number of successive phases without an answer in time.
        drops: how often the site was dropped since its last answer in time.
        again: first round in which the site may be asked again.
        alive: whether the site has shown a sign of life since it was dropped.
    """

    missed: int = 0
    drops: int = 0
    again: int = 0
    alive: bool = False


class Roster:
    """Choose the sites to ask, by their answers so far.

    A site that gave no answer *in time* in ``max_missed`` successive phases is dropped: a dead site and one that is
    always late cost the run the same. A site that answers ``train`` in time and never ``anchor`` is dropped from
    ``anchor`` alone.

    A dropped site that shows a sign of life is asked again, after 2 rounds the first time, then after 4, 8, ...: each
    time that it is late again costs a whole timeout. After an answer in time all its misses are forgotten.

    Args:
        transport: reports the sites of the job, and each sign of life of a site.
        max_missed: number of successive phases without an answer in time after which a site is dropped.
        min_sites: all sites are asked when fewer than this would be left.

    Attributes:
        excluded: reason for each site that is never asked, as its data do not fit together with the other sites'.
    """

    def __init__(self, transport: Transport, max_missed: int, min_sites: int) -> None:
        self.transport, self.max_missed, self.min_sites = transport, max_missed, min_sites
        self.excluded: dict[str, str] = {}
        self._patience: dict[tuple[str, str], _Patience] = {}
        self._lock = threading.Lock()  # :meth:`seen` is called in the transport's threads
        transport.watch(self.seen)

    def list_known(self) -> list[str]:
        """Return the sorted names of the job's sites that are not excluded."""
        return sorted(set(self.transport.sites()) - set(self.excluded))

    def live(self, current_round: int) -> list[str]:
        """Return the sites to ask in the first phase (training) of a round, sorted."""
        known = self.list_known()
        live = [site for site in known if self._asks(site, ALL, current_round)]
        return live if len(live) >= self.min_sites else known

    def willing(self, sites: Iterable[str], name: str, current_round: int) -> list[str]:
        """Return those of ``sites`` that are asked in the second or a later phase of a round, sorted."""
        return sorted(site for site in sites if self._asks(site, name, current_round))

    def doubtful(self, sites: Iterable[str]) -> set[str]:
        """Return those of ``sites`` that were dropped and have shown no sign of life since."""
        with self._lock:
            return {site for site in sites if (p := self._patience.get((site, ALL))) and p.drops and not p.alive}

    def why_not(self, asked: Iterable[str], name: str = ALL, among: Iterable[str] | None = None) -> dict[str, str]:
        """Return for each site that is not asked the reason why it is not asked.

        Args:
            asked: names of the sites that are asked.
            name: name of the phase that is missed too often; ``ALL``: any phase.
            among: sites to consider; ``None`` for all of the job, the excluded ones too.
        """
        kind = f"{name} " if name else ""
        reason = f"not asked: no answer in time in {self.max_missed} {kind}phase{'s' * (self.max_missed > 1)} running"
        silent = dict.fromkeys(sorted({*(self.list_known() if among is None else among)} - set(asked)), reason)
        return silent if among is not None else {**silent, **self.excluded}

    def seen(self, site: str) -> None:
        """Record that a site showed a sign of life other than an answer in time."""
        with self._lock:
            for (name, _), patience in self._patience.items():
                if name == site:
                    patience.alive = True

    def record_answer(self, site: str, name: str) -> None:
        """Record that a site answered in time, and forget its earlier missing answers."""
        with self._lock:
            self._patience.pop((site, ALL), None)
            self._patience.pop((site, name), None)

    def record_miss(self, site: str, name: str, current_round: int) -> None:
        """Record that a site gave no answer in time in a phase, and drop the site if it missed too many."""
        with self._lock:
            dropped = self._count(site, ALL, current_round)
            if name in FURTHER and self._count(site, name, current_round) and not dropped:
                dropped = self._patience[site, name]
        if dropped:
            self.transport.say(
                f"site {site!r} gave no answer in time in {dropped.missed} phases running (this one: {name}) and is "
                f"not asked again until it shows up, and not before round {dropped.again}",
                warning=True,
            )

    def _asks(self, site: str, name: str, current_round: int) -> bool:
        with self._lock:
            patience = self._patience.get((site, name))
            return patience is None or not patience.drops or (patience.alive and current_round >= patience.again)

    def _count(self, site: str, name: str, current_round: int) -> _Patience | None:
        patience = self._patience.setdefault((site, name), _Patience())
        patience.missed += 1
        if patience.missed < self.max_missed:
            return None
        patience.drops += 1
        patience.again = current_round + 2**patience.drops
        patience.alive = False
        return patience
