"""Implement ``fairflare adapt``, which fits a model's norm statistics to the user's own images without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairflare.base.checks import refuse
from fairflare.cli.model.predict import find_images, pick_device
from fairflare.cli.options import Device, OfModels, Overwrite, OwnCode, which_model
from fairflare.cli.screen import console, say, user_errors

FEW = 8  # with fewer pictures a warning is printed; see docs/norm_statistics.md


def adapt(
    model: Annotated[
        Path, typer.Argument(help="Folder of a run (runs/fed_avg-seed0), a FLARE download, or a model file (.pt).")
    ],
    images: Annotated[list[str], typer.Argument(help="Files, folders or patterns, as for predict; without labels.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The model file to write (.pt); predict takes it.")
    ],
    best: OfModels = None,
    device: Device = None,
    task_file: OwnCode = None,
    overwrite: Overwrite = False,
) -> None:
    """Fit the norm statistics of a run's model to images of a hospital that took no part. Labels are not read.

    The means and variances in the batch norms become those of these images;
    no weight changes. It takes models with norm_statistics=site, which no new
    site could use otherwise. Exit code 1 when an image could not be used.
    """
    with user_errors(out):
        from fairflare.prediction.adapt import adapt as measured
        from fairflare.prediction.adapt import save
        from fairflare.prediction.predictor import load_predictor

        refuse({
            f"--out {out} must be the name of a file that ends in .pt": out.suffix != ".pt",
            f"{out} exists; give --overwrite to replace it, or another --out": out.exists() and not overwrite,
        })  # fmt: skip
        files = list(find_images(images, out))
        result = measured(
            load_predictor(model, which_model(best), task_file=task_file, device=pick_device(device), to_adapt=True),
            files,
        )
        written = save(result, out)
        for file, reason in result.unusable.items():
            say(f"not used: {file}: {reason}")
        if result.left:
            say(f"as they were: {', '.join(result.left)}")
        if result.pictures < FEW:
            say(f"{result.pictures} pictures are few: the statistics may be worse than those of the training")
        say(
            f"{written.path}: {len(result.norms)} batch norms measured on {result.pictures} pictures of "
            f"{result.files} files",
            console,
        )
    raise typer.Exit(int(bool(result.unusable)))
