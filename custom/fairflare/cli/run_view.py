"""How a run goes: in a terminal a progress bar for each site and one for the whole, elsewhere a line for each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fairflare.federation.transport import Listener


class RunView(Listener):
    """Draws the events of a run; a context manager.

    Args:
        sites: names.
        name: of the run.
        console: default: standard output.
    """

    def __init__(self, sites: Sequence[str], name: str, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(24),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._bars = {site: self._progress.add_task(site, total=1, note="") for site in sites}
        self._whole = self._progress.add_task(name, total=1, note="starting")
        self._scores: dict[str, tuple[str, float]] = {}  # of the received model, in the round that goes on

    def __enter__(self) -> RunView:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def event(self, kind: str, details: Mapping[str, Any]) -> None:
        if kind == "phase":
            self._phase(details)
        elif kind == "site" and details["site"] in self._bars:
            self._site(details)
        elif kind == "round_done":
            self._progress.update(self._whole, completed=details["current_round"] + 1)
            if not self._progress.console.is_terminal:
                self._say(escape(self._round(details)))
            self._scores.clear()

    def _phase(self, details: Mapping[str, Any]) -> None:
        done, rounds, name = details["current_round"], details["num_rounds"], details["phase"]
        for site in details["sites"]:
            if site in self._bars:
                self._progress.update(self._bars[site], total=rounds + 1, completed=done, note=f"{name} ...")
        self._progress.update(self._whole, total=rounds, completed=done, note=name)

    def _site(self, details: Mapping[str, Any]) -> None:
        if details["ok"]:
            values = details.get("metrics") or {}
            first = next(((k, v) for k, v in values.items() if k != "loss"), None)
            score = "" if first is None else f"{first[0]} {first[1]:.3f}"
            if first is not None and details["phase"] == "train":
                self._scores[details["site"]] = first
            note = f"{details['phase']} {escape(score)} ({details['seconds']:.1f} s)"
        else:
            note = "[red]left out[/red]"
            self._say(
                f"[red]left out[/red] of {details['phase']}: {escape(details['site'])}: {escape(details['reason'])}"
            )
        step = 1 if details["phase"] == "validate" else 0
        self._progress.update(self._bars[details["site"]], note=note, completed=details["current_round"] + step)

    def _round(self, details: Mapping[str, Any]) -> str:
        """A round that is over: how far the sites were apart when it began."""
        line = f"round {details['current_round'] + 1} of {details['num_rounds']} done"
        if not self._scores:
            return line
        low, high = (pick(self._scores, key=lambda site: self._scores[site][1]) for pick in (min, max))
        name, lowest = self._scores[low]
        return f"{line}; the received model: {name} {lowest:.3f} ({low}) to {self._scores[high][1]:.3f} ({high})"

    def _say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=not self._progress.console.is_terminal)
