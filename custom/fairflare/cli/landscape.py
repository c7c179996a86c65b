"""``fairflare landscape``: the loss around the models of runs, on the data of sites."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from fairflare.base.checks import nearest
from fairflare.base.disk.files import unreadable, write_whole
from fairflare.cli import completion, screen
from fairflare.cli.check_data import sites_of
from fairflare.cli.commands import app
from fairflare.cli.plan_options import Overwrite
from fairflare.cli.run_folder import file_in
from fairflare.cli.site_names import parse_sites

if TYPE_CHECKING:
    from fairflare.prediction.landscape import Grid, Landscape, Trained

GRID_FILE, NUMBERS_FILE = "landscape.csv", "landscape_numbers.csv"
FILES = (GRID_FILE, NUMBERS_FILE, "landscape.png", "landscape.svg")
SHOWN = ("loss", "mean_rise_half", "mean_rise", "max_rise", "curvature")

HELP = """Draws the loss around the models of runs along two random filter-normalised directions.

All runs get the same directions and the same colours, so that one sees whose model lies flatter (Fig. 7 of FedISM+).
It needs the data: at a site those of the site, elsewhere those that the caller has.
"""


@app.command("landscape", help=HELP)
def landscape_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, downloads, or model files.", autocompletion=completion.runs)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the picture and the numbers.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            help="A fairflare.json, a datalist, a site's folder or a folder of sites; default: what the runs had.",
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option("--sites", "-s", help="Names, separated by commas; default: those of --data or of the runs."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="training, validation, test, or a further test list (test_corrupted).")
    ] = "validation",
    extent: Annotated[
        float, typer.Option("--range", help="How far along each direction; 1: as far as each filter is long.")
    ] = 1.0,
    points: Annotated[int, typer.Option(help="Along each direction, odd.")] = 11,
    seed: Annotated[int, typer.Option(help="Of the two directions.")] = 0,
    best: Annotated[
        bool | None,
        typer.Option("--best/--last", help="The best model by validation, or the last; default: best, else last."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: the first GPU, else cpu.")] = None,
    task_file: Annotated[
        Path | None, typer.Option(help="The task.py of the runs, where it has code of its own; that code is run.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    with screen.user_errors():
        from fairflare.cli.predict import pick_device
        from fairflare.prediction.landscape import Grid, load_trained

        there = [str(out / name) for name in FILES if (out / name).exists()]
        if there and not overwrite:
            raise ValueError(f"already there: {', '.join(there)}; give --overwrite to replace them, or another --out")
        grid = Grid(extent, points, seed, split)
        chosen = pick_device(device)
        which: Literal["best", "last"] | None = None if best is None else "best" if best else "last"
        trained = load_trained(runs, which, task_file)
        _say_models(trained)
        names = site_names_of(sites)
        settings = settings_of_runs(runs, trained, names) if data is None else settings_of_data(data, trained, names)
        found = _compute(trained, settings, grid, chosen)
        try:
            _write(found, grid, trained, out)
        except OSError as error:
            raise ValueError(f"--out {out} {unreadable(error)}") from error
    _show(found)
    screen.console.print(f"picture: {out / 'landscape.png'}", markup=False, highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------ what is given


def site_names_of(sites: str | None) -> list[str] | None:
    names = None if sites is None else parse_sites(sites)
    if isinstance(names, int) or (sites is not None and not names):
        raise ValueError(f"--sites wants names here, separated by commas, got {sites!r}")
    return names


def settings_of_runs(
    places: Sequence[Path], trained: Sequence[Trained], names: list[str] | None
) -> dict[str, dict[str, Any]]:
    """The settings that the runs' own folders have of their sites.

    Raises:
        ValueError: they differ, or a run says nothing of real data.
    """
    from fairflare.federation.site.site_file import SHELL_SETTINGS, own_settings

    sites = names or _sites_of_run(trained)
    first: dict[str, dict[str, Any]] | None = None
    for place, run in zip(places, trained, strict=True):
        file = place / "local" / "fairflare.json"
        if not file.is_file() and not run.saved.record.get("synthetic"):
            raise ValueError(f"{run.name} does not say where its data are; give them with --data")
        if not file.is_file():
            note = f"{run.name} has no local/fairflare.json: its SYNTHETIC images are taken as the task draws them"
            screen.errors.print(f"[yellow]note[/yellow]: {escape(note)}", highlight=False, soft_wrap=True)
        content = _read(file) if file.is_file() else {}
        found = {name: _without(own_settings(content, name), SHELL_SETTINGS) for name in sites}
        if first is not None and found != first:
            raise ValueError(f"{trained[0].name} and {run.name} had different data; give those to use with --data")
        first = found
    return first or {}


def _without(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What of a site's settings is about its data."""
    return {key: value for key, value in settings.items() if key not in keys}


def settings_of_data(data: Path, trained: Sequence[Trained], names: list[str] | None) -> dict[str, dict[str, Any]]:
    """The settings of the sites that ``--data`` stands for."""
    found = sites_of(data)
    file = file_in(data)
    content = _read(file) if file.is_file() else {}
    blocks = content.get("sites")
    if not blocks and "data_root" not in next(iter(found.values())):  # made-up data, the same for all
        return {name: dict(content) for name in names or _sites_of_run(trained)}
    if names is None:
        return found
    alone = file.is_file() or (data / "datalist.json").is_file()
    if alone and not blocks and len(names) == 1:  # a site's own file or folder does not say its name
        return {names[0]: next(iter(found.values()))}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"--data {data} has no site {unknown[0]!r}{nearest(unknown[0], found)}")
    return {name: found[name] for name in names}


def _sites_of_run(trained: Sequence[Trained]) -> list[str]:
    from fairflare.prediction.saved_model import results_beside
    from fairflare.reporting.pictures import in_order

    tested = [set(results_beside(run.saved.path).get("test") or {}) for run in trained]
    common = in_order(set.intersection(*tested))
    if not common:
        raise ValueError("the results of the runs name no site that all of them tested; give --sites")
    return common


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} {unreadable(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content


def _say_models(trained: Sequence[Trained]) -> None:
    for run in trained:
        words = run.saved.in_words()
        screen.console.print(
            f"{run.name}: {run.saved.path}" + (f" ({words})" if words else ""),
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        for note in run.notes:
            screen.errors.print(f"[yellow]note[/yellow]: {escape(note)}", highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------ what is made


def _compute(
    trained: Sequence[Trained], settings: Mapping[str, Mapping[str, Any]], grid: Grid, device: Any
) -> list[Landscape]:
    from fairflare.prediction.landscape import landscape_at

    found: list[Landscape] = []
    each = grid.points**2
    with Progress(console=screen.errors, transient=True, disable=not screen.errors.is_terminal) as bar:
        line = bar.add_task("losses", total=each * len(trained) * len(settings))
        for site, own in settings.items():
            for run in trained:
                before = each * len(found)
                found.append(
                    landscape_at(run, site, own, grid, device, lambda n, b=before: bar.update(line, completed=b + n))  # type: ignore[misc]
                )
    return found


def _write(found: Sequence[Landscape], grid: Grid, trained: Sequence[Trained], out: Path) -> None:
    from fairflare.base.disk.files import csv_text
    from fairflare.reporting import landscape

    out.mkdir(parents=True, exist_ok=True)
    losses = {(one.run, one.site): one.losses for one in found}
    title = f"Loss around the model, {grid.split} split, filter-normalised directions of seed {grid.seed}"
    landscape.write(out, losses, grid.places, title, any(one.synthetic for one in found))
    models = {run.name: run.saved for run in trained}
    rows: list[list[Any]] = [
        ["run", "site", "split", "images", "synthetic", "model", "round", "seed", "range", "points", *SHOWN]
    ]
    for one in found:
        model = models[one.run]
        rows.append([
            one.run, one.site, grid.split, one.images, one.synthetic, model.path.name, model.made, grid.seed,
            grid.extent, grid.points,
            *(repr(one.numbers[name]) if math.isfinite(one.numbers[name]) else None for name in SHOWN),
        ])  # fmt: skip
    for name, table in ((GRID_FILE, landscape.rows(losses, grid.places)), (NUMBERS_FILE, rows)):
        text = csv_text(table)
        write = partial(_write_text, text)
        write_whole(out / name, write, durable=False, shared=True)


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _show(found: Sequence[Landscape]) -> None:
    from fairflare.reporting.layout import number

    if any(one.synthetic for one in found):
        screen.console.print("[yellow]SYNTHETIC[/yellow] images: this says nothing about patients", soft_wrap=True)
    table = Table("run", "site", "images", *SHOWN, box=None, pad_edge=False)
    for one in found:
        table.add_row(escape(one.run), escape(one.site), str(one.images), *(number(one.numbers[n]) for n in SHOWN))
    screen.console.print(table)
    missing = sum(int((~_finite(one)).sum()) for one in found)
    if missing:
        screen.errors.print(f"[yellow]note[/yellow]: {missing} losses are not finite; they are grey", highlight=False)


def _finite(one: Landscape) -> Any:
    import numpy as np

    return np.isfinite(one.losses)
