"""Test models written for programs without FairFlare: each kind is read back by its own library."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.core.features.adapting import network_of
from fairflare.prediction.export import export
from fairflare.prediction.predictor import Predictor
from fairflare.prediction.recall import Recalled
from fairflare.prediction.saved_model import SavedModel
from fairflare.tasks.bundles.bundle_config import Bundle
from fairflare.tasks.bundles.sealed import shipped_classes
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.classification import VolumeClassificationTask
from fairflare.tasks.volumes.nnunet import NnUNetTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask
from tests.unit.test_nnunet_task import plan
from tests.unit.test_plain_unet import STORED

TASKS: dict[str, Any] = {
    "2D": lambda: SegmentationTask(num_classes=2, labels=[[1, 2], [2]]),
    "2D, SegResNet": lambda: SegmentationTask(network="segresnet"),
    "3D": lambda: VolumeSegmentationTask(num_classes=2),
    "classes": lambda: ClassificationTask(features=(4, 8, 8, 8)),
    "findings": lambda: ClassificationTask(findings=["a", "b"], allow_phantom=False, features=(4, 8, 8, 8)),
    "DenseNet, grey": lambda: ClassificationTask(network="densenet121", image_size=(64, 64), in_channels=1),
    "3D classes": lambda: VolumeClassificationTask(features=(4, 8, 8, 8)),
    "nnU-Net": lambda: nnunet(2),
    "nnU-Net, softmax": lambda: nnunet(2, output="softmax"),
}
LABELS = {"exclusive": None, "inside": [[1, 2], [2]], "other numbers": [[3], [5]], "crossing": [[1, 3], [2, 3]]}


def nnunet(structures: int, **given: Any) -> NnUNetTask:
    own = copy.deepcopy(plan())
    network = own["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [2 + k for k in range(len(network["strides"]))]
    return NnUNetTask(plan=own, num_classes=structures, **given)


class OwnNetwork(SegmentationTask):
    """Build a network of the tests."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Conv2d(1, 1, 3, padding=1)


class OwnOutputs(SegmentationTask):
    """Read outputs otherwise."""

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.clamp(0, 1)


class OwnNnUNet(NnUNetTask):
    """Build a network of the tests."""

    def build_unet(self) -> torch.nn.Module:
        return torch.nn.Conv3d(1, 1, 3, padding=1)


class OwnDefinition(SegmentationTask):
    """Name another network of MONAI."""

    def definition(self) -> dict[str, Any]:
        return {
            "_target_": "monai.networks.nets.unet.UNet", "spatial_dims": 2, "in_channels": 1, "out_channels": 1,
            "channels": [4, 8], "strides": [2],
        }  # fmt: skip


def predictor(task: Any) -> Predictor:
    torch.manual_seed(1)
    network = network_of(task)
    for name, tensor in network.state_dict().items():  # also what is 0 in the beginning
        if tensor.is_floating_point() and "running" not in name:
            tensor.add_(0.02 * torch.randn_like(tensor))
    saved = SavedModel(Path("model.pt"), network.state_dict(), 3, "FedAvg", {})
    return Predictor(Recalled(task), saved, torch.device("cpu"))


def images(task: Any, number: int = 3) -> torch.Tensor:
    return torch.rand(number, task.in_channels, *task.image_size)


@pytest.mark.parametrize("name", TASKS)
def test_torchscript_gives_the_networks_outputs_and_words_say_how_to_read_them(name: str, tmp_path: Path) -> None:
    own = predictor(TASKS[name]())
    files = export(own, "torchscript", tmp_path / "out")
    assert [file.name for file in files] == ["input.json", "model.ts"]
    given, words = images(own.task), json.loads(files[0].read_text())
    with torch.no_grad():
        read = torch.jit.load(tmp_path / "out" / "model.ts")(given)
        assert torch.allclose(read, own.network.eval()(given), atol=1e-5)
    assert words["input"]["shape"][1:] == list(given.shape[1:])
    assert words["output"]["names"] == ["background"] * (name == "nnU-Net, softmax") + own.names
    assert len(words["output"]["names"]) == read.shape[1]
    assert words["output"]["activation"] == (
        "softmax" if name in ("classes", "DenseNet, grey", "3D classes", "nnU-Net, softmax") else "sigmoid"
    )


@pytest.mark.parametrize("name", [name for name in TASKS if "nnU-Net" not in name])
def test_a_bundle_is_read_by_monai_and_sealed(name: str, tmp_path: Path) -> None:
    from monai.bundle import ConfigParser

    own, out = predictor(TASKS[name]()), tmp_path / "out"
    export(own, "bundle", out)
    parser = ConfigParser()
    parser.read_config(out / "configs" / "inference.json")
    parser["bundle_root"] = str(out)
    parser.get_parsed_content("load")
    sealed = Bundle(out, ["inference"], sealed=shipped_classes())
    network = sealed.make("network")
    network.load_state_dict(torch.load(out / "models" / "model.pt", weights_only=True))
    given = images(own.task)
    with torch.no_grad():
        wanted = own.task.probabilities(own.network.eval()(given)).float()
    for make, net in ((parser.get_parsed_content, parser.get_parsed_content("network")), (sealed.make, network)):
        ready = torch.stack([make("preprocessing")({"image": image.clone()})["image"] for image in given])
        with torch.no_grad():
            outputs = make("inferer")(ready, net.eval())
        found = torch.stack([make("postprocessing")({"pred": one})["pred"] for one in outputs])
        assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["2D", "3D", "classes", "nnU-Net", "nnU-Net, softmax"])
def test_onnx_runs_on_any_number_of_images(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX needs the extra `export`: make test-export")
    own = predictor(TASKS[name]())
    export(own, "onnx", tmp_path / "out")
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    for number in (1, 3):
        given = images(own.task, number)
        with torch.no_grad():
            wanted = own.network.eval()(given)
        assert torch.allclose(torch.from_numpy(session.run(None, {"images": given.numpy()})[0]), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "output"), [*((name, "sigmoid") for name in LABELS if name != "crossing"), ("exclusive", "softmax")]
)
def test_nnunets_folder_has_its_names_and_labels(name: str, output: str, tmp_path: Path) -> None:
    own = predictor(nnunet(2, labels=LABELS[name], class_names=["a", "b"], output=output))
    export(own, "nnunet", tmp_path / "out")
    dataset = json.loads((tmp_path / "out" / "dataset.json").read_text())
    labels, order = {
        "exclusive": ({"a": 1, "b": 2}, None), "inside": ({"a": [1, 2], "b": [2]}, [1, 2]),
        "other numbers": ({"a": [3, 6], "b": [5, 6]}, [3, 5]),
    }[name]  # fmt: skip
    assert dataset["labels"] == {"background": 0, **labels}
    assert dataset.get("regions_class_order") == order
    read = torch.load(tmp_path / "out" / "fold_all" / "checkpoint_final.pth", weights_only=True)
    weights, state = read["network_weights"], own.network.state_dict()
    shift = int(name == "exclusive" and output == "sigmoid")  # an output for the background, which is 0
    for key, tensor in state.items():
        assert torch.equal(weights[key][shift if "seg_layers" in key else 0 :], tensor)
        assert not shift or "seg_layers" not in key or not weights[key][0].any()
    plans = json.loads((tmp_path / "out" / "plans.json").read_text())
    assert plans["image_reader_writer"] == dataset["overwrite_image_reader_writer"] == "NibabelIOWithReorient"
    assert read["init_args"]["configuration"] in plans["configurations"]


def test_nnunets_folder_has_every_name_under_which_nnunet_lists_a_tensor(tmp_path: Path) -> None:
    own, stored = copy.deepcopy(plan()), json.loads(STORED.read_text())["isotropic"]["keys"]
    own["configurations"]["3d_fullres"]["patch_size"] = [16, 16, 16]
    network = own["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network.update(
        features_per_stage=[2, 2, 2, 2], kernel_sizes=[[3, 3, 3]] * 4, strides=[[1, 1, 1], *[[2, 2, 2]] * 3],
        n_conv_per_stage=[2] * 4, n_conv_per_stage_decoder=[2] * 3, n_stages=4,
    )  # fmt: skip
    export(predictor(NnUNetTask(plan=own)), "nnunet", tmp_path / "out")
    read = torch.load(tmp_path / "out" / "fold_all" / "checkpoint_final.pth", weights_only=True)
    assert sorted(read["network_weights"]) == stored


@pytest.mark.parametrize(
    ("task", "kind", "text"),
    [
        (TASKS["2D"], "nnunet", "models of --task nnunet; write"),
        (TASKS["nnU-Net"], "bundle", "none of MONAI's; write .* as nnunet"),
        (lambda: nnunet(2, labels=LABELS["crossing"]), "nnunet", "draws one structure over the other"),
        (lambda: nnunet(2, labels=LABELS["other numbers"], output="softmax"), "nnunet", "exclude each other 1, 2, ..."),
        (lambda: OwnNetwork(), "bundle", "builds its network, or reads its outputs"),
        (lambda: OwnOutputs(), "bundle", "no bundle can hold; write .*torchscript"),
        (lambda: OwnNnUNet(plan=plan()), "nnunet", "by code of its own, .*no nnunet"),
        (lambda: SegmentationTask(adapters="fed_rdn"), "bundle", "is not MONAI's alone .*as torch"),
        (lambda: ClassificationTask(classifier="cosine"), "bundle", "not one of MONAI's by itself"),
        (lambda: ClassificationTask(network="vit_mini"), "bundle", "not one of MONAI's by itself"),
        (lambda: ClassificationTask(projector_dim=4), "bundle", "not one of MONAI's by itself"),
        (TASKS["2D"], "tflite", "--as must be one of .torchscript., .onnx"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_and_leaves_nothing(task: Any, kind: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        export(predictor(task()), kind, tmp_path / "new" / "out")
    assert not [*tmp_path.rglob("*out*")]


def test_a_folder_that_exists_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists, and an export replaces nothing"):
        export(predictor(TASKS["2D"]()), "torchscript", tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("off", [0.3, float("nan")])
def test_what_reads_back_otherwise_is_refused(off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.jit.load
    monkeypatch.setattr(torch.jit, "load", lambda file: (read := load(file)) and (lambda images: read(images) + off))
    with pytest.raises(ValueError, match="as torchscript differs from predict"):
        export(predictor(TASKS["2D"]()), "torchscript", tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def test_without_its_packages_onnx_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r'pip install "fairflare\[export\]"'):
        export(predictor(TASKS["2D"]()), "onnx", tmp_path / "out")
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------------ adapters, own code

CONVOLUTIONS = {"kind": "fair_lora", "groups": 3, "rank": 4, "targets": "conv"}
ADAPTED: dict[str, tuple[Any, str]] = {
    "2D": (lambda: SegmentationTask(adapters={**CONVOLUTIONS, "targets": r"conv_[01][.]conv"}), "bundle"),
    "classes": (lambda: ClassificationTask(features=(4, 8, 8, 8), adapters=CONVOLUTIONS), "bundle"),
    "transformer": (lambda: ClassificationTask(network="vit_mini", adapters="fair_lora"), "torchscript"),
    "3D": (lambda: VolumeSegmentationTask(adapters={**CONVOLUTIONS, "targets": r"down_1.*conv"}), "bundle"),
    "nnU-Net": (lambda: nnunet(2, adapters={**CONVOLUTIONS, "targets": r"encoder.*[.]conv$"}), "nnunet"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_groups_become_weights_of_the_layers_beside_them(name: str, tmp_path: Path) -> None:
    make, kind = ADAPTED[name]
    own = predictor(make())
    given = images(own.task)
    with torch.no_grad():
        wanted = own.network.eval()(given)
        plain = make_plain(own)(given)
    assert not torch.allclose(plain, wanted, atol=1e-3)  # adapters do something
    export(own, kind, tmp_path / "out")
    export(own, "torchscript", tmp_path / "ts")
    assert not [key for key in own.network.state_dict() if "base_layer" in key or "fair_" in key]
    with torch.no_grad():
        assert torch.allclose(torch.jit.load(tmp_path / "ts" / "model.ts")(given), wanted, atol=1e-4)
    if kind == "bundle":
        state = torch.load(tmp_path / "out" / "models" / "model.pt", weights_only=True)
        assert not [key for key in state if "base_layer" in key or "fair_" in key]


def make_plain(own: Predictor) -> torch.nn.Module:
    """Return the network whose adapters have singular values of 0."""
    plain = copy.deepcopy(own.network)
    with torch.no_grad():
        for name, tensor in plain.named_parameters():
            tensor.mul_(0 if "fair_S" in name else 1)
    return plain.eval()


@pytest.mark.parametrize("kind", ["bundle", "torchscript"])
def test_adapters_of_lora_become_weights_of_the_layers_beside_them(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs it: make test-adapters")
    own = predictor(SegmentationTask(adapters={"kind": "lora", "targets": r"conv_[01][.]conv", "rank": 4}))
    given = images(own.task)
    with torch.no_grad():
        wanted = own.network.eval()(given)
        export(own, kind, tmp_path / "out")
        assert not [key for key in own.network.state_dict() if "base_layer" in key or "lora_" in key]
        assert torch.allclose(own.network(given), wanted, atol=1e-4)


def test_a_network_that_the_tasks_own_code_names_is_a_bundle(tmp_path: Path) -> None:
    export(predictor(OwnDefinition()), "bundle", tmp_path / "out")
    sealed = Bundle(tmp_path / "out", ["inference"], sealed=shipped_classes()).make("network")
    assert type(sealed).__name__ == "UNet"


@pytest.mark.parametrize("task", [OwnNetwork, OwnOutputs])
def test_own_code_is_named_beside_the_model(task: Any, tmp_path: Path) -> None:
    own = predictor(task())
    own.notes.append("a doubt")
    own.model.record["own_code"] = ["build_model"]  # type: ignore[index]
    export(own, "torchscript", tmp_path / "out")
    words = json.loads((tmp_path / "out" / "input.json").read_text())
    assert (words["own_code"], words["notes"]) == (["build_model"], ["a doubt"])


# ---------------------------------------------------------------------------------------------------- metadata

#: Keys that MONAI's specification of bundles demands of ``metadata.json`` (1.6 has a new name of one) and its tensors.
MUST = {
    "version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version", "task", "description",
    "authors", "copyright", "network_data_format",
}  # fmt: skip
TENSOR = {
    "type", "format", "modality", "num_channels", "spatial_shape", "dtype", "value_range", "is_patch_data",
    "channel_def",
}  # fmt: skip


@pytest.mark.parametrize("name", ["2D", "3D", "classes", "findings", "3D classes"])
def test_a_bundles_metadata_are_whole_and_true(name: str, tmp_path: Path) -> None:
    from monai.bundle import verify_net_in_out

    own, out = predictor(TASKS[name]()), tmp_path / "out"
    export(own, "bundle", out)
    file = out / "configs" / "metadata.json"
    metadata = json.loads(file.read_text())
    assert {*metadata} >= MUST
    (image,), (pred,) = (metadata["network_data_format"][of].values() for of in ("inputs", "outputs"))
    assert {*image} == {*pred} == TENSOR
    assert image["spatial_shape"] == list(own.task.image_size)
    assert pred["spatial_shape"] == (list(own.task.image_size) if "classes" not in name and name != "findings" else [])
    assert [*pred["channel_def"].values()] == own.names
    assert pred["is_patch_data"] is image["is_patch_data"] is (name == "3D")
    # MONAI itself runs the network on an input of this form, and compares channels and type of the output.
    verify_net_in_out("network_def", meta_file=file, config_file=out / "configs" / "inference.json", device="cpu")
