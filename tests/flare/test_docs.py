"""The example of ``docs/architecture.md`` is a working method, whichever way it is run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import fairflare.methods
from fairflare.core.settings import described
from fairflare.federation.local import run_local
from fairflare.federation.plan import make_plan
from fairflare.methods.catalog import all_methods
from fairflare.recipes import FairRecipe

ROOT = Path(__file__).parents[2]
TINY = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "local_epochs": 1}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The code block as a file among the methods."""
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
    results = json.loads((run_local(plan, tmp_path / "run") / "results.json").read_text())
    assert results["status"] == "completed"
    for record in results["rounds"]:
        losses = {site: metrics["loss"] for site, metrics in record["validation"].items()}
        assert {site: report["probe_loss"] for site, report in record["reports"].items()} == losses
        total = sum(v**2 for v in losses.values())
        assert record["site_weights"] == pytest.approx({s: v**2 / total for s, v in losses.items()}, rel=1e-6)
        assert len(set(record["site_weights"].values())) == 3


def test_the_new_method_as_a_job(example, tmp_path):
    FairRecipe("loss_power", sites=3, settings={**TINY, "q": 2.0}).export(str(tmp_path))
    server = (tmp_path / "loss_power" / "app" / "config" / "config_fed_server.json").read_text()
    client = (tmp_path / "loss_power" / "app" / "config" / "config_fed_client.json").read_text()
    assert re.search(r'"path": "fairflare\.methods\.loss_power\.LossPower",\s*"args": \{\s*"q": 2\.0\s*\}', server)
    assert "fairflare.methods.loss_power.ReportLoss" in client


def test_settings_of_the_new_method(example):
    rule = all_methods()["loss_power"].rule
    assert [(s.name, s.wanted, s.default) for s in described(rule)] == [("q", "a number >= 0", 1.0)]
    with pytest.raises(ValueError, match=r"q must be a number >= 0, got -1"):
        make_plan("loss_power", settings={"q": -1})
    with pytest.raises(ValueError, match="method 'loss_power' has no setting 'p'"):
        make_plan("loss_power", settings={"p": 1})


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_helpers_in_the_recipes_page(tmp_path, monkeypatch):
    """As it stands there; the first block runs in the simulator, the second is walked through in a POC."""
    monkeypatch.chdir(tmp_path)
    simulated, flat, networks, helpers = python_blocks("recipes.md")
    exec(compile(helpers, "recipes.md", "exec"), {})
    folder = tmp_path / "jobs" / "fed_lwr"
    client = json.loads((folder / "app" / "config" / "config_fed_client.json").read_text())
    assert client["task_result_filters"][0]["tasks"] == ["train"]
    assert "submit_model" in client["executors"][0]["tasks"]
    assert json.loads((folder / "meta.json").read_text())["resource_spec"]["north"]["num_of_gpus"] == 1
    made: dict = {}
    exec(compile(flat, "recipes.md", "exec"), made)
    parts: dict = {}
    exec(compile(simulated.partition("run = recipe")[0], "recipes.md", "exec"), parts)
    for recipe in (made["recipe"], parts["recipe"]):
        plan = recipe.plan
        assert (plan.method.name, plan.run.num_rounds, len(plan.sites)) == ("fed_ism", 2, 2)
        assert (plan.rule.rho, plan.training.learning_rate, plan.task.image_size) == (0.05, 1e-3, (48, 48))
    for block in (simulated, networks):  # what they import is there
        imports = "\n".join(line for line in block.splitlines() if line.startswith(("from ", "import ")))
        exec(compile(imports, "recipes.md", "exec"), {})
