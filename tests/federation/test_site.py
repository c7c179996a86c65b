"""Test the tasks of a site: determinism, state between tasks, refusals, and the sanitizer."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.base.disk.files import safe_name
from fairflare.core.states import difference
from fairflare.data.datalist import SPLITS, write_datalist
from fairflare.exchange.messages import clean_meta, clean_state
from fairflare.federation.site.site_file import own_settings, read_site_file
from fairflare.federation.site.worker import round_seed
from fairflare.methods.base.training import LocalTraining, SiteError
from fairflare.methods.fed_ism import SharpnessAwareTraining
from fairflare.methods.fed_lwr import LayerSimilarityReport
from fairflare.methods.fed_mas import RescueTraining
from fairflare.methods.fed_mrl import FairProximalTraining
from fairflare.methods.fed_prox import ProximalTraining
from fairflare.tasks.base import Task
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import CLASSES, metric_values

from ..methods.support import SEGMENTATION, at_site, initial, request, same


@pytest.fixture
def worker(tmp_path):
    def make(training=None, folder="state", settings=None, task=None):
        return at_site(tmp_path / folder, training, settings, task=task)

    return make


def test_metrics_are_of_the_received_model(worker):
    state = initial()
    reply = worker().perform(request("train", state))
    task = SegmentationTask(**SEGMENTATION)
    model = task.build_model()
    model.load_state_dict(state)
    data = task.open_site("site-1", {})
    expected = task.evaluate(model, data.batches("validation", batch_size=4), "cpu")
    assert metric_values(reply.metrics) == pytest.approx(expected)


def test_a_task_computes_in_memory_that_is_reused(worker, monkeypatch):
    devices = []
    monkeypatch.setattr(
        "fairflare.federation.site.worker.reuse_memory", lambda device: devices.append(device) or nullcontext()
    )
    assert worker().perform(request("train", initial())).status == "ok"
    assert devices == ["cpu"]


def test_update_is_local_minus_received(worker):
    state = initial()
    here = worker()
    reply = here.perform(request("train", state))
    local = here.state.store().load_at("local_model", 0)
    for name, tensor in local.items():
        assert torch.allclose(tensor, state[name] + reply.update[name], atol=1e-6)
    assert same(reply.update, difference(local, state))
    assert reply.update["conv_0.conv_0.adn.N.num_batches_tracked"] == reply.num_steps


def test_anchor_needs_the_local_model_of_that_round(worker):
    state = initial()
    here = worker(LayerSimilarityReport(batch_size=4))
    refused = here.perform(request("anchor", state, 0))
    assert refused.status == "skipped"
    assert "no local model of round 0" in refused.reason
    here.perform(request("train", state, 0))
    assert here.perform(request("anchor", state, 1)).status == "skipped"
    reply = worker(LayerSimilarityReport(batch_size=4)).perform(request("anchor", state, 0))
    assert reply.status == "ok"
    assert reply.report["layers"] == list(dict.fromkeys(k.rpartition(".")[0] for k in state))
    assert all(0 <= c <= 1 + 1e-9 for c in reply.report["cka"])
    assert reply.update is None


def test_test_splits_and_the_received_model(worker):
    """Check that ``validate`` measures its model on the test split, and neither trains nor saves any part of it."""
    state = initial(seed=5)
    here = worker()
    reply = here.perform(request("validate", state))
    task = SegmentationTask(**SEGMENTATION)
    model = task.build_model()
    model.load_state_dict(state)
    data = task.open_site("site-1", {})
    assert metric_values(reply.metrics) == pytest.approx(
        task.evaluate(model, data.batches("test", batch_size=4), "cpu")
    )
    assert reply.num_samples == data.num_samples("test")
    assert reply.update is None
    assert here.state.store().load_at("local_model", 0) is None


def failing(error: type[Exception], text: str, after: int = 0, task: Task | None = None) -> Task:
    """Return a task whose loss raises in step ``after``; ``task.built`` holds weak references to its networks."""
    task = task or SegmentationTask(**SEGMENTATION)
    loss, build = task.loss, task.build_model
    steps = []
    task.built = []

    def build_model():
        model = build()
        task.built.append(weakref.ref(model))
        return model

    def fail(outputs, targets):
        if not outputs.requires_grad:  # evaluation
            return loss(outputs, targets)
        steps.append(1)
        if len(steps) > after:
            raise error(text)
        return loss(outputs, targets)

    task.build_model, task.loss = build_model, fail
    return task


def test_out_of_memory_and_other_errors_are_replies_without_details(worker):
    oom = worker(task=failing(torch.cuda.OutOfMemoryError, "CUDA out of memory")).perform(request("train", initial()))
    assert "out of memory in train; lower batch_size" in oom.reason
    other = worker(task=failing(RuntimeError, "/secret/patient.png")).perform(request("train", initial()))
    assert other.status == "failed"
    assert "failed with RuntimeError" in other.reason
    assert "patient" not in other.reason


TOLD = {"search_distance": 0.05, "rescue_factor": True, "mean_loss": 0.5, "mu": {"site-1": 0.1}}
CLASSES = {**CLASSES, "projector_dim": 96}


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(batch_size=4),
        ProximalTraining(batch_size=4),
        SharpnessAwareTraining(batch_size=4),
        SharpnessAwareTraining(batch_size=4, rho=0.0),
        RescueTraining(batch_size=4),
        RescueTraining(batch_size=4, cache_features=False, rf_source="supervised"),
        FairProximalTraining(batch_size=4),
    ],
    ids=lambda t: f"{type(t).__name__}-{getattr(t, 'rho', '')}{getattr(t, 'rf_source', '')}",
)
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, MemoryError])
@pytest.mark.many(0, 1, 2, 4, 6, 7, 10, 12)  # each training with one of both errors, the first with both
def test_an_out_of_memory_leaves_nothing_of_the_model(worker, training, error, monkeypatch):
    """Check that no dead model is left beside a second one, once optimizer and stepper are in use."""
    learned = ClassificationTask(**CLASSES) if isinstance(training, RescueTraining) else None
    state = initial(learned)
    runs = []
    begin = type(training).begin_round

    class Watched(type(training)):
        def begin_round(self, run, model):
            runs.append(weakref.ref(run))
            begin(self, run, model)

    training.__class__ = Watched
    task = failing(error, "no memory", after=3, task=learned)
    loss = type(task).loss
    here = worker(training, task=task)
    alive = []  # when the GPU's memory is given back
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: alive.append(task.built[0]() is not None))
    reply = here.perform(request("train", state, directives=TOLD))
    assert "out of memory in train" in reply.reason
    assert len(task.built) == len(runs) == 1
    assert alive == [False]
    gc.collect()
    assert task.built[0]() is None
    assert runs[0]() is None
    task.loss = loss.__get__(task)
    assert here.perform(request("train", state, directives=TOLD)).status == "ok"


def test_model_of_another_network_is_refused(worker):
    state = initial()
    state.pop("final_conv.weight")
    assert "does not fit the task's network" in worker().perform(request("train", state)).reason


def test_a_task_nobody_knows_is_refused(worker):
    reply = worker().perform(request("submit_model", initial()))
    assert reply.status == "failed"
    known = "'anchor', 'check', 'keys', 'mask', 'norms', 'plan', 'release', 'train', 'validate'"
    assert f"unknown task 'submit_model', known: [{known}]" in reply.reason


def test_unknown_device_and_threads_are_named(worker):
    with pytest.raises(SiteError, match="'device' is 'cuda:99'"):
        worker(settings={"device": "cuda:99"})
    with pytest.raises(SiteError, match=r"'num_threads'.* got 0$"):
        worker(settings={"num_threads": 0})


@pytest.mark.parametrize("value", ["false", 0, None])
def test_metrics_by_class_is_true_or_false(worker, value):
    with pytest.raises(SiteError, match="'metrics_by_class' must be true or false"):
        worker(settings={"metrics_by_class": value})


@pytest.mark.parametrize("name", ["train", "validate"])
def test_the_dice_of_structures_stays_at_home(worker, tmp_path, name, caplog):
    for number in range(len(SPLITS)):
        for kind, top in (("image", 256), ("mask", 3)):
            values = np.random.default_rng(number).integers(0, top, (32, 32), np.uint8)
            Image.fromarray(values).save(tmp_path / f"{kind}{number}.png")
    entries = {s: [{"image": f"image{n}.png", "label": f"mask{n}.png"}] for n, s in enumerate(SPLITS)}
    write_datalist(tmp_path / "datalist.json", {**entries, "test_other": entries["test"]})
    task = SegmentationTask(**SEGMENTATION, num_classes=2, class_names=["a", "b"])
    own = {"data_root": str(tmp_path)}
    everything = worker(settings=own, task=task).perform(request(name, initial(task)))
    caplog.set_level("INFO")
    kept = worker(folder="kept", settings={**own, "metrics_by_class": False}, task=task).perform(
        request(name, initial(task))
    )
    of_structures = {f"{what}_{of}" for what in ("dice", "loss") for of in "ab"}
    expected = of_structures | ({f"other/{metric}" for metric in of_structures} if name == "validate" else set())
    every, left = metric_values(everything.metrics), metric_values(kept.metrics)
    assert set(every) - set(left) == expected
    assert left == {name: value for name, value in every.items() if name not in expected}
    assert kept.stats["classes_at_home"] is True
    assert "classes_at_home" not in everything.stats
    assert "dice_a" not in caplog.text  # where a site streams its log, it would leave that way


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "x" * 129])
def test_names_cannot_leave_their_folder(name):
    with pytest.raises(ValueError, match="must be 1 to 128"):
        safe_name(name)


def test_seeds_differ_by_site_round_and_experiment():
    seeds = {round_seed(e, s, r) for e in range(3) for s in ("a", "b") for r in range(3)}
    assert len(seeds) == 18
    assert round_seed(0, "a", 0) == round_seed(0, "a", 0)


# ------------------------------------------------------------------------------------------------ the private file


def test_a_sites_own_block_goes_first(tmp_path):
    content = {"device": "cpu", "cache_bytes": 1, "sites": {"a": {"cache_bytes": 2, "prior": "x"}, "b": {"device": 3}}}
    file = tmp_path / "fairflare.json"
    file.write_text(json.dumps(content))
    blocks = {"sites": content["sites"]}  # so that a site without data of its own sees that others have some
    own = {"device": "cpu", "cache_bytes": 2, "prior": "x", **blocks}
    assert read_site_file(file, "a") == own_settings(content, "a") == own
    assert read_site_file(file, "c") == {"device": "cpu", "cache_bytes": 1, **blocks}
    assert read_site_file(tmp_path / "none.json", "a") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "must hold a JSON object"),
        ({"sites": ["a"]}, "and 'sites' in it too"),
        ({"sites": {"a": 3}}, r"'sites\.a' in .*fairflare\.json must be"),
    ],
)
def test_a_private_file_of_another_form_is_named(tmp_path, content, message):
    (tmp_path / "f.json").write_text(json.dumps(content))
    with pytest.raises(SiteError, match=message):
        read_site_file(tmp_path / "f.json", "a")


@pytest.mark.parametrize("content", ["{", '{"sites": {"a": {"data_root": "/x"}, "a": {"data_root": "/y"}}}'])
def test_an_unreadable_private_file_tells_the_server_no_path(tmp_path, content):
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(SiteError, match="is not readable JSON") as caught:
        read_site_file(tmp_path / "f.json", "a")
    assert str(tmp_path) in str(caught.value)
    assert str(tmp_path) not in caught.value.public


# ------------------------------------------------------------------------------------------------ the sanitizer


def test_sanitizer_makes_plain_values():
    dirty = {"a": np.float32(0.5), "b": np.bool_(True), "c": np.arange(2), "d": (1, torch.tensor(2.0)), 3: None}
    assert clean_meta(dirty) == {"a": 0.5, "b": True, "c": [0, 1], "d": [1, 2.0], "3": None}
    with pytest.raises(TypeError, match=r"meta\.x\.y: a complex cannot travel"):
        clean_meta({"x": {"y": 1j}})
    with pytest.raises(TypeError, match="more than 64 bits"):
        clean_meta({"x": 2**70})


def test_sanitizer_makes_plain_contiguous_tensors():
    matrix = torch.arange(6.0).reshape(2, 3)
    state = clean_state({"t": matrix.t(), "p": torch.nn.Parameter(matrix), "n": np.float64(3.0) * np.ones(2)})
    assert state["t"].is_contiguous()
    assert torch.equal(state["t"], matrix.t())
    assert type(state["p"]) is torch.Tensor
    assert not state["p"].requires_grad
    assert state["n"].dtype == torch.float64
    with pytest.raises(TypeError, match="tensor 'x' must be a tensor"):
        clean_state({"x": [1.0]})
