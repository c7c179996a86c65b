"""Test the server's curves in MLflow: a job's configuration, refusals, and the receiver by itself."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo
from nvflare.recipe.utils import add_experiment_tracking
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.cli.run import tracking
from fairflare.flare.tracking import EVENT
from fairflare.recipes import FedAvgRecipe


def fairflare(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


# ------------------------------------------------------------------------------------------------ without mlflow


def test_without_the_package_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    for command in (["export", "fed_avg", "--out", str(tmp_path)], ["run", "fed_avg", "-w", str(tmp_path / "w")]):
        result = fairflare(*command, "--mlflow", "http://localhost:5000")
        assert result.exit_code == 2
        assert "--mlflow needs the package mlflow" in result.stderr
        assert "pip install 'fairflare[mlflow]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_job_says_what_its_server_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fairflare.flare.mlflow_tracking", "nvflare.app_opt.tracking.mlflow.mlflow_receiver"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"writes its curves to MLflow.*pip install 'fairflare\[mlflow\]'"):
        importlib.import_module("fairflare.flare.mlflow_tracking")


@pytest.mark.parametrize("uri", ["mlruns", "/tmp/mlruns", "localhost:5000", ""])
def test_a_place_that_is_no_uri_is_refused(tmp_path: Path, uri: str) -> None:
    result = fairflare("export", "fed_avg", "--out", str(tmp_path), "--mlflow", uri)
    assert result.exit_code == 2
    assert "--mlflow wants a URI" in result.stderr


def test_in_process_has_no_server(tmp_path: Path) -> None:
    result = fairflare("run", "fed_avg", "--in-process", "-w", str(tmp_path / "w"), "--mlflow", "http://localhost:1")
    assert result.exit_code == 2
    assert "--mlflow is of FLARE's server" in result.stderr


def test_a_job_without_it_does_not_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    FedAvgRecipe().export(str(tmp_path))
    assert "mlflow" not in (tmp_path / "fed_avg/app/config/config_fed_server.json").read_text()


# ------------------------------------------------------------------------------------------------ with it


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip(
        "mlflow", reason="the package mlflow is not installed (pip install 'fairflare[mlflow]')"
    )
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = found.get_tracking_uri()
    yield found
    found.set_tracking_uri(before)


def components(folder: Path) -> dict[str, dict[str, Any]]:
    server = json.loads((folder / "app/config/config_fed_server.json").read_text())
    return {component["path"]: component.get("args", {}) for component in server["components"]}


def test_flares_receiver_becomes_ours(mlflow: Any, tmp_path: Path) -> None:
    recipe = FedAvgRecipe()
    given = {"tracking_uri": "http://tracking:5000", "kw_args": {"experiment_name": "hearts"}, "buffer_flush_time": 5}
    add_experiment_tracking(recipe, "mlflow", given)
    recipe.export(str(tmp_path / "a"))
    recipe.export(str(tmp_path / "b"))  # again: it is ours by now
    for folder in ("a", "b"):
        found = components(tmp_path / folder / "fed_avg")
        assert "fairflare.flare.tracking.TensorBoard" in found
        args = found["fairflare.flare.mlflow_tracking.MLflow"]
        assert (args["tracking_uri"], args["buffer_flush_time"]) == ("http://tracking:5000", 5)
        assert args["kw_args"]["experiment_name"] == "hearts"
        assert sorted(args["events"]) == sorted([EVENT, f"fed.{EVENT}"])
        assert not [path for path in found if path.startswith("nvflare.app_opt.tracking.mlflow")]


def test_export_with_the_option(mlflow: Any, tmp_path: Path) -> None:
    result = fairflare("export", "fed_lwr", "--out", str(tmp_path), "--mlflow", "http://tracking:5000")
    assert result.exit_code == 0, result.output
    args = components(tmp_path / "fed_lwr")["fairflare.flare.mlflow_tracking.MLflow"]
    assert args["tracking_uri"] == "http://tracking:5000"


def test_a_store_that_cannot_be_opened_is_refused_before_the_run(mlflow: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    uri = (tmp_path / "file" / "store").as_uri()
    result = fairflare("run", "fed_avg", "-w", str(tmp_path / "w"), "--mlflow", uri)
    assert result.exit_code == 2
    assert f"--mlflow {uri} cannot be opened" in " ".join(result.stderr.split())
    assert not (tmp_path / "w").exists()


class Server:
    """Run a receiver on a file store, as FLARE's server calls it."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        from fairflare.flare.mlflow_tracking import MLflow

        self.uri = uri or (folder / "store").as_uri()
        self.receiver = MLflow(self.uri, {"experiment_name": "e"})
        workspace = SimpleNamespace(get_run_dir=lambda job: str(folder / "run"))
        self.context = FLContext()
        self.context.get_engine = lambda: SimpleNamespace(get_workspace=lambda: workspace)  # type: ignore[method-assign]
        self.context.get_identity_name = lambda: "server"  # type: ignore[method-assign]
        self.context.get_job_id = lambda: "job-id"  # type: ignore[method-assign]

    def event(self, kind: str) -> None:
        self.receiver.handle_event(kind, self.context)

    def send(self, tag: str, value: float, step: int) -> None:
        dxo = create_analytic_dxo(tag=tag, value=value, data_type=AnalyticsDataType.SCALAR, global_step=step)
        self.context.set_prop(FLContextKey.EVENT_DATA, dxo.to_shareable(), private=True, sticky=False)
        self.event(EVENT)

    def runs(self) -> dict[str, Any]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.uri)
        (experiment,) = [e for e in client.search_experiments() if e.name == "e"]
        return {run.info.run_name: (client, run) for run in client.search_runs([experiment.experiment_id])}


def test_many_curves_with_odd_names(mlflow: Any, tmp_path: Path) -> None:
    """Check Fed-LWR with many sites: more curves than an MLflow message takes, and names that MLflow would refuse."""
    server = Server(tmp_path)
    server.receiver.buff_flush_time = 1e9
    server.event(EventType.START_RUN)
    for step in (0, 1):
        for number in range(1100):
            server.send(f"weight/layer.{number}/a site, #1", number + step / 2, step)
        server.send("cka//x", 0.5, step)
    server.event(EventType.END_RUN)
    ((name, (client, run)),) = server.runs().items()
    assert name.startswith("server-")
    assert run.info.status == "FINISHED"
    assert len(run.data.metrics) == 1101
    history = client.get_metric_history(run.info.run_id, "weight/layer.1099/a site_ _1")
    assert sorted((m.step, m.value) for m in history) == [(0, 1099.0), (1, 1099.5)]
    assert "cka/_/x" in run.data.metrics
    assert not server.receiver.failed


def test_a_site_that_sends_by_itself_has_a_run_of_its_own(mlflow: Any, tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.event(EventType.START_RUN)
    server.send("loss", 1.0, 0)
    server.context.get_identity_name = lambda: "site-1"  # type: ignore[method-assign]
    server.send("loss", 2.0, 0)
    server.event(EventType.END_RUN)
    found = {name.partition("-job")[0]: run.data.metrics for name, (_, run) in server.runs().items()}
    assert found == {"server": {"loss": 1.0}, "site-1": {"loss": 2.0}}


def test_a_store_that_fails_is_left_alone(mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the job continues without further attempts, each of which may take minutes."""
    server = Server(tmp_path)
    server.receiver.buff_flush_time = 0
    server.event(EventType.START_RUN)
    tried, said = [], []

    def fail(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise OSError("no answer")

    monkeypatch.setattr(server.receiver.mlflow_clients["server"], "log_batch", fail)
    monkeypatch.setattr(server.receiver, "log_error", lambda ctx, text, **_: said.append(text))
    for step in range(5):
        server.send("loss", 1.0, step)
    server.event(EventType.END_RUN)
    assert len(tried) == 1
    assert said == [
        "MLflow: no more curves of this job are sent to it", "Receiver save method failed with no answer.",
    ]  # fmt: skip


def test_a_store_that_is_not_there_costs_no_job(mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    server = Server(tmp_path, (tmp_path / "file" / "store").as_uri())
    said: list[str] = []
    monkeypatch.setattr(server.receiver, "log_error", lambda ctx, text, **_: said.append(text))
    server.event(EventType.START_RUN)
    server.send("loss", 1.0, 0)
    server.event(EventType.END_RUN)
    assert len(said) == 1
    assert said[0].startswith("Receiver initialize failed with ")
