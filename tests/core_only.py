"""Run the tests of fairflare where fairflare_lab cannot be imported: python -m tests.core_only [pytest's arguments]

The tests run in an environment of their own in a temporary folder. It has our package ``fairflare`` alone; all others
are those of the environment that runs this. Synthetic images come from ``core_images.py``. A file of tests that names
fairflare_lab is the lab's and is left out, and a test that turns out to need the lab is skipped, and counted.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
ROOMS = ("unit", "federation", "methods", "flare")
SOURCES = """
[fairflare.sources]
classes = core_images
prostate = core_images
"""


def main(arguments: list[str]) -> int:
    """Return the exit status of the tests."""
    with TemporaryDirectory(prefix="fairflare-core-") as folder:
        place = Path(folder)
        python = environment(place)
        lab = [
            path for path in (ROOT / "tests").rglob("test_*.py") if "fairflare_lab" in path.read_text(encoding="utf-8")
        ]
        ignored = [f"--ignore={path}" for path in lab]
        told = "import fairflare\ntry:\n    import fairflare_lab\nexcept ImportError:\n    print(fairflare.__file__)"
        where = subprocess.run([python, "-c", told], check=True, capture_output=True, text=True).stdout.strip()
        if not where.startswith(folder):
            raise SystemExit(f"the tests would not run without fairflare_lab: fairflare is {where or 'beside it'}")
        print(f"without fairflare_lab, {len(lab)} files of its tests left out")
        command = [python, "-m", "pytest", *ignored, *(arguments or [f"tests/{room}" for room in ROOMS])]
        return subprocess.run(command, cwd=ROOT).returncode


def environment(place: Path) -> Path:
    """Make an environment that has fairflare without the lab; return its Python."""
    code = place / "code"
    code.mkdir()
    (code / "fairflare").symlink_to(ROOT / "custom" / "fairflare")
    (code / "core_images.py").symlink_to(ROOT / "tests" / "core_images.py")
    venv.create(place / "env", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place / "env")}))
    (packages / "a_ours.pth").write_text(f"{code}\n")
    (packages / "b_others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    ours = distribution("fairflare")
    info = packages / f"fairflare-{ours.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(ours.read_text("METADATA") or "")
    groups = re.split(r"\n(?=\[)", ours.read_text("entry_points.txt") or "")
    kept = [group for group in groups if "fairflare_lab" not in group]
    (info / "entry_points.txt").write_text("\n".join([*kept, SOURCES]))
    command = place / "env" / "bin" / "fairflare"
    command.write_text(f"#!{place}/env/bin/python\nfrom fairflare.cli import main\n\nmain()\n")
    command.chmod(0o755)
    return place / "env" / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
