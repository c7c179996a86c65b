"""Test weights of another training that fit in part: names by a map, timm's ViT, grids of another size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from fairflare.base.settings import field_names
from fairflare.core.features.adapting import network_of
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.networks import VITS, build_classifier
from fairflare.tasks.pretrained import load_partial
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.classification import VolumeClassificationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

VIT: dict[str, Any] = {"network": "vit_mini", "image_size": (32, 32), "patch_size": 8}
WIDTH, BLOCKS, HEADS = VITS["vit_mini"]
State = dict[str, torch.Tensor]
pytestmark = pytest.mark.usefixtures("one_thread")
NEEDS_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="LoRA needs peft: make test-adapters")


def timm_vit(grid: int = 4, patch: int = 8) -> State:
    """Return random tensors by timm's names: a ViT with a class token, its position the first of ``pos_embed``."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    state = {
        "cls_token": drawn(1, 1, WIDTH),
        "pos_embed": drawn(1, 1 + grid**2, WIDTH),
        "patch_embed.proj.weight": drawn(WIDTH, 3, patch, patch),
        "patch_embed.proj.bias": drawn(WIDTH),
        "head.weight": drawn(1000, WIDTH),
        "head.bias": drawn(1000),
    }
    layers = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH), "mlp.fc1": (4 * WIDTH, WIDTH),
              "mlp.fc2": (WIDTH, 4 * WIDTH)}  # fmt: skip
    for block in range(BLOCKS):
        for layer, shape in layers.items():
            state |= {f"blocks.{block}.{layer}.weight": drawn(*shape), f"blocks.{block}.{layer}.bias": drawn(shape[0])}
    for norm in [f"blocks.{block}.norm{number}" for block in range(BLOCKS) for number in (1, 2)] + ["norm"]:
        state |= {f"{norm}.weight": 1 + drawn(WIDTH), f"{norm}.bias": drawn(WIDTH)}
    return state


def timm_features(state: State, inputs: torch.Tensor) -> torch.Tensor:
    """Compute the forward pass of a ViT as in its paper, with plain functions."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-6)

    kernel = state["patch_embed.proj.weight"]
    x = F.conv2d(inputs, kernel, state["patch_embed.proj.bias"], stride=kernel.shape[-1]).flatten(2).transpose(1, 2)
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], dim=1) + state["pos_embed"]
    for block in range(BLOCKS):
        name = f"blocks.{block}"
        n, tokens = x.shape[:2]
        qkv = linear(f"{name}.attn.qkv", norm(f"{name}.norm1", x)).reshape(n, tokens, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        shares = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + linear(f"{name}.attn.proj", (shares @ v).transpose(1, 2).reshape(n, tokens, WIDTH))
        x = x + linear(f"{name}.mlp.fc2", F.gelu(linear(f"{name}.mlp.fc1", norm(f"{name}.norm2", x))))
    return norm("norm", x)[:, 0]


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
@pytest.mark.parametrize("adapters", ["none", pytest.param("lora", marks=NEEDS_PEFT)])
def test_a_vit_of_timm_gives_the_same_features(kind: str, adapters: str, tmp_path: Path) -> None:
    state, path = timm_vit(), tmp_path / f"vit.{kind}"
    if kind == "pth":
        torch.save({"model": {f"module.{name}": tensor for name, tensor in state.items()}}, path)
    else:
        save_file(state, path)
    task = ClassificationTask(**VIT, adapters=adapters, initial_weights=str(path))
    model = network_of(task).eval()
    told = task.initialise(model)
    count = len(state)
    assert told.startswith(
        f"initial weights: {count - 2} of {count} tensors of vit.{kind} fitted; not used of the file: "
    )
    for misfit in ("head.weight (1000, 64) (here (8, 64))", "head.bias (1000,) (here (8,))"):
        assert misfit in told
    assert told.endswith("as it began in the network: head.weight, head.bias")
    inputs = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.encoder(inputs), timm_features(state, inputs), atol=1e-5, rtol=1e-4)


def test_positions_of_another_grid_are_interpolated(tmp_path: Path) -> None:
    state = timm_vit(grid=7)
    # A plane of positions: linear in row and column, so that any good interpolation gives a plane again.
    rows, columns = torch.meshgrid(torch.arange(7.0), torch.arange(7.0), indexing="ij")
    state["pos_embed"] = torch.zeros(1, 50, WIDTH)
    state["pos_embed"][0, 1:, 0], state["pos_embed"][0, 1:, 1] = rows.flatten(), columns.flatten()
    torch.save(state, tmp_path / "vit.pt")
    task = ClassificationTask(**{**VIT, "image_size": (64, 48)}, initial_weights=str(tmp_path / "vit.pt"))
    model = network_of(task)
    task.initialise(model)
    found = model.encoder.patch_embedding.position_embeddings.detach()[0].reshape(8, 6, WIDTH)
    wanted_rows, wanted_columns = (torch.arange(8.0) + 0.5) * 7 / 8 - 0.5, (torch.arange(6.0) + 0.5) * 7 / 6 - 0.5
    inner = slice(2, -2)  # at the edge a cubic sees its repeated end
    torch.testing.assert_close(found[inner, 0, 0], wanted_rows[inner], atol=0.05, rtol=0)
    torch.testing.assert_close(found[0, inner, 1], wanted_columns[inner], atol=0.05, rtol=0)


def test_positions_of_a_volume_are_interpolated_and_a_grid_that_is_no_cube_is_refused(tmp_path: Path) -> None:
    same: dict[str, Any] = {"in_channels": 1, "classes": 2, "features": (8,), "norm_momentum": 0.1, "patch_size": 8}
    source = build_classifier("vit_mini", image_size=(16, 16, 16), **same)
    torch.save(source.state_dict(), tmp_path / "cube.pt")
    model = build_classifier("vit_mini", image_size=(32, 16, 24), **same)
    assert "fitted" in load_partial(model, tmp_path / "cube.pt", {})
    positions: Any = model.encoder.patch_embedding
    assert positions.position_embeddings.shape == (1, 24, WIDTH)
    assert torch.equal(model.head.weight, source.head.weight)
    torch.save(build_classifier("vit_mini", image_size=(16, 16, 32), **same).state_dict(), tmp_path / "box.pt")
    with pytest.raises(ValueError, match=r"16 position embeddings .*\(4, 2, 3\)"):
        load_partial(model, tmp_path / "box.pt", {})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("network", "task"),
    [
        ("vit_mini", VolumeClassificationTask(network="vit_mini", volume_size=(32, 48, 32), patch_size=16)),
        ("swin_unetr", VolumeSegmentationTask(network="swin_unetr", patch_size=(64, 64, 64), width=12)),
        ("segresnet", VolumeSegmentationTask(network="segresnet", width=8)),
    ],
)
def test_an_encoder_of_volumes_comes_from_a_file(network: str, task: Any, kind: str, tmp_path: Path) -> None:
    """Check another training's network under other names: the loaded encoder computes the same."""
    torch.manual_seed(3)
    source = network_of(task)
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    state = {f"their.{name}": tensor.clone() for name, tensor in source.state_dict().items()}
    path = tmp_path / f"{network}.{kind}"
    (save_file if kind == "safetensors" else torch.save)(state, path)
    torch.manual_seed(4)
    used = type(task)(**{**{n: getattr(task, n) for n in field_names(type(task))}, "initial_keys": {r"^their\.": ""},
                         "initial_weights": str(path)})  # fmt: skip
    model = network_of(used).eval()
    size = task.volume_size if network == "vit_mini" else task.patch_size
    inputs = torch.rand(1, 1, *size)
    with torch.no_grad():
        assert not torch.allclose(model(inputs), source.eval()(inputs))
        told = used.initialise(model)
        assert f"{len(state)} of {len(state)} tensors" in told, told
        assert torch.equal(model.eval()(inputs), source(inputs))
    gone = type(used)(**{**{n: getattr(used, n) for n in field_names(type(used))},
                         "initial_weights": str(tmp_path / "brain_vit.pt")})  # fmt: skip
    with pytest.raises(ValueError, match=r"brain_vit\.pt"):
        gone.initialise(model)


def test_a_vits_volume_is_whole_patches() -> None:
    with pytest.raises(ValueError, match=r"^volume_size.* got \(32, 40, 32\)$"):
        VolumeClassificationTask(network="vit_mini", volume_size=(32, 40, 32))


def test_names_are_mapped_and_what_does_not_fit_is_told(tmp_path: Path) -> None:
    task = SegmentationTask(network="segresnet", width=8, image_size=(32, 32), initial_keys={"^net_(.*)_x": r"\1"})
    source = network_of(task).state_dict()
    named = {f"net_{name}_x": tensor for name, tensor in source.items() if not name.startswith("conv_final")}
    torch.save({**named, "extra": torch.zeros(3), "conv_final.2.conv.bias": torch.zeros(7)}, tmp_path / "a.pt")
    model = network_of(task)
    told = task.initialise(model, str(tmp_path / "a.pt"))
    assert told.startswith(
        f"initial weights: {len(named)} of {len(named) + 2} tensors of a.pt fitted; not used of the file"
    )
    assert "file: extra (3,), conv_final.2.conv.bias (7,) (here (1,)); as it began in the network: conv_final" in told
    random = ("conv_final.2.conv.weight", "conv_final.2.conv.bias")  # its norm begins with ones everywhere
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source[name]) != (name in random), name


@pytest.mark.parametrize(
    ("content", "keys", "told"),
    [
        (None, {}, "gone.pt does not exist; .*put the file"),
        ({"a.b": torch.zeros(2)}, {}, "none of its 1 tensors .*initial_keys"),
        ({"x.a": torch.zeros(2), "y.a": torch.zeros(2)}, {"^[xy]": ""}, "two tensors become '.a', .*'y.a'"),
        ({"a": torch.full((2,), torch.nan)}, {}, "values that are NaN or infinite"),
        ({"a": "text"}, {}, "holds no tensors"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(content: Any, keys: dict[str, str], told: str, tmp_path: Path) -> None:
    path = tmp_path / ("gone.pt" if content is None else "a.pt")
    if content is not None:
        torch.save(content, path)
    task = SegmentationTask(network="segresnet", width=8, image_size=(32, 32), initial_keys=keys)
    with pytest.raises(ValueError, match=told):
        task.initialise(network_of(task), str(path))


@NEEDS_PEFT
def test_without_a_map_a_file_must_fit_as_a_whole_also_beside_adapters(tmp_path: Path) -> None:
    given: dict[str, Any] = {"features": (8, 8, 16, 16), "image_size": (32, 32)}
    plain = network_of(ClassificationTask(**given))
    torch.save(plain.state_dict(), tmp_path / "a.pt")
    task = ClassificationTask(**given, adapters={"kind": "lora", "targets": "layer4", "rank": 2})
    model = network_of(task).eval()
    assert "encoder and head" in task.initialise(model, str(tmp_path / "a.pt"))
    inputs = torch.rand(2, 3, 32, 32)
    assert torch.equal(model(inputs), plain.eval()(inputs))
    torch.save({name: t for name, t in plain.state_dict().items() if "bn1" not in name}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"fit the network: missing bn1\.weight"):
        task.initialise(model, str(tmp_path / "b.pt"))
