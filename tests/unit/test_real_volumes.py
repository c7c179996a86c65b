"""Test real hippocampus volumes as three sites have them: NIfTI folders, prepared, checked and trained on."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.data.datalist import load_datalist
from fairflare.data.preparers import prepare_volumes
from fairflare.data.whole_volumes import read_pair
from tests.tiny import run_document

GROUPS = ("bytes", "hundreds", "large")
COUNT = 6

pytestmark = [pytest.mark.real_data, pytest.mark.long]


@pytest.fixture
def folders(real_data: Path, tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    """Write six volumes of each export group, with voxels of 1 mm and axes RAS."""
    found = {}
    for group in GROUPS:
        arrays = np.load(real_data / f"hippocampus_{group}.npz", allow_pickle=False)
        found[group] = tmp_path / group / "images", tmp_path / group / "labels"
        for folder in found[group]:
            folder.mkdir(parents=True)
        for number in range(COUNT):
            inside = tuple(slice(0, int(length)) for length in arrays["shapes"][number])
            for folder, kind in zip(found[group], ("images", "masks"), strict=True):
                volume = nibabel.Nifti1Image(arrays[kind][number][inside], np.diag([1.0, 1.0, 1.0, 1.0]))
                nibabel.save(volume, folder / f"h{number}.nii.gz")
    return found


def test_whole_and_slice_by_slice(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    whole = prepare_volumes(tmp_path / "whole", folders=folders)
    told = json.loads((tmp_path / "whole/manifest.json").read_text())
    for site in GROUPS:
        assert told["volumes"][site] == {
            "volumes": COUNT, "spacing": {"1 x 1 x 1": COUNT}, "orientation": {"RAS": COUNT},
            "label": {"0": COUNT, "1": COUNT, "2": COUNT},
        }  # fmt: skip
        splits = load_datalist(whole[site], site=site).splits
        assert {name: len(samples) for name, samples in splits.items()} == {"training": 4, "validation": 1, "test": 1}
    written = prepare_volumes(tmp_path / "sliced", folders=folders, slices="axial")
    for site in GROUPS:
        sample = load_datalist(written[site], site=site).splits["test"][0]
        labels = np.asarray(nibabel.load(sample.label).dataobj)
        kept = [number for number in range(labels.shape[2]) if labels[:, :, number].any()]
        listed = load_datalist(written[site], site=site).splits["test"]
        assert [one.slice for one in listed] == kept
        image, mask = read_pair(sample, site=site, split="test")
        assert image.shape[:2] == mask.shape == (labels.shape[1], labels.shape[0])
        assert np.bincount(mask.ravel()).tolist() == np.bincount(labels[:, :, kept[0]].ravel()).tolist()


def test_check_data_and_two_rounds(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    prepare_volumes(tmp_path / "out", folders=folders, slices="axial")
    runner, data = CliRunner(), str(tmp_path / "out/fairflare.json")
    checked = runner.invoke(app, ["check-data", str(tmp_path / "out")])
    assert checked.exit_code == 0, checked.output
    assert "0 problem(s)" in checked.output
    command = ["run", "fed_avg", "--data", data, "--in-process", "--rounds", "2", "-w", str(tmp_path / "run")]
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output
    (results,) = (tmp_path / "run").rglob("results.json")
    found = run_document(results)
    assert found["status"] == "completed"
    assert sorted(found["test"]) == sorted(GROUPS)
