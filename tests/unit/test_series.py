"""Test the description of a comparison: rows, files, and the runs that follow from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fairflare.base.settings import field_names, values_of
from fairflare.cli.commands import app
from fairflare.cli.options import which_paper
from fairflare.methods.base.training import LocalTraining
from fairflare_lab.cli.compare.runs import DONE, RUNNING, WAITING, Progress
from fairflare_lab.cli.compare.series import Entry, Series, read_entry, read_file, seeds_of
from fairflare_lab.cli.compare.view import tell
from fairflare_lab.papers.presets import table_of, tables


@pytest.mark.parametrize(
    ("text", "method", "settings", "label"),
    [
        ("fed_avg", "fed_avg", {}, "fed_avg"),
        ("fed_lwr:preset=authors", "fed_lwr", {"preset": "authors"}, "fed_lwr (preset=authors)"),
        ("fed_prox:mu=0.1,augment=true", "fed_prox", {"mu": 0.1, "augment": True}, "fed_prox (mu=0.1, augment=true)"),
        ("fed_mrl:weighting.grid=[4,4],mu=1", "fed_mrl", {"weighting.grid": [4, 4], "mu": 1}, None),
    ],
)
def test_a_row(text: str, method: str, settings: dict[str, object], label: str | None) -> None:
    entry = read_entry(text)
    assert (entry.method, entry.settings) == (method, settings)
    assert label in (None, entry.label)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":mu=1", "a row is METHOD"),
        ("fed_prox:mu", "a setting is NAME=VALUE, got 'mu'"),
        ("fed_prox:mu=1,mu=2", "gives 'mu' twice"),
    ],
)
def test_a_wrong_row(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_entry(text)


def test_rows_share_task_and_training_of_the_first() -> None:
    series = Series([Entry("fed_lwr"), Entry("fed_lwr_cosine"), Entry("fed_prox", {"mu": 0.5})], seeds=[3], rounds=2)
    plans = [run.make() for run in series.runs()]
    assert len({(plan.run.num_rounds, plan.run.seed, tuple(plan.sites or ())) for plan in plans}) == 1
    assert len({str(values_of(plan.task)) for plan in plans}) == 1
    for name in field_names(LocalTraining):
        assert len({getattr(plan.training, name) for plan in plans}) == 1, name
    own = Series([Entry("fed_lwr"), Entry("bsm_fl")], train_like="own").runs()[1].make()
    assert own.training.criterion == "balanced_softmax"


def test_every_row_meets_every_seed() -> None:
    names = [run.name for run in Series([Entry("fed_avg"), Entry("fed_prox", {"mu": 0.5})], seeds=(0, 5)).runs()]
    assert names == ["fed_avg-seed0", "fed_prox_mu_0.5-seed0", "fed_avg-seed5", "fed_prox_mu_0.5-seed5"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"entries": []}, "methods to compare"),
        ({"entries": [Entry("fed_avg"), Entry("fed_avg")]}, "two rows are called 'fed_avg': give one"),
        ({"entries": [Entry("fed_avg", label="a b"), Entry("fed_avg", label="a/b")]}, "folder"),
        ({"entries": [Entry("fed_avg")], "seeds": (1, 1)}, "seeds"),
        ({"entries": [Entry("fed_avg")], "seeds": ()}, "seed"),
        ({"entries": [Entry("fed_avg")], "seeds": (-1,)}, "seed"),
        ({"entries": [Entry("fed_avg")], "reference": "fed_av"}, "reference"),
    ],
)
def test_what_cannot_be_compared(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Series(**given)  # type: ignore[arg-type]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "methods:\n  - fed_avg\n  - {method: fed_lwr, label: stable, set: {preset: authors}}\n"
        "seeds: [1, 2]\nrounds: 4\nset: {learning_rate: 0.01}\npaper: false\n"
    )
    found = read_file(path)
    assert found["entries"] == [Entry("fed_avg"), Entry("fed_lwr", {"preset": "authors"}, "stable")]
    assert (found["seeds"], found["rounds"], found["settings"]) == ([1, 2], 4, {"learning_rate": 0.01})
    assert Series(**found).runs()[1].plan["settings"] == {"learning_rate": 0.01, "preset": "authors"}
    path.write_text(json.dumps({"methods": ["fed_avg"], "seeds": 2}))
    assert read_file(path)["seeds"] == [0, 1]


@pytest.mark.parametrize(("metric", "code"), [("dicee", 2), ("dice", 0), ("common/dice", 0), ("loss", 0)])
def test_a_metric_that_is_never_measured_is_refused_before_any_run(
    metric: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("fairflare_lab.cli.compare.command._go", lambda *_: asked.append("go"))
    monkeypatch.setattr("fairflare_lab.cli.compare.command.report", lambda *_, **__: (0, []))
    result = CliRunner().invoke(app, ["compare", "fed_avg", "--metric", metric, "--out", str(tmp_path)])
    assert (result.exit_code, len(asked)) == (code, int(code == 0)), result.output
    if code:
        assert "did you mean 'dice'" in result.output


def test_settings_of_the_command_line_are_added_to_those_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check ``--set`` beside ``--preset fed_ism``: the preset's own setting is still present."""
    made: list[Mapping[str, Any]] = []
    monkeypatch.setattr(
        "fairflare_lab.cli.compare.command._go", lambda runner, *_: made.append(runner.all[0].run.plan["settings"])
    )
    monkeypatch.setattr("fairflare_lab.cli.compare.command.report", lambda *_, **__: (0, []))
    given = ["compare", "--preset", "fed_ism", "--set", "batch_size=4"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert made[0] == {"criterion": "logit_adjusted", "batch_size": 4, "weighting": "samples"}
    CliRunner().invoke(app, [*given, "--set", "criterion=task"])
    assert made[1] == {"criterion": "task", "batch_size": 4, "weighting": "samples"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods: [fed_avg]\nround: 3", "unknown key 'round'"),
        ("methods: []", "'methods' must be a list of rows"),
        ("- fed_avg", "must hold names and values"),
        ("methods: [{label: x}]", "needs a 'method'"),
        ("methods: [{method: fed_avg, sets: {}}]", "unknown key 'sets'"),
        ("methods: [fed_avg]\nset: 3", "'set' must hold names"),
        ("methods: [fed_avg", "no readable YAML"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_file(path)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: Series([Entry("fed_avg", {"mus": 1})]).runs()[0].make(),
            r"'fed_avg \(mus=1\)': .*no setting 'mus'",
        ),
        (lambda: read_file(Path("plan.yaml")), r"^--plan plan\.yaml does not exist$"),
        (lambda: table_of("fed_lwrr"), "did you mean 'fed_lwr'"),
    ],
)
def test_what_is_not_there_is_named(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()


def test_seeds() -> None:
    assert seeds_of(3) == [0, 1, 2]
    assert seeds_of([4, 2]) == [4, 2]
    with pytest.raises(ValueError, match="seeds"):
        seeds_of("three")


@pytest.mark.many
@pytest.mark.parametrize("name", list(tables()))
def test_the_papers_tables_can_be_run(name: str) -> None:
    """Check quick runs; test_setups.py makes the plans with ``--paper``."""
    plans = [run.make() for run in Series(**table_of(name).make_plan_file(small=True), small=True, seeds=[0]).runs()]
    for held in ("num_rounds", "num_sites"):
        found = {p.run.num_rounds if held == "num_rounds" else len(p.sites or ()) for p in plans}
        assert len(found) == 1, held
    assert len({p.training.learning_rate for p in plans}) == 1
    assert len({p.task.image_size for p in plans}) == 1  # type: ignore[attr-defined]


def test_a_papers_sweep_is_a_row_for_each_value() -> None:
    entries = table_of("fed_ism_rho").make_plan_file()["entries"]
    rows = [(e.label, e.settings["rho"]) for e in entries if "rho" in e.settings]
    assert rows == [(f"FedISM, rho={rho}", rho) for rho in (0.01, 0.05, 0.1, 0.2)]


@pytest.mark.parametrize(
    ("given", "paper"),
    [
        (["fed_avg"], None),
        (["fed_avg", "--paper"], "default"),
        (["fed_avg", "--paper", "--rounds", "2"], "default"),
        (["--paper", "fed_avg"], "default"),
        (["fed_avg", "--paper", "fed_mas_isic"], "fed_mas_isic"),
        (["--paper=fed_ism", "fed_avg"], "fed_ism"),
        (["fed_avg", "--paper", "fedlwr"], "fedlwr"),  # mistyped: refused as a paper, not as a second method
    ],
)
@pytest.mark.parametrize("command", ["run", "export", "compare"])
def test_the_option_paper_stands_with_a_name_or_without(command: str, given: list[str], paper: str | None) -> None:
    more = ["--out", "x"] if command == "export" else []
    group: Any = get_command(app)
    context = group.get_command(None, command).make_context(command, [*given, *more])
    assert context.params["paper"] == paper
    wanted = {"small": paper is None, "paper": None if paper == "default" else paper}
    assert which_paper(paper) == wanted


def test_which_paper_it_is_is_said(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["export", "q_fed_avg", "--paper", "fed_ism", "--out", str(tmp_path)])
    text = " ".join(told.output.split())
    assert "settings of fed_ism: Wu et al., FedISM+, section IV, Gaussian noise" in text
    assert "--paper NAME takes another: fed_lwr, fed_lwr_rif, fed_ism_blur" in text


def test_how_long_the_rest_of_a_comparison_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Check by hand: of six runs two took 100 and 140 s, one had been done before; three left, two at once: 180 s."""
    runs = [
        Progress(SimpleNamespace(name=f"r{n}"), state, seconds=seconds)  # type: ignore[arg-type]
        for n, (state, seconds) in enumerate(
            [(DONE, 100.0), (DONE, 140.0), (DONE, 0.0), (RUNNING, 0.0), (WAITING, 0.0), (WAITING, 0.0)]
        )
    ]
    tell(SimpleNamespace(all=runs, at_once=2), runs[1])  # type: ignore[arg-type]
    for one in runs[3:]:
        one.state, one.seconds = DONE, 1.0
    tell(SimpleNamespace(all=runs, at_once=2), runs[5])  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["3/6 r1: completed in 140 s; 3 left, about 3 min", "6/6 r5: completed in 1 s"]
