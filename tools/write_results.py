"""Write tables, legends and origins in ``docs/`` from ``docs/results/data/``, and check the pages' claims about noise.

``python tools/write_results.py`` writes everything between marks anew; ``--check`` only looks and lists what is wrong.
``python tools/write_results.py --take COMPARISON --page NAME`` stores the tables of a folder of ``fairflare compare``
and begins the page where there is none. The marks and the notation of claims: docs/results/README.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
DATA = RESULTS / "data"
MEASURES = ("average", "std", "worst")
SIGNS = {"better": "*", "worse": "!"}
UNKNOWN = "not recorded"
OVER = {
    "seeds": "seeds (*seed noise*)",
    "images": "the site's test images",
    "seeds+images": "seeds and test cases",
}

TABLE = re.compile(r"<!-- table: (?P<what>[^\n]*?) -->\n(?P<old>.*?)<!-- end of table -->", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """Store one figure of a stored table: a row's measure, or (with ``reference``) its difference to another row.

    ``mean`` is over ``seeds``; ``sd`` of a measure their population standard deviation; ``low`` and ``high`` of a
    difference its 95 % interval, ``smallest`` one that would be seen. NaN and an empty verdict: not recorded.
    """

    table: str
    row: str
    reference: str
    measure: str
    seeds: str
    mean: float
    sd: float
    low: float
    high: float
    verdict: str
    p: float
    p_holm: float
    smallest: float = math.nan

    @property
    def sign(self) -> str:
        """Return ``*`` for better, ``!`` worse, ``~`` within noise; ``?``: no verdict (one seed, other sites ...)."""
        return SIGNS.get(self.verdict, "~" if self.verdict == "within noise" else "?")

    def text(self) -> str:
        """Return the figure as a cell of a table."""
        if math.isnan(self.mean):
            return self.verdict or UNKNOWN
        if not self.reference:
            digits = 4 if abs(self.mean) < 10 else 1
            return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.sd) else f" ± {self.sd:.{digits}f}")
        interval = "" if math.isnan(self.low) else f" [{self.low:+.3f}, {self.high:+.3f}]"
        mark = f" {self.sign}" if self.verdict and self.sign != "~" else ""
        return f"{self.mean:+.4f}{interval}{mark}"


COLUMNS = [field.name for field in fields(Figure)]
NUMBERS = ("mean", "sd", "low", "high", "p", "p_holm", "smallest")


class Stored:
    """Hold the tables of one page: ``data/NAME.csv``, and ``data/NAME.json`` with their origin."""

    def __init__(self, page: str, figures: Sequence[Figure], origin: dict[str, Any]) -> None:
        self.page, self.figures, self.origin = page, list(figures), origin

    def find(self, table: str, row: str, measure: str, reference: str = "") -> Figure:
        """Return one stored figure.

        Raises:
            ValueError: there is none (says what there is).
        """
        for figure in self.figures:
            if (figure.table, figure.row, figure.measure, figure.reference) == (table, row, measure, reference):
                return figure
        against = f" against {reference!r}" if reference else ""
        there = dict.fromkeys(f.row for f in self.figures if f.table == table and f.reference == reference)
        raise ValueError(
            f"{self.page}/{table} has no {measure} of {row!r}{against}; rows: {', '.join(there) or 'none'}"
        )

    def rows(self, table: str) -> list[str]:
        """Return the figures of a table, in order."""
        return list(dict.fromkeys(figure.row for figure in self.figures if figure.table == table))

    def about(self, table: str) -> dict[str, Any]:
        """Return what the origin records of a table: ``title``, ``metric``, ``over``, ``reference``, ``notes`` ...

        Raises:
            ValueError: it says nothing.
        """
        try:
            return dict(self.origin["tables"][table])
        except KeyError:
            raise ValueError(f"data/{self.page}.json says nothing of a table {table!r}") from None


@cache
def load(page: str) -> Stored:
    """Return the stored tables of a page.

    Raises:
        ValueError: there are none, or a value is no number (names file and line).
    """
    path = DATA / f"{page}.csv"
    try:
        origin = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise ValueError(f"no stored tables of {page!r}: {error}") from error
    figures = []
    for number, line in enumerate(lines, 2):
        try:
            values: Any = {name: float(line[name] or "nan") if name in NUMBERS else line[name] for name in COLUMNS}
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path.name}, line {number}: {error!r}") from error
        figures.append(Figure(**values))
    return Stored(page, figures, origin)


def save(stored: Stored) -> None:
    """Write both files of the stored tables."""
    DATA.mkdir(exist_ok=True)
    with (DATA / f"{stored.page}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for f in stored.figures:
            writer.writerow([_plain(getattr(f, name)) for name in COLUMNS])
    text = json.dumps(stored.origin, indent=1, ensure_ascii=False) + "\n"
    (DATA / f"{stored.page}.json").write_text(text, encoding="utf-8")
    load.cache_clear()


def _plain(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else f"{value:.6f}".rstrip("0").rstrip(".")


# ------------------------------------------------------------------------------------------------ writing


def written(text: str) -> str:
    """Return a page with every part between marks made anew from the stored tables.

    Raises:
        ValueError: a mark names what is not stored, or has no end.
    """
    if len(re.findall(r"<!-- table: ", text)) != len(TABLE.findall(text)):
        raise ValueError("a <!-- table: ... --> lacks its <!-- end of table -->")
    return TABLE.sub(lambda m: f"<!-- table: {m['what']} -->\n{_made(m['what'])}\n<!-- end of table -->", text)


def _made(what: str) -> str:
    """Return what belongs between two marks."""
    place, *view = shlex.split(what)
    page, _, table = place.partition("/")
    stored = load(page)
    match view:
        case ["origin"]:
            return _origin(stored)
        case ["measures", *rows]:
            return _measures(stored, table, rows)
        case ["worst", *rows]:
            return _worst(stored, table, rows)
        case ["sites"]:
            return _sites(stored, table)
        case ["ranks"]:
            return _ranks(stored, table.split("+"))
    raise ValueError(
        f"<!-- table: {what} -->: PAGE/TABLE measures, worst or sites; PAGE/TABLE+TABLE ranks; PAGE origin"
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a table in Markdown; its first ``words`` columns are of words, the other ones of numbers."""
    lines = [head, [*["---"] * words, *["---:"] * (len(head) - words)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _measures(stored: Stored, table: str, only: Sequence[str]) -> str:
    about = stored.about(table)
    rows = []
    for row in only or stored.rows(table):
        values = [stored.find(table, row, measure).text() for measure in MEASURES]
        if row == about["reference"]:
            rows.append([row, *values, "", "", ""])
        else:
            rows.append([row, *values, *(stored.find(table, row, m, about["reference"]).text() for m in MEASURES)])
    head = ["method", *MEASURES, *(f"d {measure}" for measure in MEASURES)]
    return _markdown(head, rows) + "\n\n" + _legend(stored, table, about["reference"])


def _worst(stored: Stored, table: str, only: Sequence[str]) -> str:
    """Return average and worst site of these rows, and what the worst site gains over the reference."""
    reference, rows = stored.about(table)["reference"], []
    for row in only or stored.rows(table):
        gain = "" if row == reference else stored.find(table, row, "worst", reference).text().removesuffix(" ?")
        rows.append([row, *(f"{stored.find(table, row, measure).mean:.3f}" for measure in ("average", "worst")), gain])
    return _markdown(["method", "average", "worst site", f"worst site less {reference}'s [95 %]"], rows)


def _ranks(stored: Stored, tables: Sequence[str]) -> str:
    """Return the rows of all tables from the best worst site of the first down, with the ranks that are possible.

    A row is behind those whose whole interval is above its own, and before those whose whole interval is below it
    (Klein, Wright and Wieczorek, JRSS A 2020). The intervals are of differences to the reference, which is 0.
    """
    rows: dict[str, list[str]] = {}
    head, notes = ["method"], []
    for table in tables:
        reference = stored.about(table)["reference"]
        ends, worst = {reference: (0.0, 0.0)}, {}
        for row in stored.rows(table):
            if row != reference:
                found = stored.find(table, row, "worst", reference)
                ends[row] = (found.low, found.high)
            worst[row] = stored.find(table, row, "worst").mean
        for row in sorted(worst, key=lambda row, of=worst: -of[row]):
            place = 1 + sum(value > worst[row] for value in worst.values())
            first = 1 + sum(low > ends[row][1] for low, _ in ends.values())
            last = len(ends) - sum(high < ends[row][0] for _, high in ends.values())
            against = "" if row == reference else stored.find(table, row, "worst", reference).text().removesuffix(" ?")
            average = stored.find(table, row, "average").mean
            rows.setdefault(row, [row]).extend([f"{place} ({first}-{last})", f"{average:.3f}", against])
        head += [f"{table}: rank", "average", "d worst"]
        hidden = sum(f.verdict == "cannot tell" for f in stored.figures if f.table == table and f.measure in MEASURES)
        said = f"{hidden} differences could not be seen at any size. {_marks(stored, table, reference)}"
        notes.append(f"*{table}*: {stored.about(table)['title']}. {said}")
    note = "Ranks are by the worst site; in brackets the ranks that the intervals of *d worst* leave possible."
    return "\n\n".join([_markdown(head, list(rows.values())), note, *notes])


def _sites(stored: Stored, table: str) -> str:
    names = [f.measure for f in stored.figures if f.table == table and not f.reference and f.measure not in MEASURES]
    names = list(dict.fromkeys(names))
    rows = [[row, *(stored.find(table, row, name).text() for name in names)] for row in stored.rows(table)]
    about = stored.about(table)
    if shown := about.get("by_site"):  # these rows, and those with a difference of each site to itself
        reference = about["reference"]
        rows = [row for row in rows if row[0] in shown]
        for row in dict.fromkeys(f.row for f in stored.figures if f.table == table and f.reference == reference):
            found = [stored.find(table, row, name, reference).text() for name in names]
            rows.append([f'"{row}" less "{reference}"', *found])
        note = f"{about['metric']}. Differences: mean [95 % interval over {OVER[about['over']]}]"
        after = ", after Holm's correction" * bool(about.get("corrected"))
        return _markdown(["row", *names], rows) + f"\n\n{note}; `*` better, `!` worse{after}."
    return _markdown(["method", *names], rows)


def _legend(stored: Stored, table: str, reference: str) -> str:
    """Say what a table's figures are; docs/results/README.md explains the marks."""
    about = stored.about(table)
    lines = [f"{about['metric']}: mean ± deviation over the seeds."]
    if about.get("personal"):
        own = ", ".join(f'"{row}"' for row in about["personal"])
        lines.append(f"With each site's own model: {own}.")
    return " ".join([*lines, *about.get("notes", []), _marks(stored, table, reference)])


def _marks(stored: Stored, table: str, reference: str) -> str:
    """Say what a table's differences are, and how many intervals mark one."""
    about = stored.about(table)
    against = [f for f in stored.figures if f.table == table and f.reference == reference and f.measure in MEASURES]
    whole = [f for f in against if not math.isnan(f.low)]
    outside = sum(f.verdict in SIGNS for f in whole)
    lines = [f'Differences to "{reference}": mean [95 % interval over {OVER[about["over"]]}].']
    if seen := [f.smallest for f in against if f.sign == "~" and not math.isnan(f.smallest)]:
        lines.append(f"Within noise: seen from {min(seen):.2f} to {max(seen):.2f}.")
    if about.get("corrected"):
        marked = f"{outside} of {len(whole)} differences are marked (`*`, `!`)"
        lines.append(f"After Holm's correction for all rows and measures, {marked}.")
    else:
        lines.append(
            f"Uncorrected, {outside} of {len(whole)} intervals exclude 0 (`*`, `!`), by chance about "
            f"{max(1, round(len(whole) * 0.05))}. {_corrected(whole, about['over'])}"
        )
    return " ".join(lines)


def _corrected(figures: Sequence[Figure], over: str) -> str:
    if over != "seeds":
        return "No p-values were kept."
    kept = [f"{figure.row} ({figure.measure})" for figure in holm_keeps(figures)]
    return f"After Holm's correction: {', '.join(kept) or 'none'}."


def holm_keeps(figures: Sequence[Figure]) -> list[Figure]:
    """Return differences, of intervals over seeds alone, that are beyond noise after Holm's correction for all of them.

    The p-values are had back from the intervals, Student's t. These are rounded: each is taken half a digit wider.
    """
    from scipy.special import stdtr, stdtrit

    from fairflare.core.statistics.intervals import LEVEL, holm

    found = []
    for figure in figures:
        df = len(figure.seeds.split()) - 1
        error = ((figure.high - figure.low) / 2 + 5e-4) / stdtrit(df, 0.5 + LEVEL / 2)
        found.append(2 * stdtr(df, -abs(figure.mean) / error))
    return [figure for figure, p in zip(figures, holm(found), strict=True) if p < 1 - LEVEL]


def _origin(stored: Stored) -> str:
    """Return commands, and which code made the figures, when."""
    origin = stored.origin
    version = (origin.get("versions") or {}).get("fairflare", UNKNOWN)
    lines = ["```bash", *origin["commands"], "```", "", origin["ran"]]
    lines.append(f"Version {version}, commit {origin.get('commit') or UNKNOWN}, {origin.get('date') or UNKNOWN}.")
    return "\n".join([*lines, f"Other versions, processor and checksums of the data: `data/{stored.page}.json`."])


def every() -> list[Stored]:
    """Return the stored tables of every page, by name."""
    return [load(path.stem) for path in sorted(DATA.glob("*.csv"))]


def pages() -> list[Path]:
    """Return the pages that may hold marks or claims."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


#: Pages that explain terms and make no claims about a method.
EXPLAINING = ("docs/compare.md", "docs/report.md")


# ------------------------------------------------------------------------------------------------ claims of pages

SKIPPED = re.compile(r"```.*?```|<!-- table: .*?<!-- end of table -->", re.DOTALL)
CLAIM = re.compile(r"<!-- claim:\s(.*?)\s-->", re.DOTALL)
NOISE = re.compile(r"\b(beyond|within)\s+(seed\s+)?noise\b", re.IGNORECASE)
LOOSE = re.compile(
    r"beyond the luck|(?:outside|out of|over) (?:the )?noise|\bstatistically significant|\bsignificantly", re.IGNORECASE
)
ENDS = re.compile(r"(?<=[.!?])(?:\**)((?:\s*<!-- claim:[^>]*?-->)*)\s+(?=[A-Z*`\[(])|\n\s*\n|\n(?=[-|#]|\d+\. )| \| ")
PART = re.compile(r"(?P<measure>[\w-]+)(?:=(?P<value>[+-]?\d*\.?\d+))?(?P<sign>[*!~])")


def problems(text: str) -> list[str]:
    """Return what a page says of noise without a stored table that backs it; empty: nothing.

    Every sentence with "beyond noise" or "within noise" (of intervals over seeds alone: "seed noise") must have a claim
    in it or directly behind it: ``<!-- claim: PAGE[/TABLE] "ROW" [vs "ROW"] MEASURE[=VALUE]SIGN ...; ... -->``.
    """
    found = []
    if re.search(r"^ {0,3}<!-- claim", text, re.MULTILINE):
        found.append("a claim begins a line: Markdown hides the rest of that line")
    for sentence in sentences(text):
        said = CLAIM.sub(" ", sentence)
        short = " ".join(said.split())[:100]
        if loose := LOOSE.search(said):
            found.append(f"{short!r}: say 'beyond noise' or 'within noise', not {loose[0]!r}")
        claims = [part for comment in CLAIM.findall(sentence) for part in comment.split(";")]
        phrases = {(side.lower(), bool(seed)) for side, seed in NOISE.findall(said)}
        if [claim.strip() for claim in claims] == ["none"]:
            continue
        if phrases and not claims:
            found.append(f"{short!r}: no claim names the stored figure")
            continue
        backed = set()
        for claim in claims:
            try:
                backed |= _backed(claim, said)
            except ValueError as error:
                found.append(f"{short!r}: {error}")
                backed = phrases  # suppress further problems of this claim
                break
        for side, seed in sorted(phrases - backed):
            found.append(f"{short!r}: no stored figure is {side} {'seed ' * seed}noise")
        for side, seed in sorted(backed - phrases):
            found.append(
                f"{short!r}: the claim is of what is {side} {'seed ' * seed}noise; the sentence does not say so"
            )
    return found


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown page, with the claims after each; code and generated parts are left out."""
    rest, start = SKIPPED.sub("\n\n", text), 0
    for end in ENDS.finditer(rest):
        stop = end.end(1) if end[1] is not None else end.start()
        yield rest[start:stop]
        start = end.end()
    yield rest[start:]


def _backed(claim: str, said: str) -> set[tuple[str, bool]]:
    """Return ``{(beyond or within, seeds alone?)}`` of the figures that one claim names.

    Raises:
        ValueError: a figure is not stored, or is other than claimed.
    """
    place, row, *rest = shlex.split(claim.replace("\n", " "))
    page, _, table = place.partition("/")
    stored, table = load(page), table or "main"
    about, reference = stored.about(table), stored.about(table)["reference"]
    if rest[:1] == ["vs"]:
        reference, rest = rest[1], rest[2:]
    if not rest:
        raise ValueError(f"claim {claim.strip()!r} names no measure")
    backed = set()
    for part in rest:
        if not (match := PART.fullmatch(part)):
            raise ValueError(f"{part!r} is no MEASURE[=VALUE] with * (better), ! (worse) or ~ (within noise)")
        figure = stored.find(table, row, match["measure"], reference)
        if figure.sign != match["sign"]:
            raise ValueError(f"claims {part}, but {place} {row!r} has {figure.text()} ({figure.verdict or UNKNOWN})")
        if match["value"] is not None:
            digits = len(match["value"].partition(".")[2])
            if abs(figure.mean - float(match["value"])) > 0.5 * 10**-digits + 5.1e-5:
                raise ValueError(f"claims {part}, but {place} {row!r} has {figure.text()}")
            if match["value"].lstrip("+-") not in said:
                raise ValueError(f"claims {part}, but the sentence does not say {match['value'].lstrip('+-')}")
        backed.add(("within" if figure.sign == "~" else "beyond", about["over"] == "seeds"))
    return backed


# ------------------------------------------------------------------------------------------------ new tables


def what_ran(runs: Sequence[Mapping[str, Any]]) -> str:
    """Say rows, seeds, rounds, sites and time of completed runs in a sentence."""
    from fairflare.reporting.layout import format_count

    ends = [(run["started"], run["finished"]) for run in runs if run.get("started") and run.get("finished")]
    took = sum((datetime.fromisoformat(end) - datetime.fromisoformat(begun)).total_seconds() for begun, end in ends)
    told = f"{took / 3600:.1f} h" if took >= 3600 else f"{max(1, round(took / 60))} min"
    labels = {run["info"]["label"] for run in runs}
    seeds = sorted({int(run["info"]["seed"]) for run in runs})
    rounds, sites = (
        " or ".join(format_count(n, what) for n in sorted(set(numbers)))
        for what, numbers in (
            ("round", [int(run["info"]["num_rounds"]) for run in runs]),
            ("site", [len(run["info"]["sites"]) for run in runs]),
        )
    )
    return (
        f"{format_count(len(labels), 'row')}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, {rounds}, "
        f"{sites}: {format_count(len(runs), 'run')}, {told} of run time in all."
    )


def take(folder: Path, page: str, table: str, title: str) -> None:
    """Store ``table.csv`` and ``differences.csv`` of a comparison as a page's table, and begin the page if needed.

    Args:
        folder: that ``fairflare compare`` wrote.
        page, table: where to; a table of that name is replaced.
        title: what the data are, for the method pages.

    Raises:
        ValueError: the folder lacks something (says what), or was made with several codes or data.
    """
    values, against = (_read(folder / name) for name in ("table.csv", "differences.csv"))
    sessions = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["sessions"]
    same = {json.dumps([s[k] for k in ("commit", "processor", "accelerator", "versions", "data")]) for s in sessions}
    if len(same) != 1:
        raise ValueError(f"{folder}: its runs were made with {len(same)} codes, machines or data; make it in one")
    plans = [json.loads(path.read_text(encoding="utf-8"))["plan"] for path in sorted(folder.glob("runs/*/run.json"))]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("fairflare/results.json"))]
    labels = {line["method"] for line in values}
    runs = [run for run in found if run["status"] == "completed" and run["info"]["label"] in labels]
    if len(runs) != sum(int(line["runs"]) for line in values):
        raise ValueError(
            f"{folder}: table.csv is not of all {len(runs)} runs there; give compare all of its seeds again"
        )
    seeds = " ".join(map(str, sorted({int(run["info"]["seed"]) for run in runs})))
    wanted = {*MEASURES, *(site for run in runs for site in run["info"]["sites"])}
    figures = []
    for line in values:
        for name in (column.removesuffix(" mean") for column in line if column.endswith(" mean")):
            if name in wanted:
                cells = line[f"{name} mean"], line[f"{name} sd"]
                figures.append(_figure(table, line["method"], "", name, seeds, *cells))
    for line in against:
        if line["measure"] in wanted:
            told = {name: line.get(name, "") for name in ("verdict", "low", "high", "p", "p_holm", "smallest")}
            cells = line["mean"], line["sd"]
            figures.append(_figure(table, line["method"], line["reference"], line["measure"], seeds, *cells, **told))
    origin: dict[str, Any] = {"tables": {}, "methods": {}}
    stored = load(page) if (DATA / f"{page}.csv").exists() else Stored(page, [], origin)
    measures = [line for line in against if line["measure"] in MEASURES]
    with_images = all(line.get("images_sd") for line in measures)
    personal = [r["info"]["label"] for r in runs if r["info"].get("measured") == "personal"]
    about = {
        "title": title,
        "metric": values[0]["metric"],
        "over": "seeds+images" if with_images else "seeds",
        "corrected": any(line.get("p_holm") for line in measures),
        "reference": against[0]["reference"],
        "personal": list(dict.fromkeys(personal)),
        "notes": ["The data are SYNTHETIC (generated images): these figures say nothing about patients."]
        if any(r["info"].get("synthetic") for r in runs)
        else [],
    }
    last = sessions[-1]
    stored.origin |= {
        "commands": [shlex.join(last["command"])],
        "ran": what_ran(runs),
        "date": last["started"][:10],
        **{key: last[key] for key in ("commit", "processor", "versions")},
        "data": last["data"] or "generated (phantom), no files",
        "tables": {**stored.origin["tables"], table: about},
        "methods": {**stored.origin["methods"], **{plan["label"]: plan["method"] for plan in plans}},
    }
    stored.figures = [f for f in stored.figures if f.table != table] + figures
    save(stored)
    path = RESULTS / f"{page}.md"
    if not path.exists():
        marks = (f"{page} origin", f"{page}/{table} measures", f"{page}/{table} sites")
        parts = [f"<!-- table: {mark} -->\n<!-- end of table -->" for mark in marks]
        path.write_text("\n\n".join([f"# {title}", "**What it says.** ", "**What it does not say.** ", *parts]) + "\n")


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: give a folder of fairflare compare with several rows and seeds")
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def _figure(
    table: str, row: str, reference: str, measure: str, seeds: str, mean: str, sd: str, verdict: str = "", **more: str
) -> Figure:
    numbers = {name: float(more.get(name) or "nan") for name in ("low", "high", "p", "p_holm", "smallest")}
    if mean and not re.fullmatch(r"[-+.\de]+", mean):  # a word in place of a number, such as "suppressed"
        mean, verdict = "", mean
    numbers |= {"mean": float(mean or "nan"), "sd": float(sd or "nan")}
    return Figure(table, row, reference, measure, seeds, verdict=verdict, **numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, check or take; return 1 when ``--check`` finds a problem."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date or not backed")
    parser.add_argument("--take", type=Path, help="folder of fairflare compare")
    parser.add_argument("--page", help="of --take: name under docs/results/")
    parser.add_argument("--table", default="main", help="of --take: name on that page (default: main)")
    parser.add_argument("--title", default="", help="of --take: what the data are")
    given = parser.parse_args(arguments)
    if given.take:
        if not given.page:
            parser.error("--take needs --page")
        try:
            take(given.take, given.page, given.table, given.title or given.page)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    wrong = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        try:
            now = written(text)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
            continue
        if now != text and given.check:
            wrong.append(f"{name}: not what is stored; python tools/write_results.py writes it")
        elif now != text:
            path.write_text(now, encoding="utf-8")
        if name.as_posix() not in EXPLAINING:
            wrong += [f"{name}: {problem}" for problem in problems(now)]
    print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
