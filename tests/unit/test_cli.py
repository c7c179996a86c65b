"""Test the command line: descriptions, refusals with their messages, and its view of a run."""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner, Result

from fairflare.base.described import format_setting
from fairflare.base.settings import Part, choices, field_names, values_of
from fairflare.cli import commands as cli
from fairflare.cli import screen
from fairflare.cli.data import doctor
from fairflare.cli.run import command as run_command
from fairflare.cli.run import view as run_view
from fairflare.cli.run.folder import what_sites_said
from fairflare.cli.run.here import sites_at_a_time
from fairflare.cli.run.view import RunView
from fairflare.federation.plan.bounds import Bounds
from fairflare.federation.plan.describe import overview, sections
from fairflare.federation.plan.plan import OPTIONS, make_plan
from fairflare.federation.plan.run_settings import LIKE_SETTINGS, RunSettings
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.methods.base.catalog import all_methods, get_method
from fairflare.provision import job_classes
from fairflare.reporting.documents import RunResults
from tests.bundles import write_bundle
from tests.tiny import run_document

from .test_nnunet_task import plan as tiny_plan

ROOT = Path(__file__).parents[2]
METHODS = list(all_methods())
SHAPES = ("fed_avg", "fed_lwr", "fed_mas", "fed_mrl", "crt")  # presets, parts, classes, two phases, own rounds
TINY = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "local_epochs": 1}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.console, "width", 80)
    monkeypatch.setattr(screen.errors, "width", 80)


def fairflare(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def given(values: dict[str, Any]) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={format_setting(value)}")]


RUN = ["run", "fed_avg", "--in-process", "--jobs", "1", "--sites", "2", *given(TINY)]


def one_line(result: Result) -> str:
    """Return the error of a command: exit code 2, one line, nothing else."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("error: ").rstrip("\n")


# ------------------------------------------------------------------------------------------------ what there is


def test_version() -> None:
    result = fairflare("--version")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert re.match(r"fairflare \d+\.\d+\.\d+, python 3\.\d+\.\d+, nvflare 2\.9", result.stdout)
    for name in ("torch", "monai", "numpy"):
        assert re.search(rf"\b{name} \d", result.stdout)


def test_list_names_every_method_in_full_at_80_columns() -> None:
    result = fairflare("list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    found = [line.split(" ")[0] for line in lines]
    assert sorted(word for word in found if word in METHODS) == METHODS
    assert re.search(r"^fed_lwr +Fed-LWR\* ", result.stdout, re.MULTILINE)  # asks the sites twice
    assert found.index("bsm_fl") > lines.index("Long tails (fair to rare classes)") > found.index("fed_lwr")


@pytest.mark.parametrize("width", [80, 120])
def test_list_says_which_methods_work_with_secure_sums_and_with_privacy(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairflare.cli.methods.console", shown := Console(file=io.StringIO(), width=width))
    fairflare("list")
    lines = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    for method in overview():
        (line,) = (line for line in lines if line.startswith(f"{method.name} "))
        found = re.search(r" (SS? D|SS?| D)(?= |$)", line)
        assert (found[1] if found else "").strip() == (
            "S" * method.secure_sums * method.phases + " D" * method.private
        ).strip()
    assert any("S: secure sums (SS: two a round), D: differential privacy" in line for line in lines) or width == 80


def test_no_command_shows_the_help() -> None:
    result = fairflare()
    assert "describe" in result.output
    assert "in-process" in fairflare("run", "--help").output


# ------------------------------------------------------------------------------------------------ describe


def expected_names(cls: type, prefix: str = "") -> set[str]:
    """Return every argument of a class, and of every kind of part that it takes, by looking at signatures."""
    found = set()
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name == "self":
            continue
        found.add(prefix + name)
        if isinstance(parameter.default, Part):
            base = next(b for b in reversed(type(parameter.default).__mro__) if b is not Part and issubclass(b, Part))
            kinds = choices(base).values()
            assert len(kinds) > 1
            for kind in kinds:
                found |= expected_names(kind, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_described_with_type_range_default_and_meaning(name: str) -> None:
    method = all_methods()[name]
    never = {"betas"} if name == "scaffold" else set()  # its optimizer is always SGD
    *found, of_run = sections(name).values()
    classes = (method.rule, method.training, load_task_class(TASKS_BY_KIND[method.task]), Bounds)
    for cls, group in zip(classes, found, strict=True):
        assert {setting.name for setting in group} == expected_names(cls) - never
    assert {setting.name for setting in of_run} == {
        "best_by", "best_lambda", "test_last", "test_every", "bootstrap", "crt_rounds",
        "crt_epochs", "crt_weights", "crt_mask_absent", "min_cases", "groups",
        "group_bins", "calibration_bins", "exchange", "secure", "channel_drop",
    }  # fmt: skip
    for setting in (setting for group in (*found, of_run) for setting in group):
        assert len(setting.meaning) > 3, setting
        assert setting.wanted, setting
        assert "Annotated" not in setting.wanted, setting
        assert "typing" not in setting.wanted, setting
        for markup in ("``", ":class:", ":func:", ":mod:", ":math:"):
            assert markup not in setting.meaning, setting
        assert ("." in setting.name) == bool(setting.only), setting
    defaults = {setting.name: setting.default for group in found for setting in group if not setting.only}
    paper = make_plan(name, small=False)
    for owner in (paper.rule, paper.training, paper.task):
        for key, value in values_of(owner)["args"].items():
            if key in never:
                continue
            if isinstance(value, dict) and "path" in value:
                value = getattr(owner, key).kind
            assert format_setting(defaults[key]) == format_setting(value), key


@pytest.mark.parametrize("name", SHAPES)
def test_describe_is_readable_at_80_columns(name: str) -> None:
    result = fairflare("describe", name)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    shown = [line.split(" ")[0] for line in lines]
    for setting in (setting for group in sections(name).values() for setting in group):
        assert setting.name in shown, setting.name
    text = " ".join(result.stdout.split())
    assert "learning_rate a number > 0; default" in text
    assert "--set NAME=VALUE" in text
    quick, paper = make_plan(name), make_plan(name, small=False)
    for key in all_methods()[name].small:
        one, other = next(
            (getattr(a, key), getattr(b, key))
            for a, b in ((quick.rule, paper.rule), (quick.training, paper.training), (quick.task, paper.task))
            if hasattr(a, key)
        )
        shown = f"{key}={one.kind if isinstance(one, Part) else format_setting(one)}"
        assert (shown in text.partition("Without --paper")[2]) == (one != other), shown


def test_describe_answers_the_name_of_a_form_with_its_method() -> None:
    found = " ".join(fairflare("describe", "fed_eba_plus", "form", "tilt").stdout.split())
    assert found.startswith("fed_eba_plus is loss_weights with --set form=fed_eba_plus Loss weights, at the server")
    assert "default fed_eba_plus" in found
    assert "default term" in fairflare("describe", "loss_weights", "form").stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("TERM", "'TERM' is a form of the method 'loss_weights': take loss_weights --set form=term, or, as a row of "
         "compare, loss_weights:form=term"),
        ("FedEBA+", "take loss_weights --set form=fed_eba_plus, or"),
        ("FedISM+", "did you mean 'fed_ism_plus_l' (FedISM+ that weighs by the loss at the search distance "
         "instead of the sharpness) or 'fed_ism_plus_s' (FedISM with a search distance that grows over the rounds)?"),
        ("FedAvg", "did you mean 'fed_avg'? `fairflare list`"),
        ("fed-lwr", "did you mean 'fed_lwr'? `fairflare list`"),
        ("FedMGDA+", "did you mean 'fed_mgda'? `fairflare list`"),
        ("../x", "unknown method '../x'; `fairflare list`"),
    ],
)  # fmt: skip
def test_a_title_of_a_paper_is_answered_with_the_methods_name(typed: str, meant: str) -> None:
    assert meant in one_line(fairflare("run", typed))


def test_describe_knows_the_settings_of_another_kind_of_task() -> None:
    """Check the settings that the quick job's kind lacks, with the values of a run on that kind."""
    assert "has no setting 'phantom_samples'" in one_line(fairflare("describe", "fed_avg", "phantom_samples"))
    found = fairflare("describe", "fed_avg", "phantom_samples", "local_epochs", "--task", "classification").stdout
    plan = make_plan("fed_avg", task="classification", shown=True)
    assert "FedAvg, task: classification" in found
    assert f"default {plan.training.local_epochs}" in found
    assert f"default {plan.task.phantom_samples}" in found  # type: ignore[attr-defined]
    assert "cannot learn segmentation" in one_line(fairflare("describe", "fed_mas", "--task", "segmentation"))


def test_the_help_of_a_run_fits_a_screen_and_all_of_it_is_one_option_away() -> None:
    short, whole = (fairflare("run", option).stdout for option in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 50
    options = {option for line in whole.splitlines() for option in re.findall(r"--[a-z][a-z-]+", line[:28])}
    assert {"--help-all", "--timeout", "--task-file", "--grace"} <= options
    assert "--help-all" in short
    assert "--timeout" not in short
    assert "--help-all" not in fairflare("show", "--help").stdout


def test_describe_suggests_the_method() -> None:
    assert "unknown method 'fedmrl'; did you mean 'fed_mrl'? `" in one_line(fairflare("describe", "fedmrl"))
    assert one_line(fairflare("describe", "xyz")).startswith("unknown method 'xyz'; `fairflare list` has all ")


# ------------------------------------------------------------------------------------------------ wrong values

WRONG = [
    ("fed_avg", ["learning_rate=abc"], "learning_rate must be a number > 0, got 'abc'"),
    ("fed_mrl", ["weighting.grid=5"], "weighting=som: grid must be 2 entries, each an integer >= 1, got 5"),
    ("fed_mrl", ["weighting.grid=[2,0]"], "weighting=som: grid must be 2 entries, each an integer >= 1; entry 1 is 0"),
    (
        "fed_mrl",
        ["mu_policy.actions=0.1"],
        "actions must be a list, each entry a number in [0, 1], not empty or nothing, got 0.1",
    ),
    (
        "fed_mrl",
        ["mu_policy.actions=[]"],
        "actions must be a list, each entry a number in [0, 1], not empty or nothing, got []",
    ),
    ("fed_mrl", ["mu_policy.zeta=95"], "zeta is a fraction in [0, 1], got 95"),
    ("fed_avg", ["local_epochs=true"], "local_epochs must be an integer >= 1, got True"),
    ("fed_avg", ["local_epochs=1.5"], "local_epochs must be an integer >= 1, got 1.5"),
    ("fed_mrl", ["use_fair=1"], "use_fair must be true or false, got 1"),
    ("fed_avg", ["features=wide"], "features must be 6 entries, each an integer >= 1, got 'wide'"),
    ("fed_avg", ["betas=[0.9]"], "betas must be 2 entries, each a number in [0, 1), got [0.9]"),
    ("fed_avg", ["momentum=1"], "momentum must be a number in [0, 1), got 1"),
    ("fed_avg", ["max_grad_norm=0"], "max_grad_norm must be a number > 0 or nothing, got 0"),
    ("fed_avg", ["learning_rate=null"], "learning_rate must be a number > 0, got None"),
    ("fed_avg", ["learning_rate=NaN"], "learning_rate must be a number > 0, got nan"),
    ("fed_avg", ["lerning_rate=1"], "has no setting 'lerning_rate'; did you mean 'learning_rate'? "),
    (
        "fed_avg",
        ["min_sites=2"],
        "'min_sites' is no setting of method 'fed_avg' but an option of the run: --min-sites on the command line",
    ),
    ("fed_avg", ["rounds=2"], "'rounds' is no setting of method 'fed_avg' but an option of the run: --rounds on the"),
    ("fed_avg", ["max_missed=2"], "but an option of the run: an argument of the recipe"),
    ("fed_mrl", ["wieghting.grid=[2,2]"], "has no setting 'wieghting.grid'; did you mean 'weighting.grid' or "),
    ("fed_mrl", ["weighting.gird=[2,2]"], "weighting=som: BySom has no setting 'gird'; did you mean 'grid'?"),
    ("fed_mrl", ["weighting=somm"], "must be one of 'samples', 'uniform', 'som', got 'somm'; did you mean 'som'?"),
    ("fed_mrl", ["mu_policy=5"], "mu_policy must be one of 'fixed', 'random', 'bandit', 'qmix', 'vdn', got 5"),
    ("fed_mrl", ["weighting=samples", "weighting.grid=[2,2]"], "BySamples has no setting 'grid'; it has none"),
    ("fed_mrl", ["mu_policy=random", "mu_policy.gamma=0.9"], "RandomMu has no setting 'gamma'; Available: actions"),
    ("fed_mrl", ["mean_loss.x=1"], "FedMRL has no part 'mean_loss'"),
    ("fed_mrl", ["fair_clamp=20"], "fair_clamp must be at most fair_max=10.0, got 20"),
    ("fed_ism", ["q=-1"], "q must be a number >= 0, got -1"),
    (
        "fed_lwr", ["preset=author"],
        "preset must be one of 'paper', 'authors', 'stable', got 'author'; did you mean 'authors'?",
    ),
    ("fed_mas", ["severity=6"], "severity must be an integer in [1, 5], got 6"),
    ("fed_avg", ["in_channels=2"], "in_channels must be one of 1, 3, got 2"),
    ("fed_avg", ["learning_rate"], "--set wants KEY=VALUE, got 'learning_rate'"),
    ("fed_avg", ["mu=1", "mu=2"], "--set gives 'mu' twice"),
]  # fmt: skip


def test_an_option_that_a_refusal_names_is_one_of_the_command_it_names() -> None:
    group: Any = get_command(cli.app)
    names = {name: {flag for p in group.get_command(None, name).params for flag in (*p.opts, *p.secondary_opts)}
             for name in group.commands}  # fmt: skip
    for setting in {*field_names(RunSettings), *OPTIONS} - {*LIKE_SETTINGS}:
        if setting == "norm_statistics":  # of the training too
            continue
        with pytest.raises(ValueError, match=f"'{setting}' is no setting of method 'fed_avg'") as refused:
            make_plan("fed_avg", settings={setting: 1}, shown=True)
        option = re.search(r"run: (--[a-z-]+)(?: of `fairflare (\w+)`)? on the command line$", str(refused.value))
        if option is None:
            assert str(refused.value).endswith("an argument of the recipe")
            continue
        for command in [option[2]] if option[2] else ["run", "export"]:
            assert option[1] in names[command], (setting, command)


@pytest.mark.parametrize(("method", "items", "message"), WRONG)
def test_wrong_values_are_one_line_that_names_the_setting(
    tmp_path: Path, method: str, items: list[str], message: str
) -> None:
    arguments = [part for item in items for part in ("--set", item)]
    said = one_line(fairflare("export", method, "--out", str(tmp_path), *arguments))
    assert message in said
    assert said == one_line(fairflare("run", method, "--in-process", "-w", str(tmp_path / "run"), *arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "fed_avg", "--in-process", "--threads", "2"], "--threads is an option of the simulator"),
        (["run", "fed_avg", "--in-process", "--sites", "a,a"], "sites must be one or more different names"),
        (["run", "fed_lwrr"], "did you mean 'fed_lwr'"),
        (["run", "fed_avg", "--task", "regression"], "task must be one of 'segmentation', 'classification'"),
        (["run", "fed_avg", "--data", "nowhere.json"], "--data nowhere.json does not exist"),
        (["run", "fed_avg", "--data", __file__], "is not readable JSON (Extra data: line 1 column 3 (char 2))"),
        (["run", "fed_avg", "--sites", "0.5"], "--sites wants a whole number of sites, or their names"),
        (["run", "fed_avg", "--sites", "2", "--min-sites", "3"], "min_sites=3, but the job has 2 site(s)"),
        (
            ["run", "fed_avg", "--sites", "3,5"],
            "2 sites called '3' and '5'? Give a number of sites (--sites 5) or names (--sites site-3,site-5)",
        ),
        (["run", "bsm_fl", "--task", "segmentation"], "'bsm_fl' cannot learn segmentation: criterion='balanced_"),
        (["run", "fed_avg", "--timeout", "0"], "timeout must be a number > 0, got 0"),
        (["export", "fed_avg", "--out", "x", "--preinstalled", "--bundle"], "exclude each other"),
        (["show", "nowhere"], "no results.json in nowhere; give a run's folder, as runs/METHOD-seed0"),
        (["check-data", "."], "no folder with a datalist.json; `fairflare prepare` writes it for folders of images"),
        (["run", "fed_avg", "--data", "."], "fairflare.json does not exist; `fairflare prepare` writes it for folders"),
        (["compare", "fed_avg", "solo", "--seeds", "1,x"], "seeds must be an integer >= 1, got '[1,x]'"),
        (
            ["compare", "fed_lwr", "bsm_fl"],
            "row 'bsm_fl': method 'bsm_fl' cannot learn segmentation: criterion='balanced_softmax' needs",
        ),
    ],
)
def test_other_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fairflare.cli.run.simulate.simulate", lambda *a: pytest.fail("the simulator was started"))
    assert message in one_line(fairflare(*arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "fed_avg", "--gpu", "0"], "--gpu. The device stands in the file of --data, in the site's block"),
        (["run", "fed_avg", "-gpu", "0"], 'in local/fairflare.json): "device": "cuda:0", or "cpu". By default'),
        (["predict", "m", "images", "--gpu", "1"], "probably: fairflare predict m images --device cuda:1"),
        (["predict", "--cpu", "m", "images"], "probably: fairflare predict --device cpu m images"),
        (["predict", "images", "--model", "m.pt"], "probably: fairflare predict m.pt images"),
        (["compare", "--method", "fed_avg", "--method", "fed_lwr"], "probably: fairflare compare fed_avg fed_lwr"),
        (["run", "fed_avg", "-n", "3"], "probably: fairflare run fed_avg --sites 3"),
        (["run", "fed_avg", "--config", "x.yaml"], "--set NAME=VALUE (`fairflare describe METHOD` lists them)"),
        (["compare", "fed_avg", "--config", "x.yaml"], "probably: fairflare compare fed_avg --plan x.yaml"),
        (["run", "fed_avg", "--dataset", "prostate"], "a synthetic phantom; `fairflare prepare` makes a folder"),
        (
            ["run", "fed_avg", "fed_lwr:lwr_lambda=1", "--rounds", "2", "--in-process"],
            "probably: fairflare compare fed_avg fed_lwr:lwr_lambda=1 --rounds 2",
        ),
        (["list", "fed_avg"], "probably: fairflare describe fed_avg"),
        (["list", "methods"], "Got unexpected extra argument(s) (methods)"),
        (["run", "FedAvg", "--epochs", "5"], "probably: fairflare run fed_avg --set local_epochs=5"),
        (["run", "--method", "FedAvg"], "probably: fairflare run fed_avg"),
        (["compare", "--methods", "FedAvg,Fed-LWR", "--seeds", "2"], "fairflare compare fed_avg fed_lwr --seeds 2"),
        (["run", "FedAvg", "FedProx:mu=1"], "probably: fairflare compare fed_avg fed_prox:mu=1"),
        (["run", "fed_avg", "--out", "FedProx"], "probably: fairflare run fed_avg --workspace FedProx"),
        (["train", "FedAvg"], "probably: fairflare run fed_avg"),
        (["help", "run"], "probably: fairflare run --help"),
        (["run"], "Missing argument 'method'. A name that `fairflare list` prints."),
        (["export", "fed_avg"], "Missing option '--out' / '-o'. Folder that the job folder"),
        (["compare", "fed_avg,fed_lwr"], "rows are words, separated by spaces: fed_avg fed_lwr"),
        (["compare", "fed_avg fed_lwr"], "rows are words, separated by spaces: fed_avg fed_lwr"),
        (["run", "fed_avg", "--method", "fed_lwr"], "probably: fairflare compare fed_lwr fed_avg"),
        (["run", "fed_avg", "--epoch", "2"], "probably: fairflare run fed_avg --set local_epochs=2"),
        (["run", "fed_avg", "--client", "3"], "probably: fairflare run fed_avg --sites 3"),
        (["run", "--dry-run", "fed_avg"], "probably: fairflare export --out jobs fed_avg"),
        (["run", "fed_avg", "--epochs", "3"], "probably: fairflare run fed_avg --set local_epochs=3"),
        (["run", "fed_avg", "--lr=0.1", "--in-process"], "fairflare run fed_avg --set learning_rate=0.1 --in-process"),
        (["run", "fed_prox", "--mu"], "probably: fairflare run fed_prox --set mu=VALUE"),
        (["compare", "fed_prox:q=1", "--local-epochs", "2"], "compare fed_prox:q=1 --set local_epochs=2"),
        (["run", "--method", "fed_avg", "--rounds", "2"], "probably: fairflare run fed_avg --rounds 2"),
        (["run", "fed_avg", "--clients", "4"], "probably: fairflare run fed_avg --sites 4"),
        (["run", "fed_avg", "--output", "my runs"], "probably: fairflare run fed_avg --workspace 'my runs'"),
        (["export", "fed_avg", "--output", "x"], "probably: fairflare export fed_avg --out x"),
        (["run", "fed_avg", "--dry-run"], "probably: fairflare export fed_avg --out jobs"),
        (["run", "fed_avg", "--seeds", "3"], "probably: fairflare compare fed_avg --seeds 3"),
        (["compare", "fed_avg", "--seed", "3"], "probably: fairflare compare fed_avg --seeds 3"),
        (["show", "--epochs", "3"], "No such option: --epochs"),
        (["version"], "probably: fairflare --version"),
        (["train", "fed_avg", "--rounds", "1"], "probably: fairflare run fed_avg --rounds 1"),
        (
            ["run", "fed_avg", "--epochs", "1", "--lr", "0.01", "--clients=2", "--in-process"],
            "fairflare run fed_avg --set local_epochs=1 --set learning_rate=0.01 --sites 2 --in-process",
        ),
        (["run", "fed_avg", "--dry-run", "--lr", "1"], "fairflare export fed_avg --out jobs --set learning_rate=1"),
        (["export", "fed_avg", "--data", "x", "--out", "y"], "--data x does not exist"),
        (["run", "fed_avg", "--set", "local_epochs", "2"], "--set wants KEY=VALUE: --set local_epochs=2"),
        (["run", "fed_avg", "--paper", "fed_prox"], "Papers that --paper knows by name: fed_lwr, fed_lwr_rif,"),
        (["prepare", "masks", "--input", "x", "--output", "y"], "probably: fairflare prepare masks --source x --out y"),
        (["prepare", "images", "--data=x", "-o", "y"], "probably: fairflare prepare images --source x --out y"),
        (
            ["run", "./hospitals", "--rounds", "2"],
            "unknown method './hospitals'; `fairflare list` has all 44; a folder of data goes",
        ),
        (["run", "fed_avg", "another"], "Got unexpected extra argument(s) (another)"),
        (["run", "fed_avg", "--sites", "all"], "--sites all is for export"),
        (["compare", "fed_avg", "--sites", "all"], "--sites all is for export; a comparison needs the number or"),
    ],
)
def test_a_mistaken_option_is_answered_with_what_was_meant(arguments: list[str], told: str) -> None:
    result = fairflare(*arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.replace("│", " ").split())


def test_a_report_of_two_runs_is_what_show_prints() -> None:
    result = fairflare("report", "runs/a", "runs/b")
    assert "probably: fairflare show runs/a runs/b" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Task(:\n", "SyntaxError"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("class Task: pass\n", "must define a class Task"),
    ],
)
def test_a_broken_task_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    said = one_line(fairflare("export", "fed_avg", "--out", str(tmp_path / "jobs"), "--task-file", str(path)))
    assert message in said
    assert "mine.py" in said
    assert not (tmp_path / "jobs").exists()


NETWORK = """
from fairflare.tasks.segmentation import SegmentationTask

class Task(SegmentationTask):
    def build_model(self):
        {}
"""


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return None", 2, "build_model() of the task (Task) must give a torch.nn.Module, got NoneType"),
        ("import torch; return torch.nn.LazyConv2d(1, 1)", 2, "'weight' has no size before the first batch"),
        ("import torch; return torch.nn.Conv2d(1, 7, 1)", 2, "gives (1, 7, 64, 64), and (1, 1, 64, 64) is needed"),
        ("import torch; return torch.nn.Conv2d(2, 1, 1)", 0, "fails: RuntimeError: Given groups=1"),
        ("open('/no/such/weights.pt')", 0, "warning: build_model() of the task (Task) failed: FileNotFoundError"),
    ],
)
def test_an_export_tries_the_users_own_network(body: str, code: int, message: str, tmp_path: Path) -> None:
    """Check that a network that needs a file of the sites is exported with a warning."""
    path = tmp_path / "mine.py"
    path.write_text(NETWORK.format(body))
    done = fairflare("export", "fed_avg", "--out", str(tmp_path / "jobs"), "--task-file", str(path))
    assert done.exit_code == code, done.output
    assert message in " ".join(done.output.split())
    assert (tmp_path / "jobs").exists() == (code == 0)


TASK_WITH_SETTING = """
from __future__ import annotations

from fairflare.base.settings import PositiveInt, settings
from fairflare.tasks.segmentation import SegmentationTask


@settings
class Task(SegmentationTask):
    depth: PositiveInt = 3
"""


def test_a_task_file_may_declare_settings(tmp_path: Path) -> None:
    """Check also annotations that are texts, which are looked up in the task file's module."""
    file = tmp_path / "task.py"
    file.write_text(TASK_WITH_SETTING)
    task = make_plan("fed_avg", task_file=file, settings={"depth": 4}).task
    assert task.depth == 4  # type: ignore[attr-defined]
    assert type(pickle.loads(pickle.dumps(task))) is type(task)
    with pytest.raises(ValueError, match=r"^depth must be an integer >= 1, got 'x'$"):
        make_plan("fed_avg", task_file=file, settings={"depth": "x"})


def test_a_bug_of_ours_shows_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **named: Any) -> Any:
        return "a" + 1  # type: ignore[operator]

    monkeypatch.setattr("fairflare.federation.plan.plan.plan_run", broken)
    monkeypatch.setattr(sys, "argv", ["fairflare", "export", "fed_avg", "--out", str(tmp_path / "jobs")])
    with pytest.raises(TypeError, match="can only concatenate str") as raised:
        cli.main()
    assert "broken" in [entry.name for entry in raised.traceback]


# ------------------------------------------------------------------------------------------------ the pages


def documented() -> list[str]:
    """Return every complete ``run`` and ``export`` of the pages; ``test_documented_commands.py`` has the other ones."""
    found = []
    for page in (
        ROOT / "README.md",
        ROOT / "SKILL.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "poc" / "README.md",
    ):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            found += re.findall(r"^fairflare (?:run|export) .*$", block, re.MULTILINE)
        found += re.findall(r"`(fairflare (?:run|export) [^`]*)`", text)
    # The methods that a page writes are tested with the page.
    return sorted({command for command in found if not re.search(r"METHOD|loss_power|run term", command)})


def test_there_are_documented_commands() -> None:
    assert len(documented()) > 15


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fairflare.cli.run.simulate.simulate", lambda recipe, *rest: ran.append(recipe.name) or 0)
    monkeypatch.setattr(run_command, "run_here", lambda plan, *rest: ran.append(plan.method.name) or 0)
    monkeypatch.setattr(run_command, "report", lambda *rest: 0)
    words = shlex.split(command, comments=True)[1:]
    for option in ("--data", "-d"):
        if option in words:
            path = Path(words[words.index(option) + 1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
            if words[0] == "export":
                (path.parent / "manifest.json").write_text('{"kind": "segmentation"}')
    if "task.py" in words:
        Path("task.py").write_text("from fairflare.tasks.segmentation import SegmentationTask as Task\n")
    if "my_task.py" in words:
        (code,) = re.findall(r"```python\n(from monai.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        Path("my_task.py").write_text(code)
    if "my_bundle" in words:
        write_bundle(Path("my_bundle"))
    if "plan=plan.json" in words:
        Path("plan.json").write_text(json.dumps(tiny_plan()))
    result = fairflare(*words)
    assert result.exit_code == 0, result.output
    assert ran == [words[1]] if words[0] == "run" else "job folder: " in result.stdout


# ------------------------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Do two runs in this process, one that completes and one that cannot, with the events of the first one's view."""
    root = tmp_path_factory.mktemp("runs")
    told: list[tuple[str, dict[str, Any]]] = []
    original = RunView.event

    def event(self: RunView, kind: str, details: Any) -> None:
        told.append((kind, dict(details)))
        original(self, kind, details)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen.console, "width", 80)
        patch.setattr(screen.errors, "width", 80)
        patch.setattr(RunView, "event", event)
        common = [*RUN, "--rounds", "1"]
        good = fairflare(*common, "-w", str(root / "good"))
        seen = list(told)
        bad = fairflare(*common, "-w", str(root / "bad"), "--set", "learning_rate=1e30")
    return {"root": root, "good": good, "bad": bad, "told": seen}


@pytest.mark.parametrize(
    ("passes", "memory", "gpu", "wanted"),
    [
        ({"rounds": 3, "local_epochs": 5}, 2**40, False, 4),  # of four cores, for six sites
        ({"rounds": 20, "local_epochs": 1, "sites": 2}, 2**40, False, 2),
        ({"rounds": 19, "local_epochs": 1, "sites": 2}, 2**40, False, 1),  # 38 passes
        ({"rounds": 3, "local_epochs": 5}, 3 * 2**30, False, 3),
        ({"rounds": 3, "local_epochs": 5}, 2**40, True, 1),
    ],
)
def test_how_many_sites_train_at_a_time(
    monkeypatch: pytest.MonkeyPatch, passes: dict[str, int], memory: int, gpu: bool, wanted: int
) -> None:
    monkeypatch.setattr("fairflare.base.machine.memory.cores", lambda: 4)
    monkeypatch.setattr("fairflare.base.machine.memory.free_memory", lambda: memory)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    plan = make_plan(
        "fed_avg", sites=passes.get("sites", 6), num_rounds=passes["rounds"],
        settings={"local_epochs": passes["local_epochs"]},
    )  # fmt: skip
    assert sites_at_a_time(plan) == wanted


def test_a_run_in_process_shows_how_it_goes(runs: dict[str, Any]) -> None:
    good = runs["good"]
    assert good.exit_code == 0, good.output
    told = runs["told"]
    assert [(d["phase"], d["sites"]) for kind, d in told if kind == "phase"] == [
        ("check", ["site-1", "site-2"]),
        ("train", ["site-1", "site-2"]),
        ("validate", ["site-1", "site-2"]),
    ]
    assert [(d["phase"], d["site"], d["ok"]) for kind, d in told if kind == "site"] == [
        (phase, site, True) for phase in ("check", "train", "validate") for site in ("site-1", "site-2")
    ]
    assert [d["current_round"] for kind, d in told if kind == "round_done"] == [0]
    # Lines, as this is no terminal, and apart from the table.
    lines = good.stderr.splitlines()
    assert lines[0] == "check: 2 site(s) open their data"
    assert re.fullmatch(
        r"round 0 done \(1 of 1, \d+ s\); the model before it: dice 0\.\d{3} on average, worst 0\.\d{3} \(site-[12]\)",
        lines[1],
    )
    assert lines[2] == "validate: 2 site(s) measure a final model"
    assert re.fullmatch(r"seconds: start \d+, check \d+, server \d+, train \d+, validate \d+ \(server: .+\)", lines[3])
    assert not lines[4:]
    assert good.stdout.startswith("FedAvg (fed_avg), seed 0, 1 round\n")
    assert "SYNTHETIC" in good.stdout
    assert "worst" in good.stdout
    assert max(map(len, good.stdout.split("results: ")[0].splitlines())) <= 80
    results = runs["root"] / "good" / "server" / "simulate_job" / "fairflare" / "results.json"
    assert f"results: {results}" in good.stdout
    document = json.loads(results.read_text())
    assert document["status"] == "completed"
    config = document["info"]["config"]
    assert sorted(config) == ["norm_statistics", "num_rounds", "rule", "seed", "task", "training"]
    assert config["rule"] == {"path": "fairflare.methods.fed_avg.FedAvg", "args": {"weighting": "samples"}}
    assert config["training"]["args"]["local_epochs"] == 1
    assert config["task"]["args"]["phantom_cases"] == 0.3
    log = (runs["root"] / "good.log").read_text()
    assert "round 0 of 1, from 0" in log


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], ["north", "south-2"]),
        (["--sites", "south-2,north"], ["south-2", "north"]),
        (["--sites", "2"], "'site-1' is not in the file"),
        (["--sites", "north,south2"], "'south2' is not in the file; did you mean 'south-2'; the file's 'south-2' is"),
    ],
)
def test_the_names_of_the_sites_come_from_the_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], wanted: Any
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(run_command, "run_here", lambda plan, *rest: ran.append(plan.sites) or 0)
    monkeypatch.setattr(run_command, "report", lambda *rest: 0)
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"sites": {"server": {}, "north": {"data_root": "x"}, "south-2": {}}}))
    command = ["run", "fed_lwr", "--in-process", "-w", str(tmp_path / "w"), "--data", str(data), *arguments]
    result = fairflare(*command)
    if isinstance(wanted, str):
        assert f"--sites and --data name different sites: {wanted}" in one_line(result)
    else:
        assert result.exit_code == 0, result.output
        assert ran == [wanted]


def test_a_run_that_fails_says_why_with_exit_code_1(runs: dict[str, Any]) -> None:
    bad = runs["bad"]
    assert bad.exit_code == 1
    lines = bad.stderr.splitlines()
    assert lines[0] == "check: 2 site(s) open their data"
    assert lines[1].startswith("round 0, train: site-1, site-2 left out: ")  # of one reason: once
    assert lines[2].startswith("failed: round 0, train: 0 usable result(s) of 2 asked")
    assert "lower learning_rate" in bad.stderr
    assert f"log: {runs['root'] / 'bad.log'}" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert bad.stdout == ""


def test_what_the_sites_of_a_simulator_kept_back_is_in_its_log(tmp_path: Path) -> None:
    """Check that texts that no site sends are printed once, as in the simulator the log belongs to the user."""
    log = tmp_path / "run.log"
    lines = [
        "  File 'x.py', line 3, in forward",
        "RuntimeError: expected 3 channels, got 1",
        "2026 - ERROR - RuntimeError: no",
    ]
    log.write_text("\n".join([*lines, "torch.cuda.OutOfMemoryError: 2 GiB", *lines]))
    kept = RunResults(reason="site 'a': train failed with RuntimeError (details in the site's log)")
    assert what_sites_said(kept, log) == [lines[1], "torch.cuda.OutOfMemoryError: 2 GiB"]
    assert what_sites_said(RunResults(reason="site 'a': no data"), log) == []
    assert what_sites_said(kept, tmp_path / "none.log") == []


def test_a_run_that_may_not_go_on_says_so_once(tmp_path: Path) -> None:
    """Check that results have the reason and the log has its origin, for any kind of error."""
    common = [*RUN, "--rounds", "1", "--experiment", "e"]
    assert fairflare(*common, "-w", str(tmp_path / "run")).exit_code == 0
    refused = fairflare(*common, "-w", str(tmp_path / "run"), "--seed", "4")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("failed: experiment 'e' has a checkpoint of other settings (seed: was 0, is 4)")
    assert refused.stderr.count("checkpoint of other settings") == 1
    log = (tmp_path / "run.log").read_text()
    assert "CheckpointError: experiment 'e' has a checkpoint" in log
    assert "typer" not in log


def test_results_of_an_earlier_run_are_not_taken_for_this_ones(runs: dict[str, Any], tmp_path: Path) -> None:
    common = [*RUN, "--rounds", "1", "-w", str(tmp_path / "r")]
    shutil.copytree(runs["root"] / "good", tmp_path / "r")
    data = tmp_path / "data.json"
    data.write_text('{"sites": {"server": 3}}')
    failed = fairflare(*common, "--overwrite", "--data", str(data))
    assert failed.exit_code == 1
    assert "failed: the run ended with code 1 before the first round" in failed.stderr
    assert "'sites.server' in local/fairflare.json must be a JSON object" in failed.stderr


def test_show_finds_the_results(runs: dict[str, Any], tmp_path: Path) -> None:
    good = runs["root"] / "good"
    folder = good / "server" / "simulate_job" / "fairflare"
    shown = fairflare("show", str(good))
    assert shown.exit_code == 0
    table = runs["good"].stdout
    for line in (line for line in shown.stdout.splitlines() if "site-" in line or "average" in line):
        assert line in table
    for path in (folder, folder.parent, folder / "results.json"):
        assert fairflare("show", str(path)).stdout == shown.stdout, path
    several = fairflare("show", str(good), str(folder))
    assert several.exit_code == 0
    assert "fed_avg" in several.stdout
    assert "1 of 2 runs stand there twice and count once." in several.stdout
    assert fairflare("show", str(good), "--csv", "-m", "loss").stdout.startswith("site,loss\nsite-1,")
    assert "| site | dice |" in fairflare("show", str(good), "--markdown", "-m", "dice").stdout
    assert "has no metric 'dise'; did you mean 'dice'?" in one_line(fairflare("show", str(good), "-m", "dise"))
    assert "exclude each other" in one_line(fairflare("show", str(good), "--csv", "--markdown"))
    broken = tmp_path / "results.json"
    broken.write_text("{")
    assert "results.json" in one_line(fairflare("show", str(tmp_path)))
    assert "no results.json" in one_line(fairflare("show", str(tmp_path / "nothing")))


def test_a_run_is_not_replaced_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common = [*RUN, "--rounds", "1"]
    assert fairflare(*common, "--label", "mine", "--seed", "3").exit_code == 0
    kept = tmp_path / "runs" / "mine-seed3" / "server" / "simulate_job" / "fairflare" / "results.json"
    before = kept.read_bytes()
    assert json.loads(before)["info"]["label"] == "mine"
    refused = one_line(fairflare(*common, "--label", "mine", "--seed", "3"))
    assert re.search(r"mine-seed3 holds a run already \(completed, of 20.*give --overwrite", refused)
    assert kept.read_bytes() == before
    assert fairflare(*common, "--label", "mine", "--seed", "3", "--overwrite").exit_code == 0
    assert kept.read_bytes() != before
    assert "'../x-seed0' must be" in one_line(fairflare(*common, "--label", "../x"))


def test_an_export_is_not_replaced_unasked(tmp_path: Path) -> None:
    export = ["export", "fed_avg", "--out", str(tmp_path)]
    assert fairflare(*export).exit_code == 0
    mine = tmp_path / "fed_avg" / "app" / "custom" / "task.py"
    mine.write_text("# mine")
    assert "exists; give --overwrite" in one_line(fairflare(*export))
    assert mine.read_text() == "# mine"
    assert fairflare(*export, "--overwrite").exit_code == 0
    assert mine.read_text() != "# mine"


# ------------------------------------------------------------------------------------------------ doctor


def found_by_doctor(*arguments: str) -> tuple[int, dict[str, str]]:
    result = fairflare("doctor", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    rows = re.findall(r"^(\S.*?) +(ok|warning|problem) ", result.stdout, re.MULTILINE)
    return result.exit_code, dict(rows)


def test_doctor_on_a_good_machine() -> None:
    code, found = found_by_doctor()
    assert code == 0
    for name in ("python", "fairflare", "nvflare", "torch", "monai", "GPU", "disk"):
        assert found[name] in ("ok", "warning")
    assert found["opacus"] == ("ok" if find_spec("opacus") else "warning")  # of the extra dp
    assert max(map(len, fairflare("doctor").stdout.splitlines())) <= 80


def test_doctor_sees_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    original = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "2.8.0" if name == "nvflare" else original(name))
    assert found_by_doctor() == (1, found_by_doctor()[1] | {"nvflare": "problem"})


def test_an_export_says_what_a_site_must_permit_and_doctor_what_lacks(tmp_path: Path) -> None:
    """Check both kinds of job, and a kit whose list is older than a class that a job names."""
    for options, needed in (([], "permit code of their submitter (byoc)"), (["--preinstalled"], "allow its classes")):
        job = ["export", "fed_avg", *options, "--out", str(tmp_path / needed[:5])]
        done = fairflare(*job)
        told = f"The server and every site must {needed}, or the job fails; `fairflare doctor --kit KIT` shows it"
        assert told in done.stderr.splitlines(), done.output
    listed = [name for name in job_classes() if not name.endswith(".EvaluationController")]
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "resources.json").write_text(json.dumps({"class_allow_list": listed}))
    (found,) = (found for found in doctor.start_up_kit(tmp_path) if found.what == "allow list")
    assert "(fairflare.flare.evaluation.EvaluationController): jobs with them are refused" in found.text


def test_doctor_looks_at_a_kit(tmp_path: Path) -> None:
    assert found_by_doctor("--kit", str(tmp_path))[1]["kit"] == "problem"
    local = tmp_path / "local"
    local.mkdir()
    classes = job_classes()
    for listed, state in (
        (["nvflare."], "problem"),
        (["fair"], "problem"),
        (["nvflare.", *classes], "ok"),
        (["nvflare.", *classes[1:]], "warning"),
        *((["nvflare.", *classes, wide], "warning") for wide in ("fairflare.", "fairflare", "fairflare.flare", "*")),
    ):
        (local / "resources.json").write_text(json.dumps({"class_allow_list": listed}))
        assert found_by_doctor("--kit", str(tmp_path))[1]["allow list"] == state
    startup = tmp_path / "startup"
    startup.mkdir()
    for days, state in ((400, "ok"), (10, "warning"), (-1, "problem")):
        (startup / "client.crt").write_bytes(certificate(days))
        assert found_by_doctor("--kit", str(tmp_path))[1]["certificate client.crt"] == state


def certificate(days: int) -> bytes:
    """Return a self-signed certificate that ends in so many days."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "site-1")])
    end = datetime.now(timezone.utc) + timedelta(days=days, hours=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(end - timedelta(days=500)).not_valid_after(end)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def drawn(width: int, *, terminal: bool) -> list[str]:
    """Return the screen's content at the end, with a site's name that is longer than the space."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    sites = ["a", "university-hospital-of-the-north", "university-hospital-of-the-south"]
    with RunView(console, metric="balanced_accuracy", directions={"balanced_accuracy": True}) as view:
        view.event("phase", {"current_round": 0, "num_rounds": 2, "phase": "train", "sites": [*sites, "later"]})
        told = {"current_round": 0, "num_rounds": 2, "phase": "train", "seconds": 1.5}
        values = {"loss": 1.0, "accuracy": 0.125, "own/balanced_accuracy": 0.875}
        metrics = {s: {**values, "balanced_accuracy": v} for s, v in zip(sites, (0.25, 0.75), strict=False)}
        for site in metrics:  # what a site measured itself may be over other structures
            view.event("site", {**told, "site": site, "ok": True, "metrics": {"balanced_accuracy": 0.875}})
        reason = f"site {sites[2]!r}: [b] no answer within 5 s"
        view.event("site", {**told, "site": sites[2], "ok": False, "reason": reason})
        view.event("site", {**told, "site": "later", "ok": True, "metrics": {}})
        view.event(
            "round_done",
            {"current_round": 0, "num_rounds": 2, "metrics": {**metrics, "later": {}}, "over": " (over: a)"},
        )
        view.event("something new", {})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()
    return [line.rstrip() for line in shown]


def test_a_terminal_names_the_sites_that_are_still_at_work() -> None:
    lines = "\n".join(drawn(80, terminal=True))
    assert "round 0, train: later ..." in lines
    assert "round 0, train: all sites ..." in lines
    assert "the-south left out: [b] no answer within 5 s" in " ".join(lines.split())
    assert "round 0 done (1 of 2" in lines


def test_the_last_line_says_where_the_seconds_went(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 4.0, 9.0, 10.0, 12.0, 27.0))  # a phase begins and ends at 4 and 9, the other at 10 and 12
    monkeypatch.setattr(run_view, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with RunView(Console(file=(out := io.StringIO()), width=100)) as view:
        for phase in ("train", "validate"):
            told = {"current_round": 0, "num_rounds": 1, "phase": phase}
            view.event("phase", {**told, "sites": ["a"]})
            view.event("site", {**told, "site": "a", "ok": True, "metrics": {}})
    wanted = "seconds: start 4, train 5, server 16, validate 2 (server: between the phases and at the end)"
    assert out.getvalue().splitlines()[-1] == wanted


def test_a_pipe_gets_a_line_for_each_round() -> None:
    left_out, done = drawn(80, terminal=False)
    assert left_out == "round 0, train: university-hospital-of-the-south left out: [b] no answer within 5 s"
    wanted = "balanced_accuracy (over: a) 0.500 on average, worst 0.250 (a)"
    assert re.fullmatch(rf"round 0 done \(1 of 2, \d+ s\); the model before it: {re.escape(wanted)}", done), done


@pytest.mark.parametrize("arguments", [[], ["--experiment", "e"]])
def test_ctrl_c_ends_a_run_and_says_what_next(tmp_path: Path, arguments: list[str]) -> None:
    """Check a signal that comes in the second round, from the site's own loss."""
    file = tmp_path / "task.py"
    file.write_text(
        "import os, signal\n"
        "from fairflare.tasks.segmentation import SegmentationTask\n\n"
        "calls = []\n\n"
        "class Task(SegmentationTask):\n"
        "    def loss(self, *given):\n"
        "        calls.append(1)\n"
        "        if len(calls) == 12:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        return super().loss(*given)\n"
    )
    common = [*RUN, "--rounds", "50", "-w", str(tmp_path / "run")]
    before = signal.getsignal(signal.SIGINT)
    stopped = fairflare(*common, *arguments, "--task-file", str(file))
    assert signal.getsignal(signal.SIGINT) is before
    assert stopped.exit_code == 130, stopped.output
    assert "stopping; Ctrl-C again ends it at once" in stopped.stderr
    wanted = "The same command goes on" if arguments else "It cannot be resumed; to be able to, start with --experiment"
    assert f"Stopped. {wanted}" in stopped.stderr
    assert "Traceback" not in stopped.output
    document = run_document(tmp_path / "run" / "server" / "simulate_job" / "fairflare")
    assert document["status"] == "failed"
    assert document["reason"] == "the run was stopped by Ctrl-C (SIGINT)"
    assert 0 < len(document["rounds"]) < 50


# ------------------------------------------------------------------------------------------------ completion


def offered(words: str) -> list[str]:
    """Return what the shell would offer at the end of the line."""
    environment = {"_FAIRFLARE_COMPLETE": "complete_bash", "COMP_WORDS": f"fairflare {words}"}
    environment["COMP_CWORD"] = str(len(environment["COMP_WORDS"].split(" ")) - 1)
    return CliRunner().invoke(cli.app, [], prog_name="fairflare", env=environment).stdout.split()


def test_methods_are_completed() -> None:
    assert offered("describe ") == METHODS
    assert offered("run fed_i") == [name for name in METHODS if name.startswith("fed_i")]
    assert offered("export fed_avg --train-like bsm_k") == ["bsm_kd"]
    assert offered("run fed_avg --task seg") == ["segmentation"]


@pytest.mark.parametrize("name", SHAPES)
def test_settings_are_completed_as_described(name: str) -> None:
    described_names = {f"{setting.name}=" for group in sections(name).values() for setting in group}
    assert set(offered(f"run {name} --rounds 3 --set ")) == described_names


def test_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert offered("show ") == []
    for name in ("fed_avg-seed0", "fed_lwr-seed0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "fed_avg-seed0.log").touch()
    assert offered("show ") == ["runs/fed_avg-seed0", "runs/fed_lwr-seed0"]
    assert offered("show runs/fed_l") == ["runs/fed_lwr-seed0"]


ANSWERS = (
    ("--help", "Usage"),
    ("--version", "torch "),
    ("list", "fed_lwr"),
    ("list --json", "fed_lwr"),
    ("describe fed_lwr", "preset"),
    ("describe fair_lora", "fair_lora"),
    ("describe fed_lwr_last_layer --json", "down_3"),
    ("examples", "bundle3d"),
    ("show nowhere", "no results.json"),
    ("describe fed_proxx", "did you mean 'fed_prox'"),
    ("run fed_proxx", "did you mean 'fed_prox'"),
    ("run fed_prox --set mux=1", "no setting 'mux'"),
    ("run fed_prox --in-process --set mu=-1", "mu must be a number >= 0"),
    ("run fed_mas --task segmentation", "cannot learn segmentation"),
    ("export fed_prox --out jobs --set mu=-1", "mu must be a number >= 0"),
    ("compare fed_prox --set mux=1", "no setting 'mux'"),
    ("run fed_prox --colour", "No such option"),
)


def test_answers_without_tensors_import_none_of_the_large_packages(tmp_path: Path) -> None:
    """Check one process that gives all answers: whichever imports one of them is named."""
    code = """
import contextlib, io, json, sys
from fairflare.cli import main
for line in sys.argv[1:]:
    sys.argv, out = ["fairflare", *line.split()], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main()
    loaded = sorted({"torch.nn", "monai.data", "scipy.stats", "nvflare"} & set(sys.modules))
    print(json.dumps([line, loaded, out.getvalue()]))
"""
    command = [sys.executable, "-c", code, *(line for line, _ in ANSWERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line, loaded) for line, loaded, _ in found] == [(line, []) for line, _ in ANSWERS], done.stderr
    for (line, said), (_, _, answer) in zip(ANSWERS, found, strict=True):
        assert said in answer, line


def test_a_large_package_is_imported_when_it_is_used() -> None:
    code = (
        "import sys\n"
        "from fairflare.base.machine.later import compile_later, import_later\n"
        "import_later('torch', 'monai')\n"
        "compile_later()\n"
        "import torch\n"
        "import monai\n"
        "assert not {'torch.nn', 'monai.data'} & set(sys.modules)\n"
        "from torch import nn\n"
        "assert isinstance(nn.Linear(2, 1)(torch.ones(2)), torch.Tensor)\n"
        "import monai.data.utils\n"
        "assert monai.data.utils is sys.modules['monai.data.utils'] and monai is sys.modules['monai']\n"
        "import_later('torch')\n"
        "assert sys.modules['torch'] is torch and type(torch).__name__ == 'module'\n"
        "model = nn.Linear(2, 1)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "optimizer.zero_grad()\n"
        "optimizer.step()\n"
        "assert 'torch._dynamo.eval_frame' not in sys.modules\n"
        "import torch._dynamo.config\n"
        "assert 'torch._dynamo.eval_frame' in sys.modules\n"
        "assert torch.compile(model, backend='eager')(torch.ones(1, 2)).shape == (1, 1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_the_kinds_that_it_declares(name: str) -> None:
    (listed,) = (method for method in overview() if method.name == name)
    for kind in ("segmentation", "classification"):
        with nullcontext() if kind in listed.learns else pytest.raises(ValueError, match="cannot learn"):
            make_plan(name, task=kind)
    assert listed.learns[0] == get_method(name).task


def test_prepare_hands_on_to_the_preparers(tmp_path: Path) -> None:
    assert "red-cells" in fairflare("prepare", "--help").output
    missing = fairflare("prepare", "nuclei", "--source", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert missing.exit_code == 1
    assert missing.stderr.startswith("fairflare prepare: ")


def test_export_for_as_many_sites_as_the_quick_job_has(tmp_path: Path) -> None:
    assert fairflare("export", "fed_avg", "--sites", "0", "--out", str(tmp_path)).exit_code == 0
    committed = Path(__file__).parents[2] / "jobs" / "fed_avg" / "meta.json"
    assert json.loads((tmp_path / "fed_avg" / "meta.json").read_text()) == json.loads(committed.read_text())


def test_a_delayed_package_and_what_it_imports_are_imported_by_two_threads(tmp_path: Path) -> None:
    """Import a delayed package in one thread, and in another the module that the package imports too: neither hangs."""
    for name, text in {
        "big/__init__.py": "import time; time.sleep(0.5); import other; __version__ = '1'",
        "big/part.py": "",
        "other/__init__.py": "import time; time.sleep(1); import other.sub",
        "other/sub.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    script = """
import sys, threading, time
from fairflare.base.machine import later
later.import_later("big")
import big
assert type(big) is later.Later
first = threading.Thread(target=__import__, args=["other"], daemon=True)
first.start()
time.sleep(0.2)
second = threading.Thread(target=__import__, args=["big.part"], daemon=True)
second.start()
first.join(10)
second.join(10)
print(first.is_alive(), second.is_alive(), sys.modules["big.part"].__name__, type(big).__name__)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=env)
    assert told.stdout.split() == ["False", "False", "big.part", "module"], told.stderr


@pytest.mark.parametrize("words", ["--set seed=1", "--set optimizer=sgd", "--monai-bundle . --set x=1"])
def test_doctor_ignores_no_setting(words: str) -> None:
    ran = CliRunner().invoke(cli.app, ["doctor", *words.split()])
    assert ran.exit_code == 2
    name = words.rpartition(" ")[2].partition("=")[0]
    assert f"doctor has no use for --set {name}" in " ".join(ran.stderr.split())
