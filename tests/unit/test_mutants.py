"""Test that tools/mutants.py distinguishes changes that tests notice, that they miss, and that are gone."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..loaded import loaded

pytest.importorskip("tomllib")  # of Python 3.11
TEST = "from half import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
HALF = "def half(number):\n    # half\n    return number / 2\n"
ENTRY = """
[[mutant]]
name = "{0}"
room = "room"
module = "{1}"
before = "{0}"
after = "# 3"
tests = ["{2}"]
dies = true
"""


def test_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # sooner
    tool = loaded("tools/mutants.py")
    packages, listed, test = tmp_path / "custom", tmp_path / "mutants.toml", tmp_path / "test_half.py"
    packages.mkdir()
    (packages / "half.py").write_text(HALF)
    test.write_text(TEST)
    for name, path in (("ROOT", tmp_path), ("PACKAGES", packages), ("LIST", listed)):
        monkeypatch.setattr(tool, name, path)
    entries = [("/ 2", "moved.away", test), ("# half", "half", test), ("/ 4", "half", test), ("half", "half", test)]
    listed.write_text(
        "dead = 2\n" + "".join(ENTRY.format(*entry) for entry in [*entries, ("number /", "half", "test_gone.py")])
    )
    assert tool.main([]) == 1  # one died where two did
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["killed", "alive", "lost", "lost", "lost"]
    assert last.startswith("1 of 5 killed, 2 before")
    assert (packages / "half.py").read_text() == HALF
    assert tool.main(["--only", "/ 2"]) == 0
    test.write_text(TEST.replace("2", "3"))
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--only", "/ 2"])


# ------------------------------------------------------------------------------------------------ drawn at random

ROOT = Path(__file__).parents[2]
THREE = """
def half(number):
    return number / 2


def twice(number):
    return number * 2


def unknown(number):
    return number + 1
"""
TESTS_OF_TWO = """
import subprocess
import sys

from pack.room.three import half


def test_half():
    assert half(4) == 2


def test_twice_in_a_process_that_imports_from_the_disk():
    code = "from pack.room.three import twice; print(twice(3))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "6\\n"
"""


def test_drawn_changes_run_in_forked_processes_and_in_those_that_they_start(tmp_path: Path) -> None:
    room, tests = tmp_path / "custom" / "pack" / "room", tmp_path / "tests"
    for folder in (room, tests):
        folder.mkdir(parents=True)
    (room / "three.py").write_text(THREE)
    (tests / "test_three.py").write_text(TESTS_OF_TWO)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")

    def run() -> tuple[int, list[str]]:
        command = [sys.executable, tmp_path / "tools/mutants.py", "--random", "3", "--seed", "7", "--rooms", "room"]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # sooner
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout.splitlines()

    def texts(lines: list[str]) -> list[str]:
        return sorted(line for line in lines if line.startswith(("      -", "      +")))

    code, lines = run()
    verdicts = {line.split()[-1]: line.split()[1] for line in lines if "room/three.py:" in line}
    assert verdicts == {"half": "died", "twice": "died", "unknown": "survived"}, lines
    assert (code, lines[-1]) == (0, "2 of 3 died; seed 7, room; {'died': 2, 'survived': 1}")
    assert (room / "three.py").read_text() == THREE
    (room / "three.py").write_text("# a line more\n" + THREE)
    assert texts(run()[1]) == texts(lines)
    (tests / "test_three.py").write_text(TESTS_OF_TWO.replace("== 2", "== 3"))
    code, lines = run()
    assert code == 2
    assert any("this test fails without any change: tests/test_three.py::test_half" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a = b < c", {"a = (b <= c)", "a = (b >= c)"}),
        ("a[b] += c", {"a[b] -= c", "a[b] = c", "pass"}),
        ("f(a, b, c, d=1)", {"f(a, c, b, d=1)", "f(a, b, c)", "pass", "f(a, b, c, d=2)", "f(a, b, c, d=0)"}),
        ("return a if b else 0.5", {"return None", "return (a)", "return (0.5)", "return a if b else 1.0"}),
        ("if a and not b:\n    pass", {
            "if (not (a and (not b))):", "if (a or not b):", "if (a):", "if (not b):", "if a and (b):",
        }),
        ("raise ValueError", {"pass"}),
        ("log.warning(a, b)", set()),
        ("'a text'", set()),
    ],
)  # fmt: skip
def test_what_can_be_changed(text: str, changes: set[str], tmp_path: Path) -> None:
    tool = loaded("tools/random_mutants.py")
    _, _, nodes = next(iter(tool.statements(ast.parse(text))), (None, None, []))
    found = [tool.changed(tmp_path, text, *option, ()) for node in nodes for option in tool.replacements(node)]
    assert {one.text.splitlines()[0] for one in found} == changes


def test_every_listed_text_is_still_where_it_is_to_be_broken() -> None:
    """Check that the list can be read, counts itself, and that no change moved a text or its tests away."""
    import tomllib

    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "tests/mutants.toml").read_text(encoding="utf-8"))
    assert listed["dead"] == sum(entry["dies"] for entry in listed["mutant"])
    for entry in listed["mutant"]:
        source = root.joinpath("custom", *entry["module"].split(".")).with_suffix(".py")
        assert source.read_text(encoding="utf-8").count(entry["before"]) == 1, entry["name"]
        assert all((root / test.partition("::")[0]).exists() for test in entry["tests"]), entry["name"]
