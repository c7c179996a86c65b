"""A FLARE Recipe for every method; the job folders in ``jobs/`` are their export with default settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.recipe.spec import Recipe

from fairflare.core.checks import choice
from fairflare.federation.influence import FOR_HOSPITALS
from fairflare.federation.plan import make_plan
from fairflare.federation.run_settings import RunSettings
from fairflare.flare.job import PACKAGINGS, make_job


class FairRecipe(Recipe):
    """Any method as a FLARE job.

    Args:
        method: a name of ``fairflare list``.
        name: of the job; default: the method's.
        packaging: ``"task_file"``: the job carries ``app/custom/task.py`` and sites must permit custom code;
            ``"preinstalled"``: no custom code, sites need the package and ``fairflare.`` in their class allow list;
            ``"bundle"``: the job carries the whole package. A ``"preinstalled"`` job is for hospitals: one site's
            influence is bounded in it (:data:`fairflare.federation.influence.FOR_HOSPITALS`); ``settings`` go before.
        task, sites, settings, small, train_like, task_file: see :func:`fairflare.federation.plan.make_plan`.
        num_rounds: communication rounds; default: the method's small job.
        min_sites: usable results a round needs; also FLARE's ``min_clients``.
        phase_timeout: seconds for each of train, anchor and validate; for check at most ten minutes.
        isolate: each task in a child process at the site.
        run: further settings of :class:`fairflare.federation.run_settings.RunSettings`: ``seed``, ``experiment``,
            ``straggler_grace``, ``max_missed``, ``check_timeout``, ``require_all_sites``, ``keep_local_models``,
            ``max_weight``, ``max_samples``, ``max_update_norm``.

    Raises:
        ValueError: unknown method, task, packaging or setting (suggests the nearest), or a value out of range.
    """

    def __init__(
        self,
        method: str,
        *,
        name: str | None = None,
        packaging: str = "task_file",
        task: str | None = None,
        sites: int | Sequence[str] | None = 0,
        settings: Mapping[str, Any] | None = None,
        small: bool = True,
        train_like: str | None = None,
        task_file: str | Path | None = None,
        num_rounds: int | None = None,
        min_sites: int = 2,
        phase_timeout: float = 3600.0,
        isolate: bool = False,
        **run: Any,
    ) -> None:
        choice("packaging", packaging, PACKAGINGS)
        if packaging == "preinstalled" and task_file is not None:
            raise ValueError("a task file is custom code; packaging 'preinstalled' carries none")
        if packaging == "preinstalled":
            settings = {**FOR_HOSPITALS, **{k: run.pop(k) for k in FOR_HOSPITALS if k in run}, **(settings or {})}
        timeouts = dict.fromkeys(("train_timeout", "anchor_timeout", "validate_timeout"), phase_timeout)
        timeouts["check_timeout"] = min(RunSettings().check_timeout, phase_timeout)
        self.plan = make_plan(
            method,
            task=task,
            sites=sites,
            settings=settings,
            small=small,
            train_like=train_like,
            task_file=task_file,
            num_rounds=num_rounds,
            min_sites=min_sites,
            **{"label": name, **timeouts, **run},
        )
        super().__init__(make_job(self.plan, name or self.plan.method.name, packaging, isolate=isolate))


class FedAvgRecipe(FairRecipe):
    """FedAvg.

    Args:
        weighting: ``"samples"`` or ``"uniform"`` (Fed-LWR, Eq. 1).
        settings, common: see :class:`FairRecipe`.
    """

    def __init__(self, *, weighting: str = "samples", settings: Mapping[str, Any] | None = None, **common: Any) -> None:
        super().__init__("fed_avg", settings={"weighting": weighting, **(settings or {})}, **common)


class FedLWRRecipe(FairRecipe):
    """Fed-LWR and its ablations.

    Args:
        variant: ``""``, ``"cosine"`` (v1) or ``"last_layer"`` (v2).
        preset: ``"paper"`` or ``"authors"``.
        cka_estimator: see :class:`fairflare.methods.fed_lwr.LayerSimilarityReport`; ``None``: the preset's.
        settings, common: see :class:`FairRecipe`.
    """

    def __init__(
        self,
        *,
        variant: str = "",
        preset: str = "paper",
        cka_estimator: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> None:
        chosen: dict[str, Any] = {"preset": preset, **(settings or {})}
        if cka_estimator is not None:
            chosen["cka_estimator"] = cka_estimator
        super().__init__("fed_lwr" + (f"_{variant}" if variant else ""), settings=chosen, **common)
