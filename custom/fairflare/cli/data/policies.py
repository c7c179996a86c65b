"""Implement ``fairflare policies``, which writes a hospital's policies into start-up kits that others made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fairflare.cli.screen import console, say, user_errors

BUILDER = "fairflare.provision.SitePolicyBuilder"


def policies(
    kits: Annotated[list[Path], typer.Argument(metavar="KIT...", help="Start-up kits of a server or of sites.")],
    project: Annotated[
        Path | None,
        typer.Option("--project", "-p", metavar="FILE", help="project.yml whose SitePolicyBuilder says them."),
    ] = None,
) -> None:
    """Write policies into start-up kits: classes of our jobs only, no code, shell or log streaming, min_cases of 5."""
    from fairflare.provision import SitePolicyBuilder

    with user_errors():
        builder = SitePolicyBuilder(**(_arguments(project) if project else {}))
        for kit in kits:
            say(f"{builder.lay(kit)}: policies are in {kit / 'local'}", console)


def _arguments(project: Path) -> dict[str, Any]:
    """Return the arguments of the ``SitePolicyBuilder`` in a project file."""
    import yaml

    try:
        content = yaml.safe_load(project.read_text(encoding="utf-8"))
        (arguments,) = (entry.get("args") or {} for entry in content["builders"] if entry["path"] == BUILDER)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{project} is no project file with one {BUILDER}; give one that has it") from error
    return dict(arguments)
