"""What ``fairflare compare`` says while it goes: what is to do, each figure as it comes, and the time left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fairflare.cli.screen import console, say
from fairflare.reporting.layout import counted, number, spread
from fairflare.reporting.results import find_results, read_results
from fairflare.reporting.table import metrics_of, summary_of
from fairflare_lab.cli.compare.runs import DONE, FAILED, RUNNING, Runner
from fairflare_lab.cli.compare.runs import Progress as RunProgress

if TYPE_CHECKING:
    from fairflare.core.fairness import FairnessSummary

MOST_LINES = 10  # of a run that goes on


def plan_in_words(runner: Runner) -> str:
    """Say ``2 rows x 3 seeds: 6 runs to do, 4 at once, in comparison; ...``."""
    rows = counted(len({p.run.entry.label for p in runner.all}), "row")
    seeds = counted(len({p.run.seed for p in runner.all}), "seed")
    left_out = len({p.run.held_out for p in runner.all if p.run.held_out})
    turns = f" x {counted(left_out, 'left-out site')}" if left_out else ""
    missing = sum(p.state != DONE for p in runner.all)
    return (
        f"{rows} x {seeds}{turns}: {missing} runs to do, "
        f"{min(missing, runner.at_once)} at once, in {runner.folder}; one line per step"
    )


def _ended_in_words(runner: Runner, progress: RunProgress, metric: str | None) -> list[str]:
    """Return a line for a run that ended, with its figure and the time left; one more for a row that is complete."""

    def of(one: RunProgress) -> tuple[str, FairnessSummary]:
        results = read_results(find_results(runner.place(one.run)))
        name = metric or metrics_of(results)[0]
        return name, summary_of(results, name)

    ended = sum(p.state in (DONE, FAILED) for p in runner.all)
    line = f"{ended}/{len(runner.all)} {progress.run.name}: {progress.state} in {progress.seconds:.0f} s"
    if progress.state != DONE:
        return [f"{line}{_left(runner)}: {progress.reason}"]
    row = [p for p in runner.all if p.run.entry.label == progress.run.entry.label]
    try:
        name, over = of(progress)
        line += f", {name} {number(over.mean)} on average, worst {number(over.worst)} ({over.worst_site or '-'})"
        if progress.run.held_out or len(row) == 1 or any(p.state != DONE for p in row):
            return [line + _left(runner)]
        means, worst = (spread([getattr(of(p)[1], of_all) for p in row]) for of_all in ("mean", "worst"))
    except (ValueError, IndexError) as error:  # such a metric: the table says it with all that there is
        return [f"{line}, no figure: {error}{_left(runner)}"]
    return [
        line + _left(runner),
        f"{progress.run.entry.label}, {len(row)} seeds: {name} {number(means.mean, means.sd)} on average, "
        f"worst {number(worst.mean, worst.sd)}",
    ]


class View:
    """A line for each run that ended; while runs go a bar for each on a terminal, in logs and pipes some lines.

    Attributes:
        bars: of the runs at work, and of all; shown once they are entered.
    """

    def __init__(self, runner: Runner, metric: str | None = None) -> None:
        self.runner, self.metric = runner, metric
        columns = (TextColumn(text) for text in ("{task.completed:>3.0f}/{task.total:.0f}", "{task.fields[note]}"))
        self.bars = Progress(TextColumn("{task.description}"), BarColumn(24), *columns, console=console)
        self._whole = self.bars.add_task("rounds", total=sum(p.of for p in runner.all), note="")
        self._bars: dict[str, TaskID] = {}
        self._told: dict[str, int] = {}

    def tell(self, progress: RunProgress) -> None:
        """Say that a run got on."""
        name, tenth = progress.run.name, MOST_LINES * progress.rounds // progress.of
        if progress.state in (DONE, FAILED):
            for line in _ended_in_words(self.runner, progress, self.metric):
                say(line, console)
        elif not self.bars.live.is_started and tenth > self._told.get(name, -1):
            self._told[name] = tenth
            say(f"{name}: round {progress.rounds} of {progress.of}{_left(self.runner)}", console)
        if name not in self._bars:
            self._bars[name] = self.bars.add_task(escape(name[:40]), total=progress.of, note="")
        at_work = progress.state == RUNNING
        self.bars.update(self._bars[name], completed=progress.rounds, visible=at_work)
        done = sum(p.rounds for p in self.runner.all)
        self.bars.update(self._whole, completed=done, note=_left(self.runner).lstrip(", "))


def _left(runner: Runner) -> str:
    seconds = runner.left()
    if not seconds:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f", about {f'{hours} h ' if hours else ''}{f'{minutes} min' if hours or minutes else f'{rest} s'} left"
