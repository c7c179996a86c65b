"""Prepare the folder of a run, protect another run in it, and find errors in the run's log."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.cli.data.sites import file_in, read_object, say_unread
from fairflare.data.datalist import SPLITS

if TYPE_CHECKING:
    from fairflare.reporting.documents import RunResults

RAISED = re.compile(r"([a-zA-Z_]\w*\.)*[A-Z]\w*(Error|Exception): ")  # finds the last line of a traceback
# This expression finds the name of an error's type in front of a message of this package.
OURS = re.compile(r"^(RuntimeError|ValueError|[\w.]*FolderInUse): ")
MOST_TEXTS = 3


def site_settings(site_file: Path | None, experiment: str, workspace: Path) -> dict[str, Any]:
    """Return the content of a run's local/fairflare.json: the user's, with folders that outlive the workspace."""
    local: dict[str, Any] = {}
    if site_file is not None:
        local = read_object(file := file_in(site_file), "--data ")
        say_unread(file, local)
        if "sites" not in local and "data_root" not in local and any(split in local for split in SPLITS):
            raise ValueError(
                f"--data {file} is a datalist, the list of one site; give the fairflare.json that names every site's "
                "folder: `fairflare prepare` writes one, docs/data.md shows it"
            )
    if experiment:
        state = workspace.with_name(workspace.name + ".state")
        local.setdefault("state_root", str(state / "sites"))
        local.setdefault("checkpoint_root", str(state / "server"))
    return local


def refuse_to_replace_run(
    workspace: Path, experiment: str, other: str = "--label, --seed or --workspace", overwrite: str = "--overwrite"
) -> None:
    """Raise ValueError when the folder holds a run with rounds that is not the experiment to be resumed.

    Args:
        workspace: the folder.
        experiment: id of the experiment that is resumed.
        other, overwrite: options of the command that lead to another folder, and the one that replaces a run.
    """
    earlier = _there(workspace)
    if earlier is None or was_refused(workspace) or (experiment and earlier.info.experiment == experiment):
        return
    raise ValueError(
        f"{workspace} holds a run already ({earlier.status}, of {earlier.started}); give {overwrite} to replace "
        f"it, or another {other}"
    )


def was_refused(workspace: Path) -> bool:
    """Return whether the folder's run failed before its first round, so that replacing it loses nothing."""
    earlier = _there(workspace)
    return earlier is not None and earlier.status == "failed" and not earlier.rounds


def _there(folder: Path) -> RunResults | None:
    """Return the results in a folder, or ``None`` if the folder has no results, or they cannot be read."""
    from fairflare.reporting.results import find_results, read_results

    try:
        return read_results(find_results(folder))
    except ValueError:
        return None


@contextmanager
def earlier_results(workspace: Path, folder: Path, experiment: str) -> Iterator[None]:
    """Move an earlier run's results away during a new run, so that nobody takes them for the new run's results.

    If the new run continues an experiment, the experiment's earlier results are put aside. They are deleted after the
    new run if this has results of its own. They are restored if the new run ended before it had any, for instance
    because its settings differ from the checkpoint's.

    Args:
        workspace: workspace of the new run; the earlier results are put aside next to it.
        folder: folder of the results.
        experiment: id of the experiment that the new run continues; empty: none, and the earlier results are deleted.
    """
    aside = workspace.with_name(workspace.name + ".before")
    if not experiment:
        (folder / "results.json").unlink(missing_ok=True)
    elif _has_begun(folder):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    try:
        yield
    finally:
        if _has_begun(folder):
            shutil.rmtree(aside, ignore_errors=True)
        elif experiment and aside.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            aside.rename(folder)


def _has_begun(folder: Path) -> bool:
    return (results := _there(folder / "results.json")) is not None and bool(results.info)


def what_sites_said(results: RunResults, log: Path) -> list[str]:
    """Return the texts of the sites' errors from the run's log, if the reason of the failure does not contain them.

    The texts may be shown, because in the simulator the sites' log is the user's own.
    """
    lines = _read_lines(log) if "(details in the site's log)" in results.reason else []
    return list(dict.fromkeys(line for line in lines if RAISED.match(line)))[-MOST_TEXTS:]


def last_errors(log: Path, count: int = 5) -> list[str]:
    """Return the lines of a log that report errors, or its last lines if it has no such lines."""
    lines = _read_lines(log)
    raised = list(dict.fromkeys(line for line in lines if RAISED.match(line)))  # lines with ERROR only lead to these
    marked = raised or [line for line in lines if any(word in line for word in ("ERROR", "Error", "CRITICAL"))]
    return [OURS.sub("", line) for line in (marked or lines)[-count:]]


def _read_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
