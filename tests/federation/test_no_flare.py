"""Test that a run is independent of FLARE: it works where nvflare cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fairflare.methods.base.catalog import all_methods
from tests.tiny import run_document

PACKAGE = Path(__file__).parents[2] / "custom"
TINY = {
    "fed_lwr": {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.1, "local_epochs": 1},
    "fed_mrl": {
        "image_size": [33, 33], "features": [4, 4, 8, 8], "phantom_samples": 150, "phantom_test": 56, "local_epochs": 1,
    },
}  # fmt: skip
# Importing anything of nvflare fails, and what was tried is written down: no `except ImportError` can hide it.
REFUSING = """
import sys

tried = []

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nvflare":
            tried.append(name)
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Refuse())
"""
IMPORTS = """
import importlib, pkgutil
import fairflare.federation, fairflare.federation.transports.local, fairflare.methods

for package in (fairflare.federation, fairflare.methods):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
"""
RUN = """
import json
from pathlib import Path
from fairflare.federation.transports.local import run_local
from fairflare.federation.plan.plan import make_plan

method, folder, settings = sys.argv[1:]
plan = make_plan(method, sites=2, num_rounds=2, settings=json.loads(settings))
print(run_local(plan, Path(folder)))
"""
END = """
assert not tried, tried
found = sorted(name for name in sys.modules if name.startswith(("nvflare", "fairflare.flare")))
assert not found, found
"""


def python(program: str, *arguments: str, folder: Path) -> str:
    environment = {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "HOME": str(folder), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", REFUSING + program + END, *arguments],
        capture_output=True, text=True, timeout=540, env=environment, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_guard_notices_an_import(tmp_path):
    with pytest.raises(AssertionError, match="no nvflare"):
        python("import fairflare.flare.controller", folder=tmp_path)
    with pytest.raises(AssertionError, match=r"\['nvflare'\]"):
        python("try:\n    import nvflare\nexcept ImportError:\n    pass\n", folder=tmp_path)


@pytest.mark.many
@pytest.mark.parametrize("method", [m for m in ("fed_lwr", "fed_mrl") if m in all_methods()])
def test_a_run_without_flare(tmp_path, method):
    """Check also that no module of methods/ and federation/ imports FLARE."""
    folder = Path(python(IMPORTS + RUN, method, str(tmp_path / "run"), json.dumps(TINY[method]), folder=tmp_path))
    results = run_document(folder)
    assert results["status"] == "completed"
    assert [r["accepted"] for r in results["rounds"]] == [["site-1", "site-2"]] * 2
    assert sorted(results["test"]) == ["site-1", "site-2"]
    assert (folder.parent / "FL_global_model.pt").is_file()
    assert (folder / "report.html").is_file()
    if method == "fed_lwr":  # both phases took place, and the weights are the scores'
        for record in results["rounds"]:
            for by_site in record["layers"].values():
                total = sum(site["dissimilarity"] for site in by_site.values())
                for site in by_site.values():
                    assert site["weight"] == pytest.approx(site["dissimilarity"] / total, rel=1e-6)
                    assert site["cka"] == pytest.approx(1 - site["dissimilarity"], abs=1e-5)
