"""Test that formulas refuse bad input by site and value, and that an error in a user's code is one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.cli.run.folder import refuse_to_replace_run
from fairflare.core.fairness import summarize
from fairflare.core.similarity import linear_cka
from fairflare.core.states import layerwise_average, weighted_average
from fairflare.core.weighting import layer_weights, power_weights
from fairflare.federation.plan.describe import describe_setting, settings_in_use
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.transports.local import run_local
from tests.tiny import run_document

STATE = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weighted_average({"A": {"w": np.ones(2)}}, {"A": 1.0}), "site 'A': tensor 'w' .*, got ndarray"),
        (
            lambda: weighted_average({"A": STATE, "B": {"w": [1.0, 2.0]}}, {"A": 0.5, "B": 0.5}),
            "site 'B': tensor 'w' .*",
        ),
        (
            lambda: layerwise_average({"A": {"w": np.ones(2)}}, {"l": {"A": 1.0}}, {"w": "l"}),
            "^site 'A': tensor 'w'.* got ndarray$",
        ),
        (lambda: summarize({"A": None}), "^value of site 'A'.* got None$"),  # type: ignore[dict-item]
        (lambda: summarize({"A": 0.5, "B": "x"}), "'B' must be a finite number, got 'x'$"),  # type: ignore[dict-item]
        (lambda: power_weights({"A": 1.0, "B": "x"}, 2.0), "'B' must be a number, got 'x'$"),  # type: ignore[dict-item]
        (lambda: layer_weights({"A": {"conv": 1.6}}), "'A', layer 'conv' must .*got 1.6"),
        (lambda: layer_weights({"A": {"conv": -3}}), "'A', layer 'conv' must .*got -3"),
        (lambda: layer_weights({"A": {"conv": None}}), "layer 'conv' must be a number, got None"),  # type: ignore[dict-item]
        (lambda: linear_cka(torch.zeros(0, 3), torch.zeros(0, 3)), "hold no sample"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_without_a_direction_no_site_is_the_worst() -> None:
    found = summarize({"A": 0.2, "B": 0.8}, higher_is_better=None)
    assert (found.worst_site, found.best_site) == ("", "")
    assert math.isnan(found.worst) and math.isnan(found.bottom_decile)  # noqa: PT018
    assert (found.mean, found.range) == (0.5, pytest.approx(0.6))


# ------------------------------------------------------------------------------------------------ own code

HEAD = "from fairflare.tasks.segmentation import SegmentationTask\n\n\nclass Task(SegmentationTask):\n"
TINY = {"features": [4, 4, 4, 4, 4, 4], "image_size": [32, 32], "phantom_cases": 0.2, "batch_size": 4}


def failing(folder: Path, body: str, jobs: int = 1) -> str:
    file = folder / "mine.py"
    file.write_text(HEAD + body)
    plan = make_plan("fed_avg", task_file=file, sites=2, num_rounds=1, settings=TINY)
    with pytest.raises((RoundFailed, ValueError, RuntimeError)) as failed:
        run_local(plan, folder / "run", jobs=jobs)
    return str(failed.value)


@pytest.mark.many
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_the_users_code_is_told_in_his_own_process(jobs: int, tmp_path: Path) -> None:
    body = "    def loss(self, outputs, targets):\n        return outputs.mean() + self.nothing_here\n"
    told = failing(tmp_path, body, jobs)
    assert (
        "sites 'site-1', 'site-2': train failed with AttributeError: 'Task' object has no attribute 'nothing_here'"
        in told
    )
    assert "(mine.py:6)" in told
    assert "details in the site's log" not in told


def test_a_network_that_is_none(tmp_path: Path) -> None:
    assert "build_model() of the task (Task) must give a torch.nn.Module, got int" in failing(
        tmp_path, "    def build_model(self):\n        return 3\n"
    )
    told = failing(tmp_path, "    def build_model(self):\n        return 1 / 0\n")
    assert "build_model() of the task (Task) failed: ZeroDivisionError: division by zero (mine.py:6)" in told


# ------------------------------------------------------------------------------------------------ the command line


def test_a_run_refused_before_its_first_round_may_be_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "server" / "simulate_job" / "fairflare"
    plan = make_plan("fed_avg", sites=2, num_rounds=1, settings=TINY)
    broken = {"sites": {"site-1": {"data_root": str(tmp_path / "nowhere")}}}
    with pytest.raises(RoundFailed):
        run_local(plan, tmp_path / "run", broken)
    refuse_to_replace_run(tmp_path / "run", "")
    results = run_document(folder)
    run_local(plan, tmp_path / "run")
    done = run_document(folder)
    assert (results["status"], results["rounds"]) == ("failed", [])
    assert done["status"] == "completed"
    with pytest.raises(ValueError, match="holds a run already"):
        refuse_to_replace_run(tmp_path / "run", "")
    (folder / "results.json").write_text(json.dumps({**done, "status": "failed", "reason": "x"}))
    with pytest.raises(ValueError, match="holds a run already"):  # its rounds would be lost
        refuse_to_replace_run(tmp_path / "run", "")


def test_exporting_into_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = CliRunner().invoke(app, ["export", "fed_avg", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "File exists; it is a file, and a folder is needed" in " ".join(result.output.split())
    assert CliRunner().invoke(app, ["run", "fed_avg", "--seed", "-1"]).exit_code == 2


def test_described_values_are_those_of_a_run() -> None:
    for method in ("fed_avg", "fed_lwr", "fed_mrl"):
        plan = make_plan(method)
        used = {u.setting.name: u for group in settings_in_use(method).values() for u in group}
        assert list(used["image_size"].setting.default) == list(plan.task.image_size)  # type: ignore[attr-defined]
        assert used["local_epochs"].setting.default == plan.training.local_epochs
        assert json.loads(used["image_size"].paper) == list(make_plan(method, small=False).task.image_size)  # type: ignore[attr-defined]
    ((found,),) = settings_in_use("fed_avg", ["momentum"]).values()
    assert describe_setting(found).endswith("acts only with optimizer=sgd")
    lwr = {u.setting.name: u.setting.default for group in settings_in_use("fed_lwr").values() for u in group}
    assert (lwr["cka_estimator"], lwr["clip_min"]) == ("full_biased", 0.0)  # the preset's, not null
    with pytest.raises(ValueError, match="no setting 'momentm'"):
        settings_in_use("fed_avg", ["momentm"])
