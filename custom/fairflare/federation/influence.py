"""How much one site may say: bounds that hold for every method, and a word about whoever reaches them.

They lie between the collector and the rule. What a rule sees (sample counts, local models) is bounded before it looks,
and the weights that it gives are bounded afterwards. ``docs/robustness.md`` says what this can do and what it cannot.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field as Range

from fairflare.core.clipping import COUNTERS, VARIANCES, Clip, clipped_states
from fairflare.core.settings import PositiveInt, Share, field_names, settings
from fairflare.core.weighting import CAP_TOLERANCE, capped_weights, feasible_bound
from fairflare.methods.rule import LayerWeights, SiteWeights, State, Weighing
from fairflare.reporting.records import Warned

MAJORITY = 0.5 + 1e-9
# What a job for hospitals has unless told otherwise; the reasons are in docs/robustness.md.
FOR_HOSPITALS: dict[str, Any] = {"max_weight": 0.4, "max_samples": 100_000, "max_update_norm": 3.0}


@settings
class Bounds:
    """Bounds on what one site can do to a round, for every method; without a value there is none.

    Args:
        max_weight: largest share of one site, in each layer where weights are by layer; what is cut goes to the others
            in proportion. With K sites at least 1/K. A preinstalled job has 0.4.
        max_samples: a site that claims more training samples counts as having so many. A preinstalled job has 100000.
        max_update_norm: an update with a norm of more than so many times the round's median is scaled down to that. A
            preinstalled job has 3.0.
    """

    max_weight: Share | None = None
    max_samples: PositiveInt | None = None
    max_update_norm: Annotated[float, Range(strict=True, allow_inf_nan=False, ge=1)] | None = None


def bounds_of(run: Bounds) -> dict[str, Any]:
    """The three values of what has them among other settings."""
    return {name: getattr(run, name) for name in field_names(Bounds)}


class Influence:
    """The bounds of one round.

    Attributes:
        warnings: where a bound was at work, and who held more than half of the weight.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.warnings: list[Warned] = []
        self._states: tuple[list[str], dict[str, State]] | None = None

    def samples(self, claimed: Mapping[str, int]) -> dict[str, int]:
        """Sample counts as rules may see them."""
        most = self.bounds.max_samples
        if most is None:
            return dict(claimed)
        for site, count in sorted(claimed.items()):
            if count > most:
                text = f"claims {count} samples, counted as {most} (max_samples)"
                self._warn(Warned(site, "max_samples", count, most, text))
        return {site: min(count, most) for site, count in claimed.items()}

    def states(self, states: dict[str, State], received: State | None) -> dict[str, State]:
        """Local models as they count; looked at once a round.

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
                self._warn(_of_clip(clip, factor))
        return self._states[1]

    def remembered(self, weights: SiteWeights) -> SiteWeights:
        """Weights that a rule is going to remember."""
        return self._capped(
            weights, "max_weight, remembered", "weight {} cut to {} before it is remembered (max_weight)"
        )

    def moderated(self, values: Mapping[str, float], name: str) -> dict[str, float]:
        """Reported numbers that decide more than a weight: the length of the step, or what is kept for later rounds.

        Args:
            values: by site, finite, ``>= 0``.
            name: what they are, for the warning.
        """
        factor, kept = self.bounds.max_update_norm, dict(values)
        middle = statistics.median(kept.values())
        if factor is None or len(kept) < 3 or middle == 0:  # of two nobody can say which one is wrong
            return kept
        for site, value in sorted(values.items()):
            kept[site] = used = min(max(value, middle / factor), middle * factor)
            if used != value:
                text = f"{name} {value:.4g} counted as {used:.4g}, {factor:g} times from the median (max_update_norm)"
                self._warn(Warned(site, f"max_update_norm, {name}", value, used, text))
        return kept

    def weighed(self, weighing: Weighing) -> Weighing:
        """The rule's decision within the bounds; warns of a site that holds more than half."""
        if weighing.layers is not None:
            return self._layers(weighing, weighing.layers)
        if weighing.sites is None:
            return weighing
        sites = self._capped(weighing.sites, "max_weight", "weight {} cut to {} (max_weight)")
        for site, weight in sorted(sites.items()):
            if weight > MAJORITY:
                text = f"weight {weight:.4g}, more than all others together"
                self._warn(Warned(site, "majority", weight, weight, text))
        if weighing.buffers is None:
            return replace(weighing, sites=sites)
        kind = "max_weight, buffers"
        buffers = self._capped(weighing.buffers, kind, "weight {} of its buffers cut to {} (max_weight)")
        return replace(weighing, sites=sites, buffers=buffers)

    # -- pieces

    def _layers(self, weighing: Weighing, given: LayerWeights) -> Weighing:
        sites, count = sorted(next(iter(given.values()), {})), len(given)
        bound = self._bound(len(sites))
        layers = given if bound is None else {name: capped_weights(by, bound) for name, by in given.items()}
        for site in sites:
            before = [by.get(site, 0.0) for by in given.values()]  # a rule that forgets one is told so by the sum
            cut = [weight for weight in before if bound is not None and weight > bound + CAP_TOLERANCE]
            if cut and bound is not None:
                text = f"weight up to {max(cut):.4g} cut to {bound:.4g} in {len(cut)} of {count} layers (max_weight)"
                self._warn(Warned(site, "max_weight", max(cut), bound, text, len(cut)))
            held = [by[site] for by in layers.values() if by.get(site, 0.0) > MAJORITY]
            if held:
                text = f"weight up to {max(held):.4g}, more than all others together in {len(held)} of {count} layers"
                self._warn(Warned(site, "majority", max(held), max(held), text, len(held)))
        if bound is None:
            return weighing
        record = {
            layer: {site: {**found, "weight": layers[layer][site]} for site, found in by.items()}
            for layer, by in weighing.record.items()
        }
        return replace(weighing, layers=layers, record=record)

    def _capped(self, weights: SiteWeights, kind: str, text: str) -> SiteWeights:
        bound = self._bound(len(weights))
        if bound is None:
            return weights
        for site, weight in sorted(weights.items()):
            if weight > bound + CAP_TOLERANCE:
                self._warn(Warned(site, kind, weight, bound, text.format(f"{weight:.4g}", f"{bound:.4g}")))
        return capped_weights(weights, bound)

    def _bound(self, num_sites: int) -> float | None:
        wanted = self.bounds.max_weight
        if wanted is None or num_sites == 0:
            return None
        bound = feasible_bound(num_sites, wanted)
        if bound > wanted + CAP_TOLERANCE:
            text = f"max_weight {wanted:g} cannot hold with {num_sites} site(s), 1/{num_sites} is used"
            self._warn(Warned("", "max_weight", wanted, bound, text))
        return bound

    def _warn(self, warning: Warned) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)


def _of_clip(clip: Clip, factor: float) -> Warned:
    value, used = f"{clip.value:.4g}", f"{clip.used:.4g}"
    if clip.what == VARIANCES:
        text = f"running variance {value}, counted as 0 (max_update_norm)"
    elif clip.what == COUNTERS:
        text = f"a counter changed by {value}, counted as {used}, {factor:g} times the median (max_update_norm)"
    else:
        text = f"norm {value} of its update ({clip.what}) cut to {used}, {factor:g} times the median (max_update_norm)"
    return Warned(clip.site, f"max_update_norm, {clip.what}", clip.value, clip.used, text)
