"""Implement ``fairflare plan``, which makes one plan of nnU-Net for all sites from sums of counts."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairflare.base.checks import refuse
from fairflare.cli.data.sites import parse_sites, run_sites
from fairflare.cli.options import Overwrite, Settings, parse_settings, refuse_to_replace, write_job
from fairflare.cli.run.command import report
from fairflare.cli.run.folder import site_settings
from fairflare.cli.run.here import run_plan, stop_by_signals, write_log
from fairflare.cli.screen import console, errors, note, say, user_errors
from fairflare.federation.plan.run_settings import RESULTS_FOLDER

if TYPE_CHECKING:
    from fairflare.federation.plan.plan import Plan


def plan(
    data: Annotated[
        Path | None, typer.Argument(metavar="DATA", help="A fairflare.json, or a folder of sites as `prepare` writes.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The plan.")] = Path("plan.json"),
    sites: Annotated[
        str | None,
        typer.Option("--sites", "-s", metavar="SITES", help="Names or number; default: all that DATA has."),
    ] = None,
    settings: Settings = None,
    job: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Writes the FLARE job into this folder instead; needs --sites or DATA."),
    ] = None,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="With --job: carry the package, for the simulator; default: no code.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Plan network, spacing and patches of nnU-Net for all sites, without showing a case."""
    from fairflare.federation.plan.plan import site_list

    with user_errors(job or out):
        refuse({
            "give DATA, or --job for the FLARE job that asks sites where their images are": data is job is None,
            "--bundle goes with --job": bundle and job is None,
        })  # fmt: skip
        folder = out.absolute().with_suffix("")
        local = site_settings(data, "", folder)
        names = run_sites("default" if sites is None else parse_sites(sites), local, some=True)
        chosen_plan = _plan(site_list(names), parse_settings(settings))
        if job is not None:
            from fairflare.flare.export.evaluate_recipe import PlanRecipe

            write_job(
                PlanRecipe(chosen_plan, packaging="bundle" if bundle else "preinstalled"), job, overwrite, "--job"
            )
            return
        refuse_to_replace([out], overwrite)
        from fairflare.federation.server.planning import PLAN
        from fairflare.federation.transports.local import RUN_DIR
        from fairflare.reporting.results import read_results

        folder.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        with stop_by_signals(errors) as stop, write_log(log, "w"):
            code = run_plan(chosen_plan, folder, local, stop)
        if not code:
            rounds = read_results(folder / RUN_DIR / RESULTS_FOLDER).rounds
            for reason in dict.fromkeys(one.reason for record in rounds for one in record.left_out):
                note(f"left out of the plan: {reason}")
            shutil.copy(folder / RUN_DIR / RESULTS_FOLDER / PLAN, out)
            say(
                f"plan: {out} (fairflare run METHOD --data {data} --task nnunet --set plan={out}"
                + "".join(
                    f" --set {shlex.quote(word)}"
                    for word in settings or ()
                    if word.partition("=")[0] in ("num_classes", "labels", "channels")
                )
                + ")",
                console,
            )
    raise typer.Exit(report(folder, code, log) if code else 0)


def _plan(sites: list[str] | None, settings: dict[str, object]) -> Plan:
    from fairflare.base.settings import field_names
    from fairflare.federation.plan.plan import Plan
    from fairflare.federation.plan.run_settings import PlanRun, usual_waits
    from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
    from fairflare.methods.base.catalog import get_method
    from fairflare.methods.base.training import LocalTraining
    from fairflare.methods.fed_avg import FedAvg

    file = TASKS_BY_KIND["volume_segmentation"]
    of_run = {name: settings.pop(name) for name in field_names(PlanRun) if name in settings}
    task = load_task_class(file)(**settings)
    run = PlanRun(**{**usual_waits(1), **of_run, "label": "plan"})
    return Plan(get_method("fed_avg"), task, FedAvg(), LocalTraining(batch_size=1), run, sites, file)
