"""Test that each example of ``fairflare examples`` runs as written, from the sources and from a wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.cli.examples import EXAMPLES

from .conftest import ROOT, run_group

SAID = {
    "compare": ["fed_lwr", "usable images at 3 site(s)"],
    "method": ["term", "job folder: jobs/term"],
    "bundle3d": ["results:", "job folder: jobs/fed_lwr"],
    "script": ["worst"],
    "poc": ["FINISHED:COMPLETED", "worst"],
}
MADE = {
    "compare": ["report/index.html", "stats/stats.html"],
    "method": ["runs/term-seed0/server/simulate_job/fairflare/results.json"],
    "bundle3d": ["stats/stats.json", "jobs/fed_lwr/app/monai_bundle/configs/train.json"],
    "script": ["jobs/fed_lwr/meta.json"],
    "poc": ["jobs/stats/meta.json"],
}


MINUTES = ("poc", "compare", "bundle3d")  # poc in make walkthroughs, the others in make walks alone


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.walk) if n in MINUTES else n for n in EXAMPLES])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    target = tmp_path / name
    written = CliRunner().invoke(app, ["examples", name, str(target)])
    assert written.exit_code == 0, written.output
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "PATH": path, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    code, log = run_group(["bash", str(target / "run.sh")], timeout=600, cwd=tmp_path, env=env)
    assert code == 0, log[-3000:]
    for said in SAID[name]:
        assert said in log, log[-3000:]
    for file in MADE[name]:
        assert (target / file).is_file(), file
    if name == "poc":
        assert len(list(target.glob("results/*/workspace/fairflare/stats.html"))) == 1


def test_they_are_listed_and_overwrite_nothing(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert [line.split()[0] for line in run(app, ["examples"]).stdout.splitlines()] == list(EXAMPLES)
    assert run(app, ["examples", "compare", str(tmp_path / "a")]).exit_code == 0
    again = run(app, ["examples", "compare", str(tmp_path / "a")])
    assert again.exit_code == 2
    assert "not empty" in again.stderr
    wrong = run(app, ["examples", "comparee", str(tmp_path / "b")])
    assert wrong.exit_code == 2
    assert "did you mean 'compare'" in wrong.stderr
    for name in EXAMPLES:
        assert run(app, ["examples", name, str(tmp_path / name)]).exit_code == 0
        files = [path for path in (tmp_path / name).rglob("*") if not path.is_dir()]
        assert not [path for path in files if path.is_symlink()]
        assert {"README.md", "run.sh"} <= {path.name for path in files}


def test_the_new_method_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "new_method.md").read_text()
    (code,) = re.findall(r"```python\n# term\.py\n(.*?)```", page, re.DOTALL)
    file = ROOT / "custom" / "fairflare" / "examples" / "method" / "hospital_methods" / "term.py"
    assert file.read_text() == code


@pytest.mark.long
@pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77, reason="this setuptools cannot build the package"
)
def test_a_wheel_has_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if name.startswith(("custom/", "docs/examples/", "poc/")) or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                target.symlink_to((ROOT / name).readlink())
            else:
                target.write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([*command, "-w", str(tmp_path), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    folder = ROOT / "custom" / "fairflare" / "examples"
    with zipfile.ZipFile(wheel) as content:
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert content.read(f"fairflare/examples/{path.relative_to(folder)}") == path.read_bytes()
