"""Test the file of ``docs/new_method.md``, verbatim, as a plugin in every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fairflare.recipes as fairflare_recipes
from fairflare.cli.commands import app
from fairflare.exchange.messages import Message
from fairflare.methods.base import catalog
from fairflare.methods.base.catalog import all_methods
from tests.federation.network import Run, good
from tests.tiny import VOLUMES

ROOT = Path(__file__).parents[2]
TINY = {**VOLUMES, "phantom_cases": 0.3}
SETS = [f"--set={name}={json.dumps(value)}" for name, value in TINY.items()]
METHODS = {"term": ("TERM", "t=2.0")}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the file as a package."""
    page = (ROOT / "docs" / "new_method.md").read_text()
    blocks = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.DOTALL))
    assert sorted(blocks) == sorted(METHODS)
    site = tmp_path / "site-packages"
    (site / "newcomer").mkdir(parents=True)
    (site / "newcomer" / "__init__.py").touch()
    for name, code in blocks.items():
        (site / "newcomer" / f"{name}.py").write_text(code)
    info = site / "newcomer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 1.0\n")
    points = [f"{name} = newcomer.{name}" for name in METHODS]
    (info / "entry_points.txt").write_text("\n".join(["[fairflare.methods]", *points, ""]))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    catalog._plugins.cache_clear()
    yield site
    monkeypatch.undo()
    catalog._plugins.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "newcomer"]:
        del sys.modules[name]


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("name", METHODS)
def test_listed_described_exported_and_a_recipe(name: str, plugin: Path) -> None:
    title, setting = METHODS[name]
    assert f"{name} {title}" in command("list")
    assert f"{title}, at the server: {title}" in command("describe", name)
    command("export", name, "--out", "jobs", "--preinstalled", "--set", setting)
    server = (Path("jobs") / name / "app" / "config" / "config_fed_server.json").read_text()
    key, value = setting.split("=")
    rule = json.loads(server)["workflows"][0]["args"]["rule"]
    assert (rule["path"], rule["args"][key]) == (f"newcomer.{name}.{title}", float(value))
    recipe = getattr(fairflare_recipes, f"{title}Recipe")
    try:
        assert getattr(recipe(**{key: float(value)}).plan.rule, key) == float(value)
    finally:
        vars(fairflare_recipes).pop(recipe.__name__, None)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_run_and_compared(name: str, plugin: Path, tmp_path: Path) -> None:
    title, setting = METHODS[name]
    short = ["--sites", 2, "--rounds", 2, "--in-process", *SETS]
    command("run", name, "--set", setting, *short)
    (file,) = (tmp_path / "runs" / f"{name}-seed0").rglob("results.json")
    assert json.loads(file.read_text())["status"] == "completed"
    assert f"published setting: {title} has none" in command("run", name, "--paper", "-w", "published", *short)
    done = subprocess.run(
        [
            sys.executable, "-m", "fairflare.cli", "compare", "fed_avg", f"{name}:{setting}", "--seeds", "1", "--sites",
            "2", "--rounds", "1", *SETS,
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": str(plugin)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{name} ({setting.removesuffix('.0')}" in " ".join(done.stdout.split())


# ------------------------------------------------------------------------------------------------ TERM's numbers


def test_the_weights_of_term(plugin: Path, tmp_path: Path) -> None:
    losses = {"site-1": 1.0, "site-2": 3.0, "site-3": 2.0}

    def said(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        if name == "train":
            reply.meta["report"] = {"probe_loss": losses[site]}
        return reply

    run = Run(tmp_path, said, rule=all_methods()["term"].rule(t=0.5), num_rounds=1)()
    parts = {"site-1": 10 * np.exp(0.5), "site-2": 20 * np.exp(1.5), "site-3": 30 * np.exp(1.0)}
    expected = {site: part / sum(parts.values()) for site, part in parts.items()}
    assert run.results["rounds"][0]["site_weights"] == pytest.approx(expected, rel=1e-6)
