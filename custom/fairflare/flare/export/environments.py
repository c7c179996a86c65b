"""FLARE's execution environments: a POC that keeps its results, and from a FLARE ``Run`` to our results document."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from nvflare.recipe.poc_env import PocEnv as StockPocEnv
from nvflare.recipe.run import Run

from fairflare.reporting.documents import Results
from fairflare.reporting.results import find_results, read_results


class PocEnv(StockPocEnv):
    """FLARE's POC environment, whose results outlive it.

    FLARE downloads a job's result into the POC workspace and removes that when the run is over, so its
    ``run.get_result()`` names a folder that is gone. Here it names a copy.

    Args:
        results: folder for the results, one folder a job in it, named by its id; made when it is needed.
        arguments: of :class:`nvflare.recipe.poc_env.PocEnv`: ``num_clients``, ``clients``, ``gpu_ids``, ``use_he``,
            ``project_conf_path``, ...
    """

    def __init__(self, *, results: str | Path = "poc-results", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.results = Path(results).absolute()

    def get_job_result(self, job_id: str, timeout: float = 0.0) -> str | None:
        """Wait for the job and copies what it left; its folder, or ``None`` when ``timeout`` seconds were too few."""
        found = super().get_job_result(job_id, timeout)
        if not found:
            return None
        kept = self.results / job_id
        shutil.copytree(found, kept, dirs_exist_ok=True)
        return str(kept)


def of(run: Run, timeout: float = 0.0) -> Results:
    """Wait for a run of any environment and read its results.

    Args:
        run: of ``recipe.run(env)`` or ``recipe.execute(env)``.
        timeout: seconds to wait; 0: until it is over.

    Returns:
        The document of ``docs/results.md``.

    Raises:
        ValueError: the run left no results: it is not over yet, it failed before its first round, or FLARE's own
            ``PocEnv`` has removed them.
    """
    folder = run.get_result(timeout=timeout)
    if not folder:
        raise ValueError(
            f"job {run.get_job_id()} has no result (status {run.get_status()}): not over, or not reachable"
        )
    if not Path(folder).exists():
        raise ValueError(
            f"{folder} is gone: FLARE's PocEnv removes its workspace; use fairflare.recipes.PocEnv, which keeps results"
        )
    return read_results(find_results(Path(folder)))
