"""Run a FLARE POC system in tests, with its own HOME, folders and free loopback ports; all its processes can be ended.

Every process that the system starts inherits a mark in its environment, so that the tests end these and no others,
whatever process group or parent FLARE has given them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairflare.provision import job_classes

MARK = "FAIRFLARE_TEST_SYSTEM"
PROJECT = "fairflare_poc"
ADMIN = "admin@example.org"
# A server of this name listens on the loopback interface only.
SERVER = "localhost"


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def wait_for(what: str, look: Callable[[], Any], timeout: float, period: float = 0.1) -> Any:
    """Return the first true answer of ``look``.

    Raises:
        TimeoutError: none in time (says ``what`` was waited for).
    """
    end = time.monotonic() + timeout
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout} s")
        time.sleep(period)


def processes(mark: str) -> dict[int, str]:
    """Return the live processes that carry the mark, process id -> command line."""
    wanted = f"{MARK}={mark}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile, or not ours
            continue
        if command:  # empty: dead, waiting to be collected
            found[int(entry.name)] = command
    return found


def end_processes(mark: str, only: Callable[[str], bool] = lambda command: True) -> list[str]:
    """Kill the processes with the mark, one by one, until none is left; return their command lines."""
    ended: list[str] = []
    for _ in range(50):
        now = {pid: command for pid, command in processes(mark).items() if only(command)}
        if not now:
            return ended
        # Shell wrappers first: they restart what they look after.
        for pid, command in sorted(now.items(), key=lambda item: "python" in item[1].split(" ")[0]):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended.append(command)
        time.sleep(0.1)
    raise RuntimeError(f"processes do not end: {now}")


class PocSystem:
    """Run ``nvflare poc`` with one server and named sites.

    Args:
        root: an empty folder; everything is kept in it.
        sites: names.
    """

    def __init__(self, root: Path, sites: Sequence[str]) -> None:
        self.root = root
        self.sites = list(sites)
        self.mark = uuid.uuid4().hex
        self.home = root / "home"
        self.home.mkdir(parents=True)
        self.workspace = root / "poc"
        binaries = str(Path(sys.executable).parent)
        self.env = {
            **os.environ,
            "HOME": str(self.home),
            "NVFLARE_POC_WORKSPACE": str(self.workspace),
            "PATH": binaries + os.pathsep + os.environ["PATH"],
            MARK: self.mark,
        }
        # Threads of three sites would fight for the cores of a small machine.
        self.env.setdefault("OMP_NUM_THREADS", "1")

    # -- commands

    def nvflare(self, *arguments: str, timeout: float = 120, check: bool = True) -> str:
        """Run ``nvflare ...`` and return its output."""
        # Services that `poc start` leaves behind inherit the streams, so these are a file and no pipe.
        log = self.root / "commands.log"
        with log.open("ab") as out:
            start = out.tell()
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("nvflare")), *arguments],
                cwd=self.root, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = -9
        text = log.read_bytes()[start:].decode(errors="replace")
        if check and code != 0:
            raise RuntimeError(f"nvflare {' '.join(arguments)} ended with code {code}:\n{text[-3000:]}")
        return text

    def write_project(self) -> Path:
        """Write the project file, with free ports."""
        service, admin = free_ports(2)
        participants: list[dict[str, Any]] = [
            {"name": SERVER, "type": "server", "org": "test", "default_host": "localhost",
             "fed_learn_port": service, "admin_port": admin},
            *({"name": site, "type": "client", "org": "test"} for site in self.sites),
            {"name": ADMIN, "type": "admin", "org": "test", "role": "project_admin"},
        ]  # fmt: skip
        builders = [
            {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder"},
            {"path": "nvflare.lighter.impl.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": "nvflare.lighter.impl.cert.CertBuilder"},
            {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
        ]
        project = {"api_version": 3, "name": PROJECT, "description": "test", "participants": participants,
                   "builders": builders}  # fmt: skip
        path = self.root / "project.yml"
        path.write_text(json.dumps(project))  # JSON is YAML
        return path

    def prepare(self) -> None:
        self.nvflare("poc", "prepare", "-i", str(self.write_project()))

    def kit(self, name: str) -> Path:
        return self.workspace / PROJECT / "prod_00" / name

    def start(self, timeout: int = 120) -> None:
        self.nvflare("poc", "start", "--timeout", str(timeout), timeout=timeout + 60)

    def stop(self) -> str:
        """Stop the system by FLARE's own command, and return its output."""
        return self.nvflare("poc", "stop", timeout=90, check=False)

    def start_site(self, site: str, timeout: float = 120) -> None:
        """Start one site again, as its administrator would, and wait until the server has accepted it.

        ``nvflare poc start`` waits for a site that the server lists, and after a kill it still lists the dead one, so
        the new process's own word counts.
        """
        self.end_site(site)  # whatever a failed test left: two of one name would fight for the tasks
        for name in ("daemon_pid.fl", "pid.fl", "shutdown.fl"):
            (self.kit(site) / name).unlink(missing_ok=True)
        log = self.kit(site) / "log.txt"
        before = log.stat().st_size if log.exists() else 0
        self.nvflare("poc", "start", "-p", site, "--timeout", str(int(timeout)), timeout=timeout + 60)

        def registered() -> bool:
            if not log.exists():
                return False
            size = log.stat().st_size
            with log.open("rb") as file:
                file.seek(before if size >= before else 0)
                return f"Successfully registered client:{site}".encode() in file.read()

        wait_for(f"registration of {site}", registered, timeout)

    def abort_jobs(self) -> None:
        """End jobs that a failed test left running, so that the next test's job is scheduled."""
        for folder in self.kit(SERVER).iterdir():
            if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", folder.name):
                self.nvflare("job", "abort", folder.name, "--force", check=False)

    def end_site(self, site: str) -> list[str]:
        """Kill one site: the wrapper that restarts it, its parent process, and all its job processes."""
        folder = str(self.kit(site))
        return end_processes(self.mark, lambda command: re.search(re.escape(folder) + r"(/|\s|$)", command) is not None)

    # -- settings of a participant

    def edit_local(self, name: str, file: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change ``local/<file>`` of a participant, which is at first FLARE's default file."""
        path = self.kit(name) / "local" / file
        default = path.with_name(file + ".default")
        source = path if path.exists() else default
        content = json.loads(source.read_text()) if source.exists() else {}
        change(content)
        path.write_text(json.dumps(content, indent=2))

    def allow(self, name: str, *, yes: bool = True) -> None:
        """Add our jobs' classes to a participant's class allow list, or remove them."""
        ours = job_classes()

        def change(resources: dict[str, Any]) -> None:
            listed = [entry for entry in resources["class_allow_list"] if entry not in ours]
            resources["class_allow_list"] = [*listed, *ours] if yes else listed

        self.edit_local(name, "resources.json", change)

    # -- jobs

    def submit(self, folder: Path) -> str:
        text = self.nvflare("job", "submit", "-j", str(folder))
        found = re.search(r"job_id:?\s+(\S+)", text)
        if not found:
            raise RuntimeError(f"no job id in: {text}")
        return found.group(1)

    def wait(self, job: str, timeout: float) -> str:
        return self.nvflare("job", "wait", job, "--timeout", str(int(timeout)), timeout=timeout + 30, check=False)

    def run_dir(self, job: str) -> Path:
        """Return the run directory of the job at the server, while the job runs."""
        return self.kit(SERVER) / job

    def download(self, job: str) -> Path:
        """Return the server's run directory, as FLARE delivers it after the job."""
        out = self.root / "downloads"
        out.mkdir(exist_ok=True)
        self.nvflare("job", "download", job, "-o", str(out))
        return out / job / "workspace"

    # -- cleaning up

    def close(self) -> None:
        """End all processes that are left."""
        end_processes(self.mark)


@contextmanager
def poc_system(root: Path, sites: Sequence[str]) -> Iterator[PocSystem]:
    """Yield a prepared POC system; all its processes are ended afterwards."""
    system = PocSystem(root, sites)
    try:
        system.prepare()
        yield system
    finally:
        system.close()
