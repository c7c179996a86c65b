"""Pictures of a run from its results: what every site gets; FedMRL's map, and mu of every site over the rounds.

They need matplotlib (``pip install 'fairflare[page]'``), which is imported only when there is something to draw.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.base.disk.files import write_whole
from fairflare.reporting.documents import Results, RoundRecord
from fairflare.reporting.layout import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAP_FILE = "som_map.png"
MU_FILE = "mu.png"
MAX_NAME = 15  # letters of a site's name in a cell of the map
MAX_ROW_NAME = 30  # and at a row
MAX_LINES = 4  # of names in a cell of the map
MAX_LABELS = 12  # at an axis
RED, BLUE = "#c8382d", "#3b6ea5"


def draw_pictures(results: Results, folder: str | os.PathLike[str]) -> list[str]:
    """Draws what the results hold into ``folder``.

    Args:
        results: of :func:`fairflare.reporting.results.read_results`.
        folder: gets ``som_map.png`` (the last round that placed sites on a map) and ``mu.png`` (reports with a field
            ``mu``).

    Returns:
        Lines for the log: the files, or why there are none. Nothing where there is nothing to draw. Never raises: a
        picture must not cost a run.
    """
    placed = [(record.current_round, som) for record in results.rounds if (som := record.details.get("som"))]
    mu = _mu_of(results.rounds)
    if not placed and not mu:
        return []
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return ["no pictures: matplotlib is not installed (pip install 'fairflare[page]')"]
    title = _title(results)
    lines: list[str] = []
    try:
        for number, som in placed[-1:]:
            lines.append(_keep(draw_map(som, title=f"{title}, round {number}".lstrip(", ")), Path(folder) / MAP_FILE))
        if mu:
            lines.append(_keep(draw_mu(mu, title=title), Path(folder) / MU_FILE))
    except Exception as error:
        lines.append(f"a picture could not be drawn: {type(error).__name__}: {error}")
    return lines


def draw_map(som: Mapping[str, Any], *, title: str = "") -> Figure:
    """The U-matrix, with the names of the sites at their best matching units.

    Args:
        som: ``u_matrix`` (rows of numbers), ``bmu`` (``{site: [row, column]}``), ``sigma``.
        title: over the picture.
    """
    from matplotlib.figure import Figure

    u_matrix: list[list[float]] = som["u_matrix"]
    rows, columns = len(u_matrix), len(u_matrix[0])
    cells: dict[tuple[int, int], list[str]] = {}
    for site in in_order(som["bmu"]):
        row, column = som["bmu"][site]
        cells.setdefault((row, column), []).append(site)
    figure = Figure(figsize=(max(4.5, 1.25 * columns + 1.6), max(3.5, 1.05 * rows + 1.0)), layout="constrained")
    axes = figure.add_subplot()
    values = [value for line in u_matrix for value in line]
    low, high = min(values), max(values)
    image = axes.imshow(u_matrix, cmap="Greys", vmin=low, vmax=high if high > low else low + 1)
    for (row, column), sites in cells.items():
        axes.text(
            column, row, _names(sites), ha="center", va="center", fontsize=8, color="black",
            bbox={"boxstyle": "round,pad=0.3", "facecolor": "#ffd27f", "edgecolor": "#7a4b00", "linewidth": 0.8},
        )  # fmt: skip
    axes.set_xticks([c - 0.5 for c in range(1, columns)], minor=True)
    axes.set_yticks([r - 0.5 for r in range(1, rows)], minor=True)
    axes.grid(which="minor", color="#b0b0b0", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    axes.set_xticks(range(columns))
    axes.set_yticks(range(rows))
    axes.set_xlabel("column of the map")
    axes.set_ylabel("row of the map")
    axes.set_title(textwrap.fill(f"{title}: sites on the map of models".strip(": "), 62), fontsize=10)
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label("mean distance to neighbouring neurons (dark: a border)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def draw_mu(mu: Mapping[str, Sequence[float | None]], *, title: str = "") -> Figure:
    """A row for every site, a column for every round, the colour is mu.

    Args:
        mu: by site, one value a round; ``None`` where it was not in the round.
        title: over the picture.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure

    sites = in_order(mu)
    num_rounds = len(mu[sites[0]])
    # mu comes from a grid that is even neither in itself nor in its logarithm: colours by rank.
    levels = sorted({value for row in mu.values() for value in row if value is not None})
    ranks = {value: rank for rank, value in enumerate(levels)}
    picture = [[float("nan") if v is None else float(ranks[v]) for v in mu[site]] for site in sites]
    width = min(max(5.5, 0.45 * num_rounds + 2.8), 14.0)
    figure = Figure(figsize=(width, min(max(2.6, 0.42 * len(sites) + 1.5), 12.0)), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps["viridis"].resampled(max(len(levels), 2)).with_extremes(bad="white")
    norm = BoundaryNorm([rank - 0.5 for rank in range(len(levels) + 1)], colours.N) if len(levels) > 1 else None
    image = axes.imshow(picture, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    if num_rounds * len(sites) <= 80 and num_rounds <= 16:
        for row, site in enumerate(sites):
            for column, value in enumerate(mu[site]):
                if value is not None:
                    light = ranks[value] > 0.6 * (len(levels) - 1)
                    colour = "black" if light and len(levels) > 1 else "white"
                    axes.text(column, row, f"{value:g}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(sites)), [short_name(site, MAX_ROW_NAME) for site in sites], fontsize=8)
    step = -(-num_rounds // 20)
    axes.set_xticks(range(0, num_rounds, step))
    axes.set_xlabel("round")
    axes.set_xticks([c - 0.5 for c in range(1, num_rounds)], minor=True)
    axes.set_yticks([r - 0.5 for r in range(1, len(sites))], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    gaps = any(value is None for row in mu.values() for value in row)
    note = " (blank: not in the round)" if gaps else ""
    axes.set_title(textwrap.fill(f"{title}: mu by site and round{note}".strip(": "), int(9 * width)), fontsize=10)
    if len(levels) > 1:
        every = -(-len(levels) // MAX_LABELS)
        bar = figure.colorbar(image, ax=axes, ticks=range(0, len(levels), every))
        bar.ax.set_yticklabels([f"{value:g}" for value in levels[::every]], fontsize=8)
        bar.ax.minorticks_off()
        bar.set_label("mu", fontsize=8)
    return figure


def draw_sites(results: Results, metric: str | None = None) -> Figure:
    """What every site gets: its validation metric over the rounds, and its test metric with mean and spread.

    Args:
        results: of :func:`fairflare.reporting.results.read_results`, of a run that completed.
        metric: default: the task's own.

    Raises:
        ValueError: the run has no test of this metric.
    """
    from matplotlib.figure import Figure

    name = metric or results.info.primary_metric
    fairness = results.fairness.get(name)
    if not fairness or not fairness.get("num_sites"):
        measured = ", ".join(results.fairness) or "nothing: the run did not complete"
        raise ValueError(f"no picture: the final test has no {name!r}; it has {measured}")
    test = {site: values[name] for site, values in results.test.items() if values.get(name) is not None}
    sites = sorted(test, key=lambda site: test[site])
    worst = fairness["worst_site"]
    figure = Figure(figsize=(9.0, min(max(3.2, 0.3 * len(sites) + 1.6), 12.0)), layout="constrained")
    rounds, final = figure.subplots(1, 2, width_ratios=(1.25, 1))
    numbers = [record.current_round for record in results.rounds]
    for site in in_order(results.test):
        row = [record.validation.get(site, {}).get(name) for record in results.rounds]
        _line(rounds, numbers, row, site == worst)
    rounds.set_xlabel("round that received the model")
    rounds.set_ylabel(name)
    rounds.set_title("validation, a line for each site", fontsize=10)
    rounds.xaxis.get_major_locator().set_params(integer=True)
    rounds.grid(axis="y", color="#e0e0e0")
    mean, std = fairness["mean"], fairness["std"]
    final.axvspan(mean - std, mean + std, color="#f0f0f0", zorder=0)
    final.axvline(mean, color="#505050", linewidth=1, linestyle="--")
    values = [test[site] for site in sites]
    final.scatter(values, range(len(sites)), color=[RED if site == worst else BLUE for site in sites], zorder=3)
    final.set_yticks(range(len(sites)), [short_name(site, MAX_ROW_NAME) for site in sites], fontsize=8)
    final.set_xlabel(name)
    final.set_title(
        f"final test: {number(mean)}, std {number(std)}, worst {number(fairness['worst'])} (red)", fontsize=10
    )
    final.margins(0.12, 0.5 / len(sites))
    final.grid(axis="x", color="#e0e0e0")
    for axes in (rounds, final):
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.suptitle(_title(results), fontsize=11)
    return figure


def _line(axes: Any, numbers: Sequence[int], row: Sequence[float | None], worst: bool) -> None:
    values = [float("nan") if value is None else value for value in row]
    style = {"color": RED, "linewidth": 2.0, "zorder": 3} if worst else {"color": BLUE, "linewidth": 1.0, "alpha": 0.6}
    axes.plot(numbers, values, marker="o", markersize=3, **style)


# ------------------------------------------------------------------------------------------------ pieces


def _title(results: Results) -> str:
    return (results.info.label or results.info.method) + (" (SYNTHETIC data)" if results.info.synthetic else "")


def _mu_of(rounds: Sequence[RoundRecord]) -> dict[str, list[float | None]]:
    sites = sorted({s for record in rounds for s, report in record.reports.items() if report.get("mu") is not None})
    return {site: [record.reports.get(site, {}).get("mu") for record in rounds] for site in sites}


def _keep(figure: Figure, path: Path) -> str:
    """In the results of a run, which are private."""
    write_whole(path, partial(save_picture, figure), durable=False)
    return f"picture: {path}"


def _names(sites: Sequence[str]) -> str:
    shown = [short_name(site, MAX_NAME) for site in sites]
    if len(shown) > MAX_LINES:
        shown = [*shown[: MAX_LINES - 1], f"and {len(shown) - MAX_LINES + 1} more"]
    return "\n".join(shown)


def short_name(site: str, most: int) -> str:
    """Without the middle: names of hospitals often differ at the end."""
    return site if len(site) <= most else site[: most // 2] + "…" + site[-(most - most // 2 - 1) :]


def in_order(sites: Iterable[str]) -> list[str]:
    """site-2 before site-10."""
    return sorted(sites, key=lambda site: re.sub(r"\d+", lambda number: number[0].zfill(20), site))


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a picture with the Agg backend, without a display or a global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(path)
