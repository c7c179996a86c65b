"""Sites whose labels do not go with the others': noticed by their signs, said, and dealt with as told.

A site is honest in protocol and its label map is off by one: whoever weighs up the sites that the model serves badly
weighs up this one. A sign is that the common model is far worse there than at the others while the site's update points
elsewhere; two rounds running with a sign, and the site's own model as good there as the common one is at the others (or
the site the heaviest of all), make a suspect. Nothing is measured that the rounds do not measure anyway, as long as no
site is served far worse than the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fairflare.core.aggregation.suspicion import contradicted, lower_than_others, points_away
from fairflare.core.aggregation.updates import leave_one_out_cosines, squared_norms
from fairflare.exchange.messages import MEASURE_TRAINED, BySite
from fairflare.federation.site.replies import TRAINED_METRIC
from fairflare.reporting.documents import RoundRecord, Warned

if TYPE_CHECKING:
    from fairflare.base.task import Metric
    from fairflare.federation.collecting.collector import Collector
    from fairflare.federation.plan.run_settings import RunSettings

ROUNDS = 2  # running with a sign
FAR, BEHIND = 0.2, 0.1  # of the metric's range
AWAY = -0.1  # a cosine below it points away


@dataclass
class _Case:
    """Against one site.

    Attributes:
        signs: rounds running with a sign.
        suspected: there were enough.
        again: first round in which it is asked again, with ``suspects=out``.
        times: how often it was left out.
    """

    signs: int = 0
    suspected: bool = False
    again: int = 0
    times: int = 0


class Suspects:
    """Of one run.

    Args:
        run: settings.
        metric: the primary one. Without limits it does not say what is far, and nobody is suspected.
        say: a line for the server's log.

    Raises:
        ValueError: something is to be done about suspects, and the metric has no limits.
    """

    def __init__(self, run: RunSettings, metric: Metric, say: Callable[..., None]) -> None:
        self.run, self.metric, self.say = run, metric.name, say
        self.width = metric.high - metric.low
        #: Makes values of shares of the range, larger is better.
        self.sign = (1.0 if metric.higher_is_better else -1.0) / self.width if math.isfinite(self.width) else 0.0
        if not self.sign and run.suspects != "warn":
            raise ValueError(
                f"suspects={run.suspects} goes by how far a site's {metric.name!r} is behind, and that lies in "
                f"{metric.range}: declare its limits (low, high), or set suspects=warn"
            )
        self._cases: dict[str, _Case] = {}
        self._far: set[str] = set()  # behind the others in the last round: they are asked what their own model reaches

    @property
    def suspected(self) -> list[str]:
        """Sites that have shown signs long enough."""
        return sorted(site for site, case in self._cases.items() if case.suspected)

    def held(self) -> list[str]:
        """Sites that get no more than the equal share in the round to come."""
        return self.suspected if self.run.suspects == "equal" else []

    def left_out(self, sites: Iterable[str], current_round: int) -> dict[str, str]:
        """Sites that are not asked in a round, and why; most of the sites, and ``min_sites``, are asked in any case."""
        if self.run.suspects != "out":
            return {}
        known = sorted(sites)
        out = [site for site in self.suspected if site in known and self._cases[site].again > current_round]
        most = max(min((len(known) - 1) // 2, len(known) - self.run.min_sites), 0)
        kept = sorted(out, key=lambda site: -self._cases[site].signs)[:most]
        reason = "not asked before round {}: its labels may be off (suspects=out)"
        return {site: reason.format(self._cases[site].again) for site in sorted(kept)}

    def directives(self, sites: Iterable[str]) -> dict[str, Any]:
        """What the sites are told besides."""
        asked = {site: True for site in sorted(sites) if site in self._far or site in self._cases}
        return {MEASURE_TRAINED: BySite(asked)} if asked else {}

    def look(self, collector: Collector, record: RoundRecord) -> dict[str, float]:
        """Cosine of every site's update with the others' directions, all of one length.

        Empty as long as no site is behind the others: it takes three readings of all local models.
        """
        if not lower_than_others(self._received(record), BEHIND, deviations=0.0):
            return {}
        inputs = collector.inputs()
        squares = squared_norms(inputs.states, inputs.received, inputs.parameters)
        lengths = {site: 1 / math.sqrt(square) if 0 < square < math.inf else 0.0 for site, square in squares.items()}
        return leave_one_out_cosines(inputs.states, inputs.received, lengths, inputs.parameters)

    def judge(self, record: RoundRecord, stats: Mapping[str, Mapping[str, Any]], cosines: Mapping[str, float]) -> None:
        """Looks at a round that is weighed; adds warnings, and what was looked at, to its record."""
        received = self._received(record)
        said = {site: stats[site].get(TRAINED_METRIC) for site in record.accepted if site in stats}
        own = {site: self.sign * value for site, value in said.items() if value is not None and math.isfinite(value)}
        self._far = lower_than_others(received, FAR)
        proven = contradicted(received, own, FAR)
        heavy = points_away(cosines, _largest(record), AWAY) & lower_than_others(received, BEHIND, deviations=0.0)
        odd = {site for site in self._far if cosines.get(site, 1.0) < 0 and (site in proven or site not in own)}
        for site in record.accepted:
            case = self._cases.get(site, _Case())
            if site not in odd | heavy:
                if self._cases.pop(site, None) is not None and case.suspected:
                    self.say(f"round {record.current_round}: site {site!r} is not suspected any more")
                continue
            self._cases[site] = case
            case.signs += 1
            if case.signs >= ROUNDS and site in proven | heavy:
                self._suspect(site, case, record)
                numbers = self._numbers(site, received, own, cosines)
                self.say(f"round {record.current_round}: site {site!r} is suspected: {numbers}")
        if cosines:
            record.details = {
                **record.details,
                "suspects": {
                    site: {"cosine": cosines.get(site), "trained_metric": said.get(site), "signs": self._signs(site)}
                    for site in record.accepted
                },
            }

    def _suspect(self, site: str, case: _Case, record: RoundRecord) -> None:
        case.suspected = True
        if self.run.suspects == "out":
            case.times += 1
            case.again = record.current_round + 1 + 2**case.times
        done = {
            "warn": "it counts as before",
            "equal": "from the next round on it has the equal share at most",
            "out": f"it is not asked before round {case.again}",
        }[self.run.suspects]
        text = (
            "its labels may be off: the common model is far worse there than at the others, and its update points "
            f"elsewhere; {done} (suspects={self.run.suspects})"
        )
        record.warnings = [*record.warnings, Warned(site, "suspect", float(case.signs), float(case.signs), text)]
        self.say(f"round {record.current_round}: site {site!r}: {text}", warning=True)

    def _numbers(
        self, site: str, received: Mapping[str, float], own: Mapping[str, float], cosines: Mapping[str, float]
    ) -> str:
        others = statistics.median(
            abs(x) * self.width for name, x in received.items() if name != site and math.isfinite(x)
        )
        here = abs(received[site]) * self.width
        mine = f", its own model {abs(own[site]) * self.width:.3f}" if site in own else ""
        return (
            f"{self.metric} of the common model {here:.3f}, median of the others {others:.3f}{mine}; "
            f"cosine with the others' updates {cosines[site]:.2f}; {self._signs(site)} rounds running"
        )

    def _signs(self, site: str) -> int:
        return self._cases[site].signs if site in self._cases else 0

    def _received(self, record: RoundRecord) -> dict[str, float]:
        """Of the model that the sites received, in shares of the range, larger is better."""
        return {site: self.sign * record.validation[site].get(self.metric, math.nan) for site in record.accepted}

    # -- what outlives a round

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for the checkpoint."""
        return {"cases": {site: asdict(case) for site, case in self._cases.items()}, "far": sorted(self._far)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; an older checkpoint has nothing."""
        self._cases = {site: _Case(**case) for site, case in state.get("cases", {}).items()}
        self._far = set(state.get("far", ()))


def _largest(record: RoundRecord) -> dict[str, float]:
    """Largest weight of each site in any layer."""
    if record.site_weights is not None:
        return dict(record.site_weights)
    found: dict[str, float] = {}
    for by in (record.layers or {}).values():
        for site, values in by.items():
            found[site] = max(found.get(site, 0.0), values["weight"])
    return found
