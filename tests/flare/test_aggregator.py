"""Test a rule under FLARE's stock controllers: models or updates, tensors or arrays, sites left out, and outputs."""

from __future__ import annotations

import copy
import errno
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.base_fedavg import _get_num_steps_weight
from nvflare.app_common.workflows.fedavg import FedAvg as StockFedAvg
from nvflare.job_config.api import FedJob

from fairflare import client
from fairflare.base.settings import build, values_of
from fairflare.exchange.staging import Staging
from fairflare.federation.collecting.collector import QuorumError
from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.flare.aggregator import FairAggregator
from fairflare.flare.messages.wire import META_KEY
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import MakesTensors, SendsBeside, SendsParts, SumOfKept, TwoPhase
from fairflare.methods.cffl import CFFL
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_ism import FedISM
from fairflare.methods.fed_lwr import FedLWR
from fairflare.methods.fed_nova import FedNova
from fairflare.methods.q_fed_avg import QFedAvg

from ..federation.examples import example_report
from ..unit.test_settings import Builder

PAGE = Path(__file__).parents[2] / "docs" / "own_script.md"


def result(
    site: str, params: Any, *, update: bool = True, samples: Any = None, current_round: Any = 0, metrics: Any = None,
    report: Any = None, **meta: Any,
) -> FLModel:  # fmt: skip
    """Return the result of a site's script; without ``samples`` and ``report`` it knows nothing of FairFlare."""
    head = {**({"num_samples": samples} if samples else {}), **({"report": report} if report else {}), **meta}
    return FLModel(
        params=params,
        params_type=ParamsType.DIFF if update else ParamsType.FULL,
        metrics=metrics,
        current_round=current_round,
        meta={"client_name": site, **({META_KEY: head} if head else {})},
    )


def collect(*results: FLModel, rule: Any = None, min_sites: int = 1) -> tuple[FairAggregator, FLModel]:
    aggregator = FairAggregator(rule=rule or FedAvg(), min_sites=min_sites)
    for model in results:
        aggregator.accept_model(model)
    return aggregator, aggregator.aggregate_model()


def sent_out(aggregator: FairAggregator, params: dict[str, Any]) -> None:
    """Return the context that FLARE's controllers set before each round."""
    aggregator.fl_ctx = FLContext()
    aggregator.fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(params, {}), private=True, sticky=True)


def flat(value: float, size: int = 2) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), value)}


# ------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("as_numpy", [True, False])
def test_the_controller_gets_back_what_it_sent(update: bool, as_numpy: bool) -> None:
    params = [{"w": torch.tensor([v, v]), "n": torch.tensor(int(v) + 5)} for v in (1.0, -3.0)]
    if as_numpy:
        params = [{name: value.numpy() for name, value in each.items()} for each in params]
    aggregator, merged = collect(
        result("a", params[0], update=update, samples=1), result("b", params[1], update=update, samples=3)
    )
    assert aggregator.rejected == {}
    assert merged.params_type == (ParamsType.DIFF if update else ParamsType.FULL)
    kind = np.ndarray if as_numpy else torch.Tensor
    assert all(isinstance(value, kind) for value in merged.params.values())
    assert merged.params["w"].tolist() == [-2.0, -2.0]
    assert merged.params["n"].tolist() == 6
    assert merged.params["n"].shape == ()
    assert merged.meta[META_KEY] == {
        "sites": ["a", "b"], "rejected": {},
        "warnings": [],  # of two sites one nearly always holds more than half
    }  # fmt: skip
    assert merged.current_round == 0
    assert aggregator.last_weighing is not None
    assert aggregator.last_weighing.sites == {"a": 0.25, "b": 0.75}


def test_counters_of_svt_privacy_keep_their_shape() -> None:
    """Check NumPy arrays without a dimension, as FLARE's SVTPrivacy sends them, and bare scalars."""
    for counter in (np.array(7), np.int64(7), np.float32(7.0)):
        _, merged = collect(result("a", {"bn.num_batches_tracked": counter, "w": np.ones(2, np.float32)}))
        assert merged.params["bn.num_batches_tracked"].shape == ()
        assert merged.params["bn.num_batches_tracked"].dtype == counter.dtype


def test_a_result_of_nobody_is_refused() -> None:
    nameless = result("a", flat(9.0))
    nameless.meta.pop("client_name")
    aggregator, merged = collect(nameless, result("b", flat(3.0)))
    assert aggregator.rejected == {"?": "a result without a site name (meta 'client_name')"}
    assert merged.params["w"].tolist() == [3.0, 3.0]


def test_mixed_arrays_and_tensors_come_back_as_tensors() -> None:
    arrays = {"w": np.ones(2, np.float32)}
    _, merged = collect(result("a", arrays), result("b", flat(3.0)))
    assert isinstance(merged.params["w"], torch.Tensor)
    assert merged.params["w"].tolist() == [2.0, 2.0]


def test_a_site_that_is_left_out_does_not_decide_the_kind() -> None:
    arrays = {"w": np.ones(2, np.float32)}
    for odd in (result("c", flat(1.0, 5)), result("c", flat(math.nan))):
        _, merged = collect(result("a", arrays), result("b", arrays), odd)
        assert isinstance(merged.params["w"], np.ndarray)


def test_updates_of_a_variance_may_be_negative() -> None:
    updates = [result(site, {"bn.running_var": torch.full((2,), v)}) for site, v in (("a", -1.0), ("b", -3.0))]
    _, merged = collect(*updates, rule=FedAvg(weighting="uniform"))
    assert merged.params["bn.running_var"].tolist() == [-2.0, -2.0]
    models = [copy.copy(u) for u in updates]
    for model in models:
        model.params_type = ParamsType.FULL
    _, merged = collect(*models, rule=FedAvg(weighting="uniform"))
    assert merged.params["bn.running_var"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "method",
    [
        m
        for m in all_methods().values()
        if not issubclass(m.rule, TwoPhase | MakesTensors | SendsBeside | SendsParts | SumOfKept)
    ],
    ids=lambda m: m.name,
)
def test_every_single_phase_method_over_several_rounds(method: Any, tmp_path: Path) -> None:
    """Check whole models from scripts, with the methods that docs/own_script.md names as working."""
    (listed,) = re.findall(
        r"also work under FLARE's FedAvg controller: (.*?)\. The script", PAGE.read_text().replace("\n", " ")
    )
    rule = build(method.rule, {**method.server, **({"shrinking": False} if method.name == "fed_ga" else {})})
    rule.memory_folder = tmp_path
    aggregator = FairAggregator(rule=rule, min_sites=2)
    sent_out(aggregator, {"conv.weight": torch.zeros(3, 2), "head.weight": torch.zeros(2)})
    for current_round, sites in enumerate((("a", "b", "c"), ("a", "c"), ("c", "b", "a"))):
        aggregator.reset_stats()
        rule.directives(current_round, 3, sites)
        for site in sites:
            index = ord(site) - ord("a")
            g = torch.Generator().manual_seed(10 * current_round + index)
            params = {"conv.weight": torch.randn(3, 2, generator=g), "head.weight": torch.randn(2, generator=g)}
            report = example_report(rule.report_fields, index)
            aggregator.accept_model(
                result(site, params, update=False, samples=5 + index, report=report, current_round=current_round)
            )
        assert aggregator.rejected == {}
        assert aggregator.accepted == sorted(sites)
        try:
            merged = aggregator.aggregate_model()
        except RuntimeError as error:  # a rule that needs what a stock controller does not give says so
            if "run it with fairflare.flare.controller.RoundsController" not in str(error):
                raise
            assert method.title not in re.split(", | with ", listed)
            return
        assert merged.current_round == current_round
        weights = aggregator.last_weighing.sites
        assert weights is not None
        assert sum(weights.values()) == pytest.approx(1)
        assert sorted(weights) == sorted(sites)
        assert all(bool(torch.isfinite(t).all()) for t in merged.params.values())


# ------------------------------------------------------------------------------------------------ the majority


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_majority_says_what_a_model_looks_like(order: tuple[int, ...]) -> None:
    """Check that the first model to arrive does not define the form."""
    results = [result("a", flat(9.0, 7)), result("b", flat(1.0)), result("c", flat(3.0))]
    aggregator, merged = collect(*[results[i] for i in order])
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert aggregator.accepted == ["b", "c"]
    assert aggregator.rejected == {"a": "site 'a' sent another model than most sites: tensor 'w' differs"}
    assert merged.meta[META_KEY]["rejected"] == aggregator.rejected


def test_kinds_of_parameters_and_names_count_too() -> None:
    aggregator, merged = collect(
        result("a", flat(9.0)), result("b", flat(1.0), update=False), result("c", flat(3.0), update=False),
        result("d", {"v": torch.ones(2)}, update=False), result("e", {"w": torch.ones(2, dtype=torch.long)}),
    )  # fmt: skip
    assert merged.params_type == ParamsType.FULL
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert aggregator.rejected["a"] == "site 'a' sent params of type DIFF, most sites FULL"
    assert aggregator.rejected["d"] == "site 'd' sent another model than most sites: tensor 'v' differs"
    assert sorted(aggregator.rejected) == ["a", "d", "e"]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_straggler_of_an_earlier_round_is_left_out(late: int) -> None:
    results = [result("b", flat(1.0), current_round=5), result("c", flat(3.0), current_round=5)]
    results.insert(late, result("a", flat(9.0), current_round=4))
    aggregator, merged = collect(*results)
    assert merged.current_round == 5
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert aggregator.rejected == {"a": "site 'a' sent a result of round 4, most sites of round 5"}


def test_a_tie_goes_the_same_way_in_any_order() -> None:
    results = [result("a", flat(1.0)), result("b", flat(2.0, 3))]
    assert collect(*results)[0].accepted == collect(*results[::-1])[0].accepted == ["a"]


def test_the_majority_may_be_too_few() -> None:
    with pytest.raises(QuorumError, match=r"round 0: 2 .*site 'a' sent another model"):
        collect(result("a", flat(9.0, 7)), result("b", flat(1.0)), result("c", flat(3.0)), min_sites=3)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (result("b", flat(math.nan)), "site 'b': tensor 'w'"),
        (result("b", {"w": {"x": 1}}), "site 'b': tensor 'w' must be a tensor or an array, got dict"),
        (result("b", {}), "site 'b' sent no model"),
        (result("b", "x"), "site 'b' sent no model"),
        (result("b", flat(1.0), samples=-1), "site 'b': field 'num_samples' must lie in"),
        (result("b", flat(1.0), status="failed", reason="no data"), "site 'b': no data"),
        (result("b", flat(1.0), version="9.0"), "site 'b' answers with fairflare '9.0'"),
        (result("b", flat(1.0), stats="x"), "site 'b': field 'stats' must be a dict, got 'x'"),
    ],
)
def test_bad_results_cost_their_site(bad: FLModel, message: str) -> None:
    aggregator, merged = collect(result("a", flat(1.0)), bad, result("c", flat(3.0)))
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert list(aggregator.rejected) == ["b"]
    assert aggregator.rejected["b"].startswith(message)


def test_a_site_counts_once() -> None:
    aggregator, merged = collect(result("a", flat(1.0)), result("a", flat(5.0)), result("b", flat(3.0)))
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert aggregator.rejected == {"a": "site 'a' answered twice in round 0"}


def test_too_few_sites_raise_with_every_reason() -> None:
    with pytest.raises(QuorumError, match=r"0 usable .*min_sites=1 \(no answer\)"):
        collect()
    with pytest.raises(QuorumError, match=r"1 .*'b': ill; site 'c': tensor 'w'.*finite"):
        collect(
            result("a", flat(1.0)), result("b", flat(1.0), status="failed", reason="ill"), result("c", flat(math.inf)),
            min_sites=3,
        )  # fmt: skip


def test_a_new_round_forgets_the_refusals() -> None:
    aggregator, _ = collect(result("a", flat(1.0)), result("b", flat(math.nan)))
    aggregator.reset_stats()
    assert (aggregator.accepted, aggregator.rejected) == ([], {})
    aggregator.accept_model(result("b", flat(4.0), current_round=1))
    assert aggregator.aggregate_model().params["w"].tolist() == [4.0, 4.0]


def test_a_full_disk_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the error is not raised where the result arrives, as FLARE would log it and continue."""
    aggregator = FairAggregator(rule=FedAvg())
    aggregator.accept_model(result("a", flat(1.0)))
    with monkeypatch.context() as patch:

        def full(self: Staging, site: str, state: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(Staging, "put", full)
        aggregator.accept_model(result("b", flat(1.0)))
    assert aggregator.rejected == {}
    with pytest.raises(OSError, match="No space left"):
        aggregator.aggregate_model()
    aggregator.reset_stats()
    aggregator.accept_model(result("a", flat(1.0)))
    assert aggregator.aggregate_model().params["w"].tolist() == [1.0, 1.0]


def test_two_phase_rule_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"FedLWR asks .*twice.*RoundsController"):
        FairAggregator(rule=FedLWR())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": FedAvg(), "min_sites": 0}, "min_sites must be an integer >= 1, got 0"),
        ({"rule": FedAvg(), "max_weight": 2}, "max_weight.* got 2"),
        ({"rule": None}, "rule must be Rule, got None"),
        ({"rule": {}}, "rule must be Rule, got {}"),
        ({}, "FairAggregator needs the setting 'rule'"),
    ],
)
def test_bad_settings_fail_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        FairAggregator(**given)


# ------------------------------------------------------------------------------------------------ bounds


def bounded(*results: FLModel, rule: Any = None, **bounds: Any) -> tuple[FairAggregator, FLModel]:
    aggregator = FairAggregator(rule=rule or FedAvg(), **bounds)
    for model in results:
        aggregator.accept_model(model)
    return aggregator, aggregator.aggregate_model()


def test_weights_and_samples_are_bounded() -> None:
    sites = [result("a", flat(1.0), samples=10), result("b", flat(2.0), samples=20)]
    liar = result("c", flat(-9.0), samples=10**9)
    aggregator, merged = bounded(*sites, liar, max_weight=0.4)
    assert aggregator.last_weighing is not None
    assert aggregator.last_weighing.sites == pytest.approx({"a": 0.2, "b": 0.4, "c": 0.4})
    assert merged.params["w"].tolist() == pytest.approx([0.2 + 0.8 - 3.6] * 2)
    assert merged.meta[META_KEY]["warnings"] == ["site 'c': weight 1 cut to 0.4 (max_weight)"]
    aggregator, merged = bounded(*sites, liar, max_samples=30)
    assert aggregator.last_weighing is not None
    assert aggregator.last_weighing.sites == pytest.approx({"a": 1 / 6, "b": 2 / 6, "c": 3 / 6})


@pytest.mark.parametrize("as_numpy", [True, False])
def test_updates_are_bounded_without_the_received_model(as_numpy: bool, caplog: pytest.LogCaptureFixture) -> None:
    params = [
        {"w": torch.tensor([v, 0.0]), "bn.running_var": torch.tensor([u])}
        for v, u in ((1.0, 1.0), (2.0, -1.0), (1e6, -1e6))
    ]
    if as_numpy:
        params = [{name: value.numpy() for name, value in each.items()} for each in params]
    sites = [result(site, each) for site, each in zip("abc", params, strict=True)]
    for order in (sites, sites[::-1]):
        aggregator, merged = bounded(*order, rule=FedAvg(weighting="uniform"), max_update_norm=3.0)
        assert aggregator.rejected == {}
        assert merged.params["w"].tolist() == pytest.approx([(1 + 2 + 6) / 3, 0.0])
        assert merged.params["bn.running_var"].tolist() == pytest.approx([(1 - 1 - 3) / 3])
        assert len(merged.meta[META_KEY]["warnings"]) == 2
    assert "norm 1e+06 of its update (parameters) cut to 6, 3 times the median" in caplog.text


def test_a_whole_model_is_refused_where_nobody_knows_what_it_started_from() -> None:
    sites = [result("a", flat(1.0)), result("b", flat(9.0), update=False), result("c", flat(3.0))]
    aggregator, merged = bounded(*sites, max_update_norm=3)
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert aggregator.rejected["b"].startswith("site 'b' sent a whole model, and the controller does not say which")
    with pytest.raises(QuorumError, match=r"0 usable.*'a' sent .*max_update_norm"):
        bounded(*[result(site, flat(1.0), update=False) for site in "abc"], max_update_norm=3)
    _, merged = bounded(*[result(site, flat(1.0), update=False) for site in "abc"], max_weight=0.4)
    assert merged.params["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "method",
    [
        m
        for m in all_methods().values()
        if not issubclass(m.rule, TwoPhase | MakesTensors | SendsBeside | SendsParts | SumOfKept)
    ],
    ids=lambda m: m.name,
)
def test_every_single_phase_method_with_bounds(method: Any, tmp_path: Path) -> None:
    """Check one, two and three sites in any order: the same bits, and no site above the bound."""
    bounds = {"max_weight": 0.4, "max_samples": 100, "max_update_norm": 3.0}
    for sites in ("a", "ab", "abc"):
        found = []
        for number, order in enumerate((sites, sites[::-1])):
            rule = build(method.rule, method.server)
            rule.memory_folder = tmp_path / f"{sites}{number}"
            results = []
            for site in order:
                index = ord(site) - ord("a")
                g = torch.Generator().manual_seed(index)
                params = {"conv.weight": torch.randn(3, 2, generator=g), "head.weight": torch.randn(2, generator=g)}
                results.append(
                    result(site, params, samples=10**index, report=example_report(rule.report_fields, index))
                )
            try:
                found.append(bounded(*results, rule=rule, **bounds))
            except RuntimeError as error:
                if "run it with fairflare.flare.controller.RoundsController" not in str(error):
                    raise
                return
        for aggregator, merged in found:
            assert aggregator.last_weighing.sites == found[0][0].last_weighing.sites
            assert max(aggregator.last_weighing.sites.values()) <= max(0.4, 1 / len(sites)) + 1e-9
            assert all(torch.equal(t, found[0][1].params[name]) for name, t in merged.params.items())


# ------------------------------------------------------------------------------------------------ metrics


def test_metrics_are_the_mean_over_the_sites() -> None:
    """Check any range that a stock script uses: percent, NumPy numbers, losses."""
    _, merged = collect(
        result("a", flat(1.0), metrics={"accuracy": 80.0, "loss": np.float32(2.0), "own": 1.0, "text": "x"}),
        result("b", flat(1.0), metrics={"accuracy": 90, "loss": 4.0, "flag": True}),
        result("c", flat(math.nan), metrics={"accuracy": 0.0, "loss": 0.0}),
    )
    assert merged.metrics == {"accuracy": 85.0, "loss": 3.0}


@pytest.mark.parametrize("metrics", [None, {}, {"accuracy": math.nan}, {"accuracy": 10**400}, {"accuracy": "good"}])
def test_sites_without_a_metric_still_count(metrics: Any) -> None:
    aggregator, merged = collect(
        result("a", flat(1.0), metrics={"accuracy": 0.5}), result("b", flat(3.0), metrics=metrics)
    )
    assert aggregator.rejected == {}
    assert merged.params["w"].tolist() == [2.0, 2.0]
    assert merged.metrics is None


class Controller(StockFedAvg):
    """Stand in for FLARE's own controller, with sites that answer at once."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.fl_ctx, self.abort_signal = FLContext(), Signal()
        self.engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=s) for s in ("a", "b")])
        self.rounds: list[int] = []
        self.saved: list[FLModel] = []

    def send_model(self, task_name: str = "train", data: Any = None, callback: Any = None, **rest: Any) -> None:
        self.rounds.append(data.current_round)
        for site, score in (("a", 0.4), ("b", 0.6)):
            update = {"w": torch.full((2,), 1.0)}
            callback(
                result(
                    site, update, current_round=data.current_round, metrics={"accuracy": score + 0.1 * len(self.rounds)}
                )
            )

    def load_model(self) -> FLModel:
        return FLModel(params={"w": torch.zeros(2)})

    def save_model(self, model: FLModel) -> None:
        self.saved.append(FLModel(params={k: v.clone() for k, v in model.params.items()}))

    def get_num_standing_tasks(self) -> int:
        return 0

    def event(self, *args: Any, **kwargs: Any) -> None: ...
    def fire_event_with_data(self, *args: Any, **kwargs: Any) -> None: ...
    def info(self, *args: Any) -> None: ...


def test_flares_own_fed_avg_stops_by_the_metrics() -> None:
    controller = Controller(
        num_clients=2, num_rounds=9, aggregator=FairAggregator(rule=FedAvg()), stop_cond="accuracy >= 0.75"
    )
    controller.run()
    assert controller.rounds == [0, 1, 2]  # 0.6, 0.7, 0.8
    assert controller.saved[-1].params["w"].tolist() == [3.0, 3.0]


# ------------------------------------------------------------------------------------------------ jobs


def test_it_travels_in_a_job(tmp_path: Path) -> None:
    job = FedJob(name="stock", min_clients=1)
    aggregator = FairAggregator(rule=FedISM(q=3, tau=0.5), min_sites=4)
    job.to_server(Controller.__base__(num_clients=2, aggregator=aggregator), id="controller")
    job.export_job(str(tmp_path))
    config = json.loads((tmp_path / "stock" / "app_server" / "config" / "config_fed_server.json").read_text())
    again = Builder().build_component(config["workflows"][0]).aggregator
    assert isinstance(again, FairAggregator)
    assert values_of(again) == values_of(aggregator)


def test_what_flare_made_of_the_message_is_understood() -> None:
    """Check messages after FLARE's own conversion, as in a run."""
    sent = FLModelUtils.from_shareable(FLModelUtils.to_shareable(result("a", flat(2.0), samples=3)))
    sent.meta["client_name"] = "a"
    _, merged = collect(sent)
    assert merged.params["w"].tolist() == [2.0, 2.0]


# ------------------------------------------------------------------------------------------------ in place of the mean


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
def test_a_median_behind_a_stock_controller(update: bool, aggregate: str) -> None:
    aggregator = FairAggregator(rule=FedAvg(), aggregate=aggregate)
    for site, value in zip("abcde", (1.0, 2.0, 3.0, 4.0, 1e6), strict=True):
        params = {"w": torch.full((2,), value), "n": torch.tensor(int(min(value, 1e6)))}
        aggregator.accept_model(result(site, params, update=update, samples=10))
    merged = aggregator.aggregate_model()
    # Weights 1/5: a quarter cut from either end leaves 0.15 of 2 and of 4, and 3 whole.
    assert merged.params["w"].tolist() == pytest.approx([3.0, 3.0])
    assert int(merged.params["n"]) == 3


def test_rules_that_want_more_than_a_mean_refuse_it_at_once() -> None:
    with pytest.raises(ValueError, match="CFFL sends every site something"):
        FairAggregator(rule=CFFL())
    for rule, why in ((FedNova(), "a step along the mean"), (QFedAvg(), "a step along")):
        with pytest.raises(ValueError, match=rf"^aggregate='median' .*{type(rule).__name__}: .*{why}"):
            FairAggregator(rule=rule, aggregate="median")
    FairAggregator(rule=QFedAvg(q_form="weighted"), aggregate="median")
    with pytest.raises(ValueError, match=r"^trim=0\.1 is of .*, not 'median'"):
        FairAggregator(rule=FedAvg(), aggregate="median", trim=0.1)


def test_two_of_six_are_bounded_behind_a_stock_controller() -> None:
    aggregator = FairAggregator(rule=FedAvg(), **FOR_HOSPITALS)
    for site in "abcdef":
        samples = 10**9 if site in "ef" else 100
        aggregator.accept_model(result(site, flat(1.0 if site in "ef" else 0.5), samples=samples))
    merged = aggregator.aggregate_model()
    assert float(merged.params["w"][0]) == pytest.approx(0.5 + 0.5 * (1 / 3 + 0.16))
    assert "max_excess" in " ".join(merged.meta[META_KEY]["warnings"])


# ------------------------------------------------------------------------------------------------ what counts


def steps(site: str, value: Any, count: Any, **more: Any) -> FLModel:
    """Return a whole model with FLARE's count of steps; ``count`` None: the script reports none."""
    own = {} if count is None else {"NUM_STEPS_CURRENT_ROUND": count}
    made = result(site, {"w": value}, update=False, **more)
    made.meta.update(own)
    return made


def own_mean(*results: FLModel) -> Any:
    """Return the mean that FLARE's own FedAvg computes from the same results."""
    helper = WeightedAggregationHelper()
    for each in results:
        helper.add(each.params, _get_num_steps_weight(each), each.meta["client_name"], 0)
    return helper.get_result()["w"]


@pytest.mark.parametrize("kind", [float, lambda v: np.array([v]), lambda v: torch.tensor([v]), np.float32])
@pytest.mark.parametrize("counts", [(10, 30), (None, None), (None, 30), (0, 30), (-1, 30), ("7", 2.5), (math.nan, 30)])
def test_steps_weigh_as_in_flares_own_fed_avg(kind: Any, counts: tuple[Any, Any]) -> None:
    """Check that 10 and 30 steps of 2 and 4 give 3.5; a warning names sites that FLARE counts as 1."""
    results = [steps(site, kind(v), n) for site, v, n in zip("ab", (2.0, 4.0), counts, strict=True)]
    aggregator, merged = collect(*results)
    assert aggregator.rejected == {}
    found = torch.as_tensor(merged.params["w"]).item()
    assert found == pytest.approx(torch.as_tensor(own_mean(*results)).item())
    assert type(merged.params["w"]) is {float: float, np.float32: np.ndarray}.get(kind, type(kind(1.0)))
    if counts == (10, 30):
        assert found == 3.5
    said = [line for line in merged.meta[META_KEY]["warnings"] if "weighs as one step" in line]
    usable = [not isinstance(n, bool) and n is not None and float(n) > 0 for n in counts]
    assert [line[:8] for line in said] == [f"site '{s}'" for s, fine in zip("ab", usable, strict=True) if not fine]


def test_steps_of_all_rounds_so_far_are_noticed() -> None:
    aggregator, said = FairAggregator(rule=FedAvg()), []
    for current_round in range(3):
        aggregator.reset_stats()
        for site, count in (("a", 10 * (current_round + 1)), ("b", 10)):
            aggregator.accept_model(steps(site, torch.ones(2) * current_round, count, current_round=current_round))
        said.append([w for w in aggregator.aggregate_model().meta[META_KEY]["warnings"] if "of all rounds" in w])
    assert said[0] == []
    assert said[1] == [
        "site 'a': it says 20 steps after 10; is NUM_STEPS_CURRENT_ROUND of all rounds so far, not of one?"
    ]
    assert said[2] == [
        "site 'a': it says 30 steps after 20; is NUM_STEPS_CURRENT_ROUND of all rounds so far, not of one?"
    ]


def test_samples_of_a_report_go_before_steps_and_one_that_is_absent_is_said() -> None:
    def given(site: str, value: float, samples: int | None, count: int | None) -> FLModel:
        made = steps(site, torch.full((2,), value), count)
        return client.with_report(made, {}, num_samples=samples)

    _, merged = collect(given("a", 1.0, 30, 1), given("b", 5.0, 10, 1))
    assert merged.params["w"].tolist() == [2.0, 2.0]
    _, merged = collect(given("a", 1.0, 3, None), given("b", 5.0, 1, None), given("c", 5.0, None, 99), rule=FedAvg())
    assert merged.params["w"].tolist() == pytest.approx([13 / 5, 13 / 5])  # 3, 1, and 1 in its place
    assert "site 'c': it tells no number of samples, and weighs as much as one sample" in str(merged.meta[META_KEY])


def test_counts_that_no_rule_looks_at_are_not_spoken_of() -> None:
    _, merged = collect(result("a", flat(1.0)), result("b", flat(3.0)), rule=FedAvg(weighting="uniform"))
    assert merged.meta[META_KEY]["warnings"] == []


@pytest.mark.parametrize("value", [True, "2", [1.0]])
def test_params_that_are_no_numbers_are_refused_in_words(value: Any) -> None:
    aggregator, _ = collect(result("a", {"w": value}), result("b", {"w": 2.0}))
    assert aggregator.rejected["a"].startswith("site 'a': tensor 'w' must be a tensor or an array, got")


# ------------------------------------------------------------------------------------------------ no training


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("rule", [FedAvg(), FedNova(), QFedAvg()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("as_numpy", [True, False])
def test_a_site_that_sends_back_what_it_received_is_left_out_by_name(update: bool, rule: Any, as_numpy: bool) -> None:
    """Check that reported steps do not matter, as a stock controller counts none itself."""
    start = {"w": torch.tensor([1.0, 2.0]), "bn.running_mean": torch.zeros(2), "n": torch.tensor(3)}
    aggregator = FairAggregator(rule=copy.deepcopy(rule))
    kind = torch.Tensor.numpy if as_numpy else torch.clone
    sent_out(aggregator, {name: kind(tensor) for name, tensor in start.items()})
    report = example_report(rule.report_fields, 0)
    for site, change in (("a", 0.0), ("b", 2.0), ("c", 4.0)):
        moved = {"w": torch.full((2,), change), "bn.running_mean": torch.ones(2), "n": torch.tensor(1)}
        whole = {name: moved[name] + (0 if update else start[name]) for name in start}
        made = result(site, {name: kind(t) for name, t in whole.items()}, update=update, samples=5, report=report)
        made.meta["NUM_STEPS_CURRENT_ROUND"] = 12
        aggregator.accept_model(made)
    merged = aggregator.aggregate_model()
    why = "site 'a': it sent back the model that it received, and does not count as trained"
    assert aggregator.rejected == {"a": why} == merged.meta[META_KEY]["rejected"]
    assert merged.params_type == (ParamsType.DIFF if update else ParamsType.FULL)
    assert type(merged.params["w"]) is (np.ndarray if as_numpy else torch.Tensor)
    if isinstance(rule, FedAvg):
        assert merged.params["w"].tolist() == [3.0 + (0 if update else s) for s in (1.0, 2.0)]


def test_a_round_in_which_nobody_trained_ends_the_job() -> None:
    aggregator = FairAggregator(rule=FedAvg())
    for site in "ab":
        aggregator.accept_model(result(site, flat(0.0)))
    with pytest.raises(QuorumError, match=r"0 usable.*'a', 'b': it sent back"):
        aggregator.aggregate_model()


def test_whole_models_are_updates_from_the_controllers_model() -> None:
    """Check that q-FedAvg gives the same from models and updates, where FLARE reports the model that it sent."""
    found = {}
    for update in (True, False):
        rule = QFedAvg(q=1.0)
        aggregator = FairAggregator(rule=rule)
        sent_out(aggregator, {"w": np.array([1.0, 2.0], np.float32)})
        for site, change, loss in (("a", 0.5, 2.0), ("b", -0.25, 1.0)):
            params = {"w": np.array([change, change], np.float32) + (0 if update else np.array([1, 2], np.float32))}
            aggregator.accept_model(result(site, params, update=update, report={"probe_loss": loss}))
        merged = aggregator.aggregate_model()
        found[update] = merged.params["w"] + (np.array([1, 2], np.float32) if update else 0)
    assert found[True].tolist() == pytest.approx(found[False].tolist())
    assert found[False].tolist() != [1.0, 2.0]


def test_a_rule_that_needs_a_report_names_the_function_for_it() -> None:
    for rule, field in ((QFedAvg(), "probe_loss"), (FedISM(), "sharpness"), (FedNova(), "step_norm")):
        aggregator = FairAggregator(rule=rule)
        aggregator.accept_model(result("a", flat(1.0)))
        assert " report" in aggregator.rejected["a"]
        assert re.search(rf"{type(rule).__name__} reads .*{field}.*: client\.with_report", aggregator.rejected["a"])


@pytest.mark.parametrize(
    ("method", "report", "words"),
    [
        ("fed_ce", {"minus_score": 1.0}, "FedCE tells every site its coefficient"),
        ("fed_ga", {"gap": 0.1}, "FedGA's step shrinks over the rounds"),
    ],
)
def test_what_a_stock_controller_cannot_do_is_refused_by_name(method: str, report: Any, words: str) -> None:
    rule = build(all_methods()[method].rule, {})
    answers = [result(site, {"w": torch.ones(2)}, report=report) for site in "ab"]
    with pytest.raises(RuntimeError, match=f"{words}.*a stock controller does not"):
        collect(*answers, rule=rule)
