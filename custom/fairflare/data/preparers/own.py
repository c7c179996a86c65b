"""Prepare a user's own files: check the images of source trees, and write those that can be used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fairflare.base.checks import group_by_key, refuse
from fairflare.data.datalist import DataError
from fairflare.data.geometry import DrawnOn, Misfit, notes_of
from fairflare.data.kinds import name_site, odd_images, odd_masks, shorten, two_names
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.labels import labels_of
from fairflare.data.preparers.listed import (
    Blank,
    Groups,
    Uncertain,
    attributes_of,
    classes_of,
    groups_by_site,
    labels_of_cells,
    patient_of,
    refuse_one_patient,
)  # fmt: skip
from fairflare.data.preparers.looking import AIR, Look, Looker, looks_of, refuse_bad
from fairflare.data.preparers.names import file_name, listing
from fairflare.data.preparers.options import OPTIONS, Plane
from fairflare.data.preparers.trees import Tree
from fairflare.data.preparers.writing import Form, Writing, write_pool

NUCLEAR = {"PET", "PT", "NM", "SUV", "SPECT"}  # names of channels that belong beside CT
# Of :func:`choose_patches`: voxels of a default patch's side and of a suited one's, mm that a patch covers, and largest
# voxel that the proportions of stored ones may ask for, in mm.
LEAST, PATCH, COVERED, COARSEST = 32, 48, 80.0, 2.5


@dataclass(frozen=True)
class PrepareRequest:
    """Store what a user asks of the preparation of their own files; a command has some of these options.

    Attributes:
        out_dir: folder to write to.
        csv: table of the images, relative to their folder, or else to the working folder: ``image`` (a path below the
            folder, or a name, with or without ending), ``label`` (a number or a name) or ``mask``, and perhaps
            ``site``, ``patient`` and ``split`` (training, validation or test).
        columns: names of columns that differ from those above: ``{"image": "id_code", "label": "diagnosis"}``.
        attributes: attributes of the people and their columns, in the table or in a BIDS tree's ``participants.tsv``:
            ``{"sex": "sex", "age": "age_approx:40,60"}``; numbers after a colon are the inner edges of bins; an
            attribute without edges is a category.
        classes: names of the classes in the order of their numbers; images of other classes are refused. Default: all
            that occur, numbers by size, names by the alphabet. A table has findings if it lacks the column ``label``
            and has a column for each name in ``classes``.
        uncertain, blank: what -1 and an empty cell of a finding become, see :func:`.listed.labels_of_cells`.
        slices: list slices of this plane instead of whole volumes.
        keep_empty: with ``slices``, also list slices in which the mask is 0.
        leave_out: skip images that cannot be used, or of which no finding is known, and report them; None if the
            command has no such option.
        unlabelled: folders of images without labels, see :func:`fairflare.data.preparers.trees.add_unlabelled`.
        suffix: suffixes of the images of a BIDS tree, such as ``T1w``; several are the channels of a case.
        channels: names of the images of a case, in the order of the network's input: the ends of their names, the
            columns of the table, or the names for ``_0000``, ``_0001``, ...
        group: regular expression whose first group is the patient, such as ``"^(p[0-9]+)_"``, or one for each site by
            name; without it an image of which the source names no patient is a patient of its own. It is searched in
            the path of an image below its folder (images, volumes), or in its name (masks, folders).
        mask_values: ``{value in the file: label}`` for ``fairflare.json``.
        mask_drawn_on: rule for pairs of which only one file states a geometry, for ``fairflare.json``.
        dealing: rule by which the images are dealt to sites; default: the sites that the source names.
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.
    """

    out_dir: str | Path
    csv: str | Path | None = None
    columns: Mapping[str, str] | None = None
    attributes: Mapping[str, str] | None = None
    classes: Sequence[str] | None = None
    uncertain: Uncertain | None = None
    blank: Blank | None = None
    slices: Plane | None = None
    keep_empty: bool = False
    leave_out: bool | None = None
    unlabelled: Sequence[str] | None = None
    suffix: str | Sequence[str] | None = None
    channels: Sequence[str] | None = None
    group: Groups = None
    mask_values: Mapping[str, int | str] | None = None
    mask_drawn_on: DrawnOn | None = None
    dealing: Dealing = field(default_factory=Dealing)
    writing: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def take(
        cls, names: Sequence[str], out_dir: str | Path, options: Mapping[str, Any], dealing: Dealing | None = None
    ) -> PrepareRequest:
        """Return the request with these options, which may be those of ``names`` and of :class:`.Writing`.

        Raises:
            TypeError: the command has no such option.
        """
        known = {*names, *Writing.__annotations__}
        if strange := [name for name in options if name not in known]:
            raise TypeError(f"no such option: {', '.join(strange)}; expected some of {', '.join(sorted(known))}")
        writing = {name: value for name, value in options.items() if name not in names}
        values = {name: options.get(name, OPTIONS[name].default) for name in names}
        return cls(out_dir, **values, dealing=dealing or Dealing(), writing=writing)


def write_own(request: PrepareRequest, trees: Mapping[str, Tree], look: Looker, what: str = "image") -> dict[str, Path]:
    """Check all images and masks of a user's source, and write those that can be used.

    Args:
        request: what the user asks for.
        trees: images of the source by site; for a site without a name, each image names its site.
        look: function that checks one image and its mask.
        what: word for the images in messages, ``"image"`` or ``"volume"``.

    Returns:
        Folder of each site.

    Raises:
        DataError: images cannot be used (the message names all of them), or facts about them contradict each other.
        ValueError: options contradict each other.
    """
    cases = [replace(case, site=case.site or site) for site, tree in trees.items() for case in tree.cases]
    channels = _channels(cases)
    names, declared, cases = _label(request, cases, what)
    expressions = groups_by_site(request.group, {case.site for case in cases})
    good, notes = _usable(request, trees, cases, look, what)
    looks = [seen for _, seen in good]
    called = {value: name for tree in trees.values() for value, name in tree.names.items() if value}
    sites = group_by_key((case.site, seen) for case, seen in good)
    task, settings, meanings = ({}, {}, {}) if names else labels_of(sites, called, notes, request.mask_values, what)
    if findings := any(isinstance(case.mask, tuple) for case in cases):
        task["findings"] = names
    if not all(seen.own_plane for seen in looks):
        task["orientation"] = request.slices
    if request.mask_drawn_on is not None:
        settings["mask_drawn_on"] = request.mask_drawn_on
    if empty := sum(seen.empty for seen in looks):
        listed = sum(len(seen.slices or ()) for seen in looks)
        notes.append(f"{empty} of {empty + listed} slices have no label and are left out (--keep-empty keeps them)")
    items = [
        _item(case, seen, expressions[case.site], request.writing.get("seed", 0))
        for case, seen in good
        if seen.slices != ()
    ]
    refuse_one_patient(items, request.group)
    record = dict(request.writing.get("record", {}))
    if what == "volume":
        kind = {} if request.slices else {"kind": "volume_classification" if names else "volume_segmentation"}
        record |= {**kind, "volumes": _count_volumes(good)}
        task |= choose_patches(good) if kind and not names else {}
        task |= {"channels": channels} if channels else {}
    if not names:
        marked = group_by_key((case.site, seen.values) for case, seen in good if case.mask is not None)
        record["marked"] = {site: Counter(chain.from_iterable(values)) for site, values in marked.items()}
    return write_pool(
        items, request.out_dir, request.dealing, settings,
        Form(
            names, stratified=names is not None and not findings, task=task, attributes=declared, notes=notes,
            mask_labels=meanings,
        ),
        **{**request.writing, "record": record},
    )  # fmt: skip


def _channels(cases: Sequence[Item]) -> list[str]:
    """Return the names of the channels; none if each case is one image.

    Raises:
        DataError: only some of the cases name their images.
    """
    channels = [*dict.fromkeys(name for case in cases for name in case.channels)]
    several = any(len(case.channels) > 1 for case in cases)
    if unnamed := sorted({case.site for case in cases if several and not case.channels}):
        raise DataError(
            f"the images of {listing(unnamed)} have no names, and others' have: {', '.join(channels)}; name"
            " them in dataset.json ('channel_names')"
        )
    return channels if several else []


def _label(
    request: PrepareRequest, cases: Sequence[Item], what: str
) -> tuple[list[str] | None, dict[str, Any], list[Item]]:
    """Return the names of the classes, the declared attributes, and the images with their labels and attributes.

    Raises:
        DataError: labels or attributes are not as expected.
        ValueError: options contradict each other.
    """
    refuse({
        "--unlabelled needs images as the sites have them; leave the options of dealing out":
            vars(request.dealing) != vars(Dealing()) and any(case.mask is None for case in cases),
    })  # fmt: skip
    names, labels = _labels(cases, request, what)
    refuse({
        "--attributes are columns of a table (--csv, or participants.tsv of BIDS), and there is none":
            request.attributes and cases and not any(case.row for case in cases),
    })  # fmt: skip
    declared, people = attributes_of(request.attributes, [case.row for case in cases])
    paired = zip(cases, labels, people, strict=True)
    return names, declared, [replace(case, mask=label, attributes=person) for case, label, person in paired]


def _usable(
    request: PrepareRequest, trees: Mapping[str, Tree], cases: Sequence[Item], look: Looker, what: str
) -> tuple[list[tuple[Item, Look]], list[str]]:
    """Return each image that can be used with what its check showed, and notes on all of them.

    Raises:
        DataError: images cannot be used and may not be left out, or one value of the masks has two names.
    """
    notes = list(dict.fromkeys(note for tree in trees.values() for note in tree.notes))
    looked = list(zip(cases, looks_of(cases, look), strict=True))
    silent = {case.image for case in cases if isinstance(case.mask, tuple) and max(case.mask) < 0}
    good = [(case, seen) for case, seen in looked if isinstance(seen, Look) and case.image not in silent]
    unusable: list[tuple[Item, str | Misfit]] = [
        *((case, "no finding of it is known for certain") for case in cases if case.image in silent),
        *((case, problem) for case, problem in looked if not isinstance(problem, Look)),
    ]
    bad: list[tuple[str, str | Misfit]] = [
        *((name_site(name, site), problem) for site, tree in trees.items() for name, problem in tree.alone),
        *((name_site(shorten(case.image), case.site), problem) for case, problem in unusable),
    ]
    if left_out := refuse_bad(bad, len(good) + len(bad), f"{what}(s)", request.leave_out, notes):
        notes.append(left_out)
    if gone := {case.site for case in cases} - {case.site for case, _ in good}:
        raise DataError(f"no image of site {listing(gone)} can be used; mend them, or take the site out")
    notes += notes_of(note for _, seen in good for note in seen.notes)
    notes += [
        f"{site}: {text}" if site else text
        for site in dict.fromkeys(case.site for case, _ in good)
        for text in odd_masks([seen.drawn for case, seen in good if case.site == site and seen.drawn is not None])
    ]
    seen_by = group_by_key((case.site, (shorten(case.image), seen.channels)) for case, seen in good if seen.channels)
    notes += [f"{site}: {line}" if site else line for site, line in odd_images(seen_by)]
    called = ((site or "dataset.json", {k: v for k, v in tree.names.items() if k}) for site, tree in trees.items())
    drawn = (
        (name_site(shorten(case.mask), case.site), seen.names) for case, seen in good if isinstance(case.mask, Path)
    )
    for text in (*two_names(called), *two_names(drawn)):
        raise DataError(text)
    return good, notes


def _item(case: Item, seen: Look, expression: str | None, seed: int) -> Item:
    """Return the item to write for an image; the regular expression of its site finds the patient in its name."""
    patient = case.patient or patient_of(case.text or case.name, expression, case.site, case.image, seed)
    name = file_name(case.name)
    return replace(
        case, name=name, group=f"{case.site}/{patient}" if patient else name, patient=patient,
        volume=None if seen.slices is None else name, spacing=seen.spacing, slices=seen.slices,
    )  # fmt: skip


def _labels(cases: Sequence[Item], request: PrepareRequest, what: str) -> tuple[list[str] | None, list[Any]]:
    """Return the names of the classes (None for masks), and the class, the findings, or the mask of each image.

    Raises:
        DataError: some images have masks and some have classes, a class is none of the given ones, or classes are
            given although the images have masks.
    """
    classes = request.classes
    if any(isinstance(case.mask, dict) for case in cases):
        return list(classes or ()), [
            case.mask and labels_of_cells(case, request.uncertain, request.blank) for case in cases
        ]
    texts = [case.mask for case in cases if isinstance(case.mask, str)]
    refuse({
        f"some {what}s have masks and some have classes; prepare them one by one":
            len(texts) not in (0, sum(case.mask is not None for case in cases)),
        "--classes are those of a table of classes; masks have structures": bool(classes) and not texts,
    }, DataError)  # fmt: skip
    names, numbers = classes_of(texts, classes) if texts else (None, [c.mask for c in cases if c.mask is not None])
    left = iter(numbers)
    return names, [None if case.mask is None else next(left) for case in cases]


def choose_patches(good: Iterable[tuple[Item, Look]]) -> dict[str, Any]:
    """Return settings of ``volume_segmentation`` with which a patch covers 80 mm, and the usual window and norm for CT.

    Where a default patch covers less of a larger volume, the patch has 48 voxels a side, and voxels become as large as
    this needs, in steps of 0.5 mm, in the proportions of the sites' median voxel up to 2.5 mm. A short side gets fewer
    voxels. The default stays where few files say how they lie.
    """
    sites = group_by_key((case.site, (case, look)) for case, look in good).values()
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
    patch = [
        min(PATCH, max(LEAST, 16 * math.ceil(voxel * count / new / 16)))
        for (voxel, count), new in zip(median.tolist(), spacing, strict=True)
    ]
    return {**proposed, "spacing": [round(voxel, 4) for voxel in spacing], "patch_size": patch}


def _is_ct(case: Item, look: Look) -> bool:
    """Return whether all images of a case are CT, by their names or by values as air has; refuse CT beside MR."""
    ct = [air or name.upper() == "CT" for air, name in zip(look.air, case.channels or ("",), strict=True)]
    others = {name for name, is_ct in zip(case.channels, ct, strict=False) if not is_ct and name.upper() not in NUCLEAR}
    refuse({
        f"'{shorten(case.image)}': of the images {', '.join(case.channels)} some are CT (by name, or by values below "
        f"{AIR}) and {listing(others)} not; a task takes CT, perhaps with PET, or MR": any(ct) and others,
    }, DataError)  # fmt: skip
    return all(ct)


def _count_volumes(good: Iterable[tuple[Item, Look]]) -> dict[str, Any]:
    """Count the volumes of each site of the source by spacing, orientation and label."""
    return {
        site: {
            "volumes": len(looks), "spacing": Counter(look.stored for look in looks),
            "orientation": Counter(look.way for look in looks),
            "label": Counter(str(value) for look in looks for value in look.values),
        }
        for site, looks in group_by_key((case.site or "site-1", look) for case, look in good).items()
    }  # fmt: skip
