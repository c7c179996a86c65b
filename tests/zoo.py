"""Read the training configurations of MONAI's model zoo sealed, and train three steps of each that is accepted.

Nothing of the zoo is in this repository: a checkout of it, of which ``models/*/configs`` is enough, is named.
``python -m tests.zoo FOLDER`` writes the table anew.
"""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from monai.utils import set_determinism
from PIL import Image

from fairflare.cli.data.doctor import sealing
from fairflare.tasks.bundles.bundle_config import PLACES, Bundle
from fairflare.tasks.bundles.bundle_parts import BundleParts
from fairflare.tasks.bundles.sealed import shipped_classes

COMMIT = "dfae206df112837d817e78d3727c9f32b3b52e82"  # of github.com/Project-MONAI/model-zoo, 2024-10-11
TABLE = Path(__file__).with_name("zoo.txt")
#: Bundles that are configuration alone, and cannot be sealed all the same; of all others see CASES.
REFUSED = ("mednist_gan", "multi_organ_segmentation", "pancreas_ct_dints_segmentation", "spleen_deepedit_annotation")
#: Readers that need `itk`, which FairFlare does not bring: others in their place, so that what else there is is told.
READERS = {
    "spleen_deepedit_annotation": {"train#preprocessing_transforms#0#reader": "NibabelReader"},
    "pediatric_abdominal_ct_segmentation": {"train#deterministic_transforms#0#reader": "NibabelReader"},
}
SEED = 7
BOTH = ("image", "label")
Item = dict[str, Any]
Make = Callable[[str], Any]  # a new object, or the same again, of a key of the configuration


@dataclass(frozen=True)
class Case:
    """Hold how a bundle that is configuration alone is tried.

    Attributes:
        item: writes the files of one synthetic image into a folder, and returns what the first transform is given.
        overrides: values of the configuration that are other ones, for MONAI's parser alike, such as small patches.
        images: in one batch.
        keys: of input and target behind the transforms; with several targets they go into a dict.
        needs: packages that MONAI's parser imports for this bundle and FairFlare does not bring.
    """

    item: Callable[[Path, np.random.Generator], Item]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    images: int = 2
    keys: tuple[str, Any] = BOTH
    needs: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------ synthetic images


def volume(
    folder: Path, rng: np.random.Generator, side: int = 40, values: tuple[int, ...] = (1,), voxel: float = 1.0,
    images: int = 1, dims: int = 3,
) -> Item:  # fmt: skip
    """Write a ball of each value in noise, as NIfTI; several images of it as a list of files."""
    grid = np.stack(np.meshgrid(*[np.arange(side)] * dims, indexing="ij"))
    label = np.zeros([side] * dims, np.uint8)
    image = rng.normal(50, 10, label.shape).astype(np.float32)
    for value in values:
        centre = rng.uniform(0.35, 0.65, dims) * side
        label[((grid - centre.reshape(-1, *[1] * dims)) ** 2).sum(0) < (side / 6) ** 2] = value
    image += 20 * label
    affine = np.diag([voxel] * 3 + [1.0])
    names = [folder / f"image{number}.nii" for number in range(images)]
    for name in names:
        nibabel.save(nibabel.Nifti1Image(image + rng.normal(0, 3, image.shape).astype(np.float32), affine), name)
    nibabel.save(nibabel.Nifti1Image(label, affine), folder / "label.nii")
    return {"image": [*map(str, names)] if images > 1 else str(names[0]), "label": str(folder / "label.nii")}


def with_class(folder: Path, rng: np.random.Generator, classes: int, make: Callable[..., Item]) -> Item:
    return {**make(folder, rng), "label": int(rng.integers(classes))}


def picture(folder: Path, rng: np.random.Generator) -> Item:
    mask = np.zeros((80, 72), np.uint8)
    mask[20:50, 15:40] = 255
    shown = rng.integers(0, 200, (*mask.shape, 3)) + mask[..., None] // 5
    for name, array in (("image", shown.astype(np.uint8)), ("label", mask)):
        Image.fromarray(array).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in BOTH}


def nuclei(folder: Path, rng: np.random.Generator) -> Item:
    of_nuclei = np.zeros((270, 270, 1), np.int32)
    of_types = np.zeros_like(of_nuclei)
    for number in range(30):
        x, y = rng.integers(10, 250, 2)
        of_nuclei[x : x + 12, y : y + 10] = number + 1
        of_types[x : x + 12, y : y + 10] = number % 4 + 1
    arrays = {
        "image": rng.integers(0, 255, (270, 270, 3)).astype(np.uint8),
        "label_inst": of_nuclei,
        "label_type": of_types,
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {name: str(folder / f"{name}.npy") for name in arrays}


def slide_region(folder: Path, rng: np.random.Generator) -> Item:
    image = rng.integers(0, 255, (3, 768, 768)).astype(np.uint8)
    return {"image": MetaTensor(torch.from_numpy(image)), "label": rng.integers(0, 2, 9).astype(np.float32)}


def slices(folder: Path, rng: np.random.Generator) -> Item:
    return {"image": rng.normal(0, 1, (64, 64)).astype(np.float32), "label": rng.integers(0, 4, (64, 64))}


of = functools.partial
PATCH = [32, 32, 32]
HOVER = {"nucleus_prediction": "label", "horizontal_vertical": "hover_label_inst", "type_prediction": "label_type"}
CASES = {
    "brats_mri_segmentation": Case(of(volume, side=32, values=(1, 2, 4), images=4), images=1),
    "classification_template": Case(of(with_class, classes=4, make=of(volume, dims=2, side=64))),
    "endoscopic_inbody_classification": Case(
        of(with_class, classes=2, make=picture), needs=("ignite",),
        overrides={"train#deterministic_transforms#3#spatial_size": [64, 64]},
    ),
    "endoscopic_tool_segmentation": Case(
        picture, overrides={"train#deterministic_transforms#3#spatial_size": [96, 64]}
    ),
    "pathology_nuclei_segmentation_classification": Case(
        nuclei, images=1, keys=("image", HOVER), needs=("skimage", "torchvision")
    ),
    "pathology_tumor_detection": Case(slide_region, images=1, needs=("ignite", "torchvision")),
    "prostate_mri_anatomy": Case(
        of(volume, side=48, values=(1, 2), voxel=0.5), images=1, needs=("ignite",),
        overrides={"train#random_transforms#6#spatial_size": PATCH},
    ),
    "segmentation_template": Case(of(volume, side=32, values=(1, 2, 3))),
    "spleen_ct_segmentation": Case(
        of(volume, side=48, voxel=1.5), images=1, needs=("ignite",),
        overrides={"train#random_transforms#0#spatial_size": PATCH},
    ),
    "swin_unetr_btcv_segmentation": Case(
        of(volume, side=88, values=(1, 6, 13), voxel=1.5), images=1, needs=("ignite",),
        overrides={
            "train#random_transforms#0#spatial_size": [64, 64, 64], "train#random_transforms#0#num_samples": 1,
            "train#deterministic_transforms#0#reader": "NibabelReader",  # FairFlare does not bring `itk`
            "network_def": {  # as it is but for `img_size`, which MONAI has no longer
                "_target_": "SwinUNETR", "spatial_dims": 3, "in_channels": 1, "out_channels": 14, "feature_size": 48,
                "use_checkpoint": True,
            },
        },
    ),
    "ventricular_short_axis_3label": Case(
        slices, needs=("ignite",), overrides={"im_shape": [64, 64]},
    ),
    "wholeBody_ct_segmentation": Case(
        of(volume, side=48, values=(1, 50, 104), voxel=1.5), images=1, needs=("ignite",),
        overrides={
            "train#random_transforms#0#roi_size": PATCH, "train#deterministic_transforms#6#k_divisible": PATCH,
        },
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ three losses


def by_monai(folder: Path, case: Case) -> Make:
    """Return objects by MONAI's own parser, which evaluates what it reads."""
    parser = ConfigParser()
    (file,) = folder.glob("configs/train.*")
    parser.read_config(str(file))
    for key, value in {**case.overrides, "bundle_root": str(folder), "device": "$torch.device('cpu')"}.items():
        if key not in parser:
            raise KeyError(f"{folder.name} has no {key}")
        parser[key] = copy.deepcopy(value)
    parser.parse()
    places = {part: next((key for key in keys if parser.get(key) is not None), "") for part, keys in PLACES.items()}
    return lambda part: parser.get_parsed_content(places[part])


def losses(make: Make, case: Case, folder: Path, steps: int = 3) -> list[str]:
    """Return the losses of three batches, with a step of the optimizer behind each, to the bit."""
    set_determinism(SEED, use_deterministic_algorithms=None)
    network, criterion, optimizer = make("network"), make("loss"), make("optimizer")
    transform = make("train_preprocessing")
    transform.set_random_state(SEED)
    rng = np.random.default_rng(SEED)
    found: list[str] = []
    network.train()
    try:
        for step in range(steps):
            items = [case.item(_new(folder / f"{step}-{number}"), rng) for number in range(case.images)]
            patches = [patch for item in items for patch in _listed(transform(item))]
            image, target = (_batch(patches, key) for key in case.keys)
            optimizer.zero_grad()
            loss = criterion(network(image), target)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()).hex())
    finally:
        set_determinism(None)
    return found


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _listed(made: Any) -> list[Item]:
    return made if isinstance(made, list) else [made]


def _batch(patches: list[Item], key: Any) -> Any:
    if isinstance(key, dict):
        return {name: _batch(patches, one) for name, one in key.items()}
    found = torch.stack([torch.as_tensor(patch[key]).as_subclass(torch.Tensor) for patch in patches])
    return found.float() if found.dtype == torch.bool else found


# ------------------------------------------------------------------------------------------------ the table


def by_seal(parts: BundleParts) -> Make:
    """Return objects by FairFlare's reader, which runs nothing."""
    network: list[torch.nn.Module] = []

    def make(part: str) -> Any:
        if part == "optimizer":
            return parts.optimizer([*network[0].parameters()])
        found = parts.make(part)
        if part == "network":
            network.append(found)
        return found

    return make


def row(zoo: Path, name: str) -> str:
    """Return a bundle's line: whether it is accepted, and its losses by both readers, or the refused keys."""
    folder, case = zoo / "models" / name, CASES.get(name)
    bundle = Bundle(folder, overrides=case.overrides if case else READERS.get(name), sealed=shipped_classes())
    parts = BundleParts(bundle)
    reasons = [f"{text.partition('configs/train')[2].partition(': ')[2]:.110}" for text in map(str, parts.problems())]
    if own := bundle.own_code():
        reasons = [f"Python of its own: keys {', '.join(own)}", *reasons]
    if reasons or case is None:
        return f"{name} | no | {' ; '.join(reasons)}"
    with tempfile.TemporaryDirectory() as place:
        own = losses(by_seal(parts), case, Path(place) / "own")
        monai = losses(by_monai(folder, case), case, Path(place) / "monai")
    values = " ".join(f"{float.fromhex(loss):.6g}" for loss in own)
    changed = ", ".join(f"{key.rpartition('#')[2]} {_short(value)}" for key, value in case.overrides.items())
    says = "equal" if own == monai else f"DIFFER from {monai}"
    listed = "not tried" if "torchvision" in case.needs else by_doctor(folder, case)
    batches = f"{case.images} images a step{changed and f', with {changed}'}"
    return f"{name} | yes | 3 losses {says} | {batches} | a step from a datalist: {listed} | {values}"


def by_doctor(folder: Path, case: Case) -> str:
    """Return what doctor says of a step from a datalist of made-up images."""
    (tried,) = (one for one in sealing(folder, {"bundle_overrides": case.overrides}) if one.what == "sealed")
    no = "no: its parts can be made, but an image cannot be prepared from its file"
    return (
        tried.text.rpartition("tried on ")[2] if tried.state == "ok" else no if "prepared" in tried.text else tried.text
    )


def _short(value: Any) -> str:
    return "without img_size" if isinstance(value, dict) else str(value)


def rows(zoo: Path) -> list[str]:
    """Return the names of the bundles that train."""
    return sorted(file.parts[-3] for file in zoo.glob("models/*/configs/train.*"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = [row(Path(sys.argv[1]), name) for name in rows(Path(sys.argv[1]))]
    head = f"# MONAI's model zoo at {COMMIT}, by python -m tests.zoo FOLDER: sealed, or the keys that are refused"
    columns = (
        "# bundle | sealed | losses against MONAI's parser, to the bit | batches, values changed for both | "
        "doctor's step | losses"
    )
    TABLE.write_text("\n".join([head, columns, *found, ""]), encoding="utf-8")
