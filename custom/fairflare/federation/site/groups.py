"""Declare, fill and read the fields for sums of outcomes by group of people (``groups`` of the run).

A site fills the fields and the server reads them. To which group an image belongs is never sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from fairflare.base.aspect import GROUPS, refusals
from fairflare.base.cases.resampling import seed_generator
from fairflare.base.cases.sampling import number_cases
from fairflare.base.checks import refuse, refuse_if
from fairflare.core.statistics.group_sums import (
    BRIER,
    CALIBRATION,
    CASES,
    CELLS,
    CONFUSION,
    DICE,
    FOLDS,
    HISTOGRAM,
    IMAGES,
    OF_CLASSES,
    Array,
    find_hidden_groups,
    find_hidden_parts,
    impossible,
    shapes,
    sums_of,
)
from fairflare.methods.base.reports import MAX_ENTRIES, Field
from fairflare.methods.base.training import SiteError

if TYPE_CHECKING:
    import torch

    from fairflare.base.task import Outcomes, SiteData, Task
    from fairflare.exchange.messages import SiteTask

KEPT = "group_kept"  # key in a reply's stats with secure sums: for each sum 0 (withheld), 1 (no images) or 2
HELD = "group_held"  # key in a reply's stats at the site: names that the gate adds to those of withheld values
TABLE = "group_table"  # key in a reply's stats at the site; the gate replaces the table by its sums
NAMES = "group_names"
IN_GROUPS = "groups/"  # prefix of the names of groups in a reply's list of suppressed values
BY_CLASS = "`metrics_by_class`; of classes with few cases in a group, with others: `min_cases`"
FEW_CASES = "groups with few cases, with others: `min_cases`"
FIELDS = (
    Field(
        NAMES, "names", required=False,
        doc="with `groups`: `<attribute>=<group>` of each declared group, also of those that nobody is of. The sums "
        f"that follow are of each group in each of {FOLDS} parts of the cases, with `min_cases` above 1 in all cases "
        "together; NaN: withheld",
        keep="leave `attributes` out of the datalist", of=(),
    ),
    *(
        Field(
            f"group_{name}", "vector", low=0, nan_ok=True, required=False,
            doc=f"as `{NAMES}`, by part, group{what}", reveals=reveals, keep=keep, of=("test",),
        )
        for name, what, reveals, keep in (
            (IMAGES, ": number of test images", "how many people of a group the site has", FEW_CASES),
            (CASES, ": number of test cases (patients), and the sum over them of the square of their number of images",
             "how many people of a group the site has, and how unequal their numbers of images are", FEW_CASES),
            (CELLS, ", class: the same of the images with it, and of those without",
             "of how many people of a group there are images of each class", BY_CLASS),
            (CONFUSION, ", class: TP, FP, FN, TN", "how often each class occurs in a group", BY_CLASS),
            (HISTOGRAM, ", class: how many images with and without it have a probability of it in each of "
             "`group_bins` equal bins",
             "scores of single images to a bin, not whose; how often each class occurs in a group",
             BY_CLASS),
            (CALIBRATION, ", bin (`calibration_bins`) of the told class's probability: images, the sum of these "
             "probabilities, images told right", "how sure the model is of single images, to a bin, not of which",
             FEW_CASES),
            (BRIER, ": sum of squared differences of probabilities and truth", "", FEW_CASES),
            (DICE, ", structure: images, sum of Dice, sum of its square", "",
             f"{FEW_CASES}; where there are several structures: `metrics_by_class`"),
        )
    ),
)  # fmt: skip
SUMS = {field.name.removeprefix("group_"): field.name for field in FIELDS[1:]}
FIELDS += (
    Field(
        KEPT, "vector", low=0, high=2, required=False,
        doc="in their place with `secure=sums`: of each 0 (it stays), 1 (no image) or 2 (added up under masks)",
        reveals="which groups the site has", keep=FEW_CASES, of=("test",),
    ),
)  # fmt: skip
#: Sums that have a part for each class or structure.
OF_PARTS = (CELLS, CONFUSION, HISTOGRAM, DICE)
#: Sets of values that depend on each other: a site sends all values of a set or none.
TOGETHER = ((IMAGES, CASES), (CALIBRATION, BRIER), (CONFUSION, HISTOGRAM), (CONFUSION, CELLS))


def check_asked(site: str, task: Task, data: SiteData, asked: Sequence[str]) -> None:
    """Raise an error when a run asks for groups that a site's data or task cannot provide.

    Raises:
        SiteError: the data do not declare an attribute, or the task gives no outcomes of single images.
    """
    if unknown := [attribute for attribute in asked if attribute not in data.attributes]:
        raise SiteError(
            f"site {site!r}: the run asks for groups={unknown[0]!r}, the data declare: "
            f"{', '.join(data.attributes) or 'none'}; declare it in 'attributes' of the datalist, or take it out of "
            "groups",
            public=f"site {site!r}: the run asks for groups={unknown[0]!r}, which its data do not declare",
        )
    lacks = (
        "one with several findings an image" if task.findings else "" if task.outcome_names() else type(task).__name__
    )
    for text in refusals({"groups": asked, "no_outcomes": lacks}, [GROUPS]):
        raise SiteError(f"site {site!r}: {text}")


def names_of(data: SiteData, asked: Sequence[str]) -> list[str]:
    """Return the name ``<attribute>=<group>`` of each group that a site's data declare for the asked attributes."""
    return [f"{attribute}={group}" for attribute in asked for group in data.attributes[attribute]]


@dataclass(frozen=True)
class GroupTable:
    """Hold the outcomes of a site's test images with their groups of people; only sums of them are sent.

    Attributes:
        site: name of the site; the name and the number of cases decide how the cases are divided into parts.
        outcomes: labels and scores from :meth:`fairflare.base.task.Task.outcomes`.
        numbers: number of the group of each image, by attribute.
        cases: case (patient) of each image.
        names: names of the groups of all attributes.
        bins, calibration_bins: ``group_bins`` and ``calibration_bins`` of the run.
    """

    site: str
    outcomes: Outcomes
    numbers: Mapping[str, np.ndarray[Any, np.dtype[np.int64]]]
    cases: Sequence[Hashable]
    names: list[str]
    bins: int
    calibration_bins: int

    def kept(self, least: int, by_class: bool) -> tuple[dict[str, Any], list[Array]]:
        """Return the reply's fields about sums that stay at the site, and these sums in the order of :func:`pieces`.

        Args:
            least, by_class: as in :meth:`sent`; what may not be sent may not be added up either.
        """
        fields, held = self.sent(least, by_class, 1)
        sums = blank(self.names, shapes(self.outcomes[1].shape[1], self.bins, self.calibration_bins))
        for name in [name for name, field in SUMS.items() if field in fields]:
            sums[name][:] = np.reshape(fields[SUMS[name]], sums[name].shape)
        images = np.repeat(sums[IMAGES], len(arrays := pieces(sums)) // len(self.names))
        has = [
            0.0 if np.isnan(array).any() else 1.0 + bool(count > 0) for array, count in zip(arrays, images, strict=True)
        ]
        return {NAMES: self.names, KEPT: has, HELD: held}, arrays

    def sent(self, least: int, by_class: bool, most: int = FOLDS) -> tuple[dict[str, Any], list[str]]:
        """Return the declared fields with the sums, and the names of the groups and classes that are withheld.

        A withheld class is named by its attribute and its number. With ``least`` 1 the sums are given for each of
        :data:`FOLDS` parts of the cases, the same parts in every run, unless that makes a field too long.

        Args:
            least: least number of cases in a sum that may be sent.
            by_class: whether sums by class, or by one of several structures, may be sent.
            most: largest number of parts.
        """
        labels, scores = self.outcomes
        form = shapes(scores.shape[1], self.bins, self.calibration_bins)
        wanted = [IMAGES, CASES, *(OF_CLASSES if labels is not None else (DICE,))]
        if not by_class:
            out = (CELLS, CONFUSION, HISTOGRAM) if labels is not None else (DICE,) if scores.shape[1] > 1 else ()
            wanted = [name for name in wanted if name not in out]
        count, whose = number_cases(len(self.cases), self.cases)
        part_of = (seed_generator(self.site, count).permutation(count) % FOLDS)[whose]
        largest = max(int(np.prod(form[name])) for name in wanted) * len(self.names) * FOLDS
        folds = 1 if least > 1 or largest > MAX_ENTRIES else most
        rows: dict[str, list[Array]] = {name: [] for name in wanted}
        held: list[str] = []
        for attribute, numbers in self.numbers.items():
            groups = [name for name in self.names if name.startswith(f"{attribute}=")]
            hidden = find_hidden_groups(self.cases, numbers, len(groups), least)
            parts: frozenset[int] = frozenset()
            if labels is not None and by_class:
                parts = find_hidden_parts(self.cases, labels, numbers, hidden, least, scores.shape[1])
                held += [f"{IN_GROUPS}{attribute}/class {part}" for part in sorted(parts)]
            held += [IN_GROUPS + groups[number] for number in sorted(hidden)]
            for number, fold in product(range(len(groups)), range(folds)):
                chosen = (numbers == number) & (part_of % folds == fold)
                sums = sums_of(labels, scores, chosen, self.bins, self.calibration_bins, whose, least)
                for name in wanted:
                    shown = np.full(form[name], np.nan) if number in hidden else sums[name].copy()
                    if name in (CELLS, CONFUSION, HISTOGRAM):
                        shown[sorted(parts)] = np.nan
                    rows[name].append(shown)
        tables = {SUMS[name]: np.stack(values).reshape(-1).tolist() for name, values in rows.items()}
        return {NAMES: self.names, **tables}, held


def blank(names: Sequence[str], form: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return sums of groups that are not known (NaN), in the shapes of ``form``, with the group as the first axis."""
    return {key: np.full((len(names), *shape), np.nan) for key, shape in form.items()}


def pieces(sums: Mapping[str, Array]) -> list[Array]:
    """Return views of the sums that a site has as a whole or not at all: of a group, or of a class of it, flat."""
    return [
        piece.reshape(-1)
        for group in range(len(sums[IMAGES]))
        for key, values in sums.items()
        for piece in (values[group] if key in OF_PARTS else [values[group : group + 1]])
    ]


def table_of(
    site: str, task: Task, model: torch.nn.Module, data: SiteData, device: torch.device, asked: SiteTask
) -> GroupTable:
    """Compute the outcomes of a site's test images, with the groups that a run asks for.

    Raises:
        SiteError: an attribute cannot be provided, or a field of the reply would be longer than is allowed.
    """
    check_asked(site, task, data, asked.groups)
    outcomes = task.outcomes(model, data, "test", device)
    assert outcomes is not None  # check_asked has made sure that the task gives outcomes
    names, (labels, scores) = names_of(data, asked.groups), outcomes
    form = shapes(scores.shape[1], asked.group_bins, asked.calibration_bins)
    size = max(int(np.prod(form[name])) for name in (OF_CLASSES if labels is not None else (DICE,))) * len(names)
    refuse({
        f"site {site!r}: groups would send {size} numbers, more than {MAX_ENTRIES}; lower group_bins":
            size > MAX_ENTRIES,
    }, SiteError)  # fmt: skip
    numbers = {name: np.asarray(data.group_numbers("test", name), np.int64) for name in asked.groups}
    cases = data.cases("test")
    whose: Sequence[Hashable] = range(len(scores)) if cases is None else cases
    return GroupTable(site, outcomes, numbers, whose, names, asked.group_bins, asked.calibration_bins)


def _odd_names(names: Sequence[str], asked: Sequence[str], declared: Sequence[str] | None) -> dict[str, bool]:
    """Return whether the names of a site's groups have a problem, by the text that describes the problem."""
    strange = [name for name in names if name.partition("=")[0] not in asked or not name.isprintable()]
    odd = next(iter(set(names) ^ set(declared or names)), "another order")
    return {
        f"field {NAMES!r} must name groups of {', '.join(asked)}, got {next(iter(strange), 'one name twice')!r:.80}":
            bool(strange) or len(set(names)) != len(names),
        f"field {NAMES!r} must name the {len(declared or ())} groups that the datalists declare, it has {len(names)}: "
        f"{odd!r:.80}": declared is not None and list(names) != list(declared),
    }  # fmt: skip


def read_kept(
    site: str, stats: Mapping[str, Any], asked: Sequence[str], form: Mapping[str, tuple[int, ...]],
    declared: Sequence[str] | None,
) -> tuple[list[str], Array] | None:  # fmt: skip
    """Return the names of a site's groups of people, and a code for each of their sums; ``None`` if it reported none.

    The codes (:data:`KEPT`): 0, the sum is withheld; 1, the group has no images; 2, the sum goes into a secure sum.

    Raises:
        ReportError: the groups are not those asked for and declared, or there is not one code for each sum.
    """
    names, has = stats[NAMES], stats[KEPT]
    if not names or has is None:
        return None
    count = len(pieces(blank(names[:1], form))) * len(names)
    refuse_if(site, {
        **_odd_names(names, asked, declared),
        f"field {KEPT!r} must be {count} times 0, 1 or 2, got {len(has)} numbers": len(has) != count,
        f"field {KEPT!r} must be 0, 1 or 2": not {*has} <= {0, 1, 2},
    })  # fmt: skip
    return names, np.asarray(has)


def read_groups(
    site: str,
    stats: Mapping[str, Any],
    asked: Sequence[str],
    parts: int,
    bins: int,
    calibration_bins: int,
    declared: Sequence[str] | None = None,
    images: float | None = None,
) -> dict[str, dict[str, Array]] | None:
    """Return the checked sums of each group, ``{"<attribute>=<group>": sums}``, or ``None`` if the reply has none.

    The first dimension of each array of sums is the part of the cases.

    Args:
        site: name of the site that sent the reply.
        stats: the reply's ``stats``, checked field by field.
        asked: attributes that the run asks for.
        parts: number of classes or structures.
        bins, calibration_bins: ``group_bins`` and ``calibration_bins`` of the run.
        declared: names of the groups, as the sites reported them before the first round; ``None`` if no site did.
        images: number of images in the site's test split; ``None`` if it is not known.

    Raises:
        ReportError: the groups are not those asked for and declared, a vector has another length, or the sums are
            impossible for that number of images (names site and field).
    """
    names, tables = stats[NAMES], {key: stats[field] for key, field in SUMS.items()}
    if names is None or tables[IMAGES] is None:  # groups are not requested, or withheld because of too few test cases
        return None
    form, folds = shapes(parts, bins, calibration_bins), FOLDS if len(tables[IMAGES]) == FOLDS * len(names) else 1
    sent = {key: values for key, values in tables.items() if values is not None}
    sizes = {key: len(names) * folds * int(np.prod(form[key])) for key in sent}
    refuse_if(site, {
        **_odd_names(names, asked, declared),
        **{
            f"field {SUMS[key]!r} has {len(values)} entries, expected {sizes[key]}": len(values) != sizes[key]
            for key, values in sent.items()
        },
        **{
            f"field {SUMS[one]!r} is missing beside {SUMS[other]!r}": one not in sent and other in sent
            for pair in TOGETHER for one, other in (pair, pair[::-1])
        },
    })  # fmt: skip
    arrays = {key: np.asarray(sent[key], float).reshape(len(names), folds, *form[key]) for key in sent}
    by_group = {name: {key: array[row] for key, array in arrays.items()} for row, name in enumerate(names)}
    for name, sums in by_group.items():
        wrong, count = impossible(sums), float(np.nansum(sums[IMAGES]))
        refuse_if(site, {
            f"field {SUMS.get(wrong)!r} of {name!r:.80} cannot be of {count:.0f} images": bool(wrong)
        })  # fmt: skip
    counts = dict.fromkeys(asked, 0.0)
    for name, sums in by_group.items():
        counts[name.partition("=")[0]] += float(np.nansum(sums[IMAGES]))
    refuse_if(site, {
        f"field {SUMS[IMAGES]!r} counts {count:.0f} images by {attribute!r:.80}, it has {images or 0:.0f} in test":
            images is not None and count > images + 0.5
        for attribute, count in counts.items()
    })  # fmt: skip
    return by_group
