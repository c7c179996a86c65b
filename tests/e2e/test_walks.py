"""Test the walk-throughs of ``poc/`` and of ``docs/install.md`` as a person would follow them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def environment(temporary: Path) -> dict[str, str]:
    """Return environment variables with this Python's environment active."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix, "TMPDIR": str(temporary)}


def run_script(script: Path, tmp_path: Path, seconds: float = 850) -> str:
    """Run a script of ``poc/`` in an environment of its own; it has to end by itself in time, and clean up."""
    out = tmp_path / "out.txt"
    # What FLARE's start scripts leave behind inherits the streams, so these are a file and no pipe.
    with out.open("wb") as log:
        process = subprocess.Popen(
            ["bash", str(script)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(tmp_path),
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        finally:
            if process.poll() is None:  # the script ends what it started, once the command that it waits for has ended
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)
    text = out.read_text(errors="replace")
    assert code == 0, text[-3000:]
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")]  # PyTorch's cache
    assert left == ["out.txt"]
    return text


def test_poc(tmp_path: Path) -> None:
    text = run_script(ROOT / "poc" / "poc.sh", tmp_path)
    assert "FINISHED:COMPLETED" in text
    assert "the same bits in" in text


def test_provisioned(tmp_path: Path) -> None:
    text = run_script(ROOT / "poc" / "provisioned.sh", tmp_path)
    assert "FINISHED:ABORTED" in text
    assert "experiment 'walk': going on at round" in text
    assert "FINISHED:COMPLETED" in text
    # Custom code, a foreign class, a member without the right.
    assert "'member@consortium.example' is not authorized for 'submit_job'" in text
    assert "FINISHED:FAILED_TO_RUN\nBYOC not permitted" in text
    assert re.search(r"FINISHED:ABNORMAL\nComponent 'subprocess\.Popen'.*is not in allow_list", text)
    assert "the same bits in" in text
    assert text.count("the same figures of tone=light, tone=dark") == 2  # of the model tested again, and simulated


@pytest.mark.parametrize("last", ["false", "sleep 600"], ids=["fails", "takes too long"])
def test_a_walk_that_does_not_end_well_cleans_up(last: str, tmp_path: Path) -> None:
    broken, started = tmp_path / "broken.sh", tmp_path / "started"
    common = ROOT / "poc" / "common.sh"
    broken.write_text(
        f'source "{common}"\nsetsid sleep 600 &\necho "$! $folder $TMPDIR" > {started}\necho begun\n{last}\n'
    )
    with pytest.raises(AssertionError if last == "false" else subprocess.TimeoutExpired, match=r"begun|timed out"):
        run_script(broken, tmp_path, seconds=20)
    process, folder, temporary = started.read_text().split()
    assert not Path(f"/proc/{process}").exists()
    assert not Path(folder).exists()
    assert not Path(temporary).exists()


def test_the_wheel_works_outside_of_the_repository(tmp_path: Path) -> None:
    """Check the wheel as on a hospital's machine; the dependencies are those of this environment, offline."""
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheels"), str(ROOT)]
    subprocess.run(build, check=True, cwd=tmp_path, timeout=300)
    (wheel,) = (tmp_path / "wheels").glob("fairflare-*.whl")
    venv.create(tmp_path / "site", with_pip=False, system_site_packages=False)
    python = tmp_path / "site" / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", purelib, str(wheel)], check=True, timeout=300)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    # Behind the wheel's own folder, and without the hooks of an editable install.
    code = (
        f"import sys; sys.path += {packages!r}; import fairflare; print(fairflare.__file__); "
        "sys.argv = ['fairflare', 'run', 'fed_avg', '--in-process', '--sites', '2', '--rounds', '1', "
        "'--set', 'phantom_cases=0.3', '--set', 'local_epochs=1']; from fairflare.cli import main; main()"
    )
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(purelib)
    assert "average" in done.stdout
