"""Print the progress of ``fairflare compare``: the runs to do, and each figure when it is known."""

from __future__ import annotations

from collections.abc import Sequence

from fairflare.cli.screen import console, say
from fairflare.reporting.layout import counted, number, spread
from fairflare.reporting.results import find_results, read_results
from fairflare.reporting.table import metrics_of, summary_of
from fairflare_lab.cli.compare.runs import DONE, FAILED, RUNNING, Progress, Runner


def plan_in_words(runner: Runner) -> str:
    """Return a comparison's runs in words: ``2 rows x 3 seeds: 6 runs to do, 4 at once, in comparison; ...``."""
    rows = counted(len({p.run.entry.label for p in runner.all}), "row")
    seeds = counted(len({p.run.seed for p in runner.all}), "seed")
    left_out = len({p.run.held_out for p in runner.all if p.run.held_out})
    turns = f" x {counted(left_out, 'left-out site')}" if left_out else ""
    missing = sum(p.state != DONE for p in runner.all)
    return (
        f"{rows} x {seeds}{turns}: {missing} runs to do, "
        f"{min(missing, runner.at_once)} at once, in {runner.folder}; one line per step"
    )


def tell(runner: Runner, progress: Progress, metric: str | None = None) -> None:
    """Print that a run began, with its log; or that it ended, with its metric, and the mean of a completed row."""
    if progress.state == RUNNING:
        say(f"{progress.run.name}: begun, log: {runner.place(progress.run) / 'run.log'}", console)
        return
    ended = sum(p.state in (DONE, FAILED) for p in runner.all)
    line = f"{ended}/{len(runner.all)} {progress.run.name}: {progress.state} in {progress.seconds:.0f} s"
    if progress.state != DONE:
        say(f"{line}: {progress.reason}")
        return
    row = [p for p in runner.all if p.run.entry.label == progress.run.entry.label]
    try:
        name, figure = _figure(runner, [progress], metric)
        say(f"{line}, {figure}", console)
        if len(row) > 1 and all(p.state == DONE and not p.run.held_out for p in row):
            say(f"{progress.run.entry.label}, {len(row)} seeds: {_figure(runner, row, name)[1]}", console)
    except (ValueError, IndexError) as error:  # an unknown metric: the table reports it, with the known ones
        say(f"{line}, no figure: {error}", console)


def _figure(runner: Runner, runs: Sequence[Progress], metric: str | None) -> tuple[str, str]:
    """Return the metric's name, and words with the average and the worst site over some runs of one row."""
    found = [read_results(find_results(runner.place(one.run))) for one in runs]
    name = metric or metrics_of(found[0])[0]
    over = [summary_of(results, name) for results in found]
    means, worst = (spread([getattr(of, figure) for of in over]) for figure in ("mean", "worst"))
    where = f" ({over[0].worst_site or '-'})" if len(over) == 1 else ""
    return name, (f"{name} {number(means.mean, means.sd)} on average, worst {number(worst.mean, worst.sd)}{where}")
