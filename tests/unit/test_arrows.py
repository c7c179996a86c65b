"""Test which part of the packages may import which."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import budget

#: Rooms in their order: one may import those in front of it.
ORDER = ("base", "core", "exchange", "methods", "federation", "flare")


@cache
def imports() -> dict[str, set[str]]:
    """Return what each module imports when it runs, at its top or within a function; hints for types aside."""
    trees = budget.trees()
    return {name: {other for other in budget.imported(tree) if other in trees} for name, tree in trees.items()}


def test_no_two_modules_import_each_other() -> None:
    found = imports()
    pairs = [(one, other) for one in found for other in found[one] if one < other and one in found[other]]
    assert [pair for pair in pairs if not pair[1].startswith(f"{pair[0]}.")] == []  # a package hands on its modules


def test_a_site_never_needs_the_lab() -> None:
    ours = {name: of for name, of in imports().items() if not name.startswith("fairflare_lab")}
    assert [(name, other) for name, of in ours.items() for other in of if other.startswith("fairflare_lab")] == []


@pytest.mark.parametrize(("low", "high"), [(a, b) for i, a in enumerate(ORDER) for b in ORDER[i + 1 :]])
def test_no_arrow_runs_back_up(low: str, high: str) -> None:
    of_room = {name: of for name, of in imports().items() if name.startswith(f"fairflare.{low}.")}
    assert [(n, o) for n, of in of_room.items() for o in of if o.startswith(f"fairflare.{high}.")] == []


def test_what_scripts_import_is_there() -> None:
    """Look at scripts that no test runs: a renamed class would be met hours into a benchmark."""
    places = [Path(__file__).parents[2] / place for place in ("benchmarks", "tools", "docs", "jobs")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for place in places for file in place.rglob("*.py")]
    wanted = {
        (f"{node.module}", one.name)
        for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        for one in node.names
        if f"{node.module}".startswith("fairflare") and f"{node.module}.{one.name}" not in imports()
    }
    lacking = [(module, name) for module, name in sorted(wanted) if not hasattr(import_module(module), name)]
    # Names for type checkers alone are in the text.
    assert [one for one in lacking if f"{one[1]}: TypeAlias" not in inspect.getsource(import_module(one[0]))] == []


NINE = {"found", "of", "own", "told", "kept", "said", "half", "made", "at"}  # words that do not say what a value is


def test_names_say_what_a_value_is() -> None:
    """Count what is named by one of nine words; the number may only fall."""
    nodes = [node for tree in budget.trees().values() for node in ast.walk(tree)]
    bound = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    bound += [n.arg for n in nodes if isinstance(n, ast.arg)]
    bound += [n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and n.name]
    bound += [n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assert sum(name in NINE for name in bound) <= 412


PREPOSITIONS = re.compile(
    "_*(of|on|in|at|to|by|for|from|with|without|after|before|over|under|within|beyond|until|as|into|onto|beside|between|"
    "among|through|per|like|against|about|behind|above|below)(_|$)"
)


#: Participles that are no verb, too; those in -ed are counted apart.
PARTICIPLES = re.compile(
    "_*(told|made|found|kept|said|shown|drawn|given|left|built|sent|met|held|known|taken|written|chosen|begun|done|gone|"
    "dealt|brought|felt|lost|bought|caught|spelt|driven|hidden|meant|paid|sold|spent|stood|thought|understood|won|wound|"
    "frozen|broken|spoken|risen)(_|$)"
)


def test_functions_are_named_by_verbs() -> None:
    """Count functions whose names begin with a preposition or a participle; the number may only fall."""
    nodes = [node for tree in budget.trees().values() for node in ast.walk(tree)]
    names = [n.name for n in nodes if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")]
    assert sum(bool(PREPOSITIONS.match(name) or PARTICIPLES.match(name)) for name in names) <= 45


def test_functions_named_by_a_participle_in_ed() -> None:
    """Count functions, not properties, whose first word is no verb but ends in -ed; the number may only fall."""
    nodes = [node for tree in budget.trees().values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions = [node.name for node in nodes if not any("property" in ast.unparse(d) for d in node.decorator_list)]
    firsts = [name.strip("_").partition("_")[0] for name in functions if not name.startswith("__")]
    verbs = {"embed", "feed", "heed", "need", "red", "seed"}
    assert sum(first.endswith("ed") and first not in verbs for first in firsts) <= 52


def test_no_two_classes_of_a_package_have_one_name() -> None:
    """Compare the names of classes without regard to case."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for module, tree in budget.trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                by_name.setdefault((module.partition(".")[0], node.name.lower()), []).append(module)
    assert {name: modules for name, modules in by_name.items() if len(modules) > 1 and name[1] != "task"} == {}


COMMANDS = {"run", "plan_options", "evaluate", "predict", "compare"}  # ``fairflare.run`` is like one, too


def test_functions_are_short() -> None:
    """Hold functions to 45 statements, imports and nested ones too, and those of no command to 9 parameters."""
    sizes = {}
    for module, tree in budget.trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                statements = sum(isinstance(n, ast.stmt) for part in node.body for n in ast.walk(part))
                names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                few = len(names) <= 9 or node.name == "__init__" or node.name in COMMANDS
                sizes[f"{module}.{node.name} {statements} {len(names)}"] = statements <= 45 and few
    assert [name for name, short in sizes.items() if not short] == []


#: Files that test sentences; others tell a refusal from another by its site, field and value.
SENTENCES = {"test_checks.py", "test_settings.py", "test_true_sentences.py"}


def patterns(function: ast.FunctionDef) -> list[ast.expr]:
    """Return what a test matches messages with, also where a name stands for it."""
    nodes = list(ast.walk(function))
    texts = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "match"]
    names = {node.id for text in texts for node in ast.walk(text) if isinstance(node, ast.Name)}
    calls = [node for node in function.decorator_list if isinstance(node, ast.Call)]
    tables = [(call.args[0], call.args[1]) for call in calls if len(call.args) > 1]
    tables += [(node.target, node.iter) for node in nodes if isinstance(node, ast.For)]
    tables += [(node.targets[0], ast.List([node.value])) for node in nodes if isinstance(node, ast.Assign)]
    for head, rows in tables if names else []:
        words = re.findall(r"\w+", ast.unparse(head))
        for row in getattr(rows, "elts", []):
            cells = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [row])
            texts += [cell for word, cell in zip(words, cells, strict=False) if word in names]
    return texts


def test_messages_are_matched_by_few_words() -> None:
    """Hold the text of each ``match=`` to 45 characters, where the sentence is not the thing tested."""
    long = []
    for path in (path for path in Path(__file__).parents[1].rglob("*.py") if path.name not in SENTENCES):
        for function in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)):
            parts = [[n.value for n in ast.walk(text) if isinstance(n, ast.Constant)] for text in patterns(function)]
            long += [(path.name, text) for text in parts if sum(len(one) for one in text if isinstance(one, str)) > 45]
    assert long == []
