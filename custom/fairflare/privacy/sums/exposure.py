"""Measure how much opened sums reveal of one site's numbers, and refuse weights that reveal too much."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fairflare.base.checks import first_of
from fairflare.privacy.sums.keys import FEWEST, MAGIC, Pairs, SumRefused, fields, need
from fairflare.privacy.sums.masks import BY_PART, COUNTS, FIRST_OF_TWO, GROUPS, SumAsked, Table
from fairflare.privacy.sums.ring import BUFFERS, SLACK, SUMS, TRAINED, Floats

MOST_SITES = 100  # each site generates a stream of masks for each other site
TURNS = 200  # with six sites there are ten ways to make two groups
MOST_IMAGES = 10**7  # of all sites; the digits of a share tell the two numbers that it is made of up to there
SAME = 1e-12  # relative size below which a direction of weights adds nothing to the others
RINGS = {"params": TRAINED, GROUPS: SUMS, COUNTS: SUMS}  # ring of the vectors of this name; all others have BUFFERS


@dataclass(frozen=True)
class Limits:
    """Hold the limits on secure sums that a site sets in its own file.

    Attributes:
        max_weight: largest weight of a site in any layer.
        max_exposure: largest :func:`exposure` of a site in any layer.
    """

    max_weight: float = 0.5
    max_exposure: float = 0.95


def exposure(tables: Sequence[Table]) -> Floats:
    """Return how much of each site's numbers several sums of the same vectors reveal, by layer.

    It is the norm of the projection of the site's unit vector on the span of the rows of weights, which is the largest
    correlation that a combination of the sums can have with the site's numbers, if the sites' numbers are independent
    and have the same norm. 1: the site's numbers can be solved for.

    Args:
        tables: the weights of each sum; one with a single layer holds for all layers.

    Returns:
        (layers, sites), all tables' sites, sorted.
    """
    sites, widths = sorted({site for table in tables for site in table}), [len(min(table.values())) for table in tables]
    rows = [
        np.array([table.get(site, (0.0,) * width) for site in sites]).T
        for table, width in zip(tables, widths, strict=True)
    ]
    stacked = np.stack(np.broadcast_arrays(*rows), axis=1)  # (layers, sums, sites)
    # A server can subtract one sum from another and read the difference, however little the weights differ.
    stacked[:, 1:] -= stacked[:, :1].copy()
    largest = np.abs(stacked).max(2, keepdims=True)
    _, sizes, directions = np.linalg.svd(stacked / np.where(largest > 0, largest, 1), full_matrices=False)
    return np.asarray(np.sqrt(((directions * (sizes > SAME * sizes[:, :1])[..., None]) ** 2).sum(1)))


def soften_weights(
    table: Table, opened: Sequence[Table], most: float
) -> tuple[dict[str, tuple[float, ...]], list[int]]:
    """Return weights made equal in each layer in which they would expose a site, and the numbers of these layers.

    A mean of two sites exposes each to the other, which can subtract its own numbers.

    Args:
        table: weights of a mean.
        opened: tables of weights of the round's sums of the same vectors whose results the server already has.
        most: largest exposure that the sites allow.
    """
    owners = (np.array(list(table.values())) > 0).sum(0)
    above = (exposure([table, *opened]).max(1) > most) | ((owners > 0) & (owners < FEWEST))
    even = 1 / len(table)
    rows = {site: tuple(even if out else w for w, out in zip(row, above, strict=True)) for site, row in table.items()}
    return rows, np.flatnonzero(above).tolist()


def draw_groups(experiment: str, weights: Mapping[str, float]) -> list[dict[str, float]]:
    """Return groups of sites, with each site's weight in its own; who knows the weights can repeat the draw.

    The sites, sorted by the SHA-256 of experiment, turn and name, are dealt to as many groups of at least three as can
    be; the first turn counts in which every group may be summed by the usual :class:`Limits`.

    Args:
        experiment: name of the experiment, else the id of the run.
        weights: the sites' weights in a sum of all.

    Returns:
        At least two groups, or none if no turn gives such groups.
    """
    # Shares of numbers of images become those of the group to the last bit, as in a sum of the group's sites alone.
    exact = {site: Fraction(weight).limit_denominator(MOST_IMAGES) for site, weight in weights.items()}
    for count, turn in itertools.product(range(len(weights) // FEWEST, 1, -1), range(TURNS)):
        order = sorted(
            (hashlib.sha256(fields(MAGIC, b"group", experiment.encode(), b"%d" % turn, site.encode())).digest(), site)
            for site in weights
        )
        dealt = sorted(sorted(site for _, site in order[first::count]) for first in range(count))
        parts = [{s: float(exact[s] / (sum(exact[one] for one in part) or 1)) for s in part} for part in dealt]
        shown = [exposure([{site: (weight,) for site, weight in part.items()}]).max() for part in parts]
        largest = [max(part.values()) for part in parts]
        if min(largest) > 0 and max(largest) <= Limits().max_weight and max(shown) <= Limits().max_exposure:
            return parts
    return []


def check_table(
    site: str, question: SumAsked, limits: Limits, pairs: Pairs, opened: Sequence[Table] = (), whole: int = 0
) -> None:
    """Refuse a secure sum whose members or weights would reveal too much of one site.

    Args:
        site: name of the site that checks.
        question: the sum that the server asks for.
        limits: the limits that the site sets.
        pairs: the keys that the site shares with the sites with which it has agreed on keys.
        opened: tables of the sums of the same vectors of the same model that this site has released.
        whole: number of sites in all groups, if the sum is of one group of sites.

    Raises:
        SumRefused: the text names the rule, the value and what to do.
    """

    members, known, count = question.members, {pairs.site, *pairs.keys}, len(question.table)
    least = FEWEST + (question.label in FIRST_OF_TWO or bool(opened))
    problem = first_of({
        f"it is no member of {members}; ask members only": site not in members,
        f"{sorted(set(members) - known)} have no key in this run; agree on keys again": not known >= set(members),
        f"it has {count} members and needs {least}; wait for more sites": count < least,
        f"it has {count} members, at most {MOST_SITES} can be masked; ask fewer sites": count > MOST_SITES,
        f"it has {count} of {pairs.first} sites, needed are two thirds; wait for more":
            3 * (whole or count) < 2 * pairs.first,
        f"another sum of these numbers is not of {members}": any(set(table) != set(members) for table in opened),
        # In a ring with more bits of fraction, the difference of two sums with nearly equal weights would reveal more.
        f"its numbers are to be integers of {question.ring}; use the same version at server and sites":
            question.ring != RINGS.get(question.vectors, BUFFERS),
    }) or _explain_exposure(question, limits, opened, least)  # fmt: skip
    need(not problem, SumRefused(site, f"sum {question.label!r} of round {question.round}: {problem}"))


def _explain_exposure(question: SumAsked, limits: Limits, opened: Sequence[Table], least: int) -> str:
    """Return why weights would show too much of a site's numbers, and what to do; an empty text if they do not."""
    for softened in (weights for weights in question.own_weights if weights):
        # Whoever is not named adds nothing to the slice: what a sum shows of it is a matter of the others alone.
        tables = [
            {site: (weight,) for site, weight in softened.items()},
            *[dict.fromkeys(softened, (1.0,))] * bool(opened),
        ]
        if (
            len(softened) < least
            or min(softened.values()) <= 0
            or abs(sum(softened.values()) - 1) > SLACK
            or not max(softened.values()) <= limits.max_weight + SLACK
            or not exposure(tables).max() <= limits.max_exposure
        ):
            return f"a slice's weights {softened} would show a site's numbers (it needs {least} sites); leave it out"
    weights = np.array([question.table[name] for name in question.members])  # (sites, layers)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        return "a weight is below 0 or not finite; mend the method"
    owners, part, most = (weights > 0).sum(0), BY_PART.get(question.label), float(weights.max())
    off = float(abs(weights.sum(0) - (owners > 0 if part else 1)).max())
    revealed = float(exposure([question.table, *opened]).max())
    return first_of({
        # With fewer sites it is hardly a sum; a part of 0 sites is not asked for.
        f"a {part} has the numbers of fewer than {FEWEST} sites; leave this {part} out":
            bool(part and ((owners > 0) & (owners < FEWEST)).any()),
        # From unequal weights in a sum, or different weights in a group's sums, a site's counts could be computed.
        "sites of a group have unequal weights; give each the same":
            question.label == GROUPS and bool((weights != (weights > 0) / np.maximum(owners, 1)).any()),
        f"the weights of a layer sum up to 1 +- {off:.3g}, not to 1; mend the method": off > SLACK,
        f"a site has the weight {most:.4g} in a layer, this site allows {limits.max_weight:g} (secure_max_weight); "
        "set max_weight of the job to it at most": most > limits.max_weight + SLACK,
        f"a layer has the numbers of fewer than {FEWEST} sites, so that one could tell another's; give equal weights":
            not part and bool(owners.min() < FEWEST),
        f"the sums would show a site's numbers to {revealed:.4f}, this site allows {limits.max_exposure:g} "
        "(secure_max_exposure); give that layer equal weights": revealed > limits.max_exposure,
    })  # fmt: skip
