"""Show a run's progress by a line for each round; in a terminal a last line names the sites at work."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fairflare.base.checks import MAX_NAMES, few
from fairflare.core.fairness import higher_is_better
from fairflare.core.statistics.footing import OWN
from fairflare.federation.collecting.transport import Listener

if TYPE_CHECKING:
    from fairflare.federation.plan.plan import Plan

#: Texts on the sites' work in the phases of a run that belong to no round, such as the final test.
OF_ALL = {"check": "open their data", "validate": "measure a final model"}


class RunView(Listener):
    """Show the events of a run, as a context manager.

    Args:
        console: console for the lines; default: standard error, so that standard output has only the table.
        metric: metric that is shown for each site; default, or where a site lacks it: the first that is not the loss.
        directions: ``{metric: whether more is better}``, for metrics whose direction the task declares.
    """

    def __init__(
        self, console: Console | None = None, *, metric: str = "", directions: Mapping[str, bool] | None = None
    ) -> None:
        self._metric, self._directions = metric, directions
        self._console = console or Console(stderr=True)
        self._at_work = self._console.status("starting")  # status line, shown in a terminal only
        self._awaited: list[str] = []
        self._out: dict[str, list[str]] = {}  # sites whose absence is not printed yet, by phase and reason
        self._started = self._since = time.monotonic()
        self._phase = "start"  # in progress
        self._seconds: dict[str, float] = {}  # of each phase until now

    def __enter__(self) -> RunView:
        self._at_work.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._say_who_is_out()
        self._at_work.stop()
        self._begin("")
        if kind is None and "validate" in self._seconds:  # the run came to its final test
            spent = (f"{phase} {seconds:.0f}" for phase, seconds in self._seconds.items())
            self._line(f"seconds: {', '.join(spent)} (server: between the phases and at the end)")

    def _begin(self, phase: str) -> None:
        """Count the seconds since the last call for the phase that ends, and begin another."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def event(self, kind: str, details: Mapping[str, Any]) -> None:
        if kind != "site" or details["ok"]:
            self._say_who_is_out()
        if kind == "phase":
            self._awaited = list(details["sites"])
            self._begin(phase := details["phase"])
            if phase in OF_ALL:
                self._line(f"{phase}: {len(self._awaited)} site(s) {OF_ALL[phase]}")
        elif kind == "note":
            self._line(details["text"])
        elif kind == "site":
            self._site(details)
        elif kind == "round_done":
            self._round_done(details)
        if kind in ("phase", "site"):
            self._at_work.update(Text(f"{_where(details)}: {few(self._awaited, MAX_NAMES) or 'all sites'} ..."))

    def _site(self, details: Mapping[str, Any]) -> None:
        site = details["site"]
        self._awaited = [name for name in self._awaited if name != site]
        if not self._awaited:
            self._begin("server")
        if not details["ok"]:
            reason = str(details["reason"]).removeprefix(f"site {site!r}: ")
            self._out.setdefault(f"{_where(details)}: {{}} left out: {reason}", []).append(site)

    def _say_who_is_out(self) -> None:
        """Print a line for each reason why sites were left out, with all sites that have this reason."""
        for text, sites in self._out.items():
            self._line(text.replace("{}", ", ".join(sites), 1))
        self._out.clear()

    def _round_done(self, details: Mapping[str, Any]) -> None:
        number, rounds = details["current_round"], details["num_rounds"]
        text = f"round {number} done ({number + 1} of {rounds}, {time.monotonic() - self._started:.0f} s)"
        scores = {
            site: score for site, metrics in details.get("metrics", {}).items() if (score := self._score(metrics))
        }
        finite = {site: value for site, (_, value) in scores.items() if math.isfinite(value)}
        if finite:
            name = next(iter(scores.values()))[0]
            over = details.get("over", "") * any(OWN + name in metrics for metrics in details["metrics"].values())
            text += f"; the model before it: {name}{over} {statistics.fmean(finite.values()):.3f} on average"
            if (higher := higher_is_better(name, self._directions)) is not None:
                worst = (min if higher else max)(sorted(finite), key=finite.__getitem__)
                text += f", worst {finite[worst]:.3f} ({worst})"
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def _score(self, values: Mapping[str, Any]) -> tuple[str, float] | None:
        names = [self._metric] if self._metric in values else [name for name in values if name != "loss"][:1]
        return next(((name, float(values[name])) for name in names if values[name] is not None), None)


def view_of(plan: Plan, console: Console) -> RunView:
    """Return a view of a run, which shows the primary metric of its task."""
    return RunView(console, metric=plan.task.primary_metric, directions=plan.task.directions())


def _where(details: Mapping[str, Any]) -> str:
    phase = str(details["phase"])
    return phase if phase in OF_ALL else f"round {details['current_round']}, {phase}"
