"""An error in somebody's own code, in one line for whoever wrote it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
MOST = 160  # characters of the error's own text


def in_one_line(error: BaseException) -> str:
    """Gives ``RuntimeError: expected 1 channel (my_task.py:12)``: kind, text, and the last line outside all packages.

    It may name files and values: only for the one whose code and data they are.
    """
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST else text[: MOST - 3] + "..."
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _installed(frame.filename)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def _installed(file: str) -> bool:
    path = Path(file)
    if PACKAGE in path.parents or file.startswith("<"):
        return True
    return any(Path(sysconfig.get_paths()[kind]) in path.parents for kind in ("purelib", "platlib", "stdlib")) or (
        "site-packages" in path.parts
    )
