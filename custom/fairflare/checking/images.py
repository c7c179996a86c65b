"""Find all problems in the images of one or several sites in one pass, for ``fairflare check-data``.

Everything is read as in training: the datalist by :func:`fairflare.data.datalist.load_datalist`, and each sample by
the task, as if the site had this one image only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.ndimage import binary_erosion, find_objects
from scipy.stats import fisher_exact

from fairflare.base.cases.census import contradictions, infer_annotated, list_unexplained, question, question_of_values
from fairflare.base.checks import few, group_by_key, true_texts
from fairflare.base.machine.memory import print_progress, workers
from fairflare.base.site_data import UNLABELLED
from fairflare.base.task import SPLIT_GLOBAL
from fairflare.checking.label_probe import compare_labels
from fairflare.checking.volumes import CHECKED, EMPTY, FULL, LINES, look_at_masked, shapes_of
from fairflare.core.statistics.channels import Channels, describe_channels
from fairflare.core.statistics.intervals import FEW
from fairflare.core.statistics.label_maps import features_of, find_exchanged, regions_of
from fairflare.data.datalist import SPLITS, DataError, Datalist, Sample, load_datalist
from fairflare.data.geometry import Misfit, notes_of
from fairflare.data.image_file import image_file
from fairflare.data.kinds import (
    Drawn,
    apart,
    describe_mask,
    group_faults,
    name_first,
    odd_images,
    odd_masks,
    odd_pair,
    shorten,
    two_names,
)
from fairflare.data.listing.attributes import bare
from fairflare.data.patients import find_shared_groups
from fairflare.data.reading import PLAIN, ValueNotes, notes_on, reading_takes
from fairflare.methods.base.site_run import SiteError
from fairflare.privacy.policy import Private, budget_notes
from fairflare.tasks.images import ImageTask
from fairflare.tasks.shared.site_settings import SiteSettings, read_settings

PLACES = 3  # number of places of one image that a message names
# For structures that a site marks seldom, or only as lines: share of masks from which all other sites mark a structure,
# share up to which this site marks it, and number of masks.
MOST, LESS, FEWER = 0.95, 0.8, 2
# p-value of a reported difference between splits; number of combinations of findings that the probe tells apart.
CHANCE, COMBINED = 0.001, 16
COLUMNS = ["site", "split", "place", "patient", "content", "target"]  # of a table with a row per image


@dataclass(frozen=True)
class Problem:
    """Describe a problem that was found in a site's images or datalist.

    Args:
        site: name of the site; empty if the problem concerns several sites.
        text: description of the problem and of its remedy.
        grave: whether training must not start before the problem is fixed; False: it may be intended.
        about: path of the image file with its two innermost folders; empty if the problem concerns several images or a
            datalist.
    """

    site: str
    text: str
    grave: bool = True
    about: str = ""


@dataclass(frozen=True)
class SiteReport:
    """Store the results of checking the images of one site.

    Attributes:
        site: name of the site.
        counts: number of images by split and class; for a task on masks the class is ``None``.
        groups: number of images by attribute, split and group.
        sizes: number of images by (height, width) in pixels, as stored in the files.
        labelled: number of images with each structure or class, in the site's own lists.
        annotated: structures or classes that the site's file says are annotated; ``None`` if it names none.
        prepared: bytes that volumes with masks take on the site's disk when they are prepared, and its limit for them.
        here: those, or if it names none, the ones that occur in its labels.
    """

    site: str
    counts: dict[str, Counter[int | None]]
    groups: dict[str, dict[str, dict[str, int]]]
    sizes: Counter[tuple[int, ...]]
    labelled: Counter[str]
    annotated: tuple[int, ...] | None
    prepared: tuple[int, int] = (0, 0)
    here: tuple[int, ...] = ()


@dataclass(frozen=True)
class DataReport:
    """Store the reports and problems of all sites; ``labels``: a line on whether class labels agree across sites."""

    sites: list[SiteReport]
    problems: list[Problem]
    labels: str = ""

    @property
    def grave(self) -> int:
        """Return the number of problems that must be fixed before training begins."""
        return sum(problem.grave for problem in self.problems)

    @property
    def usable(self) -> int:
        """Return the number of usable images, summed over all sites and splits."""
        return sum(sum(counts.values()) for site in self.sites for counts in site.counts.values())


@dataclass
class _Look:
    """Store the results of checking one image and its target; without ``errors`` the image is usable."""

    site: str
    split: str
    path: Path
    place: str  # the path, with slice, site and split
    patient: str | None
    size: tuple[int, ...] = ()
    content: list[str | None] = field(default_factory=lambda: [None])  # hash of each image; None if all pixels are one
    channels: Channels | None = None  # description of the images of a case with several
    number: int | None = None  # the class
    target: str | None = None  # hash of the target; None if it has none
    labelled: list[int] = field(default_factory=list)  # structures in the mask, or the class, or findings
    open: list[int] = field(default_factory=list)  # findings of which the label is not known
    odd: list[str] = field(default_factory=list)  # what the mask is: EMPTY, FULL, LINES
    #: Features with the class of the image; of a mask those of its background (0) and structures (from 1).
    features: list[tuple[npt.NDArray[np.floating], int]] = field(default_factory=list)
    shapes: dict[int, npt.NDArray[np.floating]] = field(default_factory=dict)  # of background (0) and structures
    mask_labels: tuple[str, ...] = ()  # what the labels of the masks are in the site's files
    colours: Mapping[int, str] = field(default_factory=dict)  # names of the mask's values in its file
    drawn: list[Drawn] = field(default_factory=list)  # description of the mask; empty without a mask
    errors: list[DataError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # notes on the geometry of image and mask
    prepared: int = 0  # bytes that the volume takes when it is prepared


def check_sites(
    task: ImageTask,
    sites: Mapping[str, Mapping[str, Any]],
    done: Callable[[int, int], None] = lambda n, total: None,
    file: str = "fairflare.json",
) -> DataReport:
    """Check every image of every site and return a report of all sites and problems.

    Args:
        task: the task that reads the images; defines their size, the values of masks and the number of classes.
        sites: the settings of each site by its name, as in the site's ``fairflare.json``.
        done: function that is called after each image with the number of images checked so far and the total.
        file: path of that ``fairflare.json``.
    """
    problems: list[Problem] = []
    opened = list(_open_lists(task, sites, problems))
    names = next((listed.class_names for _, listed in opened if listed.class_names is not None), None)
    called = names if names and not task.findings and len(names) == len(task.structures) else task.names()
    lookers = [_Looker(task, settings, listed, called) for settings, listed in opened]
    total = sum(len(looker.listed) for looker in lookers)
    looked = chain.from_iterable(looker.look() for looker in lookers)
    for number, _ in enumerate(print_progress(looked, total, "images looked at"), 1):
        done(number, total)
    reports = [looker.report() for looker in lookers]
    frame = pd.DataFrame([vars(look) for looker in lookers for look in looker.good], columns=COLUMNS)
    odd = contradictions({one.list.site: {text for look in one.looks for text in look.mask_labels} for one in lookers})
    images = {one.list.site: [(shorten(x.path), x.channels) for x in one.good if x.channels] for one in lookers}
    drawn = {looker.list.site: [mask for look in looker.good for mask in look.drawn] for looker in lookers}
    problems += [
        *(problem for looker in lookers for problem in looker.problems.values()),
        *([Problem("", question_of_values(odd))] if odd else []),
        *(Problem(listed.site, text, grave=False) for _, listed in opened for text in listed.doubts),
        *_names(opened, task.findings is not None), *_codes(reports), *_same_images(frame), *_people(frame),
        *_find_unnamed_people(opened),
        *(Problem(a.site, f"{n} test case(s): no verdict on a site, which takes {FEW}", grave=False)
          for _, a in opened for n in [len({s.patient or s.image for s in a.splits.get("test", ())})] if 0 < n < FEW),
        *_silent(reports, task.class_labels, dict(zip(called, task.structures, strict=True)), file),
        *([] if task.class_labels else _seldom(reports)),
        *(Problem(site, line, grave=False) for site, line in (*odd_images(images), *apart(drawn))),
    ]  # fmt: skip
    meanings = dict(enumerate(called if task.class_labels else ["background", *called]))
    if task.findings:
        meanings = {
            bits: " and ".join(name for k, name in enumerate(called) if bits >> k & 1) or "no finding"
            for bits, _ in Counter(
                number for looker in lookers for look in looker.good for _, number in look.features
            ).most_common(COMBINED)
        }
    line, clashes = compare_labels(
        {looker.list.site: looker.good for looker in lookers}, meanings,
        {} if task.class_labels else {one.site: one.here for one in reports},
    )  # fmt: skip
    return DataReport(reports, [*problems, *(Problem(*clash) for clash in clashes)], line)


def _open_lists(
    task: ImageTask, sites: Mapping[str, Mapping[str, Any]], problems: list[Problem]
) -> Iterator[tuple[SiteSettings, Datalist]]:
    """Yield settings and datalist of each site that has images, and add the problems of these two.

    What every run would refuse of a site's setting ``privacy`` is a problem too; an epsilon that protects nothing is a
    note.
    """
    for site, settings in sites.items():
        errors: list[DataError | SiteError] = []
        try:
            mine = read_settings(task.site_settings, site, settings)
            if mine.data_root is None:
                problems.append(Problem(site, "no 'data_root': there are no images to look at", grave=False))
                continue
            how: Any = {"class_labels": task.class_labels, "linked_roots": mine.linked_roots, "problems": errors}
            yield mine, (listed := load_datalist(mine.data_root, mine.datalist or "datalist.json", site=site, **how))
            if (private := Private.read(site, settings)) is not None:
                problems += [
                    Problem(site, f"privacy: {text}", grave=False) for text, _ in budget_notes(private.own.epsilon)
                ]
                if listed.splits["training"]:
                    with suppress(DataError):  # an image that cannot be read is found below
                        private.check_budget(task.open_listed(site, mine, listed))
        except (DataError, SiteError) as error:
            errors.append(error)
        problems += [Problem(site, _plain(site, error)) for error in errors]


def _plain(site: str, error: Exception) -> str:
    """Return an error's message without the site's name, which the report shows in a separate column."""
    return str(error).removeprefix(f"site {site!r}: ")


class _Looker:
    """Check the images of one site, several at a time in threads."""

    def __init__(self, task: ImageTask, own: SiteSettings, listed: Datalist, names: Sequence[str]) -> None:
        self.task, self.own, self.list, self.names = task, own, listed, names
        self.listed = [(split, sample) for split, samples in listed.splits.items() for sample in samples]
        self.looks: list[_Look] = []
        self.problems: dict[str, Problem] = {}  # by text
        self._values = ValueNotes()

    @property
    def good(self) -> list[_Look]:
        """Return the results of checking those images of a site that can be used."""
        return [look for look in self.looks if not look.errors]

    def look(self) -> Iterator[None]:
        """Check every image of the site, and yield after each, so that the caller can show progress."""
        first = [self.one(each) for each in self.listed[:1]]  # imports what the task needs, before the threads begin
        with ThreadPool(workers(reading_takes((sample for _, sample in self.listed), CHECKED))) as threads:
            for look in chain(first, threads.imap(self.one, self.listed[1:])):
                self.looks.append(look)
                yield

    def one(self, listed: tuple[str, Sample]) -> _Look:
        """Read one image, as stored and as the task prepares it with its target, and return the results."""
        split, sample = listed
        site, task = self.list.site, self.task
        number = "" if sample.slice is None else f" slice {sample.slice}"
        look = _Look(site, split, sample.image, f"'{sample.image}'{number} ({site}, {split})", sample.patient)
        if task.spatial_dims == 3 and sample.mask is not None:
            return self._add_mask(look, sample)
        try:
            image = task.read_stored(sample, site, split, self.own.max_image_bytes)
            look.size = image.shape[:2] if image.shape[2] in (1, 3) else image.shape
            if (image != image.flat[0]).any():
                look.content = [_hash(np.asarray(image.shape), image)]
        except DataError as error:
            look.errors.append(error)
        try:
            data: Any = task.open_listed(site, self.own, replace(self.list, splits={split: (sample,)}))
            image, target = (one[0].numpy() for one in data.read(split, [0]))
            has = data.channels or ()
            channels = describe_channels([data.task.channels[k] for k in has], image[[*has]])
            look = replace(look, mask_labels=data.mask_labels, channels=channels)
            if sample.label is None:
                return look
            look = replace(
                look, **_look_at_label(sample, image, target), notes=notes_on(sample, getattr(data, "reading", PLAIN))
            )
            self._values.add(sample)
        except DataError as error:
            look.errors.append(error)
        if look.errors and sample.mask is not None and sample.slice is None and task.spatial_dims == 2:
            odd = odd_pair(sample.image, sample.mask)
            look.errors = [DataError(f"image '{sample.image}' of '{split}': {odd}")] if odd else look.errors
        return look

    def _add_mask(self, look: _Look, sample: Sample) -> _Look:
        """Read a volume and its mask once, and add the results to those of the image."""
        try:
            data: Any = self.task.open_listed(look.site, self.own, replace(self.list, splits={look.split: (sample,)}))
            look.colours = {} if sample.mask is None else image_file(sample.mask).names()
            look = replace(look, **look_at_masked(data, sample, look.split), notes=notes_on(sample, data.reading))
            self._values.add(sample)
        except DataError as error:
            look.errors.append(error)
        return look

    def report(self) -> SiteReport:
        """Return the site's numbers of images, and add the problems that were found to ``problems``."""
        misfits: dict[str, Misfit] = {}  # one line for each kind of misfit
        for look in self.looks:
            for error in look.errors:
                text = _plain(look.site, error)
                if error.misfit is None:
                    self.say(text, about=shorten(look.path))
                else:
                    misfits[text.removesuffix(f": {error.misfit}")] = error.misfit
            if not look.errors and None in look.content:
                self.say(
                    f"image '{look.path}' of '{look.split}': all its pixels have one value", False, shorten(look.path)
                )
        good = self.good
        counts = {split: Counter(look.number for look in good if look.split == split) for split in self.list.splits}
        names = (self.names[k] for look in good if look.split != SPLIT_GLOBAL for k in look.labelled)
        labelled = Counter({**dict.fromkeys(self.names, 0), **Counter(names)})
        for split in counts:
            self._judge(split)
        for text in (*group_faults(misfits.items()), *two_names((shorten(x.path), x.colours) for x in self.looks)):
            self.say(text)
        masks = [look for look in good if look.drawn]
        for text in (
            *notes_of(note for look in self.looks for note in look.notes), *self._values.lines(),
            *odd_masks([mask for look in good for mask in look.drawn]),
            *(
                f"{len(rows)} of {len(masks)} masks look as if {self.names[one - 1]} and {self.names[two - 1]} were "
                f"exchanged in them: {name_first([shorten(masks[n].path) for n in rows])}; have all one list of codes?"
                for one, two, rows in find_exchanged([{number: x for x, number in look.features} for look in masks])
            ),
        ):  # fmt: skip
            self.say(text, grave=False)
        annotated, marked = self._infer(labelled), tuple(k for k, name in enumerate(self.names) if labelled[name])
        return SiteReport(
            self.list.site, counts, _groups(self.list), Counter(look.size for look in self.looks if look.size),
            labelled, annotated, (sum(look.prepared for look in good), self.own.decoded_bytes),
            here=marked if annotated is None else annotated,
        )  # fmt: skip

    def _infer(self, labelled: Mapping[str, int]) -> tuple[int, ...] | None:
        """Return the numbers of the annotated structures or findings, or ``None`` if all are or nothing says which.

        If the site's file says nothing, the findings that have a known label in any image count as annotated. The
        result is still ``None`` if these are all findings, or if one of them occurs in no image.
        """
        declared = None
        try:
            declared = self.task.read_annotated(self.list.site, self.own)
        except DataError as error:
            self.say(_plain(self.list.site, error))
        if not self.task.findings:
            return declared
        seen = {
            name
            for _, sample in self.listed
            if isinstance(sample.label, tuple)
            for name, value in zip(self.list.class_names or (), sample.label, strict=False)
            if value >= 0
        }
        if declared is not None:
            if silent := [self.names[k] for k in declared if self.names[k] not in seen]:
                self.say(
                    f"'classes' in the site's fairflare.json says that these were looked for: {', '.join(silent)}; but "
                    "all their labels are null: write 0 where a finding was absent, or list only the others",
                    grave=False,
                )  # fmt: skip
            return declared
        known, marked = ([k for k, name in enumerate(self.names) if n[name]] for n in (Counter(seen), labelled))
        return infer_annotated(known, marked, len(self.names))

    def _judge(self, split: str) -> None:
        """Add problems on a split's odd masks, and on labels far more or less frequent in it than in 'training'."""
        looks, trained = ([look for look in self.good if look.split == name] for name in (split, "training"))
        for what, count in Counter(what for look in looks for what in look.odd).items():
            if what != LINES or count > max(FEWER, len(looks) / 2):
                self.say(f"{count} image(s) of '{split}' have a mask {what}", grave=False)
        here, known = (Counter(name for look in group for name in look.labelled) for group in (looks, trained))
        for k in () if split in ("training", SPLIT_GLOBAL, UNLABELLED) else sorted({*here, *known}):
            total, before = (sum(k not in look.open for look in group) for group in (looks, trained))
            pairs = [(here[k], total - here[k]), (known[k], before - known[k])]
            if not known[k] or not total or fisher_exact(pairs)[1] < CHANCE:
                self.say(
                    f"{self.names[k]} is in {here[k]} of {total} {'known ' * (total < len(looks))}labels of '{split}', "
                    f"and in {known[k]} of {before} of 'training': was it looked for in both?", grave=False,
                )  # fmt: skip

    def say(self, text: str, grave: bool = True, about: str = "") -> None:
        self.problems.setdefault(text, Problem(self.list.site, text, grave, about))


def _look_at_label(sample: Sample, image: npt.NDArray[Any], target: npt.NDArray[Any]) -> dict[str, Any]:
    """Return what is checked of a class, of findings, or of a mask in structures, by the names of :class:`_Look`."""
    picture, seen = _flat_pair(image, target)
    structures = target.reshape(len(target) if target.ndim else 1, -1)  # -1: does not count
    marked = (structures > 0).any(axis=1)
    # Each combination of structures or findings gets a different number.
    codes = np.tensordot(2.0 ** np.arange(len(target)), target > 0, 1) if target.ndim else target
    facts: dict[str, Any] = {
        "number": None if target.ndim else int(target),
        "labelled": np.flatnonzero(marked).tolist() if target.ndim else [int(target)],
        "open": np.flatnonzero(target < 0).tolist() if target.ndim == 1 else [],
        "target": _hash(seen),
    }
    if target.ndim < 2:
        return facts | {"features": [(features_of(picture), int(codes))] if (target >= 0).all() else []}
    of_marked = {
        FULL: (structures != 0).any(axis=0).all(), LINES: not any(binary_erosion(one > 0).any() for one in target)
    }  # fmt: skip
    return facts | {
        "colours": {} if sample.mask is None else image_file(sample.mask).names(),
        "odd": true_texts(of_marked) if marked.any() else [EMPTY],
        "shapes": shapes_of(seen),
        "features": [(features, number) for number, features in regions_of(seen).items()],
        # The mask is described within the box without padding; there is no box if no pixel counts.
        "drawn": [
            describe_mask(shorten(sample.image), image.mean(0)[box], codes[box])
            for box in find_objects((target >= 0).any(axis=0).view(np.int8))
        ],
    }


def _flat_pair(image: npt.NDArray[Any], target: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Cut image and mask to one plane: of a volume, the slice with most voxels of the mask; else they stay as they are.

    Args:
        image: image (channels, height, width), or volume (channels, x, y, z), whose third spatial axis is indexed.
        target: its mask in the same layout, or a class, which is returned unchanged: the image then decides the slice.
    """
    inside = target if target.ndim > 1 else image
    if inside.ndim < 4:
        return image, target
    place = (..., int((inside > 0).any(0).sum((0, 1)).argmax()))
    return image[place], target[place] if target.ndim > 1 else target


def _groups(listed: Datalist) -> dict[str, dict[str, dict[str, int]]]:
    """Return the number of listed images of each declared group, ``unknown`` included, by attribute and split."""
    return {
        name: {
            split: {**dict.fromkeys(one.groups, 0), **Counter(one.groups[sample.groups[name]] for sample in samples)}
            for split, samples in listed.splits.items()
        }
        for name, one in listed.attributes.items()
    }


def _hash(*arrays: npt.NDArray[Any]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def _names(opened: Iterable[tuple[SiteSettings, Datalist]], findings: bool) -> Iterator[Problem]:
    """Yield a problem if the sites' datalists differ in names or groups of classes, or in attributes of people.

    Findings are read by their names, so a site may list them in another order, or only some of them.
    """
    for what, key, grave in (
        ("names of classes", "class_names", not findings),
        ("groups of classes", "class_groups", True),
        ("groups of people", "attributes", False),
    ):
        by_site = {listed.site: value for _, listed in opened if (value := getattr(listed, key))}
        by_value = {repr(value): [site for site, it in by_site.items() if it == value] for value in by_site.values()}
        if len(by_value) > 1:
            values = "; ".join(f"{value} at {', '.join(sites)}" for value, sites in by_value.items())
            order = " (the same ones in another order)" * (
                key == "class_names" and len({tuple(sorted(value)) for value in by_site.values()}) == 1
            )
            yield Problem("", f"the datalists have different {what}{order} ('{key}'): {values:.600}", grave)


def _codes(reports: Sequence[SiteReport]) -> Iterator[Problem]:
    """Yield a note on each attribute of people that two sites code by numbers of which each has some of its own."""
    for name, pairs in group_by_key(
        (name, (one.site, {group for one in splits.values() for group, n in one.items() if n and group.isdecimal()}))
        for one in reports
        for name, splits in one.groups.items()
    ).items():
        if any(first - second and second - first for (_, first), (_, second) in combinations(pairs, 2)):
            text = "; ".join(f"{', '.join(sorted(codes))} at {site}" for site, codes in pairs)
            yield Problem("", f"attribute '{name}' has other numbers at each site ({text}): write words", grave=False)


def _silent(
    reports: Sequence[SiteReport], classes: bool, numbers: Mapping[str, Sequence[int]], file: str
) -> Iterator[Problem]:
    """Yield a question for each site without a label that others have, unless its file says what is annotated."""
    marked = {
        report.site: [name for name, count in report.labelled.items() if count]
        for report in reports
        if any(numbers.total() for split, numbers in report.counts.items() if split != UNLABELLED)
    }
    for site, lacking in list_unexplained(marked, [one.site for one in reports if one.annotated is not None]).items():
        yield Problem(site, question({site: lacking}, classes, numbers, file))


def _seldom(reports: Sequence[SiteReport]) -> Iterator[Problem]:
    """Yield a note on each structure that a site marks in clearly fewer masks than all other sites do."""
    totals = {
        one.site: sum(counts.total() for split, counts in one.counts.items() if split not in (UNLABELLED, SPLIT_GLOBAL))
        for one in reports
    }
    for site, name, count in (
        (one.site, name, count) for one in reports for name, count in one.labelled.items() if count
    ):
        others = [
            one.labelled[name] >= MOST * totals[one.site] for one in reports if one.site != site and one.labelled[name]
        ]
        if others and all(others) and count <= min(LESS * totals[site], totals[site] - FEWER):
            yield Problem(
                site, f"{count} of {totals[site]} masks mark {name}, and nearly all of the other sites' do: absent in "
                "the others, or not drawn?", grave=False,
            )  # fmt: skip


def _same_images(seen: pd.DataFrame) -> Iterator[Problem]:
    """Yield a problem for each image that occurs twice with equal pixels, in one or several splits or sites.

    Copies with different labels are reported too. A test image at several sites is reported as possibly intended, since
    sites may share a test list. An image in both ``test`` and ``test_<name>`` of one site is no problem.
    """
    shared: Counter[str] = Counter()
    seen = seen.explode("content", ignore_index=True)
    copied = seen[seen["content"].notna() & seen.duplicated("content", keep=False)]
    for _, same in copied.groupby("content", sort=False):
        sites, where = sorted(set(same["site"])), few(same["place"].tolist(), PLACES)
        site = sites[0] if len(sites) == 1 else ""
        if len(same[["site", "split"]].drop_duplicates()) == 1:
            yield Problem(site, f"one image {len(same)} times in one split: {where}", grave=False)
        elif not same["split"].str.startswith("test").all():
            yield Problem(site, f"one image in several splits or at several sites: {where}; keep it in one place")
        elif not site:
            shared[", ".join(sites)] += 1
        if same["target"].nunique() > 1:
            yield Problem(site, f"one image with different labels: {where}; find out which one is right")
    for names, count in shared.items():
        yield Problem("", f"{count} test image(s) are the same at {names}", grave=False)


def _people(seen: pd.DataFrame) -> Iterator[Problem]:
    """Yield a problem for each patient who is at several sites, and for each whom one site spells in two ways.

    This function does not look for a patient in several splits of one site, since loading such a datalist fails.
    """
    known = seen.dropna(subset="patient")
    yield from (
        Problem(site, f"patients {name_first(names)} may be one; write them alike", grave=False)
        for (site, _), names in known.groupby(["site", known["patient"].map(bare)])["patient"].unique().items()
        if len(names) > 1
    )
    yield from (
        Problem(
            "", f"patient '{who}' is at {', '.join(sorted(sites))}: the same person, or the same number?", grave=False
        )
        for who, sites in known[known["split"] != SPLIT_GLOBAL].groupby("patient")["site"].unique().items()
        if len(sites) > 1
    )


def _find_unnamed_people(opened: Iterable[tuple[SiteSettings, Datalist]]) -> Iterator[Problem]:
    """Yield a problem for sites whose datalist names no patient.

    The problem says whether the file names suggest that the same patient is in training and test.
    """
    unknown = []
    for _, listed in opened:
        if listed.synthetic or any(s.patient is not None for samples in listed.splits.values() for s in samples):
            continue
        lists = {k: ["/".join(s.image.parts[-2:]) for s in x] for k, x in listed.splits.items() if k in SPLITS}
        if (split_up := find_shared_groups(lists)) is not None:
            expression, both, number = split_up
            some = ", ".join(both[:PLACES]) + " ..." * (len(both) > PLACES)
            yield Problem(
                listed.site,
                f"no 'patient' is named, and by the names of files images of {len(both)} of {number} groups ({some}) "
                f"are in several of {', '.join(lists)}: if these are patients, the test knows them from training; name "
                f"them ('patient' in the datalist; `fairflare prepare --group '{expression}'`)",
                grave=False,
            )
        else:
            unknown.append(listed.site)
    if unknown:
        yield Problem(
            "", f"no 'patient' is named at {', '.join(unknown)}: that nobody is in training and in test is not known, "
            "and intervals count each volume, or picture, as a patient", grave=False,
        )  # fmt: skip
