"""Show how results came about: figures over the rounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fairflare.core.cells import LAST, pivot
from fairflare.core.fairness import summarize
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import Cell, Table
from fairflare.reporting.values import are_linked, sentence
from fairflare_lab.compare.rows import Row
from fairflare_lab.page.content import NOTHING, Picture, Section
from fairflare_lab.page.lines import LineOptions, frame, lines, panels_of, site_parts
from fairflare_lab.page.material import Material, name_metric

MEASURES = {"average": "mean", "std": "std", "worst site": "worst"}
#: For each split: name and title of its section, and text on the model to which a round's figures belong.
SPLITS = {
    "validation": ("rounds", "Over the rounds", "the model received in the round, over the sites that were in it"),
    "test": ("tests", "Tests over the rounds", "the model that the round made; it decided nothing"),
}


def rounds(material: Material, split: str = "validation") -> Section:
    """Return the section with average, standard deviation and worst site of the metric on a split, by round.

    For ``"test"`` it is empty unless models of earlier rounds were tested too (``test_every``, ``test_last``).
    """
    key, title, which = SPLITS[split]
    measured = {row.label: _read_rounds(row, split, material.metric) for row in material.rows}
    found = [(row, *one) for row in material.rows if len({n for n, _ in measured[row.label]}) > (split == "test")
             for one in measured[row.label]]  # fmt: skip
    if not found:
        return NOTHING
    summaries = [
        (row.label, n, summarize(of, higher_is_better=material.higher, linked=are_linked(row.runs[0], material.metric)))
        for row, n, of in found
    ]
    labels, metric = [row.label for row in material.rows], name_metric(material)
    panels: dict[str, Any] = {
        heading: panels_of(frame(("", row, n, getattr(of, name)) for row, n, of in summaries), labels)[""]
        for heading, name in MEASURES.items()
    }
    counts = Counter((row, n) for row, n, _ in summaries)
    cells: list[list[Cell]] = [
        [row, n, *(of.at[n, row] for of in panels.values()), runs]
        for (row, n), runs in sorted(counts.items(), key=lambda item: (labels.index(item[0][0]), item[0][1]))
    ]
    final = [row.label for row in material.rows if split == "validation" and any(_final(r, split) for r in row.runs)]
    ends = " In the ring at the end of a line is the final model, which is tested above, here on the validation splits."
    text = f"{sentence(metric)} on the {split} splits"
    parts: list[Picture | Table] = [
        lines(
            material, key, text, panels,
            f"Of {which}{material.over_seeds}.{ends * bool(final)} A flat end says that training has levelled off; "
            "figures of a run that still rises depend on when it was stopped.", metric,
            LineOptions(final=final, ranks=labels),
        ),
        Table(key, f"{text}, of {which}.", ["method", "round", *MEASURES, "runs"], cells, folded=True),
    ]  # fmt: skip
    if len(labels) == 1 and split == "validation":
        values = frame((row.label, site, n, value) for row, n, of in found for site, value in of.items())
        parts += site_parts(
            material, values, "rounds_sites", f"{sentence(metric)} on the validation split of every site",
            "A line for each site.", metric,
            options=LineOptions(worst_first=material.higher, final=material.sites if final else []),
        )  # fmt: skip
    return Section(key, title, parts=parts)


def _read_rounds(row: Row, split: str, metric: str) -> list[tuple[int, dict[str, float]]]:
    """Return the sites' values in each round of each run; for validation the final model follows the last round."""
    found = []
    for run in row.runs:
        measured = {record.current_round: getattr(record, split) for record in run.rounds}
        if measured:  # a round validates the model that it received, so no round validated the last one
            measured[max(measured) + (split == "validation")] = _final(run, split)
        for n, by_site in measured.items():
            values = {site: value for site, of in by_site.items() if (value := of.get(metric)) is not None}
            found += [(n, values)] * bool(values)
    return found


def _final(run: RunResults, split: str) -> dict[str, dict[str, float | None]]:
    """Return the final model's metrics on a split by site."""
    found = pivot((c for c in run.cells if c.model == LAST and c.split == split and not c.group), "site", "metric")
    return {site: {name: cell.value for name, cell in of.items()} for site, of in found.items()}
