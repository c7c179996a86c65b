"""Write the images of a phantom (synthetic federation) to disk as a prepared data set, so that scripts can use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fairflare.base.checks import choice, whole
from fairflare.base.for_types import Unpack
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.writing import Form, Writing, write_sites
from fairflare_lab.phantoms import PHANTOMS, PhantomPlan, class_site, prostate_site, volumes_site
from fairflare_lab.phantoms.prostate import SLICES

PROSTATE = "prostate"
VOLUMES = "volumes3d"
NAMES = (PROSTATE, VOLUMES, *PHANTOMS)
SAME_EVERYWHERE = ("test_clean", "test_corrupted")


def prepare_phantom(
    name: str, out_dir: str | Path, *, sites: int | Sequence[str] = 6, image_size: int | None = None,
    cases: float = 1.0, plan: PhantomPlan | None = None, **writing: Unpack[Writing],
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
        seed, overwrite and others: arguments of :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        Folder of each site.
    """
    seed = whole("seed", writing.get("seed", 0), low=0)
    if choice("phantom", name, NAMES) in (PROSTATE, VOLUMES):
        names = [f"site-{i + 1}" for i in range(whole("sites", sites))] if isinstance(sites, int) else list(sites)
        if name == VOLUMES:
            return _volumes(names, 32 if image_size is None else image_size, seed, cases, out_dir, writing)
        size = 64 if image_size is None else whole("image_size", image_size, low=32)
        drawn = {site: _prostate(site, size, seed, cases) for site in names}
        return write_sites(drawn, out_dir, None, Form(synthetic=True), **writing)
    number = whole("sites", sites)
    scale: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    whole_plan = replace(plan or PhantomPlan(phantom=name), phantom=name, num_sites=number, seed=seed, **scale)
    kind = whole_plan.kind
    groups = {group: list(members) for group, members in kind.groups.items()}
    bad = whole_plan.corrupted_sites
    quality = f"{whole_plan.corruption}:{whole_plan.severity}" if bad else None
    noise = {f"site-{i + 1}": whole_plan.label_noise for i in range(number) if whole_plan.has_label_noise(i)}
    tones = {kind.called: {"kind": "category", "values": list(kind.attributes)}} if whole_plan.attributes else {}
    form = Form(
        class_names=kind.class_names, class_groups=groups, label_noise=noise, synthetic=True,
        dealing=Dealing(corrupt=quality, corrupt_sites=bad),
        attributes=tones,
    )  # fmt: skip
    return write_sites(
        {f"site-{i + 1}": _classes(whole_plan, i) for i in range(number)}, out_dir, None, form, **writing
    )


def _volumes(
    sites: Sequence[str], size: int, seed: int, cases: float, out_dir: str | Path, writing: Writing
) -> dict[str, Path]:
    """Draw volumes into temporary NIfTI files, which are then written as a data set, since arrays would become PNG."""
    with TemporaryDirectory(prefix="fairflare-volumes-") as folder:
        drawn: dict[str, list[Item]] = {}
        for site in sites:
            for split, volumes in volumes_site(site, size=(size, size, size * 3 // 4), seed=seed, cases=cases).items():
                for i, volume in enumerate(volumes):
                    name = f"{split}-{i:03d}"
                    image, label = (Path(folder, site, kind, f"{name}.nii") for kind in ("images", "labels"))
                    volume.write(image, label)
                    item = Item(name, name, image, label, name, splits=(split,), spacing=volume.voxel)
                    drawn.setdefault(site, []).append(item)
        return write_sites(drawn, out_dir, None, Form(synthetic=True), **writing)


def _prostate(site: str, size: int, seed: int, cases: float) -> Iterator[Item]:
    for split, (images, masks) in prostate_site(site, image_size=(size, size), seed=seed, cases=cases).items():
        for i, (image, mask) in enumerate(zip(images, masks, strict=True)):
            patient = f"{split}-{i // SLICES:03d}"
            name = f"{patient}_{i % SLICES}"
            yield Item(name, patient, image[0], mask[0], patient, splits=(split,), volume=patient)


def _classes(plan: PhantomPlan, index: int) -> Iterator[Item]:
    site, kind = class_site(plan, index), plan.kind
    for split in plan.splits:
        for i, (image, label) in enumerate(zip(site.images[split], site.labels[split].tolist(), strict=True)):
            name = f"{split}_{i:05d}"
            person = {kind.called: kind.attributes[site.attributes[split][i]]} if plan.attributes else None
            yield Item(name, name, image, label, splits=(split,), shared=split in SAME_EVERYWHERE, attributes=person)
