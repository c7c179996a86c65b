"""``fairflare adapt``: a run's model with the norm statistics of one's own images, which need no labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fairflare.cli import screen
from fairflare.cli.predict import find_images, pick_device

FEW = 8  # docs/norm_statistics.md: below so many pictures the statistics are those of single images


def adapt(
    model: Annotated[
        Path, typer.Argument(help="Folder of a run (runs/fed_avg-seed0), a FLARE download, or a model file (.pt).")
    ],
    images: Annotated[list[str], typer.Argument(help="Files, folders or patterns, as for predict; without labels.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The model file to write (.pt); predict takes it.")],
    best: Annotated[
        bool | None,
        typer.Option("--best/--last", help="The best model by validation, or the last; default: best, else last."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: the first GPU, else cpu.")] = None,
    task_file: Annotated[
        Path | None, typer.Option(help="The task.py of the run, where it has code of its own; that code is run.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Fits the norm statistics of a run's model to the images of a hospital that was not there. Labels are not read.

    The means and variances in the batch norms become those of these images;
    no weight changes. It takes models with norm_statistics=site, which no new
    site could use otherwise. Exit code 1 when an image could not be used.
    """
    with screen.user_errors():
        from fairflare.prediction.adapt import adapt as measured
        from fairflare.prediction.adapt import open_model, save

        if out.suffix != ".pt":
            raise ValueError(f"--out {out} must be the name of a file that ends in .pt")
        if out.exists() and not overwrite:
            raise ValueError(f"{out} exists; give --overwrite to replace it, or another --out")
        which: Literal["best", "last"] | None = None if best is None else "best" if best else "last"
        found = find_images(images, out)
        predictor = open_model(model, which, task_file=task_file, device=pick_device(device))
        result = measured(predictor, [image.file for image in found])
        written = save(result, out)
        say = screen.errors.print
        for file, reason in result.unusable.items():
            say(f"not used: {file}: {reason}", markup=False, highlight=False, soft_wrap=True)
        if result.left:
            say(f"as they were: {', '.join(result.left)}", markup=False, highlight=False, soft_wrap=True)
        if result.pictures < FEW:
            say(
                f"{result.pictures} pictures are few: the statistics may be worse than those of the training",
                soft_wrap=True,
            )
        screen.console.print(
            f"{written.path}: {len(result.norms)} batch norms measured on {result.pictures} pictures of {result.files} "
            "files",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    raise typer.Exit(int(bool(result.unusable)))
