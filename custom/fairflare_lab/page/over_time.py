"""Show how results came about: figures over the rounds, the sites in each round, seconds and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fairflare.core.fairness import summarize
from fairflare.reporting.layout import Cell, number
from fairflare.reporting.notes import attendance
from fairflare.reporting.pictures import in_order
from fairflare.reporting.values import linked
from fairflare_lab.page.content import NOTHING, Picture, Section, Table, listed
from fairflare_lab.page.lines import figures, frame, in_the_end, lines, panels_of
from fairflare_lab.page.material import Material, PageRow, PageRun, spelt
from fairflare_lab.page.style import INK, chart, stacked, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = {"average": "mean", "std": "std", "worst site": "worst"}
#: By split: name and title of its section, and words for the model that a round's figures are of.
SPLITS = {
    "validation": ("rounds", "Over the rounds", "the model received in the round, over the sites that were in it"),
    "test": ("tests", "Tests over the rounds", "the model that the round made; it decided nothing"),
}
IN, OUT, AWAY = 2, 1, 0  # states of a site in a round
STATES = ((IN, "#31507a", INK, "", "took part"), (OUT, "#e3a35c", "black", "////", "left out"),
          (AWAY, "white", INK, "", "not asked"))  # fmt: skip
MAX_GRIDS = 6
COSTS = ["times", "seconds", "MB out", "MB in"]


def rounds(material: Material, split: str = "validation") -> Section:
    """Return the section with average, standard deviation and worst site of the metric on a split, by round.

    For ``"test"`` it is empty unless models of earlier rounds were tested too (``test_every``, ``test_last``).
    """
    key, title, which = SPLITS[split]
    found = [(row, n, by_site) for row in material.rows for n, by_site in _measured(row, split, material.metric)]
    at = {row.label: {n for of, n, _ in found if of is row} for row in material.rows}
    found = [one for one in found if len(at[one[0].label]) > (split == "test")]
    if not found:
        return NOTHING
    summaries = [
        (row.label, n, summarize(of, higher_is_better=material.higher, linked=linked(row.runs[0], material.metric)))
        for row, n, of in found
    ]
    labels, metric = [row.label for row in material.rows], spelt(material)
    panels = {
        heading: panels_of(frame(("", row, n, getattr(of, name)) for row, n, of in summaries), labels)[""]
        for heading, name in MEASURES.items()
    }
    counts = Counter((row, n) for row, n, _ in summaries)
    order = sorted(counts, key=lambda place: (labels.index(place[0]), place[1]))
    cells = [[row, n, *(of.at[n, row] for of in panels.values()), counts[row, n]] for row, n in order]
    final = [row.label for row in material.rows if split == "validation" and any(r[split] for r in row.runs)]
    ends = " In the ring at the end of a line is the final model, which is tested above, here on the validation splits."
    told = [
        f"{row}: average {_from_to(panels['average'][row])}, worst site {_from_to(panels['worst site'][row])}, up to "
        f"round {max(at[row])}"
        for row in panels["average"]
    ]
    parts: list[Picture | Table] = [
        lines(
            material, key, f"{metric} on the {split} splits", panels,
            f"Of {which}{material.over_seeds}.{ends * bool(final)} A flat end says that training has levelled off; "
            "figures of a run that still rises depend on when it was stopped.",
            f"{metric} over the rounds. {listed(told, '; ')}.", metric, final=final, ranks=labels,
        ),
        Table(key, f"{metric} on the {split} splits, of {which}.", ["method", "round", *MEASURES, "runs"], cells,
              folded=True),
    ]  # fmt: skip
    if len(labels) == 1 and split == "validation":
        sites = frame(("", site, n, value) for _, n, of in found for site, value in of.items())
        of = panels_of(sites, material.sites)[""]
        text = f"{metric} on the validation split of every site"
        told = [f"{site} {number(value)}" for site, value in in_the_end(of).items()]
        parts += [
            lines(material, "rounds_sites", text, {"": of}, "A line for each site.",
                  f"In the end: {listed(told, '; ')}.", metric, worst_first=material.higher,
                  final=list(of) if final else []),
            Table("rounds_sites", f"{text}, by round.", ["round", *of],
                  [[n, *line] for n, *line in figures(of).itertuples()], folded=True),
        ]  # fmt: skip
    return Section(key, title, parts=parts)


def _measured(row: PageRow, split: str, metric: str) -> list[tuple[int, dict[str, float]]]:
    """Return the sites' values in each round of each run; for validation the final model follows the last round."""
    found = []
    for run in row.runs:
        measured = {record["current_round"]: record[split] for record in run.rounds}
        if measured:  # a round validates the model that it received, so no round validated the last one
            measured[max(measured) + (split == "validation")] = run[split] or {}
        for n, by_site in measured.items():
            values = {site: value for site, of in by_site.items() if (value := of.get(metric)) is not None}
            found += [(n, values)] * bool(values)
    return found


def _from_to(line: pd.Series) -> str:
    known = [cell.mean for cell in line.dropna()]
    return f"{number(known[0])} to {number(known[-1])}"


# ------------------------------------------------------------------------------------------------ sites by round


def took_part(material: Material) -> Section:
    """Return the section on which sites took part in which round; only runs with absent sites have a picture."""
    runs = [run for run in material.runs + material.others if run.rounds]
    states = [_states(run) for run in runs]
    missed = [bool((of < IN).any(axis=None)) for of in states]
    gaps = [run for run, some in zip(runs, missed, strict=True) if some or run["left_out"]]
    which = "In every run" if len(runs) > 1 and not gaps else "In the run" if len(runs) == 1 else "In the other runs"
    words = [f"{which} every site was in every round."] if len(gaps) < len(runs) else []
    notes = [f"{run.name}: {line}" for run in gaps for line in attendance(run)]
    if sum(missed) > MAX_GRIDS:
        notes.append(f"Pictures of the first {MAX_GRIDS} of {sum(missed)} such runs; the table has all.")
    counts = [(of == IN).sum(axis=1) for of in states]
    drawn = [one for one, some in zip(zip(runs, states, counts, strict=True), missed, strict=True) if some]
    parts: list[Picture | Table] = [
        Picture(
            f"took_part_{k}",
            partial(chart, partial(_grid, of), min(1.3 + 0.2 * len(of), 9.0), f"{run.name}: who took part when",
                    run.info["synthetic"], xlabel="round"),
            f"{run.name}: dark: the site's model is in the round's average; hatched: it was asked or expected and left "
            "out; white: not asked.",
            f"Rounds with each site: {listed(f'{s} {n} of {len(run.rounds)}' for s, n in count.items())}.",
        )
        for k, (run, of, count) in enumerate(drawn[:MAX_GRIDS], 1)
    ]  # fmt: skip
    cells: list[list[Cell]] = [
        [run.name.partition(",")[0], run.info.seed, len(run.rounds), *map(count.to_dict().get, material.sites)]
        for run, count in zip(runs, counts, strict=True)
    ]
    out: list[list[Cell]] = [
        [run.name, when, left["phase"], left["site"], left["reason"]]
        for run in runs
        for when, of in [*((r["current_round"], r["left_out"]) for r in run.rounds), ("end", run["left_out"])]
        for left in of
    ]
    heads = ["run", "seed", "rounds", *material.sites]
    parts += [
        Table("took_part", "In how many rounds each site was, of how many.", heads, cells, folded=len(runs) > 8),
        Table("left_out", "Who was left out, when and why.", ["run", "round", "phase", "site", "reason"], out),
    ]
    return Section("took_part", "Who took part when", words=words, notes=notes, parts=parts)


def _states(run: PageRun) -> pd.DataFrame:
    """Return a table (sites, rounds) of states: the site took part, was left out, or was not asked."""
    out = [{left["site"] for left in record["left_out"]} for record in run.rounds]
    asked = {site for record, left in zip(run.rounds, out, strict=True)
             for site in (*record["sites"], *record["accepted"], *left)}  # fmt: skip
    sites = in_order({*run.info.get("sites", ()), *asked} - {""})
    states = [
        [IN if site in r["accepted"] else OUT if site in r["sites"] or site in left else AWAY
         for r, left in zip(run.rounds, out, strict=True)]
        for site in sites
    ]  # fmt: skip
    return pd.DataFrame(states, pd.Index(sites, dtype=object), [record["current_round"] for record in run.rounds])


def _grid(states: pd.DataFrame, axes: Axes) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch, Rectangle

    colours = ListedColormap([face for _, face, *_ in reversed(STATES)])
    axes.imshow(states, cmap=colours, vmin=AWAY, vmax=IN, aspect="auto", interpolation="nearest")
    for y, x in np.argwhere(states.to_numpy() == OUT) if states.size <= 2000 else ():
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="////", linewidth=0, edgecolor="black"))
    axes.set_yticks(*ticks(list(states.index), 48))
    axes.set_xticks(*ticks([str(n) for n in states], 20))
    axes.grid(False)
    patches = [Patch(facecolor=face, edgecolor=edge, hatch=hatch, label=of) for _, face, edge, hatch, of in STATES]
    axes.figure.legend(handles=patches, loc="outside lower center", ncols=3)


# ------------------------------------------------------------------------------------------------ cost


def cost(material: Material) -> Section:
    """Return the section with seconds and bytes of the runs, by phase."""
    found = {row.label: phases(row) for row in material.rows}
    if not any(found.values()):
        return NOTHING
    cells: list[list[Cell]] = [
        [row, name, int(times) if times.is_integer() else times, *more]
        for row, by_phase in found.items()
        for name, (times, *more) in by_phase.items()
    ]
    totals = [f"{row} {sum(of[1] for of in by_phase.values()):.1f} s" for row, by_phase in found.items()]
    names = list(dict.fromkeys(name for by_phase in found.values() for name in by_phase))
    picture = Picture(
        "cost",
        partial(chart, partial(_costs, found, names), 1.9 + 0.5 * len(found), "Seconds and bytes by phase",
                material.synthetic, panels=2, count=max(len(names), 2)),
        "Seconds of a whole run and megabytes that its models took over the wire, by phase"
        f"{', on average over seeds' if material.over_seeds else ''}.",
        f"Seconds of a whole run: {listed(totals, '; ')}.",
    )  # fmt: skip
    table = Table(
        "cost",
        "Exchanges with the sites, of each run on average: wall-clock seconds, and bytes of models out of the server "
        "and into it.",
        ["method", "phase", *COSTS],
        cells,
    )
    notes = [
        "Seconds depend on the machine and on what else it did; runs that went at the same time slow each other down."
    ]
    return Section("cost", "What it cost: seconds and bytes", notes=notes, parts=[picture, table])


def phases(row: PageRow) -> dict[str, list[float]]:
    """Return the values of :data:`COSTS` by phase: sums over the rounds, and means over the row's runs."""
    found: dict[str, np.ndarray] = {}
    for run in row.runs:
        for phase in [one for record in run.rounds for one in record["phases"]] + run["phases"]:
            one = np.array([1, phase["seconds"], phase["bytes_out"] / 1e6, phase["bytes_in"] / 1e6], dtype=float)
            found[phase["name"]] = found.get(phase["name"], np.zeros(len(COSTS))) + one
    return {name: (sums / len(row.runs)).tolist() for name, sums in found.items()}


def _costs(found: dict[str, dict[str, list[float]]], names: Sequence[str], *panels: Axes) -> None:
    for axes, columns, unit in zip(panels, ((1,), (2, 3)), ("seconds of a run", "MB of a run"), strict=True):
        widths = {
            name: [sum(of[name][k] for k in columns) if name in of else 0.0 for of in found.values()] for name in names
        }
        stacked(axes, list(found), widths)
        axes.set_xlabel(unit)
