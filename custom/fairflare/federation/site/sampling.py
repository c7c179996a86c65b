"""Declare and read the fields in which a site reports how far chance moves its figures in the final test.

The site computes the values with :meth:`fairflare.base.task.Task.sampling`; none of them is about a single case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairflare.base.cases.sampling import BINS
from fairflare.base.checks import refuse_if
from fairflare.methods.base.reports import Field

MOST = 10**6  # a site that claims more test cases is refused
MOST_CLASSES = 10_000
CASES, ERROR, SCORES, CLASSES, SUPPORT = "test_cases", "standard_error", "case_scores", "classes", "class_support"
STRUCTURES, STRUCTURE_SUPPORT = "structures", "structure_support"
BY_CLASS = "`metrics_by_class`"
SAMPLING = (
    Field(
        CASES, "whole", low=1, high=MOST, required=False,
        doc="number of independent cases behind the final model's primary metric: patients where the datalist names "
        "them, else volumes or images",
        of=("test",),
    ),
    Field(
        ERROR, low=0, required=False,
        doc="standard error of that metric over these cases",
        reveals="with two cases, how each of them scored",
        keep=f"of a metric over classes: {BY_CLASS}",
        of=("test",),
    ),
    Field(
        SCORES, "vector", low=0, high=MOST, required=False,
        doc=f"of a metric that is a mean over images: number of these cases in each of {BINS} equal bins of its range, "
        "by their mean score",
        reveals="how single cases scored, to a twentieth of the range, not which; of a model that finds nothing, how "
        "many cases have nothing to find",
        of=("test",),
    ),
    Field(
        CLASSES, "names", required=False, doc="names of the classes, also of those that the site has no image of",
        keep=BY_CLASS,
        of=("test",),
    ),
    Field(
        SUPPORT, "vector", low=0, high=MOST, same_length_as=CLASSES, required=False,
        doc="number of test images of each of these classes", reveals="how often each class occurs at the site",
        keep=BY_CLASS,
        of=("test",),
    ),
    Field(
        STRUCTURES, "names", required=False, doc="names of the annotated structures, without those that `min_cases` "
        "withholds", keep=f"{BY_CLASS}; of one that fewer test cases have, or lack, `min_cases`", of=("test",),
    ),
    Field(
        STRUCTURE_SUPPORT, "vector", low=0, high=MOST, same_length_as=STRUCTURES, required=False,
        doc="number of test images that mark each of these structures", reveals="how often each occurs at the site",
        keep="as `structures`", of=("test",),
    ),
)  # fmt: skip


def read_sampling(site: str, stats: Mapping[str, Any], images: float | None) -> dict[str, Any] | None:
    """Return the fields of :data:`SAMPLING` in a reply, in the form of the results, or ``None`` if the reply has none.

    Args:
        site: name of the site that sent the reply.
        stats: the reply's ``stats``, checked field by field.
        images: number of images in the site's test split; ``None`` if the site did not report it.

    Raises:
        ReportError: the numbers contradict each other (names site and field).
    """
    cases, scores, support, names = stats[CASES], stats[SCORES], stats[SUPPORT], stats[CLASSES] or ()
    for name, counts, total in ((SCORES, scores, cases), (SUPPORT, support, images)):
        counted = sum(counts or ())
        refuse_if(site, {
            f"field {name!r} must hold whole numbers": any(value != int(value) for value in counts or ()),
            f"field {name!r} counts {counted:.0f}, the site has {total or 0:.0f}":
                None not in (counts, total) and counted != total,
        })  # fmt: skip
    refuse_if(site, {
        f"field {SCORES!r} has {len(scores or ())} entries, not {BINS}": scores is not None and len(scores) != BINS,
        f"field {CASES!r} is {cases or 0:.0f}, of {images or 0:.0f} test images":
            None not in (cases, images) and (cases or 0) > (images or 0),
        f"field {CLASSES!r} must hold at most {MOST_CLASSES} different printable names":
            len(set(names)) != len(names) or len(names) > MOST_CLASSES or not all(map(str.isprintable, names)),
    })  # fmt: skip
    if all(stats[field.name] is None for field in SAMPLING):
        return None
    marked = (
        {} if not stats[STRUCTURES] else dict(zip(stats[STRUCTURES], map(int, stats[STRUCTURE_SUPPORT]), strict=True))
    )
    refuse_if(site, {f"field {STRUCTURE_SUPPORT!r} counts more than its {images} test images":
                     images is not None and max(marked.values(), default=0) > images})  # fmt: skip
    return {
        **({STRUCTURE_SUPPORT: marked} if marked else {}),
        "images": None if images is None else int(images),
        CASES: None if cases is None else int(cases),
        ERROR: stats[ERROR],
        SCORES: None if scores is None else [int(value) for value in scores],
        SUPPORT: None if support is None else dict(zip(stats[CLASSES], map(int, support), strict=True)),
    }
