"""Give the sealed reader hostile MONAI bundles: each is refused by key, and nothing of it runs, hangs or swells.

A case is told by its seed and number. It changes a healthy configuration at one place that a federated run reads, and
writes it as JSON or YAML; the reader makes every part, and what it accepts is applied to an image. An audit hook and a
file that a payload would write say whether something ran.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import re
import resource
import shutil
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import fairflare
from fairflare.base.disk.bundle_files import BundleError
from fairflare.tasks.bundles.bundle_config import Bundle
from fairflare.tasks.bundles.bundle_parts import BundleParts
from fairflare.tasks.bundles.sealed import shipped_classes

from ..bundles import train_config
from .bench import Verdict
from .bundle_payloads import FAMILIES, Change

BUNDLES = "bundles"
SECONDS, MEGABYTES = 2.0, 500
LONGEST = 1200  # of a refusal
#: Below these folders the libraries lie, which import modules of their own when they are first needed.
PLACES = {*sysconfig.get_paths().values(), *(p for p in sys.path if "site-packages" in p), *fairflare.__path__}
LIBRARIES = (*{str(p) for place in PLACES for p in (place, Path(place).resolve())}, "/proc/self/", "<frozen")
IMPORTED = (
    "monai",
    "torch",
    "numpy",
    "fairflare",
    "scipy",
    "skimage",
    "itk",
    "nrrd",
    "nibabel",
    "pydicom",
    "PIL",
    "cupy",
)
EVENTS = (  # that are wrong wherever they come from, by their beginning
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.putenv", "os.remove", "os.rename", "os.mkdir",
    "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.kill", "os.truncate", "subprocess.", "socket.", "ctypes.",
    "pickle.", "urllib.", "http.", "ftplib.", "tempfile.", "shutil.", "webbrowser.", "time.sleep", "mmap.",
    "sys.addaudithook", "sys.set", "code.__new__", "cpython.run", "builtins.input", "builtins.breakpoint", "glob.",
)  # fmt: skip
_watching: list[str] | None = None  # what the audit hook found in the case that runs
_hooked = False
_folders: tuple[str, ...] = ()


class TooSlow(BaseException):
    """Say that a case took too long; nobody's ``except Exception`` holds it up."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching is None:
        return
    bad = event.startswith(EVENTS)
    if event == "exec":
        bad = not str(getattr(args[0], "co_filename", "")).startswith(LIBRARIES)
    elif event == "compile":  # of `ast.parse`, which runs nothing, the name is "<unknown>"
        bad = not str(args[1]).startswith((*LIBRARIES, "<unknown>"))
    elif event in ("open", "os.listdir", "os.scandir"):  # a traceback looks for "<unknown>"
        writes = event == "open" and isinstance(args[1], str) and not set(args[1]).isdisjoint("wax+")
        looks = event == "os.listdir" and args[0] in sys.path  # for a module
        bad = writes or not (looks or str(args[0]).startswith((*LIBRARIES, *_folders, "<unknown>")))
    elif event == "import":
        bad = args[0].partition(".")[0] not in IMPORTED
    if bad:
        _watching.append(f"{event} {str(args)[:150]}")


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[list[str]]:
    """Collect what runs, opens or imports something in here that reading this bundle need not."""
    global _watching, _folders
    _folders = (str(folder), str(folder.with_name("site")))
    found: list[str] = []
    _watching = found
    try:
        yield found
    finally:
        _watching = None


def attack_bundles(
    folder: Path, method: str, phase: str, seed: int, cases: Any = (), *, replies: int = 0, sealed: bool = True
) -> list[Verdict]:
    """Try hostile bundles, as ``attack`` of the bench does replies. Not sealed, everything runs."""
    global _hooked
    warnings.filterwarnings("ignore", module="monai")
    torch.set_num_threads(1)
    write(folder / "healthy", healthy())
    use(folder / "healthy", sealed)  # is accepted, and loads the modules
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    return [_judged(folder / str(index), index, seed, sealed) for index in cases or range(replies)]


def healthy() -> dict[str, Any]:
    """Return the healthy configuration: pictures, a function of an array, macros and references."""
    config = train_config(dims=2, patch=8)
    config["half"] = 0.5
    config["loss"]["lambda_ce"] = "@half"
    prepare = config["train"]["deterministic_transforms"]
    prepare[1]["channel_dim"] = "no_channel"
    prepare[3] = {"_target_": "Lambdad", "keys": "image", "func": "$lambda x: x > 0", "overwrite": "mask"}
    return config


def write(folder: Path, config: Any, text: str | None = None, suffix: str = ".json") -> None:
    """Write a bundle of one file, and an image of a site beside it."""
    rng = np.random.default_rng(0)
    folder.with_name("site").mkdir(parents=True, exist_ok=True)
    for kind, array in (("image", rng.normal(size=(16, 16))), ("label", rng.random((16, 16)) > 0.7)):
        np.save(folder.with_name("site") / f"{kind}.npy", array.astype(np.float32))
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    if text is None:
        text = json.dumps(config) if suffix == ".json" else yaml.safe_dump(config, sort_keys=False)
    (folder / "configs" / f"train{suffix}").write_text(text, encoding="utf-8", errors="surrogatepass")


def use(folder: Path, sealed: bool, in_job: bool = False) -> None:
    """Make every part of a bundle, and apply what was made to one image; ``in_job``: the file is a text in the job."""
    (file,) = folder.glob("configs/train.*")
    text = file.read_text(encoding="utf-8", errors="surrogateescape") if in_job else None
    parts = BundleParts(Bundle(folder, ["train"], sealed=shipped_classes() if sealed else None, text=text))
    parts.check()
    network = parts.make("network")
    optimizer = parts.optimizer(list(network.parameters()))
    if not isinstance(parts.make("train_batch_size"), int):
        raise BundleError("key 'train#dataloader#batch_size' is no number")
    files = {kind: str(folder.parent / "site" / f"{kind}.npy") for kind in ("image", "label")}
    try:
        patch = parts.make("train_preprocessing")({**files})[0]
        parts.make("validate_preprocessing")({**files})
        output = network(patch["image"][None])
        parts.kept("loss")(output, patch["label"][None]).backward()
        optimizer.step()
        parts.kept("validate_inferer")(patch["image"][None], network)
        made = parts.kept("validate_postprocessing")({"pred": output[0].detach(), "label": patch["label"]})
        parts.kept("key_metric").measure_image(made, "label")
    except Exception as error:  # a wrong size or value is found at the first image, which FairFlare refuses by name
        raise BundleError(f"key 'transforms' cannot do with the image: {error!r:.300}") from error


def _judged(folder: Path, index: int, seed: int, sealed: bool) -> Verdict:
    rng = random.Random(f"{BUNDLES}/{seed}/{index}")
    canary = folder.with_name("canary")
    family = rng.choice([*FAMILIES])
    change: Change = FAMILIES[family](rng, healthy(), str(canary))
    write(folder, change.config, change.text, change.suffix)
    verdict = Verdict(index, f"{family}: {change.name}")
    folder.with_name("running").write_text(f"{index} {verdict.name}"[:300], errors="replace")  # where even that ends
    state = _state(folder)
    error: BaseException | None = None
    begun, before = time.process_time(), _memory("VmRSS")
    try:
        with _limits(), watching(folder) as ran:
            use(folder, sealed, in_job=sealed and change.suffix == ".yaml" and not index % 2)
    except (Exception, TooSlow) as raised:
        error = raised
    took, grown = time.process_time() - begun, _memory("VmHWM") - before
    verdict.accepted, verdict.reason = error is None, f"{error}"
    if took > SECONDS or isinstance(error, TooSlow):
        verdict.fault("slow", f"{took:.1f} s")
    if ran or canary.exists():
        verdict.fault("executed", "; ".join(ran) or "the canary is there")
        canary.unlink(missing_ok=True)
    if grown > MEGABYTES or any(isinstance(e, MemoryError) or "alloc" in f"{e}" for e in _chain(error)):
        verdict.fault("memory", f"{grown} MB: {error!r}")
    if state != _state(folder):
        verdict.fault("changed", "the process has other settings, or the site other files")
    if error is None and not change.may_pass:
        verdict.fault("passed", "it was accepted")
    if error is not None and not isinstance(error, BundleError | TooSlow):
        verdict.fault("raised", f"{type(error).__name__}: {error}")
    named = re.search(
        r"key '|configs/train\.\w+ cannot be read|configs/train: the text of the job cannot be made", verdict.reason
    )
    if isinstance(error, BundleError) and not (named and len(f"{error}") <= LONGEST and f"{error}".isprintable()):
        verdict.fault("unnamed", f"{len(verdict.reason)} characters: {verdict.reason!r}")
    shutil.rmtree(folder)
    return verdict


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End what takes much longer, and refuse more memory than allowed."""

    def stop(*_: Any) -> None:
        raise TooSlow

    usual, hard = resource.getrlimit(resource.RLIMIT_AS)
    Path("/proc/self/clear_refs").write_text("5")  # the highest use of memory begins anew
    faulthandler.dump_traceback_later(60, exit=True)  # what even a signal does not end
    before = signal.signal(signal.SIGALRM, stop), signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 15 * SECONDS)  # where nothing is computed; other processes wait for nobody
    resource.setrlimit(resource.RLIMIT_AS, ((_memory("VmSize") + MEGABYTES) * 2**20, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (usual, hard))
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])
        faulthandler.cancel_dump_traceback_later()


def _memory(field: str) -> int:
    """Return a figure of this process in megabytes."""
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) // 1024 if found else 0


def _state(folder: Path) -> Any:
    kinds = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    files = [file.read_bytes() for file in sorted(folder.parent.glob("site/*"))]
    return kinds, Path.cwd(), [*sys.path], sys.getrecursionlimit(), np.geterr(), files
