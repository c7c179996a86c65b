"""Test that the pages' Python works: the method of ``docs/architecture.md`` in every way to run it, each script."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from nvflare.recipe.spec import Recipe
from typer.testing import CliRunner

import fairflare.methods
from fairflare import results
from fairflare.cli.commands import app
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.reporting.results import read_results
from tests.tiny import RESULTS, VOLUMES, run_document

ROOT = Path(__file__).parents[2]
TINY = {**VOLUMES, "phantom_cases": 0.3}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return the page's code block as a file among the methods."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    folder = tmp_path / "fairflare" / "methods"  # FLARE wants the path of the name
    folder.mkdir(parents=True)
    (folder / "loss_power.py").write_text(code)
    monkeypatch.setattr(fairflare.methods, "__path__", [*fairflare.methods.__path__, str(folder)])
    yield code
    sys.modules.pop("fairflare.methods.loss_power", None)
    vars(fairflare.methods).pop("loss_power", None)


def test_a_new_method_in_one_file(example, tmp_path):
    assert "loss_power" in all_methods()
    assert len(example.splitlines()) < 29  # what it took once
    plan = make_plan("loss_power", sites=3, num_rounds=2, settings={**TINY, "q": 2.0})
    results = run_document(run_local(plan, tmp_path / "run"))
    assert results["status"] == "completed"
    for record in results["rounds"]:
        losses = {site: metrics["loss"] for site, metrics in record["validation"].items()}
        assert {site: report["probe_loss"] for site, report in record["reports"].items()} == losses
        total = sum(v**2 for v in losses.values())
        assert record["site_weights"] == pytest.approx({s: v**2 / total for s, v in losses.items()}, rel=1e-6)
        assert len(set(record["site_weights"].values())) == 3


def describe_setting(text: str) -> str:
    return " ".join(text.split())


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return describe_setting(done.output)


def test_the_new_method_through_every_command(example, tmp_path, monkeypatch):
    """Check each claim of the page, command by command; a message reports that no setting is published."""
    monkeypatch.chdir(tmp_path)
    tiny = [f"--set={name}={json.dumps(value)}" for name, value in TINY.items()]
    nothing = "published setting: LossPower has none"
    assert "loss_power LossPower sites with a higher loss weigh more" in command("list")
    listed = command("list", "--markdown")
    assert (
        "| `loss_power` | [LossPower](loss_power.md) | sites with a higher loss weigh more | one | 1 / 1 | 1 |"
        in listed
    )
    told = command("describe", "loss_power")
    assert "LossPower, at the server: LossPower" in told
    assert "a number >= 0; default 1.0" in told
    assert "No published setting: the defaults are those of its classes. Without --paper a job has 3 rounds, 6" in told
    assert "| `q` | a number >= 0 | `1.0` |" in command("describe", "loss_power", "--markdown")
    assert "| LossPower (`loss_power`) | `probe_loss` |" in command("privacy")
    short = ["--sites", 2, "--rounds", 1, "--in-process", *tiny]
    assert "loss_power" in command("run", "loss_power", "--set", "q=2", *short)
    (results,) = (tmp_path / "runs" / "loss_power-seed0").rglob("results.json")
    assert json.loads(results.read_text())["status"] == "completed"
    assert nothing in command("run", "loss_power", "--paper", "-w", "as-published", *short)
    assert nothing in command("export", "loss_power", "--paper", "--out", "published")
    command("export", "loss_power", "--preinstalled", "--out", "jobs")
    assert not (tmp_path / "jobs" / "loss_power" / "app" / "custom").exists()
    assert "loss_power" in command("show", "runs/loss_power-seed0")


@pytest.mark.long
def test_the_new_method_is_clean_as_printed(example, tmp_path):
    """Check the file with ``make lint``'s tools where it lies among the methods."""
    file = ROOT / "custom" / "fairflare" / "methods" / "loss_power.py"
    binaries = Path(sys.executable).parent
    for tool in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = subprocess.run(
            [str(binaries / tool[0]), *tool[1:], "--stdin-filename", str(file), "-"],
            input=example, capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    (tmp_path / "loss_power.py").write_text(example)
    done = subprocess.run(
        [str(binaries / "mypy"), "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "loss_power.py")],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def scripts() -> dict[str, str]:
    """Return the Python blocks of all pages that are whole files: those that begin with an import."""
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)):
            if re.match(r"(#.*\n)*(from|import) ", code):
                found[f"{page.name} {number}"] = code
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the pages' scripts name: examples, kits, a run and an image."""
    folder = tmp_path_factory.mktemp("reader")
    for example in (ROOT / "docs" / "examples").glob("*.py"):
        shutil.copyfile(example, folder / example.name)
    (folder / "kits" / "lead@consortium.example" / "startup").mkdir(parents=True)
    run_local(make_plan("fed_lwr", sites=2, num_rounds=1, settings=TINY), folder / "runs" / "fed_lwr-seed0")
    nibabel.save(nibabel.Nifti1Image(np.zeros((40, 40, 3), np.float32), np.eye(4)), folder / "case.nii.gz")
    return folder


@pytest.mark.parametrize("name", scripts())
def test_python_of_the_pages_runs_as_a_script_and_starts_nothing_on_import(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run each block as a user saves it, with exports in place of runs (tests of walks run them); then import it."""
    code, started = scripts()[name], list[str]()
    export = Recipe.export

    def exported(recipe: Recipe, folder: str, **more: Any) -> None:
        started.append(recipe.name)
        export(recipe, str(tmp_path / "jobs"), **more)

    def here(*method: str, **given: Any) -> fairflare.Results:
        started.append("here")
        return fairflare.Results(place / "runs" / "fed_lwr-seed0")

    monkeypatch.setattr(fairflare, "run", here)
    monkeypatch.setattr(Recipe, "export", exported)
    monkeypatch.setattr(Recipe, "run", lambda recipe, env, **more: exported(recipe, ""))
    monkeypatch.setattr(results, "of", lambda run: read_results(place / "runs" / "fed_lwr-seed0" / RESULTS))
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    file = tmp_path / "page.py"
    file.write_text(code)
    runpy.run_path(str(file), run_name="page")
    assert started == []
    runpy.run_path(str(file), run_name="__main__")
    assert bool(started) is bool(re.search(r"\.(run|execute|export)\(", code))
    assert ("site-2" in capsys.readouterr().out) is ("print(" in code)


def test_helpers_in_the_recipes_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what the page's recipes make; walks run the first in the simulator, and the second's like in a POC."""
    monkeypatch.chdir(tmp_path)
    simulated, flat, _, helpers = (code for name, code in scripts().items() if name.startswith("recipes.md"))
    exec(compile(helpers, "recipes.md", "exec"), {"__name__": "__main__"})
    folder = tmp_path / "jobs" / "fed_lwr"
    client = json.loads((folder / "app" / "config" / "config_fed_client.json").read_text())
    assert client["task_result_filters"][0]["tasks"] == ["train"]
    assert "submit_model" in client["executors"][0]["tasks"]
    assert json.loads((folder / "meta.json").read_text())["resource_spec"]["north"]["num_of_gpus"] == 1
    for code in (simulated, flat):
        made: dict[str, Any] = {}
        exec(compile(code, "recipes.md", "exec"), made)
        plan = made["recipe"].plan
        assert (plan.method.name, plan.run.num_rounds, len(plan.sites)) == ("fed_ism", 2, 2)
        assert (plan.rule.rho, plan.training.learning_rate, plan.task.image_size) == (0.05, 1e-3, (48, 48))
