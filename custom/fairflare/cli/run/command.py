"""Define the commands ``fairflare run`` and ``fairflare export``."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairflare.base.checks import refuse
from fairflare.base.machine.one_run import refuse_inside_run
from fairflare.base.own_errors import lacking_for_pages
from fairflare.cli.options import Data, Overwrite, takes_plan, write_job
from fairflare.cli.run.folder import earlier_results, last_errors, refuse_to_replace_run, site_settings, what_sites_said
from fairflare.cli.run.here import run_here, sites_at_a_time, stop_by_signals
from fairflare.cli.run.words import say_how_to_go_on, say_plan, say_what_was_left
from fairflare.cli.screen import console, errors, say, user_errors
from fairflare.federation.plan.request import RunRequest
from fairflare.federation.plan.run_settings import RUN

if TYPE_CHECKING:
    from fairflare.federation.plan.plan import Plan
    from fairflare.flare.export.recipes import FairRecipe


@takes_plan
def run(
    request: RunRequest,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            "-w",
            metavar="DIR",
            help="Where the run is kept; default: runs/<method or label>-seed<seed>.",
        ),
    ] = None,
    site_file: Data = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", "-t", min=1, metavar="N", help="Simulator workers; default: one per site.", rich_help_panel=RUN
        ),
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Without FLARE's simulator: the same results, sooner.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            metavar="N",
            help="With --in-process: so many sites at a time; the same results. Default: what is soonest.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Run a method in FLARE's simulator and print the fairness table. Exit code 1 when the run failed."""
    from fairflare.base.disk.files import safe_name
    from fairflare.cli.data.own_images import fit_request
    from fairflare.cli.data.sites import run_sites
    from fairflare.cli.run.simulate import RUN_FOLDER, simulate
    from fairflare.reporting.results import mark_ended

    with user_errors():
        refuse_inside_run()
        experiment, seed = request.options["experiment"], request.options["seed"]
        name = safe_name(f"{request.options.get('label') or request.method}-seed{seed}")
        workspace = (workspace or Path("runs") / name).absolute()
        refuse({
            "--threads is an option of the simulator; with --in-process use --jobs": in_process and bool(threads),
            "--jobs goes with --in-process; with the simulator use --threads": (jobs or 1) > 1 and not in_process,
            "--sites all is for export; the simulator needs their number or names": request.sites is None,
        })  # fmt: skip
        local = site_settings(site_file, experiment, workspace)
        request = replace(request, sites=run_sites(request.sites, local), apart=in_process and (jobs or 1) > 1)
        _, plan = fit_request(request, local, site_file, trial=True)
        recipe = None if in_process else _recipe(plan)
        say_plan(plan, site_file is not None)
        if not overwrite:
            refuse_to_replace_run(workspace, experiment)
    workspace.parent.mkdir(parents=True, exist_ok=True)
    log = workspace.with_name(workspace.name + ".log")
    say_what_was_left()
    results = workspace / RUN_FOLDER
    with stop_by_signals(errors) as stop, earlier_results(workspace, results, experiment):
        if recipe is None:
            code = run_here(plan, workspace, local, log, errors, jobs or sites_at_a_time(plan), stop)
        else:
            code = simulate(recipe, workspace, threads or len(plan.sites or []), local, log, errors, stop)
        if stop.why and code == stop.code:
            mark_ended(results, stop.why)  # for a run that was ended at once, without its own record
            say_how_to_go_on(workspace, experiment)
        else:
            code = report(workspace, code, log)
    raise typer.Exit(code)


def _recipe(plan: Plan, packaging: str = "task_file") -> FairRecipe:
    from fairflare.flare.export.recipes import FairRecipe

    return FairRecipe.make(plan, packaging)


def report(workspace: Path, code: int, log: Path) -> int:
    """Print a run's table, or why it has none, and return the exit code."""
    from fairflare.federation.record.curves import NO_CURVES
    from fairflare.reporting.results import PAGE_FILE, find_results, read_results
    from fairflare.reporting.table import fairness_table

    reasons = []
    try:
        file = find_results(workspace)
        results = read_results(file)
        if results.status != "completed" or code != 0:
            reasons = [str(results.reason or f"FLARE ended with code {code}"), *what_sites_said(results, log)]
    except (OSError, ValueError):
        reasons = [f"the run ended with code {code} before the first round", *last_errors(log)]
    if reasons:
        say(reasons[0], mark="[red]failed[/red]: ")
        for line in (*reasons[1:], f"log: {log}"):
            say(line)
        return 1
    say(fairness_table(results, width=console.width), console)
    say(f"results: {file}", console)
    if (page := file.with_name(PAGE_FILE)).is_file():
        say(f"page: {page}", console)
    elif lacking := lacking_for_pages():
        say(f"no page: {lacking}", console)
    if not find_spec("tensorboard"):
        say(NO_CURVES, console)
    return 0


@takes_plan
def export(
    request: RunRequest,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder that the job folder is put into.")],
    preinstalled: Annotated[
        bool,
        typer.Option(
            "--preinstalled",
            help="For hospitals: no custom code; sites have the package and allow its classes.",
        ),
    ] = False,
    bundle: Annotated[bool, typer.Option("--bundle", help="Carry the whole package in the job.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE",
            help="What prepare wrote (fairflare.json, or its manifest.json): the job's task, classes and image size "
            "follow it. Where each site's data are stands in the site's own local/fairflare.json.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a method as a FLARE job folder, with bounds on what a site can do to a round (docs/robustness.md)."""
    from fairflare.cli.data.own_images import fit_request, manifest_of
    from fairflare.cli.data.sites import run_sites
    from fairflare.data.preparers.writing import MANIFEST
    from fairflare.federation.plan.bounds import FOR_HOSPITALS, describe_bounds
    from fairflare.federation.plan.plan import plan_run
    from fairflare.flare.export.packaging import package_request

    with user_errors(out):
        if preinstalled and bundle:
            raise ValueError("--preinstalled and --bundle exclude each other")
        sites = None if request.sites == "default" else request.sites
        request = replace(request, sites=sites, settings={**FOR_HOSPITALS, **request.settings})
        if data is not None:
            local = {} if data.name == MANIFEST else site_settings(data, "", out)
            if not local and not manifest_of(data):
                raise ValueError(f"--data {data}: there is no manifest of `fairflare prepare`; give its fairflare.json")
            options = {**request.options, "min_sites": 1}  # the job may have other sites
            looked = replace(request, sites=run_sites("default", local), options=options)
            looked, _ = fit_request(looked, local, data, trial=False)
            request = replace(request, task=looked.task, settings=looked.settings)
        packaging = "preinstalled" if preinstalled else "bundle" if bundle else "task_file"
        plan = plan_run(package_request(request, packaging))  # its errors come before the slow import of FLARE
        recipe = _recipe(plan, packaging)
        say_plan(plan)
        if request.task_file:
            _try_network(plan.task)
        write_job(recipe, out, overwrite)
    if bounds := describe_bounds(plan.run, None if plan.sites is None else len(plan.sites)):
        lift = " ".join(f"--set {name}=null" for name in FOR_HOSPITALS)
        say(
            f"bounds on what a site can do to a round: {bounds} (docs/robustness.md). Without them, for the "
            f"figures of a simulation: {lift}"
        )


def _try_network(task: Any) -> None:
    """Refuse a user's own network that does not fit; if it fails to build, only warn, as it may need a site's files."""
    from fairflare.federation.server.first_model import build
    from fairflare.tasks.images import ImageTask

    try:
        model = build(task)
        if isinstance(task, ImageTask):
            task.check_outputs(model)
    except ValueError as error:
        if error.__cause__ is None:
            raise
        say(f"warning: {error}; the job fails with it wherever that holds")
