"""Describe an error in a user's own code, or of a missing package, in one line for the person who can correct it."""

from __future__ import annotations

import errno
import gzip
import sysconfig
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from fairflare.base.checks import first_of

PACKAGE = Path(__file__).parents[1]
MOST = 160  # largest number of characters that are quoted of an error's own text
#: ``{imported module: (name of its package, extra of fairflare that installs the package)}``
EXTRAS = {
    "PIL": ("pillow", "data"), "tifffile": ("tifffile", "data"), "nibabel": ("nibabel", "data"),
    "pydicom": ("pydicom", "data"), "pandas": ("pandas", "data"), "matplotlib": ("matplotlib", "page"),
    "jinja2": ("jinja2", "page"), "tensorboard": ("tensorboard", "tensorboard"), "peft": ("peft", "adapters"),
}  # fmt: skip
#: Errors of the operating system that are of the machine or of a network drive, and of no single file.
OF_MACHINE = {
    getattr(errno, name, 0)  # not every system has all
    for name in (
        "EIO", "EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EAGAIN", "ESTALE", "ETIMEDOUT", "ENOTCONN", "ECONNRESET",
        "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "EREMOTEIO",
    )
}  # fmt: skip


def lacking_package(error: BaseException | None) -> str | None:
    """Return a sentence about the package to install if a missing package caused the error; else ``None``."""
    seen: set[int] = set()  # the causes of an error may form a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in EXTRAS:
            return _needs(*EXTRAS[name])
        error = error.__cause__ or error.__context__
    return None


def describe_error(error: BaseException) -> str:
    """Return an error as ``RuntimeError: expected 1 channel (my_task.py:12)``: kind, text, line of the user's code.

    The text may name files and values: show it only to the owner of the code and the data.
    """
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST else text[: MOST - 3] + "..."
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    where = f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def lacking_for_pages() -> str | None:
    """Return a sentence about a package that is missing for HTML pages, or ``None`` if pages can be made."""
    absent = [name for name in ("matplotlib", "jinja2", "pandas") if find_spec(name) is None]
    return _needs(*EXTRAS[absent[0]]) if absent else None


def _needs(package: str, extra: str) -> str:
    return f"this needs the package {package}, which is not installed: pip install 'fairflare[{extra}]'"


def _is_installed(file: str) -> bool:
    path = Path(file)
    folders = [PACKAGE, *(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib"))]
    return (
        file.startswith("<") or "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in folders)
    )


def is_of_machine(error: BaseException) -> bool:
    """Return whether an error is of the machine or its packages, and would meet any file.

    Such errors are a failed import, an attribute that a module does not have (a thread sees one half imported), too
    little memory, too many open files, and a network drive that does not answer.
    """
    if isinstance(error, (OSError, AttributeError)):
        return getattr(error, "errno", None) in OF_MACHINE or isinstance(getattr(error, "obj", None), ModuleType)
    return isinstance(error, (ImportError, MemoryError))


def may_be_of_file(error: Exception) -> bool:
    """Return whether the file that was read may have caused an error: not the machine, nor a mistake in this package.

    A reader raises errors of any type for a damaged file. An error that this package's own code raises about a file is
    a ``ValueError`` or an ``OSError``; any other one is a mistake in the code.
    """
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return not is_of_machine(error) and (isinstance(error, (ValueError, OSError)) or PACKAGE not in raised_in.parents)


@contextmanager
def reading_as(what: str) -> Iterator[None]:
    """Replace a library's error for a damaged file by a ``ValueError`` with a clear text, inside the context.

    Args:
        what: kind of file that is expected, for the message.

    Raises:
        ValueError: an error was raised inside the context, and is the cause of this one. An error of the machine
            (:func:`is_of_machine`), and an ``OSError`` with an error number, pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if is_of_machine(error) or (isinstance(error, OSError) and error.errno is not None):
            raise
        reason = first_of({
            "it is damaged: it ends early, or its checksum is wrong":
                isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)),
            "it has more pixels than Pillow opens (179 million)": type(error).__name__ == "DecompressionBombError",
            f"it is damaged, or no {what}": True,
        })  # fmt: skip
        raise ValueError(reason) from error
