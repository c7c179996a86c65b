"""Define the command ``fairflare compare``, which runs several methods on the same data and compares them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairflare.base.checks import refuse
from fairflare.cli.data.sites import parse_sites, run_sites
from fairflare.cli.options import (
    TABLES,
    Data,
    MethodFile,
    MonaiBundle,
    Paper,
    Rounds,
    Settings,
    Task,
    TaskFile,
    parse_settings,
    value_of,
    which_paper,
)
from fairflare.cli.run.folder import site_settings
from fairflare.cli.run.here import stop_by_signals
from fairflare.cli.run.words import say_what_is_shared, say_what_lacks, say_what_was_left, say_whose_setting
from fairflare.cli.screen import AsJson, console, errors, one_document, say, user_errors
from fairflare.federation.plan.run_settings import RUN, TRAINING
from fairflare_lab.cli.compare.tables import report
from fairflare_lab.papers.presets import beginning_so, table_of

if TYPE_CHECKING:
    from fairflare.base.task import Task as LearnedTask
    from fairflare_lab.cli.compare.runs import Runner
    from fairflare_lab.cli.compare.series import Series

DONE = "completed"  # state of a run, repeated here so that completion by TAB need not import compare.runs


def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Rows: METHOD or METHOD:NAME=VALUE,NAME=VALUE. The first is what others are compared with."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the comparison.")] = Path(
        "comparison"
    ),
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="YAML or JSON with rows and options (docs/compare.md)."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Rows and columns of a paper's table: fed_lwr, fed_mrl, fed_mas, fed_ism, ... (docs/compare.md).",
            autocompletion=beginning_so,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N", help="So many seeds, from 0, or these: 1,2,3; default: 3.")
    ] = None,
    rounds: Rounds = None,
    sites: Annotated[
        str | None,
        typer.Option("--sites", "-s", metavar="SITES", help="Number or names; default: those of --data."),
    ] = None,
    data: Data = None,
    task: Task = None,
    task_file: TaskFile = None,
    method_file: MethodFile = None,
    monai_bundle: MonaiBundle = None,
    train_like: Annotated[
        str | None,
        typer.Option(
            "--train-like",
            metavar="METHOD",
            help="Whose task and local training all rows get; default: the first row's; own: each its own.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="ROW", help="Row that differences are taken to; default: the first.", rich_help_panel=TABLES
        ),
    ] = None,
    paper: Paper = None,
    settings: Settings = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", "-m", metavar="NAME", help="Of the tables; default: the task's own.", rich_help_panel=TABLES
        ),
    ] = None,
    bootstrap: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10_000,
            metavar="N",
            help="Draws of the test images for the intervals; default: 200, 0: none.",
            rich_help_panel=TABLES,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            "--at-once",
            min=1,
            metavar="N",
            help="Runs at the same time, of one thread each: the same figures; default: as many as there are cores.",
        ),
    ] = None,
    simulator: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="FLARE's simulator with so many workers for each run, not one process.",
            rich_help_panel=RUN,
        ),
    ] = None,
    hold_out: Annotated[
        str | None,
        typer.Option(
            "--hold-out",
            metavar="NAMES",
            help="Leave these sites (or: each) out in turn; test the models there.",
            rich_help_panel=RUN,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace runs of other settings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run several methods on the same data, with the same training and the same seeds, and compare them.

    Every seed starts all methods from the same model. A comparison that was stopped goes on with the same command:
    what is done is not repeated, what was interrupted continues. Exit code 1 when a run failed.
    """
    with user_errors(out), one_document(as_json):
        chosen = None if sites is None else parse_sites(sites)
        if sites is not None and chosen is None:
            raise ValueError(f"--sites {sites} is for export; a comparison needs the number or the names of the sites")
        from fairflare_lab.cli.compare.series import leaving_out, seeds_of

        given = {
            "seeds": None if seeds is None else seeds_of(value_of(f"[{seeds}]" if "," in seeds else seeds)),
            "rounds": rounds,
            "task": task,
            "task_file": None if task_file is None else str(task_file),
            "monai_bundle": None if monai_bundle is None else str(monai_bundle),
            "train_like": train_like,
            "reference": reference,
            **({} if paper is None else which_paper(paper)),
            "settings": parse_settings(settings) if settings else None,
            "data": None if data is None else str(data),
            "sites": chosen,
            "bootstrap": bootstrap,
        }
        from fairflare_lab.cli.compare.runs import Runner

        if preset is not None and plan_file is not None:
            raise ValueError("--plan and --preset exclude each other")
        table = None if preset is None else table_of(preset)
        given = {k: v for k, v in given.items() if v is not None}
        series, local = series_of(
            methods or [], plan_file if table is None else table.make_plan_file(small=given.get("small", True)), given
        )
        if hold_out is not None:
            refuse({
                "--json has no document of left-out sites: take unseen.csv, or each run's unseen.json": as_json,
                "--hold-out and --preset exclude each other: a paper's table has no unseen sites": table is not None,
            })  # fmt: skip
            series = leaving_out(series, hold_out)
        if metric is not None:  # before runs are replaced
            _check_metric(metric, series.runs()[0].make().task)
        runner = Runner(
            series,
            out.absolute(),
            local,
            at_once=jobs or os.cpu_count() or 1,
            simulator=simulator,
            overwrite=overwrite,
        )
        _say_what_is_run(series, "data" in given or bool(local))
    with one_document(as_json) as put:
        _go(runner)
        code, compared = report(runner, series.refers_to(), metric, table, tables=not as_json)
        if as_json:
            from fairflare_lab.compare.comparison_json import comparison_json

            runs = [{"name": one.run.name, "state": one.state, "reason": one.reason} for one in runner.all]
            put(folder=str(runner.folder), runs=runs, comparison=compared and comparison_json(compared))
    raise typer.Exit(code)


def _say_what_is_run(series: Series, own_data: bool) -> None:
    """Print which papers' settings the rows have, and what the user still has to give."""
    from fairflare.methods.base.catalog import all_methods

    plans = [run.make() for run in series.runs()[: len(series.entries)]]
    for plan in {plan.paper.name: plan for plan in plans if plan.paper is not None}.values():
        say_whose_setting(plan)
    if len(plans) == 1 and series.paper in all_methods():
        say(f"{series.paper} is a paper here; the method is a row where it stands before --paper")
    say_what_lacks(list(dict.fromkeys(text for plan in plans for text in plan.lacks)), own_data)
    for plan, entry in zip(plans, series.entries, strict=True):
        say_what_is_shared(plan, entry.label)


def _check_metric(metric: str, task: LearnedTask) -> None:
    """Check before hours of training that the task measures the metric that the tables are asked for.

    Raises:
        ValueError: the task has no such metric; the message suggests the nearest name.
    """
    from fairflare.base.checks import choice

    names = [declared.name for declared in task.declared_metrics()]
    for part in [metric] if metric in names else metric.split("+"):
        last_part = part.rpartition("/")[2]  # a metric of the split test_common is named common/<name>
        if names and not last_part.startswith("recall_"):  # names of classes of own images are not known yet
            choice("--metric", last_part, list(dict.fromkeys([*names, task.primary_metric])))


def series_of(
    rows: list[str], plan: Path | Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[Series, dict[str, Any]]:
    """Return the series of runs to compare, and the sites' private settings; the command line overrides the plan.

    Settings that are not given follow the sites' own images, where sites have such.
    """
    from fairflare.cli.data.own_images import choose_run_settings, forbid_phantom, kind_by_manifest
    from fairflare_lab.cli.compare.series import Series, read_entry, read_file

    file = read_file(plan) if isinstance(plan, Path) else dict(plan or {})
    given = {
        "sites": "default",
        **file,
        **options,
        "settings": {**file.get("settings", {}), **options.get("settings", {})},
    }
    if rows:
        given["entries"] = [read_entry(row) for row in rows]
    if not given.get("entries"):
        raise ValueError("name the methods to compare, or a file with --plan")
    data = given.pop("data", None)
    if data and isinstance(plan, Path) and "data" not in options:
        data = plan.parent / data
    local = site_settings(Path(data) if data else None, "", Path())
    if given["sites"] is None:
        raise ValueError("a comparison needs the number or the names of the sites")
    given["sites"] = run_sites(given["sites"], local)
    given.update(kind_by_manifest(Path(data) if data else None, given))
    series = Series(**given)
    runs = series.runs()[: len(series.entries)]
    fitted = forbid_phantom(
        lambda more: [
            replace(run, plan={**run.plan, "settings": {**more, **run.plan["settings"]}}).make() for run in runs
        ],
        local,
    )
    series = replace(series, settings={**fitted, **series.settings})
    more = choose_run_settings(
        series.runs()[0].make(), local, Path(data) if data else None, series.settings,
        quick=series.small and not series.task_file, trial=series.small and series.rounds is None,
    )  # fmt: skip
    return replace(series, settings={**series.settings, **more}), local


# ------------------------------------------------------------------------------------------------ doing the runs


def _go(runner: Runner) -> None:
    missing = [progress.run.name for progress in runner.all if progress.state != DONE]
    if done := len(runner.all) - len(missing):
        console.print(f"{done} of {len(runner.all)} runs are done already")
    if not missing:
        return
    from fairflare_lab.cli.compare.provenance import note_session
    from fairflare_lab.cli.compare.view import plan_in_words, tell

    with user_errors():
        note_session(runner.folder, ["fairflare", *sys.argv[1:]], runner.local, missing)
    say_what_was_left()
    console.print(plan_in_words(runner), highlight=False, markup=False, soft_wrap=True)
    with stop_by_signals(errors) as stop:
        try:
            runner.go(lambda progress: tell(runner, progress), stop)
        except KeyboardInterrupt:
            say("Stopped. The same command goes on from here.")
            raise typer.Exit(stop.code) from None
