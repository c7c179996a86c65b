"""Test whole runs with adapters: the server's averages are computed again from the saved local models."""

from __future__ import annotations

import itertools
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.base.settings import field_names
from fairflare.core.aggregation.low_rank import pairs_of
from fairflare.core.features.adapting import network_of
from fairflare.core.features.layers import layer_of
from fairflare.exchange.staging import Staging
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.refusals import facts_of, refuse_run
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods, get_method
from fairflare.methods.base.rule import Rule
from fairflare.methods.fed_avg import FedAvg
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import model_in, run_document

pytest.importorskip("peft", reason="LoRA needs it: make test-adapters")

TINY: dict[str, Any] = {
    "network": "vit_mini", "image_size": [32, 32], "patch_size": 8, "phantom_samples": 100, "phantom_test": 64,
    "phantom_own_test": 40, "adapters": "lora", "adapters.rank": 8,
}  # fmt: skip

OWN_ADAPTERS = {"fair_lora", "fed_rdn"}  # methods that have adapters of another kind


def plan_of(method: str, **options: Any) -> Any:
    settings = {**TINY, **options.pop("settings", {})}
    return make_plan(method, task="classification", sites=2, num_rounds=2, settings=settings, **options)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fed_avg", "fed_lwr"])
def test_two_sites_average_the_products_of_their_adapters(method: str, tmp_path: Path) -> None:
    settings = {"warmup_rounds": 0} if method == "fed_lwr" else {}
    plan = plan_of(method, settings=settings, keep_local_models=True)
    folder = run_local(plan, tmp_path)
    results = run_document(folder)
    assert results["status"] == "completed"
    final = model_in(folder)
    torch.manual_seed(plan.run.seed)
    first = network_of(plan.task).state_dict()
    factors = {name for pair in pairs_of(final).values() for name in pair}
    assert len(factors) == 8
    assert {n for n, tensor in final.items() if not torch.equal(tensor, first[n])} == {
        *factors,
        "head.weight",
        "head.bias",
    }
    for number, record in enumerate(results["rounds"]):
        models = Staging(folder / "local_models" / f"round_{number:04d}").open_all()
        lost = whole = 0.0
        for layer, (name_a, name_b) in pairs_of(final).items():
            weights = record["site_weights"] or {s: e["weight"] for s, e in record["layers"][layer].items()}
            mean = np.zeros((final[name_b].shape[0], final[name_a].shape[1]))
            for site, model in models.items():
                product = model[name_b].double().numpy() @ model[name_a].double().numpy()
                assert np.linalg.matrix_rank(product, tol=1e-9) == 8
                mean += weights[site] * product
            u, values, v = np.linalg.svd(mean)
            error = np.sqrt((values[8:] ** 2).sum() / (values**2).sum())
            assert record["details"]["adapter_truncation"][layer] == pytest.approx(error, rel=1e-3)
            lost, whole = lost + (values[8:] ** 2).sum(), whole + (values**2).sum()
            if number == 1:
                made = final[name_b].double().numpy() @ final[name_a].double().numpy()
                np.testing.assert_allclose(made, (u[:, :8] * values[:8]) @ v[:8], atol=1e-6)
        assert record["values"]["adapter_truncation"] == pytest.approx(np.sqrt(lost / whole), rel=1e-3)


def test_adapted_layers_have_one_weight(tmp_path: Path) -> None:
    state = network_of(ClassificationTask(network="vit_mini", image_size=(32, 32), patch_size=8, adapters="lora"))
    names = [name for name in state.state_dict() if "0.attn.qkv" in name]
    assert len(names) == 4  # weight, bias, A, B
    assert {layer_of(name) for name in names} == {"encoder.blocks.0.attn.qkv"}


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("q_fed_avg", {}, "QFedAvg makes a step of its own"),
        ("fed_nova", {}, "FedNova makes a step of its own"),
        ("cgsv", {}, "CGSV gives every site a model of its own"),
        ("fed_avg", {"aggregate": "median"}, "aggregate='median' works"),
    ],
)
def test_where_products_cannot_be_averaged_the_run_does_not_begin(method: str, options: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"adapters.average='product' .*{why}.*; set"):
        plan_of(method, **options)
    plan_of(method, settings={"adapters.average": "factors"}, **options)


def test_a_job_that_was_changed_by_hand_is_refused_too() -> None:
    class Momentum(FedAvg):
        def move(self, change: Any) -> Any:
            return dict(change)

    task = ClassificationTask(network="vit_mini", image_size=(32, 32), patch_size=8, adapters="lora")
    with pytest.raises(ValueError, match="Momentum makes a step of its own"):
        refuse_run(facts_of(RunSettings(), Momentum(), None, task))
    rules: list[Rule] = [FedAvg(), Momentum()]
    for rule, other in itertools.product(rules, (None, ClassificationTask())):
        refuse_run(facts_of(RunSettings(), rule, None, other))


@pytest.mark.long
@pytest.mark.parametrize("method", sorted(all_methods().keys() - OWN_ADAPTERS))
def test_with_exchange_trainable_the_adapters_travel_alone_and_the_bits_are_the_same(
    method: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"phantom_test": 200, "phantom_own_test": 100, "local_epochs": 1}
    if "warmup_rounds" in field_names(get_method(method).rule):
        settings["warmup_rounds"] = 0
    if method == "fed_lwr_last_layer":
        settings["only_layer"] = "head"  # else one of the network of its paper
    try:
        plan_of(method, settings=settings)
    except ValueError as error:
        if "adapters.average='product' does not go with it" not in str(error):
            raise
        settings["adapters.average"] = "factors"
    models = {}
    for exchange in ("all", "trainable"):
        folder = run_local(plan_of(method, settings={**settings, "exchange": exchange}), tmp_path / exchange)
        assert run_document(folder)["status"] == "completed"
        models[exchange] = model_in(folder)
    sent, whole = models["trainable"], models["all"]
    factors = {name for pair in pairs_of(whole).values() for name in pair}
    # Beside the adapters whatever a method has behind the encoder travels, which is frozen.
    assert {name for name in sent if name.startswith("encoder.")} == factors
    assert any(name.startswith("head.") for name in sent)
    assert sum(t.nbytes for t in sent.values()) < sum(t.nbytes for t in whole.values()) / 4
    assert all(torch.equal(tensor, whole[name]) for name, tensor in sent.items())


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["all", "trainable"])
def test_a_site_without_peft_is_out_by_name_and_the_run_goes_on(
    exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a site at which the package cannot be imported; the server and the other sites can import it."""
    perform = SiteWorker.perform

    def without_peft(self: SiteWorker, *arguments: Any) -> Any:
        with monkeypatch.context() as at_site:
            if self.site == "site-2":
                at_site.setitem(sys.modules, "peft", None)
            return perform(self, *arguments)

    monkeypatch.setattr(SiteWorker, "perform", without_peft)
    words = "site 'site-2': .*package peft, .*adapters"
    settings = {**TINY, "local_epochs": 1}
    made = partial(make_plan, "fed_avg", task="classification", sites=3, num_rounds=2, settings=settings,
                   exchange=exchange)  # fmt: skip
    with pytest.raises(RoundFailed, match=f"1 of 3 site.s. cannot take part: {words}"):
        run_local(made(), tmp_path / "all")
    results = run_document(run_local(made(require_all_sites=False), tmp_path / "most"))
    assert results["status"] == "completed"
    assert [record["accepted"] for record in results["rounds"]] == [["site-1", "site-3"]] * 2
    (out,) = results["rounds"][0]["left_out"]
    assert out["site"] == "site-2"
    assert re.search(words, out["reason"])
