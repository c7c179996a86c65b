"""Show runs in the columns of a paper's table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base.checks import group_by_key, true_texts
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import MISSING, Spread, Table, format_tables
from fairflare.reporting.values import collect_by_site, label_of
from fairflare_lab.compare.rows import complete_runs, row_of


def paper_table(
    title: str,
    columns: Sequence[Mapping[str, Any]],
    runs: Sequence[RunResults],
    *,
    style: str = "text",
    width: int | None = None,
) -> str:
    """Return a table of runs in the form of a paper: percent, mean ± population standard deviation.

    Args:
        title: title of the paper's table.
        columns: columns of the table, each with ``title`` (``{site}`` in it stands for the site's name), ``metric``
            (``split/name``; ``a+b`` for a mean; if several are given, the first that any run has is used),
            ``of`` (``site``: one column for each site; ``mean`` or ``std``: over the sites) and ``last`` (whether
            values are over the last tested models, if the runs have them).
        runs: documents of :func:`fairflare.reporting.results.read_results`.
        style: ``"text"`` or ``"markdown"``.
        width: largest width of the text.

    Raises:
        ValueError: no run is complete.
    """
    complete = complete_runs(runs)
    by_label = group_by_key((label_of(run), run) for run in complete)
    last = all(run.last_rounds for run in complete)
    table: dict[str, list[str]] = {"method": list(by_label)}
    notes, absent = [], []
    personal: dict[str, None] = {}
    for column in columns:
        wanted = column["metric"] if isinstance(column["metric"], list) else [column["metric"]]
        metric = next(
            (
                name
                for name in wanted
                if any(math.isfinite(v) for run in complete for v in collect_by_site(run, name).values())
            ),
            None,
        )
        if metric is None:
            absent.append(f"{column['title']} ({' or '.join(wanted)})")
            table[column["title"]] = [MISSING] * len(by_label)
            continue
        if metric != wanted[0]:
            notes.append(f"{column['title']}: {metric}, as no run has {wanted[0]}.")
        pooled = last and column.get("last", False)
        rows = [row_of(label, of_row, metric, pooled) for label, of_row in by_label.items()]
        for name in dict.fromkeys(site for row in rows for site in row.values[0]) if column["of"] == "site" else [""]:
            cells = [_cell(row.summarise_site(name) if name else row.summarise(column["of"])) for row in rows]
            table[column["title"].replace("{site}", name)] = cells
            if metric.startswith("global/"):
                personal |= {label: None for label, cell in zip(by_label, cells, strict=True) if cell == MISSING}
    pooled = last and any(column.get("last") for column in columns)
    models = "models of the last rounds that were tested" if pooled else "last model"
    warnings = true_texts({
        f"{MISSING}: no figure of the global test, which is of the common model (if there is one): "
        f"{', '.join(personal)}.": personal,
        f"ABSENT, as no run measured it: {', '.join(absent)}.": absent,
    })  # fmt: skip
    about = f"{title}, in percent, of the {models}: mean ± population standard deviation over them and the runs."
    return format_tables(
        [Table("paper_table", title, list(table), list(zip(*table.values(), strict=True)))],
        [about, *notes, *warnings], style, width,
    )  # fmt: skip


def _cell(spread: Spread) -> str:
    if math.isnan(spread.mean):
        return MISSING
    return f"{100 * spread.mean:.2f}" + ("" if math.isnan(spread.sd) else f" ± {100 * spread.sd:.2f}")
