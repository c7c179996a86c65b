"""Which sites a run has: what ``--sites`` says, and the names of the blocks in a data file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fairflare.base.checks import nearest

Chosen = int | list[str] | Literal["default"] | None


def parse_sites(text: str) -> int | list[str] | None:
    """``"4"`` -> 4; ``"a,b"`` -> ``["a", "b"]``; ``"all"`` -> ``None``.

    Raises:
        ValueError: several numbers, or one that is no count.
    """
    if text == "all":
        return None
    if text.isdigit():
        return int(text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    numbers = [name for name in names if name.isdigit()]
    if not numbers and any(_is_number(name) for name in names):
        raise ValueError(f"--sites wants a whole number of sites, or their names separated by commas, got {text!r}")
    if numbers:
        called = " and ".join(repr(name) for name in names)
        raise ValueError(
            f"--sites {text}: {len(names)} sites called {called}? Give a number of sites (--sites {numbers[-1]}) or "
            f"names (--sites {','.join(f'site-{name}' if name.isdigit() else name for name in names)})"
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def run_sites(chosen: Chosen, local: Mapping[str, Any]) -> int | list[str] | None:
    """The sites of a run in the simulator or in process.

    Args:
        chosen: ``--sites``, ``"default"`` without.
        local: the data file.

    Returns:
        Their number (0: as many as the method's quick job has) or names; those of the data file where it has data for
        sites by name.

    Raises:
        ValueError: ``--sites`` names others than the file (says which), or the file is that of one site alone.
    """
    blocks = local.get("sites")
    blocks = {name: block for name, block in blocks.items() if name != "server"} if isinstance(blocks, Mapping) else {}
    shared = "data_root" in local  # of every site: their lists tell them apart, or it is one site's own file
    told = ("data_root", "datalist") if shared else ("data_root",)
    if not any(isinstance(block, Mapping) and any(key in block for key in told) for block in blocks.values()):
        if shared and (chosen in ("default", 0, None) or (chosen if isinstance(chosen, int) else len(chosen)) > 1):
            raise ValueError(
                "--data names one folder and no 'sites': it is the file of one site. Give every site's folder under "
                "'sites' (docs/data.md), or run that site alone: --sites 1 --min-sites 1"
            )
        return 0 if chosen == "default" else chosen
    if chosen in ("default", 0):
        return list(blocks)
    names = [f"site-{number}" for number in range(1, chosen + 1)] if isinstance(chosen, int) else list(chosen or ())
    differences = [
        *(f"{name!r} is not in the file{nearest(name, blocks)}" for name in names if name not in blocks),
        *(f"the file's {name!r} is not in --sites" for name in blocks if name not in names),
    ]
    if differences:
        raise ValueError(
            f"--sites and --data name different sites: {_listed(differences)}. Leave --sites out to take those of the "
            "file"
        )
    return names


def _listed(texts: Sequence[str], most: int = 6) -> str:
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(text.rstrip(";.?") for text in texts[:most]) + more
