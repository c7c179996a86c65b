"""How much one site may say: bounds that hold for every method, and a word about whoever reaches them.

They lie between the collector and the rule. What a rule sees (sample counts, local models) is bounded before it looks,
and the weights that it gives are bounded afterwards. ``docs/robustness.md`` says what this can do and what it cannot.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fairflare.core.aggregation.clipping import COUNTERS, VARIANCES, Clip, clipped_states
from fairflare.core.weighting import CAP_TOLERANCE, capped_weights, excess_of, feasible_bound, tempered_weights
from fairflare.federation.plan.bounds import AUTO, Bounds, auto_share
from fairflare.federation.plan.bounds import FOR_HOSPITALS as FOR_HOSPITALS  # where scripts have found it so far
from fairflare.methods.base.rule import LayerWeights, SiteWeights, State, Weighing
from fairflare.reporting.documents import Warned

MAJORITY = 0.5 + 1e-9


class Influence:
    """The bounds of one round.

    Args:
        bounds: see there.
        num_sites: of the job, for ``max_weight=auto``; ``None``: those of the round.
        known: training images by site, of those that said before the first round how many they have.

    Attributes:
        warnings: where a bound was at work, and who held more than half of the weight.
    """

    def __init__(self, bounds: Bounds, num_sites: int | None = None, known: Mapping[str, float] | None = None) -> None:
        self.bounds, self.known = bounds, known or {}
        self.num_sites = num_sites or 0
        self.warnings: list[Warned] = []
        self._states: tuple[list[str], dict[str, State]] | None = None

    def samples(self, claimed: Mapping[str, float]) -> dict[str, float]:
        """Sample counts as rules may see them."""
        used: dict[str, float] = {}
        for site, count in sorted(claimed.items()):
            has, most = self.known.get(site, math.inf), self.bounds.max_samples or math.inf
            used[site] = min(count, has, most)
            if used[site] == count:
                continue
            why = "max_samples" if most < has else "the training images that it had before the first round"
            text = f"claims {count:.10g} samples, counted as {used[site]:.10g} ({why})"
            self._warn(site, "max_samples" if most < has else "num_samples", count, used[site], text)
        return used

    def states(self, states: dict[str, State], received: State | None) -> dict[str, State]:
        """Return the local models as they count in the aggregation; clips are looked for once a round.

        Args:
            states: what the sites sent.
            received: what they started from; ``None``: they sent updates.
        """
        factor = self.bounds.max_update_norm
        if factor is None:
            return states
        if self._states is None or self._states[0] != sorted(states):
            bounded, clips = clipped_states(states, received, factor)
            self._states = sorted(states), bounded
            for clip in clips:
                self._warn(clip.site, f"max_update_norm, {clip.what}", clip.value, clip.used, _in_words(clip, factor))
        return self._states[1]

    def remembered(self, weights: SiteWeights) -> SiteWeights:
        """Return weights that a rule is going to remember."""
        return self._bounded(weights, ", remembered", "weight", " before it is remembered")

    def of_made(self, weights: SiteWeights) -> SiteWeights:
        """Return weights with which a rule makes tensors itself; nothing is said, as there may be thousands."""
        limits = self._limits(weights)
        return self._tempered(capped_weights(weights, limits) if limits else weights)

    def moderated(self, values: Mapping[str, float], name: str, among: Sequence[float] = ()) -> dict[str, float]:
        """Return reported numbers that decide more than a weight.

        The length of the step, or what is kept for later rounds.

        Args:
            values: by site, finite, ``>= 0``.
            name: what they are, for the warning; empty: nothing is said, as there may be thousands.
            among: further numbers of the kind, which belong to the median where fewer than three sites say one.
        """
        factor, kept = self.bounds.max_update_norm, dict(values)
        every = [*kept.values(), *(among if len(kept) < 3 else ())]
        middle = statistics.median(every)
        if factor is None or len(every) < 3 or middle == 0:  # of two nobody can say which one is wrong
            return kept
        for site, value in sorted(values.items()):
            kept[site] = used = min(max(value, middle / factor), middle * factor)
            if used != value and name:
                text = f"{name} {value:.4g} counted as {used:.4g}, {factor:g} times from the median (max_update_norm)"
                self._warn(site, f"max_update_norm, {name}", value, used, text)
        return kept

    def weighed(self, weighing: Weighing) -> Weighing:
        """Return the weights that the aggregation rule chose, cut to the bounds.

        Warn of each site that has more than half of the weight of the round, or of some layers.
        """
        if weighing.layers is not None:
            return self._layers(weighing, weighing.layers)
        if weighing.sites is None:
            return weighing
        sites = self._bounded(weighing.sites)
        for site, weight in sorted(sites.items()):
            if weight > MAJORITY and len(sites) != 2:  # of two one nearly always holds more
                self._warn(site, "majority", weight, weight, f"weight {weight:.4g}, more than all others together")
        if weighing.buffers is None:
            return replace(weighing, sites=sites)
        buffers = self._bounded(weighing.buffers, ", buffers", "weight of its buffers")
        return replace(weighing, sites=sites, buffers=buffers)

    # -- pieces

    def _layers(self, weighing: Weighing, given: LayerWeights) -> Weighing:
        sites, count = sorted(next(iter(given.values()), {})), len(given)
        limits = self._limits(sites)
        capped = {name: capped_weights(by, limits) if limits else by for name, by in given.items()}
        layers = {name: self._tempered(by) for name, by in capped.items()}
        for site in sites:
            before = [by.get(site, 0.0) for by in given.values()]  # a rule that forgets one is told so by the sum
            limit = limits.get(site, 1.0)
            cut = [weight for weight in before if weight > limit + CAP_TOLERANCE]
            if cut:
                text = f"weight up to {max(cut):.4g} cut to {limit:.4g} in {len(cut)} of {count} layers (max_weight)"
                self._warn(site, "max_weight", max(cut), limit, text, len(cut))
            held = [by[site] for by in layers.values() if by.get(site, 0.0) > MAJORITY]
            if held and len(sites) != 2:
                text = f"weight up to {max(held):.4g}, more than all others together in {len(held)} of {count} layers"
                self._warn(site, "majority", max(held), max(held), text, len(held))
        self._warn_of_excess(capped.values(), layers=count)
        if all(layers[name] == by for name, by in given.items()):
            return weighing
        record = {
            layer: {site: {**found, "weight": layers[layer][site]} for site, found in by.items()}
            for layer, by in weighing.record.items()
        }
        return replace(weighing, layers=layers, record=record)

    def _bounded(self, weights: SiteWeights, of: str = "", what: str = "weight", when: str = "") -> SiteWeights:
        """Return the weights within the bounds, and a word about each that was at work."""
        limits = self._limits(weights)
        for site, weight in sorted(weights.items()):
            limit = limits.get(site, 1.0)
            if weight > limit + CAP_TOLERANCE:
                text = f"{what} {weight:.4g} cut to {limit:.4g}{when} (max_weight)"
                self._warn(site, f"max_weight{of}", weight, limit, text)
        capped = capped_weights(weights, limits) if limits else weights
        self._warn_of_excess([capped], of)
        return self._tempered(capped)

    def _tempered(self, capped: SiteWeights) -> SiteWeights:
        excess = self.bounds.max_excess
        return capped if excess is None or not capped else tempered_weights(capped, excess)

    def _limits(self, sites: Collection[str]) -> dict[str, float]:
        """Return the largest weight of each site; empty: no bound."""
        wanted = self.bounds.max_weight
        if not sites or wanted is None:
            return {}
        if wanted == AUTO:
            wanted = auto_share(max(self.num_sites, len(sites)))
        bound = feasible_bound(len(sites), float(wanted))
        if bound > float(wanted) + CAP_TOLERANCE:
            text = f"max_weight {wanted:g} cannot hold with {len(sites)} site(s), 1/{len(sites)} is used"
            self._warn("", "max_weight", float(wanted), bound, text)
        return dict.fromkeys(sites, bound)

    def _warn_of_excess(self, capped: Iterable[SiteWeights], of: str = "", layers: int | None = None) -> None:
        most = self.bounds.max_excess
        if most is None:
            return
        found = [excess_of(by) for by in capped if by]
        over = [excess for excess in found if excess > most + CAP_TOLERANCE]
        if over:
            where = "" if layers is None else f" in {len(over)} of {layers} layers"
            text = f"weights above the equal share, {max(over):.4g} together, brought to {most:.4g}{where} (max_excess)"
            self._warn("", f"max_excess{of}", max(over), most, text, None if layers is None else len(over))

    def _warn(self, site: str, kind: str, value: float, used: float, text: str, layers: int | None = None) -> None:
        if (warning := Warned(site, kind, value, used, text, layers)) not in self.warnings:
            self.warnings.append(warning)


def _in_words(clip: Clip, factor: float) -> str:
    value, used = f"{clip.value:.4g}", f"{clip.used:.4g}"
    most = f"{factor:g} times the median (max_update_norm)"
    return {
        VARIANCES: f"running variance {value}, counted as 0 (max_update_norm)",
        COUNTERS: f"a counter changed by {value}, counted as {used}, {most}",
    }.get(clip.what, f"norm {value} of its update ({clip.what}) cut to {used}, {most}")
