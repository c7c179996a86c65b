"""Runs in the columns of a paper's table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.core.fairness import summarize
from fairflare.reporting.compare.comparison import complete_runs
from fairflare.reporting.layout import MISSING, Table, spread, wrapped
from fairflare.reporting.table import by_site_of, direction_of, label_of, measured


def paper_table(
    title: str,
    columns: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    *,
    style: str = "text",
    width: int | None = None,
) -> str:
    """What a paper prints of its methods, from the runs of a comparison: percent, mean ± population standard deviation.

    Args:
        title: of the paper's table.
        columns: each with ``title`` (``{site}``: its name), ``metric`` (``split/name``, ``a+b`` for a mean; of several
            the first that any run has), ``of`` (``site``: one column each; ``mean`` or ``std`` over the sites) and
            ``last`` (over the last models that were tested, where the runs have them).
        runs: documents of :func:`fairflare.reporting.results.read_results`.
        style: ``"text"`` or ``"markdown"``.
        width: of the text.

    Raises:
        ValueError: no complete run.
    """
    complete = complete_runs(runs)
    labels = list(dict.fromkeys(map(label_of, complete)))
    last = all(run.get("last_rounds") for run in complete)
    table, notes, absent = [["method"], *([label] for label in labels)], [], []
    personal: dict[str, None] = {}
    for column in columns:
        wanted = column["metric"] if isinstance(column["metric"], list) else [column["metric"]]
        metric = next((name for name in wanted if any(_has(run, name) for run in complete)), None)
        if metric is None:
            absent.append(f"{column['title']} ({' or '.join(wanted)})")
            table = [[*row, cell] for row, cell in zip(table, [column["title"], *[MISSING] * len(labels)], strict=True)]
            continue
        if metric != wanted[0]:
            notes.append(f"{column['title']}: {metric}, as no run has {wanted[0]}.")
        pooled = last and column.get("last", False)
        found = [
            _values([r for r in complete if label_of(r) == label], metric, column["of"], pooled) for label in labels
        ]
        for name in dict.fromkeys(name for of_row in found for name in of_row):
            cells = [column["title"].replace("{site}", name), *(_cell(of_row.get(name, [])) for of_row in found)]
            table = [[*row, cell] for row, cell in zip(table, cells, strict=True)]
        if metric.startswith("global/"):
            personal |= {
                label: None for label, of_row in zip(labels, found, strict=True) if _cell(of_row[""]) == MISSING
            }
    if personal:
        notes.append(
            f"{MISSING}: no figure of the global test, which is of the common model (if there is one): "
            f"{', '.join(personal)}."
        )
    if absent:
        notes.append(f"ABSENT, as no run measured it: {', '.join(absent)}.")
    models = (
        "models of the last rounds that were tested" if last and any(c.get("last") for c in columns) else "last model"
    )
    about = [
        f"{title}, in percent, of the {models}: mean ± population standard deviation over them and the runs.",
        *notes,
    ]
    shown = Table("paper_table", title, table[0], table[1:])
    if style == "markdown":
        return "\n".join([*shown.markdown(), "", *about])
    return "\n".join([shown.text(width), *wrapped(about, width)])


def _has(run: Mapping[str, Any], metric: str) -> bool:
    return any(math.isfinite(value) for value in by_site_of(run, metric).values())


def _values(runs: Sequence[Mapping[str, Any]], metric: str, of: str, last: bool) -> dict[str, list[float]]:
    """``{site, or nothing: a value for each model}``."""
    tested = [by_site for run in runs for by_site in measured(run, metric, last=last)]
    if of == "site":
        return {site: [by_site[site] for by_site in tested if site in by_site] for site in tested[0]}
    higher = direction_of(runs[0], metric)
    return {"": [getattr(summarize(by_site, higher_is_better=higher), of) for by_site in tested]}


def _cell(values: Sequence[float]) -> str:
    found = spread([100 * value for value in values])
    if math.isnan(found.mean):
        return MISSING
    return f"{found.mean:.2f}" + ("" if math.isnan(found.sd) else f" ± {found.sd:.2f}")
