"""Test FLARE's own filters at one site of three, over FLARE's messages: the site counts with the filter's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.filters.convert_weights import ConvertWeights
from nvflare.app_common.filters.dxo_blocker import DXOBlocker
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import FOBSContextKey
from safetensors.torch import save_file

from fairflare import __version__
from fairflare.base.settings import build
from fairflare.exchange.messages import Message, num_bytes
from fairflare.federation.collecting.collector import Collector
from fairflare.flare.aggregator import FairAggregator
from fairflare.flare.messages.wire import META_KEY, decode_model, encode_model
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.reports import ReportError
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_lwr import FedLWR
from tests.shapes import of_what_travels, one_each
from tests.tiny import rows

from ..federation.examples import RECEIVED, SITES, anchor_message, begun, finish, net_state, take, train_message
from ..federation.network import misbehave
from .test_aggregator import collect, flat, result
from .test_controller import Server

common_decomposers.register()  # as FLARE's processes do
METHODS = pytest.mark.parametrize("method", [all_methods()[name] for name in one_each(of_what_travels)])
Params = Callable[[dict[str, torch.Tensor]], dict[str, Any]]

FILTERS: dict[str, Callable[[], list[Filter]]] = {
    "percentile": lambda: [PercentilePrivacy(percentile=10, gamma=0.5)],
    "svt": lambda: [SVTPrivacy(fraction=0.5, epsilon=10.0, noise_var=1.0, gamma=0.5)],
    "exclude": lambda: [ExcludeVars(["head.weight", "bn.num_batches_tracked"])],
    "exclude_regex": lambda: [ExcludeVars(r"^bn\.")],
    "convert": lambda: [ConvertWeights("diff_to_weights")],
    "exclude_and_convert": lambda: [ExcludeVars(["head.weight"]), ConvertWeights("diff_to_weights")],
    "percentile_and_convert": lambda: [PercentilePrivacy(gamma=0.5), ConvertWeights("diff_to_weights")],
    "no_metrics": lambda: [DXOBlocker([DataKind.METRICS])],
}
AS_SENT: dict[str, Params] = {
    "torch": lambda params: dict(params),
    "numpy": lambda params: {name: value.numpy() for name, value in params.items()},
    "half": lambda params: {n: v.half() if v.is_floating_point() else v for n, v in params.items()},
}


def at_site(task: dict[str, torch.Tensor] = RECEIVED, *, numpy: bool = False) -> FLContext:
    """Return the parts of a message that a site's filters may look at."""
    fl_ctx = FLContext()
    received = {name: value.numpy().copy() if numpy else value.clone() for name, value in task.items()}
    full = Message(params=received, meta={}, current_round=0)
    fl_ctx.set_prop(FLContextKey.TASK_DATA, FLModelUtils.to_shareable(encode_model(full)), private=True, sticky=False)
    return fl_ctx


def through(message: Message, filters: Sequence[Filter]) -> Shareable:
    """Return a site's message after FLARE's own form, filters and encoding."""
    shareable = FLModelUtils.to_shareable(encode_model(message))
    numpy = any(isinstance(value, np.ndarray) for value in (message.params or {}).values())
    for each in filters:
        shareable = each.process(shareable, at_site(numpy=numpy))
    return fobs.loads(fobs.dumps(shareable))


def arrived(message: Message, filters: Sequence[Filter]) -> Message:
    return decode_model(FLModelUtils.from_shareable(through(message, filters)))


def fresh(method: Any) -> Any:
    return build(method.rule, method.server)


def round_with(rule: Any, folder: Path, filters: Sequence[Filter], form: Params = AS_SENT["torch"]) -> Collector:
    """Do a round of three sites, in which the second site's message goes through filters."""
    collector = begun(rule, folder)
    for site in SITES:
        message = train_message(site, rule=rule, num_steps=4)
        message.params = {name: value.clone() for name, value in message.params.items()}
        if site == "b":
            message.params = form(message.params)
        take(collector, site, arrived(message, filters if site == "b" else []))
    return collector


@pytest.fixture(autouse=True)
def same_noise() -> None:
    np.random.seed(0)  # noqa: NPY002 - what SVTPrivacy draws from


# ------------------------------------------------------------------------------------------------ train


@METHODS
@pytest.mark.parametrize("name", FILTERS)
def test_the_site_is_in_and_the_global_model_keeps_its_form(method: Any, name: str, tmp_path: Path) -> None:
    collector = round_with(fresh(method), tmp_path, FILTERS[name]())
    state, _ = finish(collector)
    assert collector.accepted == list(SITES)
    assert list(state) == list(RECEIVED)
    for key, tensor in state.items():
        assert (tensor.dtype, tensor.shape) == (RECEIVED[key].dtype, RECEIVED[key].shape), key
        assert bool(torch.isfinite(tensor).all()), key
    assert bool((state["bn.running_var"] >= 0).all())


@pytest.mark.parametrize("form", AS_SENT)
@pytest.mark.parametrize("name", FILTERS)
def test_whatever_kind_of_numbers(name: str, form: str, tmp_path: Path) -> None:
    collector = round_with(FedAvg(), tmp_path, FILTERS[name](), AS_SENT[form])
    for state in (collector.staging.open("b"), finish(collector)[0]):
        for key, tensor in state.items():
            assert (tensor.dtype, tensor.shape) == (RECEIVED[key].dtype, RECEIVED[key].shape), key


def test_the_sites_model_is_what_the_filter_left(tmp_path: Path) -> None:
    local = net_state(1)
    update = {name: local[name].double() - RECEIVED[name].double() for name in RECEIVED}

    def kept(filters: Sequence[Filter], folder: str) -> dict[str, torch.Tensor]:
        return dict(round_with(FedAvg(), tmp_path / folder, filters).staging.open("b"))

    clipped = kept([PercentilePrivacy(percentile=0, gamma=0.1)], "percentile")  # 4 steps: at most 0.4
    for name, tensor in clipped.items():
        change = update[name].round() if name == "bn.num_batches_tracked" else update[name].clamp(-0.4, 0.4)
        torch.testing.assert_close(tensor.double(), RECEIVED[name].double() + change, atol=1e-6, rtol=0)
    excluded = kept([ExcludeVars(["head.weight"])], "exclude")
    assert torch.equal(excluded.pop("head.weight"), RECEIVED["head.weight"])
    converted = kept([ConvertWeights("diff_to_weights")], "convert")
    for name, tensor in local.items():
        torch.testing.assert_close(converted[name], tensor, atol=1e-6, rtol=0)
        if name in excluded:
            torch.testing.assert_close(excluded[name], tensor, atol=1e-6, rtol=0)


def test_the_notes_say_what_was_left(tmp_path: Path) -> None:
    message = arrived(train_message("b", num_steps=4), [ExcludeVars(["head.weight"]), SVTPrivacy(fraction=0.25)])
    notes = begun(FedAvg(), tmp_path).read_training("b", message).notes
    assert notes[0].startswith("site 'b': its model went through 'ExcludeVars', 'SVTPrivacy'; ")
    assert 0 < float(notes[0].split("; ")[1].split(" %")[0]) <= 30
    assert notes[1] == "site 'b': 1 tensor ('head.weight') of 6 did not come and count as unchanged"
    assert begun(FedAvg(), tmp_path).read_training("a", arrived(train_message("a"), [])).notes == ()


def test_variances_below_0_are_said_and_floored(tmp_path: Path) -> None:
    loud = [SVTPrivacy(fraction=1.0, epsilon=0.1, noise_var=1e-3, gamma=50.0)]
    collector = begun(FedAvg(), tmp_path)
    training = collector.read_training("b", arrived(train_message("b"), loud))
    assert "1 tensor ('bn.running_var') with variances below 0; the average is kept at 0 or more" in training.notes[-1]
    collector.keep(training)
    assert bool((collector.staging.open("b")["bn.running_var"] < 0).any())
    assert bool((collector.aggregate()[0]["bn.running_var"] >= 0).all())


@pytest.mark.parametrize(
    ("excluded", "message"),
    [
        (".", "^site 'b' sent no model; does a filter"),
        (
            "weight|running",
            r"'b' sent no .*\('bn.num_batches_tracked'\)",
        ),
    ],
)
def test_all_tensors_excluded_is_refused(excluded: str, message: str) -> None:
    collector = begun(FedAvg())
    with pytest.raises(ReportError, match=message):
        collector.read_training("b", arrived(train_message("b"), [ExcludeVars(excluded)]))
    assert collector.accepted == []


# ------------------------------------------------------------------------------------------------ anchor, validate


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "no_metrics"])
def test_the_report_about_the_anchor_goes_by_the_filters_of_models(name: str, tmp_path: Path) -> None:
    rule = FedLWR()
    collector = round_with(rule, tmp_path, FILTERS[name]())
    sent = anchor_message("b", rule)
    got = arrived(sent, FILTERS[name]())
    assert got.meta == sent.meta
    assert got.metrics is sent.metrics is None
    assert collector.read_anchor("b", got) == collector.read_anchor("b", sent)


def test_a_site_may_keep_reports_and_metrics_at_home() -> None:
    block = [DXOBlocker([DataKind.METRICS])]
    for message in (
        anchor_message("b", FedLWR()),
        Message(meta={"version": __version__, "status": "ok"}, metrics=rows({"dice": 0.5}), current_round=1),
    ):
        with pytest.raises(ContentBlockedException, match="METRICS is blocked"):
            through(message, block)
    refusal = Message(meta={"version": __version__, "status": "failed", "reason": "no data"}, current_round=0)
    assert arrived(refusal, block).meta["reason"] == "no data"  # says nothing about the data


def test_a_blocked_report_leaves_the_model_in(tmp_path: Path) -> None:
    """Check FLARE's answer with a code: Fed-LWR weighs the site without its report, and the results name it."""
    blocked = misbehave("site-2", "anchor", lambda *_: make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR))
    server = Server(tmp_path, blocked, rule=FedLWR(), num_rounds=2, min_sites=3, train_timeout=20)
    server.run()
    assert server.results["status"] == "completed"
    for record in server.results["rounds"]:
        assert record["accepted"] == ["site-1", "site-2", "site-3"]
        ((left),) = record["left_out"]
        assert (left["site"], left["phase"]) == ("site-2", "anchor")
        assert left["reason"] == (
            "site 'site-2' answered TASK_RESULT_FILTER_ERROR: a filter at the site blocks this answer"
        )


def test_results_and_log_hold_the_notes(tmp_path: Path) -> None:
    def filtered(site: str, name: str, task: Message) -> Shareable:
        reply = Message(
            params={key: torch.full_like(value, 0.1) for key, value in task.params.items()}, is_update=True,
            metrics=rows({"dice": 0.1}, "validation"), meta={"version": __version__, "status": "ok"},
            current_round=task.current_round,
        )  # fmt: skip
        return ExcludeVars(["0.bias"]).process(FLModelUtils.to_shareable(encode_model(reply)), at_site())

    server = Server(tmp_path, misbehave("site-2", "train", filtered), num_rounds=1, train_timeout=20)
    server.run()
    (record,) = server.results["rounds"]
    assert record["accepted"] == ["site-1", "site-2", "site-3"]
    assert record["notes"] == [
        "site 'site-2': its model went through 'ExcludeVars'; 100 % of the numbers in its update are not 0",
        "site 'site-2': 1 tensor ('0.bias') of 2 did not come and count as unchanged",
    ]
    assert "round 0, site 'site-2': 1 tensor ('0.bias')" in server.said("info")


# ------------------------------------------------------------------------------------------------ disk offload


def on_disk(params: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """Return tensors as FLARE's offload hands them over: a file each, with references."""
    folder.mkdir(parents=True)
    places = {}
    for number, (name, value) in enumerate(params.items()):
        save_file({f"T{number}": value.clone()}, folder / f"chunk_{number}.safetensors")
        places[name] = (str(folder / f"chunk_{number}.safetensors"), f"T{number}")
    lazy = LazyTensorDict(places, str(folder))
    return {name: lazy.make_lazy_ref(name) for name in params}


def lazy_model(message: Message, folder: Path) -> FLModel:
    model = encode_model(message)
    return FLModel(
        params=on_disk(model.params, folder), params_type=ParamsType.DIFF, metrics=model.metrics, meta=model.meta,
        current_round=model.current_round,
    )  # fmt: skip


@METHODS
def test_tensors_that_wait_on_disk(method: Any, tmp_path: Path) -> None:
    rule = fresh(method)
    collector = begun(rule, tmp_path / "staging")
    for site in SITES:
        sent = train_message(site, rule=rule)
        message = decode_model(lazy_model(sent, tmp_path / site))
        assert num_bytes(message.params) == num_bytes(sent.params)
        take(collector, site, message)
        message.params = None
        assert not (tmp_path / site).exists()  # FLARE's files go with the last reference
    state, _ = finish(collector)
    expected, _ = finish(round_with(fresh(method), tmp_path / "other", []))
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_damaged_tensor_on_disk_is_the_sites_fault_and_a_lost_one_the_servers(tmp_path: Path) -> None:
    """Check that FLARE writes a site's tensors down unread."""
    model = lazy_model(train_message("b"), tmp_path / "b")
    (tmp_path / "b" / "chunk_1.safetensors").write_bytes(b"\x10" + b"\0" * 40)
    message = decode_model(model)
    assert num_bytes(message.params) > 0
    with pytest.raises(ReportError, match=r"^site 'b': SafetensorError"):
        begun(FedAvg()).read_training("b", message)
    lost = lazy_model(train_message("b"), tmp_path / "c")
    (tmp_path / "c" / "chunk_1.safetensors").unlink()
    with pytest.raises(OSError, match="chunk_1"):
        begun(FedAvg()).read_training("b", decode_model(lost))


class Cell:
    """Stand in for the part of FLARE's cell that the offload is set on."""

    def __init__(self) -> None:
        self.context: dict[str, Any] = {}

    def get_fobs_context(self) -> dict[str, Any]:
        return dict(self.context)

    def update_fobs_context(self, values: dict[str, Any]) -> None:
        self.context.update(values)

    def register_request_cb(self, channel: str, topic: str, cb: Any) -> None:
        """Accept the callback for sending in turns, which has its own tests."""


@pytest.mark.many(0, 4, 5)  # each end once, both cells
@pytest.mark.parametrize("end", ["completed", "failed", "aborted"])
@pytest.mark.parametrize("simulator", [False, True])
def test_the_offload_is_on_during_a_run_and_gone_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, simulator: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    cell, roots, here = Cell(), [], []

    def answer(site: str, name: str, task: Message) -> Any:
        roots.append(Path(cell.context.get("tensor_disk_offload_root_dir") or tmp_path / "nowhere"))
        here.append(roots[-1].is_dir() and cell.context[FOBSContextKey.TENSOR_DISK_OFFLOAD])
        if end == "aborted":
            server.abort_signal.trigger("stop")
        if end == "failed":
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        message = Message(
            metrics=rows({"dice": 0.5}, "validation" if name == "train" else "test"),
            meta={"version": __version__, "status": "ok"},
            current_round=task.current_round,
        )
        if name == "train" and end != "aborted":  # a late file would stand in a folder that is gone
            message.params, message.is_update = {k: torch.ones_like(v) for k, v in task.params.items()}, True
            folder = roots[-1] / f"{site}-{task.current_round}"
            return FLModelUtils.to_shareable(lazy_model(message, folder))
        return message

    server = Server(tmp_path, answer, num_rounds=2, train_timeout=20)
    if simulator:
        server.cell = Cell()  # where FLARE's own helper would set it
        server.engine.server = type("SimulatorServer", (), {"job_cell": cell})()
    else:
        server.cell = cell
    if end == "failed":
        with pytest.raises(RuntimeError):
            server.run()
    else:
        server.run()
    assert here
    assert all(here)
    assert server.results["status"] == ("completed" if end == "completed" else "failed")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not cell.context[FOBSContextKey.TENSOR_DISK_OFFLOAD]
    assert server.said("warning").count("no disk offload") == 0
    if end == "completed":
        (train, *_) = server.results["rounds"][0]["phases"]
        assert train["bytes_in"] == train["bytes_out"]


def test_without_offload(tmp_path: Path) -> None:
    server = Server(tmp_path, num_rounds=1)  # an engine without a cell
    server.run()
    assert "FLARE offers no disk offload here: replies wait in memory" in server.said("warning")
    cell = Cell()
    off = Server(tmp_path, num_rounds=1, disk_offload=False)
    off.cell = cell
    off.run()
    assert cell.context == {}
    assert "offload" not in off.said("warning")


# ------------------------------------------------------------------------------------------------ stock controllers


def stock(site: str, filters: Sequence[Filter] = (), form: Params = AS_SENT["torch"], update: bool = True) -> FLModel:
    """Return the result of a script under a stock controller: an update of 0.1, a counter of 5."""
    params = form({"w": torch.full((2, 2), 0.1), "b": torch.full((3,), 0.1), "n": torch.tensor(5)})
    shareable = FLModelUtils.to_shareable(
        FLModel(params=params, params_type=ParamsType.DIFF if update else ParamsType.FULL, current_round=0)
    )
    for each in filters:
        shareable = each.process(shareable, at_site({"w": torch.ones(2, 2)}))
    model = FLModelUtils.from_shareable(fobs.loads(fobs.dumps(shareable)))
    model.meta["client_name"] = site
    return model


@pytest.mark.parametrize("form", AS_SENT)
@pytest.mark.parametrize("name", ["percentile", "svt"])
@pytest.mark.parametrize("filtered", ["a", "b"])
def test_one_filtered_site_under_a_stock_controller(name: str, form: str, filtered: str) -> None:
    change = (FILTERS[name](), AS_SENT[form])
    aggregator, merged = collect(*(stock(site, *(change if site == filtered else ())) for site in "abc"))
    assert aggregator.rejected == {}
    assert {k: (v.dtype, tuple(v.shape)) for k, v in merged.params.items()} == {
        "w": (torch.float32, (2, 2)), "b": (torch.float32, (3,)), "n": (torch.int64, ()),
    }  # fmt: skip


def test_an_excluded_tensor_under_a_stock_controller_is_unchanged() -> None:
    aggregator, merged = collect(stock("a"), stock("b", [ExcludeVars(["b", "n"])]), stock("c"))
    assert aggregator.rejected == {}
    torch.testing.assert_close(merged.params["b"], torch.full((3,), 0.2 / 3))
    torch.testing.assert_close(merged.params["w"], torch.full((2, 2), 0.1))
    assert merged.params["n"].item() == 5
    aggregator, _ = collect(
        stock("a", update=False), stock("b", [ExcludeVars(["b"])], update=False), stock("c", update=False)
    )
    assert "another model than most sites" in aggregator.rejected["b"]  # of a whole model, unchanged is unknown


def test_flares_offload_under_a_stock_controller(tmp_path: Path) -> None:
    """Check ``FedAvgRecipe(enable_tensor_disk_offload=True)``, which hands references to the aggregator."""
    sites = {}
    for site, value in (("a", 1.0), ("b", 3.0)):
        model = result(site, flat(value))
        model.params = on_disk(model.params, tmp_path / site)
        sites[site] = model
    aggregator, merged = collect(*sites.values())
    assert aggregator.rejected == {}
    assert isinstance(aggregator, FairAggregator)
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert isinstance(merged.params["w"], torch.Tensor)


def test_the_history_is_flares_own_key() -> None:
    shareable = through(train_message("b"), [ExcludeVars(["head.weight"])])
    dxo = from_shareable(shareable)
    assert isinstance(dxo, DXO)
    assert dxo.get_filter_history() == ["ExcludeVars"]
    assert META_KEY in dxo.meta
