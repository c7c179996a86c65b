"""Bound the influence of one site on a round, whatever the method, and warn of sites that reach a bound.

The bounds lie between the collector and the rule. The inputs of a rule (sample counts, local models) are bounded before
the rule reads them, and its weights are bounded afterwards. ``docs/robustness.md`` explains what bounds can achieve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fairflare.core.aggregation.clipping import COUNTERS, PARAMETERS, VARIANCES, Clip, clipped_states
from fairflare.core.weighting import CAP_TOLERANCE, capped_weights, excess_of, feasible_bound, tempered_weights
from fairflare.federation.plan.bounds import AUTO, Bounds, auto_share
from fairflare.federation.plan.bounds import FOR_HOSPITALS as FOR_HOSPITALS  # for scripts that import it from here
from fairflare.methods.base.rule import LayerWeights, SiteWeights, State, Weighing
from fairflare.reporting.documents import Warned

MAJORITY = 0.5 + 1e-9


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
            text = f"claims {count:.10g} samples, counted as {used[site]:.10g} ({why})"
            self._warn_cut(site, "max_samples" if most < has else "num_samples", count, used[site], text)
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
            bounded, clips = clipped_states(states, received, factor)
            self._states = sorted(states), bounded
            self.shares = {clip.site: clip.used / clip.value for clip in clips if clip.what == PARAMETERS}
            for clip in clips:
                self._warn(
                    clip.site, f"max_update_norm, {clip.what}", clip.value, clip.used, _describe_clip(clip, factor)
                )
        return self._states[1]

    def remembered(self, weights: SiteWeights) -> SiteWeights:
        """Return a rule's weights, limited to the bounds, before the rule saves them for later rounds."""
        return self._bound_sites(weights, ", remembered", "weight", " before it is remembered")

    def bound_made(self, weights: SiteWeights) -> SiteWeights:
        """Return weights cut to the bounds, for averages that an aggregation rule computes itself (CReFF's gradients).

        No warning is given, as a rule may ask for thousands of weights.
        """
        return self._tempered(self._capped(weights, self._limit(len(weights))))

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
                text = f"{name} {value:.4g} counted as {used:.4g}, {factor:g} times from the median (max_update_norm)"
                self._warn_cut(site, f"max_update_norm, {name}", value, used, text)
        return bounded

    def weighed(self, weighing: Weighing) -> Weighing:
        """Return the weights that the aggregation rule chose, cut to the bounds.

        Warn of each site that has more than half of the weight in the round, or in some layers.
        """
        if weighing.layers is not None:
            layers = self._bounded(weighing.layers, what="weight up to", count=len(weighing.layers), majority=True)
            if layers == weighing.layers:
                return weighing
            record = {
                layer: {site: {**entry, "weight": layers[layer][site]} for site, entry in by.items()}
                for layer, by in weighing.record.items()
            }
            return replace(weighing, layers=layers, record=record)
        if weighing.sites is None:
            return weighing
        sites, buffers = self._bound_sites(weighing.sites, majority=True), weighing.buffers
        if buffers is not None:
            buffers = self._bound_sites(buffers, ", buffers", "weight of its buffers")
        return replace(weighing, sites=sites, buffers=buffers)

    # -- pieces

    def _bound_sites(
        self, weights: SiteWeights, part: str = "", what: str = "weight", when: str = "", *, majority: bool = False
    ) -> SiteWeights:
        return self._bounded({"": weights}, part, what, when, majority=majority)[""]

    def _bounded(
        self,
        given: LayerWeights,
        part: str = "",
        what: str = "weight",
        when: str = "",
        *,
        count: int | None = None,
        majority: bool = False,
    ) -> dict[str, SiteWeights]:
        """Return the weights of each layer, limited to the bounds, and warn of each bound that changed a weight.

        Args:
            given: the sites' weights by layer; weights of whole models are given as those of a single layer.
            part, what, when: words for the warnings: kind and name of the weights, and when they are cut.
            count: number of layers; ``None`` if the weights are those of whole models.
            majority: whether to warn also of a site that has more than half of the weight.
        """
        sites, most = sorted(next(iter(given.values()), {})), self.bounds.max_excess
        limit = self._limit(len(sites))
        capped = {name: self._capped(by, limit) for name, by in given.items()}
        bounded = {name: self._tempered(by) for name, by in capped.items()}
        for site in sites if limit is not None else ():
            held = [by.get(site, 0.0) for by in given.values()]  # a missing weight is found later, by the weights' sum
            text = f"{what} {{}} cut to {limit:.4g}{when}{{}} (max_weight)"
            self._warn_above(site, f"max_weight{part}", held, limit, text, count)
        if most is not None:
            text = f"weights above the equal share, {{}} together, brought to {most:.4g}{{}} (max_excess)"
            self._warn_above(
                "", f"max_excess{part}", [excess_of(by) for by in capped.values() if by], most, text, count
            )
        for site in sites if majority and len(sites) != 2 else ():  # one of two sites nearly always holds more
            held = [by.get(site, 0.0) for by in bounded.values()]
            self._warn_above(site, "majority", held, None, f"{what} {{}}, more than all others together{{}}", count)
        return bounded

    def _capped(self, weights: SiteWeights, limit: float | None) -> SiteWeights:
        return weights if limit is None else capped_weights(weights, limit)

    def _tempered(self, capped: SiteWeights) -> SiteWeights:
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
            text = f"max_weight {wanted:g} cannot hold with {sites} site(s), 1/{sites} is used"
            self._warn("", "max_weight", float(wanted), bound, text)
        return bound

    def _warn_above(
        self, site: str, kind: str, values: Iterable[float], limit: float | None, text: str, count: int | None
    ) -> None:
        """Warn when some values are above a limit.

        Args:
            site, kind, text: parts of the warning.
            values: the values, one for each layer.
            limit: the limit; ``None`` for half of the weight.
            count: number of all layers, for a warning of the form "in 2 of 5 layers"; ``None`` if there are no layers.
        """
        least = MAJORITY if limit is None else limit + CAP_TOLERANCE
        if over := [value for value in values if value > least]:
            where = "" if count is None else f" in {len(over)} of {count} layers"
            used, layers = max(over) if limit is None else limit, None if count is None else len(over)
            self._warn(site, kind, max(over), used, text.format(f"{max(over):.4g}", where), layers)

    def _warn_cut(self, site: str, kind: str, value: float, used: float, text: str) -> None:
        if used != value:
            self._warn(site, kind, value, used, text)

    def _warn(self, site: str, kind: str, value: float, used: float, text: str, layers: int | None = None) -> None:
        if (warning := Warned(site, kind, value, used, text, layers)) not in self.warnings:
            self.warnings.append(warning)


def _describe_clip(clip: Clip, factor: float) -> str:
    value, used = f"{clip.value:.4g}", f"{clip.used:.4g}"
    most = f"{factor:g} times the median (max_update_norm)"
    return {
        VARIANCES: f"running variance {value}, counted as 0 (max_update_norm)",
        COUNTERS: f"a counter changed by {value}, counted as {used}, {most}",
    }.get(clip.what, f"norm {value} of its update ({clip.what}) cut to {used}, {most}")
