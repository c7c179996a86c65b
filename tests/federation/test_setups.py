"""Test the papers' settings, and the same local training for several methods.

``tests/papers.csv`` was entered from the papers, not from this repository's files. A line: presets of ``fairflare
compare`` (``*`` at the end: all that begin so), rows (``*``: all; several by ``;``), setting, value as JSON, source: a
place in the text, "code" (the authors' own), or "ours" (a choice that the paper leaves open). What the sites and the
server of each row really get is compared with it.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fairflare.base.settings import Part, field_names
from fairflare.federation.plan.papers import papers_of
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.task_files import TASKS_BY_KIND
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.training import LocalTraining
from fairflare_lab.cli.compare.series import Series
from fairflare_lab.papers.presets import table_of, tables

from ..unit.test_nnunet_task import plan as tiny_plan

METHODS = list(all_methods())
NUMBERS = Path(__file__).parents[1] / "papers.csv"


class Line(NamedTuple):
    """Hold a line of ``tests/papers.csv``."""

    presets: str
    rows: str
    setting: str
    value: Any
    source: str

    def speaks_of(self, preset: str, row: str) -> bool:
        of = [name.strip() for name in self.presets.split(",")]
        rows = [name.strip() for name in self.rows.split(";")]
        meant = any(preset == name or (name.endswith("*") and preset.startswith(name[:-1])) for name in of)
        return meant and (rows == ["*"] or row in rows)


def lines() -> list[Line]:
    with NUMBERS.open(encoding="utf-8", newline="") as file:
        return [Line(*cells[:3], json.loads(cells[3]), cells[4]) for cells in list(csv.reader(file))[1:]]


LINES = lines()


def rows_of(preset: str) -> dict[str, Plan]:
    """Return the values of a preset's rows with ``--paper``."""
    series = Series(**table_of(preset).make_plan_file(small=False), seeds=[0], small=False)
    return {run.entry.label: run.make() for run in series.runs()}


def value(plan: Plan, name: str) -> Any:
    if name in ("sites", "method"):
        return len(plan.sites or []) if name == "sites" else plan.method.name
    found = []
    for part in (plan.rule, plan.training, plan.task, plan.run):
        for step in name.split("."):
            part = getattr(part, step, None) if part is None or hasattr(part, step) else ...
        if part is not ...:
            found.append(part.kind if isinstance(part, Part) else part)
    assert found, name
    assert all(other == found[0] for other in found), (name, found)
    return found[0]


@pytest.mark.many
@pytest.mark.parametrize("preset", list(tables()))
def test_every_row_has_the_papers_values(preset: str) -> None:
    """Check the plan as it is built, with the values that the job gives to server and sites."""
    for row, plan in rows_of(preset).items():
        wanted = {line.setting: line for line in LINES if line.speaks_of(preset, row)}
        assert len(wanted) > 12, row
        for setting, line in wanted.items():
            got = json.loads(json.dumps(value(plan, setting)))
            assert got == line.value, f"{row}: {setting}; {line.source}"


def test_no_line_speaks_of_nothing() -> None:
    """Check that every row of the papers' tables is a row of a preset, with its own method or value."""
    known = {(preset, e.label) for preset, t in tables().items() for e in t.make_plan_file()["entries"]}
    for line in LINES:
        for row in line.rows.split(";"):
            alone = line._replace(rows=row)
            assert any(alone.speaks_of(preset, label) for preset, label in known), (line.presets, row)
    for preset, label in known:
        assert any(line.rows != "*" and line.speaks_of(preset, label) for line in LINES), (preset, label)


def test_every_value_has_a_source() -> None:
    assert all(line.source for line in LINES)
    in_tables = {entry.method for table in tables().values() for entry in table.make_plan_file()["entries"]}
    for name, method in all_methods().items():
        assert papers_of(method) or name not in in_tables, name
        for paper in papers_of(method).values():
            assert {*paper.sources} == {*paper.settings, "rounds", "sites"}
            assert all(len(text) > 3 for text in paper.sources.values()), paper.sources


@pytest.mark.parametrize(
    ("paper", "name"), {paper: name for name, method in all_methods().items() for paper in papers_of(method)}.items()
)
def test_a_run_of_one_method_is_the_papers(name: str, paper: str) -> None:
    plan = make_plan(name, small=False, paper=paper)
    assert plan.paper is not None
    assert plan.paper.name == paper
    shared = [line for line in LINES if line.rows == "*" and line.speaks_of(paper, "")]
    assert {line.setting: json.loads(json.dumps(value(plan, line.setting))) for line in shared} == {
        line.setting: line.value for line in shared
    }
    assert plan.lacks


@pytest.mark.parametrize(
    ("name", "papers"),
    [
        ("fed_avg", ["fed_lwr", "fed_lwr_rif", "fed_mrl", "fed_mas", "fed_mas_iid", "fed_mas_isic", "fed_mas_flamby",
                     "fed_ism", "fed_ism_blur"]),
        ("fed_prox", ["fed_mrl", "fed_mas", "fed_mas_iid", "fed_mas_isic", "fed_mas_flamby"]),
        ("q_fed_avg", ["fed_lwr", "fed_lwr_rif", "fed_ism", "fed_ism_blur"]),
        ("ditto", ["fed_lwr", "fed_lwr_rif"]),
        ("afl", ["fed_ism", "fed_ism_blur"]),
    ],
)  # fmt: skip
def test_the_first_paper_is_the_usual_one(name: str, papers: list[str]) -> None:
    assert list(papers_of(all_methods()[name])) == papers
    usual = make_plan(name, small=False).paper
    assert usual is not None
    assert usual.name == papers[0]


def test_a_paper_that_has_no_such_row() -> None:
    with pytest.raises(ValueError, match=r"--paper fed_lwr has no .*'fed_prox'"):
        make_plan("fed_prox", small=False, paper="fed_lwr")
    with pytest.raises(ValueError, match="did you mean 'fed_lwr'"):
        make_plan("fed_avg", small=False, paper="fed_lw")
    with pytest.raises(ValueError, match="needs small=False"):
        make_plan("fed_avg", paper="fed_lwr")


def test_settings_of_a_part_take_the_papers_place() -> None:
    plan = make_plan("fed_mrl", small=False, settings={"weighting": "samples"})
    assert plan.rule.weighting.kind == "samples"  # type: ignore[attr-defined]
    plan = make_plan("fed_mrl", small=False, settings={"weighting.grid": [3, 3]})
    assert (plan.rule.weighting.kind, plan.rule.weighting.grid) == ("som", (3, 3))  # type: ignore[attr-defined]
    assert plan.rule.mu_policy.kind == "qmix"  # type: ignore[attr-defined]


def test_settings_of_the_run_go_before_the_papers() -> None:
    assert make_plan("fed_ism", small=False).run.test_last == 5
    assert make_plan("fed_ism", small=False, settings={"test_last": 2}).run.test_last == 2
    assert make_plan("fed_ism", small=False, test_last=3).run.test_last == 3
    run = make_plan("fed_ism", settings={"best_by": "worst"}).run
    assert (run.test_last, run.best_by) == (1, "worst")
    with pytest.raises(ValueError, match="best_by"):
        make_plan("fed_ism", settings={"best_by": "mode"})
    assert make_plan("fed_avg", small=False, train_like="fed_ism").training.criterion == "logit_adjusted"


def test_a_job_has_what_the_plan_has(tmp_path: Path) -> None:
    from fairflare.flare.export.recipes import FairRecipe

    recipe = FairRecipe("fed_mas", small=False, paper="fed_mas_isic", sites=None)
    recipe.export(str(tmp_path))
    app = tmp_path / "fed_mas" / "app" / "config"
    (executor,) = json.loads((app / "config_fed_client.json").read_text())["executors"]
    training = executor["executor"]["args"]["training"]["args"]
    task = executor["executor"]["args"]["task"]["args"]
    assert (training["optimizer"], training["learning_rate"], training["prior_network"]) == ("adam", 3e-4, "resnet50")
    assert (task["projector_dim"], task["augmentation"]) == (2048, ["one_move", "jitter", "flip", "flip_vertical"])


@pytest.mark.parametrize(
    ("sites", "wanted"),
    [
        (None, ["the paper's 20 sites: the job goes to every connected one"]),
        (8, ["the paper's 20 sites: the run has 8"]),
        (0, []),
        (20, []),
    ],
)
def test_another_number_of_sites_than_the_papers_is_said(sites: int | None, wanted: list[str]) -> None:
    lacks = make_plan("fed_ism", sites=sites, small=False).lacks
    assert [text for text in lacks if "paper's" in text] == wanted
    assert make_plan("fed_ism", sites=sites).lacks == ()


def test_settings_go_before_the_papers() -> None:
    own = {"image_size": [64, 64], "batch_size": 4, "corrupted_sites": 1}
    plan = make_plan("fed_ism", small=False, settings=own, num_rounds=2, sites=3)
    assert (plan.task.image_size, plan.training.batch_size) == ((64, 64), 4)  # type: ignore[attr-defined]
    assert (plan.run.num_rounds, plan.sites) == (2, ["site-1", "site-2", "site-3"])


@pytest.mark.parametrize(("model", "small"), [("fed_avg", False), ("fed_mas", True)])
@pytest.mark.parametrize("name", METHODS)
def test_trained_like_another_method(name: str, model: str, small: bool) -> None:
    needs = ("bsm_fl", "bsm_kd", "fed_mas", "creff", "crt", "moon", "ldam", "logit_adjustment", "fed_lc",
             "fair_lora")  # fmt: skip
    if model == "fed_avg" and name in needs:
        with pytest.raises(ValueError, match="cannot learn segmentation"):
            make_plan(name, train_like=model, small=small)
        return
    if model != "fed_avg" and name == "fed_lwr_last_layer":  # whose layer is one of the U-Net
        with pytest.raises(ValueError, match="only_layer='down_3' names no layer"):
            make_plan(name, train_like=model, small=small)
        return
    plan, other = make_plan(name, train_like=model, small=small), make_plan(model, small=small)
    keeps = {*all_methods()[name].keeps, *all_methods()[model].keeps} if name != model else set()
    alone = make_plan(name, small=small)
    for field in field_names(LocalTraining):
        expected = alone if field in keeps else other
        assert getattr(plan.training, field) == getattr(expected.training, field), field
    for field in field_names(type(other.task)):
        if field not in keeps:
            assert getattr(plan.task, field) == getattr(other.task, field), field
    assert (plan.run.num_rounds, plan.sites) == (other.run.num_rounds, other.sites)
    assert type(plan.rule) is all_methods()[name].rule


def test_what_is_the_method_stays() -> None:
    assert make_plan("bsm_fl", train_like="fed_ism").training.criterion == "balanced_softmax"
    assert make_plan("fed_ism", train_like="bsm_fl").training.criterion == "task"  # its own job's, too
    assert make_plan("fed_ism", train_like="bsm_fl", small=False).training.criterion == "logit_adjusted"
    assert make_plan("fed_avg", train_like="fed_mas").training.criterion == "task"
    plain, like = make_plan("fed_avg").task, make_plan("fed_avg", train_like="fair_lora").task
    assert like.adapters == plain.adapters  # type: ignore[attr-defined]  # with nothing that is set of FairLoRA's
    assert like.attributes is True  # type: ignore[attr-defined]
    assert make_plan("fed_mas", train_like="fed_ism").task.projector_dim == 96  # type: ignore[attr-defined]
    assert make_plan("fed_ism", train_like="fed_mas").training.rho == 0.05  # type: ignore[attr-defined]
    assert make_plan("fed_avg", train_like="fed_ism", settings={"batch_size": 5}).training.batch_size == 5


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match=r"^unknown method 'fed_isn'"):
        make_plan("fed_avg", train_like="fed_isn")


@pytest.mark.parametrize("kind", TASKS_BY_KIND)
def test_a_quick_job_is_trained_as_its_task_wants(kind: str) -> None:
    """Check that methods share the task's training, so that two runs differ in the method, not in the optimizer."""
    given = {"settings": {"plan": tiny_plan()}} if kind == "nnunet" else {}
    wanted = make_plan("fed_avg", task=kind, **given).training
    learned, plain = 0, "segmentation" if given else kind.removeprefix("volume_")
    for name, method in all_methods().items():
        try:
            found = make_plan(name, task=kind, **given).training
        except ValueError as error:
            kinds = {kind, plain} & {method.task, *method.kinds}  # else a setting is to blame
            other_layers = bool(given) and "only_layer=" in str(error)  # those of the default network
            assert other_layers or ("cannot learn" in str(error)) is not bool(kinds), error  # noqa: PT017
            continue
        learned += 1
        for field in {*field_names(LocalTraining)} - {*method.keeps}:
            assert getattr(found, field) == getattr(wanted, field), (name, field)
    assert learned >= (15 if plain == "segmentation" else 25)


def test_a_quick_job_says_nothing_of_local_training_but_what_is_the_method() -> None:
    for name, method in all_methods().items():
        said = {*method.small, *method.site} & {*field_names(LocalTraining)}
        assert said <= {*method.keeps}, name


def test_a_paper_on_another_task_leaves_its_training_behind() -> None:
    plan = make_plan("fed_mrl", task="segmentation", small=False)
    assert (plan.training.optimizer, plan.training.local_epochs, plan.run.num_rounds) == ("adam", 5, 60)
    assert make_plan("fed_mrl", small=False).training.optimizer == "sgd"
    assert make_plan("group_dro", small=False).training.batch_size == 16  # none is published
    assert make_plan("fed_prox", settings={"local_steps": 9}).training.local_epochs == 1
    assert make_plan("fed_prox", settings={"batch_size": 5, "optimizer": "sgd"}).training.optimizer == "sgd"
