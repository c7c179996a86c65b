"""Declare bounds on what one site, or a few together, can do to a round: settings of every run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field as Range

from fairflare.base.settings import PositiveInt, Share, field_names, settings
from fairflare.core.states import Aggregate

AUTO = "auto"
# Default bounds of an exported job, whose sites run on several machines; docs/robustness.md gives the reasons.
FOR_HOSPITALS: dict[str, Any] = {
    "max_weight": AUTO, "max_excess": 0.16, "max_samples": 100_000, "max_update_norm": 3.0,
}  # fmt: skip


def auto_share(num_sites: int) -> float:
    """Return the share that ``max_weight=auto`` stands for: 1.5 times the equal share of the job's sites, at most 0.4.

    With this share and ``max_excess`` 0.16 a third of the sites never holds half of the weight.
    """
    return min(0.4, 1.5 / num_sites)


@settings
class Bounds:
    """Declare bounds on what one site, or a few sites together, can do to a round; a setting without value is no bound.

    Args:
        max_weight: largest share of one site, in each layer where weights are by layer; what is cut goes to the others
            in proportion. With K sites at least 1/K. ``auto``: the smaller of 0.4 and 1.5/K, K the sites of the job;
            an exported job has that.
        max_excess: largest sum of what sites have above the equal share 1/K, in each layer: any f of K sites together
            hold at most f/K and this. Beyond it all weights move towards equal ones. An exported job has 0.16.
        max_samples: a site that claims more training samples counts as having so many. An exported job has 100000.
        max_update_norm: an update with a norm of more than so many times the round's median is scaled down to that. An
            exported job has 3.0.
        aggregate: what is made of the sites' models with the method's weights, number by number: their ``mean``, or,
            where a few sites may be wrong in any way, the weighted ``median`` or ``trimmed_mean``; not with methods
            whose sites get models of their own, or whose server makes tensors or steps.
        trim: share of the weight that ``trimmed_mean`` leaves out at either end; without a value 0.25.
    """

    max_weight: Share | Literal["auto"] | None = None
    max_excess: Share | None = None
    max_samples: PositiveInt | None = None
    max_update_norm: Annotated[float, Range(strict=True, allow_inf_nan=False, ge=1)] | None = None
    aggregate: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim: Annotated[float, Range(strict=True, gt=0, lt=0.5)] | None = None

    @property
    def how(self) -> Aggregate:
        """Return how the sites' models are aggregated: by mean, median or trimmed mean."""
        return Aggregate(self.aggregate) if self.trim is None else Aggregate(self.aggregate, self.trim)


def bounds_of(run: Bounds, num_sites: int) -> dict[str, Any]:
    """Return the bounds of a run by name, with ``max_weight=auto`` resolved for a job of ``num_sites`` sites."""
    resolved = {"max_weight": auto_share(num_sites)} if run.max_weight == AUTO and num_sites else {}
    return {name: getattr(run, name) for name in field_names(Bounds)} | resolved


def describe_bounds(run: Bounds, num_sites: int | None) -> str:
    """Return the bounds of a job in one line; ``num_sites`` is None if the number of sites is not known yet."""
    settings = bounds_of(run, num_sites or 0)
    shown = {name: f"{settings[name]:g}" for name in FOR_HOSPITALS if isinstance(settings[name], (int, float))}
    if run.max_weight == AUTO:
        shown["max_weight"] = (
            f"{auto_share(num_sites):.4g} ({AUTO}, {num_sites} sites)" if num_sites
            else f"{AUTO} (min(0.4, 1.5/K), K the sites that take part)"
        )  # fmt: skip
    return ", ".join(f"{name} {shown[name]}" for name in FOR_HOSPITALS if name in shown)
