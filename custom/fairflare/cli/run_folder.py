"""The folder of a run: what it begins with, whether it holds another run, and what its log says at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import unreadable


def site_settings(site_file: Path | None, experiment: str, workspace: Path) -> dict[str, Any]:
    """The run's local/fairflare.json: the user's, plus folders that outlive the run's workspace."""
    local: dict[str, Any] = {}
    if site_file is not None:
        site_file = file_in(site_file)
        try:
            local = json.loads(site_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise ValueError(f"--data {site_file} {unreadable(e)}") from e
        if not isinstance(local, dict):
            raise ValueError(f"--data {site_file} must hold a JSON object")
    if experiment:
        state = workspace.with_name(workspace.name + ".state")
        local.setdefault("state_root", str(state / "sites"))
        local.setdefault("checkpoint_root", str(state / "server"))
    return local


def file_in(data: Path) -> Path:
    """The site file that ``--data`` means: itself, or that of a folder such as ``prepare`` writes."""
    return data / "fairflare.json" if data.is_dir() else data


def refuse_to_replace_run(workspace: Path, experiment: str) -> None:
    """Raises ValueError when the folder holds another run, with a round, than the one that is gone on with."""
    from fairflare.reporting.results import find_results, read_results

    try:
        found = read_results(find_results(workspace))
    except ValueError:
        return
    if refused(workspace):
        return
    own = (found["info"] or {}).get("experiment")
    if not experiment or own != experiment:
        raise ValueError(
            f"{workspace} holds a run already ({found['status']}, of {found['started']}); give --overwrite to replace "
            "it, or another --label, --seed or --workspace"
        )


def refused(workspace: Path) -> bool:
    """Whether the folder's run failed before its first round: nothing is lost where another takes its place."""
    from fairflare.reporting.results import find_results, read_results

    try:
        found = read_results(find_results(workspace))
    except (OSError, ValueError):
        return False
    return found["status"] == "failed" and not found["rounds"]


@contextmanager
def earlier_results(workspace: Path, folder: Path, experiment: str) -> Iterator[None]:
    """While a run goes: an earlier run's results are not to be taken for its own.

    Those of the experiment that is gone on with come back when the new run ends before it began (other settings than
    the checkpoint's, a bad file): nothing of them is in the new ones then.

    Args:
        workspace: of the run; they wait beside it.
        folder: with the results.
        experiment: id; empty: they go.
    """
    aside = workspace.with_name(workspace.name + ".before")
    if not experiment:
        (folder / "results.json").unlink(missing_ok=True)
    elif _begun(folder):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    try:
        yield
    finally:
        if _begun(folder):
            shutil.rmtree(aside, ignore_errors=True)
        elif experiment and aside.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            aside.rename(folder)


def _begun(folder: Path) -> bool:
    from fairflare.reporting.results import RESULTS_FILE, read_results

    try:
        return bool(read_results(folder / RESULTS_FILE)["info"])
    except (OSError, ValueError):
        return False


def last_errors(log: Path, count: int = 5) -> list[str]:
    """The lines of a log that say what went wrong, else the last ones."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    marked = [line for line in lines if any(word in line for word in ("ERROR", "Error", "CRITICAL"))]
    return (marked or lines)[-count:]
