"""Signs that a site's labels, or what it sends, do not go with the others': pure functions of numbers by site.

All are robust statistics of the *other* sites (median and median absolute deviation), so that one odd site does not
hide itself; below :data:`FEWEST` sites nobody can say which one is odd, and there is no sign.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

FEWEST = 4  # sites
_SCALE = 1.4826  # median absolute deviation -> standard deviation, of normal values


def lower_than_others(values: Mapping[str, float], margin: float, deviations: float = 3.0) -> set[str]:
    r"""Finds sites whose value lies far below those of the others.

    .. math:: x_k < \mathrm{med} - \max(d \cdot 1.4826\,\mathrm{MAD},\; \text{margin})

    with median and MAD over the other sites.

    Args:
        values: by site; those that are not finite are left out.
        margin: least distance that counts.
        deviations: d, ``>= 0``.

    Returns:
        The sites; none where fewer than :data:`FEWEST` have a value.
    """
    finite = {site: float(value) for site, value in sorted(values.items()) if math.isfinite(value)}
    if len(finite) < FEWEST:
        return set()
    found = set()
    for site, value in finite.items():
        others = [other for name, other in finite.items() if name != site]
        middle = statistics.median(others)
        spread = statistics.median(abs(other - middle) for other in others)
        if value < middle - max(deviations * _SCALE * spread, margin):
            found.add(site)
    return found


def unlike_itself(values: Mapping[int, Mapping[str, float]], margin: float) -> dict[str, list[int]]:
    r"""Finds rounds in which a site's value, less what the others have, is far from that of its other rounds.

    .. math:: e_{kr} = x_{kr} - \mathrm{med}_{j \neq k} x_{jr}, \quad
              |e_{kr} - \mathrm{med}_{s \neq r} e_{ks}| > \max(3 \cdot 1.4826\,\mathrm{MAD},\; \text{margin})

    Args:
        values: by round and site; those that are not finite are left out.
        margin: least distance that counts.

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
            if abs(distance - middle) > max(3 * _SCALE * spread, margin):
                found.setdefault(site, []).append(number)
    return found


def contradicted(received: Mapping[str, float], own: Mapping[str, float], margin: float) -> set[str]:
    """Finds sites whose own model is as good as the common one is elsewhere, and where the common one is far worse.

    Such a site's images can be learned, and what is learned from them is not what the others learn. Where its own model
    is bad, too, its images are hard, and there is no sign.

    Args:
        received: primary metric of the model that each site received, larger is better.
        own: of the one that it trained, on the same images; of the sites that measured it.
        margin: least distance of the two, and most that its own may lie below the common one elsewhere.
    """
    found = set()
    for site in sorted(set(own) & set(received)):
        elsewhere = [x for name, x in received.items() if name != site and math.isfinite(x)]
        if elsewhere and own[site] >= max(received[site] + margin, statistics.median(elsewhere) - margin):
            found.add(site)
    return found


def points_away(cosines: Mapping[str, float], weights: Mapping[str, float], most: float) -> set[str]:
    """Gives the heaviest site, where its update points away from those of all others.

    Args:
        cosines: of a site's update with the sum of the others' directions, in [-1, 1].
        weights: largest weight of each site in any layer.
        most: a cosine from here on is no sign.

    Returns:
        One site or none; none where no site has more than the equal share, by a hundredth of it.
    """
    known = {site: weights.get(site, 0.0) for site in cosines}
    if len(known) < FEWEST:
        return set()
    heaviest = max(sorted(known), key=lambda site: known[site])
    odd = cosines[heaviest] < most and heaviest in lower_than_others(cosines, 0.0)
    return {heaviest} if odd and known[heaviest] > 1.01 / len(known) else set()
