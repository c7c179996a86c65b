"""Compare "one round, read in order" of docs/architecture.md with the stack of a run at its first optimizer step."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fairflare
from fairflare.cli.commands import app

PACKAGE = Path(fairflare.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SMALL = ["image_size=[33, 33]", "features=[4, 4, 8, 8]", "phantom_samples=32", "phantom_test=64", "local_epochs=1"]


def test_the_page_reads_a_round_as_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack: list[tuple[str, str]] = []
    step = torch.optim.Adam.step

    def recorded(*arguments: Any, **named: Any) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None and not (stack and stack[0][1] == "run" and stack[0][0].startswith("cli/options")):
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                stack.insert(0, (file.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))
            frame = frame.f_back
        return step(*arguments, **named)

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = ["run", "fed_avg", "--in-process", "--task", "classification", "-s", "2", "-r", "1", *settings]
    done = CliRunner().invoke(app, [*command, "-w", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    section = PAGE.read_text(encoding="utf-8").partition("## One round, read in order")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)`: `(?:[\w<>]+\.)*(\w+)` \|", section, re.MULTILINE)
    assert rows == stack
