"""Test every option and argument that names a path: a bad path is one line, whatever is wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command

from fairflare.base.disk.files import system_error, write_whole
from fairflare.base.machine.environment import is_flare_process
from fairflare.cli import commands, main

from .report_runs import document

#: What each command needs besides, so that it gets to the path; ``{}`` is the folder of the test.
OTHERWISE = {
    "adapt": "{}/run --data {}/images --out {}/out.pt", "check-data": "{}/sites.json", "compare": "fed_avg fed_prox",
    "describe": "fed_avg", "doctor": "", "evaluate": "{}/run --data {}/sites.json --out {}/new", "examples": "method",
    "export": "fed_avg --out {}/jobs",
    "plan": "{}/sites.json --out {}/plan.json", "policies": "", "predict": "{}/run {}/images --out {}/new",
    "report": "{}/run", "run": "fed_avg --in-process",
    "show": "{}/run", "stats": "--data {}/sites.json",
    "phantom": "--out {}/new",
    "prepare folders": "--site a {}/images {}/masks --out {}/new",
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
    """Return each command's options and arguments that are paths."""
    group: Any = get_command(commands.app)
    for name in group.commands:
        for given in group.get_command(None, name).params:
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
    shutil.copytree(images, tmp_path / "masks")
    entries = {s: [{"image": f"{s}.png", "label": 0}] for s in ("training", "validation", "test")}
    (tmp_path / "images" / "datalist.json").write_text(json.dumps(entries))
    (tmp_path / "sites.json").write_text(json.dumps({"sites": {"a": {"data_root": str(tmp_path / "images")}}}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(json.dumps(document("fed_avg", 0, {"a": 0.5, "b": 0.6})))
    return tmp_path


def trains(*given: Any, **more: Any) -> int:
    """Stand for hours of training, which nothing here is about."""
    raise SystemExit(0)


def called(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return a command's exit code and output; anything but an exit is an error of the test."""
    monkeypatch.setattr(sys, "argv", ["fairflare", *words])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


@pytest.mark.many("export", "show", "examples", "predict")
@pytest.mark.parametrize(("command", "option"), options())
def test_a_path_that_cannot_be_used_is_one_line(
    command: str, option: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fairflare.cli.run.command.run_here", trains)
    monkeypatch.setattr("fairflare.cli.model.plan.run_plan", trains)
    monkeypatch.setattr("fairflare_lab.cli.compare.runs.Runner.go", trains)
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
        assert code in (0, 1, 2), what
        assert command == "doctor" or len(said.splitlines()) < 12, (what, said)  # doctor prints a table


def test_a_file_for_the_folder_of_a_comparison_is_no_earlier_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = called(["compare", "fed_avg", "fed_prox", "--out", str(folder / "sites.json")], monkeypatch, capsys)
    assert code == 2
    assert "other settings" not in said
    assert "sites.json" in said.replace("\n", "")
    assert "is a file; give another name" in " ".join(said.split())


@contextmanager
def full_disk() -> Iterator[None]:
    """Make writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize(
    ("command", "out"),
    [("report", "new"), ("export", "jobs"), ("examples", "method"), ("prepare folders", "new"), ("stats", "new")],
)  # fmt: skip
def test_a_full_disk_is_named_by_what_was_to_be_written(
    command: str, out: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = OTHERWISE[command].format(*[folder] * 9).split()
    if command != "examples" and "--out" not in words:
        words += ["--out", str(folder / out)]
    with full_disk():
        code, said = called([*command.split(), *words], monkeypatch, capsys)
    assert code in (1, 2)
    assert "File too large" in said
    assert out in said.replace(str(folder / "run"), "")


def test_a_failed_write_names_the_file_that_was_wanted(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        raise OSError(28, "No space left on device")  # as writing into an open file does: without a name

    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(tmp_path / "a.json", write)
    assert system_error(raised.value).startswith(f"{tmp_path / 'a.json'}: No space left on device; free space")
    with pytest.raises(shutil.Error) as several:
        shutil.copytree("/proc/self/fdinfo", tmp_path / "copy", copy_function=lambda a, b: write(tmp_path))
    assert str(tmp_path / "copy") in system_error(several.value)


def test_a_working_folder_that_is_gone_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("PWD", str(gone))
    monkeypatch.setattr(sys, "argv", ["fairflare", "list"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        f"error: the working folder '{gone}' cannot be used (No such file or directory); change to another"
    )


def test_windows_gets_a_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import fairflare.cli"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("FairFlare runs on Linux")
    assert len(ended.stderr.splitlines()) == 1


BROKEN = b"\xff\xfe\x00"  # no settings file in any encoding


@pytest.mark.parametrize("where", ["backend", "configuration"])
def test_matplotlib_settings_of_the_caller_break_no_import(where: str, tmp_path: Path) -> None:
    """Check a Jupyter kernel's backend, and a damaged matplotlibrc: MONAI imports pyplot all the same."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "MATPLOTLIB"))}
    env |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "MPLCONFIGDIR": str(tmp_path / "config" / "matplotlib")}
    (tmp_path / "config" / "matplotlib").mkdir(parents=True)
    if where == "backend":
        env["MPLBACKEND"] = "of_another_environment"
    else:
        (tmp_path / "config" / "matplotlib" / "matplotlibrc").write_bytes(BROKEN)
    pyplot = "import matplotlib.pyplot as p; print(p.get_backend())"
    for before, works in (("", False), ("import fairflare.cli;", True)):
        ended = subprocess.run(
            [sys.executable, "-c", f"{before}{pyplot}"], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert (ended.returncode == 0) is works, ended.stderr
    assert ended.stdout.strip().lower() == "agg"


def test_a_process_of_flare_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # A script that FLARE runs in its own process has another __main__ and sys.argv; the command line stays.
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for words, flare in (
        ("python -u -m nvflare.private.fed.app.client.worker_process -m w", True),
        ("python -m nvflare.private.fed.app.simulator.simulator job -w w", True),
        ("/venv/bin/python /venv/bin/nvflare simulator job", True),
        ("/venv/bin/python /venv/bin/fairflare run fed_avg --label nvflare", False),
        ("python job.py nvflare", False),
        ("python -u", False),
    ):
        monkeypatch.setattr(sys, "orig_argv", words.split())
        assert is_flare_process() is flare
