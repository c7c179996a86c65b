"""Adapt a run to the user's own images: derive settings from them, and report how they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fairflare.base.checks import group_by_key
from fairflare.cli.screen import say
from fairflare.reporting.layout import format_count, join_parts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fairflare.federation.plan.plan import Plan
    from fairflare.federation.plan.request import RunRequest

MOST_PIXELS = 96  # largest side of the images in a run without further settings, so that it is quick
KINDS = {True: "RGB", False: "grey"}  # names of images with and without colours
LOOKED_AT = 3  # number of a site's images that are read to find their kind


def read_first_images(plan: Plan, local: Mapping[str, Any]) -> list[npt.NDArray[np.float32]]:
    """Return the first training images of every site, (height, width, 1 or 3).

    The list is empty where images are synthetic, or the task reads images in its own way. Unreadable images are left
    out here; the run's check reports them.
    """
    from fairflare.data.datalist import DataError, load_datalist
    from fairflare.data.reading import read_image
    from fairflare.federation.site.site_file import own_settings
    from fairflare.tasks.images import ImageTask
    from fairflare.tasks.shared.site_settings import SiteSettings

    if not isinstance(plan.task, ImageTask) or getattr(plan.task, "spatial_dims", 2) == 3:
        return []
    images = []
    for site in plan.sites or ():
        settings = own_settings(local, site)
        if not settings.get("data_root"):
            continue
        with suppress(DataError, ValueError):
            known = SiteSettings(**{k: settings[k] for k in ("data_root", "datalist", "linked_roots") if k in settings})
            listed = load_datalist(
                str(known.data_root), known.datalist or "datalist.json", site=site,
                class_labels=plan.task.class_labels, linked_roots=known.linked_roots,
            )  # fmt: skip
            images += [
                read_image(sample, site=site, split="training", how=plan.task.reading())
                for sample in listed.splits["training"][:LOOKED_AT]
            ]
    return images


def choose_image_settings(plan: Plan, images: Sequence[npt.NDArray[np.float32]]) -> dict[str, Any]:
    """Return a task's settings of channels and image size that suit the user's images.

    The size is at most :data:`MOST_PIXELS`, and large enough for the network.
    """
    if not images or not {"image_size", "in_channels"} <= set(vars(plan.task)):
        return {}
    task: Any = plan.task
    least = 32 if not task.class_labels else 64 if task.network == "densenet121" else 48 if task.max_pool else 32
    side = int(median([min(image.shape[:2]) for image in images]))
    side = min(max(side // 16 * 16, least), max(MOST_PIXELS, least))
    # Where there are initial weights, the checkpoint decides the channels.
    channels = {} if task.initial_weights is not None else {"in_channels": 3 if any(map(_is_coloured, images)) else 1}
    return {"image_size": [side, side], **channels}


def choose_run_settings(
    plan: Plan, local: Mapping[str, Any], data: Path | None, given: Mapping[str, Any], *, quick: bool, trial: bool,
    some: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return settings of a run that suit the sites' own images, and print how these images are read.

    If the sites have no images of their own, the settings are empty and nothing is printed.

    Args:
        plan: the run's plan without these settings.
        local: content of ``local/fairflare.json``.
        data: path of this file.
        given: settings that the user gave; they are not changed.
        quick: whether channels and image size follow the images.
        trial: whether the user gave neither a number of rounds nor the paper's settings.
        some: whether the file may have blocks of sites that the run leaves out.

    Raises:
        ValueError: two sites have the same images, or the file has a key that nothing reads.
    """
    from fairflare.federation.transports.shared_images import refuse_shared_images

    refuse_unknown_keys(plan, local, data)
    refuse_shared_images(plan.sites or (), local)
    if not some and plan.sites is not None and (blocks := {*local.get("sites", ())} - {*plan.sites, "server"}):
        say(
            f"NOTE: nothing reads the block of {join_parts(sorted(blocks))} in {data}: the run has the sites "
            f"{join_parts(plan.sites)}; another number of them is given with --sites"
        )
    images = read_first_images(plan, local)
    if not images:  # of whole volumes, and where a job is exported without images, only the manifest is read
        return choose_prepared_settings(plan, data, given)
    settings = {**(choose_image_settings(plan, images) if quick else {}), **choose_prepared_settings(plan, data, given)}
    settings = {name: value for name, value in settings.items() if name not in given}
    say(describe_reading(plan, images, settings, trial=trial))
    return settings


def fit_request(
    request: RunRequest, local: Mapping[str, Any], data: Path | None, *, trial: bool
) -> tuple[RunRequest, Plan]:
    """Return the request of a run with what the user's data ask for, and its plan.

    The kind of task and its settings follow the manifest of the data, channels and image size the images; all of them
    are printed. What the user gave is not changed.

    Args:
        request: what the user asks for.
        local: content of ``local/fairflare.json``.
        data: path of this file.
        trial: whether the images' size is called a trial's where the user did not choose rounds.
    """
    from fairflare.federation.plan.plan import plan_run

    asked = replace(request, **kind_by_manifest(data, vars(request)))
    real = forbid_phantom(lambda more: plan_run(replace(asked, settings={**more, **asked.settings})), local)
    request = replace(asked, settings={**real, **asked.settings})
    plan, quick = plan_run(request), request.small and not request.task_file
    short = trial and quick and request.options.get("num_rounds") is None
    if more := choose_run_settings(plan, local, data, request.settings, quick=quick, trial=short):
        request = replace(request, settings={**request.settings, **more})
        plan = plan_run(request)
    return request, plan


def refuse_unknown_keys(plan: Plan, local: Mapping[str, Any], data: Path | None) -> None:
    """Refuse keys of the data file that no task and no site reads, before a run begins.

    Raises:
        ValueError: a key is unknown; the message names file, key, and the sites that have the key.
    """
    from fairflare.data.datalist import DataError
    from fairflare.federation.site.site_file import own_settings
    from fairflare.tasks.shared.site_settings import check_keys

    kind: Any = getattr(plan.task, "site_settings", None)
    errors: list[tuple[str, str]] = []
    for site in plan.sites or () if kind is not None and data is not None else ():
        try:
            check_keys(kind, site, own_settings(local, site))
        except DataError as error:
            errors.append((str(error).removeprefix(f"site '{site}': "), site))
    for text, sites in group_by_key(errors).items():
        raise ValueError(f"--data {data}: {text} (of {', '.join(sites)})")


def choose_prepared_settings(plan: Plan, data: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return and print settings of a task that the manifest of prepared data asks for, such as RIF's two structures."""
    manifest = {} if data is None else manifest_of(data).get("task", {})
    settings = {name: value for name, value in manifest.items() if name in vars(plan.task) and name not in given}
    if settings:
        say(
            f"as the data's manifest says: {', '.join(f'{key}={json.dumps(value)}' for key, value in settings.items())}"
        )
    return settings


def kind_by_manifest(data: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"task": kind}`` and print it, where the manifest of prepared data names a kind of task.

    ``{}`` is returned where the user names a task, or the data have no such manifest.
    """
    names = ("task", "task_file", "monai_bundle", "script")
    kind = None if data is None or any(given.get(name) for name in names) else manifest_of(data).get("kind")
    if kind:
        say(f"as the data's manifest says: --task {kind}")
    return {"task": kind} if kind else {}


def forbid_phantom(make: Callable[[dict[str, Any]], object], local: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"allow_phantom": False}`` where a plan can be made only without synthetic data; else ``{}``.

    An example is a paper with four corrupted synthetic sites, when the run has two sites with images of their own. Any
    other error is raised later, when the plan is made.

    Args:
        make: function that makes the plan with further settings.
        local: content of ``local/fairflare.json``.
    """
    blocks = local.get("sites")
    site_blocks = [block for site, block in blocks.items() if site != "server"] if isinstance(blocks, Mapping) else []
    if not site_blocks or not all(isinstance(block, Mapping) and "data_root" in block for block in site_blocks):
        return {}
    for settings in ({}, {"allow_phantom": False}):
        with suppress(ValueError):
            make(dict(settings))
            return settings
    return {}


def manifest_of(data: Path) -> dict[str, Any]:
    """Return the manifest that ``prepare`` wrote for the data set of a path; empty if the path has no manifest."""
    for folder in (data, *data.absolute().parents[:2]):
        with suppress(OSError, ValueError):
            content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {}
    return {}


def describe_reading(
    plan: Plan, images: Sequence[npt.NDArray[np.float32]], more: Mapping[str, Any] | None = None, *, trial: bool
) -> str:
    """Return how images are read, as ``640x480 RGB images are read as 96x96 RGB; 3 rounds: a trial; ...``.

    Sizes are width x height. ``more``: settings of the task that the plan does not have yet.
    """
    task = {**vars(plan.task), **(more or {})}
    sizes = sorted({image.shape[:2] for image in images}, key=lambda size: (size[0] * size[1], size))
    shown = " to ".join(dict.fromkeys(f"{width}x{height}" for height, width in (sizes[0], sizes[-1])))
    kinds = " and ".join(dict.fromkeys(KINDS[_is_coloured(image)] for image in images))
    height, width = task["image_size"]
    rounds = f"; {format_count(plan.run.num_rounds, 'round')}" if plan.run.num_rounds else ""
    return (
        f"{shown} {kinds} images are read as {width}x{height} {KINDS[task['in_channels'] == 3]}{rounds}"
        + ": a trial; --paper has the paper's settings, or give --rounds and --set 'image_size=[HEIGHT, WIDTH]'" * trial
    )


def _is_coloured(image: npt.NDArray[np.float32]) -> bool:
    """Return whether an image has colours; a grey picture is often stored in three equal channels."""
    return image.shape[2] == 3 and not (image == image[:, :, :1]).all()
