"""Real cells of which laboratories annotated different structures: figures are those of the complete masks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.data.datalist import write_datalist
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from tests.tiny import run_document

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(900)]
SIZE, CYTOPLASM, NUCLEUS = 48, "cytoplasm", "nucleus"
#: In the files 1 is the cytoplasm and 2 the nucleus. Two laboratories drew one of them.
DRAWN: Mapping[str, list[int] | str] = {"jtsc": [2], "cellavision": [1], "bccd": "all"}


def cells(real_data: Path, folder: Path, *, part: bool, said: bool = True) -> dict[str, Any]:
    """60 cells of each laboratory; ``part``: with the structures alone that it drew."""
    blocks = {}
    for site, drawn in DRAWN.items():
        found = dict(np.load(real_data / f"wbc_{site}.npz", allow_pickle=False))
        (folder / site).mkdir(parents=True)
        splits: dict[str, list[dict[str, Any]]] = {"training": [], "validation": [], "test": []}
        for number, (image, mask) in enumerate(zip(found["images"][:60], found["masks"][:60], strict=True)):
            split = ("training", "training", "training", "validation", "test")[number % 5]
            kept = np.where(np.isin(mask, drawn), mask, 0) if part and isinstance(drawn, list) else mask
            Image.fromarray(image).save(folder / site / f"{number}.png")
            Image.fromarray(kept.astype(np.uint8)).save(folder / site / f"{number}_mask.png")
            splits[split].append({"image": f"{number}.png", "label": f"{number}_mask.png"})
        write_datalist(folder / site / "datalist.json", splits)
        blocks[site] = {"data_root": str(folder / site), **({"structures": drawn} if part and said else {})}
    return {"sites": blocks}


def run(folder: Path, local: dict[str, Any], seed: int = 0) -> tuple[dict[str, Any], Any, Any]:
    settings = {"num_classes": 2, "class_names": [CYTOPLASM, NUCLEUS]}
    how: Any = {"num_rounds": 3, "bootstrap": 0, "seed": seed}
    plan = make_plan("fed_avg", task="segmentation", sites=list(local["sites"]), settings=settings, **how)
    run_local(plan, folder, local)
    (results,) = folder.rglob("results.json")
    (model,) = folder.rglob("FL_global_model.pt")
    return run_document(results), plan.task, torch.load(model)["model"]


def truth_of(task: Any, state: Any, local: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Metrics of a model on the complete masks of each laboratory's test cells."""
    model = task.build_model()
    model.load_state_dict(state)
    found = {}
    for site, block in local["sites"].items():
        data = task.open_site(site, block)
        found[site] = task.evaluate(model, data.batches("test", batch_size=12), "cpu")
    return found


def test_cells_of_which_two_laboratories_drew_one_structure(real_data: Path, tmp_path: Path) -> None:
    whole = cells(real_data, tmp_path / "whole", part=False)
    with pytest.raises(RoundFailed, match="no mask of cellavision marks nucleus"):
        run(tmp_path / "asked", cells(real_data, tmp_path / "silent", part=True, said=False))
    results, task, state = run(tmp_path / "part", cells(real_data, tmp_path / "drawn", part=True))
    truth = truth_of(task, state, whole)
    test = results["test"]
    for site, drawn in DRAWN.items():
        for label, name in ((1, CYTOPLASM), (2, NUCLEUS)):
            seen = drawn == "all" or label in drawn
            assert (f"dice_{name}" in test[site]) == seen
            if seen:
                assert test[site][f"dice_{name}"] == pytest.approx(truth[site][f"dice_{name}"], abs=0.02)
    assert results["inequality"]["gap_site"] != "cellavision"
    assert results["inequality"]["sites"]["cellavision"]["structure_support"] == {CYTOPLASM: 12}
