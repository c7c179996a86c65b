"""Print the progress of ``fairflare compare``: the runs to do, and each run that begins or ends."""

from __future__ import annotations

from fairflare.cli.screen import console, say
from fairflare.reporting.layout import format_count
from fairflare_lab.cli.compare.runs import DONE, FAILED, RUNNING, Progress, Runner


def plan_in_words(runner: Runner) -> str:
    """Return a comparison's runs in words: ``2 rows x 3 seeds: 6 runs to do, 4 at once, in comparison; ...``."""
    rows = format_count(len({p.run.entry.label for p in runner.all}), "row")
    seeds = format_count(len({p.run.seed for p in runner.all}), "seed")
    left_out = len({p.run.held_out for p in runner.all if p.run.held_out})
    turns = f" x {format_count(left_out, 'left-out site')}" if left_out else ""
    missing = sum(p.state != DONE for p in runner.all)
    return (
        f"{rows} x {seeds}{turns}: {missing} runs to do, "
        f"{min(missing, runner.at_once)} at once, in {runner.folder}; one line per step, and how long "
        "the rest takes when the first has ended"
    )


def tell(runner: Runner, progress: Progress) -> None:
    """Print that a run began, with its log; or that it ended, and why it failed."""
    if progress.state == RUNNING:
        say(f"{progress.run.name}: begun, log: {runner.place(progress.run) / 'run.log'}", console)
        return
    ended = sum(p.state in (DONE, FAILED) for p in runner.all)
    line = f"{ended}/{len(runner.all)} {progress.run.name}: {progress.state} in {progress.seconds:.0f} s"
    if progress.state == DONE:
        say(f"{line}{_rest(runner)}", console)
    else:
        say(f"{line}: {progress.reason}")


def _rest(runner: Runner) -> str:
    """Return how long the runs that are left take, by the mean of those that completed here; empty if none is left."""
    left = sum(p.state not in (DONE, FAILED) for p in runner.all)
    took = [p.seconds for p in runner.all if p.state == DONE and p.seconds]
    minutes = left * sum(took) / len(took) / min(left, runner.at_once) / 60 if left else 0.0
    return f"; {left} left, about {max(1, round(minutes))} min" if left else ""
