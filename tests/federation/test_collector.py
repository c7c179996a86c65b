"""Test the path of a reply at the server: checked field by field, staged, and summed once."""

from __future__ import annotations

import errno
import math
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairflare import __version__
from fairflare.base.checks import MAX_SAMPLES, is_number, printable
from fairflare.base.settings import settings
from fairflare.base.task import LOSS, Metric
from fairflare.exchange.messages import Message, num_bytes
from fairflare.federation.collecting import received_state as incoming
from fairflare.federation.collecting.collector import Collector, QuorumError
from fairflare.federation.collecting.context import RunContext
from fairflare.federation.site.replies import OF_TEST, read_metrics, reasons
from fairflare.methods.base.reports import Field, ReportError, read_report, shorten_value
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_lwr import FedLWR
from tests.tiny import metric_values, rows

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
    start,
    take,
    train_message,
)


@settings
class Asking(Rule):
    """Define a rule that asks for one field of each kind.

    Args:
        x: nothing.
    """

    report_fields = (
        Field("score", low=0, high=1),
        Field("steps", "whole", low=1, high=9, required=False),
        Field("done", "flag", required=False),
        Field("label", "text", required=False),
        Field("names", "names", required=False),
        Field("curve", "vector", low=0, same_length_as="names", required=False),
        Field("odd", nan_ok=True, infinite_ok=True, required=False),
    )

    x: int = 0

    def weigh(self, inputs: RoundInputs) -> Weighing:
        return Weighing(sites=dict.fromkeys(inputs.sites, 1 / len(inputs.sites)))


def refusal(message: Message, rule: Rule | None = None, site: str = "b") -> str:
    """Return why a collector refuses an answer; no other error may be raised."""
    collector = begun(rule or Asking())
    collector.metrics = KNOWN
    with pytest.raises(ReportError) as caught:
        collector.read_training(site, message)
    assert collector.accepted == []
    assert collector.staging.sites() == []
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ sums


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [("samples", {"a": 0.25, "b": 0.25, "c": 0.5}), ("uniform", {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})],
)
def test_fedavg_against_a_loop(weighting: Any, weights: dict[str, float]) -> None:
    collector = begun(FedAvg(weighting=weighting))
    for site, samples in zip(SITES, (1, 1, 2), strict=True):
        take(collector, site, train_message(site, samples=samples))
    result, weighing = collector.aggregate()
    states = {site: net_state(i) for i, site in enumerate(SITES)}
    expected = naive_average(states, dict.fromkeys(RECEIVED, weights))
    assert list(result) == list(RECEIVED)
    for name, tensor in result.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), atol=1e-6, rtol=0)
        assert tensor.dtype == RECEIVED[name].dtype
        assert tensor.shape == RECEIVED[name].shape
    assert weighing.sites == pytest.approx(weights)


def test_whole_models_and_updates_are_the_same(tmp_path: Path) -> None:
    results = []
    for number, update in enumerate((True, False)):
        collector = begun(FedAvg(), tmp_path / str(number))
        for index, site in enumerate(SITES):
            message = train_message(site)
            if not update:
                message.params, message.is_update = net_state(index), False
            take(collector, site, message)
        results.append(collector.aggregate()[0])
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], atol=1e-6, rtol=0)


def test_layers_are_weighed_each(tmp_path: Path) -> None:
    rule = FedLWR()
    scores = {  # 1 - delta of spec example 6: (0.9, 0.8, 0.5) and (0.2, 0.5, 0.8)
        "a": dict.fromkeys(LAYERS, 0.1) | {"head": 0.8},
        "b": dict.fromkeys(LAYERS, 0.2) | {"head": 0.5},
        "c": dict.fromkeys(LAYERS, 0.5) | {"head": 0.2},
    }
    collector = begun(rule, tmp_path)
    for site in SITES:
        take(collector, site, train_message(site))
    states = {site: net_state(i) for i, site in enumerate(SITES)}
    anchor = collector.anchor_model()
    uniform = naive_average(states, dict.fromkeys(RECEIVED, dict.fromkeys(SITES, 1 / 3)))
    for name, tensor in anchor.items():
        torch.testing.assert_close(tensor.double(), uniform[name].double(), atol=1e-6, rtol=0)
    for site in SITES:
        message = anchor_message(site, rule)
        message.meta["report"] = {
            "layers": LAYERS,
            "cka": [1 - scores[site][layer] for layer in LAYERS],
            "dissimilarity": [scores[site][layer] for layer in LAYERS],
        }
        collector.keep_anchor(site, collector.read_anchor(site, message))
    result, weighing = collector.aggregate()
    most, head = {"a": 0.125, "b": 0.25, "c": 0.625}, {"a": 0.8 / 1.5, "b": 0.5 / 1.5, "c": 0.2 / 1.5}
    weights = {name: head if name.startswith("head") else most for name in RECEIVED}
    expected = naive_average(states, weights)
    for name, tensor in result.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), atol=1e-6, rtol=0)
    assert weighing.layers is not None
    assert weighing.layers["head"] == pytest.approx(head, abs=1e-12)


def test_identical_models_come_out_exactly(tmp_path: Path) -> None:
    rule = FedLWR()
    collector = begun(rule, tmp_path)
    for site in SITES:
        message = train_message(site)
        message.params, message.is_update = net_state(3), False
        take(collector, site, message)
    result, _ = finish(collector)
    for name, tensor in result.items():
        assert torch.equal(tensor, net_state(3)[name]), name


def test_what_a_rule_sees() -> None:
    seen: list[RoundInputs] = []

    @settings
    class Curious(Asking):
        def weigh(self, inputs: RoundInputs) -> Weighing:
            seen.append(inputs)
            return super().weigh(inputs)

    rule = Curious()
    collector = begun(rule, current_round=2, sites=("c", "b", "a"))
    for site, samples in (("c", 5), ("a", None)):
        take(collector, site, train_message(site, rule=rule, samples=samples, current_round=2))
    collector.reject("b", "site 'b' is ill")
    _, weighing = collector.aggregate()
    (inputs,) = seen
    assert (inputs.current_round, inputs.num_rounds) == (2, 4)
    assert (inputs.sites, inputs.asked) == (["a", "c"], ["a", "b", "c"])
    assert inputs.num_samples == {"a": 1, "c": 5}
    assert inputs.reports["c"] == {**example_report(rule.report_fields, 2)}
    assert inputs.received is RECEIVED
    assert inputs.owner == {name: name.rpartition(".")[0] for name in RECEIVED}
    for name, tensor in inputs.states["c"].items():
        torch.testing.assert_close(tensor, net_state(2)[name], atol=1e-6, rtol=0)
    assert weighing.reports["a"] == {"score": 0.1, "odd": 0.1, "steps": 1.0}
    assert collector.rejected == {"b": "site 'b' is ill"}


def test_a_rule_without_weights_is_a_bug() -> None:
    @settings
    class Empty(Asking):
        def weigh(self, inputs: RoundInputs) -> Weighing:
            return Weighing()

    collector = begun(Empty())
    take(collector, "a", train_message("a", rule=Empty()))
    with pytest.raises(RuntimeError, match=r"Empty.weigh\(\) must give"):
        collector.aggregate()


# ------------------------------------------------------------------------------------------------ refusals: the head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "failed", "reason": "site 'b': out of memory"}, "^site 'b': out of memory$"),
        ({"status": "failed", "reason": "out of memory"}, "^site 'b': out of memory$"),
        ({"status": "skipped", "reason": ""}, "^site 'b': field 'status' must be 'ok', got 'skipped'$"),
        ({"status": "failed", "reason": 7}, "^site 'b': field 'status' must be 'ok', got 'failed'$"),
        ({"status": ""}, "^site 'b': field 'status' must be 'ok', got ''$"),
        ({"status": None}, "^site 'b': field 'status' must be 'ok', got None$"),
        ({"status": "OK"}, "got 'OK'$"),
        ({"status": "x" * 10**6}, r"^site 'b': field 'status' must be 'ok', got 'x{79}$"),
        ({"status": 1}, "got 1$"),
        ({"status": True}, "got True$"),
        ({"status": ["ok"]}, "got a list$"),
        ({"status": np.array(["ok", "ok"])}, "got a ndarray$"),
        ({"status": torch.ones(2)}, "got a Tensor$"),
        ({"version": "9.0.0"}, f"^site 'b' answers with fairflare '9.0.0', the server has {re.escape(__version__)}$"),
        ({"version": None}, "^site 'b' answers with fairflare None"),
        ({"version": 0.1}, "^site 'b' answers with fairflare 0.1"),
        ({"version": "\x1b[2J" * 9}, r"^site 'b' answers with fairflare '\\x1b\[2J"),
    ],
)
def test_head(change: dict[str, Any], message: str) -> None:
    text = refusal(train_message("b", rule=Asking(), **change))
    assert re.search(message, text), text
    assert text.isprintable()
    assert len(text) < 200


@pytest.mark.parametrize("meta", [None, [], "x", 5, b"", [1], torch.ones(1), {}, {"status": "ok"}])
def test_no_head_at_all(meta: Any) -> None:
    message = train_message("b", rule=Asking())
    message.meta = meta
    assert "site 'b'" in refusal(message)


@pytest.mark.parametrize(
    "answered", [7, -1, 10**400, "0", 0.5, [0], np.array([0, 0]), torch.zeros(3), math.nan, {"a": 1}]
)
def test_answer_to_another_round(answered: Any) -> None:
    text = refusal(train_message("b", rule=Asking(), current_round=answered))
    assert text.startswith("site 'b' answered for round ")
    assert text.endswith(", asked for round 0")
    assert len(text) < 200


def test_a_missing_status_is_no_ok() -> None:
    message = train_message("b", rule=Asking())
    del message.meta["status"]
    assert refusal(message) == "site 'b': field 'status' must be 'ok', got None"


def test_another_patch_version_is_understood() -> None:
    major, minor = __version__.split(".")[:2]
    message = train_message("b", rule=Asking(), version=f"{major}.{minor}.99")
    assert begun(Asking()).read_training("b", message).site == "b"


def test_a_reason_is_shown_as_a_terminal_may() -> None:
    """Check two megabytes with escape sequences, none of which may forge a line of the log."""
    reason = "a\nround 1: site 'a' left out\x1b[2J\x00\u202e" + "x" * 2 * 10**6
    text = refusal(train_message("b", rule=Asking(), status="failed", reason=reason))
    assert text.startswith("site 'b' says: a round 1: site 'a' left out [2J  xxx")
    assert text.isprintable()
    assert len(text) < 350
    assert text.endswith("...")
    assert printable("short") == "short"
    assert len(printable("y" * 301)) == 300
    assert printable("y" * 300) == "y" * 300


@pytest.mark.parametrize(
    "reason",
    [
        "site 'a': its disk is full. (site 'b')",
        "site 'a', on behalf of site 'b'",
        "b: site 'b' is innocent, site 'a' is not",
        "round 0, train: site 'a' left out",
        "site 'bb': x",
        "its disk is full",
    ],
)
def test_no_site_puts_the_blame_on_another(reason: str) -> None:
    text = refusal(train_message("b", rule=Asking(), status="failed", reason=reason))
    blames = "site 'a'" in reason or "site 'bb'" in reason
    assert text == (f"site 'b' says: {reason}" if blames else f"site 'b': {reason}")
    own = "site 'b': its disk is full, as that of site 'a'"
    told = refusal(train_message("b", rule=Asking(), status="failed", reason=own))
    assert told == own.replace("'b':", "'b' says:")
    listed = reasons([("b", "no answer"), ("bb", "site 'b': x"), ("c", own.replace("'b'", "'c'"))])
    assert listed == "b: no answer; bb: site 'b': x; site 'c': its disk is full, as that of site 'a'"


# ------------------------------------------------------------------------------------------------ refusals: numbers

HUGE = 10**400
ROW = {"metric": "dice", "split": "validation", "value": 0.5}
KNOWN = {"dice": Metric(name="dice", doc="x"), "loss": LOSS}


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("num_samples", 0, r"must lie in \[1, 1e\+09\], got 0"),
        ("num_samples", -5, r"must lie in \[1, 1e\+09\], got -5"),
        ("num_samples", MAX_SAMPLES + 1, r"must lie in \[1, 1e\+09\], got 1000000001"),
        ("num_samples", HUGE, "must be finite, got an integer of over 40 digits"),
        ("num_samples", 10.0, "must be an integer, got 10.0"),
        ("num_samples", "10", "must be an integer, got '10'"),
        ("num_samples", True, "must be an integer, got True"),
        ("num_samples", math.nan, "must be an integer, got nan"),
        ("num_samples", [10], "must be an integer, got a list"),
        ("num_steps", -1, r"must lie in \[0, 1e\+09\], got -1"),
        ("num_steps", b"bytes", "must be an integer, got b'bytes'"),
        ("num_steps", HUGE, "must be finite"),
        ("num_steps", 0.5, "must be an integer, got 0.5"),
        ("num_steps", torch.tensor(3), "must be an integer, got a Tensor"),
    ],
)
def test_counts(field: str, value: Any, wanted: str) -> None:
    text = refusal(train_message("b", rule=Asking(), **{"samples" if field == "num_samples" else field: value}))
    assert re.match(f"site 'b': field '{field}' {wanted}", text), text


def test_counts_at_the_limits() -> None:
    for samples, steps in ((1, 0), (MAX_SAMPLES, MAX_SAMPLES), (None, None)):
        found = begun(Asking()).read_training("b", train_message("b", rule=Asking(), samples=samples, num_steps=steps))
        assert (found.num_samples, found.num_steps) == (samples, steps)


@pytest.mark.parametrize(
    ("stats", "wanted"),
    [
        ("x", "field 'stats' must be a dict, got 'x'"),
        ([1, 2], "field 'stats' must be a dict, got a list"),
        (0.5, "field 'stats' must be a dict, got 0.5"),
        (torch.ones(2), "field 'stats' must be a dict, got a Tensor"),
        ({"train_loss": b"xx"}, "field 'train_loss' must be a number, got b'xx'"),
        ({"train_loss": "oops"}, "field 'train_loss' must be a number, got 'oops'"),
        ({"train_loss": HUGE}, "field 'train_loss' must be finite, got an integer of over 40 digits"),
        ({"seconds": -1}, r"field 'seconds' must lie in \[0, inf\], got -1"),
        ({"synthetic": 1}, "field 'synthetic' must be true or false, got 1"),
        ({"epoch_losses": 3}, "field 'epoch_losses' must be a list, got int"),
        ({"epoch_losses": [1, "x"]}, r"field 'epoch_losses\[1\]' must be a number, got 'x'"),
        ({"epoch_losses": [0.0] * 100_001}, "field 'epoch_losses' has 100001 entries, more than 100000"),
    ],
)
def test_statistics(stats: Any, wanted: str) -> None:
    text = refusal(train_message("b", rule=Asking(), stats=stats))
    assert re.match(f"site 'b': {wanted}", text), text


def test_statistics_that_are_no_numbers_are_none() -> None:
    stats = {"train_loss": math.inf, "epoch_losses": [1, math.nan], "unknown": object()}
    found = begun(Asking()).read_training("b", train_message("b", rule=Asking(), stats=stats)).stats
    assert math.isnan(found["train_loss"])
    assert found["epoch_losses"][0] == 1.0
    assert (found["seconds"], found["synthetic"]) == (None, None)
    assert "unknown" not in found


#: Of formulas, markup, terminals, other scripts, and what no key of a document should be.
ODD_NAMES = (
    "", " ", "a b", "=cmd|' /C calc'!A0", "@SUM(1)", "+1", "a=b", "<script>", "a\x1b[31m", "a\u202eb", "d\u0131ce",
    "a\n",
)  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [
        (None, "the answer carries no metric"),
        ({}, "the answer carries no metric"),
        ([0.5], "metrics must be a list of at most 1000 cells, got a list"),
        ("x", "metrics must be a list of at most 1000 cells, got 'x'"),
        ({"dice": 0.5}, "metrics must be a list of at most 1000 cells, got a dict"),
        (torch.ones(2), "metrics must be a list of at most 1000 cells, got a Tensor"),
        (rows({str(i): 0.5 for i in range(1001)}, "validation"), "metrics must be a list of at most 1000 cells, got"),
        ([{"metric": "dice", "value": 0.5}], "a metric is called None"),
        (rows({"dice": 0.5}), "metric 'dice' was measured on 'test', which nobody asked for"),
        (rows({"dice": 0.5}, "validation") * 2, "metric 'dice' comes twice"),
        ([ROW | {"reason": "suppressed"}], "metric 'dice' must be a finite number or a reason, got 0.5"),
        ([{**ROW, "value": None}], "metric 'dice' must be a finite number or a reason, got None"),
        ([{**ROW, "value": None, "reason": "tired"}], "metric 'dice' has an unknown reason, 'tired'"),
        ([{**ROW, "value": None, "reason": torch.ones(2)}], "metric 'dice' has an unknown reason, a Tensor"),
        ([{**ROW, "value": math.nan}], "metric 'dice' must be a finite number, got nan"),
        (rows({"dice": math.nan}, "validation"), r"the answer carries no metric that is finite \(not finite: dice\)"),
        ([], "the answer carries no metric"),
        ({"dice": 1.5}, r"metric 'dice' must lie in \[0, 1\], got 1.5"),
        ({"dice": -1e-9}, r"metric 'dice' must lie in \[0, 1\], got -1e-09"),
        ({"clean/loss": math.inf}, "metric 'clean/loss' must be a finite number, got inf"),
        ({"loss": HUGE}, "metric 'loss' must be a finite number, got an integer of over 40 digits"),
        ({"dice": "0.5"}, "metric 'dice' must be a finite number, got '0.5'"),
        ({"dice": True}, "metric 'dice' must be a finite number, got True"),
        ({"dice": torch.tensor(0.5)}, "metric 'dice' must be a finite number, got a Tensor"),
        ({7: 0.5}, "a metric is called 7"),
        ({"a\nb": 0.5}, r"a metric is called 'a\\nb'"),
        ({"x" * 201: 0.5}, "a metric is called 'xxx"),
        *(({name: 0.5}, "a metric is called .*; a name has letters, digits") for name in ODD_NAMES),
        ({f"{n:0199d}": 0.5 for n in range(202)}, "the names of its metrics have 42218 characters, more than 40000"),
    ],
)
def test_metrics(metrics: Any, wanted: str) -> None:
    message = train_message("b", rule=Asking())
    message.metrics = (
        rows(metrics, "validation") if isinstance(metrics, dict) and "1000 cells" not in wanted else metrics
    )
    text = refusal(message)
    assert re.match(f"site 'b': {wanted}", text), text
    assert text.isprintable()
    assert len(text) < 300


def test_metrics_in_range() -> None:
    sent = rows({"dice": 1, "loss": 40.0}) + rows({"dice": 0}, "test_clean")
    assert metric_values(read_metrics("b", sent, KNOWN, OF_TEST)) == {"dice": 1.0, "clean/dice": 0.0, "loss": 40}
    assert read_metrics("b", None, KNOWN, OF_TEST, needed=False) == []
    assert read_metrics("b", rows({"dice": math.nan}), KNOWN, OF_TEST, needed=False) == []
    with pytest.raises(ReportError):
        read_metrics("b", rows({"dice": 2}), KNOWN, OF_TEST, needed=False)
    assert is_number(3)
    assert not is_number(HUGE)


# ------------------------------------------------------------------------------------------------ refusals: reports


@pytest.mark.parametrize(
    ("report", "wanted"),
    [
        (None, "the message carries no report"),
        ("x", "field 'report' must be a dict, got 'x'"),
        ([], "field 'report' must be a dict, got a list"),
        ({}, "the report lacks the field 'score'"),
        ({"score": None}, "the report lacks the field 'score'"),
        ({"score": True}, "field 'score' must be a number, got True"),
        ({"score": 2}, r"field 'score' must lie in \[0, 1\], got 2.0"),
        ({"score": math.nan}, "field 'score' must be finite, got nan"),
        ({"score": HUGE}, "field 'score' must be finite, got an integer of over 40 digits"),
        ({"score": -HUGE}, "field 'score' must be finite, got an integer of over 40 digits"),
        ({"score": "\x1b[31m" + "x" * 10**6}, r"field 'score' must be a number, got '\\x1b\[31mxxx"),
        ({"score": {"a": 1}}, "field 'score' must be a number, got a dict"),
        ({"score": 0.5, "steps": 1.0}, "field 'steps' must be an integer, got 1.0"),
        ({"score": 0.5, "steps": 10}, r"field 'steps' must lie in \[1, 9\], got 10"),
        ({"score": 0.5, "done": "yes"}, "field 'done' must be true or false, got 'yes'"),
        ({"score": 0.5, "label": 3}, "field 'label' must be a text of at most 200 characters, got 3"),
        ({"score": 0.5, "label": "y" * 201}, "field 'label' must be a text of at most 200 characters, got 'yyy"),
        ({"score": 0.5, "names": "abc"}, "field 'names' must be a list, got str"),
        ({"score": 0.5, "names": [1]}, "field 'names' must list names, got 1"),
        ({"score": 0.5, "names": ["z" * 201]}, "field 'names' must list names, got 'zzz"),
        ({"score": 0.5, "names": ["a"], "curve": [1, 2]}, "field 'curve' has 2 entries, field 'names' has 1"),
        ({"score": 0.5, "curve": [1]}, "field 'curve' has 1 entries, field 'names' has 0"),
        ({"score": 0.5, "names": ["a"], "curve": [-1]}, r"field 'curve\[0\]' must lie in \[0, inf\], got -1"),
        ({"score": 0.5, "names": ["a"], "curve": [[1]]}, r"field 'curve\[0\]' must be a number, got a list"),
        ({"score": 0.5, "odd": "inf"}, "field 'odd' must be a number, got 'inf'"),
    ],
)
def test_reports(report: Any, wanted: str) -> None:
    text = refusal(train_message("b", report=report))
    assert re.match(f"site 'b': {wanted}", text), text
    assert text.isprintable()
    assert len(text) < 300


def test_what_is_read_of_a_report() -> None:
    found = read_report({"score": 1, "odd": math.inf, "more": object()}, Asking.report_fields, "b")
    assert found["score"] == 1.0
    assert type(found["score"]) is float
    assert math.isnan(found["odd"])
    assert {k: v for k, v in found.items() if k not in ("score", "odd")} == dict.fromkeys(
        ("steps", "done", "label", "names", "curve")
    )
    assert read_report(None, (), "b") == {}
    assert read_report(None, (Field("x", required=False),), "b") == {"x": None}


@pytest.mark.parametrize(
    "value", [None, True, 10**41, -(10**41), 3.5, "é" * 500, b"\x00" * 500, ["x" * 500], object(), math.nan]
)
def test_values_are_shortened(value: Any) -> None:
    text = shorten_value(value)
    assert text.isprintable()
    assert 0 < len(text) <= 80


# ------------------------------------------------------------------------------------------------ refusals: models


class Sly:
    """Define an object that is neither a tensor nor an array."""

    nbytes = "many"


def with_tensor(value: Any) -> Message:
    message = train_message("b", rule=Asking())
    message.params["conv.weight"] = value
    return message


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.full((3, 2), math.nan), "tensor 'conv.weight'.* finite"),
        (torch.full((3, 2), 3.0e38) * 2, "tensor 'conv.weight'.* finite"),
        (torch.zeros(2, 3), r"tensor 'conv.weight'.*shape \(2, 3\)"),
        (torch.zeros(3, 2, dtype=torch.long), "tensor 'conv.weight' is torch.int64"),
        (torch.zeros(3, 2, dtype=torch.complex64), "tensor 'conv.weight' is torch.complex64"),
        (torch.zeros(3, 2).to_sparse(), "tensor 'conv.weight' must be dense, got one that is torch.sparse_coo"),
        (torch.zeros(3, 2).to_sparse_csr(), "tensor 'conv.weight' must be dense, got one that is torch.sparse_csr"),
        (torch.zeros(3, 2, device="meta"), "tensor 'conv.weight' must be dense, got one that is without data"),
        ({"a": 1}, "tensor 'conv.weight' must be a tensor or an array, got dict"),
        ([1.0], "tensor 'conv.weight' must be a tensor or an array, got list"),
        (None, "tensor 'conv.weight' must be a tensor or an array, got NoneType"),
        ("x", "tensor 'conv.weight' must be a tensor or an array, got str"),
        (Sly(), "tensor 'conv.weight' must be a tensor or an array, got Sly"),
        (np.array([None]), "can't convert np.ndarray of type numpy.object_"),
        (np.array(["x"]), "can't convert np.ndarray"),
    ],
)
def test_models(value: Any, wanted: str) -> None:
    message = with_tensor(value)
    text = refusal(message)
    assert re.match(f"site 'b': {wanted}", text), text
    assert num_bytes(message.params) >= 0


@pytest.mark.parametrize("params", [None, {}, [], [torch.ones(1)], "x", 5, b"", torch.ones(2)])
def test_no_model(params: Any) -> None:
    message = train_message("b", rule=Asking())
    message.params = params
    assert refusal(message).startswith("site 'b' sent no model")
    assert num_bytes(params) == 0


def test_extra_tensors() -> None:
    assert re.match("site 'b'.*'more'", refusal(with_more("more")))
    text = refusal(with_more("n\x1b[2J" + "m" * 10**6))
    assert text.isprintable()
    assert len(text) < 400


def with_more(name: str) -> Message:
    message = train_message("b", rule=Asking())
    message.params[name] = torch.zeros(1)
    return message


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint8, torch.float16, torch.float64])
def test_another_type_of_number_becomes_the_global_models(dtype: torch.dtype) -> None:
    collector = begun(FedAvg())
    message = train_message("b")
    message.is_update = False
    message.params = net_state(1) | {"bn.num_batches_tracked": torch.tensor(1, dtype=dtype)}
    take(collector, "b", message)
    result, _ = collector.aggregate()
    assert result["bn.num_batches_tracked"].dtype == torch.int64
    assert result["bn.num_batches_tracked"].shape == ()
    assert result["bn.num_batches_tracked"].item() == 1


@pytest.mark.parametrize("update", [True, False])
def test_excluded_tensors_count_as_unchanged(update: bool) -> None:
    collector = begun(FedAvg(weighting="uniform"))
    message = train_message("b", net_state(1))
    message.is_update, message.params = update, message.params if update else net_state(1)
    for name in ("head.weight", "bn.num_batches_tracked"):
        del message.params[name]
    training = collector.read_training("b", message)
    assert training.notes == (
        "site 'b': 2 tensors ('bn.num_batches_tracked', 'head.weight') of 6 did not come and count as unchanged",
    )
    collector.keep(training)
    result, _ = collector.aggregate()
    assert list(result) == list(RECEIVED)
    for name, tensor in (net_state(1) | {n: RECEIVED[n] for n in ("head.weight", "bn.num_batches_tracked")}).items():
        torch.testing.assert_close(result[name], tensor, atol=1e-6, rtol=0)


def test_nothing_left_is_refused() -> None:
    message = train_message("b", rule=Asking())
    message.params = {"bn.num_batches_tracked": message.params["bn.num_batches_tracked"]}
    assert refusal(message) == (
        "site 'b' sent no tensor that is averaged, only 1 tensor ('bn.num_batches_tracked'); does a filter at the site "
        "exclude the others?"
    )


def test_what_filters_left_is_said() -> None:
    collector = begun(FedAvg())
    message = train_message("b", filters=["SVTPrivacy", "Own\x1b[2J"])
    message.params = {name: torch.zeros_like(value) for name, value in message.params.items()}
    message.params["conv.weight"][0, 0] = -1.0
    message.params["bn.running_var"] = torch.tensor([-9.0, 0.0, 0.0])
    notes = collector.read_training("b", message).notes
    numbers = sum(value.numel() for value in message.params.values())
    assert notes == (
        "site 'b': its model went through 'SVTPrivacy', 'Own\\x1b[2J'; "
        f"{200 / numbers:.3g} % of the numbers in its update are not 0",
        "site 'b': 1 tensor ('bn.running_var') with variances below 0; the average is kept at 0 or more",
    )
    text = refusal(train_message("b", rule=Asking(), filters="SVTPrivacy"))
    assert text == "site 'b': field 'filters' must be a list, got str"


@pytest.mark.parametrize("value", [1e300, -1e17, 2.0**60])
def test_a_number_that_no_counter_can_be(value: float) -> None:
    message = train_message("b", rule=Asking())
    message.params["bn.num_batches_tracked"] = torch.tensor(value, dtype=torch.float64)
    assert refusal(message).startswith("site 'b': tensor 'bn.num_batches_tracked' holds a number that no integer")


@pytest.mark.parametrize("memory", [0, None])
def test_only_one_tensor_is_made_at_a_time(memory: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a tensor on FLARE's disk is read twice and not held; one in memory is made once and held."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most, read = [0], []
    make = incoming.local_tensor

    def watched(*arguments: Any, **more: Any) -> torch.Tensor:
        tensor = make(*arguments, **more)
        alive.add(tensor)
        most[0] = max(most[0], len(alive))
        return tensor

    class Waiting:
        def __init__(self, name: str, value: torch.Tensor) -> None:
            self.name, self.value = name, value

        def materialize(self) -> torch.Tensor:
            read.append(self.name)
            return self.value.clone()

    monkeypatch.setattr(incoming, "local_tensor", watched)
    collector = begun(FedAvg(), memory=memory)
    message = train_message("b", net_state(1))
    message.params = {name: Waiting(name, value) for name, value in message.params.items()}
    take(collector, "b", message)
    assert sorted(read) == sorted([*RECEIVED, *RECEIVED] if memory == 0 else RECEIVED)
    assert memory is None or most[0] <= 2  # the next one is made before the name of the last is free
    result, _ = collector.aggregate()
    for name, tensor in net_state(1).items():
        torch.testing.assert_close(result[name], tensor, atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------------ refusals: the anchor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dissimilarity": [0.1, 3.0, 0.2, 0.1]}, r"^site 'a': field 'dissimilarity\[1\]' must"),
        ({"cka": [0.1, math.inf, 0.2, 0.1]}, r"^site 'a': field 'cka\[1\]'.* got inf$"),
        ({"cka": [0.1, "x", 0.2, 0.1]}, r"^site 'a': field 'cka\[1\]'.* got 'x'$"),
        ({"cka": [0.1]}, "'cka' has 1 entries, .*'layers' has 4"),
        (
            {"layers": ["conv", "bn", "down_3.conv", "nose"]},
            "^site 'a': field 'layers' .*'head', 'nose'",
        ),
        ({"layers": ["conv", "bn", "conv", "head"]}, "does not name the model's layers"),
        ({"layers": ["x\x1b" * 90, "bn", "down_3.conv", "head"]}, "does not name the model's layers"),
        ({"cka": None}, "^site 'a': .* lacks the field 'cka'$"),
    ],
)
def test_bad_anchor_report(change: dict[str, Any], message: str) -> None:
    rule = FedLWR()
    collector = begun(rule)
    for site in SITES:
        take(collector, site, train_message(site))
    reply = anchor_message("a", rule)
    reply.meta["report"].update(change)
    with pytest.raises(ReportError, match=message) as caught:
        collector.read_anchor("a", reply)
    assert str(caught.value).isprintable()
    assert collector.accepted == list(SITES)  # the model stays in the round


def test_anchor_report_of_a_site_without_a_model() -> None:
    rule = FedLWR()
    collector = begun(rule)
    take(collector, "a", train_message("a"))
    words = "^site 'b' reports about the anchor"
    with pytest.raises(ReportError, match=words):
        collector.read_anchor("b", anchor_message("b", rule))
    with pytest.raises(ReportError, match=r"^site 'a' .*round 3, asked for round 0$"):
        collector.read_anchor("a", anchor_message("a", rule, current_round=3))
    with pytest.raises(ReportError, match=r"^site 'a': no data$"):
        collector.read_anchor("a", anchor_message("a", rule, status="failed", reason="no data"))


# ------------------------------------------------------------------------------------------------ staging


def test_models_wait_on_disk_and_go() -> None:
    collector = begun(FedAvg())
    training = collector.read_training("a", train_message("a"))
    assert collector.accepted == []
    collector.keep(training)
    assert training.state == {}  # not in memory any more
    assert collector.accepted == collector.staging.sites() == ["a"]
    with pytest.raises(ReportError, match="site 'a' answered twice in round 0"):
        collector.read_training("a", train_message("a"))
    take(collector, "b", train_message("b"))
    collector.drop("b", "site 'b' went")
    assert collector.accepted == collector.staging.sites() == ["a"]
    assert collector.rejected == {"b": "site 'b' went"}
    take(collector, "b", train_message("b"))
    assert collector.rejected == {}
    collector.reject("c", "site 'c' is ill")
    start(collector, 1)
    assert (collector.accepted, collector.rejected, collector.staging.sites()) == ([], {}, [])
    take(collector, "a", train_message("a", current_round=1))
    collector.clear()
    assert collector.staging.sites() == []


def test_a_disk_that_cannot_be_read_is_no_refusal() -> None:
    """Check that a tensor that is gone from FLARE's disk is not blamed on the site."""

    class Lost:
        def materialize(self) -> torch.Tensor:
            raise OSError(errno.EIO, "Input/output error")

    class Found:
        def materialize(self) -> torch.Tensor:
            return torch.zeros(3, 2)

    with pytest.raises(OSError, match="Input/output"):
        begun(Asking()).read_training("b", with_tensor(Lost()))
    assert begun(Asking()).read_training("b", with_tensor(Found())).site == "b"


def test_without_a_folder_models_wait_in_a_temporary_one() -> None:
    collector = Collector(FedAvg())
    folder = collector.staging.folder
    assert folder.is_dir()
    del collector
    assert not folder.exists()


def test_too_few_give_every_reason() -> None:
    collector = begun(FedAvg())
    take(collector, "a", train_message("a"))
    collector.require(1)
    with pytest.raises(QuorumError, match=r"^FedAvg, round 0: 1 usable.*\(no answer\)$"):
        collector.require(2)
    collector.reject("c", "site 'c': x")
    collector.reject("b", "site 'b': out of memory")
    with pytest.raises(QuorumError, match=r"\(site 'b': out of memory; site 'c': x\)$"):
        collector.require(3)
    assert reasons([("b", "late"), ("a", "site 'a': ill")]) == "site 'a': ill; b: late"


# ------------------------------------------------------------------------------------------------ no training


@pytest.mark.parametrize("is_update", [True, False])
@pytest.mark.parametrize("num_steps", [None, 0])
def test_a_site_that_sends_back_what_it_received_has_not_trained(is_update: bool, num_steps: Any) -> None:
    """Check a pass without a step, in which statistics and counters may have moved."""
    collector = begun(FedAvg())
    state = {**RECEIVED, "bn.running_var": RECEIVED["bn.running_var"] + 1}
    message = train_message("a", state, num_steps=num_steps)
    if not is_update:
        message.params, message.is_update = state, False
    with pytest.raises(ReportError, match=r"site 'a': it sent back .*counts no step"):
        collector.read_training("a", message)
    one = {**RECEIVED, "head.weight": RECEIVED["head.weight"].clone()}
    one["head.weight"][1, 0] += 1e-3  # neither the first nor the last
    take(collector, "b", train_message("b", one, num_steps=num_steps))  # one number is enough
    assert collector.accepted == ["b"]


def test_a_model_without_a_trained_tensor_counts_as_trained() -> None:
    received = {"bn.running_mean": torch.zeros(2)}
    assert incoming.LikeReceived(received).read(Message(dict(received)), "a").moved


def test_a_report_of_more_images_than_the_site_has_is_refused() -> None:
    class Counts(FedAvg):
        def counted(self, report: Any) -> dict[str, float]:
            return {"validation": 20.0, "groups": 2.0}

    for said, fits in (({"validation": 20}, True), ({"validation": 19}, False), ({"groups": 3}, False), ({}, True)):
        collector = begun(Counts())
        collector.context = RunContext(reported={"b": said})
        if fits:
            take(collector, "b", train_message("b"))
        else:
            with pytest.raises(ReportError, match=r"(20 validation images|2 groups), .*(19|3)"):
                take(collector, "b", train_message("b"))


def test_counted_steps_that_change_nothing_are_said() -> None:
    """Check a learning rate of 0: every kind of run has a warning that names the site."""
    collector = begun(FedAvg())
    take(collector, "a", train_message("a", RECEIVED, num_steps=7))
    take(collector, "b", train_message("b", net_state(1), num_steps=7))
    collector.aggregate()
    (warned,) = [w for w in collector.warnings if w.kind == "unchanged"]
    assert warned.site == "a"
    assert warned.text.startswith("its 7 steps left the model as it was received (a learning rate of 0")


def test_a_count_that_nobody_told_is_said() -> None:
    collector = begun(FedAvg())
    take(collector, "a", train_message("a", samples=None))
    take(collector, "b", train_message("b", samples=3))
    _, weighing = collector.aggregate()
    assert weighing.sites == {"a": 0.25, "b": 0.75}
    assert [(w.site, w.text) for w in collector.warnings if w.kind == "count"] == [
        ("a", "it tells no number of samples, and weighs as much as one sample")
    ]
