"""Test networks for classification, and checkpoints in the published layouts.

The published layouts are written out here, and the features are computed from them with plain functions.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from fairflare.core.features.adapting import network_of, outline_of
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.networks import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Classifier,
    build_classifier,
    load_encoder,
    read_checkpoint,
)

PAPER = (64, 128, 256, 512)
BLOCKS = (6, 12, 24, 16)  # layers in the dense blocks of DenseNet121
State = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("one_thread")


def build(network: str = "resnet18", **changes: Any) -> Classifier:
    arguments: dict[str, Any] = {
        "in_channels": 3, "classes": 4, "features": (8, 8, 16, 16), "norm_momentum": 0.1, **changes
    }  # fmt: skip
    return build_classifier(network, **arguments)


# --- the published layouts ----------------------------------------------------------------------------------


class Layout:
    """Make random tensors under published names; the old files have no ``num_batches_tracked``."""

    def __init__(self, counters: bool = True) -> None:
        self.tensors: State = {}
        self.counters = counters
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def conv(self, name: str, inputs: int, outputs: int, size: int) -> None:
        self.tensors[f"{name}.weight"] = self.random(outputs, inputs, size, size) * math.sqrt(2 / (inputs * size**2))

    def norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.1 * self.random(width)
        self.tensors[f"{name}.bias"] = 0.1 * self.random(width)
        self.tensors[f"{name}.running_mean"] = 0.1 * self.random(width)
        self.tensors[f"{name}.running_var"] = 1 + 0.1 * self.random(width).abs()
        if self.counters:
            self.tensors[f"{name}.num_batches_tracked"] = torch.tensor(7)

    def linear(self, name: str, inputs: int, outputs: int) -> None:
        self.tensors[f"{name}.weight"] = self.random(outputs, inputs) / math.sqrt(inputs)
        self.tensors[f"{name}.bias"] = self.random(outputs)


def published_resnet18(classes: int, widths: tuple[int, ...] = PAPER, *, counters: bool = True) -> State:
    layout = Layout(counters)
    layout.conv("conv1", 3, widths[0], 7)
    layout.norm("bn1", widths[0])
    inputs = widths[0]
    for stage, width in enumerate(widths, 1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            layout.conv(f"{name}.conv1", inputs, width, 3)
            layout.norm(f"{name}.bn1", width)
            layout.conv(f"{name}.conv2", width, width, 3)
            layout.norm(f"{name}.bn2", width)
            if stage > 1 and block == 0:
                layout.conv(f"{name}.downsample.0", inputs, width, 1)
                layout.norm(f"{name}.downsample.1", width)
            inputs = width
    layout.linear("fc", inputs, classes)
    return layout.tensors


def published_densenet121(classes: int, *, dot: str = "", counters: bool = True) -> State:
    """Return pytorch.org's names for ``dot="."``: ``norm.1`` for ``norm1``."""
    layout = Layout(counters)
    layout.conv("features.conv0", 3, 64, 7)
    layout.norm("features.norm0", 64)
    width = 64
    for block, layers in enumerate(BLOCKS, 1):
        for layer in range(1, layers + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            layout.norm(f"{name}.norm{dot}1", width)
            layout.conv(f"{name}.conv{dot}1", width, 128, 1)
            layout.norm(f"{name}.norm{dot}2", 128)
            layout.conv(f"{name}.conv{dot}2", 128, 32, 3)
            width += 32
        if block < len(BLOCKS):
            layout.norm(f"features.transition{block}.norm", width)
            layout.conv(f"features.transition{block}.conv", width, width // 2, 1)
            width //= 2
    layout.norm("features.norm5", width)
    layout.linear("classifier", width, classes)
    return layout.tensors


def normalised(images: torch.Tensor) -> torch.Tensor:
    return (images - torch.tensor(IMAGENET_MEAN).view(3, 1, 1)) / torch.tensor(IMAGENET_STD).view(3, 1, 1)


def norm(t: State, name: str, x: torch.Tensor) -> torch.Tensor:
    statistics = (t[f"{name}.running_mean"], t[f"{name}.running_var"])
    return F.batch_norm(x, *statistics, t[f"{name}.weight"], t[f"{name}.bias"])


def features_of_resnet18(t: State, images: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(normalised(images), t["conv1.weight"], stride=2, padding=3)
    x = F.max_pool2d(F.relu(norm(t, "bn1", x)), 3, stride=2, padding=1)
    for stage in range(1, 5):
        for block in range(2):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = F.conv2d(x, t[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = F.conv2d(F.relu(norm(t, f"{name}.bn1", y)), t[f"{name}.conv2.weight"], padding=1)
            if stride == 2:
                x = norm(t, f"{name}.downsample.1", F.conv2d(x, t[f"{name}.downsample.0.weight"], stride=2))
            x = F.relu(norm(t, f"{name}.bn2", y) + x)
    return x.mean((2, 3))


def features_of_densenet121(t: State, images: torch.Tensor, dot: str = "") -> torch.Tensor:
    x = F.conv2d(normalised(images), t["features.conv0.weight"], stride=2, padding=3)
    x = F.max_pool2d(F.relu(norm(t, "features.norm0", x)), 3, stride=2, padding=1)
    for block, layers in enumerate(BLOCKS, 1):
        for layer in range(1, layers + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            y = F.conv2d(F.relu(norm(t, f"{name}.norm{dot}1", x)), t[f"{name}.conv{dot}1.weight"])
            y = F.conv2d(F.relu(norm(t, f"{name}.norm{dot}2", y)), t[f"{name}.conv{dot}2.weight"], padding=1)
            x = torch.cat([x, y], 1)
        if block < len(BLOCKS):
            name = f"features.transition{block}"
            x = F.avg_pool2d(F.conv2d(F.relu(norm(t, f"{name}.norm", x)), t[f"{name}.conv.weight"]), 2)
    return F.relu(norm(t, "features.norm5", x)).mean((2, 3))


def images(count: int = 2, size: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def same_features(model: Classifier, expected: torch.Tensor) -> None:
    with torch.no_grad():
        found = model.eval().embed(images())
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --- the networks -------------------------------------------------------------------------------------------


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes() -> None:
    assert trainable(build(features=PAPER, classes=1000)) == 11_689_512  # FedISM's 44.59 MiB
    assert trainable(build("densenet121", classes=1000)) == 7_978_856


@pytest.mark.parametrize(("network", "width"), [("resnet18", 16), ("densenet121", 1024)])
@pytest.mark.parametrize("channels", [1, 3])
def test_shapes(network: str, width: int, channels: int) -> None:
    model = build(network, in_channels=channels, projector_dim=7)
    inputs = images(channels=channels)
    embedded = model.embed(inputs)
    assert embedded.shape == (2, width)
    assert model.project(embedded).shape == (2, 7)
    outputs = model.eval()(inputs)
    assert outputs.shape == (2, 4)
    torch.testing.assert_close(outputs, model.head(model.embed(inputs)))


def test_projection_head() -> None:
    """Check Fed-MAS: 512 -> 512 -> 2048 has 1,314,304 parameters."""
    model = Classifier(nn.Flatten(), 512, 4, projector_dim=2048)
    assert model.projector is not None
    assert trainable(model.projector) == 1_314_304
    with pytest.raises(RuntimeError, match="no projection head; set projector_dim"):
        build().project(torch.zeros(1, 16))


def test_inputs_are_normalised_as_imagenet() -> None:
    mean = torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    colour = Classifier(nn.Flatten(), 12, 2)
    torch.testing.assert_close(colour.embed(mean), torch.zeros(1, 12))
    one = colour.embed(mean + torch.tensor(IMAGENET_STD).view(1, 3, 1, 1))
    torch.testing.assert_close(one, torch.ones(1, 12))
    grey = Classifier(nn.Flatten(), 4, 2, in_channels=1)
    found = grey.embed(torch.full((1, 1, 2, 2), 0.5))  # means 0.449, 0.226
    torch.testing.assert_close(found, torch.full((1, 4), (0.5 - 1.347 / 3) / (0.678 / 3)))
    assert not set(colour.state_dict()) - {"head.weight", "head.bias"}


def test_pooling_and_momentum_are_settings() -> None:
    sizes = []
    for max_pool in (True, False):
        model = build(max_pool=max_pool, norm_momentum=0.25, projector_dim=2)
        model.encoder.layer1.register_forward_hook(lambda m, i, out: sizes.append(tuple(out.shape[2:])))  # type: ignore[union-attr]
        model(images(size=48))
        momenta = {m.momentum for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
        assert momenta == {0.25}
    assert sizes == [(12, 12), (24, 24)]


def test_unknown_network() -> None:
    with pytest.raises(ValueError, match=r"^network.* got 'resnet50'"):
        build("resnet50")


# --- checkpoints that fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "module.encoder."])
def test_resnet18_with_published_names(tmp_path: Path, prefix: str) -> None:
    tensors = published_resnet18(1000, counters=not prefix)
    assert len(tensors) == (122 if not prefix else 102)
    path = saved(tmp_path / "resnet18.pth", {prefix + name: tensor for name, tensor in tensors.items()})
    model = build(features=PAPER)
    head = model.head.weight.detach().clone()
    assert load_encoder(model, path) == "initial weights of the encoder from resnet18.pth; the head is random"
    same_features(model, features_of_resnet18(tensors, images()))
    assert torch.equal(model.head.weight, head)
    assert int(model.state_dict()["encoder.bn1.num_batches_tracked"]) == (0 if prefix else 7)


@pytest.mark.parametrize("dot", ["", "."])
def test_densenet121_with_published_names(tmp_path: Path, dot: str) -> None:
    tensors = published_densenet121(4, dot=dot, counters=not dot)
    model = build("densenet121")
    message = load_encoder(model, saved(tmp_path / "d.pth", {f"module.{name}": t for name, t in tensors.items()}))
    assert message == "initial weights of encoder and head from d.pth"
    same_features(model, features_of_densenet121(tensors, images(), dot))
    assert torch.equal(model.head.weight, tensors["classifier.weight"])
    assert torch.equal(model.head.bias, tensors["classifier.bias"])


def small(classes: int = 4) -> State:
    return published_resnet18(classes, (8, 8, 16, 16))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"state_dict": t, "epoch": 3},
        lambda t: {"model": t, "train_conf": {"round": 4, "method": "FedAvg"}},  # as FairFlare's results
        lambda t: {"state_dict": {**t, "note": "text beside the tensors"}},
        lambda t: {f"model.{name}": tensor for name, tensor in t.items()},
    ],
)
def test_wrapped_state_dicts(tmp_path: Path, wrap: Callable[[State], Any]) -> None:
    tensors, model = small(), build()
    assert "encoder and head" in load_encoder(model, saved(tmp_path / "a.pt", wrap(tensors)))
    same_features(model, features_of_resnet18(tensors, images()))
    assert torch.equal(model.head.weight, tensors["fc.weight"])


@pytest.mark.parametrize("projector_dim", [None, 6])
def test_a_model_of_our_own_is_loaded_again(tmp_path: Path, projector_dim: int | None) -> None:
    """Check that the file lacks the projection head, and starts runs with another head, or without one."""
    first, second = build(projector_dim=6), build(projector_dim=projector_dim)
    first.train()(images())
    path = saved(tmp_path / "FL_global_model.pt", {"model": first.state_dict()})
    assert "encoder and head" in load_encoder(second, path)
    torch.testing.assert_close(second.eval()(images()), first.eval()(images()))


@pytest.mark.parametrize("classes", [2, 9])
def test_a_head_of_other_classes_stays_random(tmp_path: Path, classes: int) -> None:
    model = build()
    torch.manual_seed(5)
    head = copy.deepcopy(model.head.state_dict())
    assert "the head is random" in load_encoder(model, saved(tmp_path / "a.pt", small(classes)))
    assert all(torch.equal(head[name], tensor) for name, tensor in model.head.state_dict().items())
    without = {name: tensor for name, tensor in small().items() if not name.startswith("fc.")}
    assert "the head is random" in load_encoder(model, saved(tmp_path / "b.pt", without))
    bias = {**small(), "fc.bias": torch.zeros(3)}
    assert "the head is random" in load_encoder(model, saved(tmp_path / "c.pt", bias))


# --- checkpoints that are refused ---------------------------------------------------------------------------


@pytest.fixture
def untouched() -> Iterator[Classifier]:
    """Check that a refused checkpoint leaves the network unchanged."""
    model = build()
    before = copy.deepcopy(model.state_dict())
    yield model
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_missing(tmp_path: Path, untouched: Classifier) -> None:
    with pytest.raises(ValueError, match=r"nowhere.pth does not exist; nothing is"):
        load_encoder(untouched, tmp_path / "nowhere.pth")


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_truncated(tmp_path: Path, untouched: Classifier, name: str) -> None:
    path = tmp_path / name
    save_file(small(), path) if path.suffix == ".safetensors" else torch.save(small(), path)
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"plain tensors .* it is damaged"):
            load_encoder(untouched, path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code in a checkpoint was run",))


def test_pickled_objects(tmp_path: Path, untouched: Classifier) -> None:
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Harmful(), protocol=2))
    saved(tmp_path / "object.pth", {"state_dict": small(), "hook": Harmful()})
    saved(tmp_path / "module.pth", nn.Linear(2, 2))
    for name in ("raw.pth", "object.pth", "module.pth"):
        with pytest.raises(ValueError, match=r"pickled objects, .*refused; save"):
            load_encoder(untouched, tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds no state dict"),
        ({}, "holds no state dict"),
        ({"state_dict": {}}, "holds no state dict"),
        ({"epoch": 3, "name": "x"}, "holds no tensors, only epoch, name"),
        ({"bn1.bias": torch.tensor([0.0, math.nan])}, "NaN or infinite in tensor 'bn1.bias'"),
    ],
)
def test_no_state_dict(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_checkpoint(saved(tmp_path / "a.pt", content))


def test_missing_and_superfluous_tensors(tmp_path: Path, untouched: Classifier) -> None:
    tensors = small()
    del tensors["layer4.1.bn2.running_var"]
    with pytest.raises(ValueError, match=r"missing layer4.1.bn2.running_var$"):
        load_encoder(untouched, saved(tmp_path / "a.pt", tensors))
    tensors = {**small(), "layer5.0.conv1.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unexpected layer5.0.conv1.weight$"):
        load_encoder(untouched, saved(tmp_path / "b.pt", tensors))


def test_another_shape(tmp_path: Path, untouched: Classifier) -> None:
    path = saved(tmp_path / "a.pt", {**small(), "conv1.weight": torch.zeros(8, 1, 7, 7)})
    with pytest.raises(ValueError, match=r"conv1.weight has .*\(8, 1, 7, 7\), needed"):
        load_encoder(untouched, path)
    path = saved(tmp_path / "b.pt", published_resnet18(4, (8, 16, 16, 16)))
    with pytest.raises(ValueError, match=r"layer2.0.bn1.weight has .*; .* more shape"):
        load_encoder(untouched, path)


def test_an_outline_has_names_and_shapes_without_memory_and_draws_nothing() -> None:
    task = ClassificationTask(network="vit_mini", image_size=(32, 32), patch_size=8)
    before = torch.get_rng_state()
    outline = outline_of(task)
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.device.type for p in outline.parameters()} == {"meta"}
    whole = network_of(task)
    assert {n: p.shape for n, p in outline.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}


def test_an_outline_of_a_network_that_reads_its_numbers_is_the_network() -> None:
    class Reads(ClassificationTask):
        def build_model(self) -> Any:
            model = torch.nn.Linear(2, 2)
            float(model.weight.sum().item())
            return model

    assert {p.device.type for p in outline_of(Reads()).parameters()} == {"cpu"}
