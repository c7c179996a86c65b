"""Test the Dockerfile as ``docker/check.py`` reads it; the files that it copies exist and are in the build context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ..loaded import loaded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return loaded("docker/check.py")


def test_continued_lines_and_comments(check: ModuleType) -> None:
    text = '# says why\nFROM python:3.11-slim\n\nRUN a \\\n    && b\nCMD ["c"]\n'
    assert check.instructions(text) == [("FROM", "python:3.11-slim"), ("RUN", "a && b"), ("CMD", '["c"]')]


def test_what_is_copied_is_there_and_let_into_a_build(check: ModuleType) -> None:
    lines = check.instructions((ROOT / "docker" / "Dockerfile").read_text())
    assert lines[0] == ("FROM", "python:3.11-slim")
    sources = [name for word, rest in lines if word == "COPY" for name in rest.split()[:-1]]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in sources:
        assert any(file == name or file.startswith(f"{name}/") for file in tracked), name
    assert {*sources} == check.admitted()
    assert {word for word, _ in lines} <= {"FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "CMD"}


def test_lines_act_on_a_tree(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str, list[str]]] = []
    tree = check.Tree(tmp_path, None)
    monkeypatch.setattr(tree, "run", lambda command, timeout=None: ran.append((tree.user, tree.folder, command)) or 0)
    for word, rest in (("WORKDIR", "/opt/x"), ("COPY", "LICENSE docker ./"), ("ENV", "A=1"), ("USER", "somebody")):
        if word == "COPY":
            monkeypatch.setattr(check, "admitted", lambda: {"LICENSE", "docker"})
        tree.take(word, rest)
    tree.take("RUN", "a && b")
    assert (tmp_path / "opt" / "x" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (tmp_path / "opt" / "x" / "Dockerfile").is_file()
    assert tree.env["A"] == "1"
    assert ran == [("somebody", "/opt/x", ["sh", "-c", "a && b"])]
    with pytest.raises(SystemExit, match="does not know ADD"):
        tree.take("ADD", "x y")
    monkeypatch.setattr(check, "admitted", set)
    with pytest.raises(SystemExit, match=r"\.dockerignore keeps LICENSE out"):
        tree.take("COPY", "LICENSE ./")


@pytest.mark.walk
@pytest.mark.timeout(1800)
def test_the_image_builds_where_docker_answers() -> None:
    if subprocess.run(["sh", "-c", "docker info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker answers; docker/check.py runs the lines without it, as root with debootstrap")
    subprocess.run([sys.executable, str(ROOT / "docker" / "check.py")], check=True)
