"""Show differences between a comparison's rows as text, Markdown, CSV or on the page, and explain how to read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fairflare.base.cases.resampling import CASES
from fairflare.core.statistics.intervals import FEW
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, format_tables, interval, p_value
from fairflare_lab.compare.differences import BETTER, MEASURES, WORSE, Difference
from fairflare_lab.statistics.seed_intervals import POWER

MARKS = {BETTER: "* ", WORSE: "! "}
#: Columns, with the columns of each in a CSV file.
COLUMNS = {
    "method": ["method", "reference"],
    "measure": ["measure", "seeds", "sites"],
    "difference [95 %]": ["mean", "sd", "low", "high"],
    "verdict": ["verdict", "images_sd"],
    "p": ["p"],
    "p (Holm)": ["p_holm"],
    "visible from": ["smallest"],
}
LEGEND = (
    "* better, ! worse: p is below 0.05 after Holm's correction for all rows and measures. Within noise: no difference "
    f'was shown; {POWER:.0%} of such comparisons would show a true one of the size under "visible from". Cannot tell: '
    "only a difference larger than the metric itself could have been detected. One seed: nothing can be said of noise. "
    f"Not known: nothing scatters, a site has fewer than {FEW} test cases, or nothing says how far the test patients "
    "move it, who are the same for all seeds (--bootstrap above 0 says it of the primary metric). Other sites: one of "
    "the rows lacks a site, and average, std and worst are over those that both have. An interval that reaches beyond "
    "the metric's range comes of too few seeds."
)


def table_of_differences(found: Sequence[Difference], reference: str) -> Table:
    """Return a table of differences to the reference; a difference and its interval share a cell."""
    rows: list[list[Cell]] = [
        [
            Shown(d.label, [d.label, reference]), Shown(d.measure, [d.measure, len(d.values), " ".join(d.sites)]),
            Shown(interval(d.low, d.high, d.mean), [d.mean, d.sd, d.low, d.high]),
            Shown(MARKS.get(d.verdict, "") + d.verdict, [d.verdict, d.images_sd]),
            Shown(show_p(d.p), [d.p]), Shown(show_p(d.p_holm), [d.p_holm]), d.smallest,
        ]
        for d in found
    ]  # fmt: skip
    return Table("differences", "", [*COLUMNS], rows, csv_columns=[*COLUMNS.values()], lead=2)


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
    shown = [d for d in found if style == "csv" or d.measure in MEASURES or d.tests_given_models]
    return format_tables([table_of_differences(shown, reference)], notes_of_differences(found, reference), style, width)


def notes_of_differences(found: Sequence[Difference], reference: str) -> list[str]:
    """Return sentences on how to read a table of differences: what is paired, then what the verdicts mean."""
    paired = "site" if all(d.tests_given_models for d in found) else "seed and site"
    return [f"Differences to {reference}, paired by {paired}: mean [95 % interval{interval_of(found)}].", LEGEND]


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
    seeds = "" if all(d.tests_given_models for d in of) else "the seeds and "
    return f" over {seeds}{some}the test {what} (bootstrap{many})"


def show_p(value: float) -> str:
    """Return a p-value as text for a cell; of one that is not known, the sign for a missing figure."""
    return p_value(value).removeprefix("= ") if math.isfinite(value) else MISSING
