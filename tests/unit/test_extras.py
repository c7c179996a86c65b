"""Test a bare ``pip install fairflare`` without the extras, and the sentence that names the missing extra."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from fairflare.base.own_errors import EXTRAS, lacking_package

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# MONAI, nibabel and scikit-learn import some of them where they are; what is absent here is not installed at all.
WITHOUT = """
import sys

class Absent:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):  # entry points are looked for by the same finders
        return getattr(self.finder, name)

sys.meta_path[:] = map(Absent, sys.meta_path)
from fairflare.cli.commands import main
main()
"""
TINY = (
    "--sites", "2", "--rounds", "1", "--set", "phantom_cases=0.3", "--set", "local_epochs=1",
    "--set", "image_size=[32,32]", "--set", "features=[4,4,8,8,8,4]",
)  # fmt: skip


def fairflare(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where no package of the extras can be imported."""
    code = WITHOUT.replace("ABSENT", repr((*EXTRAS, "peft", "einops")))
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=place, capture_output=True, text=True, timeout=300, check=False
    )


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[><=~!; ]", text)[0] for text in requirements}


def test_at_most_twelve_packages_are_needed() -> None:
    assert len(names(PROJECT["dependencies"])) <= 12


def test_every_package_that_is_imported_is_declared() -> None:
    """Check also packages that other packages bring, as these may stop to."""
    optional = PROJECT["optional-dependencies"]
    named = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}
    # Of pydantic; of typer; what FLARE makes its kits with.
    ours = {"fairflare", "annotated_types", "pydantic_core", "typing_extensions", "packaging", "click", "cryptography"}
    declared = names(PROJECT["dependencies"]) | {name for extra in optional.values() for name in names(extra)}
    found: set[str] = set()
    for path in (ROOT / "custom" / "fairflare").rglob("*.py"):
        if "examples" not in path.parts:
            found |= set(
                re.findall(r"^ *(?:from|import) ([a-zA-Z_]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            )
    found -= {*sys.stdlib_module_names, *ours}
    importable = {name for name in found if named.get(name, name) not in declared}
    assert {name for name in importable if _is_package(name)} == set()
    for package, extra in EXTRAS.values():
        assert package in names(optional[extra])


def _is_package(name: str) -> bool:
    """Return whether a name is a package; a word of a sentence at the beginning of a line is none."""
    try:
        distribution({"sklearn": "scikit-learn"}.get(name, name))
    except Exception:
        return False
    return True


def test_the_sentence_is_found_behind_other_errors() -> None:
    error = RuntimeError("applying transform")  # as MONAI puts it
    error.__cause__ = ModuleNotFoundError("No module named 'nibabel.nifti1'", name="nibabel.nifti1")
    assert lacking_package(error) == (
        "this needs the package nibabel, which is not installed: pip install 'fairflare[data]'"
    )
    assert lacking_package(ModuleNotFoundError("x", name="my_own")) is None
    assert lacking_package(ValueError("PIL")) is None


@pytest.mark.long
def test_a_run_works_and_says_what_its_page_needs(tmp_path: Path) -> None:
    done = fairflare(tmp_path, "run", "fed_lwr", "--in-process", *TINY)
    assert done.returncode == 0, done.stderr
    assert "worst" in done.stdout
    assert "pip install 'fairflare[page]'" in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("phantom prostate --out DATA --sites 2 --size 32", "pillow", "data"),
        ("privacy", "jinja2", "page"),
    ],
)
def test_a_command_names_the_extra(words: str, package: str, extra: str, tmp_path: Path) -> None:
    done = fairflare(tmp_path, *words.split())
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr == (
        f"error: this needs the package {package}, which is not installed: pip install 'fairflare[{extra}]'\n"
    )


@pytest.mark.long
def test_curves_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    code = WITHOUT.partition("from fairflare.cli")[0].replace("ABSENT", "('tensorboard',)") + (
        "import logging; logging.basicConfig()\n"
        "from fairflare.flare.tracking import TensorBoard\n"
        "TensorBoard('tb_events').initialize(None)\n"
        "from fairflare.recipes import FairRecipe\n"
        "FairRecipe('fed_avg').export('jobs')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no curves for TensorBoard: it is not installed (pip install 'fairflare[tensorboard]')" in done.stderr


def test_a_chain_of_errors_with_a_circle_ends() -> None:
    first, second = ValueError("a"), ModuleNotFoundError("b", name="another")
    first.__cause__, second.__context__ = second, first
    assert lacking_package(first) is None
