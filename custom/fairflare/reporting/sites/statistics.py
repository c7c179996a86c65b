"""Build the document of ``fairflare stats``: figures by site and pooled, distances between sites, and sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field

from fairflare.base.cases.census import list_unexplained, question
from fairflare.base.checks import group_by_key, refuse, true_texts
from fairflare.base.disk.files import write_whole
from fairflare.base.plugins import tell_listeners
from fairflare.core.statistics.site_figures import (
    ALIKE,
    AXES,
    CLASS,
    COUNTS,
    INTENSITY,
    PARTLY,
    PERCENTS,
    SPLITS,
    jensen_shannon,
    quantile,
    wasserstein,
)
from fairflare.reporting.layout import join_parts, number, sort_sites

DOCUMENT, PAGE = "stats.json", "stats.html"
APART = 0.1  # a sentence reports class mixes as different from this Jensen-Shannon distance on


class _Part(BaseModel, extra="forbid", ser_json_inf_nan="null"):
    """Define the common base class of the document's parts."""


class Bin(_Part):
    """Describe a histogram's bin of records with a value in [low, high); an axis's last bin also counts all above."""

    low: float
    high: float
    count: int = Field(ge=0)


class Histogram(_Part):
    """Store the histogram of one quantity of :data:`AXES`, such as the intensity or the spacing.

    Attributes:
        records: number of all records, also those of bins that are withheld.
        bins: the bins whose records may be reported, in order.
    """

    records: int = Field(ge=0)
    bins: list[Bin]

    def count_bins(self, axis: str) -> dict[int, int]:
        """Return the histogram's counts by the number of the bin."""
        return {AXES[axis].number(of.low): of.count for of in self.bins}

    @property
    def suppressed(self) -> int:
        """Return the number of the histogram's records in bins that are withheld."""
        return self.records - sum(of.count for of in self.bins)


class Figures(_Part):
    """Store the figures of one site, or of all sites together.

    Attributes:
        counts: counts by the names of :data:`fairflare.core.statistics.site_figures.COUNTS`.
        histograms: histograms by axis.
        quantiles: quantiles of the intensities, by percent; each is less than a bin's width (1/64) off.
        suppressed: names of figures that are withheld, as fewer than ``min_cases`` cases have them.
    """

    counts: dict[str, int]
    histograms: dict[str, Histogram]
    quantiles: dict[str, float] = Field(default_factory=dict)
    suppressed: list[str] = Field(default_factory=list)

    @classmethod
    def compute(cls, counts: dict[str, int], histograms: dict[str, Histogram], suppressed: list[str]) -> Figures:
        """Return figures with quantiles that are computed from their histogram of intensities."""
        made = cls(counts=counts, histograms=histograms, suppressed=suppressed)
        dense, width = made.dense(), AXES[INTENSITY].width
        made.quantiles = {str(percent): quantile(dense, percent) * width for percent in PERCENTS} if any(dense) else {}
        return made

    def dense(self, axis: str = INTENSITY) -> list[int]:
        """Return the counts of all bins of a histogram's axis, 0 for a bin without records."""
        found = self.histograms[axis].count_bins(axis) if axis in self.histograms else {}
        return [found.get(k, 0) for k in range(AXES[axis].bins)]

    def mix(self) -> dict[int, int]:
        """Return the number of records (images or pixels) of each class."""
        return self.histograms[CLASS].count_bins(CLASS) if CLASS in self.histograms else {}


Measured: TypeAlias = tuple[dict[str, int], dict[str, Histogram]]  # counts, and histograms by axis, of a site


class Distances(_Part):
    """Store the distances of a site from all other sites together; null if one of the two has no such figures.

    Attributes:
        intensity_wasserstein: Wasserstein distance of the intensities, in shares of the intensity range, [0, 1].
        classes_jensen_shannon: Jensen-Shannon distance of the class mixes, base 2, [0, 1].
    """

    intensity_wasserstein: float | None
    classes_jensen_shannon: float | None


class StatsDocument(_Part):
    """Represent ``stats.json``, which ``fairflare stats --json`` prints too."""

    version: Literal[1] = 1
    intensities: str
    class_names: list[str]
    sites: dict[str, Figures]
    pooled: Figures
    distances: dict[str, Distances]
    sentences: list[str]
    left_out: dict[str, str] = Field(default_factory=dict)

    @property
    def synthetic(self) -> list[str]:
        """Return the sites whose images are synthetic."""
        return [site for site, of in self.sites.items() if of.counts.get("synthetic")]

    def class_name(self, label: int) -> str:
        """Return the name of a class, else its number."""
        return self.class_names[label] if label < len(self.class_names) else f"class {label}"


def document_of(
    measured: Mapping[str, Measured],
    intensities: str = "",
    class_names: Sequence[str] = (),
    left_out: Mapping[str, str] | None = None,
) -> StatsDocument:
    """Return the document of the figures that sites report about their images.

    Args:
        measured: counts and histograms of each site, by site.
        intensities: meaning of the intensities 0 and 1, in words.
        class_names: names of the classes, in the order of the classes.
        left_out: reason for each site that is not in the document, by site.

    Raises:
        ValueError: a figure is not declared or is out of range; the message names the site.
    """
    sites = {}
    for site in sort_sites(measured):
        counts, histograms = measured[site]
        check(site, counts, histograms)
        sites[site] = Figures.compute(counts, histograms, _list_suppressed(counts, histograms))
    made = StatsDocument(
        intensities=intensities, class_names=list(class_names), sites=sites, pooled=others_of(sites),
        distances={site: _distances(sites, site) for site in sites}, sentences=[], left_out=dict(left_out or {}),
    )  # fmt: skip
    made.sentences = _sentences(made)
    return made


def check(site: str, counts: Mapping[str, int], histograms: Mapping[str, Histogram]) -> None:
    """Check the figures that one site reports.

    Raises:
        ValueError: a figure is not declared or is out of range; the message names the site.
    """
    unknown = sorted({*counts} - {*COUNTS} | {*histograms} - {*AXES})
    if unknown or any(count < 0 for count in counts.values()):
        raise ValueError(f"site {site!r} sent figures that are negative, or not declared: {unknown or dict(counts)}")
    for axis, histogram in histograms.items():
        try:
            numbers = [AXES[axis].number(of.low) for of in histogram.bins]
            ends = [AXES[axis].number(of.high - AXES[axis].width) for of in histogram.bins]
        except (ValueError, OverflowError) as error:
            raise ValueError(f"site {site!r}: {axis}: {error}") from error
        refuse({
            f"site {site!r}: {axis}: its bins must be {AXES[axis].width:g} wide, each once": (
                len(set(numbers)) != len(numbers) or ends != numbers
            ),
            f"site {site!r}: {axis}: the bins hold more than its {histogram.records} records": (
                histogram.suppressed < 0
            ),
        })  # fmt: skip


def _list_suppressed(counts: Mapping[str, int], histograms: Mapping[str, Histogram]) -> list[str]:
    """Return the names of the figures that a site withholds."""
    if "cases" not in counts:
        return ["everything"]
    return [
        *(name for name in ("unusable", "missing_labels", "empty_masks") if name not in counts),
        *(f"{axis}: {of.suppressed} of {of.records} records" for axis, of in histograms.items() if of.suppressed),
        *(["counts of a split"] if sum(counts.get(f"cases_{s}", 0) for s in SPLITS) < counts["cases"] else []),
    ]


def _pool(sites: Sequence[Figures]) -> Figures:
    """Return the figures of several sites together, as sums of their counts and histograms."""
    counts = {
        name: sum(site.counts.get(name, 0) for site in sites)
        for name in COUNTS
        if name not in ("min_cases", "synthetic", "annotated", "findings", "channels")
    }
    histograms = {}
    for axis, of in AXES.items():
        having = [site.histograms[axis] for site in sites if axis in site.histograms]
        by_bin = group_by_key(item for histogram in having for item in histogram.count_bins(axis).items())
        if having:
            histograms[axis] = Histogram(
                records=sum(histogram.records for histogram in having),
                bins=[
                    Bin(low=round(k * of.width, 6), high=round((k + 1) * of.width, 6), count=sum(by_bin[k]))
                    for k in sorted(by_bin)
                ],
            )
    return Figures.compute(
        counts, histograms, sorted({text.partition(":")[0] for site in sites for text in site.suppressed})
    )


def others_of(sites: Mapping[str, Figures], site: str = "") -> Figures:
    """Return the statistics of the images of all sites together, or of all sites but one."""
    return _pool([of for name, of in sites.items() if name != site and "cases" in of.counts])


def _findings_of_all(sites: Mapping[str, Figures]) -> set[int] | None:
    """Return the findings that every site reports, none if some sites have classes; ``None`` without any findings."""
    having = [{*mix} if of.counts.get("findings") else set() for of in sites.values() if (mix := of.mix())]
    return set.intersection(*having) if any(having) else None


def _mixes(sites: Mapping[str, Figures], site: str) -> tuple[dict[int, int], dict[int, int]]:
    """Return the records by class of a site and of all others; a finding counts only if every site reports it.

    A site does not report a finding that is not known there, which is not the same as none.
    """
    own, others, shared = sites[site].mix(), others_of(sites, site).mix(), _findings_of_all(sites)
    if shared is None:
        return own, others
    return {k: own[k] for k in shared & own.keys()}, {k: others[k] for k in shared & others.keys()}


def _distances(sites: Mapping[str, Figures], site: str) -> Distances:
    distances = {
        "intensity_wasserstein": wasserstein(
            sites[site].dense(), others_of(sites, site).dense(), AXES[INTENSITY].width
        ),
        "classes_jensen_shannon": jensen_shannon(*_mixes(sites, site)),
    }
    return Distances(**{name: None if math.isnan(value) else value for name, value in distances.items()})


# ------------------------------------------------------------------------------------------------ in words


def _sentences(document: StatsDocument) -> list[str]:
    """Return sentences on sites left out, on how different the sites are, and on missing figures, in this order."""
    apart, mixed = (
        {site: d for site, of in document.distances.items() if (d := getattr(of, name)) is not None}
        for name in ("intensity_wasserstein", "classes_jensen_shannon")
    )
    answers = [f"LEFT OUT, in no figure: {'; '.join(document.left_out.values())}."] if document.left_out else []
    if apart:
        answers.append(_note_intensity(document, *max(apart.items(), key=lambda one: one[1])))
    elif len(document.sites) > 1:
        answers.append("The sites cannot be compared: fewer than two of them have enough cases.")
    labelled = [site for site, of in document.sites.items() if of.mix()]
    several = [site for site in labelled if document.sites[site].counts.get("findings")]
    # With classes every image is one record, with masks every pixel.
    classes = all(
        document.sites[site].histograms[CLASS].records == document.sites[site].counts.get("images") for site in mixed
    )
    told = {site: [document.class_name(k) for k in document.sites[site].mix() if k or classes] for site in mixed}
    # Labels of findings say what is not known.
    if not several and (
        lacking := list_unexplained(told, [site for site in told if document.sites[site].counts.get("annotated")])
    ):
        numbers = {document.class_name(k): [k] for k in document.pooled.mix() if k or classes}
        answers.append(f"{question(lacking, classes, numbers)}.")
    partly = [site for site, of in document.sites.items() if of.counts.get("annotated") == PARTLY]
    alike = len(several) in (0, len(labelled))
    unknown = (
        sorted({*document.pooled.mix()} - (_findings_of_all(document.sites) or set())) if several and alike else []
    )
    if mixed and not partly and alike:
        answers.append(_note_classes(document, mixed))
    counts = {site: of.counts for site, of in document.sites.items()}
    part = [
        f"{site}: {', '.join(of.suppressed)}"
        for site, of in document.sites.items()
        if of.suppressed and "cases" in of.counts
    ]
    lists = {
        ("Findings that not all sites report are not compared: ", "."): [document.class_name(k) for k in unknown],
        ("Masks that mark nothing: ", "."): [
            f"{site} {of['empty_masks']}" for site, of in counts.items() if of.get("empty_masks")
        ],
        ("Entries that cannot be used, in no figure: ", "; `fairflare check-data` at the site names them."): [
            f"{site} {count}"
            for site, of in counts.items()
            if (count := of.get("unusable", 0) + of.get("missing_labels", 0))
        ],
        ("SUPPRESSED: ", " has fewer cases than its min_cases, or none; it is in no figure."): [
            site for site, of in counts.items() if "cases" not in of
        ],
    }
    channels = group_by_key((max(1, of.counts.get("channels", 0)), site) for site, of in document.sites.items())
    answers += true_texts({
        "The sites' cases have different numbers of images (channels): "
        f"{'; '.join(f'{count} at {join_parts(sites)}' for count, sites in channels.items())}.": len(channels) > 1,
        f"The mixes of classes are not compared: the file of {join_parts(partly)} says that only some are annotated "
        "there; of the others a share of 0 means not annotated.": partly,
        f"The labels are not compared: those of {join_parts(several)} are findings, the others' are none.": not alike,
        **{f"{before}{join_parts(names)}{after}": names for (before, after), names in lists.items()},
        "SUPPRESSED, as fewer than min_cases cases have it (or would be told by a difference): "
        f"{'; '.join(part)}.": part,
    })  # fmt: skip
    return answers


def _note_intensity(document: StatsDocument, site: str, distance: float) -> str:
    own, theirs = (of.quantiles["50"] for of in (document.sites[site], others_of(document.sites, site)))
    alike = "; the sites are about equally bright" if distance < ALIKE else ""
    return (
        f"Furthest from the others in brightness is {site}: its median intensity is {number(own)}, theirs "
        f"{number(theirs)} (Wasserstein distance {number(distance)} of the intensity range{alike})."
    )


def _note_classes(document: StatsDocument, mixed: Mapping[str, float]) -> str:
    site = max(mixed, key=mixed.__getitem__)
    what = "findings" if document.sites[site].counts.get("findings") else "classes"
    far = f"Jensen-Shannon distance {number(mixed[site])} of at most 1{'; about alike' * (mixed[site] < APART)}"
    return f"Furthest from the others in its mix of {what} is {site} ({far})."


def write_statistics(document: StatsDocument, folder: Path) -> list[str]:
    """Write ``stats.json`` into a folder, and the page if a listener draws one.

    Returns:
        Lines for the log: the document's sentences, and the listeners' lines, such as where the page is.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(
        folder / DOCUMENT,
        partial(Path.write_text, data=document.model_dump_json(indent=2) + "\n", encoding="utf-8"),
        shared=True,
    )
    return [*document.sentences, *tell_listeners(folder / DOCUMENT)]
