"""How a run goes, in a terminal: a progress bar for each site and one for the whole."""

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

    def _phase(self, details: Mapping[str, Any]) -> None:
        done, rounds, name = details["current_round"], details["num_rounds"], details["phase"]
        for site in details["sites"]:
            if site in self._bars:
                self._progress.update(self._bars[site], total=rounds + 1, completed=done, note=f"{name} ...")
        self._progress.update(self._whole, total=rounds, completed=done, note=name)

    def _site(self, details: Mapping[str, Any]) -> None:
        if details["ok"]:
            values = details.get("metrics") or {}
            score = next((f"{k} {v:.3f}" for k, v in values.items() if k != "loss"), "")
            note = f"{details['phase']} {escape(score)} ({details['seconds']:.1f} s)"
        else:
            note = f"[red]left out:[/red] {escape(details['reason'][:70])}"
        step = 1 if details["phase"] == "validate" else 0
        self._progress.update(self._bars[details["site"]], note=note, completed=details["current_round"] + step)
