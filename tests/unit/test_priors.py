"""Test prior distance, class-aware means and rescue factor, and the loading of prior networks."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from fairflare.core.priors import RunningClassMean, prior_distance, rescue_factor
from fairflare.core.weighting import rescue_weights
from fairflare.methods.fed_mas import RescueTraining
from fairflare.tasks.priors import IMAGENET_MEAN, IMAGENET_STD, FrozenPrior, build_encoder, fingerprint, load_prior

NAN = math.nan


# ------------------------------------------------------------------------------------------------ distance, Eq. 1


@pytest.mark.parametrize(
    ("y", "y_prior", "expected"),
    [
        ((3, 4), (1, 0), 0.8),
        ((1, 0), (-1, 0), 4.0),
        ((1, 0), (2, 0), 0.0),
        ((1, 0), (0, 2), 2.0),
        ((0, 0), (1, 0), 2.0),
    ],
)
def test_distance_of_the_spec(y, y_prior, expected):
    found = prior_distance(torch.tensor([y], dtype=torch.float32), torch.tensor([y_prior], dtype=torch.float32))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_distance_is_of_directions_and_teaches_only_the_student():
    g = torch.Generator().manual_seed(0)
    y = torch.randn(5, 7, generator=g, requires_grad=True)
    target = torch.randn(5, 7, generator=g, requires_grad=True)
    found = prior_distance(y, target)
    assert torch.allclose(found, prior_distance(3 * y, 0.1 * target), atol=1e-6)
    naive = torch.stack(
        [2 - 2 * sum(a[i] * b[i] for i in range(7)) / (a.norm() * b.norm()) for a, b in zip(y, target, strict=True)]
    )
    assert torch.allclose(found, naive, atol=1e-6)
    found.mean().backward()
    assert target.grad is None
    assert y.grad is not None
    assert bool(torch.isfinite(y.grad).all())
    # One small step along the gradient brings the features nearer.
    assert prior_distance(y.detach() - 0.1 * y.grad, target).mean() < found.mean()


def test_distance_of_equal_features_is_never_negative():
    y = torch.randn(200, 96, generator=torch.Generator().manual_seed(1))
    found = prior_distance(y, y)
    assert float(found.min()) >= 0
    assert float(found.max()) < 1e-6
    assert bool(prior_distance(torch.full((1, 2), NAN), torch.ones(1, 2)).isnan().all())


@pytest.mark.parametrize(
    ("y", "target", "message"),
    [
        (torch.ones(2), torch.ones(2), r"projected must have shape \(n, d\)"),
        (torch.ones(2, 3), torch.ones(2, 4), r"target has .*\(2, 4\), projected has \(2, 3"),
        (torch.ones(0, 3), torch.ones(0, 3), "n >= 1"),
    ],
)
def test_distance_refuses(y, target, message):
    with pytest.raises(ValueError, match=message):
        prior_distance(y, target)


# ------------------------------------------------------------------------------------------------ means, Eq. 2


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 60))
def test_running_mean_does_not_know_the_batches(seed, batch, count):
    g = torch.Generator().manual_seed(seed)
    values = 4 * torch.rand(count, generator=g)
    targets = torch.randint(0, 4, (count,), generator=g)
    whole = RunningClassMean(4)
    whole.add(values, targets)
    expected = whole.means()
    order = torch.randperm(count, generator=g)
    running = RunningClassMean(4)
    for part in order.split(batch):
        running.add(values[part], targets[part])
    found = running.means()
    for c in range(4):
        mine = values[targets == c].double()
        if len(mine):
            assert abs(found[c].item() - mine.mean().item()) < 1e-9
            assert abs(found[c].item() - expected[c].item()) < 1e-12
        else:
            assert math.isnan(found[c])
            assert math.isnan(expected[c])


def test_epochs_are_added_and_a_class_that_was_not_seen_keeps_its_value():
    running = RunningClassMean(3)
    running.add(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]))
    running.end_epoch()
    running.add(torch.tensor([0.5, 0.25]), torch.tensor([0, 1]))
    running.end_epoch()
    # Class 0: 2 + 0.5; class 1: w in the first epoch, then 0.25; class 2: never seen, no w.
    assert running.total(torch.tensor([9.0, 0.75, NAN])).tolist()[:2] == pytest.approx([2.5, 1.0])
    assert math.isnan(running.total(torch.tensor([9.0, 0.75, NAN]))[2])
    assert math.isnan(running.total()[1])
    empty = RunningClassMean(2)
    assert empty.total(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]  # E = 0
    with pytest.raises(ValueError, match="no epoch was closed"):
        empty.total()
    with pytest.raises(ValueError, match=r"before must have shape \(2,\)"):
        empty.total(torch.ones(3))


def test_a_seen_class_that_is_not_finite_is_not_mistaken_for_an_absent_one():
    running = RunningClassMean(1)
    running.add(torch.tensor([NAN]), torch.tensor([0]))
    running.end_epoch()
    assert math.isnan(running.total(torch.tensor([1.0]))[0])


def test_means_refuse():
    with pytest.raises(ValueError, match=r"^num_classes.* got 0$"):
        RunningClassMean(0)
    with pytest.raises(ValueError, match=r"targets has .*\(3,\), values has \(2,\)"):
        RunningClassMean(2).add(torch.ones(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"targets must be in \[0, 2\), got 2"):
        RunningClassMean(2).add(torch.ones(2), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"targets must be in \[0, 2\), got -1"):
        RunningClassMean(2).add(torch.ones(2), torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"^values.* got \(2, 3\)$"):
        RunningClassMean(2).add(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    empty = RunningClassMean(2)
    empty.add(torch.ones(0), torch.zeros(0, dtype=torch.int64))  # an empty batch is none
    assert empty.means().isnan().all()


# ------------------------------------------------------------------------------------------------ rescue factor, Eq. 3

A = ((0.5, 1.0, 1.5), (0.4, 0.8, 1.2), (3, 2, 1))
B = ((0.5, 1.0, NAN), (0.4, 1.0, NAN), (4, 4, 0))  # the third class is absent


@pytest.mark.parametrize(
    ("mode", "factors", "weights"),
    [
        ("paper", (2.8, 1.2), (0.7, 0.3)),
        ("code", (0.388889, 0.571429), (0.404959, 0.595041)),
        ("class_mean", (0.933333, 0.6), (0.608696, 0.391304)),
    ],
)
def test_rescue_factor_of_the_spec(mode, factors, weights):
    found = {"A": rescue_factor(*A, mode), "B": rescue_factor(*B, mode)}
    assert tuple(found.values()) == pytest.approx(factors, abs=1e-6)
    assert tuple(rescue_weights(found).values()) == pytest.approx(weights, abs=1e-6)


def test_rescue_factor_degenerate():
    assert rescue_factor([1.0, 1.0], [NAN, 1.0], [0, 1]) == 1.0  # absent: its value is not looked at
    assert math.isnan(rescue_factor([1.0, 1.0], [NAN, 1.0], [1, 1]))
    assert math.isnan(rescue_factor([math.inf], [1.0], [1]))
    for mode in ("paper", "code", "class_mean"):
        assert rescue_factor([0.0, 0.0], [0.0, 0.0], [1, 1], mode) == 0.0
        assert rescue_factor([0.0, 0.0], [0.3, 0.0], [1, 1], mode) == 0.0
        assert rescue_factor([2.0], [0.5], [1], mode) == 1.0
    with pytest.raises(ValueError, match="counts must not all be 0"):
        rescue_factor([1.0], [1.0], [0])
    with pytest.raises(ValueError, match=r"^during of class 1.* got -1"):
        rescue_factor([1.0, 1.0], [1.0, -1.0], [1, 1])
    with pytest.raises(ValueError, match=r"^mode.* got 'papr'"):
        rescue_factor(*A, "papr")
    with pytest.raises(ValueError, match=r"during has .*\(2,\), before has \(1,\)"):
        rescue_factor([1.0], [1.0, 2.0], [1, 1])


# ------------------------------------------------------------------------------------------------ prior networks


@pytest.fixture(scope="module")
def resnet50():
    torch.manual_seed(0)
    return build_encoder("resnet50")[0].eval()


def moco(encoder: nn.Module) -> dict[str, torch.Tensor]:
    """Return the published layout: query encoder with its projection head."""
    found = {f"module.encoder_q.{name}": tensor for name, tensor in encoder.state_dict().items()}
    for number in (0, 2):
        found[f"module.encoder_q.fc.{number}.weight"] = torch.zeros(8, 8)
        found[f"module.encoder_q.fc.{number}.bias"] = torch.zeros(8)
    return found


@pytest.mark.many
@pytest.mark.parametrize("published", [True, False])
def test_moco_checkpoint(tmp_path, resnet50, published):
    """Check the published file (old format, ``.pth.tar``), and the form of MoCo's training script."""
    path = tmp_path / "moco_v2_800ep_pretrain.pth.tar"
    content = {"epoch": 800, "arch": "resnet50", "state_dict": moco(resnet50)}
    if not published:
        content["state_dict"]["module.queue"] = torch.zeros(8, 4)
        content["state_dict"]["module.encoder_k.conv1.weight"] = torch.zeros(64, 3, 7, 7)
        content["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.1}]}
    torch.save(content, path, _use_new_zipfile_serialization=not published)
    before = torch.random.get_rng_state()
    network = load_prior("resnet50", path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert network.width == 2048
    assert not any(p.requires_grad for p in network.parameters())
    assert not network.train().training
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = resnet50((images - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    assert network(images).shape == (2, 2048)
    assert torch.allclose(network(images), expected, atol=1e-6)
    assert network.fingerprint == fingerprint(resnet50.state_dict(), "resnet50/None")
    other = load_prior("resnet50", path, image_size=96)
    assert other.fingerprint != network.fingerprint
    assert other(images[:, :1]).shape == (2, 2048)  # grey images, resized


def save_moco(path, change):
    torch.manual_seed(0)
    content = moco(build_encoder("resnet18")[0])
    torch.save({"state_dict": change(content)}, path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: None, "does not exist; nothing is downloaded"),
        (
            lambda p: save_moco(p, lambda s: {k: v for k, v in s.items() if "layer4.1.conv2" not in k}),
            r"'resnet18': missing layer4\.1\.conv2",
        ),
        (
            lambda p: save_moco(p, lambda s: s | {"module.encoder_q.layer9.weight": torch.ones(1)}),
            r"unexpected layer9\.weight",
        ),
        (
            lambda p: save_moco(p, lambda s: s | {"module.encoder_q.conv1.weight": torch.ones(64, 3, 3, 3)}),
            r"conv1\.weight .*\(64, 3, 3, 3\), needed",
        ),
    ],
)
def test_bad_checkpoints_are_refused(tmp_path, write, message):
    path = tmp_path / "prior.pth.tar"
    write(path)
    with pytest.raises(ValueError, match=message):
        load_prior("resnet18", path)


def test_checkpoint_of_another_network_names_keys_and_remedy(tmp_path, resnet50):
    path = tmp_path / "prior.pth.tar"
    torch.save({"state_dict": moco(resnet50)}, path)
    with pytest.raises(ValueError, match=r"unexpected layer1.*the prior_network"):
        load_prior("resnet18", path)


def test_networks_without_a_checkpoint():
    with pytest.raises(ValueError, match=r"'resnet50' needs .*module\.encoder_q"):
        load_prior("resnet50")
    with pytest.raises(ValueError, match="prior_network must be one of"):
        load_prior("vgg")
    with pytest.raises(ValueError, match=r"^prior_image_size.* got 8$"):
        load_prior("embedded", image_size=8)


def test_a_timm_encoder(tmp_path, monkeypatch):
    torch.save({"0.weight": torch.ones(5, 3, 3, 3), "0.bias": torch.zeros(5)}, tmp_path / "x.pt")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"needs the package timm at every site"):
        load_prior("timm:tiny", tmp_path / "x.pt")

    def create_model(name, pretrained, num_classes):
        assert (name, pretrained, num_classes) == ("tiny", False, 0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.num_features = 5
        return model

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    network = load_prior("timm:tiny", tmp_path / "x.pt")
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 5)
    for source in ("timm:hf-hub:a/b", "timm:local-dir:/x", "timm:hf_hub:a", "timm:", "timm:a/b"):
        with pytest.raises(ValueError, match="prior_network"):  # a source of timm's, which would fetch or read it
            load_prior(source, tmp_path / "x.pt")
        with pytest.raises(ValueError, match="prior_network"):
            RescueTraining(prior_network=source)
    assert RescueTraining(prior_network="timm:vit_base_patch16_224.augreg-in21k").prior_network


def test_the_packaged_network():
    network = load_prior()
    assert network.width == 96
    again = load_prior("embedded")
    assert network.fingerprint == again.fingerprint
    assert len(network.fingerprint) == 16
    found = network(torch.rand(4, 3, 48, 48, generator=torch.Generator().manual_seed(0)))
    assert found.shape == (4, 96)
    assert bool(torch.isfinite(found).all())
    assert network.encoder.body.conv1.weight.dtype == torch.float32


def test_fingerprint_sees_values_names_and_shapes():
    state = {"a": torch.arange(4.0), "b": torch.ones(2)}
    same = {"b": torch.ones(2, dtype=torch.float16), "a": torch.arange(4.0)}
    assert fingerprint(state) == fingerprint(same)
    for other in (
        state | {"a": torch.arange(4.0).flip(0)},
        state | {"a": torch.arange(4.0).reshape(2, 2)},
        {"a": state["a"], "c": state["b"]},
    ):
        assert fingerprint(other) != fingerprint(state)
    encoder = build_encoder("embedded")[0]
    assert FrozenPrior(encoder, "x", 96).fingerprint != FrozenPrior(encoder, "y", 96).fingerprint


@pytest.mark.parametrize("size", [32, 40, 96])
def test_images_of_another_size_are_resized_as_pillow_does(size):
    """Check that fine stripes become grey as in the task's images, without aliasing."""
    stripes = (torch.arange(64) % 2).float().expand(64, 64)
    images = torch.stack([stripes, torch.rand(64, 64, generator=torch.Generator().manual_seed(0))])[:, None]
    network = FrozenPrior(nn.Identity(), "none", 3, image_size=size)
    found = network(images)
    for image, (shown, *_) in zip(images, found, strict=True):
        resized = Image.fromarray(image[0].numpy()).resize((size, size), Image.Resampling.BILINEAR)
        wanted = (torch.from_numpy(np.array(resized)) - IMAGENET_MEAN[0]) / IMAGENET_STD[0]
        assert torch.allclose(shown, wanted, atol=1e-4)
