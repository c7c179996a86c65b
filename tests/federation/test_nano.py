"""Test the newcomer's first file, ``docs/examples/nano.py``: its models are those of the package, to the bit."""

from __future__ import annotations

import ast
import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fairflare
from tests.tiny import RESULTS, model_in

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "examples" / "nano.py"


@pytest.fixture(scope="module")
def nano() -> Any:
    spec = importlib.util.spec_from_file_location("nano", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", ["fed_avg", "fed_lwr"])
def test_both_models_are_those_of_the_package(nano: Any, method: str, tmp_path: Path) -> None:
    class Spots(fairflare.ClassificationTask):
        def build_model(self) -> Any:
            return nano.build_network()

    plan = {"phantom": "fundus", "phantom_samples": 150, "image_size": (32, 32), "partition": "two_pool"}
    adam = {"optimizer": "adam", "betas": (0.9, 0.999), "weight_decay": 0.0, "keep_optimizer_state": False}
    same = {name.lower(): getattr(nano, name) for name in ("LEARNING_RATE", "LOCAL_EPOCHS", "BATCH_SIZE")}
    fairflare.run(
        method, task=Spots(phantom_sites=3, **plan), sites=nano.SITES, rounds=nano.ROUNDS, seed=nano.SEED,
        settings=adam | same, workspace=tmp_path / "run",
    )  # fmt: skip
    package = model_in(tmp_path / "run" / RESULTS)
    threads = torch.get_num_threads()
    try:
        plain = nano.run(getattr(nano, method), {site: nano.load_images(k) for k, site in enumerate(nano.SITES)})
    finally:
        torch.set_num_threads(threads)
    assert plain.keys() == package.keys()
    assert all(torch.equal(plain[name], package[name]) for name in plain)


def test_the_file_is_short_and_stands_alone_and_the_page_names_each_function() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    tree = ast.parse(text)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if str(name).startswith(("fairflare", "nvflare"))} == {
        "fairflare_lab.phantoms.classes"
    }
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `nano\.(\w+)` \| (.*) \|$", page, re.MULTILINE)
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [name for name, _ in rows] == functions
    for _, places in rows:
        for place, name in re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", places):
            folder = "custom" if place.startswith("fairflare_lab") else "custom/fairflare"
            assert re.search(rf"\b(def|class) {name.rpartition('.')[2]}\b", (ROOT / folder / place).read_text("utf-8"))


@pytest.mark.walk
@pytest.mark.timeout(700)
def test_the_notebook_runs_and_its_last_cell_finds_both_models_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run every cell anew, with a process for the kernel; outputs are as the page has them, figures aside."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stored = nbformat.read(ROOT / "docs" / "examples" / "first_run.ipynb", 4)
    assert len(stored.cells) <= 15
    assert "error" not in {out.output_type for cell in stored.cells for out in cell.get("outputs", ())}
    again = copy.deepcopy(stored)
    nbclient.NotebookClient(again, timeout=550, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell, before in zip(again.cells, stored.cells, strict=True):
        kinds = [
            [sorted(out.data) for out in one.get("outputs", ()) if out.output_type != "stream"]
            for one in (cell, before)
        ]
        assert kinds[0] == kinds[1]
    assert again.cells[-1].outputs[-1].data["text/plain"] == "True"
