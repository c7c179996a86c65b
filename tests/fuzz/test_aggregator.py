"""Attack :class:`FairAggregator` in the same way, under the calls of FLARE's stock FedAvg."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairflare.base.settings import build
from fairflare.exchange.messages import clean_state
from fairflare.flare.aggregator import FairAggregator
from fairflare.flare.messages.wire import META_KEY
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import MakesTensors, SendsBeside, SendsParts, SumOfKept, TwoPhase

from ..federation.network import SITES
from .bench import LONGEST
from .mutations import Cases
from .server import Net, NotSent, decoded, encoded, good_reply

REPLIES = 20
#: What needs FLARE's own rounds is refused under a stock controller. Of those whose server does the same, one.
REFUSED = (TwoPhase, MakesTensors, SendsBeside, SendsParts, SumOfKept)
METHODS = {(m.rule, str(m.server)): m for m in reversed(all_methods().values()) if not issubclass(m.rule, REFUSED)}
UNDER = list(METHODS.values())
LIKE = clean_state(Net().state_dict())
SILENT = object()


def one_round(aggregator: FairAggregator, bad: str, answer: Any, delivery: str) -> Any:
    """Do with a round's results what the controller does."""
    aggregator.reset_stats()
    for site in SITES:
        results = [decoded(encoded(good_reply(aggregator.rule, site, "train", 0, LIKE)))]
        if site == bad and answer is not None:
            results = [] if answer is SILENT else [answer]
            if delivery == "twice" and results:
                results *= 2
        for result in results:
            try:  # as FLARE's callback: what it cannot convert does not reach the aggregator
                model = FLModelUtils.from_shareable(result)
            except Exception:
                continue
            model.meta["client_name"] = site
            aggregator.accept_model(model)
    return aggregator.aggregate_model()


def same(first: Any, second: Any) -> bool:
    return list(first.params) == list(second.params) and all(
        torch.equal(value, second.params[name]) for name, value in first.params.items()
    )


@pytest.mark.many("bsm_fl", "fed_ism")
@pytest.mark.parametrize("method", UNDER, ids=lambda method: method.name)
def test_hostile_results_cost_one_site_one_round(method: Any) -> None:
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
    start = FairAggregator(rule=build(method.rule, method.server), min_sites=2)
    try:
        one_round(start, "", None, "")
    except RuntimeError as error:  # a rule that needs the received model says so at once
        if "run it with fairflare.flare.controller.RoundsController" not in str(error):
            raise
        return
    cases = Cases(good_reply(start.rule, "site-2", "train", 0, LIKE), f"{method.name}/stock/9")
    silent = {site: one_round(fresh(start), site, SILENT, "") for site in SITES}
    sent = index = refused = 0
    while sent < REPLIES:
        case, site = cases[index], SITES[index % len(SITES)]
        index += 1
        try:
            answer = decoded(encoded(case.apply(good_reply(start.rule, site, "train", 0, LIKE))))
        except NotSent:
            continue
        sent += 1
        aggregator = fresh(start)
        merged = one_round(aggregator, site, copy.deepcopy(answer), case.delivery)
        others = sorted({*SITES} - {site})
        assert set(others) <= set(aggregator.accepted), (index, case.name)
        for name, value in merged.params.items():
            assert value.dtype.is_floating_point == LIKE[name].dtype.is_floating_point, (index, case.name)
            assert value.shape == LIKE[name].shape, (index, case.name)
            assert bool(torch.isfinite(value.double()).all()), (index, case.name)
        if site not in aggregator.accepted:
            refused += 1
            assert same(merged, silent[site]), (index, case.name)
            assert sorted(merged.meta[META_KEY]["sites"]) == others
            if reason := aggregator.rejected.get(site, ""):
                assert reason.startswith(f"site {site!r}"), (index, case.name, reason)
                assert reason.isprintable(), (index, case.name)
                assert len(reason) <= LONGEST, (index, case.name)
        one_round(aggregator, "", None, "")
        assert aggregator.accepted == SITES, (index, case.name)
    assert refused > REPLIES / 5


def fresh(start: FairAggregator) -> FairAggregator:
    """Return the rule as it was after the first round."""
    return FairAggregator(rule=copy.deepcopy(start.rule), min_sites=start.min_sites)
