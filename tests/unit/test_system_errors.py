"""Every option and argument that names a path: one that cannot be used is one line with the path, whatever is wrong."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command

from fairflare.base.disk.files import system_error, write_whole
from fairflare.cli import commands
from .report_runs import document

#: What each command needs besides, so that it gets to the path; ``{}`` is the folder of the test.
OTHERWISE = {
    "adapt": "{}/run --data {}/images --out {}/out.pt", "check-data": "{}/sites.json", "compare": "fed_avg fed_prox",
    "doctor": "", "examples": "method", "export": "fed_avg --out {}/jobs", "landscape": "{}/run --out {}/new",
    "policies": "", "predict": "{}/run --images {}/images --out {}/new", "report": "{}/run", "run": "fed_avg --in-process",
    "show": "{}/run", "similarity": "{}/run --out {}/new", "stats": "--data {}/sites.json",
    "phantom": "--out {}/new",
    "prepare folders": "--site a {}/images {}/images --out {}/new",
    "prepare images": "--source {}/images --out {}/new", "prepare masks": "--source {}/images --out {}/new",
    "prepare volumes": "--source {}/images --out {}/new",
}  # fmt: skip
#: Nobody can use these, whoever asks.
BAD: dict[str, Callable[[Path], str]] = {
    "below a file": lambda folder: str(folder / "sites.json" / "below"),
    "that nobody may write": lambda folder: "/sys/fairflare",
    "with a name that is too long": lambda folder: str(folder / ("n" * 300)),
    "that is not there": lambda folder: str(folder / "nothing" / "here"),
    "that cannot be read": lambda folder: "/proc/self/mem",
    "of the other kind": lambda folder: str(folder / "images"),
}


def options() -> Iterator[tuple[str, str]]:
    """Each command's options and arguments that are paths."""
    for name, command in get_command(commands.app).commands.items():  # type: ignore[attr-defined]
        for given in command.params:
            if "Path" in str(given.type_descriptor.annotation):
                yield name, given.opts[0]
    yield from (("prepare folders", "--out"), ("prepare volumes", "--out"), ("prepare masks", "--source"))
    yield from (("prepare images", "--source"), ("prepare images", "--out"), ("prepare volumes", "--source"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (images := tmp_path / "images").mkdir()
    for split in ("training", "validation", "test"):
        Image.new("L", (32, 32), 7).save(images / f"{split}.png")
    entries = {s: [{"image": f"{s}.png", "label": 0}] for s in ("training", "validation", "test")}
    (tmp_path / "images" / "datalist.json").write_text(json.dumps(entries))
    (tmp_path / "sites.json").write_text(json.dumps({"sites": {"a": {"data_root": str(tmp_path / "images")}}}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(json.dumps(document("fed_avg", 0, {"a": 0.5, "b": 0.6})))
    return tmp_path


def called(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a command and what it wrote; anything but an exit is an error of the test."""
    monkeypatch.setattr(sys, "argv", ["fairflare", *words])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


@pytest.mark.parametrize(("command", "option"), options())
def test_a_path_that_cannot_be_used_is_one_line(
    command: str, option: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, bad in BAD.items():
        path = bad(folder)
        words = OTHERWISE[command].format(*[folder] * 9).split()
        if option in words:
            words[words.index(option) + 1] = path
        elif option.startswith("-"):
            words += [option, path]
        else:  # an argument stands first
            words = [path, *words[1 if words and not words[0].startswith("-") else 0 :]]
        code, said = called([*command.split(), *words], monkeypatch, capsys)
        print(command, option, what, code, said)
        assert code in (0, 1, 2), what
        assert "Traceback" not in said
        if code == 2:
            assert len(said.splitlines()) < 9, (what, said)


@pytest.fixture
def full() -> Iterator[None]:
    """As on a full disk, no byte more can be written to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("command", ["report", "export", "examples", "prepare folders", "check-data", "stats", "policies"])
def test_a_full_disk_is_named_by_what_was_to_be_written(
    command: str, folder: Path, full: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = OTHERWISE[command].format(*[folder] * 9).split()
    out = {"report": ["--out", "new"], "check-data": ["--out", "new"], "stats": ["--out", "new"]}
    code, said = called([*command.split(), *words, *out.get(command, ())], monkeypatch, capsys)
    print(said)
    assert code == 2
    assert "File too large" in said
