"""Test that a new metric is one function and one declaration: it is measured, sent, kept, shown and compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.core.cells import LAST
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.reporting.results import read_results
from fairflare.reporting.values import collect_by_site, missing_reason
from fairflare_lab.compare.comparison import compare
from fairflare_lab.page.write import write_report
from tests.tiny import FUNDUS

FILE = """
from fairflare.base.metric import Metric
from fairflare.tasks.classification import ClassificationTask


class Task(ClassificationTask):
    def evaluate(self, model, batches, device):  # the function: the share of images of which the model is sure
        found = super().evaluate(model, batches, device)
        return {**found, "sure": 0.25 + found["accuracy"] / 2}

    def declared_metrics(self):  # the row
        sure = Metric(name="sure", doc="made up", higher_is_better=True, of_classes=())
        return (*super().declared_metrics(), sure)
"""


def test_a_made_up_metric_is_one_function_and_one_row(tmp_path: Path) -> None:
    """Run a task file with one more metric; no other file says its name, and every door shows it."""
    (tmp_path / "task.py").write_text(FILE)
    settings = {**FUNDUS, "num_classes": 5}
    plan = make_plan("fed_avg", task_file=tmp_path / "task.py", sites=2, num_rounds=1, settings=settings)
    local = {"sites": {"site-2": {"min_cases": 1000}}}
    run = run_local(plan, tmp_path / "run", local)
    results = read_results(run)
    known = {
        cell.site: cell for cell in results.cells if (cell.metric, cell.model, cell.split) == ("sure", LAST, "test")
    }
    accuracy = collect_by_site(results, "accuracy")
    assert known["site-1"].value == pytest.approx(0.25 + accuracy["site-1"] / 2)
    assert known["site-2"].value is None  # the gate asks the declaration
    assert known["site-2"].reason == missing_reason(results, "sure", "site-2") == "suppressed: fewer than 1000 cases"
    shown = CliRunner().invoke(app, ["show", str(run), "--metric", "sure"])
    assert shown.exit_code == 0, shown.output
    assert "site-1" in shown.output
    assert "suppressed" in shown.output
    assert compare([results], metric="sure").count("fed_avg") >= 1
    page = write_report(run, tmp_path / "page", metric="sure").read_text(encoding="utf-8")
    assert "sure" in page
