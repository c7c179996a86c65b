"""Shield imports from the caller's environment."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def ignore_matplotlib_settings() -> None:
    """Keep the caller's matplotlib settings out of this process and of its children.

    MONAI imports ``matplotlib.pyplot``. A backend that this environment does not have (a Jupyter kernel names its own
    in ``MPLBACKEND``), or a damaged ``matplotlibrc``, would end every import of MONAI. Commands and FLARE's processes
    show no window, so the backend becomes ``Agg``, with the settings that matplotlib ships. A process that has
    imported matplotlib already keeps its settings.
    """
    found = find_spec("matplotlib")
    if found is None or found.origin is None or "matplotlib" in sys.modules:
        return
    shipped = Path(found.origin).parent / "mpl-data"
    os.environ.update(MPLBACKEND="Agg", MATPLOTLIBRC=str(shipped / "matplotlibrc"))
    if Path("matplotlibrc").exists():  # matplotlib looks into the working directory before it asks MATPLOTLIBRC
        here = Path.cwd()
        os.chdir(shipped)
        try:
            import_module("matplotlib")
        finally:
            os.chdir(here)


def started_by_flare() -> bool:
    """Return whether this process is one of FLARE's own: its command, a server, a client, or a job of either."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (spec.name if spec else Path(sys.argv[0]).name).partition(".")[0] == "nvflare"
