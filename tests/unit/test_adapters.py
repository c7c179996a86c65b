"""Test adapters in MONAI's networks, frozen parts, and the settings for them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fairflare.base.settings import build, values_of
from fairflare.core.aggregation.low_rank import pairs_of
from fairflare.core.features.adapting import network_of
from fairflare.methods.base.local_loop import make_optimizer
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.adapters import Adapters, Lora, NoAdapters
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.encoders import segmenter
from fairflare.tasks.networks import load_fitting, make_network
from fairflare.tasks.segmentation import SegmentationTask

pytest.importorskip("peft", reason="LoRA needs it: make test-adapters")

VIT: dict[str, Any] = {"network": "vit_mini", "image_size": (32, 32), "patch_size": 8}
RESNET: dict[str, Any] = {"features": (8, 8, 16, 16), "image_size": (32, 32)}
pytestmark = pytest.mark.usefixtures("one_thread")


def random_factors(model: nn.Module) -> None:
    """Set random factors as after a training: B is not 0 any more."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.05)


def merged(model: nn.Module, scale: float) -> dict[str, torch.Tensor]:
    """Return the tensors of the network without adapters that computes the same: W + scale B A, kernel by kernel."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer, (name_a, name_b) in pairs_of(state).items():
        a, b = state.pop(name_a).double(), state.pop(name_b).double()
        weight = state[f"{layer}.base_layer.weight"]
        product = torch.einsum("or,ri->oi", b.flatten(1), a.flatten(1)).reshape(weight.shape)
        state[f"{layer}.base_layer.weight"] = (weight.double() + scale * product).float()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}


def vit(dimensions: int) -> Any:
    from fairflare.tasks.networks import build_classifier

    return build_classifier(
        "vit_mini",
        in_channels=1,
        classes=3,
        features=(8,),
        norm_momentum=0.1,
        image_size=(16,) * dimensions,
        patch_size=8,
    )


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize(
    ("make", "side", "targets"),
    [
        (vit, 16, r"attn\.(qkv|out_proj)$|mlp"),
        (
            lambda d: make_network(segmenter("segresnet", in_channels=1, classes=2, image_size=(16,) * d, width=8)),
            16,
            "conv",
        ),
        pytest.param(
            lambda d: make_network(segmenter("swin_unetr", in_channels=1, classes=2, image_size=(64,) * d, width=12)),
            64,
            r"attn\.(qkv|proj)$",
            marks=pytest.mark.long,
        ),
    ],
    ids=["vit", "segresnet", "swin_unetr"],
)
def test_the_adapted_forward_is_that_of_the_merged_weights(make: Any, side: int, targets: str, dimensions: int) -> None:
    torch.manual_seed(0)
    plain, inputs = make(dimensions).eval(), torch.rand(2, 1, *[side] * dimensions)
    with torch.no_grad():
        before = plain(inputs)
        adapted = Lora(rank=3, alpha=6, targets=targets, train_also="^$").put_into(make(dimensions)).eval()
        load_fitting(adapted, plain.state_dict(), "the plain network's weights do not fit")
        assert torch.equal(adapted(inputs), before)  # B begins at 0
        random_factors(adapted)
        after = adapted(inputs)
        plain.load_state_dict(merged(adapted, scale=2.0))
        assert (after - before).abs().max() > 1e-3
        torch.testing.assert_close(plain(inputs), after, atol=1e-4, rtol=1e-4)


def trained_by(task: Any, steps: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a network after some steps of the sites' own optimizer, with weight decay, and its tensors before."""
    torch.manual_seed(0)
    model = network_of(task)
    random_factors(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    optimizer = make_optimizer(LocalTraining(learning_rate=0.01, weight_decay=0.1), model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(torch.rand(4, task.in_channels, *task.image_size))
        outputs.square().mean().backward()
        optimizer.step()
    return model, before


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def test_only_adapters_and_the_head_change() -> None:
    model, before = trained_by(ClassificationTask(**VIT, adapters={"kind": "lora", "rank": 2}))
    factors = {name for pair in pairs_of(before).values() for name in pair}
    assert len(factors) == 8  # two projections of two blocks
    assert changed(model, before) == factors | {"head.weight", "head.bias"}


def test_frozen_batch_norms_keep_their_statistics_unless_norms_are_trained() -> None:
    lora = {"kind": "lora", "targets": r"layer4\.1\.conv", "rank": 2}
    model, before = trained_by(ClassificationTask(**RESNET, adapters=lora))
    assert all(".lora_" in name or name.startswith("head.") for name in changed(model, before))
    model, before = trained_by(ClassificationTask(**RESNET, adapters={**lora, "train_norms": True}))
    found = changed(model, before)
    assert {"encoder.bn1.weight", "encoder.bn1.running_mean", "encoder.bn1.num_batches_tracked"} <= found
    assert "encoder.conv1.weight" not in found


def test_the_encoder_alone_may_be_frozen() -> None:
    model, before = trained_by(ClassificationTask(**RESNET, freeze="encoder"))
    assert changed(model, before) == {"head.weight", "head.bias"}
    model, before = trained_by(SegmentationTask(image_size=(32, 32), features=(4,) * 6, freeze=r"^(conv_0|down_)"))
    assert {name.partition(".")[0] for name in changed(model, before)} == {
        *(f"upcat_{i}" for i in range(1, 5)),
        "final_conv",
    }


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"adapters": {"kind": "lora", "targets": "lstm"}}, "targets='lstm' .*patch_embeddings, encoder"),
        ({"adapters": {"kind": "lora", "train_also": "tail"}}, "train_also='tail' is found in no name"),
        ({"freeze": "tail"}, "freeze='tail' is found in no name"),
        ({"freeze": "."}, "freeze='.' leaves nothing"),
        ({"freeze": "encoder", "adapters": "lora"}, "freeze='encoder' beside adapters: "),
    ],
)  # fmt: skip
def test_what_fits_nothing_is_refused_where_a_run_is_put_together(settings: dict[str, Any], told: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=told):
        ClassificationTask(**VIT, **settings).check()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"adapters": "lora2"}, "adapters.* got 'lora2'"),
        ({"adapters": {"kind": "lora", "rank": 0}}, "adapters: rank.* got 0"),
        ({"adapters": {"rank": 4}}, "adapters must be one of"),
        ({"freeze": "("}, r"freeze: '\(' is no regular expression"),
        ({"image_size": (40, 45)}, r"image_size.* got \(40, 45\)"),
    ],
)
def test_bad_settings(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ClassificationTask(**{**VIT, **settings})


def test_sizes_that_a_segmentation_network_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image_size for swin_unetr.* got 48"):
        SegmentationTask(network="swin_unetr", image_size=(64, 48))
    with pytest.raises(ValueError, match=r"width for segresnet.* got 12"):
        SegmentationTask(network="segresnet", width=12)


@pytest.mark.parametrize(("package", "network"), [("peft", "resnet18"), ("einops", "vit_mini")])
def test_an_absent_package_is_one_sentence(package: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    settings = VIT if network == "vit_mini" else RESNET
    task = ClassificationTask(**settings, adapters={"kind": "lora", "targets": "conv"})
    with pytest.raises(ValueError, match=rf"package {package}.*'fairflare\[adapters\]'"):
        network_of(task)


def test_settings_come_by_the_command_line_and_back_from_a_models_file() -> None:
    given = {**VIT, "adapters": "lora", "adapters.rank": 4, "adapters.average": "factors"}
    task = build(ClassificationTask, given)
    assert (task.adapters.rank, task.averages_products) == (4, False)
    told = json.loads(json.dumps(values_of(task)["args"]))
    again = ClassificationTask(**told)
    assert isinstance(again.adapters, Lora)
    assert values_of(again) == values_of(task)
    assert isinstance(ClassificationTask().adapters, NoAdapters)
    assert isinstance(Adapters.parse("lora"), Lora)


def test_a_network_of_the_users_own_gets_adapters_too() -> None:
    class Own(ClassificationTask):
        def build_model(self) -> Any:
            return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.ReLU(), nn.Linear(8, 8))

    task = Own(**RESNET, adapters=Lora(rank=2, targets=r"^1$", train_also=r"^3\."))
    assert changed(*trained_by(task)) == {
        "1.lora_A.default.weight", "1.lora_B.default.weight", "3.weight", "3.bias",
    }  # fmt: skip
