"""Write the page's summary from ``templates/words.txt``, in sentences that claim no more than the intervals show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from fairflare.reporting.findings import NEXT, Finding, run_findings
from fairflare.reporting.layout import counted, number, printable
from fairflare.reporting.values import guess_of, sentence, site_columns
from fairflare_lab.compare.differences import MEASURES
from fairflare_lab.page.material import Material, spelt
from fairflare_lab.page.outcome import intervals, test_images

if TYPE_CHECKING:
    import jinja2

Summary: TypeAlias = tuple[list[str], list[str]]  # what is said first; then figures, and what to do next


def templates(**more: Any) -> jinja2.Environment:
    """Return the environment of the page's templates; an undefined name in a template is an error."""
    import jinja2

    loader = jinja2.PackageLoader("fairflare_lab.page", "templates")
    return jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, **more
    )


@cache
def _macros() -> object:
    environment = templates(finalize=partial(printable, most=None))
    environment.globals.update(number=number, counted=counted, sentence=sentence, nan=math.nan)
    environment.tests["nan"] = math.isnan
    return environment.get_template("words.txt").module


def say(macro: str, *given: Any) -> list[str]:
    """Return the texts that a macro of ``words.txt`` renders, one for each paragraph that is not empty."""
    text = str(getattr(_macros(), macro)(*given))
    return [part for part in (re.sub(r" *\n *", " ", part.strip()) for part in text.split("\n\n")) if part]


def synthetic(material: Material) -> str:
    """Return a sentence on which data are synthetic; empty if none is known to be."""
    runs = material.runs + material.others
    return "".join(say("synthetic", sum(run.info["synthetic"] for run in runs), len(runs)))


def of_run(material: Material) -> Summary:
    """Return the summary of a page about one run."""
    (row,), (run,) = material.rows, material.runs
    measured = "".join(_measured_on(material)) if material.metric == run.info.primary_metric else ""
    figures = say(
        "of_run", run, counted(len(run.rounds), "round"), spelt(material),
        row.summaries[0] if material.tested else None, measured, guess_of(run, material.metric),
    )  # fmt: skip
    return _around(run_findings(run, material.metric if site_columns(run) else None), figures)


def _around(found: Sequence[Finding], figures: Sequence[str]) -> Summary:
    """Return the findings' sentences, and ``figures`` with what to do next after them."""
    first, last = ([one.text for one in found if (one.kind == NEXT) == to_do] for to_do in (False, True))
    return first, [*figures, *last]


def _measured_on(material: Material) -> list[str]:
    """Return a sentence on the number of test cases and images that the figures rest on; may be empty."""
    cases = [of["test_cases"] for of in intervals(material).values()]
    counts = {
        "cases": [int(count) for count in cases if count is not None],
        "images": [*test_images(material).values()],
    }
    if counts["cases"] == counts["images"]:
        del counts["images"]
    return say("measured", {what: of for what, of in counts.items() if of})


def of_comparison(material: Material) -> Summary:
    """Return the summary of a comparison's page."""
    row = next(row for row in material.rows if row.label == material.reference)
    seeds = sorted({run.info.seed for run in material.runs if run.info.seed is not None})
    figures = say(
        "of_comparison", material, spelt(material), row, seeds, "".join(_measured_on(material)),
        sum(math.isfinite(d.p + d.images_sd) and not d.lacking for d in material.differences if d.measure in MEASURES),
        guess_of(row.runs[0], material.metric),
    )  # fmt: skip
    return _around(material.findings, figures)
