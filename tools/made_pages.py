"""Write the pages of the documentation's site that are in no file: the front page and what the code declares.

``make docs`` adds them; in a terminal ``fairflare list --markdown``, ``fairflare describe METHOD --markdown`` and
``fairflare privacy`` print the same.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairflare.federation import privacy
from fairflare.federation.plan import describe, papers
from fairflare.methods.base.catalog import all_methods
from fairflare_lab.papers.presets import PaperTable, tables

ROOT = Path(__file__).parents[1]
METHODS_HEAD = """# Methods

Every method is a job folder (`jobs/NAME`), a recipe (`fairflare.recipes`) and a name that `fairflare run`, `compare`,
`describe` and `export` take.
A method's page says what it does, what leaves a site, where paper and published code differ, and what it reached here.
[Which method?](which_method.md) says what to try first.

- *fair to*: whom a group's methods help. Controls help nobody in particular; they belong into every comparison.
- *model*: one for all sites, or sites have tensors or a model of their own.
- *bytes*: whole models up / down in a round, *passes*: forward and backward passes of a step; FedAvg's are 1.
- *secure sums*: whether it is enough for the server to see sums of models. *DP*: whether it trains under
  [differential privacy](differential_privacy.md).
- *learns*: kinds of task that it can learn, its paper's first (`--task` chooses).
- *measured*: difference of the worst site to FedAvg, by page of results (its first table; of a method with forms the
  first one); `*` better, `!` worse, else it cannot be told. No entry: not compared.
- *beside*: the largest difference, over some rounds, to what tests compare the method with: the authors' code (at a
  commit), the paper's *text*, or numbers found by *hand*. The pages name deviations.
"""
PAPERS_HEAD = """# The papers' experiments

`fairflare run METHOD --paper` takes the settings of the first paper on this page whose table has the method,
`--paper NAME` those of the named paper. `fairflare compare --preset TABLE` runs the rows of a paper's table and prints
the table's columns, in a quick job's size, or with `--paper` in the paper's size. The values stand in
`custom/fairflare/papers/*.yaml`, each with its source: a place in the text, the authors' code, or "ours" with the
reason. A test compares them with `tests/papers.csv`, which was entered from the papers once more.
"""
Setting = tuple[str, str]  # method and name
Value = tuple[str, str]  # value as JSON, and its source


def pages() -> dict[str, str]:
    """Return the pages by their path in ``docs/``.

    Raises:
        ValueError: a declared field says not what it is (names it).
    """
    return {
        "index.md": front_page((ROOT / "README.md").read_text(encoding="utf-8")),
        "methods.md": methods_page(),
        "papers.md": papers_page(),
        "what_leaves.md": privacy.page(),
    }


def front_page(readme: str) -> str:
    """Return the text of README.md as a page in ``docs/``, whose links lead on from there."""

    def moved(link: re.Match[str]) -> str:
        return f"]({link[1].removeprefix('docs/') if link[1].startswith('docs/') else '../' + link[1]})"

    return re.sub(r"\]\((?!https?:|mailto:|#)([^)\s]+)\)", moved, readme)


def methods_page() -> str:
    """Return the page of all methods: what each is, what it costs, and what came out where it was compared."""
    table = describe.method_table({"measured": measured(), "beside": beside()})
    return f"{METHODS_HEAD}\n{table}\n\nA method of your own is [one file](architecture.md#a-new-method-in-one-file).\n"


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
