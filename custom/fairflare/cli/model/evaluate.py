"""Implement ``fairflare evaluate``, which tests given models at every site without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairflare.base.checks import different, refuse
from fairflare.base.plugins import COMMANDS, load_plugins
from fairflare.cli.data.own_images import choose_run_settings
from fairflare.cli.data.sites import parse_sites, run_sites
from fairflare.cli.options import (
    Data,
    MonaiBundle,
    OfModels,
    Overwrite,
    OwnCode,
    Settings,
    Task,
    option_of,
    parse_settings,
    which_model,
    write_job,
)
from fairflare.cli.run.command import report
from fairflare.cli.run.folder import earlier_results, refuse_to_replace_run, site_settings
from fairflare.cli.run.here import Stop, run_here, stop_by_signals
from fairflare.cli.screen import AsJson, errors, note, say, user_errors
from fairflare.cli.show import show
from fairflare.federation.plan.run_settings import RESULTS_FOLDER

if TYPE_CHECKING:
    from fairflare.prediction.evaluating import GivenModel

DRAWS = 200  # number of draws of the test patients for differences between models, as in `compare`


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, FLARE downloads, model files (.pt, .safetensors), or MONAI bundles."),
    ],
    data: Data = None,
    sites: Annotated[
        str | None,
        typer.Option("--sites", "-s", metavar="SITES", help="Names or number; default: all that --data has."),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="A folder in it for each model, as of a run.")
    ] = Path("evaluation"),
    job: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Writes the FLARE job into this folder instead; needs --sites or --data."),
    ] = None,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="With --job: carry the package, for the simulator; default: no code.")
    ] = False,
    best: OfModels = None,
    task: Task = None,
    task_file: OwnCode = None,
    monai_bundle: MonaiBundle = None,
    require_all_sites: Annotated[bool, option_of("require_all_sites")] = True,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Test models at every site without training, as a run's final test does; compare several with the first."""
    from fairflare.federation.site.site_file import own_settings
    from fairflare.prediction.evaluating import read_given_model

    with user_errors(job or out):
        refuse({
            "give --data, or --job for the FLARE job that asks sites where their images are": data is job is None,
            "--bundle goes with --job": bundle and job is None,
            "--json and --job exclude each other": as_json and job is not None,
        })  # fmt: skip
        local = site_settings(data, "", out)
        names = run_sites("default" if sites is None else parse_sites(sites), local, some=True)
        of_test = {
            "bootstrap": DRAWS if len(models) > 1 else 0, "require_all_sites": require_all_sites,
            **parse_settings(settings),
        }  # fmt: skip
        given = [
            read_given_model(
                place, which_model(best), sites=names, settings=of_test, task=task, task_file=task_file,
                bundle=monai_bundle,
            )
            for place in models
        ]  # fmt: skip
        folders = [
            out.absolute() / label
            for label in different("names of the models (folder or file)", [model.plan.run.label for model in given])
        ]
        for text in (text for model in given for text in model.notes):
            note(text)
        if job is not None:
            from fairflare.flare.export.evaluate_recipe import EvaluateRecipe

            recipe = EvaluateRecipe(
                [(model.plan, model.state) for model in given], packaging="bundle" if bundle else "preinstalled"
            )
            write_job(recipe, job, overwrite, "--job")
            return
        for folder in () if overwrite else folders:
            refuse_to_replace_run(folder, "", "--out")
        for model in given:  # all of them before the first is tested
            say(model.where)
            choose_run_settings(model.plan, local, data, vars(model.plan.task), quick=False, trial=False, some=True)
            for site in model.plan.sites or () if require_all_sites and len(given) > 1 else ():
                model.plan.task.open_site(site, own_settings(local, site))
    with stop_by_signals(errors) as stop:
        codes = [_test(model, folder, local, stop, as_json) for model, folder in zip(given, folders, strict=True)]
    if not any(codes) and (as_json or (len(folders) > 1 and "show" in load_plugins(COMMANDS))):  # of the lab
        show(folders, as_json=as_json)
    raise typer.Exit(max(codes))


def _test(model: GivenModel, folder: Path, local: dict[str, Any], stop: Stop, as_json: bool) -> int:
    """Test one model in this process, print its table unless JSON is wanted, and return the exit code."""
    from safetensors.torch import save_file

    from fairflare.base.disk.temporary import OwnedFolder
    from fairflare.federation.transports.local import RUN_DIR

    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(folder.name + ".log")
    with OwnedFolder("model") as place, earlier_results(folder, folder / RUN_DIR / RESULTS_FOLDER, ""):
        file = place.path / "model.safetensors"
        save_file(model.state, file)
        plan = replace(model.plan, run=replace(model.plan.run, initial_ckpt=str(file)))
        code = run_here(plan, folder, local, log, errors, 1, stop)
    return code if as_json and code == 0 else report(folder, code, log)
