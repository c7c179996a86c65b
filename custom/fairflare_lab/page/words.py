"""Write the page's summary from ``templates/words.txt``, in sentences that claim no more than the intervals show."""

from __future__ import annotations

import math
import re
import statistics
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fairflare.reporting.groups import captions
from fairflare.reporting.layout import counted, interval, number, p_value, printable
from fairflare.reporting.no_effect import nothing_learnt
from fairflare.reporting.standing import more_unequal, tested, who_is_behind
from fairflare.reporting.values import title_of
from fairflare_lab.compare.differences import (
    BETTER,
    MEASURES,
    ONE_SEED,
    WORSE,
)
from fairflare_lab.compare.group_gaps import named
from fairflare_lab.page.material import Material, PageRow, spelt
from fairflare_lab.page.outcome import intervals, test_images

if TYPE_CHECKING:
    import jinja2

VISIBLE = 0.005  # least gap that is reported; a smaller gap would be shown as 0.00


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
    environment.globals.update(
        number=number, interval=interval, counted=counted, named=named, p_value=p_value, visible=VISIBLE, nan=math.nan
    )
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


def answer(material: Material) -> str:
    """Return the main finding in words: which methods are fairer than the reference, and which site is behind."""
    if not material.tested:
        return "There are no test results, so nothing is said of fairness."
    label = material.reference or material.rows[0].label
    row = next(row for row in material.rows if row.label == label)
    whose = f"With {label}, " if material.reference else f"{title_of(row.runs[0])}: "
    return " ".join([*_fairer(material, label), whose + _behind(row, material)])


def _fairer(material: Material, reference: str) -> list[str]:
    if len(material.rows) == 1:
        return []
    spreads = [d for d in material.differences if d.measure == "std"]
    lost = {d.label for d in material.differences if d.measure != "std" and d.verdict == WORSE}
    better = [{**vars(d), "lost": d.label in lost} for d in spreads if d.verdict == BETTER]
    known = any(math.isfinite(d.low) for d in spreads)
    return say("fairer", reference, known, not all(one["lost"] for one in better), better)


def _behind(row: PageRow, material: Material) -> str:
    """Return words on the last site, its gap and whether chance explains it; or that nothing was learnt."""
    metric = spelt(material)
    nothing = [text for run in row.runs for text in nothing_learnt(run, material.metric)]
    if len(nothing) == len(row.runs):
        return f"{nothing[0][0].lower()}{nothing[0][1:]}"
    known = [one for run in row.runs if (one := tested(run, material.metric))]
    sign = 1 if material.higher else -1
    of_sites: dict[str, list[tuple[float, float]]] = {}
    for one in known:
        for site, of in one["sites"].items():
            if of["expected"] is not None:
                of_sites.setdefault(site, []).append((sign * (of["expected"] - of["value"]), of["expected"]))
    if not of_sites:
        found = [summary for summary in row.summaries if math.isfinite(summary.worst)]
        last = statistics.mode(summary.worst_site for summary in found) if found else ""
        return "".join(say("untested", metric, found, last, max(summary.num_sites for summary in row.summaries)))
    gaps = {site: statistics.fmean(gap for gap, _ in of) for site, of in of_sites.items()}
    last = max(gaps, key=gaps.__getitem__)
    value, worst = row.at(last).mean, (min if material.higher else max)(row.at(site).mean for site in gaps)
    at = {
        "last": last, "gap": gaps[last], "value": value, "is_worst": value == worst, "known": len(known),
        "expected": statistics.fmean(expected for _, expected in of_sites[last]),
        "shown": sum(last in one["behind"] for one in known), "together": sum(map(more_unequal, known)),
        "equal": statistics.fmean(one["chance_gap"] for one in known), "p_value": known[0]["p_value"],
    }  # fmt: skip
    return "".join(say("behind", metric, material.higher, at))


def of_run(material: Material) -> list[str]:
    """Return the summary of a page about one run, as sentences."""
    (row,), (run,) = material.rows, material.runs
    more = _measured_on(material) + who_is_behind(run)[:1] if material.metric == run.info.primary_metric else []
    return say(
        "of_run", run, counted(len(run.rounds), "round"), spelt(material),
        row.summaries[0] if material.tested else None, more + captions(run),
    )  # fmt: skip


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


def of_comparison(material: Material) -> list[str]:
    """Return the summary of a comparison's page: what is compared, the reference's figures, and the number of tests."""
    found, metric = material.differences, spelt(material)
    row = next(row for row in material.rows if row.label == material.reference)
    seeds = sorted({run.info.seed for run in material.runs if run.info.seed is not None})
    compared = {row.label, *(d.label for d in found)}
    return say(
        "of_comparison", material, metric, row, seeds, "".join(_measured_on(material)),
        bool(found) and all(d.verdict == ONE_SEED for d in found),
        sum(math.isfinite(d.p_holm) for d in found if d.measure in MEASURES),
        [other.label for other in material.rows if other.label not in compared],
    )  # fmt: skip
