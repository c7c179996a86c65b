"""Test real images as a user has them: folders or a table, through the preparers, check-data and a few rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.tiny import run_document

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.walk,
    pytest.mark.timeout(900),
]
TYPES = ("neutrophil", "lymphocyte", "monocyte", "eosinophil", "basophil")


def fairflare(*arguments: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fairflare.cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def save(path: Path, pixels: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def arrays(real_data: Path, name: str) -> Mapping[str, Any]:
    return dict(np.load(real_data / name, allow_pickle=False))


def run(data: Path, tmp_path: Path, method: str, *settings: str) -> dict[str, Any]:
    """Run two rounds in one process, which gives the simulator's bits."""
    out = tmp_path / "run"
    given = [part for setting in ("local_epochs=1", "image_size=[32,32]", *settings) for part in ("--set", setting)]
    fairflare("run", method, "--data", data / "fairflare.json", "--rounds", "2", "--in-process", "-w", out, *given)
    (found,) = out.rglob("results.json")
    results = run_document(found)
    assert results["status"] == "completed"
    assert results["info"]["synthetic"] is False
    assert sorted(results["test"]) == sorted(json.loads((data / "fairflare.json").read_text())["sites"])
    return results


def test_nuclei_as_folders_of_sites(real_data: Path, tmp_path: Path) -> None:
    for file in sorted(real_data.glob("nuclei_*.npz")):
        found = arrays(real_data, file.name)
        for image, mask, name in zip(found["images"], found["masks"], found["ids"], strict=True):
            folder = tmp_path / "mine" / str(found["site"])
            save(folder / "images" / f"{name}.png", image)
            save(folder / "masks" / f"{name}_mask.png", mask * 255)
    out = tmp_path / "out"
    fairflare("prepare", "masks", "--source", tmp_path / "mine", "--out", out, "--group", r"^([^_]+)")
    text = fairflare("check-data", out)
    assert "770 usable images at 5 site(s); 0 problem(s)" in text
    run(out, tmp_path, "fed_lwr", "in_channels=3", "features=[4,4,4,8,8,4]")


def test_white_cells_with_two_structures_by_a_table(real_data: Path, tmp_path: Path) -> None:
    rows = ["image,mask,site"]
    for site in ("jtsc", "cellavision", "bccd"):
        found = arrays(real_data, f"wbc_{site}.npz")
        for image, mask, name in zip(found["images"], found["masks"], found["ids"], strict=True):
            save(tmp_path / f"mine/i/{site}_{name}.png", image)
            save(tmp_path / f"mine/m/{site}_{name}.png", mask * 100)
            rows.append(f"i/{site}_{name}.png,m/{site}_{name}.png,{site}")
    (tmp_path / "mine/list.csv").write_text("\n".join(rows) + "\n")
    out = tmp_path / "out"
    values = ["--mask-values", "0=0", "100=1", "200=2"]
    fairflare("prepare", "masks", "--source", tmp_path / "mine", "--csv", "list.csv", "--out", out, *values)
    structures = ["num_classes=2", "labels=[[1,2],[2]]", 'class_names=["cell","nucleus"]']
    options = [part for setting in structures for part in ("--set", setting)]
    assert "766 usable images at 3 site(s); 0 problem(s)" in fairflare("check-data", out, *options)
    results = run(out, tmp_path, "fed_lwr", "in_channels=3", "features=[4,4,4,8,8,4]", *structures)
    assert {"dice_cell", "dice_nucleus"} <= set(results["test"]["bccd"])


def test_white_cells_by_type_as_folders(real_data: Path, tmp_path: Path) -> None:
    for site in ("jtsc", "cellavision", "bccd"):
        found = arrays(real_data, f"wbc_{site}.npz")
        for image, label, name in zip(found["images"], found["labels"].tolist(), found["ids"], strict=True):
            if label >= 0:
                save(tmp_path / "mine" / site / TYPES[label] / f"{name}.png", image)
    out = tmp_path / "out"
    text = fairflare("prepare", "images", "--source", tmp_path / "mine", "--out", out, "--classes", *TYPES)
    assert "basophil" in text
    text = fairflare("check-data", out)
    assert "750 usable images at 3 site(s); 0 problem(s)" in text
    assert "num_classes=5: as the datalists name them" in text
    results = run(out, tmp_path, "fed_ism_plus_s", "num_classes=5", "max_pool=false", "features=[4,4,8,8]")
    # The tail, basophils, is in no test set of JTSC, which has one of them.
    assert {"recall_neutrophil", "head", "medium"} <= set(results["test"]["jtsc"])


def test_red_cells_dealt_to_sites_some_of_them_corrupted(real_data: Path, tmp_path: Path) -> None:
    found = arrays(real_data, "rbc12_chula.npz")
    rows = ["file,type,smear"]
    for i, (image, label, smear) in enumerate(zip(found["images"], found["labels"], found["image_no"], strict=True)):
        save(tmp_path / f"mine/{i:04d}.png", image)
        rows.append(f"{i:04d},{found['class_names'][label]},{smear}")
    (tmp_path / "mine/cells.csv").write_text("\n".join(rows) + "\n")
    out = tmp_path / "out"
    columns = ["--csv", "cells.csv", "--columns", "image=file", "label=type", "patient=smear"]
    dealt = ["--partition", "dirichlet", "--sites", "5", "--alpha", "0.5", "--corrupt", "gaussian_noise:3"]
    more = ["--corrupt-sites", "2", "--common-test", "--size", "32", "--seed", "1"]
    fairflare("prepare", "images", "--source", tmp_path / "mine", "--out", out, *columns, *dealt, *more)
    assert "0 problem(s)" in fairflare("check-data", out)
    results = run(out, tmp_path, "fed_ism_plus_s", "num_classes=12", "max_pool=false", "features=[4,4,8,8]")
    assert {"clean/balanced_accuracy", "corrupted/balanced_accuracy"} <= set(results["test"]["site-5"])


def test_pneumonia_has_copies_that_check_data_finds(real_data: Path, tmp_path: Path) -> None:
    """Check that seven duplicate images are found, three of which are in training and in validation."""
    found = arrays(real_data, "pneumoniamnist_subset.npz")
    rows, first = ["image,label,split"], {}
    for split in ("train", "val", "test"):
        for i, (image, label) in enumerate(zip(found[f"{split}_images"], found[f"{split}_labels"], strict=True)):
            save(tmp_path / f"mine/{split}_{i:04d}.png", image)
            rows.append(f"{split}_{i:04d},{('normal', 'pneumonia')[label]},{split}")
            first.setdefault(image.tobytes(), rows[-1])
    table = tmp_path / "mine/list.csv"
    out = tmp_path / "out"
    command = ["prepare", "images", "--source", tmp_path / "mine", "--csv", "list.csv", "--out", out, "--overwrite"]
    dealt = ["--partition", "quantity", "--sites", "3", "--seed", "2"]
    table.write_text("\n".join(rows) + "\n")
    fairflare(*command, *dealt)
    text = fairflare("check-data", out, "--set", "in_channels=1", "--all", code=1)
    assert "3166 usable images at 3 site(s)" in text
    told = ("one image in several splits or at several sites", "times in one split")
    assert sum(any(words in line for words in told) for line in text.splitlines()) == 7
    table.write_text("\n".join([rows[0], *first.values()]) + "\n")
    fairflare(*command, *dealt)
    text = fairflare("check-data", out, "--set", "in_channels=1")
    assert "prepare noted: 8 of 3166 images in " in text
    assert "are not in the table" in text
    assert "3158 usable images at 3 site(s); 0 problem(s), 2 note(s)" in text
    run(out, tmp_path, "fed_ism_plus_s", "num_classes=2", "in_channels=1", "max_pool=false", "features=[4,4,8,8]")
