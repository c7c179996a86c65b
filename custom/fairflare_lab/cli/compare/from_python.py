"""Compare methods from Python: what ``fairflare.compare`` does."""

from __future__ import annotations

import html
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.api import WIDTH, Bar, quietly
from fairflare_lab.cli.compare.command import series_of
from fairflare_lab.cli.compare.runs import DONE, Runner
from fairflare_lab.cli.compare.series import seeds_of
from fairflare_lab.compare.comparison import both_tables, comparison_of, row_table
from fairflare_lab.page.outcome import plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fairflare.reporting.documents import RunResults


class RunsCompared:
    """Hold the runs of a comparison: printed, it is the terminal's tables, and in a notebook the same."""

    def __init__(self, folder: Path, runs: Sequence[RunResults], metric: str | None, reference: str) -> None:
        self.folder = folder
        self.comparison = comparison_of(runs, metric, reference)

    def __repr__(self) -> str:
        return both_tables(replace(self.comparison, problem=""), width=WIDTH)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def table(self) -> pd.DataFrame:
        """Return mean and standard deviation over the seeds of each row of the comparison, unrounded."""
        import pandas as pd

        return pd.read_csv(io.StringIO(row_table(self.comparison, style="csv")), index_col="method")

    def plot(self) -> Figure:
        """Return the picture of all rows at all sites."""
        return plot(self.folder)


def compare(
    methods: Sequence[str],
    *,
    seeds: int | Sequence[int] = 3,
    settings: Mapping[str, Any] | None = None,
    workspace: str | Path = "comparison",
    jobs: int | None = None,
    simulator: int | None = None,
    overwrite: bool = False,
    metric: str | None = None,
    **options: Any,
) -> RunsCompared:
    """Do the runs of a comparison that are missing, and return all of them; see :func:`fairflare.compare`."""
    given = {
        "seeds": seeds_of(seeds if isinstance(seeds, int) else [*seeds]),
        "settings": dict(settings or {}),
        **{name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
    }
    folder = Path(workspace).absolute()
    screen, notes = sys.stderr, io.StringIO()
    with redirect_stderr(notes):
        series, local = series_of(list(methods), None, given)
        runner = Runner(
            series, folder, local, at_once=jobs or os.cpu_count() or 1, simulator=simulator, overwrite=overwrite
        )
    folder.mkdir(parents=True, exist_ok=True)
    with quietly(folder / "compare.log", notes):
        bar = Bar(screen, len(runner.all), "runs")
        runner.go(lambda progress: bar.draw(sum(one.state == DONE for one in runner.all)))
    if failed := next((one for one in runner.all if one.state != DONE), None):
        raise RuntimeError(
            f"run {failed.run.name} {failed.state}: {failed.reason}; log: {runner.place(failed.run) / 'run.log'}"
        )
    return RunsCompared(runner.folder, runner.results(), metric, series.refers_to())
