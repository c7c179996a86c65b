"""Test the anchor in half the bytes: the messages, the sites' reading of them, and the effect on the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.exchange.anchor_forms import lighter, restored
from fairflare.exchange.messages import Message, decode_task, num_bytes
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.fed_lwr import FedLWR
from fairflare.methods.parts.anchor_report import LayerSimilarityReport
from tests.tiny import document

from ..methods.support import SEGMENTATION, State, at_site, initial, net_state, request, same
from .network import Run, good

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT = 2.0**-8  # of bfloat16


def models() -> tuple[State, State]:
    """Return a received model and an anchor near it; one variance has shrunk from 1 to 0.002."""
    received = {**net_state(0), "half": torch.ones(2, 2, dtype=torch.float16)}
    anchor = {k: v + 0.01 * torch.randn(v.shape) if v.is_floating_point() else v + 3 for k, v in received.items()}
    received["bn.running_var"], anchor["bn.running_var"] = torch.ones(3), torch.full((3,), 0.002)
    anchor["half"] = anchor["half"].half()
    return received, anchor


@pytest.mark.parametrize("form", ["bf16", "difference"])
def test_matrices_take_half_the_bytes_and_all_else_goes_as_it_is(form: Any) -> None:
    torch.manual_seed(0)
    received, anchor = models()
    before = [{name: value.clone() for name, value in model.items()} for model in (received, anchor)]
    sent = lighter(anchor, received, form)
    whole = restored(sent, received) if form == "difference" else {k: v.to(anchor[k].dtype) for k, v in sent.items()}
    for name in ("conv.weight", "head.weight"):
        assert sent[name].nbytes == anchor[name].nbytes / 2
        size = anchor[name].double() - (received[name].double() if form == "difference" else 0)
        error = (whole[name].double() - anchor[name].double()).abs()
        assert (error <= EXACT * size.abs() + 1e-6).all()
        assert error.max() > 0
    for name in ("bn.weight", "bn.running_var", "bn.num_batches_tracked", "half"):
        assert torch.equal(sent[name], anchor[name])
        assert torch.equal(whole[name], anchor[name])
    assert {name: value.dtype for name, value in whole.items()} == {name: v.dtype for name, v in anchor.items()}
    assert all(same(*pair) for pair in zip(before, (received, anchor), strict=True))


def test_as_it_is() -> None:
    received, anchor = models()
    assert same(lighter(anchor, received, "model"), anchor)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_difference_to_another_model_is_refused(change: str) -> None:
    received, anchor = models()
    sent = lighter(anchor, received, "difference")
    if change == "missing":
        del received["head.weight"]
    else:
        received["head.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"tensor 'head.weight' of the anchor does not fit"):
        restored(sent, received)


# ---------------------------------------------------------------------------------------------------- at a site


def test_a_site_compares_with_the_anchor_itself(tmp_path: Path) -> None:
    received = initial()
    anchor = {k: v * 1.01 if v.is_floating_point() else v for k, v in initial(seed=1).items()}
    training = LayerSimilarityReport(batch_size=4)
    found = {}
    for form in ("model", "bf16", "difference"):
        here = at_site(tmp_path / form, training)
        assert here.perform(request("train", received, anchor_as=form)).status == "ok"
        asked = request("anchor", lighter(anchor, received, form), anchor_as=form)  # type: ignore[arg-type]
        reply = here.perform(asked)
        assert reply.status == "ok", reply.reason
        found[form] = torch.tensor(reply.report["dissimilarity"], dtype=torch.float64)
    assert not torch.equal(found["bf16"], found["model"])
    for form, error in (("bf16", 2e-2), ("difference", 2e-2)):
        torch.testing.assert_close(found[form], found["model"], rtol=error, atol=1e-6)


def test_a_site_without_the_received_model_says_so(tmp_path: Path) -> None:
    received, anchor = initial(), initial(seed=1)
    here = at_site(tmp_path, LayerSimilarityReport(batch_size=4))
    here.perform(request("train", received))  # of a server that sends the anchor itself
    assert not list(tmp_path.rglob("received_model*"))
    reply = here.perform(request("anchor", lighter(anchor, received, "difference"), anchor_as="difference"))
    assert reply.status == "skipped"
    assert reply.reason == (
        "site 'site-1' has not kept the model that it was sent for round 0, which the anchor is told from"
    )


def test_only_the_last_received_model_is_kept(tmp_path: Path) -> None:
    here = at_site(tmp_path, LayerSimilarityReport(batch_size=4))
    for number in range(3):
        here.perform(request("train", initial(), number, anchor_as="difference"))
    assert [path.name for path in sorted(tmp_path.rglob("received_model*"))] == ["received_model.000002.pt"]


# ---------------------------------------------------------------------------------------------------- in a run


def test_what_the_server_sends(tmp_path: Path) -> None:
    """Check also that warm-up rounds, which have no anchor, make no site save a model for it."""
    sent: dict[tuple[str, int], Message] = {}

    def behaviour(site: str, name: str, task: Message) -> Message:
        if name in ("train", "anchor"):
            sent[name, decode_task(name, task, site).current_round] = task
        return good(site, name, task)

    run = Run(tmp_path, rule=FedLWR(warmup_rounds=1), behaviour=behaviour, num_rounds=2, anchor_as="difference")
    run()
    assert {key: task.meta["anchor_as"] for key, task in sent.items()} == {
        ("train", 0): "model", ("train", 1): "difference", ("anchor", 1): "difference",
    }  # fmt: skip
    difference = sent["anchor", 1].params
    assert difference["0.weight"].dtype == torch.bfloat16
    # Updates of 0.1, 0.2 and 0.3: the mean differs by 0.2 from what was received.
    torch.testing.assert_close(difference["0.weight"].float(), torch.full((1, 2), 0.2), rtol=EXACT, atol=0)
    torch.testing.assert_close(difference["0.bias"], sent["train", 1].params["0.bias"] + 0.2)


@pytest.mark.long
def test_weights_and_bytes_of_a_run(tmp_path: Path) -> None:
    found = {}
    for form in ("model", "bf16", "difference"):
        plan = make_plan(
            "fed_lwr", sites=2, num_rounds=2, settings={**SEGMENTATION, "local_epochs": 1, "anchor_as": form}
        )
        results = document(run_local(plan, tmp_path / form))
        assert not any(r["left_out"] for r in results["rounds"])
        anchor = [p for r in results["rounds"] for p in r["phases"] if p["name"] == "anchor"]
        found[form] = (anchor[0]["bytes_out"], results["rounds"][0]["site_weights"], results["rounds"][0]["layers"])
    whole = found["model"][0]
    matrices = sum(v.nbytes for v in initial().values() if v.ndim > 1)
    for form in ("bf16", "difference"):
        assert found[form][0] == whole - 2 * matrices / 2  # two sites
        assert found[form][0] < 0.6 * whole
        assert found[form][2] != found["model"][2]


def test_num_bytes_of_the_forms() -> None:
    received, anchor = models()
    assert num_bytes(lighter(anchor, received, "bf16")) == num_bytes(anchor) - (6 + 6) * 2


def test_a_method_without_an_anchor_refuses_the_setting() -> None:
    with pytest.raises(ValueError, match="anchor_as='bf16': FedAvg asks the sites nothing about an anchor"):
        make_plan("fed_avg", settings={"anchor_as": "bf16"})
    with pytest.raises(ValueError, match="anchor_as"):
        make_plan("fed_lwr", settings={"anchor_as": "bf8"})
