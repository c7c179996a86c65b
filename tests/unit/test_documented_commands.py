"""Test every command that a page shows, unless ``tests/commands_not_run.md`` gives a reason why it is not run.

A line of a fenced block of shell (or ``$ ...`` in a block of text) counts, of every page and of the README files.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from fairflare.base.described import format_setting
from fairflare.cli import commands as cli
from fairflare.data.preparers.__main__ import make_app
from fairflare_lab.cli.compare import command as compare_command
from tests.bundles import write_bundle
from tests.unit.test_channels import tree

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("**/*.md")), *sorted(ROOT.glob("*.md")), ROOT / "poc" / "README.md",
    *sorted((ROOT / "custom" / "fairflare" / "examples").glob("*/README.md")),
]  # fmt: skip
PROGRAMS = {
    "fairflare", "nvflare", "make", "docker", "kubectl", "sbatch", "helm", "openssl", "python", "python3", "python3.11",
    "pip", "git", "tar", "bash", "jq", "tensorboard", "nnUNetv2_predict_from_modelfolder",
}  # fmt: skip
SHELL = {"cd", "for", "done", "do", "export", "cp", "rm", "mkdir", "sleep", ".", "source", "umask"}
TINY = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "local_epochs": 1}
# What is run as it stands, in a folder where the files that pages speak of lie: each takes seconds.
RUN = (
    "fairflare list", "fairflare describe", "fairflare show", "fairflare report", "fairflare check-data",
    "fairflare stats", "fairflare predict", "fairflare prepare images", "fairflare prepare masks",
    "fairflare prepare folders", "fairflare examples", "fairflare export", "fairflare adapt", "fairflare doctor",
    "fairflare phantom", "fairflare prepare volumes --source PROSTATES",
)  # fmt: skip


def one_command(line: str) -> str | None:
    """Return program and words of a command, without a prompt, the program's path, a pipe's rest, and a comment."""
    line = re.sub(r"^\$ ", "", line.strip())
    line = re.sub(r"^\w+=\$\((.*)\)$", r"\1", line)
    line = re.split(r" (?:\||&&|<<) ?", line)[0].partition(" #")[0].strip()
    first, _, rest = line.partition(" ")
    if not first or first.startswith(("#", "(")) or re.match(r"\w+=", first) or first in SHELL:
        return None
    return " ".join([first.rpartition("/")[2], *rest.split()])


def shown() -> dict[str, list[str]]:
    """Return the pages by command."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for language, block in re.findall(r"^ *```(\S*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            if language not in ("bash", "sh", "console", "text", ""):
                continue
            block = re.sub(r"<<'END'\n.*?^ *END$", "", block, flags=re.DOTALL | re.MULTILINE)
            for line in block.splitlines():
                command = one_command(line)
                of_shell = language in ("bash", "sh")
                if command and (of_shell or command.partition(" ")[0] in PROGRAMS):
                    found.setdefault(command, []).append(str(page.relative_to(ROOT)))
    return found


def marked() -> dict[str, str]:
    """Return the rows of ``tests/commands_not_run.md`` by the beginning of the commands that they are about."""
    found = {}
    for row in (ROOT / "tests" / "commands_not_run.md").read_text(encoding="utf-8").splitlines():
        if row.startswith("| `"):
            for words in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                assert words not in found, f"{words} stands in two rows"
                found[words] = row
    return found


def beginning(command: str, among: Any) -> str:
    """Return the longest text of ``among`` with which the command begins, word by word; none: an empty text."""
    words = command.split()
    return max((one for one in among if words[: len(one.split())] == one.split()), key=len, default="")


COMMANDS, MARKED = shown(), marked()
RUN_HERE = sorted(c for c in COMMANDS if len(beginning(c, RUN)) > len(beginning(c, MARKED)))


def test_each_command_is_run_or_marked_with_its_reason() -> None:
    open_ones = [f"{c} ({COMMANDS[c][0]})" for c in COMMANDS if c not in RUN_HERE and not beginning(c, MARKED)]
    assert open_ones == [], "run them in this test, or write a row of tests/commands_not_run.md"
    unknown = [c for c in COMMANDS if c.partition(" ")[0] not in PROGRAMS]
    assert unknown == []
    assert len(COMMANDS) > 150
    assert len(RUN_HERE) > 40


def test_the_table_holds_nothing_else() -> None:
    used = {beginning(c, MARKED) for c in COMMANDS if c not in RUN_HERE}
    assert [one for one in MARKED if one not in used] == [], "no page shows them (any more)"
    for row in set(MARKED.values()):
        _, checked, reason = (cell.strip(" |") for cell in row.split(" | "))
        assert reason
        assert checked
        for file in re.findall(r"`((?:tests|poc|tools|benchmarks|\.ci)/[^`]+)`", row):
            assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("command", sorted(c for c in COMMANDS if c.startswith("make ")))
def test_a_target_exists(command: str) -> None:
    targets = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command.split()[1] in targets


def test_scripts_exist_and_know_their_options() -> None:
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0].startswith("python") and len(words) > 1 and words[1].endswith(".py"):
            text = (ROOT / words[1]).read_text()
            assert [word for word in words if word.startswith("--") and f'"{word}"' not in text] == [], command


@pytest.mark.parametrize("command", sorted(c for c in COMMANDS if c.startswith("nvflare ")))
def test_flare_knows_the_options(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvflare.cli import parse_args

    words = shlex.split(re.sub(r"\$as_\w+", "--startup-kit KIT", command))
    monkeypatch.setattr(sys, "argv", words)
    parse_args("nvflare")  # ends the process where it knows a word not


def in_pages(names: str) -> list[str]:
    """Return the commands of fenced blocks and within sentences."""
    found = {c for c in COMMANDS if re.match(f"fairflare (?:{names})", c)}
    for page in PAGES:
        found |= set(re.findall(rf"`(fairflare (?:{names})[^`]*)`", page.read_text(encoding="utf-8")))
    # The methods that pages write are tested with the pages.
    return sorted(c for c in found if not re.search("METHOD|loss_power|term", c))


@cache
def commands_of(preparers: bool) -> dict[str, Any]:
    """Return the command line's commands, or those of `prepare`; they are collected once."""
    app = make_app() if preparers else cli.app
    group: Any = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.commands}


@pytest.mark.parametrize("command", in_pages("[a-z]"))
def test_documented_options_exist(command: str) -> None:
    name, *words = shlex.split(command.partition(" | ")[0], comments=True)[1:]
    commands = commands_of(False)
    assert name in commands, f"there is no command {name!r}"
    known = {
        "--help",
        *(option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)),
    }
    if name == "prepare" and words and words[0].islower():
        kinds = commands_of(True)
        assert words[0] in kinds, f"there is no preparer {words[0]!r}"
        known |= {flag for option in kinds[words[0]].params for flag in (*option.opts, *option.secondary_opts)}
    elif name == "prepare":
        known |= {"--source", "--out"}
    used = {word.split("=")[0] for word in words if re.match("--[a-z]|-[a-z]$", word)}
    assert used <= known, f"{name} has no {sorted(used - known)}"


def fairflare(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


@pytest.mark.many
@pytest.mark.parametrize("command", sorted(c for c in COMMANDS if c.startswith("fairflare compare ")))
def test_a_comparison_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a comparison up to the training: its plan, each row's method and settings, and the metric."""

    def trained(*rest: object) -> None:
        raise typer.Exit(0)

    monkeypatch.setattr(compare_command, "_go", trained)
    monkeypatch.chdir(tmp_path)
    Path("benchmarks").symlink_to(ROOT / "benchmarks")
    Path("plan.yaml").symlink_to(ROOT / "benchmarks" / "plans" / "fed_lwr_norms.yaml")
    words = shlex.split(command, comments=True)[1:]
    if "--data" in words:
        data = Path(words[words.index("--data") + 1])
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text('{"sites": {"a": {"data_root": "a"}, "b": {"data_root": "b"}, "c": {"data_root": "c"}}}')
    done = fairflare(*words)
    assert done.exit_code == 0, done.output


# ------------------------------------------------------------------------------------------------ run as they stand


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with what the pages' commands name: images of two sites, a run, a table of labels, and files."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert fairflare("phantom", "prostate", "--out", "DATA", "--sites", "2", "--size", "32").exit_code == 0
        settings = [part for key, value in TINY.items() for part in ("--set", f"{key}={format_setting(value)}")]
        small = ["--in-process", "--sites", "2", "--rounds", "1", "--keep-local-models", *settings]
        done = fairflare("run", "fed_avg", *small)
        assert done.exit_code == 0, done.output
    for name in ("fed_lwr-seed0", "trial-seed0", "first"):
        (folder / "runs" / name).symlink_to("fed_avg-seed0")
    (folder / "results").mkdir()
    (folder / "results" / "$job").symlink_to(folder / "runs" / "fed_avg-seed0")
    for old, new, name in (("site-1", "north", "a"), ("site-2", "south", "b")):
        (folder / "DATA" / old).rename(folder / "DATA" / new)
        sites = folder / "DATA" / "fairflare.json"
        sites.write_text(sites.read_text().replace(old, new))
        for kind in ("images", "masks"):
            (folder / name / kind).mkdir(parents=True)
            for number, file in enumerate(sorted((folder / "DATA" / new / kind).iterdir())[:12]):
                pixels = np.asarray(Image.open(file)) * (255 if kind == "masks" else 1)
                Image.fromarray(pixels).save(folder / name / kind / f"p{number // 2}_{number % 2}.png")
    shutil.copytree(folder / "a" / "images", folder / "images")
    people = [
        f"{p.name},{i % 2},{'ab'[i // 6]},{'FM'[i % 2]},{30 + 4 * i}"
        for i, p in enumerate(sorted((folder / "images").iterdir()))
    ]
    (folder / "all.csv").write_text("\n".join(["file,diagnosis,clinic,gender,years", *people]) + "\n")
    findings = [f"{p.name},{i % 2},{('1', '0', '-1', '')[i % 4]}" for i, p in enumerate((folder / "images").iterdir())]
    (folder / "findings.csv").write_text("\n".join(["image,effusion,edema", *findings]) + "\n")
    known = [f"{p.stem},{'FM'[i % 2]},{30 + 4 * i}" for i, p in enumerate(sorted((folder / "a" / "images").iterdir()))]
    (folder / "people.csv").write_text("\n".join(["image,sex,age", *known]) + "\n")
    shutil.copytree(folder / "a", folder / "PAIRS")
    shutil.copy(folder / "DATA" / "fairflare.json", folder / "site_file.json")
    for label in ("naevus", "melanoma"):
        (folder / "FOLDER" / label).mkdir(parents=True)
        for number in range(8):
            image = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(image).save(folder / "FOLDER" / label / f"{label}{number}.png")
    rows = [f"{p.parent.name}/{p.name},{p.parent.name}" for p in sorted((folder / "FOLDER").glob("*/*.png"))]
    (folder / "FOLDER" / "list.csv").write_text("\n".join(["file,diagnosis", *rows]) + "\n")
    (folder / "task.py").write_text("from fairflare.tasks.segmentation import SegmentationTask as Task\n")
    mine = shutil.copytree(folder / "runs" / "fed_avg-seed0", folder / "runs" / "mine-seed0")
    shutil.copy(folder / "task.py", mine / "server" / "simulate_job" / "fairflare")
    (code,) = re.findall(r"```python\n(from monai.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "my_task.py").write_text(code)
    write_bundle(folder / "my_bundle")
    tree(folder / "PROSTATES", "names", 2)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("command", RUN_HERE)
def test_a_command_runs_as_it_stands(
    command: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    shutil.copytree(world, place, symlinks=True)
    monkeypatch.chdir(place)
    words = shlex.split(command)
    if words[1] in ("prepare", "phantom"):
        shutil.rmtree("DATA")
    done = fairflare(*words[1:])
    assert done.exit_code == 0, done.output
