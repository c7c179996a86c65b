"""Test mixed precision and channels last through whole runs: settings, results, and tensors that stay float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.base.machine import computing
from fairflare.base.machine.computing import Overflow
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.transports.local import run_local
from tests.tiny import FUNDUS, model_in, run_document

TINY = {**FUNDUS, "phantom_sites": 2, "batch_size": 8}


def run(folder: Path, method: str = "fed_avg", local: Any = None, **settings: Any) -> tuple[dict[str, Any], Any]:
    plan = make_plan(method, task="classification", sites=2, num_rounds=2, settings={**TINY, **settings})
    found = run_local(plan, folder, local)
    state = model_in(found)
    return run_document(found), state


def said(results: dict[str, Any]) -> list[Any]:
    told = [results["info"]["said"][site]["computing"] for site in ("site-1", "site-2")]
    return [one and one.partition(" (emulated")[0] for one in told]  # where the processor has no bfloat16


@pytest.mark.many
@pytest.mark.parametrize(
    ("precision", "method"),
    [("bf16", "fed_avg"), ("fp16", "fed_avg"), ("fp16", "fed_ism_plus_s"), ("bf16", "fed_lwr"), ("fp16", "moon"),
     ("bf16", "fed_mas")],
)  # fmt: skip
def test_a_run_in_lower_precision(precision: str, method: str, tmp_path: Path) -> None:
    """Check that the model is near the float32 run's but not equal, and that every tensor is float32.

    FedAvg learns in both; of the others those whose step has two losses learn with a scale of the loss, too.
    """
    plain, wanted = run(tmp_path / "plain", method)
    results, state = run(tmp_path / "lower", method, precision=precision, channels_last=True)
    assert said(plain) == [None, None]
    assert said(results) == [f"{precision}, channels last"] * 2
    assert results["status"] == "completed"
    away: dict[str, float] = {}
    for name, tensor in state.items():
        assert tensor.dtype == wanted[name].dtype
        assert tensor.is_contiguous()
        if tensor.is_floating_point():
            away[name] = float((tensor - wanted[name]).abs().max())
    assert max(away.values()) > 1e-7
    assert max(value for name, value in away.items() if "running" not in name) < 0.05
    # The norms' statistics are of another size than the weights, and the largest of them differ by processor.
    whole, plainly = (torch.cat([x[name].flatten() for name in away]) for x in (state, wanted))
    assert (whole - plainly).norm() < 0.05 * plainly.norm()
    if method == "fed_ism_plus_s":  # of the model that all begin with, and measured in float32 in any case
        for site, report in results["rounds"][0]["reports"].items():
            assert report["sharpness"] == pytest.approx(plain["rounds"][0]["reports"][site]["sharpness"], rel=1e-5)
    assert [s["num_steps"] for r in results["rounds"] for s in r["train"].values()] == [4] * 4


@pytest.mark.long
def test_the_site_decides_about_its_own_machine(tmp_path: Path) -> None:
    local = {"sites": {"site-2": {"precision": "fp32", "channels_last": True}}}
    results, _ = run(tmp_path, local=local, precision="bf16")
    assert said(results) == ["bf16", "channels last"]


@pytest.mark.long
def test_deterministic_changes_no_bit_on_a_cpu(tmp_path: Path) -> None:
    _, wanted = run(tmp_path / "plain", "fed_ism_plus_s")
    results, state = run(tmp_path / "deterministic", "fed_ism_plus_s", deterministic=True)
    assert said(results) == ["deterministic"] * 2
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_form_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def loss(self: Any, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return outputs.sum()

    plan = make_plan("fed_avg", task="classification", sites=2, num_rounds=1, settings=TINY)
    monkeypatch.setattr(type(plan.task), "loss", loss)
    found = run_local(plan, tmp_path / "one", {"sites": {"site-2": {"deterministic": True}}})
    left_out = run_document(found)["rounds"][0]["left_out"]
    reason = "site 'site-2': put_ has no deterministic form on its device; set deterministic to false"
    assert [(x["site"], x["reason"]) for x in left_out] == [("site-2", reason)]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("precision", "half", "'precision'.* got 'half'"),
        ("precision", 16, "'precision'.* got 16"),
        ("channels_last", 1, "'channels_last'.* got 1"),
        ("compile", "yes", "'compile'.* got 'yes'"),
        ("deterministic", 1, "'deterministic'.* got 1"),
    ],
)
def test_a_site_file_that_cannot_be_meant(key: str, value: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match=f"site 'site-2': setting {text}"):
        run(tmp_path, local={"sites": {"site-2": {key: value}}})


@pytest.mark.long
@pytest.mark.parametrize("method", ["fed_avg", "fed_ism_plus_s"])
def test_steps_that_overflow_are_left_out_and_not_counted(
    method: str, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """Check a scale of 2^34, at which gradients overflow until it was halved often enough."""
    monkeypatch.setattr(computing, "FIRST_SCALE", 2.0**34)
    halved: list[int] = []
    backward = computing.LossScale.backward

    def counted(self: Any, loss: torch.Tensor, optimizer: Any) -> None:
        try:
            backward(self, loss, optimizer)
        except Overflow:
            halved.append(1)
            raise

    monkeypatch.setattr(computing.LossScale, "backward", counted)
    results, state = run(tmp_path, method, precision="fp16", local_epochs=8)
    assert halved
    done = sum(site["num_steps"] for record in results["rounds"] for site in record["train"].values())
    batches = sum(-(-r["train"][s]["num_samples"] // 8) * 8 for r in results["rounds"] for s in r["train"])
    assert done == batches - len(halved)
    assert "overflowed in float16 and were left out" in caplog.text
    assert all(bool(torch.isfinite(t).all()) for t in state.values())


def test_gradients_that_overflow_at_any_scale_end_the_sites_round(tmp_path: Path, monkeypatch: Any) -> None:
    def never(self: Any, loss: torch.Tensor, optimizer: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
        raise Overflow(loss.detach())

    monkeypatch.setattr(computing.LossScale, "backward", never)
    with pytest.raises(RoundFailed, match=r"float16 .* round 0, epoch 0, step 0; set"):
        run(tmp_path, precision="fp16")


def test_a_round_of_which_every_step_overflows_is_no_result(tmp_path: Path, monkeypatch: Any) -> None:
    """Check that an unchanged model does not count as trained when the scale has not come down enough."""
    monkeypatch.setattr(computing, "FIRST_SCALE", 2.0**100)
    with pytest.raises(RoundFailed, match=r"4 of 4 steps of round 0 .* in float16"):
        run(tmp_path, precision="fp16")
