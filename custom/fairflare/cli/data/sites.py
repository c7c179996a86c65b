"""Find the sites of a command, from ``--sites`` and from a data file, a datalist or a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fairflare.base.checks import NO_SITE, SERVER, nearest, refuse, site_names
from fairflare.base.disk.files import keys_once, unreadable
from fairflare.cli.screen import note
from fairflare.reporting.layout import join_parts

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
PREPARE = "; `fairflare prepare` writes it for folders of images (docs/datasets.md)"
Chosen: TypeAlias = int | Sequence[str] | None  # "default": the option was not given


def parse_sites(text: str) -> int | list[str] | None:
    """Parse a text for sites: ``"4"`` -> 4; ``"a,b"`` -> ``["a", "b"]``; ``"all"`` -> ``None``.

    Raises:
        ValueError: the text has several numbers, or a number that is no count.
    """
    if text == "all":
        return None
    if text.isdigit():
        return int(text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    numbers = [name for name in names if name.isdigit()]
    refuse({
        f"--sites {text}: {len(names)} sites called {' and '.join(map(repr, names))}? Give a number of sites "
        f"(--sites {''.join(numbers[-1:])}) or "
        f"names (--sites {','.join(f'site-{name}' if name.isdigit() else name for name in names)})": numbers,
        f"--sites wants a whole number of sites, or their names separated by commas, got {text!r}":
            any(NUMBER.fullmatch(name) for name in names),
    })  # fmt: skip
    return names


def run_sites(chosen: Chosen, local: Mapping[str, Any], *, some: bool = False) -> Chosen:
    """Return the sites of a run in the simulator or in process.

    Args:
        chosen: value of ``--sites``; ``"default"``: the option was not given.
        local: content of the data file.
        some: whether ``--sites`` may choose some of the file's sites; otherwise it must name all of them.

    Returns:
        The number of the sites (0: as many as the method's quick job has) or their names. If the data file has data
        for sites by name, or has names other than site-1, site-2, ..., the names are those of the file.

    Raises:
        ValueError: ``--sites`` and the file name different sites (the message says which), or the file is for one site.
    """
    blocks = local.get("sites")
    blocks = {name: block for name, block in blocks.items() if name != SERVER} if isinstance(blocks, Mapping) else {}
    shared = "data_root" in local  # one folder for all sites, whose datalists differ; or this is one site's own file
    named = any(
        isinstance(block, Mapping) and ("data_root" in block or (shared and "datalist" in block))
        for block in blocks.values()
    )
    if not named and all(re.fullmatch(r"site-\d+", name) for name in blocks):  # settings of sites with phantoms
        if shared and (chosen in ("default", 0, None) or (chosen if isinstance(chosen, int) else len(chosen)) > 1):
            raise ValueError(
                "--data names one folder and no 'sites': it is the file of one site. Give every site's folder under "
                "'sites' (docs/data.md), or run that site alone: --sites 1 --min-sites 1"
            )
        return 0 if chosen == "default" else chosen
    if chosen in ("default", 0):
        return list(blocks)
    names = [f"site-{number}" for number in range(1, chosen + 1)] if isinstance(chosen, int) else list(chosen or ())
    if differences := [
        *(
            f"{name!r} is not in the file{nearest(name, (site for site in blocks if site not in names))}"
            for name in names
            if named and name not in blocks
        ),
        *(f"the file's {name!r} is not in --sites" for name in blocks if not (some or name in names)),
    ]:
        raise ValueError(
            "--sites and --data name different sites: "
            f"{join_parts((text.rstrip(';.?') for text in differences), '; ', 6)}. Leave --sites out to take those of "
            "the file"
        )
    return names


def names_of(sites: str | None) -> list[str] | None:
    """Return the names in ``--sites``, for a command that takes only names, or ``None`` if the option was not given.

    Raises:
        ValueError: the text is a number or has no name.
    """
    names = None if sites is None else parse_sites(sites)
    if isinstance(names, int) or (sites is not None and not names):
        raise ValueError(f"--sites of this command takes names, separated by commas, got {sites!r}")
    return names


# ------------------------------------------------------------------------------------------------ files


def file_in(data: Path) -> Path:
    """Return the site file for ``--data``: the path itself, or ``fairflare.json`` in a folder or beside a manifest."""
    return (
        data / "fairflare.json"
        if data.is_dir()
        else data.with_name("fairflare.json")
        if data.name == "manifest.json"
        else data
    )


def say_unread(file: Path, content: Mapping[str, Any]) -> None:
    """Print a note about each site file in a site's own folder, which is not read if a file of all sites is given.

    Raises:
        ValueError: a site has the name of FLARE's server.
    """
    blocks = content.get("sites")
    for site, block in blocks.items() if isinstance(blocks, Mapping) else ():
        if site == SERVER and isinstance(block, Mapping) and not {"data_root", "datalist"}.isdisjoint(block):
            raise ValueError(f"{file}: {NO_SITE}")
        if (other := file.parent / site / file.name).is_file():
            note(f"{other} is not read; the block of {site!r} in {file} is")


def read_object(file: Path, what: str = "", wanted: str = "a JSON object") -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: the file has no object; the message names the file after ``what``, and says what is ``wanted``.
    """
    try:
        # UTF-8 or UTF-16, with or without a byte-order mark.
        content = json.loads(file.read_bytes(), object_pairs_hook=keys_once)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}{file} {unreadable(error)}{PREPARE}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{what}{file} must hold {wanted}")
    return content


def sites_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of each site of a path: a site file, a datalist, a site's folder or a folder of sites.

    Raises:
        ValueError: the path has no site; the message says what was expected.
    """
    from fairflare.data.datalist import SPLITS
    from fairflare.federation.site.site_file import own_settings

    if path.is_dir():
        file = next((path / name for name in ("fairflare.json", "datalist.json") if (path / name).is_file()), None)
        if file is None:
            folders = sorted(child.name for child in path.iterdir() if (child / "datalist.json").is_file())
            if not folders:
                raise ValueError(
                    f"{path} has no fairflare.json, no datalist.json, and no folder with a datalist.json{PREPARE}"
                )
            return {name: {"data_root": str(path.absolute() / name)} for name in site_names(folders)}
        path = file
    content = read_object(path, wanted="a JSON object: a site file (docs/data.md) or a datalist")
    say_unread(path, content)
    if path.name == "datalist.json" or any(split in content for split in SPLITS):
        return {path.absolute().parent.name: {"data_root": str(path.absolute().parent), "datalist": path.name}}
    blocks = content.get("sites")
    names = [name for name in blocks if name != SERVER] if isinstance(blocks, Mapping) and blocks else ["site-1"]
    try:
        return {name: own_settings(content, name) for name in names}
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error
