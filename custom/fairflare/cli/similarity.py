"""``fairflare similarity``: how alike the local models of a run's sites are, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairflare.base.disk.files import unreadable
from fairflare.cli import completion, screen
from fairflare.cli.commands import app
from fairflare.cli.landscape import settings_of_data, settings_of_runs, site_names_of
from fairflare.cli.plan_options import Overwrite

HELP = """Draws the CKA between the local models of each two sites of a run, layer by layer (Fig. 1b of Fed-LWR).

The run must have kept them (run --keep-local-models). It needs images: those of one site, or what the caller has.
"""


@app.command("similarity", help=HELP)
def similarity_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run, at its server.", autocompletion=completion.runs)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the picture and the numbers.")],
    data: Annotated[
        Path | None, typer.Option("--data", "-d", help="As of landscape; default: what the run had.")
    ] = None,
    sites: Annotated[str | None, typer.Option("--sites", "-s", help="Whose images; default: all.")] = None,
    split: Annotated[str, typer.Option(help="Of these sites.")] = "validation",
    current_round: Annotated[int | None, typer.Option("--round", help="From 0; default: the last.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: the first GPU, else cpu.")] = None,
    task_file: Annotated[Path | None, typer.Option(help="The run's task.py, where it has code of its own.")] = None,
    overwrite: Overwrite = False,
) -> None:
    with screen.user_errors():
        from fairflare.cli.predict import pick_device
        from fairflare.prediction.landscape import load_trained
        from fairflare.prediction.similarity import kept_rounds, pairwise_cka
        from fairflare.reporting.similarity import NAME, write

        if (out / f"{NAME}.csv").exists() and not overwrite:
            raise ValueError(f"already there: {out / NAME}.csv; give --overwrite to replace it, or another --out")
        trained = load_trained([run], "last", task_file)
        kept = kept_rounds(trained[0])
        number = max(kept) if current_round is None else current_round
        if number not in kept:
            raise ValueError(f"{run} has kept no local models of round {number}; there are {', '.join(map(str, kept))}")
        names = site_names_of(sites)
        settings = settings_of_runs([run], trained, names) if data is None else settings_of_data(data, trained, names)
        pairs, synthetic = pairwise_cka(trained[0], kept[number], settings, split, pick_device(device))
        title = f"CKA between local models, round {number}, {split} images of {len(settings)} site(s)"
        try:
            write(out, pairs, title, synthetic)
        except OSError as error:
            raise ValueError(f"--out {out} {unreadable(error)}") from error
    screen.console.print(f"picture: {out / NAME}.png", markup=False, highlight=False, soft_wrap=True)
