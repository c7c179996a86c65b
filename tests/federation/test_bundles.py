"""Test federations that learn a MONAI bundle: 3D volumes of two sites, in one process."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.base.disk.bundle_files import bundle_checksum
from fairflare.core.similarity import parameter_layers
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.methods.fed_lwr import LayerSimilarityReport
from tests.bundles import train_config, two_sites, write_bundle
from tests.tiny import RESULTS, model_in, run_document


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_sites(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b")


def run(folder: Path, bundle: Path, local: dict[str, Any], method: str = "fed_avg", **options: Any) -> dict[str, Any]:
    plan = make_plan(method, monai_bundle=bundle, **{"sites": 2, "num_rounds": 2, **options})
    return run_document(run_local(plan, folder, local))


def same(first: Path, second: Path) -> bool:
    other = model_in(second / RESULTS)
    return all(torch.equal(tensor, other[name]) for name, tensor in model_in(first / RESULTS).items())


@pytest.mark.many
@pytest.mark.parametrize("method", ["fed_avg", "fed_lwr"])
def test_two_rounds_twice_the_same(
    tmp_path: Path, bundle: Path, local: dict[str, Any], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    found = run(tmp_path / "a", bundle, local, method)
    assert found["status"] == "completed"
    assert [r["accepted"] for r in found["rounds"]] == [["site-1", "site-2"]] * 2
    for metrics in (*found["test"].values(), *found["rounds"][1]["validation"].values()):
        assert 0 <= metrics["dice"] <= 1
        assert 0 < metrics["loss"] < 5
    assert set(found["fairness"]) >= {"dice", "loss"}
    assert found["info"]["primary_metric"] == "dice"
    assert {site: said["images"]["training"] for site, said in found["info"]["said"].items()} == {
        "site-1": 2, "site-2": 3,
    }  # fmt: skip
    assert found["info"]["config"]["training"]["args"]["learning_rate"] == 0.01
    torch.manual_seed(99)  # somebody else's random numbers
    again = run(tmp_path / "b", bundle, local, method)
    assert same(tmp_path / "a", tmp_path / "b")
    assert found["test"] == again["test"]
    if method == "fed_lwr":
        assert "Fed-LWR" not in caplog.text  # no layer without a score
        assert not same(tmp_path / "a", _averaged(tmp_path, bundle, local))


def _averaged(tmp_path: Path, bundle: Path, local: dict[str, Any]) -> Path:
    run(tmp_path / "averaged", bundle, local)
    return tmp_path / "averaged"


@pytest.mark.long
def test_it_learns(tmp_path: Path, bundle: Path, local: dict[str, Any]) -> None:
    settings = {"local_epochs": 6}
    found = run(tmp_path, bundle, local, num_rounds=5, settings=settings)
    losses = [np.mean([site["loss"] for site in r["validation"].values()]) for r in found["rounds"]]
    assert losses[-1] < 0.7 * losses[0]


def test_the_bundle_is_kept_and_named(tmp_path: Path, bundle: Path, local: dict[str, Any]) -> None:
    found = run(tmp_path, bundle, local, num_rounds=1)
    kept = tmp_path / "server" / "simulate_job"
    assert bundle_checksum(kept / "monai_bundle") == bundle_checksum(bundle)
    assert (kept / "task.py").is_file()
    info = found["info"]
    assert info["task_file"]["monai_bundle_sha256"] == bundle_checksum(bundle)
    assert info["config"]["task"]["args"]["bundle_sha256"].replace(" ", "") == bundle_checksum(bundle)
    assert str(bundle) not in json.dumps(found)


@pytest.mark.parametrize("method", ["fed_ism", "ditto", "q_fed_avg"])
def test_other_methods(tmp_path: Path, bundle: Path, local: dict[str, Any], method: str) -> None:
    found = run(tmp_path, bundle, local, method, num_rounds=1)
    assert found["status"] == "completed"
    assert found["rounds"][0]["accepted"] == ["site-1", "site-2"]
    assert not found["rounds"][0]["left_out"]


def test_norms_are_recalibrated_on_patches(tmp_path: Path, bundle: Path, local: dict[str, Any]) -> None:
    found = run(tmp_path, bundle, local, num_rounds=1, settings={"norm_statistics": "recalibrated"})
    assert found["status"] == "completed"
    assert any("running_var" in name for name in model_in(tmp_path / RESULTS))


@pytest.mark.long
def test_an_optimizer_of_its_own_goes_on_between_rounds(tmp_path: Path, local: dict[str, Any]) -> None:
    config = train_config()
    config["optimizer"] = {"_target_": "Novograd", "params": "$@network.parameters()", "lr": 0.02, "amsgrad": True}
    bundle = write_bundle(tmp_path / "bundle", config)
    run(tmp_path / "kept", bundle, local)
    run(tmp_path / "again", bundle, local)
    run(tmp_path / "anew", bundle, local, settings={"keep_optimizer_state": False})
    assert same(tmp_path / "kept", tmp_path / "again")
    assert not same(tmp_path / "kept", tmp_path / "anew")
    found = run(tmp_path / "ditto", bundle, local, "ditto", num_rounds=1)
    assert found["status"] == "completed"


def test_a_site_without_usable_volumes_is_named(tmp_path: Path, bundle: Path) -> None:
    local = two_sites(tmp_path / "sites")
    for path in (tmp_path / "sites" / "site-2" / "labels").iterdir():
        path.write_bytes(b"no volume")
    with pytest.raises(RuntimeError, match="'site-2': an image of split 'training'"):
        run(tmp_path / "run", bundle, local)


@pytest.mark.parametrize(
    ("classes", "change", "message"),
    [
        (3, {}, "labels .* up to 2, .* has 2 channels"),
        (2, {"in_channels": 2}, r"network cannot do .*\(1, 1, 16, 16, 16\)"),
    ],
)
def test_images_that_do_not_fit_end_the_run_before_any_training(
    tmp_path: Path, classes: int, change: dict[str, Any], message: str
) -> None:
    config = train_config()
    config["network_def"] |= change
    local = two_sites(tmp_path / "sites", classes=classes)
    with pytest.raises(RuntimeError, match=r"check, before any training.*" + message):
        run(tmp_path / "run", write_bundle(tmp_path / "b", config), local)


# ------------------------------------------------------------------------------------------------ CKA


def outputs(network: torch.nn.Module, images: torch.Tensor) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, layer in parameter_layers(network).items():

        def keep(module: Any, args: Any, output: torch.Tensor, name: str = name) -> None:
            found[name] = output.detach().double().flatten(1).numpy()

        layer.register_forward_hook(keep)
    with torch.no_grad():
        network.eval()(images)
    return found


def plain_cka(first: torch.nn.Module, second: torch.nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Compute CKA of every layer with whole Gram matrices in float64."""
    features = [outputs(copy.deepcopy(network), images) for network in (first, second)]
    scores = {}
    centre = np.eye(len(images)) - 1 / len(images)
    for name in features[0]:
        k, l = (centre @ x[name] @ x[name].T @ centre for x in features)
        scores[name] = float((k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum()))
    return scores


def test_cka_of_3d_features_is_that_of_plain_gram_matrices(bundle: Path, local: dict[str, Any], tmp_path: Path) -> None:
    """Check the report that Fed-LWR's sites send, for two models that a site trained."""
    plan = make_plan("fed_lwr", monai_bundle=bundle, sites=2)
    task, half = plan.task, plan.training
    assert isinstance(half, LayerSimilarityReport)
    data = task.open_site("site-2", local["sites"]["site-2"])
    store: Any = SimpleNamespace(save=lambda *_: None, load_before=lambda *_: None)
    site = SiteRun(
        site="site-2", task=task, data=data, device=torch.device("cpu"), current_round=0, num_rounds=2, seed=1,
        directives={}, store=store, scratch=tmp_path,
    )  # fmt: skip
    torch.manual_seed(0)
    models = [task.build_model(), task.build_model()]
    for number, network in enumerate(models):
        LocalTraining(learning_rate=0.01, augment=True, local_epochs=3).train(replace(site, seed=number), network)
    report = half.report_anchor(site, *models)
    images = torch.cat([inputs for inputs, _ in data.batches("training", batch_size=8)])
    assert images.shape == (3, 1, 16, 16, 16)
    expected = plain_cka(*models, images)
    assert report["layers"] == list(expected)
    assert len(expected) > 8
    np.testing.assert_allclose(report["cka"], list(expected.values()), atol=1e-4)
    assert min(expected.values()) < 0.99  # the models differ
