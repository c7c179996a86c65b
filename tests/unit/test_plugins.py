"""Test methods of other installed packages, by the entry point group ``fairflare.methods``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.flare.export.recipes import FairRecipe
from fairflare.methods.base import catalog
from fairflare.methods.base.catalog import all_methods, plugin_of
from tests.tiny import run_document

RULE = """
from fairflare.base.settings import NonNegative, settings
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import Rule, Weighing
from fairflare.methods.base.training import LocalTraining


@settings
class FirstHalf(Rule):
    share: NonNegative = 0.5

    def weigh(self, inputs):
        first, *others = inputs.sites
        rest = {site: (1 - self.share) / len(others) for site in others}
        return Weighing(sites={first: self.share, **rest})


METHODS = [Method("first_half", "FirstHalf", "the first site counts as much as the others", FirstHalf, LocalTraining)]
"""
Installed = Callable[..., Path]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Put a package on the path as pip would: its files, and a ``dist-info`` with its entry points."""
    made: list[str] = []

    def install(points: dict[str, str], **modules: str) -> Path:
        package = f"hospital_methods_{len(made)}"
        site = tmp_path / "site-packages"
        (site / package).mkdir(parents=True)
        for name, text in {"__init__": "", **modules}.items():
            (site / package / f"{name}.py").write_text(text)
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}.{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[fairflare.methods]", *lines, ""]))
        monkeypatch.syspath_prepend(str(site))
        made.append(package)
        forget()
        return site

    def forget() -> None:
        catalog._plugins.cache_clear()
        catalog._tell.cache_clear()

    yield install
    monkeypatch.undo()
    forget()
    for name in [name for name in sys.modules if name.startswith("hospital_methods_")]:
        del sys.modules[name]


@pytest.mark.parametrize("value", ["first", "first:METHODS"])
def test_a_plugins_method_is_as_any_other(value: str, installed: Installed, tmp_path: Path) -> None:
    installed({"first_half": value}, first=RULE)
    method = all_methods()["first_half"]
    assert plugin_of(method) == "hospital_methods_0"
    assert plugin_of(all_methods()["fed_avg"]) is None
    assert catalog.page_of("first_half") is None
    runner = CliRunner()
    for arguments, wanted in (
        (["list"], "first_half"),
        (["describe", "first_half"], "share"),
        (["export", "first_half", "--out", str(tmp_path), "--set", "share=0.7", "--preinstalled"], "job folder"),
    ):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert wanted in done.output
    app_folder = tmp_path / "first_half" / "app"
    server = json.loads((app_folder / "config" / "config_fed_server.json").read_text())
    assert server["workflows"][0]["args"]["rule"] == {
        "path": "hospital_methods_0.first.FirstHalf", "args": {"share": 0.7},
    }  # fmt: skip
    assert not (app_folder / "custom").exists()  # nothing travels in a preinstalled job


def test_the_file_of_a_plugin_travels_where_the_sites_need_not_have_it(installed: Installed, tmp_path: Path) -> None:
    installed({"first_half": "first"}, first=RULE)
    custom = {}
    for packaging in ("task_file", "bundle"):
        FairRecipe("first_half", packaging=packaging).export(str(tmp_path / packaging))
        custom[packaging] = tmp_path / packaging / "first_half" / "app" / "custom"
    assert [path.name for path in custom["task_file"].iterdir()] == ["task.py"]
    assert (custom["bundle"] / "hospital_methods_0" / "first.py").read_text() == RULE


@pytest.mark.long
def test_a_plugin_in_a_process_of_its_own(installed: Installed, tmp_path: Path) -> None:
    site = installed({"first_half": "first", "broken": "nothing"}, first=RULE)
    tiny = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "local_epochs": 1}
    done = subprocess.run(
        [
            sys.executable, "-m", "fairflare.cli", "run", "first_half", "--in-process", "--sites", "2", "--rounds", "1",
            *[f"--set={name}={json.dumps(value)}" for name, value in tiny.items()],
        ],
        env={**os.environ, "PYTHONPATH": str(site)}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "left out" in line]
    assert len(said) == 1
    assert said[0].endswith(
        "plugin broken = hospital_methods_0.nothing is left out: ModuleNotFoundError: No module named "
        "'hospital_methods_0.nothing'"
    )
    (file,) = (tmp_path / "runs" / "first_half-seed0").rglob("results.json")
    results = run_document(file)
    assert results["rounds"][0]["site_weights"] == {"site-1": 0.5, "site-2": 0.5}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def METHODS(:", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("METHODS = ['fed_avg']", "TypeError: 'fed_avg' is no fairflare.Method"),
        ("METHODS = 3", "TypeError: 'int' object is not iterable"),
        ("METHOD = []", "AttributeError: module 'hospital_methods_0.first' has no attribute 'METHODS'"),
        (
            RULE.replace("@settings", ""),
            "TypeError: FirstHalf: @settings is missing above the class, so 'share' would ",
        ),
        (
            RULE.replace("LocalTraining)]", "LocalTraining, server={'shar': 1})]"),
            "ValueError: FirstHalf has no setting",
        ),
        (RULE.replace("FirstHalf, LocalTraining)", "FirstHalf, int)"), "TypeError: "),
    ],
)
def test_a_broken_plugin_is_told_and_left_out(
    text: str, reason: str, installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    before = list(all_methods())
    installed({"mine": "first"}, first=text)
    caplog.clear()
    assert list(all_methods()) == before
    assert list(all_methods()) == before
    (message,) = [record.getMessage() for record in caplog.records]  # once
    assert message.startswith("plugin mine = hospital_methods_0.first is left out: " + reason)


def test_two_methods_of_one_name(installed: Installed, caplog: pytest.LogCaptureFixture) -> None:
    own = all_methods()["fed_avg"]
    installed({"a": "first"}, first=RULE.replace('"first_half"', '"fed_avg"'))
    installed({"b": "first"}, first=RULE)
    installed({"c": "first"}, first=RULE)
    caplog.clear()
    found = all_methods()
    assert found["fed_avg"] is own
    assert found["first_half"].rule.__module__ == "hospital_methods_1.first"
    assert [record.getMessage() for record in caplog.records] == [
        "method 'fed_avg' of the package 'hospital_methods_0' is left out: another one is called so",
        "method 'first_half' of the package 'hospital_methods_2' is left out: another one is called so",
    ]
