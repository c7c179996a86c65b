"""Test MLflow through the real simulator: it has every curve of TensorBoard, with the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvflare.recipe.utils import add_experiment_tracking

from .conftest import run_simulator, tiny_recipe

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_the_curves_are_those_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the package mlflow is not installed (pip install 'fairflare[mlflow]')")
    uri = (tmp_path / "store").as_uri()
    recipe = tiny_recipe("fed_lwr", sites=2, settings={"local_epochs": 1})
    add_experiment_tracking(recipe, "mlflow", {"tracking_uri": uri, "kw_args": {"experiment_name": "fair"}})
    recipe.export(str(tmp_path))
    run = run_simulator(tmp_path, tmp_path / "fed_lwr", threads=2, env={"MLFLOW_ALLOW_FILE_STORE": "true"})
    assert run.code == 0, run.log[-3000:]
    assert "Receiver" not in "".join(line for line in run.log.splitlines() if "ERROR" in line)
    found = of_mlflow(uri)
    expected = of_tensorboard(run.workspace / "server/simulate_job/tb_events")
    assert found.keys() == expected.keys()
    assert {"validation_dice/worst", "train_loss/site-2", "test_dice/average"} <= found.keys()
    for tag, values in expected.items():
        assert found[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in values], tag
    assert [step for step, _ in found["train_loss/site-1"]] == [0, 1]


def of_mlflow(uri: str) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of the only run in MLflow."""
    import os

    from mlflow.tracking import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    try:
        client = MlflowClient(uri)
        (experiment,) = [e for e in client.search_experiments() if e.name == "fair"]
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    finally:
        del os.environ["MLFLOW_ALLOW_FILE_STORE"]
    return {name: sorted((m.step, m.value) for m in history) for name, history in histories.items()}


def of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events*")
    found = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
