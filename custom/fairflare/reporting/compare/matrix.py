"""Every model at every site: the document of a run, and who gains from joining in a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, Field

from fairflare.core.statistics.intervals import LEVEL, certainty, holm
from fairflare.reporting.compare.beside import Beside
from fairflare.reporting.compare.differences import draws_of
from fairflare.reporting.layout import Cell, Spread, Table, interval, number, p_value, printed, spread
from fairflare.reporting.values import by_site_of, direction_of, label_of, metrics_of

MATRIX_FILE = "matrix.json"
Kind: TypeAlias = Literal["alone", "common", "own"]  # of models
GAINS, LOSES, NOISE, UNKNOWN = "gains", "loses", "within noise", "not known"


class TestedModel(BaseModel, extra="forbid"):
    """A model of a run at all its sites.

    Attributes:
        of: site whose own it is; empty: the common model.
        tests: ``{site: {metric: value}}`` of the test splits; empty at a site: it keeps them, of too few cases.
    """

    __test__ = False  # for pytest: this is no test

    of: str
    tests: dict[str, dict[str, float | None]]


class RunMatrix(Beside):
    """``matrix.json`` beside a run's ``results.json``.

    Attributes:
        alone: every site's model is its alone: nothing of another site's is in it.
        models: the common one, where there is one, and the sites' own.
        reason: why models that there are were not tested.
    """

    FILE: ClassVar[str] = MATRIX_FILE
    CALLED: ClassVar[str] = "test of models at all sites"
    schema_version: Literal[1] = 1
    alone: bool = False
    models: list[TestedModel] = Field(default_factory=list)
    reason: str = ""


class MatrixModel(BaseModel, extra="forbid"):
    """A model of a method over the seeds: ``tests`` are ``{site: [value of each seed]}``."""

    method: str
    kind: Kind
    of: str
    seeds: list[int]
    tests: dict[str, list[float | None]]


class Joining(BaseModel, extra="forbid"):
    """What a site has from joining: the model that it would use, less the one that it would have alone.

    Attributes:
        method, site: of which run and where.
        kind: of the model that the site would use: its own where it has one, else the common one.
        joined, alone: means over the seeds of the metric on the site's test split.
        difference: joined less alone.
        low, high: interval of it at 95 %; null: nothing is known.
        p, p_holm: that belongs to it, and corrected for all methods and sites.
        verdict: ``gains`` or ``loses`` where ``p_holm`` is below 0.05, else ``within noise``; ``not known``.
        over: what the interval is over, in words.
    """

    method: str
    site: str
    kind: Literal["common", "own"]
    joined: float
    alone: float
    difference: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    verdict: str = UNKNOWN
    over: str = ""


class Matrix(Beside):
    """``matrix.json`` of a comparison."""

    FILE: ClassVar[str] = MATRIX_FILE
    CALLED: ClassVar[str] = "comparison of models at all sites"
    schema_version: Literal[1] = 1
    metric: str
    higher_is_better: bool
    synthetic: bool
    sites: list[str]
    models: list[MatrixModel]
    joining: list[Joining]
    notes: list[str]


def matrix_of(found: Sequence[tuple[Mapping[str, Any], RunMatrix]], metric: str | None = None) -> Matrix:
    """All models of a comparison at all sites, and what each site has from joining.

    Args:
        found: documents of completed runs, each with its :class:`RunMatrix`.
        metric: default: the primary metric of the first run.

    Raises:
        ValueError: no run, or two of one label and seed.
    """
    if not found:
        raise ValueError("no run with tests of its models at all sites completed")
    chosen = metric or metrics_of(found[0][0])[0]
    higher = direction_of(found[0][0], chosen)
    by_label: dict[str, dict[int, tuple[Mapping[str, Any], RunMatrix]]] = {}
    for run, tested in found:
        of, seed = by_label.setdefault(label_of(run), {}), int(run["info"]["seed"])
        if seed in of:
            raise ValueError(f"two runs of {label_of(run)!r} have seed {seed}; move one of them away")
        of[seed] = (run, tested)
    sites = sorted({site for _, tested in found for model in tested.models for site in model.tests})
    models = [model for label, by_seed in by_label.items() for model in _models(label, by_seed, sites, chosen)]
    alone = next((label for label, by_seed in by_label.items() if _is_alone(by_seed)), None)
    notes = [
        f"{label}: {tested.reason}." for label, by_seed in by_label.items() for _, tested in [*by_seed.values()][:1]
        if tested.reason
    ]  # fmt: skip
    joining: list[Joining] = []
    if alone is None:
        notes.append("No run of what every site has alone (solo) completed, so nothing is said of joining.")
    else:
        others = {label: by_seed for label, by_seed in by_label.items() if not _is_alone(by_seed)}
        joining = [
            one
            for label, by_seed in others.items()
            for site in sites
            if (one := _joining(label, site, by_seed, by_label[alone], chosen)) is not None
        ]
    synthetic = any(run["info"].get("synthetic") for run, _ in found)
    return Matrix(
        metric=chosen, higher_is_better=higher, synthetic=synthetic, sites=sites, models=models,
        joining=_judged(joining, higher), notes=notes,
    )  # fmt: skip


def _is_alone(by_seed: Mapping[int, tuple[Mapping[str, Any], RunMatrix]]) -> bool:
    return all(tested.alone for _, tested in by_seed.values())


def _models(
    label: str, by_seed: Mapping[int, tuple[Mapping[str, Any], RunMatrix]], sites: Sequence[str], metric: str
) -> list[MatrixModel]:
    own: Kind = "alone" if _is_alone(by_seed) else "own"
    found = []
    for of in dict.fromkeys(model.of for _, tested in by_seed.values() for model in tested.models):
        tests = {seed: m.tests for seed, (_, tested) in by_seed.items() for m in tested.models if m.of == of}
        found.append(
            MatrixModel(
                method=label, kind=own if of else "common", of=of, seeds=list(tests),
                tests={site: [(t.get(site) or {}).get(metric) for t in tests.values()] for site in sites},
            )
        )  # fmt: skip
    return found


def _joining(
    label: str,
    site: str,
    joined: Mapping[int, tuple[Mapping[str, Any], RunMatrix]],
    alone: Mapping[int, tuple[Mapping[str, Any], RunMatrix]],
    metric: str,
) -> Joining | None:
    """One site of one method, over the seeds that both have; ``None``: there is no figure of both.

    Figures are those of the runs' results: each site was measured there with the model that it would use.
    """
    values, drawn, units = [], [], set()
    for seed in sorted({*joined} & {*alone}):
        both = [of[seed][0] for of in (joined, alone)]
        pair = [by_site_of(run, metric).get(site, math.nan) for run in both]
        if not all(map(math.isfinite, pair)):
            continue
        values.append(pair)
        told = [draws_of(run, site, metric) for run in both]
        drawn += [of[1] for of in told if of is not None]
        units |= {of[0] for of in told if of is not None}
    if not values:
        return None
    differ = np.subtract(*np.transpose(values))[:, None]
    on_draws, count, what = None, math.inf, ""
    if len(drawn) == 2 * len(values) and len(units) == 1 and len({*map(len, drawn)}) == 1:
        what, number_of = units.pop()
        count = math.inf if number_of is None else number_of
        pairs = np.array(drawn, float).reshape(len(values), 2, -1)
        usable = pairs[:, :, np.isfinite(pairs).all((0, 1))]
        if count > 1 and usable.shape[-1] > 1:
            on_draws = (usable[:, 0] - usable[:, 1])[:, None]
    sure = certainty(differ, on_draws, [count])
    over = [f"{len(values)} seeds"] if sure.seeds else []
    over += [f"{'' if math.isinf(count) else f'{count} '}test {what}"] if sure.patients else []
    first = next(iter(joined.values()))[0]
    means = np.mean(values, 0)
    ends: dict[str, Any] = {"low": sure.mean - sure.half, "high": sure.mean + sure.half, "p": sure.p}
    return Joining(
        method=label, site=site, kind="own" if first["info"].get("measured") == "personal" else "common",
        joined=float(means[0]), alone=float(means[1]), difference=sure.mean,
        over=" and ".join(over) + (" of one seed" if over and not sure.seeds else ""),
        **(ends if math.isfinite(sure.half) else {}),
    )  # fmt: skip


def _judged(found: Sequence[Joining], higher: bool) -> list[Joining]:
    """With verdicts, corrected for all methods and sites."""
    known = [one for one in found if one.p is not None]
    for one, p in zip(known, holm([one.p or 0.0 for one in known]) if known else (), strict=True):
        beyond = GAINS if (one.difference > 0) == higher else LOSES
        one.p_holm, one.verdict = float(p), beyond if p < 1 - LEVEL else NOISE
    return list(found)


# ------------------------------------------------------------------------------------------------ forms


@dataclass(frozen=True)
class Line:
    """A row of table and picture.

    Attributes:
        name: of the model.
        own: site whose model it is; empty: nobody's.
        cells: what it is worth at each site.
    """

    name: str
    own: str
    cells: list[Spread]


def lines_of(found: Matrix) -> list[Line]:
    """The models in the order of the table: alone first, then each method's common model and the sites' own."""
    order = sorted(found.models, key=lambda model: model.kind != "alone")
    lines = []
    for model in order:
        what = "common model" if not model.of else f"{model.of} alone" if model.kind == "alone" else f"{model.of}'s own"
        name = what if model.kind == "alone" else f"{model.method}: {what}"
        cells = [spread([math.nan if v is None else v for v in model.tests[site]]) for site in found.sites]
        lines.append(Line(name, model.of, cells))
    return lines


def matrix_tables(found: Matrix) -> list[Table]:
    """The models at the sites, and what each site has from joining."""
    rows: list[list[Cell]] = []
    for line in lines_of(found):
        means = [cell.mean for cell in line.cells if math.isfinite(cell.mean)]
        ends = [math.nan, math.nan]
        if len(means) == len(line.cells):
            ends = [float(np.mean(means)), min(means) if found.higher_is_better else max(means)]
        rows.append([line.name, *line.cells, *ends])
    several = any(len(model.seeds) > 1 for model in found.models)
    over = "; mean ± population standard deviation over the seeds" if several else ""
    models = Table(
        "matrix",
        f"{found.metric} of every model (row) on the test split of every site (column){over}.",
        ["model", *found.sites, "average", "worst"],
        rows,
    )
    columns = [
        "method",
        "site",
        "model",
        "alone",
        "joined",
        "difference [95 %]",
        "p (Holm)",
        "verdict",
        "interval over",
    ]
    joined: list[list[Cell]] = [
        [one.method, one.site, one.kind, one.alone, one.joined, interval(one.low, one.high, one.difference),
         "-" if one.p_holm is None else p_value(one.p_holm).removeprefix("= "), one.verdict, one.over or "-"]
        for one in found.joining
    ]  # fmt: skip
    text = f"{found.metric} at each site: the model that it would use after joining, less the one that it has alone."
    return [models, *([Table("joining", text, columns, joined, lead=2)] if joined else [])]


def matrix_table(found: Matrix, *, style: str = "text", width: int | None = None) -> str:
    """Both tables with their sentences; in CSV the first alone."""
    better = "higher" if found.higher_is_better else "lower"
    head = f"{found.metric} ({better} is better) of the last models; rows are models, columns the test splits of sites."
    return printed(matrix_tables(found), [head, *joining_in_words(found), *found.notes], style, width)


def joining_in_words(found: Matrix) -> list[str]:
    """Who would be better alone, and for each method who gains, each with how sure it is."""
    if not found.joining:
        return []
    lost = [one for one in found.joining if one.verdict == LOSES]
    sign = 1 if found.higher_is_better else -1
    worse = "; ".join(map(_in_words, lost))
    lines = [f"Better alone: {worse}." if lost else "No site is shown to be better alone."]
    for method in dict.fromkeys(one.method for one in found.joining):
        of = [one for one in found.joining if one.method == method]
        gained = [one.site for one in of if one.verdict == GAINS]
        unsure = [one for one in of if one.verdict in (NOISE, UNKNOWN)]
        text = f"{method}: {len(gained)} of {len(of)} sites are shown to gain" + (
            f" ({', '.join(gained)})" * bool(gained)
        )
        text += f", {sum(one.verdict == LOSES for one in of)} to lose"
        if behind := [one for one in unsure if sign * one.difference < 0]:
            told = "; ".join(_in_words(one, method=False) for one in behind)
            text += f"; {'lower' if found.higher_is_better else 'worse'} than alone, which may be luck: {told}"
        lines.append(f"{text}.")
    return lines


def _in_words(one: Joining, *, method: bool = True) -> str:
    """``site-2 with fed_avg (0.61, alone 0.70; -0.09 [-0.15, -0.03], over 3 seeds)``."""
    told = f"{one.site}{f' with {one.method}' if method else ''} ({number(one.joined)}, alone {number(one.alone)}"
    if one.low is None:
        why = "neither seeds nor draws scatter" if one.over else "one seed and no draws of its test cases"
        return f"{told}; {why}: how sure is not known)"
    p = "" if one.p_holm is None else f", p (Holm) {p_value(one.p_holm)}"
    return f"{told}; {interval(one.low, one.high, one.difference)}, 95 % over {one.over}{p})"
