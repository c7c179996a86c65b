"""Show differences between a comparison's rows as text, Markdown or CSV, and explain how to read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fairflare.base.cases.resampling import CASES
from fairflare.base.checks import true_texts
from fairflare.core.statistics.intervals import FEW
from fairflare.reporting.layout import MISSING, Plain, Table, interval, listed, number, p_value, printed
from fairflare_lab.compare.differences import BETTER, MEASURES, NOT_KNOWN, ONE_SEED, WORSE, Difference, fell
from fairflare_lab.statistics.seed_intervals import POWER

MARKS = {BETTER: "* ", WORSE: "! "}
CSV = (
    "method", "reference", "measure", "seeds", "sites", "mean", "sd", "low", "high", "p", "p_holm", "smallest",
    "verdict", "images_sd",
)  # fmt: skip


def figures_of(found: Sequence[Difference], columns: Sequence[str], reference: str) -> list[list[Plain]]:
    """Return rows of a table of differences; columns are attributes of :class:`Difference` or names in :data:`CSV`."""
    called: dict[str, Callable[[Difference], Plain]] = {
        "method": lambda d: d.label, "reference": lambda d: reference, "difference": lambda d: d.mean,
        "seeds": lambda d: len(d.values), "sites": lambda d: " ".join(d.sites),
    }  # fmt: skip
    return [[called[name](d) if name in called else getattr(d, name) for name in columns] for d in found]


def difference_table(
    found: Sequence[Difference], reference: str, *, style: str = "text", width: int | None = None
) -> str:
    """Return a table of every row's differences to the reference.

    Differences at single sites are included if the models were given, not trained, and always in CSV.

    Args:
        found: differences from :func:`.differences.differences_of`.
        reference: label of the reference row.
        style: ``text``, ``markdown`` or ``csv``.
        width: largest width of the text.
    """
    if style == "csv":
        return printed([Table("differences", "", CSV, figures_of(found, CSV, reference))], (), style)
    rows = []
    for d in found:
        if d.measure in MEASURES or d.of_given:
            rows.append([
                d.label, d.measure, interval(d.low, d.high, d.mean), MARKS.get(d.verdict, "") + d.verdict,
                _p(d.p), _p(d.p_holm), number(d.smallest),
            ])  # fmt: skip
    head = ["method", "measure", "difference [95 %]", "verdict", "p", "p (Holm)", "visible from"]
    return printed([Table("differences", "", head, rows, lead=2)], notes_of_differences(found, reference), style, width)


def notes_of_differences(found: Sequence[Difference], reference: str) -> list[str]:
    """Return sentences on how to read a table of differences, and on what the table leaves out."""
    wide = [f"{d.label} ({d.measure})" for d in found if d.low < -d.bound or d.high > d.bound]
    few = sorted({site for d in found for site in d.of_few})
    given = all(d.of_given for d in found)
    notes = true_texts({
        f"Differences to {reference}, paired by {'site' if given else 'seed and site'}: mean "
        f"[95 % interval{interval_of(found)}].": True,
        "* better, ! worse: p is below 0.05 after Holm's correction for all rows and measures. Within noise: no "
        f'difference was shown; {POWER:.0%} of such comparisons would show a true one of the size under "visible '
        'from". Cannot tell: only a difference larger than the metric itself could have been detected; use more '
        f"{'test images' if given else 'seeds'}.": any(math.isfinite(d.p_holm) for d in found),
        "With two seeds the interval is on the safe side: it holds in 95 to 98 of 100 cases.": any(
            len(d.values) == 2 and math.isfinite(d.images_sd) for d in found
        ),
        "An interval reaches beyond the largest difference that the metric's range allows, as it knows nothing of that "
        f"range; read it as ending there, and as too few seeds: {listed(wide, most=8)}.": wide,
        "With one seed nothing can be said of noise: give more (--seeds).": any(d.verdict == ONE_SEED for d in found),
        "Where a difference is the same with every seed and nothing else scatters, how sure it is is not known: give "
        "more seeds, or more test images.": any(
            d.verdict == NOT_KNOWN and math.isnan(d.smallest) and not d.of_few for d in found
        ),
        "Where nothing says how far the test patients move it, a difference has no verdict: all seeds are tested on "
        "the same patients. Of the primary metric draws of them say it, with --bootstrap above 0.": any(
            d.verdict == NOT_KNOWN and not math.isnan(d.smallest) for d in found
        ),
        f"No verdict rests on sites with fewer than {FEW} test cases: {listed(few, most=8)}.": few,
    })  # fmt: skip
    totals = [d for d in found if d.measure == MEASURES[0]]
    most = max((len(d.values) for d in totals), default=0)
    for d in totals:
        seeds = f"{d.label}: over seed{'s' * (len(d.values) > 1)} {', '.join(map(str, sorted(d.values)))} only."
        who = "; ".join(
            f"{label} lacks {', '.join(site for site, by in d.lacking.items() if by == label)}"
            for label in dict.fromkeys(d.lacking.values())
        )
        other = (
            f"{d.label}: OTHER SITES than {reference}: {who}. Its average, std and worst here are over the sites that "
            f"both have ({', '.join(d.sites)}), and no verdict is given."
        )
        notes += true_texts({seeds: len(d.values) < most, other: who})
    return notes + (fell(found, totals[0].higher_is_better) if totals else [])


def interval_of(found: Sequence[Difference]) -> str:
    """Return text on what variation the intervals of differences include: over seeds, over test patients, or both."""
    of = [d for d in found if d.measure in MEASURES]
    with_units = [math.isfinite(d.images_sd) for d in of if math.isfinite(d.low)]
    if not any(with_units):
        return " by Student's t over the seeds alone"
    units = {site: unit for d in of for site, unit in d.units.items()}
    kinds = sorted({kind for kind, _ in units.values()})
    what = kinds[0] if len(kinds) == 1 else CASES if CASES in kinds else " or ".join(kinds)
    counts = sorted({count for _, count in units.values() if count is not None})
    many = f", {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} a site" if counts else ""
    some = "" if all(with_units) else "of some rows also "
    return f" over {'' if all(d.of_given for d in of) else 'the seeds and '}{some}the test {what} (bootstrap{many})"


def _p(value: float) -> str:
    return p_value(value).removeprefix("= ") if math.isfinite(value) else MISSING
