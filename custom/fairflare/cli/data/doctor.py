"""Implement ``fairflare doctor``, which checks the installation, a site's data and a start-up kit."""

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
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from fairflare.cli.data.sites import file_in, names_of, read_object
from fairflare.cli.options import Data, MonaiBundle, Settings, Task, TaskFile, parse_settings
from fairflare.cli.screen import AsJson, console, one_document, user_errors

State = Literal["ok", "warning", "problem"]
PREFIX = "fairflare"
SPLITS = ("training", "validation")
EXTRAS = {"data": "images that are files", "page": "the report and pictures", "tensorboard": "curves in TensorBoard"}
LAY = "`fairflare policies KIT` narrows it"
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """Describe the outcome of one check of ``fairflare doctor``.

    Args:
        what: name of the check.
        state: ``"problem"``: a run cannot work like this.
        text: what the check found, and what the user should do about that.
    """

    what: str
    state: State
    text: str


def doctor(
    data: Data = None,
    sites: Annotated[
        str | None,
        typer.Option(
            "--sites", "-s", metavar="NAMES", help="Whose data, names separated by commas; default: the file's."
        ),
    ] = None,
    kit: Annotated[Path | None, typer.Option(metavar="DIR", help="Start-up kit of a FLARE server or site.")] = None,
    port: Annotated[
        list[int] | None, typer.Option(metavar="N", help="That a server would listen on; may be repeated.")
    ] = None,
    method: Annotated[str, typer.Option(metavar="NAME", help="Whose task opens the data.")] = "fed_avg",
    task: Task = None,
    settings: Settings = None,
    task_file: TaskFile = None,
    monai_bundle: MonaiBundle = None,
    as_json: AsJson = False,
) -> None:
    """Look at versions, GPU, disk, a site's data, a start-up kit and ports. Exit code 1 when something cannot work."""
    from fairflare.cli.data.own_images import kind_by_manifest
    from fairflare.federation.plan.plan import make_plan
    from fairflare.tasks.bundle import sealed_settings

    with user_errors(), one_document(as_json):
        names, values = names_of(sites), parse_settings(settings)
        of_bundle = [] if monai_bundle is None else list(sealing(monai_bundle, values))
        if monai_bundle is not None and of_bundle[0].state == "ok":
            values |= sealed_settings(monai_bundle, values.get("bundle_configs", ["train"]))
        given = {"task": task, "task_file": task_file, "monai_bundle": monai_bundle}
        task = kind_by_manifest(data, given).get("task", task)
        opens = None  # a bundle's code runs only where there is data to open with it
        if data is not None or monai_bundle is None:
            opens = make_plan(
                method, task=task, sites=names or 0, settings=values, task_file=task_file,
                monai_bundle=monai_bundle, min_sites=1,
            ).task.open_site  # fmt: skip
    with one_document(as_json) as put:
        found = [*of_bundle, *examine(data, names, opens, kit, port or ())]
        if as_json:
            put(findings=found)
    table = Table("checked", "", "found", box=None, pad_edge=False)
    for finding in found:
        table.add_row(escape(finding.what), f"[{COLOURS[finding.state]}]{finding.state}[/]", escape(finding.text))
    if not as_json:
        console.print(table)
    raise typer.Exit(int(any(finding.state == "problem" for finding in found)))


def examine(
    data: Path | None = None,
    sites: Sequence[str] | None = None,
    open_site: Callable[[str, Mapping[str, Any]], Any] | None = None,
    kit: Path | None = None,
    ports: Sequence[int] = (),
) -> Iterator[Finding]:
    """Yield the finding of each check, one after the other: packages, device, disk space, then what the arguments name.

    Args:
        data: path of a ``local/fairflare.json``, or of its folder.
        sites: names of the sites whose data are opened; ``None`` for the sites that the file names, or ``site-1``.
        open_site: function that opens a site's data as a task does; ``None`` if only the file is read.
        kit: start-up kit or workspace of a FLARE server or site.
        ports: ports that a server on this machine would listen on.
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


def sealing(folder: Path, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on whether a MONAI bundle can be trained where code is forbidden, and what data it needs.

    Args:
        folder: the bundle's folder; none of its code is run.
        settings: settings of the task, of which those count that say which files, keys and values are read.
    """
    from fairflare.tasks.bundles.bundle_config import Bundle
    from fairflare.tasks.bundles.bundle_parts import BundleParts
    from fairflare.tasks.bundles.sealed import shipped_classes

    configs, overrides = settings.get("bundle_configs") or ["train"], settings.get("bundle_overrides")
    bundle = Bundle(folder, configs, overrides, sealed=shipped_classes())
    problems = list(BundleParts(bundle).problems(optimizer="optimizer" not in settings))
    yes = "yes: it trains at sites that permit no code (export --preinstalled)"
    no = f"no: {len(problems)} part(s) cannot be made without code rights; those that are wrong not with them either"
    yield Finding("sealed", "warning" if problems else "ok", no if problems else yes)
    yield from (Finding("not sealed", "warning", str(problem)) for problem in problems)
    if own := bundle.own_code():
        yield Finding("own code", "warning", f"brings Python of its own: keys {', '.join(own)}")
    told = bundle.get("_meta_#network_data_format#inputs")
    wanted = json.dumps(told) if told else "configs/metadata.json does not say"
    yield Finding("data it wants", "ok", f"an image and a label a case; {wanted:.600}")


def packages() -> Iterator[Finding]:
    """Yield findings on the versions of Python and of the packages that FairFlare needs."""
    from packaging.requirements import Requirement

    number = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 10) <= sys.version_info[:2] <= (3, 14)
    yield Finding("python", "ok" if fits else "problem", number if fits else f"{number}; 3.10 to 3.14 are supported")
    yield Finding("fairflare", "ok", version("fairflare"))
    for text in requires("fairflare") or []:
        wanted = Requirement(text)
        extra = next((name for name in EXTRAS if wanted.marker and wanted.marker.evaluate({"extra": name})), None)
        if wanted.marker is not None and extra is None:  # packages for developers, or for a single method
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            lacks = f"not installed; {Requirement(text.partition(';')[0])} is needed"
            more = f" for {EXTRAS[extra]}: pip install 'fairflare[{extra}]'" if extra else ""
            yield Finding(wanted.name, "warning" if extra else "problem", lacks + more)
            continue
        fits = wanted.specifier.contains(found, prereleases=True)
        yield Finding(wanted.name, "ok" if fits else "problem", found if fits else f"{found}; {wanted} is needed")


def device() -> Finding:
    """Return a finding on the GPU, with the number of CPU cores where there is no GPU."""
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Finding("GPU", "ok", ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("GPU", "warning", f"none that PyTorch can use; training runs on {cores} CPU core(s)")


def room(folder: Path) -> Finding:
    """Return a finding on the free space of a folder's disk, with a warning at 5 GiB or less."""
    gib = shutil.disk_usage(folder).free / 2**30
    return Finding("disk", "ok" if gib > 5 else "warning", f"{gib:.1f} GiB free")


def site_file(
    path: Path, sites: Sequence[str] | None, open_site: Callable[[str, Mapping[str, Any]], Any] | None
) -> Iterator[Finding]:
    """Yield findings on the private file of one site, or of a simulator's sites, and on the data that it names."""
    from fairflare.federation.site.site_file import own_settings
    from fairflare.federation.transports.shared_images import refuse_shared_images

    path = file_in(path)
    try:
        content = read_object(path)
        blocks = content.get("sites")
        names = list(sites or (blocks if isinstance(blocks, dict) else ()) or ("site-1",))
        own = {name: own_settings(content, name) for name in names}
    except (ValueError, RuntimeError) as error:
        yield Finding("site file", "problem", f"{path}: {error}" if isinstance(error, RuntimeError) else str(error))
        return
    yield Finding("site file", "ok", f"{path}: {', '.join(names)}")
    if open_site is not None:
        yield from (_data(name, own[name], open_site) for name in names)
    try:
        refuse_shared_images(names, content)
    except ValueError as error:
        yield Finding("data of all", "problem", str(error))


def _data(name: str, own: Mapping[str, Any], open_site: Callable[[str, Mapping[str, Any]], Any]) -> Finding:
    what = f"data of {name}"
    try:
        data = open_site(name, own)
        counts = ", ".join(f"{data.num_samples(split)} {split}" for split in (*SPLITS, *data.test_splits))
    except Exception as error:  # any error, since the task may be the user's own
        return Finding(what, "problem", f"{type(error).__name__}: {error}")
    if data.synthetic:
        return Finding(what, "warning", f"{counts}; SYNTHETIC images")
    return Finding(what, "ok", counts)


def start_up_kit(kit: Path) -> Iterator[Finding]:
    """Yield findings on a start-up kit's allow list, rights, log streaming, signed jobs and certificates."""
    local, startup = kit / "local", kit / "startup"
    if (found := _in_use(local, "resources.json")) is None:
        yield Finding("kit", "problem", f"{kit} has no local/resources.json; give the folder of a start-up kit")
        return
    try:
        resources = json.loads(found.read_text(encoding="utf-8"))
        yield _allow_list(resources.get("class_allow_list", []))
        yield from _rights(local)
        site = (startup / "fed_client.json").is_file()
        if site and resources.get("allow_log_streaming", True):
            yield Finding(
                "log streaming", "warning",
                f"the site's job logs go to the server, texts of exceptions with them ({found.name}); {LAY}",
            )  # fmt: skip
        yield from _kept(resources, local, "state_root" if site else "checkpoint_root")
        started = startup / ("fed_client.json" if site else "fed_server.json")
        if started.is_file() and json.loads(started.read_text(encoding="utf-8")).get("require_signed_jobs") is False:
            yield Finding("signed jobs", "warning", f"jobs without a signature run; take the key out of {started.name}")
    except (ValueError, AttributeError, KeyError) as error:
        yield Finding("allow list", "problem", f"{found}: {error}")
    for certificate in sorted([*startup.glob("*.crt"), *startup.glob("rootCA.pem")]):
        yield _expiry(certificate)


def _in_use(local: Path, name: str) -> Path | None:
    """Return the file of this name that FLARE reads: the site's own file, else the kit's default file."""
    return next((path for path in (local / name, local / f"{name}.default") if path.is_file()), None)


def _kept(resources: Mapping[str, Any], local: Path, key: str) -> Iterator[Finding]:
    """Yield a warning if files that must outlive a job would be lost with the job's container."""
    launchers = {"docker_launcher", "k8s_launcher"} & {part.get("id") for part in resources.get("components", [])}
    own = local / "fairflare.json"
    if launchers and not (own.is_file() and key in json.loads(own.read_text(encoding="utf-8"))):
        yield Finding(
            key, "warning",
            f"what stays between jobs is lost with each job's container: set {key} in local/fairflare.json to a mount",
        )  # fmt: skip


def _rights(local: Path) -> Iterator[Finding]:
    """Yield a finding on the rights of users to bring code with a job or to open a shell."""
    if (found := _in_use(local, "authorization.json")) is None:
        return
    roles = json.loads(found.read_text(encoding="utf-8"))["permissions"]
    wide = [
        f"{role}: {right}"
        for role, rights in roles.items()
        for right in ("byoc", "shell_commands")
        if (rights if isinstance(rights, str) else rights.get(right, "none")) != "none"
    ]
    text = f"{', '.join(wide)} ({found.name}); {LAY}" if wide else "nobody may bring code or use a shell"
    yield Finding("rights", "warning" if wide else "ok", text)


def _allow_list(entries: list[str]) -> Finding:
    """Return a finding on the allow list: it should allow the classes of jobs without custom code, and no other."""
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
    """Return a finding on a port: whether a server could listen on it on this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            return Finding(f"port {port}", "problem", f"not free: {getattr(error, 'strerror', None) or error}")
    return Finding(f"port {port}", "ok", "free")
