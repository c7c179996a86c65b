"""Write the images of a phantom (synthetic federation) to disk as a prepared data set, so that scripts can use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fairflare.base.checks import choice, whole
from fairflare.base.for_types import Unpack
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.writing import Form, Writing, write_sites
from fairflare_lab.phantoms import ABDOMEN, PELVIS, PHANTOMS, PhantomPlan, class_site
from fairflare_lab.phantoms.anatomy import Patient
from fairflare_lab.phantoms.prostate import SLICES

PROSTATE = "prostate"
VOLUMES = "volumes3d"
NAMES = (PROSTATE, VOLUMES, *PHANTOMS)
SAME_EVERYWHERE = ("test_clean", "test_corrupted")


def prepare_phantom(
    name: str, out_dir: str | Path, *, sites: int | Sequence[str] = 6, image_size: int | None = None,
    cases: float = 1.0, plan: PhantomPlan | None = None, drawing: Mapping[str, Any] | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:  # fmt: skip
    """Write the synthetic images that a task draws for its sites, as PNG files with datalists that mark them synthetic.

    ``"volumes3d"``, which no task draws, are NIfTI volumes with labels for a MONAI bundle.

    Args:
        name: ``"prostate"`` (masks), ``"volumes3d"``, or with classes ``"dermoscopy"``, ``"dermoscopy7"``,
            ``"fundus"``, ``"endoscopy"``.
        out_dir: folder to write to.
        sites: number of sites; for the prostate and the volumes, names are possible too.
        image_size: height and width in pixels; default, as in the tasks, 64 (prostate), 32 (volumes, with 24 slices)
            and 48 (phantoms with classes).
        cases: factor on the number of patients of the prostate and the volumes.
        plan: for a phantom with classes, the plan with numbers of images, partition and corruption; the other arguments
            override its name, sites, seed and (if given) size. Default: a plan with default values.
        drawing: further arguments of :meth:`fairflare_lab.phantoms.anatomy.Anatomy.patients`, such as ``channels`` of
            volumes, which are the last of a file's four axes.
        seed, overwrite and others: arguments of :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        Folder of each site.
    """
    seed = whole("seed", writing.get("seed", 0), low=0)
    if choice("phantom", name, NAMES) in (PROSTATE, VOLUMES):
        names = [f"site-{i + 1}" for i in range(whole("sites", sites))] if isinstance(sites, int) else list(sites)
        edge = whole("image_size", image_size or (64 if name == PROSTATE else 32), low=16)
        anatomy, slices = (PELVIS, SLICES) if name == PROSTATE else (ABDOMEN, edge * 3 // 4)
        drawn = {
            site: anatomy.patients(site, size=(edge, edge, slices), seed=seed, cases=cases, **(drawing or {}))
            for site in names
        }
        with TemporaryDirectory(prefix="fairflare-volumes-") as folder:
            place = None if name == PROSTATE else Path(folder)
            items = {site: _of_patients(site, patients, place) for site, patients in drawn.items()}
            return write_sites(items, out_dir, None, Form(synthetic=True), **writing)
    number = whole("sites", sites)
    scale: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    whole_plan = replace(plan or PhantomPlan(phantom=name), phantom=name, num_sites=number, seed=seed, **scale)
    kind = whole_plan.kind
    bad = whole_plan.corrupted_sites
    quality = f"{whole_plan.corruption}:{whole_plan.severity}" if bad else None
    tones = {kind.called: {"kind": "category", "values": list(kind.attributes)}} if whole_plan.attributes else {}
    form = Form(
        class_names=kind.class_names, class_groups={group: list(members) for group, members in kind.groups.items()},
        label_noise={f"site-{i + 1}": whole_plan.label_noise for i in range(number) if whole_plan.has_label_noise(i)},
        synthetic=True, dealing=Dealing(corrupt=quality, corrupt_sites=bad), attributes=tones,
    )  # fmt: skip
    return write_sites(
        {f"site-{i + 1}": _classes(whole_plan, i) for i in range(number)}, out_dir, None, form, **writing
    )


def _of_patients(site: str, splits: Mapping[str, list[Patient]], folder: Path | None) -> Iterator[Item]:
    """Yield each patient's slices or, with a folder, the volume.

    Volumes are written as files into the folder, and copied from there, since arrays would become PNG.
    """
    for split, patients in splits.items():
        for i, patient in enumerate(patients):
            name = f"{split}-{i:03d}"
            if folder is not None:
                volume, label = (Path(folder, site, kind, f"{name}.nii") for kind in ("images", "labels"))
                patient.write(volume, label)
                yield Item(name, name, volume, label, name, splits=(split,), spacing=patient.voxel)
                continue
            for k, (image, mask) in enumerate(zip(patient.image[0].T, patient.label.T, strict=True)):
                yield Item(f"{name}_{k}", name, image, mask, name, splits=(split,), volume=name)


def _classes(plan: PhantomPlan, index: int) -> Iterator[Item]:
    site, kind = class_site(plan, index), plan.kind
    for split in plan.splits:
        for i, (image, label) in enumerate(zip(site.images[split], site.labels[split].tolist(), strict=True)):
            name = f"{split}_{i:05d}"
            person = {kind.called: kind.attributes[site.attributes[split][i]]} if plan.attributes else None
            yield Item(name, name, image, label, splits=(split,), shared=split in SAME_EVERYWHERE, attributes=person)
