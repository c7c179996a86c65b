"""Write a run's model for programs that do not have FairFlare: TorchScript, ONNX, a MONAI bundle, nnU-Net's folder.

What is written is read back first, and compared with what ``fairflare predict`` computes; it appears in its place whole
or not at all. A file of words beside it says what the network expects and gives.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from fairflare import __version__
from fairflare.base.checks import choice, refuse
from fairflare.base.own_errors import describe_error
from fairflare.core.plans.document import FULL, READER, resampling
from fairflare.prediction.masks import labels_of
from fairflare.prediction.predictor import Predictor
from fairflare.tasks.adapters import merge_adapters
from fairflare.tasks.networks import Classifier, encoder_definition, make_network, mismatch
from fairflare.tasks.shared.classes import ClassTask
from fairflare.tasks.volumes.nnunet import NnUNetTask
from fairflare.tasks.volumes.plain_unet import PlainUNet
from fairflare.tasks.volumes.plan_file import read_plan
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

NEAR = 1e-4  # largest difference of a probability from that of `predict`
Words = dict[str, Any]
Network = Callable[[torch.Tensor], torch.Tensor]


def export(predictor: Predictor, kind: str, out: Path) -> list[Path]:
    """Write a model into a new folder, and return the files in it.

    Args:
        predictor: the model with its task, on the CPU; adapters of its network are added to the layers beside them.
        kind: a key of :data:`KINDS`.
        out: the folder, which must not exist.

    Raises:
        ValueError: the folder exists, the model cannot be written so, a package is absent, or what was written computes
            something else than ``predict``; then nothing is left behind.
    """
    write, words, path = KINDS[choice("--as", kind, KINDS)], describe_network(predictor), predictor.model.path
    task, network = predictor.task, predictor.network.eval()
    refuse({
        f"{path}: the task builds its network, or reads its outputs, by code of its own, which no {kind} can hold; "
        "write the model as torchscript or onnx": (
            kind in ("bundle", "nnunet")
            and task.is_overridden("build_model", "build_unet", "outputs", "probabilities")
        ),
        f"{out} exists, and an export replaces nothing; give another folder": out.exists(),
    })  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    images = torch.rand([2, *words["input"]["shape"][1:]], generator=torch.Generator().manual_seed(0))
    inputs = torch.cat([*images[:, None]], 2) if words["output"]["windows"] else images  # one volume, several windows
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(place) / out.name
        try:
            with torch.no_grad():
                expected = task.probabilities(task.outputs(network, inputs))
                merge_adapters(network)
                networks: list[Any] = write(predictor, folder, words, images)
                read_back = [task.probabilities(task.outputs(one, inputs)) for one in networks]
        except Exception as error:  # what a network's own code, PyTorch, MONAI or ONNX raise
            extra = '; pip install "fairflare[export]"' * isinstance(error, ImportError)
            raise ValueError(f"{path} cannot be written as {kind}: {describe_error(error)}{extra}") from error
        if not (off := max(float((one - expected).abs().max()) for one in read_back)) <= NEAR:
            raise ValueError(f"{path} written as {kind} differs from predict by {off:.2g} in a probability")
        _write(folder / "input.json", words)
        folder.rename(out)
    return sorted(file for file in out.rglob("*") if file.is_file())


def describe_network(predictor: Predictor) -> dict[str, Any]:
    """Return what a network expects and gives, as far as its file does not say it."""
    task: Any = predictor.task
    placed = ("orientation", "spacing", "resize")
    softmax, windows = (
        task.exclusive or (isinstance(task, ClassTask) and task.findings is None),
        isinstance(task, VolumeSegmentationTask),
    )
    return {
        "made_by": f"fairflare {__version__}: {predictor.model.describe()}", "use": "research only",
        "input": {
            "shape": ["any number", task.in_channels, *task.image_size], "channels": list(task.channels or ()),
            "values": task.intensities,
        },
        "notes": predictor.notes, "own_code": list(predictor.model.record.get("own_code") or []),
        "preprocessing": {name: str(getattr(task, name)) for name in placed if getattr(task, name, None) is not None},
        "output": {
            "names": ["background"] * task.exclusive + predictor.names,
            "activation": "softmax" if softmax else "sigmoid",
            "windows": {"overlap": task.overlap, "weights": "gaussian"} if windows else None,
        },
    }  # fmt: skip


def _write(file: Path, content: Mapping[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1), "utf-8")
    return file


def _torchscript(predictor: Predictor, folder: Path, words: Words, images: torch.Tensor) -> list[Network]:
    file = str(_write(folder / "model.ts", {}))
    torch.jit.trace(predictor.network, images, check_trace=False).save(file)
    return [torch.jit.load(file)]


def _onnx(predictor: Predictor, folder: Path, words: Words, images: torch.Tensor) -> list[Network]:
    import onnxruntime
    import onnxscript  # noqa: F401  (which brings onnx)

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of torchvision, which nothing here needs
    file = _write(folder / "model.onnx", {})
    torch.onnx.export(
        predictor.network, (images,), file, dynamo=True, external_data=False, verbose=False, input_names=["images"],
        output_names=["outputs"], dynamic_shapes=({0: torch.export.Dim("number", min=1)},),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return [lambda inputs: torch.from_numpy(session.run(None, {"images": inputs.numpy()})[0])]


# ---------------------------------------------------------------------------------------------------- MONAI


def _bundle(predictor: Predictor, folder: Path, words: Words, images: torch.Tensor) -> list[Network]:
    """Write a MONAI bundle, which is read back by MONAI's parser and, without running any of it, by FairFlare's."""
    from monai.bundle import ConfigParser

    from fairflare.tasks.bundles.bundle_config import Bundle
    from fairflare.tasks.bundles.sealed import shipped_classes

    (definition, state, steps), (_, channels, *size) = _define_for_monai(predictor), words["input"]["shape"]
    if problems := mismatch(make_network(definition).state_dict(), state):
        raise ValueError(f"its network is not MONAI's alone ({problems}); write it as torchscript or onnx")
    windows, named = words["output"]["windows"], dict(enumerate(words["output"]["names"]))
    masks = predictor.kind == "segmentation"
    file = _write(folder / "configs" / "inference.json", {
        "bundle_root": ".", "device": "$torch.device('cpu')", "network_def": definition,
        "network": "$@network_def.to(@device)",
        "inferer": {
            "_target_": "SlidingWindowInferer", "roi_size": size, "sw_batch_size": 1, "mode": "gaussian",
            "overlap": windows["overlap"],
        } if windows else {"_target_": "SimpleInferer"},
        "preprocessing": {"_target_": "Compose", "transforms": steps},
        "postprocessing": {"_target_": "Compose", "transforms": [
            {"_target_": "Activationsd", "keys": "pred", words["output"]["activation"]: True}
        ]},
        "load": "$@network.load_state_dict(torch.load(@bundle_root + '/models/model.pt', weights_only=True))",
    })  # fmt: skip
    _write(folder / "configs" / "metadata.json", {
        "version": "1.0.0", "task": f"{predictor.kind}: {', '.join(words['output']['names'])}",
        "description": f"{words['made_by']}; input.json says how images become inputs", "intended_use": words["use"],
        "authors": "the sites of the federation", "copyright": "of the sites of the federation",
        "monai_version": version("monai"), "pytorch_version": version("torch"), "numpy_version": version("numpy"),
        "required_packages_version": {}, "network_data_format": {
            "inputs": {"image": {
                "type": "image", "format": "magnitude", "modality": "n/a", "num_channels": channels,
                "spatial_shape": size, "dtype": "float32", "value_range": [0, 1],
                "is_patch_data": windows is not None,
                "channel_def": dict(enumerate(words["input"]["channels"] or ["image"] * channels)),
            }},
            "outputs": {"pred": {
                "type": "image" if masks else "probabilities", "format": "classes", "modality": "n/a",
                "num_channels": len(named), "spatial_shape": size * masks, "dtype": "float32", "value_range": [0, 1],
                "is_patch_data": windows is not None, "channel_def": named,
            }},
        },
    })  # fmt: skip
    torch.save(state, _write(folder / "models" / "model.pt", {}))
    parser = ConfigParser({**ConfigParser.load_config_file(file), "bundle_root": str(folder)})
    parser.get_parsed_content("load")
    sealed = Bundle(folder, ["inference"], sealed=shipped_classes())
    parts = {key: sealed.make(key) for key in ("network", "inferer", "preprocessing", "postprocessing")}
    parts["network"].load_state_dict(state)
    return [partial(_infer, make) for make in (parser.get_parsed_content, parts.__getitem__)]


def _infer(make: Callable[[str], Any], inputs: torch.Tensor) -> torch.Tensor:
    """Return what a bundle's inferer gets from its network for images in the form that FairFlare's network takes."""
    images = torch.stack([make("preprocessing")({"image": image.clone()})["image"] for image in inputs])
    return cast("torch.Tensor", make("inferer")(images, make("network").eval()))


def _define_for_monai(predictor: Predictor) -> tuple[Words, dict[str, torch.Tensor], list[Words]]:
    """Return the network as one of MONAI's alone: its definition, its tensors, and transforms of the inputs before it.

    Raises:
        ValueError: it is none of MONAI's.
    """
    task, network, state = predictor.task, predictor.network, predictor.network.state_dict()
    if not isinstance(task, ClassTask):
        return task.definition(), state, []
    usual = isinstance(network, Classifier) and task.network in ("resnet18", "densenet121")
    if not usual or task.classifier != "linear" or any(not name.startswith(("encoder.", "head.")) for name in state):
        raise ValueError("this classifier is not one of MONAI's by itself; write it as torchscript or onnx")
    definition = encoder_definition(
        task.network, len(task.image_size), task.in_channels, task.features, task.max_pool, task.classes, head=True
    )
    head = "fc." if task.network == "resnet18" else "class_layers.out."
    renamed = {re.sub("^encoder[.]", "", re.sub("^head[.]", head, name)): state[name] for name in state}
    mean, std = (
        torch.tensor(values).expand(task.in_channels).tolist() for values in cast("Classifier", network).statistics
    )
    return definition, renamed, [{
        "_target_": "NormalizeIntensityd", "keys": "image", "subtrahend": mean, "divisor": std, "channel_wise": True,
    }]  # fmt: skip


# -------------------------------------------------------------------------------------------------- nnU-Net


def _nnunet(predictor: Predictor, folder: Path, words: Words, images: torch.Tensor) -> list[Network]:
    """Write the folder that nnU-Net's predictor reads, without mirroring, as ``predict`` does not mirror.

    Structures that exclude each other are written as labels: beside the background's output, which is 0 unless the
    model has one (``output=softmax``), the largest output is that of the structure which ``predict`` takes. Structures
    inside others are written as regions.
    """
    task = predictor.task
    if not isinstance(task, NnUNetTask):
        raise ValueError("this is for models of --task nnunet; write others as torchscript, onnx or bundle")
    labels, number, given = labels_of(task), task.num_classes, cast("Words", task.plan)
    exclusive, last = (
        labels == {k + 1: [k] for k in range(number)},
        {inside[-1]: label for label, inside in labels.items()},
    )
    if len(last) < max(number, len(labels)) or (task.exclusive and not exclusive):
        raise ValueError(
            "nnU-Net draws one structure over the other, and numbers those that exclude each other 1, 2, ..., which "
            f"labels={task.structures} does not allow; write the model as torchscript or onnx"
        )
    added = exclusive and not task.exclusive  # an output of the background
    further = [max(labels) + 1] * all(len(one) == 1 for one in task.structures)  # one region must have two labels
    plans = {
        **given, "image_reader_writer": READER,
        "configurations": {FULL: {**given["configurations"][FULL], **resampling(separate=False)}},
    }  # fmt: skip
    dataset = {
        "channel_names": {str(k): name for k, name in enumerate(task.channels or ["image"])},
        "labels": {
            "background": 0,
            **{
                name: k + 1 if exclusive else [*one, *further]
                for k, (name, one) in enumerate(zip(predictor.names, task.structures, strict=True))
            },
        },
        **({} if exclusive else {"regions_class_order": [last[k] for k in range(number)]}),
        "numTraining": 0, "file_ending": ".nii.gz", "overwrite_image_reader_writer": READER,
    }  # fmt: skip
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in predictor.network.state_dict().items():
        rows = torch.cat([0 * tensor[:1], tensor]) if added and ".seg_layers." in name else tensor
        for alias in {name, name.replace(".conv.", ".all_modules.0.").replace(".norm.", ".all_modules.1.")}:
            weights |= {alias: rows} | ({f"decoder.{alias}": rows} if name.startswith("encoder.") else {})
    _write(folder / "dataset.json", dataset)
    written = read_plan(json.loads(_write(folder / "plans.json", plans).read_text("utf-8")))
    file = _write(folder / "fold_all" / "checkpoint_final.pth", {})
    torch.save({
        "network_weights": weights, "trainer_name": "nnUNetTrainer", "inference_allowed_mirroring_axes": None,
        "init_args": {"plans": plans, "configuration": FULL, "fold": "all", "dataset_json": dataset},
        "current_epoch": predictor.model.made, "optimizer_state": None, "grad_scaler_state": None, "logging": {},
        "_best_ema": None,
    }, file)  # fmt: skip
    network = PlainUNet(task.in_channels, number + exclusive, **written.full.network).eval()
    read = torch.load(file, weights_only=True)["network_weights"]
    network.load_state_dict({name: read[name] for name in network.state_dict()})
    return [lambda inputs: (heads := network(inputs))[:, int(added) :] - added * heads[:, :1]]


#: What writes a model of each kind, and returns the networks that are read back.
KINDS: Mapping[str, Callable[[Predictor, Path, Words, torch.Tensor], list[Network]]] = {
    "torchscript": _torchscript, "onnx": _onnx, "bundle": _bundle, "nnunet": _nnunet,
}  # fmt: skip
