"""What ``fairflare doctor`` looks at: the things that support asks for first."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from fairflare.base.disk.files import unreadable
from fairflare.cli.run_folder import file_in

State = Literal["ok", "warning", "problem"]
PREFIX = "fairflare"
SPLITS = ("training", "validation")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        what: its name.
        state: ``"problem"``: a run cannot work like this.
        text: what was found, and what to do about it.
    """

    what: str
    state: State
    text: str


def examine(
    data: Path | None = None,
    sites: Sequence[str] | None = None,
    open_site: Callable[[str, Mapping[str, Any]], Any] | None = None,
    kit: Path | None = None,
    ports: Sequence[int] = (),
) -> Iterator[Finding]:
    """Everything, one after the other.

    Args:
        data: a ``local/fairflare.json``.
        sites: whose data are opened; None: those that the file names, or ``site-1``.
        open_site: opens a site's data as a task does; None: only the file is read.
        kit: start-up kit or workspace of a FLARE server or site.
        ports: that a server of this machine would listen on.
    """
    yield from packages()
    yield device()
    yield room(Path.cwd())
    if data is not None:
        yield from site_file(data, sites, open_site)
    if kit is not None:
        yield from start_up_kit(kit)
    for port in ports:
        yield free_port(port)


def packages() -> Iterator[Finding]:
    """Python and the packages that FairFlare needs, against what it asks for."""
    from packaging.requirements import Requirement

    number = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 10) <= sys.version_info[:2] <= (3, 12)
    yield Finding("python", "ok" if fits else "problem", number if fits else f"{number}; 3.10 to 3.12 are supported")
    yield Finding("fairflare", "ok", version("fairflare"))
    for text in requires("fairflare") or []:
        wanted = Requirement(text)
        if wanted.marker is not None:  # an extra
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield Finding(wanted.name, "problem", f"not installed; {wanted} is needed")
            continue
        fits = wanted.specifier.contains(found, prereleases=True)
        yield Finding(wanted.name, "ok" if fits else "problem", found if fits else f"{found}; {wanted} is needed")


def device() -> Finding:
    """The GPU, or the cores."""
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Finding("GPU", "ok", ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("GPU", "warning", f"none that PyTorch can use; training runs on {cores} CPU core(s)")


def room(folder: Path) -> Finding:
    """Space on the disk of a folder that is written to."""
    gib = shutil.disk_usage(folder).free / 2**30
    return Finding("disk", "ok" if gib > 5 else "warning", f"{gib:.1f} GiB free")


def site_file(
    path: Path, sites: Sequence[str] | None, open_site: Callable[[str, Mapping[str, Any]], Any] | None
) -> Iterator[Finding]:
    """The private file of one site, or of all sites of a simulator, and the data that it names."""
    from fairflare.federation.site.site_file import own_settings

    path = file_in(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        blocks = content.get("sites", {}) if isinstance(content, dict) else {}
        names = list(sites or (blocks if isinstance(blocks, dict) else ()) or ("site-1",))
        own = {name: own_settings(content, name) for name in names}
    except (OSError, ValueError) as error:
        yield Finding("site file", "problem", f"{path} {unreadable(error)}")
        return
    except RuntimeError as error:
        yield Finding("site file", "problem", f"{path}: {error}")
        return
    yield Finding("site file", "ok", f"{path}: {', '.join(names)}")
    for name in names if open_site is not None else ():
        yield _data(name, own[name], open_site)


def _data(name: str, own: Mapping[str, Any], open_site: Callable[[str, Mapping[str, Any]], Any] | None) -> Finding:
    assert open_site is not None
    what = f"data of {name}"
    try:
        data = open_site(name, own)
        counts = ", ".join(f"{data.num_samples(split)} {split}" for split in (*SPLITS, *data.test_splits))
    except Exception as error:  # of a task of the user's own, too
        return Finding(what, "problem", f"{type(error).__name__}: {error}")
    made_up = bool(data.synthetic)
    return Finding(what, "warning" if made_up else "ok", f"{counts}{'; SYNTHETIC images' if made_up else ''}")


def start_up_kit(kit: Path) -> Iterator[Finding]:
    """Allow list, policy, site file and certificate of a start-up kit."""
    local, startup = kit / "local", kit / "startup"
    found = next((p for p in (local / "resources.json", local / "resources.json.default") if p.is_file()), None)
    if found is None:
        yield Finding("kit", "problem", f"{kit} has no local/resources.json; give the folder of a start-up kit")
        return
    try:
        allowed = json.loads(found.read_text(encoding="utf-8")).get("class_allow_list", [])
        yield _allow_list(allowed)
    except (ValueError, AttributeError) as error:
        yield Finding("allow list", "problem", f"{found}: {error}")
    for certificate in sorted(startup.glob("*.crt")):
        yield _expiry(certificate)


def _allow_list(entries: list[str]) -> Finding:
    """Whether a job without custom code may name its classes, and no function of the package besides."""
    from fairflare.provision import job_classes

    what = "allow list"
    remedy = "list what fairflare.provision.job_classes() gives in class_allow_list (resources.json)"
    wanted = job_classes()
    missing = [name for name in wanted if name not in entries]
    wide = [entry for entry in entries if entry == "*" or (entry.partition(".")[0] == PREFIX and entry not in wanted)]
    if wide:
        text = f"{wide[0]!r} lets a job call any function of the package with its own arguments; {remedy} instead"
        return Finding(what, "warning", text)
    if missing:
        text = f"{len(missing)} of {len(wanted)} classes are missing, such as {missing[0]}: jobs with them are refused"
        return Finding(what, "problem" if missing == wanted else "warning", f"{text}; {remedy}")
    return Finding(what, "ok", "what jobs without custom code name is allowed")


def _expiry(path: Path) -> Finding:
    from cryptography import x509

    what = f"certificate {path.name}"
    try:
        ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError as error:
        return Finding(what, "problem", str(error))
    days = (ends - datetime.now(timezone.utc)).days
    state: State = "problem" if days < 0 else "warning" if days < 30 else "ok"
    remedy = "" if state == "ok" else "; renew it: docs/security.md (provisioning again alone keeps the old one)"
    return Finding(what, state, f"valid until {ends:%Y-%m-%d}{remedy}")


def free_port(port: int) -> Finding:
    """Whether a server could listen on this port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            return Finding(f"port {port}", "problem", f"not free: {getattr(error, 'strerror', None) or error}")
    return Finding(f"port {port}", "ok", "free")
