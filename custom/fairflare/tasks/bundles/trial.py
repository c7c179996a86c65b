"""Train a sealed bundle for one step on made-up cases, by the path that a site's datalist takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fairflare.base.disk.temporary import OwnedFolder
from fairflare.data.listing.checking import SPLITS
from fairflare.tasks.bundle import MonaiBundleTask
from fairflare.tasks.bundles.bundle_config import telling
from fairflare.tasks.bundles.bundle_data import takes_class_numbers

SIDES = 96, 256  # of a made-up image, where the metadata does not say; at most


def train_once(task: MonaiBundleTask) -> str:
    """Open a datalist of made-up images as a site does, check it, and take one step of the bundle's optimizer.

    Channels and axes are those of the network's first convolution, sizes those of the input in the metadata.

    Returns:
        What the images were, in words.

    Raises:
        BundleError: a part fails on the images.
        DataError: the images cannot be prepared.
    """
    with OwnedFolder("trial") as place, telling("a step on made-up images fails"):
        model, train = task.build_model().train(), task.parts.kept("train_preprocessing")
        channels, *axes = next(weight.shape[1:] for weight in model.parameters() if weight.ndim in (4, 5))
        sides = task.parts.bundle.get("_meta_#network_data_format#inputs#image#spatial_shape") or ()
        size = [min(side, SIDES[1]) if isinstance(side, int) else SIDES[0] for side in sides]
        size = size if len(size) == len(axes) else [SIDES[0] for _ in axes]
        spacing = next(
            (
                float(step.spacing_transform.pixdim[0])
                for step in train.flatten().transforms
                if hasattr(step, "spacing_transform")
            ),
            1.0,
        )
        numbers = takes_class_numbers(train, task.label_key)
        lists = {
            split: [{"image": image, "label": number % 2 if numbers else label}]
            for number, split in enumerate(SPLITS)
            for image, label in [_write_noise(place.path / split, channels, size, spacing)]
        }
        (place.path / "datalist.json").write_text(json.dumps(lists), encoding="utf-8")
        data = task.open_site("trial", {"data_root": str(place.path)})
        task.check_site(model, data, torch.device("cpu"))
        next(iter(data.batches("validation", batch_size=1)))
        inputs, targets = next(iter(data.batches("training", batch_size=1, shuffle_seed=0, augment=True)))
        task.loss(model.train()(inputs[:2]), targets[:2]).backward()
        if task.has_optimizer:
            task.make_optimizer([*model.parameters()]).step()
    return (
        f"{' x '.join(map(str, size))}, {channels} channel(s), {'the number of a class' if numbers else 'a file'} as "
        "the label"
    )


def _write_noise(folder: Path, channels: int, size: Sequence[int], spacing: float) -> tuple[str | list[str], str]:
    """Write noise with a brighter box and the box as its mask; return their paths as a datalist has them.

    Pictures are PNG; volumes are NIfTI, a file a channel.
    """
    import nibabel
    from PIL import Image

    folder.mkdir()
    rng, mask = np.random.default_rng(0), np.zeros(size, np.uint8)
    mask[tuple(slice(side // 3, 2 * side // 3) for side in size)] = 1
    image = rng.integers(1, 100, (*size, channels)) + 100 * mask[..., None]
    if len(size) == 2 and channels in (1, 3):
        for name, pixels in (("image", image), ("label", mask)):
            Image.fromarray(pixels.astype(np.uint8).squeeze()).save(folder / f"{name}.png")
        return f"{folder.name}/image.png", f"{folder.name}/label.png"
    affine = np.diag([spacing] * 3 + [1.0])
    for name, voxels in (("label", mask), *((f"image{k}", image[..., k]) for k in range(channels))):
        nibabel.save(nibabel.Nifti1Image(voxels.astype(np.int16), affine), folder / f"{name}.nii")
    images = [f"{folder.name}/image{k}.nii" for k in range(channels)]
    return images if channels > 1 else images[0], f"{folder.name}/label.nii"
