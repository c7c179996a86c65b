"""Prepare a user's own files: check the images of source trees, and write those that can be used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fairflare.base.checks import first_of, gathered
from fairflare.data.datalist import DataError
from fairflare.data.geometry import DrawnOn, Misfit, notes_of
from fairflare.data.kinds import at_site, odd_images, odd_masks, shown, two_names
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.labels import labels_of
from fairflare.data.preparers.listed import (
    CellMeanings,
    Groups,
    attributes_of,
    classes_of,
    groups_by_site,
    patient_of,
    refuse_one_patient,
)  # fmt: skip
from fairflare.data.preparers.looking import AIR, Look, Looker, looks_of, refuse_bad, refuse_empty
from fairflare.data.preparers.names import file_name, listing
from fairflare.data.preparers.trees import Tree
from fairflare.data.preparers.writing import Form, Writing, write_pool

NUCLEAR = {"PET", "PT", "NM", "SUV", "SPECT"}  # names of channels that belong beside CT
# Of :func:`suited_patches`: voxels of a default patch's side and of a suited one's, mm that a patch covers, and largest
# voxel that the proportions of stored ones may ask for, in mm.
LEAST, PATCH, COVERED, COARSEST = 32, 48, 80.0, 2.5


def write_own(
    trees: Mapping[str, Tree], look: Looker, out_dir: str | Path, dealing: Dealing, writing: Writing,
    what: str = "image", plane: str | None = None, *, attributes: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None, group: Groups = None, leave_out: bool | None = None,
    mask_values: Mapping[str, int | str] | None = None, mask_drawn_on: DrawnOn | None = None,
    answers: CellMeanings | None = None,
) -> dict[str, Path]:  # fmt: skip
    """Check all images and masks of a user's source, and write those that can be used.

    Args:
        trees: images of the source by site; for a site without a name, each image names its site.
        look: function that checks one image and its mask.
        out_dir, dealing, writing: as in :func:`fairflare.data.preparers.writing.write_pool`.
        what: word for the images in messages, ``"image"`` or ``"volume"``.
        plane: plane of the slices to list; None if files are listed whole.
        attributes, classes, group, leave_out, mask_values, mask_drawn_on: options of the commands.
        answers: what cells of findings mean.

    Returns:
        Folder of each site.

    Raises:
        DataError: images cannot be used (the message names all of them), or facts about them contradict each other.
        ValueError: options contradict each other.
    """
    notes = list(dict.fromkeys(note for tree in trees.values() for note in tree.notes))
    cases = [replace(case, site=case.site or site) for site, tree in trees.items() for case in tree.cases]
    channels = [*dict.fromkeys(name for case in cases if case.channels for name in case.channels)]
    several = any(len(case.channels) > 1 for case in cases)
    if unnamed := sorted({case.site for case in cases if several and not case.channels}):
        raise DataError(
            f"the images of {listing(unnamed)} have no names, and others' have: {', '.join(channels)}; name"
            " them in dataset.json ('channel_names')"
        )
    if vars(dealing) != vars(Dealing()) and any(case.mask is None for case in cases):
        raise ValueError("--unlabelled needs images as the sites have them; leave the options of dealing out")
    findings = any(isinstance(case.mask, dict) for case in cases)
    names, labels = _labels(cases, classes, what, answers)
    if attributes and cases and not any(case.row for case in cases):
        raise ValueError("--attributes are columns of a table (--csv, or participants.tsv of BIDS), and there is none")
    declared, people = attributes_of(attributes, [case.row for case in cases])
    expressions = groups_by_site(group, {case.site for case in cases})
    cases = [replace(c, mask=label, attributes=own) for c, label, own in zip(cases, labels, people, strict=True)]
    found = list(zip(cases, looks_of(cases, look), strict=True))
    silent = {case.image for case in cases if findings and max(case.mask) < 0}
    good = [(case, seen) for case, seen in found if isinstance(seen, Look) and case.image not in silent]
    bad: list[tuple[str, str | Misfit]] = [
        (at_site(name, site), problem) for site, tree in trees.items() for name, problem in tree.alone
    ]
    unusable: list[tuple[Item, str | Misfit]] = [
        (case, "no finding of it is known for certain") for case in cases if case.image in silent
    ]
    unusable += [(case, problem) for case, problem in found if not isinstance(problem, Look)]
    bad += [(at_site(shown(case.image), case.site), problem) for case, problem in unusable]
    if said := refuse_bad(bad, len(good) + len(bad), f"{what}(s)", leave_out, notes):
        notes.append(said)
    refuse_empty({case.site for case in cases}, {case.site for case, _ in good})
    looks = [seen for _, seen in good]
    notes += notes_of(note for seen in looks for note in seen.notes)
    notes += [
        f"{site}: {text}" if site else text
        for site in dict.fromkeys(case.site for case, _ in good)
        for text in odd_masks([seen.drawn for case, seen in good if case.site == site and seen.drawn is not None])
    ]
    seen_by = gathered((case.site, (shown(case.image), seen.channels)) for case, seen in good if seen.channels)
    notes += [f"{site}: {line}" if site else line for site, line in odd_images(seen_by)]
    told = [(site or "dataset.json", {k: name for k, name in tree.names.items() if k}) for site, tree in trees.items()]
    drawn = ((at_site(shown(case.mask), case.site), seen.names) for case, seen in good if isinstance(case.mask, Path))
    for text in (*two_names(told), *two_names(drawn)):
        raise DataError(text)
    called = {value: name for _, own in told for value, name in own.items()}
    sites = gathered((case.site, seen) for case, seen in good)
    task, settings, meanings = ({}, {}, {}) if names else labels_of(sites, called, notes, mask_values, what)
    task |= {"findings": names} if findings else {}
    if not all(seen.own_plane for seen in looks):
        task["orientation"] = plane
    if mask_drawn_on is not None:
        settings["mask_drawn_on"] = mask_drawn_on
    if empty := sum(seen.empty for seen in looks):
        listed = sum(len(seen.slices or ()) for seen in looks)
        notes.append(f"{empty} of {empty + listed} slices have no label and are left out (--keep-empty keeps them)")
    seed = writing.get("seed", 0)
    items = [_item(case, seen, expressions[case.site], seed) for case, seen in good if seen.slices != ()]
    refuse_one_patient(items, group)
    record = dict(writing.get("record", {}))
    if what == "volume":
        kind = {} if plane else {"kind": "volume_classification" if names else "volume_segmentation"}
        record |= {**kind, "volumes": _count_volumes(good)}
        task |= suited_patches(good) if kind and not names else {}
        task |= {"channels": channels} if several else {}
    if not names:
        masked = dict.fromkeys(case.site for case, _ in good if case.mask is not None)
        record["marked"] = {s: Counter(v for case, seen in good if case.site == s for v in seen.values) for s in masked}
    writing["record"] = record
    form = Form(
        names, stratified=names is not None and not findings, task=task, attributes=declared, notes=notes,
        mask_labels=meanings,
    )  # fmt: skip
    return write_pool(items, out_dir, dealing, settings, form, **writing)


def _item(case: Item, seen: Look, expression: str | None, seed: int) -> Item:
    """Return the item to write for an image; the regular expression of its site finds the patient in its name."""
    patient = case.patient or patient_of(case.text or case.name, expression, case.site, case.image, seed)
    name = file_name(case.name)
    return replace(
        case, name=name, group=f"{case.site}/{patient}" if patient else name, patient=patient,
        volume=None if seen.slices is None else name, spacing=seen.spacing, slices=seen.slices,
    )  # fmt: skip


def _labels(
    cases: Sequence[Item], classes: Sequence[str] | None, what: str, answers: CellMeanings | None
) -> tuple[list[str] | None, list[Any]]:
    """Return the names of the classes (None for masks), and the class, the findings, or the mask of each image.

    Raises:
        DataError: some images have masks and some have classes, a class is none of the given ones, or classes are
            given although the images have masks.
    """
    if any(isinstance(case.mask, dict) for case in cases):
        return list(classes or ()), [case.mask and (answers or CellMeanings()).labels(case) for case in cases]
    texts = [case.mask for case in cases if isinstance(case.mask, str)]
    if problem := first_of({
        f"some {what}s have masks and some have classes; prepare them one by one":
            len(texts) not in (0, sum(case.mask is not None for case in cases)),
        "--classes are those of a table of classes; masks have structures": bool(classes) and not texts,
    }):  # fmt: skip
        raise DataError(problem)
    names, numbers = classes_of(texts, classes) if texts else (None, [c.mask for c in cases if c.mask is not None])
    left = iter(numbers)
    return names, [None if case.mask is None else next(left) for case in cases]


def suited_patches(good: Iterable[tuple[Item, Look]]) -> dict[str, Any]:
    """Return settings of ``volume_segmentation`` with which a patch covers 80 mm, and the usual window and norm for CT.

    Where a default patch covers less of a larger volume, the patch has 48 voxels a side, and voxels become as large as
    this needs, in steps of 0.5 mm, in the proportions of the sites' median voxel up to 2.5 mm. A short side gets fewer
    voxels. The default stays where few files say how they lie.
    """
    sites = gathered((case.site, (case, look)) for case, look in good).values()
    ct = [sum(_is_ct(case, look) for case, look in own) > len(own) / 2 for own in sites]
    proposed: dict[str, Any] = {"intensity": "window", "window": [40, 400], "norm": "layer"} if all(ct) else {}
    axes = [[look.axes for _, look in own if look.axes] for own in sites]
    if not all(len(lying) > len(own) / 2 for lying, own in zip(axes, sites, strict=True)):
        return proposed
    median = np.median([np.median(own, axis=0) for own in axes], axis=0)
    if not any(voxel * LEAST < COVERED < voxel * count for voxel, count in median):
        return proposed
    least = COVERED / PATCH
    spacing = [
        voxel if voxel >= least
        else max(voxel, min(COARSEST, math.ceil(2 * least * voxel / median[:, 0].min() - 1e-6) / 2))
        for voxel in median[:, 0].tolist()
    ]  # fmt: skip
    lengths = [voxel * count / new for (voxel, count), new in zip(median.tolist(), spacing, strict=True)]
    patch = [min(PATCH, max(LEAST, 16 * math.ceil(length / 16))) for length in lengths]
    return {**proposed, "spacing": [round(voxel, 4) for voxel in spacing], "patch_size": patch}


def _is_ct(case: Item, look: Look) -> bool:
    """Return whether all images of a case are CT, by their names or by values as air has; refuse CT beside MR."""
    ct = [air or name.upper() == "CT" for air, name in zip(look.air, case.channels or ("",), strict=True)]
    others = {name for name, is_ct in zip(case.channels, ct, strict=False) if not is_ct and name.upper() not in NUCLEAR}
    if any(ct) and others:
        raise DataError(
            f"'{shown(case.image)}': of the images {', '.join(case.channels)} some are CT (by name, or by values below "
            f"{AIR}) and {listing(others)} not; a task takes CT, perhaps with PET, or MR"
        )
    return all(ct)


def _count_volumes(good: Iterable[tuple[Item, Look]]) -> dict[str, Any]:
    """Count the volumes of each site of the source by spacing, orientation and label."""
    return {
        site: {
            "volumes": len(looks), "spacing": Counter(look.stored for look in looks),
            "orientation": Counter(look.way for look in looks),
            "label": Counter(str(value) for look in looks for value in look.values),
        }
        for site, looks in gathered((case.site or "site-1", look) for case, look in good).items()
    }  # fmt: skip
