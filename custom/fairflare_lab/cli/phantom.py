"""Implement ``fairflare phantom``, which writes synthetic images to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fairflare.cli.screen import console, user_errors


def phantom(
    name: Annotated[str, typer.Argument(help="prostate, volumes3d, dermoscopy(7), fundus or endoscopy.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")],
    sites: Annotated[int, typer.Option("--sites", "-s", min=1, help="How many.")] = 6,
    size: Annotated[
        int | None, typer.Option(help="Height and width; default: 64 (prostate), 32 (volumes3d), 48.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    cases: Annotated[float, typer.Option(help="Of prostate and volumes3d: factor on the number of patients.")] = 1.0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="KEY=VALUE of a phantom with classes (num_samples, partition, ...); may be repeated."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier call wrote.")] = False,
) -> None:
    """Write the synthetic images of several sites to disk, in the form that `fairflare prepare` gives data sets."""
    from fairflare.base.checks import choice
    from fairflare.base.settings import field_names
    from fairflare.cli.options import parse_settings
    from fairflare.data.preparers.__main__ import counting_files, say
    from fairflare_lab.phantoms import PhantomPlan
    from fairflare_lab.sets.phantoms import PROSTATE, VOLUMES, prepare_phantom

    with user_errors(out):
        given: dict[str, Any] = parse_settings(settings or [])
        if given and name in (PROSTATE, VOLUMES):
            raise ValueError(f"--set is of phantoms with classes; {name} has --size, --cases and --seed")
        fixed = ("phantom", "num_sites", "seed", "image_size")
        for key in given:
            choice("--set", key, [field for field in field_names(PhantomPlan) if field not in fixed])
        if name not in (PROSTATE, VOLUMES) and cases != 1.0:
            raise ValueError(
                "--cases is of the prostate and volumes3d; set num_samples of a phantom with classes (--set)"
            )
        with counting_files() as progress:
            plan = PhantomPlan(**{"phantom": name, "num_sites": sites, **given}) if given else None
            prepare_phantom(
                name, out, sites=sites, image_size=size, cases=cases, plan=plan, seed=seed, overwrite=overwrite,
                progress=progress, record={
                    "preparer": "phantom",
                    "options": {"name": name, "sites": sites, "size": size, "cases": cases, **given},
                },
            )  # fmt: skip
    say(out)
    console.print("SYNTHETIC images, no patient data", highlight=False)
