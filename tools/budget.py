"""Hold the packages to the sizes of ``budget.toml``: python tools/budget.py [--write]

Counted are statements of the syntax tree without imports and docstrings: of each room (a folder of ``custom``), of
everything (``whole``), and of what a site or a server can load (``closure``: every import followed, lazy ones too,
from FLARE's components, all methods and all tasks). A file has at most 600 lines, and a folder twelve files; lists of
equals stand by name. ``--write`` lowers what has shrunk and never raises a figure; who needs more edits the figure,
and the diff shows the decision.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib  # needs Python 3.11, which CI has

ROOT = Path(__file__).parents[1]
PACKAGES, BUDGET = ROOT / "custom", Path(__file__).with_name("budget.toml")
COMPONENTS = "executor stock_tasks client_api statistics controller evaluation aggregator persistor tracking"
STARTS = tuple(f"fairflare.flare.{name}" for name in COMPONENTS.split())
Budget = dict[str, Any]


def measured(packages: Path = PACKAGES) -> Budget:
    """Return the sizes of the packages in a folder, in the form of the budget file."""
    files: Counter[str] = Counter()
    sizes: Budget = {"whole": 0, "closure": 0, "file": {}, "folder": files, "rooms": Counter()}
    modules: dict[str, tuple[ast.Module, int]] = {}
    for path in sorted(packages.rglob("*.py")):
        text, where = path.read_text(encoding="utf-8"), path.relative_to(packages)
        tree, room = ast.parse(text), where.parent.as_posix()
        files[room] += path.name != "__init__.py"
        sizes["file"][where.as_posix()] = len(text.splitlines())
        if {"templates", "examples"} & set(where.parts):
            continue  # texts for users do not count
        count = sum(not is_doc(node) for node in statements(tree))
        sizes["rooms"][room] += count
        modules[".".join(where.with_suffix("").parts).removesuffix(".__init__")] = tree, count
    sizes["whole"] = sum(count for _, count in modules.values())
    sizes["closure"] = sum(modules[name][1] for name in loadable(modules))
    return sizes


def trees(packages: Path = PACKAGES) -> dict[str, ast.Module]:
    """Return the syntax tree of each module, by its dotted name; texts for users are left out."""
    found = {}
    for path in sorted(packages.rglob("*.py")):
        where = path.relative_to(packages)
        if not {"templates", "examples"} & set(where.parts):
            name = ".".join(where.with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement but imports."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not isinstance(n, (ast.Import, ast.ImportFrom)))


def is_doc(node: ast.AST) -> bool:
    """Return whether a statement is a text that stands for itself."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def loadable(modules: dict[str, tuple[ast.Module, int]]) -> set[str]:
    """Return the modules that a site or a server can load."""
    lists = ("fairflare.methods.", "fairflare.tasks.")
    todo, seen = [name for name in modules if name in STARTS or name.startswith(lists)], set[str]()
    while todo:
        name = todo.pop()
        if name in modules and name not in seen:
            seen.add(name)
            todo += [name.rpartition(".")[0], *imported(modules[name][0])]
    return seen


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module imports, wherever it does so but for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        yield from imported(node)


def broken(sizes: Budget, budget: Budget) -> list[str]:
    """Return a sentence for each size above its budget; a room without a budget has none to use."""
    found = [
        f"{name}: {sizes[name]} statements, at most {budget[name]}"
        for name in ("whole", "closure")
        if sizes[name] > budget[name]
    ]
    found += [
        f"room {room}: {size} statements, at most {budget['rooms'].get(room, 0)}"
        for room, size in sizes["rooms"].items()
        if size > budget["rooms"].get(room, 0)
    ]
    for kind, unit in (("file", "lines"), ("folder", "files")):
        most = {name: budget["larger"].get(name, budget["limits"][kind]) for name in sizes[kind]}
        found += [
            f"{kind} {name}: {n} {unit}, at most {most[name]}" for name, n in sizes[kind].items() if n > most[name]
        ]
    return found


def written(sizes: Budget, budget: Budget) -> str:
    """Return the text of the budget file with everything lowered that has shrunk."""
    rooms = {room: min(size, budget["rooms"].get(room, size)) for room, size in sizes["rooms"].items() if size}
    larger = {n: min(sizes["folder"][n], most) for n, most in budget["larger"].items() if n in sizes["folder"]}
    return "\n".join(
        [
            "# Sizes that tools/budget.py holds; growth is a decision that the diff of this file shows.",
            *(f"{name} = {min(sizes[name], budget[name])}" for name in ("whole", "closure")),
            *("", "[limits]", *(f"{kind} = {limit}" for kind, limit in budget["limits"].items())),
            *("", "[larger]  # folders that are lists of equals", *(f'"{n}" = {most}' for n, most in larger.items())),
            *("", "[rooms]", *(f'"{room}" = {size}' for room, size in rooms.items()), ""),
        ]
    )


def main() -> None:
    """Print what is above its budget, or the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    budget, sizes = tomllib.loads(BUDGET.read_text(encoding="utf-8")), measured()
    if arguments.write:
        BUDGET.write_text(written(sizes, budget), encoding="utf-8")
        budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    problems = broken(sizes, budget)
    print("\n".join(problems) or f"within budget: {sizes['whole']} statements, {sizes['closure']} at a site or server")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
