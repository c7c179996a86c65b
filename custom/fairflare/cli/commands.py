"""``fairflare``: list and describe the methods, run one, export one as a job folder, show results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fairflare.cli import completion
from fairflare.cli.adapt import adapt
from fairflare.cli.check_data import check_data
from fairflare.cli.in_process import run_here, stopped_by_signals
from fairflare.cli.phantom import phantom
from fairflare.cli.plan_options import (
    OWN_IMAGES,
    VALUES,
    Method,
    Overwrite,
    WithPaper,
    parse_settings,
    say_how_to_go_on,
    say_what_is_brought,
    say_what_is_shared,
    say_what_lacks,
    say_what_was_left,
    say_whose_setting,
    takes_plan,
)
from fairflare.cli.predict import predict
from fairflare.cli.run_folder import earlier_results, last_errors, refuse_to_replace_run, site_settings
from fairflare.cli.screen import AsJson, console, errors, one_document, user_errors
from fairflare.cli.site_names import parse_sites, run_sites
from fairflare.cli.tracking import MLflowUri, track_in_mlflow

if TYPE_CHECKING:
    pass

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fair federated learning for medical images on NVIDIA FLARE.",
)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[
        bool, typer.Option("--version", help="The versions of FairFlare, FLARE, MONAI and PyTorch.")
    ] = False,
) -> None:
    """Fair federated learning for medical images on NVIDIA FLARE."""
    if version:
        from fairflare.federation.record.run_info import versions

        console.print(
            ", ".join(f"{name} {number}" for name, number in versions().items()), highlight=False, soft_wrap=True
        )
        raise typer.Exit()


@app.command("list")
def list_methods(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The table of docs/methods.md: also phases, source and page.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The methods, with what they do and where they come from."""
    from fairflare.cli.methods_view import print_methods
    from fairflare.federation.plan.describe import method_table, overview

    with user_errors():
        one_form(as_json, markdown=markdown)
    if as_json:
        from fairflare.cli.as_json import of_list

        with one_document(as_json) as put:
            put(of_list(overview()))
    elif markdown:
        typer.echo(method_table())
    else:
        print_methods(console)


@app.command()
def describe(
    method: Method,
    settings: Annotated[list[str] | None, typer.Argument(help="Only these settings; default: all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown, with the paper's values.")] = False,
    as_json: AsJson = False,
) -> None:
    """Settings of a method, for --set: type and range, the value that a run has (and a paper's), meaning."""
    from fairflare.federation.plan.describe import in_lines, in_use, page, quick_job

    with user_errors(), one_document(as_json) as put:
        one_form(as_json, markdown=markdown)
        found = in_use(method, settings or ())
        if as_json:
            from fairflare.cli.as_json import of_settings

            put(of_settings(method, found, quick_job(method)))
            return
    if markdown:
        typer.echo(page(method))
        return
    for title, group in found.items():
        table = Table("setting", "what it is", title=title, title_justify="left", box=None, pad_edge=False)
        table.columns[0].overflow = "fold"
        for used in group:
            table.add_row(escape(used.setting.name), escape(in_lines(used)))
        console.print(table)
        console.print()
    if not settings:
        console.print(escape(f"{VALUES} {OWN_IMAGES} {quick_job(method)}"), highlight=False)


@app.command()
def privacy() -> None:
    """What leaves a site with each method and task, field by field, in Markdown."""
    from fairflare.federation.privacy import page

    typer.echo(page(), nl=False)


@app.command(cls=WithPaper)
@takes_plan
def run(
    plan: dict[str, Any],
    workspace: Annotated[
        Path | None,
        typer.Option("--workspace", "-w", help="Where the run is kept; default: runs/<method or label>-seed<seed>."),
    ] = None,
    site_file: Annotated[
        Path | None,
        typer.Option(
            "--data", "-d", help="A local/fairflare.json that says where each site's data are, or its folder."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="Simulator workers; default: one per site.")
    ] = None,
    keep_local_models: Annotated[bool, typer.Option(help="Keep every round's local models.")] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="One process instead of FLARE's simulator: the same results, sooner.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="With --in-process: so many sites at a time; the same results.")
    ] = 1,
    mlflow: MLflowUri = None,
    overwrite: Overwrite = False,
) -> None:
    """Runs a method in FLARE's simulator and prints the fairness table. Exit code 1 when the run failed."""
    from fairflare.base.disk.files import safe_name
    from fairflare.cli.own_data import in_words, looked_at, prepared_for, suited_settings
    from fairflare.cli.simulate import RUN_FOLDER, simulate
    from fairflare.federation.transports.shared_images import refuse_shared_images
    from fairflare.flare.export.recipes import FairRecipe
    from fairflare.reporting.results import mark_ended

    with user_errors():
        name = safe_name(f"{plan.get('label') or plan['method']}-seed{plan['seed']}")
        workspace = (workspace or Path("runs") / name).absolute()
        if in_process and threads is not None:
            raise ValueError("--threads is of the simulator; with --in-process it is --jobs")
        if jobs > 1 and not in_process:
            raise ValueError("--jobs goes with --in-process; the simulator has --threads")
        if in_process and mlflow is not None:
            raise ValueError("--mlflow is of FLARE's server; --in-process has none, its curves are in results.json")
        if plan["sites"] is None:
            raise ValueError("--sites all is for export; the simulator needs their number or names")
        local = site_settings(site_file, plan["experiment"], workspace)
        sites = run_sites(plan["sites"], local)
        plan.update(sites=sites, keep_local_models=keep_local_models)
        recipe = FairRecipe(**plan)
        refuse_shared_images(recipe.plan.sites or (), local)
        if images := looked_at(recipe.plan, local):
            quick = plan["small"] and not plan["task_file"]
            suited = {
                **(suited_settings(recipe.plan, images) if quick else {}),
                **prepared_for(recipe.plan, site_file, plan["settings"]),
            }
            if not suited.keys() <= plan["settings"].keys():
                recipe = FairRecipe(**{**plan, "settings": {**suited, **plan["settings"]}})
            errors.print(in_words(recipe.plan, images, trial=quick and plan["num_rounds"] is None), highlight=False)
        say_whose_setting(recipe.plan)
        say_what_lacks(recipe.plan.lacks, site_file is not None)
        say_what_is_brought(recipe.plan.brought)
        say_what_is_shared(recipe.plan)
        if mlflow is not None:
            track_in_mlflow(recipe, mlflow, here=True)
        if not overwrite:
            refuse_to_replace_run(workspace, plan["experiment"])
    workspace.parent.mkdir(parents=True, exist_ok=True)
    log = workspace.with_name(workspace.name + ".log")
    say_what_was_left()
    results = workspace / RUN_FOLDER
    with stopped_by_signals(errors) as stop, earlier_results(workspace, results, plan["experiment"]):
        if in_process:
            code = run_here(recipe, workspace, local, log, errors, jobs, stop)
        else:
            code = simulate(recipe, workspace, threads or len(recipe.plan.sites or []), local, log, errors, stop)
        if stop.why and code == stop.code:
            mark_ended(results, stop.why)  # where it was ended at once
            say_how_to_go_on(workspace, plan["experiment"])
        else:
            code = report(workspace, code, log)
    raise typer.Exit(code)


@app.command(cls=WithPaper)
@takes_plan
def export(
    plan: dict[str, Any],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that the job folder is put into.")],
    preinstalled: Annotated[
        bool,
        typer.Option(
            "--preinstalled",
            help="For hospitals: no custom code; sites have the package and allow its classes.",
        ),
    ] = False,
    bundle: Annotated[bool, typer.Option("--bundle", help="Carry the whole package in the job.")] = False,
    mlflow: MLflowUri = None,
    overwrite: Overwrite = False,
) -> None:
    """Writes a method as a FLARE job folder, with bounds on what a site can do to a round (docs/robustness.md)."""
    from fairflare.federation.plan.bounds import FOR_HOSPITALS, in_words
    from fairflare.flare.export.recipes import FairRecipe

    with user_errors():
        if preinstalled and bundle:
            raise ValueError("--preinstalled and --bundle exclude each other")
        packaging = "preinstalled" if preinstalled else "bundle" if bundle else "task_file"
        sites = None if plan["sites"] == "default" else plan["sites"]
        settings = {**FOR_HOSPITALS, **(plan["settings"] or {})}
        recipe = FairRecipe(**{**plan, "sites": sites, "settings": settings}, packaging=packaging)
        say_whose_setting(recipe.plan)
        say_what_lacks(recipe.plan.lacks)
        say_what_is_brought(recipe.plan.brought)
        say_what_is_shared(recipe.plan)
        folder = out / recipe.name
        if folder.exists() and not overwrite:
            raise ValueError(f"{folder} exists; give --overwrite to replace all of it, or another --out")
        if mlflow is not None:
            track_in_mlflow(recipe, mlflow)
        try:
            recipe.export(str(out))
        except OSError as error:
            raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error
    console.print(f"job folder: {folder}", soft_wrap=True)
    bounds = in_words(recipe.plan.run, None if recipe.plan.sites is None else len(recipe.plan.sites))
    if bounds:
        lift = " ".join(f"--set {name}=null" for name in FOR_HOSPITALS)
        errors.print(
            f"bounds on what a site can do to a round: {bounds} (docs/robustness.md). Without them, for the "
            f"figures of a simulation: {lift}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


@app.command()
def show(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders or results.json files.", autocompletion=completion.runs)
    ],
    metric: Annotated[
        str | None, typer.Option("--metric", "-m", help="Only this one; default: the task's own.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table in Markdown.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV, numbers in full.")] = False,
    sites: Annotated[bool, typer.Option(help="Of several runs: a column for each site.")] = True,
    last: Annotated[
        bool, typer.Option("--last", help="Of several runs: of their last models (test_last), not of the final one.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Of one run: a PNG of what every site gets; replaced if there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The fairness table of a run; of several runs a comparison, with the differences to the first row."""
    from fairflare.reporting.compare.comparison import comparison_of, row_table
    from fairflare.reporting.compare.difference_table import difference_table
    from fairflare.reporting.results import find_results, read_results
    from fairflare.reporting.table import fairness_table, rich_table

    with user_errors(), one_document(as_json) as put:
        one_form(as_json, markdown=markdown, csv=csv)
        style: Any = "markdown" if markdown else "csv" if csv else "text"
        found = [read_results(find_results(path)) for path in runs]
        if picture is not None:
            from fairflare.cli.picture import write_picture

            write_picture(found, picture, metric)
        if len(found) > 1:
            several = comparison_of(found, metric, last=last)
            if as_json:
                from fairflare.cli.as_json import ShowDocument, of_comparison

                put(ShowDocument(comparison=of_comparison(several)))
                return
            text = row_table(several, style=style, per_site=sites, width=console.width)
            if several.differences and not csv:
                differ = difference_table(several.differences, several.reference, style=style, width=console.width)
                text += f"\n\n{differ}"
            if several.problem and not csv:
                text += f"\n\n{several.problem}"
        elif last:
            raise ValueError("--last is for several runs; the table of one has a column for its last models")
        elif as_json:
            from fairflare.cli.as_json import of_run

            put(of_run(found[0], metric))
            return
        elif style == "text":
            console.print(rich_table(found[0], metric=metric, width=console.width))
            return
        else:
            text = fairness_table(found[0], metric=metric, style=style)
    typer.echo(text)


for command in (adapt, predict, check_data, phantom):
    app.command()(command)


@app.command()
def doctor(
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", help="A local/fairflare.json, or its folder; its data are opened."),
    ] = None,
    sites: Annotated[
        str | None, typer.Option("--sites", "-s", help="Whose data, names separated by commas; default: the file's.")
    ] = None,
    kit: Annotated[Path | None, typer.Option(help="Start-up kit of a FLARE server or site.")] = None,
    port: Annotated[list[int] | None, typer.Option(help="That a server would listen on; may be repeated.")] = None,
    method: Annotated[str, typer.Option(help="Whose task opens the data.")] = "fed_avg",
    task: Annotated[str | None, typer.Option("--task", help="Kind of task.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the task.")] = None,
    task_file: Annotated[Path | None, typer.Option(help="Python file with a class Task.")] = None,
    monai_bundle: Annotated[Path | None, typer.Option("--monai-bundle", help="Folder of a MONAI bundle.")] = None,
    as_json: AsJson = False,
) -> None:
    """Looks at versions, GPU, disk, a site's data, a start-up kit and ports. Exit code 1 when something cannot work."""
    from fairflare.cli.doctor import examine
    from fairflare.federation.plan.plan import make_plan

    with user_errors(), one_document(as_json):
        names = parse_sites(sites) if sites else None
        if isinstance(names, int):
            raise ValueError("--sites wants names here")
        given = parse_settings(settings or [])
        plan = make_plan(
            method, task=task, sites=names or 0, settings=given, task_file=task_file, monai_bundle=monai_bundle,
            min_sites=1,
        )  # fmt: skip
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    table = Table("checked", "", "found", box=None, pad_edge=False)
    with one_document(as_json) as put:
        found = list(examine(data, names, plan.task.open_site, kit, port or ()))
        if as_json:
            from fairflare.cli.as_json import of_findings

            put(of_findings(found))
    for finding in found:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(escape(finding.what), state, escape(finding.text))
    if not as_json:
        console.print(table)
    raise typer.Exit(int(any(finding.state == "problem" for finding in found)))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare(ctx: typer.Context) -> None:
    """Makes folders with a datalist for every site out of public data sets or your own folders (docs/datasets.md)."""
    from fairflare.data.preparers.__main__ import main as prepare_data

    raise typer.Exit(prepare_data(ctx.args, prog="fairflare prepare"))


# ------------------------------------------------------------------------------------------------ pieces


def one_form(as_json: bool, **others: bool) -> None:
    """Raises ValueError where a table is asked for in two forms."""
    if len(asked := [f"--{name}" for name, given in {"json": as_json, **others}.items() if given]) > 1:
        raise ValueError(f"{asked[0]} and {asked[1]} exclude each other")


def report(workspace: Path, code: int, log: Path) -> int:
    """Prints the table, or why there is none; the exit code."""
    from fairflare.reporting.results import PAGE_FILE, find_results, read_results
    from fairflare.reporting.table import rich_table

    try:
        results = read_results(find_results(workspace))
    except (OSError, ValueError):
        errors.print(f"[red]failed[/red]: the run ended with code {code} before the first round")
        for line in last_errors(log):
            errors.print(line, markup=False, highlight=False, soft_wrap=True)
        errors.print(f"log: {log}", soft_wrap=True)
        return 1
    if results["status"] != "completed" or code != 0:
        errors.print("[red]failed[/red]: ", end="")
        reason = results.get("reason") or f"FLARE ended with code {code}"
        errors.print(reason, markup=False, highlight=False, soft_wrap=True)
        errors.print(f"log: {log}", soft_wrap=True)
        return 1
    console.print(rich_table(results, width=console.width))
    found = find_results(workspace)
    console.print(f"results: {found}", soft_wrap=True)
    if (page := found.with_name(PAGE_FILE)).is_file():
        console.print(f"page: {page}", soft_wrap=True, highlight=False)
    return 0


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
