"""Write all generated files: ``docs/methods.md``, ``docs/privacy.md``, ``docs/papers.md`` and ``jobs/``.

``make refresh`` after a method or a setting was added or changed; a test holds that it changes nothing.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairflare.federation import privacy
from fairflare.federation.plan import describe, papers
from fairflare.flare.export.recipes import FairRecipe
from fairflare.methods.base.catalog import all_methods, plugin_of
from fairflare_lab.papers.presets import PaperTable, tables

ROOT = Path(__file__).parents[1]
TABLE, PRIVACY, PAPERS, JOBS = Path("docs/methods.md"), Path("docs/privacy.md"), Path("docs/papers.md"), Path("jobs")
PAPERS_HEAD = """# The papers' experiments

`fairflare run METHOD --paper` takes the settings of the first paper on this page whose table has the method,
`--paper NAME` those of the named paper. `fairflare compare --preset TABLE` runs the rows of a paper's table and prints
the table's columns, in a quick job's size, or with `--paper` in the paper's size. `make refresh` writes this page from
`custom/fairflare/papers/*.yaml`. Each value has its source: a place in the text, the authors' code, or "ours" with the
reason. A test compares the values with `tests/papers.md`, which was entered from the papers once more.
"""
Setting = tuple[str, str]  # method and name
Value = tuple[str, str]  # value as JSON, and its source
BEGIN, END = "<!-- methods: made by make refresh -->", "<!-- end of methods -->"
MARKS = re.compile(f"(<!-- methods: [^>]*-->|{END})")


def contents() -> dict[Path, bytes]:
    """Return every generated file, by its path below the repository's root.

    Raises:
        ValueError: docs/methods.md has no place for its table, or methods of other packages are installed (names them).
    """
    if others := [name for name, method in all_methods().items() if plugin_of(method)]:
        raise ValueError(f"these methods are of other packages, and would be written too: {', '.join(others)}")
    found = {
        TABLE: with_table((ROOT / TABLE).read_text(encoding="utf-8")).encode(),
        PRIVACY: privacy.page().encode(),
        PAPERS: papers_page().encode(),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in all_methods():
            FairRecipe(name).export(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[JOBS / path.relative_to(folder)] = path.read_bytes()
    return found


def generated() -> set[Path]:
    """Return the generated files that exist."""
    jobs = (ROOT / JOBS).rglob("*") if (ROOT / JOBS).is_dir() else ()
    found = {path.relative_to(ROOT) for path in jobs if path.is_file() and "__pycache__" not in path.parts}
    return found | {path for path in (TABLE, PRIVACY, PAPERS) if (ROOT / path).is_file()}


def with_table(text: str) -> str:
    """Return the page with today's table.

    Raises:
        ValueError: the marks are not there once each, in their order.
    """
    parts = MARKS.split(text)
    if len(parts) != 5 or parts[1] == END or parts[3] != END:
        raise ValueError(f"docs/methods.md must have {BEGIN} and {END}, once each")
    table = describe.method_table({"measured": measured(), "beside": beside()})
    return "".join([parts[0], BEGIN, "\n", table, "\n", END, parts[4]])


def measured() -> dict[str, str]:
    """Return where each method was compared with FedAvg and what came out at the worst site, from docs/results/data."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "docs/results/data").glob("*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        table = next(iter(about["tables"]))
        with path.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
            rows = [r for r in csv.DictReader(file) if (r["table"], r["reference"]) == (table, "FedAvg")]
        said: set[str] = set()
        for row in (row for row in rows if row["measure"] == "worst"):
            method = about["methods"][row["row"]]
            if method != "fed_avg" and method not in said:
                said.add(method)
                mark = {"better": "\\*", "worse": "!"}.get(row["verdict"], "")
                figure = f"[{path.stem}](results/{path.stem}.md) {float(row['mean']):+.2f}{mark}"
                found.setdefault(method, []).append(figure)
    return {method: ", ".join(figures) for method, figures in found.items()}


def beside() -> dict[str, str]:
    """Return what each method was compared with and the largest difference, from tests/methods/authors.csv."""
    found: dict[str, dict[str, float]] = {}
    with (ROOT / "tests/methods/authors.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            code, _, commit = row["beside"].partition("@")
            where = f"https://github.com/{code}" + (f"/tree/{commit}" if commit else "")
            called = f"[{commit or 'code'}]({where})" if "/" in code else code
            largest = found.setdefault(row["method"], {})
            largest[called] = max(float(row["difference"]), largest.get(called, 0.0))
    return {
        m: ", ".join(f"{called} {value:.0e}" if value else f"{called} 0" for called, value in of.items())
        for m, of in found.items()
    }


def papers_page() -> str:
    """Return the page of the papers: the tables that presets are of, and the settings of every experiment."""
    parts = [PAPERS_HEAD, "## Tables", "", "| preset | table | `--paper` | rows |", "|---|---|---|---|"]
    parts += [f"| `{t.name}` | {t.title} | `{t.paper}` | {_rows(t)} |" for t in tables().values()]
    earlier: dict[str, dict[Setting, Value]] = {}
    for name in papers.experiments():
        methods = {m.name: of[name] for m in all_methods().values() if name in (of := papers.papers_of(m))}
        settings = _settings(methods)
        base = max(earlier, key=lambda other: len(earlier[other].items() & settings.items()), default="")
        shared = earlier.get(base, {}).items() & settings.items()
        earlier[name] = settings
        listed, source = ", ".join(f"`{of}`" for of in methods), next(iter(methods.values())).source
        parts += ["", f"## `--paper {name}`", "", f"{source}. Methods: {listed}.", ""]
        if len(shared) > len(settings) / 2:
            absent = [f"`{key}` ({of})" for of, key in earlier[base].keys() - settings.keys()]
            parts += [f"As `--paper {base}`{', without ' * bool(absent)}{', '.join(sorted(absent))}, except:", ""]
            settings = dict(setting for setting in settings.items() if setting not in shared)
        parts += ["| method | settings | source |", "|---|---|---|"]
        by_source: dict[tuple[str, str], list[str]] = {}
        for (of, key), (value, source) in settings.items():
            by_source.setdefault((of, source), []).append(f"`{key}={value}`")
        parts += [f"| {of} | {', '.join(pairs)} | {source} |" for (of, source), pairs in by_source.items()]
    return "\n".join(parts) + "\n"


def _settings(methods: Mapping[str, Any]) -> dict[Setting, Value]:
    """Return value and source of an experiment's settings, by method ("all": alike in every method) and name."""
    told = {of: {"rounds": p.num_rounds, "sites": p.num_sites, **p.settings} for of, p in methods.items()}
    first, *others = told
    common = [key for key, value in told[first].items() if all(told[of].get(key, ...) == value for of in others)]
    lines = [("all", first, key) for key in common]
    lines += [(f"`{of}`", of, key) for of in methods for key in told[of] if key not in common]
    return {(called, key): (json.dumps(told[of][key]), methods[of].sources[key]) for called, of, key in lines}


def _rows(table: PaperTable) -> str:
    swept = {row: ", ".join(f"{k} in {v}" for k, v in s.items()) for row, s in table.sweeps.items()}
    return "; ".join(f"{row} ({swept[row]})" if row in swept else row for row in table.rows)


def main() -> int:
    """Write the files that differ, and print their names; return 0."""
    wanted = contents()
    for path in sorted(generated() - set(wanted)):
        (ROOT / path).unlink()
        print(f"removed {path}")
    for folder in (ROOT / JOBS).iterdir() if (ROOT / JOBS).is_dir() else ():
        if folder.is_dir() and folder.name not in all_methods():
            shutil.rmtree(folder)
    for path, content in sorted(wanted.items()):
        if not (ROOT / path).is_file() or (ROOT / path).read_bytes() != content:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_bytes(content)
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
