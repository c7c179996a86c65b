"""Find values that do not go with the others, by robust statistics (median and median absolute deviation)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

FEWEST = 4  # rounds of a site, below which nobody can say which one is odd
SCALE = 1.4826  # median absolute deviation -> standard deviation, of normal values


def unlike_itself(values: Mapping[int, Mapping[str, float]], margin: float) -> dict[str, list[int]]:
    r"""Find rounds in which a site's value, less what the others have, is far from that of its other rounds.

    .. math:: e_{kr} = x_{kr} - \mathrm{med}_{j \neq k} x_{jr}, \quad
              |e_{kr} - \mathrm{med}_{s \neq r} e_{ks}| > \max(3 \cdot 1.4826\,\mathrm{MAD},\; \text{margin})

    Args:
        values: a site's value by round and site; values that are not finite are left out.
        margin: smallest distance that counts as unlike.

    Returns:
        The rounds by site; none of a site with fewer than :data:`FEWEST` rounds, or without two others beside it.
    """
    apart: dict[str, dict[int, float]] = {}
    for number, by_site in sorted(values.items()):
        finite = {site: float(value) for site, value in sorted(by_site.items()) if math.isfinite(value)}
        for site, value in finite.items() if len(finite) > 2 else ():
            others = [other for name, other in finite.items() if name != site]
            apart.setdefault(site, {})[number] = value - statistics.median(others)
    found: dict[str, list[int]] = {}
    for site, rounds in apart.items():
        for number, distance in rounds.items() if len(rounds) >= FEWEST else ():
            others = [other for other_round, other in rounds.items() if other_round != number]
            middle = statistics.median(others)
            spread = statistics.median(abs(other - middle) for other in others)
            if abs(distance - middle) > max(3 * SCALE * spread, margin):
                found.setdefault(site, []).append(number)
    return found
