"""Break statements of the packages drawn at random, and run the tests that name what was broken.

python tools/mutants.py --random N --seed S [--rooms ROOM ...] [--jobs N] [--seconds S]

A statement is drawn by a hash of seed, module, function and its own text, so the same N are drawn again whatever
happens to other lines, and so is the change: another comparison, operator, constant or branch, swapped or missing
arguments, an assignment in place of a sum, an empty return, a deleted statement. Each change is written into a copy of
``custom`` that a forked process puts before all other packages, and into PYTHONPATH: the process imports the packages
from that copy, and so does every process that a test starts. All other packages were imported before the fork.

Tests are chosen by what they name: the module, the function, the other definitions in the module, and the modules that
import it. They run file by file, those of a file that name the function first, until one fails (``died``) or the
processor time is spent (``survived``). A test that hangs or crashes fails. At the end all tests that a change failed
run without any change; where one fails, the exit code is 2.
"""

from __future__ import annotations

import ast
import compileall
import copy
import hashlib
import importlib
import inspect
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES, TESTS = ROOT / "custom", ROOT / "tests"
FILES = 4  # of tests that are imported at once
HANGS = 60  # seconds of the processor that no single test needs
MEMORY = 8 << 30  # bytes that a test may hold
FARTHER = 0.3  # what a mention of a module that imports the broken one counts, beside one of the broken one
NETWORKS = {"e2e", "fuzz", "gpu"}  # folders of tests that start networks, or need a GPU
LEFT_OUT = {"templates", "examples"}  # texts for users
OTHER: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.Pow: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.Mult,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,),
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Describe a change of one statement: file and line, the text before and after, and the functions around it."""

    path: Path
    line: int
    before: str
    after: str
    text: str  # of the whole changed file
    around: tuple[str, ...]

    @property
    def module(self) -> str:
        """Return the dotted name of the changed module."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """Return the name by which a file of the packages is imported."""
    return ".".join(path.relative_to(PACKAGES).with_suffix("").parts).removesuffix(".__init__")


# ------------------------------------------------------------------------------------------------ drawing


def drawn(count: int, seed: int, rooms: Sequence[str]) -> list[Change]:
    """Return as many changes of statements in rooms (folders, files) as asked for; each of another statement."""
    found: list[tuple[str, Callable[[], Change]]] = []
    for path in sources(rooms):
        text, seen = path.read_text(encoding="utf-8"), Counter[str]()
        for statement, around, nodes in statements(ast.parse(text)):
            options = [option for node in nodes for option in replacements(node)]
            if options:
                name = f"{dotted(path)} {'.'.join(around)} {ast.unparse(statement)}"
                seen[name] += 1
                key = hashlib.sha256(f"{seed} {name} {seen[name]}".encode()).hexdigest()
                node, new = options[int(key[-8:], 16) % len(options)]
                found.append((key, lambda path=path, text=text, node=node, new=new, around=around:
                              changed(path, text, node, new, around)))  # fmt: skip
    return [make() for _, make in sorted(found, key=lambda one: one[0])[:count]]


def sources(rooms: Sequence[str] = ()) -> list[Path]:
    """Return the files of rooms (folders or files of any of the packages); of all of them without a room."""
    found = [path for path in PACKAGES.rglob("*.py") if not LEFT_OUT & {*path.parts}]
    within = {path: Path(*path.relative_to(PACKAGES).parts[1:]) for path in found}
    return sorted(path for path in found if not rooms or any(within[path].is_relative_to(room) for room in rooms))


def statements(tree: ast.AST) -> Iterator[tuple[ast.stmt, tuple[str, ...], list[ast.AST]]]:
    """Yield each statement, the names of classes and functions around it, and the nodes that are its own."""

    def visit(node: ast.AST, around: tuple[str, ...]) -> Iterator[Any]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                yield from visit(child, (*around, child.name))
            elif isinstance(child, ast.stmt):
                if not isinstance(child, ast.Import | ast.ImportFrom) and not is_text(child):
                    yield child, around, [child, *parts(child)]
                yield from visit(child, around)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from visit(child, around)

    yield from visit(tree, ())


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions of a statement, without types."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            other = isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case | ast.JoinedStr)
            if isinstance(child, ast.AST) and not other and name != "annotation":
                yield child
                yield from parts(child)


def is_text(node: ast.AST) -> bool:
    """Return whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def replacements(node: ast.AST) -> list[tuple[ast.AST, str]]:
    """Return the changes of a node, each with the node whose text is replaced and the new text."""

    def with_(**fields: Any) -> tuple[ast.AST, str]:
        new = copy.copy(node)
        vars(new).update(fields)
        text = ast.unparse(ast.fix_missing_locations(new))
        return node, f"({text})" if isinstance(node, ast.expr) and not isinstance(node, ast.Call) else text

    match node:
        case ast.Compare(ops=[first, *rest]):
            return [with_(ops=[other(), *rest]) for other in OTHER.get(type(first), ())]
        case ast.BinOp(op=op):
            return [with_(op=other()) for other in OTHER.get(type(op), ())]
        case ast.BoolOp(op=op, values=[first, *rest]):
            return [
                with_(op=OTHER[type(op)][0]()),
                (node, f"({ast.unparse(first)})"),
                (node, f"({ast.unparse(rest[-1])})"),
            ]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return [(node, f"({ast.unparse(operand)})")]
        case ast.IfExp(body=body, orelse=orelse):
            return [(node, f"({ast.unparse(body)})"), (node, f"({ast.unparse(orelse)})")]
        case ast.Constant(value=bool(value)):
            return [(node, str(not value))]
        case ast.Constant(value=int(value)):
            return [(node, str(value + 1)), *([(node, str(value - 1))] if value > 0 else [])]
        case ast.Constant(value=float(value)):
            return [(node, repr(2 * value or 1.0))]
        case ast.Call(args=args, keywords=keywords) if not is_log(node):
            swapped = [*args[:-2], *args[-1:], *args[-2:-1]]
            fewer = [[*keywords[:k], *keywords[k + 1 :]] for k, one in enumerate(keywords) if one.arg]
            plain = len(args) > 1 and not any(isinstance(one, ast.Starred) for one in args)
            return [*([with_(args=swapped)] if plain else []), *(with_(keywords=left) for left in fewer)]
        case ast.AugAssign(target=target, op=op, value=value):
            others = [with_(op=other()) for other in OTHER.get(type(op), ())]
            return [*others, (node, f"{ast.unparse(target)} = {ast.unparse(value)}"), (node, "pass")]
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return [(node, "return None")]
        case ast.If(test=test) | ast.While(test=test):
            return [(test, f"(not ({ast.unparse(test)}))")]
        case ast.Raise() | ast.Delete() | ast.Assert() | ast.Break() | ast.Continue():
            return [(node, "pass")]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return [(node, "pass")]
        case ast.Expr(value=ast.Call() as call) if not is_log(call):
            return [(node, "pass")]
    return []


def is_log(call: ast.Call) -> bool:
    """Return whether a call writes to the log."""
    return ast.unparse(call.func).startswith("log.")


def changed(path: Path, text: str, node: Any, new: str, around: tuple[str, ...]) -> Change:
    """Return the change that puts a new text in the place of a node."""
    lines = text.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
    whole = text[:start] + new + text[end:]
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    before, after = text[first:last], whole[first : last + len(whole) - len(text)]
    return Change(path, node.lineno, " ".join(before.split()), " ".join(after.split()), whole, around)


# ------------------------------------------------------------------------------------------------ choosing tests


class Choice:
    """Rank the files of tests for a change by what they name."""

    def __init__(self) -> None:
        self.words: dict[Path, set[str]] = {}
        for path in sorted(TESTS.rglob("test_*.py")):
            if path.parent.name in NETWORKS:
                continue
            text = path.read_text(encoding="utf-8")
            self.words[path] = {*re.findall(r"\w+", text), *re.findall(r"\w+(?:\.\w+)+", text)}
        self.common = Counter(word for words in self.words.values() for word in words)
        self.defined: dict[str, set[str]] = {}
        self.users: dict[str, set[str]] = {}
        for path in sources():
            text, name = path.read_text(encoding="utf-8"), dotted(path)
            self.defined[name] = {name, *re.findall(r"^(?:class |def )?(\w{4,})\b", text, re.MULTILINE)}
            for used in re.findall(r"^ *from ([\w.]+) import", text, re.MULTILINE):
                self.users.setdefault(used, set()).add(name)

    def ranked(self, change: Change) -> list[Path]:
        """Return the files that name the change's surroundings, the best first."""
        weights = Counter[str]()
        weight, near, seen = 1.0, {change.module}, set[str]()
        while near and weight > FARTHER**3:
            for module in near:
                weights[module] += 20 * weight
                for name in self.defined.get(module, ()):
                    weights[name] = max(weights[name], weight)
            seen |= near
            near = {user for module in near for user in self.users.get(module, ())} - seen
            weight *= FARTHER
        for name in change.around:
            weights[name] += 3
        named = {*re.findall(r"[a-z]{4,}", change.module)}
        scores = Counter[Path]()
        for path, words in self.words.items():
            lists = sum(word.startswith("fairflare") for word in words)  # who names every module tests none
            score = sum(weights[word] / self.common[word] for word in words & weights.keys())
            scores[path] = (score + 2 * len(named & {*path.stem.split("_")})) / (1 + lists) ** 0.5
        return [path for path, score in scores.most_common() if score > 0]


# ------------------------------------------------------------------------------------------------ running


class Watch:
    """Put tests that name the broken function first, note the first that fails, and stop when the time is spent."""

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        self.names, self.seconds = names, seconds
        self.ran, self.failed = 0, list[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Sort the tests."""

        def far(item: Any) -> bool:
            with suppress(OSError, TypeError):
                return not any(name in inspect.getsource(item.function) for name in self.names)
            return True

        items.sort(key=far)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a result."""
        self.ran += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_teardown(self, item: Any) -> None:
        """End the run when the time is spent."""
        if time.process_time() > self.seconds:
            item.session.shouldstop = "the time is spent"


def begin(change: Change | None, files: Sequence[Sequence[str]], seconds: float, folder: Path) -> int:
    """Fork a process that runs tests against a copy of the packages, changed or not; return its number."""
    packages = Path(shutil.copytree(PACKAGES, folder / "custom"))
    if change:
        (path := packages / change.path.relative_to(PACKAGES)).write_text(change.text, encoding="utf-8")
        Path(cache_from_source(path)).unlink(missing_ok=True)
    if process := os.fork():
        return process
    try:
        os.setsid()
        with (folder / "output").open("w") as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
        sys.path.insert(0, str(packages))
        os.environ.update(PYTHONPATH=str(packages), OMP_NUM_THREADS="1")
        limit = time.process_time() + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit + HANGS), int(limit + HANGS + 5)))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        watch, code = Watch(change.around[-1:] if change else (), limit), 0
        for chunk in files:
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-o", "timeout=300", *chunk], [watch]))
            if watch.failed or code not in (0, 2, 5) or time.process_time() > limit:
                break
        where = str(packages) in str(getattr(sys.modules.get(change.module if change else ""), "__file__", packages))
        told = {"failed": watch.failed, "ran": watch.ran, "code": code, "copy": where, "seconds": time.process_time()}
        (folder / "told.json").write_text(json.dumps(told))
    finally:
        os._exit(0)


def verdict(folder: Path) -> tuple[str, str]:
    """Return what became of a change, and by what."""
    if not (path := folder / "told.json").is_file():
        return "died", "the process of the tests ended"
    told = json.loads(path.read_text())
    if not told["copy"]:
        raise SystemExit(f"the tests did not run the changed file: {folder}")
    if told["failed"]:
        return "died", told["failed"][0]
    if told["code"] not in (0, 2, 5):
        return "died", f"pytest ended with code {told['code']}"
    return ("survived", f"{told['ran']} tests in {told['seconds']:.0f} s") if told["ran"] else ("untested", "no test")


def run(count: int, seed: int, rooms: Sequence[str], jobs: int, seconds: float) -> int:
    """Draw changes, run their tests, print what became of each, and return the exit code."""
    changes, choice = drawn(count, seed, rooms), Choice()
    import_others()
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    compileall.compile_dir(PACKAGES, quiet=2)
    counts, killers, running = Counter[str](), set[str](), dict[int, tuple[int, Change, Path]]()
    waiting = [*enumerate(changes, 1)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, change = waiting.pop(0)
                (folder := Path(place) / str(number)).mkdir()
                ranked = list(map(str, choice.ranked(change)))
                chunks = [ranked[k : k + FILES] for k in range(0, len(ranked), FILES)]
                running[begin(change, chunks, seconds, folder)] = number, change, folder
            process, _ = os.wait()
            number, change, folder = running.pop(process)
            what, why = verdict(folder)
            counts[what] += 1
            killers |= {why} if what == "died" and "::" in why else set()
            print(f"{number:3} {what:8} {change.path.relative_to(PACKAGES)}:{change.line} {'.'.join(change.around)}")
            print(f"      - {change.before}\n      + {change.after}\n      {why}", flush=True)
            shutil.rmtree(folder)
        (folder := Path(place) / "plain").mkdir()
        os.waitpid(begin(None, [sorted(killers)] if killers else [], 1e6, folder), 0)
        told = json.loads((folder / "told.json").read_text())
        if told["failed"]:
            print((folder / "output").read_text()[-3000:], "\nthis test fails without any change:", *told["failed"])
    print(f"{counts['died']} of {len(changes)} died; seed {seed}, {' '.join(rooms) or 'all rooms'}; {dict(counts)}")
    return 2 if told["failed"] else 0


def import_others() -> None:
    """Import what the packages and their tests import of others, which every forked process then has."""
    ours = {path.name for path in PACKAGES.iterdir()} | {TESTS.name}
    names: set[str] = set()
    for path in (*sources(), *TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
    for name in sorted(names):
        if name.partition(".")[0] not in ours:
            with suppress(Exception):
                importlib.import_module(name)
