"""Compare what labels mean at different sites, by the images: a class by a probe, a structure by its shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fairflare.base.checks import first_of
from fairflare.core.statistics.label_maps import describe_mix_up, judge_maps, mistaken

CLEAR = 0.15  # accuracy above chance from which a probe of the labels is trusted


def compare_labels(
    looks: Mapping[str, Sequence[Any]], names: Mapping[int, str], drawn: Mapping[str, Collection[int]]
) -> tuple[str, list[tuple[str, str, bool]]]:
    """Return a line on whether labels mean the same at all sites, and clashes: site, text, whether it is grave.

    Sites that drew all structures are compared by a probe that is trained on the other ones' images. A site that drew
    only some is compared structure by structure, by shapes, as its background holds what it did not draw.

    Args:
        looks: what was seen in the images of each site: ``features`` by label, and ``shapes`` of a mask's structures.
        names: names of the classes, of combinations of findings, or of background and structures.
        drawn: numbers of the structures, from 0, that each site drew; empty for classes and findings.
    """
    every = {number for numbers in drawn.values() for number in numbers}
    part = [site for site, numbers in drawn.items() if numbers and {*numbers} != every]
    given = {
        site: [pair for look in site_looks for pair in look.features if pair[1] in names]
        for site, site_looks in looks.items()
        if site not in part
    }
    labels = {site: np.array([label for _, label in pairs]) for site, pairs in given.items() if pairs}
    features = {site: np.stack([vector for vector, _ in pairs]) for site, pairs in given.items() if pairs}
    verdicts = judge_maps(features, labels) if len({v.shape[1] for v in features.values()}) == 1 else {}
    clashes: list[tuple[str, str, bool]] = []
    chance = 1 / max(2, len(names))
    which = "" if len(verdicts) > 2 else ", or those of the other site: with two nobody can say which"
    for site, one in verdicts.items():
        usual = float(np.median([other.agreement for name, other in verdicts.items() if name != site]))
        if one.certain or usual - one.agreement > 2 * CLEAR:
            how = (
                f"look {describe_mix_up(one.looks_like, names)}{which}"
                if one.certain
                else "are unlike those of other sites"
            )
            clashes.append((
                site,
                f"its labels {how}. A simple probe of the other sites' images agrees with {one.agreement:.0%} of its "
                f"labels{f', with {one.explained:.0%} of them read so' if one.certain else ''} (at the other sites "
                f"with {usual:.0%}); compare the list of classes, and look at some images",
                one.certain and one.agreement <= chance < one.explained - CLEAR,
            ))  # fmt: skip
    shapes = {
        site: {
            number: np.array([look.shapes[number] for look in site_looks if number in look.shapes])
            for number in (*([] if site in part else [0]), *(k + 1 for k in drawn.get(site, ())))
        }
        for site, site_looks in looks.items()
        if part and site not in {wrong for wrong, *_ in clashes}
    }
    clashes += (
        (
            site,
            f"its labels look {describe_mix_up(looks_like, names)} of other sites, by their shapes; compare the "
            "numbers of structures, and look at some images",
            0 in looks_like.values(),
        )
        for site, looks_like in mistaken(shapes, part if len(verdicts) > 1 else shapes).items()
    )
    if len(verdicts) < 2:
        return "", clashes
    short = [site for site, one in verdicts.items() if not one.enough]
    verdict = first_of({
        "see above": any(text.startswith("its labels look" if short else "its labels ") for _, text, _ in clashes),
        f"too few images at {', '.join(short)} to tell swapped or shifted labels": bool(short),
        "too little to tell whether the labels mean the same everywhere":
            float(np.median([one.agreement for one in verdicts.values()])) < chance + CLEAR,
        "the labels seem to mean the same": True,
    })  # fmt: skip
    return (
        "labels across sites: a simple probe of the others' images agrees at "
        f"{', '.join(f'{site} {one.agreement:.0%}' for site, one in verdicts.items())} (chance {chance:.0%}): {verdict}"
    ), clashes
