"""Write the tables of a comparison at its end, to the screen and as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fairflare.cli.screen import console, say, user_errors

if TYPE_CHECKING:
    from fairflare.reporting.documents import RunResults
    from fairflare_lab.cli.compare.runs import Runner
    from fairflare_lab.compare.comparison import Comparison
    from fairflare_lab.papers.presets import PaperTable


def report(
    runner: Runner, reference: str, metric: str | None, paper: PaperTable | None = None, *, tables: bool = True
) -> tuple[int, Comparison | None]:
    """Write a comparison's tables as files, and to the screen where ``tables`` is true.

    If ``paper`` is given, the last table has the columns of this paper's table. If the runs leave sites out, the tables
    show models at seen and unseen sites, and no comparison is returned.

    Returns:
        The exit code, and the comparison of the runs; ``None`` if none completed, or each leaves a site out.
    """
    from fairflare_lab.cli.compare.runs import DONE
    from fairflare_lab.compare.comparison import comparison_of, row_table
    from fairflare_lab.compare.difference_table import difference_table
    from fairflare_lab.compare.group_gaps import (
        OF_LEFT_OUT,
        collect_left_out,
        gaps_in_words,
        has_groups,
    )
    from fairflare_lab.compare.paper_table import paper_table
    from fairflare_lab.compare.unseen import unseen_table

    runs = runner.results()
    if not runs:
        say("", mark="[red]no run completed[/red]")
        return 1, None
    put = partial(_put, runner.folder, tables)
    made = None
    with user_errors():
        if any(progress.run.held_out for progress in runner.all):
            of_runs = runner.collect_held_out()
            put("unseen", partial(unseen_table, of_runs, metric))
            rows: Mapping[str, Sequence[RunResults]] = collect_left_out(of_runs)
            against, how = next(iter(rows), ""), [OF_LEFT_OUT]
        else:
            known = reference if any(run.info.label == reference for run in runs) else None
            made = comparison_of(runs, metric, known)
            put("table", partial(row_table, made))
            if known and made.differences:
                put("differences", partial(difference_table, made.differences, known), "\n")
            if why := made.problem if known else f"no differences: no run of {reference} completed":
                say(why)
            rows = {row.label: row.runs for row in made.rows}
            against, how = made.reference, list[str]()
        if has_groups(rows):
            _put(runner.folder, False, "group_gaps", partial(gaps_in_words, rows, against, *how))
        if paper is not None:
            put("paper_table", partial(paper_table, paper.title, paper.columns, runs), "\n", ("md",))
    gaps = ", with gaps between groups of people in group_gaps.md" * has_groups(rows)
    say(f"tables: {runner.folder}{gaps}; as a page: fairflare report {runner.folder}", console)
    return int(any(progress.state != DONE for progress in runner.all)), made


def _put(
    folder: Path,
    shown: bool,
    name: str,
    table: Callable[..., str],
    before: str = "",
    kinds: Sequence[str] = ("csv", "md"),
) -> None:
    """Print a table after the text ``before``, and write it as files."""
    if shown:
        typer.echo(before + table(width=console.width))
    for ending in kinds:
        text = table(style={"md": "markdown"}.get(ending, ending))
        (folder / f"{name}.{ending}").write_text(text + "\n", encoding="utf-8")
