"""Test that one input has one answer: threads import no reader, and a file is blamed for its own faults only."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from fairflare.base import checks
from fairflare.base.machine import environment
from fairflare.cli.data import doctor
from fairflare.data.datalist import DataError, Sample
from fairflare.data.image_file import Volume
from fairflare.data.preparers import prepare_volumes
from fairflare.data.reading import read_mask
from tests.unit.dicom_files import series

PEOPLE, SHAPE = 6, (12, 12, 4)

#: Program that performs a command of fairflare, and ends with 9 if a thread imports what a reader has not loaded.
WATCHED = """
import sys, threading
seen = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        files = sys.modules.get("fairflare.data.image_file")
        if threading.current_thread() is not threading.main_thread() and not (files and files.IMPORTING._is_owned()):
            seen.append(name)
sys.meta_path.insert(0, Watch())
import fairflare.cli
try:
    fairflare.cli.main()
except SystemExit as ended:
    code = ended.code
print("imported by threads:", seen)
sys.exit(9 if seen else code)
"""
#: Program that performs a command while a thread keeps the interpreter busy.
LOADED = """
import sys, threading
sys.setswitchinterval(1e-4)
def busy():
    while True:
        sum(range(50))
threading.Thread(target=busy, daemon=True).start()
import fairflare.cli
fairflare.cli.main()
"""


def ended(program: str, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def mask_of(number: int) -> np.ndarray:
    found = np.zeros(SHAPE, np.uint8)
    found[2 + number % 3 : 9, 3 : 8 + number % 4, 1:3] = 1
    return found


def scanned(root: Path) -> Path:
    """Write DICOM series with NIfTI masks of them, the pair of the README."""
    (root / "labels").mkdir(parents=True)
    for number in range(PEOPLE):
        mask = mask_of(number)
        pixels = np.random.default_rng(number).integers(0, 80, SHAPE) + mask * 120
        series(root / "images" / f"p{number}", pixels.astype(np.int16), PatientID=f"p{number}")
        # The series has its rows 0.5 mm apart from front (30) to back, its columns 0.7 mm from right (20) to left.
        affine = np.array([[-0.7, 0, 0, 20], [0, -0.5, 0, 30], [0, 0, 3, 5], [0, 0, 0, 1.0]])
        nibabel.save(nibabel.Nifti1Image(mask.swapaxes(0, 1), affine), root / "labels" / f"p{number}.nii.gz")
    return root


def drawn(root: Path) -> Path:
    """Write pictures in four formats, with masks."""
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    for number, ending in enumerate(("png", "tif", "bmp", "jpg", "png", "tif")):
        mask = mask_of(number)[:, :, 1]
        pixels = np.random.default_rng(number).integers(0, 80, mask.shape) + mask * 120
        Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"p{number}.{ending}")
        Image.fromarray(mask).save(root / "labels" / f"p{number}.png")
    return root


@pytest.mark.long
@pytest.mark.parametrize(("kind", "command"), [(scanned, "volumes"), (drawn, "folders")])
def test_no_thread_imports_a_package(kind: Callable[[Path], Path], command: str, tmp_path: Path) -> None:
    """Check prepare and check-data; threads that import one package at a time can see it half done."""
    root = kind(tmp_path / "a")
    places = (root / "images", root / "labels")
    prepared = ended(WATCHED, "prepare", command, "--site", "a", *places, "--out", tmp_path / "out")
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    checked = ended(WATCHED, "check-data", tmp_path / "out")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.long
def test_twenty_answers_of_a_busy_machine_are_one(tmp_path: Path) -> None:
    root = scanned(tmp_path / "a")
    for number in range(20):
        out = tmp_path / f"out{number}"
        found = ended(
            LOADED, "prepare", "volumes", "--site", "a", root / "images", root / "labels", "--leave-out", "--out", out
        )
        assert found.returncode == 0, (number, found.stderr)
        assert f"a: {PEOPLE} volumes" in found.stdout, (number, found.stdout)


def wrong_code() -> None:
    checks.few(None, 3)  # type: ignore[arg-type]  # a mistake in the package's own code


def unread() -> None:
    raise KeyError("a reader's error for a damaged file")


def raising(error: Exception) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act


FAULTS: dict[str, tuple[Callable[[], object], bool]] = {  # whether the file may be at fault
    "an import that failed": (raising(ImportError("cannot import name 'Nifti1Image'")), False),
    "a package that is missing": (raising(ModuleNotFoundError("no nibabel", name="nibabel")), False),
    "a module half imported": (lambda: types.ModuleType("nibabel").nifti1, False),
    "too little memory": (raising(MemoryError("unable to allocate 3 GiB")), False),
    "too many open files": (raising(OSError(errno.EMFILE, "Too many open files")), False),
    "a drive that is away": (raising(OSError(errno.ESTALE, "Stale file handle")), False),
    "a mistake in the package": (wrong_code, False),
    "what a reader raises": (unread, True),
    "an attribute that a header lacks": (lambda: np.zeros(1).missing, True),  # type: ignore[attr-defined]
    "a wrong value": (raising(ValueError("it is damaged")), True),
    "no right to read": (raising(PermissionError(errno.EACCES, "Permission denied")), True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_is_blamed_for_its_own_faults_only(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that --leave-out leaves out a damaged file, and ends at an error that no file explains."""
    act, of_file = FAULTS[fault]
    for folder in ("images", "labels"):
        for number in range(PEOPLE):
            (tmp_path / folder).mkdir(exist_ok=True)
            values = mask_of(number) if folder == "labels" else np.full(SHAPE, number, np.int16)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4) * 2), tmp_path / folder / f"p{number}.nii.gz")
    usual = Volume.decode

    def decode(self: Volume, *, is_mask: bool, limit: int) -> np.ndarray:
        if self.path == tmp_path / "labels" / "p3.nii.gz":
            act()
        return usual(self, is_mask=is_mask, limit=limit)

    monkeypatch.setattr(Volume, "decode", decode)
    places = {"a": (tmp_path / "images", tmp_path / "labels")}
    if of_file:
        prepare_volumes(tmp_path / "out", folders=places, leave_out=True)
        assert len(list((tmp_path / "out/a/images").iterdir())) == PEOPLE - 1
        return
    with pytest.raises(Exception) as caught:
        prepare_volumes(tmp_path / "out", folders=places, leave_out=True)
    assert not isinstance(caught.value, DataError)
    assert not (tmp_path / "out" / "a").exists()
    file = tmp_path / "labels" / "p3.nii.gz"
    with pytest.raises(type(caught.value)):
        read_mask(Sample(file, file), site="a", split="training")  # as a run and check-data read


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a container's user id, for which the system raises KeyError (OSError from Python 3.13 on)."""
    for error in (KeyError("getpwuid(): uid not found: 12345"), OSError("no entry")):
        with monkeypatch.context() as changed:
            for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
                changed.delenv(name, raising=False)
            changed.setattr("pwd.getpwuid", raising(error))
            changed.setattr(os, "getuid", lambda: 12345)
            environment.shield_imports()
            assert os.environ["USER"] == "uid-12345"
            assert environment.getuser() == "uid-12345"  # what MONAI asks
    monkeypatch.setenv("USER", "anna")
    environment.shield_imports()
    assert os.environ["USER"] == "anna"


def test_doctor_imports_what_runs_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor.imports()) == []
    (tmp_path / "tifffile.py").write_text("raise RuntimeError('a wheel of another machine')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tifffile", raising=False)
    (found,) = doctor.imports()
    assert (found.what, found.state) == ("tifffile", "problem")
    assert "a wheel of another machine" in found.text
    monkeypatch.setitem(sys.modules, "tifffile", None)  # as if it were not installed, which its version tells
    assert list(doctor.imports()) == []
