"""Test tasks on whole volumes: how files become inputs, patches by a seed, windows over the whole, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from fairflare.base.task import SiteData
from fairflare.data.datalist import DataError
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.prediction.masks import code_labels, label_map, labels_of, write_mask
from fairflare.prediction.predictor import load_predictor
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.classification import VolumeClassificationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask
from tests.bundles import write_volumes
from tests.tiny import run_document

SHAPE = (20, 24, 18)


def written(folder: Path, affine: Any, **entry: Any) -> np.ndarray:
    """Write a volume with a box of 1 in all splits; return the stored array."""
    stored = np.random.default_rng(0).integers(0, 200, SHAPE).astype(np.int16)
    mask = np.zeros(SHAPE, np.uint8)
    mask[5:12, 6:15, 4:9] = 1
    for split in ("training", "validation", "test"):
        for name, array in ((f"{split}.nii.gz", stored), (f"{split}_mask.nii.gz", mask)):
            nibabel.save(nibabel.Nifti1Image(array, affine), folder / name)
    entries = {
        split: [{"image": f"{split}.nii.gz", "label": f"{split}_mask.nii.gz", **entry}]
        for split in ("training", "validation", "test")
    }
    (folder / "datalist.json").write_text(json.dumps(entries))
    return stored


def opened(task: Any, folder: Path) -> SiteData:
    found: SiteData = task.open_site("site-1", {"data_root": str(folder)})
    return found


def test_a_volume_is_turned_to_ras_scaled_and_filled_up(tmp_path: Path) -> None:
    stored = written(tmp_path, np.diag([-1.0, 2.0, 1.5, 1.0]))  # x leads to the left
    data = opened(VolumeSegmentationTask(intensity="range"), tmp_path)
    ((inputs, targets),) = data.batches("test", batch_size=4)
    assert inputs.shape == (1, 1, 32, 32, 32)
    low, high = stored.min(), stored.max()
    wanted = (stored[::-1].astype(np.float64) - low) / (high - low)  # by hand: x the other way round
    inside = targets[0, 0] >= 0
    assert int(inside.sum()) == np.prod(SHAPE)
    x, y, z = (slice(int(i.min()), int(i.max()) + 1) for i in torch.where(inside))
    np.testing.assert_allclose(inputs[0, 0, x, y, z].numpy(), wanted, atol=1e-5)
    assert float((targets == 1).sum()) == 7 * 9 * 5


def test_spacing_resamples(tmp_path: Path) -> None:
    written(tmp_path, np.diag([1.0, 1.0, 2.0, 1.0]))
    data = opened(VolumeSegmentationTask(spacing=(1.0, 1.0, 1.0)), tmp_path)
    ((_, targets),) = data.batches("test", batch_size=1)
    assert int((targets >= 0).sum()) == 20 * 24 * 35  # 18 voxels of 2 mm lie 34 mm apart


def test_patches_are_the_same_however_they_are_cut() -> None:
    data = VolumeSegmentationTask(patches=2).open_site("site-1", {})
    by_one, by_three = (
        torch.cat([x for x, _ in data.batches("training", batch_size=size, shuffle_seed=5)]) for size in (1, 3)
    )
    assert len(by_one) == data.num_samples("training") == 12
    assert torch.equal(by_one, by_three)
    other = torch.cat([x for x, _ in data.batches("training", batch_size=3, shuffle_seed=6)])
    assert not torch.equal(by_three, other)
    assert data.num_cases("training") == 6


def test_windows_cover_the_whole() -> None:
    task = VolumeSegmentationTask()
    inputs = torch.rand(1, 1, 48, 32, 64)
    pointwise = torch.nn.Conv3d(1, 1, 1)  # what looks at one voxel sees no windows
    with torch.no_grad():
        torch.testing.assert_close(task.outputs(pointwise, inputs), pointwise(inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("network", ["unet", "segresnet"])
def test_a_network_learns_from_a_patch(network: Any) -> None:
    task = VolumeSegmentationTask(network=network)
    outputs = task.build_model()(torch.rand(2, 1, 32, 32, 32))
    loss = task.loss(outputs, torch.ones(2, 1, 32, 32, 32))
    loss.backward()  # type: ignore[no-untyped-call]
    assert outputs.shape == (2, 1, 32, 32, 32)
    assert torch.isfinite(loss)


@pytest.mark.parametrize(("norm", "schedule"), [("instance", "constant"), ("layer", "poly")])
def test_the_rate_falls_with_the_norm_of_all_channels(norm: str, schedule: str) -> None:
    plan = make_plan("fed_avg", task="volume_segmentation", settings={"norm": norm})
    assert (plan.training.schedule, plan.training.learning_rate) == (schedule, 0.003)


def test_only_the_norm_of_all_channels_tells_two_tissues_apart() -> None:
    apart = {}
    for norm in ("instance", "layer"):
        torch.manual_seed(0)
        model = VolumeSegmentationTask(norm=norm).build_model().eval()
        with torch.no_grad():
            one, other = (model(torch.full((1, 1, 32, 32, 32), value)) for value in (0.3, 0.7))
        apart[norm] = float((one - other).abs().max())
    assert apart["instance"] < 0.02 < 0.3 < apart["layer"]


def test_what_is_found_wrongly_in_a_patch_without_the_structure_counts() -> None:
    targets = np.zeros((2, 1, 4, 4, 4))
    targets[0, :, :2] = 1
    targets[1, :, 3] = -1  # outside the volume
    shares = np.random.default_rng(0).uniform(0.1, 0.9, targets.shape)
    logits = torch.from_numpy(np.log(shares / (1 - shares)))
    counts, true = targets >= 0, targets > 0
    dice = 2 * shares[true].sum() / (shares[counts].sum() + true.sum())
    entropies = -np.log(np.where(true, shares, 1 - shares))
    entropy = np.mean([entropies[k][counts[k]].mean() for k in range(2)])
    loss = VolumeSegmentationTask().loss(logits, torch.from_numpy(targets))
    assert float(loss) == pytest.approx(1 - dice + entropy, abs=1e-5)


def test_classes_of_volumes() -> None:
    task = VolumeClassificationTask()
    data = task.open_site("site-2", {})
    inputs, _ = next(iter(data.batches("training", batch_size=4)))
    assert task.build_model()(inputs).shape == (4, 2)
    counts = data.class_counts("training")
    assert counts is not None
    assert int(counts.sum()) == data.num_samples("training") == 32


def test_a_slice_of_a_volume_is_refused(tmp_path: Path) -> None:
    written(tmp_path, np.eye(4), slice=3)
    with pytest.raises(DataError, match="take the key 'slice' out"):
        next(iter(opened(VolumeSegmentationTask(), tmp_path).batches("test", batch_size=1)))


def test_the_2d_task_names_the_ways_out(tmp_path: Path) -> None:
    written(tmp_path, np.eye(4))
    with pytest.raises(DataError, match=r"--slices.*--task volume_segmentation"):
        next(iter(opened(SegmentationTask(), tmp_path).batches("test", batch_size=1)))


@pytest.mark.long
def test_a_run_and_its_mask_in_the_grid_of_the_file(tmp_path: Path) -> None:
    sites = {"north": np.diag([-1.0, 1.0, 1.0, 1.0]), "south": np.eye(4)[[2, 0, 1, 3]]}  # stored in other directions
    for site, affine in sites.items():
        (tmp_path / site).mkdir()
        written(tmp_path / site, affine)
        other = tmp_path / site / "training.nii.gz"
        values = np.random.default_rng(len(site) + ord(site[0])).integers(0, 200, SHAPE).astype(np.int16)
        for split in ("training", "validation", "test"):
            nibabel.save(nibabel.Nifti1Image(values + len(split), affine), other.with_name(f"{split}.nii.gz"))
    settings = {"features": [4, 4, 4, 4, 4, 4], "local_epochs": 1}
    plan = make_plan("fed_avg", task="volume_segmentation", sites=list(sites), num_rounds=1, settings=settings)
    local = {"sites": {site: {"data_root": str(tmp_path / site)} for site in sites}}
    results = run_document(run_local(plan, tmp_path / "run", local))
    assert all(0 <= results["test"][site]["dice"] <= 1 for site in sites)

    predictor = load_predictor(tmp_path / "run", device="cpu")
    predictor.network = torch.nn.Conv3d(1, 1, 1)  # finds what is bright, voxel by voxel
    torch.nn.init.constant_(predictor.network.weight, 100.0)
    assert predictor.network.bias is not None
    torch.nn.init.constant_(predictor.network.bias, -50.0)
    for site, affine in sites.items():
        file = tmp_path / site / "test.nii.gz"
        ((found,),) = [list(predictor(file))]
        mask = label_map(found.probabilities, labels_of(predictor.task), 0.5).numpy()
        write_mask(tmp_path / "mask.nii.gz", code_labels(mask, predictor.task, file), file)
        saved = nibabel.load(tmp_path / "mask.nii.gz")
        np.testing.assert_allclose(saved.affine, affine)
        stored = np.asanyarray(nibabel.load(file).dataobj).astype(float)
        low, high = np.percentile(stored, [1, 99])
        sure = abs((stored - low) / (high - low) - 0.5) > 0.02  # of voxels near the threshold nothing is said
        found_there = np.asanyarray(saved.dataobj) == 1
        assert (found_there == (stored > (low + high) / 2))[sure].all()


def test_a_headers_float32_is_no_further_voxel(tmp_path: Path) -> None:
    given = write_volumes(tmp_path, size=(8, 9, 10), counts=(1, 1, 1))
    for file in [*tmp_path.rglob("*.nii")]:
        volume = nibabel.load(file)
        nibabel.save(nibabel.Nifti1Image(np.asarray(volume.dataobj), np.diag([3.2, 3.2, 3.2, 1.0])), file)
    data = VolumeSegmentationTask(spacing=(3.2, 3.2, 3.2)).open_site("a", given)
    assert data.shapes("training") == [[8.0, 9.0, 10.0]]
