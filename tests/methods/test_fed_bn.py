"""Test FedBN and Solo: which tensors stay or travel, on the networks of the tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fairflare.core.features.norms import norm_tensors, running_statistics
from fairflare.core.states import add_update
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_bn import FedBNTraining
from fairflare.methods.solo import SoloTraining
from fairflare.tasks.classification import ClassificationTask
from tests.federation.test_privacy import TINY
from tests.tiny import run_document

from .own import NORM, SITES, Plane, run
from .support import at_site, initial, request

SMALL: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.05}


def of_batch_norms(model: nn.Module) -> set[str]:
    """Return names by the modules themselves, not by the code under test."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
        for name in module.state_dict()
    }


@pytest.mark.parametrize("network", ["resnet18", "densenet121"])
def test_no_tensor_of_a_batch_norm_leaves_whatever_it_is_called(tmp_path, network) -> None:
    task = ClassificationTask(
        network=network, phantom="fundus", image_size=(64, 64), phantom_sites=2, phantom_samples=60, phantom_test=40,
        partition="iid", corrupted_sites=0, **({"features": (4, 4, 8, 8)} if network == "resnet18" else {}),
    )  # fmt: skip
    model = task.build_model()
    norms = of_batch_norms(model)
    by_name = {name for name in model.state_dict() if "bn" in name}
    assert norms - by_name  # what the authors' rule would have sent
    half = FedBNTraining(batch_size=8)
    assert set(half.home.stays(model)) == norms
    if network == "resnet18":
        reply = at_site(tmp_path, half, task=task).perform(request("train", initial(task)))
        assert reply.status == "ok", reply.reason
        assert set(reply.update) == set(model.state_dict()) - norms


class Mixed(nn.Module):
    """Define a network with every kind of norm, one with a parametrization, one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.LayerNorm(2)
        self.d = nn.InstanceNorm2d(2, affine=True, track_running_stats=True)
        self.e = nn.BatchNorm1d(2, affine=False)
        self.f = nn.BatchNorm2d(2, track_running_stats=False)
        self.again = self.a
        self.conv_bn = nn.Conv2d(2, 2, 1)
        nn.utils.parametrizations.weight_norm(self.conv_bn)

    def names(self, *prefixes: str) -> list[str]:
        return [name for name in self.state_dict() if name.partition(".")[0] in prefixes]


def test_norms_are_found_by_their_type() -> None:
    model = Mixed()
    assert norm_tensors(model, "batch") == model.names("a", "e", "f", "again")
    assert norm_tensors(model, "all") == model.names("a", "b", "c", "d", "e", "f", "again")
    statistics = [n for n in model.names("a", "d", "e", "again") if "running" in n or "num_batches" in n]
    assert running_statistics(model) == statistics
    assert LocalTraining().home.stays(model) == []
    assert LocalTraining(norm_statistics="site").home.stays(model) == statistics
    both = FedBNTraining(norm_statistics="site").home.stays(model)
    assert both == [n for n in model.state_dict() if n in {*norm_tensors(model, "batch"), *statistics}]
    assert SoloTraining().home.stays(model) == list(model.state_dict())


def test_the_shared_tensors_are_the_mean_of_the_sites(tmp_path) -> None:
    """Compare with float64 sums of the sites' tensors, weighed by their (equal) numbers of points."""
    made, sites = run(tmp_path, FedBNTraining(**SMALL))
    for current_round in range(3):
        received = made.net.tasks[current_round].params
        after = made.net.tasks[current_round + 1].params
        local = [sites.sent[s, "train", current_round].params for s in SITES]
        shared = {name: tensor for name, tensor in received.items() if name not in NORM}
        models = [add_update(shared, update) for update in local]
        for name in shared:
            mean = sum(m[name].double() for m in models) / 2
            torch.testing.assert_close(after[name].double(), mean, atol=1e-7, rtol=0)
        assert all(torch.equal(after[name], received[name]) for name in NORM)


def test_a_network_without_such_a_norm_is_refused_before_training(tmp_path) -> None:
    with pytest.raises(RoundFailed, match=r"norms='batch'.*norms='all' would"):
        run(tmp_path / "a", FedBNTraining(**SMALL, norms="batch"), task=Plane("layer"))
    with pytest.raises(RoundFailed, match="so FedBN would be FedAvg"):
        run(tmp_path / "b", FedBNTraining(**SMALL, norms="all"), task=Plane("none"))
    made, sites = run(tmp_path / "c", FedBNTraining(**SMALL), task=Plane("layer"))  # where no batch norm is: all kinds
    assert sorted(sites.kept("site-1", "parts", 2)) == ["1.bias", "1.weight"]
    assert made.results["info"]["measured"] == "personal"


@pytest.mark.many
@pytest.mark.parametrize("kind", ["segmentation", "classification"])
@pytest.mark.parametrize("method", ["fed_bn", "fed_lwr"])
def test_both_kinds_of_task(tmp_path: Path, method: str, kind: str) -> None:
    """Check runs in one process, as with ``fairflare run``; with Fed-LWR sites keep their statistics."""
    settings = {**TINY[kind], "local_epochs": 1}
    if method == "fed_lwr":
        settings["norm_statistics"] = "site"
    plan = make_plan(method, task=kind, sites=SITES, num_rounds=2, settings=settings)
    network = plan.task.build_model()
    if method == "fed_bn" and not of_batch_norms(network):
        plan.training.norms = "all"
    results = run_document(run_local(plan, tmp_path))
    assert results["status"] == "completed"
    stays = plan.training.home.stays(network)
    assert results["info"]["measured"] == ("personal" if stays else "common")
    assert sorted(results["test"]) == SITES
    model = torch.load(tmp_path / "server/simulate_job/FL_global_model.pt", weights_only=True)
    assert sorted(model["model"]) == sorted(network.state_dict())
    assert all("did not come" not in note for record in results["rounds"] for note in record["notes"])
