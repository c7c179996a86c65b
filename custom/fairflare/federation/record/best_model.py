"""Choose the best of a run's models by their validation metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from fairflare.core.fairness import summarize
from fairflare.federation.plan.run_settings import RunSettings

_UNTRAINED, _PARTLY, _WHOLLY = 0, 1, 2


class BestModel:
    """Compare a run's models by their validation scores, always over the same sites.

    A site *counts* from its first score on. A site that scored none of more than ``max_missed`` models in a row stops
    counting until its next score. A model that a counting site did not score is passed over, so that a round cannot win
    by the absence of the worst site. Two models are compared by the scores of the sites that scored both; of equal
    models the later one is better. The initial model, which no round trained, and a model that not all counting sites
    scored are the best only as long as no other model is.

    Args:
        run: settings of the run, of which ``best_by``, ``best_lambda`` and ``max_missed`` are used.
        higher: whether larger values of the metric are better.

    Attributes:
        made: round that made the best model; -1: it is the initial model; ``None`` if there is no best model yet.
        scores: the best model's metric by site.
    """

    def __init__(self, run: RunSettings, higher: bool) -> None:
        self.run, self.higher = run, higher
        self.forget()

    def forget(self) -> None:
        """Forget all models and their scores, as before the first model."""
        self.made: int | None = None
        self.scores: dict[str, float] = {}
        self._missed: dict[str, int] = {}  # unscored models in a row, by site that ever gave a score
        self._rank = -1

    @property
    def value(self) -> float | None:
        """Return the best model's score (such as the mean) over the sites that scored this model."""
        return self._criterion(self.scores) if self.scores else None

    def offer(self, scores: Mapping[str, float], made: int, *, last: bool = False) -> bool:
        """Return whether a model is the best so far; if so, store it as the best model.

        Args:
            scores: the model's validation metric by site; a value that is not finite counts as no score.
            made: round that made the model; -1: it is the initial model.
            last: whether this is the run's last model, which is taken if no model was scored by all counting sites.
        """
        finite = {site: float(scores[site]) for site in sorted(scores) if math.isfinite(scores[site])}
        self._missed = {site: missed + 1 for site, missed in self._missed.items()} | dict.fromkeys(finite, 0)
        counting = {site for site, missed in self._missed.items() if missed <= self.run.max_missed}
        rank = _UNTRAINED if made < 0 else _WHOLLY if finite and counting <= set(finite) else _PARTLY
        is_best = bool(finite or last) and self._better(finite, rank, last)
        if is_best:
            self.made, self.scores, self._rank = made, finite, rank
        return is_best

    def _better(self, finite: Mapping[str, float], rank: int, last: bool) -> bool:
        if rank != self._rank or rank != _WHOLLY:
            return rank > self._rank or (rank == self._rank == _PARTLY and last)
        both = [site for site in finite if site in self.scores]
        if not both:
            return True
        new, old = (self._criterion({site: by[site] for site in both}) for by in (finite, self.scores))
        return new >= old if self.higher else new <= old

    def _criterion(self, scores: Mapping[str, float]) -> float:
        summary = summarize(scores, higher_is_better=self.higher)
        less = (1 if self.higher else -1) * self.run.best_lambda * summary.std
        return {
            "mean": summary.mean,
            "worst": summary.worst,
            "mean_minus_std": summary.mean - less,
            "median": statistics.median(scores.values()),
        }[self.run.best_by]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values about the best model for the results: its round, criterion, value and sites."""
        factor = {"lambda": self.run.best_lambda} if self.run.best_by == "mean_minus_std" else {}
        return {
            "round": self.made, "by": self.run.best_by, **factor, "value": self.value, "sites": sorted(self.scores)
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as values that JSON can hold."""
        return {"made": self.made, "scores": self.scores, "missed": self._missed, "rank": self._rank}

    def load_state_dict(self, state: Any) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.made, self._rank = state["made"], int(state["rank"])
        self.scores, self._missed = dict(state["scores"]), dict(state["missed"])
