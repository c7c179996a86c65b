"""Provide a FLARE POC environment that keeps its results, and read the results document of a FLARE ``Run``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from nvflare.recipe.poc_env import PocEnv as StockPocEnv
from nvflare.recipe.run import Run

from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import find_results, read_results


class PocEnv(StockPocEnv):
    """Run jobs in FLARE's POC environment, and keep their results after the environment is removed.

    FLARE downloads a job's result into the POC workspace and removes the workspace when the run is over. So FLARE's
    ``run.get_result()`` names a folder that no longer exists. With this class it names a copy.

    Args:
        results: folder for the results, with one folder for each job, named by its id; made when it is needed.
        arguments: arguments of :class:`nvflare.recipe.poc_env.PocEnv`: ``num_clients``, ``clients``, ``gpu_ids``,
            ``use_he``, ``project_conf_path``, ...
    """

    def __init__(self, *, results: str | Path = "poc-results", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.results = Path(results).absolute()

    def get_job_result(self, job_id: str, timeout: float = 0.0) -> str | None:
        """Wait for a job, copy its results and return their folder, or ``None`` if ``timeout`` seconds were too few."""
        if not (result := super().get_job_result(job_id, timeout)):
            return None
        return str(shutil.copytree(result, self.results / job_id, dirs_exist_ok=True))


def of(run: Run, timeout: float = 0.0) -> RunResults:
    """Wait for a run in any of FLARE's environments and read its results.

    Args:
        run: result of ``recipe.run(env)`` or ``recipe.execute(env)``.
        timeout: seconds to wait; 0: until the run is over.

    Returns:
        The results document, described in ``docs/results.md``.

    Raises:
        ValueError: the run has no results: it is not over yet, it failed before its first round, or FLARE's own
            ``PocEnv`` has removed them.
    """
    folder = run.get_result(timeout=timeout)
    if not folder:
        raise ValueError(
            f"job {run.get_job_id()} has no result (status {run.get_status()}): it is not over, or cannot be reached"
        )
    if not Path(folder).exists():
        raise ValueError(
            f"{folder} is gone: FLARE's PocEnv removes its workspace; use fairflare.recipes.PocEnv, which keeps results"
        )
    return read_results(find_results(Path(folder)))
