"""Test a site with FLARE's own workflows, and a run's models as FLARE's locators find them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_opt.pt.file_model_locator import PTFileModelLocator

from fairflare.core.cells import make_cells
from fairflare.exchange.messages import SiteReply, SiteTask, encode_task
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.record.best_model import BestModel
from fairflare.federation.record.models import ModelFiles
from fairflare.federation.server.first_model import first_model
from fairflare.federation.site.site_state import SiteFolder
from fairflare.flare.persistor import RunModels
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.ditto import DittoTraining
from fairflare.methods.solo import SoloTraining
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import metric_values

from ..methods.support import SEGMENTATION, initial
from .test_executor import Site

TASK = SegmentationTask(**SEGMENTATION)


def task(name: str, dxo: DXO | None = None, **headers: Any) -> Shareable:
    shareable = dxo.to_shareable() if dxo else Shareable()
    for key, value in headers.items():
        shareable.set_header(key, value)
    return shareable


def ask(site: Site, name: str, shareable: Shareable) -> Shareable:
    return site.executor.execute(name, shareable, site.context, site.abort)


def validate(site: Site, state: Any, kind: str = DataKind.WEIGHTS) -> Shareable:
    return ask(
        site,
        "validate",
        task("validate", DXO(kind, data=state), **{AppConstants.MODEL_OWNER: "SRV_FL_global_model.pt"}),
    )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, TASK)


def test_a_named_model_gets_real_metrics(site: Site) -> None:
    """Check that metrics equal those of our own final test, for tensors and for arrays."""
    state = initial()
    own = site.reply("validate", message=encode_task(SiteTask("validate", state, 0, 1, 0))).metrics
    for given in (state, {name: tensor.numpy() for name, tensor in state.items()}):
        answer = validate(site, given)
        assert answer.get_return_code() == ReturnCode.OK
        dxo = from_shareable(answer)
        assert dxo.data_kind == DataKind.METRICS
        assert dxo.data == metric_values(own)
        assert 0 < dxo.data["dice"] < 1


def test_a_model_without_its_name_is_tested_as_well(site: Site) -> None:
    """Check FLARE's evaluation recipes, which name no owner of the model."""
    answer = ask(site, "validate", task("validate", DXO(DataKind.WEIGHTS, data=initial())))
    assert set(from_shareable(answer).data) >= {"dice", "loss"}


def unfit() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2) for name in initial()}


@pytest.mark.parametrize(
    ("state", "kind", "code"),
    [
        (unfit, DataKind.WEIGHTS, ReturnCode.EXECUTION_EXCEPTION),
        (dict, DataKind.WEIGHTS, ReturnCode.BAD_TASK_DATA),
        (initial, DataKind.WEIGHT_DIFF, ReturnCode.BAD_TASK_DATA),
        (lambda: {"a": "text"}, DataKind.WEIGHTS, ReturnCode.BAD_TASK_DATA),
    ],
)
def test_a_failure_is_a_return_code_and_no_metric(site: Site, state: Any, kind: str, code: str) -> None:
    answer = validate(site, state(), kind)
    assert answer.get_return_code() == code
    assert "DXO" not in answer
    assert site.log


def test_a_metric_that_is_no_number_is_not_sent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"dice": 0.5, "hausdorff": float("nan")}
    monkeypatch.setattr(
        "fairflare.flare.executor.SiteWorker.perform",
        lambda *args: SiteReply("ok", metrics=make_cells(metrics, "test")),
    )
    assert from_shareable(validate(site, initial())).data == {"dice": 0.5}
    metrics["dice"] = float("nan")
    assert validate(site, initial()).get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR


# ------------------------------------------------------------------------------------------------ local models


def submit(site: Site, name: str = "best_model") -> Shareable:
    return ask(site, "submit_model", task("submit_model", **{AppConstants.SUBMIT_MODEL_NAME: name}))


def trained(site: Site) -> dict[str, torch.Tensor]:
    """Train once, and return the model that the site then has."""
    received = initial()
    request = SiteTask("train", received, 0, 2, 0, run="abc")
    update = site.reply("train", message=encode_task(request)).params
    return {name: received[name] + update[name] for name in received}


def test_the_local_model_stays_unless_the_site_allows_it(site: Site) -> None:
    trained(site)
    assert submit(site).get_return_code() == ReturnCode.TASK_UNSUPPORTED
    assert any('"submit_model": true' in line for line in site.log)


def test_the_last_local_model_where_it_is_allowed(tmp_path: Path) -> None:
    site = Site(tmp_path, TASK, {"submit_model": True})
    assert submit(site).get_return_code() == ReturnCode.EMPTY_RESULT
    local = trained(site)
    dxo = from_shareable(submit(site))
    assert dxo.data_kind == DataKind.WEIGHTS
    assert dxo.data.keys() == local.keys()
    for name, tensor in dxo.data.items():
        torch.testing.assert_close(tensor, local[name])
    assert any(not torch.equal(dxo.data[name], tensor) for name, tensor in initial().items())
    assert submit(site, "any_model").get_return_code() == ReturnCode.MODEL_UNRECOGNIZED


@pytest.mark.parametrize("setting", ["true", 1, None])
def test_the_permission_is_not_guessed(tmp_path: Path, setting: Any) -> None:
    site = Site(tmp_path, TASK, {"submit_model": setting})
    trained(site)
    assert submit(site).get_return_code() == ReturnCode.TASK_UNSUPPORTED
    assert any("must be true or false" in line for line in site.log)


# ------------------------------------------------------------------------------------------------ the run's models


class Server:
    """Make a run directory, and FLARE's context in it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "job"
        (self.run_dir / "app_server").mkdir(parents=True)
        workspace = SimpleNamespace(get_run_dir=lambda job: str(self.run_dir))
        self.models = RunModels()
        engine = SimpleNamespace(get_workspace=lambda: workspace, get_component=lambda name: self.models)
        self.context = FLContext()
        self.context.set_prop(FLContextKey.CURRENT_RUN, "job", private=True, sticky=False)
        self.context.set_prop(FLContextKey.APP_ROOT, str(self.run_dir / "app_server"), private=True, sticky=False)
        self.context.get_engine = lambda *_: engine  # type: ignore[method-assign]
        self.models.handle_event(EventType.START_RUN, self.context)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_flares_locator_finds_both_models(tmp_path: Path) -> None:
    server = Server(tmp_path)
    locator = PTFileModelLocator(pt_persistor_id="persistor")
    locator.handle_event(EventType.START_RUN, server.context)
    assert locator.get_model_names(server.context) == []
    last, best = initial(seed=1), initial(seed=2)
    files = ModelFiles(server.run_dir, "FedAvg", BestModel(RunSettings(), higher=True))
    files.save(last, 4)
    files.keep_best(best, {"site-1": {"dice": 0.5}}, "dice", 2)
    assert locator.get_model_names(server.context) == ["FL_global_model.pt", "best_FL_global_model.pt"]
    for name, state in (("FL_global_model.pt", last), ("best_FL_global_model.pt", best)):
        found = locator.locate_model(name, server.context).data
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], state[key]) for key in state)


def test_nobody_but_us_writes_the_files(tmp_path: Path) -> None:
    server = Server(tmp_path)
    ModelFiles(server.run_dir, "FedAvg", BestModel(RunSettings(), higher=True)).save(initial(seed=1), 4)
    before = content(tmp_path)
    server.context.set_prop(
        AppConstants.GLOBAL_MODEL, server.models.load_model(server.context), private=True, sticky=False
    )
    server.models.handle_event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, server.context)
    with pytest.raises(RuntimeError, match="written by RoundsController"):
        server.models.save(server.models.load_model(server.context), server.context)
    assert content(tmp_path) == before


def test_a_named_model_is_tested_as_it_came_whatever_the_site_has_of_its_own(tmp_path: Path) -> None:
    """Check that the named model is measured itself; the site's own state is not even opened."""
    given = {name: t + 0.1 if t.is_floating_point() else t for name, t in initial().items()}
    wanted = from_shareable(validate(Site(tmp_path / "plain", TASK, training=LocalTraining(batch_size=4)), given)).data
    for number, training in enumerate((SoloTraining(batch_size=4), DittoTraining(batch_size=4))):
        site = Site(tmp_path / str(number), TASK, training=training)
        trained = site.reply("train", message=encode_task(SiteTask("train", initial(), 0, 1, 0)))
        assert trained.meta["status"] == "ok"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SiteFolder, "open_store", lambda *_: pytest.fail("opened"))
            assert from_shareable(validate(site, given)).data == wanted
        own = site.reply("validate", message=encode_task(SiteTask("validate", given, 1, 1, 0))).metrics
        assert metric_values(own) != wanted


def test_a_local_model_of_which_parts_stay_at_the_site_is_not_submitted(tmp_path: Path) -> None:
    for training, code in (
        (SoloTraining(batch_size=4), ReturnCode.TASK_UNSUPPORTED),
        (DittoTraining(batch_size=4), ReturnCode.OK),  # of the common model, as the server has had it
    ):
        site = Site(tmp_path / type(training).__name__, TASK, {"submit_model": True}, training)
        site.reply("train", message=encode_task(SiteTask("train", initial(), 0, 1, 0)))
        headers = {AppConstants.SUBMIT_MODEL_NAME: "best_model"}
        assert ask(site, "submit_model", task("submit_model", **headers)).get_return_code() == code


class HalfFrozen(SegmentationTask):
    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.conv_0.requires_grad_(False)  # type: ignore[union-attr]
        return model


def test_a_run_that_exchanged_a_part(tmp_path: Path) -> None:
    """Check that sites complete the part in the run's files, and give their own model whole."""
    task_, folder = HalfFrozen(**SEGMENTATION), tmp_path / "run"
    state, run = initial(task_), RunSettings(exchange="trainable")
    first = first_model(task_, run, Place(folder, folder, "job"))
    assert 0 < len(first.state) < len(state)
    own = Site(tmp_path, task_)
    whole = from_shareable(validate(own, state)).data
    asked = SiteTask("train", first.state, 0, 1, 0, exchange=run.exchange, rest=first.rest)
    assert own.reply("train", message=encode_task(asked)).meta["status"] == "ok"
    assert from_shareable(validate(own, first.state)).data == whole
    kept = own.executor._workers.popitem()[1].local_model(asked, 0)
    assert kept is not None
    assert kept.keys() == state.keys()
    assert all(torch.equal(kept[name], state[name]) for name in state if name not in first.state)


@pytest.mark.long
def test_the_first_model_of_a_process_that_ends(tmp_path: Path) -> None:
    """Check that the model equals one that is made in this process."""
    task_, run = HalfFrozen(**SEGMENTATION), RunSettings(exchange="trainable", seed=3)
    here, there = (first_model(task_, run, Place(tmp_path, tmp_path, "job", apart=apart)) for apart in (False, True))
    assert list(here.state) == list(there.state)
    assert all(torch.equal(tensor, there.state[name]) for name, tensor in here.state.items())
    assert replace(here, state={}) == replace(there, state={})
    with pytest.raises(ValueError, match="matches no tensor"):
        first_model(task_, RunSettings(exchange="nowhere"), Place(tmp_path, tmp_path, "job", apart=True))
