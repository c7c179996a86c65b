"""Record where a comparison's figures come from: code, data, processor and versions, in a file beside its tables."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import sha256_of, write_whole
from fairflare.cli.screen import say

FILE = "provenance.json"


def note_session(folder: Path, command: Sequence[str], local: Mapping[str, Any], runs: Sequence[str]) -> None:
    """Add a session to a comparison's ``provenance.json``: code, machine and data of its next runs, before they begin.

    A comparison that was stopped may be resumed with other code or on another machine, so each session has an entry.

    Args:
        folder: folder of the comparison.
        command: arguments of the command line.
        local: content of ``local/fairflare.json``.
        runs: names of the runs that are missing; the session does as many of them as it can.

    Raises:
        OSError: the folder cannot be written.
        ValueError: the existing file cannot be read.
    """
    import torch

    from fairflare.federation.record.run_info import versions

    session = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "commit": commit_of(Path(__file__).parents[1]),
        "processor": processor(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "versions": versions(),
        "data": checksums(local),
        "runs": list(runs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    before = sessions_of(folder)
    if any(one["data"] != session["data"] for one in before):
        say(f"the data CHANGED since this comparison began: its figures are not of the same images ({folder / FILE})")
    text = json.dumps({"sessions": [*before, session]}, indent=1) + "\n"
    write_whole(folder / FILE, lambda path: path.write_text(text, encoding="utf-8"))


def sessions_of(folder: Path) -> list[dict[str, Any]]:
    """Return the sessions that :func:`note_session` recorded; empty before the first one.

    Raises:
        ValueError: the file exists and cannot be read; the message names it.
    """
    path = folder / FILE
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["sessions"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); move it away to go on without what it says") from error


def commit_of(package: Path) -> str | None:
    """Return the commit of a package's files, ``+ changes`` where some differ; ``None`` without checkout or git."""
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # fails in a checkout of another project
        commit = _git(package, "rev-parse", "HEAD").strip()
        return f"{commit} + changes" if _git(package, "status", "--porcelain", "--", ".").strip() else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True
    ).stdout


def processor() -> str:
    """Return the processor's name, as last bits of results depend on it; if unknown, the kind of machine."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def checksums(local: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return checksums of the files that each site's datalist names.

    Args:
        local: content of ``local/fairflare.json``.

    Returns:
        ``{site: {"datalist": sha256, "files": number, "sha256": sha256 of all names and contents}}``; for data that
        cannot be read ``{"not recorded": reason}``. The result is empty if no site names a ``data_root``: the data are
        synthetic, or the task reads them from elsewhere.
    """
    from fairflare.federation.site.site_file import own_settings
    from fairflare.methods.base.training import SiteError

    blocks = local.get("sites")
    names = [name for name in blocks if name != "server"] if isinstance(blocks, Mapping) and blocks else ["all sites"]
    sums = {}
    for name in names:
        try:
            settings = own_settings(dict(local), name)
            if settings.get("data_root") is not None:
                sums[name] = _checksum_list(
                    Path(settings["data_root"]).expanduser(), settings.get("datalist") or "datalist.json"
                )
        except (OSError, ValueError, TypeError, SiteError) as error:  # the runs will report this error with a remedy
            sums[name] = {"not recorded": f"{type(error).__name__}: {error}"}
    return sums


def _checksum_list(root: Path, datalist: str) -> dict[str, Any]:
    content = (root / datalist).read_text(encoding="utf-8")
    json.loads(content)  # raises for a damaged list, so that no checksum is recorded
    texts = {json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', content)}
    files = sorted(file for file in texts if (root / file).is_file())  # the images and masks
    lines = "".join(f"{sha256_of(root / file)}  {file}\n" for file in files)
    return {
        "datalist": sha256_of(root / datalist), "files": len(files),
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }  # fmt: skip
