"""Test the record of where a comparison's figures come from, written when its runs begin."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from fairflare_lab.cli.compare.provenance import FILE, checksums, commit_of, note_session, processor, sessions_of


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "images").mkdir(parents=True)
    for name in ("b", "a"):
        (folder / "images" / f"{name}.png").write_bytes(name.encode())
    listed = {"name": "x", "training": [{"image": "images/b.png", "label": 0}], "test": [{"image": "images/a.png"}]}
    (folder / "datalist.json").write_text(json.dumps(listed))
    (folder / "images" / "unlisted.png").write_bytes(b"not asked for")
    return folder


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_checksums_are_over_names_and_contents(site: Path) -> None:
    found = checksums({"sites": {"x": {"data_root": str(site)}, "server": {}}})
    lines = f"{sha(b'a')}  images/a.png\n{sha(b'b')}  images/b.png\n"
    assert found == {
        "x": {"datalist": sha((site / "datalist.json").read_bytes()), "files": 2, "sha256": sha(lines.encode())}
    }
    (site / "images" / "a.png").write_bytes(b"A")
    assert checksums({"data_root": str(site)})["all sites"]["sha256"] != found["x"]["sha256"]


def test_data_that_cannot_be_read_are_not_silently_left_out(site: Path) -> None:
    (site / "datalist.json").write_text("{")
    found = checksums({"sites": {"x": {"data_root": str(site)}, "y": {"data_root": str(site / "nowhere")}}})
    assert [list(of) for of in found.values()] == [["not recorded"], ["not recorded"]]
    assert found["x"]["not recorded"].startswith("JSONDecodeError")
    assert checksums({}) == {}


def test_sessions_are_added(tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = {"sites": {"x": {"data_root": str(site)}}}
    note_session(tmp_path / "c", ["fairflare", "compare"], local, ["a-seed0"])
    note_session(tmp_path / "c", ["fairflare", "compare"], local, [])
    assert "CHANGED" not in capsys.readouterr().err
    (site / "images" / "a.png").write_bytes(b"changed")
    note_session(tmp_path / "c", ["fairflare", "compare"], local, ["a-seed1"])
    assert "the data CHANGED since this comparison began" in capsys.readouterr().err
    first, _, second = sessions_of(tmp_path / "c")
    assert (first["runs"], second["runs"]) == (["a-seed0"], ["a-seed1"])
    assert first["processor"] == second["processor"] == processor() != ""
    assert {"fairflare", "python", "torch", "nvflare", "monai", "numpy"} == set(first["versions"])
    assert first["data"]["x"]["files"] == second["data"]["x"]["files"] == 2
    assert first["data"]["x"]["sha256"] != second["data"]["x"]["sha256"]
    (tmp_path / "c" / FILE).write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        sessions_of(tmp_path / "c")
    assert sessions_of(tmp_path / "nowhere") == []


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert commit_of(package) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "x", "--allow-empty")
    assert commit_of(package) is None, "a repository around an installed package is not the package's"
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-qm", "x")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(package) == head
    (tmp_path / "beside.txt").write_text("not of the package")
    assert commit_of(package) == head
    (package / "__init__.py").write_text("changed")
    assert commit_of(package) == f"{head} + changes"
