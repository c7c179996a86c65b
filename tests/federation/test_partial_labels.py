"""Runs whose sites annotated different structures or classes: who is asked, what counts, what stays to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fairflare.base.cases.floor import Floor
from fairflare.data.datalist import write_datalist
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.facts import support_of
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from tests.shapes import of_a_training, one_each
from tests.tiny import run_document
from tests.unit.test_census import masks_site

SMALL: dict[str, Any] = {"num_classes": 2, "image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "local_epochs": 1}
CODED: dict[str, Any] = {"num_classes": 3, "image_size": [33, 33], "features": [4, 4, 8, 8], "local_epochs": 1}


def run(folder: Path, sites: dict[str, Any], method: str = "fed_avg", task: str = "segmentation", **more: Any) -> Any:
    settings = {**(SMALL if task == "segmentation" else {}), **more.pop("settings", {})}
    plan = make_plan(
        method, task=task, sites=list(sites), settings=settings, **{"num_rounds": 1, "bootstrap": 0, **more}
    )
    try:
        run_local(plan, folder, {"sites": sites})
    except RoundFailed as error:
        return str(error)
    (found,) = folder.rglob("results.json")
    return run_document(found)


def test_a_run_does_not_start_before_the_files_say_it(tmp_path: Path) -> None:
    sites = {name: masks_site(tmp_path / name, of) for name, of in (("A", (1,)), ("B", (2,)), ("C", (1, 2)))}
    reason = run(tmp_path / "r", sites)
    assert "no mask of A marks class_2; no mask of B marks class_1 (or too few for its min_cases)" in reason
    assert 'Write "structures" for A, B into the fairflare.json that the run reads (--data;' in reason
    assert """ (1: class_1, 2: class_2), such as "sites": {"A": {"structures": [1]}}, or""" in reason
    sites["A"]["structures"] = [1]
    assert "no mask of B marks class_1 (or" in run(tmp_path / "r2", sites)
    results = run(tmp_path / "r3", {**sites, "B": {**sites["B"], "structures": [1]}})
    assert "a mask of split 'training' marks what 'structures' in the site file lacks" in results
    sites["B"]["structures"] = [2]
    results = run(tmp_path / "r4", sites)
    assert results["status"] == "completed"
    said = results["info"]["said"]
    assert (said["A"]["annotated"], said["A"]["marked"]) == (["class_1"], {"class_1": 9})
    assert "annotated" not in said["C"]
    assert "dice_class_2" not in results["test"]["A"]
    assert results["test"]["A"]["dice"] == results["test"]["A"]["dice_class_1"]
    assert {"dice_class_1", "dice_class_2"} <= set(results["test"]["C"])


def test_a_site_that_says_nothing_may_be_left_out(tmp_path: Path) -> None:
    sites = {name: masks_site(tmp_path / name, of) for name, of in (("A", (1,)), ("B", (1, 2)), ("C", (1, 2)))}
    results = run(tmp_path / "r", sites, require_all_sites=False)
    assert sorted(results["test"]) == ["B", "C"]
    assert "no mask of A marks class_2" in results["left_out"][0]["reason"]


def test_that_everything_was_looked_for_changes_no_bit(tmp_path: Path) -> None:
    found: list[Any] = []
    for said in ({}, {"structures": "all"}, {"structures": [1, 2]}):
        sites = {name: {**masks_site(tmp_path / f"{len(found)}" / name, (1, 2)), **said} for name in "AB"}
        results = run(tmp_path / f"run{len(found)}", sites, num_rounds=2)
        (model,) = (tmp_path / f"run{len(found)}").rglob("best_FL_global_model.pt")
        found.append((results["test"], results["rounds"][0]["validation"], torch.load(model)["model"]))
    for test, validation, state in found[1:]:
        assert (test, validation) == found[0][:2]
        assert all(bool((tensor == found[0][2][name]).all()) for name, tensor in state.items())


def test_support_of_the_test_images_and_the_floor(tmp_path: Path) -> None:
    sites = {name: masks_site(tmp_path / name, of, 6) for name, of in (("A", (1,)), ("B", (1, 2)))}
    sites["A"]["structures"] = "all"
    own = run(tmp_path / "r", sites)["inequality"]["sites"]
    assert own["A"]["structure_support"] == {"class_1": 6, "class_2": 0}
    assert own["B"]["structure_support"] == {"class_1": 6, "class_2": 6}
    sites["A"] |= {"structures": [1], "min_cases": 7}
    few = run(tmp_path / "few", {"A": sites["A"], "B": {**sites["B"], "metrics_by_class": False, "structures": "all"}})
    assert few["info"]["said"]["A"]["marked"] == {}, "6 cases in each list"
    assert few["info"]["said"]["B"]["marked"] == {}
    assert all(one.get("structure_support") is None for one in few["inequality"]["sites"].values())


def test_support_that_few_cases_have_or_lack_stays() -> None:
    """12 test images, floor 5: of 12, 3, 0 and 9 that mark a structure the first may be told; 0 without a floor."""
    marks = [(case, [0, *([1] if case < 3 else []), *([3] if case < 9 else [])]) for case in range(12)]
    names = ["all", "few", "none", "most"]
    task: Any = SimpleNamespace(has_classes=False, outcome_names=lambda: names)
    data: Any = SimpleNamespace(marks=lambda split: marks, annotated=None)
    few, every = (support_of(task, data, Floor(data, least)) for least in (5, 1))
    assert few == {"structures": ["all"], "structure_support": [12]}
    assert every == {"structures": names, "structure_support": [12, 3, 0, 9]}
    data.annotated = (0, 3)
    assert support_of(task, data, Floor(data, 1)) == {"structures": ["all", "most"], "structure_support": [12, 9]}


def coded_sites(folder: Path) -> dict[str, dict[str, Any]]:
    """Make site A, whose labels are of three classes, and B, whose labels are of two of them."""
    sites: dict[str, dict[str, Any]] = {}
    for name, codes in (("A", (0, 1, 2)), ("B", (0, 1))):
        place = folder / name
        place.mkdir(parents=True)
        splits: dict[str, list[dict[str, Any]]] = {}
        for split in ("training", "validation", "test"):
            splits[split] = []
            for number in range(6):
                pixels = np.random.default_rng([number, *name.encode()]).integers(0, 255, (33, 33), np.uint8)
                Image.fromarray(pixels).save(place / f"{split}{number}.png")
                splits[split].append(
                    {
                        "image": f"{split}{number}.png",
                        "label": codes[number % len(codes)],
                        "attributes": {"tone": "ab"[number % 2]},
                    }
                )
        tone = {"tone": {"kind": "category", "values": ["a", "b"]}}
        write_datalist(place / "datalist.json", splits, class_names=["x", "y", "z"], attributes=tone)
        sites[name] = {"data_root": str(place)}
    return sites


def test_a_code_that_a_site_never_uses(tmp_path: Path) -> None:
    sites = coded_sites(tmp_path)
    assert "no label of B is z (or too few" in run(tmp_path / "r", sites, task="classification", settings=CODED)
    sites["B"]["classes"] = [0, 1]
    for method in ("logit_adjustment", "fed_ism_plus_s"):
        results = run(tmp_path / method, sites, method, task="classification", settings=CODED)
        assert results["status"] == "completed"
        assert 0 <= results["test"]["B"]["outside"] <= 1
        assert "outside" not in results["test"]["A"]


@pytest.mark.many
@pytest.mark.parametrize("method", one_each(of_a_training))
def test_every_method_where_sites_annotated_different_things(method: str, tmp_path: Path) -> None:
    """Check that no site is measured by what it did not annotate, and that each kind of training stays finite."""
    masks = "segmentation" in all_methods()[method].kinds
    sites = coded_sites(tmp_path)
    sites["B"]["classes"] = [0, 1]
    if masks:
        drawn: dict[str, Any] = {"C": [1], "D": [2], "E": "all"}
        sites = {
            name: masks_site(tmp_path / name, (1, 2) if said == "all" else tuple(said), structures=said)
            for name, said in drawn.items()
        }
    more: dict[str, Any] = {} if masks else {"task": "classification", "settings": CODED}
    results = run(tmp_path / "r", sites, method, **more)
    assert not isinstance(results, str), results
    assert results["status"] == "completed"
    test = results["test"]
    if masks:
        found = {site: {k for k in (1, 2) if f"dice_class_{k}" in test[site]} for site in sites}
        assert found == {"C": {1}, "D": {2}, "E": {1, 2}}
    else:
        assert {site: "outside" in test[site] for site in sites} == {"A": False, "B": True}
    (model,) = (tmp_path / "r").rglob("best_FL_global_model.pt")
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in torch.load(model)["model"].values())
