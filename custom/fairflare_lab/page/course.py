"""How it came about: validation over the rounds, who took part when, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from fairflare.core.fairness import FairnessSummary, summarize
from fairflare.reporting.layout import number, spread
from fairflare.reporting.notes import attendance
from fairflare.reporting.pictures import in_order
from fairflare.reporting.values import in_words
from fairflare_lab.page.content import Cell, Picture, Section, Spread, Table, listed
from fairflare_lab.page.lines import Series, lines_picture, site_lines, values_of
from fairflare_lab.page.material import Material, PageRow, PageRun
from fairflare_lab.page.style import GRID, INK, figure, label, legend, look, panel, rows_of_legend, ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = (("average", "mean"), ("std", "std"), ("worst site", "worst"))
IN, OUT, AWAY = 2, 1, 0  # a site in a round
MAX_GRIDS = 6


#: Split: name, title, and which model's figures those of a round are.
SPLITS = {
    "validation": ("rounds", "Over the rounds", "the model received in the round, over the sites that were in it"),
    "test": ("tests", "Tests over the rounds", "the model that the round made; it decided nothing"),
}


def rounds(material: Material, split: str = "validation") -> Section | None:
    """Average, standard deviation and worst site of the metric on a split, round by round.

    That of ``"test"`` is there where models on the way were tested too (``test_every``, ``test_last``).
    """
    by_row = [(row, course(row, material, split)) for row in material.rows]
    by_row = [(row, found) for row, found in by_row if len(found) > (split == "test")]
    if not by_row:
        return None
    key, title, which = SPLITS[split]
    name = in_words(material.metric)
    table = Table(
        key,
        f"{name} on the {split} splits, of {which}.",
        ["method", "round", *(called for called, _ in MEASURES), "runs"],
        [
            [row.label, n, *(_over(of, a) for _, a in MEASURES), len(of)]
            for row, found in by_row
            for n, of in found.items()
        ],
        folded=True,
    )
    ranks = {row.label: index for index, row in enumerate(material.rows)}
    panels = {
        called: [
            Series(row.label, ranks[row.label], {n: _over(of, a) for n, of in found.items()}, _ends(row, split))
            for row, found in by_row
        ]
        for called, a in MEASURES
    }
    told = [
        f"{row.label}: average {_from_to(found, 'mean')}, worst site {_from_to(found, 'worst')}, up to round "
        f"{max(found)}"
        for row, found in by_row
    ]
    ends = " In the ring at the end of a line is the final model, which is tested above, here on the validation splits."
    ends *= any(_ends(row, split) for row in material.rows)
    parts: list[Picture | Table] = [
        lines_picture(
            material,
            key,
            f"{name} on the {split} splits",
            panels,
            f"Of {which}{material.over_seeds}.{ends} A flat end says that training has "
            "levelled off; figures of a run that still rises depend on when it was stopped.",
            f"{name} over the rounds. {listed(told, '; ')}.",
            unit=name,
        ),
        table,
    ]
    if len(material.rows) == 1 and split == "validation":
        parts += _by_site(material)
    return Section(key, title, parts=parts)


def course(row: PageRow, material: Material, split: str = "validation") -> dict[int, list[FairnessSummary]]:
    """By round the summaries of the sites, for each of the row's runs that has any."""
    found: dict[int, list[FairnessSummary]] = {}
    for run in row.runs:
        measured = {record["current_round"]: record[split] for record in run.rounds}
        if measured:  # the model of the last round, which no round received
            measured[max(measured) + (split == "validation")] = run.document[split] or {}
        for current_round, by_site in measured.items():
            values = {site: v for site, of in by_site.items() if (v := of.get(material.metric)) is not None}
            if values:
                summary = summarize(values, higher_is_better=material.higher)
                found.setdefault(current_round, []).append(summary)
    return dict(sorted(found.items()))


def _ends(row: PageRow, split: str) -> bool:
    """Whether the last point is the final model's, which older results do not have on the validation splits."""
    return split == "validation" and any(run.document["validation"] for run in row.runs)


def _over(found: Sequence[FairnessSummary], attribute: str) -> Spread:
    return spread([getattr(summary, attribute) for summary in found])


def _from_to(found: dict[int, list[FairnessSummary]], attribute: str) -> str:
    first, *_, last = [*found.values(), *found.values()]
    return f"{number(_over(first, attribute).mean)} to {number(_over(last, attribute).mean)}"


def _by_site(material: Material) -> list[Picture | Table]:
    (row,) = material.rows
    found = values_of(
        row.runs, lambda record: {site: of.get(material.metric) for site, of in record["validation"].items()}
    )
    at = max(n for n, _ in found) + 1
    for site, of in (row.runs[0].document["validation"] or {}).items():
        if (value := of.get(material.metric)) is not None:
            found[at, site] = [value]
    panels, _ = site_lines(material, {"": found}, _ends(row, "validation"))
    (series,) = panels.values()
    return [
        lines_picture(
            material,
            "rounds_sites",
            f"{in_words(material.metric)} on the validation split of every site",
            panels,
            "A line for each site.",
            f"In the end: {listed((f'{s.name} {number(s.last)}' for s in series), '; ')}.",
            unit=in_words(material.metric),
            worst_first=material.higher,
        ),
        Table(
            "rounds_sites",
            f"{in_words(material.metric)} on the validation split of every site, by round.",
            ["round", *(s.name for s in series)],
            [[n, *(s.points[n].mean for s in series)] for n in sorted({n for n, _ in found})],
            folded=True,
        ),
    ]


# ------------------------------------------------------------------------------------------------ who was there


def took_part(material: Material) -> Section | None:
    """Who was in which round; pictures only of runs in which somebody was not."""
    runs = [run for run in material.runs + material.others if run.rounds]
    if not runs:
        return None
    gaps = [run for run in runs if _gaps(run) or run.document["left_out"]]
    words = []
    if len(gaps) < len(runs):
        which = (
            "In every run" if len(runs) > 1 and not gaps else "In the run" if len(runs) == 1 else "In the other runs"
        )
        words.append(f"{which} every site was in every round.")
    notes = [f"{run.name}: {line}" for run in gaps for line in attendance(run.document)]
    sites = material.sites
    parts: list[Picture | Table] = []
    drawn = [run for run in gaps if _gaps(run)]
    if len(drawn) > MAX_GRIDS:
        notes.append(f"Pictures of the first {MAX_GRIDS} of {len(drawn)} such runs; the table has all.")
    for index, run in enumerate(drawn[:MAX_GRIDS]):
        counts = listed(
            f"{site} {sum(site in r['accepted'] for r in run.rounds)} of {len(run.rounds)}" for site in _sites(run)
        )
        parts.append(
            Picture(
                f"took_part_{index + 1}",
                partial(_grid, run),
                f"{run.name}: dark: the site's model is in the round's average; hatched: it was asked or expected and "
                "left out; white: not asked.",
                f"Rounds with each site: {counts}.",
            )
        )
    parts.append(
        Table(
            "took_part",
            "In how many rounds each site was, of how many.",
            ["run", "seed", "rounds", *sites],
            [[run.name.partition(",")[0], run.seed, len(run.rounds), *_counts(run, sites)] for run in runs],
            folded=len(runs) > 8,
        )
    )
    heads = ["run", "round", "phase", "site", "reason"]
    parts.append(Table("left_out", "Who was left out, when and why.", heads, _left_out(runs)))
    return Section("took_part", "Who took part when", words=words, notes=notes, parts=parts)


def _sites(run: PageRun) -> list[str]:
    asked = {site for r in run.rounds for site in (*r["sites"], *r["accepted"], *(x["site"] for x in r["left_out"]))}
    return in_order({*run.info.get("sites", ()), *asked} - {""})


def _gaps(run: PageRun) -> bool:
    return any(site not in r["accepted"] for site in _sites(run) for r in run.rounds)


def _counts(run: PageRun, sites: Sequence[str]) -> list[Cell]:
    own = set(_sites(run))
    return [sum(site in r["accepted"] for r in run.rounds) if site in own else None for site in sites]


def _left_out(runs: Sequence[PageRun]) -> list[list[Cell]]:
    return [
        [run.name, when, left["phase"], left["site"], left["reason"]]
        for run in runs
        for when, those in [
            *((r["current_round"], r["left_out"]) for r in run.rounds),
            ("end", run.document["left_out"]),
        ]
        for left in those
    ]


def _grid(run: PageRun) -> Figure:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch, Rectangle

    sites, records = _sites(run), run.rounds
    height = min(1.3 + 0.2 * len(sites), 9.0)
    made, axes = panel(height, f"{run.name}: who took part when", run.info["synthetic"])
    states = [
        [
            IN if site in r["accepted"] else OUT if site in r["sites"] or any(x["site"] == site for x in r["left_out"])
            else AWAY
            for r in records
        ]
        for site in sites
    ]  # fmt: skip
    colours = ListedColormap(["white", "#e3a35c", "#31507a"])
    axes.imshow(states, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    if len(sites) * len(records) <= 2000:
        for y, line in enumerate(states):
            for x, state in enumerate(line):
                if state == OUT:
                    axes.add_patch(
                        Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="////", linewidth=0, edgecolor="black")
                    )
    axes.set_yticks(*ticks(sites, 48))
    axes.set_xticks(*ticks([str(r["current_round"]) for r in records], 20))
    axes.set_xlabel("round")
    made.legend(
        handles=[
            Patch(facecolor="#31507a", edgecolor=INK, label="took part"),
            Patch(facecolor="#e3a35c", edgecolor="black", hatch="////", label="left out"),
            Patch(facecolor="white", edgecolor=INK, label="not asked"),
        ],
        loc="outside lower center", ncols=3,
    )  # fmt: skip
    return made


# ------------------------------------------------------------------------------------------------ what it cost


def cost(material: Material) -> Section | None:
    """Seconds and bytes by phase."""
    rows = [(row, phases(row)) for row in material.rows]
    names = list(dict.fromkeys(name for _, found in rows for name in found))
    if not names:
        return None
    table = Table(
        "cost",
        "Exchanges with the sites, of each run on average: wall-clock seconds, and bytes of models out of the server "
        "and into it.",
        ["method", "phase", "times", "seconds", "MB out", "MB in"],
        [
            [row.label, name, _whole(found[name]["times"]), *(found[name][key] for key in ("seconds", "out", "in"))]
            for row, found in rows
            for name in found
        ],
    )
    totals = [f"{row.label} {sum(of['seconds'] for of in found.values()):.1f} s" for row, found in rows]
    of = ", on average over seeds" if material.over_seeds else ""
    picture = Picture(
        "cost",
        lambda: _stacked(material, rows, names),
        f"Seconds of a whole run and megabytes that its models took over the wire, by phase{of}.",
        f"Seconds of a whole run: {listed(totals, '; ')}.",
    )
    notes = [
        "Seconds depend on the machine and on what else it did; runs that went at the same time slow each other down."
    ]
    return Section("cost", "What it cost: seconds and bytes", notes=notes, parts=[picture, table])


def _whole(value: float) -> Cell:
    return int(value) if value.is_integer() else value


def phases(row: PageRow) -> dict[str, dict[str, float]]:
    """By phase ``times``, ``seconds``, ``out`` and ``in`` (MB): sums over the rounds, means over the runs."""
    found: dict[str, dict[str, float]] = {}
    for run in row.runs:
        for phase in [p for record in run.rounds for p in record["phases"]] + run.document["phases"]:
            at = found.setdefault(phase["name"], {"times": 0.0, "seconds": 0.0, "out": 0.0, "in": 0.0})
            at["times"] += 1
            at["seconds"] += phase["seconds"]
            at["out"] += phase["bytes_out"] / 1e6
            at["in"] += phase["bytes_in"] / 1e6
    return {name: {key: value / len(row.runs) for key, value in at.items()} for name, at in found.items()}


def _stacked(
    material: Material, rows: Sequence[tuple[PageRow, dict[str, dict[str, float]]]], names: Sequence[str]
) -> Figure:
    height = 1.9 + 0.5 * len(rows) + rows_of_legend(len(names))
    made = figure(height, "Seconds and bytes by phase", material.synthetic)
    panels = made.subplots(2, 1)
    for axes, keys, unit in ((panels[0], ("seconds",), "seconds of a run"), (panels[1], ("out", "in"), "MB of a run")):
        lefts = [0.0] * len(rows)
        for index, name in enumerate(names):
            style = look(index)
            widths = [sum(found.get(name, {}).get(key, 0.0) for key in keys) for _, found in rows]
            axes.barh(range(len(rows)), widths, 0.7, left=lefts, color=style.colour, edgecolor=INK, linewidth=0.5,
                      hatch=style.hatch, label=label(name))  # fmt: skip
            lefts = [a + b for a, b in zip(lefts, widths, strict=True)]
        axes.set_xlabel(unit)
        axes.grid(axis="x", color=GRID)
        axes.set_yticks(range(len(rows)), [label(row.label) for row, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
    legend(made, panels[0], max(len(names), 2))
    return made
