"""Test every listed method: its server half with example answers made from its own declared fields."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fairflare.base.settings import build
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.reports import Field, ReportError
from fairflare.methods.base.rule import Rule, Steps, TwoPhase, Weighing, anchor_fields
from tests.tiny import run_document

from .examples import (
    LAYERS,
    RECEIVED,
    SITES,
    anchor_message,
    begun,
    example_report,
    finish,
    naive_average,
    net_state,
    take,
    train_message,
    whole_round,
)

#: Of those whose server does the same, one: the sites' half has no part in it.
METHODS = list({(m.rule, str(m.server)): m for m in reversed(all_methods().values())}.values())
pytestmark = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


def make(method: Any) -> Rule:
    return build(method.rule, method.server)


def weights_of(weighing: Weighing) -> list[Mapping[str, float]]:
    groups = [weighing.sites] if weighing.sites else list((weighing.layers or {}).values())
    assert groups
    return groups


def step_of(weighing: Weighing) -> float:
    """Return the step as the rules record it that make one."""
    return weighing.values.get("step", 1.0)


def check_weights(weighing: Weighing, sites: list[str]) -> None:
    assert math.isfinite(step_of(weighing))
    assert step_of(weighing) >= 0
    for weights in [*weights_of(weighing), *([weighing.buffers] if weighing.buffers else [])]:
        assert sorted(weights) == sites
        assert all(math.isfinite(w) and w >= 0 for w in weights.values()), weights
        assert sum(weights.values()) == pytest.approx(1, abs=1e-9)


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def moved(
    method: Any, average: Mapping[str, torch.Tensor], folder: Path, order: Sequence[str] = SITES
) -> Mapping[str, torch.Tensor]:
    """Return the model that a rule's server optimizer, if it has one, makes of an average in the first round."""
    rule = make(method)
    if type(rule).move in (Rule.move, Steps.move):
        return average
    with mock.patch.object(type(rule), "move", lambda self, change: change):
        whole_round(rule, folder / "weighed", order=order)  # its weigh may leave something for its move
    trained = [n for n, t in average.items() if t.is_floating_point() and not n.endswith("running_var")]
    change = rule.move({name: average[name].double() - RECEIVED[name].double() for name in trained})
    return {**average, **{name: RECEIVED[name].double() + change[name] for name in trained}}


def test_order_of_arrival_does_not_matter(method: Any, tmp_path: Path) -> None:
    results = []
    for number, order in enumerate((SITES, SITES[::-1], ("b", "c", "a"))):
        results.append(whole_round(make(method), tmp_path / str(number), order=order))
    for state, weighing in results[1:]:
        assert same(state, results[0][0])
        assert weights_of(weighing) == weights_of(results[0][1])


def test_weights_sum_to_one_and_are_what_is_summed(method: Any, tmp_path: Path) -> None:
    state, weighing = whole_round(make(method), tmp_path)
    check_weights(weighing, list(SITES))
    states = {site: net_state(i) for i, site in enumerate(SITES)}
    owner = {name: name.rpartition(".")[0] for name in RECEIVED}
    by_tensor = {name: weighing.sites or (weighing.layers or {})[owner[name]] for name in RECEIVED}
    by_tensor["bn.running_var"] = weighing.buffers or by_tensor["bn.running_var"]
    expected = naive_average(states, {name: dict(weights) for name, weights in by_tensor.items()}, step_of(weighing))
    expected = moved(method, expected, tmp_path)
    factors = weighing.details.get("factors", {})  # of the sites' changes, where a method has a direction of its own
    trained = [n for n, t in RECEIVED.items() if t.is_floating_point() and not n.endswith("running_var")]
    for name in (n for n in trained if owner[n] in factors):
        pairs = [(states[site][name].double(), factor) for site, factor in factors[owner[name]].items()]
        expected[name] = RECEIVED[name] + sum(factor * (own - RECEIVED[name].double()) for own, factor in pairs)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), atol=1e-5, rtol=0)


def test_absent_and_back(method: Any, tmp_path: Path) -> None:
    rule = make(method)
    for current_round, order in enumerate((SITES, ("a", "c"), ("b", "a"), SITES)):
        state, weighing = whole_round(rule, tmp_path, current_round, order)
        check_weights(weighing, sorted(order))
        assert all(bool(torch.isfinite(t.float()).all()) for t in state.values())


def test_the_first_round_without_one_site(method: Any, tmp_path: Path) -> None:
    _, weighing = whole_round(make(method), tmp_path, order=("c", "b"))
    check_weights(weighing, ["b", "c"])


def test_one_site_alone_is_the_result(method: Any, tmp_path: Path) -> None:
    state, weighing = whole_round(make(method), tmp_path, order=("b",))
    check_weights(weighing, ["b"])
    expected = naive_average({"b": net_state(1)}, {name: {"b": 1.0} for name in RECEIVED}, step_of(weighing))
    expected = moved(method, expected, tmp_path, ("b",))
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name].double(), tensor.double(), atol=1e-6, rtol=0)
    assert step_of(weighing) == 1 or method.name == "q_fed_avg"  # which takes a shorter step by design


def test_models_may_wait_in_memory_or_on_disk(method: Any, tmp_path: Path) -> None:
    """Check that the bits are equal, and that models in memory are not changed while they wait."""
    found = []
    size = sum(tensor.nbytes for tensor in RECEIVED.values())
    for memory, on_disk in ((None, 0), (0, 3), (2 * size, 1)):
        rule = make(method)
        rule.memory_folder = tmp_path / f"memory-{on_disk}"
        for current_round in (0, 1):
            collector = begun(rule, tmp_path / str(on_disk), current_round, memory=memory)
            for site in SITES:
                take(collector, site, train_message(site, rule=rule, current_round=current_round))
            assert len(list(collector.staging.folder.iterdir())) == on_disk
            before = {site: {n: t.clone() for n, t in collector.staging.open(site).items()} for site in SITES}
            found.append(finish(collector, SITES))
            assert all(same(before[site], dict(collector.staging.open(site))) for site in SITES)
    for (state, weighing), (again, weighing_again) in zip(found[:2] * 2, found[2:], strict=True):
        assert same(state, again)
        assert weights_of(weighing) == weights_of(weighing_again)


def test_a_restart_gives_the_same_bits(method: Any, tmp_path: Path) -> None:
    first = make(method)
    first.memory_folder = tmp_path / "memory"
    for current_round in (0, 1):
        whole_round(first, tmp_path / "staging", current_round, SITES if current_round else ("a", "c"))
    path = tmp_path / "state.pt"
    torch.save(first.state_dict(), path)
    second = make(method)
    second.memory_folder = tmp_path / "copied"
    if first.memory_folder.exists():
        shutil.copytree(first.memory_folder, second.memory_folder)
    second.load_state_dict(torch.load(path, weights_only=True))
    for current_round, order in ((2, ("b", "c")), (3, SITES)):
        told = [rule.directives(current_round, 4, SITES) for rule in (first, second)]
        assert told[0] == told[1]
        (state, weighing), (again, weighing_again) = [
            whole_round(rule, tmp_path / "staging", current_round, order) for rule in (first, second)
        ]
        assert weights_of(weighing) == weights_of(weighing_again)
        assert same(state, again)


def test_a_refused_site_leaves_no_trace(method: Any, tmp_path: Path) -> None:
    """Check that a round has the bits of a round in which the refused site was silent."""
    results = []
    for number, bad in enumerate(
        (None, {"conv.weight": torch.full((3, 2), math.nan)}, {"conv.weight": torch.zeros(2, 3)}, {"x": torch.zeros(1)})
    ):
        rule = make(method)
        collector = begun(rule, tmp_path / str(number))
        for site in ("c", "b", "a"):
            message = train_message(site, rule=rule)
            if site != "c":
                take(collector, site, message)
            elif bad is not None:
                message.params.update(bad)
                with pytest.raises(ReportError, match=r"^site 'c'.*'(conv.weight|x)'"):
                    collector.read_training(site, message)
        results.append(finish(collector))
    check_weights(results[0][1], ["a", "b"])
    assert all(same(results[0][0], state) for state, _ in results[1:])


def hostile(field: Field) -> list[Any]:
    """Return values that no honest site sends; another text than the other sites', or none, may be legal."""
    wrong = [True, "x" * 10**5, b"\x00" * 300, 10**400, {}, [[]], {"a": 1}, torch.ones(3), object(), ["\x1b[2J"]]
    if field.kind == "text":
        return [value for value in wrong if value is not True] + [True, 7]
    numbers = [math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-300, 0, -1, field.low, field.high]
    if field.kind == "vector":
        return [*wrong, [*numbers][: len(LAYERS)], [math.nan] * len(LAYERS), [0.0] * len(LAYERS), [0.0] * 200_000]
    return [*wrong, *numbers, None, "1", [0.5]]


def test_hostile_training_reports_cost_one_site_at_most(method: Any, tmp_path: Path) -> None:
    for field in make(method).report_fields:
        for value in hostile(field):
            rule = make(method)
            collector = begun(rule, tmp_path)
            for site in SITES:
                message = train_message(site, rule=rule)
                if site == "b":
                    message.meta["report"][field.name] = value
                try:
                    take(collector, site, message)
                except ReportError as error:
                    assert site == "b"
                    check_refusal(str(error), "b", field.name)
            _, weighing = finish(collector)
            check_weights(weighing, collector.accepted)


def test_hostile_anchor_reports_cost_one_site_at_most(method: Any, tmp_path: Path) -> None:
    for field in anchor_fields(method.rule):
        for value in hostile(field):
            rule = make(method)
            collector = begun(rule, tmp_path)
            for site in SITES:
                take(collector, site, train_message(site, rule=rule))
            for site in SITES:
                message = anchor_message(site, rule)
                if site == "b":
                    message.meta["report"][field.name] = value
                try:
                    collector.keep_anchor(site, collector.read_anchor(site, message))
                except ReportError as error:
                    assert site == "b"
                    check_refusal(str(error), "b", "")
            _, weighing = collector.aggregate()
            check_weights(weighing, list(SITES))


def check_refusal(text: str, site: str, field: str) -> None:
    assert text.startswith(f"site {site!r}")
    assert field in text
    assert text.isprintable()
    assert len(text) < 400


@pytest.mark.parametrize("report", ["x", [1], 5, b"", torch.ones(2)])
def test_a_report_that_is_none_is_refused(method: Any, report: Any) -> None:
    rule = make(method)
    with pytest.raises(ReportError, match=r"^site 'b': field 'report'.* got "):
        begun(rule).read_training("b", train_message("b", rule=rule, report=report))


def test_a_missing_report_costs_one_site_at_most(method: Any, tmp_path: Path) -> None:
    check_round_with(make(method), tmp_path, None)


def test_another_text_than_the_others_costs_one_site_at_most(method: Any, tmp_path: Path) -> None:
    rule = make(method)
    report = example_report(rule.report_fields, 1)
    check_round_with(rule, tmp_path, {k: "other" if v == "same" else v for k, v in report.items()})


def check_round_with(rule: Rule, folder: Path, report: Any) -> None:
    """Do a round in which site b reports this value."""
    collector = begun(rule, folder)
    for site in ("a", "c"):
        take(collector, site, train_message(site, rule=rule))
    message = train_message("b", report=report)
    try:
        take(collector, "b", message)
    except ReportError as error:
        check_refusal(str(error), "b", "")
    _, weighing = finish(collector)
    assert {"a", "c"} <= set(collector.accepted)
    check_weights(weighing, collector.accepted)


def test_two_phase_rules_do_without_anchor_reports(method: Any, tmp_path: Path) -> None:
    rule = make(method)
    collector = begun(rule, tmp_path)
    for site in SITES:
        take(collector, site, train_message(site, rule=rule))
    if isinstance(rule, TwoPhase):
        message = anchor_message("c", rule)
        collector.keep_anchor("c", collector.read_anchor("c", message))
    else:
        assert anchor_fields(type(rule)) == ()
    _, weighing = collector.aggregate()
    check_weights(weighing, list(SITES))


def test_what_is_recorded_fits_into_the_results(method: Any, tmp_path: Path) -> None:
    from fairflare.reporting.results import ResultsStore, RoundRecord

    rule = make(method)
    _, weighing = whole_round(rule, tmp_path / "staging")
    store = ResultsStore(tmp_path / "results")
    store.start({})
    store.add_round(
        RoundRecord(
            current_round=0, sites=list(SITES), site_weights=weighing.sites, layers=weighing.record or None,
            reports=weighing.reports, values=weighing.values, details=weighing.details,
        )
    )  # fmt: skip
    (record,) = run_document(store.folder)["rounds"]
    assert record["site_weights"] is not None or record["layers"]
    fields = {field.name for field in rule.report_fields if field.kind in ("number", "whole")}
    for site in SITES:
        reported = example_report(rule.report_fields, SITES.index(site))
        for name in fields & set(record["reports"].get(site, {})):
            assert record["reports"][site][name] == pytest.approx(reported[name])


def test_the_state_of_a_new_rule_can_be_taken_back(method: Any) -> None:
    rule = make(method)
    rule.load_state_dict(rule.state_dict())


def test_the_rule_does_not_hold_on_to_models(method: Any, tmp_path: Path) -> None:
    """Check that state between rounds is in the rule's state or memory folder, so that the staging may go."""
    rule = make(method)
    rule.memory_folder = tmp_path / "memory"
    whole_round(rule, tmp_path / "staging")
    shutil.rmtree(tmp_path / "staging")
    torch.save(rule.state_dict(), tmp_path / "state.pt")
    assert whole_round(rule, tmp_path / "staging", 1)
