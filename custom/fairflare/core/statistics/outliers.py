"""Find values that are unlike the other values, by robust statistics (median and median absolute deviation)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

FEWEST = 4  # least number of a site's rounds among which an unlike round can be found
SCALE = 1.4826  # factor from median absolute deviation to standard deviation of normally distributed values


def unlike_itself(values: Mapping[int, Mapping[str, float]], margin: float) -> dict[str, list[int]]:
    r"""Find rounds in which a site's difference from the other sites is far from its difference in its other rounds.

    .. math:: e_{kr} = x_{kr} - \mathrm{med}_{j \neq k} x_{jr}, \quad
              |e_{kr} - \mathrm{med}_{s \neq r} e_{ks}| > \max(3 \cdot 1.4826\,\mathrm{MAD},\; \text{margin})

    Args:
        values: a site's value by round and site; values that are not finite are left out.
        margin: smallest distance that counts as unlike.

    Returns:
        The rounds found, by site. A site with fewer than :data:`FEWEST` rounds has none; rounds with fewer than three
        sites are ignored.
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
