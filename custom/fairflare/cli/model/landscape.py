"""``fairflare landscape``: the loss around the models of runs, on the data of sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from fairflare.base.checks import nearest
from fairflare.base.disk.files import unreadable
from fairflare.cli.data.sites import file_in, names_of, read_object, sites_of
from fairflare.cli.model.predict import pick_device, write_csv
from fairflare.cli.options import Device, OfModels, Overwrite, OwnCode, Runs, refuse_to_replace, which_model
from fairflare.cli.screen import console, errors, note, say, user_errors

if TYPE_CHECKING:
    from fairflare.prediction.landscape import Grid, Landscape, Trained

NUMBERS_FILE = "landscape_numbers.csv"
FILES = ("landscape.csv", NUMBERS_FILE, "landscape.png", "landscape.svg")
SHOWN = ("loss", "mean_rise_half", "mean_rise", "max_rise", "curvature")


def landscape(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the picture and the numbers.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE",
            help="A fairflare.json, a datalist, a site's folder or a folder of sites; default: what the runs had.",
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            "--sites", "-s", metavar="NAMES", help="Separated by commas; default: those of --data or of the runs."
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(metavar="NAME", help="training, validation, test, or a further test list (test_corrupted)."),
    ] = "validation",
    extent: Annotated[
        float,
        typer.Option("--range", metavar="X", help="How far along each direction; 1: as far as each filter is long."),
    ] = 1.0,
    points: Annotated[int, typer.Option(metavar="N", help="Along each direction, odd.")] = 11,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the two directions.")] = 0,
    best: OfModels = None,
    device: Device = None,
    task_file: OwnCode = None,
    overwrite: Overwrite = False,
) -> None:
    """Draws the loss around the models of runs along two random filter-normalised directions.

    All runs get the same directions and the same colours, so that one sees whose model lies flatter (Fig. 7 of
    FedISM+). It needs the data: at a site those of the site, elsewhere those that the caller has.
    """
    with user_errors():
        from fairflare.prediction.landscape import Grid, load_trained

        refuse_to_replace((out / name for name in FILES), overwrite)
        grid = Grid(extent, points, seed, split)
        chosen = pick_device(device)
        trained = load_trained(runs, which_model(best), task_file)
        _say_models(trained)
        settings = settings_of_sites(runs, trained, data, sites)
        found = _compute(trained, settings, grid, chosen)
        try:
            _write(found, grid, trained, out)
        except OSError as error:
            raise ValueError(f"--out {out} {unreadable(error)}") from error
    _show(found)
    say(f"picture: {out / 'landscape.png'}", console)


# ------------------------------------------------------------------------------------------------ what is given


def settings_of_sites(
    runs: Sequence[Path], trained: Sequence[Trained], data: Path | None, sites: str | None
) -> dict[str, dict[str, Any]]:
    """By site whose data are looked at: what ``--data`` and ``--sites`` say, else what the runs' own folders have.

    Raises:
        ValueError: there are no such data, or no such site.
    """
    names = names_of(sites)
    return _of_runs(runs, trained, names) if data is None else _of_data(data, trained, names)


def _of_runs(places: Sequence[Path], trained: Sequence[Trained], names: list[str] | None) -> dict[str, dict[str, Any]]:
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
            note(f"{run.name} has no local/fairflare.json: its SYNTHETIC images are taken as the task draws them")
        content = read_object(file) if file.is_file() else {}
        about_data = {name: own_settings(content, name) for name in sites}
        found = {name: {k: v for k, v in own.items() if k not in SHELL_SETTINGS} for name, own in about_data.items()}
        if first is not None and found != first:
            raise ValueError(f"{trained[0].name} and {run.name} had different data; give those to use with --data")
        first = found
    return first or {}


def _of_data(data: Path, trained: Sequence[Trained], names: list[str] | None) -> dict[str, dict[str, Any]]:
    """The settings of the sites that ``--data`` stands for."""
    found = sites_of(data)
    file = file_in(data)
    content = read_object(file) if file.is_file() else {}
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


def _say_models(trained: Sequence[Trained]) -> None:
    for run in trained:
        words = run.saved.in_words()
        say(f"{run.name}: {run.saved.path}" + (f" ({words})" if words else ""), console)
        for text in run.notes:
            note(text)


# ------------------------------------------------------------------------------------------------ what is made


def _compute(
    trained: Sequence[Trained], settings: Mapping[str, Mapping[str, Any]], grid: Grid, device: Any
) -> list[Landscape]:
    from fairflare.prediction.landscape import landscape_at

    found: list[Landscape] = []
    each = grid.points**2
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        line = bar.add_task("losses", total=each * len(trained) * len(settings))
        for site, own in settings.items():
            for run in trained:
                before = each * len(found)
                found.append(
                    landscape_at(run, site, own, grid, device, lambda n, b=before: bar.update(line, completed=b + n))  # type: ignore[misc]
                )
    return found


def _write(found: Sequence[Landscape], grid: Grid, trained: Sequence[Trained], out: Path) -> None:
    from fairflare.reporting import landscape

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
    write_csv(out / NUMBERS_FILE, rows)


def _show(found: Sequence[Landscape]) -> None:
    from fairflare.reporting.layout import number

    if any(one.synthetic for one in found):
        console.print("[yellow]SYNTHETIC[/yellow] images: this says nothing about patients", soft_wrap=True)
    table = Table("run", "site", "images", *SHOWN, box=None, pad_edge=False)
    for one in found:
        table.add_row(escape(one.run), escape(one.site), str(one.images), *(number(one.numbers[n]) for n in SHOWN))
    console.print(table)
    missing = sum(not math.isfinite(loss) for one in found for loss in one.losses.flat)
    if missing:
        note(f"{missing} losses are not finite; they are grey")
