"""Bound the influence of one site on a round, whatever the method, and warn of sites that reach a bound.

The bounds lie between the collector and the rule. The inputs of a rule (sample counts, local models) are bounded before
the rule reads them, and its weights are bounded afterwards. ``docs/robustness.md`` explains what bounds can achieve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fairflare.base.checks import group_by_key
from fairflare.core.aggregation.clipping import COUNTERS, PARAMETERS, VARIANCES, Clip, limit_changes
from fairflare.core.weighting import CAP_TOLERANCE, capped_weights, excess_of, feasible_bound, tempered_weights
from fairflare.federation.plan.bounds import AUTO, Bounds, auto_share
from fairflare.federation.plan.bounds import FOR_HOSPITALS as FOR_HOSPITALS  # for scripts that import it from here
from fairflare.methods.base.rule import LayerWeights, SiteWeights, State, Weighing
from fairflare.reporting.documents import Warned

MAJORITY = 0.5 + 1e-9


class Words(NamedTuple):
    """Say in warnings what weights are.

    Attributes:
        part: end of the name of a bound that cuts them.
        what: what one weight is called.
        when: when they are cut, if not at once.
        layers: number of layers; ``None`` for weights of whole models.
    """

    part: str = ""
    what: str = "weight"
    when: str = ""
    layers: int | None = None

    def where(self, over: Sequence[float]) -> str:
        """Return in how many of the layers a weight is above a limit."""
        return "" if self.layers is None else f" in {len(over)} of {self.layers} layers"


class Influence:
    """Apply the bounds in one round, and collect warnings.

    Args:
        bounds: the bounds of the run.
        num_sites: number of sites of the job, for ``max_weight=auto``; ``None`` for the number of sites in the round.
        known: number of training images by site, for the sites that reported it before the first round.

    Attributes:
        shares: share of its parameters' change that counts, by site whose change :meth:`states` clipped.
        warnings: a warning for each value that a bound changed, and for a site with more than half of the weight.
    """

    def __init__(self, bounds: Bounds, num_sites: int | None = None, known: Mapping[str, float] | None = None) -> None:
        self.bounds, self.known = bounds, known or {}
        self.num_sites = num_sites or 0
        self.warnings: list[Warned] = []
        self.shares: dict[str, float] = {}
        self._states: tuple[list[str], dict[str, State]] | None = None

    def samples(self, claimed: Mapping[str, float]) -> dict[str, float]:
        """Return the sites' sample counts, limited to the bounds, for aggregation rules; warn of each that is cut."""
        used: dict[str, float] = {}
        for site, count in sorted(claimed.items()):
            has, most = self.known.get(site, math.inf), self.bounds.max_samples or math.inf
            used[site] = min(count, has, most)
            why = "max_samples" if most < has else "the training images that it had before the first round"
            self._warn_cut(
                site, "max_samples" if most < has else "num_samples", count, used[site],
                f"claims {count:.10g} samples, counted as {used[site]:.10g} ({why})",
            )  # fmt: skip
        return used

    def states(self, states: dict[str, State], received: State | None) -> dict[str, State]:
        """Return the local models with their updates clipped to ``max_update_norm``; clips are computed once a round.

        Args:
            states: the models or updates that the sites sent.
            received: the model that the sites started from; ``None`` if the sites sent updates.
        """
        factor = self.bounds.max_update_norm
        if factor is None:
            return states
        if self._states is None or self._states[0] != sorted(states):
            bounded, clips = limit_changes(states, received, factor)
            self._states = sorted(states), bounded
            self.shares = {clip.site: clip.used / clip.value for clip in clips if clip.what == PARAMETERS}
            for clip in clips:
                self._warn(
                    clip.site, f"max_update_norm, {clip.what}", clip.value, clip.used, _describe_clip(clip, factor)
                )
        return self._states[1]

    def remembered(self, weights: SiteWeights) -> SiteWeights:
        """Return a rule's weights, limited to the bounds, before the rule saves them for later rounds."""
        return self._bound_layers({"": weights}, Words(", remembered", "weight", " before it is remembered"))[""]

    def bound_made(self, weights: SiteWeights) -> SiteWeights:
        """Return weights cut to the bounds, for averages that an aggregation rule computes itself (CReFF's gradients).

        No warning is given, as a rule may ask for thousands of weights.
        """
        return self._temper(self._cap(weights, self._limit(len(weights))))

    def moderated(self, values: Mapping[str, float], name: str, among: Sequence[float] = ()) -> dict[str, float]:
        """Return reported numbers limited to a factor ``max_update_norm`` around their median.

        Rules use this method for numbers that decide more than a weight, such as the length of the step, or values that
        a rule saves for later rounds.

        Args:
            values: a number of each site, finite, ``>= 0``.
            name: name of the numbers for the warning; empty for no warning, as there may be thousands of numbers.
            among: further numbers of the same kind, added for the median where fewer than three sites report one.
        """
        factor, bounded = self.bounds.max_update_norm, dict(values)
        every = [*bounded.values(), *(among if len(bounded) < 3 else ())]
        middle = statistics.median(every)
        if factor is None or len(every) < 3 or middle == 0:  # of two numbers, either one may be wrong
            return bounded
        for site, value in sorted(values.items()):
            bounded[site] = used = min(max(value, middle / factor), middle * factor)
            if name:
                self._warn_cut(
                    site, f"max_update_norm, {name}", value, used,
                    f"{name} {value:.4g} counted as {used:.4g}, {factor:g} times from the median (max_update_norm)",
                )  # fmt: skip
        return bounded

    def bound_weighing(self, weighing: Weighing) -> Weighing:
        """Return the weights that the aggregation rule chose, cut to the bounds.

        Warn of each site that has more than half of the weight in the round, or in some layers.
        """
        if weighing.layers is not None:
            layers = self._bound_layers(
                weighing.layers, words := Words(what="weight up to", layers=len(weighing.layers))
            )
            self._warn_of_majority(layers, words)
            if layers == weighing.layers:
                return weighing
            return replace(weighing, layers=layers, record={
                layer: {site: {**entry, "weight": layers[layer][site]} for site, entry in by.items()}
                for layer, by in weighing.record.items()
            })  # fmt: skip
        if weighing.sites is None:
            return weighing
        whole, buffers = self._bound_layers({"": weighing.sites}, Words()), weighing.buffers
        self._warn_of_majority(whole, Words())
        if buffers is not None:
            buffers = self._bound_layers({"": buffers}, Words(", buffers", "weight of its buffers"))[""]
        return replace(weighing, sites=whole[""], buffers=buffers)

    # -- pieces

    def _bound_layers(self, given: LayerWeights, words: Words) -> dict[str, SiteWeights]:
        """Return the weights of each layer (whole models: of one), limited to the bounds; warn of what a bound cut."""
        limit = self._limit(len(next(iter(given.values()), {})))
        capped = {name: self._cap(by, limit) for name, by in given.items()}
        self._warn_of_cuts(given if limit is not None else {}, capped, limit or 0, words)
        return {name: self._temper(by) for name, by in capped.items()}

    def _warn_of_cuts(self, given: LayerWeights, capped: LayerWeights, limit: float, words: Words) -> None:
        """Warn of each site with a weight above ``limit``, and where weights lie too far above the equal share."""
        for site, over in _list_above(given, limit + CAP_TOLERANCE).items():
            self._warn(
                site, f"max_weight{words.part}", max(over), limit,
                f"{words.what} {max(over):.4g} cut to {limit:.4g}{words.when}{words.where(over)} (max_weight)",
                words.layers and len(over),
            )  # fmt: skip
        if (most := self.bounds.max_excess) is not None and (
            over := [excess for by in capped.values() if by and (excess := excess_of(by)) > most + CAP_TOLERANCE]
        ):
            self._warn(
                "", f"max_excess{words.part}", max(over), most,
                f"weights above the equal share, {max(over):.4g} together, brought to {most:.4g}{words.where(over)} "
                "(max_excess)",
                words.layers and len(over),
            )  # fmt: skip

    def _warn_of_majority(self, weights: LayerWeights, words: Words) -> None:
        """Warn of a site with more than half of the weight; of two sites, one nearly always has it."""
        for site, over in _list_above({n: by for n, by in weights.items() if len(by) != 2}, MAJORITY).items():
            self._warn(
                site, "majority", max(over), max(over),
                f"{words.what} {max(over):.4g}, more than all others together{words.where(over)}",
                words.layers and len(over),
            )  # fmt: skip

    def _cap(self, weights: SiteWeights, limit: float | None) -> SiteWeights:
        return weights if limit is None else capped_weights(weights, limit)

    def _temper(self, capped: SiteWeights) -> SiteWeights:
        excess = self.bounds.max_excess
        return capped if excess is None or not capped else tempered_weights(capped, excess)

    def _limit(self, sites: int) -> float | None:
        """Return the largest weight that one of ``sites`` sites may have; ``None`` for no bound."""
        wanted = self.bounds.max_weight
        if not sites or wanted is None:
            return None
        if wanted == AUTO:
            wanted = auto_share(max(self.num_sites, sites))
        bound = feasible_bound(sites, float(wanted))
        if bound > float(wanted) + CAP_TOLERANCE:
            self._warn(
                "", "max_weight", float(wanted), bound,
                f"max_weight {wanted:g} cannot hold with {sites} site(s), 1/{sites} is used",
            )  # fmt: skip
        return bound

    def _warn_cut(self, site: str, kind: str, value: float, used: float, text: str) -> None:
        if used != value:
            self._warn(site, kind, value, used, text)

    def _warn(self, site: str, kind: str, value: float, used: float, text: str, layers: int | None = None) -> None:
        if (warning := Warned(site, kind, value, used, text, layers)) not in self.warnings:
            self.warnings.append(warning)


def _list_above(layers: LayerWeights, least: float) -> dict[str, list[float]]:
    """Return the weights above ``least`` of each site that has one, in the order of the sites' names."""
    return group_by_key(sorted((site, w) for by in layers.values() for site, w in by.items() if w > least))


def _describe_clip(clip: Clip, factor: float) -> str:
    value, used = f"{clip.value:.4g}", f"{clip.used:.4g}"
    most = f"{factor:g} times the median (max_update_norm)"
    return {
        VARIANCES: f"running variance {value}, counted as 0 (max_update_norm)",
        COUNTERS: f"a counter changed by {value}, counted as {used}, {most}",
    }.get(clip.what, f"norm {value} of its update ({clip.what}) cut to {used}, {most}")
