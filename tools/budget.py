"""Holds the package to the sizes of ``budget.toml``: python tools/budget.py [--write]

A room is a folder of ``custom/fairflare``. Counted are its statements (of the syntax tree: without docstrings and
imports), its functions, its lines and its files; of a file and of a class the lines; of a method's file the lines of
code (neither blank, nor comment, docstring or import). A file or class above the limit stands by name with a size of
its own, which may only shrink.
``--write`` lowers what has shrunk and takes the present sizes of rooms; growth is then a decision that the diff shows.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomllib  # of Python 3.11, as CI has

ROOT = Path(__file__).parents[1]
PACKAGE, BUDGET = ROOT / "custom" / "fairflare", Path(__file__).with_name("budget.toml")
HEAD = "# Sizes that tools/budget.py holds; growth is a decision that the diff of this file shows."
STEP = {"statements": 10, "functions": 5, "lines": 50}  # to which a room's budget is rounded up
KINDS = (*STEP, "file", "class", "method", "folder")
Sizes = dict[str, dict[str, int]]


def measured(package: Path = PACKAGE) -> Sizes:
    """Size by name for each kind of :data:`KINDS`."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for path in sorted(package.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()
        tree, room = ast.parse(text), path.parent.relative_to(package).as_posix()
        found["folder"][room] += path.name != "__init__.py"
        found["statements"][room] += sum(not is_doc(node) for node in statements(tree))
        found["functions"][room] += sum(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(tree))
        found["file"][name] = len(text.splitlines())
        found["lines"][room] += found["file"][name]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found["class"][f"{name}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
        if room == "methods":
            found["method"][name] = lines_of_code(text, tree)
    return {kind: dict(sizes) for kind, sizes in found.items()}


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All but imports."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not isinstance(n, (ast.Import, ast.ImportFrom)))


def is_doc(node: ast.AST) -> bool:
    """A text that stands for itself."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of_code(text: str, tree: ast.AST) -> int:
    """Lines that are neither blank, nor comment, docstring or import."""
    left_out = [n for n in ast.walk(tree) if is_doc(n) or isinstance(n, (ast.Import, ast.ImportFrom))]
    gone = {line for node in left_out for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for number, line in lines if number not in gone)


def broken(sizes: Mapping[str, Mapping[str, int]], budget: Mapping[str, Any]) -> list[str]:
    """What is above its budget, a sentence each; a room without one, and an exception that is not needed any more."""
    found = []
    for kind, limit in budget["limits"].items():
        own = budget["larger"].get(kind, {})
        found += [
            f"{kind} {name}: {size} {'files' if kind == 'folder' else 'lines'}, at most {own.get(name, limit)}"
            for name, size in sizes[kind].items()
            if size > own.get(name, limit)
        ]
        found += [
            f"{kind} {name} needs no exception any more: take it out of tools/budget.toml"
            for name in own
            if sizes[kind].get(name, 0) <= limit
        ]
    for kind in STEP:
        rooms = {room: entry[kind] for room, entry in budget["rooms"].items()}
        found += [f"room {room!r} has no budget in tools/budget.toml" for room in sizes[kind] if room not in rooms]
        found += [
            f"room {room!r}: {sizes[kind].get(room, 0)} {kind}, at most {most}"
            for room, most in rooms.items()
            if sizes[kind].get(room, 0) > most
        ]
    return found


def written(sizes: Mapping[str, Mapping[str, int]], budget: Mapping[str, Any]) -> str:
    """The budget file for the present sizes; an exception never grows."""
    text = [
        "# Sizes that tools/budget.py holds; growth is a decision that the diff of this file shows.",
        "",
        "[limits]",
    ]
    text += [f"{kind} = {limit}" for kind, limit in budget["limits"].items()]
    for kind, limit in budget["limits"].items():
        old = budget["larger"].get(kind, {})
        above = {name: min(size, old.get(name, size)) for name, size in sizes[kind].items() if size > limit}
        text += ["", f"[larger.{kind}]  # may only shrink", *(f'"{name}" = {size}' for name, size in above.items())]
    text += ["", "[rooms]"]
    for room in sizes["lines"]:
        most = {kind: math.ceil(sizes[kind][room] / step) * step for kind, step in STEP.items()}
        text.append(f'"{room}" = {{ {", ".join(f"{kind} = {size}" for kind, size in most.items())} }}')
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    budget, sizes = tomllib.loads(BUDGET.read_text(encoding="utf-8")), measured()
    if given.write:
        BUDGET.write_text(written(sizes, budget), encoding="utf-8")
        budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    problems = broken(sizes, budget)
    totals = ", ".join(f"{sum(sizes[kind].values())} {kind}" for kind in STEP)
    print("\n".join(problems) or f"within budget: {totals}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
