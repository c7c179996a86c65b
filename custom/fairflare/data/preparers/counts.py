"""How many images of which class every site has: as text, as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fairflare.base.disk.files import csv_text

Counts = Mapping[str, Mapping[str, "Counter[int | None]"]]  # site, split, class (None: it has a mask)

OWN = ("training", "validation", "test")


def class_name(number: int | None, names: Sequence[str] | None) -> str:
    """Of a class as tables call it; of masks ``images``."""
    if number is None:
        return "images"
    return names[number] if names is not None and number < len(names) else f"class_{number}"


def totals(counts: Counts, splits: Sequence[str] = OWN) -> dict[str, Counter[int | None]]:
    """Images of each class at each site, all these splits together."""
    return {site: sum((found.get(split, Counter()) for split in splits), Counter()) for site, found in counts.items()}


def classes_of(counts: Counts, names: Sequence[str] | None) -> list[int | None]:
    """The classes that occur or have a name, in their order."""
    found = {number for splits in counts.values() for own in splits.values() for number in own}
    if found and None in found:
        return [None]
    return sorted(found.union(range(len(names or ()))), key=lambda n: -1 if n is None else n)


def as_csv(counts: Counts, names: Sequence[str] | None) -> str:
    """A row for each site, split and class."""
    rows = [
        (site, split, class_name(number, names), found[number])
        for site, splits in counts.items()
        for split, found in splits.items()
        for number in classes_of(counts, names)
    ]
    return csv_text([("site", "split", "class", "images"), *rows])


def as_text(counts: Counts, names: Sequence[str] | None, width: int = 80) -> str:
    """A table of at most this width with a row for each class and a column for each site; sites that do not fit get a
    further table."""
    classes = classes_of(counts, names)
    head = ["class", *(class_name(number, names) for number in classes), "all"]
    first = [name.ljust(max(map(len, head))) for name in head]
    tables: list[list[list[str]]] = [[first]]
    for site, own in totals(counts).items():
        column = [site, *(str(own[number]) for number in classes), str(sum(own.values()))]
        cells = [cell.rjust(max(map(len, column))) for cell in column]
        if len(tables[-1]) > 1 and sum(2 + len(other[0]) for other in tables[-1]) + len(cells[0]) > width:
            tables.append([first])
        tables[-1].append(cells)
    return "\n".join("".join("  ".join(row) + "\n" for row in zip(*table, strict=True)) for table in tables)
