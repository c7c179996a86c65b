"""Prepare a request for the way in which a FLARE job carries its code; loads no FLARE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fairflare.base.checks import choice
from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.federation.plan.request import RunRequest
from fairflare.methods.base.catalog import get_method, method_of

PACKAGINGS = ("task_file", "preinstalled", "bundle")


def package_request(request: RunRequest, packaging: str) -> RunRequest:
    """Return a request as a job of this packaging has it: a ``"preinstalled"`` one bounds what a site can do.

    Raises:
        ValueError: the packaging is unknown, or carries no code and the request has a task file.
    """
    if choice("packaging", packaging, PACKAGINGS) != "preinstalled":
        return request
    if request.task_file is not None:
        raise ValueError("a task file is custom code; packaging 'preinstalled' carries none: set packaging='task_file'")
    bounds = {name: value for name, value in request.options.items() if name in FOR_HOSPITALS}
    bounds |= {name: value for name in FOR_HOSPITALS if (value := getattr(request.run, name, None)) is not None}
    chosen = method_of(request.rule, request.training) if request.method is None else get_method(request.method)
    by_name = chosen.preinstalled if request.rule is None and request.training is None else {}
    settings = {**FOR_HOSPITALS, **by_name, **bounds, **request.settings}
    if request.monai_bundle is not None:
        from fairflare.tasks.bundle import seal_settings

        settings |= seal_settings(Path(request.monai_bundle).expanduser(), settings.get("bundle_configs", ["train"]))
    return replace(
        request,
        settings=settings,
        options={name: value for name, value in request.options.items() if name not in FOR_HOSPITALS},
    )
