"""The papers' settings, and the same local training for several methods."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fairflare.core.settings import field_names
from fairflare.federation.plan import Plan, make_plan
from fairflare.methods.catalog import all_methods
from fairflare.methods.training import LocalTraining

METHODS = list(all_methods())
#: Rows of the papers' settings as the specification has them: network, image size, loss, optimizer, batch size,
#: rounds x local epochs, sites.
ROWS = """
| Fed-LWR | U-Net | 384², 3 ch | Dice | Adam 1e-3, wd 1e-4, betas (0.9,0.99) | 8 | 200 × 1 | 6 / 4 |
| FedMRL | DenseNet121, ImageNet | 224² | CE (+A) | paper SGD, code Adam 1e-3 | 32 | 60 (code) × 1 | 4 (code) |
| Fed-MAS | ResNet-18 | 224² | BSM + λ_f KD | SGD 0.1 cosine | 64 (repo) | 200 × 10 | 8 / 4 / 6 |
| FedISM(+) | ResNet-18 ImageNet | 224² | LA | Adam 3e-4, wd 5e-4 (re-created each round) | 32 | 300 × 1 | 20 |
"""
FED_LWR = {
    "num_rounds": 200, "sites": 6, "image_size": (384, 384), "in_channels": 3,
    "optimizer": "adam", "learning_rate": 1e-3, "weight_decay": 1e-4, "betas": (0.9, 0.99),
    "batch_size": 8, "local_epochs": 1, "features": (32, 64, 128, 256, 512, 32), "criterion": "task",
    "keep_optimizer_state": True,
}  # fmt: skip
FED_MRL = {
    "num_rounds": 60, "sites": 4, "image_size": (224, 224), "network": "densenet121",
    "batch_size": 32, "local_epochs": 1, "learning_rate": 1e-3, "partition": "shards", "eta": 1.0, "criterion": "task",
}  # fmt: skip
FED_MAS = {
    "num_rounds": 200, "sites": 8, "image_size": (224, 224), "network": "resnet18", "features": (64, 128, 256, 512),
    "max_pool": True, "optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 64,
    "local_epochs": 10, "schedule": "cosine", "max_grad_norm": 5.0, "criterion": "balanced_softmax",
}  # fmt: skip
FED_ISM = {
    "num_rounds": 300, "sites": 20, "image_size": (224, 224), "network": "resnet18", "features": (64, 128, 256, 512),
    "max_pool": True, "optimizer": "adam", "learning_rate": 3e-4, "betas": (0.9, 0.999), "weight_decay": 5e-4,
    "batch_size": 32, "local_epochs": 1, "keep_optimizer_state": False, "criterion": "logit_adjusted",
    "partition": "two_pool", "alpha": 1.0, "corrupted_sites": 4,
}  # fmt: skip
#: FedMRL's paper says SGD without a rate. Section 6 of the specs and the tables of each method's page.
TABLE = {
    "solo": FED_LWR, "ditto": {**FED_LWR, "ditto_lambda": 1.0},
    "cffl": {**FED_LWR, "cffl_alpha": 5.0, "grad_clip": 0.01, "c_th": 1 / 3, "theta_u": 1.0},
    "cgsv": {**FED_LWR, "cgsv_alpha": 0.95, "cgsv_beta": 1.0, "cgsv_gamma": 0.5},
    "fed_avg": FED_LWR, "fed_lwr": FED_LWR, "fed_lwr_cosine": {**FED_LWR, "similarity": "cosine"},
    "fed_lwr_last_layer": {**FED_LWR, "only_layer": "down_3"},
    "fed_prox": FED_MRL, "fed_bn": FED_MRL, "fed_mrl": {**FED_MRL, "optimizer": "sgd", "learning_rate": 0.01},
    "bsm_fl": FED_MAS, "bsm_kd": {**FED_MAS, "lambda_f": 3.0}, "fed_mas": {**FED_MAS, "lambda_f": 3.0},
    "creff": {
        **FED_MAS, "criterion": "task", "num_features": 100, "feature_steps": 100, "feature_rate": 0.1,
        "classifier_epochs": 300, "classifier_rate": 0.01, "classifier_batch": 32, "gradient_images": 32,
        "gradient_repeats": 10,
    },
    "crt": {**FED_MAS, "criterion": "task", "crt_rounds": 10, "crt_epochs": 1},
    "moon": {**FED_MAS, "criterion": "task", "temperature": 0.5, "neck_dim": 256},
    "ldam": {**FED_MAS, "criterion": "task", "classifier": "cosine", "cosine_scale": 30.0, "drw_start": 0.8},
    "logit_adjustment": {**FED_MAS, "criterion": "logit_adjusted"}, "fed_lc": {**FED_MAS, "criterion": "fedlc"},
    "q_fed_avg": {**FED_LWR, "q_form": "delta_h"}, "fed_ce": {**FED_LWR, "preset": "original"},
    "fed_nova": {**FED_MRL, "optimizer": "adam", "mu": 0.0},
    "afl": {**FED_ISM, "afl_mode": "projected", "afl_rate": 0.1}, "fair_fed": {**FED_ISM, "fairfed_mode": "original"},
    "fed_ga": {**FED_ISM, "fedga_mode": "fedism"},
    "fed_ism": {**FED_ISM, "rho": 0.05, "q": 2.0, "beta": 0.5, "gsam_alpha": 0.1},
    "fed_ism_plus_s": {**FED_ISM, "rho": 0.1, "tau": 0.5, "variant": "S"},
    "fed_ism_plus_l": {**FED_ISM, "rho": 0.1, "tau": 0.5, "variant": "L"},
}  # fmt: skip


def value(plan: Plan, name: str) -> Any:
    if name == "sites":
        return len(plan.sites or [])
    found = [getattr(part, name) for part in (plan.rule, plan.training, plan.task, plan.run) if hasattr(part, name)]
    assert found, name
    assert all(other == found[0] for other in found)
    return found[0]


def test_every_method_has_a_paper() -> None:
    assert [name for name, method in all_methods().items() if method.paper] == sorted(TABLE) == METHODS


@pytest.mark.parametrize("name", METHODS)
def test_the_papers_setting_is_the_table(name: str) -> None:
    plan = make_plan(name, small=False)
    assert {key: value(plan, key) for key in TABLE[name]} == TABLE[name]
    assert plan.lacks


@pytest.mark.parametrize(
    ("sites", "wanted"),
    [
        (None, ["the paper's 20 sites: the job goes to every connected one"]),
        (8, ["the paper's 20 sites: the run has 8"]),
        (0, []),
        (20, []),
    ],
)
def test_another_number_of_sites_than_the_papers_is_said(sites: int | None, wanted: list[str]) -> None:
    lacks = make_plan("fed_ism", sites=sites, small=False).lacks
    assert [text for text in lacks if "paper's" in text] == wanted
    assert make_plan("fed_ism", sites=sites).lacks == ()


def test_the_table_is_the_specs() -> None:
    rows = re.findall(r"^\| (Fed-LWR|FedMRL|Fed-MAS|FedISM\(\+\)) \| (.*) \|$", ROWS, re.MULTILINE)
    found = {name: text.split(" | ") for name, text in rows if "×" in text}
    assert len(found) == 4
    for name, table in zip(
        ("Fed-LWR", "FedMRL", "Fed-MAS", "FedISM(+)"), (FED_LWR, FED_MRL, FED_MAS, FED_ISM), strict=True
    ):
        _, size, _, _, batch, length, sites = found[name]
        rounds, epochs = re.findall(r"\d+", length.replace("(code)", ""))
        assert size.startswith(f"{table['image_size'][0]}²")
        assert int(batch.split()[0]) == table["batch_size"]
        assert (int(rounds), int(epochs)) == (table["num_rounds"], table["local_epochs"])
        assert sites.startswith(str(table["sites"]))


def test_settings_go_before_the_papers() -> None:
    plan = make_plan(
        "fed_ism",
        small=False,
        settings={"image_size": [64, 64], "batch_size": 4, "corrupted_sites": 1},
        num_rounds=2,
        sites=3,
    )
    assert (plan.task.image_size, plan.training.batch_size) == ((64, 64), 4)  # type: ignore[attr-defined]
    assert (plan.run.num_rounds, plan.sites) == (2, ["site-1", "site-2", "site-3"])


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("model", ["fed_avg", "fed_ism", "fed_mas", "fed_mrl"])
@pytest.mark.parametrize("name", METHODS)
def test_trained_like_another_method(name: str, model: str, small: bool) -> None:
    needs = ("bsm_fl", "bsm_kd", "fed_mas", "creff", "crt", "moon", "ldam", "logit_adjustment", "fed_lc")
    if model == "fed_avg" and name in needs:
        with pytest.raises(ValueError, match="cannot learn segmentation"):
            make_plan(name, train_like=model, small=small)
        return
    if model != "fed_avg" and name == "fed_lwr_last_layer":  # whose layer is one of the U-Net
        with pytest.raises(ValueError, match="only_layer='down_3' names no layer or block of the model"):
            make_plan(name, train_like=model, small=small)
        return
    plan, other = make_plan(name, train_like=model, small=small), make_plan(model, small=small)
    keeps = {*all_methods()[name].keeps, *all_methods()[model].keeps} if name != model else set()
    alone = make_plan(name, small=small)
    for field in field_names(LocalTraining):
        expected = alone if field in keeps else other
        assert getattr(plan.training, field) == getattr(expected.training, field), field
    for field in field_names(type(other.task)):
        if field not in keeps:
            assert getattr(plan.task, field) == getattr(other.task, field), field
    assert (plan.run.num_rounds, plan.sites) == (other.run.num_rounds, other.sites)
    assert type(plan.rule) is all_methods()[name].rule


def test_what_is_the_method_stays() -> None:
    assert make_plan("bsm_fl", train_like="fed_ism").training.criterion == "balanced_softmax"
    assert make_plan("fed_ism", train_like="bsm_fl").training.criterion == "logit_adjusted"
    assert make_plan("fed_avg", train_like="fed_mas").training.criterion == "task"
    assert make_plan("fed_mas", train_like="fed_ism").task.projector_dim == 96  # type: ignore[attr-defined]
    assert make_plan("fed_ism", train_like="fed_mas").training.rho == 0.05  # type: ignore[attr-defined]
    assert make_plan("fed_avg", train_like="fed_ism", settings={"batch_size": 5}).training.batch_size == 5


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match="unknown method 'fed_isn'; did you mean 'fed_ism'"):
        make_plan("fed_avg", train_like="fed_isn")
