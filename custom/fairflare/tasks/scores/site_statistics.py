"""Count a site's images, cases and intensities for ``fairflare stats``; only sums leave the site."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.base.cases.census import KEYS
from fairflare.base.machine.memory import print_progress as progress
from fairflare.base.machine.memory import workers
from fairflare.base.stopping import check_stop
from fairflare.core.statistics.site_figures import AXES, CLASS, INTENSITY, PARTLY, SPLITS, drop_few
from fairflare.data.datalist import DataError, Sample, load_datalist
from fairflare.data.image_file import image_file
from fairflare.data.intensity import counts_of
from fairflare.data.reading import Reading, ValueNotes, reading_takes
from fairflare.data.whole_volumes import read_planes
from fairflare.tasks.classification import ClassificationSite
from fairflare.tasks.shared.site_settings import SiteSettings, read_settings
from fairflare.tasks.shared.structures import SegmentationSite

Kind: TypeAlias = Literal["segmentation", "classification"]
Case: TypeAlias = tuple[str, str]
Intensities: TypeAlias = npt.NDArray[np.int64]
Counted: TypeAlias = tuple[Intensities, Counter[int], dict[str, float]]
log = logging.getLogger(__name__)
NO_LABEL = re.compile(r"'label' of .* does not exist|no key 'label'")
SCALED = 5  # bytes a voxel that scaling an image takes beside what its file holds
SAID = 5  # largest number of unusable files that the site's own log names


@dataclass
class SiteSums:
    """Store the counts of one site's images.

    Case keys never leave the site; the results of :meth:`counts` and :meth:`bins` may leave.

    Attributes:
        least: smallest number of cases behind a figure that may leave the site.
        synthetic: whether the images are synthetic.
        annotated: 1: the site's file says that all structures or classes are annotated, 2: some; 0: not known.
        findings: whether the labels are findings, of which an image may have several.
        channels: number of the channels that the site's datalist names; 0: it names none.
        images, cases: number of images and set of case keys, by split.
        unusable, missing_labels: number of the datalist's entries that cannot be read, and that have no label.
        empty: case keys of the images whose mask marks nothing, one entry for each image.
        intensity: number of pixels in each bin of the intensity.
        records: number of records by axis, bin and case.
    """

    least: int
    synthetic: bool = False
    annotated: int = 0
    findings: bool = False
    channels: int = 0
    images: Counter[str] = field(default_factory=Counter)
    cases: dict[str, set[Case]] = field(default_factory=lambda: defaultdict(set))
    unusable: int = 0
    missing_labels: int = 0
    empty: list[Case] = field(default_factory=list)
    intensity: Intensities = field(default_factory=lambda: np.zeros(AXES[INTENSITY].bins, np.int64))
    records: dict[str, dict[int, Counter[Case]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )

    def counts(self) -> dict[str, int]:
        """Return the counts that may leave the site, by the names of ``COUNTS``.

        With fewer than ``least`` cases these are only ``min_cases``, ``synthetic``, ``annotated``, ``findings`` and
        ``channels``.
        """
        counts = {"min_cases": self.least, "synthetic": int(self.synthetic)}
        counts |= {name: int(value) for name in ("annotated", "findings", "channels") if (value := getattr(self, name))}
        everyone = set[Case]().union(*self.cases.values())
        if len(everyone) < self.least:
            return counts
        few = {
            "unusable": (self.unusable, self.unusable),
            "missing_labels": (self.missing_labels, self.missing_labels),
            "empty_masks": (len(self.empty), len(set(self.empty))),
        }
        counts |= {
            "cases": len(everyone), "images": self.images.total(),
            **{name: count for name, (count, cases) in few.items() if not 0 < cases < self.least},
        }  # fmt: skip
        numbers = {k: len(self.cases[split]) for k, split in enumerate(SPLITS) if self.cases[split]}
        for number, cases in drop_few(numbers, numbers, self.least).items():
            split = SPLITS[number]
            counts |= {f"cases_{split}": cases, f"images_{split}": self.images[split]}
        return counts

    def bins(self) -> dict[str, tuple[int, dict[int, int]]]:
        """Return for each axis its number of records, and the records by bin that may leave the site.

        With fewer than ``least`` cases the result is empty.
        """
        if "cases" not in self.counts():
            return {}
        by_axis = {INTENSITY: (int(self.intensity.sum()), {k: int(n) for k, n in enumerate(self.intensity) if n})}
        for axis, bins in self.records.items():
            if len(set[Case]().union(*bins.values())) >= self.least:
                counts = {number: counter.total() for number, counter in bins.items()}
                shown = drop_few(counts, {number: len(counter) for number, counter in bins.items()}, self.least)
                by_axis[axis] = (sum(counts.values()), shown)
        return by_axis

    def add_image(self, split: str, case: Case, intensity: Intensities, lengths: Mapping[str, float]) -> None:
        """Add an image of a case (patient): its pixels by intensity, and its lengths by axis."""
        self.images[split] += 1
        self.cases[split].add(case)
        self.intensity += intensity
        for axis, length in lengths.items():
            self.records[axis][AXES[axis].bin_of(length)][case] += 1


def measure(site: str, settings: Mapping[str, Any], kind: Kind, how: Reading, least: int) -> SiteSums:
    """Read every training, validation and test image of a site once, and count them.

    Args:
        site: name of the site, for messages.
        settings: content of the site's private file.
        kind: whether labels are masks or classes.
        how: settings for reading files, as those of a task.
        least: smallest number of cases behind a figure, see :class:`SiteSums`.

    Raises:
        DataError: the site has no data folder, no datalist, or one that cannot be read.
    """
    in_file = read_settings(SegmentationSite if kind == "segmentation" else ClassificationSite, site, settings)
    if in_file.data_root is None:
        raise DataError(
            f"site '{site}': no 'data_root': statistics are of a site's own images; set it in fairflare.json"
        )
    problems: list[DataError] = []
    listed = load_datalist(
        in_file.data_root, in_file.datalist or "datalist.json", site=site, class_labels=kind == "classification",
        linked_roots=in_file.linked_roots, problems=problems,
    )  # fmt: skip
    width = len(listed.channels or "1")
    how = replace(how, drawn_on=getattr(in_file, "mask_drawn_on", None), channels=tuple(range(width)), width=width)
    annotated = getattr(in_file, KEYS[kind == "classification"])
    every = [(split, sample) for split in SPLITS for sample in listed.splits.get(split, ())]
    sums, values = (
        SiteSums(
            least, listed.synthetic, PARTLY if isinstance(annotated, list) else int(annotated == "all"),
            findings=any(isinstance(sample.label, tuple) for _, sample in every), channels=len(listed.channels or ()),
        ),
        ValueNotes(),
    )  # fmt: skip
    for problem in problems:
        _unusable(sums, problem)
    few = _few({(_class_of(sample, in_file), sample.case) for _, sample in every}, least)
    labels_by_sample: list[tuple[Sample, Counter[int]]] = []
    wanted = [
        (split, sample)
        for split, sample in every
        if not isinstance(sample.label, int) or _class_of(sample, in_file) not in few
    ]  # of too few cases: nothing

    def count_entry(entry: tuple[str, Sample]) -> Counted | DataError:
        try:
            return _counts(site, *entry, in_file, how)
        except DataError as error:
            return error

    with ThreadPool(workers(reading_takes((sample for _, sample in wanted), SCALED))) as threads:
        looks = progress(threads.imap(count_entry, wanted), len(wanted), "images counted")
        for (split, sample), counted in zip(wanted, looks, strict=True):
            check_stop()
            if isinstance(counted, DataError):
                _unusable(sums, counted)
            else:
                intensity, labels, lengths = counted
                sums.add_image(split, sample.case, intensity, lengths)
                labels_by_sample.append((sample, labels))
                values.add(sample)
    frequent = _find_frequent([sample for sample, _ in labels_by_sample], least)
    for sample, labels in labels_by_sample:
        if isinstance(sample.label, tuple):
            labels.update(k for k in frequent if sample.label[k] == 1)
    _add_labels(sums, [(sample.case, labels) for sample, labels in labels_by_sample], kind)
    for line in [*listed.doubts, *values.lines()]:
        log.warning("note: %s", line)  # written to the site's own log only
    return sums


def _unusable(sums: SiteSums, problem: DataError) -> None:
    lacks_label = NO_LABEL.search(problem.public) is not None
    sums.missing_labels += lacks_label
    sums.unusable += not lacks_label
    if sums.unusable + sums.missing_labels <= SAID:
        log.warning("not in the statistics: %s", problem)  # written to the site's own log only


def _counts(site: str, split: str, sample: Sample, site_settings: SiteSettings, how: Reading) -> Counted:
    """Read one entry of a datalist, each file once; return its pixels by intensity and by label, and its lengths."""
    intensity, labels = np.zeros(AXES[INTENSITY].bins, np.int64), Counter[int]()
    depth, shape = 0, (0, 0)
    for image, mask in read_planes(sample, site=site, split=split, max_bytes=site_settings.max_image_bytes, how=how):
        intensity += np.histogram(image, AXES[INTENSITY].bins, (0, 1))[0]
        depth, shape = depth + 1, image.shape[:2]
        if mask is not None:
            labels.update(counts_of(mask))
    if isinstance(sample.label, int):
        labels[_class_of(sample, site_settings)] += 1
    else:
        labels = _code_counts(labels, getattr(site_settings, "mask_values", None))
    whole = sample.slice is None and image_file(sample.image).facts().slices is not None
    sides = {"height": float(shape[0]), "width": float(shape[1]), **({"slices": float(depth)} if whole else {})}
    return intensity, labels, sides | _spacings(sample)


def _add_labels(sums: SiteSums, labels_by_case: Sequence[tuple[Case, Counter[int]]], kind: Kind) -> None:
    """Count the labels of all images; those that the masks of too few cases have are counted as background."""
    few = _few({(number, case) for case, labels in labels_by_case for number in +labels}, sums.least)
    for case, labels in labels_by_case:
        for number, count in labels.items():
            sums.records[CLASS][AXES[CLASS].bin_of(0 if number in few else max(number, 0))][case] += count
        if kind == "segmentation" and not {*+labels} - {0, *few}:
            sums.empty.append(case)


def _few(pairs: Iterable[tuple[Any, Case]], least: int) -> set[Any]:
    """Return the labels that occur with fewer than ``least`` different cases in pairs of label and case."""
    return {label for label, cases in Counter(label for label, _ in pairs).items() if cases < least}


def _find_frequent(samples: Sequence[Sample], least: int) -> set[int]:
    """Return the numbers of the findings that at least ``least`` cases have, and at least as many lack."""
    triples = {(k, value, sample.case) for sample in samples if isinstance(sample.label, tuple)
            for k, value in enumerate(sample.label) if value >= 0}  # fmt: skip
    cases = Counter((k, value) for k, value, _ in triples)
    return {k for k, _ in cases if min(cases[k, 0], cases[k, 1]) >= least}


def _class_of(sample: Sample, site_settings: SiteSettings) -> Any:
    """Return the task's number of a sample's class, or the label itself if it is no class of the task."""
    return (getattr(site_settings, "class_numbers", None) or {}).get(sample.label, sample.label)


def _code_counts(labels: Counter[int], coding: Mapping[int, int] | None) -> Counter[int]:
    """Return pixel counts by the task's labels: apply the site's coding; 255 becomes 1 in masks of 0 and 255."""
    if coding is None:
        coding = {255: 1} if labels.keys() <= {0, 255} else {}
    coded = Counter[int]()
    for number, count in labels.items():
        coded[coding.get(number, number)] += count
    return coded


def _spacings(sample: Sample) -> dict[str, float]:
    """Return the distances of rows and of slices in mm, from the datalist or else from the file's header."""
    spacing, facts = sample.spacing, image_file(sample.image).facts()
    if spacing is None and facts.grid.statements:
        lengths = np.linalg.norm(facts.grid.statements[0][1][:3, :3], axis=0)
        spacing = tuple(lengths[: 3 if facts.slices else 2].tolist())
    return dict(zip(("spacing", "slice_spacing"), (spacing[0], *spacing[2:]), strict=False)) if spacing else {}
