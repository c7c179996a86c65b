"""A value that stands in both halves of a method's configuration must be one value."""

from __future__ import annotations

import importlib
from typing import Any

from fairflare.core.settings import field_names, values_of
from fairflare.methods.rule import Rule
from fairflare.methods.training import LocalTraining


class HalvesDiffer(ValueError):
    """Server and sites are configured with different values for the same thing."""


def training_of(site_half: Any) -> LocalTraining | None:
    """The sites' half as an object; ``None`` when it cannot be made here."""
    # Only of this package: a job's client configuration must not make the server load any other class.
    path = site_half.get("path") if isinstance(site_half, dict) else None
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module.startswith("fairflare.methods."):
        return None
    try:
        cls = getattr(importlib.import_module(module), name)
        made = cls(**site_half.get("args", {})) if issubclass(cls, LocalTraining) else None
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return made


def shared_values(cls: type, other: Rule | LocalTraining | None) -> dict[str, Any]:
    """The settings that a half has in common with the class of the other half; none of ``None``."""
    names = () if other is None else set(field_names(type(other))) & set(field_names(cls))
    return {name: getattr(other, name) for name in sorted(names)}


def check_shared(rule: Rule, training: LocalTraining) -> None:
    """Compares two halves before a job is made of them.

    Raises:
        HalvesDiffer: names the first setting that differs, with both values.
    """
    for name, value in shared_values(type(rule), training).items():
        own, one, other = getattr(rule, name), type(rule).__name__, type(training).__name__
        if own != value:
            raise HalvesDiffer(f"{name} is {own!r} in {one} and {value!r} in {other}: give both the same")


def check_halves(rule: Rule, site_half: Any, norm_statistics: str) -> None:
    """Compares the settings that rule and training both have, such as ``preset`` or ``rho``.

    Args:
        rule: the server's half.
        norm_statistics: of the run, which is to follow the training's.
        site_half: ``{"path", "args"}`` of the training; ``None``: not known here, and nothing is compared.

    Raises:
        HalvesDiffer: names each differing setting with both values.
    """
    if not isinstance(site_half, dict):
        return
    training = training_of(site_half)
    sites = (values_of(training) if training is not None else site_half).get("args") or {}
    server = values_of(rule)["args"]
    differing = [
        f"{name} is {server[name]!r} at the server and {sites[name]!r} at the sites"
        for name in sorted(set(server) & set(sites))
        if server[name] != sites[name]
    ]
    if training is not None and (training.norm_statistics == "recalibrated") != (norm_statistics == "recalibrated"):
        differing.append(
            f"norm_statistics is {norm_statistics!r} at the server and {training.norm_statistics!r} at the sites"
        )
    if differing:
        raise HalvesDiffer(
            f"the two halves of the configuration differ: {'; '.join(differing)}. Set the same value in "
            "config_fed_server.json (rule) and config_fed_client.json (training), or export the job anew with --set"
        )
