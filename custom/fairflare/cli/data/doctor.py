"""Implement ``fairflare doctor``, which checks the installation, a start-up kit and a MONAI bundle."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from fairflare.base.disk.bundle_files import BundleError
from fairflare.base.machine.memory import cores
from fairflare.base.own_errors import EXTRAS as IMPORTED
from fairflare.base.own_errors import describe_error
from fairflare.cli.options import MonaiBundle, parse_settings
from fairflare.cli.screen import AsJson, console, one_document, user_errors

if TYPE_CHECKING:
    from fairflare.tasks.bundle import MonaiBundleTask

State = Literal["ok", "warning", "problem"]
PREFIX = "fairflare"
EXTRAS = {
    "data": "images that are files", "page": "the report and pictures", "tensorboard": "curves in TensorBoard",
    "dp": "differential privacy at a site",
}  # fmt: skip
LAY = "`fairflare policies KIT` narrows it"
#: Settings of a bundle that say which keys and values of it are read.
OF_BUNDLE = ("bundle_configs", "bundle_overrides", "label_key", "optimizer")
NEEDS_CODE = 3  # exit code for a bundle that trains only where its code may run
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class KitFinding:
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
    kit: Annotated[Path | None, typer.Option(metavar="DIR", help="Start-up kit of a FLARE server or site.")] = None,
    monai_bundle: MonaiBundle = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the bundle's task; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at versions, GPU, disk, a start-up kit and a MONAI bundle. Exit code 1 when something cannot work, 3 when a
    bundle trains only where its code may run.
    """
    with user_errors(), one_document(as_json):
        values = parse_settings(settings)
        if odd := [name for name in values if monai_bundle is None or name not in OF_BUNDLE]:
            raise ValueError(
                f"doctor has no use for --set {odd[0]}; it takes {', '.join(OF_BUNDLE)} of a --monai-bundle"
            )
        bundle_class = [] if monai_bundle is None else list(sealing(monai_bundle, values))
    with one_document(as_json) as put:
        findings = [*bundle_class, *examine(kit)]
        if as_json:
            put(findings=findings)
    table = Table("checked", "", "found", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(escape(finding.what), f"[{COLOURS[finding.state]}]{finding.state}[/]", escape(finding.text))
    if not as_json:
        console.print(table)
    needs_code = any(finding.what == "sealed" and finding.state == "warning" for finding in findings)
    raise typer.Exit(1 if any(finding.state == "problem" for finding in findings) else NEEDS_CODE * needs_code)


def examine(kit: Path | None = None) -> Iterator[KitFinding]:
    """Yield the finding of each check, one after the other: packages, imports, device, disk space, start-up kit."""
    yield from dict.fromkeys(packages())  # two extras may need one package
    yield from imports()
    yield device()
    yield room(Path.cwd())
    if kit is not None:
        yield from start_up_kit(kit)


def sealing(folder: Path, settings: Mapping[str, Any]) -> Iterator[KitFinding]:
    """Yield findings on whether a MONAI bundle can be trained where code is forbidden, and what data it needs.

    Args:
        folder: the bundle's folder; none of its code is run.
        settings: settings of the task; only those that say which files, keys and values are read are used.
    """
    from fairflare.tasks.bundle import MonaiBundleTask, seal_settings
    from fairflare.tasks.bundles.bundle_config import Bundle, first_cause
    from fairflare.tasks.bundles.bundle_data import takes_class_numbers
    from fairflare.tasks.bundles.bundle_parts import BundleParts
    from fairflare.tasks.bundles.expressions import Refused
    from fairflare.tasks.bundles.sealed import shipped_classes

    configs, overrides = settings.get("bundle_configs") or ["train"], settings.get("bundle_overrides")
    bundle = Bundle(folder, configs, overrides, sealed=shipped_classes())
    parts = BundleParts(bundle)
    for problem in (problems := list(parts.problems(optimizer="optimizer" not in settings))):
        code = isinstance(first_cause(problem), Refused)  # else it fails even where code may run
        yield KitFinding("not sealed", "warning" if code else "problem", str(problem))
    no = f"no: {len(problems)} part(s) cannot be made without code rights; those that are wrong not with them either"
    settings = {**settings, **seal_settings(folder, configs)}
    yield KitFinding("sealed", "warning", no) if problems else _try_bundle(MonaiBundleTask(**settings))
    if user_code := bundle.own_code():
        yield KitFinding("own code", "warning", f"brings Python of its own: keys {', '.join(user_code)}")
    declared = bundle.get("_meta_#network_data_format#inputs")
    wanted = json.dumps(declared) if declared else "configs/metadata.json does not say"
    label = "a label's file"
    with suppress(BundleError):
        if takes_class_numbers(parts.kept("train_preprocessing"), settings.get("label_key", "label")):
            label = "a class's number as its label"
    yield KitFinding(
        "data it wants", "ok",
        f"an image (a file, or a list of files, a channel each) and {label} a case; {wanted:.600}",
    )  # fmt: skip


def _try_bundle(task: MonaiBundleTask) -> KitFinding:
    """Return the finding on whether a sealed bundle, all of whose parts can be made, trains from a datalist."""
    from fairflare.data.datalist import DataError
    from fairflare.tasks.bundles.trial import train_once

    try:
        images = train_once(task)
    except (BundleError, DataError) as error:
        return KitFinding("sealed", "problem", f"no: its parts can be made, but {error}; images of its own kind may do")
    return KitFinding(
        "sealed", "ok", f"yes: it trains at sites that permit no code (export --preinstalled); tried on {images}"
    )


def packages() -> Iterator[KitFinding]:
    """Yield findings on the versions of Python and of the packages that FairFlare needs."""
    from packaging.requirements import Requirement

    yield _version(
        "python", ".".join(map(str, sys.version_info[:3])), (3, 10) <= sys.version_info[:2] <= (3, 14),
        "3.10 to 3.14 are supported",
    )  # fmt: skip
    yield KitFinding("fairflare", "ok", version("fairflare"))
    for text in requires("fairflare") or []:
        wanted = Requirement(text)
        extra = next((name for name in EXTRAS if wanted.marker and wanted.marker.evaluate({"extra": name})), None)
        if wanted.marker is not None and extra is None:  # packages for developers, or for a single method
            continue
        try:
            installed = version(wanted.name)
        except PackageNotFoundError:
            lacks = f"not installed; {Requirement(text.partition(';')[0])} is needed"
            more = f" for {EXTRAS[extra]}: pip install 'fairflare[{extra}]'" if extra else ""
            yield KitFinding(wanted.name, "warning" if extra else "problem", lacks + more)
            continue
        yield _version(
            wanted.name, installed, wanted.specifier.contains(installed, prereleases=True), f"{wanted} is needed"
        )


def _version(what: str, number: str, fits: bool, wanted: str) -> KitFinding:
    return KitFinding(what, "ok", number) if fits else KitFinding(what, "problem", f"{number}; {wanted}")


def imports() -> Iterator[KitFinding]:
    """Yield a problem for each package that runs import, and that is installed but cannot be imported here."""
    # The modules of a run import PyTorch, MONAI and FLARE.
    for name in ("fairflare.tasks.batches", "fairflare.flare.controller", "fairflare.flare.executor", *IMPORTED):
        try:
            import_module(name)
        except Exception as error:  # a package may raise any error
            if not (isinstance(error, ModuleNotFoundError) and error.name == name):  # its version says what is missing
                yield KitFinding(name, "problem", f"cannot be imported here: {describe_error(error)}")


def device() -> KitFinding:
    """Return a finding on the GPU, with the number of CPU cores where there is no GPU."""
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return KitFinding(
            "GPU", "ok", ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
        )
    return KitFinding("GPU", "warning", f"none that PyTorch can use; training runs on {cores()} CPU core(s)")


def room(folder: Path) -> KitFinding:
    """Return a finding on the free space of a folder's disk, with a warning at 5 GiB or less."""
    gib = shutil.disk_usage(folder).free / 2**30
    return KitFinding("disk", "ok" if gib > 5 else "warning", f"{gib:.1f} GiB free")


def start_up_kit(kit: Path) -> Iterator[KitFinding]:
    """Yield findings on a start-up kit's allow list, rights, log streaming, signed jobs and certificates."""
    local, startup = kit / "local", kit / "startup"
    if (file := _file_read_by_flare(local, "resources.json")) is None:
        yield KitFinding("kit", "problem", f"{kit} has no local/resources.json; give the folder of a start-up kit")
        return
    try:
        resources = json.loads(file.read_text(encoding="utf-8"))
        yield _allow_list(resources.get("class_allow_list", []))
        yield from _rights(local)
        site = (startup / "fed_client.json").is_file()
        if site and resources.get("allow_log_streaming", True):
            yield KitFinding(
                "log streaming", "warning",
                f"the site's job logs go to the server, texts of exceptions with them ({file.name}); {LAY}",
            )  # fmt: skip
        yield from _check_kept(resources, local, "state_root" if site else "checkpoint_root")
        yield from _find_decoded(kit)
        started = startup / ("fed_client.json" if site else "fed_server.json")
        if started.is_file() and json.loads(started.read_text(encoding="utf-8")).get("require_signed_jobs") is False:
            yield KitFinding(
                "signed jobs", "warning", f"jobs without a signature run; take the key out of {started.name}"
            )
    except (ValueError, AttributeError, KeyError) as error:
        yield KitFinding("allow list", "problem", f"{file}: {error}")
    for certificate in sorted([*startup.glob("*.crt"), *startup.glob("rootCA.pem")]):
        yield _expiry(certificate)


def _file_read_by_flare(local: Path, name: str) -> Path | None:
    """Return the file of this name that FLARE reads: the site's own file, else the kit's default file."""
    return next((path for path in (local / name, local / f"{name}.default") if path.is_file()), None)


def _check_kept(resources: Mapping[str, Any], local: Path, key: str) -> Iterator[KitFinding]:
    """Yield a warning if files that must outlive a job would be lost with the job's container."""
    launchers = {"docker_launcher", "k8s_launcher"} & {part.get("id") for part in resources.get("components", [])}
    settings = local / "fairflare.json"
    if launchers and not (settings.is_file() and key in json.loads(settings.read_text(encoding="utf-8"))):
        yield KitFinding(
            key, "warning",
            f"what stays between jobs is lost with each job's container: set {key} in local/fairflare.json to a mount",
        )  # fmt: skip


def _find_decoded(kit: Path) -> Iterator[KitFinding]:
    """Yield a finding on decoded and prepared volumes that a site keeps on its disk, if there are any."""
    from fairflare.data.decoded import UNUSED_DAYS
    from fairflare.federation.site.site_file import DECODED, DECODED_PLACE, SITE_FILE, read_site_file

    settings = read_site_file(kit / "local" / SITE_FILE, kit.name)
    root = Path(settings.get("state_root") or kit / "fairflare_state")
    for folder in map(Path, filter(None, (settings.get(DECODED), root / DECODED_PLACE))):
        if files := [*folder.rglob("*.npy")]:
            size = sum(file.stat().st_size for file in files) / 1e9
            yield KitFinding(
                "decoded volumes", "ok",
                f"{len(files)} of patients, {size:.1f} GB, in {folder}: remove it with the site's data, or volumes "
                f"that left the data stay for up to {UNUSED_DAYS} days",
            )  # fmt: skip


def _rights(local: Path) -> Iterator[KitFinding]:
    """Yield a finding on the rights of users to bring code with a job or to open a shell."""
    if (file := _file_read_by_flare(local, "authorization.json")) is None:
        return
    wide = [
        f"{role}: {right}"
        for role, rights in json.loads(file.read_text(encoding="utf-8"))["permissions"].items()
        for right in ("byoc", "shell_commands")
        if (rights if isinstance(rights, str) else rights.get(right, "none")) != "none"
    ]
    yield KitFinding(
        "rights", "warning" if wide else "ok",
        f"{', '.join(wide)} ({file.name}); {LAY}" if wide else "nobody may bring code or use a shell",
    )  # fmt: skip


def _allow_list(entries: list[str]) -> KitFinding:
    """Return a finding on the allow list: it should allow the classes of jobs without custom code, and no other."""
    from fairflare.provision import job_classes

    remedy = "list what fairflare.provision.job_classes() gives in class_allow_list (resources.json)"
    wanted = job_classes()
    if wide := [name for name in entries if name == "*" or (name.partition(".")[0] == PREFIX and name not in wanted)]:
        return KitFinding(
            "allow list", "warning",
            f"{wide[0]!r} lets a job call any function of the package with its own arguments; {remedy} instead",
        )  # fmt: skip
    if missing := [name for name in wanted if name not in entries]:
        few = f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)}"
        return KitFinding(
            "allow list", "problem" if missing == wanted else "warning",
            f"{len(missing)} of {len(wanted)} classes are missing ({few}): jobs with them are refused; {remedy}",
        )  # fmt: skip
    return KitFinding("allow list", "ok", "what jobs without custom code name is allowed")


def _expiry(path: Path) -> KitFinding:
    from cryptography import x509

    what = f"certificate {path.name}"
    try:
        ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError as error:
        return KitFinding(what, "problem", str(error))
    days = (ends - datetime.now(timezone.utc)).days
    state: State = "problem" if days < 0 else "warning" if days < 30 else "ok"
    remedy = "" if state == "ok" else "; renew it: docs/security.md (provisioning again alone keeps the old one)"
    return KitFinding(what, state, f"valid until {ends:%Y-%m-%d}{remedy}")
