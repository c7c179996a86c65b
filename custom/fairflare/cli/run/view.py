"""How a run goes: in a terminal a bar for each site, elsewhere (a pipe, a log file) a line for each round."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from fairflare.core.fairness import higher_is_better
from fairflare.federation.collecting.transport import Listener
from fairflare.reporting.pictures import short_name

if TYPE_CHECKING:
    from fairflare.cli.run.here import PlanHere
    from fairflare.flare.export.recipes import FairRecipe

MAX_NAME = 20  # letters of a name beside a bar; it is cut in the middle, since the ends tell names apart


class RunView(Listener):
    """Shows the events of a run; a context manager.

    Args:
        sites: names.
        name: of the run.
        console: default: standard error, so that standard output has the table alone.
        metric: shown of each site where it has it; default: the first one that is not the loss.
        directions: ``{metric: whether more is better}``, where the task says so.
    """

    def __init__(
        self,
        sites: Sequence[str],
        name: str,
        console: Console | None = None,
        *,
        metric: str = "",
        directions: Mapping[str, bool] | None = None,
    ) -> None:
        self._metric, self._directions = metric, directions
        self._console = console or Console(stderr=True)
        self._bars = _Bars(sites, name, self._console) if self._console.is_terminal else None
        self._scores: dict[str, tuple[str, float]] = {}
        self._out: dict[str, list[str]] = {}  # sites that were left out just now, by phase and reason
        self._started = time.monotonic()

    def __enter__(self) -> RunView:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._say_who_is_out()
        if self._bars is not None:
            self._bars.stop()

    def event(self, kind: str, details: Mapping[str, Any]) -> None:
        if kind != "site" or details["ok"]:
            self._say_who_is_out()
        score = self._score(details.get("metrics") or {}) if kind == "site" else None
        if self._bars is not None:
            self._bars.event(kind, details, score)
            if kind == "site" and not details["ok"]:  # beside the bar there is seldom room for all of it
                self._site(details, score)
        elif kind == "phase" and details["phase"] in ("check", "validate"):
            what = "open their data" if details["phase"] == "check" else "measure a final model"
            self._line(f"{details['phase']}: {len(details['sites'])} site(s) {what}")
        elif kind == "site":
            self._site(details, score)
        elif kind == "round_done":
            self._round_done(details)

    # -------------------------------------------------------------------------------------------- lines

    def _site(self, details: Mapping[str, Any], score: tuple[str, float] | None) -> None:
        if not details["ok"]:
            self._out.setdefault(f"{_where(details)}: {{}} left out: {_reason(details)}", []).append(details["site"])
        elif score is not None and details["phase"] == "train":
            self._scores[details["site"]] = score

    def _say_who_is_out(self) -> None:
        """Return a line for each reason: a mistake of all sites is one mistake."""
        for text, sites in self._out.items():
            self._line(text.replace("{}", ", ".join(sites), 1))
        self._out.clear()

    def _round_done(self, details: Mapping[str, Any]) -> None:
        number, rounds = details["current_round"], details["num_rounds"]
        text = f"round {number} done ({number + 1} of {rounds}, {time.monotonic() - self._started:.0f} s)"
        finite = {site: value for site, (_, value) in self._scores.items() if math.isfinite(value)}
        if finite:
            name = next(iter(self._scores.values()))[0]
            text += f"; the model before it: {name} {statistics.fmean(finite.values()):.3f} on average"
            higher = higher_is_better(name, self._directions)
            if higher is not None:
                worst = (min if higher else max)(sorted(finite), key=finite.__getitem__)
                text += f", worst {finite[worst]:.3f} ({worst})"
        self._scores.clear()
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def _score(self, values: Mapping[str, Any]) -> tuple[str, float] | None:
        names = [self._metric] if self._metric in values else [name for name in values if name != "loss"][:1]
        return next(((name, float(values[name])) for name in names if values[name] is not None), None)


def view_of(recipe: FairRecipe | PlanHere, console: Console) -> RunView:
    """Return the view of a recipe that names its sites."""
    plan = recipe.plan
    metric, directions = plan.task.primary_metric, plan.task.directions()
    return RunView(plan.sites or [], recipe.name, console, metric=metric, directions=directions)


def _where(details: Mapping[str, Any]) -> str:
    phase = str(details["phase"])
    return phase if phase in ("check", "validate") else f"round {details['current_round']}, {phase}"


def _reason(details: Mapping[str, Any]) -> str:
    return str(details["reason"]).removeprefix(f"site {details['site']!r}: ")


# ------------------------------------------------------------------------------------------------ bars


class _Note(ProgressColumn):
    """What a site did last: the one column that gives way where the terminal is narrow."""

    def __init__(self) -> None:
        super().__init__(Column(ratio=1))

    def render(self, task: Task) -> Text:
        note: Text = task.fields["note"].copy()
        if task.fields["timed"]:
            note.append(f", {timedelta(seconds=int(task.elapsed or 0))}")
        note.no_wrap, note.overflow = True, "ellipsis"
        return note


class _Bars:
    """A bar for each site and one for the whole."""

    def __init__(self, sites: Sequence[str], name: str, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(12, table_column=Column(no_wrap=True, min_width=12)),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            _Note(),
            console=console,
            expand=True,
        )
        self._sites = {
            site: self._progress.add_task(short_name(site, MAX_NAME), total=1, note=Text(), timed=False)
            for site in sites
        }
        self._whole = self._progress.add_task(short_name(name, MAX_NAME), total=1, note=Text("starting"), timed=True)
        self.start, self.stop = self._progress.start, self._progress.stop

    def event(self, kind: str, details: Mapping[str, Any], score: tuple[str, float] | None) -> None:
        if kind == "phase":
            self._phase(details)
        elif kind == "site" and details["site"] in self._sites:
            self._site(details, score)
        elif kind == "round_done":
            self._progress.update(self._whole, completed=details["current_round"] + 1)

    def _phase(self, details: Mapping[str, Any]) -> None:
        done, rounds, name = details["current_round"], details["num_rounds"], details["phase"]
        for site in details["sites"]:
            if site in self._sites:
                self._progress.update(self._sites[site], total=rounds + 1, completed=done, note=Text(f"{name} ..."))
        self._progress.update(self._whole, total=rounds, completed=done, note=Text(name))

    def _site(self, details: Mapping[str, Any], score: tuple[str, float] | None) -> None:
        if details["ok"]:
            measured = "" if score is None else f" {score[0]} {score[1]:.3f}"
            note = Text(f"{details['phase']}{measured} ({details['seconds']:.1f} s)")
        else:
            note = Text.assemble(("left out: ", "red"), _reason(details))
        step = 1 if details["phase"] == "validate" else 0
        self._progress.update(self._sites[details["site"]], note=note, completed=details["current_round"] + step)
