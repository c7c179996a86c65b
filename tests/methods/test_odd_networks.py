"""Test networks that are no plain stack of convolutions and batch norms, in runs of two rounds in this process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fairflare.core.aggregation.spectral import singular_vectors
from fairflare.core.objectives.sam import SAM
from fairflare.core.states import layerwise_average, weighted_average
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import run_document

CLASSES: dict[str, Any] = {
    "phantom": "fundus", "image_size": [32, 32], "phantom_samples": 62, "phantom_test": 40, "phantom_own_test": 20,
    "partition": "iid", "corrupted_sites": 0, "phantom_sites": 2,
}  # fmt: skip


UNUSED = ["net.blocks.0.norm_cross_attn", "net.blocks.1.norm_cross_attn"]  # of MONAI's blocks


class ViT(nn.Module):
    """Define MONAI's ViT without the hidden states next to its answer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        from monai.networks.nets import ViT

        self.net = ViT(
            3, (32, 32), (8, 8), 16, 32, 2, 2, classification=True, num_classes=classes, spatial_dims=2,
            post_activation="none",
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(x)[0]
        return outputs


class SequenceFirst(nn.Module):
    """Define a network with tokens before images, torch's attention, and a batch norm of one value a channel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).permute(2, 0, 1)
        return self.head(self.norm(self.encoder(tokens).mean(0)))


class Parametrized(nn.Sequential):
    def __init__(self, classes: int) -> None:
        super().__init__(
            parametrizations.weight_norm(nn.Conv2d(3, 8, 3, 2)),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, 2)),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            parametrizations.spectral_norm(nn.Linear(8, classes)),
        )


def classifier(network: type[nn.Module]) -> type[ClassificationTask]:
    class Own(ClassificationTask):
        def build_model(self) -> Any:
            return network(self.classes)

    return Own


def run(folder: Any, method: str, task: Any, learns: dict[str, Any], **settings: Any) -> dict[str, Any]:
    plan = make_plan(method, task="classification", sites=2, num_rounds=2, settings={"local_epochs": 1, **settings})
    results = run_local(replace(plan, task=task(**learns)), folder)
    return {**run_document(results), "model": torch.load(results.parent / "FL_global_model.pt", weights_only=True)}


@pytest.mark.many
@pytest.mark.parametrize(
    ("task", "learns", "batch", "unscored"),
    [
        pytest.param(classifier(ViT), CLASSES, 4, UNUSED, id="vit"),
        # 29 training images at the first site: a last batch of one, whose batch norm sees one value a channel
        pytest.param(classifier(SequenceFirst), CLASSES, 4, ["encoder.self_attn.out_proj"], id="sequence first"),
        pytest.param(classifier(Parametrized), CLASSES, 4, [], id="parametrized"),
    ],
)
def test_every_layer_has_a_score(tmp_path, task, learns, batch, unscored):
    """Check two rounds of Fed-LWR: every layer has a score, except layers that never run."""
    found = run(tmp_path, "fed_lwr", task, learns, batch_size=batch, learning_rate=1e-3)
    for record in found["rounds"]:
        assert record["left_out"] == []
        scored = {
            layer: [
                values["cka"] for values in by.values() if values["cka"] is not None and math.isfinite(values["cka"])
            ]
            for layer, by in record["layers"].items()
        }
        assert [layer for layer, values in scored.items() if len(values) < 2] == unscored
        for by in record["layers"].values():
            assert sum(values["weight"] for values in by.values()) == pytest.approx(1, abs=1e-3)
    assert any(told["num_samples"] % batch == 1 for told in found["rounds"][0]["train"].values())


def largest_singular_values(network: nn.Module, state: dict[str, torch.Tensor]) -> list[float]:
    network.load_state_dict(state)
    network.eval()
    with torch.no_grad():
        return [float(torch.linalg.matrix_norm(network[i].weight.flatten(1), 2)) for i in (3, 7)]


@pytest.mark.parametrize("method", ["fed_avg", "fed_ism"])
def test_averages_of_parametrized_weights(tmp_path, method):
    """Check that the averaged network divides by its weights' own norm, also under SAM's two passes."""
    found = run(tmp_path, method, classifier(Parametrized), CLASSES, batch_size=8, learning_rate=3e-2)
    state = found["model"]["model"]
    assert largest_singular_values(Parametrized(5), state) == pytest.approx([1, 1], abs=0.01)


def trained(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    network = Parametrized(3)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(40):
        x = torch.randn(8, 3, 16, 16, generator=generator) * (1 + seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), torch.randint(0, 3, (8,), generator=generator)).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def test_a_spectral_norm_divides_by_what_the_average_measures():
    states = {f"s{seed}": trained(seed) for seed in range(3)}
    weights = {"s0": 0.5, "s1": 0.3, "s2": 0.2}
    plain = {n: sum(w * states[s][n].double() for s, w in weights.items()) for n in states["s0"]}
    owner = dict.fromkeys(plain, "all")
    for found in (weighted_average(states, weights), layerwise_average(states, {"all": weights}, owner)):
        for name, tensor in found.items():
            if tensor.is_floating_point() and not name.endswith(("_u", "_v")):
                torch.testing.assert_close(tensor.double(), plain[name], atol=1e-6, rtol=0)
        assert largest_singular_values(Parametrized(3), found) == pytest.approx([1, 1], abs=0.01)
    short = {n: t.float() if t.is_floating_point() else states["s0"][n] for n, t in plain.items()}
    assert max(largest_singular_values(Parametrized(3), short)) > 1.3  # what happens without
    sums = weighted_average(states, weights, updates=True)  # of changes there is nothing to measure
    for name, tensor in sums.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), plain[name], atol=1e-6, rtol=0)


def test_singular_vectors_by_hand():
    """Check diag(3, 1), and transposed convolutions by their second dimension; a weight of 0 has no singular vector."""
    u, v = torch.tensor([0.5, 0.5]), torch.tensor([0.6, 0.1])
    key = "a.parametrizations.weight."
    found = singular_vectors({key + "original": torch.diag(torch.tensor([3.0, 1.0])), key + "0._u": u, key + "0._v": v})
    assert set(found) == {key + "0._u", key + "0._v"}
    for vector in found.values():
        torch.testing.assert_close(vector.abs(), torch.tensor([1.0, 0.0]), atol=1e-6, rtol=0)
    layer = parametrizations.spectral_norm(nn.ConvTranspose2d(3, 5, 2))
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(torch.rand(3, 5, 2, 2, generator=torch.Generator().manual_seed(0)))
    state = {f"x.{k}": t for k, t in layer.state_dict().items()}
    layer.load_state_dict({k.removeprefix("x."): t for k, t in (state | singular_vectors(state)).items()})
    with torch.no_grad():
        weight = layer.eval().weight.movedim(1, 0).flatten(1)
    assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(1, abs=0.01)
    assert singular_vectors({key + "original": torch.zeros(2, 2), key + "0._u": u, key + "0._v": v}) == {}
    assert singular_vectors({"a.weight": torch.ones(2, 2)}) == {}


def test_sam_moves_what_the_parametrization_owns():
    """Check by hand the gradient at w + rho g / |g| over all original tensors, and weights restored before the step."""
    torch.manual_seed(0)
    network = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh(), nn.Linear(2, 1))
    x = torch.randn(5, 3)
    names = [name for name, _ in network.named_parameters()]
    assert "0.parametrizations.weight.original0" in names

    def loss_at(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(network, dict(zip(names, values, strict=True)), (x,)).square().mean()

    start = [p.detach().clone().requires_grad_() for p in network.parameters()]
    first = torch.autograd.grad(loss_at(start), start)
    norm = torch.cat([g.flatten() for g in first]).norm()
    uphill = [(w + 0.1 * g / norm).detach().requires_grad_() for w, g in zip(start, first, strict=True)]
    second = torch.autograd.grad(loss_at(uphill), uphill)
    optimizer = SAM(torch.optim.SGD(network.parameters(), lr=0.5), rho=0.1, model=network)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = network(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for p, w, g in zip(network.parameters(), start, second, strict=True):
        torch.testing.assert_close(p.detach(), (w - 0.5 * g).detach(), atol=1e-6, rtol=0)
