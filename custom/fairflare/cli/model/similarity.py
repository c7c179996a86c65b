"""``fairflare similarity``: how alike the local models of a run's sites are, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairflare.base.disk.files import unreadable
from fairflare.cli import completion
from fairflare.cli.model.landscape import settings_of_sites
from fairflare.cli.model.predict import pick_device
from fairflare.cli.options import Device, Overwrite, OwnCode, refuse_to_replace
from fairflare.cli.screen import console, say, user_errors


def similarity(
    run: Annotated[Path, typer.Argument(help="Folder of a run, at its server.", autocompletion=completion.runs)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the picture and the numbers.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", metavar="FILE", help="As of landscape; default: what the run had."),
    ] = None,
    sites: Annotated[
        str | None, typer.Option("--sites", "-s", metavar="NAMES", help="Whose images; default: all.")
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Of these sites.")] = "validation",
    current_round: Annotated[
        int | None, typer.Option("--round", metavar="N", help="From 0; default: the last.")
    ] = None,
    device: Device = None,
    task_file: OwnCode = None,
    overwrite: Overwrite = False,
) -> None:
    """Draws the CKA between the local models of each two sites of a run, layer by layer (Fig. 1b of Fed-LWR).

    The run must have kept them (run --keep-local-models). It needs images: those of one site, or what the caller has.
    """
    with user_errors():
        from fairflare.prediction.landscape import load_trained
        from fairflare.prediction.similarity import kept_rounds, pairwise_cka
        from fairflare.reporting.similarity import NAME, write

        refuse_to_replace([out / f"{NAME}.csv"], overwrite)
        trained = load_trained([run], "last", task_file)
        kept = kept_rounds(trained[0])
        number = max(kept) if current_round is None else current_round
        if number not in kept:
            raise ValueError(f"{run} has kept no local models of round {number}; there are {', '.join(map(str, kept))}")
        settings = settings_of_sites([run], trained, data, sites)
        pairs, synthetic = pairwise_cka(trained[0], kept[number], settings, split, pick_device(device))
        title = f"CKA between local models, round {number}, {split} images of {len(settings)} site(s)"
        try:
            write(out, pairs, title, synthetic)
        except OSError as error:
            raise ValueError(f"--out {out} {unreadable(error)}") from error
    say(f"picture: {out / NAME}.png", console)
