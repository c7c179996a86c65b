"""Provide small MONAI bundles and volumes for tests; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fairflare.data.datalist import write_datalist

BOTH = ["image", "label"]


def net(dims: int, classes: int) -> dict[str, Any]:
    return {
        "_target_": "UNet", "spatial_dims": dims, "in_channels": 1, "out_channels": classes,
        "channels": [4, 8, 16], "strides": [2, 2], "norm": "batch",
    }  # fmt: skip


def train_config(dims: int = 3, classes: int = 2, patch: int = 16, patches: int = 2) -> dict[str, Any]:
    """Return a training configuration in the form of the model zoo, with transforms, a missing dataset and handlers."""
    roi = [patch] * dims
    return {
        "imports": ["$import glob", "$import os"],
        "bundle_root": "/nowhere",
        "dataset_dir": "/nowhere/data",
        "images": "$sorted(glob.glob(os.path.join(@dataset_dir, '*.nii')))",
        "device": "$torch.device('cuda:7')",
        "num_classes": classes,
        "network_def": {**net(dims, classes), "out_channels": "@num_classes"},
        "network": "$@network_def.to(@device)",
        "loss": {"_target_": "DiceCELoss", "to_onehot_y": True, "softmax": True},
        "optimizer": {"_target_": "torch.optim.Adam", "params": "$@network.parameters()", "lr": 0.01},
        "train": {
            "deterministic_transforms": [
                {"_target_": "LoadImaged", "keys": BOTH},
                {"_target_": "EnsureChannelFirstd", "keys": BOTH},
                {"_target_": "ScaleIntensityd", "keys": "image"},
                {"_target_": "EnsureTyped", "keys": BOTH, "device": "@device"},
            ],
            "random_transforms": [
                {
                    "_target_": "RandCropByPosNegLabeld", "keys": BOTH, "label_key": "label", "spatial_size": roi,
                    "num_samples": patches,
                },
                {"_target_": "RandFlipd", "keys": BOTH, "prob": 0.5, "spatial_axis": 0},
                {"_target_": "RandScaleIntensityd", "keys": "image", "prob": 1.0, "factors": 0.2},
            ],
            "preprocessing": {
                "_target_": "Compose",
                "transforms": "$@train#deterministic_transforms + @train#random_transforms",
            },
            "dataset": {"_target_": "Dataset", "data": "@images", "transform": "@train#preprocessing"},
            "dataloader": {"_target_": "DataLoader", "dataset": "@train#dataset", "batch_size": 2},
            "inferer": {"_target_": "SimpleInferer"},
            "postprocessing": {
                "_target_": "Compose",
                "transforms": [
                    {"_target_": "Activationsd", "keys": "pred", "softmax": True},
                    {
                        "_target_": "AsDiscreted", "keys": ["pred", "label"], "argmax": [True, False],
                        "to_onehot": "@num_classes",
                    },
                ],
            },
            "trainer": {"_target_": "SupervisedTrainer", "loss_function": "@loss", "optimizer": "@optimizer"},
        },
        "validate": {
            "preprocessing": {"_target_": "Compose", "transforms": "%train#deterministic_transforms"},
            "inferer": {
                "_target_": "SlidingWindowInferer", "roi_size": roi, "sw_batch_size": 2, "overlap": 0.25,
            },
            "postprocessing": "%train#postprocessing",
            "key_metric": {
                "val_mean_dice": {
                    "_target_": "MeanDice", "include_background": False,
                    "output_transform": "$monai.handlers.from_engine(['pred', 'label'])",
                }
            },
        },
        "initialize": ["$monai.utils.set_determinism(seed=123)"],
        "run": ["$@train#trainer.run()"],
    }  # fmt: skip


METADATA = {
    "version": "0.1.0",
    "monai_version": "1.3.0",
    "network_data_format": {
        "outputs": {"pred": {"channel_def": {"0": "background", "1": "organ", "2": "lesion"}}},
    },
}


def write_bundle(folder: Path, config: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None) -> Path:
    configs = folder / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    (configs / "train.json").write_text(json.dumps(train_config() if config is None else config, indent=1))
    (configs / "metadata.json").write_text(json.dumps(METADATA if metadata is None else metadata))
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "model.pt").write_bytes(b"weights that no job carries")
    return folder


def write_volumes(
    folder: Path, *, size: tuple[int, ...] = (20, 18, 17), counts: tuple[int, int, int] = (3, 2, 2), seed: int = 0,
    classes: int = 2, **extra: Any,
) -> dict[str, Any]:  # fmt: skip
    """Write bright balls in noise as NIfTI volumes of slightly different sizes, and return the site's settings."""
    import nibabel

    rng = np.random.default_rng(seed)
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, count in zip(("training", "validation", "test"), counts, strict=True):
        for number in range(count):
            shape = [side + number for side in size]
            grid = np.stack(np.meshgrid(*(np.arange(side) for side in shape), indexing="ij"))
            label = np.zeros(shape, np.uint8)
            image = rng.normal(100, 10, shape)
            for value in range(1, classes):
                centre = np.array([rng.uniform(0.3, 0.7) * side for side in shape]).reshape(-1, *[1] * len(shape))
                inside = ((grid - centre) ** 2).sum(0) < 16
                label[inside] = value
                image[inside] += 80 * value
            name = f"{split}{number}"
            for kind, array in (("images", image.astype(np.float32)), ("labels", label)):
                (folder / kind).mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / kind / f"{name}.nii")
            splits.setdefault(split, []).append({"image": f"images/{name}.nii", "label": f"labels/{name}.nii"})
    write_datalist(folder / "datalist.json", splits, **extra)
    return {"data_root": str(folder)}


def two_sites(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the content of ``local/fairflare.json`` for two sites."""
    return {
        "sites": {
            site: write_volumes(folder / site, seed=seed, counts=(2 + seed, 1, 1), **more)
            for seed, site in enumerate(("site-1", "site-2"))
        }
    }
