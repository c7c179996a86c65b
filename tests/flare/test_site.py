"""What a task does at a site, without FLARE: determinism, state between tasks, refusals, and the sanitizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fairflare.exchange.wire import clean_meta, clean_state
from fairflare.flare.site import SiteStore, SiteTask, SiteWorker, round_seed, safe_name
from fairflare.methods.base import LocalTraining, SiteError
from fairflare.methods.fed_lwr import LayerSimilarityReport
from fairflare.tasks.segmentation import SegmentationTask

TASK = {"image_size": (32, 32), "features": (4, 4, 8, 8, 8, 4), "phantom_cases": 0.3}


@pytest.fixture
def worker(tmp_path):
    def make(training=None, folder="state", settings=None, task=None):
        return SiteWorker(
            "site-1",
            task or SegmentationTask(**TASK),
            training or LocalTraining(batch_size=4),
            settings or {},
            tmp_path / folder,
            num_threads=1,
        )

    return make


def initial(seed=0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return clean_state(SegmentationTask(**TASK).build_model().state_dict())


def request(name, state, current_round=0, **kwargs) -> SiteTask:
    return SiteTask(name=name, state=state, current_round=current_round, num_rounds=3, seed=0, **kwargs)


def same(a, b) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def test_training_is_deterministic_and_depends_on_the_round(worker):
    state = initial()
    first = worker(folder="a").perform(request("train", state))
    torch.rand(3)  # somebody else's random numbers
    again = worker(folder="b").perform(request("train", state))
    other = worker(folder="c").perform(request("train", state, current_round=1))
    assert first.status == "ok"
    assert same(first.update, again.update)
    assert first.metrics == again.metrics
    assert not same(first.update, other.update)
    assert first.num_steps == math.ceil(first.num_samples / 4)


def test_metrics_are_of_the_received_model(worker):
    state = initial()
    reply = worker().perform(request("train", state))
    task = SegmentationTask(**TASK)
    model = task.build_model()
    model.load_state_dict(state)
    data = task.open_site("site-1", {})
    expected = task.evaluate(model, data.batches("validation", batch_size=4), "cpu")
    assert reply.metrics == pytest.approx(expected)


def test_update_is_local_minus_received(worker):
    state = initial()
    site = worker()
    reply = site.perform(request("train", state))
    local = site.store.load_model(0)
    for name, tensor in local.items():
        assert torch.allclose(tensor, state[name] + reply.update[name], atol=1e-6)
    assert reply.update["conv_0.conv_0.adn.N.num_batches_tracked"] == reply.num_steps


def test_optimizer_moments_cross_processes_and_a_repeated_round_starts_the_same(worker):
    """A new worker per task, as the simulator does with few workers; then the server asks for round 1 again."""
    state = initial()
    worker().perform(request("train", state, 0))
    kept = worker().perform(request("train", state, 1))
    repeated = worker().perform(request("train", state, 1))
    fresh = worker(folder="fresh").perform(request("train", state, 1))
    assert same(kept.update, repeated.update)
    assert not same(kept.update, fresh.update)
    without = LocalTraining(batch_size=4, keep_optimizer_state=False)
    worker(without, folder="no").perform(request("train", state, 0))
    assert same(fresh.update, worker(without, folder="no").perform(request("train", state, 1)).update)


def test_anchor_needs_the_local_model_of_that_round(worker):
    state = initial()
    site = worker(LayerSimilarityReport(batch_size=4))
    refused = site.perform(request("anchor", state, 0))
    assert refused.status == "skipped"
    assert "no local model of round 0" in refused.reason
    site.perform(request("train", state, 0))
    assert site.perform(request("anchor", state, 1)).status == "skipped"
    reply = worker(LayerSimilarityReport(batch_size=4)).perform(request("anchor", state, 0))
    assert reply.status == "ok"
    assert reply.report["layers"] == list(dict.fromkeys(k.rpartition(".")[0] for k in state))
    assert all(0 <= c <= 1 + 1e-9 for c in reply.report["cka"])
    assert reply.update is None


@pytest.mark.parametrize("settings", [{}, {"similarity": "cosine"}, {"preset": "authors"}, {"cka_max_samples": 5}])
def test_anchor_equal_to_the_local_model_is_fully_similar(worker, settings):
    site = worker(LayerSimilarityReport(batch_size=4, **settings))
    site.perform(request("train", initial(), 0))
    reply = site.perform(request("anchor", site.store.load_model(0), 0))
    assert max(abs(d) for d in reply.report["dissimilarity"] if math.isfinite(d)) < 1e-6
    assert sum(math.isfinite(d) for d in reply.report["dissimilarity"]) > 30


def test_nan_loss_names_the_site_and_the_remedy(worker):
    reply = worker(LocalTraining(batch_size=4, learning_rate=1e30)).perform(request("train", initial()))
    assert reply.status == "failed"
    assert reply.update is None
    assert "site 'site-1'" in reply.reason
    assert "lower learning_rate" in reply.reason


class Broken(SegmentationTask):
    def __init__(self, error):
        super().__init__(**TASK)
        self.error = error

    def loss(self, outputs, targets):
        raise self.error


def test_out_of_memory_and_other_errors_are_replies_without_details(worker):
    oom = worker(task=Broken(torch.cuda.OutOfMemoryError("CUDA out of memory"))).perform(request("train", initial()))
    assert "out of memory in train; lower batch_size" in oom.reason
    other = worker(task=Broken(RuntimeError("/secret/patient.png"))).perform(request("train", initial()))
    assert other.status == "failed"
    assert "failed with RuntimeError" in other.reason
    assert "patient" not in other.reason


def test_model_of_another_network_is_refused(worker):
    state = initial()
    state.pop("final_conv.weight")
    assert "does not fit the task's network" in worker().perform(request("train", state)).reason


def test_unknown_device_and_threads_are_named(worker):
    with pytest.raises(SiteError, match="'device' is 'cuda:99'"):
        worker(settings={"device": "cuda:99"})
    with pytest.raises(SiteError, match="'num_threads' must be an integer >= 1, got 0"):
        worker(settings={"num_threads": 0})


def test_store_keeps_two_rounds_and_forgets_later_ones(tmp_path):
    store = SiteStore(tmp_path)
    for number in range(5):
        store.save("moments", number, {"x": torch.tensor(number)})
    assert store.load_before("moments", 4)["x"] == 3
    assert store.load_at("moments", 2) is None
    store.save("moments", 3, {"x": torch.tensor(30)})  # the server went back to its checkpoint
    assert store.load_at("moments", 4) is None
    assert store.load_before("moments", 9)["x"] == 30
    assert store.load_before("moments", 3) is None or store.load_before("moments", 3)["x"] == 2


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "x" * 129])
def test_names_cannot_leave_their_folder(name):
    with pytest.raises(ValueError, match="must be 1 to 128"):
        safe_name(name)


def test_seeds_differ_by_site_round_and_experiment():
    seeds = {round_seed(e, s, r) for e in range(3) for s in ("a", "b") for r in range(3)}
    assert len(seeds) == 18
    assert round_seed(0, "a", 0) == round_seed(0, "a", 0)


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
