"""The paths of version 0.2 that job folders, kits and plugins name."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from fairflare.moved import MOVED

# Entered from the job folders and pages of version 0.2.0, not from the table.
NAMED = {
    "fairflare.methods.training": "LocalTraining",
    "fairflare.methods.anchor_report": "LayerSimilarityReport",
    "fairflare.methods.probes": "LossProbe",
    "fairflare.methods.weightings": "BySom",
    "fairflare.methods.mu_policy": "FixedMu",
    "fairflare.methods.class_gradients": "ClassGradientTraining",
    "fairflare.methods.rule": "Rule",
    "fairflare.methods.reports": "Field",
    "fairflare.methods.catalog": "Method",
    "fairflare.core.settings": "settings",
    "fairflare.core.task": "Task",
    "fairflare.core.checks": "number",
    "fairflare.flare.recipes": "FairRecipe",
}


@pytest.mark.parametrize(("old", "name"), sorted(NAMED.items()))
def test_an_old_path_gives_the_same_class_with_a_warning(old: str, name: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"^{old} is {MOVED[old]} now"):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(MOVED[old]), name)


def test_nothing_else_is_found_and_a_new_process_finds_it() -> None:
    assert set(MOVED) == set(NAMED)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'fairflare\.core\.nothing'"):
        importlib.import_module("fairflare.core.nothing")
    code = "from fairflare.methods.training import LocalTraining; print(LocalTraining.__module__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "fairflare.methods.base.training"


def test_kits_list_the_old_paths_of_classes_beside_the_new_ones() -> None:
    from fairflare.provision import job_classes

    listed = set(job_classes())
    for module, name in NAMED.items():
        if module.startswith("fairflare.methods.") and name not in ("Rule", "Field", "Method"):
            assert {f"{module}.{name}", f"{MOVED[module]}.{name}"} <= listed
