"""Test what ``import fairflare`` offers: its names, runs and their results, comparisons, and methods in a file."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

import fairflare
from fairflare.cli import commands
from fairflare.federation.plan.describe import STATUS
from fairflare.federation.plan.plan import make_plan
from fairflare.methods.base import catalog
from fairflare.reporting.table import fairness_table
from tests.tiny import FUNDUS, RESULTS, model_in

ROOT = Path(__file__).parents[2]
TERM = """
from math import exp

from fairflare import AggregationWeights, LocalTraining, Method, NonNegative, ReportField, RoundInputs, Rule, settings


class ReportLoss(LocalTraining):
    def report(self, run, model):
        return {"probe_loss": run.metrics["loss"]}


@settings
class TERM(Rule):
    report_fields = (ReportField("probe_loss", low=0.0, doc="validation loss of the received model"),)
    t: NonNegative = 1.0

    def weigh(self, inputs: RoundInputs) -> AggregationWeights:
        tilted = {site: exp(self.t * report["probe_loss"]) for site, report in inputs.reports.items()}
        return AggregationWeights(sites={site: value / sum(tilted.values()) for site, value in tilted.items()})


METHODS = [Method("my_term", "My TERM", "sites with a higher loss weigh more", TERM, ReportLoss)]
"""


@fairflare.settings
class Even(fairflare.Rule):
    """Weigh all sites alike; no job can carry it, as its file is a test's."""

    def weigh(self, inputs: fairflare.RoundInputs) -> fairflare.AggregationWeights:
        return fairflare.AggregationWeights(sites=dict.fromkeys(inputs.sites, 1 / len(inputs.sites)))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def term(tmp_path: Path) -> Iterator[Path]:
    """Write a method file of a name that no other test has; forget its methods afterwards."""
    file = tmp_path / f"own_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]}.py"
    file.write_text(TERM)
    yield file
    catalog._FILES.clear()
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]


def small(method: str | None = "fed_avg", **more: Any) -> fairflare.Results:
    return fairflare.run(method, **{"task": "classification", "sites": 2, "rounds": 2, "settings": FUNDUS, **more})


# ------------------------------------------------------------------------------------------------ names


def test_the_names_cost_nothing_until_they_are_used() -> None:
    """Check that the import loads nothing large, and that types and run time know the same names in the same places."""
    code = "import sys; import fairflare; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "monai", "nvflare", "numpy", "pydantic", "rich", "typer", "scipy"} & {*loaded}
    tree = ast.parse(Path(fairflare.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        a.asname or a.name: (one.module, a.name)
        for one in block.body
        if isinstance(one, ast.ImportFrom)
        for a in one.names
    }
    assert sorted(typed) == fairflare.__all__
    for name, (module, inner) in typed.items():
        assert getattr(fairflare, name) is getattr(importlib.import_module(str(module)), inner), name
    with pytest.raises(AttributeError, match="no attribute 'Weighings'"):
        _ = fairflare.Weighings
    assert {*fairflare.__all__} <= {*dir(fairflare)}


def test_the_page_lists_each_name_with_how_stable_it_is() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (stable|provisional|experimental) \|", page, re.MULTILINE)
    listed = sorted(name for names, _ in rows for name in re.findall(r"\w+", names))
    assert listed == fairflare.__all__

    assert dict(re.findall(r"^\| (stable|provisional|experimental) \| (.*) \|$", page, re.MULTILINE)) == STATUS


def test_the_reference_has_formulas_that_a_module_takes_from_others() -> None:
    """Check names that a page about a module leaves out, and that each name in the reference exists."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = {name.rpartition(".")[2]: name for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert all(pkgutil.resolve_name(name).__doc__ for name in named.values())
    assert {"SAM", "GSAM", "model_similarity", "pull", "som_weights", "Step", "learning_rounds"} <= named.keys()


def test_pages_templates_and_examples_import_by_the_door() -> None:
    """Refuse an import of an inner module for a name that ``fairflare`` has itself."""
    tree = ast.parse(Path(fairflare.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    inner = {alias.name for one in block.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    package = ROOT / "custom" / "fairflare"
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "examples").glob("*.*")]
    files += [*(ROOT / "jobs").rglob("*.py"), *(package / "tasks" / "templates").glob("*.py")]
    files += [file for file in (package / "examples").rglob("*") if file.suffix in (".py", ".md")]
    wrong = [
        f"{file.relative_to(ROOT)}: {line}"
        for file in files
        for line, names in re.findall(r"(from fairflare\.[\w.]+ import ([\w, ]+))", file.read_text(encoding="utf-8"))
        if inner & set(re.findall(r"\w+", names))
    ]
    assert wrong == []


def test_methods_and_settings_are_described() -> None:
    assert {method.name for method in fairflare.list_methods()} == {*catalog.all_methods()}
    ((found,),) = fairflare.describe("fed_prox", "mu").values()
    assert (found.setting.name, found.setting.default) == ("mu", 0.1)
    (group,) = fairflare.describe("fed_avg", "phantom_samples", task="classification")
    assert group == "FedAvg, task: classification"


# ------------------------------------------------------------------------------------------------ runs


def test_a_run_gives_the_results_of_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = small()
    assert "".join(capfd.readouterr()) == ""  # there is no terminal
    words = [f"--set={name}={json.dumps(value)}" for name, value in FUNDUS.items()]
    line = ["run", "fed_avg", "--task", "classification", "--sites", "2", "--rounds", "2", "--in-process", *words]
    done = CliRunner().invoke(commands.app, [*line, "--label", "cli"])
    assert done.exit_code == 0, done.output
    one, other = (model_in(tmp_path / "runs" / name / RESULTS) for name in ("fed_avg-seed0", "cli-seed0"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert found.folder == tmp_path / "runs" / "fed_avg-seed0"
    again = fairflare.Results.read("runs/fed_avg-seed0")
    assert repr(again) == repr(found) == fairness_table(found.document, width=100)
    assert "<pre>FedAvg (fed_avg), seed 0, 2 rounds" in found._repr_html_()
    table = found.table()
    assert list(table.index) == ["site-1", "site-2"]
    metric = found.document.info.primary_metric
    assert table.loc["site-2", metric] == found.document.columns["last"][metric]["site-2"].value
    assert list(found.table("loss").columns) == ["loss"]
    network = again.model("last")
    assert not network.training
    state = network.state_dict()
    assert all(torch.equal(state[name], one[name]) for name in one)
    assert "round 1 done" not in (tmp_path / "runs" / "fed_avg-seed0.log").read_text()
    assert "weights: site-1" in (tmp_path / "runs" / "fed_avg-seed0.log").read_text()
    with pytest.raises(
        ValueError,
        match=r"holds a run .*give overwrite=True",
    ):
        small()
    for wrong in (
        {"settings": {"epochs": 1}},
        {"data": "nowhere.json"},
        {"sites": 1, "min_sites": 2},
        {"task": "tabular"},
    ):
        for more in ({}, {"simulator": True}):
            with pytest.raises(ValueError, match=r".+"):
                small(overwrite=True, **wrong, **more)
    assert "weights: site-1" in (tmp_path / "runs" / "fed_avg-seed0.log").read_text()  # refusals replaced nothing
    assert repr(fairflare.Results.read("runs/fed_avg-seed0")) == repr(found)
    small(overwrite=True, rounds=1)


def test_objects_of_a_script_run_in_this_process(tmp_path: Path) -> None:
    """Check a rule, and a task that no job can carry; weights by hand: half each."""

    class Own(fairflare.ClassificationTask):
        """Have a name that no job looks for."""

    names = ("image_size", "features", "phantom", "phantom_samples", "phantom_test", "partition")
    task = Own(**{**{name: FUNDUS[name] for name in names}, "phantom_sites": 2})
    found = small(None, rule=Even(), task=task, rounds=1, settings={"local_epochs": 1})
    assert found.folder.name == "even-seed0"
    assert found.document.rounds[0].site_weights == {"site-1": 0.5, "site-2": 0.5}
    assert type(found.model()) is type(task.build_model())
    with pytest.raises(ValueError, match="name it Task, in a module of its own"):
        fairflare.Recipe(rule=Even(), task=task, sites=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "fedavg"}, "^unknown method 'fedavg'"),
        ({"method": "fed_avg", "settings": {"learning_rat": 1}}, "no setting 'learning_rat'"),
        ({"method": "fed_avg", "simulator": True, "jobs": 2}, "jobs is for runs in this process"),
        ({"method": "fed_avg", "data": "nowhere"}, "nowhere does not exist"),
        ({}, "a method's name, or .*rule and training"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fairflare.run(**given)
    assert not list(tmp_path.rglob("results.json"))


def test_a_failed_run_raises_its_reason() -> None:
    class Fails(fairflare.LocalTraining):
        def report(self, run: Any, model: Any) -> dict[str, float]:
            raise OSError("no such thing")

    settings = {name: value for name, value in FUNDUS.items() if name not in ("local_epochs", "batch_size")}
    with pytest.raises(RuntimeError, match=r"the run failed: .*no such thing.*\.log"):
        small(None, rule=Even(), training=Fails(local_epochs=1), rounds=1, settings=settings)


# ------------------------------------------------------------------------------------------------ comparisons


def test_a_picture_of_the_sites() -> None:
    assert isinstance(small(rounds=1).plot(), Figure)


@pytest.mark.long
def test_a_comparison_holds_the_tables_of_the_terminal(tmp_path: Path) -> None:
    given: dict[str, Any] = {"seeds": 2, "task": "classification", "sites": 2, "rounds": 1, "settings": FUNDUS}
    found = fairflare.compare(["fed_avg", "fed_prox:mu=0.1"], **given)
    assert list(found.table().index) == ["fed_avg", "fed_prox (mu=0.1)"]
    assert "Differences to fed_avg" in repr(found)
    assert isinstance(found.plot(), Figure)
    assert found.folder == tmp_path / "comparison"
    before = [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("results.json"))]
    assert len(before) == 4
    assert repr(fairflare.compare(["fed_avg", "fed_prox:mu=0.1"], **given)) == repr(found)
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("results.json"))] == before
    with pytest.raises(ValueError, match="'fed_avgg': unknown method 'fed_avgg'"):
        fairflare.compare(["fed_avgg"], **given)


# ------------------------------------------------------------------------------------------------ a method in a file


def test_a_method_file_is_a_method_of_every_command(term: Path, tmp_path: Path) -> None:
    """Check run from Python, describe, export, and the same bits from objects."""
    found = small("my_term", method_file=term, rounds=1)
    assert found.document.info.method == "my_term" or found.document.info.label == "my_term"
    own = importlib.import_module(term.stem)
    trained = ("local_epochs", "batch_size")
    training = own.ReportLoss(
        **{
            name: getattr(make_plan("my_term", task="classification").training, name)
            for name in ("optimizer", "learning_rate", "keep_optimizer_state")
        },
        **{name: FUNDUS[name] for name in trained},
    )
    rest = {name: value for name, value in FUNDUS.items() if name not in trained}
    same = small(None, rule=own.TERM(), training=training, rounds=1, settings=rest, workspace=tmp_path / "same")
    one, other = (model_in(folder / RESULTS) for folder in (found.folder, same.folder))
    assert all(torch.equal(one[name], other[name]) for name in one)
    described = CliRunner().invoke(commands.app, ["describe", "my_term", "t", "--method-file", str(term)])
    assert "a number >= 0; default 1.0" in " ".join(described.stdout.split())
    out = ["--method-file", str(term), "--out", str(tmp_path / "jobs")]
    exported = CliRunner().invoke(commands.app, ["export", "my_term", *out])
    assert exported.exit_code == 0, exported.output
    job = tmp_path / "jobs" / "my_term" / "app"
    assert (job / "custom" / term.name).read_text() == TERM
    assert f'"{term.stem}.TERM"' in (job / "config" / "config_fed_server.json").read_text()
    refused = CliRunner().invoke(commands.app, ["export", "my_term", *out, "--preinstalled"])
    assert refused.exit_code == 2
    assert "a method file is custom code" in refused.output


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("json.py", TERM, "a module is called 'json' already"),
        ("none_here.py", "", "'none_here' has no attribute 'METHODS'"),
        ("broken_one.py", "1 / 0", "ZeroDivisionError: division by zero"),
        ("no_method.py", "METHODS = [3]", "TypeError: 3 is no fairflare.Method"),
        ("taken_name.py", TERM.replace('"my_term"', '"fed_avg"'), "another method is called 'fed_avg'"),
        ("no_python.txt", TERM, "is no Python file"),
    ],
)
def test_a_method_file_that_cannot_be_used(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        catalog.add_file(tmp_path / name)
    assert "my_term" not in catalog.all_methods()
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]


@pytest.mark.long
def test_a_method_file_has_the_same_bits_in_processes_and_under_flare(term: Path, tmp_path: Path) -> None:
    found = [
        small("my_term", method_file=term, rounds=1, workspace=tmp_path / name, **how)
        for name, how in {"here": {}, "two": {"jobs": 2}, "flare": {"simulator": True}}.items()
    ]
    models = [model_in(one.folder / RESULTS) for one in found]
    assert all(torch.equal(models[0][name], other[name]) for other in models[1:] for name in models[0])
