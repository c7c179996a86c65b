"""Test that tools/mutants.py distinguishes changes that tests notice, that they miss, and that are gone."""

from __future__ import annotations

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
