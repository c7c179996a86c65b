"""Start runs and read their results from Python: the functions that ``import fairflare`` offers.

A run from here is the run of the command line: the same folders, the same bits.
"""

from __future__ import annotations

import html
import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, cast

from rich.console import Console

from fairflare.base.plugins import PYTHON, load_plugins
from fairflare.federation.collecting.transport import Listener

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from fairflare.base.task import Task
    from fairflare.federation.plan.describe import InUse, Listed
    from fairflare.methods.base.rule import Rule
    from fairflare.methods.base.training import LocalTraining
    from fairflare.reporting.documents import RunResults as Document

WIDTH, WIDE = 100, 30  # characters of a printed table, and of a progress bar


class Comparison(Protocol):
    """Describe the result of :func:`compare`: printed, it is the terminal's tables.

    Attributes:
        folder: folder of the comparison.
    """

    folder: Path

    def table(self) -> pd.DataFrame:
        """Return mean and standard deviation over the seeds of each row of the comparison."""

    def plot(self) -> Figure:
        """Return the picture of all rows at all sites."""


class Results:
    """Hold the results of one run: printed, it is the terminal's table, and in a notebook the same.

    Args:
        folder: folder of the run, or of anything that holds one run, such as a download of FLARE's.
        task: what the run learned; default: as its model file says.

    Attributes:
        folder: the folder.
        document: the content of ``results.json`` (docs/results_reference.md).
    """

    def __init__(self, folder: str | Path, task: Task | None = None) -> None:
        from fairflare.reporting.results import find_results, read_results

        self.folder, self._task = Path(folder), task
        self.document: Document = read_results(find_results(self.folder))

    @classmethod
    def read(cls, folder: str | Path) -> Results:
        """Read the results of a run in a folder.

        Raises:
            ValueError: the folder holds no run, or several.
        """
        return cls(folder)

    def __repr__(self) -> str:
        from fairflare.reporting.table import fairness_table

        return fairness_table(self.document, width=WIDTH)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def table(self, metric: str | None = None) -> pd.DataFrame:
        """Return the metrics with one row a site, unrounded, and the interval of the primary metric.

        Args:
            metric: the only metric of the table; default: all that the task shows in tables.

        Raises:
            ValueError: the run does not have the metric.
        """
        import pandas as pd

        from fairflare.reporting.table import fairness_table, table_of

        text = fairness_table(self.document, metric=metric, style="csv")
        sites = len(table_of(self.document, metric).rows)  # rows of totals follow
        return pd.read_csv(io.StringIO(text), index_col="site", nrows=sites)

    def plot(self) -> Figure:
        """Return the page's picture of the sites, a bar or dot each, with intervals.

        Raises:
            ValueError: the package that draws (``fairflare_lab``) is not installed.
        """
        return cast("Figure", _find_in_lab("plot")(self.folder))

    def model(self, which: Literal["best", "last"] | None = None) -> torch.nn.Module:
        """Return the run's network with its weights, in evaluation mode, on the CPU.

        Args:
            which: the best model by validation, or the last; default: the best if there is one.

        Raises:
            ValueError: the run has no such model, tensors of it stayed at the sites, or the task has code of its own
                (read such a run with the task: ``Results(folder, task)``).
        """
        from fairflare.prediction.recall import recall
        from fairflare.prediction.saved_model import read_whole

        saved = read_whole(self.folder, which)
        return saved.network(self._task or recall(saved.record, saved.path.parent).task).eval()


def run(
    method: str | None = None,
    *,
    rule: Rule | None = None,
    training: LocalTraining | None = None,
    task: str | Task | None = None,
    data: str | Path | None = None,
    sites: int | Sequence[str] = 0,
    rounds: int | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    method_file: str | Path | None = None,
    simulator: bool = False,
    jobs: int | None = None,
    workspace: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Results:
    """Run a method and return its results: in this process, or in FLARE's simulator.

    Nothing but a progress bar is printed, and that only in a terminal or a notebook; the rest is in the run's log,
    ``<workspace>.log``.

    Args:
        method: a name of :func:`list_methods`; not needed with ``rule``.
        rule, training: the method's two halves as objects, also of classes that a notebook's cell defines.
        task: a kind of task (``"segmentation"``, ``"classification"``, ...), or a task as an object.
        data: file ``fairflare.json`` that says where each site's images are, or its folder; default: synthetic images.
        sites: number of sites, or their names; 0: those of ``data``, else as many as the method's quick job has.
        rounds: number of communication rounds; default: that of the method's quick job.
        seed: seed of the first model and of all training.
        settings: settings of method, training and task by name, see :func:`describe`.
        method_file: Python file with ``METHODS``, methods of your own.
        simulator: FLARE's simulator, with a process for each site.
        jobs: number of sites at a time, each in a process; default: 1, one after the other in this process.
        workspace: folder of the run; default: ``runs/<method>-seed<seed>``.
        overwrite: whether a run that is there is replaced.
        options: further arguments of :class:`fairflare.Recipe`, such as ``paper``, ``min_sites`` or ``task_file``.

    Raises:
        ValueError: something cannot be run as it is asked for (names setting, site and remedy).
        RuntimeError: the run failed; the text has the reason and names the log.
        KeyboardInterrupt: the run was stopped.
    """
    from fairflare.base.disk.files import safe_name
    from fairflare.cli.data.own_images import fit_request
    from fairflare.cli.data.sites import run_sites
    from fairflare.cli.run.folder import earlier_results, refuse_to_replace_run, site_settings
    from fairflare.cli.run.here import run_plan, stop_by_signals, write_log
    from fairflare.cli.run.simulate import RUN_FOLDER, simulate
    from fairflare.federation.plan.request import RunRequest
    from fairflare.federation.plan.run_settings import usual_waits
    from fairflare.methods.base.catalog import add_file, get_method, method_of

    if simulator and jobs is not None:
        raise ValueError("jobs is for runs in this process; leave simulator out")
    if method_file is not None:
        add_file(method_file)
    chosen = get_method(method) if method is not None else method_of(rule, training)
    label, experiment = str(options.get("label") or chosen.name), options.get("experiment", "")
    place = Path(workspace or Path("runs") / safe_name(f"{label}-seed{seed}")).absolute()
    log, folder = place.with_name(place.name + ".log"), place / RUN_FOLDER
    if not overwrite:  # before the log of the run that is there is replaced
        refuse_to_replace_run(place, experiment, other="workspace, label or seed", overwrite="overwrite=True")
    screen, notes = sys.stderr, io.StringIO()
    with redirect_stderr(notes):  # an earlier run's log is replaced when nothing of this run has been refused
        local = site_settings(None if data is None else Path(data), experiment, place)
        names = run_sites("default" if sites == 0 else sites if isinstance(sites, int) else [*sites], local)
        waits = usual_waits(options.pop("min_sites", None), options.pop("phase_timeout", None))
        request = RunRequest.make(
            method=method, rule=rule, training=training, task=task, sites=names, num_rounds=rounds, seed=seed,
            settings=settings, **{**waits, **options, **({"small": False} if options.get("paper") else {})},
        )  # fmt: skip
        _, plan = fit_request(request, local, None if data is None else Path(data), trial=True)
        if simulator:
            from fairflare.flare.export.recipes import FairRecipe

            recipe = FairRecipe.make(plan)
    place.parent.mkdir(parents=True, exist_ok=True)
    with (
        quietly(log, notes) as written,
        stop_by_signals(written) as stop,
        earlier_results(place, folder, experiment),
    ):
        if simulator:
            code = simulate(recipe, place, len(plan.sites or ()), local, log, written, stop)
        else:
            with write_log(log, "a"):
                code = run_plan(plan, place, local, stop, [Bar(screen, plan.run.num_rounds)], jobs or 1)
    if stop.why:
        raise KeyboardInterrupt(stop.why)
    return _read_completed(place, plan.task, code, log)


def _read_completed(place: Path, task: Task, code: int, log: Path) -> Results:
    """Read the results of a run that has ended with an exit code.

    Raises:
        RuntimeError: the run failed; the text has the reason and names the log.
    """
    from fairflare.cli.run.folder import last_errors, what_sites_said

    try:
        results = Results(place, task)
    except ValueError:
        raise RuntimeError(f"the run ended before its first round: {'; '.join(last_errors(log))}; log: {log}") from None
    if code or results.document.status != "completed":
        reasons = [results.document.reason or f"code {code}", *what_sites_said(results.document, log)]
        raise RuntimeError(f"the run failed: {'; '.join(reasons)}; log: {log}")
    return results


def compare(methods: Sequence[str], *, seeds: int | Sequence[int] = 3, **options: Any) -> Comparison:
    """Run several methods with the same training and seeds, and return the comparison.

    Args:
        methods: rows, each ``"METHOD"`` or ``"METHOD:NAME=VALUE,NAME=VALUE"``; the first is the reference.
        seeds: number of seeds from 0, or the seeds.
        options: ``sites``, ``rounds``, ``task``, ``data``, ``settings``, ``jobs`` (runs at a time; default: one for
            each core), ``simulator`` (workers of FLARE's simulator for a run), ``workspace`` (folder; default:
            ``comparison``), ``overwrite``, ``metric`` and ``reference``, as in ``fairflare compare``.

    Raises:
        ValueError: a row cannot be run, or the package that compares (``fairflare_lab``) is not installed.
        RuntimeError: a run failed (names run, reason and log).
    """
    return cast("Comparison", _find_in_lab("compare")(methods, seeds=seeds, **options))


def list_methods() -> list[Listed]:
    """Return a description of every method: name, title, what it does, source, what it works with."""
    from fairflare.federation.plan.describe import overview

    return overview()


def describe(method: str, *settings: str, task: str | None = None) -> dict[str, list[InUse]]:
    """Return the settings of a method by group, with type, range, the value that a run uses, and meaning.

    Args:
        method: a name of :func:`list_methods`.
        settings: only these; default: all.
        task: kind of task that is learned; default: the method's own.

    Raises:
        ValueError: the method, kind of task or a setting is unknown; the message suggests the nearest name.
    """
    from fairflare.federation.plan.describe import settings_in_use

    return settings_in_use(method, settings, kind=task)


def _find_in_lab(name: str) -> Any:
    """Return a function that an installed package adds to this module, by its name.

    Raises:
        ValueError: no package has it.
    """
    if (function := load_plugins(PYTHON).get(name)) is None:
        raise ValueError(f"fairflare.{name} comes with the package fairflare_lab, which is not installed here")
    return function


@contextmanager
def quietly(log: Path, before: io.StringIO) -> Iterator[Console]:
    """Redirect standard error to a new log file, which begins with ``before``; yield a console that writes to it."""
    with log.open("w", encoding="utf-8", buffering=1) as written, redirect_stderr(written):
        written.write(before.getvalue())
        yield Console(file=written, width=WIDTH, force_jupyter=False)


class Bar(Listener):
    """Draw one line with a bar of what is done, in a terminal or a notebook; as a listener, of a run's rounds."""

    def __init__(self, stream: TextIO, total: int, unit: str = "rounds") -> None:
        self.stream, self.total, self.of, self.since = stream, total, unit, time.monotonic()
        self.shown = stream.isatty() or "ipykernel" in sys.modules
        self.draw(0)

    def event(self, kind: str, details: Mapping[str, Any]) -> None:
        if kind == "round_done":
            self.draw(details["current_round"] + 1)

    def draw(self, done: int) -> None:
        """Draw the bar with so much done; the line ends when all is."""
        if self.shown:
            bar = ("#" * (WIDE * done // self.total)).ljust(WIDE, ".")
            print(
                f"\r[{bar}] {done} of {self.total} {self.of}, {time.monotonic() - self.since:.0f} s",
                end="\n" * (done == self.total),
                file=self.stream,
            )
