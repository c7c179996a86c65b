"""Count in which of a site's cases each structure or class occurs, and ask about those that never occur."""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fairflare.base.checks import few, group_by_key, list_names
from fairflare.base.site_data import UNLABELLED, SiteData

if TYPE_CHECKING:
    import torch

#: Key of a site's file that names what the site annotated: for labels that are class numbers (True), or masks (False).
KEYS = {True: "classes", False: "structures"}
WORDS = {
    True: ("label", "is", KEYS[True], '"class_numbers" (of findings "class_names" of its datalist)'),
    False: (
        "mask",
        "marks",
        KEYS[False],
        '"mask_values", and num_classes (--set) to the number of structures that are left',
    ),
}


class Census:
    """Count the images, and the cases, whose labels have each structure or class.

    Args:
        marks: the case of each image, with the numbers of the structures or classes that its label has.
    """

    def __init__(self, marks: Iterable[tuple[Hashable, Collection[int]]]) -> None:
        known = list(marks)
        pairs = [(case, number) for case, numbers in known for number in numbers]
        self.images = Counter(number for _, number in pairs)
        self.cases = Counter(number for _, number in {*pairs})
        self.everybody = {case for case, _ in known}

    def count_reportable(self, names: Sequence[str], least: int) -> dict[str, int]:
        """Return, by structure or class, the numbers of cases that may leave the site; see :func:`count_reportable`."""
        return count_reportable({name: self.cases[k] for k, name in enumerate(names)}, len(self.everybody), least)


class Marked(SiteData):
    """Restrict the masks of a site's data to the structures that enough cases have; a mix-in class."""

    task: Any
    _left: int  # bytes that decoded images may still take
    _least = 1  # smallest number of cases that may be reported on

    @abstractmethod
    def all_marks(self, split: str) -> Sequence[tuple[Hashable, Collection[int]]]:
        """Return the case of each image, with the numbers of all structures or classes that its label has."""

    def marks(self, split: str) -> Sequence[tuple[Hashable, Collection[int]]]:
        shown = self.structures(split)
        return (
            self.all_marks(split)
            if shown is None
            else [(case, [*{*marks} & {*shown}]) for case, marks in self.all_marks(split)]
        )

    def class_cases(self, split: str) -> torch.Tensor:
        import torch

        cases = Census(self.all_marks(split)).cases
        return torch.tensor([cases[number] for number in range(len(self.task.structures))])

    def enough(self, least: int) -> SiteData:
        counted = copy.copy(self) if least > 1 else self
        if counted is not self:
            counted._least = least
            # Both objects read training images, so each may keep decoded images in half of the memory.
            counted._left = self._left = self._left // 2
        return counted

    def structures(self, split: str) -> tuple[int, ...] | None:
        if self._least <= 1 or self.task.class_labels or split == UNLABELLED:
            return None
        cases = self.class_cases(split).tolist()
        return tuple(k for k, n in enumerate(cases) if n >= self._least and k in (self.annotated or (k,)))


def infer_annotated(known: Collection[int] | None, marked: Collection[int], count: int) -> tuple[int, ...] | None:
    """Return the findings of which a site's labels show that they were looked for; ``None`` if labels do not say so.

    Those are the findings with a known label in any image, if some have none and each of those is marked in an image.

    Args:
        known: numbers of the findings with a known label, present or absent; ``None`` for data without findings.
        marked: numbers of the findings that are present in an image, and may be told.
        count: number of all findings.
    """
    return tuple(sorted(known)) if known and len({*known}) < count and {*known} <= {*marked} else None


def count_reportable(cases: Mapping[str, int], total: int, least: int) -> dict[str, int]:
    """Return the numbers of cases that may leave a site, by structure or class.

    A number is withheld if fewer than ``least`` cases have the structure, or if some but fewer than ``least`` cases
    lack it, so that a reader cannot tell few cases from none.

    Args:
        cases: number of cases with each structure or class, ``>= 0``.
        total: number of all cases.
        least: smallest number of cases that may be reported on, ``>= 1``.
    """
    return {name: n for name, n in cases.items() if n >= max(least, 1) and (n == total or total - n >= least)}


def list_unexplained(marked: Mapping[str, Collection[str]], explained: Collection[str] = ()) -> dict[str, list[str]]:
    """Return, by site, the structures or classes that other sites report in their labels and this site does not.

    Args:
        marked: names of the structures or classes that each site reports in its labels.
        explained: sites whose file says what was annotated.
    """
    everywhere = list(dict.fromkeys(name for names in marked.values() for name in names))
    missing = {site: [name for name in everywhere if name not in names] for site, names in marked.items()}
    return {site: names for site, names in missing.items() if names and site not in explained}


def contradictions(texts: Mapping[str, Iterable[str]]) -> dict[str, dict[str, list[str]]]:
    """Return the sites by what a label of their masks is, for each label that seems to mean different things.

    Names decide, or else a palette's colours, whatever the values; where a site has none, the values in the files do.

    Args:
        texts: what the labels are at each site, see :attr:`SiteData.mask_labels`.
    """
    parts = [
        (site, (*text.split("=", 2), "", "")[:3])
        for site, site_texts in sorted(texts.items())
        for text in sorted(site_texts)
    ]
    clashes = {}
    for label, triples in group_by_key((label, (site, value, name)) for site, (label, value, name) in parts).items():
        words, colours = (
            group_by_key(
                (" ".join(name.split()).casefold(), site)
                for site, _, name in triples
                if name and (name[0] == "#") is so
            )
            for so in (False, True)
        )
        nameless = not all(name for *_, name in triples) or (words and colours)
        values = group_by_key((f"value {value}", site) for site, value, _ in triples if value and nameless)
        clashes[label] = next((meanings for meanings in (words, colours, values) if len(meanings) > 1), {})
    return {label: meanings for label, meanings in clashes.items() if meanings}


def question_of_values(clashes: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Return a sentence that asks whether labels of masks mean the same at all sites; see :func:`contradictions`."""
    in_words = "; ".join(
        f"label {label} is {', '.join(f'{what} at {list_names(sites)}' for what, sites in by_meaning.items())}"
        for label, by_meaning in clashes.items()
    )
    return (
        f"the masks' labels may mean different things: {in_words:.600}. Where that is one structure, write one name "
        'for it into "mask_labels" of these sites\' datalists, such as {"4": "tumour"} for the value 4. Where it is '
        'not, give it a label of its own in the block of a site, such as "mask_values": {"0": 0, "1": 1, "4": 3}, with '
        '"structures": [1, 3] for the labels that were annotated there, and num_classes=3'
    )


def question(
    lacking: Mapping[str, Sequence[str]],
    classes: bool,
    numbers: Mapping[str, Sequence[int]],
    file: str = "the fairflare.json that the run reads (--data; in a network the site's own)",
) -> str:
    """Return a sentence that asks sites whether structures that their labels lack are absent or were not annotated.

    Args:
        lacking: the names by site.
        classes: whether labels are numbers of classes.
        numbers: the numbers to write for each structure or class of the task, by name; empty if they are not known.
        file: the file to write them into.
    """
    label, marks, key, code = WORDS[classes]
    no = "; ".join(f"no {label} of {site} {marks} {', '.join(names)}" for site, names in lacking.items())
    called = [f"{', '.join(map(str, numbers_of_name))}: {name}" for name, numbers_of_name in numbers.items()]
    # The example names the structures that the first site marks; if it marks none, the task's first structure.
    (site, without), first = next(iter(lacking.items())), next(iter(numbers.values()), [1])
    some = sorted(
        {number for name, numbers_of_name in numbers.items() if name not in without for number in numbers_of_name}
    ) or [*first]
    return (
        f"{no} (or too few for its min_cases), and those of other sites do: not annotated there, looked for and not "
        f'there, or part of another (one number for two)? Write "{key}" for {", ".join(lacking)} into {file}, in the '
        "block of the site: the numbers that were "
        f"annotated{f' ({few(called, 8)})' if called else ''}, such as "
        f'"sites": {json.dumps({site: {key: some}})}, or "all" where everything was looked for. Where the same has '
        f"another number there, correct {code}; where nobody annotated any, leave the site out of the run, or its "
        "images out of its datalist; so too where one number stands for two"
    )
