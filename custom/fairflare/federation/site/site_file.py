"""Read a site's private file, ``local/fairflare.json``, and check the settings in it that FairFlare itself reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError

from fairflare.base.aspect import FINETUNING, SITE_KEYS
from fairflare.base.checks import NO_SITE, SERVER, refuse
from fairflare.base.disk.files import keys_once
from fairflare.base.machine.computing import Computing
from fairflare.base.settings import Flag, describe_type
from fairflare.federation.site.gate import METRICS_BY_CLASS, MIN_CASES, TRAINS_BELOW
from fairflare.methods.base.training import LocalTraining, SiteError

DATA_KEYS = {"data_root", "datalist"}  # keys of a site's block that say where its images are
SITE_FILE = "fairflare.json"  # name of a site's private file, in the folder local/ of a FLARE workspace
DECODED = "decoded_folder"  # name of the site's setting: folder in which tasks save decoded volumes
DECODED_PLACE = "decoded"  # default folder for decoded volumes, in the site's state root, for all experiments
SAVES = "save_seconds"  # name of the site's setting: seconds between two saves of a half-done round; 0: never
SAVE_SECONDS = 60.0
(SUBMITS,) = FINETUNING.site_keys  # name of the site's setting: whether the local model may be sent to other sites
COMPUTING_KEYS = tuple(field.name for field in fields(Computing))  # a site's own settings override the job's
# Settings of local/fairflare.json that FairFlare itself reads; all others are given to the task.
SHELL_SETTINGS = (
    "state_root",
    "checkpoint_root",
    "models_in_memory",
    "num_threads",
    "device",
    "isolate",
    *COMPUTING_KEYS,
    METRICS_BY_CLASS,
    MIN_CASES,
    TRAINS_BELOW,
    SAVES,
    *SITE_KEYS,
)


def read_site_file(path: Path, identity: str) -> dict[str, Any]:
    """Return the private settings of a site or of the server: ``local/fairflare.json`` of its workspace.

    A block ``"sites": {name: {...}}`` overrides the settings for one name, so that one file serves all sites of a
    simulator. All blocks stay under ``"sites"`` in what is returned: the code that opens the data sees there whether
    other sites have a block.

    Raises:
        SiteError: the file is not a JSON object (names the file's place, not its content).
    """
    if not path.exists():
        return {}
    try:
        # UTF-8 or UTF-16, with or without a byte order mark.
        settings = json.loads(path.read_bytes(), object_pairs_hook=keys_once)
    except (OSError, ValueError, RecursionError) as e:
        raise SiteError(
            f"site {identity!r}: {path} is not readable JSON: {e}",
            public=f"site {identity!r}: local/{SITE_FILE} is not readable JSON",
        ) from e
    return own_settings(settings, identity)


def own_settings(settings: Any, identity: str) -> dict[str, Any]:
    """Return the settings of one site from the content of a site file.

    The site's own block overrides the settings outside of all blocks. See :func:`read_site_file`.

    Raises:
        SiteError: the content, its ``"sites"`` or the site's block is not a JSON object, or the server's block names
            images.
    """
    blocks: Any = settings.get("sites", {}) if isinstance(settings, Mapping) else None
    block: Any = blocks.get(identity, {}) if isinstance(blocks, Mapping) else None
    refuse({
        f"site {identity!r}: local/{SITE_FILE} must hold a JSON object (and 'sites' in it too)":
            not isinstance(blocks, Mapping),
        f"site {identity!r}: 'sites.{identity}' in local/{SITE_FILE} must be a JSON object":
            not isinstance(block, Mapping),
        f"the block 'server' in local/{SITE_FILE} names images: {NO_SITE}":
            identity == SERVER and isinstance(block, Mapping) and DATA_KEYS & block.keys(),
    }, SiteError)  # fmt: skip
    return {**settings, **block}


def setting(site: str, settings: Mapping[str, Any], name: str, usual: Any, kind: Any = Flag, wanted: str = "") -> Any:
    """Return the checked value of a setting of a site.

    Args:
        site, settings: name of the site, and its private settings.
        name: name of the setting.
        usual: the default value.
        kind: type of the value, a declared type of :mod:`fairflare.base.settings`.
        wanted: that type in words, for the message; default: the words of :mod:`fairflare.base.settings`.

    Raises:
        SiteError: the value is of another type.
    """
    chosen = settings.get(name, usual)
    try:
        return TypeAdapter(kind).validate_python(chosen)
    except ValidationError:
        raise SiteError(
            f"site {site!r}: setting {name!r} must be {wanted or describe_type(kind)}, got {chosen!r:.80}"
        ) from None


def pick_device(site: str, wanted: str | None) -> torch.device:
    """Return the device of the site's ``device`` setting, else the first GPU, else the CPU.

    Raises:
        SiteError: the wanted device is not usable on this machine.
    """
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as e:
        raise SiteError(f"site {site!r}: setting 'device' is {wanted!r}, which is not usable here: {e}") from e
    return device


def pick_computing(site: str, training: LocalTraining, settings: Mapping[str, Any]) -> Computing:
    """Return how the network computes at a site: the job's settings, overridden by those of the site's file.

    Raises:
        SiteError: a value is of another type (names the key).
    """
    kinds: dict[str, Any] = dict.fromkeys(COMPUTING_KEYS, Flag) | {"precision": Literal["bf16", "fp16", "fp32"]}
    return Computing(**{key: setting(site, settings, key, getattr(training, key), kind) for key, kind in kinds.items()})
