"""``fairflare compare``: which method is fair on these data?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairflare.cli import completion
from fairflare.cli.commands import app
from fairflare.cli.in_process import stopped_by_signals
from fairflare.cli.plan_options import (
    WithPaper,
    parse_settings,
    say_what_is_shared,
    say_what_lacks,
    say_what_was_left,
    say_whose_setting,
    which_paper,
)
from fairflare.cli.run_folder import site_settings
from fairflare.cli.screen import AsJson, console, errors, one_document, user_errors
from fairflare.cli.site_names import parse_sites, run_sites

if TYPE_CHECKING:
    from fairflare.base.task import Task
    from fairflare.cli.compare_runs import Runner
    from fairflare.federation.plan.series import Series
    from fairflare.methods.base.papers import PaperTable
    from fairflare.reporting.compare.comparison import Comparison

DONE = "completed"  # state of a run; compare_runs is not imported for a mere TAB

HELP = """Runs several methods on the same data, with the same training and the same seeds, and compares them.

Every seed starts all methods from the same model. A comparison that was stopped goes on with the same command:
what is done is not repeated, what was interrupted continues. Exit code 1 when a run failed.
"""


@app.command("compare", help=HELP, cls=WithPaper)
def compare_command(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Rows: METHOD or METHOD:NAME=VALUE,NAME=VALUE. The first is what others are compared with."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the comparison.")] = Path("comparison"),
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="YAML or JSON with rows and options (docs/compare.md).")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Rows and columns of a paper's table: fed_lwr, fed_mrl, fed_mas, fed_ism, ... (docs/compare.md).",
            autocompletion=completion.presets,
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="So many seeds, from 0; default: 3.")] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", "-r", min=1, help="Communication rounds of every run.")
    ] = None,
    sites: Annotated[
        str | None, typer.Option("--sites", "-s", help="Number or names; default: those of --data.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", "-d", help="A local/fairflare.json that says where each site's data are, or its folder."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="A kind, such as volume_segmentation."),
    ] = None,
    task_file: Annotated[Path | None, typer.Option(help="Python file with a class Task.")] = None,
    monai_bundle: Annotated[Path | None, typer.Option("--monai-bundle", help="Folder of a MONAI bundle.")] = None,
    train_like: Annotated[
        str | None,
        typer.Option(
            "--train-like",
            help="Whose task and local training all rows get; default: the first row's; own: each its own.",
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Row that differences are taken to; default: the first.")
    ] = None,
    paper: Annotated[
        str | None,
        typer.Option(
            "--paper",
            help="The paper's rounds, sites, network and training; with a name that experiment's.",
            autocompletion=completion.papers,
        ),
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE for every row.")] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", "-m", help="Of the tables; default: the task's own.")
    ] = None,
    bootstrap: Annotated[
        int | None,
        typer.Option(min=0, max=10_000, help="Draws of the test images for the intervals; default: 200, 0: none."),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, help="Runs at the same time; default: as many as there are cores.")
    ] = None,
    simulator: Annotated[
        int | None, typer.Option(min=1, help="FLARE's simulator with so many workers for each run, not one process.")
    ] = None,
    hold_out: Annotated[
        str | None,
        typer.Option(
            "--hold-out",
            help="Leave these sites (or: each) out in turn; test the models there.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace runs of other settings.")] = False,
    as_json: AsJson = False,
) -> None:
    with user_errors(), one_document(as_json):
        chosen = None if sites is None else parse_sites(sites)
        if sites is not None and chosen is None:
            raise ValueError(f"--sites {sites} is for export; a comparison needs the number or the names of the sites")
        told = {
            "seeds": None if seeds is None else list(range(seeds)),
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
        from fairflare.cli.compare_runs import Runner
        from fairflare.federation.plan.series import leaving_out
        from fairflare.methods.base.papers import table_of

        if preset is not None and plan_file is not None:
            raise ValueError("--plan and --preset exclude each other")
        table = None if preset is None else table_of(preset)
        told = {k: v for k, v in told.items() if v is not None}
        series, local = _series(methods or [], plan_file if table is None else packaged(table, told), told)
        if hold_out is not None:
            if as_json:
                raise ValueError("--json has no document of left-out sites: take unseen.csv, or each run's unseen.json")
            if table is not None:
                raise ValueError("--hold-out and --preset exclude each other: a paper's table has no unseen sites")
            series = leaving_out(series, hold_out)
        runner = Runner(
            series,
            out.absolute(),
            local,
            at_once=at_once or os.cpu_count() or 1,
            simulator=simulator,
            overwrite=overwrite,
        )
        _say_what_is_run(series, "data" in told or bool(local))
        if metric is not None:
            _check_metric(metric, series.runs()[0].make().task)
    with one_document(as_json) as put:
        _go(runner, metric)
        code, found = _report(runner, series.refers_to(), metric, table, tables=not as_json)
        if as_json:
            from fairflare.cli.as_json import of_compare

            put(of_compare(runner.folder, runner.all, found))
    raise typer.Exit(code)


def _say_what_is_run(series: Series, own_data: bool) -> None:
    """Whose settings the rows have, and what they still have to be given."""
    from fairflare.methods.base.catalog import all_methods

    plans = [run.make() for run in series.runs()[: len(series.entries)]]
    for plan in {plan.paper.name: plan for plan in plans if plan.paper is not None}.values():
        say_whose_setting(plan)
    if len(plans) == 1 and series.paper in all_methods():
        errors.print(f"{series.paper} is a paper here; the method is a row where it stands before --paper")
    say_what_lacks(list(dict.fromkeys(text for plan in plans for text in plan.lacks)), own_data)
    for plan, entry in zip(plans, series.entries, strict=True):
        say_what_is_shared(plan, entry.label)


def packaged(table: PaperTable, told: Mapping[str, Any]) -> dict[str, Any]:
    """A paper's table as a plan file would say it; with ``--paper`` its rows are trained as the paper has each."""
    from fairflare.federation.plan.series import entries_of

    plan = table.as_plan(small=told.get("small", True))
    return {"entries": entries_of(f"--preset {table.name}", plan.pop("methods")), **plan}


def _check_metric(metric: str, task: Task) -> None:
    """Before hours of training: what the tables are asked for is measured at all.

    Raises:
        ValueError: the task has no such metric (suggests the nearest).
    """
    from fairflare.base.checks import choice

    names = [declared.name for declared in task.declared_metrics()]
    for part in [metric] if metric in names else metric.split("+"):
        own = part.rpartition("/")[2]  # test_common's are common/<name>
        if names and not own.startswith("recall_"):  # classes of own images: their names are with the images
            choice("--metric", own, list(dict.fromkeys([*names, task.primary_metric])))


def _series(
    rows: list[str], plan: Path | Mapping[str, Any] | None, told: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What is compared, and the sites' private settings; the command line goes before the plan."""
    from fairflare.federation.plan.series import Series, read_entry, read_file

    file = read_file(plan) if isinstance(plan, Path) else dict(plan or {})
    given = {"sites": "default", **file, **told, "settings": {**file.get("settings", {}), **told.get("settings", {})}}
    if rows:
        given["entries"] = [read_entry(row) for row in rows]
    if not given.get("entries"):
        raise ValueError("name the methods to compare, or a file with --plan")
    data = given.pop("data", None)
    if data and isinstance(plan, Path) and "data" not in told:
        data = plan.parent / data
    local = site_settings(Path(data) if data else None, "", Path())
    if given["sites"] is None:
        raise ValueError("a comparison needs the number or the names of the sites")
    given["sites"] = run_sites(given["sites"], local)
    return _on_own_data(Series(**given), local, Path(data) if data else None), local


def _on_own_data(series: Series, local: Mapping[str, Any], data: Path | None) -> Series:
    """The series as it suits the sites' own images, where there are such and nothing else is said."""
    from fairflare.cli.own_data import in_words, looked_at, prepared_for, suited_settings
    from fairflare.federation.transports.shared_images import refuse_shared_images

    plan = series.runs()[0].make()
    refuse_shared_images(plan.sites or (), local)
    if images := looked_at(plan, local):
        if not series.task_file:
            suited = suited_settings(plan, images) if series.small else {}
            suited |= prepared_for(plan, data, series.settings)
            series = replace(series, settings={**suited, **series.settings})
            plan = series.runs()[0].make()
        errors.print(in_words(plan, images, trial=series.small and series.rounds is None), highlight=False)
    return series


# ------------------------------------------------------------------------------------------------ while it goes


def _go(runner: Runner, metric: str | None = None) -> None:
    done = sum(progress.state == DONE for progress in runner.all)
    if done:
        console.print(f"{done} of {len(runner.all)} runs are done already")
    if done == len(runner.all):
        return
    from fairflare.cli.compare_view import Lines, Live, plan_in_words
    from fairflare.cli.provenance import note_session

    with user_errors():
        missing = [progress.run.name for progress in runner.all if progress.state != DONE]
        note_session(runner.folder, _command(), runner.local, missing)
    say_what_was_left()
    console.print(plan_in_words(runner), highlight=False, markup=False, soft_wrap=True)
    view = (Live if console.is_terminal else Lines)(runner, metric)
    with stopped_by_signals(errors) as stop:
        try:
            with view:
                runner.go(view.tell, stop)
        except KeyboardInterrupt:
            errors.print("stopped; the same command goes on from here")
            raise typer.Exit(stop.code) from None


# ------------------------------------------------------------------------------------------------ in the end


def _report(
    runner: Runner, reference: str, metric: str | None, paper: PaperTable | None = None, *, tables: bool = True
) -> tuple[int, list[Comparison]]:
    """Writes the tables as files and, where ``tables`` says so, to the screen, at the end in the columns of a paper.

    Returns:
        The exit code; the comparison of the final models, and of the last ones where every run has such.
    """
    from fairflare.cli.provenance import sessions_of
    from fairflare.reporting.compare.comparison import comparison_of, row_table
    from fairflare.reporting.compare.comparison_page import comparison_page
    from fairflare.reporting.compare.difference_table import difference_table
    from fairflare.reporting.compare.paper_table import paper_table

    failed = [progress for progress in runner.all if progress.state != DONE]
    for progress in failed:
        errors.print(f"{progress.run.name}: {progress.state}: {progress.reason}", markup=False, highlight=False)
    runs = runner.results()
    if not runs:
        errors.print("[red]no run completed[/red]")
        return 1, []
    if any(progress.run.held_out for progress in runner.all):
        from fairflare.cli.unseen_view import report_unseen

        return report_unseen(runner, _command(), metric, bool(failed)), []
    made: list[Comparison] = []
    with user_errors():
        written = []
        known = reference if any(run["info"]["label"] == reference for run in runs) else None
        for last in (False, *([True] if all(run.get("last_rounds") for run in runs) else [])):
            found, ending = comparison_of(runs, metric, known, last=last), "_last" if last else ""
            made.append(found)
            written += [row_table(found, style="markdown"), ""]
            _write(runner.folder / f"table{ending}.md", written[-2])
            _write(runner.folder / f"table{ending}.csv", row_table(found, style="csv"))
            _show(tables, ("\n" if last else "") + row_table(found, width=console.width))
            if (differ := found.differences) and known:
                written[-1] = difference_table(differ, known, style="markdown")
                _show(tables, "\n" + difference_table(differ, known, width=console.width))
                _write(runner.folder / f"differences{ending}.csv", difference_table(differ, known, style="csv"))
                _write(runner.folder / f"differences{ending}.md", written[-1])
            elif not last and (why := found.problem if known else f"no differences: no run of {reference} completed"):
                errors.print(why, markup=False, highlight=False)
        page = comparison_page(_command(), runs, *written, sessions=sessions_of(runner.folder))
        if paper is not None:
            _show(tables, "\n" + paper_table(paper.title, paper.columns, runs, width=console.width))
            in_paper = paper_table(paper.title, paper.columns, runs, style="markdown")
            page += f"\n\n## As the paper prints it\n\n{in_paper}"
            _write(runner.folder / "paper_table.md", in_paper)
        _write(runner.folder / "comparison.md", page)
    console.print(
        f"tables: {runner.folder}; as a page: fairflare report {runner.folder}", soft_wrap=True, highlight=False
    )
    return int(bool(failed)), made


def _show(wanted: bool, text: str) -> None:
    if wanted:
        typer.echo(text)


def _command() -> list[str]:
    return ["fairflare", *sys.argv[1:]]


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
