"""Shield imports from the caller's environment, and spare those that nobody needs."""

from __future__ import annotations

import os
import sys
from getpass import getuser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fairflare.base.machine.later import compile_later


def shield_imports() -> None:
    """Keep the caller's matplotlib settings out of this process and its children, and name a user without a name.

    MONAI imports ``matplotlib.pyplot``. A backend that this environment does not have (a Jupyter kernel names its own
    in ``MPLBACKEND``), or a damaged ``matplotlibrc``, would end every import of MONAI. Commands and FLARE's processes
    show no window, so the backend becomes ``Agg``, with the settings that matplotlib ships. A process that has
    imported matplotlib already keeps its settings.

    MONAI also asks for the user's name. In a container the user id may have none, neither in the environment nor in
    the system, and the error would end the import; ``USER`` then becomes ``uid-12345``.

    torch's compiler is imported only where something is compiled.
    """
    compile_later()
    try:
        getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["USER"] = f"uid-{os.getuid()}"
    spec = find_spec("matplotlib")
    if spec is None or spec.origin is None or "matplotlib" in sys.modules:
        return
    shipped = Path(spec.origin).parent / "mpl-data"
    os.environ.update(MPLBACKEND="Agg", MATPLOTLIBRC=str(shipped / "matplotlibrc"))
    if Path("matplotlibrc").exists():  # matplotlib looks into the working directory before it asks MATPLOTLIBRC
        here = Path.cwd()
        os.chdir(shipped)
        try:
            import_module("matplotlib")
        finally:
            os.chdir(here)


def is_flare_process() -> bool:
    """Return whether this process is one of FLARE's own: its command, a server, a client, or a job of either."""
    # FLARE runs a training script in its own process with another ``__main__`` and ``sys.argv``.
    main = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), "")
    return Path(main).name.partition(".")[0] == "nvflare"
