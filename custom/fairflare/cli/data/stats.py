"""Implement ``fairflare stats``, which measures how different the sites' images are, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fairflare.cli.data.sites import names_of, sites_of
from fairflare.cli.options import Overwrite, parse_settings, refuse_to_replace, write_job
from fairflare.cli.screen import AsJson, console, one_document, one_form, say, user_errors


def stats(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE|DIR",
            help="A fairflare.json, a folder of sites as `prepare` writes it, or one site's folder.",
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option("--sites", "-s", metavar="NAMES", help="Separated by commas; default: all that --data has."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="task, min_cases (default 5), intensity, window or orientation; may be repeated.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="For stats.html and stats.json.")] = Path(
        "stats"
    ),
    job: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Writes the FLARE job into this folder instead; --data is not needed."),
    ] = None,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="With --job: carry the package, for the simulator; default: no code.")
    ] = False,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a page with counts, classes, intensities and sizes of the images, by site and pooled."""
    from fairflare.reporting.sites.statistics import DOCUMENT, PAGE, write_statistics

    with user_errors(out), one_document(as_json) as put:
        given = parse_settings(settings)
        names = names_of(sites)
        if job is not None:
            from fairflare.flare.export.stats_recipe import StatsRecipe

            one_form(as_json, job=True)
            called = () if data is None else class_names(sites_of(data))
            recipe = StatsRecipe(
                sites=names, packaging="bundle" if bundle else "preinstalled", class_names=called, **given
            )
            write_job(recipe, job, overwrite, "--job")
            return
        if data is None:
            raise ValueError("give --data, or --job for the FLARE job that asks sites where their images are")
        if bundle:
            raise ValueError("--bundle goes with --job")
        if not as_json:
            refuse_to_replace([out / name for name in (PAGE, DOCUMENT)], overwrite)
        document = _here(data, names, given)
        if as_json:
            put(**dict(document))
            return
        for line in write_statistics(document, out):
            say(line, console)


def _here(data: Path, names: list[str] | None, given: dict[str, Any]) -> Any:
    from fairflare.flare.statistics import ImageStatistics, statistics_here

    settings_by_site = sites_of(data)
    if unknown := [name for name in names or () if name not in settings_by_site]:
        raise ValueError(f"--sites: {data} has no {', '.join(unknown)}; it has {', '.join(settings_by_site)}")
    chosen = {name: settings for name, settings in settings_by_site.items() if names is None or name in names}
    return statistics_here(chosen, ImageStatistics(**given), class_names(chosen))


def class_names(sites: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Return the class names of the first datalist that has usable ones.

    Sites that name the classes otherwise are reported by `fairflare check-data`.
    """
    from fairflare.cli.data.check import _labels

    return tuple(_labels(sites)[1] or ())
