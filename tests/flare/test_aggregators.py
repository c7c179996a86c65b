"""The server halves with FLModels in hand, no FLARE process: acceptance, rejection, weights, sums, state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fairflare.methods import all_methods
from fairflare.methods.base import FairAggregator, Field, ReportError, Weighing
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_lwr import FedLWR

SITES = ("a", "b", "c")


def net_state(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(3, 2, generator=g),
        "bn.weight": torch.randn(3, generator=g),
        "bn.running_var": torch.rand(3, generator=g),
        "bn.num_batches_tracked": torch.tensor(seed % 7),
        "head.weight": torch.randn(2, 3, generator=g),
    }


def report_for(aggregator: FairAggregator, site: str) -> dict[str, float]:
    """A legal report with every declared number."""
    low, high = 0.05, 0.1 * (1 + SITES.index(site))
    return {f.name: min(max(high, f.low, low), f.high) for f in aggregator.report_fields if f.kind == "number"}


def train_reply(site, state, received=None, *, samples=10, report=None, current_round=0, **meta):
    """A site's message; an update when ``received`` is given."""
    params = state if received is None else {k: state[k] - received[k] for k in state}
    return FLModel(
        params=params,
        params_type=ParamsType.FULL if received is None else ParamsType.DIFF,
        current_round=current_round,
        meta={
            "client_name": site,
            "fairflare": {"status": "ok", "num_samples": samples, "report": report or {}, **meta},
        },
    )


def anchor_reply(site, dissimilarity: dict[str, float], **meta):
    layers = list(dissimilarity)
    report = {
        "layers": layers,
        "cka": [1 - dissimilarity[n] for n in layers],
        "dissimilarity": [dissimilarity[n] for n in layers],
    }
    return FLModel(
        metrics={"answered": 1.0},
        meta={"client_name": site, "fairflare": {"status": "ok", "report": report, **meta}},
    )


def begun(aggregator: FairAggregator, tmp_path, current_round=0):
    received = net_state(99)
    aggregator.begin_round(current_round, 4, global_state=received, folder=tmp_path / "staging")
    return received


def feed(aggregator, received, samples=(1, 1, 2), order=SITES, current_round=0):
    states = {site: net_state(i) for i, site in enumerate(SITES)}
    for site in order:
        n = samples[SITES.index(site)]
        report = report_for(aggregator, site)
        reply = train_reply(site, states[site], received, samples=n, report=report, current_round=current_round)
        aggregator.accept_model(reply)
    assert aggregator.rejected == {}
    return states


def naive(states, weights_of):
    """Float64 loops over sites and tensors."""
    out = {}
    for name, first in states["a"].items():
        if first.is_floating_point():
            total = torch.zeros_like(first, dtype=torch.float64)
            for site, state in states.items():
                total += weights_of(name)[site] * state[name].double()
            out[name] = total
        else:
            out[name] = torch.stack([s[name] for s in states.values()]).max()
    return out


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [("samples", {"a": 0.25, "b": 0.25, "c": 0.5}), ("uniform", {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})],
)
def test_fedavg_against_a_loop(tmp_path, weighting, weights):
    aggregator = FedAvg(weighting)
    states = feed(aggregator, begun(aggregator, tmp_path))
    result = aggregator.aggregate_model()
    expected = naive(states, lambda _: weights)
    for name, tensor in result.params.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), atol=1e-6, rtol=0)
        assert tensor.dtype == states["a"][name].dtype
    assert result.params_type == ParamsType.FULL
    assert aggregator.last_weighing.sites == pytest.approx(weights)


SCORES = {  # 1 - delta of spec example 6: layer a (0.9, 0.8, 0.5), layer b (0.2, 0.5, 0.8)
    "a": {"conv": 0.1, "bn": 0.1, "head": 0.8},
    "b": {"conv": 0.2, "bn": 0.2, "head": 0.5},
    "c": {"conv": 0.5, "bn": 0.5, "head": 0.2},
}
RHO_A = {"a": 0.125, "b": 0.25, "c": 0.625}
RHO_B = {"a": 0.8 / 1.5, "b": 0.5 / 1.5, "c": 0.2 / 1.5}


def test_fedlwr_weighs_each_layer(tmp_path):
    aggregator = FedLWR()
    states = feed(aggregator, begun(aggregator, tmp_path))
    anchor = aggregator.anchor_model()
    uniform = naive(states, lambda _: dict.fromkeys(SITES, 1 / 3))
    torch.testing.assert_close(anchor["conv.weight"].double(), uniform["conv.weight"], atol=1e-6, rtol=0)
    for site in SITES:
        aggregator.accept_anchor(anchor_reply(site, SCORES[site]))
    assert aggregator.rejected == {}
    result = aggregator.aggregate_model()
    expected = naive(states, lambda name: RHO_B if name.startswith("head") else RHO_A)
    for name, tensor in result.params.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), atol=1e-6, rtol=0)
    assert aggregator.last_weighing.layers["head"] == pytest.approx(RHO_B, abs=1e-12)
    assert aggregator.last_weighing.record["conv"]["c"]["weight"] == pytest.approx(0.625)


def test_fedlwr_only_layer_weighs_the_whole_model(tmp_path):
    aggregator = FedLWR(only_layer="head")
    feed(aggregator, begun(aggregator, tmp_path))
    for site in SITES:
        aggregator.accept_anchor(anchor_reply(site, SCORES[site]))
    aggregator.aggregate_model()
    for by_site in aggregator.last_weighing.layers.values():
        assert by_site == pytest.approx(RHO_B)


def test_fedlwr_granularities(tmp_path):
    aggregator = FedLWR(layer_granularity="model")
    feed(aggregator, begun(aggregator, tmp_path))
    for site in SITES:
        aggregator.accept_anchor(anchor_reply(site, SCORES[site]))
    aggregator.aggregate_model()
    means = {site: sum(v.values()) / 3 for site, v in SCORES.items()}
    total = sum(means.values())
    for by_site in aggregator.last_weighing.layers.values():
        assert by_site == pytest.approx({site: m / total for site, m in means.items()})


def test_fedlwr_unknown_layer_is_named(tmp_path):
    aggregator = FedLWR(only_layer="encoder4")
    feed(aggregator, begun(aggregator, tmp_path))
    aggregator.accept_anchor(anchor_reply("a", SCORES["a"]))
    with pytest.raises(RuntimeError, match=r"only_layer='encoder4'.*'bn', 'conv', 'head'"):
        aggregator.aggregate_model()


def test_fedlwr_site_without_anchor_report(tmp_path):
    """First the mean of the others; once it has reported, its last scores."""
    aggregator = FedLWR()
    feed(aggregator, begun(aggregator, tmp_path))
    for site in ("a", "b"):
        aggregator.accept_anchor(anchor_reply(site, SCORES[site]))
    aggregator.aggregate_model()
    # conv: 0.1, 0.2 and their mean 0.15 -> /0.45
    assert aggregator.last_weighing.layers["conv"] == pytest.approx({"a": 0.1 / 0.45, "b": 0.2 / 0.45, "c": 1 / 3})
    assert math.isnan(aggregator.last_weighing.record["conv"]["c"]["cka"])

    received = begun(aggregator, tmp_path, 1)
    feed(aggregator, received, current_round=1)
    for site in SITES:
        aggregator.accept_anchor(anchor_reply(site, SCORES[site]))
    aggregator.aggregate_model()
    restored = FedLWR()
    restored.load_state_dict(aggregator.state_dict())
    received = begun(restored, tmp_path, 2)
    feed(restored, received, current_round=2)
    for site in ("a", "b"):
        restored.accept_anchor(anchor_reply(site, SCORES[site]))
    restored.aggregate_model()
    assert restored.last_weighing.layers["conv"] == pytest.approx(RHO_A)


def test_fedlwr_without_any_report_says_why(tmp_path):
    aggregator = FedLWR()
    feed(aggregator, begun(aggregator, tmp_path))
    bad = anchor_reply("a", SCORES["a"], reason="no data", status="failed")
    aggregator.accept_anchor(bad)
    with pytest.raises(RuntimeError, match=r"no site reported about the anchor.*no data"):
        aggregator.aggregate_model()


def test_identical_models_come_out_exactly(tmp_path):
    aggregator = FedLWR()
    received = net_state(99)
    aggregator.begin_round(0, 1, global_state=received, folder=tmp_path)
    for site in SITES:
        aggregator.accept_model(train_reply(site, net_state(3)))
    for site in SITES:
        aggregator.accept_anchor(anchor_reply(site, dict.fromkeys(("conv", "bn", "head"), 0.0)))
    result = aggregator.aggregate_model()
    for name, tensor in result.params.items():
        assert torch.equal(tensor, net_state(3)[name]), name


BAD_ANCHOR = {
    "dissimilarity": ({"dissimilarity": [0.1, 3.0, 0.2]}, r"site 'a': field 'dissimilarity\[1\]' must lie in"),
    "infinite": ({"cka": [0.1, math.inf, 0.2]}, r"site 'a': field 'cka\[1\]' must be finite"),
    "string": ({"cka": [0.1, "x", 0.2]}, r"site 'a': field 'cka\[1\]' must be a number, got 'x'"),
    "length": ({"cka": [0.1]}, "site 'a': field 'cka' has 1 entries, field 'layers' has 3"),
    "layers": ({"layers": ["conv", "bn", "nose"]}, "does not name the model's layers"),
    "missing": ({"cka": None}, "site 'a': the report lacks the field 'cka'"),
}


@pytest.mark.parametrize("case", BAD_ANCHOR)
def test_bad_anchor_report_is_recorded_by_name(tmp_path, case):
    change, message = BAD_ANCHOR[case]
    aggregator = FedLWR()
    feed(aggregator, begun(aggregator, tmp_path))
    reply = anchor_reply("a", SCORES["a"])
    reply.meta["fairflare"]["report"].update(change)
    aggregator.accept_anchor(reply)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(aggregator.rejected["a"])
    assert aggregator.accepted == list(SITES)  # the model stays in the round


def test_undefined_scores_are_legal(tmp_path):
    aggregator = FedLWR()
    feed(aggregator, begun(aggregator, tmp_path))
    for site in SITES:
        scores = dict(SCORES[site])
        if site == "a":
            scores["conv"] = math.nan  # replaced by the site's mean of 0.1 and 0.8
        aggregator.accept_anchor(anchor_reply(site, scores))
    assert aggregator.rejected == {}
    aggregator.aggregate_model()
    weights = aggregator.last_weighing.layers["conv"]
    assert weights == pytest.approx({"a": 0.45 / 1.15, "b": 0.2 / 1.15, "c": 0.5 / 1.15})


# ------------------------------------------------------------------------------------------------ all methods


@pytest.mark.parametrize("name", list(all_methods()))
class TestEveryMethod:
    """The battery a new method inherits by being listed."""

    def make(self, name) -> FairAggregator:
        method = all_methods()[name]
        settings = dict(method.server)
        if "only_layer" in settings:
            settings["only_layer"] = "head"
        return method.aggregator(**settings)

    def finish(self, aggregator):
        if aggregator.two_phase:
            for site in reversed(aggregator.accepted):
                aggregator.accept_anchor(anchor_reply(site, SCORES[site]))
        return aggregator.aggregate_model().params

    def test_order_of_arrival_does_not_matter(self, name, tmp_path):
        results = []
        for order in (SITES, SITES[::-1], ("b", "c", "a")):
            aggregator = self.make(name)
            feed(aggregator, begun(aggregator, tmp_path), order=order)
            results.append(self.finish(aggregator))
        for other in results[1:]:
            for key, tensor in results[0].items():
                assert torch.equal(tensor, other[key]), key

    def test_weights_sum_to_one(self, name, tmp_path):
        aggregator = self.make(name)
        feed(aggregator, begun(aggregator, tmp_path))
        self.finish(aggregator)
        weighing = aggregator.last_weighing
        assert isinstance(weighing, Weighing)
        groups = [weighing.sites] if weighing.sites else list(weighing.layers.values())
        assert groups
        for weights in groups:
            assert set(weights) == set(SITES)
            assert min(weights.values()) >= 0
            assert sum(weights.values()) == pytest.approx(1, abs=1e-9)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"conv.weight": torch.full((3, 2), math.nan)}, r"site 'c'.*'conv.weight'.*finite"),
            ({"conv.weight": torch.zeros(2, 3)}, r"site 'c'.*'conv.weight'.*shape"),
            ({"extra": torch.zeros(1)}, r"site 'c'.*extra"),
        ],
    )
    def test_bad_update_leaves_the_site_out(self, name, tmp_path, change, message):
        aggregator = self.make(name)
        received = begun(aggregator, tmp_path)
        for i, site in enumerate(SITES):
            state = net_state(i)
            update = {k: state[k] - received[k] for k in state}
            if site == "c":
                update.update(change)
            reply = train_reply(site, update, report=report_for(aggregator, site))
            reply.params_type = ParamsType.DIFF
            aggregator.accept_model(reply)
        assert aggregator.accepted == ["a", "b"]
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(aggregator.rejected["c"])
        result = self.finish(aggregator)
        assert all(bool(torch.isfinite(t.float()).all()) for t in result.values())

    def test_too_few_sites_fail_with_reasons(self, name, tmp_path):
        aggregator = self.make(name)
        aggregator.min_sites = 2
        received = begun(aggregator, tmp_path)
        aggregator.accept_model(train_reply("a", net_state(0), received, report=report_for(aggregator, "a")))
        failed = train_reply("b", net_state(1), received)
        failed.meta["fairflare"].update(status="failed", reason="site 'b': out of memory")
        aggregator.accept_model(failed)
        with pytest.raises(RuntimeError, match=r"1 usable result.*min_sites=2.*b: site 'b': out of memory"):
            aggregator.aggregate_model()

    def test_wrong_round_and_second_answer_are_refused(self, name, tmp_path):
        aggregator = self.make(name)
        received = begun(aggregator, tmp_path)
        report = report_for(aggregator, "a")
        aggregator.accept_model(train_reply("a", net_state(0), received, report=report, current_round=7))
        assert "answered for round 7" in aggregator.rejected["a"]
        aggregator.accept_model(train_reply("a", net_state(0), received, report=report))
        assert aggregator.accepted == ["a"]
        aggregator.accept_model(train_reply("a", net_state(1), received, report=report))
        assert "twice" in aggregator.rejected["a"]

    def test_state_survives_a_restart(self, name, tmp_path):
        first = self.make(name)
        feed(first, begun(first, tmp_path))
        self.finish(first)
        path = tmp_path / "state.pt"
        torch.save(first.state_dict(), path)
        second = self.make(name)
        second.load_state_dict(torch.load(path, weights_only=True))
        outcome = []
        for aggregator in (first, second):
            feed(aggregator, begun(aggregator, tmp_path, 1), current_round=1)
            outcome.append(self.finish(aggregator))
        for key, tensor in outcome[0].items():
            assert torch.equal(tensor, outcome[1][key]), key


def test_stock_controller_gets_back_what_it_sent():
    """Without a global model: updates in, the averaged update out, NumPy stays NumPy."""
    aggregator = FedAvg()
    for site, value, n in (("a", 1.0, 1), ("b", -3.0, 3)):
        reply = train_reply(site, {"w": np.full(2, value, np.float32)}, samples=n)
        reply.params_type = ParamsType.DIFF
        aggregator.accept_model(reply)
    result = aggregator.aggregate_model()
    assert result.params_type == ParamsType.DIFF
    assert isinstance(result.params["w"], np.ndarray)
    assert result.params["w"].tolist() == [-2.0, -2.0]


def test_stock_controller_updates_of_a_variance_may_be_negative():
    aggregator = FedAvg("uniform")
    for site, value in (("a", -1.0), ("b", -3.0)):
        reply = train_reply(site, {"bn.running_var": torch.full((2,), value)})
        reply.params_type = ParamsType.DIFF
        aggregator.accept_model(reply)
    assert aggregator.aggregate_model().params["bn.running_var"].tolist() == [-2.0, -2.0]


def test_two_phase_method_refuses_a_stock_controller():
    aggregator = FedLWR()
    aggregator.accept_model(train_reply("a", {"w.weight": torch.ones(2)}))
    with pytest.raises(RuntimeError, match="RoundsController"):
        aggregator.aggregate_model()


def test_int_counter_from_a_filter_is_cast_back(tmp_path):
    aggregator = FedAvg("uniform")
    received = begun(aggregator, tmp_path)
    state = net_state(5)
    update = {k: (state[k] - received[k]).float() for k in state}  # as a site's privacy filter leaves it
    reply = train_reply("a", update)
    reply.params_type = ParamsType.DIFF
    aggregator.accept_model(reply)
    assert aggregator.rejected == {}
    result = aggregator.aggregate_model().params
    assert result["bn.num_batches_tracked"].dtype == torch.int64
    assert int(result["bn.num_batches_tracked"]) == 5


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"preset": "papers"}, "preset must be one of"),
        ({"clip_min": 0.9, "clip_max": 0.5}, "clip_min and clip_max"),
        ({"layer_granularity": "leaves"}, "layer_granularity"),
        ({"min_sites": 0}, "min_sites must be an integer >= 1, got 0"),
    ],
)
def test_bad_settings_fail_at_once(kwargs, message):
    with pytest.raises(ValueError, match=message):
        FedLWR(**kwargs)


def test_authors_preset_clips():
    assert FedLWR(preset="authors").clip == (1e-4, 0.99)
    assert FedLWR(preset="authors", clip_max=0.999).clip == (1e-4, 0.999)
    assert FedLWR().clip == (0.0, 1.0)


def test_field_refuses_booleans_and_text():
    field = Field("x", low=0, high=1)
    with pytest.raises(ReportError, match="site 's': field 'x' must be a number, got True"):
        field.read({"x": True}, "s")
    with pytest.raises(ReportError, match=r"must lie in \[0, 1\], got 2.0"):
        field.read({"x": 2}, "s")
