"""Checks docker/Dockerfile: by Docker where it answers, else each of its lines in a fresh Debian tree.

    python docker/check.py                    # Docker, or root with debootstrap; an index for apt and pip
    python docker/check.py --wheels FOLDER    # pip may take wheels from there, too: PyTorch without CUDA is smaller

Without Docker the base image is Debian with its own Python of the version that FROM names. After the last line
`fairflare doctor` runs as the image's user, and CMD with a kit that `nvflare provision` makes in the tree: it has to
stay in the foreground.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = {"3.11": "bookworm", "3.13": "trixie"}  # Debian's with this Python


def instructions(text: str) -> list[tuple[str, str]]:
    """Keyword and rest of each instruction, comments gone and continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def admitted() -> set[str]:
    """What .dockerignore, which begins by ignoring all, lets into a build."""
    return {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}


class Tree:
    """A Debian tree that takes the lines of a Dockerfile one by one."""

    def __init__(self, root: Path, wheels: Path | None) -> None:
        self.root = root
        self.user = "root"
        self.folder = "/"
        passed = {k: v for k, v in os.environ.items() if re.match(r"(?i)(pip_(?!find)|(https?|no)_proxy$|ssl_cert)", k)}
        self.env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "DEBIAN_FRONTEND": "noninteractive",
            **passed,
        }
        self.wheels = wheels

    def run(self, command: list[str], timeout: float | None = None) -> int:
        """Exit code of a command in the tree; 124: it was still running after ``timeout`` seconds."""
        chroot = [
            "chroot",
            f"--userspec={self.user}:{self.user}",
            str(self.root),
            "sh",
            "-c",
            f"cd {self.folder} && {shlex.join(command)}",
        ]
        limit = [] if timeout is None else ["timeout", "--kill-after=5", str(timeout)]
        return subprocess.run(
            [*limit, *chroot],
            env={**self.env, "HOME": "/root" if self.user == "root" else f"/home/{self.user}"},
            check=False,
        ).returncode

    def take(self, word: str, rest: str) -> None:
        """One instruction; exits with what failed."""
        if word == "FROM":
            self._base(rest)
        elif word == "RUN":
            if code := self.run(["sh", "-c", rest]):
                sys.exit(f"RUN ended with {code}: {rest}")
        elif word == "COPY":
            *sources, target = rest.split()
            if left_out := set(sources) - admitted():
                sys.exit(f".dockerignore keeps {', '.join(sorted(left_out))} out of the build")
            inside = self.root / self.folder.strip("/") / target
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(
                        ROOT / source, inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / source, inside)
        elif word == "WORKDIR":
            self.folder = rest
            (self.root / rest.strip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            self.user = rest
        elif word == "ENV":
            self.env.update(part.split("=", 1) for part in shlex.split(rest))
        elif word == "CMD":
            self._command(rest)
        else:
            sys.exit(f"docker/check.py does not know {word}")

    def _base(self, image: str) -> None:
        (version,) = re.findall(r"^python:(3\.\d+)-slim$", image)
        packages = f"python{version},python3-pip,python3-venv,ca-certificates"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={packages}", RELEASE[version], str(self.root)], check=True
        )
        self.prepare(version)

    def prepare(self, version: str) -> None:
        """What the published image has beside Debian: ``python`` and ``pip`` that install for all."""
        for marker in self.root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        for name in ("python", "python3"):
            (self.root / "usr/local/bin" / name).symlink_to(f"/usr/bin/python{version}")
        for own in (Path("/etc/resolv.conf"), Path("/etc/ssl/certs/ca-certificates.crt")):
            if own.is_file():
                shutil.copy(own, self.root / own.relative_to("/"))
        if self.wheels is not None:
            shutil.copytree(self.wheels, self.root / "wheels")
            self.env["PIP_FIND_LINKS"] = "/wheels"

    def _command(self, rest: str) -> None:
        if code := self.run(["fairflare", "doctor"]):
            sys.exit(f"fairflare doctor ended with {code}")
        shutil.copy(ROOT / "poc" / "project.yml", self.root / "tmp" / "project.yml")
        user, self.user = self.user, "root"
        made = "made/fairflare_demo/prod_00/hospital-a/."
        make = f"cd /tmp && nvflare provision -p project.yml -w made && cp -r {made} /kit && chown -R 1000 /kit"
        if code := self.run(["sh", "-c", make]):
            sys.exit(f"nvflare provision ended with {code}")
        self.user = user
        code = self.run(json.loads(rest), timeout=40)
        log = self.root / "kit" / "log.txt"
        if code != 124 or not log.is_file():
            sys.exit(f"CMD ended with {code} and did not stay in the foreground")
        print("CMD stays in the foreground, and the site writes its log")


def main() -> None:
    """Exit code 0: every line ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels that pip may take")
    wheels = parser.parse_args().wheels
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0:
        subprocess.run([docker, "build", "-f", "docker/Dockerfile", "-t", "fairflare", "."], cwd=ROOT, check=True)
        subprocess.run([docker, "run", "--rm", "fairflare", "fairflare", "doctor"], check=True)
        return
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("no Docker answers, and without it root and debootstrap are needed")
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder) / "tree", wheels)
        for word, rest in instructions((ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")):
            print(f"--- {word} {rest}", flush=True)
            tree.take(word, rest)


if __name__ == "__main__":
    main()
