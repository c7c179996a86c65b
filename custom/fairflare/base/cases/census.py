"""Count in which of a site's cases each structure or class occurs, and ask what its labels' silence means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

#: Keys of a site's file, by what labels are (numbers of classes, or masks): which of them the site annotated.
KEYS = {True: "classes", False: "structures"}
LABELS = {True: "label of {} is", False: "mask of {} marks", None: "label of {} is"}


class Census:
    """Count the images, and the cases, whose labels have each structure or class.

    Args:
        marks: the case of each image, with the numbers of the structures or classes that its label has.
    """

    def __init__(self, marks: Iterable[tuple[Hashable, Collection[int]]]) -> None:
        self.images = Counter[int]()
        self.cases: dict[int, set[Hashable]] = {}
        self.everybody: set[Hashable] = set()
        for case, numbers in marks:
            self.everybody.add(case)
            self.images.update(numbers)
            for number in numbers:
                self.cases.setdefault(number, set()).add(case)

    def told(self, names: Sequence[str], least: int) -> dict[str, int]:
        """Return the number of cases with each structure or class that may leave a site, see :func:`told_cases`."""
        cases = {name: len(self.cases.get(number, ())) for number, name in enumerate(names)}
        return told_cases(cases, len(self.everybody), least)


def told_cases(cases: Mapping[str, int], total: int, least: int) -> dict[str, int]:
    """Return the numbers of cases that may leave a site, by structure or class.

    A number is withheld where fewer than ``least`` cases have the structure, or lack it: nobody can tell few from none.
    That all cases have it may be told.

    Args:
        cases: number of cases with each structure or class, ``>= 0``.
        total: number of all cases.
        least: smallest number of cases that may be reported on, ``>= 1``.
    """
    return {name: n for name, n in cases.items() if n >= max(least, 1) and (n == total or total - n >= least)}


def unexplained(told: Mapping[str, Collection[str]], explained: Collection[str] = ()) -> dict[str, list[str]]:
    """Return, by site, the structures or classes that other sites' labels are told to have and its own are not.

    Args:
        told: names that each site's labels are told to have.
        explained: sites whose file says what was annotated.
    """
    everywhere = list(dict.fromkeys(name for own in told.values() for name in own))
    found = {site: [name for name in everywhere if name not in own] for site, own in told.items()}
    return {site: names for site, names in found.items() if names and site not in explained}


def question(lacking: Mapping[str, Sequence[str]], classes: bool | None) -> str:
    """Return one sentence that asks the sites of :func:`unexplained` what their labels' silence means.

    Args:
        lacking: the names by site.
        classes: whether labels are numbers of classes; ``None``: this is not known.
    """
    key = " or ".join(f'"{key}"' for kind, key in KEYS.items() if classes in (kind, None))
    no = "; ".join(f"no {LABELS[classes].format(site)} {', '.join(names)}" for site, names in lacking.items())
    return (
        f"{no} (or too few for its min_cases), and those of other sites do: not annotated there, or looked for and not "
        f"there? Write {key} into the fairflare.json of {', '.join(lacking)}: the numbers that were "
        'annotated, such as [1], or "all" where everything was looked for'
    )
